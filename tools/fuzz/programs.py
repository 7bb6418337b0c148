"""Random forwards as text: a header (sizes, stages, parameters), then `forward`, one operation a line.

`generate(seed, size)` writes a program that runs on one process; `build(text)` makes the model it describes. The dims
of every tensor are followed by name, so that a stage can be put anywhere: its pattern is written from what it is.
"""

from __future__ import annotations

import inspect
import itertools
import math
import random
import re
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange, reduce, repeat
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

# --- what programs are made of ----------------------------------------------------------------------------------------

_order = itertools.count()


def drawn(key: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(key), dtype=torch.float64) * 0.6


def param(*shape: int) -> nn.Parameter:
    return nn.Parameter(drawn(next(_order), *shape))


def randperm(n: int) -> Tensor:
    return torch.randperm(n, generator=torch.Generator().manual_seed(n))


class Piece(nn.Module):
    """A module whose weights get their shapes from its first input; stages alike are twins but for their values."""

    def __init__(self, *options: Any) -> None:
        super().__init__()
        self.options = options
        self.register_buffer("seed", torch.tensor(next(_order)))

    def w(self, name: str, *shape: int) -> Tensor:
        if name not in self._parameters:
            self._parameters[name] = nn.Parameter(drawn(1000 * int(self.seed) + len(self._parameters), *shape))
        return self._parameters[name]


class Attend(Piece):
    """Attention along one dim, after a norm over the last."""

    def forward(self, x: Tensor) -> Tensor:
        (dim,), c = self.options, x.shape[-1]
        q, k, v = (F.layer_norm(x, (c,)) @ self.w("qkv", c, 3 * c)).movedim(dim, -2).chunk(3, -1)
        return x + F.scaled_dot_product_attention(q, k, v).movedim(-2, dim) @ self.w("out", c, c)


class Mlp(Piece):
    def forward(self, x: Tensor) -> Tensor:
        c = x.shape[-1]
        return x + F.silu(x @ self.w("up", c, c + 2)) @ self.w("down", c + 2, c)


class Scan(Piece):
    """A running mean along one dim: all others are free, channels too."""

    def forward(self, x: Tensor) -> Tensor:
        return self.w("a") * x + x.cumsum(self.options[0]) / max(x.shape[self.options[0]], 1)


class Conv(Piece):
    """Each position and the one before it."""

    def forward(self, x: Tensor) -> Tensor:
        dim = self.options[0]
        before = torch.cat([torch.zeros_like(x.narrow(dim, 0, 1)), x.narrow(dim, 0, x.shape[dim] - 1)], dim)
        return self.w("a") * x + self.w("b") * before.tanh()


class Table(Piece):
    """Adds a row for each position of one dim."""

    def forward(self, x: Tensor) -> Tensor:
        shape = [x.shape[d] if d in self.options else 1 for d in range(x.ndim)]
        return x + self.w("rows", *shape)


class Cross(Piece):
    """From the places of x to those of y, by the letters of both: attends over those that only y has."""

    def forward(self, x: Tensor, y: Tensor, bias: Tensor | None = None) -> Tensor:
        query, key = self.options
        scores = "".join(dict.fromkeys(query[:-1] + key[:-1]))
        a = torch.einsum(f"{query},{key}->{scores}", x @ self.w("q", x.shape[-1], x.shape[-1]), y)
        lead = sum(letter in query for letter in scores)
        a = a.flatten(lead).softmax(-1).view(a.shape)
        if bias is not None:
            a = a * bias[..., 0].sigmoid().sum()
        return x + torch.einsum(f"{scores},{key}->{query}", a, y)


class Pool(Piece):
    """The input, and its mean along one dim."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.tanh(x @ self.w("w", x.shape[-1], x.shape[-1]))
        return x + y, y.mean(self.options[0])


class Gate(Piece):
    """Two alike, each shifted by the other; a vector for all places may come along."""

    def forward(self, x: Tensor, y: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        a = y * torch.sigmoid(x @ self.w("w", x.shape[-1], x.shape[-1]))
        return x + (a if scale is None else a * scale), a


class Product(Piece):
    """Two tensors by an equation of letters, each through weights of its own first."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        c = x.shape[-1]
        return torch.einsum(self.options[0], torch.tanh(x @ self.w("a", c, c)), torch.tanh(y @ self.w("b", c, c)))


class Scribble(Piece):
    """Writes into what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(0.5).add_(self.w("a") * 0.1)


class Same(Piece):
    """Returns what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return x


STAGES = (Attend, Mlp, Scan, Conv, Table, Cross, Pool, Gate, Product, Scribble, Same)
VOCABULARY: dict[str, Any] = {
    "torch": torch, "F": F, "math": math, "nn": nn, "Tensor": Tensor, "param": param, "checkpoint": checkpoint,
    "rearrange": rearrange, "reduce": reduce, "repeat": repeat, "randperm": randperm,
    **{kind.__name__: kind for kind in STAGES},
}  # fmt: skip


# --- a program as a model ---------------------------------------------------------------------------------------------


def build(text: str) -> nn.Module:
    """The model of a program: its modules and parameters, its stages, its forward."""
    global _order
    _order = itertools.count()
    space = dict(VOCABULARY)
    exec(compile(text, "<program>", "exec", dont_inherit=True), space)
    model = type("Program", (nn.Module,), {"forward": space["forward"], "stages": space["stages"], "other": False})()
    for name, value in space.items():
        if isinstance(value, (nn.Module, nn.Parameter)):
            setattr(model, name, value.double() if isinstance(value, nn.Module) else value)
    return model


def inputs_of(model: nn.Module) -> dict[str, Tensor]:
    """By parameter name; an annotation is a shape, and a type if its gradient is not asked for: (b, t, bool)."""
    _, *parameters = inspect.signature(type(model).forward).parameters.items()
    return {name: example(i, *p.annotation) for i, (name, p) in enumerate(parameters)}


def example(i: int, *shape: Any) -> Tensor:
    """An input: numbers from 0 to 3 for indices."""
    kind = None
    if shape and isinstance(shape[-1], type):
        *shape, kind = shape
    x = drawn(7777 + i, *shape)
    if kind is None:
        return x.requires_grad_()
    return x if kind is float else x > -0.4 if kind is bool else (x.abs() * 9).long() % 4


# --- writing one ------------------------------------------------------------------------------------------------------

Axis = tuple[str, ...]  # dim names: none for size 1, several for a fold


@dataclass
class Var:
    name: str
    axes: list[Axis]
    kind: str = "f"  # float, bool, index, complex
    depth: int = 0  # of the block it was made in
    writable: bool = False  # memory of its own, fit to be written into

    @property
    def ndim(self) -> int:
        return len(self.axes)

    def but(self, d: int, *new: Axis) -> list[Axis]:
        """Its axes with others in the place of one, or none."""
        return [*self.axes[:d], *new, *self.axes[d + 1 :]]


class Dead(Exception):
    """This statement cannot be made of what there is."""


FAMILIES = [
    ({"x": "b t s c"}, 5),
    ({"x": "b t s c", "y": "b t s c"}, 2),
    ({"x": "b t h w c"}, 1),
    ({"x": "b c t h w"}, 1),
    ({"x": "b s c"}, 1),
    ({"m": "b s r c", "z": "b i j c"}, 2),
]
EXTRA = {
    "cond": "b c", "text": "b l c", "frames": "b t c", "keys": "b s bool", "valid": "b t bool", "kept": "b l bool",
    "number": "b t int", "kind": "s int", "pos": "s c", "grid": "t s",
}  # fmt: skip
SIZES = {"b": (1, 2), "t": (3, 7), "s": (3, 6), "r": (3, 6), "h": (2, 4), "w": (2, 4), "c": (4, 8), "l": (2, 4)}
SHORT = {**dict.fromkeys("tsrhwl", (1, 3)), "b": (1, 2), "c": (2, 4)}  # some ranks have nothing


class Writer:
    """Writes a program statement by statement, running each at once, so that shapes are known."""

    def __init__(self, rng: random.Random, ranges: dict[str, tuple[int, int]] = SIZES) -> None:
        self.rng, self.ranges = rng, ranges
        self.sizes: dict[str, int] = {}
        self.vars: list[Var] = []
        self.lines: list[str] = []
        self.header: list[str] = []
        self.stages: dict[str, str] = {}
        self.modules: dict[str, Any] = {}
        self.inputs: dict[str, str] = {}
        self.depth = self.count = 0
        self.self = types.SimpleNamespace()
        self.env: dict[str, Any] = {**VOCABULARY, "self": self.self}
        self.grad = True
        self.repeating = False
        self.begin()

    # --- names and sizes ---

    def begin(self) -> None:
        families, weights = zip(*FAMILIES)
        main = self.rng.choices(families, weights)[0]
        have = {n for p in main.values() for n in p.split()}
        shapes = dict(main)
        for name in self.rng.sample(list(EXTRA), self.rng.choice((0, 1, 1, 2, 3))):
            if set(EXTRA[name].split()) - {"bool", "int", "l"} <= have:
                shapes[name] = EXTRA[name]
        for p in shapes.values():
            for n in p.split():
                low, high = self.ranges.get(n, self.ranges["r"])
                size = self.rng.randint(low, high)
                self.sizes.setdefault(n, size + size % 2 if n == "c" else size)
        for n in ("bool", "int"):
            self.sizes.pop(n, None)
        for n in ("i", "j"):
            if n in self.sizes:
                self.sizes[n] = self.sizes["r"]
        if self.rng.random() < 0.06:
            self.sizes[self.rng.choice([n for n in self.sizes if n not in "cij"])] = 1
        self.root: list[str] = []
        self.named: set[str] = set()
        for i, (name, p) in enumerate(shapes.items()):
            kinds = {"bool": bool, "int": int}
            *dims, kind = [*p.split()] if p.split()[-1] in kinds else [*p.split(), "float"]
            self.inputs[name] = ", ".join([*dims, *([kind] if kind in kinds or self.chance(0.3) else [])])
            if len(dims) == 1:
                self.inputs[name] += ","
            if name in main or self.rng.random() < 0.6:
                self.root.append(f"{name}={' '.join(dims)}")
                self.named |= set(dims)
            more = [{**kinds, "float": float}[kind]] if kind in self.inputs[name] else []
            self.env[name] = example(i, *(self.sizes[d] for d in dims), *more)
            self.vars.append(Var(name, [(d,) for d in dims], {"float": "f", "bool": "b", "int": "i"}[kind]))
        self.env.update(self.sizes)

    def new(self) -> str:
        self.count += 1
        return f"x{self.count}"

    def size(self, axis: Axis) -> int:
        return math.prod(self.sizes[n] for n in axis)

    def fresh(self, size: int) -> Axis:
        if size == 1:
            return ()
        self.count += 1
        self.sizes[f"u{self.count}"] = size
        return (f"u{self.count}",)

    def text(self, axis: Axis) -> str:
        """The size of an axis, by name where it has one."""
        return "*".join(str(self.sizes[n]) if n[0] == "u" else n for n in axis) or "1"

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    def any(self, options: Sequence[Any]) -> Any:
        if not options:
            raise Dead
        return self.rng.choice(options)

    def pick(self, kind: str = "f", ndim: tuple[int, int] = (1, 6), ok: Callable[[Var], bool] = lambda v: True) -> Var:
        candidates = [v for v in self.vars if v.kind == kind and ndim[0] <= v.ndim <= ndim[1] and ok(v)]
        if not candidates:
            raise Dead
        body = "\n".join(self.lines)
        weights = [
            1.3**i
            * (3 if v.ndim > 2 else 1)
            * (5 if v.depth and v.depth == self.depth else 1)
            * (4 if body.count(v.name) < 2 and v.name not in self.inputs else 1)
            for i, v in enumerate(candidates)
        ]
        return self.rng.choices(candidates, weights)[0]

    def axis(self, v: Var, least: int = 1) -> int:
        return self.any([d for d, a in enumerate(v.axes) if self.size(a) >= least])

    def place(self, v: Var, least: int = 2) -> int:
        """A dim to compute over: not the last, and the batch seldom."""
        return self.any([
            d for d, a in enumerate(v.axes[:-1]) if self.size(a) >= least and ("b" not in a or self.chance(0.05))
        ])  # fmt: skip

    def at(self, d: int, ndim: int) -> int:
        """A dim, counted from either end."""
        return d - ndim if self.chance(0.5) else d

    def shaped(self, axes: Sequence[Axis]) -> str:
        return ", ".join(self.text(a) for a in axes)

    # --- running ---

    def run(self, line: str) -> None:
        with torch.set_grad_enabled(self.grad):
            exec(line, self.env)
        self.lines.append(line)

    def let(self, expression: str, axes: Sequence[Axis], kind: str = "f", writable: bool = False) -> Var:
        """x7 = expression, whose axes are these."""
        name = self.aside(expression)
        value = self.env[name]
        if value.numel() > 6000:
            raise Dead
        if [self.size(a) for a in axes] != list(value.shape):
            raise AssertionError(f"{expression}: {tuple(value.shape)} is not {list(axes)}")
        self.vars.append(Var(name, list(axes), kind, self.depth, writable))
        return self.vars[-1]

    def aside(self, expression: str) -> str:
        """The same, of no use to other statements."""
        name = self.new()
        self.run(f"{name} = {expression}")
        return name

    def several(self, expression: str, *axes: Sequence[Axis], writable: bool = False) -> list[Var]:
        """x7, x8 = expression"""
        results = [Var(self.new(), list(a), depth=self.depth, writable=writable) for a in axes]
        self.run(f"{', '.join(v.name for v in results)} = {expression}")
        self.vars += results
        return results

    def param(self, *axes: Axis) -> str:
        name = f"p{len([k for k in self.modules if k[0] == 'p'])}"
        return self.register(name, f"param({self.shaped(axes)})")

    def register(self, name: str, text: str) -> str:
        self.modules[name] = value = eval(text, self.env)
        setattr(self.self, name, value)
        self.header.append(f"{name} = {text}")
        return f"self.{name}"

    # --- stages ---

    def pattern(self, axes: Sequence[Axis], computed: Sequence[int], names: dict[Axis, str]) -> str:
        """`names` keeps what an axis without a proper name was called."""
        parts, seen = [], set[str]()
        for d, axis in enumerate(axes):
            plain = [n for n in axis if n[0] == "u" or n not in self.named]
            if not axis:
                text = "1"
            elif len(axis) == 1 and axis[0] not in seen and axis not in names:
                text = axis[0]
            elif len(plain) < 2 and not seen & set(axis) and axis not in names and len(axis) > 1 and self.chance(0.8):
                text = f"({' '.join(axis)})"
            else:
                text = names.setdefault(axis, f"n{len(names)}")
                if text in seen:
                    raise Dead
            seen |= {text, *(() if text[0] == "n" else axis)}
            parts.append(f"[{text}]" if d in computed and axis else text)
        return " ".join(parts)

    def stage(self, kind: type[Piece], options: str, pattern: str) -> str:
        if self.chance(0.15):  # one that was there before
            for line in self.header:
                name = line.split(" ")[0]
                if line.endswith(f"= {kind.__name__}({options})") and self.stages.get(name) == pattern:
                    return f"self.{name}"
        name = f"s{len(self.stages)}"
        self.stages[name] = pattern
        return self.register(name, f"{kind.__name__}({options})")

    # --- blocks ---

    @contextmanager
    def block(self) -> Iterator[list[str]]:
        """Statements of an inner block: collected, and their variables forgotten."""
        lines, self.lines = self.lines, []
        count, vars_ = len(self.vars), list(self.vars)
        self.depth += 1
        try:
            yield self.lines
        finally:
            self.depth -= 1
            self.lines = lines
            self.vars = vars_[:count]

    def some(self, n: int, skip: set[str]) -> None:
        """n statements."""
        for _ in range(n):
            for _ in range(30):
                make = self.rng.choices(list(STATEMENTS.values()), [m.weight for m in STATEMENTS.values()])[0]
                if make.__name__ in skip:
                    continue
                before = len(self.vars), len(self.lines), len(self.header), dict(self.stages), dict(self.modules)
                try:
                    make(self)
                    break
                except (Dead, RuntimeError, IndexError, ValueError):
                    del self.vars[before[0] :], self.lines[before[1] :], self.header[before[2] :]
                    self.stages, self.modules = before[3], before[4]

    def program(self) -> str:
        """Everything as text; returned is what was made last, and something else."""
        results = [v for v in self.vars if v.name not in self.inputs and v.kind in "fc"]
        wide = [v for v in results if self.env[v.name].requires_grad]
        if not wide:
            raise Dead
        last = wide[-1]
        body = "\n".join(self.lines)
        unused = [v for v in results[:-1] if v is not last and body.count(f"{v.name}") < 2]
        outs = [last, *self.rng.sample(unused, min(len(unused), self.rng.choice((0, 1, 1, 2))))]
        self.lines = live(self.lines, [o.name for o in outs])
        body = "\n".join(self.lines)
        words = set(re.findall(r"\w+", body))
        inputs = {k: v for k, v in self.inputs.items() if k in words}
        root = [r for r in self.root if r.split("=")[0] in inputs]
        if not root:
            raise Dead
        header = [line for line in self.header if line.split(" ")[0] in words]
        words |= set(re.findall(r"\w+", " ".join([*header, *inputs.values()])))
        used = [n for n in self.sizes if n in words]
        listed = ", ".join(o.name for o in outs)
        arguments = ", ".join(f"{k}: ({v})" for k, v in inputs.items())
        stages = ", ".join(
            f'"{k}": "{v}"' for k, v in {"": ", ".join(root), **self.stages}.items() if not k or k in words
        )
        lines = [
            f"{', '.join(used)} = {', '.join(str(self.sizes[n]) for n in used)}",
            f"stages = {{{stages}}}",
            *header,
            f"def forward(self, {arguments}):",
            *("    " + line for statement in self.lines for line in statement.split("\n")),
            f"    return {self.any((listed, f'[{listed}]')) if len(outs) > 1 else listed}",
        ]
        return "\n".join(lines) + "\n"


VIEWS = """transpose|unsqueeze|flatten|detach|movedim|permute|unflatten|narrow|select|squeeze|mT|unbind|chunk|split|
reshape|view|contiguous|expand""".replace("\n", "")


def live(lines: list[str], wanted: list[str]) -> list[str]:
    """The lines that what is wanted is made of; a write stays if what it writes into may be a view of such a thing."""
    bases: dict[str, set[str]] = {}
    for line in lines:
        for name, of in re.findall(rf"^\s*([\w, ]+) = (?:rearrange\()?(x\d+)(?:\[|,|\.(?:{VIEWS}))", line, re.M):
            for one in name.split(", "):
                bases.setdefault(one, set()).add(of)
    alive, kept = set(wanted), list[str]()
    for line in reversed(lines):
        target = re.match(r"([\w, ]+) = ", line)
        block = line.startswith(("with", "for", "def"))
        names = set(re.findall(r"\b[xf]\d+\b", line))
        if target:
            keep = bool(set(target[1].split(", ")) & alive)
        elif block:
            keep = bool(names & alive)
        else:  # a write
            origin, seen = {re.match(r"\w+", line)[0]}, set[str]()  # type: ignore[index]
            while origin - seen:
                seen |= origin
                origin = set().union(*(bases.get(o, set()) for o in origin))
            keep = bool(seen & alive)
        if keep:
            alive |= names
            kept.append(line)
    return kept[::-1]


STATEMENTS: dict[str, Any] = {}


def statement(weight: float) -> Callable[[Any], Any]:
    def add(make: Any) -> Any:
        make.weight = weight
        STATEMENTS[make.__name__] = make
        return make

    return add


# what `other` makes of a tensor x of dim d: some return x itself, a view or a copy of it, by what they see of it
OTHERWISE = (
    """
x.contiguous() | x.to(torch.float64) | x.double() | x.type_as(x) | x.clone() | x.reshape(x.shape) | x.expand(x.shape)
x.expand_as(x) | x.view_as(x) | x.flatten().view(x.shape) | x.ravel().reshape(x.shape) | x.unsqueeze(0).squeeze(0)
x.transpose(0, d).contiguous().transpose(0, d) | x.mT.reshape(-1).view(x.mT.shape).mT if x.ndim > 1 else x.square()
x * 1.1 | x[...] | x.flip(d) | x.roll(1, d) | x.cumsum(d) | x.softmax(d) | x - x.mean(d, keepdim=True) | x + x.sum()
x + x.amax(d, keepdim=True) | torch.stack([x, x.tanh()]).sum(0) | torch.cat([x, x * 2], d).narrow(d, 1, x.shape[d])
x.narrow(d, 0, 1) + x | x.to(torch.complex128).real | x.detach() + x | x.split(1, d)[0] * x | x.sort(d)[0]
""".replace("\n", "|")
    .strip("|")
    .split("|")
)


def straying(text: str, writer: Writer) -> str:
    """The program goes another way where its attribute `other` is set, as a cache does that was filled."""
    ndim = {v.name: v.ndim for v in writer.vars if v.kind == "f" and v.ndim}
    lines = []
    for line in text.splitlines():
        lines.append(line)
        name = line.partition(" =")[0].strip()
        if line.startswith(f"    {name} =") and name in ndim and writer.chance(0.4):
            way = re.sub(r"\bx\b", name, re.sub(r"\bd\b", str(writer.rng.randrange(ndim[name])), writer.any(OTHERWISE)))
            lines.append(f"    if {writer.any(['', '', 'not '])}self.other: {name} = {way.strip()}")
    return "\n".join([*lines, ""])


def generate(seed: int, size: int = 2, strays: bool = False) -> str:
    """A program of about 4 x size statements. The same text for the same seed, whatever ran before.

    One that `strays` has short dims, too: some ranks have nothing of them.
    """
    for attempt in itertools.count():
        rng = random.Random(f"{seed}/{size}/{attempt}{'/strays' * strays}")
        global _order
        _order = itertools.count()
        try:
            with float64():
                writer = Writer(rng, SHORT if strays else SIZES)
                writer.some(rng.randint(2 * size, 5 * size), set())
                text = writer.program()
        except Dead:
            continue
        if strays:
            text = straying(text, writer)
            if "self.other" not in text or not sound(text.replace("self.other", "(not self.other)")):
                continue
        if sound(text):
            return text
    raise AssertionError


@contextmanager
def float64() -> Iterator[None]:
    before, state = torch.get_default_dtype(), torch.get_rng_state()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
        torch.set_rng_state(state)


# --- one step, the same for one process and for many ------------------------------------------------------------------


def tensors(out: Any) -> list[Tensor]:
    return [t for o in (out if isinstance(out, (list, tuple)) else [out]) for t in [o] if isinstance(t, Tensor)]


def loss_of(outputs: list[Tensor], mean: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """A weighted mean of each output, no two of its elements alike."""
    total = torch.zeros(())
    for y in outputs:
        if y.numel() == 0 or not (y.is_floating_point() or y.is_complex()):
            continue
        weight = torch.linspace(0.5, 2, y.numel()).view(y.shape)
        for part in (y.real, y.imag) if y.is_complex() else (y,):
            total = total + mean(part * part + part, weight)
    return total


def plain_mean(x: Tensor, weight: Tensor) -> Tensor:
    return (x * weight).sum() / weight.sum()


def leaves_of(inputs: dict[str, Tensor], shift: float = 0.0) -> dict[str, Tensor]:
    """Copies, moved by a little."""
    return {
        k: (v.detach() + shift).requires_grad_(v.requires_grad) if v.is_floating_point() else v.clone()
        for k, v in inputs.items()
    }


@dataclass
class Step:
    """Outputs and gradients of one step on one process."""

    outputs: list[Tensor]
    params: dict[str, Tensor | None]
    inputs: dict[str, Tensor | None] = field(default_factory=dict)

    def all(self) -> list[Tensor | None]:
        return [*self.outputs, *self.params.values(), *self.inputs.values()]


def step(model: nn.Module, inputs: dict[str, Tensor], shift: float = 0.0) -> Step:
    leaves = leaves_of(inputs, shift)
    for p in model.parameters():
        p.grad = None
    outputs = tensors(model(**leaves))
    loss = loss_of(outputs, plain_mean)
    if loss.requires_grad:
        loss.backward()
    return Step(
        [o.detach() for o in outputs],
        {n: p.grad for n, p in model.named_parameters()},
        {k: v.grad for k, v in leaves.items() if v.requires_grad},
    )


def sound(text: str) -> bool:
    """Tell whether one process runs it, to numbers that do not hang on rounding, and into gradients."""
    try:
        with float64(), warnings.catch_warnings():
            warnings.simplefilter("error")
            model = build(text)
            inputs = inputs_of(model)
            step(model, inputs)
            one = step(model, inputs)
            with torch.no_grad():
                for p in model.parameters():
                    p += 1e-11
            two = step(model, inputs, 1e-11)
    except Exception:
        return False
    grads = [g for g in (*one.params.values(), *one.inputs.values()) if g is not None and g.numel()]
    if not any(float(g.abs().max()) > 1e-9 for g in grads):  # none, or rounding alone
        return False
    for a, b in zip(one.all(), two.all()):
        if (a is None) != (b is None):
            return False
        if a is not None and not (
            torch.isfinite(a).all() and a.shape == b.shape and a.abs().max().item() < 1e4 if a.numel() else True
        ):
            return False
        if a is not None and a.numel() and (a - b).abs().max() > 1e-7 * (1 + a.abs().max()):
            return False
    return True


from tools.fuzz import statements  # noqa: E402, F401  (registers what `Writer.some` chooses from)
