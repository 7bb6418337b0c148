"""The effect of `wire` on training: validation losses of tiny demos whose switches travel in fewer bits, and clips.

    python benchmarks/wire_loss.py [--steps 150] [--seeds 3] [--ranks 2] [--models video mamba protein]

Each model is trained once a seed with each `parallel.wire` from the same weights on the same batches. First come the
errors of the formats on what the switches of the video model carry, its activations and gradients, by size of block.
"""

from __future__ import annotations

import os
import statistics
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import dsp
import zoo
from benchmarks.common import line, on_ranks, options, table
from dsp.comm import formats
from dsp.support.private import TorchDispatchMode
from zoo.training import config as cfg
from zoo.training.model import mean_losses
from zoo.training.optim import learning_rate
from zoo.training.task_lookup import create_task

WIRES = ("same", "bf16", "fp8", "int8")
SMALL = (
    "model.overrides.hidden=64 train.batch=16 eval.clips=32 eval.levels=4 eval.linear_baseline=false optim.warmup=15"
)
MODELS = {
    "video": f"configs/demo.yaml model.overrides.depth=2 {SMALL}",
    "mamba": f"configs/st_mamba_demo.yaml model.overrides.depth=3 model.overrides.head_dim=16 {SMALL}",
    "protein": (
        "configs/protein_synthetic_demo.yaml data.residues=32 data.rows=16 data.families=64 data.depth=32 "
        "model.overrides.depth=1 eval.proteins=16 eval.baselines=false sample.every=0"
    ),
}


class Carried(TorchDispatchMode):
    """The tensors that switches carry, forward and in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.forward: list[Tensor] = []
        self.backward: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "dsp" and "switch" in func.__name__:
            given = args[0] if isinstance(args[0], list) else [args[0]]
            kept = self.backward if torch._C._current_graph_task_id() != -1 else self.forward
            kept += [x.detach().float().flatten() for x in given]
        return func(*args, **(kwargs or {}))


def errors(mesh: Any, say: Any) -> None:
    torch.manual_seed(0)
    model = zoo.create("transformer2d", "test", hidden=256, heads=4)
    inputs = model.example_inputs(2, frames=8, height=16, width=16)
    for p in model.parameters():  # not at rest: layers that begin with zeros pass nothing on
        torch.nn.init.normal_(p, std=0.05)
    dsp.parallelize(model, mesh, gather_output=False)
    with Carried() as carried:
        out = model(**{k: torch.randn_like(v) if v.is_floating_point() else v for k, v in inputs.items()})
        dsp.mean(out.square()).backward()
    kinds = {
        "fp8 (e4m3)": formats.FORMATS["fp8"],
        "e5m2": formats.Scaled("e5m2", torch.float8_e5m2, top=57344.0, below=49152.0),
        "int8": formats.FORMATS["int8"],
        "bf16": formats.FORMATS["bf16"],
    }
    head = "relative error, rms", "block", "bytes of bf16's", "activations, nearest", "gradients, stochastic"
    say("\n" + "\n".join(table(head)))
    for name, form in kinds.items():
        for block in (32, 64, 128, 256) if name != "bf16" else (128,):
            formats.BLOCK = block
            values = [
                error(form, carried.forward),
                error(replace(form, stochastic=True), carried.backward),
            ]
            sent = form.nbytes(1 << 20) / (2 << 20)
            say(line([name, block, f"{sent:.3f}", *(f"{one:.2%}" for one in values)]))
    formats.BLOCK = 128


def error(form: formats.Format, tensors: list[Tensor]) -> float:
    """The error of what arrives over what was sent, of all tensors together."""
    wrong = total = 0.0
    for seed, x in enumerate(tensors):
        came = form.unpack(form.pack(x, [len(x)], seed), [len(x)], torch.empty_like(x))
        scale = float(x.square().mean()) or 1.0  # every tensor counts alike
        wrong, total = wrong + float((came - x).square().mean()) / scale, total + 1
    return (wrong / total) ** 0.5


class Job:
    """One model and seed: its task, and batches that all formats train on."""

    def __init__(self, name: str, seed: int, steps: int, mesh: Any) -> None:
        self.mesh, self.seed, self.steps = mesh, seed, steps
        self.config = cfg.load([*MODELS[name].split(), f"train.seed={seed}", f"train.steps={steps}"])
        self.task = create_task(self.config, mesh, torch.device("cpu"))
        self.task.open()
        _, objective = self.built()
        self.batches = [self.task.batch(objective, step, 0, 0, 1) for step in range(steps)]
        self.judged = [inputs for _, _, inputs in self.task.validation_batches(objective, 0, 1)]

    def built(self) -> tuple[Any, Any]:
        torch.manual_seed(self.seed)
        model = self.task.model()
        return model, self.task.objective(model)

    def loss(self, objective: Any, inputs: Any) -> Tensor:
        return torch.stack(list(mean_losses(objective(**inputs)).values())).sum()

    def trained(self, wire: str) -> tuple[Any, float]:
        """The model, and its loss on what it has not seen."""
        model, objective = self.built()
        dsp.parallelize(objective, self.mesh, gather_output=False, wire=wire)
        options = self.config.optim
        optimizer = torch.optim.AdamW(model.parameters(), options.lr, tuple(options.betas), weight_decay=0.0)
        for step, inputs in enumerate(self.batches):
            torch.manual_seed(1000 * self.seed + step)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(options, step, self.steps)
            self.loss(objective, inputs).backward()
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            flat = torch.cat([g.flatten() for g in grads])
            dist.all_reduce(flat)
            for g, part in zip(grads, flat.div_(self.mesh.size()).split([g.numel() for g in grads])):
                g.copy_(part.view_as(g))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            objective.eval()
            return model, float(torch.stack([self.loss(objective, inputs) for inputs in self.judged]).mean())


def clips(job: Job, model: Any, say: Any) -> None:
    """The clips of one model, drawn from the same noise with each format in its switches."""
    task, weights = job.task, model.state_dict()
    torch.manual_seed(0)
    noise, labels = torch.randn(10, task.channels, *task.clip), torch.arange(10)
    samples: dict[str, Tensor] = {}
    for wire in WIRES:
        fresh = task.model()
        fresh.load_state_dict(weights)
        predictor = task.predictor(fresh).eval()
        dsp.parallelize(predictor, job.mesh, wire=wire)
        with torch.no_grad():
            samples[wire] = task.sampler(task.clip)(predictor, noise, 10, **task.conditions_of(labels, task.clip))
    spread = float(samples["same"].std())
    say(f"\nclips of 10 steps: root of the mean squared difference over the standard deviation {spread:.3f}:")
    for wire in WIRES[1:]:
        say(f"  {wire}: {float((samples[wire] - samples['same']).square().mean()) ** 0.5 / spread:.2%}")


def run(mesh: DeviceMesh, o: Namespace) -> None:
    def say(text: str) -> None:
        if mesh.get_local_rank() == 0:
            print(text, flush=True)

    errors(mesh, say)
    losses: dict[tuple[str, str], list[float]] = {}
    for seed in range(o.seeds):
        for name in o.models:
            job = Job(name, seed, o.steps, mesh)
            for wire in WIRES:
                model, loss = job.trained(wire)
                losses.setdefault((name, wire), []).append(loss)
                say(f"{name:<8} {wire:<5} seed {seed}: {loss:.5f}")
                if (name, wire, seed) == ("video", "same", 0):
                    clips(job, model, say)
    rows = []
    for name in o.models:
        base = losses[name, "same"]
        change = [[b / a - 1 for a, b in zip(base, losses[name, wire])] for wire in WIRES[1:]]
        shown = [f"{statistics.mean(c):+.2%} ({min(c):+.2%} to {max(c):+.2%})" for c in change]
        rows.append([name, ", ".join(f"{v:.4f}" for v in base), *shown])
    head = f"validation loss after {o.steps} steps", "same, by seed", *WIRES[1:]
    say("\n" + "\n".join(table(head, rows)))


if __name__ == "__main__":
    given = options(__doc__, choices={"models": MODELS}, steps=150, seeds=3, ranks=2, models=list(MODELS))
    print(f"{given.ranks} gloo ranks, torch {torch.__version__}")
    on_ranks(given.ranks, run, given)
