"""Pipelines and autoencoders: their parts, each as a module that is parallelized by a known line.

An autoencoder is called by its methods ``decode`` and ``encode``, which split the work into tiles and frames before
they call a forward. So each method becomes a module here, and the module replaces the method.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dsp.comm.layout import Axis
from dsp.stages.known import classes, methods_for, stages_for
from dsp.stages.notation import NotationError, parse
from dsp.stages.signature import Signature
from dsp.support.private import pytree

log = logging.getLogger("dsp")

TAKES = {"decode": "z", "encode": "x"}  # the name of each method's tensor argument


@dataclass(frozen=True)
class Component:
    """A module to parallelize, its stages, and a function that then installs the module."""

    module: nn.Module
    stages: Mapping[str, str]
    place: Callable[[], None]


def parts_of(model: Any, stages: Any, rank: int = 0) -> list[Component] | None:
    """The known parts of a pipeline, or the known methods of an autoencoder; None for any other model.

    Raise NotationError for a pipeline without known parts, or if `stages` are given for a pipeline.
    """
    components = None if isinstance(model, nn.Module) else getattr(model, "components", None)
    if not isinstance(components, dict):
        whole = stages is None and getattr(model, "stages", None) is None
        return (methods(model) or None) if whole and isinstance(model, nn.Module) else None
    name, modules = type(model).__name__, {k: v for k, v in components.items() if isinstance(v, nn.Module)}
    if stages is not None:
        raise NotationError(f"{name} is a pipeline: give stages to each of its parts, {', '.join(modules)}")
    parts: list[Component] = []
    for key, module in modules.items():
        if (line := getattr(module, "stages", None) or stages_for(module)) is not None:
            parts.append(Component(module, line, lambda: None))
        elif members := methods(module):
            parts += members
        elif classes(module):
            say = log.warning if rank == 0 else log.info
            say(
                "%s: dsp does not know the dims of its %s (%s), which runs whole on every rank. Find them with "
                "dsp.discover, and parallelize it by itself",
                name, key, type(module).__name__,
            )  # fmt: skip
    if not parts:
        raise NotationError(
            f"{name}: dsp knows the dims of none of its parts ({', '.join(modules) or 'it has no modules'}); find them "
            "with dsp.discover, and parallelize each by itself"
        )
    return parts


def axes_of(model: Any, mesh: Any) -> tuple[DeviceMesh | None, Any]:
    """The axis that divides the batch of each call (None without one) and the sequence-parallel axis.

    Only a pipeline's mesh may have both. Raise ValueError if its axes have no names.
    """
    two = isinstance(mesh, DeviceMesh) and mesh.ndim == 2
    if isinstance(model, nn.Module) or not isinstance(getattr(model, "components", None), dict) or not two:
        return None, mesh
    if mesh.mesh_dim_names is None:
        raise ValueError('this mesh has two axes, which need names: mesh_dim_names=("guidance", "sp")')
    first, last = mesh.mesh_dim_names
    return mesh[first], mesh[last]


class SharedBatch:
    """A model's forward whose batch, such as guidance's two predictions, is divided over the ranks of an axis.

    Arguments with as many rows as the batch are divided, and those that the known line declares along their batch,
    which is the first dim of the first that it declares.
    For inference: the results are gathered without a gradient.
    """

    def __init__(self, model: nn.Module, stages: Mapping[str, str], axis: Axis) -> None:
        if isinstance(model.forward, SharedBatch):
            raise ValueError(f"this {type(model).__name__} is already parallelized; build it anew")
        self.model, self.axis, self.forward = model, axis, model.forward
        self.__self__ = getattr(model.forward, "__self__", None)  # the runtime, as a bound method has it
        self.signature = Signature(model, parse(stages[""], root=True), "the model")

    def attach(self) -> None:
        self.model.forward = self

    def part(self, args: Any, kwargs: Any, rank: int) -> tuple[Any, Any]:
        """The arguments of one rank. Raise ValueError for a batch that the ranks cannot divide evenly."""
        n = self.axis.size
        call, bound = self.signature.bind(args, kwargs)
        declared = [(b.tensor, b.pattern.axes) for b in bound if b.pattern is not None]
        rows, batch = next((len(tensor), axes[0][0]) for tensor, axes in declared)
        dims = {id(tensor): dim for tensor, axes in declared for dim, axis in enumerate(axes) if batch in axis}
        if rows % n:
            raise ValueError(
                f"{type(self.model).__name__} is called with a batch of {rows}, which {n} groups cannot share. "
                "This pipeline makes each of guidance's predictions in a call of its own: give dsp.parallelize a mesh "
                "of one axis"
            )

        def local(x: Any, least: int = 1) -> Any:
            if isinstance(x, dict):
                return {key: local(value) for key, value in x.items()}
            if type(x) in (list, tuple):  # tables of positions, with no batch; or features, which have one
                return type(x)(local(value, least=3) for value in x)
            if not isinstance(x, Tensor) or x.ndim < least:
                return x
            dim = dims.get(id(x), 0)
            share = x.shape[dim] == rows or (id(x) in dims and x.shape[dim] % rows == 0)
            return x.chunk(n, dim)[rank] if share else x

        return tuple(map(local, call.args)), local(call.kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{type(self.model).__name__} shares its batch over {self.axis.size} groups of ranks, which has no "
                "gradient: call the pipeline under torch.no_grad(), or give dsp.parallelize a mesh of one axis"
            )
        args, kwargs = self.part(args, kwargs, self.axis.rank)
        return pytree.tree_map(self.whole, self.forward(*args, **kwargs))

    def whole(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or x.ndim == 0:
            return x
        return torch.ops.dsp.gather(x.contiguous(), 0, len(x) * self.axis.size, self.axis.group)


def methods(owner: nn.Module) -> list[Component]:
    """The known methods of an autoencoder; [] for another module. Raise ValueError if they are parallelized already."""
    if any(isinstance(value, Called) for value in vars(owner).values()):
        raise ValueError(f"this {type(owner).__name__} is already parallelized; build it anew")
    return [
        Component(method := Method(owner, name), {"": f"x={dims}"}, method.attach)
        for name, dims in (methods_for(owner) or {}).items()
    ]


class Method(nn.Module):
    """A method of an autoencoder as a module whose forward takes one tensor and returns tensors."""

    def __init__(self, owner: nn.Module, name: str) -> None:
        super().__init__()
        self.owner, self.name = owner, name
        self.structure: list[Any] = []  # the structure of the last result, and the types of its leaves

    def forward(self, x: Tensor, more: tuple[Any, dict[str, Any]]) -> list[Any]:
        args, kwargs = more
        out = getattr(type(self.owner), self.name)(self.owner, x, *args, **kwargs)
        leaves, spec = pytree.tree_flatten(out)
        self.structure[:] = [spec, [None if isinstance(v, Tensor) else type(v) for v in leaves]]
        return [getattr(v, "parameters", v) for v in leaves]  # a distribution is returned as its parameters

    def attach(self) -> None:
        """Replace the method."""
        setattr(self.owner, self.name, Called(self))


class Called:
    """The replacement that a pipeline calls, with the arguments and results of the class's method."""

    def __init__(self, method: Method) -> None:
        self.method = method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        name = TAKES[self.method.name]
        x, args = (args[0], args[1:]) if args else (kwargs.pop(name), ())
        leaves = self.method(x, (args, kwargs))
        spec, kinds = self.method.structure
        values = [v if kind is None else kind(v) for v, kind in zip(leaves, kinds)]
        return pytree.tree_unflatten(values, spec)
