"""How fast is it? A step of the paper's 720M model, the copies of a switch, the host's time, the cost model's rates."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import dsp
import dsp.embedded
import zoo
import zoo.attention
from benchmarks.gpu_parts import KERNELS, REFUSED, Cases, Machine, Part, Row, attended_by, error, pretended, reason
from benchmarks.methods import Shape
from dsp.comm.exchange import SwitchPlan
from dsp.planner import chunk_sizes
from dsp.support.tensors import tensors_in
from zoo.training.model import repeated_stages

KINDS = {
    "attention": re.compile(r"flash|fmha|attention|sdpa", re.I),
    "products": re.compile(r"gemm|nvjet|cutlass|xmma|matmul|::(add|b|badd)?mm\b|conv", re.I),
}
FULL = Shape(hidden=1152, heads=16, depth=28, frames=64, side=64)
TINY = Shape(hidden=48, heads=4, depth=1, frames=8, side=4)
T_DIM, S_DIM = 1, 2  # of an activation (b t s c)


# ---------------------------------------------------------------------------------------------------------- attention


def time_attention(machine: Machine, shape: tuple[int, ...], kernel: str | None) -> Row:
    """Forward and backward of attention (b n h e) in bf16; TFLOP/s of both. None: what zoo.attention takes."""
    q, k, v = (torch.randn(shape, device=machine.device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    grad = torch.randn(shape, device=machine.device, dtype=torch.bfloat16)
    rows, places, heads, width = shape

    def run() -> None:
        y = zoo.attention.attend(q, k, v)
        torch.autograd.grad(y, (q, k, v), grad)

    try:
        with attended_by([kernel] if kernel else []):
            took = machine.seconds(run, machine.of(10, 1))
    except RuntimeError as problem:
        if not any(words in str(problem) for words in REFUSED):
            raise
        return {"ok": None, "note": "does not take this"}
    flops = 3.5 * 4 * rows * heads * places**2 * width  # backward is five products, forward two
    return {"ms": 1e3 * took, "TFLOP/s": 1e-12 * flops / took}


def attention(machine: Machine, _: Any) -> Cases:
    one = machine.of(FULL, TINY)
    width = one.hidden // one.heads
    shapes = {
        "over space": (one.frames // machine.of(4, 1), one.places, one.heads, width),
        "over time": (one.places, one.frames, one.heads, width),
        "over space, heads of 128": (one.frames // machine.of(4, 1), one.places, one.heads // 2, 128),
    }
    tried = machine.of((None, "flash", "cudnn", "efficient"), (None, "flash"))
    return {
        f"{name}, {kernel or 'as the zoo has it'}": partial(time_attention, machine, shape, kernel)
        for name, shape in shapes.items()
        for kernel in tried
    }


# ----------------------------------------------------------------------------------------------------- a training step


def _keep_attention(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if KINDS["attention"].search(str(op)) else CheckpointPolicy.PREFER_RECOMPUTE


def model_of(shape: Shape, device: str) -> tuple[Any, dict[str, Tensor]]:
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = zoo.create("transformer2d", hidden=shape.hidden, heads=shape.heads, depth=shape.depth)
        inputs = model.example_inputs(shape.batch, frames=shape.frames, height=2 * shape.side, width=2 * shape.side)
    if device != "meta":
        torch.nn.init.normal_(model.final.linear.weight, std=0.02)  # which starts as zero, and its gradients with it
    return model.bfloat16(), {k: x.bfloat16() if x.is_floating_point() else x for k, x in inputs.items()}


def build(machine: Machine, shape: Shape, recompute: str) -> tuple[Any, dict[str, Tensor]]:
    """The model in bf16, its stages compiled; `recompute`: what backward computes again of them."""
    model, inputs = model_of(shape, machine.device)
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 64  # all stages of a kind share one forward
    for stage in repeated_stages(model):
        inside = stage.forward
        if recompute == "but attention":
            contexts = partial(create_selective_checkpoint_contexts, _keep_attention)
            inside = partial(checkpoint, inside, use_reentrant=False, context_fn=contexts)
        inside = torch.compile(inside, backend=machine.compiler)
        stage.forward = partial(checkpoint, inside, use_reentrant=False) if recompute == "all" else inside
    return model, inputs


def by_kind(machine: Machine, run: Callable[[], object]) -> tuple[dict[str, float], int]:
    """Seconds that the device was busy with attention, with products and with all else in one call; and how often."""
    activity = machine.of(ProfilerActivity.CUDA, ProfilerActivity.CPU)
    with profile(activities=[activity]) as trace:
        run()
        machine.wait()
    spent, count = dict.fromkeys((*KINDS, "else"), 0.0), 0
    for event in trace.events():
        if not machine.dry and (event.device_type != DeviceType.CUDA or getattr(event, "is_user_annotation", False)):
            continue
        kind = next((kind for kind, pattern in KINDS.items() if pattern.search(event.name)), "else")
        spent[kind] += 1e-6 * (event.self_cpu_time_total if machine.dry else event.time_range.elapsed_us())
        count += 1
    if not count:
        raise RuntimeError("the profiler saw nothing of the device")
    return spent, count


def profiled(machine: Machine, run: Callable[[], object]) -> Row:
    """The profile of one call; without it the other numbers stand."""
    try:
        busy, launches = by_kind(machine, run)
    except Exception as problem:
        return {"no profile": reason(problem)}
    total = sum(busy.values())
    return {"busy": busy, "kernels, ms": 1e3 * total, "launches": launches, "outside": busy["else"] / total}


def step(machine: Machine, shape: Shape, recompute: str, kernel: str | None) -> Row:
    """A training step with AdamW: weights, gradients and moments are bf16, too."""
    model, inputs = build(machine, shape, recompute)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=not machine.dry)

    def run() -> None:
        model(**inputs).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    on_meta, without_data = model_of(shape, "meta")
    flops = dsp.plan(
        on_meta, kwargs=without_data, size=1, gather_output=False
    ).flops  # of forward and backward, nothing twice
    with attended_by([kernel, *(k for k in KERNELS if k != kernel)] if kernel else []):
        run()
        memory = machine.peak_memory(run)
        took = machine.seconds(run, machine.of(3, 1), warm=0)
        seen = profiled(machine, run)
    if "busy" in seen:
        seen["idle"] = max(0.0, 1 - 1e-3 * seen["kernels, ms"] / took)
    mfu = flops / took / (machine.peak * 1e12) if machine.peak else None
    return {
        "parameters": sum(p.numel() for p in model.parameters()), "tokens": shape.tokens, "step, s": took,
        "tokens/s": shape.tokens / took, "flops": flops, "mfu": mfu, "memory": memory, "kernel": kernel,
        **seen, "aim": "MFU of 50%", "met": judged(machine, mfu, 0.5),
    }  # fmt: skip


def judged(machine: Machine, value: float | None, aim: float) -> bool | None:
    """Tell whether it is met; a dry run's numbers mean nothing."""
    return None if machine.dry or value is None else value >= aim


def steps(machine: Machine, earlier: dict[str, Any]) -> Cases:
    one = machine.of(FULL, TINY)
    few = machine.of(8, 4)
    spatial = {
        kernel: row["ms"] for kernel in KERNELS
        if "ms" in (row := earlier.get("kernels", {}).get("cases", {}).get(f"over space, {kernel}", {}))
    }  # fmt: skip
    fastest = min(spatial, key=spatial.__getitem__, default=None)
    short = Shape(one.hidden, one.heads, one.depth, one.batch, few, one.side)
    return {
        "as train.py has it: stages recomputed": partial(step, machine, one, "all", None),
        f"attention kept, by {fastest or 'what the zoo takes'}": partial(step, machine, one, "but attention", fastest),
        f"{few} frames, nothing recomputed": partial(step, machine, short, "nothing", fastest),
    }


# ---------------------------------------------------------------------------------------------- the copies of a switch


def copies(machine: Machine, n: int, batch: int, frames: int, src: int, dst: int) -> Row:
    """Pack and unpack of a switch of rank 0's part against plain copies of as many bytes, without the exchange.

    `share`: of the rate of those copies. At batch 1 one of the two is a view, and there is one copy to make.
    """
    one = machine.of(FULL, TINY)
    whole = [batch, frames, one.places, one.hidden]
    parts = {dim: chunk_sizes(whole[dim], n) for dim in (src, dst)}
    shape = [parts[src][0] if dim == src else size for dim, size in enumerate(whole)]
    x = torch.randn(shape, dtype=torch.bfloat16, device=machine.device)
    plan = SwitchPlan(tuple(shape), src, dst, parts[src], parts[dst], 0)
    sent, arrived = plan.pack(x), torch.randn(sum(plan.out_splits), dtype=torch.bfloat16, device=machine.device)
    runs = {"copy": lambda: x.clone(), "pack": lambda: plan.pack(x), "unpack": lambda: plan.unpack(arrived)}
    took = {name: machine.seconds(run, machine.of(20, 2)) for name, run in runs.items()}
    moves = sum(y.data_ptr() != z.data_ptr() for y, z in ((sent, x), (plan.unpack(arrived), arrived)))
    share = moves * took["copy"] / (took["pack"] + took["unpack"]) if moves else None
    return {
        "MB": 1e-6 * x.nbytes, "copies": moves, **{f"{name}, ms": 1e3 * seconds for name, seconds in took.items()},
        "GB/s of a copy": 2e-9 * x.nbytes / took["copy"], "share": share, "aim": "70% of a copy's rate",
        "met": judged(machine, share, 0.7),
    }  # fmt: skip


def kernels(machine: Machine, earlier: dict[str, Any]) -> Cases:
    one = machine.of(FULL, TINY)
    cases: Cases = {}
    for n, batch, frames in ((2, 1, one.frames), (8, 1, one.frames), (8, 2, one.frames), (8, 1, one.frames - 1)):
        for way, src, dst in (("t to s", T_DIM, S_DIM), ("s to t", S_DIM, T_DIM)):
            name = f"switch {way}, {n} ranks, batch {batch}, {frames} frames"
            cases[name] = partial(copies, machine, n, batch, frames, src, dst)
    return cases | attention(machine, earlier)


# -------------------------------------------------------------------------------------------------------- CUDA graphs


def graphed(machine: Machine, batch: int, frames: int, side: int) -> Row:
    """The forward of one rank's part without gradients, launched by the host, and replayed as a CUDA graph."""
    one = machine.of(FULL, TINY)
    model, inputs = model_of(Shape(one.hidden, one.heads, one.depth, batch, frames, side), machine.device)
    with torch.no_grad():
        wanted = model(**inputs)
        eager = machine.seconds(lambda: model(**inputs), machine.of(10, 1))
        row = {"tokens": batch * frames * side**2, "eager, ms": 1e3 * eager}
        row |= profiled(machine, lambda: model(**inputs))
        if machine.dry:
            return {"ok": None, "note": "there are no CUDA graphs on a CPU", **row}
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                model(**inputs)
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            actual = model(**inputs)
        took = machine.seconds(graph.replay, 10)
        return {"ok": error(actual, wanted) < 1e-2, **row, "graph, ms": 1e3 * took, "eager / graph": eager / took}


def graphs(machine: Machine, _: Any) -> Cases:
    shapes = machine.of(((1, 8, 64), (1, 2, 32), (1, 4, 8)), ((1, 4, 4),))
    return {f"{b} x {t} frames of {s} x {s} patches": partial(graphed, machine, b, t, s) for b, t, s in shapes}


# ------------------------------------------------------------------------------------------ the rates of the cost model


# Those of `dsp.Plan.takes`: counted FLOPs over one, bytes touched over the other, operation by operation as they run
# uncompiled. Both rates are fitted by least squares of relative errors to steps and forwards of several shapes; each
# point is then predicted by a fit without it. Beside them stand the shares of the data sheet that
# `dsp.comm.hardware.accelerator` takes where it is told none.
ASSUMED = 0.5, 0.8  # of accelerator(): the share of products, and of memory
FULL_SHAPES = [
    Shape(hidden, hidden // 72, 2, 1, frames, side)
    for hidden in (1152, 2304) for frames, side in ((4, 64), (16, 64), (64, 16), (64, 32))
]  # fmt: skip
TINY_SHAPES = [Shape(48, 4, 1, 1, frames, 4) for frames in (4, 8)]


def counted(shape: Shape, train: bool, recompute: bool = False) -> tuple[int, int]:
    """FLOPs, and bytes touched, of a step or a forward."""
    model, inputs = model_of(shape, "meta")
    with nullcontext() if train else torch.no_grad():
        plan = dsp.embedded.plan(model, kwargs=inputs, size=1, method="dsp", recompute=recompute, gather_output=False)
    return plan.flops, plan.touched


def point(machine: Machine, shape: Shape, train: bool) -> Row:
    model, inputs = model_of(shape, machine.device)

    def run() -> None:
        with nullcontext() if train else torch.no_grad():
            y = model(**inputs)
            if train:
                y.float().square().mean().backward()

    flops, touched = counted(shape, train)
    return {"flops": flops, "touched": touched, "measured, s": machine.seconds(run, machine.of(5, 1), machine.of(3, 1))}


def fit(rows: Sequence[Row]) -> tuple[float, float]:
    """Seconds a FLOP and seconds a byte, of least squares of relative errors, neither negative."""
    columns = np.array([[row["flops"], row["touched"]] for row in rows]) / np.array(
        [[row["measured, s"]] for row in rows]
    )
    scale = np.linalg.norm(columns, axis=0)
    coefficients, *_ = np.linalg.lstsq(columns / scale, np.ones(len(rows)), rcond=None)
    for i in (0, 1):
        if coefficients[i] < 0:  # then the other one alone
            coefficients = np.zeros(2)
            column = columns[:, 1 - i] / scale[1 - i]
            coefficients[1 - i] = column.sum() / (column @ column)
    compute, memory = coefficients / scale
    return float(compute), float(memory)


def seconds(of: tuple[float, float], flops: float, touched: float) -> float:
    return of[0] * flops + of[1] * touched


def fitted(machine: Machine, rows: dict[str, Row], earlier: dict[str, Any]) -> Row:
    """The rates of all points; how far each is off without itself; the compiled 720M step beside what they say."""
    points = list(rows.values())
    if len(points) < 3:
        return {"ok": False, "error": f"{len(points)} points are too few for two rates"}
    both = fit(points)
    errors = []
    for one in points:
        others = fit([row for row in points if row is not one])
        errors.append(abs(seconds(others, one["flops"], one["touched"]) / one["measured, s"] - 1))
    flops, stream = (1 / rate if rate else None for rate in both)
    row: Row = {
        "TFLOP/s": flops and 1e-12 * flops, "GB/s": stream and 1e-9 * stream,
        "error, median": statistics.median(errors), "error, worst": max(errors),
        "aim": "errors of 15%", "met": None if machine.dry else max(errors) <= 0.15,
    }  # fmt: skip
    if machine.peak and machine.stream:
        row["products"] = flops and flops / (machine.peak * 1e12)
        row["stream"] = stream and stream / (machine.stream * 1e9)
        assumed = 1 / (ASSUMED[0] * machine.peak * 1e12), 1 / (ASSUMED[1] * machine.stream * 1e9)
        off = [abs(seconds(assumed, one["flops"], one["touched"]) / one["measured, s"] - 1) for one in points]
        row |= {"error as assumed, median": statistics.median(off), "error as assumed, worst": max(off)}
    first = next(iter(earlier.get("step", {}).get("cases", {}).values()), None)  # in which stages are recomputed
    if first and "step, s" in first:
        predicted = seconds(both, *counted(machine.of(FULL, TINY), True, recompute=True))
        row["the compiled step / its prediction"] = first["step, s"] / predicted
    return row


def rates(machine: Machine, earlier: dict[str, Any]) -> Cases:
    rows: dict[str, Row] = {}

    def kept(name: str, shape: Shape, train: bool) -> Row:
        rows[name] = point(machine, shape, train)
        return rows[name]

    cases: Cases = {}
    for one in machine.of(FULL_SHAPES, TINY_SHAPES):
        for train in (False, True):
            name = f"hidden {one.hidden}, {one.frames} x {one.places}, {'a step' if train else 'a forward'}"
            cases[name] = partial(kept, name, one, train)
    return cases | {"rates": partial(fitted, machine, rows, earlier)}


# ------------------------------------------------------------------------------------------------------ the host's time


# What it takes to launch a forward or a step, against what the device takes to run it: models of diffusers, unmodified,
# as one GPU runs them and as rank 0 of eight does. The others are pretended: what they would send holds no numbers and
# takes no time, so that what is left is the host's work and the kernels of one rank.
RANKS = 8
LATTE = {  # its stages
    "": "hidden_states=b c t h w -> b c t h w",
    "pos_embed": "(b t) [c h w] -> (b t) [s d]",
    "transformer_blocks.*": "(b t) [s d], encoder_hidden_states=(b t) [l d], timestep=(b t) [e]",
    "temporal_transformer_blocks.*": "(b s) [t d], timestep=(b s) [e]",
}
Built = tuple[nn.Module, dict[str, Tensor], dict[str, str] | None]  # with its stages, where it has none of its own


def zoo_latte(machine: Machine) -> Built:
    size = machine.of("XL/2", "test")
    model: Any = zoo.create("latte", size)
    return model, model.example_inputs(1, frames=16, height=machine.of(64, 8), width=machine.of(64, 8)), None


def latte(machine: Machine) -> Built:
    """Its published size: 16 frames of 512 x 512 pixels."""
    from diffusers import LatteTransformer3DModel

    heads, layers, side, text = machine.of((16, 28, 64, 4096), (2, 1, 8, 16))
    model = LatteTransformer3DModel(
        num_attention_heads=heads, attention_head_dim=machine.of(72, 8), in_channels=4, out_channels=8,
        num_layers=layers, cross_attention_dim=heads * machine.of(72, 8), attention_bias=True, sample_size=side,
        patch_size=2, caption_channels=text, activation_fn="gelu-approximate", norm_type="ada_norm_single",
        norm_elementwise_affine=False, norm_eps=1e-6, video_length=16,
    )  # fmt: skip
    inputs = {"hidden_states": torch.randn(1, 4, 16, side, side), "timestep": torch.tensor([500])}
    return model, inputs | {"encoder_hidden_states": torch.randn(1, 120, text)}, LATTE


def wan(machine: Machine) -> Built:
    """Wan 2.1 of 1.3B: 81 frames of 480 x 832 pixels. Attention is over all of them, so that no stage is named."""
    from diffusers import WanTransformer3DModel

    heads, width, hidden, layers, text = machine.of((12, 128, 8960, 30, 4096), (2, 12, 32, 1, 16))
    model = WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=heads, attention_head_dim=width, in_channels=16, out_channels=16,
        text_dim=text, freq_dim=256, ffn_dim=hidden, num_layers=layers,
    )  # fmt: skip
    x = torch.randn(1, 16, machine.of(21, 8), *machine.of((60, 104), (8, 8)))
    inputs = {"hidden_states": x, "timestep": torch.tensor([500]), "encoder_hidden_states": torch.randn(1, 512, text)}
    return model, inputs, {"": "hidden_states=b c t h w -> b c t h w"}


def timed(machine: Machine, make: Callable[[Machine], Built], ranks: int, backward: bool) -> Row:
    torch.manual_seed(0)
    with torch.device(machine.device):
        model, inputs, stages = make(machine)
    model = model.bfloat16().requires_grad_(backward)
    inputs = {k: x.bfloat16() if x.is_floating_point() else x for k, x in inputs.items()}
    with pretended(machine, ranks) if ranks > 1 else nullcontext() as mesh:
        if mesh is not None:
            dsp.parallelize(model, mesh, stages, gather_output=False)

        def run() -> None:
            (y, *_) = tensors_in(model(**inputs))
            if backward:
                dsp.mean(y.square()).backward()

        times: list[tuple[float, float]] = []
        for _ in range(machine.of(8, 3)):
            machine.wait()
            began = time.perf_counter()
            run()
            launched = time.perf_counter() - began
            machine.wait()
            times.append((launched, time.perf_counter() - began))
        seen = profiled(machine, run)
        memory = machine.peak_memory(run)
    # the first makes the plan, the second may compile; where the device's queue is full it keeps the host waiting
    host, wall = min(t for t, _ in times[2:]), statistics.median(t for _, t in times[2:])
    row = {"host, ms": 1e3 * host, "both, ms": 1e3 * wall, "memory": memory, **seen}
    return row | ({"host / kernels": 1e3 * host / seen["kernels, ms"]} if "busy" in seen else {})


def hosts(built: Mapping[str, Callable[[Machine], Built]], machine: Machine, _: Any) -> Cases:
    cases: Cases = {}
    for name, make in built.items():
        for ranks in (1, RANKS):
            where = "one GPU" if ranks == 1 else f"a rank of {ranks}"
            cases[f"{name}, forward, {where}"] = partial(timed, machine, make, ranks, False)
            if make is not wan:  # its step takes no new host code, and long
                cases[f"{name}, step, {where}"] = partial(timed, machine, make, ranks, True)
    return cases


ZOO = {"zoo's Latte XL/2": zoo_latte}
DIFFUSERS = {"diffusers' Latte": latte, "diffusers' Wan 1.3B": wan}
PARTS = [
    Part("kernels", "The copies of a switch, and attention", kernels, 45, alone=True),
    Part("step", "A training step of the 720M model", steps, 180, alone=True),
    Part("graph", "CUDA graphs of a local forward", graphs, 35, alone=True),
    Part("calibration", "The cost model's rates", rates, 45, alone=True),
    Part("host", "The host's time beside the kernels'", partial(hosts, ZOO), 30, alone=True),
    Part("diffusers", "The same of diffusers' models", partial(hosts, DIFFUSERS), 55, ("diffusers",), alone=True),
]
