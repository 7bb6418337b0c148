"""Record a forward: run it on tensors without data, and note each node."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from dsp.comm.layout import Axis, Cut
from dsp.core.carrier import LOCAL, Carrier, carry, carry_writable, claim, one_for_each, plain
from dsp.core.equal_modules import alike, fingerprint, once
from dsp.core.inputs import PersistentTensors, arrivals, carried_inputs, persistent_tensors, signature_of
from dsp.core.keys import key_part, node_key
from dsp.core.meter import Gradients, NodeMeter, Regions, edges_into, pack, unpack
from dsp.core.module_calls import StageCall
from dsp.core.offers import Rules, makes_parts, operands_of, stage_node
from dsp.core.reads import Reads
from dsp.core.record import Node, Operation, Record, Ref
from dsp.core.skeleton import STRAY, Casts, Fakes, Precision, Skeleton
from dsp.core.torch_calls import GlueError, replaced, tensor_args
from dsp.core.torch_traits import ATTRIBUTES_READ, DENSE, WITHOUT_DATA, Traits
from dsp.core.watch import KernelCall, Kernels, SeenOnly, add_source, covered, refuse, refuse_functions, watched
from dsp.core.writes import kin_of, written_operands
from dsp.stages.notation import NotationError, StagePattern
from dsp.stages.signature import Bound, sizes_of_root
from dsp.stages.stage import Stage
from dsp.support.private import CompileOff, any_device, compiled_callers, fake_tensor, hooks_of, wraps_compiled
from dsp.support.python_state import Path, World
from dsp.support.source_lines import line_now
from dsp.support.tensors import Edge, constants_in, edge, map_tensors, memory, remade, tensors_in, version


class Recorder:
    """Leads a forward on tensors without data, all replicated, and adds each node to the record.

    persistent: tensors in the place of the carriers that earlier calls left; state_of: a state of a stage's module,
    which shows by comparison whether it was written to.
    """

    axis: Axis  # of no rank: a forward that asks for it cannot be recorded

    def __init__(
        self, record: Record, meter: NodeMeter, persistent: Mapping[Ref, Tensor], state_of: Callable[[Stage], Any]
    ) -> None:  # fmt: skip
        self.record, self.meter, self.persistent, self.state_of = record, meter, persistent, state_of
        self.seen, self.kernels = SeenOnly(), Kernels()
        self.fills = dict[Any, Any]()  # by memory, the keys of calls that made plain tensors of one number
        self.regions, self.gradients = Regions(), Gradients()
        self.full_reads = dict[Ref, GlueError]()  # by tensor, the error if a plan may shard it

    def operand(self, t: Tensor) -> Tensor:
        """The tensor that an operation gets for a carrier: itself, or the full one that an earlier call left.

        Raises GlueError for one that an earlier recording left where nobody looks.
        """
        if not isinstance(t, Carrier):
            return t
        if t.record is not self.record:
            raise GlueError(f"the forward {STRAY}")
        return self.persistent.get(t.ref, t)

    def operation(self, func: Any, traits: Traits, args: Any, kwargs: Any, first: Any = None) -> Any:
        refuse(traits, args, kwargs)
        refuse_functions(tensor_args(args, kwargs))
        writes = written_operands(func, traits, args, kwargs)
        before, tensors = self.regions.saved(), [*map(self.operand, tensor_args(args, kwargs))]
        if traits.name in ATTRIBUTES_READ:
            tensors = [*map(plain, tensors)]
        if traits.in_place and (fill := self.fills.get(memory(tensors[0]))) is not None:
            self.record.filled.add(fill)
        edges = edges_into(tensors, traits.in_place)
        self.meter.start()
        args_, kwargs_ = replaced(args, kwargs, iter(tensors))
        with LOCAL():  # a carrier is such a tensor itself: a view of it would take as long as the call
            out = WITHOUT_DATA.get(func, func)(*args_, **kwargs_)
        return self.note(func, traits, args, kwargs, out, tensors, before, writes, edges)

    def note(
        self, func: Any, traits: Traits, args: Any, kwargs: Any, out: Any, tensors: Sequence[Tensor] = (),
        before: Sequence[tuple[int, int]] = (), writes: tuple[int, ...] = (), edges: Sequence[Edge | None] = (),
    ) -> Any:  # fmt: skip
        """Add the node of an operation that returned `out`, from these tensors; writes: those that it wrote into;
        edges: to which their gradients go."""
        record = self.record
        record.compiled |= any(True for _ in compiled_callers())
        operands = tensor_args(args, kwargs)
        refs = operands_of(operands)
        node = Node(
            "operation", traits.name, refs, Operation(func, *replaced(args, kwargs, iter(refs))),
            in_place=traits.in_place, writes=writes, loose=traits.name in DENSE, line=line_now(),
        )  # fmt: skip
        self.meter.finish(node)
        results = tensors_in(out)
        node.identity = len(results) == 1 and any(out is t for t in tensors[:1]) and not writes
        record.add(node_key(func, traits.name, args, kwargs), node)
        node.regions = self.regions.places(before)
        self.gradients.note(node, edges, edges_into(tensors[:1], True) if traits.in_place else map(edge, results))
        if node.identity or traits.in_place:
            return out if out is None else operands[0]
        node.results, node.kin = [*map(record.ref, results)], kin_of(operands, results)
        return self.carried(node, out)

    def read_in_full(self, t: Carrier, error: GlueError) -> None:
        error.line = line_now()
        self.full_reads.setdefault(t.ref, error)

    def stage(self, stage: Stage, call: Callable[..., Any], args: Any, kwargs: Any, first: Any) -> Any:
        record = self.record
        node, bound = stage_node(record, stage, args, kwargs)
        if not node.refs:
            if not makes_parts(node):
                return call(*args, **kwargs)
            add_source(record, stage)
        before, carried = self.regions.saved(), tensors_in((args, kwargs))
        nested = [t for t, _ in stage.signature.nested(args, kwargs) if isinstance(t, Carrier)]
        with torch.enable_grad():  # a stage in no_grad may return an argument, with its gradient
            tensors = [plain(self.operand(t)) for t in carried]
        args, kwargs = map_tensors((args, kwargs), tensors)
        operands, read = [b.tensor for b in bound], dict(zip(map(id, carried), tensors))
        refuse_functions(operands)
        versions, state = [*map(version, operands)], self.state_of(stage)
        full = [read[id(t)] for t in (*operands, *nested)]
        edges, written = [*map(edge, full)], [edges_into([t], True)[0] for t in full]
        self.meter.start(node)
        self.kernels.calls = ()
        with self.seen.stage():
            out = call(*args, **kwargs)
        node.stateful = state != self.state_of(stage)
        self.meter.finish(node)
        if self.kernels.calls:
            record.rules.refuse_kernels(node, args, kwargs, self.kernels.calls, partial(self.kernels_of, call))
            self.meter.restart()
        results, node.constants = [*map(covered, tensors_in(out))], constants_in(out)
        node.results, node.kin = [*map(record.ref, results)], kin_of(operands, results)
        node.writes = tuple(i for i, t in enumerate(operands) if version(t) != versions[i])
        record.add((stage.name, tuple(key_part(t) for t in operands)), node)
        node.regions = self.regions.places(before)
        edges = [written[i] if i in node.writes else e for i, e in enumerate(edges)]
        self.gradients.note(node, edges, map(edge, results))
        return self.carried(node, map_tensors(out, results))

    def kernels_of(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Sequence[KernelCall]:
        """The calls of kernels in the module of a stage, which `call` calls, with other arguments."""
        self.kernels.calls = ()
        module = call.__self__  # type: ignore[attr-defined]
        with torch.no_grad():
            type(module).forward(module, *args, **kwargs)  # an equal call of its own forward would not run
        return self.kernels.calls

    def revision(self, options: RecordOptions, reachable: Iterable[Any]) -> RecordOptions:
        """The options that a recording shows to be right. reachable: the objects that outlive the forward, if it has
        sources.

        A table of which no input is a part is made in full if it outlives the forward, since others may read it, or if
        a kernel reads it in full. So what it is made of is no source.
        """
        full = {*self.full_reads, *(t.ref for t in reachable if isinstance(t, Carrier))}
        no_sources = options.no_sources | (source_keys(self.record, full) if full else frozenset())
        if no_sources == options.no_sources and not self.record.filled <= options.filled | no_sources:
            return options._replace(filled=options.filled | self.record.filled)
        return options._replace(no_sources=no_sources)

    def carried(self, node: Node, out: Any) -> Any:
        """The results of a node as carriers."""
        tensors = tensors_in(out)
        make = claim if node.kind != "stage" else carry_writable if node.no_grad else carry  # others may hold it, too
        results = [make(self.record, plain(t), ref, None) for t, ref in zip(tensors, node.results)]
        return results[0] if isinstance(out, Tensor) else map_tensors(out, one_for_each(tensors, results))


class RecordOptions(NamedTuple):
    """The options of a recording.

    meter: makes the observer of the record's nodes, from the record, the module that runs, and the tensors that exist;
    dtype: of floating-point tensors, by default their own; data: it runs on copies of tensors, not on tensors without
    data; no_sources: keys of calls that are no sources; filled: of those that are, however short (`Record.filled`);
    equal: of equal stages, equal calls run once; reads: what is read of inputs and parameters alone is read from those
    with data; arrivals: the cuts of inputs that will arrive sharded, by parameter; mixed: in the dtypes of
    `fully_shard`'s mixed precision.
    """

    meter: Callable[[Record, nn.Module, Iterable[Tensor]], NodeMeter] = lambda *_: NodeMeter()
    dtype: torch.dtype | None = None
    data: bool = False
    no_sources: frozenset[Any] = frozenset()
    filled: frozenset[Any] = frozenset()
    equal: bool = True
    reads: bool = False
    arrivals: Mapping[str, Cut] = MappingProxyType({})
    mixed: bool = True

    def dtype_of(self, t: Tensor) -> torch.dtype:
        return self.dtype if self.dtype is not None and t.is_floating_point() else t.dtype


PLAIN = RecordOptions()


class Doubles:
    """The copies on which a forward is recorded: tensors without data, or, with options.data, of the same numbers."""

    def __init__(self, options: RecordOptions, dtypes: Mapping[int, torch.dtype]) -> None:
        self.options, self.dtypes = options, dtypes
        self.reads = Reads() if options.reads and not options.data else None
        fakes = Fakes(allow_non_fake_inputs=True)
        fakes.reads = self.reads
        self.mode: Any = nullcontext() if options.data else fakes
        self.by_id: dict[int, Tensor] = {}

    def of(self, t: Tensor) -> Tensor:
        if isinstance(t, Carrier):
            return t
        if id(t) not in self.by_id:
            kind = self.dtypes.get(id(t)) or self.options.dtype_of(t)
            self.by_id[id(t)] = copied(t, kind) if self.options.data else fake_tensor(self.mode, t, kind)
            if self.reads is not None:
                self.reads.add(self.by_id[id(t)], t)
        return self.by_id[id(t)]

    def full(self, t: Carrier) -> Tensor:
        """A copy of the full tensor that an earlier call left in shards."""
        kind = self.options.dtype_of(t)
        if self.options.data:
            return copied(t.full_tensor(), kind)
        with self.mode:
            return torch.empty(t.ref.shape, dtype=kind, device=t.device).requires_grad_(t.requires_grad)


class ModelCopy:
    """A copy of a model on which its forward is recorded.

    groups: equal stages, of which equal calls run once; staged: the ids of modules that are stages or inside stages.
    """

    def __init__(self, model: nn.Module, stages: list[Stage], copies: Doubles) -> None:
        modules = [stage.module for stage in stages]
        # autocast caches the weights it has cast, so that a later call does less than an earlier one
        equal = copies.options.equal and not copies.options.data
        once_each = equal and not any(map(torch.is_autocast_enabled, ("cpu", "cuda")))
        groups = alike(modules) if once_each else []
        self.staged = {id(m) for module in modules for m in module.modules()}
        skeleton = Skeleton(copies.of, {id(m): group[0] for group in groups for m in group[1:]}, self.staged)
        self.module = skeleton.of(model)
        for hooks in hooks_of(self.module):  # in a run they act on what the parallel forward gets and has returned
            hooks.clear()
        for stage in stages:
            StageCall(stage, skeleton.memo[id(stage.module)])
        self.memo = skeleton.memo
        self.groups = [[skeleton.memo[id(m)] for m in group] for group in groups]
        self.before = self.state()

    def state(self) -> list[Any]:
        """A state that shows, by comparison, whether a stage of a group wrote to itself."""
        return [fingerprint(group[0]) for group in self.groups]

    def state_of(self, stage: Stage) -> Any:
        """A state of one stage. Where stages have groups, `state` shows whether one wrote to attributes."""
        module = self.memo[id(stage.module)]
        return [(id(b), version(b)) for b in module.buffers()], None if self.groups else fingerprint(module)


def record_forward(
    model: nn.Module, stages: list[Stage], root: StagePattern | None, args: Any, kwargs: Any, n: int, rules: Rules,
    options: RecordOptions = PLAIN,
) -> tuple[Record, list[Path]]:  # fmt: skip
    """The record of a forward on `n` ranks, and the paths of the carriers that it leaves for later calls.

    A recording may show that other options are right; then the forward is recorded again.
    """
    while True:
        try:
            record, paths, revision = attempt(model, stages, root, (args, kwargs), n, rules, options)
        except Casts:
            options = options._replace(mixed=False)
            continue
        if revision == options:
            return record, paths
        options = revision


def attempt(
    model: nn.Module, stages: list[Stage], root: StagePattern | None, inputs: tuple[Any, Any], n: int, rules: Rules,
    options: RecordOptions,
) -> tuple[Record, list[Path], RecordOptions]:  # fmt: skip
    """A recording: the record, the paths of the carriers that it leaves, and the options that it shows to be right.

    Raises Casts if the dtypes of mixed precision do not fit the forward.
    """
    staged = {id(m) for stage in stages for m in stage.module.modules()}
    precision = Precision(model if options.mixed and options.dtype is None else nn.Module(), staged)
    copies = Doubles(options, precision.parameters)
    signature = signature_of(model, root)
    sharded = arrivals_as_stated(signature.bind(*inputs)[1], options.arrivals)
    clone = ModelCopy(model, stages, copies)
    precision.hooks(clone.memo)
    args, kwargs = remade((tuple(inputs[0]), dict(inputs[1])), copies.of)
    record = Record(n, sizes_of_root(model, root, args, kwargs), rules, stages)
    record.no_sources |= options.no_sources
    record.filled |= options.filled
    persistent = PersistentTensors(record, copies.full, clone.module, args, kwargs)
    meter = options.meter(record, clone.module, copies.by_id.values())
    recorder = record.driver = Recorder(record, meter, persistent.tensors, clone.state_of)
    once(clone.groups, meter.first, meter.repeat)
    tensors = [*model.parameters(), *model.buffers(), *tensors_in(inputs)]
    try:
        world_of = World(model, *inputs, data=options.data, skip=tensors)
        with world_of as world, persistent.entered(world), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the run warns
            call = carried_inputs(record, signature, args, kwargs, sharded)
            hidden = saved_tensors_hooks(pack, unpack)  # from a checkpoint around the model
            with (
                hidden,
                CompileOff(),
                any_device(),
                copies.mode,
                meter,
                recorder.kernels,
                recorder.seen,
                watched(record),
            ):
                out = clone.module(*call[0], **call[1])
            refuse_functions(tensors_in(out))
            note_outputs(recorder, root, out, signature.bind(*call)[1])
            paths = [path for path, _ in persistent_tensors(clone.module, args, kwargs)]
            reachable = World(clone.module, args, kwargs).seen.values() if record.sources else ()
            revision = recorder.revision(options, reachable)
    finally:
        if isinstance(copies.mode, Fakes):
            copies.mode.end()
    if revision == options:
        for error in recorder.full_reads.values():
            raise error
        if clone.before != clone.state():
            revision = options._replace(equal=False)
    meter.start()
    record.draws = meter.between or any(node.draws for node in record.nodes if node.kind == "operation")
    record.memories = None
    record.compiled |= any(wraps_compiled(m) for m in model.modules() if id(m) not in clone.staged)
    return record, paths, revision


def arrivals_as_stated(bound: Sequence[Bound], cuts: Mapping[str, Cut]) -> dict[str, Cut]:
    """The cuts in which inputs arrive: of DTensors, and as stated. Raises NotationError for a name of no input."""
    for name in cuts.keys() - {b.param for b in bound}:
        raise NotationError(
            f"given= has {name!r}, which is not a tensor argument of the model; its tensor arguments are "
            f"{', '.join(b.param for b in bound)}"
        )
    return {**arrivals(bound), **cuts}


def note_outputs(recorder: Recorder, root: StagePattern | None, out: Any, bound: Sequence[Bound]) -> None:
    """Add the outputs of a forward to its record, and say which inputs get a gradient from them."""
    record, tensors = recorder.record, tensors_in(out)
    if root is not None:
        root.refuse_outputs([t.shape for t in tensors])
    for k, t in enumerate(tensors):
        if isinstance(t, Carrier):
            node = record.add(("output", k, t.ref), Node("output", "output", [t.ref]))
            recorder.gradients.note(node, [edge(t)])
    reached, record.saved = recorder.gradients.finish(tensors), recorder.regions.totals()
    record.input_grads = {
        b.param: Ref(b.tensor.shape, dtype=b.tensor.dtype) for b in bound if edge(b.tensor) in reached
    }


def source_keys(record: Record, tensors: set[Ref]) -> frozenset[Any]:
    """The keys of the sources that those of the tensors are made of that are made of nothing but sources."""
    keys: dict[int, frozenset[Any]] = {}  # by memory, while no input is a part of it
    node_keys = {id(node): key for key, nodes in record.by_key.items() for node in nodes}
    for node in record.nodes:
        if node.kind == "operation" and all(ref.memory in keys for ref in node.refs):
            parts = frozenset[Any]().union(*(keys[ref.memory] for ref in node.refs))
            for ref in node.results or node.refs[:1]:
                keys[ref.memory] = parts or frozenset({node_keys[id(node)]})
        else:
            for ref in node.results or node.refs[:1]:
                keys.pop(ref.memory, None)
    return frozenset[Any]().union(*(keys.get(ref.memory, frozenset()) for ref in tensors))


def copied(t: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor with the numbers of another, or a parameter that shares them, for a forward that reads its data."""
    new = t.detach().to(dtype, copy=not isinstance(t, nn.Parameter))
    return nn.Parameter(new, t.requires_grad) if isinstance(t, nn.Parameter) else new.requires_grad_(t.requires_grad)
