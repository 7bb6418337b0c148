"""check: is this model, with these stages, exact in parallel? Forward, every gradient, and every stage by slices."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from dsp.layout import Axis
from dsp.notation import StagePattern
from dsp.parallel import parallelize
from dsp.plan import stages_of
from dsp.slices import TOLERANCE, call_part, copies, error, part, slices
from dsp.stages import Stage, clean, cut_for, sizes_of_root, tensors_in


@dataclass
class Report:
    """What `check` found. True if nothing is wrong; ``print(report)`` says what was compared and how far it is off.

    output, gradients: largest relative error of the outputs, and of each parameter's and input's gradient. slices: by
    (stage, dim) the error of f(slice) against slice of f. problems: one sentence each, naming stage, dim or parameter.
    """

    size: int
    dtype: torch.dtype
    output: float | None = None
    gradients: dict[str, float] = field(default_factory=dict)
    slices: dict[tuple[str, str], float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        lines = [f"check over {self.size} ranks in {kind}: {'ok' if self else 'NOT OK'}"]
        if self.slices:
            worst = max(self.slices, key=lambda k: self.slices[k])
            lines.append(
                f"  stages by slices: {len(self.slices)} (stage, dim) pairs, largest error {self.slices[worst]:.1e} "
                f"({worst[0]} along {worst[1]})"
            )
        if self.output is not None:
            lines.append(f"  outputs: largest error {self.output:.1e}")
        if self.gradients:
            worst_grad = max(self.gradients, key=lambda k: self.gradients[k])
            lines.append(
                f"  gradients: {len(self.gradients)} tensors, largest error {self.gradients[worst_grad]:.1e} "
                f"({worst_grad})"
            )
        return "\n".join(lines + [f"  problem: {p}" for p in self.problems])


def check(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    mesh: DeviceMesh,
    stages: Mapping[str, str] | None = None,
) -> Report:
    """Compare `model` in parallel over `mesh` with itself on one process. Call it on every rank, with the same inputs.

    Copies of the model run in float64 where they can (else in their own type): outputs, the gradient of every parameter
    and of every input, under a random projection as the loss; and each stage on uneven slices of its own recorded
    inputs along each dim that its pattern calls independent. The model itself is left untouched. Raises what a wrong
    pattern raises; everything that runs but is wrong is in the report.
    """
    kwargs = dict(kwargs or {})
    axis = Axis.of(mesh)
    found, root = stages_of(model, stages)
    paths = {s.name: s for s in found}
    args = (args,) if isinstance(args, Tensor) else tuple(args)
    tensors = itertools.chain(model.parameters(), model.buffers(), tensors_in((args, kwargs)))
    cuda = sorted({t.device.index for t in tensors if t.is_cuda})
    with torch.random.fork_rng(devices=cuda), torch.enable_grad():
        return _check(model, args, kwargs, axis, mesh, stages, paths, root)


def _check(
    model: nn.Module,
    args: Any,
    kwargs: Any,
    axis: Axis,
    mesh: DeviceMesh,
    stages: Mapping[str, str] | None,
    paths: dict[str, Stage],
    root: StagePattern | None,
) -> Report:
    single, args, kwargs, dtype = _prepare(model, args, kwargs)
    report = Report(axis.size, dtype)
    tolerance = TOLERANCE.get(dtype, 3e-2)

    expected, expected_grads, calls = _run(single, args, kwargs, paths, average=lambda g: g)
    root_sizes = sizes_of_root(model, root, args, kwargs)
    for stage, stage_args, stage_kwargs in calls:
        _slices(stage, stage_args, stage_kwargs, root_sizes, report, tolerance)

    if report.problems:
        report.problems.append("not run in parallel: it would be wrong until its stages are right")
        return report
    parallel = copy.deepcopy(single)
    parallel.zero_grad()
    parallelize(parallel, mesh, stages)

    def average(g: Tensor) -> Tensor:
        return torch.ops.dsp.all_reduce(g.contiguous(), axis.group) / axis.size

    try:
        outputs, grads, _ = _run(parallel, args, kwargs, {}, average=average if axis.size > 1 else lambda g: g)
    except Exception as reason:
        report.problems.append(f"the parallel run raised {type(reason).__name__}: {reason}")
        return report
    report.output = max((error(a, b) for a, b in zip(outputs, expected)), default=0.0)
    if not report.output <= tolerance:
        report.problems.append(f"outputs differ by {report.output:.1e}")
    # a gradient that is zero but for rounding (the bias of attention keys, say) is measured against the others
    largest = [float(g.abs().max()) for g in expected_grads.values() if g is not None and g.numel()]
    floor = 1e-6 * max(largest, default=0.0)
    wrong = []
    for name, g in expected_grads.items():
        mine = grads.get(name)
        if g is None or mine is None:
            off = 0.0 if (g is None or not g.any()) and (mine is None or not mine.any()) else float("inf")
        else:
            off = error(mine, g, floor)
        report.gradients[name] = off
        if not off <= 10 * tolerance:
            wrong.append(f"the gradient of {name} differs by {off:.1e}")
    report.problems += wrong[:5]
    if len(wrong) > 5:
        report.problems.append(f"and {len(wrong) - 5} more gradients; report.gradients has them all")
    return report


def _prepare(model: nn.Module, args: Any, kwargs: Any) -> tuple[nn.Module, Any, Any, torch.dtype]:
    """A copy without randomness, in float64 if it runs there, with inputs to match."""
    first: Exception | None = None
    for dtype, clone, a, k in copies(model, args, kwargs):
        try:
            with torch.no_grad():
                torch.manual_seed(0)
                one = tensors_in(clone(*a, **k))
                torch.manual_seed(1)
                two = tensors_in(clone(*a, **k))
        except Exception as reason:
            first = first or reason
            continue
        if any(not torch.equal(x, y) for x, y in zip(one, two)):
            clone.eval()  # dropout and the like cannot be compared number by number
        return clone, a, k, dtype
    assert first is not None
    raise first


def _run(
    model: nn.Module, args: Any, kwargs: Any, paths: dict[str, Stage], average: Callable[[Tensor], Tensor]
) -> tuple[list[Tensor], dict[str, Tensor | None], list[tuple[Stage, Any, Any]]]:
    leaves: list[Tensor] = []

    def leaf(t: Tensor) -> Tensor:
        t = t.detach().clone()
        if t.is_floating_point():
            t.requires_grad_()
        leaves.append(t)
        return t

    a, k = pytree.tree_map_only(Tensor, leaf, (args, kwargs))
    calls: list[tuple[Stage, Any, Any]] = []
    handles = []
    for name, stage in paths.items():
        own = Stage(name, _module(model, name), stage.pattern.text)

        def record(module: nn.Module, args: Any, kwargs: Any, own: Stage = own) -> None:
            if not any(c[0] is own for c in calls):
                detached = pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), (args, kwargs))
                calls.append((own, *detached))

        handles.append(own.module.register_forward_pre_hook(record, with_kwargs=True))
    torch.manual_seed(0)
    outputs = [t for t in tensors_in(model(*a, **k)) if t.is_floating_point()]
    for h in handles:
        h.remove()
    generator = torch.Generator().manual_seed(0)
    loss = sum(
        ((t * torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t)).sum() / t.numel() for t in outputs),
        torch.zeros(()),
    )
    if isinstance(loss, Tensor) and loss.requires_grad:
        loss.backward()
    grads: dict[str, Tensor | None] = {}
    for name, p in model.named_parameters():
        # every rank takes part in every average
        mine = p.grad if p.grad is not None else torch.zeros_like(p)
        grads[name] = average(mine)
    for i, t in enumerate(leaves):
        if t.is_floating_point():
            grads[f"input {i}"] = t.grad
    return [t.detach() for t in outputs], grads, calls


def _module(model: nn.Module, clean_name: str) -> nn.Module:
    return next(m for n, m in model.named_modules() if clean(n) == clean_name)


def _slices(
    stage: Stage, args: Any, kwargs: Any, root_sizes: Mapping[str, int], report: Report, tolerance: float
) -> None:
    """f(slice) == slice of f, along every dim outside brackets, in uneven parts."""
    _, bound = stage.signature.bind(args, kwargs)
    sizes = stage.sizes(bound, root_sizes)
    with torch.no_grad():
        whole = tensors_in(stage.module(*args, **kwargs))
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
                with torch.no_grad():
                    outputs = tensors_in(stage.module(*call.args, **call.kwargs))
            except Exception as reason:
                worst, failure = float("inf"), f"fails on a slice along {name!r} ({type(reason).__name__}: {reason})"
                break
            for t, w, p in zip(outputs, whole, patterns):
                out_sizes = {**{m: w.shape[p.axis_of(m)] for m in p.names if len(p.axes[p.axis_of(m)]) == 1}, **sizes}
                cut = cut_for(p, w.shape, name, out_sizes)
                expected = part(w, cut, size, start, length) if cut is not None else w
                worst = max(worst, error(t, expected))
        report.slices[(stage.name, name)] = worst
        if not worst <= tolerance:
            failure = failure or (
                f"is not independent along {name!r}: f(slice) is off by {worst:.1e} from the slice of f"
            )
            report.problems.append(
                f"{stage.where} {failure}; write [{name}] in '{stage.pattern.text}', or, if one of its other tensors "
                f"varies along {name!r}, give that one a pattern"
            )
