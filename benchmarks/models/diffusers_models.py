"""Unmodified models of diffusers under `dsp.parallelize`, held to one process: the table of docs/diffusers.md.

    python benchmarks/models/diffusers_models.py [--ranks 2 3 4] [--only Flux Wan] [--write]

Each is a small one of its class with random weights, in float64, and gets one line: the names of its inputs' dims. On
gloo ranks its output, the gradient of every input and of every parameter are compared with one process. Bytes are those
of the plan, forward, but for the gather of the output, over what Ulysses would send: queries, keys, values and outputs
of every self-attention, each switched; beside them those counted of `enable_parallelism`, where there is a `_cp_plan`.
Errors are relative to the largest value, of gradients to the largest of all.

With `--write` a row takes its place in the page as soon as it is there. A hash of dsp and of this script stands in it,
unseen: `--stale` makes the rows that another version made, and those that are missing.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import inspect
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

import dsp
from benchmarks.methods.contenders import Circumstance, by_diffusers
from dsp.slices import cast

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE, GUIDE = DOCS / "diffusers-measured.md", DOCS / "diffusers.md"
MARK = "<!-- table: models -->\n"


class Case(NamedTuple):
    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Any]]
    line: str  # of stages: the root pattern


class Decoder(nn.Module):
    """An autoencoder's decode as a forward."""

    def __init__(self, vae: nn.Module) -> None:
        super().__init__()
        self.vae = vae

    def forward(self, z: Tensor) -> Tensor:
        return self.vae.decode(z, return_dict=False)[0]


class Latents(Decoder):
    """The encode of one that has no distribution."""

    def forward(self, z: Tensor) -> Tensor:
        return self.vae.encode(z, return_dict=False)[0]


class FramesDecoder(Decoder):
    """A decoder that takes all frames as a batch."""

    def forward(self, z: Tensor) -> Tensor:
        return self.vae.decode(z, num_frames=z.shape[0], return_dict=False)[0]


class Encoder(Decoder):
    def forward(self, z: Tensor) -> Tensor:
        return self.vae.encode(z, return_dict=False)[0].parameters


def _made(name: str, **config: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import diffusers

        return getattr(diffusers, name)(**config)

    return build


def _video(c: int, t: int, side: int, text: int = 12, e: int = 16, **more: Any) -> Callable[[], dict[str, Any]]:
    def inputs() -> dict[str, Any]:
        found = {"hidden_states": torch.randn(1, c, t, side, side), "encoder_hidden_states": torch.randn(1, text, e)}
        return found | {"timestep": torch.tensor([3])} | {k: make() for k, make in more.items()}

    return inputs


def _noise(*shape: int, text: int = 5, **more: Any) -> Callable[[], dict[str, Any]]:
    def inputs() -> dict[str, Any]:
        found = {"sample": torch.randn(*shape), "encoder_hidden_states": torch.randn(1, text, 16), "timestep": 3}
        return found | {k: make() for k, make in more.items()}

    return inputs


def _latents(*shape: int) -> Callable[[], dict[str, Any]]:
    return lambda: {"z": torch.randn(*shape)}


def _frames_first(make: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    def inputs() -> dict[str, Any]:
        found = make()
        return found | {"hidden_states": found["hidden_states"].transpose(1, 2).contiguous()}

    return inputs


def _mask(text: int, dtype: torch.dtype = torch.bool) -> Callable[[], Tensor]:
    return lambda: torch.ones(1, text, dtype=dtype)


VIDEO = "hidden_states=b c t h w, encoder_hidden_states=b n e"
HUNYUAN = {
    "in_channels": 4, "out_channels": 4, "num_attention_heads": 12, "attention_head_dim": 8, "num_layers": 1,
    "num_single_layers": 1, "num_refiner_layers": 1, "patch_size": 2, "patch_size_t": 1, "text_embed_dim": 16,
    "pooled_projection_dim": 8, "rope_axes_dim": (2, 4, 2),
}  # fmt: skip
SAMPLE = "sample=b c t h w, encoder_hidden_states=b n e"
COGVIDEOX = _made("AutoencoderKLCogVideoX", block_out_channels=(8, 8, 8, 8), latent_channels=4, layers_per_block=1,
                  down_block_types=("CogVideoXDownBlock3D",) * 4, up_block_types=("CogVideoXUpBlock3D",) * 4,
                  norm_num_groups=2)  # fmt: skip
WAN = _made("AutoencoderKLWan", base_dim=4, z_dim=4, num_res_blocks=1)
LTX = _made("AutoencoderKLLTXVideo", latent_channels=8, block_out_channels=(8, 8, 8, 8),
            decoder_block_out_channels=(8, 8, 8, 8), layers_per_block=(1,) * 5, decoder_layers_per_block=(1,) * 5,
            spatio_temporal_scaling=(True, True, False, False), patch_size=1,
            decoder_spatio_temporal_scaling=(True, True, False, False), decoder_inject_noise=(False,) * 5,
            upsample_residual=(False,) * 4, upsample_factor=(1,) * 4)  # fmt: skip
MOCHI = _made("AutoencoderKLMochi", in_channels=15, latent_channels=4, encoder_block_out_channels=(32,) * 4,
              decoder_block_out_channels=(32,) * 4, layers_per_block=(1,) * 5)  # fmt: skip
TEMPORAL = _made("AutoencoderKLTemporalDecoder", block_out_channels=(32, 32), latent_channels=4,
                 down_block_types=("DownEncoderBlock2D",) * 2)  # fmt: skip
CASES = {
    "WanTransformer3DModel": Case(
        _made("WanTransformer3DModel", patch_size=(1, 2, 2), num_attention_heads=12, attention_head_dim=12,
              in_channels=4, out_channels=4, text_dim=16, freq_dim=32, ffn_dim=32, num_layers=2, rope_max_seq_len=32),
        _video(4, 12, 12), VIDEO,
    ),
    "CogVideoXTransformer3DModel": Case(
        _made("CogVideoXTransformer3DModel", num_attention_heads=12, attention_head_dim=16, in_channels=4,
              out_channels=4, time_embed_dim=8, text_embed_dim=16, num_layers=2, sample_width=12, sample_height=12,
              sample_frames=45, patch_size=2, max_text_seq_length=12),
        _frames_first(_video(4, 12, 12)), "hidden_states=b t c h w, encoder_hidden_states=b n e",
    ),
    "HunyuanVideoTransformer3DModel": Case(
        _made("HunyuanVideoTransformer3DModel", **HUNYUAN),
        _video(4, 12, 12, encoder_attention_mask=_mask(12, torch.float32), pooled_projections=lambda: torch.randn(1, 8),
               guidance=lambda: torch.tensor([4.0])), VIDEO,
    ),
    "MochiTransformer3DModel": Case(
        _made("MochiTransformer3DModel", patch_size=2, num_attention_heads=12, attention_head_dim=8, num_layers=2,
              pooled_projection_dim=16, in_channels=4, text_embed_dim=16, time_embed_dim=8, max_sequence_length=12),
        _video(4, 12, 12, encoder_attention_mask=_mask(12)), VIDEO,
    ),
    "LTXVideoTransformer3DModel": Case(
        _made("LTXVideoTransformer3DModel", in_channels=4, out_channels=4, num_attention_heads=12, attention_head_dim=8,
              cross_attention_dim=96, num_layers=2, caption_channels=16),
        lambda: {"hidden_states": torch.randn(1, 432, 4), "encoder_hidden_states": torch.randn(1, 12, 16),
                 "timestep": torch.tensor([3]), "encoder_attention_mask": torch.ones(1, 12).bool(), "num_frames": 12,
                 "height": 6, "width": 6}, "hidden_states=b s c, encoder_hidden_states=b n e",
    ),
    "FluxTransformer2DModel": Case(
        _made("FluxTransformer2DModel", patch_size=1, in_channels=4, num_layers=1, num_single_layers=1,
              attention_head_dim=16, num_attention_heads=12, joint_attention_dim=32, pooled_projection_dim=32,
              axes_dims_rope=[4, 4, 8]),
        lambda: {"hidden_states": torch.randn(1, 192, 4), "encoder_hidden_states": torch.randn(1, 12, 32),
                 "pooled_projections": torch.randn(1, 32), "timestep": torch.tensor([1.0]),
                 "img_ids": torch.randn(192, 3), "txt_ids": torch.randn(12, 3)},
        "hidden_states=b s c, encoder_hidden_states=b n e",
    ),
    "AutoencoderKLHunyuanVideo, decoder": Case(
        lambda: Decoder(_made("AutoencoderKLHunyuanVideo", latent_channels=4, block_out_channels=(8, 8, 8, 8),
                              layers_per_block=1, norm_num_groups=4)()),
        _latents(1, 4, 3, 6, 10), "z=b c t h w",
    ),
    "AutoencoderKLHunyuanVideo, encoder": Case(
        lambda: Encoder(_made("AutoencoderKLHunyuanVideo", latent_channels=4, block_out_channels=(8, 8, 8, 8),
                              layers_per_block=1, norm_num_groups=4)()),
        _latents(1, 3, 5, 48, 64), "z=b c t h w",
    ),
    "AutoencoderKLCogVideoX, decoder": Case(
        lambda: Decoder(COGVIDEOX()),
        _latents(1, 4, 2, 6, 10), "z=b c t h w",
    ),
    "AutoencoderKLCogVideoX, encoder": Case(lambda: Encoder(COGVIDEOX()), _latents(1, 3, 5, 24, 40), "z=b c t h w"),
    "AutoencoderKLWan, decoder": Case(lambda: Decoder(WAN()), _latents(1, 4, 3, 6, 10), "z=b c t h w"),
    "AutoencoderKLWan, encoder": Case(lambda: Encoder(WAN()), _latents(1, 3, 9, 48, 56), "z=b c t h w"),
    "AutoencoderKLLTXVideo, decoder": Case(lambda: Decoder(LTX()), _latents(1, 8, 2, 6, 10), "z=b c t h w"),
    "AutoencoderKLLTXVideo, encoder": Case(lambda: Encoder(LTX()), _latents(1, 3, 9, 24, 40), "z=b c t h w"),
    "AutoencoderKLMochi, decoder": Case(lambda: Decoder(MOCHI()), _latents(1, 4, 2, 4, 6), "z=b c t h w"),
    "AutoencoderKLMochi, encoder": Case(lambda: Encoder(MOCHI()), _latents(1, 3, 7, 32, 48), "z=b c t h w"),
    "AutoencoderKLTemporalDecoder, encoder": Case(
        lambda: Encoder(TEMPORAL()), _latents(2, 3, 24, 32), "z=b c h w",
    ),
    "AutoencoderKLTemporalDecoder, decoder": Case(
        lambda: FramesDecoder(TEMPORAL()), _latents(3, 4, 8, 12), "z=b c h w",
    ),
    "UNetMotionModel": Case(
        _made("UNetMotionModel", block_out_channels=(16, 32), norm_num_groups=16, layers_per_block=1, in_channels=4,
              out_channels=4, down_block_types=("CrossAttnDownBlockMotion", "DownBlockMotion"), sample_size=16,
              up_block_types=("UpBlockMotion", "CrossAttnUpBlockMotion"), cross_attention_dim=16,
              num_attention_heads=2),
        _noise(1, 4, 12, 16, 12, encoder_hidden_states=lambda: torch.randn(12, 5, 16)),
        "sample=b c t h w, encoder_hidden_states=(b t) n e",
    ),
    "UNet3DConditionModel": Case(
        _made("UNet3DConditionModel", block_out_channels=(8, 16), norm_num_groups=4, layers_per_block=1, in_channels=4,
              out_channels=4, down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"), sample_size=16,
              up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"), cross_attention_dim=16, attention_head_dim=4),
        _noise(1, 4, 6, 16, 12), SAMPLE,
    ),
    "UNetSpatioTemporalConditionModel": Case(
        _made("UNetSpatioTemporalConditionModel", block_out_channels=(32, 64), layers_per_block=1, in_channels=4,
              out_channels=4, down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
              up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"), cross_attention_dim=16,
              num_attention_heads=(2, 4), projection_class_embeddings_input_dim=24, addition_time_embed_dim=8,
              sample_size=16),
        _noise(1, 6, 4, 16, 12, text=1, added_time_ids=lambda: torch.tensor([[6.0, 127.0, 0.02]])),
        "sample=b t c h w, encoder_hidden_states=b n e",
    ),
}  # fmt: skip


def _hidden(*shape: int, e: int = 16, **more: Any) -> Callable[[], dict[str, Any]]:
    def inputs() -> dict[str, Any]:
        found = {"hidden_states": torch.randn(1, *shape), "encoder_hidden_states": torch.randn(1, 12, e)}
        return found | {"timestep": torch.tensor([1.0])} | {k: make() for k, make in more.items()}

    return inputs


IMAGE = "hidden_states=b c h w, encoder_hidden_states=b n e"
TOKENS = "hidden_states=b s c, encoder_hidden_states=b n e"
KL = _made("AutoencoderKL", block_out_channels=(8,) * 3, down_block_types=("DownEncoderBlock2D",) * 3,
           up_block_types=("UpDecoderBlock2D",) * 3, norm_num_groups=4, latent_channels=4)  # fmt: skip
DC = _made("AutoencoderDC", latent_channels=4, attention_head_dim=4, encoder_block_out_channels=(8, 16),
           encoder_block_types=("ResBlock", "EfficientViTBlock"), encoder_layers_per_block=(1, 1),
           decoder_block_types=("ResBlock", "EfficientViTBlock"), decoder_layers_per_block=(1, 1),
           decoder_block_out_channels=(8, 16), encoder_qkv_multiscales=((), (5,)),
           decoder_qkv_multiscales=((), (5,)))  # fmt: skip
MAGVIT = _made("AutoencoderKLMagvit", latent_channels=4, block_out_channels=[8] * 4, layers_per_block=1,
               norm_num_groups=4)  # fmt: skip
HUNYUAN15 = _made("AutoencoderKLHunyuanVideo15", latent_channels=4, block_out_channels=(8,) * 5, layers_per_block=1)
MORE = {  # known, too (`dsp/known.json`): held to one process by the tests, and not in the page's table
    "Flux2Transformer2DModel": Case(
        _made("Flux2Transformer2DModel", in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
              num_attention_heads=12, joint_attention_dim=32, timestep_guidance_channels=16,
              axes_dims_rope=(4, 4, 4, 4)),
        _hidden(192, 4, e=32, img_ids=lambda: torch.randn(1, 192, 4), txt_ids=lambda: torch.randn(1, 12, 4),
                guidance=lambda: torch.tensor([4.0])), TOKENS,
    ),
    "ChromaTransformer2DModel": Case(
        _made("ChromaTransformer2DModel", in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
              num_attention_heads=12, joint_attention_dim=32, axes_dims_rope=(4, 4, 8), approximator_num_channels=8,
              approximator_hidden_dim=16, approximator_layers=1),
        _hidden(192, 4, e=32, img_ids=lambda: torch.randn(192, 3), txt_ids=lambda: torch.randn(12, 3)), TOKENS,
    ),
    "QwenImageTransformer2DModel": Case(
        _made("QwenImageTransformer2DModel", in_channels=16, out_channels=4, num_layers=2, attention_head_dim=8,
              num_attention_heads=12, joint_attention_dim=16, axes_dims_rope=(4, 2, 2)),
        _hidden(144, 16, encoder_hidden_states_mask=_mask(12), img_shapes=lambda: [[(1, 12, 12)]]), TOKENS,
    ),
    "LTX2VideoTransformer3DModel": Case(
        _made("LTX2VideoTransformer3DModel", in_channels=4, out_channels=4, num_attention_heads=12,
              attention_head_dim=8, cross_attention_dim=96, audio_in_channels=4, audio_out_channels=4,
              audio_num_attention_heads=12, audio_attention_head_dim=4, audio_cross_attention_dim=48, num_layers=2,
              caption_channels=16),
        _hidden(432, 4, audio_hidden_states=lambda: torch.randn(1, 24, 4), sigma=lambda: torch.tensor([0.5]),
                audio_encoder_hidden_states=lambda: torch.randn(1, 12, 16), num_frames=lambda: 12, height=lambda: 6,
                width=lambda: 6, fps=lambda: 24.0, audio_num_frames=lambda: 24, encoder_attention_mask=_mask(12),
                audio_encoder_attention_mask=_mask(12)),
        TOKENS + ", audio_hidden_states=b a c, audio_encoder_hidden_states=b n e",
    ),
    "HunyuanVideo15Transformer3DModel": Case(
        _made("HunyuanVideo15Transformer3DModel", in_channels=4, out_channels=4, num_attention_heads=12,
              attention_head_dim=8, num_layers=2, num_refiner_layers=1, text_embed_dim=16, text_embed_2_dim=8,
              image_embed_dim=8, rope_axes_dim=(2, 2, 4)),
        _video(4, 8, 10, encoder_attention_mask=_mask(12), encoder_hidden_states_2=lambda: torch.randn(1, 5, 8),
               encoder_attention_mask_2=_mask(5), image_embeds=lambda: torch.randn(1, 7, 8),
               timestep=lambda: torch.tensor([3.0])), VIDEO,
    ),
    "SkyReelsV2Transformer3DModel": Case(
        _made("SkyReelsV2Transformer3DModel", patch_size=(1, 2, 2), num_attention_heads=12, attention_head_dim=12,
              in_channels=4, out_channels=4, text_dim=16, freq_dim=32, ffn_dim=32, num_layers=2, rope_max_seq_len=32),
        _video(4, 12, 12), VIDEO,
    ),
    "SanaVideoTransformer3DModel": Case(
        _made("SanaVideoTransformer3DModel", in_channels=4, out_channels=4, num_attention_heads=12,
              attention_head_dim=12, num_layers=2, num_cross_attention_heads=12, cross_attention_head_dim=12,
              cross_attention_dim=144, caption_channels=16, sample_size=12, rope_max_seq_len=32),
        _video(4, 12, 12), VIDEO,
    ),
    "AllegroTransformer3DModel": Case(
        _made("AllegroTransformer3DModel", num_attention_heads=12, attention_head_dim=24, in_channels=4,
              out_channels=4, num_layers=2, cross_attention_dim=288, sample_height=12, sample_width=12,
              sample_frames=12, caption_channels=16),
        _video(4, 12, 12), VIDEO,
    ),
    "SanaTransformer2DModel": Case(
        _made("SanaTransformer2DModel", in_channels=4, out_channels=4, num_attention_heads=12, attention_head_dim=8,
              num_layers=2, num_cross_attention_heads=12, cross_attention_head_dim=8, cross_attention_dim=96,
              caption_channels=16, sample_size=24),
        _hidden(4, 24, 24), IMAGE,
    ),
    "Lumina2Transformer2DModel": Case(
        _made("Lumina2Transformer2DModel", sample_size=32, in_channels=4, hidden_size=96, num_layers=2,
              num_refiner_layers=1, num_attention_heads=12, num_kv_heads=6, multiple_of=8, axes_dim_rope=(4, 2, 2),
              axes_lens=(64, 64, 64), cap_feat_dim=16),
        _hidden(4, 24, 24, encoder_attention_mask=_mask(12)), IMAGE,
    ),
    "SD3Transformer2DModel": Case(
        _made("SD3Transformer2DModel", sample_size=24, patch_size=2, in_channels=4, num_layers=2,
              attention_head_dim=8, num_attention_heads=12, joint_attention_dim=16, caption_projection_dim=96,
              pooled_projection_dim=8, out_channels=4, pos_embed_max_size=24),
        _hidden(4, 24, 24, pooled_projections=lambda: torch.randn(1, 8)), IMAGE,
    ),
    "PixArtTransformer2DModel": Case(
        _made("PixArtTransformer2DModel", num_attention_heads=12, attention_head_dim=8, in_channels=4, out_channels=8,
              num_layers=2, cross_attention_dim=96, sample_size=24, caption_channels=16,
              use_additional_conditions=False),
        _hidden(4, 24, 24), IMAGE,
    ),
    "UNet2DConditionModel": Case(
        _made("UNet2DConditionModel", block_out_channels=(16, 32), cross_attention_dim=16, norm_num_groups=8,
              down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), attention_head_dim=4, layers_per_block=1,
              up_block_types=("UpBlock2D", "CrossAttnUpBlock2D")),
        _noise(1, 4, 24, 16), "sample=b c h w, encoder_hidden_states=b n e",
    ),
    "AutoencoderKL, decoder": Case(lambda: Decoder(KL()), _latents(1, 4, 12, 10), "z=b c h w"),
    "AutoencoderKL, encoder": Case(lambda: Encoder(KL()), _latents(1, 3, 48, 40), "z=b c h w"),
    "AutoencoderDC, decoder": Case(lambda: Decoder(DC()), _latents(1, 4, 12, 10), "z=b c h w"),
    "AutoencoderDC, encoder": Case(lambda: Latents(DC()), _latents(1, 3, 24, 40), "z=b c h w"),
    "AutoencoderKLMagvit, decoder": Case(lambda: Decoder(MAGVIT()), _latents(1, 4, 2, 4, 6), "z=b c t h w"),
    "AutoencoderKLMagvit, encoder": Case(lambda: Encoder(MAGVIT()), _latents(1, 3, 5, 32, 48), "z=b c t h w"),
    "AutoencoderKLHunyuanVideo15, decoder": Case(
        lambda: Decoder(HUNYUAN15()), _latents(1, 4, 2, 6, 8), "z=b c t h w"
    ),
    "AutoencoderKLHunyuanVideo15, encoder": Case(
        lambda: Encoder(HUNYUAN15()), _latents(1, 3, 5, 32, 48), "z=b c t h w"
    ),
}  # fmt: skip


def made(case: Case) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    model = cast(case.build(), torch.float64).eval()  # some drop out by themselves
    for p in model.parameters():
        if not p.abs().max():
            nn.init.normal_(p, std=0.1)
    options = {"return_dict": False} if "return_dict" in inspect.signature(model.forward).parameters else {}
    return model, cast(case.inputs(), torch.float64) | options


def step(model: nn.Module, kwargs: Mapping[str, Any], line: str) -> tuple[Tensor, dict[str, Tensor], int]:
    """The output, the gradients of what `line` names, and what this rank sent forward."""
    leaves = {k: v.clone().requires_grad_(v.is_floating_point()) for k, v in kwargs.items() if f"{k}=" in line}
    with dsp.count_comm() as comm:
        out = next(t for t in pytree.tree_leaves(model(**{**kwargs, **leaves})) if isinstance(t, Tensor))
    out = dsp.gather(out) if isinstance(out, DTensor) else out
    (out * torch.linspace(0.5, 2, out.numel(), dtype=out.dtype).view(out.shape)).sum().backward()
    sent = sum(comm.forward.bytes.values())
    return out.detach(), {k: v.grad for k, v in leaves.items() if v.grad is not None}, sent


class Attentions(TorchFunctionMode):
    """Bytes of queries, keys, values and outputs of every self-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is F.scaled_dot_product_attention:
            q, k, v = (args + tuple((kwargs or {}).get(name) for name in ("query", "key", "value")[len(args) :]))[:3]
            if q.shape[-2] == k.shape[-2]:
                self.bytes += sum(t.numel() * t.element_size() for t in (q, k, v, out))
        return out


def held(mesh: DeviceMesh, case: Case) -> dict[str, float]:
    """One step on the ranks of a mesh beside one on this process alone: errors, bytes, the share, FLOPs that run whole.

    What a rank sends is counted: it is what the plan of the run says, or this raises RuntimeError.
    """
    line, n = case.line, mesh.size()
    single, kwargs = made(case)
    model = copy.deepcopy(single)
    with Attentions() as attentions:
        expected, inputs, _ = step(single, kwargs, line)
    dsp.parallelize(model, mesh, {"": line}, gather_output=False)
    kinds: Any = model.forward.__self__.entries  # type: ignore[union-attr]
    out, own, sent = step(model, kwargs, line)
    if any(kind.plan is None or kind.plan.script.recorded for kind in kinds.values()):  # it reads its data
        model.zero_grad()
        out, own, sent = step(model, kwargs, line)
    [plan] = [kind.plan for kind in kinds.values()]
    promised = sum(s.sent(n)[mesh.get_local_rank()] for s in plan.sendings if s.phase == "forward")
    if sent != promised:
        raise RuntimeError(f"{type(model).__name__} sent {sent} bytes where its plan says {promised}")
    group = mesh.get_group()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    for g in grads:
        dist.all_reduce(torch.view_as_real(g) if g.is_complex() else g, group=group)
    whole = [torch.zeros_like(p) if p.grad is None else p.grad for p in single.parameters()]
    largest = max(float(g.abs().max()) for g in whole)
    return {
        "share": plan.share,
        "planned": plan.bytes["forward"],
        "whole": plan.flops_whole / max(plan.flops_alone, 1),
        "output": float((out - expected).abs().max() / expected.abs().max()),
        "inputs": max((float((own[k] - g).abs().max() / g.abs().max()) for k, g in inputs.items()), default=0.0),
        "parameters": max(float((g / n - w).abs().max()) for g, w in zip(grads, whole)) / largest,
        "ulysses": attentions.bytes * (n - 1) / n**2,
    }


def theirs(mesh: DeviceMesh, case: Case) -> float | None:
    """Bytes that the busiest rank sends forward by the class's own plan, but for the gather of the output.

    Without a mask of the text, which LTX's processors give all heads, and Ulysses a part of them.
    """
    model, kwargs = made(case)
    kwargs.pop("return_dict", None)
    if not getattr(model, "_cp_plan", None):
        return None
    model = by_diffusers(model, mesh, Circumstance(), {}).model
    with dsp.count_comm() as comm, torch.no_grad():
        model(kwargs | {"encoder_attention_mask": None} if "encoder_attention_mask" in kwargs else kwargs)
    sent = torch.tensor(comm.forward.bytes["switch"])
    dist.all_reduce(sent, dist.ReduceOp.MAX, group=mesh.get_group())
    return float(sent)


def row(name: str, n: int, found: Mapping[str, Any]) -> str:
    def ratio(nbytes: float | None) -> str:
        return "-" if nbytes is None or "Transformer" not in name else f"{nbytes / found['ulysses']:.2f}"

    errors = f"{found['output']:.0e} | {max(found['inputs'], found['parameters']):.0e}"
    sends = f"{ratio(found['planned'])} | {ratio(found['theirs'])}"
    return f"| {name} | `{CASES[name].line}` | {n} | {errors} | {found['share']:.3f} | {sends} <!-- {version()} --> |"


HEAD = "| model | the one line | N | output | gradients | largest share | bytes / Ulysses | `_cp_plan` / Ulysses |"


def version() -> str:
    """A digest of what makes a row: this script and dsp."""
    files = sorted(Path(dsp.__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in (Path(__file__), *files))).hexdigest()[:8]


def rows() -> dict[tuple[str, int], str]:
    """The rows of the page, by model and number of ranks."""
    table = PAGE.read_text().partition(MARK)[2].partition("<!-- end -->")[0]
    lines = re.findall(r"^(\| (.+?) \| .+? \| (\d) \| .*)$", table, re.M)
    return {(model, int(size)): line for line, model, size in lines if model in CASES}


def write(name: str, n: int, made: str) -> None:
    """Put a row into the page, in its place."""
    have = rows() | {(name, n): made}
    order = sorted(have, key=lambda key: (list(CASES).index(key[0]), key[1]))
    before, _, rest = PAGE.read_text().partition(MARK)
    table = "\n".join([HEAD, "|---" * 8 + "|", *(have[key] for key in order)])
    PAGE.write_text(f"{before}{MARK}{table}\n<!-- end -->{rest.split('<!-- end -->', 1)[1]}")
    GUIDE.write_text(guide(GUIDE.read_text()))


def guide(text: str) -> str:
    """The guide with its table of classes: of all rows of a class the largest errors, and the share on most ranks."""
    lines = ["| class | line | outputs | gradients | share on 2, 3, 4 ranks |", "|---" * 5 + "|"]
    have = rows()
    for name, case in CASES.items():
        own = [have[key].split(" | ")[3:6] for key in have if key[0] == name]
        outputs, gradients, shares = zip(*own)
        errors = f"{max(map(float, outputs)):.0e} | {max(map(float, gradients)):.0e}"
        held = ", ".join(f"{float(share):.2f}" for share in shares)
        lines.append(f"| {name} | `{case.line}` | {errors} | {held} |")
    before, _, rest = text.partition("<!-- table: classes -->\n")
    return "\n".join([f"{before}<!-- table: classes -->", *lines, f"<!-- end -->{rest.split('<!-- end -->', 1)[1]}"])


def _rank(rank: int, n: int, store: str, names: list[str], keep: bool) -> None:
    warnings.simplefilter("ignore")  # of autocast to fp32 on CPU, by the models
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=n)
    mesh = init_device_mesh("cpu", (n,), mesh_dim_names=("sp",))
    for name in names:
        found = held(mesh, CASES[name]) | {"theirs": theirs(mesh, CASES[name])}
        if rank == 0:
            print(made := row(name, n, found), flush=True)
            if keep:
                write(name, n, made)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--only", nargs="+", default=[""], help="parts of the names of models")
    parser.add_argument("--write", action="store_true", help="to the page")
    parser.add_argument("--stale", action="store_true", help="but for the rows that this version made")
    args = parser.parse_args()
    every = [name for name in CASES if any(part in name for part in args.only)]
    fresh = {key for key, line in rows().items() if version() in line} if args.stale else set()
    for n in args.ranks:
        names = [name for name in every if (name, n) not in fresh]
        with tempfile.TemporaryDirectory() as at:
            torch.multiprocessing.start_processes(
                _rank, (n, f"{at}/store", names, args.write), nprocs=n, start_method="fork"
            )


if __name__ == "__main__":
    main()
