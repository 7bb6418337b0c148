"""The call of a parallel model: a record for each signature of inputs, split inputs, and outputs brought out."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dsp.calls import GlueError
from dsp.core.carrier import Carrier, plain
from dsp.core.decide import decide
from dsp.core.hooks import order_hooks
from dsp.core.inputs import add_inputs, call_key, signature_of, split_inputs
from dsp.core.offers import Rules, lay_out
from dsp.core.record import Node, Record
from dsp.core.recording import record_forward
from dsp.core.run import Runner
from dsp.core.stage_calls import StageCall
from dsp.core.watch import watched
from dsp.gradients import covered_exit
from dsp.layout import Axis
from dsp.notation import NotationError, StagePattern
from dsp.randomness import share, unshare
from dsp.signature import sizes_of_root
from dsp.stages import Stage
from dsp.tensors import map_tensors, tensors_in


class Parallel:
    """A parallel model: its forward, by the record for inputs like these."""

    def __init__(
        self, model: nn.Module, axis: Axis, stages: list[Stage], root: StagePattern | None, gather: bool, rules: Rules
    ) -> None:
        self.model, self.axis, self.gather, self.rules = model, axis, gather, rules
        self.stages, self.root = stages, root
        self.signature = signature_of(model, root)
        self.forward, self.records = model.forward, dict[Any, Record]()
        for stage in stages:
            StageCall(stage, stage.module)
        inside = {id(m) for stage in stages for m in stage.module.modules()}
        self.between = [m for m in model.modules() if m is not model and id(m) not in inside]
        model.forward = self.call

    def call(self, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(t, Carrier) for t in (*args, *kwargs.values())):  # a checkpoint around the model
            return self.forward(*args, **kwargs)
        order_hooks(self.between)
        record = self.record(args, kwargs)
        call = split_inputs(record, self.axis, self.signature, args, kwargs)
        token = share(self.axis) if record.draws else None  # between stages all ranks draw the same numbers
        try:
            with watched(record):
                out = self.forward(*call.args, **call.kwargs)
            return self.bring_out(record, out)
        finally:
            if token is not None:
                unshare(token)

    def record(self, args: Any, kwargs: Any) -> Record:
        """The record for inputs like these, made in the first call."""
        key = *call_key(args, kwargs), self.model.training, torch.is_grad_enabled()
        record = self.records.get(key)
        if record is None:
            record = self.records[key] = self.plan(args, kwargs)
            record.driver = Runner(record, self.rules, self.axis)
        return record

    def plan(self, args: Any, kwargs: Any) -> Record:
        """A planned record; for a forward that reads its data an empty one, which grows as it runs."""
        try:
            record = record_forward(self.model, self.stages, self.root, args, kwargs, self.axis.size, self.rules)
        except (NotationError, GlueError):
            raise
        except Exception:  # the forward reads its data, or calls what cannot run without
            record = Record(self.axis.size, sizes_of_root(self.model, self.root, args, kwargs), self.rules)
            record.memories = None
            add_inputs(record, self.signature.bind(args, kwargs)[1])
            return record
        lay_out(record)
        decide(record, self.gather)
        return record

    def bring_out(self, record: Record, out: Any) -> Any:
        """The output of the model: gathered, or as DTensors."""
        tensors: list[Any] = []
        for k, t in enumerate(tensors_in(out)):
            if not isinstance(t, Carrier):
                tensors.append(t)
            elif self.gather and t.cut is not None:
                node = record.outputs.get(k) or Node("output", "output", [t.ref])
                [full] = record.driver.copies.bring(node, [t], [None])  # type: ignore[attr-defined]
                tensors.append(covered_exit(full))
            elif t.cut is not None:
                tensors.append(self.axis.wrap(plain(t), t.cut, t.ref.shape, guard=True))
            else:
                tensors.append(plain(t))
        return map_tensors(out, tensors)
