"""Published video models, sampled as their source samples them, from a folder as diffusers saves a pipeline.

This file reads `model_index.json`, `transformer/` (and `transformer_2/`), `scheduler/`, and for a given image
`image_encoder/` and `image_processor/`; zoo/video/codec.py reads `vae/`, `text_encoder/` and `tokenizer/`. Transformers
are models of the zoo. Schedulers are those of diffusers, built from scheduler_config.json. Nothing is downloaded, and
no code that a file names is run.

    family   transformer/config.json     sampled as
    Wan      WanTransformer3DModel       WanPipeline, WanImageToVideoPipeline: 2.1, the experts of 2.2, 2.2's 5B
    Latte    LatteTransformer3DModel     LattePipeline, each clip by itself
    STDiT    Open-Sora's own weights     Open-Sora: rectified flow, levels shifted by size (1.2), IDDPM (1.0 and 1.1)

Letters: n clips, c latent channels, t frames, h w height and width in latent cells, l tokens, e channels of text.
"""

import html
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zoo.files import fits
from zoo.reference import read_safetensors
from zoo.video import latte_weights, stdit, stdit_weights, wan_weights
from zoo.video.codec import Autoencoder, TextEncoder
from zoo.video.diffusion import OnStep, ddim, euler, flow_sign, shift_at
from zoo.video.pretrained import (
    CodecError,
    configuration,
    from_pretrained,
    image_processor,
    library,
    settings_of,
    variant_of,
)

__all__ = ["Prompt", "Published", "family_of", "read", "scheduler"]

MOST_LEVELS = 1_000_000  # noise levels of a scheduler, which holds a table of them
Rows = dict[str, Tensor]  # arguments of a forward, one row a clip
# the prediction that this process computes (0: with the caption, 1: without), and a function that gathers both
Branch = tuple[int, Callable[[Tensor], Sequence[Tensor]]]


@dataclass
class Prompt:
    """The conditioning of n clips as arguments of the model's forward: with captions, and without them for guidance."""

    cond: Rows
    uncond: Rows | None = None  # None: no guidance
    start: Tensor | None = None  # (c t h w): the latent of a given image, and the family's filling for other frames

    def rows(self, clips: range, device: torch.device) -> "Prompt":
        """The rows of some of the clips, on a device."""
        cond, none = (
            given and {name: value[clips.start : clips.stop].to(device) for name, value in given.items()}
            for given in (self.cond, self.uncond)
        )
        return Prompt(cond or {}, none, None if self.start is None else self.start.to(device))


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

    length = 512  # most tokens of a caption
    size = (81, 480, 832)
    steps, guidance, fps = 50, 5.0, 16.0
    dtype = torch.bfloat16
    images = False  # True: clips may begin with an image

    @property
    def channels(self) -> int:
        """The number of latent channels that are sampled."""
        config: Any = self.models[0].config
        return config.in_channels - getattr(config, "condition_channels", 0)

    @property
    def needs_image(self) -> bool:
        """True if every clip has to begin with an image."""
        return False

    # ------------------------------------------------------------------------------------------------------ conditions

    def captions(self, encoder: TextEncoder, captions: Sequence[str], negative: str | None) -> Prompt:
        """Embed captions, and the negative caption of guidance; negative=None: no guidance."""
        raise NotImplementedError

    def sizes(self, n: int, pixels: tuple[int, int, int], fps: float) -> Rows:
        """The sizes that the model takes as arguments, for n clips of `pixels` (frames, rows, columns)."""
        return {}

    def image_tokens(self, image: Tensor) -> Tensor | None:
        """Embed an image [3, h, w] in [-1, 1]: (1 j e); None for a model that takes only the image's latent."""
        return None

    def begin(
        self, prompt: Prompt, image: Tensor, tokens: Tensor | None, pixels: tuple[int, int, int], codec: Autoencoder
    ) -> None:
        """Make the clips of a prompt begin with an image [3, h, w] in [-1, 1], whose `image_tokens` are `tokens`."""
        raise NotImplementedError

    # -------------------------------------------------------------------------------------------------------- sampling

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
        scheduler.set_timesteps(steps, device=noise.device)
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
            y = _guided(model, *self.shown(y, t, prompt), prompt, guidance[low], batched, branch).float()
            y = y if learned else y[:, : x.shape[1]]
            y = -flow_sign(model) * y if flow else y  # schedulers of flows take noise - x
            x = scheduler.step(y, t, x, return_dict=False, **extra)[0]
            if on_step is not None:
                on_step(i + 1, len(timesteps))
        return x

    def shown(self, x: Tensor, t: Tensor, prompt: Prompt) -> tuple[Tensor, Tensor]:
        """The arguments x and timestep of the model, for latents at a timestep."""
        return x, t.expand(len(x))


class Wan(Published):
    images = True

    @property
    def needs_image(self) -> bool:
        config: Any = self.models[0].config
        return config.condition_channels > 0

    def captions(self, encoder: TextEncoder, captions: Sequence[str], negative: str | None) -> Prompt:
        """Embed captions, padded with zeros, which the model attends to."""
        cleaned = [_cleaned(caption) for caption in captions]
        rows = encoder.encode(cleaned if negative is None else [*cleaned, _cleaned(negative)])
        context = torch.stack([nn.functional.pad(row, (0, 0, 0, self.length - len(row))) for row in rows])
        n = len(captions)
        none = None if negative is None else {"context": context[n:].expand(n, -1, -1)}
        return Prompt({"context": context[:n]}, none)

    def begin(
        self, prompt: Prompt, image: Tensor, tokens: Tensor | None, pixels: tuple[int, int, int], codec: Autoencoder
    ) -> None:
        config: Any = self.models[0].config
        if config.frame_times:
            prompt.start = codec.encode(image[:, None])
            return
        latent = codec.encode(torch.cat([image[:, None], image.new_zeros(3, pixels[0] - 1, *pixels[1:])], dim=1))
        given = torch.zeros(config.condition_channels - len(latent), *latent.shape[1:])
        given[:, 0] = 1
        prompt.start = torch.cat([given, latent])
        for rows in (prompt.cond, prompt.uncond):
            if rows is not None and tokens is not None:
                rows["image"] = tokens.expand(len(rows["context"]), -1, -1)

    def image_tokens(self, image: Tensor) -> Tensor | None:
        """Embed an image by the last layer but one of the folder's CLIP."""
        config: Any = self.models[0].config
        if not config.image_channels:
            return None
        from PIL import Image

        folder, _ = configuration(self.folder / "image_encoder", "image_encoder")
        settings = self.folder / "image_processor" / "preprocessor_config.json"
        if not settings.is_file():
            raise CodecError(f"no such file: {settings}, which a pipeline from an image has; download that folder, too")
        transformers = library("transformers")
        variant = variant_of(folder, "model", self.variant)
        encoder = from_pretrained(transformers.CLIPVisionModel, folder, variant=variant).eval()
        processor = image_processor(transformers).from_pretrained(str(settings.parent), local_files_only=True)
        picture = Image.fromarray(((image + 1) * 127.5).round().byte().permute(1, 2, 0).numpy())
        given = processor(images=picture, return_tensors="pt")
        with torch.no_grad():
            return encoder(**given, output_hidden_states=True).hidden_states[-2]

    def shown(self, x: Tensor, t: Tensor, prompt: Prompt) -> tuple[Tensor, Tensor]:
        config: Any = self.models[0].config
        if config.condition_channels and prompt.start is not None:
            return torch.cat([x, prompt.start.expand(len(x), -1, -1, -1, -1)], dim=1), t.expand(len(x))
        if prompt.start is not None:
            times = t * (torch.arange(x.shape[2], device=x.device) > 0)
            return self.held(x, prompt), times.expand(len(x), -1)
        return x, t.expand(len(x))

    def held(self, x: Tensor, prompt: Prompt) -> Tensor:
        """Replace the first latent frame by the given one, for models that take a clean frame (``frame_times``)."""
        config: Any = self.models[0].config
        if prompt.start is None or not config.frame_times:
            return x
        return torch.cat([prompt.start.expand(len(x), -1, -1, -1, -1), x[:, :, 1:]], dim=2)

    def sample(self, prompt: Prompt, *args: Any, **options: Any) -> Tensor:
        return self.held(super().sample(prompt, *args, **options), prompt)


class Latte(Published):
    length = 120
    size = (16, 512, 512)
    guidance, fps = 7.5, 8.0

    def captions(self, encoder: TextEncoder, captions: Sequence[str], negative: str | None) -> Prompt:
        """Embed captions without padding; the negative one is padded and cut to the same length, as LattePipeline does
        for a single clip."""
        own = encoder.encode([caption.lower().strip() for caption in captions])
        cond = _stacked(own)
        if negative is None:
            return Prompt(cond)
        (padded,) = encoder.encode([negative.lower().strip()], padded=True)
        return Prompt(cond, cond | {"context": padded[: cond["context"].shape[1]].expand_as(cond["context"])})


class STDiT(Published):
    steps, guidance, fps = 30, 7.0, 24.0
    size = (51, 480, 848)

    @property
    def version(self) -> str:
        config: Any = self.models[0].config
        return config.version

    def captions(self, encoder: TextEncoder, captions: Sequence[str], negative: str | None) -> Prompt:
        """Embed captions without padding; the null caption is that of the weights, cut to the same length."""
        rows = encoder.encode([caption.strip() for caption in captions])
        if negative is None:
            return Prompt(_stacked(rows))
        if negative:
            everything, n = _stacked([*rows, *encoder.encode([negative])]), len(rows)
            none = {name: value[n:].expand_as(value[:n]) for name, value in everything.items()}
            return Prompt({name: value[:n] for name, value in everything.items()}, none)
        if self.null is None:
            raise CodecError(f"{self.folder}: it has no y_embedder.y_embedding, so guidance needs a negative prompt")
        cond = _stacked(rows)
        null = self.null[: cond["context"].shape[1]].float()
        return Prompt(cond, cond | {"context": null.expand_as(cond["context"])})

    def sizes(self, n: int, pixels: tuple[int, int, int], fps: float) -> Rows:
        frames, height, width = pixels
        known = {"num_frames": frames, "height": height, "width": width, "ar": height / width, "fps": fps}
        return {name: torch.full((n,), float(known[name])) for name in stdit.CONDITIONS[self.version]}

    def sample(
        self,
        prompt: Prompt,
        noise: Tensor,
        steps: int,
        guidance: tuple[float, float],
        *,
        on_step: OnStep | None = None,
        **options: Any,
    ) -> Tensor:
        if self.scheduler is not None:
            return super().sample(prompt, noise, steps, guidance, on_step=on_step, **options)
        given: dict[str, Any] = {"uncond": prompt.uncond, "on_step": on_step, **prompt.cond}
        given["guidance"] = 1.0 if prompt.uncond is None else guidance[0]
        if self.version == "v3":
            return euler(self.models[0], noise, steps, shift=shift_at(1.0, 64 * 64, prod(noise.shape[2:])), **given)
        return ddim(self.models[0], noise, steps, **given)


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
        return model(x, timestep, **prompt.cond)
    if branch is not None:
        mine, join = branch
        cond, free = join(model(x, timestep, **(prompt.cond, prompt.uncond)[mine]).float())
    elif batched:
        both = {name: torch.cat([prompt.uncond[name], value]) for name, value in prompt.cond.items()}
        free, cond = model(torch.cat([x, x]), torch.cat([timestep, timestep]), **both).float().chunk(2)
    else:
        cond, free = (model(x, timestep, **given).float() for given in (prompt.cond, prompt.uncond))
    return free + guidance * (cond - free)


# --------------------------------------------------------------------------------------------------------- the folder


def read(
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    sampler: str | None = None,
    shift: float | None = None,
    variant: str | None = None,
) -> Published:
    """The transformers of a folder on the CPU, in `dtype` (None: the family's published type).

    sampler: the class of another scheduler of diffusers, built with the folder's settings; shift: of its noise levels;
    variant: of the weights, as fp16 in diffusion_pytorch_model.fp16.safetensors.
    A CodecError names a missing or damaged file, or an unknown family.
    """
    folder = Path(folder)
    family, name = family_of(folder)
    index = settings_of(folder / "model_index.json") if (folder / "model_index.json").is_file() else {}
    dtype = dtype or family.dtype
    parts = [part for part in ("transformer", "transformer_2") if (folder / part).is_dir()]
    built = [_transformer(folder / part, name, dtype, index, variant) for part in parts]
    boundary = index.get("boundary_ratio") or 0.0
    if not fits(boundary, float):
        raise CodecError(f"{folder / 'model_index.json'}: boundary_ratio is {boundary!r}: expected a number")
    if len(built) > 1 and not 0 < boundary < 1:
        raise CodecError(f"{folder} has two transformers, but model_index.json has no boundary_ratio to choose by")
    own = family is STDiT and not sampler and not (folder / "scheduler").is_dir()
    chosen = None if own else scheduler(folder, sampler, shift)
    return family(folder, [model for model, _ in built], chosen, boundary, built[0][1], variant)


def family_of(folder: Path) -> tuple[type[Published], str]:
    """The family of a folder's transformer, and its class in the source; CodecError: none, or an unknown one."""
    file = folder / "transformer" / "config.json"
    if not file.parent.is_dir():
        raise CodecError(f"{folder} is not the folder of a pipeline: there is no transformer/ in it")
    config = settings_of(file) if file.is_file() else {}
    name = str(config.get("_class_name") or config.get("model_type") or "STDiT")
    family = next((found for key, found in FAMILIES.items() if name.startswith(key)), None)
    if family is None:
        raise CodecError(f"{file}: a {name}; known here: {', '.join(FAMILIES)}. dsp.parallelize takes other pipelines")
    return family, name


FAMILIES: dict[str, type[Published]] = {
    "WanTransformer3DModel": Wan,
    "LatteTransformer3DModel": Latte,
    "STDiT": STDiT,
}


def _transformer(
    folder: Path, name: str, dtype: torch.dtype, index: Mapping[str, Any], variant: str | None
) -> tuple[nn.Module, Tensor | None]:
    """The model, and the null caption of its weights, if any."""
    try:
        state = read_safetensors(folder, variant)
    except Exception as error:  # safetensors raises several kinds
        raise CodecError(f"{folder}: not readable as safetensors: {error}") from None
    state = {name: value.to(dtype) for name, value in state.items()}
    try:
        with torch.device("meta"):
            if name.startswith("Latte"):
                model: nn.Module = latte_weights.from_diffusers(state, folder / "config.json")
            elif name.startswith("Wan"):
                settings = settings_of(folder / "config.json")
                model = wan_weights.from_diffusers(state, settings, index.get("expand_timesteps"))
            else:
                config = settings_of(folder / "config.json") if (folder / "config.json").is_file() else {}
                sides = {key: config[key] for key in ("input_sq_size",) if key in config}  # shapes do not tell it
                model = stdit_weights.from_reference(state, **sides)
    except (ValueError, TypeError) as error:
        raise CodecError(f"{folder}: {error}") from error
    return model.eval().requires_grad_(False), state.get("y_embedder.y_embedding")


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
    own = inspect.signature(kind).parameters
    changes = {key: shift for key in ("shift", "flow_shift") if shift is not None and key in own}
    if shift is not None and not changes:
        raise CodecError(f"--shift: {wanted} has no such setting")
    if shift is not None and "use_flow_sigmas" in own and not settings.get("use_flow_sigmas"):
        raise CodecError(f"--shift: {wanted} is not set for a flow, whose noise levels can be shifted")
    if not fits(levels := settings.get("num_train_timesteps", 1000), int) or not 0 < levels <= MOST_LEVELS:
        raise CodecError(f"{file}: num_train_timesteps is {levels!r}: expected a number from 1 to {MOST_LEVELS:,}")
    try:
        made = kind.from_config({**settings, **changes})  # type: ignore[attr-defined]
    except Exception as error:  # any kind, of values that it does not check
        raise CodecError(f"{file}: a {wanted} cannot be built of it: {error}") from error
    if made.config.get("use_dynamic_shifting"):
        raise CodecError(f"{file}: use_dynamic_shifting is not supported")
    return made


# --------------------------------------------------------------------------------------------------------------- text


def _cleaned(caption: str) -> str:
    """A caption as WanPipeline cleans it: HTML entities resolved, runs of white space replaced by one space."""
    return re.sub(r"\s+", " ", html.unescape(html.unescape(caption))).strip()


def _stacked(rows: Sequence[Tensor]) -> Rows:
    """Embeddings [l, e] of captions as arguments of a forward: padded, and a mask of the padding."""
    longest = max(map(len, rows))
    context = torch.stack([nn.functional.pad(row, (0, 0, 0, longest - len(row))) for row in rows])
    return {"context": context, "context_mask": torch.arange(longest) < torch.tensor([[len(row)] for row in rows])}
