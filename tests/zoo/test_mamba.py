"""Mamba mixers against transformers' and mambapy's, and blocks of them against transformers' whole backbones."""

import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zoo
from tests.support.oracles import agree, copy_weights, randomise
from tests.support.refusals import refused
from tests.support.scan_oracles import all_in_float64
from zoo.video.mamba import Mamba1, Mamba1Direction, Mamba2
from zoo.video.mamba_weights import mixer_from_reference, reference_names

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import Mamba2Config, Mamba2Model, MambaConfig, MambaModel
    from transformers.models.mamba.modeling_mamba import MambaMixer
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

DTYPES = [(torch.float64, 1e-10), (torch.float32, 1e-5)]
precisions = pytest.mark.parametrize(("dtype", "tolerance"), DTYPES, ids=["float64", "float32"])

MAMBA = {"hidden_size": 32, "state_size": 5, "conv_kernel": 3, "expand": 3, "num_hidden_layers": 2, "vocab_size": 2}
MAMBA2 = {
    "hidden_size": 32, "state_size": 6, "conv_kernel": 4, "expand": 2, "num_hidden_layers": 2, "vocab_size": 2,
    "num_heads": 8, "head_dim": 8, "chunk_size": 4,
}  # fmt: skip


class Both(nn.Module):
    """Two Mamba-2 mixers of transformers' that share their projections and their norm, one run backward."""

    def __init__(self, config):
        super().__init__()
        self.ahead, self.back = Mamba2Mixer(config, 0), Mamba2Mixer(config, 0)
        self.back.in_proj, self.back.out_proj, self.back.norm = self.ahead.in_proj, self.ahead.out_proj, self.ahead.norm

    def forward(self, x):
        return self.ahead(x) + self.back(x.flip(1)).flip(1)


def vision_mamba():
    vim = pytest.importorskip("mambapy.vim")
    return vim.VMambaBlock(vim.MambaConfig(32, 1, d_state=5, expand_factor=3, d_conv=3, divide_output=False))


def one_name(name):
    return [reference_names(name)]


def both_names(name):
    direction = "back." if name.startswith("back.") else "ahead."
    return [direction + reference_names(name.removeprefix("back.").removeprefix("ahead."))]


def vision_names(name):
    return ["A_log_b" if name == "back.A_log" else reference_names(name)]


def mamba2(groups):
    return Mamba2Config(**MAMBA2, n_groups=groups)


MIXERS = {  # ours, theirs, the names of parameters
    "mamba1": (lambda: Mamba1(32, 5, 3, 3), lambda: MambaMixer(MambaConfig(**MAMBA), 0), one_name),
    **{
        f"mamba2 of {groups} groups": (
            partial(Mamba2, 32, 6, head_dim=8, groups=groups), partial(lambda g: Mamba2Mixer(mamba2(g), 0), groups),
            one_name,
        )
        for groups in (1, 2, 4)
    },
    "mamba2 in both directions": (
        lambda: Mamba2(32, 6, head_dim=8, groups=2, bidirectional=True), lambda: Both(mamba2(2)), both_names,
    ),
    "mambapy's vision mamba": (lambda: Mamba1(32, 5, 3, 3, bidirectional=True), vision_mamba, vision_names),
}  # fmt: skip


@precisions
@pytest.mark.parametrize("kind", MIXERS)
def test_a_mixer_is_that_of_its_source(kind, dtype, tolerance):
    """After the weights were taken over: output, gradient of the input and of every weight."""
    torch.manual_seed(0)
    model, oracle, names = MIXERS[kind]
    oracle = oracle()
    randomise(oracle)
    model, oracle = model().to(dtype), oracle.to(dtype)
    copy_weights(model, oracle, names)
    x = torch.randn(3, 20, 32, dtype=dtype)
    with all_in_float64(dtype):
        agree(model, oracle, names, lambda model, x: model(x), lambda oracle, x: oracle(x), x, tolerance)


def selective_scan_ref(u, delta, A, B, C, D):
    """The definition that mamba_ssm gives for its kernel: u and delta (b d n), A (d k), B and C (b k n), D (d).

    With delta_softplus.
    """
    state, out, delta = torch.zeros(*u.shape[:2], A.shape[1], dtype=u.dtype), [], F.softplus(delta)
    for i in range(u.shape[2]):
        step = delta[:, :, i, None]
        state = (step * A).exp() * state + step * B[:, None, :, i] * u[:, :, i, None]
        out.append((state * C[:, None, :, i]).sum(-1) + D * u[:, :, i])
    return torch.stack(out, 2)


def test_the_kernel_of_mamba_is_given_what_it_takes(monkeypatch):
    """On CUDA; here its definition stands in for it."""
    torch.manual_seed(0)
    direction, x = Mamba1Direction(96, 2, 5, 3), torch.randn(2, 9, 96)
    randomise(direction)
    seen = []

    def kernel(*args, delta_softplus):
        assert delta_softplus
        seen.append([tuple(arg.shape) for arg in args])
        return selective_scan_ref(*args)

    expect = direction(x)
    monkeypatch.setattr("zoo.video.mamba.mamba_kernel", lambda: kernel)
    monkeypatch.setattr("zoo.video.mamba.has_data_on_cuda", lambda x: True)
    torch.testing.assert_close(direction(x), expect, rtol=1e-5, atol=1e-5)
    assert seen == [[(2, 96, 9), (2, 96, 9), (96, 5), (2, 5, 9), (2, 5, 9), (96,)]]


@precisions
@pytest.mark.parametrize("prefix", ["", "backbone."])
@pytest.mark.parametrize("kind", ["mamba1", "mamba2"])
def test_a_model_starts_from_a_language_model(kind, prefix, dtype, tolerance):
    """With gates of one, and no other modulation, its blocks are the language model, each along an axis of its own."""
    torch.manual_seed(0)
    one = kind == "mamba1"
    oracle = MambaModel(MambaConfig(**MAMBA)) if one else Mamba2Model(mamba2(2))
    randomise(oracle)
    state = {prefix + name: value for name, value in oracle.state_dict().items()}
    model = zoo.from_reference("st_mamba", state, **({} if one else {"groups": 2})).to(dtype)
    assert (model.config.depth, model.config.mixer, model.config.bidirectional) == (2, kind, False)
    assert model(**model.example_inputs()).shape == (1, 4, 5, 8, 8)
    ours = x = torch.randn(2, 1, 8, 32, dtype=dtype)
    for block, over in zip(model.running(), "st"):
        nn.init.zeros_(block.modulation.linear.weight)
        with torch.no_grad(), all_in_float64(dtype):
            block.modulation.linear.bias.copy_(torch.tensor([0.0, 0.0, 1.0]).repeat_interleave(32))
            ours = ours.transpose(1, 2) if over == "t" else ours
            ours = block(ours, torch.zeros(2, 32, dtype=dtype))
    with torch.no_grad(), all_in_float64(dtype):
        theirs = oracle.to(dtype)(inputs_embeds=x[:, 0], use_cache=False).last_hidden_state
        ours = oracle.norm_f(ours[:, :, 0])
    assert theirs.std() > 0.1
    assert (ours - theirs).abs().max() < tolerance * theirs.abs().max()


def test_a_mixer_of_both_directions_loads_from_vision_mamba():
    both, x = Mamba1(32, 5, bidirectional=True), torch.randn(2, 9, 32)
    both.init_weights()
    vision = {f"layers.0.mixer.{reference_names(name)}": value for name, value in both.state_dict().items()}
    assert {"A_b_log", "D_b", "conv1d_b.weight", "dt_proj_b.bias"} <= {name.split(".", 3)[-1] for name in vision}
    assert torch.equal(mixer_from_reference(vision, "layers.0.mixer.")(x), both(x))


@pytest.mark.parametrize(
    ("changes", "prefix", "message"),
    [
        ({}, "layers.0.", r"no Mamba mixer under the prefix 'layers\.0\.'"),
        ({"in_proj.bias": torch.zeros(192)}, "", r"unknown: in_proj\.bias"),
        ({"dt_proj.bias": None}, "", r"missing: dt_proj\.bias"),
    ],
)
def test_other_weights_are_refused(changes, prefix, message):
    state = MambaMixer(MambaConfig(**MAMBA), 0).state_dict() | changes
    refused(message, mixer_from_reference, {name: value for name, value in state.items() if value is not None}, prefix)
    refused("these weights are of another model", zoo.from_reference, "st_mamba", state)
    layers = MambaModel(MambaConfig(**MAMBA)).state_dict()
    with pytest.raises(ValueError, match=r"missing: layers\.1\.norm\.weight"):
        zoo.from_reference("st_mamba", {k: v for k, v in layers.items() if k != "layers.1.norm.weight"})
