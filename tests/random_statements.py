"""The statements of random programs: each writes a line or a few, of what the program has so far."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

from random_programs import (
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
)  # fmt: skip


def index(ndim: int, at: dict[int, str], rest: str = ":") -> str:
    """The inside of x[...]; dims behind the last that is indexed are left out."""
    return ", ".join(at.get(d, rest) for d in range(max(at) + 1)) or rest


def from_end(ndim: int, d: int, what: str) -> str:
    return ", ".join(["...", what, *":" * (ndim - 1 - d)])


def ends(w: Writer, ndim: int, d: int, what: str) -> str:
    """x[:, what] or x[..., what, :]"""
    return from_end(ndim, d, what) if w.chance(0.4) else index(ndim, {d: what})


def letters(w: Writer, vars_: Sequence[Var]) -> list[str]:
    """A letter for each axis; the same for the same dims in all, but not twice in one."""
    known: dict[tuple[Axis, int], str] = {}
    spare = iter(string.ascii_lowercase)
    found = []
    for v in vars_:
        seen: dict[Axis, int] = {}
        text = ""
        for axis in v.axes:
            seen[axis] = seen.get(axis, 0) + 1
            key = (axis, seen[axis]) if axis else (("1",), len(known) + 100)
            text += known.setdefault(key, "") or known.__setitem__(key, next(spare)) or known[key]
        found.append(text)
    return found


def broadcast(w: Writer, x: Var, y: Var) -> str:
    """y as it adds to x: with new axes where it lacks one. Its dims must come in the order of x's."""
    items, d = [], 0
    for axis in x.axes:
        if d < y.ndim and (y.axes[d] == axis or w.size(y.axes[d]) == 1):
            items.append(":")
            d += 1
        else:
            items.append("None")
    if d < y.ndim:
        raise Dead
    while items and items[0] == "None":
        items.pop(0)  # broadcasts by itself
    if "None" not in items:
        return y.name
    if items[-1] == ":" and w.chance(0.3):
        k = max(i for i, t in enumerate(items) if t == "None") + 1
        return f"{y.name}[{', '.join(items[:k])}]"
    if w.chance(0.3) and items.count("None") == 1:
        return f"{y.name}.unsqueeze({w.at(items.index('None'), len(items))})"
    return f"{y.name}[{', '.join(items)}]"


def fitting(w: Writer, x: Var, kind: str = "f") -> tuple[Var, str]:
    """Another variable that adds to x, and how."""
    found = []
    for v in w.vars:
        if v.kind == kind and v is not x and v.ndim:
            try:
                found.append((v, broadcast(w, x, v)))
            except Dead:
                continue
    return w.any(found[-6:])


def twin(w: Writer, x: Var, but: int | None = None) -> Var:
    """Another variable of the same axes, of any size along `but`."""
    same = [
        v for v in w.vars if v.kind == x.kind and v.ndim == x.ndim
        and all(d == but or a == b for d, (a, b) in enumerate(zip(v.axes, x.axes)))
    ]  # fmt: skip
    return w.any(same[-5:])


def table(w: Writer, x: Var) -> str:
    """A parameter that adds to x: a vector, or a row for each place of some dims."""
    how = w.rng.random()
    if how < 0.4:
        return w.add_param([x.axes[-1]])
    if how < 0.6:
        return w.add_param(x.axes[w.rng.randrange(x.ndim) :])
    d = w.axis(x)
    tail = "None" + ", None" * (x.ndim - 3 - d)
    name = w.add_param([x.axes[d], x.axes[-1]] if d < x.ndim - 1 else [x.axes[-1]])
    if d >= x.ndim - 2:
        return name
    return f"{name}[:, {tail}]"


# --- stages -----------------------------------------------------------------------------------------------------------


def wide(w: Writer, v: Var) -> bool:
    return v.ndim > 1 and w.size(v.axes[-1]) <= 16 and sum(w.size(a) > 1 for a in v.axes[:-1]) > 0


def put(w: Writer, kind: Any, options: str, x: Var, computed: Sequence[int], own: bool = True, suffix: str = "") -> Var:
    pattern = w.pattern(x.axes, computed, {}) + suffix
    return w.let(f"{w.stage(kind, options, pattern)}({x.name})", x.axes, own=own)


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
    y = w.pick(ndim=(2, 5), ok=lambda v: v.axes[-1] == x.axes[-1] and bool(v.axes[-1]) and v is not x)
    if len(set(y.axes)) < y.ndim or len(set(x.axes)) < x.ndim or () in x.axes + y.axes:
        raise Dead
    theirs = [d for d, a in enumerate(y.axes[:-1]) if a not in x.axes]
    if not theirs:
        raise Dead
    own, other = letters(w, [x, y])
    names: dict[Axis, str] = {}
    first = w.pattern(x.axes, [x.ndim - 1], names)
    second = w.pattern(y.axes, [*theirs, y.ndim - 1], names)
    named = "y=" if w.chance(0.7) else ""
    stage = w.stage(Cross, f'"{own}", "{other}"', f"{first}, {named}{second}")
    return w.let(f"{stage}({x.name}, {'y=' if named and w.chance(0.5) else ''}{y.name})", x.axes, own=True)


@statement(2)
def pool(w: Writer) -> Var:
    x = w.pick(ndim=(3, 5), ok=lambda v: wide(w, v))
    d = w.place(x)
    names: dict[Axis, str] = {}
    computed = [d, x.ndim - 1]
    left = w.pattern(x.axes, computed, names)
    axes = [a for k, a in enumerate(x.axes) if k != d]
    parts = left.split(" ")
    if len(parts) != x.ndim:  # a fold in it
        raise Dead
    right = " ".join(p for k, p in enumerate(parts) if k != d)
    stage = w.stage(Pool, str(d), f"{left} -> {left}, {right}")
    one, two = w.new(), w.new()
    w.run(f"{one}, {two} = {stage}({x.name})")
    w.vars += [Var(one, x.axes, depth=w.depth, own=True), Var(two, axes, depth=w.depth, own=True)]
    return w.vars[-2]


@statement(2)
def gate(w: Writer) -> Var:
    x = w.pick(ndim=(2, 5), ok=lambda v: wide(w, v))
    y = twin(w, x)
    p = w.pattern(x.axes, [x.ndim - 1], {})
    stage = w.stage(Gate, "", f"{p}, {p} -> {p}, {p}")
    more = f", {w.add_param([x.axes[-1]])}" if w.chance(0.3) else ""
    one, two = w.new(), w.new()
    w.run(f"{one}, {two} = {stage}({x.name}, {y.name}{more})")
    w.vars += [Var(one, x.axes, depth=w.depth, own=True), Var(two, x.axes, depth=w.depth, own=True)]
    return w.vars[-1]


@statement(1.5)
def product(w: Writer) -> Var:
    """Triangles and outer products: one dim of each is summed, or none."""
    x = w.pick(ndim=(3, 4), ok=lambda v: wide(w, v))
    y = twin(w, x)
    if () in x.axes or len(set(x.axes)) < x.ndim:
        raise Dead
    d = w.rng.randrange(1, x.ndim - 1)
    kept = [k for k in range(x.ndim - 1) if k != d]
    names = [f"d{k}" for k in range(x.ndim - 1)]
    other = list(names)
    moved = w.any(kept)
    other[moved] = "e"
    a = " ".join(f"[{n}]" if k == d else n for k, n in enumerate(names)) + " [c]"
    b = " ".join(f"[{n}]" if k == d else n for k, n in enumerate(other)) + " [c]"
    out = [n for k, n in enumerate(names) if k != d] + ["e"]
    code = {**{n: string.ascii_lowercase[k] for k, n in enumerate(names)}, "e": "x"}
    equation = (
        f"{''.join(code[n] for n in names)}z,{''.join(code[n] for n in other)}z->{''.join(code[n] for n in out)}z"
    )
    stage = w.stage(Product, f'"{equation}"', f"{a}, {b} -> {' '.join(out)} [c]")
    axes = [x.axes[k] for k in kept] + [x.axes[moved], x.axes[-1]]
    return w.let(f"{stage}({x.name}, {y.name})", axes, own=True)


@statement(0.5)
def scribble(w: Writer) -> Var:
    x = w.pick(ndim=(2, 5), ok=lambda v: v.own and v.depth == w.depth)
    return put(w, Scribble, "", x, [x.ndim - 1])


# --- one element at a time --------------------------------------------------------------------------------------------

UNARY = """
torch.tanh({0}) | {0} * 0.7 | {0}.sigmoid() | F.gelu({0}) | F.silu({0}) * 2 | {0}.square() * 0.3 |
{0}.clamp(-1.5, 1.5) | 1 - {0} | {0} / 2 | torch.where({0} > 0.1, {0}, 0.2 * {0}) | F.relu({0}) |
{0}.masked_fill({0} > 1, 0.5) | ({0}.square() + 1).sqrt() | {0}.clone() | -{0} | torch.exp(-{0}.square()) |
{0}.sin() | F.softplus({0}) | F.leaky_relu({0}, 0.1) | {0}.abs() | 2 / ({0}.abs() + 1) | {0}.contiguous() * 1.1 |
{0}.type_as({0}) * 0.9 | F.dropout({0}, 0.5, False) + 0.1 | torch.zeros_like({0}) + 0.5 * {0} | {0}.double() + 0.25
""".replace("\n", " ").split(" | ")


@statement(4)
def unary(w: Writer) -> Var:
    x = w.pick()
    return w.let(w.any(UNARY).strip().format(x.name), x.axes, own=True)


BINARY = """
{0} + {1} | {0} * torch.tanh({1}) | {0} - 0.5 * {1} | torch.maximum({0}, {1}) | torch.lerp({0}, {1}, 0.3) |
torch.addcmul({0}, {0}, {1}, value=0.2) | {0} * torch.sigmoid({1}) | torch.where({1} > 0, {0}, {0} * 0.3) |
{1} + {0} | {0} * (1 + {1}.tanh()) | torch.add({0}, {1}, alpha=0.5) | {0}.masked_fill({1} > 0.8, 0.0)
""".replace("\n", " ").split(" | ")


@statement(6)
def binary(w: Writer) -> Var:
    x = w.pick(ok=lambda v: v.ndim > 0)
    _, y = fitting(w, x)
    return w.let(w.any(BINARY).strip().format(x.name, y), x.axes, own=True)


@statement(3)
def with_parameter(w: Writer) -> Var:
    x = w.pick(ok=lambda v: v.ndim > 0)
    return w.let(w.any(("{0} + {1}", "{0} * {1}", "{1} - {0}", "torch.addcmul({0}, {0}, {1})")).format(
        x.name, table(w, x)
    ), x.axes, own=True)  # fmt: skip


@statement(2)
def outer_sum(w: Writer) -> Var:
    """Two of fewer dims make one of more."""
    x = w.pick(ndim=(2, 4), ok=lambda v: wide(w, v))
    y = w.pick(ndim=(2, 4), ok=lambda v: v is not x and v.axes[-1] == x.axes[-1] and v.axes[0] == x.axes[0])
    axes = [*x.axes[:-1], *y.axes[1:-1], x.axes[-1]]
    if len(axes) > 5:
        raise Dead
    a = f"{x.name}[{', '.join([':'] * (x.ndim - 1) + ['None'] * (y.ndim - 2) + [':'])}]"
    b = f"{y.name}[{', '.join([':'] + ['None'] * (x.ndim - 2) + [':'] * (y.ndim - 1))}]"
    return w.let(f"{a} {w.any('+-*')} {b}", axes, own=True)


@statement(2)
def norm(w: Writer) -> Var:
    x = w.pick(ok=lambda v: v.ndim > 0)
    c = f"{x.name}.shape[-1]"
    return w.let(w.any((
        f"F.layer_norm({x.name}, ({c},))", f"F.rms_norm({x.name}, ({c},))",
        f"F.layer_norm({x.name}, {x.name}.shape[-2:])" if x.ndim > 1 else f"F.rms_norm({x.name}, ({c},))",
    )), x.axes, own=True)  # fmt: skip


@statement(2)
def linear(w: Writer) -> Var:
    x = w.pick(ok=lambda v: v.ndim > 0)
    c = x.axes[-1]
    wide_ = w.chance(0.3)
    axes = [*x.axes[:-1], w.fresh(2 * w.size(c)) if wide_ else c]
    weight = w.add_param([axes[-1], c])
    return w.let(w.any((f"F.linear({x.name}, {weight})", f"{x.name} @ {weight}.T")), axes, own=True)


@statement(2)
def mask(w: Writer) -> Var:
    x = w.pick(ok=lambda v: v.ndim > 0)
    try:
        _, m = fitting(w, x, "b")
    except Dead:
        d = w.axis(x, 2)
        spread = f"[:{', None' * (x.ndim - 1 - d)}]" if d < x.ndim - 1 else ""
        m = f"(torch.arange({x.name}.shape[{d}]) % 3 > 0){spread}"
    return w.let(w.any((
        "{0}.masked_fill({1}, 0.5)", "{0} * {1}", "torch.where({1}, {0}, {0} * 0.5)", "{0}.masked_fill(~{1}, -1)",
        "{0} * {1}.to({0}.dtype)",
    )).format(x.name, m), x.axes, own=True)  # fmt: skip


@statement(0.7)
def made_mask(w: Writer) -> Var:
    x = w.pick(ndim=(2, 5))
    d = w.axis(x, 2)
    how = w.any(("{0} > 0.2", "{0}.amax({1}) > 1", "({0} > 0).any({1})", "({0} > -2).all({1}, keepdim=True)"))
    axes = list(x.axes)
    if "keepdim" in how:
        axes[d] = ()
    elif "{1}" in how:
        del axes[d]
    return w.let(how.format(x.name, d), axes, kind="b")


@statement(0.8)
def look_up(w: Writer) -> Var:
    i = w.pick("i")
    row = w.fresh(6) if "c" not in w.sizes else ("c",)
    name = w.register(f"p{len([k for k in w.modules if k[0] == 'p'])}", f"param(4, {w.text(row)})")
    return w.let(w.any((f"{name}[{i.name}]", f"F.embedding({i.name}, {name})")), [*i.axes, row])


@statement(0.8)
def positions(w: Writer) -> Var:
    """A table by place, or waves: glue on what is whole, which meets a sharded tensor later."""
    x = w.pick(ndim=(2, 5))
    d = w.axis(x, 2)
    axis, c = x.axes[d], ("c",) if "c" in w.sizes else x.axes[-1]
    name = w.register(f"p{len([k for k in w.modules if k[0] == 'p'])}", f"param({max(8, w.size(axis))}, {w.text(c)})")
    n = w.text(axis)
    return w.let(w.any((
        f"{name}[:{n}]", f"{name}[torch.arange({n})]", f"F.embedding(torch.arange({n}).flip(0), {name})",
        f"torch.sin(torch.arange({n})[:, None] * {name}[0])",
    )), [axis, c])  # fmt: skip


# --- along a dim ------------------------------------------------------------------------------------------------------

ALONG = """
{0}.softmax({1}) | {0}.cumsum({1}) / 3 | {0} - {0}.mean({1}, keepdim=True) | {0}.flip({1}) | {0}.roll(1, {1}) |
{0}.sort({1}).values | {0} - {0}.amax({1}, keepdim=True) | F.normalize({0}, dim={1}) | F.log_softmax({0}, dim={1}) |
{0} / ({0}.std({1}, keepdim=True) + 1) | {0} * {0}.sum({1}, keepdim=True).tanh() | {0}.cumprod({1}) * 0.5 |
{0} * {0}.softmax({1}) | {0}.roll((1, 2), ({1}, 0)) | {0} + {0}.flip({1}) * 0.5 | {0}.logcumsumexp({1}) |
{0} - {0}.var({1}, keepdim=True, unbiased=False) | {0} + {0}.norm(dim={1}, keepdim=True) |
{0} + {0}.sort({1}, descending=True)[0] | {0}.index_select({1}, randperm({0}.shape[{1}])) |
torch.cummax({0}, {1}).values | {0}.diff(dim={1}, prepend={0}.narrow({1}, 0, 1))
""".replace("\n", " ").split(" | ")


@statement(5)
def along_dim(w: Writer) -> Var:
    x = w.pick(ok=lambda v: v.ndim > 0)
    d = w.axis(x, 2)
    return w.let(w.any(ALONG).strip().format(x.name, w.at(d, x.ndim)), x.axes, own=True)


REDUCE = """
mean({0}) sum({0}) amax({0}) logsumexp({0}) std({0}) norm(dim={0}) max({0}).values median({0}).values var({0}) prod({0})
amin({0}) nanmean({0})
""".split()


@statement(2.5)
def reduced(w: Writer) -> Var:
    x = w.pick(ndim=(2, 5))
    d = w.axis(x, 2)
    axes = [a for k, a in enumerate(x.axes) if k != d]
    if w.chance(0.25):
        letters_ = [f"a{k}" for k in range(x.ndim)]
        kept = [n for k, n in enumerate(letters_) if k != d]
        how = w.any(("mean", "sum", "max"))
        return w.let(f'reduce({x.name}, "{" ".join(letters_)} -> {" ".join(kept)}", "{how}")', axes, own=True)
    if x.ndim > 2 and w.chance(0.25):
        e = w.any([k for k in range(x.ndim) if k != d])
        axes = [a for k, a in enumerate(x.axes) if k not in (d, e)]
        return w.let(f"{x.name}.{w.any(('mean', 'sum', 'amax'))}(({d}, {w.at(e, x.ndim)}))", axes, own=True)
    return w.let(f"{x.name}.{w.any(REDUCE).format(w.at(d, x.ndim))}", axes, own=True)


@statement(1.2)
def over_all(w: Writer) -> Var:
    x = w.pick(ok=lambda v: v.ndim > 0)
    return w.let(w.any((
        "{0} / ({0}.abs().amax() + 1)", "{0} * {0}.mean()", "{0} - {0}.sum() / {0}.numel()", "{0} / ({0}.norm() + 1)",
        "{0} * F.mse_loss({0}, {0} * 0.5)", "{0} / ({0}.std() + 1)", "{0} + {0}.square().mean().sqrt()",
        "{0} * torch.tanh({0}.max())",
    )).format(x.name), x.axes, own=True)  # fmt: skip


# --- views ------------------------------------------------------------------------------------------------------------


@statement(2)
def flatten(w: Writer) -> Var:
    x = w.pick(ndim=(2, 6))
    d = w.rng.randrange(x.ndim - 1)
    e = min(x.ndim - 1, d + w.rng.choice((1, 1, 1, 2)))
    axes = [*x.axes[:d], tuple(n for a in x.axes[d : e + 1] for n in a), *x.axes[e + 1 :]]
    return w.let(w.any((
        f"{x.name}.flatten({d}, {w.at(e, x.ndim)})",
        f"{x.name}.reshape({', '.join([*map(w.text, x.axes[:d]), '-1', *map(w.text, x.axes[e + 1 :])])})",
        f"{x.name}.reshape({w.shaped(axes)})",
    )), axes)  # fmt: skip


@statement(2)
def opened(w: Writer) -> Var:
    """A fold apart again."""
    x = w.pick(ok=lambda v: any(len(a) > 1 for a in v.axes))
    d = w.any([d for d, a in enumerate(x.axes) if len(a) > 1])
    cut = w.rng.randrange(1, len(x.axes[d]))
    axes = [*x.axes[:d], x.axes[d][:cut], x.axes[d][cut:], *x.axes[d + 1 :]]
    parts = w.any(([w.text(axes[d]), "-1"], ["-1", w.text(axes[d + 1])], [w.text(axes[d]), w.text(axes[d + 1])]))
    return w.let(w.any((
        f"{x.name}.unflatten({w.at(d, x.ndim)}, ({', '.join(parts)}))",
        f"{x.name}.reshape({w.shaped(axes)})",
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
    two = [w.fresh(small), w.fresh(n // small)] if first else [w.fresh(n // small), w.fresh(small)]
    sizes = f"{small}, -1" if first else f"-1, {small}"
    return w.let(f"{x.name}.unflatten({w.at(d, x.ndim)}, ({sizes}))", [*x.axes[:d], *two, *x.axes[d + 1 :]])


@statement(2.5)
def turned(w: Writer) -> Var:
    x = w.pick(ndim=(2, 6))
    a, b = w.rng.sample(range(x.ndim), 2)
    how = w.rng.randrange(4)
    axes = list(x.axes)
    if how == 0:
        axes[a], axes[b] = axes[b], axes[a]
        return w.let(f"{x.name}.transpose({w.at(a, x.ndim)}, {w.at(b, x.ndim)})", axes)
    if how == 1:
        axes.insert(b, axes.pop(a))
        return w.let(f"{x.name}.movedim({a}, {w.at(b, x.ndim)})", axes)
    if how == 2:
        return w.let(f"{x.name}.mT", [*axes[:-2], axes[-1], axes[-2]])
    order = w.rng.sample(range(x.ndim), x.ndim)
    return w.let(f"{x.name}.permute({', '.join(map(str, order))})", [x.axes[d] for d in order])


@statement(2.5)
def einops(w: Writer) -> Var:
    """Folds opened, dims in another order, neighbours folded."""
    x = w.pick(ndim=(2, 6), ok=lambda v: all(v.axes))
    names: list[tuple[str, Axis]] = []
    left, given = [], {}
    for d, axis in enumerate(x.axes):
        if len(axis) > 1 and w.chance(0.7):
            mine = [f"{n}{d}" for n in axis]
            given.update({m: w.text((n,)) for m, n in list(zip(mine, axis))[1:]})
            names += [(m, (n,)) for m, n in zip(mine, axis)]
            left.append(f"({' '.join(mine)})")
        else:
            names.append((f"a{d}", axis))
            left.append(f"a{d}")
    if len(names) > 5:
        raise Dead
    if w.chance(0.7):
        w.rng.shuffle(names)
    right, axes = [], list[Axis]()
    k = 0
    while k < len(names):
        m = w.rng.choice((1, 1, 1, 2))
        group = names[k : k + m]
        right.append(group[0][0] if len(group) == 1 else f"({' '.join(n for n, _ in group)})")
        axes.append(tuple(n for _, a in group for n in a))
        k += m
    more = "".join(f", {k}={v}" for k, v in given.items())
    return w.let(f'rearrange({x.name}, "{" ".join(left)} -> {" ".join(right)}"{more})', axes)


@statement(1)
def unsqueezed(w: Writer) -> Var:
    x = w.pick(ndim=(1, 4))
    d = w.rng.randrange(x.ndim + 1)
    return w.let(f"{x.name}.unsqueeze({w.at(d, x.ndim + 1)})", [*x.axes[:d], (), *x.axes[d:]])


@statement(1)
def squeezed(w: Writer) -> Var:
    x = w.pick(ndim=(2, 6), ok=lambda v: () in v.axes)
    d = w.any([d for d, a in enumerate(x.axes) if not a])
    if w.chance(0.3):
        return w.let(f"{x.name}.squeeze()", [a for a in x.axes if a])
    return w.let(f"{x.name}.squeeze({w.at(d, x.ndim)})", [*x.axes[:d], *x.axes[d + 1 :]])


@statement(1)
def scrambled(w: Writer) -> Var:
    """A reshape that cuts through dims."""
    x = w.pick(ndim=(2, 4))
    axes = list(x.axes)
    w.rng.shuffle(axes)
    axes = [w.fresh(w.size(a)) for a in axes]
    return w.let(f"{x.name}.reshape({w.shaped(axes)})", axes)


@statement(1)
def folded_there_and_back(w: Writer) -> Var:
    x = w.pick(ndim=(3, 5))
    d = w.rng.randrange(x.ndim - 1)
    middle = w.any(("{0} * 0.5 + {0}", "{0}.cumsum({1}) / 4", "{0}.softmax({1})", "{0}.flip({1})", "{0}.tanh()"))
    name = w.new()
    w.run(f"{name} = {x.name}.flatten({d}, {d + 1})")
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
    axes = [*x.axes[:d], x.axes[d] if size == n else w.fresh(size), *x.axes[d + 1 :]]
    if w.chance(0.25) and what.endswith(":") and size > 1 and "::" not in what:
        start = n - size
        return w.let(f"{x.name}.narrow({w.at(d, x.ndim)}, {start}, {size})", axes)
    return w.let(f"{x.name}[{ends(w, x.ndim, d, what)}]", axes)


@statement(1.5)
def one(w: Writer) -> Var:
    x = w.pick(ndim=(2, 6))
    d = w.axis(x)
    k = w.rng.randrange(-1, w.size(x.axes[d]))
    axes = [*x.axes[:d], *x.axes[d + 1 :]]
    return w.let(w.any((
        f"{x.name}[{ends(w, x.ndim, d, str(k))}]", f"{x.name}.select({d}, {k})", f"{x.name}.unbind({d})[{k}]",
    )), axes)  # fmt: skip


@statement(1.2)
def chunks(w: Writer) -> Var:
    x = w.pick(ndim=(1, 5))
    d = w.any([d for d, a in enumerate(x.axes) if w.size(a) > 1])
    n = w.size(x.axes[d])
    if n % 2 == 0 and w.chance(0.6):
        axes = [*x.axes[:d], w.fresh(n // 2), *x.axes[d + 1 :]]
        a, b = w.new(), w.new()
        w.run(f"{a}, {b} = {x.name}.chunk(2, {w.at(d, x.ndim)})")
        w.vars += [Var(a, axes, depth=w.depth), Var(b, axes, depth=w.depth)]
        return w.let(f"{a} * torch.sigmoid({b})", axes, own=True)
    k = w.rng.randrange(1, n)
    axes = [*x.axes[:d], w.fresh(n - k), *x.axes[d + 1 :]]
    return w.let(f"{x.name}.split(({k}, {n - k}), {w.at(d, x.ndim)})[1]", axes)


@statement(2.5)
def joined(w: Writer) -> Var:
    x = w.pick(ndim=(1, 5))
    d = w.axis(x)
    at = w.at(d, x.ndim)
    how = w.rng.randrange(5)
    n = w.size(x.axes[d])
    if how == 0:
        y = twin(w, x, d)
        size, parts = n + w.size(y.axes[d]), [x.name, y.name]
    elif how == 1:  # a token
        token = w.add_param([x.axes[-1]] if d < x.ndim - 1 else [()])
        shape = ", ".join("1" if k == d else w.text(a) for k, a in enumerate(x.axes))
        size, parts = n + 1, [f"{token}.expand({shape})", x.name]
    elif how == 2:  # nothing, or a part of itself
        empty = f"{x.name}[{ends(w, x.ndim, d, ':0')}]"
        size, parts = n, [empty, x.name]
    elif how == 3:
        size, parts = n, [f"{x.name}.narrow({at}, 1, {n - 1})", f"{x.name}.narrow({at}, 0, 1)"]
    else:
        size, parts = 2 * n, [x.name, f"{x.name}.flip({at})"]
    if w.chance(0.4):
        parts.reverse()
    axes = [*x.axes[:d], x.axes[d] if size == n else w.fresh(size), *x.axes[d + 1 :]]
    return w.let(f"torch.cat([{', '.join(parts)}], {at})", axes, own=True)


@statement(1)
def stacked(w: Writer) -> Var:
    x = w.pick(ndim=(1, 4))
    y = twin(w, x)
    d = w.rng.randrange(x.ndim + 1)
    axes = [*x.axes[:d], w.fresh(2), *x.axes[d:]]
    return w.let(f"torch.stack([{x.name}, {y.name}], {w.at(d, x.ndim + 1)})", axes, own=True)


@statement(1.2)
def padded(w: Writer) -> Var:
    x = w.pick(ndim=(1, 5))
    d = w.axis(x)
    zeros = "0, 0, " * (x.ndim - 1 - d)
    if w.chance(0.5):  # a shift
        keep = ends(w, x.ndim, d, ":-1")
        return w.let(f"F.pad({x.name}, ({zeros}1, 0))[{keep}]", x.axes)
    axes = [*x.axes[:d], w.fresh(w.size(x.axes[d]) + 2), *x.axes[d + 1 :]]
    return w.let(f"F.pad({x.name}, ({zeros}1, 1))", axes, own=True)


@statement(1.5)
def stretched(w: Writer) -> Var:
    """More of the same: repeats and expands."""
    x = w.pick(ndim=(1, 4))
    how = w.rng.randrange(5)
    if how == 0:
        d = w.axis(x)
        axes = [*x.axes[:d], w.fresh(2 * w.size(x.axes[d])), *x.axes[d + 1 :]]
        return w.let(f"{x.name}.repeat_interleave(2, {w.at(d, x.ndim)})", axes, own=True)
    if how == 1:
        d = w.axis(x)
        axes = [*x.axes[:d], w.fresh(2 * w.size(x.axes[d])), *x.axes[d + 1 :]]
        return w.let(f"{x.name}.repeat({', '.join('2' if k == d else '1' for k in range(x.ndim))})", axes, own=True)
    free = [n for n in w.named if (n,) not in x.axes and w.sizes[n] > 1]
    name = w.any(sorted(free))
    d = w.rng.randrange(x.ndim + 1)
    axes = [*x.axes[:d], (name,), *x.axes[d:]]
    if how == 2:
        sizes = ", ".join(name if k == d else w.any(("-1", w.text(a))) for k, a in enumerate(axes))
        return w.let(f"{x.name}.unsqueeze({d}).expand({sizes})", axes)
    if how == 3:
        sizes = ", ".join(name if k == d else "1" for k, a in enumerate(axes))
        return w.let(f"{x.name}.unsqueeze({d}).repeat({sizes})", axes, own=True)
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
    name = w.new()
    w.run(f"{name} = {x.name}.roll(-1, {d}).unflatten({d}, (-1, 2))")
    return w.let(f"({name} * {name}.softmax({d + 1})).flatten({d}, {d + 1}).roll(1, {d})", x.axes, own=True)


# --- products ---------------------------------------------------------------------------------------------------------


@statement(1.5)
def einsum(w: Writer) -> Var:
    x = w.pick(ndim=(2, 4))
    y = twin(w, x) if w.chance(0.6) else w.pick(ndim=(1, 4))
    if () in x.axes + y.axes or len(set(x.axes)) < x.ndim or len(set(y.axes)) < y.ndim:
        raise Dead
    a, b = letters(w, [x, y])
    axes_of = dict(zip(a + b, [*x.axes, *y.axes]))
    for letter in list(dict.fromkeys(a)):
        if letter in b and w.chance(0.3):  # another of the same: an outer product over it
            axes_of[letter.upper()] = axes_of[letter]
            b = b.replace(letter, letter.upper())
    every = list(dict.fromkeys(a + b))
    out = [k for k in every if w.chance(0.75)] or every[:1]
    if w.chance(0.4):
        w.rng.shuffle(out)
    if len(out) > 5:
        raise Dead
    return w.let(
        f'torch.einsum("{a},{b}->{"".join(out)}", {x.name}, {y.name}) * 0.3', [axes_of[k] for k in out], own=True
    )


@statement(1.5)
def matmul(w: Writer) -> Var:
    x = w.pick(ndim=(2, 5))
    y = twin(w, x) if w.chance(0.6) else x
    m, n = x.axes[-2:]
    if w.chance(0.5):
        return w.let(f"{x.name} @ {y.name}.mT * 0.2", [*x.axes[:-2], m, m], own=True)
    if w.chance(0.5):
        return w.let(f"torch.matmul({x.name}.transpose(-1, -2), {y.name}) * 0.2", [*x.axes[:-2], n, n], own=True)
    text = f"torch.bmm({x.name}.flatten(0, -3), {y.name}.flatten(0, -3).mT)" if x.ndim > 3 else None
    if text is None:
        raise Dead
    return w.let(f"{text} * 0.2", [tuple(k for a in x.axes[:-2] for k in a), m, m], own=True)


@statement(4)
def attention(w: Writer) -> Var:
    """Attention between stages, with masks of many shapes; heads apart or not."""
    x = w.pick(ndim=(2, 5), ok=lambda v: wide(w, v))
    y = twin(w, x, x.ndim - 2) if w.chance(0.4) else x
    q, k = x.name, y.name
    lead = list(x.axes[:-2])
    n, m, c = x.axes[-2], y.axes[-2], x.axes[-1]
    heads = w.size(c) % 2 == 0 and w.size(c) > 2 and x.ndim < 5 and w.chance(0.6)
    h = w.fresh(2)
    if heads:
        names = []
        for v in dict.fromkeys((q, k)):
            name = w.new()
            w.run(f"{name} = {v}.unflatten(-1, (2, -1)).transpose(-2, -3)")
            names.append(name)
        q, k = names[0], names[-1]
    how = w.rng.randrange(9)
    more = ""
    ndim = len(lead) + heads + 2
    options = [(), lead[:1] and [lead[0]]]
    if how == 0:
        more = ", is_causal=True"
    elif how == 1:
        more = f", attn_mask=torch.ones({w.text(n)}, {w.text(m)}, dtype=torch.bool).tril(2)"
    elif how == 2:
        more = f", {w.add_param([n, m])}"
    elif how == 3 and heads:
        more = f", {w.add_param([h, w.any(((), n)), m])}"
    elif how == 4:  # by sample, by key
        found = [v for v in w.vars if v.kind == "b" and v.ndim == 2 and lead and v.axes == [lead[0], m]]
        mask_ = w.any(found)
        spread = ", ".join([":"] + ["None"] * (ndim - 2) + [":"])
        more = f", {mask_.name}[{spread}]"
    elif how == 5:  # made of x, by head: (..., h, 1, m)
        if not heads:
            raise Dead
        name = w.new()
        w.run(f"{name} = ({y.name} @ {w.add_param([c, h])}).transpose(-1, -2).unsqueeze(-2)")
        more = f", attn_mask={name}"
    elif how == 6:  # made of x, by key: (..., 1, m)
        name = w.new()
        w.run(f"{name} = {y.name}.mean(-1).unsqueeze(-2)" + (".unsqueeze(-3)" if heads else ""))
        more = f", attn_mask={name}"
    elif how == 7:  # by pair of places
        name = w.new()
        w.run(f"{name} = {q} @ {k}.mT * 0.1")
        more = f", attn_mask={name}" + (".mean(-3, keepdim=True)" if heads and w.chance(0.4) else "")
    if w.chance(0.2):
        more += ", scale=0.7"
    del options
    axes = [*lead, *([h] if heads else []), n, w.fresh(w.size(c) // 2) if heads else c]
    out = w.let(f"F.scaled_dot_product_attention({q}, {k}, {k}{more})", axes, own=True)
    if heads:
        out = w.let(f"{out.name}.transpose(-2, -3).flatten(-2)", [*lead, n, c])
    return out


@statement(1.5)
def convolution(w: Writer) -> Var:
    """What acts on each sample of a batch: (n c l) or (n c h w)."""
    two = w.chance(0.3)
    x = w.pick(ndim=(4, 5) if two else (3, 5), ok=lambda v: w.size(v.axes[-1]) <= 12)
    dims = 2 if two else 1
    lead, spatial, c = x.axes[: x.ndim - 1 - dims], x.axes[-1 - dims : -1], x.axes[-1]
    name = w.new()
    fold = f".flatten(0, {len(lead) - 1})" if len(lead) > 1 else ".unsqueeze(0)" if not lead else ""
    w.run(f"{name} = {x.name}{fold}.movedim(-1, 1)")
    lead_axis = tuple(k for a in lead for k in a)
    if any(w.size(a) < 2 for a in spatial):
        raise Dead
    how = w.rng.randrange(6)
    if how < 2:
        kernel = w.register(
            f"p{len([k for k in w.modules if k[0] == 'p'])}", f"param({w.text(c)}, {w.text(c)}{', 3' * dims})"
        )
        out = w.let(f"F.conv{dims}d({name}, {kernel}, padding=1)", [lead_axis, c, *spatial], own=True)
    elif how == 2:
        out = w.let(
            f"F.avg_pool{dims}d({name}, 2, ceil_mode=True)",
            [lead_axis, c, *(w.fresh((w.size(a) + 1) // 2) for a in spatial)],
        )
        return out
    elif how == 3:
        out = w.let(
            f"F.interpolate({name}, scale_factor=2)", [lead_axis, c, *(w.fresh(2 * w.size(a)) for a in spatial)]
        )
        return out
    elif how == 4:
        groups = 2 if w.size(c) % 2 == 0 else 1
        out = w.let(f"F.group_norm({name}, {groups})", [lead_axis, c, *spatial], own=True)
    else:
        out = w.let(f"F.batch_norm({name}, None, None, training=True)", [lead_axis, c, *spatial], own=True)
    if not lead:
        return out
    return w.let(f"{out.name}.movedim(1, -1).reshape({x.name}.shape)", x.axes)


# --- complex numbers --------------------------------------------------------------------------------------------------


@statement(0.5)
def spectrum(w: Writer) -> Var:
    x = w.pick(ndim=(2, 4))
    d = w.axis(x, 2)
    at = w.at(d, x.ndim)
    how = w.rng.randrange(4)
    if how == 0:
        return w.let(f"torch.fft.fft({x.name}, dim={at}).real * 0.5", x.axes)
    if how == 1:
        return w.let(f"torch.fft.fft({x.name}, dim={at})", x.axes, kind="c")
    axes = [*x.axes[:d], w.fresh(w.size(x.axes[d]) // 2 + 1), *x.axes[d + 1 :]]
    if how == 2:
        return w.let(f"torch.fft.rfft({x.name}, dim={at})", axes, kind="c")
    name = w.new()
    w.run(f"{name} = torch.fft.rfft({x.name}, dim={at}) * 0.5")
    return w.let(f"torch.fft.irfft({name}, n={x.name}.shape[{d}], dim={at})", x.axes)


@statement(1)
def of_complex(w: Writer) -> Var:
    z = w.pick("c")
    how = w.rng.randrange(6)
    if how == 0:
        return w.let(f"{z.name}.real + {z.name}.imag", z.axes)
    if how == 1:
        return w.let(f"torch.view_as_real({z.name})", [*z.axes, w.fresh(2)])
    if how == 2:
        d = w.rng.randrange(z.ndim)
        return w.let(f"{z.name}.{w.any(('flip', 'cumsum'))}({d})", z.axes, kind="c")
    if how == 3:
        return w.let(f"{z.name} * {z.name}.conj() * (0.5 + 0.5j)", z.axes, kind="c")
    a, b = w.rng.sample(range(z.ndim), 2) if z.ndim > 1 else (0, 0)
    axes = list(z.axes)
    axes[a], axes[b] = axes[b], axes[a]
    return w.let(f"{z.name}.transpose({a}, {b})", axes, kind="c")


@statement(0.6)
def rotary(w: Writer) -> Var:
    x = w.pick(ndim=(2, 5), ok=lambda v: w.size(v.axes[-1]) % 2 == 0)
    d = x.ndim - 2
    angles = w.register(
        f"p{len([k for k in w.modules if k[0] == 'p'])}", f"param({w.text(x.axes[d])}, {w.size(x.axes[-1]) // 2})"
    )
    if w.chance(0.5):
        name = w.new()
        w.run(f"{name} = torch.view_as_complex({x.name}.reshape(*{x.name}.shape[:-1], -1, 2))")
        turn = f"torch.polar(torch.ones_like({angles}), {angles})"
        return w.let(f"torch.view_as_real({name} * {turn}).flatten(-2)", x.axes)
    a, b = w.new(), w.new()
    w.run(f"{a}, {b} = {x.name}[..., ::2], {x.name}[..., 1::2]")
    cos, sin = f"{angles}.cos()", f"{angles}.sin()"
    return w.let(f"torch.stack([{a} * {cos} - {b} * {sin}, {a} * {sin} + {b} * {cos}], -1).flatten(-2)", x.axes)


# --- written in place -------------------------------------------------------------------------------------------------


@statement(4)
def written(w: Writer) -> Var:
    """A tensor with memory of its own, written into once or more, as a whole, in part, or through a view."""
    x = w.pick(ndim=(1, 5))
    if x.own and x.depth == w.depth and w.chance(0.3):
        y = x
    else:
        start = w.any((
            "{0}.clone()", "{0} * 1.0", "torch.zeros_like({0})", "torch.zeros({0}.shape)", "{0}.new_zeros({0}.shape)",
            "torch.empty_like({0}).copy_({0})", "{0}.detach().clone()",
        ))  # fmt: skip
        y = w.let(start.format(x.name), x.axes, own=True)
    for _ in range(w.rng.choice((1, 1, 2, 3))):
        write(w, y)
    return y


def write(w: Writer, y: Var) -> None:
    d = w.axis(y)
    n = w.size(y.axes[d])
    k = w.rng.randrange(n)
    how = w.rng.randrange(12)
    inside = ends(w, y.ndim, d, w.any((str(k), "-1", f"{k}:", ":1", "::2", ":-1" if n > 1 else ":")))
    if how == 0:
        w.run(f"{y.name} {w.any(('+=', '*=', '-='))} {w.any(('0.5', fitting(w, y)[1]))}")
    elif how == 1:
        w.run(f"{y.name}[{inside}] {w.any(('+=', '*=', '='))} 0.5")
    elif how == 2:
        other = twin(w, y)
        w.run(f"{y.name}[{inside}] {w.any(('+=', '='))} {other.name}[{inside}] * 0.5")
    elif how == 3:
        w.run(f"{y.name}.{w.any(('mul_(0.5)', 'add_(1)', 'clamp_(-1, 1)', 'tanh_()', 'neg_()', 'sigmoid_()'))}")
    elif how == 4:
        w.run(f"{y.name}.masked_fill_({y.name} > 0.9, 0.25)")
    elif how == 5:  # through a view
        view = w.any((f"[{inside}]", f".transpose(0, {y.ndim - 1})", ".unsqueeze(0)", ".detach()"))
        if y.ndim > 1:
            view = w.any((view, ".flatten(0, 1)", ".flatten()"))
        name = w.new()
        w.run(f"{name} = {y.name}{view}")
        w.run(f"{name}.{w.any(('mul_(0.5)', 'add_(1)', 'clamp_(-1, 1)'))}")
    elif how == 6:
        w.run(f"{y.name}[{inside}].{w.any(('mul_(2)', 'add_(1)', 'zero_()'))}")
    elif how == 7 and y.ndim > 1:
        row = ", ".join([str(k)] if d == 0 else [":"] * d + [str(k)])
        rest = [a for e, a in enumerate(y.axes) if e != d]
        w.run(f"{y.name}[{row}] = {w.add_param(rest[-1:])}")
    elif how == 8:
        w.run(f"{y.name}.cumsum_({d})" if w.chance(0.5) else f"F.relu({y.name}, inplace=True)")
    elif how == 9:
        w.run(f"{y.name}.copy_({twin(w, y).name})")
    elif how == 10:  # place by place
        other = twin(w, y)
        at = index(y.ndim, {d: "k"})
        w.run(f"for k in range({y.name}.shape[{d}]):\n    {y.name}[{at}] = {other.name}[{at}] * 0.5")
    else:
        w.run(
            f"{y.name}.index_fill_({d}, torch.tensor([{k}]), 0.5)"
            if w.chance(0.3)
            else f"{y.name}.add_({y.name} * 0.1)"
        )


# --- blocks -----------------------------------------------------------------------------------------------------------


def indented(lines: list[str]) -> str:
    return "\n".join("    " + part for line in lines for part in line.split("\n"))


BLOCKS = {"checkpointed", "without_gradient", "recycled"}


@statement(2)
def checkpointed(w: Writer) -> Var:
    x = w.pick(ndim=(2, 5), ok=lambda v: wide(w, v))
    inner = w.new()
    with w.block() as lines:
        w.env[inner] = w.env[x.name]
        w.vars.append(Var(inner, x.axes, depth=w.depth))
        known = len(w.vars)
        w.some(w.rng.randint(1, 4), BLOCKS)
        made = [v for v in w.vars[known:] if v.kind == "f" and w.env[v.name].requires_grad]
        out = w.any(made[-1:])
        lines = live(lines, [out.name])
    f, y = f"f{w.new()[1:]}", w.new()
    text = f"def {f}({inner}):\n{indented(lines)}\n    return {out.name}"
    w.run(text)
    w.run(f"{y} = checkpoint({f}, {x.name}, use_reentrant=False)")
    w.vars.append(Var(y, out.axes, depth=w.depth, own=True))
    return w.vars[-1]


@statement(0.8)
def without_gradient(w: Writer) -> Var:
    if not w.grad:
        raise Dead
    w.grad = False
    try:
        with w.block() as lines:
            known = len(w.vars)
            w.some(w.rng.randint(1, 3), BLOCKS)
            made = [v for v in w.vars[known:] if v.kind == "f"]
            out = w.any(made[-1:])
            lines = live(lines, [out.name])
    finally:
        w.grad = True
    w.lines.append(f"with torch.no_grad():\n{indented(lines)}")
    w.vars.append(Var(out.name, out.axes, depth=w.depth, own=out.own))
    return w.vars[-1]


@statement(1)
def recycled(w: Writer) -> Var:
    """A loop whose state is detached from one round to the next."""
    x = w.pick(ndim=(2, 5), ok=lambda v: wide(w, v))
    state = w.new()
    w.run(f"{state} = {w.any(('torch.zeros_like({0})', '{0}.detach() * 0.5')).format(x.name)}")
    before = dict(w.env)
    with w.block() as lines:
        first = w.new()
        w.run(
            f"{first} = {x.name} + "
            + w.any(("0.5 * {0}.detach()", "{0}.detach()", "F.layer_norm({0}, {0}.shape[-1:])")).format(state)
        )
        w.vars.append(Var(first, x.axes, depth=w.depth, own=True))
        known = len(w.vars)
        w.some(w.rng.randint(1, 3), BLOCKS)
        alike = [v for v in w.vars[known:] if v.axes == x.axes and v.kind == "f"]
        end = alike[-1] if alike else w.vars[known - 1]
        w.run(f"{state} = {end.name}")
        lines = live(lines, [state])
    w.env.update(before)
    w.run(f"for _ in range(2):\n{indented(lines)}")
    w.vars.append(Var(state, x.axes, depth=w.depth))
    return w.vars[-1]
