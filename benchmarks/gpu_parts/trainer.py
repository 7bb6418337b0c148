"""Does the trainer run, and do the ways that only CUDA takes (ahead, offload, moments in 8 bits) train alike?"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import ROOT
from benchmarks.gpu_parts import PYTHONPATH, Cases, Machine, Part, Row, error
from zoo.training.optim import optimizers, set_skip
from zoo.training.records import read_metrics
from zoo.training.sections import Optim

STEPS = 8
QUIET = [f"train.steps={STEPS}", "log.every=4", "eval.every=0", "sample.every=0", "checkpoint.every=0", "train.ema=0.5"]
WAYS = {  # options; how far records and weights may be from those of the first; a package it needs
    "plain": (["train.ahead=false"], 0.0, ""),
    "train.ahead": (["train.ahead=true"], 1e-5, ""),  # on a CPU the other has no fused kernel
    "train.offload": (["train.offload=true"], 1e-3, ""),
    "adamw8bit": (["train.ahead=false", "optim.name=adamw8bit"], 3e-2, "torchao"),
}


def weights(checkpoint: Path) -> dict[str, Tensor]:
    """All that a checkpoint holds of weights and their average."""
    from torch.distributed import checkpoint as dcp

    reader = dcp.FileSystemReader(checkpoint)
    entries: Any = reader.read_metadata().state_dict_metadata.items()
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries if not name.startswith("optimizer")
    }  # fmt: skip
    with warnings.catch_warnings(action="ignore"):  # that it is one process
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


class Runs:
    """Runs of the demo by train.py under torchrun, with whatever device there is; each is started once."""

    def __init__(self, machine: Machine) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="dsp-gpu-")  # which goes with the cases
        self.tiny = machine.of([], ["train.batch=4", "eval.clips=4", "sample.clips=2", "model.overrides.depth=1"])
        self.processes: dict[str, Any] = {}

    def start(self, name: str, *more: str) -> None:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
        given = ["train.py", "configs/demo.yaml", *self.tiny, f"runs_dir={self.folder.name}", "wandb.mode=disabled"]
        with open(f"{self.folder.name}/{name}.log", "w") as log:
            self.processes[name] = subprocess.Popen(
                [*launcher, *given, *more],
                cwd=ROOT,
                stdout=log,
                stderr=log,
                env=os.environ | {"PYTHONPATH": PYTHONPATH},
            )

    def ended(self, name: str) -> Row:
        status, said = self.processes[name].wait(), Path(f"{self.folder.name}/{name}.log").read_text()
        losses = re.findall(r"loss ([\d.]+)", said)
        row: Row = {"ok": status == 0 and bool(losses), "losses": losses[:8]}
        return row if row["ok"] else row | {"error": said[-500:].replace(str(ROOT), "")}

    def plainly(self, name: str, *more: str) -> Row:
        self.start(name, "log.every=1", "eval.every=4", "sample.every=4", "checkpoint.every=2", *more)
        return self.ended(name)

    def results(self, name: str) -> tuple[list[float], dict[str, Tensor]]:
        """The records of a run's steps, and its weights."""
        run = Path(self.folder.name) / name
        records = [r for r in read_metrics(run / "metrics.jsonl") if "loss" in r]
        return [r[key] for r in records for key in ("loss", "grad_norm", "lr")], weights(
            run / f"checkpoints/step-{STEPS:08d}"
        )

    def compared(self, name: str) -> Row:
        """The records and the weights of a way against those of the plain one."""
        _, limit, package = WAYS[name]
        if name not in self.processes:
            return {"ok": None, "note": f"{package} is not installed"}
        for one in ("plain", name):
            row = self.ended(one)
            if not row["ok"]:
                return row
        (wanted, plain), (records, weights) = (self.results(one) for one in ("plain", name))
        if len(records) != len(wanted) or plain.keys() != weights.keys():
            return {
                "ok": False,
                "error": f"records {len(records)} and {len(wanted)}, weights {plain.keys() ^ weights.keys()}",
            }
        row = {
            "records": max(abs(a / b - 1) for a, b in zip(records, wanted)),
            "weights": error(*(torch.cat([x.flatten() for x in each.values()]) for each in (weights, plain))),
        }
        return {"ok": max(row.values()) <= limit, **row}


def skipped(machine: Machine) -> Row:
    """A step that the device is told to skip changes neither weights nor moments; those that it takes are as untold."""
    torch.manual_seed(0)
    bare, twin = (nn.Linear(64, 64).to(machine.device) for _ in range(2))
    twin.load_state_dict(bare.state_dict())
    (plain,), (judged,) = (optimizers(model, Optim(), fused=True) for model in (bare, twin))
    for taken in (1.0, 0.0, 1.0):
        for p, q in zip(bare.parameters(), twin.parameters()):
            p.grad = torch.randn_like(p)
            q.grad = p.grad if taken else torch.full_like(q, torch.nan)
        set_skip(judged, torch.tensor(taken, device=machine.device))
        judged.step()
        if taken:
            set_skip(plain, None)
            plain.step()
    return {"ok": all(torch.equal(p, q) for p, q in zip(bare.parameters(), twin.parameters()))}


def trainer(machine: Machine, _: Any) -> Cases:
    runs = Runs(machine)
    for name, (options, _, package) in WAYS.items():  # all at once: what takes long is to start
        if not package or importlib.util.find_spec(package):
            runs.start(name, *QUIET, f"name={name}", *options)
    compiling = () if machine.dry else ("train.compile=true",)
    return {
        "started": partial(runs.plainly, "demo", "train.steps=4", *compiling),
        "resumed": partial(runs.plainly, "demo", "train.steps=6", "resume=true", *compiling),
        "a step that is skipped": partial(skipped, machine),
        **{name: partial(runs.compared, name) for name in WAYS if name != "plain"},
    }


PARTS = [Part("trainer", "train.py", trainer, 130, ("omegaconf", "sklearn", "PIL"))]
