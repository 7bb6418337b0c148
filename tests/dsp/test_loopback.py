"""The kernel's own count of bytes between ranks on one machine, against count_comm() and the formula of the paper."""

from __future__ import annotations

import sys

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import dsp
from tests.support.loopback import TOLERANCE, measured

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="reads the loopback counter of Linux, /proc/net/dev"
)

SHAPE = (2, 64, 128, 256)  # 16 MiB of float32


def switches(mesh: DeviceMesh, shape: tuple[int, ...], src: int, dst: int) -> tuple[float, float]:
    x = dsp.split(torch.randn(shape), mesh, src)
    return measured(mesh, lambda: dsp.switch(x, dst))


def there_and_back(mesh: DeviceMesh, shape: tuple[int, ...], halves: bool) -> tuple[float, float]:
    x = dsp.split(torch.randn(shape).requires_grad_() * 1, mesh, 1)

    def step() -> None:
        y = dsp.start_switch(x, 2).wait() if halves else dsp.switch(x, 2)
        dsp.mean(y).backward(retain_graph=True)

    return measured(mesh, step)


def gathers(mesh: DeviceMesh, shape: tuple[int, ...]) -> tuple[float, float]:
    x = dsp.split(torch.randn(shape), mesh, 2)
    return measured(mesh, lambda: dsp.gather(x))


def nbytes(shape: tuple[int, ...]) -> int:
    return 4 * torch.Size(shape).numel()


@pytest.mark.parametrize(("src", "dst"), [(1, 2), (2, 1)])
@pytest.mark.parametrize("n", [2, 4])
def test_a_switch_moves_what_it_should(ranks, n: int, src: int, dst: int) -> None:
    formula = n * (n - 1) / n * nbytes(SHAPE) / n  # (N-1)/N of M/N from each of N ranks
    for kernel, counted in ranks(switches, n, SHAPE, src, dst):
        assert counted == formula
        assert kernel == pytest.approx(formula, rel=TOLERANCE)


@pytest.mark.parametrize("n", [2, 4])
def test_uneven_sizes_are_not_padded(ranks, n: int) -> None:
    t, s = 13, 9  # four ranks hold 4 4 4 1 and 3 3 3 0
    shape = (1, t, s, 2**15)
    parts = [torch.arange(size).chunk(n) for size in (t, s)]
    stays = sum(len(i) * len(j) for i, j in zip(*parts))
    formula = nbytes(shape) * (1 - stays / (t * s))
    for kernel, counted in ranks(switches, n, shape, 1, 2):
        assert counted == pytest.approx(formula)
        assert kernel == pytest.approx(formula, rel=TOLERANCE)


@pytest.mark.parametrize("halves", [False, True])
def test_backward_moves_as_much_again(ranks, halves: bool) -> None:
    n = 4
    formula = 2 * (n - 1) * nbytes(SHAPE) / n
    for kernel, counted in ranks(there_and_back, n, SHAPE, halves):
        assert counted == pytest.approx(formula, rel=1e-3)  # and the mean's eight bytes
        assert kernel == pytest.approx(counted, rel=TOLERANCE)


@pytest.mark.parametrize("shape", [(1, 8, 64, 4096), (1, 8, 63, 4096)])
@pytest.mark.parametrize("n", [2, 4])
def test_a_gather_moves_what_count_comm_says(ranks, n: int, shape: tuple[int, ...]) -> None:
    formula = n * (n - 1) / n * nbytes(shape)
    for kernel, counted in ranks(gathers, n, shape):
        assert counted == formula
        assert kernel == pytest.approx(formula, rel=TOLERANCE)
