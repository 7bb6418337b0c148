"""The steps that all ranks of a run take together: start, agree, stop."""

import hashlib
import logging
import os
import resource
import secrets
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from importlib.machinery import PathFinder
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from zoo.data.file_records import FileRecords
from zoo.files import MAX_BYTES, read_bytes
from zoo.training import UserError, environment, user_error
from zoo.training.watch import HOME, PATIENCE, Progress, Watch, connect, listen, of_project, print_error, wait_for_port

T = TypeVar("T")

TIMEOUT = 600.0  # seconds, by default
COLLECTIVE = timedelta(minutes=30)  # torch's own limit, for the time before the first step


class Interrupted(Exception):
    """Every rank was asked to stop; raised on all of them at the same place."""


@contextmanager
def process_group(
    timeout: float = TIMEOUT, *, collective: timedelta = COLLECTIVE, progress: Progress | None = None
) -> Iterator[torch.device]:
    """This rank's device, with a process group: the caller's if there is one, torchrun's, or this process alone.

    Within `timeout` seconds all ranks have to connect, each has to answer, and, once `progress` counts, to go on.
    `collective` is the limit of one collective. An error inside ends all ranks with one line, printed once; it is
    raised again with `printed` set.
    """
    borrowed, watch = dist.is_initialized(), None
    notes, zoo = logging.StreamHandler(sys.stdout), logging.getLogger("zoo")
    progress = progress or Progress()
    store: dist.Store = dist.HashStore()
    rank, world = 0, 1
    try:
        if not borrowed and (place := environment.place()):
            rank, world = place.rank, place.world
            store, watch = _meet(place, timeout, progress)
        device, backend = _device()
        if not borrowed:
            dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=collective)
        if not borrowed:
            check_same_code(gathered(code()))
        if dist.get_rank() == 0:  # messages of the data sets
            zoo.addHandler(notes)
            zoo.setLevel(logging.INFO)
        yield device
    except Exception as error:
        if not borrowed:
            report(error, watch, progress)
        raise
    finally:
        zoo.removeHandler(notes)
        if not borrowed:
            if dist.is_initialized():
                dist.destroy_process_group()
            if watch:
                watch.close()


@contextmanager
def training(
    timeout: float, config: Mapping[str, Any], refused: UserError | None
) -> Iterator[tuple[torch.device, "StopSignal"]]:
    """`process_group` for a run: its device, and the signal to stop, which is also the run's progress.

    All ranks have to have the same `config`; `refused` is an error that this rank has already met.
    """
    stop = StopSignal()
    # a signal's handler outlives the group: a launcher that has seen a rank die sends SIGTERM to those that tell of it
    with ExitStack() as signals, process_group(timeout, progress=stop) as device:
        signals.enter_context(stop)
        check_same_config(*zip(*gathered(({**config, **named_code(config)}, refused and str(refused)))))
        yield device, stop


def gathered(value: T) -> list[T]:
    """The values of all ranks, by rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _device() -> tuple[torch.device, str]:
    """This rank's device, and the backend of its process group."""
    device = environment.device()
    return device, "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"


def _meet(place: environment.Place, timeout: float, progress: Progress) -> tuple[dist.Store, Watch]:
    """Connect all ranks: return a store for torch, and this rank's watch."""
    rank, world, host, port = place.rank, place.world, place.host, place.port
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if not serves:
        wait_for_port(host, port, timeout)
    limit = timedelta(seconds=max(1.0, timeout))
    served = dist.TCPStore(host, port, None, serves, timeout=limit, wait_for_workers=False, multi_tenant=True)
    store = dist.PrefixStore(f"attempt-{attempt}", served)
    if rank == 0:
        token = secrets.token_hex(8)
        peers = listen(world, timeout, lambda port: store.set("watch", f"{port} {token}"), token)
    else:
        door, token = store.get("watch").decode().split()
        peers = [connect(rank, host, int(door), token, world)]
    return store, Watch(rank, peers, timeout, progress)


def check_same_config(configs: Sequence[Mapping[str, Any]], errors: Sequence[str | None]) -> None:
    """Raise a UserError if a rank has an error, or another configuration than rank 0; both are given by rank."""
    for rank, error in enumerate(errors):
        if error:
            raise UserError(f"rank {rank}: {error}" if rank else error)
    if odd := different(configs):
        raise UserError(
            f"the ranks were started with different configurations: {odd}; start all with the same file "
            "and command line"
        )


def check_same_code(codes: Sequence[Mapping[str, str]]) -> None:
    """Raise a UserError if a rank runs other code than rank 0; given by rank."""
    if odd := different(codes):
        raise UserError(f"the ranks run different code: {odd}; give every host the same checkout and the same torch")


def check_same_files(records: Iterable[FileRecords]) -> None:
    """Raise a UserError on every rank if a file, by its size and content, is not the same on all; record the files."""
    facts = {str(path): fact for each in records for path, fact in each.take().items()}
    digest = hashlib.blake2b(repr(sorted(facts.items())).encode(), digest_size=8).hexdigest()
    if len({*gathered(digest)}) == 1:
        return
    first = on_first_rank(lambda: facts)
    odd = [(path, fact, first.get(path)) for path, fact in facts.items() if fact != first.get(path)]
    everyone = gathered((len(odd), socket.gethostname(), odd[:1]))
    rank, (count, host, named) = next((rank, theirs) for rank, theirs in enumerate(everyone) if theirs[0])
    (path, theirs, ours), more = named[0], f" and {count - 1} more" if count > 1 else ""
    raise UserError(
        f"the ranks read different files of the same names: on rank {rank} ({host}) {path} has {theirs}, on rank 0 "
        f"({everyone[0][1]}) {ours}{more}; copy the data again, or put it on storage that all ranks share"
    )


def different(values: Sequence[Mapping[str, Any]]) -> str:
    """The ranks whose values differ from those of rank 0, and the keys; '' if there are none."""
    odd = [rank for rank, value in enumerate(values) if value != values[0]]
    if not odd:
        return ""
    first, theirs = values[0], values[odd[0]]
    keys = sorted(key for key in {**first, **theirs} if first.get(key) != theirs.get(key))
    named = ", ".join(f"{key}={theirs.get(key)} (rank 0: {first.get(key)})" for key in keys[:5])
    more = f" and {len(keys) - 5} more" if len(keys) > 5 else ""
    return f"{len(odd)} of {len(values) - 1} others differ from rank 0, rank {odd[0]} in {named}{more}"


def code() -> dict[str, str]:
    """The code that this rank runs: torch's version, digests of dsp, of zoo and of the program."""
    main = getattr(sys.modules["__main__"], "__file__", None)
    program = {Path(main).name: digest([Path(main)])} if main and Path(main).is_file() else {}
    return {"torch": torch.__version__, **{name: digest([HOME / name]) for name in ("dsp", "zoo")}, **program}


def named_code(config: Mapping[str, Any]) -> dict[str, str]:
    """Digests of the user's own packages that a configuration names; nothing is imported."""
    parts = (str(config.get(key)) for key in ("model.name", "data.name", "task"))
    tops = {name.partition(":")[0].partition(".")[0] for name in parts if ":" in name or "." in name}
    specs = {top: PathFinder.find_spec(top, [*sys.path, os.getcwd()]) for top in sorted(tops)}
    places = {top: spec.submodule_search_locations or [str(spec.origin)] for top, spec in specs.items() if spec}
    return {f"code of {top}": digest([Path(place) for place in folders]) for top, folders in places.items()}


def digest(places: Sequence[Path]) -> str:
    """A digest of Python files, and of those in folders, with their names."""
    digest = hashlib.blake2b(digest_size=8)
    for place in places:
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            content = user_error(read_bytes, file, MAX_BYTES, alone=True)
            digest.update(f"{file.relative_to(place)}\0".encode() + hashlib.blake2b(content).digest())
    return digest.hexdigest()


def log0(text: str) -> None:
    """Print on rank 0, or in a process alone."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(text, flush=True)


def report(error: Exception, watch: Watch | None, progress: Progress) -> None:
    """Print the error that ends the run, once for all ranks."""
    if getattr(error, "printed", False):
        return
    met = error.__cause__ if isinstance(error, UserError) else error  # a save wraps the error that it met
    lost = isinstance(met, (RuntimeError, CheckpointException)) and any(word in str(met) for word in CONNECTION)
    shared = isinstance(error, UserError) and not error.alone
    if not (lost and watch and watch.verdict(2 * PATIENCE)):  # else the end of another rank is printed
        text = str(error) if shared else describe(error, progress)
        if watch:
            watch.report(text, status_of(error), shared=shared)
        else:
            print_error(f"error: {text}")
    error.printed = True  # type: ignore[attr-defined]


CONNECTION = ("gloo", "NCCL", "Connection", "connection", "Socket", "socket", "TCPStore", "Broken pipe")


def describe(error: Exception, progress: Progress) -> str:
    """An error of one rank in one line: step, message, file; the traceback is kept if the program may be at fault."""
    words = str(error) if isinstance(error, UserError) else " ".join(str(error).split())[:500]
    when = f"{progress.doing}: " if progress.count else ""
    if isinstance(error, UserError):
        return when + words
    frames = [f for f in traceback.extract_tb(error.__traceback__) if of_project(f.filename)]
    last = frames[-1] if frames else None
    place = f" (in {last.name}, {os.path.relpath(last.filename, HOME)}:{last.lineno})" if last else ""
    if isinstance(error, OSError) and error.filename:
        return f"{when}{error.filename}: {error.strerror}"
    text = f"{when}{type(error).__name__}: {words}{place}"
    if isinstance(error, OSError | MemoryError):
        return text
    try:
        with tempfile.NamedTemporaryFile("w", prefix="dsp-error-", suffix=".txt", delete=False) as file:
            file.writelines(traceback.format_exception(error))
        return f"{text}; the traceback is in {file.name}"
    except OSError:
        return text


def status_of(error: Exception) -> int:
    """The exit status: 2 for errors that the user can fix, 1 for all others."""
    return 2 if isinstance(error, UserError) else 1


def report_uncaught(error: Exception) -> int:
    """Print an error that no process group has printed, on rank 0 first; return the exit status."""
    if not getattr(error, "printed", False):
        first, rank = environment.first_rank(), os.environ.get("RANK")
        if not first and not getattr(error, "alone", False):
            time.sleep(PATIENCE)
        print_error(f"error: {error}" if first else f"error on rank {rank}: {error}")
    return status_of(error)


def on_first_rank(action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Run `action` on rank 0; return its result on every rank, or raise its OSError or UserError there as a UserError.

    Without a process group, run `action` here.
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


def all_sum(*values: float) -> list[float]:
    """The sums over all ranks."""
    sums = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(sums)
    return sums.tolist()


def all_max(value: float) -> float:
    """The largest value of any rank."""
    best = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(best, dist.ReduceOp.MAX)
    return best.item()


def peak_memory(device: torch.device) -> int:
    """The most bytes that this rank has held: allocated by torch on a GPU, resident in the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class StopSignal(Progress):
    """SIGTERM, SIGINT and SIGHUP ask a run to write a checkpoint and leave, at a place where all ranks can.

    A signal may reach one rank alone, or all at different steps, so it counts once all ranks have been asked together.
    """

    def __enter__(self) -> "StopSignal":
        kinds = [s for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) if signal.getsignal(s) != signal.SIG_IGN]
        self.previous = {s: signal.signal(s, self._handle) for s in kinds}  # nohup ignores SIGHUP
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.stopped, self.stopped_at = signal.Signals(number).name, time.monotonic()

    @property
    def requested(self) -> bool:
        """Tell whether this rank received a signal. Read once a step, so reading it counts as progress."""
        self.count += 1
        return bool(self.stopped)

    def poll(self, *_: object) -> None:
        """Raise Interrupted on every rank if any received a signal. Collective; the arguments are ignored."""
        if all_sum(self.requested)[0]:
            raise Interrupted
