"""The rule of `torch.nn.attention.flex_attention`, whose score and mask functions read global positions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from dsp.comm.balanced_rows import RowDeal, deal_of
from dsp.comm.gradients import NoView
from dsp.comm.layout import Cut, chunk
from dsp.core.carrier import Carrier
from dsp.core.torch_calls import GlueError
from dsp.glue.rules.attention import shared_heads
from dsp.glue.rules.call import DealtRows, Frame, Outcome, rule
from dsp.support.private import FLEX, _disable_current_modes, compiling

KERNELS = 64  # pairs of functions, and kinds of shapes, that one process compiles the kernel for
ROUNDS = 16  # rounds of dealing at least, if there are enough blocks of queries, so that uneven work is spread
SAMPLE = 256  # positions, at least, at which a mask is sampled


def flex_attention(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """torch's function of that name as one operation of glue: (b h q c), lse and largest (b h q).

    options: the score function, the block mask as a tuple that ends in the mask function, scale and options. It
    compiles its kernel itself, fused on any device except a CPU.
    """
    if has_torch_function((query, key, value)):
        for t in captured_by(options):
            if isinstance(t, Carrier):
                t.record.driver.read_in_full(t, unreadable())
        return handle_torch_function(flex_attention, (query, key, value), query, key, value, *options)
    with compiling(KERNELS):
        compiled = kernel("eager" if query.device.type == "cpu" else "inductor")
        parts = map(NoView.apply, (query, key, value))  # the compiler reads the base of a view, which may be a carrier
        out, *said = compiled(*parts, *options[:4])  # the compiler finds the tensors that functions read
    lse, largest = (t if t.numel() else out.new_zeros(()).expand(out.shape[:-1]) for t in said)  # if not requested
    return out, lse, largest


def captured_by(options: Sequence[Any]) -> list[Tensor]:
    """The tensors that the score and mask functions of a call read; `options`: the arguments after the first three."""
    return [t for f in (options[0], options[1][-1]) for t in captured(f)]


def unreadable() -> GlueError:
    return GlueError(
        "flex_attention() between stages: its score or mask function indexes a sharded tensor with positions of the "
        "full tensor. Let it read a replicated tensor: a parameter, or an input of the model that stages[''] does "
        "not name"
    )


@functools.cache
def kernel(backend: str) -> Callable[..., Any]:
    """The compiled kernel, as torch's own function would compile it."""

    def flex(*args: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():  # tensors that its functions read would get no gradient
            raise GlueError(
                "flex_attention() between stages needs a compiled kernel, but torch.compile is switched off: allow it "
                "(torch.compiler.set_stance, TORCH_COMPILE_DISABLE), or make a stage of it, a submodule with a pattern"
            )
        return torch.ops.higher_order.flex_attention(*args)

    return torch.compile(flex, backend=backend, fullgraph=True)


def without_data(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Results while a forward is recorded, with the cost of attention without a mask."""
    groups = query.shape[1] // key.shape[1]
    out = F.scaled_dot_product_attention(query, key, value, enable_gqa=groups > 1)
    lse = out.mean(-1, dtype=torch.float64 if out.dtype == torch.float64 else torch.float32)
    return out, lse, torch.empty_like(lse, requires_grad=False)


def captured(function: Any, depth: int = 4) -> Iterator[Tensor]:
    """The tensors that a function reads besides its arguments: in its closure, and in functions that it holds."""
    if isinstance(function, Tensor):
        yield function
    if depth == 0 or not callable(function):
        return
    inner = getattr(function, "__wrapped__", None), getattr(function, "func", None), getattr(function, "__self__", None)
    values = [*inner, *getattr(function, "args", ()), *(getattr(function, "__defaults__", None) or ())]
    for cell in getattr(function, "__closure__", None) or ():
        try:
            values.append(cell.cell_contents)
        except ValueError:  # not bound yet
            continue
    if not values[3:] and not isinstance(function, type) and not hasattr(function, "__code__"):
        values += vars(function).values() if hasattr(function, "__dict__") else ()
    for value in values:
        for one in value if isinstance(value, (list, tuple)) else (value,):
            if one is not None:
                yield from captured(one, depth - 1)


@rule("flex_attention")
def flex(f: Frame) -> Outcome:
    """Sharded along samples, heads, or query positions; block mask and functions are adapted to global positions."""
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
        raise f.refuse("its block mask cannot be cut along positions in a fold")
    size, expand = q.shape[cut.dim], None
    if cut.dim == 1 and k.shape[1] != size:
        outcome, expand = shared_heads(f, q, k, v, -3)
    else:
        outcome = Outcome(cut, size)
    narrow_others(f, outcome, cut, size)
    if any(o.cut is not None and o.shape[cut.dim] != size for o in (k, v)) and not outcome.rows:
        raise f.refuse("its keys and values are of another size along the sharded dim")
    outcome.func = Local(cut, *chunk(size // cut.folds, f.n, f.rank), size // cut.folds, expand)
    if cut.dim == 2:
        deal_queries(f, outcome)
    return outcome


def deal_queries(f: Frame, outcome: Outcome) -> None:
    """Deal queries to the ranks first if their work may be uneven, and send the requested results back."""
    (q, k), options, cut = f.args[:2], f.args[6], outcome.cut
    assert cut is not None
    if (deal := dealt(f.args[4], f.n, q.shape[2], k.shape[2])) is not None:
        requests = options.get("OUTPUT_LOGSUMEXP", True), options.get("OUTPUT_MAX", True)
        outcome.deal = DealtRows(0, deal, (0, *(i for i, asks in enumerate(requests, 1) if asks)))
        outcome.func = OfPieces(cut, *chunk(deal.size, f.n, f.rank), outcome.deal, f.rank)


def dealt(blocks: Any, n: int, rows: int, keys: int) -> RowDeal | None:
    """The deal of queries to n ranks, in full blocks of a mask, if their work may be uneven; else None."""
    step, function = blocks[-3], blocks[-1]
    count = -(-rows // step)
    if count < 2 * n or plain(function) or even(function, n, rows, keys):
        return None
    return deal_of(rows, n, step * max(1, count // (ROUNDS * n)))


def even(function: Any, n: int, rows: int, keys: int) -> bool:
    """Tell whether the n chunks of queries see about equally many keys, by a sample.

    False for a function that reads tensors, which have no data while a plan is made.
    """
    if any(True for _ in captured(function)):
        return False
    count = n * -(-SAMPLE // n)
    with _disable_current_modes():
        places, first = torch.arange(count, device="cpu"), torch.zeros((), dtype=torch.long, device="cpu")
        try:
            seen = function(first, first, (places * rows // count)[:, None], places * keys // count)
        except Exception:  # it may take only single positions
            return False
        each = seen.expand(count, count).reshape(n, -1).sum(1, dtype=torch.float)
        return bool(each.max() <= 1.1 * each.mean())


def narrow_others(f: Frame, outcome: Outcome, cut: Cut, size: int) -> None:
    """Let each rank take its shard of replicated tensors that have the sharded dim too."""
    q = f.args[0]
    for i, o in enumerate(f.operands()):
        if i in outcome.rows or o.cut is not None or (cut.dim == 2 and o is not q) or o.ndim < 3:
            continue
        if o.shape[cut.dim] == size > 1:
            outcome.narrow[i] = cut
        elif o.shape[cut.dim] > 1 or o is q:
            raise f.refuse(f"a tensor, or its block mask, has {o.shape[cut.dim]} where the sharded dim has {size}")


class Local:
    """The kernel on a rank's shard: `length` of `extent` positions from `start` on, of each fold along `cut`."""

    def __init__(self, cut: Cut, start: int, length: int, extent: int, expand: Any) -> None:
        self.cut, self.start, self.length, self.extent, self.expand = cut, start, length, extent, expand

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, score: Any, blocks: Any, *options: Any) -> Any:
        if self.expand is not None:
            key, value = self.expand(key), self.expand(value)
        if 0 in query.shape[:-1]:  # all take part, since they may need gradients
            out = query.sum(-1, keepdim=True) + value.sum() + key.sum()
            out = out.expand(*query.shape[:-1], value.shape[-1])
            lse = out.sum(-1).to(torch.float64 if out.dtype == torch.float64 else torch.float32)
            return out, lse, lse.detach()
        if self.cut.dim == 2:
            blocks = self.rows(blocks)
        blocks = (*blocks[:-1], self.moved(blocks[-1], self.cut.dim))
        return flex_attention(query, key, value, self.moved(score, self.cut.dim + 1), blocks, *options)

    def moved(self, function: Any, at: int) -> Any:
        """The same function of (score,) b, h, q, k, if argument number `at` is a position on this rank."""
        if plain(function) or (place := self.place()) is None:
            return function

        def of_the_whole(*args: Any) -> Any:
            return function(*args[:at], place(args[at]), *args[at + 1 :])

        return of_the_whole

    def place(self) -> Callable[[Tensor], Tensor] | None:
        """A map from positions on this rank to global ones; None if they are equal."""
        start, length, extent = self.start, self.length, self.extent
        if self.cut.outer != 1:
            return lambda i: i // length * extent + start + i % length
        return (lambda i: i + start) if start else None

    def rows(self, blocks: Any) -> Any:
        """The block mask for queries from `start` on; each of its blocks overlaps one or two of the full mask."""
        step, stop = blocks[-3], self.start + self.length
        starts = range(self.start, stop, step)
        last = [(min(i + step, stop) - 1) // step for i in starts]
        return rows_of(blocks, [i // step for i in starts], last, self.length)


class OfPieces(Local):
    """The kernel on queries that were dealt to this rank in full blocks; it holds `length` from `start` on."""

    def __init__(self, cut: Cut, start: int, length: int, dealing: DealtRows, rank: int) -> None:
        super().__init__(cut, start, length, dealing.deal.size, None)
        self.deal, self.rank, self.results = dealing.deal, rank, dealing.results

    def __call__(self, *args: Any) -> Any:
        outputs = super().__call__(*args)
        shape = *args[0].shape[:2], self.length
        return tuple(t if i in self.results else t.new_zeros(()).expand(shape) for i, t in enumerate(outputs))

    def place(self) -> Callable[[Tensor], Tensor]:
        step, n, rank = self.deal.step, self.deal.n, self.rank

        def of_the_whole(i: Tensor) -> Tensor:
            turn = i // step
            return (turn * n + rank + turn % 2 * (n - 1 - 2 * rank)) * step + i % step

        return of_the_whole

    def rows(self, blocks: Any) -> Any:
        step = blocks[-3]
        numbers = [i for start, stop in self.deal.spans(self.rank) for i in range(start // step, -(-stop // step))]
        return rows_of(blocks, numbers, numbers, self.deal.local_size(self.rank))


def plain(function: Any) -> bool:
    """Tell whether a function is one of torch's own, which read no position."""
    return getattr(function, "__module__", "") == FLEX and getattr(function, "__closure__", None) is None


def rows_of(blocks: Any, first: list[int], last: list[int], count: int) -> Any:
    """A block mask for `count` queries: each block needs the keys of the `first` and the `last` block that it overlaps.

    blocks: torch's tuple: lengths of q and k; for each row of blocks the number and the indices of partial key blocks
    (b h rows), and of full ones; ...; sizes of a block; the mask function.
    """
    from torch.nn.attention.flex_attention import BlockMask

    lengths, step, function = blocks[:2], blocks[-3:-1], blocks[-1]
    some = dense(*blocks[2:4])
    full = dense(*blocks[4:6]) if blocks[4] is not None else torch.zeros_like(some)
    # a block is full if both are full and it does not end short of queries
    whole = full[:, :, first] & full[:, :, last]
    if count % step[0]:
        whole[:, :, -1] = False
    met = ((some | full)[:, :, first] | (some | full)[:, :, last]) & ~whole
    mask = BlockMask.from_kv_blocks(
        *ordered(met), *ordered(whole), BLOCK_SIZE=step, mask_mod=function, seq_lengths=(count, lengths[1])
    )
    return mask.as_tuple()


def dense(count: Tensor, which: Tensor) -> Tensor:
    """(b h rows blocks): whether a row of blocks needs a block of keys."""
    named = torch.arange(which.shape[-1], device=which.device) < count[..., None]
    none = torch.zeros(which.shape, dtype=torch.int32, device=which.device)
    return none.scatter_add(-1, which.long(), named.int()) > 0


def ordered(met: Tensor) -> tuple[Tensor, Tensor]:
    """The number of key blocks that each row needs, and indices of key blocks with these first."""
    met = met.int()
    return met.sum(-1, dtype=torch.int32), torch.argsort(met, dim=-1, descending=True, stable=True).int()
