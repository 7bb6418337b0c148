"""The slice test, which defines independence: f(slice of x) == slice of f(x), for uneven slices.

`check` applies it to declared stages; `discover` finds with it the dims that a submodule computes over. Each part draws
its own random numbers, so the test treats the numbers that f draws as another input, sliced like the others. Numbers
shared along the dim (row-wise dropout) cannot be sliced, and then f is not independent along it.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dsp.comm import randomness
from dsp.comm.collectives import inexact
from dsp.comm.layout import Cut
from dsp.stages.parts import call_part, part, slices
from dsp.stages.signature import Signature
from dsp.stages.stage import cut_for
from dsp.support.private import CompileOff, TorchDispatchMode, applied, pytree
from dsp.support.tensors import constants_in, remade, tensors_in

TOLERANCE = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 2e-4, torch.complex64: 2e-4}


def cast(value: Any, dtype: torch.dtype) -> Any:
    """A copy of a model, or of a value with tensors, in another dtype; with float64, complex becomes complex128."""

    def one(t: Tensor) -> Tensor:
        if t.is_complex():
            return t.to(torch.complex128) if dtype == torch.float64 else t
        return t.to(dtype) if t.is_floating_point() else t

    if isinstance(value, nn.Module):  # its own `to` would make complex parameters and buffers real
        return applied(copy.deepcopy(value), one)
    return pytree.tree_map_only(Tensor, lambda t: one(t.detach()).clone(), value)


def copies(model: nn.Module, args: Any, kwargs: Any) -> Iterator[tuple[torch.dtype, nn.Module, Any, Any]]:
    """Copies of a model and its inputs: in float64, then in its own dtype, for a model that cannot run in float64."""
    native = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    for dtype in dict.fromkeys((torch.float64, native)):
        yield (dtype, cast(model, dtype), *cast((args, kwargs), dtype))


def smaller(
    names: Collection[str],
    sizes: Mapping[str, int],
    signature: Signature,
    args: Any,
    kwargs: Any,
    run: Callable[[Any, Any], Any],
) -> tuple[dict[str, int], Any, Any] | None:
    """Sizes and inputs, cut to two thirds along all dims of `names` along which `run` takes shorter inputs; None if
    there is none."""

    def cut(some: Sequence[str]) -> tuple[dict[str, int], Any, Any] | None:
        lengths, a, k = dict(sizes), args, kwargs
        for name in some:
            cuts = [cut_for(b.pattern, b.tensor.shape, name, lengths) for b in signature.bind(a, k)[1]]
            length = max(2, lengths[name] * 2 // 3)
            call = call_part(signature, a, k, cuts, lengths[name], 0, length)
            a, k, lengths[name] = tuple(call.args), call.kwargs, length
        try:
            run(a, k)
        except Exception:
            return None
        return lengths, a, k

    best, names_cut = None, list[str]()
    # all at once; else first those of equal size, which may have to stay equal, then each alone
    alike = [[n for n in names if sizes[n] == size] for size in dict.fromkeys(sizes[n] for n in names)]
    for some in (list(names), *alike, *([n] for n in names)):
        if set(some) <= set(names_cut):
            continue
        if (shorter := cut(names_cut + [n for n in some if n not in names_cut])) is not None:
            best, names_cut = shorter, [*names_cut, *(n for n in some if n not in names_cut)]
    return best


def error(a: Tensor, b: Tensor, floor: float = 1e-12) -> float:
    """Largest difference, relative to the largest value of `b`."""
    if a.shape != b.shape:
        return float("inf")
    if not a.numel():
        return 0.0
    if not inexact(b):
        return float((a.double() - b.double()).abs().max())
    off = (a.detach() - b).abs().masked_fill(a == b, 0)  # inf - inf is NaN
    finite = b.abs().masked_fill(~b.isfinite(), 0)
    return float(off.max()) / max(float(finite.max()), floor, 1e-30)


class Shared(RuntimeError):
    """Raised for random numbers, or other arguments, that do not shrink with the slice."""


# operations whose result is random numbers alone
_DRAWS = frozenset(
    """
rand randn randint randperm normal rand_like randn_like randint_like uniform_ normal_ random_ exponential_ cauchy_
log_normal_ geometric_ bernoulli_
""".split()
)


class Draws(TorchDispatchMode):
    """A mode that records the random numbers of a call, or gives a call on a slice its part of recorded ones.

    size, start, length: the slice. outers: by size of an axis, the outer length of the fold in which the dim lies.
    """

    def __init__(
        self, recorded: Draws | None = None, size: int = 0, start: int = 0, length: int = 0,
        outers: Mapping[int, int] = {},
    ) -> None:  # fmt: skip
        super().__init__()
        self.numbers: list[Tensor] = []
        self.recorded, self.size, self.start, self.length, self.outers = recorded, size, start, length, outers

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._weight_norm_interface.default and args[1].numel() != args[0].shape[args[2]]:
            raise Shared("weight norm has a norm for each row")  # torch would write beside the memory of a slice
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name == "native_dropout":
            x, p, train = args
            if not train:
                return func(*args, **kwargs)
            keep = self.take(torch.rand_like(x)) >= p
            return x * keep / max(1 - p, 1e-30), keep
        if name == "bernoulli" or (name == "bernoulli_" and isinstance(args[1] if len(args) > 1 else 0.5, Tensor)):
            p = args[0] if name == "bernoulli" else args[1]
            hit = (self.take(torch.rand(args[0].shape, dtype=p.dtype, device=p.device)) < p).to(args[0].dtype)
            return hit if name == "bernoulli" else args[0].copy_(hit)
        out = func(*args, **kwargs)
        if name not in _DRAWS:
            return out  # attention without dropout carries the tag, too
        numbers = self.take(out)
        return out if numbers is out else args[0].copy_(numbers) if name.endswith("_") else numbers

    def take(self, numbers: Tensor) -> Tensor:
        """Remember numbers just drawn; or those of the whole call, sliced to the same shape, in their place."""
        if self.recorded is None:
            self.numbers.append(numbers.clone())
            return numbers
        if len(self.numbers) == len(self.recorded.numbers):
            raise Shared("a call on a slice draws more random numbers than the full call")
        whole = self.recorded.numbers[len(self.numbers)]
        self.numbers.append(numbers)
        axes = [d for d in range(whole.ndim) if numbers.ndim == whole.ndim and numbers.shape[d] != whole.shape[d]]
        if len(axes) != 1 or whole.shape[axes[0]] * self.length != numbers.shape[axes[0]] * self.size:
            raise Shared(
                f"random numbers {tuple(numbers.shape)} of a slice are no part of the full call's {tuple(whole.shape)}"
            )
        extent = whole.shape[axes[0]]
        outer = self.outers.get(extent, extent // self.size)
        return part(whole, Cut(axes[0], outer), self.size, self.start, self.length)


class Probe:
    """One recorded call of a module, which can be run again on slices.

    Each run begins with the same buffers and copies of the inputs, since a module may change them.
    """

    def __init__(self, module: nn.Module, signature: Signature, args: Any, kwargs: Any, seed: int = 0) -> None:
        self.module, self.signature, self.seed = module, signature, seed
        self.args, self.kwargs = copied(args, kwargs)
        self.bound = signature.bind(self.args, self.kwargs)[1]
        self.draws = self.recorder()
        self.runs = 0
        args, kwargs = copied(self.args, self.kwargs)
        outputs, self.constants = self.run(args, kwargs, self.draws)
        self.whole = [t.detach() for t in outputs]

    def recorder(self) -> Any:
        """The recorder of the whole call, for the runs on slices."""
        return Draws()

    def run(self, args: Any, kwargs: Any, seen: Any) -> tuple[list[Tensor], list[Any]]:
        """Run the module under the mode `seen`; return the tensors of its output, and the numbers in it."""
        self.runs += 1
        # under a mode that sees every operation, torch.compile would give up compiling the function for good
        with keeping_buffers(self.module), torch.no_grad(), warnings.catch_warnings(), CompileOff(), seen:
            warnings.simplefilter("ignore")  # models warn about unusual shapes
            randomness.seed(self.seed)
            output = self.module(*args, **kwargs)
            return tensors_in(output), constants_in(output)

    def independent(self, cuts: Sequence[Cut | None], size: int) -> list[Cut] | None:
        """The cut of each output along the dim that `cuts` name in the inputs; None if the call computes over the dim.

        The call also counts as computing over a dim that an output lacks or has in another size, or whose size it
        returns.
        """
        outers = {b.tensor.shape[c.dim]: c.folds for b, c in zip(self.bound, cuts) if c is not None}
        places: list[list[Cut]] | None = None
        for start, length in slices(size):
            try:
                call = call_part(self.signature, self.args, self.kwargs, cuts, size, start, length)
                a, k = copied(tuple(call.args), call.kwargs)
                outputs, constants = self.run(a, k, Draws(self.draws, size, start, length, outers))
            except Exception:  # a call that fails on a slice is not independent, whatever the reason
                return None
            if len(outputs) != len(self.whole) or not outputs or constants != self.constants:
                return None
            if places is None:
                places = [_places(t.shape, w.shape, size, length, outers) for t, w in zip(outputs, self.whole)]
            for k, (t, w) in enumerate(zip(outputs, self.whole)):
                tolerance = TOLERANCE.get(t.dtype, 3e-2)
                places[k] = [c for c in places[k] if error(t, part(w, c, size, start, length)) <= tolerance]
            if not all(places):
                return None
        assert places is not None
        return [p[0] for p in places]


@contextmanager
def keeping_buffers(model: nn.Module) -> Iterator[None]:
    """Restore the buffers of a model at the end."""
    before = [(b, b.detach().clone()) for b in model.buffers()]
    try:
        yield
    finally:
        for b, value in before:
            b.detach().copy_(value)


def copied(args: Any, kwargs: Any) -> Any:
    """The arguments with copies of their tensors."""
    return remade((args, kwargs), lambda t: t.detach().clone())


def _places(part: Any, whole: Any, size: int, length: int, outers: Mapping[int, int]) -> list[Cut]:
    """Possible cuts along a dim of an output with shape `whole`, and `part` on a slice; the likeliest first."""
    axes = [d for d in range(len(whole)) if len(part) == len(whole) and part[d] != whole[d]]
    if len(axes) != 1 or whole[axes[0]] % size or part[axes[0]] * size != whole[axes[0]] * length:
        return []
    extent = whole[axes[0]] // size
    likely = outers.get(whole[axes[0]], 1)
    return [Cut(axes[0], o) for o in sorted(divisors(extent), key=lambda o: (o != likely, o))]


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
