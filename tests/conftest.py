"""One pool of four gloo processes for the whole session: `ranks(fn, n, *args)` runs `fn(mesh, *args)` on n of them.

`whole_world` is another such pool, and `eight_ranks` one of eight. All are forked from one server that has imported the
modules of the tests, and so what these import.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import multiprocessing.forkserver
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # none of the processes it would start for compiling
os.environ.setdefault("WANDB_MODE", "offline")
sys.path.insert(0, str(Path(__file__).parent))

import torch

WORLD = 4
TIMEOUT = 240
RANKS = {"ranks", "whole_world", "eight_ranks"}
SERVER = multiprocessing.get_context("forkserver")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the server: while the first tests run it imports the modules whose tests ask for ranks."""
    modules = {i.module.__name__ for i in session.items if RANKS & {*i.fixturenames}}
    if modules:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
            SERVER.set_forkserver_preload(sorted(modules))
            multiprocessing.forkserver.ensure_running()


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


def _worker(rank: int, world: int, store: str, pipe: Any) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    torch.set_num_threads(1)
    warnings.simplefilter("error")
    faulthandler.enable()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    sizes = range(1, world + 1) if world == WORLD else [world]
    meshes = {n: DeviceMesh("cpu", list(range(n)), mesh_dim_names=("sp",)) for n in sizes}
    grid = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "sp"))
    while True:
        job = pipe.recv()
        if job is None:
            break
        fn, n, args = job
        try:
            torch.manual_seed(0)
            pipe.send((True, fn(grid if n == "2x2" else meshes[n], *args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
    dist.destroy_process_group()


class Pool:
    def __init__(self, world: int = WORLD) -> None:
        self.world = world
        self.workers: list[tuple[Any, Any]] = []

    def start(self) -> None:
        store = tempfile.mktemp(prefix="dsp-tests-")
        for rank in range(self.world):
            here, there = SERVER.Pipe()
            process = SERVER.Process(target=_worker, args=(rank, self.world, store, there), daemon=True)
            process.start()
            self.workers.append((process, here))

    def stop(self) -> None:
        for process, _ in self.workers:
            process.kill()
            process.join()
        self.workers = []

    def __call__(self, fn: Callable[..., Any], n: int | str, *args: Any) -> list[Any]:
        """Run `fn(mesh, *args)` on n ranks ("2x2": a dp x sp mesh over four); results in rank order."""
        if not self.workers:
            self.start()
        active = self.workers[: WORLD if n == "2x2" else int(n)]
        for _, pipe in active:
            pipe.send((fn, n, args))
        results, errors = [], []
        pending = dict(enumerate(pipe for _, pipe in active))
        for rank, pipe in pending.items():
            if not pipe.poll(5 if errors else TIMEOUT):
                errors.append(f"rank {rank}: no answer")
                continue
            try:
                ok, value = pipe.recv()
            except EOFError:
                ok, value = False, "the process died"
            (results if ok else errors).append(value if ok else f"rank {rank}:\n{value}")
        if errors:
            if len(errors) < len(active) or any("died" in e or "no answer" in e for e in errors):
                self.stop()  # somebody may still wait in a collective
            pytest.fail("\n".join(errors), pytrace=False)
        return results


@pytest.fixture(scope="module")
def eight_ranks() -> Iterator[Pool]:
    pool = Pool(8)
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def whole_world() -> Iterator[Pool]:
    """Another pool, for jobs on all four that make process groups of their own: all ranks must have made as many."""
    pool = Pool()
    yield pool
    pool.stop()
