"""Sharded tensors that a model keeps between calls, such as a cache of keys: their paths and layouts.

A plan is made for inputs of one signature, and for kept tensors in the layouts in which earlier calls left them.
Objects among the inputs are passed as they are, since a forward may write into them; so a leaf of autograd in one is
refused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dsp.private import children_of
from dsp.sharded import Sharded
from dsp.world import of_library

Path = tuple[tuple[str, Any], ...]  # steps from the model or an argument: attributes and items
DEEP = 8  # steps of a path, at most


def paths_to(wanted: Iterable[Tensor], *roots: Any) -> list[Path]:
    """Paths from `roots` to these tensors, through attributes, lists and dicts; a tensor may have none."""
    left = {id(t) for t in wanted}
    waiting, found, seen = deque[tuple[Path, Any]]([((), roots)]), list[Path](), set[int]()
    while waiting and left:
        path, it = waiting.popleft()
        if id(it) in left:
            left.discard(id(it))
            found.append(path)
        elif id(it) not in seen and len(path) < DEEP * (2 if isinstance(it, nn.Module) else 1):
            seen.add(id(it))
            waiting.extend(((*path, step), value) for step, value in steps(it))
    return found


def refuse_leaves(inputs: Iterable[Any]) -> None:
    """Raise TypeError if an object among the inputs holds a tensor that is to get a gradient of its own.

    Parameters, whose gradients the caller averages over ranks, and what was computed from these, may be there.
    """
    if not torch.is_grad_enabled():
        return
    waiting, seen = [(it, type(it), 0) for it in inputs if not isinstance(it, Tensor)], set[int]()
    while waiting:
        it, kind, deep = waiting.pop()
        if isinstance(it, Tensor):
            if it.requires_grad and it.is_leaf and not isinstance(it, nn.Parameter):
                raise TypeError(
                    f"an object among the inputs, a {kind.__name__}, holds a tensor of shape {tuple(it.shape)} that "
                    "requires a gradient, but would get only the gradient of this rank's shard: pass such a tensor as "
                    "an argument of its own, or in a list, tuple or dict"
                )
        elif id(it) not in seen and deep < DEEP and not isinstance(it, nn.Module):
            seen.add(id(it))
            waiting.extend((value, kind, deep + 1) for _, value in steps(it))


def steps(it: Any) -> list[tuple[tuple[str, Any], Any]]:
    """The steps from an object to its attributes or items, each with the value found there."""
    if isinstance(it, nn.Module):
        own = {k: v for k, v in it.__dict__.items() if k not in ("_parameters", "_modules")}
        return [(("attr", k), v) for k, v in (own | children_of(it)).items()]
    if isinstance(it, (list, tuple, deque)):
        return [(("item", i), v) for i, v in enumerate(it)]
    if isinstance(it, Mapping):
        return [(("item", k), v) for k, v in it.items()]
    if isinstance(it, (Tensor, type)) or (of_library(type(it)) and not isinstance(it, SimpleNamespace)):
        return []
    return [(("attr", k), v) for k, v in getattr(it, "__dict__", {}).items()]


def lying(path: Path, *roots: Any) -> Any:
    """The layout of the tensor at the end of a path; None if there is no tensor, or it is not sharded."""
    it: Any = roots
    try:
        for kind, name in path:
            it = getattr(it, name) if kind == "attr" else it[name]
    except (AttributeError, LookupError, TypeError):
        return None
    if isinstance(it, DTensor):
        return it.shape, it.placements, it.requires_grad
    return (it.at.shape, it.at.cut, it.requires_grad) if isinstance(it, Sharded) else None
