"""RWKV-6's time and channel mix against flash-linear-attention's layers, which import Triton but need none of it here.

What they call of Triton is replaced by PyTorch: the recurrence and the token shift by fla-core's own definitions, group
norm and activations by torch's.
"""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.oracles import close, randomise
from tests.support.scan_oracles import all_in_float64
from zoo.video.rwkv import ChannelMix, TimeMix
from zoo.video.scan_model import Block, Norm

precisions = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=["float64", "float32"]
)


@pytest.fixture
def fla(monkeypatch):
    """The module of flash-linear-attention's RWKV-6 blocks."""
    pytest.importorskip("triton")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layers = pytest.importorskip("fla.layers.rwkv6")
        models = pytest.importorskip("fla.models.rwkv6.modeling_rwkv6")
        from fla.modules.token_shift import token_shift_ref
        from fla.ops.rwkv6.recurrent_naive import naive_recurrent_rwkv6

    def recurrent(r, k, v, w, u, scale, **_):
        y, state = naive_recurrent_rwkv6(*(x.transpose(1, 2) for x in (r, k, v, w)), u, scale=scale)
        return y.transpose(1, 2), state

    class GroupNorm(nn.GroupNorm):
        def __init__(self, groups, channels, elementwise_affine, bias, eps):
            super().__init__(groups, channels, eps=eps)

        def forward(self, x):
            return super().forward(x.flatten(0, -2)).view_as(x)

    monkeypatch.setattr(layers, "fused_recurrent_rwkv6", recurrent)
    monkeypatch.setattr(layers, "GroupNorm", GroupNorm)
    monkeypatch.setattr(layers, "token_shift", token_shift_ref)
    monkeypatch.setattr(models, "token_shift", token_shift_ref)
    return models


class Both(nn.Module):
    """Time mix and channel mix, each after a norm and added to what went in, as in flash-linear-attention's block."""

    def __init__(self, fla):
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "cross-check with the official repo"
            self.time = fla.RWKV6Attention(
                hidden_size=32, expand_k=1.0, num_heads=4, proj_low_rank_dim=6, gate_low_rank_dim=8, norm_eps=64e-5
            )
        self.time.gate_fn = F.silu
        self.channel = fla.RWKV6FeedForward(32, intermediate_size=40)
        self.channel.act_fn = lambda x: F.relu(x).square()
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(2))

    def forward(self, x):
        x = x + self.time(self.norms[0](x))[0]
        return x + self.channel(self.norms[1](x))[0]


TIME = {
    "mix_first": "x_proj.0.mu", "mix_down.weight": "x_proj.0.linear.weight", "mix_up": "x_proj.2.weight",
    "mix": "x_bias", "decay_down.weight": "w_proj.linear.lora.0.weight", "bonus": "bonus",
    "decay_up.weight": "w_proj.linear.lora.2.weight", "decay_up.bias": "w_proj.linear.lora.2.bias",
    **{f"{name}.weight": f"{name[0]}_proj.linear.weight" for name in ("key", "value", "receptance", "gate")},
    "out.weight": "o_proj.weight", "norm.weight": "g_norm.weight", "norm.bias": "g_norm.bias",
}  # fmt: skip


def translate(theirs):
    """An oracle's parameters (weights or gradients), under the names and in the layout of ours."""
    order = [1, 2, 3, 0, 4]  # theirs are r w k v g, ours w k v r g
    time = {name: theirs[f"time.{source}"] for name, source in TIME.items()}
    time["mix"] = time["mix"][order]
    time["mix_down.weight"] = time["mix_down.weight"].unflatten(0, (5, -1))[order].flatten(0, 1)
    time["mix_up"] = time["mix_up"].unflatten(1, (5, -1)).permute(1, 2, 0)[order]
    channel = {name: theirs[f"channel.{name}"] for name in ("value.weight",)}
    channel |= {f"{name}.weight": theirs[f"channel.{name}.linear.weight"] for name in ("key", "receptance")}
    channel["mix"] = torch.stack([theirs["channel.key.mu"], theirs["channel.receptance.mu"]])
    found = {f"mixers.0.{name}": value for name, value in time.items()}
    found |= {f"mixers.1.{name}": value for name, value in channel.items()}
    return found | {name: value for name, value in theirs.items() if name.startswith("norms.")}


@precisions
@pytest.mark.parametrize("reverse", [False, True])
def test_a_block_is_flash_linear_attentions(fla, reverse, dtype, tolerance):
    torch.manual_seed(0)
    oracle = Both(fla)
    randomise(oracle)
    mixers = [TimeMix(32, 8, 6, 8, 1, 2), ChannelMix(32, 40, 1, 2)]
    model = Block(32, "s", [Norm(32, bias=True), Norm(32, bias=True)], mixers, reverse)
    nn.init.zeros_(model.modulation.linear.weight)  # gates of one, and no other modulation
    with torch.no_grad():
        model.modulation.linear.bias.copy_(torch.tensor([0.0, 0.0, 1.0]).repeat(2).repeat_interleave(32))
    model, oracle = model.to(dtype), oracle.to(dtype)
    taken = translate(oracle.state_dict())
    assert set(taken) == {name for name, _ in model.named_parameters() if not name.startswith("modulation.")}
    model.load_state_dict(taken, strict=False)

    x = torch.randn(2, 3, 20, 32, dtype=dtype)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    ours = model(a, torch.zeros(2, 32, dtype=dtype))
    with all_in_float64(dtype):
        folded = b.flatten(0, 1)
        theirs = oracle(folded.flip(1)).flip(1) if reverse else oracle(folded)
        theirs = theirs.view_as(x)
        weight = torch.randn_like(theirs)
        (theirs * weight).mean().backward()
    (ours * weight).mean().backward()
    assert (theirs - x).std() > 0.1
    grads = translate({name: param.grad for name, param in oracle.named_parameters()})
    pairs = {"output": (ours, theirs), "x": (a.grad, b.grad)}
    pairs |= {name: (param.grad, grads[name]) for name, param in model.named_parameters() if name in grads}
    for name, (mine, other) in pairs.items():
        close(mine, other, tolerance, name)
