"""split, switch, start_switch, gather, mean: exact against one process, byte for byte."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import dsp
from dsp.comm import moves
from dsp.comm.exchange import order_of
from dsp.comm.layout import Axis, Cut
from dsp.comm.moves import Part, gather_local, switch_all, switch_local
from dsp.comm.observers import observing
from dsp.comm.pending import ChunkedSwitch, ahead
from dsp.planner import MOVES, Value, chunk_sizes
from dsp.support import private

SIZES = [1, 2, 3, 4]
PLAIN = [], [], "same", "same"  # several switches of dims that are not joined, in no format


def reference(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """A hand-written model of two blocks: softmax over t, then over s, with a parameter in each; a weighted mean."""
    y = torch.softmax(x * w[0], 1) + x
    y = torch.cumsum(y * w[1], 2).tanh()
    weight = torch.linspace(0.5, 2, x.shape[1], dtype=x.dtype)[:, None, None]
    return y, (y.square() * weight).sum() / weight.expand(y.shape).sum()


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("mesh", SIZES)
@pytest.mark.parametrize(("batch", "t", "s"), [(1, 7, 5), (2, 5, 8), (1, 4, 4), (2, 2, 3)])
def test_by_hand(mesh: DeviceMesh, batch: int, t: int, s: int, halves: bool) -> None:
    x = torch.randn(batch, t, s, 3, dtype=torch.float64, requires_grad=True)
    w = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    y, loss = reference(x, w)
    loss.backward()
    gx, gw = x.grad, w.grad
    x = x.detach().requires_grad_()
    w = w.detach().requires_grad_()

    def switch(v: DTensor, dim: int) -> DTensor:
        if not halves:
            return dsp.switch(v, dim)
        handle = dsp.start_switch(v, dim)
        _ = (w * 2).sum()
        return handle.wait()

    def local(v: DTensor, f) -> DTensor:
        out = f(v.to_local())
        return DTensor.from_local(out, mesh, v.placements, run_check=False, shape=v.shape, stride=v.stride())

    d = dsp.split(x, mesh, 2)
    d = local(d, lambda v: torch.softmax(v * w[0], 1) + v)
    d = switch(d, 1)
    d = local(d, lambda v: torch.cumsum(v * w[1], 2).tanh())
    weight = torch.linspace(0.5, 2, t, dtype=x.dtype)[:, None, None]
    got = dsp.mean(local(d, torch.square), weight)
    whole = dsp.gather(d)
    torch.testing.assert_close(whole, y)
    torch.testing.assert_close(got, loss)
    got.backward()
    torch.testing.assert_close(x.grad, gx)
    average = torch.ops.dsp.all_reduce(w.grad, mesh.get_group().group_name) / mesh.size()
    torch.testing.assert_close(average, gw)
    # the gathered output carries the same convention
    x2, w2 = x.detach().requires_grad_(), w.detach().requires_grad_()
    d = dsp.split(x2, mesh, 2)
    out = dsp.gather(local(d, lambda v: torch.softmax(v * w2[0], 1) + v))
    reference_out = torch.softmax(x.detach() * w.detach()[0], 1) + x.detach()
    torch.testing.assert_close(out, reference_out)
    (out**2).mean().backward()
    xr, wr = x.detach().requires_grad_(), w.detach().requires_grad_()
    ((torch.softmax(xr * wr[0], 1) + xr) ** 2).mean().backward()
    torch.testing.assert_close(x2.grad, xr.grad)
    average = torch.ops.dsp.all_reduce(w2.grad, mesh.get_group().group_name) / mesh.size()
    torch.testing.assert_close(average, wr.grad)


@pytest.mark.parametrize("mesh", SIZES)
def test_all_to_all_of_every_pair_of_dims_and_memory_orders(mesh: DeviceMesh) -> None:
    x = torch.randn(2, 5, 3, 4)
    for memory in [(0, 1, 2, 3), (1, 0, 2, 3), (3, 2, 1, 0)]:
        v = x.permute(memory).contiguous().permute([memory.index(i) for i in range(4)])
        for i in range(4):
            for j in range(4):
                before = dsp.split(v, mesh, i)
                d = dsp.switch(before, j)
                assert d.placements == (Shard(j),)
                assert d.shape == x.shape
                torch.testing.assert_close(d.to_local(), dsp.split(x, mesh, j).to_local())
                if i != j and min(before.to_local().shape) > 1:  # else nobody can tell in which order they lie
                    assert d.to_local().permute(memory).is_contiguous()
    # what is gathered is contiguous here, but torch reads some strides of size 1 wrong
    n, group = mesh.size(), mesh.get_group().group_name
    assert torch.ops.dsp.gather(torch.randn(3, 1).t(), 1, 3 * n, group).stride() == (3 * n, 1)
    with torch.inference_mode():
        assert torch.equal(dsp.gather(dsp.switch(dsp.split(x, mesh, 1), 2)), x)


def test_a_dim_of_one_lies_where_it_is_whatever_its_stride() -> None:
    # as attention gives its result for a batch of one; an expanded dim has no order
    assert order_of(torch.empty_strided((1, 8, 6, 4), (0, 4, 32, 1))) == (0, 2, 1, 3)
    assert order_of(torch.empty_strided((3, 2, 1), (1, 3, 0))) == (1, 0, 2)
    assert order_of(torch.empty_strided((1, 1, 3), (0, 0, 1))) is None
    assert order_of(torch.empty(2, 1, 3).expand(2, 4, 3)) is None


@pytest.mark.parametrize("mesh", [4])
def test_gradients_in_half_precision_are_added_up_in_single(mesh: DeviceMesh) -> None:
    x = torch.zeros(2, dtype=torch.bfloat16, requires_grad=True)
    mine = 256.0 if mesh.get_local_rank() == 0 else 1.0
    (torch.ops.dsp.gather(x, 0, 8, mesh.get_group().group_name) * mine).sum().backward()
    # 256 + 1 is 256 in bfloat16, and 259 rounds to 260
    assert torch.equal(x.grad, torch.full((2,), 260, dtype=torch.bfloat16))


def bytes_moved(mesh: DeviceMesh, t: int, s: int) -> dict:
    x = torch.randn(1, t, s, 8, requires_grad=True)
    with dsp.count_comm() as comm:
        d = dsp.split(x * 1, mesh, 1)
        loss = dsp.mean(dsp.switch(d, 2))
        loss.backward()
    return comm.by_collective()


def test_bytes_of_even_and_uneven_all_to_alls(ranks) -> None:
    n, t, s = 4, 8, 12
    for counts in ranks(bytes_moved, n, t, s):
        expect = {"calls": 1, "bytes": (n - 1) * t * s * 8 * 4 // n**2}
        assert counts["forward"]["switch"] == expect
        assert counts["backward"]["switch"] == expect
        assert counts["recompute"] == {}
        assert set(counts["forward"]) == {"switch", "all_reduce"}
    # uneven: rank r holds chunk_t[r] rows and sends all but its own chunk of s
    chunk_t, chunk_s = (2, 2, 1, 0), (2, 2, 2, 1)
    for r, counts in enumerate(ranks(bytes_moved, 4, 5, 7)):
        assert counts["forward"]["switch"]["bytes"] == chunk_t[r] * (7 - chunk_s[r]) * 8 * 4


@pytest.mark.parametrize("mesh", ["2x2"])
def test_two_axes_and_errors(mesh: DeviceMesh) -> None:
    x = torch.arange(2 * 5 * 6, dtype=torch.float32).view(2, 5, 6)
    dp, sp = mesh["dp"], mesh["sp"]
    row = x.narrow(0, dp.get_local_rank(), 1)
    local = dsp.split(row, sp, 1).to_local()
    d = DTensor.from_local(local, mesh, [Shard(0), Shard(1)], run_check=False, shape=x.shape, stride=x.stride())
    with pytest.raises(ValueError, match='axis="sp"'):
        dsp.switch(d, 2)
    e = dsp.switch(d, 2, axis="sp")
    assert e.placements == (Shard(0), Shard(2))
    torch.testing.assert_close(e.to_local(), dsp.split(row, sp, 2).to_local())
    torch.testing.assert_close(dsp.start_switch(d, 2, axis="sp").wait().to_local(), e.to_local())
    g = dsp.gather(e, axis="sp")
    assert g.placements == (Shard(0), Replicate())
    torch.testing.assert_close(g.to_local(), row)
    with pytest.raises(ValueError, match="already sharded"):
        dsp.switch(d, 0, axis="sp")
    with pytest.raises(ValueError, match="no mesh axis 'tp'"):
        dsp.switch(d, 2, axis="tp")
    with pytest.raises(ValueError, match=r'mesh\["sp"\]'):
        dsp.split(x, mesh, 1)
    partial = DTensor.from_local(local, sp, [Partial()], run_check=False)
    with pytest.raises(ValueError, match="has not been taken yet"):
        dsp.switch(partial, 2)
    whole = DTensor.from_local(local, sp, [Replicate()], run_check=False)
    with pytest.raises(ValueError, match="not sharded"):
        dsp.gather(whole)
    with pytest.raises(TypeError, match="takes a DTensor"):
        dsp.switch(x, 1)
    with pytest.raises(ValueError, match="out of range"):
        dsp.split(x, sp, 3)


def mesh_mean(x: Tensor, mesh: DeviceMesh) -> Tensor:
    return torch.ops.dsp.all_reduce(x, mesh.get_group().group_name) / mesh.size()


@pytest.mark.parametrize("mesh", [2, 3])
def test_gradients_of_every_way_out_of_a_sharded_tensor(mesh: DeviceMesh) -> None:
    x = torch.randn(4, 5, requires_grad=True)
    d = dsp.switch(dsp.split(x * 1, mesh, 0), 1)
    with pytest.raises(RuntimeError, match="would give wrong gradients"):
        d.to_local().sum().backward()
    d = dsp.switch(dsp.split(x * 1, mesh, 0), 1)
    with pytest.raises(RuntimeError, match="would give wrong gradients"):
        d.sum().full_tensor().backward()
    d = dsp.switch(dsp.split(x * 1, mesh, 0), 1)
    dsp.mean(d * d).backward()
    torch.testing.assert_close(mesh_mean(x.grad, mesh), x.detach() * 2 / 20)
    handle = dsp.start_switch(d, 0)
    handle.wait()
    with pytest.raises(RuntimeError, match="once"):
        handle.wait()
    w = torch.rand(4, 5)
    torch.testing.assert_close(dsp.mean(x, w), (x * w).sum() / w.sum())
    torch.testing.assert_close(dsp.mean(dsp.split(x, mesh, 1), dsp.split(w, mesh, 1)), (x * w).sum() / w.sum())
    torch.testing.assert_close(dsp.mean(dsp.split(x, mesh, 0), w[:1]), (x * w[:1]).sum() / w[:1].expand(4, 5).sum())
    with pytest.raises(ValueError, match="switch one of them"):
        dsp.mean(dsp.split(x, mesh, 1), dsp.split(w, mesh, 0))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_all_to_all_compiles(mesh: DeviceMesh, backend: str) -> None:
    group = mesh.get_group().group_name

    def f(x: Tensor) -> Tensor:
        return torch.ops.dsp.switch(x * 2, 1, 2, 5, group).sin()

    whole = torch.randn(2, 5, 6)
    x = dsp.split(whole, mesh, 1).to_local().clone().requires_grad_()
    out = torch.compile(f, backend=backend, fullgraph=True)(x)
    torch.testing.assert_close(out, dsp.split((whole * 2).sin(), mesh, 2).to_local())
    out.square().sum().backward()
    expect = whole.clone().requires_grad_()
    (expect * 2).sin().square().sum().backward()
    torch.testing.assert_close(x.grad, dsp.split(expect.grad, mesh, 1).to_local())


def test_selective_checkpointing_saves_the_all_to_all(mesh: DeviceMesh) -> None:
    def policy(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op is torch.ops.dsp.switch.default else CheckpointPolicy.PREFER_RECOMPUTE

    def f(x: Tensor) -> Tensor:
        return torch.ops.dsp.switch(x.sin(), 0, 1, 4, mesh.get_group().group_name).cos().exp()

    x = torch.randn(2, 6, requires_grad=True)
    with dsp.count_comm() as comm:
        y = checkpoint(f, x, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy))
        y.sum().backward()
    assert comm.recompute.calls["switch"] == 0


@pytest.mark.parametrize("mesh", SIZES)
@pytest.mark.parametrize(("t", "s"), [(7, 5), (4, 8), (2, 3)])
def test_fused_all_to_alls(mesh: DeviceMesh, t: int, s: int) -> None:
    """Three tensors in one exchange, and under way at once, against a switch each: values, gradients, calls, bytes."""
    group, n, rank = mesh.get_group().group_name, mesh.size(), mesh.get_local_rank()
    wholes = [torch.randn(2, t, s, 3, dtype=torch.float64), torch.randn(s, t), torch.randn(1, t, s) > 0]
    where = [(1, 2), (1, 0), (2, 1)]
    sizes = [x.shape[src] for x, (src, _) in zip(wholes, where)]

    def leaves() -> list[Tensor]:
        parts = [dsp.split(x, mesh, src).to_local().clone() for x, (src, _) in zip(wholes, where)]
        return [x.requires_grad_(x.is_floating_point()) for x in parts]

    one, each, at_once = leaves(), leaves(), leaves()
    with dsp.count_comm() as together:
        got = torch.ops.dsp.switch_many(one, *map(list, zip(*where)), sizes, group, [0, 1, 2], *PLAIN)
        assert together.forward.calls == {"switch": 1}
        (got[0].square().sum() + got[1].sin().sum()).backward()
    with dsp.count_comm() as apart:
        expect = [torch.ops.dsp.switch(x, *dims, size, group) for x, dims, size in zip(each, where, sizes)]
        (expect[0].square().sum() + expect[1].sin().sum()).backward()
    assert all(torch.equal(a, b) and a.is_contiguous() and not a._is_view() for a, b in zip(got, expect))
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(one[:2], each))
    assert (together.forward.calls, together.backward.calls) == ({"switch": 1}, {"switch": 1})
    assert (together.recompute.calls, apart.forward.calls) == ({}, {"switch": 3})
    assert (together.forward.bytes, together.backward.bytes) == (apart.forward.bytes, apart.backward.bytes)
    with dsp.count_comm() as comm:
        got = torch.ops.dsp.switch_many(at_once, *map(list, zip(*where)), sizes, group, [], *PLAIN)
        (got[0].square().sum() + got[1].sin().sum()).backward()
    assert all(torch.equal(a, b) and a.is_contiguous() and not a._is_view() for a, b in zip(got, expect))
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(at_once[:2], each))
    assert repr(comm) == repr(apart)
    # one that nobody used sends no gradient back, and one of a kind of dtype travels as it is
    one = leaves()
    with dsp.count_comm() as comm:
        torch.ops.dsp.switch_many(one[:2], [1, 1], [2, 0], sizes[:2], group, [0, 1], *PLAIN)[1].sum().backward()
    assert one[0].grad is None
    assert torch.equal(one[1].grad, torch.ones_like(one[1]))
    assert comm.backward.bytes["switch"] == chunk_sizes(s, n)[rank] * (t - one[1].shape[1]) * 4
    # and without gradients, or on other memory orders
    with torch.no_grad():
        x = dsp.split(wholes[0], mesh, 1).to_local()
        odd = x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)
        for a in torch.ops.dsp.switch_many([x, odd], [1, 1], [2, 2], [t, t], group, [0, 1], *PLAIN):
            assert torch.equal(a, expect[0])


@pytest.mark.parametrize("mesh", SIZES)
def test_concurrent_all_to_alls(mesh: DeviceMesh) -> None:
    """Large tensors that are switched at one place: each as by itself, plain, joined of pieces and within a fold."""
    axis, shape, small = Axis.of(mesh), (2, 9, 6, 3), moves.fuses
    wholes = [torch.randn(shape, dtype=torch.float64) for _ in range(3)]
    joined = Cut(1, (2, 7))
    moves.fuses = lambda nbytes, n: False
    try:
        plain, folded = (Cut(1), Cut(2)), (Cut(1, 3), Cut(2))
        for src, dst in [plain, (joined, Cut(2)), (Cut(2), joined), folded, (joined, Cut(2, 2))]:
            found = []
            for together in (True, False):
                own = [axis.narrow(x, src).clone().requires_grad_() for x in wholes]
                parts = [Part(x, src, dst, shape) for x in own]
                with dsp.count_comm() as comm:
                    made = switch_all(parts, axis) if together else [switch_all([p], axis)[0] for p in parts]
                    sum((x.square() * (i + 1)).sum() for i, x in enumerate(made)).backward()
                assert all(torch.equal(x, axis.narrow(whole, dst)) for x, whole in zip(made, wholes))
                found.append(([x.grad.tolist() for x in own], repr(comm)))
            assert found[0] == found[1]
    finally:
        moves.fuses = small


@pytest.mark.parametrize("mesh", SIZES)
def test_large_all_to_alls_over_gloo_are_messages(mesh: DeviceMesh) -> None:
    """Results, counts and memory orders of gloo's own: uneven, empty, of any dtype, several under way at once."""
    least, begun, sent = private.LARGE, private.in_messages, []

    def in_messages(*given: object) -> bool:
        sent.append(begun(*given))
        return sent[-1]

    private.LARGE, private.in_messages = 0, in_messages
    try:
        for halves in (False, True):
            test_by_hand(mesh, 2, 2, 3, halves)
        test_all_to_all_of_every_pair_of_dims_and_memory_orders(mesh)
        test_fused_all_to_alls(mesh, 7, 5)
        test_concurrent_all_to_alls(mesh)
    finally:
        private.LARGE, private.in_messages = least, begun
    assert all(sent)
    assert len(sent) > 50


def test_an_observer_hears_of_each_collective_once(mesh: DeviceMesh) -> None:
    """However it is sent; and in backward of those that its forward had."""
    heard: list[str] = []
    observer = SimpleNamespace(on_collective=lambda name, args: heard.append(name), for_backward=lambda: observer)
    group, n = mesh.get_group().group_name, mesh.size()

    def halves(x: Tensor) -> Tensor:
        switch = ChunkedSwitch(1, 2, (2 * n, 6), group)
        switch.send(x)
        return switch.join()

    def sent_ahead(x: Tensor) -> Tensor:
        y, arrive = ahead(x, 1, 2, 2 * n, group)
        arrive()
        return y

    ops = torch.ops.dsp
    ways = {
        "switch": lambda x: ops.switch(x, 1, 2, 2 * n, group), "gather": lambda x: ops.gather(x, 1, 2 * n, group),
        "switch_many": lambda x: ops.switch_many([x], [1], [2], [2 * n], group, [0], *PLAIN)[0],
        "start start": halves, "start switch": sent_ahead,
    }  # fmt: skip
    back = {"gather": ["gather", "reduce_scatter"]}
    for name, way in ways.items():
        heard.clear()
        with observing(observer):
            y = way(torch.ones(1, 2, 6, requires_grad=True))
        y.sum().backward()
        assert heard == back.get(name, name.split() if " " in name else [name] * 2)


def test_fused_all_to_alls_have_a_fake_kernel(mesh: DeviceMesh) -> None:
    group = mesh.get_group().group_name
    with FakeTensorMode():
        xs = [torch.empty(1, 2, 6, 3), torch.empty(2, 6, dtype=torch.bool)]
        out = torch.ops.dsp.switch_many(xs, [1, 0], [2, 1], [4, 4], group, [0, 1], *PLAIN)
    assert [(tuple(x.shape), x.dtype) for x in out] == [((1, 4, 3, 3), torch.float32), ((4, 3), torch.bool)]


@pytest.mark.parametrize("mesh", SIZES)
@pytest.mark.parametrize("memory", [(0, 1, 2, 3), (2, 0, 3, 1)])
def test_all_to_all_of_a_concatenated_dim(mesh: DeviceMesh, memory: tuple[int, ...]) -> None:
    """Joined dims: what moves is every rank's part of each piece, of a tensor that lies in memory in any order."""
    axis, shape, back = Axis.of(mesh), (2, 9, 5, 3), [memory.index(i) for i in range(4)]
    x = torch.randn(shape, dtype=torch.float64).permute(memory).contiguous().permute(back)
    weight = torch.randn(shape, dtype=torch.float64)
    text, heads = Cut(1, (2, 7)), Cut(2, (1, 1, 3))
    pairs = [
        (text, Cut(2)),
        (Cut(2), text),
        (text, heads),
        (text, Cut(0)),
        (Cut(3), heads),
        (text, None),
        (heads, None),
    ]
    pairs.append((text, Cut(2, 5)) if mesh.size() == 1 else (heads, Cut(1, 3)))  # a fold is opened
    for src, dst in pairs:
        mine = axis.narrow(x, src).clone().requires_grad_()
        expected = x if dst is None else axis.narrow(x, dst)
        with dsp.count_comm() as comm:
            if dst is None:
                got = gather_local(mine, src, shape, axis)
            else:
                got = switch_local(mine, src, dst, shape, axis)
            assert torch.equal(got, expected)
            kept = weight / mesh.size() if dst is None else axis.narrow(weight, dst)
            (got * kept).sum().backward()
        torch.testing.assert_close(mine.grad, axis.narrow(weight, src))
        there, back = ("gather", "reduce_scatter") if dst is None else ("switch", "switch")
        assert (comm.forward.calls, comm.backward.calls) == ({there: 1}, {back: 1})
        assert not got._is_view()
        with FakeTensorMode():
            fake = torch.empty(mine.shape)
            made = gather_local(fake, src, shape, axis) if dst is None else switch_local(fake, src, dst, shape, axis)
            assert made.shape == got.shape
        # what was counted is what the planner says that each rank sends
        keys = {"src": src.extent(shape[src.dim]), **({"dst": dst.extent(shape[dst.dim])} if dst is not None else {})}
        value = Value("", tuple(keys.items()), x.element_size(), numel=x.numel())
        to = None if dst is None else "dst"
        assert comm.forward.bytes[there] == MOVES[there].sent(value, "src", to, axis.size)[axis.rank]
        assert comm.backward.bytes[back] == MOVES[back].sent(value, to, "src", axis.size)[axis.rank]


def test_a_joined_dim_has_no_placement() -> None:
    assert Cut(1, (2, 7)).fits((4, 9))
    assert not Cut(1, (2, 7)).fits((4, 8))
    with pytest.raises(ValueError, match=r"pieces \[2, 7\], each sharded on its own"):
        Cut(1, (2, 7)).placement()


def test_a_gradient_of_a_gradient_is_refused_not_dropped(mesh: DeviceMesh) -> None:
    x = torch.rand(7, 5, dtype=torch.float64, requires_grad=True)
    d = dsp.switch(dsp.split(x, mesh, 0), 1)
    (g,) = torch.autograd.grad(dsp.mean(d * d * d), x, create_graph=True)
    torch.testing.assert_close(g, 3 * x * x / x.numel())
    with pytest.raises(RuntimeError, match="would give wrong gradients"):
        (g.square().sum() + x.sum()).backward()


@pytest.mark.parametrize("mesh", [3])
@pytest.mark.parametrize(("shape", "calls"), [((1, 7, 5, 3), 1), ((1, 30, 30, 256), 2)])
def test_small_switches_share_a_call(mesh: DeviceMesh, shape: tuple[int, ...], calls: int) -> None:
    axis, x = Axis.of(mesh), torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    parts = [Part(axis.narrow(t, Cut(1)), Cut(1), Cut(2), x.shape) for t in (x, -x)]
    with dsp.count_comm() as count:
        a, b = switch_all(parts, axis)
    assert torch.equal(a, axis.narrow(x, Cut(2)))
    assert torch.equal(b, -a)
    assert count.forward.calls == {"switch": calls}
