"""The functions on DTensors: split, switch, gather and mean, for hand-written loops and losses on shards.

Gradients (contract 2 of the design, docs/numerics.md): the objective is the mean over the sequence-parallel ranks of
each rank's scalar. Averaging parameter gradients over those ranks, as DDP and FSDP2 do, gives the single-process
gradient; nothing else has to be scaled.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Partial

from dsp.comm.collectives import inexact, summed_in
from dsp.comm.gradients import connected_local, covered_exit, global_stride
from dsp.comm.layout import Axis, Cut, chunk, cut_of, factor
from dsp.comm.moves import SplitInput, gather_local, switch_local
from dsp.comm.pending import ChunkedSwitch
from dsp.support.tensors import as_dtensor


def split(x: Tensor, mesh: DeviceMesh, dim: int) -> DTensor:
    """Shard a tensor that is the same on every rank: ``replicated -> Shard(dim)``, 0 bytes.

    x: any shape; mesh: 1-D. Each rank keeps its `torch.chunk` of `dim`. If x is a leaf (a model input), every rank gets
    its whole, true gradient, for one all-gather in backward. If x was computed, each rank's gradient is that of its own
    part and zero elsewhere, as the average over ranks needs it.
    """
    axis, x = Axis.of(mesh), as_dtensor(x)
    if isinstance(x, DTensor):
        way = "use dsp.switch(x, dim)" if any(map(cut_of, x.placements)) else "pass x.to_local()"
        raise TypeError(f"dsp.split takes a plain tensor, got a DTensor {x.placements}; {way}")
    cut = Cut(_dim(dim, x.ndim, "split"))
    if x.requires_grad and x.is_leaf:
        local = SplitInput.apply(x, axis, cut)
    else:
        local = axis.narrow(x, cut)
    return axis.wrap(local, cut, x.shape, guard=True)


def switch(x: DTensor, dim: int, *, axis: str | None = None) -> DTensor:
    """Move the sharded dim: ``Shard(i) -> Shard(dim)``, one all-to-all of (N-1)/N of M/N bytes a rank (paper, eq. 10).

    x: a DTensor sharded over one mesh axis (named by `axis` when its mesh has several). The backward is the reverse
    switch.
    """
    x = as_dtensor(x)
    sp, index, cut, shape = sp_view(x, axis, "switch")
    target = Cut(_free_dim(x, dim, index, "switch"))
    if target == cut:
        return x
    local = switch_local(connected_local(x), cut, target, shape, sp)
    return _rewrap(local, x, sp, index, target)


def start_switch(x: DTensor, dim: int, *, axis: str | None = None) -> SwitchHandle:
    """Begin a switch: work between ``h = start_switch(x, dim)`` and ``h.wait()`` overlaps with it.

    In backward the gradient's switch begins at `wait` and ends at `start_switch`.
    """
    x = as_dtensor(x)
    sp, index, cut, shape = sp_view(x, axis, "start_switch")
    target = Cut(_free_dim(x, dim, index, "start_switch"))
    if target == cut:
        return SwitchHandle(lambda: x)
    fine, (src, dst) = factor(shape, (cut, target))
    local = connected_local(x)
    halves = ChunkedSwitch(src, dst, (fine[src], fine[dst]), sp.group)
    halves.send(local.reshape(sp.local_shape(fine, Cut(src))))
    return SwitchHandle(lambda: _rewrap(halves.join().reshape(sp.local_shape(shape, target)), x, sp, index, target))


class SwitchHandle:
    """The handle that `start_switch` returns; `wait()` gives the switched DTensor."""

    def __init__(self, finish: Any) -> None:
        self._finish = finish

    def wait(self) -> DTensor:
        return self._finish()


def gather(x: DTensor, *, axis: str | None = None) -> Tensor:
    """Gather a sharded tensor on every rank: ``Shard(i) -> replicated``, one all-gather of (N-1)/N of M a rank.

    On a DTensor of one mesh axis the result is a plain tensor; with several (see `axis`) a DTensor that is replicated
    along the gathered one. A plain tensor is returned as it is, so that code also runs on one rank. The backward is a
    reduce-scatter.
    """
    x = as_dtensor(x)
    if isinstance(x, Tensor) and not isinstance(x, DTensor):
        return x
    sp, index, cut, shape = sp_view(x, axis, "gather")
    out = covered_exit(gather_local(connected_local(x), cut, shape, sp))
    if x.device_mesh.ndim == 1:
        return out
    return _rewrap(out, x, sp, index, None)


def hand_over(x: DTensor) -> DTensor:
    """A sharded tensor to pass on to code that sends its gradient back, the next part of a pipeline. 0 bytes.

    x: a DTensor on one mesh axis, or a plain tensor, returned as it is. The gradient that comes back must be that of a
    single process, sharded like x; a parallelized model returns it so for a sharded input. The backward multiplies it
    by N, and averaging over the ranks divides by N again.
    """
    x = as_dtensor(x)
    if isinstance(x, Tensor) and not isinstance(x, DTensor):
        return x
    sp, _, cut, shape = sp_view(x, None, "hand_over")
    return sp.wrap(connected_local(x), cut, shape, hand_over=True)


def mean(x: Tensor, weight: Tensor | None = None) -> Tensor:
    """(Weighted) mean over all elements of a sharded tensor, the same scalar on every rank: a loss on shards.

    x: a DTensor on one mesh axis, or a plain tensor (then this is the ordinary mean). weight: a tensor that broadcasts
    to x, a DTensor with x's layout or plain; the result is sum(x·w) / sum(w). Sums and the result are in fp32 at least.
    """
    x, weight = as_dtensor(x), as_dtensor(weight)
    if not isinstance(x, DTensor):
        if isinstance(weight, DTensor):
            raise TypeError("dsp.mean: the weight is sharded but x is not; gather the weight or shard x like it")
        total, norm = sums(x, weight)
        return total / (norm if norm is not None else x.numel())
    sp, _, cut, _ = sp_view(x, None, "mean")
    w: Tensor | None = None
    if isinstance(weight, DTensor):
        if weight.placements != x.placements or weight.ndim != x.ndim:
            raise ValueError(f"dsp.mean: x is {x.placements} and the weight {weight.placements}; switch one of them")
        w = connected_local(weight)
    elif weight is not None:
        w = weight
        lead = x.ndim - w.ndim
        if lead < 0:
            raise ValueError(f"dsp.mean: the weight {tuple(w.shape)} has more dims than x {tuple(x.shape)}")
        if cut.dim >= lead and w.shape[cut.dim - lead] == x.shape[cut.dim] != 1:
            w = sp.narrow(w, Cut(cut.dim - lead, cut.outer))
    return covered_exit(mean_local(connected_local(x), w, x.numel(), sp))


def _dim(dim: int, ndim: int, name: str) -> int:
    if not isinstance(dim, int) or not -ndim <= dim < ndim:
        raise ValueError(f"dsp.{name}: dim {dim!r} is out of range for a tensor of {ndim} dims")
    return dim % ndim


def _free_dim(x: DTensor, dim: int, index: int, name: str) -> int:
    dim = _dim(dim, x.ndim, name)
    for i, p in enumerate(x.placements):
        if i != index and p.is_shard(dim):
            raise ValueError(
                f"dsp.{name}: dim {dim} is already sharded over another mesh axis ({x.placements}); choose another"
            )
    return dim


def _rewrap(local: Tensor, like: DTensor, sp: Axis, index: int, cut: Cut | None) -> DTensor:
    if like.device_mesh.ndim == 1 and cut is not None:
        return sp.wrap(local, cut, like.shape, guard=True)
    placements = list(like.placements)
    placements[index] = cut.placement() if cut else Replicate()
    return DTensor.from_local(
        local, like.device_mesh, placements, run_check=False, shape=like.shape, stride=global_stride(local, like.shape)
    )


def mean_local(local: Tensor, weight: Tensor | None, count: int, sp: Axis) -> Tensor:
    total, norm = sums(local, weight)
    if norm is None:
        return torch.ops.dsp.all_reduce(total, sp.group) / count
    both = torch.ops.dsp.all_reduce(torch.stack([total, norm]), sp.group)
    return both[0] / both[1]


def sums(x: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor | None]:
    wide = summed_in(x.dtype) if inexact(x) else torch.float32
    if weight is None:
        return x.sum(dtype=wide), None
    w = weight.to(wide).expand(x.shape)
    return (x.to(wide) * w).sum(), w.sum()


def sp_view(x: DTensor, axis: str | None, name: str) -> tuple[Axis, int, Cut, list[int]]:
    """The mesh axis to work on, its index, how x is cut there, and the shape of x within that axis' group."""
    if not isinstance(x, DTensor):
        raise TypeError(
            f"dsp.{name} takes a DTensor, got {type(x).__name__}; make one with dsp.split(x, mesh, dim), or with "
            "DTensor.from_local when each rank already holds its part"
        )
    mesh = x.device_mesh
    if axis is None:
        if mesh.ndim > 1:
            raise ValueError(
                f"dsp.{name}: this DTensor lives on {mesh.ndim} mesh axes {mesh.mesh_dim_names}; say which one carries "
                'the sequence, axis="sp"'
            )
        index = 0
    else:
        names = mesh.mesh_dim_names or ()
        if axis not in names:
            raise ValueError(f"dsp.{name}: no mesh axis {axis!r}; this DTensor has {names or 'unnamed axes'}")
        index = names.index(axis)
    for p in x.placements:
        if isinstance(p, Partial):
            raise ValueError(
                f"dsp.{name}: the tensor is {p}, a sum that has not been taken yet; reduce it first, "
                "for example x.redistribute(placements=[Replicate()])"
            )
    cut = cut_of(x.placements[index])
    if cut is None:
        raise ValueError(
            f"dsp.{name}: the tensor is {x.placements[index]} on the sequence axis, not sharded; "
            "split it first, with dsp.split(x.to_local(), mesh, dim)"
        )
    shape = list(x.shape)
    for i, p in enumerate(x.placements):
        across = cut_of(p)
        if i == index or across is None:
            continue
        if across.outer != 1 or across.dim == cut.dim:
            raise ValueError(f"dsp.{name}: {x.placements} shards one dim over two mesh axes; shard another dim")
        shape[across.dim] = chunk(shape[across.dim], mesh.size(i), mesh.get_local_rank(i))[1]
    sub = mesh if mesh.ndim == 1 else mesh[mesh.mesh_dim_names[index]]  # type: ignore[index]
    return Axis.of(sub), index, cut, shape
