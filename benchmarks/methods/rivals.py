"""The shared parts of the methods' measurements: the model, a step of it by a method, the formulas of the paper.

The model is the Transformer-2D of the paper: a layer is a spatial and a temporal block, attention and MLP each, over an
activation (b t s c) of M bytes. A method shards it over N ranks; what one rank sends in a layer, in units of M, and of
which all but its own part, (N-1)/N, travels:

    method         forward   backward      again, if recomputed   paper, table 3
    dsp            2/N       2/N           0                      2/N
    ulysses        4/N       4/N           4/N                    4/N
    ring           2         2 + 2N/(N-1)  2                      2
    megatron_lm    8         8             8                      8
    megatron_sp    8         8             8                      8

Recomputed is every stage, as train.py does it. DSP switches between stages, so recomputing one sends nothing; the
others communicate inside, and send again, or keep what they received (`saved`). A ring sends gradients of keys and
values home in fp32, one hop more than there are others.
"""

# ruff: noqa: E402 (the repository is put on the path first)

import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

import dsp
import dsp.embedded
import zoo

METHODS = {
    "dsp": "DSP",
    "ulysses": "Ulysses",
    "ring": "ring attention",
    "megatron_lm": "Megatron-LM",
    "megatron_sp": "Megatron-SP",
}
COLOURS = {
    "dsp": "#3b82f6", "ulysses": "#f59e0b", "ring": "#10b981", "megatron_lm": "#ec4899", "megatron_sp": "#8b5cf6",
}  # fmt: skip
RECOMPUTE = ("no", "again", "saved")  # what backward does of forward: nothing; every stage; but not what it sent
PAPER = {"dsp": "2M/N", "ulysses": "4M/N", "ring": "2M", "megatron_lm": "8M", "megatron_sp": "8M"}


def formula(method: str, n: int) -> dict[str, float]:
    """{phase: what one of n ranks sends in a layer}, in units of M."""
    units = {
        "dsp": (2 / n, 2 / n, 0.0),
        "ulysses": (4 / n, 4 / n, 4 / n),
        "ring": (2.0, 2.0 + 2 * n / (n - 1), 2.0),
        "megatron_lm": (8.0, 8.0, 8.0),
        "megatron_sp": (8.0, 8.0, 8.0),
    }[method]
    return {phase: unit * (n - 1) / n for phase, unit in zip(("forward", "backward", "recompute"), units)}


@dataclass(frozen=True)
class Shape:
    """A model and its inputs; a frame is `side` x `wide` patches, or square. `low_rank`: sums of keys, if not 0."""

    hidden: int = 64
    heads: int = 8
    depth: int = 2
    batch: int = 1
    frames: int = 64
    side: int = 16
    wide: int = 0
    low_rank: int = 0

    @property
    def places(self) -> int:
        return self.side * (self.wide or self.side)

    @property
    def tokens(self) -> int:
        return self.batch * self.frames * self.places

    @property
    def activation(self) -> int:
        """M: bytes of an activation (b t s c), in fp32."""
        return 4 * self.tokens * self.hidden

    def model(self) -> Any:
        """The same weights on all ranks; none is zero, and no gradient vanishes."""
        torch.manual_seed(0)
        low_rank = (self.low_rank, self.places) if self.low_rank else None
        model = zoo.create("transformer2d", hidden=self.hidden, heads=self.heads, depth=self.depth, low_rank=low_rank)
        for p in model.parameters():
            nn.init.normal_(p, std=0.5 / p.shape[-1] ** 0.5 if p.ndim > 1 else 0.02)
        return model

    def inputs(self, mesh: DeviceMesh | None) -> dict[str, Tensor]:
        """Each rank makes its own frames alone, as train.py does; without a mesh all of them, the same everywhere.

        So is a single frame, which nobody can have a part of before it is embedded.
        """
        n, rank = (mesh.size(), mesh.get_local_rank()) if mesh and self.frames > 1 else (1, 0)
        whole = (self.batch, 4, self.frames, 2 * self.side, 2 * (self.wide or self.side))
        if n == 1:
            torch.manual_seed(1)
            x = torch.randn(whole)
        else:
            own = dsp.planner.chunk_sizes(self.frames, n)[rank]
            local = torch.randn(*whole[:2], own, *whole[3:], generator=torch.Generator().manual_seed(1 + rank))
            meta = torch.empty(whole, device="meta")
            x = DTensor.from_local(local, mesh, [Shard(2)], run_check=False, shape=meta.shape, stride=meta.stride())
        return {"x": x, "timestep": torch.full((self.batch,), 500.0)}


@cache
def all_ranks() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("sp",))


class Step:
    """A training step of a model by a method, on this rank of all."""

    def __init__(self, method: str, shape: Shape, recompute: str = "no") -> None:
        self.size = dist.get_world_size()
        mesh = all_ranks()
        self.model = shape.model()
        dsp.embedded.parallelize(self.model, mesh, method, gather_output=False)
        again: dict[str, Any] = {"context_fn": dsp.embedded.save_exchanges} if recompute == "saved" else {}
        for stage in [s for layer in self.model.blocks for s in (layer.spatial, layer.temporal) if recompute != "no"]:
            stage.forward = partial(checkpoint, stage.forward, use_reentrant=False, **again)
        # Megatron-LM's activations are whole, and so are its inputs
        self.inputs = shape.inputs(None if method == "megatron_lm" else mesh)

    def forward(self) -> Tensor:
        out = self.model(**self.inputs)
        return dsp.mean(out * out)

    def backward(self, loss: Tensor) -> None:
        for p in self.model.parameters():
            p.grad = None
        loss.backward()

    def average(self) -> None:
        """Average the gradients over ranks, as DDP does; cut weights are a rank's own."""
        if self.size == 1:
            return
        grads = [p.grad for p in self.model.parameters() if not isinstance(p, DTensor) and p.grad is not None]
        flat = torch.cat([g.reshape(-1) for g in grads])
        dist.all_reduce(flat)
        flat /= self.size
        for grad, mean in zip(grads, flat.split([g.numel() for g in grads])):
            grad.copy_(mean.view_as(grad))

    @property
    def weights(self) -> tuple[int, int]:
        """Bytes of parameters that this rank has, and of those whose gradients are averaged."""
        own = [(p.to_local() if isinstance(p, DTensor) else p, isinstance(p, DTensor)) for p in self.model.parameters()]
        each = [(p.numel() * p.element_size(), cut) for p, cut in own]
        return sum(b for b, _ in each), sum(b for b, cut in each if not cut)


def circumstances(shape: Shape, arguments: Sequence[str]) -> dict[str, Any]:
    """When, where and how something was measured."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.split(":")[1].strip() for line in info.splitlines() if line.startswith("model name")]
    script = Path(sys.argv[0]).resolve()
    name = str(script.relative_to(ROOT)) if script.is_relative_to(ROOT) else script.name
    return {
        "command": " ".join(["python", name, *arguments]),
        "date": time.strftime("%Y-%m-%d"),
        "cores": os.cpu_count(),
        "processor": names[0] if names else platform.machine(),
        "load": os.getloadavg()[0],
        "torch": torch.__version__.split("+")[0],
        "shape": asdict(shape),
    }
