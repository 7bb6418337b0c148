"""Decisions are found by what an operation or a stage reads: whatever else a forward does, before it or in between."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import dsp
from tests.support import toys
from tests.support.parity import assert_close_named, assert_parallel_equal, assert_step_equal, averaged
from tests.support.records import left_plan, same_key
from tests.support.runs import Heard
from tests.support.slow import slow


class Projections(nn.Module):
    """Two projections of one tensor, which look alike: one is attended to over space, the other over time.

    checkpoints: one around both, or one around each; these read the tensor as an argument or from their closure, or lie
    in another one.
    """

    stages = {"": "x=b t s c", "space": "b t [s c]", "time": "b [t] s [c]"}

    def __init__(self, time_first: bool, checkpoints: str) -> None:
        super().__init__()
        self.space, self.time = toys.Along(2), toys.Along(1)
        self.weights = nn.ParameterList(torch.randn(toys.C, toys.C) / 2 for _ in range(2))
        self.order, self.checkpoints = (1, 0) if time_first else (0, 1), checkpoints

    def projected(self, x: Tensor, *which: int) -> Tensor:
        stages = self.space, self.time
        parts = [F.linear(x, self.weights[k]) for k in which]
        return sum(stages[k](part) for k, part in zip(which, parts))

    def forward(self, x: Tensor) -> Tensor:
        y, run = self.space(x), partial(checkpoint, use_reentrant=False)
        match self.checkpoints:
            case "one":
                return run(self.projected, y, *self.order)
            case "each":
                return sum(run(self.projected, y, k) for k in self.order)
            case "closures":
                return sum(run(partial(self.projected, y, k)) for k in self.order)
            case "nested":
                return run(lambda: sum(run(partial(self.projected, y, k)) for k in self.order))
        return self.projected(y, *self.order)


def both(model: nn.Module, mesh: DeviceMesh) -> tuple[nn.Module, nn.Module]:
    single = model.double()
    return single, dsp.parallelize(copy.deepcopy(single), mesh)


@pytest.mark.parametrize("time_first", [False, True])
@pytest.mark.parametrize("checkpoints", ["none", "one", "each", "closures", "nested"])
@pytest.mark.parametrize(("mesh", "shape"), [slow(2, (1, 4, 6, toys.C)), (3, (2, 5, 7, toys.C))])
def test_two_that_read_the_same_are_decided_apart(mesh: DeviceMesh, shape, checkpoints, time_first) -> None:
    """Each in its turn, in what a checkpoint computes again too: as many bytes as planned in every phase."""
    single, model = both(Projections(time_first, checkpoints), mesh)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    with Heard() as heard:
        assert_step_equal(single, model, mesh, (x,), rounds=2)
    assert any(len({*decisions}) > 1 for decisions in same_key(model))
    assert heard.texts == []


def remembering(m: toys.SpaceTime, x: Tensor) -> Tensor:
    """A memory of the first call, which later ones read in a part that is computed again in backward."""
    if m.memory is None:
        m.memory = m.time(x).detach()
    return checkpoint(lambda x: m.space(x * m.memory) + m.time(x + m.memory), m.space(x), use_reentrant=False)


@pytest.mark.parametrize("mesh", [2, 3])
def test_recomputation_finds_the_memory_of_its_own_call(mesh: DeviceMesh) -> None:
    """Three forwards, and only then their backwards."""
    single, model = both(toys.SpaceTime(remembering, memory=None), mesh)
    xs = [torch.randn(1, 4, 6, toys.C, dtype=torch.float64) for _ in range(3)]
    for x in xs:  # until its memory is planned
        single(x), model(x)
    with Heard() as heard:
        for m in (single, model):
            losses = [dsp.mean(m(x).square()) for x in xs]
            for loss in losses:
                loss.backward()
    assert_close_named(averaged(model, mesh), {n: p.grad for n, p in single.named_parameters()})
    assert heard.texts == []


class Weighed(nn.Module):
    """A stage that returns a whole weight as it was given, and is read again whole by another stage and outside."""

    stages = {"": "x=b t s c", "space": "b t [s c]", "term": "b [t] s [c], weight=b s -> b s, b s"}

    class Term(nn.Module):
        def forward(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            return x.square().sum((1, 3)), weight

    def __init__(self) -> None:
        super().__init__()
        self.space, self.term = toys.Along(2), self.Term()

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        found = [self.term(self.space(x * k), weight) for k in (1.0, 0.5)]
        return sum((error * w).sum() for error, w in found) + weight.sum()


@pytest.mark.parametrize("mesh", [2, 3])
def test_an_input_that_a_stage_returns_stays_full(mesh: DeviceMesh) -> None:
    inputs = torch.randn(2, 5, 7, toys.C, dtype=torch.float64), torch.rand(2, 7, dtype=torch.float64)
    with Heard() as heard:
        assert_parallel_equal(Weighed().double(), mesh, inputs, rounds=3)
    assert heard.texts == []


def moody(m: toys.SpaceTime, x: Tensor) -> Tensor:
    """A forward that does this in one call and that in the next: what, an attribute says."""
    y = m.space(x)
    if m.logs:
        m.seen = (y.detach() * 2 - 1).abs()
    z = y.roll(m.start, -1)
    z = z * (0.1 * m.start + 0.5) - z * (0.05 * m.start)
    return m.time(z) + m.space(z)


@pytest.mark.parametrize("mesh", [2, 3])
def test_an_operation_less_or_other_numbers_leave_the_plan_in_force(mesh: DeviceMesh) -> None:
    """A forward that leaves something out, or computes it by other numbers, goes on by its plan."""
    single, model = both(toys.SpaceTime(moody, logs=True, start=1, seen=None), mesh)
    x = torch.randn(1, 5, 6, toys.C, dtype=torch.float64, requires_grad=True)
    with Heard() as heard:
        for logs, start in ((True, 1), (False, 1), (False, 2), (True, 0), (False, 1)):
            for m in (single, model):
                m.logs, m.start = logs, start
            assert_step_equal(single, model, mesh, (x,))
            assert not left_plan(model)
    assert heard.texts == []


T = torch.tensor
PICKS: dict[str, tuple[Any, list[Tensor]]] = {
    "a slice": (lambda m, y: y[:, : m.at], [T(4), T(1), T(4), T(2)]),
    "a written slice": (lambda m, y: (y.__setitem__((..., slice(m.at)), 0.5), y)[1], [T(4), T(1), T(2)]),
    "an index or a mask": (
        lambda m, y: y[..., m.at].sum(-1),
        [T([0, 1, 1, 3]), T([0, 1, 1, 0]) > 0, T([1, 0, 1, 1]) > 0],
    ),
    "where to split": (lambda m, y: y.tensor_split(m.at, -1)[1].sum(-1), [T([1, 2]), T([1, 3]), T([2, 3])]),
    "how many": (lambda m, y: y.topk(m.at, -1).values.sum(-1), [T(3), T(1), T(2)]),
    "how often": (lambda m, y: y.repeat(1, 1, m.at, 1), [T(2), T(1), T(3)]),
    "a dim": (lambda m, y: y.flip(m.at).sum(m.at), [T(1), T(2), T(1)]),
}


@pytest.mark.parametrize("mesh", [3])
@pytest.mark.parametrize("what", PICKS)
def test_a_number_that_is_a_tensor_may_be_another_in_the_next_call(mesh: DeviceMesh, what: str) -> None:
    does, values = PICKS[what]
    single, model = both(toys.SpaceTime(lambda m, x: does(m, m.time(m.space(x)) * 1), at=None), mesh)
    x = torch.randn(1, 4, 2, toys.C, dtype=torch.float64, requires_grad=True)
    for at in values:
        single.at = model.at = at
        assert_step_equal(single, model, mesh, (x,))


def casting(m: toys.SpaceTime, x: Tensor) -> Tensor:
    y = m.proj(m.space(x))
    z = y.float()
    m.seen = y.dtype, z.dtype, z.float().dtype
    return m.time(z)


@pytest.mark.parametrize("half_first", [False, True])
def test_a_cast_that_did_nothing_when_it_was_planned_is_one_under_autocast(mesh: DeviceMesh, half_first: bool) -> None:
    """A plan does not know autocast, nor the type of weights: a cast is one where its tensor is of another type."""
    single = toys.SpaceTime(casting, proj=nn.Linear(toys.C, toys.C), seen=None)
    model, x = dsp.parallelize(copy.deepcopy(single), mesh), torch.randn(1, 5, 6, toys.C)
    for half in (half_first, not half_first, half_first, not half_first):
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            torch.testing.assert_close(model(x), single(x), rtol=1e-2, atol=1e-2)
        assert model.seen == single.seen == (torch.bfloat16 if half else torch.float32, torch.float32, torch.float32)


def doubling(m: toys.SpaceTime, x: Tensor) -> Tensor:
    """A second pass over the stages in every other call, on another tensor than the plan has for them."""
    y = m.time(m.space(x))
    return m.space(y + m.time(m.space(y * 0.5)) if m.twice else y)


def apart(m: toys.SpaceTime, x: Tensor) -> Any:
    """A second stage in every other call, on the whole input: nothing that is sharded leads to it."""
    return (m.space(x), m.time(x)) if m.twice else m.space(x)


@pytest.mark.parametrize(("does", "what"), [(doubling, "mul()"), (apart, "stage 'time'")])
def test_unplanned_operations_are_chosen_on_the_way_and_planned_next_time(mesh: DeviceMesh, does, what: str) -> None:
    model = toys.SpaceTime(does, twice=False)
    if does is apart:
        model.stages = {name: text for name, text in model.stages.items() if name}
    single, model = both(model, mesh)
    x = torch.randn(1, 4, 6, toys.C, dtype=torch.float64, requires_grad=True)
    told = []
    for twice in (False, True, True, False):
        single.twice = model.twice = twice
        with Heard() as heard:
            assert_step_equal(single, model, mesh, (x,))
        told.append(heard.texts)
    assert told[0] == told[2] == []
    if mesh.get_local_rank() == 0:  # which speaks for all
        [text] = told[1]
        assert f"it called {what} on tensors for which the plan has no such call" in text


FLOATS = [
    lambda x, p: F.normalize(x, p=p, dim=1), lambda x, p: torch.linalg.vector_norm(x, p, dim=1),
    lambda x, p: F.interpolate(x.mT, scale_factor=p, mode="linear"),
]  # fmt: skip


@pytest.mark.parametrize("which", range(len(FLOATS)))
def test_a_float_that_a_rule_reads_may_be_another_in_the_next_call(mesh: DeviceMesh, which: int) -> None:
    f = FLOATS[which]
    model = dsp.parallelize(
        toys.Does(lambda m, x: f(m.l(x), m.p), p=2.0, l=nn.Linear(4, 4).double()),
        mesh,
        {"": "x=[b] t c", "l": "b t [c]"},
    )
    for model.p in (2.0, 2.0, 1.5, 1.5, 2.0):
        x = torch.randn(2, 7, 4).double()
        torch.testing.assert_close(model(x), f(F.linear(x, *model.l.parameters()), model.p))


INDICES = [
    np.int64(1), (slice(None), np.int64(3)), (np.int64(0), slice(None), slice(1, 3)), (..., np.array([0, 2]), 1),
    (slice(None), range(2, 5)), (slice(None), slice(2), (3, 1)), (np.int64(1), ..., np.array([True, False] * 2)),
]  # fmt: skip


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_an_index_of_numpy_is_one_of_numbers(mesh: DeviceMesh, index: Any) -> None:
    def filled(x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        y[np.int64(1)] = x[np.int64(0)] * 2
        return y

    for f in (lambda x: x[index] * 2, filled):
        model = dsp.parallelize(toys.Does(lambda m, x, f=f: f(x * 1)), mesh, {"": "x=[b] t [s] [c]"})
        for _ in range(2):
            x = torch.randn(2, 6, 6, 4).double()
            torch.testing.assert_close(model(x), f(x))


PARTS = {"slice": lambda k: slice(np.int64(k)), "range": lambda k: range(k), "places": lambda k: np.arange(k)}


@pytest.mark.parametrize("part", PARTS)
def test_an_index_of_numpy_may_be_another_in_the_next_call(mesh: DeviceMesh, part: str) -> None:
    """As tokens are sent to experts: a result is as long as the index says, not as it was planned."""
    model = toys.Does(lambda m, x: m.s(m.l(x)[:, PARTS[part](m.k)]), k=4, l=nn.Identity(), s=nn.Softmax(2))
    model = dsp.parallelize(model, mesh, {"": "x=b t c", "l": "b t [c]", "s": "b t [c]"})
    for model.k in (4, 4, 2, 5, 4):
        x = torch.randn(2, 6, 4).double()
        torch.testing.assert_close(model(x), x[:, PARTS[part](model.k)].softmax(2))
