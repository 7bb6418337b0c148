"""Every dtype, conjugate and negative views, and tensors of nothing, through every collective, forward and backward."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from slow import slow
from test_parallel import averaged
from test_parallel import same as same_grads
from torch import Tensor, fft, nn
from torch.distributed.device_mesh import DeviceMesh
from toys import Along, C

import dsp
from dsp.planner import chunk_sizes

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
        "many": (lambda x: ops.switch_many([x, x], [1, 1], [2, 2], [shape[1]] * 2, group)[1], 1, 2),
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
    mixed = ops.switch_many([part(whole, 1), part(other, 1)], [1, 1], [2, 2], [shape[1]] * 2, group)
    same(mixed[0], part(whole, 2))
    same(mixed[1], part(other, 2))


def every(mesh: DeviceMesh) -> None:
    warnings.filterwarnings("ignore", "ComplexHalf support is experimental")
    for dtype in [*ASKS, *COUNTS]:
        for shape in SHAPES:
            moves(mesh, dtype, shape)
        if dtype in ASKS and dtype.itemsize > 2:
            moves(mesh, dtype, SHAPES[0], "view")


@pytest.mark.parametrize("n", [slow(2), 3])
def test_every_dtype_moves(ranks, n: int) -> None:
    ranks(every, n)


# --- models -----------------------------------------------------------------------------------------------------------


class Spectrum(nn.Module):
    """A Fourier transform along one dim, with weights of its own."""

    def __init__(self, dim: int, transform: Any) -> None:
        super().__init__()
        self.dim, self.transform = dim, transform
        self.w = nn.Parameter(torch.randn(C, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return self.transform(x * self.w, dim=self.dim)


class Waves(nn.Module):
    """Stages over real or complex numbers, and what a test does between them."""

    stages = {"": "x=b t s c", "space": "b t [s c]", "time": "b [t] s [c]"}

    def __init__(self, run: Any, real: bool) -> None:
        super().__init__()
        self.run = run
        self.space, self.time = (Along(2), Along(1)) if real else (Spectrum(2, fft.fft), Spectrum(1, fft.ifft))
        self.w = nn.Parameter(torch.randn(C))
        self.register_buffer("turn", torch.polar(torch.ones(9, C // 2), torch.randn(9, C // 2)))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def rotary(m: Waves, x: Tensor) -> Tensor:
    y = torch.view_as_complex(m.space(x).unflatten(-1, (-1, 2)).contiguous())
    return m.time(torch.view_as_real(y * m.turn[: x.shape[1], None]).flatten(-2))


def by_its_data(m: Waves, x: Tensor) -> Tensor:
    """Planned from the record of its first call: the second one sends what the first did not."""
    y = m.space(x)
    z = fft.fft(y, dim=2)
    return m.time(z.cumsum(1) if z.abs().max() < 1e9 else y).real


WAVES: dict[str, tuple[Any, bool]] = {
    "transform": (lambda m, x: m.time(fft.ifft(fft.fft(m.space(x), dim=1) * m.w, dim=1).real), True),
    "planes": (lambda m, x: m.time(fft.irfft2(fft.rfft2(m.space(x), dim=(1, 2)), dim=(1, 2), s=x.shape[1:3])), True),
    "rotary": (rotary, True),
    "conjugate": (lambda m, x: m.time(m.space(x).conj()).imag, False),
    "returned": (lambda m, x: m.time(m.space(x)), False),
    "mean": (lambda m, x: m.time((y := m.space(x)) - y.mean(1, keepdim=True)) * y.sum((1, 2), keepdim=True), False),
    "one": (lambda m, x: (y := m.time(m.space(x)))[:, 0] + y[:, -1].conj(), False),
    "data": (by_its_data, False),
}


def step(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None]:
    x = x.clone().requires_grad_()
    y = model(x)
    r = torch.view_as_real(y) if y.is_complex() else y
    (r * torch.linspace(0.5, 2, r.numel(), dtype=r.dtype).view(r.shape)).sum().backward()
    return y, x.grad


def waves(mesh: DeviceMesh, given: torch.dtype) -> None:
    for name, (run, real) in WAVES.items():
        torch.manual_seed(1)
        single = Waves(run, real)
        single = single._apply(lambda t: t.to(torch.complex128 if t.is_complex() else torch.float64))
        model = dsp.parallelize(copy.deepcopy(single), mesh)
        torch.manual_seed(2)
        x = torch.randn(2, 5, 4, C, dtype=torch.float64 if real else given)
        for _ in range(3):
            expect, expect_x = step(single, x)
            y, x_grad = step(model, x)
            torch.testing.assert_close(y, expect, msg=lambda m, name=name: f"{name}: {m}")
            torch.testing.assert_close(x_grad, expect_x, msg=lambda m, name=name: f"{name}, its input: {m}")
            same_grads(averaged(model, mesh), {n: p.grad for n, p in single.named_parameters()})
            single.zero_grad()
            model.zero_grad()
        with torch.no_grad():  # a view that is not conjugated yet
            torch.testing.assert_close(model(x.conj()), single(x.conj()))


@pytest.mark.parametrize(("n", "given"), [slow(2, torch.float64), (3, torch.complex128), slow(4, torch.complex128)])
def test_complex_numbers_in_models(ranks, n: int, given: torch.dtype) -> None:
    ranks(waves, n, given)
