"""Unmodified models of diffusers, each by one line, against one process: what docs/diffusers.md says of them."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from slow import slow_but
from torch.distributed.device_mesh import DeviceMesh

pytest.importorskip("diffusers")

# of which the plan takes seconds, and whether Ulysses has a figure for it
MODELS = {
    "FluxTransformer2DModel": 1.1,
    "AutoencoderKLHunyuanVideo, decoder": None,
    "CogVideoXTransformer3DModel": 1.3,
    "MochiTransformer3DModel": 1.3,
    "LTXVideoTransformer3DModel": 1.1,
    "WanTransformer3DModel": 1.1,
    "AutoencoderKLHunyuanVideo, encoder": None,
    "AutoencoderKLTemporalDecoder, encoder": None,
}


def held(mesh: DeviceMesh, name: str) -> dict[str, float]:
    sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
    import diffusers_models

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of autocast to fp32 on CPU, by the models
        return diffusers_models.held(mesh, name)


@pytest.mark.parametrize("name", slow_but(MODELS, "FluxTransformer2DModel"))
def test_one_line_is_enough(ranks: Any, name: str) -> None:
    found = ranks(held, 3, name)[0]
    assert found["output"] < 1e-6  # parts of them compute in fp32, whatever the model's type
    assert max(found["inputs"], found["parameters"]) < 1e-5
    assert found["share"] <= (0.37 if MODELS[name] else 0.5)
    if MODELS[name]:
        assert found["planned"] <= MODELS[name] * found["ulysses"]
