"""The rules of attention that torch cannot train on a CPU: flex_attention, and samples packed in a row."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dsp.comm.layout import Cut
from dsp.core.torch_calls import GlueError, Operand
from dsp.glue.rules import RULES, Frame, attention
from dsp.glue.rules import flex as rule
from tools.prover.forms import x
from tools.prover.prover import Call, prove

B, H, N, C = 3, 4, 10, 4
STEP = 4  # places in a block of the mask: no chunk of 10 places ends with one


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel as torch writes it out in numbers, forward and backward, on a CPU too."""
    pytest.importorskip("torch.nn.attention.flex_attention")
    monkeypatch.setattr(rule, "kernel", lambda backend: torch.ops.higher_order.flex_attention)


def masked(b: Any, h: Any, i: Any, j: Any) -> Any:
    """Other for each sample and each head, and for no two places alike."""
    return (j <= i + b) | ((i + j) % (h + 2) == 0)


def biased(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return score * (1 + 0.1 * h) - 0.05 * (b + 1) * (i - j).abs() + 0.01 * i


def call(samples: int | None, heads: int | None, shared: int = H, keys: int = B) -> Call:
    from torch.nn.attention.flex_attention import create_block_mask

    blocks = create_block_mask(masked, samples, heads, N, N, device="cpu", BLOCK_SIZE=STEP).as_tuple()
    options = {"BACKEND": "AUTO", "PRESCALE_QK": False, "OUTPUT_LOGSUMEXP": True, "OUTPUT_MAX": True}
    args = x(B, H, N, C), x(keys, shared, N, C), x(keys, shared, N, 2), biased, blocks, 0.5, options
    return Call(rule.flex_attention, args)


CUTS = (Cut(0), Cut(1), Cut(1, 2), Cut(2), Cut(3))
ALL = [(q, k, v) for c in CUTS for q in (c, None) for k in (c, None) for v in (c, None) if q or k or v]


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(B, H), (None, None), (B, None, 2), (None, H, 1, 1)], ids=str)
def test_flex_attention(uncompiled: None, shape: Any) -> None:
    """Over all layouts of queries, keys and values: right forward and backward, whatever its functions read."""
    of = call(*shape)
    others = [None] * len([t for t in of.args[4] if isinstance(t, Tensor)])
    layouts = [(*cuts, *others) for cuts in (*ALL, (Cut(0), Cut(1), None), (Cut(2), Cut(1), Cut(1)))]
    for n in (3, 2) if shape == (B, H) else (3,):
        proof = prove(of, n, only=layouts)
        assert not proof.wrong, "\n".join(proof.wrong)
        right = {cuts[:3] for cuts, found in proof.verdicts.items() if found == "ok"}
        assert {(Cut(1),) * 3, (Cut(1), None, None), (Cut(2), None, None), (Cut(0), None, None)} <= right
        assert not {(Cut(3),) * 3, (Cut(2),) * 3, (Cut(0), Cut(1), None)} & right


ENDS = torch.tensor([0, 3, 3, 10], dtype=torch.int32)


def reference(q: Tensor, k: Tensor, v: Tensor, q_ends: Tensor, k_ends: Tensor, *rest: Any, scale: Any = None) -> Any:
    """Attention of (total h d), each sample by itself, and the logarithm of its sum of exponentials, (h total)."""
    each = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(each, 1) for t in (k, v))
    of = [torch.bucketize(torch.arange(len(t)), ends[1:], right=True) for t, ends in ((q, q_ends), (k, k_ends))]
    scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(of[0][:, None] != of[1], -torch.inf)
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1), v), scores.logsumexp(-1)


@pytest.mark.parametrize("shared", [H, 2, 1])
def test_samples_packed_in_a_row(monkeypatch: pytest.MonkeyPatch, shared: int) -> None:
    """Along heads, whose results lie in another dim of the kernel's second one; never along the row."""
    monkeypatch.setattr(attention, "kernel", reference)
    of = Call(attention.varlen_attn, (x(N, H, C), x(N, shared, C), x(N, shared, C), ENDS, ENDS, 7, 7))
    cuts = [(*cuts, None, None) for cuts in (*ALL, (Cut(0), Cut(1), None))]
    for n in (2, 3):
        proof = prove(of, n, only=[*cuts, (Cut(1), None, None, Cut(0), None)])
        assert not proof.wrong, "\n".join(proof.wrong)
        right = {cuts[:3] for cuts, found in proof.verdicts.items() if found == "ok"}
        assert {(Cut(1),) * 3, (Cut(1), None, None), (None, Cut(1), Cut(1))} <= right
        assert {cut.dim for cuts in right for cut in cuts if cut} == {1}
    along = (Operand((N, H, C), Cut(0)), *(Operand((N, H, C)) for _ in "kv"), ENDS, ENDS, 7, 7)
    with pytest.raises(GlueError, match=r"samples are packed along the sharded dim.* Let it run along the heads"):
        RULES["varlen_attn"](Frame("varlen_attn", along, {}, 2))
