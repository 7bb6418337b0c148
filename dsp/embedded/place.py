"""The place of a stage call: how a method's modules inside it know this rank's part, and a stage's call in a place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from dsp.comm.layout import Axis
from dsp.core.carrier import Carrier, first_carrier
from dsp.core.record import Layout
from dsp.core.run import with_dummy
from dsp.core.torch_calls import GlueError
from dsp.core.writes import INTO_PART
from dsp.stages.methods import Peers, RankPart, Received
from dsp.stages.stage import Option, Stage
from dsp.support.tensors import map_tensors, tensors_in, version

INTO_COPY = (
    "{who} writes in place into its argument {param!r}, of which its method passed it a copy in another layout: the "
    "write would be lost. Use an out-of-place operation"
)
PLACE: ContextVar[RankPart | None] = ContextVar("dsp_place", default=None)


@contextmanager
def placed(place: RankPart | None) -> Iterator[None]:
    token = PLACE.set(place)
    try:
        yield
    finally:
        PLACE.reset(token)


class PlacedStage:
    """The local function of an offer of a stage whose modules communicate: its call, in the place of this rank."""

    def __init__(self, stage: Stage, option: Option) -> None:
        self.stage, self.option = stage, option

    def __call__(self, axis: Axis, func: Any, args: Any, kwargs: Any) -> Callable[..., Any]:
        """A function with the arguments of the stage's module, `func`; args and kwargs: those of one call, with tensors
        of global shape."""
        stage, option = self.stage, self.option
        peers = Peers((axis.rank,), (1,)) if option.name is None else Peers.all(option.size, axis.size)
        place = RankPart(axis, option.name, peers)
        if stage.around is not None and option.name is not None:
            return WrappedCall(stage, option, place, func, args, kwargs)

        def run(*args: Any, **kwargs: Any) -> Any:
            with placed(place):
                return func(*args, **kwargs)

        return run


class WrappedCall:
    """The call of a stage in the layout of a method around it. args, kwargs: those of one call, of global shape."""

    def __init__(
        self, stage: Stage, option: Option, place: RankPart, call: Callable[..., Any], args: Any, kwargs: Any
    ) -> None:
        self.stage, self.cuts, self.place, self.call = stage, option.cuts, place, call
        _, bound = stage.signature.bind(args, kwargs)
        carrier = first_carrier([b.tensor for b in bound])
        assert carrier is not None
        self.sizes = stage.sizes(bound, carrier.record.sizes)
        self.shapes = [tuple(b.tensor.shape) for b in bound]
        self.carried = [isinstance(b.tensor, Carrier) for b in bound]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        around = self.stage.around
        assert around is not None
        call, bound = self.stage.signature.bind(args, kwargs)
        outer = [Received(self.part(b.tensor, c), c, b.pattern, s) for b, c, s in zip(bound, self.cuts, self.shapes)]
        place, inner = around.enter(self.place, self.sizes, outer)
        locals_ = [r.local if place.local_size else with_dummy(r.local, r.cut) for r in inner]
        for b, t in zip(bound, locals_):
            call.replace(b, t)
        versions = [*map(version, locals_)]
        with placed(place):
            out = self.call(*call.args, **call.kwargs)
        for k, (x, r) in enumerate(zip(outer, inner)):
            if r.local is not x.local and version(locals_[k]) != versions[k]:
                text = INTO_COPY if self.carried[k] else INTO_PART
                raise GlueError(text.format(who=self.stage.label, param=bound[k].param))
        results = tensors_in(out)
        return map_tensors(out, around.leave(place, self.sizes, self.stage.outputs(results), results))

    def part(self, t: Tensor, cut: Layout) -> Tensor:
        """This rank's part, without a dummy row."""
        return t if self.place.local_size or cut is None else t.narrow(cut.dim, 0, 0)
