"""Samplers of video diffusion models: Euler steps of a rectified flow, and DDIM.

Letters: b samples, c channels, t frames, h w height and width. The signs and the clock: `zoo/video/diffusion.py`.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from zoo.contract import predict
from zoo.video.diffusion import IDDPM
from zoo.video.noise import flow_sign, linear_schedule, per_frame, shifted

__all__ = ["OnStep", "ddim", "euler"]

OnStep = Callable[[int, int], None]


def _guided(
    model: Callable[..., Tensor], channels: int, guidance: float, uncond: Mapping[str, Any] | None, cond: dict[str, Any]
) -> Callable[[Tensor, Tensor], Tensor]:
    """The model's first `channels` channels, pushed away from its unconditional prediction (Ho & Salimans 2022).

    Two calls of b samples, not one of 2 b: the activations of a long clip are what fills the memory.
    """
    if guidance != 1 and uncond is None:
        raise ValueError(
            f"guidance={guidance} needs uncond=, the conditioning that means 'none' (the null class: label=num_classes)"
        )

    def guided(x: Tensor, timestep: Tensor) -> Tensor:
        output = predict(model, x, timestep, **cond)[:, :channels].float()
        if guidance == 1:
            return output
        free = predict(model, x, timestep, **{**cond, **(uncond or {})})[:, :channels].float()
        return free + guidance * (output - free)

    return guided


def _holding(noise: Tensor, clean: Tensor | None, x_mask: Tensor | None) -> Callable[[Tensor, Tensor | None], Tensor]:
    """`hold(x, frames)`: x with those of `frames` where x_mask is False; x as it is if no frames are held."""
    if (clean is None) != (x_mask is None):
        raise ValueError("clean= and x_mask= go together: clean= has the given frames, and x_mask= is False there")
    if clean is None or x_mask is None:
        return lambda x, _: x
    if clean.shape != noise.shape or x_mask.shape != (noise.shape[0], noise.shape[2]):
        raise ValueError(
            f"noise {list(noise.shape)} needs clean= of the same shape, got {list(clean.shape)}, and x_mask= of "
            f"(samples, frames) = {[noise.shape[0], noise.shape[2]]}, got {list(x_mask.shape)}"
        )
    free = per_frame(x_mask)
    return lambda x, frames: x if frames is None else torch.where(free, x, frames)


@torch.no_grad()
def euler(
    model: Callable[..., Tensor],
    noise: Tensor,
    steps: int,
    *,
    guidance: float = 1.0,
    uncond: Mapping[str, Any] | None = None,
    shift: float = 1.0,
    predicts_clean: bool | None = None,
    clean: Tensor | None = None,
    x_mask: Tensor | None = None,
    on_step: OnStep | None = None,
    **cond: Any,
) -> Tensor:
    """Samples [b, c, t, h, w] of a rectified flow: `steps` Euler steps from `noise` (u = 1) to data (u = 0).

    `model(x, timestep, **cond)` predicts x - noise, the opposite if its `flow_sign` is -1, or with `predicts_clean` the
    clip itself, as it was trained; the last step then ends at the clip that it predicts. By default it is what the
    model's own `predicts_clean` says, if it has one. `guidance` other than 1 calls it a second time with the values of
    `uncond` put over those of `cond`. The levels of the steps are even, then `shifted`, as those of training were.
    `on_step(i, steps)` is called after step i of 1..steps. Deterministic.

    Frames where `x_mask` [b, t] is False are held: they are those of `clean` [b, c, t, h, w] from the first step to the
    last, and the model, which must take x_mask, gets it.
    """
    if steps < 1:
        raise ValueError(f"euler: expected steps >= 1, got {steps}")
    hold = _holding(noise, clean, x_mask)
    conditions = cond if x_mask is None else {**cond, "x_mask": x_mask}
    guided = _guided(model, noise.shape[1], guidance, uncond, conditions)
    predicts_clean = getattr(model, "predicts_clean", False) if predicts_clean is None else predicts_clean
    levels = [shifted(1 - i / steps, shift) for i in range(steps + 1)]
    x = hold(noise, clean)
    for i in range(steps):
        timestep = torch.full((len(x),), 1000 * levels[i], device=x.device)
        output = guided(x, timestep)
        velocity = (output - x) / levels[i] if predicts_clean else flow_sign(model) * output
        x = hold(x + (levels[i] - levels[i + 1]) * velocity, clean)
        if on_step is not None:
            on_step(i + 1, steps)
    return x


@torch.no_grad()
def ddim(
    model: Callable[..., Tensor],
    noise: Tensor,
    steps: int,
    *,
    eta: float = 0.0,
    random: torch.Generator | None = None,
    guidance: float = 1.0,
    uncond: Mapping[str, Any] | None = None,
    velocity: bool = False,
    clean: Tensor | None = None,
    x_mask: Tensor | None = None,
    on_step: OnStep | None = None,
    **cond: Any,
) -> Tensor:
    """Samples [b, c, t, h, w] of an IDDPM model in `steps` of its 1000 steps: equation 12 of arXiv 2010.02502.

    The steps taken are evenly spaced and start at 999 ("trailing", arXiv 2305.08891); a learned variance is not used.
    `velocity`: the model predicts the velocity, as that of the objective does.
    `eta` = 0 is deterministic given `noise`; above 0 every step adds noise drawn on the CPU from the generator
    `random`. The other arguments are those of `euler`; held frames are shown to the model at step 0, as in training.
    """
    if not 1 <= steps <= IDDPM.steps:
        raise ValueError(f"ddim: expected 1 <= steps <= {IDDPM.steps}, got {steps}")
    if eta > 0 and random is None:
        raise ValueError(f"ddim: eta={eta} adds noise at every step: pass random=, a seeded torch.Generator")
    hold = _holding(noise, clean, x_mask)
    conditions = cond if x_mask is None else {**cond, "x_mask": x_mask}
    guided = _guided(model, noise.shape[1], guidance, uncond, conditions)
    abar = linear_schedule(IDDPM.steps)["abar"].tolist()
    timesteps = [round(IDDPM.steps * (1 - i / steps)) - 1 for i in range(steps)]
    start = None if clean is None else math.sqrt(abar[0]) * clean + math.sqrt(1 - abar[0]) * noise
    x = hold(noise, start)
    for i, step in enumerate(timesteps):
        now, after = abar[step], abar[timesteps[i + 1]] if i + 1 < steps else 1.0
        predicted = guided(x, torch.full((len(x),), step, device=x.device))
        if velocity:
            predicted = math.sqrt(now) * predicted + math.sqrt(1 - now) * x
        data = (x - math.sqrt(1 - now) * predicted) / math.sqrt(now)
        sigma = eta * math.sqrt((1 - after) / (1 - now) * (1 - now / after))
        x = math.sqrt(after) * data + math.sqrt(1 - after - sigma**2) * predicted
        if sigma > 0:
            x = x + sigma * torch.randn(x.shape, generator=random).to(x)
        x = hold(x, start)
        if on_step is not None:
            on_step(i + 1, steps)
    return hold(x, clean)
