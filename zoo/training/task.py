"""What the trainer does not know about a run: its data, its model's inputs, its loss and what to show.

A task lives in a module of its own, with the sections of the configuration that only it has:

    DATA                     data.name -> dataclass, the data sets it can train on
    Objective, Eval, Sample  dataclasses; the last two have `every`, in steps
    Task                     a subclass of the Task below

`zoo.training.config.TASKS` says which module a data set belongs to.
"""

from abc import ABC, abstractmethod
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zoo
from zoo.data.sampling import batch_indices
from zoo.training import user_error


@dataclass
class Part:
    """This rank's part of a tensor that is divided along `dim`, where the whole has `length` rows."""

    local: Tensor
    dim: int
    length: int


Inputs = dict[str, Tensor | Part | int]  # a number is the same on all ranks


@dataclass
class Floor:
    """What a model has to beat: the validation loss of something that needs no training, or hardly any."""

    key: str  # in the records
    name: str  # for the reader
    loss: float


class Task(ABC):
    """One run's data, model and loss. `rank` of `size` says which part of every sample the caller holds."""

    identity: dict[str, Any]  # what a checkpoint has to agree with
    tokens: int  # of one sample, for the throughput; known once the model is made
    validation_samples: int  # of all data-parallel groups together
    levels: int = 1  # parts of the validation loss that are also reported one by one
    media: str = "png"  # what `show` writes
    account: str = ""  # what `infer` has to say of the time it took, once it is done

    def __init__(self, config: Any, rank: int = 0, size: int = 1):
        self.config, self.rank, self.size = config, rank, size
        self.identity = {"name": config.model.name}

    def create(self) -> Any:
        """The model that the configuration names, on the default device; it is noted in `identity`."""
        options = self.config.model
        model = user_error(zoo.create, options.name, options.size, **options.overrides, prefix="model: ")
        settings = vars(model.config)
        self.identity["config"] = {k: list(v) if isinstance(v, tuple) else v for k, v in settings.items()}
        return model

    @abstractmethod
    def open(self) -> None:
        """Find the data: on rank 0, so that all ranks agree on what there is."""

    @abstractmethod
    def model(self) -> nn.Module:
        """The model on the default device. A UserError if its inputs are not what the data has."""

    @abstractmethod
    def objective(self, model: nn.Module) -> nn.Module:
        """The model with its loss: forward returns loss and weight per element, or a dict of such pairs to be added."""

    def predictor(self, model: nn.Module) -> nn.Module:
        """The model as `sample` and `infer` call it; what it returns there is whole on every rank."""
        return model

    @abstractmethod
    def example(self, objective: Any, bucket: int = 0) -> dict[str, Any]:
        """The objective's arguments for one batch of a bucket, on the default device."""

    def bucket(self, step: int, groups: int) -> int:
        """Which bucket the batches of a step are of, if what a step computes differs; 0 takes the most."""
        return 0

    def batch_tokens(self, bucket: int = 0) -> int:
        """Of one batch of a bucket, for the throughput."""
        return self.tokens * self.config.train.batch

    @abstractmethod
    def batch(self, objective: Any, step: int, micro: int, group: int, groups: int) -> Inputs:
        """The objective's arguments for one micro-batch of data-parallel group `group` of `groups`.

        A pure function of its arguments and the configuration. A rank makes its own parts alone.
        """

    def drawn(self, step: int, micro: int, group: int, groups: int, n: int) -> list[tuple[int, int]]:
        """The (epoch, index) of each sample of one micro-batch of `group`, from `n` training samples."""
        options = self.config.train
        epochs, indices = batch_indices(options.seed, step, options.batch * options.accumulation * groups, n)
        first = (micro * groups + group) * options.batch
        return list(zip(epochs, indices))[first : first + options.batch]

    @abstractmethod
    def validation_batches(self, objective: Any, group: int, groups: int) -> Iterator[tuple[int, int, Inputs]]:
        """Every validation batch of one group as (level, number of samples, arguments): always the same."""

    @abstractmethod
    def describe(self) -> str:
        """One sample in words and numbers: '8 frames of 12 x 12'."""

    @abstractmethod
    def sample(self, model: Callable[..., Any], device: torch.device, on_step: Callable[..., None]) -> Any:
        """What the model makes, always from the same noise or inputs; called on every rank."""

    @abstractmethod
    def show(self, samples: Any, path: Path) -> Mapping[str, float]:
        """Write a picture of what `sample` returned; called on rank 0. Returns what else was measured on it."""

    @abstractmethod
    def arguments(self, parser: ArgumentParser) -> None:
        """Add what infer.py can be told about this task."""

    @abstractmethod
    def infer(
        self, model: Callable[..., Any], options: Namespace, device: torch.device, on_step: Callable[[int, int], None]
    ) -> list[Path]:
        """Do what `options` ask for, on every rank; rank 0 writes under `options.out`. Returns the files."""

    def floors(self, objective: Any) -> list[Floor]:
        """Those that the configuration asks for; called on rank 0 at the end of a run."""
        return []


def share(length: int, rank: int, size: int) -> range:
    """The rows of `length` that rank `rank` of `size` holds: those of torch.chunk, for the last ranks maybe none."""
    step = ceil(length / size)
    return range(min(rank * step, length), min((rank + 1) * step, length))
