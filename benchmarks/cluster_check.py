"""What to run first on a new cluster: is sequence parallelism exact here, how fast are its links, does sp fit a node?

    dsp-launch --nproc-per-node 4 benchmarks/cluster_check.py
    dsp-launch --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 benchmarks/cluster_check.py
    ... benchmarks/cluster_check.py --sp 8 --megabytes 1 32 256 --out check.json

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
import os
import platform
import socket
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from switch import T_DIM, Case, race
from torch.distributed.device_mesh import DeviceMesh

import dsp
import zoo
from zoo.video.diffusion import RectifiedFlow

TIMEOUT = timedelta(minutes=2)  # a rank that cannot be reached ends the check, instead of holding it up
SLOW = 0.25  # of the raw exchange's speed, on GPUs; on CPUs the copies of a switch may cost more than the exchange


@dataclass
class Finding:
    """One line of the report: whether it is "ok", a "warning" or "FAILED", about what, and what was found."""

    state: str
    what: str
    found: str

    def __str__(self) -> str:
        return f"{self.state:<8} {self.what:<10} {self.found}"


# --------------------------------------------------------------------------------------------------------------- hosts


def hosts_of(names: Sequence[str]) -> dict[str, list[int]]:
    """Which ranks each host has, from the host name of every rank."""
    return {name: [rank for rank, other in enumerate(names) if other == name] for name in dict.fromkeys(names)}


def layout(names: Sequence[str], sp: int | None) -> tuple[int, list[Finding]]:
    """The size of sp groups and what there is to say of them, from the host name of every rank.

    Without `sp` it is what every host has, if all have as many. A ValueError if the groups do not come out even.
    """
    hosts, world = hosts_of(names), len(names)
    counts = Counter(len(ranks) for ranks in hosts.values())
    even = len(counts) == 1
    sp = sp or (world // len(hosts) if even else 1)
    if world % sp:
        raise ValueError(f"--sp {sp} does not divide {world} ranks: no whole groups come out")
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
    found = {f"sp={sp}": groups_of_sp(len(names), sp)}
    if sorted(hosts) != found[f"sp={sp}"]:
        found["within a host"] = hosts
    if len(hosts) > 1 and len({len(host) for host in hosts}) == 1:
        found["between hosts"] = [list(group) for group in zip(*hosts)]
    return {name: groups for name, groups in found.items() if all(len(group) > 1 for group in groups)}


def mesh_of(groups: list[list[int]], device: str) -> DeviceMesh:
    """The 1-D mesh of this rank's group. Collective over all ranks."""
    mine = None
    for group in groups:
        made = dist.new_group(group)
        if dist.get_rank() in group:
            mine = DeviceMesh.from_group(made, device, mesh=group, mesh_dim_names=("sp",))
    assert mine is not None, "every rank is in one group"
    return mine


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
    differ = "; ".join(f"{key} {' and '.join(found)}" for key, found in mixed.items() if len(found) > 1)
    if differ:
        return Finding("FAILED", "versions", f"not the same on every rank: {differ}")
    text = ", ".join(f"{key} {found[0]}" for key, found in mixed.items() if found != ["none"])
    return Finding("ok", "versions", text)


def small_model(device: str) -> Any:
    """A Transformer-2D of two layers, the same on every rank, in which nothing is zero that would hide an error."""
    model = zoo.create("transformer2d", "test")
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, p in sorted(model.named_parameters()):
            p.copy_(torch.randn(p.shape, generator=random) * (0.5 / p.shape[-1] ** 0.5))
    return model.to(device)


def clip(device: str, frames: int, height: int, width: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    x, noise = (torch.randn(1, 4, frames, height, width, generator=random).to(device) for _ in range(2))
    return {"x": x, "noise": noise, "timestep": torch.full((1,), 0.6, device=device)}


def exactness(mesh: DeviceMesh) -> Finding:
    """dsp.check on frames and patches that the ranks do not divide; every group does the same work."""
    n, device = mesh.size(), mesh.device_type
    inputs = clip(device, 2 * n - 1, 4, 2 * (n + 1))  # (2n - 1) frames of 2 (n + 1) patches
    kwargs = {"x": inputs["x"], "timestep": torch.full((1,), 600, device=device)}  # whole: it has no gradient
    report = dsp.check(small_model(device), kwargs=kwargs, mesh=mesh)
    if not report:
        return Finding("FAILED", "exactness", " | ".join(line.strip() for line in report.text().splitlines()))
    grad = max(report.gradients.values())
    text = f"outputs to {report.output:.0e}, {len(report.gradients)} gradients to {grad:.0e}, in {report.dtype}"
    return Finding("ok", "exactness", text.replace("torch.", ""))


def loss_and_bytes(mesh: DeviceMesh) -> list[Finding]:
    """A training step on sizes that the ranks do divide: its loss, and what it sent against what was planned."""
    n, device = mesh.size(), mesh.device_type
    inputs = {name: x.double() for name, x in clip(device, 2 * n, 4, 2 * n).items()}

    def mean(objective: Any) -> torch.Tensor:
        return dsp.mean(*objective(**inputs))

    alone = mean(RectifiedFlow(small_model(device).double())).item()
    objective = RectifiedFlow(small_model(device).double())
    planned = dsp.plan(objective, kwargs=inputs, size=n, gather_output=False).bytes
    dsp.parallelize(objective, mesh, gather_output=False)
    with dsp.count_comm() as comm:
        loss = mean(objective)
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
    """What this rank's group is capable of: alpha, and GB/s a rank of a raw all-to-all and of a switch, by size."""
    n, group, sizes = mesh.size(), mesh.get_group(), []
    for size in megabytes:
        case = Case(mesh, (1, 4 * n, max(1, round(size * 64 / n)) * n, 1024))  # 4 KiB a token
        held = case.parts[T_DIM].numel() * 4
        times = race({"raw": case.raw(), "switch": case.switch(1, 2)}, group, mesh.device_type, rounds)
        took = {name: statistics.median(wall.tolist()) / 1e3 for name, (wall, _) in times.items()}
        sent = held * (n - 1) / n
        sizes.append({"MiB": held / 2**20, **{name: sent / seconds / 1e9 for name, seconds in took.items()}})
    link = dsp.hardware.measure(mesh, nbytes=int(max(megabytes) * 2**20), rounds=rounds)
    return {"ranks": n, "alpha": link.alpha, "bandwidth": link.bandwidth, "sizes": sizes}


def slowest(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The group that exchanges least, of those that were measured at once."""
    return min(found, key=lambda one: one["sizes"][-1]["raw"])


def judge_link(name: str, link: dict[str, Any], device: str) -> Finding:
    """Of the largest size: how fast, whether a switch keeps up, and which known link this is like."""
    largest = link["sizes"][-1]
    raw, switch = largest["raw"], largest["switch"]
    alike = min(dsp.LINKS.values(), key=lambda known: abs(math.log(known.bandwidth / link["bandwidth"]))).name
    text = f"{name}: raw {raw:.3g} GB/s a rank, switch {switch:.3g} ({switch / raw:.0%}), "
    text += f"latency {link['alpha'] * 1e6:.0f} µs, like {alike} of dsp.LINKS"
    return Finding("warning" if device == "cuda" and switch < SLOW * raw else "ok", "links", text)


# ---------------------------------------------------------------------------------------------------------- the check


@contextmanager
def process_group() -> Iterator[str]:
    """The device type of this rank, with a process group: torchrun's, or the caller's if there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    borrowed = dist.is_initialized()
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
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
    """Everything, on every rank; rank 0 prints as it goes. Returns {"findings", "links", "sp", "hosts", ...}."""
    findings: list[Finding] = []

    def add(found: Finding) -> None:
        findings.append(found)
        if dist.get_rank() == 0:
            print(found, flush=True)

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
        here = mesh if name == f"sp={sp}" else mesh_of(groups, device)
        measured[name] = slowest(gathered(links(here, options.megabytes, options.rounds)))
        add(judge_link(name, measured[name], device))
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
    with process_group() as device:
        options.megabytes = sorted(options.megabytes or ([1, 32, 256] if device == "cuda" else [1, 16]))
        try:
            found = check(device, options)
        except ValueError as error:
            if dist.get_rank() == 0:
                print(f"error: {error}", file=sys.stderr)
            return 2
        if dist.get_rank() == 0:
            print(f"\n{table(found['links'])}\n\n{verdict(found['findings'])}")
            if options.out:
                options.out.write_text(json.dumps(found, indent=1) + "\n")
    return int(any(finding["state"] == "FAILED" for finding in found["findings"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
