"""The stage notation: which dims a submodule computes over, in one string.

    "b t [s c]"                              attention over s; t and b are independent
    "b [t] s [c], context=b [l c]"           `context` is bound by the name of the forward parameter
    "(b t) [s c]"                            a folded dim, as in einops
    "b i [k] c, b j [k] c -> b i j c"        two operands and the output
    "b i +k c, b j +k c -> b i j c"          the same, as a sum over k: each rank may sum over its part of k

The root pattern (that of the model itself) may also state sizes that the shapes of its tensors do not give:

    "x=(b t) s c, num_frames=t"              an int argument of forward, or an attribute of the model or its config
    "x=b s c, p=4"                           a number, for a dim that no input has but a fold inside the model

A dim outside brackets is independent: ``f(slice of x) == slice of f(x)``. A dim with a plus is summed over: f(x) is the
sum of f over the slices of x. This module only parses; it handles no tensors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

_TOKEN = re.compile(r"\s*(->|[\[\](),=]|\+?[A-Za-z_][A-Za-z0-9_]*|[0-9]+(?![A-Za-z_])|\S)")
BATCH_NAMES = frozenset({"b", "batch", "B"})


class NotationError(ValueError):
    """A pattern that cannot be read, or that does not fit the tensor it is used on."""


class Ambiguous(NotationError):
    """A fold in which the sizes of two or more dims are unknown."""

    def __init__(self, message: str, unknown: Sequence[str], size: int) -> None:
        super().__init__(message)
        self.unknown, self.size = tuple(unknown), size


@dataclass(frozen=True)
class TensorPattern:
    """One tensor: its axes in order, each a tuple of dim names (several for a fold, none for a literal 1).

    computed: the dims that the stage computes over; summed: those of them that it sums over.
    """

    axes: tuple[tuple[str, ...], ...]
    computed: frozenset[str]
    param: str | None = None
    summed: frozenset[str] = frozenset()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for axis in self.axes for name in axis)

    def axis_of(self, name: str) -> int:
        return next(i for i, axis in enumerate(self.axes) if name in axis)

    def __str__(self) -> str:
        def show(name: str) -> str:
            return f"+{name}" if name in self.summed else f"[{name}]" if name in self.computed else name

        text = " ".join(
            "1" if not axis else show(axis[0]) if len(axis) == 1 else f"({' '.join(map(show, axis))})"
            for axis in self.axes
        )
        text = text.replace("] [", " ")
        return f"{self.param}={text}" if self.param else text


@dataclass(frozen=True)
class StagePattern:
    """A stage: its input tensors, its output tensors, and the dims it may be sharded along (`free`)."""

    text: str
    inputs: tuple[TensorPattern, ...]
    outputs: tuple[TensorPattern, ...]
    explicit_output: bool
    sizes: tuple[tuple[str, int], ...] = ()  # that the root pattern states as numbers
    root: bool = False

    @property
    def computed(self) -> frozenset[str]:
        return frozenset().union(*(p.computed for p in self.inputs + self.outputs))

    @property
    def free(self) -> tuple[str, ...]:
        """Dims of the inputs outside brackets, in order of appearance, with batch last: it is the last resort."""
        seen = dict.fromkeys(n for p in self.inputs for n in p.names if n not in self.computed)
        return tuple(sorted(seen, key=lambda n: n in BATCH_NAMES))

    @property
    def summed(self) -> tuple[str, ...]:
        """Dims of the inputs that are summed over, in order of appearance."""
        return tuple(dict.fromkeys(n for p in self.inputs for n in p.names if n in p.summed))

    def refuse_outputs(self, shapes: Sequence[Sequence[int]]) -> None:
        """Raise NotationError for an output of the model that has not the axes of its pattern after '->'."""
        for pattern, shape in zip(self.outputs, shapes) if self.explicit_output else ():
            if len(shape) != len(pattern.axes):
                raise NotationError(
                    f"the model returned shape {tuple(shape)}, but the pattern under the key '' of stages says "
                    f"'{pattern}' after '->': write one name, or one fold, for each axis"
                )


class _Axes:
    """A parser of one tensor's axes, which reads token by token."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.axes: list[tuple[str, ...]] = []
        self.computed, self.summed = set[str](), set[str]()
        self.fold: list[str] | None = None
        self.bracket = False
        self.signs = {"[": self.open, "]": self.close, "(": self.open_fold, ")": self.close_fold, "1": self.one}

    def wrong(self, why: str) -> NotationError:
        return NotationError(f"{self.text!r}: {why}")

    def read(self, token: str) -> None:
        if token in self.signs:
            self.signs[token]()
        elif token.removeprefix("+").isidentifier():
            self.dim(token.removeprefix("+"), token.startswith("+"))
        else:
            raise self.wrong(
                f"unexpected {token!r}; a pattern may have names, folds (b t), brackets [s c], sums +k, 1 for an axis "
                "of length 1, name=pattern, commas and one ->"
            )

    def open(self) -> None:
        if self.bracket:
            raise self.wrong("'[' inside '['; one pair of brackets is enough")
        self.bracket = True

    def close(self) -> None:
        if not self.bracket:
            raise self.wrong("']' without '['")
        self.bracket = False

    def open_fold(self) -> None:
        if self.fold is not None:
            raise self.wrong("a fold inside a fold; write (b t s) flat")
        self.fold = []

    def close_fold(self) -> None:
        if self.fold is None:
            raise self.wrong("')' without '('")
        self.axes.append(tuple(self.fold))
        self.fold = None

    def one(self) -> None:
        if self.fold is None:
            self.axes.append(())

    def dim(self, name: str, summed: bool) -> None:
        if summed and self.bracket:
            raise self.wrong(f"a summed dim cannot be in brackets; write +{name} outside the brackets")
        self.summed |= {name} if summed else set()
        self.computed |= {name} if summed or self.bracket else set()
        if self.fold is not None:
            self.fold.append(name)
        else:
            self.axes.append((name,))


def _parse_tensor(tokens: list[str], text: str) -> TensorPattern:
    param = None
    if len(tokens) > 1 and tokens[1] == "=":
        param, tokens = tokens[0], tokens[2:]
        if not param.isidentifier():
            raise NotationError(f"{text!r}: {param!r} before '=' is not a parameter name")
    axes = _Axes(text)
    for token in tokens:
        axes.read(token)
    if axes.bracket or axes.fold is not None:
        raise axes.wrong(f"{'[' if axes.bracket else '('} is never closed")
    pattern = TensorPattern(tuple(axes.axes), frozenset(axes.computed), param, frozenset(axes.summed))
    for name in pattern.names:
        if pattern.names.count(name) > 1:
            raise NotationError(f"{text!r}: dim {name!r} appears twice in one tensor")
    return pattern


@lru_cache(maxsize=1024)
def parse(text: str, *, root: bool = False) -> StagePattern:
    """Parse one stage string. A `root` pattern only names dims: none of them has to be independent."""
    if not isinstance(text, str):
        raise NotationError(f"a stage is a string like 'b t [s c]', not {type(text).__name__} {text!r}")
    tokens = _TOKEN.findall(text)
    if not tokens:
        raise NotationError("an empty stage pattern; write what the stage computes over, like 'b t [s c]'")
    if tokens.count("->") > 1:
        raise NotationError(f"{text!r}: more than one '->'")
    explicit = "->" in tokens
    cut = tokens.index("->") if explicit else len(tokens)

    sizes: dict[str, int] = {}

    def without_sizes(part: Sequence[str]) -> list[str]:
        """Remove the sizes that are stated as numbers, as in 'x=b (t p), p=4', and note them."""
        items = list(part)
        ends = [i for i in range(len(part), 2, -1) if part[i : i + 1] in ([], [","])]  # 'x=1 t' is a tensor
        for at in [i - 2 for i in ends if part[i - 2] == "=" and part[i - 1].isdigit()]:
            if not root:
                raise NotationError(f"{text!r}: sizes are stated in the root pattern, under the key ''")
            sizes[items[at - 1]] = int(items[at + 1])
            del items[max(at - 2, 0) : at + 2 + (at < 2)]  # with the comma before it, or after
        return items

    def tensors(part: Sequence[str]) -> tuple[TensorPattern, ...]:
        groups: list[list[str]] = [[]]
        depth = 0
        for token in part:
            depth += (token in "[(") - (token in "])")
            if token == "," and depth == 0:
                groups.append([])
            else:
                groups[-1].append(token)
        if any(not g for g in groups):
            raise NotationError(f"{text!r}: an empty tensor pattern beside a ',' or '->'")
        return tuple(_parse_tensor(g, text) for g in groups)

    inputs = tensors(without_sizes(tokens[:cut]))
    params = [p.param for p in inputs if p.param]
    if len(set(params)) < len(params):
        raise NotationError(f"{text!r}: a parameter is named twice")
    if explicit:
        outputs = tensors(tokens[cut + 1 :])
        if any(p.param for p in outputs):
            raise NotationError(f"{text!r}: outputs are bound by position; drop 'name=' after '->'")
    else:
        outputs = (TensorPattern(inputs[0].axes, inputs[0].computed),)
    stage = StagePattern(text, inputs, outputs, explicit, tuple(sizes.items()), root)
    if not root:
        for output in outputs:
            lost = [n for n in stage.free if n not in output.names]
            # an output may lack a dim only if no tensor can be sharded along it
            if lost:
                are = "is" if len(lost) == 1 else "are"
                raise NotationError(
                    f"{text!r}: {_list(lost)} {are} outside brackets, but missing from the output {output}. If the "
                    f"stage reduces over a dim, write {' '.join(f'[{n}]' for n in lost)}; if not, add it to the output"
                )
    _check_sums(stage)
    return stage


def _check_sums(stage: StagePattern) -> None:
    for name in stage.summed:
        if stage.root:
            raise NotationError(f"{stage.text!r}: the root pattern takes no sums; write {name} for +{name}")
        if not stage.explicit_output or any(name in p.names for p in stage.outputs):
            raise NotationError(
                f"{stage.text!r}: {name!r} is summed over, so the output must not have it: write the output after "
                f"'->', without {name}"
            )
        if len(stage.outputs) > 1:
            raise NotationError(f"{stage.text!r}: a stage that sums over a dim, +{name}, must have one output")
        if any(name in p.names and name not in p.summed for p in stage.inputs):
            raise NotationError(f"{stage.text!r}: {name!r} is summed over; write +{name} wherever an input has it")


def _list(names: Sequence[str]) -> str:
    return ("dim " if len(names) == 1 else "dims ") + ", ".join(map(repr, names))


def solve_sizes(
    tensors: Sequence[tuple[TensorPattern, Sequence[int]]], root: Mapping[str, int], *, label: str
) -> dict[str, int]:
    """The sizes of the dims in one call, from the patterns and shapes of its tensors; `root` has sizes only for folds.

    An axis of size 1 broadcasts if its dim is longer in another tensor. Raises NotationError if shapes do not fit.
    """
    sizes, folds = _sizes_of_axes(tensors, label)
    while folds:
        waiting = [fold for fold in folds if not _opened(*fold, sizes, root, label)]
        if len(waiting) == len(folds):
            _, axis, size = waiting[0]
            raise Ambiguous(
                f"{label}: cannot tell the dims of {_show(axis)} (size {size}) apart. Name the dims of the model's "
                'inputs in a root pattern, for example {"": "x=b c t h w"}. A size that no shape of an input gives is '
                f'stated there, too: by an int argument or attribute of the model, "num_frames={axis[-1]}", or by a '
                f'number, "{axis[-1]}=4". If the dims are never needed by themselves, give the axis one name',
                [n for n in axis if sizes.get(n, root.get(n)) is None],
                size,
            )
        folds = waiting
    return sizes


Fold = tuple[TensorPattern, tuple[str, ...], int]  # an axis of several dims in a pattern, and its size


def _sizes_of_axes(
    tensors: Sequence[tuple[TensorPattern, Sequence[int]]], label: str
) -> tuple[dict[str, int], list[Fold]]:
    """The sizes of dims that have an axis of their own, and the folds."""
    sizes: dict[str, int] = {}
    folds: list[Fold] = []
    for pattern, shape in tensors:
        if len(shape) != len(pattern.axes):
            raise NotationError(
                f"{label}: the pattern '{pattern}' has {len(pattern.axes)} axes (a fold counts as one), but the "
                f"tensor has {len(shape)}: its shape is {tuple(shape)}. Write one name, or one fold, for each axis"
            )
        for axis, size in zip(pattern.axes, shape):
            if len(axis) > 1:
                folds.append((pattern, axis, size))
            elif not axis and size != 1:
                raise NotationError(f"{label}: '{pattern}' says 1, but this axis of {tuple(shape)} is {size}")
            elif axis and (known := sizes.setdefault(axis[0], size)) != size:
                if 1 not in (known, size):
                    raise NotationError(f"{label}: dim {axis[0]!r} is {known} in one tensor and {size} in '{pattern}'")
                sizes[axis[0]] = max(known, size)
    return sizes, folds


def _opened(
    pattern: TensorPattern, axis: tuple[str, ...], size: int, sizes: dict[str, int], root: Mapping[str, int], label: str
) -> bool:
    """Note the sizes of a fold's dims; False if two of them are still unknown."""
    known = {n: sizes.get(n, root.get(n)) for n in axis}
    product = math.prod(value for value in known.values() if value is not None)
    unknown = [n for n, value in known.items() if value is None]
    if len(unknown) > 1:
        return False
    if size == 1 and all(n in sizes for n in axis):
        return True  # broadcasts against the tensors that gave these sizes
    fits = bool(product) and size % product == 0 if unknown else size == product
    if not fits:
        factors = " x ".join(f"{n}={v}" for n, v in known.items() if v is not None)
        raise NotationError(
            f"{label}: '{pattern}' does not fit: axis {_show(axis)} has size {size}, which is not "
            + (f"a multiple of {factors}" if unknown else f"{factors} = {product}")
        )
    sizes.update({n: size // product if v is None else v for n, v in known.items()})
    return True


def _show(axis: Sequence[str]) -> str:
    return axis[0] if len(axis) == 1 else f"({' '.join(axis)})"
