"""Calls of a parallel model by graphs: each replays the nodes of a record, their moves, and what runs between them.

The planned forward runs once on tensors without data, and each operation on local tensors that it makes is recorded:
of its nodes with their offers, of the moves before them, and of plain tensors between them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from dsp.compiled.graphs import Graphs, Kind, Traced
from dsp.compiled.guards import options_of
from dsp.compiled.reasons import CHANGES, RANDOM, SIMPLE, NotYet, Unfit, reasons_in, refuse_for
from dsp.compiled.recorded import hold, unique
from dsp.compiled.tidy import tidy
from dsp.core.carrier import Carrier, carry, plain
from dsp.core.module_calls import HookedCall
from dsp.core.observed import Events, ModelCall
from dsp.core.parallel import RECORDS, Output, Parallel, hand_out
from dsp.core.record import Record
from dsp.core.run import at_once
from dsp.core.torch_traits import RECURRENCES
from dsp.core.unplanned import Unplanned
from dsp.core.watch import watched
from dsp.support.private import CompileOff, graph_of, hooks_of, pytree


class Replay:
    """Runs the calls of a parallel model by graphs, from the second one with a record on."""

    def __init__(self, parallel: Parallel, backend: str | bool) -> None:
        self.parallel = parallel
        self.graphs = Graphs(parallel.model, parallel.axis, backend)
        self.kinds: dict[Any, Kind] = {}

    def __call__(self, call: ModelCall, args: Any, kwargs: Any) -> Any:
        """The output of a call; NotImplemented where no graph serves it."""
        key = call.key, torch.is_inference_mode_enabled()
        kind = self.kinds.get(key)
        if kind is None:
            if len(self.kinds) >= RECORDS:
                del self.kinds[next(iter(self.kinds))]
            self.kinds[key] = Kind()
            return NotImplemented
        number = self.graphs.choose(kind, call.leaves)
        if number is None or kind.graphs is None:
            return NotImplemented
        flat, spec = pytree.tree_flatten((args, kwargs))
        if number == len(kind.graphs):
            try:
                plainly = [plain(v) if isinstance(v, Carrier) else v for v in flat]
                kind.graphs.append(self.graphs.record(plainly, lambda: self.trace(call.record, flat, spec)))
            except NotYet:
                return NotImplemented
            except Unfit as reason:
                self.graphs.give_up(kind, str(reason))
                return NotImplemented
        graph = kind.graphs[number]
        tensors = graph([plain(t) for t in flat if isinstance(t, Tensor)])
        outputs = [place._replace(tensor=t) for t, place in zip(tensors, graph.places)]
        return hand_out(self.parallel.axis, graph.output, outputs)

    def trace(self, record: Record, flat: list[Any], spec: Any) -> Traced:
        """The graph of a forward on local tensors; flat: its arguments, with carriers."""
        parallel, model = self.parallel, self.parallel.model
        named = unique([*model.named_parameters(), *model.named_buffers()])
        weights = [w for _, w in named]
        refuse_for([*reasons_before(model, record, flat, weights)])
        forward = TracedForward(parallel, record, [f"model.{name}" for name, _ in named], flat, spec)
        parts = [plain(t) for t in flat if isinstance(t, Tensor)]
        # distinct inputs even if two are the same tensor now; and leaves, because torch reads .grad of leaves only
        leaves = [t.detach().requires_grad_(t.requires_grad) for t in parts]
        driver: Any = record.driver
        record.driver, before = forward.runner, forward.added.count
        try:
            graph = graph_of(forward.on_tensors, weights, *leaves)
        finally:
            record.driver = driver
        if forward.added.count > before:  # the next call may have another plan
            raise NotYet("its forward does not follow the plan")
        tensors = [output.tensor for output in forward.outputs]
        refuse_for([*reasons_in(graph, forward.output, tensors, self.graphs.backend)])
        tidy(graph.graph, [t.requires_grad for t in (*weights, *leaves)])
        hold(graph, weights)
        places = [output._replace(tensor=torch.empty(0, device="meta")) for output in forward.outputs]
        return Traced(graph, forward.output, places)


class TracedForward(nn.Module):
    """The forward of a parallel model as a function of its weights and of the local tensors among its arguments.

    output: what the model returned; outputs: the tensors in it.
    """

    def __init__(self, parallel: Parallel, record: Record, names: Sequence[str], flat: list[Any], spec: Any) -> None:
        super().__init__()
        self.model, self.parallel, self.record = parallel.model, parallel, record
        self.names, self.flat, self.spec = names, flat, spec
        driver: Any = record.driver
        self.added: Unplanned = driver.added  # in which its copy counts, too
        self.runner = copy.copy(driver)
        self.runner.send = at_once
        self.output: Any = None
        self.outputs: list[Output] = []

    def on_tensors(self, weights: Sequence[Tensor], *tensors: Tensor) -> list[Tensor]:
        parts = iter(tensors)
        values = [self.carried(v, next(parts)) if isinstance(v, Tensor) else v for v in self.flat]
        args, kwargs = pytree.tree_unflatten(values, self.spec)
        torch.func.functional_call(self, dict(zip(self.names, weights)), tuple(args), kwargs)
        return [output.tensor for output in self.outputs]

    def forward(self, *args: Any, **kwargs: Any) -> None:
        parallel, model, record = self.parallel, self.model, self.record
        swapped = [*model.parameters(), *model.buffers()]
        with watched(record), CompileOff() if record.compiled else nullcontext():
            self.output = parallel.forward(*args, **kwargs)
        if {*map(id, swapped)} != {*map(id, (*model.parameters(), *model.buffers()))}:
            raise Unfit(CHANGES)
        self.outputs = parallel.bring_out(self.runner, self.output)

    def carried(self, argument: Tensor, part: Tensor) -> Tensor:
        """The stand-in for a tensor among the arguments."""
        return carry(self.record, part, argument.ref, argument.cut) if isinstance(argument, Carrier) else part


def reasons_before(model: nn.Module, record: Record, flat: list[Any], weights: list[Tensor]) -> Iterator[str]:
    """The reasons against a graph that are known before recording."""
    if not record.planned:
        yield "its control flow depends on the values of tensors"
    drawing = {node.name for node in record.nodes if node.draws}
    if (
        drawing.difference(RECURRENCES) or record.drew or (record.draws and not drawing)
    ):  # the graph says if recurrences draw
        yield RANDOM
    if any(node.checkpointed for node in record.nodes):
        yield "it has an activation checkpoint"
    if record.persistent:
        yield "it reads what an earlier call left"
    if any(type(t) not in (Tensor, nn.Parameter, Carrier) for t in flat if isinstance(t, Tensor)):
        yield "an input is of another type than torch.Tensor"
    for odd in (v for v in options_of(flat) if type(v) not in SIMPLE):
        yield f"an input is a {type(odd).__name__}, which may hold anything"
    if any(type(w) not in (Tensor, nn.Parameter) for w in weights):
        yield "a weight is not a plain tensor, for instance a DTensor of fully_shard"
    yield from reasons_of_modules(model)


def reasons_of_modules(model: nn.Module) -> Iterator[str]:
    """The reasons that its modules give: hooks on them, and forwards that replace theirs."""
    for name, module in model.named_modules():
        if module is model:
            continue
        if any(hooks_of(module)):
            yield f"{name!r} has a hook, which would run once and never again"
        forward = module.__dict__.get("forward")
        if forward is not None and not isinstance(getattr(forward, "__self__", None), HookedCall):
            yield f"{name!r} has been given another forward, as by torch.compile or a cache"


class Compiled:
    """The observer that lets graphs run the calls of a model, compiled by a backend (True: by inductor)."""

    def __init__(self, backend: str | bool) -> None:
        self.backend = backend

    def __call__(self, parallel: Any, events: Events) -> None:
        events.instead = Replay(parallel, self.backend)
