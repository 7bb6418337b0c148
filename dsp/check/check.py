"""check: is the parallel model the same model? On real inputs, forward and backward, stage by stage."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dsp.check.compare import Call, compare
from dsp.check.report import Report
from dsp.layout import Axis
from dsp.notation import StagePattern
from dsp.plan.make import stages_of
from dsp.private import pytree
from dsp.run.agreement import agree
from dsp.run.inputs import describe
from dsp.run.parallel import parallelize
from dsp.signature import Signature, sizes_of_root
from dsp.slices import TOLERANCE, call_part, cast, copies, error, part, slices, smaller
from dsp.stages import Stage, clean, cut_for
from dsp.tensors import tensors_in

CALLS = 3  # one of each kind shows nothing: a forward that reads its data is planned from the record of its first


def check(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    mesh: DeviceMesh,
    stages: Mapping[str, str] | None = None,
    thorough: bool = True,
) -> Report:
    """Compare `model` in parallel over `mesh` with itself on one process. Call it on every rank, with the same inputs.

    Copies of the model run in float64 where they can (else in their own type): each stage on uneven slices of its own
    recorded inputs along each dim that its pattern calls independent; then the whole model in training, in eval mode
    and under no_grad, at the given size and at a smaller one, three calls each, for what the first call recorded or
    cached the next ones use. With ``thorough=False`` it is called once, as it is given. Compared are outputs, buffers,
    and under a random projection as the loss the gradient of every parameter and of every input. The model itself is
    left untouched. Raises what a wrong pattern raises; everything that runs but is wrong is in the report, and what was
    not looked at, too.
    """
    kwargs = dict(kwargs or {})
    args = (args,) if isinstance(args, Tensor) else tuple(args)
    axis = Axis.of(mesh)
    if axis.size > 1:
        agree(axis, model, {"stages": stages if stages is not None else getattr(model, "stages", None)})
    found, root = stages_of(model, stages)
    tensors = itertools.chain(model.parameters(), model.buffers(), tensors_in((args, kwargs)))
    cuda = sorted({t.device.index for t in tensors if t.is_cuda})
    with torch.random.fork_rng(devices=cuda), torch.enable_grad():
        return _check(model, args, kwargs, axis, mesh, stages, found, root, thorough)


def _check(
    model: nn.Module,
    args: Any,
    kwargs: Any,
    axis: Axis,
    mesh: DeviceMesh,
    stages: Mapping[str, str] | None,
    found: list[Stage],
    root: StagePattern | None,
    thorough: bool,
) -> Report:
    probe, args, kwargs, dtype, modes = _prepare(model, args, kwargs, thorough)
    report = Report(axis.size, dtype, calls=CALLS if thorough else 1)
    tolerance = TOLERANCE.get(dtype, 3e-2)
    calls = _recorded(probe, found, args, kwargs)
    root_sizes = sizes_of_root(model, root, args, kwargs)
    for stage, stage_args, stage_kwargs in calls:
        _slices(stage, stage_args, stage_kwargs, root_sizes, report, tolerance)
    _unseen(report, found, calls, root_sizes)
    if report.problems:
        report.problems.append("not run in parallel: it would be wrong until its stages are right")
        return report
    if axis.size == 1:
        report.uncovered.append("a parallel run: there is one rank")
        return report
    if thorough:
        inputs = _sizes(report, probe, found, root, root_sizes, args, kwargs)
    else:
        inputs, modes = [("", args, kwargs)], [m for m in modes if not m.fails][:1]
        report.uncovered.append("other calls, and other sizes, than one: thorough=False")
    single, parallel = cast(model, dtype), parallelize(cast(model, dtype), mesh, stages)
    for mode in modes:
        if mode.fails:
            report.uncovered.append(f"{mode.name}: the model itself raises {mode.fails}")
            continue
        if mode.random:
            report.uncovered.append(f"numbers {mode.name}: the model draws random ones, so that it was only run")
        report.modes.append(mode.name)
        for size, a, k in inputs:
            for n in range(report.calls):
                problems = _one_call(single, parallel, mode, a, k, axis, report, tolerance)
                if _agreed(problems, axis):
                    report.problems += [f"{p} ({mode.name}, {size}call {n + 1})" for p in problems]
                    return report
    report.advice = parallel.forward.__self__.advice  # type: ignore[attr-defined]
    if not report.gradients:
        report.uncovered.append("gradients: nothing that the model returns has one")
    elif report.still:
        report.uncovered.append(f"what is multiplied by zero: {_some(sorted(report.still))} had no gradient but zeros")
    return report


def _sizes(
    report: Report,
    model: nn.Module,
    found: list[Stage],
    root: StagePattern | None,
    sizes: Mapping[str, int],
    args: Any,
    kwargs: Any,
) -> list[tuple[str, Any, Any]]:
    """The inputs as they are, and shorter along what may be sharded; a name for each."""
    free = {name for stage in found for name in stage.pattern.free} or set(sizes)
    longer = [name for name, size in sizes.items() if name in free and size > 2]
    if root is None:
        why = 'the stages name no dims of the model\'s own inputs, as {"": "x=b t s c"} would'
    elif not longer:
        why = "no dim of them that may be sharded is longer than 2"
    else:
        signature = Signature(model, root, "the model")
        shorter = smaller(longer, sizes, signature, args, kwargs, lambda a, k: _call(model, a, k))
        if shorter is not None:
            own, *cut = shorter
            changed = [name for name in sizes if own[name] != sizes[name]]
            report.sizes = [" ".join(f"{name}={s[name]}" for name in changed) for s in (sizes, own)]
            return [(f"{report.sizes[0]}, ", args, kwargs), (f"{report.sizes[1]}, ", *cut)]
        why = "the model takes no other"
    report.uncovered.append(f"another size of the inputs: {why}")
    return [("", args, kwargs)]


def _one_call(
    single: nn.Module,
    parallel: nn.Module,
    mode: Mode,
    args: Any,
    kwargs: Any,
    axis: Axis,
    report: Report,
    tolerance: float,
) -> list[str]:
    mode.set(single)
    mode.set(parallel)
    expected = Call(single, args, kwargs, mode.grad)
    try:
        got = Call(parallel, args, kwargs, mode.grad, axis)
    except Exception as reason:
        return [f"the parallel run raised {type(reason).__name__}: {reason}"]
    found = compare(got, expected, tolerance, numbers=not mode.random)
    if not mode.random:
        report.output = max(report.output or 0.0, found.output)
        for name, off in found.gradients.items():
            report.gradients[name] = max(report.gradients.get(name, 0.0), off)
    moves = {name for name, g in expected.grads.items() if g is not None and g.any()}
    if mode.grad:
        weights = {name for name in expected.grads if not name.startswith("input ")}
        report.still = (weights if report.still is None else report.still) - moves
    more = len(found.problems) - 5
    return found.problems[:5] + [f"and {more} more; report.gradients has all gradients"] * (more > 0)


def _agreed(problems: list[str], axis: Axis) -> bool:
    """Whether any rank has problems; then all take those of the first that has, and none goes on without the others."""
    count = torch.tensor(len(problems), device=axis.mesh.device_type)
    if not torch.ops.dsp.all_reduce(count, axis.group):
        return False
    everyone: list[Any] = [None] * axis.size
    dist.all_gather_object(everyone, problems, group=axis.mesh.get_group())
    problems[:] = next(own for own in everyone if own)
    return True


@dataclass
class Mode:
    """A way to call the model. `random`: its numbers are others each time; `fails`: what it raises on one process."""

    name: str
    grad: bool
    training: list[bool]  # by module
    random: bool = False
    fails: str = ""

    def set(self, model: nn.Module) -> None:
        for module, training in zip(model.modules(), self.training):
            module.training = training


def _modes(model: nn.Module) -> list[Mode]:
    """As the model is given first: some of its modules may be frozen."""
    own = [m.training for m in model.modules()]
    training = Mode("in training", True, own if model.training else [True] * len(own))
    evaluation = Mode("in eval mode", True, [False] * len(own) if model.training else own)
    return [training, evaluation][:: 1 if model.training else -1] + [Mode("under no_grad", False, evaluation.training)]


def _prepare(
    model: nn.Module, args: Any, kwargs: Any, thorough: bool
) -> tuple[nn.Module, Any, Any, torch.dtype, list[Mode]]:
    """A copy in float64 if it runs there, inputs to match, and how it may be called: without random numbers, first."""
    first: Exception | None = None
    for dtype, clone, a, k in copies(model, args, kwargs):
        modes = _modes(clone)
        for mode in modes:
            mode.set(clone)
            try:
                one, two = (_call(clone, a, k, mode.grad, seed) for seed in (0, 1))
                mode.random = bool(compare(two, one, TOLERANCE.get(dtype, 3e-2)).problems)
            except Exception as reason:
                first = first or reason
                mode.fails = f"{type(reason).__name__}: {reason}"
                if mode is modes[0]:
                    break
            if not (thorough or mode.fails or mode.random):
                return clone, a, k, dtype, [mode]
        else:
            modes.sort(key=lambda m: m.random)  # numbers that differ leave buffers behind that differ
            next(m for m in modes if not m.fails).set(clone)
            return clone, a, k, dtype, modes
    assert first is not None
    raise first


def _call(model: nn.Module, args: Any, kwargs: Any, grad: bool = False, seed: int = 0) -> Call:
    """A call that leaves the buffers as they were."""
    before = [(b, b.detach().clone()) for b in model.buffers()]
    try:
        return Call(model, args, kwargs, grad, seed=seed)
    finally:
        for b, value in before:
            b.detach().copy_(value)


# --- stages by slices -------------------------------------------------------------------------------------------------


def _recorded(model: nn.Module, found: list[Stage], args: Any, kwargs: Any) -> list[tuple[Stage, Any, Any]]:
    """The stage calls of a forward, one for every kind of arguments."""
    calls: list[tuple[Stage, Any, Any]] = []
    seen: set[Any] = set()
    handles = []
    for stage in found:
        own = Stage(stage.name, _module(model, stage.name), stage.pattern.text)

        def record(module: nn.Module, args: Any, kwargs: Any, own: Stage = own) -> None:
            if (key := (own.name, describe(*pytree.tree_flatten((args, kwargs))))) not in seen:
                seen.add(key)
                calls.append((own, *pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), (args, kwargs))))

        handles.append(own.module.register_forward_pre_hook(record, with_kwargs=True))
    try:
        _call(model, args, kwargs)
    finally:
        for h in handles:
            h.remove()
    return calls


def _unseen(report: Report, found: list[Stage], calls: list[tuple[Stage, Any, Any]], root: Mapping[str, int]) -> None:
    """What no slice was taken of."""
    ran = {stage.name for stage, *_ in calls}
    idle = [stage.name for stage in found if stage.name not in ran]
    if idle:
        report.uncovered.append(f"stages that did not run: {_some(idle)}")
    short: dict[str, list[str]] = {}
    for stage, args, kwargs in calls:
        sizes = stage.sizes(stage.signature.bind(args, kwargs)[1], root)
        for name in stage.pattern.free:
            if sizes.get(name, 1) < 2 and (stage.name, name) not in report.slices:
                short.setdefault(name, []).append(stage.name)
    for name, names in short.items():
        report.uncovered.append(f"slices along {name!r}, which has size 1: {_some(list(dict.fromkeys(names)))}")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _module(model: nn.Module, clean_name: str) -> nn.Module:
    return next(m for n, m in model.named_modules() if clean(n) == clean_name)


def _slices(
    stage: Stage, args: Any, kwargs: Any, root_sizes: Mapping[str, int], report: Report, tolerance: float
) -> None:
    """f(slice) == slice of f, along every dim outside brackets, in uneven parts."""
    _, bound = stage.signature.bind(args, kwargs)
    sizes = stage.sizes(bound, root_sizes)

    def run(args: Any, kwargs: Any) -> list[Tensor]:
        args, kwargs = pytree.tree_map_only(Tensor, torch.clone, (args, kwargs))  # a stage may write into them
        with torch.no_grad():
            return tensors_in(stage.module(*args, **kwargs))

    whole = run(args, kwargs)
    patterns = stage.outputs(whole)
    for name in stage.pattern.free:
        size = sizes.get(name, 1)
        if size < 2:
            continue
        cuts = [cut_for(b.pattern, b.tensor.shape, name, sizes) for b in bound]
        worst, failure = 0.0, ""
        for start, length in slices(size):
            call = call_part(stage.signature, args, kwargs, cuts, size, start, length)
            try:
                outputs = run(call.args, call.kwargs)
            except Exception as reason:
                worst, failure = float("inf"), f"fails on a slice along {name!r} ({type(reason).__name__}: {reason})"
                break
            for t, w, p in zip(outputs, whole, patterns):
                out_sizes = {**{m: w.shape[p.axis_of(m)] for m in p.names if len(p.axes[p.axis_of(m)]) == 1}, **sizes}
                cut = cut_for(p, w.shape, name, out_sizes)
                expected = part(w, cut, size, start, length) if cut is not None else w
                worst = max(worst, error(t, expected))
        report.slices[(stage.name, name)] = max(worst, report.slices.get((stage.name, name), 0.0))
        if not worst <= tolerance:
            failure = failure or (
                f"is not independent along {name!r}: f(slice) is off by {worst:.1e} from the slice of f"
            )
            report.problems.append(
                f"{stage.where} {failure}; write [{name}] in '{stage.pattern.text}', or, if one of its other tensors "
                f"varies along {name!r}, give that one a pattern"
            )
