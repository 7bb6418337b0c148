"""Megatron-LM, Megatron-SP and FastFold's schedule: whole models against one process; bytes against those stated."""

from __future__ import annotations

import copy
import shutil
from functools import partial
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import dsp
import zoo
from dsp.stages.notation import NotationError
from tests.support.cases import build, doubled, example
from tests.support.embedded import gradients
from tests.support.parity import assert_step_equal
from tests.support.runs import alike, run_here
from tests.support.slow import long, slow
from zoo.protein.objective import ProteinObjective

MEGATRON = ("megatron_sp", "megatron_lm")


def parity(mesh: DeviceMesh, case: str, method: str, frames: int, height: int, width: int) -> None:
    """Exact, a part of each weight a rank; as many bytes as planned, where lengths do not divide at most so many."""
    single, model = build(case), build(case)
    inputs = doubled(example(single, 2, frames=frames, height=height, width=width))
    inputs["x"].requires_grad_()
    plan = dsp.embedded.plan(model, kwargs=inputs, size=mesh.size(), method=method, gather_output=False)
    dsp.embedded.parallelize(model, mesh, method, gather_output=False)
    (comm,) = assert_step_equal(single, model, mesh, inputs, gradients=gradients, count=True)
    weights = {n: p for n, p in model.named_parameters() if isinstance(p, DTensor)}
    assert len(weights) > 10
    for name, p in weights.items():
        assert p.to_local().numel() * mesh.size() == single.get_parameter(name).numel()
    assert not comm.recompute.bytes
    scalar = 2 * 8 * (mesh.size() - 1) // mesh.size()  # the loss'
    for name, phase in {"forward": comm.forward, "backward": comm.backward}.items():
        sent, planned = phase.bytes.total() - scalar, plan.bytes[name]
        assert sent <= planned
        assert sent == planned or (method == "megatron_sp" and width != 8)


@pytest.mark.parametrize("method", MEGATRON)
@pytest.mark.parametrize(
    ("case", "mesh"),
    [
        slow("transformer2d", 4), ("transformer2d-stdit", 2), slow("stdit-v2", 4),
        slow("stdit-v3", 2), slow("latte-text", 2), slow("latte-3-text", 4),
    ],
)  # fmt: skip
def test_models(mesh: DeviceMesh, case: str, method: str) -> None:
    parity(mesh, case, method, 7, 6, 10)  # 15 patches a frame


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [4])
@pytest.mark.parametrize("method", MEGATRON)
def test_bytes_where_lengths_divide(mesh: DeviceMesh, method: str) -> None:
    parity(mesh, "transformer2d-stdit", method, 8, 8, 8)


@pytest.mark.slow
@pytest.mark.parametrize("method", MEGATRON)
def test_lengths_and_checkpoints(mesh: DeviceMesh, method: str) -> None:
    """A rank without a patch, one patch in all, and other lengths again, in one model and with checkpoints."""
    single, model = build("stdit-v3"), build("stdit-v3")
    dsp.embedded.parallelize(model, mesh, method, gather_output=False)
    assert len(dsp.embedded.rank_order(model)) == 2 * 2 * 2 * 2  # qkv and kv of two blocks a layer, weight and bias
    for block in model.blocks:
        block.spatial.forward = partial(checkpoint, block.spatial.forward, use_reentrant=False)
        keep = partial(checkpoint, use_reentrant=False, context_fn=dsp.embedded.save_exchanges)
        block.temporal.forward = partial(keep, block.temporal.forward)
    for height, width in ((2, 10), (2, 2), (6, 2)):
        inputs = doubled(example(single, 1, frames=3, height=height, width=width))
        single.zero_grad()
        (comm,) = assert_step_equal(single, model, mesh, inputs, gradients=gradients, count=True)
        calls = comm.recompute.calls
        assert calls["gather"] + calls["all_reduce"] == 2 * 3  # the three regions of each spatial block alone
    with pytest.raises(RuntimeError, match="outside of its parallelized model"):
        model.blocks[0].spatial.mlp(torch.zeros(1, 1, 1, 48, dtype=torch.float64))


@pytest.mark.parametrize("method", MEGATRON)
def test_half_precision_stays_half(mesh: DeviceMesh, method: str) -> None:
    model = build("transformer2d")
    inputs = doubled(example(model, 1, frames=3, height=4, width=4))
    dsp.embedded.parallelize(model, mesh, method)
    given = {k: v.to(torch.bfloat16) if v.is_floating_point() else v for k, v in inputs.items()}
    assert model.to(torch.bfloat16)(**given).dtype == torch.bfloat16


def plan_of(method: str, n: int, name: str = "stdit", **overrides: Any) -> dsp.Plan:
    with torch.device("meta"):
        model = zoo.create(name, "test", **overrides)
        return dsp.embedded.plan(model, kwargs=example(model, 1), size=n, method=method, gather_output=False)


@pytest.mark.parametrize("method", MEGATRON)
def test_heads_must_divide(method: str) -> None:
    with pytest.raises(ValueError, match=r"qkv': 4 heads do not divide over 3 ranks; take .* divides 4"):
        plan_of(method, 3)
    with pytest.raises(ValueError, match=r"qkv': 4 and 2 heads do not divide over 4 ranks; take .* divides 2"):
        plan_of(method, 4, kv_heads=2)


def test_refusals() -> None:
    for method in MEGATRON:
        with pytest.raises(ValueError, match="names no linear layers to cut"):
            plan_of(method, 2, "st_mamba")
    with pytest.raises(ValueError, match="no such dim in its first input"):
        dsp.embedded.plan(build("latte"), size=2, method="megatron_sp", along="h", gather_output=False)
    with pytest.raises(ValueError, match="needs a dict `dap` on"):
        plan_of("dap", 2)
    for text, message in (
        ("column", "expected 'columns' or 'rows'"), ("columns 5", "144 columns, which 5 heads do not divide"),
        ("rows", "with 'columns', and one with 'rows' as its last layer"),
    ):  # fmt: skip
        model = build("latte")
        model.tensor_parallel["blocks.*.spatial.attention.qkv"] = text
        with pytest.raises(NotationError, match=message):
            dsp.embedded.plan(model, size=2, method="megatron_lm", gather_output=False)


# FastFold's schedule


def formula(n: int, r: int, s: int) -> float:
    """Bytes a rank receives in one block's forward, in bf16."""
    return 2 * (n - 1) / n * (r * r * (272 + 512 / n) + s * r * (32 + 512 / n))


@pytest.mark.slow
def test_bytes_of_fastfold() -> None:
    (r, s, n), table, found = (768, 512, 8), {"dap": 394, "dsp": 205}, {}
    for method in table:
        plans = []
        for depth in (1, 2):
            with torch.device("meta"):
                model = zoo.create("evoformer", "af2", depth=depth, extra_depth=0)
                inputs = model.example_inputs(1, rows=s, residues=r)
            plans.append(
                dsp.embedded.plan(
                    model, kwargs=inputs, size=n, method=method, dtype=torch.bfloat16, gather_output=False
                )
            )
        found[method] = [plans[1].bytes[p] - plans[0].bytes[p] for p in ("forward", "backward")]
        if method == "dap":
            assert plans[1].calls["forward"] - plans[0].calls["forward"] == 12
    assert found["dap"] == [formula(n, r, s)] * 2
    for method, mib in table.items():
        assert found[method][0] / 2**20 == pytest.approx(mib, rel=2e-3)


PROTEINS = {"evoformer": {"opm_first": False}, "evoformer-first": {"opm_first": True}, "pairformer": {}}


@pytest.mark.slow
@pytest.mark.parametrize(("case", "mesh"), [slow("evoformer", 4), ("evoformer-first", 2), long("pairformer", 4)])
def test_fastfold(mesh: DeviceMesh, case: str) -> None:
    single = zoo.create(case.split("-")[0], "test", **PROTEINS[case]).double()
    for p in single.parameters():
        nn.init.normal_(p, std=0.2)
    model = copy.deepcopy(single)
    torch.manual_seed(1)
    inputs = single.example_inputs(1, rows=5, residues=7)
    plan = dsp.embedded.plan(model, kwargs=inputs, size=mesh.size(), method="dap", gather_output=False)
    dsp.embedded.parallelize(model, mesh, "dap", gather_output=False)
    (comm,) = assert_step_equal(single, model, mesh, inputs, gradients=gradients, count=True)
    scalars = 3 * 2 * 8 * (mesh.size() - 1) // mesh.size()
    assert comm.forward.bytes.total() - scalars <= plan.bytes["forward"]
    assert comm.backward.bytes.total() - scalars <= plan.bytes["backward"]


def test_objectives_have_it_too() -> None:
    for name in ("evoformer", "pairformer"):
        objective = ProteinObjective(zoo.create(name, "test"))
        assert objective.dap.keys() == objective.stages.keys()
        assert objective.dap != objective.stages


# Training


@pytest.mark.parametrize("n", [slow(2), long(4)])
def test_training_is_that_of_one_process(run, whole_world, n: int) -> None:
    """Curves, averages, pictures; and a checkpoint of one method goes on on one process, and under another method."""
    options = ["train.ema=0.5", "train.precision=fp32"]
    whole = run(*options, "train.batch=4", "name=whole")
    cut = run.directory / "runs/cut"

    on = [*options, f"train.batch={8 // n}", "name=cut"]
    whole_world(run_here, n, run.arguments(*on, f"parallel={{dp_shard: {n // 2}, sp: 2, method: megatron_sp}}"))
    alike(whole, cut)
    with Image.open(whole / "samples/step-00000004.gif") as a, Image.open(cut / "samples/step-00000004.gif") as b:
        assert max(abs(p - q) for p, q in zip(a.convert("L").tobytes(), b.convert("L").tobytes())) <= 8
    again = ["parallel={dp_replicate: 2, sp: 2, method: megatron_lm}", "train.checkpoint_activations=both"]
    for mesh in (None, again)[: n // 2]:
        shutil.rmtree(cut / "checkpoints/step-00000004")
        if mesh:
            whole_world(run_here, 4, run.arguments(*on, *mesh, "resume=true"))
        else:
            run(*options, "train.batch=4", "name=cut", "resume=true")
        alike(whole, cut)
