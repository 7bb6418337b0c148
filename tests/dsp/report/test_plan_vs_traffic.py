"""A plan keeps its word: what a run sends is counted as it is sent, and a run that sends other than planned says so."""

from __future__ import annotations

import copy
import gc
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import dsp
from tests.support import toys
from tests.support.records import promised
from tests.support.runs import Heard
from tests.support.slow import slow


class Frames(nn.Module):
    """A convolution within each frame, then two recurrences along time over whole frames: (b t) folded, and opened;
    frames of one sample beside those of another."""

    stages = {"": "x=b t c h w", "conv": "(b t) [c h w]", "rnn.*": "b [t f] -> b [t g], [n] b [g], [n] b [g]"}

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(8, 5)
        self.rnn = nn.ModuleList(nn.LSTM(64, 8, batch_first=True) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.conv(x.flatten(0, 1)).relu().flatten(1).view(*x.shape[:2], -1)
        return self.out(self.rnn[0](y)[0] + self.rnn[1](y)[0]), y - y.flip(0)


def keeps_its_word(mesh: DeviceMesh, model: nn.Module, x: Tensor) -> tuple[dsp.Plan, Tensor, int]:
    """Two forwards send what the plan promises, and nothing is said; the plan, the busiest rank's bytes, and calls."""
    plan = dsp.plan(model, (x,), size=mesh.size(), gather_output=False)
    dsp.parallelize(model, mesh, gather_output=False)
    with Heard() as heard:
        for _ in range(2):
            with torch.no_grad(), dsp.count_comm() as comm:
                model(x)
    nbytes, calls = promised(model)["forward"]
    assert (comm.forward.bytes.total(), comm.forward.calls.total()) == (nbytes, calls)
    assert heard.texts == []
    busiest = torch.tensor(nbytes)
    torch.distributed.all_reduce(busiest, torch.distributed.ReduceOp.MAX, mesh.get_group())
    return plan, busiest, calls


@pytest.mark.parametrize("mesh", [3])
def test_a_fold_that_is_opened_is_switched_once(mesh: DeviceMesh) -> None:
    """2 samples on 3 ranks, for both recurrences: no cut of the fold looks like one of its samples."""
    plan, busiest, calls = keeps_its_word(mesh, Frames(), torch.randn(2, 6, 3, 4, 4))
    assert calls == plan.calls["forward"] == 1
    assert busiest == plan.bytes["forward"]


class Joint(nn.Module):
    """New zeros of a sharded tensor's type, which stay whole, and such that it is written into."""

    stages = {"": "x=b t c"}

    def forward(self, x: Tensor) -> Tensor:
        y = x.softmax(-1)
        table, joint = y.new_zeros(1, 4, x.shape[2]), y.new_zeros(x.shape[0], x.shape[1] + 4, x.shape[2])
        table[:, 1] = 1.0
        joint[:, 4:], joint[:, :4] = y, table
        return joint.square().cumsum(1)


def test_zeros_of_a_sharded_tensors_type_are_whole_or_not_as_planned(mesh: DeviceMesh) -> None:
    plan, _, calls = keeps_its_word(mesh, Joint(), torch.randn(2, 60, 4))
    assert calls == plan.calls["forward"]


class Messages(nn.Module):
    """Messages of places, added up in new zeros; the linear layer asks for all channels."""

    stages = {"": "x=b n c"}

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        received = x.new_zeros(x.shape)
        received.index_add_(1, torch.arange(17) % 13, x[:, torch.arange(17) % 7])
        return self.out(torch.cat([x, received / 2], -1))


def test_zeros_that_something_sharded_is_written_into_are_not_planned_to_be_whole(mesh: DeviceMesh) -> None:
    plan, busiest, calls = keeps_its_word(mesh, Messages(), torch.randn(3, 13, 4))
    assert (busiest, calls) == (plan.bytes["forward"], plan.calls["forward"])


def test_a_forward_leaves_no_garbage(mesh: DeviceMesh) -> None:
    """No tensors are left to the garbage collector, which does not know when memory is short."""
    model = nn.Sequential(nn.Conv1d(4, 4, 3, padding=1), nn.Softmax(1))
    dsp.parallelize(model, mesh, {"": "input=b c t"})
    x, found = torch.randn(2, 4, 6), []
    gc.freeze()  # what ranks have of other tests is not gone through each time
    with torch.no_grad():
        model(x)
        for _ in range(4):  # the least: what a forward leaves every one leaves, and what others left may come between
            gc.collect()
            gc.disable()
            model(x)
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()  # not a count of all tensors: those of a collective on its way go when it arrives
            gc.set_debug(0)
            gc.enable()
            found.append(sum(isinstance(o, Tensor) for o in gc.garbage))
            gc.garbage.clear()
    assert min(found) == 0


class DualPath(nn.Module):
    """Recurrences within chunks and across them in turn, each on a fold of its own, with residuals and a norm."""

    stages = {"": "x=b k s c", "within.*": "(b s) [k c] -> (b s) [k d], [n] (b s) [d]",
              "across.*": "(b k) [s c] -> (b k) [s d], [n] (b k) [d]"}  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.within, self.across = (nn.ModuleList(nn.GRU(4, 4, batch_first=True) for _ in range(2)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        b, k, s, c = x.shape
        for within, across in zip(self.within, self.across):
            y = within(x.transpose(1, 2).reshape(b * s, k, c))[0].view(b, s, k, c).transpose(1, 2)
            x = x + F.layer_norm(y, (c,))
            y = across(x.reshape(b * k, s, c))[0].view(b, k, s, c)
            x = x + F.layer_norm(y, (c,))
        return x


class Pairs(nn.Module):
    """A pair representation's block, named by its root alone: two triangles, attention along rows and columns."""

    stages = {"": "z=b i j d"}

    def __init__(self) -> None:
        super().__init__()
        self.p, self.g = nn.Linear(4, 8), nn.Linear(4, 8)
        self.qkv, self.bias, self.out = nn.Linear(4, 12), nn.Linear(4, 2), nn.Linear(4, 4)

    def triangle(self, z: Tensor, equation: str) -> Tensor:
        x = F.layer_norm(z, (4,))
        a, b = (self.p(x) * self.g(x).sigmoid()).chunk(2, -1)
        return F.layer_norm(torch.einsum(equation, a, b), (4,))

    def attention(self, z: Tensor) -> Tensor:
        q, k, v = self.qkv(z).unflatten(-1, (2, 6)).transpose(2, 3).chunk(3, -1)
        y = F.scaled_dot_product_attention(q, k, v, self.bias(z).permute(0, 3, 1, 2)[:, None])
        return self.out(y.transpose(2, 3).flatten(3))

    def forward(self, z: Tensor) -> Tensor:
        z = z + self.triangle(z, "bikd,bjkd->bijd")
        z = z + self.triangle(z, "bkid,bkjd->bijd")
        z = z + self.attention(z)
        return z + self.attention(z.transpose(1, 2)).transpose(1, 2)


@pytest.mark.parametrize(
    ("build", "shape", "mesh"),
    [slow(DualPath, (1, 6, 9, 4), 2), slow(DualPath, (2, 5, 7, 4), 3), (Pairs, (1, 5, 5, 4), 2)],
)
def test_runs_send_what_is_planned(mesh: DeviceMesh, build: Any, shape: tuple[int, ...]) -> None:
    *_, calls = keeps_its_word(mesh, build(), torch.randn(shape))
    assert calls > 0


def often_told(m: toys.SpaceTime, x: Tensor, often: Tensor) -> Tensor:
    """The way of a forward that reads its data, planned from the record of its first call."""
    for k in range(int(often)):
        x = m.space(x) if k % 2 else m.time(x)
    return x


def test_a_run_that_goes_another_way_says_so_once(mesh: DeviceMesh) -> None:
    """Rank 0 for all."""
    model = dsp.parallelize(toys.SpaceTime(often_told), mesh, gather_output=False)
    told = []
    for often in (2, 2, 3, 4):
        with Heard() as heard, torch.no_grad():
            model(torch.randn(1, 4, 6, toys.C), torch.tensor(often))
        told.append(heard.texts)
    assert told[:2] + told[3:] == [[], [], []]
    assert len(told[2]) == (mesh.get_local_rank() == 0)
    for said in told[2]:
        assert re.search(
            r"sent 192 B in 2 calls where its plan says 96 B in 1: .* stage 'time' on .* has no such call", said
        )


def gathering(m: toys.SpaceTime, x: Tensor) -> Tensor:
    """A model that gathers by itself what the library moves."""
    y = m.time(x) * 2
    if hasattr(y, "placements"):
        dsp.gather(y)
    return y


def test_unplanned_traffic_is_named_with_its_place(mesh: DeviceMesh) -> None:
    model = dsp.parallelize(toys.SpaceTime(gathering), mesh, gather_output=False)
    with Heard() as heard, torch.no_grad():
        for _ in range(4):
            model(torch.randn(1, 4, 6, toys.C))
    assert len(heard.texts) == (mesh.get_local_rank() == 0)
    for said in heard.texts:
        assert "where its plan says 0 B in 0: at gather() a gather of 192 B instead of nothing" in said


def two(m: toys.SpaceTime, x: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over space, then over time, once more in a checkpoint; both results."""
    x = m.space(x)
    return x, checkpoint(lambda x: m.space(m.time(x)).flip(1), x, use_reentrant=False).sin()


def phases_of(comm: Any) -> dict[str, tuple[int, int]]:
    """Bytes and calls by phase, without the sums of `dsp.mean`: they are not of the model."""
    own = {phase: getattr(comm, phase) for phase in ("forward", "backward", "recompute")}
    kinds = {phase: [k for k in t.calls if k != "all_reduce"] for phase, t in own.items()}
    return {p: (sum(own[p].bytes[k] for k in ks), sum(own[p].calls[k] for k in ks)) for p, ks in kinds.items()}


def way_back(mesh: DeviceMesh, used: int = 2, passes: int = 1, apart: bool = False, stop: bool = True) -> Any:
    """The traffic of this rank by phase, that of its plan, and what was said of three steps."""
    model = dsp.parallelize(toys.SpaceTime(two), mesh, gather_output=False)
    x = torch.randn(1, 5, 7, toys.C, generator=torch.Generator().manual_seed(0))

    def back(loss: Tensor, comm: Any) -> None:
        with comm:
            for left in reversed(range(passes)):
                loss.backward(retain_graph=left > 0)

    with Heard() as heard:
        for step in range(3):
            comm = dsp.count_comm()
            with comm, set_checkpoint_early_stop(stop or step == 0):  # as it was planned in the first step
                made = model(x.requires_grad_())
            loss = torch.stack([dsp.mean(out) for out in made[:used]]).sum()
            if apart:  # as CUDA's is
                with ThreadPoolExecutor(1) as thread:
                    thread.submit(back, loss, comm).result()
            else:
                back(loss, comm)
    return phases_of(comm), promised(model), heard.texts


@pytest.mark.parametrize("mesh", [3])
@pytest.mark.parametrize("apart", [False, True])
def test_backward_and_what_it_computes_again_are_counted_in_any_thread(mesh: DeviceMesh, apart: bool) -> None:
    sent, word, told = way_back(mesh, apart=apart)
    assert sent == word
    assert min(calls for _, calls in word.values()) > 0
    assert told == []


def test_each_pass_of_backward_is_one(mesh: DeviceMesh) -> None:
    sent, word, told = way_back(mesh, passes=2)
    assert sent["backward"] == tuple(2 * k for k in word["backward"])
    assert told == []


def test_a_backward_that_sends_other_than_planned_says_so_once(mesh: DeviceMesh) -> None:
    """A loss of the first result alone: nothing comes back through what follows."""
    *_, told = way_back(mesh, used=1)
    assert len(told) == (mesh.get_local_rank() == 0)
    for said in told:
        assert re.search(r"464 B in 2 calls .* 736 B in 4: at stage 'time' nothing instead of a switch of 144 B", said)


def test_unplanned_recomputation_is_reported_once(mesh: DeviceMesh) -> None:
    """Recomputation that does not stop where it has all, in a thread of its own."""
    *_, told = way_back(mesh, apart=True, stop=False)
    assert len(told) == (mesh.get_local_rank() == 0)
    for said in told:
        assert re.search(r"recomputation .* 272 B in 2 calls .* 128 B in 1: at stage 'space' a switch of 144 B", said)


class Twice(nn.Module):
    """Its input enters two stages, which both switch it."""

    stages = {"": "x=b t s c", "one": "b [t] s [c]", "two": "b [t] s [c]"}

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = toys.Along(1), toys.Along(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) + self.two(x)


@pytest.mark.parametrize("mesh", [2, 3])
def test_an_input_that_comes_sharded_is_switched_once(mesh: DeviceMesh) -> None:
    single, x = Twice(), torch.randn(2, 5, 7, toys.C)
    model = dsp.parallelize(copy.deepcopy(single), mesh, gather_output=False)
    with Heard() as heard:
        for _ in range(2):
            with dsp.count_comm() as comm:
                y = model(dsp.split(x, mesh, 1))
            assert sum(comm.forward.calls.values()) == 1
            torch.testing.assert_close(dsp.gather(y), single(x))
    assert heard.texts == []
