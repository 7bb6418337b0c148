"""Hooks of distributed runs, such as fully_shard's, on modules between stages: they are no glue of the model."""

from __future__ import annotations

from typing import Any

from dsp.private import pytree
from dsp.sharded import ACTIVE, Own, Sharded, plain


def count(*_: Any, uncounted: bool) -> None:
    current = ACTIVE.get()
    if current is not None:
        current[1].mode.uncounted = uncounted


class Aside:
    """A hook of a distributed run, such as fully_shard's, on a module between stages: it is no glue of the model."""

    def __init__(self, hook: Any) -> None:
        self.hook = hook

    def __call__(self, *args: Any) -> Any:
        current = ACTIVE.get()
        if current is None:
            return self.hook(*args)
        run = current[1]
        before, run.aside = run.aside, True
        try:
            # it sees local parts: through an autograd.Function a tensor comes back without its type
            # and what it hangs on one must not be on a view of another
            leaves, spec = pytree.tree_flatten(args)
            result = self.hook(*pytree.tree_unflatten([_own(x) for x in leaves], spec))
            made, spec = pytree.tree_flatten(result)
            return pytree.tree_unflatten(list(map(_as_before, made, leaves[len(leaves) - len(made) :])), spec)
        finally:
            run.aside = before


def _as_before(new: Any, old: Any) -> Any:
    if isinstance(old, Sharded) and type(new) is old.part:
        new.__class__, new.at = type(old), old.at  # type: ignore[assignment,attr-defined]
    return new


def _own(x: Any) -> Any:
    return Own.apply(plain(x)) if isinstance(x, Sharded) else x
