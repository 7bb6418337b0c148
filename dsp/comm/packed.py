"""Several switches in one all-to-all, some of which travel in a format of fewer bits."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from dsp.comm.exchange import InUnits, exchanged, joint_plan, packed
from dsp.comm.formats import Format
from dsp.comm.wire import SAME, format_of


def by_value(count: int, of: Sequence[int]) -> list[list[int]]:
    """Tensors grouped by the value that they are pieces of, `of[i]`; without `of`, each tensor is a group."""
    return [list(same) for _, same in groupby(range(count), of.__getitem__ if of else None)]


def switch_packed(
    xs: list[Tensor], src: list[int], dst: list[int], src_size: list[int], group: str, of: Sequence[int], wire: str
) -> list[Tensor]:
    """Several switches in one all-to-all, each in its format. Tensors of one number in `of` are packed as one."""
    plans, forms, rooms, raw, comes, goes = [], [], [], [], [], []
    for own in by_value(len(xs), of):
        some = [xs[i] for i in own]
        where = [[v[i] for i in own] for v in (src, dst, src_size)]
        plans.append(plan := joint_plan(some, where[0], where[1], where[2], group))
        forms.append(form := format_of(wire, some[0].dtype) or Format(SAME, some[0].dtype))
        rooms.append(some[0].new_empty(sum(plan.out_splits)))
        sent, out_splits, in_splits = packed(form, plan.pack(some), plan.out_splits, plan.in_splits, group)
        raw.append(sent.split(in_splits))
        comes.append(out_splits)
        goes.append(in_splits)
    send = torch.cat([part for to_rank in zip(*raw) for part in to_rank])
    dealing = InUnits([(plan, form.nbytes) for plan, form in zip(plans, forms)])
    received = exchanged(send, [*map(sum, zip(*comes))], [*map(sum, zip(*goes))], group, None, dealing)
    came = received.split([size for of_rank in zip(*comes) for size in of_rank])
    found: list[Tensor] = []
    for k, (plan, form, room) in enumerate(zip(plans, forms, rooms)):
        found += plan.unpack(form.unpack(torch.cat(came[k :: len(plans)]), plan.out_splits, room))
    return found
