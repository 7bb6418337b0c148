"""check: compare a parallel model with itself on one process, on real inputs, forward and backward, stage by stage."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import dsp
from dsp.comm.layout import Axis
from dsp.guard.agreement import agree
from dsp.stages.known import stages_of
from dsp.stages.signature import Signature, sizes_of_root
from dsp.support.python_state import World
from dsp.support.tensors import tensors_in
from dsp.verify.compare import Trial, compare
from dsp.verify.independence import compare_slices, recorded, some, unseen
from dsp.verify.modes import Mode, called, prepared, rounding
from dsp.verify.report import Report
from dsp.verify.slices import TOLERANCE, cast, smaller

log = logging.getLogger("dsp")

CALLS = 3  # more than one, because a forward that reads its data follows a plan from its second call on


def check(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    mesh: DeviceMesh,
    stages: Mapping[str, str] | None = None,
    thorough: bool = True,
    draw: bool = True,
) -> Report:
    """Compare `model` in parallel over `mesh` with itself on one process. Call it on every rank, with the same inputs.

    Copies of the model run in float64, or in their own dtype if float64 fails. First each stage runs on uneven slices
    of its recorded inputs, along each dim that its pattern calls independent. Then the full model runs in training
    mode, in eval mode and under no_grad, at the given size and at a smaller one. Each combination is called three
    times, because later calls use what the first one recorded or cached. With ``thorough=False`` the model is called
    once, in its present mode. Compared are outputs, buffers, and the gradients of every parameter and input, with a
    random projection of the outputs as the loss. Parameters that are all zero, such as the last layers of an untrained
    model, would hide errors before them: with `draw` the copies draw them at random. The model itself is left
    untouched. An invalid pattern raises its usual error; the report lists other problems, and what was not compared.
    """
    kwargs = dict(kwargs or {})
    args = (args,) if isinstance(args, Tensor) else tuple(args)
    axis = Axis.of(mesh)
    if axis.size > 1:
        agree(axis, model, {"stages": stages if stages is not None else getattr(model, "stages", None)})
    tensors = itertools.chain(model.parameters(), model.buffers(), tensors_in((args, kwargs)))
    cuda = sorted({t.device.index for t in tensors if t.is_cuda})
    world = World(model, args, kwargs, data=True, skip=[*model.parameters(), *model.buffers()])
    with world, torch.random.fork_rng(devices=cuda), torch.enable_grad():
        report = Check(model, args, kwargs, axis, stages, thorough, draw).run()
        report.silent = axis.rank > 0 or (report.ok and dist.is_initialized() and dist.get_rank() > 0)
        return report


class Check:
    """One check: a copy of the model and its inputs, the modes to call it in, and the report so far."""

    def __init__(
        self, model: nn.Module, args: Any, kwargs: Any, axis: Axis, stages: Mapping[str, str] | None,
        thorough: bool = True, draw: bool = True,
    ) -> None:  # fmt: skip
        self.axis, self.declared, self.thorough = axis, stages, thorough
        stages_of(model, stages)  # raises for invalid stages before anything runs
        self.model, self.args, self.kwargs, self.dtype, self.modes = prepared(model, args, kwargs, thorough, draw)
        self.stages, self.root = stages_of(self.model, stages)
        self.report = Report(axis.size, self.dtype, calls=CALLS if thorough else 1)
        self.moved = False  # whether any output was not all zeros
        self.tolerance = TOLERANCE.get(self.dtype, 3e-2)
        self.sizes = sizes_of_root(model, self.root, self.args, self.kwargs)

    def run(self) -> Report:
        report = self.report
        calls = recorded(self.model, self.stages, self.args, self.kwargs)
        for stage, args, kwargs in calls:
            compare_slices(stage, args, kwargs, self.sizes, report, self.tolerance)
        unseen(report, self.stages, calls, self.sizes)
        if report.problems:
            report.problems.append("parallel run skipped: correct the stages first")
        elif self.axis.size == 1:
            report.uncovered.append("a parallel run: there is one rank")
        else:
            self.compare_runs()
        return report

    def advice(self, runtime: Any) -> str:
        """The advice of the plan: of the runtime that has one, else of a new plan, if one can be made."""
        if hasattr(runtime, "advice"):
            return runtime.advice
        try:
            return dsp.plan(self.model, self.args, self.kwargs, size=self.axis.size, stages=self.declared).advice
        except Exception as reason:
            log.debug("no advice, since there is no plan: %s: %s", type(reason).__name__, reason)
            return ""

    def compare_runs(self) -> None:
        """Compare the parallel model with the model on one process, until a call differs."""
        report, modes = self.report, self.modes
        if self.thorough:
            inputs = self.inputs()
        else:
            inputs, modes = [("", self.args, self.kwargs)], [m for m in modes if not m.fails][:1]
            report.uncovered.append("more than one call and one size: thorough=False")
        single = cast(self.model, self.dtype)
        parallel = dsp.parallelize(cast(self.model, self.dtype), self.axis.mesh, self.declared)
        for mode in modes:
            if mode.fails:
                report.uncovered.append(f"{mode.name} mode: the model itself raises {mode.fails}")
                continue
            if mode.random:
                values = "outputs and gradients" if mode.grad else "outputs"
                report.uncovered.append(
                    f"{values} in {mode.name} mode (the model draws random numbers); only shapes were compared"
                )
            report.modes.append(mode.name)
            for size, args, kwargs in inputs:
                for n in range(report.calls):
                    problems = self.compare_call(single, parallel, mode, args, kwargs)
                    if _agreed(problems, self.axis):
                        report.problems += [f"{p} ({mode.name} mode, {size}call {n + 1})" for p in problems]
                        return
        report.advice = self.advice(parallel.forward.__self__)  # type: ignore[attr-defined]
        if not report.gradients:
            report.uncovered.append("gradients: nothing that the model returns has one")
        elif zeros := {name for name in report.still or () if not name.startswith("input ")}:
            report.uncovered.append(f"parameters whose gradients are all zeros: {some(sorted(zeros))}")
        if report.output is not None and not self.moved:
            report.uncovered.append("values of the outputs: all of them were zeros")

    def inputs(self) -> list[tuple[str, Any, Any]]:
        """The given inputs, and inputs that are shorter along the dims that may be sharded; a name for each."""
        report, sizes, args, kwargs = self.report, self.sizes, self.args, self.kwargs
        free = {name for stage in self.stages for name in stage.pattern.free} or set(sizes)
        longer = [name for name, size in sizes.items() if name in free and size > 2]
        if self.root is None:
            why = 'the stages name no dims of the model\'s own inputs, as {"": "x=b t s c"} would'
        elif not longer:
            why = "no dim that may be sharded is longer than 2"
        else:
            signature = Signature(self.model, self.root, "the model")
            shorter = smaller(longer, sizes, signature, args, kwargs, lambda a, k: called(self.model, a, k))
            if shorter is not None:
                lengths, *cut = shorter
                changed = [name for name in sizes if lengths[name] != sizes[name]]
                report.sizes = [" ".join(f"{name}={s[name]}" for name in changed) for s in (sizes, lengths)]
                return [(f"{report.sizes[0]}, ", args, kwargs), (f"{report.sizes[1]}, ", *cut)]
            why = "the model took no smaller one"
        report.uncovered.append(f"a second size of the inputs: {why}")
        return [("", args, kwargs)]

    def compare_call(self, single: nn.Module, parallel: nn.Module, mode: Mode, args: Any, kwargs: Any) -> list[str]:
        """The differences between one call on one process and the same call in parallel."""
        report = self.report
        mode.set(single)
        mode.set(parallel)
        expected = Trial(single, args, kwargs, mode.grad)
        try:
            got = Trial(parallel, args, kwargs, mode.grad, self.axis)
        except Exception as reason:
            return [f"the parallel run raised {type(reason).__name__}: {reason}"]
        difference = compare(got, expected, self.tolerance, numbers=not mode.random)
        if difference.problems and mode.grad and not mode.random:
            errors = rounding(single, args, kwargs, expected, self.tolerance)
            difference = compare(got, expected, self.tolerance, rounding=errors)
        if not mode.random:
            report.output = max(report.output or 0.0, difference.output)
            for name, off in difference.gradients.items():
                report.gradients[name] = max(report.gradients.get(name, 0.0), off)
        moves = {name for name, g in expected.grads.items() if g is not None and g.any()}
        self.moved |= any(bool(t.any()) for t in expected.outputs)
        if mode.grad:
            report.still = (set(expected.grads) if report.still is None else report.still) - moves
        more = len(difference.problems) - 5
        return difference.problems[:5] + [f"and {more} more; report.gradients has all gradients"] * (more > 0)


def _agreed(problems: list[str], axis: Axis) -> bool:
    """Tell whether any rank has problems. If so, `problems` becomes those of the first such rank, on every rank."""
    count = torch.tensor(len(problems), device=axis.mesh.device_type)
    if not torch.ops.dsp.all_reduce(count, axis.group):
        return False
    everyone: list[Any] = [None] * axis.size
    dist.all_gather_object(everyone, problems, group=axis.mesh.get_group())
    problems[:] = next(filter(None, everyone))
    return True
