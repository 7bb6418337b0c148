"""Models that would rather not be made parallel: each is exact, or refused in words that name the stage and the fix."""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

import dsp
from tests.support.parity import assert_parallel_equal, assert_step_equal, averaged
from tests.support.refusals import refused
from tests.support.slow import slow
from tests.support.toys import Along, Blocks, C, Core, Does, Fn, SpaceTime

# --- random numbers ---------------------------------------------------------------------------------------------------


class Dropout(Blocks):
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
            x = self.call(block, x, self.v)
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


# --- hooks on gradients ----------------------------------------------------------------------------------------------


def hooked(m: SpaceTime, x: Tensor) -> Tensor:
    """Hooks that are not linear, on sharded tensors and on replicated ones; one that compares with a tensor."""
    x.register_hook(lambda g: g.clamp(-0.2, 0.2))
    y = m.space(x)
    open_ = y.detach().sigmoid()
    y.register_hook(lambda g: g * open_ / g.norm() + g.mean(1, keepdim=True))
    means = y.mean((1, 2))
    means.register_hook(lambda g: g / g.norm())
    means.register_hook(lambda g: None)
    m.kept = y, means
    for t in m.kept:
        t.retain_grad()
    return m.time(checkpoint(lambda y: y.flip(1), y, use_reentrant=False)) + means[:, None, None]


def path(m: Any, x: Tensor) -> Tensor:
    """A sample is dropped as a whole."""
    return x * x.new_empty(len(x), 1).bernoulli_(0.5) if m.p else x * 2


def test_random_numbers_that_the_plan_did_not_foresee(mesh: DeviceMesh) -> None:
    """They are the same on every rank, whatever its seed, and again where a checkpoint computes them anew."""
    for ckpt in (False, True):
        does = (lambda m, x: checkpoint(path, m, x * m.w, use_reentrant=False) * x) if ckpt else path
        model = dsp.parallelize(Does(does, p=0, w=nn.Parameter(torch.ones(6).double())), mesh, {"": "x=b t"})
        x = torch.ones(16, 6).double()
        model(x)
        torch.manual_seed(mesh.get_local_rank())
        for model.p in (1, 1, 1):
            model.w.grad = None
            y = model(x)
            assert (y == y[:, :1]).all()
            assert 0 < y.sum() < y.numel()
            if ckpt:
                y.sum().backward()
                torch.testing.assert_close(averaged(model, mesh)["w"], y.detach().sum(0))


class Drops(nn.Module):
    """Dropout in a stage that is sharded, and in one that is whole."""

    stages = {"": "x=[b] t", "own": "b t", "all": "[b] [k]"}

    def __init__(self) -> None:
        super().__init__()
        self.own, self.all = nn.Dropout(0.5), nn.Dropout(0.5)

    def forward(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return self.own(x), x * self.all(v)


@pytest.mark.parametrize("off", ["eval", "p"])
def test_dropouts_that_begin_to_drop(mesh: DeviceMesh, off: str) -> None:
    model, x, v = dsp.parallelize(Drops(), mesh), torch.ones(32, 6), torch.ones(32, 1)
    for drop in (model.own, model.all):
        drop.train(off == "p").p = 0.0 if off == "p" else 0.5
    model(x, v)
    for drop in (model.own, model.all):
        drop.train().p = 0.5
    for same_seeds in (True, False, True):
        torch.manual_seed(0 if same_seeds else mesh.get_local_rank())
        y, z = model(x, v)
        assert not torch.equal(y[:, :3], y[:, 3:]), "two ranks drew one mask"
        assert (z == z[:, :1]).all(), "two ranks drew two masks"


class Rate(nn.Module):
    """Dropout at a rate that is no module's, so that nothing shows when it rises."""

    p = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.p)


def test_a_rate_of_the_users_own_that_rises_from_zero(mesh: DeviceMesh) -> None:
    """It is found in the calls in which the ranks compare their weights, or at once; the call after it has another
    plan."""
    found = 4  # the call after the one that finds it
    model = Drops()
    model.own, model.all = Rate(), Rate()
    model, x, v = dsp.parallelize(model, mesh), torch.ones(32, 6), torch.ones(32, 1)
    for call in range(1, 12):
        model.own.p = model.all.p = 0.0 if call < 3 else 0.5
        torch.manual_seed(0 if call < found else mesh.get_local_rank())
        y, z = model(x, v)
        drawn_alike = torch.equal(y[:, :3], y[:, 3:])
        assert drawn_alike == (call < found), call
        assert (z == z[:, :1]).all(), "two ranks drew two masks"


@pytest.mark.parametrize("mesh", [3])
def test_a_hook_on_a_gradient_sees_that_of_one_process(mesh: DeviceMesh) -> None:
    single = SpaceTime(hooked).double()
    model = dsp.parallelize(copy.deepcopy(single), mesh)
    assert_step_equal(single, model, mesh, (torch.randn(1, 7, 5, C, dtype=torch.float64, requires_grad=True),))
    for found, expected in zip(model.kept, single.kept):
        torch.testing.assert_close(dsp.gather(found.grad), expected.grad)


def test_a_hook_of_a_module_may_look_at_gradients_alone(mesh: DeviceMesh) -> None:
    model, x = SpaceTime(lambda m, x: m.time(m.space(x))), torch.randn(1, 6, 5, C)
    seen = list[Any]()
    dsp.parallelize(model, mesh).time.register_full_backward_hook(lambda m, *gradients: seen.append(gradients))
    model(x).sum().backward()
    assert seen
    model.space.register_full_backward_pre_hook(lambda m, gradients: gradients)
    with pytest.raises(
        RuntimeError, match=r"a backward hook on Along returned gradients: expected None.* y.register_hook"
    ):
        model(x).sum().backward()


# --- functions of autograd --------------------------------------------------------------------------------------------


class Surrogate(torch.autograd.Function):
    """A step forward and something smooth backward, of what is saved: of arguments and of results."""

    @staticmethod
    def forward(x: Tensor, steps: float) -> tuple[Tensor, Tensor]:
        return (x * steps).round(), x.cumsum(1).tanh()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.steps = inputs[1]
        ctx.save_for_backward(inputs[0], output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, sums: Tensor) -> tuple[Tensor, None]:
        x, y = ctx.saved_tensors
        assert ctx.needs_input_grad == (True, False)
        after = (sums * (1 - y * y)).flip(1).cumsum(1).flip(1)
        return ctx.steps * grad * (x.abs() < 1) + after / after.norm(), None


class Scaled(torch.autograd.Function):
    """A weight for all positions, whose gradient is a sum over them, and a centred one of the positions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return (grad - grad.mean((1, 2), keepdim=True)) * w, (grad * x).sum((0, 1, 2))


class Normed(torch.autograd.Function):
    """A backward that is not linear in the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad / (grad.norm() + 0.1) + x * 1e-2


class ByAnotherName(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def vjp(ctx: Any, grad: Tensor) -> Tensor:
        return grad / (grad.norm() + 0.1)


class InOneList(Normed):
    boxed_grads_call = torch.__version__ >= (2, 13)  # before, torch does not know it

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        return Normed.backward(ctx, grads[0].pop() if InOneList.boxed_grads_call else grads[0])


class Inherits(Normed):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return Normed.backward(ctx, grad) * 2


normed = Normed.apply  # bound before any forward, as torch's own examples have it
FUNCTIONS = {
    "many": lambda m, x: m.time(checkpoint(m.glue, m.space(x), use_reentrant=False)) + m.glue(x),
    "bound before": lambda m, x: m.time(normed(m.space(x))),
    "of replicated tensors": lambda m, x: m.time(m.space(x)) * normed(m.w * 2),
    "by vjp": lambda m, x: m.time(ByAnotherName.apply(m.space(x))),
    "behind a stage, in a checkpoint": lambda m, x: m.time(
        checkpoint(lambda x: normed(m.written_out(m.space(x))), x, use_reentrant=False)
    ),
    "in one list": lambda m, x: m.time(InOneList.apply(m.space(x))),
    "inherited": lambda m, x: m.time(Inherits.apply(m.space(x)) + Normed.apply(m.space(x))),
}
if torch.__version__ >= (2, 13):  # before, torch takes none
    FUNCTIONS["of named arguments"] = lambda m, x: m.time(Surrogate.apply(x=m.space(x), steps=4.0)[1])


class Applies(SpaceTime):
    stages = {**SpaceTime.stages, "written_out": "b t s c"}

    def __init__(self, forward: Any) -> None:
        super().__init__(forward, written_out=nn.PReLU())
        self.w = nn.Parameter(torch.randn(C))

    def glue(self, x: Tensor) -> Tensor:
        y, z = Surrogate.apply(x, 4.0)
        return Scaled.apply(y + z, self.w * self.w)


@pytest.mark.parametrize("mesh", [2, 3])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_of_autograd_is_refused_between_stages(mesh: DeviceMesh, name: str) -> None:
    x = torch.randn(2, 7, 5, C, dtype=torch.float64, requires_grad=True)
    model = dsp.parallelize(Applies(FUNCTIONS[name]).double(), mesh)
    refused(r"the autograd.Function \w+ between stages.*name that in stages", model, x, error=dsp.GlueError)


def test_written_out_operations_in_a_forward_in_pieces(mesh: DeviceMesh) -> None:
    """An operation of torch that is written out between stages enters the mode of the forward anew."""
    single = SpaceTime(lambda m, x: m.time(m.space(x) * F.cosine_similarity(m.space(x), x, -1)[..., None])).double()
    model = dsp.parallelize(copy.deepcopy(single), mesh, overlap=2)
    assert_step_equal(single, model, mesh, (torch.randn(2, 8, 8, C, dtype=torch.float64),), rounds=2)


class Again(torch.autograd.Function):
    """It computes again what has weights, as reversible networks do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stage: nn.Module) -> Tensor:
        ctx.x, ctx.stage = x.detach(), stage
        return stage(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        with torch.enable_grad():
            x = ctx.x.requires_grad_()
            torch.autograd.backward(ctx.stage(x), grad)
        return x.grad, None


def test_a_function_of_autograd_that_begins_a_backward_is_refused(mesh: DeviceMesh) -> None:
    model = dsp.parallelize(SpaceTime(lambda m, x: m.time(Again.apply(m.space(x), m.time))), mesh)
    with pytest.raises(dsp.GlueError, match=r"the autograd\.Function Again"):
        model(torch.randn(1, 6, 5, C)).sum().backward()


def foreach(name: str) -> Any:
    """A function of lists of tensors, public since torch 2.15."""
    return getattr(getattr(torch, "foreach", None), name, None) or getattr(torch, f"_foreach_{name}")


def of_torchscript(f: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is old
        return torch.jit.script(f)


def shares(x: Tensor) -> Tensor:
    return x / x.abs().mean(1, keepdim=True)


@pytest.mark.parametrize(
    "f", [shares, nn.Sequential(nn.Linear(4, 4), nn.Softmax(1)).double()], ids=["function", "module"]
)
def test_torchscript_runs_on_full_tensors(mesh: DeviceMesh, f: Any) -> None:
    compiled = of_torchscript(f)
    model = dsp.parallelize(
        Does(lambda m, x: compiled(x * m.w) * x, w=nn.Parameter(torch.ones(4).double())), mesh, {"": "x=b t c"}
    )
    if not isinstance(f, nn.Module):  # torch shows calls of scripted modules, and not those of functions
        refused("called by TorchScript.*name that in stages", model, torch.randn(2, 7, 4).double(), error=dsp.GlueError)
        return
    for _ in range(3):
        x = torch.randn(2, 7, 4).double().requires_grad_()
        out = model(x)
        torch.testing.assert_close(out, f(x) * x)
        expect = torch.autograd.grad((f(x) * x).square().sum(), x)
        torch.testing.assert_close(torch.autograd.grad(out.square().sum(), x), expect)


def test_a_traced_module_has_one_name_on_all_ranks(mesh: DeviceMesh) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is old
        traced = torch.jit.trace(nn.Softmax(1), torch.ones(1, 7, 4).double())
    model = dsp.parallelize(Does(lambda m, x: traced(x) * x), mesh, {"": "x=b t c"})
    x = torch.randn(2, 7, 4).double()
    torch.testing.assert_close(model(x), x.softmax(1) * x)


def test_an_overload_of_an_op_is_an_operation(mesh: DeviceMesh) -> None:
    """It would run on a rank's part of the tensor as if that were the full tensor."""
    op = torch.ops.aten.cumsum.default
    x = torch.randn(2, 6, 5, C, dtype=torch.float64)
    assert_parallel_equal(
        SpaceTime(lambda m, x: m.time(op(m.space(x), 1) + op(m.space(x), 2))).double(), mesh, (x,), rounds=2
    )


def test_a_sharded_tensor_that_leaves_in_an_object(mesh: DeviceMesh) -> None:
    """Its gradient is right by full_tensor(), and refused by any other way out."""
    single = Does(lambda m, x: setattr(m, "kept", x * m.w) or x.mean(), w=nn.Parameter(torch.rand(4).double()))
    model, x = dsp.parallelize(copy.deepcopy(single), mesh, {"": "x=b t c"}), torch.rand(2, 7, 4).double()
    single(x), single.kept.square().mean().backward()
    model(x), model.kept.full_tensor().square().mean().backward()
    torch.testing.assert_close(averaged(model, mesh)["w"], single.w.grad)
    model(x)
    with pytest.raises(RuntimeError, match="this backward would give wrong gradients"):
        model.kept.square().mean().backward()


def test_functions_of_lists_are_not_those_of_one_tensor(mesh: DeviceMesh) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        parts = [m.space(x), m.space(x * 2)[:, :4]]
        sums = foreach("add")(parts, [parts[1][:, :1], parts[0][:, 1:2]])
        return m.time(x) * sums[1].mean() + foreach("norm")(sums)[0]

    x = torch.randn(2, 7, 5, C, dtype=torch.float64)
    assert_parallel_equal(SpaceTime(forward).double(), mesh, (x,), rounds=2)
    single = SpaceTime(lambda m, x: foreach("mul_")([m.space(x)], [2.0])).double()
    assert_parallel_equal(single, mesh, (x,), rounds=2)


class Gathers(nn.Module):
    """A stage with a collective inside that fails, as where the connection to another rank breaks."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            torch.distributed.all_gather([torch.empty(3)], x.new_zeros(1))
        return x


def test_a_collective_that_fails_inside_a_stage_is_no_fault_of_its_pattern(mesh: DeviceMesh) -> None:
    model = dsp.parallelize(SpaceTime(lambda m, x: m.time(m.space(x)), space=Gathers()), mesh).eval()
    x = torch.randn(1, 6, 5, C)
    with torch.no_grad():
        model(x)
        model.space.training = True
        with pytest.raises((RuntimeError, ValueError)) as raised:
            model(x)
    assert not isinstance(raised.value, dsp.NotationError)


# --- refused ----------------------------------------------------------------------------------------------------------


class Small(SpaceTime):
    """Attention over positions, then over frames, with whatever a test puts in their place."""

    def __init__(self, space: nn.Module | None = None, glue: Any = lambda x: x, first: Any = lambda x: x) -> None:
        super().__init__(lambda m, x: m.time(glue(m.space(first(x)))), space=space or Along(2))


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Along(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Inside(Small):
    stages = {**Small.stages, "space.inner": "b t [s c]"}


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


def adds(x: Tensor) -> Tensor:
    return x.add_(1)


def counts(x: Tensor) -> tuple[Tensor, int]:
    return x, x.shape[1]


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


def set_data(x: Tensor) -> Tensor:
    x.data = x.detach() * 2
    return x


LATE = ["wrote in place into a copy", "was switched or gathered", "out-of-place"]

# model -> what the error says
REFUSED: dict[str, tuple[Any, list[str]]] = {
    "a stage inside a stage": (
        lambda: Inside(Inner()),
        ["stage 'space.inner' lies inside stage 'space'", "Remove one of the two from stages"],
    ),
    "a batch norm inside a stage": (
        lambda: Small(NormInside()),
        ["stage 'space'", "'norm' is a BatchNorm2d in training", "not independent along t", "Put t in brackets"],
    ),
    "a stage that returns a size": (
        lambda: Small(Fn(counts), by_count),
        ["stage 'space' returned", "depends on the length of 't'", "Put [t] in brackets"],
    ),
    "a write into the model's own input": (
        lambda: Small(first=lambda x: x.mul_(2)),
        ["mul() between stages writes in place into the model's own input 'x'", "out-of-place"],
    ),
    "a stage that writes into the model's own input": (
        lambda: Small(Fn(adds)), ["stage 'space' writes in place into the model's own input 'x'", "out-of-place"],
    ),
    "a stage that writes into its part of a whole tensor": (
        lambda: Small(Fn(adds), first=lambda x: x.new_ones(x.shape) * 2),
        ["stage 'space' writes in place into this rank's part of a replicated tensor", "out-of-place"],
    ),
    "a stage whose input is needed as it was in another layout": (
        lambda: UsedAgain(Fn(adds)), ["stage 'space'", *LATE],
    ),
    "a view of what was switched and written": (lambda: Small(glue=viewed_and_written), LATE),
    "what a copy was made of, for a view": (lambda: Small(glue=torn_and_written), ["mul() between stages", *LATE]),
    "a stretch whose source was written since": (lambda: Small(glue=shifted_and_written), LATE),
    "an element written in place": (lambda: Small(glue=element_written), LATE),
    "dims that change places in place": (lambda: Small(glue=lambda x: x.transpose_(1, 2)), ["y = y.transpose(...)"]),
    "detached in place": (lambda: Small(glue=lambda x: x.detach_()), ["y = y.detach(...)"]),
    "data that are set": (lambda: Small(glue=set_data), ["setting Tensor.data", "do it in a stage"]),
}  # fmt: skip


EXACT = {
    "a stage that writes into its part of a whole tensor",
    "a stage whose input is needed as it was in another layout",
}


@pytest.mark.parametrize("mesh", [2, slow(3)])
def test_refused_by_name(mesh: DeviceMesh) -> None:
    for name, (build, says) in REFUSED.items():
        if name in EXACT:
            single, x = build().double(), torch.randn(1, 6, 5, C).double()
            model = dsp.parallelize(copy.deepcopy(single), mesh)
            with torch.no_grad():
                for _ in range(2):
                    torch.testing.assert_close(model(x), single(x))
            continue
        if name == "what a copy was made of, for a view" and mesh.size() == 3:  # there no copy is made
            continue
        model, x = build(), torch.randn(1, 6, 5, C)
        untouched = x.clone()
        with pytest.raises((dsp.GlueError, dsp.NotationError)) as caught:
            dsp.parallelize(model, mesh)
            model(x)
        for part in says:
            assert part in str(caught.value), f"{name}: {caught.value}"
        assert name.startswith(("a write", "a stage that writes")) or torch.equal(x, untouched)


def test_a_table_read_by_own_frames_is_found_by_check(mesh: DeviceMesh) -> None:
    report = dsp.check(Small(OwnFrames()), (torch.randn(1, 6, 5, C),), mesh=mesh, stages=SpaceTime.stages)
    assert "stage 'space' is not independent along 't'" in report.problems[0]


# --- no help ----------------------------------------------------------------------------------------------------------


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
    plan = dsp.plan(OneSequence(), x[:1], size=2, stages=ONE_SEQUENCE, gather_output=False)
    assert "DSP does not help this model" in plan.text()
    assert "whole on every rank, and no memory is saved" in plan.text()
    assert "along its heads" in plan.advice
    assert plan.bytes["forward"] == 0
    plan = dsp.plan(OneSequence(), x, size=2, stages=ONE_SEQUENCE, gather_output=False)
    assert "its part of the batch, as data parallelism would" in plan.advice
    # elsewhere sharded, for this gathered each time: M (N-1)/N bytes a rank
    mixed = {"": "x=b s c", "blocks.*.qkv": "b s [c] -> b s [d]", "blocks.*.core": "b h [s d], b h [s d], b h [s d]"}
    mixed["blocks.*.core"] = "[b h s d], [b h s d], [b h s d] -> [b h s d]"
    plan = dsp.plan(OneSequence(), x[:1], size=2, stages=mixed, gather_output=False)
    assert "2 stage calls run whole on every rank" in plan.advice
    assert "gathered for that" in plan.advice
    short = dsp.plan(SpaceTime(lambda m, x: m.time(m.space(x))), torch.randn(1, 1, 1, C), size=2, gather_output=False)
    assert "DSP does not help at these sizes, because t, s cannot be sharded" in short.advice
    assert "give longer inputs" in short.advice
    # the heads apart: two switches a block, as Ulysses does, and nothing to say
    apart = {"": "x=b s c", "blocks.*.core": "b h [s d], b h [s d], b h [s d] -> b h [s d]"}
    plan = dsp.plan(OneSequence(), x[:1], size=2, stages=apart, gather_output=False)
    assert {r.layout for r in plan.stages if r.pattern} == {"h"}
    assert plan.advice == ""


@pytest.mark.parametrize("mesh", [2, 3])
def test_heads_as_a_dim_are_exact(mesh: DeviceMesh) -> None:
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


@pytest.mark.parametrize("mesh", [3])
def test_a_run_that_left_its_plan_is_exact_where_a_rank_holds_no_head(mesh: DeviceMesh) -> None:
    """And the next one, which is recorded, begins as sharded as it did."""
    inputs = (torch.randn(1, 9, C, dtype=torch.float64, requires_grad=True),)
    _, second, third = assert_parallel_equal(OtherWay().double(), mesh, inputs, {"": "x=b n c"}, rounds=3, count=True)
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
            inputs = (torch.randn(1, n, C, dtype=torch.float64, requires_grad=True),)
            assert_parallel_equal(LastRows().double(), mesh, inputs, {"": "x=b n c"}, rounds=2)


@pytest.mark.parametrize("kind", [{"scale_grad_by_freq": True}, {"max_norm": 0.5}])
def test_an_embedding_that_depends_on_all_its_places(mesh: DeviceMesh, kind: dict[str, Any]) -> None:
    """Gradients by how often a row is read, and rows whose norm is cut once they are read."""
    single = Does(lambda m, x: m.table(x).tanh() * m.table.weight.sum(), table=nn.Embedding(5, C, **kind)).double()
    model, x = dsp.parallelize(copy.deepcopy(single), mesh, {"": "x=b s"}), torch.tensor([[0, 1, 1, 3, 1, 0, 2]])
    assert_step_equal(single, model, mesh, (x,), rounds=2)
    assert torch.equal(model.table.weight, single.table.weight)


ONE_SEQUENCE = {"": "x=b s c", "blocks.*": "b [s c]"}


@pytest.mark.parametrize(
    ("forgotten", "says"),
    [("seed", "hold different weights: blocks.0.qkv.weight, blocks.0.qkv.bias"), ("average", "average gradients")],
)
def test_ranks_whose_weights_differ_are_told_so(mesh: DeviceMesh, forgotten: str, says: str) -> None:
    torch.manual_seed(mesh.get_local_rank() if forgotten == "seed" else 0)
    model = OneSequence()
    torch.manual_seed(0)
    x = torch.randn(2, 7, C)
    dsp.parallelize(model, mesh, ONE_SEQUENCE)
    with pytest.raises(RuntimeError, match=says):
        model(x)
        model(x).square().mean().backward()
        torch.optim.SGD(model.parameters(), lr=0.1 * (1 + mesh.get_local_rank())).step()  # gradients of its own
        model.eval()(x)  # the third call, which compares no weights but for its new signature


@pytest.mark.parametrize(
    ("calls", "how", "raised"), [(1, "", 2), (2, "", 4), (9, "", 12), (3, "parts", 4), (1, "cut", 0)]
)
def test_weights_that_drift_apart_are_named_within_twice_as_many_calls(
    mesh: DeviceMesh, calls: int, how: str, raised: int
) -> None:
    """Inputs have one shape, and weights differ after `calls` of them."""
    model, x = OneSequence(), torch.randn(2, 7, C)
    if how == "parts":  # as FSDP over other ranks leaves them: of a mesh that none of the others is in
        own = DeviceMesh("cpu", torch.arange(mesh.size())[:, None], mesh_dim_names=("dp", "sp"))["sp"]
        held = DTensor.from_local(model.blocks[0].qkv.weight.detach().clone(), own, [Shard(0)])
        model.register_parameter("parts", nn.Parameter(held))
    if how == "cut":
        own = DTensor.from_local(torch.full((2, 2), float(mesh.get_local_rank())), mesh, [Shard(0)])
        model.register_parameter("cut", nn.Parameter(own))
    dsp.parallelize(model, mesh, ONE_SEQUENCE)
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("dsp.guard.agreement.EVERY", 12)
        for call in range(1, raised or 20):
            model(x)
            if call == calls and how != "cut":
                odd = model.parts.to_local() if how == "parts" else model.blocks[1].qkv.bias
                odd[0] += 1e-6 * mesh.get_local_rank()
        if raised:
            name = "parts" if how == "parts" else "blocks.1.qkv.bias"
            with pytest.raises(RuntimeError, match=f"hold different weights: {name}. Build the model from one seed"):
                model(x)


class OneWay(OneSequence):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x.flip(1) if torch.distributed.get_rank() else x * 2


def test_ranks_that_go_different_ways_are_told_so(mesh: DeviceMesh) -> None:
    model = dsp.parallelize(OneWay(), mesh, ONE_SEQUENCE)
    with pytest.raises(RuntimeError, match="made different plans for the same inputs"):
        model(torch.randn(2, 7, C))
