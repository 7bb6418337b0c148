"""configs/paper.yaml against tables 4, 6 and 7 of the paper: every row of the page is one, every plan its formula."""

import re

import pytest
import torch

import dsp
from tests.support.paths import ROOT
from tests.support.slow import keep_short, slow
from zoo.training import config as cfg
from zoo.training.task_lookup import create_task

PATCHES = 4096  # the spatial sequence of every row

PAGE = (ROOT / "docs/paper.md").read_text()
# table, GPUs, size, frames, sp, dp, batch a data-parallel group: as the page has them from the paper
ROWS = re.findall(r"^\| (\d)[^|]* \| (\d+) \| (\w+) \| \[(\d+)x128x128\] \| (\d+) \| (\d+) \| (\d+) \|$", PAGE, re.M)
NAMES = ["-".join(row) for row in ROWS]
SIZES = {"720m": (28, 1152, 16), "3b": (36, 2048, 32)}  # layers, hidden, heads; the paper prints 2038


def arguments(name):
    _, _, size, frames, sp, dp, batch = name.split("-")
    own = [f"model.size={size}", f"data.buckets=[{frames}x128x128]", f"parallel.sp={sp}", f"parallel.dp_shard={dp}"]
    return [str(ROOT / "configs/paper.yaml"), *own, f"train.batch={batch}", "dry_run=true"]


def chunk(length, ranks):
    return -(-length // ranks)


def test_the_page_has_every_row():
    assert [sum(row[0] == table for row in ROWS) for table in "467"] == [8, 4, 15]
    assert len(set(NAMES)) == len(ROWS)


@pytest.mark.parametrize("name", keep_short(NAMES, only=["4-128-720m-128-2-64-1", "6-8-3b-16-8-1-1"]))
def test_a_row(name):
    """A row of the table and its plan: a switch a block, M/N bytes of which (N-1)/N go elsewhere."""
    table, gpus, size, *numbers = name.split("-")
    frames, sp, dp, batch = map(int, numbers)
    config = cfg.load(arguments(name))
    depth, hidden, heads = SIZES[size]
    assert (config.parallel.sp, config.parallel.dp_shard, config.parallel.dp_replicate) == (sp, dp, 1)
    assert sp * dp == int(gpus)
    assert table != "4" or gpus == "128"
    assert (config.model.size, config.train.batch, config.train.precision) == (size, batch, "bf16")
    assert config.eval.clips % dp == 0  # or the run would not start
    task = create_task(config)
    with torch.device("meta"):
        model = task.model()
        objective = task.objective(model)
        plan = dsp.plan(objective, kwargs=task.example(objective), size=sp, dtype=torch.bfloat16, gather_output=False)
    assert task.tokens == frames * PATCHES
    assert (model.config.depth, model.config.hidden, model.config.heads) == (depth, hidden, heads)
    switches = 2 * depth - 1 if sp > 1 else 0
    assert sum(switch.bytes > 0 for switch in plan.switches) == switches
    one = batch * chunk(frames, sp) * (PATCHES - chunk(PATCHES, sp)) * hidden * 2
    assert plan.bytes["forward"] == plan.bytes["backward"] == switches * one
    assert plan.bytes["recompute"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["4-128-720m-128-2-64-1", slow("4-128-3b-1024-32-4-1")])
def test_a_dry_run_finds_the_papers_sp(name, capsys, monkeypatch):
    """The paper took the smallest sp that fits an H100; so does the estimate of memory."""
    monkeypatch.syspath_prepend(str(ROOT))
    import train

    assert train.main(arguments(name)) == 0
    out = capsys.readouterr().out
    _, _, _, frames, sp, dp, _ = name.split("-")
    assert f"mesh dp_replicate=1 x dp_shard={dp} x sp={sp} = 128 ranks" in out
    assert f"batch 1 x {frames} frames" in out
    assert f"the smallest sp that fits 80 GiB a device is {sp}: " in out
    assert "sequence parallelism sends" in out
