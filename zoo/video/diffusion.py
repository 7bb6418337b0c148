"""Training objectives of video diffusion models; `zoo/video/noise.py` has levels, `zoo/video/sampling.py` the samplers.

Letters: b samples, c channels, t frames, h w height and width. One convention for the signs and the clock, used by the
objective and by the sampler:

Rectified flow (Liu et al. 2022; the target is that of Open-Sora 1.2): the noise level u runs from 0, data, to 1, noise,
    x_u = (1 - u) x + u noise;  the model gets the timestep 1000 u and predicts v = x - noise = -dx_u/du.
    Sampling therefore goes from u = 1 down to 0 and *adds* v times the decrease of u.
    Levels are shifted towards noise, u -> s u / (1 + (s - 1) u), where a model was published so (Esser et al. 2024,
    arXiv 2403.03206, equation 23): the same in training and in sampling.
IDDPM (Nichol & Dhariwal 2021, arXiv 2102.09672; Latte and Open-Sora 1.0): 1000 steps of linear variances,
    x_s = sqrt(abar_s) x + sqrt(1 - abar_s) noise;  the model gets the step s and predicts the noise, or the velocity
    sqrt(abar_s) noise - sqrt(1 - abar_s) x (Salimans & Ho 2022, arXiv 2202.00512), and, in a second half of its
    channels, where the variance lies between its two bounds.

An objective's forward is elementwise arithmetic with one coefficient a sample, and chunks along c: no reduction, no
indexing of a long dim, no branch on values. So it runs as it is on tensors sharded along any of t, h, w.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zoo.contract import predict
from zoo.video.noise import flow_sign, linear_schedule, per_frame, per_sample, shift_at, shifted

__all__ = ["IDDPM", "RectifiedFlow"]

LEAST = 0.05  # the noise level below which the error of a predicted clip weighs no more than there


class _Objective(nn.Module):
    """A model with a loss round it. `stages` are the model's, under `model.`, with the objective's own inputs."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    @property
    def stages(self) -> dict[str, str]:
        """The stages of the wrapped model for `dsp.parallelize(objective, mesh)`; the model's own root is replaced."""
        stages: Mapping[str, str] = getattr(self.model, "stages", {})
        root = "x=b c t h w, noise=b c t h w, x_mask=b t, start=b k t h w -> b c t h w, b c t h w"
        return {"": root} | {f"model.{key}": stage for key, stage in stages.items() if key}

    @property
    def cores(self) -> dict[str, str]:
        """Where the wrapped model attends from place to place, for `dsp.embedded`; empty if it does not say."""
        return {f"model.{key}": core for key, core in getattr(self.model, "cores", {}).items()}

    @property
    def tensor_parallel(self) -> dict[str, str]:
        """Which linear layers of the wrapped model may be cut, for `dsp.embedded`; empty if it does not say."""
        return {f"model.{key}": cut for key, cut in getattr(self.model, "tensor_parallel", {}).items()}

    def sample_timestep(self, uniform: Tensor, cells: int | None = None) -> Tensor:
        """Training noise levels [b] from numbers in (0, 1) [b]: the quantiles of the training distribution.

        `cells` is the number of places, t h w, of the clips: levels may depend on it.
        """
        raise NotImplementedError

    def validation_levels(self, n: int, cells: int | None = None) -> Tensor:
        """`n` fixed noise levels [n], the midpoints of n equal parts of the training distribution.

        The mean of the losses at these levels estimates the training loss without the noise of drawn levels.
        """
        if n < 1:
            raise ValueError(f"validation_levels: expected n >= 1, got {n}")
        return self.sample_timestep((torch.arange(n, dtype=torch.float32) + 0.5) / n, cells)


class RectifiedFlow(_Objective):
    """Rectified flow on `model(x, timestep, **conditioning)`, which predicts the velocity x - noise.

    A model whose `flow_sign` is -1 predicts noise - x (Wan, Stable Diffusion 3): objective and sampler turn it round.

    Noise levels are logit-normal, sigmoid(loc + scale n) with n normal (Esser et al. 2024), or `uniform`; then shifted,
    see `shift_at`. A model that returns 2c channels (learned range) is trained on its first c, as in Open-Sora 1.2.

    With `clean` the model predicts x itself, and its velocity is (prediction - x_u) / u: noise need not pass through a
    model whose patches have as many values as it has channels (Li & He 2025, arXiv 2511.13720, their t being 1 - u).
    The loss is the error of that velocity, ((x - prediction) / max(u, 0.05))^2, as published: at levels from 0.05 on
    the same number as that of a model which predicts velocities.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        loc: float = 0.0,
        scale: float = 1.0,
        uniform: bool = False,
        shift: float = 1.0,
        shift_cells: int | None = None,
        clean: bool = False,
        within: tuple[float, float] = (0.0, 1.0),
    ):
        super().__init__(model)
        self.loc, self.scale, self.uniform, self.clean = loc, scale, uniform, clean
        self.shift, self.shift_cells, self.within = shift, shift_cells, within

    def sample_timestep(self, uniform: Tensor, cells: int | None = None) -> Tensor:
        shift = shift_at(self.shift, self.shift_cells, cells)
        if self.within != (0.0, 1.0):
            low, high = (self._share_below(level, shift) for level in self.within)
            uniform = (low + (high - low) * uniform.double()).float()
        levels = uniform if self.uniform else torch.sigmoid(self.loc + self.scale * torch.special.ndtri(uniform))
        return shifted(levels, shift).clamp(*self.within)

    def _share_below(self, level: float, shift: float) -> float:
        """The share of noise levels below `level`, of the whole distribution."""
        level = level / (shift - (shift - 1) * level)  # before the shift
        if self.uniform or not 0 < level < 1:
            return level
        if self.scale == 0:
            return float(1 / (1 + math.exp(-self.loc)) < level)
        return 0.5 * (1 + math.erf((math.log(level / (1 - level)) - self.loc) / self.scale / math.sqrt(2)))

    def forward(
        self,
        x: Tensor,
        noise: Tensor,
        timestep: Tensor,
        weight: Tensor | None = None,
        x_mask: Tensor | None = None,
        **conditioning: Any,
    ) -> tuple[Tensor, Tensor]:
        """Squared velocity error and weight of every element, both [b, c, t, h, w] float32.

        `x` and `noise` are [b, c, t, h, w], `timestep` holds noise levels u in (0, 1), [b]. `weight`, if any, is [b] or
        broadcasts to x. The loss of a batch is mean(loss * weight) / mean(weight).

        `x_mask` [b, t] is for models that take it: frames where it is False are given without noise and not judged.
        """
        u = per_sample(timestep)
        if x_mask is not None:
            u = u * per_frame(x_mask)
        noised = (1 - u) * x + u * noise
        output = predict(self.model, noised, timestep * 1000, x_mask=x_mask, **conditioning)
        output = output.narrow(1, 0, x.shape[1]).float()
        error = (x - output) / u.clamp(min=LEAST) if self.clean else x - noise - flow_sign(self.model) * output
        loss = error**2
        return loss, _per_element(loss, weight, x_mask)


class IDDPM(_Objective):
    """Noise prediction with a learned variance on `model(x, timestep, **conditioning)`, 1000 linear steps.

    The model returns c channels (noise; the loss is the squared error alone) or 2c (noise, and the place v in [-1, 1]
    of the log variance between its bounds): then the variational bound in bits is added, through which only the
    variance is learned (the mean is detached), equation 16 of arXiv 2102.09672.

    `velocity`: the model predicts the velocity instead of the noise. `min_snr`, 5 as published: squared errors at steps
    whose signal-to-noise ratio is above it weigh less, as in Hang et al. 2023 (arXiv 2303.09556).
    """

    steps = 1000

    def __init__(self, model: nn.Module, *, velocity: bool = False, min_snr: float | None = None):
        super().__init__(model)
        self.velocity, self.min_snr = velocity, min_snr
        # A plain attribute, not a buffer: it stays real and right when the module goes through meta and to_empty.
        self._schedule = linear_schedule(self.steps)

    def _at(self, timestep: Tensor, *names: str) -> list[Tensor]:
        """The named tables at `timestep` [b], each [b, 1, 1, 1, 1] float32."""
        table = torch.stack([self._schedule[name] for name in names]).float().to(timestep.device)
        return [per_sample(column) for column in table[:, timestep]]

    def sample_timestep(self, uniform: Tensor, cells: int | None = None) -> Tensor:
        return (uniform * self.steps).long().clamp(0, self.steps - 1)

    def q_sample(self, x: Tensor, noise: Tensor, timestep: Tensor) -> Tensor:
        """x_s, the data [b, c, t, h, w] noised to steps `timestep` [b]."""
        signal, sigma = self._at(timestep, "signal", "noise")
        return signal * x + sigma * noise

    def posterior(self, x: Tensor, x_s: Tensor, timestep: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log variance of q(x_{s-1} | x_s, x_0 = x); the log variance is [b, 1, 1, 1, 1]."""
        from_x, from_x_s, log_variance = self._at(timestep, "posterior_x0", "posterior_xs", "log_smallest")
        return from_x * x + from_x_s * x_s, log_variance

    def p_mean_variance(self, noise: Tensor, v: Tensor, x_s: Tensor, timestep: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log variance of the model's p(x_{s-1} | x_s), from its predicted `noise` and variance place `v`."""
        signal, sigma, smallest, largest = self._at(timestep, "signal", "noise", "log_smallest", "log_largest")
        mean, _ = self.posterior((x_s - sigma * noise) / signal, x_s, timestep)
        place = (v + 1) / 2
        return mean, place * largest + (1 - place) * smallest

    def forward(
        self,
        x: Tensor,
        noise: Tensor,
        timestep: Tensor,
        weight: Tensor | None = None,
        x_mask: Tensor | None = None,
        **conditioning: Any,
    ) -> tuple[Tensor, Tensor]:
        """Loss and weight of every element, both [b, c, t, h, w] float32.

        `x` and `noise` are [b, c, t, h, w], `timestep` holds steps 0..999, [b] int64. `weight`, if any, is [b] or
        broadcasts to x. The loss of a batch is mean(loss * weight) / mean(weight).

        `x_mask` [b, t] is for models that take it: frames where it is False are given at step 0 and not judged.
        """
        channels = x.shape[1]
        x_s = self.q_sample(x, noise, timestep)
        if x_mask is not None:
            x_s = torch.where(per_frame(x_mask), x_s, self.q_sample(x, noise, torch.zeros_like(timestep)))
        output = predict(self.model, x_s, timestep, x_mask=x_mask, **conditioning).float()
        predicted, target = output.narrow(1, 0, channels), noise
        signal, sigma = self._at(timestep, "signal", "noise")
        if self.velocity:
            target = signal * noise - sigma * x
        loss = (target - predicted) ** 2
        if self.min_snr is not None:
            ratio = (signal / sigma) ** 2
            loss = loss * (ratio.clamp(max=self.min_snr) / (ratio + 1 if self.velocity else ratio))
        if output.shape[1] == 2 * channels:
            v = output.narrow(1, channels, channels)
            if self.velocity:
                predicted = signal * predicted + sigma * x_s  # the noise, by the model
            mean, log_variance = self.p_mean_variance(predicted.detach(), v, x_s, timestep)
            true_mean, true_log_variance = self.posterior(x, x_s, timestep)
            kl = _gaussian_kl(true_mean, true_log_variance, mean, log_variance)
            likelihood = _discretised_log_likelihood(x, mean, 0.5 * log_variance)
            loss = loss + torch.where(per_sample(timestep == 0), -likelihood, kl) / math.log(2)
        return loss, _per_element(loss, weight, x_mask)


def _gaussian_kl(mean1: Tensor, log_variance1: Tensor, mean2: Tensor, log_variance2: Tensor) -> Tensor:
    """KL(N1 || N2) of two Gaussians, elementwise, in nats."""
    spread = torch.exp(log_variance1 - log_variance2) + (mean1 - mean2) ** 2 * torch.exp(-log_variance2)
    return 0.5 * (log_variance2 - log_variance1 + spread - 1)


def _discretised_log_likelihood(x: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Log probability that a Gaussian gives to the bin of x, [-1, 1] cut into 256 bins with open ends, in nats.

    Equation 13 of arXiv 2006.11239. The normal distribution function is the tanh approximation of Page 1977.
    """
    half_bin, tiny = 1 / 255, 1e-12
    upper = _normal_cdf((x - mean + half_bin) * torch.exp(-log_std))
    lower = _normal_cdf((x - mean - half_bin) * torch.exp(-log_std))
    inside = (upper - lower).clamp(min=tiny).log()
    at_top = (1 - lower).clamp(min=tiny).log()
    at_bottom = upper.clamp(min=tiny).log()
    return torch.where(x < -0.999, at_bottom, torch.where(x > 0.999, at_top, inside))


def _normal_cdf(z: Tensor) -> Tensor:
    return 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))


def _per_element(loss: Tensor, weight: Tensor | None, x_mask: Tensor | None) -> Tensor:
    """The weight of every element, shaped like the loss: the caller's ([b] or broadcastable; 1), 0 in clean frames."""
    weights = torch.ones_like(loss)
    if weight is not None:
        weights = weights * (per_sample(weight) if weight.dim() == 1 else weight)
    return weights if x_mask is None else weights * per_frame(x_mask)
