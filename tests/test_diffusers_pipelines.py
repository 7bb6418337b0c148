"""Pipelines of diffusers after one line for their transformer and one for their decoder: the video of one process."""

from __future__ import annotations

import itertools
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


def wan_transformer(heads: int = 6) -> nn.Module:
    return diffusers.WanTransformer3DModel(
        num_attention_heads=heads, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16, freq_dim=8,
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


class Decode(nn.Module):
    """The whole of an autoencoder's decode, of one that passes caches to its decoder frame by frame."""

    def __init__(self, vae: Any) -> None:
        super().__init__()
        self.vae = vae

    def forward(self, z: Tensor) -> Tensor:
        return type(self.vae).decode(self.vae, z, return_dict=False)[0]


def video(mesh: DeviceMesh, name: str, decoder: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expect = sampled(made(name), name)
        pipe = made(name)
        dsp.parallelize(pipe.transformer, mesh, PIPELINES[name][1])
        if decoder and name == "wan":
            decode = dsp.parallelize(Decode(pipe.vae), mesh, {"": "z=b c t h w"})
            pipe.vae.decode = lambda z, return_dict=False: (decode(z),)
        elif decoder:
            dsp.parallelize(pipe.vae.decoder, mesh, {"": "hidden_states=b c t h w"})
        with dsp.count_comm() as comm:
            got = sampled(pipe, name)
    assert comm.forward.bytes
    torch.testing.assert_close(got, expect, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "decoder", "n"), [("wan", False, 2), ("wan", True, 3), ("ltx", False, 3), ("ltx", True, 2)]
)
def test_a_pipeline_gives_the_video_of_one_process(ranks: Any, name: str, decoder: bool, n: int) -> None:
    ranks(video, n, name, decoder)


def denoised(model: Any, steps: int) -> tuple[Tensor, list[int]]:
    """A sampler's loop with guidance, and how often the last block ran up to each step."""
    draw = torch.Generator().manual_seed(0)
    x, *texts = (torch.randn(*shape, generator=draw) for shape in ((1, 4, 2, 6, 4), (1, 5, 16), (1, 5, 16)))
    ran, counts = [], []
    model.blocks[-1].attn1.to_q.register_forward_hook(lambda *_: ran.append(1))
    with torch.no_grad():
        for i in range(steps):
            t, found = torch.tensor([1000.0 * (1 - i / steps)]), []
            for name, text in zip(("cond", "uncond"), texts):
                with model.cache_context(name):
                    found.append(model(x, t, text, return_dict=False)[0])
            x = x - (found[1] + 3 * (found[0] - found[1])) / steps
            counts.append(len(ran))
    return x, counts


def cached(mesh: DeviceMesh, threshold: float, steps: int) -> int:
    """Blocks are skipped by a number, read of what is sharded: the same on all ranks as on one process."""
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for parallel in (False, True):
            torch.manual_seed(0)
            model = wan_transformer(heads=2)
            model.enable_cache(diffusers.FirstBlockCacheConfig(threshold=threshold))
            if parallel:
                dsp.parallelize(model, mesh, WAN)
            found.append(denoised(model, steps))
    (expect, wanted), (got, counts) = found
    torch.testing.assert_close(got, expect, rtol=1e-4, atol=1e-4)
    steps = [[b - a for a, b in itertools.pairwise(ran)] for ran in (counts, wanted)]  # to plan is to run it, too
    assert steps[0] == steps[1]
    return sum(steps[1])


@pytest.mark.parametrize(("n", "threshold", "steps"), [slow(2, 0.1, 100), slow(3, 0.05, 20)])
def test_a_first_block_cache_decides_alike(ranks: Any, n: int, threshold: float, steps: int) -> None:
    ran = ranks(cached, n, threshold, steps)[0]
    assert 0 < ran < 2 * (steps - 1)
