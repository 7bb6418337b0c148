"""The modes in which a model is called: training, eval, without gradients; in float64 if the model runs in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dsp.verify.compare import Trial, compare
from dsp.verify.slices import TOLERANCE, copies, keeping_buffers


@dataclass
class Mode:
    """A mode to call the model in. random: its results differ between calls; fails: its error on one process."""

    name: str
    grad: bool
    training: list[bool]  # module.training, in the order of model.modules()
    random: bool = False
    fails: str = ""

    def set(self, model: nn.Module) -> None:
        for module, training in zip(model.modules(), self.training):
            module.training = training


def modes_of(model: nn.Module) -> list[Mode]:
    """The modes, with the model's present one first; there, modules that are set to eval mode stay so."""
    flags = [m.training for m in model.modules()]
    training = Mode("training", True, flags if model.training else [True] * len(flags))
    evaluation = Mode("eval", True, [False] * len(flags) if model.training else flags)
    return [training, evaluation][:: 1 if model.training else -1] + [Mode("no_grad", False, evaluation.training)]


def prepared(
    model: nn.Module, args: Any, kwargs: Any, thorough: bool, draw: bool
) -> tuple[nn.Module, Any, Any, torch.dtype, list[Mode]]:
    """A copy of the model, its inputs, their dtype (float64 if that runs), and the modes, those without random numbers
    first."""
    first: Exception | None = None
    for dtype, clone, a, k in copies(model, args, kwargs):
        if draw:
            draw_zeros(clone)
        modes = modes_of(clone)
        for mode in modes:
            mode.set(clone)
            try:
                one, two = (called(clone, a, k, mode.grad, seed) for seed in (0, 1))
                mode.random = bool(compare(two, one, TOLERANCE.get(dtype, 3e-2)).problems)
            except Exception as reason:
                first = first or reason
                mode.fails = f"{type(reason).__name__}: {reason}"
                if mode is modes[0]:
                    break
            if not (thorough or mode.fails or mode.random):
                return clone, a, k, dtype, [mode]
        else:
            modes.sort(key=lambda m: m.random)  # random ones last, because they leave different buffers behind
            next(m for m in modes if not m.fails).set(clone)
            return clone, a, k, dtype, modes
    assert first is not None
    raise first


def draw_zeros(model: nn.Module) -> None:
    """Draw the parameters that are all zero at random, in place and the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            if p.is_floating_point() and p.numel() and not p.any():
                fan_in = p.numel() // len(p) if p.ndim > 1 else 1
                p.copy_(torch.randn(p.shape, generator=generator) * 0.2 / fan_in**0.5)


def called(model: nn.Module, args: Any, kwargs: Any, grad: bool = False, seed: int = 0, scale: float = 1.0) -> Trial:
    """A call that restores the buffers afterwards."""
    with keeping_buffers(model):
        return Trial(model, args, kwargs, grad, seed=seed, scale=scale)


def rounding(model: nn.Module, args: Any, kwargs: Any, expected: Trial, tolerance: float) -> dict[str, float]:
    """The rounding error of each gradient, by losses at other scales.

    If a model computes parts in a shorter dtype, as timestep embeddings often do, gradients depend on the scale.
    """
    errors: dict[str, float] = {}
    for scale in (3.0, 5.0, 7.0):
        for name, off in compare(called(model, args, kwargs, True, scale=scale), expected, tolerance).gradients.items():
            errors[name] = max(errors.get(name, 0.0), off)
    return errors
