"""A forward as one graph for torch.compile: the operations on local shards, and the plan's collectives.

The second call of a signature is recorded, on tensors without data. Python code between the operations, such as this
library's rules and the model's own code, runs only then and is not in the graph. So a graph is valid for calls like the
recorded one: inputs of the same signature, the same Python values among them, the same modules with the same
attributes. Other calls get graphs of their own. A forward that cannot be one graph runs uncompiled; a log message says
so once.
"""

from __future__ import annotations

import copy
import logging
import random
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.fx import GraphModule
from torch.overrides import TorchFunctionMode

from dsp.guard.agreement import same
from dsp.layout import At, Axis
from dsp.observers import observing
from dsp.plan.script import Script
from dsp.private import (
    OF_AN_OP,
    FakeTensor,
    OpOverload,
    _disable_current_modes,
    _get_current_dispatch_mode,
    _get_current_function_mode,
    graph_of,
    hooks_of,
    pytree,
    saving_hooks,
    schema_of,
)
from dsp.rules.functions import RECURRENCES
from dsp.run.forward import Run, Unfit
from dsp.run.guards import Guards, options_of
from dsp.run.outputs import Made, bring_out, hand_out
from dsp.run.tidy import tidy
from dsp.run.whole import active
from dsp.sent import COLLECTIVES
from dsp.sharded import Sharded, carry, plain
from dsp.tensors import tensors_in
from dsp.world import World

log = logging.getLogger("dsp")

MOST = 8  # graphs per signature
ORDERLY = ("eager", "aot_eager")  # backends that keep the order of operations, whatever the sizes
SIMPLE = (bool, int, float, str, type(None), torch.dtype, torch.device)
CHANGES = "it changes what its modules hold"
SAID = "compile: %s runs uncompiled, because %s"


class Graphs:
    """The graphs of a parallelized model, and the choice of one for a call."""

    def __init__(self, model: nn.Module, axis: Axis, backend: str | bool) -> None:
        self.model, self.axis, self.backend = model, axis, "inductor" if backend is True else str(backend)
        self.said = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Graphs:
        return Graphs(copy.deepcopy(self.model, memo), self.axis, self.backend)

    def graph_for(self, entry: Any, leaves: Sequence[Any]) -> int | None:
        """The index of the graph for a call; the number of graphs so far if a new one has to be recorded, and None if
        the call runs without a graph. Not for the first call of a signature."""
        if entry.graphs is None or entry.plan is None:
            return None
        if _get_current_function_mode() is not None or saving_hooks(False) is not None:
            return None
        options = options_of(leaves)
        for i, graph in enumerate(entry.graphs):
            if graph.guards.hold(options):
                return i
        if len(entry.graphs) == MOST:
            self.give_up(entry, f"its numbers or attributes were others in each of {MOST} calls")
            return None
        return len(entry.graphs)

    def give_up(self, entry: Any, reason: str) -> None:
        entry.graphs = None
        if not self.said:
            self.said = True
            (log.warning if self.axis.rank == 0 else log.info)(SAID, type(self.model).__name__, reason)

    def run(self, runtime: Any, entry: Any, number: int, args: Any, kwargs: Any) -> Any:
        """The output of a call by its graph, which is recorded if it is new. Raise Unfit if there can be none."""
        flat, spec = pytree.tree_flatten((args, kwargs))
        given = [t for t in flat if isinstance(t, Tensor)]
        if any(type(t) not in (Tensor, nn.Parameter, Sharded) for t in given):
            raise Unfit("an input is of another type than torch.Tensor")
        if number == len(entry.graphs):
            entry.graphs.append(self.record(runtime, entry, flat, spec))
        return entry.graphs[number](self.axis, [plain(t) for t in given])

    def record(self, runtime: Any, entry: Any, flat: list[Any], spec: Any) -> Graph:
        runtime.agreement.finish()  # reads real tensors, so not while recording
        options, why, made = options_of(flat), "", None
        guards = Guards(self.model, options, self.axis.mesh.device_type)
        drawn = random.getstate(), np.random.get_state()
        with World(self.model, flat):
            try:
                with _disable_current_modes(), observing(None), RefuseUnseen():
                    made = recorded(runtime, entry, flat, spec)
            except Unfit as reason:
                why = str(reason)
            except Exception as error:
                log.info("compile: no graph of %s", type(self.model).__name__, exc_info=True)
                why = f"it cannot be recorded: {type(error).__name__}: {error}"
            drew = drawn[0] != random.getstate() or repr(drawn[1]) != repr(np.random.get_state())
            if not guards.hold(options) or guards.written():
                why = why or CHANGES
        if drew:
            why = why or "it draws random numbers of Python's or NumPy's"
        # without a graph, or with another graph, a rank might issue its collectives in another order
        if not same(self.axis, (bool(why), made and collectives(made[0].graph))):
            why = why or "another rank could not record it, or recorded it otherwise"
        if made is None or why:
            raise Unfit(why)
        backend = self.backend
        if backend not in ORDERLY and not same(self.axis, shapes(made[0].graph)):
            # a compiler that decides by sizes might order collectives differently on a rank with smaller shards
            backend = "aot_eager"
        for node in made[0].graph.nodes:
            node.meta.clear()  # drops the tensors without data
        if backend == "eager":
            return Graph(guards, *made, made[0])
        # the method, not the module: an error inside a module's graph would be reported as the compiler's own
        compiled = torch.compile(made[0].forward, fullgraph=True, dynamic=False, backend=backend)
        return Graph(guards, *made, compiled)


class Graph:
    """A recorded forward. plainly: the graph run operation by operation; compiled: the compiled graph; lies: the
    layouts of its outputs."""

    def __init__(
        self, guards: Guards, plainly: GraphModule, output: Any, lies: Sequence[At | bool], compiled: Any
    ) -> None:
        self.called = False
        self.guards, self.plainly, self.output, self.lies, self.compiled = guards, plainly, output, lies, compiled

    def __call__(self, axis: Axis, locals_: list[Tensor]) -> Any:
        if _get_current_dispatch_mode() is not None:  # a mode, such as a counter, sees no operation of compiled code
            made = self.plainly(*locals_)
        elif self.called:
            made = self.compiled(*locals_)
        else:
            made, self.called = self.at_first(locals_), True
        return hand_out(axis, self.output, list(zip(made, self.lies)))

    def at_first(self, locals_: list[Tensor]) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*is not a leaf Tensor")  # the compiler reads .grad of its inputs
            return self.compiled(*locals_)


def recorded(runtime: Any, entry: Any, flat: list[Any], spec: Any) -> tuple[GraphModule, Any, list[At | bool]]:
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
    refuse_for([*reasons_in(graph, output, made, runtime.graphs.backend)])
    tidy(graph.graph, [t.requires_grad for t in (*weights, *leaves)])
    hold(graph, weights)
    return graph, output, [lies for _, lies in made]


def carried(given: Tensor, local: Tensor) -> Tensor:
    """The stand-in for an input of the forward."""
    if not isinstance(given, Sharded):
        return local
    t = carry(local, given.at, given.number)
    t.__dict__.update({k: v for k, v in given.__dict__.items() if k == "_dsp_copy_of"})
    return t


def unique(named: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    return [*{id(t): (name, t) for name, t in named}.values()]


def refuse_for(reasons: Sequence[str]) -> None:
    """Raise Unfit with all reasons, if there are any."""
    if reasons:
        raise Unfit("; ".join(dict.fromkeys(reasons)))


def reasons_before(runtime: Any, script: Script, flat: list[Any], weights: list[Tensor]) -> Iterator[str]:
    """The reasons against a graph that are known before recording."""
    if script.recorded:
        yield "its control flow depends on the values of tensors"
    if script.random_glue or script.random_stages:
        yield "it draws random numbers"
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


def reasons_in(graph: GraphModule, output: Any, made: Sequence[Made], backend: str) -> Iterator[str]:
    """The reasons against a graph that the recording shows."""
    if not made:
        yield "it returns no tensor"
    if function := own_function([t for t, _ in made]):
        yield f"the autograd.Function {function} is in it, whose backward a graph would not call"
    for odd in (v for v in pytree.tree_leaves(output) if not (isinstance(v, (Tensor, *SIMPLE)) or is_dataclass(v))):
        yield f"it returns a {type(odd).__name__}, which may hold anything"
    yield from draws(graph)
    if torch.is_grad_enabled() and backend != "eager":
        yield from recurrences(graph)
    yield from strangers(graph)


def own_function(tensors: Iterable[Tensor]) -> str:
    """The name of an autograd.Function, other than a custom op's, in the history of these tensors; "" if none is."""
    waiting, seen = [t.grad_fn for t in tensors], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, BackwardCFunction) and not type(node).__name__.startswith(OF_AN_OP):
            return node.name().removesuffix("Backward")
        waiting += [of for of, _ in node.next_functions]
    return ""


def draws(graph: GraphModule) -> Iterator[str]:
    for node in graph.graph.nodes:
        op = node.target
        if not isinstance(op, OpOverload) or torch.Tag.nondeterministic_seeded not in op.tags:
            continue
        named = {a.name: a.default_value if a.has_default_value() else 1 for a in schema_of(op).arguments}
        given = named | dict(zip(named, node.args)) | node.kwargs
        share = next((given[name] for name in ("dropout_p", "dropout", "p") if name in given), 1)
        if share and given.get("train", True):
            yield f"it draws random numbers ({op})"


def recurrences(graph: GraphModule) -> Iterator[str]:
    for node in graph.graph.nodes:
        name = node.target.overloadpacket.__name__ if isinstance(node.target, OpOverload) else ""
        if name in RECURRENCES:
            yield f"torch.compile takes no recurrence (aten.{name}) where there are gradients"


def strangers(graph: GraphModule) -> Iterator[str]:
    """Reasons against a graph: weights or fake tensors that neither inputs nor modules hold; others are constant."""
    for node in graph.graph.nodes:
        held = getattr(graph, node.target, None) if node.op == "get_attr" else None
        if isinstance(held, (nn.Parameter, FakeTensor)):
            yield "it uses a weight, or a tensor of its own making, that no module holds"


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
            held = graph.graph.get_attr(name)
        place.replace_all_uses_with(held)
        graph.graph.erase_node(place)
    graph.graph.set_codegen(torch.fx.graph.CodeGen())
    graph.recompile()


def collectives(graph: torch.fx.Graph) -> list[Any]:
    """The collectives of a graph in order, each with its arguments that are the same on all ranks."""
    found = []
    for node in graph.nodes:
        op = node.target
        if isinstance(op, OpOverload) and op.namespace == "dsp" and schema_of(op).name.split("::")[1] in COLLECTIVES:
            found.append((schema_of(op).name, *filter(told, node.args)))
    return found


def told(argument: Any) -> bool:
    """Tell whether an argument of a node is a constant: not another node, nor a list of nodes."""
    return isinstance(argument, (int, str)) or (
        isinstance(argument, (list, tuple)) and all(isinstance(a, int) for a in argument)
    )


def shapes(graph: torch.fx.Graph) -> list[Any]:
    """The shapes by which a compiler may decide."""
    return [(str(node.target), [tuple(t.shape) for t in tensors_in(node.meta.get("val"))]) for node in graph.nodes]


class RefuseUnseen(TorchFunctionMode):
    """A mode that refuses functions whose effect a graph would not repeat."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in UNSEEN:
            name = getattr(func, "__name__", "")
            raise Unfit(f"it uses Tensor.{'data' if name.startswith('__') else name}, which a graph does not see")
        return func(*args, **(kwargs or {}))


UNSEEN = (
    Tensor.data.__get__, Tensor.data.__set__, Tensor.register_hook, Tensor.retain_grad,  # type: ignore[attr-defined]
)  # fmt: skip
