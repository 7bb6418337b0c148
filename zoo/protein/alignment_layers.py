"""The operations of the Evoformer and the MSA module on an alignment, and from it to pairs.

Letters: `zoo/protein/__init__.py`.
"""

import torch
from einops import rearrange
from torch import Tensor, nn

from zoo.protein.layers import (
    QKV,
    Attention,
    Linear,
    attend,
    checkpointed,
    concat,
    residual,
)


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
