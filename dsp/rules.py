"""What each operation between stages ("glue") does to a sharded dim.

A rule reads an operation's arguments, tensors replaced by `Operand`s (global shape and cut), and says how the same
operation runs on local parts: which whole operands to narrow, which size arguments to localize, and where the result is
cut. It touches no data, so the planner and the run share one table. An operation without a rule runs on whole tensors,
which the plan gathers for it: on shards it may be exact, but nobody has shown it.
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from dsp.layout import Cut, chunk, chunk_sizes, fold_fits


class GlueError(RuntimeError):
    """An operation between stages that cannot run on a sharded tensor without communication or wrong numbers."""


@dataclass(eq=False)
class Operand:
    """A tensor argument: global shape, and where it is cut (None: whole on every rank)."""

    shape: tuple[int, ...]
    cut: Cut | None = None

    @property
    def ndim(self) -> int:
        return len(self.shape)


@dataclass
class Outcome:
    """How an operation runs on local parts.

    cut, size: where the results are cut and the global size of that dim (cut None: the result is whole);
    narrow: whole operands of which each rank takes its part; args, kwargs: replacements with local sizes;
    func: what to call instead; view: the result is the same data; reduce: the local results still have to be summed
    over ranks, and divided by this.
    """

    cut: Cut | None
    size: int = 0
    narrow: dict[int, Cut] = field(default_factory=dict)
    args: tuple[Any, ...] | None = None
    kwargs: dict[str, Any] | None = None
    func: Callable[..., Any] | None = None
    view: bool = False
    reduce: float | None = None


@dataclass
class Frame:
    """One operation: its name, arguments with Operands for tensors, the number of ranks, and what is called."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    n: int
    rank: int = 0
    func: Callable[..., Any] | None = None

    def get(self, position: int, name: str, default: Any = None) -> Any:
        if len(self.args) > position:
            return self.args[position]
        return self.kwargs.get(name, default)

    def operands(self) -> list[Operand]:
        found: list[Operand] = []

        def visit(value: Any) -> None:
            if isinstance(value, Operand):
                found.append(value)
            elif isinstance(value, (list, tuple)):
                for v in value:
                    visit(v)

        visit(self.args)
        visit(tuple(self.kwargs.values()))
        return found

    def refuse(self, reason: str, advice: str = "") -> GlueError:
        shapes = ", ".join(
            f"{list(o.shape)}" + (f" sharded along dim {o.cut.dim}" if o.cut else "") for o in self.operands()
        )
        return GlueError(
            f"{self.name}({shapes}) between stages: {reason}. "
            + (advice or "Move it into a stage (a submodule with a pattern), where tensors are local")
        )

    def on_a_row(self, cut: Cut, size: int) -> Callable[..., Any] | None:
        """For a rank that holds nothing, of an operation that takes no empty tensor: on one row, none of it returned.

        Of a first argument and a result of which `cut` is sharded and has global `size`. None: this rank holds a part.
        """
        func = self.func
        if func is None or self.local_size(size, cut.outer):
            return None

        def run(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            shape = [*x.shape[: cut.dim], 1, *x.shape[cut.dim + 1 :]]
            return func(torch.cat([x, x.new_zeros(shape)], cut.dim), *args, **kwargs).narrow(cut.dim, 0, 0)

        return run

    def local_size(self, size: int, outer: int) -> int:
        return outer * chunk_sizes(size // outer, self.n)[self.rank]

    def normal(self, dim: int, ndim: int) -> int:
        if not -ndim <= dim < ndim:
            raise self.refuse(f"dim {dim} is out of range")
        return dim % ndim


def tensor_args(args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors among an operation's arguments, in the order in which `Frame` numbers them."""
    found: list[torch.Tensor] = []
    for a in (*args, *kwargs.values()):
        if isinstance(a, torch.Tensor):
            found.append(a)
        elif type(a) in (list, tuple):
            found.extend(tensor_args(a, {}))
    return found


def with_operands(value: Any, operands: Iterator[Operand]) -> Any:
    """The same arguments with the tensors replaced, in order."""
    if isinstance(value, torch.Tensor):
        return next(operands)
    if type(value) in (list, tuple):
        return type(value)(with_operands(v, operands) for v in value)
    return value


def without_operands(value: Any, tensors: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, Operand):
        return tensors[id(value)]
    if type(value) in (list, tuple):
        return type(value)(without_operands(v, tensors) for v in value)
    return value


Rule = Callable[[Frame], Outcome]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    def register(f: Rule) -> Rule:
        for group in names:
            for name in group.split():
                RULES[name] = f
        return f

    return register


def no_rule(f: Frame) -> Outcome:
    raise f.refuse("it has no rule for a sharded tensor")


def only(f: Frame) -> tuple[Operand, Cut]:
    """The one sharded operand."""
    cut = [o for o in f.operands() if o.cut is not None]
    if len(cut) != 1:
        raise f.refuse("more than one sharded tensor")
    assert cut[0].cut is not None
    return cut[0], cut[0].cut


def first(f: Frame) -> tuple[Operand, Cut]:
    """The first argument, which must be the sharded one, alone."""
    x, cut = only(f)
    if not f.args or f.args[0] is not x:
        raise f.refuse("only the first argument may be sharded")
    return x, cut


def align(f: Frame, operands: Sequence[Operand], skip: int = 0) -> tuple[int, Outcome]:
    """Broadcasting from the right: the cut's shared position (negative), and an Outcome that narrows whole operands.

    The last `skip` dims do not broadcast (matrices). The caller fills in the cut's dim for its output rank.
    """
    sharded = [(o, o.cut) for o in operands if o.cut is not None]
    o, cut = sharded[0]
    position, size = cut.dim - o.ndim, o.shape[cut.dim]
    for other, c in sharded[1:]:
        if (c.dim - other.ndim, c.outer, other.shape[c.dim]) != (position, cut.outer, size):
            raise f.refuse(
                "its tensors are sharded along different dims",
                "Compute them in stages that can share a layout, or give the module a pattern of its own",
            )
    outcome = Outcome(Cut(position, cut.outer), size)
    for i, other in enumerate(f.operands()):
        if not any(other is x for x in operands) or other.cut is not None or other.ndim < -position:
            continue
        if skip and -position <= skip:
            continue
        have = other.shape[position]
        if have == size and size != 1:
            outcome.narrow[i] = Cut(other.ndim + position, cut.outer)
        elif have > 1:
            raise f.refuse(f"a tensor has {have} where the sharded dim has {size}")
    return position, outcome


ELEMENTWISE = """
abs absolute add sub subtract rsub mul multiply div divide true_divide rtruediv rdiv rmul radd floor_divide rfloordiv
remainder fmod pow rpow neg negative positive exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square reciprocal sin cos
tan tanh sinh cosh asin acos atan arctan atan2 asinh acosh atanh sigmoid logit erf erfc erfinv lgamma digamma sinc
relu relu6 gelu silu elu selu celu mish hardswish hardtanh hardsigmoid leaky_relu softplus softsign tanhshrink
hardshrink softshrink threshold logsigmoid clamp clip clamp_min clamp_max where lerp addcmul addcdiv maximum minimum
fmax fmin eq ne lt le gt ge not_equal less greater greater_equal less_equal isnan isinf isfinite logical_and logical_or
logical_not logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor and or xor invert rand ror sign sgn floor ceil
round trunc frac nan_to_num masked_fill heaviside hypot copysign xlogy logaddexp logaddexp2 float half bfloat16 double
int long short char byte bool cfloat contiguous clone detach dropout alpha_dropout bernoulli zeros_like ones_like
full_like empty_like rand_like randn_like requires_grad real imag conj deg2rad rad2deg polar complex alias
zero fill copy iadd isub imul itruediv ipow data
truediv floordiv mod rmod float_power fix arccos arccosh arcsin arcsinh arctan2 arctanh angle signbit nextafter ldexp
gcd lcm i0 igamma igammac polygamma mvlgamma isreal isposinf isneginf isclose conj_physical resolve_conj resolve_neg
cdouble chalf iand ior ixor rxor lshift rshift rlshift rrshift ilshift irshift bitwise_left_shift bitwise_right_shift
log_sigmoid special_digamma special_entr special_erf special_erfc special_erfcx special_erfinv special_exp2
special_expit special_expm1 special_gammainc special_gammaincc special_gammaln special_i0 special_i0e special_i1
special_i1e special_log1p special_log_ndtr special_logit special_multigammaln special_ndtr special_ndtri
special_polygamma special_psi special_round special_sinc special_xlog1py special_xlogy special_zeta
""".split()


@rule(*ELEMENTWISE)
def elementwise(f: Frame) -> Outcome:
    operands = f.operands()
    if f.name == "where" and len(f.args) + len(f.kwargs) == 1:
        raise f.refuse("how many places it finds depends on the numbers")
    position, outcome = align(f, operands)
    assert outcome.cut is not None
    ndim = max(o.ndim for o in operands)
    outcome.cut = Cut(ndim + position, outcome.cut.outer)
    return outcome


@rule("to type_as type")
def cast(f: Frame) -> Outcome:
    x, cut = f.args[0], f.args[0].cut
    if cut is None:
        raise f.refuse("only the first argument may be sharded")
    if len(f.args) + len(f.kwargs) == 1 and f.name == "type":
        raise f.refuse("it returns a name", "Use x.dtype")
    return Outcome(cut, x.shape[cut.dim])


@rule("feature_dropout dropout1d dropout2d dropout3d feature_alpha_dropout")
def feature_dropout(f: Frame) -> Outcome:
    x, cut = first(f)
    if cut.dim > 1:
        raise f.refuse("one mask is shared along the sharded dim")
    return Outcome(cut, x.shape[cut.dim])


@rule("mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy_with_logits binary_cross_entropy")
def loss(f: Frame) -> Outcome:
    outcome = elementwise(f)
    operands = f.operands()
    ndim = max(o.ndim for o in operands)
    how = f.kwargs.get("reduction", "mean")
    if any(isinstance(a, (bool, str)) for a in f.args):
        raise f.refuse("pass reduction= by name")
    if how == "none":
        return outcome
    outcome.kwargs = {**f.kwargs, "reduction": "sum"}
    shape = [max(o.shape[o.ndim - 1 - d] if d < o.ndim else 1 for o in operands) for d in range(ndim)]
    outcome.reduce = float(math.prod(shape)) if how == "mean" else 1.0
    outcome.cut = None
    return outcome


# --- the same data under other dims -----------------------------------------------------------------------------------


def reshaped(f: Frame, x: Operand, cut: Cut, new: Sequence[int]) -> Cut:
    """Where the sharded dim goes in a reshape: it must stay one factor of one axis, on the same chunk boundaries."""
    extent = x.shape[cut.dim] // cut.outer
    before = math.prod(x.shape[: cut.dim]) * cut.outer
    after = math.prod(x.shape[cut.dim + 1 :])
    mine = [c * after for c in chunk_sizes(extent, f.n)]
    best: Cut | None = None
    lead = 1
    for d, size in enumerate(new):
        if lead and before % lead == 0:
            outer = before // lead
            if outer and size % outer == 0:
                part, suffix = size // outer, math.prod(new[d + 1 :])
                if part * suffix == extent * after and [c * suffix for c in chunk_sizes(part, f.n)] == mine:
                    if part == extent and suffix == after:
                        return Cut(d, outer)
                    best = best or Cut(d, outer)
        lead *= size
    if best is None:
        raise f.refuse(
            f"reshaping to {list(new)} folds dim {cut.dim} (size {extent}) across the chunks of {f.n} ranks",
            "Let the stage pattern open and close the fold, or make the sharded dim the last of its fold",
        )
    return best


def reshape_to(f: Frame, new: Sequence[int]) -> Outcome:
    x, cut = first(f)
    total = math.prod(x.shape)
    new = [int(s) for s in new]
    if -1 in new:
        known = -math.prod(new)
        if known <= 0 or total % known:
            raise f.refuse(f"shape {new} does not fit {total} elements")
        new[new.index(-1)] = total // known
    if math.prod(new) != total:
        raise f.refuse(f"shape {new} does not fit {total} elements")
    out = reshaped(f, x, cut, new)
    local = list(new)
    local[out.dim] = f.local_size(new[out.dim], out.outer)
    return Outcome(out, new[out.dim], args=(x, tuple(local)), kwargs={}, func=torch.Tensor.reshape, view=True)


@rule("view reshape")
def view(f: Frame) -> Outcome:
    sizes = f.kwargs.get("shape", f.kwargs.get("size", f.args[1:]))
    if len(sizes) == 1 and isinstance(sizes[0], (list, tuple, torch.Size)):
        sizes = sizes[0]
    if len(sizes) == 1 and isinstance(sizes[0], torch.dtype):
        raise f.refuse("it reinterprets the bytes of a sharded tensor")
    return reshape_to(f, sizes)


@rule("view_as reshape_as")
def view_as(f: Frame) -> Outcome:
    x, shape = f.args[0], f.get(1, "other").shape
    return reshape_to(Frame(f.name, (x, shape), {}, f.n, f.rank), shape)


@rule("flatten ravel")
def flatten(f: Frame) -> Outcome:
    x, _ = first(f)
    start = f.normal(f.get(1, "start_dim", 0), x.ndim)
    end = f.normal(f.get(2, "end_dim", -1), x.ndim)
    return reshape_to(f, [*x.shape[:start], math.prod(x.shape[start : end + 1]), *x.shape[end + 1 :]])


@rule("unflatten")
def unflatten(f: Frame) -> Outcome:
    x, _ = first(f)
    dim, sizes = f.normal(f.get(1, "dim"), x.ndim), list(f.get(2, "sizes"))
    if -1 in sizes:
        sizes[sizes.index(-1)] = x.shape[dim] // -math.prod(sizes)
    return reshape_to(f, [*x.shape[:dim], *sizes, *x.shape[dim + 1 :]])


@rule("unsqueeze")
def unsqueeze(f: Frame) -> Outcome:
    x, cut = first(f)
    dim = f.normal(f.get(1, "dim"), x.ndim + 1)
    return Outcome(Cut(cut.dim + (dim <= cut.dim), cut.outer), x.shape[cut.dim], view=True)


@rule("squeeze")
def squeeze(f: Frame) -> Outcome:
    x, cut = first(f)
    dims = f.get(1, "dim")
    if dims is None:
        gone = [d for d, s in enumerate(x.shape) if s == 1]
    else:
        gone = [f.normal(d, x.ndim) for d in ([dims] if isinstance(dims, int) else dims)]
        gone = [d for d in gone if x.shape[d] == 1]
    if cut.dim in gone:
        raise f.refuse("it drops the sharded dim")
    # name the dims: a local part may have size 1 where the whole has more
    out = Cut(cut.dim - sum(d < cut.dim for d in gone), cut.outer)
    return Outcome(out, x.shape[cut.dim], args=(x, tuple(gone)), kwargs={}, view=True)


@rule("permute")
def permute(f: Frame) -> Outcome:
    x, cut = first(f)
    dims = f.kwargs.get("dims", f.args[1:])
    if len(dims) == 1 and isinstance(dims[0], (list, tuple)):
        dims = dims[0]
    order = [f.normal(d, x.ndim) for d in dims]
    return Outcome(Cut(order.index(cut.dim), cut.outer), x.shape[cut.dim], view=True)


@rule("transpose swapaxes swapdims")
def transpose(f: Frame) -> Outcome:
    x, cut = first(f)
    a = f.normal(f.get(1, "dim0", f.kwargs.get("axis0")), x.ndim)
    b = f.normal(f.get(2, "dim1", f.kwargs.get("axis1")), x.ndim)
    return Outcome(Cut({a: b, b: a}.get(cut.dim, cut.dim), cut.outer), x.shape[cut.dim], view=True)


@rule("t T mT H mH adjoint")
def matrix_transpose(f: Frame) -> Outcome:
    x, cut = first(f)
    if f.name in ("t", "T", "H") and x.ndim > 2:
        raise f.refuse("use transpose or permute on more than two dims")
    if x.ndim < 2:
        return Outcome(cut, x.shape[cut.dim], view=True)
    swap = {x.ndim - 1: x.ndim - 2, x.ndim - 2: x.ndim - 1}
    return Outcome(Cut(swap.get(cut.dim, cut.dim), cut.outer), x.shape[cut.dim], view=True)


@rule("view_as_real view_as_complex")
def complex_parts(f: Frame) -> Outcome:
    x, cut = first(f)
    if f.name == "view_as_complex" and cut.dim == x.ndim - 1:
        raise f.refuse("the parts of its numbers lie on several ranks")
    return Outcome(cut, x.shape[cut.dim])


@rule("movedim moveaxis")
def movedim(f: Frame) -> Outcome:
    x, cut = first(f)
    src, dst = f.get(1, "source"), f.get(2, "destination")
    probe = torch.empty([1] * x.ndim, device="meta").as_strided([1] * x.ndim, list(range(x.ndim)))
    order = probe.movedim(src, dst).stride()
    return Outcome(Cut(order.index(cut.dim), cut.outer), x.shape[cut.dim], view=True)


@rule("expand broadcast_to expand_as")
def expand(f: Frame) -> Outcome:
    x, cut = first(f)
    if f.name == "expand_as":
        sizes = list(f.get(1, "other").shape)
    else:
        given = f.kwargs.get("size", f.args[1:])
        sizes = list(given[0] if len(given) == 1 and isinstance(given[0], (list, tuple, torch.Size)) else given)
    lead = len(sizes) - x.ndim
    at = cut.dim + lead
    if sizes[at] not in (-1, x.shape[cut.dim]):
        raise f.refuse("it stretches the sharded dim")
    sizes[at] = -1
    return Outcome(Cut(at, cut.outer), x.shape[cut.dim], args=(x, tuple(sizes)), kwargs={}, func=torch.Tensor.expand)


@rule("repeat tile")
def repeat(f: Frame) -> Outcome:
    x, cut = first(f)
    given = f.kwargs.get("repeats", f.kwargs.get("dims", f.args[1:]))
    reps = list(given[0] if len(given) == 1 and isinstance(given[0], (list, tuple, torch.Size)) else given)
    lead = max(len(reps) - x.ndim, 0)
    reps = [1] * (x.ndim - len(reps)) + reps
    at = cut.dim + lead
    if not reps[at]:
        raise f.refuse("it repeats the sharded dim no time")
    return Outcome(Cut(at, cut.outer * reps[at]), x.shape[cut.dim] * reps[at])


@rule("repeat_interleave")
def repeat_interleave(f: Frame) -> Outcome:
    x, cut = first(f)
    times, dim = f.get(1, "repeats"), f.get(2, "dim")
    if not isinstance(times, int) or dim is None:
        raise f.refuse("repeats must be a number and dim given")
    kwargs = {k: v for k, v in f.kwargs.items() if k != "output_size"}
    dim = f.normal(dim, x.ndim)
    size = x.shape[cut.dim]
    if dim == cut.dim:
        if not fold_fits(size // cut.outer, times, f.n):
            raise f.refuse(f"{size // cut.outer} repeated {times} times does not divide over {f.n} ranks")
        size *= times
    return Outcome(cut, size, kwargs=kwargs)


# --- along a dim that must be whole -----------------------------------------------------------------------------------


def dims_of(f: Frame, x: Operand, value: Any) -> list[int]:
    return [f.normal(d, x.ndim) for d in ([value] if isinstance(value, int) else value)]


@rule("softmax log_softmax softmin cumsum cumprod logcumsumexp flip roll sort argsort topk normalize glu")
def along(f: Frame) -> Outcome:
    x, cut = first(f)
    name = {"flip": "dims", "roll": "dims"}.get(f.name, "dim")
    default = {"normalize": 1}.get(f.name, -1)
    position = {"topk": 2, "roll": 2, "normalize": 2}.get(f.name, 1)
    if f.name == "flip" and len(f.args) > 2:
        dims: Any = f.args[1:]
    else:
        dims = f.get(position, name, default)
        if isinstance(dims, bool) or dims is None:
            dims = f.kwargs.get(name, default)
        if f.name in ("softmax", "log_softmax", "softmin") and f.get(1, "dim") is None:
            dims = int(x.ndim not in (0, 1, 3))  # what torch takes where none is given
    if f.name == "roll" and dims == -1 and "dims" not in f.kwargs and len(f.args) < 3:
        raise f.refuse("it rolls the flattened tensor")
    if cut.dim in dims_of(f, x, dims):
        raise f.refuse("it works along the sharded dim")
    return Outcome(cut, x.shape[cut.dim])


@rule(
    "sum mean amax amin max min argmax argmin any all prod norm vector_norm logsumexp var std nansum nanmean median",
    "count_nonzero std_mean var_mean",
)
def reduction(f: Frame) -> Outcome:
    x = f.args[0] if f.args else f.kwargs.get("input")
    others = [o for o in f.operands() if o is not x]
    if f.name in ("max", "min") and others:
        return elementwise(f)
    x, cut = first(f)
    position = {"norm": 2, "vector_norm": 2}.get(f.name, 1)
    dims = f.args[1:] if f.name == "count_nonzero" and len(f.args) > 2 else f.get(position, "dim")
    if dims is None and "axis" in f.kwargs:
        dims = f.kwargs["axis"]
    if isinstance(dims, bool):
        dims = f.kwargs.get("dim")
    keep = f.name != "count_nonzero" and bool(f.get(position + 1, "keepdim", False))
    everything = dims is None or (isinstance(dims, (tuple, list)) and not dims)
    gone = list(range(x.ndim)) if everything else dims_of(f, x, dims)
    if cut.dim not in gone:
        out = cut.dim if keep else cut.dim - sum(d < cut.dim for d in gone)
        return Outcome(Cut(out, cut.outer), x.shape[cut.dim])
    if f.name not in ("sum", "mean"):
        raise f.refuse(
            "it reduces over the sharded dim",
            "sum and mean are taken over all ranks; put other reductions in a stage that computes over the dim",
        )
    if f.name == "sum":
        return Outcome(None, reduce=1.0)
    count = math.prod(x.shape[d] for d in gone)
    return Outcome(None, reduce=float(count))


@rule("tril triu")
def triangle(f: Frame) -> Outcome:
    x, cut = first(f)
    if cut.dim >= x.ndim - 2:
        raise f.refuse("it counts positions along the sharded dim")
    return Outcome(cut, x.shape[cut.dim])


@rule("gather take_along_dim")
def taken_by_index(f: Frame) -> Outcome:
    x, swapped = f.get(0, "input"), f.name == "take_along_dim"
    index = f.get(1 if swapped else 2, "indices" if swapped else "index")
    dim = f.get(2 if swapped else 1, "dim")
    if dim is None:
        raise f.refuse("it takes from the flattened tensor")
    dim = f.normal(dim, x.ndim)
    position, outcome = align(f, [x, index])
    if x.ndim + position == dim:
        raise f.refuse("it takes parts of the sharded dim")
    if x.shape[position] != index.shape[position]:
        raise f.refuse("its index differs from it along the sharded dim")
    assert outcome.cut is not None
    outcome.cut = Cut(x.ndim + position, outcome.cut.outer)
    return outcome


@rule("layer_norm rms_norm")
def trailing_norm(f: Frame) -> Outcome:
    x, cut = first(f)
    shape = f.get(1, "normalized_shape")
    if cut.dim >= x.ndim - (1 if isinstance(shape, int) else len(shape)):
        raise f.refuse("it normalizes over the sharded dim")
    return Outcome(cut, x.shape[cut.dim])


@rule("group_norm instance_norm conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d interpolate",
      "avg_pool1d avg_pool2d avg_pool3d max_pool1d max_pool2d max_pool3d adaptive_avg_pool1d adaptive_avg_pool2d",
      "adaptive_avg_pool3d im2col fold")  # fmt: skip
def per_sample(f: Frame) -> Outcome:
    x, cut = first(f)
    unbatched = {"im2col": 3, "fold": 2}.get(f.name, next((int(c) + 1 for c in f.name if c.isdigit()), 0))
    if x.ndim == unbatched:
        raise f.refuse("its input has no batch dim")
    if cut.dim != 0:
        raise f.refuse(f"it mixes dim {cut.dim} or normalizes over it")
    return Outcome(cut, x.shape[0], func=f.on_a_row(cut, x.shape[0]) if f.name in ("im2col", "instance_norm") else None)


@rule("pixel_shuffle pixel_unshuffle")
def pixels(f: Frame) -> Outcome:
    x, cut = first(f)
    if cut.dim >= x.ndim - 3:
        raise f.refuse(f"it mixes dim {cut.dim}")
    return Outcome(cut, x.shape[cut.dim], func=f.on_a_row(cut, x.shape[cut.dim]))


@rule("unfold")
def windows(f: Frame) -> Outcome:
    x, cut = first(f)
    if f.normal(f.get(1, "dimension"), x.ndim) == cut.dim:
        raise f.refuse("its windows run over the sharded dim")
    return Outcome(cut, x.shape[cut.dim])


@rule("batch_norm")
def batch_norm(f: Frame) -> Outcome:
    x, cut = first(f)
    if f.get(5, "training", False) or cut.dim == 1:
        raise f.refuse("batch statistics run over the sharded dim", "Use a norm that acts on each sample alone")
    return Outcome(cut, x.shape[cut.dim])


# --- products ---------------------------------------------------------------------------------------------------------


@rule("linear")
def linear(f: Frame) -> Outcome:
    x, cut = first(f)
    if cut.dim == x.ndim - 1:
        raise f.refuse("it sums over the sharded dim")
    return Outcome(cut, x.shape[cut.dim])


@rule("matmul bmm mm rmatmul")
def matmul(f: Frame) -> Outcome:
    a, b = f.get(0, "input"), f.get(1, "mat2" if "mat2" in f.kwargs else "other")
    if f.name == "rmatmul":
        a, b = b, a
    if a.ndim < 2 or b.ndim < 2:
        raise f.refuse("a vector product with a sharded tensor")
    ndim = max(a.ndim, b.ndim)
    for x, y, keeps, sums in ((a, b, -2, -1), (b, a, -1, -2)):
        if x.cut is None:
            continue
        position = x.cut.dim - x.ndim
        if position == sums:
            raise f.refuse("it sums over the sharded dim")
        if position == keeps:
            if y.cut is not None:
                raise f.refuse("its tensors are sharded along different dims")
            return Outcome(Cut(ndim + position, x.cut.outer), x.shape[x.cut.dim])
    position, outcome = align(f, [a, b])
    assert outcome.cut is not None
    outcome.cut = Cut(ndim + position, outcome.cut.outer)
    return outcome


def spelled_out(equation: str, ndims: Sequence[int]) -> tuple[str, str]:
    """An einsum equation with letters for `...`, which stands for dims aligned at the right, and with its output."""
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    spare = [letter for letter in string.ascii_letters if letter not in equation]
    terms = []
    longest = ""
    for term, ndim in zip(inputs.split(","), ndims):
        count = ndim - len(term.replace("...", "")) if "..." in term else 0
        dots = "".join(spare[:count][::-1])
        longest = max(longest, dots, key=len)
        terms.append(term.replace("...", dots))
    if not arrow:
        once = sorted(c for c in set("".join(terms)) - set(longest) if "".join(terms).count(c) == 1)
        output = "..." + "".join(once) if longest else "".join(once)
    return ",".join(terms), output.replace("...", longest)


@rule("einsum")
def einsum(f: Frame) -> Outcome:
    equation = f.args[0]
    operands = list(f.args[1]) if isinstance(f.args[1], (list, tuple)) else list(f.args[1:])
    if not isinstance(equation, str):
        raise f.refuse("write the equation as a string")
    inputs, output = spelled_out(equation, [o.ndim for o in operands])
    terms = inputs.split(",")
    letters = {(terms[i][o.cut.dim], o.cut.outer) for i, o in enumerate(operands) if o.cut}
    if len(letters) > 1:
        raise f.refuse("its tensors are sharded along different dims")
    ((letter, outer),) = letters
    if letter not in output:
        raise f.refuse(f"it sums over the sharded dim {letter!r}")
    outcome = Outcome(Cut(output.index(letter), outer))
    for i, (term, o) in enumerate(zip(terms, operands)):
        if term.count(letter) > 1:
            raise f.refuse(f"it takes a diagonal of the sharded dim {letter!r}")
        size = o.shape[term.index(letter)] if letter in term else 1
        if size > 1:  # else it broadcasts
            outcome.size = size
            if o.cut is None:
                outcome.narrow[i] = Cut(term.index(letter), outer)
    return outcome


@rule("scaled_dot_product_attention")
def attention(f: Frame) -> Outcome:
    q, k, v = (f.get(i, name) for i, name in enumerate(("query", "key", "value")))
    mask = f.get(3, "attn_mask")
    operands = [o for o in (q, k, v, mask) if isinstance(o, Operand)]
    rows = [o for o in (q, mask) if isinstance(o, Operand) and o.ndim > 1]  # both have the queries' positions
    place = {id(o): o.cut.dim - o.ndim for o in operands if o.cut is not None}
    if any(at == -1 for at in place.values()) or -2 in (place.get(id(k)), place.get(id(v))):
        raise f.refuse("it computes over the sharded dim")
    along_rows = place.get(id(q)) == -2
    if not along_rows and -2 in place.values():
        raise f.refuse("the mask is sharded along the queries, which are whole")
    if along_rows and f.get(5, "is_causal", False):
        raise f.refuse("a causal mask counts local positions")
    if along_rows and (id(k) in place or id(v) in place):
        raise f.refuse("its tensors are sharded along different dims")
    position, outcome = align(f, rows if along_rows else operands)
    assert outcome.cut is not None
    outcome.cut = Cut(max(o.ndim for o in operands) + position, outcome.cut.outer)
    outcome.func = _attend
    return outcome


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    mask = args[0] if args else kwargs.get("attn_mask")
    lead = [*query.shape[:-1], *key.shape[:-2], *value.shape[:-2], *(mask.shape[:-2] if mask is not None else ())]
    if 0 not in lead:
        return F.scaled_dot_product_attention(query, key, value, *args, **kwargs)
    # a rank that holds nothing: some kernels divide by its size. All operands take part, for they may want gradients
    if kwargs.get("enable_gqa"):
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    scores = query @ key.transpose(-2, -1)
    return (scores if mask is None else scores + mask) @ value


@rule("embedding")
def embedding(f: Frame) -> Outcome:
    x, cut = first(f)
    return Outcome(cut, x.shape[cut.dim])


@rule("one_hot")
def one_hot(f: Frame) -> Outcome:
    if f.get(1, "num_classes", -1) < 0:
        raise f.refuse("how many classes there are it counts in what a rank holds", "Pass num_classes")
    return embedding(f)


# --- joining and taking apart -----------------------------------------------------------------------------------------


@rule("cat concat concatenate stack")
def cat(f: Frame) -> Outcome:
    tensors = list(f.get(0, "tensors"))
    reference = next(t for t in tensors if t.cut is not None)
    cut = reference.cut
    assert cut is not None
    stacked = f.name == "stack"
    dim = f.normal(f.get(1, "dim", f.kwargs.get("axis", 0)), reference.ndim + stacked)
    if dim == cut.dim and not stacked:
        raise f.refuse("it joins along the sharded dim")
    outcome = Outcome(Cut(cut.dim + (stacked and dim <= cut.dim), cut.outer), reference.shape[cut.dim])
    everything = f.operands()
    for t in tensors:
        if t.ndim != reference.ndim or t.shape[cut.dim] != reference.shape[cut.dim]:
            raise f.refuse("its tensors differ along the sharded dim")
        if t.cut is None:
            outcome.narrow[next(i for i, o in enumerate(everything) if o is t)] = cut
        elif t.cut != cut:
            raise f.refuse("its tensors are sharded along different dims")
    return outcome


@rule("chunk split tensor_split split_with_sizes unsafe_chunk unsafe_split narrow index_select")
def take(f: Frame) -> Outcome:
    x, cut = first(f)
    position, default = {"narrow": (1, None), "index_select": (1, None)}.get(f.name, (2, 0))
    dim = f.normal(f.get(position, "dim", default), x.ndim)
    if dim == cut.dim:
        raise f.refuse("it takes parts of the sharded dim")
    return Outcome(cut, x.shape[cut.dim])


@rule("unbind select iter")
def drop(f: Frame) -> Outcome:
    x, cut = first(f)
    dim = f.normal(f.get(1, "dim", 0), x.ndim)
    if dim == cut.dim:
        if f.name == "select":
            return one_of(f, x, cut, f.get(2, "index"), ())
        raise f.refuse("it takes parts of the sharded dim")
    return Outcome(Cut(cut.dim - (dim < cut.dim), cut.outer), x.shape[cut.dim])


def one_of(f: Frame, x: Operand, cut: Cut, index: int, rest: tuple[Any, ...]) -> Outcome:
    """One position of the sharded dim, then `x[rest]`: its owner's numbers, plus nothing from everybody else."""
    size = x.shape[cut.dim]
    if cut.outer != 1 or not -size <= index < size:
        raise f.refuse("it takes parts of the sharded dim")
    start, length = chunk(size, f.n, f.rank)
    return Outcome(None, args=(x, cut.dim, index % size - start, length, rest), kwargs={}, func=_one_of, reduce=1.0)


def _one_of(x: torch.Tensor, dim: int, index: int, length: int, rest: tuple[Any, ...]) -> torch.Tensor:
    mine = x.select(dim, index) if 0 <= index < length else x.narrow(dim, 0, 0).sum(dim, dtype=x.dtype)
    return mine[rest]


@rule("getitem")
def getitem(f: Frame) -> Outcome:
    index = f.args[1] if isinstance(f.args[1], tuple) else (f.args[1],)
    x, cut = first(f)
    lists = [i for i in index if isinstance(i, (Operand, list))]
    flat = all(i.ndim == 1 if isinstance(i, Operand) else all(type(k) is int for k in i) for i in lists)
    if len(lists) > 1 or not flat or any(isinstance(i, bool) for i in index):
        raise f.refuse("indexing with masks or several lists has no rule for a sharded tensor", "Use index_select")
    if lists and any(isinstance(i, int) for i in index):
        raise f.refuse("indexing with a number and a list has no rule for a sharded tensor", "Use index_select")
    real = sum(i is not None and i is not Ellipsis for i in index)
    if not any(i is Ellipsis for i in index):
        index = (*index, Ellipsis)
    dim = out = 0
    for at, i in enumerate(index):
        if i is None:
            out += 1
            continue
        if i is Ellipsis:
            step = x.ndim - real
            if dim <= cut.dim < dim + step:
                return Outcome(Cut(out + cut.dim - dim, cut.outer), x.shape[cut.dim])
            dim, out = dim + step, out + step
            continue
        if dim == cut.dim:
            size = x.shape[dim]
            if isinstance(i, int):
                return one_of(f, x, cut, i, (*index[:at], *index[at + 1 :]))
            if not isinstance(i, slice) or i.indices(size) != (0, size, 1):
                raise f.refuse("it takes parts of the sharded dim")
            # an explicit end such as x[:, :7] is local, too
            whole = (*index[:at], slice(None), *index[at + 1 :])
            return Outcome(Cut(out, cut.outer), size, args=(x, whole), kwargs={})
        dim += 1
        out += not isinstance(i, int)
    raise f.refuse("too many indices")


@rule("setitem")
def setitem(f: Frame) -> Outcome:
    x, value = f.args[0], f.args[2]
    others = [o for o in f.operands() if o is not x and o is not value]
    if x.cut is None or any(o.cut is not None for o in others):
        raise f.refuse("it writes a sharded tensor into a whole one")
    frame = Frame(f.name, (x, f.args[1]), {}, f.n, f.rank)
    part = getitem(frame)
    if part.cut is None:
        raise f.refuse("it writes one position of the sharded dim")
    index = f.args[1] if part.args is None else part.args[1]
    outcome = Outcome(x.cut, x.shape[x.cut.dim], args=(x, index, value), kwargs={})
    if isinstance(value, Operand):
        target = Operand(indexed_shape(f.args[1], x), part.cut)
        if value.ndim > target.ndim:
            raise f.refuse("the value has more dims than what it is written to")
        _, aligned = align(Frame(f.name, (target, value), {}, f.n, f.rank), [target, value])
        if 1 in aligned.narrow:
            outcome.narrow[f.operands().index(value)] = aligned.narrow[1]
    return outcome


def indexed_shape(index: Any, x: Operand) -> tuple[int, ...]:
    def plain(i: Any) -> Any:
        return torch.empty(i.shape, dtype=torch.long, device="meta") if isinstance(i, Operand) else i

    items = index if isinstance(index, tuple) else (index,)
    return tuple(torch.empty(x.shape, device="meta")[tuple(plain(i) for i in items)].shape)


@rule("pad")
def pad(f: Frame) -> Outcome:
    x, cut = first(f)
    amounts = list(f.get(1, "pad"))
    k = x.ndim - 1 - cut.dim
    if any(amounts[2 * k : 2 * k + 2]):
        raise f.refuse("it pads the sharded dim")
    return Outcome(cut, x.shape[cut.dim], func=f.on_a_row(cut, x.shape[cut.dim]))


# --- whole tensors stretched in glue: produce only this rank's part ---------------------------------------------------

SOURCES = ("repeat_interleave", "expand", "broadcast_to", "repeat", "tile")


def source_cuts(f: Frame) -> list[Cut]:
    """Where the result of stretching a whole tensor may be cut at its source, so that it is never whole."""
    x = f.args[0]
    if not isinstance(x, Operand) or x.cut is not None:
        return []
    if f.name == "repeat_interleave":
        times, dim = f.get(1, "repeats"), f.get(2, "dim")
        if not isinstance(times, int) or times < 2 or (dim is None and x.ndim != 1):
            return []
        dim = f.normal(0 if dim is None else dim, x.ndim)
        return [Cut(dim, x.shape[dim])]
    sizes = f.kwargs.get("size", f.kwargs.get("repeats", f.args[1:]))
    if len(sizes) == 1 and isinstance(sizes[0], (list, tuple, torch.Size)):
        sizes = sizes[0]
    lead = len(sizes) - x.ndim
    cuts = []
    for d, s in enumerate(sizes):
        have = x.shape[d - lead] if d >= lead else 1
        if isinstance(s, int) and s > 1 and have == 1:
            cuts.append(Cut(d))
    return cuts


def localize_source(f: Frame, cut: Cut) -> tuple[Callable[..., Any], tuple[Any, ...], int]:
    """The same stretch for one rank: (function, its arguments, global size of the cut dim)."""
    x = f.args[0]
    if f.name == "repeat_interleave":
        times = f.get(1, "repeats")
        size = x.shape[cut.dim] * times
        own = f.local_size(times, 1)
        return torch.repeat_interleave, (x, own, cut.dim), size
    sizes = f.kwargs.get("size", f.kwargs.get("repeats", f.args[1:]))
    if len(sizes) == 1 and isinstance(sizes[0], (list, tuple, torch.Size)):
        sizes = sizes[0]
    sizes = list(sizes)
    size = sizes[cut.dim]
    sizes[cut.dim] = f.local_size(size, 1)
    stretch = torch.Tensor.repeat if f.name in ("repeat", "tile") else torch.Tensor.expand
    return stretch, (x, *sizes), size
