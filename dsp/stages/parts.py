"""Parts of the tensors of a call along one dim, of uneven lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from dsp.comm.layout import Cut
from dsp.stages.signature import Arguments, Signature


def slices(size: int) -> list[tuple[int, int]]:
    """(start, length) of uneven parts of a dim; they cover it, and one begins at no even boundary."""
    middle = max(1, size // 3)
    odd = [(1, size - 2)] if size > 3 else []
    return [(0, middle), (middle, size - middle), *odd]


def part(t: Tensor, cut: Cut, size: int, start: int, length: int) -> Tensor:
    """A slice of the dim of `size` that `cut` names, inside its fold."""
    inner = t.shape[cut.dim] // (cut.folds * size)
    fine = t.unflatten(cut.dim, (cut.folds, size, inner)).narrow(cut.dim + 1, start, length)
    return fine.flatten(cut.dim, cut.dim + 2)


def call_part(
    signature: Signature, args: Any, kwargs: Any, cuts: Sequence[Cut | None], size: int, start: int, length: int
) -> Arguments:
    """The call with a slice of every tensor argument that has a cut in `cuts` (in the order of `bind`)."""
    call, bound = signature.bind(args, kwargs)
    for b, cut in zip(bound, cuts):
        if cut is not None:
            call.replace(b, part(b.tensor, cut, size, start, length))
    return call
