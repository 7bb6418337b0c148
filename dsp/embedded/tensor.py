"""Megatron's tensor parallelism (Shoeybi et al., arXiv 1909.08053): linear layers are cut over ranks.

Layers before an operation on separate heads or channels are cut by columns, the layer after it by rows; each rank then
has a summand of the output. A region is a module that does this to an activation of M bytes: attention, or an MLP.
Megatron-LM replicates activations and sums the ranks' outputs in an all-reduce, 2M (N-1)/N bytes a rank. Megatron-SP
(Korthikanti et al., arXiv 2205.05198) shards activations along the sequence: an all-gather before a region and a
reduce-scatter after it, the same bytes. Two blocks of two regions each send 8M (N-1)/N, and as much in backward.

The adjoints are those of DSP (docs/numerics.md): inside a region gradients are N times those of a single process, so
gradients of weights that are not cut (such as a norm of heads) are averaged over ranks like all others. Only one rank
holds a given shard of a cut weight; there is no average, so its gradient is divided by N here. Megatron-LM's backward
therefore has its all-reduce at the end of a region, not at its beginning: one per region either way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from dsp.comm.layout import Axis
from dsp.comm.moves import ScaleGradient
from dsp.embedded.core import Distributed
from dsp.planner import chunk_sizes
from dsp.stages.methods import CommBytes, RankPart, Sent
from dsp.stages.notation import NotationError, TensorPattern
from dsp.stages.stage import find_modules


@dataclass(frozen=True)
class Linear:
    """A linear layer to cut by its columns (outputs) or rows (inputs).

    parts: for fused matrices, the number of heads of each, which is cut by itself; () for one matrix of channels.
    """

    name: str
    module: nn.Linear
    columns: bool
    parts: tuple[int, ...]

    @classmethod
    def read(cls, name: str, module: nn.Module, text: str) -> Linear:
        """Parse "columns" or "rows", optionally with heads, as "columns 16 4 4" for queries, keys and values."""
        kind, *heads = text.split()
        if kind not in ("columns", "rows") or any(not h.isdecimal() or h == "0" for h in heads):
            raise NotationError(
                f"tensor_parallel: expected 'columns' or 'rows' for {name!r}, and after it the number of heads of each "
                f"matrix in the layer, if any, as in 'columns 16 4 4' for queries, keys and values; got {text!r}"
            )
        if not isinstance(module, nn.Linear):
            raise NotationError(f"tensor_parallel: {name!r} is a {type(module).__name__}; only nn.Linear can be cut")
        size = module.out_features if kind == "columns" else module.in_features
        parts = tuple(map(int, heads))
        if parts and size % sum(parts):
            raise NotationError(f"tensor_parallel: {name!r} has {size} {kind}, which {sum(parts)} heads do not divide")
        return cls(name, module, kind == "columns", parts)

    def index(self, n: int, rank: int) -> Tensor:
        """The indices of the columns or rows that one of n ranks holds."""
        size = self.module.out_features if self.columns else self.module.in_features
        parts = self.parts or (size,)
        if any(p % n for p in parts):
            counts = f"{' and '.join(map(str, dict.fromkeys(parts)))} {'heads' if self.parts else 'channels'}"
            raise ValueError(
                f"{self.name!r}: {counts} do not divide over {n} ranks; take a number of ranks that divides "
                f"{math.gcd(*parts)} (in the trainer parallel.sp), or method='dsp' or 'ring', which do not cut weights"
            )
        unit, start, indices = size // sum(parts), 0, []
        for p in parts:
            length = p // n * unit
            indices.append(torch.arange(start + rank * length, start + (rank + 1) * length, device="cpu"))
            start += p * unit
        return torch.cat(indices)

    def cut(self, axis: Axis) -> None:
        """Replace the weights by this rank's shards, as DTensors on the axis."""
        module, index = self.module, self.index(axis.size, axis.rank)
        names = ("weight", "bias") if self.columns else ("weight",)
        for name in names:
            p = getattr(module, name)
            if p is None:
                continue
            if isinstance(p, DTensor):
                raise ValueError(f"{self.name!r} is sharded already; parallelize first, then fully_shard")
            dim = 0 if self.columns else 1
            local = p.detach().index_select(dim, index.to(p.device))
            whole = DTensor.from_local(local, axis.mesh, [Shard(dim)], run_check=False)
            setattr(module, name, nn.Parameter(whole, requires_grad=p.requires_grad))
        module.forward = _Local(self, axis.size)  # type: ignore[method-assign, assignment]


class _Local:
    """A linear layer's forward on its shard of the weights; by rows without the bias, which the sum gets once."""

    def __init__(self, linear: Linear, n: int) -> None:
        self.linear, self.n = linear, n

    def local(self, p: Tensor | None, like: Tensor) -> Tensor | None:
        if not isinstance(p, DTensor):
            return p
        return ScaleGradient.apply(p.to_local(), self.n).to(like.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        module = self.linear.module
        weight = self.local(module.weight, x)
        assert weight is not None
        return F.linear(x, weight, self.local(module.bias, x) if self.linear.columns else None)


class Region(Distributed):
    """A module with linear layers cut by columns, then operations that mix no heads or channels, then one cut by rows.

    Its first argument and its output are activations laid out as `pattern`, the pattern of its stage's first input.
    Other arguments, and operations on them before the columns, are the same on all ranks.
    """

    def __init__(
        self, label: str, name: str, module: nn.Module, linears: Sequence[Linear], pattern: TensorPattern
    ) -> None:
        super().__init__(name, module)
        self.label, self.linears, self.pattern = label, linears, pattern
        rows = [x.module for x in linears if not x.columns]
        if len(rows) != 1 or len(linears) < 2:
            raise NotationError(
                f"tensor_parallel: expected in {name!r} one or more linear layers with 'columns', and one with 'rows' "
                f"as its last layer; got {', '.join(x.name for x in linears)}"
            )
        self.rows = rows[0]
        cut = [(x.module.weight, x.module.bias if x.columns else None) for x in linears]
        self.cut = sum(p.numel() for pair in cut for p in pair if p is not None)

    def install(self, axis: Axis) -> None:
        if not any(isinstance(x.module.__dict__.get("forward"), _Local) for x in self.linears):
            for linear in self.linears:
                linear.cut(axis)
        super().install(axis)

    def sends(self, args: Any, kwargs: Any, along: str | None, sizes: Mapping[str, int], n: int) -> CommBytes:
        for linear in self.linears:
            linear.index(n, 0)
        if n == 1:
            return CommBytes()
        x = self.activation(args)
        x_bytes = x.numel() * x.element_size()
        y_bytes = x_bytes // x.shape[-1] * self.rows.out_features
        if along is None:
            both = {"all_reduce": (-(-2 * y_bytes * (n - 1) // n), 1)}
            return CommBytes(both, both, both)
        size = x.shape[self.axis_of(along)]
        parts = chunk_sizes(size, n)

        def there_and_back(gather_bytes: int, scatter_bytes: int) -> Sent:
            """The busiest rank's traffic in an all-gather of `there` bytes and a reduce-scatter of `back` bytes."""
            sent = [(p * (n - 1) * gather_bytes // size, (size - p) * scatter_bytes // size) for p in parts]
            gather, scatter = max(sent, key=sum)
            return {"gather": (gather, 1), "reduce_scatter": (scatter, 1)}

        forward = there_and_back(x_bytes, y_bytes)
        return CommBytes(forward, there_and_back(y_bytes, x_bytes), forward)

    def activation(self, args: Any) -> Tensor:
        if not args or not isinstance(args[0], Tensor) or args[0].ndim != len(self.pattern.axes):
            got = tuple(args[0].shape) if args and isinstance(args[0], Tensor) else "none"
            raise NotationError(
                f"tensor_parallel: {self.name!r} should take its stage's activation, '{self.pattern}', as its first "
                f"positional argument, and got {got}"
            )
        return args[0]

    def axis_of(self, along: str) -> int:
        axis = self.pattern.axis_of(along)
        if len(self.pattern.axes[axis]) > 1:
            raise NotationError(
                f"{self.label} along {along!r}: '{self.pattern}' has {along!r} in a fold; give it its own axis"
            )
        return axis

    def alone(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        raise RuntimeError(
            f"{self.name!r} was called outside of its parallelized model, on a rank that holds only a shard of its "
            "weights; call the model itself, on every rank"
        )

    def run(self, place: RankPart, forward: Callable[..., Tensor], args: Any, kwargs: Any) -> Tensor:
        group = place.axis.group
        if place.dim is None:
            y = torch.ops.dsp.all_reduce(forward(*args, **kwargs), group)
        else:
            x, axis = self.activation(args), self.axis_of(place.dim)
            if x.shape[axis] != max(place.local_size, 1):
                raise NotationError(
                    f"tensor_parallel: {self.name!r} got {tuple(x.shape)} where this rank has {place.local_size} of "
                    f"{place.dim!r}: it should take its stage's activation as its first argument"
                )
            # an empty rank has one dummy row, which no other rank may see
            whole = torch.ops.dsp.gather(x.narrow(axis, 0, place.local_size), axis, place.size, group)
            y = torch.ops.dsp.reduce_scatter(forward(whole, *args[1:], **kwargs), axis, group)
            if not place.local_size:
                y = torch.cat([y, y.new_zeros((*y.shape[:axis], 1, *y.shape[axis + 1 :]))], axis)
        return y if self.rows.bias is None else y + self.rows.bias.to(y.dtype)


def find_regions(model: nn.Module, named: Mapping[str, str]) -> list[tuple[str, nn.Module, list[Linear]]]:
    """(path, module, linear layers) of every module that directly holds some of the `named` layers."""
    layers: dict[str, list[Linear]] = {}
    for name, module, text in find_modules(model, named):
        layers.setdefault(name.rpartition(".")[0], []).append(Linear.read(name, module, text))
    paths = {path: module for path, module, _ in find_modules(model, dict.fromkeys(layers, "region"))}
    return [(path, paths[path], linears) for path, linears in layers.items()]


def rank_order(model: nn.Module) -> dict[str, Tensor]:
    """The order of rows of those cut weights whose order is not the model's own: fused queries, keys and values.

    A parameter's name maps to indices: ``full[indices]`` has the order of its DTensor over all ranks, and
    ``sharded[indices.argsort()]`` the model's own order again, as for saving full weights.
    """
    orders: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        forward = module.__dict__.get("forward")
        if isinstance(forward, _Local) and forward.linear.columns and len(forward.linear.parts) > 1:
            order = torch.cat([forward.linear.index(forward.n, rank) for rank in range(forward.n)])
            orders |= {f"{path}.{name}": order for name, p in module.named_parameters(recurse=False)}
    return orders
