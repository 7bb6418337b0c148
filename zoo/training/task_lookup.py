"""The parts of a run by name: the task that trains on a data set, its outputs, and the options of the data set.

The trainer's own tasks are modules of zoo.training.tasks and zoo.training.outputs; a task from outside is one module,
which the configuration names (`task=package.module`).
"""

import importlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, make_dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from zoo.plugins import load_plugin
from zoo.training import UserError, complete, task, user_error
from zoo.training.sections import option
from zoo.training.task import Data, Infer, Module, Outputs, Show, Task

TASKS = {  # data.name -> the module of the task that trains on it, in zoo.training.tasks and outputs
    "digit_images": "image",
    "digits": "video",
    "latent_folder": "latents",
    "video_folder": "video",
    "protein_synthetic": "protein",
    "protein_embedded": "protein",
    "protein_folder": "protein",
}


# members that a task from outside may leave out
OPTIONAL = {
    "DATA": {}, "Objective": task.Objective, "Eval": task.Eval, "Sample": task.Sample, "Show": task.Show,
    "Infer": task.Infer,
}  # fmt: skip


@dataclass(frozen=True)
class TaskLookup:
    """The parts that `data.name` and `task` name (task None: that of `TASKS` for the data, else video)."""

    data: str
    task: str | None = None

    @property
    def builtin(self) -> str | None:
        """Name of the trainer's own task; None for a task from outside."""
        name = self.task or TASKS.get(self.data, "video")
        return name if name in TASKS.values() else None

    @cached_property
    def module(self) -> Any:
        """The module of the task; zoo/training/task.py says what it holds."""
        if self.builtin is None:
            plugin = user_error(load_plugin, self.task, "zoo.tasks", prefix="task: ")
            members: Any = SimpleNamespace(**{**OPTIONAL, **vars(plugin)})
            complete(members, Module, f"task={self.task}")
            return members
        members = user_error(
            importlib.import_module, f"zoo.training.tasks.{self.builtin}", prefix=f"task {self.builtin}: "
        )
        complete(members, Module, f"zoo/training/tasks/{self.builtin}.py")
        return members

    @cached_property
    def outputs(self) -> Any:
        """The module with `Show` and `Infer`; of a task from outside the task's own module."""
        if self.builtin is not None:
            module = importlib.import_module(f"zoo.training.outputs.{self.builtin}")
            complete(module, Outputs, f"zoo/training/outputs/{self.builtin}.py")
            return module
        return self.module

    @cached_property
    def options(self) -> type:
        """The dataclass of the data's options."""
        if self.data in self.module.DATA:
            return self.module.DATA[self.data]
        if self.data in TASKS:
            source = f"zoo/training/tasks/{self.builtin}.py" if self.builtin else f"task={self.task}"
            raise UserError(f"data.name={self.data}: {source} has no entry of that name in its DATA")
        kind = user_error(load_plugin, self.data, "zoo.data", prefix="data.name: ")
        if not (isinstance(kind, type) and is_dataclass(kind)):
            raise UserError(f"data.name={self.data} is not a dataclass; expected options with a method datasets(seed)")
        if all(f.name != "name" for f in fields(kind)):
            named = ("name", str, option(self.data, "the data set"))
            kind = make_dataclass(kind.__name__, [named], bases=(kind,), namespace={"__doc__": kind.__doc__})
        return kind


def create_task(config: Any, mesh: DeviceMesh | None = None, device: torch.device | str = "cpu") -> Task:
    """The task of a configuration, for this rank of `mesh`, whose ranks share each sample."""
    data, name, module = config.data, config.data.name, TaskLookup(config.data.name, config.task).module
    protocol = getattr(module, "Data", Data)
    if not getattr(protocol, "_is_protocol", False):  # a class of the user's own, by chance of this name
        protocol = Data
    complete(data, protocol, f"{type(data).__name__}, the options of data.name={name},")
    return _create(module.Task, f"the task of data.name={name}", config, mesh, device)


def create_show(task: Task) -> Show:
    """The pictures of a task."""
    name = task.config.data.name
    return _create(TaskLookup(name, task.config.task).outputs.Show, f"what is shown of data.name={name}", task)


def create_infer(task: Task, names: Mapping[str, Sequence[str]] | None = None) -> Infer:
    """The part of infer.py that uses a task's model; `names`: of the samples that the run had, by set."""
    name, show = task.config.data.name, create_show(task)
    infer = _create(TaskLookup(name, task.config.task).outputs.Infer, f"what infer.py makes of data.name={name}", show)
    infer.names = names or {}
    return infer


def _create(kind: Any, label: str, *args: Any) -> Any:
    """An instance of `kind`; a UserError names every method that the class lacks."""
    missing = sorted(getattr(kind, "__abstractmethods__", ()))
    if issubclass(kind, Task) and kind.samples is Task.samples:
        methods = ("example", "batch", "validation_batches")
        missing += ["samples"] if any(getattr(kind, name) is getattr(Task, name) for name in methods) else []
    if missing:
        lines = (f"  {name}: {inspect.getdoc(getattr(kind, name))}" for name in missing)
        raise UserError("\n".join([f"{label}, {kind.__name__} of {kind.__module__}, lacks:", *lines]))
    return kind(*args)
