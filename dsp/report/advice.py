"""Advice where operations between stages run replicated: the reason, and what may help."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dsp.core.record import Node, Operation, Record, Ref
from dsp.core.torch_calls import GlueError, Operand
from dsp.glue.local import frame_of
from dsp.report.table import Plan
from dsp.stages.notation import BATCH_NAMES, StagePattern, TensorPattern, parse
from dsp.support.formatting import generic

log = logging.getLogger("dsp")

LETTERS = "xyzuvwpqrijkmndefgachlost"  # for dims without a name
OPERATIONS = 3  # operations whose reasons are reported


def remedy(
    root: StagePattern | None, record: Record, unnamed: Mapping[str, Any], plan: Plan,
    replan: Callable[[StagePattern], Plan],
) -> str:  # fmt: skip
    """A sentence on why operations run replicated, and what would help: more inputs in the root pattern, if these do.

    unnamed: the inputs that the root pattern leaves out, by parameter; replan: makes a plan with another root pattern.
    """
    if not plan.of_inputs:
        return ""
    if root is not None and (text := with_unnamed(root, record, unnamed, plan)):
        try:
            better = replan(parse(text, root=True))
            now, before = ((p.flops_whole, sum(w.bytes for w in p.of_inputs)) for p in (better, plan))
            if now < before:
                return (
                    f'Name its other inputs in stages, too, "": "{text}": then the largest tensor of a rank is '
                    f"{better.share:.2f} of that of one process instead of {plan.share:.2f}"
                )
        except Exception as reason:
            log.debug("no plan with %s: %s: %s", text, type(reason).__name__, reason)
    if not any(w.module for w in plan.of_inputs):
        return "Move what can be sharded along some dim into a submodule, and name it in stages"
    causes = "".join(f"{name}(): {reason}. " for name, reason in dict(reasons(record, plan)).items())
    return f"{causes}dsp.discover tells whether a stage there can be sharded, and finds its line"


def reasons(record: Record, plan: Plan) -> Iterator[tuple[str, str]]:
    """The most expensive replicated operations, by name, each with the reason: its rule refuses a shard, or it reads
    what an earlier operation left replicated, whose rule does."""
    nodes = {(node.name, generic(node.module)): node for node in record.nodes if node.kind == "operation"}
    makers = {r.base: node for node in record.nodes if not node.view for r in node.results}
    for node in [nodes[w.name, w.module] for w in plan.of_inputs[:OPERATIONS] if (w.name, w.module) in nodes]:
        earlier = [node]
        for cause in earlier:
            if (reason := refusal(cause, record.n)) is not None:
                begin = "" if cause is node else f"it reads what comes of {cause.name}(), which is replicated: "
                yield node.name, begin + reason
                break
            read = [makers[v] for v in cause.bases if v in makers and not v.cuts]
            earlier += [maker for maker in read if maker not in earlier]


def refusal(node: Node, n: int) -> str | None:
    """The reason why the rule of an operation refuses one of its operands in one of its cuts."""
    if not isinstance(node.call, Operation):
        return None
    for i, t in enumerate(node.operands):
        for cut in filter(None, map(t.cut_under, t.base.cuts)) if isinstance(t, Ref) else ():
            try:
                frame_of(node, [cut if k == i else None for k in range(len(node.operands))], n).outcome()
            except GlueError as error:
                return error.reason
    return None


def with_unnamed(root: StagePattern, record: Record, unnamed: Mapping[str, Any], plan: Plan) -> str:
    """The root pattern, with the inputs that it lacks if they are as long as a share of what runs replicated."""
    letters, least = (
        iter([x for x in LETTERS if x not in record.sizes]),
        min(w.bytes for w in plan.of_inputs) / plan.size,
    )
    long = {param: x for param, x in unnamed.items() if param.isidentifier() and x.ndim and x.nbytes >= least}
    more = [str(TensorPattern(axes_of(x, record.sizes, letters), frozenset(), param)) for param, x in long.items()]
    inputs, arrow, outputs = root.text.partition("->")
    return ", ".join([inputs.strip(), *more]) + (f" -> {outputs.strip()}" if arrow else "") if more else ""


def axes_of(x: Operand, sizes: Mapping[str, int], letters: Iterator[str]) -> tuple[tuple[str], ...]:
    """The names of a tensor's dims: the name of the model's only dim of this size, or else the next letter."""
    names = list[str]()
    for d, size in enumerate(x.shape):
        alike = [name for name, length in sizes.items() if length == size and name not in names]
        if d == 0 and size == 1:
            alike = [next((name for name in sizes if name in BATCH_NAMES), "b")]
        names.append(alike[0] if len(alike) == 1 else next(letters))
    return tuple((name,) for name in names)
