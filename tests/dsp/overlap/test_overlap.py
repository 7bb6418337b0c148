"""Switches that travel piece by piece while stages compute: exact, as planned, in the right order, or left alone."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import dsp
from dsp.comm.exchange import UnderWay
from dsp.comm.hardware import Hardware, Link
from dsp.comm.layout import Axis, Cut
from dsp.comm.pending import ChunkedSwitch
from dsp.comm.wire import AS_IT_IS
from dsp.overlap.hidden import EXCHANGE
from dsp.report.table import Plan
from tests.support.loopback import TOLERANCE, measured
from tests.support.parity import assert_step_equal, averaged, unsharded
from tests.support.records import decisions, overlap_of, plan_text
from tests.support.refusals import refused
from tests.support.runs import Heard
from tests.support.slow import keep_short, slow
from tests.support.toys import Along, C, Fn, Folded, Grid
from zoo.training import UserError
from zoo.training.config import load

RANKS = [2, 3, slow(4)]
STAGES = {"": "x=b t s c -> b t s c", "space.*": "b t [s c]", "time.*": "b [t] s [c]"}


class Behind(nn.Module):
    """Each stage's result is switched, and read by the next stage."""

    stages = STAGES

    def __init__(self, layers: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.space = nn.ModuleList(Along(2, dropout) for _ in range(layers))
        self.time = nn.ModuleList(Along(1, dropout) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for space, time in zip(self.space, self.time):
            x = time(space(x))
        return x


class Before(Behind):
    """Operations between stages make what is switched."""

    def forward(self, x: Tensor) -> Tensor:
        for space, time in zip(self.space, self.time):
            y = space(x + x.sin())
            x = time(x.cos() * y)
        return x


class Recomputed(Behind):
    """Within activation checkpoints: each stage alone, or both with the switch between them."""

    alone = False

    def forward(self, x: Tensor) -> Tensor:
        for space, time in zip(self.space, self.time):
            for region in (space, time) if self.alone else (lambda x, space=space, time=time: time(space(x)),):
                x = checkpoint(region, x, use_reentrant=False)
        return x


class Alone(Recomputed):
    alone = True


class Attention(nn.Module):
    """Queries, keys and values of one stage, a core along their heads, and one switched by another stage."""

    stages = {
        "": "x=b n c -> b n c",
        "embed": "b n [c]",
        "project": "b n [c] -> b n h [e], b n h [e], b n h [e]",
        "core": "b [n] h [e], b [n] h [e], b [n] h [e] -> b [n] h [e]",
        "out": "b n [c], b n [h e]",
    }

    class Project(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return super().forward(x).unflatten(-1, (6, 6)).chunk(3, -1)

    class Core(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)

    class Out(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(12, 8) / 3)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x + y.flatten(2) @ self.weight

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.project, self.core, self.out = nn.Linear(8, 8), self.Project(8, 36), self.Core(), self.Out()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for _ in range(2):
            x = self.out(x, self.core(*self.project(x)))
        return x


class Two(nn.Module):
    """A stage of which one result is switched, and the other one read later as it lies."""

    stages = {
        "": "x=b t s c -> b t s c",
        "first": "b t [s c] -> b t [s c], b t [c]",
        "second": "b [t] s [c]",
        "third": "b t [s c], scale=b t [c]",
    }

    class First(Along):
        def forward(self, x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
            y = super().forward(x)
            return y, y.mean(2)

    class Third(Along):
        def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
            assert scale is not None
            return super().forward(x, scale[:, :, None])

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = self.First(2), Along(1), self.Third(2)

    def forward(self, x: Tensor) -> Tensor:
        x, scale = self.first(x)
        return self.third(self.second(x), scale=scale)


def of_grid(batch: int, t: int, s: int) -> tuple[Tensor, ...]:
    return (torch.randn(batch, t, s, C, dtype=torch.float64, requires_grad=True),)


def of_sequence(batch: int, n: int, _: int) -> tuple[Tensor, ...]:
    return (torch.randn(batch, n, 8, dtype=torch.float64, requires_grad=True),)


def conditioned(*sizes: int) -> dict[str, Tensor]:
    return {k: v.double() for k, v in Grid.inputs(*sizes).items()}


MODELS: dict[str, tuple[type[nn.Module], Callable[..., Any]]] = {
    "behind": (Behind, of_grid),
    "before": (Before, of_grid),
    "both": (Grid, conditioned),  # a stage with a tensor that every piece gets whole
    "several": (Attention, of_sequence),
    "two": (Two, of_grid),
    "recomputed": (Recomputed, of_grid),
    "alone": (Alone, of_grid),
}


def planned(name: str, size: int, sizes: tuple[int, ...], overlap: Any = 2, **how: Any) -> Plan:
    kind, make = MODELS[name]
    torch.manual_seed(0)
    inputs = make(*sizes)
    named = {"kwargs": inputs} if isinstance(inputs, dict) else {"args": inputs}
    return dsp.plan(kind().double(), **named, size=size, overlap=overlap, **how)


def as_planned(mesh: DeviceMesh, plan: Plan, comm: Any) -> None:
    """Compare what the busiest rank sent with what the plan says, in bytes and calls."""
    for phase in ("forward", "backward", "recompute"):
        traffic = getattr(comm, phase)
        kinds = plan.sends[phase]  # the loss has an all-reduce of its own
        sent = torch.tensor([sum(traffic.bytes[kind] for kind in kinds), traffic.calls["switch"]])
        dist.all_reduce(sent, dist.ReduceOp.MAX, group=mesh.get_group())
        assert sent.tolist() == [plan.bytes[phase], kinds.get("switch", (0, 0))[1]], phase


def exactly(mesh: DeviceMesh, name: str, sizes: tuple[int, ...], overlap: int, **how: Any) -> None:
    kind, make = MODELS[name]
    torch.manual_seed(0)
    single, inputs = kind().double(), make(*sizes)
    model = dsp.parallelize(copy.deepcopy(single), mesh, overlap=overlap, **how)
    with Heard() as heard:
        assert_step_equal(single, model, mesh, inputs, rounds=2)
        *_, comm = assert_step_equal(single, model, mesh, inputs, count=True)
    assert not heard.texts, heard.texts  # each rank sends what the plan has of it
    plan = planned(name, mesh.size(), sizes, overlap, **how)
    as_planned(mesh, plan, comm)
    if not how:
        plain = planned(name, mesh.size(), sizes, None)
        assert plan.bytes == plain.bytes
        assert plan.calls["forward"] > plain.calls["forward"]
    with torch.no_grad():
        args = inputs if isinstance(inputs, tuple) else inputs.values()
        torch.testing.assert_close(model(*args), single(*args))


@pytest.mark.parametrize("n", [slow(2), 3, slow(4)])
@pytest.mark.parametrize("name", keep_short(MODELS, only=["behind", "both", "two", "recomputed"]))
def test_outputs_and_every_gradient_are_those_of_one_process(ranks, name: str, n: int) -> None:
    ranks(exactly, n, name, (2, 9, 13), 3)  # on four ranks one has no frame
    ranks(exactly, n, name, (1, 6 if name == "several" else 7, 5), 2)  # pieces of one, and of none


def test_four_pieces_of_even_parts(ranks) -> None:
    for name in ("behind", "before"):
        ranks(exactly, 2, name, (1, 8, 8), 4)


# ------------------------------------------------------------------------------------------------------- the same bits


def pieces_of_a_switch(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    axis = Axis.of(mesh)
    for shape in [(2, 5, 3, 7), (1, 5, 6, 4), (1, 8, 12, 16), (5, 1, 9, 2), (2, 0, 5, 3)]:
        for src, dst in ((1, 2), (2, 1), (3, 0), (0, 3)):
            for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
                whole = torch.randint(0, 2**15, shape).to(dtype)
                for x in (
                    axis.narrow(whole, Cut(src)),
                    axis.narrow(whole.transpose(1, 2).contiguous().transpose(1, 2), Cut(src)),
                ):
                    expect = torch.ops.dsp.switch(x, src, dst, shape[src], axis.group)
                    behind = ChunkedSwitch(src, dst, (shape[src], shape[dst]), axis.group, 3, AS_IT_IS.names)
                    for piece in x.split([sizes[axis.rank] for sizes in behind.parts], src):
                        behind.send(piece)
                    before = ChunkedSwitch(dst, src, (shape[dst], shape[src]), axis.group, 3, AS_IT_IS.names)
                    came = torch.cat([before.take(token, i) for i, token in enumerate(before.start(x))], dst)
                    for got in (behind.join(), came):
                        assert got.dtype == expect.dtype
                        assert torch.equal(got, expect)
                    assert not behind.under_way | before.under_way


@pytest.mark.parametrize("n", RANKS)
def test_a_switch_in_pieces_brings_the_same_bits(ranks, n: int) -> None:
    ranks(pieces_of_a_switch, n)


def repeats(mesh: DeviceMesh, overlap: int | None) -> list[Tensor]:
    torch.manual_seed(0)
    model, x = Before(), torch.randn(1, 8, 12, C)
    dsp.parallelize(model, mesh, overlap=overlap)
    found = []
    for _ in range(3):
        model.zero_grad()
        y = model(x)
        dsp.mean(y.square()).backward()
        found.append([y.detach(), *averaged(model, mesh).values()])
    assert all(map(torch.equal, found[1], found[2]))
    return found[1]


def test_a_run_repeats_itself_and_one_without_is_as_before(ranks) -> None:
    (plain, _), (cut, _) = (ranks(repeats, 2, overlap) for overlap in (None, 2))
    for a, b in zip(plain, cut):
        torch.testing.assert_close(a, b)
    without, default = planned("before", 2, (1, 8, 12), None), dsp.plan(Before(), of_grid(1, 8, 12), size=2)
    assert decisions(without) == decisions(default)


# --------------------------------------------------------------------------------------------------------------- order


TOLD: list[str] = []  # what happened in this process


class Told(torch.autograd.Function):
    """The identity, which tells of its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        TOLD.append("compute")
        return grad


class Tells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(C, C))

    def forward(self, x: Tensor) -> Tensor:
        TOLD.append("compute")
        return Told.apply(x @ self.weight)


class One(nn.Module):
    """One stage that tells when it computes, behind or before a switch."""

    stages = {"": "x=b t s c -> b t s c", "first": "b t [s c]", "second": "b [t] s [c]"}

    def __init__(self, behind: bool) -> None:
        super().__init__()
        self.behind = behind
        self.first, self.second = (Tells(), nn.Dropout(0.0)) if behind else (nn.Dropout(0.0), Tells())

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.second(x if self.behind else x.sin())


def ordered(mesh: DeviceMesh, behind: bool) -> list[list[str]]:
    start, arrived = UnderWay.start.__func__, UnderWay.arrived  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UnderWay, "start", classmethod(lambda cls, *args: TOLD.append("launch") or start(cls, *args)))
        patch.setattr(UnderWay, "arrived", lambda self: TOLD.append("wait") or arrived(self))
        model = dsp.parallelize(One(behind), mesh, gather_output=False, overlap=3)
        x = torch.randn(1, 6 * mesh.size(), 6 * mesh.size(), C, requires_grad=True)
        for _ in range(2):
            TOLD.clear()
            y = model(x)
            forward = list(TOLD)
            TOLD.clear()
            dsp.mean(y.square()).backward()
    return [forward, list(TOLD)]


def test_a_piece_travels_while_the_next_one_is_computed(ranks) -> None:
    last = ["launch"] * 3 + ["wait", "compute"] * 3
    first = ["compute", "launch"] * 3 + ["wait"] * 3
    assert ranks(ordered, 2, True) == [[first, last]] * 2
    assert ranks(ordered, 2, False) == [[last, first]] * 2


def recomputed_late(mesh: DeviceMesh) -> list[str]:
    torch.manual_seed(0)
    model = Alone(1).double()
    model.space[0] = Tells().double()
    dsp.parallelize(model, mesh, overlap=2)
    y = model(*of_grid(1, 4, 4))
    TOLD.clear()
    with dsp.count_comm() as comm:
        dsp.mean(y.square()).backward()
    assert comm.recompute.calls["switch"] == 0
    return list(TOLD)


def test_recomputation_sends_nothing_that_nobody_asks_for(ranks) -> None:
    assert ranks(recomputed_late, 2)[0] == ["compute"] * 4  # two pieces again, and their backward


# ------------------------------------------------------------------------------------------------------ with others


def sharded_weights(mesh: DeviceMesh, ckpt: bool, mixed: bool) -> None:
    for kind in (Behind, Before):
        gathered = {overlap: sharded_step(mesh, kind, ckpt, mixed, overlap) for overlap in (None, 2)}
        assert gathered[None] == gathered[2] > 0


def sharded_step(mesh: DeviceMesh, kind: type[Behind], ckpt: bool, mixed: bool, overlap: int | None) -> int:
    """How often weights are gathered in two steps, which are compared with one process."""
    torch.manual_seed(0)
    single = kind().double()
    model = dsp.parallelize(copy.deepcopy(single), mesh, gather_output=False, overlap=overlap)
    policy = MixedPrecisionPolicy(torch.float32, torch.float32) if mixed else MixedPrecisionPolicy()
    for block in (*model.space, *model.time):
        if ckpt:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh)
    rounding = {"rtol": 1e-3, "atol": 1e-4, "check_dtype": False} if mixed else {}
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"  # renamed in 2.13
    gathers, gather = 0, getattr(dist, name)

    def counted(*args: Any, **named: Any) -> Any:
        nonlocal gathers
        gathers += 1
        return gather(*args, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, name, counted)
        sent = assert_step_equal(
            single, model, mesh, of_grid(1, 7, 5), gradients=unsharded, rounds=2, count=True, **rounding
        )  # fmt: skip
    for comm in sent:
        assert comm.recompute.calls["switch"] == 0
        assert comm.forward.calls["switch"] == comm.backward.calls["switch"] == 3 * (overlap or 1)
    return gathers


@pytest.mark.parametrize(("ckpt", "mixed"), [slow(False, False), (True, False), slow(False, True)])
def test_fully_shard_gathers_once_for_all_pieces(ranks, ckpt: bool, mixed: bool) -> None:
    ranks(sharded_weights, 3, ckpt, mixed)


@pytest.mark.parametrize("way", ["hierarchical", slow("rounds")])
@pytest.mark.parametrize("name", ["both", slow("several"), slow("recomputed")])
def test_pieces_are_direct_beside_switches_in_legs(ranks, name: str, way: str) -> None:
    route = dsp.Route(way, node=2)
    ranks(partial(exactly, route=route), 4, name, (2, 9, 13), 2)
    torch.manual_seed(0)
    plan = planned(name, 4, (2, 9, 13), 2, route=route)
    assert any(o.pieces > 1 for o in plan.overlaps)
    assert {"switch", "switch_within", "switch_between"} >= plan.sends["forward"].keys() - {"gather", "all_reduce"}


def packed(mesh: DeviceMesh, name: str) -> None:
    torch.manual_seed(0)
    kind, x = MODELS[name][0], torch.randn(1, 9, 16, C)
    wire = {"forward": "fp8", "backward": "bf16"}
    model = dsp.parallelize(kind(), mesh, wire=wire, overlap=2, gather_output=False)
    for _ in range(2):
        with Heard() as heard, dsp.count_comm() as comm:
            dsp.mean(model(x).square()).backward()
        assert not heard.texts, heard.texts
    as_planned(mesh, dsp.plan(kind(), x, size=mesh.size(), wire=wire, overlap=2, gather_output=False), comm)


@pytest.mark.parametrize("name", ["behind", "before", "recomputed"])
def test_pieces_in_fewer_bits_are_as_planned(ranks, name: str) -> None:
    ranks(packed, 3, name)


def let_go(mesh: DeviceMesh, behind: bool) -> int:
    """How many switches are still there after a step, without a collection of garbage."""
    made, init = [], ChunkedSwitch.__init__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            ChunkedSwitch, "__init__", lambda self, *args: made.append(weakref.ref(self)) or init(self, *args)
        )  # fmt: skip
        model = dsp.parallelize(Behind() if behind else Before(), mesh, gather_output=False, overlap=2)
        x = torch.randn(1, 6, 6, C)
        model(x)
        made.clear()
        gc.collect()
        gc.disable()
        try:
            dsp.mean(model(x).square()).backward()
        finally:
            gc.enable()
    assert len(made) == 3
    return sum(one() is not None for one in made)


def test_a_step_leaves_no_cycle_that_would_hold_its_memory(ranks) -> None:
    for behind in (True, False):
        assert ranks(let_go, 2, behind) == [0, 0]


def failing(mesh: DeviceMesh, behind: bool) -> None:
    torch.manual_seed(0)
    model, x = Behind(1) if behind else Before(1), torch.randn(1, 6, 6, C)
    stage = model.space if behind else model.time
    single = copy.deepcopy(model)
    dsp.parallelize(model, mesh, overlap=3)
    expect = model(x).detach()
    broken, forward = 0, stage[0].forward

    def second(y: Tensor) -> Tensor:
        nonlocal broken
        broken += 1
        if broken == 2:
            raise ArithmeticError("the second piece")
        return forward(y)

    stage[0].forward = second
    with pytest.raises(ArithmeticError, match="the second piece"):
        model(x)
    del stage[0].forward
    assert "forward" not in stage[0].__dict__
    torch.testing.assert_close(model(x), expect)
    torch.testing.assert_close(expect, single(x))


def test_a_stage_that_raises_leaves_nothing_under_way(ranks) -> None:
    for behind in (True, False):
        ranks(failing, 2, behind)


# ----------------------------------------------------------------------------------------------------- left alone


class Counts(Along):
    """Counts its calls, in a buffer, or in an attribute."""

    def __init__(self, dim: int, attribute: bool = False) -> None:
        super().__init__(dim)
        self.attribute, self.n = attribute, 0
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        if self.attribute:
            self.n += 1
        else:
            self.calls += 1
        return super().forward(x)


class Writes(Along):
    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        return super().forward(x.clone()) + x.mul_(2)


class Sized(Along):
    def forward(self, x: Tensor, scale: Tensor | None = None) -> Any:
        return super().forward(x), x.shape[self.dim]


class Replaced(Behind):
    def __init__(self, make: Callable[[int], nn.Module]) -> None:
        super().__init__(1)
        self.space[0], self.time[0] = make(2), make(1)

    def forward(self, x: Tensor) -> Tensor:
        for stage in (self.space[0], self.time[0]):
            x = stage(x + 0 if stage is self.space[0] else x)
            x = x[0] if isinstance(x, tuple) else x
        return x


KEEPS = "it writes to what it keeps or was given"
LEFT: dict[str, tuple[Callable[[int], nn.Module], str]] = {
    "dropout": (lambda dim: Along(dim, 0.5), "it draws random numbers"),
    "a buffer": (Counts, KEEPS),
    "an attribute": (partial(Counts, attribute=True), KEEPS),
    "its input": (Writes, KEEPS),
    "identity": (lambda dim: nn.Identity(), "it returns what it was given"),
    "a view": (lambda dim: Fn(lambda x: x.view_as(x)), "it returns what it was given"),
    "a size": (Sized, "it returns more than tensors"),
}


def left_alone(mesh: DeviceMesh, name: str) -> None:
    torch.manual_seed(0)
    single = Replaced(LEFT[name][0]).double()
    model = dsp.parallelize(copy.deepcopy(single), mesh, overlap=2)
    with Heard() as heard:
        if name == "dropout":
            dsp.mean(model(*of_grid(1, 7, 5)).square()).backward()
        else:
            assert_step_equal(single, model, mesh, of_grid(1, 7, 5), rounds=2)
    assert not heard.texts, heard.texts


@pytest.mark.parametrize("name", LEFT)
def test_a_stage_that_cannot_be_cut_is_left_alone(ranks, name: str) -> None:
    make, reason = LEFT[name]
    torch.manual_seed(0)
    model, x = Replaced(make).double(), of_grid(1, 7, 5)
    cut, plain = (dsp.plan(model, x, size=2, overlap=overlap) for overlap in (2, None))
    [one] = [o for o in cut.overlaps if o.name == "space.0"]
    assert (one.reason, one.pieces) == (reason, 1)
    assert f"1 switch in one piece at space.*: {reason}" in cut.text()
    assert (cut.bytes, cut.calls, cut.text().count("in 2")) == (plain.bytes, plain.calls, 0)
    assert "piece" not in plain.text()
    ranks(left_alone, 2, name)


class Returns(nn.Module):
    """A linear layer, and a function `make` of its result."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.own, self.make = nn.Linear(C, C), make

    def forward(self, x: Tensor) -> Any:
        return self.make(self.own(x))


def turned(y: Tensor) -> Tensor:
    return y.transpose(1, 2).contiguous().transpose(1, 2)


class Written(nn.Module):
    """Writes in place into a result that was switched, lies in another order in memory, or shares its memory."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        one, three = "b t s c", "b t s c, b t s c, b t s c"
        make = {"shared": lambda y: (y * 2, y, y.view_as(y)), "kept": lambda y: (y, turned(y), y + 1), "turned": turned}
        self.space, self.time, self.kind = Returns(make[kind]), nn.Linear(C, C), kind
        made = one if kind == "turned" else three
        self.stages = {"": "x=b t s c", "space": f"b t [s c] -> {made.replace('s c', '[s c]')}", "time": "b [t] s [c]"}

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "turned":
            other, y = self.time(x), self.space(x)
            y += other
            return self.time(y)
        a, y, z = self.space(x)
        if self.kind == "shared":
            y.mul_(2)
        else:  # as a view it may be written through
            y.transpose(1, 2).flatten(0, 1).mul_(2)
        return torch.cat([self.time(a), y, z], -1)


def written(mesh: DeviceMesh, kind: str) -> None:
    torch.manual_seed(0)
    single = Written(kind).double()
    model = dsp.parallelize(copy.deepcopy(single), mesh, overlap=2)
    assert_step_equal(single, model, mesh, of_grid(2, 9, 10), rounds=2)


@pytest.mark.parametrize("kind", ["shared", "kept", "turned"])
def test_results_are_written_in_place_as_without_pieces(ranks, kind: str) -> None:
    ranks(written, 3, kind)


class Branches(Behind):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.mean() > 5 else x * 2)


def branches(mesh: DeviceMesh) -> str:
    single = Branches().double()
    model = dsp.parallelize(copy.deepcopy(single), mesh, overlap=2)
    assert_step_equal(single, model, mesh, of_grid(1, 6, 6), rounds=3)
    return plan_text(model)


def test_a_forward_that_reads_its_data_is_left_alone(ranks) -> None:
    assert "in one piece at space.*: the forward goes by what its tensors hold" in ranks(branches, 2)[0]


def test_folds_short_dims_and_other_methods_are_left_alone() -> None:
    inputs = Folded.inputs(2, 6, 8)
    folded = dsp.plan(Folded(), kwargs=inputs, size=2, overlap=2)
    assert {o.reason for o in folded.overlaps} <= {"'t' lies in a fold", "'s' lies in a fold"} | {
        "no stage makes what is switched, nor is its only reader"
    }
    assert folded.bytes == dsp.plan(Folded(), kwargs=inputs, size=2).bytes
    short = planned("behind", 4, (1, 4, 4), 4)
    assert {o.reason for o in short.overlaps} == {
        "a rank has no more than 1 of 't'",
        "a rank has no more than 1 of 's'",
    }
    one = planned("behind", 4, (1, 4, 9), 4)  # the stages along s are cut, before and behind
    assert {(o.name[:4], o.pieces) for o in one.overlaps} == {("time", 3)}
    whole = dsp.embedded.plan(Grid(), kwargs=Grid.inputs(1, 8, 8), size=2, method="dsp", overlap=2)
    assert {o.pieces for o in whole.overlaps} == {2}


def test_a_stage_that_compile_compiled_is_left_alone() -> None:
    model = Behind(1)
    model.space[0].compile(backend="eager")
    model.time[0].compile(backend="eager")
    [one] = dsp.plan(model, torch.randn(1, 6, 6, C), size=2, overlap=2).overlaps
    assert one.reason == "its compile() compiled it: compile its forward instead"


def refuses(mesh: DeviceMesh) -> None:
    refused("overlap=2 with compile=True", dsp.parallelize, Behind(), mesh, overlap=2, compile=True)
    for wrong in (1, 5, True, "yes", 2.0):
        refused("overlap: expected None, 'auto', a number", dsp.parallelize, Behind(), mesh, overlap=wrong)


def test_impossible_options_are_refused(ranks) -> None:
    ranks(refuses, 2)
    with pytest.raises(ValueError, match="overlap='auto' weighs"):
        planned("behind", 2, (1, 8, 8), "auto")


def differ(mesh: DeviceMesh) -> None:
    refused("overlap", dsp.parallelize, Behind(), mesh, overlap=2 + mesh.get_local_rank(), error=RuntimeError)


def test_ranks_have_to_agree(ranks) -> None:
    ranks(differ, 2)


# ----------------------------------------------------------------------------------------------------- whether it pays


def hardware(alpha: float, bandwidth: float, flops: float = 1e9) -> Hardware:
    return Hardware(Link("a link", alpha, bandwidth), 1e12, flops, node=64)


def test_auto_cuts_where_that_saves_time_and_says_how_much() -> None:
    sizes = (1, 16, 16)
    auto = {
        "slow": planned("behind", 2, sizes, "auto", hardware=hardware(1e-6, 2e7)),
        "latency": planned("behind", 2, sizes, "auto", hardware=hardware(1e-2, 2e7)),
        "fast": planned("behind", 2, sizes, "auto", hardware=hardware(0, 1e12)),
    }
    assert {o.pieces for o in auto["slow"].overlaps} == {4}
    for name in ("latency", "fast"):
        assert {(o.pieces, o.reason) for o in auto[name].overlaps} == {(1, "it would save too little")}
        assert auto[name].estimate.hidden == 0
    slow, plain = auto["slow"], planned("behind", 2, sizes, None, hardware=hardware(1e-6, 2e7))
    assert 0 < slow.estimate.hidden <= slow.estimate.comm
    assert slow.estimate.step < plain.estimate.step
    assert "while computing" in slow.text()
    for o in slow.overlaps:
        link = hardware(1e-6, 2e7).axis(2)
        assert o.hides(hardware(1e-6, 2e7), 2) == pytest.approx(
            o.alone(hardware(1e-6, 2e7), link) - o.together(hardware(1e-6, 2e7), link)
        )


def test_four_pieces_hide_three_quarters_of_what_computing_outlasts() -> None:
    on = hardware(0, 1e8)
    plan = planned("behind", 2, (1, 16, 16), 4, hardware=on)
    sent = sum(plan.sends[phase]["switch"][0] for phase in ("forward", "backward"))
    assert plan.estimate.hidden == pytest.approx(0.75 * sent / 1e8, rel=0.01)
    chosen = dsp.choose(Behind().double(), of_grid(1, 16, 16), sizes=(1, 2), hardware=on, overlap=4).plans
    assert (chosen[1].estimate.hidden, chosen[2].estimate.hidden) == (0, plan.estimate.hidden)


def test_cores_that_are_shared_and_operations_by_pieces_leave_less_to_hide() -> None:
    """A transfer that keeps the rank busy hides nothing; pieces that cost more than they hide are not made."""
    link, sizes = Link("a link", 0.0, 2e7), (1, 16, 16)
    free, half, full = (Hardware(link, 1e12, 1e7, node=64, busy=busy) for busy in (0.0, 0.5, 1.0))
    hidden = [planned("behind", 2, sizes, 4, hardware=on).estimate.hidden for on in (free, half, full)]
    assert hidden == pytest.approx([hidden[0], hidden[0] / 2, 0])  # computing lasts longer than any transfer
    assert {o.pieces for o in planned("behind", 2, sizes, "auto", hardware=full).overlaps} == {1}
    [bare, slow] = [
        planned("behind", 2, sizes, 4, hardware=Hardware(link, 1e12, 1e7, node=64, launch=launch))
        for launch in (0.0, 1.0)
    ]
    operations = sum(p.operations + EXCHANGE * o.switches for o in bare.overlaps for p in o.phases)
    assert all(p.operations for o in bare.overlaps for p in o.phases)
    assert slow.estimate.compute == pytest.approx(bare.estimate.compute + 3 * operations)
    packed = planned("behind", 2, sizes, 4, wire="fp8", hardware=Hardware(link, 1e12, 1e7, node=64, launch=1.0))
    assert packed.estimate.compute > slow.estimate.compute
    again = planned("behind", 2, sizes, "auto", hardware=Hardware(link, 1e12, 1e7, node=64, launch=1.0))
    assert {o.reason for o in again.overlaps} == {"it would save too little"}


def by_the_links(mesh: DeviceMesh) -> str:
    torch.manual_seed(0)
    single = Behind().double()
    model = dsp.parallelize(copy.deepcopy(single), mesh, overlap="auto")
    assert_step_equal(single, model, mesh, of_grid(1, 8, 8))
    return repr(overlap_of(model))


def test_auto_measures_the_links_alike_on_all_ranks(ranks) -> None:
    first, second = ranks(by_the_links, 2)
    assert first == second
    assert "2 ranks, measured" in first


def test_a_configuration_says_so() -> None:
    assert load(["configs/demo.yaml"]).parallel.overlap is None
    assert load(["configs/demo.yaml", "parallel.overlap=3"]).parallel.overlap == 3
    assert load(["configs/demo.yaml", "parallel.overlap=auto"]).parallel.overlap == "auto"
    with pytest.raises(UserError, match=r"parallel\.overlap: expected None, 'auto', a number of pieces"):
        load(["configs/demo.yaml", "parallel.overlap=5"])


class Wide(nn.Module):
    stages = {"": "x=b t s c -> b t s c", "first": "b t [s c]", "second": "b [t] s [c]"}

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(128, 128), nn.Linear(128, 128)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def on_the_wire(mesh: DeviceMesh) -> tuple[float, float, int]:
    x = torch.randn(1, 64, 64, 128)
    plan = dsp.plan(Wide(), x, size=mesh.size(), gather_output=False, overlap=4)
    model = dsp.parallelize(Wide(), mesh, gather_output=False, overlap=4)
    with torch.no_grad():
        model(x)
        return *measured(mesh, lambda: model(x)), plan.bytes["forward"] * mesh.size()


def test_the_kernel_counts_the_bytes_of_one_switch(ranks) -> None:
    for kernel, counted, planned in ranks(on_the_wire, 2):
        assert counted == planned == 64 * 64 * 128 * 4 / 2
        assert kernel == pytest.approx(planned, rel=TOLERANCE)
