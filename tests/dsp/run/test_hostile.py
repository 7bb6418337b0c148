"""Models that would rather not be made parallel: each is exact, or refused in words that name the stage and the fix."""

from __future__ import annotations

import copy
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

import dsp
from dsp.tensors import tensors_in
from tests.support.beside import averaged, beside
from tests.support.slow import long, slow
from tests.support.toys import Along, C

STAGES = {"": "x=b t s c", "blocks.*.space": "b t [s c]", "blocks.*.time": "b [t] s [c]"}


class Model(nn.Module):
    """Two blocks, each of which may be checkpointed by the model itself."""

    block: type[nn.Module]
    stages: dict[str, str] = STAGES

    def __init__(self, ckpt: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(type(self).block() for _ in range(2))
        self.ckpt = ckpt

    def run(self, block: nn.Module, *args: Any) -> Any:
        return checkpoint(block, *args, use_reentrant=False) if self.ckpt else block(*args)

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = self.run(block, x)
        return x

    @staticmethod
    def inputs(b: int, t: int, s: int) -> tuple[Tensor, ...]:
        return (torch.randn(b, t, s, C),)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.space, self.time = Along(2), Along(1)

    def forward(self, x: Tensor) -> Any:
        return self.glue(self.time(self.glue(self.space(x))))

    def glue(self, x: Tensor) -> Tensor:
        return x


# --- exact ------------------------------------------------------------------------------------------------------------


class Cumsum(Model):
    """A running sum over both dims, so that no one layout will do."""

    class block(Block):
        def glue(self, x: Tensor) -> Tensor:
            return x.cumsum(1) / x.shape[1] + x.cumsum(2) / x.shape[2]


class InPlace(Model):
    """Writes in place: into slices, through views, with masks, and into a buffer filled frame by frame."""

    class block(Block):
        def glue(self, x: Tensor) -> Tensor:
            y = x.clone()
            y[:, 0] *= 2
            y[..., 1:].add_(x[..., :-1])
            row = y.select(-1, 0)
            y += 1
            row.mul_(3)
            out = torch.zeros_like(x)
            for i in range(x.shape[2]):
                out[:, :, i] = y[:, :, i].tanh()
            return F.relu(out.masked_fill_(x > 1, 0.5), inplace=True)


class TwoRoles(Model):
    """One module over space and over time, by what it is given."""

    stages = {"": "x=b t s c", "blocks.*.mix": "(b n) [l c]"}

    class block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = Along(1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.mix(x.flatten(0, 1)).view(x.shape)
            y = x.transpose(1, 2)
            return self.mix(y.flatten(0, 1)).view(y.shape).transpose(1, 2)


class TwoRolesUnnamed(TwoRoles):
    """The same, with a pattern that does not say what its first axis is folded from."""

    stages = {"": "x=b t s c", "blocks.*.mix": "n [l c]"}


class DataDependent(Model):
    """Shapes and steps that depend on the data: positions are dropped by value, a loop runs as often as it is told."""

    def forward(self, x: Tensor, steps: Tensor) -> Tensor:
        for block in list(self.blocks)[: int(steps)]:
            x = self.run(block, x)
        kept = x[:, :, x.detach().mean((0, 1, 3)) > -1]
        if kept.detach().abs().max() > 0.5:
            kept = kept * 0.5
        kept = kept.reshape(len(kept), torch.div(kept.shape[1], 1, rounding_mode="trunc"), -1, C)
        return self.run(self.blocks[0], kept)

    block = Block

    @staticmethod
    def inputs(b: int, t: int, s: int) -> tuple[Tensor, ...]:
        return torch.randn(b, t, s, C), torch.tensor(2 - t % 2)


class Norm(Model):
    """A batch norm whose statistics run over every dim but the channels, in training mode, running averages and all."""

    class block(Block):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(C)

        def glue(self, x: Tensor) -> Tensor:
            return self.norm(x.flatten(0, 2)).view(x.shape)


class CrossedFold(Model):
    """Views whose axes begin and end inside of dims: pairs of tokens across frames, and the dims in another order."""

    class block(Block):
        def glue(self, x: Tensor) -> Tensor:
            b, t, s, c = x.shape
            y = x.reshape(b, c, s, t) if t * s % 2 else x.reshape(b, t * s // 2, 2 * c).flip(1)
            return x + y.reshape(b, -1, c).tanh().reshape(x.shape)


class Outputs(Model):
    """Lists of tensors of different layouts among other things, in a dataclass; and a stage that returns a list."""

    @dataclass
    class Result:
        parts: list[Any]
        pooled: Tensor
        note: str = "kept"

    class block(Block):
        class Both(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.own = Along(2)

            def forward(self, x: Tensor) -> list[Tensor]:
                return [self.own(x), x.mean(2)]

        def __init__(self) -> None:
            super().__init__()
            self.space, self.time = self.Both(), Along(1)

        def forward(self, x: Tensor) -> list[Tensor]:
            x, pooled = self.space(x)
            return [self.time(x), pooled]

    stages = {**STAGES, "blocks.*.space": "b t [s c] -> b t [s c], b t [c]"}

    def forward(self, x: Tensor) -> Result:
        first, pooled = self.run(self.blocks[0], x)
        second, _ = self.run(self.blocks[1], first)
        return self.Result([first, None, {"second": second, "size": x.shape[1]}], pooled)


class CalledInside(Model):
    """A stage that another stage calls, too, without being part of it: there it is part of the caller."""

    class block(Block):
        def __init__(self) -> None:
            super().__init__()
            self.time = Along(1)
            self.space = self.Around([self.time])

        class Around(nn.Module):
            def __init__(self, other: list[nn.Module]) -> None:
                super().__init__()
                self.own, self.other = Along(2), other

            def forward(self, x: Tensor) -> Tensor:
                y = self.other[0](x.transpose(1, 2)).transpose(1, 2)  # over positions, not over frames
                return self.own(y)


class FrameTable(Model):
    """Tables and masks indexed by frame, with positions counted from the whole and taken from an input."""

    class block(Block):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(16, C))
            self.register_buffer("decay", torch.linspace(1, 0, 16))

        def glue(self, x: Tensor) -> Tensor:
            t = x.shape[1]
            frames = torch.arange(t)
            x = x + self.table[frames][:, None] + F.embedding(frames.flip(0), self.table)[None, :, None]
            return x * self.decay[:t, None, None] + (frames % 2 == 0).to(x.dtype).view(1, t, 1, 1)

    def forward(self, x: Tensor, numbers: Tensor) -> Tensor:
        x = x + self.blocks[0].table[numbers].unsqueeze(2)
        return super().forward(x)

    @staticmethod
    def inputs(b: int, t: int, s: int) -> tuple[Tensor, ...]:
        return torch.randn(b, t, s, C), torch.arange(t).expand(b, t).flip(1)


EXACT: dict[str, type[Model]] = {
    m.__name__: m
    for m in (
        Cumsum, InPlace, TwoRoles, TwoRolesUnnamed, DataDependent, Norm, CrossedFold, Outputs, CalledInside, FrameTable,
    )
}  # fmt: skip


def make(name: str, ckpt: bool) -> Model:
    torch.manual_seed(1)
    return EXACT[name](ckpt).double()


def parity(mesh: DeviceMesh, names: list[str], shapes: list[tuple[int, int, int]], ckpt: bool) -> None:
    for name in names:
        single, model = make(name, ckpt), make(name, ckpt)
        dsp.parallelize(model, mesh)
        for shape in [*shapes, shapes[0]]:
            torch.manual_seed(2)
            args = tuple(a.double() if a.is_floating_point() else a for a in EXACT[name].inputs(*shape))
            single.zero_grad()
            beside(single, model, mesh, (args[0].requires_grad_(), *args[1:]))
            for (n, a), b in zip(model.named_buffers(), single.buffers()):
                torch.testing.assert_close(a, b, msg=lambda m, n=n: f"{n}: {m}")


@pytest.mark.parametrize(
    ("n", "shapes", "ckpt"),
    [
        long(2, [(2, 5, 3), (1, 4, 6)], False, id="2-shapes0-False"),
        (2, [(2, 5, 3)], True),
        slow(3, [(2, 7, 4)], True),
        long(4, [(1, 6, 5)], False, id="4-shapes2-False"),
    ],
)
def test_exact(ranks, n: int, shapes: list[tuple[int, int, int]], ckpt: bool) -> None:
    ranks(parity, n, list(EXACT), shapes, ckpt)


def plan_and_count(mesh: DeviceMesh, names: list[str]) -> dict[str, Any]:
    found = {}
    for name in names:
        model = make(name, ckpt=True)
        args = tuple(a.double() if a.is_floating_point() else a for a in EXACT[name].inputs(2, 8, 8))
        own = mesh.get_local_rank() == 0  # one rank's plan will do
        plan = dsp.plan(model, args, size=mesh.size(), gather_output=True).bytes if own else None
        dsp.parallelize(model, mesh)
        with dsp.count_comm() as comm:
            sum(y.sum() for y in tensors_in(model(*args))).backward()
        found[name] = (
            {p: sum(v["bytes"] for v in c.values()) for p, c in comm.by_collective().items()},
            plan,
        )
    return found


@pytest.mark.slow
def test_planned_bytes_are_counted_bytes(ranks) -> None:
    names = [name for name in EXACT if name != "DataDependent"]  # no plan ahead of the run
    results = ranks(plan_and_count, 2, names)
    for name in names:
        busiest = {p: max(r[name][0][p] for r in results) for p in ("forward", "backward", "recompute")}
        assert busiest == results[0][name][1], name


# --- random numbers ---------------------------------------------------------------------------------------------------


class Dropout(Model):
    """Dropout in a stage, in glue on a sharded tensor, and in glue on a whole one; linear in the weight."""

    stages = {"": "x=b t s c", "blocks.*.drop": "b t [s c]", "blocks.*.time": "b [t] s c"}

    class block(nn.Module):
        class Drop(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return F.dropout(x, 0.25)

        def __init__(self) -> None:
            super().__init__()
            self.drop, self.time = self.Drop(), nn.Identity()

        def forward(self, x: Tensor, v: Tensor) -> Tensor:
            return F.dropout(self.time(self.drop(x)), 0.25) * F.dropout(v, 0.25)

    def __init__(self, ckpt: bool = False) -> None:
        super().__init__(ckpt)
        self.w, self.v = nn.Parameter(torch.ones(C)), nn.Parameter(torch.ones(64, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.w
        for block in self.blocks:
            x = self.run(block, x, self.v)
        return x


def dropped(mesh: DeviceMesh, ckpt: bool) -> Tensor:
    model = dsp.parallelize(Dropout(ckpt).double(), mesh)
    x = torch.ones(1, 6, 64, C, dtype=torch.float64)
    y = model(x)
    factor = torch.linspace(0.5, 2, y.numel(), dtype=y.dtype).view(y.shape)
    (y * factor).sum().backward()
    grads = averaged(model, mesh)
    # y = w m v m' v m'': the gradient of w at w = 1 is the sum of y, with the masks that made y
    torch.testing.assert_close(grads["w"], (y.detach() * factor).sum((0, 1, 2)))
    torch.testing.assert_close(grads["v"].sum(), 2 * (y.detach() * factor).sum())
    return y.detach()


@pytest.mark.parametrize("ckpt", [False, True])
def test_dropout_draws_one_mask_for_all_and_the_same_again_in_backward(ranks, ckpt: bool) -> None:
    n = 3
    results = ranks(dropped, n, ckpt)
    y = results[0]
    assert all(torch.equal(y, r) for r in results)
    assert 0.10 < float((y != 0).double().mean()) < 0.26  # 0.75 ** 6 = 0.18
    parts = y.chunk(n, 1)
    assert not any(torch.equal(parts[0] != 0, p != 0) for p in parts[1:])


# --- refused ----------------------------------------------------------------------------------------------------------


class Small(nn.Module):
    """A stage over positions, then one over frames, with whatever a test puts in their place."""

    stages = {"": "x=b t s c", "space": "b t [s c]", "time": "b [t] s [c]"}

    def __init__(self, space: nn.Module | None = None, glue: Any = lambda x: x, first: Any = lambda x: x) -> None:
        super().__init__()
        self.space, self.time = space or Along(2), Along(1)
        self.glue, self.first = glue, first

    def forward(self, x: Tensor) -> Tensor:
        return self.time(self.glue(self.space(self.first(x))))


class UsedAgain(Small):
    def forward(self, x: Tensor) -> Tensor:
        x = self.time(x)
        y = self.time(x)
        return y + self.space(x) + x


class NormInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.norm = Along(2), nn.BatchNorm2d(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.own(x))


class OwnFrames(nn.Module):
    """Reads its table from the first entry on, whichever frames it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(16, 1, C))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table[: x.shape[1]]


class Counts(nn.Module):
    """Returns the number of its frames."""

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        return x, x.shape[1]


class Writes(nn.Module):
    """Writes in place into what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return x.add_(1)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Along(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def by_count(result: Any) -> Tensor:
    x, frames = result
    return x / frames


def viewed_and_written(x: Tensor) -> Tensor:
    view = x.flatten(2)
    x.cumsum_(1).cumsum_(2).cumsum_(3)  # no layout will do for all three
    return x + view.view(x.shape)


def torn_and_written(x: Tensor) -> Tensor:
    torn = x.reshape(3, 8, 5)
    x.mul_(0.5)
    return x + torn.reshape(x.shape)


def element_written(x: Tensor) -> Tensor:
    x[0, 0, 0, 0].mul_(2)
    return x * 2


def shifted_and_written(x: Tensor) -> Tensor:
    later = x[:, 1:, 1:, 1:]
    x[:, :1] += 1
    return x[:, 1:, 1:, 1:] * later.relu()


# (model, stages beside its own) -> what the error says
REFUSED: dict[str, tuple[Any, dict[str, str], list[str]]] = {
    "a stage inside a stage": (
        lambda: Small(Outer()),
        {"space.inner": "b t [s c]"},
        ["stage 'space.inner' lies inside stage 'space'", "Remove one of the two from stages"],
    ),
    "a batch norm inside a stage": (
        lambda: Small(NormInside()),
        {},
        ["stage 'space'", "'norm' is a BatchNorm2d in training", "not independent along t", "Write [t]"],
    ),
    "a stage that returns a size": (
        lambda: Small(Counts(), by_count),
        {},
        ["stage 'space' returned", "a size of its part", "put [t] in brackets"],
    ),
    "a write into the model's own input": (
        lambda: Small(first=lambda x: x.mul_(2)),
        {},
        ["mul() between stages writes in place into the model's own input 'x'", "out of place"],
    ),
    "a stage that writes into the model's own input": (
        lambda: Small(Writes()),
        {},
        ["stage 'space' writes in place into the model's own input 'x'", "out of place"],
    ),
    "a stage that writes into its part of a whole tensor": (
        lambda: Small(Writes(), first=lambda x: torch.ones(x.shape) * 2),
        {},
        ["stage 'space' writes in place into its part of a tensor that is whole", "out of place"],
    ),
    "a stage whose input is needed as it was in another layout": (
        lambda: UsedAgain(Writes()),
        {},
        [
            "stage 'space' writes in place, but its tensor, or a view of it, first had to be switched or gathered",
            "out of place",
        ],
    ),
    "a view of what was switched and written": (
        lambda: Small(glue=viewed_and_written),
        {},
        ["writes in place, but its tensor, or a view of it, first had to be switched or gathered", "out of place"],
    ),
    "what a copy was made of, for a view": (
        lambda: Small(glue=torn_and_written),
        {},
        ["mul() between stages writes in place, but its tensor, or a view of it, first had to be switched or gathered"],
    ),
    "a stretch whose source was written since": (
        lambda: Small(glue=shifted_and_written),
        {},
        ["writes in place, but its tensor, or a view of it, first had to be switched or gathered", "out of place"],
    ),
    "an element written in place": (
        lambda: Small(glue=element_written),
        {},
        ["writes in place, but its tensor, or a view of it, first had to be switched or gathered", "out of place"],
    ),
}


def refuse(mesh: DeviceMesh, names: list[str]) -> None:
    for name in names:
        build, more, says = REFUSED[name]
        torch.manual_seed(1)
        model = build()
        x = torch.randn(1, 6, 5, C)
        untouched = x.clone()
        with pytest.raises((dsp.GlueError, dsp.NotationError)) as caught:
            dsp.parallelize(model, mesh, {**Small.stages, **more})
            model(x)
        for part in says:
            assert part in str(caught.value), f"{name}: {caught.value}"
        assert name.startswith(("a write", "a stage that writes")) or torch.equal(x, untouched)


@pytest.mark.parametrize("n", [2, slow(3)])
def test_refused_by_name(ranks, n: int) -> None:
    exact = {"what a copy was made of, for a view"} if n == 3 else set()  # there no copy is made
    ranks(refuse, n, [name for name in REFUSED if name not in exact])


def inspected(mesh: DeviceMesh) -> list[str]:
    return dsp.check(Small(OwnFrames()), (torch.randn(1, 6, 5, C),), mesh=mesh, stages=Small.stages).problems


def test_a_table_read_by_own_frames_is_found_by_check(ranks) -> None:
    problems = ranks(inspected, 2)[0]
    assert "stage 'space' is not independent along 't'" in problems[0]


# --- no help ----------------------------------------------------------------------------------------------------------


class Core(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


class OneSequence(nn.Module):
    """An ordinary transformer: attention over one sequence dim, or over all of a video's."""

    def __init__(self, apart: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(2))

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.core = nn.Linear(C, 3 * C), Core()

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (y.unflatten(-1, (4, -1)).transpose(1, 2) for y in self.qkv(F.layer_norm(x, (C,))).chunk(3, -1))
            return x + self.core(q, k, v).transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_a_model_that_dsp_cannot_help_is_told_so() -> None:
    x = torch.randn(2, 8, C)
    over_sequence = {"": "x=b s c", "blocks.*": "b [s c]"}
    plan = dsp.plan(OneSequence(), x[:1], size=2, stages=over_sequence, gather_output=False)
    assert "DSP does not help this model" in plan.text()
    assert "whole on every rank, and no memory is saved" in plan.text()
    assert "along its heads" in plan.advice
    assert plan.bytes["forward"] == 0
    plan = dsp.plan(OneSequence(), x, size=2, stages=over_sequence, gather_output=False)
    assert "its part of the batch, as data parallelism would" in plan.advice
    # elsewhere sharded, for this gathered each time: M (N-1)/N bytes a rank
    mixed = {"": "x=b s c", "blocks.*.qkv": "b s [c] -> b s [d]", "blocks.*.core": "b h [s d], b h [s d], b h [s d]"}
    mixed["blocks.*.core"] = "[b h s d], [b h s d], [b h s d] -> [b h s d]"
    plan = dsp.plan(OneSequence(), x[:1], size=2, stages=mixed, gather_output=False)
    assert "2 stage calls run whole on every rank" in plan.advice
    assert "gathered for that" in plan.advice
    # the heads apart: two switches a block, as Ulysses does, and nothing to say
    apart = {"": "x=b s c", "blocks.*.core": "b h [s d], b h [s d], b h [s d] -> b h [s d]"}
    plan = dsp.plan(OneSequence(), x[:1], size=2, stages=apart, gather_output=False)
    assert {r.layout for r in plan.stages if r.pattern} == {"h"}
    assert plan.advice == ""


@pytest.mark.parametrize("mesh", [2, 3])
def test_heads_as_a_dim_are_exact(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    stages = {"": "x=b s c", "blocks.*.core": "b h [s d], b h [s d], b h [s d] -> b h [s d]"}
    report = dsp.check(OneSequence(), (torch.randn(2, 7, C),), mesh=mesh, stages=stages)
    assert report, report.text()


class OtherWay(nn.Module):
    """It goes one way without data and another with some, as masks of transformers do: the first run leaves its plan.

    Its keys have fewer heads than its queries: the last of three ranks holds none, which torch lays out otherwise.
    """

    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(C, 32), nn.Linear(16, C)

    def forward(self, x: Tensor) -> Tensor:
        if type(torch.arange(3)) is Tensor:
            x = x * 0.5
        q, k, v = self.project(x).unflatten(-1, (8, -1)).transpose(1, 2).split([4, 2, 2], 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
        return x + self.out(y.contiguous().reshape(*x.shape[:2], -1).contiguous())


def other_way(mesh: DeviceMesh) -> list[Any]:
    torch.manual_seed(0)
    single = OtherWay().double()
    model = dsp.parallelize(copy.deepcopy(single), mesh, {"": "x=b n c"})
    inputs = (torch.randn(1, 9, C, dtype=torch.float64, requires_grad=True),)
    return beside(single, model, mesh, inputs, rounds=3, count=True)


def test_a_run_that_left_its_plan_is_exact_where_a_rank_holds_no_head(ranks) -> None:
    """And the next one, which is recorded, begins as sharded as it did."""
    for _, second, third in ranks(other_way, 3):
        assert second.forward.bytes == third.forward.bytes


class Kept:
    """An object that a caller hands over for a model to write into, such as a cache of keys, with a count."""

    def __init__(self) -> None:
        self.seen, self.rows = 0, list[Tensor]()


class Decoder(nn.Module):
    """Positions of the last three beside each, where they may be of an earlier call."""

    def __init__(self) -> None:
        super().__init__()
        self.keys = nn.Linear(C, C)
        self.counts: dict[str, set[int]] = defaultdict(set)

    def forward(self, x: Tensor, cache: Kept) -> Tensor:
        start = cache.seen
        cache.seen += x.shape[1]
        self.counts["seen"].add(start)
        keys = torch.cat([*cache.rows, self.keys(x + 0.1 * start + len(self.counts["seen"]))], 1)
        cache.rows = [keys[:, -3:]]
        return F.softmax(x @ keys.transpose(1, 2), -1) @ keys


@pytest.mark.parametrize("mesh", [2, 3])
def test_an_object_that_a_model_writes_into_is_as_the_runs_left_it(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    single = Decoder().double()
    model = dsp.parallelize(copy.deepcopy(single), mesh, {"": "x=b n c"})
    caches = Kept(), Kept()
    for length in (5, 4, 1, 2):
        x = torch.randn(1, length, C, dtype=torch.float64)
        expected, found = (m(x, cache) for m, cache in zip((single, model), caches))
        assert torch.allclose(found, expected, rtol=1e-12), length
        assert caches[0].seen == caches[1].seen
    with pytest.raises(RuntimeError, match=r"mul\(\) outside of a forward .* dsp\.gather\(x\)"):
        caches[1].rows[0] * caches[0].rows[0]
    assert torch.allclose(dsp.gather(caches[1].rows[0]), caches[0].rows[0], rtol=1e-12)
    report = dsp.check(Decoder().double(), (x, Kept()), mesh=mesh, stages={"": "x=b n c"})
    assert report, report.text()


class LastRows(nn.Module):
    """Zeros that take the last rows, as the states of a convolution's cache do."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.zeros(x.shape[0], C, 4, dtype=x.dtype)
        rows.copy_(self.mix(x).transpose(1, 2)[..., -4:])
        return x + rows.cumsum(1).sum(-1)[:, None]


@pytest.mark.parametrize("mesh", [2, 3])
def test_zeros_are_not_made_whole_and_then_cut_to_be_written_into(mesh: DeviceMesh) -> None:
    with pytest.MonkeyPatch.context() as patch:  # a search that is cut short, so that it takes what comes first
        patch.setattr("dsp.planner.elimination.ROWS", 0)
        patch.setattr("dsp.planner.sweep.STATES", 1)
        for n in (7, 5):
            torch.manual_seed(0)
            single = LastRows().double()
            model = dsp.parallelize(copy.deepcopy(single), mesh, {"": "x=b n c"})
            inputs = (torch.randn(1, n, C, dtype=torch.float64, requires_grad=True),)
            beside(single, model, mesh, inputs, rounds=2)


def apart(mesh: DeviceMesh) -> tuple[str, str]:
    said = []
    for forgotten in ("seed", "average"):
        torch.manual_seed(mesh.get_local_rank() if forgotten == "seed" else 0)
        model = OneSequence()
        torch.manual_seed(0)
        x = torch.randn(2, 7, C)
        dsp.parallelize(model, mesh, {"": "x=b s c", "blocks.*": "b [s c]"})
        try:
            model(x)
            model(x).square().mean().backward()
            torch.optim.SGD(model.parameters(), lr=0.1 * (1 + mesh.get_local_rank())).step()  # gradients of its own
            model.eval()(x)  # the third call, which compares no weights but for its new signature
        except RuntimeError as error:
            said.append(str(error))
    return tuple(said)


def test_ranks_whose_weights_differ_are_told_so(ranks) -> None:
    for unseeded, stepped in ranks(apart, 2):
        assert "hold different weights: blocks.0.qkv.weight, blocks.0.qkv.bias" in unseeded
        assert "average gradients" in stepped


def drifting(mesh: DeviceMesh, calls: int, how: str) -> tuple[int, str]:
    """The call that raises, of inputs of one shape: weights differ from the one after `calls` on."""
    torch.manual_seed(0)
    model, x = OneSequence(), torch.randn(2, 7, C)
    if how == "parts":  # as FSDP over other ranks leaves them: of a mesh that none of the others is in
        own = DeviceMesh("cpu", torch.arange(mesh.size())[:, None], mesh_dim_names=("dp", "sp"))["sp"]
        held = DTensor.from_local(model.blocks[0].qkv.weight.detach().clone(), own, [Shard(0)])
        model.register_parameter("parts", nn.Parameter(held))
    if how == "cut":
        own = DTensor.from_local(torch.full((2, 2), float(mesh.get_local_rank())), mesh, [Shard(0)])
        model.register_parameter("cut", nn.Parameter(own))
    dsp.parallelize(model, mesh, {"": "x=b s c", "blocks.*": "b [s c]"})
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("dsp.run.agreement.EVERY", 12)
        for call in range(1, 20):
            try:
                model(x)
            except RuntimeError as error:
                return call, str(error)
            if call == calls and how != "cut":
                odd = model.parts.to_local() if how == "parts" else model.blocks[1].qkv.bias
                odd[0] += 1e-6 * mesh.get_local_rank()
    return 0, ""


@pytest.mark.parametrize(
    ("calls", "how", "raised"), [(1, "", 2), (2, "", 4), (9, "", 12), (3, "parts", 4), (1, "cut", 0)]
)
def test_weights_that_drift_apart_are_named_within_twice_as_many_calls(
    ranks, calls: int, how: str, raised: int
) -> None:
    for call, error in ranks(drifting, 2, calls, how):
        assert call == raised
        name = "parts" if how == "parts" else "blocks.1.qkv.bias"
        assert not raised or f"hold different weights: {name}. Build the model from one seed" in error


def parted(mesh: DeviceMesh) -> str:
    class OneWay(OneSequence):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            return x.flip(1) if mesh.get_local_rank() else x * 2

    model = dsp.parallelize(OneWay(), mesh, {"": "x=b s c", "blocks.*": "b [s c]"})
    with pytest.raises(RuntimeError) as caught:
        model(torch.randn(2, 7, C, generator=torch.Generator().manual_seed(0)))
    return str(caught.value)


def test_ranks_that_go_different_ways_are_told_so(ranks) -> None:
    for said in ranks(parted, 2):
        assert "made different plans for the same inputs" in said
