"""Pixels to latents and back: autoencoders of diffusers.

They are read from local folders as diffusers saves them, or from the `vae/` of a pipeline's folder. Only safetensors
and the classes listed below are accepted; nothing is downloaded, and no code that a file names is run.
Letters: c channels, t frames, h w height and width.

Latents are (z - shift) * scale, as the pipelines of diffusers pass them to a denoiser. z is the mode of the posterior,
not a sample of it, so that an encoded clip depends only on its pixels, on any number of ranks. The omitted noise is far
below the first noise level of any diffusion.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from zoo.video.pretrained import (
    CodecError,
    configuration,
    from_pretrained,
    library,
    sha256,
    variant_of,
    weights,
)

__all__ = ["AUTOENCODERS", "TILE", "Autoencoder", "CodecError"]

OnStep: TypeAlias = Callable[[int, int], Any]  # (steps done, steps in total)
Values: TypeAlias = float | tuple[float, ...]  # one for all channels, or one a channel

# For each class: latent channels; factor in t; factor in h and w; k, where clips must have 1 + n k frames
AUTOENCODERS: dict[str, Callable[[Any], tuple[int, int, int, int]]] = {
    "AutoencoderKL": lambda m: (m.config.latent_channels, 1, 2 ** (len(m.config.block_out_channels) - 1), 1),
    # decodes two latent frames at a time: with an even number, the first would decode to as many frames as the others
    "AutoencoderKLCogVideoX": lambda m: (
        m.config.latent_channels,
        int(m.config.temporal_compression_ratio),
        2 ** (len(m.config.block_out_channels) - 1),
        2 * int(m.config.temporal_compression_ratio),
    ),
    "AutoencoderKLWan": lambda m: (
        m.config.z_dim,
        2 ** sum(m.config.temperal_downsample),
        2 ** (len(m.config.dim_mult) - 1) * (m.config.patch_size or 1),
        2 ** sum(m.config.temperal_downsample),
    ),
    "AutoencoderKLHunyuanVideo": lambda m: _of_ratios(m),
    "AutoencoderKLMochi": lambda m: _of_ratios(m),
    "AutoencoderKLLTXVideo": lambda m: _of_ratios(m),
}


TILE = 512  # default side of a tile in decoding, in pixels


class Encoding(nn.Module):
    """The encoder of a batch of videos (b c t h w) or images (b c h w), as a module that ranks can parallelize."""

    def __init__(self, module: Any):
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module.encode(x).latent_dist.mode()


class Decoding(Encoding):
    """The decoder of latents, as the same kind of module."""

    def forward(self, x: Tensor) -> Tensor:
        return self.module.decode(x).sample


class Autoencoder:
    """An image or video autoencoder: `Autoencoder.load(path)`.

    `name` is its class in diffusers. `channels`, `factor` (pixels a latent cell, in t, h, w), `causal` (the first frame
    is encoded alone), `shift` and `scale` are as in a Manifest. An image autoencoder encodes each frame separately.
    `encoding` and `decoding` are the modules that compute; they may be replaced.
    """

    def __init__(self, module: Any, path: Path, files: Sequence[Path]):
        self.module, self.path, self.name = module, path, type(module).__name__
        self.channels, frames, side, self.step = AUTOENCODERS[self.name](module)
        self.factor, self.causal = (frames, side, side), self.name != "AutoencoderKL"
        self.shift, self.scale = _normalisation(module, self.channels)
        self._files = files
        self.encoding: nn.Module = Encoding(module)
        self.decoding: nn.Module = Decoding(module)
        self.shared: dict[Any, Autoencoder] = {}  # a parallel copy by group of ranks: zoo/training/shared_codec.py

    @classmethod
    def load(
        cls,
        path: str | Path,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        *,
        variant: str | None = None,
    ) -> "Autoencoder":
        """Load a folder with config.json and diffusion_pytorch_model.safetensors, or a pipeline's folder with `vae/`.

        `variant`, such as fp16: the weights to take where the folder has them in this variant, too.
        CodecError: a file is missing or is not safetensors, or the class is unknown here.
        """
        folder, config = configuration(Path(path), "vae")
        name = str(config.get("_class_name"))
        if name not in AUTOENCODERS:
            raise CodecError(f"{folder}: unknown autoencoder {name}; known are {', '.join(AUTOENCODERS)}")
        noise = config.get("decoder_inject_noise")
        if config.get("timestep_conditioning") or any(noise if isinstance(noise, list) else [noise]):
            raise CodecError(f"{folder}: this {name} decodes with noise and a time step, which is not supported")
        variant = variant_of(folder, "diffusion_pytorch_model", variant)
        files = weights(folder, "diffusion_pytorch_model", variant)
        kind = getattr(library("diffusers"), name)
        module = from_pretrained(kind, folder, torch_dtype=dtype, low_cpu_mem_usage=False, variant=variant)
        return cls(module.to(device).eval().requires_grad_(False), folder, [folder / "config.json", *files])

    @cached_property
    def fingerprint(self) -> str:
        """The sha256 of configuration and weights; the files are read once more, on first use."""
        return sha256(self._files)

    def latent_shape(self, frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """(c, t, h, w) of the latent of a clip; for a size that does not fit, a CodecError that names the nearest."""
        problems = []
        for n, unit, first, step in (
            (frames, "frames", 1, self.step),
            (height, "rows", self.factor[1], self.factor[1]),
            (width, "columns", self.factor[2], self.factor[2]),
        ):
            if n < first or (n - first) % step:
                below = first + (n - first) // step * step
                nearest = " or ".join(str(m) for m in (below, below + step) if m >= first)
                problems.append(f"{n} {unit} (take {nearest})")
        if problems:
            raise CodecError(f"{self.name} at {self.path} cannot encode {', '.join(problems)}")
        c, (ft, fh, fw) = self.channels, self.factor
        return c, 1 + (frames - 1) // ft, height // fh, width // fw

    def pixel_shape(self, t: int, h: int, w: int) -> tuple[int, int, int]:
        """(frames, height, width) of the decoded clip of a latent of (t, h, w) cells."""
        if (t - 1) * self.factor[0] % self.step:
            below = 1 + (t - 1) * self.factor[0] // self.step * self.step // self.factor[0]
            raise CodecError(
                f"{self.name} at {self.path} cannot decode {t} latent frames "
                f"(take {below} or {below + self.step // self.factor[0]})"
            )
        return 1 + (t - 1) * self.factor[0], h * self.factor[1], w * self.factor[2]

    @torch.no_grad()
    def encode(self, frames: Tensor, *, tile: int | None = None, on_step: OnStep | None = None) -> Tensor:
        """The latent [c, t, h, w] of frames [3, t, h, w] in [-1, 1]: float32, on the CPU.

        Frames are encoded whole. With `tile`, they are encoded in squares of `tile` pixels that overlap by a quarter
        and are blended: less memory, and a slightly different latent.
        """
        if frames.ndim != 4 or frames.shape[0] != 3:
            raise CodecError(f"expected frames [3, t, h, w], got {list(frames.shape)}")
        shape = self.latent_shape(*frames.shape[1:])
        z = self._in_tiles(self.encoding, frames, True, tile, on_step)
        if z.shape != shape:
            raise CodecError(f"{self.path}: config.json promises latents {list(shape)}, and {list(z.shape)} came out")
        return (z - self._channel(self.shift)) * self._channel(self.scale)

    @torch.no_grad()
    def decode(self, latent: Tensor, *, tile: int | None = TILE, on_step: OnStep | None = None) -> Tensor:
        """The pixels [3, t, h, w] in [-1, 1] of a latent [c, t, h, w]: float32, on the CPU.

        Frames are decoded in squares of `tile` pixels that overlap by a quarter and are blended (None: whole frames);
        an image autoencoder decodes a few frames at a time. `on_step(done, total)` is called after each piece.
        """
        if latent.ndim != 4 or latent.shape[0] != self.channels:
            raise CodecError(f"expected a latent [{self.channels}, t, h, w], got {list(latent.shape)}")
        shape = self.pixel_shape(*latent.shape[1:])
        z = latent.float().cpu() / self._channel(self.scale) + self._channel(self.shift)
        pixels = self._in_tiles(self.decoding, z, False, tile, on_step)
        assert pixels.shape == (3, *shape), (pixels.shape, shape)
        return pixels.clamp_(-1, 1)

    def _in_tiles(
        self, apply: Callable[[Tensor], Tensor], x: Tensor, encoding: bool, tile: int | None, on_step: OnStep | None
    ) -> Tensor:
        """`apply` on the tiles of x, blended; tensors stay on the CPU, except for the current piece."""
        side = self.factor[1]
        before, after = (side, 1) if encoding else (1, side)
        cells = max(2, tile // side) if tile else max(x.shape[-2:])
        overlap = cells // 4 if cells >= 4 else 1
        rows, columns = (_spans(n // before, cells, overlap) for n in x.shape[-2:])
        area = max(1, prod(min(cells, n // before) * side for n in x.shape[-2:]))
        chunk = x.shape[1] if self.causal else max(1, PIXELS // area)
        at = range(0, x.shape[1], chunk)
        steps, done = len(rows) * len(columns) * len(at), 0
        out: Tensor | None = None
        weights = torch.zeros(1, 1, x.shape[-2] // before * after, x.shape[-1] // before * after)
        for top, bottom in rows:
            for left, right in columns:
                pieces = []
                for start in at:
                    piece = x[:, start : start + chunk, top * before : bottom * before, left * before : right * before]
                    pieces.append(self._apply(apply, piece))
                    done += 1
                    if on_step:
                        on_step(done, steps)
                y = torch.cat(pieces, 1)
                if len(rows) == len(columns) == 1:
                    return y
                if out is None:
                    out = torch.zeros(*y.shape[:2], *weights.shape[2:])
                window = (..., slice(top * after, bottom * after), slice(left * after, right * after))
                weight = _ramp(rows, top, bottom, after)[:, None] * _ramp(columns, left, right, after)
                out[window] += y * weight
                weights[window] += weight
        assert out is not None
        return out.div_(weights)

    def _apply(self, apply: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """`apply` on one piece [c, t, h, w]: as one video, or as a batch of images."""
        x = x.to(self.module.device, self.module.dtype)
        y = apply(x[None])[0] if self.causal else apply(x.transpose(0, 1)).transpose(0, 1)
        return y.float().cpu()

    def _channel(self, values: Values) -> Tensor:
        return torch.tensor(values).view(-1, 1, 1, 1)


# ----------------------------------------------------------------------------------------------------------- tiles

PIXELS = 2**20  # in the frames that an image autoencoder processes at once


def _spans(n: int, size: int, overlap: int) -> list[tuple[int, int]]:
    """The begin and end of the fewest pieces of `size` that cover 0..n and overlap by at least `overlap`."""
    if n <= size:
        return [(0, n)]
    return [(min(at, n - size), min(at, n - size) + size) for at in range(0, n - overlap, size - overlap)]


def _ramp(spans: Sequence[tuple[int, int]], begin: int, end: int, scale: int) -> Tensor:
    """The blending weight of a piece along one dim, `scale` values a cell: linear ramps where neighbours overlap."""
    weight = torch.ones((end - begin) * scale)
    place = spans.index((begin, end))
    for flip, shared in (
        (False, spans[place - 1][1] - begin if place else 0),
        (True, end - spans[place + 1][0] if place + 1 < len(spans) else 0),
    ):
        n = shared * scale
        ramp = torch.ones_like(weight)
        ramp[:n] = (torch.arange(n) + 0.5) / max(n, 1)
        weight = weight * (ramp.flip(0) if flip else ramp)
    return weight


# -------------------------------------------------------------------------------------------------------- classes


def _of_ratios(module: Any) -> tuple[int, int, int, int]:
    frames = module.temporal_compression_ratio
    return module.config.latent_channels, frames, module.spatial_compression_ratio, frames


def _normalisation(module: Any, channels: int) -> tuple[Values, Values]:
    """(shift, scale) of (z - shift) * scale, under any of the names that diffusers' classes use."""
    config = module.config
    scaling = config.get("scaling_factor") or 1.0
    known = dict(config) | dict(module.named_buffers(recurse=False))  # LTX has the two among its weights
    mean, std = known.get("latents_mean"), known.get("latents_std")
    shift = [config.get("shift_factor") or 0.0] * channels if mean is None else [float(v) for v in mean]
    scale = [scaling] * channels if std is None else [scaling / float(v) for v in std]
    if not len(shift) == len(scale) == channels:
        raise CodecError(f"latents_mean and latents_std of config.json must have {channels} values, one a channel")
    return _shortest(shift), _shortest(scale)


def _shortest(values: list[float]) -> Values:
    return values[0] if len(set(values)) == 1 else tuple(values)
