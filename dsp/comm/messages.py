"""Messages between ranks of a group: routes consist of them, and links are measured by them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor

Message = tuple[int, Tensor]  # the other rank, by its number in the group; the tensor to send, or to receive into


def messages(sends: Iterable[Message], receives: Iterable[Message], group: Any) -> list[Any]:
    """Begin to send and receive flat tensors; return works to wait for. Both sides know the sizes: empty tensors are
    not sent. Receives come first, as in `dsp.support.private.all_to_all`."""
    ops = [dist.P2POp(dist.irecv, t, group=group, group_peer=peer) for peer, t in receives if t.numel()]
    ops += [dist.P2POp(dist.isend, t, group=group, group_peer=peer) for peer, t in sends if t.numel()]
    return dist.batch_isend_irecv(ops) if ops else []
