"""The kernel's own count of bytes between ranks on one machine, against count_comm() and the formula of the paper."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import dsp
from dsp.comm.balanced_rows import RowDeal, collect_rows, deal_rows
from tests.support.loopback import TOLERANCE, measured

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="reads the loopback counter of Linux, /proc/net/dev"
)

SHAPE = (2, 64, 128, 256)  # 16 MiB of float32


def nbytes(shape: tuple[int, ...]) -> int:
    return 4 * torch.Size(shape).numel()


def check(mesh: DeviceMesh, operation: Callable[[], object], formula: float, mean: float = 0) -> None:
    """Compare what the kernel counts, and `count_comm`, with the formula, but for the few bytes of a `mean`."""
    kernel, counted = measured(mesh, operation)
    assert counted == pytest.approx(formula, rel=mean or 1e-12)
    assert kernel == pytest.approx(counted, rel=TOLERANCE)


@pytest.mark.parametrize(("src", "dst"), [(1, 2), (2, 1)])
@pytest.mark.parametrize("mesh", [2, 4])
def test_bytes_of_an_all_to_all(mesh: DeviceMesh, src: int, dst: int) -> None:
    n, x = mesh.size(), dsp.split(torch.randn(SHAPE), mesh, src)
    check(mesh, lambda: dsp.switch(x, dst), n * (n - 1) / n * nbytes(SHAPE) / n)  # (N-1)/N of M/N from each of N ranks


@pytest.mark.parametrize("mesh", [2, 4])
def test_an_uneven_all_to_all_is_not_padded(mesh: DeviceMesh) -> None:
    t, s = 13, 9  # four ranks hold 4 4 4 1 and 3 3 3 0
    shape = (1, t, s, 2**15)
    stays = sum(len(i) * len(j) for i, j in zip(*(torch.arange(size).chunk(mesh.size()) for size in (t, s))))
    x = dsp.split(torch.randn(shape), mesh, 1)
    check(mesh, lambda: dsp.switch(x, 2), nbytes(shape) * (1 - stays / (t * s)))


@pytest.mark.parametrize("mesh", [4])
@pytest.mark.parametrize("halves", [False, True])
def test_bytes_of_the_gradient_of_an_all_to_all(mesh: DeviceMesh, halves: bool) -> None:
    x = dsp.split(torch.randn(SHAPE).requires_grad_() * 1, mesh, 1)

    def step() -> None:
        y = dsp.start_switch(x, 2).wait() if halves else dsp.switch(x, 2)
        dsp.mean(y).backward(retain_graph=True)

    check(mesh, step, 2 * (mesh.size() - 1) * nbytes(SHAPE) / mesh.size(), mean=1e-3)


@pytest.mark.parametrize("shape", [(1, 8, 64, 4096), (1, 8, 63, 4096)])
@pytest.mark.parametrize("mesh", [2, 4])
def test_bytes_of_an_all_gather(mesh: DeviceMesh, shape: tuple[int, ...]) -> None:
    n, x = mesh.size(), dsp.split(torch.randn(shape), mesh, 2)
    check(mesh, lambda: dsp.gather(x), n * (n - 1) / n * nbytes(shape))


@pytest.mark.parametrize("mesh", [2, 4])
def test_bytes_of_rows_that_are_dealt_and_come_home(mesh: DeviceMesh) -> None:
    n, group, size = mesh.size(), mesh.get_group().group_name, 125
    shape, deal = (2, size, 2**14), RowDeal.halves(size, mesh.size())
    x = dsp.split(torch.randn(shape), mesh, 1).to_local()
    starts = [min(r * -(-size // n), size) for r in range(n + 1)]
    chunks = [set(range(*starts[r : r + 2])) for r in range(n)]
    stays = sum(len(own & {i for span in deal.spans(r) for i in range(*span)}) for r, own in enumerate(chunks))

    def there_and_back() -> None:
        assert collect_rows(deal_rows(x, 1, deal, group), 1, deal, group).equal(x)

    check(mesh, there_and_back, 2 * nbytes(shape) * (size - stays) / size)
