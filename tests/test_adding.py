"""docs/adding.md, word for word: its blocks become files, its lines are added, its configurations train."""

import sys
import types
from pathlib import Path

import pytest
from runs import metrics
from slow import slow
from test_docs import blocks

import zoo.registry
from zoo.training import config as cfg
from zoo.training.tasks import video

PAGE = Path(__file__).parents[1] / "docs/adding.md"
CODE = [block.text for block in blocks(PAGE) if block.language == "python"]
MODEL, _, DATA, OPTIONS, TASK, SHOW = CODE
CONFIGS = [block.text for block in blocks(PAGE) if block.language == "yaml"]


def module(monkeypatch, name, text, **names):
    made = types.ModuleType(name)
    monkeypatch.setitem(sys.modules, name, made)
    vars(made).update(names)
    exec(compile(text, name, "exec"), vars(made))
    return made


@pytest.mark.parametrize("what", ["model", slow("data"), slow("task")])
def test_it_trains(trainer, tmp_path, monkeypatch, what):
    config = tmp_path / f"{what}.yaml"
    config.write_text(CONFIGS[["model", "data", "task"].index(what)])
    if what == "model":
        assert '"convtime": "zoo.video.convtime:ConvTime",' in PAGE.read_text()
        module(monkeypatch, "zoo.video.convtime", MODEL)
        monkeypatch.setitem(zoo.registry.MODELS, "convtime", "zoo.video.convtime:ConvTime")
    elif what == "data":
        found = module(monkeypatch, "zoo.data.squares", DATA)
        options = module(monkeypatch, "options", OPTIONS, Squares=found.Squares)
        monkeypatch.setitem(video.DATA, "squares", options.SquaresData)
        monkeypatch.setitem(cfg.TASKS, "squares", "video")
    else:
        task = module(monkeypatch, "zoo.training.tasks.next", TASK)
        module(monkeypatch, "zoo.training.show.next", SHOW, **vars(task))
        monkeypatch.setitem(cfg.TASKS, "next_digits", "next")
    assert trainer.main([str(config), f"runs_dir={tmp_path}", "eval.every=2", "eval.clips=2", "log.every=1"]) == 0
    directory = tmp_path / what
    assert list(metrics(directory, "loss")) == [1, 2]
    assert list(metrics(directory, "val_loss")) == [2]
    assert (directory / "samples" / "step-00000002.gif").is_file()
