"""What a mesh axis runs on: links, memory and speed of a rank; and what a plan then takes in seconds.

A collective in which the busiest rank sends `nbytes` takes ``alpha + nbytes / bandwidth`` (Hockney's model): alpha is
latency, what it takes however little it carries. Compute is counted FLOPs over the FLOP/s that a rank achieves. Nothing
overlaps. This is arithmetic for decisions (how many ranks, are they worth it), not a prediction to the percent:
operations limited by memory, data loading, and the collectives of data parallelism are not in it.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

US, GB = 1e-6, 1e9


@dataclass(frozen=True)
class Link:
    """alpha: seconds of a collective that carries nothing; bandwidth: bytes a second that one rank sends."""

    name: str
    alpha: float
    bandwidth: float

    def __post_init__(self) -> None:
        if not (self.alpha >= 0 and self.bandwidth > 0):
            raise ValueError(
                f"link {self.name!r}: alpha is in seconds and bandwidth in bytes a second, got alpha={self.alpha!r} "
                f"and bandwidth={self.bandwidth!r}"
            )

    def seconds(self, nbytes: float, calls: int = 1) -> float:
        return calls * self.alpha + nbytes / self.bandwidth


# Bandwidths are 0.8 of what the standard or the data sheet gives one rank in one direction, in GB/s: NVLink 3, 4 and 5
# on A100, H100 and B200 half of 600, 900 and 1800; PCIe x16; one port of InfiniBand or Ethernet for each rank. Alphas
# are typical of a small all-to-all over a few ranks, good to a factor of two. gloo is measured (benchmarks/README.md).
LINKS: dict[str, Link] = {
    name: Link(name, alpha * US, bandwidth * GB)
    for name, alpha, bandwidth in [
        ("nvlink3", 20, 0.8 * 300),
        ("nvlink4", 20, 0.8 * 450),
        ("nvlink5", 20, 0.8 * 900),
        ("pcie4", 30, 0.8 * 31.5),
        ("pcie5", 30, 0.8 * 63),
        ("infiniband-hdr", 40, 0.8 * 25),
        ("infiniband-ndr", 40, 0.8 * 50),
        ("ethernet-100g", 60, 0.8 * 12.5),
        ("ethernet-25g", 80, 0.8 * 3.125),
        ("ethernet-10g", 100, 0.8 * 1.25),
        ("gloo-loopback", 300, 0.8),
    ]
}


@dataclass(frozen=True)
class Hardware:
    """What the ranks of one mesh axis are, and how they are joined.

    link: between the ranks of a node (a `Link`, or a name in `LINKS`); memory: bytes a rank has; flops: FLOP/s that a
    rank achieves on this model, such as 0.4 times the peak of its data sheet; network: the link between nodes, for an
    axis that is longer than one; node: how many ranks of this axis share a node. For an axis that is not innermost on
    the mesh, `node` is 1.
    """

    link: Link | str
    memory: float
    flops: float
    network: Link | str | None = None
    node: int = 8

    def __post_init__(self) -> None:
        for name in ("link", "network"):
            value = getattr(self, name)
            if isinstance(value, str):
                if value not in LINKS:
                    raise ValueError(f"no link {value!r} in the table; it has {', '.join(LINKS)}, or make a dsp.Link")
                object.__setattr__(self, name, LINKS[value])
        if not (self.memory > 0 and self.flops > 0 and self.node >= 1):
            raise ValueError(
                f"memory is in bytes, flops a second and node in ranks, got memory={self.memory!r}, "
                f"flops={self.flops!r}, node={self.node!r}"
            )

    def axis(self, size: int) -> Link:
        """The link of an axis of `size` ranks.

        Within a node it is `link`. Beyond, a rank sends (size - node) of every (size - 1) bytes over the network and
        the rest over its node's link at the same time; the slower of the two decides, nearly always the network.
        """
        assert isinstance(self.link, Link)
        if size <= self.node:
            return self.link
        if self.network is None:
            raise ValueError(
                f"{size} ranks are more than one node of {self.node}: say what joins the nodes, such as "
                'dsp.Hardware(..., network="infiniband-ndr"), or how many ranks a node has, node='
            )
        assert isinstance(self.network, Link)
        near = self.link.bandwidth * (size - 1) / (self.node - 1) if self.node > 1 else float("inf")
        far = self.network.bandwidth * (size - 1) / (size - self.node)
        return Link(self.network.name, max(self.link.alpha, self.network.alpha), min(near, far))


@dataclass(frozen=True)
class Estimate:
    """Seconds of one step: computing, and communicating, on the busiest rank; and all of it on one rank alone."""

    compute: float
    comm: float
    alone: float

    @property
    def step(self) -> float:
        return self.compute + self.comm

    @property
    def speedup(self) -> float:
        return self.alone / self.step if self.step else 1.0


def measure(mesh: DeviceMesh, *, nbytes: int = 1 << 24, rounds: int = 7) -> Link:
    """The link of a 1-D mesh as its switches see it: medians of an all-to-all of few bytes, and of `nbytes` a rank.

    Collective: call it on every rank. Every rank gets the same answer, the slowest one's.
    """
    if mesh.ndim != 1 or mesh.size() < 2:
        raise ValueError(f"a link joins two ranks or more of a 1-D mesh, got a mesh of shape {tuple(mesh.shape)}")
    group, n, device = mesh.get_group(), mesh.size(), mesh.device_type

    def median(size: int) -> float:
        send = torch.zeros(n, max(size // n, 1), dtype=torch.uint8, device=device)
        receive = torch.empty_like(send)
        times = []
        for trial in range(-2, rounds):
            dist.barrier(group)
            start = time.perf_counter()
            dist.all_to_all_single(receive, send, group=group)
            if device == "cuda":
                torch.cuda.synchronize()
            if trial >= 0:
                times.append(time.perf_counter() - start)
        slowest = torch.tensor([statistics.median(times)], dtype=torch.float64, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
        return float(slowest)

    alpha, large = median(n), median(nbytes)
    sent = nbytes * (n - 1) / n
    return Link(f"{n} ranks, measured", alpha, sent / max(large - alpha, 1e-9))


def clock(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= scale or unit == "µs":
            value = seconds / scale
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
    raise AssertionError


__all__ = ["LINKS", "Estimate", "Hardware", "Link", "clock", "measure"]
