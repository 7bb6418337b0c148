"""Unmodified models of others: what each rank sends is what a formula says that was derived by hand."""

from __future__ import annotations

import pytest

from dsp.planner import chunk_sizes
from tests.support.registry import CASES, step
from tests.support.slow import long, slow
from tests.support.third_party import MODELS


@pytest.fixture(params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    if request.param == "axial":
        pytest.importorskip("axial_attention")  # its package asks for more than it needs: pip install --no-deps
    return request.param


# what one rank sends forward and backward: the switches, each of `size` elements of 8 bytes; and the sums over ranks


def switched(elements: int, n: int) -> int:
    return elements * 8 * (n - 1) // n**2


def summed(elements: int, n: int) -> int:
    return 2 * elements * 8 * (n - 1) // n


def axial_bytes(n: int, rank: int, h: int, w: int) -> tuple[int, int]:
    # six attentions over t, h, w, t, h, w: w is sharded for the first two, h for the next, w, h
    total = 3 * switched(3 * h * w * 16, n)
    return total, total


def patchtst_bytes(n: int, rank: int, steps: int, variables: int) -> tuple[int, int]:
    # time, variables, time, variables; the head averages over time, which is sharded by then
    total = 3 * switched(steps * variables * 16, n) + summed(variables * 16, n)
    return total, total


def timesformer_bytes(n: int, rank: int, t: int, side: int) -> tuple[int, int]:
    # A class token among the positions is no fold of t and s, so what joins it to them or takes it away is sharded by
    # channel: tokens of all frames (E), with a class token in each (F), with one for all (G, by hand: 1 + t s is odd)
    s, d = side * side, 16
    e, f = switched(t * s * d, n), switched(t * (s + 1) * d, n)
    own = chunk_sizes(1 + t * s, n)[rank]
    to_tokens, to_channels = d // n * (1 + t * s - own) * 8, own * (d - d // n) * 8
    # after attention within frames all of it goes back to channels, or, if cheaper, the class tokens are averaged first
    back = min(f, e + summed(d, n))
    both = e + 2 * (2 * e + f + back) + summed(d, n)  # at the end the class token is read from the rank that has it
    return both + 2 * to_tokens + to_channels, both + 2 * to_channels + to_tokens


BYTES = {"timesformer": timesformer_bytes, "patchtst": patchtst_bytes, "axial": axial_bytes}


@pytest.mark.parametrize("n", [2, slow(4)])
def test_bytes_equal_the_formula(ranks, n: int, name: str) -> None:
    size = CASES[name].even
    for rank, (counted, plan, means) in enumerate(ranks(step, n, name, size, False, False)):
        losses = means * summed(1, n)  # the test's own
        for phase, expect in zip(("forward", "backward"), BYTES[name](n, rank, *size[1:])):
            sent = sum(v["bytes"] for v in counted[phase].values())
            if name == "timesformer":  # the bytes of channels and tokens in turn are a bound
                assert set(counted[phase]) <= {"switch", "all_reduce", "gather", "reduce_scatter", "rows"}
                assert sent <= 0.6 * expect
                assert sent - losses <= plan.bytes[phase] <= 1.5 * sent  # another rank is the busiest in another move
            else:  # every rank the same
                assert set(counted[phase]) <= {"switch", "all_reduce"}
                assert sent == expect + losses, (phase, counted)
                assert plan.bytes[phase] == expect
        assert counted["recompute"] == {}


@pytest.mark.slow
@pytest.mark.parametrize(("n", "ckpt"), [(2, True), slow(4, False), long(4, True)])
def test_bytes_of_latte_equal_the_formula(ranks, n: int, ckpt: bool) -> None:
    # M = B·T·S·D elements of 8 bytes; 2 layers of two blocks; patch 2; 8 channels come out
    m = 2 * 8 * 16 * 16 * 8
    switches = 2 * 2 - 1  # after the last block nothing computes over s: the output stays sharded along its rows
    switched = {"calls": switches, "bytes": switches * (n - 1) * m // n**2}
    out = (n - 1) * 2 * 8 * 8 * 8 * 8 * 8 // n
    for gather in (True, False):
        for counts, plan, _ in ranks(step, n, "diffusers-latte", (2, 8, 8), gather, ckpt):
            assert counts["forward"]["switch"] == counts["backward"]["switch"] == switched
            assert counts["recompute"] == {}
            if gather:
                assert counts["forward"]["gather"] == {"calls": 1, "bytes": out}
                assert counts["backward"]["reduce_scatter"] == {"calls": 1, "bytes": out}
            assert set(counts["forward"]) <= {"switch", "gather", "all_reduce"}
            total = switched["bytes"] + out * gather
            assert plan.bytes == {"forward": total, "backward": total, "recompute": 0}
