"""Conformance: verdicts are computed rightly, and the page has the rows of the script."""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import dsp
from tests.support.paths import ROOT
from tests.support.slow import slow

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # by Python from 3.12 on

SCRIPT = ROOT / "benchmarks/conformance.py"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.conformance")


def amiss(kind: str, y: Tensor) -> Tensor:
    """The output of a contender that does one thing amiss, some on one rank alone."""
    last = dist.get_rank() == dist.get_world_size() - 1
    if kind == "hangs" and last:
        time.sleep(600)
    if kind == "dies" and last:
        os._exit(3)
    if kind == "refused" and last:
        raise ValueError("the length must divide")
    if kind == "raw error":
        y.view(3)
    if kind == "gradients of one rank":
        return y if last else y.detach() + 0 * y
    if kind == "gradients wrong" and last:
        return y.detach() + (y**2 - (y**2).detach())
    return {"scaled": 3 * y, "wrong": y + y.flip(1) if last else y}.get(kind, y)


@pytest.mark.parametrize(
    ("kind", "entry", "averaged", "summed"),
    [
        ("exact", "exact", "exact", "**×N**"),
        ("scaled", "**×3**", "**×3**", "**×6**"),
        ("wrong", "**wrong**", "**wrong**", "**wrong**"),
        ("gradients of one rank", "gradients **×1/N**", "**×1/N**", "exact"),
        ("gradients wrong", "gradients **wrong**", "**wrong**", "**wrong**"),
        ("refused", "refused", "", ""),
        ("raw error", "raw error", "", ""),
        ("dies", "raw error", "", ""),
        slow("hangs", "**hangs**", "", ""),
    ],
)
def test_of_a_fabricated_contender(script, monkeypatch, kind: str, entry: str, averaged: str, summed: str) -> None:
    """It runs the whole model on every rank."""
    contenders = importlib.import_module("benchmarks.contenders")

    def run(model: Any, mesh: Any, it: Any, stages: Any) -> Any:
        return contenders.Run(lambda inputs: amiss(kind, contenders.call(model, inputs)))

    monkeypatch.setattr(script, "GRACE", 0.5)
    monkeypatch.setattr(script, "LIMIT", 2.0 if kind == "hangs" else 60.0)
    method = dataclasses.replace(script.METHODS["dsp"], run=run, source=__file__)
    cell = script.Cell("attention", "even", "dsp", 2)
    answer = script.measure(cell, method)
    assert script.entry(cell, answer) == entry
    assert [script.word(cell, answer[w], True) if w in answer else "" for w in ("averaged", "summed")] == [
        averaged,
        summed,
    ]
    if kind == "dies":
        assert answer["output"].says == "a process dies: exit code 3"


def test_comparisons(script) -> None:
    right = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)

    def verdict(*found: Tensor, floor: float = 0.0) -> Any:
        return script.compare([x.double() for x in found], [right] * len(found), 1e-10, floor)

    assert verdict(right, right * (1 + 1e-12)).kind == "exact"
    assert verdict(right * (1 + 1e-9)) == script.Verdict("scaled", "×1")  # 1 + 1e-9 is no rounding
    assert verdict(right, right / 4) == script.Verdict("scaled", "×0.25")  # one of two is enough
    assert verdict(right / 2, right / 4) == script.Verdict("scaled", "×0.25 to ×0.5")
    for wrong in (right.flip(0), right[:2], right * torch.nan, right * torch.inf, 0 * right):
        assert verdict(right, wrong).kind == "wrong"
    assert verdict(right + 1e-8, floor=1e3).kind == "exact"  # a gradient that vanishes beside the others


def test_who_raised(script) -> None:
    def failure(raising: Any, source: str = __file__) -> Any:
        try:
            raising()
        except Exception as error:
            return script.failure(error, source)

    def refuses(*words: str) -> None:
        raise ValueError(*words)

    def dies_inside() -> None:
        torch.zeros(2).view(3)

    assert failure(lambda: refuses("heads must divide\n at ...")) == script.Verdict(
        "refused", "ValueError: heads must divide"
    )
    assert failure(refuses).kind == "raw error"  # without a word
    assert failure(lambda: refuses("heads"), "/another/").kind == "raw error"
    assert failure(dies_inside).kind == "raw error"


def test_documented_refusals_bear_a_dagger(script) -> None:
    refused, exact = script.Verdict("refused"), script.Verdict("exact")

    def said(method: str, circumstance: str, output: Any, backward: Any = None) -> str:
        answer = {"output": output} | ({"backward": backward} if backward else {})
        return script.entry(script.Cell("attention", circumstance, method, 2), answer)

    assert said("Ulysses", "uneven", refused) == "refused†"
    assert said("Ulysses", "causal", refused) == "refused"
    assert said("Ulysses", "uneven", exact) == "exact"
    assert said("ring anything", "even", exact, refused) == "gradients refused†"
    assert said("Ulysses anything", "even", exact, refused) == "gradients refused"
    assert said("ring", "uneven", exact, script.Verdict("wrong")) == "gradients **wrong**"  # of lengths its words are


def test_a_run_of_one_method_leaves_the_others_columns(script) -> None:
    page = script.PAGE.read_text()
    cell = script.Cell("attention", "even", "ring", 2)
    wrong = dict.fromkeys(("output", "averaged", "summed"), script.Verdict("wrong"))
    error = {"output": script.Verdict("refused", "ValueError: 5 | 2")}
    found = script.entries("ring", {cell: wrong, dataclasses.replace(cell, ranks=3): error})
    assert found["attention"]["even", "ring"] == "2: **wrong**; 3: refused"
    before, after = (script.read(text, "attention") for text in (page, script.written(page, found)))
    assert {key for key in before if before[key] != after[key]} == {
        ("even", "ring"),
        ("gradients averaged", "ring"),
        ("gradients summed", "ring"),
    }
    assert script.read(script.written(page, found), "errors")["ring", "says"] == "even: refused, `ValueError: 5 / 2`"


def test_the_page_has_the_rows_that_the_script_makes(script) -> None:
    page = script.PAGE.read_text()
    assert script.written(page, {}) == page
    assert set(re.findall("<!-- table: (.*) -->", page)) == set(script.TABLES)
    verdict = r"(gradients )?(exact|refused|raw error|\*\*(wrong|hangs|×N|×1/N|×[\d.]+)\*\*)†?"
    for name, method in script.METHODS.items():
        assert all(script.read(page, "methods")[name, column] for column in script.TABLES["methods"][1])
        for cell in script.cells(name):
            table, row = ("attention", cell.circumstance)
            if cell.model != "attention":
                table, row = "models", f"{cell.model}: {cell.circumstance}"
            for part in script.read(page, table)[row, name].split("; "):
                assert re.fullmatch(rf"([\d, ]+: )?{verdict}", part), (name, row)
        assert method.how in page


def test_verdicts_of_the_page(script) -> None:
    tables = {table: script.read(script.PAGE.read_text(), table) for table in ("attention", "models")}
    for table, found in tables.items():
        own = {row: text for (row, column), text in found.items() if column == "dsp" and not set(row) <= {"-"}}
        rows = script.TABLES[table][0]
        expected = {row: "**×N**" if "summed" in row else "" if "by hand" in row else "exact" for row in rows}
        assert own == expected
        assert not any("hangs" in text for text in found.values())
    assert tables["attention"]["even", "ring"] == "2: exact; 3, 4: gradients **wrong**"


OWN = ["uneven", "uneven with mask per key"]
MORE = ["even", "5 heads", "recompute", "mask per key", "mask per head", "causal"]


@pytest.mark.parametrize("circumstance", [*OWN, *map(slow, MORE)])
def test_our_own_column(script, circumstance: str) -> None:
    """Attention on three ranks: here too what the page says."""
    page = script.read(script.PAGE.read_text(), "attention")
    cell = script.Cell("attention", circumstance, "dsp", 3)
    found = script.entries("dsp", {cell: script.measure(cell)})["attention"]
    assert found == {key: page[key] for key in found}
    assert (circumstance, "dsp") in found


def turned(run: Any, *args: Any) -> Any:
    """diffusers' ring, with the gradients of keys and values sent the other way round."""
    from torch.distributed import _functional_collectives as funcol

    send = funcol.permute_tensor
    funcol.permute_tensor = lambda x, to, group: send(x, [to.index(rank) for rank in range(len(to))], group)
    return run(*args)


@pytest.mark.measurement
def test_a_ring_that_is_turned(script) -> None:
    """diffusers' ring is wrong beyond two ranks by the way that gradients go round it, and by nothing else."""
    cell, ring = script.Cell("attention", "even", "ring", 3), script.METHODS["ring"]
    assert script.entry(cell, script.measure(cell)) == "gradients **wrong**"
    mended = dataclasses.replace(ring, run=partial(turned, ring.run))
    assert script.entry(cell, script.measure(cell, mended)) == "exact"


@pytest.mark.measurement
def test_a_missing_package_is_named(script, tmp_path: Path) -> None:
    """Without a package its column stays."""
    hidden = tmp_path / "sitecustomize.py"
    hidden.write_text("import sys; sys.modules['deepspeed'] = None\n")
    run = subprocess.run(
        [sys.executable, str(SCRIPT), "--methods", "DeepSpeed"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(dsp.__file__).parents[1])])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "DeepSpeed: deepspeed is not installed" in run.stdout
