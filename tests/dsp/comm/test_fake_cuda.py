"""CUDA's own paths without a GPU: fake tensors on device "cuda", fake process groups of up to 1024 ranks.

A fake tensor has a device and no data. So what mixes devices raises, and so does what reads a number of a tensor: on a
GPU the host would wait for it. Backward does not run on fake CUDA tensors without a GPU; it does on meta tensors.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools import fake_collectives  # noqa: F401 (collectives take fake tensors)
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree

import dsp
import dsp.embedded
import zoo
from dsp.comm.exchange import SwitchPlan
from dsp.comm.layout import Axis, Cut, chunk
from dsp.comm.randomness import forked
from dsp.core.meter import Meter
from dsp.core.torch_calls import Operand
from dsp.embedded import blocks
from dsp.glue.rules import RULES, Frame
from dsp.guard.agreement import ROW, Agreement
from dsp.planner import chunk_sizes
from dsp.support.tensors import tensors_in
from tests.support.cases import CASES, example
from tests.support.slow import slow

CUDA = torch.device("cuda", 0)


class Guard(torch._C._acc.DeviceGuard):
    def type_(self) -> Any:
        return torch._C._autograd.DeviceType.CUDA


@pytest.fixture(scope="module", autouse=True)
def _device_guard() -> Iterator[None]:
    """A build for CPUs alone cannot make CUDA the current device, not even for fake tensors: it is told that it can."""
    if torch.backends.cuda.is_built():
        yield
        return
    library = ctypes.CDLL(str(next((Path(torch.__file__).parent / "lib").glob("libc10.*"))))
    guards = (ctypes.c_void_p * 21).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    cuda, other, kept = 1, 20, Guard()  # by the numbers of c10::DeviceType; `other` is where Python may put one
    torch._C._acc.register_python_privateuseone_device_guard(kept)
    guards[cuda], guards[other] = guards[other], None
    yield
    guards[cuda] = None


@contextmanager
def world(n: int, rank: int = 0, device: str = "cuda") -> Iterator[DeviceMesh]:
    """A mesh of n ranks, of which this process is one and nobody else is there."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=n)
    try:
        yield DeviceMesh(device, list(range(n)), mesh_dim_names=("sp",))
    finally:
        dist.destroy_process_group()


@pytest.fixture
def unanswered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are not there agree."""
    monkeypatch.setattr(Agreement, "to_host", lambda self, work, everyone: (work.wait, everyone))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(Agreement, "finish", lambda self: setattr(self, "pending", None))
    monkeypatch.setattr("dsp.guard.agreement.alike", lambda everyone: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", torch.get_rng_state)


@contextmanager
def autocast(dtype: torch.dtype) -> Iterator[None]:
    """`torch.autocast`, which does nothing where there is no GPU."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])
        torch.clear_autocast_cache()


def on_cuda(value: Any) -> Any:
    """The same, fake and on CUDA; modules in place, and without gradients."""
    if isinstance(value, nn.Module):
        return value.requires_grad_(False).to_empty(device=CUDA)
    return {name: torch.empty_like(x, device=CUDA) for name, x in value.items()}


def fake() -> FakeTensorMode:
    return FakeTensorMode(allow_non_fake_inputs=True)


def on_meta(case: str, **lengths: int) -> tuple[Any, dict[str, Tensor]]:
    name, overrides = CASES.get(case, (case, {}))
    with torch.device("meta"):
        model = zoo.create(name, "test", **overrides)
        return model, example(model, 1, **lengths)


# ----------------------------------------------------------------------------------------------------- whole models


def run(case: str, n: int, rank: int, cast: bool) -> list[Any]:
    """Shape, dtype and device of what a model returns, whose part of this rank must be as large as it should."""
    model, inputs = on_meta(case, frames=7, height=6, width=10, rows=7, residues=7)
    with world(n, rank) as mesh, fake(), autocast(torch.bfloat16) if cast else nullcontext():
        dsp.parallelize(on_cuda(model), mesh, gather_output=False)
        outputs = tensors_in(model(**on_cuda(inputs)))
        for y in outputs if n > 1 else ():
            cut = y.placements[0].dim
            local = [chunk(size, n, rank)[1] if d == cut else size for d, size in enumerate(y.shape)]
            assert (list(y.to_local().shape), y.to_local().device) == (local, CUDA)
        return [(tuple(y.shape), y.dtype, y.device) for y in outputs]


@pytest.mark.parametrize(
    "case",
    [
        slow("transformer2d"), slow("latte-text"), slow("stdit-v3"), slow("st_mamba-2"), slow("st_rwkv"),
        slow("axial-video"), "axial-image-colour", slow("evoformer"), slow("pairformer"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("unanswered")
def test_models_stay_on_the_device(case: str) -> None:
    """The last of eight ranks holds nothing of 7 frames, rows or residues."""
    alone = run(case, 1, 0, False)
    assert run(case, 8, 7, False) == alone
    assert {device for _, _, device in alone} == {CUDA}


@pytest.mark.parametrize("case", ["latte-text", slow("st_mamba-2")])
@pytest.mark.usefixtures("unanswered")
def test_dtypes_under_autocast(case: str) -> None:
    assert run(case, 4, 1, True) == run(case, 1, 0, True)


STATISTICS = {
    "softmax": (F.softmax, (-1,)), "log_softmax": (F.log_softmax, (-1,)), "layer_norm": (F.layer_norm, ((6,),)),
    "rms_norm": (F.rms_norm, ((6,),)), "group_norm": (F.group_norm, (2,)), "instance_norm": (F.instance_norm, ()),
    "var": (torch.var, (-1,)), "std": (torch.std, (-1,)),
}  # fmt: skip


@pytest.mark.parametrize("name", STATISTICS)
def test_statistics_over_ranks_return_what_autocast_says(name: str) -> None:
    func, rest = STATISTICS[name]
    with fake(), autocast(torch.bfloat16):
        x = torch.empty(2, 4, 6, device=CUDA, dtype=torch.bfloat16)
        operand = Operand((2, 4, 6), Cut(2))
        outcome = RULES[name](Frame(name, (operand, *rest), {}, n=2, func=func))
        assert outcome.func is not None
        assert outcome.numbers is not None
        every = torch.stack([outcome.numbers.of(x[..., :3])] * 2)
        more = [None] * (name.endswith("_norm") * 2)
        assert outcome.func(every, x[..., :3], *more).dtype == func(x, *rest).dtype


@pytest.mark.parametrize("method", ["ulysses", "ring", "megatron_lm", "megatron_sp", "dsp_ulysses", "dsp_ring"])
@pytest.mark.usefixtures("unanswered")
def test_embedded_methods_stay_on_the_device(method: str) -> None:
    model, inputs = on_meta("transformer2d", frames=4, height=12, width=20)
    with world(4, 3) as mesh, fake():
        dsp.embedded.parallelize(on_cuda(model), mesh, method)
        y = model(**on_cuda(inputs))
    assert (y.shape, y.device) == (inputs["x"].shape, CUDA)


@pytest.mark.usefixtures("unanswered")
def test_every_function_on_a_device() -> None:
    """Those that a hand-written loop calls, folds and uneven parts included."""
    with world(4, 2) as mesh, fake():
        x = torch.empty(2, 7, 6, 5, device=CUDA)
        shard = dsp.split(x, mesh, 1)
        made = [
            shard, dsp.switch(shard, 2), dsp.start_switch(shard, 3).wait(), dsp.gather(shard), dsp.hand_over(shard),
            dsp.mean(shard), dsp.mean(shard, weight=torch.ones(7, 1, 1, device=CUDA)),
        ]  # fmt: skip
        among = torch.ops.dsp.switch_among(x[:, :2], 1, 2, [3, 2], [4, 2], [0, 2], mesh.get_group().group_name)
        many = torch.ops.dsp.switch_many(
            [x[:, :2], x[:, :2].bool()],
            [1, 1],
            [2, 3],
            [7, 7],
            mesh.get_group().group_name,
            [0, 1],
            [],
            [],
            "same",
            "same",
        )
    assert {y.device for y in (*made, among, *many)} == {CUDA}
    assert [tuple(y.shape) for y in (among, *many)] == [(2, 5, 2, 5), (2, 7, 2, 5), (2, 7, 6, 1)]


def test_every_operation_has_a_kernel_for_cuda() -> None:
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("dsp::")]
    assert len(names) >= 8
    for name, key in itertools.product(names, ("CUDA", "CPU", "Meta", "Autograd")):
        if not (key == "Autograd" and name.endswith(("_backward", "start"))):  # which are parts of others
            assert torch._C._dispatch_has_kernel_for_dispatch_key(name, key), (name, key)


# ------------------------------------------------------------------------------------------------------- many ranks


@pytest.mark.parametrize("n", [64, 1024])
@pytest.mark.usefixtures("unanswered")
def test_many_ranks_send_what_the_plan_says(n: int) -> None:
    """The rank that sends most, in forward and backward, which runs on meta tensors."""
    model, inputs = on_meta("transformer2d", frames=2 * n, height=2 * n, width=2)
    plan = dsp.plan(model, kwargs=inputs, size=n, gather_output=False)
    with world(n, 0, "cpu") as mesh, dsp.count_comm() as comm:
        y = dsp.parallelize(model, mesh, gather_output=False)(**inputs)
        dsp.mean(y).backward()
    assert comm.forward.bytes["switch"] == plan.bytes["forward"]
    assert comm.backward.bytes["switch"] == plan.bytes["backward"]
    assert comm.recompute.bytes == {}


@pytest.mark.parametrize("shape", [(1, 1024, 4096), (2, 1030, 700)])
def test_sizes_of_a_switch_over_1024_ranks(shape: tuple[int, int, int]) -> None:
    """Each rank sends what its peer expects, whatever is uneven or empty; a billion elements in all."""
    n, (batch, t, s), channels = 1024, shape, 256
    of_t, of_s = chunk_sizes(t, n), chunk_sizes(s, n)
    some = [*range(0, n, 50), t % n, n - 1]
    plans = [SwitchPlan((batch, of_t[r], s, channels), 1, 2, of_t, of_s, r) for r in some]
    sent = [[plan.in_splits[r] for r in some] for plan in plans]
    assert [list(row) for row in zip(*sent)] == [[plan.out_splits[r] for r in some] for plan in plans]
    for r, plan in zip(some, plans):
        assert sum(plan.in_splits) == batch * of_t[r] * s * channels
        assert sum(plan.out_splits) == batch * t * of_s[r] * channels


# -------------------------------------------------------------------------------- what a GPU does beside computing


def test_the_answer_of_ranks_is_read_beside_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host waits for an event after the answer, not for what the device was given to do since."""
    said: list[str] = []

    class Stream:
        def record_event(self) -> Any:
            said.append("event")
            return SimpleNamespace(synchronize=lambda: said.append("wait for the event"))

    @contextmanager
    def stream(_: Any) -> Iterator[None]:
        said.append("aside")
        yield
        said.append("back")

    empty = torch.empty
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory, **how: empty(*size, **how).fill_(pin_memory))
    with world(2) as mesh:
        agreement = Agreement(Axis.of(mesh), ["x"], nn.Identity())
        everyone = torch.zeros(2 * ROW, dtype=torch.int64)
        everyone[ROW + 1] = 5  # of rank 1
        arrived, answer = agreement.to_host(SimpleNamespace(wait=lambda: said.append("wait for the answer")), everyone)
        assert said == ["aside", "wait for the answer", "back", "event"]
        assert torch.equal(answer, everyone)
        assert answer is not everyone
        agreement.pending = (arrived, answer, (pytree.tree_structure(((0,), {})), [0]), ())
        with pytest.raises(RuntimeError, match="compared with rank 0, rank 1 got other values of 'x'"):
            agreement.finish()
        assert said[-1] == "wait for the event"
        again, _ = agreement.to_host(SimpleNamespace(wait=lambda: None), everyone)
        assert again is not arrived
        assert agreement.to_host(SimpleNamespace(wait=lambda: None), everyone)[1] is answer  # memory is asked for once


@pytest.mark.usefixtures("unanswered")
def test_a_call_under_capture_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with world(2) as mesh, fake():
        agreement = Agreement(Axis.of(mesh), ["x"], nn.Identity())
        agreement.start(*pytree.tree_flatten(torch.empty(3, device=CUDA)), 7, wait=False)
        assert agreement.pending is None
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        both = torch.empty(3, device=CUDA), torch.empty(2)  # one on the host
        agreement.start(*pytree.tree_flatten(both), 7, wait=False)
        assert agreement.pending[1].device == CUDA


@pytest.fixture
def device_generator(monkeypatch: pytest.MonkeyPatch) -> torch.Generator:
    """Stands in for the generator of the current device."""
    own = torch.Generator()
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda *device: own.get_state())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, *device: own.set_state(state))
    monkeypatch.setattr(torch.cuda, "manual_seed", own.manual_seed)
    return own


def test_streams_of_random_numbers_on_a_device(device_generator: torch.Generator) -> None:
    def draw() -> list[int]:
        return [int(torch.randint(2**40, (), generator=g)) for g in (device_generator, torch.default_generator)]

    found = []
    for rank in (0, 1, 1):
        torch.manual_seed(0)
        device_generator.manual_seed(0)
        with world(2, rank) as mesh:
            with forked(Axis.of(mesh)):
                inside = draw()
            with pytest.raises(ZeroDivisionError), forked(Axis.of(mesh)):
                draw()
                raise ZeroDivisionError
            found.append((inside, draw()))
    device_generator.manual_seed(0)
    assert found[1] == found[2]
    assert all(a != b for a, b in zip(found[0][0], found[1][0]))  # a rank's own
    assert found[0][1] == found[1][1]  # then alike again
    assert found[0][1][0] == draw()[0]  # and of the device as if nothing had been drawn


def test_attention_without_dropout_draws_nothing() -> None:
    """Its kernels on CUDA carry the tag of random operations; a stage that draws costs the host a fork of streams."""
    with fake(), Meter() as watch:
        q, k, v = torch.empty(3, 2, 4, 16, 64, device=CUDA, dtype=torch.bfloat16)
        for kernel, more in (("flash", ()), ("efficient", (None, True)), ("cudnn", (None, True))):
            attention = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention")
            attention(q, k, v, *more)
            attention(q, k, v, *more, 0.0)
            assert not watch.random
            assert watch.flops > 0
            attention(q, k, v, *more, dropout_p=0.1)
            assert watch.random
            watch.restart()


@pytest.mark.parametrize("kernel", ["flash", "efficient"])
def test_blocks_call_the_kernels_of_cuda(monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    """By the signatures that this version of torch has; shapes and dtypes as the other kernels give them."""
    with fake():
        q = torch.empty(2, 40, 8, 64, device=CUDA, dtype=torch.bfloat16)
        k, v = torch.empty(2, 2, 24, 4, 64, device=CUDA, dtype=torch.bfloat16)
        found = {}
        for kind in (kernel, "math"):
            monkeypatch.setattr(blocks, "_kernel", lambda q, kind=kind: kind)
            out, lse = blocks.block(q, k, v, False)
            grads = blocks.block_backward(q, q, k, v, out.to(q.dtype), lse, False)
            found[kind] = [(tuple(x.shape), x.dtype, x.device) for x in (out, lse, *grads)]
    assert found[kernel] == found["math"]
