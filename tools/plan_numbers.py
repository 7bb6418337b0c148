"""Compare every plan with numbers made before: calls and bytes by collective and phase, and the peak of a rank.

``python tools/plan_numbers.py numbers.json --write`` makes the numbers; without ``--write`` the plans of this tree are
compared with them, as the planner compares them (docs/plan.md): a forward may send less, never more, and at equal bytes
it may not make more calls; at an equal forward the same holds for the step. It fails if a plan is worse. ``--only``
takes parts of names, ``--programs`` how many random programs there are.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import dsp

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

Case = tuple[nn.Module, dict[str, Any], Any]  # a model, its inputs and its stages (None: its own)


def zoo_models() -> Iterator[tuple[str, Callable[[], Case]]]:
    from tests.support import cases

    def build(case: str) -> Case:
        model = cases.build(case)
        return model, cases.doubled(cases.example(model, 2, frames=7, height=6, width=10)), None

    for case in cases.CASES | cases.PROTEINS:
        yield f"zoo/{case}", lambda case=case: build(case)  # type: ignore[misc]


def diffusers_models() -> Iterator[tuple[str, Callable[[], Case]]]:
    from tests.support import known_models as cases

    for name, case in (cases.CASES | cases.OTHER_FIELDS).items():
        yield f"diffusers/{name}", lambda case=case: (*cases.made(case), {"": case.line})  # type: ignore[misc]


def toys() -> Iterator[tuple[str, Callable[[], Case]]]:
    from tests.support import toys as cases

    for name in cases.TOYS:
        yield f"toy/{name}", lambda name=name: (cases.make(name), cases.inputs(name, 2, 7, 6), None)  # type: ignore[misc]


def programs(count: int) -> Iterator[tuple[str, Callable[[], Case]]]:
    from tools.fuzz import programs as cases

    def build(seed: int) -> Case:
        with cases.float64():
            model = cases.build(cases.generate(seed))
            inputs = cases.inputs_of(model)
            model(**cases.leaves_of(inputs))
            return model, cases.leaves_of(inputs), model.stages

    for seed in range(count):
        yield f"program/{seed}", lambda seed=seed: build(seed)  # type: ignore[misc]


def numbers(make: Callable[[], Case]) -> dict[str, Any]:
    """The numbers of a model's plans, by ranks and whether its output is gathered."""
    model, inputs, stages = make()
    plans: dict[str, Any] = {}
    for n in (2, 3, 4):
        for gather in (True, False):
            try:
                plan = dsp.plan(copy.deepcopy(model), kwargs=inputs, size=n, stages=stages, gather_output=gather)
                sends = {phase: {kind: [*sent] for kind, sent in kinds.items()} for phase, kinds in plan.sends.items()}
                plans[f"{n} gathered" if gather else f"{n}"] = {"sends": sends, "peak": plan.peak, "exact": plan.exact}
            except Exception as error:
                plans[f"{n} gathered" if gather else f"{n}"] = f"{type(error).__name__}: {error}".partition("\n")[0]
    return plans


def totals(plan: Any, *phases: str) -> tuple[int, int]:
    """Bytes and calls of a step, or of some of its phases."""
    sends = [traffic for phase in phases or plan["sends"] for traffic in plan["sends"][phase].values()]
    return sum(nbytes for nbytes, _ in sends), sum(calls for _, calls in sends)


def judged(name: str, before: Any, now: Any) -> str:
    """The difference of one plan; "" where there is none."""
    if before == now:
        return ""
    if isinstance(before, str) or isinstance(now, str):
        return f"{name}: {before} -> {now}"
    (bytes_before, calls_before), (nbytes, calls) = totals(before), totals(now)
    worse = (*totals(now, "forward"), nbytes, calls) > (*totals(before, "forward"), bytes_before, calls_before)
    said = f"{nbytes / max(bytes_before, 1):.3f} of the bytes, {bytes_before} -> {nbytes}"
    said += f", calls {calls_before} -> {calls}, peak {before['peak']} -> {now['peak']}"
    return f"{'WORSE ' * worse}{name}: {said}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", nargs="*", default=[""])
    parser.add_argument("--programs", type=int, default=300)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    known = {} if given.write else json.loads(given.file.read_text())
    plans, differ, worse = {}, 0, 0
    for name, make in [*toys(), *zoo_models(), *diffusers_models(), *programs(given.programs)]:
        if not any(part in name for part in given.only) or not (given.write or name in known):
            continue
        torch.manual_seed(0)
        try:
            plans[name] = numbers(make)
        except Exception as error:  # a package that is not installed
            print(f"{name} is left out: {type(error).__name__}: {error}", flush=True)
            continue
        if given.write:
            lines = (f"{json.dumps(key)}: {json.dumps(plans[key], sort_keys=True)}" for key in sorted(plans))
            given.file.write_text("{\n" + ",\n".join(lines) + "\n}\n")  # a line each
            continue
        said = [judged(f"{name}, {kind}", known[name].get(kind, "nothing"), now) for kind, now in plans[name].items()]
        differ += len(list(filter(None, said)))
        worse += sum(text.startswith("WORSE") for text in said)
        print(*filter(None, said), sep="\n", end="\n" * any(said), flush=True)
    print(f"{len(plans)} models, {differ} plans differ, {worse} are worse")
    sys.exit(worse > 0)


if __name__ == "__main__":
    main()
