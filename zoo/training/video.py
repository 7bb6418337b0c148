"""The video task: clips, noise and the loss on them.

Every batch is a pure function of the step, and a rank asks only for the frames it holds. Letters: b samples,
c channels, t frames, h w height and width.
"""

# ruff: noqa: RUF009 (`option` makes a dataclasses.field)
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, prod
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from zoo.data import video_folder
from zoo.data.digits import LETTERS, MovingDigits, spell
from zoo.data.sampling import VideoDataset, hash_seed, order
from zoo.training import UserError
from zoo.training.config import option
from zoo.training.ranks import on_first_rank
from zoo.training.task import Floor, Inputs, Part, share, user_error
from zoo.training.video_samples import Clips, Pixels, Sampling
from zoo.video.diffusion import IDDPM, RectifiedFlow, seeded_noise, seeded_uniform
from zoo.video.linear_denoiser import linear_denoiser_loss

_VALIDATION = hash_seed("validation")
_FLOOR_CLIPS, _FLOOR_SIZE = 12_000, 4096
_FPS = 8.0  # where the data does not say
_CAPTIONED = {"context", "context_mask", "x_mask", "num_frames", "height", "width", "ar", "fps"}  # STDiT takes all


@dataclass
class Digits:
    channels: ClassVar[int] = 1
    classes: ClassVar[int | None] = 10
    caption_channels: ClassVar[int] = LETTERS
    fps: ClassVar[float] = 8
    name: str = option("digits", "moving handwritten digits, made from real digit images")
    frames: int = option(8, "frames a clip", least=1)
    height: int = option(16, "rows of pixels", least=1)
    width: int = option(16, "columns of pixels", least=1)
    digit: float = option(12.0, "side of the digit, in pixels")
    speed: list[float] = option([0.5, 1.5], "slowest and fastest motion, in pixels a frame", length=2)


@dataclass
class VideoFolder:
    channels: ClassVar[int] = 3
    classes: ClassVar[int | None] = None
    caption_channels: ClassVar[int] = 0
    name: str = option("video_folder", "mp4, webm and GIF files under one folder")
    path: str | None = option(None, "the folder; required")
    frames: int = option(16, "frames a clip", least=1)
    height: int = option(256, "rows of pixels", least=1)
    width: int = option(256, "columns of pixels", least=1)
    stride: int = option(1, "take every n-th frame of a video", least=1)
    fps: float | None = option(None, "or take frames at this rate; null for the video's own", least=0)
    validation: float = option(0.05, "share of the videos held out for validation", least=0, most=1)
    verify: bool = option(False, "decode every file once at the start, to find and skip damaged ones")


DATA: dict[str, type] = {"digits": Digits, "video_folder": VideoFolder}


@dataclass
class Objective:
    name: str = option("rectified_flow", "the loss", choices=("rectified_flow", "iddpm"))
    label_dropout: float = option(0.1, "share of samples trained without their class, for guidance", least=0, most=1)


@dataclass
class Eval:
    every: int = option(500, "steps between validations; 0 for none", least=0)
    clips: int = option(16, "validation samples, the same at every validation", least=1)
    levels: int = option(8, "fixed noise levels each is judged at", least=1)
    linear_floor: bool = option(
        False, "also fit the best linear denoiser to the data, for comparison (small clips only)"
    )


@dataclass
class Sample:
    every: int = option(0, "steps between sampled clips; 0 for none", least=0)
    clips: int = option(4, "clips sampled, from the same noise every time, each under a real one", least=1)
    steps: int = option(25, "sampling steps a clip", least=1, most=1000)
    guidance: float = option(1.0, "classifier-free guidance; 1 for none", least=0)


class Task(Sampling):
    """Diffusion on clips: `rank` of `size` holds a range of the frames of each."""

    def __init__(self, config: Any, rank: int = 0, size: int = 1):
        super().__init__(config, rank, size)
        data = config.data
        self.levels, self.validation_samples = config.eval.levels, config.eval.clips
        self.frames, self.height, self.width = data.frames, data.height, data.width
        self.shape = (data.channels, data.height, data.width)
        self.here = share(data.frames, rank, size)

    @property
    def channels(self) -> int:
        return self.config.data.channels

    def open(self) -> None:
        flow, size = self.config.objective.name == "rectified_flow", prod(self.shape) * self.frames
        if self.config.eval.linear_floor and not (flow and size <= _FLOOR_SIZE):
            raise UserError(
                f"eval.linear_floor needs objective.name=rectified_flow and clips of at most {_FLOOR_SIZE} values"
            )
        data, seed = self.config.data, self.config.train.seed
        self.train, self.validation = on_first_rank(lambda: user_error(_datasets, data, seed, prefix="data: "))

    # ------------------------------------------------------------------------------------------------ model, objective

    def model(self) -> nn.Module:
        model = self.create()
        inputs = _on_meta(model.example_inputs, 1, frames=1, height=self.height, width=self.width)
        data, self.takes = self.config.data, inputs.keys()
        channels, classes = data.channels, data.classes
        if inputs["x"].shape[1] != channels:
            raise UserError(
                f"the data has {channels} channels and the model takes {inputs['x'].shape[1]}: "
                f"set model.overrides.in_channels={channels}"
            )
        known = {"x", "timestep", "label"} | (_CAPTIONED if data.caption_channels else set())
        if unknown := sorted(inputs.keys() - known):
            raise UserError(f"model {self.config.model.name} needs {', '.join(unknown)}, which this data does not have")
        if "context" in inputs and inputs["context"].shape[-1] != data.caption_channels:
            raise UserError(
                f"the data's captions have {data.caption_channels} channels and the model takes "
                f"{inputs['context'].shape[-1]}: set model.overrides.caption_channels={data.caption_channels}"
            )
        self.num_classes = getattr(model.config, "num_classes", None) if "label" in inputs else None
        if self.num_classes is not None and self.num_classes != classes:
            raise UserError(f"the data has {classes or 'no'} classes and the model {self.num_classes}")
        if "context" in inputs:
            self.num_classes = classes
        if self.config.sample.guidance != 1 and self.num_classes is None:
            raise UserError(f"sample.guidance={self.config.sample.guidance} needs a model that is told the class")
        self.patch = getattr(model.config, "patch", (1, 1, 1))
        self.tokens = self._tokens((self.frames, self.height, self.width))
        return model

    def _tokens(self, clip: tuple[int, int, int]) -> int:
        return prod(ceil(n / p) for n, p in zip(clip, self.patch))

    def objective(self, model: nn.Module) -> nn.Module:
        return {"rectified_flow": RectifiedFlow, "iddpm": IDDPM}[self.config.objective.name](model)

    def example(self, objective: Any) -> dict[str, Tensor]:
        b = self.config.train.batch
        shape = (b, self.shape[0], self.frames, *self.shape[1:])
        inputs = {"x": torch.empty(shape), "noise": torch.empty(shape), "timestep": torch.empty(b)}
        if self.config.objective.name == "iddpm":
            inputs["timestep"] = torch.empty(b, dtype=torch.long)
        return inputs | self._told(torch.zeros(b, dtype=torch.long), self.frames, self.height, self.width)

    # --------------------------------------------------------------------------------------------------------- batches

    def batch(self, objective: Any, step: int, micro: int, group: int, groups: int) -> Inputs:
        seed, n = self.config.train.seed, len(self.train)
        chosen = self.drawn(step, micro, group, groups, n)
        ids = [epoch * n + index for epoch, index in chosen]
        clips = [self.train.clip(index, epoch, self.here) for epoch, index in chosen]
        drop = seeded_uniform(seed, step, ids, name="label") < self.config.objective.label_dropout
        inputs = self._inputs(clips, seeded_noise(seed, step, ids, self.here, self.shape), drop)
        return inputs | {"timestep": objective.sample_timestep(seeded_uniform(seed, step, ids))}

    def validation_batches(self, objective: Any, group: int, groups: int) -> Iterator[tuple[int, int, Inputs]]:
        levels = objective.validation_levels(self.config.eval.levels)
        chosen = self._validation_clips()[group::groups]
        for start in range(0, len(chosen), self.config.train.batch):
            batch = chosen[start : start + self.config.train.batch]
            ids = [epoch * len(self.validation) + index for index, epoch in batch]
            clips = [self.validation.clip(index, epoch, self.here) for index, epoch in batch]
            for i in range(len(levels)):
                inputs = self._inputs(clips, seeded_noise(_VALIDATION, i, ids, self.here, self.shape))
                yield i, len(ids), inputs | {"timestep": levels[i].repeat(len(ids))}

    def _validation_clips(self) -> list[tuple[int, int]]:
        """The (index, epoch) of every validation clip; if there are too few samples, several clips of each."""
        n = len(self.validation)
        places = order(0, 0, n).tolist()
        return [(places[i % n], i // n) for i in range(self.config.eval.clips)]

    def _inputs(self, clips: Sequence[Any], noise: Tensor, drop: Tensor | None = None) -> dict[str, Any]:
        x = torch.stack([clip["x"] for clip in clips])
        labels = torch.tensor([clip["label"] or 0 for clip in clips])
        if drop is not None and self.num_classes is not None:
            labels = labels.masked_fill(drop, self.num_classes)
        told = self._told(labels, self.frames, self.height, self.width)
        return {"x": Part(x, 2, self.frames), "noise": Part(noise, 2, self.frames), **told}

    def _told(self, labels: Tensor, frames: int, height: int, width: int) -> dict[str, Tensor]:
        """What the model takes beside clips of one shape and of these classes (b), `num_classes` for none."""
        told = {"label": labels}
        if "context" in self.takes:
            told["context"], told["context_mask"] = spell(labels)
            sizes = {"num_frames": frames, "height": height, "width": width, "ar": height / width}
            for name, size in (sizes | {"fps": self.config.data.fps}).items():
                told[name] = torch.full((len(labels),), float(size), device=labels.device)
        return {name: value for name, value in told.items() if name in self.takes}

    # ------------------------------------------------------------------------------------------------- what is shown

    def codec(self, path: Path | None, device: torch.device) -> Pixels:
        return Pixels(self.channels)

    def asked(self, options: Namespace, codec: Any, device: torch.device) -> tuple[Clips, float]:
        for name in ("prompt", "negative_prompt"):
            if getattr(options, name) is not None:
                raise ValueError(
                    f"--{name.replace('_', '-')}: the data of this run ({self.config.data.name}) has no captions"
                    + ("; --label names classes" if self.num_classes is not None else "")
                )
        labels, classes = getattr(options, "label", None), self.num_classes
        if labels and not all(0 <= label < (classes or 0) for label in labels):
            known = "the model knows no classes" if classes is None else f"the classes are 0 to {classes - 1}"
            raise ValueError(f"--label {' '.join(map(str, labels))}: {known}")
        if options.guidance != 1 and classes is None:
            raise ValueError(f"--guidance {options.guidance:g}: the model is told no class, so it takes no guidance")
        fps = getattr(options, "fps", self.config.data.fps or _FPS)
        count, size = len(labels or range(options.clips)), (self.frames, self.height, self.width)
        size = tuple(getattr(options, name, n) for name, n in zip(("frames", "height", "width"), size))
        return self._clips(labels or [i % (classes or 1) for i in range(count)], size, fps), fps

    def real(self, count: int) -> tuple[Clips, Tensor, float]:
        places = order(0, 0, len(self.validation)).tolist()
        chosen = [(places[i % len(places)], i // len(places)) for i in range(count)]
        if classes := self.num_classes:  # one of each in turn
            of = {i: self.validation.clip(i, 0, range(0))["label"] for i in places}
            turns = {label: [i for i in places if of[i] == label] for label in range(classes)}
            rounds = [(i % classes, i // classes) for i in range(count)]
            chosen = [(turns[label][n % len(turns[label])], n // len(turns[label])) for label, n in rounds]
        clips = [self.validation.clip(index, epoch) for index, epoch in chosen]
        fps = self.config.data.fps or _FPS
        told = self._clips([clip["label"] or 0 for clip in clips], (self.frames, self.height, self.width), fps)
        return told, torch.stack([clip["x"] for clip in clips]), fps

    def _clips(self, labels: Sequence[int], size: tuple[int, int, int], fps: float) -> Clips:
        """Clips of these classes, which are not used where the model is told none."""
        told, none, classes = torch.tensor(labels), None, self.num_classes
        if classes is not None:
            none = self._told(torch.full_like(told, classes), *size) | self._rate(len(labels), fps)
        titles = ["" if classes is None else str(label) for label in labels]
        return Clips(size, {} if none is None else self._told(told, *size) | self._rate(len(labels), fps), none, titles)

    def _rate(self, count: int, fps: float) -> dict[str, Tensor]:
        return {"fps": torch.full((count,), float(fps))} if "fps" in self.takes else {}

    def describe(self) -> str:
        return f"{self.frames} frames of {self.height} x {self.width}"

    def floors(self, objective: Any) -> list[Floor]:
        if not self.config.eval.linear_floor:
            return []
        return [Floor("linear_floor", "best linear denoiser on the same data", self.linear_floor(objective))]

    def linear_floor(self, objective: Any) -> float:
        """The validation loss of the best linear denoiser, fitted to training clips."""
        fit = [(i % len(self.train), i // len(self.train)) for i in range(_FLOOR_CLIPS)]
        train = [self.train.clip(index, epoch) for index, epoch in fit]
        validation = [self.validation.clip(index, epoch) for index, epoch in self._validation_clips()]
        x, y = (torch.stack([clip["x"] for clip in clips]) for clips in (train, validation))
        levels = objective.validation_levels(self.config.eval.levels)
        if self.num_classes is None:
            return linear_denoiser_loss(x, y, levels).mean().item()
        labels = (torch.tensor([clip["label"] for clip in clips]) for clips in (train, validation))
        return linear_denoiser_loss(x, y, levels, *labels).mean().item()


def _datasets(data: Any, seed: int) -> tuple[VideoDataset, VideoDataset]:
    """The training and the validation set that `data` describes."""
    size = (data.height, data.width)
    if isinstance(data, Digits):
        options: dict[str, Any] = {"digit": data.digit, "speed": tuple(data.speed)}
        return (
            MovingDigits("train", frames=data.frames, size=size, seed=seed, **options),
            MovingDigits("validation", frames=data.frames, size=size, seed=0, **options),
        )
    options = {"frames": data.frames, "stride": data.stride, "fps": data.fps, "verify": data.verify}
    folder = video_folder.VideoFolder(data.path, height=data.height, width=data.width, seed=seed, **options)
    return folder.split(data.validation)


def _on_meta(build: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with torch.device("meta"):
        return build(*args, **kwargs)
