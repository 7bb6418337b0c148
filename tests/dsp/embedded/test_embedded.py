"""Ulysses and ring attention: the functions and whole models against one process; bytes against those stated."""

from __future__ import annotations

import itertools
import re
import sys
import warnings
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import dsp
import zoo
from dsp.comm.layout import Axis
from dsp.embedded import blocks, ring_attention, ulysses_attention
from dsp.embedded.ulysses import Ulysses
from tests.support.cases import build, doubled, example
from tests.support.embedded import own, parity, recomputed, sent, step, two_blocks
from tests.support.loopback import measured
from tests.support.parity import assert_step_equal
from tests.support.runs import alike, run_here
from tests.support.slow import long, slow
from zoo.attention import attend
from zoo.video.diffusion import RectifiedFlow

METHODS = ("ulysses", "ring")


# ----------------------------------------------------------------------------------------------------- the functions


HEADS = [(4, 4), (4, 2), (6, 2), (6, 1), (12, 6), (5, 5)]  # for 4 ranks: even, shared, uneven, padded, idle


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("mesh", [3, slow(4)])
def test_functions(mesh: DeviceMesh, method: str) -> None:
    group = mesh.get_group().group_name
    for places, (heads, kv_heads), causal in itertools.product((8, 7, 5), HEADS, (False, True)):
        torch.manual_seed(0)
        shapes = [(2, places, h, 8) for h in (heads, kv_heads, kv_heads)]
        whole = [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]
        weight = torch.randn(shapes[0], dtype=torch.float64)
        expect = attend(*whole, causal=causal)
        grads = torch.autograd.grad((expect * weight).sum(), whole)
        parts = [own(x.detach(), mesh).requires_grad_() for x in whole]
        if method == "ring":
            got = ring_attention(*parts, places, group, causal)
        else:
            got = ulysses_attention(*parts, partial(attend, causal=causal), places, group)
        (got * own(weight, mesh)).sum().backward()
        torch.testing.assert_close(got, own(expect, mesh))
        for part, grad in zip(parts, grads):
            torch.testing.assert_close(part.grad, own(grad, mesh))


@pytest.mark.parametrize("method", METHODS)
def test_low_precision(mesh: DeviceMesh, method: str) -> None:
    group, errors = mesh.get_group().group_name, []
    torch.manual_seed(0)
    whole = [torch.randn(1, 32, 4, 16) for _ in range(3)]
    expect = attend(*whole)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        parts = [own(x, mesh).to(dtype).requires_grad_() for x in whole]
        if method == "ring":
            got = ring_attention(*parts, 32, group)
        else:
            got = ulysses_attention(*parts, attend, 32, group)
        got.float().square().sum().backward()
        assert got.dtype == parts[1].grad.dtype == dtype
        errors.append((got.float() - own(expect, mesh)).abs().max().item())
    assert errors[0] < 1e-5
    assert errors[1] < 2e-2


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)]
)
def test_blocks(monkeypatch, dtype: torch.dtype, tolerance: float, causal: bool) -> None:
    two_blocks("cpu", dtype, tolerance, causal)
    monkeypatch.setattr(blocks, "_kernel", lambda q: "math")
    two_blocks("cpu", dtype, tolerance, causal)


# -------------------------------------------------------------------------------------------------------- whole models


CASES = ("transformer2d", "transformer2d-stdit", "latte-class", "stdit-v1", "stdit-v2", "stdit-v3")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("case", "mesh"),
    [
        (CASES[0], 4), *(slow(case, 4) for case in CASES[1:]), ("stdit-v3", 3),
        *(slow(case, 2) for case in ("latte-2-text", "latte-3-text", "latte-4-class", "wan")),
    ],
)  # fmt: skip
def test_models(mesh: DeviceMesh, case: str, method: str) -> None:
    """15 places on 2 and 3 ranks. On 4 ranks 9: the last has none; and of 2 frames DSP would leave two with nothing."""
    parity(mesh, case, method, (5, 6, 10) if mesh.size() < 4 else (2, 6, 6))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_an_objective_that_shares_a_model_with_dsp(mesh: DeviceMesh, method: str) -> None:
    single, model = RectifiedFlow(build("stdit-v3")), RectifiedFlow(build("stdit-v3"))
    inputs = doubled(single.model.example_inputs(2, frames=3, height=6, width=6))
    inputs["timestep"] = torch.tensor([0.2, 0.7], dtype=torch.float64)
    inputs["noise"] = torch.randn_like(inputs["x"])
    dsp.embedded.parallelize(model, mesh, method, gather_output=False)
    sampler = RectifiedFlow(model.model)  # a second user of the same modules, by DSP
    dsp.parallelize(sampler, mesh, gather_output=False)
    for parallel in (model, sampler):
        single.zero_grad()
        assert_step_equal(single, parallel, mesh, inputs, loss=dsp.mean)


# --------------------------------------------------------------------------------------------------------------- bytes


SHAPE = {"frames": 4, "height": 8, "width": 8}


HOW = [("ulysses", "saved"), ("ring", "both"), slow("ulysses", None), slow("ulysses", "stages"), slow("ring", "saved")]


@pytest.mark.parametrize(("method", "how"), HOW)
def test_bytes_are_those_of_the_plan_and_of_the_formula(ranks, method: str, how: str | None) -> None:
    n, case = 4, "transformer2d"
    model = build(case)
    inputs = doubled(example(model, 2, **SHAPE))
    recomputed(model, how)
    plan = dsp.embedded.plan(
        model, kwargs=inputs, size=n, method=method, save_exchanges=how == "saved", gather_output=False
    )
    layer = 2 * 4 * 16 * 48 * 8  # M
    forward, backward = {
        "ulysses": (4 * layer // n, 4 * layer // n),
        "ring": (2 * layer, 2 * layer + 2 * layer * n // (n - 1)),
    }[method]
    again = {"stages": 1, "blocks": 1, "both": 2}.get(how or "", 0)
    for counts in ranks(step, n, case, method, how, SHAPE):
        inside = {"forward": forward, "backward": backward, "recompute": again * forward}
        for phase, expect in inside.items():
            expect = model.config.depth * expect * (n - 1) // n
            ends = sum(s.bytes for s in plan.switches) if phase != "recompute" else 0
            assert sent(counts, phase, "switch", "ring") == expect + ends == plan.bytes[phase]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the loopback counter of Linux")
@pytest.mark.parametrize("method", ["ulysses", slow("ring")])
def test_bytes_are_those_that_the_kernel_counts(mesh: DeviceMesh, method: str) -> None:
    group = mesh.get_group().group_name
    parts = [own(torch.randn(8, 509, 4, 128), mesh).requires_grad_() for _ in range(3)]

    def step() -> None:
        if method == "ring":
            y = ring_attention(*parts, 509, group)
        else:
            y = ulysses_attention(*parts, lambda q, k, v: q + k + v, 509, group)
        y.sum().backward()

    kernel, counted = measured(mesh, step)
    assert kernel == pytest.approx(counted, rel=0.03)


@pytest.mark.parametrize(("kv_heads", "share"), [(16, 4), (8, 3), (4, 2.5), (2, 2.5), (1, 2.5)])
def test_fewer_heads_of_keys_send_less(kv_heads: int, share: float) -> None:
    """(2 + 2·kv/h) M/N down to one head a rank: for 4 ranks (2 + 2·4/16) M/N."""
    with torch.device("meta"):
        model = zoo.create("stdit", "test", hidden=192, heads=16, kv_heads=kv_heads, depth=1)
        inputs = model.example_inputs(1, frames=4, height=8, width=8)
    plan = dsp.embedded.plan(model, kwargs=inputs, size=4, method="ulysses", gather_output=False)
    ends = sum(s.bytes for s in plan.switches)
    assert plan.bytes["forward"] - ends == share * (4 * 16 * 192 * 4) / 4 * 3 / 4


# --------------------------------------------------------------------------------------------- what does not fit it


def build_meta(name: str, **overrides: int) -> tuple[nn.Module, dict[str, Tensor]]:
    with torch.device("meta"):
        model = zoo.create(name, "test", **overrides)
        return model, model.example_inputs(1)


@pytest.mark.parametrize(
    ("name", "method", "size", "message"),
    [
        ("transformer2d", "rings", 2, "method='rings': expected one of 'dsp', 'ulysses', 'ring'"),
        ("st_mamba", "ring", 2, "STMamba names no attention core that ring could run .* its `cores` are empty"),
        ("hunyuan", "ring", 2, "HunyuanVideo names no attention core that ring could run .* its `cores` are empty"),
        ("transformer2d", "ulysses", 8, "ulysses deals 4 heads over 8 ranks.*parallel.sp=4"),
    ],
)
def test_methods_that_do_not_fit_are_refused(name: str, method: str, size: int, message: str) -> None:
    model, inputs = build_meta(name)
    with pytest.raises(ValueError, match=message):
        dsp.embedded.plan(model, kwargs=inputs, size=size, method=method, gather_output=False)


def test_cores_that_do_not_fit_are_errors() -> None:
    model, inputs = build_meta("transformer2d")
    core = "blocks.*.spatial.attention.core"
    for cores, message in [
        (None, "has no attribute `cores`, which ring needs"),
        ({"blocks.*.spatial.core": "(b t) [s] h [e]"}, "matches no submodule"),
        ({core: "(b t) [s] h [e]"}, "expected patterns of queries, keys and values"),
        ({core: "(b t) [s] c [e], (b t) [s] c [e], (b t) [s] c [e]"}, "under names that are not in its stage"),
        (
            {"blocks.*.temporal.attention.core": "(b s) [n] h [e]"},
            "no attention core computes over a dim that",
        ),
    ]:
        model.cores = cores
        with pytest.raises(ValueError, match=re.escape(message)):
            dsp.embedded.plan(model, kwargs=inputs, size=2, method="ring", gather_output=False)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_compiled_and_recomputed_stages(mesh: DeviceMesh, method: str) -> None:
    single, model = build("transformer2d"), build("transformer2d")
    dsp.embedded.parallelize(model, mesh, method, gather_output=False)
    stage = model.blocks[0].spatial
    stage.forward = torch.compile(stage.forward, backend="eager")
    stage.forward = partial(checkpoint, stage.forward, use_reentrant=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        assert_step_equal(single, model, mesh, doubled(example(single, 2, frames=2, height=4, width=6)))


def test_reentrant_checkpoints_and_second_methods_are_errors(mesh: DeviceMesh) -> None:
    model = build("transformer2d")
    inputs = doubled(example(model, 2, frames=2, height=4, width=4))
    dsp.embedded.parallelize(model, mesh, "ulysses", gather_output=False)
    spatial = model.blocks[-1].spatial
    spatial.forward = partial(checkpoint, spatial.forward, use_reentrant=True)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        out = model(**inputs)
        dsp.mean(out * out).backward()
    other = dsp.embedded.core.Distributed("core", spatial.attention.core)
    with pytest.raises(ValueError, match="already run by ulysses"):
        other.install(Axis.of(mesh))


# ---------------------------------------------------------------------------------------------------------- train.py


@pytest.mark.parametrize("method", [slow("ulysses"), long("ring")])
def test_training_gives_the_losses_of_one_process(run, whole_world, method: str) -> None:
    few = ("train.steps=2", "eval.every=0", "sample.every=0", "checkpoint.every=0")
    again = ("train.checkpoint_activations=stages", "parallel.save_exchanges=true") if method == "ulysses" else ()
    one = run("name=one", *few)
    whole_world(run_here, 2, run.arguments("name=two", f"parallel.method={method}", *few, *again))
    alike(one, run.directory / "runs/two", 1e-4, [("loss", "grad_norm")])


def test_a_core_that_is_given_a_mask_is_refused() -> None:
    core = object.__new__(Ulysses)
    core.name = "blocks.0.core"
    x = torch.zeros(1, 4, 2, 3)
    with pytest.raises(ValueError, match=r"takes only queries, keys and values, and got mask.*use method='dsp'"):
        core.bind((x, x, x), {"mask": x})
