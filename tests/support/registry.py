"""Every registered model in one table: how it is built, inputs for it, its stages by hand, and what is claimed of it.

tests/parity/test_models.py shows of each that it is exact, sends what its plan says, is shared out, and that `discover`
finds stages as cheap. A new model is one line here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import dsp
from dsp.support.tensors import tensors_in
from tests.support import cases, diffusers_latte, third_party, toys
from tests.support.parity import wrap_checkpoints

Inputs = dict[str, Any]


class Case(NamedTuple):
    """A model at tiny sizes, in float64, no parameter of it zero. A size: the batch, and lengths of two dims."""

    build: Callable[..., nn.Module]  # of the lengths
    inputs: Callable[..., Inputs]  # of the batch and the lengths; what asks for a gradient is compared, too
    stages: dict[str, str] | None = None  # by hand; None: the model's own attribute
    uneven: tuple[tuple[int, int, int], ...] = ((1, 7, 5),)  # sizes that two, three and four ranks do not divide
    even: tuple[int, int, int] = (1, 8, 8)
    large: Callable[[], tuple[Callable[[], nn.Module], Inputs]] | None = None  # where activations outweigh parameters
    most: float = 1.1  # of these a rank has so many N-ths at most: of the largest, and of all together
    floor: int = 0  # elements: tensors no larger than this, or than a parameter, are not counted
    planned: bool = True  # ahead of its first run: it neither reads its data nor hides a kernel


def toy(name: str, **claims: Any) -> Case:
    def inputs(*size: int) -> Inputs:
        return {k: v.requires_grad_(v.is_floating_point()) for k, v in toys.inputs(name, *size).items()}

    return Case(lambda *_: toys.make(name), inputs, **claims)


def of_zoo(name: str) -> Case:
    def inputs(batch: int, frames: int, height: int, width: int = 10) -> Inputs:
        model = cases.build(name)
        given = cases.example(model, batch, frames=frames, height=height, width=width, rows=frames, residues=height + 1)
        return cases.doubled(given)

    protein = name in cases.PROTEINS
    side = 12 if name.startswith("axial-image") else 16  # of 12 pixels, or of 8 patches

    def large() -> tuple[Callable[[], nn.Module], Inputs]:
        lengths = {"frames": 8, "height": side, "width": side, "rows": 24, "residues": 24}
        given = cases.example(cases.build(name), 1 if protein else 4, **lengths)
        return partial(cases.build, name), cases.doubled(given)

    # biases of attention are whole: a number a head
    floor = 24 * 24 * 4 if protein else 0
    return Case(lambda *_: cases.build(name), inputs, None, ((2, 7, 6), (2, 5, 6)), (2, 8, 8), large, floor=floor)


def of_others(name: str) -> Case:
    model = third_party.MODELS[name]

    def inputs(*size: int) -> Inputs:
        return {k: v.double().requires_grad_() for k, v in model.inputs(*size).items()}

    def large() -> tuple[Callable[[], nn.Module], Inputs]:
        lengths = (32, 16) if name == "patchtst" else (32, 8)
        return partial(third_party.make, name, *lengths), inputs(1, *lengths)

    even = (1, 8, 4) if name == "timesformer" else (1, 16, 8)
    uneven = ((1, 7, 4), (2, 5, 3))
    return Case(partial(third_party.make, name), inputs, model.stages, uneven, even, large, most=1.3)


def latte() -> Case:
    def inputs(*size: int) -> Inputs:
        given = diffusers_latte.inputs(*size)
        given["hidden_states"].requires_grad_()
        return given | {"return_dict": False}

    def large() -> tuple[Callable[[], nn.Module], Inputs]:
        return lambda: diffusers_latte.build(16, 16, 1, heads=1).train(), diffusers_latte.inputs(1, 16, 16, text=32)

    def build(frames: int, side: int) -> nn.Module:
        return diffusers_latte.build(frames, side).train()

    return Case(build, inputs, diffusers_latte.STAGES, ((2, 7, 6), (1, 5, 4)), (2, 8, 8), large)


SEVERAL = (1, 7, 5), (2, 4, 8), (1, 5, 3), (2, 3, 3)
CASES: dict[str, Case] = {
    **{name: toy(name, uneven=SEVERAL, planned=name != "Unplanned") for name in toys.TOYS},
    **{name: toy(name, uneven=((2, 5, 3), (1, 4, 6))) for name in toys.HOSTILE},
    "diffusers-latte": latte(),
    **{name: of_others(name) for name in third_party.MODELS},
    **{name: of_zoo(name) for name in cases.CASES | cases.PROTEINS},
}
for name in ("DataDependent", "Kernel"):
    CASES[name] = CASES[name]._replace(planned=False)


def recomputing(model: nn.Module, stages: dict[str, str]) -> dict[str, str]:
    """Turn on the activation checkpointing of a model itself, around whole stages or blocks; return its stages then."""
    if hasattr(model, "ckpt"):
        model.ckpt = True
    elif hasattr(model, "enable_gradient_checkpointing"):
        model.enable_gradient_checkpointing()
    elif getattr(model, "supports_gradient_checkpointing", False):
        model.activation_checkpointing_enable({"use_reentrant": False})
    else:
        wrap_checkpoints(model)
        return {k.replace(".*", ".*.inner"): v for k, v in stages.items()}
    return stages


def stages_of(case: Case, model: nn.Module) -> dict[str, str]:
    return dict(case.stages if case.stages is not None else model.stages)


def step(mesh: DeviceMesh, name: str, size: tuple[int, ...], gather: bool, ckpt: bool) -> tuple[dict, dsp.Plan, int]:
    """Return this rank's traffic in a step by phase and collective, the plan, and the loss' number of means."""
    case = CASES[name]
    model, inputs = case.build(*size[1:]), plain(case.inputs(*size))
    stages = stages_of(case, model)
    if ckpt:
        stages = recomputing(model, stages)
    plan = dsp.plan(model, kwargs=inputs, size=mesh.size(), stages=stages, gather_output=gather)
    dsp.parallelize(model, mesh, stages, gather_output=gather)
    with dsp.count_comm() as comm:
        outputs = [y for y in tensors_in(model(**inputs)) if y.requires_grad]
        sum(dsp.mean(y) for y in outputs).backward()
    return comm.by_collective(), plan, sum(isinstance(y, DTensor) for y in outputs)


def plain(inputs: Inputs) -> Inputs:
    """The same tensors, of which none asks for a gradient."""
    return {k: v.detach() if isinstance(v, Tensor) else v for k, v in inputs.items()}


DISCOVERED = "transformer2d-stdit latte-text latte-4-text stdit-v1 st_mamba st_rwkv-sst axial-video axial-image".split()
DISCOVERED = [*toys.TOYS, "diffusers-latte", *DISCOVERED, *third_party.MODELS]  # models that `discover` is shown on


def sample(name: str, batch: int = 2, frames: int = 7) -> Inputs:
    """Small inputs, of which none asks for a gradient."""
    lengths = (4, 6) if name in cases.CASES else (5,) if name in toys.TOYS else (4,)
    given = plain(CASES[name].inputs(batch, 7 if name == "diffusers-latte" else frames, *lengths))
    if name in cases.CASES and "timestep" in given:
        given["timestep"] = torch.tensor([3, 700])[:batch]
    return given


def built(name: str, frames: int = 7) -> nn.Module:
    return CASES[name].build(7 if name == "diffusers-latte" else frames, 4)


@functools.cache
def discovered(name: str) -> dict[str, str]:
    return dsp.discover(built(name), kwargs=sample(name))
