"""The formats in which a switch travels in fewer bits, with a scale for each block of numbers.

A rank packs the flat tensor that it sends into bytes: for each destination the elements, followed by their scales, so
that one all-to-all carries both. A block is 128 consecutive elements for one destination, or the rest at the end. So
the number of bytes depends only on the number of elements, and not on their shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

BLOCK = 128
TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Format:
    """A format in which each element has another dtype.

    stochastic: round up or down at random, so that the mean is unbiased; else to the nearest.
    """

    name: str
    dtype: torch.dtype
    stochastic: bool = False

    def nbytes(self, count: int) -> int:
        """Bytes of `count` elements for one destination."""
        return count * self.dtype.itemsize

    def pack(self, x: Tensor, splits: Sequence[int], seed: int) -> Tensor:
        """The bytes of a flat tensor, of which `splits` elements go to each rank."""
        raw = x.new_empty(sum(map(self.nbytes, splits)), dtype=torch.uint8)
        for at, (numbers, room) in enumerate(self.alike(x, raw, splits)):
            self.write(numbers, room, seed + at)
        return raw

    def unpack(self, raw: Tensor, splits: Sequence[int], into: Tensor) -> Tensor:
        """Unpack the bytes from each rank into a flat tensor, and return it."""
        for numbers, room in self.alike(into, raw, splits):
            self.read(room, numbers)
        return into

    def alike(self, x: Tensor, raw: Tensor, splits: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
        """The elements and the bytes of neighbouring ranks with equal counts, one rank a row."""
        counted = [(size, len(list(run))) for size, run in groupby(splits)]
        xs = x.split([size * times for size, times in counted])
        raws = raw.split([self.nbytes(size) * times for size, times in counted])
        for (size, times), numbers, room in zip(counted, xs, raws):
            if size:
                yield numbers.view(times, size), room.view(times, self.nbytes(size))

    def write(self, x: Tensor, raw: Tensor, seed: int) -> None:
        """Write rows of elements as bytes."""
        for block, room in zip(blocks(x), blocks(raw.view(self.dtype))):
            if self.stochastic:
                wide = block.float()
                by_chance = dithered(wide.clone(), noise(wide, seed), self.dtype)
                block = torch.where(wide.isfinite(), by_chance, wide)
            room.copy_(block)

    def read(self, raw: Tensor, into: Tensor) -> None:
        """Read rows of elements from bytes."""
        into.copy_(raw.view(self.dtype))


@dataclass(frozen=True)
class Scaled(Format):
    """A format with eight bits an element, and a float32 scale for each block: its largest magnitude over `top`.

    The scale of a block with a NaN or an infinity is negative. There `top` stands for an infinity, `nan` for a NaN, and
    the largest finite magnitude is `below`, the code before `top`.
    """

    top: float = 0.0
    below: float = 0.0
    nan: float = float("nan")

    def nbytes(self, count: int) -> int:
        return count + 4 * -(-count // BLOCK)

    def write(self, x: Tensor, raw: Tensor, seed: int) -> None:
        scales = []
        for at, (block, room) in enumerate(zip(blocks(x), blocks(raw[:, : x.shape[1]].view(self.dtype)))):
            numbers, scale = self.scaled(block.float())
            if self.stochastic:
                numbers = dithered(numbers, noise(numbers, seed + at), self.dtype)
            room.copy_(numbers if self.dtype.is_floating_point else numbers.round_())
            scales.append(scale.flatten(1))
        raw[:, x.shape[1] :] = torch.cat(scales, 1).view(torch.uint8)

    def scaled(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Blocks divided by their scales, and the scales; `x` stays as it is."""
        largest = x.nan_to_num(0.0, 0.0, 0.0).abs_().amax(-1, keepdim=True)
        odd = x.sum(-1, keepdim=True).isfinite().logical_not_()
        scale = (largest / torch.where(odd, self.below, self.top)).clamp_(min=TINY)  # also if all are zero
        return (x / scale).nan_to_num_(self.nan, self.top, -self.top), torch.where(odd, -scale, scale)

    def read(self, raw: Tensor, into: Tensor) -> None:
        size = into.shape[1]
        scales = raw[:, size:].clone(memory_format=torch.contiguous_format)  # the bytes may not be aligned
        scales = scales.view(torch.float32).unsqueeze(-1)
        codes, full = raw[:, :size].view(self.dtype), size // BLOCK
        for code, room, scale in zip(blocks(codes), blocks(into), (scales[:, :full], scales[:, full:])):
            numbers = code.float()
            if not self.dtype.is_floating_point:
                numbers.masked_fill_(numbers == self.nan, float("nan"))
            finite = numbers.abs().le_(torch.where(scale < 0, self.below, float("inf")))
            room.copy_(numbers.div_(finite).mul_(scale.abs()))  # x / 0 is an infinity


def blocks(x: Tensor) -> list[Tensor]:
    """Rows as full blocks (rows, blocks, elements), and the rest of each row in the same form."""
    size = x.shape[1]
    full = size - size % BLOCK
    tail = [x[:, full:].unsqueeze(1)] if full < size else []
    return [x[:, :full].unflatten(1, (full // BLOCK, BLOCK)), *tail]


def dithered(x: Tensor, noise: Tensor, dtype: torch.dtype) -> Tensor:
    """Finite numbers, rounded in place to values of a dtype: up with the probability that keeps the mean."""
    if not dtype.is_floating_point:
        return x.add_(noise).floor_()
    of = torch.finfo(dtype)
    step = x.view(torch.int32).bitwise_and(0xFF << 23).view(torch.float32)  # the power of two below each number
    step.clamp_(min=of.smallest_normal).mul_(of.eps)
    return x.div_(step).add_(noise).floor_().mul_(step)


def noise(x: Tensor, seed: int) -> Tensor:
    """Multiples of 2**-16 in [0, 1) for each element of blocks, equal for equal seeds and elements.

    No random generator is involved: each block starts from a hash of the seed, its place and its contents, and goes on
    in steps of the golden ratio.
    """
    mixed = x.view(torch.int32).sum(-1, keepdim=True)
    mixed += (torch.arange(mixed.numel(), device=x.device).view_as(mixed) + seed) * 0x1E3779B97F4A7C15
    for _ in range(2):
        mixed = (mixed ^ (mixed >> 29)) * 0x3F58476D1CE4E5B9
    steps = torch.arange(x.shape[-1], device=x.device, dtype=torch.int32) * 40503
    return ((mixed >> 40).to(torch.int32) + steps).bitwise_and_(0xFFFF).float().mul_(2**-16)


FORMATS = {
    f.name: f
    for f in (
        Format("bf16", torch.bfloat16),
        Scaled("fp8", torch.float8_e4m3fn, top=448.0, below=416.0),
        Scaled("int8", torch.int8, top=127.0, below=126.0, nan=-128.0),
    )
}
