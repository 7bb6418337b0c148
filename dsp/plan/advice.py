"""Advice where glue runs replicated: the reason, and what may help."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from dsp.calls import GlueError
from dsp.notation import BATCH_NAMES, StagePattern, TensorPattern, parse
from dsp.plan.record import OperationNode
from dsp.rules.call import frame_of
from dsp.text import generic

if TYPE_CHECKING:
    from dsp.plan.events import Trace
    from dsp.report.table import Plan

log = logging.getLogger("dsp")

LETTERS = "xyzuvwpqrijkmndefgachlost"  # for dims without a name
OPERATIONS = 3  # operations whose reasons are reported


def remedy(root: StagePattern | None, t: Trace, plan: Plan, replan: Callable[[StagePattern], Plan]) -> str:
    """A sentence on why glue runs replicated, and what would help: more inputs in the root pattern, if these do.

    replan: makes a plan with another root pattern.
    """
    if not plan.whole:
        return ""
    if root is not None and (text := with_unnamed(root, t, plan)):
        try:
            better = replan(parse(text, root=True))
            found, before = ((p.flops_whole, sum(w.bytes for w in p.whole)) for p in (better, plan))
            if found < before:
                return (
                    f'Name its other inputs in stages, too, "": "{text}": then the largest tensor of a rank is '
                    f"{better.share:.2f} of that of one process instead of {plan.share:.2f}"
                )
        except Exception as reason:
            log.debug("no plan with %s: %s: %s", text, type(reason).__name__, reason)
    if not any(w.module for w in plan.whole):
        return "Move what can be sharded along some dim into a submodule, and name it in stages"
    told = "".join(f"{name}(): {reason}. " for name, reason in dict(reasons(t, plan)).items())
    return f"{told}dsp.discover tells whether a stage there can be sharded, and finds its line"


def reasons(t: Trace, plan: Plan) -> Iterator[tuple[str, str]]:
    """The most expensive replicated operations, by name, each with the reason why its rule refuses a shard."""
    nodes = {(f.node.name, generic(f.node.module)): f.node for f in t.facts if isinstance(f.node, OperationNode)}
    for node in [nodes[w.name, w.module] for w in plan.whole[:OPERATIONS] if (w.name, w.module) in nodes]:
        syms = [(i, t.tracked[x.number]) for i, x in enumerate(node.operands) if x.number in t.tracked]
        for i, cut in [(i, cut) for i, sym in syms for cut in sym.cuts.values()]:
            try:
                frame_of(node, {i: cut}, plan.size).outcome()
            except GlueError as error:
                yield node.name, error.reason
                break


def with_unnamed(root: StagePattern, t: Trace, plan: Plan) -> str:
    """The root pattern, with the inputs that it lacks if they are as long as a share of the replicated glue."""
    letters, least = iter([x for x in LETTERS if x not in t.sizes]), min(w.bytes for w in plan.whole) / plan.size
    unnamed = {param: x for param, x in t.unnamed.items() if param.isidentifier() and x.ndim and x.nbytes >= least}
    more = [str(TensorPattern(axes_of(x, t.sizes, letters), frozenset(), param)) for param, x in unnamed.items()]
    inputs, arrow, outputs = root.text.partition("->")
    return ", ".join([inputs.strip(), *more]) + (f" -> {outputs.strip()}" if arrow else "") if more else ""


def axes_of(x: Tensor, sizes: Mapping[str, int], letters: Iterator[str]) -> tuple[tuple[str], ...]:
    """The names of a tensor's dims: the name of the model's only dim of this size, or else the next letter."""
    names = list[str]()
    for d, size in enumerate(x.shape):
        alike = [name for name, own in sizes.items() if own == size and name not in names]
        if d == 0 and size == 1:
            alike = [next((name for name in sizes if name in BATCH_NAMES), "b")]
        names.append(alike[0] if len(alike) == 1 else next(letters))
    return tuple((name,) for name in names)
