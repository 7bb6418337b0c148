"""Every dtype, conjugate and negative views, and tensors of nothing, through every collective, forward and backward."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import dsp
from dsp.comm.balanced_rows import RowDeal, collect_rows, deal_rows
from dsp.comm.halo import Rows, read_rows
from dsp.planner import chunk_sizes
from tests.support.slow import slow

ASKS = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.complex128, torch.complex64, torch.complex32,
]  # fmt: skip
COUNTS = [
    torch.bool, torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64
]  # fmt: skip
SHAPES = [(2, 5, 3), (1, 4, 4), (2, 0, 5)]


def numbers(shape: tuple[int, ...], dtype: torch.dtype, seed: int, view: str = "") -> Tensor:
    """Whole numbers, so that every sum is exact; as a conjugate or negative view of others."""
    torch.manual_seed(seed)
    x = torch.randint(0, 2, shape).double()
    if dtype.is_complex:
        x = torch.complex(x, torch.randint(0, 2, shape).double()).to(dtype)
        return x.conj() if view else x
    if view:
        x = torch.complex(x, x).to(torch.promote_types(dtype, torch.complex64)).conj().imag
        assert x.is_neg()
        assert x.dtype == dtype
        return x
    return x.to(dtype)


def same(got: Tensor, expect: Tensor) -> None:
    assert got.dtype == expect.dtype
    wide = torch.complex64 if got.dtype == torch.complex32 else torch.float64
    a, b = (t if t.is_complex() and wide != torch.complex64 else t.to(wide) for t in (got, expect))
    assert torch.equal(a, b), (got, expect)


def moves(mesh: DeviceMesh, dtype: torch.dtype, shape: tuple[int, ...], view: str = "") -> None:
    group, n, rank, ops = mesh.get_group().group_name, mesh.size(), mesh.get_local_rank(), torch.ops.dsp
    plain = [], [], "same", "same"
    parts = [chunk_sizes(shape[d], n) for d in (1, 2)]
    whole, ours = numbers(shape, dtype, 0, view), [numbers(shape, dtype, r, view) for r in range(n)]
    wide = torch.complex128 if dtype.is_complex else torch.float64
    total = sum((x.to(wide) for x in ours), torch.zeros((), dtype=wide)).to(dtype)

    def part(x: Tensor, dim: int) -> Tensor:
        return x.split(parts[dim - 1], dim)[rank]

    def leaf(x: Tensor) -> Tensor:
        return x.detach().requires_grad_(dtype in ASKS)

    # what moves its argument, and the dims along which it and the result are sharded; None: they differ, or are summed
    cases = {
        "switch": (lambda x: ops.switch(x, 1, 2, shape[1], group), 1, 2),
        "among": (lambda x: ops.switch_among(x, 1, 2, *parts, list(range(n)), group), 1, 2),
        "many": (lambda x: ops.switch_many([x, x], [1, 1], [2, 2], [shape[1]] * 2, group, [0, 1], *plain)[1], 1, 2),
        "gather": (lambda x: ops.gather(x, 1, shape[1], group), 1, None),
        "reduce_scatter": (lambda x: ops.reduce_scatter(x, 1, group), None, 1),
        "all_reduce": (lambda x: ops.all_reduce(x, group), None, None),
    }
    for move, src, dst in cases.values():
        x = leaf(ours[rank] if src is None else part(whole, src))
        y = move(x)
        expect = total if src is None else whole
        same(y, expect if dst is None else part(expect, dst))
        if x.requires_grad:
            y.backward(ours[rank] if dst is None else part(whole, dst))
            expect = total if dst is None else whole
            same(x.grad, expect if src is None else part(expect, src))
    x = leaf(whole)
    y = dsp.start_switch(dsp.split(x, mesh, 1), 2).wait()
    same(y.to_local(), part(whole, 2))
    if x.requires_grad and dtype.itemsize > 1 and dtype != torch.complex32:  # torch divides neither of these
        dsp.gather(y).backward(whole)
        same(x.grad, whole)
    other = numbers(shape, torch.bool, 1)
    mixed = ops.switch_many([part(whole, 1), part(other, 1)], [1, 1], [2, 2], [shape[1]] * 2, group, [0, 1], *plain)
    same(mixed[0], part(whole, 2))
    same(mixed[1], part(other, 2))
    deal = RowDeal.halves(shape[1], n)
    for ours, dealt in ((part(whole, 1), whole), (part(other, 1), other)):
        x = leaf(ours) if ours.dtype in ASKS else ours
        y = deal_rows(x, 1, deal, group)
        same(y, torch.cat([dealt.narrow(1, a, b - a) for a, b in [(0, 0), *deal.spans(rank)]], 1))
        back = collect_rows(y, 1, deal, group)
        same(back, ours)
        if x.requires_grad:
            back.backward(ours)
            same(x.grad, ours)
    every = Rows(1, shape[1], ((0, shape[1]),) * n)
    read = read_rows([part(other, 1), part(whole, 1)], [every, every], group)  # the second begins at any byte
    same(read[0], other)
    same(read[1], whole)


@pytest.mark.parametrize("mesh", [slow(2), 3])
def test_collectives_of_every_dtype(mesh: DeviceMesh) -> None:
    warnings.filterwarnings("ignore", "ComplexHalf support is experimental")
    for dtype in [*ASKS, *COUNTS]:
        for shape in SHAPES:
            moves(mesh, dtype, shape)
        if dtype in ASKS and dtype.itemsize > 2:
            moves(mesh, dtype, SHAPES[0], "view")
