"""The pair stacks at tiny sizes, their inputs and a loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import dsp
import zoo
from tests.support.oracles import randomise

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "evoformer": ("evoformer", {"chunk": 1000}),
    "opm first": ("evoformer", {"opm_first": True, "extra_depth": 0, "couplings": 2}),
    "pairformer": ("pairformer", {}),
    "structure": ("pairformer", {"structure": 2, "structure_heads": 2}),
    "evoformer, structure": ("evoformer", {"structure": 2, "structure_heads": 2, "extra_depth": 0, "chunk": 1000}),
    "monomer": ("evoformer", {"monomer": True, "structure": 2, "structure_heads": 2}),
    "templates": ("pairformer", {"templates": 1}),
    "evoformer, templates": ("evoformer", {"templates": 2, "extra_depth": 0, "couplings": 2}),
}


def build(case: str, **overrides: Any) -> nn.Module:
    name, own = CASES.get(case, ("evoformer", {"depth": 0, "extra_depth": 0, "couplings": 3}))
    torch.manual_seed(0)
    model = zoo.create(name, "test", **{**own, **overrides}).double()
    randomise(model)
    return model


def inputs(model: nn.Module, batch: int, rows: int, residues: int, masked: bool = True) -> dict[str, Tensor]:
    torch.manual_seed(1)
    more = {"extra_rows": rows + 1 - batch % 2} if getattr(model.config, "extra_depth", 0) else {}
    given = model.example_inputs(batch, rows=rows, residues=residues, **more)
    return given if masked else {k: v for k, v in given.items() if "mask" not in k}


def scalar(out: tuple[Tensor, ...]) -> Tensor:
    return sum(((i + 1) * dsp.mean(y.sin()) for i, y in enumerate(out)), torch.zeros(()))
