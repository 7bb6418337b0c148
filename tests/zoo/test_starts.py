"""A fresh model's parameters are distributed as in the public code that it follows: mean and deviation of every kind.

The sources: DiT (`models.py`), PixArt-alpha, Open-Sora 1.0 (`stdit.py`) and Latte (`latte.py`), `initialize_weights` of
each; mamba_ssm (`mamba_simple.py`, `mamba2.py`, `mixer_seq_simple.py`); RWKV-LM (`RWKV-v5/src/model.py`); openfold
(`openfold/model/`: `primitives.py::Linear` and who calls it; AF2's supplement, 1.11.4); openfold3
(`core/config/default_linear_init_config.py`); google-research/axial (`nn.py`, `transformers.py`,
`config_imagenet32.py`); Wan 2.1 (`wan/modules/model.py`). What differs docs/zoo-starts.md says.
"""

import math
import re

import pytest
import torch

import zoo


def xavier(w):
    return math.sqrt(2 / sum(w.shape))


def lecun(w):
    return w.shape[1] ** -0.5


def he(w):
    return (2 / w.shape[1]) ** 0.5


def torchs(w):  # of nn.Linear: uniform within 1 / sqrt(inputs)
    return (3 * w.shape[1]) ** -0.5


def rows(w):  # a linear layer on one-hot vectors
    return w.shape[0] ** -0.5


def glorot(parts):
    return lambda w: math.sqrt(2 / (w.shape[0] / parts + w.shape[1]))


def table(w):
    return w.shape[1] ** -0.5


ZERO, ONE = (0, 0), (1, 0)
BIAS = [(r".*\.bias", ZERO)]
EMBEDDINGS = [
    (r"(t_embed|conditions\.\w+)\.mlp\.(up|down)\.weight|caption\.\w+\.weight|t_block.*weight|label_embed.*", 0.02)
]
DIT = [*BIAS, (r".*modulation\.linear.*|final\.linear.*", ZERO), *EMBEDDINGS, (r".*weight", xavier)]
PIXART = [*BIAS, (r"final\.linear.*|.*cross\.out\..*", ZERO), (r".*modulation\.table", table), *EMBEDDINGS]
OPEN_SORA = [(r".*temporal\.attention\.out\..*", ZERO), (r".*[qk]_norm.*", ONE), *PIXART, (r".*weight", xavier)]
AXIAL = [
    *BIAS, (r".*norm\w*\.weight", ONE), (r"embed.*|positions.*", lambda w: 5 * w.shape[1] ** -0.5),
    (r".*(attention\.out|mlp\.down|logits\.linear)\.weight", lambda w: 1e-5 * lecun(w)),
    (r".*weight", lecun),
]  # fmt: skip
WAN = [
    *BIAS, (r".*norm\.weight", ONE), (r"final\.linear.*", ZERO), (r".*modulation\.table", table),
    (r"(t_embed\.mlp|caption)\.(up|down)\.weight", 0.02), (r".*qkv\.weight", glorot(3)), (r".*\.kv\.weight", glorot(2)),
    (r".*weight", xavier),
]  # fmt: skip
SCANS = [
    (r".*modulation\.linear.*|final\.linear.*|t_embed.*bias|embed.*bias|.*norms\.\d\.bias", ZERO), *EMBEDDINGS,
    (r"embed.*weight", xavier), (r".*norms\.\d\.weight", ONE),
]  # fmt: skip
DEPTH = 6  # of the tiny models of scans
MAMBA = [
    *SCANS, (r".*\.D|.*mixers\.0\.norm", ONE),
    (r".*(in_proj|x_proj)\.weight", torchs), (r".*out_proj\.weight", lambda w: torchs(w) / DEPTH**0.5),
    (r".*conv1d\.(weight|bias)", lambda w: (3 * 4) ** -0.5),
    (r".*dt_proj\.weight", lambda w: (3 * w.shape[1]) ** -0.5),
]  # fmt: skip
RWKV = [
    *SCANS, (r".*(mix_down|decay_down)\.weight|.*mixers\.0\.norm\.bias", ZERO),
    (r".*mix_up|.*decay_up\.weight", 0.01 / 3**0.5),
    (r".*mixers\.0\.(key|gate)\.weight", lambda w: 0.1 * w.shape[0] ** -0.5),
    (r".*(key|value|receptance|out)\.weight", lambda w: max(w.shape) ** -0.5),
]  # fmt: skip
ALPHAFOLD = [
    (r".*norm\.weight", ONE), (r".*gate\.bias", ONE), *BIAS,
    (r".*gate\.weight|.*\.out\.weight|.*transition\.down\.weight|heads.*", ZERO),
    (r".*qkv\.weight", glorot(3)), (r".*\.q\.weight", glorot(1)), (r".*\.kv\.weight", glorot(2)),
    (r".*transition\.up\.weight", he),
    (r".*(token|target|left|right|relative|single_embed)\.weight", rows), (r".*weight", lecun),
]  # fmt: skip

MODELS = [
    ("latte", {}, DIT), ("axial_video", {"num_classes": 10}, DIT),
    ("latte", {"conditioning": "text", "caption_channels": 16}, [*PIXART, (r".*weight", xavier)]),
    ("transformer2d", {}, [*PIXART, (r".*weight", xavier)]),
    ("stdit", {"version": "v1"}, OPEN_SORA), ("stdit", {"version": "v3"}, OPEN_SORA), ("axial_image", {}, AXIAL),
    ("st_mamba", {"mixer": "mamba1"}, MAMBA), ("st_mamba", {"mixer": "mamba2"}, MAMBA), ("st_rwkv", {}, RWKV),
    ("wan", {}, WAN), ("evoformer", {}, ALPHAFOLD), ("pairformer", {}, ALPHAFOLD),
]  # fmt: skip
OTHERWISE = r".*(A_log|dt_bias|dt_proj\.bias|mix_first|\.mix|bonus|decay_up\.bias|mixers\.0\.norm\.weight)"  # below


@pytest.mark.parametrize(("name", "options", "rules"), MODELS, ids=[f"{n}-{'-'.join(o)}" for n, o, _ in MODELS])
def test_every_kind_of_parameter(name, options, rules):
    torch.manual_seed(0)
    kinds = {}
    for key, param in zoo.create(name, "test", **options).named_parameters():
        kinds.setdefault((re.sub(r"^(\w+)\.\d+\.", r"\1.", key), param.shape), []).append(param.detach())
    for (key, shape), params in kinds.items():
        found = [rule for pattern, rule in rules if re.fullmatch(pattern, key)]
        if re.fullmatch(OTHERWISE, key) and (not found or name == "st_rwkv"):
            continue
        assert found, key
        values = torch.cat([param.flatten() for param in params]).double()
        mean, deviation = found[0] if isinstance(found[0], tuple) else (0, found[0])
        if deviation == 0:
            assert (values == mean).all(), key
            continue
        std, n = deviation(torch.empty(shape)) if callable(deviation) else deviation, len(values)
        assert abs(values.mean()) < 5 * std / n**0.5, key
        assert abs(values.std() / std - 1) < 5 / (2 * n) ** 0.5, (key, values.std(), std)


CUT = 2 / 0.87962566103423978  # two deviations of what was cut, in those of what is left


@pytest.mark.parametrize(
    ("name", "cut", "uncut"),
    [
        ("evoformer", r".*(left|right|token|up|[et]\.project)\.weight", r".*(row_bias\.project|project\.bias)\.weight"),
        ("pairformer", r".*(left|right|token|qkv|up|project|project\.bias|\.q|kv)\.weight", ""),
        ("axial_image", r".*(qkv|up|out|down|linear)\.weight", r"embed\.weight|positions.*"),
    ],
)
def test_normal_numbers_are_cut_at_two_deviations_where_the_source_cuts_them(name, cut, uncut):
    """And only there: openfold's biases of attention by pairs are not, as AlphaFold 2's."""
    torch.manual_seed(0)
    wide = {"axial_image": {"hidden": 64, "heads": 4}}.get(name, {"c_z": 64, "depth": 8})
    most = {True: 0.0, False: 0.0}
    for key, weight in zoo.create(name, "test", **wide).named_parameters():
        other = re.fullmatch(uncut, key) is not None
        if (other or re.fullmatch(cut, key)) and weight.std() > 0:
            most[other] = max(most[other], (weight.abs().max() / weight.square().mean().sqrt()).item())
    assert 2 < most[False] < 1.15 * CUT
    assert most[True] > 1.15 * CUT or not uncut


def test_time_steps_and_decays_of_mamba():
    torch.manual_seed(0)
    one, two = (
        zoo.create("st_mamba", "test", mixer=mixer).spatial[0].mixers[0].ahead for mixer in ("mamba1", "mamba2")
    )
    states = torch.arange(1.0, one.A_log.shape[1] + 1)
    torch.testing.assert_close(one.A_log.exp(), states.expand_as(one.A_log))
    assert ((two.A_log.exp() >= 1) & (two.A_log.exp() <= 16)).all()
    for bias in (one.dt_proj.bias, two.dt_bias):
        step = torch.nn.functional.softplus(bias.double())
        assert ((step >= 0.000999) & (step <= 0.1001)).all()
        assert abs(step.log().mean() - math.log(0.01)) < 5 * math.log(100) / (12 * len(bias)) ** 0.5


@pytest.mark.parametrize(("layer", "layers"), [(0, 1), (0, 3), (1, 3), (2, 3)])
def test_decays_and_mixes_of_rwkv_against_loops(layer, layers):
    """Channel by channel, as RWKV-LM's code counts them."""
    from zoo.video.rwkv import ChannelMix, TimeMix

    dim = 24
    time, channel = TimeMix(dim, 8, 4, 8, layer, layers), ChannelMix(dim, 40, layer, layers)
    with torch.no_grad():
        time.init_weights()
        channel.init_weights()
    depth, left = layer / max(1, layers - 1), 1 - layer / layers
    for n in range(dim):
        place, end = n / dim, n / (dim - 1)
        mixed, more = 1 - place**left, 1 - place ** (0.5 * left)
        expected = [mixed, mixed, 1 - (place**left + 0.3 * depth), more, more]
        assert time.mix[:, n].tolist() == pytest.approx(expected, abs=1e-6)
        assert time.mix_first[n].item() == pytest.approx(mixed, abs=1e-6)
        assert channel.mix[:, n].tolist() == pytest.approx([mixed, mixed], abs=1e-6)
        assert time.decay_up.bias[n].item() == pytest.approx(-6 + 5 * end ** (0.7 + 1.3 * depth), abs=1e-5)
        zigzag = ((n + 1) % 3 - 1) * 0.1
        assert time.bonus.flatten()[n].item() == pytest.approx(depth * (1 - end) + zigzag, abs=1e-6)
    assert time.norm.weight.tolist() == pytest.approx([((layer + 1) / layers) ** 0.7] * dim)
