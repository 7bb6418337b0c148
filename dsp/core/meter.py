"""Facts of a recorded forward: cost and draws of nodes, which tensors get gradients, and where checkpoints stop."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from dsp.core.carrier import LOCAL
from dsp.core.record import Node, Ref, RegionPlace
from dsp.core.torch_calls import Operand
from dsp.support.private import (
    FakeTensor,
    OpOverload,
    UncompiledMode,
    base_of,
    checkpoint_frame,
    checkpoint_frames,
    saved_in,
    schema_of,
)
from dsp.support.tensors import ByTensor, Edge, edge, leading_to, tensors_in


def attention(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
    """FLOPs of scores and of the weighted sum; query heads may share a key head, which torch counts from 2.12 on."""
    return 2 * q.shape[:-1].numel() * k.shape[-2] * (q.shape[-1] + v.shape[-1])


def visible(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    **_: Any,
) -> float:  # fmt: skip
    """The share of all pairs of query and key that attention computes: under a causal mask, the visible pairs."""
    n, m = query.shape[-2], key.shape[-2]
    if not is_causal or not n * m:
        return 1.0
    square = min(n, m)
    return (square * (square + 1) // 2 + (n - square) * m) / (n * m)


KERNELS = "efficient_attention flash_attention cudnn_attention flash_attention_for_cpu".split()
FLOPS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    **{getattr(torch.ops.aten, f"_scaled_dot_product_{name}"): attention for name in KERNELS},
}


# they do not read or write the memory that they return
UNTOUCHED = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view"})
# of operations whose results may have sizes that data say
DYNAMIC = frozenset({torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output})


class OpTraits(NamedTuple):
    """The facts of an operation that do not depend on its arguments."""

    flops: Callable[..., int] | None
    draws: bool  # whether it draws random numbers
    dynamic: bool  # whether data may say the sizes of its results
    touches: bool  # whether it reads or writes memory: views do not
    makes: bool  # whether it makes new tensors and nothing else


@cache
def facts(func: OpOverload) -> OpTraits:
    aliased = [r.alias_info for r in schema_of(func).returns if r.alias_info is not None]
    return OpTraits(
        flops=FLOPS.get(func.overloadpacket),
        draws=torch.Tag.nondeterministic_seeded in func.tags,
        dynamic=not DYNAMIC.isdisjoint(func.tags),
        touches=all(alias.is_write for alias in aliased) and func.overloadpacket.__name__ not in UNTOUCHED,
        makes=not schema_of(func).is_mutable and not aliased,
    )


class NodeMeter(UncompiledMode):
    """Observes the nodes of a forward while it is recorded: here, which of them draw random numbers, and of which data
    may say the sizes of results.

    random, dynamic: something was so since the last restart; between: something drew between the nodes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.between = False
        self.notes: list[list[Any]] = []  # of the first of equal stage calls, once it has run
        self.equal: list[Any] = []  # what was noted of an equal call, which does not run again
        self.restart()

    def restart(self) -> None:
        self.random = self.dynamic = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():  # not an operation of the model's forward
            out = func(*args, **kwargs)
        op = facts(func)
        self.random |= op.draws and not undropped(func, args, kwargs)
        self.dynamic |= op.dynamic
        return out

    def start(self, node: Node | None = None) -> None:
        """Begin with a node: its call runs next. node: that of a stage."""
        self.between |= self.random
        self.restart()
        self.notes, self.equal = [], []

    def finish(self, node: Node) -> None:
        """End with a node that has run."""
        value = self.equal[0] if self.equal else self.value(node)
        for note in self.notes:
            note.append(value)
        self.write(node, value)
        self.restart()

    def value(self, node: Node) -> Any:
        """The properties of a node that has run, which equal nodes share."""
        return self.random, self.dynamic, node.stateful

    def write(self, node: Node, value: Any) -> None:
        """Write these on a node."""
        node.draws, node.dynamic, node.stateful = value

    def first(self, inputs: list[Tensor], outputs: list[Tensor]) -> list[Any]:
        """Note that a stage ran; what is noted of its node serves equal ones."""
        self.notes.append([])
        return self.notes[-1]

    def repeat(self, note: list[Any], inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """Take what was noted of an equal call, which does not run again."""
        self.equal = note


class Meter(NodeMeter):
    """Measures a block of code: peak bytes of the tensors it makes, FLOPs, bytes read and written, and randomness.

    `touched` adds up the bytes of each of the `operations` as it runs uncompiled (views do not count), in two parts:
    [1] counts while `in_methods` is not 0. `part`: the share of the running operation's FLOPs that its kernel computes.
    `heaviest`: the name of the operation at the peak, or of the last one.
    """

    round = 0

    def restart(self) -> None:
        super().restart()
        self.round += 1  # tensors of an earlier round no longer count when they are freed
        self.releases = ByTensor[Any]()
        self.live = self.peak = self.largest = self.numel = self.flops = self.operations = 0
        self.touched, self.in_methods, self.part = [0, 0], 0, 1.0
        self.heaviest = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, op = kwargs or {}, facts(func)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if op.flops is not None:
            self.flops += int(op.flops(*args, **kwargs, out_val=out) * self.part)
        if op.touches and (outputs := tensors_in(out)):
            self.operations += 1
            self.heaviest = self.heaviest or func.overloadpacket.__name__.strip("_")
            # an expanded tensor has less memory than its size
            strided = (t for t in tensors_in((args, kwargs)) + outputs if t.layout == torch.strided)
            sizes = (min(t.numel() * t.element_size(), t.untyped_storage().nbytes()) for t in strided)
            self.touched[self.in_methods > 0] += sum(sizes)
        if not op.makes:
            return out
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, Tensor):
                size = t.numel() * t.element_size()
                self.live += size
                if size > self.largest:
                    self.largest, self.numel = size, t.numel()
                if self.live > self.peak:
                    self.peak, self.heaviest = self.live, func.overloadpacket.__name__.strip("_")
                self.releases[t] = weakref.finalize(t, self._freed, size, self.round)
        return out

    def hand_on(self, t: Tensor, alias: Tensor) -> None:
        """Count the memory of a tensor, or of that of which it is a view, until `alias`, which shares it, is freed."""
        base = base_of(t)
        release = self.releases.get(t if base is None else base)
        if release is not None and (counted := release.detach()) is not None:
            self.releases[alias] = weakref.finalize(alias, counted[1], *counted[2])

    def _freed(self, size: int, turn: int) -> None:
        if turn == self.round:
            self.live -= size


def forwards(node: Node) -> int:
    """The cost of a node in a training step, in forwards: a backward counts as two, a recomputation as one."""
    return 1 + (2 + node.cost.recomputed) * any(node.result_grads)


def undropped(func: Any, args: Any, kwargs: Any) -> bool:
    """Tell whether a call is attention without dropout: CUDA's kernels are tagged as random, but draw nothing then."""
    names = [a.name for a in schema_of(func).arguments]
    arguments = {**dict(zip(names, args)), **kwargs}
    return "dropout_p" in names and arguments.get("dropout_p", 0.0) == 0.0


class Regions:
    """The activation checkpoints of a forward that is recorded, but not those around it."""

    def __init__(self) -> None:
        self.around = len(checkpoint_frames())
        self.frames: list[Any] = []  # in the order in which they began
        self.running: list[Any] = []

    def saved(self) -> list[tuple[int, int]]:
        """The checkpoints that run, by number, with the tensors that each has saved so far."""
        last = checkpoint_frame()
        if last is None:
            return []
        if not self.running or self.running[-1] is not last:
            self.running = checkpoint_frames()[self.around :]
            self.frames += [f for f in self.running if not any(f is known for known in self.frames)]
        numbers = [next(i for i, known in enumerate(self.frames) if known is f) for f in self.running]
        return [(i, saved_in(f)) for i, f in zip(numbers, self.running)]

    def places(self, before: Sequence[tuple[int, int]]) -> tuple[RegionPlace, ...]:
        """The places of a node that has run, from the tensors saved before it."""
        return tuple(RegionPlace(i, saved, saved_in(self.frames[i])) for i, saved in before)

    def totals(self) -> list[float]:
        return [saved_in(frame) if frame.early_stop else math.inf for frame in self.frames]


def edges_into(tensors: Sequence[Tensor], in_place: bool) -> list[Edge | None]:
    """The edges to which the gradients of an operation's operands go, just before it runs.

    Of a view that is written in place it is that of its base, where autograd notes the write; and just after it that of
    the result.
    """
    edges = [*map(edge, tensors)]
    if in_place and (base := base_of(tensors[0])) is not None:
        edges[0] = edge(base)
    return edges


def pack(t: Tensor) -> Any:
    """The data of a tensor that a recorded forward saves for backward.

    A node that saves its own result, as tanh does, would hold itself for good. A backward inside of a forward needs no
    numbers of tensors without data.
    """
    with LOCAL():
        if t.grad_fn is None:
            return t
        if isinstance(t, FakeTensor):
            return partial(torch.empty_strided, t.shape, t.stride(), dtype=t.dtype, device=t.device)
        return t.detach()


def unpack(packed: Any) -> Tensor:
    return packed if isinstance(packed, Tensor) else packed()


class Gradients:
    """The places of autograd at which the tensors of nodes get their gradients.

    A stage gets views of its operands, which nothing else reads. An operation gets tensors that others read, too: of
    these a gradient comes through it to those that its results lead to.
    """

    def __init__(self) -> None:
        self.edges: list[tuple[Node, list[Edge | None], list[Edge | None]]] = []

    def note(self, node: Node, operands: Iterable[Edge | None], results: Iterable[Edge | None] = ()) -> None:
        self.edges.append((node, [*operands], [*results]))

    def finish(self, outputs: Sequence[Tensor]) -> set[Edge]:
        """Tell nodes which of their tensors get a gradient from the outputs; return all edges that do."""
        reached = leading_to(map(edge, outputs))
        edges = {e for _, _, results in self.edges for e in results}
        read = self.read_after_write(reached)
        for node, operands, results in self.edges:
            refs: list[Ref | None] = [*node.results] or [None] * len(results)
            later = [e is not None and r in read for r, e in zip(refs, results)]  # no edge: it had no gradient then
            node.result_grads = tuple(e in reached or written for e, written in zip(results, later))
            if any(later):
                node.operand_grads = tuple(e is not None for e in operands)
                continue
            entered = (
                reached if node.kind != "operation" else reached & entered_edges(results, {*operands}, edges, reached)
            )
            node.operand_grads = tuple(e in entered for e in operands)
        return reached

    def read_after_write(self, reached: set[Edge]) -> set[Operand]:
        """The tensors that were written into, and are read where a gradient arrives.

        A write in place replaces the edge of a view that it wrote into: what reads the view later has the new one.
        """
        writing = [node for node, *_ in self.edges if node.in_place or node.kind == "stage"]
        written = {t for node in writing for i in node.writes if isinstance(t := node.operands[i], Ref)}
        pairs = (pair for node, operands, _ in self.edges for pair in zip(node.operands, operands))
        return {t for t, e in pairs if e in reached and t in written}


def entered_edges(
    results: Sequence[Edge | None], operands: set[Edge | None], edges: set[Edge | None], reached: set[Edge]
) -> set[Edge]:
    """The edges of an operation's operands to which a gradient of its results goes on; edges: those of any results."""
    begin = {e for e in results if e is not None and e in reached}
    waiting, seen, entries = [*begin], set[Edge](), set[Edge]()
    while waiting:
        e = waiting.pop()
        if e in operands:
            entries.add(e)
        if e not in seen and (e in begin or not (e in edges or e in operands)):
            seen.add(e)
            waiting += [(node, k) for node, k in e[0].next_functions if node is not None]
    return entries
