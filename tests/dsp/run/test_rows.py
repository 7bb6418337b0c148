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
from dsp.layout import Axis, Cut
from dsp.rows import Rows, read_rows
from tests.support.beside import averaged, beside
from tests.support.slow import slow


def spans(n: int, size: int, seed: int) -> tuple[tuple[int, int], ...]:
    draw = random.Random(seed)
    return tuple(tuple(sorted(draw.randint(0, size) for _ in range(2))) for _ in range(n))  # type: ignore[misc]


def exchange(mesh: DeviceMesh, sizes: list[int], dtype: torch.dtype, seed: int) -> None:
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


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize(("sizes", "dtype"), [([7], torch.float64), ([5, 2, 8], torch.bfloat16), ([6, 1], torch.bool)])
def test_every_rank_reads_its_span(ranks: Callable, n: int, sizes: list[int], dtype: torch.dtype) -> None:
    for seed in range(6):
        ranks(exchange, n, sizes, dtype, seed)


class Windows(nn.Module):
    """Down and up again with a skip connection, causal caches, and norms over what is sharded."""

    stages = {"": "x=b c h w"}

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, 2, 1)
        self.up, self.last = nn.ConvTranspose2d(4, 4, 4, 2, 1), nn.Conv2d(8, 2, (5, 3), padding=(0, 1))
        self.group = nn.GroupNorm(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        skip = F.silu(self.group(self.first(x)))
        x = F.interpolate(F.avg_pool2d(self.down(skip), (1, 2)), scale_factor=(1, 2), mode="nearest")
        x = F.silu(self.up(F.instance_norm(x)))
        beyond = (0, skip.shape[3] - x.shape[3], 0, skip.shape[2] - x.shape[2])
        x = torch.cat([skip, F.pad(x, beyond)], 1)
        x = F.pad(x, (0, 0, 4, 0), mode="replicate")
        x = self.last(torch.cat([x[:, :, -1:], x[:, :, 1:]], 2))
        head, tail = x.split([2, x.shape[2] - 2], 2)
        return torch.cat([tail, head.softmax(2)], 2) * x.std((2, 3), keepdim=True)


def parity(mesh: DeviceMesh, build: Callable, *shape: int) -> tuple[dict, dsp.Plan]:
    torch.manual_seed(0)
    single, x = build().double(), torch.randn(shape).double().requires_grad_()
    model, plan = copy.deepcopy(single), dsp.plan(single, x, size=mesh.size(), gather_output=False)
    *_, comm = beside(single, dsp.parallelize(model, mesh, gather_output=False), mesh, (x,), rounds=2, count=True)
    return comm.forward.bytes, plan


@pytest.mark.parametrize(
    ("n", "height", "width"), [(2, 7, 9), (3, 10, 12), (4, 7, 9), slow(2, 10, 12), slow(3, 7, 9), slow(4, 10, 12)]
)
def test_windows_and_statistics_along_a_sharded_dim(ranks: Callable, n: int, height: int, width: int) -> None:
    found = ranks(parity, n, Windows, 1, 3, height, width)
    plan = found[0][1]
    forward = [s for s in plan.sendings if s.phase == "forward"]
    assert max(sent["rows"] for sent, _ in found) <= sum(max(s.each) for s in forward if s.kind == "rows")
    assert plan.share <= 1 / n + 0.2


class Stretches(nn.Module):
    """Writes into stretches of the only dim that there is to shard, and of two, either of which it may be."""

    stages = {"": "x=b l"}

    def __init__(self) -> None:
        super().__init__()
        self.v, self.s = nn.Parameter(torch.linspace(0.5, 2, 20)), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        y, v = x * self.s, self.v[: x.shape[1]]
        y[:, 1:] += x[:, :-1] * v[1:]
        y[:, 2:-1] = y[:, :-3] * 0.7 + x[:, 3:].sin() * self.s
        y[:, 1::2] *= 0.5
        y[..., 3] = x[:, 1] * self.s
        y[:, -2:], y[:, :1] = self.v[:2], self.s
        view = y.unsqueeze(-1)
        view[:, 1:] += x[:, 1:, None]
        z = x.new_zeros(x.shape)
        z[:, 1:] = y[:, :-1]
        pairs = y[:, :, None] * x[:, None]
        pairs[:, 1:, 1:] += y[:, 1:, None] * z[:, None, 1:]
        return y * z + pairs.softmax(-1).mean(1)


@pytest.mark.parametrize(("n", "length"), [slow(2, 7), (3, 8), slow(3, 7), slow(4, 5)])
def test_stretches_of_a_sharded_dim_are_written(ranks: Callable, n: int, length: int) -> None:
    plan = ranks(parity, n, Stretches, 1, length)[0][1]
    assert plan.share == -(-length // n) / length


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


def reduced(mesh: DeviceMesh, length: int, dtype: torch.dtype) -> None:
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


@pytest.mark.parametrize(("n", "length"), [slow(2, 6), slow(3, 4), (4, 3)])
def test_reductions_over_what_is_sharded(ranks: Callable, n: int, length: int) -> None:
    for dtype in (torch.float32, torch.float64):
        ranks(reduced, n, length, dtype)


@pytest.mark.parametrize(("mesh", "length"), [slow(2, 6), (3, 4)])
def test_a_batch_norm_in_training(mesh: DeviceMesh, length: int) -> None:
    torch.manual_seed(0)
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


class Mixers(nn.Module):
    """A recurrence over frames, and a Fourier layer over space whose modes are few, as modules between stages."""

    stages = {"": "x=b t h w c"}

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTM(4, 3, 2, batch_first=True, bidirectional=True), nn.GRU(6, 4)
        self.modes = nn.Parameter(torch.randn(4, 4, 2, 2, 2) / 2)

    def forward(self, x: Tensor) -> Tensor:
        b, t, h, w, c = x.shape
        y, _ = self.lstm(x.permute(0, 2, 3, 1, 4).reshape(b * h * w, t, c))
        y, _ = self.gru(y.transpose(0, 1))
        x = x + y.view(t, b, h, w, c).transpose(0, 1)
        few = torch.fft.rfft2(x, dim=(2, 3))[:, :, :2, :2]
        few = torch.einsum("bthwc,cdhw->bthwd", few, torch.view_as_complex(self.modes))
        wide = torch.zeros(b, t, h, w // 2 + 1, c, dtype=few.dtype)
        wide[:, :, :2, :2] = few
        return torch.fft.irfft2(wide, s=(h, w), dim=(2, 3))


@pytest.mark.parametrize(("n", "frames"), [slow(2, 7), slow(3, 4), (4, 3)])
def test_recurrences_and_fourier_transforms(ranks: Callable, n: int, frames: int) -> None:
    found = ranks(parity, n, Mixers, 1, frames, 6, 5, 4)
    plan = found[0][1]
    assert max(sum(sent.values()) - sent.get("all_reduce", 0) for sent, _ in found) == plan.bytes["forward"]
    assert plan.share < 0.7
