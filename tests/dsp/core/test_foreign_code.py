"""Code of other libraries between stages: what it asks of a tensor's class."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import dsp
from dsp.core.torch_traits import in_place, op_name
from dsp.glue.rules import RULES
from dsp.glue.rules.call import rule
from dsp.glue.rules.elementwise import elementwise
from tests.support.parity import assert_parallel_equal, assert_step_equal
from tests.support.slow import slow
from tests.support.toys import Along, C, SpaceTime

aten = torch.ops.aten


def by_library(m: Any, x: Tensor) -> Tensor:
    """Chooses by the module of a tensor's class, as opt_einsum does."""
    library = type(m.space(x)).__module__.partition(".")[0]
    return {"torch": torch.sin}[library](m.time(x))


def test_a_tensor_between_stages_is_of_torch(mesh: DeviceMesh) -> None:
    assert_parallel_equal(
        SpaceTime(by_library).double(), mesh, (torch.randn(2, 7, 5, C, dtype=torch.float64),), rounds=2
    )


class Captured(nn.Module):
    """A hook keeps the output of a module between stages; the forward returns it, as transformers returns attentions,
    or reads it."""

    stages = {"": "x=b t s c", "space": "b t [s c]", "time": "b [t] s [c]"}

    def __init__(self, read: bool) -> None:
        super().__init__()
        self.space, self.time, self.norm, self.read = Along(2), Along(1), nn.LayerNorm(C), read
        outputs = list[Tensor]()
        self.norm.register_forward_hook(lambda module, args, out: outputs.append(out))
        self.capture = outputs.pop

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.time(self.norm(self.space(x)))
        kept = self.capture()
        return y, kept * 2 if self.read else kept


@pytest.mark.parametrize("mesh", [2, 3])
def test_an_output_that_a_hook_kept_is_whole(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    single = Captured(read=False).double()
    torch.manual_seed(0)
    model = dsp.parallelize(Captured(read=False).double(), mesh)
    assert_step_equal(single, model, mesh, (torch.randn(2, 5, 7, C, dtype=torch.float64),), rounds=3)


def test_a_forward_that_reads_what_a_hook_kept_is_refused(mesh: DeviceMesh) -> None:
    model = dsp.parallelize(Captured(read=True), mesh)
    with pytest.raises(dsp.GlueError, match=r"output 2 of the forward .* which a hook kept"):
        model(torch.randn(2, 4, 6, C))


@torch.library.custom_op("dsp_test_foreign::wave", mutates_args=())
def wave(x: Tensor, w: Tensor) -> Tensor:
    return x.sin() * w


@wave.register_fake
def like(x: Tensor, w: Tensor) -> Tensor:
    return torch.empty_like(x)


def keep(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def adjoint(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    x, w = ctx.saved_tensors
    return grad * w * x.cos(), (grad * x.sin()).sum_to_size(w.shape)


wave.register_autograd(adjoint, setup_context=keep)
WAVE = "dsp_test_foreign::wave"


def waves(m: Any, x: Tensor) -> Tensor:
    return m.time(wave(m.space(x), m.w))  # type: ignore[no-any-return]


@pytest.mark.parametrize("ruled", [False, True])
@pytest.mark.parametrize("mesh", [2, 3])
def test_the_backward_of_a_custom_op_gets_parts_as_its_forward(mesh: DeviceMesh, ruled: bool) -> None:
    """Not what carries the full shape: numbers of that would not match this rank's part of the gradient."""
    x = torch.randn(2, 7, 5, C, dtype=torch.float64)
    model = SpaceTime(waves, w=nn.Parameter(torch.linspace(0.5, 2, C))).double()
    if ruled:
        rule(WAVE)(elementwise)
    try:
        nodes = dsp.plan(model, x, size=mesh.size()).record.nodes
        assert [any(node.offer.needs) for node in nodes if node.name == WAVE] == [ruled]
        assert_parallel_equal(model, mesh, (x,), rounds=3)
    finally:
        RULES.pop(WAVE, None)


def test_an_op_has_the_name_of_what_calls_it_or_that_of_its_library() -> None:
    """By which no rule of another function of this name is taken for its own."""
    assert op_name(torch.ops.dsp_test_foreign.wave.default) == (WAVE, False)
    assert op_name(aten.cumsum.default) == op_name(aten.cumsum) == ("cumsum", False)
    assert op_name(aten.batch_norm) == op_name(torch.batch_norm) != op_name(F.batch_norm)
    assert op_name(aten.mse_loss.default) == ("aten::mse_loss", False) != op_name(F.mse_loss)
    assert in_place(aten.add_.Tensor)


def normed(m: Any, x: Tensor) -> Tensor:
    """The op takes the weight where `F.batch_norm` takes the running mean."""
    y = aten.batch_norm(m.space(x).movedim(-1, 1), m.w, m.w / 2, None, None, True, 0.1, 1e-5, False)
    return m.time(y.movedim(1, -1))


def embedded(m: Any, x: Tensor) -> Tensor:
    """The op takes the table first."""
    y = m.space(x)
    return m.time(y + aten.embedding(m.w.diag(), (2 * y.sum(-1)).long().clamp(0, C - 1)))


def compared(m: Any, x: Tensor) -> Tensor:
    """The op takes a number for the reduction, where `F.mse_loss` takes whether to average."""
    y = m.space(x)
    return m.time(y + aten.mse_loss(y, y * 2, 2) + aten.mse_loss.default(y, y.cos(), 0))


def accumulated(m: Any, x: Tensor) -> Tensor:
    y = m.space(x) * 1
    aten.mul_(aten.add_.Tensor(y, aten.cumsum.default(y, 1)), m.w)
    return m.time(y + aten.sum.dim_IntList(y, [2], True) + aten._softmax.default(y, 1, False))


@pytest.mark.parametrize("mesh", [2, slow(3)])
@pytest.mark.parametrize("does", [normed, embedded, compared, accumulated])
def test_ops_of_torch_called_by_name(mesh: DeviceMesh, does: Any) -> None:
    model = SpaceTime(does, w=nn.Parameter(torch.linspace(0.5, 2, C))).double()
    assert_parallel_equal(model, mesh, (torch.randn(2, 5, 7, C, dtype=torch.float64),))
