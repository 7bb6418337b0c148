"""Deep models of diffusers at tiny sizes: configurations and inputs."""

from __future__ import annotations

import torch

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
