"""The traits of torch functions: plain names, the arguments that they write into, which draw random numbers, which may
return views; and tables that rules fill."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsp.core.torch_calls import tensor_args
from dsp.support.private import OpOverload, OpOverloadPacket, schemas, set_backward_hooks

BY_NUMBER = frozenset({"apply", "map", "map2"})  # call Python for every element
STRIDED = ("as_strided", "as_strided_copy", "as_strided_scatter")  # read memory as it lies on each rank
RESHAPING = ("squeeze", "unsqueeze", "transpose", "swapaxes", "swapdims", "t", "detach")  # in place
SET = ("data", "grad", "real", "imag")  # attributes that can be set
# collectives of torch.distributed whose result, or whose call, differs between ranks
DIFFERING = """
reduce gather scatter reduce_scatter reduce_scatter_single reduce_scatter_tensor _reduce_scatter_base all_to_all
all_to_all_single send recv isend irecv
""".split()
UNRUNNABLE = {
    "autograd_grad": "torch.autograd.grad()", **{name: f"Tensor.{name}_()" for name in BY_NUMBER},
    **{name: f"{name}()" for name in STRIDED}, **{f"{name}_in_place": f"Tensor.{name}_()" for name in RESHAPING},
    **{f"set_{name}": f"setting Tensor.{name}" for name in SET},
    **{f"distributed.{name}": f"torch.distributed.{name}()" for name in DIFFERING},
}  # fmt: skip
METADATA = frozenset(
    """
size dim numel nelement ndimension stride is_contiguous is_floating_point is_complex is_signed is_inference
element_size get_device storage_offset is_same_size len repr hash format str is_nonzero_meta is_tensor is_storage
promote_types result_type can_cast broadcast_shapes is_shared is_pinned new_tensor
requires_grad data_ptr untyped_storage get_default_dtype finfo iinfo backward register_hook retain_grad dir
has_names names is_conj is_neg is_quantized is_sparse is_mkldnn device device.default
""".split()
)

# functions that read a tensor's Python attributes: of a tensor between stages these are its place in a record
ATTRIBUTES_READ = frozenset({"deepcopy", "reduce_ex"})

# functions that would get the plain name of another: bool(x) reads a number, x.bool() is a cast
HOMONYMS = {
    torch.embedding: "embedding_of_weight",
    torch.ops.aten.detach.default: "detach",  # autograd.Function detaches results that it saves
    torch.binary_cross_entropy_with_logits: "binary_cross_entropy_by_number",
    **dict.fromkeys((torch.batch_norm, torch.instance_norm), "norm_by_weight"),  # weights first, then statistics
    torch.nn.functional.unfold: "im2col",
    torch.autograd.grad: "autograd_grad",
    Tensor.requires_grad.__set__: "requires_grad",  # type: ignore[attr-defined]
    Tensor.requires_grad_: "requires_grad",
    set_backward_hooks: "register_hook",
    torch.detach_: "detach_in_place",
    **{getattr(Tensor, f"{name}_"): f"{name}_in_place" for name in RESHAPING},
    **{getattr(Tensor, name).__set__: f"set_{name}" for name in SET},
    getattr(torch.linalg, "polar", None): "polar_decomposition",  # of newer torch
    **{getattr(Tensor, name): name for name in ("__bool__", "__int__", "__long__", "__float__", "__complex__")},
}


def op_name(func: Any) -> tuple[str, bool]:
    """(plain name, whether it reads an attribute): ``Tensor.__iadd__`` is "iadd", ``x.shape`` is ("shape", True).

    An op has the name of the torch function that calls it, or else that of its library, too: ``torch.ops.mine.norm``
    is "mine::norm".
    """
    if func in HOMONYMS:
        return HOMONYMS[func], False
    if isinstance(func, (OpOverload, OpOverloadPacket)):
        caller = caller_of(func)
        return (library_name(func), False) if caller is None else op_name(caller)
    name = getattr(func, "__name__", None) or type(func).__name__  # no address, which differs between ranks
    if name == "__get__":
        return getattr(func.__self__, "__name__", "?"), True
    if getattr(func, "__module__", None) == "torch.foreach":  # since torch 2.15; before, their names began so
        return f"foreach_{name.strip('_')}", False
    if collective(func):
        return f"distributed.{name}", False
    return name.strip("_").removeprefix("linalg_"), False


def library_name(op: Any) -> str:
    """The name of an op with that of its library, whichever of its overloads is called."""
    packet = op.overloadpacket if isinstance(op, OpOverload) else op
    return str(packet).replace(".", "::", 1)


def caller_of(op: Any) -> Any:
    """The function of torch that calls an op of its own, with the same arguments; None if there is none.

    A function of torch that is written in Python may have other arguments than the op of its name, as `F.mse_loss` has.
    """
    library, _, name = library_name(op).partition("::")
    places = (torch, Tensor, torch.nn.functional) if library == "aten" else ()
    functions = (getattr(place, name, None) for place in places)
    return next((f for f in functions if inspect.isroutine(f) and not inspect.isfunction(f)), None)


def collective(func: Any) -> bool:
    """Tell whether a function is one of torch.distributed's; it works on all ranks, and writes into an argument."""
    return getattr(func, "__module__", None) == "torch.distributed.distributed_c10d"


def in_place(func: Any) -> bool:
    name = getattr(func, "__name__", "").partition(".")[0]  # of an op, without its overload
    return (name.endswith("_") and not name.endswith("__")) or name in _INPLACE_DUNDER


_INPLACE_DUNDER = frozenset(
    """
__setitem__ __iadd__ __isub__ __imul__ __idiv__ __itruediv__ __ifloordiv__ __imod__ __ipow__ __iand__ __ior__ __ixor__
__ilshift__ __irshift__
""".split()
)


class Written(NamedTuple):
    """An argument that a function writes into: its position (None: by name only) and its name; flags: the function
    writes only if one of these arguments, each by position, name and default, is set; none: it always writes."""

    position: int | None
    name: str
    flags: tuple[tuple[int, str, Any], ...] = ()


# arguments that Python functions and norms write into, though no schema says so, and the flags with which they do
STATISTICS = dict.fromkeys(("running_mean", "running_var"), ("training", "use_input_stats", "train"))


def written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors among a call's arguments that the function writes into.

    The function's schema says so, or its name: a trailing underscore, `out=`, `inplace=`, a collective, or a norm that
    updates its running statistics. Many of these writes leave the tensor's version counter unchanged.
    """

    def get(position: int | None, name: str, default: Any = None) -> Any:
        return args[position] if position is not None and len(args) > position else kwargs.get(name, default)

    tensors = tensor_args([kwargs.get("out")], {})
    for position, name, flags in written_arguments(func):
        if not flags or any(get(*flag) for flag in flags):
            tensors += tensor_args([get(position, name)], {})
    return tensors


@lru_cache(maxsize=8192)
def written_arguments(func: Any) -> tuple[Written, ...]:
    """The arguments that a function writes into, without `out`."""
    arguments = {w.name: w for w in _by_name(func, parameters(func))} if not schemas(func) else {}
    for schema in schemas(func):
        names = {a.name: (None if a.kwarg_only else i, a.default_value) for i, a in enumerate(schema.arguments)}
        marked = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        arguments |= {name: Written(names[name][0], name) for name in marked}
        arguments |= {w.name: w for w in _by_name(func, names)}
    return tuple(arguments.values())


def _by_name(func: Any, names: Mapping[str, tuple[int | None, Any]]) -> tuple[Written, ...]:
    """The arguments that a function writes into by its name, or by those of its arguments, with defaults."""
    first = next(iter(names), "")
    if in_place(func):
        return (Written(0, first),)
    if collective(func):
        sends, name = func.__name__ in ("send", "isend"), "gather_list" if func.__name__ == "gather" else first
        return () if sends or name not in names else (Written(names[name][0], name),)

    def flags(*wanted: str) -> tuple[tuple[int, str, Any], ...]:
        return tuple((names[n][0], n, names[n][1]) for n in wanted if n in names)  # type: ignore[misc]

    arguments = [Written(names[n][0], n, flags(*by)) for n, by in STATISTICS.items() if n in names]
    if "inplace" in names:
        arguments.append(Written(0, first, flags("inplace")))
    if "max_norm" in names:
        arguments.append(Written(1, "weight", flags("max_norm")))
    return tuple(arguments)


def parameters(func: Any) -> dict[str, tuple[int | None, Any]]:
    """The position and default of each argument of a Python function; none for one that has no signature."""
    try:
        arguments = inspect.signature(func).parameters.values()
    except (TypeError, ValueError):
        return {}
    return {
        p.name: (None if p.kind is p.KEYWORD_ONLY else i, None if p.default is p.empty else p.default)
        for i, p in enumerate(arguments)
    }


ATTRIBUTE_OPS = frozenset({"T", "mT", "H", "mH", "data", "real", "imag"})

# the position of the argument whose type and device alone are read: its layout does not matter
DTYPE_ARG = {"to": 1, "type_as": 1, "new_zeros": 0, "new_ones": 0, "new_full": 0, "new_empty": 0}

# functions written out in others: by function, or by name for those that take time to import; and the names of
# arguments that the written-out form calls otherwise
WRITTEN_OUT: dict[Any, Callable[..., Any]] = {}
KERNELS: dict[str, Callable[..., Any]] = {}
KEYWORDS: dict[str, str] = {}
# by written-out function, what gives its results while a forward is recorded, where it needs data
WITHOUT_DATA: dict[Any, Callable[..., Any]] = {}
# functions of which each rank can make its part of the result alone, though no argument is sharded; those of them that
# fill the result with a number; and others that may make a long tensor of short ones, as `rows[:, None] - cols`
SOURCES: set[str] = set()
FILLED: set[str] = set()
OUTER: set[str] = set()
# functions that draw random numbers, and whether a call of each does, by its args and kwargs
DRAWS: dict[str, Callable[[Any, Any], bool]] = {}


def grows(name: str, tensors: Sequence[Any], out: Any) -> bool:
    """Tell whether an operation makes a longer tensor of its operands, such as a mask or a bias of pairs."""
    read = tensors[:1] if name == "embedding" else tensors
    return name in OUTER and name not in DRAWS and bool(read) and out.numel() >= 2 * max(t.numel() for t in read)


class Traits(NamedTuple):
    """The traits of one torch function.

    name: its plain name; metadata: it reads no elements; in_place: it writes into its first argument; dtype_arg: the
    position of an argument that may be a tensor of which only the type is read; decomposition: the function written out
    in others, which returns None for a call that it does not cover; custom: it is an op of another library than
    torch's, and its backward may be written in Python.
    """

    name: str
    metadata: bool
    in_place: bool
    dtype_arg: int | None
    decomposition: Callable[..., Any] | None
    custom: bool

    def written_out(self, mode: Any, args: Any, kwargs: Any) -> Any:
        """The result by the decomposition, whose operations `mode` sees; None if it does not cover the call."""
        if self.decomposition is None or kwargs.get("out") is not None:
            return None
        if self.name == "setitem" and not isinstance(args[1], Tensor):
            return None
        if kwargs:
            kwargs = {KEYWORDS.get(k, k): v for k, v in kwargs.items()}
            if not kwargs.keys() <= argument_names(self.decomposition):
                return None
        with mode:
            return self.decomposition(*args, **kwargs)


@cache
def argument_names(function: Callable[..., Any]) -> frozenset[str]:
    """The names of a function's arguments."""
    return frozenset(inspect.signature(function).parameters)


@lru_cache(maxsize=8192)
def traits_of(func: Any) -> Traits:
    name, attribute = op_name(func)
    return Traits(
        name,
        (attribute and name not in ATTRIBUTE_OPS) or name in METADATA,
        in_place(func),
        DTYPE_ARG.get(name),
        WRITTEN_OUT.get(func) or KERNELS.get(str(func)),
        "::" in name,
    )


# --- functions that need care between stages, by plain names ---------------------------------------------------------

# products mix every element of one operand with every element of the other
PRODUCTS = frozenset(
    "matmul rmatmul bmm mm einsum baddbmm scaled_dot_product_attention flex_attention varlen_attn".split()
)

RANDOM = frozenset(
    """
bernoulli rand_like randn_like normal log_normal uniform exponential cauchy geometric
""".split()
)
# the name of the dropped share, its position among the arguments, and its default
DROPOUTS = {
    **dict.fromkeys(
        "dropout alpha_dropout feature_dropout feature_alpha_dropout dropout1d dropout2d dropout3d".split(),
        ("p", 1, 0.5),
    ),
    "scaled_dot_product_attention": ("dropout_p", 4, 0.0),
}


def draws(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether a call draws random numbers. Dropout with p = 0 draws none, nor does dropout outside of training."""
    if name not in DROPOUTS:
        return name in RANDOM
    named, place, default = DROPOUTS[name]
    p = kwargs.get(named, args[place] if len(args) > place else default)
    if named == "dropout_p":
        return bool(p)
    training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
    return bool(p and training)


# more that draw, and have no rule
WITHOUT_RULE = """
rand randn randint randint_like randperm multinomial poisson binomial random rrelu gumbel_softmax native_dropout
fractional_max_pool2d fractional_max_pool3d svd_lowrank pca_lowrank multi_head_attention_forward
""".split()
RECURRENCES = ("lstm", "gru", "rnn_tanh", "rnn_relu")
DRAWS.update({name: partial(draws, name) for name in (*RANDOM, *DROPOUTS)})
DRAWS.update(dict.fromkeys(WITHOUT_RULE, lambda args, kwargs: True))
DRAWS.update(dict.fromkeys(RECURRENCES, lambda args, kwargs: len(args) < 9 or bool(args[5] and args[6])))

# they allocate memory only if they must, and on a rank's shard it may look as if they need not
DENSE = frozenset("contiguous reshape reshape_as flatten ravel".split())
# they make no new numbers, but copies of those that they are given, or views
REARRANGING = DENSE | frozenset(
    """
expand expand_as broadcast_to repeat tile repeat_interleave getitem select narrow index_select chunk unsafe_chunk split
unsafe_split split_with_sizes tensor_split unbind iter cat concat concatenate stack flip roll clone unfold pixel_shuffle
pixel_unshuffle gather take_along_dim
""".split()
)

# they look like metadata, but read a tensor's data or let others read it; properties in Python, such as
# __cuda_array_interface__, have a name from Python 3.13 on
TELLING = frozenset("repr format data_ptr untyped_storage new_tensor ? __cuda_array_interface__".split())
