"""The page of a run, the picture of a plan, and a trained model in Python."""

import json
import os
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
import torch
from PIL import Image

import dsp
import zoo
from dsp.report.picture import LONGEST, _two_lines
from tests.support.inference import tiny_run  # noqa: F401
from tests.support.runs import Runs, metrics
from zoo.training import config as cfg
from zoo.training import export, flight, report
from zoo.training.charts import Chart, Curve, draw
from zoo.training.config_text import to_yaml

NEVER_CLOSED = {"meta", "img", "br"}


class Page(HTMLParser):
    """A parser that checks that every tag is closed, and lists what the page would fetch."""

    def __init__(self, text):
        super().__init__()
        self.open, self.links, self.tags = [], [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href") and not value.startswith("data:")]
        if tag not in NEVER_CLOSED:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)


def directory(path, **options):
    """The files of a run, in small."""
    (path / "samples").mkdir(parents=True)
    config = cfg.defaults("digits")
    config.name, config.train.steps = path.name, 40
    for key, value in options.items():
        setattr(config.optim, key, value)
    (path / "config.yaml").write_text(to_yaml(config))
    rows = [
        {"step": i, "time": 1e9 + i, "loss": 2.0 / i, "lr": options.get("lr", 1e-4), "tokens_per_s": 10.0 + i,
         "memory_bytes": 2**30, "data_wait": 0.01, "elapsed": i * 1.5, "grad_norm": None if i == 7 else 1.0}
        for i in range(1, 41)
    ]  # fmt: skip
    rows.insert(20, {"step": 20, "time": 1e9, "resumed": 2, "changes": ["optim.lr: 0.1 -> <b>"]})
    rows += [
        {"step": 40, "val_loss": 0.3, "val_losses": [0.2, 0.4], "val_lddt_cb": 0.7},
        {"step": 40, "baseline_linear": 0.5},
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "console.log").write_text(
        "noise\nmodel   toy\ndata    d\nmesh    m\nplan    p\nmemory  1\nrun     r\nstep 1\n"
    )
    (path / "plan.svg").write_text(dsp.plan(Two(), (torch.zeros(1, 4, 6, 3),), size=2, gather_output=False).svg())
    Image.new("RGB", (4, 4)).save(path / "samples" / "step-00000040.gif")
    return path


class Two(torch.nn.Module):
    stages = {"": "x=b t s c", "space": "b t [s c]", "time": "b [t] s [c]"}

    def __init__(self):
        super().__init__()
        self.space, self.time = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)

    def forward(self, x):
        return self.time(self.space(x))


def test_a_page_of_one_run_and_of_two(tmp_path, capsys):
    one, two = directory(tmp_path / "one"), directory(tmp_path / "two", lr=3e-4, schedule="wsd")
    assert report.main([str(one)]) == 0
    text = (one / "report.html").read_text()
    page = Page(text)
    assert not page.links  # nothing is fetched, but for what stands in the page
    assert page.tags.count("img") == 2  # a sample and the plan
    assert "step 40 of 40 after 1:00" in text
    assert "model   toy\n" in text and "step 1\n" not in text  # noqa: PT018
    assert re.search(
        r"<td>loss</td><td class=\"soft\">lower is better</td><td class=\"n\">0.3</td><td>linear 0.5</td>", text
    )
    assert re.search(r"<td>lDDT-Cβ</td><td class=\"soft\">higher is better</td><td class=\"n\">0.7</td><td></td>", text)
    assert "optim.lr: 0.1 -&gt; &lt;b&gt;" in text
    for title in ("training loss, logarithmic", "tokens a second", "memory of a rank, GiB at most", "learning rate"):
        assert f">{title}</text>" in text, title
    assert report.main([str(one), str(two), "--out", str(tmp_path / "both.html")]) == 0
    both = (tmp_path / "both.html").read_text()
    Page(both)
    assert "<tr><td>optim.lr</td><td>0.0001</td><td>0.0003</td></tr>" in both
    assert "<tr><td>optim.schedule</td><td>cosine</td><td>wsd</td></tr>" in both
    assert both.count('alt="plan"') == text.count('alt="plan"') == 1  # the same plan once
    assert report.main([str(tmp_path)]) == 2
    assert "holds no metrics.jsonl" in capsys.readouterr().err


EVIL = "<script>alert(1)</script>\x1b[31m"


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    """A run as somebody may send it: its configuration names code, its files hold scripts and escape codes."""
    (tmp_path / "evil.py").write_text("from pathlib import Path\nPath('imported').touch()\n")
    monkeypatch.chdir(tmp_path)
    run = directory(tmp_path / f"<img src=x onerror=alert(2)>{EVIL.replace('/', '')}")
    text = (run / "config.yaml").read_text().replace("name: digits", "name: evil:Data")
    (run / "config.yaml").write_text(
        text.replace("task: null", "task: evil").replace("project: ", f"project: {EVIL[:-5]}")
    )
    rows = [{"step": 1, "resumed": EVIL, "time": 1e30, "changes": [EVIL]}, {"step": 1, f"val_{EVIL}": 0.5},
            {"step": 2, "resumed": 2, "time": EVIL, "changes": EVIL}]  # fmt: skip
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    (run / "plan.svg").write_text(f'<svg xmlns="http://www.w3.org/2000/svg">{EVIL[:-5]}</svg>')
    (run / "samples/step-9").with_suffix('.png"><script>alert(3)<').touch()
    (run / "console.log").write_text(f"model   {EVIL}\n")
    (run / "flight/<b>").mkdir(parents=True)
    entry = {"group": EVIL, "number": 1, "name": EVIL, "sizes": [], "done": True, "seconds_ago": 1.0}
    record = {"rank": 0, "fault": EVIL, "modules": [EVIL], "collectives": [entry], "place": EVIL}
    (run / "flight/<b>/rank-0.json").write_text(json.dumps(record))
    (run / "checkpoints/step-00000001").mkdir(parents=True)
    state = {"format": 1, "step": 1, "identity": {"name": "transformer2d", "config": {}}}
    (run / "checkpoints/step-00000001/state.json").write_text(json.dumps(state))
    return run


def test_reports_of_a_run_execute_nothing_that_its_files_hold(hostile, tmp_path, capsys):
    assert report.main([str(hostile)]) == 0
    assert flight.main([str(hostile)]) == 0
    assert export.main([str(hostile)]) == 2  # its checkpoint is damaged
    assert not (tmp_path / "imported").exists()
    page = Page((hostile / "report.html").read_text())
    assert not page.links
    assert set(page.tags) & {"script", "b"} == {"b"}  # the name of the run is in bold
    assert page.tags.count("b") == 1
    assert page.tags.count("img") == 2
    out = capsys.readouterr()
    assert "\x1b" not in out.out + out.err
    assert "\\x1b[31m" in out.out


def test_the_model_of_a_run_that_has_code_of_its_own_is_not_exported(tmp_path, hostile, capsys):
    text = (hostile / "config.yaml").read_text().replace("name: transformer2d", "name: evil:Wan")
    (hostile / "config.yaml").write_text(text)
    assert export.main([str(hostile)]) == 2
    assert "model.name=evil:Wan is not a model of the zoo" in capsys.readouterr().err
    assert not (tmp_path / "imported").exists()


@pytest.mark.parametrize("name", ["plan.svg", "console.log", "samples/step-00000099.gif", "metrics.jsonl"])
def test_a_fifo_in_the_place_of_a_run_s_file_is_named(tmp_path, name, capsys):
    run = directory(tmp_path / "run")
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    assert report.main([str(run)]) == 2
    assert f"{run / name} is not a regular file" in capsys.readouterr().err


def test_a_fifo_in_the_place_of_the_page_is_replaced(tmp_path):
    run = directory(tmp_path / "run")
    os.mkfifo(run / "report.html")
    assert report.main([str(run)]) == 0
    assert "</html>" in (run / "report.html").read_text()


def test_charts_of_odd_curves():
    assert draw(Chart("nothing", [Curve("a", [])])) == ""
    for points in (
        [(1, 0.0)],
        [(0, -3.0), (5, 2.0)],
        [(i, 10.0**i) for i in range(9)],
        [(i, 1.0) for i in range(5000)],
    ):
        svg = draw(Chart("t", [Curve("a", points)], [("floor", 0.5)], [3]))
        ElementTree.fromstring(svg)
        places = [float(x) for x in re.findall(r"[ML]([\d.-]+ [\d.-]+)", svg.split('class="curve"')[1])[0].split()]
        assert all(0 <= x < 1000 for x in places)
        assert len(svg) < 20_000


def test_the_picture_of_a_plan():
    plan = dsp.plan(Two(), (torch.zeros(1, 4, 6, 3),), size=2, gather_output=False)
    svg = ElementTree.fromstring(plan.svg())
    words = [node.text for node in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert [w for w in words if w in ("space", "time", "t", "s")] == ["space", "t", "time", "s"]
    assert "t → s" in words
    assert "sharded along t" in words
    assert plan._repr_html_().count("<svg") == 1
    assert "bytes a rank sends" in plan._repr_html_()


def test_long_names_in_the_picture_of_a_plan_take_two_lines():
    assert _two_lines("blocks.*.time") == ("", "blocks.*.time")
    assert _two_lines("model.extra_blocks.0.pair.incoming.project") == (
        "model.extra_blocks.0.",
        "pair.incoming.project",
    )
    first, second = _two_lines("a_name_without_any_dot_that_two_lines_cannot_hold")
    assert len(first) == len(second) == LONGEST


def test_a_run_in_two_lines(run, tmp_path):
    loaded = zoo.load(run)
    clips = loaded.sample(label=[3, 7], frames=7, steps=3, out=tmp_path)
    assert clips.shape == (2, 1, 7, 6, 6)
    assert clips.dtype == torch.uint8
    with Image.open(loaded.files[0]) as gif:
        assert gif.n_frames == 7
    with pytest.raises(ValueError, match="no option 'lable'; there are clips"):
        loaded.sample(lable=3)
    with pytest.raises(ValueError, match="classes are 0 to 9"):
        loaded.sample(label=[12])
    loaded.close()
    assert not torch.distributed.is_initialized()
    with pytest.raises(ValueError, match="holds no config"):
        zoo.load(tmp_path)


@pytest.mark.slow
def test_tensorboard_has_the_same_numbers(trainer, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    where = Runs(trainer, tmp_path)("log.tensorboard=true", "train.steps=2", "sample.every=2")
    events = EventAccumulator(str(where / "tensorboard"))
    events.Reload()
    told = {event.step: event.value for event in events.Scalars("train/loss")}
    assert told == pytest.approx({step: loss for step, (loss,) in metrics(where, "loss").items()}, rel=1e-6)
    assert {"val/loss", "val/losses_0", "train/seconds_per_step"} <= set(events.Tags()["scalars"])
    assert events.Tags()["images"] == ["samples"]
