"""The sharded tensor between stages: this rank's part, in a thin subclass of Tensor that knows the global shape.

Between its stages a model sees `Sharded` tensors. Their shape is the global one; operations run on the local data, by
the rules of `dsp.rules` (see `dsp.run.glue`). Other code can use one as the DTensor that it stands for: `placements`,
`device_mesh`, `to_local`, `full_tensor`, `redistribute`, and any operation outside a forward.
"""

from __future__ import annotations

import math
from contextvars import ContextVar
from functools import cache
from numbers import Number
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dsp.layout import At, unwritable
from dsp.private import OpOverload, backward_pass, is_view, pytree, set_backward_hooks, storage_id
from dsp.tensors import NO

MIXED = "got mixed torch.Tensor and DTensor"  # in torch's error
COMPARING = (Tensor.__eq__, Tensor.__ne__)
ACTIVE: ContextVar[tuple[Any, Any] | None] = ContextVar("dsp_active", default=None)  # the forward that runs now


class Sharded(Tensor):
    """This rank's part of a tensor, with its layout.

    at: the layout (global shape and cut), one object for equal layouts. number: of this tensor in its forward's record,
    plus `Run.first`. viewed_from: of a view taken between stages, its base and the operation (`dsp.run.views.View`).
    copies: the same tensor in other layouts (`Copies`). part: the type of the part, `Tensor` but for `sharded_type`.
    """

    at: At
    number: int = -1
    viewed_from: Any = None
    copies: Any = None
    part: type[Tensor] = Tensor
    gathered: Any  # the full tensor, by the gradient contract (`dsp.moves`)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # in backward all tensors are parts, the saved ones too, except while a checkpoint runs its forward again
        backward = backward_pass() != -1 and ACTIVE.get() is None
        known = func in READ or func in AS_LOCAL
        if func in READ and not backward:
            return READ[func](*args, **kwargs)
        if known or isinstance(func, OpOverload):  # an OpOverload runs below autograd, where modes see parts
            with NO():
                return func(*args, **kwargs)
        if backward:
            if func in SAVED and isinstance(args[0], Sharded):
                with NO():
                    return carry(plain(func(*args, **kwargs)), args[0].at)
            raise RuntimeError(
                "dsp cannot run the backward of an operation between stages on shards: it uses a sharded tensor that "
                "was saved in the forward. If this is activation checkpointing, use "
                "use_reentrant=False; if it is an autograd.Function of your own, put it into a stage, a submodule "
                "with a pattern, where tensors are local"
            )
        if func in COMPARING and not isinstance(args[1], (Tensor, Number)):
            return NotImplemented  # Python then evaluates x == "a" to False
        args, kwargs = pytree.tree_map_only(Sharded, dtensor, (args, kwargs))
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            if MIXED not in str(error):
                raise
            raise RuntimeError(
                f"{getattr(func, '__name__', func)}() outside of a forward got a plain tensor and a sharded one. A "
                "forward of a parallelized model left the sharded one in an object, such as a cache: call "
                "dsp.gather(x) on it first"
            ) from error

    @property
    def device_mesh(self) -> DeviceMesh:
        return self.at.axis.mesh

    @property
    def placements(self) -> Any:
        return (self.at.cut.placement(),)

    def to_local(self, *, grad_placements: Any = None) -> Tensor:
        if grad_placements is None:
            return plain(arrived(self))
        return dtensor(self).to_local(grad_placements=grad_placements)

    def full_tensor(self, **kwargs: Any) -> Tensor:
        return dtensor(self).full_tensor(**kwargs) if kwargs else self.gathered()

    def as_dtensor(self) -> DTensor:
        return dtensor(self)

    def redistribute(self, *args: Any, **kwargs: Any) -> DTensor:
        return dtensor(self).redistribute(*args, **kwargs)


class Moved(Sharded):
    """A tensor that an operation wrote in another layout; `now` is the tensor with the written values."""

    now: Sharded


def plain(t: Any) -> Any:
    """The part of a sharded tensor as a plain tensor, connected by autograd; any other value as it is."""
    if not isinstance(t, Sharded):
        return t
    with torch._C.DisableTorchFunction():
        return t.as_subclass(Tensor) if t.part is Tensor else t.view_as(t)


def carry(local: Tensor, at: At, number: int = -1) -> Sharded:
    """A sharded tensor whose part on this rank is `local`."""
    if tuple(local.shape) != at.local:
        raise RuntimeError(f"rank {at.axis.rank} holds {tuple(local.shape)} where its share is {at.local}")
    if not torch.is_grad_enabled() and unwritable(local):
        with torch.enable_grad():
            return carry(local, at, number)
    with torch._C.DisableTorchFunction():
        if type(local) is Tensor or isinstance(local, nn.Parameter):
            t = local.as_subclass(Sharded)
        else:
            t = local.view_as(local)  # type: ignore[assignment]
            t.__class__ = sharded_type(type(t))
    t.at, t.number = at, number
    return t


@cache
def sharded_type(part: type[Tensor]) -> type[Sharded]:
    """The class of sharded tensors whose parts have a type of their own, such as fake tensors."""
    return Sharded if part is Tensor else type(f"Sharded{part.__name__}", (Sharded, part), {"part": part})


def arrived(t: Sharded) -> Sharded:
    """The tensor, after a wait for its data: code that the running forward does not see is about to read it."""
    if (active := ACTIVE.get()) is not None:
        active[1].arrive()
    return t


def dtensor(t: Sharded) -> DTensor:
    """The DTensor for which a sharded tensor stands."""
    t = arrived(t.now if isinstance(t, Moved) else t)
    return t.at.axis.wrap(plain(t), t.at.cut, t.at.shape, guard=True)


def as_dtensor(t: Any) -> Any:
    """The DTensor for which a tensor between stages stands, or the tensor if it is replicated; other values as they
    are."""
    convert = getattr(t, "as_dtensor", None)
    return t if convert is None else convert()


def _size(t: Sharded, dim: int | None = None) -> Any:
    return t.at.shape if dim is None else t.at.shape[dim]


def laid_out(shape: torch.Size, name: str, *args: Any, **kwargs: Any) -> Any:
    """`stride` or `is_contiguous` of a tensor that may be sharded, as if it were contiguous.

    The strides of parts may differ from rank to rank; a forward that read them could branch differently on each.
    """
    return getattr(torch.empty(shape, device="meta"), name)(*args, **kwargs)


def _stride(t: Sharded, *args: Any, **kwargs: Any) -> Any:
    return laid_out(t.at.shape, "stride", *args, **kwargs)


def _contiguous(t: Sharded, *args: Any, **kwargs: Any) -> bool:
    return bool(laid_out(t.at.shape, "is_contiguous", *args, **kwargs))


def _data_ptr(t: Sharded) -> int:
    own = plain(t)
    return own.data_ptr() or storage_id(own.untyped_storage())  # an empty part has no address


def _described(t: Sharded, *_: Any, **__: Any) -> str:
    return f"{plain(t)!r}, the part of rank {t.at.axis.rank} of {list(t.at.shape)} sharded along dim {t.at.cut.dim}"


def _numel(t: Sharded) -> int:
    return math.prod(t.at.shape)


def _grad(t: Sharded) -> Tensor | None:
    """The gradient of a single process: in backward a rank's part is N times as large (docs/numerics.md)."""
    with NO():
        grad = t.grad
    return None if grad is None else carry(plain(grad) / t.at.axis.size, t.at)


def _same_size(t: Sharded, other: Tensor) -> bool:
    return t.at.shape == other.shape


# functions that are answered for the whole tensor
READ: dict[Any, Any] = {
    Tensor.shape.__get__: lambda t: t.at.shape,  # type: ignore[attr-defined]
    Tensor.size: _size,
    Tensor.ndim.__get__: lambda t: len(t.at.shape),  # type: ignore[attr-defined]
    Tensor.dim: lambda t: len(t.at.shape),
    Tensor.ndimension: lambda t: len(t.at.shape),
    Tensor.numel: _numel,
    torch.numel: _numel,
    Tensor.nelement: _numel,
    Tensor.nbytes.__get__: lambda t: _numel(t) * plain(t).element_size(),  # type: ignore[attr-defined]
    Tensor.__len__: lambda t: t.at.shape[0],
    Tensor.stride: _stride,
    Tensor.is_contiguous: _contiguous,
    Tensor.data_ptr: _data_ptr,
    Tensor.is_same_size: _same_size,
    Tensor.grad.__get__: _grad,  # type: ignore[union-attr]
    Tensor.__repr__: _described,
    Tensor.__format__: _described,
}
# what `torch.autograd.graph.save_on_cpu` calls in backward: it brings a saved part back to its device
SAVED = frozenset({Tensor.to, Tensor.cpu, Tensor.cuda})
# functions with the same answer for the part as for the whole
AS_LOCAL = frozenset(
    getattr(Tensor, name).__get__
    for name in """
dtype device layout requires_grad grad_fn is_leaf output_nr itemsize is_cuda is_cpu is_meta is_sparse is_quantized
_version retains_grad
""".split()
) | {
    Tensor.element_size, Tensor.get_device, Tensor.is_floating_point, Tensor.is_complex, Tensor.is_signed,
    Tensor.is_inference, Tensor.untyped_storage, Tensor.storage_offset, Tensor.register_hook,
    Tensor.retain_grad, Tensor.new_empty, Tensor.new_zeros, Tensor.new_ones, Tensor.new_full, Tensor.new_tensor,
    set_backward_hooks, Tensor.is_pinned, Tensor.is_shared, Tensor.is_conj, Tensor.is_neg, is_view,
    torch.is_floating_point,
    torch.is_complex, torch.is_inference, torch.is_conj, torch.is_neg, torch.is_signed, torch.result_type,
}  # fmt: skip
