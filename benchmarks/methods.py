"""The methods that are compared: the model, a step of it by a method, the formulas of the paper.

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

from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

import dsp
import dsp.embedded
import zoo
from dsp.report.table import StageRow

METHODS = {
    "dsp": "DSP", "ulysses": "Ulysses", "ring": "ring attention", "megatron_lm": "Megatron-LM",
    "megatron_sp": "Megatron-SP",
}  # fmt: skip
COLOURS = dict(zip(METHODS, ("#3b82f6", "#f59e0b", "#10b981", "#ec4899", "#8b5cf6")))
RECOMPUTE = ("no", "again", "saved")  # what backward does of forward: nothing; every stage; but not what it sent
PAPER = {"dsp": "2M/N", "ulysses": "4M/N", "ring": "2M", "megatron_lm": "8M", "megatron_sp": "8M"}
INSIDE = {  # what is sharded inside of a stage, once and for attention and MLP each
    "ulysses": ("heads",), "ring": ("s",), "megatron_sp": ("heads", "heads"), "megatron_lm": ("heads", "heads"),
}  # fmt: skip
TABLE_9 = {"dsp": 914, "ulysses": 5828, "megatron_lm": 8412, "megatron_sp": 51908}  # paper: ms at 8M tokens


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
    """A model and its inputs; a frame is `side` x `side` patches."""

    hidden: int = 64
    heads: int = 8
    depth: int = 2
    batch: int = 1
    frames: int = 64
    side: int = 16

    @property
    def places(self) -> int:
        return self.side**2

    @property
    def tokens(self) -> int:
        return self.batch * self.frames * self.places

    @property
    def activation(self) -> int:
        """M: bytes of an activation (b t s c), in fp32."""
        return 4 * self.tokens * self.hidden

    def bare(self, device: str) -> tuple[Any, dict[str, Tensor]]:
        """The model as it starts, and example inputs."""
        with torch.device(device):
            model: Any = zoo.create("transformer2d", hidden=self.hidden, heads=self.heads, depth=self.depth)
            lengths = {"frames": self.frames, "height": 2 * self.side, "width": 2 * self.side}
            return model, model.example_inputs(self.batch, **lengths)

    def model(self) -> Any:
        """The same weights on all ranks; none is zero, and no gradient vanishes."""
        torch.manual_seed(0)
        model, _ = self.bare("cpu")
        for p in model.parameters():
            nn.init.normal_(p, std=0.5 / p.shape[-1] ** 0.5 if p.ndim > 1 else 0.02)
        return model

    def inputs(self, mesh: DeviceMesh | None) -> dict[str, Tensor]:
        """Each rank makes its own frames alone, as train.py does; without a mesh all of them, the same everywhere."""
        n, rank = (mesh.size(), mesh.get_local_rank()) if mesh else (1, 0)
        whole = (self.batch, 4, self.frames, 2 * self.side, 2 * self.side)
        if n == 1:
            torch.manual_seed(1)
            x = torch.randn(whole)
        else:
            length = dsp.planner.chunk_sizes(self.frames, n)[rank]
            local = torch.randn(*whole[:2], length, *whole[3:], generator=torch.Generator().manual_seed(1 + rank))
            meta = torch.empty(whole, device="meta")
            x = DTensor.from_local(local, mesh, [Shard(2)], run_check=False, shape=meta.shape, stride=meta.stride())
        return {"x": x, "timestep": torch.full((self.batch,), 500.0)}

    def plan(self, method: str, ranks: int, **how: Any) -> dsp.Plan:
        model, inputs = self.bare("meta")
        return dsp.embedded.plan(model, kwargs=inputs, size=ranks, method=method, gather_output=False, **how)


@cache
def all_ranks() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("sp",))


class Step:
    """A training step of a model by a method, on this rank of all; `how`: other options of `dsp.parallelize`."""

    def __init__(self, method: str, shape: Shape, recompute: str = "no", **how: Any) -> None:
        self.size = dist.get_world_size()
        mesh = all_ranks()
        self.model = shape.model()
        dsp.embedded.parallelize(self.model, mesh, method, gather_output=False, **how)
        options: dict[str, Any] = {"context_fn": dsp.embedded.save_exchanges} if recompute == "saved" else {}
        for stage in [s for layer in self.model.blocks for s in (layer.spatial, layer.temporal) if recompute != "no"]:
            stage.forward = partial(checkpoint, stage.forward, use_reentrant=False, **options)
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
        parameters = [
            (p.to_local() if isinstance(p, DTensor) else p, isinstance(p, DTensor)) for p in self.model.parameters()
        ]
        each = [(p.numel() * p.element_size(), cut) for p, cut in parameters]
        return sum(b for b, _ in each), sum(b for b, cut in each if not cut)


# ----------------------------------------------------------------------------------------- what a method does, as drawn


def two_layers(method: str, ranks: int = 8) -> dsp.Plan:
    """The plan of two layers of the paper's 720M model, on 64 frames of 128 x 128."""
    with torch.device("meta"):
        model: Any = zoo.create("transformer2d", "720m", depth=2)
        inputs = model.example_inputs(1, frames=64, height=128, width=128)
    return dsp.embedded.plan(model, kwargs=inputs, size=ranks, method=method, dtype=torch.bfloat16, gather_output=False)


def layouts(method: str, row: StageRow) -> list[str]:
    """The dim that the activation is sharded over through one stage, from its start to its end."""
    outside = row.layout or "whole"
    if method not in row.switch:
        return [outside]
    return [outside, *(x for inside in INSIDE[method] for x in (inside, outside))]
