"""Rows that other ranks hold: the exchange alone, and forwards that read a sharded dim by windows or statistics."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import DeviceMesh

import dsp
from dsp.comm.halo import Rows, read_rows
from dsp.comm.layout import Axis, Cut
from tests.support.parity import averaged
from tests.support.slow import slow
from tests.support.toys import Does


def spans(n: int, size: int, seed: int) -> tuple[tuple[int, int], ...]:
    draw = random.Random(seed)
    return tuple(tuple(sorted(draw.randint(0, size) for _ in range(2))) for _ in range(n))  # type: ignore[misc]


@pytest.mark.parametrize("mesh", [2, 3, 4])
@pytest.mark.parametrize(("sizes", "dtype"), [([7], torch.float64), ([5, 2, 8], torch.bfloat16), ([6, 1], torch.bool)])
@pytest.mark.parametrize("seed", range(6))
def test_halo_exchange_reads_every_span(mesh: DeviceMesh, sizes: list[int], dtype: torch.dtype, seed: int) -> None:
    axis, n = Axis.of(mesh), mesh.size()
    torch.manual_seed(seed)
    wholes = [(torch.randn(2, size, 3) * 8).round().to(dtype) for size in sizes]
    rows = [Rows(1, size, spans(n, size, seed + i)) for i, size in enumerate(sizes)]
    leaves = [w.clone().requires_grad_(dtype.is_floating_point) for w in wholes]
    with dsp.count_comm() as comm:
        read = read_rows([axis.narrow(x, Cut(1)) for x in leaves], rows, axis.group)
        for own, whole, r in zip(read, wholes, rows):
            start, stop = r.spans[axis.rank]
            assert torch.equal(own, whole[:, start:stop])
        if dtype.is_floating_point:
            sum(own.sum() for own in read).backward()
    sent = [r.sent(w.shape, w.element_size()) for w, r in zip(wholes, rows)]
    assert comm.forward.bytes["rows"] == sum(there[axis.rank] for there, _ in sent)
    if dtype.is_floating_point:
        assert comm.backward.bytes["rows"] == sum(back[axis.rank] for _, back in sent)
        for x, r in zip(leaves, rows):
            readers = torch.tensor([sum(a <= k < b for a, b in r.spans) for k in range(r.size)], dtype=dtype)
            expected = axis.narrow(readers, Cut(0))
            assert torch.equal(axis.narrow(x.grad, Cut(1)), expected[None, :, None].expand(2, -1, 3))


class Softmax(nn.Module):
    stages = {"": "x=b l"}

    def forward(self, x: Tensor) -> Tensor:
        return x.softmax(-1) + x.log_softmax(-1).exp() + x.softmax(-1, dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("mesh", "length"), [(2, 6), (3, 4), (4, 3)])
def test_parts_that_are_masked_or_empty(mesh: DeviceMesh, length: int, dtype: torch.dtype) -> None:
    """Ranks that hold nothing, or what is masked, leave no nan behind, however low the others are."""
    x = (torch.arange(4.0 * length).view(4, length) * 1.7).sin().to(dtype) - 900
    half = -(-length // mesh.size())
    x[0, :half] = x[1, half:] = x[3] = -torch.inf  # the last row is nan on one device, too
    leaf, own = x.clone().requires_grad_(), x.clone().requires_grad_()
    single = Softmax()(leaf)
    out = dsp.parallelize(Softmax(), mesh)(own)
    weight = torch.arange(length).to(dtype)
    for y in (single, out):
        (y * weight).sum().backward()
    assert single[:3].isfinite().all()
    torch.testing.assert_close(out.detach(), single.detach(), equal_nan=True)
    torch.testing.assert_close(own.grad, leaf.grad, equal_nan=True)


class Reduced(nn.Module):
    """Every reduction over what is sharded that a few numbers of each rank are enough for."""

    stages = {"": "x=b l"}

    def forward(self, x: Tensor) -> Tensor:
        ends = x.amax(-1, keepdim=True) + x.amin(1).unsqueeze(1) + x.max() * x.min()
        lengths = x.norm(dim=1, keepdim=True) + torch.linalg.vector_norm(x) + x.logsumexp(1, keepdim=True)
        some = (x > 0.9).any(1, keepdim=True) | (x > -1).all()
        return (F.normalize(x, dim=1) + F.softmin(x, dim=1)) * lengths + ends * some + x.nansum(1, keepdim=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("mesh", "length"), [slow(2, 6), slow(3, 4), (4, 3)])
def test_reductions_over_what_is_sharded(mesh: DeviceMesh, length: int, dtype: torch.dtype) -> None:
    rows = (torch.arange(3.0 * length).view(3, 1, length) * 1.7).sin().to(dtype)
    rows[0], rows[1, :, : length // 2] = 0, rows[1].max()  # no length, and ties
    plan, model = dsp.plan(Reduced(), rows[0], size=mesh.size()), dsp.parallelize(Reduced(), mesh)
    assert plan.share == -(-length // mesh.size()) / length
    for x in rows:
        leaf, own = x.clone().requires_grad_(), x.clone().requires_grad_()
        single = Reduced()(leaf)
        with dsp.count_comm() as comm:
            out = model(own)
        assert sum(comm.forward.bytes.values()) <= plan.bytes["forward"]
        for y in (single, out):
            (y * torch.arange(length).to(dtype)).sum().backward()
        torch.testing.assert_close(out.detach(), single.detach())
        torch.testing.assert_close(own.grad, leaf.grad)


@pytest.mark.parametrize(("mesh", "length"), [slow(2, 6), (3, 4)])
def test_a_batch_norm_in_training(mesh: DeviceMesh, length: int) -> None:
    single = nn.Sequential(nn.BatchNorm1d(3, momentum=0.3), nn.Tanh()).double()
    model, x = copy.deepcopy(single), torch.randn(2, 3, length).double()
    dsp.parallelize(model, mesh, {"": "input=b c l"})
    for train in (True, True, False):
        for one in (single, model):
            one.train(train)
        expect = single(x)
        with dsp.count_comm() as comm:
            out = model(x)
        assert comm.forward.calls["gather"] == 1 + train  # of the output, and of 2 x 3 numbers
        torch.testing.assert_close(out, expect)
        for (name, mine), own in zip(model.named_buffers(), single.buffers()):
            torch.testing.assert_close(mine, own, msg=name)
    for one in (single, model):
        one.train()(x).square().sum().backward()
    for name, grad in averaged(model, mesh).items():
        torch.testing.assert_close(grad, dict(single.named_parameters())[name].grad)


@pytest.mark.parametrize("mesh", [3], indirect=True)
@pytest.mark.parametrize("samples", [7, 2])
def test_an_instance_norm_that_tracks_statistics(mesh: DeviceMesh, samples: int) -> None:
    """Over samples too: sharded along them, each rank would keep statistics of its own."""
    single = nn.Sequential(nn.Linear(4, 4), nn.InstanceNorm1d(3, track_running_stats=True)).double()
    model = dsp.parallelize(copy.deepcopy(single), mesh, {"": "input=b c l", "0": "b c [l]"})
    for _ in range(3):
        x = torch.randn(samples, 3, 4).double()
        torch.testing.assert_close(model(x), single(x))
        torch.testing.assert_close(dict(model.named_buffers()), dict(single.named_buffers()))


HALF: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x.mean(), "mean of a dim": lambda x: x.mean(1, keepdim=True),
    "loss": lambda x: F.l1_loss(x, -x), "loss of squares": lambda x: F.mse_loss(x, x / 8),
    "mean in fp32": lambda x: x.mean(dtype=torch.float32),
}  # fmt: skip


@pytest.mark.parametrize("mesh", [3], indirect=True)
def test_a_mean_in_half_precision_does_not_overflow(mesh: DeviceMesh) -> None:
    """A rank's sum would: 1400 times 50 is more than half precision has."""
    x = torch.linspace(1, 99, 2801, dtype=torch.float16)[None].repeat(2, 1)
    for name, f in HALF.items():
        model = dsp.parallelize(Does(lambda m, x, f=f: f(x * 1)), mesh, {"": "x=b t"})
        leaf, own = x.clone().requires_grad_(), x.clone().requires_grad_()
        expect, found = f(leaf * 1), model(own)
        torch.testing.assert_close(found, expect, rtol=2e-3, atol=0, msg=name)
        expect.sum().backward(), found.sum().backward()
        torch.testing.assert_close(own.grad, leaf.grad, rtol=2e-3, atol=1e-7, msg=name)
    short = dsp.parallelize(Does(lambda m, x: (x * 1).mean()), mesh, {"": "x=b t"})  # the last rank holds nothing
    torch.testing.assert_close(short(x[:, :4]), x[:, :4].mean())


class Ends(nn.Module):
    stages = {"": "x=b l"}

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([x.amax(1)[0], x.amin(1)[0], x.logsumexp(1)[0], x.max(), x.min()])


@pytest.mark.parametrize("mesh", [4])
def test_extremes_of_what_is_infinite(mesh: DeviceMesh) -> None:
    """Where a rank holds nothing, and what the others hold is infinite, or no number."""
    model = dsp.parallelize(Ends(), mesh)
    for value in (torch.inf, -torch.inf, torch.nan):
        for where in ([0, 1, 2], [1]):
            x = torch.tensor([[0.3, -2.0, 1.5]])
            x[0, where] = value
            assert torch.equal(model(x).nan_to_num(7), Ends()(x).nan_to_num(7)), (value, where)
