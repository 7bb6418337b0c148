"""Long tensors made of replicated short ones (positions, relative biases, masks): each rank makes its part alone."""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import dsp
from tests.support.parity import assert_step_equal

HEADS, C = 4, 8
STAGES = {"": "x=b s c"}


class Tokens(nn.Module):
    """Attention over all tokens, with what `adds` of their positions: a table, a bias of pairs, or a mask of a band."""

    def __init__(self, adds: str, ckpt: bool = False) -> None:
        super().__init__()
        self.adds, self.ckpt = adds, ckpt
        self.places, self.buckets = nn.Embedding(32, C), nn.Embedding(5, HEADS)
        self.rows, self.cols = nn.Parameter(torch.randn(16, 1, C)), nn.Parameter(torch.randn(1, 16, C))
        self.qkv, self.out = nn.Linear(C, 3 * C), nn.Linear(C, C)

    def attend(self, x: Tensor, bias: Tensor | None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (HEADS, -1)).transpose(1, 2).chunk(3, -1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, bias).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        at, bias = torch.arange(x.shape[1]), None
        apart = at[None, :] - at[:, None]
        if self.adds == "table":
            x = x + self.places(at[None])
        elif self.adds == "outer":
            x = x + (self.rows + self.cols).flatten(0, 1)[: x.shape[1]]
        elif self.adds == "bias":  # as T5 has it
            bias = self.buckets(apart.clamp(-2, 2) + 2).permute(2, 0, 1)[None]
        elif self.adds == "rows":  # a weight of each pair, without heads
            x = x + torch.exp(-(apart.to(x.dtype) ** 2)) @ x
        elif self.adds == "band":
            bias = apart.abs() <= 3
        return checkpoint(self.attend, x, bias, use_reentrant=False) if self.ckpt else self.attend(x, bias)


ADDS = "table", "outer", "bias", "rows", "band"


@pytest.mark.parametrize("adds", ADDS)
@pytest.mark.parametrize(("mesh", "ckpt"), [(2, True), (3, False), (4, False)], indirect=["mesh"])
def test_outputs_and_every_gradient(mesh: DeviceMesh, adds: str, ckpt: bool) -> None:
    torch.manual_seed(0)
    single = Tokens(adds, ckpt).double()
    model = dsp.parallelize(copy.deepcopy(single), mesh, STAGES)
    for length in (13, 13, 9):
        x = torch.randn(2, length, C, dtype=torch.float64, requires_grad=True)
        assert_step_equal(single, model, mesh, (x,), count=True)


@pytest.mark.parametrize("mesh", [3])
@pytest.mark.parametrize("adds", ["table", "bias"])
def test_in_a_graph(mesh: DeviceMesh, adds: str) -> None:
    torch.manual_seed(0)
    single = Tokens(adds).double()
    model = dsp.parallelize(copy.deepcopy(single), mesh, STAGES, compile="eager")
    for _ in range(2):
        assert_step_equal(single, model, mesh, (torch.randn(1, 13, C, dtype=torch.float64),))


@pytest.mark.parametrize("adds", ["table", "bias", "rows"])
def test_no_rank_makes_all_of_it(adds: str) -> None:
    assert planned(adds, 3).share <= 0.34


def test_a_mask_that_all_heads_read_is_made_by_every_rank() -> None:
    """To gather its parts would send the square of the length."""
    found = planned("band", 4)
    assert found.bytes["forward"] == 4 * 3 * 24 * C * 4 // 4**2  # four switches, as without a mask
    assert "abs()" in found.text()


def planned(adds: str, n: int) -> Any:
    return dsp.plan(Tokens(adds), (torch.randn(1, 24, C),), size=n, stages=STAGES, gather_output=False)


class Keeps(nn.Module):
    """A relative bias that the model keeps: as an attribute, in a functools cache, or in a dict of the module."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.kept, self.tokens = where, None, Tokens("bias")

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        if self.where == "attribute":
            if self.kept is None or len(self.kept) != n:
                self.kept = distances(n)
            apart = self.kept
        elif self.where == "cache":
            apart = cached(n)
        else:
            apart = KEPT.setdefault(n, distances(n))
        return self.tokens.attend(x + torch.exp(-(apart.to(x.dtype) ** 2)) @ x, None)


def distances(n: int) -> Tensor:
    at = torch.arange(n)
    return at[None, :] - at[:, None]


KEPT: dict[int, Tensor] = {}
cached = lru_cache(maxsize=4)(distances)


@pytest.mark.parametrize("mesh", [3])
@pytest.mark.parametrize("where", ["attribute", "cache", "dict"])
def test_kept_tensors_are_full(mesh: DeviceMesh, where: str) -> None:
    """Others may read it: the model on one process, or its state dict."""
    cached.cache_clear()
    KEPT.clear()
    torch.manual_seed(0)
    single = Keeps(where).double()
    model = dsp.parallelize(copy.deepcopy(single), mesh, STAGES)
    for length in (13, 13, 9, 13):
        x = torch.randn(1, length, C, dtype=torch.float64)
        got = model(x)
        kept = model.kept if where == "attribute" else cached(length) if where == "cache" else KEPT[length]
        assert type(kept) is Tensor
        assert kept.shape == (length, length)
        torch.testing.assert_close(kept, distances(length))
        torch.testing.assert_close(got, single(x))


class Draws(nn.Module):
    """A noise of all pairs, and a table of positions whose gradient is sparse: neither is made in parts."""

    def __init__(self, noise: bool) -> None:
        super().__init__()
        self.noise, self.places = noise, nn.Embedding(32, C, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(x.shape[1], dtype=x.dtype)
        pairs = torch.normal(at[:, None], at[None, :] + 1) if self.noise else at[:, None] - at[None, :]
        return torch.softmax(pairs, -1) @ (x + self.places(torch.arange(x.shape[1])))


def test_random_numbers_are_those_of_all_ranks(mesh: DeviceMesh) -> None:
    model = dsp.parallelize(Draws(noise=True), mesh, STAGES)
    for _ in range(2):
        mine = model(torch.ones(1, 13, C)).detach()
        least, most = mine.clone(), mine.clone()
        dist.all_reduce(least, dist.ReduceOp.MIN, group=mesh.get_group())
        dist.all_reduce(most, dist.ReduceOp.MAX, group=mesh.get_group())
        torch.testing.assert_close(least, most, rtol=0, atol=1e-6)


def test_a_sparse_gradient(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    single = Draws(noise=False).double()
    model = dsp.parallelize(copy.deepcopy(single), mesh, STAGES)
    x = torch.randn(1, 13, C, dtype=torch.float64)
    for m in (single, model):
        m(x).square().mean().backward()
    own = model.places.weight.grad.to_dense()
    dist.all_reduce(own, group=mesh.get_group())
    torch.testing.assert_close(own / mesh.size(), single.places.weight.grad.to_dense())
