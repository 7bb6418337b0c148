"""Equal stages run once in a recording: a deep model is a few different blocks, repeated many times.

The result of a forward on fake tensors depends only on the module and on its inputs' shapes and dtypes: there is no
data. So two modules of one `fingerprint` are twins, and a call of one with inputs of one `call_key` returns what such a
call returned before. Objects that a module holds are compared by their attributes. Objects that cannot be compared by
value are compared by identity; this costs time, but is safe. Objects among the arguments, such as each layer's cache,
are compared by identity too, because a call may write into them. `discover` skips layers by the same fingerprint.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dsp.core.skeleton import foreign
from dsp.support.private import FakeTensor, checkpoint_frame, children_of, pytree, saved_in, storage_id
from dsp.support.tensors import tensors_in, version

CONSTANTS = (
    type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
SMALL = 4096  # largest buffer whose numbers are compared
OBJECTS = 3  # depth to which nested objects are compared by their attributes
MODULE_FIELDS = frozenset(
    """
_parameters _buffers _modules _non_persistent_buffers_set forward _compiled_call_impl _backward_hooks
_backward_pre_hooks _is_full_backward_hook _forward_hooks _forward_hooks_with_kwargs _forward_hooks_always_called
_forward_pre_hooks _forward_pre_hooks_with_kwargs _state_dict_hooks _state_dict_pre_hooks _load_state_dict_pre_hooks
_load_state_dict_post_hooks
""".split()
)


def unwrapped(module: nn.Module) -> nn.Module:
    while children_of(module).get("_orig_mod") is not None:
        module = children_of(module)["_orig_mod"]
    return module


def all_in_dict(value: Any) -> bool:
    """Tell whether an object's `__dict__` holds its whole state: its class is pure Python, and it is not a module."""
    kind = type(value)
    if getattr(kind, "__new__", None) is not object.__new__ or isinstance(value, (type, nn.Module)):
        return False
    return type(getattr(value, "__dict__", None)) is dict and not any(c.__dict__.get("__slots__") for c in kind.__mro__)


class _Reader:
    """Turns values into comparable keys. `order` numbers modules and tensors as they appear, so that sharing shows.

    objects: the depth to which nested objects are compared by their attributes; buffers: whether buffers of modules are
    compared by their numbers.
    """

    def __init__(self, tensor: Callable[[_Reader, Tensor], Hashable], objects: int = 0, buffers: bool = False) -> None:
        self.tensor, self.objects, self.buffers = tensor, objects, buffers
        self.order: dict[int, int] = {}
        self.referents: list[Any] = []  # objects compared by identity, kept alive so that no other object gets their id

    def nth(self, thing: Any) -> int:
        return self.order.setdefault(id(thing), len(self.order))

    def read(self, value: Any) -> Hashable:
        kind = type(value)
        if kind in CONSTANTS:
            return kind, value
        if isinstance(value, Tensor):
            return self.tensor(self, value)
        if kind in (list, tuple, torch.Size, set, frozenset):
            return kind, tuple(map(self.read, value))
        if isinstance(value, dict):
            return kind, tuple((self.read(k), self.read(v)) for k, v in value.items())
        if kind is functools.partial:
            return kind, self.read(value.func), self.read(value.args), self.read(value.keywords)
        if kind is types.MethodType and id(value.__self__) in self.order:
            return kind, self.order[id(value.__self__)], id(value.__func__)
        self.referents.append(value)
        if id(value) in self.order:
            return kind, self.order[id(value)]
        if not (self.objects and all_in_dict(value)):
            return kind, id(value)
        self.nth(value)
        self.objects -= 1
        state = self.read(value.__dict__)
        self.objects += 1
        return kind, state

    def module(self, module: nn.Module) -> Hashable:
        module = unwrapped(module)
        if id(module) in self.order:
            return self.order[id(module)]
        self.nth(module)
        state = module.__dict__
        facts: list[Hashable] = [(k, self.read(v)) for k, v in state.items() if k not in MODULE_FIELDS]
        if any(not foreign(h) for k in ("_forward_hooks", "_forward_pre_hooks") for h in state[k].values()):
            facts.append(id(module))  # a hook may do anything, so no other module is equal
        tensors = [
            (k, None if t is None else (tuple(t.shape), t.dtype, t.device, t.requires_grad, type(t), self.nth(t)))
            for group in ("_parameters", "_buffers")
            for k, t in state[group].items()
        ]
        facts += [contents(t) for t in state["_buffers"].values() if self.buffers and t is not None]
        children = [(k, None if m is None else self.module(m)) for k, m in state["_modules"].items()]
        return type(module), tuple(facts), tuple(tensors), tuple(children)


def contents(buffer: Tensor) -> Hashable:
    """The numbers of a buffer if they are few, else its identity: two masks of one shape may differ."""
    if buffer.is_meta or isinstance(buffer, FakeTensor):
        return None
    return tuple(buffer.flatten().tolist()) if buffer.numel() <= SMALL else id(buffer)


def fingerprint(module: nn.Module, buffers: bool = False) -> Hashable:
    """The state that a module's forward depends on, without numbers of tensors and hooks of a distributed run.

    buffers: include the numbers of its buffers, for a forward that has data.
    """
    # a tensor attribute that is not a buffer keeps its data in a recording
    return _Reader(lambda _, t: ("tensor", id(t)), OBJECTS, buffers).module(module)


def alike(modules: Iterable[nn.Module]) -> list[list[nn.Module]]:
    """The modules, grouped by fingerprint."""
    groups: dict[Hashable, list[nn.Module]] = {}
    for module in modules:
        groups.setdefault(fingerprint(module), []).append(unwrapped(module))
    return list(groups.values())


def call_key(args: Any, kwargs: Any) -> tuple[Hashable, list[Any]]:
    """The key of a call, which ignores its tensors' numbers; and objects that must live as long as the key."""

    def described(reader: _Reader, t: Tensor) -> Hashable:
        storage = t.untyped_storage()
        return (
            tuple(t.shape), t.stride(), t.storage_offset(), t.dtype, t.device, t.requires_grad, t.is_leaf, type(t),
            storage.nbytes(), reader.nth(t), reader.order.setdefault(storage_id(storage), len(reader.order)),
        )  # fmt: skip

    reader = _Reader(described)
    mode = (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        *((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")),
    )
    return (reader.read(args), reader.read(kwargs), mode), reader.referents


class _Outputs(torch.autograd.Function):
    """New fake tensors that autograd sees as computed from the inputs of a stage and from its weights (`anchor`)."""

    @staticmethod
    def forward(ctx: Any, like: list[Any], saves: int, anchor: Tensor, *inputs: Tensor) -> Any:
        outputs = _empty(like)
        ctx.save_for_backward(*[torch.empty(0) for _ in range(saves)])
        ctx.mark_non_differentiable(*(t for t, (*_, grad) in zip(outputs, like) if not grad))
        ctx.forms = [(t.shape, t.dtype, t.device) for t in inputs]
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        pairs = zip(ctx.forms, ctx.needs_input_grad[3:])
        return (
            None,
            None,
            None,
            *(grads[0].new_empty(s, dtype=d, device=at) if wanted else None for (s, d, at), wanted in pairs),
        )


def _empty(like: list[Any]) -> tuple[Tensor, ...]:
    return tuple(torch.empty_strided(*place, **kind) for *place, kind, _ in like)


@dataclass
class StageOutput:
    """A recipe for a stage's output, to be made from the tensors of another call."""

    referents: list[Any]
    spec: Any  # the tree of the output
    values: list[Any]  # for each leaf: its value, unless it is a tensor
    tensors: list[int | None]  # for each leaf: the number of its tensor among inputs and new tensors
    like: list[Any]  # for each new tensor: size, strides, dtype and device, and whether it requires grad
    saves: int = 0  # tensors that the activation checkpoint around the stage saved in it

    def make(self, inputs: list[Tensor]) -> Any:
        """The output of a call with these inputs."""
        anchored = any(grad for *_, grad in self.like)
        anchor = torch.empty(0, requires_grad=True)
        outputs = _Outputs.apply(self.like, self.saves, anchor, *inputs) if anchored else _empty(self.like)
        every = (*inputs, *outputs)
        leaves = [value if at is None else every[at] for value, at in zip(self.values, self.tensors)]
        return pytree.tree_unflatten(leaves, self.spec)


def recipe(output: Any, inputs: list[Tensor], referents: list[Any]) -> StageOutput | None:
    """A recipe for this output; None if it has anything but plain new tensors, inputs and values."""
    leaves, spec = pytree.tree_flatten(output)
    new, every = StageOutput(referents, spec, [], [], []), list(inputs)
    storages = {storage_id(t.untyped_storage()) for t in inputs}
    for leaf in leaves:
        at = next((i for i, t in enumerate(every) if t is leaf), None)
        if at is None and isinstance(leaf, Tensor):
            storage = leaf.untyped_storage()
            dense = storage.nbytes() == leaf.numel() * leaf.element_size() and leaf.storage_offset() == 0
            if storage_id(storage) in storages or not dense:
                return None
            storages.add(storage_id(storage))
            at = len(every)
            every.append(leaf)
            kind = {"dtype": leaf.dtype, "device": leaf.device}
            new.like.append((tuple(leaf.shape), leaf.stride(), kind, leaf.requires_grad))
        elif at is None and type(leaf) not in CONSTANTS:
            return None
        new.values.append(leaf if at is None else None)
        new.tensors.append(at)
    return new


def once(
    groups: Iterable[Iterable[nn.Module]],
    first: Callable[[list[Tensor], list[Tensor]], Any],
    repeat: Callable[[Any, list[Tensor], list[Tensor]], None],
) -> None:
    """Let equal calls of a group's modules, which are on fake tensors, run once: their forwards are replaced.

    `first(inputs, outputs)` is called for a call that ran and returns a note; `repeat(note, inputs, outputs)` is called
    for a call that did not run, with outputs made like those of the first.
    """
    known: dict[Hashable, tuple[StageOutput, Any]] = {}

    def wrapped(forward: Callable[..., Any], twin: int) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            called, referents = call_key(args, kwargs)
            frame = checkpoint_frame()
            called = called, frame is None
            saved = 0 if frame is None else saved_in(frame)
            inputs = tensors_in((args, kwargs))
            if (entry := known.get((twin, called))) is not None:
                output = entry[0].make(inputs)
                repeat(entry[1], inputs, tensors_in(output))
                return output
            before = [version(t) for t in inputs]
            output = forward(*args, **kwargs)
            note, stage_output = first(inputs, tensors_in(output)), recipe(output, inputs, referents)
            if stage_output is not None and before == [version(t) for t in inputs]:  # a write would not be repeated
                stage_output.saves = 0 if frame is None else saved_in(frame) - saved
                known[twin, called] = stage_output, note
            return output

        return run

    for twin, group in enumerate(groups):
        for module in group:
            module.forward = wrapped(module.forward, twin)
