"""A forward without data: which stages run, what glue joins them, what they cost; the problem the planner solves.

The model's forward runs once on fake tensors at full size. Every tensor that may be sharded is tracked as a value of
the planner, with every cut it could have; the rules that will run on shards (`dsp.rules`) tell how each cut passes
through glue. What comes out is a `Trace`: the planner's problem, and where each of its decisions applies in a run.
"""

from __future__ import annotations

import functools
import itertools
import math
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from dsp.collectives import summed_in
from dsp.layout import Cut, separable
from dsp.notation import BATCH_NAMES, NotationError, StagePattern, solve_sizes
from dsp.planner import Choice, Op, Value
from dsp.private import (
    FakeTensorMode,
    StorageWeakRef,
    TorchDispatchMode,
    checkpoint_frame,
    get_unwrapped,
    is_functorch_wrapped_tensor,
    maybe_current_level,
    pytree,
)
from dsp.rules import (
    RULES,
    SOURCES,
    Frame,
    GlueError,
    Operand,
    Outcome,
    no_rule,
    source_cuts,
    tensor_args,
    with_operands,
)  # fmt: skip
from dsp.stages import (
    Bound,
    Inside,
    Option,
    Sends,
    Signature,
    Stage,
    clean,
    constants_in,
    cut_for,
    fits_fold,
    sizes_of_root,
    tensors_in,
)  # fmt: skip
from dsp.twins import alike, fingerprint, once

BY_NUMBER = frozenset({"apply", "map", "map2"})  # they call Python for every number
UNRUNNABLE = {"autograd_grad": "torch.autograd.grad()", **{name: f"Tensor.{name}_()" for name in BY_NUMBER}}
METADATA = frozenset(
    """
size dim numel nelement ndimension stride is_contiguous is_floating_point is_complex is_signed is_inference
element_size get_device storage_offset is_same_size len repr hash format str is_nonzero_meta is_tensor is_storage
promote_types result_type can_cast broadcast_shapes is_shared is_pinned new_zeros new_ones new_full new_empty new_tensor
data_ptr untyped_storage get_default_dtype finfo iinfo reduce_ex backward register_hook retain_grad dir
has_names names is_conj is_neg is_quantized is_sparse is_mkldnn device device.default
""".split()
)


# functions whose plain name is that of another: what reads a number is no cast
HOMONYMS = {
    torch.embedding: "embedding_of_weight",
    torch.binary_cross_entropy_with_logits: "binary_cross_entropy_by_number",
    torch.nn.functional.unfold: "im2col",
    torch.autograd.grad: "autograd_grad",
    **{getattr(Tensor, name): name for name in ("__bool__", "__int__", "__long__", "__float__", "__complex__")},
}


def op_name(func: Any) -> tuple[str, bool]:
    """(plain name, whether it reads an attribute): ``Tensor.__iadd__`` is "iadd", ``x.shape`` is ("shape", True)."""
    if func in HOMONYMS:
        return HOMONYMS[func], False
    name = getattr(func, "__name__", str(func))
    if name == "__get__":
        return getattr(func.__self__, "__name__", "?"), True
    return name.strip("_").removeprefix("linalg_"), False


def refuse_unrunnable(name: str, metadata: bool, args: Any, kwargs: Any, sharded: Callable[[Tensor], bool]) -> None:
    """Raises GlueError for what no rule and no gather can make right on a sharded tensor between stages.

    Within a transform of torch.func a tensor hides another, and its shape.
    """
    for t in tensor_args(args, kwargs):
        while (hidden := is_functorch_wrapped_tensor(t)) and not sharded(t):
            t = get_unwrapped(t)
            if sharded(t):
                break
        if not sharded(t) or (metadata and not hidden and name not in UNRUNNABLE):
            continue
        what = UNRUNNABLE.get(name, f"{name}() under torch.vmap or another transform of torch.func")
        raise GlueError(
            f"{what} between stages works on the part of a sharded tensor as if it were the whole; do it in a stage, "
            "a submodule with a pattern, where tensors are local"
        )


def in_place(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or name in _INPLACE_DUNDER


_INPLACE_DUNDER = frozenset(
    """
__setitem__ __iadd__ __isub__ __imul__ __idiv__ __itruediv__ __ifloordiv__ __imod__ __ipow__ __iand__ __ior__ __ixor__
__ilshift__ __irshift__
""".split()
)
ATTRIBUTE_OPS = frozenset({"T", "mT", "H", "mH", "data", "real", "imag"})


@dataclass
class Sym:
    """A tracked tensor: its value, and for every layout of that value where the cut lies in this tensor.

    `spare` is the same for dims that nobody named, by their place in the tensor that the value was made as: channels or
    heads. An operation that needs one makes it a layout of the value (`Recorder.name_spare`).
    """

    value: int
    cuts: dict[str, Cut]
    spare: dict[int, Cut] = field(default_factory=dict)


@dataclass
class Event:
    """Where a planner op happens in a run: a stage call, a glue op, or the model's output."""

    kind: str  # "stage", "glue", "source", "output"; "whole": glue on tensors that no plan shards
    index: int  # the how-many-th stage call, glue op or output
    name: str
    options: list[Option] = field(default_factory=list)  # per choice, for a stage
    operands: list[Sym | None] = field(default_factory=list)  # tracked tensor arguments, in order
    source: list[Cut | None] = field(default_factory=list)  # per choice, for a source
    sizes: dict[str, int] = field(default_factory=dict)
    region: int | None = None  # the activation checkpoint it runs in
    own: bool = False  # whether the stage is a checkpoint itself
    grad: bool = False  # whether its outputs take part in backward
    memory: tuple[int, int] = (0, 0)  # (work, saved) bytes at full size
    flops: int = 0  # of its forward at full size
    touched: tuple[int, int] = (0, 0)  # bytes its forward reads and writes, likewise: outside and inside of `Inside`
    random: bool = False
    sends: list[Sends] = field(default_factory=list)  # per choice, inside a stage
    largest: int = 0  # bytes of the largest tensor it makes
    module: str = ""  # the module whose forward it is in
    shared: bool = False  # a glue op that writes into memory of which there are views
    constants: list[Any] = field(default_factory=list)  # what a stage returned beside tensors


@dataclass
class Trace:
    """The planner's ops and values, with the event of each op and what else the run needs to know."""

    values: list[Value]
    grads: list[bool]
    cuts: list[dict[str, Cut]]  # per value: where each layout cuts the tensor that its producer returned
    shapes: list[tuple[int, ...]]
    ops: list[Op]
    events: list[Event]
    inputs: dict[str, int]  # model parameter -> value
    random_glue: bool
    resident: int
    recompute: bool = False  # whether every stage is recomputed in backward
    whole_grads: list[int] = field(default_factory=list)  # bytes of each undeclared input that asks for its gradient
    copies: set[int] = field(default_factory=set)  # glue that looks like a view, but makes a value of its own
    same: set[int] = field(default_factory=set)  # glue that returns its first argument as it is
    names: list[str] = field(default_factory=list)  # of all glue operations
    saves: dict[int, float] = field(default_factory=dict)  # per activation checkpoint: the last event that saves
    sizes: dict[str, int] = field(default_factory=dict)  # of the dims that the root pattern names
    entered: dict[str, tuple[Any, Any]] = field(default_factory=dict)  # the first call of every module between stages
    reads: str = ""  # where the forward reads its data, if it does: then this is the record of one run

    def forwards(self, event: Event) -> int:
        """What a step costs in forwards: backward is two, every activation checkpoint one more."""
        region = event.region is not None
        again = region + (event.own or (self.recompute and event.kind == "stage" and not region))
        return 1 + (2 + again) * event.grad


def skeleton(
    module: nn.Module,
    fake: Callable[[Tensor], Tensor],
    memo: dict[int, nn.Module],
    twins: Mapping[int, nn.Module],
    staged: Collection[int],
) -> nn.Module:
    """The same module tree on fake parameters: without the hooks and compiled forwards of a set-up run.

    A checkpoint round a forward stays, but for the ids of modules `staged`, which are stages or inside of them.
    `twins`: for the id of a module an earlier one like it, whose insides will do for both.
    """
    if id(module) in memo:
        return memo[id(module)]
    inner = module._modules.get("_orig_mod")
    if inner is not None:
        memo[id(module)] = skeleton(inner, fake, memo, twins, staged)
        return memo[id(module)]
    clone = object.__new__(type(module))
    if id(module) in twins:
        clone.__dict__.update(skeleton(twins[id(module)], fake, memo, twins, staged).__dict__)
        clone.__dict__.update({k: OrderedDict() for k in ("_forward_hooks", "_forward_pre_hooks")})
        memo[id(module)] = clone
        return clone
    memo[id(module)] = clone
    state = dict(module.__dict__)
    forward = state.pop("forward", None)
    if checkpointed(forward) and id(module) not in staged:
        plain = MethodType(type(module).forward, clone)
        state["forward"] = functools.partial(forward.func, plain, **forward.keywords)
    for name in ("_forward_hooks", "_forward_pre_hooks"):
        kept = OrderedDict((k, h) for k, h in state[name].items() if not foreign(h))
        state[name] = kept
    for name in ("_backward_hooks", "_backward_pre_hooks"):
        state[name] = OrderedDict()
    state["_parameters"] = {k: None if p is None else fake(p) for k, p in module._parameters.items()}
    state["_buffers"] = {k: None if b is None else fake(b) for k, b in module._buffers.items()}
    clone.__dict__.update({k: own_containers(v) for k, v in state.items()})
    clone.__dict__["_modules"] = {
        k: None if m is None else skeleton(m, fake, memo, twins, staged) for k, m in module._modules.items()
    }
    return clone


def own_containers(value: Any) -> Any:
    """Lists and dicts anew: what a forward without data puts into a cache is not for the model to find there."""
    if type(value) in (dict, OrderedDict):
        return type(value)((k, own_containers(v)) for k, v in value.items())
    return [own_containers(v) for v in value] if type(value) is list else value


def checkpointed(forward: Any) -> bool:
    """Whether a module's forward was wrapped: ``module.forward = partial(checkpoint, module.forward, ...)``."""
    return isinstance(forward, functools.partial) and forward.func is checkpoint


def foreign(hook: Any) -> bool:
    """Hooks that act on a distributed run, not on the function the model computes."""
    target = getattr(hook, "func", hook)
    owner = getattr(target, "__self__", None)
    origin = type(owner).__module__ if owner is not None else getattr(target, "__module__", "") or ""
    return origin.startswith(("torch.distributed", "dsp."))


FLOPS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, out_val=None, **__: sdpa_flop_count(
        q.shape, k.shape, v.shape
    ),
}


# they return memory as it is
UNTOUCHED = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view"})


class Watch(TorchDispatchMode):
    """Peak bytes of the tensors a block of code makes, its FLOPs, what it reads and writes, and whether it is random.

    `touched` counts every operation that is no view by itself, as it runs uncompiled, in two parts: [1] is while
    `inside` is not 0.
    """

    def __init__(self) -> None:
        super().__init__()
        self.round = 0
        self.restart()

    def restart(self) -> None:
        self.round += 1  # what was made before no longer counts when it goes
        self.live = self.peak = self.largest = self.flops = 0
        self.touched, self.inside = [0, 0], 0
        self.random = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        count = FLOPS.get(func.overloadpacket)
        if count is not None:
            self.flops += count(*args, **kwargs, out_val=out)
        if torch.Tag.nondeterministic_seeded in func.tags and not undropped(func, args, kwargs):
            self.random = True
        aliased = [r.alias_info for r in func._schema.returns if r.alias_info is not None]
        made = tensors_in(out)
        if made and all(alias.is_write for alias in aliased) and func.overloadpacket.__name__ not in UNTOUCHED:
            tensors = tensors_in((args, kwargs)) + made
            # of an expanded tensor there is less than its size
            strided = (t for t in tensors if t.layout == torch.strided)
            sizes = (min(t.numel() * t.element_size(), t.untyped_storage().nbytes()) for t in strided)
            self.touched[self.inside > 0] += sum(sizes)
        if func._schema.is_mutable or any(r.alias_info is not None for r in func._schema.returns):
            return out
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, Tensor):
                size = t.numel() * t.element_size()
                self.live += size
                self.largest = max(self.largest, size)
                self.peak = max(self.peak, self.live)
                weakref.finalize(t, self._freed, size, self.round)
        return out

    def _freed(self, size: int, made: int) -> None:
        if made == self.round:
            self.live -= size


def undropped(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether it is attention without dropout, which CUDA's kernels are tagged as random for, and draw nothing."""
    names = [a.name for a in func._schema.arguments]
    given = {**dict(zip(names, args)), **kwargs}
    return "dropout_p" in names and given.get("dropout_p", 0.0) == 0.0


def memory(t: Tensor) -> StorageWeakRef:
    """Whose storage a tensor lives in: tensors that share it are views of each other."""
    with torch._C.DisableTorchFunction():
        try:
            return StorageWeakRef(t.untyped_storage())
        except NotImplementedError:  # sparse
            return StorageWeakRef((t._values() if t.layout == torch.sparse_coo else t.values()).untyped_storage())


def node(t: Tensor) -> Any:
    """Where autograd takes a gradient of this tensor; None if it takes none."""
    with torch._C.DisableTorchFunction(), torch.enable_grad():
        if not t.requires_grad or t.grad_fn is not None:
            return t.grad_fn
        viewed = t.view_as(t).grad_fn  # a leaf's own node is behind it; views made under no_grad have none
        return viewed and viewed.next_functions[0][0]


def leading_to(ends: Iterable[Any]) -> set[Any]:
    """All nodes of autograd that a gradient at some of them comes to."""
    found, waiting = set[Any](), [n for n in ends if n is not None]
    while waiting:
        n = waiting.pop()
        if n not in found:
            found.add(n)
            waiting += [n for n, _ in n.next_functions if n is not None]
    return found


def is_batch(key: str) -> bool:
    return key.rstrip("'") in BATCH_NAMES


# products mix every element of one operand with every element of the other
PRODUCTS = frozenset({"matmul", "rmatmul", "bmm", "mm", "einsum", "baddbmm", "scaled_dot_product_attention"})


# they return their argument where there is nothing to do
SAME = frozenset("contiguous flatten ravel to type type_as float double half bfloat16 real conj resolve_conj".split())


@dataclass
class Ways:
    """How one operation of glue may run: choices for the planner, and where each layout cuts the outputs."""

    choices: list[Choice] = field(default_factory=list)
    cuts: dict[str, Cut] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    view: bool = True  # the same data in every layout
    viewed: bool = False  # in some layout
    refusal: GlueError | None = None


class Recorder:
    """Collects the planner's problem from a forward as it runs: on fake tensors (`Tracer`), or for real on shards."""

    def __init__(self, n: int, root_sizes: Mapping[str, int]) -> None:
        super().__init__()
        self.n, self.root_sizes = n, dict(root_sizes)
        self.batch = math.prod(size for name, size in root_sizes.items() if is_batch(name))
        self.values: list[Value] = []
        self.nodes: list[set[Any]] = []  # of autograd, for each value: a write in place may add another
        self.made: list[list[set[Any]]] = []  # likewise, for the outputs of each op
        self.cuts: list[dict[str, Cut]] = []
        self.shapes: list[tuple[int, ...]] = []
        self.sharing: dict[StorageWeakRef, set[int]] = {}  # the values that live in one memory
        self.viewed: set[int] = set()  # values of which there are views
        self.whole: list[bool] = []  # whether a value may be whole without a gather
        self.ops: list[Op] = []
        self.events: list[Event] = []
        self.inputs: dict[str, int] = {}
        self.longest = 0  # bytes of the longest value so far
        self.stage_calls = 0
        self.random_glue = False
        self.real = True  # whether the tensors have data
        self.frames: list[Any] = []
        self.saves: dict[int, float] = {}
        self.copies: set[int] = set()
        self.same: set[int] = set()
        self.names: list[str] = []  # of all glue operations

    # --- values ---

    def value(self, t: Tensor, name: str, sizes: Mapping[str, int], cuts: dict[str, Cut], whole: bool) -> int:
        """Track a tensor as a new value. `sizes`: its dims; `cuts`: those along which it may be sharded."""
        self.longest = max(self.longest, t.numel() * t.element_size())
        dims = tuple((k, sizes[k]) for k in cuts)
        self.values.append(Value(name, dims, t.element_size(), numel=t.numel()))
        self.nodes.append({node(t)})
        self.cuts.append(dict(cuts))
        self.shapes.append(tuple(t.shape))
        self.whole.append(whole)
        index = len(self.values) - 1
        self.sharing.setdefault(memory(t), set()).add(index)
        named = {c.dim for c in cuts.values()}
        fresh = {d: self.spare_cut(index, d) for d in range(t.ndim) if d not in named}
        spare = {d: cut for d, cut in fresh.items() if t.shape[d] > cut.outer}
        t._dsp_sym = Sym(index, dict(cuts), spare)  # type: ignore[attr-defined]
        return index

    def sym(self, t: Tensor) -> Sym | None:
        """What is known of a tensor, with the dims of its value that another use has named since."""
        found: Sym | None = getattr(t, "_dsp_sym", None)
        if found is not None:
            known = {cut: key for key, cut in self.cuts[found.value].items()}
            for d in list(found.spare):
                if (key := known.get(self.spare_cut(found.value, d))) is not None:
                    found.cuts[key] = found.spare.pop(d)
        return found

    def spare_cut(self, value: int, d: int) -> Cut:
        """Along a dim that nobody named: the first is a fold with batch, as a rule, which is not for sharding."""
        return Cut(d, self.batch if d == 0 and self.shapes[value][0] % self.batch == 0 else 1)

    def name_spare(self, sym: Sym, wanted: Cut | None = None) -> None:
        """Let a value be sharded along the dims of this tensor that nobody named, or along the one `wanted`."""
        for d, cut in list(sym.spare.items()):
            if wanted is not None and cut != wanted:
                continue
            del sym.spare[d]
            value, known, base = self.values[sym.value], self.cuts[sym.value], self.spare_cut(sym.value, d)
            named = next((key for key, c in known.items() if c == base), None)
            if named is not None:  # by another view of it
                sym.cuts[named] = cut
                continue
            key = f"dim{d}"
            while key in known:
                key += "'"
            extent = self.shapes[sym.value][d] // base.outer
            self.values[sym.value] = replace(value, sizes=(*value.sizes, (key, extent)))
            known[key] = base
            sym.cuts[key] = cut

    def region(self) -> int | None:
        frame = checkpoint_frame()
        if frame is None:
            return None
        if not any(f is frame for f in self.frames):
            self.frames.append(frame)
        return next(i for i, f in enumerate(self.frames) if f is frame)

    # --- glue ---

    def record(self, index: int, name: str, args: Any, kwargs: Any, out: Any, written: bool) -> None:
        """Glue operation number `index`; `written`: in place, into its first operand."""
        self.names.append(name)
        tracked = tensor_args(args, kwargs)
        syms = [self.sym(t) for t in tracked]
        if any(s is not None for s in syms):
            self.used(tracked, syms)
            if name in SAME and args and out is args[0]:
                self.same.add(index)
                return
            self.glue(index, name, args, kwargs, tracked, syms, out, written)
        elif name in SOURCES and tracked and isinstance(out, Tensor):
            self.source(index, name, args, kwargs, out)

    def source(self, index: int, name: str, args: Any, kwargs: Any, out: Tensor) -> None:
        frame = self.frame(name, args, kwargs, {})
        cuts = {f"dim{i}": c for i, c in enumerate(source_cuts(frame))}
        if not cuts:
            return
        sizes = {k: out.shape[c.dim] // c.outer for k, c in cuts.items()}
        value = self.value(out, f"{name} {list(out.shape)}", sizes, cuts, whole=True)
        choices = [Choice((), (k,)) for k in cuts] + [Choice((), (None,))]
        self.add(Op(name, (), (value,), tuple(choices)), Event("source", index, name, source=[*cuts.values(), None]))

    def frame(self, name: str, args: Any, kwargs: Any, cuts: Mapping[int, Cut | None]) -> Frame:
        """The call with Operands for tensors; `cuts` by position among the tensor arguments."""
        operands = iter([Operand(tuple(t.shape), cuts.get(i)) for i, t in enumerate(tensor_args(args, kwargs))])
        converted = tuple(with_operands(a, operands) for a in args)
        return Frame(name, converted, {k: with_operands(v, operands) for k, v in kwargs.items()}, self.n)

    def glue(
        self, index: int, name: str, args: Any, kwargs: Any, tracked: list[Tensor], syms: list[Sym | None], out: Any,
        written: bool,
    ) -> None:  # fmt: skip
        if out is NotImplemented:  # x == "a" is False, says Python then
            return
        outputs = tensors_in(out)
        if not outputs and written and syms[0] is not None:
            outputs = [tracked[0]]  # x[...] = y
        if not outputs and not written:
            # nothing, taken apart, is nothing
            if out is None or (isinstance(out, (tuple, list)) and not out) or name in ("__setattr__", "set"):
                return
            if self.real:  # of which the run finds them whole
                read = tuple(dict.fromkeys(s.value for s in syms if s is not None))
                event = Event("glue", index, name, operands=syms)
                self.add(Op(name, read, (), (Choice((None,) * len(read), ()),)), event)
                return
            raise GlueError(
                f"{name}() between stages reads values of a sharded tensor; compute it inside a stage, or from the "
                "whole inputs"
            )
        if kwargs.get("out") is not None:
            raise self.frame(name, args, kwargs, {}).refuse("out= has no rule for a sharded tensor")
        values = list(dict.fromkeys(s.value for s in syms if s is not None))
        shared = written and syms[0] is not None and self.fix(tracked[0], syms[0].value)

        def opened() -> Ways:
            """Along the dims that nobody named, too, or with some of its operands gathered."""
            for s in syms:
                if s is not None:
                    self.name_spare(s)
            return self.ways(name, args, kwargs, tracked, syms, values, outputs, lambda v: True)

        if written and syms[0] is None:  # into a tensor that is whole: so must be what it writes
            found = Ways()
        elif name in PRODUCTS:  # one operand may be gathered, or both switched to a dim that the product keeps apart
            found = opened()
        else:
            self.align(tracked, syms)
            largest = max((t.numel() for t in outputs), default=0)
            small = {s.value for s, t in zip(syms, tracked) if s is not None and 2 * t.numel() <= largest}
            found = self.ways(name, args, kwargs, tracked, syms, values, outputs, lambda v: self.whole[v] or v in small)
        if found.refusal and all(c.rank or not any(c.needs) for c in found.choices):
            # nothing but batch, or what is whole already, gets through as it is: what if it came along another dim?
            found = opened()
        if not found.choices:
            if written and syms[0] is not None:
                assert found.refusal is not None
                raise found.refusal
            self.run_whole(found, syms, values, outputs)
        elif (
            outputs
            and not (written or found.cuts or any(any(c.needs) for c in found.choices))
            and self.n * max(t.numel() * t.element_size() for t in outputs) > self.longest
        ):
            # its operands are whole anyway: what it makes is split for nothing, if it is long
            found.choices.clear()
            self.run_whole(found, syms, values, outputs)
        size = max(t.numel() * t.element_size() for t in (*tracked, *outputs))
        if size * self.n > self.longest and any(c.rank == 0 and any(c.needs) for c in found.choices):
            # nothing longer than a share of the longest tensor runs whole where it need not
            found.choices = [c for c in found.choices if any(c.needs)]
        found.view &= not found.viewed or self.is_view(outputs[0], tracked[0])
        if found.viewed and not found.view:
            self.copies.add(index)
        if found.view and len(outputs) == 1 and len(values) == 1:
            sym = next(s for s in syms if s is not None)
            mapped = {c.needs[0]: found.cuts[c.gives[0]] for c in found.choices if c.needs[0] and c.gives[0]}
            spare = {}
            for d, cut in sym.spare.items():
                moved = self.outcome(name, args, kwargs, {i: cut for i, s in enumerate(syms) if s is not None})
                if not isinstance(moved, GlueError) and moved.cut is not None:
                    spare[d] = moved.cut
            outputs[0]._dsp_sym = Sym(sym.value, mapped, spare)  # type: ignore[attr-defined]
            self.viewed.add(sym.value)
            return
        choices = found.choices
        if not found.cuts:
            produced: list[int] = []
            for t in outputs:
                if hasattr(t, "_dsp_sym"):
                    del t._dsp_sym
            choices = [Choice(c.needs, (), bytes=c.bytes, calls=c.calls) for c in choices]
        else:
            whole = any(c.gives[0] is None for c in choices)
            produced = [self.value(t, f"{name} {list(t.shape)}", found.sizes, found.cuts, whole) for t in outputs]
        self.add(
            Op(name, tuple(values), tuple(produced), tuple(choices)),
            Event("glue", index, name, operands=syms, grad=(outputs or tracked)[0].requires_grad, shared=shared),
            outputs or tracked[:1],
        )

    def align(self, tracked: list[Tensor], syms: list[Sym | None]) -> None:
        """What one operand may be sharded along, the others may be, too, where their dims meet."""
        known = {
            (c.dim - t.ndim, c.outer, t.shape[c.dim])
            for t, s in zip(tracked, syms) if s is not None
            for c in s.cuts.values()
        }  # fmt: skip
        for t, s in zip(tracked, syms):
            for cut in list(s.spare.values()) if s is not None else []:
                if (cut.dim - t.ndim, cut.outer, t.shape[cut.dim]) in known:
                    self.name_spare(s, cut)  # type: ignore[arg-type]

    def fix(self, t: Tensor, value: int) -> bool:
        """A tensor is written in place: if it has views or is one, all of them had better stay where they are."""
        kin = self.sharing.get(memory(t), set()) | {value}
        if len(kin) == 1 and value not in self.viewed:
            return False
        for v in kin:
            self.values[v] = replace(self.values[v], fixed=True)
        return True

    def is_view(self, out: Tensor, x: Tensor) -> bool:
        """Whether what looks like a view is one. A run on shards cannot tell: the next rank may see it otherwise."""
        return True

    def outcome(self, name: str, args: Any, kwargs: Any, cuts: Mapping[int, Cut | None]) -> Outcome | GlueError:
        try:
            return RULES.get(name, no_rule)(self.frame(name, args, kwargs, cuts))
        except GlueError as error:
            return error

    def ways(
        self,
        name: str,
        args: Any,
        kwargs: Any,
        tracked: list[Tensor],
        syms: list[Sym | None],
        values: list[int],
        outputs: list[Tensor],
        gathered: Callable[[int], bool],
    ) -> Ways:
        """The layouts of its operands that an operation takes; `gathered` tells which values may come whole."""
        keys: list[list[str | None]] = []
        for v in values:
            own = [s for s in syms if s is not None and s.value == v]
            shared = [k for k in own[0].cuts if all(k in s.cuts for s in own)]
            keys.append([*shared, *([None] if gathered(v) else [])])
        found = Ways()
        if any(not k for k in keys):
            found.refusal = self.frame(name, args, kwargs, {}).refuse("no dim of it can be sharded")

        @functools.cache
        def alone(v: int, k: str) -> Cut | None:
            """Where the outputs are cut if of all operands only this value is: which of them brings the dim."""
            cuts = {i: s.cuts[k] for i, s in enumerate(syms) if s is not None and s.value == v}
            outcome = self.outcome(name, args, kwargs, cuts)
            return None if isinstance(outcome, GlueError) else outcome.cut

        combos: Iterable[tuple[str | None, ...]] = itertools.product(*keys)
        if len(values) > 3:
            every = set(keys[0]).intersection(*keys[1:])
            combos = [(k,) * len(values) for k in keys[0] if k in every]
        for combo in combos:
            layout = dict(zip(values, combo))
            if all(k is None for k in combo):
                if all(self.whole[v] for v in values):
                    found.choices.append(Choice(combo, (None,) * len(outputs)))
                continue
            cuts = {i: s.cuts[k] for i, s in enumerate(syms) if s is not None and (k := layout[s.value]) is not None}
            outcome = self.outcome(name, args, kwargs, cuts)
            if isinstance(outcome, GlueError):
                found.refusal = found.refusal or outcome
                found.view = False
                continue
            if outcome.cut is None:
                size = sum(t.numel() * summed_in(t.dtype).itemsize for t in outputs)
                sent = -(-2 * size * (self.n - 1) // self.n)
                found.choices.append(Choice(combo, (None,) * len(outputs), bytes=sent, calls=1))
                found.view = False
                continue
            found.view &= outcome.view
            found.viewed |= outcome.view
            # the model's own name for the dim, if there is one; batch is batch whatever else it is called
            carry = [k for v, k in layout.items() if k is not None and alone(v, k) == outcome.cut]
            named = carry or [k for k in combo if k is not None]
            first = min(named, key=lambda k: (not is_batch(k), k.startswith("dim")))
            key = next((k for k, c in found.cuts.items() if c == outcome.cut), None)
            if key is None:
                key = first
                while key in found.cuts:
                    key += "'"
                found.cuts[key] = outcome.cut
                # the dim itself, without those folded into its chunks
                known = dict(self.values[values[combo.index(first)]].sizes)[first]
                extent = max(t.shape[outcome.cut.dim] // outcome.cut.outer for t in outputs)
                found.sizes[key] = known if extent % known == 0 else extent
            found.choices.append(Choice(combo, (key,) * len(outputs), rank=int(is_batch(key))))
        return found

    def run_whole(self, found: Ways, syms: list[Sym | None], values: list[int], outputs: list[Tensor]) -> None:
        """No dim is left to shard: gather the operands, run on every rank, and split again for nothing."""
        found.view = False
        found.choices.append(Choice((None,) * len(values), (None,) * len(outputs)))
        if not outputs:
            return
        known = next(s for s in syms if s is not None)
        shape = self.shapes[known.value]
        for d, size in enumerate(outputs[0].shape):
            if size < 2 or any(t.ndim <= d or t.shape[d] != size for t in outputs):
                continue
            name = next((k for k, c in known.cuts.items() if c == Cut(d) and shape[d : d + 1] == (size,)), f"dim{d}")
            found.cuts[name], found.sizes[name] = Cut(d), size

    def used(self, tensors: Iterable[Tensor], syms: Iterable[Sym | None]) -> None:
        """If they were written in place, a gradient comes to them another way since."""
        for t, s in zip(tensors, syms):
            if s is not None:
                self.nodes[s.value].add(node(t))

    def add(self, op: Op, event: Event, outputs: Sequence[Tensor] = ()) -> None:
        event.region = self.region()
        self.made.append([self.nodes[v] for v in op.outputs] or [{node(t)} for t in outputs])
        self.ops.append(op)
        self.events.append(event)

    # --- stages ---

    def enter_stage(self, stage: Stage, args: Any, kwargs: Any) -> None:
        _, bound = stage.signature.bind(args, kwargs)
        sizes = stage.sizes(bound, self.root_sizes)
        self.pending = (stage, bound, sizes, stage.options(bound, sizes, self.n))

    def leave_stage(
        self,
        output: Any,
        *,
        work: int = 0,
        saved: int = 0,
        flops: int = 0,
        touched: tuple[int, int] = (0, 0),
        random: bool = True,
        largest: int = 0,
        keeps_inputs: bool = False,
        sends: Mapping[str | None, Sends] | None = None,
    ) -> None:
        """The stage entered last returned. `keeps_inputs`: backward starts anew from them; `sends`: by option."""
        stage, bound, sizes, options = self.pending
        index = self.stage_calls
        self.stage_calls += 1
        tensors = tensors_in(output)
        patterns = stage.outputs(tensors)
        syms = [self.sym(b.tensor) for b in bound]
        values = list(dict.fromkeys(s.value for s in syms if s is not None))
        out_sizes = [dict(sizes) for _ in tensors]
        for s, p, t in zip(out_sizes, patterns, tensors):
            for name in [n for n in p.names if n in stage.pattern.computed]:
                if len(p.axes[p.axis_of(name)]) == 1:
                    s[name] = t.shape[p.axis_of(name)]
            for name, value in solve_sizes([(p, tuple(t.shape))], {**self.root_sizes, **s}, where=stage.where).items():
                if name in stage.pattern.free and value != sizes.get(name, value):
                    raise NotationError(
                        f"{stage.where} returned {tuple(t.shape)}: dim {name!r} is {value} where its input has "
                        f"{sizes[name]}; a dim outside brackets keeps its size"
                    )
                s[name] = value
        out_cuts = []
        for s, p, t in zip(out_sizes, patterns, tensors):
            cuts = {}
            for name in p.names:
                cut = cut_for(p, t.shape, name, s)
                if cut is not None and s[name] > 1 and fits_fold(p, name, s, self.n):
                    cuts[name] = cut
            out_cuts.append(cuts)
        choices, inside = [], list[Sends]()
        for option in options:
            needs = []
            for v in values:
                need: set[str | None] = set()
                for b_sym, cut in zip(syms, option.cuts):
                    if b_sym is None or b_sym.value != v:
                        continue
                    if cut is not None and cut not in b_sym.cuts.values():
                        self.name_spare(b_sym, cut)
                    need.add(next((k for k, c in b_sym.cuts.items() if c == cut), None) if cut else None)
                # one value in two arguments that need it differently: gathered, then cut for each
                needs.append(need.pop() if len(need) == 1 else None)
            share = option.share(self.n)
            inside.append((sends or {}).get(option.name, Sends()))
            kept = sum(self.values[v].local_bytes(k, self.n) for v, k in zip(values, needs)) if keeps_inputs else 0
            choices.append(
                Choice(
                    tuple(needs),
                    tuple(option.name if option.name in c else None for c in out_cuts),
                    work=int(work * share),
                    saved=int(saved * share) + kept,
                    rank=int(option.last_resort),
                    bytes=sum(nbytes for nbytes, _ in inside[-1].forward.values()),
                    calls=sum(calls for _, calls in inside[-1].forward.values()),
                )
            )
        produced = [
            self.value(t, f"{stage.name}[{index}]", s, c, whole=options[0].name is None)
            for t, s, c in zip(tensors, out_sizes, out_cuts)
        ]
        event = Event("stage", index, stage.name, options=options, operands=syms, sizes=sizes)
        event.memory, event.flops, event.touched, event.random = (work, saved), flops, touched, random
        event.largest = largest
        event.grad = any(t.requires_grad for t in tensors)
        event.constants, event.sends = constants_in(output), inside
        self.used((b.tensor for b in bound), syms)
        self.add(Op(stage.name, tuple(values), tuple(produced), tuple(choices)), event, tensors)

    # --- the model's own inputs and outputs ---

    def root_inputs(self, bound: list[Bound], given: Mapping[str, Cut]) -> None:
        for b in bound:
            if b.pattern is None:
                continue
            sizes, cuts = self.root_sizes, {}
            for name in b.pattern.names:
                cut = cut_for(b.pattern, b.tensor.shape, name, sizes)
                if cut is not None and sizes[name] > 1 and fits_fold(b.pattern, name, sizes, self.n):
                    cuts[name] = cut
            home = None
            if b.param in given:
                home = next((k for k, c in cuts.items() if c == given[b.param]), None)
                if home is None:
                    raise NotationError(
                        f"input {b.param!r} arrives as {given[b.param].placement()}, which '{b.pattern}' cannot name"
                    )
            self.inputs[b.param] = self.root_input(b.param, b.tensor, cuts, sizes, home)

    def root_input(
        self, param: str, t: Tensor, cuts: dict[str, Cut], sizes: Mapping[str, int], given: str | None
    ) -> int:
        index = self.value(t, param, sizes, cuts, whole=given is None)
        v = self.values[index]
        self.values[index] = replace(v, home=(given,))
        return index

    def root_outputs(self, output: Any, gather: bool) -> None:
        self.ends = [node(t) for t in tensors_in(output)]
        for i, t in enumerate(tensors_in(output)):
            self.root_output(i, t, gather)

    def apart(self, v: int) -> frozenset[frozenset[str]]:
        """The pairs of layouts of a value that are both parts of one dim: no one all-to-all leads to the other."""
        pairs = itertools.combinations(self.cuts[v].items(), 2)
        return frozenset(frozenset((a, b)) for (a, x), (b, y) in pairs if not separable(self.shapes[v], x, y, self.n))

    def leave_out_dead_ends(self) -> None:
        """A gradient comes from what the forward returns: none to what is detached later, or used no more."""
        self.reached = leading_to(self.ends)
        for event, made in zip(self.events, self.made):
            event.grad &= any(nodes & self.reached for nodes in made)
        self.grads = [bool(nodes & self.reached) for nodes in self.nodes]

    def trace(self, resident: int = 0) -> Trace:
        self.leave_out_dead_ends()
        self.values = [replace(value, apart=self.apart(v)) for v, value in enumerate(self.values)]
        return Trace(
            self.values, self.grads, self.cuts, self.shapes, self.ops, self.events, self.inputs, self.random_glue,
            resident, saves=self.saves, copies=self.copies, same=self.same, names=self.names, sizes=self.root_sizes,
        )  # fmt: skip

    def root_output(self, position: int, t: Tensor, gather: bool) -> None:
        sym = self.sym(t)
        if sym is None:
            return
        choices = [Choice((None,), ())]
        if not gather:
            choices = [Choice((k,), (), rank=int(is_batch(k))) for k in sym.cuts] or choices
        self.add(
            Op("output", (sym.value,), (), tuple(choices)),
            Event("output", position, "output", operands=[sym], grad=t.requires_grad),
            [t],
        )


class Tracer(Recorder, TorchFunctionMode):
    """Records a forward on fake tensors, and measures memory, FLOPs and randomness of its stages on the way."""

    def __init__(self, n: int, root_sizes: Mapping[str, int], recompute: bool = False, real: bool = False) -> None:
        super().__init__(n, root_sizes)
        self.recompute, self.real = recompute, real
        self.now: dict[str, Any] = {}  # measured of the stage that runs
        self.in_stage = False
        self.depth = 0
        self.watch = Watch()
        self.kept: dict[int, torch.UntypedStorage] = {}  # what glue saved for backward
        self.resident: set[int] = set()  # memory of parameters and buffers
        self.inside = [""]  # the modules that run now
        self.entered: dict[str, tuple[Any, Any]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.in_stage:
            return func(*args, **kwargs)
        name, attribute = op_name(func)
        metadata = (attribute and name not in ATTRIBUTE_OPS) or name in METADATA
        if name in UNRUNNABLE or maybe_current_level() is not None:
            refuse_unrunnable(name, metadata, args, kwargs, lambda t: hasattr(t, "_dsp_sym"))
        if metadata:
            return func(*args, **kwargs)
        if name in BY_NUMBER and not self.real:
            raise NotImplementedError(f"{name}_() on a tensor without data")  # where torch crashes
        index = len(self.names)
        self.watch.restart()
        region, kept = self.region(), list[Tensor]()
        with saving(kept):
            out = func(*args, **kwargs)
        watch, known = self.watch, len(self.ops)
        self.random_glue |= watch.random
        flops, touched, largest = watch.flops, sum(watch.touched), watch.largest
        self.record(index, name, args, kwargs, out, in_place(func))
        if region is not None and kept:  # an op that is no event comes after the one before
            self.saves[region] = known if len(self.events) > known else known - 0.5
        saved = self.keep(kept) if region is None else 0
        if len(self.ops) == known and (flops or touched):
            grad = any(t.requires_grad for t in tensors_in(out))
            event = Event("whole", index, name, grad=grad, memory=(watch.peak, saved), module=self.inside[-1])
            self.add_whole(event, tensors_in(out))
            self.events[-1].flops += flops
            self.events[-1].touched = (self.events[-1].touched[0] + touched, 0)
            self.events[-1].largest = max(self.events[-1].largest, largest)
        elif len(self.ops) > known:
            event, op = self.events[-1], self.ops[-1]
            event.flops, event.touched, event.largest, event.module = flops, (touched, 0), largest, self.inside[-1]
            if saved:
                parts = [replace(c, saved=int(saved * self.part(op, c))) for c in op.choices]
                self.ops[-1] = replace(op, choices=tuple(parts))
        return out

    def add_whole(self, event: Event, outputs: Sequence[Tensor]) -> None:
        """An operation on tensors that no plan shards: one op with those before it in the same module."""
        last = self.events[-1] if self.events else None
        if (
            last is None
            or any(getattr(last, what) != getattr(event, what) for what in ("kind", "module", "grad"))
            or last.region != self.region()
        ):
            self.add(Op(event.name, (), (), (Choice((), (), saved=event.memory[1]),)), event, outputs)
            return
        self.made[-1] += [{node(t)} for t in outputs]
        work, saved = max(last.memory[0], event.memory[0]), last.memory[1] + event.memory[1]
        if event.memory[0] > last.memory[0]:
            last.name = event.name
        last.memory = work, saved
        self.ops[-1] = replace(self.ops[-1], name=last.name, choices=(Choice((), (), saved=saved),))

    def part(self, op: Op, choice: Choice) -> float:
        """What one rank holds of what an op works on."""
        for v, key in zip(op.inputs + op.outputs, choice.needs + choice.gives):
            if key is not None:
                return self.values[v].local_bytes(key, self.n) / max(self.values[v].nbytes, 1)
        return 1.0

    def keep(self, kept: list[Tensor]) -> int:
        """Bytes that were not kept for backward before; parameters are there anyway."""
        fresh = {t.untyped_storage()._cdata: t.untyped_storage() for t in kept if not isinstance(t, nn.Parameter)}
        fresh = {k: storage for k, storage in fresh.items() if k not in self.kept and k not in self.resident}
        self.kept |= fresh
        return sum(storage.nbytes() for storage in fresh.values())

    def enter_module(self, path: str, args: Any, kwargs: Any) -> None:
        if not self.in_stage:
            self.inside.append(path)
            if not self.real:
                self.entered.setdefault(path, (args, kwargs))

    def leave_module(self) -> None:
        if not self.in_stage:
            self.inside.pop()

    def is_view(self, out: Tensor, x: Tensor) -> bool:
        return self.real or memory(out) == memory(x)  # a run that is recorded cannot tell

    def first(self, inputs: list[Tensor], outputs: list[Tensor]) -> dict[str, Any]:
        """A stage ran; what is measured of it will do for its twins."""
        self.now = {}
        return self.now

    def again(self, measured: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> None:
        self.now = measured

    def before_stage(self, stage: Stage, args: Any, kwargs: Any) -> None:
        self.depth += 1
        if self.in_stage:
            return  # called by another stage: part of it
        self.enter_stage(stage, args, kwargs)
        self.in_stage = True
        self.now = {}
        self.keeps = False
        self.sends: dict[str | None, Sends] = {}
        self.watch.restart()
        self.saved: dict[int, torch.UntypedStorage] = {}  # alive, or another would get its address
        self.saved_hooks = torch.autograd.graph.saved_tensors_hooks(self._save, lambda x: x)
        self.saved_hooks.__enter__()

    def _save(self, t: Tensor) -> Tensor:
        self.keeps = True
        if not isinstance(t, nn.Parameter):
            storage = t.untyped_storage()
            self.saved[storage._cdata] = storage
        return t

    def enter_inside(self, inside: Inside, args: Any, kwargs: Any) -> None:
        if self.in_stage:
            _, _, sizes, options = self.pending
            for option in options:
                more = inside.sends(args, kwargs, option.name, sizes, self.n)
                self.sends[option.name] = self.sends.get(option.name, Sends()) + more
            self.watch.inside += 1

    def leave_inside(self) -> None:
        if self.in_stage:
            self.watch.inside -= 1

    def abandon(self) -> None:
        """Leave nothing behind if a stage raised."""
        if self.in_stage:
            self.saved_hooks.__exit__(None, None, None)
            self.in_stage = False

    def after_stage(self, output: Any) -> None:
        self.depth -= 1
        if self.depth:
            return
        self.saved_hooks.__exit__(None, None, None)
        self.in_stage = False
        region, stage = self.region(), self.pending[0]
        own = checkpointed(stage.module.__dict__.get("forward"))
        again = own or self.recompute or region is not None
        first = region is None or all(event.region != region for event in self.events)
        measured: dict[str, Any] = {
            "work": self.watch.peak,
            "largest": self.watch.largest,
            "saved": sum(storage.nbytes() for storage in self.saved.values()),
            "flops": self.watch.flops,
            "touched": tuple(self.watch.touched),
            "random": self.watch.random,
            "sends": self.sends,
            "keeps": self.keeps,
        }
        if not self.now:
            self.now.update(measured)
        measured = {**self.now}
        if (measured.pop("keeps") or (own and torch.is_grad_enabled())) and region is not None:
            self.saves[region] = len(self.events)
        if again:
            measured["saved"] = 0
        first |= own
        self.leave_stage(output, **measured, keeps_inputs=again and first and torch.is_grad_enabled())
        self.events[-1].own = own


@contextmanager
def saving(kept: list[Tensor]) -> Iterator[None]:
    """Collect what is saved for backward."""

    def pack(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        yield


def trace(
    model: nn.Module,
    stages: list[Stage],
    root: StagePattern | None,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    n: int,
    *,
    gather_output: bool,
    dtype: torch.dtype | None = None,
    given: Mapping[str, Cut] | None = None,
    recompute: bool = False,
    twins: bool = True,
    real: bool = False,
) -> Trace:
    """Run `model` on fake copies of the inputs, shapes and dtypes only, and return what the planner has to decide.

    `given` maps parameters that arrive already sharded to their cut; with `recompute` every stage counts as one that
    keeps only its inputs for backward. With `twins` stages that are alike run once (`dsp.twins`). With `real` the
    copies have their data.
    """
    fake_mode: Any = nullcontext() if real else FakeTensorMode(allow_non_fake_inputs=True)

    def fake(t: Tensor) -> Tensor:
        device = "cpu" if t.device.type == "meta" else t.device
        kind = dtype if dtype is not None and t.is_floating_point() else t.dtype
        if real:
            new = t.detach().to(kind, copy=not isinstance(t, nn.Parameter))
        else:
            with fake_mode:
                new = torch.empty(tuple(t.shape), dtype=kind, device=device)
        if isinstance(t, nn.Parameter):
            return nn.Parameter(new, requires_grad=t.requires_grad)
        return new.requires_grad_() if t.requires_grad else new

    whole_args, whole_kwargs = args, kwargs
    fakes: dict[int, Tensor] = {}
    memo: dict[int, nn.Module] = {}
    # autocast keeps the weights it has cast, so that a call does less than one before it
    twins = twins and not real and not any(map(torch.is_autocast_enabled, ("cpu", "cuda")))
    groups = alike([stage.module for stage in stages], foreign) if twins else []
    first = {id(other): group[0] for group in groups for other in group[1:]}
    staged = {id(m) for stage in stages for m in stage.module.modules()}
    clone = skeleton(model, lambda t: fakes.setdefault(id(t), fake(t)), memo, first, staged)
    resident = 0
    for t in {id(t): t for t in itertools.chain(model.parameters(), model.buffers())}.values():
        kind = dtype if dtype is not None and t.is_floating_point() else t.dtype
        resident += t.numel() * kind.itemsize
    args, kwargs = pytree.tree_map_only(Tensor, fake, (args, dict(kwargs)))

    tracer = Tracer(n, sizes_of_root(model, root, args, kwargs), recompute, real)
    bound = Signature(model, root, "the model").bind(args, kwargs)[1] if root is not None else []
    tracer.root_inputs(bound, given or {})
    handles = []
    for stage in stages:
        module = memo.get(id(stage.module), stage.module)
        handles.append(module.register_forward_pre_hook(_enter(tracer, stage), with_kwargs=True))
        handles.append(module.register_forward_hook(lambda m, a, out: tracer.after_stage(out)))
        for inside in stage.inside:
            own = memo.get(id(inside.module))
            if own is not None:  # else its stage is the twin of another
                handles.append(own.register_forward_pre_hook(_inside(tracer, inside), with_kwargs=True))
                handles.append(own.register_forward_hook(lambda m, a, out: tracer.leave_inside()))
    tracer.resident = {t.untyped_storage()._cdata for t in fakes.values()}
    own_paths = {id(memo[k]): path for path, m in model.named_modules() if (k := id(m)) in memo and k not in staged}
    for module in [m for m in clone.modules() if own_paths.get(id(m))]:
        handles.append(
            module.register_forward_pre_hook(_module(tracer, clean(own_paths[id(module)])), with_kwargs=True)
        )
        handles.append(module.register_forward_hook(lambda m, a, out: tracer.leave_module()))
    before = [fingerprint(memo[id(group[0])], foreign) for group in groups]
    once([[memo[id(m)] for m in group] for group in groups], tracer.first, tracer.again)
    try:
        cuda = {t.device.index for t in fakes.values() if t.is_cuda} if real else ()
        drawn = torch.random.fork_rng(devices=cuda) if real else nullcontext()
        with drawn, fake_mode, tracer.watch, tracer, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what the model has to say it says when it runs
            tracer.root_outputs(clone(*args, **kwargs), gather_output)
    finally:
        tracer.abandon()
        for handle in handles:
            handle.remove()
    if before != [fingerprint(memo[id(group[0])], foreign) for group in groups]:
        # a stage that writes to itself: what it does may depend on how often it ran
        return trace(
            model, stages, root, whole_args, whole_kwargs, n,
            gather_output=gather_output, dtype=dtype, given=given, recompute=recompute, twins=False,
        )  # fmt: skip
    found = tracer.trace(resident)
    found.recompute, found.entered = recompute, tracer.entered
    declared = {id(b.tensor) for b in bound if b.pattern is not None}
    for t in tensors_in((args, kwargs)):
        if node(t) in tracer.reached and id(t) not in declared:
            found.whole_grads.append(t.numel() * t.element_size())
    return found


def _module(tracer: Tracer, path: str) -> Any:
    return lambda module, args, kwargs: tracer.enter_module(path, args, kwargs)


def _inside(tracer: Tracer, inside: Inside) -> Any:
    return lambda module, args, kwargs: tracer.enter_inside(inside, args, kwargs)


def _enter(tracer: Tracer, stage: Stage) -> Any:
    return lambda module, args, kwargs: tracer.before_stage(stage, args, kwargs)
