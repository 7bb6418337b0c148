"""discover: what each submodule of a model nobody annotated computes over, as a stages dict.

1. A copy of the model runs once on the example inputs, every dim of which is followed through glue by the rules that
   will run on shards (`dsp.dims`). So a submodule's tensors arrive with dims that are known to be the same, or folds.
2. Each submodule is called again on slices of its own inputs (`dsp.slices`): along which dims, sliced in which of its
   tensors, is f(slice) the slice of f? What it returns carries these dims on.
3. Reshapes and meetings show what dims are; the run is repeated until it shows nothing new.
4. Top-down, the largest submodules that leave a dim free become stages; what acts on each position alone, by
   operations that glue can run, stays glue.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dsp.dims import Axes, Dim, Dims, Follower, GlueOp, atoms, axes_of, follow, is_live, places
from dsp.layout import Cut
from dsp.notation import NotationError, StagePattern, TensorPattern
from dsp.parallel import describe
from dsp.plan import stages_of
from dsp.rules import GlueError
from dsp.slices import Probe, copies, divisors
from dsp.stages import Signature, _matches, clean, tensors_in
from dsp.trace import trace

log = logging.getLogger("dsp")

PASSES = 6
COMBINATIONS = 64  # ways to slice the tensors of one call along one dim
SLOW = 3.0  # seconds after which progress is logged
ANY = StagePattern("", (), (), False)


class Stages(dict[str, str]):
    """Submodule pattern to stage string; prints as python, ready to paste."""

    def __repr__(self) -> str:
        return "".join(["{\n", *(f"    {k!r}: {v!r},\n" for k, v in self.items()), "}"]).replace("'", '"')

    __str__ = __repr__


@dataclass
class Group:
    """One dim along which a call is independent: where it lies in each tensor argument and in each output."""

    primary: tuple[int, Cut]  # the argument and place that the search began with
    cuts: tuple[Cut | None, ...]
    outputs: tuple[Cut, ...]
    size: int


@dataclass(eq=False)
class Node:
    """One call of a submodule: its tensor arguments, what it is independent along, what runs inside it."""

    path: str
    module: nn.Module
    index: int
    params: list[str] = field(default_factory=list)
    inputs: list[Axes] = field(default_factory=list)
    lives: list[bool] = field(default_factory=list)
    outputs: list[Axes] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    ops: list[GlueOp] = field(default_factory=list)
    children: list[Node] = field(default_factory=list)
    tested: bool = False
    local: bool = False  # acts on each position alone: computes over one axis at most, the channels

    @property
    def live(self) -> bool:
        return any(self.lives)

    @property
    def numel(self) -> int:
        return sum(math.prod(s) for s, live in zip(self.shapes, self.lives) if live)

    def group(self, arg: int, cut: Cut) -> int | None:
        return next((n for n, g in enumerate(self.groups) if g.cuts[arg] == cut), None)

    def slots(self) -> Iterator[tuple[int, Dim, Cut]]:
        """Every dim of the arguments that may be sharded, and where it lies."""
        for i, axes in enumerate(self.inputs):
            if self.lives[i]:
                yield from ((i, d, c) for d, c in places(known(axes)))

    def free(self) -> set[Dim]:
        return {d for i, d, c in self.slots() if self.group(i, c) is not None}

    def blocked(self) -> set[Dim]:
        return {d for i, d, c in self.slots() if self.group(i, c) is None}

    def walk(self) -> Iterator[Node]:
        yield self
        for child in self.children:
            yield from child.walk()


def known(axes: Axes) -> Axes:
    """The dims of a tensor as far as they are known by now."""
    return [atoms(axis) for axis in axes]


def discover(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    seed: int = 0,
) -> dict[str, str]:
    """Find out what each submodule of `model` computes over: the stages for `parallelize`, `plan` and `check`.

    args, kwargs: example inputs of its forward, real tensors, small, with at least two of everything that may grow
    (samples, frames, tokens); sizes that differ make the result easiest to read. The tensor with the most dims, the
    first of these, is taken for the sequence; its first dim for the batch if the model is independent along it. Only
    dims that are sharded are named in the root pattern. ``print`` shows the dict as python.

    How dims are told apart: not by their size but by following them from the inputs through every operation between
    submodules, by the rules that glue runs by; only dims of tensors that come another way are matched by size, and
    then by the test. How independence is tested: f(slice) == slice of f, for uneven slices, on a copy of the model in
    float64, in train mode, with random parameters (so that no zero-initialised gate hides anything); numbers that a
    submodule draws are sliced, too. The model, its buffers and the random state are left as they were.

    Raises ValueError when the inputs do not tell enough, or when nothing is left to shard; `GlueError` when an
    operation outside any submodule cannot run on shards. Takes some dozen forwards per submodule.
    """
    kwargs = dict(kwargs or {})
    args = (args,) if isinstance(args, Tensor) else tuple(args)
    _inspect(model, args, kwargs)
    cuda = sorted({t.device.index or 0 for t in tensors_in((args, kwargs)) if t.device.type == "cuda"})
    with torch.random.fork_rng(devices=cuda), torch.no_grad():
        torch.manual_seed(seed)
        clone, some_args, some_kwargs = _randomised(model, args, kwargs)
        search = Search(clone, some_args, some_kwargs, seed)
        root = search.settle()
        stages = Result(search, root).stages()
    found, pattern = stages_of(model, stages) if len(stages) > 1 else ([], None)
    if found:
        try:
            trace(model, found, pattern, args, kwargs, 2, gather_output=False)
        except (NotationError, GlueError) as reason:
            raise type(reason)(f"discover found\n{stages}\nbut between these stages: {reason}") from None
        except Exception as reason:  # a forward that looks at its data is planned as it runs
            log.info("discover: not planned ahead: %s", reason)
    return stages


def _inspect(model: nn.Module, args: Any, kwargs: Any) -> None:
    """Inputs that cannot tell are refused."""
    tensors = tensors_in((args, kwargs))
    if not tensors:
        raise ValueError("discover needs example inputs: the tensors that the model's forward takes, as args or kwargs")
    if any(t.is_meta for t in [*tensors, *model.parameters(), *model.buffers()]):
        raise ValueError("discover runs the model: build it, and its inputs, on a real device and with small sizes")
    for t in tensors:
        counts = not t.is_floating_point() and t.dtype != torch.bool
        if counts and t.ndim > 1 and t.numel() > 1 and (t == t.flatten()[0]).all():
            raise ValueError(
                f"discover got an integer input {tuple(t.shape)} whose elements are all {t.flatten()[0].item()}: what "
                "moves in it cannot be seen; pass values that differ"
            )


def _randomised(model: nn.Module, args: Any, kwargs: Any) -> tuple[nn.Module, Any, Any]:
    """A copy in train mode with random parameters, and inputs that hide nothing by being alike."""
    first: Exception | None = None
    for _, clone, a, k in copies(model, args, kwargs):
        clone.train()
        for boldly in (True, False):
            if boldly:
                ra, rk = pytree.tree_map_only(Tensor, _vary, (a, k))
                for p in clone.parameters():
                    if p.is_floating_point():
                        p.copy_(torch.randn_like(p) / max(1, p[0].numel() if p.ndim > 1 else 1) ** 0.5)
            else:  # a forward that takes roots or logarithms: stay near what the model holds
                ra, rk = a, k
                for p, q in zip(clone.parameters(), model.parameters()):
                    if p.is_floating_point():
                        p.copy_(q.detach() + torch.randn_like(p) * 0.02)
            try:
                state = {n: b.clone() for n, b in clone.named_buffers()}
                copied = pytree.tree_map_only(Tensor, torch.clone, (ra, rk))
                out = tensors_in(clone(*copied[0], **copied[1]))
                for n, b in clone.named_buffers():
                    b.copy_(state[n])
            except Exception as reason:
                first = first or reason
                continue
            if all(t.isfinite().all() for t in out if t.is_floating_point()):
                return clone, ra, rk
    if first is not None:
        raise first
    raise ValueError("discover: the model returns numbers that are not finite on these inputs")


def _vary(t: Tensor) -> Tensor:
    if t.is_floating_point():
        return t + torch.randn_like(t)
    if t.dtype == torch.bool and t.numel() > 1 and (t == t.flatten()[0]).all():
        varied = torch.rand(t.shape, device=t.device) < 0.5
        varied.select(-1, 0).fill_(True)  # a mask leaves something to see in every row
        return varied
    return t


class Search:
    """Runs of the model in which dims are followed and every submodule is tested."""

    def __init__(self, model: nn.Module, args: Any, kwargs: Any, seed: int) -> None:
        self.model, self.args, self.kwargs, self.seed = model, args, kwargs, seed
        self.dims = Dims()
        self.paths: dict[int, str] = {}
        for path, module in model.named_modules():
            self.paths.setdefault(id(module), clean(path))
        self.signature = Signature(model, ANY, "the model")
        self.known: dict[Any, list[Group]] = {}
        self.alike: dict[Any, list[Group]] = {}
        self.runs = 0
        self.start = self.told = time.monotonic()
        bound = self.signature.bind(args, kwargs)[1]
        self.params = [b.param for b in bound]
        shapes = [tuple(b.tensor.shape) for b in bound]
        if not shapes or not max(map(len, shapes)):
            raise ValueError(
                f"discover: no argument of {type(model).__name__} is a tensor with dims; patterns cannot name tensors "
                "inside lists and dicts, so pass the sequence as an argument of its own"
            )
        self.main = max(range(len(shapes)), key=lambda i: (len(shapes[i]), -i))
        if shapes[self.main][0] == 1:
            raise ValueError(
                f"discover: {self.params[self.main]!r} has shape {shapes[self.main]}, and a dim of size 1 cannot be "
                "sliced; pass at least two of everything that may grow: samples, frames, tokens"
            )
        self.live = {self.main}
        self.batch: tuple[Dim, ...] = ()

    def settle(self) -> Node:
        for _ in range(PASSES):
            before = (self.dims.changes, len(self.live))
            root = self.run()
            self.batch = self.find_batch(root)
            self.widen(root)
            if (self.dims.changes, len(self.live)) == before:
                break
        took = time.monotonic() - self.start
        log.info("discover: %d runs of submodules on slices, %.1f s", self.runs, took)
        return root

    def widen(self, root: Node) -> None:
        """Inputs that share a sequence dim with the main one are to be sharded, too."""
        wanted = {d for i in self.live for axis in root.inputs[i] for d in atoms(axis)} & self.sequence(root)
        for i, axes in enumerate(root.inputs):
            if wanted & {d for axis in axes for d in atoms(axis)}:
                self.live.add(i)

    def sequence(self, root: Node) -> set[Dim]:
        """Sequence dims: those along which some module with parameters is independent; the batch aside."""
        found: set[Dim] = set()
        for node in root.walk():
            if node.live and node.tested and any(True for _ in node.module.parameters()):
                found |= node.free()
        return found - set(atoms(self.batch))

    # --- one run ---

    def run(self) -> Node:
        args, kwargs = pytree.tree_map_only(Tensor, torch.clone, (self.args, self.kwargs))
        for i, b in enumerate(self.signature.bind(args, kwargs)[1]):
            follow(b.tensor, self.dims.fill(b.tensor.shape, [], ("input", i)), i in self.live)
        self.stack: list[Node] = []
        self.count = 0
        self.follower = Follower(self.dims, self.on_op)
        root: list[Node] = []
        handles = []
        for module in self.model.modules():
            handles.append(module.register_forward_pre_hook(self.enter, with_kwargs=True, prepend=True))
            handles.append(module.register_forward_hook(self.leave))
        before = [(b, b.detach().clone()) for b in self.model.buffers()]
        self.on_root = root.append
        try:
            torch.manual_seed(self.seed)
            with self.follower:
                self.model(*args, **kwargs)
        finally:
            for h in handles:
                h.remove()
            for b, value in before:
                b.detach().copy_(value)
        return root[0]

    def on_op(self, op: GlueOp) -> None:
        if self.stack:
            self.stack[-1].ops.append(op)

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self.follower.asleep:
            return
        node = Node(self.paths[id(module)], module, self.count)
        self.count += 1
        if self.stack:
            self.stack[-1].children.append(node)
        else:
            self.on_root(node)
        self.stack.append(node)
        bound = Signature(module, ANY, node.path).bind(args, kwargs)[1]
        tensors = [b.tensor for b in bound]
        node.params = [b.param for b in bound]
        node.shapes = [tuple(t.shape) for t in tensors]
        for i, t in enumerate(tensors):
            if axes_of(t) is None:
                follow(t, self.dims.fill(t.shape, [], ("arg", node.index, i)), False)
            node.lives.append(is_live(t))
        node.inputs = [axes_of(t) or [] for t in tensors]
        if node.live and not any(n.local for n in self.stack[:-1]):
            self.test(node, args, kwargs)
            for g in node.groups:
                dim = self.dim_of(node, g)
                for i, (t, cut) in enumerate(zip(tensors, g.cuts)):
                    if cut is not None and dim is not None:
                        self.claim(t, cut, dim, ("arg", node.index, i))
            node.inputs = [axes_of(t) or [] for t in tensors]

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.follower.asleep:
            return
        node = self.stack.pop()
        tensors = tensors_in(output)
        for k, t in enumerate(tensors):
            if axes_of(t) is None:
                follow(t, self.dims.fill(t.shape, [], ("out", node.index, k)), node.live)
            taken: set[Dim] = set()
            for n, g in enumerate(node.groups):
                dim = self.dim_of(node, g)
                if dim is None or k >= len(g.outputs):
                    continue
                if taken & set(dim):  # one dim in two operands, sliced apart: two dims in the output
                    dim = self.dims.born(("apart", node.index, n), g.size)
                taken |= set(dim)
                self.claim(t, g.outputs[k], dim, ("out", node.index, k))
            self.keep_names(node, t)
        node.outputs = [axes_of(t) or [] for t in tensors]

    def keep_names(self, node: Node, t: Tensor) -> None:
        """Where input and output have one shape, an axis that the rules lost inside keeps its name: no more than that."""
        mine, passed = axes_of(t) or [], {d for axes in node.inputs for axis in known(axes) for d in axis}
        for axes, shape, live in zip(node.inputs, node.shapes, node.lives):
            if live and shape == tuple(t.shape):
                for old, new in zip(known(axes), mine):
                    if not passed & set(new):
                        self.dims.unify(old, new)
                return

    def dim_of(self, node: Node, g: Group) -> tuple[Dim, ...] | None:
        arg, cut = g.primary
        return dim_at([atoms(a) for a in node.inputs[arg]], cut, g.size)

    def claim(self, t: Tensor, cut: Cut, dim: tuple[Dim, ...], key: Any) -> None:
        axes = axes_of(t)
        assert axes is not None
        known = [(c, (d,)) for d, c in places(axes)]
        follow(t, self.dims.fill(t.shape, [*known, (cut, dim)], key), is_live(t))

    # --- one submodule ---

    def test(self, node: Node, args: Any, kwargs: Any) -> None:
        self.follower.asleep = True
        try:
            probe = Probe(node.module, Signature(node.module, ANY, node.path), args, kwargs, self.seed)
            look = (node.index, structure(node))
            if look not in self.known:
                kind = (fingerprint(node.module), look[1], str(describe(args, kwargs)))
                if kind in self.alike:  # a block like another: true along the same dims, or along fewer
                    for g in self.alike[kind]:
                        outputs = probe.independent(g.cuts, g.size)
                        if outputs is not None:
                            node.groups.append(Group(g.primary, g.cuts, tuple(outputs), g.size))
                else:
                    self.explore(node, probe)
                    self.alike[kind] = node.groups
                self.known[look] = node.groups
            node.groups = self.known[look]
            node.tested = True
            node.local = acts_locally(node, [tuple(t.shape) for t in probe.whole])
            self.runs += probe.runs
        finally:
            self.follower.asleep = False
        if time.monotonic() - self.told > SLOW:
            self.told = time.monotonic()
            log.info("discover: at %s, %d runs of submodules so far", node.path or "the model", self.runs)

    def explore(self, node: Node, probe: Probe) -> None:
        """Every dim of its tensors that the call is independent along."""
        taken: set[tuple[int, Cut]] = set()
        for arg, dim, cut in node.slots():
            if (arg, cut) in taken:
                continue
            for choice in itertools.islice(self.ways(node, arg, dim, cut, taken), COMBINATIONS):
                outputs = probe.independent(choice, dim.size)
                if outputs is None:
                    continue
                self.unambiguous(node, probe, choice, arg, dim, cut)
                node.groups.append(Group((arg, cut), choice, tuple(outputs), dim.size))
                taken |= {(i, c) for i, c in enumerate(choice) if c is not None}
                break

    def ways(
        self, node: Node, arg: int, dim: Dim, cut: Cut, taken: set[tuple[int, Cut]]
    ) -> Iterable[tuple[Cut | None, ...]]:
        """How the tensors of a call may be sliced together along a dim of one of them: the likeliest first."""
        options: list[list[Cut | None]] = []
        for i, axes in enumerate(node.inputs):
            slots = [(d, c) for d, c in places(known(axes)) if (i, c) not in taken]
            same = [c for d, c in slots if d is dim]
            if i == arg:
                options.append([cut])
            elif same:
                options.append([*same, None])
            else:
                options.append([None])
            if i != arg:
                likely = (node.shapes[arg][cut.dim], cut.outer)
                inside = [c for c in self.inside(node, i, dim.size, taken) if c not in same]
                options[-1] += sorted(inside, key=lambda c: (node.shapes[i][c.dim], c.outer) != likely)
        order = itertools.islice(itertools.product(*(range(len(o)) for o in options)), 4096)
        for way in sorted(order, key=lambda w: (sum(x > 0 for x in w), w)):
            yield tuple(o[x] for o, x in zip(options, way))

    def inside(self, node: Node, arg: int, size: int, taken: set[tuple[int, Cut]]) -> list[Cut]:
        """Where a dim of `size` may lie in an argument, for all that its sizes tell."""
        found = []
        for d, c in places(known(node.inputs[arg])):
            if (arg, c) in taken or d.size % size or (node.lives[arg] and d.size != size):
                continue
            found += [Cut(c.dim, c.outer * o) for o in divisors(d.size // size)]
        return found

    def unambiguous(
        self, node: Node, probe: Probe, choice: tuple[Cut | None, ...], arg: int, dim: Dim, at: Cut
    ) -> None:
        """A tensor matched by size and test alone must not pass the test another way, unless folded as its partner."""
        for i, cut in enumerate(choice):
            if i == arg or cut is None or any(d is dim for d, _ in places(known(node.inputs[i]))):
                continue
            if (node.shapes[i][cut.dim], cut.outer) == (node.shapes[arg][at.dim], at.outer):
                continue
            for other in self.inside(node, i, dim.size, set()):
                if other != cut and probe.independent((*choice[:i], other, *choice[i + 1 :]), dim.size) is not None:
                    raise ValueError(
                        f"discover: {node.params[i]!r} of {node.path or 'the model'} has shape {node.shapes[i]}, and "
                        f"both its axis {cut.dim} and its axis {other.dim} (or another order of a fold) could be the "
                        f"dim of size {dim.size} of {node.params[arg]!r}; pass inputs whose batch, frames and tokens "
                        "all have different sizes, and whose values differ"
                    )

    def find_batch(self, root: Node) -> tuple[Dim, ...]:
        """The first dim of the main input, if the model, or each of its submodules, is independent along it.

        A model that is so in eval mode alone will do: a norm over the batch does not make it a sequence.
        """
        axis = known(root.inputs[self.main])[0]
        calls = [n for n in root.walk() if n.tested and n is not root]
        if root.group(self.main, Cut(0)) is not None or not any(axis[0] in n.blocked() for n in calls):
            return axis[:1]
        modes = [(m, m.training) for m in self.model.modules()]
        self.model.eval()
        try:
            probe = Probe(self.model, self.signature, self.args, self.kwargs, self.seed)
            ways = itertools.islice(self.ways(root, self.main, axis[0], Cut(0), set()), COMBINATIONS)
            free = any(probe.independent(way, axis[0].size) is not None for way in ways)
        finally:
            for m, mode in modes:
                m.training = mode
        return axis[:1] if free else ()


def dim_at(axes: Axes, cut: Cut, size: int) -> tuple[Dim, ...] | None:
    """The dims that a place of a tensor holds."""
    outer, taken = 1, []
    for d in axes[cut.dim]:
        if cut.outer <= outer and outer * d.size <= cut.outer * size:
            taken.append(d)
        outer *= d.size
    return tuple(taken) if math.prod(d.size for d in taken) == size else None


def acts_locally(node: Node, outputs: list[tuple[int, ...]]) -> bool:
    blocked = {(i, c.dim) for i, _, c in node.slots() if node.group(i, c) is None}
    if len(blocked) > len({i for i, _ in blocked}):
        return False
    for k, shape in enumerate(outputs):
        left = list(shape)
        for g in node.groups:
            left[g.outputs[k].dim] //= g.size
        if sum(s > 1 for s in left) > 1:
            return False
    return True


def structure(node: Node) -> Any:
    """The dims of a call's arguments, numbered: which are the same, which are folds."""
    numbers: dict[Dim, int] = {}
    return tuple(
        (live, tuple(tuple((numbers.setdefault(d, len(numbers)), d.size) for d in axis) for axis in known(axes)))
        for live, axes in zip(node.lives, node.inputs)
    )


_MODULE = frozenset(vars(nn.Module()))


def fingerprint(value: Any, depth: int = 0) -> Any:
    """Equal for modules that compute the same function of their parameters."""
    if isinstance(value, nn.Module):
        own = tuple((k, fingerprint(v, depth)) for k, v in sorted(vars(value).items()) if k not in _MODULE)
        tensors = [*value._parameters.items(), *value._buffers.items()]
        shapes = tuple((k, None if t is None else tuple(t.shape)) for k, t in tensors)
        return (type(value), own, shapes, tuple((k, fingerprint(m, depth)) for k, m in value._modules.items()))
    if value is None or isinstance(value, (bool, int, float, str, bytes, type, torch.dtype, torch.device)):
        return (type(value).__name__, value)
    if isinstance(value, (list, tuple)):
        return tuple(fingerprint(v, depth) for v in value)
    if isinstance(value, Mapping):
        return tuple((str(k), fingerprint(v, depth)) for k, v in value.items())
    if inspect.isfunction(value) or inspect.isbuiltin(value) or isinstance(value, Tensor) or depth > 3:
        return id(value)
    own = sorted(getattr(value, "__dict__", {}).items())
    return (type(value), tuple((k, fingerprint(v, depth + 1)) for k, v in own))


# --- from what was found to stages ------------------------------------------------------------------------------------

Item = tuple[Dim, int | None]  # a dim of a tensor, and the number of the free group it belongs to
Row = list[list[Item]]  # a tensor: for each axis the dims it folds
Chain = tuple[Dim, ...]


class Symbol(NamedTuple):
    """What has one name in a pattern: dims that lie side by side, and the groups they are free in (none: computed)."""

    dims: Chain
    groups: tuple[int, ...]


class Result:
    """Which submodules become stages, and the patterns that say so."""

    def __init__(self, search: Search, root: Node) -> None:
        self.search, self.root = search, root
        self.sequence = search.sequence(root)
        self.batch = set(atoms(search.batch))
        self.calls: dict[str, list[Node]] = {}
        for node in root.walk():
            self.calls.setdefault(node.path, []).append(node)
        self.chosen: dict[str, Node] = {}
        for child in root.children:
            self.visit(child)

    # --- choice ---

    def visit(self, node: Node) -> None:
        if not node.live or not node.tested:
            return
        if node.local:
            if not self.transparent(node):
                self.choose(node)
            return
        kids = [k for k in node.children if k.live and k.tested]
        blocked = node.blocked() & self.sequence
        refused = [self.refused(op) for op in node.ops if op.live]
        if all(k.local for k in kids):
            whole = True  # what mixes positions is its own forward
        elif node.free() & self.sequence:
            # taken apart, it has to leave more dims free than as one
            whole = any(r for r, _ in refused) or any(k.blocked() >= blocked for k in kids)
        else:
            # nothing to shard: take out what can be sharded, unless that hands on more than it received
            useful = any(k.free() & self.sequence for k in kids)
            heavier = any(k.blocked() >= blocked and k.numel > node.numel for k in kids)
            left = [a for r, a in refused if r]  # glue keeps one layout through them
            whole = not useful or heavier or (bool(left) and not set.intersection(*left))
        if whole:
            self.choose(node)
        else:
            for k in kids:
                self.visit(k)

    def refused(self, op: GlueOp) -> tuple[set[Dim], set[Dim]]:
        """The sequence dims that an operation between submodules cannot run along, and those that it can."""
        dims = {a: ok for d, ok in op.accepts.items() for a in d.atoms() if a in self.sequence}
        return {d for d, ok in dims.items() if not ok}, {d for d, ok in dims.items() if ok}

    def transparent(self, node: Node) -> bool:
        """Whether glue can do all that a submodule does, along every dim that it is independent along."""
        free = node.free()
        ops = [op for n in node.walk() for op in n.ops if op.live]
        return all(ok for op in ops for d, ok in op.accepts.items() if free & set(d.atoms()))

    def choose(self, node: Node) -> None:
        """All calls of a submodule have one pattern: keep what is free in each of them."""
        calls = [n for n in self.calls[node.path] if n.tested]
        base = max(calls, key=lambda n: (len(n.params), -n.index))
        kept = []
        for n, g in enumerate(base.groups):
            if all(any(aligned(base, g, other, h) for h in other.groups) for other in calls if other is not base):
                kept.append(base.groups[n])
        base.groups = kept
        self.chosen[node.path] = base

    # --- patterns ---

    def stages(self) -> Stages:
        free = {d for node in self.chosen.values() for d in node.free()}
        if self.chosen and not free - self.batch:
            over = ", ".join(list(self.chosen)[:3])
            raise ValueError(
                f"discover found no dim to shard in {type(self.search.model).__name__} but the batch: {over} compute"
                f"{'s' * (len(self.chosen) == 1)} over every other dim of their tensors. Dynamic sequence parallelism "
                "needs stages that leave a sequence dim free, such as attention within each frame and attention "
                "across frames; attention over one long sequence is split inside the module (Ulysses, ring attention)"
            )
        if not self.chosen and not self.sequence:
            raise ValueError(
                f"discover found no submodule of {type(self.search.model).__name__} that is independent along a dim; "
                "stages are submodules: move what the forward computes into some"
            )
        self.declare(free - self.batch)
        self.settle_folds()
        self.name()
        found = Stages({"": self.render_root()})
        found.update(self.collapse({path: self.render(node) for path, node in self.chosen.items()}))
        return found

    def declare(self, free: set[Dim]) -> None:
        """The inputs to name in the root pattern: the main one, and those with a dim that stages are sharded along."""
        self.declared = [
            i
            for i, axes in enumerate(self.root.inputs)
            if i == self.search.main or {d for axis in known(axes) for d in axis} & free
        ]

    def rows(self, node: Node) -> tuple[list[Row], list[Row]]:
        """The items of every axis of every tensor of a call: inputs, outputs."""
        inputs: list[Row] = []
        outputs: list[Row] = []
        for i, axes in enumerate(node.inputs):
            inputs.append([[] for _ in axes])
            for d, c in places(known(axes)):
                inputs[-1][c.dim].append((d, node.group(i, c)))
        for k, axes in enumerate(node.outputs):
            outputs.append([[] for _ in axes])
            for d, c in places(known(axes)):
                number = next((n for n, g in enumerate(node.groups) if g.outputs[k] == c), None)
                outputs[-1][c.dim].append((d, number))
        return inputs, outputs

    def chain(self) -> None:
        """Dims that never part are one dim: find for each the whole that it belongs to."""
        every = [[(d, False) for d in axis] for i in self.declared for axis in known(self.root.inputs[i])]
        for node in self.chosen.values():
            for row in itertools.chain(*self.rows(node)):
                every += [[(d, g is not None) for d, g in axis] for axis in row]
        after: dict[Dim, set[Dim | None]] = {}
        before: dict[Dim, set[Dim | None]] = {}
        for axis in every:
            for n, (d, is_free) in enumerate(axis):
                for links, m in ((after, n + 1), (before, n - 1)):
                    other = axis[m] if 0 <= m < len(axis) else (None, False)
                    links.setdefault(d, set()).add(other[0] if other[1] == is_free else None)
        self.chains: dict[Dim, Chain] = {}
        for d in after:
            links = [d]
            while len(nexts := after[links[-1]]) == 1:
                (e,) = nexts
                if e is None or before[e] != {links[-1]}:
                    break
                links.append(e)
            if len(links) > len(self.chains.get(d, ())):
                self.chains.update(dict.fromkeys(links, tuple(links)))

    def wholes(self, axis: tuple[Dim, ...]) -> list[Chain]:
        return list(dict.fromkeys(self.chains[d] for d in axis))

    def known_sizes(self) -> set[Chain]:
        """The dims whose sizes the root pattern fixes."""
        found: set[Chain] = set()
        folds = [self.wholes(axis) for i in self.declared for axis in known(self.root.inputs[i])]
        for _ in folds:
            for fold in folds:
                unknown = [c for c in fold if c not in found]
                if len(unknown) == 1:
                    found.add(unknown[0])
        return found

    def symbols(self, node: Node, axis: list[Item]) -> list[Symbol]:
        """What an axis is called: each free dim of its own, what is computed over in between as one."""
        found: list[Symbol] = []
        for is_free, run in itertools.groupby(axis, lambda item: item[1] is not None):
            items = list(run)
            if not is_free:
                found.append(Symbol(tuple(d for d, _ in items), ()))
                continue
            for _, part in itertools.groupby(items, lambda item: self.chains[item[0]]):
                part_items = list(part)
                found.append(Symbol(tuple(d for d, _ in part_items), tuple(g for _, g in part_items if g is not None)))
        for merged in self.merged.get(node, ()):
            for n in range(len(found)):
                for m in range(n + 2, len(found) + 1):
                    if tuple(g for s in found[n:m] for g in s.groups) == merged:
                        found[n:m] = [Symbol(tuple(d for s in found[n:m] for d in s.dims), merged)]
                        break
        return found

    def settle_folds(self) -> None:
        """A fold can be opened if all its sizes but one are known: elsewhere its parts are one dim, free or not."""
        self.merged: dict[Node, list[tuple[int, ...]]] = {}
        while True:
            self.chain()
            self.sizes = self.known_sizes()
            for node in self.chosen.values():
                if self.settle_fold(node):
                    break
            else:
                return

    def settle_fold(self, node: Node) -> bool:
        inputs, outputs = self.rows(node)
        axes = [self.symbols(node, axis) for row in inputs for axis in row]
        sizes = self.sizes | {axis[0].dims for axis in axes if len(axis) == 1}
        for axis in axes:
            unknown = [s for s in axis if s.dims not in sizes]
            if len(unknown) < 2:
                continue
            groups = tuple(g for s in unknown for g in s.groups)
            runs = [[g for _, g in line] for row in outputs for line in row]
            together = axis[axis.index(unknown[0]) :][: len(unknown)] == unknown and all(s.groups for s in unknown)
            if together and sum(contains(run, groups) for run in runs) == len(outputs):
                self.merged.setdefault(node, []).append(groups)
            else:
                groups = groups or tuple(g for s in axis for g in s.groups)
                node.groups = [g for n, g in enumerate(node.groups) if n not in groups]
                self.merged.pop(node, None)
            return True
        return False

    # --- names ---

    def name(self) -> None:
        """Labels for the dims of the model's own inputs and for those that stages are sharded along."""
        self.labels: dict[Chain, str] = {}
        self.folds: dict[Dim, Chain] = {}
        main = known(self.root.inputs[self.search.main])
        units = [(n, c) for n, axis in enumerate(main) for c in self.units(axis)]
        free = self.sequence | {d for node in self.chosen.values() for d in node.free()}
        for _, c in units:
            if set(c) & self.batch:
                self.labels[c] = "b"
        units = [(n, c) for n, c in units if c not in self.labels]
        channel = next((c for n, c in units if n in (1, len(main) - 1) and not set(c) & free), None)
        if channel is not None and len(main) > 2:
            self.labels[channel] = "c"
        rest = [c for _, c in units if c not in self.labels]
        image = len(main) == 4 and channel is not None and channel == units[0][1]
        for c, label in zip(rest, {1: "s", 2: "hw" if image else "ts", 3: "thw"}.get(len(rest), "thwuvxyz")):
            self.labels[c] = label
        for i in self.declared:
            for axis in known(self.root.inputs[i]):
                for c in self.units(axis):
                    self.label(c, POOL if set(c) & free else CHANNELS)
        for node in self.chosen.values():
            for row in itertools.chain(*self.rows(node)):
                for s in [s for axis in row for s in self.symbols(node, axis) if s.groups]:
                    self.label(s.dims, POOL)
                    self.one_fold(s.dims)

    def one_fold(self, dims: Chain) -> None:
        """A dim sharded as part of a fold here and by itself there: only if the inputs tell its size."""
        for d in dims:
            if self.folds.setdefault(d, dims) != dims:
                sizes = " x ".join(str(d.size) for d in max(dims, self.folds[d], key=len))
                raise ValueError(
                    f"discover: a fold of {sizes} is sharded as a whole by one stage and taken apart by another, and no "
                    "input shows its dims apart, so no pattern can open it; let the model's forward take the tensor "
                    "unfolded, or another tensor that has one of these dims by itself"
                )

    def label(self, dims: Chain, pool: str) -> None:
        if dims not in self.labels:
            self.labels[dims] = fresh(pool, self.labels.values())

    def units(self, axis: tuple[Dim, ...]) -> list[Chain]:
        """What an axis of the model's own inputs is called: a fold if it can be opened."""
        wholes = self.wholes(axis)
        return wholes if len(wholes) < 2 or all(c in self.sizes for c in wholes) else [axis]

    def render(self, node: Node) -> str:
        inputs, outputs = self.rows(node)
        used: dict[Any, str] = {}

        def called(key: Any, wanted: str | None, pool: str) -> str:
            if key not in used:
                taken = set(used.values())
                if wanted is None or wanted in taken:
                    wanted = fresh(pool, {*taken, *self.labels.values()})
                used[key] = wanted
            return used[key]

        def pattern(row: Row, param: str | None, ones: Iterable[int]) -> TensorPattern:
            axes: list[tuple[str, ...]] = []
            computed = set()
            for n, axis in enumerate(row):
                names = []
                for s in self.symbols(node, axis):
                    pool = POOL if s.groups else CHANNELS if n == len(row) - 1 else LENGTHS
                    names.append(called(s.groups or s.dims, self.labels.get(s.dims), pool))
                    if not s.groups:
                        computed.add(names[-1])
                if not names and n in ones:  # a dim of size 1 was not tested
                    names.append(called(("one", n), None, LENGTHS))
                    computed.add(names[-1])
                axes.append(tuple(names))
            return TensorPattern(tuple(axes), frozenset(computed), param)

        bare = [not p.isidentifier() for p in node.params]
        mentioned = [
            i
            for i, row in enumerate(inputs)
            if row and (i == 0 or any(bare) or any(g is not None for axis in row for _, g in axis))
        ]
        ones = [n for n, axis in enumerate(inputs[mentioned[0]]) if not axis]
        patterns = [
            pattern(inputs[i], None if i == 0 or bare[i] else node.params[i], ones if i == mentioned[0] else ())
            for i in mentioned
        ]
        first = TensorPattern(patterns[0].axes, patterns[0].computed)
        results = [pattern(row, None, ones if len(row) == len(first.axes) else ()) for row in outputs]
        text = ", ".join(map(str, patterns))
        return text if results == [first] else text + " -> " + ", ".join(map(str, results))

    def render_root(self) -> str:
        taken = set(self.labels.values())
        texts, sizes = [], {}
        for i in self.declared:
            axes: list[tuple[str, ...]] = []
            for n, axis in enumerate(known(self.root.inputs[i])):
                names = [self.labels[c] for c in self.units(axis)]
                if i == self.search.main:
                    if not names:
                        names = [fresh(LENGTHS, taken)]
                        taken.add(names[0])
                    if len(names) == 1:
                        sizes[n, self.root.shapes[i][n], len(self.root.shapes[i])] = names[0]
                axes.append(tuple(names))
            param = self.root.params[i]
            texts.append(str(TensorPattern(tuple(axes), frozenset(), param if param.isidentifier() else None)))
        results = []
        for outs in self.root.outputs:
            names = []
            for n, axis in enumerate(known(outs)):
                whole = tuple(dict.fromkeys(e for d in axis for e in self.chains.get(d, (d,))))
                size = math.prod(d.size for d in axis)
                label = self.labels.get(whole) or sizes.get((n, size, len(outs)))
                if label is None or label in names:
                    label = fresh(CHANNELS, {*taken, *names})
                names.append(label)
            results.append(" ".join(names))
        return ", ".join(texts) + (" -> " + ", ".join(results) if results and all(results) else "")

    def collapse(self, texts: Mapping[str, str]) -> dict[str, str]:
        """Repeated blocks under one pattern, where all that it matches agree."""
        called = {n.path for n in self.root.walk()}
        found: dict[str, str] = {}
        covered: set[str] = set()
        for path, text in texts.items():
            if path in covered:
                continue
            parts = path.split(".")
            numbers = [i for i, p in enumerate(parts) if p.isdigit()]
            for chosen in itertools.chain.from_iterable(
                itertools.combinations(numbers, n) for n in range(len(numbers), -1, -1)
            ):
                pattern = ["*" if i in chosen else p for i, p in enumerate(parts)]
                matched = [n for n in called if n and _matches(n.split("."), pattern)]
                if all(texts.get(n) == text for n in matched):
                    break
            key = ".".join(pattern)
            others = [n for n in self.search.paths.values() if n and _matches(n.split("."), pattern)]
            if len(others) == 1:
                key = path
            found[key] = text
            covered |= set(matched)
        return found


CHANNELS = "cdkefgmnopq"
LENGTHS = "lmnkopqefgd"
POOL = "sruvxyzpqijnmkl"


def contains(run: Sequence[Any], part: Sequence[Any]) -> bool:
    return any(tuple(run[n : n + len(part)]) == tuple(part) for n in range(len(run)))


def fresh(pool: str, taken: Iterable[str]) -> str:
    taken = set(taken)
    more = (f"{p}{n}" for n in itertools.count(1) for p in pool)
    return next(name for name in itertools.chain(pool, more) if name not in taken)


def aligned(one: Node, g: Group, two: Node, h: Group) -> bool:
    """Whether two calls of a submodule are independent along the same dim of the arguments that they share."""

    def at(node: Node, group: Group, param: str) -> Any:
        i = node.params.index(param)
        cut = group.cuts[i]
        if cut is None:
            return None
        order = [c for _, c in places(known(node.inputs[i])) if c.dim == cut.dim]
        return cut.dim, order.index(cut) if cut in order else cut

    shared = [p for p in one.params if p in two.params]
    return all(at(one, g, p) == at(two, h, p) for p in shared)
