"""Remove from a recorded graph the traces of recording: views of unchanged tensors, and switches of the gradient mode.

A sharded tensor is a subclass that views its shard, so each operation is recorded with two views and four switches of
the gradient mode around it, and some operations with a meta tensor that was used to compute strides. These took the
host twice as long as the operation.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.fx import Graph, Node

from dsp.support.private import GRAD_SWITCH, OpOverload, schema_of


def tidy(graph: Graph, graded: Iterable[bool]) -> None:
    """Remove nodes without effect from a graph; `graded`: for each input, whether it requires a gradient."""
    for node in reversed(graph.nodes):
        if is_unused(node):
            graph.erase_node(node)
    on = written = torch.is_grad_enabled()
    now = on
    flags, needing, all_need = iter(graded), set[Node](), False
    for node in list(graph.nodes):
        if node.target is GRAD_SWITCH:
            now = node.args[0]
            graph.erase_node(node)
        elif node.op == "placeholder":
            if next(flags):
                needing.add(node)
        elif node.op == "output":
            if written != on:
                switch(graph, node, on)
        elif node.op == "call_function":
            needs = all_need or not needing.isdisjoint(node.all_input_nodes)
            if is_view_of_itself(node) and (now or not needs):
                replace_by_its_argument(graph, node)
                continue
            if needs and written != now:
                switch(graph, node, now)
                written = now
            if needs and now:
                needing.add(node)
                all_need |= writes(node)  # after a write, every view of the written tensor may need a gradient


def switch(graph: Graph, before: Node, on: bool) -> None:
    with graph.inserting_before(before):
        graph.call_function(GRAD_SWITCH, (on,))


def is_unused(node: Node) -> bool:
    """Tell whether a node is an aten operation without side effects whose result is unused."""
    op = node.target
    return not node.users and isinstance(op, OpOverload) and op.namespace == "aten" and not node.is_impure()


def is_view_of_itself(node: Node) -> bool:
    """Tell whether a node is ``x.view_as(x)`` and not an output of the graph, which must not be an input itself."""
    same = node.target is torch.ops.aten.view_as.default and node.args[0] is node.args[1]
    return same and all(user.op != "output" for user in node.users)


def replace_by_its_argument(graph: Graph, node: Node) -> None:
    node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
    graph.erase_node(node)


def writes(node: Node) -> bool:
    """Tell whether an operation writes in place."""
    return isinstance(node.target, OpOverload) and schema_of(node.target).is_mutable
