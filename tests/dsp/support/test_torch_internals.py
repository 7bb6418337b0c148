"""The parts of torch that are not public still are what dsp takes them for: a case is named after what would break."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import get_ident
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import dsp
import dsp.comm.collectives  # its ops
from dsp.support import private
from tests.support.paths import ROOT
from tests.support.slow import slow

# ------------------------------------------------------------------------------------------------------ in one process


def checkpoint_frame() -> None:
    """Found where a checkpoint runs its region, and what it runs again in backward can be replaced. Else not found."""
    frames: list[Any] = []
    again: list[str] = []
    compared: list[Any] = []

    @contextmanager
    def around(key: str) -> Iterator[None]:
        again.append(key)
        yield

    def region(x: Tensor) -> Tensor:
        frames.append(private.checkpoint_frame())
        if len(frames) == 1:
            assert [a is b for a, b in zip(private.checkpoint_arguments(frames[0]), (x,), strict=True)] == [True]
            for key in ("one", "two"):
                assert key not in private.Recompute.keys(frames[0])
                private.Recompute(frames[0], key, partial(around, key))
            private.compared_as(frames[0], lambda x: compared.append(x.shape) or x)  # type: ignore[func-returns-value]
            assert "one" in private.Recompute.keys(frames[0])
        return x.sin().exp()

    x = torch.ones(3, requires_grad=True)
    assert private.checkpoint_frame() is None
    y = checkpoint(region, x, use_reentrant=False)
    assert private.checkpoint_frame() is None
    y.sum().backward()
    assert again == ["two", "one"], "what a checkpoint recomputes with is no longer frame.recompute_fn"
    assert compared == [(3,)] * 4, "what is kept and what is made again are compared by other than frame.metadata_fn"
    assert frames[0] is not None
    assert frames[1] is None, "a recomputation looks like a first run"
    with torch.autograd.graph.save_on_cpu():
        assert private.checkpoint_frame() is None


def checkpoint_frames() -> None:
    """A checkpoint inside another one has two, which count what each saves; the outer one saves the inner's input."""
    seen: list[list[tuple[Any, int]]] = []

    def note() -> None:
        seen.append([(frame, private.saved_in(frame)) for frame in private.checkpoint_frames()])

    def inner(x: Tensor) -> Tensor:
        note()
        return x.exp()

    def outer(x: Tensor) -> Tensor:
        note()
        y = checkpoint(inner, x.sin(), use_reentrant=False)
        note()
        return y

    checkpoint(outer, torch.ones(3, requires_grad=True), use_reentrant=False)
    first, within, after = seen
    assert [len(frames) for frames in seen] == [1, 2, 1]
    assert within[0][0] is first[0][0]
    saved, inside = (count for _, count in within)
    assert (saved >= 2, inside) == (True, 0), "the sine's input, and the inner checkpoint's; torch 2.11 saves one more"
    assert [count for _, count in (*first, *after)] == [0, saved]
    assert private.saved_in(within[1][0]) == 1
    assert not private.checkpoint_frames()


def unknown_checkpoints() -> None:
    def pack(x: Tensor) -> Tensor:
        return x

    pack.__module__ = "torch.utils.checkpoint"
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, pack),
        pytest.raises(RuntimeError, match="in a way that dsp does not know"),
    ):
        private.checkpoint_frame()


class Noting(torch.autograd.Function):
    seen: tuple[int, str] = (-1, "")

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        Noting.seen = private.backward_pass(), private.backward_node()
        return grad


def functions() -> None:
    """A `ctx` is made by its class for each application of a function, also where it was bound before; backward is
    that of the class that it has then."""
    bound, seen = Noting.apply, list[Any]()
    other = type("Noting", (Noting,), {"backward": staticmethod(lambda ctx, *gradients: seen.append("backward"))})

    def init(ctx: Any) -> None:
        seen.append(private.function_of(ctx))
        ctx.__class__ = private.context_of(other)

    private.CONTEXT.__init__ = init
    try:
        out = bound(torch.ones(1, requires_grad=True))
    finally:
        del private.CONTEXT.__init__
    out.backward()
    assert seen == [Noting, "backward"]


def compiling() -> None:
    """Compiled calls in a region where the compiler is put aside, under a mode that sees ops; and flex_attention."""
    from torch.nn.attention import flex_attention

    double, seen = torch.compile(lambda x: x * 2, backend="eager", fullgraph=True), list[bool]()
    assert private.compiler_loaded()
    with torch.compiler.set_stance("force_eager"), dsp.count_comm(), private.compiling(9):
        torch.compile(lambda x: seen.append(torch.compiler.is_dynamo_compiling()) or x, backend="eager")(torch.ones(1))
        assert torch.equal(double(torch.ones(2)), torch.full((2,), 2.0))
    assert True in seen, "nothing is compiled where the stance is the default one again"
    named = torch.compile(lambda: [f.__qualname__ for f in private.compiled_callers()], backend="eager")
    with torch.compiler.set_stance("force_eager"):
        assert named() == ["compiling.<locals>.<lambda>"]
    assert not [*private.compiled_callers()]
    q, refuses = torch.ones(1, 1, 2, 2, requires_grad=True), flex_attention._validate_device
    with private.any_device():
        flex_attention._validate_device(q, q, q)
    assert flex_attention._validate_device is refuses
    with pytest.raises(NotImplementedError, match="backward on CPU"):
        refuses(q, q, q)


def backward_pass() -> None:
    x = torch.ones(3, requires_grad=True)
    assert private.backward_pass() == -1
    passes = []
    for _ in range(2):
        Noting.apply(x).sum().backward()
        passes.append(Noting.seen[0])
    assert -1 not in passes
    assert passes[0] != passes[1]
    assert private.backward_pass() == -1


def after_backward() -> None:
    """Called once every gradient is there, in the thread that called backward, if there is no other."""
    x, seen = torch.ones(3, requires_grad=True), list[Any]()
    y = x * 2
    y.register_hook(lambda grad: private.after_backward(lambda: seen.append((x.grad is not None, get_ident()))))
    with ThreadPoolExecutor(1) as thread:
        ident = thread.submit(lambda: (y.sum().backward(), get_ident())[1]).result()
    assert seen == [(True, ident)]
    with pytest.raises(RuntimeError, match="backward"):
        private.after_backward(lambda: None)


def backward_node() -> None:
    assert private.backward_node() == ""
    Noting.apply(torch.ones(3, requires_grad=True)).sum().backward()
    assert Noting.seen[1] == "NotingBackward"


def leaf() -> None:
    (node, _), *_ = (torch.ones(3, requires_grad=True) * 2).grad_fn.next_functions
    assert node.name() == private.LEAF


def passing() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    for made in (x.clone(), x.double(), torch.ops.aten.alias(x)):
        assert made.grad_fn.name() in private.PASSING


def fake_tensors() -> None:
    with private.FakeTensorMode() as mode:
        x = mode.from_tensor(torch.ones(2, 3)) @ torch.ones(3, 4)
    assert (tuple(x.shape), x.dtype, x.device) == ((2, 4), torch.float32, torch.device("cpu"))
    assert type(x) is not Tensor
    for like in (torch.ones(2, 3), nn.Parameter(torch.ones(2, 3)), torch.ones(2, device="meta"), torch.arange(3)):
        new = private.fake_tensor(mode, like, like.dtype)
        with mode:
            made = torch.empty(like.shape, dtype=like.dtype)
            made = nn.Parameter(made) if like.requires_grad else made
        for what in ("shape", "dtype", "device", "requires_grad", "is_leaf"):
            assert getattr(new, what) == getattr(made, what), what
        assert (type(new), new.stride()) == (type(made), made.stride())
        assert isinstance(new, nn.Parameter) == isinstance(like, nn.Parameter)
    with mode, pytest.raises(private.DataDependentOutputException):
        bool(x.sum() > 0)
    with mode, pytest.raises(private.DynamicOutputShapeException):
        x.nonzero()


def dispatch_mode() -> None:
    class Seen(private.TorchDispatchMode):
        ops: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.ops.append(func._schema.name)
            assert private.below_autograd()
            return func(*args, **(kwargs or {}))

    with Seen() as seen:
        nn.Linear(3, 3)(torch.ones(2, 3))
    assert "aten::addmm" in seen.ops
    assert not private.below_autograd()
    assert isinstance(torch.ops.aten.addmm.default, private.OpOverload)
    assert isinstance(torch.ops.aten.addmm, private.OpOverloadPacket)
    assert str(torch.ops.aten.addmm) == "aten.addmm"
    assert torch.ops.dsp.switch.default.namespace == "dsp"


def function_modes() -> None:
    class Seen(TorchFunctionMode):
        calls = 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls += 1
            return func(*args, **(kwargs or {}))

    with Seen() as mode:
        assert private._get_current_function_mode() is mode
        assert private._get_current_function_mode_stack()[-1] is mode
        private._pop_mode()
        torch.ones(2) + 1
        before = mode.calls
        private._push_mode(mode)
        torch.ones(2) + 1
    assert (before, mode.calls) == (0, 2)


def torch_function_can_be_disabled() -> None:
    class Refusing(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError

    with Refusing(), torch._C.DisableTorchFunction():
        torch.ones(2) + 1

    class Part(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError

    with torch._C.DisableTorchFunctionSubclass():
        assert type(torch.ones(2).as_subclass(Part) + 1) is Tensor


def storages() -> None:
    x = torch.ones(4)
    memory = [private.StorageWeakRef(t.untyped_storage()) for t in (x, x[1:], x.clone())]
    assert memory[0] == memory[1]
    assert memory[0] != memory[2]


def trees() -> None:
    tree = {"a": [torch.ones(1), 2], "b": (None, "c")}
    leaves, spec = private.pytree.tree_flatten(tree)
    assert len(leaves) == 4
    assert private.pytree.tree_unflatten(leaves, spec) == tree
    assert private.pytree.tree_map(lambda v: 0, tree) == {"a": [0, 0], "b": (0, 0)}


def batch_norms() -> None:
    for kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm):
        assert issubclass(kind, private._BatchNorm)


def dropouts() -> None:
    for kind in (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout):
        assert issubclass(kind, private._DropoutNd)
        assert kind(0.25).p == 0.25


def scripted() -> None:
    """The classes by which what TorchScript compiled is called, whose `__call__` can be set."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = torch.jit.script(nn.ReLU())
        traced = torch.jit.trace(torch.relu, torch.ones(1))
    assert [type(module.forward), type(traced)] == [*private.SCRIPTED][::-1]
    for kind in private.SCRIPTED:
        kind.__call__ = kind.__call__


def module_dicts() -> None:
    """The dicts that a model's skeleton copies, and the wrapper of torch.compile that names are read through."""
    module = nn.Linear(2, 2)
    for name in "_parameters _buffers _modules _forward_hooks _forward_pre_hooks _backward_hooks".split():
        assert isinstance(module.__dict__[name], dict), name
    assert torch.compile(module, backend="eager")._modules["_orig_mod"] is module
    assert [private.wraps_compiled(m) for m in (module, torch.compile(module, backend="eager"))] == [False, True]
    module.forward = torch.compile(module.forward, backend="eager")  # type: ignore[method-assign]
    assert private.wraps_compiled(module)


def of_the_zoo() -> None:
    """Weights averaged in one call for all of them (zoo/training/optim.py)."""
    averages = [torch.zeros(3)]
    torch._foreach_lerp_(averages, [torch.ones(3)], 0.25)
    assert averages[0].tolist() == [0.25] * 3


def transforms() -> None:
    """Within torch.func a tensor that hides another is known, and so is the one that it hides."""
    seen: list[Any] = []

    def look(t: Tensor) -> Tensor:
        seen.append((private.maybe_current_level(), private.is_functorch_wrapped_tensor(t), private.get_unwrapped(t)))
        return t

    x = torch.ones(3)
    torch.vmap(look)(x)
    level, wrapped, hidden = seen[0]
    assert level is not None
    assert wrapped
    assert hidden is x
    assert private.maybe_current_level() is None
    assert private.forward_level(torch.autograd.forward_ad) < 0
    with torch.autograd.forward_ad.dual_level():
        assert private.forward_level(torch.autograd.forward_ad) == 0
    assert not private.is_functorch_wrapped_tensor(x)


def saving_hooks() -> None:
    """Tell whether anybody looks at what is saved for backward."""
    assert private.saving_hooks(False) is None
    with torch.autograd.graph.save_on_cpu():
        assert private.saving_hooks(False) is not None
    assert private.saving_hooks(False) is None


def compilers() -> None:
    """Calls that a compiler is not to follow run when the compiled function runs, and their errors get out."""

    @private.uncompiled
    def refuse() -> None:
        raise KeyError("told")

    def f(x: Tensor) -> Tensor:
        if torch.compiler.is_dynamo_compiling():
            refuse()
        return x + 1

    with pytest.raises(KeyError, match="told"):
        torch.compile(f, backend="eager")(torch.ones(3))
    torch.testing.assert_close(f(torch.ones(3)), torch.full((3,), 2.0))
    with pytest.raises(RuntimeError) as caught:
        torch.compile(lambda x: torch._dynamo.graph_break() or x, backend="eager", fullgraph=True)(torch.ones(3))
    assert type(caught.value).__module__ == private.COMPILERS_OWN


def graphs(mesh: DeviceMesh) -> None:
    """A function as a graph above autograd: its operations, and nodes by which functions and ops are told apart."""
    nodes = []

    def f(weights: list[Tensor], x: Tensor) -> Tensor:
        y = (x @ weights[0]).relu()
        for z in (y, Noting.apply(y), torch.ops.dsp.all_reduce(y, mesh.get_group().group_name)):
            nodes.append(z.grad_fn)
        with torch.no_grad():
            return y + 1

    x, weight = torch.ones(2, 3), nn.Parameter(torch.ones(3, 3))
    with dsp.count_comm() as comm:
        assert private._get_current_dispatch_mode() is comm
        with private._disable_current_modes():
            assert private._get_current_dispatch_mode() is None
            graph = private.graph_of(f, [weight], x)
    named = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert named[:2] == ["aten.matmul.default", "aten.relu.default"]
    switches = [node.args for node in graph.graph.nodes if node.target is private.GRAD_SWITCH]
    assert switches == [(False,), (True,)]
    assert [node.op for node in graph.graph.nodes][:2] == ["placeholder"] * 2
    torch.testing.assert_close(graph([weight], x), (x @ weight).relu() + 1)
    ours = [isinstance(node, torch.autograd.function.BackwardCFunction) for node in nodes]
    assert ours == [False, True, True]
    assert [type(node).__name__.startswith(private.OF_AN_OP) for node in nodes] == [False, False, True]


def modules() -> None:
    """A module's own parts by name, its hooks by handle, what its compile() made, and all its tensors replaced."""
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    assert list(private.children_of(model)) == ["0", "1"]
    assert list(private.parameters_of(model[0])) == ["weight", "bias"]
    assert "running_mean" in private.buffers_of(model[1])
    handle = model.register_forward_pre_hook(lambda *_: None)
    before, after = private.hooks_of(model)
    assert (list(before), list(after)) == ([handle.id], [])
    before.move_to_end(handle.id)
    backward = model.register_full_backward_hook(lambda *_: None)
    assert [list(hooks) for hooks in private.backward_hooks_of(model)] == [[], [backward.id]]
    backward.remove()
    assert private.compiled_call(model) is None
    private.set_compiled_call(model, lambda *_: "compiled")
    assert model(torch.ones(1, 2)) == "compiled"
    assert all((p == 0).all() for p in private.applied(model[0], torch.zeros_like).parameters())


def tensors() -> None:
    """A view's base, the count of writes, a number for each storage; the schema of an op; values of a sparse tensor."""
    x = torch.zeros(4)
    view = x[1:]
    assert private.base_of(view) is x
    assert private.base_of(x) is None
    assert (private.is_view(view), private.is_view(x)) == (True, False)
    seen = []
    kept = x.clone().requires_grad_()
    kept.register_hook(seen.append)
    private.set_backward_hooks(kept, None)
    kept.sum().backward()
    assert seen == []
    before = private.version_of(x)
    view.add_(1)
    assert private.version_of(x) == before + 1
    ids = [private.storage_id(t.untyped_storage()) for t in (x, view, torch.zeros(4))]
    assert ids[0] == ids[1] != ids[2]
    assert private.schema_of(torch.ops.aten.add_.Tensor).is_mutable
    with private.FakeTensorMode() as mode:
        private.fake_tensor(mode, x, x.dtype).exp()
    assert private.FakeTensorMode.cache
    private.forget_fakes(most=0)
    assert not private.FakeTensorMode.cache
    for op in (torch.ops.aten.add_.Tensor, torch.ops.aten.add_, Tensor.add_):
        assert all(schema.is_mutable for schema in private.schemas(op))
        assert private.schemas(op)
    assert private.schemas(torch.nn.functional.relu) == private.schemas(Tensor.__setitem__) == []
    sparse = torch.eye(2).to_sparse()
    assert (private.indices_of(sparse).shape, private.values_of(sparse).shape) == ((2, 2), (2,))


ALONE = [
    modules, tensors,
    checkpoint_frame, checkpoint_frames, unknown_checkpoints, functions, backward_pass, after_backward, backward_node,
    leaf, passing,
    fake_tensors, dispatch_mode, function_modes, torch_function_can_be_disabled, storages, trees, batch_norms,
    dropouts, scripted,
    module_dicts, of_the_zoo, transforms, saving_hooks, compilers, slow(compiling),
]  # fmt: skip


@pytest.mark.parametrize("case", ALONE, ids=lambda case: case.__name__)
def test_in_one_process(case: Callable[[], None]) -> None:
    case()


# ------------------------------------------------------------------------------------------------------------ on ranks


def dtensors(mesh: DeviceMesh) -> None:
    """A DTensor of uneven parts is made from its part and its spec, taken apart, and made again."""
    rows = 2 - mesh.get_local_rank()
    meta = private.TensorMeta(torch.Size((3, 4)), (4, 1), torch.float32)
    spec = private.DTensorSpec(mesh, (Shard(0),), tensor_meta=meta)
    x = private.dtensor(torch.full((rows, 4), 1.0), spec)
    assert isinstance(x, DTensor)
    assert (tuple(x.shape), x.placements, tuple(x.to_local().shape)) == ((3, 4), (Shard(0),), (rows, 4))
    assert x.full_tensor().sum() == 12
    local, found = private.opened(x)
    assert found == spec
    assert tuple(local.shape) == (rows, 4)
    assert not x.requires_grad
    assert private.dtensor(torch.ones(rows, 4, requires_grad=True), spec).requires_grad


def strided_shards(mesh: DeviceMesh) -> None:
    """A dim sharded inside of a fold, by how many are outside of it."""
    placement = private._StridedShard(1, split_factor=2)
    assert (placement.dim, placement.split_factor) == (1, 2)
    assert placement == private._StridedShard(1, split_factor=2) != private._StridedShard(1, split_factor=4)
    assert placement != Shard(1)
    meta = private.TensorMeta(torch.Size((3, 8)), (8, 1), torch.float32)
    x = private.dtensor(torch.ones(3, 4), private.DTensorSpec(mesh, (placement,), tensor_meta=meta))
    assert (x.placements, tuple((x * 2).to_local().shape)) == ((placement,), (3, 4))


def groups(mesh: DeviceMesh) -> None:
    group = private._resolve_process_group(mesh.get_group().group_name)
    assert (group.size(), group.rank()) == (mesh.size(), mesh.get_local_rank())
    everyone = torch.zeros(group.size(), dtype=torch.int64)
    private.all_gather(everyone, torch.tensor([group.rank()]), group).wait()
    assert everyone.tolist() == list(range(group.size()))
    given = [k + 1 for k in everyone.tolist()]  # to rank k so many of each
    mine = torch.full((sum(given),), group.rank())
    own = [group.rank() + 1] * group.size()
    came = torch.empty(sum(own), dtype=torch.int64)
    for work in private.all_to_all(came, mine, own, given, group):
        work.wait()
    assert torch.equal(came, everyone.repeat_interleave(own[0]))
    later = torch.empty_like(came)
    private.arrives_by(later, private.all_to_all(later, mine, own, given, group))
    assert torch.equal(torch.ops._c10d_functional.wait_tensor(later), came)


def functional_collectives(mesh: DeviceMesh) -> None:
    ops, name, n = torch.ops._c10d_functional, mesh.get_group().group_name, mesh.size()
    x = torch.full((n,), float(mesh.get_local_rank()))
    ranks = torch.arange(float(n))
    assert torch.equal(ops.wait_tensor(ops.all_to_all_single(x, [1] * n, [1] * n, name)), ranks)
    assert torch.equal(ops.wait_tensor(ops.all_gather_into_tensor(x[:1], n, name)), ranks)
    assert torch.equal(ops.wait_tensor(ops.all_reduce(x, "sum", name)), ranks.sum().expand(n))
    coming = DTensor.from_local(x, mesh, [Partial()], run_check=False).redistribute(mesh, [Replicate()], async_op=True)
    assert type(coming.to_local()) is private.AsyncCollectiveTensor
    assert torch.equal(waited := coming.to_local().trigger_wait(), ranks.sum().expand(n))
    assert type(waited) is Tensor


def names_of_nodes(mesh: DeviceMesh) -> None:
    """How a switch in backward is told from one that is recomputed, and an input that arrives from `from_local`."""
    x = torch.ones(4, 4, requires_grad=True)
    split = dsp.split(x * 1, mesh, 0)
    with dsp.count_comm() as comm:
        dsp.mean(dsp.switch(split, 1)).backward()
    assert (comm.forward.calls["switch"], comm.backward.calls["switch"], comm.recompute.calls["switch"]) == (1, 1, 0)
    given = DTensor.from_local(torch.ones(2, 4, requires_grad=True), mesh, [Shard(0)], run_check=False)
    assert given.grad_fn.name() == "_FromTorchTensorBackward"
    assert given.grad_fn.name() in private.PASSING
    assert type(dsp.hand_over(split).grad_fn).__name__ == "HandedOverBackward"


def nodes_of_fully_shard(mesh: DeviceMesh) -> None:
    from torch.distributed.fsdp import fully_shard

    names = []

    class Look(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            names.append(x.grad_fn.name())
            return x * self.weight.sum()

    model = fully_shard(Look(), mesh=mesh)
    model(torch.ones(2, requires_grad=True)).sum().backward()
    assert set(names) <= private.PASSING
    assert names


ON_RANKS = [dtensors, strided_shards, groups, functional_collectives, names_of_nodes, nodes_of_fully_shard, graphs]


@pytest.mark.parametrize("case", ON_RANKS, ids=lambda case: case.__name__)
def test_on_ranks(mesh: DeviceMesh, case: Callable[[DeviceMesh], None]) -> None:
    case(mesh)


def joined_axes(mesh: DeviceMesh) -> None:
    both = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "inter", "intra"))["inter", "intra"]
    one = private.joined_axes(both)
    assert (one.ndim, one.size(), one.get_local_rank()) == (1, 4, mesh.get_local_rank())
    assert one.get_local_rank() == 2 * both.get_local_rank("inter") + both.get_local_rank("intra")
    assert private.joined_axes(both).get_group() is one.get_group()  # made once


def test_axes_of_a_whole_world(whole_world: Any) -> None:
    whole_world(joined_axes, 4)


# ------------------------------------------------------------------------------------------------------- nowhere else

HIDDEN = re.compile(
    r"from torch[\w.]*\._|from torch[\w.]* import .*\b_[a-zA-Z]"
    r"|\btorch(?:\.[a-zA-Z]\w*)*\._(?!_|C\.DisableTorchFunction(Subclass)?\b)"
    r"|\._(?:local_tensor|spec|modules|parameters|buffers|forward_(?:pre_)?hooks|compiled_call_impl|schema|cdata|base)\b"
    r"|\._(?:version|is_view|values|apply)\b|torch\.multiprocessing\.reductions"
)
REGISTERED = re.compile(r"torch\.ops\.(_c10d_functional\.|aten\._|torch_attn\._)")  # names of ops


def test_the_module_of_functions_that_read_no_place() -> None:
    from torch.nn.attention.flex_attention import flex_attention, noop_mask

    assert flex_attention.__module__ == noop_mask.__module__ == private.FLEX


def test_nowhere_else() -> None:
    for path in sorted((ROOT / "dsp").rglob("*.py")):
        if path.name != "private.py":
            for number, line in enumerate(path.read_text().splitlines(), 1):
                assert not HIDDEN.search(REGISTERED.sub("", line)), (
                    f"{path}:{number} belongs in dsp/support/private.py: {line}"
                )


def test_every_name_has_a_case() -> None:
    source = Path(__file__).read_text()
    for name in private.__all__:
        assert f"private.{name}" in source, name


def test_functions_seen_is_false_where_subclasses_see_no_functions():
    assert private.functions_seen()
    with torch._C.DisableTorchFunction():
        assert not private.functions_seen()


def test_below_neither_modes_nor_tensors_without_data_see_an_operation():
    class Seen(private.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            raise AssertionError(func)

    with private.FakeTensorMode():
        x = torch.empty(3, requires_grad=True)
    with Seen(), private.BELOW():
        node = x.view_as(x).grad_fn
    assert node.next_functions[0][0].variable is x


def test_a_mode_under_which_nothing_is_compiled_is_called_without_the_compilers_guard():
    class Plain(private.UncompiledMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

        written = __torch_dispatch__

    seen: list[Any] = []
    assert Plain.__torch_dispatch__ is Plain.written
    with Plain():
        torch.ones(2) + 1
    assert torch.ops.aten.add.Tensor in seen
