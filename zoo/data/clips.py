"""A data set of clips from a torch Dataset, a list, or any iterable."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from zoo.data.sampling import Clip, frame_range


class Clips:
    """The clips of `items`, each a tensor [c, t, h, w] in [-1, 1], or with its class: (tensor, int) or a dict of `x`
    and `label`.

    items: an object with a length and indexing, as a torch Dataset; any other iterable is read once into a list. All
    clips have the size of the first. classes: their number; None: no classes. Every rank loads complete items and keeps
    its own frames. ValueError: an item is not a clip, or its class is not one of these.
    """

    def __init__(self, items: Iterable[Any], classes: int | None = None) -> None:
        self.items: Any = items if hasattr(items, "__getitem__") and hasattr(items, "__len__") else list(items)
        self.num_classes = classes
        if not len(self):
            raise ValueError(f"{type(items).__name__} has no clips")
        x, _ = self.item(0)
        self.frames, self.shape = x.shape[1], (x.shape[0], x.shape[2], x.shape[3])

    def __len__(self) -> int:
        return len(self.items)

    def item(self, index: int) -> tuple[Tensor, int | None]:
        value = self.items[index]
        if isinstance(value, dict):
            if not value.keys() <= {"x", "label"}:
                raise ValueError(
                    f"item {index}: expected a dict of x and label, got one of {', '.join(map(str, value))}"
                )
            value = value.get("x"), value.get("label")
        x, label = value if isinstance(value, tuple) else (value, None)
        if not isinstance(x, Tensor) or x.ndim != 4 or not x.is_floating_point():
            said = f"a tensor {list(x.shape)} of {x.dtype}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise ValueError(f"item {index}: expected a clip [c, t, h, w] of floating-point numbers, got {said}")
        if self.num_classes is not None and (label is None or not 0 <= int(label) < self.num_classes):
            raise ValueError(f"item {index}: expected a class from 0 to {self.num_classes - 1}, got {label}")
        return x, None if label is None else int(label)

    def clip(self, index: int, epoch: int, frames: range | slice | None = None) -> Clip:
        x, label = self.item(index)
        if x.shape[1] != self.frames or (x.shape[0], *x.shape[2:]) != self.shape:
            wanted = [self.shape[0], self.frames, *self.shape[1:]]
            raise ValueError(f"item {index} is {list(x.shape)} where the first is {wanted}: clips are of one size")
        span = frame_range(frames, self.frames)
        return {"x": x[:, span.start : span.stop].to(torch.float32), "label": label}
