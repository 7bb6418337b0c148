"""A plan: a trace solved, and the script that a run follows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from dsp.hardware import Hardware
from dsp.inside import Sends, Sent, add_sent
from dsp.notation import NotationError, StagePattern, parse
from dsp.plan.advice import remedy
from dsp.plan.cost import adjoint_bytes, held_by, rows_of, share_of, touched_by, whole_glue
from dsp.plan.events import Trace
from dsp.plan.reads import traced
from dsp.plan.script import GlueStep, Script, Sending, StageStep, Via
from dsp.plan.solve import solved
from dsp.plan.table import Plan
from dsp.planner import Move, Solution, fuses, price
from dsp.stages import Stage, find_stages


def make_plan(
    t: Trace, stages: Mapping[str, Stage], n: int, memory: int | None, hardware: Hardware | None = None,
    again_inside: bool = False, kept_inside: bool = False, batch: bool = True,
) -> Plan:  # fmt: skip
    """Solve a trace. `again_inside`: all stages are recomputed within their hooks, also where the trace saw no
    checkpoint; `kept_inside`: what is sent inside of stages is kept all the same; `batch`: whether it may be
    sharded for the sake of bytes."""
    problem, solution = solved(t, n, memory, batch)
    needs = [op.choices[c].needs for op, c in zip(t.ops, solution.choices)]
    gives = [op.choices[c].gives for op, c in zip(t.ops, solution.choices)]
    producer = {v: (i, k) for i, op in enumerate(t.ops) for k, v in enumerate(op.outputs)}
    used: dict[int, set[str | None]] = {}
    for op, need in zip(t.ops, needs):
        for v, key in zip(op.inputs, need):
            used.setdefault(v, set()).add(key)
    moves: dict[int, list[Move]] = {}
    for m in solution.moves:
        moves.setdefault(m.value, []).append(m)

    # a tensor that no use needs as its producer gave it is switched there: the earliest place, and in the producer's
    # own dtype; all other moves happen at the use
    push: dict[int, str | None] = {}
    for v, first in ((v, ms[0]) for v, ms in moves.items()):
        if v in producer and first.kind != "gather" and first.dst in t.cuts[v]:
            op_index, position = producer[v]
            if t.events[op_index].shared:
                continue
            at_home = gives[op_index][position]
            if at_home not in used.get(v, set()) and all(m.src != at_home for m in moves[v][1:]):
                push[v] = first.dst
    _meet(t, solution, push, n)

    def via(s: Any, i: int) -> list[Via]:
        """The moves of an operand before op i, but for those that its use makes by itself."""
        own = [m for m in moves.get(s.value, []) if m.before == i] if s is not None else []
        return [
            (t.cuts[m.value].get(m.src) if m.src else None, t.cuts[m.value].get(m.dst) if m.dst else None)
            for m in own
            if push.get(m.value, "") != m.dst
        ]

    script = Script({}, [], {}, t.random_glue, frozenset(t.copies), same=frozenset(t.same), names=tuple(t.names))
    inputs: dict[str, tuple[str, ...]] = {}
    for param, v in t.inputs.items():
        layouts = used.get(v, set())
        inputs[param] = tuple(sorted(k for k in layouts if k is not None))
        only = next(iter(layouts)) if len(layouts) == 1 else None
        script.inputs[param] = t.cuts[v][only] if only is not None else None
    homes = dict(solution.homes)
    homes.update({v: k for op, give in zip(t.ops, gives) for v, k in zip(op.outputs, give)} | push)
    for i, (op, event, choice) in enumerate(zip(t.ops, t.events, solution.choices)):
        pushes = [t.cuts[v][key] if (key := push.get(v)) is not None else None for v in op.outputs]
        if event.kind == "stage":
            option = event.options[choice].name
            ways = [via(s, i) for s in event.operands]
            script.stages.append(StageStep(event.name, option, pushes, event.random, ways, event.constants))
            # run whole on every rank, it has to draw the same numbers there, as glue does
            script.random_glue |= event.random and option is None
        elif event.kind == "output":
            script.outputs[event.index] = via(event.operands[0], i)
        elif event.kind == "source":
            if event.source[choice] is not None:
                script.glue[event.index] = GlueStep(event.name, source=event.source[choice])
        elif event.kind == "glue":
            layout = dict(zip(op.inputs, needs[i]))
            if not any(pushes) and all(homes[v] == key for v, key in layout.items()):
                continue
            cuts = [s.cuts[key] if s and (key := layout[s.value]) is not None else None for s in event.operands]
            script.glue[event.index] = GlueStep(event.name, cuts, pushes, via=[via(s, i) for s in event.operands])

    recomputing = {event.region for event in t.events if event.grad}

    def again(at: int, after: bool) -> bool:
        """Whether recomputation in backward gets past op `at`: it stops where nothing more was saved."""
        region = t.events[at].region if at >= 0 else None
        if region is None or region not in recomputing:
            return False
        if region in t.saves:
            return t.saves[region] > at or (t.saves[region] == at and not after)
        return any(e.region == region and e.kind == "stage" for e in t.events[at + after :])

    def recomputed(m: Move) -> bool:
        if push.get(m.value, "") == m.dst:
            return again(m.after, after=True)
        # a copy made of what came from outside the region is still there
        inside = m.after < 0 or t.events[m.after].region == t.events[m.before].region
        return inside and again(m.before, after=False)

    by_grad = {(v, k) for op, need, e in zip(t.ops, needs, t.events) if e.grad for v, k in zip(op.inputs, need)}
    by_grad |= {(m.value, m.src) for m in solution.moves}

    def differentiated(m: Move) -> bool:
        return t.grads[m.value] and (m.value, m.dst) in by_grad

    def collective(m: Move) -> Any:
        """The same for moves that share one: switches of small tensors at one place."""
        if m.kind != "switch" or not fuses(t.values[m.value].nbytes, n):
            return m
        return ("push", m.after) if push.get(m.value, "") == m.dst else ("use", m.before)

    taken = [op.choices[c] for op, c in zip(t.ops, solution.choices)]
    sends: dict[str, Sent] = {phase: {} for phase in ("forward", "backward", "recompute")}

    def count(phase: str, kind: str, nbytes: int, times: int = 1) -> None:
        sends[phase] = add_sent(sends[phase], {kind: (nbytes, times)})

    sendings: list[Sending] = []

    def where(at: int) -> tuple[str, int, str]:
        return t.events[at].kind, t.events[at].index, t.ops[at].name

    own_call: dict[Move, int] = {}
    seen: set[Any] = set()
    for m in (m for m in solution.moves if m.kind != "split"):
        for phase, happens, sent in (
            ("forward", True, m.bytes),
            ("backward", differentiated(m), adjoint_bytes(t.values[m.value], m, n)),
            ("recompute", recomputed(m), m.bytes),
        ):
            if happens:
                new = (phase, collective(m)) not in seen
                seen.add((phase, collective(m)))
                back = phase == "backward" and m.kind == "gather"
                count(phase, "reduce_scatter" if back else m.kind, sent, int(new))
                if phase == "forward":
                    own_call[m] = int(new)
                    at = where(m.after if push.get(m.value, "") == m.dst else m.before)
                    sendings.append(Sending(at, m.kind, int(new), t.values[m.value], m.src, m.dst))
    for i, event in enumerate(t.events):
        inside = Sends()
        if event.kind == "stage":
            inside = event.sends[solution.choices[i]]
        elif event.passing and (passing := event.passing[solution.choices[i]]) is not None:
            sendings.append(Sending(where(i), passing.kind, 1, each=passing.forward))
            there, home = {passing.kind: (max(passing.forward), 1)}, {passing.adjoint: (max(passing.backward), 1)}
            inside = Sends(there, home if any(passing.backward) else {}, there)
        sends["forward"] = add_sent(sends["forward"], inside.forward)
        if event.grad:
            sends["backward"] = add_sent(sends["backward"], inside.backward)
        if event.kind != "stage":
            times = int(again(i, after=True))
        elif kept_inside or not event.grad:
            times = 0
        else:
            # a stage is recomputed as a whole: what it saves lies behind what it sends. Twice, if it is a checkpoint
            # within a region that is one, which saves the inputs of its last stage and stops there
            itself = again_inside or event.own
            times = itself + again(i, after=itself)
        sends["recompute"] = add_sent(sends["recompute"], *[inside.recompute] * times)
        if event.grad:
            for around, after in ((inside.before, False), (inside.after, True)):
                if again(i, after):
                    sends["recompute"] = add_sent(sends["recompute"], around)
    # an input that asks for its gradient gets it whole: by an all-gather if it was split, else by an all-reduce
    summed = list(t.whole_grads)
    for param, v in t.inputs.items():
        if t.grads[v] and t.values[v].home == (None,):
            if script.inputs[param]:
                count("backward", "gather", price(t.values[v], next(iter(used[v])), None, n)[0])
            else:
                summed.append(t.values[v].nbytes)
    for size in summed:
        count("backward", "all_reduce", -(-2 * size * (n - 1) // n))
    if n == 1:
        sends = {phase: {} for phase in sends}
    total = {phase: sum(nbytes for nbytes, _ in sent.values()) for phase, sent in sends.items()}
    calls = {phase: sum(times for _, times in sent.values()) for phase, sent in sends.items()}

    everything = [t.forwards(event) * event.flops for event in t.events]
    touched = [tuple(t.forwards(event) * part for part in event.touched) for event in t.events]
    shares = [share_of(t, stages, i, solution.choices[i], n) for i in range(len(t.ops))]
    held = [held_by(t, i, c, share, n) for i, (c, share) in enumerate(zip(taken, shares))]
    longest = max((whole for _, whole in held), default=1)
    saved = list(accumulate((c.saved for c in taken), initial=t.resident))
    peaks = [saved[i + 1] + event.memory[0] for i, event in enumerate(t.events) if event.kind == "whole"]
    return Plan(
        n, *rows_of(t, stages, solution, n, own_call, [own / longest for own, _ in held]), total,
        max([solution.peak, *peaks]), t.resident, solution.exact, script,
        sendings=sendings if n > 1 else [], share=max((own for own, _ in held), default=1) / longest,
        whole=whole_glue(t, taken, held, everything, n), calls=calls,
        flops=int(sum(f * share for f, share in zip(everything, shares))),
        flops_alone=sum(everything),
        flops_whole=sum(f for f, share in zip(everything, shares) if share == 1),
        touched=int(sum(touched_by(t, stages, i, both, shares[i]) for i, both in enumerate(touched)))
        + 2 * sum(total.values()),  # what is sent is copied once, to lie as it goes or comes
        touched_alone=sum(map(sum, touched)),
        cut_weights=sum(inside.cut for stage in stages.values() for inside in stage.inside),
        sends=sends,
        hardware=hardware, problem=problem, inputs=inputs, staged=tuple(event.kind == "stage" for event in t.events),
        reads=t.reads, chosen=not any(stage.whole for stage in stages.values()),
    )  # fmt: skip


def _meet(t: Trace, solution: Solution, push: dict[int, str | None], n: int) -> None:
    """Leave to their use the pushes of tensors that enter one op together: there they share a collective.

    Not inside an activation checkpoint, which would repeat it; and not what only one op pushes, for it shares there.
    """
    uses: dict[int, list[int]] = {}
    for k, op in enumerate(t.ops):
        for v in op.inputs:
            uses.setdefault(v, []).append(k)
    entering: dict[int, list[Move]] = {}
    for m in solution.moves:
        if m.kind == "switch" and fuses(t.values[m.value].nbytes, n):
            entering.setdefault(m.before, []).append(m)
    for k, moves in entering.items():
        pushed = [m for m in moves if push.get(m.value, "") == m.dst]
        free = [m for m in pushed if uses[m.value] == [k] and t.events[k].region is None]
        at_use = len(moves) - len(pushed)
        if len(free) + at_use > 1 and (at_use or len({m.after for m in free}) > 1):
            for m in free:
                del push[m.value]


def plan(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    size: int,
    stages: Mapping[str, str] | None = None,
    memory: int | None = None,
    dtype: torch.dtype | None = None,
    gather_output: bool = False,
    hardware: Hardware | None = None,
) -> Plan:
    """The cheapest way to run `model` on `size` ranks, found on one process without running it: nothing is allocated.

    A forward that reads its data is run once, on inputs that have some. args, kwargs: what its forward takes (meta
    tensors will do, but for such a forward); stages: as for `parallelize`, by default
    ``model.stages``; memory: bytes a rank may hold, parameters included; dtype: the floating-point type to plan for,
    by default that of the model; gather_output: count the gather of the outputs, too; hardware: what the ranks are and
    how they are joined, for an estimate in seconds (it does not change the layouts, nor limit the memory). Raises
    ValueError on a stage that does not fit, and `dsp.planner.Infeasible` if nothing fits in the memory.
    """
    if size < 1:
        raise ValueError(f"size is the number of ranks, got {size}")
    found, root = stages_of(model, stages)
    return plan_stages(model, found, root, args, kwargs, size, memory, dtype, gather_output, hardware, advise=True)


def plan_stages(
    model: nn.Module,
    stages: list[Stage],
    root: StagePattern | None,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    size: int,
    memory: int | None = None,
    dtype: torch.dtype | None = None,
    gather_output: bool = False,
    hardware: Hardware | None = None,
    again_inside: bool = False,
    kept_inside: bool = False,
    batch: bool = True,
    advise: bool = False,
) -> Plan:
    """`plan` for stages that were found already; without `batch` nothing is sharded along it that need not be.
    `advise`: where glue runs whole, look for what would help."""
    args = (args,) if isinstance(args, torch.Tensor) else tuple(args)
    t = traced(
        model, stages, root, args, kwargs or {}, size, gather_output=gather_output, dtype=dtype, recompute=again_inside
    )
    made = make_plan(t, {s.name: s for s in stages}, size, memory, hardware, again_inside, kept_inside, batch)
    if not (advise and made.whole):
        return made
    rest = size, memory, dtype, gather_output, hardware, again_inside, kept_inside, batch
    return replace(
        made,
        remedy=remedy(
            model, stages, t, made, lambda more: plan_stages(model, [*stages, *more], root, args, kwargs, *rest)
        ),
    )


def stages_of(model: nn.Module, stages: Mapping[str, str] | None) -> tuple[list[Stage], StagePattern | None]:
    if stages is None:
        stages = getattr(model, "stages", None)
        if stages is None:
            raise NotationError(
                f"{type(model).__name__} has no stages attribute; pass stages={{...}}, for example "
                '{"blocks.*.spatial": "b t [s c]", "blocks.*.temporal": "b [t] s [c]"}'
            )
    found, root = find_stages(model, stages)
    return found, parse(root, root=True) if root is not None else None
