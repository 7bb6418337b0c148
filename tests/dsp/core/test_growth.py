"""Records that grow: forwards that read their data or take another branch, exact and planned before the next call."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import dsp
from tests.support.parity import assert_close_named, assert_parallel_equal, assert_step_equal, averaged
from tests.support.records import left_plan, planned, planned_bytes, records
from tests.support.slow import slow
from tests.support.toys import Along, C, Does, SpaceTime


def reading(m: Any, x: Tensor) -> Tensor:
    """Attention of x by three projections that look alike, after a look at the numbers of one more."""
    if F.linear(x, m.weights[0]).amax().item() > 1e9:
        x = x / 2
    q, k, v = (F.linear(x, w) for w in m.weights)
    return x + F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]


def weights(count: int = 3) -> nn.ParameterList:
    return nn.ParameterList(torch.randn(C, C, dtype=torch.float64) / 2 for _ in range(count))


@pytest.mark.parametrize("mesh", [2, 3])
def test_a_forward_that_reads_its_data_is_sharded_at_once_and_planned_in_the_second_call(mesh: DeviceMesh) -> None:
    model = Does(reading, weights=weights())
    x = torch.randn(1, 11, C, dtype=torch.float64, requires_grad=True)
    comms = assert_parallel_equal(model, mesh, (x,), {"": "x=b s c"}, rounds=3, count=True)
    sent = [comm.forward.bytes for comm in comms]
    assert sent[1] == sent[2]
    parallel = dsp.parallelize(Does(reading, weights=weights()), mesh, {"": "x=b s c"})
    for _ in range(2):
        parallel(x).square().mean().backward()
    assert planned(parallel)


def looking(m: SpaceTime, x: Tensor) -> Tensor:
    """Views, and operations that return what they were given, after a look at its numbers."""
    y = m.space(x * 2)
    if y.amax().item() > 1e9:
        return x
    y = F.dropout(y.to(x.dtype).contiguous(), training=False).float().double()
    z = y.permute(0, 2, 3, 1).unsqueeze(1).flatten(1, 2)
    return m.time(y) + z.movedim(3, 1).sin()


@pytest.mark.parametrize("mesh", [2, 3])
def test_the_second_call_goes_by_the_plan_that_is_shown_before_the_first(mesh: DeviceMesh) -> None:
    model, x = SpaceTime(looking).double(), torch.randn(1, 5, 7, C, dtype=torch.float64)
    shown = dsp.plan(model, x, size=mesh.size())
    assert_parallel_equal(model, mesh, (x,), rounds=2)
    parallel = dsp.parallelize(model, mesh)
    for _ in range(2):
        parallel(x)
    [record] = records(parallel)
    facts = [[(n.name, n.identity, n.view) for n in r.nodes if n.kind != "plain"] for r in (shown.record, record)]
    assert facts[0] == facts[1]
    assert planned_bytes(record)["forward"] == shown.bytes["forward"]


def branching(m: SpaceTime, x: Tensor) -> Tensor:
    """One or the other, in checkpoints."""

    def part(x: Tensor, way: bool) -> Tensor:
        y = m.space(x * 2) if way else m.time(x * 3).flip(1)
        return m.time(y.roll(1, 2)) + y

    return m.space(checkpoint(part, x, m.way, use_reentrant=False)) * x.mean()


@pytest.mark.parametrize("mesh", [2, 3])
def test_branches_are_planned_together(mesh: DeviceMesh) -> None:
    single = SpaceTime(branching, way=False).double()
    model = dsp.parallelize(copy.deepcopy(single), mesh)
    x, strays = torch.randn(1, 5, 7, C, dtype=torch.float64, requires_grad=True), []
    for single.way in (False, True, True, False, True):
        model.way = single.way
        assert_step_equal(single, model, mesh, (x,))
        strays.append(left_plan(model))
    assert strays == [False, True, False, False, False]


@pytest.mark.parametrize("mesh", [2, 3])
def test_backward_of_a_call_before_its_record_was_planned_again(mesh: DeviceMesh) -> None:
    """Checkpoints of both calls are computed again by the plan that each ran by."""
    single = SpaceTime(branching, way=False).double()
    model = dsp.parallelize(copy.deepcopy(single), mesh)
    xs = [torch.randn(1, 5, 7, C, dtype=torch.float64) for _ in range(4)]
    for m in (single, model):
        losses = []
        for x, m.way in zip(xs, (False, True, True, False)):
            losses.append(dsp.mean(m(x).square()))
        for loss in reversed(losses):
            loss.backward()
    assert_close_named(averaged(model, mesh), {n: p.grad for n, p in single.named_parameters()})


def stretching(m: Any, x: Tensor) -> Tensor:
    return F.interpolate(F.linear(x, m.weights[0]).mT, scale_factor=m.by).mT * (m.by + m.step)


@pytest.mark.parametrize("mesh", [2])
def test_floats_and_numbers_that_change_with_each_call(mesh: DeviceMesh) -> None:
    single = Does(stretching, weights=weights(1), by=2.0, step=0)
    model = dsp.parallelize(copy.deepcopy(single), mesh, {"": "x=b s c"})
    x = torch.randn(1, 7, C, dtype=torch.float64)
    for step, by in enumerate((2.0, 3.0, 1.5, 2.0, 3.0)):
        for m in (single, model):
            m.by, m.step = by, step
        torch.testing.assert_close(model(x), single(x))


def test_records_that_grow_with_each_call_are_planned_ever_more_seldom(mesh: DeviceMesh) -> None:
    """Steps that are counted by the data: one more in each call."""

    def stepping(m: Any, x: Tensor) -> Tensor:
        y = F.linear(x, m.weights[0])
        for _ in range(int(y.amax())):
            y = y.sin()
        return y

    single = Does(stepping, weights=nn.ParameterList([torch.eye(C, dtype=torch.float64)]))
    model = dsp.parallelize(copy.deepcopy(single), mesh, {"": "x=b s c"})
    for call in range(12):
        x = torch.rand(1, 13, C, dtype=torch.float64).clamp(max=0.9)
        x[0, 0, 0] = call + 1.5
        torch.testing.assert_close(model(x), single(x))
    [record] = model.forward.__self__.records.values()
    assert 4 < record.replans < 9


SIZED = {
    "mask": lambda x, mask, table: x.transpose(1, 2)[mask],
    "table": lambda x, mask, table: table[mask[0]] * x[:, :1, :1],
    "places": lambda x, mask, table: x[mask.nonzero(as_tuple=True)[0], :, torch.where(mask)[1]],
    "repeats": lambda x, mask, table: x.repeat_interleave(mask[0].long(), 2)[0],
    "select": lambda x, mask, table: x.masked_select(mask[:, None, :, None]).view(1, -1),
    "written back": lambda x, mask, table: x.transpose(1, 2).clone().index_put_((mask,), x.transpose(1, 2)[mask] * 2),
    "a float": lambda x, mask, table: x[0, :1] * torch.arange(0, mask.sum().item() / 2, 0.5)[:, None, None],
}  # fmt: skip


class Sized(nn.Module):
    """A mean over as many rows as data say, by their number."""

    stages = SpaceTime.stages | {"": "x=b t s c, mask=b s, table=s c"}

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.space, self.time, self.rows = Along(2), Along(1), SIZED[kind]

    def forward(self, x: Tensor, mask: Tensor, table: Tensor) -> Tensor:
        y = self.rows(self.time(self.space(x)), mask, table)
        return y.sum(0) / y.shape[0] + y.new_ones(len(y)).sum()


@pytest.mark.parametrize("mesh", [slow(2), 3])
@pytest.mark.parametrize("kind", SIZED)
def test_data_may_say_other_sizes_in_every_call(mesh: DeviceMesh, kind: str) -> None:
    """Up to one row more than the longest dim has."""
    single = Sized(kind).double()
    model = dsp.parallelize(copy.deepcopy(single), mesh)
    x, table = torch.randn(2, 5, 6, C, dtype=torch.float64), torch.randn(6, C, dtype=torch.float64)
    for count in (5, 5, 3, 7, 4, 6, 3, 7):
        mask = torch.zeros(2, 6, dtype=torch.bool)
        mask.view(-1)[torch.randperm(12)[:count]] = True
        mask[0, :2] = True
        assert_step_equal(single, model, mesh, (x, mask, table))


def test_a_record_of_ever_other_sizes_does_not_grow_for_good(mesh: DeviceMesh) -> None:
    model = dsp.parallelize(Sized("mask"), mesh)
    records, nodes = model.forward.__self__.records, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dsp.core.parallel.GROWN", 30)
        for count in range(1, 24):
            model(torch.randn(1, 4, 24, C), torch.arange(24)[None] < count, torch.randn(24, C))
            nodes += [len(record.nodes) for record in records.values()]
    assert len(records) == 1
    assert max(nodes) < 60
