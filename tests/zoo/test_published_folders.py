"""The table of published folders in docs/finetune.md: each config.json, as its publisher has it, is of that size."""

import re
from dataclasses import asdict
from typing import Any

import pytest
import yaml

from tests.support.paths import ROOT
from zoo import registry

WAN: dict[str, Any] = {
    "_class_name": "WanTransformer3DModel", "added_kv_proj_dim": None, "attention_head_dim": 128,
    "cross_attn_norm": True, "eps": 1e-06, "ffn_dim": 13824, "freq_dim": 256, "image_dim": None, "in_channels": 16,
    "num_attention_heads": 40, "num_layers": 40, "out_channels": 16, "patch_size": [1, 2, 2],
    "qk_norm": "rms_norm_across_heads", "rope_max_seq_len": 1024, "text_dim": 4096,
}  # fmt: skip
HUNYUAN: dict[str, Any] = {
    "_class_name": "HunyuanVideoTransformer3DModel", "attention_head_dim": 128, "guidance_embeds": True,
    "in_channels": 16, "mlp_ratio": 4.0, "num_attention_heads": 24, "num_layers": 20, "num_refiner_layers": 2,
    "num_single_layers": 40, "out_channels": 16, "patch_size": 2, "patch_size_t": 1, "pooled_projection_dim": 768,
    "qk_norm": "rms_norm", "rope_axes_dim": [16, 56, 56], "rope_theta": 256.0, "text_embed_dim": 4096,
}  # fmt: skip
LATTE: dict[str, Any] = {
    "_class_name": "LatteTransformer3DModel", "activation_fn": "gelu-approximate", "attention_bias": True,
    "attention_head_dim": 72, "caption_channels": 4096, "cross_attention_dim": 1152, "dropout": 0.0, "in_channels": 4,
    "norm_elementwise_affine": False, "norm_eps": 1e-06, "norm_type": "ada_norm_single", "num_attention_heads": 16,
    "num_embeds_ada_norm": 1000, "num_layers": 28, "out_channels": 8, "patch_size": 2, "sample_size": 64,
    "video_length": 16,
}  # fmt: skip
STDIT: dict[str, Any] = {
    "caption_channels": 4096, "class_dropout_prob": 0.1, "depth": 28, "drop_path": 0.0, "hidden_size": 1152,
    "in_channels": 4, "input_size": [None, None, None], "input_sq_size": 512, "mlp_ratio": 4.0,
    "model_max_length": 300, "model_type": "STDiT3", "num_heads": 16, "patch_size": [1, 2, 2], "pred_sigma": True,
    "qk_norm": True, "skip_y_embedder": False,
}  # fmt: skip
IMAGE = {"in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120}
FOLDERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # transformer/config.json, model_index.json
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": (WAN | {"ffn_dim": 8960, "num_attention_heads": 12, "num_layers": 30}, {}),
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": (WAN, {}),
    "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers": (WAN | IMAGE, {}),
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": (WAN | {"pos_embed_seq_len": None}, {"boundary_ratio": 0.875}),
    "Wan-AI/Wan2.2-I2V-A14B-Diffusers": (WAN | {"in_channels": 36, "pos_embed_seq_len": None}, {"boundary_ratio": 0.9}),
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": (
        WAN | {"ffn_dim": 14336, "num_attention_heads": 24, "num_layers": 30, "in_channels": 48, "out_channels": 48},
        {"expand_timesteps": True},
    ),
    "hunyuanvideo-community/HunyuanVideo": (HUNYUAN, {}),
    "hunyuanvideo-community/HunyuanVideo-I2V-33ch": (
        HUNYUAN | {"in_channels": 33, "guidance_embeds": False, "image_condition_type": "latent_concat"},
        {},
    ),
    "maxin-cn/Latte-1": (LATTE, {}),
    "hpcai-tech/OpenSora-STDiT-v3": (STDIT, {}),
    "hpcai-tech/OpenSora-STDiT-v2-stage3": (STDIT | {"model_type": "STDiT2", "model_max_length": 200}, {}),
}
ROWS = dict(
    re.findall(r"^\| `([\w./-]+)`[^|]*\| `(\{.*?\})` \|", (ROOT / "docs/finetune.md").read_text(), re.MULTILINE)
)


def test_the_page_names_each_folder() -> None:
    assert ROWS.keys() == FOLDERS.keys()


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_published_config_is_of_the_size_that_the_page_names(folder: str) -> None:
    model, (config, index) = yaml.safe_load(ROWS[folder]), FOLDERS[folder]
    settings = registry.published_settings(model["name"], config, index)
    module, _ = registry._module(model["name"])
    sized = asdict(module.Config(**{**module.SIZES[model["size"]], **model.get("overrides", {})}))
    assert settings.keys() <= sized.keys()
    assert len(settings) > 5
    assert settings == {key: sized[key] for key in settings}
