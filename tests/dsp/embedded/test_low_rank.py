"""Attention of low rank (Linformer): against implementations of others, and sharded by every method against itself."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
from einops import rearrange, repeat
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import dsp
import zoo
from tests.support.cases import build, doubled, example
from tests.support.embedded import own, parity, recomputed, sent
from tests.support.oracles import randomise
from tests.support.parity import assert_step_equal, unsharded
from tests.support.slow import slow
from zoo.attention import LowRankAttention, SelfAttention

ROWS, PLACES, WIDTH, DEPTH = 5, 20, 48, 2


def make(case: str = "transformer2d", **more: int) -> nn.Module:
    return build(case, low_rank=(ROWS, PLACES), **more)


# -------------------------------------------------------------------------------------------------------- one process


def by_hand(q: Tensor, k: Tensor, v: Tensor, core: LowRankAttention) -> Tensor:
    of_keys, of_values = (weight[:, : k.shape[1]] for weight in (core.of_keys, core.of_values))
    k = repeat(torch.einsum("rm,bmge->brge", of_keys, k), "b r g e -> b r (g x) e", x=q.shape[2] // k.shape[2])
    v = repeat(torch.einsum("rm,bmge->brge", of_values, v), "b r g e -> b r (g x) e", x=q.shape[2] // v.shape[2])
    logits = torch.einsum("bnhe,brhe->bhnr", q, k) / q.shape[-1] ** 0.5
    return torch.einsum("bhnr,brhe->bnhe", logits.softmax(-1), v)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("places", [9, 6])
def test_the_core_is_attention_to_sums(places: int, kv_heads: int) -> None:
    torch.manual_seed(0)
    core = LowRankAttention(3, 9).double()
    given = [torch.randn(2, places, h, 8).double().requires_grad_() for h in (4, kv_heads, kv_heads)]
    results = []
    for out in (core(*given), by_hand(*given, core)):
        results.append([out, *torch.autograd.grad(out.square().sum(), [*given, *core.parameters()])])
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    assert not results[0][-1][:, places:].any()  # fewer places take the first columns


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=str)
@pytest.mark.parametrize("kv_heads", [6, 1])
@pytest.mark.parametrize("places", [9, 6])
def test_self_attention_agrees_with_linformer(places: int, kv_heads: int, dtype: torch.dtype, tolerance: float) -> None:
    linformer = pytest.importorskip("linformer.linformer")
    torch.manual_seed(0)
    oracle = linformer.LinformerSelfAttention(48, 9, k=4, heads=6, one_kv_head=kv_heads == 1).to(dtype)
    model = SelfAttention(48, 6, "s", kv_heads=kv_heads, low_rank=(4, 9)).to(dtype)
    randomise(oracle)

    def theirs(what: str) -> dict[str, Tensor]:
        p = {name: getattr(p, what) for name, p in oracle.named_parameters()}
        return {
            "core.of_keys": p["proj_k"].T, "core.of_values": p["proj_v"].T,
            "qkv.weight": torch.cat([p["to_q.weight"], p["to_k.weight"], p["to_v.weight"]]),
            "out.weight": p["to_out.weight"], "out.bias": p["to_out.bias"],
        }  # fmt: skip

    values = {"qkv.bias": torch.zeros(model.qkv.out_features), **theirs("data")}  # they have none of these
    model.load_state_dict(values)
    x = torch.randn(2, 3, places, 48, dtype=dtype)
    xs = [x.clone().requires_grad_(), x.clone().requires_grad_()]
    out, wanted = model(xs[0]), rearrange(oracle(xs[1].flatten(0, 1)), "(b t) s c -> b t s c", t=3)
    weight = torch.randn_like(out)
    for y in (out, wanted):
        (y * weight).sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if name != "qkv.bias"}
    pairs = [(out, wanted), (xs[0].grad, xs[1].grad), *((grads[name], g) for name, g in theirs("grad").items())]
    assert len(pairs) == 2 + len(grads)
    for a, b in pairs:
        assert (a - b).abs().max() < tolerance * b.abs().max()


def test_fewer_places_and_other_models_are_what_they_were() -> None:
    torch.manual_seed(0)
    plain = zoo.create("transformer2d", "test")
    assert not any("core" in name for name in plain.state_dict())
    model = zoo.create("transformer2d", "test", low_rank=[5, 40])  # YAML has no tuples
    assert model.config.low_rank == (5, 40)
    cores = [m for m in model.modules() if isinstance(m, LowRankAttention)]
    assert len(cores) == DEPTH  # of space, not of time
    assert all(0.8 < core.of_keys.std() * 40**0.5 < 1.2 for core in cores)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SelfAttention(48, 6, "s", low_rank=(0, 8)), "low_rank=(0, 8): expected (number of projected keys"),
        (lambda: SelfAttention(48, 6, "s", low_rank=(8, 0)), "low_rank=(8, 0): expected (number of projected keys"),
        (lambda: SelfAttention(48, 6, "s", low_rank=(2, 8), causal=True), "it cannot be causal"),
        (lambda: zoo.create("transformer2d", "test", low_rank=8), "takes low_rank: tuple[int, int] | None, not 8"),
        (lambda: SelfAttention(48, 6, "s", low_rank=(2, 8))(torch.zeros(1, 1, 9, 48)), "low_rank=(2, 9)"),
    ],
)
def test_impossible_options_are_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


# --------------------------------------------------------------------------------------------------------- many of them


# frames, height, width: 15 places; and 9, of which the last of 4 ranks has none, in one model
SHAPES = [(5, 6, 10), (2, 6, 6)]
MIXED = [(2, 6, 10), (1, 6, 6)]  # 2 x 2 ranks for two frames, 15 places; and 1 x 4 for one


@pytest.mark.parametrize(
    ("method", "mesh", "case", "shapes", "heads"),
    [
        ("ring", 3, "transformer2d", SHAPES[:1], 4), slow("ring", 4, "transformer2d-stdit", SHAPES, 4),
        ("ulysses", 2, "transformer2d-stdit", SHAPES[:1], 4), slow("ulysses", 4, "transformer2d", SHAPES, 4),
        slow("ulysses", 4, "transformer2d", [(3, 6, 10)], 6),  # heads: 2, 2, 2 and 0
        slow("dsp", 3, "transformer2d", SHAPES, 4), slow("dsp_ring", 4, "transformer2d", MIXED, 4),
        slow("dsp_ulysses", 4, "transformer2d", MIXED, 4), slow("megatron_lm", 2, "transformer2d", [(3, 6, 10)], 4),
        ("megatron_sp", 2, "transformer2d", [(3, 6, 10)], 4),
    ],
)  # fmt: skip
def test_models(mesh: DeviceMesh, method: str, case: str, shapes: list[tuple[int, int, int]], heads: int) -> None:
    single, model = parity(mesh, case, method, *shapes, low_rank=(ROWS, PLACES), heads=heads)
    cores = [m for m in model.modules() if isinstance(m, LowRankAttention)]
    assert all(p.grad is not None for core in cores for p in core.parameters())  # on every rank
    assert all(p.grad.abs().max() > 1e-6 for p in single.parameters())


def step(mesh: DeviceMesh, how: str | None) -> dict:
    single, model = make(), make()
    inputs = doubled(example(single, 2, frames=4, height=6, width=10))
    if how == "blocks":
        recomputed(model, how)
    dsp.embedded.parallelize(model, mesh, "ring", gather_output=False)
    if how != "blocks":
        recomputed(model, how)
    return assert_step_equal(single, model, mesh, inputs, count=True)[0].by_collective()


@pytest.mark.parametrize("how", [None, slow("stages"), slow("saved"), slow("blocks")])
def test_bytes_are_those_of_the_plan_and_do_not_grow_with_the_length(ranks, how: str | None) -> None:
    n, again, frames = 4, how is not None, 4
    sums = 2 * frames * 2 * ROWS * WIDTH * 8  # of keys and of values
    once = DEPTH * 2 * sums * (n - 1) // n
    counted = ranks(step, n, how)  # 15 places: 4, 4, 4 and 3
    for height, width in ((6, 10), (2, 4)):
        inputs = doubled(example(make(), 2, frames=frames, height=height, width=width))
        plan = dsp.embedded.plan(
            make(),
            kwargs=inputs,
            size=n,
            method="ring",
            recompute=again,
            save_exchanges=how == "saved",
            gather_output=False,
        )
        inside, _ = plan.sends["forward"]["all_reduce"]
        for counts in counted:
            loss = 2 * 8 * (n - 1) // n
            assert sent(counts, "forward", "all_reduce") - loss == once == inside
            assert sent(counts, "backward", "all_reduce") - loss == once
            expect = once if how in ("stages", "blocks") else 0
            assert sent(counts, "recompute", "all_reduce") == expect == plan.bytes["recompute"]


def mixed(mesh: DeviceMesh) -> tuple[dict, dict]:
    model = make()
    inputs = doubled(example(model, 2, frames=2, height=8, width=8))
    plan = dsp.embedded.plan(model, kwargs=inputs, size=mesh.size(), method="dsp_ring", gather_output=False)
    dsp.embedded.parallelize(model, mesh, "dsp_ring", gather_output=False)
    with dsp.count_comm() as comm:
        out = model(**inputs)
        dsp.mean(out * out).backward()
    return plan.bytes, comm.by_collective()


@pytest.mark.slow
def test_bytes_of_a_mixture(ranks) -> None:
    found = ranks(mixed, 4)  # of which two have a frame to begin with
    for phase in ("forward", "backward"):
        assert max(sent(counts, phase, "switch") for _, counts in found) == found[0][0][phase]


@pytest.mark.parametrize("mesh", [4])
def test_low_precision(mesh: DeviceMesh) -> None:
    """The errors of one process and of all ranks in bf16, against float64."""
    core = LowRankAttention(8, 64)
    whole = [torch.randn(2, 64, 2, 16) for _ in range(3)]
    exact = core.double()(*(x.double() for x in whole))
    core, whole = core.bfloat16(), [x.bfloat16() for x in whole]
    got = dsp.embedded.low_rank_attention(*(own(x, mesh) for x in whole), core, 64, mesh.get_group().group_name)
    assert got.dtype == torch.bfloat16
    alone, together = ((x - own(exact, mesh)).norm().item() for x in (own(core(*whole), mesh), got))
    assert 0 < together < 1.5 * alone


def test_fully_shard(mesh: DeviceMesh) -> None:
    single, model = make(), make()
    inputs = doubled(example(single, 2, frames=3, height=2, width=6))  # 3 places on 2 ranks
    dsp.embedded.parallelize(model, mesh, "ring", gather_output=False)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert_step_equal(single, model, mesh, inputs, gradients=unsharded)


@pytest.mark.parametrize("mesh", [4])
@pytest.mark.parametrize("method", [slow("dsp"), "ring", slow("ulysses")])
def test_too_many_places_are_an_error_on_every_rank(mesh: DeviceMesh, method: str) -> None:
    """24 places for weights of 20: every rank says so, before anything is sent, and the model lives on."""
    single, model = make(), make()
    dsp.embedded.parallelize(model, mesh, method)
    with pytest.raises(ValueError, match=re.escape("weights for 20 places and got 24: build the model with low_rank")):
        model(**doubled(example(model, 1, frames=4, height=8, width=12)))
    inputs = doubled(example(model, 1, frames=4, height=8, width=8))
    torch.testing.assert_close(model(**inputs), single(**inputs))


class Weighted(nn.Module):
    """A core with parameters of another kind."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return zoo.attention.attend(q * self.scale, k, v)


def test_a_ring_refuses_parameters_it_would_leave_out() -> None:
    model = build("transformer2d")
    for block in model.blocks:
        block.spatial.attention.core = Weighted()
    plan = partial(dsp.embedded.plan, model, kwargs=example(model, 1), size=2)
    with pytest.raises(ValueError, match=r"core 'blocks\.0.*' has parameters, which ring attention would ignore"):
        plan(method="ring")
    assert plan(method="ulysses").bytes["forward"]
