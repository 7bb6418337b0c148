"""configs/paper against tables 4, 6 and 7 of the paper: every file is a row, and every plan is the paper's formula."""

from pathlib import Path

import pytest
import torch
from slow import slow, slow_but

import dsp
from zoo.training import config as cfg

ROOT = Path(__file__).parents[1]
PATCHES = 4096  # the spatial sequence of every row

# name: (size, batch a data-parallel group, temporal sequence, sp, dp), as the tables print them
TABLE_4 = {
    "table4-720m-0.5m": ("720m", 1, 128, 2, 64),
    "table4-720m-1m": ("720m", 1, 256, 4, 32),
    "table4-720m-2m": ("720m", 1, 512, 8, 16),
    "table4-720m-4m": ("720m", 1, 1024, 16, 8),
    "table4-3b-0.5m": ("3b", 1, 128, 4, 32),
    "table4-3b-1m": ("3b", 1, 256, 8, 16),
    "table4-3b-2m": ("3b", 1, 512, 16, 8),
    "table4-3b-4m": ("3b", 1, 1024, 32, 4),
}
TABLE_6 = {
    "table6-720m-intra": ("720m", 1, 64, 8, 1),
    "table6-720m-inter": ("720m", 1, 256, 64, 1),
    "table6-3b-intra": ("3b", 1, 16, 8, 1),
    "table6-3b-inter": ("3b", 1, 128, 64, 1),
}
TABLE_7 = {
    "table7-720m-intra-1": ("720m", 1, 64, 1, 1),
    "table7-720m-intra-2": ("720m", 2, 64, 2, 1),
    "table7-720m-intra-4": ("720m", 4, 64, 4, 1),
    "table7-720m-intra-8": ("720m", 8, 64, 8, 1),
    "table7-720m-inter-8": ("720m", 1, 256, 8, 1),
    "table7-720m-inter-16": ("720m", 2, 256, 16, 1),
    "table7-720m-inter-32": ("720m", 4, 256, 32, 1),
    "table7-3b-intra-1": ("3b", 1, 16, 1, 1),
    "table7-3b-intra-2": ("3b", 2, 16, 2, 1),
    "table7-3b-intra-4": ("3b", 4, 16, 4, 1),
    "table7-3b-intra-8": ("3b", 8, 16, 8, 1),
    "table7-3b-inter-8": ("3b", 1, 128, 8, 1),
    "table7-3b-inter-16": ("3b", 2, 128, 16, 1),
    "table7-3b-inter-32": ("3b", 4, 128, 32, 1),
    "table7-3b-inter-64": ("3b", 8, 128, 64, 1),
}
ROWS = TABLE_4 | TABLE_6 | TABLE_7
SIZES = {"720m": (28, 1152, 16), "3b": (36, 2048, 32)}  # layers, hidden, heads; the paper prints 2038


def load(name):
    return cfg.load([str(ROOT / f"configs/paper/{name}.yaml"), "dry_run=true"])


def chunk(length, ranks):
    return -(-length // ranks)


def test_every_row_has_a_file_and_every_file_a_row():
    assert sorted(path.stem for path in (ROOT / "configs/paper").glob("*")) == sorted(ROWS)


@pytest.mark.parametrize(
    "name", slow_but(ROWS, "table4-720m-0.5m", "table6-3b-intra")
)
def test_a_row(name):
    """What the file asks for, and what its plan sends: a switch a block, M/N bytes of which (N-1)/N go elsewhere."""
    size, batch, frames, sp, dp = ROWS[name]
    config = load(name)
    depth, hidden, heads = SIZES[size]
    assert (config.parallel.sp, config.parallel.dp_shard, config.parallel.dp_replicate) == (sp, dp, 1)
    assert name not in TABLE_4 or sp * dp == 128
    assert name not in TABLE_7 or name.endswith(f"-{sp}")
    assert (config.model.size, config.train.batch, config.train.precision) == (size, batch, "bf16")
    assert config.eval.clips % dp == 0  # or the run would not start
    task = cfg.create_task(config)
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


@pytest.mark.parametrize("name", ["table4-720m-0.5m", slow("table4-3b-4m")])
def test_a_dry_run_finds_the_papers_sp(name, capsys, monkeypatch):
    """The paper took the smallest sp that fits an H100; so does the estimate of memory."""
    monkeypatch.syspath_prepend(str(ROOT))
    import train

    assert train.main([str(ROOT / f"configs/paper/{name}.yaml"), "dry_run=true"]) == 0
    out = capsys.readouterr().out
    _, _, frames, sp, dp = ROWS[name]
    assert f"mesh dp_replicate=1 x dp_shard={dp} x sp={sp} = 128 ranks" in out
    assert f"batch 1 x {frames} frames" in out
    assert f"the smallest sp that fits 80 GiB a device is {sp}: " in out
    assert "sequence parallelism sends" in out
