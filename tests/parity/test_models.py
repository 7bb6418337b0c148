"""Every registered model in parallel: exact against one process, as many bytes as planned, shared out, discovered.

tests/support/registry.py has the models, and what is claimed of each. Cases kept for `-m slow` show what others show.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import dsp
from dsp.support.tensors import tensors_in
from tests.support import cases, third_party, toys
from tests.support.parity import assert_step_equal, weighted
from tests.support.registry import CASES, DISCOVERED, built, discovered, plain, recomputing, sample, stages_of, step
from tests.support.shares import shares
from tests.support.slow import keep_short, long, slow

OF_A_KIND = {  # of the zoo's; others show the same
    "transformer2d", "transformer2d-class", "latte", "latte-class", "stdit-v1", "stdit-v2", "st_mamba", "st_mamba-sst",
    "st_mamba-2-sst", "st_rwkv-sst", "latte-2-class", "latte-2-text", "latte-3-class", "latte-3-text", "latte-4-class",
    "stdit-v3", "axial-video-summed", "axial-image", "latte-text",
    "st_rwkv", "st_mamba-2", "hunyuan-alone", "transformer2d-stdit",
}  # fmt: skip
ZOO = [name for name in cases.CASES if name not in OF_A_KIND]
VARIANTS = ["wan-image", "wan-frame-times", "axial-image-colour"]
OTHERS = ["diffusers-latte", *third_party.MODELS]
LONG = "st_rwkv-sst diffusers-latte st_mamba latte-4-text latte-text stdit-v1 axial-image".split()
IN_CI = [name for name in DISCOVERED if name not in LONG]  # of which discover takes less
ALL = (0, 1, 2, 3)
BOTH = ("Grid", 1), ("Pair", 4)

EXACT: list[Any] = [  # name, ranks, which of its uneven sizes in turn, whether outputs are gathered, and recomputed
    *((name, 3, (0, 3) if name in ("Grid", "Unplanned") else (0,), False, False) for name in toys.TOYS),
    *((name, 2, (0,), True, True) for name in toys.HOSTILE),
    *((name, 2, (0, 1), True, True) for name in ("Grid", "Folded")),
    ("Folded", 3, (0,), True, False), ("Windows", 3, (1,), True, False), ("Windows", 4, (0,), True, False),
    ("Stretches", 3, (1,), True, False), slow("Mixers", 4, (1,), True, False),
    # axial has no layers to wrap
    *(slow(name, 3, (0,), name in third_party.MODELS, name != "axial") for name in OTHERS if name != "axial"),
    *((name, 3, (0,), True, False) for name in OTHERS if name == "axial"),
    *((name, 3, (0,), False, False) for name in ZOO if name not in VARIANTS),
    *(slow(name, 3, (0,), False, False) for name in VARIANTS),
    *(slow(name, n, ALL, n == 4, False) for name, n in BOTH), slow("Cube", 3, (0,), True, False),
    *(slow(name, 2, (0, 1), True, True) for name in ("Cube", "Global")),
    *(slow(name, 4, (0, 1), False, True) for name in ("Grid", "Folded", "Cube", "Global")),
    *(slow(name, 3, (0,), True, True) for name in toys.HOSTILE),
    *(slow(name, 4, (1,), False, name == "diffusers-latte") for name in OTHERS),
    *(slow("diffusers-latte", n, (1,), n == 3, False) for n in (1, 2, 3)),
    *((slow if name in OF_A_KIND else long)(name, 4, (1,), False, False) for name in cases.CASES),
    *(long(name, n, ALL, n == 4, False) for n in (1, 4) for name in toys.TOYS if (name, n) not in BOTH),
    *(long(name, n, (0, 1), True, False) for n in (2, 4) for name in toys.HOSTILE),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _installed(request: pytest.FixtureRequest) -> None:
    case = getattr(request.node, "callspec", None)
    if case is not None and case.params.get("name") == "axial":
        pytest.importorskip("axial_attention")  # its package asks for more than it needs: pip install --no-deps


@pytest.mark.parametrize(("name", "mesh", "sizes", "gather", "ckpt"), EXACT)
def test_outputs_and_every_gradient(
    mesh: DeviceMesh, name: str, sizes: tuple[int, ...], gather: bool, ckpt: bool
) -> None:
    """Steps at several sizes in turn and the first again, with gradients and without; buffers as they were left."""
    case = CASES[name]
    lengths = [case.uneven[k] for k in sizes]
    single, model = (case.build(*lengths[0][1:]) for _ in range(2))
    stages = stages_of(case, model)
    if ckpt:
        _, stages = recomputing(single, stages), recomputing(model, stages)
    dsp.parallelize(model, mesh, stages, gather_output=gather)
    for size in [*lengths, lengths[0]]:
        inputs = case.inputs(*size)
        single.zero_grad()
        assert_step_equal(single, model, mesh, inputs, loss=weighted)
        if name in cases.CASES:  # whose second call is like the first
            return
        if name in third_party.MODELS:
            continue
        with torch.no_grad() if ckpt else torch.inference_mode():
            found, expect = (tensors_in(m(**plain(inputs))) for m in (model, single))
        for a, b in zip(found, expect, strict=True):
            assert isinstance(a, DTensor) == (not gather and mesh.size() > 1 and b.ndim > 0)
            torch.testing.assert_close(dsp.gather(a), b)
        for (buffer, a), b in zip(model.named_buffers(), single.buffers(), strict=True):
            torch.testing.assert_close(a, b, msg=lambda m, buffer=buffer: f"{buffer}: {m}")


SENT = [name for name in (*toys.TOYS, *toys.HOSTILE) if CASES[name].planned]


def sent(ranks: Any, n: int, name: str, size: tuple[int, ...], ckpt: bool) -> tuple[list[dict], list[dict], dsp.Plan]:
    """Bytes and calls by phase of each rank, without those of the loss; the plan."""
    found = ranks(step, n, name, size, False, ckpt)
    nbytes, calls = (
        [{p: sum(v[what] for v in c[p].values()) for p in c} for c, *_ in found] for what in ("bytes", "calls")
    )
    for phase, (*_, means) in itertools.product(("forward", "backward"), found[:1]):
        for rank in range(n):
            nbytes[rank][phase] -= means * -(-2 * 8 * (n - 1) // n)
            calls[rank][phase] -= means
    return nbytes, calls, found[0][1]


@pytest.mark.parametrize("ckpt", [False, slow(True)])
@pytest.mark.parametrize(
    "name", keep_short(SENT, only=["Grid", "Folded", "Pair", "Branches", "Global", "Windows", "Stretches", "Mixers"])
)
def test_bytes_and_calls_are_those_of_the_plan(ranks: Any, name: str, ckpt: bool) -> None:
    """A plan adds up the busiest rank of each move: of uneven sizes not always the same one, so each sends less."""
    nbytes, calls, plan = sent(ranks, 2, name, CASES[name].even, ckpt)
    assert {phase: max(found[phase] for found in nbytes) for phase in plan.bytes} == plan.bytes
    assert calls == [plan.calls] * 2
    assert plan.share == 1 / 2
    nbytes, _, plan = sent(ranks, 3, name, CASES[name].uneven[0], ckpt)
    assert all(found[phase] <= plan.bytes[phase] for found in nbytes for phase in plan.bytes)


@pytest.mark.slow
def test_large_tensors_switch_alone(ranks: Any) -> None:
    """x is too large to share a switch with y and the mask: two calls, in the plan as in the run."""
    nbytes, calls, plan = sent(ranks, 2, "Streams", (1, 160, 128), False)
    assert nbytes == [plan.bytes] * 2
    assert calls == [plan.calls] * 2 == [{"forward": 10, "backward": 10, "recompute": 0}] * 2


def held(mesh: DeviceMesh, name: str, stages: dict[str, str] | None = None, backward: bool = True) -> Any:
    build, inputs = CASES[name].large()

    def parallelize(model: Any) -> None:
        dsp.parallelize(model, mesh, stages or stages_of(CASES[name], model), gather_output=False)

    return shares(build, inputs, parallelize, CASES[name].floor, backward)


LARGE = [name for name in CASES if name.startswith(("axial-", "latte-2-", "latte-3-", "latte-4-", "stdit-"))]
LARGE += ["st_mamba", "st_mamba-2-sst", "st_rwkv", "wan", *cases.PROTEINS]


@pytest.mark.parametrize(
    ("name", "mesh", "backward"),
    [
        ("axial-video", 2, True), ("diffusers-latte", 4, True), slow("diffusers-latte", 4, False),
        *((name, 2, True) for name in third_party.MODELS), *(slow(name, 4, True) for name in third_party.MODELS),
        *((slow if name in ("evoformer", "st_mamba") else long)(name, 4, True) for name in LARGE),
    ],
)  # fmt: skip
def test_no_rank_holds_more_than_its_share(mesh: DeviceMesh, name: str, backward: bool) -> None:
    largest, total = held(mesh, name, None, backward)
    assert max(largest, total) <= CASES[name].most / mesh.size()


# --- dsp.check and dsp.discover ---------------------------------------------------------------------------------------


def check(mesh: DeviceMesh, name: str, stages: dict[str, str] | None = None) -> None:
    """All modes of a small model, and that it is left as it was; the first of a large one."""
    thorough, zoo = name in toys.TOYS and stages is None, name in cases.CASES | cases.PROTEINS
    frames = 5 if not thorough else 7
    model = built(name, frames)
    inputs = plain(CASES[name].inputs(2, 5, 6)) if zoo and stages is None else sample(name, 2, frames)
    # whole numbers: the sinusoids are float32, and so would be the gradients of what they are taken of
    inputs = {k: v.round().long() if zoo and v.ndim == 1 and v.is_floating_point() else v for k, v in inputs.items()}
    before = {k: v.clone() for k, v in model.state_dict().items()}
    report = dsp.check(
        model, kwargs=inputs, mesh=mesh, stages=stages or stages_of(CASES[name], model), thorough=thorough
    )
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks for m in model.modules())
    assert report, report.text()
    assert "float64: ok" in report.text()


CHECKED = [
    (n, name)
    for n, names in ((2, [name for name in toys.TOYS if name != "Unplanned"]), (3, ZOO), (3, cases.PROTEINS))
    for name in names
]


@pytest.mark.parametrize(("mesh", "name"), keep_short(CHECKED, only=[(2, "Loss"), (3, "axial-image-colour")]))
def test_check_passes(mesh: DeviceMesh, name: str) -> None:
    check(mesh, name)


@pytest.mark.parametrize("name", keep_short(DISCOVERED, only=["Folded", "Unplanned", "axial"], in_slow=IN_CI))
def test_discovered_stages_are_exact(ranks: Any, name: str) -> None:
    ranks(check, 3, name, dict(discovered(name)))


DEARER = [name for name in DISCOVERED if name not in toys.TOYS and name != "axial"]  # in time; others show the same
QUICK = [name for name in DISCOVERED if name not in (*DEARER, "Unplanned")]


@pytest.mark.parametrize("name", [*map(long, DEARER), *keep_short(QUICK, only=["Grid", "Folded", "Global"])])
def test_discovered_stages_send_no_more_than_those_by_hand(name: str) -> None:
    stages, hand = discovered(name), stages_of(CASES[name], built(name))
    for batch, frames, size in ((1, 7, 2), (1, 7, 3), (2, 8, 4)):
        options = {"kwargs": sample(name, batch, frames), "size": size, "gather_output": size > 2}
        one, two = (dsp.plan(built(name, frames), stages=s, **options) for s in (stages, hand))
        divides = name == "Global" and one.flops_whole < two.flops_whole  # what by hand every rank computes
        # Of each move the busiest rank's: a plan has the least of their sum. What is joined along a sharded dim need be
        # no stage: rows for a halo, a few more than by hand
        sent, expect = (sum(row.bytes for row in plan.stages) for plan in (one, two))
        assert divides or sent <= 1.002 * expect, options


@pytest.mark.parametrize(("name", "n"), [("axial", 2), *(long(name, 4) for name in third_party.MODELS)])
def test_no_rank_holds_more_under_discovered_stages(ranks: Any, name: str, n: int) -> None:
    # axial is sharded along its three frames, too, two and one on two ranks; patches overlap where ranks meet
    share = {"axial": 4 / 3, "patchtst": 1.06}.get(name, 1)
    for found, by_hand in zip(ranks(held, n, name, dict(discovered(name))), ranks(held, n, name), strict=True):
        assert all(a <= share * b for a, b in zip(found, by_hand))
