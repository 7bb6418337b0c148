"""Is it right with NCCL, as far as one rank alone can tell?"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import dsp
import dsp.collectives  # its ops
import zoo
from benchmarks.gpu_parts import Cases, Machine, Part, Row, mesh_of
from benchmarks.gpu_parts.group import functions
from dsp.layout import Axis
from dsp.pending import PendingSwitch
from dsp.run.agreement import Agreement


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
    ops = torch.ops.dsp
    made = {
        "switch": ops.switch(x, 1, 2, 6, group), "two halves": PendingSwitch(x, 1, 2, 6, group).wait(),
        "switch_many": ops.switch_many([x], [1], [2], [6], group)[0],
        "switch_each": ops.switch_each([x], [1], [2], [6], group, [], [])[0], "gather": ops.gather(x, 1, 6, group),
        "switch_among": ops.switch_among(x, 1, 2, [6], [4], [0], group),
    }  # fmt: skip
    if dtype not in (torch.bool, torch.complex64):
        made |= {"reduce_scatter": ops.reduce_scatter(x, 1, group), "all_reduce": ops.all_reduce(x, group)}
    wrong = [name for name, y in made.items() if not torch.equal(y, x)]
    if x.requires_grad:
        for name, y in made.items():
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


def compiled(machine: Machine) -> Row:
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
    torch.manual_seed(0)
    with torch.device(machine.device):
        model: Any = zoo.create("transformer2d", "test")
        inputs = model.example_inputs(1)
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
        "a switch compiled": partial(compiled, machine),
        "fully_shard": partial(sharded, machine),
    }


PARTS = [Part("nccl", "NCCL, alone with itself", nccl, 90)]
