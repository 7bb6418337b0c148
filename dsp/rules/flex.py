"""The rule of `torch.nn.attention.flex_attention`, whose score and mask functions are told global places."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from dsp.layout import Cut, chunk
from dsp.private import compiling
from dsp.rules.attention import shared_heads
from dsp.rules.call import Frame, GlueError, Outcome, rule
from dsp.sharded import Sharded

KERNELS = 64  # pairs of functions, and kinds of shapes, that the kernel of one process is compiled for
OWN = "torch.nn.attention.flex_attention"  # the module of functions that read no place: those of no mask, no change


def flex_attention(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    """torch's function of that name as one operation of glue: (b h q c), lse and largest (b h q).

    rest: the score function, the block mask as a tuple that ends in the mask function, scale and options. It compiles
    its kernel by itself, fused on any device but a CPU.
    """
    if has_torch_function((query, key, value)):
        if any(isinstance(t, Sharded) for t in captured_by(rest)):
            raise unreadable()
        return handle_torch_function(flex_attention, (query, key, value), query, key, value, *rest)
    with compiling(KERNELS):
        compiled = kernel("eager" if query.device.type == "cpu" else "inductor")
        parts = (t.view_as(t) for t in (query, key, value))  # kept for backward, where they are no sharded tensors
        out, *said = compiled(*parts, *rest[:4])  # what functions read is found by the compiler
    lse, largest = (t if t.numel() else out.new_zeros(()).expand(out.shape[:-1]) for t in said)  # not asked for
    return out, lse, largest


def captured_by(rest: Sequence[Any]) -> list[Tensor]:
    """The tensors that the score and mask functions of a call read; `rest`: its arguments after the first three."""
    return [t for f in (rest[0], rest[1][-1]) for t in captured(f)]


def unreadable() -> GlueError:
    return GlueError(
        "flex_attention() between stages: its score or mask function reads a tensor that is sharded, by places "
        "that only the whole has. Let the function read a whole one: an input that the root pattern leaves "
        "out, or a parameter"
    )


@functools.cache
def kernel(backend: str) -> Callable[..., Any]:
    """As torch's own function has it compiled."""

    def flex(*args: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():  # what its functions read would get no gradient
            raise GlueError(
                "flex_attention() between stages compiles its kernel, and torch.compile did not: allow it to "
                "(torch.compiler.set_stance, TORCH_COMPILE_DISABLE), or make a stage of it, a submodule with a pattern"
            )
        return torch.ops.higher_order.flex_attention(*args)

    return torch.compile(flex, backend=backend, fullgraph=True)


def rehearsed(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The results for tensors without data, at the cost of attention without a mask."""
    groups = query.shape[1] // key.shape[1]
    out = F.scaled_dot_product_attention(query, key, value, enable_gqa=groups > 1)
    lse = out.mean(-1, dtype=torch.float64 if out.dtype == torch.float64 else torch.float32)
    return out, lse, torch.empty_like(lse, requires_grad=False)


def captured(function: Any, depth: int = 4) -> Iterator[Tensor]:
    """The tensors that a function reads besides its arguments: of what it closes over, and of such functions in it."""
    if isinstance(function, Tensor):
        yield function
    if depth == 0 or not callable(function):
        return
    inner = getattr(function, "__wrapped__", None), getattr(function, "func", None), getattr(function, "__self__", None)
    held = [*inner, *getattr(function, "args", ()), *(getattr(function, "__defaults__", None) or ())]
    for cell in getattr(function, "__closure__", None) or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:  # not bound yet
            continue
    if not held[3:] and not isinstance(function, type) and not hasattr(function, "__code__"):
        held += vars(function).values() if hasattr(function, "__dict__") else ()
    for value in held:
        for one in value if isinstance(value, (list, tuple)) else (value,):
            if one is not None:
                yield from captured(one, depth - 1)


@rule("flex_attention")
def flex(f: Frame) -> Outcome:
    """Along samples, heads, or positions of queries; the block mask and the functions' places are moved along."""
    q, k, v = f.args[:3]
    cuts = {o.cut for o in (q, k, v) if o.cut is not None}
    if any(o.cut is not None and o not in (q, k, v) for o in f.operands()):
        raise f.refuse("its block mask is sharded", "Make the mask of whole tensors")
    if len(cuts) > 1:
        raise f.refuse("its tensors are sharded along different dims")
    (cut,) = cuts
    if cut.dim == 3 or (cut.dim == 2 and (k.cut or v.cut)):
        raise f.refuse("it computes over the sharded dim")
    if cut.dim == 2 and cut.outer != 1:
        raise f.refuse("positions in a fold are in no block of its mask")
    size, expand = q.shape[cut.dim], None
    if cut.dim == 1 and k.shape[1] != size:
        outcome, expand = shared_heads(f, q, k, v, -3)
    else:
        outcome = Outcome(cut, size)
    narrow_others(f, outcome, cut, size)
    if any(o.cut is not None and o.shape[cut.dim] != size for o in (k, v)) and not outcome.rows:
        raise f.refuse("its keys and values are of another size along the sharded dim")
    outcome.func = Local(cut, *chunk(size // cut.folds, f.n, f.rank), size // cut.folds, expand)
    return outcome


def narrow_others(f: Frame, outcome: Outcome, cut: Cut, size: int) -> None:
    """Have each rank take its part of whole tensors that have the sharded dim, too."""
    q = f.args[0]
    for i, o in enumerate(f.operands()):
        if i in outcome.rows or o.cut is not None or (cut.dim == 2 and o is not q) or o.ndim < 3:
            continue
        if o.shape[cut.dim] == size > 1:
            outcome.narrow[i] = cut
        elif o.shape[cut.dim] > 1 or o is q:
            raise f.refuse(f"a tensor, or its block mask, has {o.shape[cut.dim]} where the sharded dim has {size}")


class Local:
    """The kernel on what a rank has: `own` of `extent` places from `start` on, of each fold along `cut`."""

    def __init__(self, cut: Cut, start: int, own: int, extent: int, expand: Any) -> None:
        self.cut, self.start, self.own, self.extent, self.expand = cut, start, own, extent, expand

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, score: Any, blocks: Any, *rest: Any) -> Any:
        if self.expand is not None:
            key, value = self.expand(key), self.expand(value)
        if 0 in query.shape[:-1]:  # all take part, for they may want gradients
            out = query.sum(-1, keepdim=True) + value.sum() + key.sum()
            out = out.expand(*query.shape[:-1], value.shape[-1])
            lse = out.sum(-1).to(torch.float64 if out.dtype == torch.float64 else torch.float32)
            return out, lse, lse.detach()
        if self.cut.dim == 2:
            blocks = rows_of(blocks, self.start, self.own)
        blocks = (*blocks[:-1], self.moved(blocks[-1], self.cut.dim))
        return flex_attention(query, key, value, self.moved(score, self.cut.dim + 1), blocks, *rest)

    def moved(self, function: Any, at: int) -> Any:
        """The same function of (score,) b, h, q, k where argument number `at` is a place on this rank."""
        if (not self.start and self.cut.outer == 1) or plain(function):
            return function
        start, own, extent, folds = self.start, self.own, self.extent, self.cut.outer != 1

        def of_the_whole(*args: Any) -> Any:
            i = args[at]
            i = i // own * extent + start + i % own if folds else i + start
            return function(*args[:at], i, *args[at + 1 :])

        return of_the_whole


def plain(function: Any) -> bool:
    """Tell whether it is one of torch's own, which read no place."""
    return getattr(function, "__module__", "") == OWN and getattr(function, "__closure__", None) is None


def rows_of(blocks: Any, start: int, own: int) -> Any:
    """A block mask for queries from `start` on: each block of theirs meets the keys of the one or two that it was in.

    blocks: as torch has it: length of q and k; of each row of blocks how many of keys it meets in part, and which (b h
    rows), and in full; ...; sizes of a block; the mask function.
    """
    from torch.nn.attention.flex_attention import BlockMask

    lengths, step, function = blocks[:2], blocks[-3:-1], blocks[-1]
    rows = -(-own // step[0])
    first = [(start + r * step[0]) // step[0] for r in range(rows)]
    last = [(min(start + (r + 1) * step[0], start + own) - 1) // step[0] for r in range(rows)]
    some = dense(*blocks[2:4])
    full = dense(*blocks[4:6]) if blocks[4] is not None else torch.zeros_like(some)
    # a block is met in full where both are, and no query is missing at its end
    whole = full[:, :, first] & full[:, :, last]
    if own % step[0]:
        whole[:, :, -1] = False
    met = ((some | full)[:, :, first] | (some | full)[:, :, last]) & ~whole
    made = BlockMask.from_kv_blocks(
        *ordered(met), *ordered(whole), BLOCK_SIZE=step, mask_mod=function, seq_lengths=(own, lengths[1])
    )
    return made.as_tuple()


def dense(count: Tensor, which: Tensor) -> Tensor:
    """(b h rows blocks): whether a row of blocks meets a block of keys."""
    named = torch.arange(which.shape[-1], device=which.device) < count[..., None]
    none = torch.zeros(which.shape, dtype=torch.int32, device=which.device)
    return none.scatter_add(-1, which.long(), named.int()) > 0


def ordered(met: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of keys each row meets, and which, those first."""
    met = met.int()
    return met.sum(-1, dtype=torch.int32), torch.argsort(met, dim=-1, descending=True, stable=True).int()
