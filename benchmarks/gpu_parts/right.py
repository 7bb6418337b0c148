"""Is it right on CUDA? Models and kernels of one process, several ranks on one GPU over gloo, and NCCL by itself."""

from __future__ import annotations

import copy
import math
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import dsp
import dsp.comm.collectives  # its ops
import dsp.embedded
import zoo
import zoo.attention
from benchmarks.common import ROOT
from benchmarks.gpu_parts import (
    KERNELS,
    PYTHONPATH,
    REFUSED,
    Cases,
    Machine,
    Part,
    Row,
    attended_by,
    error,
    mesh_of,
    pretended,
    reason,
)
from dsp.comm.layout import Axis
from dsp.comm.pending import ChunkedSwitch
from dsp.comm.randomness import forked
from dsp.guard.agreement import Agreement
from dsp.support.tensors import tensors_in
from zoo.training.model import repeated_stages
from zoo.video import mamba

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 0.1}

PATIENCE = timedelta(seconds=40)
Check = Callable[[Machine, DeviceMesh], Row]
LOSSY = {"bf16": 0.02, "fp8": 0.2, "int8": 0.2}  # the largest relative error


# -------------------------------------------------------------------------------------------------------- the models


@cache
def reference(name: str) -> tuple[Any, dict[str, Tensor], list[Tensor], Tensor]:
    """A small model in float64 on the CPU, its inputs, what it gives, and all gradients as one vector.

    Weights and inputs are numbers that bf16 has, so that what differs is how one computes with them; none is zero.
    """
    torch.manual_seed(0)
    model: Any = zoo.create(name, "test").double().eval()
    with torch.no_grad():
        for p in model.parameters():
            nn.init.normal_(p, std=0.3 if p.ndim == 1 else p[0].numel() ** -0.5)
            p.copy_(p.bfloat16())
    inputs = {k: rounded(x) for k, x in model.example_inputs(1).items()}
    outputs, gradients = results(model, inputs)
    return model, inputs, outputs, gradients


def rounded(x: Tensor) -> Tensor:
    return x.bfloat16().double() if x.is_floating_point() else x


def results(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[list[Tensor], Tensor]:
    """Outputs, and the gradient of a projection of them with respect to every parameter."""
    model.zero_grad()
    outputs = [y for y in tensors_in(model(**inputs)) if y.is_floating_point()]
    loss: Any = 0.0
    for y in outputs:
        weight = torch.linspace(-1, 1, y.numel(), device=y.device, dtype=torch.float64).view_as(y)
        loss = loss + (y.double() * weight).mean()
    loss.backward()
    grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]
    return [y.detach() for y in outputs], torch.cat([g.double().flatten() for g in grads])


def one_model(machine: Machine, name: str, dtype: torch.dtype, change: Callable[[Any], None] | None = None) -> Row:
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    model, inputs, outputs, gradients = reference(name)
    local: Any = copy.deepcopy(model).to(machine.device, dtype)
    if change is not None:
        change(local)
    given = {k: x.to(machine.device, dtype if x.is_floating_point() else x.dtype) for k, x in inputs.items()}
    actual, grads = results(local, given)
    row = {
        "outputs": max(error(a, b) for a, b in zip(actual, outputs, strict=True)),
        "gradients": error(grads, gradients),
    }
    right = all(value <= TOLERANCE[dtype] for value in row.values()) and all(y.dtype == dtype for y in actual)
    return {"ok": right, **row}


def models(machine: Machine, _: Any) -> Cases:
    return {
        f"{name} {str(dtype).removeprefix('torch.')}": partial(one_model, machine, name, dtype)
        for name in zoo.list_models()
        for dtype in (torch.float64, torch.float32, torch.bfloat16)
    }


# -------------------------------------------------------------------------------------------------- compiled, again


def compiled(machine: Machine, _: Any) -> Cases:
    """Every stage compiled by itself, as train.py does it; and recomputed, outside of what is compiled and inside."""

    def change(model: Any, way: str) -> None:
        torch._dynamo.reset()
        torch._dynamo.config.recompile_limit = 64  # all stages of a kind share one forward
        recompute = partial(checkpoint, use_reentrant=False)
        for stage in repeated_stages(model):
            inside = partial(recompute, stage.forward) if way == "recomputed inside" else stage.forward
            inside = torch.compile(inside, backend=machine.compiler)
            stage.forward = partial(recompute, inside) if way == "recomputed outside" else inside

    ways = [("transformer2d", way) for way in ("kept", "recomputed outside", "recomputed inside")]
    others = [(name, "recomputed outside") for name in ("stdit", "pairformer", "st_mamba")]
    return {
        f"{name}, {way}": partial(one_model, machine, name, torch.float32, partial(change, way=way))
        for name, way in ways + machine.of(others, [])
    }


# --------------------------------------------------------------------------------------------------------- attention


def attend_by(machine: Machine, kernel: str, shape: tuple[int, ...], dtype: torch.dtype) -> Row:
    """One kernel of attention (b n h e), forward and backward, against float64."""
    torch.manual_seed(0)
    exact = [torch.randn(shape).to(dtype).double().requires_grad_() for _ in range(3)]
    local = [x.detach().to(machine.device, dtype).requires_grad_() for x in exact]
    weight = torch.randn(shape)

    def run(given: list[Tensor], attend: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        y = attend(*given)
        return y, *torch.autograd.grad((y * weight.to(y)).sum(), given)

    def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        logits = torch.einsum("bnhe,bmhe->bhnm", q, k) * q.shape[-1] ** -0.5
        return torch.einsum("bhnm,bmhe->bnhe", logits.softmax(-1), v)

    wanted = run(exact, by_hand)
    if kernel == "flash-attn":
        if zoo.attention.flash_attn_func is None:
            return {"ok": None, "note": "flash-attn is not installed"}
        actual = run(local, zoo.attention.flash_attn_func)
    else:
        try:
            with attended_by([] if kernel == "as the zoo has it" else [kernel]):
                actual = run(local, zoo.attention.attend)
        except RuntimeError as problem:
            needed = not machine.dry and kernel == "flash"
            if needed or not any(words in str(problem) for words in REFUSED):
                raise
            return {"ok": None, "note": "does not take this"}
    row = {what: error(a, b) for what, a, b in zip(("output", "dq", "dk", "dv"), actual, wanted)}
    return {"ok": all(value < TOLERANCE[dtype] / 2 for value in row.values()), **row}


def kernels(machine: Machine, _: Any) -> Cases:
    cases: Cases = {}
    for width in machine.of((64, 72, 128), (8,)):
        shape = (2, machine.of(200, 20), 4, width)
        for kernel in (*KERNELS, "flash-attn", "as the zoo has it"):
            cases[f"{kernel}, heads of {width}"] = partial(attend_by, machine, kernel, shape, torch.bfloat16)
    many = (machine.of(zoo.attention.MAX_BATCH + 10, 10), 3, 1, 8)
    name = "as the zoo has it, more rows than a grid has"
    cases[name] = partial(attend_by, machine, "as the zoo has it", many, torch.bfloat16)
    scans = torch.float32, torch.bfloat16
    return cases | {f"Mamba-1 by mamba_ssm, {str(dtype)[6:]}": partial(scanned, machine, dtype) for dtype in scans}


# ------------------------------------------------------------------------------------------------------------- scans


def scanned(machine: Machine, dtype: torch.dtype) -> Row:
    """The mixer of Mamba-1 by the kernel of mamba_ssm, outputs and gradients, against its definition in float64."""
    kernel = mamba.mamba_kernel()
    if kernel is None:
        return {"ok": None, "note": "mamba_ssm is not installed"}
    torch.manual_seed(0)
    exact = mamba.Mamba1(64, bidirectional=True)
    exact.init_weights()
    exact = exact.bfloat16().double()  # weights are numbers that bf16 has
    local, x, calls = copy.deepcopy(exact).to(machine.device, dtype), rounded(torch.randn(2, 50, 64)), []

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(1)
        return kernel(*args, **kwargs)

    (wanted,), gradients = results(exact, {"x": x.double()})
    with patch.object(mamba, "mamba_kernel", lambda: counted):
        (actual,), grads = results(local, {"x": x.to(machine.device, dtype)})
    row = {"outputs": error(actual, wanted), "gradients": error(grads, gradients)}
    return {"ok": len(calls) == 2 and all(value <= TOLERANCE[dtype] for value in row.values()), **row}


# ---------------------------------------------------------------------------------------------------- random numbers


class Dropping(nn.Module):
    """A stage that drops out, and one weight that all of it is multiplied by."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.weight, self.recompute = nn.Parameter(torch.ones(())), recompute

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.drop, x, use_reentrant=False) if self.recompute else self.drop(x)

    def drop(self, x: Tensor) -> Tensor:
        return F.dropout(x * self.weight, 0.5)


def recomputed_draws(machine: Machine, outside: bool) -> Row:
    """In parallel what is recomputed drops the same: then the gradient of the weight is the mean itself."""
    torch.manual_seed(0)
    with pretended(machine, 2, rank=1) as mesh:
        model: Any = nn.Sequential()
        model.stage = Dropping(recompute=not outside)
        model.forward = lambda x: checkpoint(model.stage, x, use_reentrant=False) if outside else model.stage(x)
        model.to(machine.device)
        dsp.parallelize(model, mesh, {"": "input=b t c", "stage": "b t [c]"}, gather_output=False)
        y = model(torch.rand(2, 64, 64, device=machine.device))
        dsp.mean(y).backward()
        expected = y.to_local().sum() / y.numel()
        kept = (y.to_local() != 0).float().mean().item()
    off = error(model.stage.weight.grad, expected)
    return {"ok": off < 1e-5 and 0.4 < kept < 0.6, "gradient": off, "kept": kept}


def streams(machine: Machine) -> Row:
    """Within a fork each rank draws its own; after it all go on as if there had been none."""
    draws, after = [], []
    for rank in (0, 1, 1):
        torch.manual_seed(0)
        with pretended(machine, 2, rank) as mesh, forked(Axis.of(mesh)):
            draws.append(torch.rand(1000, device=machine.device))
        after.append((torch.rand(4, device=machine.device), torch.rand(4)))
    torch.manual_seed(0)
    plain = torch.rand(4, device=machine.device)
    right = {
        "a rank's own": not torch.equal(draws[0], draws[1]),
        "the same each time": torch.equal(draws[1], draws[2]),
        "alike after it": all(torch.equal(a, b) for a, b in zip(after[0], after[1])),
        # on a CPU the fork itself takes a number
        "of the device, as before": machine.dry or torch.equal(after[0][0], plain),
    }
    return {"ok": all(right.values()), **right}


def random(machine: Machine, _: Any) -> Cases:
    return {
        "a checkpoint inside a stage": partial(recomputed_draws, machine, False),
        "a checkpoint round a stage": partial(recomputed_draws, machine, True),
        "streams of ranks": partial(streams, machine),
    }


# --------------------------------------------------------------------------------------------------------- the tests


def pytest(file: str) -> Row:
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", file]
    environment = os.environ | {"PYTHONPATH": PYTHONPATH}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    lines = done.stdout.splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    passed = sum(line.startswith("PASSED") for line in lines)
    right = done.returncode == 0 and (passed > 0 or None)  # where all are skipped nothing is known
    row: Row = {"ok": right, "passed": passed, "summary": lines[-1] if lines else ""}
    row |= {"note": "no test of it was run"} if right is None else {}
    return row | ({"failed": failed[:20] or (done.stdout + done.stderr)[-600:]} if done.returncode else {})


def tests(machine: Machine, _: Any) -> Cases:
    return {"pytest": partial(pytest, "tests/dsp/comm/test_cuda_kernels.py")}


# --------------------------------------------------------------------------------------- several ranks on one GPU: gloo


def small(machine: Machine, name: str = "transformer2d", batch: int = 1, **options: Any) -> tuple[Any, dict[str, Any]]:
    """A tiny model on the device, of which no weight is zero, and inputs; the same each time."""
    torch.manual_seed(0)
    with torch.device(machine.device):
        model: Any = zoo.create(name, "test", **options)
        inputs = model.example_inputs(batch, frames=8, height=16, width=16)
    for p in model.parameters():
        nn.init.normal_(p, std=0.1)
    return model, inputs


def all_gradients(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def functions(machine: Machine, mesh: DeviceMesh) -> Row:
    """split, switch, start_switch, gather and mean, of parts that do not divide, and the gradient through all."""
    torch.manual_seed(0)
    x = torch.randn(2, 7, 5, 6, device=machine.device, dtype=torch.float64)
    weight = torch.randn(7, 1, 1, device=machine.device, dtype=torch.float64)
    leaf, alone = x.clone().requires_grad_(), x.clone().requires_grad_()
    shard = dsp.split(leaf, mesh, 1)
    there = dsp.start_switch(dsp.switch(shard, 2) * 2, 3).wait()
    whole = dsp.gather(there)
    loss = dsp.mean(dsp.switch(there, 1).square(), weight) + whole.sin().mean()
    loss.backward()
    both = alone * 2
    wanted = (both.square() * weight).sum() / weight.expand_as(both).sum() + both.sin().mean()
    wanted.backward()
    assert leaf.grad is not None
    assert alone.grad is not None
    row = {"gather": error(whole, both), "loss": error(loss, wanted), "gradient": error(leaf.grad, alone.grad)}
    return {"ok": max(row.values()) < 1e-12, **row}


def checked(machine: Machine, mesh: DeviceMesh, name: str, options: dict[str, Any]) -> Row:
    """dsp.check in float64: outputs, every gradient, every stage by slices."""
    torch.manual_seed(0)
    with torch.device(machine.device):
        model: Any = zoo.create(name, "test", **options)
        inputs = model.example_inputs(1)
    for p in model.parameters():
        nn.init.normal_(p, std=0.1)
    report = dsp.check(model, kwargs=inputs, mesh=mesh)
    row = {
        "outputs": report.output, "gradients": max(report.gradients.values(), default=math.inf),
        "slices": max(report.slices.values(), default=math.inf),
    }  # fmt: skip
    # times are embedded in fp32, whatever the model's dtype, and so are their gradients
    limits = {"outputs": 1e-9, "slices": 1e-9, "gradients": 1e-5}
    right = all((value := row[what]) is not None and value < limit for what, limit in limits.items())
    return {"ok": right, **row} | ({} if right else {"error": "; ".join(report.problems)[:400]})


def recomputed(machine: Machine, mesh: DeviceMesh, kept: bool) -> Row:
    """With checkpoints round stages or blocks the gradients are those without; round stages nothing is sent again."""
    grads: list[Tensor] = []
    for recompute in (False, True):
        model, inputs = small(machine)
        modules = [s for b in model.blocks for s in ((b.spatial, b.temporal) if kept else (b,))] if recompute else []
        for module in modules:
            module.forward = partial(checkpoint, module.forward, use_reentrant=False)
        dsp.parallelize(model, mesh, gather_output=False)
        with dsp.count_comm() as comm:
            dsp.mean(model(**inputs).square()).backward()
        grads.append(all_gradients(model))
    off, sent = error(grads[1], grads[0]), sum(comm.recompute.calls.values())
    return {"ok": off < 1e-5 and (sent == 0) == kept, "gradients": off, "collectives sent again": sent}


def by_method(machine: Machine, mesh: DeviceMesh, method: str) -> Row:
    """An embedded method's output against one process."""
    outputs = []
    for one in (None, method):
        model, inputs = small(machine)
        model.double()
        if one is not None:
            dsp.embedded.parallelize(model, mesh, one)
        outputs.append(model(**{k: x.double() for k, x in inputs.items()}))
    off = error(outputs[1], outputs[0])
    return {"ok": off < 1e-10, "output": off}


def travelling(machine: Machine, mesh: DeviceMesh, options: dict[str, Any]) -> Row:
    """Outputs and gradients with switches that travel otherwise, against plain ones: equal but for fewer bits."""
    outcomes: list[tuple[Tensor, Tensor]] = []
    for given in ({}, options):
        model, inputs = small(machine, batch=2, hidden=64)
        dsp.parallelize(model, mesh, **given)
        for _ in range(2):  # of which the second makes no plan
            model.zero_grad()
            y = model(**inputs)
            dsp.mean(y.square()).backward()
        outcomes.append((y.detach(), all_gradients(model)))
    row = {what: error(a, b) for what, a, b in zip(("output", "gradients"), outcomes[1], outcomes[0])}
    limit = LOSSY.get(options.get("wire", ""), 1e-5)
    return {"ok": max(row.values()) < limit and (limit < 1e-3 or min(row.values()) > 0), **row}


class Causal(nn.Module):
    """Causal attention of one head, between stages."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = x.unflatten(-1, (3, 1, -1)).permute(2, 0, 3, 1, 4)
        return x + scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2).repeat(1, 1, 3)


def dealt(machine: Machine, mesh: DeviceMesh) -> Row:
    """Causal attention along sharded queries, which ranks deal among them so that each has as much to do."""
    x = torch.randn(1, 30, 48, device=machine.device)
    report = dsp.check(Causal(), (x,), mesh=mesh, stages={"": "x=b n c"})
    right = report.output is not None and report.output < 1e-9
    return {"ok": right, "output": report.output} | ({} if right else {"error": "; ".join(report.problems)[:400]})


def causal_ring(machine: Machine, mesh: DeviceMesh) -> Row:
    """The causal ring by pairs of blocks, outputs and gradients of this rank's places, against one process."""
    torch.manual_seed(0)
    whole = [torch.randn(1, 30, 2, 16, device=machine.device).requires_grad_() for _ in range(3)]
    wanted = scaled_dot_product_attention(*(x.transpose(1, 2) for x in whole), is_causal=True).transpose(1, 2)
    local = [x.detach().chunk(mesh.size(), 1)[mesh.get_local_rank()].clone().requires_grad_() for x in whole]
    y = dsp.embedded.ring_attention(*local, 30, mesh.get_group().group_name, causal=True)
    row = {}
    for name, mine, theirs in zip("yqkv", (y, *gradients(y, local)), (wanted, *gradients(wanted, whole))):
        row[name] = error(mine, theirs.chunk(mesh.size(), 1)[mesh.get_local_rank()])
    return {"ok": max(row.values()) < 1e-4, **row}


def gradients(y: Tensor, of: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(y.square().sum(), of)


def not_waiting(machine: Machine, mesh: DeviceMesh) -> Row:
    """A call whose plan is known makes the host wait for nothing: torch raises where one of its operations would."""
    model, inputs = small(machine, "latte")
    dsp.parallelize(model, mesh, gather_output=False)
    for trial in range(3):
        if trial == 2 and not machine.dry:
            torch.cuda.set_sync_debug_mode("error")
        try:
            dsp.mean(model(**inputs).square()).backward()
        finally:
            if not machine.dry:
                torch.cuda.set_sync_debug_mode("default")
    return {"ok": True}


def disagreeing(machine: Machine, mesh: DeviceMesh) -> Row:
    """Ranks that are given different inputs are told so, by the next call at the latest."""
    model, inputs = small(machine)
    dsp.parallelize(model, mesh)
    model(**inputs)
    try:
        for _ in range(2):
            model(**{**inputs, "timestep": inputs["timestep"] + mesh.get_local_rank()})
    except RuntimeError as refusal:
        return {"ok": "hold different inputs" in str(refusal)}
    return {"ok": False, "error": "nobody noticed"}


UNSURE: dict[str, Check] = {  # last: gloo may not send a CUDA tensor from rank to rank, and who waits may be lost
    **{way: partial(travelling, options={"route": dsp.Route(way, 2)}) for way in ("hierarchical", "rounds")},
    "causal ring": causal_ring,
    "ring": partial(by_method, method="ring"),
}
CHECKS: dict[str, Check] = {
    "functions": functions,
    **{
        f"check {name}{''.join(f' {v}' for v in options.values())}": partial(checked, name=name, options=options)
        for name, options in (
            ("transformer2d", {}), ("latte", {"conditioning": "class", "num_classes": 5}), ("stdit", {"version": "v3"}),
            ("st_mamba", {}), ("st_rwkv", {}), ("axial_video", {}), ("axial_image", {}), ("pairformer", {}),
        )
    },
    "checkpoints round stages": partial(recomputed, kept=True),
    "checkpoints round blocks": partial(recomputed, kept=False),
    **{method: partial(by_method, method=method) for method in ("ulysses", "megatron_lm", "megatron_sp")},
    **{
        " ".join(f"{k}={v}" for k, v in options.items()): partial(travelling, options=options)
        for options in (*({"wire": wire} for wire in LOSSY), {"overlap": 2}, {"overlap": 2, "wire": "fp8"})
    },
    "causal, queries dealt": dealt,
    "the host waits for nothing": not_waiting,
    "different inputs": disagreeing,
    **UNSURE,
}  # fmt: skip
A_FEW = (  # in a dry run
    "functions", "check transformer2d", "checkpoints round stages", "ulysses", "wire=fp8", "overlap=2",
    "causal, queries dealt", "different inputs", "ring",
)  # fmt: skip


def failed(machine: Machine, name: str, why: str) -> Row:
    if name in UNSURE and not machine.dry:
        return {"ok": None, "note": f"gloo does not do this: {why}"}
    return {"ok": False, "error": why}


def rank_of_gloo(rank: int, n: int, machine: Machine, store: str, wanted: list[str], pipe: Any) -> None:
    torch.set_num_threads(1)
    if not machine.dry:
        torch.cuda.set_device(0)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=n, timeout=PATIENCE)
    mesh = mesh_of(machine)
    for name in wanted:
        try:
            row = CHECKS[name](machine, mesh)
        except Exception as problem:
            row = failed(machine, name, reason(problem))
        everyone: list[Any] = [None] * n
        dist.all_gather_object(everyone, row)
        if rank == 0:
            pipe.send((name, next((r for r in everyone if r["ok"] is False), row)))
    dist.destroy_process_group()


class Ranks:
    """n processes that make the checks one after the other; `row` waits for that of one check."""

    def __init__(self, machine: Machine, n: int, wanted: list[str]) -> None:
        self.machine = machine
        fork = multiprocessing.get_context("fork")
        self.pipe, there = fork.Pipe(duplex=False)
        self.folder = tempfile.TemporaryDirectory(prefix="dsp-gpu-")
        given = [(rank, n, machine, f"{self.folder.name}/store", wanted, there) for rank in range(n)]
        self.processes = [fork.Process(target=rank_of_gloo, args=args) for args in given]
        for process in self.processes:
            process.start()
        there.close()

    def row(self, name: str) -> Row:
        try:
            case, row = self.pipe.recv()
        except EOFError:
            codes = [process.exitcode for process in self.processes]
            return failed(self.machine, name, f"the ranks ended before this, with {codes}")
        assert case == name
        return row


def gloo(machine: Machine, _: Any) -> Cases:
    names = machine.of(list(CHECKS), list(A_FEW))
    ranks = Ranks(machine, machine.of(4, 2), names)
    return {name: partial(ranks.row, name) for name in names}


# --------------------------------------------------------------------------------------------- one rank by itself: NCCL


def alone(machine: Machine) -> DeviceMesh:
    if not dist.is_initialized():
        if not machine.dry:
            torch.cuda.set_device(0)
        dist.init_process_group(machine.of("nccl", "gloo"), store=dist.HashStore(), rank=0, world_size=1)
    return mesh_of(machine)


def operations(machine: Machine, dtype: torch.dtype) -> Row:
    """Every collective of dsp among one rank gives what it is given, forward and backward."""
    group = alone(machine).get_group().group_name
    x = torch.randint(0, 2, (2, 6, 4), device=machine.device).to(dtype)
    x.requires_grad_(dtype.is_floating_point)
    ops, plain = torch.ops.dsp, ([], [], "same", "same")
    halves = ChunkedSwitch(1, 2, (6, 4), group)
    halves.send(x)
    outputs = {
        "switch": ops.switch(x, 1, 2, 6, group), "two halves": halves.join(),
        "several switches": ops.switch_many([x], [1], [2], [6], group, [0], *plain)[0],
        "at once": ops.switch_many([x], [1], [2], [6], group, [], *plain)[0], "gather": ops.gather(x, 1, 6, group),
        "switch_among": ops.switch_among(x, 1, 2, [6], [4], [0], group),
    }  # fmt: skip
    if dtype not in (torch.bool, torch.complex64):
        outputs |= {"reduce_scatter": ops.reduce_scatter(x, 1, group), "all_reduce": ops.all_reduce(x, group)}
    wrong = [name for name, y in outputs.items() if not torch.equal(y, x)]
    if x.requires_grad:
        for name, y in outputs.items():
            (grad,) = torch.autograd.grad(y.sum(), x)
            wrong += [] if torch.equal(grad, torch.ones_like(x)) else [f"{name} backward"]
    return {"ok": not wrong, **({"error": f"wrong: {', '.join(wrong)}"} if wrong else {})}


def read_beside(machine: Machine) -> Row:
    """The host learns that ranks agree while the device is still busy with what it was given before and since."""
    agreement = Agreement(Axis.of(alone(machine)), ["x"], torch.nn.Linear(2, 2))
    x = torch.randn(machine.of(8192, 64), machine.of(8192, 64), device=machine.device)
    agreement.start((x,), {}, 7, wait=True)
    agreement.start((x,), {}, 7, wait=False)
    machine.wait()
    began = time.perf_counter()
    agreement.start((x,), {}, 7, wait=False)
    time.sleep(0.05)
    for _ in range(machine.of(20, 1)):  # a third of a second on an H200, in fp32
        x @ x
    asked = time.perf_counter() - began
    agreement.finish()
    answered = time.perf_counter() - began
    machine.wait()
    done = time.perf_counter() - began
    row = {"asked, ms": 1e3 * asked, "answered, ms": 1e3 * answered, "device done, ms": 1e3 * done}
    return {"ok": machine.dry or answered < done - 0.2 * (done - asked), **row}


def captured(machine: Machine) -> Row:
    """A switch in a CUDA graph of NCCL, replayed on other numbers."""
    if machine.dry:
        return {"ok": None, "note": "there are no CUDA graphs on a CPU"}
    group = alone(machine).get_group().group_name
    x = torch.randn(4, 8, 16, device=machine.device)
    for _ in range(3):
        torch.ops.dsp.switch(x, 0, 1, 4, group)
    machine.wait()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog is another thread
        y = torch.ops.dsp.switch(x, 0, 1, 4, group) + 1
    x.normal_()
    graph.replay()
    machine.wait()
    return {"ok": torch.equal(y, x + 1)}


def compiled_switch(machine: Machine) -> Row:
    """A switch inside of a compiled function."""
    group = alone(machine).get_group().group_name
    run = torch.compile(lambda x: torch.ops.dsp.switch(x * 2, 0, 1, 4, group) + 1, backend=machine.compiler)
    x = torch.randn(4, 8, 16, device=machine.device, requires_grad=True)
    y = run(x)
    y.sum().backward()
    assert x.grad is not None
    return {"ok": torch.equal(y, x * 2 + 1) and torch.equal(x.grad, torch.full_like(x, 2))}


def sharded(machine: Machine) -> Row:
    """fully_shard round stages of a parallelized model: a step, and the loss goes down."""
    mesh = alone(machine)
    model, inputs = small(machine)
    dsp.parallelize(model, mesh, gather_output=False)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for _ in range(5):
        loss = (model(**inputs) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"ok": losses[-1] < losses[0], "first loss": losses[0], "last loss": losses[-1]}


def nccl(machine: Machine, _: Any) -> Cases:
    dtypes = ("float32", "bfloat16", "float64", "int64", "bool", "complex64")
    return {
        **{f"collectives in {dtype}": partial(operations, machine, getattr(torch, dtype)) for dtype in dtypes},
        "functions": lambda: functions(machine, alone(machine)),
        "agreement beside the queue": partial(read_beside, machine),
        "a switch in a CUDA graph": partial(captured, machine),
        "a switch compiled": partial(compiled_switch, machine),
        "fully_shard": partial(sharded, machine),
    }


PARTS = [
    Part("models", "Every model of the zoo, outputs and gradients against float64 on the CPU", models, 110),
    Part("compiled", "Stages compiled by inductor, and recomputed", compiled, 110),
    Part("attention", "Kernels of attention and of Mamba-1", kernels, 60),
    Part("random", "Random numbers and activation checkpointing", random, 60),
    Part("tests", "tests/dsp/comm/test_cuda_kernels.py", tests, 110, ("pytest",)),
    Part("gloo", "Several ranks on one GPU, over gloo", gloo, 110),
    Part("nccl", "NCCL, alone with itself", nccl, 90),
]
