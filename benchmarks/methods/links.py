"""Emulated networks with a rate, a delay and a loss for each link, and nodes of several ranks: a switch in user space.

`Hosts` of hosts.py holds links to a rate by a qdisc of the kernel. A kernel without `netem` has none for delay and
loss, so here every rank's `eth0` is a TAP device, and one process carries frames between them:

    rank --near--> its node's switch --near--> a rank of the node
                   its node's switch --far--> the other node's switch --near--> a rank there

A frame waits at every port until the frames before it have left at the port's rate, and is dropped where the port holds
too much; the delay is added at the end. The far port of a node is shared by the node's ranks. It needs root and the
program `ip`, touches no network of the machine itself, and leaves nothing behind.
"""

import contextlib
import fcntl
import heapq
import json
import math
import os
import random
import select
import struct
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.methods.hosts import Failed, Hosts, command, sweep

TUN, SETIFF, TAP, PLAIN = "/dev/net/tun", 0x400454CA, 0x0002, 0x1000  # of linux/if_tun.h
MTU = 16000  # bytes of a packet: fewer packets than Ethernet's, and a process can carry them all
HELD = 0.1  # seconds of frames that a port holds


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
                command("ip", "-n", name, "addr", "add", f"10.99.0.{i + 1}/24", "dev", "eth0")
                for each in ("lo", "eth0"):
                    command("ip", "-n", name, "link", "set", each, "up")
            words = [sys.executable, "-m", "benchmarks.methods.links", *map(str, ports)]
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


def why_not() -> str:
    """Why networks cannot be emulated here; nothing if they can."""
    if not os.path.exists(TUN):
        return f"there is no {TUN}"
    if os.geteuid():
        return "network namespaces need root"
    try:
        with Emulated(1) as hosts:
            hosts.rate(100)
    except (Failed, OSError) as error:
        return str(error)
    return ""


# ----------------------------------------------------------------------------------------------------------- the switch


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


if __name__ == "__main__":
    os.setpriority(os.PRIO_PROCESS, 0, -15)  # a late frame is a slower network
    Switch([*map(int, sys.argv[1:])]).run()
