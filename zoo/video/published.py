"""Published video models, sampled as their source samples them.

`Published` has the transformers of a folder and samples with them, by the conditions that they want (zoo/contract.py)
and a scheduler of diffusers, built from scheduler_config.json. zoo/video/families.py has what differs from family to
family, and reads folders.

Letters: n clips, c latent channels, t frames, h w height and width in latent cells, l j tokens, e channels of text.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zoo.contract import Conditions, predict, sizes_of
from zoo.files import fits
from zoo.video.codec import Autoencoder
from zoo.video.encoders import ImageEncoder, PooledEncoder, TextEncoder, encode_start
from zoo.video.noise import flow_sign
from zoo.video.pretrained import CodecError, library, settings_of
from zoo.video.sampling import OnStep

__all__ = ["Branch", "Prompt", "Published", "Rows", "scheduler"]

MOST_LEVELS = 1_000_000  # noise levels of a scheduler, which holds a table of them
Rows = dict[str, Tensor]  # arguments of `predict`, one row a clip
# the prediction that this process computes (0: with the caption, 1: without), and a function that gathers both
Branch = tuple[int, Callable[[Tensor], Sequence[Tensor]]]


@dataclass
class Prompt:
    """The conditioning of n clips as arguments of `predict`: with captions, and without them for guidance."""

    cond: Rows
    uncond: Rows | None = None  # None: no guidance
    first: Tensor | None = None  # (c 1 h w): the latent of the first frame, in models that take it clean

    def both(self, name: str, value: Tensor) -> None:
        """Add a condition of n rows that guidance does not drop."""
        for rows in (self.cond, self.uncond):
            if rows is not None:
                rows[name] = value

    def rows(self, clips: range, device: torch.device) -> "Prompt":
        """The rows of some of the clips, on a device."""
        cond, none = (
            conditions and {name: value[clips.start : clips.stop].to(device) for name, value in conditions.items()}
            for conditions in (self.cond, self.uncond)
        )
        return Prompt(cond or {}, none, None if self.first is None else self.first.to(device))


@dataclass
class Published:
    """The transformers of a folder, sampled as by their source.

    Numbers are the defaults of the source's pipeline; `size` is frames, rows and columns of pixels.
    """

    folder: Path
    models: list[nn.Module]  # the second, if any, is for lower noise levels
    scheduler: Any = None  # None: the source has its own sampler
    boundary: float = 0.0  # the noise level below which the second model takes over
    null: Tensor | None = None  # (l e): the embedding of the null caption, if the weights have one
    variant: str | None = None  # of the weights, such as fp16, in the parts that have it

    model = ""  # the name of the family in the zoo
    length = 512  # most tokens of a caption
    size = (81, 480, 832)
    steps, guidance, fps = 50, 5.0, 16.0
    dtype = torch.bfloat16
    from_image = True  # False: clips that begin with an image are not sampled here
    scheduled = True  # False: without a scheduler's folder the source's own sampler is used

    @cached_property
    def conditions(self) -> Conditions:
        """The conditions that the transformers want."""
        return Conditions.of(self.models[0])

    @property
    def takes_image(self) -> bool:
        """True if clips may begin with an image."""
        return self.conditions.start > 0 or self.conditions.clean == "timestep"

    # ------------------------------------------------------------------------------------------------------ conditions

    def captions(self, encoder: TextEncoder, captions: Sequence[str], negative: str | None) -> Prompt:
        """Embed captions, and the negative caption of guidance; negative=None: no guidance."""
        raise NotImplementedError

    def prompt(
        self, text: TextEncoder, pooled: PooledEncoder | None, captions: Sequence[str], negative: str | None
    ) -> Prompt:
        """Embed captions by both text encoders, and the negative caption of guidance; negative=None: no guidance."""
        prompt = self.captions(text, captions, negative)
        if pooled is not None:
            prompt.cond["pooled"] = pooled.encode(captions)
            if prompt.uncond is not None:
                prompt.uncond["pooled"] = pooled.encode([negative or ""]).expand(len(captions), -1)
        return prompt

    def add_sizes(self, prompt: Prompt, n: int, pixels: tuple[int, int, int], fps: float, guidance: float) -> None:
        """Add the sizes of n clips of `pixels` (frames, rows, columns), and the strength of distilled guidance."""
        for name, size in sizes_of(self.conditions.sizes, *pixels, fps).items():
            prompt.both(name, torch.full((n,), size))
        if self.conditions.guidance:
            prompt.both("strength", torch.full((n,), 1000 * guidance))

    def image_tokens(self, image: Tensor) -> Tensor | None:
        """Embed an image [3, h, w] in [-1, 1]: (j e); None for a model that takes only the image's latent."""
        if not self.conditions.image:
            return None
        return ImageEncoder.load(self.folder, variant=self.variant).encode(image)

    def begin(
        self,
        prompt: Prompt,
        n: int,
        image: Tensor,
        tokens: Tensor | None,
        pixels: tuple[int, int, int],
        codec: Autoencoder,
    ) -> None:
        """Make n clips begin with an image [3, h, w] in [-1, 1], whose `image_tokens` are `tokens`."""
        if tokens is not None:
            prompt.both("image", tokens.expand(n, -1, -1))
        if self.conditions.start:
            prompt.both("start", encode_start(self.conditions, image, pixels, codec).expand(n, -1, -1, -1, -1))
        else:
            prompt.first = codec.encode(image[:, None])
            prompt.both("x_mask", (torch.arange(codec.latent_shape(*pixels)[1]) > 0).expand(n, -1))

    # -------------------------------------------------------------------------------------------------------- sampling

    def set_timesteps(self, steps: int, device: torch.device) -> None:
        self.scheduler.set_timesteps(steps, device=device)

    @torch.no_grad()
    def sample(
        self,
        prompt: Prompt,
        noise: Tensor,
        steps: int,
        guidance: tuple[float, float],
        *,
        batched: bool = False,
        branch: Branch | None = None,
        random: Sequence[torch.Generator] = (),
        on_step: OnStep | None = None,
    ) -> Tensor:
        """Latents (n c t h w), float32, sampled from normal noise of that shape in `steps` steps of the scheduler.

        guidance: of the first and the second model. batched: one call with 2 n clips for the two predictions of
        guidance, instead of two calls; branch: each prediction in its own process. random: a generator for each clip,
        for schedulers that add noise in their steps.
        """
        scheduler = self.scheduler
        self.set_timesteps(steps, noise.device)
        takes = inspect.signature(scheduler.step).parameters
        extra = {"generator": list(random)} if "generator" in takes and random else {}
        last = self.boundary * scheduler.config.num_train_timesteps
        learned = getattr(scheduler.config, "variance_type", None) in ("learned", "learned_range")
        flow = "FlowMatch" in type(scheduler).__name__ or scheduler.config.get("prediction_type") == "flow_prediction"
        x = noise * scheduler.init_noise_sigma if hasattr(scheduler, "init_noise_sigma") else noise
        timesteps = scheduler.timesteps
        for i, t in enumerate(timesteps):
            low = len(self.models) > 1 and bool(t < last)
            model = self.models[low]
            y = scheduler.scale_model_input(x, t) if hasattr(scheduler, "scale_model_input") else x
            y = with_first_frame(y, prompt)
            y = _guided(model, y, t.expand(len(y)), prompt, guidance[low], batched, branch).float()
            y = y if learned else y[:, : x.shape[1]]
            y = -flow_sign(model) * y if flow else y  # schedulers of flows take noise - x
            x = scheduler.step(y, t, x, return_dict=False, **extra)[0]
            if on_step is not None:
                on_step(i + 1, len(timesteps))
        return with_first_frame(x, prompt)


def with_first_frame(x: Tensor, prompt: Prompt) -> Tensor:
    """Replace the first latent frame by the one that the prompt holds, if any."""
    return x if prompt.first is None else torch.cat([prompt.first.expand(len(x), -1, -1, -1, -1), x[:, :, 1:]], dim=2)


def _guided(
    model: Callable[..., Tensor],
    x: Tensor,
    timestep: Tensor,
    prompt: Prompt,
    guidance: float,
    batched: bool,
    branch: Branch | None,
) -> Tensor:
    x = x.to(next(model.parameters()).dtype)  # type: ignore[attr-defined]
    if prompt.uncond is None:
        return predict(model, x, timestep, **prompt.cond)
    if branch is not None:
        side, join = branch
        cond, free = join(predict(model, x, timestep, **(prompt.cond, prompt.uncond)[side]).float())
    elif batched:
        both = {name: torch.cat([prompt.uncond[name], value]) for name, value in prompt.cond.items()}
        free, cond = predict(model, torch.cat([x, x]), torch.cat([timestep, timestep]), **both).float().chunk(2)
    else:
        cond, free = (predict(model, x, timestep, **conditions).float() for conditions in (prompt.cond, prompt.uncond))
    return free + guidance * (cond - free)


def scheduler(folder: Path, name: str | None = None, shift: float | None = None) -> Any:
    """diffusers' scheduler of a folder's scheduler_config.json; `name`: another class, with the same settings."""
    file = folder / "scheduler" / "scheduler_config.json"
    settings = settings_of(file) if file.is_file() else {}
    wanted = name or settings.get("_class_name")
    diffusers = library("diffusers")
    kind = getattr(diffusers, str(wanted), None)
    if wanted is None:
        raise CodecError(f"{file} is not there: it says how to sample; or name a scheduler, --scheduler CLASS")
    if not (isinstance(kind, type) and issubclass(kind, diffusers.SchedulerMixin)):
        raise CodecError(f"{wanted} is not a scheduler of diffusers")
    accepted = inspect.signature(kind).parameters
    changes = {key: shift for key in ("shift", "flow_shift") if shift is not None and key in accepted}
    if shift is not None and not changes:
        raise CodecError(f"--shift: {wanted} has no such setting")
    if shift is not None and "use_flow_sigmas" in accepted and not settings.get("use_flow_sigmas"):
        raise CodecError(f"--shift: {wanted} is not set for a flow, whose noise levels can be shifted")
    if not fits(levels := settings.get("num_train_timesteps", 1000), int) or not 0 < levels <= MOST_LEVELS:
        raise CodecError(f"{file}: num_train_timesteps is {levels!r}: expected a number from 1 to {MOST_LEVELS:,}")
    try:
        result = kind.from_config({**settings, **changes})  # type: ignore[attr-defined]
    except Exception as error:  # any kind, of values that it does not check
        raise CodecError(f"{file}: a {wanted} cannot be built of it: {error}") from error
    if result.config.get("use_dynamic_shifting"):
        raise CodecError(f"{file}: use_dynamic_shifting is not supported")
    return result
