"""Functions of torch that are many operations in one, written out: glue follows each of them by its own rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def multi_head_attention(
    query: Tensor, key: Tensor, value: Tensor, embed_dim: int, heads: int, in_weight: Tensor | None,
    in_bias: Tensor | None, bias_k: Any, bias_v: Any, add_zero_attn: bool, dropout_p: float, out_weight: Tensor,
    out_bias: Tensor | None, training: bool = True, key_padding_mask: Tensor | None = None, need_weights: bool = True,
    attn_mask: Tensor | None = None, use_separate_proj_weight: bool = False, q_proj_weight: Any = None,
    k_proj_weight: Any = None, v_proj_weight: Any = None, static_k: Any = None, static_v: Any = None,
    average_attn_weights: bool = True, is_causal: bool = False,
) -> tuple[Tensor, None] | None:  # fmt: skip
    """`F.multi_head_attention_forward` of (l b c); None of what is not written out: its weights, dropout, more keys.

    Masks are True, or -inf, where nothing is to be seen; `is_causal` only says what `attn_mask` is.
    """
    rare = (bias_k, bias_v, static_k, static_v)
    if need_weights or query.dim() != 3 or any(x is not None for x in rare) or add_zero_attn:
        return None
    if (training and dropout_p) or (is_causal and attn_mask is None):
        return None
    if use_separate_proj_weight:
        weights = [q_proj_weight, k_proj_weight, v_proj_weight]
    else:
        assert in_weight is not None
        weights = list(in_weight.chunk(3))
    biases = [None] * 3 if in_bias is None else in_bias.chunk(3)
    q, k, v = (
        F.linear(x, w, b).unflatten(-1, (heads, -1)).permute(1, 2, 0, 3)
        for x, w, b in zip((query, key, value), weights, biases)
    )  # (b h l e)
    mask = None if attn_mask is None else added(attn_mask, q)
    if mask is not None and mask.dim() == 3:
        mask = mask.unflatten(0, (-1, heads))
    if key_padding_mask is not None:
        padding = added(key_padding_mask, q)[:, None, None]
        mask = padding if mask is None else mask + padding
    y = F.scaled_dot_product_attention(q, k, v, mask)
    return F.linear(y.permute(2, 0, 1, 3).flatten(2), out_weight, out_bias), None


def added(mask: Tensor, like: Tensor) -> Tensor:
    """A mask as numbers to be added to the logits."""
    if mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -torch.inf)


def batch_second(function: Callable[..., Any]) -> Callable[..., Any]:
    """A recurrence of (b l c) as one of (l b c), where samples are the same dim of all it takes and gives."""

    def run(x: Tensor, states: Any, weights: Any, *rest: Any) -> Any:
        if not isinstance(weights, (list, tuple)) or len(rest) != 6 or not rest[-1]:
            return None
        out, *last = function(x.transpose(0, 1), states, weights, *rest[:-1], False)
        return out.transpose(0, 1), *last

    return run


def expand_as(x: Tensor, other: Tensor) -> Tensor:
    """Nothing but a shape is read of the other."""
    return x.expand(other.shape)


WRITTEN_OUT: dict[Any, Callable[..., Any]] = {
    Tensor.expand_as: expand_as,
    F.multi_head_attention_forward: multi_head_attention,
    **{f: batch_second(f) for f in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)},
}
