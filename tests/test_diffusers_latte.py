"""The acceptance model: diffusers' LatteTransformer3DModel, unmodified, text with mask, made parallel by one dict."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from held import shares
from slow import slow
from test_parallel import beside
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import dsp

STAGES = {
    "": "hidden_states=b c t h w, encoder_attention_mask=(b t) 1 l -> b c t h w",
    "pos_embed": "(b t) [c h w] -> (b t) [s d]",
    "transformer_blocks.*": "(b t) [s d], encoder_hidden_states=(b t) [l d], "
    "encoder_attention_mask=(b t) 1 [l], timestep=(b t) [e]",
    "temporal_transformer_blocks.*": "(b s) [t d], timestep=(b s) [e]",
}


def build(frames: int, side: int, layers: int = 2, seed: int = 0, heads: int = 2, dtype=torch.float64) -> Any:
    from diffusers import LatteTransformer3DModel

    torch.manual_seed(seed)
    model = LatteTransformer3DModel(
        num_attention_heads=heads, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=layers,
        cross_attention_dim=8 * heads, attention_bias=True, sample_size=side, patch_size=2, caption_channels=12,
        activation_fn="gelu-approximate", norm_type="ada_norm_single", norm_elementwise_affine=False, norm_eps=1e-6,
        video_length=frames,
    )  # fmt: skip
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2)
    return model.to(dtype)


def inputs(batch: int, frames: int, side: int, dtype=torch.float64, text: int = 6) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(1)
    mask = torch.zeros(batch * frames, 1, text, dtype=dtype)
    mask[: batch * frames // 2, :, 4:] = -10000.0
    return {
        "hidden_states": torch.randn(batch, 4, frames, side, side, generator=g, dtype=dtype),
        "timestep": torch.tensor([3, 500, 70])[:batch],
        "encoder_hidden_states": torch.randn(batch, text, 12, generator=g, dtype=dtype),
        "encoder_attention_mask": mask,
    }


def parity(mesh: DeviceMesh, batch: int, frames: int, side: int, ckpt: bool, gather: bool) -> None:
    kwargs = inputs(batch, frames, side)
    kwargs["hidden_states"].requires_grad_()
    single, model = build(frames, side).train(), build(frames, side).train()
    if ckpt:
        model.enable_gradient_checkpointing()
    dsp.parallelize(model, mesh, STAGES, gather_output=gather)
    beside(single, model, mesh, kwargs, rounds=2)
    for no_grad in (torch.no_grad, torch.inference_mode)[: 1 if ckpt else 2]:
        with no_grad():
            torch.testing.assert_close(dsp.gather(model(**kwargs, return_dict=False)[0]), single(**kwargs).sample)


@pytest.mark.parametrize(
    ("n", "shape", "ckpt", "gather"),
    [
        (3, (2, 7, 6), True, False), slow(1, (2, 7, 6), True, True), slow(2, (1, 5, 4), False, False),
        slow(3, (1, 5, 4), False, True), slow(4, (2, 7, 6), True, True),
    ],
)  # fmt: skip
def test_outputs_and_every_gradient(ranks, n: int, shape: tuple[int, int, int], ckpt: bool, gather: bool) -> None:
    ranks(parity, n, *shape, ckpt, gather)


def moved(mesh: DeviceMesh, ckpt: bool, gather: bool) -> tuple[dict, dict]:
    batch, frames, side, layers = 2, 8, 8, 3
    model = build(frames, side, layers).train()
    if ckpt:
        model.enable_gradient_checkpointing()
    kwargs = inputs(batch, frames, side)
    plan = dsp.plan(model, kwargs=kwargs, size=mesh.size(), stages=STAGES, gather_output=gather)
    dsp.parallelize(model, mesh, STAGES, gather_output=gather)
    with dsp.count_comm() as comm:
        out = model(**kwargs).sample
        (dsp.mean(out) if not gather else out.mean()).backward()
    return comm.by_collective(), plan.bytes


@pytest.mark.parametrize(("n", "ckpt"), [(2, True), slow(4, False), slow(4, True)])
def test_bytes_equal_the_hand_derived_formula(ranks, n: int, ckpt: bool) -> None:
    # M = B·T·S·D elements of 8 bytes; 3 layers of two blocks; patch 2; 8 channels come out
    m = 2 * 8 * 16 * 16 * 8
    switches = 2 * 3 - 1  # after the last block nothing computes over s: the output stays sharded along its rows
    each = (n - 1) * m // n**2
    out = 2 * 8 * 8 * 8 * 8 * 8
    for gather in (True, False):
        for counts, planned in ranks(moved, n, ckpt, gather):
            assert counts["forward"]["switch"] == {"calls": switches, "bytes": switches * each}
            assert counts["backward"]["switch"] == {"calls": switches, "bytes": switches * each}
            assert counts["recompute"] == {}
            extra = (n - 1) * out // n if gather else 0
            if gather:
                assert counts["forward"]["gather"] == {"calls": 1, "bytes": extra}
                assert counts["backward"]["reduce_scatter"] == {"calls": 1, "bytes": extra}
            assert set(counts["forward"]) <= {"switch", "gather", "all_reduce"}
            total = switches * each + extra
            assert planned == {"forward": total, "backward": total, "recompute": 0}


def held(mesh: DeviceMesh, backward: bool) -> tuple[float, float]:
    def parallelize(model: Any) -> None:
        dsp.parallelize(model, mesh, STAGES, gather_output=False)

    return shares(lambda: build(16, 16, 1, heads=1).train(), inputs(1, 16, 16, text=32), parallelize, backward=backward)


@pytest.mark.parametrize(("n", "backward"), [(4, True), slow(4, False), slow(2, True)])
def test_no_rank_holds_more_than_its_share(ranks, n: int, backward: bool) -> None:
    for largest, total in ranks(held, n, backward):
        assert largest <= 1.1 / n
        assert total <= 1.1 / n
