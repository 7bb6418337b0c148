"""Runs of train.py in tests: in this process, as processes, on ranks of the pool; what they recorded, compared."""

import importlib
import logging
import os
import signal
import socket
import subprocess
import sys

import pytest
import sklearn.datasets  # noqa: F401 (here, so that ranks are forked with it)
from torch.distributed.device_mesh import DeviceMesh

from tests.support.paths import ROOT
from zoo.training import tracking

TINY = """
model: {name: transformer2d, size: test, overrides: {in_channels: 1, num_classes: 10}}
data: {name: digits, frames: 5, height: 6, width: 6, digit: 5}
optim: {lr: 1e-3, warmup: 2}
train: {steps: 4, batch: 2}
eval: {every: 2, clips: 4, levels: 2}
sample: {every: 4, clips: 2, steps: 2, guidance: 2}
log: {every: 1}
checkpoint: {every: 2}
profile: {every: 0}
wandb: {mode: disabled}
"""


class Runs:
    """Starts runs of a tiny configuration in one directory."""

    def __init__(self, trainer, directory, text=TINY, name="tiny.yaml"):
        self.trainer, self.directory, self.file = trainer, directory, directory / name
        self.file.write_text(text)

    def arguments(self, *overrides):
        return [str(self.file), f"runs_dir={self.directory / 'runs'}", *overrides]

    def __call__(self, *overrides, expect=0):
        assert self.trainer.main(self.arguments(*overrides)) == expect
        name = next((o[5:] for o in overrides if o.startswith("name=")), "tiny")
        return self.directory / "runs" / name

    def start(self, command, overrides, **environment):
        return subprocess.Popen(
            [sys.executable, "-W", "error", *command, str(ROOT / "train.py"), *self.arguments(*overrides)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        )  # fmt: skip

    def torchrun(self, ranks, *overrides):
        return self.start(["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)], overrides)

    def bare(self, ranks, *overrides):
        """The ranks alone, as a scheduler other than torchrun would start them."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
        return [
            self.start([], overrides, **address, RANK=str(r), LOCAL_RANK=str(r), WORLD_SIZE=str(ranks))
            for r in range(ranks)
        ]


def run_here(mesh, arguments):
    """On every rank of the pool: a run, and what dsp sent in each of its steps (forward, backward, recompute)."""
    import dsp

    sys.path.insert(0, str(ROOT))
    trainer = importlib.import_module("train")
    sent, plain = [], trainer.train_step

    def counted(run, *args):
        with dsp.count_comm() as comm:
            result = plain(run, *args)
        sent.append([sum(phase.bytes.values()) for phase in (comm.forward, comm.backward, comm.recompute)])
        return result

    trainer.train_step = counted
    try:
        with Heard() as heard:
            assert trainer.main(arguments) == 0
    finally:
        trainer.train_step = plain
    assert not heard.texts, heard.texts
    return sent


ABORTED = "terminate called without an active exception"


def launched(command, **how):
    """`subprocess.run` of processes with a gloo group, again (twice at most) where torch aborted one at its exit.

    It looks like pytorch/pytorch#179291: a thread of gloo lets go of a tensor of Python's while the interpreter ends.
    16 of 25 runs of torch alone on four ranks did so that end with a collective, and none of 20 that destroy their
    groups. All work is done by then.
    """
    for _ in range(3):
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, **how)
        if not (done.returncode and ABORTED in done.stderr):
            break
    return done


class Heard(logging.Handler):
    """The warnings of the library; idle: those of ranks that have no part of some stages, as tiny sizes give."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts, self.idle = [], []

    def emit(self, record):
        text = record.getMessage()
        (self.idle if "have nothing to do" in text else self.texts).append(text)

    def __enter__(self):
        logging.getLogger("dsp").addHandler(self)
        return self

    def __exit__(self, *exc):
        logging.getLogger("dsp").removeHandler(self)


def one_of(size, rank):
    """The mesh of so many ranks as one of them sees it, in a process alone."""
    return DeviceMesh("cpu", list(range(size)), mesh_dim_names=("sp",), _init_backend=False, _rank=rank)


def metrics(directory, *keys):
    """{step: values of keys} of the training records."""
    records = tracking.read_metrics(directory / "metrics.jsonl")
    return {r["step"]: tuple(r[k] for k in keys) for r in records if all(k in r for k in keys)}


def alike(a, b, tolerance=1e-5, keys=(("loss", "grad_norm", "lr"), ("val_loss",))):
    """The curves of two runs are one; with a tolerance of 0 to the bit."""
    for some in keys:
        expected, curve = metrics(a, *some), metrics(b, *some)
        assert list(curve) == list(expected)
        for step, values in expected.items():
            assert curve[step] == pytest.approx(values, rel=tolerance, abs=0), (step, some)


def stop_at(trainer, monkeypatch, when, where="train_step"):
    """Send this process a SIGTERM just before step `when`, or before a later function is called then."""
    original, begun = getattr(trainer, where), []

    def watched(run, *args):
        begun.append(1)
        if (args and args[0] == when) or (not args and len(begun) == when):
            os.kill(os.getpid(), signal.SIGTERM)
        return original(run, *args)

    monkeypatch.setattr(trainer, where, watched)
