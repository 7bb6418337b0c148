"""The record and its run: exact against one process, nothing long made whole, transforms refused."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import dsp
from dsp.core.torch_calls import GlueError
from dsp.parallel import parallelize
from dsp.support.tensors import memory, tensors_in
from tests.support.forwards import FORWARDS, Layers, Mapped, Padded, Registers, clip
from tests.support.parity import assert_step_equal, unsharded
from tests.support.refusals import refused
from tests.support.slow import slow

ROUNDING = {"rtol": 1e-9, "atol": 1e-12}


class Count(TorchDispatchMode):
    """Counts the tensors of `numel` elements that operations make, in all phases of a step; views make none."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel, self.count = numel, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        operands = {memory(t) for t in tensors_in((args, kwargs))}
        self.count += sum(t.numel() == self.numel and memory(t) not in operands for t in tensors_in(out))
        return out


@pytest.mark.parametrize("mesh", [slow(2), 3])
@pytest.mark.parametrize("name", FORWARDS)
def test_a_forward_is_exact_and_makes_nothing_long_whole(mesh: DeviceMesh, name: str) -> None:
    make, inputs, numel = FORWARDS[name]
    single, batch = make().double(), inputs()
    batch["x"].requires_grad_()
    model = parallelize(copy.deepcopy(single), mesh)
    assert_step_equal(single, model, mesh, batch, rounds=2, **ROUNDING)
    if numel:
        counts = []
        for m in (single, model):
            with Count(numel) as count:
                m(**batch).square().mean().backward()
            counts.append(count.count)
        assert counts[0], "one process makes it"
        assert not counts[1], "a rank does not"


WAYS = ["last", "first", "split"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("frames", [7, 8])
def test_tokens_that_are_joined_with_others_are_a_clip_again_when_these_are_cut_off(frames: int, way: str) -> None:
    """No rank has more than its share, whether it has as many frames as others or not."""
    for n in (2, 3, 4):
        plan = dsp.plan(Registers(way), clip(1, 8, frames, 5, 7)["x"], size=n, gather_output=False)
        assert plan.share <= (0.5 if n == 3 else -(-frames // n) / frames + 0.05), n


@pytest.mark.parametrize("mesh", [4])
@pytest.mark.parametrize("way", WAYS)
def test_joined_tokens_are_exact_on_four_ranks(mesh: DeviceMesh, way: str) -> None:
    single = Registers(way).double()
    model = parallelize(copy.deepcopy(single), mesh)
    assert_step_equal(single, model, mesh, clip(1, 8, 7, 5, 7), rounds=2, **ROUNDING)


@pytest.mark.parametrize("mesh", [3])
@pytest.mark.parametrize("depth", [0, slow(1), 2])
def test_fully_shard_on_stages_and_the_model(mesh: DeviceMesh, depth: int) -> None:
    single = Layers(depth).double()
    model = parallelize(copy.deepcopy(single), mesh)
    for layer in model.layers:
        fully_shard(layer.time, mesh=mesh)
        fully_shard(layer.space, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert_step_equal(single, model, mesh, clip(1, 7, 5, 16), rounds=2, gradients=unsharded, **ROUNDING)


@pytest.mark.parametrize("closed", [False, True])
def test_a_transform_over_a_part_is_refused(mesh: DeviceMesh, closed: bool) -> None:
    model = parallelize(Mapped(closed).double(), mesh)
    refused("torch.vmap or another transform", model, clip(1, 7, 5, 16)["x"], error=GlueError)


def test_a_number_that_changes_is_read_in_each_call(mesh: DeviceMesh) -> None:
    single = Padded().double()
    model = parallelize(copy.deepcopy(single), mesh)
    for value in (1, 2, 4):
        for m in (single, model):
            m.value = np.float64(value)
        assert_step_equal(single, model, mesh, clip(1, 7, 5, 16), **ROUNDING)
