"""The parts of torch that torch may change without notice: each under one name, with what it stands for here.

`test_private.py` has a case of each name and says which one broke; no other file of dsp reaches behind torch's
public names, but for `torch._C.DisableTorchFunction` and its like, which torch's documentation shows, and names of ops.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import _register_work  # what waits for a tensor waits for that
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor, maybe_current_level  # within torch.func
from torch._ops import OpOverload  # an op below autograd
from torch._subclasses.fake_tensor import (  # tensors with a shape and without data, to trace with; what they cannot
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.distributed._functional_collectives import AsyncCollectiveTensor  # what they return; registers their ops
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group  # the group that an op was given the name of
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta  # placements, global shape and strides
from torch.distributed.tensor.placement_types import _StridedShard  # a dim inside a fold, sharded
from torch.multiprocessing.reductions import StorageWeakRef  # which memory a tensor lives in
from torch.nn.modules.batchnorm import _BatchNorm  # every norm over the batch
from torch.overrides import _get_current_function_mode, _pop_mode, _push_mode  # glue steps aside inside of a stage
from torch.utils import _pytree as pytree  # tensors inside of any arguments
from torch.utils._mode_utils import no_dispatch  # past every dispatch mode
from torch.utils._python_dispatch import (  # sees every op below autograd: to count, to trace
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode,
)

# autograd nodes that may stand between a model and what it was given: from_local, fully_shard, casts and copies
PASSING = frozenset(
    """
_FromTorchTensorBackward RegisterPostBackwardFunctionBackward ToCopyBackward0 CloneBackward0 AliasBackward0
""".split()
)
LEAF = "torch::autograd::AccumulateGrad"
COMPILERS_OWN = "torch._dynamo.exc"  # where the errors of torch.compile are from
FLEX = "torch.nn.attention.flex_attention"  # the module of functions that read no place: those of no mask, no change
is_alias = torch._C._is_alias_of  # type: ignore[attr-defined]  # whether two tensors live in one memory
APPLIES: Any = torch.autograd.function._SingleLevelFunction  # whose `apply` every function comes to, however bound
GRAD_SWITCH = torch._C._set_grad_enabled  # as a graph records it
OF_AN_OP = "GeneratedBackwardFor"  # the nodes of ops that have a formula for their gradient, though it is a function


# as getters written in C, for paths on which a Python call would be noticed
children_of, parameters_of, buffers_of = map(attrgetter, ("_modules", "_parameters", "_buffers"))  # of a module itself
hooks_of = attrgetter("_forward_pre_hooks", "_forward_hooks")  # of a module: ordered dicts, by handle
backward_hooks_of = attrgetter("_backward_pre_hooks", "_backward_hooks")
compiled_call = attrgetter("_compiled_call_impl")  # what the module's compile() made, or None
schema_of = attrgetter("_schema")  # of an op
storage_id = attrgetter("_cdata")  # of a storage: where it is
base_of = attrgetter("_base")  # of a view: the tensor that it is a view of
version_of = attrgetter("_version")  # of a tensor: how often it was written
is_view = Tensor._is_view
forward_level = attrgetter("_current_level")  # of torch.autograd.forward_ad: -1 outside of it
indices_of, values_of = Tensor._indices, Tensor._values  # of a sparse tensor, as they are stored


def set_compiled_call(module: nn.Module, call: Any) -> None:
    """Replace what the module's compile() made."""
    module._compiled_call_impl = call


def applied(module: nn.Module, function: Any) -> nn.Module:
    """The module with `function` of each parameter and buffer in its place."""
    return module._apply(function)


def fsdp_precision(module: Any) -> tuple[dict[int, torch.dtype], torch.dtype | None, torch.dtype | None]:
    """Types that `fully_shard` casts to: a module's parameters, by the ids of their shards, its inputs, its outputs."""
    state = module._get_fsdp_state()
    policy = state._mp_policy
    groups = getattr(state, "_fsdp_param_groups", None)  # before torch 2.13 there was one
    groups = [group for group in ([state._fsdp_param_group] if groups is None else groups) if group is not None]
    to = policy.param_dtype
    parameters = {id(p.sharded_param): to for group in groups for p in group.fsdp_params} if to else {}
    return parameters, to if policy.cast_forward_inputs else None, policy.output_dtype


def all_gather(everyone: Tensor, mine: Tensor, group: Any) -> Any:
    """`torch.distributed`'s, under way, to be waited for: by the group itself, in two thirds of the host time."""
    gather = getattr(group, "all_gather_single", None) or group._allgather_base  # renamed in torch 2.13
    return gather(everyone, mine)


def all_to_all(out: Tensor, flat: Tensor, out_splits: list[int], in_splits: list[int], group: Any) -> Any:
    """Likewise `torch.distributed.all_to_all_single`."""
    exchange = getattr(group, "all_to_all_single", None) or group.alltoall_base  # renamed in torch 2.13
    return exchange(out, flat, out_splits, in_splits)


def arrives_by(out: Tensor, works: Sequence[Any]) -> None:
    """Let whoever waits for a tensor, as for what torch's functional collectives return, wait for these works."""
    for work in works:
        _register_work(out, work)


def joined_axes(mesh: DeviceMesh) -> DeviceMesh:
    """A mesh of several named axes as one axis, over the same ranks in the same order: made once for each mesh."""
    return mesh._flatten()


def uncompiled(func: Any) -> Any:
    """Not to be made part of a compiled caller, which calls it as it runs; the compiler is not loaded for that."""
    func._torchdynamo_disable = True
    return func


def fake_tensor(mode: FakeTensorMode, like: Tensor, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """A tensor or parameter as `like`, without data: what ``torch.empty_strided`` makes under the mode.

    A tenth of its time: a fake parameter is made for each of a model, in every trace. device: by default that of
    `like`, and the CPU for the meta device.
    """
    device = device or (torch.device("cpu") if like.is_meta else like.device)
    with no_dispatch():
        stride = like.stride() if like.layout == torch.strided else torch.empty(like.shape, device="meta").stride()
        empty = torch.empty_strided(tuple(like.shape), stride, dtype=dtype, device="meta")
    new = FakeTensor(mode, empty, device).requires_grad_(like.requires_grad)
    if isinstance(like, nn.Parameter):
        new._is_param = True  # all that nn.Parameter does to a new tensor
    return new


@contextmanager
def any_device() -> Iterator[None]:
    """While nothing is computed flex_attention takes what needs gradients on a device that it has no backward for."""
    module, name = sys.modules.get("torch.nn.attention.flex_attention"), "_validate_device"
    refuses = getattr(module, name, None)
    if refuses is not None:
        setattr(module, name, lambda *_: None)
    try:
        yield
    finally:
        if refuses is not None:
            setattr(module, name, refuses)


def graph_of(function: Any, *args: Any) -> Any:
    """A function as a graph of the operations that it does, above autograd; run on tensors without data."""
    from torch.fx.experimental.proxy_tensor import make_fx  # loads a compiler's modules, which few need

    return make_fx(function, tracing_mode="fake", pre_dispatch=True, _allow_non_fake_inputs=True)(*args)


def compiler_loaded() -> bool:
    """Tell whether anybody may have compiled anything."""
    return "torch._dynamo" in sys.modules


def compiled_callers() -> Iterator[Any]:
    """The functions given to torch.compile that the caller stands in, though it was put aside; the inner ones first."""
    frame = sys._getframe(1) if compiler_loaded() else None
    while frame is not None:
        if frame.f_code.co_name == "compile_wrapper" and "fn" in frame.f_locals:
            yield frame.f_locals["fn"]
        frame = frame.f_back


@contextmanager
def compiling(kinds: int) -> Iterator[None]:
    """Where torch.compile works, though it is put aside around, for so many kinds of arguments of one function.

    It does not where a mode sees every op, as those do that count: the compiler's own are none of theirs.
    """
    with (
        torch.compiler.set_stance("default"),
        torch._dynamo.config.patch(recompile_limit=kinds),
        _disable_current_modes(),
    ):
        yield


def dtensor(local: Tensor, spec: DTensorSpec) -> DTensor:
    """A shell round `local`, without autograd and without a word to other ranks."""
    return DTensor(local, spec, requires_grad=local.requires_grad)


def opened(x: DTensor) -> tuple[Tensor, DTensorSpec]:
    """The parts of a DTensor, without autograd."""
    return x._local_tensor, x._spec


def backward_pass() -> int:
    """A number of the running backward pass, another one for each; -1 outside of backward."""
    return torch._C._current_graph_task_id()


def backward_node() -> str:
    """The name of the autograd node whose backward is running, if any."""
    node = torch._C._current_autograd_node()
    return "" if node is None else node.name()


def after_backward(call: Any) -> None:
    """Call this when the running backward pass is through, in whichever of its threads ends it."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


saving_hooks = torch._C._autograd._top_saved_tensors_default_hooks  # those that run now on what is saved for backward


def checkpoint_frame() -> Any:
    """The activation checkpoint (non-reentrant) that the current code runs in, if any.

    It is known by the hook that packs what backward needs: a closure over `frame`, whose `recompute_fn` runs the region
    again.
    """
    hooks = saving_hooks(False)
    pack = hooks[0] if hooks else None
    if getattr(pack, "__module__", "") != "torch.utils.checkpoint":
        return None
    pack = inspect.unwrap(pack)
    names = pack.__code__.co_freevars
    if "frame" in names:
        return pack.__closure__[names.index("frame")].cell_contents
    if "target_frame_ref" in names:  # it recomputes
        return None
    raise RuntimeError(
        f"torch {torch.__version__} keeps its activation checkpoints in a way that dsp does not know; "
        "run without activation checkpointing, or with a version of torch that dsp was tested with"
    )


CHECKPOINT = inspect.unwrap(torch.utils.checkpoint.checkpoint).__code__


def checkpoint_arguments(frame: Any) -> Sequence[Any]:
    """The arguments of the activation checkpoint of this frame, in which the caller runs."""
    caller: Any = sys._getframe(1)
    while caller is not None:
        if caller.f_code is CHECKPOINT:
            made = caller.f_locals["gen"].gi_frame
            if made is not None and made.f_locals.get("new_frame") is frame:
                return caller.f_locals["args"]
        caller = caller.f_back
    return ()


def compared_as(frame: Any, plain: Callable[[Any], Any]) -> None:
    """Have an activation checkpoint compare `plain(x)` of all that it keeps and computes again."""
    if (metadata := frame.metadata_fn) is not None:
        frame.metadata_fn = lambda x: metadata(plain(x))


class Recompute:
    """The recomputation of an activation checkpoint within a context, `around()`; it takes its place in the frame.

    key: who asked for the context, which is entered once for each. plain: the tensor whose metadata is compared, of one
    that the checkpoint keeps. given: the arguments as they were, of those that were kept: what keeps them may be the
    hooks of another checkpoint, from which they come back as plain tensors.
    """

    def __init__(
        self, frame: Any, key: Any, around: Callable[[], AbstractContextManager[Any]],
        plain: Callable[[Any], Any] | None = None, given: Callable[[Sequence[Any]], Sequence[Any]] | None = None,
    ) -> None:  # fmt: skip
        self.inner, self.key, self.around, self.given = frame.recompute_fn, key, around, given
        frame.recompute_fn = self
        if plain is not None:
            compared_as(frame, plain)

    def __call__(self, *args: Any) -> Any:
        with self.around():
            return self.inner(*(args if self.given is None else self.given(args)))

    @staticmethod
    def known(frame: Any, key: Any) -> bool:
        """Tell whether a checkpoint has a context of this key."""
        run = frame.recompute_fn
        while isinstance(run, Recompute):
            if run.key is key:
                return True
            run = run.inner
        return False


# what the collector of garbage calls on a tensor that goes, whatever runs then
set_backward_hooks: Any = Tensor._backward_hooks.__set__  # type: ignore[union-attr]


__all__ = [
    "APPLIES",
    "COMPILERS_OWN",
    "FLEX",
    "GRAD_SWITCH",
    "LEAF",
    "OF_AN_OP",
    "PASSING",
    "AsyncCollectiveTensor",
    "DTensorSpec",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "OpOverload",
    "Recompute",
    "StorageWeakRef",
    "TensorMeta",
    "TorchDispatchMode",
    "_BatchNorm",
    "_StridedShard",
    "_disable_current_modes",
    "_get_current_dispatch_mode",
    "_get_current_function_mode",
    "_pop_mode",
    "_push_mode",
    "_resolve_process_group",
    "after_backward",
    "all_gather",
    "all_to_all",
    "any_device",
    "applied",
    "arrives_by",
    "backward_hooks_of",
    "backward_node",
    "backward_pass",
    "base_of",
    "buffers_of",
    "checkpoint_arguments",
    "checkpoint_frame",
    "children_of",
    "compared_as",
    "compiled_call",
    "compiled_callers",
    "compiler_loaded",
    "compiling",
    "dtensor",
    "fake_tensor",
    "forward_level",
    "get_unwrapped",
    "graph_of",
    "hooks_of",
    "indices_of",
    "is_functorch_wrapped_tensor",
    "is_view",
    "joined_axes",
    "maybe_current_level",
    "opened",
    "parameters_of",
    "pytree",
    "saving_hooks",
    "schema_of",
    "set_backward_hooks",
    "set_compiled_call",
    "storage_id",
    "uncompiled",
    "values_of",
    "version_of",
]
