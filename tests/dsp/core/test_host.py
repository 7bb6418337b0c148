"""Mistakes that the host language allows: ranks told different things, threads, copies, tests of a type."""

from __future__ import annotations

import copy
import functools
import pickle
import re
import threading
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import dsp
from dsp.core.carrier import Carrier
from dsp.guard.agreement import small
from dsp.support.private import all_gather, set_backward_hooks
from tests.support.records import planned
from tests.support.runs import Heard
from tests.support.toys import Along, C, Glued, make

STAGES = Glued.stages


class Model(Glued):
    def __init__(self, glue: Any = lambda x: x) -> None:
        torch.manual_seed(1)
        super().__init__(glue)


def inputs() -> Tensor:
    return torch.randn(2, 5, 6, C, generator=torch.Generator().manual_seed(2))


# --- ranks ------------------------------------------------------------------------------------------------------------


def deeper() -> Model:
    model = Model()
    model.add_module("more", Along(2))
    return model


def told_apart(mesh: DeviceMesh) -> list[str]:
    """The last rank of each group is told something else."""
    mesh = mesh if mesh.ndim == 1 else mesh["sp"]
    odd = mesh.get_local_rank() == mesh.size() - 1
    cases: list[Any] = [
        (Model, {"stages": {**STAGES, "time": "b [t s c]"}}),
        (Model, {"stages": {k: v for k, v in STAGES.items() if k != "time"}}),
        (Model, {"stages": {**STAGES, "tmie": "b [t] s [c]"}}),  # no rank waits for one that found an error alone
        (Model, {"gather_output": False}),
        (deeper, {}),
        (Model, {"torch": "2.0"}),
    ]
    said = []
    for build, options in cases:
        version, options = torch.__version__, dict(options)
        with pytest.raises(RuntimeError) as caught:
            try:
                torch.__version__ = options.pop("torch", version) if odd else version
                dsp.parallelize(build() if odd else Model(), mesh, **(options if odd else {}))
            finally:
                torch.__version__ = version
        said.append(str(caught.value))
    with pytest.raises(RuntimeError, match="called parallelize with different models or options"):
        dsp.check(Model(), (inputs(),), mesh=mesh, stages=cases[0][1]["stages"] if odd else STAGES)
    other = dict(reversed(STAGES.items()))
    torch.testing.assert_close(
        dsp.parallelize(Model(), mesh, other if odd else STAGES)(inputs()), Model()(inputs())
    )  # in another order they are the same, and the group goes on
    return said


@pytest.mark.parametrize("n", [3, "2x2"])
def test_ranks_that_are_told_different_things_are_named(ranks, n: int | str) -> None:
    for rank, said in enumerate(ranks(told_apart, n)):
        group = [0, 1, 2] if n == 3 else [rank // 2 * 2, rank // 2 * 2 + 1]
        most = f"ranks {group[0]}, {group[1]}" if n == 3 else f"rank {group[0]}"
        last = f"rank {group[-1]}"
        assert f"stages['time'] is 'b [t] s [c]' on {most}, but 'b [t s c]' on {last}. Give every rank" in said[0]
        assert f"stages['time'] is 'b [t] s [c]' on {most}, but missing on {last}" in said[1]
        assert f"stages['tmie'] is missing on {most}, but 'b [t] s [c]' on {last}" in said[2]
        assert f"gather_output is True on {most}, but False on {last}" in said[3]
        assert f"model.more is missing on {most}, but Along on {last}; model.more." in said[4]
        assert f"torch is {torch.__version__} on {most}, but 2.0 on {last}" in said[5]


def test_they_compare_eight_bytes_and_alone_nothing(mesh: DeviceMesh) -> None:
    sent: list[int] = []

    def counted(everyone: Tensor, mine: Tensor, group: Any) -> Any:
        sent.append(mine.numel() * mine.element_size())
        return all_gather(everyone, mine, group)

    alone = DeviceMesh("cpu", torch.arange(mesh.size())[:, None], mesh_dim_names=("dp", "sp"))["sp"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dsp.guard.agreement.all_gather", counted)
        dsp.parallelize(Model(), alone)
        assert sent == []
        dsp.parallelize(Model(), mesh)
        assert sent == [8]


# --- threads ----------------------------------------------------------------------------------------------------------


def test_a_second_thread_is_told_so(mesh: DeviceMesh) -> None:
    inside, go_on, found = threading.Event(), threading.Event(), []

    def wait(x: Tensor) -> Tensor:
        if torch.utils._python_dispatch._get_current_dispatch_mode() is None:  # not while it is planned
            inside.set()
            assert go_on.wait(60)
        return x

    model = dsp.parallelize(Model(wait), mesh)
    other = threading.Thread(target=lambda: found.append(model(inputs())))
    other.start()
    assert inside.wait(60)
    with pytest.raises(RuntimeError, match=r"two threads call one parallelized Model at the same time.*one thread"):
        model(inputs())
    go_on.set()
    other.join()
    expect = Model()(inputs())
    torch.testing.assert_close(found[0], expect)
    torch.testing.assert_close(model(inputs()), expect)  # one after the other they may
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        dsp.parallelize(failing := Model(lambda x: x.view(7)), mesh)(inputs())
    failing.glue = lambda x: x
    torch.testing.assert_close(failing(inputs()), expect)  # a call that failed is over
    loss = model(inputs()).square().sum()
    backward = threading.Thread(target=loss.backward)
    backward.start()
    backward.join()
    assert model.space.out.weight.grad is not None


# --- copies -----------------------------------------------------------------------------------------------------------


def test_a_deep_copy_is_a_parallel_model_of_its_own(mesh: DeviceMesh) -> None:
    """A deep copy, before any call and after, is a parallel model of its own; a pickle is refused."""
    model = dsp.parallelize(Model(), mesh)
    early = copy.deepcopy(model)
    expect = model(inputs()).detach()
    late = copy.deepcopy(copy.deepcopy(model))
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    for other in (early, late):
        torch.testing.assert_close(other(inputs()), expect)
        other(inputs()).sum().backward()
        assert other.space.out.weight.grad is not None
    assert model.space.out.weight.grad is None
    with dsp.count_comm() as comm:
        late(inputs())
    assert comm.forward.calls["switch"] == 1
    average = torch.optim.swa_utils.AveragedModel(late)
    average.update_parameters(late)
    torch.testing.assert_close(average(inputs()), expect)
    with pytest.raises(TypeError, match=r"cannot be pickled: save its state_dict\(\)"):
        pickle.dumps(dsp.parallelize(make("Grid"), mesh))


# --- what cannot run --------------------------------------------------------------------------------------------------

LOCAL = "between stages would work on this rank's shard as if it were the full tensor; do it in a stage"
REFUSED: dict[str, tuple[Any, str]] = {
    "vmap": (torch.vmap(lambda t: t * 2), f"mul() under torch.vmap or another transform of torch.func {LOCAL}"),
    "vmap over another": (lambda x: torch.vmap(lambda i: x * i)(torch.arange(2)), "mul() under torch.vmap or another"),
    "func.grad": (torch.func.grad(lambda t: t.square().sum()), f"another transform of torch.func {LOCAL}"),
    "func.jvp": (lambda x: torch.func.jvp(torch.sin, (x,), (x,))[0], f"another transform of torch.func {LOCAL}"),
    "autograd.grad": (
        lambda x: torch.autograd.grad((y := x.detach().requires_grad_()).square().sum(), y)[0],
        f"torch.autograd.grad() {LOCAL}",
    ),
    "apply_": (lambda x: x.detach().clone().apply_(lambda v: v * 2), f"Tensor.apply_() {LOCAL}"),
    "new_tensor": (lambda x: x.new_tensor(x.detach()), "new_tensor() would copy only this rank's part"),
}  # fmt: skip
OUTSIDE: dict[str, Any] = {
    "torch.vmap": lambda model, x: torch.vmap(model)(x[None]),
    "torch.func": lambda model, x: torch.func.grad(lambda t: model(t).sum())(x),
    "torch.export": lambda model, x: torch.export.export(model, (x,)),
}


@functools.cache
def table(n: int) -> Tensor:
    return torch.arange(n).float().unsqueeze(-1)


class Scaled(nn.Module):
    """A stage that is given a tensor as long as its input."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Along(2)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.block(x) * scale


class Unmentioned(Model):
    def __init__(self) -> None:
        super().__init__()
        self.space = Scaled()

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.time(self.space(x, scale))


def compiled_between(mesh: DeviceMesh, x: Tensor) -> None:
    """A compiled function between stages is followed, which is said; a compiled stage stays what it is."""
    runs = list[bool]()
    torch._dynamo.reset()  # other tests have compiled the same forward

    def backend(graph: Any, example: Any) -> Any:
        return lambda *args: (runs.append(True), graph.forward(*args))[1]

    def twice(t: Tensor) -> Tensor:
        return t * 2

    model = Model(torch.compile(twice, backend=backend))
    expect, planned = model(x), dsp.plan(model, x, size=2).text()
    assert "the compiled compiled_between.<locals>.twice is not used: make a submodule" in planned
    runs.clear()
    dsp.parallelize(model, mesh)
    torch.testing.assert_close(model(x), expect)
    assert not runs
    model.space.forward = torch.compile(model.space.forward, backend=backend)
    torch.testing.assert_close(model(x), expect)
    assert runs


def test_impossible_calls_are_refused_in_a_sentence(mesh: DeviceMesh) -> None:
    x = inputs()
    for name, (glue, says) in REFUSED.items():
        model = dsp.parallelize(Model(glue), mesh)
        with pytest.raises((dsp.GlueError, RuntimeError), match=re.escape(says)):
            model(x)
            raise AssertionError(name)
    model = dsp.parallelize(Model(), mesh)
    for name, call in OUTSIDE.items():
        with pytest.raises(RuntimeError, match=f"a parallelized Model cannot run under .*{name}.* use backward"):
            call(model, x)
    with pytest.raises(RuntimeError, match=r"torch.compile of a parallelized model, .* of its stages"):
        torch.compile(model, backend="eager")(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        compiled_between(mesh, x)
    with pytest.raises(TypeError, match=r"must be a torch.nn.Module or a pipeline of diffusers, not function"):
        dsp.parallelize(lambda x: x, mesh)  # type: ignore[arg-type]
    for stages in ({"space": ["b t [s c]"]}, {0: "b t [s c]"}):
        with pytest.raises(dsp.NotationError, match="stages maps the path of a submodule to a pattern, a string; got"):
            dsp.parallelize(Model(), mesh, stages)  # type: ignore[arg-type]
    with pytest.raises(dsp.NotationError, match=r"'layers' names a ModuleList, .* write 'layers.\*'"):
        dsp.parallelize(Listed(), mesh, {"layers": "b t [s c]"})


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Identity()])


@pytest.mark.parametrize("mesh", [3])
def test_ranks_without_a_part_are_told_of_once(mesh: DeviceMesh) -> None:
    model = dsp.parallelize(Model(), mesh)
    with Heard() as heard:
        for _ in range(2):
            model(inputs()[:, :2])
    expected = ["1 of 3 ranks have nothing to do in space: 't' is too short for them"]
    assert heard.idle == expected * (mesh.get_local_rank() == 0)


def test_an_argument_that_a_stage_does_not_mention_is_named(mesh: DeviceMesh) -> None:
    model, scale = dsp.parallelize(Unmentioned(), mesh), torch.rand(2, 5, 6, 1)
    says = (
        r"stage 'space' ran on the whole, but on \d of 5 along 't' it raised: The size of tensor a .* does not mention "
        r"'scale', of shape \(2, 5, 6, 1\), so the stage got all of it .* write 'b t \[s c\], scale=b t s 1'"
    )
    with pytest.raises(dsp.NotationError, match=says):
        model(inputs(), scale)
    model = dsp.parallelize(Unmentioned(), mesh, {**STAGES, "space": "b t [s c], scale=b t s 1"})
    torch.testing.assert_close(model(inputs(), scale), Unmentioned()(inputs(), scale))


# --- what outlives a call ---------------------------------------------------------------------------------------------


def test_a_tensor_is_no_string(mesh: DeviceMesh) -> None:
    """With what is no number a tensor compares as any Python object, and that reads no data of it."""
    glues: list[Any] = [
        lambda x, other=other: x if x == other else x * 2 if x != other else x * 3 for other in ("Rep", None, object())
    ]
    with Heard() as heard:
        for glue in (*glues, lambda x: x if x in ("Rep", None) else x * 2):
            model = dsp.parallelize(Model(glue), mesh)
            for _ in range(2):
                torch.testing.assert_close(model(inputs()), Model(lambda x: x * 2)(inputs()))
            assert planned(model)
    assert heard.texts == []


class Caches(Model):
    """Keeps tables in containers of its own, by length, and what an earlier call came to."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[str, dict[int, Tensor]] = {"rows": {}}
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        rows, n = self.tables["rows"], x.shape[2]
        if n not in rows:
            rows[n] = torch.arange(n).float().unsqueeze(-1)
        y = self.space(x) * rows[n] + (self.seen[-1] if self.seen else 0)
        self.seen.append(y.detach())
        return self.time(y)


@pytest.mark.parametrize("mesh", [2, 3])
def test_kept_state_is_of_real_runs_alone(mesh: DeviceMesh) -> None:
    single, model = Caches(), dsp.parallelize(Caches(), mesh)
    for call in range(4):
        torch.testing.assert_close(model(inputs()), single(inputs()))
        assert len(model.seen) == call + 1  # and not what was planned
    table.cache_clear()
    for glue in (lambda x: x * table(6), lambda x: table(6).expand(2, 5, 6, C) * 2):
        expect = Model(glue)(inputs())
        table.cache_clear()
        torch.testing.assert_close(dsp.parallelize(Model(glue), mesh)(inputs()), expect)
        table.cache_clear()
    single = Model(lambda x: x * table(6))
    expect = single(inputs())
    torch.testing.assert_close(dsp.parallelize(copy.deepcopy(single), mesh)(inputs()), expect)


def test_a_checksum_is_of_the_numbers_alone() -> None:
    """However they lie in memory: a step of a sampler is one number that was expanded, which has any stride."""
    x = torch.randn(3, 4)
    for t in (x[0, 0].expand(1), x[:1, 0].expand(4), x.t(), x[:, ::2][:1, :1], x.bfloat16()[:, :1], x.cfloat().conj()):
        assert small(t) == small(t.clone(memory_format=torch.contiguous_format))
    assert small(x) != small(-x)


@dataclass
class Config:
    """A part of a configuration, which knows of which one."""

    parent: Any = None


CONFIG = Config()
CONFIG.parent = CONFIG


def dims(config: Config, t: Tensor) -> torch.Size:
    if type(t) is not Tensor:
        raise ValueError("Not supported")
    return t.shape


def dims_of(tree: dict[str, Tensor]) -> torch.Size:
    return next(dims(CONFIG, t) for t in tree.values())


class Exact(nn.Module):
    """It asks for the exact type of a tensor, in a function that is given a tree of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return (torch.softmax(y @ y.mT, -1) @ y).reshape(dims_of({"y": y}))


def test_an_error_between_stages_says_what_a_sharded_tensor_is(mesh: DeviceMesh) -> None:
    model = dsp.parallelize(Exact(), mesh, {"": "x=b i j d"})
    with pytest.raises(ValueError, match="Not supported") as caught:
        for _ in range(2):  # the first one chooses as it goes
            model(torch.randn(1, 7, 5, C))
    (note,) = caught.value.__notes__
    assert "dsp: at test_host.py:" in note
    assert "in Exact, t is sharded: a dsp.core.carrier.Carrier" in note
    assert "is named in stages" in note


class Collecting(Model):
    """The collector of garbage lets go of a sharded tensor in the middle of a forward, as it may at any operation."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        set_backward_hooks(y, None)
        z = torch.cat([y, y[:, 1:]], 1)  # each piece stays sharded on its own
        if isinstance(z, Carrier) and z.cut is not None:
            assert z.cut.joined
            Carrier.__torch_function__(set_backward_hooks, (Carrier,), (z, None))
        return super().forward(y)


@pytest.mark.parametrize("mesh", [2, 3])
def test_the_collector_may_come_at_any_operation(mesh: DeviceMesh) -> None:
    """On one rank and not on the next: there is nothing to be done with others."""
    single = Collecting()
    model = dsp.parallelize(copy.deepcopy(single), mesh)
    x = inputs()
    for _ in range(2):
        torch.testing.assert_close(model(x), single(x))
