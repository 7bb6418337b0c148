"""A snapshot of the Python state that a model's code can reach, to restore it.

A forward may keep values: in an object with a table, a closure, a functools cache, a dict of a module, a counter. When
dsp runs a forward to plan or to check, the user must not find what that run left there: tensors without data, or of
another dtype. A `World` notes, before such a run, every object that the model's code names and what it holds in turn,
and restores them afterwards. `uncollected` leaves its garbage be meanwhile.
"""

from __future__ import annotations

import builtins
import functools
import gc
import random
import sys
from collections import UserDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np
import torch
from torch import Tensor, nn

from dsp.support.private import children_of, version_of

# packages whose state a forward does not change in a way that matters, or whose threads change it at any time
LIBRARIES = frozenset(
    """
    torch numpy dsp einops triton huggingface_hub omegaconf tqdm wandb tensorboard
    pytest _pytest pluggy xdist execnet
    """.split()
) | frozenset(sys.stdlib_module_names)
HOLDERS = (SimpleNamespace, UserDict, WeakKeyDictionary, WeakValueDictionary)  # containers of the standard library
ATOMS = frozenset({int, float, complex, bool, str, bytes, type(None), type(...), BuiltinFunctionType})
CONTAINERS = (dict, list, set, deque)
ALWAYS = frozenset("forward __call__ __init__ __getattr__ __getitem__ __enter__ __exit__ __iter__ __len__".split())
LONG = 100_000  # a container with more entries is not searched
MISSING = object()
METHODS = (FunctionType, property, functools.cached_property, staticmethod, classmethod, GetSetDescriptorType)
CACHED = type(functools.lru_cache(lambda: None))


class World:
    """The state that the code and the attributes of `roots` reach. As a context manager it restores it at the end.

    data: restore the elements of tensors that were written in place, too. Tensors of one element are always restored,
    since a forward without data writes them as well. skip: tensors to leave alone, such as the parameters and buffers
    of models that run as copies.
    """

    def __init__(self, *roots: Any, data: bool = False, skip: Iterable[Tensor] = ()) -> None:
        self.data, self.seen = data, {id(t): t for t in skip}
        self.undo: list[Callable[[], None]] = []
        self.names, self.classes = set(ALWAYS), list[dict[str, Any]]()  # names that this code reads of objects
        waiting = deque(roots)
        while waiting:
            node = waiting.popleft()
            if type(node) not in ATOMS and id(node) not in self.seen:
                self.seen[id(node)] = node
                waiting.extend(self.hold(node))

    def __enter__(self) -> World:
        self.generators = random.getstate(), np.random.get_state()
        return self

    def __exit__(self, *exc: object) -> None:
        random.setstate(self.generators[0])
        np.random.set_state(self.generators[1])
        for undo in self.undo:
            undo()

    def hold(self, it: Any) -> Iterator[Any]:
        """Note what `it` holds, and yield the objects that may hold more."""
        if isinstance(it, Tensor):
            if (self.data or it.numel() == 1) and not it.is_meta:
                self.undo.append(functools.partial(rewritten, it, version_of(it), it.detach().clone()))
        elif isinstance(it, (tuple, frozenset)):
            yield from it
        elif isinstance(it, (FunctionType, MethodType, functools.partial, CACHED, CodeType)):
            yield from self.hold_callable(it)
        elif isinstance(it, (property, functools.cached_property, staticmethod, classmethod)):
            yield from (getattr(it, name, None) for name in ("fget", "fset", "func", "__func__"))
        elif isinstance(it, type):
            if not of_library(it):
                yield from self.hold_class(it)
        elif isinstance(it, CellType):
            self.undo.append(functools.partial(refilled, it, contents(it)))
            yield contents(it)
        elif isinstance(it, ContextVar):
            self.undo.append(functools.partial(rebind, it, it.get(MISSING)))
            yield it.get(None)
        elif not isinstance(it, ModuleType):
            yield from self.hold_object(it)

    def hold_callable(self, it: Any) -> Iterator[Any]:
        if isinstance(it, MethodType):
            yield from (it.__self__, it.__func__)
        elif isinstance(it, functools.partial):
            yield from (it.func, it.args, it.keywords)
        elif isinstance(it, CACHED):
            if not of_library(it):
                self.undo.append(functools.partial(emptied, it, it.cache_info().misses))
                yield it.__wrapped__
                yield from cached(it)
        elif not of_library(it):
            yield from it.__closure__ or ()
            yield from (it.__defaults__, it.__kwdefaults__, it.__dict__)
            yield from self.hold_globals(it.__globals__, it.__code__)

    def hold_globals(self, scope: dict[str, Any], code: CodeType) -> Iterator[Any]:
        """Note what the code of a function names: globals, names of modules, and methods of any class."""
        names, waiting = set[str](), [code]
        while waiting:
            now = waiting.pop()
            names.update(now.co_names)
            waiting += [c for c in now.co_consts if isinstance(c, CodeType)]
        for name in names:
            value = scope.get(name, MISSING)
            if value is not MISSING or not hasattr(builtins, name):
                self.undo.append(functools.partial(rebound, scope, name, value))
            if isinstance(value, ModuleType):
                if not of_library(value):
                    yield from self.hold_names(value.__dict__, names)
            else:
                yield value
        new = names - self.names
        self.names |= new
        for namespace in self.classes if new else ():
            yield from (namespace[name] for name in new & namespace.keys())

    def hold_names(self, scope: dict[str, Any], names: Iterable[str]) -> Iterator[Any]:
        for name in names:
            if name in scope:
                self.undo.append(functools.partial(rebound, scope, name, scope[name]))
                yield scope[name]

    def hold_class(self, it: type) -> Iterator[Any]:
        namespace = dict(it.__dict__)
        self.undo.append(functools.partial(redefined, it, namespace))
        self.classes.append(namespace)
        yield from (namespace[name] for name in self.names & namespace.keys())
        yield from (v for v in namespace.values() if not isinstance(v, METHODS))
        yield from it.__bases__

    def hold_object(self, it: Any) -> Iterator[Any]:
        if isinstance(it, CONTAINERS):
            if len(it) <= LONG:
                yield from it.values() if isinstance(it, dict) else it
            self.undo.append(functools.partial(refilled_container, it, entries(it)))
        kind = type(it)
        if of_library(kind) and not isinstance(it, (nn.Module, *HOLDERS)):
            return
        yield kind
        state = getattr(it, "__dict__", None)
        if isinstance(state, dict):
            yield state
        for name in (n for c in kind.__mro__ for n in slots(c)):
            with suppress(AttributeError):
                value = getattr(it, name, MISSING)
                self.undo.append(functools.partial(reset, it, name, value))
                yield value


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage is collected meanwhile, as in what makes many objects that stay: it would set off full collections,
    and each goes over all objects of torch, for a third of a second."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def cached(it: Any) -> Iterator[Any]:
    """The values that a functools cache holds: by itself if it has a size, else in a dict."""
    for referent in gc.get_referents(it) if it.cache_info().currsize <= LONG else ():
        yield from referent.values() if type(referent) is dict else (referent,)


def of_library(it: Any) -> bool:
    name = it.__name__ if isinstance(it, ModuleType) else getattr(it, "__module__", None)
    return isinstance(name, str) and name.partition(".")[0] in LIBRARIES


def slots(kind: type) -> Iterable[str]:
    names = kind.__dict__.get("__slots__", ())
    return [n for n in ((names,) if isinstance(names, str) else names) if n not in ("__dict__", "__weakref__")]


def contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return MISSING


def refilled(cell: CellType, value: Any) -> None:
    if contents(cell) is value:
        return
    if value is MISSING:
        del cell.cell_contents
    else:
        cell.cell_contents = value


def rebind(var: ContextVar[Any], value: Any) -> None:
    if var.get(MISSING) is not value:
        var.set(None if value is MISSING else value)


def rebound(scope: dict[str, Any], name: str, value: Any) -> None:
    if scope.get(name, MISSING) is value:
        return
    if value is MISSING:
        del scope[name]
    else:
        scope[name] = value


def emptied(cache: Any, misses: int) -> None:
    if cache.cache_info().misses != misses:  # its entries cannot be told apart
        cache.cache_clear()


def redefined(kind: type, namespace: dict[str, Any]) -> None:
    now = dict(kind.__dict__)
    for name in now.keys() | namespace.keys():
        with suppress(AttributeError, TypeError):
            if name not in namespace:
                delattr(kind, name)
            elif now.get(name, MISSING) is not namespace[name]:
                setattr(kind, name, namespace[name])


def reset(it: Any, name: str, value: Any) -> None:
    if getattr(it, name, MISSING) is not value:
        with suppress(AttributeError, TypeError):
            delattr(it, name) if value is MISSING else setattr(it, name, value)


def entries(it: Any) -> list[Any]:
    return list(it.items() if isinstance(it, dict) else it)


def refilled_container(it: Any, items: list[Any]) -> None:
    now, pairs = entries(it), isinstance(it, dict)
    if len(now) != len(items) or any(
        a is not b and not (pairs and a[0] is b[0] and a[1] is b[1]) for a, b in zip(now, items)
    ):
        it.clear()
        (it.update if isinstance(it, (dict, set)) else it.extend)(items)


def rewritten(t: Tensor, version: int, numbers: Tensor) -> None:
    if version_of(t) != version:
        t.detach().copy_(numbers)


# --- paths from the model or its inputs ---

Path = tuple[tuple[str, Any], ...]  # steps from the model or an argument: attributes and items
DEEP = 8  # steps of a path, at most


def search(wanted: Callable[[Any], bool], *roots: Any) -> Iterator[tuple[Path, Any]]:
    """The objects that are wanted, each with a path to it from `roots`, through attributes, lists and dicts."""
    waiting, seen = deque[tuple[Path, Any]]([((), roots)]), set[int]()
    while waiting:
        path, it = waiting.popleft()
        if id(it) in seen:
            continue
        if wanted(it):
            seen.add(id(it))
            yield path, it
        elif len(path) < DEEP * (2 if isinstance(it, nn.Module) else 1):
            seen.add(id(it))
            waiting.extend(((*path, step), value) for step, value in steps(it))


def refuse_leaves(inputs: Iterable[Any]) -> None:
    """Raise TypeError if an object among the inputs holds a tensor that is to get a gradient of its own.

    Parameters, whose gradients the caller averages over ranks, and what was computed from these, may be there.
    """
    if not torch.is_grad_enabled():
        return
    waiting, seen = [(it, type(it), 0) for it in inputs if not isinstance(it, Tensor)], set[int]()
    while waiting:
        it, kind, deep = waiting.pop()
        if isinstance(it, Tensor):
            if it.requires_grad and it.is_leaf and not isinstance(it, nn.Parameter):
                raise TypeError(
                    f"an object among the inputs, a {kind.__name__}, holds a tensor of shape {tuple(it.shape)} that "
                    "requires a gradient, but would get only the gradient of this rank's shard: pass such a tensor as "
                    "an argument of its own, or in a list, tuple or dict"
                )
        elif id(it) not in seen and deep < DEEP and not isinstance(it, nn.Module):
            seen.add(id(it))
            waiting.extend((value, kind, deep + 1) for _, value in steps(it))


def steps(it: Any) -> list[tuple[tuple[str, Any], Any]]:
    """The steps from an object to its attributes or items, each with the value found there."""
    if isinstance(it, nn.Module):
        attributes = {k: v for k, v in it.__dict__.items() if k not in ("_parameters", "_modules")}
        return [(("attr", k), v) for k, v in (attributes | children_of(it)).items()]
    if isinstance(it, (list, tuple, deque)):
        return [(("item", i), v) for i, v in enumerate(it)]
    if isinstance(it, Mapping):
        return [(("item", k), v) for k, v in it.items()]
    if isinstance(it, (Tensor, type)) or (of_library(type(it)) and not isinstance(it, SimpleNamespace)):
        return []
    return [(("attr", k), v) for k, v in getattr(it, "__dict__", {}).items()]


def value_at(path: Path, *roots: Any) -> Any:
    """The object at the end of a path; None if the path leads nowhere."""
    it: Any = roots
    try:
        for kind, name in path:
            it = getattr(it, name) if kind == "attr" else it[name]
    except (AttributeError, LookupError, TypeError):
        return None
    return it


def put_at(path: Path, value: Any, *roots: Any) -> None:
    """Replace the object at the end of a path; TypeError where it is in a tuple."""
    owner, (kind, name) = value_at(path[:-1], *roots), path[-1]
    if kind == "attr":
        setattr(owner, name, value)
    else:
        owner[name] = value


def unpicklable() -> TypeError:
    """The error of a pickle of a parallel model."""
    return TypeError(
        "a parallelized model is tied to its process group and cannot be pickled: save its state_dict(), which is that "
        "of the bare model, and parallelize where it is loaded"
    )
