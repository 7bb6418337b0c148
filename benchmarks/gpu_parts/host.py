"""Does the host keep up? What it takes to launch a forward or a step, against what the device takes to run it.

Models of diffusers, unmodified, as one GPU runs them and as rank 0 of eight does. The others are pretended: what they
would send holds no numbers and takes no time, so that what is left is the host's work and the kernels of one rank.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import dsp
import zoo
from benchmarks.gpu_parts import Cases, Machine, Part, Row, pretended
from benchmarks.gpu_parts.speed import profiled
from dsp.tensors import tensors_in

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


def cases(built: Mapping[str, Callable[[Machine], Built]], machine: Machine, _: Any) -> Cases:
    found: Cases = {}
    for name, make in built.items():
        for ranks in (1, RANKS):
            where = "one GPU" if ranks == 1 else f"a rank of {ranks}"
            found[f"{name}, forward, {where}"] = partial(timed, machine, make, ranks, False)
            if make is not wan:  # its step takes no new host code, and long
                found[f"{name}, step, {where}"] = partial(timed, machine, make, ranks, True)
    return found


ZOO = {"zoo's Latte XL/2": zoo_latte}
DIFFUSERS = {"diffusers' Latte": latte, "diffusers' Wan 1.3B": wan}
PARTS = [
    Part("host", "The host's time beside the kernels'", partial(cases, ZOO), 30, alone=True),
    Part("diffusers", "The same of diffusers' models", partial(cases, DIFFUSERS), 55, ("diffusers",), alone=True),
]
