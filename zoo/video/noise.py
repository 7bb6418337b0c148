"""Noise that any rank can draw by itself, and its levels: the signs and the clock of `zoo/video/diffusion.py`.

Letters: b samples, c channels, t frames, h w height and width.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zoo.data.sampling import generator

__all__ = [
    "flow_sign",
    "linear_schedule",
    "per_frame",
    "per_sample",
    "seeded_noise",
    "seeded_uniform",
    "shift_at",
    "shifted",
]


def seeded_noise(
    seed: int,
    step: int,
    sample_ids: Sequence[int],
    frames: range,
    frame_shape: tuple[int, int, int],
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Normal noise [b, c, len(frames), h, w] that is a pure function of (seed, step, sample id, frame number).

    Every frame is drawn by itself, so a rank that holds frames lo..hi asks for `range(lo, hi)` and gets, bit for bit,
    what a rank that draws all of them has there. `frame_shape` is (c, h, w). Drawn on the CPU, in float32.
    """
    noise = torch.empty(len(sample_ids), len(frames), *frame_shape)
    for i, sample in enumerate(sample_ids):
        for j, frame in enumerate(frames):
            torch.randn(frame_shape, generator=generator("noise", seed, step, sample, frame), out=noise[i, j])
    return noise.transpose(1, 2).contiguous().to(device=device, dtype=dtype)


def seeded_uniform(
    seed: int, step: int, sample_ids: Sequence[int], *, name: str = "timestep", device: torch.device | str | None = None
) -> Tensor:
    """One number in (0, 1) a sample, [b] float32, a pure function of (name, seed, step, sample id).

    `objective.sample_timestep` turns it into a noise level; other names give independent numbers (dropping labels).
    """
    draws = [torch.rand((), generator=generator(name, seed, step, i), dtype=torch.float64).item() for i in sample_ids]
    return torch.tensor(draws, dtype=torch.float64).clamp(1e-6, 1 - 1e-6).float().to(device)


def per_sample(value: Tensor) -> Tensor:
    return value.view(-1, 1, 1, 1, 1)  # (B,) -> (B, 1, 1, 1, 1)


def per_frame(x_mask: Tensor) -> Tensor:
    return x_mask[:, None, :, None, None]  # (B, T) -> (B, 1, T, 1, 1)


def flow_sign(model: Any) -> int:
    """1 for a model that predicts the velocity x - noise, -1 for one that predicts noise - x."""
    return getattr(model, "flow_sign", 1)


def shift_at(shift: float, base: int | None, cells: int | None) -> float:
    """The shift for clips of so many cells (t h w): `shift` for all, or times the root of cells / base.

    More cells need more noise to hide the same clip. Open-Sora 1.2: shift 1 at a base of 64 x 64 latent cells of one
    frame. Stable Diffusion 3: 3 for all. Wan 2.1: 3 for clips of 480p, 5 for 720p.
    """
    return shift * math.sqrt(cells / base) if base and cells else shift


def shifted(level: Any, shift: float) -> Any:
    """Noise levels in [0, 1], moved towards 1 where `shift` is above 1."""
    return shift * level / (1 + (shift - 1) * level)


def linear_schedule(steps: int = 1000) -> dict[str, Tensor]:
    """The tables of a diffusion with linear variances from 1e-4 to 0.02 (for 1000 steps), each [steps], float64.

    Ho et al. 2020 (arXiv 2006.11239), equations 4 to 7. `posterior_*` are of q(x_{s-1} | x_s, x_0), whose
    mean is `posterior_x0` x_0 + `posterior_xs` x_s. Its variance is 0 at s = 0: there `log_smallest` takes the value of
    s = 1, as in Nichol & Dhariwal's code.
    """
    beta = torch.linspace(1e-4 * 1000 / steps, 0.02 * 1000 / steps, steps, dtype=torch.float64, device="cpu")
    alpha = 1 - beta
    abar = alpha.cumprod(0)
    previous = torch.cat([torch.ones(1, dtype=torch.float64, device="cpu"), abar[:-1]])
    variance = beta * (1 - previous) / (1 - abar)
    return {
        "beta": beta,
        "abar": abar,
        "signal": abar.sqrt(),
        "noise": (1 - abar).sqrt(),
        "posterior_x0": beta * previous.sqrt() / (1 - abar),
        "posterior_xs": (1 - previous) * alpha.sqrt() / (1 - abar),
        "log_smallest": torch.cat([variance[1:2], variance[1:]]).log(),
        "log_largest": beta.log(),
    }
