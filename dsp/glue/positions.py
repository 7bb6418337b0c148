"""The positions that functions of `flex_attention` read in a stage: on a part they count from its first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dsp.core.record import BoundStage, Node
from dsp.core.watch import KernelCall
from dsp.glue.rules.flex import flex_attention, plain
from dsp.stages.notation import NotationError
from dsp.stages.parts import call_part, slices
from dsp.support.private import pytree

POSITIONS = "sample", "head", "query"  # that start from 0 on a part of the queries
Read = int | None  # how a position is read: the size of the dim that it indexes, or None for its value
NO_READS = frozenset("new_ones new_zeros new_full new_empty new_tensor ones_like zeros_like full_like __get__".split())
SAME = frozenset("to long int clone detach contiguous".split())


class PositionReads(NamedTuple):
    """The sizes of a call's samples, heads, queries and keys, and the reads of the first three positions."""

    sizes: tuple[int, ...]
    of: tuple[tuple[Read, ...], ...]


def reads_of(calls: Sequence[KernelCall]) -> list[PositionReads]:
    """The reads of each call of flex_attention."""
    return [reads_in(*call.args, **call.kwargs) for call in calls if call.function is flex_attention]


def reads_in(query: Tensor, key: Tensor, value: Tensor, score: Any, blocks: Any, *_: Any) -> PositionReads:
    reader = Reader([torch.zeros((), dtype=torch.int64) for _ in (*POSITIONS, "key")])
    for function, first in ((score, [torch.zeros((), dtype=query.dtype)]), (blocks[-1], [])):
        if not plain(function):
            reader.read(function, first)
    return PositionReads((*query.shape[:3], key.shape[2]), tuple(map(tuple, reader.reads[:3])))


class Reader(TorchFunctionMode):
    """Records the `reads` of each position while a function runs."""

    def __init__(self, positions: list[Tensor]) -> None:
        super().__init__()
        self.positions, self.numbers = positions, {id(p): i for i, p in enumerate(positions)}
        self.reads: list[list[Read]] = [[] for _ in positions]
        self.aliases: list[Tensor] = []

    def read(self, function: Callable[..., Any], first: list[Tensor]) -> None:
        try:
            with torch.no_grad(), self:
                function(*first, *self.positions)
        except Exception:  # a function that runs only in a kernel is left to `dsp.check`
            return

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name == "__getitem__" and id(args[0]) not in self.numbers:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if not any(i is None or i is Ellipsis for i in index):
                for size, i in zip(args[0].shape, index):
                    if id(i) in self.numbers:
                        self.reads[self.numbers[id(i)]].append(size)
                return args[0][tuple(0 if isinstance(i, Tensor) and i.ndim == 0 else i for i in index)]
        hit = {self.numbers[id(t)] for t in pytree.tree_leaves((args, kwargs)) if id(t) in self.numbers}
        out = func(*args, **kwargs)
        for number in hit if name not in NO_READS else ():
            if name in SAME and isinstance(out, Tensor):
                self.aliases.append(out)
                self.numbers[id(out)] = number
            else:
                self.reads[number].append(None)
        return out


def refuse_positions(
    node: Node, args: Any, kwargs: Any, calls: Sequence[KernelCall],
    run: Callable[[Any, Any], Sequence[KernelCall]],
) -> None:  # fmt: skip
    """Raise NotationError if a function would read other positions when the stage is sharded.

    run: calls the stage on parts of its arguments, and returns its calls of kernels.
    """
    assert isinstance(node.call, BoundStage)
    stage, full = node.call.stage, reads_of(calls)
    methods = stage.methods or stage.around is not None
    for option in node.call.options if not methods and any(any(reads.of) for reads in full) else ():
        if option.name is None or option.onto is not None:
            continue
        part = call_part(stage.signature, args, kwargs, option.cuts, option.size, *slices(option.size)[0])
        try:
            reads = reads_of(run(tuple(part.args), part.kwargs))
        except Exception:  # a stage that fails on a part is refused when it runs
            continue
        for name in (name for pair in zip(full, reads) if len(reads) == len(full) for name in moved(*pair)):
            raise NotationError(
                f"{stage.label}: the score or mask function of its flex_attention reads the index of the {name}, and "
                f"on a shard along {option.name!r} that index starts from 0 at the shard's first {name}. Write "
                f"[{option.name}] in '{stage.pattern.text}', or pass the stage a tensor with a pattern that has "
                f"{option.name!r}, and let the function read that instead of the index"
            )


def moved(full: PositionReads, part: PositionReads) -> Iterator[str]:
    """The positions that are read by value, or index a dim that is as long on the part."""
    if full.sizes[3] != part.sizes[3]:
        return  # it computes over that dim, whatever it reads
    for name, size, length, reads, on_part in zip(POSITIONS, full.sizes, part.sizes, full.of, part.of):
        by_value = len(reads) != len(on_part) or any(a is None or a == b for a, b in zip(reads, on_part))
        if size != length and by_value:
            yield name
