"""docs/adding.md, word for word: its blocks become files, its lines are added, its configurations train."""

import sys
import types
from pathlib import Path

import pytest
from runs import metrics
from slow import slow
from test_docs import blocks

import zoo.registry
from zoo.data.sampling import VideoDataset
from zoo.training import UserError, complete
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


def lacking(name, text, take):
    """The names in the lines of the error, which is raised before anything is used."""
    with pytest.raises(UserError, match=name) as error:
        take(text)
    lines = str(error.value).split("\n")[1:]
    assert all(": " in line and len(line.split(": ")[1]) > 5 for line in lines)
    return [line.split(":")[0].strip() for line in lines]


@pytest.mark.parametrize("field", ["channels", "fps", "height", "datasets"])
def test_options_of_a_data_set_that_lack_something_say_what(monkeypatch, field):
    text = "\n".join(line for line in OPTIONS.split("\n") if not line.strip().startswith((f"{field}:", "return")))
    text = text.replace("def datasets", "def others" if field == "datasets" else "def datasets") + "        return\n"

    def take(text):
        options = module(monkeypatch, "options", text)
        monkeypatch.setitem(video.DATA, "squares", options.SquaresData)
        monkeypatch.setitem(cfg.TASKS, "squares", "video")
        cfg.create_task(cfg.defaults("squares"))

    assert lacking("SquaresData, the options of data.name=squares, lacks", text, take) == [field]


@pytest.mark.parametrize("name", ["frames", "shape", "num_classes", "clip", "__len__"])
def test_a_data_set_that_lacks_something_says_what(monkeypatch, name):
    text = DATA.replace(f"def {name}(", "def other(") if name in ("clip", "__len__") else DATA
    made = module(monkeypatch, "squares", text).Squares("train", 5, 6)
    if name in ("frames", "shape"):
        delattr(made, name)
    if name == "num_classes":
        del type(made).num_classes
    assert lacking("Squares lacks", made, lambda made: complete(made, VideoDataset, "Squares")) == [name]


@pytest.mark.parametrize("name", ["Eval", "describe", "write"])
def test_a_task_that_lacks_something_says_what(monkeypatch, name):
    text, show = TASK.replace("class Eval", "class Other").replace("def describe", "def other"), SHOW
    if name == "Eval":
        text = text.replace("def other", "def describe")
    else:
        text = text.replace("class Other", "class Eval")
    if name == "write":
        text, show = TASK, SHOW.replace("def write", "def other")

    def take(text):
        task = module(monkeypatch, "zoo.training.tasks.next", text)
        module(monkeypatch, "zoo.training.show.next", show, **vars(task))
        monkeypatch.setitem(cfg.TASKS, "next_digits", "next")
        cfg.create_show(cfg.create_task(cfg.defaults("next_digits")))

    assert lacking("lacks", text, take) == [name]
