"""The video task: clips, noise and the loss on them.

A task is what the trainer does not know about a run: its data, its model's inputs, its loss and what to show. Every
batch is a pure function of the step, and a rank asks only for the frames it holds. Letters: b samples, c channels,
t frames, h w height and width.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zoo
from zoo.data.digits import MovingDigits
from zoo.data.sampling import VideoDataset, batch_indices, hash_seed, order
from zoo.data.video_folder import VideoFolder
from zoo.training import UserError
from zoo.training import config as cfg
from zoo.training.ranks import on_first_rank
from zoo.video.diffusion import IDDPM, RectifiedFlow, ddim, euler, seeded_noise, seeded_uniform
from zoo.video.gif import save_gif
from zoo.video.linear_denoiser import linear_denoiser_loss

_VALIDATION, _SAMPLES = hash_seed("validation"), hash_seed("samples")
_FLOOR_CLIPS, _FLOOR_SIZE = 12_000, 4096


@dataclass
class Part:
    """This rank's part of a tensor that is divided along `dim`, where the whole has `length` rows."""

    local: Tensor
    dim: int
    length: int


Inputs = dict[str, Tensor | Part]


def share(length: int, rank: int, size: int) -> range:
    """The rows of `length` that rank `rank` of `size` holds: those of torch.chunk, for the last ranks maybe none."""
    step = ceil(length / size)
    return range(min(rank * step, length), min((rank + 1) * step, length))


def user_error(build: Callable[..., Any], *args: Any, prefix: str = "", alone: bool = False, **kwargs: Any) -> Any:
    """Build something that the configuration names; its ValueError, or a package that it lacks, is the user's."""
    try:
        return build(*args, **kwargs)
    except (ValueError, ImportError) as cause:
        error = UserError(f"{prefix}{cause}")
        error.alone = alone
        raise error from cause


class VideoTask:
    """What the trainer asks of a task. `rank` of `size` says which part of every sample the caller holds."""

    def __init__(self, config: cfg.Config, rank: int = 0, size: int = 1):
        self.config, data = config, config.data
        self.frames, self.height, self.width = data.frames, data.height, data.width
        self.shape = (data.channels, data.height, data.width)
        self.here = share(data.frames, rank, size)
        self.identity: dict[str, Any] = {"name": config.model.name}

    def open(self) -> None:
        """Find the data: on rank 0, so that all ranks agree on what there is."""
        flow, size = self.config.objective.name == "rectified_flow", prod(self.shape) * self.frames
        if self.config.eval.linear_floor and not (flow and size <= _FLOOR_SIZE):
            raise UserError(
                f"eval.linear_floor needs objective.name=rectified_flow and clips of at most {_FLOOR_SIZE} values"
            )
        data, seed = self.config.data, self.config.train.seed
        self.train, self.validation = on_first_rank(lambda: user_error(_datasets, data, seed, prefix="data: "))

    # ------------------------------------------------------------------------------------------------ model, objective

    def model(self) -> nn.Module:
        """The model on the default device. An error if its inputs are not what the data has."""
        options = self.config.model
        model = user_error(zoo.create, options.name, options.size, **options.overrides, prefix="model: ")
        inputs = _on_meta(model.example_inputs, 1, frames=1, height=self.height, width=self.width)
        channels, classes = self.config.data.channels, self.config.data.classes
        if inputs["x"].shape[1] != channels:
            raise UserError(
                f"the data has {channels} channels and the model takes {inputs['x'].shape[1]}: "
                f"set model.overrides.in_channels={channels}"
            )
        if unknown := sorted(inputs.keys() - {"x", "timestep", "label"}):
            raise UserError(f"model {options.name} needs {', '.join(unknown)}, which this data does not have")
        self.num_classes = getattr(model.config, "num_classes", None) if "label" in inputs else None
        if self.num_classes is not None and self.num_classes != classes:
            raise UserError(f"the data has {classes or 'no'} classes and the model {self.num_classes}")
        if self.config.sample.guidance != 1 and self.num_classes is None:
            raise UserError(f"sample.guidance={self.config.sample.guidance} needs a class-conditional model")
        patch = getattr(model.config, "patch", (1, 1, 1))
        self.tokens = prod(ceil(n / p) for n, p in zip((self.frames, self.height, self.width), patch))
        self.identity["config"] = {k: list(v) if isinstance(v, tuple) else v for k, v in vars(model.config).items()}
        return model

    def objective(self, model: nn.Module) -> nn.Module:
        return {"rectified_flow": RectifiedFlow, "iddpm": IDDPM}[self.config.objective.name](model)

    def example(self, objective: Any) -> dict[str, Tensor]:
        """The keyword arguments of the objective for one batch, on the default device."""
        b = self.config.train.batch
        shape = (b, self.shape[0], self.frames, *self.shape[1:])
        inputs = {"x": torch.empty(shape), "noise": torch.empty(shape), "timestep": torch.empty(b)}
        if self.config.objective.name == "iddpm":
            inputs["timestep"] = torch.empty(b, dtype=torch.long)
        if self.num_classes is not None:
            inputs["label"] = torch.empty(b, dtype=torch.long)
        return inputs

    # --------------------------------------------------------------------------------------------------------- batches

    def batch(self, objective: Any, step: int, micro: int, group: int, groups: int) -> Inputs:
        """The objective's arguments for one micro-batch of data-parallel group `group` of `groups`."""
        options, seed, n = self.config.train, self.config.train.seed, len(self.train)
        epochs, indices = batch_indices(seed, step, options.batch * options.accumulation * groups, n)
        first = (micro * groups + group) * options.batch
        chosen = list(zip(epochs, indices))[first : first + options.batch]
        ids = [epoch * n + index for epoch, index in chosen]
        clips = [self.train.clip(index, epoch, self.here) for epoch, index in chosen]
        inputs = self._inputs(clips, seeded_noise(seed, step, ids, self.here, self.shape))
        inputs["timestep"] = objective.sample_timestep(seeded_uniform(seed, step, ids))
        if self.num_classes is not None:
            drop = seeded_uniform(seed, step, ids, name="label") < self.config.objective.label_dropout
            inputs["label"] = inputs["label"].masked_fill(drop, self.num_classes)
        return inputs

    def validation_batches(self, objective: Any, group: int, groups: int) -> Iterator[tuple[int, int, Inputs]]:
        """Every validation batch of one group as (noise level, number of samples, arguments): always the same."""
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

    def _inputs(self, clips: Sequence[Any], noise: Tensor) -> dict[str, Any]:
        x = torch.stack([clip["x"] for clip in clips])
        inputs: dict[str, Any] = {"x": Part(x, 2, self.frames), "noise": Part(noise, 2, self.frames)}
        if self.num_classes is not None:
            inputs["label"] = torch.tensor([clip["label"] for clip in clips])
        return inputs

    # ------------------------------------------------------------------------------------------------- what is shown

    def sample(self, model: Callable[..., Tensor], device: torch.device, on_step: Callable[..., None]) -> Tensor:
        """Clips (b c t h w) in [-1, 1] from fixed noise, of class 0, 1, ... in turn."""
        options, made = self.config.sample, []
        sampler: Any = {"rectified_flow": euler, "iddpm": ddim}[self.config.objective.name]
        for start in range(0, options.clips, self.config.train.batch):
            ids = range(start, min(start + self.config.train.batch, options.clips))
            noise = seeded_noise(_SAMPLES, 0, ids, range(self.frames), self.shape, device=device)
            given: dict[str, Any] = {"guidance": options.guidance, "on_step": on_step}
            if self.num_classes is not None:
                given["label"] = torch.tensor([i % self.num_classes for i in ids], device=device)
                given["uncond"] = {"label": torch.full_like(given["label"], self.num_classes)}
            made.append(sampler(model, noise, options.steps, **given).cpu())
        return torch.cat(made)

    def show(self, samples: Tensor, path: Path) -> None:
        whole_rows = [n for n in range(2, 9) if len(samples) % n == 0]
        save_gif(path, samples, columns=max(whole_rows, default=None))

    def linear_floor(self, objective: Any) -> float:
        """The validation loss of the best linear denoiser, fitted to training clips: what a model has to beat."""
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
    if isinstance(data, cfg.Digits):
        options: dict[str, Any] = {"digit": data.digit, "speed": tuple(data.speed)}
        return (
            MovingDigits("train", frames=data.frames, size=size, seed=seed, **options),
            MovingDigits("validation", frames=data.frames, size=size, seed=0, **options),
        )
    options = {"stride": data.stride, "fps": data.fps, "verify": data.verify}
    folder = VideoFolder(data.path, frames=data.frames, height=data.height, width=data.width, seed=seed, **options)
    return folder.split(data.validation)


def _on_meta(build: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with torch.device("meta"):
        return build(*args, **kwargs)
