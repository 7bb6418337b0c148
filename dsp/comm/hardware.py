"""The hardware of a mesh axis (links, memory and speed of a rank), and the seconds that a plan takes on it.

A collective in which the busiest rank sends `nbytes` takes ``alpha + nbytes / bandwidth`` (Hockney's model); alpha is
the latency. Computing takes the FLOPs over the FLOP/s that a rank achieves and, where the rate of its memory is given,
the bytes that operations touch over that rate. Switches wait for the stages before them; the collectives of weights may
run while stages compute. This arithmetic is for decisions: how many ranks, which method, is it worth it.
benchmarks/cost_model.py compares it with measurements. Data loading and the optimizer are not included.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dsp.comm.messages import messages
from dsp.comm.wire import format_for
from dsp.support.private import all_to_all

US, GB = 1e-6, 1e9
LITTLE = 16  # repetitions of three small operations, measured together with their backward (as much as two forwards)


@dataclass(frozen=True)
class Link:
    """A link. alpha: seconds of an empty collective; bandwidth: bytes a second that one rank sends.

    message: of a link between nodes, the seconds that each message beyond one to each other node adds to a collective;
    0 if not measured.
    """

    name: str
    alpha: float
    bandwidth: float
    message: float = 0.0

    def __post_init__(self) -> None:
        if not (self.alpha >= 0 and self.bandwidth > 0 and self.message >= 0):
            raise ValueError(
                f"link {self.name!r}: expected alpha and message in seconds, 0 or more, bandwidth in bytes a second, "
                f"above 0; got alpha={self.alpha!r}, message={self.message!r}, bandwidth={self.bandwidth!r}"
            )

    def seconds(self, nbytes: float, calls: int = 1) -> float:
        return calls * self.alpha + nbytes / self.bandwidth


# Bandwidths are 0.8 of what the standard or the data sheet gives one rank in one direction, in GB/s: NVLink 3, 4 and 5
# on A100, H100 and B200 half of 600, 900 and 1800; PCIe x16; one port of InfiniBand or Ethernet for each rank. Alphas
# are typical of a small all-to-all over a few ranks, good to a factor of two. gloo is what `measure` found on 2 cores.
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
class Exchange:
    """Collectives of one kind over `size` ranks: the bytes that the busiest rank sends in them, and their number.

    The kinds are those of `dsp.count_comm`: "switch" is an all-to-all, "reduce_scatter" an all-to-all and a local sum;
    "gather" and "all_reduce"; "ring" for hops to the next rank; FSDP's "all_gather_into_tensor" and
    "reduce_scatter_tensor". stride: the distance between the ranks: 1 for the innermost axis of the mesh, else the
    number of ranks of the axes inside this one.
    """

    kind: str
    bytes: float
    calls: int
    size: int
    stride: int = 1


def all_reduced(gradients: float, size: int, *, stride: int = 1, calls: int = 1) -> list[Exchange]:
    """The traffic of DDP, which averages `gradients` bytes over `size` ranks."""
    return [Exchange("all_reduce", 2 * gradients * (size - 1) / size, calls, size, stride)] if size > 1 else []


def fully_sharded(
    weights: float, gradients: float, shard: int, *, replicate: int = 1, calls: int = 1, batches: int = 1
) -> list[Exchange]:
    """The traffic of FSDP in a step: `shard` neighbours share the weights, in `replicate` such groups.

    weights, gradients: bytes of the gathered weights and of the averaged gradients, each in its own dtype. Weights are
    gathered in `calls` calls for forward and again for backward, in each of `batches` that a step accumulates. Then
    gradients are reduce-scattered, and each rank's part is averaged over the groups.
    """
    exchanges = []
    if shard > 1:
        part = (shard - 1) / shard
        exchanges.append(Exchange("all_gather_into_tensor", 2 * batches * weights * part, 2 * batches * calls, shard))
        exchanges.append(Exchange("reduce_scatter_tensor", gradients * part, calls, shard))
    return exchanges + all_reduced(gradients / shard, replicate, stride=shard, calls=calls)


@dataclass(frozen=True)
class Hardware:
    """The ranks of one mesh axis: their speed, memory, and the links between them.

    link: between the ranks of a node (a `Link`, or a name in `LINKS`). memory: bytes a rank has. flops: FLOP/s that a
    rank achieves on this model, such as 0.4 times the peak of its data sheet. network: the link between nodes, for an
    axis longer than one node. node: the number of the axis' ranks that share a node; 1 for an axis that is not the
    innermost of the mesh. stream: bytes a second at which operations read and write memory; by default unlimited.
    share: by kind of collective (`Exchange`), the fraction of a link's bandwidth that it reaches, 1 by default;
    "direct" stands for an all-to-all that runs within nodes and between them at once.

    packing: by format of `dsp.comm.wire`, the cost of packing and unpacking, as a link: alpha in seconds, and a
    bandwidth in bytes of float32 elements a second; by default computed from `PACKING`, stream and launch. launch:
    seconds of an operation on almost no data. busy: the fraction of a transfer during which computing stands still,
    because both need the same cores. The last two are 0 if not measured.
    """

    link: Link | str
    memory: float
    flops: float
    network: Link | str | None = None
    node: int = 8
    stream: float = math.inf
    share: Mapping[str, float] = field(default_factory=dict, hash=False)
    packing: Mapping[str, Link] = field(default_factory=dict, hash=False)
    launch: float = 0.0
    busy: float = 0.0

    def __post_init__(self) -> None:
        for name in ("link", "network"):
            value = getattr(self, name)
            if isinstance(value, str):
                if value not in LINKS:
                    raise ValueError(f"no link {value!r} in the table; it has {', '.join(LINKS)}, or make a dsp.Link")
                object.__setattr__(self, name, LINKS[value])
        if not (self.memory > 0 and self.flops > 0 and self.node >= 1 and self.stream > 0):
            raise ValueError(
                "memory (bytes), flops and stream (a second) must be above 0, node (ranks) at least 1; got "
                f"memory={self.memory!r}, flops={self.flops!r}, stream={self.stream!r}, node={self.node!r}"
            )
        if not (self.launch >= 0 and 0 <= self.busy <= 1):
            raise ValueError(
                f"launch (seconds) must be at least 0, busy a share from 0 to 1; got launch={self.launch!r}, "
                f"busy={self.busy!r}"
            )

    @property
    def links(self) -> str:
        """The links by name."""
        near, far = (link.name if isinstance(link, Link) else "nothing" for link in (self.link, self.network))
        return f"{near} in nodes of {self.node}, {far} between"

    def axis(self, size: int, kind: str = "switch", stride: int = 1) -> Link:
        """The effective link of one kind of collective, on an axis of `size` ranks that are `stride` apart.

        Within a node it is `link`. Over several nodes, a rank sends (size - node) of every (size - 1) bytes of an
        all-to-all over the network, and the rest over its node's link at the same time; the slower of the two decides,
        nearly always the network, and every message beyond one to each other node adds latency. Data that goes from
        rank to rank crosses the network once a node: in gathers and reductions on as many rings as a node has ranks,
        each with its own network port; a ring of hops waits for its slowest hop.
        """
        assert isinstance(self.link, Link)
        node, part = max(1, self.node // stride), self.share.get(kind, 1.0)
        if size <= node:
            return self.link if part == 1 else Link(self.link.name, self.link.alpha, self.link.bandwidth * part)
        if self.network is None:
            raise ValueError(
                f"{size} ranks are more than one node of {node}: say what joins the nodes, such as "
                'dsp.Hardware(..., network="infiniband-ndr"), or how many ranks a node has, node='
            )
        assert isinstance(self.network, Link)
        near, far = self.link.bandwidth, self.network.bandwidth
        alpha = max(self.link.alpha, self.network.alpha)
        if kind in ("switch", "reduce_scatter"):
            if node > 1:
                part *= self.share.get("direct", 1.0)
                alpha += self.network.message * messages_more(size, node)
            near = near * (size - 1) / (node - 1) if node > 1 else math.inf
            far = far * (size - 1) / (size - node)
        elif kind != "ring":
            near = near * node / (node - 1) if node > 1 else math.inf
            far = far * node
        return Link(self.network.name, alpha, min(near, far) * part)

    def seconds(self, *exchanges: Exchange) -> float:
        return sum(self.axis(e.size, e.kind, e.stride).seconds(e.bytes, e.calls) for e in exchanges)

    def computing(self, flops: float, touched: float) -> float:
        return flops / self.flops + touched / self.stream

    def packs(self, form: str, numbers: float, calls: int = 1) -> float:
        """The seconds in which a rank packs and unpacks this number of elements in a format of `dsp.comm.wire`."""
        known = self.packing.get(form)
        if known is not None:
            return known.seconds(4 * numbers, calls)
        touched, operations = PACKING[form]
        return self.computing(0.0, touched * numbers) + calls * operations * self.launch


# by format: the bytes that packing and unpacking touch for each float32 element, and the number of their operations
PACKING: dict[str, tuple[float, int]] = {
    "bf16": (18, 2),
    "bf16-stochastic": (166, 34),
    "fp8": (100, 33),
    "fp8-stochastic": (202, 59),
    "int8": (122, 36),
    "int8-stochastic": (176, 57),
}


def messages_more(size: int, node: int) -> int:
    """The messages between nodes that a rank sends in an all-to-all, beyond one to each other node."""
    return size - node - (-(-size // node) - 1)


# name: peak FLOP/s in bf16 and in fp32 (no TF32), memory in GB and its GB/s, link within a node of 8, network between,
# all of data sheets: dense products, SXM modules with one 400 Gbit/s port each (A100 and L40S: 200 and 100)
ACCELERATORS: dict[str, tuple[float, float, float, float, str, str]] = {
    "a100": (312e12, 19.5e12, 80, 2039, "nvlink3", "infiniband-hdr"),
    "h100": (989e12, 67e12, 80, 3350, "nvlink4", "infiniband-ndr"),
    "h200": (989e12, 67e12, 141, 4800, "nvlink4", "infiniband-ndr"),
    "b200": (2250e12, 75e12, 180, 7700, "nvlink5", "infiniband-ndr"),
    "l40s": (362e12, 91.6e12, 48, 864, "pcie4", "ethernet-100g"),
}


def accelerator(
    name: str, *, dtype: torch.dtype = torch.bfloat16, products: float = 0.5, stream: float = 0.8, **changes: Any
) -> Hardware:
    """The hardware of nodes of a known accelerator; `changes` are other arguments of `Hardware`, None for the table's.

    products: the share of the peak that matrix products and attention reach; stream: the share of its memory's rate
    that all operations reach.
    """
    if name not in ACCELERATORS:
        raise ValueError(f"no accelerator {name!r} in the table; it has {', '.join(ACCELERATORS)}")
    if not (0 < products <= 1 and 0 < stream <= 1):
        raise ValueError(
            "products and stream are fractions, in (0, 1], of the data sheet's peak and memory bandwidth, got "
            f"{products} and {stream}"
        )
    half, single, memory, rate, link, network = ACCELERATORS[name]
    peak = half if dtype.itemsize == 2 else single
    known: dict[str, Any] = {"link": link, "network": network, "memory": memory * GB}
    known |= {key: value for key, value in changes.items() if value is not None}
    return Hardware(flops=products * peak, stream=stream * rate * GB, **known)


@dataclass(frozen=True)
class Estimate:
    """The seconds of one step.

    compute, comm: of computing and of communicating, on the busiest rank. alone: of the whole step on a single rank.
    weights: of the collectives of weights, in addition. hidden: the part of `comm` that overlaps with computing.
    """

    compute: float
    comm: float
    alone: float
    weights: float = 0.0
    hidden: float = 0.0

    @property
    def step(self) -> float:
        return self.compute + self.comm - self.hidden + self.weights

    @property
    def speedup(self) -> float:
        return self.alone / self.step if self.step else 1.0


def measure(mesh: DeviceMesh, *, nbytes: int = 1 << 24, rounds: int = 7) -> Link:
    """The link of a 1-D mesh for switches: from the medians of an all-to-all of few bytes, and of `nbytes` a rank.

    Collective: call it on every rank. All get the same result, that of the slowest rank.
    """
    if mesh.ndim != 1 or mesh.size() < 2:
        raise ValueError(f"a link joins two ranks or more of a 1-D mesh, got a mesh of shape {tuple(mesh.shape)}")
    n = mesh.size()

    def median(size: int) -> float:
        begin = _exchange(mesh, size)
        return _slowest(mesh, lambda: [work.wait() for work in begin()], rounds)

    alpha, large = median(n), median(nbytes)
    sent = nbytes * (n - 1) / n
    return Link(f"{n} ranks, measured", alpha, sent / max(large - alpha, 1e-9))


def measured_links(mesh: DeviceMesh, *, node: int, nbytes: int = 1 << 24, rounds: int = 7) -> Hardware:
    """The measured links of a mesh, within nodes and between them, as a Hardware with no other figures.

    mesh: 1-D; `node` neighbours share a machine. nbytes: that a rank sends in a large exchange. Collective: call it on
    every rank of the mesh; all get the same result, that of the slowest rank.
    """
    n, place = mesh.size(), mesh.get_local_rank()
    node = n if n % node else min(node, n)
    if n == 1:
        return Hardware(Link("one rank", 0.0, math.inf), math.inf, math.inf, node=1)
    whole = measure(mesh, nbytes=nbytes, rounds=rounds)
    if node == n:
        return Hardware(whole, math.inf, math.inf, node=node)
    mates = range(place - place % node, place - place % node + node)
    network = _link(mesh, range(place % node, n, node), nbytes, rounds, "between nodes, measured")
    link = _link(mesh, mates, nbytes, rounds, f"{node} ranks, measured") if node > 1 else network
    if more := messages_more(n, node):
        network = replace(network, message=max(0.0, whole.alpha - max(link.alpha, network.alpha)) / more)
    hardware = Hardware(link, math.inf, math.inf, network, node)
    return replace(hardware, share={"direct": min(1.0, whole.bandwidth / hardware.axis(n).bandwidth)})


def _link(mesh: DeviceMesh, among: Sequence[int], nbytes: int, rounds: int, name: str) -> Link:
    """The link for messages of a rank to some others of a mesh, while all ranks send such messages."""
    peers, group = [r for r in among if r != mesh.get_local_rank()], mesh.get_group()

    def median(size: int) -> float:
        send = torch.zeros(len(peers), max(size // len(peers), 1), dtype=torch.uint8, device=mesh.device_type)
        receive = torch.empty_like(send)

        def run() -> None:
            for work in messages(zip(peers, send), zip(peers, receive), group):
                work.wait()

        return _slowest(mesh, run, rounds)

    alpha, large = median(len(peers)), median(nbytes)
    return Link(name, alpha, nbytes / max(large - alpha, 1e-9))


def measured(
    mesh: DeviceMesh,
    *,
    node: int,
    dtype: torch.dtype = torch.float32,
    memory: float | None = None,
    nbytes: int = 1 << 24,
    rounds: int = 5,
) -> Hardware:
    """The hardware at hand, measured: links by `measured_links`, the speed of a matrix product, of a copy and of
    packing, the time of a tiny operation, and how much products slow down while an exchange runs.

    mesh: 1-D, of all ranks; `node` neighbours share a machine. dtype: of the product. memory: bytes that a rank may
    hold, by default those of its GPU, or its share of the host's. nbytes: that a rank sends in a large exchange.
    Collective: call it on every rank; all get the same result, that of the slowest rank.
    """
    links, device = measured_links(mesh, node=node, nbytes=nbytes), mesh.device_type
    side, length = (8192, 1 << 28) if device == "cuda" else (512, 1 << 23)
    x = torch.ones(side, side, dtype=dtype, device=device)
    y = torch.ones(length, dtype=torch.uint8, device=device)
    with torch.device("meta"):  # no random numbers are drawn
        block = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU())
    block.to_empty(device=device)

    @torch.inference_mode(False)
    @torch.enable_grad()
    def little() -> None:  # operations as in a stage; on a GPU after a product, so that the host runs ahead
        z = torch.ones(8, 8, device=device)
        if device == "cuda":
            x @ x
        for _ in range(LITTLE):
            z = block(z)
        z.sum().backward()

    product, copy, launch = (_slowest(mesh, run, rounds, min) for run in (lambda: x @ x, y.clone, little))
    if memory is None and device == "cuda":
        memory = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    if memory is None:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / links.node
    packing = {name: _packing(mesh, name, length // 32, rounds) for name in PACKING}
    return replace(
        links, memory=memory, flops=2 * side**3 / product, stream=2 * length / copy, packing=packing,
        launch=max(0.0, launch - product * (device == "cuda")) / (9 * LITTLE), busy=_busy(mesh, dtype, nbytes, rounds),
    )  # fmt: skip


def _packing(mesh: DeviceMesh, name: str, numbers: int, rounds: int) -> Link:
    """The cost of packing in a format, as in `Hardware.packing`."""
    form = format_for(name, True, 4)
    assert form is not None

    def seconds(count: int) -> float:
        x, splits = torch.ones(count, device=mesh.device_type), [count]
        return _slowest(mesh, lambda: form.unpack(form.pack(x, splits, 0), splits, x), rounds, min)

    least, many = seconds(1), seconds(numbers)
    return Link(f"{name}, measured", least, 4 * numbers / max(many - least, 1e-9))


def _busy(mesh: DeviceMesh, dtype: torch.dtype, nbytes: int, rounds: int) -> float:
    """The share of an exchange over all ranks by which products of the same length slow down beside it."""
    if mesh.size() == 1:
        return 0.0
    begin, x = _exchange(mesh, nbytes), torch.ones(512, 512, dtype=dtype, device=mesh.device_type)
    travels = _slowest(mesh, lambda: [work.wait() for work in begin()], rounds)
    times = math.ceil(travels / _slowest(mesh, lambda: x @ x, rounds))

    def compute() -> None:
        for _ in range(times):
            x @ x

    def both() -> None:
        works = begin()
        compute()
        for work in works:
            work.wait()

    alone, together = (_slowest(mesh, run, rounds, min) for run in (compute, both))
    return min(1.0, max(0.0, together - alone) / travels)


def _exchange(mesh: DeviceMesh, nbytes: int) -> Callable[[], list[Any]]:
    """A function that begins an exchange of so many bytes a rank, as a switch does, and returns its works."""
    n, group = mesh.size(), mesh.get_group()
    each = max(nbytes // n, 1)
    send = torch.zeros(n * each, dtype=torch.uint8, device=mesh.device_type)
    receive, splits = torch.empty_like(send), [each] * n
    return lambda: all_to_all(receive, send, splits, splits, group, n * n * each)


def _slowest(
    mesh: DeviceMesh, run: Callable[[], Any], rounds: int, of: Callable[[list[float]], float] = statistics.median
) -> float:
    """The seconds of `run` on the slowest rank: the median of its rounds, or another statistic `of` them. All ranks
    begin each round together; two rounds before do not count."""
    group, device, times = mesh.get_group(), mesh.device_type, list[float]()
    for trial in range(-2, rounds):
        dist.barrier(group)
        start = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        if trial >= 0:
            times.append(time.perf_counter() - start)
    slowest = torch.tensor([of(times)], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    return float(slowest)


def clock(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= scale or unit == "µs":
            value = seconds / scale
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
    raise AssertionError


__all__ = [
    "ACCELERATORS", "LINKS", "Estimate", "Exchange", "Hardware", "Link", "accelerator", "all_reduced", "clock",
    "fully_sharded", "measure", "measured", "measured_links",
]  # fmt: skip
