"""The watch that ranks keep on each other outside of torch: who lives, who gets on, who met an error.

Every rank has a connection to rank 0, outside of torch, and a thread that says once a second how far the rank is. So a
process that ends is seen at once, by its connection; one that is stopped, by its silence; one that hangs, by a count of
steps that stands still. The first fault ends all ranks, with one line, which rank 0 prints, or if it is gone rank 1.

torch's store can do neither: it does not tell whose client has gone, and a call to a store whose process is stopped
does not return.
"""

import json
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from zoo.training import UserError, flight, printable

BEAT = 1.0  # seconds between two signs of life
GRACE = 0.5  # seconds between the end of a rank and the word on it: a signal to all ends one before the other
PATIENCE = 3.0  # seconds that a rank waits for what the others have to say of an error
LINGER = 20.0  # seconds that a rank with an error has for its own clean-up
STUCK = 5  # seconds after which a message that does not go through counts as lost
HOME = Path(__file__).resolve().parents[2]
OWN = ("dsp", "zoo", "tests", "benchmarks", "train.py", "infer.py")  # what is ours in it
# where a rank is that waits for the others
WAITING = ("torch/distributed/", "zoo/training/guard.py", "dsp/collectives.py", "dsp/exchange.py", "torch/_ops.py")
MOST = 1 << 20  # bytes of a message


@dataclass
class Progress:
    """How far this rank is: a count that grows with every step, and what to call the step."""

    count: int = 0
    doing: str = "the start"
    stopped: str = ""  # the signal that told this rank to stop
    thread: int = field(default_factory=threading.get_ident)
    model: Any = None  # whose modules a flight record names
    folder: Path | None = None  # where it is written

    def where(self) -> tuple[str, bool]:
        """The place in the code that this rank is at, and whether it waits for others there."""
        frame, files = sys._current_frames().get(self.thread), []
        while frame is not None:
            files.append((frame.f_code.co_filename.replace("\\", "/"), frame.f_lineno, frame.f_code.co_name))
            frame = frame.f_back
        waits = any(part in name for name, _, _ in files[:4] for part in WAITING)
        own = [(name, line, code) for name, line, code in files if own_code(name) and "<" not in code]
        places = [f"{code} ({os.path.relpath(name, HOME)}:{line})" for name, line, code in own]
        return ", in ".join([self.doing, *places[:1]]), waits


@dataclass
class Peer:
    """A rank, and how far it was when it was last heard of."""

    rank: int
    end: Connection | None = None  # None: this rank itself
    name: str = "?"  # its process and host
    heard: float = field(default_factory=time.monotonic)
    moved: float = field(default_factory=time.monotonic)
    count: int = 0
    place: str = "the start"
    waits: bool = False
    left: bool = False  # it said goodbye, or its process has ended

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.name})"

    def note(self, count: int, place: str, waits: bool) -> None:
        if count != self.count:
            self.count, self.moved = count, time.monotonic()
        self.place, self.waits = place, waits


class Watch:
    """Watches over the ranks of a run until `close`. `peers`: on rank 0 all others, elsewhere rank 0."""

    def __init__(
        self, rank: int, peers: list[Peer], timeout: float, progress: Progress, leave: Callable[[int], Any] = os._exit
    ):
        self.rank, self.peers, self.timeout, self.progress, self.leave = rank, peers, timeout, progress, leave
        self.me = Peer(rank, None, f"process {os.getpid()}")
        self.fault: tuple[str, int, bool] | None = None  # the line that ends the run, exit status, whether it is a hang
        self.known, self.closing, self.mine = threading.Event(), threading.Event(), threading.Event()
        self.lock = threading.Lock()
        self.parent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self.ended: tuple[float, Peer] | None = None  # the first whose connection closed, and when
        self.thread = threading.Thread(target=self._watch, daemon=True, name="watch")
        self.thread.start()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """In a process forked from this one: it is no rank, and must not keep the connections of one that ends."""
        for peer in self.peers:
            if peer.end:
                peer.end.close()

    def close(self) -> None:
        """Say goodbye: from now on this rank may leave."""
        self.closing.set()
        self.thread.join(5)
        self._say(bye=True)
        self._forget()

    def report(self, text: str, status: int, *, shared: bool = False) -> None:
        """Make an error of this rank that of the run; returns once the line is printed, by this rank or by another.

        `shared`: the other ranks will find the same, and no rank is to be named.
        """
        self.mine.set()
        if self.rank == 0:
            self._end(f"error: {text}" if shared or not self.peers else f"error on rank 0: {text}", status)
        elif not (shared and self.known.wait(PATIENCE)):  # by then rank 0 has found the same
            line = f"error on rank {self.rank}: {text}"
            self._say(error=line, status=status)
            if not self.known.wait(2 * PATIENCE):
                self._end(line, status)

    def verdict(self, seconds: float) -> bool:
        """Tell whether, within so long, another rank is to blame for what this one met; then it has been printed."""
        self.mine.set()
        return self.known.wait(seconds)

    def _say(self, **message: Any) -> None:
        for peer in self.peers:
            with suppress(OSError):  # gone, which reading notices, or stopped and its buffer full
                if peer.end:
                    peer.end.send_bytes(json.dumps(message).encode())

    def _end(self, line: str, status: int, hang: bool = False, *, heard: bool = False) -> None:
        """The first fault: print it and tell the others, unless it was `heard` from them."""
        with self.lock:
            if self.fault is not None:
                return
            self.fault = line, status, hang
        if not heard:
            if self.rank <= 1 or self.mine.is_set():
                speak(line)
            self._say(fault=self.fault)
        self.known.set()

    # ------------------------------------------------------------------------------------------------- in the thread

    def _watch(self) -> None:
        beaten = seen = 0.0
        while not self.closing.is_set() and self.fault is None:
            now = time.monotonic()
            if now - seen > 5 * BEAT:  # all of us were stopped, not the others
                for peer in self.peers:
                    peer.heard = peer.moved = now
            seen = now
            if now - beaten >= BEAT / 2:
                beaten, beat = now, (self.progress.count, *self.progress.where())
                self.me.note(*beat)
                self._say(beat=beat)
                seen = time.monotonic()  # to a rank that is stopped a message takes its time
            ends: dict[Any, Peer] = {peer.end: peer for peer in self.peers if peer.end and not peer.left}
            for end in wait(list(ends), min(BEAT, self.timeout) / 4):
                self._take(ends[end], received(end))
            self._judge(time.monotonic())
        if self.fault is not None and self.fault[2] and self.progress.folder is not None:
            flight.write(self.progress.folder, self.rank, self.progress, self.fault[0])
        if self.mine.is_set():
            self.closing.wait(LINGER)
        if self.fault is not None and not self.closing.is_set():
            self.leave(self.fault[1])

    def _take(self, peer: Peer, message: dict[str, Any]) -> None:
        peer.heard = time.monotonic()
        if "beat" in message:
            peer.note(*message["beat"])
        elif "fault" in message:
            self._end(*message["fault"], heard=True)
        elif "error" in message:
            self._end(message["error"], message["status"])
        else:
            peer.left = True
            if "bye" not in message:
                self.ended = self.ended or (peer.heard, peer)

    def _judge(self, now: float) -> None:
        if self.parent is not None and os.getppid() != self.parent:
            self._end(f"error: torchrun (process {self.parent}), which started rank {self.rank}, is gone", 1)
        if self.ended is not None and now - self.ended[0] > GRACE:
            self._miss(self.ended[1])
        here = [peer for peer in self.peers if not peer.left]
        for peer in here:
            if now - peer.heard > self.timeout:
                silent = f"{peer} has not answered for {now - peer.heard:.0f} s (train.timeout)"
                self._lose(f"{silent}: it is stopped, or its host is gone. Last it was in {peer.place}")
        if self.rank == 0 and here and self.me.count:  # the start takes as long as it takes
            self._hang(now, [self.me, *here])

    def _miss(self, peer: Peer) -> None:
        """End the run for a rank that is gone, by itself or as the run was told to stop."""
        last = f"Last it was in {peer.place}"
        if self.progress.stopped:
            told = f"the run was told to stop ({self.progress.stopped}), and {peer} ended before it had a checkpoint"
            late = (
                "if that was 30 s after the signal, torchrun killed it; TORCH_ELASTIC_SHUTDOWN_TIMEOUT=SECONDS gives "
                "ranks longer"
            )
            self._end(f"error: {told}: {late}. {last}", 1)
        else:
            self._lose(f"{peer} is gone: it was killed or it crashed. {last}")

    def _hang(self, now: float, everyone: list[Peer]) -> None:
        """If no rank gets on: who keeps the others waiting?"""
        quiet = now - max(peer.moved for peer in everyone)
        if quiet <= self.timeout:
            return
        least = min(peer.count for peer in everyone)
        late = [peer for peer in everyone if not peer.waits] or [p for p in everyone if p.count == least]
        named = "; ".join(f"{peer} is in {peer.place}" for peer in late[:8])
        more = f"; and {len(late) - 8} more" if len(late) > 8 else ""
        rest = "" if len(late) == len(everyone) else f"; the other {len(everyone) - len(late)} wait for it"
        self._lose(f"nothing has moved for {quiet:.0f} s (train.timeout): {named}{more}{rest}")

    def _lose(self, text: str) -> None:
        """End the run for ranks that are gone or hang: all write what they were in."""
        folder = self.progress.folder
        where = f". Of each rank: python -m zoo.training.flight {folder}" if folder and self.progress.count else ""
        self._end(f"error: {text}{where}", 1, bool(where))


def own_code(file: str) -> bool:
    """Tell whether a file is one of this project's."""
    name = Path(os.path.relpath(file, HOME) if os.path.isabs(file) else "..")
    return name.parts[0] in OWN and name.name not in ("watch.py", "ranks.py")


def speak(line: str) -> None:
    """To the user, if there is still somewhere to say it."""
    with suppress(OSError, ValueError):
        print(printable(line) + "\n", end="", file=sys.stderr, flush=True)  # at once, for ranks may speak together


# ------------------------------------------------------------------------------------------------------ how they meet


def listen(world: int, seconds: float, announce: Callable[[int], None]) -> list[Peer]:
    """Rank 0: open a port, `announce` it, and wait for all others."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with socket.create_server(("", 0), family=family, backlog=world, dualstack_ipv6=family == socket.AF_INET6) as door:
        announce(door.getsockname()[1])
        found: dict[int, Peer] = {}
        deadline = time.monotonic() + seconds
        while missing := [rank for rank in range(1, world) if rank not in found]:
            if not wait([door], deadline - time.monotonic()):
                names = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
                text = f"rank {names} of {world} did not connect within {seconds:g} s (train.timeout)"
                raise UserError(text, alone=True)
            end = connection(door.accept()[0])
            hello = received(end)
            if hello.keys() >= {"rank", "name"}:  # else it is somebody else's
                found[hello["rank"]] = Peer(hello["rank"], end, hello["name"])
    return [found[rank] for rank in sorted(found)]


def connect(rank: int, host: str, port: int) -> Peer:
    """Another rank: connect to rank 0."""
    end = connection(socket.create_connection((host, port), timeout=10))
    end.send_bytes(json.dumps({"rank": rank, "name": f"process {os.getpid()} on {socket.gethostname()}"}).encode())
    return Peer(0, end, f"on {host}")


def connection(end: socket.socket) -> Connection:
    """A socket that takes messages; one that is stuck is an OSError, and does not keep the watch."""
    end.setblocking(True)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        end.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", STUCK, 0))
    return Connection(end.detach())


def received(end: Any) -> dict[str, Any]:
    """The next message; {} where there is none any more, or what came is none."""
    try:
        found = json.loads(end.recv_bytes(MOST))
    except (OSError, EOFError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def wait_for_port(host: str, port: int, seconds: float) -> None:
    """Until somebody listens there: torch's own waiting prints its stack."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, port), timeout=max(0.1, min(5.0, seconds))).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise UserError(
                    f"rank 0 at {host}:{port} (MASTER_ADDR, MASTER_PORT) did not answer within {seconds:g} s "
                    f"(train.timeout): {error}", alone=True,
                ) from None  # fmt: skip
            time.sleep(0.1)
