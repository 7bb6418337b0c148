"""Sizes that a model's tensors do not tell, but its arguments, its attributes or the root pattern do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import dsp
from dsp.stages.notation import NotationError, parse
from tests.support import toys
from tests.support.slow import slow

FOLDED = {"": "x=(b t) s c", "space": "(b t) [s c]", "time": "(b s) [t c]"}


class Folded(nn.Module):
    """Frames folded into the batch from the start: only an argument tells how many there are."""

    def __init__(self) -> None:
        super().__init__()
        self.space, self.time = toys.Along(1), toys.Along(1)

    def forward(self, x: Tensor, num_frames: int = 3, depth: int = 1) -> Tensor:
        t, (_, s, c) = num_frames, x.shape
        for _ in range(depth):
            x = self.space(x).view(-1, t, s, c).transpose(1, 2).reshape(-1, t, c)
            x = self.time(x).view(-1, s, t, c).transpose(1, 2).reshape(-1, s, c)
        return x


class Windows(nn.Module):
    """Attention within each of 2 x 2 windows of a frame: the fold (b p q) has dims that no input has."""

    windows = 2

    def __init__(self) -> None:
        super().__init__()
        self.within, self.rows = toys.Along(1), toys.Along(1)
        self.config = SimpleNamespace(window=2)

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        n = self.windows
        x = x.view(b, n, h // n, n, w // n, c).transpose(2, 3).reshape(b * n * n, h * w // n**2, c)
        x = self.within(x).view(b, n, n, h // n, w // n, c).transpose(2, 3).reshape(b * h, w, c)
        return self.rows(x).view(b, h, w, c)


def checked(mesh: DeviceMesh, model: nn.Module, args: tuple[Any, ...], stages: dict[str, str]) -> None:
    report = dsp.check(model, args, mesh=mesh, stages=stages, thorough=False)
    assert report, report.text()


def rows(model: nn.Module, args: tuple[Any, ...], stages: dict[str, str]) -> list[str | None]:
    return [r.layout for r in dsp.plan(model, args, size=2, stages=stages, gather_output=False).stages if r.pattern]


@pytest.mark.parametrize(
    ("root", "args"),
    [
        ("x=(b t) s c", (torch.randn(8, 4, toys.C), 4)),  # the one int argument that divides 8
        ("x=(b t) s c, num_frames=t", (torch.randn(8, 4, toys.C), 4, 2)),
        slow("x=(b t) s c, num_frames=t", (torch.randn(6, 4, toys.C),)),  # its default
        ("x=(b t) s c, t=2", (torch.randn(8, 4, toys.C), 2, 4)),
    ],
)
def test_an_argument_tells_how_many_frames_are_folded(mesh: DeviceMesh, root: str, args: tuple[Any, ...]) -> None:
    stages = {**FOLDED, "": root}
    assert rows(Folded(), args, stages)[:2] == ["t", "s"]
    checked(mesh, Folded(), args, stages)


@pytest.mark.parametrize("size", ["windows=p", "window=p", "p=2"])  # of the model, of its config, a number
def test_a_fold_born_inside_the_model_is_named_by_stating_a_size(mesh: DeviceMesh, size: str) -> None:
    stages = {"": f"x=b h w c, {size}", "within": "(b p q) [s c]", "rows": "(b h) [w c]"}
    x = torch.randn(1, 6, 4, toys.C)
    assert rows(Windows(), (x,), stages) == ["p", "h"]
    checked(mesh, Windows(), (x,), stages)


def test_one_name_will_do_for_what_stays_together() -> None:
    stages = {"": "x=b h w c", "within": "(b n) [s c]", "rows": "(b h) [w c]"}
    assert rows(Windows(), (torch.randn(1, 6, 4, toys.C),), stages) == ["n", "h"]


@pytest.mark.parametrize(
    ("build", "args", "stages", "message"),
    [
        (
            Folded, (torch.randn(8, 4, toys.C), 4, 2), FOLDED,
            r"the model: cannot tell the dims of \(b t\) \(size 8\) apart.*\"num_frames=t\", or by a number, \"t=4\".*"
            r"Int arguments of the model's forward that could state a size: num_frames=4, depth=2",
        ),
        (
            Windows, (torch.randn(1, 6, 4, toys.C),), {"": "x=b h w c", "within": "(b p q) [s c]"},
            r"stage 'within': cannot tell the dims of \(b p q\).*stated there, too.*\"q=4\".*give the axis one name",
        ),
        (
            Folded, (torch.randn(8, 4, toys.C), 4), {**FOLDED, "": "x=(b t) s c, frames=t"},
            "no parameter 'frames'; it has x, num_frames, depth",
        ),
        (
            Folded, (torch.randn(8, 4, toys.C), 4), {**FOLDED, "": "x=n s c, s=5"},
            "'x=n s c, s=5' says s=5, but in the inputs it is 4",
        ),
        (Folded, (torch.randn(8, 4, toys.C), 3), {**FOLDED, "": "x=(b t) s c, num_frames=t"}, "not a multiple of t=3"),
    ],
)  # fmt: skip
def test_unstated_sizes_are_asked_for(build: Any, args: tuple[Any, ...], stages: dict[str, str], message: str) -> None:
    with pytest.raises(NotationError, match=message):
        dsp.plan(build(), args, size=2, stages=stages, gather_output=False)


def test_only_the_root_pattern_states_sizes() -> None:
    assert parse("p=4, x=b t, q=5", root=True).sizes == (("q", 5), ("p", 4))
    first = parse("x=1 t c, y=1 t, p=4", root=True)  # of size 1, not stated to be 1
    assert (len(first.inputs), first.sizes) == (2, (("p", 4),))
    with pytest.raises(NotationError, match="stated in the root pattern"):
        parse("(b p) [s], p=4")
    with pytest.raises(NotationError, match="empty tensor pattern"):
        parse("p=4", root=True)


class Unfolding(nn.Module):
    """A stage that returns several rows for each of its own; one that `reads` its data is planned after a call."""

    def __init__(self, reads: bool = False) -> None:
        super().__init__()
        self.up, self.reads = nn.ConvTranspose2d(4, 2, (2, 3), (2, 3)), reads

    def forward(self, x: Tensor) -> Tensor:
        x = x + 1 if self.reads and x.sum() > 1e9 else x * 2
        return self.up(x).cumsum(2)


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("mesh", [2, 3], indirect=True)
def test_a_fold_that_only_a_result_has_is_exact(mesh: DeviceMesh, reads: bool) -> None:
    stages = {"": "x=b c h w", "up": "b [c] h w -> b [l] (h [p]) (w [q])"}
    for h, w in (6, 5), (4, 3), (5, 5):  # along one dim or the other a part of each rank, or along neither
        checked(mesh, Unfolding(reads), (torch.randn(1, 4, h, w),), stages)
    assert [rows(Unfolding(), (torch.randn(1, 4, h, 5),), stages) for h in (6, 5)] == [["h"], [None]]
