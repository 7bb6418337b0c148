"""Where the time of a step goes."""

import gc
import json
import weakref

import pytest
import torch
import torch.distributed as dist

from tests.support.runs import metrics
from zoo.training import UserError
from zoo.training.profile import KINDS, Profiler, covered, kind_of, shares, wanted
from zoo.training.sections import Profile


def test_an_instant_belongs_to_one_kind():
    assert covered([(0, 4), (2, 3), (3, 6), (8, 9)]) == 7
    found = {"step": [(0, 100)], "data": [(0, 10)], "switches": [(5, 30)], "weights": [(50, 60)], "compute": [(0, 80)]}
    parts = shares(found)
    assert parts == pytest.approx({"data": 0.1, "switches": 0.2, "weights": 0.1, "compute": 0.4, "host": 0.2})
    assert sum(shares({"compute": [(0, 5)]}).values()) == 0  # no step was seen
    assert list(parts) == list(KINDS)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("dsp::switch", "switches"), ("ncclDevKernel_SendRecv(x)", "switches"), ("dsp: data", "data"),
        ("FSDP::all_gather", "weights"), ("FSDP::pre_forward (blocks.0)", ""), ("c10d::allreduce_", "weights"),
        ("ncclDevKernel_ReduceScatter_Sum_f32", "weights"), ("aten::mm", "compute"), ("ampere_sgemm_128x64", "compute"),
        ("cudaLaunchKernel", ""), ("dsp: step", ""),
    ],
)  # fmt: skip
def test_kinds(name, kind):
    assert kind_of(name) == kind


def test_ranges_of_steps():
    assert wanted("10:13") == (10, 13)
    assert wanted("7") == (7, 7)
    for wrong in ("13:10", "0:3", "a", ":4", "1:2:3"):
        with pytest.raises(UserError, match="expected FIRST:LAST"):
            wanted(wrong)


@pytest.mark.parametrize("options", [Profile(every=1), Profile(steps="2:2")], ids=["shares", "trace"])
def test_a_profile_leaves_its_events_to_nobody(tmp_path, options, monkeypatch):
    """Not to a cycle, either: Python looks for those once in hours, and each such profile of a run kept 12 MiB."""
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    profiler, made = Profiler(options, tmp_path, torch.device("cpu")), []
    plain = profiler._begin

    def begin(shapes):
        found = plain(shapes)
        made.extend((weakref.ref(found), weakref.ref(found.profiler)))
        return found

    monkeypatch.setattr(profiler, "_begin", begin)
    gc.collect()
    gc.disable()
    try:
        with profiler.step(2):
            torch.ones(3).sin()
    finally:
        gc.enable()
    assert made
    assert [found() for found in made] == [None, None]


def test_a_trace_of_some_steps(run, capsys):
    few = "train.steps=3", "sample.every=0", "eval.every=0", "checkpoint.every=0"
    plain = run("name=plain", *few)
    directory = run("name=traced", *few, "profile.every=1", "profile.steps=2:3", "profile.memory=true")
    out = capsys.readouterr().out
    assert metrics(directory, "loss", "grad_norm") == metrics(plain, "loss", "grad_norm")
    assert not metrics(plain, "comm_share")
    kept = metrics(directory, *(f"{kind}_share" for kind in KINDS))
    assert list(kept) == [1, 2, 3]
    for parts in kept.values():
        assert sum(parts) == pytest.approx(1)
        assert parts[3] > 0.2  # it computes
    trace = json.loads((directory / "profile" / "rank-0.json").read_text())
    names = [event.get("name") for event in trace["traceEvents"]]
    assert names.count("dsp: step") == 2
    assert "of a step: data " in out
    assert "open it in ui.perfetto.dev" in out
    memory = json.loads((directory / "profile" / "memory-rank-0.json").read_text())
    assert memory[0]["bytes"] > 0
