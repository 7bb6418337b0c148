"""Variants 3 and 4 of Latte (Ma et al., arXiv 2401.03048, section 3.2, figure 2); `latte.py` has their Config:

3. blocks of three sublayers, each with its residual: spatial attention, temporal attention, MLP
4. blocks whose attention is split by heads: on one normed input, half of the heads attend within the frame and half
   across time; their outputs are added, then MLP

Details that the paper leaves open follow variant 1. Every sublayer has its own shift, scale and gate, so that variant 3
takes 9 rows a block; the two halves of attention in variant 4 share theirs. Heads keep their width, so that a block of
variant 4 has as many weights as one of variant 1. The temporal table is added before the first temporal attention (3)
or before the first block (4); attention to text follows the spatial attention (3) or the sum of both (4).

Letters: `zoo/video/__init__.py`.
"""

from torch import Tensor, nn

from zoo.attention import CrossAttention, SelfAttention
from zoo.layers import MLP, add_time, modulate, norm, split_modulation
from zoo.video.blocks import FusedMLP, ModulatedNorm
from zoo.video.latte import Config, Latte, Modulation


class Sublayer(nn.Module):
    """A modulated ``layer`` with its residual (b t s c), then attention to text if ``text_heads`` is not 0."""

    def __init__(self, dim: int, layer: nn.Module, modulation: nn.Module, text_heads: int = 0, positions: bool = False):
        super().__init__()
        self.positions = positions
        self.modulation = modulation  # of 3 rows
        self.layer = layer
        self.cross = CrossAttention(dim, text_heads) if text_heads else None

    def forward(self, x: Tensor, cond: Tensor, context: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        shift, scale, gate = split_modulation(self.modulation(cond))
        if self.positions and x.shape[1] > 1:
            x = add_time(x)
        x = x + gate * self.layer(modulate(norm(x), shift, scale))
        if self.cross is not None:
            assert context is not None
            x = x + self.cross(x, context, mask)
        return x


class ThreeSublayers(nn.Module):
    """Variant 3: spatial attention, temporal attention and an MLP, each with its residual."""

    def __init__(self, dim: int, heads: int, modulation: Modulation, text: bool, first: bool):
        super().__init__()
        self.spatial = Sublayer(dim, SelfAttention(dim, heads, "s"), modulation(dim, 3), text_heads=heads * text)
        self.temporal = Sublayer(dim, SelfAttention(dim, heads, "t"), modulation(dim, 3), positions=first)
        self.mlp = Sublayer(dim, MLP(dim, 4 * dim), modulation(dim, 3))

    def forward(self, x: Tensor, cond: Tensor, context: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        spatial, temporal, mlp = modulations(cond, x.shape[-1], 3, 3, 3)
        x = self.spatial(x, spatial, context, mask)
        x = self.temporal(x, temporal)
        return self.mlp(x, mlp)


class SplitHeads(nn.Module):
    """Variant 4: half of the heads over space, half over time, on one input; then their sum and an MLP."""

    def __init__(self, dim: int, heads: int, modulation: Modulation, text: bool):
        super().__init__()
        self.norm = ModulatedNorm(modulation(dim, 2))
        self.spatial = SelfAttention(dim, heads // 2, "s", width=dim // 2)
        self.temporal = SelfAttention(dim, heads // 2, "t", width=dim // 2)
        self.fused = FusedMLP(dim, modulation(dim, 4), heads if text else None)

    def forward(self, x: Tensor, cond: Tensor, context: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        first, second = modulations(cond, x.shape[-1], 2, 4)
        y = self.norm(x, first)
        return self.fused(x, self.spatial(y) + self.temporal(y), second, context, mask)


def modulations(cond: Tensor, dim: int, *rows: int) -> list[Tensor]:
    """The conditioning of each stage of a block: its rows of adaLN-single's vector (b k), or the embedding (b dim)."""
    if cond.shape[-1] == dim:
        return [cond] * len(rows)
    return list(cond.split([n * dim for n in rows], dim=-1))


class LatteSublayers(Latte):
    """Variant 3. Its ``forward`` is that of ``Latte``."""

    STAGES = {
        "": "x=b [i] t h w -> b [o] t h w",
        "embed": "b [i] t [h w] -> b t [s c]",
        "blocks.*.spatial": "b t [s c], cond=b [k], context=b [l c], mask=b [l]",
        "blocks.*.temporal": "b [t] s [c], cond=b [k]",
        "blocks.*.mlp": "b t s [c], cond=b [k]",
        "final": "b t s [c], cond=b [c] -> b t s [k]",
    }
    CORES = {"blocks.*.spatial.layer.core": SelfAttention.CORE["s"]}
    ROWS = 9

    def add_blocks(self, config: Config, modulation: Modulation, text: bool) -> list[str]:
        layers = range(config.depth)
        self.blocks = nn.ModuleList(
            ThreeSublayers(config.hidden, config.heads, modulation, text, first=i == 0) for i in layers
        )
        return ["blocks"]


class LatteSplitHeads(Latte):
    """Variant 4. Its ``forward`` is that of ``Latte``."""

    STAGES = {
        "": "x=b [i] t h w -> b [o] t h w",
        "embed": "b [i] t [h w] -> b t [s c]",
        "blocks.*.norm": "b t s [c], cond=b [k]",
        "blocks.*.spatial": "b t [s c]",
        "blocks.*.temporal": "b [t] s [c]",
        "blocks.*.fused": "b t s [c], b t s [c], cond=b [k], context=b [l c], mask=b [l]",
        "final": "b t s [c], cond=b [c] -> b t s [k]",
    }
    CORES = {"blocks.*.spatial.core": SelfAttention.CORE["s"]}

    def add_blocks(self, config: Config, modulation: Modulation, text: bool) -> list[str]:
        layers = range(config.depth)
        self.blocks = nn.ModuleList(SplitHeads(config.hidden, config.heads, modulation, text) for _ in layers)
        return ["blocks"]

    def run(self, x: Tensor, cond: Tensor, context: Tensor | None, mask: Tensor | None) -> Tensor:
        return super().run(add_time(x) if x.shape[1] > 1 else x, cond, context, mask)
