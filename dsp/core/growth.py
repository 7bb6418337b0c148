"""Plan again from a record that grew: a forward ran nodes that its record did not have.

The new record has copies of all nodes, without decisions. Tensors of earlier calls still carry the old record, whose
decisions a checkpoint among them will find in backward.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dsp.core.inputs import add_input_base
from dsp.core.record import Node, Operation, Record, Ref
from dsp.core.torch_calls import Operand, replaced

AT_ONCE = 4  # times that a record that grew is planned again for the next call; later it waits for 2, 4, 8 such calls


def due(record: Record) -> bool:
    """Count a call that added nodes to a record, and tell whether it is to be planned again."""
    record.strays += 1
    return record.strays >= 1 << max(0, record.replans - AT_ONCE)


def grown(record: Record) -> Record:
    """A copy of a record that no plan was made of yet. Outputs come last."""
    new = Record(record.n, record.sizes, record.rules, record.stages)
    copies = NodeCopies(record)
    new.patterns, new.sources, new.no_sources = record.patterns, record.sources, record.no_sources
    new.sources_recompute, new.compiled = record.sources_recompute, record.compiled
    new.draws = record.draws or record.drew
    new.outputs = record.outputs
    new.replans, new.priced = record.replans + 1, record.priced
    new.memories, new.count, new.longest = None, record.count, record.longest
    for param, ref in record.inputs.items():
        new.inputs[param] = copies.of(ref)
        add_input_base(new, param, ref.base.arrival[0])
    for path, ref in record.persistent.items():
        new.persistent[path] = copies.of(ref)
        new.new_base(new.persistent[path], persistent=True).arrive(ref.base.arrival[0])
    for ref in copies.foreign:
        new.new_base(ref, persistent=True).arrive(None)
    ran = [node for node in record.nodes if node.results or node.kind != "stage"]  # else it raised an error
    nodes = {node: copies.node(node) for node in sorted(ran, key=lambda node: node.kind == "output")}
    new.nodes = [*nodes.values()]
    for node, copy in nodes.items():
        copy.by_sizes = {sizes: nodes[variant] for sizes, variant in node.by_sizes.items()}
    if record.drew and record.planned:  # some stage may have begun to draw
        for node in new.nodes:
            node.draws = node.draws or None
    for key, several in record.by_key.items():
        if node_copies := [nodes[node] for node in several if node in nodes]:
            new.by_key[copies.key(key)] = node_copies
    return new


class NodeCopies:
    """The copies of what a record holds, for another.

    foreign: what an earlier call left, with its place in the record of that call.
    """

    def __init__(self, record: Record) -> None:
        results = (r for node in record.nodes for r in node.results)
        same = {"base": None, "maker": None, "gradient": None}
        inside = {*record.inputs.values(), *record.persistent.values(), *results}
        self.refs = {r: replace(r, **same, view_cuts={}) for r in inside}  # type: ignore[arg-type]
        read = (t for node in record.nodes for t in node.refs)
        self.foreign = dict.fromkeys(t for t in read if t not in inside)

    def of(self, t: Operand) -> Any:
        """The copy of a reference; an operand that is none, or of another record, itself."""
        return self.refs.get(t, t)  # type: ignore[call-overload]

    def node(self, node: Node) -> Node:
        operands = [*map(self.of, node.operands)]
        call: Any = node.call
        if isinstance(call, Operation):
            call = Operation(call.func, *replaced(call.args, call.kwargs, iter(operands)))
        return replace(
            node, operands=operands, results=[*map(self.of, node.results)], call=call, offers=[], offer=None, moves=[],
            push=[], view=False, view_cut=None,
        )  # fmt: skip

    def key(self, part: Any) -> Any:
        """The key of a node, or a part of it, with the copies of references."""
        if isinstance(part, tuple):
            return tuple(map(self.key, part)) if type(part) is tuple else part
        return self.refs.get(part, part) if isinstance(part, Ref) else part
