"""Batches made ahead of the step that uses them: in a thread, or in processes beside each rank.

Every batch is a pure function of its step, so it does not matter which process makes it, or how far ahead.
"""

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from dsp.cluster.launch import memory_kills
from zoo.training import UserError
from zoo.training.ranks import check_same_files
from zoo.training.task import Task

# torch's words for a worker that is gone: its number, and the signal if one ended it
WORKER = r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\)(?: is killed by signal: ([\w ]+))?"


class LocalShard(NamedTuple):
    """A shard of a tensor, made by a worker process: the rank makes it a DTensor."""

    name: str
    local: Tensor
    length: int


class Failed(NamedTuple):
    message: str


def open_data(task: Task) -> None:
    """Open a task's data. A UserError on every rank if a file of it is not the same on all."""
    task.open()
    check_same_files(task.files())


def batches(
    task: Task, make: Callable[..., Any], wanted: Iterable[tuple[Any, ...]], workers: int, prefetch: int
) -> Iterator[Any]:
    """Yield `make(*args)` for every args in `wanted`, in order, `prefetch` of them made ahead (by each worker).

    workers: the number of worker processes; 0: a thread makes the batches. Workers are forked; they never use a device
    or communicate with other ranks.
    """
    if not workers:
        yield from ahead(make, wanted, prefetch)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads is fine: a worker uses none of them
        warnings.filterwarnings("ignore", message="This DataLoader will create")  # more workers than cores are fine
        loader: Any = DataLoader(
            WorkerBatches(task, make), batch_size=None, sampler=wanted, num_workers=workers, prefetch_factor=prefetch,
            multiprocessing_context="fork", pin_memory=torch.device(task.device).type == "cuda",
        )  # fmt: skip
        stream = iter(loader)
    for inputs in stream:
        if isinstance(inputs, Failed):
            raise UserError(inputs.message, alone=True)
        yield {name: task.local_shard(*x) if isinstance(x, LocalShard) else x for name, x in inputs.items()}


class WorkerBatches(Dataset[Any]):
    """The batches that worker processes make."""

    def __init__(self, task: Task, make: Callable[..., Any]):
        self.task, self.make = task, make

    def __getitem__(self, wanted: tuple[Any, ...]) -> Any:
        vars(self.task)["local_shard"] = self.local_shard  # of this process's copy of the task
        try:
            return self.make(*wanted)
        except UserError as error:
            return Failed(str(error))

    def local_shard(self, name: str, local: Tensor, length: int) -> Any:
        return local if self.task.size == 1 or length == 1 else LocalShard(name, local, length)


@contextmanager
def worker_ends_named() -> Iterator[None]:
    """A UserError if a worker process is ended by a signal, as torch notices it anywhere in the code inside."""
    before = memory_kills()
    try:
        yield
    except RuntimeError as error:
        match = re.search(WORKER, str(error))
        if not match:
            raise
        event = f"was ended by a signal ({match[2].strip()})" if match[2] else "is gone"
        why = ": the kernel ended a process because memory ran out" if memory_kills() > before else ""
        raise UserError(
            f"a data worker (process {match[1]}) {event}{why}; where memory is short, fewer train.workers or a smaller "
            "train.prefetch take less; resume=true goes on from the last checkpoint", alone=True,
        ) from error  # fmt: skip


def ahead(make: Callable[..., Any], wanted: Iterable[tuple[Any, ...]], depth: int = 1) -> Iterator[Any]:
    """Yield `make(*args)` for every args in `wanted`, made in a thread, `depth` of them ahead of use."""
    with ThreadPoolExecutor(1) as pool:
        arguments = iter(wanted)
        pending: list[Future[Any]] = [pool.submit(make, *args) for args in islice(arguments, depth)]
        try:
            while pending:
                pending += [pool.submit(make, *args) for args in islice(arguments, 1)]
                yield pending.pop(0).result()
        finally:
            for future in pending:
                future.cancel()


def place(inputs: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """The inputs on a device; on CUDA by way of pinned memory, so that the host does not wait for running kernels."""

    def to_device(value: Tensor) -> Tensor:
        if device.type != "cuda" or value.is_cuda:
            return value.to(device)
        return value.pin_memory().to(device, non_blocking=True)

    return {name: to_device(value) if isinstance(value, Tensor) else value for name, value in inputs.items()}
