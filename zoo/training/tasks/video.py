"""The video task: clips, noise and the loss on them.

Every batch is a pure function of the step, and a rank asks only for the frames it holds. Letters: b samples,
c channels, t frames, h w height and width.
"""

# ruff: noqa: RUF009 (`option` makes a dataclasses.field)
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import ceil, prod
from typing import Annotated, Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zoo.contract import SIZES, Conditions, first_of, sizes_of
from zoo.data import video_folder
from zoo.data.digits import LETTERS, MovingDigits, spell
from zoo.data.mix import MixedClips, shares_of
from zoo.data.sampling import VideoDataset, hash_seed, order
from zoo.data.shapes import NAMES, MovingShapes
from zoo.training import UserError, complete, task, user_error
from zoo.training.ranks import on_first_rank
from zoo.training.sections import option
from zoo.training.task import Inputs
from zoo.video.clean_frames import noised_frames
from zoo.video.diffusion import IDDPM, RectifiedFlow
from zoo.video.noise import seeded_noise, seeded_uniform, shift_at
from zoo.video.sampling import ddim, euler

_VALIDATION = hash_seed("validation")


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

    def datasets(self, seed: int) -> tuple[VideoDataset, VideoDataset]:
        size, speed = (self.height, self.width), (self.speed[0], self.speed[1])
        drawn: dict[str, Any] = {"frames": self.frames, "size": size, "digit": self.digit, "speed": speed}
        return MovingDigits("train", seed=seed, **drawn), MovingDigits("validation", seed=0, **drawn)


@dataclass
class Shapes:
    channels: ClassVar[int] = 3
    classes: ClassVar[int | None] = MovingShapes.num_classes
    names: ClassVar[tuple[str, ...]] = NAMES
    caption_channels: ClassVar[int] = 0
    fps: ClassVar[float] = 8
    name: str = option("shapes", "moving shapes in colour, drawn by formula; a class for each shape and colour")
    clips: int = option(4096, "clips in an epoch", least=1)
    frames: int = option(8, "frames a clip", least=1)
    height: int = option(64, "rows of pixels", least=1)
    width: int = option(64, "columns of pixels", least=1)
    radius: list[float] = option([10.0, 15.0], "smallest and largest shape, in pixels", length=2)
    speed: list[float] = option([1.0, 4.0], "slowest and fastest motion, in pixels a frame", length=2)
    tilt: float = option(1.0, "how far shapes are turned, and spin: 1 any way, 0 upright", least=0, most=1)

    def datasets(self, seed: int) -> tuple[VideoDataset, VideoDataset]:
        ranges = {"radius": (self.radius[0], self.radius[1]), "speed": (self.speed[0], self.speed[1])}
        size = (self.height, self.width)
        drawn: dict[str, Any] = {"frames": self.frames, "size": size, "tilt": self.tilt, **ranges}
        train = MovingShapes("train", count=self.clips, seed=seed, **drawn)
        return train, MovingShapes("validation", count=min(512, self.clips), **drawn)


@dataclass
class VideoFolder:
    channels: ClassVar[int] = 3
    classes: ClassVar[int | None] = None
    caption_channels: ClassVar[int] = 0
    name: str = option("video_folder", "mp4, webm and GIF files under one folder")
    path: str | None = option(None, "the folder; required, or mix", file=True)
    mix: dict[str, float] = option(
        {}, "several folders with their shares of the samples, in place of path: {mine: 0.7, others: 0.3}", file=True
    )
    frames: int = option(16, "frames a clip", least=1)
    height: int = option(256, "rows of pixels", least=1)
    width: int = option(256, "columns of pixels", least=1)
    stride: int = option(1, "take every n-th frame of a video", least=1)
    fps: float | None = option(None, "or take frames at this rate; null: the video's own", least=0)
    validation: float = option(0.05, "share of the videos held out for validation", least=0, most=1)
    verify: bool = option(False, "decode every file once at the start, to find and skip damaged ones")

    def datasets(self, seed: int) -> tuple[VideoDataset, VideoDataset]:
        how: dict[str, Any] = {"frames": self.frames, "stride": self.stride, "fps": self.fps, "verify": self.verify}
        how |= {"height": self.height, "width": self.width, "seed": seed}
        shares = shares_of(self.path, self.mix)
        parts = [video_folder.VideoFolder(path, **how).split(self.validation) for path in shares]
        if len(parts) == 1:
            return parts[0]
        train, held_out = zip(*parts)
        return MixedClips(train, list(shares.values())), MixedClips(held_out)


class Data(task.Data, Protocol):
    """A section of the configuration that names a data set of clips."""

    frames: Annotated[int, "frames a clip, an option"]
    height: Annotated[int, "rows of pixels, an option"]
    width: Annotated[int, "columns of pixels, an option"]
    fps: Annotated[float | int | None, "frames a second, of the clips as they are shown; None where that is not known"]
    channels: Annotated[int, "channels of a pixel"]
    classes: Annotated[int | None, "how many classes there are; None for none"]
    caption_channels: Annotated[int, "channels of a caption's embedding; 0 for none"]

    def datasets(self, seed: int) -> tuple[VideoDataset, VideoDataset]:
        """A method (seed) that returns the data set to train on and the one to validate with."""


DATA: dict[str, type] = {"digits": Digits, "shapes": Shapes, "video_folder": VideoFolder}


PREDICTIONS = {"rectified_flow": ("velocity", "clean"), "iddpm": ("noise", "velocity")}  # the default first


@dataclass
class Objective:
    name: str = option("rectified_flow", "loss", choices=("rectified_flow", "iddpm"))
    levels: str = option(
        "logit_normal", "rectified_flow: distribution of noise levels", choices=("logit_normal", "uniform")
    )
    loc: float = option(0.0, "logit_normal: mean of a level's logit; above 0 means more noise")
    scale: float = option(1.0, "logit_normal: standard deviation of a level's logit", least=0)
    shift: float = option(
        1.0,
        "rectified_flow: shift s of levels, u to s u / (1 + (s - 1) u), in sampling too (SD3 3, Wan 3 to 5)",
        least=0,
    )
    shift_cells: int | None = option(
        None,
        "number of cells, t h w, for which shift holds; others scale by the root (Open-Sora 1.2: 4096); null: for all",
        least=1,
    )
    range: list[float] = option(
        [0.0, 1.0],
        "rectified_flow: least and greatest noise level, in training (Wan 2.2's experts: [0.875, 1] and [0, 0.875])",
        length=2,
    )
    prediction: str | None = option(
        None,
        "the model's output. rectified_flow: velocity, or clean, the clip itself, for large patches of pixels; iddpm: "
        "noise or velocity; null: the first of these",
        choices=("velocity", "clean", "noise"),
    )
    min_snr: float | None = option(None, "iddpm: min-SNR weight of errors (published: 5); null: no weights", least=0)
    label_dropout: float = option(
        0.1, "share of samples trained without class or caption, for guidance", least=0, most=1
    )
    guidance: float = option(1.0, "strength of guidance that a model takes as an input (hunyuan)", least=0)
    first_frame: float = option(
        0.0, "share of samples with a clean first frame (stdit 2, 3; wan ti2v)", least=0, most=1
    )
    random_frames: float = option(
        0.0, "share of samples with clean frames at random, all but one at most", least=0, most=1
    )

    @property
    def predicts(self) -> str:
        """The model's output: `prediction`, or the default of this objective."""
        return self.prediction or PREDICTIONS[self.name][0]


@dataclass
class Judged:
    every: int = option(500, "steps between validations; 0 for none", least=0)
    clips: int = option(16, "validation samples, the same at every validation", least=1)
    levels: int = option(8, "fixed noise levels at which each sample is scored", least=1)


@dataclass
class Eval(Judged):
    linear_baseline: bool = option(False, "also report the best linear denoiser as a baseline (small clips only)")


@dataclass
class Sample:
    every: int = option(0, "steps between sampled clips; 0 for none", least=0)
    clips: int = option(4, "clips to sample, always from the same noise, each shown under a real one", least=1)
    steps: int = option(25, "sampling steps a clip", least=1, most=1000)
    guidance: float = option(1.0, "classifier-free guidance; 1 for none", least=0)
    metrics: bool = option(
        False, "compare samples with real clips: statistics, and classes by a linear classifier of pixels"
    )
    features: str | None = option(
        None, "with metrics: folder of a published VideoMAE, for its Fréchet distance", file=True
    )


class Lookups(TorchFunctionMode):
    """Records the tables in which a forward looks labels up, by their number of rows."""

    def __init__(self, label: Tensor) -> None:
        super().__init__()
        self.labels, self.rows = [label], list[int]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if any(x is label for x in args for label in self.labels):
            table = args[func is F.embedding] if func in (F.embedding, Tensor.__getitem__) else None
            if table is not None and all(table is not label for label in self.labels):
                self.rows.append(table.shape[0])
            elif isinstance(out, Tensor) and out.dtype == self.labels[0].dtype:  # a view or a copy of the labels
                self.labels.append(out)
        return out


class Task(task.Task):
    """Diffusion on clips: a rank holds a range of the frames of each."""

    sharded_inputs = {"x": 2, "noise": 2, "x_mask": 1, "start": 2}

    def __init__(self, config: Any, *where: Any):
        super().__init__(config, *where)
        self.levels, self.validation_samples = config.eval.levels, config.eval.clips

    @property
    def clip(self) -> tuple[int, int, int]:
        """Frames, height and width of a clip; of the largest, if they differ."""
        return self.config.data.frames, self.config.data.height, self.config.data.width

    @property
    def masked(self) -> bool:
        """Tell whether samples are trained with clean frames among the noised ones."""
        return self.config.objective.first_frame + self.config.objective.random_frames > 0

    @property
    def channels(self) -> int:
        return self.config.data.channels

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of a frame."""
        return self.channels, *self.clip[1:]

    def open(self) -> None:
        data, seed = self.config.data, self.config.train.seed
        sets = on_first_rank(lambda: user_error(data.datasets, seed, prefix="data: "))
        if not (isinstance(sets, tuple) and len(sets) == 2):
            raise UserError(
                f"datasets() of data.name={data.name} returned {type(sets).__name__}: expected two data sets, to train "
                "on and to validate with, as in `return Clips(...), Clips(...)`"
            )
        self.train, self.validation = sets
        for dataset in (self.train, self.validation):
            complete(dataset, VideoDataset, f"{type(dataset).__name__}, a data set of data.name={data.name}")

    # ------------------------------------------------------------------------------------------------ model, objective

    def model(self) -> nn.Module:
        model = self.create()
        _, height, width = self.clip
        self.conditions = wants = Conditions.of(model, frames=1, height=height, width=width)
        self.takes = wants.wanted
        has = self.offers(wants)
        refuse_lacking(self.config.model.name, wants, has)
        self.num_classes = wants.classes
        if wants.classes is not None and wants.classes != has.classes:
            raise UserError(f"the data has {has.classes or 'no'} classes and the model {wants.classes}")
        if wants.text:
            self.num_classes = has.classes
        if self.config.sample.guidance != 1 and self.num_classes is None and not (wants.text or wants.guidance):
            raise UserError(
                f"sample.guidance={self.config.sample.guidance} needs a model that is told the class or a caption"
            )
        if wants.classes is not None:
            with torch.device("meta"):
                self.refuse_short_table(model, model.example_inputs(1, frames=1, height=height, width=width))
        self.refuse_unused()
        low, high = self.config.objective.range
        if not 0 <= low < high <= 1:
            raise UserError(f"objective.range={[low, high]}: two numbers from 0 to 1, the smaller one first")
        if (low, high) != (0, 1) and self.config.sample.every:
            raise UserError(
                f"sample.every={self.config.sample.every}: a model of noise levels {low} to {high} alone draws "
                "nothing; set it to 0, and sample with the pipeline that has both models"
            )
        first, some = self.config.objective.first_frame, self.config.objective.random_frames
        shares = f"objective.first_frame={first} and objective.random_frames={some}"
        if first + some > 1:
            raise UserError(f"{shares}: together at most 1")
        if self.masked and not wants.clean:
            raise UserError(
                f"{shares} need a model that accepts given, noise-free frames (stdit with version v2 or v3, wan with "
                "frame_times): use one, or set both options to 0"
            )
        self.patch = getattr(model.config, "patch", (1, 1, 1))
        self.tokens = self.tokens_of(self.clip)
        return model

    def refuse_short_table(self, model: nn.Module, inputs: Mapping[str, Tensor]) -> None:
        """Raise UserError if the model looks labels up in too short a table. On meta tensors a lookup never raises."""
        if any(p.device.type != "meta" for p in model.parameters()):
            return
        objective, sample = self.config.objective, self.config.sample
        none = objective.label_dropout > 0 or sample.guidance != 1  # whether `num_classes`, for no class, is a label
        with torch.no_grad(), Lookups(inputs["label"]) as lookups, suppress(Exception):
            model(**inputs)  # a forward that fails without data is planned, and refused, by a real run
        if lookups.rows and min(lookups.rows) < self.num_classes + none:
            last = (
                f"; label {self.num_classes} stands for no class (objective.label_dropout={objective.label_dropout:g}, "
                f"sample.guidance={sample.guidance:g})"
            )
            raise UserError(
                f"model {self.config.model.name} looks labels up in a table of {min(lookups.rows)} rows: expected "
                f"{self.num_classes + none}, for labels 0 to {self.num_classes + none - 1}{last if none else ''}"
            )

    def refuse_unused(self) -> None:
        """Raise UserError for an option, or a prediction, that only the other objective has."""
        options, known = self.config.objective, Objective()
        of = {"rectified_flow": ("levels", "loc", "scale", "shift", "shift_cells", "range"), "iddpm": ("min_snr",)}
        for name, keys in of.items():
            other = [key for key in keys if getattr(options, key) != getattr(known, key)]
            if other and name != options.name:
                raise UserError(f"objective.{other[0]} is an option of objective.name={name}, not of {options.name}")
        if options.predicts not in (able := PREDICTIONS[options.name]):
            raise UserError(
                f"objective.prediction={options.predicts}: a model of objective.name={options.name} predicts "
                f"{' or '.join(able)}; set one of them"
            )

    def offers(self, wants: Conditions) -> Conditions:
        """The conditions that the data has, for a model with these."""
        data = self.config.data
        captioned = {"text": data.caption_channels, "sizes": SIZES} if data.caption_channels else {}
        return Conditions(data.channels, data.classes, **captioned, start=wants.start)

    def tokens_of(self, clip: tuple[int, int, int]) -> int:
        """The tokens of a clip (t h w)."""
        return prod(ceil(n / p) for n, p in zip(clip, self.patch))

    def objective(self, model: nn.Module) -> nn.Module:
        options = self.config.objective
        if options.name == "iddpm":
            return IDDPM(model, velocity=options.predicts == "velocity", min_snr=options.min_snr)
        how: dict[str, Any] = {"loc": options.loc, "scale": options.scale, "uniform": options.levels == "uniform"}
        how |= {"shift": options.shift, "shift_cells": options.shift_cells, "clean": options.predicts == "clean"}
        return RectifiedFlow(model, **how, within=(options.range[0], options.range[1]))

    def sampler(self, clip: tuple[int, int, int]) -> Callable[..., Tensor]:
        """The sampler of clips of this size, at the levels of training: `euler` or `ddim`."""
        options = self.config.objective
        if options.name == "iddpm":
            return partial(ddim, velocity=options.predicts == "velocity")
        shift = shift_at(options.shift, options.shift_cells, prod(clip))
        return partial(euler, shift=shift, predicts_clean=options.predicts == "clean")

    def example(self, objective: Any, bucket: int = 0) -> dict[str, Tensor]:
        b = self.config.train.batch
        return self._example(b, self.clip) | self.conditions_of(torch.zeros(b, dtype=torch.long), self.clip)

    def _example(self, batch: int, clip: tuple[int, int, int]) -> dict[str, Tensor]:
        """The objective's arguments for `batch` clips, without the model's conditions."""
        shape = (batch, self.channels, *clip)
        inputs = {"x": torch.empty(shape), "noise": torch.empty(shape), "timestep": torch.empty(batch)}
        if self.config.objective.name == "iddpm":
            inputs["timestep"] = torch.empty(batch, dtype=torch.long)
        if self.masked:
            inputs |= {"x_mask": torch.ones(batch, clip[0], dtype=torch.bool), "weight": torch.ones(batch)}
        if "start" in self.takes:
            inputs["start"] = torch.empty(batch, self.conditions.start, *clip)
        return inputs

    # --------------------------------------------------------------------------------------------------------- batches

    def batch(self, objective: Any, step: int, micro: int, group: int, groups: int) -> Inputs:
        n, local = len(self.train), self.local_range(self.clip[0])
        chosen = self.sample_indices(step, micro, group, groups, n)
        ids = [epoch * n + index for epoch, index in chosen]
        clips = [self.train.clip(index, epoch, local) for epoch, index in chosen]
        return self._inputs(clips, self._dropped(step, ids)) | self._random(objective, step, ids, self.clip)

    def _dropped(self, step: int, ids: Sequence[int]) -> Tensor:
        """A mask [b] of the samples that are trained without their class or caption."""
        seed, share_dropped = self.config.train.seed, self.config.objective.label_dropout
        return seeded_uniform(seed, step, ids, name="label") < share_dropped

    def _random(self, objective: Any, step: int, ids: Sequence[int], clip: tuple[int, int, int]) -> Inputs:
        """The random inputs of training samples of one shape: noise, its level, and the mask of noised frames."""
        (frames, *size), options = clip, self.config.objective
        seed, local = self.config.train.seed, self.local_range(frames)
        noise = seeded_noise(seed, step, ids, local, (self.channels, size[0], size[1]))
        inputs: Inputs = {
            "noise": self.local_shard("noise", noise, frames),
            "timestep": objective.sample_timestep(seeded_uniform(seed, step, ids), prod(clip)),
        }
        if self.masked:
            mask = noised_frames(seed, step, ids, frames, first=options.first_frame, some=options.random_frames)
            inputs["x_mask"] = self.local_shard("x_mask", mask[:, local.start : local.stop], frames)
            inputs["weight"] = frames / mask.sum(1)  # all samples count the same, however few frames are judged
        return inputs

    def validation_batches(self, objective: Any, group: int, groups: int) -> Iterator[tuple[int, int, Inputs]]:
        levels = objective.validation_levels(self.config.eval.levels, prod(self.clip))
        local = self.local_range(self.clip[0])
        chosen = self.judged_clips()[group::groups]
        for start in range(0, len(chosen), self.config.train.batch):
            batch = chosen[start : start + self.config.train.batch]
            ids = [epoch * len(self.validation) + index for index, epoch in batch]
            inputs = self._inputs([self.validation.clip(index, epoch, local) for index, epoch in batch])
            yield from self._judged(inputs, levels, ids, self.clip)

    def _judged(
        self, inputs: Inputs, levels: Tensor, ids: Sequence[int], clip: tuple[int, int, int], count: int | None = None
    ) -> Iterator[tuple[int, int, Inputs]]:
        """Yield the samples at every level, with other noise at each; `count` of them enter the mean (None: all)."""
        (frames, *size), local = clip, self.local_range(clip[0])
        for i in range(len(levels)):
            noise = seeded_noise(_VALIDATION, i, ids, local, (self.channels, size[0], size[1]))
            noised: Inputs = {"noise": self.local_shard("noise", noise, frames), "timestep": levels[i].repeat(len(ids))}
            yield i, len(ids) if count is None else count, inputs | noised

    def judged_clips(self) -> list[tuple[int, int]]:
        """The (index, epoch) of every validation clip; if there are too few samples, several clips of each."""
        n = len(self.validation)
        places = order(0, 0, n).tolist()
        return [(places[i % n], i // n) for i in range(self.config.eval.clips)]

    def _inputs(self, clips: Sequence[Any], drop: Tensor | None = None) -> Inputs:
        x = torch.stack([clip["x"] for clip in clips])
        labels = torch.tensor([clip["label"] or 0 for clip in clips])
        if drop is not None and self.num_classes is not None:
            labels = labels.masked_fill(drop, self.num_classes)
        conditions, frames = self.conditions_of(labels, self.clip), self.clip[0]
        if "start" in self.takes:
            conditions["start"] = self.local_shard("start", self.starts(x, self.local_range(frames)), frames)
        return {"x": self.local_shard("x", x, frames), **conditions}

    def starts(self, x: Tensor, frames: range) -> Tensor:
        """The channels after those of clips of pixels x (b c t h w), which have these frames."""
        return torch.stack([self.conditions.start_of(clip * first_of(frames), frames) for clip in x])

    def conditions_of(self, labels: Tensor, clip: tuple[int, int, int], fps: float | None = None) -> dict[str, Tensor]:
        """The conditions of clips of one shape and of these classes (b), `num_classes` for none."""
        conditions = {"label": labels, "strength": torch.full((len(labels),), 1000.0 * self.config.objective.guidance)}
        if "context" in self.takes:
            conditions["context"], conditions["context_mask"] = spell(labels)
        names = [name for name in SIZES if name in self.takes]
        for name, size in sizes_of(names, *clip, fps or self.config.data.fps or 1.0).items():
            conditions[name] = torch.full((len(labels),), size, device=labels.device)
        return {name: value for name, value in conditions.items() if name in self.takes}

    def describe(self) -> str:
        return "{} frames of {} x {}".format(*self.clip)

    def hints(self, model: nn.Module) -> list[str]:
        numbers, channels = prod(self.patch) * self.channels, getattr(model.config, "hidden", None)
        options = self.config.objective
        if options.name != "rectified_flow" or options.predicts != "velocity" or not channels or numbers <= channels:
            return []
        return [
            f"a patch has {numbers} numbers and the model {channels} channels, which cannot carry all noise of a "
            "patch: objective.prediction=clean learns such clips"
        ]


def refuse_lacking(name: str, wants: Conditions, has: Conditions) -> None:
    """Raise a UserError if a model wants what the data does not have, with what to change."""
    if wants.unknown:
        raise UserError(f"model {name} needs {', '.join(wants.unknown)}, which this data does not have")
    if wants.channels != has.channels:
        c, mask = has.channels, wants.start - wants.channels  # an image's latent has the channels of the clip
        fix = f"in_channels={c}"
        if wants.start:
            fix = f"in_channels={2 * c + mask} and model.overrides.condition_channels={c + mask}"
        raise UserError(f"the data has {c} channels and the model takes {wants.channels}: set model.overrides.{fix}")
    if wants.start and not (has.start and wants.first and wants.start > has.channels):
        raise UserError(
            f"model {name} begins clips with an image: {wants.start} of its channels are a mask and the "
            "image's latent, which this data does not have. Encode the clips with --image FOLDER, the folder of the "
            "model's pipeline"
        )
    lacking = [key for key in ("pooled", "image") if getattr(wants, key) and not getattr(has, key)]
    lacking += [key for key in wants.sizes if key not in has.sizes]
    lacking += sorted(wants.names & {"context", "context_mask"}) if wants.text and not has.text else []
    if lacking:
        raise UserError(
            f"model {name} needs {', '.join(sorted(lacking))}, which this data does not have"
            + (". zoo.video.encode writes it, with --text or --image of the model's pipeline" if has.text else "")
        )
    for key, what, option_name in (
        ("text", "captions have", "caption_channels"),
        ("pooled", "pooled captions have", "pooled_channels"),
        ("image", "first frames have tokens of", "image_channels"),
    ):
        if getattr(wants, key) and getattr(wants, key) != getattr(has, key):
            raise UserError(
                f"the data's {what} {getattr(has, key)} channels and the model takes {getattr(wants, key)}: "
                f"set model.overrides.{option_name}={getattr(has, key)}"
            )
