"""The measurements of the methods: their formulas, that each runs at a tiny size, that they leave nothing behind."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.paths import ROOT
from tests.support.slow import keep_short, slow

SCRIPTS = ROOT / "benchmarks"


@pytest.fixture
def root_only(script) -> None:
    if reason := script("hosts").why_not():
        pytest.skip(reason)


def namespaces() -> set[str]:
    return set(re.findall(r"dsp-\d+[-\d]*", subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout))


def run(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / name), *arguments], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def drawn(picture: Path) -> None:
    """A picture stands there, where matplotlib does."""
    if find_spec("matplotlib"):
        ElementTree.parse(picture)


def test_every_script_finds_what_it_imports(script) -> None:
    for path in sorted(SCRIPTS.rglob("*.py")):
        if path.name != "__init__.py":
            script(path.relative_to(SCRIPTS).with_suffix("").as_posix().replace("/", "."))


# ------------------------------------------------------------------------------------------------------------ formulas


@pytest.mark.parametrize("n", [slow(2), 4, slow(8)])
def test_formulas_are_what_the_plans_send(script, n: int) -> None:
    rivals = script("methods")
    for method in rivals.METHODS:
        plans = []
        for depth in (1, 2):
            shape = rivals.Shape(hidden=32, depth=depth, frames=8, side=4)
            plans.append(shape.plan(method, n, recompute=True))
        grew = {phase: plans[1].bytes[phase] - plans[0].bytes[phase] for phase in plans[0].bytes}
        units = rivals.formula(method, n)
        assert grew == {phase: pytest.approx(unit * shape.activation) for phase, unit in units.items()}
        paper = eval(rivals.PAPER[method].replace("M", "* 1.0").replace("N", str(n)))  # as it prints it: 2M/N
        assert units["forward"] == pytest.approx(paper * (n - 1) / n)


def test_the_largest_that_fits(script) -> None:
    most = script("memory").most
    for limit in (0, 1, 2, 5, 16):
        assert most(lambda k, limit=limit: k <= limit, 1024) == limit
    for limit in (100, 777):  # to a sixteenth, from below
        assert limit * 15 / 16 < most(lambda k, limit=limit: k <= limit, 1024) <= limit
    assert 60 <= most(lambda k: True, 64) <= 64  # without a limit of memory


# ------------------------------------------------------------------------------------------------------- tiny measures


@pytest.mark.measurement
def test_wire_counts_what_the_formula_says(script, tmp_path: Path) -> None:
    """Over the loopback, which others use too: at least those bytes, and not twice as many."""
    out = str(tmp_path / "wire")
    said = script("wire").main(
        ["--loopback", "--ranks", "2", "--frames", "8", "--side", "8", "--methods", "dsp", "ulysses", "--out", out]
    )
    assert said == 0
    found = script("common").read(tmp_path / "wire.json")
    assert len(found["rows"]) == 2
    m = script("methods").Shape(**found["shape"]).activation
    for row in found["rows"]:
        units = script("methods").formula(row["method"], 2)
        assert row["count_comm"]["again"] == pytest.approx(sum(units.values()) * m)
        if "saved" in row["count_comm"]:
            assert row["count_comm"]["saved"] == pytest.approx((units["forward"] + units["backward"]) * m)
        for phase in ("forward", "backward"):
            assert 0.97 < row["bytes"][phase] / (units[phase] * m) < 2
    for row in found["collectives"]:
        assert 0.97 < row["measured"] / row["formula"] < 2
    drawn(tmp_path / "wire.svg")


@pytest.mark.measurement
def test_memory(script, tmp_path: Path) -> None:
    options = ["--frames", "16", "--side", "8", "--depth", "1", "--budget", "4", "--limit", "4"]
    options += ["--ranks", "1", "2", "--methods", "dsp", "--out", str(tmp_path / "m")]
    assert script("memory").main(options) == 0
    found = script("common").read(tmp_path / "m.json")
    one, two = found["rows"]
    assert 0 < two["peak"] < one["peak"]
    assert 0 < one["longest"] <= two["longest"] <= 4
    drawn(tmp_path / "m.svg")


def test_cluster_needs_root(script, monkeypatch, capsys, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert script("cluster").main(["--out", str(tmp_path / "c")]) == 0
    assert "skipped: hosts cannot be emulated here: network namespaces need root" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.mark.measurement
@pytest.mark.usefixtures("root_only")
def test_cluster(script, tmp_path: Path) -> None:
    before = namespaces()
    shape = ["--hidden", "32", "--depth", "1", "--frames", "4", "--side", "4"]
    options = ["--ranks", "2", "--rates", "100", "0", "--rounds", "1", "--probe", "100000"]
    script("cluster").main([*shape, *options, "--methods", "dsp", "megatron_sp", "--out", str(tmp_path / "c")])
    found = script("common").read(tmp_path / "c.json")
    slow, free = found["sweep"]["rates"]
    for one in (slow, free):
        for rows in one["modes"].values():
            assert rows["dsp"]["ratio"] == {"median": 1, "least": 1, "most": 1}
            assert rows["megatron_sp"]["seconds"]["median"] > 0
    assert 0 < slow["modes"]["train"]["dsp"]["share_of_link"] < 1
    assert {(row["kind"], row["mode"]) for row in found["scaling"]} == {
        (kind, mode) for kind in ("weak", "strong") for mode in ("train", "infer")
    }
    drawn(tmp_path / "c.svg")
    assert namespaces() <= before


@pytest.mark.slow
@pytest.mark.usefixtures("root_only")
def test_hosts_leave_nothing_behind(script) -> None:
    hosts = script("hosts")
    with pytest.raises(ZeroDivisionError), hosts.Hosts(2) as made:
        made.rate(10)
        made.rate(None)
        assert {made.switch, *made.names} <= namespaces()
        raise ZeroDivisionError
    assert not {made.switch, *made.names} & namespaces()
    code = (
        "import time\nfrom benchmarks import hosts\n"
        "with hosts.stoppable(), hosts.Hosts(1) as h: print(h.switch, flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    name = process.stdout.readline().strip()
    assert name in namespaces()
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 128 + signal.SIGTERM
    process.stdout.close()
    assert name not in namespaces()
    subprocess.run(["ip", "netns", "add", "dsp-999999999-0"], check=True)  # of a program that was killed
    hosts.sweep()
    assert "dsp-999999999-0" not in namespaces()


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_program(script, tmp_path: Path, capfd) -> None:
    hosts = script("hosts")
    began = time.monotonic()
    with pytest.raises(SystemExit, match="rank 0 of 1 failed at measure"):
        with hosts.Ranks(str(SCRIPTS / "wire.py"), 1) as ranks:
            ranks.ask("measure", method="no such", shape={}, recompute="no", times=1)
    assert "method='no such'" in capfd.readouterr().err
    assert time.monotonic() - began < 120


# ----------------------------------------------------------------------------------------------------- the cost model


def steps_of(script, values: dict[str, float]) -> Any:
    """The file that benchmarks/cluster.py would write where the cost model is true, with these parameters."""
    cost, rivals = script("cost_model"), script("methods")
    shape = rivals.Shape(hidden=32, heads=4, depth=1, frames=8, side=4)
    row = {"seconds": {"median": 1.0, "least": 1.0, "most": 1.0}}
    rates = [
        {"rate": rate, "measured": {"ring": ring, "all_to_all": pairs}}
        | {"modes": {mode: {m: json.loads(json.dumps(row)) for m in rivals.METHODS} for mode in ("train", "infer")}}
        for rate, ring, pairs in ((10, 9.0, 6.0), (100, 80.0, 70.0), (0, 5000.0, 4000.0))
    ]
    scaling = [
        {"kind": kind, "mode": mode, "ranks": n, "method": m} | json.loads(json.dumps(row))
        for kind in ("weak", "strong") for mode in ("train", "infer") for n in (1, 2) for m in rivals.METHODS
        if n > 1 or m == "dsp"
    ]  # fmt: skip
    machine = {"date": "d", "device": "p", "cores": 2, "torch": "t"}
    found = {"command": "c", "commit": "x", "machine": machine, "shape": vars(shape), "scaling_rate": 100}
    found |= {"sweep": {"ranks": 4, "recompute": "no", "rates": rates}, "scaling": scaling}
    measured = cost.Measured.read(found)
    rows = [row for one in rates for rows in one["modes"].values() for row in rows.values()] + scaling
    for row, point in zip(rows, measured.points, strict=True):
        seconds = cost.predict(values, point, measured)
        row["seconds"] = {"median": seconds, "least": seconds, "most": seconds}
    return found


def test_a_frame_waits_for_those_before_it_and_is_dropped_where_too_many_wait(script) -> None:
    hosts = script("hosts")
    port = hosts.Port(8.0)  # a byte takes a microsecond
    assert [port.leaves(0.0, 1000), port.leaves(0.0, 1000)] == pytest.approx([0.001, 0.002])
    assert port.leaves(1.0, 1000) == pytest.approx(1.001)
    left = [port.leaves(2.0, 10_000) for _ in range(20)]
    assert sum(map(math.isinf, left)) == 20 - hosts.HELD / 0.01 - 1
    assert hosts.Port(0.0).leaves(3.0, 10**9) == 3.0


def test_networks_are_the_same_for_the_same_seed(script) -> None:
    drawn = script("networks").drawn
    assert drawn(20, 4, seed=0) == drawn(20, 4, seed=0) != drawn(20, 4, seed=1)
    assert {n.node for n in drawn(20, 4, seed=0)} == {1, 2, 4}


def test_the_choice_on_the_networks_that_were_measured(script) -> None:
    """The choice by what was recorded is as recorded, seldom far from the best one, and not slower than plain DSP."""
    networks = script("networks")
    found = script("common").read(ROOT / "benchmarks/results/networks.json")
    again = [networks.judged(found, each) for each in found["networks"]]
    assert [each["chosen"] for each in again] == [each["chosen"] for each in found["networks"]]
    verdict = networks.verdict(again)
    assert verdict["networks"] == 20
    assert verdict["picked"] >= max(10, verdict["always"]["dsp"]["picked"])
    assert verdict["regret"]["median"] <= 1.03
    assert verdict["against plain"]["worst"] <= 1.03
    assert verdict["off"]["median"] <= 0.15


def test_a_choice_is_compared_with_the_best_one_of_the_same_rounds(script) -> None:
    networks = script("networks")
    rounds = {"dsp": [[1.0, 0.1], [3.0, 0.3], [1.0, 0.0]], "ulysses": [[2.0, 0.2], [6.0, 0.6], [2.0, 0.0]]}
    assert networks.relative(rounds) == pytest.approx({"dsp": 1, "ulysses": 2})  # a round that was slow for both
    row = {"waits": 0.0, "seconds": 1.0}
    rows = {name: row | {"relative": 1.2, "predicted": 1.0} for name in networks.CONFIGURATIONS}
    rows["dsp, both"] = row | {"relative": 1.0, "predicted": 0.9}
    good, bad = {"rows": rows, "chosen": "dsp, both"}, {"rows": rows, "chosen": "ulysses"}
    verdict = networks.verdict([good, good, bad])
    assert (verdict["picked"], verdict["regret"]) == (2, {"median": 1.0, "worst": 1.2})
    assert verdict["against plain"] == pytest.approx({"median": 1 / 1.2, "worst": 1})
    assert verdict["off"] == pytest.approx({"median": 0.1, "worst": 0.1})
    assert verdict["always"]["dsp, both"] == {"picked": 3, "worst": 1.0}


@pytest.mark.measurement
@pytest.mark.usefixtures("root_only")
def test_networks(script, tmp_path: Path) -> None:
    before = namespaces()
    networks, hosts = script("networks"), script("hosts")
    if reason := hosts.why_not(hosts.Emulated):
        pytest.skip(reason)
    options = ["--networks", "1", "--rounds", "1", "--hidden", "32", "--depth", "1", "--frames", "4", "--side", "4"]
    assert networks.main([*options, "--out", str(tmp_path / "n")]) == 0
    found = script("common").read(tmp_path / "n.json")
    [one] = found["networks"]
    assert one["rows"].keys() == networks.CONFIGURATIONS.keys()
    assert all(0 < row["waits"] < row["seconds"] for row in one["rows"].values())
    assert {one["best"], one["chosen"]} <= one["rows"].keys()
    assert networks.judged(found, one)["rows"] == one["rows"]
    assert namespaces() <= before


@pytest.mark.slow
def test_calibration_finds_what_made_the_measurements(script, tmp_path: Path, capsys) -> None:
    cost = script("cost_model")
    values = dict(zip(cost.PARAMETERS, (2e-10, 1e-9, 3e-4, 1.2, 1.1, 0.9, 1.3), strict=True))
    found = steps_of(script, values)
    fitted = cost.calibration(cost.Measured.read(found))
    assert fitted["parameters"] == pytest.approx(values, rel=1e-6)
    assert fitted["worst"] < 1e-6  # each point from the others
    assert fitted["over"] == 0
    # half the rate of the links of the measurement: its bytes take as long, so what they take of the link halves
    for one in found["sweep"]["rates"]:
        one["measured"] = {name: rate / 2 for name, rate in one["measured"].items()}
    slow = cost.calibration(cost.Measured.read(found))["parameters"]
    assert [slow[name] / values[name] for name in cost.PARAMETERS] == pytest.approx([1, 1, 1, 0.5, 0.5, 0.5, 0.5])
    # a point that the others do not explain is off by itself, and said to be
    odd = found["sweep"]["rates"][0]["modes"]["train"]["ring"]["seconds"]
    odd["median"] *= 2
    script("common").save(tmp_path / "c.json", found)
    assert cost.main(["--measured", str(tmp_path / "c.json"), "--only-calibration"]) == 0
    said = capsys.readouterr().out
    line = next(line for line in said.splitlines() if re.search(r"sweep train .* 10 Mbit/s, ring attention", line))
    assert "-50.0%" in line
    assert line.endswith("over")
    assert "over 15%" in said
    assert cost.main(["--measured", str(tmp_path / "none.json")]) == 1


def test_a_plan_of_few_layers_tells_that_of_many(script) -> None:
    cost, rivals = script("cost_model"), script("methods")
    shapes = {
        depth: rivals.Shape(32, 4, depth, frames=8, side=4) for depth in (1, 2, 5)
    }  # even: the busiest rank is any
    plans = {
        (method, depth): shape.plan(method, 4, recompute=True)
        for method in rivals.METHODS for depth, shape in shapes.items()
    }  # fmt: skip
    for method in rivals.METHODS:
        made, true = cost.deeper(plans[method, 1], plans[method, 2], 5), plans[method, 5]
        assert made.sends == true.sends
        for name in ("flops_alone", "touched_alone", "cut_weights"):
            assert getattr(made, name) == getattr(true, name)
        assert (made.flops, made.touched) == pytest.approx((true.flops, true.touched), abs=5)  # each rounded


# ------------------------------------------------------------------------------------------------- the page, pictures


def test_every_result_says_where_it_is_from(script) -> None:
    """Results have their command, whose script is still there, their commit and their machine."""
    for path in sorted((SCRIPTS / "results").glob("*.json")):
        found = script("common").read(path)
        assert (ROOT / found["command"].split()[1]).exists(), path
        assert re.fullmatch(r"[0-9a-f]{7,}(-dirty)?", found["commit"]), path
        assert {"date", "cores", "device", "torch"} <= found["machine"].keys(), path


PICTURES = ["wire", "cluster", "memory", "cost-model", "decoding", "fold-memory", "ribbon"]


@pytest.mark.parametrize("name", keep_short(PICTURES, only=["ribbon"]))
def test_pictures_are_drawn_of_the_results(script, tmp_path: Path, name: str) -> None:
    """``python benchmarks/draw.py`` after every measurement; by the version that is pinned, but for last digits."""
    draw, matplotlib = script("draw"), pytest.importorskip("matplotlib")
    draw.main(["--only", name, "--out", str(tmp_path)])
    made = (tmp_path / f"{name}.svg").read_text()
    assert made.count("<text") >= 10
    smallest = min(float(size) for size in re.findall(r"font(?:-size)?: (?:bold |700 )?([\d.]+)px", made))
    assert smallest * 690 / (8.6 * 72) >= 11  # pixels, where the widest is 690 of them wide
    if f"matplotlib=={matplotlib.__version__}\n" in (ROOT / "constraints.txt").read_text():
        number, kept = re.compile(r"\d+\.\d+"), (ROOT / f"docs/images/{name}.svg").read_text()
        assert number.sub("", made) == number.sub("", kept)
        places, others = (np.array(number.findall(text), float) for text in (made, kept))
        np.testing.assert_allclose(places, others, atol=1e-3)  # they differ from one kind of CPU to another


def test_without_matplotlib_a_picture_is_left_out_in_one_line(script, monkeypatch, tmp_path: Path, capsys) -> None:
    monkeypatch.setattr(script("draw"), "find_spec", lambda name: None)
    script("draw").main(["--only", "wire", "--out", str(tmp_path)])
    assert re.fullmatch(r"no wire.svg: it needs matplotlib .*\n", capsys.readouterr().out)
    assert not list(tmp_path.iterdir())


def test_the_ribbon_is_of_real_plans(script) -> None:
    methods = script("methods")
    layouts = {
        m: [methods.layouts(m, row) for row in methods.two_layers(m).stages[1:5]]
        for m in ("dsp", "ulysses", "megatron_lm")
    }
    assert layouts["dsp"] == [["t"], ["s"], ["t"], ["s"]]
    assert layouts["ulysses"] == [["s", "heads", "s"], ["s"]] * 2
    assert layouts["megatron_lm"] == [["whole", "heads", "whole", "heads", "whole"]] * 4


def test_the_pages_are_what_was_measured(script) -> None:
    """``python benchmarks/tables.py --write`` after every measurement."""
    tables = script("tables")
    pages = [page.read_text() for page in tables.PAGES]
    assert [tables.written(page) for page in pages] == pages
    assert sorted(re.findall("<!-- table: (.*) -->", "".join(pages))) == sorted(tables.TABLES)
