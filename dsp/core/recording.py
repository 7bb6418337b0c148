"""Record a forward: run it on tensors without data, and note each node."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dsp.calls import replaced, tensor_args
from dsp.compile_off import CompileOff
from dsp.core.backward import Gradients, Regions
from dsp.core.carrier import Carrier, claim, plain
from dsp.core.equal_modules import alike, fingerprint, once
from dsp.core.inputs import carried_inputs, signature_of
from dsp.core.keys import key_part
from dsp.core.meter import NodeMeter
from dsp.core.offers import Rules, operands_of, stage_node
from dsp.core.record import Node, Operation, Record, Ref
from dsp.core.skeleton import Skeleton
from dsp.core.stage_calls import StageCall
from dsp.core.watch import Watch, refuse_transforms, watched
from dsp.notation import StagePattern
from dsp.private import FakeTensorMode, any_device, buffers_of, fake_tensor
from dsp.signature import sizes_of_root
from dsp.stages import Stage
from dsp.tensors import edge, map_tensors, remade, tensors_in


class Recorder:
    """Leads a forward on tensors without data, all replicated, and adds each node to the record."""

    def __init__(self, record: Record, meter: NodeMeter) -> None:
        self.record, self.meter = record, meter
        self.regions, self.gradients = Regions(), Gradients()

    def operation(self, func: Any, what: Any, args: Any, kwargs: Any, first: Any = None) -> Any:
        refuse_transforms(args, kwargs)
        before, tensors = self.regions.saved(), [*map(plain, tensor_args(args, kwargs))]
        self.meter.start()
        args_, kwargs_ = replaced(args, kwargs, iter(tensors))
        return self.note(func, what, args, kwargs, func(*args_, **kwargs_), tensors, before)

    def note(
        self, func: Any, what: Any, args: Any, kwargs: Any, out: Any, tensors: Sequence[Tensor] = (),
        before: Sequence[tuple[int, int]] = (),
    ) -> Any:  # fmt: skip
        """Add the node of an operation that returned `out`, from these tensors."""
        record = self.record
        operands = tensor_args(args, kwargs)
        refs = operands_of(operands)
        node = Node(
            "operation", what.name, refs, Operation(func, *replaced(args, kwargs, iter(refs))), in_place=what.in_place
        )
        self.meter.finish(node)
        results = tensors_in(out)
        node.identity = len(results) == 1 and any(results[0] is plain(t) for t in operands[:1]) and not what.in_place
        record.add((func, key_part(args, False), key_part(kwargs, False)), node)
        node.regions = self.regions.places(before)
        self.gradients.note(node, tensors, results)
        if node.identity or what.in_place:
            return out if out is None else operands[0]
        node.results = [*map(record.ref, results)]
        return self.carried(node, out)

    def stage(self, stage: Stage, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        record = self.record
        node, bound = stage_node(record, stage, args, kwargs)
        before, carried = self.regions.saved(), tensors_in((args, kwargs))
        tensors = [*map(plain, carried)]
        args, kwargs = map_tensors((args, kwargs), tensors)
        self.meter.start()
        out = call(*args, **kwargs)
        self.meter.finish(node)
        node.results = [*map(record.ref, tensors_in(out))]
        record.add((stage.name, tuple(key_part(b.tensor, False) for b in bound)), node)
        node.regions = self.regions.places(before)
        read = dict(zip(map(id, carried), tensors))
        self.gradients.note(node, [read[id(b.tensor)] for b in bound], tensors_in(out))
        return self.carried(node, out)

    def carried(self, node: Node, out: Any) -> Any:
        """The results of a node as carriers."""
        carriers = [claim(self.record, plain(t), ref, None) for t, ref in zip(tensors_in(out), node.results)]
        return carriers[0] if isinstance(out, Tensor) else map_tensors(out, carriers)


class RecordOptions(NamedTuple):
    """The options of a recording.

    meter: makes the observer of the record's nodes, from the record, the module that runs, and the tensors that exist;
    dtype: of floating-point tensors, by default their own; data: it runs on copies of tensors, not on tensors without
    data; sources: functions of plain tensors may be nodes; equal: of equal stages, equal calls run once.
    """

    meter: Callable[[Record, nn.Module, Iterable[Tensor]], NodeMeter] = lambda *_: NodeMeter()
    dtype: torch.dtype | None = None
    data: bool = False
    sources: bool = True
    equal: bool = True

    def dtype_of(self, t: Tensor) -> torch.dtype:
        return self.dtype if self.dtype is not None and t.is_floating_point() else t.dtype


PLAIN = RecordOptions()


def record_forward(
    model: nn.Module, stages: list[Stage], root: StagePattern | None, args: Any, kwargs: Any, n: int, rules: Rules,
    options: RecordOptions = PLAIN,
) -> Record:  # fmt: skip
    """The record of a forward on `n` ranks. It has no sources if a module keeps one for later calls, as a table that it
    makes once: no record may hold that."""
    inputs = args, kwargs
    mode: Any = nullcontext() if options.data else FakeTensorMode(allow_non_fake_inputs=True)
    fakes: dict[int, Tensor] = {}

    def fake(t: Tensor) -> Tensor:
        if id(t) not in fakes:
            kind = options.dtype_of(t)
            fakes[id(t)] = copied(t, kind) if options.data else fake_tensor(mode, t, kind)
        return fakes[id(t)]

    staged = {id(m) for stage in stages for m in stage.module.modules()}
    # autocast caches the weights it has cast, so that a later call does less than an earlier one
    once_each = options.equal and not options.data and not any(map(torch.is_autocast_enabled, ("cpu", "cuda")))
    groups = alike([stage.module for stage in stages]) if once_each else []
    skeleton = Skeleton(fake, {id(m): group[0] for group in groups for m in group[1:]}, staged)
    clone = skeleton.of(model)
    for stage in stages:
        StageCall(stage, skeleton.memo[id(stage.module)])
    args, kwargs = remade((tuple(args), dict(kwargs)), fake)
    record = Record(n, sizes_of_root(model, root, args, kwargs), rules)
    recorder = record.driver = Recorder(record, options.meter(record, clone, fakes.values()))
    before = [fingerprint(skeleton.memo[id(group[0])]) for group in groups]
    once([[skeleton.memo[id(m)] for m in group] for group in groups], recorder.meter.first, recorder.meter.again)
    args, kwargs = carried_inputs(record, signature := signature_of(model, root), args, kwargs)
    bound = signature.bind(args, kwargs)[1]
    with CompileOff(), any_device(), mode, recorder.meter, watched(record) if options.sources else Watch(record):
        out = clone(*args, **kwargs)
    for k, t in enumerate(tensors_in(out)):
        if isinstance(t, Carrier):
            node = record.outputs[k] = record.add(("output", k), Node("output", "output", [t.ref]))
            recorder.gradients.note(node, [t], [])
    reached, record.saved = recorder.gradients.finish(tensors_in(out)), recorder.regions.totals()
    record.input_grads = {
        b.param: Ref(b.tensor.shape, dtype=b.tensor.dtype) for b in bound if edge(b.tensor) in reached
    }
    if record.sources and any(
        isinstance(t, Carrier) for m in clone.modules() for t in tensors_in([buffers_of(m), vars(m)])
    ):
        return record_forward(model, stages, root, *inputs, n, rules, options._replace(sources=False))
    if before != [fingerprint(skeleton.memo[id(group[0])]) for group in groups]:  # a stage writes to itself
        return record_forward(model, stages, root, *inputs, n, rules, options._replace(equal=False))
    recorder.meter.start()
    record.draws = recorder.meter.between or any(node.draws for node in record.nodes if node.kind == "operation")
    record.memories = None
    return record


def copied(t: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor with the numbers of another, or a parameter that shares them, for a forward that reads its data."""
    new = t.detach().to(dtype, copy=not isinstance(t, nn.Parameter))
    return nn.Parameter(new, t.requires_grad) if isinstance(t, nn.Parameter) else new.requires_grad_(t.requires_grad)
