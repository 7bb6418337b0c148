"""The bytes that a rank sends in each collective: a table by op, to which any package may add its ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from dsp.comm.exchange import ExchangePlan, ranks
from dsp.comm.node_routes import DIRECT, ways_of

Sent = Sequence[tuple[str, int, int]]  # by kind, the name under which a collective is counted: calls and bytes
COLLECTIVES: dict[str, Callable[..., Sent]] = {}  # by op: from its arguments to its traffic


def sent(kind: str, plan: ExchangePlan, x: Any) -> Sent:
    """The traffic of one exchange of tensors: all that this rank packs for others, by kind of link if in legs."""
    itemsize = plan.itemsize or (x if isinstance(x, Tensor) else x[0]).element_size()
    (_, ways), (_, rank) = ways_of(plan.group), ranks(plan.group)
    if ways is None or (way := plan.way(itemsize)) == DIRECT:
        return ((kind, 1, itemsize * (sum(plan.in_splits) - plan.in_splits[rank])),)
    legs = ways.legs(way, plan.to_each, rank)
    return [(kind, calls, itemsize * count) for kind, (count, calls) in legs.items()]


def counts(
    kind: str, *names: str, calls: Callable[..., int] | None = None
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Put ops into the table. The decorated function returns the bytes of one call from the op's arguments."""

    def register(nbytes: Callable[..., int]) -> Callable[..., int]:
        def traffic(*args: Any) -> Sent:
            return ((kind, 1 if calls is None else calls(*args), nbytes(*args)),)

        COLLECTIVES.update(dict.fromkeys(names, traffic))
        return nbytes

    return register


def exchange(x: Tensor, out_splits: list[int], in_splits: list[int], group: str, *known: Any) -> Sent:
    return sent("switch", ExchangePlan(group, in_splits, out_splits, *known), x)


COLLECTIVES.update(all_to_all_single=exchange, start=exchange)


@counts("all_gather_into_tensor", "all_gather_into_tensor")
@counts("broadcast", "broadcast")
def everywhere(x: Tensor, *arguments: Any) -> int:
    return x.nbytes * (ranks(arguments[-1])[0] - 1)


@counts("shard_dim_alltoall", "shard_dim_alltoall")
@counts("reduce_scatter_tensor", "reduce_scatter_tensor")
def all_but_one(x: Tensor, *arguments: Any) -> int:
    n, _ = ranks(arguments[-1])
    return x.nbytes * (n - 1) // n
