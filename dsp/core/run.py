"""Run a record: bring a node's operands into its offer's cuts, run it on parts, give its results in their layouts.

There is one way for stages and operations, for planned and unplanned ones. A node that the record does not have
(another branch, a forward that reads its data) is noted as it runs, and takes the offer that moves least.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsp.comm.gradients import waited
from dsp.comm.layout import Axis, Cut
from dsp.comm.moves import Part, switch_all
from dsp.comm.observers import RUNNING
from dsp.comm.randomness import drew, forked, forked_if_drawn, states
from dsp.core.carrier import LOCAL, Carrier, arrive, base_of, carry, carry_writable, claim, link, one_for_each, plain
from dsp.core.checkpoints import keep_regions
from dsp.core.copies import Copies, without_gradient
from dsp.core.inputs import Inputs, refuse_meshes
from dsp.core.keys import Prepared, Ready, exact_key, first_of, floats_of, key_part, node_key
from dsp.core.module_calls import KEPT_BY_HOOK
from dsp.core.offers import Rules, stage_node
from dsp.core.record import Layout, Node, Offer, Record, replicated
from dsp.core.torch_calls import GlueError, replaced, tensor_args
from dsp.core.torch_traits import ATTRIBUTES_READ, DENSE, Traits
from dsp.core.unplanned import Unplanned, runs_by_rule
from dsp.core.watch import add_source, covered, refuse, refuse_functions
from dsp.core.writes import (
    kin_of,
    note_writes,
    one_device_result,
    refuse_write,
    relate,
    wrote,
)
from dsp.stages.notation import NotationError
from dsp.stages.stage import Stage
from dsp.support.private import CONTEXT, backward_pass, saving_hooks
from dsp.support.tensors import as_dtensor, constants_in, map_tensors, tensors_in, version

UNCHANGED = nullcontext()
MIXED = "got mixed torch.Tensor and DTensor"  # in torch's error


class InStage(NamedTuple):
    """The call of a stage's module on this rank's parts, while it runs."""

    record: Record
    node: Node
    offer: Offer
    args: Any
    kwargs: Any


Send = Callable[[Record, list[Part], Axis], list[Tensor]]


def at_once(record: Record, parts: list[Part], axis: Axis) -> list[Tensor]:
    """Make switches, and wait for them."""
    return switch_all(parts, axis)


class Runner:
    """Leads a forward of one rank past the nodes of its record, and adds those that it does not have.

    send: makes the switches of results of operations; calls: their number; forks: of random numbers, in this call;
    looks: it notes in this call which stages draw some.
    """

    def __init__(self, record: Record, rules: Rules, axis: Axis, send: Send) -> None:
        self.record, self.rules, self.axis, self.send = record, rules, axis, send
        self.copies, self.prepared = Copies(record, axis), Prepared(record)
        self.calls, self.forks, self.looks = 0, 0, False

    @cached_property
    def added(self) -> Unplanned:
        return Unplanned(self.record, self.rules, self.axis, self.prepared)

    # --- an operation ---

    def operation(self, func: Any, traits: Traits, args: Any, kwargs: Any, first: Any = None) -> Any:
        if saving_hooks(False) is not None:
            keep_regions(self.record.compiled)
        key = exact_key(func, args, kwargs)
        ready, at = self.prepared.get(key, args, kwargs, first)
        if ready is None:
            ready = self.ready(key, at, func, traits, args, kwargs, first)
        node, offer, local, unchanged, _, _ = ready
        if node.identity:
            return args[0]
        if self.record.in_flight and not only_views(node, offer, tensor_args(args, kwargs)):
            arrive(self.record, tensor_args(args, kwargs))
        if unchanged:
            with LOCAL():
                out = func(*args, **kwargs)
        else:
            operands = tensor_args(args, kwargs)
            parts = self.copies.bring(node, operands, offer.needs)
            versions = [version(parts[i]) for i in node.writes]
            if local is not None:
                out = local(parts)
            else:
                args_, kwargs_ = replaced(args, kwargs, iter(parts))
                out = func(*args_, **kwargs_)
            if node.writes:
                note_writes(self.axis, node, offer, operands, parts, versions, out)
            else:
                out = one_device_result(node, out, parts)
        if node.in_place:
            return out if out is None else args[0]
        if node.dynamic and node.results:
            node = self.added.of_sizes(node, offer, tensors_in(out))
        result = self.give(node, offer, out, args[0] if node.view else None)
        if node.view:
            link(args[0], result)
        elif node.kin:
            relate(node, tensor_args(args, kwargs), tensors_in(result))
        if func is Tensor.__getitem__ and node.kin:
            result.index = args[1]
        return result

    def ready(self, key: Any, at: int | None, func: Any, traits: Traits, args: Any, kwargs: Any, first: Any) -> Ready:
        """A node made ready for operands in these layouts; it is noted if it is new."""
        operands = tensor_args(args, kwargs)
        refuse_functions(operands)
        refuse_meshes(operands, self.axis)
        if (parts := self.record.hook_parts) is not None and any(parts.get(t) is not None for t in operands):
            raise GlueError(KEPT_BY_HOOK.format(what=f"{traits.name}() between stages"))
        shared: Any = node_key(func, traits.name, args, kwargs)
        first = first_of(args, kwargs) if first is None else first
        node, at = self.prepared.node(shared, first, at)
        if node is not None and not runs_by_rule(node, self.axis, func, args, kwargs):
            shared = *shared, floats_of((args, kwargs))  # a rule reads one of them
            node, at = self.prepared.node(shared, first, None)
        if node is None:
            refuse(traits, args, kwargs)
            node = self.added.operation(shared, func, traits, args, kwargs)
        offer = node.offer
        if node.view:  # in the layout of its base
            offer = next((o for o in node.offers if o.needs[0] == operands[0].cut), None)  # type: ignore[attr-defined]
        offer = offer or replicated(node, len(node.results))
        for i in node.writes:
            refuse_write(self.record, f"{node.name}() between stages", operands[i], offer.needs[i])
        local = None if offer.local is None else offer.local(self.axis, func, args, kwargs)
        usual = local is None and not (node.moves or node.writes or node.loose)
        reads = traits.name in ATTRIBUTES_READ or traits.custom  # whose backward gets what its forward got
        unchanged = usual and not reads and as_needed(node, operands, offer.needs)
        return self.prepared.put(key, shared, at, Ready(node, offer, local, unchanged))

    def give(self, node: Node, offer: Offer, out: Any, viewed: Carrier | None) -> Any:
        """Local results as the model sees them, switched where all that reads them wants another layout."""
        make = claim if node.kind != "stage" else carry_writable if node.no_grad else carry  # a module may keep it
        base = None if viewed is None else base_of(viewed)
        if type(out) is Tensor and node.results and (not node.push or node.push[0] in (None, offer.gives[0])):
            return make(self.record, out, node.results[0], offer.gives[0], base)
        tensors = [*map(plain, tensors_in(out))]
        if len(node.results) < len(tensors):
            self.added.results(node, offer, tensors)
        if node.push and node.push.count(None) < len(node.push):
            results = self.pushed(node, offer, tensors, make)
        else:
            results = [make(self.record, t, r, cut, base) for t, r, cut in zip(tensors, node.results, offer.gives)]
        return results[0] if isinstance(out, Tensor) else map_tensors(out, one_for_each(tensors, results))

    def pushed(self, node: Node, offer: Offer, tensors: Sequence[Tensor], make: Any) -> list[Tensor]:
        """The results of a node, switched to the layouts that all that reads them wants; make: a carrier of one that
        stays."""
        goals = [cut if push is None else push for cut, push in zip(offer.gives, node.push, strict=False)]
        parts = [Part(t, src, dst, r.shape) for t, src, dst, r in zip(tensors, offer.gives, goals, node.results)]  # type: ignore[arg-type]
        moving = [p for p in parts if p.src is not None and p.src != p.dst]
        RUNNING.set(node)
        switched: Sequence[Tensor] = ()
        if moving and node.kind == "stage":
            switched = switch_all(moving, self.axis)
        elif moving:
            switched = self.send(self.record, moving, self.axis)
        arrived, results = iter(switched), list[Tensor]()
        for p, r in zip(parts, node.results):
            moves = p.src is not None and p.src != p.dst
            carrier, local, cut = (claim, next(arrived), p.dst) if moves else (make, p.local, p.src)
            results.append(carrier(self.record, local, r, cut))
        return results

    def read_in_full(self, t: Carrier, error: GlueError) -> None:
        if t.cut is not None:
            raise error

    # --- a stage ---

    def stage(self, stage: Stage, call: Callable[..., Any], args: Any, kwargs: Any, first: Any) -> Any:
        if saving_hooks(False) is not None:
            keep_regions(self.record.compiled)
        key = exact_key(stage, args, kwargs)
        ready, at = self.prepared.get(key, args, kwargs, first)
        node, offer, local, _, slots, nested = ready or self.ready_stage(key, at, stage, call, args, kwargs, first)
        if self.record.in_flight:  # it may hold more than it is given
            arrive(self.record)
        operands = [args[slot] if type(slot) is int else kwargs[slot] for slot in slots]
        if node.no_grad:
            with torch.enable_grad():  # a stage that returns an argument returns its gradient, too
                parts = self.copies.bring(node, operands, offer.needs)
        else:
            parts = self.copies.bring(node, operands, offer.needs)
        rows, brought = self.rows(offer), parts
        if not rows:
            parts = [with_dummy(t, cut) for t, cut in zip(parts, offer.needs)]
        versions = [*map(version, parts)]
        args, kwargs = list(args), dict(kwargs)
        for slot, part in zip(slots, parts):
            (args if type(slot) is int else kwargs)[slot] = part
        if nested:
            args, kwargs = map_tensors((args, kwargs), map(plain, tensors_in((args, kwargs))))
        RUNNING.set(InStage(self.record, node, offer, args, kwargs))
        with self.drawing(node, offer) if node.draws is not False or self.looks else UNCHANGED:
            out = (local or call)(*args, **kwargs)
        RUNNING.set(node)
        for i, before in enumerate(versions):
            if version(parts[i]) != before:
                refuse_write(self.record, stage.label, operands[i], offer.needs[i])
                wrote(self.axis, stage.label, operands[i], brought[i], offer.needs[i])
        offer, results = self.local_results(stage, node, offer, rows, out, parts)
        self.refuse_sizes(stage, node, offer, results, out)
        result = self.give(node, offer, map_tensors(out, results), None)
        if node.kin:
            relate(node, operands, tensors_in(result))
        return result

    def drawing(self, node: Node, offer: Offer) -> Any:
        """The context in which a stage draws random numbers: on parts each rank its own."""
        if not sharded(offer):
            return UNCHANGED
        if node.draws:
            self.forks += 1
            return forked(self.axis)
        return self.noting(node)

    @contextmanager
    def noting(self, node: Node) -> Iterator[None]:
        """The same, noting whether a stage draws. Some that a plan did not foresee are the same on all ranks."""
        if node.draws is None:
            with forked_if_drawn(self.axis) as answer:
                yield
            node.draws = answer[0]
            self.forks += node.draws
        else:
            before = states(self.axis)
            yield
            node.draws = drew(self.axis, before)

    def local_results(
        self, stage: Stage, node: Node, offer: Offer, rows: int, out: Any, parts: Sequence[Tensor]
    ) -> tuple[Offer, list[Tensor]]:
        """The results of a stage on this rank's parts, without a dummy row, and the offer that says their cuts."""
        results = tensors_in(out)
        if any(type(t) is not Tensor or isinstance(t.grad_fn, CONTEXT) for t in results):
            results = one_for_each(results, [covered(waited(plain(t))) for t in results])
        if offer.option.onto:  # type: ignore[union-attr]  # a sum over ranks
            sums = [t if rows else torch.where(t.new_zeros((), dtype=torch.bool), t, 0) for t in results]
            results = [torch.ops.dsp.reduce_scatter(t, c.dim, self.axis.group) for t, c in zip(sums, offer.gives)]  # type: ignore[union-attr]
        if len(node.results) < len(results):
            node.kin = () if offer.option.onto else kin_of(parts, results)  # type: ignore[union-attr]
            offer = self.added.stage_results(stage, node, results, rows)
        if not rows and not offer.option.onto:  # type: ignore[union-attr]
            parts = [t.narrow(cut.dim, 0, 0) for t, cut in zip(results, offer.gives)]  # type: ignore[union-attr]
            results = one_for_each(results, parts)
        return offer, results

    def refuse_sizes(self, stage: Stage, node: Node, offer: Offer, results: Sequence[Tensor], out: Any) -> None:
        """Raise NotationError for a result on this rank's part of another shape than the pattern says, or for numbers
        that differ from those on full tensors."""
        for t, r, cut in zip(results, node.results, offer.gives):
            refuse_shape(stage, t, r.shape if cut is None else self.axis.local_shape(r.shape, cut))
        if type(out) is not Tensor and node.constants is not None and (numbers := constants_in(out)) != node.constants:
            name = offer.option.name  # type: ignore[union-attr]
            raise NotationError(
                f"{stage.label} returned {numbers} on a part along {name!r}: expected {node.constants}, as on the full "
                f"tensor. It returns a number that depends on the length of {name!r}. Put [{name}] in brackets, or "
                "make stages of its submodules instead"
            )

    def rows(self, offer: Offer) -> int:
        """The length of the sharded dim that this rank has; 1 if there is none, or the function takes empty parts."""
        if offer.takes_empty or not sharded(offer):
            return 1
        assert offer.option is not None
        return Cut(0).local_size(offer.option.size, self.axis.size, self.axis.rank)

    def ready_stage(
        self, key: Any, at: int | None, stage: Stage, call: Any, args: Any, kwargs: Any, first: Any
    ) -> Ready:
        node, bound = stage_node(self.record, stage, args, kwargs)
        nested = [(t, error) for t, error in stage.signature.nested(args, kwargs) if isinstance(t, Carrier)]
        for t, error in nested:
            if t.cut is not None:
                raise error
        operands = [b.tensor for b in bound]
        refuse_functions(operands)
        shared = stage.name, tuple(key_part(t) for t in operands)
        planned, at = self.prepared.node(shared, first, at)
        if planned is None:
            if not node.refs:
                add_source(self.record, stage)
            planned = self.added.stage(shared, node, operands)
        offer, slots = planned.offer, [b.slot for b in bound]
        assert offer is not None
        local = None if offer.local is None else offer.local(self.axis, call, args, kwargs)
        return self.prepared.put(key, shared, at, Ready(planned, offer, local, False, slots, bool(nested)))


def only_views(node: Node, offer: Offer, operands: Sequence[Tensor]) -> bool:
    """Tell whether an operation reads no numbers: it is a view, however its operand lies in memory, which stays."""
    return node.view and node.name not in DENSE and offer.needs == tuple(getattr(t, "cut", None) for t in operands)


def refuse_shape(stage: Stage, t: Tensor, expected: Sequence[int]) -> None:
    """Raise NotationError for a result of another shape than the pattern of its stage says."""
    if tuple(t.shape) != tuple(expected):
        raise NotationError(
            f"{stage.label} returned the shape {tuple(t.shape)} on this rank's part, where its pattern "
            f"'{stage.pattern.text}' says {tuple(expected)}: it is not independent along the sharded dim"
        )


def as_needed(node: Node, operands: Sequence[Tensor], needs: Sequence[Layout]) -> bool:
    """Tell whether operands are in the layouts that they need, and none is a view that was made without gradient, or
    gets one."""
    if node.kin and not (node.view or torch.is_grad_enabled()) and any(t.requires_grad for t in operands):
        return False
    pairs, views = zip(operands, needs), (t for t in operands if isinstance(t, Carrier) and t.base is not None)
    in_cuts = all(t.cut == need if isinstance(t, Carrier) else need is None for t, need in pairs)
    return in_cuts and not any(map(without_gradient, views))


def sharded(offer: Offer) -> bool:
    """Tell whether a stage is sharded by this offer."""
    return offer.option is not None and offer.option.name is not None


def with_dummy(local: Tensor, cut: Layout) -> Tensor:
    """An empty part with a row added, so that every rank runs every stage, its hooks, collectives and gradients."""
    if cut is None:
        return local
    shape = [*local.shape]
    shape[cut.dim] = Cut(0, cut.outer).folds
    return torch.cat([local, local.new_ones(shape)], cut.dim)


class Outside:
    """Drives a record while no forward of it runs.

    A backward pass may run a part of the forward again, in a checkpoint, and another forward of the model may read what
    this one left: these the runner leads. inputs: of the next forward; running: tells whether there is another one.
    """

    def __init__(self, runner: Runner, inputs: Inputs, running: Callable[[], bool]) -> None:
        self.runner, self.inputs, self.running, self.axis = runner, inputs, running, runner.axis

    @property
    def unplanned(self) -> int:
        return self.runner.added.count if "added" in self.runner.__dict__ else 0

    def operation(self, func: Any, traits: Traits, args: Any, kwargs: Any, first: Any = None) -> Any:
        if backward_pass() != -1 or self.running():
            return self.runner.operation(func, traits, args, kwargs, first)
        if func is Tensor.__deepcopy__:
            return carrier_copy(*args)
        args, kwargs = replaced(args, kwargs, map(as_dtensor, tensor_args(args, kwargs)))
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            if MIXED not in str(error):
                raise
            raise RuntimeError(
                f"{traits.name}() outside of a forward got a plain tensor and a sharded one. A forward of a "
                "parallelized model left the sharded one in an object, such as a cache: call dsp.gather(x) on it first"
            ) from error

    def stage(self, stage: Stage, call: Callable[..., Any], args: Any, kwargs: Any, first: Any) -> Any:
        return self.runner.stage(stage, call, args, kwargs, first)

    def read_in_full(self, t: Carrier, error: GlueError) -> None:
        self.runner.read_in_full(t, error)


def carrier_copy(t: Carrier, memo: dict[int, Any]) -> Carrier:
    """A deep copy of a carrier, such as of a cache that is copied with its model."""
    if id(t) not in memo:
        memo[id(t)] = carry(t.record, copy.deepcopy(plain(t), memo), t.ref, t.cut)
    return memo[id(t)]
