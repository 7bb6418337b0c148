"""Rules of attention: torch's fused attention, and attention over samples packed in one row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from dsp.comm.balanced_rows import RowDeal
from dsp.comm.halo import Rows
from dsp.comm.layout import Cut, chunk
from dsp.core.torch_calls import Operand
from dsp.glue.rules.call import DealtRows, Frame, Outcome, align, rule

Heads = Callable[[Tensor], Tensor]  # from the key heads that a rank read to one for each of its query heads


@rule("scaled_dot_product_attention", piecewise=True)
def attention(f: Frame) -> Outcome:
    q, k, v = (f.get(i, name) for i, name in enumerate(("query", "key", "value")))
    mask = f.get(3, "attn_mask")
    operands = [o for o in (q, k, v, mask) if isinstance(o, Operand)]
    rows = [o for o in (q, mask) if isinstance(o, Operand) and o.ndim > 1]  # both have positions of queries
    place = {id(o): o.cut.dim - o.ndim for o in operands if o.cut is not None}
    if set(place.values()) == {-3} and f.kwargs.get("enable_gqa") and q.shape[-3] != k.shape[-3]:
        return grouped(f, q, k, v, mask)
    if -1 in place.values() or -2 in (place.get(id(k)), place.get(id(v))):
        raise f.refuse("it computes over the sharded dim")
    ndim = max(o.ndim for o in operands)
    if place.get(id(q)) == -2:
        return along_queries(f, q, k, v) or aligned(f, rows, ndim)
    if -2 in place.values():
        raise f.refuse("the mask is sharded along the queries, which are whole")
    return aligned(f, operands, ndim)


def aligned(f: Frame, operands: Sequence[Operand], ndim: int) -> Outcome:
    """Sharded along a dim that these operands share, with results of `ndim` dims."""
    position, outcome = align(f, operands)
    assert outcome.cut is not None
    outcome.cut = Cut(ndim + position, outcome.cut.outer)
    outcome.func = _attend
    return outcome


def along_queries(f: Frame, q: Operand, k: Operand, v: Operand) -> Outcome | None:
    """With a causal mask: queries are dealt to the ranks, head and tail, and results sent back. Else None."""
    assert q.cut is not None
    if k.cut or v.cut:
        raise f.refuse("its tensors are sharded along different dims")
    if not f.get(5, "is_causal", False):
        return None
    size, ndims = q.shape[-2], [o.ndim for o in f.operands()]
    if q.cut.outer != 1 or k.shape[-2] != size or any(have != q.ndim for have in ndims):
        raise f.refuse(
            "is_causal=True along sharded queries needs as many keys as queries, one number of dims in all tensors, "
            "and queries in no fold"
        )
    deal = RowDeal.halves(size, f.n)
    spans = deal.spans(f.rank)

    def local(query: Tensor, key: Tensor, value: Tensor, *positional: Any, **options: Any) -> Tensor:
        named = options | dict(zip(("attn_mask", "dropout_p", "is_causal"), positional))
        named = {name: option for name, option in named.items() if name not in ("attn_mask", "is_causal")}
        if not spans:
            return _attend(query, key, value, **named)
        pieces = zip(query.split([stop - start for start, stop in spans], -2), spans)
        outputs = [last_rows(q, key.narrow(-2, 0, k), value.narrow(-2, 0, k), **named) for q, (_, k) in pieces]
        return torch.cat(outputs, -2)

    place = next(i for i, o in enumerate(f.operands()) if o is q)
    return Outcome(Cut(q.ndim - 2), size, func=local, deal=DealtRows(place, deal), load=deal.causal_load)


def last_rows(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Causal attention of the last queries to all keys."""
    rows, places = query.shape[-2], key.shape[-2]
    if rows == places or 0 in query.shape[:-1]:
        return _attend(query, key, value, is_causal=True, **options)
    if _flash_takes(query, value):
        if options.pop("enable_gqa", False):
            key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
        dropout = options.pop("dropout_p", 0.0)
        # in this kernel the last query sees all keys
        return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, dropout, True, **options)[0]
    seen = torch.ones(rows, places, dtype=torch.bool, device=query.device).tril(places - rows)
    return F.scaled_dot_product_attention(query, key, value, seen, **options)


def _flash_takes(query: Tensor, value: Tensor) -> bool:
    """Tell whether the flash kernel, which needs no mask in memory, accepts these tensors."""
    if query.device.type != "cuda" or query.dtype not in (torch.float16, torch.bfloat16) or query.ndim != 4:
        return False
    width, modern = query.shape[-1], torch.cuda.get_device_capability(query.device) >= (8, 0)
    return modern and width == value.shape[-1] and width % 8 == 0 and width <= 256


def shared_heads(f: Frame, q: Operand, k: Operand, v: Operand, at: int) -> tuple[Outcome, Heads | None]:
    """Sharded along heads, dim `at` (negative), if query heads share key heads: a rank reads those that it needs.

    The second result gives each query head its key head; None if this rank has only full groups.
    """
    heads, shared = q.shape[at], k.shape[at]
    if shared != v.shape[at] or heads % shared or any(o.cut.outer != 1 for o in (q, k, v) if o.cut):
        raise f.refuse("its query heads do not divide evenly among its heads of keys and values")
    each = heads // shared
    spans = []
    for rank in range(f.n):
        start, length = chunk(heads, f.n, rank)
        spans.append((start // each, -(-(start + length) // each)) if length else (0, 0))
    start, length = chunk(heads, f.n, f.rank)
    outcome = Outcome(Cut(max(o.ndim for o in (q, k, v)) + at), heads)
    for i, o in enumerate(f.operands()):
        if o is k or o is v:
            outcome.rows[i] = (Rows(o.ndim + at, shared, tuple(spans)),)
        elif o is q and q.cut is None:
            outcome.narrow[i] = Cut(o.ndim + at)
    if not (start % each or length % each or not length):
        return outcome, None

    def expand(t: Tensor) -> Tensor:
        return t.index_select(at, torch.arange(start, start + length, device=t.device) // each - start // each)

    return outcome, expand


def grouped(f: Frame, q: Operand, k: Operand, v: Operand, mask: Any) -> Outcome:
    if isinstance(mask, Operand) and mask.cut and (mask.cut.outer != 1 or mask.shape[-3] != q.shape[-3]):
        raise f.refuse("its mask is not sharded along the heads of its queries")
    outcome, expand = shared_heads(f, q, k, v, -3)
    for i, o in enumerate(f.operands()):
        if o is mask and o.cut is None and o.ndim > 2 and o.shape[-3] > 1:
            outcome.narrow[i] = Cut(o.ndim - 3)

    def local(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if expand is not None:
            key, value, kwargs["enable_gqa"] = expand(key), expand(value), False
        return _attend(query, key, value, *args, **kwargs)

    outcome.func = local
    return outcome


def _attend(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    mask = args[0] if args else kwargs.get("attn_mask")
    lead = [*query.shape[:-1], *key.shape[:-2], *value.shape[:-2], *(mask.shape[:-2] if mask is not None else ())]
    if 0 not in lead:
        return F.scaled_dot_product_attention(query, key, value, *args, **kwargs)
    # an empty shard: some kernels divide by its size. All operands take part, since they may need gradients
    if kwargs.get("enable_gqa"):
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    scores = query @ key.transpose(-2, -1)
    return (scores if mask is None else scores + mask) @ value


def varlen_attn(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    """The kernel of `torch.nn.attention.varlen`, of (total h d), as one operation of glue: (total h d), lse (total h).

    options: the offsets of samples among queries and among keys, the longest of each, and the kernel's options.
    """
    if has_torch_function((query, key, value)):
        return handle_torch_function(varlen_attn, (query, key, value), query, key, value, *options)
    parts = (t.view_as(t) for t in (query, key, value))  # plain views, which the kernel keeps for backward
    out, lse, *_ = kernel(*parts, *options)
    return out, lse.transpose(0, 1)


def kernel(*args: Any) -> Any:
    return torch.ops.torch_attn._varlen_attn(*args)


def packed(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The kernel's results, with heads in different dims, from the operation that has them in one dim."""
    out, lse = varlen_attn(*args, *kwargs.values())
    return out, lse.transpose(0, 1), torch.empty(0, device=out.device)


ALONG_HEADS = (
    "Let it run along the heads, with (total heads channels) between stages, or make a stage of it, a submodule with a "
    "pattern that keeps the packed dim in brackets"
)
PACKED = "samples are packed along the sharded dim, and their offsets count positions of the whole dim"


@rule("varlen_attn")
def varlen(f: Frame) -> Outcome:
    """Sharded along heads, (total h d)."""
    q, k, v = f.args[:3]
    for o in f.operands():
        if o.cut is not None and o not in (q, k, v):
            raise f.refuse("the offsets of its samples are sharded", "Leave the offsets out of the root pattern")
        if o.cut is not None and o.cut.dim != o.ndim - 2:
            raise f.refuse(PACKED if o.cut.dim == 0 else "it computes over the sharded dim", ALONG_HEADS)
    if k.ndim != 3:
        raise f.refuse("its keys are in pages, and each rank has pages of its own", ALONG_HEADS)
    if q.shape[1] == k.shape[1]:
        outcome, expand = align(f, [q, k, v])[1], None
    else:
        outcome, expand = shared_heads(f, q, k, v, -2)

    def local(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
        if expand is not None:
            key, value = expand(key), expand(value)
        if query.shape[1]:
            return varlen_attn(query, key, value, *options)
        out = query + key.sum() + value.sum()  # empty, with gradients for all operands
        return out, out.sum(-1).to(torch.float64 if out.dtype == torch.float64 else torch.float32)

    outcome.func = local
    return outcome
