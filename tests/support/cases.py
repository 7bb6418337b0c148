"""The models of the zoo at tiny sizes, and inputs for them: one registry for all tests that go over models."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

import zoo

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "transformer2d": ("transformer2d", {}),
    "transformer2d-class": ("transformer2d", {"num_classes": 10}),
    "transformer2d-stdit": ("transformer2d", {"block": "stdit", "caption_channels": 8}),
    "latte": ("latte", {"conditioning": "none"}),
    "latte-class": ("latte", {"conditioning": "class", "num_classes": 5}),
    "latte-text": ("latte", {"conditioning": "text", "caption_channels": 8}),
    "stdit-v1": ("stdit", {"version": "v1"}),
    "stdit-v2": ("stdit", {"version": "v2"}),
    "stdit-v3": ("stdit", {"version": "v3", "kv_heads": 2}),
    "st_mamba": ("st_mamba", {"num_classes": 5}),
    "st_mamba-sst": ("st_mamba", {"order": "sst", "bidirectional": False}),
    "st_mamba-2": ("st_mamba", {"mixer": "mamba2"}),
    "st_mamba-2-sst": ("st_mamba", {"mixer": "mamba2", "order": "sst", "learn_sigma": True}),
    "st_rwkv": ("st_rwkv", {}),
    "st_rwkv-sst": ("st_rwkv", {"order": "sst", "num_classes": 5}),
    "latte-2-class": ("latte", {"variant": 2, "conditioning": "class", "num_classes": 5}),
    "latte-2-text": ("latte", {"variant": 2, "conditioning": "text", "caption_channels": 8}),
    "latte-3-class": ("latte", {"variant": 3, "depth": 2, "conditioning": "class", "num_classes": 5}),
    "latte-3-text": ("latte", {"variant": 3, "depth": 2, "conditioning": "text", "caption_channels": 8}),
    "latte-4-class": ("latte", {"variant": 4, "depth": 2, "conditioning": "class", "num_classes": 5}),
    "latte-4-text": ("latte", {"variant": 4, "depth": 2, "conditioning": "text", "caption_channels": 8}),
    "axial-video": ("axial_video", {"num_classes": 5}),
    "axial-video-summed": ("axial_video", {"order": "summed"}),
    "axial-image": ("axial_image", {}),
    "axial-image-colour": ("axial_image", {"channels": 3, "num_classes": 5}),
    "wan": ("wan", {}),
    "wan-image": ("wan", {"in_channels": 9, "condition_channels": 5, "image_channels": 6}),
    "hunyuan": ("hunyuan", {}),
    "hunyuan-alone": ("hunyuan", {"pooled_channels": 0, "guidance": False}),
    "wan-frame-times": ("wan", {"frame_times": True}),
}


PROTEINS: dict[str, tuple[str, dict[str, Any]]] = {  # beside one process in test_evoformer_parallel.py
    "evoformer": ("evoformer", {}),
    "evoformer-opm-first": ("evoformer", {"opm_first": True, "extra_depth": 0, "couplings": 2}),
    "pairformer": ("pairformer", {}),
    "evoformer-structure": ("evoformer", {"structure": 2, "structure_heads": 2, "extra_depth": 0}),
    "pairformer-structure": ("pairformer", {"structure": 2, "structure_heads": 2}),
    "pairformer-templates": ("pairformer", {"templates": 1}),
}


def example(model: nn.Module, batch: int, **lengths: int) -> dict[str, Tensor]:
    """Inputs of those lengths that the model knows."""
    known = inspect.signature(model.example_inputs).parameters
    return model.example_inputs(batch, **{name: length for name, length in lengths.items() if name in known})


def build(case: str, **more: Any) -> nn.Module:
    name, overrides = (CASES | PROTEINS)[case]
    torch.manual_seed(0)
    model = zoo.create(name, "test", **overrides, **more).double()
    for p in model.parameters():  # zero-initialised gates would hide everything
        nn.init.normal_(p, std=0.1)
    return model


def doubled(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {k: torch.randn_like(v.double()) if v.is_floating_point() and v.ndim > 1 else v for k, v in inputs.items()}
