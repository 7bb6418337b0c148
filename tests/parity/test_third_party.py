"""Models of others, unmodified: a video classifier, a time series model, axial attention over three dims. A dict each.

On 2, 3 and 4 ranks: outputs and every gradient, the bytes by a formula, and what a rank holds.
"""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import dsp
from dsp.planner import chunk_sizes
from dsp.tensors import tensors_in
from tests.support.beside import beside
from tests.support.slow import slow
from tests.support.third_party import MODELS, held, make


@pytest.fixture(params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    if request.param == "axial":
        pytest.importorskip("axial_attention")  # its package asks for more than it needs: pip install --no-deps
    return request.param


@pytest.mark.parametrize(("mesh", "shape", "ckpt"), [(3, (1, 7, 4), True), slow(4, (2, 5, 3), False)])
def test_outputs_and_every_gradient(mesh: DeviceMesh, name: str, shape: tuple[int, int, int], ckpt: bool) -> None:
    single, model = make(name, *shape[1:]), make(name, *shape[1:])
    if ckpt and name == "timesformer":
        model.activation_checkpointing_enable({"use_reentrant": False})
    dsp.parallelize(model, mesh, MODELS[name].stages)
    torch.manual_seed(1)
    kwargs = MODELS[name].inputs(*shape)
    beside(single, model, mesh, {k: v.double().requires_grad_() for k, v in kwargs.items()}, rounds=2)


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


def moved(mesh: DeviceMesh, name: str, one: int, two: int) -> tuple[dict, dict, int]:
    model = make(name, one, two)
    kwargs = {k: v.double() for k, v in MODELS[name].inputs(1, one, two).items()}
    plan = dsp.plan(model, kwargs=kwargs, size=mesh.size(), stages=MODELS[name].stages, gather_output=False)
    dsp.parallelize(model, mesh, MODELS[name].stages, gather_output=False)
    with dsp.count_comm() as comm:
        outputs = [y for y in tensors_in(model(**kwargs)) if y.requires_grad]
        sum(dsp.mean(y) for y in outputs).backward()
    return comm.by_collective(), plan.bytes, sum(isinstance(y, DTensor) for y in outputs)


@pytest.mark.parametrize("n", [2, slow(4)])
def test_bytes_equal_the_formula(ranks, n: int, name: str) -> None:
    lengths = (8, 4) if name == "timesformer" else (16, 8)
    formula = [BYTES[name](n, rank, *lengths) for rank in range(n)]
    for (counted, planned, sharded), (forward, backward) in zip(ranks(moved, n, name, *lengths), formula):
        losses = sharded * summed(1, n)  # the test's own
        for phase, expect in (("forward", forward), ("backward", backward)):
            sent = sum(v["bytes"] for v in counted[phase].values())
            if name == "timesformer":  # the bytes of channels and tokens in turn are a bound
                assert set(counted[phase]) <= {"switch", "all_reduce", "gather", "reduce_scatter", "rows"}
                assert sent <= 0.6 * expect
                assert sent - losses <= planned[phase] <= 1.5 * sent  # another rank is the busiest in another move
            else:  # every rank the same
                assert set(counted[phase]) <= {"switch", "all_reduce"}
                assert sent == expect + losses, (phase, counted)
                assert planned[phase] == expect
        assert counted["recompute"] == {}


@pytest.mark.parametrize("n", [2, slow(4)])
def test_no_rank_holds_more_than_its_share(ranks, n: int, name: str) -> None:
    for largest, total in ranks(held, n, name, 1, 32, 16 if name == "patchtst" else 8):
        assert largest <= 1.3 / n
        assert 1 / n <= total <= 1.3 / n
