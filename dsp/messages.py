"""Messages of a rank to some others of its group: routes are made of them, and the links that they take measured."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor

Message = tuple[
    int, Tensor
]  # the other rank, by its number in the group; and what goes there, or a room for what comes


def messages(sends: Iterable[Message], receives: Iterable[Message], group: Any) -> list[Any]:
    """Send and receive flat tensors; returned are works to be waited for. Both sides know the sizes: nothing is sent of
    an empty one."""
    ops = [dist.P2POp(dist.isend, t, group=group, group_peer=peer) for peer, t in sends if t.numel()]
    ops += [dist.P2POp(dist.irecv, t, group=group, group_peer=peer) for peer, t in receives if t.numel()]
    return dist.batch_isend_irecv(ops) if ops else []
