"""The traits of torch functions: plain names, and which functions need care between stages."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsp.private import set_backward_hooks
from dsp.rules.written_out import KERNELS, KEYWORDS, WRITTEN_OUT

BY_NUMBER = frozenset({"apply", "map", "map2"})  # they call Python for every number
STRIDED = ("as_strided", "as_strided_copy", "as_strided_scatter")  # they read memory as it lies: each rank has its own
UNRUNNABLE = {
    "autograd_grad": "torch.autograd.grad()", **{name: f"Tensor.{name}_()" for name in BY_NUMBER},
    **{name: f"{name}()" for name in STRIDED},
}  # fmt: skip
METADATA = frozenset(
    """
size dim numel nelement ndimension stride is_contiguous is_floating_point is_complex is_signed is_inference
element_size get_device storage_offset is_same_size len repr hash format str is_nonzero_meta is_tensor is_storage
promote_types result_type can_cast broadcast_shapes is_shared is_pinned new_tensor
requires_grad data_ptr untyped_storage get_default_dtype finfo iinfo reduce_ex backward register_hook retain_grad dir
has_names names is_conj is_neg is_quantized is_sparse is_mkldnn device device.default
""".split()
)


# functions whose plain name is that of another: what reads a number is no cast
HOMONYMS = {
    torch.embedding: "embedding_of_weight",
    torch.ops.aten.detach.default: "detach",  # of what an autograd.Function saves of its results
    torch.binary_cross_entropy_with_logits: "binary_cross_entropy_by_number",
    torch.nn.functional.unfold: "im2col",
    torch.autograd.grad: "autograd_grad",
    Tensor.requires_grad.__set__: "requires_grad",  # type: ignore[attr-defined]
    Tensor.requires_grad_: "requires_grad",
    set_backward_hooks: "register_hook",
    **{getattr(Tensor, name): name for name in ("__bool__", "__int__", "__long__", "__float__", "__complex__")},
}


def op_name(func: Any) -> tuple[str, bool]:
    """(plain name, whether it reads an attribute): ``Tensor.__iadd__`` is "iadd", ``x.shape`` is ("shape", True)."""
    if func in HOMONYMS:
        return HOMONYMS[func], False
    name = getattr(func, "__name__", str(func))
    if name == "__get__":
        return getattr(func.__self__, "__name__", "?"), True
    return name.strip("_").removeprefix("linalg_"), False


def in_place(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or name in _INPLACE_DUNDER


_INPLACE_DUNDER = frozenset(
    """
__setitem__ __iadd__ __isub__ __imul__ __idiv__ __itruediv__ __ifloordiv__ __imod__ __ipow__ __iand__ __ior__ __ixor__
__ilshift__ __irshift__
""".split()
)
ATTRIBUTE_OPS = frozenset({"T", "mT", "H", "mH", "data", "real", "imag"})


# products mix every element of one operand with every element of the other
PRODUCTS = frozenset(
    "matmul rmatmul bmm mm einsum baddbmm scaled_dot_product_attention flex_attention varlen_attn".split()
)


RANDOM = frozenset(
    """
bernoulli rand_like randn_like normal log_normal uniform exponential cauchy geometric
""".split()
)
# the name of the share of what is put out, its place among the arguments, and its default
DROPOUTS = {
    **dict.fromkeys(
        "dropout alpha_dropout feature_dropout feature_alpha_dropout dropout1d dropout2d dropout3d".split(),
        ("p", 1, 0.5),
    ),
    "scaled_dot_product_attention": ("dropout_p", 4, 0.0),
}


def draws(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether a call takes random numbers. Dropout of nothing takes none, nor does any outside of training."""
    if name not in DROPOUTS:
        return name in RANDOM
    named, place, default = DROPOUTS[name]
    p = kwargs.get(named, args[place] if len(args) > place else default)
    if named == "dropout_p":
        return bool(p)
    training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
    return bool(p and training)


# they make memory of their own where they must, and a rank's part may look as if it need not
DENSE = frozenset("contiguous reshape reshape_as flatten ravel".split())
# they are views, the dense ones where the argument lies so; on a part, which may lie otherwise, any may be a copy
FOLDS = DENSE | {"view", "view_as", "unflatten", "view_as_complex"}
# their results may be views of the first argument, though a switch of it does not follow them
ALIASES = DENSE | frozenset(
    """
getitem select narrow chunk split split_with_sizes tensor_split unbind unsafe_chunk unsafe_split expand expand_as
broadcast_to iter unfold to type_as type detach data alias real imag view_as_real view_as_complex float double half
bfloat16 conj positive dropout
""".split()
)


# they read no number, of a tensor that lies densely in memory and is of the type that they ask for
LOOKS = frozenset(
    """
view view_as unflatten transpose swapaxes swapdims permute movedim moveaxis unsqueeze squeeze T mT select narrow chunk
split split_with_sizes tensor_split unbind unsafe_chunk unsafe_split expand expand_as broadcast_to to type_as
""".split()
)
# of what tells of a tensor: what reads it, or lets others read it; properties in Python, such as
# __cuda_array_interface__, have a name from Python 3.13 on
TELLING = frozenset("repr format data_ptr untyped_storage reduce_ex new_tensor ? __cuda_array_interface__".split())


# which argument only gives a type and a device: how it lies is no matter
DTYPE_ARG = {"to": 1, "type_as": 1, "new_zeros": 0, "new_ones": 0, "new_full": 0, "new_empty": 0}


class Traits(NamedTuple):
    """The traits of one torch function.

    name: its plain name; metadata: it reads no numbers; in_place: it writes into its first argument; dtype_arg: the
    position of an argument that may be a tensor of which the type alone is read; decomposition: the same function,
    written out in others, which returns None for a call that it does not cover.
    """

    name: str
    metadata: bool
    in_place: bool
    dtype_arg: int | None
    decomposition: Callable[..., Any] | None

    def written_out(self, mode: Any, args: Any, kwargs: Any) -> Any:
        """The result by the decomposition, whose operations `mode` sees; None of a call that has none."""
        if self.decomposition is None or kwargs.get("out") is not None:
            return None
        if self.name == "setitem" and not isinstance(args[1], Tensor):
            return None
        if kwargs:
            kwargs = {KEYWORDS.get(k, k): v for k, v in kwargs.items()}
            if not kwargs.keys() <= taken(self.decomposition):
                return None
        with mode:
            return self.decomposition(*args, **kwargs)


@cache
def taken(function: Callable[..., Any]) -> frozenset[str]:
    """The arguments that it takes by name."""
    return frozenset(inspect.signature(function).parameters)


@lru_cache(maxsize=8192)
def traits(func: Any) -> Traits:
    name, attribute = op_name(func)
    return Traits(
        name,
        (attribute and name not in ATTRIBUTE_OPS) or name in METADATA,
        in_place(func),
        DTYPE_ARG.get(name),
        WRITTEN_OUT.get(func) or KERNELS.get(str(func)),
    )
