"""parallel=auto: the mesh and the method of the shortest step that fits, for a step that stays the same."""

import shutil

import pytest

import dsp
from dsp.embedded import timing
from tests.support.runs import Runs, alike, run_here
from zoo.training import UserError, auto
from zoo.training import config as cfg
from zoo.training.model import make_plan, without_weights
from zoo.training.task_lookup import create_task

STAGES = (
    "train.checkpoint_activations=stages",
    "parallel.save_exchanges=true",
)  # one way to recompute, a fourth of the plans
SLOW, FAST = dsp.Link("slow", 1e-2, 1e6), dsp.Link("fast", 1e-9, 1e15)


def hardware(link, memory=1e12):
    return dsp.Hardware(link, memory, flops=1e9)


def loaded(run, *overrides):
    return cfg.load(run.arguments("parallel=auto", *overrides))


def test_where_links_are_slow_groups_of_ranks_take_other_samples(run):
    """A step has the samples of 4 accumulated batches, on any mesh."""
    config = loaded(run, "train.accumulation=2", "parallel.dp_shard=2", *STAGES)
    choice = auto.choose(config, 4, hardware(SLOW))
    assert (choice.dp, choice.sp, choice.method) == (4, 1, "dsp")
    chosen = choice.applied(config)
    assert (chosen.train.accumulation, chosen.parallel.dp_shard, chosen.parallel.auto) == (1, 4, False)
    assert auto.batches_of(chosen) == auto.batches_of(config) == 4
    assert choice.table.splitlines()[0] == "parallel=auto takes the first: dp_shard=4 sp=1"


def test_a_single_batch_is_shared_by_all_ranks(run):
    choice = auto.choose(loaded(run, *STAGES), 3, hardware(FAST))
    assert (choice.dp, choice.sp) == (1, 3)
    assert {line.split()[3] for line in choice.table.splitlines()[2:]} >= {"dsp", "ulysses"}


CONTENDED = dsp.Hardware(dsp.Link("slow", 1e-4, 1e5), 1e12, 1e8, node=2, busy=0.3)  # fp8 saves time, and so do pieces
LEFT = ("parallel.wire=auto", "parallel.route=auto", "parallel.overlap=auto")


def test_open_options_are_chosen_with_the_mesh(run, monkeypatch):
    """A format, pieces and a route, where that saves time, are written into the configuration."""
    monkeypatch.setattr(timing, "METHODS", ["dsp"])
    config = loaded(run, *STAGES, *LEFT)
    slow = dsp.Hardware(SLOW, 1e12, 1e9, network=dsp.Link("far", 1e-2, 1e5, message=1e-1), node=2)
    choice = auto.choose(config, 4, slow)
    chosen = choice.applied(config).parallel
    assert (chosen.sp, chosen.wire, chosen.route) == (4, "fp8", "auto")  # large switches are direct
    first, head, row = choice.table.splitlines()[:3]
    assert first.startswith("parallel=auto takes the first: dp_shard=1 sp=4 wire=fp8 route=auto overlap=")
    assert "switches" in head
    assert "fp8, hierarchical" in row
    fast = auto.choose(config, 2, hardware(FAST)).applied(config).parallel
    assert (fast.wire, fast.route, fast.overlap) == ("same", "direct", None)
    hidden = auto.choose(config, 2, CONTENDED).applied(config).parallel
    assert (hidden.wire, hidden.route, hidden.overlap) == ("fp8", "direct", "auto")
    given = auto.choose(loaded(run, *STAGES, "parallel.wire=bf16", "parallel.overlap=2"), 2, hardware(SLOW))
    assert (given.sent, given.applied(config).parallel.wire) == ({}, "auto")  # what the user names stays
    assert auto.choose(loaded(run, *STAGES), 2, hardware(SLOW)).applied(loaded(run)).parallel.wire == "same"


def test_fewer_bits_are_left_to_parallel_auto_alone(run):
    with pytest.raises(UserError, match=r"parallel\.wire='auto' is not accepted here: .*parallel=auto"):
        cfg.load(run.arguments("parallel.wire=auto"))


def chosen_here(mesh, arguments):
    """On every rank: a run by parallel=auto on links that are slow, as if they had been measured so."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto, "measured", lambda *_: CONTENDED)
        patch.setattr(timing, "METHODS", ["dsp"])
        return run_here(mesh, arguments)


@pytest.mark.slow
def test_a_run_trains_what_was_chosen(trainer, whole_world, tmp_path):
    """Every rank sends the bytes of the plan of the configuration that the run wrote down."""
    runs = Runs(trainer, tmp_path)
    found = whole_world(chosen_here, 2, runs.arguments("parallel=auto", *STAGES, *LEFT, "name=chosen"))
    config = cfg.load([str(tmp_path / "runs/chosen/config.yaml")])
    assert (config.parallel.sp, config.parallel.wire, config.parallel.overlap) == (2, "fp8", "auto")
    task = create_task(config)
    plan = make_plan(config, task, without_weights(config, task)[1], 2, overlap=CONTENDED)
    assert any(o.pieces > 1 for o in plan.overlaps)
    most = [max(phase) for phase in zip(*(steps[0] for steps in found))]
    assert most[:2] == [pytest.approx(plan.bytes[phase], abs=64) for phase in ("forward", "backward")]


def test_nothing_fits(run, monkeypatch):
    monkeypatch.setattr(timing, "METHODS", ["dsp"])
    with pytest.raises(UserError, match=r"nothing fits .* a rank on 2 ranks; the most economical mesh needs"):
        auto.choose(loaded(run, *STAGES), 2, hardware(SLOW, 1000))


@pytest.mark.slow
def test_a_model_beyond_memory_is_recomputed_or_sharded_further(run, monkeypatch):
    monkeypatch.setattr(timing, "METHODS", ["dsp"])
    config = loaded(run, "train.accumulation=2")
    free = auto.candidates(config, 2, hardware(SLOW))
    held = {(c.timing.dp, c.timing.sp, c.timing.method, c.recomputed): c.timing.held for c in free}
    short = held[2, 1, "dsp", "none"] - 1
    choice = auto.choose(config, 2, hardware(SLOW, short))
    assert held[choice.dp, choice.sp, choice.method, choice.recomputed] <= short
    assert choice.recomputed != "none" or choice.sp == 2


def test_a_dry_run_measures_nothing(run, capsys, monkeypatch):
    monkeypatch.setattr(timing, "METHODS", ["dsp"])
    monkeypatch.setenv("WORLD_SIZE", "2")
    run("parallel=auto", "dry_run=true", expect=2)
    assert "name the hardware, as in hardware.device=h100" in capsys.readouterr().err
    run("parallel=auto", *STAGES, "dry_run=true", "hardware.device=h100")
    assert capsys.readouterr().out.startswith("parallel=auto takes the first: dp_shard=1 sp=2\n")


def begun_here(mesh, arguments):
    """On every rank: a run by parallel=auto, of one method, as other tests compare the methods."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "METHODS", ["dsp"])
        return run_here(mesh, arguments)


def resumed_here(mesh, arguments):
    """On every rank: a resumption in which nothing may be measured or chosen."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto, "measured", None)
        patch.setattr(auto, "choose", None)
        return run_here(mesh, arguments)


@pytest.mark.slow
def test_a_run_on_what_was_chosen_is_the_run_of_one_process_and_keeps_it(trainer, whole_world, tmp_path):
    runs = Runs(trainer, tmp_path)
    arguments = runs.arguments("parallel=auto", *STAGES, "train.accumulation=2", "name=auto")
    whole_world(begun_here, 2, arguments)
    directory, before = tmp_path / "runs/auto", tmp_path / "runs/before"
    alike(runs("train.accumulation=2"), directory)

    shutil.copytree(directory, before)
    shutil.rmtree(directory / "checkpoints/step-00000004")
    whole_world(resumed_here, 2, [*arguments, "resume=true"])
    alike(before, directory, tolerance=0)

    had, config = cfg.load([str(directory / "config.yaml")]), cfg.load([*arguments, "resume=true"])
    previous = auto.previous_choice(config, 2)
    assert (previous.dp, previous.sp, previous.method) == (had.parallel.dp_shard, had.parallel.sp, had.parallel.method)
    assert previous.recomputed == had.train.checkpoint_activations
    assert auto.previous_choice(config, 4) is None  # on other ranks it chooses again
    assert auto.previous_choice(cfg.load(arguments), 2) is None
    shutil.rmtree(directory / "checkpoints")
    assert auto.previous_choice(config, 2) is None  # a run that never came so far may have run out of memory
