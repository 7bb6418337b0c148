"""How long a step waits for a checkpoint: written while it waits, and written in the background.

    python benchmarks/checkpoint_stall.py [--million 20] [--rounds 3]

A model of so many million parameters with AdamW's moments, on one process, saved in turn both ways. What is stalled in
the background is the copy of the tensors; the disk, the hashes and the rename go on beside training.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import nn

from zoo.training.checkpoint import Contents
from zoo.training.saving import Saver


def contents(millions: float) -> Contents:
    width = 1024
    model = nn.Sequential(
        *(nn.Linear(width, width, bias=False) for _ in range(max(1, round(millions * 1e6 / width**2))))
    )
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, width)).square().mean().backward()
    optimizer.step()
    return Contents(model, optimizer)


def measure(millions: float, rounds: int) -> dict[str, Any]:
    """Median seconds that `save` waited, by way, and their ratio."""
    held = contents(millions)
    found: dict[str, list[float]] = {"waiting": [], "background": []}
    with tempfile.TemporaryDirectory() as folder:
        savers = {way: Saver(Path(folder) / way, 1, way == "background") for way in found}
        for step in range(1, rounds + 1):
            for way, saver in savers.items():
                saver.save(step, held, {})
                found[way].append(saver.stalled)
                saver.wait()
    medians = {way: statistics.median(times) for way, times in found.items()}
    return medians | {"ratio": medians["background"] / medians["waiting"]}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--million", type=float, default=20, help="parameters")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        found = measure(options.million, options.rounds)
    finally:
        dist.destroy_process_group()
    print(
        f"{options.million:g}M parameters: a step waits {found['waiting']:.3f} s for a checkpoint, "
        f"{found['background']:.3f} s if it is written in the background: {found['ratio']:.1%}"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
