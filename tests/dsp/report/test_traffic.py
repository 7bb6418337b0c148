"""The traffic of a record without a run is what `dsp.count_comm` counts: bytes of each rank, in each phase."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import dsp
from dsp.parallel import parallelize
from dsp.report.traffic import PHASES, planned_transfers
from dsp.support.tensors import tensors_in
from tests.support.forwards import FORWARDS
from tests.support.registry import CASES, recomputing
from tests.support.slow import keep_short, long, slow
from tools.fuzz.programs import build, float64, generate, inputs_of

Sent = dict[str, Counter[str]]


def counted(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Sent]:
    """The calls and bytes of a step, by phase and kind; all outputs get a gradient, at no cost."""
    with dsp.count_comm() as comm:
        outputs = [t for t in tensors_in(model(**inputs)) if t.requires_grad]
        outputs = [dsp.hand_over(t) if isinstance(t, DTensor) else t for t in outputs]
        torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])
    return {phase: {k: Counter(v) for k, v in of.items()} for phase, of in comm.by_collective().items()}


def planned(model: nn.Module, rank: int) -> dict[str, Sent]:
    """The same of the record of the only call."""
    [record] = model.forward.__self__.records.values()  # type: ignore[union-attr]
    assert record.planned
    sent: dict[str, Sent] = {phase: {} for phase in PHASES}
    for t in planned_transfers(record):
        sent[t.phase].setdefault(t.kind, Counter()).update(calls=t.calls, bytes=t.sent[rank])
    return sent


def sends_as_planned(
    model: nn.Module, inputs: Callable[[], dict[str, Any]], mesh: DeviceMesh, stages: Any, **options: Any
) -> None:
    parallelize(model, mesh, stages, **options)
    for _ in range(2):
        sent = counted(model, inputs())
    assert planned(model, mesh.get_local_rank()) == sent


WRITES = {"InPlace", 28}  # they write in place into tensors that are moved, which is refused still
OTHERS = {"axial"}  # its package is not installed everywhere
RANKS_AND_GATHER = [(3, True), slow(2, False), long(3, False), long(2, True)]  # short and slow have each value once
QUICK = ("Branches", "Folded", "transformer2d")


@pytest.mark.parametrize(("mesh", "gather_output"), RANKS_AND_GATHER)
@pytest.mark.parametrize(
    ("name", "checkpoints"),
    keep_short(
        [(n, c) for n, case in CASES.items() for c in (False, True) if case.planned and n not in WRITES | OTHERS],
        only=[*((n, c) for n in QUICK for c in (False, True)), ("evoformer", True)],
    ),
)
def test_a_model_sends_as_planned(mesh: DeviceMesh, name: str, checkpoints: bool, gather_output: bool) -> None:
    case = CASES[name]
    size = case.uneven[0]
    model = case.build(*size[1:])
    stages = case.stages or model.stages
    if checkpoints:
        stages = recomputing(model, stages)
    sends_as_planned(model, lambda: case.inputs(*size), mesh, stages, gather_output=gather_output)


@pytest.mark.parametrize("mesh", [slow(2), 3])
@pytest.mark.parametrize("name", FORWARDS)
def test_a_small_forward_sends_as_planned(mesh: DeviceMesh, name: str) -> None:
    make, inputs, _ = FORWARDS[name]
    sends_as_planned(make().double(), inputs, mesh, None)


@pytest.mark.parametrize(("mesh", "gather_output"), RANKS_AND_GATHER)
@pytest.mark.parametrize("seed", [seed if seed < 10 else slow(seed) for seed in range(50) if seed not in WRITES])
def test_a_random_program_sends_as_planned(mesh: DeviceMesh, seed: int, gather_output: bool) -> None:
    with float64():
        torch.manual_seed(0)
        model = build(generate(seed))
        inputs = inputs_of(model)
        model(**inputs)  # makes its weights

        def fresh() -> dict[str, Tensor]:
            return {k: v.clone().requires_grad_() if v.is_floating_point() else v for k, v in inputs.items()}

        sends_as_planned(model, fresh, mesh, None, gather_output=gather_output)
