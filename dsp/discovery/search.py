"""The search of `discover`: passes over a model's record that follow dims and call every submodule on slices."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from dsp.comm import randomness
from dsp.comm.layout import Cut
from dsp.core.equal_modules import fingerprint
from dsp.core.inputs import described_call
from dsp.core.record import Ref
from dsp.discovery.calls import Group, ModuleCall, acts_locally, dim_at, known, structure
from dsp.discovery.dims import Dim, Dims, Follower, atoms, places
from dsp.discovery.recording import record_of
from dsp.discovery.repeats import Repeats, runs
from dsp.stages.notation import StagePattern
from dsp.stages.signature import Signature
from dsp.stages.stage import clean
from dsp.support.formatting import number_of
from dsp.support.tensors import remade, tensors_in
from dsp.verify.slices import Probe, divisors, keeping_buffers

log = logging.getLogger("dsp")


PASSES = 6
COMBINATIONS = 64  # choices of slices that are tried for one dim of one call
ANY = StagePattern("", (), (), False)
INPUTS = StagePattern("", (), (), False, root=True)  # binds the items of lists, too


class Search:
    """Passes over the record of a model that follow dims and test every submodule."""

    def __init__(
        self, model: nn.Module, arguments: tuple[Any, Any], seed: int, repeats: Repeats, probe: type[Probe],
        tell: Callable[[str], None],
    ) -> None:  # fmt: skip
        args, kwargs = arguments
        self.model, self.seed, self.repeats, self.probe, self.tell = model, seed, repeats, probe, tell
        self.dims = Dims()
        self.follower = Follower(self.dims)
        self.paths: dict[int, str] = {}
        for path, module in model.named_modules():
            self.paths.setdefault(id(module), clean(path))
        self.signature = Signature(model, INPUTS, "")
        self.known: dict[Any, list[Group]] = {}
        self.alike: dict[Any, list[Group]] = {}
        self.probes: dict[int, Probe] = {}  # by the index of the call
        self.start = time.monotonic()
        bound = self.signature.bind(args, kwargs)[1]
        self.lists = {b.param: b.param.partition("[")[0] for b in bound if isinstance(b.slot, tuple)}
        shapes = [tuple(b.tensor.shape) for b in bound]
        if max(map(len, shapes), default=0) < max(1, *(t.ndim for t in tensors_in((args, kwargs)))):
            raise ValueError(
                f"discover: the tensor with the most dims is neither an argument of {type(model).__name__} nor in a "
                "list of tensors that is an argument. Patterns cannot name tensors inside dicts and nested lists: "
                "pass it as an argument of its own"
            )
        self.main = max(range(len(shapes)), key=lambda i: (len(shapes[i]), -i))
        self.live = {self.main}
        self.batch: tuple[Dim, ...] = ()
        randomness.seed(seed)
        with keeping_buffers(model):
            args, kwargs = remade((args, kwargs), torch.clone)
            self.root = record_of(model, args, kwargs, dict.fromkeys(runs(model)), self.signature_of)

    def signature_of(self, module: nn.Module) -> Signature:
        return self.signature if module is self.model else Signature(module, ANY, self.paths[id(module)])

    @property
    def runs(self) -> int:
        return sum(probe.runs for probe in self.probes.values())

    def settle(self) -> ModuleCall:
        for _ in range(PASSES):
            before = (self.dims.changes, len(self.live))
            self.follow()
            self.batch = self.find_batch()
            self.widen()
            if (self.dims.changes, len(self.live)) == before:
                break
        took = time.monotonic() - self.start
        log.info("discover: %d runs of submodules on slices, %.1f s", self.runs, took)
        return self.root

    def widen(self) -> None:
        """Mark inputs that share a sequence dim with the main input: they are to be sharded, too."""
        inputs = self.root.inputs
        wanted = {d for i in self.live for axis in inputs[i] for d in atoms(axis)} & self.sequence(self.root)
        for i, axes in enumerate(inputs):
            if wanted & {d for axis in axes for d in atoms(axis)}:
                self.live.add(i)

    def sequence(self, root: ModuleCall) -> set[Dim]:
        """Sequence dims: the dims, without the batch, along which some module with parameters is independent."""
        nodes = (n for n in root.walk() if n.live and n.tested and any(True for _ in n.module.parameters()))
        return {dim for node in nodes for dim in node.free()} - set(atoms(self.batch))

    # --- one pass over the record ---

    def follow(self) -> None:
        """Follow the dims of the model's inputs through the record, and test every submodule on the way."""
        self.dims.axes.clear()
        self.dims.live.clear()
        for i, t in enumerate(self.root.operands):
            self.dims.follow(t, self.dims.fill(t.shape, [], ("input", i)), i in self.live)
        self.call(self.root, inside=False)

    def call(self, node: ModuleCall, inside: bool) -> None:
        """Follow a call. inside: it is inside a call that acts on each position separately, so it is not tested."""
        self.enter(node, inside)
        node.ops = []
        for one in node.body:
            if isinstance(one, ModuleCall):
                self.call(one, inside or node.local)
            elif one.kind == "operation" and (op := self.follower.operation(one)) is not None:
                node.ops.append(op)
        self.leave(node)

    def enter(self, node: ModuleCall, inside: bool) -> None:
        for i, t in enumerate(node.operands):
            if self.dims.axes_of(t) is None:
                self.dims.follow(t, self.dims.fill(t.shape, [], ("arg", node.index, i)), False)
        node.lives = [*map(self.dims.is_live, node.operands)]
        node.hides = sum(map(self.dims.is_live, node.tensors)) > sum(node.lives)
        node.inputs = [self.dims.axes_of(t) or [] for t in node.operands]
        node.groups, node.tested, node.local = [], False, False
        if node.live and not inside:
            self.test(node)
            for g in node.groups:
                dim = self.dim_of(node, g)
                for i, (t, cut) in enumerate(zip(node.operands, g.cuts)):
                    if cut is not None and dim is not None:
                        self.dims.claim(t, cut, dim, ("arg", node.index, i))
            node.inputs = [self.dims.axes_of(t) or [] for t in node.operands]

    def leave(self, node: ModuleCall) -> None:
        for k, t in enumerate(node.results):
            if self.dims.axes_of(t) is None:
                self.dims.follow(t, self.dims.fill(t.shape, [], ("out", node.index, k)), node.live)
            seen: set[Dim] = set()
            for n, g in enumerate(node.groups):
                dim = self.dim_of(node, g)
                if dim is None or k >= len(g.outputs):
                    continue
                if seen & set(dim):  # one dim in two operands that are sliced separately: two dims in the output
                    dim = self.dims.born(("apart", node.index, n), g.size)
                seen |= set(dim)
                self.dims.claim(t, g.outputs[k], dim, ("out", node.index, k))
            self.keep_names(node, t)
        node.outputs = [self.dims.axes_of(t) or [] for t in node.results]

    def keep_names(self, node: ModuleCall, t: Ref) -> None:
        """Identify an output's axes with those of an input of the same shape, if rules lost them inside the call."""
        new_axes, passed = self.dims.axes_of(t) or [], {d for axes in node.inputs for axis in known(axes) for d in axis}
        for axes, shape, live in zip(node.inputs, node.shapes, node.lives):
            if live and shape == t.shape:
                for old, new in zip(known(axes), new_axes):
                    if not passed & set(new) - set(old):
                        self.dims.unify(old, new)
                return

    def dim_of(self, node: ModuleCall, g: Group) -> tuple[Dim, ...] | None:
        arg, cut = g.primary
        return dim_at(known(node.inputs[arg]), cut, g.size)

    # --- one submodule ---

    def test(self, node: ModuleCall) -> None:
        if node.index not in self.probes:
            signature = self.signature_of(node.module)
            self.probes[node.index] = self.probe(node.module, signature, node.args, node.kwargs, self.seed)
        probe, look = self.probes[node.index], (node.index, structure(node))
        if look not in self.known:
            description = described_call(node.args, node.kwargs)
            kind = (fingerprint(node.module, buffers=True), look[1], description)
            if kind in self.alike:  # a repeated block: independent along the same dims, or along fewer of them
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
        self.tell(f"{number_of(self.runs, 'run')} of submodules, at {node.path or 'the model'}")

    def explore(self, node: ModuleCall, probe: Probe) -> None:
        """Find every dim of its tensors along which the call is independent."""
        claims: set[tuple[int, Cut]] = set()
        for arg, dim, cut in node.slots():
            if (arg, cut) in claims:
                continue
            for choice in itertools.islice(self.ways(node, arg, dim, cut, claims), COMBINATIONS):
                outputs = probe.independent(choice, dim.size)
                if outputs is None:
                    continue
                self.unambiguous(node, probe, choice, arg, dim, cut)
                node.groups.append(Group((arg, cut), choice, tuple(outputs), dim.size))
                claims |= {(i, c) for i, c in enumerate(choice) if c is not None}
                break

    def ways(
        self, node: ModuleCall, arg: int, dim: Dim, cut: Cut, claims: set[tuple[int, Cut]]
    ) -> Iterable[tuple[Cut | None, ...]]:
        """The choices of places to slice in a call's tensors, for a dim of one of them; the likeliest first."""
        options: list[list[Cut | None]] = []
        for i, axes in enumerate(node.inputs):
            slots = [(d, c) for d, c in places(known(axes)) if (i, c) not in claims]
            same = [c for d, c in slots if d is dim]
            options.append([cut] if i == arg else [*same, None])
            if i != arg:
                likely = (node.shapes[arg][cut.dim], cut.outer)
                candidates = [c for c in self.inside(node, i, dim.size, claims) if c not in same]
                unlikely = [(node.shapes[i][c.dim], c.outer) != likely for c in candidates]
                options[-1] += [c for _, c in sorted(zip(unlikely, candidates), key=lambda x: x[0])]
        order = itertools.islice(itertools.product(*(range(len(o)) for o in options)), 4096)
        for way in sorted(order, key=lambda w: (sum(x > 0 for x in w), w)):
            yield tuple(o[x] for o, x in zip(options, way))

    def inside(self, node: ModuleCall, arg: int, size: int, claims: set[tuple[int, Cut]]) -> list[Cut]:
        """The places of an argument that may hold a dim of `size`, judged only by sizes."""
        cuts = []
        for d, c in places(known(node.inputs[arg])):
            if (arg, c) in claims or d.size % size or (node.lives[arg] and d.size != size):
                continue
            cuts += [Cut(c.dim, c.outer * o) for o in divisors(d.size // size)]
        return cuts

    def unambiguous(
        self, node: ModuleCall, probe: Probe, choice: tuple[Cut | None, ...], arg: int, dim: Dim, at: Cut
    ) -> None:
        """Raise ValueError if a tensor matched by size passes the test at two places, unless its axis is folded as the
        partner's."""
        for i, cut in enumerate(choice):
            if i == arg or cut is None or any(d is dim for d, _ in places(known(node.inputs[i]))):
                continue
            if (node.shapes[i][cut.dim], cut.outer) == (node.shapes[arg][at.dim], at.outer):
                continue
            for rival in self.inside(node, i, dim.size, set()):
                if rival != cut and probe.independent((*choice[:i], rival, *choice[i + 1 :]), dim.size) is not None:
                    pair = f"both its axis {cut.dim} and its axis {rival.dim}"
                    if cut.dim == rival.dim:
                        pair = f"both the outer and the inner part of its axis {cut.dim}"
                    raise ValueError(
                        f"discover: {node.params[i]!r} of {node.path or 'the model'} has shape {node.shapes[i]}, and "
                        f"{pair} could be the dim of size {dim.size} of {node.params[arg]!r}, so they cannot be told "
                        "apart; give batch, frames and tokens different sizes, and pass inputs whose elements differ "
                        "from one another"
                    )

    def find_batch(self) -> tuple[Dim, ...]:
        """The batch: the first dim of the main input, if the model is independent along it, in eval mode at least.

        The dim also counts as batch if no submodule computes over it while leaving other dims free: a submodule that
        computes over every dim, such as a norm over the batch, is no evidence.
        """
        root = self.root
        axis = known(root.inputs[self.main])[0]
        if not axis:  # a batch of one is never sharded
            return ()
        single = [n for n in root.walk() if n.tested and n is not root and axis[0] in n.blocked() and n.groups]
        if root.group(self.main, Cut(0)) is not None or not single:
            return axis[:1]
        modes = [(m, m.training) for m in self.model.modules()]
        self.model.eval()
        try:
            probe = self.probe(self.model, self.signature, root.args, root.kwargs, self.seed)
            ways = itertools.islice(self.ways(root, self.main, axis[0], Cut(0), set()), COMBINATIONS)
            free = any(probe.independent(way, axis[0].size) is not None for way in ways)
        finally:
            for m, mode in modes:
                m.training = mode
        return axis[:1] if free else ()
