"""Glue: the operations of a model's own forward between stages, run on local parts while the model sees whole shapes.

A `Run` follows one forward. Between stages its `Glue` mode sees every torch function: tensors that are sharded appear
as DTensors of global shape ("shells"), and each operation runs on the local tensors by the rules of `dsp.rules`.
DTensor itself computes nothing here, so it cannot communicate.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode, _push_mode

from dsp.collectives import summed_in
from dsp.layout import Axis, Cut, connected_local, cut_of, separable
from dsp.ops import Part, gather_local, switch_all, switch_local
from dsp.plan import Script
from dsp.planner import chunk_sizes
from dsp.rules import (
    RULES,
    Frame,
    GlueError,
    Operand,
    Outcome,
    localize_source,
    no_rule,
    tensor_args,
    with_operands,
    without_operands,
)  # fmt: skip
from dsp.stages import Option, Stage, map_tensors, tensors_in
from dsp.trace import ATTRIBUTE_OPS, METADATA, Recorder, checkpoint_frame, in_place, memory, op_name

log = logging.getLogger("dsp")


@dataclass(eq=False)
class Home:
    """The tensor that a chain of views started from, and its copies in other layouts (None: whole)."""

    local: Tensor
    cut: Cut
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self.version = version(self.local)
        self._copies: dict[Cut | None, Tensor] = {self.cut: self.local}

    @property
    def copies(self) -> dict[Cut | None, Tensor]:
        if version(self.local) != self.version:  # written in place: the copies are of the past
            self.forget()
        return self._copies


class Shell(NamedTuple):
    """What a DTensor in glue stands for."""

    local: Tensor  # this rank's part, connected by autograd
    cut: Cut
    shape: tuple[int, ...]
    node: Any  # the DTensor's own grad_fn when it was made: if it changed, somebody else's function came between
    home: Home
    views: tuple[tuple[Any, Frame], ...] = ()  # what made this tensor of its home
    lent: StorageWeakRef | str | None = None  # its memory is a copy of this memory, or is what this text names


class Run:
    """One forward of a parallelized model on this rank: where it is in its script."""

    def __init__(self, axis: Axis, script: Script | None, root_sizes: dict[str, int]) -> None:
        self.axis, self.script, self.root_sizes = axis, script, root_sizes
        self.sizes_key = tuple(root_sizes.items())
        self.stage_index = self.glue_index = 0
        self.aside = False  # in a hook that is not of the model: what it does has no place in the plan
        self.in_stage: InStage | None = None
        self.stale: list[tuple[StorageWeakRef, str]] = []  # memory of which a copy was written in place, and by whom
        self.recorder: Recorder | None = None  # when no plan could be made ahead: this run, for the next ones
        self.mode = Glue(self)

    def observe(self, method: str, *args: Any) -> None:
        """Tell the recorder, if there is one. What it cannot follow is not planned; the run itself goes on."""
        if self.recorder is None:
            return
        try:
            getattr(self.recorder, method)(*args)
        except Exception as error:
            log.info("this forward is not planned for the next calls either: %s: %s", type(error).__name__, error)
            self.recorder = None

    # --- shells ---

    def wrap(
        self, local: Tensor, cut: Cut, shape: tuple[int, ...],
        of: Shell | None = None, view: tuple[Any, Frame] | None = None, lent: Any = None,
    ) -> DTensor:  # fmt: skip
        """A DTensor that stands for `local`; the result of a `view` shares the copies `of` the tensor it views."""
        shell = self.axis.wrap(local, cut, shape)
        with torch._C.DisableTorchFunction():
            node = shell.grad_fn
        home = Home(local, cut, tuple(shape))
        views: tuple[tuple[Any, Frame], ...] = ()
        if of is not None and view is not None:
            home, views = of.home, (*of.views, view)
        shell._dsp_shell = Shell(local, cut, tuple(shape), node, home, views, lent)  # type: ignore[attr-defined]
        return shell

    def open(self, t: Any) -> Shell | None:
        """What a tensor in glue stands for; None for a plain one."""
        if not isinstance(t, DTensor):
            return None
        with torch._C.DisableTorchFunction():
            node = t.grad_fn
            shell = t.__dict__.get("_dsp_shell")
            if shell is not None and shell.node is node:
                for written, name in self.stale:
                    if written == memory(shell.local):
                        raise GlueError(
                            f"{name} wrote in place into a tensor that had to be switched or gathered for it, and what "
                            "it wrote would be missing where that tensor, or a view of it, is used now. Write it out "
                            "of place"
                        )
                return shell
            mesh, placements, shape = t.device_mesh, t.placements, tuple(t.shape)
        cut = cut_of(placements[0]) if len(placements) == 1 else None
        if mesh != self.axis.mesh or cut is None:
            raise GlueError(
                f"a DTensor {placements} on mesh {mesh} meets a model that is sharded over {self.axis.mesh}; inputs "
                "must be whole tensors or DTensors sharded over the sequence-parallel mesh"
            )
        local = connected_local(t)
        return Shell(local, cut, shape, node, Home(local, cut, shape), lent=t.__dict__.get("_dsp_lent"))

    def move(self, shell: Shell, cut: Cut | None) -> Tensor:
        """This rank's part under another cut (None: whole)."""
        return self.move_all([(shell, cut)])[0]

    def move_all(self, wanted: Sequence[tuple[Shell, Cut | None]]) -> list[Tensor]:
        """Several moves at one place: each is made once for a tensor and all its views; small switches share a call."""
        if all(cut == shell.cut for shell, cut in wanted):
            return [shell.local for shell, _ in wanted]
        todo: dict[tuple[int, Cut], tuple[Home, Cut]] = {}
        sources = [self.source(shell, cut) for shell, cut in wanted]
        for (shell, _), source in zip(wanted, sources):
            if isinstance(source, Cut) and source not in (copies := shell.home.copies):
                if None in copies:
                    copies[source] = self.axis.narrow(copies[None], source)
                else:
                    todo.setdefault((id(shell.home), source), (shell.home, source))
        parts = [Part(home.local, home.cut, cut, home.shape) for home, cut in todo.values()]
        for (home, cut), local in zip(todo.values(), switch_all(parts, self.axis)):
            home.copies[cut] = local
        return [self.view(shell, cut, source) for (shell, cut), source in zip(wanted, sources)]

    def source(self, shell: Shell, cut: Cut | None) -> Cut | Literal["whole", "view"]:
        """The cut of its home that gives a tensor in another cut; "view" if no cut of the home looks like that.

        Where no one all-to-all leads to it, for both are parts of one dim, the home is gathered first.
        """
        if cut is None:
            return "whole"
        if cut == shell.cut:
            return shell.home.cut
        home, found = shell.home, cut
        if shell.views:
            candidates = [home.cut, *home.copies, *map(Cut, range(len(home.shape)))]
            near = next((c for c in candidates if c is not None and self.seen(shell, c) == cut), None)
            if near is None:
                return "view"
            found = near
        if found not in home.copies and not separable(home.shape, home.cut, found, self.axis.size):
            self.gather(home)
        return found

    def gather(self, home: Home) -> Tensor:
        if None not in home.copies:
            home.copies[None] = gather_local(home.local, home.cut, home.shape, self.axis)
        return home.copies[None]

    def gather_first(self, shells: Sequence[Shell | None], whole: Sequence[bool]) -> None:
        """Gather what the plan gathers for several uses before it is cut for this one."""
        for shell, gathered in zip(shells, whole):
            if shell is not None and gathered:
                self.gather(shell.home)

    def wrote(self, who: str, t: Tensor, shell: Shell | None, local: Tensor) -> None:
        """Somebody wrote in place into `local`, which stands for `t`: nobody may use what did not see it."""
        lent = owner(t, shell)
        if isinstance(lent, str):
            raise GlueError(f"{who} writes in place into {lent}; write it out of place")
        if lent is not None:
            self.stale.append((lent, who))
        mine = memory(t if shell is None else shell.local)
        if shell is None and local is not t:
            raise GlueError(f"{who} writes in place into its part of a tensor that is whole; write it out of place")
        if mine != memory(local):
            self.stale.append((mine, who))

    def view(self, shell: Shell, cut: Cut | None, source: Cut | Literal["whole", "view"]) -> Tensor:
        home = shell.home
        if cut == shell.cut:
            return shell.local
        if source == "view":
            assert cut is not None
            if separable(shell.shape, shell.cut, cut, self.axis.size):
                return switch_local(shell.local, shell.cut, cut, shell.shape, self.axis)
            return self.axis.narrow(self.view(shell, None, "whole"), cut)
        at = None if source == "whole" else source
        local = self.gather(home) if at is None else home.copies[at]
        for func, frame in shell.views:
            x = Operand(frame.args[0].shape, at)
            again = replace(frame, args=(x, *frame.args[1:]))
            outcome = RULES[frame.name](again) if at is not None else Outcome(None)
            call_args = again.args if outcome.args is None else outcome.args
            call_kwargs = again.kwargs if outcome.kwargs is None else outcome.kwargs
            local = (outcome.func or func)(*without_operands(call_args, {id(x): local}), **call_kwargs)
            at = outcome.cut
        return local

    def seen(self, shell: Shell, cut: Cut) -> Cut | None:
        """Where a cut of the home lies in its view; None if it cannot pass."""
        found: Cut | None = cut
        for _, frame in shell.views:
            again = replace(frame, args=(Operand(frame.args[0].shape, found), *frame.args[1:]))
            try:
                found = RULES[frame.name](again).cut
            except GlueError:
                return None
        return found

    def push_all(self, parts: Sequence[Part]) -> list[Part]:
        """What an operation or stage made, switched to where the plan wants it."""
        moving = [p for p in parts if p.dst != p.src]
        if not moving:
            return list(parts)
        moved = iter(switch_all(moving, self.axis))
        return [p._replace(local=next(moved), src=p.dst) if p.dst != p.src else p for p in parts]

    # --- activation checkpointing ---

    def note_checkpoint(self) -> None:
        """Inside a checkpointed region: let its recomputation in backward run under this run again, from here."""
        frame = checkpoint_frame()
        if frame is None or getattr(frame, "_dsp_noted", False):
            return
        frame._dsp_noted = True
        original, script, sizes = frame.recompute_fn, self.script, self.root_sizes
        stage_index, glue_index, axis = self.stage_index, self.glue_index, self.axis
        runtime = ACTIVE.get()

        def recompute(*args: Any) -> Any:
            again = Run(axis, script, sizes)
            again.stage_index, again.glue_index = stage_index, glue_index
            assert runtime is not None
            with active(runtime[0], again):
                return original(*args)

        frame.recompute_fn = recompute


class Peers(NamedTuple):
    """Ranks of an axis that share a dim, in its order, and how much of it each of them holds."""

    ranks: tuple[int, ...]
    parts: tuple[int, ...]

    @classmethod
    def all(cls, size: int, n: int) -> Peers:
        """n ranks, each with its `torch.chunk` of `size`."""
        return cls(tuple(range(n)), chunk_sizes(size, n))


class Place(NamedTuple):
    """What a stage call runs on: this rank's part of `dim` (None: of no dim, it runs whole), which `peers` share."""

    axis: Axis
    dim: str | None
    peers: Peers

    @property
    def size(self) -> int:
        return sum(self.peers.parts)

    @property
    def own(self) -> int:
        """0: the stage sees one dummy row."""
        return self.peers.parts[self.peers.ranks.index(self.axis.rank)]


class InStage(NamedTuple):
    """The stage call that runs now: what it runs on, what the plan says of it (if any), and what it was given."""

    stage: Stage
    option: Option
    sizes: dict[str, int]
    place: Place
    step: Any
    random: Any
    given: list[tuple[Any, Shell | None, Tensor, Tensor, int]]


def current_place() -> Place | None:
    """Of the stage call that runs now; None outside of one."""
    current = ACTIVE.get()
    return None if current is None or current[1].in_stage is None else current[1].in_stage.place


ACTIVE: ContextVar[tuple[Any, Run] | None] = ContextVar("dsp_active", default=None)


@contextmanager
def active(runtime: Any, run: Run) -> Iterator[None]:
    """Make `run` the one that hooks and glue of `runtime` serve."""
    token = ACTIVE.set((runtime, run))
    try:
        with run.mode:
            yield
    finally:
        ACTIVE.reset(token)


RANDOM = frozenset(
    """
dropout alpha_dropout feature_dropout feature_alpha_dropout dropout1d dropout2d dropout3d bernoulli rand_like randn_like
""".split()
)


class Glue(TorchFunctionMode):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run
        self.asleep = self.popped = False
        self.uncounted = False  # while hooks run that the trace did not: theirs is no operation of the plan

    def suspend(self) -> None:
        """Inside a stage tensors are local and plain: get out of the way, entirely if nobody stands above us."""
        if _get_current_function_mode() is self:
            _pop_mode()
            self.popped = True
        self.asleep = True

    def resume(self) -> None:
        if self.popped:
            _push_mode(self)
        self.asleep = self.popped = False

    def __exit__(self, *exc: Any) -> None:
        if not self.popped:  # an exception that no hook saw may have left a stage open
            super().__exit__(*exc)
        self.asleep = self.popped = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.asleep:
            return func(*args, **kwargs)
        name, attribute = op_name(func)
        if (attribute and name not in ATTRIBUTE_OPS) or name in METADATA:
            return self.metadata(name, func, args, kwargs)
        run = self.run
        if run.aside:
            return self.operate(-1, func, name, args, kwargs)
        run.note_checkpoint()
        if self.uncounted:
            return self.operate(-1, func, name, args, kwargs)
        index = run.glue_index
        run.glue_index += 1
        out = self.operate(index, func, name, args, kwargs)
        if run.recorder is not None:
            run.observe("record", index, name, args, kwargs, out, in_place(func))
        return out

    def operate(self, index: int, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """One operation of glue, on local parts."""
        run = self.run
        tensors = tensor_args(args, kwargs)
        shells = [run.open(t) for t in tensors]
        step = run.script.glue.get(index) if run.script else None
        if step is not None and step.name != name:
            step = None
        asked = step.cuts if step is not None and step.cuts is not None else [s.cut if s else None for s in shells]
        changing = in_place(func)
        if not any(s is not None for s in shells):
            if step is not None and step.source is not None:
                return self.source(step.source, name, args, kwargs, tensors)
            if changing or not any(asked):
                with self.writes(name, changing, tensors, shells, tensors, shells) as views:
                    return views(func(*args, **kwargs))
        if not changing and not any(s is not None and c is not None for s, c in zip(shells, asked)):
            shells = [s if c is None else self.start(t, c) for t, s, c in zip(tensors, shells, asked)]
        # another whole tensor needs no move: the rule narrows it to what the others need
        wanted = [c if s is not None else None for s, c in zip(shells, asked)]
        outcome = Outcome(None)
        if any(c is not None for c in wanted):
            rule = RULES.get(name, no_rule)
            frame = self.frame(name, args, kwargs, tensors, wanted, func)
            if kwargs.get("out") is not None:
                raise frame.refuse("out= has no rule for a sharded tensor")
            try:
                if changing and shells[0] is None:
                    raise frame.refuse("it writes a sharded tensor into a whole one")
                outcome = rule(frame)
            except GlueError as refusal:
                if run.script is not None and not run.script.recorded:
                    raise
                # nobody planned this: would another dim do, or else the whole tensors?
                found = self.detour(rule, func, name, args, kwargs, tensors, shells)
                if found is not None:
                    wanted, frame, outcome = found
                elif changing:
                    raise
                else:
                    log.info("gathered: %s", refusal)
                    wanted = [None] * len(wanted)
        run.gather_first(shells, step.whole if step is not None else [])
        moved = iter(run.move_all([(s, c) for s, c in zip(shells, wanted) if s is not None]))
        locals_ = [next(moved) if s is not None else t for t, s in zip(tensors, shells)]
        push = step.push if step is not None else []
        if not any(c is not None for c in wanted):
            stream: Any = iter(locals_)
            call_args = tuple(with_operands(a, stream) for a in args)
            call_kwargs = {k: with_operands(v, stream) for k, v in kwargs.items()}
            with self.writes(name, changing, tensors, shells, locals_, wanted) as views:
                out = views(func(*call_args, **call_kwargs))
            if not any(push):
                return out
            results = tensors_in(out)
            parted = [
                t if c is None else run.wrap(run.axis.narrow(t, c), c, tuple(t.shape)) for t, c in zip(results, push)
            ]
            return map_tensors(out, parted)
        plain, func = func, outcome.func or func
        table = {
            id(o): run.axis.narrow(t, outcome.narrow[i]) if i in outcome.narrow else t
            for i, (o, t) in enumerate(zip(frame.operands(), locals_))
        }
        call_args = without_operands(frame.args if outcome.args is None else outcome.args, table)
        call_kwargs = {
            k: without_operands(v, table)
            for k, v in (frame.kwargs if outcome.kwargs is None else outcome.kwargs).items()
        }
        with self.writes(name, changing, tensors, shells, locals_, wanted) as views:
            if name in RANDOM:
                with forked(run.axis):
                    out = func(*call_args, **call_kwargs)
            elif outcome.reduce is not None:
                part = (torch.Tensor.sum if name == "mean" else func)(*call_args, **call_kwargs)
                total = torch.ops.dsp.all_reduce(part.to(summed_in(part.dtype)), run.axis.group)
                out = (total / outcome.reduce if outcome.reduce != 1.0 else total).to(part.dtype)
                if name in ("select", "getitem"):  # would be a view
                    assert shells[0] is not None
                    out._dsp_lent = owner(tensors[0], shells[0]) or memory(shells[0].local)
                return out
            else:
                with quiet(locals_):
                    out = func(*call_args, **call_kwargs)
            views(out)
        if outcome.cut is None:
            return out
        made, lent = [], []
        for k, t in enumerate(tensors_in(out)):
            shape = list(t.shape)
            shape[outcome.cut.dim] = outcome.size
            target = push[k] if k < len(push) else None
            if name in DENSE:
                t = self.copied(t, locals_[0], tensors[0], outcome.cut, out_shape=shape)
            made.append(Part(t, outcome.cut, target or outcome.cut, tuple(shape)))
            lent.append(None if target not in (None, outcome.cut) else getattr(t, "_dsp_lent", None))
        # by the plan, not by what is seen here: all ranks share the same moves, and a local reshape may copy or not
        of = shells[0] if outcome.view and run.script is not None and index not in run.script.copies else None
        wrapped = [
            run.wrap(p.local, p.dst, p.shape, of, (plain, frame), lent=x) for p, x in zip(run.push_all(made), lent)
        ]
        return map_tensors(out, wrapped)

    def copied(self, t: Tensor, local: Tensor, whole: Tensor, cut: Cut, out_shape: list[int]) -> Tensor:
        """A result that has its own memory if it would on one device; parts of size 1 are contiguous too often."""
        if t.shape[cut.dim] > cut.outer or memory(t) != memory(local):
            return t
        with torch._C.DisableTorchFunction():
            model = torch.empty_strided(whole.shape, whole.stride(), device="meta")
        dense = model.contiguous() if tuple(out_shape) == tuple(model.shape) else model.reshape(out_shape)
        return t if memory(dense) == memory(model) else t.clone()

    @contextmanager
    def writes(
        self, name: str, changing: bool,
        tensors: list[Tensor], shells: Sequence[Any], locals_: list[Tensor], cuts: Sequence[Any],
    ) -> Iterator[Any]:  # fmt: skip
        """Around an operation: what it writes in place, all tensors that share the memory must see, or it is refused.

        Yields a function to mark those of its results that are views of a copy.
        """
        versions = [version(t) for t in locals_]

        def views(out: Any) -> Any:
            lend(tensors_in(out), zip(tensors, shells, locals_))
            return out

        yield views
        for i, (t, x, s, c, before) in enumerate(zip(tensors, locals_, shells, cuts, versions)):
            if version(x) == before and not (changing and i == 0 and x.is_inference()):
                continue
            if s is not None:
                s.home.forget()
            self.run.wrote(f"{name}() between stages", t, s, x)
            if s is not None:
                with torch._C.DisableTorchFunction():
                    node = t.grad_fn
                if c is None:  # written whole, on every rank
                    x, c = self.run.axis.narrow(x, s.cut), s.cut
                t._dsp_shell = Shell(x, c, s.shape, node, Home(x, c, s.shape))  # type: ignore[attr-defined]

    def start(self, t: Tensor, cut: Cut) -> Shell:
        """This rank's part of a tensor that is whole so far."""
        local, shape = self.run.axis.narrow(t, cut), tuple(t.shape)
        return Shell(local, cut, shape, None, Home(local, cut, shape))

    def frame(
        self, name: str, args: Any, kwargs: Any, tensors: list[Tensor], cuts: Sequence[Cut | None], func: Any = None
    ) -> Frame:
        shapes = [tuple(t.shape) for t in tensors]
        stream = iter([Operand(s, c) for s, c in zip(shapes, cuts)])
        axis = self.run.axis
        converted = tuple(with_operands(a, stream) for a in args)
        named = {k: with_operands(v, stream) for k, v in kwargs.items()}
        return Frame(name, converted, named, axis.size, axis.rank, func)

    def detour(
        self, rule: Any, func: Any, name: str, args: Any, kwargs: Any, tensors: list[Tensor], shells: list[Shell | None]
    ) -> tuple[list[Cut | None], Frame, Outcome] | None:
        """The first dim along which all sharded operands could be cut for this operation."""
        for dim in range(max(s.local.ndim for s in shells if s is not None)):
            cuts = [Cut(dim) if s is not None else None for s in shells]
            if any(s is not None and (dim >= len(s.shape) or s.shape[dim] < 2) for s in shells):
                continue
            frame = self.frame(name, args, kwargs, tensors, cuts, func)
            try:
                return cuts, frame, rule(frame)
            except GlueError:
                continue
        return None

    def source(self, cut: Cut, name: str, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        run = self.run
        frame = self.frame(name, args, kwargs, tensors, [None] * len(tensors))
        stretch, call_args, size = localize_source(frame, cut)
        table = {id(o): t for o, t in zip(frame.operands(), tensors)}
        out = stretch(*without_operands(call_args, table))
        shape = list(out.shape)
        shape[cut.dim] = size
        return run.wrap(out, cut, tuple(shape))

    def metadata(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        if name == "backward":
            raise GlueError("backward inside a parallelized forward; return the loss and call backward outside")
        if args and isinstance(args[0], DTensor):
            if name == "register_hook":
                shell = self.run.open(args[0])
                assert shell is not None
                return shell.local.register_hook(*args[1:], **kwargs)
            if name.startswith("new_"):
                shell = self.run.open(args[0])
                assert shell is not None
                return func(shell.local, *args[1:], **kwargs)
        return func(*args, **kwargs)


DENSE = frozenset("contiguous reshape reshape_as flatten ravel".split())


def owner(t: Tensor, shell: Shell | None) -> Any:
    return getattr(t, "_dsp_lent", None) if shell is None else shell.lent


def lend(outputs: list[Tensor], operands: Iterable[tuple[Tensor, Shell | None, Tensor]]) -> None:
    """Mark results that are views of a copy: what is written into them, the tensor that was copied must not miss."""
    lent: dict[Any, Any] = {}
    for t, shell, local in operands:
        of = owner(t, shell)
        if of is None and shell is not None and local is not shell.local and memory(shell.local) != memory(local):
            of = memory(shell.local)
        if of is not None:
            lent[memory(local)] = of
    if lent:
        for t in outputs:
            of = lent.get(memory(t))
            if of is not None:
                t._dsp_lent = of  # type: ignore[attr-defined]


def version(t: Tensor) -> int:
    """Counts the writes into a tensor's memory; under inference_mode nothing does."""
    return 0 if t.is_inference() else t._version


def quiet(tensors: list[Tensor]) -> AbstractContextManager[Any]:
    """No warnings about statistics of nothing on a rank that holds nothing."""
    if all(t.numel() for t in tensors):
        return nullcontext()
    return _ignored()


@contextmanager
def _ignored() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def forked(axis: Axis) -> Iterator[None]:
    """Random numbers of this rank's own: a stream forked from the default one, which moves on alike on every rank."""
    token = fork(axis)
    try:
        yield
    finally:
        join(token)


def fork(axis: Axis) -> Any:
    seed = int(torch.randint(2**62, (), device="cpu"))
    cuda = axis.mesh.device_type == "cuda"
    state = (torch.get_rng_state(), torch.cuda.get_rng_state() if cuda else None)
    own = (seed + 0x9E3779B97F4A7C15 * (axis.rank + 1)) % 2**63
    torch.default_generator.manual_seed(own)
    if cuda:
        torch.cuda.manual_seed(own)
    return state


def join(state: Any) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1])
