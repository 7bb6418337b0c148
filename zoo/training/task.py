"""A task: a run's data and loss, its pictures, and the use of a trained model. The trainer itself knows none of these.

A kind of data has two modules of one name, which `zoo.training.task_lookup.TASKS` gives for each data set:

    tasks/    `Task`, and the sections of the configuration that only it has: `DATA` (data.name -> dataclass),
              `Objective`, and `Eval` and `Sample`, which have `every`, in steps
    outputs/  `Show`, and `Infer` for infer.py

A task from outside is one module, in which only `Task` is required: see `zoo.training.task_lookup`.
"""

from abc import ABC, abstractmethod
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

import zoo
from zoo.data.file_records import FileRecords
from zoo.data.sampling import batch_indices
from zoo.training import UserError, one_line, user_error
from zoo.training.lora import adapt
from zoo.training.sections import option

Inputs = dict[str, Tensor | int]  # a value that is not a DTensor is the same on all ranks


@dataclass
class Baseline:
    """A baseline that a model has to beat: the loss, or another measure, of something that hardly needs training."""

    key: str  # in the records
    name: str  # for the reader
    loss: float
    of: str = "val_loss"  # the key of the measure to compare it with


@dataclass
class Objective:
    name: str = option("loss", "the loss")


@dataclass
class Eval:
    every: int = option(0, "steps between validations; 0 for none", least=0)


@dataclass
class Sample:
    every: int = option(0, "steps between samples; 0 for none", least=0)


class Data(Protocol):
    """A section of the configuration that names a data set; a task's module may ask for more, by its own `Data`."""

    name: Annotated[str, "the name in the configuration, an option"]


class Module(Protocol):
    """A file of zoo/training/tasks."""

    DATA: Annotated[Mapping[str, type], "a dict of data.name to the dataclass of its options"]
    Objective: Annotated[type, "the dataclass of the section objective"]
    Eval: Annotated[type, "the dataclass of the section eval"]
    Sample: Annotated[type, "the dataclass of the section sample"]
    Task: Annotated[type, "a subclass of zoo.training.task.Task"]


class Outputs(Protocol):
    """A file of zoo/training/outputs."""

    Show: Annotated[type, "a subclass of zoo.training.task.Show"]
    Infer: Annotated[type, "a subclass of zoo.training.task.Infer"]


class Task(ABC):
    """One run's data, model and loss. The ranks of `mesh` share each sample; None: this rank has full samples."""

    identity: dict[str, Any]  # describes the model; a checkpoint must have the same
    tokens: int = 1  # of one sample, for the throughput; known once the model is made
    validation_samples: int = 0  # of all data-parallel groups together
    train: Any  # the training set, with a length, which `open` sets; required with `samples`
    validation: Any  # the validation set, likewise
    sharded_inputs: ClassVar[Mapping[str, int]] = {}  # by input, the dim along which a rank makes only its shard
    levels: int = 1  # parts of the validation loss that are also reported one by one

    def __init__(self, config: Any, mesh: DeviceMesh | None = None, device: torch.device | str = "cpu"):
        self.config, self.mesh, self.device = config, mesh, device
        self.size = mesh.size() if mesh else 1
        self.rank = (mesh.get_coordinate() or [0])[0] if mesh else 0
        self.identity = {"name": config.model.name}

    def create(self) -> Any:
        """The model that the configuration names, on the default device; `identity` gets its settings."""
        options = self.config.model
        try:
            model = user_error(zoo.create, options.name, options.size, **options.overrides, prefix="model: ")
        except (ArithmeticError, RuntimeError, TypeError, AssertionError, LookupError) as error:
            if not options.overrides:
                raise  # not the user's error
            raise UserError(
                f"model: {options.name} cannot be made with {options.overrides}: {one_line(error)}"
            ) from error
        settings = vars(model.config)
        self.identity["config"] = {k: list(v) if isinstance(v, tuple) else v for k, v in settings.items()}
        if self.config.lora.rank:
            known = self.identity.get("lora", {})  # has the fingerprint of the weights below, once a run has them
            self.identity["lora"] = {**known, "rank": self.config.lora.rank, "alpha": self.config.lora.alpha}
        return adapt(model, self.config.lora, self.config.parallel.method)

    @abstractmethod
    def open(self) -> None:
        """Find the data: on rank 0, so that all ranks agree on what there is."""

    def model(self) -> nn.Module:
        """The model on the default device. A UserError if its inputs do not fit the data."""
        model: nn.Module = self.create()
        return model

    @abstractmethod
    def objective(self, model: nn.Module) -> nn.Module:
        """The model with its loss: forward returns loss and weight per element, or a dict of such pairs to be added."""

    def predictor(self, model: nn.Module) -> nn.Module:
        """The model as `Show` and `Infer` call it; its output is full on every rank."""
        return model

    def samples(self, chosen: Sequence[tuple[int, int]], training: bool) -> Inputs:
        """The objective's arguments for samples (epoch, index) of `train`, or of `validation`.

        A pure function of its arguments and the configuration. A rank makes only its own shards (`local_range`,
        `local_shard`). A task may have `example`, `batch` and `validation_batches` instead.
        """
        raise NotImplementedError

    def example(self, objective: Any, bucket: int = 0) -> dict[str, Any]:
        """The objective's arguments for one batch of a bucket, on the default device."""
        if not hasattr(self, "train"):  # before a run, as for dry_run
            self.open()
        with torch.device("cpu"):
            batch = self.samples([(0, i % len(self.train)) for i in range(self.config.train.batch)], True)
        return {k: torch.empty(v.shape, dtype=v.dtype) if isinstance(v, Tensor) else v for k, v in batch.items()}

    def bucket(self, step: int, groups: int) -> int:
        """The bucket of the batches of a step, if steps differ in their computation; bucket 0 computes the most."""
        return 0

    def batch_tokens(self, bucket: int = 0) -> int:
        """The tokens of one batch of a bucket, for the throughput."""
        return self.tokens * self.config.train.batch

    def batch(self, objective: Any, step: int, micro: int, group: int, groups: int) -> Inputs:
        """The objective's arguments for one micro-batch of data-parallel group `group` of `groups`.

        A pure function of its arguments and the configuration. A rank makes only its own shards.
        """
        return self.samples(self.sample_indices(step, micro, group, groups, len(self.train)), True)

    def sample_indices(self, step: int, micro: int, group: int, groups: int, n: int) -> list[tuple[int, int]]:
        """The (epoch, index) of each sample of one micro-batch of `group`, from `n` training samples."""
        options = self.config.train
        epochs, indices = batch_indices(options.seed, step, options.batch * options.accumulation * groups, n)
        first = (micro * groups + group) * options.batch
        return list(zip(epochs, indices))[first : first + options.batch]

    def local_range(self, length: int) -> range:
        """The rows of `length` that this rank holds; a single row is not sharded: every rank has it."""
        return share(length, self.rank, self.size) if length > 1 else range(length)

    def placements(self, inputs: Mapping[str, Any]) -> dict[str, Placement]:
        """The placements of the inputs of a batch that are sharded."""
        dims = {name: dim for name, dim in self.sharded_inputs.items() if name in inputs}
        return {name: Shard(dim) for name, dim in dims.items() if inputs[name].shape[dim] > 1}

    def local_shard(self, name: str, local: Tensor, length: int) -> Tensor:
        """This rank's shard of an input of `sharded_inputs`, as a DTensor; the full input has `length` rows."""
        if name not in self.sharded_inputs:
            raise UserError(
                f"{type(self).__name__} of {type(self).__module__}: local_shard({name!r}, ...) needs the dim along "
                f"which ranks shard {name}; name it in the class, as sharded_inputs = {{{name!r}: 2}}"
            )
        dim = self.sharded_inputs[name]
        if self.mesh is None or self.size == 1 or length == 1:
            return local
        whole = torch.empty([*local.shape[:dim], length, *local.shape[dim + 1 :]], device="meta")
        return DTensor.from_local(
            local.to(self.device), self.mesh, [Shard(dim)],
            run_check=False, shape=whole.shape, stride=whole.stride(),
        )  # fmt: skip

    def validation_batches(self, objective: Any, group: int, groups: int) -> Iterator[tuple[int, int, Inputs]]:
        """Every validation batch of one group as (level, number of samples, arguments): always the same."""
        indices = range(self.validation_samples)[group::groups]
        for start in range(0, len(indices), self.config.train.batch):
            part = indices[start : start + self.config.train.batch]
            yield 0, len(part), self.samples([(0, i % len(self.validation)) for i in part], False)

    def files(self) -> list[FileRecords]:
        """The records of the files that the data sets read, those of a set's attribute `files`, if it has one."""
        sets = (getattr(self, name, None) for name in ("train", "validation"))
        records = (getattr(each, "files", None) for each in sets)
        return [*{id(each): each for each in records if isinstance(each, FileRecords)}.values()]

    def describe(self) -> str:
        """One sample in words and numbers: '8 frames of 12 x 12'. By default nothing, ''."""
        return ""

    def hints(self, model: nn.Module) -> Sequence[str]:
        """Settings that are likely to disappoint, each with an option that helps, one a line. By default none, []."""
        return []

    def names(self) -> Mapping[str, Sequence[str]]:
        """The names of the samples in "train" and in "validation", if they have names. By default none, {}."""
        return {}


class Show:
    """Pictures of a task's model during a run. By default there are none."""

    media: str = "png"  # what `write` writes

    def __init__(self, task: Any):
        self.task, self.config = task, task.config

    def ready(self) -> None:
        """A UserError if samples could not be shown later; called on every rank before the first step."""
        for name in ("sample", "write") if getattr(self.config.sample, "every", 0) else ():
            if getattr(type(self), name) is getattr(Show, name):
                source = f"{type(self).__name__} of {type(self).__module__}"
                raise UserError(
                    f"sample.every={self.config.sample.every}: {source} has no method {name}; add it, or set this to 0"
                )

    def sample(self, model: Callable[..., Any], device: torch.device, on_step: Callable[..., None]) -> Any:
        """The model's samples, always from the same noise or inputs; called on every rank."""
        raise NotImplementedError

    def write(self, samples: Any, path: Path) -> Mapping[str, float]:
        """Write a picture of the samples; called on rank 0. Returns measures of the samples."""
        raise NotImplementedError

    def headline(self, key: str) -> bool:
        """Tell whether a measure is among those that a run ends with; the report has all of them."""
        return True

    def baselines(self, objective: Any) -> list[Baseline]:
        """The baselines that the configuration asks for; called on rank 0 at the end of a run."""
        return []


class Infer:
    """The work of infer.py with a task's model. By default there is none."""

    account: str = ""  # the time that `run` took, in words, once it is done
    results: Any = None  # the last results of `run`, on rank 0
    names: Mapping[str, Sequence[str]] = {}  # of the samples that the run had, by set

    def __init__(self, show: Any):
        self.show, self.task, self.config = show, show.task, show.config

    def arguments(self, parser: ArgumentParser) -> None:
        """Add the options of infer.py for this task."""

    def run(
        self, model: Callable[..., Any], options: Namespace, device: torch.device, on_step: Callable[[int, int], None]
    ) -> list[Path]:
        """Do what `options` ask for, on every rank; rank 0 writes under `options.out`. Returns the files."""
        raise UserError(f"{type(self.task).__module__} has no class Infer, which infer.py needs")


def share(length: int, rank: int, size: int) -> range:
    """The rows of `length` that rank `rank` of `size` holds: those of torch.chunk, for the last ranks maybe none."""
    each = -(-length // size)
    return range(length)[rank * each : (rank + 1) * each]
