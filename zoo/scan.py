"""One scan for state-space models and linear attention: Mamba-1, Mamba-2 (SSD), gated linear attention, RWKV-6.

A head keeps a state S (k e). At every position the state decays by a (one number, or one for every row), the outer
product of a key and a value is added to it, and a query reads it:

    S_i = a_i S_(i-1) + k_i v_i^T    y_i = q_i^T S_i                                 Mamba, gated linear attention
                                     y_i = q_i^T (S_(i-1) + (bonus k_i) v_i^T)       RWKV-6

``scan`` computes it a chunk at a time: within a chunk in parallel, from chunk to chunk by the recurrence. Decays are
multiplied only from a key to its query, so no exponent is positive and nothing overflows, however strong they are.
Their logarithms are summed in float64, so float32 loses nothing where a weak decay follows a strong one.

Letters: b batch, n positions, h heads, g groups of heads that share queries and keys, r heads of a group, k channels
of a key, e channels of a value, c chunks, l positions of a chunk.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch.autograd.function import once_differentiable

from zoo.attention import MAX_BATCH

# Positions of a chunk: the fastest numbers on one core of a CPU
SCALAR_CHUNK, VECTOR_CHUNK, STATE_CHUNK = 64, 16, 8


def scan(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, bonus: Tensor | None = None, *, chunk: int | None = None
) -> Tensor:
    """The recurrence above over n: queries and keys (b n g k), values (b n h e) -> (b n h e).

    ``log_decay``, at most zero, is (b n h) for one decay a head (Mamba-2: arXiv 2405.21060, section 6) or (b n h k) for
    one a row of the state (Mamba-1: arXiv 2312.00752; RWKV-6: arXiv 2404.05892, with its ``bonus`` (h k)). ``chunk`` is
    the most positions of a chunk. Half precision is computed in float32; on CUDA fla-core's kernels compute what they
    can, if fla-core is installed.

    Raises ValueError for shapes that do not fit.
    """
    check(q, k, v, log_decay, bonus)
    kernel = cuda_kernel(v, log_decay, bonus)
    if kernel is not None:
        return kernel(per_head(q, v.shape[2]), per_head(k, v.shape[2]), v, log_decay)
    dtype = v.dtype
    q, k, v, log_decay = (at_least_float32(x) for x in (q, k, v, log_decay))
    if log_decay.ndim == 3:
        y = scalar_scan(q, k, v, log_decay, chunk or SCALAR_CHUNK)
    elif v.shape[-1] == 1 and bonus is None:
        y = state_scan(q, k, v, log_decay, chunk or STATE_CHUNK)
    else:
        y = vector_scan(q, k, v, log_decay, None if bonus is None else at_least_float32(bonus), chunk or VECTOR_CHUNK)
    return y.to(dtype)


def recurrence(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, bonus: Tensor | None = None) -> Tensor:
    """The definition of ``scan``, one position after another."""
    q, k = (per_head(x, v.shape[2])[..., None] for x in (q, k))
    decay = log_decay.exp()[..., None] if log_decay.ndim == 4 else log_decay.exp()[..., None, None]
    state, out = torch.zeros_like(k[:, 0] * v[:, 0, :, None]), []
    for qi, ki, vi, ai in zip(q.unbind(1), k.unbind(1), v[..., None, :].unbind(1), decay.unbind(1)):
        before, state = state, ai * state + ki * vi
        read = state if bonus is None else before + bonus[..., None] * ki * vi
        out.append((qi * read).sum(-2))
    return torch.stack(out, 1)


def scalar_scan(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, chunk: int) -> Tensor:
    """One decay a head: within a chunk, attention with a mask that decays (SSD).

    Decays scale values and outputs, never keys and queries, so the products of keys and queries are computed once for
    all heads of a group.
    """
    n, g, r = v.shape[1], q.shape[2], v.shape[2] // q.shape[2]
    count = -(-n // chunk)
    q, k, v, log_decay = (split(x, count, -(-n // count)) for x in (q, k, v, log_decay))
    q, k = (rearrange(x, "b c l g k -> b c g l k") for x in (q, k))
    v = rearrange(v, "b c l (g r) e -> b c g r l e", g=g)
    total = rearrange(log_decay, "b c l (g r) -> b c g r l", g=g).double().cumsum(-1)
    causal = torch.ones(total.shape[-1], total.shape[-1], dtype=torch.bool, device=v.device).tril()
    between = (total[..., :, None] - total[..., None, :]).to(v.dtype).masked_fill(~causal, -torch.inf).exp()
    since = total.to(v.dtype).exp()  # the decay from the start of the chunk

    within = ((q @ k.mT)[:, :, :, None] * between) @ v
    contribution = rearrange(v * between[..., -1, :, None], "b c g r l e -> b c g l (r e)")
    states = rearrange(k.mT @ contribution, "b c g k (r e) -> b c g r k e", r=r)
    before = rearrange(states_before(states, since[..., -1, None, None]), "b c g r k e -> b c g k (r e)")
    y = within + since[..., None] * rearrange(q @ before, "b c g l (r e) -> b c g r l e", r=r)
    return rearrange(y, "b c g r l e -> b (c l) (g r) e")[:, :n]


def vector_scan(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, bonus: Tensor | None, chunk: int) -> Tensor:
    """One decay a row of the state: matrix products within a chunk, whose length is a power of two.

    In a product of queries and keys, the decay from key to query is a factor of the query times a factor of the key.
    With one reference position for the chunk, one of these factors grows without bound. So a chunk is halved, and its
    halves again: queries right of a cut meet keys left of it, and with the cut as reference both factors are at most 1.
    """
    n, h = v.shape[1:3]
    length = 1 << (min(chunk, n) - 1).bit_length()
    inputs = (per_head(q, h), per_head(k, h), v, log_decay)
    q, k, v, log_decay = (rearrange(split(x, -(-n // length), length), "b c l h k -> b c h l k") for x in inputs)
    total = log_decay.double().cumsum(-2)
    read = total if bonus is None else F.pad(total[..., :-1, :], (0, 0, 1, 0))  # RWKV reads the state before its decay

    y = (q * k if bonus is None else q * k * bonus[:, None]).sum(-1, keepdim=True) * v
    half = length // 2
    while half:
        left, right = zip(*(x.unflatten(-2, (-1, 2, half)).unbind(-3) for x in (q, k, v, total, read)))
        cut = left[3][..., -1:, :]
        queries = right[0] * (right[4] - cut).to(q.dtype).exp()
        keys = left[1] * (cut - left[3]).to(q.dtype).exp()
        crossing = (queries @ keys.mT) @ left[2]
        y = y + F.pad(crossing[..., None, :, :], (0, 0, 0, 0, 1, 0)).flatten(-4, -2)
        half //= 2

    end = total[..., -1:, :]
    states = (k * (end - total).to(k.dtype).exp()).mT @ v
    y = y + (q * read.to(q.dtype).exp()) @ states_before(states, end.to(k.dtype).exp().mT)
    return rearrange(y, "b c h l e -> b (c l) h e")[:, :n]


def state_scan(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, chunk: int) -> Tensor:
    """One decay a row of the state, values of one channel (Mamba-1)."""
    v, log_decay = (x.unflatten(2, (q.shape[2], -1)) for x in (v[..., 0], log_decay))
    return StateScan.apply(q, k, v, log_decay, chunk).flatten(2, 3)[..., None]


class StateScan(torch.autograd.Function):
    """q, k (b n g k), v (b n g r), log_decay (b n g r k) -> (b n g r).

    A state is no larger than its key here: states are computed position by position, in a chunk that fits a cache. Only
    the states before the chunks are kept for backward. In backward, with G_i the gradient of S_i,

        G_i = q_i dy_i + a_(i+1) G_(i+1)    dk_i = G_i v_i    dv_i = k_i . G_i    dlog_decay_i = a_i S_(i-1) G_i
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, chunk: int) -> Tensor:
        state, before, out = torch.zeros_like(log_decay[:, 0]), [], []
        for qi, ki, vi, wi in zip(*(x.split(chunk, 1) for x in (q, k, v, log_decay))):
            before.append(state)
            states = StateScan.states(state, ki, vi, wi.exp())
            state = states[:, -1]
            out.append((states @ qi[..., None])[..., 0])
        ctx.save_for_backward(q, k, v, log_decay, torch.stack(before))
        ctx.chunk = chunk
        return torch.cat(out, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, before = ctx.saved_tensors
        chunks = zip(*(x.split(ctx.chunk, 1) for x in (*inputs, dy)), before.unbind())
        later, grads = torch.zeros_like(before[0]), []  # a_(i+1) G_(i+1) of the chunk's last i
        for qi, ki, vi, wi, dyi, start in reversed(list(chunks)):
            decay = wi.exp()
            states = StateScan.states(start, ki, vi, decay)
            previous = torch.cat([start[:, None], states[:, :-1]], 1)
            read = (dyi[..., None] * qi[..., None, :]).unbind(1)
            reached = recurrence_of((read[-1] + later, *read[-2::-1]), (decay[:, 0], *decay.unbind(1)[:0:-1]))
            later = decay[:, 0] * reached[-1]
            grad = torch.stack(reached[::-1], 1)
            dq, dk = (dyi[..., None, :] @ states)[..., 0, :], (vi[..., None, :] @ grad)[..., 0, :]
            grads.append((dq, dk, (grad @ ki[..., None])[..., 0], grad * previous * decay))
        return *(torch.cat(parts, 1) for parts in zip(*grads[::-1])), None

    @staticmethod
    def states(state: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
        """The states (b l g r k) after each position, from the state before the first."""
        added, decays = (k[..., None, :] * v[..., None]).unbind(1), decay.unbind(1)
        return torch.stack(recurrence_of((torch.addcmul(added[0], decays[0], state), *added[1:]), decays), 1)


def recurrence_of(added: Sequence[Tensor], decay: Sequence[Tensor]) -> list[Tensor]:
    """Every s_i = decay_i s_(i-1) + added_i, from s_0 = added_0."""
    out = list(added[:1])
    for x, a in zip(added[1:], decay[1:]):
        out.append(torch.addcmul(x, a, out[-1]))
    return out


def states_before(states: Tensor, decay: Tensor) -> Tensor:
    """The state before each chunk, from the state that each chunk (b c ...) adds, and the decay over the chunk."""
    after = recurrence_of(states.unbind(1)[:-1], decay.unbind(1)[:-1])
    return torch.stack([torch.zeros_like(states[:, 0]), *after], 1)


def split(x: Tensor, count: int, length: int) -> Tensor:
    """(b n ...) -> (b c l ...), padded at the end with zeros: no earlier position sees them."""
    padding = (0, 0) * (x.ndim - 2) + (0, count * length - x.shape[1])
    return F.pad(x, padding).unflatten(1, (count, length))


def per_head(x: Tensor, heads: int) -> Tensor:
    """Queries or keys (b n g k) -> (b n h k): a group's, once for each of its heads; a view if there is one group."""
    return x[..., None, :].expand(*x.shape[:-1], heads // x.shape[2], -1).flatten(2, 3)


def at_least_float32(x: Tensor) -> Tensor:
    """Convert half precision to float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def check(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, bonus: Tensor | None) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}, log_decay {tuple(log_decay.shape)}"
    if not q.ndim == k.ndim == v.ndim == 4 or q.shape != k.shape or q.shape[:2] != v.shape[:2]:
        raise ValueError(f"scan takes q and k (b n g k) and v (b n h e), not {shapes}")
    heads, channels = v.shape[2], k.shape[3]
    if heads % q.shape[2]:
        raise ValueError(f"{heads} heads do not divide into {q.shape[2]} groups of queries and keys: {shapes}")
    if log_decay.shape not in (v.shape[:3], (*v.shape[:3], channels)):
        raise ValueError(f"scan takes log_decay (b n h) or (b n h k), not {shapes}")
    if bonus is not None and (log_decay.ndim == 3 or bonus.shape != (heads, channels)):
        raise ValueError(f"scan takes bonus (h k), with log_decay (b n h k), not {tuple(bonus.shape)} with {shapes}")


# CUDA


def cuda_kernel(v: Tensor, log_decay: Tensor, bonus: Tensor | None) -> Callable[..., Tensor] | None:
    """The fla-core kernel for such inputs, if there is one: a function of q, k, v and log_decay, of h heads each."""
    if not has_data_on_cuda(v) or v.dtype == torch.float64 or (kernels := fla_kernels()) is None:
        return None
    simple_gla, gla, rwkv6 = kernels
    if log_decay.ndim == 4 and v.shape[-1] == 1:
        return None  # the kernels multiply in tiles of 16 channels

    def run(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
        if len(v) * v.shape[2] > MAX_BATCH:  # one grid row a sequence and head
            parts = zip(*(x.split(max(1, MAX_BATCH // v.shape[2])) for x in (q, k, v, log_decay)))
            return torch.cat([run(*part) for part in parts])
        if log_decay.ndim == 3:
            return simple_gla(q, k, v, g=log_decay, scale=1.0)[0]
        if bonus is None:
            return gla(q, k, v, log_decay, scale=1.0)[0]
        return rwkv6(q, k, v, log_decay, bonus, scale=1.0)[0]

    return run


def has_data_on_cuda(x: Tensor) -> bool:
    """Tell whether a kernel may read x: the tensors of a planning pass are of a subclass, and have no data."""
    return x.is_cuda and type(x) is Tensor


@cache
def fla_kernels() -> tuple[Callable[..., Any], ...] | None:
    try:
        from fla.ops.gla import chunk_gla
        from fla.ops.rwkv6 import chunk_rwkv6
        from fla.ops.simple_gla import chunk_simple_gla
    except ImportError:
        return None
    return chunk_simple_gla, chunk_gla, chunk_rwkv6
