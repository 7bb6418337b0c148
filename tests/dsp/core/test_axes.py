"""The sequence axis beside torch's own on one mesh: tensor parallel in stages, a pipeline, fully_shard; to 1e-10."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module

import dsp
from dsp.core.carrier import Carrier
from dsp.core.torch_calls import GlueError
from tests.support.runs import Heard
from tests.support.slow import slow

C, HEAD = 8, 2
OURS = ("switch", "gather", "reduce_scatter")  # tensor parallelism's own are all-reduces
EXACT = {"rtol": 0, "atol": 1e-10}


class Attention(nn.Module):
    """Residual attention along `dim` of (b t s c); `heads`: of a rank, or -1 to read them off the projections."""

    def __init__(self, dim: int, heads: int = -1) -> None:
        super().__init__()
        self.dim, self.heads, self.norm = dim, heads, nn.LayerNorm(C)
        self.q, self.k, self.v, self.out = (nn.Linear(C, C) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x).movedim(self.dim, 2)
        q, k, v = (project(y).unflatten(-1, (self.heads, HEAD)).transpose(2, 3) for project in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v).transpose(2, 3).flatten(-2)
        return x + self.out(y).movedim(2, self.dim)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(C, 3 * C), nn.Linear(3 * C, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Part(nn.Module):
    """Half of a video transformer: stages, and a gate between them whose weights are whole."""

    stages = {"": "x=b t s c", "space": "b t [s c]", "time": "b [t] s [c]", "mlp": "b t s [c]"}

    def __init__(self, heads: int = -1) -> None:
        super().__init__()
        self.space, self.time, self.mlp = Attention(2, heads), Attention(1, heads), MLP()
        self.gate = nn.Parameter(torch.randn(C))

    def forward(self, x: Tensor) -> Tensor:
        x = self.time(self.space(x))
        y = self.mlp(x)
        self.kind = type(y)
        return x + self.gate * y


def tensor_parallel(part: nn.Module, mesh: DeviceMesh) -> None:
    for attention in (part.space, part.time):
        styles: dict[str, Any] = {name: ColwiseParallel() for name in "qkv"}
        parallelize_module(attention, mesh, styles | {"out": RowwiseParallel()})
    parallelize_module(part.mlp, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def average(parameters: Iterable[nn.Parameter], mesh: DeviceMesh) -> None:
    """Mean gradients over dp x sp, of each rank's own part of the weights."""
    for p in parameters:
        part = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
        for axis in ("dp", "sp"):
            dist.all_reduce(part, group=mesh.get_group(axis))
        part /= mesh["dp"].size() * mesh["sp"].size()


def same(model: nn.Module, single: nn.Module) -> None:
    """Every gradient, gathered from wherever its parts are, is that of one process."""
    expect = dict(single.named_parameters())
    for name, p in model.named_parameters():
        grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        torch.testing.assert_close(grad, expect.pop(name).grad, msg=lambda m, name=name: f"{name}: {m}", **EXACT)
    assert not expect


def beside(_: Any, sizes: dict[str, int], schedule: Any, sharded: bool) -> None:
    """Two steps of a model over dp x pp x sp x tp, two micro-batches each, beside one process."""
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    torch.manual_seed(0)
    parts = [Part().double(), Part().double()]
    single, x, y = nn.Sequential(*parts), *torch.randn(2, 4, 5, 7, C).double()
    expect = F.mse_loss(single(x), y)
    expect.backward()
    pp, dp, n = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank(), sizes["pp"]
    own = [copy.deepcopy(parts[i]) for i in range(2) if i * n // 2 == pp]  # this rank's
    last = pp == n - 1
    for part in own:
        part.zero_grad()
        tensor_parallel(part, mesh["tp"])
    model = nn.Sequential(*own)
    stages = {f"{i}.{name}".rstrip("."): s for i in range(len(own)) for name, s in Part.stages.items() if name}
    stages[""] = "input=b t s c"
    dsp.parallelize(model, mesh["sp"], stages, gather_output=last)
    model.register_forward_hook(lambda module, args, output: dsp.hand_over(output))
    if sharded:
        for part in (*own, model):
            fully_shard(part, mesh=mesh["dp", "sp"])
    bare = nn.Sequential(*(parts[i] for i in range(2) if i * n // 2 == pp))
    given = {"input": Shard(2)} if pp else {}
    each = x.chunk(sizes["dp"])[dp].chunk(2)[0].clone().requires_grad_(pp > 0)
    plan = dsp.plan(bare, each, size=sizes["sp"], stages=stages, gather_output=last, given=given)
    stage = PipelineStage(
        model, pp, n, torch.device("cpu"), group=mesh.get_group("pp"), get_mesh=lambda *_: mesh["sp"]
    )  # fmt: skip
    steps = schedule(stage, n_microbatches=2, loss_fn=F.mse_loss)
    for inferred in (False, True):  # the first step runs the forward once more, for the shapes
        model.zero_grad()
        losses: list[Tensor] = []
        mine = x.chunk(sizes["dp"])[dp], y.chunk(sizes["dp"])[dp]
        with dsp.count_comm() as comm, Heard() as heard:
            steps.step(*([mine[0]] if pp == 0 else []), **({"target": mine[1], "losses": losses} if last else {}))
        assert not heard.texts  # each rank sent what its plan says of it
        for phase, planned in plan.bytes.items() if inferred else ():
            sent = torch.tensor(sum(getattr(comm, phase).bytes[kind] for kind in OURS))
            dist.all_reduce(sent, dist.ReduceOp.MAX, group=mesh.get_group("sp"))
            assert (planned > 0) == (phase != "recompute")
            assert sent == 2 * planned, (phase, comm, plan.bytes)
        if last:
            loss = torch.stack(losses).mean()
            dist.all_reduce(loss, group=mesh.get_group("dp"))
            torch.testing.assert_close(loss / sizes["dp"], expect.detach(), **EXACT)
        if not sharded:
            average(model.parameters(), mesh)
        same(model, bare)


def over(dp: int, pp: int, sp: int, tp: int) -> dict[str, int]:
    return {"dp": dp, "pp": pp, "sp": sp, "tp": tp}


@pytest.mark.parametrize(
    ("sizes", "schedule", "sharded"),
    [
        (over(1, 2, 2, 1), Schedule1F1B, False),
        slow(over(1, 1, 2, 2), ScheduleGPipe, True),
        slow(over(1, 2, 2, 1), ScheduleGPipe, True),
        slow(over(1, 2, 2, 2), ScheduleGPipe, False),
        slow(over(1, 2, 2, 2), Schedule1F1B, True),
        slow(over(2, 1, 2, 2), ScheduleGPipe, False),
        slow(over(2, 2, 2, 1), Schedule1F1B, True),
    ],
)
def test_the_axes_together(whole_world, sizes: dict[str, int], schedule: Any, sharded: bool) -> None:
    ranks = sizes["dp"] * sizes["pp"] * sizes["sp"] * sizes["tp"]
    whole_world(beside, ranks, sizes, schedule, sharded)


class Embedded(nn.Module):
    """A model whose input is what tensor parallelism returns, a tensor that may still be on its way."""

    def __init__(self, heads: int = -1) -> None:
        super().__init__()
        self.embed, self.part = MLP(), Part(heads)

    def forward(self, x: Tensor) -> Tensor:
        return self.part(self.embed(x))


def two_axes() -> DeviceMesh:
    return init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "sp", "tp"))


def around(_: Any, heads: int, early: bool) -> None:
    """Tensor parallelism in front of the model and in its stages, set up before `parallelize` or after it."""
    mesh = two_axes()
    torch.manual_seed(0)
    single, model = Embedded(heads).double(), Embedded(heads // 2 if heads > 0 else heads).double()
    model.load_state_dict(single.state_dict())
    parallelize_module(model.embed, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if early:
        tensor_parallel(model.part, mesh["tp"])
    dsp.parallelize(model.part, mesh["sp"], gather_output=False)
    if not early:
        tensor_parallel(model.part, mesh["tp"])
    x = torch.randn(2, 5, 7, C).double()
    expect = single(x).square().mean()
    expect.backward()
    for _ in range(3):
        model.zero_grad()
        loss = dsp.mean(model(x).square())
        loss.backward()
        assert model.part.kind is Carrier  # and nothing that each use would ask whether it is there
        torch.testing.assert_close(loss, expect, **EXACT)
        average(model.parameters(), mesh)
        same(model, single)


@pytest.mark.parametrize(("heads", "early"), [(-1, False), (4, True), slow(-1, True)])
def test_tensor_parallelism_around_stages(whole_world, heads: int, early: bool) -> None:
    whole_world(around, 4, heads, early)


def refused(_: Any) -> None:
    mesh = two_axes()
    torch.manual_seed(0)
    x = torch.randn(2, 5, 7, C)
    between = Part()
    tensor_parallel(between, mesh["tp"])
    stages = {name: pattern for name, pattern in Part.stages.items() if name != "mlp"}
    dsp.parallelize(between, mesh["sp"], stages)
    with pytest.raises(GlueError, match=r"A module whose weights are on another mesh.* must be a stage or inside of"):
        between(x)

    cut = Part()
    style = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(0), use_local_output=True)
    parallelize_module(cut.mlp, mesh["tp"], style)
    dsp.parallelize(cut, mesh["sp"], stages)
    with pytest.raises(GlueError, match=r"a hook between stages.* name it in stages"):
        cut(x)

    other = Part()
    tensor_parallel(other, mesh["tp"])
    with torch.no_grad():
        other.time.q.weight.to_local().add_(mesh["sp"].get_local_rank())
    dsp.parallelize(other, mesh["sp"])
    with pytest.raises(RuntimeError, match=r"hold different weights: time\.q\.weight"):
        other(x)


def test_impossible_axes_are_refused(whole_world) -> None:
    whole_world(refused, 4)
