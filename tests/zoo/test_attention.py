"""Attention against transformers: grouped keys, both kinds of rotary positions, heads normalised before and after."""

import warnings

import pytest
import torch
from einops import rearrange

import zoo.attention
from tests.support.oracles import agree, copy_weights, randomise
from tests.support.refusals import refused
from zoo.attention import SelfAttention, attend

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers.models.cohere.modeling_cohere import CohereAttention, CohereConfig
    from transformers.models.hunyuan_v1_dense.modeling_hunyuan_v1_dense import (
        HunYuanDenseV1Attention,
        HunYuanDenseV1Config,
    )
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaConfig
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3Config

HEADS, SIZE = 6, 8
ORACLES = {
    "llama": (LlamaConfig, LlamaAttention, {"rope": "halves"}),
    "cohere": (CohereConfig, CohereAttention, {"rope": "interleaved"}),
    "qwen3": (Qwen3Config, Qwen3Attention, {"rope": "halves", "qk_norm": "before"}),
    "hunyuan": (HunYuanDenseV1Config, HunYuanDenseV1Attention, {"rope": "halves", "qk_norm": "after"}),
}


def names(ours, kind):
    layer, suffix = ours.split(".")
    norms = {"q_norm": "query_layernorm", "k_norm": "key_layernorm"} if kind == "hunyuan" else {}
    theirs = {"qkv": ["q_proj", "k_proj", "v_proj"], "out": ["o_proj"]}.get(layer, [norms.get(layer, layer)])
    return [f"{name}.{suffix}" for name in theirs]


def tables(frames, rope, dtype):
    """Cosines and sines (1 n e), laid out as transformers' rotary embeddings lay them out."""
    angles = torch.outer(torch.arange(frames).double(), 10000.0 ** (-torch.arange(0, SIZE, 2).double() / SIZE))
    angles = torch.cat([angles, angles], -1) if rope == "halves" else angles.repeat_interleave(2, -1)
    return angles.cos().to(dtype)[None], angles.sin().to(dtype)[None]


# The norms of transformers, and Cohere's rotation, compute in float32 whatever they are given: only Llama has float64.
@pytest.mark.parametrize(
    ("kind", "dtype", "tolerance"),
    [*((kind, torch.float32, 1e-5) for kind in ORACLES), ("llama", torch.float64, 1e-10)],
    ids=str,
)
@pytest.mark.parametrize("kv_heads", [6, 2, 1])
def test_self_attention_agrees_with_transformers(kind, kv_heads, dtype, tolerance):
    torch.manual_seed(0)
    make_config, make, options = ORACLES[kind]
    config = make_config(
        hidden_size=HEADS * SIZE,
        num_attention_heads=HEADS,
        num_key_value_heads=kv_heads,
        head_dim=SIZE,
        attention_bias=True,
        rms_norm_eps=1e-6,
        attn_implementation="sdpa",
    )
    oracle = make(config, 0)
    randomise(oracle)
    model = SelfAttention(HEADS * SIZE, HEADS, "t", kv_heads=kv_heads, **options)
    copy_weights(model, oracle, lambda name: names(name, kind))
    model, oracle = model.to(dtype), oracle.to(dtype)

    def run_oracle(oracle, x):
        everything = torch.zeros(1, 1, x.shape[1], x.shape[1], dtype=dtype)  # or else it looks at the past alone
        y, _ = oracle(rearrange(x, "b t s c -> (b s) t c"), tables(x.shape[1], options["rope"], dtype), everything)
        return rearrange(y, "(b s) t c -> b t s c", b=len(x))

    x = torch.randn(2, 7, 3, HEADS * SIZE, dtype=dtype)
    agree(model, oracle, lambda name: names(name, kind), lambda m, x: m(x), run_oracle, x, tolerance)


def by_hand(q, k, v, mask=None, bias=None):
    """Attention (b n h e) without any kernel."""
    k, v = (torch.cat([x[:, :, i // (q.shape[2] // x.shape[2]), None] for i in range(q.shape[2])], 2) for x in (k, v))
    logits = torch.einsum("bnhe,bmhe->bhnm", q, k) / q.shape[-1] ** 0.5
    logits = logits if bias is None else logits + bias
    logits = logits if mask is None else logits.masked_fill(~mask[:, None, None], -torch.inf)
    return torch.einsum("bhnm,bmhe->bnhe", logits.softmax(-1), v)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("bias_shape", [None, (3, 4, 5, 7), (1, 4, 5, 7), (3, 1, 1, 7)])
def test_attend_is_softmax_attention(kv_heads, masked, bias_shape):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 5, 4, 8), torch.randn(3, 7, kv_heads, 8), torch.randn(3, 7, kv_heads, 8)
    mask = torch.arange(7) < torch.tensor([7, 3, 1])[:, None] if masked else None
    given = [x.double().requires_grad_() for x in (q, k, v)]
    if bias_shape:
        given.append(torch.randn(bias_shape).double().requires_grad_())
    results = []
    for run in (attend, by_hand):
        out = run(*given[:3], mask, *given[3:])
        results.append([out, *torch.autograd.grad(out.square().sum(), given)])
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_attention_splits_batches_beyond_the_cuda_grid(monkeypatch):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 7, 5, 2, 4)
    mask = torch.rand(7, 5) < 0.5
    given = [(None, None), (mask, None), (mask, torch.randn(7, 2, 5, 5)), (None, torch.randn(1, 2, 5, 5))]
    whole = [attend(q, k, v, *more) for more in given]
    monkeypatch.setattr(zoo.attention, "MAX_BATCH", 3)
    for more, wanted in zip(given, whole):
        torch.testing.assert_close(attend(q, k, v, *more), wanted)


def test_masked_attention_is_attention_to_the_tokens_kept():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 5, 2, 4)
    mask = torch.tensor([[True, True, False, True, False], [False] * 5])
    out = attend(q, k, v, mask)
    torch.testing.assert_close(out[:1], attend(q[:1], k[:1, mask[0]], v[:1, mask[0]]))
    torch.testing.assert_close(out[1:], attend(q[1:], k[1:], v[1:]))  # no token kept: all are seen


@pytest.mark.parametrize(
    ("heads", "options", "message"),
    [
        (5, {}, "48 channels do not divide into heads=5"),
        (6, {"kv_heads": 4}, "heads=6 is not a multiple of kv_heads=4"),
        (16, {"rope": "halves"}, "rotary positions need an even number in each"),
        (6, {"kv_heads": 0}, "heads=6 is not a multiple of kv_heads=0"),
        (6, {"rope": "half"}, "rope='half': expected None, 'interleaved' or 'halves'"),
        (6, {"qk_norm": "first"}, "qk_norm='first': expected None, 'before' or 'after'"),
    ],
)
def test_options_that_do_not_fit_are_refused(heads, options, message):
    refused(message, SelfAttention, 48, heads, "t", **options)
