"""Attention under a mask along its queries: as much work on every rank, exact, and bytes as planned."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import dsp
from dsp.comm.balanced_rows import RowDeal, pairs
from dsp.comm.layout import Cut, chunk
from dsp.core.torch_calls import Operand
from dsp.glue.rules import Frame
from dsp.glue.rules.flex import Local
from dsp.planner import chunk_sizes
from tests.support.parity import assert_step_equal
from tests.support.runs import Heard
from tests.support.slow import slow

C = 8


class Attention(nn.Module):
    """Heads of queries that share one of keys, fewer than there are ranks; a table of positions is added."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads, self.q, self.kv = heads, nn.Linear(C, C * heads), nn.Linear(C, 2 * C)
        self.out = nn.Linear(C * heads, C)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x + torch.linspace(0, 1, x.shape[1], dtype=x.dtype)[:, None]).unflatten(-1, (self.heads, C))
        k, v = self.kv(x).unflatten(-1, (2, 1, C)).unbind(2)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads > 1)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Model(nn.Module):
    stages = {"": "x=b n c"}

    def __init__(self, heads: int, again: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Attention(heads) for _ in range(2))
        for layer in self.layers if again else ():
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def places(n: int) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(1, n, C, dtype=torch.float64)


@pytest.mark.parametrize("n", range(2, 9))
def test_head_and_tail_are_as_much_for_every_rank(n: int) -> None:
    for size in (1, 2, n, 2 * n - 1, 2 * n, 5 * n + 1, 32 * n):
        deal = RowDeal.halves(size, n)
        every = [row for rank in range(n) for span in deal.spans(rank) for row in range(*span)]
        assert sorted(every) == list(range(size))
        work = [sum(row + 1 for span in deal.spans(rank) for row in range(*span)) for rank in range(n)]
        chunks = chunk_sizes(size, n)
        assert deal.causal_load == pytest.approx(max(work) / pairs(size) * size / chunks[0])
        if size % (2 * n) == 0:
            assert set(work) == {pairs(size) // n}


def exact(
    model: nn.Module, mesh: DeviceMesh, x: Tensor, count: bool = True, single: nn.Module | None = None
) -> tuple[dsp.Plan, Any]:
    """A step of it on all ranks beside one process, with its plan; the library finds that it sends what is planned.

    single: the model on one process, where that is another one.
    """
    plan = dsp.plan(model, x, size=mesh.size(), gather_output=False)
    parallel = dsp.parallelize(copy.deepcopy(model), mesh, gather_output=False)
    with Heard() as heard:
        (comm,) = assert_step_equal(
            single or model, parallel, mesh, {"x": x}, count=count, loss=lambda y: dsp.mean(y * y * y)
        )
    assert not [text for text in heard.texts if "its plan says" in text]
    return plan, comm


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize(("mesh", "heads"), [(2, 1), (3, 2), slow(4, 3)], indirect=["mesh"])
def test_causal_attention_along_queries(mesh: DeviceMesh, heads: int, again: bool) -> None:
    n = mesh.size()
    for size in (16 * n, 16 * n + 3, n + 1):
        plan, comm = exact(Model(heads, again), mesh, places(size))
        for phase, kinds in plan.sends.items():
            assert getattr(comm, phase).calls["rows"] == kinds.get("rows", (0, 0))[1], phase
        assert plan.share < 1.5 / n or size < 2 * n
        assert size % (2 * n) or plan.flops == plan.flops_alone // n


# ------------------------------------------------------------------------------------------------ flex_attention

B = 4  # places of a block of its masks


def causal(b: Any, h: Any, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


def window(b: Any, h: Any, i: Tensor, j: Tensor) -> Tensor:
    return (i - j).abs() < 7


def of_documents(*lengths: int) -> Any:
    """A mask of packed documents, of which each place sees what is before it in its own."""
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return lambda b, h, i, j: (ids[i] == ids[j]) & (i >= j)


def seen_blocks(blocks: Any) -> int:
    return int(blocks[2].sum()) + (0 if blocks[4] is None else int(blocks[4].sum()))


def frame(mask: Any, size: int, n: int, rank: int) -> tuple[Frame, Any]:
    from torch.nn.attention.flex_attention import create_block_mask

    block = create_block_mask(mask, None, None, size, size, device="cpu", BLOCK_SIZE=B).as_tuple()
    q, k, v = Operand((1, 1, size, 16), Cut(2)), Operand((1, 1, size, 16)), Operand((1, 1, size, 16))
    of = [Operand(tuple(t.shape)) if isinstance(t, Tensor) else t for t in block]
    options = {"OUTPUT_LOGSUMEXP": True, "OUTPUT_MAX": False}
    args = q, k, v, flex_module()._identity, tuple(of), 0.25, options
    return Frame("flex_attention", args, {}, n, rank), block


def flex_module() -> Any:
    from torch.nn.attention import flex_attention

    return flex_attention


MASKS = {"causal": causal, "documents": of_documents(3, 90, 11, 40, 60, 7, 120, 5), "window": window}


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("mask", ["causal", "documents"])
def test_blocks_are_dealt_so_that_work_is_even(mask: str, n: int) -> None:
    size = 336
    work, chunks = [], []
    for rank in range(n):
        of, block = frame(MASKS[mask], size, n, rank)
        outcome = of.outcome()
        assert outcome.deal is not None
        work.append(seen_blocks(outcome.func.rows(block)))
        chunks.append(seen_blocks(Local(Cut(2), *chunk(size, n, rank), size, None).rows(block)))
    assert sum(work) == seen_blocks(block)
    mean = sum(work) / n
    assert max(work) < 1.12 * mean
    assert max(chunks) > 1.2 * mean


def test_even_or_short_work_is_not_dealt() -> None:
    for mask, size in ((window, 336), (causal, 4 * B)):
        assert frame(mask, size, 4, 0)[0].outcome().deal is None
    assert frame(causal, 8 * B, 4, 0)[0].outcome().deal is not None


class Flex(nn.Module):
    """Queries whose heads share one of keys; the mask is that of the model, or by documents that it is given."""

    stages = {"": "x=b n c"}

    def __init__(self, mask: Any, heads: int, again: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.kv = nn.Linear(C, heads * C), nn.Linear(C, 2 * C)
        self.slopes = nn.Parameter(torch.linspace(0.1, 0.2, heads))
        self.mask, self.again = mask, again
        self.double()

    def attend(self, x: Tensor) -> Tensor:
        flex, n = flex_module(), x.shape[1]
        q = self.q(x).unflatten(-1, (-1, C)).transpose(1, 2)
        k, v = (t[:, None] for t in self.kv(x).chunk(2, -1))
        mask = flex.create_block_mask(self.mask, None, None, n, n, device="cpu", BLOCK_SIZE=B)

        def nearer(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score - self.slopes[h] * (i - j).abs()

        y = flex.flex_attention(q, k, v, score_mod=nearer, block_mask=mask, enable_gqa=True)
        return x + y.transpose(1, 2).flatten(2)[..., :C]

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.attend, x, use_reentrant=False) if self.again else self.attend(x)


FLEX = [(3, "causal", False), (2, "documents", True), (4, "documents", False), (3, "causal", True)]


@pytest.mark.slow  # for what it imports, and compiles
@pytest.mark.parametrize(("mesh", "mask", "again"), FLEX, indirect=["mesh"])
def test_flex_attention(mesh: DeviceMesh, mask: str, again: bool) -> None:
    flex_module()._validate_device = lambda *_: None  # it has gradients on a CPU, too
    n = mesh.size()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for size in (16 * n * B, 10 * n * B + 3, 2 * n):
            torch._dynamo.reset()
            model = Flex(MASKS[mask], n - 1, again)  # fewer heads than ranks
            # torch leaves the gradient of what a score function reads uninitialized in a checkpoint
            single = Flex(MASKS[mask], n - 1, False)
            plan, _ = exact(model, mesh, places(size), count=False, single=single)
            assert ("rows" in plan.sends["forward"]) == (size > 2 * n)
