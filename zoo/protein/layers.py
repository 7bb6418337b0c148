"""The layers that the operations of the Evoformer (AlphaFold 2) and the Pairformer (AlphaFold 3) are made of.

`alignment_layers.py` and `pair_layers.py` have the operations, each divided into stages. Where an operation needs a
replicated tensor, a separate stage first projects it to a small one, so that only the small tensor is gathered: a pair
bias of h heads instead of c channels, one operand of the outer product. The triangle product may be sharded along i,
along j or along its hidden channels. ``OUTER`` and ``PAIR`` give the dims that every stage computes over.

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
from zoo.init import truncated_normal

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
    outputs = [
        concat([checkpointed(_attend, q_i, k_n, v_n, b_i, m_n) for q_i, b_i in zip(q_n.split(queries, 2), biases)], 2)
        for q_n, k_n, v_n, m_n in zip(q.split(rows, 1), k.split(rows, 1), v.split(rows, 1), masks)
    ]
    return concat(outputs, 1)


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


def prefixed(prefix: str, stages: Mapping[str, str]) -> dict[str, str]:
    return {f"{prefix}.{path}": pattern for path, pattern in stages.items()}
