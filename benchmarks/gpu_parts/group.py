"""Is it right over ranks? Several of them on one GPU over gloo, which takes CUDA tensors."""

from __future__ import annotations

import math
import multiprocessing
import tempfile
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import dsp
import dsp.embedded
import zoo
from benchmarks.gpu_parts import Cases, Machine, Part, Row, error, mesh_of
from benchmarks.gpu_parts.runner import told

PATIENCE = timedelta(seconds=40)
Check = Callable[[Machine, DeviceMesh], Row]
LOSSY = {"bf16": 0.02, "fp8": 0.2, "int8": 0.2}  # the largest relative error


# ------------------------------------------------------------------------------------- several ranks on one GPU: gloo


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
    found: list[Tensor] = []
    for again in (False, True):
        torch.manual_seed(0)
        with torch.device(machine.device):
            model: Any = zoo.create("transformer2d", "test")
            inputs = model.example_inputs(1, frames=8)
        for p in model.parameters():
            nn.init.normal_(p, std=0.1)
        modules = [s for b in model.blocks for s in ((b.spatial, b.temporal) if kept else (b,))] if again else []
        for module in modules:
            module.forward = partial(checkpoint, module.forward, use_reentrant=False)
        dsp.parallelize(model, mesh, gather_output=False)
        with dsp.count_comm() as comm:
            dsp.mean(model(**inputs).square()).backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    off, sent = error(found[1], found[0]), sum(comm.recompute.calls.values())
    return {"ok": off < 1e-5 and (sent == 0) == kept, "gradients": off, "collectives sent again": sent}


def by_method(machine: Machine, mesh: DeviceMesh, method: str) -> Row:
    """An embedded method's output against one process."""
    outputs = []
    for one in (None, method):
        torch.manual_seed(0)
        with torch.device(machine.device):
            model: Any = zoo.create("transformer2d", "test").double()
            inputs = {k: x.double() for k, x in model.example_inputs(1, frames=8).items()}
        for p in model.parameters():
            nn.init.normal_(p, std=0.1)
        if one is not None:
            dsp.embedded.parallelize(model, mesh, one)
        outputs.append(model(**inputs))
    off = error(outputs[1], outputs[0])
    return {"ok": off < 1e-10, "output": off}


def travelling(machine: Machine, mesh: DeviceMesh, options: dict[str, Any]) -> Row:
    """Outputs and gradients with switches that travel otherwise, against plain ones: equal but for fewer bits."""
    found: list[tuple[Tensor, Tensor]] = []
    for given in ({}, options):
        torch.manual_seed(0)
        with torch.device(machine.device):
            model: Any = zoo.create("transformer2d", "test", hidden=64)
            inputs = model.example_inputs(2, frames=8, height=16, width=16)
        for p in model.parameters():
            nn.init.normal_(p, std=0.1)
        dsp.parallelize(model, mesh, **given)
        for _ in range(2):  # of which the second makes no plan
            model.zero_grad()
            y = model(**inputs)
            dsp.mean(y.square()).backward()
        found.append((y.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])))
    row = {what: error(a, b) for what, a, b in zip(("output", "gradients"), found[1], found[0])}
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
    own = [x.detach().chunk(mesh.size(), 1)[mesh.get_local_rank()].clone().requires_grad_() for x in whole]
    y = dsp.embedded.ring_attention(*own, 30, mesh.get_group().group_name, causal=True)
    row = {}
    for name, mine, theirs in zip("yqkv", (y, *gradients(y, own)), (wanted, *gradients(wanted, whole))):
        row[name] = error(mine, theirs.chunk(mesh.size(), 1)[mesh.get_local_rank()])
    return {"ok": max(row.values()) < 1e-4, **row}


def gradients(y: Tensor, of: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(y.square().sum(), of)


def not_waiting(machine: Machine, mesh: DeviceMesh) -> Row:
    """A call whose plan is known makes the host wait for nothing: torch raises where one of its operations would."""
    with torch.device(machine.device):
        model: Any = zoo.create("latte", "test")
        inputs = model.example_inputs(1, frames=8)
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
    with torch.device(machine.device):
        model: Any = zoo.create("transformer2d", "test")
        inputs = model.example_inputs(1, frames=8)
    dsp.parallelize(model, mesh)
    model(**inputs)
    try:
        for _ in range(2):
            model(**{**inputs, "timestep": inputs["timestep"] + mesh.get_local_rank()})
    except RuntimeError as told_so:
        return {"ok": "hold different inputs" in str(told_so)}
    return {"ok": False, "error": "nobody noticed"}


UNSURE: dict[
    str, Check
] = {  # last: gloo may not send a CUDA tensor from rank to rank, and who waits for it may be lost
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
TINY = (
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
            row = failed(machine, name, told(problem))
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
            found, row = self.pipe.recv()
        except EOFError:
            codes = [process.exitcode for process in self.processes]
            return failed(self.machine, name, f"the ranks ended before this, with {codes}")
        assert found == name
        return row


def gloo(machine: Machine, _: Any) -> Cases:
    names = machine.of(list(CHECKS), list(TINY))
    ranks = Ranks(machine, machine.of(4, 2), names)
    return {name: partial(ranks.row, name) for name in names}


PARTS = [Part("gloo", "Several ranks on one GPU, over gloo", gloo, 110)]
