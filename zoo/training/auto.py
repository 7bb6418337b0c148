"""`parallel=auto`: a choice of mesh, method, recomputed modules, and of wire, route and overlap where they are auto, by
the links at hand and the model's own plans.

The choice changes how a step is computed, and not what it computes: a step has the samples that the configuration gives
it, train.batch x train.accumulation x dp_replicate x dp_shard, whether several groups share them or one accumulates.
Only parallel.wire=auto permits other numbers, since fewer bits are not exact.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import dsp
from dsp.embedded import Timing
from zoo.training import UserError, checkpoint
from zoo.training.config import Config, load
from zoo.training.dry_run import Memory, steps_on
from zoo.training.environment import world_size
from zoo.training.model import compute_dtype, known_hardware, without_weights
from zoo.training.task_lookup import create_task
from zoo.training.tracking import human_bytes, number_of


@dataclass(frozen=True)
class Candidate:
    """A mesh, a method and its switches (`timing`), the recomputed modules, and whether the memory fits."""

    timing: Timing
    recomputed: str
    fits: bool

    def row(self) -> list[str]:
        t = self.timing
        shares = [f"{100 * part / t.seconds.step:.0f}%" for part in (t.seconds.compute, t.seconds.comm)]
        memory = human_bytes(t.held) + ("" if self.fits else ", too much")
        return [
            f"{t.dp} x {t.sp}",
            t.method if t.sp > 1 else "-",
            self.recomputed,
            t.plan.how or "-",
            dsp.hardware.clock(t.seconds.step),
            *shares,
            memory,
        ]


def batches_of(config: Config) -> int:
    """The number of batches in a step, over all groups."""
    return config.train.accumulation * config.parallel.dp_replicate * config.parallel.dp_shard


def applied(config: Config, dp: int, sp: int, method: str, recomputed: str, **sent: Any) -> Config:
    """The configuration on another mesh, for the same step. sent: values of wire, route and overlap."""
    parallel = replace(config.parallel, auto=False, dp_replicate=1, dp_shard=dp, sp=sp, method=method, **sent)
    accumulation = batches_of(config) // dp
    train = replace(config.train, checkpoint_activations=recomputed, accumulation=accumulation)
    return replace(config, parallel=parallel, train=train)


class Choice(NamedTuple):
    """The choice, and a table that says why. sent: the values chosen for wire, route and overlap."""

    dp: int
    sp: int
    method: str
    recomputed: str
    table: str
    sent: dict[str, Any]

    def applied(self, config: Config) -> Config:
        """The configuration with this choice."""
        return applied(config, self.dp, self.sp, self.method, self.recomputed, **self.sent)


def auto_options(config: Config) -> list[str]:
    """Those of the options wire, route and overlap that are auto."""
    return [name for name in ("wire", "route", "overlap") if getattr(config.parallel, name) == "auto"]


def previous_choice(config: Config, world: int) -> Choice | None:
    """The choice of the run that is resumed, if it fits as many ranks: its steps stay the same, bit for bit."""
    directory = Path(config.runs_dir) / str(config.name)
    if not config.resume or not checkpoint.finished(directory / "checkpoints"):
        return None
    try:
        before = load([str(directory / "config.yaml")])
    except UserError:  # another version wrote it
        return None
    parallel, recomputed = before.parallel, before.train.checkpoint_activations
    dp, sp = parallel.dp_shard, parallel.sp or 0
    if parallel.dp_replicate != 1 or dp * sp != world or batches_of(config) % dp:
        return None
    text = f"parallel=auto keeps what the run had: dp_shard={dp} sp={sp} {parallel.method}, recomputed: {recomputed}"
    return Choice(
        dp, sp, parallel.method, recomputed, text, {name: getattr(parallel, name) for name in auto_options(config)}
    )


def choose(config: Config, world: int, hardware: dsp.Hardware) -> Choice:
    """The shortest step that fits on `world` ranks. Raises UserError where nothing fits."""
    every = sorted(candidates(config, world, hardware), key=lambda c: (not c.fits, c.timing.seconds.step))
    if not every or not every[0].fits:
        need = min((c.timing.held for c in every), default=0)
        raise UserError(
            f"parallel=auto: nothing fits {human_bytes(int(hardware.memory))} a rank on {number_of(world, 'rank')}; "
            f"the most economical mesh needs {human_bytes(need)}. More ranks, a smaller train.batch or smaller samples "
            "need less"
        )
    best, first = every[0], dict[tuple[int, int, str], Candidate]()
    for c in every:  # for each mesh and method, the best way to recompute
        first.setdefault((c.timing.dp, c.timing.sp, c.timing.method), c)
    head = ["dp x sp", "method", "recomputed", "switches", "a step", "computing", "sequence's traffic", "memory a rank"]
    rows = [head, *(c.row() for c in first.values())]
    if all(row[3] == "-" for row in rows[1:]):  # all switches have the default options
        rows = [row[:3] + row[4:] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join(cell.rjust(w) for cell, w in zip(row, widths)) for row in rows]
    sent = {name: value for name, value in sent_by(best.timing.plan).items() if name in auto_options(config)}
    said = "".join(f" {name}={'null' if value is None else value}" for name, value in sent.items())
    headline = f"parallel=auto takes the first: dp_shard={best.timing.dp} sp={best.timing.sp}{said}"
    table = "\n".join([headline, *lines])
    return Choice(best.timing.dp, best.timing.sp, best.timing.method, best.recomputed, table, sent)


def sent_by(plan: dsp.Plan) -> dict[str, Any]:
    """The options that a plan settles; auto, by the same hardware, where it chooses by size or by stage."""
    ways = {way for _, way in plan.ways.steps}
    return {
        "wire": plan.wire.forward,
        "route": ways.pop() if len(ways) == 1 else "auto",
        "overlap": "auto" if any(o.pieces > 1 for o in plan.overlaps) else None,
    }


def candidates(config: Config, world: int, hardware: dsp.Hardware) -> list[Candidate]:
    """Each mesh of `world` ranks that keeps a step's samples, with each method and way to recompute that it can run."""
    task, candidates, batches = create_task(config), list[Candidate](), batches_of(config)
    memory = Memory(config, task, without_weights(config, task)[0])
    for way in memory.ways:
        if config.parallel.save_exchanges and way != "stages":
            continue
        objective = without_weights(applied(config, 1, world, "dsp", way), task)[1]
        for dp in (n for n in range(1, world + 1) if gcd(world, batches) % n == 0):
            candidate = applied(config, dp, world // dp, "dsp", way)
            steps = steps_on(hardware, candidate, task, objective, memory.under(candidate))
            for t in steps.supported(dp, world // dp):
                if t.method == "dsp" or not config.train.offload:
                    candidates.append(Candidate(t, way, steps.fits(t)))
    return candidates


def foreseen(config: Config) -> Choice:
    """The choice for WORLD_SIZE ranks on the configured hardware; nothing is measured."""
    if (hardware := known_hardware(config)) is None:
        raise UserError(
            "parallel=auto needs the speed of devices and links, which a dry run does not measure: name the hardware, "
            "as in hardware.device=h100"
        )
    return choose(config, world_size(), hardware)


def measured(config: Config, device: torch.device, node: int) -> dsp.Hardware:
    """The hardware of all ranks, measured; `node` ranks share a machine. Collective."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("all",))
    memory = config.parallel.memory and config.parallel.memory * 2**30
    return dsp.hardware.measured(mesh, node=node, dtype=compute_dtype(config), memory=memory)
