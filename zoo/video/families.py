"""The families of published video models: what their sources do with captions, their defaults, and their folders.

A folder is one as diffusers saves a pipeline. This file reads `model_index.json` and `transformer/` (and
`transformer_2/`); other files of zoo/video read `scheduler/`, `vae/` and the encoders. Transformers are models of the
zoo. Nothing is downloaded, and no code that a file names is run.

    family        transformer/config.json          sampled as
    Wan           WanTransformer3DModel            WanPipeline, WanImageToVideoPipeline: 2.1, 2.2's experts, 2.2's 5B
    HunyuanVideo  HunyuanVideoTransformer3DModel   HunyuanVideoPipeline
    Latte         LatteTransformer3DModel          LattePipeline, each clip by itself
    STDiT         Open-Sora's own weights          Open-Sora: rectified flow, levels shifted by size (1.2), else IDDPM

Letters: n clips, c latent channels, t frames, h w height and width in latent cells, l tokens, e channels of text.
"""

import html
import re
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zoo import registry
from zoo.files import fits
from zoo.reference import read_safetensors
from zoo.video.encoders import TextEncoder
from zoo.video.noise import shift_at
from zoo.video.pretrained import CodecError, settings_of
from zoo.video.published import Prompt, Published, Rows, scheduler
from zoo.video.sampling import OnStep, ddim, euler

__all__ = ["FAMILIES", "family_of", "read"]


class Wan(Published):
    model = "wan"

    def captions(self, encoder: TextEncoder, captions: Sequence[str], negative: str | None) -> Prompt:
        """Embed captions, padded with zeros, which the model attends to."""
        cleaned = [_cleaned(caption) for caption in captions]
        rows = encoder.encode(cleaned if negative is None else [*cleaned, _cleaned(negative)])
        context = torch.stack([nn.functional.pad(row, (0, 0, 0, self.length - len(row))) for row in rows])
        n = len(captions)
        none = None if negative is None else {"context": context[n:].expand(n, -1, -1)}
        return Prompt({"context": context[:n]}, none)


class HunyuanVideo(Published):
    model = "hunyuan"
    length = 256
    size = (129, 720, 1280)
    guidance, fps = 6.0, 24.0
    from_image = False

    def captions(self, encoder: TextEncoder, captions: Sequence[str], negative: str | None) -> Prompt:
        """Embed captions without padding, which the model does not attend to."""
        return _prompt(encoder.encode(captions), None if negative is None else encoder.encode([negative]))

    def set_timesteps(self, steps: int, device: torch.device) -> None:
        """Set even noise levels from 1 to 1/steps, before the scheduler's shift."""
        self.scheduler.set_timesteps(sigmas=[1 - i / steps for i in range(steps)], device=device)


class Latte(Published):
    model = "latte"
    length = 120
    size = (16, 512, 512)
    guidance, fps = 7.5, 8.0

    def captions(self, encoder: TextEncoder, captions: Sequence[str], negative: str | None) -> Prompt:
        """Embed captions without padding; the negative one is padded and cut to the same length, as LattePipeline does
        for a single clip."""
        cond = _stacked(encoder.encode([caption.lower().strip() for caption in captions]))
        if negative is None:
            return Prompt(cond)
        (padded,) = encoder.encode([negative.lower().strip()], padded=True)
        return Prompt(cond, cond | {"context": padded[: cond["context"].shape[1]].expand_as(cond["context"])})


class STDiT(Published):
    model = "stdit"
    steps, guidance, fps = 30, 7.0, 24.0
    size = (51, 480, 848)
    scheduled = False

    def captions(self, encoder: TextEncoder, captions: Sequence[str], negative: str | None) -> Prompt:
        """Embed captions without padding; the null caption is that of the weights, cut to the same length."""
        rows = encoder.encode([caption.strip() for caption in captions])
        if negative is None or negative:
            return _prompt(rows, encoder.encode([negative]) if negative else None)
        if self.null is None:
            raise CodecError(f"{self.folder}: it has no y_embedder.y_embedding, so guidance needs a negative prompt")
        cond = _stacked(rows)
        null = self.null[: cond["context"].shape[1]].float()
        return Prompt(cond, cond | {"context": null.expand_as(cond["context"])})

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
        arguments: dict[str, Any] = {"uncond": prompt.uncond, "on_step": on_step, **prompt.cond}
        arguments["guidance"] = 1.0 if prompt.uncond is None else guidance[0]
        config: Any = self.models[0].config
        if config.version == "v3":
            return euler(self.models[0], noise, steps, shift=shift_at(1.0, 64 * 64, prod(noise.shape[2:])), **arguments)
        return ddim(self.models[0], noise, steps, **arguments)


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
    family = family_of(folder)
    index = settings_of(folder / "model_index.json") if (folder / "model_index.json").is_file() else {}
    dtype = dtype or family.dtype
    parts = [part for part in ("transformer", "transformer_2") if (folder / part).is_dir()]
    built = [_transformer(family, folder / part, dtype, index, variant) for part in parts]
    boundary = index.get("boundary_ratio") or 0.0
    if not fits(boundary, float):
        raise CodecError(f"{folder / 'model_index.json'}: boundary_ratio is {boundary!r}: expected a number")
    if len(built) > 1 and not 0 < boundary < 1:
        raise CodecError(f"{folder} has two transformers, but model_index.json has no boundary_ratio to choose by")
    flow = not family.scheduled and not sampler and not (folder / "scheduler").is_dir()
    chosen = None if flow else scheduler(folder, sampler, shift)
    published = family(folder, [model for model, _ in built], chosen, boundary, built[0][1], variant)
    if published.conditions.start and not family.from_image:
        raise CodecError(
            f"{folder}: clips of this {family.__name__} begin with an image, which its pipeline embeds together with "
            "the caption, by a model that is not here; dsp.parallelize takes diffusers' pipeline"
        )
    return published


def family_of(folder: Path) -> type[Published]:
    """The family of a folder's transformer; CodecError: none, or an unknown one."""
    file = folder / "transformer" / "config.json"
    if not file.parent.is_dir():
        raise CodecError(f"{folder} is not the folder of a pipeline: there is no transformer/ in it")
    config = settings_of(file) if file.is_file() else {}
    name = str(config.get("_class_name") or config.get("model_type") or "STDiT")
    family = next((kind for key, kind in FAMILIES.items() if name.startswith(key)), None)
    if family is None:
        raise CodecError(f"{file}: a {name}; known here: {', '.join(FAMILIES)}. dsp.parallelize takes other pipelines")
    return family


FAMILIES: dict[str, type[Published]] = {  # by the beginning of the class's name in its source
    "WanTransformer3DModel": Wan,
    "HunyuanVideoTransformer3DModel": HunyuanVideo,
    "LatteTransformer3DModel": Latte,
    "STDiT": STDiT,
}


def _transformer(
    family: type[Published], folder: Path, dtype: torch.dtype, index: Mapping[str, Any], variant: str | None
) -> tuple[nn.Module, Tensor | None]:
    """The model, and the null caption of its weights, if any."""
    try:
        state = read_safetensors(folder, variant)
    except Exception as error:  # safetensors raises several kinds
        raise CodecError(f"{folder}: not readable as safetensors: {error}") from None
    state = {name: value.to(dtype) for name, value in state.items()}
    try:
        with torch.device("meta"):
            config = settings_of(folder / "config.json") if (folder / "config.json").is_file() else {}
            model = registry.from_published(family.model, state, config, index)
    except (ValueError, TypeError) as error:
        raise CodecError(f"{folder}: {error}") from error
    return model.eval().requires_grad_(False), state.get("y_embedder.y_embedding")


def _cleaned(caption: str) -> str:
    """A caption as WanPipeline cleans it: HTML entities resolved, runs of white space replaced by one space."""
    return re.sub(r"\s+", " ", html.unescape(html.unescape(caption))).strip()


def _prompt(captions: Sequence[Tensor], negative: Sequence[Tensor] | None) -> Prompt:
    """Embeddings [l, e] of captions, and of one negative caption for guidance."""
    n, rows = len(captions), _stacked([*captions, *(negative or ())])
    cond = {name: value[:n] for name, value in rows.items()}
    return Prompt(cond, {name: value[n:].expand_as(value[:n]) for name, value in rows.items()} if negative else None)


def _stacked(rows: Sequence[Tensor]) -> Rows:
    """Embeddings [l, e] of captions as arguments of a forward: padded, and a mask of the padding."""
    longest = max(map(len, rows))
    context = torch.stack([nn.functional.pad(row, (0, 0, 0, longest - len(row))) for row in rows])
    return {"context": context, "context_mask": torch.arange(longest) < torch.tensor([[len(row)] for row in rows])}
