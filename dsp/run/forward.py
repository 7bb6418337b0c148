"""One forward of a parallelized model on this rank: what its script says of it, and what it moves."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dsp.gradients import connected_local
from dsp.layout import Axis, Cut, cut_of, separable
from dsp.methods import RankPart
from dsp.moves import Part, gather_local, switch_all, switch_local
from dsp.pending import ahead
from dsp.plan.choices import trace_of
from dsp.plan.events import Trace
from dsp.plan.recorder import Recorder
from dsp.plan.script import INPUTS, Script, Via, Where
from dsp.private import StorageWeakRef
from dsp.rows import Rows, read_rows
from dsp.rules import GlueError
from dsp.run.lookup import NUMBERS, Lookup
from dsp.run.traffic_check import TrafficCheck
from dsp.run.views import ViewBase, differentiable, seen, view_base, views_of
from dsp.sharded import ACTIVE, Sharded, carry, plain
from dsp.stages import Stage
from dsp.tensors import NO, memory

log = logging.getLogger("dsp")


class Unfit(Exception):
    """Why a forward cannot be one graph: what it does, of "it"."""


class Run(Lookup):
    """One forward of a parallelized model on this rank, and what its script says of it."""

    def __init__(
        self, axis: Axis, script: Script | None, root_sizes: dict[str, int], recipes: dict[Any, Any], first: int,
        turns: Mapping[int, int] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(script, script.recipes if script is not None else recipes, first, turns or {})
        self.axis, self.root_sizes = axis, root_sizes
        self.sizes_key = tuple(root_sizes.items())
        self.began = False  # whether a stage has returned
        self.in_stage: InStage | None = None
        self.where: Where = INPUTS  # what moves are for
        self.traffic_check: TrafficCheck | None = None  # compares what it sends with its plan
        self.opened: dict[int, tuple[DTensor, Sharded]] = {}  # by id: one that is used twice is moved once
        # memory that has missed a write in place, whose, and into what memory it was
        self.stale: list[tuple[StorageWeakRef, str, StorageWeakRef]] = []
        self.copied: list[tuple[Any, StorageWeakRef]] = []  # memory, and that of a copy that results are views of
        self.has_copies = False  # whether a whole tensor is a copy that may not be written
        self.failed = 0  # the id of what a stage raised, where tensors are plain: the error would keep all its frames
        self.misread: tuple[BaseException, str] | None = None  # what a stage raised on a part, and what may be amiss
        self.coming: dict[StorageWeakRef, Callable[[], None]] = {}  # memory whose numbers are under way; waits for them
        self.by_graph = False  # whether it is recorded as a graph, see `dsp.run.graph`
        self.recorder: Recorder | None = None  # when no plan could be made ahead: this run, for the next ones
        self.mode: Any = None  # `dsp.run.glue.Glue`, while it is the one that runs

    def observe(self, method: str, *args: Any) -> None:
        """Tell the recorder, if there is one. What it cannot follow is not planned; the run itself goes on."""
        if self.recorder is not None:
            with self.unplanned():
                getattr(self.recorder, method)(*args)

    def traced(self, given: Mapping[str, Cut], gather: bool) -> Trace | None:
        """The problem of this run for the planner, if it was recorded; see `trace_of`."""
        if self.recorder is not None:
            self.recorder.record.random = True
            with self.unplanned():
                return trace_of(self.recorder.record, given, gather)
        return None

    @contextmanager
    def unplanned(self) -> Iterator[None]:
        """Let go of the recorder where it cannot follow."""
        try:
            yield
        except Exception as error:
            log.info("this forward is not planned for the next calls either: %s: %s", type(error).__name__, error)
            self.recorder = None

    # --- sharded tensors ---

    def carry(self, local: Tensor, cut: Cut, shape: Sequence[int], copied: Any = None, number: int = -1) -> Sharded:
        """A tensor of global `shape` of which `local` is this rank's part; `copied`: see `mark_copies`; `number`: its
        own in the record."""
        t = carry(local, self.axis.at(shape, cut), self.first + number)
        if copied is not None:
            t._dsp_copy_of = copied  # type: ignore[attr-defined]
        return t

    def open(self, t: Any) -> Sharded | None:
        """A sharded tensor as glue holds it; None for any other."""
        if isinstance(t, Sharded):
            t = t.__dict__.get("now", t)
            if not -1 <= t.number - self.first < NUMBERS:
                self.met(t)
        if self.stale and isinstance(t, Tensor) and not isinstance(t, DTensor):
            self.seen_writes(t)
        if isinstance(t, Sharded):
            return t
        if not isinstance(t, DTensor):
            return None
        if (opened := self.opened.get(id(t))) is not None:
            return opened[1].__dict__.get("now", opened[1])
        with torch._C.DisableTorchFunction():
            mesh, placements, shape = t.device_mesh, t.placements, tuple(t.shape)
        cut = cut_of(placements[0]) if len(placements) == 1 else None
        if mesh != self.axis.mesh or cut is None:
            raise GlueError(
                f"a DTensor {placements} on mesh {mesh} meets a model that is sharded over {self.axis.mesh}; inputs "
                "must be whole tensors or DTensors sharded over the sequence-parallel mesh"
            )
        made = self.carry(connected_local(t), cut, shape, t.__dict__.get("_dsp_copy_of"))
        if id(t) in self.declared:
            made.number = self.first + self.declared[id(t)]
        else:
            self.met(made)
        self.opened[id(t)] = t, made
        return made

    def seen_writes(self, t: Tensor) -> None:
        """Raises GlueError if its memory has missed a write in place."""
        for missed, name, _ in self.stale:
            if missed == memory(t):
                raise GlueError(
                    f"{name} writes in place, but its tensor, or a view of it, first had to be switched or gathered, "
                    "so the write went into a copy. The original, or a view of it, is used now without that write: "
                    "write it out of place"
                )

    def bring(
        self, tensors: Sequence[Tensor], shells: Sequence[Sharded | None], cuts: Sequence[Cut | None],
        via: Sequence[Sequence[Via]],
    ) -> list[Tensor]:  # fmt: skip
        """The operands of an operation, cut as it needs them (None: whole); a sharded one that lies so as it is."""
        if any(via):
            self.copy_first(shells, via)
        moving = [(s, c) for s, c in zip(shells, cuts) if s is not None and s.at.cut != c]
        moved = iter(self.move_all(moving) if moving else ())
        parts: list[Tensor] = []
        for t, s, c in zip(tensors, shells, cuts):
            if s is None:
                parts.append(t if c is None else self.axis.narrow(t, c))
            else:
                parts.append(s if s.at.cut == c else next(moved))
        return parts

    def move(self, t: Sharded, cut: Cut | None) -> Tensor:
        """This rank's part under another cut (None: whole)."""
        return self.move_all([(t, cut)])[0]

    def move_all(self, wanted: Sequence[tuple[Sharded, Cut | None]]) -> list[Tensor]:
        """Several moves at one place: each is made once for a tensor and all its views; small switches share a call."""
        if all(cut == t.at.cut for t, cut in wanted):
            return [plain(t) for t, _ in wanted]
        for t, cut in wanted if self.stale else ():
            if cut != t.at.cut:  # a view may see what its base missed
                self.seen_writes(view_base(t).local)
        todo: dict[tuple[int, Cut], tuple[ViewBase, Cut]] = {}
        bases = [view_base(t) for t, _ in wanted]
        sources = [self.source(t, cut, base) for (t, cut), base in zip(wanted, bases)]
        for base, source in zip(bases, sources):
            if isinstance(source, Cut) and source not in base:
                if None in base:
                    self.narrow(base, source)
                else:
                    todo.setdefault((id(base.copies), source), (base, base.cut))
        if todo:
            self.switch(todo)
        return [self.view(t, cut, source, base) for (t, cut), source, base in zip(wanted, sources, bases)]

    def source(self, t: Sharded, cut: Cut | None, base: ViewBase) -> Cut | Literal["whole", "view"]:
        """The cut of a tensor's base that gives the tensor in another cut; "view" if no cut of the base does.

        Where no one all-to-all leads to it, for both are parts of one dim, the base is gathered first.
        """
        if cut is None:
            return "whole"
        if cut == t.at.cut:
            return base.cut
        found, views = cut, views_of(t)
        if views:
            cuts = base.cuts
            key = (cut, *cuts, *views[:-1])
            known = views[-1].near
            if key not in known:
                dims = range(len(base.shape))
                folds = (Cut(d, k) for d, size in enumerate(base.shape) for k in range(2, size) if size % k == 0)
                folds = (Cut(d, cut.outer) for d in dims) if cut.joined else folds
                candidates = chain(cuts, map(Cut, dims), folds)
                known[key] = next((c for c in candidates if c is not None and seen(views, c) == cut), None)
            near = known[key]
            if near is None:
                return "view"
            found = near
        if found not in base and not separable(base.shape, base.cut, found, self.axis.size):
            self.gather(base)
        return found

    def gather(self, base: ViewBase, src: Cut | None = None) -> Tensor:
        if None not in base:
            with differentiable(base.local):
                src = src or base.cut
                base[None] = gather_local(base[src], src, base.shape, self.axis)
        return base[None]

    def narrow(self, base: ViewBase, dst: Cut) -> None:
        with differentiable(base.local):
            base[dst] = self.axis.narrow(base[None], dst)

    def switch(self, todo: Mapping[tuple[int, Cut], tuple[ViewBase, Cut]]) -> None:
        """Copies in new cuts, each made of the one named: small ones share a call."""
        parts = [Part(base[src], src, dst, base.shape) for (_, dst), (base, src) in todo.items()]
        with differentiable(*[p.local for p in parts]):
            made = switch_all(parts, self.axis)
        for ((_, dst), (base, _)), local in zip(todo.items(), made):
            base[dst] = local

    def read(self, wanted: Sequence[tuple[Tensor, Cut | None, tuple[Rows, ...]]]) -> list[Any]:
        """The spans that this rank reads of tensors, in one exchange; of a whole one (cut None) no rank sends any."""
        pairs = [(t, rows) for t, cut, spans in wanted if cut is not None for rows in spans]
        came = iter(read_rows([t for t, _ in pairs], [rows for _, rows in pairs], self.axis.group))
        found: list[Any] = []
        for t, cut, spans in wanted:
            if cut is None:
                ends = [(rows.dim, *rows.spans[self.axis.rank]) for rows in spans]
                own = [t.narrow(dim, start, stop - start) for dim, start, stop in ends]
            else:
                own = [next(came) for _ in spans]
            found.append(own[0] if len(own) == 1 else own)
        return found

    def copy_first(self, tensors: Sequence[Sharded | None], via: Sequence[Sequence[Via]]) -> None:
        """Make the copies that the plan makes here, each of the copy that it is cheapest to make of."""
        todo: dict[tuple[int, Cut], tuple[ViewBase, Cut]] = {}
        for base, src, dst in [(view_base(t), *way) for t, ways in zip(tensors, via) if t is not None for way in ways]:
            if src is not None and (id(base.copies), src) in todo:
                self.switch(todo)
                todo.clear()
            if dst in base or src not in base:
                continue
            if src is None and dst is not None:
                self.narrow(base, dst)
            elif dst is None and src is not None:
                self.gather(base, src)
            elif src is not None and dst is not None:
                todo[id(base.copies), dst] = base, src
        if todo:
            self.switch(todo)

    def wrote(self, who: str, t: Tensor, local: Tensor) -> None:
        """Note a write in place into `local`, which stands for `t`: other memory of the same tensor is stale then."""
        copied, by = t.__dict__.get("_dsp_copy_of"), memory(local)
        if isinstance(copied, str):
            raise GlueError(f"{who} writes in place into {copied}; write it out of place")
        if copied is not None:
            self.stale.append((copied, who, by))
        if not isinstance(t, Sharded) and local is not t:
            raise GlueError(f"{who} writes in place into its part of a tensor that is whole; write it out of place")
        if memory(t) != by:
            self.stale.append((memory(t), who, by))
        self.stale += [(copy, who, by) for of, copy in self.copied if of == (copied or memory(t)) and copy != by]

    def written_back(self, x: Tensor, index: Any, value: Any) -> None:
        """Note that `x[index] = value` comes next: if value is a copy of that part, x misses none of its writes."""
        read = value.__dict__.get("_dsp_read") if isinstance(value, Tensor) else None
        if read is not None and read[0] is x and read[1] == index:
            self.stale = [s for s in self.stale if (s[0], s[2]) != (memory(x), memory(value))]

    def mark_copies(self, outputs: list[Tensor], operands: Iterable[tuple[Tensor, Sharded | None, Tensor]]) -> None:
        """Mark results that are views of a copy: what is written into them the tensor that was copied must not miss."""
        copied: dict[Any, Any] = {}
        for t, shell, local in operands:
            own = t if shell is None else shell
            of = own.__dict__.get("_dsp_copy_of")
            if of is None and shell is None and local is not t:
                of = "its part of a tensor that is whole"
            elif of is None and shell is not None and memory(shell) != memory(local):
                of = memory(shell)
            if of is not None:
                copied[memory(local)] = of
        for t in outputs if copied else ():
            of = copied.get(memory(t))
            if of is not None:
                self.mark(t, of)

    def mark(self, t: Tensor, copied: Any) -> None:
        """Note that the memory of `t` is a copy of `copied`, a memory or a text that names it."""
        t._dsp_copy_of = copied  # type: ignore[attr-defined]
        self.has_copies |= not isinstance(t, Sharded)
        self.copied += [] if isinstance(copied, str) else [(copied, memory(t))]

    def reshape_copied(self, x: Sharded, t: Tensor) -> None:
        """Note that t, a view of x on one device, is a copy on this rank, whose part of x lies otherwise in memory."""
        if t.numel():
            self.mark(t, x.__dict__.get("_dsp_copy_of") or memory(x))

    def view(self, t: Sharded, cut: Cut | None, source: Cut | Literal["whole", "view"], base: ViewBase) -> Tensor:
        if cut == t.at.cut:
            return plain(t)
        if source == "view":
            assert cut is not None
            if None not in base and separable(t.at.shape, t.at.cut, cut, self.axis.size):
                return switch_local(plain(t), t.at.cut, cut, t.at.shape, self.axis)
            return self.axis.narrow(self.view(t, None, "whole", base), cut)
        at = None if source == "whole" else source
        local = self.gather(base) if at is None else base[at]
        views = views_of(t)
        for view in views:
            again = view.under(at)
            assert again is not None  # `source` has asked
            local, at = again.of(local), again.cut
        with NO():
            made = t.grad_fn
        # a view that was made without gradient has none now either
        return local.detach() if views and made is None else local

    def arrive(self, tensors: Iterable[Tensor] | None = None) -> None:
        """Wait for the numbers of these tensors, or of all, where they are under way."""
        for of in list(self.coming) if tensors is None else map(memory, tensors):
            if (arrived := self.coming.pop(of, None)) is not None:
                with torch._C.DisableTorchFunction():  # it is no operation of the model
                    arrived()

    def send_ahead(self, part: Part) -> Tensor:
        """A part that nobody writes, switched; nobody reads what it becomes but after `arrive`."""
        made, arrived = ahead(*part.opened(self.axis), self.axis.group, *(part.pieces or ()), wire=self.axis.wire)
        self.coming[memory(made)] = arrived
        return made

    def land(self, parts: Sequence[Part], numbers: Iterable[int]) -> list[Tensor]:
        """The results of an operation or stage as the model sees them, moved to where the plan wants them."""
        moved = zip(self.push_all(parts), parts, numbers)
        return [self.carry(t, p.dst, p.shape, number=number) for t, p, number in moved]

    def share_out(self, tensors: Sequence[Tensor], push: Iterable[Cut | None], numbers: Iterable[int]) -> list[Tensor]:
        """This rank's part of whole results where the plan wants it; of other operands than it had they may not fit."""

        def own(t: Tensor, cut: Cut | None, number: int) -> Tensor:
            if cut is None or not cut.fits(t.shape):
                return t
            return self.carry(self.axis.narrow(t, cut), cut, t.shape, number=number)

        return list(map(own, tensors, push, numbers))

    def push_all(self, parts: Sequence[Part]) -> list[Tensor]:
        """The results of an operation or stage, switched to where the plan wants them."""
        moving = [p for p in parts if p.dst != p.src]
        moved = iter(switch_all(moving, self.axis) if moving else ())
        return [next(moved) if p.dst != p.src else p.local for p in parts]


class Given(NamedTuple):
    """A tensor of a stage call: as the model holds it, this rank's part of it, and what the stage sees of that."""

    tensor: Tensor
    shell: Sharded | None
    part: Tensor
    local: Tensor  # with a dummy row where the part is empty
    cut: Cut | None  # of the part
    written: int  # how often, before

    def missed(self) -> Tensor:
        """This rank's part, which is empty, after a write into the row that stood for it: it has seen that, too."""
        if self.local is not self.part and self.cut is not None:
            self.part.copy_(self.local.narrow(self.cut.dim, 0, 0))
        return self.part


class InStage(NamedTuple):
    """The stage call that runs now: its `StageDecision`, what it runs on, and what it was given."""

    stage: Stage
    decision: Any
    place: RankPart
    random: Any
    given: list[Given]


def current_place() -> RankPart | None:
    """The place of the stage call that runs now; None outside of one."""
    current = ACTIVE.get()
    return None if current is None or current[1].in_stage is None else current[1].in_stage.place
