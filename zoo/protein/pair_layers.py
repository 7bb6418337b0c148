"""The operations of the Evoformer and the Pairformer on pairs of residues, and on single residues by their pairs.

Letters: `zoo/protein/__init__.py`.
"""

import torch
from einops import rearrange
from torch import Tensor, nn

from zoo.protein.layers import (
    BIAS,
    Attention,
    Linear,
    SharedDropout,
    Transition,
    attend,
    residual,
)


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
