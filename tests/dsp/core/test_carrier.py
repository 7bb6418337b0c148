"""The tensor between stages: it reads as a DTensor, and autograd functions of others may have it."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import dsp
from dsp.comm.layout import Axis, Cut
from dsp.core.carrier import Carrier, carry
from dsp.core.record import Record, Ref
from tests.support.parity import assert_parallel_equal
from tests.support.refusals import refused
from tests.support.toys import C, Glued

SHAPE = (2, 5, 6, C)


def made(glue: Any) -> nn.Module:
    torch.manual_seed(1)
    return Glued(glue).double()


def inputs() -> Tensor:
    return torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def test_every_rank_says_alike_how_a_tensor_lies() -> None:
    """A forward may ask; what a part of one row or none says of that is not what the others say."""
    said = set()
    for rank in range(4):
        axis = Axis(None, 4, rank, "")  # type: ignore[arg-type]
        own = axis.local_shape((5, 3), Cut(0))
        record, ref = Record(4, {}, None, ()), Ref(torch.Size((3, 5)))
        t, other = (carry(record, (torch.ones(*own) * 2).T, ref, Cut(1)) for _ in range(2))
        said.add((t.stride(), t.stride(0), t.is_contiguous(), t.data_ptr() == other.data_ptr()))
    assert said == {((5, 1), 5, True, False)}


class Unchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g * 2


class Viewed(Unchanged):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.view_as(x)


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return g * 2 * x


@pytest.mark.parametrize("mesh", [2, 3])
def test_autograd_functions_between_stages(mesh: DeviceMesh) -> None:
    for glue in (Unchanged.apply, Viewed.apply, Squared.apply, lambda x: Squared.apply(x.detach()) + x):
        if glue in (Unchanged.apply, Viewed.apply, Squared.apply):
            model = dsp.parallelize(made(glue), mesh)
            refused("the autograd.Function .* between stages", model, inputs(), error=dsp.GlueError)
            continue
        assert_parallel_equal(made(glue), mesh, (inputs(),))


@pytest.mark.parametrize("mesh", [2, 3])
def test_saved_tensors_may_be_kept_in_host_memory(mesh: DeviceMesh) -> None:
    with torch.autograd.graph.save_on_cpu():
        assert_parallel_equal(made(lambda x: x.softmax(1) * x), mesh, (inputs(),))


def test_it_reads_as_a_dtensor(mesh: DeviceMesh) -> None:
    found: list[Any] = []
    glue = lambda x: (found.append(x), x * 1)[1]  # noqa: E731
    whole = made(glue)(inputs())
    before = found.pop()
    y = dsp.parallelize(made(glue), mesh)(inputs())
    torch.testing.assert_close(y, whole)
    x = found.pop()
    assert type(x) is Carrier
    assert isinstance(x, Tensor)
    assert (x.shape, x.ndim, x.numel(), len(x), x.size(1)) == (SHAPE, 4, before.numel(), 2, 5)
    assert (x.ndimension(), x.nelement(), torch.numel(x), x.nbytes) == (4, *[before.numel()] * 2, before.nbytes)
    assert x.is_same_size(before)
    assert (x.stride(), x.is_contiguous(), x.dtype, x.requires_grad) == (before.stride(), True, torch.float64, True)
    assert x.device_mesh == mesh
    assert x.placements == (Shard(1),)
    assert x.to_local().shape[1] == (3 if mesh.get_local_rank() == 0 else 2)
    torch.testing.assert_close(x.full_tensor(), before)
    torch.testing.assert_close(dsp.gather(x), before)
    torch.testing.assert_close(dsp.gather(dsp.switch(x, 2)), before)
    torch.testing.assert_close(dsp.mean(x), before.mean())
    assert isinstance(x.redistribute(placements=[Shard(2)]), DTensor)
    later = x + 1  # outside the forward it is a DTensor like any other
    assert isinstance(later, DTensor)
    torch.testing.assert_close(later.full_tensor(), before + 1)
    assert "the part of rank" in repr(x)
    assert f"sharded along dim 1" in f"{x}"  # noqa: F541
    assert x.new_zeros(2).shape == (2,)


def printed(x: Tensor) -> Tensor:
    return x * len(f"{x.detach().square().sum():.3f}")


def copied(x: Tensor) -> Tensor:
    detached = x.detach()
    return x + copy.deepcopy(detached) * pickle.loads(pickle.dumps(detached))


@pytest.mark.parametrize("mesh", [2, 3])
@pytest.mark.parametrize("glue", [printed, copied])
def test_it_is_printed_copied_and_pickled_as_the_full_tensor(mesh: DeviceMesh, glue: Any) -> None:
    single, x = made(glue), inputs()
    model = dsp.parallelize(copy.deepcopy(single), mesh)
    for _ in range(3):
        torch.testing.assert_close(model(x), single(x))
