"""One pool of four gloo processes for the whole session: a test that takes `mesh` runs on each rank of that mesh.

`@pytest.mark.parametrize("mesh", [2, 3, "2x2"])` says of how many ranks; where nothing says so it is two. `ranks(fn, n,
*args)` runs `fn(mesh, *args)` on n of them and returns the results, `whole_world` does so in a world of n ranks. All
ranks are forked from one server, itself forked from this process once it has imported the tests: before torch has
started a thread, and nothing is imported twice.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT
from tests.support.ranks import SERVER, Pool, start_server

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # none of the processes it would start for compiling
os.environ.setdefault("WANDB_MODE", "offline")

RANKS = {"ranks", "whole_world", "mesh"}
PART = 4  # every fourth of a test's slow cases, in the order in which they stand there, stays slow; the others are long


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """A process for each core, up to eight; none but this one for tests that are named on the command line."""
    if config.args_source is pytest.Config.ArgsSource.ARGS:
        return 0
    return min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    families: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("long"):  # one of its parameters is: no case for `-m slow`
            item.own_markers = [mark for mark in item.own_markers if mark.name != "slow"]
        elif (mark := item.get_closest_marker("slow")) and not mark.kwargs.get("every"):
            families.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for family in families.values():
        for i, item in enumerate(family):
            if i % PART:
                item.own_markers = [*(mark for mark in item.own_markers if mark.name != "slow"), pytest.mark.long.mark]


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()  # what was imported is not searched for garbage any more, here and in ranks, where that would copy it
    gc.set_threshold(20_000, 20, 50)  # a search after each 700 objects takes a twentieth of the time of planning
    if any(RANKS & {*i.fixturenames} for i in session.items):
        start_server(quiet=session.config.option.capture != "no")  # -s shows what ranks print


def pytest_unconfigure() -> None:
    for server in SERVER:
        server.close()


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """A script of benchmarks/ as a module, by its room and name."""
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name: importlib.import_module(f"benchmarks.{name}")


@pytest.fixture(scope="session")
def trainer() -> Iterator[Any]:
    sys.path.insert(0, str(ROOT))
    yield importlib.import_module("train")
    sys.path.pop(0)


@pytest.fixture
def run(trainer: Any, tmp_path: Path) -> Any:
    """Starts runs of the tiny configuration: `run("train.steps=2")` is the directory of one."""
    from tests.support.runs import Runs

    return Runs(trainer, tmp_path)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pool]:
    pool = Pool(4, parts=True)
    yield pool
    pool.stop()


@pytest.fixture
def mesh() -> int:
    return 2


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    names = pyfuncitem._fixtureinfo.argnames
    if "mesh" not in names:
        return None
    assert "monkeypatch" not in names, "a patch would stay in the ranks: use `with pytest.MonkeyPatch.context()`"
    given = {name: pyfuncitem.funcargs[name] for name in names}
    n, pool = given.pop("mesh"), pyfuncitem._request.getfixturevalue("ranks")
    pool(partial(pyfuncitem.obj, **given), n)
    return True


@pytest.fixture(scope="session")
def whole_world() -> Iterator[Callable[..., list[Any]]]:
    """`whole_world(fn, n, *args)`: in a world of n ranks, for jobs that look at it or make process groups in it."""
    pools: dict[int, Pool] = {}

    def run(fn: Callable[..., Any], n: int, *args: Any) -> list[Any]:
        return pools.setdefault(n, Pool(n))(fn, n, *args)

    yield run
    for pool in pools.values():
        pool.stop()
