"""DSP on more ranks than a dim has places: N = N1 · N2, a switch over N1 ranks and Ulysses or a ring over N2.

Under DSP a stage that computes over s is sharded along t, and t may be shorter than N: 16 frames on 32 ranks. Between
stages the activation, of M bytes, is sharded along s over all N ranks. For such a stage, groups of N1 ranks switch it
to t, and N2 ranks share the s of a frame; attention spans these N2 ranks:

    rank r = i2 · N1 + i1        outside: part r of s        inside: part i1 of t, and the s that N1 ranks had together

The two switches of a stage (paper, equation 10) send 2 M/N, of which (N1-1)/N1 travel, as in DSP. Attention inside
sends what Ulysses or a ring sends on N2 ranks. With N2 = 1 this is DSP, with N1 = 1 the inner method.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsp.comm.layout import Cut, factor
from dsp.planner import chunk_sizes
from dsp.stages.methods import CommBytes, Peers, RankPart, Received
from dsp.stages.notation import BATCH_NAMES, NotationError, TensorPattern
from dsp.stages.stage import Stage, cut_for


@cache
def switch_ranks(n: int, size: int) -> int:
    """N1: the largest divisor of n such that each of N1 ranks has a chunk of a dim of `size` that is not empty."""
    return next(d for d in range(min(n, size), 0, -1) if n % d == 0 and chunk_sizes(size, d)[-1])


class Factors(NamedTuple):
    """How n ranks share a stage: N1 = `switch` ranks share the dim `dim`, N2 = `within` the dim computed over."""

    dim: str
    switch: int
    within: int


class GridBlock(NamedTuple):
    """One rank's view of a stage call: the group of ranks among which it switches, and their parts."""

    ranks: tuple[int, ...]  # the N1 ranks of the group
    across: tuple[int, ...]  # inside the stage: each rank's part of `dim`
    along: tuple[int, ...]  # outside: each rank's part of the dim that the stage computes over
    place: int  # this rank's position in the group
    factors: Factors


class Grid:
    """A stage whose dim `along` is sharded over all ranks outside, run on N1 x N2 ranks. A `StageWrapper`."""

    label = "switch"
    cut = 0

    def __init__(self, stage: Stage, along: str) -> None:
        self.stage, self.module, self.along = stage, stage.module, along
        layouts = [stage.pattern.inputs[0], *stage.pattern.outputs]
        self.dims = [
            name for name in stage.pattern.free if name not in BATCH_NAMES and all(name in p.names for p in layouts)
        ]
        if not self.dims:
            raise ValueError(
                f"{stage.label} leaves no dim but batch to switch to: '{stage.pattern.text}'; use method='ulysses' or "
                "'ring', which need no other dim to switch to"
            )

    def factors(self, sizes: Mapping[str, int], n: int) -> Factors:
        ways = [(switch_ranks(n, sizes.get(dim, 1)), dim) for dim in self.dims]
        switch, dim = max(ways, key=lambda way: way[0])
        return Factors(dim, switch, n // switch)

    def share(self, sizes: Mapping[str, int], n: int) -> float:
        dim, switch, _ = self.factors(sizes, n)
        return chunk_sizes(sizes[dim], switch)[0] / sizes[dim] * self.parts(sizes, n)[0] / sizes[self.along]

    def parts(self, sizes: Mapping[str, int], n: int) -> tuple[int, ...]:
        """The size of the computed dim on each of the N2 ranks."""
        switch, lengths = self.factors(sizes, n).switch, chunk_sizes(sizes[self.along], n)
        return tuple(sum(lengths[i : i + switch]) for i in range(0, n, switch))

    def block(self, sizes: Mapping[str, int], n: int, rank: int) -> GridBlock:
        factors = self.factors(sizes, n)
        first = rank - rank % factors.switch
        ranks = tuple(range(first, first + factors.switch))
        along = chunk_sizes(sizes[self.along], n)[first : first + factors.switch]
        return GridBlock(ranks, chunk_sizes(sizes[factors.dim], factors.switch), along, rank - first, factors)

    def enter(
        self, place: RankPart, sizes: Mapping[str, int], inputs: Sequence[Received]
    ) -> tuple[RankPart, list[Received]]:
        axis = place.axis
        block = self.block(sizes, axis.size, axis.rank)
        peers = tuple(range(block.place, axis.size, block.factors.switch))
        inside = RankPart(axis, self.along, Peers(peers, self.parts(sizes, axis.size)))
        if block.factors.switch == 1:
            return inside, list(inputs)
        return inside, [self.received(block, axis.group, sizes, x) for x in inputs]

    def received(self, block: GridBlock, group: str, sizes: Mapping[str, int], x: Received) -> Received:
        """A tensor as the stage gets it: switched; gathered along s if it has no t; narrowed along t if it has no s."""
        dim, n1, _ = block.factors
        across = cut_for(x.pattern, x.shape, dim, sizes)
        if across is None and x.cut is None:
            return x
        place, shape = block.place, list(x.shape)
        if across is not None:
            shape[across.dim] = shape[across.dim] // sizes[dim] * block.across[place]
        if x.cut is None:
            assert across is not None
            fine, (j,) = factor(x.shape, (across,))
            parts = _scaled(block.across, fine[j] // sizes[dim])
            return x._replace(local=x.local.reshape(fine).narrow(j, sum(parts[:place]), parts[place]).reshape(shape))
        shape[x.cut.dim], outer = shape[x.cut.dim] // sizes[self.along] * sum(block.along), x.cut.folds
        fine, (i, *tail) = factor(x.shape, (x.cut,) if across is None else (x.cut, across))
        along = _scaled(block.along, fine[i] // sizes[self.along])
        fine[i] = along[place]
        if across is None:  # every rank of the group is sent the same
            spread = x.local.reshape(1, *fine).expand(n1, *fine)
            local = torch.ops.dsp.switch_among(spread, i + 1, 0, along, (1,) * n1, block.ranks, group)
        else:
            (j,) = tail
            parts = _scaled(block.across, fine[j] // sizes[dim])
            local = torch.ops.dsp.switch_among(x.local.reshape(fine), i, j, along, parts, block.ranks, group)
            if across.dim == x.cut.dim and outer > across.folds:  # a fold (t s)
                outer = outer // sizes[dim] * block.across[place]
        return x._replace(local=local.reshape(shape), cut=Cut(x.cut.dim, outer))

    def leave(
        self, place: RankPart, sizes: Mapping[str, int], patterns: Sequence[TensorPattern], results: Sequence[Tensor]
    ) -> list[Tensor]:
        axis = place.axis
        block = self.block(sizes, axis.size, axis.rank)
        if block.factors.switch == 1:
            return [x if place.local_size else x.narrow(p.axis_of(self.along), 0, 0) for p, x in zip(patterns, results)]
        return [self.returned(block, axis.group, sizes, *one) for one in zip(patterns, results)]

    def returned(
        self, block: GridBlock, group: str, sizes: Mapping[str, int], pattern: TensorPattern, x: Tensor
    ) -> Tensor:
        """A result of a stage, switched back to the dim that the stage computes over."""
        dim, along = block.factors.dim, self.along
        local_sizes = {**sizes, dim: block.across[block.place], along: max(sum(block.along), 1)}
        dims, axes = list(x.shape), {pattern.axis_of(dim), pattern.axis_of(along)}

        def sized(of: Mapping[str, int]) -> list[int]:
            return [math.prod(of[name] for name in pattern.axes[i]) if i in axes else s for i, s in enumerate(dims)]

        shape, inside = sized(sizes), sized(local_sizes)
        if inside != dims:
            raise NotationError(
                f"{self.stage.label}, run on {local_sizes[dim]} of {sizes[dim]} along {dim!r} and {local_sizes[along]} "
                f"of {sizes[along]} along {along!r}, returned {tuple(dims)} where '{pattern}' wants {tuple(inside)}: "
                f"it is not independent along {dim!r}. Put {dim!r} in brackets in its pattern, or make stages of its "
                "submodules"
            )
        cuts = [cut for name in (along, dim) if (cut := cut_for(pattern, shape, name, sizes)) is not None]
        fine, (i, j) = factor(shape, cuts)
        along_parts = _scaled(block.along, fine[i] // sizes[along])
        across_parts = _scaled(block.across, fine[j] // sizes[dim])
        fine[i], fine[j] = fine[i] // sizes[along] * local_sizes[along], across_parts[block.place]
        x = x.reshape(fine).narrow(i, 0, sum(along_parts))  # drops a dummy row
        x = torch.ops.dsp.switch_among(x, j, i, across_parts, along_parts, block.ranks, group)
        return x.reshape(sized({**sizes, along: block.along[block.place]}))

    # --- what it sends ---

    def load(self, args: Any, kwargs: Any, along: str | None, sizes: Mapping[str, int], n: int) -> float:
        return 1.0

    def sends(self, args: Any, kwargs: Any, along: str | None, sizes: Mapping[str, int], n: int) -> CommBytes:
        """The busiest rank's traffic before and after the stage; a checkpoint of the stage does not repeat it."""
        dim, n1, _ = self.factors(sizes, n)
        if along != self.along or n1 == 1:
            return CommBytes()
        blocks = [self.block(sizes, n, rank) for rank in range(n)]
        exports = [b.along[b.place] * (sizes[dim] - b.across[b.place]) for b in blocks]  # elements s x t per channel
        returns = [b.across[b.place] * (sum(b.along) - b.along[b.place]) for b in blocks]
        spread = [b.along[b.place] * (n1 - 1) for b in blocks]
        reduced = [sum(b.along) - b.along[b.place] for b in blocks]
        before = after = adjoint = calls = 0
        _, bound = self.stage.signature.bind(args, kwargs)
        for b in bound:
            if cut_for(b.pattern, b.tensor.shape, along, sizes) is None:
                continue
            whole = b.tensor.numel() * b.tensor.element_size() // sizes[along]
            calls += 1
            whole_of_dim = cut_for(b.pattern, b.tensor.shape, dim, sizes) is None
            out, home, of = (spread, reduced, 1) if whole_of_dim else (exports, returns, sizes[dim])
            before += max(out) * whole // of
            adjoint += max(home) * whole // of if b.tensor.requires_grad else 0
        itemsize = bound[0].tensor.element_size()
        for pattern in self.stage.pattern.outputs:
            unknown = [name for name in pattern.names if name not in sizes]
            if unknown:
                raise NotationError(f"{self.stage.label} returns a dim that no input has, {unknown[0]!r}: '{pattern}'")
            unit = math.prod(sizes[name] for name in pattern.names if name not in (along, dim)) * itemsize
            after += max(returns) * unit
            adjoint += max(exports) * unit
        outputs = len(self.stage.pattern.outputs)
        return CommBytes(
            forward={"switch": (before + after, calls + outputs)}, backward={"switch": (adjoint, calls + outputs)},
            before={"switch": (before, calls)}, after={"switch": (after, outputs)},
        )  # fmt: skip


def _scaled(parts: Sequence[int], inner: int) -> tuple[int, ...]:
    """The parts of a dim, times the size of dims folded inside it: `b` in (t b)."""
    return tuple(part * inner for part in parts)
