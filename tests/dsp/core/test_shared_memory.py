"""Results of a stage that share memory, and writes into one of them: exact, or refused in words."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import dsp
from dsp.support.tensors import overlap
from tests.support import toys
from tests.support.parity import assert_parallel_equal, assert_step_equal
from tests.support.runs import Heard
from tests.support.toys import C, SpaceTime


class Twice(nn.Linear):
    """One result in two views."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = super().forward(x)
        return y, y.view_as(y)


class Thirds(nn.Linear):
    """Queries, keys and values of one product: one memory, and no element in common."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return super().forward(x).chunk(3, -1)


class View(nn.Module):
    """A view of the input."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view_as(x)


class Sums(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(1)


class Sharing(nn.Module):
    """Stages whose results share memory, and `glue` between them and a stage that is sharded along another dim."""

    stages = {
        "": "x=b t s c", "twice": "b t [s c] -> b t s c, b t s c", "view": "b t [s c]", "time": "b [t] s [c]",
        "thirds": "b t [s c] -> b t s c, b t s c, b t s c",
    }  # fmt: skip

    def __init__(self, glue: Callable[[Sharing, Tensor], Tensor], writes: bool = True) -> None:
        super().__init__()
        self.twice, self.thirds, self.view, self.time = Twice(C, C), Thirds(C, 3 * C), View(), Sums()
        self.glue, self.writes = glue, writes

    def forward(self, x: Tensor) -> Tensor:
        return self.glue(self, x * 1)


def written_before(m: Sharing, x: Tensor) -> Tensor:
    a, b = m.twice(x)
    if m.writes:
        b.mul_(2)
    return m.time(a) + x


def written_after(m: Sharing, x: Tensor) -> Tensor:
    a, b = m.twice(x)
    y = m.time(a)
    a.mul_(2)
    return y + b


def input_written(m: Sharing, x: Tensor) -> Tensor:
    y = x * 1
    z = m.view(y)
    y.mul_(2)
    return m.time(z)


def thirds(m: Sharing, x: Tensor) -> Tensor:
    q, k, v = m.thirds(x)
    if m.writes:
        q.mul_(2)
    return m.time(q) + m.time(k) * v


@pytest.mark.parametrize("mesh", [2, 3], indirect=True)
@pytest.mark.parametrize("glue", [written_before, input_written])
def test_views_see_a_write(mesh: DeviceMesh, glue: Callable[[Sharing, Tensor], Tensor]) -> None:
    x = torch.randn(2, 5, 7, C, dtype=torch.float64, requires_grad=True)
    assert_parallel_equal(Sharing(glue).double(), mesh, (x,), gather=False, rounds=2)


def steps(m: Sharing, y: Tensor) -> Tensor:
    y[:, 1:, ::2].mul_(0.5)
    return y


def steps_read(m: Sharing, y: Tensor) -> Tensor:
    y[:, 1:, ::2].mul_(0.5)
    return y.sum(1) + (y * 2).sum(1)


def diagonal(m: Sharing, y: Tensor) -> Tensor:
    y.diagonal(0, 1, 2).fill_(0.0)
    return y * 2


def corner(m: Sharing, y: Tensor) -> Tensor:
    y[:, -1].zero_()
    y[:, :, 0] = y[:, :, -1].clone() * 2
    return y


@pytest.mark.parametrize("mesh", [2, pytest.param(3, marks=pytest.mark.slow)], indirect=True)
@pytest.mark.parametrize("write", [steps, steps_read, diagonal, corner])
def test_a_write_that_no_layout_of_the_tensor_can_take(mesh: DeviceMesh, write: Callable[..., Tensor]) -> None:
    """The view's steps cut across t and s, along which a product leaves the tensor."""
    x = torch.randn(1, 5, 7, C, dtype=torch.float64, requires_grad=True)
    single = Sharing(lambda m, x: write(m, nn.functional.linear(x, m.twice.weight).clone()))
    assert_parallel_equal(single.double(), mesh, (x,), {"": "x=b t s c"}, rounds=2)


def dense(m: Sharing, x: Tensor) -> Tensor:
    y = x * 2
    z, w = y.contiguous(), y.flatten(2)
    z.mul_(3)
    w.add_(1)
    return m.time(y + z) + w.view(y.shape)


@pytest.mark.parametrize("mesh", [2, 3], indirect=True)
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3)])
def test_an_input_may_lie_otherwise_in_memory_so_that_copies_are_views(mesh: DeviceMesh, order: list[int]) -> None:
    single = Sharing(dense).double()
    model = dsp.parallelize(copy.deepcopy(single), mesh)
    for dims in (order, (0, 1, 2, 3), (0, 2, 1, 3), order):  # each swap is its own inverse
        x = torch.randn([(2, 7, 5, C)[d] for d in dims], dtype=torch.float64).permute(dims)
        with torch.no_grad():
            torch.testing.assert_close(model(x), single(x))


def without_a_plan(m: Sharing, x: Tensor) -> bool:
    """True, which only the numbers of an activation tell."""
    return bool((nn.functional.linear(x, m.twice.weight) < 1e9).all())


def dense_without_a_plan(m: Sharing, x: Tensor) -> Tensor:
    """On one device z and w are copies or views, as the input lies in memory; an operation on data prevents a plan."""
    out = torch.zeros_like(x).transpose(1, 2)
    for _ in range(2):  # again: by now the operations have recipes
        y = m.view(x).transpose(1, 2).mul(2).sin() if without_a_plan(m, x) else x
        z, w = y.contiguous(), y.flatten(1, 2)
        z.mul_(3)
        w.add_(1)
        out = out + y + z + w.view(y.shape)
    return out


@pytest.mark.parametrize("mesh", [2, 3], indirect=True)
@pytest.mark.parametrize(
    "frames", [3, 4, 5, 7]
)  # on 3 ranks: the last rank has one row, none, two or one, and 3: all one
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3)])
def test_copies_of_one_row_without_a_plan(mesh: DeviceMesh, frames: int, order: list[int]) -> None:
    x = torch.randn([(2, frames, 4, C)[d] for d in order], dtype=torch.float64).permute(order)
    single = Sharing(dense_without_a_plan).double()
    model = dsp.parallelize(copy.deepcopy(single), mesh, {**Sharing.stages, "view": "b t [s] [c]"})
    with torch.no_grad():
        if frames == 3 == mesh.size():  # no rank knows where the frames lie in memory
            with pytest.raises(dsp.GlueError, match="wrote in place into a copy"):
                model(x)
        else:
            for _ in range(2):
                torch.testing.assert_close(model(x), single(x))


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "transpose": lambda y: y.transpose(1, 2),
    "mT": lambda y: y.mT,
    "permute": lambda y: y.permute(3, 1, 2, 0),
    "movedim": lambda y: y.movedim(1, 3),
    "unsqueeze": lambda y: y.unsqueeze(0),
    "squeeze": lambda y: y.squeeze(0),
    "select": lambda y: y[0],
    "narrow": lambda y: y.narrow(3, 0, 2),
    "view": lambda y: y.view(5, -1),
    "unflatten": lambda y: y.unflatten(3, (2, -1)),
    "expand": lambda y: y.expand(3, -1, -1, -1),
    "diagonal": lambda y: y.diagonal(0, 0, 3),
    "unfold": lambda y: y.unfold(3, 2, 1),
    "view_as_complex": lambda y: torch.view_as_complex(y.unflatten(3, (-1, 2))),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_without_a_plan_sees_a_write_that_moves_the_tensor(mesh: DeviceMesh, name: str) -> None:
    """Or its next read is refused: in the first call no rank knows that the sum is to come."""

    def forward(m: Sharing, x: Tensor) -> Tensor:
        y = m.view(x).mul(2) if without_a_plan(m, x) else x
        z = VIEWS[name](y)
        y.cumsum_(2)
        return z * 1

    x = torch.randn(1, 5, 7, C, dtype=torch.float64)
    single = Sharing(forward).double()
    model = dsp.parallelize(copy.deepcopy(single), mesh, {**Sharing.stages, "view": "b [t] s [c]"})
    with torch.no_grad():
        for _ in range(2):
            try:
                found = model(x)
            except dsp.GlueError as error:
                assert "wrote in place into a copy" in str(error)  # noqa: PT017 (refused, or right)
            else:
                torch.testing.assert_close(found, single(x))


def test_a_write_into_a_copy_is_refused(mesh: DeviceMesh) -> None:
    model = dsp.parallelize(Sharing(written_after), mesh, gather_output=False)
    with pytest.raises(dsp.GlueError, match="wrote in place into a copy"):
        model(torch.randn(2, 5, 7, C))


@pytest.mark.parametrize("glue", [written_before, thirds])
def test_a_write_that_its_plan_did_not_foresee(mesh: DeviceMesh, glue: Callable[[Sharing, Tensor], Tensor]) -> None:
    x, single = torch.randn(2, 5, 7, C, dtype=torch.float64), Sharing(glue, writes=False).double()
    model = dsp.parallelize(copy.deepcopy(single), mesh, gather_output=False)
    with torch.no_grad():
        model(x)
        model.writes = single.writes = True
        if glue is written_before:
            with pytest.raises(dsp.GlueError, match="wrote in place into a copy"):
                model(x)
        else:  # other elements of the memory: nothing misses the write
            torch.testing.assert_close(dsp.gather(model(x)), single(x))


class Size(nn.Linear):
    """A linear layer that notes how many times its input fits into the memory that holds it."""

    def forward(self, x: Tensor) -> Tensor:
        self.times = x.untyped_storage().nbytes() / x.nbytes
        return super().forward(x)


@pytest.mark.parametrize("mesh", [3], indirect=True)
def test_the_shard_of_a_result_that_every_rank_computed_is_dense_and_alone(mesh: DeviceMesh) -> None:
    """As a view of the full result it would keep that alive, and on the rank with one row it alone would be dense."""

    def forward(m: toys.Does, x: Tensor) -> Tensor:
        k = m.t(x).cummax(1)[0]
        z = k.flatten(0, 1)
        z += 1
        return m.t(k)

    single = toys.Does(forward, t=Size(4, 4)).double()
    model = dsp.parallelize(copy.deepcopy(single), mesh, {"": "x=b t c", "t": "b t [c]"})
    assert_step_equal(single, model, mesh, (torch.randn(2, 7, 4, dtype=torch.float64),))
    assert model.t.times == 1


def test_chunks_of_one_memory_have_no_element_in_common() -> None:
    x = torch.randn(4, 6, 8)
    q, k, _ = x.chunk(3, 1)
    assert not overlap(q, k)
    assert not overlap(x[::2], x[1::2])
    assert not overlap(x[..., ::2], x[..., 1::2])
    assert overlap(q, q.transpose(0, 1))
    assert overlap(x[1:3], x[2:])
    assert overlap(x[None].expand(3, 4, 6, 8), x[3, 5, 7])


@pytest.mark.parametrize("mesh", [3])
def test_a_view_that_is_a_copy_where_a_rank_has_nothing_may_be_written(mesh: DeviceMesh) -> None:
    def forward(m: SpaceTime, x: Tensor) -> Tensor:
        y = m.space(x) * 1
        torch.view_as_complex(y.unflatten(-1, (2, 2))).mul_(2j)
        return m.time(y)

    assert_parallel_equal(SpaceTime(forward).double(), mesh, (torch.randn(1, 4, 2, C, dtype=torch.float64),))


def detached(m: toys.Does, x: Tensor) -> Tensor:
    h = m.t(x)
    y = h.median()
    h.detach().mul_(2)
    return y + h.median() + h


def data(m: toys.Does, x: Tensor) -> Tensor:
    h = m.t(x)
    y = h.median()
    h.data.mul_(2)
    return y + h.median() + h


@pytest.mark.parametrize(("does", "mode"), [(detached, torch.inference_mode), (data, torch.no_grad)])
def test_a_write_that_torch_does_not_count(mesh: DeviceMesh, does: Any, mode: Any) -> None:
    """Copies that were made before are made again."""
    single = toys.Does(does, t=nn.Linear(4, 4)).double()
    model = dsp.parallelize(copy.deepcopy(single), mesh, {"": "x=b t s c", "t": "b [t] s [c]"})
    for _ in range(3):
        x = torch.randn(1, 7, 5, 4, dtype=torch.float64)
        with mode():
            got, expect = model(x), single(x)
        torch.testing.assert_close(got, expect)


def test_a_write_into_an_input_under_inference_mode(mesh: DeviceMesh) -> None:
    model = dsp.parallelize(toys.Does(lambda m, x: x.mul_(2) * x), mesh, {"": "x=b t c"})
    x = torch.randn(2, 5, C)
    for own, says in ((False, "writes in place into the model's own input"), (True, "[Ii]nference tensor|own input")):
        with torch.inference_mode(), pytest.raises(RuntimeError, match=says):
            model(x.clone() if own else x)


@pytest.mark.parametrize("mesh", [2, 3])
def test_a_tensor_stays_in_the_layout_it_was_written_in(mesh: DeviceMesh) -> None:
    """Numbers at places of the full tensor: it is gathered for them, and once, as planned."""

    def put(m: Any, x: Tensor) -> Tensor:
        y = m.lin(x)
        return y.put_(torch.tensor([0, 9, 25]), y.new_ones(3)) * 2

    single, x = toys.Does(put, lin=nn.Linear(C, C)).double(), torch.randn(1, 7, C, dtype=torch.float64)
    model = dsp.parallelize(copy.deepcopy(single), mesh, {"": "x=b s c"})
    with Heard() as heard:
        assert_step_equal(single, model, mesh, (x,), rounds=2)
    assert not any("its plan says" in text for text in heard.texts)
