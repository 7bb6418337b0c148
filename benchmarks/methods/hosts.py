"""Ranks that take orders, and hosts for them: a network namespace each, on a switch, with links of any rate.

`Ranks` starts the processes of a script once and then has them run one thing after another, so that what is compared is
run by the same processes in turn. `Hosts` emulates machines by what Linux has: every rank sees one network device,
`eth0`, a virtual cable to a bridge, whose two ends a token bucket (`tc ... tbf`) holds to the rate of a link. It needs
root and the programs `ip` and `tc`, touches no network of the machine itself, and leaves nothing behind. The switch
has no delay of its own: a link has a rate here, and the latency of a kernel.
"""

import contextlib
import gc
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# freed memory goes back to the system at once, so that what is resident is what is held; for glibc, at its start
GIVE_PAGES = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144"}
KEEP_PAGES = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**34)}


class Failed(SystemExit):
    """The message of a rank or a command that failed; it ends the program with that."""


def command(*words: str) -> None:
    """Run a program that sets something up; quiet unless it fails."""
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise Failed(f"{' '.join(words)}: {done.stderr.strip() or done.stdout.strip()}")


# --------------------------------------------------------------------------------------------------------------- hosts


class Hosts:
    """`count` namespaces on one switch; a context manager, which takes them away whatever happens.

    keeps: milliseconds of packets that a link holds when it cannot send them yet; it drops the others.
    """

    def __init__(self, count: int, keeps: int = 50) -> None:
        self.keeps = keeps
        self.switch = f"dsp-{os.getpid()}"
        self.names = [f"{self.switch}-{i}" for i in range(count)]
        self.shaped = False

    def __enter__(self) -> "Hosts":
        sweep()
        try:
            command("ip", "netns", "add", self.switch)
            command("ip", "-n", self.switch, "link", "add", "bridge", "up", "type", "bridge")
            for i, name in enumerate(self.names):
                command("ip", "netns", "add", name)
                peer = ("peer", "name", f"port{i}", "netns", self.switch)
                command("ip", "-n", name, "link", "add", "eth0", "type", "veth", *peer)
                command("ip", "-n", name, "addr", "add", f"10.99.0.{i + 1}/24", "dev", "eth0")
                command("ip", "-n", self.switch, "link", "set", f"port{i}", "master", "bridge", "up")
                for device in ("lo", "eth0"):
                    command("ip", "-n", name, "link", "set", device, "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in (*self.names, self.switch):  # with a namespace go its devices, and the other ends of its cables
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def rate(self, megabits: float | None) -> None:
        """Hold every link to so many Mbit/s, in each direction; None takes the limit away."""
        ends = [(name, "eth0") for name in self.names]
        ends += [(self.switch, f"port{i}") for i in range(len(self.names))]
        for namespace, device in ends:
            where = ("dev", device, "root")
            if megabits is not None:
                # a burst passes at once: as little as keeps the rate, for which timers are late and packets large
                burst = f"{max(256, megabits):.0f}kbit"  # 1 ms
                limits = ("tbf", "rate", f"{megabits:g}mbit", "burst", burst, "latency", f"{self.keeps}ms")
                command("tc", "-n", namespace, "qdisc", "replace", *where, *limits)
            elif self.shaped:
                command("tc", "-n", namespace, "qdisc", "del", *where)
        self.shaped = megabits is not None


def sweep() -> None:
    """Take away what a program that was killed has left; its process is no more."""
    found = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout.split()
    for name in found:
        owner = re.match(r"dsp-(\d+)(-\d+)?$", name)
        if owner and not Path(f"/proc/{owner[1]}").exists():
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def why_not() -> str:
    """Why hosts cannot be emulated here; nothing if they can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are of Linux"
    if os.geteuid():
        return "network namespaces need root"
    if missing := [name for name in ("ip", "tc") if shutil.which(name) is None]:
        return f"there is no program {' and no '.join(missing)} (the package iproute2)"
    try:
        with Hosts(1) as hosts:
            hosts.rate(100)
    except Failed as error:
        return str(error)
    return ""


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """A SIGTERM leaves by the same way as Ctrl-C does: through every context manager."""

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# --------------------------------------------------------------------------------------------------------------- ranks


class Ranks:
    """`size` processes of a script whose `serve` takes orders; a context manager, which ends them.

    On `hosts` if there are any, a host each, and otherwise on this machine's loopback.
    """

    def __init__(self, script: str, size: int, hosts: Hosts | None = None, pages: dict[str, str] = KEEP_PAGES) -> None:
        self.script, self.size, self.hosts, self.pages = script, size, hosts, pages
        self.processes: list[subprocess.Popen[str]] = []
        self.folder = tempfile.TemporaryDirectory(prefix="dsp-ranks-")

    def __enter__(self) -> "Ranks":
        for rank in range(self.size):
            environment = os.environ | self.pages | {
                "RANK": str(rank), "WORLD_SIZE": str(self.size), "OMP_NUM_THREADS": "1",
                "STORE": f"file://{self.folder.name}/store", "GLOO_SOCKET_IFNAME": "eth0" if self.hosts else "lo",
            }  # fmt: skip
            words = [sys.executable, self.script, "serve"]
            if self.hosts:
                words = ["ip", "netns", "exec", self.hosts.names[rank], *words]
            process = subprocess.Popen(
                words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                start_new_session=True,  # Ctrl-C is for the program that gives the orders
            )  # fmt: skip
            self.processes.append(process)
        return self

    def __exit__(self, error: object, *_: object) -> None:
        for process in self.processes:
            with contextlib.suppress(OSError):
                process.stdin.close()  # type: ignore[union-attr]
        for process in self.processes:
            try:
                process.wait(0 if error else 30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()  # type: ignore[union-attr]
        self.folder.cleanup()

    def ask(self, do: str, **what: Any) -> list[Any]:
        """Have every rank run one thing; their answers in order of rank. `Failed` if one of them fails."""
        order = json.dumps({"do": do, **what}) + "\n"
        answers = []
        for process in self.processes:
            with contextlib.suppress(OSError):
                process.stdin.write(order)  # type: ignore[union-attr]
                process.stdin.flush()  # type: ignore[union-attr]
        for rank, process in enumerate(self.processes):
            line = process.stdout.readline()  # type: ignore[union-attr]
            if not line:
                raise Failed(f"rank {rank} of {self.size} failed at {do} {what}; what it said is above")
            answers.append(json.loads(line))
        return answers


def serve(orders: dict[str, Callable[..., Any]]) -> None:
    """Take orders as a rank, until there are no more: lines of JSON with what to do and its arguments."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # others who print do not answer
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=os.environ["STORE"], rank=rank, world_size=size)
    for line in sys.stdin:
        order = json.loads(line)
        answers.write(json.dumps(orders[order.pop("do")](**order)) + "\n")
        answers.flush()
    dist.destroy_process_group()


def sent() -> int:
    """Bytes that the kernel has sent on this rank's network device, or on the loopback, which all ranks share."""
    device = os.environ["GLOO_SOCKET_IFNAME"]
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == device:
            return int(numbers.split()[8])
    raise RuntimeError(f"there is no network device {device!r} in /proc/net/dev")


def resident(field: str = "VmRSS") -> int:
    """Bytes of this process; VmHWM is the highest since it was last reset."""
    found = re.search(rf"{field}:\s*(\d+)", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024  # type: ignore[index]


def highest(run: Callable[[], object]) -> tuple[int, float]:
    """Bytes that were resident at most during a call above what was before it, and seconds."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
    before, began = resident(), time.perf_counter()
    run()
    return resident("VmHWM") - before, time.perf_counter() - began
