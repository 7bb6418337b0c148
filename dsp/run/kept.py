"""Sharded tensors that a model keeps between calls, such as a cache of keys: where they are, and how they lie.

A plan is made for inputs of one signature, and for what earlier calls left as they left it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dsp.private import children_of
from dsp.sharded import Sharded
from dsp.world import of_library

Path = tuple[tuple[str, Any], ...]  # steps from the model or an argument: attributes and items
DEEP = 8  # steps of a path


def paths_to(wanted: Iterable[Tensor], *roots: Any) -> list[Path]:
    """Paths from `roots` to these tensors, through attributes, lists and dicts; not every tensor has one."""
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


def steps(it: Any) -> list[tuple[tuple[str, Any], Any]]:
    """Steps that lead on from an object, each with the value that it leads to."""
    if isinstance(it, nn.Module):
        own = {k: v for k, v in it.__dict__.items() if k not in ("_parameters", "_modules")}
        return [(("attr", k), v) for k, v in (own | children_of(it)).items()]
    if isinstance(it, (list, tuple, deque)):
        return [(("item", i), v) for i, v in enumerate(it)]
    if isinstance(it, dict):
        return [(("item", k), v) for k, v in it.items()]
    if isinstance(it, (Tensor, type)) or of_library(type(it)):
        return []
    return [(("attr", k), v) for k, v in getattr(it, "__dict__", {}).items()]


def lying(path: Path, *roots: Any) -> Any:
    """Layout of the tensor at the end of a path; None if there is none, or it is not sharded."""
    it: Any = roots
    try:
        for kind, name in path:
            it = getattr(it, name) if kind == "attr" else it[name]
    except (AttributeError, LookupError, TypeError):
        return None
    if isinstance(it, DTensor):
        return it.shape, it.placements, it.requires_grad
    return (it.at.shape, it.at.cut, it.requires_grad) if isinstance(it, Sharded) else None
