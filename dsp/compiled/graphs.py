"""The graphs of a model for `compile=`: which one serves a call, and how a new one is recorded and compiled.

A forward is recorded in the second call of a signature, on tensors without data. Python code between the operations,
such as this library's rules and the model's own code, runs only then and is not in the graph. So a graph is valid for
calls like the recorded one: inputs of the same signature, the same Python values among them, the same modules with the
same attributes. Other calls get graphs of their own. A forward that cannot be one graph runs uncompiled; a log message
says so once.
"""

from __future__ import annotations

import copy
import logging
import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from dsp.comm.layout import Axis
from dsp.comm.observers import observing
from dsp.compiled.guards import Guards, options_of
from dsp.compiled.reasons import CHANGES, NotYet, RefuseUnseen, Unfit
from dsp.compiled.recorded import collectives, shapes
from dsp.guard.agreement import same
from dsp.support.private import (
    _disable_current_modes,
    _get_current_dispatch_mode,
    _get_current_function_mode,
    saving_hooks,
)
from dsp.support.python_state import World
from dsp.support.tensors import map_tensors, tensors_in

log = logging.getLogger("dsp")

MOST = 8  # graphs per signature
ORDERLY = ("eager", "aot_eager")  # backends that keep the order of operations, whatever the sizes
SAID = "compile: %s runs uncompiled, because %s"


@dataclass
class Kind:
    """The calls of one signature, and their graphs; None: there can be none."""

    graphs: list[Graph] | None = field(default_factory=list)


class Traced:
    """A recorded forward: its graph, what it returned, and the places of the tensors in that, in any form."""

    def __init__(self, graph: GraphModule, output: Any, places: Sequence[Any]) -> None:
        self.graph, self.places = graph, places
        self.output = map_tensors(output, [torch.empty(0, device="meta") for _ in tensors_in(output)])


class Graphs:
    """The graphs of a model, and the choice of one for a call."""

    def __init__(self, model: nn.Module, axis: Axis, backend: str | bool) -> None:
        self.model, self.axis, self.backend = model, axis, "inductor" if backend is True else str(backend)
        self.said = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Graphs:
        return type(self)(copy.deepcopy(self.model, memo), self.axis, self.backend)

    def choose(self, kind: Any, leaves: Sequence[Any]) -> int | None:
        """The index of the graph for a call; the number of graphs so far if a new one has to be recorded, and None if
        the call runs without a graph. Not for the first call of a signature."""
        if kind.graphs is None or _get_current_function_mode() is not None or saving_hooks(False) is not None:
            return None
        options = options_of(leaves)
        for i, graph in enumerate(kind.graphs):
            if graph.guards.hold(options):
                return i
        if len(kind.graphs) == MOST:
            self.give_up(kind, f"its numbers or attributes were others in each of {MOST} calls")
            return None
        return len(kind.graphs)

    def give_up(self, kind: Any, reason: str) -> None:
        kind.graphs = None
        if not self.said:
            self.said = True
            (log.warning if self.axis.rank == 0 else log.info)(SAID, type(self.model).__name__, reason)

    def record(self, flat: list[Any], trace: Callable[[], Traced]) -> Graph:
        """A graph for calls like this one, compiled. Raise Unfit, on all ranks, if there can be none, and
        NotYet, on all ranks, if a later call is to try again.

        flat: the arguments, without carriers; trace: records the forward on tensors without data.
        """
        options, why, traced, retry = options_of(flat), "", None, False
        guards = Guards(self.model, options, self.axis.mesh.device_type)
        states = random.getstate(), np.random.get_state()
        with World(self.model, flat):
            try:
                with _disable_current_modes(), observing(None), RefuseUnseen():
                    traced = trace()
            except Unfit as reason:
                why, retry = str(reason), isinstance(reason, NotYet)
            except Exception as error:
                log.info("compile: no graph of %s", type(self.model).__name__, exc_info=True)
                why = f"it cannot be recorded: {type(error).__name__}: {error}"
            drew = states[0] != random.getstate() or repr(states[1]) != repr(np.random.get_state())
            if not guards.hold(options) or guards.written():
                why = why or CHANGES
        if drew:
            why = why or "it draws random numbers of Python's or NumPy's"
        # without a graph, or with another graph, a rank might issue its collectives in another order
        if not same(self.axis, (bool(why), retry, traced and collectives(traced.graph.graph))):
            why, retry = why or "another rank could not record it, or recorded it otherwise", False
        if traced is None or why:
            raise NotYet(why) if retry else Unfit(why)
        return Graph(guards, traced, self.compiled(traced.graph))

    def compiled(self, graph: GraphModule) -> Callable[..., Any]:
        backend = self.backend
        if backend not in ORDERLY and not same(self.axis, shapes(graph.graph)):
            # a compiler that decides by sizes might order collectives differently on a rank with smaller shards
            backend = "aot_eager"
        for node in graph.graph.nodes:
            node.meta.clear()  # drops the tensors without data
        if backend == "eager":
            return graph
        # the method, not the module: an error inside a module's graph would be reported as the compiler's own
        return torch.compile(graph.forward, fullgraph=True, dynamic=False, backend=backend)


class Graph:
    """A recorded forward. plainly: the graph run operation by operation; compiled: the compiled graph; output: what it
    returns, with tensors in its `places`."""

    def __init__(self, guards: Guards, traced: Traced, compiled: Callable[..., Any]) -> None:
        self.called = False
        self.guards, self.plainly, self.compiled = guards, traced.graph, compiled
        self.output, self.places = traced.output, traced.places

    def __call__(self, tensors: list[Tensor]) -> Any:
        """The local results, of the local tensors among the arguments."""
        if _get_current_dispatch_mode() is not None:  # a mode, such as a counter, sees no operation of compiled code
            return self.plainly(*tensors)
        if self.called:
            return self.compiled(*tensors)
        self.called = True
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*is not a leaf Tensor")  # the compiler reads .grad of its inputs
            return self.compiled(*tensors)
