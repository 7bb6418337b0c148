"""What the host language lets go wrong: ranks that are told different things, threads, copies, tests of a type."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from toys import Along, C

import dsp

STAGES = {"": "x=b t s c", "space": "b t [s c]", "time": "b [t] s [c]"}


class Model(nn.Module):
    """Attention over space, what `glue` does, attention over time."""

    stages = STAGES

    def __init__(self, glue: Any = lambda x: x) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.space, self.time, self.glue = Along(2), Along(1), glue

    def forward(self, x: Tensor) -> Tensor:
        return self.time(self.glue(self.space(x)))


def inputs() -> Tensor:
    return torch.randn(2, 5, 6, C, generator=torch.Generator().manual_seed(2))


# --- ranks ------------------------------------------------------------------------------------------------------------


def deeper() -> Model:
    model = Model()
    model.add_module("more", Along(2))
    return model


def told_apart(mesh: DeviceMesh) -> list[str]:
    """The last rank of each group is told something else."""
    mesh = mesh if mesh.ndim == 1 else mesh["sp"]
    odd = mesh.get_local_rank() == mesh.size() - 1
    cases: list[Any] = [
        (Model, {"stages": {**STAGES, "time": "b [t s c]"}}),
        (Model, {"stages": {k: v for k, v in STAGES.items() if k != "time"}}),
        (Model, {"stages": {**STAGES, "tmie": "b [t] s [c]"}}),  # no rank waits for one that found an error alone
        (Model, {"gather_output": False}),
        (deeper, {}),
        (Model, {"torch": "2.0"}),
    ]
    said = []
    for build, options in cases:
        version, options = torch.__version__, dict(options)
        with pytest.raises(RuntimeError) as caught:
            try:
                torch.__version__ = options.pop("torch", version) if odd else version
                dsp.parallelize(build() if odd else Model(), mesh, **(options if odd else {}))
            finally:
                torch.__version__ = version
        said.append(str(caught.value))
    with pytest.raises(RuntimeError, match="make different things parallel"):
        dsp.check(Model(), (inputs(),), mesh=mesh, stages=cases[0][1]["stages"] if odd else STAGES)
    other = dict(reversed(STAGES.items()))
    torch.testing.assert_close(
        dsp.parallelize(Model(), mesh, other if odd else STAGES)(inputs()), Model()(inputs())
    )  # in another order they are the same, and the group goes on
    return said


@pytest.mark.parametrize("n", [3, "2x2"])
def test_ranks_that_are_told_different_things_are_named(ranks, n: int | str) -> None:
    for rank, said in enumerate(ranks(told_apart, n)):
        group = [0, 1, 2] if n == 3 else [rank // 2 * 2, rank // 2 * 2 + 1]
        most = f"ranks {group[0]}, {group[1]}" if n == 3 else f"rank {group[0]}"
        last = f"rank {group[-1]}"
        assert f"stages['time'] is 'b [t] s [c]' on {most}, but 'b [t s c]' on {last}. Give every rank" in said[0]
        assert f"stages['time'] is 'b [t] s [c]' on {most}, but missing on {last}" in said[1]
        assert f"stages['tmie'] is missing on {most}, but 'b [t] s [c]' on {last}" in said[2]
        assert f"gather_output is True on {most}, but False on {last}" in said[3]
        assert f"model.more is missing on {most}, but Along on {last}; so differ model.more." in said[4]
        assert f"torch is {torch.__version__} on {most}, but 2.0 on {last}" in said[5]


def one_collective(mesh: DeviceMesh) -> None:
    sent: list[int] = []
    gather = dist.all_gather_single

    def counted(everyone: Tensor, mine: Tensor, **options: Any) -> Any:
        sent.append(mine.numel() * mine.element_size())
        return gather(everyone, mine, **options)

    alone = DeviceMesh("cpu", torch.arange(mesh.size())[:, None], mesh_dim_names=("dp", "sp"))["sp"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_gather_single", counted)
        dsp.parallelize(Model(), alone)
        assert sent == []
        dsp.parallelize(Model(), mesh)
        assert sent == [8]


def test_they_compare_eight_bytes_and_alone_nothing(ranks) -> None:
    ranks(one_collective, 2)


# --- threads ----------------------------------------------------------------------------------------------------------


def two_threads(mesh: DeviceMesh) -> None:
    inside, go_on, found = threading.Event(), threading.Event(), []

    def wait(x: Tensor) -> Tensor:
        if torch.utils._python_dispatch._get_current_dispatch_mode() is None:  # not while it is planned
            inside.set()
            assert go_on.wait(60)
        return x

    model = dsp.parallelize(Model(wait), mesh)
    other = threading.Thread(target=lambda: found.append(model(inputs())))
    other.start()
    assert inside.wait(60)
    with pytest.raises(RuntimeError, match=r"two threads call one parallelized Model at the same time.*one thread"):
        model(inputs())
    go_on.set()
    other.join()
    expect = Model()(inputs())
    torch.testing.assert_close(found[0], expect)
    torch.testing.assert_close(model(inputs()), expect)  # one after the other they may
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        dsp.parallelize(failing := Model(lambda x: x.view(7)), mesh)(inputs())
    failing.glue = lambda x: x
    torch.testing.assert_close(failing(inputs()), expect)  # a call that failed is over
    loss = model(inputs()).square().sum()
    backward = threading.Thread(target=loss.backward)
    backward.start()
    backward.join()
    assert model.space.out.weight.grad is not None


def test_a_second_thread_is_told_so(ranks) -> None:
    ranks(two_threads, 2)
