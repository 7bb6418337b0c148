"""Is it right on CUDA? Models and kernels of one process, against float64 on the CPU."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dsp
import zoo
import zoo.attention
from benchmarks.common import ROOT
from benchmarks.gpu_parts import KERNELS, REFUSED, Cases, Machine, Part, Row, attended_by, error, pretended
from benchmarks.gpu_parts.runner import PYTHONPATH
from dsp.layout import Axis
from dsp.randomness import forked
from dsp.tensors import tensors_in
from zoo.training.model import repeated_stages
from zoo.video import mamba

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 0.1}


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
    own: Any = copy.deepcopy(model).to(machine.device, dtype)
    if change is not None:
        change(own)
    given = {k: x.to(machine.device, dtype if x.is_floating_point() else x.dtype) for k, x in inputs.items()}
    found, grads = results(own, given)
    row = {
        "outputs": max(error(a, b) for a, b in zip(found, outputs, strict=True)),
        "gradients": error(grads, gradients),
    }
    right = all(value <= TOLERANCE[dtype] for value in row.values()) and all(y.dtype == dtype for y in found)
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
        again = partial(checkpoint, use_reentrant=False)
        for stage in repeated_stages(model):
            inside = partial(again, stage.forward) if way == "recomputed inside" else stage.forward
            inside = torch.compile(inside, backend=machine.compiler)
            stage.forward = partial(again, inside) if way == "recomputed outside" else inside

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
    own = [x.detach().to(machine.device, dtype).requires_grad_() for x in exact]
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
        found = run(own, zoo.attention.flash_attn_func)
    else:
        try:
            with attended_by([] if kernel == "as the zoo has it" else [kernel]):
                found = run(own, zoo.attention.attend)
        except RuntimeError as problem:
            needed = not machine.dry and kernel == "flash"
            if needed or not any(words in str(problem) for words in REFUSED):
                raise
            return {"ok": None, "note": "does not take this"}
    row = {what: error(a, b) for what, a, b in zip(("output", "dq", "dk", "dv"), found, wanted)}
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
    own, x, calls = copy.deepcopy(exact).to(machine.device, dtype), rounded(torch.randn(2, 50, 64)), []

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(1)
        return kernel(*args, **kwargs)

    (wanted,), gradients = results(exact, {"x": x.double()})
    with patch.object(mamba, "mamba_kernel", lambda: counted):
        (found,), grads = results(own, {"x": x.to(machine.device, dtype)})
    row = {"outputs": error(found, wanted), "gradients": error(grads, gradients)}
    return {"ok": len(calls) == 2 and all(value <= TOLERANCE[dtype] for value in row.values()), **row}


# ---------------------------------------------------------------------------------------------------- random numbers


class Dropping(nn.Module):
    """A stage that drops out, and one weight that all of it is multiplied by."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.weight, self.again = nn.Parameter(torch.ones(())), again

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.drop, x, use_reentrant=False) if self.again else self.drop(x)

    def drop(self, x: Tensor) -> Tensor:
        return F.dropout(x * self.weight, 0.5)


def drawn_again(machine: Machine, outside: bool) -> Row:
    """In parallel what is recomputed drops the same: then the gradient of the weight is the mean itself."""
    torch.manual_seed(0)
    with pretended(machine, 2, rank=1) as mesh:
        model: Any = nn.Sequential()
        model.stage = Dropping(again=not outside)
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
    found, after = [], []
    for rank in (0, 1, 1):
        torch.manual_seed(0)
        with pretended(machine, 2, rank) as mesh, forked(Axis.of(mesh)):
            found.append(torch.rand(1000, device=machine.device))
        after.append((torch.rand(4, device=machine.device), torch.rand(4)))
    torch.manual_seed(0)
    plain = torch.rand(4, device=machine.device)
    right = {
        "a rank's own": not torch.equal(found[0], found[1]),
        "the same each time": torch.equal(found[1], found[2]),
        "alike after it": all(torch.equal(a, b) for a, b in zip(after[0], after[1])),
        # on a CPU the fork itself takes a number
        "of the device, as before": machine.dry or torch.equal(after[0][0], plain),
    }
    return {"ok": all(right.values()), **right}


def random(machine: Machine, _: Any) -> Cases:
    return {
        "a checkpoint inside a stage": partial(drawn_again, machine, False),
        "a checkpoint round a stage": partial(drawn_again, machine, True),
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
    return {"pytest": partial(pytest, "tests/dsp/test_cuda_kernels.py")}


PARTS = [
    Part("models", "Every model of the zoo, outputs and gradients against float64 on the CPU", models, 110),
    Part("compiled", "Stages compiled by inductor, and recomputed", compiled, 110),
    Part("attention", "Kernels of attention and of Mamba-1", kernels, 60),
    Part("random", "Random numbers and activation checkpointing", random, 60),
    Part("tests", "tests/dsp/test_cuda_kernels.py", tests, 110, ("pytest",)),
]
