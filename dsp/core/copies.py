"""Bring operands into the cuts that a node needs. Each copy is made once, for a base and all its views."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsp.comm.layout import Axis, separable
from dsp.comm.moves import Part, gather_local, switch_all
from dsp.comm.observers import RUNNING
from dsp.core.carrier import LOCAL, Carrier, copies_of, plain, shared_base
from dsp.core.record import Layout, Node, Record, Ref


class CopySwitch(NamedTuple):
    base: Carrier
    src: Layout
    dst: Layout


class Copies:
    """The copies that nodes of a run need, on one rank."""

    def __init__(self, record: Record, axis: Axis) -> None:
        self.record, self.axis = record, axis

    def bring(self, node: Node, operands: Sequence[Tensor], needs: Sequence[Layout]) -> list[Tensor]:
        """The parts of a node's operands in the cuts that it needs."""
        RUNNING.set(node)
        switches: list[CopySwitch] = []
        for moved, src, dst in node.moves:  # as planned
            for base in (shared_base(t) for t in operands if isinstance(t, Carrier)):
                if base.ref is moved.ref:
                    self.want(switches, base, dst, (src,))
        for t, need in zip(operands, needs):
            if isinstance(t, Carrier) and t.cut != need:
                base = shared_base(t)
                self.want(switches, base, base_cuts(t.ref, base.ref, need)[1])
        self.make(switches)
        return [self.part(t, need) for t, need in zip(operands, needs)]

    def want(self, switches: list[CopySwitch], base: Carrier, dst: Layout, planned: tuple[Layout, ...] = ()) -> None:
        """Make a copy of a base, or note the switch that makes it: from the copy in the layout that `planned` has (a
        tuple, as None is a layout, too), or, if that is empty, from the nearest."""
        copies = copies_of(base)
        if dst == base.cut or dst in copies or any(s.base is base and s.dst == dst for s in switches):
            return
        src = planned[0] if planned else None if None in copies or base.cut is None else base.cut
        if src != base.cut and src not in copies:
            self.make(switches)
            if src not in copies:
                return
        with differentiable(base):
            local = plain(base) if src == base.cut else copies[src]
            if src is None:
                assert dst is not None
                part = self.axis.narrow(local, dst)
                is_input = base.ref in self.record.inputs.values()
                copies[dst] = part if is_input else part.clone()  # as a view it would keep the full result alive
            elif dst is None:
                copies[None] = gather_local(local, src, base.ref.shape, self.axis)
            elif separable(base.ref.shape, src, dst, self.record.n):
                switches.append(CopySwitch(base, src, dst))
            else:
                self.want(switches, base, None, (src,))
                self.want(switches, base, dst, (None,))

    def make(self, switches: list[CopySwitch]) -> None:
        """Make the switches noted; small ones share a call."""
        if not switches:
            return
        with differentiable(*[base for base, *_ in switches]):
            parts = [Part(plain(b) if s == b.cut else copies_of(b)[s], s, d, b.ref.shape) for b, s, d in switches]  # type: ignore[arg-type]
            for (base, _, dst), local in zip(switches, switch_all(parts, self.axis)):
                copies_of(base)[dst] = local
        switches.clear()

    def part(self, t: Tensor, need: Layout) -> Tensor:
        """This rank's part of a tensor, in a cut that exists by now."""
        if not isinstance(t, Carrier):
            return t if need is None else self.axis.narrow(t, need)
        if t.cut == need:
            return plain(t) if t.base is None or not without_gradient(t) else plain(t).detach()
        base = shared_base(t)
        cut, at = base_cuts(t.ref, base.ref, need)
        if cut is None and need is not None:  # no cut of the base shows the view so
            return self.axis.narrow(self.part(t, None), need)
        local = self.view(t.ref, base.ref, cut, plain(base) if at == base.cut else copies_of(base)[at])
        return local if t is base or has_gradient(t) else local.detach()

    def view(self, ref: Ref, source: Ref, cut: Layout, local: Tensor) -> Tensor:
        """The part of a view of `source`, taken from the part that this has if the base has `cut`."""
        if ref is source or ref.maker is None:
            return local
        parent = ref.maker.operands[0]
        assert isinstance(parent, Ref)
        local = self.view(parent, source, cut, local)
        return self.record.rules.view(ref.maker, self.axis, parent.cut_under(cut), local)


def base_cuts(ref: Ref, source: Ref, cut: Layout) -> tuple[Layout, Layout]:
    """The cut of its base under which a tensor has `cut`, None if there is none; and that of `source`, from which a run
    takes it: the base, or a view that was detached or that a checkpoint kept as its argument."""
    if ref.maker is None:  # it is the base
        base = cut if cut in ref.base.cuts else None
        return base, base
    base = ref.base_cut(cut)
    return base, source.cut_under(base)


def has_gradient(t: Carrier) -> bool:
    """Tell whether autograd made a tensor, or what was written into it since: a view that was made without gradient has
    none in another layout either."""
    if t.now is not None:
        return has_gradient(t.now)
    with LOCAL():
        return t.grad_fn is not None


def without_gradient(t: Carrier) -> bool:
    """Tell whether a view was made without gradient of a tensor with one, of which torch says that it requires one."""
    with LOCAL():
        return t.requires_grad and t.grad_fn is None


def differentiable(*bases: Carrier) -> Any:
    """Enable autograd for copies that are kept, if a source has a gradient."""
    return nullcontext() if torch.is_grad_enabled() or not any(b.requires_grad for b in bases) else torch.enable_grad()
