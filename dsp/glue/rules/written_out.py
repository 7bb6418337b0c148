"""Composite functions of torch, written out as operations that glue follows one by one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dsp.core.torch_traits import KERNELS, KEYWORDS, WITHOUT_DATA, WRITTEN_OUT, traits_of
from dsp.glue.rules.attention import packed
from dsp.glue.rules.flex import flex_attention, without_data


def multi_head_attention(
    query: Tensor, key: Tensor, value: Tensor, embed_dim: int, heads: int, in_weight: Tensor | None,
    in_bias: Tensor | None, bias_k: Any, bias_v: Any, add_zero_attn: bool, dropout_p: float, out_weight: Tensor,
    out_bias: Tensor | None, training: bool = True, key_padding_mask: Tensor | None = None, need_weights: bool = True,
    attn_mask: Tensor | None = None, use_separate_proj_weight: bool = False, q_proj_weight: Any = None,
    k_proj_weight: Any = None, v_proj_weight: Any = None, static_k: Any = None, static_v: Any = None,
    average_attn_weights: bool = True, is_causal: bool = False,
) -> tuple[Tensor, Tensor | None] | None:  # fmt: skip
    """`F.multi_head_attention_forward` of (l b c); None for cases not written out: no batch dim, added keys.

    Masks are True, or -inf, where attention is not allowed; `is_causal` only describes `attn_mask`.
    """
    rare = (bias_k, bias_v, static_k, static_v)
    if query.dim() != 3 or any(x is not None for x in rare) or add_zero_attn:
        return None
    if is_causal and attn_mask is None:
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
    dropout_p = dropout_p if training else 0.0
    shares = None
    if need_weights:
        y, shares = weighted(q, k, v, mask, dropout_p)
        shares = shares.mean(1) if average_attn_weights else shares
    else:
        y = F.scaled_dot_product_attention(q, k, v, mask, dropout_p)
    return F.linear(y.permute(2, 0, 1, 3).flatten(2), out_weight, out_bias), shares


def weighted(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float) -> tuple[Tensor, Tensor]:
    """Attention that returns its weights too."""
    logits = (q * math.sqrt(1 / q.shape[-1])) @ k.mT
    shares = (logits if mask is None else logits + mask).softmax(-1)
    shares = F.dropout(shares, dropout_p) if dropout_p else shares
    return shares @ v, shares


def added(mask: Tensor, like: Tensor) -> Tensor:
    """A mask as numbers that are added to the logits."""
    if mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -torch.inf)


def batch_second(function: Callable[..., Any]) -> Callable[..., Any]:
    """A recurrence of (b l c) as one of (l b c), in which samples are the same dim of all inputs and results."""

    def run(x: Tensor, states: Any, weights: Any, *options: Any) -> Any:
        if not isinstance(weights, (list, tuple)) or len(options) != 6 or not options[-1]:
            return None
        out, *last = function(x.transpose(0, 1), states, weights, *options[:-1], False)
        return out.transpose(0, 1), *last

    return run


def set_where(x: Tensor, index: Any, value: Any) -> Tensor | None:
    """``x[mask] = value``, a number or one row for all places; None for other indices, for a row for each place, and if
    x's dtype would change the value."""
    if not isinstance(index, Tensor) or index.dtype is not torch.bool or not 0 < index.dim() <= x.dim():
        return None
    row_dims = x.dim() - index.dim()
    index = index[(..., *[None] * row_dims)]
    if not isinstance(value, Tensor):
        return x.masked_fill_(index, value) if x.is_floating_point() or not isinstance(value, float) else None
    if value.dtype != x.dtype or value.dim() > row_dims + 1 or (value.dim() > row_dims and value.shape[0] != 1):
        return None
    if not value.dim():
        return x.masked_fill_(index, value)
    return x.copy_(torch.where(index, value[0] if value.dim() > row_dims else value, x))


def expand_as(x: Tensor, other: Tensor) -> Tensor:
    """`expand_as`, which reads only the shape of the other tensor."""
    return x.expand(other.shape)


def type_of(x: Tensor, dtype: Any = None, non_blocking: bool = False) -> Any:
    """`Tensor.type()` without a dtype: the name of the type."""
    with torch._C.DisableTorchFunction():
        return torch.empty(0, dtype=x.dtype, device=x.device).type() if dtype is None else None


def add_product(x: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """`addmm` and `baddbmm`: beta x + alpha a @ b, without x if beta is 0; a linear map is kept as one."""
    if x.dim() == 1 and a.dim() == 2 and beta == alpha == 1:
        return F.linear(a, b.t(), x)
    y = a @ b if alpha == 1 else alpha * (a @ b)
    return y if beta == 0 else y + (x if beta == 1 else beta * x)


def hstack(tensors: Sequence[Tensor]) -> Tensor | None:
    return torch.cat(list(tensors), int(tensors[0].dim() > 1)) if min(t.dim() for t in tensors) else None


def vstack(tensors: Sequence[Tensor]) -> Tensor | None:
    return torch.cat([t[None] if t.dim() == 1 else t for t in tensors]) if min(t.dim() for t in tensors) else None


def column_stack(tensors: Sequence[Tensor]) -> Tensor | None:
    return torch.cat([t[:, None] if t.dim() == 1 else t for t in tensors], 1) if min(t.dim() for t in tensors) else None


def difference(x: Tensor, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None) -> Tensor | None:
    """`torch.diff`: differences of successive rows."""
    if prepend is not None or append is not None or x.dtype is torch.bool or n > x.shape[dim]:
        return None
    for _ in range(n):
        x = x.narrow(dim, 1, x.shape[dim] - 1) - x.narrow(dim, 0, x.shape[dim] - 1)
    return x


def prelu(x: Tensor, weight: Tensor) -> Tensor:
    slope = weight.view(-1, *[1] * (x.dim() - 2)) if x.dim() > 1 and weight.numel() > 1 else weight
    return torch.where(x > 0, x, slope * x)


def pad(x: Tensor, pad: Sequence[Any], mode: str = "constant", value: float | None = None) -> Tensor | None:
    """Padding by amounts that are tensors, whose numbers are read."""
    return F.pad(x, list(map(int, pad)), mode, value) if any(isinstance(a, Tensor) for a in pad) else None


def outer(x: Tensor, vec2: Tensor) -> Tensor:
    return x[:, None] * vec2


def cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """Lengths below eps count as eps, but have the gradient of the length, as in torch."""

    def unit(x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=dim, keepdim=True)
        return x / (length + (length.clamp_min(eps) - length).detach())

    return (unit(x1) * unit(x2)).sum(dim)


def kl_div(
    x: Tensor, target: Tensor, size_average: Any = None, reduce: Any = None, reduction: str = "mean",
    log_target: bool = False,
) -> Tensor | None:  # fmt: skip
    if size_average is not None or reduce is not None:
        return None
    each = target.exp() * (target - x) if log_target else torch.xlogy(target, target) - target * x
    if reduction == "batchmean":
        return each.sum() / x.shape[0]
    return getattr(each, reduction)() if reduction in ("mean", "sum") else each


def cross_entropy(
    x: Tensor, target: Tensor, weight: Any = None, size_average: Any = None, ignore_index: int = -100,
    reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> Tensor | None:  # fmt: skip
    """Cross-entropy of (b classes ...) and classes (b ...); None for class weights or distributions as targets."""
    if weight is not None or size_average is not None or reduce is not None or x.dim() == target.dim():
        return None
    x = x.log_softmax(int(x.dim() > 1))
    return likelihood(x, target, ignore_index=ignore_index, reduction=reduction, smooth=label_smoothing)


def likelihood(
    x: Tensor, target: Tensor, weight: Any = None, size_average: Any = None, ignore_index: int = -100,
    reduce: Any = None, reduction: str = "mean", smooth: float = 0.0,
) -> Tensor | None:  # fmt: skip
    """`F.nll_loss`; a share `smooth` of the target is spread evenly over classes."""
    if weight is not None or size_average is not None or reduce is not None:
        return None
    dim = int(x.dim() > 1)
    ignored = target == ignore_index
    each = -x.gather(dim, target.masked_fill(ignored, 0).unsqueeze(dim)).squeeze(dim)
    if smooth:
        each = (1 - smooth) * each - smooth * x.mean(dim)
    each = each.masked_fill(ignored, 0.0)
    if reduction == "none":
        return each
    return each.sum() if reduction == "sum" else each.sum() / (~ignored).sum()


FUNCTIONS: dict[Any, Callable[..., Any]] = {
    Tensor.__setitem__: set_where,
    Tensor.expand_as: expand_as,
    F.multi_head_attention_forward: multi_head_attention,
    Tensor.type: type_of,
    **dict.fromkeys((torch.addmm, Tensor.addmm, torch.baddbmm, Tensor.baddbmm), add_product),
    F.pad: pad,
    torch.hstack: hstack,
    **dict.fromkeys((torch.vstack, torch.row_stack), vstack),
    torch.column_stack: column_stack,
    **dict.fromkeys((torch.diff, Tensor.diff), difference),
    **dict.fromkeys((F.prelu, torch.prelu, Tensor.prelu), prelu),
    **dict.fromkeys((F.cosine_similarity, torch.cosine_similarity), cosine_similarity),
    **dict.fromkeys((torch.outer, Tensor.outer, torch.ger, Tensor.ger), outer),
    F.kl_div: kl_div,
    F.cross_entropy: cross_entropy,
    F.nll_loss: likelihood,
    **{f: batch_second(f) for f in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)},
}
WRITTEN_OUT.update(FUNCTIONS)
KERNELS.update({
    "flex_attention": flex_attention,
    **dict.fromkeys(("torch_attn._varlen_attn", "torch_attn._varlen_attn.default"), packed),
})  # fmt: skip
WITHOUT_DATA[flex_attention] = without_data
KEYWORDS.update({
    "input": "x", "self": "x", "mat1": "a", "batch1": "a", "mat2": "b", "batch2": "b",
    "embed_dim_to_check": "embed_dim", "num_heads": "heads", "in_proj_weight": "in_weight", "in_proj_bias": "in_bias",
    "out_proj_weight": "out_weight", "out_proj_bias": "out_bias",
})  # fmt: skip
traits_of.cache_clear()  # drops entries made before these tables were filled
