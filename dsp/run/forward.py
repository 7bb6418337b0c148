"""One forward of a parallelized model on this rank: what its script says of it, and what it moves."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dsp.calls import GlueError
from dsp.gradients import connected_local
from dsp.layout import Axis, Cut, cut_of
from dsp.methods import RankPart
from dsp.moves import Part, switch_all
from dsp.plan.script import INPUTS, Script, Where
from dsp.private import StorageWeakRef, checkpoint_frame, compared_as, saving_hooks
from dsp.run.lookup import NUMBERS, Lookup
from dsp.run.views import Views
from dsp.run.writes import Writes, copy_source
from dsp.sharded import ACTIVE, Sharded, carry, plain
from dsp.stages import Stage
from dsp.tensors import memory

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
        self.again = False  # whether it computes again what an activation checkpoint did not keep
        self.in_function = False  # whether it is the backward of an autograd.Function, which may not begin another one
        self.pieces: Any = None  # `dsp.run.piecewise.Pieces` of the stage call that runs now, if it is cut
        self.where: Where = INPUTS  # what moves are for
        self.traffic_check: Any = None  # compares what it sends with its plan
        self.opened: dict[int, tuple[DTensor, Sharded]] = {}  # by id: one that is used twice is moved once
        self.writes = Writes(axis)
        self.views = Views(axis, self.writes.refuse_stale)
        self.failed = 0  # the id of what a stage raised, where tensors are plain: the error would keep all its frames
        self.misread: tuple[BaseException, str] | None = None  # what a stage raised on a part, and what may be amiss
        self.coming: dict[StorageWeakRef, Callable[[], None]] = {}  # memory whose numbers are under way; waits for them
        self.graph: int | None = None  # that which stands for it
        self.witness: Any = None  # a hook for the gradients of what it returns
        self.by_graph = False  # whether it is recorded as a graph, see `dsp.run.graph`
        self.recorder: Any = None  # when no plan could be made ahead: this run, for the next ones
        self.within = checkpoint_frame() if saving_hooks(False) is not None else None  # which calls the model anew
        if self.within is not None:
            compared_as(self.within, plain)
        self.mode: Any = None  # `dsp.run.whole.GlueOnWholes`, while it is the one that runs

    @contextmanager
    def outside_stage(self) -> Iterator[None]:
        """Within a stage: what is sent is sent for its results, as it would be after it."""
        inside, self.in_stage = self.in_stage, None
        try:
            yield
        finally:
            self.in_stage = inside

    def observe(self, method: str, *args: Any) -> None:
        """Tell the recorder, if there is one. What it cannot follow is not planned; the run itself goes on."""
        if self.recorder is not None:
            with self.unplanned():
                getattr(self.recorder, method)(*args)

    @contextmanager
    def unplanned(self) -> Iterator[None]:
        """Let go of the recorder where it cannot follow."""
        try:
            yield
        except Exception as error:
            log.info("this forward is not planned for the next calls either: %s: %s", type(error).__name__, error)
            self.recorder = None

    def refuse_graph(self) -> None:
        """Raise GlueError where the backward of an autograd.Function makes what has a backward of its own."""
        if self.in_function and torch.is_grad_enabled():
            raise GlueError(
                "the backward of an autograd.Function between stages computes with gradients enabled, as for a "
                "backward of its own, which would give wrong gradients of weights. Put the function into a stage, a "
                "submodule with a pattern, where tensors are local; or use torch.utils.checkpoint(use_reentrant=False)"
            )

    # --- sharded tensors ---

    def carry(self, local: Tensor, cut: Cut, shape: Sequence[int], copied: Any = None, number: int = -1) -> Sharded:
        """A tensor of global `shape` of which `local` is this rank's part; `copied`: what its memory is a copy of;
        `number`: its own in the record."""
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
        if self.writes.stale and isinstance(t, Tensor) and not isinstance(t, DTensor):
            self.writes.refuse_stale(t)
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
                f"a DTensor {placements} on mesh {mesh} meets a model that is sharded over {self.axis.mesh}. Inputs "
                "must be plain tensors or DTensors sharded over the sequence-parallel mesh. A module whose weights are "
                "on another mesh, such as tensor parallelism's, must be a stage or inside of one: name it in stages"
            )
        made = self.carry(connected_local(t), cut, shape, copy_source(t))
        if id(t) in self.declared:
            made.number = self.first + self.declared[id(t)]
        else:
            self.met(made)
        self.opened[id(t)] = t, made
        return made

    def arrive(self, tensors: Iterable[Tensor] | None = None) -> None:
        """Wait for the numbers of these tensors, or of all, where they are under way."""
        for of in list(self.coming) if tensors is None else map(memory, tensors):
            if (arrived := self.coming.pop(of, None)) is not None:
                with torch._C.DisableTorchFunction():  # it is no operation of the model
                    arrived()

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
