"""Unmodified models of others, with their masks, each by one line: text encoders, Allegro, and forwards that read data.

These look at their masks (`if mask.all():`), so their first call is recorded and the next ones follow the record.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import dsp
from tests.support.parity import assert_step_equal
from tests.support.slow import slow

TEXT = {"": "input_ids=b l, attention_mask=b l"}
SMALL: dict[str, Any] = {"vocab_size": 30, "num_hidden_layers": 2, "num_attention_heads": 3}
SMALL |= {"hidden_size": 12, "intermediate_size": 20, "max_position_embeddings": 32}
Made = tuple[nn.Module, dict[str, Any], dict[str, str]]


def text(hidden: slice = slice(7, None)) -> dict[str, Tensor]:
    """Two texts of 11 words, of the second some hidden; the last word is CLIP's end of the text."""
    words, mask = torch.randint(0, 28, (2, 11)), torch.ones(2, 11, dtype=torch.long)
    words[:, -1], mask[1, hidden] = 29, 0
    return {"input_ids": words, "attention_mask": mask}


def bert() -> Made:
    config = transformers.BertConfig(**SMALL, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return transformers.BertModel(config, add_pooling_layer=False), text(), TEXT


def t5() -> Made:
    config = transformers.T5Config(
        vocab_size=30, d_model=12, d_kv=4, d_ff=20, num_layers=2, num_heads=3, dropout_rate=0.0
    )
    return transformers.T5EncoderModel(config), text(), TEXT


def llama() -> Made:
    model = transformers.LlamaModel(transformers.LlamaConfig(**SMALL, num_key_value_heads=3))
    return model, text(slice(4)) | {"use_cache": False}, TEXT


def clip() -> Made:
    return transformers.CLIPTextModel(transformers.CLIPTextConfig(**SMALL, eos_token_id=29)), text(), TEXT


def allegro() -> Made:
    """A mask of the video, whose last frame is padding, and one of the text."""
    from diffusers import AllegroTransformer3DModel
    from diffusers.models.embeddings import get_3d_rotary_pos_embed_allegro

    model = AllegroTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, num_layers=2,
        cross_attention_dim=24, sample_height=4, sample_width=6, sample_frames=5, caption_channels=16,
    )  # fmt: skip
    t, h, w = 5, 4, 6
    size = h // 2, w // 2
    *waves, ts, hs, ws = get_3d_rotary_pos_embed_allegro(
        embed_dim=12, crops_coords=((0, 0), size), grid_size=size, temporal_size=t, interpolation_scale=(1.0,) * 3
    )
    places = torch.cartesian_prod(ts.long(), hs.long(), ws.long()).T.reshape(3, 1, -1).contiguous()
    video, words = torch.ones(1, t, h, w), torch.ones(1, 7)
    video[:, -1], words[:, 5:] = 0, 0
    inputs = {
        "hidden_states": torch.randn(1, 4, t, h, w), "encoder_hidden_states": torch.randn(1, 1, 7, 16),
        "timestep": torch.tensor([3]), "attention_mask": video, "encoder_attention_mask": words, "return_dict": False,
        "image_rotary_emb": (tuple(tuple(x.double() for x in wave) for wave in waves), tuple(places)),
    }  # fmt: skip
    line = "hidden_states=b c t h w, encoder_hidden_states=b n l e, attention_mask=b t h w"
    return model, inputs, {"": line}


def lumina() -> Made:
    """Two images whose texts are of two lengths, which are read, and which say where tokens are written in place."""
    from diffusers import Lumina2Transformer2DModel

    model = Lumina2Transformer2DModel(
        sample_size=32, in_channels=4, hidden_size=48, num_layers=2, num_refiner_layers=1, num_attention_heads=6,
        num_kv_heads=3, multiple_of=8, axes_dim_rope=(4, 2, 2), axes_lens=(64, 64, 64), cap_feat_dim=16,
    )  # fmt: skip
    words = torch.ones(2, 12, dtype=torch.bool)
    words[1, 7:] = False
    inputs = {
        "hidden_states": torch.randn(2, 4, 12, 12), "encoder_hidden_states": torch.randn(2, 12, 16),
        "timestep": torch.tensor([1.0, 0.5]), "encoder_attention_mask": words, "return_dict": False,
    }  # fmt: skip
    return model, inputs, {"": "hidden_states=b c h w, encoder_hidden_states=b n e"}


class Reads(nn.Module):
    """Reads its mask, and calls a model that reads it, too."""

    def __init__(self) -> None:
        super().__init__()
        self.bert, self.head = bert()[0], nn.Linear(12, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        longest = int(attention_mask.sum(1).max())
        x = self.bert(input_ids, attention_mask=attention_mask).last_hidden_state
        return self.head(x[:, :longest] if longest < input_ids.shape[1] else x)


def nested() -> Made:
    inputs = text()
    inputs["attention_mask"][0, 9:] = 0
    return Reads(), inputs, TEXT


def parity(mesh: DeviceMesh, build: Callable[[], Made]) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what the packages will do one day
        single, inputs, stages = build()
        inputs = {k: v.double().requires_grad_() if is_real(v) else v for k, v in inputs.items()}
        for p in single.double().train().parameters():
            nn.init.normal_(p, std=0.3)
        plan = dsp.plan(single, kwargs=inputs, size=mesh.size(), stages=stages)
        model = dsp.parallelize(copy.deepcopy(single), mesh, stages)
        rounding = {"rtol": 1e-5, "atol": 1e-5} if build in (allegro, lumina) else {}  # parts compute in fp32
        assert_step_equal(single, model, mesh, inputs, rounds=3, **rounding)
    return plan.share


def is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("build", [slow(build) for build in (bert, t5, llama, clip, allegro, lumina, nested)])
def test_masks_are_exact_and_shared(ranks: Any, n: int, build: Callable[[], Made]) -> None:
    if build in (allegro, lumina):
        pytest.importorskip("diffusers")
    share = max(ranks(parity, n, build))
    # T5 adds a bias for each head to a mask that torch.vmap makes: whole, as its plan says
    assert share < 1 or build is t5
