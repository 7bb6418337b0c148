"""The graphs of `compile=` in this implementation: how its forward is recorded (`dsp.compiled`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dsp.compiled.graphs import Graph, Graphs, Traced
from dsp.compiled.guards import options_of
from dsp.compiled.reasons import CHANGES, RANDOM, SIMPLE, Unfit, reasons_in, refuse_for
from dsp.compiled.recorded import hold, unique
from dsp.compiled.tidy import tidy
from dsp.plan.script import Script
from dsp.private import graph_of, hooks_of, pytree
from dsp.run.forward import Run
from dsp.run.outputs import Made, bring_out, hand_out
from dsp.run.whole import active
from dsp.sharded import Sharded, carry, plain


class RunGraphs(Graphs):
    """The graphs of a model that a runtime runs."""

    def graph_for(self, entry: Any, leaves: Sequence[Any]) -> int | None:
        return None if entry.plan is None else self.choose(entry, leaves)

    def run(self, runtime: Any, entry: Any, number: int, args: Any, kwargs: Any) -> Any:
        """The output of a call by its graph, which is recorded if it is new. Raise Unfit if there can be none."""
        flat, spec = pytree.tree_flatten((args, kwargs))
        given = [t for t in flat if isinstance(t, Tensor)]
        if any(type(t) not in (Tensor, nn.Parameter, Sharded) for t in given):
            raise Unfit("an input is of another type than torch.Tensor")
        if number == len(entry.graphs):
            runtime.agreement.finish()  # reads real tensors, so not while recording
            entry.graphs.append(self.record(flat, lambda: recorded(runtime, entry, flat, spec)))
        graph: Graph = entry.graphs[number]
        return hand_out(self.axis, graph.output, list(zip(graph([plain(t) for t in given]), graph.places)))


def recorded(runtime: Any, entry: Any, flat: list[Any], spec: Any) -> Traced:
    """The graph of a forward on local tensors, the structure of its output, and the layouts of its results."""
    script, model = entry.plan.script, runtime.model
    held = unique([*model.named_parameters(), *model.named_buffers()])
    names, weights = [name for name, _ in held], [w for _, w in held]
    refuse_for([*reasons_before(runtime, script, flat, weights)])
    run = Run(runtime.axis, script, entry.sizes, {}, runtime.first)
    run.by_graph = True
    output: Any = None
    made: list[Made] = []
    swapped: dict[str, Tensor] = {}  # weights without data, by name

    class Forward(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, args: Any, kwargs: Any) -> None:
            nonlocal output, made
            with active(runtime, run):
                output = runtime.forward(*args, **kwargs)
            now = {id(t) for t in (*model.parameters(), *model.buffers())}
            if any(id(t) not in now for t in swapped.values()):
                raise Unfit(CHANGES)
            made = bring_out(run, output, runtime.root, runtime.gather_output)

    def forward(weights: Sequence[Tensor], *locals_: Tensor) -> list[Tensor]:
        own = iter(locals_)
        values = [carried(v, next(own)) if isinstance(v, Tensor) else v for v in flat]
        args, kwargs = pytree.tree_unflatten(values, spec)
        swapped.update((f"model.{name}", w) for name, w in zip(names, weights))
        torch.func.functional_call(holder, swapped, (args, kwargs))
        return [t for t, _ in made]

    holder = Forward()
    locals_ = [plain(t) for t in flat if isinstance(t, Tensor)]
    # distinct inputs even if two are the same tensor now; and leaves, because torch reads .grad of leaves only
    leaves = [t.detach().requires_grad_(t.requires_grad) for t in locals_]
    graph = graph_of(forward, weights, *leaves)
    if run.unknown is not None:
        raise Unfit("its forward does not follow the plan")
    refuse_for([*reasons_in(graph, output, [t for t, _ in made], runtime.graphs.backend)])
    tidy(graph.graph, [t.requires_grad for t in (*weights, *leaves)])
    hold(graph, weights)
    return Traced(graph, output, [lies for _, lies in made])


def carried(given: Tensor, local: Tensor) -> Tensor:
    """The stand-in for an input of the forward."""
    if not isinstance(given, Sharded):
        return local
    t = carry(local, given.at, given.number)
    t.__dict__.update({k: v for k, v in given.__dict__.items() if k == "_dsp_copy_of"})
    return t


def reasons_before(runtime: Any, script: Script, flat: list[Any], weights: list[Tensor]) -> Iterator[str]:
    """The reasons against a graph that are known before recording."""
    if script.recorded:
        yield "its control flow depends on the values of tensors"
    if script.random_glue or script.random_stages:
        yield RANDOM
    for odd in (v for v in options_of(flat) if type(v) not in SIMPLE):
        yield f"an input is a {type(odd).__name__}, which may hold anything"
    if any(type(w) not in (Tensor, nn.Parameter) for w in weights):
        yield "a weight is not a plain tensor, for instance a DTensor of fully_shard"
    own = {(id(module), key) for module, *keys in runtime.hooks for key in keys}
    for name, module in runtime.model.named_modules():
        if "forward" in module.__dict__ and module is not runtime.model:
            yield f"{name!r} has been given another forward, as by torch.compile or a cache"
        for hooks in hooks_of(module):
            if any((id(module), key) not in own for key in hooks) and module is not runtime.model:
                yield f"{name!r} has a hook, which would run once and never again"
