"""dsp.plan: on one process, without running the model; its bytes are those a run then moves."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

import dsp
from dsp.planner import Infeasible
from tests.support import toys
from tests.support.parity import wrap_checkpoints


def test_a_stage_with_no_dim_left_is_shown_with_its_price() -> None:
    toy = toys.make("Global")
    plan = dsp.plan(toy, kwargs=toys.inputs("Global", 1, 6, 6), size=2, gather_output=False)
    row = next(r for r in plan.stages if r.name == "mix")
    m = 6 * 6 * toys.C * 8
    assert row.layout is None
    assert row.bytes == m // 2
    assert [s.kind for s in plan.switches] == ["gather"]
    assert "run whole on every rank" in plan.text()


def test_memory_changes_the_plan_or_refuses() -> None:
    toy = toys.make("Pair")
    kwargs = toys.inputs("Pair", 1, 8, 16)
    free = dsp.plan(toy, kwargs=kwargs, size=2, gather_output=False)
    tight = dsp.plan(toy, kwargs=kwargs, size=2, memory=free.peak, gather_output=False)
    assert tight.bytes == free.bytes
    with pytest.raises(Infeasible, match=r"no plan fits .* a rank.*more than 2 ranks"):
        dsp.plan(toy, kwargs=kwargs, size=2, memory=1000, gather_output=False)
    with pytest.raises(ValueError, match="number of ranks"):
        dsp.plan(toy, kwargs=kwargs, size=0, gather_output=False)


def test_size_one_costs_nothing() -> None:
    plan = dsp.plan(toys.make("Grid"), kwargs=toys.inputs("Grid", 1, 6, 6), size=1, gather_output=False)
    assert plan.bytes == {"forward": 0, "backward": 0, "recompute": 0}


def test_tensors_that_switch_together_share_a_collective() -> None:
    """Out of one stage, and from two stages into one; not where checkpointing would repeat it."""
    model, kwargs = toys.make("Streams"), toys.inputs("Streams", 1, 8, 8)
    plan = dsp.plan(model, kwargs=kwargs, size=2, gather_output=False)
    assert [(s.before, s.shared) for s in plan.switches[:5]] == [
        ("time.0", False), ("time.0", True), ("time.0", True), ("space.1", False), ("space.1", True),
    ]  # fmt: skip
    assert [s.tensor.split("[")[0] for s in plan.switches[-2:]] == ["left", "right"]
    assert [s.shared for s in plan.switches[-2:]] == [False, True]
    assert plan.calls == {"forward": 5, "backward": 5, "recompute": 0}
    assert "12 switches, in 5 collectives" in plan.text()
    wrap_checkpoints(model)
    stages = {k.replace(".*", ".*.inner"): v for k, v in type(model).stages.items()}
    plan = dsp.plan(model, kwargs=kwargs, size=2, stages=stages, gather_output=False)
    assert plan.calls == {"forward": 6, "backward": 6, "recompute": 0}


def test_an_input_that_arrives_sharded_is_planned_from_where_it_lies() -> None:
    toy, kwargs = toys.make("Grid"), toys.inputs("Grid", 1, 6, 6)
    here, there = (dsp.plan(toy, kwargs=kwargs, size=2, gather_output=False, given={"x": Shard(d)}) for d in (1, 2))
    assert here.bytes != there.bytes
    assert min(sum(plan.bytes.values()) for plan in (here, there)) >= sum(
        dsp.plan(toy, kwargs=kwargs, size=2, gather_output=False).bytes.values()
    )
    with pytest.raises(
        ValueError,
        match=r"given= has 'y', which is not a tensor argument.*; its tensor arguments are x, cond",
    ):
        dsp.plan(toy, kwargs=kwargs, size=2, given={"y": Shard(1)})


def test_repeated_blocks_and_passes_over_them_are_shown_once() -> None:
    class Passes(nn.Module):
        stages = {"": "x=b t s c", "blocks.*": "b t [s c]", "last": "b [t] s [c]"}

        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.last = nn.ModuleList(nn.Linear(4, 4) for _ in range(5)), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                for block in self.blocks:
                    x = block(x)
                x = self.last(x)
            return x

    plan = dsp.plan(Passes(), torch.zeros(1, 4, 6, 4), size=2, gather_output=False)
    shown = [re.split(r"  +", line)[:2] for line in plan.text().splitlines() if line.startswith(("blocks", "last"))]
    times = [int(what[1:]) if what[0] == "×" else 1 for _, what in shown]
    assert sum(times) == len(plan.stages) == 18
    assert shown == [["blocks.*", "×5"], ["last", "×2"], ["blocks.*", "×2"], ["blocks.*", "×8"], ["last", "t c"]]
