"""One forward of a parallelized model on this rank: the decisions of its script, and the tensors it moves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dsp.calls import GlueError
from dsp.compiled.reasons import RANDOM, Unfit
from dsp.gradients import connected_local
from dsp.layout import Axis, Cut, cut_of
from dsp.methods import RankPart
from dsp.moves import Part, switch_all
from dsp.plan.script import INPUTS, Script, Where
from dsp.private import StorageWeakRef, checkpoint_frame, compared_as, saving_hooks
from dsp.randomness import share, unshare
from dsp.run.lookup import NUMBERS, Lookup
from dsp.run.views import Views
from dsp.run.writes import Writes, copy_source
from dsp.sharded import ACTIVE, Sharded, carry, plain
from dsp.stages import Stage
from dsp.tensors import memory


class Run(Lookup):
    """One forward of a parallelized model on this rank, with the decisions of its script."""

    def __init__(
        self, axis: Axis, script: Script | None, root_sizes: dict[str, int], recipes: dict[Any, Any], first: int,
        turns: Mapping[int, int] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(script, script.recipes if script is not None else recipes, first, turns or {})
        self.axis, self.root_sizes = axis, root_sizes
        self.sizes_key = tuple(root_sizes.items())
        self.began = False  # whether a stage has returned
        self.watches = False  # whether stages that draw no random numbers by the plan are checked
        self.in_stage: InStage | None = None
        self.again = False  # whether this is the recomputation of an activation checkpoint
        self.in_function = False  # whether this is the backward of an autograd.Function: it may not record a backward
        self.pieces: Any = None  # `dsp.run.piecewise.Pieces` of the running stage call, if the call runs in pieces
        self.where: Where = INPUTS  # the node that current moves are for
        self.traffic_check: Any = None  # compares the traffic with the plan
        self.opened: dict[int, tuple[DTensor, Sharded]] = {}  # by id: a DTensor that is used twice is moved once
        self.writes = Writes(axis)
        self.views = Views(axis, self.writes.refuse_stale)
        self.failed = 0  # the id of a stage's exception; the exception itself would keep all its frames alive
        self.misread: tuple[BaseException, str] | None = None  # a stage's exception on a shard, and its likely cause
        self.coming: dict[StorageWeakRef, Callable[[], None]] = {}  # memory still in transfer; the call waits for it
        self.graph: int | None = None  # the graph that replaces this forward
        self.witness: Any = None  # a hook for the gradients of the outputs
        self.by_graph = False  # whether this forward is recorded as a graph, see `dsp.run.graph`
        self.recorder: Any = None  # records this run for later plans, if no plan could be made ahead
        self.why = ""  # the reason why no plan can be made of the record
        self.within = checkpoint_frame() if saving_hooks(False) is not None else None  # a checkpoint around the model
        if self.within is not None:
            compared_as(self.within, plain)
        # what `share` returned, once all ranks draw the same numbers between stages; True if they did before this run
        self.alike: Any = None
        self.mode: Any = None  # `dsp.run.whole.GlueOnWholes`, while this run is the active one

    @contextmanager
    def outside_stage(self) -> Iterator[None]:
        """Leave the running stage for a while: traffic counts as that of its results, as if sent after the stage."""
        inside, self.in_stage = self.in_stage, None
        try:
            yield
        finally:
            self.in_stage = inside

    def observe(self, method: str, *args: Any) -> None:
        """Notify the recorder, if any. If the recorder fails, the next call has no plan; the run itself goes on."""
        if self.recorder is not None:
            with self.unplanned():
                getattr(self.recorder, method)(*args)

    @contextmanager
    def unplanned(self) -> Iterator[None]:
        """Drop the recorder if it raises, and keep the reason."""
        try:
            yield
        except Exception as error:
            self.recorder, self.why = None, str(error) or type(error).__name__

    def refuse_graph(self) -> None:
        """Raise GlueError if the backward of an autograd.Function records a backward of its own."""
        if self.in_function and torch.is_grad_enabled():
            raise GlueError(
                "the backward of an autograd.Function between stages enables gradients, as if to call "
                "backward() inside it; that would give wrong gradients of weights. Put the function into a stage, a "
                "submodule with a pattern, where tensors are local; or use torch.utils.checkpoint(use_reentrant=False)"
            )

    def draw_alike(self) -> None:
        """From now on draw the same random numbers on all ranks, between stages."""
        if self.by_graph:
            raise Unfit(RANDOM)
        self.alike = share(self.axis)

    def draw_as_before(self) -> None:
        """End what this run began by `draw_alike`."""
        if self.alike is not True:
            unshare(self.alike)

    # --- sharded tensors ---

    def carry(self, local: Tensor, cut: Cut, shape: Sequence[int], copied: Any = None, number: int = -1) -> Sharded:
        """A tensor of global `shape` with this rank's shard `local`; copied: the memory of which its memory is a copy;
        number: its number in the record."""
        t = carry(local, self.axis.at(shape, cut), self.first + number)
        if copied is not None:
            t._dsp_copy_of = copied  # type: ignore[attr-defined]
        return t

    def open(self, t: Any) -> Sharded | None:
        """The `Sharded` that glue holds for a sharded tensor or DTensor; None for any other value."""
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
            made.number = self.first + self.declared[id(t)][1]
        else:
            self.met(made)
        self.opened[id(t)] = t, made
        return made

    def arrive(self, tensors: Iterable[Tensor] | None = None) -> None:
        """Wait for the data of these tensors, or of all, if still in transfer."""
        for of in list(self.coming) if tensors is None else map(memory, tensors):
            if (arrived := self.coming.pop(of, None)) is not None:
                with torch._C.DisableTorchFunction():  # waiting is not an operation of the model
                    arrived()

    def land(self, parts: Sequence[Part], numbers: Iterable[int]) -> list[Tensor]:
        """The results of an operation or stage as the model sees them, moved into the plan's layouts."""
        moved = zip(self.push_all(parts), parts, numbers)
        return [self.carry(t, p.dst, p.shape, number=number) for t, p, number in moved]

    def share_out(
        self, tensors: Sequence[Tensor], push: Iterable[Cut | None], numbers: Iterable[int], kept: bool = True
    ) -> list[Tensor]:
        """This rank's shard of each replicated result that the plan wants sharded, if the cut fits its shape.

        kept: another tensor may share a result's memory, so that the shard is a view of the result. Otherwise the shard
        is a copy: a view would keep the full result alive, and be dense on a rank with only one row.
        """

        def own(t: Tensor, cut: Cut | None, number: int) -> Tensor:
            if cut is None or not cut.fits(t.shape):
                return t
            shard = self.axis.narrow(t, cut)
            if not kept and memory(shard) == memory(t):
                shard = shard.clone()
            return self.carry(shard, cut, t.shape, number=number)

        return list(map(own, tensors, push, numbers))

    def push_all(self, parts: Sequence[Part]) -> list[Tensor]:
        """The results of an operation or stage, switched into the plan's layouts."""
        moving = [p for p in parts if p.dst != p.src]
        moved = iter(switch_all(moving, self.axis) if moving else ())
        return [next(moved) if p.dst != p.src else p.local for p in parts]


class Given(NamedTuple):
    """A tensor argument of a stage call: `tensor` is the model's, `part` this rank's shard, `local` the stage's."""

    tensor: Tensor
    shell: Sharded | None
    part: Tensor
    local: Tensor  # the shard, or one dummy row if the shard is empty
    cut: Cut | None  # the cut of the shard
    written: int  # the version counter before the call

    def missed(self) -> Tensor:
        """This rank's shard after a write in place; an empty shard repeats the write made into its dummy row."""
        if self.local is not self.part and self.cut is not None:
            self.part.copy_(self.local.narrow(self.cut.dim, 0, 0))
        return self.part


class InStage(NamedTuple):
    """The running stage call: its `StageDecision`, this rank's place, its random state and its tensor arguments."""

    stage: Stage
    decision: Any
    place: RankPart
    random: Any
    given: list[Given]


def current_place() -> RankPart | None:
    """The place of the running stage call; None outside a stage."""
    current = ACTIVE.get()
    return None if current is None or current[1].in_stage is None else current[1].in_stage.place
