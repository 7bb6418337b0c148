"""The first check of a new cluster: is sequence parallelism exact here, how fast are its links, does sp fit a node?

    dsp-launch --nproc-per-node 4 -m dsp.cluster.check
    dsp-launch --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m dsp.cluster.check
    ... -m dsp.cluster.check --sp 8 --megabytes 1 32 256 --out check.json

The ranks are laid out as train.py does it: each group of `--sp` (a host's ranks, if not given) shares one sample.
Within two minutes, on GPUs over NCCL or on CPUs over gloo, it looks at

    versions    of Python, torch, CUDA and NCCL, and the device, which have to be the same everywhere
    hosts       how many ranks each has, and whether any sp group goes across
    exactness   a small model on uneven sizes, in float64: outputs, every gradient and the loss, against one process
    bytes       sent in a step of it, against those planned
    links       GB/s a rank of a raw all-to-all and of `dsp.switch`: within the sp groups, within hosts, between hosts

The last line is the verdict; the exit status is 1 if anything FAILED. Between hosts, the ranks with the same number on
their hosts exchange at the same time, so that is what one rank gets while all others of its host send too.
"""

import argparse
import json
import math
import platform
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dsp.comm.count import count_comm
from dsp.comm.hardware import LINKS, measure
from dsp.comm.ops import mean, split, switch
from dsp.comm.routes import AUTO, Route
from dsp.parallel import parallelize
from dsp.report.plan import plan
from dsp.support import environment
from dsp.verify.check import check as checked

TIMEOUT = timedelta(minutes=2)  # a rank that cannot be reached ends the check, instead of holding it up
SLOW = 0.25  # of the raw exchange's speed, on GPUs; on CPUs the copies of a switch may cost more than the exchange


@dataclass
class Finding:
    """One line of the report: the state ("ok", "warning" or "FAILED"), the subject and the finding."""

    state: str
    what: str
    text: str

    def __str__(self) -> str:
        return f"{self.state:<8} {self.what:<10} {self.text}"


# --------------------------------------------------------------------------------------------------------------- hosts


def hosts_of(names: Sequence[str]) -> dict[str, list[int]]:
    """Ranks of each host, from the host name of every rank."""
    return {name: [rank for rank, host in enumerate(names) if host == name] for name in dict.fromkeys(names)}


def layout(names: Sequence[str], sp: int | None) -> tuple[int, list[Finding]]:
    """The size of sp groups, and findings about them, from the host name of every rank.

    Without `sp` it is the number of ranks of a host, if all hosts have equally many. Raises ValueError if the groups do
    not come out even.
    """
    hosts, world = hosts_of(names), len(names)
    counts = Counter(len(ranks) for ranks in hosts.values())
    even = len(counts) == 1
    sp = sp or (world // len(hosts) if even else 1)
    if world % sp:
        raise ValueError(f"--sp {sp} must divide the number of ranks, {world}")
    each = f"{world // len(hosts)} ranks each" if even else f"{min(counts)} to {max(counts)} ranks each"
    some = f"{world} ranks on {len(hosts)} hosts, {each}" if len(hosts) > 1 else f"{world} ranks on one host"
    findings = [Finding("ok" if even else "warning", "hosts", some)]
    if any(ranks != list(range(ranks[0], ranks[-1] + 1)) for ranks in hosts.values()):
        findings.append(Finding("warning", "hosts", "the ranks of a host are not consecutive, so sp groups straddle"))
    crossing = [group for group in groups_of_sp(world, sp) if len({names[rank] for rank in group}) > 1]
    if crossing:
        first, last = crossing[0][0], crossing[0][-1]
        text = f"sp={sp} crosses hosts in {len(crossing)} of {world // sp} groups (ranks {first} to {last} first): "
        fits = max(n for n in range(1, min(counts) + 1) if all(count % n == 0 for count in counts))
        text += f"switches go over the network; sp={fits} would stay within a host"
        findings.append(Finding("warning", "hosts", text))
    else:
        findings.append(Finding("ok", "hosts", f"sp={sp}: every group stays within a host"))
    return sp, findings


def groups_of_sp(world: int, sp: int) -> list[list[int]]:
    return [list(range(first, first + sp)) for first in range(0, world, sp)]


def groupings(names: Sequence[str], sp: int) -> dict[str, list[list[int]]]:
    """The groups whose links are measured: name -> disjoint groups of two ranks or more, all at once."""
    hosts = list(hosts_of(names).values())
    links = {f"sp={sp}": groups_of_sp(len(names), sp)}
    if sorted(hosts) != links[f"sp={sp}"]:
        links["within a host"] = hosts
    if len(hosts) > 1 and len({len(host) for host in hosts}) == 1:
        links["between hosts"] = [list(group) for group in zip(*hosts)]
    return {name: groups for name, groups in links.items() if all(len(group) > 1 for group in groups)}


def mesh_of(groups: list[list[int]], device: str) -> DeviceMesh:
    """The 1-D mesh of this rank's group. Collective over all ranks."""
    result = None
    for group in groups:
        handle = dist.new_group(group)
        if dist.get_rank() in group:
            result = DeviceMesh.from_group(handle, device, mesh=group, mesh_dim_names=("sp",))
    assert result is not None, "every rank is in one group"
    return result


# ------------------------------------------------------------------------------------------------- versions, exactness


def versions(device: str) -> dict[str, str]:
    cuda = device == "cuda"
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none" if cuda else "none",
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else "none",
        "backend": "nccl" if cuda else "gloo",
        "device": torch.cuda.get_device_name() if cuda else "CPU",
    }


def same_versions(everybody: Sequence[dict[str, str]]) -> Finding:
    mixed = {key: sorted({one[key] for one in everybody}) for key in everybody[0]}
    differ = "; ".join(f"{key} {' and '.join(values)}" for key, values in mixed.items() if len(values) > 1)
    if differ:
        return Finding("FAILED", "versions", f"not the same on every rank: {differ}")
    text = ", ".join(f"{key} {values[0]}" for key, values in mixed.items() if values != ["none"])
    return Finding("ok", "versions", text)


class Block(nn.Module):
    """Attention along one dim of (b t s c), with the other in the batch, and a perceptron."""

    def __init__(self, dim: int, channels: int, heads: int) -> None:
        super().__init__()
        self.dim, self.heads = dim, heads
        self.qkv, self.out = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)
        self.up, self.down = nn.Linear(channels, 2 * channels), nn.Linear(2 * channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        y = x.movedim(self.dim, 2)
        q, k, v = self.qkv(y).unflatten(-1, (3, self.heads, -1)).transpose(2, -2).unbind(3)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(2, 3).flatten(3)).movedim(2, self.dim)
        return x + self.down(F.gelu(self.up(x)))


class Small(nn.Module):
    """A video transformer of two layers, each a block within frames and one across them; its squared error."""

    stages = {
        "": "x=b t s c, target=b t s c -> b t s c",
        "layers.*.space": "b t [s c]",
        "layers.*.time": "b [t] s [c]",
    }

    def __init__(self, channels: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"space": Block(2, channels, heads), "time": Block(1, channels, heads)}) for _ in range(2)
        )

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer["time"](layer["space"](x))  # type: ignore[index]
        return (x - target).square()


def small_model(device: str) -> nn.Module:
    """A `Small` with the same weights on every rank."""
    model = Small()
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, p in sorted(model.named_parameters()):
            p.copy_(torch.randn(p.shape, generator=random) * (0.5 / p.shape[-1] ** 0.5))
    return model.to(device)


def clip(device: str, frames: int, patches: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(1)
    x, target = (torch.randn(1, frames, patches, 16, generator=random).to(device) for _ in range(2))
    return {"x": x, "target": target}


def exactness(mesh: DeviceMesh) -> Finding:
    """dsp.check on frames and patches that the ranks do not divide; every group does the same work."""
    n, device = mesh.size(), mesh.device_type
    report = checked(small_model(device), kwargs=clip(device, 2 * n - 1, 2 * n + 1), mesh=mesh)
    if not report:
        return Finding("FAILED", "exactness", " | ".join(line.strip() for line in report.text().splitlines()))
    grad = max(report.gradients.values())
    text = f"outputs to {report.output:.0e}, {len(report.gradients)} gradients to {grad:.0e}, in {report.dtype}"
    return Finding("ok", "exactness", text.replace("torch.", ""))


def loss_and_bytes(mesh: DeviceMesh) -> list[Finding]:
    """A training step on sizes that the ranks divide: its loss, and the bytes it sent beside the planned ones."""
    n, device = mesh.size(), mesh.device_type
    inputs = {name: x.double() for name, x in clip(device, 2 * n, 4 * n).items()}
    model = small_model(device).double()
    alone = mean(model(**inputs)).item()
    planned = plan(model, kwargs=inputs, size=n, gather_output=False).bytes
    parallelize(model, mesh, gather_output=False)
    with count_comm() as comm:
        loss = mean(model(**inputs))
        loss.backward()
    off = abs(loss.item() - alone) / abs(alone)
    sent = {"forward": comm.forward.bytes["switch"], "backward": comm.backward.bytes["switch"]}
    right = all(sent[phase] == planned[phase] for phase in sent)
    both = f"a rank sent {sent['forward']} bytes forward and {sent['backward']} backward"
    against = "as planned" if right else f"planned were {planned['forward']} and {planned['backward']}"
    return [
        Finding("ok" if off < 1e-6 else "FAILED", "exactness", f"loss to {off:.0e} of one process's"),
        Finding("ok" if right else "FAILED", "bytes", f"{both}, {against}"),
    ]


# --------------------------------------------------------------------------------------------------------------- links


def links(mesh: DeviceMesh, megabytes: Sequence[float], rounds: int) -> dict[str, Any]:
    """Measure this rank's group: alpha, and by size the GB/s a rank of a raw all-to-all and of a switch."""
    n, device, group, sizes = mesh.size(), mesh.device_type, mesh.get_group(), []
    for size in megabytes:
        tokens = max(1, round(size * 64 / n)) * n
        x = split(torch.randn(1, 4 * n, tokens, 1024, device=device), mesh, 1)  # 4 KiB a token
        part = x.to_local()
        received, nbytes = torch.empty_like(part), part.numel() * part.element_size()

        def raw(part: Tensor = part, received: Tensor = received) -> None:
            dist.all_to_all_single(received, part, group=group)

        def switched(x: DTensor = x) -> None:
            switch(x, 2)

        took = medians({"raw": raw, "switch": switched}, group, device, rounds)
        sent = nbytes * (n - 1) / n
        sizes.append({"MiB": nbytes / 2**20, **{name: sent / seconds / 1e9 for name, seconds in took.items()}})
    link = measure(mesh, nbytes=int(max(megabytes) * 2**20), rounds=rounds)
    return {"ranks": n, "alpha": link.alpha, "bandwidth": link.bandwidth, "sizes": sizes}


@torch.no_grad()
def medians(
    operations: Mapping[str, Callable[[], None]], group: dist.ProcessGroup, device: str, rounds: int
) -> dict[str, float]:
    """Seconds of each operation, by the slowest rank, in turn; two rounds to warm up."""
    times = torch.zeros(len(operations), rounds, dtype=torch.float64)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    for trial in range(-2, rounds):
        for i, operation in enumerate(operations.values()):
            dist.barrier(group)
            wait()
            start = time.perf_counter()
            operation()
            wait()
            if trial >= 0:
                times[i, trial] = time.perf_counter() - start
    times = times.to(device)
    dist.all_reduce(times, dist.ReduceOp.MAX, group)
    return dict(zip(operations, times.median(1).values.tolist()))


def slowest(links: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The slowest of the groups that were measured at once."""
    return min(links, key=lambda one: one["sizes"][-1]["raw"])


def judge_link(name: str, link: dict[str, Any], device: str) -> Finding:
    """Judge a link by its largest exchange: its speed, that of a switch, and the most similar known link."""
    largest = link["sizes"][-1]
    raw, switch = largest["raw"], largest["switch"]
    alike = min(LINKS.values(), key=lambda known: abs(math.log(known.bandwidth / link["bandwidth"]))).name
    text = f"{name}: raw {raw:.3g} GB/s a rank, switch {switch:.3g} ({switch / raw:.0%}), "
    text += f"latency {link['alpha'] * 1e6:.0f} µs, like {alike} of dsp.LINKS"
    return Finding("warning" if device == "cuda" and switch < SLOW * raw else "ok", "links", text)


# ---------------------------------------------------------------------------------------------------------- the check


def launched() -> None:
    """Raise ValueError unless this process has its place among the ranks, from a launcher or from its caller."""
    environment.device()
    if not dist.is_initialized() and environment.place() is None:
        raise ValueError("no launcher has started this rank: dsp-launch --nproc-per-node 4 -m dsp.cluster.check")


@contextmanager
def process_group() -> Iterator[str]:
    """The device type of this rank, with a process group: torchrun's, or the caller's if there is one."""
    borrowed, device = dist.is_initialized(), environment.device().type
    if not borrowed:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", timeout=TIMEOUT)
    try:
        yield device
    finally:
        if not borrowed:
            dist.destroy_process_group()


def gathered(value: Any) -> list[Any]:
    box: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(box, value)
    return box


def check(device: str, options: argparse.Namespace) -> dict[str, Any]:
    """The whole check, on every rank; rank 0 prints findings as they come. Returns {"findings", "links", "sp", ...}."""
    findings: list[Finding] = []

    def add(finding: Finding) -> None:
        findings.append(finding)
        if dist.get_rank() == 0:
            print(finding, flush=True)

    names = gathered(socket.gethostname())
    everybody = gathered(versions(device))
    add(same_versions(everybody))
    sp, about = layout(names, options.sp)
    for finding in about:
        add(finding)
    mesh = mesh_of(groups_of_sp(len(names), sp), device)
    for one in (exactness(mesh), *loss_and_bytes(mesh)):
        worst = max(gathered(one), key=lambda finding: finding.state == "FAILED")
        add(worst)
    measured = {}
    for name, groups in groupings(names, sp).items():
        group_mesh = mesh if name == f"sp={sp}" else mesh_of(groups, device)
        measured[name] = slowest(gathered(links(group_mesh, options.megabytes, options.rounds)))
        add(judge_link(name, measured[name], device))
    shares = [len([*same]) for _, same in groupby(names[r] for r in dist.get_process_group_ranks(mesh.get_group()))]
    if len(shares) > 1 and len({*shares}) == 1:
        add(Finding("ok", "routes", f"by route='auto' {Route(AUTO, shares[0]).at(mesh).over(sp)}"))
    if not measured:
        add(Finding("ok", "links", "nothing to measure: every group has one rank"))
    hosts = {name: len(ranks) for name, ranks in hosts_of(names).items()}
    return {
        "findings": [asdict(finding) for finding in findings], "links": measured, "sp": sp, "hosts": hosts,
        **everybody[0],
    }  # fmt: skip


def table(measured: dict[str, Any]) -> str:
    lines = [f"{'GB/s a rank sends':20}{'MiB a rank':>12}{'raw all-to-all':>16}{'dsp.switch':>12}"]
    for name, link in measured.items():
        for row in link["sizes"]:
            lines.append(f"{name:20}{row['MiB']:12.4g}{row['raw']:16.3g}{row['switch']:12.3g}")
        lines.append(f'{"":20}dsp.Link("{name}", alpha={link["alpha"]:.2g}, bandwidth={link["bandwidth"]:.3g})')
    return "\n".join(lines)


def verdict(findings: Sequence[dict[str, str]]) -> str:
    states = Counter(finding["state"] for finding in findings)
    if states["FAILED"]:
        return f"NOT READY: {states['FAILED']} of {len(findings)} checks failed"
    return "ready" + (f", with {states['warning']} warnings" if states["warning"] else "")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Is sequence parallelism exact here, and how fast are its links?")
    parser.add_argument("--sp", type=int, help="ranks that share a sample; a host's ranks if not given")
    parser.add_argument(
        "--megabytes", type=float, nargs="+", help="sizes to exchange, MiB a rank (1 16; GPUs 1 32 256)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="exchanges of each size")
    parser.add_argument("--out", type=Path, help="a JSON file for everything")
    options = parser.parse_args(arguments)
    try:
        launched()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with process_group() as device:
        options.megabytes = sorted(options.megabytes or ([1, 32, 256] if device == "cuda" else [1, 16]))
        try:
            report = check(device, options)
        except ValueError as error:
            if dist.get_rank() == 0:
                print(f"error: {error}", file=sys.stderr)
            return 2
        if dist.get_rank() == 0:
            print(f"\n{table(report['links'])}\n\n{verdict(report['findings'])}")
            if options.out:
                options.out.write_text(json.dumps(report, indent=1) + "\n")
    return int(any(finding["state"] == "FAILED" for finding in report["findings"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
