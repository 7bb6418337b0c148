"""Writes in place between stages: every tensor that shares the memory sees a write, or the write is refused.

On one device a view shares memory with its base. On a rank the view may be a copy: of a tensor that was moved first, or
of a shard whose strides allow no view. A tensor's `_dsp_copy_of` names the memory that its own memory is a copy of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dsp.calls import GlueError
from dsp.layout import Axis, Cut
from dsp.lines import line_now
from dsp.private import StorageWeakRef, is_alias
from dsp.run.views import forget, view_base
from dsp.sharded import Moved, Sharded, carry, plain
from dsp.tensors import memory, overlap, tensors_in, version

# the errors of writes that are refused
MISSED = (
    "{who} wrote in place into a copy of a tensor. The copy was made when that tensor, or one that shares its "
    "memory, was switched or gathered. The original lacks that write, and the forward now reads the original. Use an "
    "out-of-place operation"
)
INTO_COPY = "{who} writes in place into {what}; use an out-of-place operation"
INTO_PART = (
    "{who} writes in place into this rank's part of a replicated tensor: the rest of the tensor, which the rank holds, "
    "too, would miss the write. Use an out-of-place operation"
)


def copy_source(t: Tensor) -> Any:
    """The memory of which a tensor's memory is a copy, or a text that names that memory; None if it is not a copy."""
    return t.__dict__.get("_dsp_copy_of")


class Writes:
    """The writes of one forward.

    stale: memory that missed a write, the operation and line that wrote, and the memory written; copied: pairs of a
    memory and its copy's, for copies that results view; has_copies: a replicated tensor is a copy, not to be written.
    """

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self.stale: list[tuple[StorageWeakRef, str, str, StorageWeakRef]] = []
        self.copied: list[tuple[Any, StorageWeakRef]] = []
        self.has_copies = False

    def refuse_stale(self, t: Tensor) -> None:
        """Raise GlueError if the memory of a tensor has missed a write in place."""
        for missed, name, line, _ in self.stale:
            if missed == memory(t):
                error = GlueError(MISSED.format(who=name))
                error.line = line
                raise error

    def wrote(self, who: str, t: Tensor, local: Tensor) -> None:
        """Note a write in place into `local`, the local form of `t`: other memory of the same tensor becomes stale."""
        copied, by = copy_source(t), memory(local)
        if isinstance(copied, str):
            raise GlueError(INTO_COPY.format(who=who, what=copied))
        if not isinstance(t, Sharded) and local is not t:
            raise GlueError(INTO_PART.format(who=who))
        missed = [copied] if copied is not None else []
        if memory(t) != by:
            missed.append(memory(t))
        missed += [copy for of, copy in self.copied if of == (copied or memory(t)) and copy != by]
        if missed:
            line = line_now()
            self.stale += [(other, who, line, by) for other in missed]

    def written_back(self, x: Tensor, index: Any, value: Any) -> None:
        """Note that `x[index] = value` comes next: if value is a copy of x[index], x now gets the writes it missed."""
        read = value.__dict__.get("_dsp_read") if isinstance(value, Tensor) else None
        if read is not None and read[0] is x and read[1] == index:
            self.stale = [s for s in self.stale if (s[0], s[-1]) != (memory(x), memory(value))]

    def mark_copies(self, outputs: list[Tensor], operands: Iterable[tuple[Tensor, Sharded | None, Tensor]]) -> None:
        """Mark results that view a copy: a write into such a result would miss the tensor that was copied."""
        copied: dict[Any, Any] = {}
        for t, shell, local in operands:
            own = t if shell is None else shell
            of = copy_source(own)
            if of is None and shell is None and local is not t:
                of = "this rank's part of a tensor that every rank holds in full"
            elif of is None and shell is not None and memory(shell) != memory(local):
                of = memory(shell)
            if of is not None:
                copied[memory(local)] = of
        for t in outputs if copied else ():
            of = copied.get(memory(t))
            if of is not None:
                self.mark(t, of)

    def mark_moved(
        self, made: Sequence[Tensor], results: Sequence[Tensor], moves: Sequence[bool], given: Sequence[Tensor]
    ) -> None:
        """Mark a stage's moved results (`made`) that shared memory with another result or with an input.

        The plan moves no such result if the planned forward writes into the memory later; this forward may write.
        """
        for t, own, moved in zip(made, results, moves):
            for x in (*results, *given) if moved and own.numel() else ():
                if x is not own and is_alias(own, x) and overlap(own, x):
                    self.mark(t, memory(own))

    def mark(self, t: Tensor, copied: Any) -> None:
        """Note that the memory of `t` is a copy of `copied`, a memory or a text that names it."""
        t._dsp_copy_of = copied  # type: ignore[attr-defined]
        self.has_copies |= not isinstance(t, Sharded)
        self.copied += [] if isinstance(copied, str) else [(copied, memory(t))]

    def mark_copy(self, local: Tensor, x: Tensor) -> None:
        """Note that `local` is a copy of x where one device has a view: a write into either makes the other stale."""
        local._dsp_copy_of = of = copy_source(x) or memory(x)  # type: ignore[attr-defined]
        self.copied.append((of, memory(local)))

    def reshape_copied(self, x: Sharded, t: Sharded) -> None:
        """Note that t, on one device a view of x, is a copy on this rank, whose shard of x has other strides."""
        if 0 not in t.at.local:
            self.mark(t, copy_source(x) or memory(x))

    @contextmanager
    def around(
        self, who: str, into: Sequence[Tensor], tensors: Sequence[Tensor], shells: Sequence[Sharded | None],
        parts: Sequence[Tensor], cuts: Sequence[Cut | None],
    ) -> Iterator[Callable[[Any], Any]]:  # fmt: skip
        """Run an operation inside this context: its writes in place reach all tensors that share the memory, or raise.

        who: the operation's name; into: the tensors that it writes into by its traits; shells: `tensors` as glue holds
        them; parts: the local tensors that run, in `cuts`. Yields a function that marks results that view a copy.
        """
        versions, known = [version(t) for t in parts], set(map(id, into))

        def views(out: Any) -> Any:
            if known and any(s is not None for s in shells) and hasattr(out, "wait"):  # async_op=True
                out.wait()  # the data that it receives are copied next
            self.mark_copies(tensors_in(out), zip(tensors, shells, parts))
            return out

        yield views
        for t, x, s, c, before in zip(tensors, parts, shells, cuts, versions):
            counted = version(x) != before
            if not counted and id(t) not in known:
                continue
            if s is not None:
                forget(s)
                if not counted and c is None:
                    x = self.copy_back(s, x)
            self.wrote(f"{who}() between stages", t if s is None else s, x)
            if s is not None and memory(x) != memory(s):
                if c is None:  # the full tensor was written, on every rank
                    x, c = self.axis.narrow(x, s.at.cut), s.at.cut
                if type(s) is Sharded:
                    s.__class__ = Moved
                s.now = carry(x, self.axis.at(s.at.shape, c), s.number)  # type: ignore[attr-defined]

    def copy_back(self, s: Sharded, full: Tensor) -> Tensor:
        """Copy this rank's rows of a full copy of `s` into its shard, after a write that autograd did not see.

        On one device neither autograd nor the version counter notices a collective's write, and nor do they here.
        """
        with torch._C.DisableTorchFunction(), torch.no_grad():
            s.data.copy_(self.axis.narrow(full.data, s.at.cut))
        if s.viewed_from is None:
            view_base(s)[None] = full
        return plain(s)
