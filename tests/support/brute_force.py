"""The planner's oracle: all layouts of a small problem, one by one."""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import replace

from dsp.planner import Choice, Op, Problem, Solution, Value, price


def least(problem: Problem) -> tuple[int, int, int, int] | None:
    """`brute_force`, but as good a plan in bytes and ranks in which nothing long is whole that need not be, if any."""
    values, best = problem.values, brute_force(problem)
    limit = max(value.nbytes for value in values) / problem.size

    def long(op: Op, choice: Choice) -> bool:
        layouts = zip(op.inputs + op.outputs, choice.needs + choice.gives)
        return any(layout is None and values[v].nbytes > limit for v, layout in layouts)

    ops = [replace(op, choices=tuple(c for c in op.choices if not long(op, c)) or op.choices) for op in problem.ops]
    lean = brute_force(replace(problem, ops=tuple(ops)), limit)
    return lean if lean and best and (lean[0], lean[2]) <= (best[0], best[2]) else best


def brute_force(problem: Problem, limit: float = math.inf) -> tuple[int, int, int, int] | None:
    """(bytes, calls, sum of ranks, largest) of the best plan; None if there is none.

    Whole copies of more than `limit` bytes are made only where an op may ask for them.
    """
    values, n, bounded = problem.values, problem.size, problem.capacity is not None
    layouts = [{*value.home} | ({None} if value.nbytes <= limit else set()) for value in values]
    for op in problem.ops:
        for choice in op.choices:
            for v, layout in [*zip(op.inputs, choice.needs), *zip(op.outputs, choice.gives)]:
                layouts[v].add(layout)
    last = {v: k for k, op in enumerate(problem.ops) for v in op.inputs}
    made = {v for op in problem.ops for v in op.outputs}
    inputs = [v for v in last if v not in made]

    def local(copies):
        return [values[v].local_bytes(layout, n) for v, layout in copies]

    ticks = itertools.count()
    queue, seen = [], set()
    for homes in itertools.product(*(values[v].home for v in inputs)):
        heapq.heappush(queue, ((0, 0, 0, 0), next(ticks), 0, frozenset(zip(inputs, homes)), 0))
    while queue:
        cost, _, k, held, saved = heapq.heappop(queue)
        if k == len(problem.ops):
            return cost
        if (k, held, saved) in seen:
            continue
        seen.add((k, held, saved))
        nbytes, calls, rank, largest = cost
        for v, src in held:
            for dst in layouts[v] - {layout for w, layout in held if w == v}:
                more_bytes, more_calls = price(values[v], src, dst, n)
                size = max(largest, *local([(v, dst)]))
                new = nbytes + more_bytes, calls + more_calls, rank, size
                heapq.heappush(queue, (new, next(ticks), k, held | {(v, dst)}, saved))
        for copy in held if bounded else ():
            heapq.heappush(queue, (cost, next(ticks), k, held - {copy}, saved))
        op = problem.ops[k]
        for choice in op.choices:
            needs, gives = set(zip(op.inputs, choice.needs)), set(zip(op.outputs, choice.gives))
            if not needs <= held:
                continue
            kept = saved + choice.saved if bounded else 0
            if bounded and problem.resident + kept + sum(local(held | gives)) + choice.work > problem.capacity:
                continue
            size = max([largest, choice.work, *local(needs | gives)])
            new = nbytes + choice.bytes, calls + choice.calls, rank + choice.rank, size
            after = frozenset((v, layout) for v, layout in held | gives if last.get(v, -1) > k)
            heapq.heappush(queue, (new, next(ticks), k + 1, after, kept))
    return None


def verify(problem: Problem, solution: Solution) -> tuple[int, int, int, int]:
    """Carry a solution out, check it against what it claims, and return its objective."""
    values, n, ops = problem.values, problem.size, problem.ops
    taken = [op.choices[choice] for op, choice in zip(ops, solution.choices)]
    events = []  # in order: (op index or half before it, "move" / "need" / "make", value, layout)
    held = {(v, layout) for v, layout in solution.homes.items()}
    rank = nbytes = calls = largest = 0
    assert all(solution.homes[v] in values[v].home for v in solution.homes)
    assert list(solution.moves) == sorted(solution.moves, key=lambda move: move.before)
    produced = {v: k for k, op in enumerate(ops) for v in op.outputs}
    events += [(-1, "make", v, layout) for v, layout in solution.homes.items()]
    for k, (op, choice) in enumerate(zip(ops, taken)):
        for move in (move for move in solution.moves if move.before == k):
            assert (move.value, move.src) in held
            assert move.after == produced.get(move.value, -1) < k
            assert move.kind == ("split" if move.src is None else "gather" if move.dst is None else "switch")
            assert move.bytes == price(values[move.value], move.src, move.dst, n)[0]
            events += [(k - 0.5, "read", move.value, move.src), (k - 0.5, "make", move.value, move.dst)]
            held.add((move.value, move.dst))
            nbytes += move.bytes
            calls += price(values[move.value], move.src, move.dst, n)[1]
            largest = max(largest, values[move.value].local_bytes(move.dst, n))
        assert set(zip(op.inputs, choice.needs)) <= held
        events += [(k, "read", v, layout) for v, layout in zip(op.inputs, choice.needs)]
        events += [(k, "make", v, layout) for v, layout in zip(op.outputs, choice.gives)]
        held |= set(zip(op.outputs, choice.gives))
        sizes = [values[v].local_bytes(a, n) for v, a in zip(op.inputs + op.outputs, choice.needs + choice.gives)]
        largest = max([largest, choice.work, *sizes])
        rank, nbytes, calls = rank + choice.rank, nbytes + choice.bytes, calls + choice.calls
    peak = problem.resident
    for k, (op, choice) in enumerate(zip(ops, taken)):
        here = choice.work + sum(choice.saved for choice in taken[: k + 1]) + problem.resident
        here += sum(values[v].local_bytes(layout, n) for v, layout in zip(op.outputs, choice.gives))
        for copy in {event[2:] for event in events}:
            mine = [event for event in events if event[2:] == copy]
            exists = any(what == "make" and when < k for when, what, *_ in mine)
            ahead = next((what for when, what, *_ in mine if when >= k), "make")  # made again: not kept until then
            if exists and ahead == "read":
                here += values[copy[0]].local_bytes(copy[1], n)
        peak = max(peak, here)
    assert (solution.bytes, solution.calls, solution.largest, solution.peak) == (nbytes, calls, largest, peak)
    assert problem.capacity is None or peak <= problem.capacity
    return nbytes, calls, rank, largest


def chain(sizes, stages, n, home=(None,), joins=False, last=None) -> Problem:
    """x -> stage -> stage ..., each shardable along the dims it does not compute over, or else whole; batch last.

    A batch of 1 cannot be sharded.

    With joins, a residual is added after every stage: two ops for each. `last` is a layout that the end is needed in.
    """
    dims = [dim for dim, size in sizes if dim != "c" and (dim != "b" or size > 1)]
    values, ops = [Value("x", sizes, 2, home)], []

    def add(name, inputs, layouts):
        values.append(Value(f"{name}{len(ops)}", sizes, 2))
        taken = [Choice((a,) * len(inputs), (a,), rank=int(a == "b")) for a in layouts]
        ops.append(Op(name, inputs, (len(values) - 1,), tuple(taken)))
        return len(values) - 1

    x = 0
    for stage in stages:
        free = [dim for dim in dims if dim not in stage]
        y = add(stage, (x,), free if set(free) - {"b"} else [None])
        x = add("join", (x, y), dims) if joins else y
    if last:
        ops.append(Op("end", (x,), (), (Choice((last[0],), ()),)))
    return Problem(tuple(values), tuple(ops), n)


EVEN = (("b", 1), ("t", 8), ("s", 16), ("c", 4))
