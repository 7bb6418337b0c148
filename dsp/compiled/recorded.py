"""A recorded graph: its weights as attributes, and what ranks compare of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from dsp.comm.traffic_formulas import COLLECTIVES
from dsp.support.private import OpOverload, schema_of
from dsp.support.tensors import tensors_in


def unique(named: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    return [*{id(t): (name, t) for name, t in named}.values()]


def hold(graph: GraphModule, weights: Sequence[Tensor]) -> None:
    """Turn weights, the first arguments of a graph, into its attributes."""
    places = [node for node in graph.graph.nodes if node.op == "placeholder"]
    for i, (place, weight) in enumerate(zip(places, weights)):
        name = f"weight_{i}"
        if isinstance(weight, nn.Parameter):
            graph.register_parameter(name, weight)
        else:
            graph.register_buffer(name, weight)
        with graph.graph.inserting_before(place):
            attribute = graph.graph.get_attr(name)
        place.replace_all_uses_with(attribute)
        graph.graph.erase_node(place)
    graph.graph.set_codegen(torch.fx.graph.CodeGen())
    graph.recompile()


def collectives(graph: torch.fx.Graph) -> list[Any]:
    """The collectives of a graph in order, each with its arguments that are the same on all ranks."""
    calls = []
    for node in graph.nodes:
        op = node.target
        if isinstance(op, OpOverload) and op.namespace == "dsp" and schema_of(op).name.split("::")[1] in COLLECTIVES:
            calls.append((schema_of(op).name, *filter(constant, node.args)))
    return calls


def constant(argument: Any) -> bool:
    """Tell whether an argument of a node is a constant: not another node, nor a list of nodes."""
    return isinstance(argument, (int, str)) or (
        isinstance(argument, (list, tuple)) and all(isinstance(a, int) for a in argument)
    )


def shapes(graph: torch.fx.Graph) -> list[Any]:
    """The shapes by which a compiler may decide."""
    return [(str(node.target), [tuple(t.shape) for t in tensors_in(node.meta.get("val"))]) for node in graph.nodes]
