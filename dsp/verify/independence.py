"""Stages by slices: f(slice) must be the slice of f, along every dim that a pattern calls independent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dsp.comm.layout import Cut
from dsp.core.inputs import described_call
from dsp.stages.parts import call_part, part, slices
from dsp.stages.stage import Stage, cut_for
from dsp.support.tensors import tensors_in
from dsp.verify.modes import called
from dsp.verify.report import Report
from dsp.verify.slices import copied, error

Cuts = list[Cut | None]


def recorded(model: nn.Module, stages: list[Stage], args: Any, kwargs: Any) -> list[tuple[Stage, Any, Any]]:
    """The stage calls of a forward, one per stage and signature of arguments."""
    calls: list[tuple[Stage, Any, Any]] = []
    seen: set[Any] = set()
    handles = []
    for stage in stages:

        def record(module: nn.Module, args: Any, kwargs: Any, stage: Stage = stage) -> None:
            if (key := (stage.name, described_call(args, kwargs))) not in seen:
                seen.add(key)
                calls.append((stage, *copied(args, kwargs)))

        handles.append(stage.module.register_forward_pre_hook(record, with_kwargs=True))
    try:
        called(model, args, kwargs)
    finally:
        for h in handles:
            h.remove()
    return calls


def unseen(report: Report, stages: list[Stage], calls: list[tuple[Stage, Any, Any]], root: Mapping[str, int]) -> None:
    """Report the stages that did not run, and the dims that could not be sliced."""
    ran = {stage.name for stage, *_ in calls}
    idle = [stage.name for stage in stages if stage.name not in ran]
    if idle:
        report.uncovered.append(f"stages that did not run: {some(idle)}")
    short: dict[str, list[str]] = {}
    for stage, args, kwargs in calls:
        sizes = stage.sizes(stage.signature.bind(args, kwargs)[1], root)
        for name in (*stage.pattern.free, *stage.pattern.summed):
            if sizes.get(name, 1) < 2 and (stage.name, name) not in report.slices:
                short.setdefault(name, []).append(stage.name)
    for name, names in short.items():
        report.uncovered.append(f"slices along {name!r}, which has size 1: {some(list(dict.fromkeys(names)))}")


def some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def compare_slices(
    stage: Stage, args: Any, kwargs: Any, root_sizes: Mapping[str, int], report: Report, tolerance: float
) -> None:
    """Compare f(slice) with the slice of f along every dim outside brackets, and Σ f(slice) with f(x) along sums."""
    _, bound = stage.signature.bind(args, kwargs)
    sizes = stage.sizes(bound, root_sizes)
    whole = run(stage, args, kwargs)
    for name in (*stage.pattern.free, *stage.pattern.summed):
        if sizes.get(name, 1) < 2:
            continue
        cuts = [cut_for(b.pattern, b.tensor.shape, name, sizes) for b in bound]
        sums = name in stage.pattern.summed
        try:
            worst = (sums_off if sums else slices_off)(stage, args, kwargs, cuts, name, sizes, whole, root_sizes)
            relation = "a sum over" if sums else "independent along"
            text = "the sum of f(slice) is off by {} from f" if sums else "f(slice) is off by {} from the slice of f"
            failure = f"is not {relation} {name!r}: {text.format(f'{worst:.1e}')}"
        except Exception as reason:
            worst, failure = float("inf"), f"fails on a slice along {name!r} ({type(reason).__name__}: {reason})"
        report.slices[(stage.name, name)] = max(worst, report.slices.get((stage.name, name), 0.0))
        if not worst <= tolerance:
            report.problems.append(
                f"{stage.label} {failure}; write [{name}] in '{stage.pattern.text}'. Or, if another argument of the "
                f"stage also has the dim {name!r}, give that argument a pattern"
            )


def run(stage: Stage, args: Any, kwargs: Any) -> list[Tensor]:
    args, kwargs = copied(args, kwargs)  # a stage may write into its arguments
    with torch.no_grad():
        return tensors_in(stage.module(*args, **kwargs))


def slices_off(
    stage: Stage, args: Any, kwargs: Any, cuts: Cuts, name: str, sizes: Mapping[str, int], whole: list[Tensor],
    root: Mapping[str, int],
) -> float:  # fmt: skip
    """The largest error of f(slice)."""
    worst, size = 0.0, sizes[name]
    for start, length in slices(size):
        call = call_part(stage.signature, args, kwargs, cuts, size, start, length)
        for t, w, p in zip(run(stage, call.args, call.kwargs), whole, stage.outputs(whole)):
            cut = cut_for(p, w.shape, name, stage.result_sizes(w, p, sizes, root))
            worst = max(worst, error(t, part(w, cut, size, start, length) if cut is not None else w))
    return worst


def sums_off(
    stage: Stage, args: Any, kwargs: Any, cuts: Cuts, name: str, sizes: Mapping[str, int], whole: list[Tensor],
    root: Mapping[str, int],
) -> float:  # fmt: skip
    """The error of the sum of f(slice) over slices that cover the dim."""
    size = sizes[name]
    calls = [call_part(stage.signature, args, kwargs, cuts, size, *span) for span in slices(size)[:2]]
    one, two = (run(stage, call.args, call.kwargs) for call in calls)
    return max(error(a + b, w) for a, b, w in zip(one, two, whole))
