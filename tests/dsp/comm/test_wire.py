"""Switches that travel in fewer bits: the numbers that arrive, their bytes, gradients, and what stays exact."""

from __future__ import annotations

import sys
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import dsp
from dsp.comm.exchange import switch_plan
from dsp.comm.formats import FORMATS
from dsp.comm.layout import Axis, Cut
from dsp.comm.moves import Part, switch_all
from dsp.comm.pending import ahead
from dsp.comm.wire import STOCHASTIC, Wire, format_of
from tests.support.loopback import TOLERANCE, measured
from tests.support.parity import averaged
from tests.support.runs import Heard
from tests.support.slow import slow
from tests.support.toys import Folded, Grid
from zoo.training import UserError
from zoo.training.config import load

NAMES = sorted(FORMATS)
RANKS = [2, 3, slow(4)]
ERROR = {"bf16": 2**-8, "fp8": 2**-4, "int8": 1 / 254}  # of a number, of int8's largest of its block: half a step


def arrived(x: Tensor, wire: str, splits: list[int] | None = None, seed: int = 0) -> Tensor:
    form, splits = format_of(wire, x.dtype), splits or [len(x)]
    assert form is not None
    raw = form.pack(x, splits, seed)
    assert raw.dtype == torch.uint8
    assert len(raw) == sum(map(form.nbytes, splits))
    return form.unpack(raw, splits, torch.empty_like(x))


def close(got: Tensor, expect: Tensor, wire: str, steps: float = 1.0) -> None:
    """Each number is as near as its format allows."""
    assert got.dtype == expect.dtype
    assert got.shape == expect.shape
    if not expect.numel():
        return
    bound = ERROR[wire] * steps * (expect.abs().max() if wire == "int8" else expect.abs()) * 1.01
    least = expect.abs().max() * 2**-18 * (wire == "fp8")  # half a step of what is far below the largest
    assert ((got - expect).abs() <= bound + least * steps).all(), (got - expect).abs().max()


# ------------------------------------------------------------------------------------------------------------- formats


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("wire", NAMES)
def test_each_number_is_as_near_as_its_format_allows(wire: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    if format_of(wire, dtype) is None:
        assert (wire, dtype.itemsize) == ("bf16", 2)
        return
    x = torch.randn(1300).to(dtype)
    kept = x.clone()
    for splits in ([1300], [400, 400, 400, 100], [5, 1295], [0, 650, 650, 0]):
        close(arrived(x, wire, splits), x, wire)
        close(arrived(x, wire + STOCHASTIC, splits), x, wire, steps=2)
    assert torch.equal(x, kept)  # what is sent is not written


@pytest.mark.parametrize("stochastic", ["", STOCHASTIC])
@pytest.mark.parametrize("wire", NAMES)
def test_nan_and_infinity_arrive_as_such_and_their_neighbours_are_near(wire: str, stochastic: str) -> None:
    torch.manual_seed(0)
    x, odd = torch.randn(300), torch.tensor([float("inf"), float("-inf"), float("nan"), float("-inf")])
    where = torch.tensor([0, 17, 18, 299])
    x[where] = odd
    y = arrived(x, wire + stochastic)
    torch.testing.assert_close(y[where], odd, equal_nan=True, rtol=0, atol=0)
    rest = torch.ones(300, dtype=torch.bool)
    rest[where] = False
    close(y[rest], x[rest], wire, steps=2.2)
    alone = torch.tensor([float("inf")] * 3)  # nothing finite
    assert torch.equal(arrived(alone, wire + stochastic), alone)


@pytest.mark.parametrize("stochastic", ["", STOCHASTIC])
@pytest.mark.parametrize("wire", NAMES)
def test_zeros_ones_and_the_largest_and_least_numbers(wire: str, stochastic: str) -> None:
    zeros = torch.zeros(200)
    assert torch.equal(arrived(zeros, wire + stochastic), zeros)
    mask = (torch.arange(300) % 3 == 0).float()
    assert torch.equal(arrived(mask, wire + stochastic), mask)
    for size in (3e38, 1e-30, 1e-45):
        x = torch.full((130,), size)
        y = arrived(x, wire + stochastic)
        assert y.isfinite().all()
        torch.testing.assert_close(y, x, rtol=2**-7, atol=1e-38)


@pytest.mark.parametrize("wire", NAMES)
def test_gradients_are_rounded_without_bias(wire: str) -> None:
    torch.manual_seed(0)
    x = torch.cat([torch.randn(128), torch.randn(128) * torch.logspace(-3, 0, 128), torch.full((60,), 0.3)])
    x[-1] = 1.0  # so that 0.3 is between two numbers
    draws = torch.stack([arrived(x, wire + STOCHASTIC, seed=seed) for seed in range(2000)]).double()
    bias = draws.mean(0) - x.double()
    spread = draws.std(0) / 2000**0.5
    largest = torch.cat([part.abs().amax().expand(len(part)) for part in x.split(128)])
    step = {"bf16": x.abs() / 2**7, "fp8": x.abs() / 2**3 + largest / 2**17, "int8": largest / 127}[wire]
    rare = 2 * step / 2000  # what is rounded up twice in these draws may not have been once
    assert (bias.abs() <= 5 * (spread + rare)).all()
    assert (bias / (spread + rare)).square().mean() < 2
    nearest = arrived(x, wire).double() - x.double()
    assert nearest.abs().mean() > 4 * bias.abs().mean()  # which rounding to the nearest has


def test_noise_is_that_of_a_seed_and_takes_none_of_the_generator() -> None:
    x, before = torch.randn(500), torch.get_rng_state()
    one, again, other = (arrived(x, "fp8" + STOCHASTIC, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), before)


def test_other_and_smaller_dtypes_are_sent_unchanged() -> None:
    for dtype in (torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn):
        assert format_of("fp8", dtype) is None
    assert format_of("same", torch.float32) is None
    assert format_of("bf16", torch.float16) is None


def test_eight_bits_of_bf16_are_at_most_052_of_it() -> None:
    form = format_of("fp8", torch.bfloat16)
    assert form is not None
    for count in (500, 1000, 4096, 12345):
        assert form.nbytes(count) <= 0.52 * 2 * count + 4


WRONG = "wire: expected one of same, bf16, fp8, int8 (or {'forward': ..., 'backward': ...}), got "


@pytest.mark.parametrize(
    ("given", "shown"),
    [("fp4", "'fp4'"), (None, "None"), ({"forward": "fp4"}, "'fp4'"), ({"there": "fp8"}, "{'there'")],
)
def test_a_wrong_value_is_an_error(given: object, shown: str) -> None:
    with pytest.raises(ValueError, match="wire: expected") as error:
        Wire.of(given)
    assert str(error.value).startswith(WRONG + shown)
    with pytest.raises(ValueError, match="wire: expected"):
        dsp.plan(Grid(), kwargs=Grid.inputs(1, 4, 4), size=2, wire=given)  # type: ignore[arg-type]


def test_a_configuration_names_the_formats() -> None:
    both = load(["configs/demo.yaml", "parallel.wire.forward=fp8", "parallel.wire.backward=bf16"])
    assert Wire.of(both.parallel.wire) == ("fp8", "bf16")
    assert load(["configs/demo.yaml"]).parallel.wire == "same"
    with pytest.raises(UserError, match=r"parallel\.wire: expected one of same.*got 'fp4'"):
        load(["configs/demo.yaml", "parallel.wire=fp4"])


# ------------------------------------------------------------------------------------------------------------ switches


def of_rank(mesh: DeviceMesh, whole: Tensor, dim: int) -> Tensor:
    return Axis.of(mesh).narrow(whole, Cut(dim))


def expected(mesh: DeviceMesh, whole: Tensor, src: int, dst: int, wire: str) -> Tensor:
    """This rank's part of what arrives: each sender's blocks are those of its own flat tensor."""
    n, parts = mesh.size(), []
    plan = switch_plan(of_rank(mesh, whole, src), src, dst, whole.shape[src], mesh.get_group().group_name)
    for r in range(n):
        for_me = chunk(chunk(whole, n, src, r), n, dst, mesh.get_local_rank())
        leads = for_me if plan.dst_leads else for_me.movedim(src, 0)
        came = arrived(leads.reshape(-1), wire).view(leads.shape) if leads.numel() else leads
        parts.append(came if plan.dst_leads else came.movedim(0, src))
    return torch.cat(parts, src)


def chunk(x: Tensor, n: int, dim: int, rank: int) -> Tensor:
    parts = x.chunk(n, dim)
    return parts[rank] if rank < len(parts) else x.narrow(dim, 0, 0)


def switches(mesh: DeviceMesh, wire: str) -> None:
    """One alone, several that share an exchange, several at once, and one in the background, on sizes of every kind."""
    torch.manual_seed(0)
    axis = Axis.of(mesh, Wire(wire, "same"))
    for shape in [(2, 5, 3, 7), (1, 8, 12, 16), (1, 3, 9, 130), (2, 0, 5, 3)]:
        wholes = [torch.randn(shape), torch.randn(shape).bfloat16(), torch.randint(0, 9, shape)]
        for src, dst in ((1, 2), (2, 1), (3, 1)):
            parts = [Part(of_rank(mesh, w, src), Cut(src), Cut(dst), w.shape) for w in wholes]
            strided = parts[0]._replace(local=parts[0].local.transpose(0, -1).contiguous().transpose(0, -1))
            together = switch_all(parts, axis)
            alone = [switch_all([p], axis)[0] for p in parts]
            made, arrive = ahead(*parts[0].opened(axis), axis.group, wire=axis.wire)
            arrive()
            for w, one, two in zip(wholes, together, alone):
                form = format_of(wire, w.dtype)
                expect = of_rank(mesh, w, dst) if form is None else expected(mesh, w, src, dst, wire)
                assert torch.equal(one, expect)
                assert torch.equal(two, expect)
            assert torch.equal(made, alone[0])
            close(switch_all([strided], axis)[0], of_rank(mesh, wholes[0], dst), wire)
    joined = torch.randn(1, 9, 10, 8)  # of 5 and 4, each of which is sharded by itself
    cut = Cut(1, (5, 4))
    part = Part(axis.narrow(joined, cut), cut, Cut(2), joined.shape)
    counted = []
    for several in ([part], [part, part]):  # in one piece, or taken apart for the exchange
        with dsp.count_comm() as comm:
            for got in switch_all(several, axis):
                close(got, of_rank(mesh, joined, 2), wire)
        counted.append(comm.bytes)
    assert counted[1] == 2 * counted[0]
    large = [torch.randn(1, 64, 64, 96 * mesh.size()) for _ in range(2)]  # too large to share
    each = switch_all([Part(of_rank(mesh, w, 1), Cut(1), Cut(2), w.shape) for w in large], axis)
    for w, got in zip(large, each):
        assert torch.equal(got, expected(mesh, w, 1, 2, wire))


@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize("wire", NAMES)
def test_a_switch_brings_the_packed_numbers(ranks, n: int, wire: str) -> None:
    ranks(switches, n, wire)


def there_and_back(mesh: DeviceMesh, wire: str) -> None:
    torch.manual_seed(0)
    axis, whole, grad = Axis.of(mesh, Wire("same", wire)), torch.randn(1, 7, 9, 8), torch.randn(1, 7, 9, 8)
    exact = Axis.of(mesh)
    for how in (axis, exact):
        x = of_rank(mesh, whole, 1).clone().requires_grad_()
        y = switch_all([Part(x, Cut(1), Cut(2), whole.shape)] * 2, how)
        assert torch.equal(y[0], of_rank(mesh, whole, 2))  # forward is exact
        found = []
        for seed in (3, 3, 4):
            torch.manual_seed(seed)
            x.grad = None
            y[0].backward(of_rank(mesh, grad, 2), retain_graph=True)
            found.append(x.grad.clone())
        if how is exact:
            assert torch.equal(found[0], of_rank(mesh, grad, 1))
            continue
        assert torch.equal(found[0], found[1])
        assert not torch.equal(found[0], found[2])
        close(found[0], of_rank(mesh, grad, 1), wire, steps=2)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("wire", NAMES)
def test_gradients_travel_in_a_format_of_their_own(ranks, n: int, wire: str) -> None:
    ranks(there_and_back, n, wire)


# -------------------------------------------------------------------------------------------------------------- models


class Recomputed(Grid):
    """Each layer within an activation checkpoint, with the switch between its stages."""

    def forward(self, x: Tensor, cond: Tensor) -> Tensor:
        x = self.embed(x)
        for space, time in zip(self.space, self.time):
            x = checkpoint(lambda x, space=space, time=time: time(x + space(x).sin()), x, use_reentrant=False)
        return x


def stepped(mesh: DeviceMesh, kind: type[nn.Module], inputs: dict[str, Tensor], wire: object, **options: object):
    torch.manual_seed(0)
    model = kind()
    plan = dsp.plan(model, kwargs=inputs, size=mesh.size(), wire=wire, gather_output=False)  # type: ignore[arg-type]
    dsp.parallelize(model, mesh, wire=wire, gather_output=False, **options)  # type: ignore[arg-type]
    made = []
    for _ in range(3 if options else 2):
        model.zero_grad()
        torch.manual_seed(1)
        with Heard() as heard, dsp.count_comm() as comm:
            loss = dsp.mean(model(**inputs).square())
            loss.backward()
        assert not heard.texts, heard.texts
        made.append((loss.detach(), [*averaged(model, mesh).values()], comm))
    return made, plan


CASES = {
    "grid": (Grid, lambda: Grid.inputs(1, 3, 10)),  # three frames: on four ranks one has none
    "folded": (Folded, lambda: Folded.inputs(2, 5, 6)),
    "recomputed": (Recomputed, lambda: Grid.inputs(2, 5, 7)),
    "large": (Grid, lambda: Grid.inputs(64, 16, 256)),  # some switches run in the background
}


def trains(mesh: DeviceMesh, case: str, wire: object, **options: object) -> None:
    kind, inputs = CASES[case]
    torch.manual_seed(2)
    given = inputs()
    *first, (loss, grads, comm) = stepped(mesh, kind, given, wire, **options)[0]
    for one, others, _ in first[-1:]:  # the same seed: the same noise
        assert torch.equal(one, loss)
        assert all(torch.equal(a, b) for a, b in zip(others, grads))
    exact, exact_grads, all_of_it = stepped(mesh, kind, given, "same")[0][0]
    assert abs(loss - exact) / exact < 0.02
    total = sum(float((a - b).square().sum()) for a, b in zip(grads, exact_grads))
    assert total < 0.01 * sum(float(b.square().sum()) for b in exact_grads)
    if wire != "same":
        assert not all(torch.equal(a, b) for a, b in zip(grads, exact_grads))
        nothing = not all_of_it.forward.bytes["switch"]  # on a rank without a part
        assert nothing or comm.bytes < all_of_it.bytes


@pytest.mark.parametrize("n", [slow(2), 3, slow(4)])
@pytest.mark.parametrize("case", [case if case != "large" else slow(case) for case in CASES])
def test_a_model_trains_and_repeats_itself(ranks, n: int, case: str) -> None:
    ranks(trains, n, case, "fp8")


@pytest.mark.parametrize("wire", ["bf16", "int8", {"forward": "fp8", "backward": "bf16"}, {"backward": "fp8"}])
def test_a_model_trains_in_each_format(ranks, wire: object) -> None:
    ranks(trains, 3, "grid", wire)


def as_planned(mesh: DeviceMesh, case: str, wire: object) -> None:
    kind, inputs = CASES[case]
    made, plan = stepped(mesh, kind, inputs(), wire)
    for phase in ("forward", "backward", "recompute"):
        mine = torch.tensor(getattr(made[-1][2], phase).bytes["switch"])
        torch.distributed.all_reduce(mine, torch.distributed.ReduceOp.MAX, group=mesh.get_group())
        assert mine == plan.sends[phase].get("switch", (0, 0))[0], phase


@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize("case", ["grid", "folded", "recomputed"])
def test_a_run_sends_what_its_plan_says(ranks, n: int, case: str) -> None:
    ranks(as_planned, n, case, {"forward": "fp8", "backward": "bf16"})


def compiled(mesh: DeviceMesh) -> None:
    for backend in ("eager", "aot_eager"):
        trains(mesh, "grid", "fp8", compile=backend)
        torch.compiler.reset()


@pytest.mark.slow
def test_a_compiled_model_sends_the_same(ranks) -> None:
    ranks(compiled, 2)


def test_the_plan_says_how_its_switches_travel() -> None:
    make = partial(dsp.plan, Grid(), kwargs=Grid.inputs(1, 16, 384), size=2, gather_output=False)
    plans = {wire: make(wire=wire) for wire in ("same", "fp8")}
    assert str(plans["fp8"]).count("switches travel as fp8, their gradients as fp8") == 1
    assert "travel" not in str(plans["same"])
    for phase in ("forward", "backward"):
        there, less = (plan.sends[phase]["switch"][0] for plan in plans.values())
        assert less == pytest.approx(there * 33 / 128, rel=1e-3)  # of float32
        assert plans["fp8"].sends[phase].get("reduce_scatter") == plans["same"].sends[phase].get("reduce_scatter")
    assert make().bytes == plans["same"].bytes


class Pair(nn.Module):
    stages = {"": "x=b t s c -> b t s c", "space": "b t [s c]", "time": "b [t] s [c]"}

    def __init__(self) -> None:
        super().__init__()
        self.space, self.time = nn.Identity(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.time(self.space(x))


def sent(mesh: DeviceMesh, wire: str) -> tuple[float, float, int]:
    x = torch.randn(1, 64, 128, 512).bfloat16()
    plan = dsp.plan(Pair(), x, size=mesh.size(), gather_output=False, wire=wire)
    model = dsp.parallelize(Pair(), mesh, gather_output=False, wire=wire)
    with torch.no_grad():
        model(x)
        return *measured(mesh, lambda: model(x)), plan.bytes["forward"] * mesh.size()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the loopback counter of Linux")
def test_the_kernel_counts_at_most_052_of_bf16(ranks) -> None:
    formula = 64 * 128 * 512 * 2 / 2
    for (kernel, counted, planned), (whole, *_) in zip(ranks(sent, 2, "fp8"), ranks(sent, 2, "same")):
        assert counted == planned
        assert kernel == pytest.approx(planned, rel=TOLERANCE)
        assert planned <= 0.52 * formula
        assert whole == pytest.approx(formula, rel=TOLERANCE)
