"""Long loops over slices, and tiles of a picture: planned in time that grows with their number, and exact."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import dsp
from dsp.planner.loops import runs
from dsp.planner.sweep import Sweep
from tests.support.parity import assert_step_equal
from tests.support.slow import long


class Scan(nn.Module):
    """A selective scan as a loop over positions."""

    def __init__(self, dim: int = 6, states: int = 3) -> None:
        super().__init__()
        self.states, self.into, self.more = states, nn.Linear(dim, dim), nn.Linear(dim, dim + 2 * states)
        self.a, self.out = nn.Parameter(torch.randn(dim, states)), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        u = F.silu(self.into(x))
        step, b, c = self.more(u).split([u.shape[-1], self.states, self.states], -1)
        step = F.softplus(step)
        a, g = torch.exp(step[..., None] * -self.a.exp()), (step * u)[..., None] * b[:, :, None]
        h, made = torch.zeros_like(a[:, 0]), []
        for t in range(x.shape[1]):
            h = a[:, t] * h + g[:, t]
            made.append((h * c[:, t, None]).sum(-1))
        return x + self.out(torch.stack(made, 1))


def tiled(hw: tuple[int, int]) -> tuple[nn.Module, Tensor]:
    """A decoder of diffusers that works tile by tile, those at the edges smaller."""
    import diffusers

    class Decode(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.vae = diffusers.AutoencoderKL(
                block_out_channels=(4, 4, 4), norm_num_groups=2, sample_size=16,
                down_block_types=("DownEncoderBlock2D",) * 3, up_block_types=("UpDecoderBlock2D",) * 3,
            ).double()  # fmt: skip
            self.vae.enable_tiling()

        def forward(self, z: Tensor) -> Tensor:
            return self.vae.decode(z, return_dict=False)[0]

    return Decode().eval(), torch.randn(1, 4, *hw, dtype=torch.float64)


@pytest.fixture
def no_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sweep, "solve", lambda self: pytest.fail("a sweep takes a minute, and finds no better plan"))


def planned(length: int) -> dsp.Plan:
    """The plan of a scan, held to what it may send."""
    torch.manual_seed(0)
    plan = dsp.plan(Scan(), torch.randn(1, length, 6), size=2, stages={"": "x=b l c"}, gather_output=False)
    assert sum(plan.bytes.values()) < 3 * length * 6 * 4  # steps, u, b, c and the results, there and back
    assert len(plan.switches) <= 6  # before the loop and after it: none a step
    return plan


@pytest.mark.usefixtures("no_sweep")
def test_a_loop_is_switched_before_its_values_grow() -> None:
    planned(8)


@pytest.mark.slow
@pytest.mark.usefixtures("no_sweep")
def test_a_loop_is_planned_in_time_that_grows_with_its_steps() -> None:
    states = [dsp.planner.solve(planned(length).problem).states for length in (20, 40)]
    assert states[1] < 3 * states[0]


@pytest.mark.slow
@pytest.mark.usefixtures("no_sweep")
def test_tiles_that_are_alike_take_the_same_choices() -> None:
    model, z = tiled((7, 9))
    with torch.no_grad():
        plan = dsp.plan(model, z, size=2, stages={"": "z=b c h w"})
    same = runs(plan.problem)
    assert len(set(same)) < len(same) / 2
    assert plan.bytes["forward"] < 2 * 25_200  # in float64; what a sweep finds in a minute


@pytest.mark.parametrize(("what", "mesh"), [("scan", 2), long("scan", 3), long("tiles", 2)])
def test_they_are_exact(mesh: DeviceMesh, what: str) -> None:
    if what == "scan":
        single, x, stages = nn.Sequential(Scan(), Scan()).double(), torch.randn(2, 18, 6).double(), {"": "input=b l c"}
        assert_step_equal(single, dsp.parallelize(copy.deepcopy(single), mesh, stages), mesh, {"input": x})
        return
    single, z = tiled((7, 9))
    model = dsp.parallelize(copy.deepcopy(single), mesh, {"": "z=b c h w"})
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(model(z), single(z))
