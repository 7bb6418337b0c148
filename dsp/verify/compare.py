"""One call of a model with its backward, and the differences between two such calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dsp.comm import randomness
from dsp.comm.collectives import inexact
from dsp.comm.layout import Axis
from dsp.stages.stage import clean
from dsp.support.tensors import constants_in, remade, tensors_in
from dsp.verify.slices import error

ROUNDINGS = 32  # a gradient may be off by so many times its rounding: its summands may be larger than the sum


class Trial:
    """A call with copies of its inputs, and backward from a random projection of its outputs.

    axis: the ranks over which parameter gradients are averaged; scale: a factor of the loss, by which the gradients
    are divided again.
    """

    def __init__(
        self, model: nn.Module, args: Any, kwargs: Any, grad: bool = False, axis: Axis | None = None, seed: int = 0,
        scale: float = 1.0,
    ) -> None:  # fmt: skip
        leaves: list[Tensor] = []

        def leaf(t: Tensor) -> Tensor:
            leaves.append(t.detach().clone().requires_grad_(grad and inexact(t)))
            return leaves[-1]

        args, kwargs = remade((args, kwargs), leaf)
        model.zero_grad()
        randomness.seed(seed)
        with torch.set_grad_enabled(grad):
            output = model(*args, **kwargs)
            outputs = tensors_in(output)
            loss = projected(outputs) * scale
        if loss.requires_grad:
            loss.backward()
        self.outputs, self.constants = [t.detach() for t in outputs], constants_in(output)
        self.buffers = {clean(n): b.detach().clone() for n, b in model.named_buffers()}
        self.grads: dict[str, Tensor | None] = {}
        for name, p in model.named_parameters():
            if not (grad and p.requires_grad):
                continue
            gradient = p.grad
            if axis is not None:  # every rank must take part in every all-reduce, even without a gradient
                gradient = torch.zeros_like(p) if gradient is None else gradient
                gradient = torch.ops.dsp.all_reduce(gradient.contiguous(), axis.group) / axis.size
            self.grads[clean(name)] = gradient
        self.grads.update({f"input {i}": t.grad for i, t in enumerate(leaves) if t.requires_grad})
        if scale != 1:
            self.grads = {name: None if g is None else g / scale for name, g in self.grads.items()}


def projected(outputs: Sequence[Tensor]) -> Tensor:
    """A scalar that depends on every element of the outputs."""
    generator, loss = torch.Generator().manual_seed(0), torch.zeros(())
    for t in (torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in outputs if inexact(t)):
        direction = torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t)
        loss = loss + (t * direction).sum() / max(t.numel(), 1)
    return loss


@dataclass
class Difference:
    """The difference of two calls: errors, and a sentence for each value that is off by more than the tolerance."""

    output: float = 0.0
    gradients: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def compare(
    got: Trial, expected: Trial, tolerance: float, numbers: bool = True, rounding: Mapping[str, float] | None = None
) -> Difference:
    """The difference of two calls; without `numbers`, only of the dtypes and shapes of their outputs.

    rounding: the error of each gradient that comes only from rounding, if known.
    """
    difference = Difference()
    kinds = [[(t.dtype, tuple(t.shape)) for t in call.outputs] for call in (got, expected)]
    if kinds[0] != kinds[1]:
        texts = [", ".join(_kind(*k) for k in ks) for ks in kinds]
        difference.problems.append("returns {} instead of {}".format(*texts))
    if not numbers or difference.problems:
        return difference
    difference.output = max((error(a, b) for a, b in zip(got.outputs, expected.outputs)), default=0.0)
    if not difference.output <= tolerance:
        difference.problems.append(f"outputs differ by {difference.output:.1e}")
    if not _same(got.constants, expected.constants):
        difference.problems.append(f"returns {got.constants} beside tensors instead of {expected.constants}")
    for name, b in expected.buffers.items():
        off = error(got.buffers[name], b) if name in got.buffers else float("inf")
        if not off <= 10 * tolerance:
            difference.problems.append(f"leaves the buffer {name} off by {off:.1e}")
    difference.gradients = dict(gradients(got, expected))
    for name, off in difference.gradients.items():
        if not off <= max(10 * tolerance, ROUNDINGS * (rounding or {}).get(name, 0.0)):
            difference.problems.append(f"the gradient of {name} differs by {off:.1e}")
    return difference


def gradients(got: Trial, expected: Trial) -> Iterator[tuple[str, float]]:
    """The error of each gradient; infinite if only one of the two calls has a gradient that is not zero."""
    # a gradient that is zero up to rounding, such as that of attention keys' bias, is measured relative to the others
    largest = [float(g.abs().max()) for g in expected.grads.values() if g is not None and g.numel()]
    floor = 1e-6 * max(largest, default=0.0)
    for name, g in expected.grads.items():
        gradient = got.grads.get(name)
        if g is None or gradient is None:
            off = 0.0 if (g is None or not g.any()) and (gradient is None or not gradient.any()) else float("inf")
        else:
            off = error(gradient, g, floor)
        yield name, off


def _kind(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {shape}"


def _same(one: list[Any], two: list[Any]) -> bool:
    def same(a: Any, b: Any) -> bool:
        return a == b or (isinstance(a, float) and isinstance(b, float) and abs(a - b) <= 1e-6 * abs(b))

    return len(one) == len(two) and all(map(same, one, two))
