"""Video models of scans: residual blocks that scan the patches of each frame, or the frames of each patch.

``order`` "st" alternates space and time; "sst" scans space twice, then time. The models differ in their mixers.

Letters: `zoo/video/__init__.py`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from zoo.init import init_embeddings, init_linear, init_modulation, init_zero
from zoo.layers import LabelEmbed, ScaleShiftLinear, TimestepEmbed, expect, modulate, split_modulation
from zoo.scan import at_least_float32
from zoo.video.blocks import FinalLinear, PatchEmbed, check_shape, unpatchify, video_inputs


@dataclass(frozen=True)
class ScanConfig:
    hidden: int = 768
    depth: int = 24  # blocks, each over space or over time
    order: str = "st"  # or "sst": space and time as blocks scan them, repeated
    patch: tuple[int, int, int] = (1, 2, 2)
    in_channels: int = 4
    learn_sigma: bool = False  # twice the channels out: a mean and a variance (iddpm)
    num_classes: int | None = None  # class-conditional: label num_classes is the null class of classifier-free guidance

    def __post_init__(self) -> None:
        object.__setattr__(self, "patch", tuple(self.patch))
        if self.order not in ("st", "sst"):
            raise ValueError(f"order={self.order!r}: expected 'st' or 'sst'")
        if self.depth < 1 or self.depth % len(self.order):
            raise ValueError(f"depth={self.depth}: order={self.order!r} needs a multiple of {len(self.order)}")
        check_shape(self.hidden, 1, self.patch)

    @property
    def out_channels(self) -> int:
        return self.in_channels * (2 if self.learn_sigma else 1)


class Norm(nn.Module):
    """RMSNorm, or with bias LayerNorm, over c in the input's dtype; weight and bias are applied in their dtype."""

    def __init__(self, dim: int, eps: float = 1e-5, bias: bool = False):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))
        self.bias = nn.Parameter(torch.empty(dim)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        normalise = F.rms_norm if self.bias is None else F.layer_norm
        x = normalise(x, x.shape[-1:], eps=self.eps).to(self.weight.dtype) * self.weight
        return x if self.bias is None else x + self.bias

    def init_weights(self) -> None:
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Block(nn.Module):
    """x (b t s c) += gate * mixer(modulate(norm(x))), for each mixer (b n c) in turn, modulated by adaLN-Zero.

    Mixers run over the patches of every frame (``over="s"``) or over the frames of every patch ("t"); with ``reverse``
    from the last to the first.
    """

    def __init__(self, dim: int, over: str, norms: Sequence[Norm], mixers: Sequence[nn.Module], reverse: bool = False):
        super().__init__()
        self.fold = {"s": "b t s c -> (b t) s c", "t": "b t s c -> (b s) t c"}[over]
        self.unfold = {"s": "(b t) s c -> b t s c", "t": "(b s) t c -> b t s c"}[over]
        self.reverse = reverse
        self.modulation = ScaleShiftLinear(dim, 3 * len(mixers))
        self.norms = nn.ModuleList(norms)
        self.mixers = nn.ModuleList(mixers)

    def forward(self, x: Tensor, cond: Tensor) -> Tensor:
        modulation = iter(split_modulation(self.modulation(cond)))
        for norm, mixer, shift, scale, gate in zip(self.norms, self.mixers, modulation, modulation, modulation):
            y = rearrange(modulate(norm(x), shift, scale), self.fold)
            y = mixer(y.flip(1)).flip(1) if self.reverse else mixer(y)
            x = x + gate * rearrange(y, self.unfold, b=len(x))
        return x


class ScanModel(nn.Module):
    """``forward(x, timestep, label=None)``

    x (b i t h w), timestep (b) on the scale 0 to 1000, label (b) with ``num_classes`` -> (b o t h w). Any number of
    frames, of any size. Residuals are float32 if weights are half precision.

    ``block(over, index)`` builds one block; the index counts blocks over space ("s") or over time ("t").
    """

    def __init__(self, config: ScanConfig, block: Callable[[str, int], Block]):
        super().__init__()
        self.config = config
        self.cores, self.tensor_parallel = dict[str, str](), dict[str, str]()
        self.stages = {
            "": "x=b [i] t h w -> b [o] t h w",
            "embed": "b [i] t [h w] -> b t [s c]",
            "spatial.*": "b t [s c], cond=b [k]",
            "temporal.*": "b [t] s [c], cond=b [k]",
            "final": "b t s [c], cond=b [c] -> b t s [k]",
        }
        dim, cycles = config.hidden, config.depth // len(config.order)
        self.t_embed = TimestepEmbed(dim)
        self.label_embed = LabelEmbed(config.num_classes, dim) if config.num_classes else None
        self.embed = PatchEmbed(config.in_channels, dim, config.patch)
        self.spatial = nn.ModuleList(block("s", i) for i in range(cycles * config.order.count("s")))
        self.temporal = nn.ModuleList(block("t", i) for i in range(cycles * config.order.count("t")))
        self.final = FinalLinear(dim, config.out_channels, config.patch, ScaleShiftLinear(dim, 2))
        self.init_weights()

    def forward(self, x: Tensor, timestep: Tensor, label: Tensor | None = None) -> Tensor:
        expect("label", label, self.label_embed is not None, f"num_classes={self.config.num_classes}")
        cond = self.t_embed(timestep)
        if self.label_embed is not None:
            cond = cond + self.label_embed(label)

        size = x.shape[-2], x.shape[-1]
        x = at_least_float32(self.embed(x))
        for block in self.running():
            x = block(x, cond)
        return unpatchify(self.final(x.to(cond.dtype), cond), self.config.patch, size)

    def running(self) -> Iterator[Any]:
        """The blocks in the order they run."""
        blocks, order = {"s": iter(self.spatial), "t": iter(self.temporal)}, self.config.order
        return (next(blocks[order[i % len(order)]]) for i in range(self.config.depth))

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialise every parameter in place, after ``to_empty`` too: mixers as their papers do, the rest as DiT does.

        Linear layers Xavier, biases zero; embeddings at std 0.02. The final layer and adaLN-Zero's linear layers, and
        with them all gates, start at zero.
        """
        init_linear(self.embed)
        init_linear(self.t_embed)
        init_embeddings(self.t_embed, self.label_embed)
        init_modulation(self)
        for block in (*self.spatial, *self.temporal):
            for part in (*block.norms, *block.mixers):
                part.init_weights()
        init_zero(self.final.linear)

    def example_inputs(self, batch: int = 1, *, frames: int = 5, height: int = 8, width: int = 8) -> dict[str, Tensor]:
        """Random inputs of the forward, by name, on the default device; lengths in latent cells."""
        config = self.config
        return video_inputs(batch, config.in_channels, frames, height, width, config.num_classes or 0)
