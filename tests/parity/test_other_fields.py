"""Unmodified models of other fields, each of another package and by one line: what docs/your-own-model.md says."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from torch.distributed.device_mesh import DeviceMesh

from tests.support.slow import slow

# of what package, how exact (FNO's modes are complex64, whatever the model's type), and a rank's share of the largest
MODELS = {
    "neuraloperator's FNO": ("neuralop", 1e-6, 0.04),
    "torch_geometric's GCN": ("torch_geometric", 1e-12, 0.06),
    "minGRU's language model": ("minGRU_pytorch", 1e-12, 0.06),
    "monai's SegResNet": ("monai", 1e-12, 0.06),
    "fair-esm's MSATransformer": ("esm", 1e-12, 0.06),
}


def held(mesh: DeviceMesh, name: str) -> dict[str, float]:
    from benchmarks.models import other_fields

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return other_fields.diffusers_models.held(mesh, other_fields.CASES[name])


@pytest.mark.parametrize("name", [slow(name) for name in MODELS])
@pytest.mark.parametrize("n", [2, 3])
def test_one_line_is_enough(ranks: Any, n: int, name: str) -> None:
    """Output and every gradient; what each rank sends is counted by `held`, which raises where the plan says else."""
    package, exact, more = MODELS[name]
    pytest.importorskip(package)
    found = ranks(held, n, name)[0]
    assert max(found["output"], found["inputs"], found["parameters"]) < exact
    assert found["share"] <= 1 / n + more
    assert found["whole"] < 0.01
