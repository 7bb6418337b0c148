"""Switches that are launched where a tensor is made and waited for where it is read: nothing reads it before."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import dsp
from dsp.comm.layout import Axis, Cut
from dsp.comm.moves import Part, switch_local
from dsp.comm.pending import ahead
from dsp.overlap.ahead import launch as launch_switch
from dsp.support.tensors import memory
from tests.support.parity import assert_step_equal
from tests.support.toys import Fn

SIZES = [1, 2, 3, 4]


@pytest.mark.parametrize("mesh", SIZES)
def test_an_asynchronous_all_to_all_is_the_synchronous_one(mesh: DeviceMesh) -> None:
    """As a switch at one place does: numbers, their order in memory, gradients twice, counters, of any dtype."""
    axis, shape, joined = Axis.of(mesh), (2, 9, 6, 3), Cut(1, (2, 7))
    whole = torch.randn(shape, dtype=torch.float64)
    for src, dst in [(Cut(1), Cut(2)), (Cut(2), Cut(1)), (joined, Cut(2)), (Cut(2), joined), (Cut(3), Cut(0))]:
        for order in [(0, 1, 2, 3), (0, 2, 1, 3), (3, 1, 0, 2)]:
            back, found = tuple(order.index(d) for d in range(4)), []
            for way in ("ahead", "at once"):
                x = axis.narrow(whole, src).permute(order).contiguous().permute(back).requires_grad_()
                part = Part(x, src, dst, shape)
                with dsp.count_comm() as comm:
                    if way == "ahead":
                        y, arrive = ahead(*part.opened(axis), axis.group, *(part.pieces or ()))
                        viewed = y.transpose(1, 2)
                        arrive()
                        assert viewed.data_ptr() == y.data_ptr()
                        y = viewed.transpose(1, 2)
                    else:
                        y = switch_local(*part, axis)
                    [g] = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
                    [gg] = torch.autograd.grad(g.square().sum(), x)
                assert torch.equal(y, axis.narrow(whole, dst))
                lies = [step for step, size in zip(y.stride(), y.shape) if size > 1 and y.numel()]
                found.append((lies, g.tolist(), gg.tolist(), repr(comm)))
            assert found[0] == found[1]
    for dtype in (torch.bool, torch.complex64, torch.bfloat16):
        x = axis.narrow(whole.relu().to(dtype), Cut(1))
        y, arrive = ahead(x, 1, 2, 9, axis.group)
        arrive()
        assert torch.equal(y, axis.narrow(whole.relu().to(dtype), Cut(2)))


class Attention(nn.Module):
    """Attention whose v is switched where it is made, and then `touched`, before q and k are made."""

    def __init__(self, touched: Callable[[Attention, Tensor], Tensor]) -> None:
        super().__init__()
        self.touched = touched
        self.q, self.k, self.v = (nn.Linear(8, 8, dtype=torch.float64) for _ in range(3))
        self.outside = Fn(lambda x: x + 1)  # a stage: it may hold more than it is given
        self.stages = {"": "x=b s c", "outside": "b [s] c"}

    def forward(self, x: Tensor) -> Tensor:
        v = self.v(x)
        v = self.touched(self, v)
        q, k, v = (t.unflatten(2, (4, 2)).transpose(1, 2) for t in (self.q(x), self.k(x), v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def unread(v: Tensor, text: str) -> Tensor:
    assert "nan" not in text, "read before it came"
    return v


def chunked(model: Attention, v: Tensor) -> Tensor:
    first, second = v.unflatten(-1, (4, 2)).chunk(2, -1)
    return torch.cat([second, first], -1).flatten(2)


def kept(model: Attention, v: Tensor) -> Tensor:
    model.outside.held = v.unflatten(-1, (4, 2))  # reached by the stage in another way than by its arguments
    return v + model.outside(v * 2)


TOUCHES: dict[str, Callable[[Attention, Tensor], Tensor]] = {
    "nothing": lambda model, v: v,
    "a sum": lambda model, v: v + 1,
    "in place": lambda model, v: v.mul_(2),
    "a view written in place": lambda model, v: (v.unflatten(-1, (4, 2)).mul_(2), v)[1],
    "its type": lambda model, v: v.to(torch.float64).to(torch.float32).to(torch.float64),
    "pieces": chunked,
    "every second": lambda model, v: v[..., ::2].repeat(1, 1, 2),
    "print": lambda model, v: unread(v, f"{v} {v.transpose(1, 2)!r}"),
    "its part": lambda model, v: unread(v, str(getattr(v, "to_local", v.clone)())),
    "all of it": lambda model, v: unread(v, str(getattr(v, "full_tensor", v.clone)())),
    "a stage": lambda model, v: model.outside(v),
    "a stage beside it": kept,
    "a copy": lambda model, v: copy.deepcopy(v.detach()) + v,
    "where": lambda model, v: torch.where(v > 0, v, v * 0.1),
    "in a list": lambda model, v: torch.stack([v, v * 2]).sum(0),
    "a checkpoint": lambda model, v: checkpoint(lambda x: x.sin() * x, v, use_reentrant=False),
    "nobody": lambda model, v: (model.v(v * 2), v.detach() * 0 + 1)[1],
}  # fmt: skip


Launch = Callable[..., Tensor]


@contextmanager
def all_large(launch: Launch) -> Iterator[None]:
    """No tensor counts as so small that it shares a call; `launch` in the place of what launches a switch."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("dsp.comm.moves", "dsp.core.decide", "dsp.report.traffic"):
            patch.setattr(import_module(module), "fuses", lambda nbytes, n: False)
        patch.setattr("dsp.overlap.ahead.launch", launch)
        yield


def late(under_way: list[int], launch: Launch, *call: Any) -> Tensor:
    """A switch that surely comes late: until it is waited for there are no numbers."""
    made, coming = launch(*call), call[0].in_flight
    with torch._C.DisableTorchFunction():
        room = made.data
        coming.pop(memory(made))()
        came = room.clone()
        room.fill_(torch.nan)
    coming[memory(made)] = lambda: room.copy_(came)
    under_way.append(len(coming))
    return made


@pytest.mark.parametrize("name", TOUCHES)
def test_nothing_is_read_before_its_all_to_all_arrives(mesh: DeviceMesh, name: str) -> None:
    single, x = Attention(TOUCHES[name]), torch.randn(1, 7, 8, dtype=torch.float64)
    under_way = list[int]()
    with all_large(partial(late, under_way, launch_switch)):
        model = dsp.parallelize(copy.deepcopy(single), mesh)
        assert_step_equal(single, model, mesh, (x,), rounds=2)
        with torch.no_grad():
            torch.testing.assert_close(model(x), single(x))
        assert_step_equal(single, model, mesh, (x,))
    assert name != "nothing" or max(under_way) == 3  # q, k and v


class Stop(Exception):
    pass


def stop(model: Attention, v: Tensor) -> Tensor:
    if model.stops:  # type: ignore[has-type]
        raise Stop
    return v


def test_a_forward_that_raises_has_waited_for_what_was_under_way(mesh: DeviceMesh) -> None:
    """torch keeps for good what nobody waits for."""
    runs, model = list[Any](), Attention(stop)
    with all_large(lambda *call: runs.append(call[0]) or launch_switch(*call)):
        dsp.parallelize(model, mesh)
        for model.stops in (False, False, True):
            runs.clear()
            with pytest.raises(Stop) if model.stops else nullcontext():
                model(torch.randn(1, 7, 8, dtype=torch.float64))
        assert len(runs) == 1  # v alone was made
        assert not runs[0].in_flight
