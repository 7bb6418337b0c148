"""A training step of the paper's 720M model on one GPU: tokens/s, MFU, memory; and what a switch costs beside its wire.

    python benchmarks/gpu.py                   # on a CUDA GPU; docs/images/gpu.json
    python benchmarks/gpu.py --tiny            # the same on a small model, on a CPU too: its numbers mean nothing

This has not been run on a GPU yet: --tiny, on a CPU, is all that was. Weights, gradients and AdamW's moments are bf16;
every stage (a block along one dim) is compiled by itself and recomputed in backward, as train.py does it. 64 frames of
1024 x 1024 are T = 64, S = 4096. MFU counts the FLOPs of forward and backward once, not the recomputed, over the peak
of the data sheet. `switch` times the two copies of a switch of a rank's part on 2, 4 and 8 ranks against a plain copy
of as many bytes: without the exchange, which needs the other ranks.
"""

import argparse
import json
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rivals import ROOT, Shape, circumstances
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import dsp
import zoo
from dsp.collectives import SwitchPlan
from dsp.planner import chunk_sizes

PEAK = {"A100": 312, "H100": 989, "H200": 989, "B200": 2250}  # TFLOP/s of dense bf16, by the data sheets
KINDS = {
    "attention": re.compile(r"flash|fmha|attention|sdpa", re.I),
    "matmul": re.compile(r"gemm|nvjet|cutlass|xmma|matmul|::(add|b|badd)?mm\b|conv", re.I),
}
FULL = Shape(hidden=1152, heads=16, depth=28, frames=64, side=64)
TINY = Shape(hidden=48, heads=4, depth=1, frames=4, side=4)
T_DIM, S_DIM = 1, 2  # of an activation (b t s c)


def build(shape: Shape, device: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """The model in bf16, its stages recomputed and compiled, and its inputs."""
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = zoo.create("transformer2d", hidden=shape.hidden, heads=shape.heads, depth=shape.depth)
        inputs = model.example_inputs(shape.batch, frames=shape.frames, height=2 * shape.side, width=2 * shape.side)
    model = model.bfloat16()
    torch.nn.init.normal_(model.final.linear.weight, std=0.02)  # which starts as zero, and its gradients with it
    torch._dynamo.config.recompile_limit = 64  # all stages share one forward
    for stage in (s for layer in model.blocks for s in (layer.spatial, layer.temporal)):
        inside = torch.compile(stage.forward, backend="inductor" if device == "cuda" else "eager")
        stage.forward = partial(checkpoint, inside, use_reentrant=False)
    return model, {k: x.bfloat16() if x.is_floating_point() else x for k, x in inputs.items()}


def seconds(run: Callable[[], object], device: str, times: int, warm: int = 3) -> float:
    """Median seconds of a call, until the device is done."""
    found = []
    for i in range(-warm, times):
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        if i >= 0:
            found.append(time.perf_counter() - began)
    return statistics.median(found)


def by_kind(run: Callable[[], object], device: str) -> dict[str, float]:
    """Seconds that the device was busy with attention, with matrix products and with all else, of one call."""
    cuda = device == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as found:
        run()
        if cuda:
            torch.cuda.synchronize()
    spent = dict.fromkeys((*KINDS, "else"), 0.0)
    for event in found.events():
        if cuda and (event.device_type != DeviceType.CUDA or getattr(event, "is_user_annotation", False)):
            continue
        kind = next((kind for kind, pattern in KINDS.items() if pattern.search(event.name)), "else")
        spent[kind] += 1e-6 * (event.time_range.elapsed_us() if cuda else event.self_cpu_time_total)
    return spent


def training(shape: Shape, device: str, times: int, peak: float | None) -> dict[str, Any]:
    model, inputs = build(shape, device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=device == "cuda")

    def step() -> None:
        model(**inputs).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    with torch.device("meta"):
        bare: Any = zoo.create("transformer2d", hidden=shape.hidden, heads=shape.heads, depth=shape.depth)
        example = bare.example_inputs(shape.batch, frames=shape.frames, height=2 * shape.side, width=2 * shape.side)
    flops = dsp.plan(bare, kwargs=example, size=1, dtype=torch.bfloat16).flops
    took = seconds(step, device, times)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        step()
    spent = by_kind(step, device)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens": shape.tokens,
        "seconds": took,
        "tokens_per_s": shape.tokens / took,
        "flops": flops,
        "mfu": flops / took / (peak * 1e12) if peak else None,
        "memory": torch.cuda.max_memory_allocated() if device == "cuda" else None,
        "busy": spent,
        "outside": spent["else"] / sum(spent.values()),  # of matrix products and attention
    }


def switch(shape: Shape, device: str, times: int) -> list[dict[str, Any]]:
    """Pack and unpack of a switch of one rank's part, each way, against a copy of as many bytes: GB/s moved a way."""
    rows = []
    for n in (n for n in (2, 4, 8) if shape.frames % n == 0 and shape.side**2 % n == 0):
        for way, src, dst in (("t to s", T_DIM, S_DIM), ("s to t", S_DIM, T_DIM)):
            whole = [shape.batch, shape.frames, shape.side**2, shape.hidden]
            own = [size // n if dim == src else size for dim, size in enumerate(whole)]
            x = torch.randn(own, dtype=torch.bfloat16, device=device)
            parts = chunk_sizes(whole[src], n), chunk_sizes(whole[dst], n)
            plan = SwitchPlan(tuple(own), src, dst, *parts, 0)
            sent = plan.pack(x)  # as large and in as many parts as what is received: all sizes divide
            runs = {
                "copy": lambda x=x: x.clone(),
                "pack": lambda plan=plan, x=x: plan.pack(x),
                "unpack": lambda plan=plan, sent=sent: plan.unpack(sent),
            }
            took = {name: seconds(run, device, times) for name, run in runs.items()}
            gb = 1e-9 * x.numel() * x.element_size()
            rows.append({
                "ranks": n, "way": way, "gigabytes": gb, "seconds": took,
                "of_a_copy": (took["pack"] + took["unpack"]) / took["copy"],
                "copy_gb_per_s": 2 * gb / took["copy"],  # read and written
            })  # fmt: skip
    return rows


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="A training step of the paper's 720M model on one GPU.")
    parser.add_argument("--tiny", action="store_true", help="a small model, on a CPU where there is no GPU")
    parser.add_argument("--steps", type=int, default=10, help="measured, after three to warm up")
    parser.add_argument("--frames", type=int, help="instead of 64, where memory is short")
    parser.add_argument("--peak", type=float, help="TFLOP/s of the GPU in bf16, if it is none of " + ", ".join(PEAK))
    parser.add_argument("--out", type=Path, default=ROOT / "docs/images/gpu", help="for OUT.json")
    options = parser.parse_args(arguments)
    cuda = torch.cuda.is_available()
    if not cuda and not options.tiny:
        print("skipped: there is no CUDA GPU here; --tiny runs the same code on a small model")
        return 0
    shape, device = TINY if options.tiny else FULL, "cuda" if cuda else "cpu"
    if options.frames:
        shape = Shape(shape.hidden, shape.heads, shape.depth, shape.batch, options.frames, shape.side)
    name = torch.cuda.get_device_name() if cuda else "CPU"
    peak = options.peak or next((p for key, p in PEAK.items() if cuda and key in name), None)
    found = circumstances(shape, arguments) | {"device": name, "peak": peak}
    found["switch"] = switch(shape, device, options.steps)
    found["training"] = one = training(shape, device, options.steps, peak)
    options.out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    mfu = f"MFU {one['mfu']:.1%}" if one["mfu"] else "no MFU without --peak"
    memory = f"{one['memory'] / 2**30:.1f} GiB at most" if one["memory"] else "memory not measured"
    print(f"{name}: a step of {one['tokens']:,} tokens in {one['seconds']:.3f} s, {one['tokens_per_s']:,.0f} tokens/s")
    print(f"{mfu}; {memory}; {one['outside']:.0%} of the device's time is outside matrix products and attention")
    for row in found["switch"]:
        print(
            f"a switch {row['way']} on {row['ranks']} ranks: its copies take {row['of_a_copy']:.2f} of a copy of "
            f"{1e3 * row['gigabytes']:.2f} MB, which runs at {row['copy_gb_per_s']:.0f} GB/s"
        )
    print(f"wrote {options.out}.json")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
