"""Repeated layers: two of each kind run, and the others return their arguments."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from dsp.core.equal_modules import fingerprint
from dsp.discovery.calls import ModuleCall, known
from dsp.stages.stage import clean
from dsp.support.formatting import number_of
from dsp.support.private import pytree
from dsp.support.tensors import tensors_in
from dsp.verify.slices import copied

SAMPLES = 2


class Repeats:
    """The skipped layers of a model, and for each the path of the layer that represents it.

    A list of layers is a ModuleList or a Sequential. Its layers with one `fingerprint` are alike if each is called
    once, with tensors of the same shapes, and returns tensors of the shapes that it was given. They are skipped in
    place, in `model` and in its `copies`; there they share the submodules of a layer that runs.
    """

    def __init__(
        self, model: nn.Module | None = None, arguments: tuple[Any, Any] = ((), {}), copies: Collection[nn.Module] = ()
    ) -> None:
        self.first: dict[str, str] = {}
        groups = {} if model is None else layers(model)
        repeated = [group for group in groups.values() if len(group) > SAMPLES]
        if model is None or not repeated:
            return
        calls: dict[int, list[Passed | None]] = {id(layer): [] for group in repeated for _, layer in group}
        handles = [
            layer.register_forward_hook(lambda m, a, k, out: calls[id(m)].append(passed(a, k, out)), with_kwargs=True)
            for group in repeated
            for _, layer in group
        ]
        args, kwargs = copied(*arguments)
        try:
            model(*args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()
        for group in repeated:
            runs, first = [calls[id(layer)] for _, layer in group], group[0][0]
            like = runs[0][0] if len(runs[0]) == 1 else None
            if like is not None and all(m == [like] for m in runs):
                for path, layer in group[SAMPLES:]:
                    self.first[path] = first
                    skip(layer, like)
                    for twin in copies:  # drop the copy's own submodules, which are never called
                        copy = twin.get_submodule(path)
                        copy.__dict__.update(twin.get_submodule(first).__dict__)
                        skip(copy, like)

    def everywhere(self, paths: Iterable[str]) -> dict[str, str]:
        """Each path mapped to itself, and the same paths in skipped layers mapped to the path that ran."""
        mapping = {path: path for path in paths}
        for layer, first in sorted(self.first.items(), key=lambda pair: -pair[0].count(".")):  # innermost first
            for path, ran in list(mapping.items()):
                if path == first or path.startswith(first + "."):
                    mapping[layer + path[len(first) :]] = ran
        return mapping

    def notes(self) -> list[str]:
        """The layers that were not verified, one line for each kind."""
        kinds: dict[str, list[str]] = {}
        for path, first in self.first.items():
            kinds.setdefault(first, []).append(path)
        lines = []
        for first, paths in kinds.items():
            ends = " to ".join(dict.fromkeys((paths[0], paths[-1])))
            lines.append(f"{number_of(len(paths), 'layer')}, {ends}, not run: taken to be as {first}")
        return lines

    def keeps_dims(self, root: ModuleCall) -> bool:
        """Tell whether layers that represent skipped ones keep each dim in its place, as the skipped ones do."""
        firsts = set(self.first.values())
        for node in root.walk():
            if node.path in firsts:
                inputs = [known(axes) for axes in node.inputs]
                if any(known(axes) not in inputs for axes in node.outputs):
                    return False
        return True


def layers(model: nn.Module) -> dict[Any, list[tuple[str, nn.Module]]]:
    """The layers of each list with their paths, in groups of one list and fingerprint."""
    groups: dict[Any, list[tuple[str, nn.Module]]] = {}
    for path, parent in model.named_modules():
        if isinstance(parent, (nn.ModuleList, nn.Sequential)):
            for name, layer in parent.named_children():
                if any(True for _ in layer.children()) and any(True for _ in layer.parameters()):
                    group = groups.setdefault((path, fingerprint(layer, buffers=True)), [])
                    group.append((clean(f"{path}.{name}".lstrip(".")), layer))
    return groups


# a layer's call: shapes and dtypes of its arguments, the argument like each result, the structure of the output
Passed = tuple[Any, tuple[int, ...], Any]


def passed(args: Any, kwargs: Mapping[str, Any], output: Any) -> Passed | None:
    """The description of a layer's call; None if a result has no argument of its shape and dtype."""
    inputs = [(tuple(t.shape), t.dtype) for t in tensors_in((args, kwargs))]
    leaves, spec = pytree.tree_flatten(output)
    free, places = list(range(len(inputs))), list[int]()
    for leaf in leaves:
        kind = (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else None
        place = next((i for i in free if inputs[i] == kind), None)
        if place is None:
            return None
        free.remove(place)
        places.append(place)
    return (inputs, tuple(places), spec) if places else None


class Skipped:
    """A layer that returns its arguments."""


def skip(layer: nn.Module, like: Passed) -> None:
    """Make a layer return its arguments; it keeps its submodules and attributes, which are no longer called."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        tensors = tensors_in((args, kwargs))
        return pytree.tree_unflatten([tensors[i] for i in like[1]], like[2])

    layer.__class__ = type(type(layer).__name__, (Skipped, type(layer)), {"forward": forward})


def runs(model: nn.Module) -> Iterator[nn.Module]:
    """The modules that are called: all but skipped layers and the modules inside them."""
    if not isinstance(model, Skipped):
        yield model
        for child in model.children():
            yield from runs(child)
