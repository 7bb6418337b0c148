"""Rules of products: linear maps, matrices, attention, lookups."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from dsp.layout import Cut, chunk
from dsp.rows import Rows
from dsp.rules.call import Frame, Operand, Outcome, align, first, rule


@rule("linear")
def linear(f: Frame) -> Outcome:
    x, cut = first(f)
    if cut.dim == x.ndim - 1:
        raise f.refuse("it sums over the sharded dim")
    return Outcome(cut, x.shape[cut.dim])


@rule("matmul bmm mm rmatmul")
def matmul(f: Frame) -> Outcome:
    a, b = f.get(0, "input"), f.get(1, "mat2" if "mat2" in f.kwargs else "other")
    if f.name == "rmatmul":
        a, b = b, a
    if a.ndim < 2 or b.ndim < 2:
        raise f.refuse("a vector product with a sharded tensor")
    ndim = max(a.ndim, b.ndim)
    for x, y, keeps, sums in ((a, b, -2, -1), (b, a, -1, -2)):
        if x.cut is None:
            continue
        position = x.cut.dim - x.ndim
        if position == sums:
            raise f.refuse("it sums over the sharded dim")
        if position == keeps:
            if y.cut is not None:
                raise f.refuse("its tensors are sharded along different dims")
            return Outcome(Cut(ndim + position, x.cut.outer), x.shape[x.cut.dim])
    return align(f, [a, b])[1]


def spelled_out(equation: str, ndims: Sequence[int]) -> tuple[str, str]:
    """An einsum equation with letters for `...`, which stands for dims aligned at the right, and with its output."""
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    spare = [letter for letter in string.ascii_letters if letter not in equation]
    terms = []
    longest = ""
    for term, ndim in zip(inputs.split(","), ndims):
        count = ndim - len(term.replace("...", "")) if "..." in term else 0
        dots = "".join(spare[:count][::-1])
        longest = max(longest, dots, key=len)
        terms.append(term.replace("...", dots))
    if not arrow:
        once = sorted(c for c in set("".join(terms)) - set(longest) if "".join(terms).count(c) == 1)
        output = "..." + "".join(once) if longest else "".join(once)
    return ",".join(terms), output.replace("...", longest)


@rule("einsum")
def einsum(f: Frame) -> Outcome:
    equation = f.args[0]
    operands = list(f.args[1]) if isinstance(f.args[1], (list, tuple)) else list(f.args[1:])
    if not isinstance(equation, str):
        raise f.refuse("write the equation as a string")
    return by_equation(f, equation, operands)


def by_equation(f: Frame, equation: str, operands: Sequence[Operand]) -> Outcome:
    """Of a sum of products, or what mixes dims as one does, as einsum writes it."""
    inputs, output = spelled_out(equation, [o.ndim for o in operands])
    terms = inputs.split(",")
    letters = {(terms[i][o.cut.dim], o.cut.outer) for i, o in enumerate(operands) if o.cut}
    if len(letters) > 1:
        raise f.refuse("its tensors are sharded along different dims")
    ((letter, outer),) = letters
    if letter not in output:
        raise f.refuse(f"it sums over the sharded dim {letter!r}")
    sizes = {o.shape[term.index(letter)] for term, o in zip(terms, operands) if letter in term}
    outcome = Outcome(Cut(output.index(letter), outer), next(iter(sizes - {1}), 1))
    for i, (term, o) in enumerate(zip(terms, operands)):
        if term.count(letter) > 1:
            raise f.refuse(f"it takes a diagonal of the sharded dim {letter!r}")
        have = o.shape[term.index(letter)] if letter in term else 1
        if o.cut is not None and have != outcome.size:
            raise f.refuse(f"a tensor has {have} where the sharded dim has {outcome.size}")
        if o.cut is None and have > 1:  # else it broadcasts
            outcome.narrow[i] = Cut(term.index(letter), outer)
    return outcome


@rule("cdist")
def distances(f: Frame) -> Outcome:
    """By products where the whole has many points, as torch does by itself, whose choice would be of the part's."""
    a, b, mode = f.get(0, "x1"), f.get(1, "x2"), f.get(3, "compute_mode", "use_mm_for_euclid_dist_if_necessary")
    if mode == "use_mm_for_euclid_dist_if_necessary":
        many = a.shape[-2] > 25 or b.shape[-2] > 25
        mode = "use_mm_for_euclid_dist" if many else "donot_use_mm_for_euclid_dist"
    outcome = by_equation(f, "...pm,...rm->...pr", [a, b])
    outcome.args, outcome.kwargs = (a, b, f.get(2, "p", 2.0), mode), {}
    return outcome


@rule("scaled_dot_product_attention")
def attention(f: Frame) -> Outcome:
    q, k, v = (f.get(i, name) for i, name in enumerate(("query", "key", "value")))
    mask = f.get(3, "attn_mask")
    operands = [o for o in (q, k, v, mask) if isinstance(o, Operand)]
    rows = [o for o in (q, mask) if isinstance(o, Operand) and o.ndim > 1]  # both have the queries' positions
    place = {id(o): o.cut.dim - o.ndim for o in operands if o.cut is not None}
    if set(place.values()) == {-3} and f.kwargs.get("enable_gqa") and q.shape[-3] != k.shape[-3]:
        return grouped(f, q, k, v, mask)
    if any(at == -1 for at in place.values()) or -2 in (place.get(id(k)), place.get(id(v))):
        raise f.refuse("it computes over the sharded dim")
    along_rows = place.get(id(q)) == -2
    if not along_rows and -2 in place.values():
        raise f.refuse("the mask is sharded along the queries, which are whole")
    if along_rows and f.get(5, "is_causal", False):
        raise f.refuse("a causal mask counts local positions")
    if along_rows and (id(k) in place or id(v) in place):
        raise f.refuse("its tensors are sharded along different dims")
    position, outcome = align(f, rows if along_rows else operands)
    assert outcome.cut is not None
    outcome.cut = Cut(max(o.ndim for o in operands) + position, outcome.cut.outer)
    outcome.func = _attend
    return outcome


def grouped(f: Frame, q: Operand, k: Operand, v: Operand, mask: Any) -> Outcome:
    """Attention along heads of which several share a head of keys: a rank reads those that its own queries need."""
    heads, shared = q.shape[-3], k.shape[-3]
    sharded = [o for o in f.operands() if o.cut is not None]
    if shared != v.shape[-3] or any(o.cut.outer > 1 or (o is mask and o.shape[-3] != heads) for o in sharded if o.cut):
        raise f.refuse("its heads do not come in groups that share one of keys and one of values")
    each = heads // shared
    spans = []
    for rank in range(f.n):
        start, length = chunk(heads, f.n, rank)
        spans.append((start // each, -(-(start + length) // each)) if length else (0, 0))
    start, length = chunk(heads, f.n, f.rank)
    outcome = Outcome(Cut(max(o.ndim for o in (q, k, v)) - 3), heads)
    for i, o in enumerate(f.operands()):
        if o is k or o is v:
            outcome.rows[i] = (Rows(o.ndim - 3, shared, tuple(spans)),)
        elif o.cut is None and (o is q or o is mask) and o.ndim > 2 and o.shape[-3] > 1:
            outcome.narrow[i] = Cut(o.ndim - 3)

    def local(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if start % each or length % each or not length:  # not whole groups
            own = torch.arange(start, start + length, device=key.device) // each - start // each
            key, value = (t.index_select(-3, own) for t in (key, value))
            kwargs["enable_gqa"] = False
        return _attend(query, key, value, *args, **kwargs)

    outcome.func = local
    return outcome


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    mask = args[0] if args else kwargs.get("attn_mask")
    lead = [*query.shape[:-1], *key.shape[:-2], *value.shape[:-2], *(mask.shape[:-2] if mask is not None else ())]
    if 0 not in lead:
        return F.scaled_dot_product_attention(query, key, value, *args, **kwargs)
    # a rank that holds nothing: some kernels divide by its size. All operands take part, for they may want gradients
    if kwargs.get("enable_gqa"):
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    scores = query @ key.transpose(-2, -1)
    return (scores if mask is None else scores + mask) @ value


@rule("embedding")
def embedding(f: Frame) -> Outcome:
    x, cut = first(f)
    return Outcome(cut, x.shape[cut.dim])


@rule("one_hot")
def one_hot(f: Frame) -> Outcome:
    if f.get(1, "num_classes", -1) < 0:
        raise f.refuse("how many classes there are it counts in what a rank holds", "Pass num_classes")
    return embedding(f)
