"""Attention, with the options that the models choose from: grouped keys, rotary positions, normalised heads, a bias,
low rank.

Letters: b batch, n queries, m keys, h heads, g heads of keys and values, e channels of a head, t frames, s patches of a
frame, c channels, l text tokens.
"""

from itertools import repeat

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

try:
    from flash_attn import flash_attn_func
except ImportError:
    flash_attn_func = None

MAX_BATCH = 65535  # CUDA attention kernels launch one grid row for each batch entry; a grid has no more rows


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, bias: Tensor | None = None, causal: bool = False
) -> Tensor:
    """Softmax attention: queries (b n h e), keys and values (b m g e) -> (b n h e).

    h is a multiple of g: groups of h/g query heads share a head of keys and values (Ainslie et al., arXiv 2305.13245).
    ``mask`` (b m) is True for keys that queries see; if a sample's mask is False throughout, its queries see all keys.
    ``bias`` (b h n m), any of these dims 1, is added to the logits. ``causal``: a query sees the keys up to its own
    position (mask and bias are None then). flash-attn computes it where it is installed and can (CUDA, half precision,
    neither mask nor bias), PyTorch's SDPA everywhere else.
    """
    check_heads(q.shape[2], k.shape[2])
    if len(q) > MAX_BATCH:
        masks = repeat(None) if mask is None else mask.split(MAX_BATCH)
        biases = repeat(bias) if bias is None or len(bias) == 1 else bias.split(MAX_BATCH)
        parts = zip(q.split(MAX_BATCH), k.split(MAX_BATCH), v.split(MAX_BATCH), masks, biases)
        return torch.cat([attend(*part, causal=causal) for part in parts])
    native = q.dtype in (torch.float16, torch.bfloat16) and mask is None and bias is None
    if flash_attn_func is not None and q.is_cuda and native and q.shape[-1] <= 256:
        return flash_attn_func(q, k, v, causal=causal)
    if not native:  # PyTorch's kernels with linear memory that take float32, a mask or a bias take no groups
        k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    if mask is not None:
        mask = (mask | ~mask.any(-1, keepdim=True))[:, None, None, :]
    if bias is not None:
        bias = bias.to(q.dtype)
        mask = bias if mask is None else bias.masked_fill(~mask, -torch.inf)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped)
    return y.transpose(1, 2)


def check_heads(heads: int, kv_heads: int) -> None:
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"heads={heads} is not a multiple of kv_heads={kv_heads}, the heads of keys and values")


def rotate(x: Tensor, pairs: str, base: float = 10000.0) -> Tensor:
    """Rotary positions (Su et al., arXiv 2104.09864): turn pairs of channels of (b n h e) by angles that grow with n.

    Pair k turns by base^(-2k/e) a position. ``pairs`` says which channels are a pair: neighbours ("interleaved", as in
    the paper) or k and k + e/2 ("halves", as in Llama).
    """
    steps = torch.arange(0, x.shape[-1], 2, dtype=torch.float64, device=x.device)
    positions = torch.arange(x.shape[1], dtype=torch.float64, device=x.device)
    angles = torch.outer(positions, base ** (-steps / x.shape[-1]))[:, None]
    precise = torch.promote_types(x.dtype, torch.float32)
    return turn(x, angles.sin().to(precise), angles.cos().to(precise), pairs)


def turn(x: Tensor, sin: Tensor, cos: Tensor, pairs: str) -> Tensor:
    """Turn pairs of channels of (b n h e) by the angles with these sines and cosines (n 1 e/2); see ``rotate``.

    Computed in the dtype of the angles; the result has the dtype of x.
    """
    if pairs == "interleaved":
        first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack([first * cos - second * sin, first * sin + second * cos], dim=-1).flatten(-2)
    else:
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)
    return turned.to(x.dtype)


class SoftmaxAttention(nn.Module):
    """`attend` as a module without parameters: the only part of attention that mixes positions."""

    def __init__(self, causal: bool = False):
        super().__init__()
        self.causal = causal

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, causal=self.causal)


class LowRankAttention(nn.Module):
    """Linformer (Wang et al., arXiv 2006.04768): attention to `rows` weighted sums of all keys, and of all values.

    The weights E and F (`rows` x `places`) are learned, with a column for each position, and all heads share them. A
    shorter sequence takes the first columns; a longer one is refused. Queries see `rows` sums whatever the length of
    the sequence, so the cost grows with that length and not with its square.
    """

    def __init__(self, rows: int, places: int):
        super().__init__()
        if rows < 1 or places < 1:
            raise ValueError(
                f"low_rank=({rows}, {places}): expected (number of projected keys, longest sequence), both at least 1"
            )
        self.rows, self.places = rows, places
        self.of_keys = nn.Parameter(torch.empty(rows, places))
        self.of_values = nn.Parameter(torch.empty(rows, places))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw weights that make a sum over all positions as large as one summand, if the summands are independent."""
        for weight in (self.of_keys, self.of_values):
            nn.init.normal_(weight, std=self.places**-0.5)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attend(q, *self.project(k, v))

    def project(self, k: Tensor, v: Tensor, start: int = 0, size: int | None = None) -> tuple[Tensor, Tensor]:
        """Keys and values (b m g e), at `start` in a sequence of `size` -> what they add to the sums (b r g e)."""
        size = k.shape[1] if size is None else size
        if size > self.places:
            raise ValueError(
                f"attention of low rank has weights for {self.places} places and got {size}: build the model with "
                f"low_rank=({self.rows}, {size}), or give it shorter sequences"
            )

        def weighed(x: Tensor, weight: Tensor) -> Tensor:
            columns = weight[:, start : start + x.shape[1]].expand(len(x), -1, -1)
            return torch.bmm(columns, x.flatten(2)).unflatten(2, x.shape[2:])

        return weighed(k, self.of_keys), weighed(v, self.of_values)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of queries (b n h e) to the sums over all positions."""
        return attend(q, k, v)


class SelfAttention(nn.Module):
    """Self-attention along one dim of (b t s c): over space (``"s"``) or over time (``"t"``).

    ``width``: the channels of all heads together, by default ``dim``. ``causal``: no position sees a later one.
    ``kv_heads``: the number of heads of keys and values, by default ``heads``; fewer for grouped-query attention, 1 for
    multi-query attention. ``rope`` rotates queries and keys, see ``rotate``; ``qk_norm`` puts an RMSNorm on each of
    their heads, "before" or "after" the rotation. ``low_rank``, (rows, places), is Linformer's: see
    ``LowRankAttention``. Everything but ``core`` treats all positions alike, unless there is a rotation.
    """

    # patterns of `core`, for the `cores` of models; (g r): r query heads share a head g of keys and values
    CORE = {
        "s": "(b t) [s] (g r) [e], (b t) [s] g [e], (b t) [s] g [e] -> (b t) [s] (g r) [e]",
        "t": "(b s) [t] (g r) [e], (b s) [t] g [e], (b s) [t] g [e] -> (b s) [t] (g r) [e]",
    }

    def __init__(
        self,
        dim: int,
        heads: int,
        over: str,
        *,
        width: int | None = None,
        causal: bool = False,
        kv_heads: int | None = None,
        rope: str | None = None,
        qk_norm: str | None = None,
        low_rank: tuple[int, int] | None = None,
    ):
        super().__init__()
        width = dim if width is None else width
        if low_rank is not None and causal:
            raise ValueError(f"low_rank={low_rank} sums over later places too: it cannot be causal")
        self.core = SoftmaxAttention(causal) if low_rank is None else LowRankAttention(*low_rank)
        self.heads, self.kv_heads = heads, heads if kv_heads is None else kv_heads
        if width % heads:
            raise ValueError(f"{width} channels do not divide into heads={heads}")
        check_heads(self.heads, self.kv_heads)
        if rope not in (None, "interleaved", "halves"):
            raise ValueError(f"rope={rope!r}: expected None, 'interleaved' or 'halves'")
        if qk_norm not in (None, "before", "after"):
            raise ValueError(f"qk_norm={qk_norm!r}: expected None, 'before' or 'after' (the rotation)")
        size = width // heads
        if rope and size % 2:
            raise ValueError(f"{width} channels in heads={heads}: rotary positions need an even number in each")
        self.rope, self.qk_norm = rope, qk_norm
        self.head_dim = size
        self.fold = {"s": "b t s c -> (b t) s c", "t": "b t s c -> (b s) t c"}[over]
        self.unfold = {"s": "(b t) s c -> b t s c", "t": "(b s) t c -> b t s c"}[over]
        self.qkv = nn.Linear(dim, (heads + 2 * self.kv_heads) * size)
        self.q_norm = nn.RMSNorm(size, eps=1e-6) if qk_norm else None
        self.k_norm = nn.RMSNorm(size, eps=1e-6) if qk_norm else None
        self.out = nn.Linear(width, dim)
        self.tensor_parallel = {"qkv": f"columns {heads} {self.kv_heads} {self.kv_heads}", "out": f"rows {heads}"}

    def forward(self, x: Tensor) -> Tensor:
        heads = rearrange(self.qkv(rearrange(x, self.fold)), "b n (h e) -> b n h e", e=self.head_dim)
        every = self.heads + 2 * self.kv_heads  # all heads; under tensor parallelism a rank has a share of each kind
        q, k, v = heads.split([heads.shape[2] * h // every for h in (self.heads, self.kv_heads, self.kv_heads)], dim=2)
        q, k = self.prepare(q, self.q_norm), self.prepare(k, self.k_norm)
        y = self.out(rearrange(self.core(q, k, v), "b n h e -> b n (h e)"))
        return rearrange(y, self.unfold, b=len(x))

    def prepare(self, x: Tensor, norm: nn.RMSNorm | None) -> Tensor:
        """Rotate and normalise queries or keys (b n h e)."""
        if norm is not None and self.qk_norm == "before":
            x = norm(x)
        if self.rope is not None:
            x = rotate(x, self.rope)
        if norm is not None and self.qk_norm == "after":
            x = norm(x)
        return x


class CrossAttention(nn.Module):
    """Attention from (b ... c) to text (b l c), for all positions alike; ``mask`` (b l) is True for tokens to see.

    ``qk_norm`` puts an RMSNorm with weights of its own on queries and on keys, over the channels of all heads together.
    """

    def __init__(self, dim: int, heads: int, qk_norm: bool = False):
        super().__init__()
        self.head_dim = dim // heads
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, 2 * dim)
        self.out = nn.Linear(dim, dim)
        self.q_norm = nn.RMSNorm(dim, eps=1e-6) if qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(dim, eps=1e-6) if qk_norm else nn.Identity()
        cut = {"q": f"columns {heads}", "kv": f"columns {heads} {heads}", "out": f"rows {heads}"}
        self.tensor_parallel = {} if qk_norm else cut

    def forward(self, x: Tensor, context: Tensor, mask: Tensor | None = None) -> Tensor:
        q, (k, v) = self.q(x), self.kv(context).chunk(2, dim=-1)
        q, k, v = (
            rearrange(y, "b ... (h e) -> b (...) h e", e=self.head_dim) for y in (self.q_norm(q), self.k_norm(k), v)
        )
        return self.out(attend(q, k, v, mask).flatten(2).unflatten(1, x.shape[1:-1]))
