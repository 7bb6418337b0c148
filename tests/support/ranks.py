"""Ranks for tests: gloo processes that are forked from one server, and run what they are given.

The server is forked from the process of the tests once it has imported them: before torch has started a thread, and
nothing is imported twice.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import signal
import socket
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing import Pipe, connection
from pathlib import Path
from typing import Any

import pytest

TIMEOUT = 600
SERVER: list[socket.socket] = []  # where to ask for ranks


def start_server(quiet: bool = False) -> None:
    """From now on ranks are forked from a copy of this process as it is."""
    here, there = socket.socketpair()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of the thread by which pytest-xdist reads
        child = os.fork()
    if not child:
        here.close()
        if quiet:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
        _serve(there)
    there.close()
    SERVER.append(here)


def _serve(requests: socket.socket) -> None:
    """Fork a rank for each request, which brings the pipe that the rank is to read."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    while True:
        try:
            job, pipes, *_ = socket.recv_fds(requests, 4096, 1)
            if not job:
                os._exit(0)
            child = os.fork()
            if not child:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                requests.close()
                _worker(*pickle.loads(job), connection.Connection(pipes[0]))
                os._exit(0)
            os.close(pipes[0])
            requests.send(str(child).encode())
        except BaseException:
            traceback.print_exc()
            os._exit(1)


def _worker(rank: int, world: int, parts: bool, store: str, pipe: Any) -> None:
    if os.fstat(2).st_rdev == os.stat(os.devnull).st_rdev:  # nobody sees what it says, unless it dies of it
        os.dup2(os.open(f"{store}-{rank}", os.O_WRONLY | os.O_CREAT), 2)
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    torch.set_num_threads(1)
    warnings.simplefilter("error")
    faulthandler.enable()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    sizes = range(1, world + 1) if parts else [world]
    meshes: dict[Any, Any] = {n: DeviceMesh("cpu", list(range(n)), mesh_dim_names=("sp",)) for n in sizes}
    if parts:
        meshes["2x2"] = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "sp"))
    while True:
        try:
            job, fn, n, args = pipe.recv()
        except EOFError:  # the tests are over
            return
        try:
            dist.distributed_c10d._world.group_count = 1000 * job  # groups are named by it: alike on all ranks of a job
            torch.manual_seed(0)
            pipe.send((True, fn(meshes[n], *args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


class Pool:
    """Some ranks; with `parts` they have meshes of the first of them too, and one of 2 x 2."""

    def __init__(self, world: int, parts: bool = False) -> None:
        self.world, self.parts = world, parts
        self.workers: list[tuple[int, Any]] = []  # process id, pipe
        self.jobs = 0
        self.store = ""

    def start(self) -> None:
        self.store = tempfile.mktemp(prefix="dsp-tests-")
        for rank in range(self.world):
            here, there = Pipe()
            socket.send_fds(SERVER[0], [pickle.dumps((rank, self.world, self.parts, self.store))], [there.fileno()])
            self.workers.append((int(SERVER[0].recv(20)), here))
            there.close()

    def last_words(self, rank: int) -> str:
        """The end of what a rank wrote to its stderr, with the stacks that faulthandler adds."""
        with contextlib.suppress(OSError):
            return Path(f"{self.store}-{rank}").read_text(errors="replace")[-12_000:]
        return ""

    def stop(self) -> None:
        """End the ranks: those that wait for a job by themselves, others within a second."""
        for _, pipe in self.workers:
            pipe.close()
        end = time.monotonic() + 1
        for process, _ in self.workers:
            with contextlib.suppress(ProcessLookupError):
                while time.monotonic() < end:
                    os.kill(process, 0)
                    time.sleep(0.01)
                os.kill(process, signal.SIGKILL)
        for file in Path(self.store).parent.glob(f"{Path(self.store).name}*") if self.workers else ():
            file.unlink(missing_ok=True)
        self.workers = []

    def __call__(self, fn: Callable[..., Any], n: int | str, *args: Any) -> list[Any]:
        """Run `fn(mesh, *args)` on n ranks ("2x2": a dp x sp mesh over four); results in rank order."""
        if not self.workers:
            self.start()
        self.jobs += 1
        active = self.workers[: 4 if n == "2x2" else int(n)]
        for _, pipe in active:
            pipe.send((self.jobs, fn, n, args))
        pending = {pipe: rank for rank, (_, pipe) in enumerate(active)}
        results, errors, lost = {}, {}, False
        while pending:
            # where one rank failed others may wait for it for ever
            ready = connection.wait(pending, 5 if errors else TIMEOUT)
            for pipe in ready or list(pending):
                rank = pending.pop(pipe)
                try:
                    ok, value = pipe.recv() if ready else (False, "no answer")
                except EOFError:
                    ok, value, lost = False, f"{self.last_words(rank)}the process died", True
                lost = lost or not ready
                (results if ok else errors)[rank] = value
        if errors:
            if lost or results:
                self.stop()  # somebody may still wait in a collective
            first = min(errors)  # its last line begins the message, which is all that a summary shows
            said = f"rank {first}: {errors[first].rstrip().splitlines()[-1]}"
            pytest.fail("\n".join([said, *(f"rank {r}:\n{errors[r]}" for r in sorted(errors))]), pytrace=False)
        return [results[rank] for rank in sorted(results)]
