"""Cores: submodules of a stage that mix places, such as softmax attention, and how a method replaces their forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dsp.comm.layout import Axis
from dsp.embedded.grid import Grid
from dsp.embedded.place import PLACE, placed
from dsp.planner import chunk_sizes
from dsp.stages.methods import CommBytes, RankPart
from dsp.stages.notation import NotationError
from dsp.stages.stage import Stage
from dsp.support.private import Recompute, backward_pass, checkpoint_frame


def place_of_call() -> RankPart | None:
    """The place of the running stage call, in its recomputation too; None outside a parallelized model.

    An activation checkpoint inside a stage's hooks, as in train.py, recomputes the stage in backward without the hooks.
    """
    place = PLACE.get()
    if place is None and backward_pass() != -1:
        raise RuntimeError(
            "an activation checkpoint that dsp cannot follow recomputes a stage with communication inside; use "
            "torch.utils.checkpoint with use_reentrant=False, around a stage or a block of the model"
        )
    frame = checkpoint_frame()
    if place is not None and frame is not None and PLACE not in Recompute.keys(frame):
        Recompute(frame, PLACE, lambda: placed(place))
    return place


class Distributed:
    """A `StageMethod`: a submodule of a stage, whose forward a method replaces while the stage is sharded."""

    label = ""
    cut = 0  # number of weight elements that are sharded over ranks

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name, self.module = name, module

    def sends(self, args: Any, kwargs: Any, along: str | None, sizes: Mapping[str, int], n: int) -> CommBytes:
        raise NotImplementedError

    def load(self, args: Any, kwargs: Any, along: str | None, sizes: Mapping[str, int], n: int) -> float:
        return 1.0

    def run(self, place: RankPart, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The module's output for this rank's shard of its inputs; `forward` is the module's own."""
        raise NotImplementedError

    def alone(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The output for full inputs, in a call outside the parallelized model."""
        return forward(*args, **kwargs)

    def install(self, axis: Axis) -> None:
        """Replace the module's forward, once, even if several models (for training and sampling) share the module."""
        forward = self.module.__dict__.get("forward")
        if isinstance(forward, _Forward):
            if type(forward.method) is not type(self):
                raise ValueError(f"{self.name!r} is already run by {forward.method.label}; build a new model")
            return
        self.module.forward = _Forward(self, self.module.forward)


class _Forward:
    def __init__(self, method: Distributed, forward: Callable[..., Any]) -> None:
        self.method, self.forward = method, forward

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        place = place_of_call()
        if place is None:
            return self.method.alone(self.forward, args, kwargs)
        return self.method.run(place, self.forward, args, kwargs)


class AttentionCore(Distributed):
    """Softmax attention of queries, keys and values, each (batch, place, heads, channels).

    Its pattern, in the stage notation, computes over the places and names the heads: "(b t) [s] (g r) [e], (b t) [s] g
    [e], (b t) [s] g [e] -> (b t) [s] (g r) [e]". The module's parameters are the same for all heads; its attribute
    `causal` is True if no place sees a later one.
    """

    @classmethod
    def of(cls, core: Stage, stage: Stage, along: str) -> AttentionCore:
        """An instance that runs this core by the method."""
        return cls(core, stage, along)

    def __init__(self, core: Stage, stage: Stage, along: str) -> None:
        super().__init__(core.name, core.module)
        self.along = along
        self.grid: Grid | None = None
        pattern = core.pattern
        layouts = [p.axes for p in pattern.inputs]
        if len(layouts) != 3 or any(len(axes) != 4 or axes[1] != (along,) for axes in layouts):
            raise NotationError(
                f"core {core.name!r}: expected patterns of queries, keys and values, each (batch, {along}, heads, "
                f"channels) with {along} in no fold, got '{pattern.text}'"
            )
        heads = {name for axes in layouts for name in axes[2]}
        if heads & pattern.computed or heads & set(stage.pattern.inputs[0].names):
            raise NotationError(
                f"core {core.name!r}: expected the heads as third axis, outside brackets and under names that are not "
                f"in its stage '{stage.pattern.text}', got '{pattern.text}'"
            )

    def bind(self, args: Any, kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
        tensors = [*args, *kwargs.values()]
        if len(tensors) != 3 or any(not isinstance(t, Tensor) for t in tensors):
            extra = ", ".join(k for k in kwargs) or f"{len(tensors)} arguments"
            raise NotationError(
                f"core {self.name!r}: {self.label} takes only queries, keys and values, and got {extra}: a mask or a "
                "bias over the sharded dim is not supported; use method='dsp'"
            )
        return tensors[0], tensors[1], tensors[2]

    def sends(self, args: Any, kwargs: Any, along: str | None, sizes: Mapping[str, int], n: int) -> CommBytes:
        if along != self.along or n == 1:
            return CommBytes()
        q, k, v = self.bind(args, kwargs)
        if self.grid is None:
            return self.price(q, k, v, chunk_sizes(q.shape[1], n))
        dim, switch, within = self.grid.factors(sizes, n)
        if within == 1:
            return CommBytes()
        batch = len(q) // sizes[dim] * chunk_sizes(sizes[dim], switch)[0]  # attention's batch is (b t)
        return self.price(q[:batch], k[:batch], v[:batch], self.grid.parts(sizes, n))

    def price(self, q: Tensor, k: Tensor, v: Tensor, parts: Sequence[int]) -> CommBytes:
        """The traffic of the busiest rank; parts: the number of places on each rank."""
        raise NotImplementedError

    def run(self, place: RankPart, forward: Callable[..., Tensor], args: Any, kwargs: Any) -> Tensor:
        if place.dim != self.along or len(place.peers.ranks) == 1:
            return forward(*args, **kwargs)
        q, k, v = self.bind(args, kwargs)
        rows = q.shape[1]
        if place.local_size == 0:  # drop the dummy row: no other rank may see it
            q, k, v = (x[:, :0] for x in (q, k, v))
        y = self.attend(place, forward, q, k, v)
        return y if y.shape[1] == rows else torch.cat([y, y.new_zeros(len(y), rows, *y.shape[2:])], 1)

    def attend(self, place: RankPart, forward: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention for this rank's places: q (b n h e), k and v (b n g e) -> (b n h e)."""
        raise NotImplementedError
