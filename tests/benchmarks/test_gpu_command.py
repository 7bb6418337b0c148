"""benchmarks/gpu.py: a part that fails, hangs or dies leaves a report of it and of all others; the dry run is right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.common import read
from tests.support.paths import ROOT


def at_work(which: str, tmp_path: Path) -> Any:
    """The results of parts, run as the command runs them: forked from a process that has used no thread of torch."""
    command = [sys.executable, str(ROOT / "tests/benchmarks/failing_parts.py"), which, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_failed_hung_and_dead_parts_are_in_the_report(tmp_path: Path) -> None:
    found, kept = at_work("failing", tmp_path)
    status = {name: part["status"] for name, part in found.items()}
    assert status == {
        "right": "ok", "wrong": "failed", "late": "stopped", "dead": "died", "lacking": "left out", "last": "ok"
    }, found  # fmt: skip
    assert found["wrong"]["cases"]["two"]["error"].startswith(
        "ZeroDivisionError: in nowhere.py (tests/benchmarks/failing_parts.py:"
    )
    assert all(found[name]["cases"]["one"]["ok"] for name in status if name != "lacking")  # what was found before stays
    assert "limit of 5 s" in found["late"]["error"]
    assert "signal 9: the last words" in found["dead"]["error"]
    assert "no_such_module" in found["lacking"]["error"]
    assert len(kept) == 5  # after each
    assert "last" not in kept[-2]
    assert "last" in kept[-1]


@pytest.mark.slow
def test_parts_that_measure_run_alone_and_are_told_what_was_found(tmp_path: Path) -> None:
    batches, found, late = at_work("alone", tmp_path)
    assert batches == [["first"], ["told"]]
    assert found["told"]["cases"]["seen"]["ok"]
    assert (late["told"]["status"], late["told"]["error"]) == ("left out", "no time was left for it")


def test_the_parts_fit_the_budget(script) -> None:
    """With eight cores, which start at once all that need not be alone, even if every part runs into its limit."""
    gpu = script("gpu")
    together = [part for part in gpu.every_part() if not part.alone]
    alone = [part for part in gpu.every_part() if part.alone]
    assert len(together) <= 8
    assert max(p.limit for p in together) + sum(p.limit for p in alone) <= gpu.BUDGET - gpu.RESERVE


def test_missing_packages_are_named(script, monkeypatch, capsys) -> None:
    gpu, shared = script("gpu"), script("gpu_parts")
    parts = [*script("gpu_parts.trainer").PARTS, *script("gpu_parts.speed").PARTS]
    monkeypatch.setattr(shared.importlib.util, "find_spec", lambda name: None)
    assert set(shared.missing(parts)) == {"omegaconf", "sklearn", "PIL", "diffusers"}
    assert gpu.installing(["sklearn", "PIL"]) == "pip install scikit-learn pillow"
    assert gpu.main([]) == 2
    assert "nothing here runs without torch, numpy, einops: pip install torch numpy einops" in capsys.readouterr().out


def broken(*_: Any) -> None:
    raise RuntimeError("the driver is too old")


def test_a_driver_that_does_not_start_is_told(script, monkeypatch, tmp_path: Path, capsys) -> None:
    monkeypatch.setattr(script("gpu"), "look", broken)
    assert script("gpu").main(["--out", str(tmp_path)]) == 2
    assert "CUDA does not start within a minute: RuntimeError: the driver is too old" in capsys.readouterr().out


def test_the_rates_of_the_cost_model_are_found(script) -> None:
    speed, machine = script("gpu_parts.speed"), script("gpu_parts").Machine("cuda", "x", 1000, 4000)
    sizes = [(1e12, 1e10), (5e12, 1e10), (1e12, 9e10), (7e12, 3e10)]
    rows = {str(i): {"flops": f, "touched": t, "measured, s": f / 4e14 + t / 2e12} for i, (f, t) in enumerate(sizes)}
    earlier = {"step": {"cases": {"the first": {"step, s": 2.0}}}}
    found = speed.fitted(machine, rows, {})
    assert (found["products"], found["stream"]) == pytest.approx((0.4, 0.5))
    assert found["error, worst"] == pytest.approx(0, abs=1e-9)
    assert found["met"]
    flops, touched = speed.counted(speed.FULL, True, recompute=True)
    ratio = speed.fitted(machine, rows, earlier)["the compiled step / its prediction"]
    assert ratio == pytest.approx(2.0 / (flops / 4e14 + touched / 2e12))
    rows["0"]["measured, s"] *= 3  # a point that the others do not explain
    assert speed.fitted(machine, rows, {})["error, worst"] > 0.5
    alone = {k: {**row, "measured, s": row["touched"] / 2e12} for k, row in rows.items()}
    assert speed.fitted(machine, alone, {})["stream"] == pytest.approx(0.5)  # where one rate explains all


def selective_scan(u: Any, delta: Any, A: Any, B: Any, C: Any, D: Any, delta_softplus: bool) -> Any:
    """The definition that mamba_ssm gives for its kernel: u and delta (b d n), A (d k), B and C (b k n), D (d)."""
    state, out, delta = 0.0, [], torch.nn.functional.softplus(delta)
    for i in range(u.shape[2]):
        step = delta[:, :, i, None]
        state = (step * A).exp() * state + step * B[:, None, :, i] * u[:, :, i, None]
        out.append((state * C[:, None, :, i]).sum(-1) + D * u[:, :, i])
    return torch.stack(out, 2)


@pytest.mark.parametrize(("kernel", "right"), [(selective_scan, True), (lambda u, *_, **__: u.clone(), False)])
def test_the_kernel_of_mamba_is_compared_with_its_definition(script, monkeypatch, kernel: Any, right: bool) -> None:
    right_parts, machine = script("gpu_parts.right"), script("gpu_parts").Machine("cpu", "no GPU")
    assert "is not installed" in right_parts.scanned(machine, torch.float32)["note"]
    monkeypatch.setattr(right_parts.mamba, "mamba_kernel", lambda: kernel)
    monkeypatch.setattr(right_parts.mamba, "has_data_on_cuda", lambda x: True)
    assert right_parts.scanned(machine, torch.float32)["ok"] is right


def test_a_step_that_is_skipped_changes_nothing(script, monkeypatch) -> None:
    trainer, machine = script("gpu_parts.trainer"), script("gpu_parts").Machine("cpu", "no GPU")
    assert trainer.skipped(machine)["ok"]
    monkeypatch.setattr(trainer, "set_skip", lambda optimizer, taken: None)
    assert not trainer.skipped(machine)["ok"]


def test_page_and_table_of_a_gpu(script, monkeypatch, tmp_path: Path) -> None:
    """With a made-up report, as a GPU will leave it."""
    step = {
        "tokens": 262144, "step, s": 4.0, "tokens/s": 65536.0, "mfu": 0.47, "memory": 2**36, "outside": 0.2,
        "idle": 0.01,
    }  # fmt: skip
    copies = {"copies": 1, "share": 0.8, "GB/s of a copy": 4000.0, "aim": "70% of a copy's rate", "met": True}
    parts = {
        "models": {"title": "Models", "status": "failed", "cases": {
            "latte": {"ok": False, "outputs": 0.5}, "x": {"ok": True}, "y": {"ok": None, "note": "does not fit"}}},
        "tests": {"title": "Tests", "status": "left out", "error": "it needs pytest", "cases": {}},
        "step": {"title": "A step", "status": "ok", "cases": {"all": step | {"aim": "MFU of 50%", "met": False}}},
        "kernels": {"title": "Kernels", "status": "ok", "cases": {"a": copies, "b": copies | {"share": 0.9}}},
        "graph": {"title": "Graphs", "status": "ok", "cases": {"a": {"ok": True, "eager / graph": 2.5}}},
        "host": {"title": "Host", "status": "ok", "cases": {"Latte": {"host, ms": 30.0, "host / kernels": 0.6}}},
        "calibration": {"title": "Rates", "status": "ok", "cases": {
            "rates": {"TFLOP/s": 500.0, "GB/s": 3000.0, "error, median": 0.05, "error, worst": 0.12, "products": 0.5}}},
    }  # fmt: skip
    found = {
        "dry": False, "device": "NVIDIA H200", "memory": 141e9, "command": "c", "commit": "x",
        "machine": {"date": "d", "cores": 16, "device": "p", "torch": "2.13"}, "versions": {"torch": "2.13"},
        "without": {"fla": "Scans"},
        "took": 500.0, "finished": True, "parts": {name: part | {"seconds": 3.0} for name, part in parts.items()},
    }  # fmt: skip
    page = script("gpu_parts.page").page(found)
    assert "On NVIDIA H200, 141 GB." in page
    assert "no GPU" not in page
    assert "- Models, latte: outputs 0.5\n" in page
    untold = "- Scans: fla is not installed.\n- Tests: it needs pytest.\n- Models: does not fit (y).\n"
    assert f"## What it does not tell\n\n{untold}" in page
    assert "- MFU of 50%: missed by all\n" in page
    assert "| all | 4 | 65,536 | 47% | 64.0 GiB | 20% | 1% |" in page
    assert "| rates | 500 | 3,000 | 5% | 12% | 50% |" in page
    tables = script("tables")
    script("common").save(tmp_path / "gpu.json", found)
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    table = "\n".join(tables.lines_of("gpu"))
    assert "| parts that are right | 5 of 7 |" in table
    assert "| 65,536 tokens/s, MFU 47.0%, 64 GiB, 20% outside of products and attention |" in table
    assert "| 80% to 90%, at 4,000 GB/s |" in table
    assert "500 TFLOP/s, 3,000 GB/s; errors of 5%, at most 12%" in table


def test_the_page_is_that_of_the_report(script) -> None:
    found = read(ROOT / "benchmarks/results/gpu.json")
    assert (ROOT / "docs/gpu.md").read_text() == script("gpu_parts.page").page(found)


@pytest.mark.long
def test_the_dry_run(tmp_path: Path) -> None:
    """Every part of the command on a CPU: nothing that it would ask of a GPU stumbles over itself."""
    command = [sys.executable, str(ROOT / "benchmarks/gpu.py"), "--dry-run", "--out", str(tmp_path), "--budget", "1500"]
    done = subprocess.run(command, capture_output=True, text=True)
    found = read(tmp_path / "gpu.json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert found["dry"]
    assert found["finished"]
    assert len(found["parts"]) == 14
    for name, part in found["parts"].items():
        assert part["status"] == "ok", (name, part)
        assert part["cases"], name
    step = next(iter(found["parts"]["step"]["cases"].values()))
    assert all(seconds > 0 for seconds in step["busy"].values())  # every kind was recognised
    assert "**There was no GPU.**" in (tmp_path / "gpu.md").read_text()
