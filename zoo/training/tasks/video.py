"""The video task: clips, noise and the loss on them.

Every batch is a pure function of the step, and a rank asks only for the frames it holds. Letters: b samples,
c channels, t frames, h w height and width.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor, nn

from zoo.contract import SIZES, Conditions, first_of, sizes_of
from zoo.data.digits import spell
from zoo.data.sampling import VideoDataset, hash_seed, order
from zoo.training import UserError, complete, task, user_error
from zoo.training.ranks import on_first_rank
from zoo.training.task import Inputs
from zoo.training.tasks.conditions import refuse_lacking, refuse_short_table
from zoo.training.tasks.video_options import DATA, PREDICTIONS, Data, Eval, Objective, Sample
from zoo.video.clean_frames import noised_frames
from zoo.video.diffusion import IDDPM, RectifiedFlow
from zoo.video.noise import seeded_noise, seeded_uniform, shift_at
from zoo.video.sampling import ddim, euler

__all__ = ["DATA", "Data", "Eval", "Objective", "Sample", "Task"]

_VALIDATION = hash_seed("validation")


class Task(task.Task):
    """Diffusion on clips: a rank holds a range of the frames of each."""

    sharded_inputs = {"x": 2, "noise": 2, "x_mask": 1, "start": 2}

    def __init__(self, config: Any, *devices: Any):
        super().__init__(config, *devices)
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
                inputs = model.example_inputs(1, frames=1, height=height, width=width)
                refuse_short_table(self.config, model, inputs, wants.classes)
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
        settings: dict[str, Any] = {"loc": options.loc, "scale": options.scale, "uniform": options.levels == "uniform"}
        settings |= {"shift": options.shift, "shift_cells": options.shift_cells, "clean": options.predicts == "clean"}
        return RectifiedFlow(model, **settings, within=(options.range[0], options.range[1]))

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
