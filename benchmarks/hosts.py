"""Ranks that take orders, and hosts for them: network namespaces whose links have a rate, a delay and a loss.

`Ranks` starts the processes of a script once and then has them run one thing after another, so that what is compared is
run by the same processes in turn. A host is a namespace with one network device, `eth0`. Those of `Hosts` hang on a
bridge by virtual cables whose ends a token bucket (`tc ... tbf`) holds to a rate, and the latency is the kernel's. A
kernel without `netem` has no delay and no loss, so the devices of `Emulated` are TAPs, and one process, this file as a
program, carries frames between them:

    rank --near--> its node's switch --near--> a rank of the node
                   its node's switch --far--> the other node's switch --near--> a rank there

A frame waits at every port until the frames before it have left at the port's rate, and is dropped where the port holds
too much; the delay is added at the end. The far port of a node is shared by the node's ranks. All of it needs root and
the programs `ip` and `tc`, touches no network of the machine itself, and leaves nothing behind.
"""

import contextlib
import fcntl
import gc
import heapq
import json
import math
import os
import random
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# freed memory goes back to the system at once, so that what is resident is what is held; for glibc, at its start
GIVE_PAGES = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144"}
KEEP_PAGES = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**34)}

TUN, SETIFF, TAP, PLAIN = "/dev/net/tun", 0x400454CA, 0x0002, 0x1000  # of linux/if_tun.h
MTU = 16000  # bytes of a packet: fewer packets than Ethernet's, and a process can carry them all
HELD = 0.1  # seconds of frames that a port holds


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

    Packets are large (MTU): with Ethernet's the kernel takes too much of the cores on which the ranks compute.

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
                size = ("mtu", str(MTU))
                command("ip", "-n", name, "link", "add", "eth0", *size, "type", "veth", *peer, *size)
                command("ip", "-n", self.switch, "link", "set", f"port{i}", "master", "bridge", "up")
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def start(self) -> None:
        """Give every `eth0` its address."""
        for i, name in enumerate(self.names):
            command("ip", "-n", name, "addr", "add", f"10.99.0.{i + 1}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                command("ip", "-n", name, "link", "set", device, "up")

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


@dataclass(frozen=True)
class Wire:
    """One kind of link: Mbit/s in each direction, milliseconds one way, the share of frames that are lost."""

    rate: float
    delay: float = 0.0
    loss: float = 0.0


@dataclass(frozen=True)
class Network:
    """Ranks in nodes of `node`; near: from a rank to its node's switch and back; far: between these switches."""

    near: Wire
    far: Wire
    node: int

    def __str__(self) -> str:
        near, far = (f"{w.rate:.0f} Mbit/s, {w.delay:.2f} ms, {w.loss:.2%} lost" for w in (self.near, self.far))
        return f"nodes of {self.node}: {near}; between: {far}"


class Emulated(Hosts):
    """`count` namespaces whose `eth0` are the ports of one emulated network; a context manager."""

    def __enter__(self) -> "Emulated":
        sweep()
        ports: list[int] = []
        try:
            for i, name in enumerate(self.names):
                command("ip", "netns", "add", name)
                device = f"dsp{os.getpid()}.{i}"[-15:]
                port = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
                ports.append(port)
                fcntl.ioctl(port, SETIFF, struct.pack("16sH22s", device.encode(), TAP | PLAIN, b""))
                command("ip", "link", "set", device, "netns", name, "name", "eth0", "mtu", str(MTU))
            self.start()
            words = [sys.executable, __file__, "switch", *map(str, ports)]
            self.process = subprocess.Popen(words, pass_fds=ports, stdin=subprocess.PIPE, text=True)
        except BaseException:
            self.__exit__()
            raise
        finally:
            for port in ports:
                os.close(port)
        return self

    def __exit__(self, *_: object) -> None:
        if (process := getattr(self, "process", None)) is not None:
            process.stdin.close()
            process.wait(10)
        super().__exit__()

    def shape(self, network: Network) -> None:
        """Make the links those of `network` from the next frame on."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(asdict(network)) + "\n")
        self.process.stdin.flush()
        time.sleep(0.05)

    def rate(self, megabits: float | None) -> None:
        """Hold every link to so many Mbit/s; None takes the limit away."""
        wire = Wire(megabits or 0.0)
        self.shape(Network(wire, wire, len(self.names)))


def sweep() -> None:
    """Take away what a program that was killed has left; its process is no more."""
    names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout.split()
    for name in names:
        owner = re.match(r"dsp-(\d+)(-\d+)?$", name)
        if owner and not Path(f"/proc/{owner[1]}").exists():
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def why_not(kind: type[Hosts] = Hosts) -> str:
    """Why hosts of this kind cannot be emulated here; nothing if they can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are of Linux"
    if os.geteuid():
        return "network namespaces need root"
    if missing := [name for name in ("ip", "tc") if shutil.which(name) is None]:
        return f"there is no program {' and no '.join(missing)} (the package iproute2)"
    try:
        with kind(1) as hosts:
            hosts.rate(100)
    except (Failed, OSError) as error:  # of a machine without TAPs
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


# -------------------------------------------------------------------------------------- the switch of emulated links


class Port:
    """One direction of a link: when it is free again."""

    def __init__(self, rate: float) -> None:
        self.seconds = 8e-6 / rate if rate else 0.0  # of a byte
        self.free = 0.0

    def leaves(self, at: float, size: int) -> float:
        """The time at which a frame has left that came at `at`; infinite where the port drops it."""
        start = max(at, self.free)
        if start - at > HELD:
            return math.inf
        self.free = start + size * self.seconds
        return self.free


class Switch:
    """The network of these devices: a process that carries every frame, when its time has come."""

    def __init__(self, ports: list[int]) -> None:
        self.ports = ports
        self.known: dict[bytes, int] = {}  # the port of an address
        self.coming: list[tuple[float, int, int, bytes]] = []
        self.count = 0
        self.random = random.Random(0)
        self.shape({"near": {"rate": 0.0, "delay": 0.0, "loss": 0.0}, "far": None, "node": len(ports)})

    def shape(self, network: dict[str, Any]) -> None:
        near, far = network["near"], network["far"] or network["near"]
        self.node, self.delays = network["node"], (near["delay"] / 1e3, far["delay"] / 1e3)
        self.losses = near["loss"], far["loss"]
        nodes = -(-len(self.ports) // self.node)
        self.up, self.down = ([Port(near["rate"]) for _ in self.ports] for _ in range(2))
        self.out, self.into = ([Port(far["rate"]) for _ in range(nodes)] for _ in range(2))

    def carry(self, source: int, target: int, frame: bytes) -> None:
        at, a, b = time.monotonic(), source // self.node, target // self.node
        way = [self.up[source], self.down[target]]
        if a != b:
            way[1:1] = [self.out[a], self.into[b]]
        if self.random.random() < self.losses[a != b]:
            return
        for port in way:
            at = port.leaves(at, len(frame))
            if at == math.inf:
                return
        self.count += 1
        heapq.heappush(self.coming, (at + self.delays[a != b], self.count, target, frame))

    def read(self, source: int) -> None:
        """Take the frames that a device has; to an address that is not known yet, or to all, each device gets one."""
        while True:
            try:
                frame = os.read(self.ports[source], MTU + 100)
            except BlockingIOError:
                return
            self.known[frame[6:12]] = source
            target = self.known.get(frame[:6])
            for other in range(len(self.ports)) if target is None else (target,):
                if other != source:
                    self.carry(source, other, frame)

    def deliver(self) -> float | None:
        """Hand over what is due; seconds until the next is."""
        while self.coming:
            wait = self.coming[0][0] - time.monotonic()
            if wait > 0:
                return wait
            _, _, target, frame = heapq.heappop(self.coming)
            with contextlib.suppress(OSError):  # a device that is full or down drops it
                os.write(self.ports[target], frame)
        return None

    def run(self) -> None:
        """Carry frames until standard input ends; a line of it is another network."""
        of = {port: i for i, port in enumerate(self.ports)}
        while True:
            ready, _, _ = select.select([*of, 0], [], [], self.deliver())
            for port in ready:
                if port != 0:
                    self.read(of[port])
                elif line := os.read(0, 65536):
                    self.shape(json.loads(line.splitlines()[-1]))
                else:
                    return


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


def script(main: Callable[[Sequence[str]], int | None], **orders: Callable[..., Any]) -> None:
    """Run a script: its program or, where `Ranks` has started it, a rank that takes these orders."""
    if sys.argv[1:] == ["serve"]:
        serve(orders)
    else:
        sys.exit(main(sys.argv[1:]))


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
    match = re.search(rf"{field}:\s*(\d+)", Path("/proc/self/status").read_text())
    return int(match[1]) * 1024  # type: ignore[index]


def highest(run: Callable[[], object]) -> tuple[int, float]:
    """Bytes that were resident at most during a call above what was before it, and seconds."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
    before, began = resident(), time.perf_counter()
    run()
    return resident("VmHWM") - before, time.perf_counter() - began


if __name__ == "__main__":
    os.setpriority(os.PRIO_PROCESS, 0, -15)  # a late frame is a slower network
    Switch([*map(int, sys.argv[2:])]).run()
