"""The statements of random programs: each writes a line or a few, of what the program has so far."""

from __future__ import annotations

import string
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from tools.fuzz.programs import (
    Attend,
    Axis,
    Conv,
    Cross,
    Dead,
    Gate,
    Mlp,
    Pool,
    Product,
    Scan,
    Scribble,
    Table,
    Var,
    Writer,
    live,
    statement,
)


def forms(text: str) -> list[str]:
    """Expressions in a list, apart by |."""
    return [form.strip() for form in text.replace("\n", " ").split(" | ")]


def spread(front: int, behind: int) -> str:
    """The inside of x[...] that puts new dims between the first `front` and the last `behind`."""
    return ", ".join([":"] * front + ["None"] * behind)


def ends(w: Writer, ndim: int, d: int, what: str) -> str:
    """The inside of x[:, what] or x[..., what, :]"""
    return ", ".join(["...", what, *":" * (ndim - 1 - d)] if w.chance(0.4) else [*":" * d, what])


def letters(vars_: Sequence[Var]) -> list[str]:
    """A letter for each axis; the same for the same dims in all, but not twice in one."""
    known: dict[Any, str] = {}
    for v in vars_:
        for k, axis in enumerate(v.axes):
            known.setdefault((axis, v.axes[:k].count(axis)), string.ascii_lowercase[len(known)])
    return ["".join(known[axis, v.axes[:k].count(axis)] for k, axis in enumerate(v.axes)) for v in vars_]


def broadcast(w: Writer, x: Var, y: Var) -> str:
    """y as it adds to x: with new axes where it lacks one. Its dims must come in the order of x's."""
    items, d = [], 0
    for axis in x.axes:
        has = d < y.ndim and (y.axes[d] == axis or w.size(y.axes[d]) == 1)
        items += [":"] if has else ["None"] if items else []  # in front it broadcasts by itself
        d += has
    if d < y.ndim or not items:
        raise Dead
    if "None" not in items:
        return y.name
    if w.chance(0.3) and items[-1] == ":":
        items = items[: max(i for i, item in enumerate(items) if item == "None") + 1]
    if w.chance(0.3) and items.count("None") == 1:
        return f"{y.name}.unsqueeze({items.index('None')})"
    return f"{y.name}[{', '.join(items)}]"


def fitting(w: Writer, x: Var, kind: str = "f") -> str:
    """Another variable as it adds to x."""
    texts = []
    for v in w.vars:
        if v.kind == kind and v is not x and v.ndim:
            try:
                texts.append(broadcast(w, x, v))
            except Dead:
                continue
    return w.any(texts[-6:])


def twin(w: Writer, x: Var, but: int | None = None) -> Var:
    """Another variable of the same axes, of any size along `but`."""

    def alike(v: Var) -> bool:
        same = v.kind == x.kind and v.ndim == x.ndim
        return same and all(d == but or a == b for d, (a, b) in enumerate(zip(v.axes, x.axes)))

    return w.any([v for v in w.vars if alike(v)][-5:])


def wide(w: Writer, v: Var) -> bool:
    return v.ndim > 1 and w.size(v.axes[-1]) <= 16 and any(w.size(a) > 1 for a in v.axes[:-1])


def distinct(*vars_: Var) -> None:
    if any(() in v.axes or len(set(v.axes)) < v.ndim for v in vars_):
        raise Dead


# --- stages -----------------------------------------------------------------------------------------------------------


def put(w: Writer, kind: Any, options: str, x: Var, computed: Sequence[int]) -> Var:
    return w.let(f"{w.stage(kind, options, w.pattern(x.axes, computed, {}))}({x.name})", x.axes, writable=True)


@statement(9)
def attend(w: Writer) -> Var:
    x = w.pick(ndim=(2, 5), ok=lambda v: wide(w, v))
    d = w.place(x)
    return put(w, Attend, str(d), x, [d, x.ndim - 1])


@statement(3)
def mlp(w: Writer) -> Var:
    x = w.pick(ndim=(2, 5), ok=lambda v: wide(w, v))
    return put(w, Mlp, "", x, [x.ndim - 1])


@statement(3)
def along(w: Writer) -> Var:
    x = w.pick(ndim=(2, 5))
    d = w.axis(x, 2)
    return put(w, w.any((Scan, Conv, Table)), str(d), x, [d])


@statement(1)
def table_over_two(w: Writer) -> Var:
    x = w.pick(ndim=(3, 5))
    a, b = sorted(w.rng.sample(range(x.ndim), 2))
    return put(w, Table, f"{a}, {b}", x, [a, b])


@statement(2.5)
def cross(w: Writer) -> Var:
    x = w.pick(ndim=(2, 5), ok=lambda v: wide(w, v))
    y = w.pick(ndim=(2, 5), ok=lambda v: v.axes[-1] == x.axes[-1] and v is not x)
    distinct(x, y)
    theirs = [d for d, a in enumerate(y.axes[:-1]) if a not in x.axes]
    if not theirs:
        raise Dead
    x_letters, y_letters = letters([x, y])
    names: dict[Axis, str] = {}
    first = w.pattern(x.axes, [x.ndim - 1], names)
    second = w.pattern(y.axes, [*theirs, y.ndim - 1], names)
    named = "y=" if w.chance(0.7) else ""
    stage = w.stage(Cross, f'"{x_letters}", "{y_letters}"', f"{first}, {named}{second}")
    return w.let(f"{stage}({x.name}, {named if w.chance(0.5) else ''}{y.name})", x.axes, writable=True)


@statement(2)
def pool(w: Writer) -> Var:
    x = w.pick(ndim=(3, 5), ok=lambda v: wide(w, v))
    d = w.place(x)
    left = w.pattern(x.axes, [d, x.ndim - 1], {})
    parts = left.split(" ")
    if len(parts) != x.ndim:  # a fold in it
        raise Dead
    stage = w.stage(Pool, str(d), f"{left} -> {left}, {' '.join(parts[:d] + parts[d + 1 :])}")
    return w.several(f"{stage}({x.name})", x.axes, x.but(d), writable=True)[0]


@statement(2)
def gate(w: Writer) -> Var:
    x = w.pick(ndim=(2, 5), ok=lambda v: wide(w, v))
    p = w.pattern(x.axes, [x.ndim - 1], {})
    more = f", {w.param(x.axes[-1])}" if w.chance(0.3) else ""
    stage = w.stage(Gate, "", f"{p}, {p} -> {p}, {p}")
    return w.several(f"{stage}({x.name}, {twin(w, x).name}{more})", x.axes, x.axes, writable=True)[1]


@statement(1.5)
def product(w: Writer) -> Var:
    """Triangles and outer products: one dim of each is summed, another one apart."""
    x = w.pick(ndim=(3, 4), ok=lambda v: wide(w, v))
    y = twin(w, x)
    distinct(x)
    d = w.rng.randrange(1, x.ndim - 1)
    kept = [k for k in range(x.ndim - 1) if k != d]
    moved = w.any(kept)
    a = [f"d{k}" for k in range(x.ndim - 1)]
    b = [*a[:moved], "e", *a[moved + 1 :]]
    out = [*(a[k] for k in kept), "e"]
    code = {name: string.ascii_lowercase[k] for k, name in enumerate([*a, "e"])}
    equation = ",".join("".join(code[n] for n in names) + "z" for names in (a, b))
    equation += f"->{''.join(code[n] for n in out)}z"
    left = ", ".join(" ".join(f"[{n}]" if n == a[d] else n for n in names) + " [c]" for names in (a, b))
    stage = w.stage(Product, f'"{equation}"', f"{left} -> {' '.join(out)} [c]")
    return w.let(f"{stage}({x.name}, {y.name})", [*(x.axes[k] for k in [*kept, moved]), x.axes[-1]], writable=True)


@statement(0.5)
def scribble(w: Writer) -> Var:
    x = w.pick(ndim=(2, 5), ok=lambda v: v.writable and v.depth == w.depth)
    return put(w, Scribble, "", x, [x.ndim - 1])


# --- one element at a time --------------------------------------------------------------------------------------------

UNARY = forms("""
torch.tanh({0}) | {0} * 0.7 | {0}.sigmoid() | F.gelu({0}) | F.silu({0}) * 2 | {0}.square() * 0.3 | 1 - {0} | {0} / 2 |
{0}.clamp(-1.5, 1.5) | torch.where({0} > 0.1, {0}, 0.2 * {0}) | F.relu({0}) | {0}.masked_fill({0} > 1, 0.5) | -{0} |
({0}.square() + 1).sqrt() | {0}.clone() | torch.exp(-{0}.square()) | {0}.sin() | F.softplus({0}) | {0}.abs() |
F.leaky_relu({0}, 0.1) | 2 / ({0}.abs() + 1) | {0}.contiguous() * 1.1 | {0}.type_as({0}) * 0.9 | {0}.double() + 0.25 |
F.dropout({0}, 0.5, False) + 0.1 | torch.zeros_like({0}) + 0.5 * {0}
""")
BINARY = forms("""
{0} + {1} | {0} * torch.tanh({1}) | {0} - 0.5 * {1} | torch.maximum({0}, {1}) | torch.lerp({0}, {1}, 0.3) | {1} + {0} |
torch.addcmul({0}, {0}, {1}, value=0.2) | {0} * torch.sigmoid({1}) | torch.where({1} > 0, {0}, {0} * 0.3) |
{0} * (1 + {1}.tanh()) | torch.add({0}, {1}, alpha=0.5) | {0}.masked_fill({1} > 0.8, 0.0)
""")
NORM = forms("""
F.layer_norm({0}, ({0}.shape[-1],)) | F.rms_norm({0}, ({0}.shape[-1],)) | F.layer_norm({0}, {0}.shape[-2:])
""")
WITH_PARAMETER = forms("{0} + {1} | {0} * {1} | {1} - {0} | torch.addcmul({0}, {0}, {1})")
MASKED = forms("""
{0}.masked_fill({1}, 0.5) | {0} * {1} | torch.where({1}, {0}, {0} * 0.5) | {0}.masked_fill(~{1}, -1) |
{0} * {1}.to({0}.dtype)
""")
OVER_ALL = forms("""
{0} / ({0}.abs().amax() + 1) | {0} * {0}.mean() | {0} - {0}.sum() / {0}.numel() | {0} / ({0}.norm() + 1) |
{0} * F.mse_loss({0}, {0} * 0.5) | {0} / ({0}.std() + 1) | {0} + {0}.square().mean().sqrt() |
{0} * torch.tanh({0}.max())
""")


def of_one(weight: float, table: list[str], name: str) -> None:
    def make(w: Writer) -> Var:
        x = w.pick(ndim=(2, 6)) if table is NORM else w.pick()
        return w.let(w.any(table).format(x.name), x.axes, writable=True)

    make.__name__ = name
    statement(weight)(make)


of_one(4, UNARY, "unary")
of_one(2, NORM, "norm")
of_one(1.2, OVER_ALL, "over_all")


@statement(6)
def binary(w: Writer) -> Var:
    x = w.pick()
    return w.let(w.any(BINARY).format(x.name, fitting(w, x)), x.axes, writable=True)


@statement(3)
def with_parameter(w: Writer) -> Var:
    """With a vector, or a row for each place of some dims."""
    x = w.pick()
    d = w.axis(x)
    if w.chance(0.4):
        y = w.param(x.axes[-1])
    elif w.chance(0.3):
        y = w.param(*x.axes[w.rng.randrange(x.ndim) :])
    elif d < x.ndim - 2:
        y = f"{w.param(x.axes[d], x.axes[-1])}[{spread(1, x.ndim - 2 - d)}]"
    else:
        y = w.param(*x.axes[d:])
    return w.let(w.any(WITH_PARAMETER).format(x.name, y), x.axes, writable=True)


@statement(2)
def outer_sum(w: Writer) -> Var:
    """Two of fewer dims make one of more."""
    x = w.pick(ndim=(2, 4), ok=lambda v: wide(w, v))
    y = w.pick(ndim=(2, 4), ok=lambda v: v is not x and v.axes[-1] == x.axes[-1] and v.axes[0] == x.axes[0])
    axes = [*x.axes[:-1], *y.axes[1:-1], x.axes[-1]]
    if len(axes) > 5:
        raise Dead
    a = f"{x.name}[{spread(x.ndim - 1, y.ndim - 2)}]"
    return w.let(f"{a} {w.any('+-*')} {y.name}[{spread(1, x.ndim - 2)}]", axes, writable=True)


@statement(2)
def linear(w: Writer) -> Var:
    x = w.pick()
    c = x.axes[-1]
    out = w.fresh(2 * w.size(c)) if w.chance(0.3) else c
    weight = w.param(out, c)
    return w.let(w.any((f"F.linear({x.name}, {weight})", f"{x.name} @ {weight}.T")), [*x.axes[:-1], out], writable=True)


@statement(2)
def mask(w: Writer) -> Var:
    x = w.pick()
    try:
        m = fitting(w, x, "b")
    except Dead:
        d = w.axis(x, 2)
        m = f"(torch.arange({x.name}.shape[{d}]) % 3 > 0)[{spread(1, x.ndim - 1 - d)}]"
    return w.let(w.any(MASKED).format(x.name, m), x.axes, writable=True)


@statement(0.7)
def new_mask(w: Writer) -> Var:
    x = w.pick(ndim=(2, 5))
    d = w.axis(x, 2)
    how, axes = w.any((
        ("{0} > 0.2", x.axes), ("{0}.amax({1}) > 1", x.but(d)), ("({0} > 0).any({1})", x.but(d)),
        ("({0} > -2).all({1}, keepdim=True)", x.but(d, ())),
    ))  # fmt: skip
    return w.let(how.format(x.name, d), axes, kind="b")


@statement(0.8)
def look_up(w: Writer) -> Var:
    i = w.pick("i")
    row = ("c",) if "c" in w.sizes else w.fresh(6)
    table = w.param(w.fresh(4), row)
    return w.let(w.any((f"{table}[{i.name}]", f"F.embedding({i.name}, {table})")), [*i.axes, row])


@statement(0.8)
def positions(w: Writer) -> Var:
    """A table by place, or waves: glue on what is whole, which meets a sharded tensor later."""
    x = w.pick(ndim=(2, 5))
    axis = x.axes[w.axis(x, 2)]
    c = ("c",) if "c" in w.sizes else x.axes[-1]
    table, n = w.param(w.fresh(max(8, w.size(axis))), c), w.text(axis)
    return w.let(w.any((
        f"{table}[:{n}]", f"{table}[torch.arange({n})]", f"F.embedding(torch.arange({n}).flip(0), {table})",
        f"torch.sin(torch.arange({n})[:, None] * {table}[0])",
    )), [axis, c])  # fmt: skip


# --- along a dim ------------------------------------------------------------------------------------------------------

ALONG = forms("""
{0}.softmax({1}) | {0}.cumsum({1}) / 3 | {0} - {0}.mean({1}, keepdim=True) | {0}.flip({1}) | {0}.roll(1, {1}) |
{0}.sort({1}).values | {0} - {0}.amax({1}, keepdim=True) | F.normalize({0}, dim={1}) | F.log_softmax({0}, dim={1}) |
{0} / ({0}.std({1}, keepdim=True) + 1) | {0} * {0}.sum({1}, keepdim=True).tanh() | {0}.cumprod({1}) * 0.5 |
{0} * {0}.softmax({1}) | {0}.roll((1, 2), ({1}, 0)) | {0} + {0}.flip({1}) * 0.5 | {0}.logcumsumexp({1}) |
{0} - {0}.var({1}, keepdim=True, unbiased=False) | {0} + {0}.norm(dim={1}, keepdim=True) |
{0} + {0}.sort({1}, descending=True)[0] | {0}.index_select({1}, randperm({0}.shape[{1}])) |
torch.cummax({0}, {1}).values | {0}.diff(dim={1}, prepend={0}.narrow({1}, 0, 1))
""")
REDUCE = """
mean({0}) sum({0}) amax({0}) logsumexp({0}) std({0}) norm(dim={0}) max({0}).values median({0}).values var({0}) prod({0})
amin({0}) nanmean({0})
""".split()


@statement(5)
def along_dim(w: Writer) -> Var:
    x = w.pick()
    return w.let(w.any(ALONG).format(x.name, w.at(w.axis(x, 2), x.ndim)), x.axes, writable=True)


@statement(2.5)
def reduced(w: Writer) -> Var:
    x = w.pick(ndim=(2, 5))
    d = w.axis(x, 2)
    if w.chance(0.25):
        left = [f"a{k}" for k in range(x.ndim)]
        pattern = f"{' '.join(left)} -> {' '.join(left[:d] + left[d + 1 :])}"
        return w.let(f'reduce({x.name}, "{pattern}", "{w.any(("mean", "sum", "max"))}")', x.but(d), writable=True)
    if x.ndim > 2 and w.chance(0.25):
        e = w.any([k for k in range(x.ndim) if k != d])
        axes = [a for k, a in enumerate(x.axes) if k not in (d, e)]
        return w.let(f"{x.name}.{w.any(('mean', 'sum', 'amax'))}(({d}, {w.at(e, x.ndim)}))", axes, writable=True)
    return w.let(f"{x.name}.{w.any(REDUCE).format(w.at(d, x.ndim))}", x.but(d), writable=True)


# --- views ------------------------------------------------------------------------------------------------------------


@statement(2)
def flatten(w: Writer) -> Var:
    x = w.pick(ndim=(2, 6))
    d = w.rng.randrange(x.ndim - 1)
    e = min(x.ndim - 1, d + w.rng.choice((1, 1, 1, 2)))
    axes = [*x.axes[:d], sum(x.axes[d : e + 1], ()), *x.axes[e + 1 :]]
    return w.let(w.any((
        f"{x.name}.flatten({d}, {w.at(e, x.ndim)})", f"{x.name}.reshape({w.shaped(axes)})",
        f"{x.name}.reshape({', '.join([*map(w.text, x.axes[:d]), '-1', *map(w.text, x.axes[e + 1 :])])})",
    )), axes)  # fmt: skip


@statement(2)
def opened(w: Writer) -> Var:
    """A fold apart again."""
    x = w.pick(ok=lambda v: any(len(a) > 1 for a in v.axes))
    d = w.any([d for d, a in enumerate(x.axes) if len(a) > 1])
    cut = w.rng.randrange(1, len(x.axes[d]))
    axes = x.but(d, x.axes[d][:cut], x.axes[d][cut:])
    one, two = w.text(axes[d]), w.text(axes[d + 1])
    parts = w.any((f"{one}, -1", f"-1, {two}", f"{one}, {two}"))
    return w.let(w.any((
        f"{x.name}.unflatten({w.at(d, x.ndim)}, ({parts}))", f"{x.name}.reshape({w.shaped(axes)})",
        f"{x.name}.contiguous().view({w.shaped(axes)})",
    )), axes)  # fmt: skip


@statement(1.5)
def split_dim(w: Writer) -> Var:
    """Heads, patches, windows: one dim as two."""
    x = w.pick(ndim=(1, 5))
    d = w.any([d for d, a in enumerate(x.axes) if w.size(a) > 2 and w.size(a) % 2 == 0])
    n = w.size(x.axes[d])
    small = w.any([k for k in (2, 3) if n % k == 0 and n > k])
    first = w.chance(0.5)
    axes = x.but(d, *map(w.fresh, (small, n // small) if first else (n // small, small)))
    return w.let(f"{x.name}.unflatten({w.at(d, x.ndim)}, ({f'{small}, -1' if first else f'-1, {small}'}))", axes)


@statement(2.5)
def turned(w: Writer) -> Var:
    x = w.pick(ndim=(2, 6))
    a, b = w.rng.sample(range(x.ndim), 2)
    order = list(range(x.ndim))
    how = w.rng.randrange(4)
    if how == 0:
        order[a], order[b] = b, a
        text = f"transpose({w.at(a, x.ndim)}, {w.at(b, x.ndim)})"
    elif how == 1:
        order.insert(b, order.pop(a))
        text = f"movedim({a}, {w.at(b, x.ndim)})"
    elif how == 2:
        order[-2:] = order[-1], order[-2]
        text = "mT"
    else:
        w.rng.shuffle(order)
        text = f"permute({', '.join(map(str, order))})"
    return w.let(f"{x.name}.{text}", [x.axes[d] for d in order])


@statement(2.5)
def einops(w: Writer) -> Var:
    """Folds opened, dims in another order, neighbours folded."""
    x = w.pick(ndim=(2, 6), ok=lambda v: all(v.axes))
    names: list[tuple[str, Axis]] = []
    left, more = [], ""
    for d, axis in enumerate(x.axes):
        units = [(f"{n}{d}", (n,)) for n in axis] if len(axis) > 1 and w.chance(0.7) else [(f"a{d}", axis)]
        more += "".join(f", {name}={w.text(part)}" for name, part in units[1:])
        text = " ".join(name for name, _ in units)
        left.append(text if len(units) == 1 else f"({text})")
        names += units
    if len(names) > 5:
        raise Dead
    if w.chance(0.7):
        w.rng.shuffle(names)
    right, axes = [], list[Axis]()
    while names:
        m = w.rng.choice((1, 1, 1, 2))
        group, names = names[:m], names[m:]
        right.append(group[0][0] if len(group) == 1 else f"({' '.join(n for n, _ in group)})")
        axes.append(sum((a for _, a in group), ()))
    return w.let(f'rearrange({x.name}, "{" ".join(left)} -> {" ".join(right)}"{more})', axes)


@statement(1)
def unsqueezed(w: Writer) -> Var:
    x = w.pick(ndim=(1, 4))
    d = w.rng.randrange(x.ndim + 1)
    return w.let(f"{x.name}.unsqueeze({w.at(d, x.ndim + 1)})", [*x.axes[:d], (), *x.axes[d:]])


@statement(1)
def squeezed(w: Writer) -> Var:
    x = w.pick(ndim=(2, 6), ok=lambda v: () in v.axes)
    if w.chance(0.3):
        return w.let(f"{x.name}.squeeze()", [a for a in x.axes if w.size(a) > 1])
    d = w.any([d for d, a in enumerate(x.axes) if not a])
    return w.let(f"{x.name}.squeeze({w.at(d, x.ndim)})", x.but(d))


@statement(1)
def scrambled(w: Writer) -> Var:
    """A reshape that cuts through dims."""
    x = w.pick(ndim=(2, 4))
    axes = [w.fresh(w.size(a)) for a in w.rng.sample(x.axes, x.ndim)]
    return w.let(f"{x.name}.reshape({w.shaped(axes)})", axes)


@statement(1)
def folded_there_and_back(w: Writer) -> Var:
    x = w.pick(ndim=(3, 5))
    d = w.rng.randrange(x.ndim - 1)
    middle = w.any(forms("{0} * 0.5 + {0} | {0}.cumsum({1}) / 4 | {0}.softmax({1}) | {0}.flip({1}) | {0}.tanh()"))
    name = w.aside(f"{x.name}.flatten({d}, {d + 1})")
    return w.let(f"({middle.format(name, w.rng.randrange(x.ndim - 1))}).reshape({x.name}.shape)", x.axes)


# --- parts and joins --------------------------------------------------------------------------------------------------


@statement(3)
def part(w: Writer) -> Var:
    x = w.pick(ndim=(1, 6))
    d = w.axis(x, 2)
    n = w.size(x.axes[d])
    k = w.rng.randrange(1, n)
    what, size = w.any((
        (f"{k}:", n - k), (f":{k}", k), (":-1", n - 1), ("1:", n - 1), ("::2", (n + 1) // 2), ("1::2", n // 2),
        (f"{k - 1}:{k}", 1), ("-1:", 1), (f"[{k}, 0]", 2), (f"[{n - 1}, 0, {k}]", 3), (f":{n}", n),
    ))  # fmt: skip
    axes = x.but(d, x.axes[d] if size == n else w.fresh(size))
    if w.chance(0.1):
        return w.let(f"{x.name}.narrow({w.at(d, x.ndim)}, {n - size}, {size})", axes)
    return w.let(f"{x.name}[{ends(w, x.ndim, d, what)}]", axes)


@statement(1.5)
def one(w: Writer) -> Var:
    x = w.pick(ndim=(2, 6))
    d = w.axis(x)
    k = w.rng.randrange(-1, w.size(x.axes[d]))
    return w.let(w.any((
        f"{x.name}[{ends(w, x.ndim, d, str(k))}]", f"{x.name}.select({d}, {k})", f"{x.name}.unbind({d})[{k}]",
    )), x.but(d))  # fmt: skip


@statement(1.2)
def chunks(w: Writer) -> Var:
    x = w.pick(ndim=(1, 5))
    d = w.axis(x, 2)
    n = w.size(x.axes[d])
    if n % 2 == 0 and w.chance(0.6):
        axes = x.but(d, w.fresh(n // 2))
        a, b = w.several(f"{x.name}.chunk(2, {w.at(d, x.ndim)})", axes, axes)
        return w.let(f"{a.name} * torch.sigmoid({b.name})", axes, writable=True)
    k = w.rng.randrange(1, n)
    return w.let(f"{x.name}.split(({k}, {n - k}), {w.at(d, x.ndim)})[1]", x.but(d, w.fresh(n - k)))


@statement(2.5)
def joined(w: Writer) -> Var:
    x = w.pick(ndim=(1, 5))
    d = w.axis(x)
    n, at, how = w.size(x.axes[d]), w.at(d, x.ndim), w.rng.randrange(5)
    if how == 0:
        y = twin(w, x, d)
        size, parts = n + w.size(y.axes[d]), [x.name, y.name]
    elif how == 1:  # a token
        token = w.param(x.axes[-1] if d < x.ndim - 1 else ())
        size, parts = n + 1, [f"{token}.expand({w.shaped(x.but(d, ()))})", x.name]
    elif how == 2:  # nothing
        size, parts = n, [f"{x.name}[{ends(w, x.ndim, d, ':0')}]", x.name]
    elif how == 3:  # parts of itself
        size, parts = n, [f"{x.name}.narrow({at}, 1, {n - 1})", f"{x.name}.narrow({at}, 0, 1)"]
    else:
        size, parts = 2 * n, [x.name, f"{x.name}.flip({at})"]
    if w.chance(0.4):
        parts.reverse()
    return w.let(
        f"torch.cat([{', '.join(parts)}], {at})", x.but(d, x.axes[d] if size == n else w.fresh(size)), writable=True
    )


@statement(1.5)
def join_and_split(w: Writer) -> Var:
    """Two or three, as text and the tokens of a video, that are together for some operations."""
    x = w.pick(ndim=(2, 4))
    d = w.axis(x, 2)
    parts = [x, *(twin(w, x, d) for _ in range(w.rng.randint(1, 2)))]
    sizes = [w.size(v.axes[d]) for v in parts]
    axes, at, ends_ = x.but(d, w.fresh(sum(sizes))), w.at(d, x.ndim), [0, *accumulate(sizes)]
    both = w.let(f"torch.cat([{', '.join(v.name for v in parts)}], {at})", axes, writable=True)
    if wide(w, both) and d < x.ndim - 1 and w.chance(0.5):
        both = w.let(f"{both.name} @ {w.param(axes[-1], axes[-1])}", axes, writable=True)
    if w.chance(0.5):
        both = w.let(f"torch.tanh({both.name}) + {both.name}", axes, writable=True)
    if w.chance(0.4):
        k = w.rng.randrange(len(parts))
        place = ends(w, x.ndim, d, f"{ends_[k]}:{ends_[k + 1]}")
        w.run(f"{both.name}[{place}] = {both.name}[{place}] * {w.any(['0.5', f'{parts[k].name}.sigmoid()'])}")
    if w.chance(0.3):
        both = w.let(f"{both.name}.cumsum({at})", axes, writable=True)
    if w.chance(0.5):
        return w.several(f"{both.name}.split({tuple(sizes)}, {at})", *(v.axes for v in parts))[0]
    first = w.let(f"{both.name}[{ends(w, x.ndim, d, f':{sizes[0]}')}]", x.axes)
    w.let(f"{both.name}[{ends(w, x.ndim, d, f'{sizes[0]}:')}]", x.but(d, w.fresh(sum(sizes[1:]))))
    return first


@statement(1)
def stacked(w: Writer) -> Var:
    x = w.pick(ndim=(1, 4))
    d = w.rng.randrange(x.ndim + 1)
    axes = [*x.axes[:d], w.fresh(2), *x.axes[d:]]
    return w.let(f"torch.stack([{x.name}, {twin(w, x).name}], {w.at(d, x.ndim + 1)})", axes, writable=True)


@statement(1.2)
def padded(w: Writer) -> Var:
    x = w.pick(ndim=(1, 5))
    d = w.axis(x)
    zeros = "0, 0, " * (x.ndim - 1 - d)
    if w.chance(0.5):  # a shift
        return w.let(f"F.pad({x.name}, ({zeros}1, 0))[{ends(w, x.ndim, d, ':-1')}]", x.axes)
    return w.let(f"F.pad({x.name}, ({zeros}1, 1))", x.but(d, w.fresh(w.size(x.axes[d]) + 2)), writable=True)


@statement(1.5)
def stretched(w: Writer) -> Var:
    """More of the same: repeats and expands."""
    x = w.pick(ndim=(1, 4))
    how = w.rng.randrange(5)
    if how < 2:
        d = w.axis(x)
        times = ", ".join("2" if k == d else "1" for k in range(x.ndim))
        text = (f"repeat_interleave(2, {w.at(d, x.ndim)})", f"repeat({times})")[how]
        return w.let(f"{x.name}.{text}", x.but(d, w.fresh(2 * w.size(x.axes[d]))), writable=True)
    name = w.any(sorted(n for n in w.named if (n,) not in x.axes and w.sizes[n] > 1))
    d = w.rng.randrange(x.ndim + 1)
    axes = [*x.axes[:d], (name,), *x.axes[d:]]
    if how == 2:
        sizes = ", ".join(name if k == d else w.any(("-1", w.text(a))) for k, a in enumerate(axes))
        return w.let(f"{x.name}.unsqueeze({d}).expand({sizes})", axes)
    if how == 3:
        sizes = ", ".join(name if k == d else "1" for k in range(len(axes)))
        return w.let(f"{x.name}.unsqueeze({d}).repeat({sizes})", axes, writable=True)
    left = [f"a{k}" for k in range(x.ndim)]
    right = [*left[:d], "n", *left[d:]]
    if d > 0 and w.chance(0.5) and x.axes[d - 1]:
        right[d - 1 : d + 1] = [f"({right[d - 1]} n)"]
        axes[d - 1 : d + 1] = [(*axes[d - 1], name)]
    return w.let(f'repeat({x.name}, "{" ".join(left)} -> {" ".join(right)}", n={name})', axes)


@statement(0.8)
def windows(w: Writer) -> Var:
    """Shifted windows of two along one dim, and back."""
    x = w.pick(ndim=(2, 4))
    d = w.any([d for d, a in enumerate(x.axes) if w.size(a) > 2 and w.size(a) % 2 == 0])
    name = w.aside(f"{x.name}.roll(-1, {d}).unflatten({d}, (-1, 2))")
    return w.let(f"({name} * {name}.softmax({d + 1})).flatten({d}, {d + 1}).roll(1, {d})", x.axes, writable=True)


# --- products ---------------------------------------------------------------------------------------------------------


@statement(1.5)
def einsum(w: Writer) -> Var:
    x = w.pick(ndim=(2, 4))
    y = twin(w, x) if w.chance(0.6) else w.pick(ndim=(1, 4))
    distinct(x, y)
    a, b = letters([x, y])
    axes_of = dict(zip(a + b, [*x.axes, *y.axes]))
    for letter in a:
        if letter in b and w.chance(0.3):  # another of the same: an outer product over it
            axes_of[letter.upper()] = axes_of[letter]
            b = b.replace(letter, letter.upper())
    every = list(dict.fromkeys(a + b))
    out = [k for k in every if w.chance(0.75)] or every[:1]
    if w.chance(0.4):
        w.rng.shuffle(out)
    if len(out) > 5:
        raise Dead
    text = f'torch.einsum("{a},{b}->{"".join(out)}", {x.name}, {y.name}) * 0.3'
    return w.let(text, [axes_of[k] for k in out], writable=True)


@statement(1.5)
def matmul(w: Writer) -> Var:
    x = w.pick(ndim=(2, 5))
    y = twin(w, x) if w.chance(0.6) else x
    *lead, m, n = x.axes
    how = w.rng.randrange(3 if x.ndim > 3 else 2)
    if how == 0:
        return w.let(f"{x.name} @ {y.name}.mT * 0.2", [*lead, m, m], writable=True)
    if how == 1:
        return w.let(f"torch.matmul({x.name}.transpose(-1, -2), {y.name}) * 0.2", [*lead, n, n], writable=True)
    text = f"torch.bmm({x.name}.flatten(0, -3), {y.name}.flatten(0, -3).mT) * 0.2"
    return w.let(text, [sum(lead, ()), m, m], writable=True)


@statement(4)
def attention(w: Writer) -> Var:
    """Attention between stages, with masks of many shapes; heads apart or not."""
    x = w.pick(ndim=(2, 5), ok=lambda v: wide(w, v))
    y = twin(w, x, x.ndim - 2) if w.chance(0.4) else x
    *lead, n, c = x.axes
    m, h, ndim = y.axes[-2], w.fresh(2), x.ndim
    q, k = x.name, y.name
    heads = w.size(c) % 2 == 0 and w.size(c) > 2 and x.ndim < 5 and w.chance(0.6)
    if heads:
        split = {v: w.aside(f"{v}.unflatten(-1, (2, -1)).transpose(-2, -3)") for v in dict.fromkeys((q, k))}
        q, k, ndim = split[q], split[k], ndim + 1
    how, more = w.rng.randrange(9), ""
    if how == 0:
        more = ", is_causal=True"
    elif how == 1:
        more = f", attn_mask=torch.ones({w.text(n)}, {w.text(m)}, dtype=torch.bool).tril(2)"
    elif how == 2:
        more = f", {w.param(n, m)}"
    elif how == 3 and heads:
        more = f", {w.param(h, w.any(((), n)), m)}"
    elif how == 4 and lead:  # by sample, by key
        mask = w.any([v.name for v in w.vars if v.kind == "b" and v.axes == [lead[0], m]])
        more = f", {mask}[{spread(1, ndim - 2)}, :]"
    elif how == 5 and heads:  # made of y, by head: (..., h, 1, m)
        more = f", attn_mask={w.aside(f'({y.name} @ {w.param(c, h)}).transpose(-1, -2).unsqueeze(-2)')}"
    elif how == 6:  # made of y, by key: (..., 1, m)
        more = f", attn_mask={w.aside(f'{y.name}.mean(-1).unsqueeze(-2)' + '.unsqueeze(-3)' * heads)}"
    elif how == 7:  # by pair of places
        over = ".mean(-3, keepdim=True)" if heads and w.chance(0.4) else ""
        more = f", attn_mask={w.aside(f'{q} @ {k}.mT * 0.1')}{over}"
    more += ", scale=0.7" if w.chance(0.2) else ""
    axes = [*lead, h, n, w.fresh(w.size(c) // 2)] if heads else x.axes
    out = w.let(f"F.scaled_dot_product_attention({q}, {k}, {k}{more})", axes, writable=True)
    return w.let(f"{out.name}.transpose(-2, -3).flatten(-2)", x.axes) if heads else out


@statement(1.5)
def convolution(w: Writer) -> Var:
    """A convolution, which acts on each sample of a batch: (n c l) or (n c h w)."""
    dims = 2 if w.chance(0.3) else 1
    x = w.pick(ndim=(2 + dims, 5), ok=lambda v: w.size(v.axes[-1]) <= 12)
    lead, spatial, c = x.axes[: x.ndim - 1 - dims], x.axes[-1 - dims : -1], x.axes[-1]
    if any(w.size(a) < 2 for a in spatial):
        raise Dead
    fold = f".flatten(0, {len(lead) - 1})" if len(lead) > 1 else ""
    name, axes = w.aside(f"{x.name}{fold}.movedim(-1, 1)"), [sum(lead, ()), c]
    how = w.rng.randrange(6)
    if how == 2:
        sizes = [w.fresh((w.size(a) + 1) // 2) for a in spatial]
        return w.let(f"F.avg_pool{dims}d({name}, 2, ceil_mode=True)", [*axes, *sizes])
    if how == 3:
        return w.let(f"F.interpolate({name}, scale_factor=2)", [*axes, *(w.fresh(2 * w.size(a)) for a in spatial)])
    if how < 2:
        text = f"F.conv{dims}d({name}, {w.param(c, c, *[w.fresh(3)] * dims)}, padding=1)"
    elif how == 4:
        text = f"F.group_norm({name}, {2 if w.size(c) % 2 == 0 else 1})"
    else:
        text = f"F.batch_norm({name}, None, None, training=True)"
    out = w.let(text, [*axes, *spatial], writable=True)
    return w.let(f"{out.name}.movedim(1, -1).reshape({x.name}.shape)", x.axes)


# --- complex numbers --------------------------------------------------------------------------------------------------


@statement(0.5)
def spectrum(w: Writer) -> Var:
    x = w.pick(ndim=(2, 4))
    d = w.axis(x, 2)
    at, how = w.at(d, x.ndim), w.rng.randrange(4)
    if how == 0:
        return w.let(f"torch.fft.fft({x.name}, dim={at}).real * 0.5", x.axes)
    if how == 1:
        return w.let(f"torch.fft.fft({x.name}, dim={at})", x.axes, kind="c")
    if how == 2:
        return w.let(f"torch.fft.rfft({x.name}, dim={at})", x.but(d, w.fresh(w.size(x.axes[d]) // 2 + 1)), kind="c")
    name = w.aside(f"torch.fft.rfft({x.name}, dim={at}) * 0.5")
    return w.let(f"torch.fft.irfft({name}, n={x.name}.shape[{d}], dim={at})", x.axes)


@statement(1)
def of_complex(w: Writer) -> Var:
    z = w.pick("c")
    a, b, how = w.rng.randrange(z.ndim), w.rng.randrange(z.ndim), w.rng.randrange(5)
    if how == 0:
        return w.let(f"{z.name}.real + {z.name}.imag", z.axes)
    if how == 1:
        return w.let(f"torch.view_as_real({z.name})", [*z.axes, w.fresh(2)])
    if how == 2:
        return w.let(f"{z.name}.{w.any(('flip', 'cumsum'))}({a})", z.axes, kind="c")
    if how == 3:
        return w.let(f"{z.name} * {z.name}.conj() * (0.5 + 0.5j)", z.axes, kind="c")
    axes = list(z.axes)
    axes[a], axes[b] = axes[b], axes[a]
    return w.let(f"{z.name}.transpose({a}, {b})", axes, kind="c")


@statement(0.6)
def rotary(w: Writer) -> Var:
    x = w.pick(ndim=(2, 5), ok=lambda v: w.size(v.axes[-1]) % 2 == 0)
    angles = w.param(x.axes[-2], w.fresh(w.size(x.axes[-1]) // 2))
    if w.chance(0.5):
        name = w.aside(f"torch.view_as_complex({x.name}.reshape(*{x.name}.shape[:-1], -1, 2))")
        turn = f"torch.polar(torch.ones_like({angles}), {angles})"
        return w.let(f"torch.view_as_real({name} * {turn}).flatten(-2)", x.axes)
    a, b = w.aside(f"{x.name}[..., ::2]"), w.aside(f"{x.name}[..., 1::2]")
    cos, sin = f"{angles}.cos()", f"{angles}.sin()"
    return w.let(f"torch.stack([{a} * {cos} - {b} * {sin}, {a} * {sin} + {b} * {cos}], -1).flatten(-2)", x.axes)


# --- written in place -------------------------------------------------------------------------------------------------

STARTS = forms("""
{0}.clone() | {0} * 1.0 | torch.zeros_like({0}) | torch.zeros({0}.shape) | {0}.new_zeros({0}.shape) |
torch.empty_like({0}).copy_({0}) | {0}.detach().clone()
""")
CHANGES = "mul_(0.5) add_(1) clamp_(-1,1) tanh_() neg_() sigmoid_() zero_()".split()


@statement(4)
def written(w: Writer) -> Var:
    """A tensor with memory of its own, written into once or more, as a whole, in part, or through a view."""
    x = w.pick(ndim=(1, 5))
    fit = x.writable and x.depth == w.depth and w.chance(0.3)
    y = x if fit else w.let(w.any(STARTS).format(x.name), x.axes, writable=True)
    for _ in range(w.rng.choice((1, 1, 2, 3))):
        write(w, y)
    return y


def write(w: Writer, y: Var) -> None:
    d = w.axis(y)
    n = w.size(y.axes[d])
    k, how, t = w.rng.randrange(n), w.rng.randrange(12), y.name
    inside = ends(w, y.ndim, d, w.any((str(k), "-1", f"{k}:", ":1", "::2", ":-1" if n > 1 else ":")))
    if how == 0:
        w.run(f"{t} {w.any(('+=', '*=', '-='))} {fitting(w, y) if w.chance(0.5) else '0.5'}")
    elif how == 1:
        w.run(f"{t}[{inside}] {w.any(('+=', '*=', '='))} 0.5")
    elif how == 2:
        w.run(f"{t}[{inside}] {w.any(('+=', '='))} {twin(w, y).name}[{inside}] * 0.5")
    elif how == 3:
        w.run(f"{t}.{w.any(CHANGES)}")
    elif how == 4:
        w.run(f"{t}.masked_fill_({t} > 0.9, 0.25)")
    elif how == 5:  # through a view
        views = [f"[{inside}]", f".transpose(0, {y.ndim - 1})", ".unsqueeze(0)", ".detach()"]
        name = w.aside(f"{t}{w.any(views + [f'.flatten(0, {min(1, y.ndim - 1)})', '.flatten()'])}")
        w.run(f"{name}.{w.any(CHANGES)}")
    elif how == 6:
        w.run(f"{t}[{inside}].{w.any(CHANGES)}")
    elif how == 7 and y.ndim > 1:
        w.run(f"{t}[{', '.join([*':' * d, str(k)])}] = {w.param(y.but(d)[-1])}")
    elif how == 8:
        w.run(w.any((f"{t}.cumsum_({d})", f"F.relu({t}, inplace=True)")))
    elif how == 9:
        w.run(f"{t}.copy_({twin(w, y).name})")
    elif how == 10:  # place by place
        at = ", ".join([*":" * d, "k"])
        w.run(f"for k in range({t}.shape[{d}]):\n    {t}[{at}] = {twin(w, y).name}[{at}] * 0.5")
    else:
        fill = f"{t}.index_fill_({d}, torch.tensor([{k}]), 0.5)"
        w.run(fill if w.chance(0.3) else f"{t}.add_({t} * 0.1)")


# --- blocks -----------------------------------------------------------------------------------------------------------

BLOCKS = {"checkpointed", "without_gradient", "recycled"}


def indented(lines: list[str]) -> str:
    return "\n".join("    " + line for text in lines for line in text.split("\n"))


@statement(2)
def checkpointed(w: Writer) -> Var:
    x = w.pick(ndim=(2, 5), ok=lambda v: wide(w, v))
    inner = w.new()
    with w.block() as lines:
        w.env[inner] = w.env[x.name]
        w.vars.append(Var(inner, x.axes, depth=w.depth))
        known = len(w.vars)
        w.some(w.rng.randint(1, 4), BLOCKS)
        out = w.any([v for v in w.vars[known:] if v.kind == "f" and w.env[v.name].requires_grad][-1:])
        lines = live(lines, [out.name])
    f = f"f{w.new()[1:]}"
    w.run(f"def {f}({inner}):\n{indented(lines)}\n    return {out.name}")
    return w.let(f"checkpoint({f}, {x.name}, use_reentrant=False)", out.axes, writable=True)


@statement(0.8)
def without_gradient(w: Writer) -> Var:
    if not w.grad:
        raise Dead
    w.grad = False
    try:
        with w.block() as lines:
            known = len(w.vars)
            w.some(w.rng.randint(1, 3), BLOCKS)
            out = w.any([v for v in w.vars[known:] if v.kind == "f"][-1:])
            lines = live(lines, [out.name])
    finally:
        w.grad = True
    w.lines.append(f"with torch.no_grad():\n{indented(lines)}")
    w.vars.append(Var(out.name, out.axes, depth=w.depth, writable=out.writable))
    return w.vars[-1]


@statement(1)
def recycled(w: Writer) -> Var:
    """A loop whose state is detached from one round to the next."""
    x = w.pick(ndim=(2, 5), ok=lambda v: wide(w, v))
    state = w.aside(w.any(("torch.zeros_like({0})", "{0}.detach() * 0.5")).format(x.name))
    how = w.any(forms("{0} + 0.5 * {1}.detach() | {0} + {1}.detach() | {0} + F.layer_norm({1}, {1}.shape[-1:])"))
    before = dict(w.env)
    with w.block() as lines:
        known = len(w.vars)
        w.let(how.format(x.name, state), x.axes, writable=True)
        w.some(w.rng.randint(1, 3), BLOCKS)
        end = [v for v in w.vars[known:] if v.axes == x.axes and v.kind == "f"][-1]
        w.run(f"{state} = {end.name}")
        lines = live(lines, [state])
    w.env.update(before)
    w.run(f"for _ in range(2):\n{indented(lines)}")
    w.vars.append(Var(state, x.axes, depth=w.depth))
    return w.vars[-1]
