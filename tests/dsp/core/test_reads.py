"""A forward that reads inputs or parameters alone reads them while it is recorded: its first call has a plan."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import dsp
from tests.support.parity import assert_step_equal
from tests.support.records import left_plan, planned, records
from tests.support.toys import C, Does


def padded(m: Any, x: Tensor, pad: Tensor) -> Tensor:
    """Layers by the padding, and by a number of a buffer; rows by a mask."""
    for _ in range(1 + sum(float(pad[:, i].sum()) == 0 for i in range(3))):
        x = m.lin(x)
    if m.scale.abs().max().item() > 1:
        x = x * 2
    return x[:, torch.nonzero(pad[0] == 0)[:, 0]]


def activations(m: Any, x: Tensor, pad: Tensor) -> Tensor:
    return m.lin(x) * (2 if float(m.lin(x).detach().sum()) < 1e9 else 1)


def written(m: Any, x: Tensor, pad: Tensor) -> Tensor:
    """A branch by a number that was written in place."""
    length = pad.sum()
    length += 9
    return m.lin(x) if float(length) > 5 else x.softmax(1)


@pytest.mark.parametrize("mesh", [2, 3])
def test_masks_and_buffers_are_read_before_the_first_call(mesh: DeviceMesh) -> None:
    single = Does(padded, lin=nn.Linear(C, C), scale=nn.Parameter(torch.full((3,), 2.0))).double()
    model = dsp.parallelize(copy.deepcopy(single), mesh, {"": "x=b s c"})
    x, pad = torch.randn(1, 25, C, dtype=torch.float64), torch.zeros(1, 25)
    for ones in (0, 2, 0):
        pad[:, 1 : 1 + ones] = 1
        assert_step_equal(single, model, mesh, (x, pad.clone()))
        assert ones or not left_plan(model)


@pytest.mark.parametrize("mesh", [2])
def test_activations_are_not(mesh: DeviceMesh) -> None:
    single = Does(activations, lin=nn.Linear(C, C)).double()
    model = dsp.parallelize(copy.deepcopy(single), mesh, {"": "x=b s c"})
    x = torch.randn(1, 25, C, dtype=torch.float64)
    assert_step_equal(single, model, mesh, (x, x[..., 0]))
    assert not planned(model)
    assert_step_equal(single, model, mesh, (x, x[..., 0]), rounds=2)
    assert planned(model)


def test_reads_after_a_write_see_it(mesh: DeviceMesh) -> None:
    single = Does(written, lin=nn.Linear(C, C)).double()
    model = dsp.parallelize(copy.deepcopy(single), mesh, {"": "x=b s c"})
    inputs = torch.randn(1, 25, C, dtype=torch.float64), torch.zeros(1, 25)
    assert_step_equal(single, model, mesh, inputs)
    assert not records(model)[0].planned
    assert_step_equal(single, model, mesh, inputs, rounds=2)
    assert planned(model)
