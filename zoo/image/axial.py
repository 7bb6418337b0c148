"""Axial Transformer (Ho et al. 2019, arXiv 1912.12180): an autoregressive model of images by attention along one axis.

The value of a pixel is predicted from all previous values, in the order channel, row, column:

    exterior  sees all previous channels: blocks along rows and columns alternate
    outer     sees the rows above: blocks along rows and causal blocks along columns alternate; the result moves down
    inner     sees the pixels to the left: causal blocks along rows, on the image moved right plus the outer result

Each channel is a slice; slices share weights. An image of one channel needs no exterior. The paper trains on one slice
of an image per step; here all slices are computed.

Images are sampled as in the paper: `SamplingCache` has the exterior of a channel and the outer blocks of every row
above, so that a value takes only the inner blocks of its row.

Sizes of the authors' code (google-research/axial), for images of three channels with 256 levels:

    size        hidden  heads   exterior, outer, inner blocks
    imagenet32    1536     16   8, 8, 8
    imagenet64    2048     16   8, 8, 8

Letters: b images, c channels of an image, h w rows and columns of pixels, d hidden channels, k levels of a pixel, e
features of a pixel from previous channels. Blocks take slices, ((b c) h w d); their stages have c in brackets, since
channels are too few to be sharded.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zoo.image.axial_layers import (
    Block,
    ColumnCache,
    Convolution,
    Logits,
    Positions,
    Previous,
    RowColumn,
    SamplingCache,
    Shift,
)
from zoo.init import truncated_normal
from zoo.layers import expect

SIZES: dict[str, dict[str, Any]] = {
    "imagenet32": {"hidden": 1536, "dropout": 0.04},
    "imagenet64": {"hidden": 2048, "height": 64, "width": 64},
    "test": {
        **{"hidden": 16, "heads": 2, "exterior": 2, "outer": 4, "inner": 2},
        **{"height": 12, "width": 12, "channels": 1, "levels": 6},
    },
}


@dataclass(frozen=True)
class Config:
    hidden: int = 1536
    heads: int = 16
    exterior: int = 8  # blocks, half of them along rows and half along columns
    outer: int = 8  # blocks, in the same halves
    inner: int = 8  # blocks along rows
    mlp: int = 1  # hidden channels of an MLP, as a multiple of `hidden`
    height: int = 32  # of the largest image
    width: int = 32
    channels: int = 3
    levels: int = 256
    num_classes: int | None = None  # class-conditional, which the paper's models are not
    dropout: float = 0.0  # of a sublayer's output, before it is added to the residual

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            raise ValueError(f"hidden={self.hidden} does not divide into heads={self.heads}")
        for name in ("exterior", "outer"):
            if getattr(self, name) % 2:
                raise ValueError(
                    f"{name}={getattr(self, name)} is odd, but blocks come in pairs, along rows and along columns"
                )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} is not a share in [0, 1)")
        for name in ("inner", "channels", "levels", "height", "width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: take at least 1")


class AxialImage(nn.Module):
    """``forward(image, label=None)``

    image (b c h w), integers from 0 to ``levels - 1``, and label (b) with ``num_classes`` -> (b c h w k), logits
    of every value given the previous ones. Images may be smaller than ``height`` and ``width``.
    """

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        row, column = "(b [c]) h [w d]", "(b [c]) [h] w [d]"
        self.cores, self.tensor_parallel = dict[str, str](), dict[str, str]()
        self.stages = {
            "": "image=b [c] h w -> b [c] h w k",
            "embed": "(b [c]) h w -> (b [c]) h w d",
            "outer.*.row": row,
            "outer.*.column": column,
            "down": "(b [c]) [h] w d",
            "right": "(b [c]) h [w] d",
            "inner.*": row,
            "logits": "(b [c]) h w [d] -> (b [c]) h w k",
        }
        if config.channels > 1:
            self.stages["previous"] = "b [c h] w -> (b [c]) h w e"
            self.stages["convolution"] = "(b [c]) h [w e] -> (b [c]) h w d"
            self.stages["exterior.*.row"] = row
            self.stages["exterior.*.column"] = column

        dim = config.hidden
        self.label = nn.Embedding(config.num_classes, dim) if config.num_classes else None
        if config.channels > 1:
            self.previous = Previous(config.levels)
            self.convolution = Convolution(2 * config.channels, dim)
            self.exterior_positions = Positions(config)
            self.exterior = nn.ModuleList(RowColumn(config, causal=False) for _ in range(config.exterior // 2))
        self.embed = nn.Embedding(config.levels, dim)
        self.positions = Positions(config)
        self.outer = nn.ModuleList(RowColumn(config, causal=True) for _ in range(config.outer // 2))
        self.down, self.right = Shift("down"), Shift("right")
        self.inner = nn.ModuleList(Block(config, "row", causal=True) for _ in range(config.inner))
        self.logits = Logits(dim, config.levels)
        self.init_weights()

    def forward(
        self,
        image: Tensor,
        label: Tensor | None = None,
        at: tuple[int, int] | None = None,
        drawing: SamplingCache | None = None,
    ) -> Tensor:
        config = self.config
        expect("label", label, self.label is not None, f"num_classes={config.num_classes}")
        b, c, h, w = image.shape
        if c != config.channels or h > config.height or w > config.width:
            raise ValueError(
                f"an image of {c} channels of {h} x {w} pixels: a model built with channels={config.channels}, "
                f"height={config.height}, width={config.width} takes as many channels and at most as many pixels"
            )
        if at is not None and drawing is not None:
            return self.row_logits(image, label, at, drawing)
        context = self.context(image, label)
        pixels = self.embed(image.flatten(0, 1))
        above = self.positions(pixels) if context is None else self.positions(pixels) + context
        for pair in self.outer:
            above = pair(above)
        x = self.positions(self.right(pixels) + self.down(above))
        if context is not None:
            x = x + context
        for block in self.inner:
            x = block(x)
        return self.logits(x).unflatten(0, (b, c))

    def context(self, image: Tensor, label: Tensor | None) -> Tensor | None:
        """Features of every channel from the label and previous channels, ((b c) h w d)."""
        c = image.shape[1]
        context = None if self.label is None else self.label(label).repeat_interleave(c, dim=0)[:, None, None]
        if c > 1:
            x = self.exterior_positions(self.convolution(self.previous(image, self.logits.linear.weight.dtype)))
            context = x if context is None else x + context
            for pair in self.exterior:
                context = pair(context)
        return context

    def drawing(self) -> SamplingCache:
        """An empty cache, for faster sampling by ``zoo.image.autoregressive.sample``."""
        return SamplingCache()

    def row_logits(self, image: Tensor, label: Tensor | None, at: tuple[int, int], drawing: SamplingCache) -> Tensor:
        """The logits (b w k) of the row ``at`` (channel, row), in an image whose previous values are sampled.

        A channel's exterior is computed at its first row, the outer blocks of a row when the next row begins.
        """
        channel, row = at
        if channel != drawing.channel:
            context = self.context(image, label)
            drawing.channel, drawing.row, drawing.seen = channel, -1, None
            drawing.context = None if context is None else context.unflatten(0, (len(image), -1))[:, channel]
            drawing.above = [ColumnCache() for _ in self.outer]
        if row != drawing.row and row > 0:
            above = self.add_context(self.positions(self.pixels(image, channel, row - 1), row - 1), row - 1, drawing)
            for pair, rows in zip(self.outer, drawing.above):
                above = pair(above, rows)
            drawing.seen = above
        drawing.row = row
        x = self.right(self.pixels(image, channel, row))
        x = self.positions(x if drawing.seen is None else x + drawing.seen, row)
        x = self.add_context(x, row, drawing)
        for block in self.inner:
            x = block(x)
        return self.logits(x)[:, 0]

    def pixels(self, image: Tensor, channel: int, row: int) -> Tensor:
        return self.embed(image[:, channel, row : row + 1])

    def add_context(self, x: Tensor, row: int, drawing: SamplingCache) -> Tensor:
        """A row (b 1 w d) plus its features from the label and previous channels."""
        context = drawing.context
        return x if context is None else x + (context if context.shape[1] == 1 else context[:, row : row + 1])

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialise every parameter in place, after ``to_empty`` too, as the authors do.

        Weights have variance 1 / inputs, truncated at two standard deviations; for the last layer of every residual
        branch and the logits, 1e-10 times that; embeddings and positions have std 5 / sqrt(hidden).
        """
        blocks = [module for module in self.modules() if isinstance(module, Block)]
        last = {self.logits.linear, *(layer for block in blocks for layer in (block.attention.out, block.mlp.down))}
        for module in self.modules():
            if isinstance(module, nn.Linear):
                scale = 1e-10 if module in last else 1.0
                truncated_normal(module.weight, (scale / module.in_features) ** 0.5)
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.LayerNorm):
                nn.init.ones_(module.weight)
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding | Positions):
                for param in module.parameters():
                    nn.init.normal_(param, std=5 * self.config.hidden**-0.5)

    def example_inputs(
        self, batch: int = 1, *, height: int | None = None, width: int | None = None
    ) -> dict[str, Tensor]:
        """Random inputs of the forward, by name, on the default device; by default the largest image."""
        config = self.config
        shape = batch, config.channels, height or config.height, width or config.width
        inputs = {"image": torch.randint(config.levels, shape)}
        if config.num_classes:
            inputs["label"] = torch.randint(config.num_classes, (batch,))
        return inputs
