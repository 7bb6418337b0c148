"""Unmodified models of transformers, parallelized without stages, against one process, as docs/transformers.md says."""

from __future__ import annotations

import copy
import json
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import dsp
from dsp.stages.known import of_type, table
from tests.support import known_models
from tests.support.known_models import TRANSFORMERS
from tests.support.slow import keep_short

transformers = pytest.importorskip("transformers")

# where a part is whole on every rank: a mask that all heads read, positions kept in a weight, zeros added to scores;
# or where fewer bytes are sent along a dim that divides worse
WHOLE = {
    "modernbert": 0.5, "videomae": 0.5, "t5": 0.67, "wav2vec2": 1.0, "patchtst": 0.4,
    "audio-spectrogram-transformer": 0.38, "gemma3_text": 1.0,
}  # fmt: skip


def held(mesh: DeviceMesh, name: str) -> dict[str, float]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return known_models.held(mesh, TRANSFORMERS[name])


@pytest.mark.parametrize("name", keep_short(TRANSFORMERS, only=["llama"]))
def test_its_type_is_enough(ranks: Any, name: str) -> None:
    found = ranks(held, 3, name)[0]
    assert found["output"] < 1e-6  # parts of them compute in fp32, whatever the model's type
    assert max(found["inputs"], found["parameters"]) < 1e-6
    assert found["share"] <= WHOLE.get(name, 0.345)


def test_every_known_type_was_tried() -> None:
    lines = table()["transformers"]["lines"]
    assert list(lines) == sorted(TRANSFORMERS)
    cases = json.loads(known_models.TYPES.read_text())
    for name, case in cases.items():
        assert getattr(transformers, case["class"]).config_class.model_type == name


def tiny(name: str) -> nn.Module:
    torch.manual_seed(0)
    return TRANSFORMERS[name].build().double().eval()


@pytest.mark.parametrize("cache", [None, "static"])
def test_a_language_model_generates(mesh: DeviceMesh, cache: str | None) -> None:
    single = tiny("llama")
    model = dsp.parallelize(copy.deepcopy(single), mesh)
    ids = torch.randint(4, 60, (1, 9), generator=torch.Generator().manual_seed(0))
    asks = {"max_new_tokens": 5, "do_sample": False} | ({} if cache is None else {"cache_implementation": cache})
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        assert torch.equal(model.generate(ids, **asks), single.generate(ids, **asks))


def test_other_heads_take_what_their_forward_has() -> None:
    t5, t5_config = transformers.T5EncoderModel, TRANSFORMERS["t5"].build.args[1]
    encoder = t5(t5.config_class(**t5_config))
    assert of_type(encoder) == {"": "input_ids=b s, inputs_embeds=b s c"}
    assert of_type(nn.Linear(2, 2)) is None


def test_a_class_that_is_not_known_is_told_its_first_input(mesh: DeviceMesh) -> None:
    class Mine(nn.Linear):
        def forward(self, features: torch.Tensor) -> torch.Tensor:
            return super().forward(features)

    with pytest.raises(dsp.NotationError, match="features=b t"):
        dsp.parallelize(Mine(2, 2), mesh)
