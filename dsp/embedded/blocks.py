"""Attention to one block of keys: its output and log-sum-exp, by which blocks are added up, and its backward.

The softmax over all keys is a mean of the softmaxes over blocks, weighted by exp(lse_block - lse_all). The gradient of
a block needs only the total output and the total lse, over all blocks: p = exp(q k - lse_all), as in FlashAttention
(Dao et al., arXiv 2205.14135).

Letters: b batch, n queries, m keys of the block, h heads, g heads of keys and values, e channels of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

aten = torch.ops.aten


def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Combine two outputs (b n h e) over different keys, each with its lse (b h n)."""
    total = torch.logaddexp(lse, more_lse)
    old, new = ((x - total).exp().transpose(1, 2).unsqueeze(-1) for x in (lse, more_lse))
    return out * old + more * new, total


def block(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """q (b n h e), k and v (b m g e) -> output (b n h e) and lse (b h n), in fp32 at least."""
    wide = torch.promote_types(q.dtype, torch.float32)
    q, k, v = _heads_first(q, k, v)
    kind = _kernel(q)
    if kind == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    elif kind == "flash":
        out, lse = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]
    elif kind == "efficient":
        out, lse = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal)[:2]
        lse = lse[..., : q.shape[2]]  # the kernel pads it
    else:
        logits = _logits(q, k, causal)
        lse = logits.logsumexp(-1)
        out = (logits - lse[..., None]).exp().to(v.dtype) @ v
    return out.transpose(1, 2).to(wide), lse.to(wide)


def block_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The contribution of one block to the gradients of q, k and v, in fp32 at least.

    `grad` and `out` (b n h e) and `lse` (b h n) are those of all blocks together.
    """
    wide, groups = torch.promote_types(q.dtype, torch.float32), k.shape[2]
    q, k, v = _heads_first(q, k, v)
    grad, out = grad.transpose(1, 2), out.transpose(1, 2)
    kind = _kernel(q)
    if kind == "cpu":
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, causal)
    elif kind == "flash":
        none = torch.zeros(2, dtype=torch.uint64, device=q.device)  # the random state of a dropout, which is unused
        dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, causal, none, none[0]
        )
    elif kind == "efficient":
        padded = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf)
        seed = torch.zeros((), dtype=torch.int64, device=q.device)
        dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
            grad, q, k, v, None, out, padded, seed, seed, 0.0, [True, True, True, False], causal
        )
    else:
        p = (_logits(q, k, causal) - lse[..., None]).exp()
        grad, out = grad.to(wide), out.to(wide)
        dv = p.transpose(-1, -2) @ grad
        ds = p * (grad @ v.to(wide).transpose(-1, -2) - (grad * out).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
        dq, dk = ds @ k.to(wide), ds.transpose(-1, -2) @ q.to(wide)

    def whole_heads(x: Tensor) -> Tensor:
        return x.to(wide).unflatten(1, (groups, -1)).sum(2).transpose(1, 2)

    return dq.transpose(1, 2).to(wide), whole_heads(dk), whole_heads(dv)


def _heads_first(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as (b h n e), with a head of keys and values repeated for each query head that shares it."""
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def _logits(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    logits = q.to(wide) @ k.to(wide).transpose(-1, -2) * q.shape[-1] ** -0.5
    if causal:
        later = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        logits = logits.masked_fill(later, -torch.inf)
    return logits


def _kernel(q: Tensor) -> str:
    """The name of a PyTorch kernel that returns an lse and accepts q (b h n e); "math" if none does."""
    if q.device.type == "cpu":
        return "cpu"
    half = q.dtype in (torch.float16, torch.bfloat16)
    if q.device.type != "cuda" or len(q) > 65535 or q.shape[-1] % 8 or not (half or q.dtype == torch.float32):
        return "math"
    modern = torch.cuda.get_device_capability(q.device) >= (8, 0)
    return "flash" if half and modern and q.shape[-1] <= 256 else "efficient"
