"""Planning, check and discover leave no trace in any Python state; what a first call makes is in the plan of all."""

from __future__ import annotations

import copy
import functools
import gc
import json
import random
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils.rnn import pad_sequence

import dsp
from dsp.support.python_state import World, uncollected
from tests.support.slow import slow

C = 8
TABLES: dict[str, Tensor] = {}
TABLE: Tensor | None = None
HELD = SimpleNamespace(tables={})
CURRENT: ContextVar[Tensor | None] = ContextVar("table", default=None)


def made() -> Tensor:
    return torch.arange(32.0).outer(torch.arange(1.0, C + 1)).sin()


class Rope:
    """A plain object with a table."""

    shared: Tensor | None = None

    def __init__(self) -> None:
        self.table: Tensor | None = None
        self.calls = 0

    def own(self) -> Tensor:
        self.calls += 1
        if self.table is None:
            self.table = made()
        return self.table

    def of_class(self) -> Tensor:
        if Rope.shared is None:
            Rope.shared = made()
        return Rope.shared


class Slotted:
    __slots__ = ("table",)

    def __init__(self) -> None:
        self.table: Tensor | None = None


def closed() -> Callable[[], Tensor]:
    table: Tensor | None = None

    def get() -> Tensor:
        nonlocal table
        if table is None:
            table = made()
        return table

    return get


@functools.lru_cache
def cached() -> Tensor:
    return made()


def attributed() -> Tensor:
    if not hasattr(attributed, "table"):
        attributed.table = made()  # type: ignore[attr-defined]
    return attributed.table  # type: ignore[attr-defined]


def of_module() -> Tensor:
    global TABLE
    if TABLE is None:
        TABLE = made()
    return TABLE


def in_dict() -> Tensor:
    return TABLES.setdefault("table", made()) if "table" not in TABLES else TABLES["table"]


def in_namespace() -> Tensor:
    if "table" not in HELD.tables:
        HELD.tables["table"] = made()
    return HELD.tables["table"]


def in_context() -> Tensor:
    if CURRENT.get() is None:
        CURRENT.set(made())
    table = CURRENT.get()
    assert table is not None
    return table


class Keeper(nn.Module):
    """Attention that looks up a table which its first call makes."""

    def __init__(self, where: str, use: str = "") -> None:
        super().__init__()
        self.project, self.where, self.use = nn.Linear(C, C), where, use
        self.rope, self.get, self.slotted = Rope(), closed(), Slotted()
        self.weak: Any = weakref.WeakValueDictionary()
        self.strong: list[Any] = [Rope()]

    def table(self) -> Tensor:
        if self.where == "slots":
            if self.slotted.table is None:
                self.slotted.table = made()
            return self.slotted.table
        if self.where == "unreachable":  # of the standard library: nobody looks there
            if not hasattr(json, "table"):
                json.table = made()  # type: ignore[attr-defined]
            return json.table  # type: ignore[attr-defined]
        ways: dict[str, Callable[[], Tensor]] = {
            "object": self.rope.own, "class": self.rope.of_class, "closure": self.get, "cache": cached,
            "function": attributed, "global": of_module, "dict": in_dict, "namespace": in_namespace,
            "context": in_context, "list": self.strong[0].own,
        }  # fmt: skip
        return ways[self.where]()

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        r = self.table()[torch.arange(n)]
        if self.use == "copy_":
            r = torch.zeros(n, C, dtype=r.dtype).copy_(r)
        if self.use == "setitem":
            z = torch.zeros(n, C, dtype=r.dtype)
            z[:] = r
            r = z
        if self.use == "pad_sequence":
            r = pad_sequence([r], batch_first=True)[0]
        if self.use == "numpy":
            r = torch.from_numpy(r.numpy().copy())
        if self.use == "tolist":
            r = torch.tensor(r.tolist())
        q = self.project(x) * r
        return F.scaled_dot_product_attention(q[:, None], q[:, None], x[:, None])[:, 0]


PLACES = "object class closure cache function global dict namespace context list slots".split()
USES = "copy_ setitem pad_sequence numpy tolist".split()


def forget() -> None:
    global TABLE
    TABLE = Rope.shared = None
    cached.cache_clear()
    attributed.__dict__.clear()
    TABLES.clear()
    HELD.tables.clear()
    CURRENT.set(None)
    json.__dict__.pop("table", None)


def calls(mesh: DeviceMesh, where: str, use: str) -> list[dict[str, int]]:
    """Return what each of three calls sends, which are exact."""
    torch.manual_seed(0)
    forget()
    model, x, sent = Keeper(where, use), torch.randn(1, 11, C), []
    expected = copy.deepcopy(model)(x)
    forget()
    parallel = dsp.parallelize(copy.deepcopy(model), mesh, {"": "x=b s c"})
    for _ in range(3):
        with dsp.count_comm() as comm:
            assert (parallel(x) - expected).abs().max() < 1e-6, (where, use)
        sent.append(dict(comm.forward.bytes))
    forget()
    return sent


@pytest.mark.parametrize("mesh", [slow(2), 3])
def test_a_table_that_the_first_call_makes(mesh: DeviceMesh) -> None:
    for where, use in [*((where, "") for where in PLACES), *(("object", use) for use in USES[:3])]:
        first, *others = calls(mesh, where, use)
        assert first, where
        assert all(sent == first for sent in others), (where, use)


def test_a_table_whose_numbers_are_read(mesh: DeviceMesh) -> None:
    """The first call is recorded, the others follow its record."""
    calls(mesh, "object", "numpy")
    calls(mesh, "closure", "tolist")


@pytest.mark.parametrize("use", ["", *USES])
def test_a_tensor_without_data_is_named_in_any_role(mesh: DeviceMesh, use: str) -> None:
    forget()
    model = dsp.parallelize(Keeper("unreachable", use), mesh, {"": "x=b s c"})
    said = ""
    try:
        model(torch.randn(1, 11, C))
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    finally:
        forget()
    reads = use in ("numpy", "tolist")  # planned from its first call, or said
    assert (reads and not said) or "got a tensor without data" in said
    assert reads or said.startswith("GlueError: "), said


class Counter:
    def __init__(self) -> None:
        self.calls, self.total = 0, torch.zeros(())


class Counting(nn.Module):
    """It changes whatever it can reach."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.counter, self.seen = nn.Linear(C, C), Counter(), list[int]()

    def forward(self, x: Tensor) -> Tensor:
        self.counter.calls += 1
        self.counter.total += 1
        self.counter.total = self.counter.total.clone()
        self.seen.append(x.shape[1])
        TABLES[str(len(TABLES))] = x
        return self.inner(x) * random.random() * np.random.rand()


def state(model: Counting) -> Any:
    counter = model.counter
    return counter.calls, float(counter.total), list(model.seen), len(TABLES), random.getstate(), np.random.rand()


def test_plan_and_discover_leave_no_trace() -> None:
    forget()
    model, x = Counting(), torch.randn(2, 6, C)
    for look in (
        lambda: dsp.plan(model, (x,), size=2, stages={"": "x=b s c"}),
        lambda: dsp.discover(model, (x,), progress=False),
    ):
        np.random.seed(0)
        before = state(model)
        np.random.seed(0)
        look()
        assert state(model) == before


def test_check_leaves_no_trace(mesh: DeviceMesh) -> None:
    """Its tables were those of a copy in float64."""
    forget()
    assert dsp.check(Keeper("cache"), (torch.randn(2, 6, C),), mesh=mesh, stages={"": "x=b s c"}).ok
    assert not cached.cache_info().currsize
    forget()


class Bare:
    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


def test_a_world_is_put_back() -> None:
    held: dict[str, Any] = {"list": [1, 2], "set": {1}, "object": Rope(), "bare": Bare(), "slots": Slotted()}
    numbers = torch.arange(3.0)
    held["numbers"] = numbers
    with World(held, data=True):
        held["list"].append(3)
        held["set"].clear()
        held["object"].calls = held["object"].other = 5
        held["slots"].table = numbers
        held["new"] = held.pop("bare")
        numbers += 1
    assert held["list"] == [1, 2]
    assert held["set"] == {1}
    assert vars(held["object"]) == {"table": None, "calls": 0}
    assert held["slots"].table is None
    assert list(held) == ["list", "set", "object", "bare", "slots", "numbers"]
    assert numbers.tolist() == [0, 1, 2]


class Collecting(nn.Module):
    """Casts where garbage is collected, and only there."""

    def forward(self, x: Tensor) -> Tensor:
        return x.double() if gc.isenabled() else x * 2


def test_no_garbage_is_collected_while_a_forward_is_planned() -> None:
    plan = dsp.plan(Collecting(), torch.randn(1, 6, C), size=2, stages={"": "x=b s c"}, gather_output=False)
    assert [node.name for node in plan.record.nodes if node.kind == "operation"] == ["mul"]


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_collected_afterwards_as_before(enabled: bool) -> None:
    try:
        (gc.enable if enabled else gc.disable)()
        with uncollected():
            assert not gc.isenabled()
        assert gc.isenabled() == enabled
    finally:
        gc.enable()
