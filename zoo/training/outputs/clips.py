"""Clips to draw, and the decoding of their latents into pixels, which all ranks share.

Letters: n clips, c channels, t frames, h w height and width in latent cells, y x in pixels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zoo.pictures import to_pixels
from zoo.training.shared_codec import shared_codec
from zoo.training.task import share
from zoo.video.codec import TILE


@dataclass
class Clips:
    """Clips to draw, all of one size, and the model's conditions for them: tensors with n rows."""

    size: tuple[int, int, int]  # t h w
    conditions: dict[str, Tensor]
    uncond: dict[str, Tensor] | None  # those of no class or the empty caption, if guidance leads away from them
    titles: list[str]  # the class or the caption
    first: Tensor | None = None  # latent (c, first frames, h, w) that all clips begin with


class Pixels:
    """The stand-in for an autoencoder where a model works on pixels."""

    factor, causal = (1, 1, 1), False

    def __init__(self, channels: int):
        self.channels = channels

    def latent_shape(self, frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        return self.channels, frames, height, width

    def pixel_shape(self, t: int, h: int, w: int) -> tuple[int, int, int]:
        return t, h, w

    def encode(self, frames: Tensor, *, tile: int | None = None) -> Tensor:
        return frames if len(frames) == self.channels else frames.mean(0, keepdim=True)

    def decode(self, latent: Tensor, *, tile: int | None = None) -> Tensor:
        return latent


def decode(
    latents: Tensor, codec: Any, group: dist.ProcessGroup | None = None, *, tile: int | None = TILE
) -> Tensor | None:
    """The pixels (n c t y x), uint8, of latents (n c t h w) that every rank has: on rank 0, and None elsewhere.

    Each rank decodes some frames if the codec takes them one by one, else some clips; only pixels are sent, to rank 0.
    If a side of the clips is above `tile` pixels, the most that one rank decodes at once, all ranks decode each clip
    together, in tiles as large as they can hold. tile=None: they do so without tiles, so without seams.
    """
    n, _, t, h, w = latents.shape
    rank, size = (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)
    frames, height, width = codec.pixel_shape(t, h, w)
    if codec.causal:
        whole = torch.empty(n, 3, frames, height, width, dtype=torch.uint8) if rank == 0 else None
        if size > 1 and (tile is None or max(height, width) > tile):
            shared = shared_codec(codec, group)
            for i in range(n):
                pixels = to_pixels(shared.decode(latents[i], tile=tile and int(tile * size**0.5)))
                if whole is not None:
                    whole[i] = pixels
            return whole
        parts = [to_pixels(codec.decode(latents[i], tile=tile)) for i in share(n, rank, size)]
        return _to_first(parts, whole, n, rank, size, group)
    span = share(n * t, rank, size)
    row = latents.transpose(0, 1).flatten(1, 2)[:, span.start : span.stop]
    parts = list(to_pixels(codec.decode(row, tile=tile)).transpose(0, 1)) if len(span) else []
    channels = 3 if not isinstance(codec, Pixels) else codec.channels
    whole = torch.empty(n * t, channels, height, width, dtype=torch.uint8) if rank == 0 else None
    whole = _to_first(parts, whole, n * t, rank, size, group)
    return None if whole is None else whole.unflatten(0, (n, t)).transpose(1, 2)


def _to_first(
    parts: Sequence[Tensor], whole: Tensor | None, units: int, rank: int, size: int, group: dist.ProcessGroup | None
) -> Tensor | None:
    """Send all ranks' parts, each a `share` of the units, to rank 0, which returns `whole` (units ...) with them."""
    if whole is None:
        if parts:
            dist.send(torch.stack(list(parts)), group=group, group_dst=0)
        return None
    if parts:
        whole[: len(parts)] = torch.stack(list(parts))
    for other in range(1, size):
        if theirs := share(units, other, size):
            dist.recv(whole[theirs.start : theirs.stop], group=group, group_src=other)
    return whole
