"""The parts of torch that torch may change without notice, each under one name, with what dsp uses it for.

`test_torch_internals.py` has a case for each name, and says which one broke. No other file of dsp uses private names of
torch, except `torch._C.DisableTorchFunction` and its like, which torch's documentation shows, and names of ops.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import _register_work  # waits for a tensor wait for it too
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor, maybe_current_level  # torch.func
from torch._ops import OpOverload, OpOverloadPacket  # an op, as seen below autograd; as called
from torch._subclasses.fake_tensor import (  # tensors without data; their errors
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.distributed._functional_collectives import AsyncCollectiveTensor  # their result; registers the ops
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group  # from a name to the group
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta  # placements, global shape and strides
from torch.distributed.tensor.placement_types import _StridedShard  # a dim inside a fold, sharded
from torch.fx.experimental.proxy_tensor import get_proxy_mode  # is set while a graph is traced
from torch.multiprocessing.reductions import StorageWeakRef  # identifies the memory of a tensor
from torch.nn.modules.batchnorm import _BatchNorm  # the base of all batch norms
from torch.nn.modules.dropout import _DropoutNd  # the base of all dropouts
from torch.overrides import (  # modes leave while a stage runs
    _get_current_function_mode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils import _pytree as pytree  # tensors inside any arguments
from torch.utils._mode_utils import no_dispatch  # skips all dispatch modes
from torch.utils._python_dispatch import (  # sees every op below autograd
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode,
)

# autograd nodes that may stand between a model and its inputs: of from_local, fully_shard, casts and copies
PASSING = frozenset(
    """
_FromTorchTensorBackward RegisterPostBackwardFunctionBackward ToCopyBackward0 CloneBackward0 AliasBackward0
""".split()
)
LEAF = "torch::autograd::AccumulateGrad"
COMPILERS_OWN = "torch._dynamo.exc"  # the module of torch.compile's errors
FLEX = "torch.nn.attention.flex_attention"  # the module of the functions for "no mask" and "no change of scores"
CONTEXT: Any = torch.autograd.function.BackwardCFunction  # the base of the `ctx` of every autograd.Function
function_of = attrgetter("_forward_cls")  # of such a `ctx`, or its class: the autograd.Function
context_of = attrgetter("_backward_cls")  # of an autograd.Function: the class of its `ctx`
GRAD_SWITCH = torch._C._set_grad_enabled  # the form that a graph records
OF_AN_OP = "GeneratedBackwardFor"  # in the names of autograd nodes of custom ops with a registered gradient


# getters written in C, for paths where a Python call would cost too much
children_of, parameters_of, buffers_of = map(attrgetter, ("_modules", "_parameters", "_buffers"))  # of a module itself
hooks_of = attrgetter("_forward_pre_hooks", "_forward_hooks")  # of a module: ordered dicts, by handle
backward_hooks_of = attrgetter("_backward_pre_hooks", "_backward_hooks")
compiled_call = attrgetter("_compiled_call_impl")  # the result of the module's compile(), or None
schema_of = attrgetter("_schema")  # of an op

storage_id = attrgetter("_cdata")  # of a storage: its address
base_of = attrgetter("_base")  # of a view: its base
version_of = attrgetter("_version")  # of a tensor: the number of writes
is_view = Tensor._is_view
forward_level = attrgetter("_current_level")  # of torch.autograd.forward_ad: -1 outside of it
indices_of, values_of = Tensor._indices, Tensor._values  # of a sparse tensor, as stored


class UncompiledMode(TorchDispatchMode):
    """A dispatch mode under which nothing is compiled. torch need not keep its compiler out of each call, which takes
    longer than the call."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def forget_fakes(most: int = 4096) -> None:
    """Empty torch's cache of ops on fake tensors if it has more than `most` entries (2 KiB each): torch never does."""
    if len(FakeTensorMode.cache) > most:
        FakeTensorMode.cache_clear()


def schemas(func: Any) -> list[Any]:
    """The schemas of an op, of all overloads of a packet, or of those of a torch function written in C++.

    A function written in C++ has the name of TorchScript's method of lists, too, as `sort`: that is left out.
    """
    if isinstance(func, OpOverload):
        return [schema_of(func)]
    written_in_c = type(func) in (type(torch.add), type(Tensor.add))
    if written_in_c:
        func = getattr(torch.ops.aten, func.__name__, None)
    if not isinstance(func, OpOverloadPacket):
        return []
    overloads = [schema_of(getattr(func, name)) for name in func.overloads()]
    return [schema for schema in overloads if not (written_in_c and of_lists(schema))]


def of_lists(schema: Any) -> bool:
    """Tell whether a schema is of one of TorchScript's methods of lists: they change the list, and return nothing."""
    return bool(schema.arguments) and isinstance(schema.arguments[0].type, torch._C.ListType) and not schema.returns


def set_compiled_call(module: nn.Module, call: Any) -> None:
    """Replace the result of the module's compile()."""
    module._compiled_call_impl = call


def applied(module: nn.Module, function: Any) -> nn.Module:
    """Replace each parameter and buffer of a module by `function` of it."""
    return module._apply(function)


def fsdp_precision(module: Any) -> tuple[dict[int, torch.dtype], torch.dtype | None, torch.dtype | None]:
    """The dtypes to which `fully_shard` casts: parameters (by the ids of their shards), inputs and outputs."""
    state = module._get_fsdp_state()
    policy = state._mp_policy
    groups = getattr(state, "_fsdp_param_groups", None)  # before torch 2.13 there was one
    groups = [group for group in ([state._fsdp_param_group] if groups is None else groups) if group is not None]
    to = policy.param_dtype
    parameters = {id(p.sharded_param): to for group in groups for p in group.fsdp_params} if to else {}
    return parameters, to if policy.cast_forward_inputs else None, policy.output_dtype


def all_gather(everyone: Tensor, row: Tensor, group: Any) -> Any:
    """Begin an all-gather by the group itself, in two thirds of the host time of `torch.distributed`'s function."""
    gather = getattr(group, "all_gather_single", None) or group._allgather_base  # renamed in torch 2.13
    return gather(everyone, row)


LARGE = 1 << 14  # bytes of a message, from which on the time on the link counts
TAG = 0xD5  # of the messages of an all-to-all, so that none is taken for one of the user's


def all_to_all(
    out: Tensor, flat: Tensor, out_splits: list[int], in_splits: list[int], group: Any, total: int = 0
) -> list[Any]:
    """Begin an all-to-all in the same way; return the works to wait for. total: the elements of all ranks, if known.

    Over gloo a large one consists of messages, receives before sends. In gloo's own all-to-all the word that a rank can
    receive queues behind the data that it sends: if ranks arrive apart, the two directions of a link take turns.
    """
    if total >= LARGE and flat.is_cpu and in_messages(total * flat.element_size(), group):
        n, rank, goes, comes = group.size(), group.rank(), flat.split(in_splits), out.split(out_splits)
        after, before = ([(rank + sign * i) % n for i in range(1, n)] for sign in (1, -1))
        works = [group.recv([comes[peer]], peer, TAG) for peer in before if out_splits[peer]]
        works += [group.send([goes[peer]], peer, TAG) for peer in after if in_splits[peer]]
        comes[rank].copy_(goes[rank])
        return works
    exchange = getattr(group, "all_to_all_single", None) or group.alltoall_base  # renamed in torch 2.13
    return [exchange(out, flat, out_splits, in_splits)]


def in_messages(nbytes: int, group: Any) -> bool:
    """Tell whether ranks send each other so many bytes of the CPU over gloo, and `LARGE` messages."""
    return nbytes >= LARGE * group.size() ** 2 and group._get_backend(torch.device("cpu")).name() == "gloo"


def arrives_by(out: Tensor, works: Sequence[Any]) -> None:
    """Make a wait for the tensor, as for the results of functional collectives, wait for these works."""
    for work in works:
        _register_work(out, work)


def joined_axes(mesh: DeviceMesh) -> DeviceMesh:
    """A mesh of several named axes as one axis, over the same ranks in the same order; made once a mesh."""
    return mesh._flatten()


def uncompiled(func: Any) -> Any:
    """Mark a function that compiled callers call and do not compile, without loading the compiler."""
    func._torchdynamo_disable = True
    return func


def fake_tensor(mode: FakeTensorMode, like: Tensor, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """A fake tensor or parameter of the shape of `like`, as ``torch.empty_strided`` makes it under the mode.

    It takes a tenth of the time, which counts since every trace makes one for each parameter of the model. device: by
    default that of `like`, and the CPU for the meta device.
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
    """Let flex_attention, while nothing is computed, take tensors with gradients where it has no backward."""
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
    """A function as a graph of its operations above autograd, traced on tensors without data."""
    from torch.fx.experimental.proxy_tensor import make_fx  # takes long to import, and few need it

    return make_fx(function, tracing_mode="fake", pre_dispatch=True, _allow_non_fake_inputs=True)(*args)


def compiler_loaded() -> bool:
    """Tell whether torch.compile may have been used."""
    return "torch._dynamo" in sys.modules


class CompileOff:
    """A context in which torch.compile is off, as between stages, where dsp has to see each operation.

    It may be entered several times, as modes of torch may. It does nothing if no compiler was loaded.
    """

    def __init__(self) -> None:
        self.stances: list[Any] = []

    def __enter__(self) -> None:
        self.stances.append(torch.compiler.set_stance("force_eager") if compiler_loaded() else None)

    def __exit__(self, *exc: Any) -> None:
        if self.stances and (stance := self.stances.pop()) is not None:
            stance.__exit__(None, None, None)


def wraps_compiled(module: nn.Module) -> bool:
    """Tell whether a module is the result of torch.compile, or has one as its forward."""
    return "_orig_mod" in children_of(module) or hasattr(module.__dict__.get("forward"), "_torchdynamo_orig_callable")


def compiled_callers() -> Iterator[Any]:
    """The functions given to torch.compile from which the caller is called, the innermost first."""
    frame = sys._getframe(1) if compiler_loaded() else None
    while frame is not None:
        if frame.f_code.co_name == "compile_wrapper" and "fn" in frame.f_locals:
            yield frame.f_locals["fn"]
        frame = frame.f_back


@contextmanager
def compiling(kinds: int) -> Iterator[None]:
    """A context in which torch.compile works although it is off around it, for `kinds` kinds of arguments a function.

    Dispatch modes, such as those that count, are off in it: the compiler does not work under them.
    """
    with (
        torch.compiler.set_stance("default"),
        torch._dynamo.config.patch(recompile_limit=kinds),
        _disable_current_modes(),
        real_tensors_packed(),
    ):
        yield


def real_tensors_packed() -> AbstractContextManager[Any]:
    """A context in which saved-tensor hooks, such as a checkpoint's, get no tensor of a trace: the trace would run the
    checkpoint again to unpack it."""
    hooks = saving_hooks(False)
    if hooks is None:
        return nullcontext()

    def pack(t: Tensor) -> tuple[bool, Any]:
        if type(t) in (Tensor, nn.Parameter) and get_proxy_mode() is None:
            return True, hooks[0](t)
        return False, t if t.grad_fn is None else t.detach()  # a node that saves its own result would hold itself

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda pair: hooks[1](pair[1]) if pair[0] else pair[1])


def dtensor(local: Tensor, spec: DTensorSpec) -> DTensor:
    """A DTensor around `local`, without autograd and without communication."""
    return DTensor(local, spec, requires_grad=local.requires_grad)


def opened(x: DTensor) -> tuple[Tensor, DTensorSpec]:
    """The local tensor and the spec of a DTensor, without autograd."""
    return x._local_tensor, x._spec


def backward_pass() -> int:
    """A number that identifies the running backward pass; -1 outside of backward."""
    return torch._C._current_graph_task_id()


def backward_node() -> str:
    """The name of the autograd node whose backward is running, if any."""
    node = torch._C._current_autograd_node()
    return "" if node is None else node.name()


def after_backward(call: Any) -> None:
    """Call a function when the running backward pass ends, in the thread that ends it."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def below_autograd() -> bool:
    """Tell whether autograd has let go of a call, and a dispatch mode looks at it."""
    return bool(torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutogradFunctionality))


functions_seen = torch._C._is_torch_function_enabled  # tells whether torch functions are handed to subclasses
BELOW = torch._C._DisableTorchDispatch  # a context in which no dispatch mode or tensor without data sees an operation
saving_hooks = torch._C._autograd._top_saved_tensors_default_hooks  # the active saved-tensor hooks


def checkpoint_frame() -> Any:
    """The activation checkpoint (non-reentrant) that the current code runs in, if any.

    It is found by its saved-tensor hook: a closure over `frame`, whose `recompute_fn` runs the region again.
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


# the code that runs the forward of a checkpoint: a function of its own since torch 2.14
_source = torch.utils.checkpoint
CHECKPOINT = inspect.unwrap(getattr(_source, "_checkpoint_impl", _source.checkpoint)).__code__


def checkpoint_frames() -> list[Any]:
    """The activation checkpoints (non-reentrant) that the current code runs in, the innermost last."""
    frames, caller = list[Any](), sys._getframe(1)
    while caller is not None:
        if caller.f_code is CHECKPOINT and getattr(caller.f_locals.get("gen"), "gi_frame", None) is not None:
            frames.insert(0, caller.f_locals["gen"].gi_frame.f_locals["new_frame"])
        caller = caller.f_back  # type: ignore[assignment]
    last = checkpoint_frame()
    return frames if last is None or any(last is frame for frame in frames) else [*frames, last]


def saved_in(frame: Any) -> int:
    """The number of tensors that an activation checkpoint has saved so far."""
    return len(frame.weak_holders)


def checkpoint_arguments(frame: Any) -> Sequence[Any]:
    """The arguments of the activation checkpoint `frame`, in which the caller runs."""
    caller: Any = sys._getframe(1)
    while caller is not None:
        if caller.f_code is CHECKPOINT:
            inner = caller.f_locals["gen"].gi_frame
            if inner is not None and inner.f_locals.get("new_frame") is frame:
                return caller.f_locals["args"]
        caller = caller.f_back
    return ()


class AnyShape(dict[str, Any]):
    """The metadata of a tensor that an activation checkpoint saved, of any shape."""

    def __ne__(self, other: object) -> bool:
        return not isinstance(other, dict) or {**self, "shape": None} != {**other, "shape": None}


def compared_as(frame: Any, plain: Callable[[Any], Any]) -> None:
    """Make an activation checkpoint compare `plain(x)` of each tensor that it saved and recomputed.

    It may have saved arguments of other checkpoints already, and noted the shapes of x: these are not compared.
    """
    if (metadata := frame.metadata_fn) is not None:
        frame.metadata_fn = lambda x: metadata(plain(x))
        frame.x_metadatas[:] = [AnyShape(x) if isinstance(x, dict) else x for x in frame.x_metadatas]


class Recompute:
    """The recomputation of an activation checkpoint inside a context, `around()`. It replaces `frame.recompute_fn`.

    key: the owner of the context, which is entered once for each owner. plain: maps a saved tensor to the one whose
    metadata is compared. restore: restores the arguments from the saved ones, which come back as plain tensors if the
    hooks of another checkpoint saved them.
    """

    def __init__(
        self, frame: Any, key: Any, around: Callable[[], AbstractContextManager[Any]],
        plain: Callable[[Any], Any] | None = None, restore: Callable[[Sequence[Any]], Sequence[Any]] | None = None,
    ) -> None:  # fmt: skip
        self.inner, self.key, self.around, self.restore = frame.recompute_fn, key, around, restore
        frame.recompute_fn = self
        if plain is not None:
            compared_as(frame, plain)

    def __call__(self, *args: Any) -> Any:
        with self.around():
            return self.inner(*(args if self.restore is None else self.restore(args)))

    @staticmethod
    def keys(frame: Any) -> Iterator[Any]:
        """The keys for which a checkpoint has contexts."""
        run = frame.recompute_fn
        while isinstance(run, Recompute):
            yield run.key
            run = run.inner


# the garbage collector calls this for a dying tensor, at any time
set_backward_hooks: Any = Tensor._backward_hooks.__set__  # type: ignore[union-attr]


SCRIPTED = (torch._C.ScriptFunction, torch._C.ScriptMethod)  # what TorchScript compiled, as it is called


__all__ = [
    "BELOW",
    "COMPILERS_OWN",
    "CONTEXT",
    "FLEX",
    "GRAD_SWITCH",
    "LEAF",
    "OF_AN_OP",
    "PASSING",
    "SCRIPTED",
    "AsyncCollectiveTensor",
    "DTensorSpec",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "OpOverload",
    "OpOverloadPacket",
    "Recompute",
    "StorageWeakRef",
    "TensorMeta",
    "TorchDispatchMode",
    "UncompiledMode",
    "_BatchNorm",
    "_DropoutNd",
    "_StridedShard",
    "_disable_current_modes",
    "_get_current_dispatch_mode",
    "_get_current_function_mode",
    "_get_current_function_mode_stack",
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
    "below_autograd",
    "buffers_of",
    "checkpoint_arguments",
    "checkpoint_frame",
    "checkpoint_frames",
    "children_of",
    "compared_as",
    "compiled_call",
    "compiled_callers",
    "compiler_loaded",
    "compiling",
    "context_of",
    "dtensor",
    "fake_tensor",
    "forget_fakes",
    "forward_level",
    "function_of",
    "functions_seen",
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
    "saved_in",
    "saving_hooks",
    "schema_of",
    "schemas",
    "set_backward_hooks",
    "set_compiled_call",
    "storage_id",
    "uncompiled",
    "values_of",
    "version_of",
    "wraps_compiled",
]
