"""Seconds from bytes, calls and FLOPs; how many ranks are worth it. One process, but for the measured link."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.flop_counter import FlopCounterMode

import dsp
import zoo
from dsp.comm import hardware
from dsp.comm.hardware import Exchange, accelerator, all_reduced, fully_sharded, measure
from dsp.comm.wire import AS_IT_IS, Wire, format_for, permitted
from dsp.core.meter import Meter
from dsp.report.plan import WORTH, shortest
from tests.support import toys
from tests.support.parity import wrap_checkpoints

FLOPS = 1e12


def machine(memory: float = 1e12, **changes: object) -> dsp.Hardware:
    link = dsp.Link("wire", alpha=1e-3, bandwidth=1e9)
    return dsp.Hardware(**{"link": link, "memory": memory, "flops": FLOPS, **changes})  # type: ignore[arg-type]


def test_links() -> None:
    wire = dsp.Link("wire", 1e-3, 1e9)
    assert wire.seconds(2e9, 3) == pytest.approx(2.003)
    assert dsp.Hardware("nvlink4", 80e9, 4e14).link is dsp.LINKS["nvlink4"]
    with pytest.raises(ValueError, match=r"no link 'nvlink9' in the table; it has nvlink3"):
        dsp.Hardware("nvlink9", 80e9, 4e14)
    with pytest.raises(ValueError, match="bandwidth in bytes a second"):
        dsp.Link("wire", 1e-3, 0)
    with pytest.raises(ValueError, match="must be above 0"):
        dsp.Hardware("nvlink4", 0, 4e14)
    within = sorted(dsp.LINKS, key=lambda name: dsp.LINKS[name].bandwidth)
    assert within[0] == "gloo-loopback"
    assert within[-3:] == ["nvlink3", "nvlink4", "nvlink5"]


def test_an_axis_longer_than_a_node_takes_the_network() -> None:
    near, far = dsp.Link("near", 1e-5, 100e9), dsp.Link("far", 5e-5, 10e9)
    hardware = dsp.Hardware(near, 1e9, 1e12, network=far, node=4)
    assert hardware.axis(4) == near
    # of 15 parts that leave a rank 12 leave the node
    assert hardware.axis(16) == dsp.Link("far", 5e-5, 10e9 * 15 / 12)
    assert dsp.Hardware(near, 1e9, 1e12, network=far, node=1).axis(2) == far
    slow = dsp.Hardware(dsp.Link("near", 0, 1e9), 1e9, 1e12, network=far, node=4)
    assert slow.axis(5).bandwidth == 1e9 * 4 / 3  # three of four parts stay on the slow link of the node
    with pytest.raises(ValueError, match=r"9 ranks are more than one node of 8.*network="):
        dsp.Hardware(near, 1e9, 1e12).axis(9)


class Products(nn.Module):
    """Stages of one matrix product each, and one in glue."""

    stages = {"": "x=b t s c -> b t s c", "space": "b t [s c]", "time": "b [t] s [c]"}

    def __init__(self) -> None:
        super().__init__()
        self.space, self.time, self.between = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.time(self.between(self.space(x)))


def test_flops_are_those_of_the_flop_counter() -> None:
    model, x = Products(), torch.randn(1, 7, 5, 8, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        model(x).sum().backward()
    plan = dsp.plan(model, (x,), size=4, gather_output=False)
    assert plan.flops_alone == counter.get_total_flops() == 3 * 3 * 2 * 7 * 5 * 8 * 8
    # a rank has 2 of 7 frames, or 2 of 5 positions
    layouts = [row.layout for row in plan.stages]
    assert layouts == ["t", "s"]
    each = plan.flops_alone / 3
    assert plan.flops in (int(each * (2 / 7 + 2 / 7 + 2 / 5)), int(each * (2 / 7 + 2 / 5 + 2 / 5)))
    with torch.no_grad():
        assert dsp.plan(model, (x,), size=4, gather_output=False).flops_alone == plan.flops_alone // 3
    model = zoo.create("transformer2d", "test")
    kwargs = model.example_inputs()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(**kwargs)
    with torch.no_grad():
        plan = dsp.plan(model, kwargs=kwargs, size=2, gather_output=False)
    attention = 4 * 48 * (5 * 16**2 + 16 * 5**2) * 2  # which the counter does not know on a CPU
    assert plan.flops_alone == counter.get_total_flops() + attention


def test_seconds_of_a_plan() -> None:
    model, x = Products(), torch.randn(1, 8, 8, 8)
    plan = dsp.plan(model, (x,), size=4, hardware=machine(), gather_output=False)
    assert plan.calls == {"forward": 1, "backward": 1, "recompute": 0}
    sent = 8**3 * 4 * 3 // 16
    assert plan.bytes == {"forward": sent, "backward": sent, "recompute": 0}
    assert plan.estimate.comm == pytest.approx(2e-3 + 2 * sent / 1e9)
    assert plan.estimate.alone == plan.flops_alone / FLOPS
    assert plan.estimate.compute == pytest.approx(plan.estimate.alone / 4)
    text = plan.text()
    assert "takes" in text.splitlines()[0]
    assert "2 calls over wire 2 ms" in text
    assert "4 ranks are no faster than one: the calls alone take longer than is saved" in text
    assert "does not fit" not in text
    assert "does not fit in 1.0 KiB" in str(dsp.plan(model, (x,), size=4, hardware=machine(1024), gather_output=False))
    bare = dsp.plan(model, (x,), size=4, gather_output=False)
    assert "takes" not in str(bare)
    assert (bare.stages, bare.bytes) == (plan.stages, plan.bytes)
    with pytest.raises(ValueError, match="hardware="):
        _ = bare.estimate


def sizing(height: int, memory: float, frames: int = 16, **options: object) -> dsp.Sizing:
    with torch.device("meta"):
        model = zoo.create("transformer2d", "720m", depth=2)
        kwargs = model.example_inputs(frames=frames, height=height, width=height)
    hardware = dsp.Hardware("nvlink4", memory, 4e14)
    return dsp.choose(model, kwargs=kwargs, hardware=hardware, dtype=torch.bfloat16, **options)  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_smallest_that_fits() -> None:
    peaks = {n: plan.peak for n, plan in sizing(64, 80e9).plans.items()}
    assert sorted(peaks.values(), reverse=True) == list(peaks.values())
    found = sizing(64, peaks[4])
    assert found.smallest == 4
    assert [found.fits(n) for n in (1, 2, 4, 8)] == [False, False, True, True]
    assert "smallest sp that fits" in str(found)
    none = sizing(64, peaks[8] // 2)
    assert (none.smallest, none.fastest) == (None, None)
    assert "nothing fits in" in str(none)
    assert "sp=8 needs the least" in str(none)
    # weights, gradients and optimizer sharded over these ranks too
    weights = sizing(64, 80e9).plans[1].resident
    sharded = sizing(64, 80e9, resident=lambda sp: 8 * weights / sp)
    assert [p.resident for p in sharded.plans.values()] == [8 * weights // n for n in (1, 2, 4, 8)]
    with pytest.raises(ValueError, match="sizes, the numbers of ranks, must be at least 1"):
        sizing(64, 80e9, sizes=(0, 2))


def test_where_the_cheapest_does_not_fit_another_may() -> None:
    model, kwargs = toys.make("Pair"), toys.inputs("Pair", 1, 8, 16)
    free = dsp.plan(model, kwargs=kwargs, size=2, gather_output=False)
    tight = dsp.choose(model, kwargs=kwargs, hardware=machine(free.peak - 1), sizes=(2,))
    assert tight.smallest == 2
    assert tight.plans[2].peak < free.peak
    assert sum(tight.plans[2].bytes.values()) >= sum(free.bytes.values())


@pytest.mark.parametrize("name", ["Grid", "Cube"])
def test_recomputed_stages_keep_their_inputs(name: str) -> None:
    """Told so, or found in the model's own forward: the same peak and FLOPs."""
    kwargs = toys.inputs(name, 1, 8, 8)
    bare = dsp.choose(toys.make(name), kwargs=kwargs, hardware=machine(), sizes=(2,)).plans[2]
    told = dsp.choose(toys.make(name), kwargs=kwargs, hardware=machine(), sizes=(2,), recompute=True).plans[2]
    model = toys.make(name)
    wrap_checkpoints(model)
    stages = {k.replace(".*", ".*.inner"): v for k, v in type(model).stages.items()}
    found = dsp.plan(model, kwargs=kwargs, size=2, stages=stages, gather_output=False)
    assert (told.peak, told.flops) == (found.peak, found.flops)
    assert told.peak < bare.peak
    assert told.flops > bare.flops
    with torch.no_grad():
        free = dsp.choose(toys.make(name), kwargs=kwargs, hardware=machine(), sizes=(2,), recompute=True).plans[2]
    assert free.peak < told.peak


def test_a_recomputation_holds_all_that_its_stage_saves() -> None:
    layers = [nn.Linear(8, 64), *(nn.GELU() for _ in range(6)), nn.Linear(64, 8)]
    model, stages = nn.Sequential(nn.Sequential(*layers)), {"": "input=b t s c", "0": "b t [s] [c]"}
    x = torch.empty(1, 8, 32, 8, device="meta", requires_grad=True)
    record = dsp.plan(model, (x,), size=2, stages=stages, gather_output=False).record
    repeated = dsp.choose(model, (x,), stages=stages, hardware=machine(), sizes=(2,), recompute=True).plans[2]
    assert record is not None
    assert repeated.peak >= record.nodes[0].cost.saved // 2 >= 6 * 8 * 32 * 64 * 4 // 2


def measured(mesh: DeviceMesh) -> dsp.Link:
    return measure(mesh, nbytes=1 << 18, rounds=3)


def test_a_measured_link(ranks) -> None:
    links = ranks(measured, 3)
    assert len(set(links)) == 1
    assert 0 < links[0].alpha < 10
    assert links[0].bandwidth > 1e3
    with pytest.raises(BaseException, match="two ranks or more"):
        ranks(measured, 1)


def machine_at_hand(mesh: DeviceMesh, node: int) -> dsp.Hardware:
    return hardware.measured(mesh, node=node, memory=1e9)


def test_measured_hardware(ranks) -> None:
    """Three ranks of one machine have one link; four, two to a machine, have another between them."""
    for n, node, between in ((3, 3, False), (4, 2, True)):
        found = ranks(machine_at_hand, n, node)
        assert len(set(found)) == 1
        assert (found[0].node, found[0].network is not None, found[0].memory) == (node, between, 1e9)
        assert found[0].flops > 1e6
        assert found[0].stream > 1e6
        assert found[0].packing.keys() == hardware.PACKING.keys()
        assert found[0].packs("fp8", 1e6) > found[0].packs("fp8", 1e3) > 0
        assert 1e-7 < found[0].launch < 0.1
        assert 0 <= found[0].busy <= 1
        assert found[0].seconds(Exchange("switch", 1e6, 2, n)) > 0


# ------------------------------------------------------------------------------------------------------- fewer bits


@pytest.mark.parametrize("name", hardware.PACKING)
def test_packing_touches_and_launches_what_the_table_says(name: str) -> None:
    form, count = format_for(name, True, 4), 1 << 15
    assert form is not None
    x = torch.ones(count)
    with Meter() as meter:
        form.unpack(form.pack(x, [count], 0), [count], x)
    touched, operations = hardware.PACKING[name]
    assert meter.touched[0] / count == pytest.approx(touched, rel=0.02)
    assert meter.operations == operations


def test_seconds_of_packing() -> None:
    touched, operations = hardware.PACKING["fp8"]
    bare = machine(stream=1e9, launch=1e-5)
    assert bare.packs("fp8", 1000, 3) == pytest.approx(1000 * touched / 1e9 + 3 * operations * 1e-5)
    known = machine(packing={"fp8": dsp.Link("measured", 1e-3, 4e6)})
    assert known.packs("fp8", 1000, 3) == pytest.approx(3e-3 + 1e-3)
    assert known.packs("bf16", 1000, 3) == 0
    for wrong in ({"launch": -1}, {"busy": 1.5}):
        with pytest.raises(ValueError, match="busy a share from 0 to 1"):
            machine(**wrong)


def test_a_plan_packs_what_its_switches_send() -> None:
    """A rank packs 8**3 / 4 numbers in forward, and as many in backward by chance."""
    x = torch.randn(1, 8, 8, 8)
    dear = {"fp8": dsp.Link("", 1.0, 4.0), "fp8-stochastic": dsp.Link("", 100.0, 0.4)}
    by = {
        wire: dsp.plan(Products(), (x,), size=4, wire=wire, hardware=machine(packing=dear), gather_output=False)
        for wire in ("same", "fp8")
    }
    assert by["fp8"].packs == {"fp8": (128, 1), "fp8-stochastic": (128, 1)}
    assert by["fp8"].estimate.compute - by["same"].estimate.compute == pytest.approx(1 + 128 + 100 + 1280)
    assert dsp.plan(Products(), (x,), size=1, wire="fp8", gather_output=False).packs == {}


def chosen(bandwidth: float, wire: object = "auto", flops: float = 1e9, **changes: object) -> dsp.Sizing:
    link = dsp.Link("wire", 0.0, bandwidth)
    on = dsp.Hardware(link, 1e12, flops, stream=1e9, node=64, **changes)  # type: ignore[arg-type]
    return dsp.choose(Products(), torch.empty(1, 64, 64, 8), hardware=on, sizes=(1, 2), wire=wire)  # type: ignore[arg-type]


def test_fewer_bits_are_chosen_where_they_are_permitted_and_save_time() -> None:
    formats = {rate: chosen(rate).plans[2].wire.forward for rate in (1e5, 1e7, 1e9)}
    assert formats == {1e5: "fp8", 1e7: "bf16", 1e9: "same"}
    assert chosen(1e5, "same").plans[2].wire == AS_IT_IS
    dear = {name: dsp.Link("", 10.0, 1e9) for name in ("fp8", "fp8-stochastic")}
    assert chosen(1e5, packing=dear).plans[2].wire.forward == "bf16"
    assert chosen(1e5).plans[1].wire == AS_IT_IS
    for rate in formats:
        steps = {wire: chosen(rate, wire).plans[2].estimate.step for wire in ("same", "bf16", "fp8")}
        assert chosen(rate).plans[2].estimate.step <= min(steps.values()) / (1 - WORTH)
    rows = str(chosen(1e5)).splitlines()
    assert rows[0].endswith("switches")
    assert rows[2].endswith(" -")
    assert rows[3].endswith(" fp8")
    assert "fastest: sp=2, switches fp8, " in str(chosen(3e6, flops=1e8))
    assert "switches" not in str(chosen(1e9))


def test_fewer_bits_have_to_save_a_part_of_the_step() -> None:
    same, bf16, fp8 = permitted("auto")
    assert (same, bf16.forward, fp8.forward) == (AS_IT_IS, "bf16", "fp8")
    assert permitted("int8") == (Wire.of("int8"),)
    assert shortest([(same, 1.0), (same, 0.999)]) == 1
    assert shortest([(same, 1.0), (bf16, 0.98), (fp8, 0.96)]) == 2
    assert shortest([(same, 1.0), (bf16, 0.96), (fp8, 0.95)]) == 1
    assert shortest([(same, 1.0), (bf16, 0.98), (fp8, 0.98)]) == 0


def test_a_format_is_left_to_plans_alone() -> None:
    with pytest.raises(ValueError, match="wire='auto' weighs the time that fewer bytes save"):
        dsp.plan(Products(), torch.empty(1, 8, 8, 8), size=2, wire="auto")
    with pytest.raises(ValueError, match="wire='auto' is not accepted here: the best format depends on the links"):
        Wire.of("auto")


# ---------------------------------------------------------------------------------------- collectives by kind, weights


def test_collectives_of_the_weights() -> None:
    """Bytes by hand: of W weights in bf16 and fp32 gradients, on 2 copies that 4 ranks share each."""
    count = 1000
    gather, scatter, replicas = fully_sharded(2 * count, 4 * count, 4, replicate=2, calls=3, batches=5)
    assert gather == Exchange("all_gather_into_tensor", 2 * 5 * 2000 * 3 / 4, 2 * 5 * 3, 4)
    assert scatter == Exchange("reduce_scatter_tensor", 4000 * 3 / 4, 3, 4)
    assert replicas == Exchange("all_reduce", 2 * 1000 * 1 / 2, 3, 2, stride=4)
    assert fully_sharded(2 * count, 4 * count, 1) == all_reduced(4 * count, 1) == []
    assert all_reduced(4 * count, 4) == [Exchange("all_reduce", 2 * 4000 * 3 / 4, 1, 4)]


def test_a_link_by_kind_of_collective() -> None:
    near, far = dsp.Link("near", 1e-5, 100e9), dsp.Link("far", 5e-5, 10e9)
    hardware = dsp.Hardware(near, 1e9, 1e12, network=far, node=4, share={"ring": 0.5})
    assert hardware.axis(4, "gather") == near
    assert hardware.axis(4, "ring").bandwidth == 50e9
    assert hardware.axis(16, "reduce_scatter") == hardware.axis(16)  # ours is an all-to-all and a sum
    # four rings cross from node to node, by a port each; within a node a rank has its neighbour in three of them
    assert hardware.axis(16, "all_reduce").bandwidth == 40e9
    slow = dsp.Hardware(near, 1e9, 1e12, network=dsp.Link("far", 5e-5, 90e9), node=4)
    assert slow.axis(16, "gather").bandwidth == 100e9 * 4 / 3
    assert hardware.axis(16, "ring").bandwidth == 5e9  # a hop waits for the rank at the end of its node
    # ranks 2 apart: two to a node
    assert hardware.axis(2, "all_reduce", stride=2) == near
    assert hardware.axis(8, "all_reduce", stride=2).bandwidth == 20e9
    assert hardware.axis(8, "all_reduce", stride=4).bandwidth == 10e9
    assert hardware.seconds(Exchange("all_reduce", 1e9, 3, 8, stride=4)) == pytest.approx(3 * 5e-5 + 0.1)


def test_seconds_with_memory_and_weights() -> None:
    model, x = Products(), torch.randn(1, 8, 8, 8)
    plan = dsp.plan(model, (x,), size=4, gather_output=False)
    assert plan.sends == {"forward": {"switch": (384, 1)}, "backward": {"switch": (384, 1)}, "recompute": {}}
    # a product with a bias reads its input, weights and bias and writes its output, each of three three times a step
    one = 4 * (2 * 8**3 + 8 * 8 + 8)
    assert plan.touched_alone == 3 * 3 * one
    assert plan.touched == 3 * 3 * one // 4 + 2 * 2 * 384  # and what is sent is copied once
    memory = machine(stream=1e9)
    bare, full = plan.takes(machine()), plan.takes(memory)
    assert full.compute == pytest.approx(bare.compute + plan.touched / 1e9)
    assert (full.comm, full.weights) == (bare.comm, 0)
    averaged = all_reduced(1e6, 4)
    assert plan.takes(memory, averaged, overlap=False).weights == pytest.approx(1e-3 + 1.5e6 / 1e9)
    assert plan.takes(memory, averaged).weights == pytest.approx(1e-3 + 1.5e6 / 1e9 - full.compute)
    assert plan.takes(machine(stream=1e3), averaged).weights == 0  # computing lasts longer
    twice = plan.takes(memory, averaged, batches=2, overlap=False)
    assert (twice.compute, twice.comm, twice.alone) == (2 * full.compute, 2 * full.comm, 2 * full.alone)
    assert twice.step == twice.compute + twice.comm + twice.weights


def test_recomputed_stages_cost_a_forward_more() -> None:
    with torch.device("meta"):
        model = zoo.create("transformer2d", "test")
        kwargs = model.example_inputs()
    made = {
        again: dsp.embedded.plan(model, kwargs=kwargs, size=2, method="ulysses", recompute=again, gather_output=False)
        for again in (False, True)
    }
    with torch.no_grad():
        forward = dsp.embedded.plan(model, kwargs=kwargs, size=2, method="ulysses", gather_output=False)
    assert made[False].flops == pytest.approx(3 * forward.flops, rel=1e-3)
    assert 3.9 * forward.flops < made[True].flops < 4 * forward.flops  # what is in glue is not recomputed
    (before,) = made[False].switches  # the first block, which no recomputation sends again
    nbytes, calls = made[False].sends["forward"]["switch"]
    assert made[True].sends["recompute"] == {"switch": (nbytes - before.bytes, calls - 1)}


def test_whole_activations_are_touched_on_every_rank() -> None:
    """Megatron-LM's norms and additions run on all ranks alike; Megatron-SP's do not."""
    with torch.device("meta"):
        model = zoo.create("transformer2d", "test")
        kwargs = model.example_inputs()
    lm, sp = (
        dsp.embedded.plan(model, kwargs=kwargs, size=2, method=f"megatron_{kind}", gather_output=False)
        for kind in ("lm", "sp")
    )
    assert lm.touched_alone == sp.touched_alone
    assert sp.touched < lm.touched < lm.touched_alone + 2 * sum(lm.bytes.values())
    assert set(lm.sends["forward"]) == {"all_reduce"}
    assert {"gather", "reduce_scatter"} <= set(sp.sends["backward"])
    hidden, depth = model.config.hidden, model.config.depth
    assert lm.cut_weights == sp.cut_weights == 2 * depth * (12 * hidden**2 + 3 * hidden + 4 * hidden)


def test_accelerators() -> None:
    h100 = accelerator("h100", products=0.4)
    assert (h100.flops, h100.memory, h100.link) == (0.4 * 989e12, 80e9, dsp.LINKS["nvlink4"])
    assert accelerator("h100", dtype=torch.float32, products=0.4).flops == 0.4 * 67e12
    other = accelerator("h100", link="pcie5", network=None, node=4)
    assert (other.link, other.network, other.node) == (dsp.LINKS["pcie5"], dsp.LINKS["infiniband-ndr"], 4)
    with pytest.raises(ValueError, match="no accelerator 'h1000' in the table; it has a100, h100"):
        accelerator("h1000")
    with pytest.raises(
        ValueError, match=r"fractions, in \(0, 1\], of the data sheet's peak and memory bandwidth, got 1.5"
    ):
        accelerator("h100", products=1.5)
    with pytest.raises(ValueError, match="no link 'nvlink9' in the table"):
        accelerator("h100", link="nvlink9")
