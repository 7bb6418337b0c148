"""Switches over several nodes: they bring what a direct one does, send what is planned, and go the quickest way."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

import dsp
from dsp.comm import messages, routes
from dsp.comm.exchange import SwitchPlan
from dsp.comm.layout import Axis, Cut
from dsp.comm.moves import Part, switch_all
from dsp.comm.node_routes import BETWEEN, WITHIN, Ways, ways_of
from dsp.comm.pending import ahead
from dsp.comm.routes import quickest, seconds, shared_by_nodes
from dsp.comm.wire import Wire
from tests.support.loopback import TOLERANCE, measured
from tests.support.parity import assert_parallel_equal, averaged
from tests.support.refusals import refused
from tests.support.runs import Heard, metrics, run_here
from tests.support.slow import keep_short, long, slow
from tests.support.toys import Folded, Grid
from zoo.training import UserError
from zoo.training.config import load
from zoo.training.dry_run import foreseen_route

LEGS = ["hierarchical", "rounds"]
NODES = [(4, 2), slow(6, 3), long(6, 2), long(8, 4)]  # ranks, and how many of them share a node
MIXED = Ways(4, 2, ((1000.0, "hierarchical"), (3000.0, "rounds"), (math.inf, "direct")))  # by bytes a rank


@pytest.fixture
def over(ranks: Any, whole_world: Any) -> Callable[..., list[Any]]:
    """`over(fn, n, *args)`: on so many ranks, of the pool that all tests share where it has as many."""
    return lambda fn, n, *args: (ranks if n <= 4 else whole_world)(fn, n, *args)


# ------------------------------------------------------------------------------------------------------------ switches

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
SHAPES = [(2, 5, 3, 7), (1, 12, 24, 8), (2, 0, 5, 3), (1, 3, 9, 130)]  # uneven, even, empty, ranks that have nothing


def made(axis: Axis, wholes: list[Tensor], src: Cut, dst: Cut) -> list[Tensor]:
    """Parts switched together, alone and in the background, and the gradient of each."""
    parts = [Part(axis.narrow(w, src).detach(), src, dst, w.shape) for w in wholes]
    real = parts[0]._replace(local=parts[0].local.clone().requires_grad_())
    strided = real.local.transpose(0, -1).contiguous().transpose(0, -1)
    found = switch_all([*parts, real._replace(local=strided)], axis)
    found += [switch_all([part], axis)[0] for part in (*parts, real)]
    behind, arrive = ahead(*real.opened(axis), axis.switching, *(real.pieces or ()), wire=axis.wire)
    arrive()
    for y in (found[len(parts)], found[-1], behind):
        found += torch.autograd.grad(y, real.local, torch.linspace(-1, 1, y.numel()).view_as(y))
    return [*found, behind]


def alike(mesh: DeviceMesh, node: int, way: str, wire: str) -> None:
    n, formats = mesh.size(), Wire.of(wire)
    direct, routed = Axis.of(mesh, formats), Axis.of(mesh, formats, dsp.Route(way, node))
    torch.manual_seed(0)
    for shape, (src, dst) in product(SHAPES, [(Cut(1), Cut(2)), (Cut(2), Cut(1)), (Cut(3), Cut(1))]):
        wholes = [torch.randn(shape), *(torch.randn(shape).relu().to(dtype) for dtype in DTYPES)]
        same(made(direct, wholes, src, dst), made(routed, wholes, src, dst))
    joined = [torch.randn(1, 9, 10, 8)]
    same(made(direct, joined, Cut(1, (5, 4)), Cut(2)), made(routed, joined, Cut(1, (5, 4)), Cut(2)))
    large = [torch.randn(1, 64, 64, 96 * n) for _ in range(2)]  # too large to share a collective: under way at once
    same(made(direct, large, Cut(1), Cut(2)), made(routed, large, Cut(1), Cut(2)))


def same(expect: list[Tensor], got: list[Tensor]) -> None:
    for one, other in zip(expect, got, strict=True):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()


@pytest.mark.parametrize(("n", "node"), NODES)
@pytest.mark.parametrize("way", LEGS)
@pytest.mark.parametrize("wire", ["same", slow("fp8"), long("bf16")])
def test_every_way_brings_the_same(over, wire: str, way: str, n: int, node: int) -> None:
    over(alike, n, node, way, wire)


def test_the_way_of_each_switch_is_that_of_its_size(ranks) -> None:
    ranks(by_size, 4)


def by_size(mesh: DeviceMesh) -> None:
    axis = replace(Axis.of(mesh, Wire()), ways=MIXED)
    for rows, kinds in ((2, {WITHIN: 1, BETWEEN: 1}), (8, {WITHIN: 1, BETWEEN: 2}), (16, {"switch": 1})):
        whole = torch.randn(rows, 4, 4, 16)  # rows KiB, a quarter of it on each rank
        part = Part(axis.narrow(whole, Cut(1)), Cut(1), Cut(2), whole.shape)
        halves = [part._replace(local=half, shape=(rows // 2, 4, 4, 16)) for half in part.local.split(rows // 2)]
        for parts in ([part], halves):  # which share an exchange
            with dsp.count_comm() as comm:
                came = switch_all(parts, axis)
            assert comm.forward.calls == kinds
            assert torch.equal(torch.cat(came), axis.narrow(whole, Cut(2)))


def peers(mesh: DeviceMesh, node: int, way: str, monkeypatch: Any = None) -> list[int]:
    """The ranks that one sends a message to in a switch, in order."""
    found, batch = [], messages.dist.batch_isend_irecv

    def noted(ops: list[Any]) -> Any:
        found.extend(op.group_peer for op in ops if op.op is messages.dist.isend)
        return batch(ops)

    axis = Axis.of(mesh, Wire(), dsp.Route(way, node))
    whole = torch.randn(1, 12, 12, 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(messages.dist, "batch_isend_irecv", noted)
        switch_all([Part(axis.narrow(whole, Cut(1)), Cut(1), Cut(2), whole.shape)], axis)
    return found


def test_a_rank_sends_to_its_node_and_to_its_place_on_others(over) -> None:
    """Rank 1 of nodes (0, 1, 2) and (3, 4, 5)."""
    assert over(peers, 6, 3, "hierarchical")[1] == [0, 2, 4]
    assert over(peers, 6, 3, "rounds")[1] == [2, 0, 4, 5, 3]


# -------------------------------------------------------------------------------------------------------- bytes, calls


def test_bytes_by_hand() -> None:
    """12 numbers of each of 6 ranks, nodes of 3; a pass goes within the node first, whichever node it is for."""
    plan = SwitchPlan((2, 6, 1), 0, 1, [2] * 6, [1] * 6, 4)
    ways = Ways(6, 3)
    assert plan.total == 72
    assert ways.legs("hierarchical", plan.to_each, 4) == {WITHIN: (8, 1), BETWEEN: (6, 1)}
    assert ways.legs("rounds", plan.to_each, 4) == {WITHIN: (4, 2), BETWEEN: (6, 3)}
    assert ways.legs("direct", plan.to_each, 4) == {WITHIN: (4, 0), BETWEEN: (6, 1)}


class Recomputed(Grid):
    """Each layer within an activation checkpoint, with the switch between its stages."""

    def forward(self, x: Tensor, cond: Tensor) -> Tensor:
        x = self.embed(x)
        for space, time in zip(self.space, self.time):
            x = checkpoint(lambda x, space=space, time=time: time(x + space(x).sin()), x, use_reentrant=False)
        return x


CASES: dict[str, tuple[type[nn.Module], Callable[[], dict[str, Tensor]]]] = {
    "grid": (Grid, lambda: Grid.inputs(1, 3, 10)),  # three frames: some ranks have none
    "folded": (Folded, lambda: Folded.inputs(2, 5, 6)),
    "recomputed": (Recomputed, lambda: Grid.inputs(2, 5, 7)),
    "large": (Grid, lambda: Grid.inputs(1, 16, 4800)),  # some switches run in the background
}


def stepped(mesh: DeviceMesh, case: str, wire: str, route: Any, **options: Any) -> tuple[list[Tensor], Any, dsp.Plan]:
    """Loss and gradients, what was sent, and the plan."""
    kind, inputs = CASES[case]
    torch.manual_seed(0)
    model, given = kind(), inputs()
    plan = dsp.plan(model, kwargs=given, size=mesh.size(), wire=wire, route=route, gather_output=False)
    dsp.parallelize(model, mesh, wire=wire, route=route, gather_output=False, **options)
    for _ in range(3 if options else 1):
        model.zero_grad()
        torch.manual_seed(1)
        with Heard() as heard, dsp.count_comm() as comm:
            loss = dsp.mean(model(**given).square())
            loss.backward()
        assert not heard.texts, heard.texts
    return [loss.detach(), *averaged(model, mesh).values()], comm, plan


def trains(mesh: DeviceMesh, case: str, wire: str, route: Any, **options: Any) -> None:
    expect, _, _ = stepped(mesh, case, wire, None, **options)
    got, comm, plan = stepped(mesh, case, wire, route, **options)
    for one, other in zip(expect, got, strict=True):
        assert torch.equal(one, other)
    if options:
        return
    for phase in ("forward", "backward", "recompute"):
        traffic, planned = getattr(comm, phase), plan.sends[phase]
        for kind in (WITHIN, BETWEEN, "switch"):
            assert traffic.calls[kind] == planned.get(kind, (0, 0))[1], (phase, kind)
        total = torch.tensor(sum(traffic.bytes[kind] for kind in planned if kind.startswith("switch")))
        torch.distributed.all_reduce(total, torch.distributed.ReduceOp.MAX, group=mesh.get_group())
        assert total >= sum(planned.get(kind, (0, 0))[0] for kind in (WITHIN, BETWEEN, "switch"))


@pytest.mark.parametrize(("n", "node"), [(4, 2), long(6, 3)])
@pytest.mark.parametrize("way", LEGS)
@pytest.mark.parametrize("case", keep_short(CASES, only=["folded", "recomputed"]))
def test_a_model_trains_bit_for_bit_and_as_planned(over, case: str, way: str, n: int, node: int) -> None:
    """A run that sends other bytes or in other calls than its plan says so, on every rank and at every place."""
    over(trains, n, case, "same", dsp.Route(way, node))


def test_formats_and_ways_together(ranks) -> None:
    for case, way in (("grid", "hierarchical"), ("recomputed", "rounds")):
        ranks(trains, 4, case, "fp8", dsp.Route(way, 2))


@pytest.mark.slow
def test_a_compiled_model_goes_the_same_way(ranks) -> None:
    ranks(compiled, 4)


def compiled(mesh: DeviceMesh) -> None:
    trains(mesh, "grid", "same", dsp.Route("hierarchical", 2), compile="aot_eager")
    torch.compiler.reset()


def in_pieces(mesh: DeviceMesh) -> tuple[int, int]:
    """Calls of direct and of hierarchical switches in one forward whose stages are cut in two."""
    torch.manual_seed(0)
    single, given, outputs = Grid(), Grid.inputs(2, 8, 12), []
    for route in (None, dsp.Route("hierarchical", 2)):
        model = dsp.parallelize(copy.deepcopy(single), mesh, route=route, overlap=2)
        with Heard() as heard, dsp.count_comm() as comm:
            outputs.append(model(**given))
        assert not heard.texts, heard.texts
    assert torch.equal(*outputs)
    return comm.forward.calls["switch"], comm.forward.calls[BETWEEN]


def test_pieces_that_travel_while_others_are_computed_go_directly(ranks) -> None:
    """Three switches, in two pieces each."""
    assert ranks(in_pieces, 4) == [(6, 0)] * 4


class Pair(nn.Module):
    stages = {"": "x=b t s c -> b t s c", "space": "b t [s c]", "time": "b [t] s [c]"}

    def __init__(self) -> None:
        super().__init__()
        self.space, self.time = nn.Identity(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.time(self.space(x))


def sent(mesh: DeviceMesh, way: str) -> tuple[float, float, float]:
    x, route = torch.randn(1, 64, 128, 128), dsp.Route(way, 2)
    plan = dsp.plan(Pair(), x, size=mesh.size(), gather_output=False, route=route)
    model = dsp.parallelize(Pair(), mesh, gather_output=False, route=route)
    with torch.no_grad():
        model(x)
        return *measured(mesh, lambda: model(x)), plan.bytes["forward"] * mesh.size()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the loopback counter of Linux")
@pytest.mark.parametrize(("way", "part"), [("hierarchical", 1.0), ("rounds", 0.75)])
def test_the_kernel_counts_what_is_planned(ranks, way: str, part: float) -> None:
    for kernel, counted, planned in ranks(sent, 4, way):
        assert counted == planned == 64 * 128 * 128 * 4 * part
        assert kernel == pytest.approx(planned, rel=TOLERANCE)


# ------------------------------------------------------------------------------------------------------------- choices


def links(message: float, far: float = 50e9, share: float = 1.0, node: int = 8) -> dsp.Hardware:
    """Nodes of fast links, between which a message takes so long, and goes at so many bytes a second."""
    network = dsp.Link("between", max(40e-6, 2 * message), far, message)
    return dsp.Hardware(dsp.Link("within", 10e-6, 400e9), 80e9, 4e14, network, node, share={"switch": share})


def test_small_switches_are_hierarchical_and_large_ones_direct() -> None:
    [(until, small), (end, large)] = quickest(links(message=5e-6), 64)
    assert (small, large, end) == ("hierarchical", "direct", math.inf)
    # 49 messages more, against a second latency and 7/8 of the bytes within nodes, not beside those between
    assert until == pytest.approx((49 * 5e-6 - 10e-6) * 400e9 / (7 / 8), rel=1e-6)
    assert quickest(links(message=0.0), 64) == ((math.inf, "direct"),)
    assert quickest(links(message=5e-6, node=1), 64) == ((math.inf, "direct"),)


def test_large_switches_that_contend_for_links_go_in_rounds() -> None:
    hardware = links(message=5e-6, share=0.5)
    steps = quickest(hardware, 16)
    assert [way for _, way in steps] == ["hierarchical", "direct", "rounds"]
    for nbytes in (1e3, steps[0][0] * 1.1, steps[1][0] * 1.1):
        took = {way: seconds(way, nbytes, 16, hardware) for way in ("direct", *LEGS)}
        assert Ways(16, 8, steps).way(int(16 * nbytes)) == min(took, key=took.__getitem__)


def test_a_plan_by_hardware_chooses_each_switch() -> None:
    slow_messages = links(message=1e-4, node=2)
    small, large = (
        dsp.plan(Pair(), torch.empty(1, 64, 64, c, device="meta"), size=4, route=slow_messages, gather_output=False)
        for c in (8, 2**17)
    )
    assert small.sends["forward"] == {WITHIN: (64 * 64 * 4, 1), BETWEEN: (64 * 64 * 4, 1)}
    assert small.calls["forward"] == 2
    assert large.sends["forward"] == {"switch": (64 * 64 * 2**17 * 3 // 4, 1)}
    assert large.links["forward"] == {WITHIN: (2**27, 0), BETWEEN: (2**28, 1)}
    direct = dsp.plan(Pair(), torch.empty(1, 64, 64, 8, device="meta"), size=4, gather_output=False)
    assert direct.sends["forward"] == {"switch": (64 * 64 * 8 * 3 // 4, 1)}
    assert direct.links == {}
    # an estimate by the same links
    assert small.takes(slow_messages).comm < direct.takes(slow_messages).comm
    assert "switches over 2 nodes of 2: hierarchical up to" in str(small)
    assert "within nodes 16.0 KiB in 1 call, between 16.0 KiB in 1 call" in str(small)
    assert "nodes" not in str(direct)
    named = dsp.plan(Pair(), torch.empty(1, 64, 64, 8), size=4, route=dsp.Route(node=2), gather_output=False)
    assert named.sends == direct.sends
    assert "of 2: direct; a rank sends in a step: within nodes 8.0 KiB in 0 calls, between 16.0 KiB in 1" in str(named)


def test_choose_prices_the_route() -> None:
    given = {"kwargs": {"x": torch.empty(1, 64, 64, 8, device="meta")}, "sizes": (2, 4)}
    by = {
        route: dsp.choose(Pair(), hardware=links(message=1e-3, node=2), route=route, **given).plans
        for route in (None, "auto")
    }
    assert by["auto"][2].sends == by[None][2].sends  # within a node
    assert by["auto"][4].estimate.comm < by[None][4].estimate.comm


def test_measured_links_choose(ranks) -> None:
    """The same on every rank, though each measured for itself."""
    found = ranks(chosen, 4)
    assert len({repr(ways) for ways, *_ in found}) == 1
    ways, hardware, group = found[0]
    assert (ways.size, ways.node) == (4, 2)
    assert ways.steps == quickest(hardware, 4)
    assert ways_of(group) == ("name", ways if ways.on("name") != "name" else None)


def chosen(mesh: DeviceMesh) -> tuple[Ways, dsp.Hardware, str]:
    route = dsp.Route("auto", 2).at(mesh)
    assert route.hardware is not None
    assert route.at(mesh) is route or route.at(mesh) == route  # nothing is measured again
    ways = route.over(4)
    trains(mesh, "grid", "same", route)
    return ways, route.hardware, ways.on("name")


# --------------------------------------------------------------------------------------------------------------- nodes


def test_nodes_by_the_environment(monkeypatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert shared_by_nodes([0, 1, 2, 3]) == []
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert shared_by_nodes(list(range(8))) == [4, 4]
    assert shared_by_nodes([0, 2, 4, 6]) == [2, 2]
    assert shared_by_nodes([4, 5]) == [2]
    assert shared_by_nodes([2, 3, 4, 5, 6, 7]) == [2, 4]


@pytest.mark.parametrize("text", ["x", "", "0", "-2", "1.5"])
def test_a_node_of_no_ranks_is_refused_with_what_to_set(monkeypatch, text: str) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", text)
    said = rf"LOCAL_WORLD_SIZE='{text}': expected a number from 1 .* set it, or say so by dsp.Route\(..., node=8\)"
    refused(said, shared_by_nodes, [0, 1])
    refused(said, dsp.Route("hierarchical").over, 4)
    assert dsp.Route("hierarchical", 2).over(4).nodes == 2  # nobody reads it


def one_mistaken(mesh: DeviceMesh) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "x" if mesh.get_rank() == 1 else "2")
        refused("LOCAL_WORLD_SIZE='x'", dsp.Route("auto").at, mesh)


def test_a_node_that_one_rank_mistakes_is_refused_by_all(ranks) -> None:
    """Nobody waits for the rank that refuses."""
    ranks(one_mistaken, 2)


def nodes(mesh: DeviceMesh, local: str) -> tuple[Ways, list[str]]:
    with pytest.MonkeyPatch.context() as patch, Heard() as heard:
        patch.setenv("LOCAL_WORLD_SIZE", local)
        ways = dsp.Route("hierarchical").at(mesh).over(mesh.size())
        model = dsp.parallelize(Grid(), mesh, route="hierarchical")
        model(**Grid.inputs(1, 4, 8))
    return ways, heard.texts


def at_odds(mesh: DeviceMesh) -> list[str]:
    """Ranks that are told different numbers of neighbours: none measures while the others do not."""
    with pytest.MonkeyPatch.context() as patch, Heard() as heard:
        patch.setenv("LOCAL_WORLD_SIZE", "1" if mesh.get_rank() == 2 else "2")
        assert dsp.Route("auto").at(mesh) == dsp.Route()
    return heard.texts


def askew(mesh: DeviceMesh) -> list[str]:
    """An axis that begins in the middle of a node: two ranks, one and one."""
    with pytest.MonkeyPatch.context() as patch, Heard() as heard:
        patch.setattr(routes, "shared_by_nodes", lambda ranks: [2, 1, 1])
        assert dsp.Route("hierarchical").at(mesh) == dsp.Route()
    return heard.texts


def test_unequal_nodes_switch_directly_and_say_so(ranks) -> None:
    found = ranks(nodes, 4, "3")
    assert all(ways == Ways(4) for ways, _ in found)
    said = "switches are direct all the same, for 4 ranks are not a whole number of nodes of 3 and 1"
    assert found[0][1] == [f"route='hierarchical': {said}"] * 2  # asked twice
    assert not found[1][1]
    assert [ways for ways, _ in ranks(nodes, 4, "2")] == [Ways(4, 2, ((math.inf, "hierarchical"),))] * 4
    assert [ways for ways, _ in ranks(nodes, 4, "4")] == [Ways(4)] * 4  # within a node
    assert ranks(at_odds, 3)[0] == [
        "route='auto': switches are direct all the same, for 3 ranks are not a whole number of nodes of 2 and 1"
    ]
    assert ranks(askew, 4)[0] == ["route='hierarchical': " + said.replace("3 and 1", "2 and 1")]
    odd = dsp.plan(Grid(), kwargs=Grid.inputs(1, 4, 8), size=4, route=dsp.Route("hierarchical", 3))
    assert "4 ranks are not a whole number of nodes of 3" in str(odd)


def unsaid(mesh: DeviceMesh) -> tuple[list[str], dsp.Plan]:
    with pytest.MonkeyPatch.context() as patch, Heard() as heard:
        patch.delenv("LOCAL_WORLD_SIZE", raising=False)
        assert dsp.Route("auto").at(mesh) == dsp.Route()
    alone = dsp.parallelize(Pair(), mesh, route=dsp.Route("rounds", node=4), gather_output=False)
    with dsp.count_comm() as comm:
        alone(torch.randn(1, 8, 8, 8))
    plan = dsp.plan(Pair(), torch.randn(1, 8, 8, 8), size=4, route=dsp.Route("rounds", node=4), gather_output=False)
    assert comm.forward.calls == {WITHIN: 3}
    assert plan.sends["forward"] == {WITHIN: (comm.forward.bytes[WITHIN], 3)}
    return heard.texts, plan


def test_nodes_that_nobody_knows_and_rounds_within_one(ranks) -> None:
    [(texts, plan), *_] = ranks(unsaid, 4)
    assert ["LOCAL_WORLD_SIZE does not say" in text for text in texts] == [True]
    assert "switches over 1 node of 4: rounds" in str(plan)


def test_an_axis_within_a_node_switches_directly(ranks) -> None:
    """Two ranks of dp and two of sp, two to a node."""
    ranks(within, "2x2")


def within(mesh: DeviceMesh) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        assert dsp.Route("hierarchical").at(mesh["sp"]).over(2) == Ways(2)
        assert dsp.Route("hierarchical").at(mesh["dp"]).over(2).nodes == 2  # neighbours of dp are on two nodes


def two_axes(mesh: DeviceMesh) -> None:
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("inter", "intra"))
    inputs = Grid.inputs(1, 5, 7)
    for route in ("hierarchical", "direct"):
        model = dsp.parallelize(Grid(), both["inter", "intra"], route=route, gather_output=False)
        with dsp.count_comm() as comm:
            y = model(**inputs)
        assert y.device_mesh.ndim == 1
        assert y.device_mesh.size() == 4
        assert (comm.forward.calls[BETWEEN] > 0) == (route == "hierarchical")
        again = model(inputs["x"], inputs["cond"])
        assert torch.equal(dsp.gather(y), dsp.gather(again))
    torch.manual_seed(0)
    single = Grid().double()
    assert_parallel_equal(single, y.device_mesh, {k: v.double() for k, v in inputs.items()})
    refused("mesh must be 1-D, but has axes .'inter', 'intra'.", dsp.parallelize, Grid(), both["inter", "intra"])


def test_two_axes_are_one(whole_world) -> None:
    whole_world(two_axes, 4)


# --------------------------------------------------------------------------------------------------------------- wrong


def test_wrong_routes_are_errors() -> None:
    refused("route: expected one of direct, hierarchical, rounds, auto, or a dsp.Route, got 'ring'", dsp.Route, "ring")
    refused("node, the ranks of the axis on one node, must be at least 1, got 0", dsp.Route, "rounds", node=0)
    given = {"kwargs": Grid.inputs(1, 4, 4), "size": 4}
    refused(r"give route=dsp.Route\('hierarchical', node=8\)", dsp.plan, Grid(), route="hierarchical", **given)
    refused("route='auto' chooses by the links", dsp.plan, Grid(), route=dsp.Route("auto", node=2), **given)


def unlike(mesh: DeviceMesh) -> None:
    way = ("rounds", "hierarchical")[mesh.get_local_rank() % 2]
    said = "route is Ways.*rounds.* on ranks 0, 2, but Ways.*hierarchical.* on ranks 1, 3"
    refused(said, dsp.parallelize, Grid(), mesh, error=RuntimeError, route=dsp.Route(way, 2))


def test_ranks_with_other_routes_are_refused(ranks) -> None:
    ranks(unlike, 4)


def trained(mesh: DeviceMesh, arguments: list[str], local: str) -> list[list[int]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", local)
        return run_here(mesh, arguments)


@pytest.mark.slow
def test_a_run_of_train_py_goes_by_the_route(run, whole_world) -> None:
    """Two nodes of two ranks: the same losses to the last digit, in other bytes, and as the plan says."""
    few = ("train.steps=2", "eval.every=0", "sample.every=0", "checkpoint.every=0")
    sent = [
        whole_world(trained, 4, run.arguments(f"name={route}", f"parallel.route={route}", *few), "2")
        for route in ("direct", "hierarchical")
    ]
    assert sent[0] != sent[1]
    assert metrics(run.directory / "runs/direct", "loss") == metrics(run.directory / "runs/hierarchical", "loss")


def test_a_dry_run_shows_the_route(run, capsys) -> None:
    run("dry_run=true", "parallel.sp=4", "parallel.route=rounds", "hardware.node=2")
    assert "switches over 2 nodes of 2: rounds; a rank sends in a step: within nodes" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"name the hardware, as in hardware\.device=h100"):
        foreseen_route(load(["configs/demo.yaml", "parallel.route=auto"]), None)


def test_a_configuration_names_the_route() -> None:
    assert load(["configs/demo.yaml"]).parallel.route == "direct"
    assert load(["configs/demo.yaml", "parallel.route=auto"]).parallel.route == "auto"
    with pytest.raises(UserError, match=r"parallel\.route: expected one of direct, .*, got 'ring'"):
        load(["configs/demo.yaml", "parallel.route=ring"])
