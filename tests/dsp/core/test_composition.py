"""parallelize beside what users combine it with: FSDP2, DDP, dp x sp, compile, sharded inputs, randomness, errors."""

from __future__ import annotations

import copy
import dataclasses
import shutil
import warnings
from collections import UserDict
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint

import dsp
from dsp.stages.stage import find_modules
from tests.support import toys
from tests.support.parity import (
    assert_close_named,
    assert_parallel_equal,
    assert_step_equal,
    averaged,
    unsharded,
    weighted,
)
from tests.support.records import stage_turns
from tests.support.refusals import refused
from tests.support.runs import Heard
from tests.support.slow import long, slow


def pair(build: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    single = build().double()
    return single, copy.deepcopy(single)


def fsdp(mesh: DeviceMesh, name: str, root_only: bool, ckpt: bool, gather: bool) -> None:
    """sp ranks share the parameters; gradients come back averaged over them."""
    single, model = toys.make(name), dsp.parallelize(toys.make(name), mesh, gather_output=gather)
    for block in [m for c in model.children() if isinstance(c, nn.ModuleList) for m in c]:
        if ckpt:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        if not root_only:
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for comm in assert_step_equal(
        single, model, mesh, toys.inputs(name, 1, 7, 5), gradients=unsharded, rounds=2, count=True
    ):
        assert comm.recompute.calls["switch"] == 0


@pytest.mark.parametrize(("root_only", "ckpt"), [(False, True), slow(True, False)])
def test_fsdp(ranks, root_only: bool, ckpt: bool) -> None:
    ranks(fsdp, 4, "Grid", root_only, ckpt, root_only)
    ranks(fsdp, 3, "Folded", root_only, ckpt, False)


class Layered(nn.Module):
    """Glue modules that hold stages, and parameters of their own: what `fully_shard` meets in a real model."""

    stages = {"": "x=b t s c -> b t s c", "layers.*.space": "b t [s c]", "layers.*.time": "b [t] s [c]"}

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.space, self.time, self.gate = toys.Along(2), toys.Along(1), nn.Linear(toys.C, toys.C)

        def forward(self, x: Tensor) -> Tensor:
            return self.time(x + torch.sigmoid(self.gate(x)) * self.space(x))

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class Doubled(Layered):
    def forward(self, x: Tensor) -> Tensor:
        return Twice.apply(super().forward(x))


def test_a_function_of_autograd_at_the_end() -> None:
    """As fully_shard puts there. Some versions of torch forget what is behind it once its output is gone."""
    with pytest.raises(dsp.GlueError, match=r"the autograd.Function Twice between stages"):
        dsp.plan(Doubled(), torch.randn(1, 7, 5, toys.C), size=2)


class Reversed(torch.autograd.Function):
    """A view of its argument, whose gradient is another one's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dims: tuple[int, ...]) -> Tensor:
        ctx.dims = dims
        return x.transpose(*dims) if dims else x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return -2 * (grad.transpose(*ctx.dims) if ctx.dims else grad), None


@pytest.mark.parametrize("mesh", [3])
@pytest.mark.parametrize("dims", [(), (0, 2)])
def test_an_autograd_function_between_stages_is_refused(mesh: DeviceMesh, dims: tuple[int, ...]) -> None:
    """Its output, if moved as a view of its argument, would leave out the function's own backward."""

    def glue(m: toys.SpaceTime, x: Tensor) -> list[Tensor]:
        y = m.space(x) * 1
        z = Reversed.apply(y, dims).flatten(1, 2)
        return [y.flip(2), z.cumsum(0).cumsum(1), Reversed.apply(m.time(y), ())]

    x = torch.randn(2, 7, 5, toys.C, dtype=torch.float64, requires_grad=True)
    model = dsp.parallelize(toys.SpaceTime(glue).double(), mesh)
    refused("the autograd.Function Reversed between stages", model, x, error=dsp.GlueError)


class Remembered(torch.autograd.Function):
    """It looks at its result in another layout before that has a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x * 3
        ctx.sums = y.detach().cumsum(1)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3


@pytest.mark.parametrize("mesh", [3])
def test_a_copy_from_before_there_was_a_gradient_is_made_again(mesh: DeviceMesh) -> None:
    x = torch.randn(2, 7, 5, toys.C, dtype=torch.float64, requires_grad=True)
    single = toys.SpaceTime(lambda m, x: Remembered.apply(m.space(x))).double()
    refused("the autograd.Function Remembered", dsp.parallelize(single, mesh), x, error=dsp.GlueError)


class Compared(nn.Module):
    """A loss round a model that leaves another dim sharded than the target has: glue that the plan moves."""

    stages = {"": "x=b t s c, y=b t s c -> b t s c", "model.layers.*.space": "b t [s c]"}
    stages |= {"model.layers.*.time": "b [t] s [c]"}

    def __init__(self) -> None:
        super().__init__()
        self.model = Layered()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.model(x) - y) ** 2


@pytest.mark.parametrize("mesh", [3])
def test_fsdp_where_glue_moves(mesh: DeviceMesh) -> None:
    """The operations of glue are found by their number, and those of fully_shard are none of them."""
    single, model = pair(Compared)
    x = torch.randn(2, 1, 7, 5, toys.C).double()
    dsp.parallelize(model, mesh, gather_output=False)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model.model, mesh=mesh)
    assert_step_equal(
        single, model, mesh, tuple(x), tuple(dsp.split(y, mesh, 1) for y in x), gradients=unsharded, rounds=2
    )


@pytest.mark.parametrize("mesh", [4])
@pytest.mark.parametrize(("reshard", "ckpt"), [(False, True), slow(True, False)])
def test_fsdp_around_glue_modules(mesh: DeviceMesh, reshard: bool, ckpt: bool) -> None:
    single, model = pair(Layered)
    dsp.parallelize(model, mesh, gather_output=False)
    for layer in model.layers:
        if ckpt:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh)
    assert_step_equal(single, model, mesh, (torch.randn(1, 7, 5, toys.C).double(),), gradients=unsharded, rounds=2)


def test_mixed_precision_moves_half_the_bytes(mesh: DeviceMesh) -> None:
    model = toys.make("Grid").float()
    dsp.parallelize(model, mesh, gather_output=False)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in [*model.space, *model.time]:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    kwargs = {k: v.float() for k, v in toys.inputs("Grid", 1, 7, 5).items()}
    with dsp.count_comm() as comm, Heard() as heard:
        out = model(**kwargs)
        loss = dsp.mean(out.float() if not isinstance(out, DTensor) else out)
        loss.backward()
    assert not heard.texts, heard.texts  # it sends what its plan says: that is made in bf16, too
    assert out.dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    single = toys.make("Grid").float()
    expect = single(**kwargs).mean()
    torch.testing.assert_close(loss, expect, atol=3e-2, rtol=3e-2)
    # the producer switches in its own dtype: bf16
    moved = torch.tensor(comm.forward.bytes["switch"])
    dist.all_reduce(moved, group=mesh.get_group())
    m = 7 * 5 * toys.C * 2
    assert moved <= 4 * m


@pytest.mark.parametrize("casts", ["of outputs", "of a layer", slow("of inputs"), slow("unknown")])
def test_mixed_precision_between_stages_is_planned(mesh: DeviceMesh, casts: str) -> None:
    """Casts of what stages are given and return, of layers between them, and one there that changes a type."""
    model = Layered()
    dsp.parallelize(model, mesh, gather_output=False)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    wide = dataclasses.replace(policy, output_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer.space, mesh=mesh, mp_policy=wide if casts == "of outputs" else policy)
        fully_shard(layer.time, mesh=mesh, mp_policy=wide if casts == "unknown" else policy)
        if casts in ("of a layer", "unknown"):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    with Heard() as heard:
        for _ in range(2):
            x = torch.randn(1, 7, 6, toys.C, generator=torch.Generator().manual_seed(1))
            dsp.mean(model(x).float()).backward()
    assert bool(heard.texts) == (casts == "unknown" and mesh.get_local_rank() == 0), heard.texts


@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("mesh", [2, 3])
def test_inputs_that_arrive_sharded(mesh: DeviceMesh, dim: int) -> None:
    kwargs = toys.inputs("Grid", 2, 7, 5)
    single, model = toys.make("Grid"), dsp.parallelize(toys.make("Grid"), mesh, gather_output=False)
    x, given = kwargs["x"].clone().requires_grad_(), dsp.split(kwargs["x"], mesh, dim).requires_grad_()
    expect, out = single(x, kwargs["cond"]), model(given, kwargs["cond"])
    for y in (expect, out):
        weighted(y).backward()
    torch.testing.assert_close(dsp.gather(out), expect)
    assert_close_named(averaged(model, mesh), {n: p.grad for n, p in single.named_parameters()})
    torch.testing.assert_close(given.grad.full_tensor(), x.grad)


def by_hand(x: DTensor) -> DTensor:
    local = x.to_local() * 1
    return DTensor.from_local(local, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride())


@pytest.mark.parametrize("mesh", [3])
@pytest.mark.parametrize("road", ["sharded", "split", "computed on", "by hand", "handed over", "cut"])
def test_models_in_a_row(mesh: DeviceMesh, road: str) -> None:
    """Two models in a row, and what the second one's input is to the first: gradients of every parameter."""
    kwargs = toys.inputs("Grid", 2, 7, 5)
    x, cond = kwargs["x"], kwargs["cond"]
    singles, models = ([toys.make("Grid"), toys.make("Grid")] for _ in range(2))
    weighted(singles[1](singles[0](x, cond), cond)).backward()
    dsp.parallelize(models[1], mesh)
    if road == "split":
        middle = dsp.split(models[0](x, cond), mesh, 1)
    else:
        middle = dsp.parallelize(models[0], mesh, gather_output=False)(x, cond)
    if road in ("computed on", "by hand"):
        middle = torch.tanh(torch.atanh(middle / 100)) * 100 if road == "computed on" else by_hand(middle)
    elif road == "handed over":
        middle = dsp.hand_over(middle)
    elif road == "cut":  # as a pipeline does it
        received = middle.detach().requires_grad_()
        weighted(models[1](received, cond)).backward()
        torch.autograd.backward(dsp.hand_over(middle), received.grad)
        assert received.grad.placements == middle.placements
    if road != "cut":
        weighted(models[1](middle, cond)).backward()
    for model, single in zip(models, singles):
        assert_close_named(averaged(model, mesh), {n: p.grad for n, p in single.named_parameters()})


@pytest.mark.parametrize("mesh", [3])
@pytest.mark.parametrize("road", ["split", "from_local", "fully_shard"])
def test_gradients_of_sharded_leaves(mesh: DeviceMesh, road: str) -> None:
    """A gradient asked of an input is the true one, however it comes to be sharded."""
    kwargs = toys.inputs("Grid", 2, 7, 5)
    single, model = toys.make("Grid"), toys.make("Grid")
    x = kwargs["x"].clone().requires_grad_()
    weighted(single(x, kwargs["cond"])).backward()
    expect = dsp.split(x.grad, mesh, 1).to_local()
    dsp.parallelize(model, mesh)
    if road == "fully_shard":
        fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32))
    if road == "split":
        leaf = kwargs["x"].clone().requires_grad_()
        given, expect = dsp.split(leaf, mesh, 1), x.grad
    else:
        leaf = dsp.split(kwargs["x"], mesh, 1).to_local().clone().requires_grad_()
        given = DTensor.from_local(leaf, mesh, [Shard(1)], run_check=False, shape=x.shape, stride=x.stride())
    weighted(model(given, kwargs["cond"])).backward()
    rounding = {"rtol": 1e-3, "atol": 1e-6} if road == "fully_shard" else {}
    torch.testing.assert_close(leaf.grad, expect, **rounding)


@pytest.mark.parametrize("mesh", [3])
def test_handing_over_sends_nothing(mesh: DeviceMesh) -> None:
    x = torch.randn(2, 7, 3, dtype=torch.float64, requires_grad=True)
    with dsp.count_comm() as comm:
        y = dsp.hand_over(dsp.split(x * 1, mesh, 1))
    assert not comm.forward.bytes
    assert y.placements == (Shard(1),)
    assert y.shape == x.shape
    assert dsp.hand_over(x) is x
    with pytest.raises(ValueError, match="hand_over: the tensor is"):
        dsp.hand_over(DTensor.from_local(x.detach(), mesh, [Replicate()], run_check=False))


def compiled(mesh: DeviceMesh, backend: str, how_made: str) -> None:
    kwargs = toys.inputs("Grid", 1, 7, 5)
    single, model = toys.make("Grid"), toys.make("Grid")
    rounding: dict[str, float] = {}
    runs = list[bool]()
    torch._dynamo.reset()  # other tests have compiled the same forward

    def eager(graph: Any, example: Any) -> Any:
        return lambda *args: (runs.append(True), graph.forward(*args))[1]

    how: Any = eager if backend == "eager" else backend
    if backend == "inductor":  # before torch 2.13 it compiles no attention in float64 on CPU
        single, model, rounding = single.float(), model.float(), {"rtol": 1e-4, "atol": 1e-5}
        kwargs = {name: x.float() for name, x in kwargs.items()}

    def gradients(*of: Any) -> dict[str, Tensor]:
        return {n.replace("_orig_mod.", ""): g for n, g in averaged(*of).items()}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        if how_made == "compile() before":
            for block in [*model.space, *model.time]:
                block.compile(backend=how)
        if how_made == "wrapped":
            for group in (model.space, model.time):
                for i, block in enumerate(group):
                    group[i] = torch.compile(block, backend=how)
        dsp.parallelize(model, mesh, gather_output=False)
        for block in [*model.space, *model.time]:
            if how_made == "compile() after":
                block.compile(backend=how)
            elif how_made == "forward":
                block.forward = torch.compile(block.forward, backend=how)
        assert_step_equal(single, model, mesh, kwargs, gradients=gradients, **rounding)
    assert runs or backend != "eager"


# inductor builds C++ on CPU: half a minute of it where nothing is cached
BACKENDS = ["eager", *([long("inductor")] if shutil.which("g++") else [])]


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_forward_of_stages(ranks, backend: str) -> None:
    if backend == "inductor" and torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        from torch._inductor.cpu_vec_isa import pick_vec_isa

        if not pick_vec_isa():
            pytest.skip("for a CPU without vector units inductor writes C++ that does not compile")
    ranks(compiled, 2, backend, "forward")


@pytest.mark.parametrize("how_made", ["wrapped", "compile() before", "compile() after"])
def test_compiled_stage_modules(mesh: DeviceMesh, how_made: str) -> None:
    compiled(mesh, "eager", how_made)


@pytest.mark.parametrize("how_made", ["module", "forward"])
def test_modules_compiled_between_stages_run_uncompiled(mesh: DeviceMesh, how_made: str) -> None:
    stages = {"": "x=b t s c", "space": "b t [s c]", "time": "b [t] s [c]"}
    middle = nn.Linear(toys.C, toys.C)
    single, model = pair(lambda: toys.SpaceTime(lambda m, x: m.time(m.mid(m.space(x) * 2)), mid=middle))
    if how_made == "module":
        model.mid = torch.compile(model.mid, backend="eager")
    else:
        model.mid.forward = torch.compile(model.mid.forward, backend="eager")
    x = torch.randn(1, 7, 5, toys.C).double()
    assert dsp.plan(model, (x,), size=2, stages=stages).compiled == ["mid"]
    dsp.parallelize(model, mesh, stages)
    if how_made == "forward":
        assert_step_equal(single, model, mesh, (x,), rounds=2)
    torch.testing.assert_close(model(x), single(x))


def test_modules_compiled_in_place_are_refused_with_advice(mesh: DeviceMesh) -> None:
    """A module between stages that compile() compiled is refused, with what to compile instead."""
    kwargs = toys.inputs("Grid", 1, 7, 5)
    model = toys.make("Grid")
    dsp.parallelize(model, mesh, gather_output=False)
    model.space.compile(backend="eager")
    with pytest.raises(RuntimeError, match=r"'space' was compiled .* its stages instead \(space.0, space.1\), or"):
        model(**kwargs)
    bare = toys.make("Grid")
    bare.space[0].compile(backend="eager")
    dsp.parallelize(bare, mesh, {"": "x=b t s c", "time.*": "b [t] s c"}, gather_output=False)
    with pytest.raises(RuntimeError, match=r"'space.0' was compiled .* name it in stages, .* compile=True, for"):
        bare(**kwargs)


def test_a_compiled_stage_that_raises_leaves_nothing_open(mesh: DeviceMesh) -> None:
    """A compiled stage that raises leaves a model that can be called again; and a copy of the model has its hooks."""
    kwargs = toys.inputs("Grid", 1, 7, 5)
    single, model = toys.make("Grid"), toys.make("Grid")
    torch._dynamo.reset()  # other tests have compiled the same forward
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.space[0].compile(backend="eager")
        dsp.parallelize(model, mesh, gather_output=False)
        assert_step_equal(single, model, mesh, kwargs)
        call, model.space[0]._compiled_call_impl.call = model.space[0]._compiled_call_impl.call, lambda *_, **__: 1 / 0
        with pytest.raises(ZeroDivisionError) as caught:
            model(**kwargs)
        assert not getattr(caught.value, "__notes__", [])  # in a stage tensors are plain
        model.space[0]._compiled_call_impl.call = call
        for m in (single, model):
            m.zero_grad()
        assert_step_equal(single, model, mesh, kwargs)
        again = copy.deepcopy(model)
        for m in (single, again):
            m.zero_grad()
        assert_step_equal(single, again, mesh, kwargs)


def test_patterns_name_what_they_named_before_a_wrapper_came() -> None:
    compiled = partial(torch.compile, backend="eager")
    model, patterns = toys.make("Grid"), {**toys.Grid.stages, "space.*.norm": "b t s [c]"}
    expect = [name for name, *_ in find_modules(model, patterns)]
    model.space[0], model.time = (compiled(m) for m in (model.space[0], model.time))
    model.space[1] = checkpoint_wrapper(model.space[1])
    assert [name for name, *_ in find_modules(compiled(model), patterns)] == expect


class Remembers(nn.Module):
    """Keeps what it has computed of positions, as rotary embeddings do: every call but the first does less."""

    stages = {"": "x=b s c"}

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.table = nn.Linear(toys.C, 3 * toys.C), torch.empty(0)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        if not len(self.table):
            at = torch.arange(x.shape[1], dtype=x.dtype)
            self.table = torch.cat([torch.outer(at, f).sin() for f in (at[: toys.C // 2], at[: toys.C // 2] + 1)], 1)
        q, k, v = self.qkv(torch.cat([text, x * self.table], 1)).chunk(3, -1)
        return x + F.scaled_dot_product_attention(q, k, v)[:, text.shape[1] :]


def sent_by_call(mesh: DeviceMesh) -> list[int]:
    inputs = torch.randn(1, 10, toys.C).double(), torch.randn(1, 6, toys.C).double()
    steps = assert_parallel_equal(Remembers().double(), mesh, inputs, rounds=4, count=True)
    return [sum(comm.forward.bytes.values()) for comm in steps]


@pytest.mark.parametrize("n", [2, 3])
def test_a_forward_that_does_less_from_the_second_call_on(ranks, n: int) -> None:
    """The plan is of the first call. The second goes its own way and the third is recorded: as cheap as at first."""
    sent = torch.tensor(ranks(sent_by_call, n)).amax(0).tolist()
    assert sent[3] == sent[0]


def noisy(m: toys.SpaceTime, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    shared = torch.rand(3)
    y = m.space(x)
    return F.dropout(torch.ones_like(y), 0.5, m.training), y - x, shared


def randomness(mesh: DeviceMesh) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(mesh.get_local_rank())  # ranks start apart: glue must agree nevertheless
    model = toys.SpaceTime(noisy, space=toys.Along(2, dropout=0.5)).train()
    for p in model.parameters():
        nn.init.constant_(p, 0.3)
    dsp.parallelize(model, mesh)
    x = torch.linspace(0, 1, 4 * 8 * 5 * toys.C).view(4, 8, 5, toys.C)
    with torch.no_grad():
        mask, y, shared = model(x)
        again = model(x)[0]
    return mask, y, shared, again


def test_randomness(ranks) -> None:
    results = ranks(randomness, 2)
    for a, b in zip(*results):
        torch.testing.assert_close(a, b)  # gathered, and what glue draws: the same on every rank
    mask, y, _, again = results[0]
    assert 0.4 < (mask > 0).float().mean() < 0.6
    assert not torch.equal(mask[:, :4], mask[:, 4:])  # each rank's mask is its own
    assert not torch.equal((y == 0)[:, :4], (y == 0)[:, 4:])
    assert not torch.equal(mask, again)


class Draws(nn.Module):
    """Draws between stages: dropout inside attention, noise filled in, and by a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = x.softmax(-1)
        out = F.scaled_dot_product_attention(y, y, y, dropout_p=0.5), torch.empty_like(y).normal_()
        g = {"generator": self.generator}
        return *out, torch.rand(3), torch.randn_like(y, **g), torch.normal(y, y, **g), torch.bernoulli(y, **g)


def drawn(mesh: DeviceMesh) -> tuple[list[Tensor], list[Tensor]]:
    x = torch.ones(5, 3, 4)
    model = dsp.parallelize(Draws(), mesh, {"": "x=n b c"})
    return [*model(x)], [*model(x)]


def test_attention_with_dropout_and_generators_draw_as_on_one_process(ranks) -> None:
    """Uneven parts: the stream of all moves on alike on every rank, and that of a generator as on one process."""
    alone, found = Draws(), ranks(drawn, 2)
    for step in range(2):
        dropped, noise, *_, a, b, c = found[0][step]
        for here, there in zip(found[0][step], found[1][step]):
            torch.testing.assert_close(here, there, rtol=0, atol=0)
        torch.testing.assert_close((a, b, c), alone(torch.ones(5, 3, 4))[3:])
        assert not any(torch.equal(t[:2], t[3:]) for t in (dropped, noise))


class ReadsAndDraws(nn.Module):
    """A forward that reads its data, so that its first call has no plan, and draws if `p` is not 0."""

    p = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.p) if bool((x > 0).any()) else x


def test_a_forward_that_draws_nothing_leaves_the_generator_as_it_was(mesh: DeviceMesh) -> None:
    model = dsp.parallelize(ReadsAndDraws(), mesh, {"": "x=n c"})
    for p in (0.0, 0.0, 0.5):
        model.p, before = p, torch.get_rng_state()
        model(torch.ones(5, 3))
        assert torch.equal(torch.get_rng_state(), before) == (p == 0)


# --- what must be refused ---------------------------------------------------------------------------------------------


def differing(how: str, rank: int) -> dict[str, Tensor]:
    """Inputs of which rank 1 has other ones."""
    kwargs = toys.inputs("Grid", 1, 4 + (rank if how == "shapes" else 0), 4)
    if how == "values":
        kwargs["x"] += rank * 1e-9
    return kwargs | {"x": kwargs["x"].flip(1)} if how == "order" and rank else kwargs


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("values", "different inputs.*other values of 'x'"),
        ("order", "different inputs.*other values of 'x'"),
        ("shapes", "different shapes"),
    ],
)
def test_ranks_that_hold_different_inputs(mesh: DeviceMesh, how: str, says: str) -> None:
    model = dsp.parallelize(toys.make("Grid"), mesh)
    model(**toys.inputs("Grid", 1, 4, 4))
    with pytest.raises(RuntimeError, match=says):
        model(**differing(how, mesh.get_local_rank()))
        model(**toys.inputs("Grid", 1, 4, 4))


def test_ranks_that_hold_different_floats(mesh: DeviceMesh) -> None:
    model = dsp.parallelize(toys.Does(lambda m, x, share: x * share), mesh, {"": "x=b t"})
    for share in (0.5, 0.25):
        torch.testing.assert_close(model(torch.ones(2, 4), share), torch.full((2, 4), share))
    with pytest.raises(RuntimeError, match="different inputs"):
        model(torch.ones(2, 4), 1.0 + mesh.get_local_rank())
        model(torch.ones(2, 4), 0.5)


def test_a_list_that_the_forward_fills_is_the_callers(mesh: DeviceMesh) -> None:
    model = dsp.parallelize(toys.Does(lambda m, x, found: found.append(x.mean()) or x * 2), mesh, {"": "x=b t"})
    for asks in (False, True, True):
        found: list[Tensor] = []
        model(torch.ones(2, 4, requires_grad=asks), found)
        assert [t.item() for t in found] == [1.0]


def test_refused_in_plain_words(mesh: DeviceMesh) -> None:
    """Those that docs/troubleshooting.md does not show."""
    grid = toys.make("Grid")
    with pytest.raises(dsp.NotationError, match="lies inside stage"):
        dsp.parallelize(grid, mesh, {"space.*": "b t [s c]", "space.*.norm": "b t s [c]"})
    with pytest.raises(dsp.NotationError, match="matched twice"):
        dsp.parallelize(grid, mesh, {"space.*": "b t [s c]", "space.0": "b [t] s [c]"})
    with pytest.raises(TypeError, match="DeviceMesh"):
        dsp.parallelize(grid, None)
    with pytest.raises(dsp.NotationError, match="no stages attribute"):
        dsp.parallelize(nn.Linear(2, 2), mesh)
    with pytest.raises(dsp.NotationError, match="stages must be a dict"):
        dsp.parallelize(grid, mesh, {})

    kwargs = toys.inputs("Grid", 1, 4, 4)
    for stages, message in [
        ({"": "x=b t c", "space.*": "b t [s c]"}, "3 axes .* but the tensor has 4"),
        ({"": "x=b t s c", "space.*": "b t [s c] -> (b t) [s c]"}, "output pattern"),
        ({"": "x=b t s c", "space.*": "(b t) z [s c]"}, "cannot tell|does not fit|is not"),
    ]:
        model = dsp.parallelize(toys.make("Grid"), mesh, stages)
        with pytest.raises(dsp.NotationError, match=message):
            model(**kwargs)

    x = kwargs["x"]
    for glue, word in [
        (lambda y: torch.exp(y, out=torch.zeros_like(y)), r"exp\(.*out="),
        (lambda y: y.sum().backward() or y, r"backward\(\) inside a parallelized forward"),
    ]:
        model = dsp.parallelize(toys.Glued(glue).double(), mesh)
        with pytest.raises(dsp.GlueError, match=word):
            model(x)
    with pytest.raises(dsp.NotationError, match="inside the list 'others'"):
        dsp.parallelize(toys.SpaceTime(lambda m, x: m.space(x * 2, [x * 2]), space=Listed()), mesh)(x)
    again = dsp.parallelize(toys.make("Grid"), mesh)
    with pytest.raises(ValueError, match="already parallelized"):
        dsp.parallelize(again, mesh)


class Raises(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if not x._is_view() and type(x).__name__ == "FakeTensor":
            return x
        raise KeyboardInterrupt


def test_nothing_is_left_after_an_exception(mesh: DeviceMesh) -> None:
    """An exception inside a stage leaves nothing behind."""
    model = toys.make("Grid")
    single = toys.make("Grid")
    dsp.parallelize(model, mesh)
    kwargs = toys.inputs("Grid", 1, 4, 4)
    block = model.time[0]
    block.out, kept = nn.Linear(3, 3).double(), block.out
    for _ in range(2):
        with pytest.raises(RuntimeError):
            model(**kwargs)
    assert torch.overrides._get_current_function_mode() is None
    block.out = kept
    torch.testing.assert_close(model(**kwargs), single(**kwargs))
    block.out = Raises()
    with pytest.raises(KeyboardInterrupt):
        model(**kwargs)
    block.out = kept
    torch.testing.assert_close(model(**kwargs), single(**kwargs))


def test_models_inside_models(mesh: DeviceMesh) -> None:
    """Two parallelized models, one inside the other: the outermost governs; each also runs alone."""

    class Objective(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model
            self.stages = {f"model.{k}": v for k, v in model.stages.items() if k}
            self.stages[""] = "x=b t s c, noise=b t s c -> b t s c"

        def forward(self, x: Tensor, noise: Tensor, cond: Tensor) -> Tensor:
            return (self.model(x + noise, cond) - noise).square()

    kwargs = toys.inputs("Grid", 1, 7, 5)
    noise = torch.randn_like(kwargs["x"])
    single = Objective(toys.make("Grid"))
    model = toys.make("Grid")
    objective = dsp.parallelize(Objective(model), mesh, gather_output=False)
    dsp.parallelize(model, mesh)
    assert_step_equal(single, objective, mesh, {"noise": noise, **kwargs}, loss=dsp.mean)
    torch.testing.assert_close(model(**kwargs), single.model(**kwargs))


@pytest.mark.parametrize("mesh", [3])
def test_a_model_inside_of_one_made_parallel_later_still_runs_alone(mesh: DeviceMesh) -> None:
    single = nn.Sequential(toys.Glued(lambda x: x.flip(1)), nn.Linear(toys.C, toys.C)).double()
    model, x = copy.deepcopy(single), torch.randn(1, 7, 5, toys.C, dtype=torch.float64)
    dsp.parallelize(model[0], mesh)
    dsp.parallelize(model, mesh, {"": "input=b t s c"})
    for _ in range(2):
        assert_step_equal(single, model, mesh, (x,))
        torch.testing.assert_close(model[0](x), single[0](x))


class Graph(toys.SpaceTime):
    """Messages along the edges of a graph of patches."""

    def __init__(self) -> None:
        super().__init__(lambda m, x, edges: m.time(torch.stack([torch.sparse.mm(edges, y) for y in x[0]])[None]))


def test_a_sparse_input_is_the_same_on_all_ranks(mesh: DeviceMesh) -> None:
    single, edges = Graph().double(), torch.randn(5, 5, dtype=torch.float64).relu()
    model, x = dsp.parallelize(copy.deepcopy(single), mesh), torch.randn(1, 7, 5, toys.C, dtype=torch.float64)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(model(x, edges.to_sparse()), single(x, edges.to_sparse()))
        with pytest.raises(RuntimeError, match="other values of 'args'"):
            for _ in range(2):
                model(x, (edges if mesh.get_local_rank() == 0 else edges.T).to_sparse())


@dataclasses.dataclass
class Condition:
    bias: Tensor


@pytest.mark.parametrize("holds", [Condition, UserDict, SimpleNamespace], ids=lambda holds: holds.__name__)
def test_a_leaf_in_an_object_is_refused_and_a_parameter_is_not(mesh: DeviceMesh, holds: Any) -> None:
    def shifted(m: toys.SpaceTime, x: Tensor, given: Any) -> Tensor:
        bias = given["bias"] if isinstance(given, UserDict) else given.bias
        return m.time(m.space(x) + bias)

    single = toys.SpaceTime(shifted, bias=nn.Parameter(torch.randn(toys.C))).double()
    model, x = dsp.parallelize(copy.deepcopy(single), mesh), torch.randn(1, 5, 7, toys.C, dtype=torch.float64)
    for m in (single, model):
        m(x, holds(bias=m.bias * 2)).square().mean().backward()
    assert_close_named(averaged(model, mesh), {n: p.grad for n, p in single.named_parameters()})
    with torch.no_grad():
        model(x, holds(bias=torch.randn(toys.C, dtype=torch.float64, requires_grad=True)))
    with pytest.raises(TypeError, match=f"a {holds.__name__}, holds a tensor of shape"):
        model(x, holds(bias=torch.randn(toys.C, dtype=torch.float64, requires_grad=True)))


def test_forward_mode_is_refused(mesh: DeviceMesh) -> None:
    model, x = dsp.parallelize(toys.Glued(), mesh), torch.randn(1, 7, 5, toys.C)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match="forward-mode AD"):
        model(x)


class Listed(nn.Module):
    """A stage that is given a list of what is sharded, which no pattern could name."""

    def forward(self, x: Tensor, others: list[Tensor]) -> Tensor:
        return x + others[0]


def test_a_list_that_a_stage_gets_may_hold_what_is_replicated(mesh: DeviceMesh) -> None:
    single = toys.SpaceTime(lambda m, x: m.time(m.space(x, [x.mean()])), space=Listed())
    assert_parallel_equal(single.double(), mesh, (torch.randn(1, 7, 5, toys.C, dtype=torch.float64),), rounds=2)


@pytest.mark.parametrize("inside", ["dict", "list in a dict"])
def test_a_leaf_in_a_dict_gets_its_true_gradient(mesh: DeviceMesh, inside: str) -> None:
    def shifted(m: toys.SpaceTime, x: Tensor, biases: dict[str, Any]) -> Tensor:
        return m.time(m.space(x) + (biases["all"] if inside == "dict" else biases["all"][0]))

    single, x = toys.SpaceTime(shifted).double(), torch.randn(1, 5, 7, toys.C, dtype=torch.float64)
    leaves = [torch.ones(toys.C, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    for m, leaf in zip((single, dsp.parallelize(copy.deepcopy(single), mesh)), leaves):
        m(x, {"all": leaf if inside == "dict" else [leaf]}).square().mean().backward()
    torch.testing.assert_close(leaves[1].grad, leaves[0].grad)


def test_gradients_of_inputs_are_in_the_plan(mesh: DeviceMesh) -> None:
    kwargs = {k: v.requires_grad_() for k, v in toys.inputs("Grid", 1, 8, 8).items()}
    plan = dsp.plan(toys.make("Grid"), kwargs=kwargs, size=mesh.size(), gather_output=False)
    loss = dsp.mean(dsp.parallelize(toys.make("Grid"), mesh, gather_output=False)(**kwargs))
    with dsp.count_comm() as comm:
        loss.backward()
    assert sum(comm.backward.bytes.values()) - 8 == plan.bytes["backward"]  # less the loss' own all-reduce


class Mixed(nn.Module):
    """A stage that has to run whole, and draws: its numbers must agree on every rank."""

    stages = {"": "x=b t s c -> b t s c", "space": "b t [s c]", "mix": "[b t s c]"}

    class Mix(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x, 0.5) + x.mean()

    def __init__(self) -> None:
        super().__init__()
        self.space, self.mix = toys.Along(2), self.Mix()

    def forward(self, x: Tensor) -> Tensor:
        return self.space(self.mix(self.space(x)))


def whole_randomness(mesh: DeviceMesh) -> Tensor:
    torch.manual_seed(1)
    model = dsp.parallelize(Mixed(), mesh)
    torch.manual_seed(mesh.get_local_rank())
    seen = []
    model.mix.register_forward_hook(lambda m, a, out: seen.append(out))
    with torch.no_grad():
        model(torch.ones(1, 6, 5, toys.C))
    return seen[-1]


def test_a_stage_run_whole_draws_the_same_on_every_rank(ranks) -> None:
    a, b = ranks(whole_randomness, 2)
    torch.testing.assert_close(a, b)
    assert (a != a[0, 0, 0, 0]).any()


def checkpointed(m: toys.SpaceTime, x: Tensor) -> Tensor:
    """Two stages in one function, and a checkpoint around both."""
    return m.space(checkpoint(lambda x: m.time(m.space(x)), m.space(x), use_reentrant=m.reentrant))


def edited(m: toys.SpaceTime, x: Tensor) -> Tensor:
    y = m.time(m.space(x))
    y *= 2
    y.add_(1)
    return m.space(y)


def test_a_checkpoint_around_two_stages_repeats_the_switch_between_them(mesh: DeviceMesh) -> None:
    x, single = torch.randn(1, 8, 8, toys.C).double(), toys.SpaceTime(checkpointed, reentrant=False).double()
    plan = dsp.plan(single, (x,), size=mesh.size(), gather_output=False)
    (comm,) = assert_parallel_equal(single, mesh, (x,), gather=False, count=True)
    assert plan.bytes["recompute"] == comm.recompute.bytes["switch"]
    assert [phase.calls["switch"] for phase in (comm.forward, comm.backward, comm.recompute)] == [2, 2, 1]


class Outer(nn.Module):
    """A larger model of which one part, under an activation checkpoint, is made parallel."""

    def __init__(self, forward: Any) -> None:
        super().__init__()
        self.first, self.part = nn.Linear(toys.C, toys.C), toys.SpaceTime(forward, reentrant=False)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.part, self.first(x).tanh(), use_reentrant=False)


def led_by_data(m: toys.SpaceTime, x: Tensor) -> Tensor:
    return m.time(m.space(x)) if float(x.detach().sum()) < 1e9 else x


@pytest.mark.parametrize("forward", [checkpointed, edited, led_by_data])
def test_a_checkpoint_around_the_whole_model(mesh: DeviceMesh, forward: Any) -> None:
    single = Outer(forward).double()
    model = copy.deepcopy(single)
    dsp.parallelize(model.part, mesh)
    assert_step_equal(single, model, mesh, (torch.randn(1, 5, 7, toys.C).double(),), rounds=2)


def nested(m: toys.SpaceTime, x: Tensor) -> Tensor:
    """Checkpoints three deep, of which each hands on what it makes; the second begins with the third."""
    again = partial(checkpoint, use_reentrant=False)
    inner = partial(again, lambda x: m.space(x.softmax(2)).softmax(1))
    return again(lambda x: again(lambda y: m.time(inner(y).sin()), x.sin()).cumsum(1), m.space(x))


def kept_elsewhere(m: toys.SpaceTime, x: Tensor) -> Tensor:
    """A checkpoint whose argument is kept by the hooks of somebody else, such as those that bring it to the host."""
    x = m.space(x)
    with torch.autograd.graph.saved_tensors_hooks(Tensor.clone, lambda x: x):
        return checkpoint(lambda x: m.time(x.softmax(1)), x, use_reentrant=False)


@pytest.mark.parametrize("mesh", [3])
@pytest.mark.parametrize("build", [nested, kept_elsewhere])
def test_the_arguments_of_a_checkpoint_stay_sharded_whoever_keeps_them(mesh: DeviceMesh, build: Any) -> None:
    x = torch.randn(1, 7, 5, toys.C, dtype=torch.float64, requires_grad=True)
    assert_parallel_equal(toys.SpaceTime(build).double(), mesh, (x,), rounds=2)


class Masked(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return (x * mask[..., None]).sin()


class MaskedBlock(nn.Module):
    """A checkpoint of two stages that read a mask, an input of the model."""

    stages = {"": "x=b t s c, mask=b t s", "space": "b t [s c], mask=b t s", "time": "b [t] s [c], mask=b t s"}

    def __init__(self) -> None:
        super().__init__()
        self.space, self.time = Masked(), Masked()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return checkpoint(lambda x, m: self.time(self.space(x, m), mask) + m[..., None], x, mask, use_reentrant=False)


def test_a_recomputation_finds_the_plan_of_stages_that_read_sharded_inputs(mesh: DeviceMesh) -> None:
    model = dsp.parallelize(MaskedBlock(), mesh, gather_output=False)
    x = torch.randn(1, 7, 5, toys.C, requires_grad=True)
    with pytest.MonkeyPatch.context() as patch:
        turns = stage_turns(patch)
        for _ in range(2):
            dsp.mean(model(dsp.split(x, mesh, 1), dsp.split(torch.rand(1, 7, 5), mesh, 1))).backward()
    assert turns == [0, 1] * 4


def test_reentrant_checkpointing_is_refused(mesh: DeviceMesh) -> None:
    model = dsp.parallelize(toys.SpaceTime(checkpointed, reentrant=True), mesh, gather_output=False)
    x = torch.randn(1, 8, 8, toys.C, requires_grad=True)
    with pytest.raises((RuntimeError, ValueError), match="use_reentrant=False"):
        dsp.mean(model(x)).backward()


class Doubling(nn.Module):
    """A caller that writes into the output: gathered it is an ordinary tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        out = self.model(x)
        out *= 2
        return out


def test_glue_and_callers_may_write_in_place(mesh: DeviceMesh) -> None:
    single, model = pair(lambda: Doubling(toys.SpaceTime(edited)))
    dsp.parallelize(model.model, mesh)
    assert_step_equal(single, model, mesh, (torch.randn(1, 7, 5, toys.C).double(),))
