"""Stages that sum over a sharded dim, `+k`: each rank sums its part, and the sums are added up along another dim."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import dsp
from dsp.stages.notation import NotationError, parse
from tests.support.parity import assert_step_equal
from tests.support.slow import slow

ROWS = "b i [j c]"
STAGES = {"": "z=b i j c", "split": f"{ROWS} -> b i [j d]", "after": ROWS}
PRODUCT = "b +k i [c], b +k j [c] -> b i j [c]"


class Product(nn.Module):
    """Σ_k left_ki right_kj, with a weight of its own; with a bias it is no sum."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(3)), bias

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return torch.einsum("bkic,bkjc->bijc", left * self.weight, right) + float(self.bias)


class Pairs(nn.Module):
    """Stages along rows, and between them a product that sums over rows."""

    def __init__(self, ckpt: bool = False, bias: bool = False) -> None:
        super().__init__()
        self.split, self.product, self.after = nn.Linear(3, 6), Product(bias), nn.Linear(3, 3)
        self.ckpt = ckpt

    def forward(self, z: Tensor) -> Tensor:
        return checkpoint(self.block, z, use_reentrant=False) if self.ckpt else self.block(z)

    def block(self, z: Tensor) -> Tensor:
        return self.after(self.product(*self.split(z).chunk(2, -1)).tanh())


def pairs(rows: int, ckpt: bool) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Pairs(ckpt).double(), torch.randn(2, rows, rows, 3, dtype=torch.float64)


def parity(mesh: DeviceMesh, rows: int, ckpt: bool) -> tuple[Any, dict[str, int]]:
    (single, z), (model, _) = pairs(rows, ckpt), pairs(rows, ckpt)
    stages = STAGES | {"product": PRODUCT}
    plan = dsp.plan(model, z.requires_grad_(), stages=stages, size=mesh.size(), gather_output=True)
    (comm,) = assert_step_equal(single, dsp.parallelize(model, mesh, stages), mesh, (z,), count=True)
    return (plan.bytes, plan.text()), {p: sum(v["bytes"] for v in c.values()) for p, c in comm.by_collective().items()}


@pytest.mark.parametrize(
    ("n", "rows", "ckpt"), [(2, 4, True), (3, 7, False), slow(4, 6, False), slow(3, 2, True), slow(4, 5, True)]
)
def test_sums_are_those_of_one_process(ranks, n: int, rows: int, ckpt: bool) -> None:
    results = ranks(parity, n, rows, ckpt)
    planned, text = results[0][0]
    assert "+k → i" in text
    for phase in planned:
        busiest = max(sent[phase] for _, sent in results)
        # of uneven chunks another rank is the busiest in another collective
        assert busiest <= planned[phase] <= (1 if rows % n == 0 else 1.5) * busiest, phase


def test_a_sum_is_weighed_against_other_layouts() -> None:
    """Left and right switched to channels and the product back are 3 (N-1)/N² M, sums added up (N-1)/N M."""
    model, z = Pairs(), torch.randn(1, 8, 8, 3)

    def bytes_of(pattern: str, n: int) -> tuple[int, str | None]:
        plan = dsp.plan(model, z, stages=STAGES | {"product": pattern}, size=n, gather_output=False)
        return plan.bytes["forward"], next(r.layout for r in plan.stages if r.name == "product")

    channels = PRODUCT.replace("[c]", "c")
    assert bytes_of(PRODUCT, 2) == (z.nbytes // 2, "k")
    assert bytes_of(PRODUCT.replace("+k", "[k]"), 2)[0] == z.nbytes * 3 // 4
    assert bytes_of(channels, 2) == (z.nbytes // 2, "k")


@pytest.mark.parametrize(("bias", "word"), [(False, ""), (True, "is not a sum over 'k'")])
def test_check_holds_a_stage_to_its_sum(mesh: DeviceMesh, bias: bool, word: str) -> None:
    stages = STAGES | {"product": PRODUCT}
    report = dsp.check(Pairs(bias=bias).double(), torch.randn(1, 4, 4, 3).double(), mesh=mesh, stages=stages)
    assert report.ok == (not bias)
    assert word in report.text()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("b +k i", "write the output after '->'"),
        ("b +k i -> b k i", "without k"),
        ("b +k i, b k j -> b i j", r"write \+k wherever"),
        ("b [+k] i -> b i", "outside the brackets"),
        ("b + [k] i -> b i", r"unexpected '\+'; a pattern may have .* sums \+k"),
        ("b +k i -> b i, b i", "must have one output"),
    ],
)
def test_misreadings_are_explained(text: str, said: str) -> None:
    with pytest.raises(NotationError, match=said):
        parse(text)


def test_a_pattern_is_shown_as_it_was_written() -> None:
    pattern = parse("b +k i [c], b +k j [c] -> b i j [c]")
    assert " ".join(map(str, pattern.inputs)) == "b +k i [c] b +k j [c]"
    assert (pattern.free, pattern.summed) == (("i", "j", "b"), ("k",))
