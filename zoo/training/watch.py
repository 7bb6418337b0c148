"""The watch of ranks on each other, outside of torch: which ranks are alive, go on, or met an error.

Every rank has a connection to rank 0, outside of torch, and a thread that reports its progress once a second. So the
end of a process is seen at once, by its connection; a stopped process, by its silence; a hang, by a count of steps that
does not grow. The first fault ends all ranks with one line, which rank 0 prints, or rank 1 if rank 0 is gone.

torch's store cannot do this: it does not say which client is gone, and a call to a store whose process is stopped does
not return.
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

from zoo.files import parse_json
from zoo.training import UserError, flight, printable
from zoo.training.console import opened

BEAT = 1.0  # seconds between two signs of life
GRACE = 0.5  # seconds from the end of a rank to its report: a signal to all ranks ends one before another
PATIENCE = 3.0  # seconds that a rank with an error waits for the report of another rank
LINGER = 20.0  # seconds that a rank with an error has for its own clean-up
STUCK = 5  # seconds after which a message that does not go through counts as lost
HOME = Path(__file__).resolve().parents[2]
SOURCES = ("dsp", "zoo", "tests", "benchmarks", "train.py", "infer.py")  # the project's own code in HOME
# places in the code where a rank waits for others
WAITING = (
    "torch/distributed/",
    "zoo/training/guard.py",
    "dsp/comm/collectives.py",
    "dsp/comm/exchange.py",
    "torch/_ops.py",
)
MOST = 1 << 20  # bytes of a message


@dataclass
class Progress:
    """How far this rank is: a count that grows with every step, and the name of the step."""

    count: int = 0
    doing: str = "the start"
    stopped: str = ""  # the signal that asked this rank to stop, and when
    stopped_at: float = 0.0
    thread: int = field(default_factory=threading.get_ident)
    model: Any = None  # the model whose modules a flight record names
    folder: Path | None = None  # of the flight record

    def position(self) -> tuple[str, bool]:
        """This rank's place in the code, and whether it waits for other ranks there."""
        frame, files = sys._current_frames().get(self.thread), []
        while frame is not None:
            files.append((frame.f_code.co_filename.replace("\\", "/"), frame.f_lineno, frame.f_code.co_name))
            frame = frame.f_back
        waits = any(part in name for name, _, _ in files[:4] for part in WAITING)
        in_project = [(name, line, code) for name, line, code in files if of_project(name) and "<" not in code]
        places = [f"{code} ({os.path.relpath(name, HOME)}:{line})" for name, line, code in in_project]
        return ", in ".join([self.doing, *places[:1]]), waits

    @property
    def run(self) -> Path | None:
        """The directory of the run, once there is one."""
        return self.folder and self.folder.parents[1]

    def resumable(self) -> str:
        """The checkpoint from which the run can go on, in words; '' before there is a run."""
        if self.run is None:
            return ""
        names = [path.name.removeprefix("step-") for path in self.run.glob("checkpoints/step-*")]
        steps = [int(name) for name in names if name.isdecimal()]
        return f"; resume=true goes on from step {max(steps)}" if steps else "; there is no checkpoint yet"


class Clock:
    """Seconds in which this process ran: while it was suspended no rank was silent and none hung."""

    def __init__(self) -> None:
        self.last = time.monotonic()
        self.suspended = 0.0

    def __call__(self, longest: float = 0.0) -> float:
        """The time; `longest`: seconds that the caller may have taken since the last call, where that is known."""
        now = time.monotonic()
        if now - self.last > max(longest, 5 * BEAT):
            self.suspended += now - self.last
        self.last = now
        return now - self.suspended


@dataclass
class Peer:
    """A rank, and its progress when it was last heard; times are those of the watch's clock."""

    rank: int
    end: Connection | None = None  # None: this rank itself
    name: str = "?"  # its process and host
    heard: float = 0.0
    moved: float = 0.0
    count: int = 0
    place: str = "the start"
    waits: bool = False
    has_left: bool = False  # it said goodbye, or its process has ended

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.name})"

    def note(self, now: float, count: int, place: str, waits: bool) -> None:
        if count != self.count:
            self.count, self.moved = count, now
        self.place, self.waits = place, waits


class Watch:
    """Watches over the ranks of a run until `close`. `peers`: on rank 0 all others, elsewhere rank 0."""

    def __init__(
        self, rank: int, peers: list[Peer], timeout: float, progress: Progress, leave: Callable[[int], Any] = os._exit
    ):
        self.rank, self.peers, self.timeout, self.progress, self.leave = rank, peers, timeout, progress, leave
        self.clock = Clock()
        self.me = Peer(rank, None, host_name())
        for peer in (self.me, *peers):
            peer.heard = peer.moved = self.clock()
        self.fault: tuple[str, int, bool] | None = None  # the line that ends the run, exit status, whether it is a hang
        self.known, self.closing, self.local_error = threading.Event(), threading.Event(), threading.Event()
        self.lock = threading.Lock()
        self.parent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self.ended: tuple[float, Peer] | None = None  # when a connection first closed, and whose
        self.thread = threading.Thread(target=self._watch, daemon=True, name="watch")
        self.thread.start()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """Close the connections: a process forked from this rank must not keep them when the rank ends."""
        for peer in self.peers:
            if peer.end:
                peer.end.close()

    def close(self) -> None:
        """Stop watching and say goodbye: from now on this rank may end."""
        self.closing.set()
        self.thread.join(5)
        self._send_all(bye=True)
        self._forget()

    def report(self, text: str, status: int, *, shared: bool = False) -> None:
        """End the run with an error of this rank; return once the line is printed, by this rank or another.

        `shared`: the other ranks will find the same error, so the line names no rank.
        """
        self.local_error.set()
        if self.rank == 0:
            self._end(f"error: {text}" if shared or not self.peers else f"error on rank 0: {text}", status)
        elif not (shared and self.known.wait(PATIENCE)):  # by then rank 0 has found the same error
            line = f"error on rank {self.rank}: {text}"
            self._send_all(error=line, status=status)
            if not self.known.wait(2 * PATIENCE):
                self._end(line, status)

    def verdict(self, seconds: float) -> bool:
        """Tell whether, within `seconds`, another rank proves to be the cause of this one's error, and was reported."""
        self.local_error.set()
        return self.known.wait(seconds)

    def _send_all(self, **message: Any) -> None:
        for peer in self.peers:
            with suppress(OSError):  # which reading notices
                send(peer, **message)

    def _end(self, line: str, status: int, hang: bool = False, *, heard: bool = False) -> None:
        """End the run with its first fault: print it and send it to the peers, unless it was `heard` from one."""
        with self.lock:
            if self.fault is not None:
                return
            self.fault = line, status, hang
        if not heard:
            is_first_here = os.environ.get("LOCAL_RANK") == "0"  # it prints, too: rank 1's host may be gone
            if self.rank <= 1 or self.local_error.is_set() or is_first_here:
                print_error(line)
                self._log(line)
            self._send_all(fault=self.fault)
        self.known.set()

    def _log(self, line: str) -> None:
        """Add a line to the run's log in the place of rank 0, which is gone."""
        if self.rank and self.progress.run:
            with suppress(OSError), opened(self.progress.run / "console.log") as log:
                log.write(printable(line) + "\n")

    # ------------------------------------------------------------------------------------------------- in the thread

    def _watch(self) -> None:
        beaten = 0.0
        while not self.closing.is_set() and self.fault is None:
            now = self.clock()
            if now - beaten >= BEAT / 2:
                beaten, beat = now, (self.progress.count, *self.progress.position())
                self.me.note(now, *beat)
                self._send_all(beat=beat)
                self.clock(len(self.peers) * (STUCK + BEAT))  # sending to stopped ranks takes a while
            ends: dict[Any, Peer] = {peer.end: peer for peer in self.peers if peer.end and not peer.has_left}
            for end in wait(list(ends), min(BEAT, self.timeout) / 4):
                self._receive(ends[end], received(end))
            self._check(self.clock())
        if self.fault is not None and self.fault[2] and self.progress.folder is not None:
            flight.write(self.progress.folder, self.rank, self.progress, self.fault[0])
        if self.local_error.is_set():
            self.closing.wait(LINGER)
        if self.fault is not None and not self.closing.is_set():
            self.leave(self.fault[1])

    def _receive(self, peer: Peer, message: dict[str, Any]) -> None:
        try:
            self._read(peer, message)
        except (TypeError, KeyError):  # of another version of this file: the ranks' code is compared only later
            self._end(f"error: {peer} sent a message that is not one of this code: give every host the same", 1)

    def _read(self, peer: Peer, message: dict[str, Any]) -> None:
        peer.heard = self.clock()
        if "beat" in message:
            peer.note(peer.heard, *message["beat"])
        elif "fault" in message:
            self._end(*message["fault"], heard=True)
        elif "name" in message:
            peer.name = message["name"]
        elif "error" in message:
            self._end(message["error"], message["status"])
        else:
            peer.has_left = True
            if "bye" not in message:
                self.ended = self.ended or (peer.heard, peer)

    def _check(self, now: float) -> None:
        if self.parent is not None and os.getppid() != self.parent:
            self._end(f"error: torchrun (process {self.parent}), which started rank {self.rank}, is gone", 1)
        if self.ended is not None and now - self.ended[0] > GRACE:
            self._on_exit(self.ended[1])
        peers = [peer for peer in self.peers if not peer.has_left]
        for peer in peers:
            if now - peer.heard > self.timeout:
                silent = f"{peer} has not answered for {now - peer.heard:.0f} s (train.timeout)"
                self._end_for_all(f"{silent}: it is stopped, or its host is gone. Last it was in {peer.place}")
        if self.rank == 0 and peers and self.me.count:  # the start has no limit
            self._hang(now, [self.me, *peers])

    def _on_exit(self, peer: Peer) -> None:
        """End the run because a rank is gone, by itself or after a signal to stop."""
        last = f"Last it was in {peer.place}"
        stopped_before = self.ended[0] - (self.progress.stopped_at - self.clock.suspended) if self.ended else 0.0
        if self.progress.stopped and stopped_before > GRACE:  # else a launcher sent the signal, as a rank had died
            message = f"the run was told to stop ({self.progress.stopped}), and {peer} ended before it had a checkpoint"
            late = (
                "if that was 30 s after the signal, torchrun killed it; TORCH_ELASTIC_SHUTDOWN_TIMEOUT=SECONDS gives "
                "ranks longer"
            )
            self._end(f"error: {message}: {late}. {last}{self.progress.resumable()}", 1)
        else:
            self._end_for_all(f"{peer} is gone: it was killed or it crashed. {last}")

    def _hang(self, now: float, everyone: list[Peer]) -> None:
        """End the run if no rank goes on, and name the ranks that keep the others waiting."""
        quiet = now - max(peer.moved for peer in everyone)
        if quiet <= self.timeout:
            return
        least = min(peer.count for peer in everyone)
        late = [peer for peer in everyone if not peer.waits] or [p for p in everyone if p.count == least]
        named = "; ".join(f"{peer} is in {peer.place}" for peer in late[:8])
        more = f"; and {len(late) - 8} more" if len(late) > 8 else ""
        waiting = "" if len(late) == len(everyone) else f"; the other {len(everyone) - len(late)} wait for it"
        self._end_for_all(f"nothing has moved for {quiet:.0f} s (train.timeout): {named}{more}{waiting}")

    def _end_for_all(self, text: str) -> None:
        """End the run because ranks are gone or hang; each rank writes a flight record."""
        folder = self.progress.folder
        hint = f". Of each rank: python -m zoo.training.flight {folder}" if folder and self.progress.count else ""
        self._end(f"error: {text}{self.progress.resumable()}{hint}", 1, bool(hint))


def of_project(file: str) -> bool:
    """Tell whether a file is one of this project's."""
    name = Path(os.path.relpath(file, HOME) if os.path.isabs(file) else "..")
    return name.parts[0] in SOURCES and name.name not in ("watch.py", "ranks.py")


def print_error(line: str) -> None:
    """Print a line to stderr, if that is still open."""
    with suppress(OSError, ValueError):
        print(printable(line) + "\n", end="", file=sys.stderr, flush=True)  # in one write: ranks may print together


# ---------------------------------------------------------------------------------------------------- connecting ranks


def listen(world: int, seconds: float, announce: Callable[[int], None], token: str = "") -> list[Peer]:
    """On rank 0, open a port, `announce` it, and wait for all others; who does not know the token is not one."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with socket.create_server(("", 0), family=family, backlog=world, dualstack_ipv6=family == socket.AF_INET6) as door:
        announce(door.getsockname()[1])
        peers: dict[int, Peer] = {}
        deadline = time.monotonic() + seconds
        while missing := [rank for rank in range(1, world) if rank not in peers]:
            if not wait([door], deadline - time.monotonic()):
                names = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
                text = f"rank {names} of {world} did not connect within {seconds:g} s (train.timeout)"
                raise UserError(text, alone=True)
            end = connection(door.accept()[0])
            hello = received(end)
            rank, name, theirs = (hello.get(key) for key in ("rank", "name", "world"))
            if hello.get("token") != token or type(rank) is not int or type(name) is not str:
                continue
            peer = Peer(rank, end, name[:200])
            wrong = ""
            if theirs not in (None, world):
                wrong = f"{peer} was started with WORLD_SIZE={theirs}, rank 0 with {world}: start all with the same"
            elif rank in peers or not 0 < rank < world:
                other = peers.get(rank, f"a rank of {world}")
                wrong = f"{peer} is not the only one of its RANK, there is {other}: give each process its number"
            if wrong:
                for each in (*peers.values(), peer):
                    with suppress(OSError):
                        send(each, fault=(f"error: {wrong}", 2, False))
                raise UserError(wrong)
            send(peer, name=host_name())
            peers[rank] = peer
    return [peers[rank] for rank in sorted(peers)]


def connect(rank: int, host: str, port: int, token: str = "", world: int | None = None) -> Peer:
    """On any other rank, connect to rank 0."""
    peer = Peer(0, connection(socket.create_connection((host, port), timeout=10)), f"on {host}")
    send(peer, rank=rank, name=host_name(), token=token, world=world)
    return peer


def host_name() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def send(peer: Peer, **message: Any) -> None:
    """Send a message to a rank, if it is not this one. An OSError: the rank is gone, or stopped with a full buffer."""
    if peer.end:
        peer.end.send_bytes(json.dumps(message).encode())


def connection(end: socket.socket) -> Connection:
    """A socket as a connection for messages; a message that is stuck raises OSError and does not block the watch."""
    end.setblocking(True)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        end.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", STUCK, 0))
    return Connection(end.detach())


def received(end: Any) -> dict[str, Any]:
    """The next message; {} if the connection has ended, or the data are not a message."""
    try:
        message = parse_json(end.recv_bytes(MOST))
    except (OSError, EOFError, ValueError):
        return {}
    return message if isinstance(message, dict) else {}


def wait_for_port(host: str, port: int, seconds: float) -> None:
    """Wait until a port is open: torch's own wait would print its stack."""
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
