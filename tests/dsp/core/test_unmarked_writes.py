"""Functions that write into an argument and do not say so by a trailing underscore: exact, or refused with the line."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import dsp
from dsp.core.torch_traits import written
from tests.support.parity import assert_step_equal
from tests.support.refusals import refused
from tests.support.slow import slow

C = 8


@pytest.mark.parametrize(
    ("func", "args", "kwargs", "expect"),
    [
        (Tensor.add_, "ab", {}, "a"),
        (torch.add, "ab", {}, ""),
        (torch.add, "ab", {"out": "c"}, "c"),
        (torch.max, "a", {"dim": 0, "out": "bc"}, "bc"),
        (torch.ops.aten.mul_.Tensor, "ab", {}, "a"),
        (torch._cummax_helper, "abc", {}, "bc"),  # by its schema alone
        (torch.ops.aten._cummax_helper, "abc", {}, "bc"),
        (F.batch_norm, "abc", {"training": True}, "bc"),
        (F.batch_norm, "abc", {"training": False}, ""),
        (F.instance_norm, "a", {"running_mean": "b", "running_var": "c"}, "bc"),
        (F.instance_norm, "abc", {"use_input_stats": False}, ""),
        (torch.native_batch_norm, "aabbcTmm", {}, "bc"),
        (F.relu, "a", {"inplace": True}, "a"),
        (F.relu, "a", {}, ""),
        (F.embedding, "ab", {"max_norm": 1.0}, "b"),
        (F.embedding, "ab", {}, ""),
        (dist.all_reduce, "a", {}, "a"),
        (dist.all_reduce, "", {"tensor": "a", "async_op": True}, "a"),
        (dist.reduce, "a", {"dst": 0}, "a"),
        (dist.all_gather, ["bc", "a"], {}, "bc"),
        (dist.gather, "a", {"gather_list": "bc"}, "bc"),
        (dist.all_to_all_single, "ab", {}, "a"),
        (dist.isend, "a", {"dst": 0}, ""),
        (dist.irecv, "a", {"src": 0}, "a"),
    ],
)
def test_arguments_that_a_function_writes_into(func: Any, args: Any, kwargs: dict[str, Any], expect: str) -> None:
    """A letter stands for a tensor, several for a tuple of tensors, T for True and m for a number."""
    tensors: dict[str, Any] = {name: torch.zeros(2) for name in "abc"}

    def value(v: Any) -> Any:
        if not isinstance(v, str):
            return v
        return tuple(tensors[n] for n in v) if len(v) > 1 else tensors.get(v, v == "T")

    got = written(func, [value(a) for a in args], {k: value(v) for k, v in kwargs.items()})
    assert {id(t) for t in got} == {id(tensors[name]) for name in expect}


def all_reduce(e: Tensor, group: Any) -> Tensor:
    with torch.no_grad():
        dist.all_reduce(e, group=group)
    return e


def asynchronous(e: Tensor, group: Any) -> Tensor:
    with torch.no_grad():
        dist.all_reduce(tensor=e, op=dist.ReduceOp.MAX, group=group, async_op=True).wait()
    return e


def broadcast(e: Tensor, group: Any) -> Tensor:
    with torch.no_grad():
        dist.broadcast(e, group=group, group_src=0)
    return e


def detached(e: Tensor, group: Any) -> Tensor:
    """The write goes through another tensor of the same memory, and an earlier view sees it."""
    view = e[..., 2:5]
    dist.all_reduce(e.detach(), group=group)
    return e * view.sum(-1, keepdim=True)


def folded(e: Tensor, group: Any) -> Tensor:
    with torch.no_grad():
        dist.all_reduce(e.view(-1, C), group=group)
    return e


def repeated(e: Tensor, group: Any) -> Tensor:
    """The full copy that the write reached serves later reads."""
    with torch.no_grad():
        dist.all_reduce(e, group=group)
        dist.all_reduce(e, group=group)
    return e + e.sort(1).values


def all_gather(e: Tensor, group: Any) -> Tensor:
    parts = [torch.empty_like(e) for _ in range(group.size())]
    dist.all_gather(parts, e, group=group)
    return torch.stack(parts).sum(0)


def with_gradient(e: Tensor, group: Any) -> Tensor:
    return differentiable.all_reduce(e, group=group)  # type: ignore[no-any-return]


def statistics(e: Tensor, group: Any) -> Tensor:
    """A norm's running statistics, along the sharded dim."""
    mean, var = (e[0, :, 0].detach() + k for k in range(2))
    F.batch_norm(e.detach(), mean, var, training=True)
    return e * (mean * var)[:, None]


LIBRARY = torch.library.Library("dsp_test_writes", "DEF")
LIBRARY.define("double(Tensor x, *, Tensor(a!) into) -> ()")
LIBRARY.impl("double", lambda x, *, into: [into.data.copy_(2 * x)].clear(), "CPU")
LIBRARY.impl("double", lambda x, *, into: None, "Meta")


def by_schema(e: Tensor, group: Any) -> Tensor:
    into = e.detach() * 1
    torch.ops.dsp_test_writes.double(e.detach(), into=into)
    return e + into


class Inside(nn.Module):
    """A forward with `inside` on a sharded tensor; `ckpt`: in an activation checkpoint."""

    stages = {"": "x=b s c"}

    def __init__(self, inside: Callable[[Tensor, Any], Tensor], group: Any, ckpt: bool = False) -> None:
        super().__init__()
        self.linear, self.inside, self.ckpt = nn.Linear(C, C).double(), inside, ckpt
        self.group = [group]

    def __deepcopy__(self, memo: Any) -> Inside:
        made = Inside(self.inside, self.group[0], self.ckpt)
        made.load_state_dict(self.state_dict())
        return made

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False) if self.ckpt else self.block(x)  # type: ignore[no-any-return]

    def block(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, that a collective has no gradient
            return (y + self.inside(y.sin(), self.group[0])).tanh()


RIGHT = [
    all_reduce,
    asynchronous,
    broadcast,
    detached,
    folded,
    repeated,
    all_gather,
    with_gradient,
    statistics,
    by_schema,
]


@pytest.mark.parametrize("inside", RIGHT, ids=lambda f: f.__name__)
@pytest.mark.parametrize("mesh", [2, slow(3)])
def test_a_write_that_no_name_shows_is_not_lost(mesh: DeviceMesh, inside: Callable[..., Tensor]) -> None:
    if inside is with_gradient:  # an autograd.Function: its backward would get parts
        model = dsp.parallelize(Inside(inside, mesh.get_group()), mesh)
        refused("AllReduce between stages", model, torch.randn(1, 8, C, dtype=torch.float64), error=RuntimeError)
        return
    for ckpt in (False, True):
        single = Inside(inside, mesh.get_group(), ckpt)
        model = dsp.parallelize(copy.deepcopy(single), mesh)
        for call in range(3):
            torch.manual_seed(call)
            x = torch.randn(1, 9, C, dtype=torch.float64)
            assert_step_equal(single, model, mesh, (x,))
            with torch.inference_mode():
                torch.testing.assert_close(model(x), single(x))


def reduce(e: Tensor, group: Any) -> Any:
    return dist.reduce(e, group=group, group_dst=0)


def gather(e: Tensor, group: Any) -> Any:
    return dist.gather(e, [torch.empty_like(e) for _ in range(group.size())], group=group, group_dst=0)


def scatter(e: Tensor, group: Any) -> Any:
    return dist.scatter(e, [e] * group.size(), group=group, group_src=0)


def reduce_scatter(e: Tensor, group: Any) -> Any:
    return dist.reduce_scatter(torch.empty_like(e), [e] * group.size(), group=group)


def all_to_all(e: Tensor, group: Any) -> Any:
    return dist.all_to_all([torch.empty_like(e) for _ in range(group.size())], [e] * group.size(), group=group)


def sent(e: Tensor, group: Any) -> Any:
    return dist.batch_isend_irecv([dist.P2POp(dist.isend, e, group=group, group_peer=0)])


def gathered_with_gradient(e: Tensor, group: Any) -> Any:
    return sum(differentiable.all_gather(e, group=group))


def method_of_a_group(e: Tensor, group: Any) -> Any:
    return group.allreduce([e])


def out_of(e: Tensor, group: Any) -> Any:
    return torch.cumsum(e.detach(), 1, out=e.detach() * 1)


DIFFERENT = "between stages would leave each rank a different tensor.*test_unmarked_writes.py"
REFUSED = [
    (reduce, DIFFERENT), (gather, DIFFERENT), (scatter, DIFFERENT), (reduce_scatter, DIFFERENT),
    (all_to_all, DIFFERENT), (sent, DIFFERENT), (gathered_with_gradient, f"AllGather {DIFFERENT}"),
    (method_of_a_group, "ProcessGroup.allreduce.. between stages.*call the function of torch.distributed.*writes.py"),
    (out_of, "out= has no rule for a sharded tensor.*test_unmarked_writes.py"),
]  # fmt: skip


@pytest.mark.parametrize(("inside", "message"), REFUSED, ids=[f.__name__ for f, _ in REFUSED])
def test_unsafe_writes_are_refused_with_their_line(mesh: DeviceMesh, inside: Callable[..., Any], message: str) -> None:
    model = dsp.parallelize(Inside(inside, mesh.get_group()), mesh)
    x = torch.randn(1, 8, C, dtype=torch.float64)
    refused(message, model, x, error=RuntimeError)


def test_the_plan_counts_the_gather_before_a_collective(mesh: DeviceMesh) -> None:
    model = dsp.parallelize(Inside(all_reduce, mesh.get_group()), mesh)
    x = torch.randn(1, 8, C, dtype=torch.float64)
    plan = dsp.plan(model, (x,), size=mesh.size())
    with torch.no_grad(), dsp.count_comm() as comm:
        model(x)
    assert sum(v["bytes"] for v in comm.by_collective()["forward"].values()) == plan.bytes["forward"]


def total(x: Tensor) -> Tensor:
    return x.detach().sum((0, 1))


STATISTICS: dict[str, Callable[[Any, Tensor], Any]] = {
    "copy": lambda m, x: m.sums.data.copy_(total(x)),
    "lerp": lambda m, x: m.sums.data.lerp_(total(x).to(m.sums), 0.2),
    "add": lambda m, x: m.sums.add_(total(x)),
    "a view": lambda m, x: m.rows.view(1, 9, C)[:, 2].copy_(x.detach()[:, 2]),
    "setitem": lambda m, x: m.rows.__setitem__(slice(None), x[0].detach()),
    "all rows": lambda m, x: m.rows.add_(x[0].detach()),
    "addcmul": lambda m, x: m.sums.addcmul_(total(x), total(x)),
    "counts": lambda m, x: m.sums.lerp_(F.one_hot(x.detach().argmax(-1), C).to(x.dtype).sum((0, 1)), 0.2),
    "by index": lambda m, x: m.sums.index_add_(0, x.detach().argmax(-1).flatten(), x.detach().new_ones(9)),
    "product": lambda m, x: m.pairs.addmm_(x[0].detach().T, x[0].detach()),
    "several": lambda m, x: torch._foreach_add_([m.sums], [total(x)]),
    "masked": lambda m, x: m.rows.masked_fill_(x[0].detach() > 0, 1.0),
}


class Keeps(nn.Module):
    """Statistics in buffers, which every rank has and updates, as of a codebook."""

    stages = {"": "x=b s c", "first": "b s [c]"}

    def __init__(self, update: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.first, self.last, self.update = nn.Linear(C, C), nn.Linear(C, C), update
        self.register_buffer("sums", torch.ones(C))
        self.register_buffer("rows", torch.zeros(9, C))
        self.register_buffer("pairs", torch.zeros(C, C))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        with torch.no_grad():
            self.update(self, y)
        return self.last(y) * self.sums


@pytest.mark.parametrize("mesh", [2, slow(3)])
def test_statistics_in_buffers_are_those_of_one_process(mesh: DeviceMesh) -> None:
    for name, update in STATISTICS.items():
        single = Keeps(update).double()
        model = dsp.parallelize(copy.deepcopy(single), mesh)
        for call in range(3):
            torch.manual_seed(call)
            x = torch.randn(1, 9, C, dtype=torch.float64)
            torch.testing.assert_close(model(x), single(x), msg=f"{name}, call {call}")
            for key, kept in single.named_buffers():
                torch.testing.assert_close(dict(model.named_buffers())[key], kept, msg=f"{name}, {key}, call {call}")


def test_a_result_in_a_tensor_of_every_rank_is_refused(mesh: DeviceMesh) -> None:
    model = dsp.parallelize(Keeps(lambda m, x: torch.sum(x[0].detach(), 0, out=m.sums)).double(), mesh)
    refused(r"sum\(\) between stages: out= has no rule", model, torch.randn(1, 9, C).double(), error=dsp.GlueError)
