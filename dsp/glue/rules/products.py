"""Rules of products: linear maps, matrices, lookups."""

from __future__ import annotations

import string
from collections.abc import Sequence

from dsp.comm.layout import Cut
from dsp.core.torch_calls import Operand
from dsp.glue.rules.call import Frame, Outcome, align, first, rule


@rule("linear", piecewise=True)
def linear(f: Frame) -> Outcome:
    x, cut = first(f)
    if cut.dim == x.ndim - 1:
        raise f.refuse("it sums over the sharded dim")
    return Outcome(cut, x.shape[cut.dim])


@rule("matmul bmm mm rmatmul", piecewise=True)
def matmul(f: Frame) -> Outcome:
    a, b = f.get(0, "input"), f.get(1, "mat2" if "mat2" in f.kwargs else "other")
    if f.name == "rmatmul":
        a, b = b, a
    if a.ndim < 2 or b.ndim < 2:
        raise f.refuse("products with a vector have no rule")
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
    return align(f, [a, b])[1]


def spelled_out(equation: str, ndims: Sequence[int]) -> tuple[str, str]:
    """An einsum equation with its output, and with letters for `...`, whose dims are aligned at the right."""
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


@rule("einsum", piecewise=True)
def einsum(f: Frame) -> Outcome:
    equation = f.args[0]
    operands = list(f.args[1]) if isinstance(f.args[1], (list, tuple)) else list(f.args[1:])
    if not isinstance(equation, str):
        raise f.refuse("the equation is not a string", "Write it as one")
    return by_equation(f, equation, operands)


def by_equation(f: Frame, equation: str, operands: Sequence[Operand]) -> Outcome:
    """The outcome of a sum of products, or of an operation that mixes dims as one does, by its einsum equation."""
    inputs, output = spelled_out(equation, [o.ndim for o in operands])
    terms = inputs.split(",")
    letters = {(terms[i][o.cut.dim], o.cut.outer) for i, o in enumerate(operands) if o.cut}
    if len(letters) > 1:
        raise f.refuse("its tensors are sharded along different dims")
    ((letter, outer),) = letters
    if letter not in output:
        raise f.refuse(f"it sums over the sharded dim {letter!r}")
    sizes = {o.shape[term.index(letter)] for term, o in zip(terms, operands) if letter in term}
    outcome = Outcome(Cut(output.index(letter), outer), next(iter(sizes - {1}), 1))
    for i, (term, o) in enumerate(zip(terms, operands)):
        if term.count(letter) > 1:
            raise f.refuse(f"it takes a diagonal of the sharded dim {letter!r}")
        have = o.shape[term.index(letter)] if letter in term else 1
        if o.cut is not None and have != outcome.size:
            raise f.refuse(f"one tensor has size {have} where the sharded dim has size {outcome.size}")
        if o.cut is None and have > 1:  # else it broadcasts
            outcome.narrow[i] = Cut(term.index(letter), outer)
    return outcome


@rule("cdist")
def distances(f: Frame) -> Outcome:
    """With matrix products if the full tensor has many points, as in torch, which would count those of the shard."""
    a, b, mode = f.get(0, "x1"), f.get(1, "x2"), f.get(3, "compute_mode", "use_mm_for_euclid_dist_if_necessary")
    if mode == "use_mm_for_euclid_dist_if_necessary":
        many = a.shape[-2] > 25 or b.shape[-2] > 25
        mode = "use_mm_for_euclid_dist" if many else "donot_use_mm_for_euclid_dist"
    outcome = by_equation(f, "...pm,...rm->...pr", [a, b])
    outcome.args, outcome.kwargs = (a, b, f.get(2, "p", 2.0), mode), {}
    return outcome


@rule("embedding", piecewise=True)
def embedding(f: Frame) -> Outcome:
    x, weight = f.get(0, "input"), f.get(1, "weight")
    if weight.cut is not None:  # narrowed to some features, for indices that every rank has
        if x.cut is not None or weight.cut.dim != 1:
            raise f.refuse("its weight is sharded along the rows that the indices choose among")
        if f.get(6, "sparse"):
            raise f.refuse("sparse=True needs the whole weight, and the weight is sharded")
        cut, size = Cut(x.ndim, weight.cut.outer), weight.shape[1]
    else:
        x, cut = first(f)
        size = x.shape[cut.dim]
    if f.get(5, "scale_grad_by_freq"):
        raise f.refuse("scale_grad_by_freq counts the places of the whole tensor")
    if f.get(3, "max_norm") is not None:
        raise f.refuse("max_norm rescales the rows of the weight that are read, and each rank reads other rows")
    return Outcome(cut, size)


@rule("one_hot")
def one_hot(f: Frame) -> Outcome:
    if f.get(1, "num_classes", -1) < 0:
        raise f.refuse("it counts the classes in this rank's part", "Pass num_classes")
    x, cut = first(f)
    return Outcome(cut, x.shape[cut.dim])
