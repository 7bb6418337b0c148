"""State that a model keeps between calls and writes into, such as a cache of keys: sharded, exact for all chunks."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import dsp
from tests.support.records import persistent_shard, planned, records
from tests.support.slow import slow

HEADS, DIM, ROOM = 3, 4, 40


class Attention(nn.Module):
    """Attention of a chunk of frames over all so far; keys and values stay in `kept`, made at the first chunk."""

    def __init__(self, keep: str) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 3 * HEADS * DIM), nn.Linear(HEADS * DIM, 8)
        self.keep, self.kept = keep, {}

    def forward(self, x: Tensor, start: int, cache: Any) -> Tensor:
        b, t, s, _ = x.shape
        q, k, v = self.qkv(x.flatten(1, 2)).view(b, t * s, 3, HEADS, DIM).unbind(2)
        held = self.kept if self.keep == "module" else cache.__dict__
        if start == 0:
            held["kv"] = [x.new_zeros(b, ROOM, HEADS, DIM) for _ in "kv"]
        end = start + t * s
        for kept, new in zip(held["kv"], (k, v)):
            kept[:, start:end] = new
        k, v = (kept[:, :end].transpose(1, 2) for kept in held["kv"])
        y = self.out(F.scaled_dot_product_attention(q.transpose(1, 2), k, v).transpose(1, 2).flatten(2))
        return x + y.view_as(x)


class Video(nn.Module):
    """Two such layers, and between them a stage."""

    def __init__(self, keep: str = "module", stage: bool = False) -> None:
        super().__init__()
        self.one, self.two = Attention(keep), Attention(keep)
        self.mlp = nn.Sequential(nn.Linear(8, 8), nn.GELU())
        self.stages = {"": "x=b t s c"} | ({"mlp": "b t s c"} if stage else {})

    def forward(self, x: Tensor, start: int, caches: Any = (None, None)) -> Tensor:
        return self.two(self.mlp(self.one(x, start, caches[0])), start, caches[1])


def rolled(model: nn.Module, x: Tensor, caches: bool, chunk: int = 2, rolls: int = 2) -> list[Tensor]:
    """Every chunk's output, of `rolls` videos."""
    found, s = [], x.shape[2]
    for _ in range(rolls):
        held = [[SimpleNamespace(), SimpleNamespace()]] if caches else []
        for at in range(0, x.shape[1], chunk):
            found.append(model(x[:, at : at + chunk], at * s, *held))
    return found


@pytest.mark.parametrize(
    ("mesh", "keep", "stage"),
    [
        (2, "module", False),
        (3, "object", False),
        slow(2, "object", True),
        slow(3, "module", True),
        slow(4, "module", False),
    ],
)
def test_a_sharded_kv_cache_over_ten_chunks(mesh: DeviceMesh, keep: str, stage: bool) -> None:
    single, x = Video(keep, stage).double(), torch.randn(1, 10, 4, 8).double()
    model = dsp.parallelize(copy.deepcopy(single), mesh)
    with torch.no_grad():
        expect = rolled(single, x, keep == "object", chunk=1)
        found = rolled(model, x, keep == "object", chunk=1)
        with dsp.count_comm() as comm:
            again = rolled(model, x, keep == "object", chunk=1)
    for y, z in zip(again, found, strict=True):
        torch.testing.assert_close(y, z, rtol=0, atol=0)
    for y, z in zip(found, expect, strict=True):
        torch.testing.assert_close(y, z)
    assert planned(model)
    if keep == "module":
        held = model.one.kept["kv"][0]
        assert held.to_local().shape[2] < HEADS, "it is sharded along heads"
    # of a chunk queries, keys, values and results, in both layers, and the output: nothing of what is kept
    sent = torch.tensor(sum(comm.forward.bytes.values()))
    torch.distributed.all_reduce(sent, torch.distributed.ReduceOp.MAX, mesh.get_group())
    assert sent == 20 * [1024, 1152, 768][mesh.size() - 2]


class Recurrent(nn.Module):
    """A state that the next call goes on from, with its gradient or without."""

    def __init__(self, reads: bool = False) -> None:
        super().__init__()
        self.mix, self.state, self.reads = nn.Linear(6, 6), None, reads
        self.stages = {"": "x=b t c", "mix": "b t [c]"}

    def forward(self, x: Tensor) -> Tensor:
        if self.reads and x.mean() > 100:  # so that no plan can be made ahead
            return x
        self.state = self.mix(x) if self.state is None else self.mix(x) + self.state * 0.5
        return self.state.softmax(1 if self.training else 2)


@pytest.mark.parametrize(
    ("mesh", "detach", "reads"), [(2, False, False), (3, True, False), (2, False, True), (3, True, True)]
)
def test_a_recurrent_state_across_calls(mesh: DeviceMesh, detach: bool, reads: bool) -> None:
    single = Recurrent(reads).double()
    model = dsp.parallelize(copy.deepcopy(single), mesh)
    xs = [torch.randn(2, 7, 6, dtype=torch.float64, requires_grad=True) for _ in range(4)]
    totals = []
    for m in (single, model):
        total: Any = 0
        for i, x in enumerate(xs):
            m.train(i % 2 == 0)  # their plans want it along other dims
            total = total + m(x).square().sum()
            if detach:
                m.state = m.state.detach()
        total.backward()
        totals.append(total.detach())
    torch.testing.assert_close(*totals)
    for p, q in zip(model.parameters(), single.parameters()):
        torch.distributed.all_reduce(p.grad, group=mesh.get_group())
        torch.testing.assert_close(p.grad / mesh.size(), q.grad)
    assert reads or planned(model)


def test_the_caller_may_compute_with_it(mesh: DeviceMesh) -> None:
    """Outside of a forward it is a DTensor, and the next call goes on from a DTensor as from its own."""
    single, x = Recurrent().double(), torch.randn(2, 7, 6).double()
    model = dsp.parallelize(copy.deepcopy(single), mesh)
    for m in (single, model):
        m.state = None
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(model(x), single(x))
            for m in (single, model):
                m.state = m.state * 0.5 + 1
            torch.testing.assert_close(dsp.gather(model.state), single.state)
    assert planned(model)


class Logging(Recurrent):
    """A list of results that no call reads."""

    def forward(self, x: Tensor) -> Tensor:
        self.state = [*(self.state or ()), self.mix(x)]
        return self.state[-1].softmax(1)


def test_unread_state_changes_no_plan(mesh: DeviceMesh) -> None:
    single, x = Logging().double(), torch.randn(2, 7, 6).double()
    model = dsp.parallelize(copy.deepcopy(single), mesh)
    with torch.no_grad():
        for _ in range(6):
            torch.testing.assert_close(model(x), single(x))
    assert len(model.state) == 6
    assert planned(model)
    assert len(records(model)) == 1


def test_a_copy_of_the_model_goes_on_by_itself(mesh: DeviceMesh) -> None:
    single, x = Recurrent().double(), torch.randn(2, 7, 6).double()
    model = dsp.parallelize(copy.deepcopy(single), mesh)
    with torch.no_grad():
        for m in (single, model):
            m(x)
        other, other_single = copy.deepcopy(model), copy.deepcopy(single)
        for _ in range(2):
            torch.testing.assert_close(model(x), single(x))
        torch.testing.assert_close(other(x), other_single(x))


def test_it_may_lie_otherwise_in_a_later_call(mesh: DeviceMesh) -> None:
    """A call by a known signature that finds what is kept in another layout has a plan of its own."""
    single, x = Recurrent().double().eval(), torch.randn(2, 7, 6).double()
    model = dsp.parallelize(copy.deepcopy(single), mesh)
    with torch.no_grad():
        for start in (None, "t", "b", "t", None):
            given = torch.randn(2, 7, 6, generator=torch.Generator().manual_seed(1)).double() if start else None
            single.state = given
            model.state = None if start is None else persistent_shard(model, given, "bt".index(start))
            for _ in range(2):
                torch.testing.assert_close(model(x), single(x))
