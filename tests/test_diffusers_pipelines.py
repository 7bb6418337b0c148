"""Pipelines of diffusers after one line for their transformer and one for their decoder: the video of one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from slow import slow
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import dsp

diffusers = pytest.importorskip("diffusers")

WAN = {"": "hidden_states=b c t h w, encoder_hidden_states=b n e"}
LTX = {"": "hidden_states=b s c, encoder_hidden_states=b n e"}


def wan_transformer() -> nn.Module:
    return diffusers.WanTransformer3DModel(
        num_attention_heads=6, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16, freq_dim=8,
        ffn_dim=32, num_layers=3, rope_max_seq_len=16,
    )  # fmt: skip


def wan() -> Any:
    vae = diffusers.AutoencoderKLWan(
        base_dim=4, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, latents_mean=[0.0] * 4, latents_std=[1.0] * 4
    )
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    return diffusers.WanPipeline(None, None, vae=vae, scheduler=scheduler, transformer=wan_transformer())


def ltx() -> Any:
    transformer = diffusers.LTXVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=6, attention_head_dim=8, cross_attention_dim=48,
        num_layers=2, caption_channels=16,
    )  # fmt: skip
    vae = diffusers.AutoencoderKLLTXVideo(
        latent_channels=4, block_out_channels=(8, 8), decoder_block_out_channels=(8, 8), layers_per_block=(1, 1, 1),
        decoder_layers_per_block=(1, 1, 1), spatio_temporal_scaling=(True, False), patch_size=2,
        decoder_spatio_temporal_scaling=(True, False), down_block_types=("LTXVideoDownBlock3D",) * 2,
        decoder_inject_noise=(False,) * 3, upsample_residual=(False,) * 2, upsample_factor=(1,) * 2,
    )  # fmt: skip
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    return diffusers.LTXPipeline(scheduler, vae, None, None, transformer)


PIPELINES: dict[str, tuple[Callable[[], Any], dict[str, str], dict[str, Any]]] = {
    "wan": (wan, WAN, {}),
    "ltx": (ltx, LTX, {f"{kind}prompt_attention_mask": torch.ones(1, 10).bool() for kind in ("", "negative_")}),
}


def made(name: str) -> Any:
    torch.manual_seed(0)
    pipe = PIPELINES[name][0]()
    pipe.set_progress_bar_config(disable=True)
    return pipe


def sampled(pipe: Any, name: str) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    text = {f"{kind}prompt_embeds": torch.randn(1, 10, 16, generator=draw) for kind in ("", "negative_")}
    size = {"height": 32, "width": 64, "num_frames": 9, "num_inference_steps": 2}
    return pipe(**text, **PIPELINES[name][2], **size, generator=draw, output_type="pt").frames


def video(mesh: DeviceMesh, name: str, decoder: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expect = sampled(made(name), name)
        pipe = made(name)
        dsp.parallelize(pipe.transformer, mesh, PIPELINES[name][1])
        if decoder:
            dsp.parallelize(pipe.vae.decoder, mesh, {"": "hidden_states=b c t h w"})
        with dsp.count_comm() as comm:
            got = sampled(pipe, name)
    assert comm.forward.bytes
    torch.testing.assert_close(got, expect, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "decoder"), [slow("wan", False), slow("ltx", False), slow("ltx", True)])
@pytest.mark.parametrize("n", [2, slow(3)])
def test_a_pipeline_gives_the_video_of_one_process(ranks: Any, n: int, name: str, decoder: bool) -> None:
    ranks(video, n, name, decoder)
