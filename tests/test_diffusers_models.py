"""Unmodified models of diffusers, each by one line, against one process: what docs/diffusers.md says of them."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from slow import slow, slow_but
from torch.distributed.device_mesh import DeviceMesh

import dsp

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
    "AutoencoderKLWan, decoder": None,
    "AutoencoderKLLTXVideo, decoder": None,
    "AutoencoderKLTemporalDecoder, encoder": None,
}


def held(mesh: DeviceMesh, name: str) -> dict[str, float]:
    sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
    import diffusers_models

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of autocast to fp32 on CPU, by the models
        return diffusers_models.held(mesh, diffusers_models.CASES[name])


@pytest.mark.parametrize("name", slow_but(MODELS, "FluxTransformer2DModel"))
def test_one_line_is_enough(ranks: Any, name: str) -> None:
    found = ranks(held, 3, name)[0]
    assert found["output"] < 1e-6  # parts of them compute in fp32, whatever the model's type
    assert max(found["inputs"], found["parameters"]) < 1e-5
    assert found["share"] <= (0.37 if MODELS[name] else 0.5)
    if MODELS[name]:
        assert found["planned"] <= MODELS[name] * found["ulysses"]


TEXT, VIDEO = torch.randn(1, 256, 4096, device="meta"), torch.randn(1, 16, 21, 90, 160, device="meta")
GIVEN = {"hidden_states": VIDEO, "encoder_hidden_states": TEXT, "timestep": torch.tensor([3]), "return_dict": False}
# 81 frames of 720p: the class, its configuration, what it takes besides, the heads of its attentions together
DEEP = {
    "Wan 14B": ("WanTransformer3DModel", {"num_attention_heads": 40, "ffn_dim": 13824, "num_layers": 40}, {}, 40 * 40),
    "HunyuanVideo 13B": (
        "HunyuanVideoTransformer3DModel", {}, {
            "encoder_attention_mask": torch.ones(1, 256), "pooled_projections": torch.randn(1, 768),
            "guidance": torch.tensor([4.0]),
        }, 24 * 60,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "n"), [slow("Wan 14B", 3), slow("HunyuanVideo 13B", 4)])
def test_whole_models_are_planned(name: str, n: int) -> None:
    """At their real depth and size, from meta tensors: proven, in seconds."""
    import diffusers

    kind, config, more, heads = DEEP[name]
    with torch.device("meta"):
        model = getattr(diffusers, kind)(**config)
    line = "hidden_states=b c t h w, encoder_hidden_states=b n e"
    plan = dsp.plan(model, kwargs=GIVEN | more, size=n, stages={"": line}, gather_output=False)
    ulysses = 4 * heads * 128 * 21 * 45 * 80 * 4 * (n - 1) / n**2
    assert plan.exact
    assert plan.share <= 1.1 / n
    assert plan.bytes["forward"] <= 1.06 * ulysses
