"""Layouts: how a tensor is cut into chunks, its DTensor placement, and the way between local tensors and DTensors.

A `Cut` names one sharded dim of a tensor. Chunks follow `torch.chunk`: 5 frames over 4 ranks are 2, 2, 1 and 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from dsp.comm.gradients import GuardedWrap, HandedOver, Wrap, global_stride
from dsp.comm.wire import AS_IT_IS, Wire
from dsp.planner import Extent, chunk_sizes
from dsp.support.private import DTensorSpec, TensorMeta, _StridedShard

if TYPE_CHECKING:
    from dsp.comm.node_routes import Ways
    from dsp.comm.routes import Route


class Cut(NamedTuple):
    """The sharded dim of a tensor. With `outer` > 1 the dim is a fold ``(outer rest)`` of which `rest` is sharded.

    An `outer` of several lengths says that the dim is a concatenation of pieces of these lengths, such as text and
    video. Each piece is sharded on its own, and a rank holds its parts of the pieces, one after the other.
    """

    dim: int
    outer: int | tuple[int, ...] = 1

    @classmethod
    def of_pieces(cls, dim: int, pieces: tuple[int, ...]) -> Cut:
        """The cut of a dim whose pieces of these lengths are each sharded on their own; equal ones are a fold."""
        return cls(dim, pieces if len({*pieces}) > 1 else len(pieces))

    @property
    def joined(self) -> bool:
        return type(self.outer) is tuple

    @property
    def folds(self) -> int:
        """The number of equal pieces of a dim that is not joined."""
        assert isinstance(self.outer, int)
        return self.outer

    def pieces(self, size: int) -> tuple[int, ...]:
        """The lengths of the pieces, each sharded on its own, of a dim of `size`."""
        return (size // self.outer,) * self.outer if isinstance(self.outer, int) else self.outer

    def extent(self, size: int) -> Extent:
        """The length that is shared out among ranks: of the inner part of a fold, or of each piece of a joined dim."""
        return size // self.outer if isinstance(self.outer, int) else self.outer

    def local_size(self, size: int, n: int, rank: int) -> int:
        """The length that a rank holds of a dim of `size`."""
        length = chunk_sizes(self.extent(size), n)[rank]
        return self.outer * length if isinstance(self.outer, int) else length

    def placement(self) -> Placement:
        if self.joined:
            raise ValueError(
                f"dim {self.dim} is a concatenation of pieces {list(self.pieces(0))}, each sharded on its own, for "
                "which DTensor has no placement; bring the tensor into another layout between stages first, or gather "
                "it"
            )
        return Shard(self.dim) if self.outer == 1 else _StridedShard(self.dim, split_factor=self.folds)

    def fits(self, shape: Sequence[int]) -> bool:
        """Tell whether a tensor of this shape can have this cut."""
        return self.dim < len(shape) and sum(self.pieces(shape[self.dim])) == shape[self.dim]


def cut_of(placement: Placement) -> Cut | None:
    if isinstance(placement, _StridedShard):
        return Cut(placement.dim, int(placement.split_factor))
    if isinstance(placement, Shard):
        return Cut(placement.dim)
    return None


def cuts_of(placements: Mapping[str, Placement]) -> dict[str, Cut]:
    """The cuts of the placements that shard a dim."""
    cuts = {name: cut_of(placement) for name, placement in placements.items()}
    return {name: cut for name, cut in cuts.items() if cut is not None}


def chunk(size: int, n: int, rank: int) -> tuple[int, int]:
    """(start, length) of one rank's chunk of a dim of `size`."""
    full = -(-size // n)
    start = min(rank * full, size)
    return start, min(full, size - start)


def fold_fits(size: int, inner: int, n: int) -> bool:
    """Tell whether a fold ``(outer size inner)`` can be sharded along `size`: no inner part may straddle two ranks."""
    return inner == 1 or size % n == 0


def unwritable(x: Tensor) -> bool:
    """Tell whether a view of x, made now, could not be written in place later: autograd refuses that for views made
    under no_grad."""
    with torch._C.DisableTorchFunction():
        return not x.requires_grad


@dataclass(frozen=True)
class Axis:
    """The sequence-parallel mesh axis as one rank sees it.

    wire: the formats in which switches travel; ways: their routes over several nodes (None: one all-to-all).
    """

    mesh: DeviceMesh
    size: int
    rank: int
    group: str
    wire: Wire = AS_IT_IS
    ways: Ways | None = None
    specs: dict[Any, DTensorSpec] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def formats(self) -> tuple[str, str]:
        """The formats in which a switch and its adjoint travel."""
        return self.wire.names

    @cached_property
    def switching(self) -> str:
        """The name of the group as a switch takes it: with the ways behind it (`dsp.comm.node_routes`)."""
        return self.group if self.ways is None else self.ways.on(self.group)

    def __deepcopy__(self, memo: dict[int, Any]) -> Axis:
        return self  # a copy of a model has the same ranks

    @classmethod
    def of(cls, mesh: DeviceMesh, wire: Wire = AS_IT_IS, route: Route | None = None) -> Axis:
        if not isinstance(mesh, DeviceMesh):
            raise TypeError(
                f"mesh must be a 1-D torch DeviceMesh, not {type(mesh).__name__}; "
                'make one with init_device_mesh("cpu", (4,), mesh_dim_names=("sp",))'
            )
        if mesh.ndim != 1:
            raise ValueError(
                f"mesh must be 1-D, but has axes {mesh.mesh_dim_names or mesh.ndim}; pass the sequence-parallel slice, "
                'mesh["sp"]'
            )
        ways = None if route is None else route.over(mesh.size())
        return cls(mesh, mesh.size(), mesh.get_local_rank(), mesh.get_group().group_name, wire, ways)

    def local_shape(self, shape: Sequence[int], cut: Cut) -> tuple[int, ...]:
        return (*shape[: cut.dim], cut.local_size(shape[cut.dim], self.size, self.rank), *shape[cut.dim + 1 :])

    def narrow(self, x: Tensor, cut: Cut) -> Tensor:
        """This rank's part of a replicated tensor. It sends nothing, and is a view unless the dim is a fold."""
        if not torch.is_grad_enabled() and unwritable(x):
            with torch.enable_grad():
                return self.narrow(x, cut)
        if cut.outer == 1:
            return x.narrow(cut.dim, *chunk(x.shape[cut.dim], self.size, self.rank))
        if cut.joined:
            pieces = x.split(cut.pieces(x.shape[cut.dim]), cut.dim)
            return torch.cat([self.narrow(piece, Cut(cut.dim)) for piece in pieces], cut.dim)
        extent = x.shape[cut.dim] // cut.folds
        start, length = chunk(extent, self.size, self.rank)
        unfolded = x.unflatten(cut.dim, (cut.folds, extent)).narrow(cut.dim + 1, start, length)
        return unfolded.flatten(cut.dim, cut.dim + 1)

    def wrap(
        self, local: Tensor, cut: Cut, shape: Sequence[int], *, guard: bool = False, hand_over: bool = False
    ) -> DTensor:
        """The DTensor of global `shape` of which `local` is this rank's part, connected to it by autograd.

        With `guard` its backward refuses gradients that the gradient contract does not cover (see `ExitGuard`); with
        `hand_over` it takes the gradient of a single process.
        """
        key = (cut, tuple(shape), local.stride(), local.dtype)
        spec = self.specs.get(key)
        if spec is None:
            stride = global_stride(local, shape)
            meta = TensorMeta(torch.Size(shape), stride, local.dtype)
            spec = DTensorSpec(self.mesh, (cut.placement(),), tensor_meta=meta)
            if len(self.specs) >= 4096:
                self.specs.clear()
            self.specs[key] = spec
        expected = self.local_shape(shape, cut)
        if tuple(local.shape) != expected:
            raise RuntimeError(f"rank {self.rank} holds {tuple(local.shape)} where its share is {expected}")
        with torch._C.DisableTorchFunction():
            return (HandedOver if hand_over else GuardedWrap if guard else Wrap).apply(local, spec)


def factor(shape: Sequence[int], cuts: Sequence[Cut]) -> tuple[list[int], list[int]]:
    """The shape with the folds of `cuts` opened, and the index of each cut's sharded dim in it."""
    fine: list[int] = []
    dims = [0] * len(cuts)
    for d, size in enumerate(shape):
        marks = sorted({1, *(c.folds for c in cuts if c.dim == d)}) if size else [1]
        for i, mark in enumerate(marks):
            nxt = marks[i + 1] if i + 1 < len(marks) else size
            if mark == 0 or nxt % mark:
                raise ValueError(f"axis {d} of {tuple(shape)} is no fold: {marks[1:]} do not divide its size")
            for k, c in enumerate(cuts):
                if c.dim == d and c.outer == mark:
                    dims[k] = len(fine)
            fine.append(nxt // mark if size else 0)
    return fine, dims


def separable(shape: Sequence[int], one: Cut, two: Cut, n: int) -> bool:
    """Tell whether two cuts are along different dims, so that one all-to-all leads from one to the other."""
    if one.dim != two.dim:
        return True
    if one.joined or two.joined:
        return False
    coarse, fine = sorted((one, two), key=lambda c: c.folds)
    if coarse == fine or fine.folds % coarse.folds:
        return False
    return fold_fits(fine.folds // coarse.folds, shape[one.dim] // fine.folds, n)
