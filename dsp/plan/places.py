"""The positions that functions of `flex_attention` read inside a stage: on a shard these count from its first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dsp.notation import NotationError
from dsp.private import pytree
from dsp.rules.flex import plain
from dsp.slices import call_part, slices
from dsp.stages import Option, Stage

PLACES = "sample", "head", "query"  # positions that start from 0 on a shard of the queries
Read = int | None  # how a position is read: the size of the dim that it indexes, or None for its value
ASIDE = frozenset("new_ones new_zeros new_full new_empty new_tensor ones_like zeros_like full_like __get__".split())
SAME = frozenset("to long int clone detach contiguous".split())


@dataclass(frozen=True)
class FlexCall:
    """A call of `flex_attention`: sizes of its samples, heads, queries and keys; reads of the first three positions."""

    sizes: tuple[int, ...]
    reads: tuple[tuple[Read, ...], ...]


def seen(query: Tensor, key: Tensor, value: Tensor, score: Any, blocks: Any, *_: Any) -> FlexCall:
    reader = Reader([torch.zeros((), dtype=torch.int64) for _ in (*PLACES, "key")])
    for function, first in ((score, [torch.zeros((), dtype=query.dtype)]), (blocks[-1], [])):
        if not plain(function):
            reader.read(function, first)
    return FlexCall((*query.shape[:3], key.shape[2]), tuple(map(tuple, reader.reads[:3])))


class Reader(TorchFunctionMode):
    """Records the `reads` of each position while a function runs."""

    def __init__(self, places: list[Tensor]) -> None:
        super().__init__()
        self.given, self.places = places, {id(p): i for i, p in enumerate(places)}
        self.reads: list[list[Read]] = [[] for _ in places]
        self.held: list[Tensor] = []

    def read(self, function: Callable[..., Any], first: list[Tensor]) -> None:
        try:
            with torch.no_grad(), self:
                function(*first, *self.given)
        except Exception:  # a function that runs only in a kernel is left to `dsp.check`
            return

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name == "__getitem__" and id(args[0]) not in self.places:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if not any(i is None or i is Ellipsis for i in index):
                for size, i in zip(args[0].shape, index):
                    if id(i) in self.places:
                        self.reads[self.places[id(i)]].append(size)
                return args[0][tuple(0 if isinstance(i, Tensor) and i.ndim == 0 else i for i in index)]
        hit = {self.places[id(t)] for t in pytree.tree_leaves((args, kwargs)) if id(t) in self.places}
        out = func(*args, **kwargs)
        for place in hit if name not in ASIDE else ():
            if name in SAME and isinstance(out, Tensor):
                self.held.append(out)
                self.places[id(out)] = place
            else:
                self.reads[place].append(None)
        return out


def refuse_places(
    stage: Stage, args: Any, kwargs: Any, options: Sequence[Option], whole: Sequence[FlexCall],
    run: Callable[[Any, Any], list[FlexCall]],
) -> None:  # fmt: skip
    """Raise if a function of the `whole` call would read other positions when the stage is sharded.

    run: calls the stage on shards of its inputs, and returns its calls of `flex_attention`.
    """
    for option in options if any(any(call.reads) for call in whole) else ():
        if option.name is None or option.onto is not None:
            continue
        part = call_part(stage.signature, args, kwargs, option.cuts, option.size, *slices(option.size)[0])
        try:
            own = run(tuple(part.args), part.kwargs)
        except Exception:  # a stage that fails on a shard is refused when it runs
            continue
        for place in (p for a, b in zip(whole, own) if len(own) == len(whole) for p in other_places(a, b)):
            raise NotationError(
                f"{stage.where}: the score or mask function of its flex_attention reads the index of the {place}, and "
                f"on a shard along {option.name!r} that index starts from 0 at the shard's first {place}. Write "
                f"[{option.name}] in '{stage.pattern.text}', or pass the stage a tensor with a pattern that has "
                f"{option.name!r}, and let the function read that instead of the index"
            )


def other_places(whole: FlexCall, part: FlexCall) -> list[str]:
    """The positions that are read by value, or index a dim that is as long on the shard."""
    if whole.sizes[3] != part.sizes[3]:
        return []  # it computes over that dim, whatever it reads
    found = []
    for place, size, own, reads, part_reads in zip(PLACES, whole.sizes, part.sizes, whole.reads, part.reads):
        moved = len(reads) != len(part_reads) or any(a is None or a == b for a, b in zip(reads, part_reads))
        if size != own and moved:
            found.append(place)
    return found
