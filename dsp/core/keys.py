"""Keys: how a call in a run finds its node in the record, and what was prepared for it.

A node's key has what identifies it: the function, the numbers of its operands, the shapes of other tensors, and the
values of plain arguments. Nodes may share a key, such as the projections of one tensor by weights of one shape: then
the turn decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsp.core.carrier import Carrier
from dsp.core.checkpoints import RECOMPUTED, note_turns
from dsp.core.record import Node, Offer, Operation, Record, Ref
from dsp.core.torch_calls import Operand, tensor_args
from dsp.core.torch_traits import DRAWS
from dsp.support.private import backward_pass, pytree, saving_hooks

HOT = 65536  # calls kept ready, at most
VARIANTS = 4096  # nodes kept that differ from planned ones in numbers, at most
NODES = 1 << 32  # nodes with one key, at most
VALUES = frozenset((
    int, str, bool, range, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, type(...)
))  # fmt: skip
SIZED = frozenset({"interpolate", "upsample", "upsample_bilinear", "upsample_nearest"})  # by a float
CONTAINERS = frozenset((list, tuple, torch.Size))


class NoKey(Exception):
    """Raised for an argument that is neither hashable nor a container: what is prepared for a call may depend on it."""


def exact_key(head: Any, args: Any, kwargs: Any) -> Any:
    """The key of a call with all that its preparation depends on: how tensors are sharded, and all values; None for a
    call that is prepared each time."""
    parts = [head]
    try:
        add_parts(parts, args)
        for name, v in kwargs.items():
            parts.append(name)
            add_parts(parts, (v,))
    except NoKey:
        return None
    return tuple(parts)


def add_parts(parts: list[Any], values: Any) -> None:
    """Add the parts of an exact key that values give, flat: this runs in every operation between stages."""
    for v in values:
        kind = type(v)
        if kind is Carrier:
            parts += v.ref, v.cut
        elif kind in VALUES or kind is float:
            parts += kind, v
        elif kind in CONTAINERS:
            parts += kind, len(v)
            add_parts(parts, v)
        elif kind is dict:
            parts += kind, len(v), *v
            add_parts(parts, v.values())
        elif kind is slice:
            parts.append(kind)
            add_parts(parts, (v.start, v.stop, v.step))
        elif isinstance(v, Tensor):
            parts += (v.ref, v.cut) if isinstance(v, Carrier) else (v.shape, v.dtype)
        elif kind.__hash__ is None:
            raise NoKey
        else:
            parts += kind, v


def key_part(v: Any) -> Any:
    """The part of a node's key that an argument gives."""
    kind = type(v)
    if isinstance(v, Carrier):
        return v.ref
    if isinstance(v, Tensor):
        return tuple(v.shape)
    if kind in CONTAINERS:
        return kind, *[key_part(x) for x in v]
    if kind is slice:
        return kind, *map(key_part, (v.start, v.stop, v.step))
    if kind is dict:
        return kind, *[(k, key_part(x)) for k, x in v.items()]
    if kind in VALUES:
        return kind, v
    return key_part(v.tolist()) if hasattr(v, "tolist") else kind  # a number or an array of numpy


def node_key(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """The key of an operation's node. Floats are a part of it where they say the size of the result; so is whether the
    call draws random numbers: dropout of nothing returns its operand."""
    key = func, key_part(args), key_part(kwargs)
    if name in DRAWS:
        return *key, DRAWS[name](args, kwargs)
    return (*key, floats_of((args, kwargs))) if name in SIZED else key


def floats_of(value: Any) -> tuple[float, ...]:
    """The floats among arguments."""
    return tuple(v for v in pytree.tree_leaves(value) if type(v) is float)


class Ready(NamedTuple):
    """A node as this rank runs it, on operands in certain layouts.

    local: the function on parts (None: the node's call); unchanged: nothing moves and nothing is replaced, so the call
    takes its arguments as they are; slots: of a stage's operands, in its arguments; nested: carriers are in lists or
    dicts among these.
    """

    node: Node
    offer: Offer
    local: Callable[..., Any] | None
    unchanged: bool
    slots: Sequence[Any] = ()
    nested: bool = False


class Several(NamedTuple):
    """The calls that are ready for nodes with one key, by turn."""

    key: Any
    by_turn: dict[int, Ready]


def loose_key(func: Any, operands: Sequence[Operand]) -> Any:
    return func, *(t if isinstance(t, Ref) else tuple(t.shape) for t in operands)


class Prepared:
    """The calls that are ready to run, by their exact keys."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.by_key: dict[Any, Ready | Several] = {}
        self.variants: dict[Any, list[Node]] | None = None
        self.added: list[Any] = []  # keys of variants

    def get(self, key: Any, args: Any, kwargs: Any, first: Any = None) -> tuple[Ready | None, int | None]:
        """The call that is ready, if there is one; and the turn, if it is known."""
        ready = self.by_key.get(key)
        if type(ready) is not Several:
            return ready, None  # type: ignore[return-value]
        first = first_of(args, kwargs) if first is None else first
        at = turn(ready.key, first, len(self.record.by_key[ready.key]))
        return ready.by_turn.get(at), at

    def node(self, key: Any, first: Carrier, at: int | None) -> tuple[Node | None, int]:
        """The node with a key, and its place among those that share it; if they are several, the one in turn."""
        nodes = self.record.by_key.get(key)
        if not self.record.planned:  # each turn is a node
            at = turn(key, first, NODES)
            return (nodes[at] if nodes is not None and at < len(nodes) else None), at
        if nodes is None:
            return None, 0
        if at is None:
            at = 0 if len(nodes) == 1 else turn(key, first, len(nodes))
        return nodes[at], at

    def variant(self, func: Any, operands: Sequence[Operand]) -> Node | None:
        """The only planned node of a function that reads these operands: it differs from another in numbers alone."""
        if self.variants is None:
            self.variants = {}
            for node in self.record.nodes if self.record.planned else ():
                if isinstance(node.call, Operation) and node.refs and not (node.view or node.identity):
                    self.variants.setdefault(loose_key(node.call.func, node.operands), []).append(node)
        nodes = self.variants.get(loose_key(func, operands), ())
        return nodes[0] if len(nodes) == 1 else None

    def add_variant(self, key: Any, node: Node) -> None:
        """Keep a node that differs from one of the record in numbers alone."""
        if len(self.added) >= VARIANTS:
            for old in self.added:
                self.record.by_key.pop(old, None)
            self.added, self.by_key = [], {}
        self.added.append(key)
        self.record.by_key[key] = [node]

    def put(self, key: Any, shared: Any, at: int, ready: Ready) -> Ready:
        """Keep a call for the exact key, if it has one; `shared` is its node's key, `at` the turn."""
        if key is None or not self.record.planned:
            return ready
        if len(self.by_key) >= HOT:
            self.by_key.clear()
        if len(self.record.by_key[shared]) == 1:
            self.by_key[key] = ready
        else:
            several = self.by_key.get(key)
            if type(several) is not Several:
                several = self.by_key[key] = Several(shared, {})
            several.by_turn[at] = ready
        return ready


def first_of(args: Any, kwargs: Any) -> Carrier:
    return next(t for t in tensor_args(args, kwargs) if isinstance(t, Carrier))


def turn(key: Any, first: Any, count: int) -> int:
    """Which of `count` nodes with one key is next. Turns count on the tensor: in a recomputation from those that it had
    when the checkpoint began, so that the same nodes are found."""
    region = RECOMPUTED.get()
    run = region, backward_pass()
    if first.turns is None:
        first.turns = {}
    elif first.turns["run"] not in (None, run):  # a detached tensor has the same dict
        turns = {} if region is None else region.turns_of(first)
        first.turns.clear()
        first.turns.update(turns)
    first.turns["run"] = run
    if saving_hooks(False) is not None:
        note_turns(first)
    first.turns[key] = at = first.turns.get(key, -1) + 1
    return min(at, count - 1)
