"""The operations of the Evoformer (AlphaFold 2) and the Pairformer (AlphaFold 3), each divided into stages.

Where an operation needs a replicated tensor, a separate stage first projects it to a small one, so that only the small
tensor is gathered: a pair bias of h heads instead of c channels, one operand of the outer product. The triangle product
may be sharded along i, along j or along its hidden channels. ``PAIR`` and the tables after the other blocks give the
dims that every stage computes over.

``version`` is 2 or 3, for the linear layers of AlphaFold 2 or 3:

    version                          2                   3
    biases of gates, projections     yes                 no, except for queries of the single attention
    queries, keys, values start as   Glorot              LeCun
    biases by pairs start as         LeCun, untruncated  LeCun
    transition                       ReLU                SwiGLU
    bias of the ending node, b_qk    from z_kq           from z_qk

AlphaFold 2: Jumper et al. 2021, supplement, sections 1.6 and 1.11; AlphaFold 3: Abramson et al. 2024, supplement,
sections 3.3 and 3.6. The last row is as in the programs ESMFold and OpenFold3; both papers print z_kq.

Letters: `zoo/protein/__init__.py`; masks are False (or 0) for padding.
"""

import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zoo.attention import MAX_BATCH
from zoo.layers import truncated_normal

MASKED = -(2.0**15)  # added to logits of masked elements: exp() gives zero, and half precision can represent it
CHUNK = 2**28  # most elements of logits or outer products at once: 512 MiB in half precision


class Linear(nn.Linear):
    """A linear layer initialised by ``start`` (AF2 supplement, 1.11.4); biases start at zero, those of gates at one.

    ``parts`` projections are fused into one layer, each initialised as if it were alone.
    """

    def __init__(self, dim: int, out: int, bias: bool = True, start: str = "lecun", parts: int = 1):
        self.start, self.parts = start, parts
        super().__init__(dim, out * parts, bias)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.start == "glorot":
            bound = math.sqrt(6 / (self.in_features + self.out_features / self.parts))
            nn.init.uniform_(self.weight, -bound, bound)
        elif self.start in ("gate", "zero"):
            nn.init.zeros_(self.weight)
        elif self.start == "normal":
            nn.init.normal_(self.weight, std=self.in_features**-0.5)
        else:
            truncated_normal(self.weight, math.sqrt({"lecun": 1, "he": 2}[self.start] / self.in_features))
        if self.bias is not None:
            nn.init.constant_(self.bias, float(self.start == "gate"))


class OneHot(nn.Embedding):
    """A linear layer without bias on one-hot vectors of classes, computed as a lookup."""

    @torch.no_grad()
    def reset_parameters(self) -> None:
        truncated_normal(self.weight, self.num_embeddings**-0.5)


# Attention


def attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, mask: Tensor | None = None, chunk: int = CHUNK
) -> Tensor:
    """Softmax attention within each row n: queries (b n i h e), keys and values (b n j h e) -> (b n i h e).

    ``bias`` (b i j h) is added to the logits of every row; ``mask`` (b n j) is True for keys to be seen. At most
    ``chunk`` logits exist at once: rows, and if one row exceeds ``chunk`` its queries, are processed in chunks, which
    are recomputed in backward, so that no logits are kept.
    """
    (b, n, i, h, _), j = q.shape, k.shape[2]
    queries = min(i, max(1, chunk // (b * h * j)))
    rows = min(max(1, chunk // (b * h * j * queries)), max(1, MAX_BATCH // b))
    bias = None if bias is None else rearrange(bias, "b i j h -> b 1 h i j").contiguous()
    biases = [None] * -(-i // queries) if bias is None else bias.split(queries, 3)
    masks = [None] * -(-n // rows) if mask is None else (MASKED * (1 - mask.to(q.dtype))).split(rows, 1)
    found = [
        concat([checkpointed(_attend, q_i, k_n, v_n, b_i, m_n) for q_i, b_i in zip(q_n.split(queries, 2), biases)], 2)
        for q_n, k_n, v_n, m_n in zip(q.split(rows, 1), k.split(rows, 1), v.split(rows, 1), masks)
    ]
    return concat(found, 1)


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None) -> Tensor:
    b, n = q.shape[:2]
    if mask is not None:
        mask = rearrange(mask, "b n j -> b n 1 1 j")
        bias = mask if bias is None else bias + mask
    if bias is not None:
        bias = bias.expand(b, n, *bias.shape[2:]).flatten(0, 1)
    q, k, v = (rearrange(x, "b n i h e -> (b n) h i e") for x in (q, k, v))
    return rearrange(F.scaled_dot_product_attention(q, k, v, bias), "(b n) h i e -> b n i h e", b=b)


def checkpointed(f: Callable[..., Tensor], *args: Tensor | None) -> Tensor:
    """f(*args), recomputed in backward, which keeps only the arguments; f must not draw random numbers."""
    if not torch.is_grad_enabled():
        return f(*args)
    return checkpoint(f, *args, use_reentrant=False, preserve_rng_state=False)


def concat(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


class Attention(nn.Module):
    """Gated self-attention within each row n of (b n j c), with a bias (b i j h) shared by the rows."""

    def __init__(self, dim: int, heads: int, head_dim: int, version: int, chunk: int):
        super().__init__()
        self.heads, self.chunk = heads, chunk
        width = heads * head_dim
        self.qkv = Linear(dim, width, bias=False, start=QKV[version], parts=3)
        self.gate = Linear(dim, width, bias=version == 2, start="gate")
        self.out = Linear(width, dim, bias=version == 2, start="zero")

    def forward(self, x: Tensor, bias: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        q, k, v = rearrange(self.qkv(x), "b n j (p h e) -> p b n j h e", p=3, h=self.heads)
        y = rearrange(attend(q, k, v, bias, mask, self.chunk), "b n j h e -> b n j (h e)")
        return self.out(y * self.gate(x).sigmoid())


QKV = {2: "glorot", 3: "lecun"}
BIAS = {2: "normal", 3: "lecun"}


class PairBias(nn.Module):
    """One number a head for every pair: (b i j c) -> (b i j h), the bias of attention along j.

    ``mask`` (b i j) is for attention that has no other mask.
    """

    def __init__(self, c_z: int, heads: int, version: int):
        super().__init__()
        self.norm = nn.LayerNorm(c_z)
        self.project = Linear(c_z, heads, bias=False, start=BIAS[version])

    def forward(self, z: Tensor, mask: Tensor | None = None) -> Tensor:
        bias = self.project(self.norm(z))
        return bias if mask is None else bias + MASKED * (1 - mask.to(bias.dtype))[..., None]


class SharedDropout(nn.Module):
    """The mask of dropout that is shared along a dim (AF2 supplement, 1.11.6), of size 1 along that dim.

    The mask is drawn between stages: in a stage that is sharded along that dim, each rank would draw its own. None
    without dropout.
    """

    def __init__(self, rate: float, dim: int):
        super().__init__()
        self.rate, self.dim = rate, dim

    def forward(self, x: Tensor) -> Tensor | None:
        if not (self.training and self.rate):
            return None
        shape = [1 if dim == self.dim else size for dim, size in enumerate(x.shape)]
        return F.dropout(torch.ones(shape, dtype=x.dtype, device=x.device), self.rate)


def residual(x: Tensor, update: Tensor, keep: Tensor | None) -> Tensor:
    return x + (update if keep is None else update * keep)


class Transition(nn.Module):
    """A residual MLP on each position, ``factor`` times as wide inside (AF2 algorithm 9, AF3 11)."""

    def __init__(self, dim: int, factor: int, version: int):
        super().__init__()
        self.gated = version == 3
        self.norm = nn.LayerNorm(dim)
        self.up = Linear(dim, factor * dim, bias=version == 2, start="he", parts=2 if self.gated else 1)
        self.down = Linear(factor * dim, dim, bias=version == 2, start="zero")

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(self.norm(x))
        if self.gated:
            gate, y = y.chunk(2, -1)
            return x + self.down(F.silu(gate) * y)
        return x + self.down(y.relu())


# Alignment


class RowAttention(nn.Module):
    """Attention along each row of (b s r c), biased by the pairs (b i j h) (AF2 algorithm 7, with ``PairBias``)."""

    def __init__(self, dim: int, heads: int, head_dim: int, version: int, chunk: int):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.attention = Attention(dim, heads, head_dim, version, chunk)

    def forward(
        self, m: Tensor, bias: Tensor | None = None, mask: Tensor | None = None, keep: Tensor | None = None
    ) -> Tensor:
        return residual(m, self.attention(self.norm(m), bias, mask), keep)


class ColumnAttention(nn.Module):
    """Attention along each column of (b s r c) (AF2 algorithm 8)."""

    def __init__(self, dim: int, heads: int, head_dim: int, version: int, chunk: int):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.attention = Attention(dim, heads, head_dim, version, chunk)

    def forward(self, m: Tensor, mask: Tensor | None = None) -> Tensor:
        x = rearrange(self.norm(m), "b s r c -> b r s c")
        y = self.attention(x, mask=None if mask is None else mask.transpose(1, 2))
        return m + rearrange(y, "b r s c -> b s r c")


class GlobalColumnAttention(nn.Module):
    """Attention along columns at cost s instead of s²: one mean query a head, one head of keys (AF2 algorithm 19)."""

    def __init__(self, dim: int, heads: int, head_dim: int, version: int, chunk: int):
        super().__init__()
        self.heads, self.chunk = heads, chunk
        width = heads * head_dim
        self.norm = nn.LayerNorm(dim)
        self.q = Linear(dim, width, bias=False, start=QKV[version])
        self.kv = Linear(dim, head_dim, bias=False, start=QKV[version], parts=2)
        self.gate = Linear(dim, width, bias=version == 2, start="gate")
        self.out = Linear(width, dim, bias=version == 2, start="zero")

    def forward(self, m: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.norm(m)
        seen = x.new_ones(m.shape[:3]) if mask is None else mask.to(x.dtype)
        mean = torch.einsum("bsrc,bsr->brc", x, seen) / (seen.sum(1) + 1e-10)[..., None]
        q = rearrange(self.q(mean), "b r (h e) -> b r h 1 e", h=self.heads)  # the heads, as queries of a single head
        k, v = rearrange(self.kv(x), "b s r (p e) -> p b r s 1 e", p=2)
        y = attend(q, k, v, mask=None if mask is None else mask.transpose(1, 2), chunk=self.chunk)
        y = rearrange(y, "b r h 1 e -> b 1 r (h e)")
        return m + self.out(y * self.gate(x).sigmoid())


class PairWeightedAveraging(nn.Module):
    """Averages of each row of (b s r c) along r, weighted by softmax_j of (b i j h) (AF3 algorithm 10, ``PairBias``).

    The bias of masked pairs has ``MASKED`` added.
    """

    def __init__(self, dim: int, heads: int, head_dim: int):
        super().__init__()
        self.heads = heads
        width = heads * head_dim
        self.norm = nn.LayerNorm(dim)
        self.value = Linear(dim, width, bias=False)
        self.gate = Linear(dim, width, bias=False, start="gate")
        self.out = Linear(width, dim, bias=False, start="zero")

    def forward(self, m: Tensor, bias: Tensor, keep: Tensor | None = None) -> Tensor:
        x = self.norm(m)
        value = rearrange(self.value(x), "b s j (h e) -> b s j h e", h=self.heads)
        y = torch.einsum("bijh,bsjhe->bsihe", bias.softmax(2), value).flatten(-2)
        return residual(m, self.out(y * self.gate(x).sigmoid()), keep)


# From the alignment to pairs


class OuterProject(nn.Module):
    """Both operands of the outer product: (b s r c) -> (b s r d) twice, zero where masked."""

    def __init__(self, c_m: int, hidden: int, version: int):
        super().__init__()
        self.norm = nn.LayerNorm(c_m)
        self.project = Linear(c_m, hidden, bias=version == 2, parts=2)

    def forward(self, m: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x = self.project(self.norm(m))
        left, right = (x if mask is None else x * mask[..., None]).chunk(2, -1)
        return left, right


class OuterUpdate(nn.Module):
    """Add to z (b i j c) a linear function of the products of columns i and j, averaged over the rows that have both.

    The bias is averaged too: (W Σ + b) / (count + 0.001). The r² d² products are computed ``chunk`` at a time, and
    recomputed in backward.
    """

    def __init__(self, hidden: int, c_z: int, chunk: int):
        super().__init__()
        self.chunk = chunk
        self.out = Linear(hidden**2, c_z, start="zero")

    def forward(
        self, z: Tensor, left: Tensor, right: Tensor, mask_i: Tensor | None = None, mask_j: Tensor | None = None
    ) -> Tensor:
        b, _, _, d = left.shape
        rows = max(1, self.chunk // (b * right.shape[2] * d * d))
        masks = [None] * -(-left.shape[2] // rows) if mask_i is None else mask_i.to(z.dtype).split(rows, 2)
        mask_j = None if mask_j is None else mask_j.to(z.dtype)
        means = [checkpointed(self.mean, part, right, mask, mask_j) for part, mask in zip(left.split(rows, 2), masks)]
        return z + concat(means, 1)

    def mean(self, left: Tensor, right: Tensor, mask_i: Tensor | None, mask_j: Tensor | None) -> Tensor:
        total = self.out(torch.einsum("bsid,bsje->bijde", left, right).flatten(-2))
        if mask_i is None or mask_j is None:
            return total / (left.shape[1] + 1e-3)
        return total / (torch.einsum("bsi,bsj->bij", mask_i, mask_j) + 1e-3)[..., None]


class OuterProductMean(nn.Module):
    """AF2 algorithm 10, AF3 algorithm 9: z (b i j c) and m (b s r c) -> z."""

    def __init__(self, c_m: int, c_z: int, hidden: int, version: int, chunk: int):
        super().__init__()
        self.project = OuterProject(c_m, hidden, version)
        self.update = OuterUpdate(hidden, c_z, chunk)

    def forward(self, z: Tensor, m: Tensor, mask: Tensor | None = None) -> Tensor:
        left, right = self.project(m, mask)
        return self.update(z, left, right, mask, mask)


OUTER = {
    "project": "b s r [c], mask=b s r -> b s r [d], b s r [d]",
    "update": "b i j [c], left=b [s] i [d], right=b [s] j [d], mask_i=b [s] i, mask_j=b [s] j -> b i j [c]",
}


# Pairs


class TriangleProject(nn.Module):
    """The product's operands (b i j d), gated and zero where masked, and the gate of its result, from z (b i j c)."""

    def __init__(self, c_z: int, hidden: int, version: int):
        super().__init__()
        self.norm = nn.LayerNorm(c_z)
        self.project = Linear(c_z, hidden, bias=version == 2, parts=2)
        self.project_gate = Linear(c_z, hidden, bias=version == 2, start="gate", parts=2)
        self.gate = Linear(c_z, c_z, bias=version == 2, start="gate")

    def forward(self, z: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        x = self.norm(z)
        y = self.project(x) * self.project_gate(x).sigmoid()
        left, right = (y if mask is None else y * mask[..., None]).chunk(2, -1)
        return left, right, self.gate(x).sigmoid()


class TriangleProduct(nn.Module):
    """Σ_k left_ik right_jk ("outgoing" edges) or Σ_k left_ki right_kj ("incoming"), for each hidden channel."""

    def __init__(self, edges: str):
        super().__init__()
        self.equation = {"outgoing": "bikd,bjkd->bijd", "incoming": "bkid,bkjd->bijd"}[edges]

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return torch.einsum(self.equation, left, right)


class TriangleUpdate(nn.Module):
    """Add the product (b i j d), normed, projected and gated, to z (b i j c)."""

    def __init__(self, hidden: int, c_z: int, version: int):
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.out = Linear(hidden, c_z, bias=version == 2, start="zero")

    def forward(self, z: Tensor, product: Tensor, gate: Tensor, keep: Tensor | None = None) -> Tensor:
        return residual(z, self.out(self.norm(product)) * gate, keep)


class TriangleMultiplication(nn.Module):
    """AF2 algorithms 11 ("outgoing") and 12 ("incoming"), AF3 algorithms 12 and 13."""

    def __init__(self, c_z: int, hidden: int, edges: str, version: int):
        super().__init__()
        self.project = TriangleProject(c_z, hidden, version)
        self.product = TriangleProduct(edges)
        self.update = TriangleUpdate(hidden, c_z, version)

    def forward(self, z: Tensor, mask: Tensor | None = None, keep: Tensor | None = None) -> Tensor:
        left, right, gate = self.project(z, mask)
        return self.update(z, self.product(left, right), gate, keep)


class TriangleBias(nn.Module):
    """(b i j c) -> the normed input (b i j c), and its projection to (b i j h)."""

    def __init__(self, c_z: int, heads: int, version: int):
        super().__init__()
        self.norm = nn.LayerNorm(c_z)
        self.bias = Linear(c_z, heads, bias=False, start=BIAS[version])

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        x = self.norm(z)
        return x, self.bias(x)


class TriangleAttend(nn.Module):
    """Add attention within each row of x along j ("start"), or within each column along i ("end"), to z (b i j c)."""

    def __init__(self, c_z: int, heads: int, head_dim: int, node: str, version: int, chunk: int):
        super().__init__()
        self.end, self.transposed = node == "end", version == 2
        self.attention = Attention(c_z, heads, head_dim, version, chunk)

    def forward(
        self, z: Tensor, x: Tensor, bias: Tensor, mask: Tensor | None = None, keep: Tensor | None = None
    ) -> Tensor:
        if self.end:
            x, mask = x.transpose(1, 2), None if mask is None else mask.transpose(1, 2)
            bias = bias.transpose(1, 2) if self.transposed else bias
        y = self.attention(x, bias, mask)
        return residual(z, y.transpose(1, 2) if self.end else y, keep)


class TriangleAttention(nn.Module):
    """AF2 algorithms 13 (around the "start" node) and 14 ("end"), AF3 algorithms 14 and 15."""

    def __init__(self, c_z: int, heads: int, head_dim: int, node: str, version: int, chunk: int):
        super().__init__()
        self.project = TriangleBias(c_z, heads, version)
        self.attend = TriangleAttend(c_z, heads, head_dim, node, version, chunk)

    def forward(self, z: Tensor, mask: Tensor | None = None, keep: Tensor | None = None) -> Tensor:
        x, bias = self.project(z)
        return self.attend(z, x, bias, mask, keep)


class PairBlock(nn.Module):
    """The update of z (b i j c) in both blocks: triangles and a transition (AF2 algorithm 6, lines 6 to 10)."""

    def __init__(
        self, c_z: int, hidden: int, heads: int, head_dim: int, factor: int, dropout: float, version: int, chunk: int
    ):
        super().__init__()
        self.rowwise, self.columnwise = SharedDropout(dropout, 1), SharedDropout(dropout, 2)
        self.outgoing = TriangleMultiplication(c_z, hidden, "outgoing", version)
        self.incoming = TriangleMultiplication(c_z, hidden, "incoming", version)
        self.start = TriangleAttention(c_z, heads, head_dim, "start", version, chunk)
        self.end = TriangleAttention(c_z, heads, head_dim, "end", version, chunk)
        self.transition = Transition(c_z, factor, version)

    def forward(self, z: Tensor, mask: Tensor | None = None) -> Tensor:
        z = self.outgoing(z, mask, self.rowwise(z))
        z = self.incoming(z, mask, self.rowwise(z))
        z = self.start(z, mask, self.rowwise(z))
        z = self.end(z, mask, self.columnwise(z))
        return self.transition(z)


PAIR = {
    "outgoing.project": "b i j [c], mask=b i j -> b i j [d], b i j [d], b i j [c]",
    "outgoing.product": "b i +k d, b j +k d -> b i j d",
    "outgoing.update": "b i j [c], product=b i j [d], gate=b i j [c], keep=b 1 j [c]",
    "incoming.project": "b i j [c], mask=b i j -> b i j [d], b i j [d], b i j [c]",
    "incoming.product": "b +k i d, b +k j d -> b i j d",
    "incoming.update": "b i j [c], product=b i j [d], gate=b i j [c], keep=b 1 j [c]",
    "start.project": "b i j [c] -> b i j [c], b i j [h]",
    "start.attend": "b i [j c], x=b i [j c], bias=b [q k h], mask=b i [j], keep=b 1 [j c]",
    "end.project": "b i j [c] -> b i j [c], b i j [h]",
    "end.attend": "b [i] j [c], x=b [i] j [c], bias=b [q k h], mask=b [i] j, keep=b [i] 1 [c]",
    "transition": "b i j [c]",
}

# the triangle multiplications in FastFold's layouts: rows are sharded for outgoing, columns for incoming, never
# channels; a product gathers its second operand (Cheng et al., arXiv 2203.00854, dynamic axial parallelism)
DAP = PAIR | {
    "outgoing.project": "b i [j c], mask=b i [j] -> b i [j d], b i [j d], b i [j c]",
    "outgoing.product": "b i [k d], b [j k d] -> b i [j d]",
    "outgoing.update": "b i [j c], product=b i [j d], gate=b i [j c], keep=b 1 [j c]",
    "incoming.project": "b [i] j [c], mask=b [i] j -> b [i] j [d], b [i] j [d], b [i] j [c]",
    "incoming.product": "b [k i d], b [k] j [d] -> b [i] j [d]",
    "incoming.update": "b [i] j [c], product=b [i] j [d], gate=b [i] j [c], keep=b 1 j [c]",
}


# Single residues


class SingleAttention(nn.Module):
    """Attention of residues s (b i c) to all residues, ``context`` (b j c), biased by pairs (b i j h).

    AF3 algorithm 24 without conditioning, with ``PairBias``; the context is s itself.
    """

    def __init__(self, dim: int, heads: int, head_dim: int, chunk: int):
        super().__init__()
        self.heads, self.chunk = heads, chunk
        width = heads * head_dim
        self.norm = nn.LayerNorm(dim)
        self.q = Linear(dim, width)
        self.kv = Linear(dim, width, bias=False, parts=2)
        self.gate = Linear(dim, width, bias=False, start="gate")
        self.out = Linear(width, dim, bias=False, start="zero")

    def forward(self, s: Tensor, context: Tensor, bias: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.norm(s)
        q = rearrange(self.q(x), "b i (h e) -> b 1 i h e", h=self.heads)
        k, v = rearrange(self.kv(self.norm(context)), "b j (p h e) -> p b 1 j h e", p=2, h=self.heads)
        y = attend(q, k, v, bias, None if mask is None else mask[:, None], self.chunk)
        return s + self.out(rearrange(y, "b 1 i h e -> b i (h e)") * self.gate(x).sigmoid())


def prefixed(prefix: str, stages: Mapping[str, str]) -> dict[str, str]:
    return {f"{prefix}.{path}": pattern for path, pattern in stages.items()}
