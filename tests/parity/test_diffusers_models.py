"""Unmodified models of diffusers and of other fields, each by one line, against one process, as the pages say."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

import dsp
from tests.support import known_models
from tests.support.diffusers_models import DEEP, GIVEN
from tests.support.records import records
from tests.support.slow import keep_short, long

pytest.importorskip("diffusers")

# of which the plan takes seconds, and whether Ulysses has a figure for it
MODELS = {
    "FluxTransformer2DModel": 1.1,
    "AutoencoderKLHunyuanVideo, decoder": None,
    "CogVideoXTransformer3DModel": 1.01,
    "MochiTransformer3DModel": 1.3,
    "LTXVideoTransformer3DModel": 1.1,
    "WanTransformer3DModel": 1.1,
    "AutoencoderKLHunyuanVideo, encoder": None,
    "AutoencoderKLWan, decoder": None,
    "AutoencoderKLLTXVideo, decoder": None,
    "AutoencoderKLTemporalDecoder, encoder": None,
}
IN_CI = [name for name in MODELS if name not in ("AutoencoderKLWan, decoder", "AutoencoderKLLTXVideo, decoder")]


# of what package, how exact (FNO's modes are complex64, whatever the model's type), and a rank's share of the largest
OTHER_FIELDS = {
    "neuraloperator's FNO": ("neuralop", 1e-6, 0.04),
    "torch_geometric's GCN": ("torch_geometric", 1e-12, 0.06),
    "minGRU's language model": ("minGRU_pytorch", 1e-12, 0.06),
    "monai's SegResNet": ("monai", 1e-12, 0.06),
    "fair-esm's MSATransformer": ("esm", 1e-12, 0.06),
}


def held(mesh: DeviceMesh, name: str) -> dict[str, float]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of autocast to fp32 on CPU, by the models
        cases = known_models.CASES | known_models.MORE | known_models.OTHER_FIELDS
        return known_models.held(mesh, cases[name])


def test_the_page_has_every_row() -> None:
    from benchmarks import models

    rows = models.rows()
    assert list(rows) == [(name, n) for name in models.CASES for n in (2, 3, 4)]
    for (name, n), line in rows.items():
        output, gradients, share, ratio = line.split(" | ")[3:7]
        assert (float(output) < 1e-6, float(gradients) < 1e-5) == (True, True), line
        assert float(share) <= (1.1 / n if "Transformer" in name else 1 / n + 0.03), line
        assert ("Transformer" not in name) == (ratio == "-"), line
    text = models.GUIDE.read_text()
    assert models.guide(text) == text


@pytest.mark.parametrize("name", keep_short(MODELS, only=["CogVideoXTransformer3DModel"], in_slow=IN_CI))
def test_one_line_is_enough(ranks: Any, name: str) -> None:
    found = ranks(held, 3, name)[0]
    assert found["output"] < 1e-6  # parts of them compute in fp32, whatever the model's type
    assert max(found["inputs"], found["parameters"]) < 1e-5
    assert found["share"] <= 0.37
    if MODELS[name]:
        assert found["planned"] <= MODELS[name] * found["ulysses"]


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHER_FIELDS)
@pytest.mark.parametrize("n", [2, 3])
def test_one_line_is_enough_in_other_fields(ranks: Any, n: int, name: str) -> None:
    """Output and every gradient; what each rank sends is counted by `held`, which raises where the plan says else."""
    package, exact, more = OTHER_FIELDS[name]
    pytest.importorskip(package)
    found = ranks(held, n, name)[0]
    assert max(found["output"], found["inputs"], found["parameters"]) < exact
    assert found["share"] <= 1 / n + more
    assert found["whole"] < 0.01


@pytest.mark.long
def test_others_that_are_known(ranks: Any) -> None:
    """Classes beyond the table, one after the other in one pool: a row each in no page."""
    for name in known_models.MORE:
        found = ranks(held, 2, name)[0]
        assert found["output"] < 1e-5, name  # AutoencoderDC's attention is in fp32
        assert max(found["inputs"], found["parameters"]) < 1e-5, name
        # HunyuanVideo 1.5's mask of all pairs is whole where its attention is sharded along heads, which sends half
        assert found["share"] <= (1 if name == "HunyuanVideo15Transformer3DModel" else 0.53), name


def routed(mesh: DeviceMesh) -> tuple[float, bool]:
    """The largest error over four images, and whether the first call left a plan."""
    single, kwargs = known_models.made(known_models.MORE["HiDreamImageTransformer2DModel"])
    model = dsp.parallelize(copy.deepcopy(single), mesh)  # by its known line
    worst = 0.0
    with torch.no_grad():
        for i in range(4):
            torch.manual_seed(i)
            given = kwargs | {"hidden_states": 3 * torch.randn(1, 4, 24, 24, dtype=torch.float64)}
            expected = single(**given)[0]
            worst = max(worst, float((model(**given)[0] - expected).abs().max() / expected.abs().max()))
    [record] = records(model)
    return worst, record.planned


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 3])
def test_experts_that_the_data_choose(ranks: Any, n: int) -> None:
    """HiDream gives each expert as many tokens as it is chosen for: others in each call, and the plan of the first."""
    found = ranks(routed, n)
    assert found[0][0] < 1e-12
    assert all(planned for _, planned in found)


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "n"), [(48, 2), (48, 3), (30, 4)])
def test_a_joint_attention_sends_what_ulysses_does(heads: int, n: int) -> None:
    """CogVideoX's, as it is, over 226 tokens of text and 17,550 of video, its join and split included."""
    from diffusers.models.attention_processor import Attention, CogVideoXAttnProcessor2_0

    width, (text, video) = 64 * heads, (226, 17550)
    with torch.device("meta"):
        attention = Attention(width, dim_head=64, heads=heads, bias=True, processor=CogVideoXAttnProcessor2_0())
        places = torch.randn(video, 64), torch.randn(video, 64)
        given = {"hidden_states": torch.randn(1, video, width), "encoder_hidden_states": torch.randn(1, text, width)}
    line = "hidden_states=b n c, encoder_hidden_states=b m c"
    plan = dsp.plan(
        attention, kwargs=given | {"image_rotary_emb": places}, size=n, stages={"": line}, gather_output=False,
        given={"hidden_states": Shard(1)},
    )  # fmt: skip
    assert plan.exact
    assert plan.share <= 1.1 / n
    assert plan.bytes["forward"] <= 1.05 * 4 * (text + video) * width * 4 * (n - 1) / n**2


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 4])
def test_a_block_sends_what_ulysses_does_and_its_joins_nothing(n: int) -> None:
    """CogVideoX's, which joins text to video for attention and for its feed-forward: each rank its own parts."""
    from diffusers import CogVideoXTransformer3DModel

    width, text, frames, side = 3072, 226, 13, (60, 90)
    video = frames * 30 * 45
    given = {"timestep": torch.tensor([3]), "image_rotary_emb": (torch.randn(video, 64), torch.randn(video, 64))}
    ulysses = 4 * (text + video) * width * 4 * (n - 1) / n**2
    sent = {}
    for layers in (1, 2):
        with torch.device("meta"):
            model = CogVideoXTransformer3DModel(
                num_attention_heads=48, num_layers=layers, use_rotary_positional_embeddings=True
            )
            given |= {"hidden_states": torch.randn(1, frames, 16, *side)}
            given |= {"encoder_hidden_states": torch.randn(1, text, 4096)}
        line = "hidden_states=b t c h w, encoder_hidden_states=b n e"
        plan = dsp.plan(model, kwargs=given, size=n, stages={"": line}, gather_output=False)
        assert plan.exact
        sent[layers] = plan.bytes["forward"] / ulysses
    for layers, bytes_of_ulysses in sent.items():
        assert bytes_of_ulysses < layers + 0.53  # the embedding of patches, once, and the last projection
    assert sent[2] - sent[1] < 1.05  # few blocks go along a dim that divides worse, and need no embedding's switch


@pytest.mark.parametrize(("name", "n"), [long("Wan 14B", 3), long("HunyuanVideo 13B", 4)])
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
