"""What the ranks of a run must do together: start, agree, stop."""

import logging
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from zoo.training import UserError

T = TypeVar("T")

PATIENCE = timedelta(seconds=3)  # with ranks that ought to find the same error


class Interrupted(Exception):
    """Every rank was asked to stop; raised on all of them at the same place."""


@contextmanager
def process_group(patience: timedelta | None = None) -> Iterator[torch.device]:
    """This rank's device, with a process group: the caller's if there is one, torchrun's, or this process alone.

    `patience` is how long ranks wait for each other; None for torch's default, half an hour or less.
    """
    local = int(os.environ.get("LOCAL_RANK", 0))
    if torch.cuda.is_available():
        if local >= torch.cuda.device_count():
            raise UserError(
                f"local rank {local} has no GPU: {torch.cuda.device_count()} are visible; "
                f"start at most so many ranks a node (torchrun --nproc-per-node {torch.cuda.device_count()})"
            )
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    else:
        device, backend = torch.device("cpu"), "gloo"
    borrowed = dist.is_initialized()
    if borrowed:
        pass
    elif "RANK" in os.environ:
        dist.init_process_group(backend, timeout=patience)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    farewell = None if borrowed else dist.new_group(backend="gloo", timeout=PATIENCE)
    notes, zoo = logging.StreamHandler(sys.stdout), logging.getLogger("zoo")
    try:
        if dist.get_rank() == 0:  # what the data sets have to say
            zoo.addHandler(notes)
            zoo.setLevel(logging.INFO)
        yield device
    except UserError as error:
        if farewell is not None and not error.alone:
            complain_together(error, farewell)
        raise
    finally:
        zoo.removeHandler(notes)
        if not borrowed:
            dist.destroy_process_group()


def say(text: str) -> None:
    """Print on rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def complain_together(error: UserError, group: dist.ProcessGroup) -> None:
    """Rank 0 prints an error that every rank has, and all meet: whoever left first would cut the others' connections
    under their threads, and have torchrun kill them. A rank that nobody meets is the only one that has the error."""
    if dist.get_rank() == 0:
        complain(error)
    try:
        dist.barrier(group)
        error.told = True
    except RuntimeError:  # as long as PATIENCE
        error.alone = True


def complain(error: UserError) -> None:
    """Print a user's error once. Rank 0 speaks; another rank only if it is alone, or if rank 0 did not end the run."""
    if error.told:
        return
    rank = int(os.environ.get("RANK", 0))
    if rank and not error.alone:
        time.sleep(PATIENCE.total_seconds())
    print(f"error: {error}" if rank == 0 else f"error on rank {rank}: {error}", file=sys.stderr, flush=True)
    error.told = True


def on_first_rank(action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """The result of `action` on rank 0, on every rank; its OSError or UserError too, as a UserError.

    Without a process group, simply what `action` gives.
    """
    if not dist.is_initialized():
        return action()
    box: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            box[0] = action()
        except (OSError, UserError) as error:
            box[1] = str(error)
    dist.broadcast_object_list(box, src=0, group=group)
    if box[1] is not None:
        raise UserError(box[1])
    return box[0]


def total(*values: float) -> list[float]:
    """The sums over all ranks."""
    sums = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(sums)
    return sums.tolist()


def greatest(value: float) -> float:
    """The largest value of any rank."""
    best = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(best, dist.ReduceOp.MAX)
    return best.item()


def peak_memory(device: torch.device) -> int:
    """Bytes this rank has held at most: allocated by torch on a GPU, resident in the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class StopSignal:
    """SIGTERM and SIGINT ask a run to write a checkpoint and leave, at a place where all ranks can.

    A signal may reach one rank alone, or all at different steps, so it counts once the ranks have been asked together.
    """

    def __init__(self) -> None:
        self.name = ""

    def __enter__(self) -> "StopSignal":
        self.previous = {s: signal.signal(s, self._handle) for s in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.name = signal.Signals(number).name

    @property
    def requested(self) -> bool:
        """Whether this rank received a signal."""
        return bool(self.name)

    def poll(self, *_: object) -> None:
        """Raise Interrupted on every rank if any received a signal. Collective; the arguments are ignored."""
        if total(self.requested)[0]:
            raise Interrupted
