"""DSP over some ranks and heads or a ring over the others: whole models and a toy against one process, and bytes."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import dsp
import zoo
from dsp.core.torch_calls import GlueError
from dsp.embedded.grid import switch_ranks
from dsp.stages.notation import NotationError
from tests.support.cases import build, doubled, example
from tests.support.embedded import parity, recomputed, sent, step
from tests.support.parity import assert_step_equal
from tests.support.slow import slow
from tests.support.toys import Core

METHODS = ("dsp_ulysses", "dsp_ring")


@pytest.mark.parametrize(
    ("n", "size", "switch"),
    [(32, 16, 16), (8, 4, 4), (4, 4, 4), (4, 1, 1), (4, 5, 2), (8, 5, 2), (6, 5, 3), (12, 9, 3), (7, 3, 1), (1, 9, 1)],
)
def test_factors(n: int, size: int, switch: int) -> None:
    """The most ranks that a dim keeps busy: 5 frames on 4 ranks are 2, 2, 1 and none, so that two of them switch."""
    assert switch_ranks(n, size) == switch


CASES = [  # on how many ranks, and frames, height and width of the clip
    ("transformer2d", 4, (3, 6, 10)),  # frames 2 and 1, places 4, 4, 4, 3
    ("transformer2d", 4, (5, 6, 6)),  # places 3, 3, 3 and none: one block has 6, the other 3
    ("transformer2d", 4, (3, 2, 4)),  # two places: a block without any
    ("transformer2d", 4, (4, 6, 6)),  # as many frames as ranks: DSP
    ("transformer2d", 3, (2, 6, 10)),  # no two of three ranks: the method inside alone
    ("transformer2d-stdit", 4, (2, 6, 6)),
    ("latte-2-text", 4, (3, 6, 6)),
    ("stdit-v3", 4, (3, 6, 10)),
]


@pytest.mark.parametrize(
    ("case", "mesh", "shape", "method"),
    [
        (*case, method) if case == CASES[1] else slow(*case, method)
        for method in METHODS
        for case in (CASES if method == "dsp_ulysses" else CASES[:3] + CASES[-1:])
    ],
)
def test_models(mesh: DeviceMesh, case: str, shape: tuple[int, int, int], method: str) -> None:
    parity(mesh, case, method, shape)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_eight_ranks_on_four_frames(whole_world, method: str) -> None:
    whole_world(of_four_frames, 8, method)


def of_four_frames(mesh: DeviceMesh, method: str) -> None:
    parity(mesh, "transformer2d", method, (4, 6, 10))


class Space(nn.Module):
    """Attention over s, given what belongs to a frame, to a place and to all."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.core, self.out = nn.Linear(8, 24), Core(inner=True), nn.Linear(8, 8)

    def forward(self, x: Tensor, frame: Tensor, place: Tensor, shared: Tensor) -> Tensor:
        b, s = len(x), place.shape[0]
        y = x.unflatten(1, (-1, s)) + place
        y = y * (1 + frame[:, :, None]) + shared[:, :, None]
        q, k, v = self.qkv(y.flatten(0, 1)).unflatten(-1, (3, 4, 2)).unbind(-3)
        y = self.out(self.core(q, k, v).flatten(-2))
        return x + y.unflatten(0, (b, -1)).flatten(1, 2)


class Time(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.cumsum(self.mix(x), 1)


class Toy(nn.Module):
    """Frames and places in one axis, (t s), as video models flatten them."""

    stages: Mapping[str, str] = {
        "": "x=b t s c -> b t s c",
        "spaces.*": "b (t [s]) [c], frame=b t [c], place=[s c], shared=b [q c]",
        "times.*": "b [t] s [c]",
    }
    cores: Mapping[str, str] = {"spaces.*.core": "(b t) [s] h [e], (b t) [s] h [e], (b t) [s] h [e]"}

    def __init__(self) -> None:
        super().__init__()
        self.spaces = nn.ModuleList(Space() for _ in range(2))
        self.times = nn.ModuleList(Time() for _ in range(2))
        self.frame, self.place = nn.Parameter(torch.randn(7, 8)), nn.Parameter(torch.randn(64, 8))

    def forward(self, x: Tensor, shared: Tensor) -> Tensor:
        b, t, s, c = x.shape
        frame, place = self.frame[:t].expand(b, t, c), self.place[:s]
        for space, time in zip(self.spaces, self.times):
            x = space(x.reshape(b, t * s, c), frame, place, shared).reshape(b, t, s, c)
            x = time(x)
        return x


@pytest.mark.parametrize("mesh", [4])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("t", "s"), [(3, 6), slow(2, 3)])
def test_folds_and_what_else_a_stage_is_given(mesh: DeviceMesh, method: str, t: int, s: int) -> None:
    """A tensor along t alone is cut, one along s alone gathered among those that switch, another passes."""
    single = Toy().double()
    model = copy.deepcopy(single)
    inputs = {"x": torch.randn(2, t, s, 8).double(), "shared": torch.randn(2, 1, 8).double()}
    for x in inputs.values():
        x.requires_grad_()
    dsp.embedded.parallelize(model, mesh, method, gather_output=False)
    (comm,) = assert_step_equal(single, model, mesh, inputs, count=True)
    assert comm.forward.calls["switch"] > 0


class Inner(nn.Module):
    """Attention over the first of two dims of an axis, batch and frames being another axis in either order."""

    def __init__(self, fold: int) -> None:
        super().__init__()
        self.fold, self.qkv, self.core, self.out = fold, nn.Linear(8, 24), Core(inner=True), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = x.unflatten(1, (-1, self.fold)).transpose(1, 2)
        q, k, v = self.qkv(y.flatten(0, 1)).unflatten(-1, (3, 4, 2)).unbind(-3)
        y = self.out(self.core(q, k, v).flatten(-2))
        return x + y.unflatten(0, (len(x), self.fold)).transpose(1, 2).flatten(1, 2)


class Folded(nn.Module):
    stages: Mapping[str, str] = {
        "": "x=t b s k c -> t b s k c",
        "spaces.*": "(t b) ([s] k) [c]",
        "times.*": "b [t] (s k) [c]",
    }
    cores: Mapping[str, str] = {"spaces.*.core": "(t b k) [s] h [e], (t b k) [s] h [e], (t b k) [s] h [e]"}

    def __init__(self, fold: int) -> None:
        super().__init__()
        self.spaces = nn.ModuleList(Inner(fold) for _ in range(2))
        self.times = nn.ModuleList(Time() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        t, b, s, k, c = x.shape
        for space, time in zip(self.spaces, self.times):
            y = space(x.reshape(t * b, s * k, c)).reshape(t, b, s * k, c)
            x = time(y.transpose(0, 1)).transpose(0, 1).reshape(t, b, s, k, c)
        return x


@pytest.mark.parametrize("mesh", [4])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("t", "s", "fold"), [(3, 8, 3), slow(3, 6, 1)])
def test_dims_that_others_are_folded_into(mesh: DeviceMesh, method: str, t: int, s: int, fold: int) -> None:
    single = Folded(fold).double()
    model = copy.deepcopy(single)
    x = torch.randn(t, 2, s, fold, 8).double()
    assert_step_equal(single, dsp.embedded.parallelize(model, mesh, method, gather_output=False), mesh, (x,))


class Writer(Space):
    def forward(self, x: Tensor, frame: Tensor, place: Tensor, shared: Tensor) -> Tensor:
        return super().forward(x, frame, place.add_(1), shared)


class Written(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.spaces = nn.ModuleList(Writer() for _ in range(2))
        del self.place
        self.register_buffer("place", torch.zeros(64, 8))


@pytest.mark.parametrize("mesh", [4])
@pytest.mark.parametrize("method", ["ulysses", "dsp_ulysses"])
def test_writing_into_a_part_is_an_error(mesh: DeviceMesh, method: str) -> None:
    """A stage's argument after a switch is a copy: a write into it would be lost."""
    model = dsp.embedded.parallelize(Written(), mesh, method)
    with pytest.raises(GlueError, match="in place into this rank's part of a replicated tensor"):
        model(torch.randn(2, 2, 8, 8), torch.randn(2, 1, 8))


@pytest.mark.parametrize("mesh", [4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.int16, torch.complex64])
def test_every_dtype_is_switched_among_some(mesh: DeviceMesh, dtype: torch.dtype) -> None:
    rank, group = mesh.get_local_rank(), mesh.get_group().group_name
    among = [rank % 2, rank % 2 + 2]
    whole = torch.arange(30).reshape(5, 3, 2).remainder(3).to(dtype)
    own = whole.split([4, 1])[rank // 2]
    found = torch.ops.dsp.switch_among(own, 0, 1, [4, 1], [1, 2], among, group)
    assert torch.equal(found, whole.split([1, 2], 1)[rank // 2])
    with pytest.raises(ValueError, match="ascending order"):
        torch.ops.dsp.switch_among(own, 0, 1, [1, 4], [1, 2], among[::-1], group)


# --------------------------------------------------------------------------------------------------------------- bytes


@pytest.mark.parametrize(
    ("method", "how"),
    [
        slow("dsp_ulysses", "stages"), slow("dsp_ulysses", "saved"), slow("dsp_ulysses", "blocks"),
        slow("dsp_ring", None), ("dsp_ring", "both"),
    ],
)  # fmt: skip
def test_bytes_are_those_of_the_plan_and_of_the_formula(ranks, method: str, how: str | None) -> None:
    n, case = 4, "transformer2d"
    shape = {"frames": 2, "height": 8, "width": 8}
    model = build(case)
    inputs = doubled(example(model, 2, **shape))
    recomputed(model, how)
    plan = dsp.embedded.plan(
        model, kwargs=inputs, size=n, method=method, save_exchanges=how == "saved", gather_output=False
    )
    m = 2 * 2 * 16 * 48 * 8 // n  # of an activation, what a rank has of it
    switches, layers = 2 * m // 2, model.config.depth  # to frames and back, of which one of two halves travels
    inside = {"dsp_ulysses": (4 * m // 2, 4 * m // 2), "dsp_ring": (2 * m, 2 * m + 2 * 2 * m)}[method]
    every = ranks(step, n, case, method, how, shape)
    found = {phase: max(sent(counts, phase, "switch", "ring") for counts in every) for phase in plan.bytes}
    # the frames are embedded on two of the ranks, which send what the others get; back all that these have
    assert found["forward"] == layers * (switches + inside[0]) + 2 * m * 3 // 4
    assert found["backward"] == layers * (switches + inside[1]) + m
    if how in (None, "stages", "saved"):  # the switches are outside of what is recomputed
        assert found["recompute"] == (layers * inside[0] if how == "stages" else 0)
    assert found == plan.bytes


def test_nobody_to_switch_with_is_no_exchange(ranks) -> None:
    """No two of three ranks can switch two frames: what is exchanged is Ulysses' own, in as many calls as planned."""
    case, method, shape = "transformer2d", "dsp_ulysses", {"frames": 2, "height": 6, "width": 10}
    model = build(case)
    plan = dsp.embedded.plan(
        model, kwargs=doubled(example(model, 2, **shape)), size=3, method=method, gather_output=False
    )
    for counts in ranks(step, 3, case, method, None, shape):
        for phase in ("forward", "backward"):
            assert counts[phase]["switch"]["calls"] == plan.calls[phase]


def test_more_ranks_than_frames_or_heads() -> None:
    with torch.device("meta"):
        model = zoo.create("transformer2d", "720m", depth=2)
        inputs = model.example_inputs(1, frames=16, height=128, width=128)
    plan = partial(dsp.embedded.plan, model, kwargs=inputs, size=32, dtype=torch.bfloat16, gather_output=False)
    assert "16 of 32 ranks have nothing to do in embed, blocks.*.spatial: 't' is too short" in str(plan(method="dsp"))
    with pytest.raises(NotationError, match=r"16 heads over 32 ranks.*dsp_ulysses"):
        plan(method="ulysses")
    for method in METHODS:
        rows = [r for r in plan(method=method).stages if r.name.endswith("spatial")]
        assert f"switch, {method[4:]}" in rows[1].switch
        assert not any(r.idle for r in rows)


def test_stages_without_another_dim_are_errors() -> None:
    class Lone(nn.Module):
        stages: Mapping[str, str] = {"": "x=b s c -> b s c", "attention": "b [s c]"}
        cores: Mapping[str, str] = {"attention.core": "b [s] h [e], b [s] h [e], b [s] h [e]"}

        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.Module()
            self.attention.core = Core(inner=True)

    with pytest.raises(ValueError, match="leaves no dim but batch to switch to"):
        dsp.embedded.plan(Lone(), (torch.randn(1, 8, 8),), size=2, method="dsp_ulysses", gather_output=False)
