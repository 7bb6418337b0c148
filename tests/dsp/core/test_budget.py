"""How many Python functions one more operation, stage or switch of a parallelized forward calls: on any machine alike.

Host time follows these counts; benchmarks/micro.py --host measures it.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import dsp
from dsp.comm.layout import Axis
from dsp.guard.agreement import Agreement


class Plus(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1


class Chain(nn.Module):
    """`depth` stages that do next to nothing, between each two of which `glue` is done `times`."""

    def __init__(self, depth: int, glue: Callable[[Tensor], Tensor] | None = None, switched: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Plus() for _ in range(depth))
        self.glue = glue
        kinds = ["b t [s c]", "b [t] s [c]"] if switched else ["b t [s c]"]
        self.stages = {"": "x=b t s c"} | {f"blocks.{i}": kinds[i % len(kinds)] for i in range(depth)}

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if self.glue is None else self.glue(block(x))
        return x


GLUE: dict[str, Callable[[Tensor], Tensor]] = {
    "x + x": lambda x: x + x,
    "x.transpose(1, 2) there and back": lambda x: x.transpose(1, 2).transpose(1, 2),
    "F.silu(x)": F.silu,
    "F.dropout(x, 0.0)": lambda x: F.dropout(x, 0.0),  # it draws nothing
    "chunk and cat": lambda x: torch.cat(x.chunk(2, -1), -1),
    "x[..., ::2] = 0": lambda x: (x.__setitem__((..., slice(None, None, 2)), 0), x)[1],
}
# Python calls that one more adds to those of the bare model
BUDGET = {
    "stage": 40, "switch": 38, "x + x": 8, "x.transpose(1, 2) there and back": 22, "F.silu(x)": 12,
    "F.dropout(x, 0.0)": 12, "chunk and cat": 36, "x[..., ::2] = 0": 48,
    "do all ranks hold the same": 13, "a call of one stage": 174,
}  # fmt: skip


def calls_of(forward: Callable[[], Any]) -> int:
    """The fewest of three calls: what else Python does meanwhile, such as finalizers, only adds to a count."""
    count = 0

    def counts(frame: Any, event: str, what: Any) -> None:
        nonlocal count
        count += event == "call"

    forward(), forward()
    found = []
    for _ in range(3):
        gc.collect()  # of what was planned: tensors without data that count when they go
        count = 0
        sys.setprofile(counts)
        try:
            forward()
        finally:
            sys.setprofile(None)
        found.append(count)
    return min(found)


def asked(agreement: Agreement, x: Tensor) -> None:
    agreement.start([x], (1,), 7, wait=False)
    agreement.finish()


def added(mesh: DeviceMesh) -> dict[str, int]:
    x = torch.randn(1, 4, 6, 8)

    def calls(depth: int, *options: Any, parallel: bool) -> int:
        model = Chain(depth, *options)
        if parallel:
            dsp.parallelize(model, mesh, gather_output=False)
        with torch.no_grad():
            return calls_of(lambda: model(x))

    def slope(*options: Any, parallel: bool) -> int:
        return (calls(4, *options, parallel=parallel) - calls(2, *options, parallel=parallel)) // 2

    def beyond(*options: Any) -> int:
        return slope(*options, parallel=True) - slope(*options, parallel=False)

    found = {"stage": beyond(), "switch": beyond(None, True)}
    found["switch"] -= found["stage"]
    found["a call of one stage"] = calls(1, parallel=True) - calls(1, parallel=False)
    found["do all ranks hold the same"] = calls_of(partial(asked, Agreement(Axis.of(mesh), ["x"], nn.Linear(2, 2)), x))
    return found | {name: beyond(glue) - found["stage"] for name, glue in GLUE.items()}


def test_python_calls_stay_within_their_budget(ranks) -> None:
    found = ranks(added, 2)[0]
    assert {k: v for k, v in found.items() if v > BUDGET[k]} == {}, str(found)
