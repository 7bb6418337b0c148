"""The watch that ranks keep on each other outside of torch: who lives, who gets on, who met an error.

Every rank has a connection to rank 0, outside of torch, and a thread that says once a second how far the rank is. So a
process that ends is seen at once, by its connection; one that is stopped, by its silence; one that hangs, by a count of
steps that stands still. The first fault ends all ranks, with one line, which rank 0 prints, or if it is gone rank 1.
"""

import json
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zoo.data.limits import parse_json
from zoo.training import UserError, flight, printable

BEAT = 1.0  # seconds between two signs of life
GRACE = 0.5  # seconds between the end of a rank and the word on it: a signal to all ends one before the other
PATIENCE = 3.0  # seconds that a rank waits for what the others have to say of an error
LINGER = 20.0  # seconds that a rank with an error has for its own clean-up
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

    def of(self, model: Any, folder: Path) -> None:
        self.model, self.folder = model, folder

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
    """The other end of a connection, and what it said last."""

    rank: int
    socket: socket.socket
    name: str = "?"  # its process and host
    heard: float = field(default_factory=time.monotonic)
    moved: float = field(default_factory=time.monotonic)
    count: int = 0
    place: str = "the start"
    waits: bool = False
    left: bool = False  # it said goodbye
    rest: bytes = b""

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.name})"

    def send(self, **message: Any) -> None:
        with suppress(OSError):  # gone, which reading notices, or stopped and its buffer full
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> Iterator[Mapping[str, Any]]:
        """The messages since the last call; at last `{"end": True}`, once the connection is closed."""
        try:
            data = self.socket.recv(1 << 16)
        except (BlockingIOError, InterruptedError, TimeoutError):
            return
        except OSError:
            data = b""
        if not data:
            yield {"end": True}
            return
        *lines, self.rest = (self.rest + data).split(b"\n")
        if len(self.rest) > MOST:
            yield {"end": True}
        for line in lines:
            try:
                message = parse_json(line)
            except ValueError:
                continue
            if isinstance(message, dict):
                yield message


class Watch:
    """Watches over the ranks of a run until `close`. `peers`: on rank 0 all others, elsewhere rank 0."""

    def __init__(
        self, rank: int, peers: list[Peer], timeout: float, progress: Progress, leave: Callable[[int], Any] = os._exit
    ):
        self.rank, self.timeout, self.progress, self.leave = rank, timeout, progress, leave
        self.peers = {peer.socket: peer for peer in peers}
        self.fault: tuple[str, int] | None = None  # the line that ends the run, and the exit status
        self.recorded = False  # whether it is one of which every rank writes what it was in
        self.known, self.closing, self.mine = threading.Event(), threading.Event(), threading.Event()
        self.lock = threading.Lock()
        self.parent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self.doubt: tuple[float, str, int] | None = None  # an error of another rank that this one may have, too
        self.ended: tuple[float, Peer] | None = None  # the first whose connection closed, and when
        self.thread = threading.Thread(target=self._watch, daemon=True, name="watch")
        self.thread.start()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """In a process forked from this one: it is no rank, and must not keep the connections of one that ends."""
        for peer in self.peers.values():
            peer.socket.close()

    def close(self) -> None:
        """Say goodbye: from now on this rank may leave."""
        self.closing.set()
        self.thread.join(5)
        for peer in self.peers.values():
            peer.send(bye=True)
            peer.socket.close()

    def report(self, text: str, status: int, *, shared: bool = False) -> None:
        """Make an error of this rank that of the run; returns once the line is printed, by this rank or by another.

        `shared`: the other ranks will find the same, and no rank is to be named.
        """
        self.mine.set()
        if self.rank == 0:
            self._end(text if shared else f"error on rank 0: {text}" if self.peers else f"error: {text}", status)
            return
        for peer in self.peers.values():
            peer.send(error=text, status=status, shared=shared)
        if not self.known.wait(2 * PATIENCE):
            self._end(f"error on rank {self.rank}: {text}", status)

    def verdict(self, seconds: float) -> bool:
        """Tell whether, within so long, another rank is to blame for what this one met; then it has been printed."""
        self.mine.set()
        return self.known.wait(seconds)

    # ------------------------------------------------------------------------------------------------- in the thread

    def _watch(self) -> None:
        beaten = seen = 0.0
        while not self.closing.is_set() and self.fault is None:
            now = time.monotonic()
            if now - seen > 5 * BEAT:  # all of us were stopped, not the others
                for peer in self.peers.values():
                    peer.heard = peer.moved = now
            seen = now
            if now - beaten >= BEAT / 2:
                beaten = now
                place, waits = self.progress.where()
                for peer in self.peers.values():
                    peer.send(beat=[self.progress.count, place, waits])
            self._listen(min(BEAT, self.timeout) / 4)
            self._judge(time.monotonic())
        if self.fault is not None and self.recorded and self.progress.folder is not None:
            flight.write(self.progress.folder, self.rank, self.progress, self.fault[0])
        if self.mine.is_set():
            self.closing.wait(LINGER)
        if self.fault is not None and not self.closing.is_set():
            self.leave(self.fault[1])

    def _listen(self, seconds: float) -> None:
        open_ends = [end for end, peer in self.peers.items() if end.fileno() >= 0 and not peer.left]
        if not open_ends:
            self.closing.wait(seconds)
            return
        for end in select.select(open_ends, [], [], seconds)[0]:
            peer = self.peers[end]
            for message in peer.receive():
                self._take(peer, message)

    def _take(self, peer: Peer, message: Mapping[str, Any]) -> None:
        now = time.monotonic()
        peer.heard = now
        if "beat" in message:
            count, peer.place, peer.waits = message["beat"]
            if count != peer.count:
                peer.count, peer.moved = count, now
        elif "fault" in message:
            self.recorded = bool(message.get("recorded"))
            self._know(message["fault"], message["status"])
        elif "error" in message:
            if message["shared"]:  # rank 0 is about to find the same
                self.doubt = self.doubt or (now, f"error on rank {peer.rank}: {message['error']}", message["status"])
            else:
                self._end(f"error on rank {peer.rank}: {message['error']}", message["status"])
        elif "bye" in message:
            peer.left = True
        elif "end" in message and not peer.left:
            if self.doubt is None:
                self.ended = self.ended or (now, peer)
            peer.left = True

    def _judge(self, now: float) -> None:
        if self.parent is not None and os.getppid() != self.parent:
            self._end(f"error: torchrun (process {self.parent}), which started rank {self.rank}, is gone", 1)
        if self.doubt is not None and now - self.doubt[0] > PATIENCE:
            self._end(*self.doubt[1:])
        if self.ended is not None and now - self.ended[0] > GRACE:
            self._miss(self.ended[1])
        here = [peer for peer in self.peers.values() if not peer.left]
        for peer in here:
            if now - peer.heard > self.timeout:
                silent = f"{peer} has not answered for {now - peer.heard:.0f} s (train.timeout)"
                self._lose(f"{silent}: it is stopped, or its host is gone. Last it was in {peer.place}")
        if self.rank == 0 and here:
            self._hang(now, here)

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

    def _hang(self, now: float, here: list[Peer]) -> None:
        """No rank gets on: who keeps the others waiting?"""
        mine = self.progress
        if mine.count == 0:  # the start takes as long as it takes
            return
        me = Peer(0, next(iter(self.peers)), f"process {os.getpid()}", count=mine.count)
        me.place, me.waits = mine.where()
        if mine.count != getattr(self, "counted", None):
            self.counted, self.since = mine.count, now
        quiet = now - max(self.since, *(peer.moved for peer in here))
        if quiet <= self.timeout:
            return
        everyone = [me, *here]
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
        self._end(f"error: {text}{where}", 1, recorded=bool(where))

    def _end(self, line: str, status: int, recorded: bool = False) -> None:
        """The first fault: print it, and tell the others."""
        self.recorded = self.recorded or recorded
        if self._know(line, status, first=True):
            for peer in self.peers.values():
                peer.send(fault=line, status=status, recorded=recorded)

    def _know(self, line: str, status: int, first: bool = False) -> bool:
        with self.lock:
            if self.fault is not None:
                return False
            self.fault = line, status
        if first and (self.rank <= 1 or self.mine.is_set()):
            speak(line)
        self.known.set()
        return True


def own_code(file: str) -> bool:
    """Tell whether a file is one of this project's."""
    name = Path(os.path.relpath(file, HOME) if os.path.isabs(file) else "..")
    return name.parts[0] in OWN and name.name not in ("watch.py", "ranks.py")


def speak(line: str) -> None:
    """To the user, if there is still somewhere to say it."""
    with suppress(OSError, ValueError):
        print(printable(line) + "\n", end="", file=sys.stderr, flush=True)  # at once, for ranks may speak together


# ------------------------------------------------------------------------------------------------------ how they meet


def listen(world: int, key: str, seconds: float, announce: Callable[[int], None]) -> tuple[list[Peer], list[Any]]:
    """Rank 0: open a port, `announce` it, and wait for all others. Their connections, and what each said at first."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with socket.create_server(("", 0), family=family, backlog=world, dualstack_ipv6=family == socket.AF_INET6) as door:
        announce(door.getsockname()[1])
        found: dict[int, tuple[Peer, Any]] = {}
        deadline = time.monotonic() + seconds
        while len(found) < world - 1:
            door.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                end, _ = door.accept()
            except TimeoutError:
                for peer, _ in found.values():
                    peer.socket.close()
                missing = [rank for rank in range(1, world) if rank not in found]
                names = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
                raise alone(f"rank {names} of {world} did not connect within {seconds:g} s (train.timeout)") from None
            hello, rest = _hello(end, min(5.0, seconds))
            if hello.get("key") == key and isinstance(hello.get("rank"), int):
                end.settimeout(5)
                found[hello["rank"]] = Peer(hello["rank"], end, str(hello["name"]), rest=rest), hello.get("says")
            else:
                end.close()  # somebody else's
    return [found[rank][0] for rank in sorted(found)], [found[rank][1] for rank in sorted(found)]


def connect(rank: int, host: str, port: int, key: str, says: Any) -> list[Peer]:
    """Another rank: connect to rank 0."""
    end = socket.create_connection((host, port), timeout=10)
    peer = Peer(0, end, f"on {host}")
    peer.send(key=key, rank=rank, name=f"process {os.getpid()} on {socket.gethostname()}", says=says)
    end.settimeout(5)
    return [peer]


def _hello(end: socket.socket, seconds: float) -> tuple[dict[str, Any], bytes]:
    """The first message, and what came behind it."""
    end.settimeout(seconds)
    data = b""
    try:
        while b"\n" not in data and len(data) < MOST and (more := end.recv(1 << 16)):
            data += more
        line, _, rest = data.partition(b"\n")
        found = parse_json(line)
    except (OSError, ValueError):
        return {}, b""
    return (found, rest) if isinstance(found, dict) else ({}, b"")


def wait_for_port(host: str, port: int, seconds: float) -> None:
    """Until somebody listens there: torch's own waiting prints its stack."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, port), timeout=max(0.1, min(5.0, seconds))).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise alone(
                    f"rank 0 at {host}:{port} (MASTER_ADDR, MASTER_PORT) did not answer within {seconds:g} s "
                    f"(train.timeout): {error}"
                ) from None
            time.sleep(0.1)


def alone(text: str) -> UserError:
    error = UserError(text)
    error.alone = True
    return error
