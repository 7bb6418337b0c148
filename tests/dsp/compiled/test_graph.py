"""A forward as one graph for torch.compile: the numbers, the gradients and the collectives of the forward without."""

from __future__ import annotations

import copy
import random
import shutil
import warnings
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import dsp
import zoo
from dsp.support.tensors import tensors_in
from tests.support.diffusers_latte import STAGES, build, inputs
from tests.support.parity import assert_step_equal
from tests.support.records import graphs_of
from tests.support.runs import Heard
from tests.support.slow import long, slow
from tests.support.toys import Fn


def latte() -> tuple[nn.Module, dict[str, str] | None, dict[str, Tensor]]:
    kwargs = inputs(1, 5, 4)
    kwargs["hidden_states"].requires_grad_()
    return build(5, 4).train(), STAGES, kwargs


def transformer2d() -> tuple[nn.Module, dict[str, str] | None, dict[str, Tensor]]:
    model, kwargs = zoo.create("transformer2d", "test").double(), {}
    for p in model.parameters():
        nn.init.normal_(p, std=0.2)
    for name, value in model.example_inputs(2, frames=5, height=6).items():
        kwargs[name] = value.double() if value.is_floating_point() else value
    return model, None, kwargs


def flux() -> tuple[nn.Module, dict[str, str] | None, dict[str, Tensor]]:
    import diffusers

    model = diffusers.FluxTransformer2DModel(
        in_channels=8, num_layers=1, num_single_layers=1, attention_head_dim=8, num_attention_heads=5,
        joint_attention_dim=8, pooled_projection_dim=8, axes_dims_rope=(2, 2, 4),
    ).double()  # fmt: skip
    kwargs = {
        "hidden_states": torch.randn(1, 10, 8, dtype=torch.float64, requires_grad=True),
        "encoder_hidden_states": torch.randn(1, 3, 8, dtype=torch.float64),
        "pooled_projections": torch.randn(1, 8, dtype=torch.float64),
        "timestep": torch.tensor([0.5], dtype=torch.float64),
        "img_ids": torch.cartesian_prod(torch.arange(1), torch.arange(2), torch.arange(5)).double(),
        "txt_ids": torch.zeros(3, 3, dtype=torch.float64),
    }
    return model, {"": "hidden_states=b s c, encoder_hidden_states=b n e"}, kwargs


def windows(size: int) -> tuple[nn.Module, dict[str, str] | None, dict[str, Tensor]]:
    """Reads of neighbours, statistics, and attention."""

    class Windows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.mix = nn.Conv1d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Linear(4, 12)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(self.conv(x).relu()).transpose(1, 2)
            q, k, v = self.mix(y).unflatten(2, (2, 6)).transpose(1, 2).chunk(3, -1)
            return F.scaled_dot_product_attention(q, k, v).mean(2)

    x = torch.randn(2, 4, size, dtype=torch.float64, requires_grad=True)
    return Windows().double(), {"": "x=b c s"}, {"x": x}


def modes_of_gradients() -> tuple[nn.Module, dict[str, str] | None, dict[str, Tensor]]:
    """Operations with gradients and without, in turns, and writes in place."""

    class Modes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.mix(x)
            with torch.no_grad():
                scale = y.square().mean(-1, keepdim=True)
                with torch.enable_grad():
                    z = y * scale
                scale = scale * 2
            z.add_(x)
            with torch.no_grad():
                kept = torch.zeros_like(z)
                kept.copy_(z)
            return z.relu() * kept + x * scale

    x = torch.randn(2, 7, 4, dtype=torch.float64, requires_grad=True)
    return Modes().double(), {"": "x=b s c"}, {"x": x}


MODELS = {
    "modes": modes_of_gradients, "latte": latte, "transformer2d": transformer2d, "flux": flux,
    "even": partial(windows, 12), "uneven": partial(windows, 7),
}  # fmt: skip


def graphs(model: nn.Module) -> list[int | None]:
    """How many graphs there are of each kind of calls; None where none can be made."""
    return [None if of_kind is None else len(of_kind) for of_kind in graphs_of(model)]


def alike(mesh: DeviceMesh, which: str, backend: str, gather: bool) -> None:
    torch.manual_seed(0)
    single, stages, kwargs = MODELS[which]()
    rounding = {"rtol": 1e-6, "atol": 1e-9}
    if backend == "inductor":  # before torch 2.13 it compiles no attention in float64 on CPU
        single, rounding = single.float(), {"rtol": 1e-4, "atol": 1e-5}
        kwargs = {k: v.detach().float().requires_grad_(v.requires_grad) for k, v in kwargs.items()}
    model, usual = copy.deepcopy(single), copy.deepcopy(single)
    dsp.parallelize(model, mesh, stages, gather, compile=backend)
    dsp.parallelize(usual, mesh, stages, gather)
    assert_step_equal(single, model, mesh, kwargs, rounds=3, **rounding)
    assert graphs(model) == [1]
    # a mode that counts sees what is in the graph, and what is not compiled
    sent = []
    for m in (model, usual):
        single.zero_grad()
        sent.append(assert_step_equal(single, m, mesh, kwargs, rounds=2, count=True, **rounding))
    [_, told], [_, planned] = sent
    assert repr(told) == repr(planned)
    loss = sum(dsp.mean(y.square()) for y in tensors_in(model(**kwargs)))
    with dsp.count_comm() as comm:  # of what is compiled the backward alone
        loss.backward()
    assert comm.backward.bytes["switch"] == planned.backward.bytes["switch"]
    assert not comm.recompute.bytes
    for way in (torch.no_grad, torch.inference_mode):
        with way():
            for _ in range(3):
                found = model(**kwargs)
                found = found if isinstance(found, Tensor) else found[0]
            expect = single(**kwargs)
            expect = expect if isinstance(expect, Tensor) else expect[0]
            torch.testing.assert_close(dsp.gather(found), expect, **rounding)
    assert set(graphs(model)) == {1}  # one for both ways without gradients


@pytest.mark.parametrize(
    ("n", "which", "backend", "gather"),
    [
        slow(3, "latte", "eager", False), (2, "modes", "eager", True), slow(3, "modes", "aot_eager", False),
        long(2, "transformer2d", "aot_eager", True), long(4, "latte", "aot_eager", True),
        long(3, "transformer2d", "aot_eager", False), long(3, "flux", "aot_eager", True),
        long(3, "even", "aot_eager", False), slow(4, "uneven", "aot_eager", True),
    ],
)  # fmt: skip
def test_outputs_every_gradient_and_the_collectives(ranks, n: int, which: str, backend: str, gather: bool) -> None:
    ranks(alike, n, which, backend, gather)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor builds C++ on CPU")
def test_compiled_by_inductor(ranks) -> None:
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        from torch._inductor.cpu_vec_isa import pick_vec_isa

        if not pick_vec_isa():
            pytest.skip("for a CPU without vector units inductor writes C++ that does not compile")
    ranks(by_inductor, 2)


def by_inductor(mesh: DeviceMesh) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own
        alike(mesh, "even", "inductor", True)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 3 * ctx.saved_tensors[0] ** 2 * grad


class Mixes(nn.Module):
    """Mixes along both dims, as `does` says between: it may be what no graph stands for."""

    def __init__(self, does: str = "") -> None:
        super().__init__()
        self.does, self.times, self.kept, self.seen = does, 0, torch.ones(()), []
        self.one, self.two = (nn.Linear(6, 6, dtype=torch.float64) for _ in range(2))
        self.register_buffer("count", torch.zeros(()))
        self.drop, self.act = nn.Dropout(0.5), nn.GELU()
        self.cubed = Fn(Cube.apply)
        self.stages = {"": "x=b s r c -> b s r c", "cubed": "b s r [c]"}

    def forward(self, x: Tensor, scale: float = 1.0, other: Any = None) -> Tensor:
        y = x + torch.softmax(self.act(self.one(x)), 1) * scale
        if self.does == "draws":
            y = self.drop(y)
        elif self.does == "checkpoint":
            y = checkpoint(self.two, y, use_reentrant=False)
        elif self.does == "function":
            y = self.cubed(y)
        elif self.does == "counts" or (self.does == "rank" and dist.get_rank() == 0):
            self.times += 1
        elif self.does == "buffer":
            self.count = self.count + 1
        elif self.does == "gradient":
            y.register_hook(lambda g: g) if y.requires_grad else None
        elif self.does == "random":
            random.random()
        elif self.does == "writes":
            self.kept.add_(0)
        elif self.does == "keeps":
            self.seen.append(y.detach())
        return y + torch.softmax(self.two(y), 2) * self.kept.sum()


REFUSED = {
    "draws": "it draws random numbers",
    "checkpoint": "it has an activation checkpoint",
    "function": "the autograd.Function Cube is in it",
    "counts": "it changes what its modules hold",
    "keeps": "it changes what its modules hold",
    "rank": "",
    "buffer": "it changes what its modules hold",
    "writes": "it changes what its modules hold",
    "gradient": "it uses Tensor.register_hook",
    "random": "it draws random numbers",
    "bag": "an input is a Bag",
    "hook": "'one' has a hook",
    "forward": "'two' has been given another forward",
    "object": "an input is a SimpleNamespace",
}


class Bag(list[Any]):
    pass


OBJECTS = {"object": SimpleNamespace(), "bag": Bag()}


@pytest.mark.parametrize("does", REFUSED)
def test_calls_without_a_graph_run_uncompiled_with_one_note(mesh: DeviceMesh, does: str) -> None:
    single = Mixes(does)
    model = copy.deepcopy(single)
    if does == "hook":
        model.one.register_forward_hook(lambda *_: None)
    elif does == "forward":
        model.two.forward = partial(type(model.two).forward, model.two)
    dsp.parallelize(model, mesh, compile="eager")
    inputs = {"x": torch.randn(2, 5, 7, 6, dtype=torch.float64)}
    with Heard() as heard:
        if does == "draws":
            for _ in range(3):
                model(**inputs)
        else:
            assert_step_equal(
                single, model, mesh, inputs | ({"other": OBJECTS[does]} if does in OBJECTS else {}), rounds=3
            )
    assert graphs(model) == [None]
    assert len(model.seen) == 3 * (does == "keeps")
    said = [text for text in heard.texts if text.startswith("compile: ")]
    assert mesh.get_local_rank() or (len(said) == 1 and REFUSED[does] in said[0]), said


def test_all_reasons_are_said_at_once(mesh: DeviceMesh) -> None:
    model = Mixes("draws")
    model.one.register_forward_hook(lambda *_: None)
    dsp.parallelize(model, mesh, compile="eager")
    with Heard() as heard:
        for _ in range(2):
            model(torch.randn(2, 5, 7, 6, dtype=torch.float64))
    said = [text for text in heard.texts if text.startswith("compile: ")]
    assert mesh.get_local_rank() or ["it draws random numbers; 'one' has a hook" in text for text in said] == [True]


class Recurrent(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.rnn, self.out = kind(6, 6, batch_first=True, dtype=torch.float64), nn.Linear(6, 6, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.rnn(x.transpose(1, 2).flatten(0, 1))[0]
        return self.out(y).unflatten(0, (len(x), x.shape[2])).transpose(1, 2)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "op"), [(nn.GRU, "gru"), (nn.LSTM, "lstm"), (nn.RNN, "rnn_tanh")])
def test_recurrences_compile_without_gradients_or_without_a_compiler(mesh: DeviceMesh, kind: Any, op: str) -> None:
    """One graph without gradients; with them torch.compile takes none, and a graph without a compiler does."""
    single, x = Recurrent(kind), torch.randn(2, 5, 6, 6, dtype=torch.float64)
    model = dsp.parallelize(copy.deepcopy(single), mesh, {"": "x=b t s c"}, compile="aot_eager")
    with Heard() as heard:
        with torch.no_grad():
            for m in (single, model):
                m.eval()
            for _ in range(3):
                torch.testing.assert_close(model(x), single(x))
            assert graphs(model) == [1]
        assert_step_equal(single, model, mesh, {"x": x}, rounds=3)
        assert graphs(model) == [1, None]
        model = dsp.parallelize(copy.deepcopy(single), mesh, {"": "x=b t s c"}, compile="eager")
        assert_step_equal(single, model, mesh, {"x": x}, rounds=3)
        assert graphs(model) == [1]
    said = [text for text in heard.texts if text.startswith("compile: ")]
    assert mesh.get_local_rank() or [f"takes no recurrence (aten.{op})" in text for text in said] == [True]


def chain(x: Tensor) -> Tensor:
    for _ in range(5):
        x = (x + x).transpose(1, 2)
    return x


def test_a_graph_holds_the_operations_and_nothing_else(mesh: DeviceMesh) -> None:
    model = dsp.parallelize(Fn(chain), mesh, {"": "x=b t s"}, gather_output=False, compile="eager")
    for way in (torch.enable_grad, torch.no_grad):
        with way():
            for _ in range(2):
                model(torch.ones(2, 4, 6, requires_grad=True))
    for of_kind in graphs_of(model):
        ops = [node for node in of_kind[0].plainly.graph.nodes if node.op == "call_function"]
        assert len(ops) <= 2 * 5 + 2  # and views of what is given and returned


@pytest.mark.parametrize("mesh", [3])
def test_it_holds_for_what_it_was_recorded_with(mesh: DeviceMesh) -> None:
    """Numbers, attributes, weights that are others: a graph holds for what it was recorded with."""
    single = Mixes()
    model = dsp.parallelize(copy.deepcopy(single), mesh, compile="eager")
    x = torch.randn(2, 5, 7, 6, dtype=torch.float64, requires_grad=True)

    def run(count: int, **more: Any) -> None:
        single.zero_grad()
        assert_step_equal(single, model, mesh, {"x": x, **more}, rounds=2)
        assert graphs(model) == [count], (graphs(model), count)

    run(1)
    run(1)
    for m in (single, model):
        m.times = 3
    run(2)
    for m in (single, model):
        m.kept = torch.full((), 2.0)
    run(3)
    for m in (single, model):
        m.two.weight = nn.Parameter(m.two.weight.detach() * 2)
    run(4)
    with torch.no_grad():
        for m in (single, model):
            m.two.weight.mul_(0.5)
    run(4)  # the same parameter with other numbers, as after a step
    for m in (single, model):
        m.one = copy.deepcopy(m.two)
    run(5)
    for m in (single, model):
        m.act.approximate = "tanh"
    run(6)
    model.load_state_dict(single.state_dict())
    run(6)
    for m in (single, model):
        m.one.bias.requires_grad_(False)
    run(7)
    again = copy.deepcopy(model)
    single.zero_grad()
    assert_step_equal(single, again, mesh, {"x": x}, rounds=3)
    assert graphs(again) == [1]


class Adds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.pos = nn.Linear(6, 6, dtype=torch.float64), nn.Buffer(torch.ones(6, dtype=torch.float64))
        self.scales = type("Scales", (), {})()
        self.scales.by = 1.0
        self.stages = {"": "x=b s c -> b s c"}

    def forward(self, x: Tensor, p: Tensor, q: Tensor) -> Tensor:
        return (x + self.one(x).softmax(1) * p + q + self.pos) * self.scales.by


def test_inputs_that_were_one_tensor_are_told_apart(mesh: DeviceMesh) -> None:
    """Inputs that were one tensor when they were recorded, or a weight; and what other objects hold."""
    single = Adds()
    model = dsp.parallelize(copy.deepcopy(single), mesh, compile="eager")
    x, t = torch.randn(2, 5, 6, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    for p, q in [(t, t), (t, t), (t, 3 * t), (model.pos, t), (model.pos, t), (2 * model.pos, t)]:
        torch.testing.assert_close(model(x, p, q), single(x, p, q))
    assert graphs(model) == [1]
    for m in (single, model):
        m.scales.by = 2.0
    torch.testing.assert_close(model(x, t, t), single(x, t, t))
    assert graphs(model) == [2]


def test_numbers_that_change_with_each_call(mesh: DeviceMesh) -> None:
    single = Mixes()
    model = dsp.parallelize(copy.deepcopy(single), mesh, compile="eager")
    x = torch.randn(2, 5, 7, 6, dtype=torch.float64)
    for i in range(12):
        torch.testing.assert_close(model(x, 1 + 0.1 * i), single(x, 1 + 0.1 * i))
    assert graphs(model) == [None]


@pytest.mark.parametrize("mesh", [1])
def test_none_is_compiled_on_one_rank(mesh: DeviceMesh) -> None:
    model = Mixes()
    assert dsp.parallelize(model, mesh, compile=True) is model
    assert "forward" not in model.__dict__
