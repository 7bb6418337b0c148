"""docs/adding.md and adding-data.md: their blocks become files of a folder of their own, their configurations train."""

from __future__ import annotations

import os
import re
import sys
from types import SimpleNamespace

import pytest
import torch

from tests.support.pages import blocks
from tests.support.paths import ROOT
from tests.support.runs import launched, metrics
from tests.support.slow import long, slow
from zoo.data.clips import Clips
from zoo.data.sampling import VideoDataset
from zoo.plugins import load_plugin
from zoo.training import UserError, complete
from zoo.training import config as cfg
from zoo.training.model import without_weights
from zoo.training.outputs.video import Show
from zoo.training.task_lookup import create_show, create_task
from zoo.training.tasks.conditions import Lookups

BLOCKS = [block for name in ("adding", "adding-data") for block in blocks(ROOT / f"docs/{name}.md")]
MODEL, DATA, TASK = (block.text for block in BLOCKS if block.language == "python")
CONFIGS = dict(zip(("model", "data", "task"), (b.text for b in BLOCKS if b.language == "yaml"), strict=True))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the files of the page, which is the current one; they are forgotten afterwards."""
    for name, text in (("convtime", MODEL), ("squares", DATA), ("nextframes", TASK)):
        (tmp_path / f"{name}.py").write_text(text)
    for name, text in CONFIGS.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    for name in ("convtime", "squares", "nextframes"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("what", ["data", slow("model"), slow("task")])
def test_it_trains(trainer, folder, what):
    more = ["eval.every=2", "eval.clips=2", "log.every=1"]
    assert trainer.main([f"{what}.yaml", f"runs_dir={folder}", *more]) == 0
    directory = folder / what
    assert list(metrics(directory, "loss")) == [1, 2]
    assert list(metrics(directory, "val_loss")) == [2]
    assert (directory / "samples" / "step-00000002.gif").is_file() == (what != "task")


@pytest.mark.slow
@pytest.mark.parametrize("what", ["task"])
def test_it_trains_on_two_ranks_as_a_user_starts_it(trainer, folder, what):
    """The same losses as on one; from a folder that is not the checkout."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    arguments = [f"{what}.yaml", "log.every=1", "eval.every=2"]
    assert trainer.main([*arguments, "name=1"]) == 0
    command = [sys.executable, "-m", "dsp.cluster.launch", "--nproc-per-node", "2", str(ROOT / "train.py")]
    done = launched([*command, *arguments, "name=2"], cwd=folder, env=env)
    assert not done.returncode, done.stderr
    one, two = ([v for (v,) in metrics(folder / "runs" / str(n), "loss").values()] for n in (1, 2))
    assert len(one) == 2
    assert two == pytest.approx(one, rel=1e-5)
    if what == "model":
        command = [sys.executable, str(ROOT / "infer.py"), "runs/1", "--label", "3", "7"]
        done = launched(command, cwd=folder, env=env)
        assert not done.returncode, done.stderr
        assert ".gif" in done.stdout


def test_a_check_needs_ranks_and_stages(trainer, folder, capsys):
    for more, said in (
        ([], "start two or more"),
        (["parallel.method=ulysses"], "which parallel.method=ulysses does not"),
    ):
        assert trainer.main(["model.yaml", "check=true", *more]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [slow(True), long(False)])
def test_a_model_is_checked(folder, wrong):
    if wrong:
        (folder / "convtime.py").write_text(MODEL.replace('"time": "b [t] s [c]', '"time": "b t s [c]'))
    start = [sys.executable, "-m", "dsp.cluster.launch", "--nproc-per-node", "2" if wrong else "3"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = launched([*start, str(ROOT / "train.py"), "model.yaml", "check=true"], cwd=folder, env=env)
    if wrong:
        assert done.returncode == 1
        assert "check over 2 ranks in float64: NOT OK" in done.stdout
        assert "model.time" in done.stdout
    else:
        [shown] = [block.text for block in BLOCKS if block.text.startswith("check over")]
        numbers = re.compile(r"\d\.\de[+-]\d\d|\([\w .]+\)\n")
        assert numbers.sub("", done.stdout) == numbers.sub("", shown)
    assert not (folder / "runs").exists()


def error_of(*arguments):
    with pytest.raises(UserError) as error:
        create_show(create_task(cfg.load(arguments))).ready()
    return str(error.value)


@pytest.mark.parametrize("field", ["channels", "fps", "height", "datasets"])
def test_options_of_a_data_set_that_lack_something_say_what(folder, field):
    lines = [line for line in DATA.split("\n") if not line.strip().startswith(f"{field}:")]
    text = "\n".join(lines).replace("def datasets", "def others" if field == "datasets" else "def datasets")
    (folder / "squares.py").write_text(text)
    said = error_of("data.yaml")
    assert "Squares, the options of data.name=squares:Squares, lacks" in said
    assert [line.split(":")[0].strip() for line in said.split("\n")[1:]] == [field]


@pytest.mark.parametrize("name", ["open", "objective", "samples"])
def test_a_task_that_lacks_something_says_what(folder, name):
    (folder / "nextframes.py").write_text(TASK.replace(f"def {name}(self", "def other(self"))
    said = error_of("task.yaml")
    assert "Task of nextframes, lacks:" in said
    lines = said.split("\n")[1:]
    assert [line.split(":")[0].strip() for line in lines if line.startswith("  ") and ":" in line] == [name]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model.yaml", "model.name=nowhere:Model"], "there is no module 'nowhere', neither installed nor in"),
        (["model.yaml", "model.name=convtime:Conv"], "convtime has no 'Conv'; classes in it: Block, Config, ConvTime"),
        (["model.yaml", "model.name=convtime:Config"], "expected a torch.nn.Module, and beside it a dataclass Config"),
        (["model.yaml", "model.name=conv-time:X"], "'conv-time:X' cannot be imported by Python"),
        (["data.yaml", "data.name=squares:Moving"], "data.name=squares:Moving is not a dataclass; expected options"),
        (["data.yaml", "data.name=squares"], "data.name=squares: no such data set"),
        (["task.yaml", "task=vidio"], "there is no module 'vidio'"),
        (["task.yaml", "task=vidio"], "did you mean 'video'?"),
        (["task.yaml", "sample.every=1"], "sample.every=1: Show of zoo.training.task has no method sample; add"),
        (["data.yaml", "data.name=digits", "task=nextframes"], "task=nextframes has no entry of that name in its DATA"),
    ],
)
def test_missing_parts_are_named(folder, arguments, message):
    def made():
        config = cfg.load(arguments)
        task = create_task(config)
        create_show(task).ready()
        with torch.device("meta"):
            task.model()

    with pytest.raises(UserError) as error:
        made()
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("what", "old", "new", "message"),
    [
        ("task", ".square(), None", ".square()", "the objective returned Tensor as loss: expected the loss of each"),
        (
            "task",
            '    sharded_inputs = {"x": 2, "y": 2}',
            "    ",
            "shard x; name it in the class, as sharded_inputs = {",
        ),
        ("data", ", Clips(validation, self.classes)", "", "squares:Squares returned Clips: expected two data sets"),
        ("task", "class Loss(", "class Data:\n    x: int = 3\n\n\nclass Loss(", None),  # a name that the zoo uses
    ],
)
def test_slips_in_a_file_of_ones_own(trainer, folder, capsys, what, old, new, message):
    file, text = (folder / "nextframes.py", TASK) if what == "task" else (folder / "squares.py", DATA)
    assert old in text
    file.write_text(text.replace(old, new))
    assert trainer.main([f"{what}.yaml", f"runs_dir={folder}", "sample.every=0"]) == (2 if message else 0)
    assert message is None or message in capsys.readouterr().err


def test_names_that_an_installed_package_gives(folder):
    own = folder / "own-1.0.dist-info"
    own.mkdir()
    (own / "METADATA").write_text("Metadata-Version: 2.1\nName: own\nVersion: 1.0\n")
    (own / "entry_points.txt").write_text(
        "[zoo.models]\nconv = convtime:ConvTime\n[zoo.data]\nsq = squares:Squares\n[zoo.tasks]\nnext = nextframes\n"
    )
    sys.path.insert(0, str(folder))
    config = cfg.load(["task.yaml", "task=next", "data.name=sq"])
    assert type(create_task(config)).__module__ == "nextframes"
    assert type(create_task(cfg.load(["model.yaml", "model.name=conv"])).create()).__name__ == "ConvTime"


def test_errors_of_a_users_module_are_raised_unchanged(folder):
    (folder / "convtime.py").write_text("import not_installed_anywhere")
    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
        load_plugin("convtime:ConvTime", "zoo.models")


@pytest.mark.parametrize("name", ["frames", "shape", "num_classes", "clip", "__len__"])
def test_a_data_set_that_lacks_something_says_what(name):
    made = Clips([torch.zeros(1, 3, 4, 4)])
    if name in ("clip", "__len__"):
        kind = type("Clips", (), {k: v for k, v in vars(Clips).items() if k not in (name, "__dict__", "__weakref__")})
        made.__class__ = kind
    else:
        delattr(made, name)
    with pytest.raises(UserError) as error:
        complete(made, VideoDataset, "Clips")
    assert [line.split(":")[0].strip() for line in str(error.value).split("\n")[1:]] == [name]


def test_clips_from_a_list():
    x = torch.arange(2 * 5 * 2 * 2.0).view(2, 5, 2, 2)
    for items, label in ([x], None), (iter([x]), None), ([(x, 3)], 3), ([{"x": x, "label": torch.tensor(3)}], 3):
        found = Clips(items, classes=None if label is None else 4).clip(0, 0, range(1, 3))
        assert torch.equal(found["x"], x[:, 1:3])
        assert found["label"] == label
    for item, message in (
        ((x, 4), "a class from 0 to 3, got 4"),
        (x, "a class from 0 to 3, got None"),
        ({"x": x, "y": 1}, "a dict of x and label, got one of x, y"),
    ):
        with pytest.raises(ValueError, match=f"item 0: expected .*{message}"):
            Clips([item], classes=4)
    with pytest.raises(ValueError, match=r"item 0: expected a clip .* got a list"):
        Clips([[1]])
    with pytest.raises(ValueError, match=r"item 1 is \[2, 4, 2, 2\] where the first is \[2, 5, 2, 2\]"):
        Clips([x, x[:, :4]]).clip(1, 0)
    with pytest.raises(ValueError, match="list has no clips"):
        Clips([])


def test_real_clips_are_of_the_classes_that_validation_has():
    x = torch.zeros(1, 3, 4, 4)
    for labels, shown in ([2, 0, 2], [0, 2, 0, 2]), ([1], [1] * 4):
        data = Clips([(x, label) for label in labels], classes=4)
        task = SimpleNamespace(validation=data, num_classes=4, clip=(3, 4, 4))
        show = SimpleNamespace(
            task=task, config=SimpleNamespace(data=SimpleNamespace(fps=None)), clips=lambda own, *_: own
        )
        assert Show.real(show, 4)[0] == shown


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([], "10 rows: expected 11, for labels 0 to 10; label 10 stands for no class (objective.label_dropout=0.1,"),
        (["objective.label_dropout=0"], "10 rows: expected 11, for labels 0 to 10; label 10 stands for no class"),
        (["objective.label_dropout=0", "sample.guidance=1"], ""),
    ],
)
def test_a_model_without_a_row_for_no_class_is_refused_before_the_first_step(folder, more, message):
    own = "nn.Embedding(config.num_classes, dim)"
    text = MODEL.replace("LabelEmbed(config.num_classes, dim)", own)
    assert own in text
    (folder / "convtime.py").write_text(text)
    task = create_task(cfg.load(["model.yaml", *more]))
    if not message:
        without_weights(task.config, task)
        return
    with pytest.raises(UserError, match=f"model convtime:ConvTime looks labels up in a table of {re.escape(message)}"):
        without_weights(task.config, task)


@pytest.mark.parametrize(
    "look",
    [
        lambda table, label: table(label),
        lambda table, label: table(label[:, None]),
        lambda table, label: torch.stack([table(label[i]) for i in range(len(label))]),
        lambda table, label: table.weight[label.long()],
    ],
)
def test_the_rows_of_a_label_table_are_those_of_the_table_not_of_the_labels(look):
    table, label = torch.nn.Embedding(10, 4, device="meta"), torch.zeros(2, dtype=torch.long, device="meta")
    with Lookups(label) as found:
        look(table, label)
    assert {*found.rows} == {10}


def test_the_data_of_a_task_of_ones_own_are_told_in_words(trainer, folder, capsys):
    assert trainer.main(["task.yaml", f"runs_dir={folder}", "train.steps=1"]) == 0
    assert "data    squares:Squares: 2 samples a step and group, from a data set of 64\n" in capsys.readouterr().out
