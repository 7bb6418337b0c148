"""The watch of ranks: two watches in one process, joined by a socket."""

import contextlib
import json
import re
import socket
import struct
import threading
import time
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from zoo.training import UserError, flight, ranks, watch
from zoo.training.watch import Peer, Progress, Watch


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(watch, "BEAT", 0.05)
    monkeypatch.setattr(watch, "PATIENCE", 0.2)
    monkeypatch.setattr(ranks, "PATIENCE", 0.2)


class Ranks:
    """Watches of some ranks, what each was ended with, and their progress."""

    def __init__(self, world=2, timeout=60.0):
        self.ended = {}
        self.progress = [Progress(thread=0) for _ in range(world)]
        self.ends = [socket.socketpair() for _ in range(world - 1)]
        both = [[watch.connection(end.dup()) for end in pair] for pair in self.ends]
        hub = [Peer(r, ends[0], f"process {r}00 on host") for r, ends in enumerate(both, 1)]
        self.all = [self.start(0, hub, timeout)]
        self.all += [self.start(r, [Peer(0, ends[1], "on host")], timeout) for r, ends in enumerate(both, 1)]

    def start(self, rank, peers, timeout):
        return Watch(rank, peers, timeout, self.progress[rank], leave=lambda status: self.ended.update({rank: status}))

    def wait(self, *expected):
        deadline = time.monotonic() + 20
        while set(self.ended) != set(expected) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert set(self.ended) == set(expected)

    def close(self):
        for each in reversed(self.all):
            each.close()
        for end in (end for pair in self.ends for end in pair):
            end.close()


@pytest.fixture
def start():
    started = []

    def start(*args, **kwargs):
        started.append(Ranks(*args, **kwargs))
        return started[-1]

    yield start
    for each in started:
        each.close()


def test_quiet_ranks_end_quietly(start, capsys):
    both = start(3)
    time.sleep(0.3)
    both.close()
    assert both.ended == {}
    assert capsys.readouterr().err == ""


def test_an_error_of_one_rank_ends_all_with_one_line(start, capsys):
    several = start(3)
    several.all[2].report("step 7: disk full", 2)
    several.wait(0, 1)  # rank 2 leaves by itself
    assert several.ended == {0: 2, 1: 2}
    assert capsys.readouterr().err == "error on rank 2: step 7: disk full\n"


def test_an_error_that_all_have_names_none(start, capsys):
    both = start()
    teller = threading.Thread(target=both.all[1].report, args=("no such key", 2), kwargs={"shared": True})
    teller.start()
    time.sleep(0.1)
    both.all[0].report("no such key", 2, shared=True)
    teller.join()
    assert capsys.readouterr().err == "error: no such key\n"


def test_an_error_that_only_seemed_shared_names_its_rank(start, capsys):
    both = start()
    both.all[1].report("no such key", 2, shared=True)
    both.wait(0)
    assert capsys.readouterr().err == "error on rank 1: no such key\n"


def test_a_process_that_ends_is_named_with_what_it_did(start, capsys):
    several = start(3)
    several.progress[1].doing = "step 12"
    time.sleep(0.3)
    several.ends[0][1].shutdown(socket.SHUT_RDWR)  # as the kernel does
    several.wait(0, 1, 2)
    said = capsys.readouterr().err.splitlines()
    assert "error: rank 1 (process 100 on host) is gone: it was killed or it crashed. Last it was in step 12" in said


def test_rank_0_gone_is_said_by_rank_1(start, capsys):
    several = start(3)
    time.sleep(0.1)
    several.all[0].closing.set()  # without a goodbye
    several.all[0].thread.join()
    for pair in several.ends:
        pair[0].shutdown(socket.SHUT_RDWR)
    several.wait(1, 2)
    assert re.fullmatch(r"error: rank 0 \(on host\) is gone: .*\n", capsys.readouterr().err)


@pytest.mark.parametrize("gone", [0, 1])
def test_a_killed_rank_and_the_step_to_go_on_from_are_in_the_log_too(start, capsys, tmp_path, gone):
    """A launcher sends SIGTERM to the others as soon as one has died: that is not the reason."""
    for name in ("step-00000010", "step-00000020", "step-00000030.incomplete"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    several = start(3)
    for progress in several.progress:
        progress.doing, progress.folder = "step 21", tmp_path / "flight/1"
    time.sleep(0.3)
    several.all[gone].closing.set()  # without a goodbye
    several.all[gone].thread.join()
    for end in [several.ends[0][1]] if gone else [pair[0] for pair in several.ends]:
        end.shutdown(socket.SHUT_RDWR)
    time.sleep(0.1)
    for progress in several.progress:
        progress.stopped, progress.stopped_at = "SIGTERM", time.monotonic()
    several.wait(*{0, 1, 2} - {gone})
    said = capsys.readouterr().err.splitlines()[0]
    assert re.match(rf"error: rank {gone} \(.*\) is gone: it was killed or it crashed. Last it was in step 21", said)
    assert "; resume=true goes on from step 20" in said
    log = tmp_path / "console.log"
    assert (log.read_text() if log.exists() else "") == ("" if gone else f"{said}\n")  # rank 0 copies what it prints


def test_ranks_on_a_host_without_ranks_0_and_1_name_the_lost_host(start, capsys, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")
    several = start(3)
    time.sleep(0.1)
    for each in several.all[:2]:  # both were on the host that is gone
        each.closing.set()
        each.thread.join()
    for pair in several.ends:
        pair[0].shutdown(socket.SHUT_RDWR)
    several.wait(2)
    assert re.match(r"error: rank 0 \(.*\) is gone: ", capsys.readouterr().err)


def test_a_run_that_was_told_to_stop_says_so(start, capsys):
    both = start()
    time.sleep(0.1)
    for progress in both.progress:
        progress.stopped = "SIGTERM"
    both.ends[0][1].shutdown(socket.SHUT_RDWR)
    both.wait(0, 1)
    said = capsys.readouterr().err
    assert "error: the run was told to stop (SIGTERM), and rank 1 (process 100 on host) ended before it had a" in said
    assert "TORCH_ELASTIC_SHUTDOWN_TIMEOUT" in said
    assert "gone" not in said


def test_ranks_that_one_signal_ends_say_nothing(start, capsys):
    """Each has seen the other end, and is about to."""
    both = start()
    time.sleep(0.1)
    both.ends[0][1].shutdown(socket.SHUT_RDWR)
    time.sleep(0.1)
    for each in both.all:
        each.closing.set()  # as its process ends
        each.thread.join()
    assert capsys.readouterr().err == ""
    assert both.ended == {}


def test_a_silent_rank_is_named(start, capsys):
    both = start(timeout=0.4)
    both.progress[1].doing = "step 3"
    time.sleep(0.2)
    both.all[1].closing.set()  # its thread stops, as all of it does under SIGSTOP
    both.wait(0)
    assert re.match(
        r"error: rank 1 \(process 100 on host\) has not answered for \d+ s \(train.timeout\): it is stopped, or its "
        r"host is gone. Last it was in step 3\n", capsys.readouterr().err,
    )  # fmt: skip


def test_a_suspended_run_goes_on(start, capsys, monkeypatch):
    """A gap in a watcher's own clock is nobody's fault: not silence, and not a hang."""
    real, suspended = time.monotonic, [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: real() + suspended[0])
    both = start(timeout=2.0)
    for _ in range(6):
        for progress in both.progress:
            progress.count += 1
        time.sleep(0.2)
        suspended[0] += 9.0
    time.sleep(0.2)
    assert both.ended == {}
    assert capsys.readouterr().err == ""


def test_a_hanging_rank_is_named_and_those_that_wait_are_not(start, capsys, monkeypatch):
    places = {"step 5": ("step 5, in all_reduce", True), "loading": ("step 5, in read (zoo/data/x.py:3)", False)}
    monkeypatch.setattr(Progress, "position", lambda self: places.get(self.doing, ("the start", False)))
    several = start(3, timeout=0.5)
    for progress, doing in zip(several.progress, ("step 5", "loading", "step 5")):
        progress.count, progress.doing = 4, doing
    several.wait(0, 1, 2)
    assert re.match(
        r"error: nothing has moved for \d+ s \(train.timeout\): rank 1 \(process 100 on host\) is in step 5, in read "
        r"\(zoo/data/x.py:3\); the other 2 wait for it\n", capsys.readouterr().err,
    )  # fmt: skip


def test_of_a_hang_every_rank_writes_what_it_was_in(start, capsys, monkeypatch, tmp_path):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = nn.Sequential(OrderedDict(first=nn.Identity(), last=nn.Identity()))
    inside, through = threading.Event(), threading.Event()

    def forward():
        dist.all_reduce(torch.ones(2, 3))
        model.last.forward = lambda x: (inside.set(), through.wait(20))
        model(torch.ones(1))

    thread = threading.Thread(target=forward)
    thread.start()
    assert inside.wait(20)
    several = start(3, timeout=0.5)
    for rank, progress in enumerate(several.progress):
        progress.count, progress.doing, progress.folder, progress.model = 4, "step 5", tmp_path / "flight" / "1", model
        progress.thread = thread.ident if rank == 1 else 0
    several.wait(0, 1, 2)
    through.set()
    thread.join()
    dist.destroy_process_group()
    assert f"python -m zoo.training.flight {tmp_path}" in capsys.readouterr().err
    assert flight.main([str(tmp_path)]) == 0
    fault, *lines = capsys.readouterr().out.splitlines()
    assert fault.startswith("error: nothing has moved for")
    assert [line.split(";")[0].split(" (")[0] for line in lines] == [
        "rank 0: step 5", "rank 1: step 5, in forward", "rank 2: step 5"
    ]  # fmt: skip
    assert ", in last; after collective " in lines[1]
    assert "gloo:all_reduce of 2x3" in lines[1]
    assert flight.main([str(tmp_path / "nothing")]) == 2


def test_the_start_may_take_its_time_and_steps_that_count_are_no_hang(start):
    both = start(timeout=0.4)
    time.sleep(0.8)
    for _ in range(8):
        time.sleep(0.1)
        for progress in both.progress:
            progress.count += 1
    assert both.ended == {}


STRANGERS = (
    '{"rank": 1, "name": "x"}',
    '{"rank": [], "name": "x", "token": "key"}', '{"rank": true, "name": "x", "token": "key"}',
    '{"rank": 1, "name": {}, "token": "key"}', '{"rank": 1, "name": "x", "token": "other"}', '{"rank": ' * 9000,
)  # fmt: skip


def test_garbage_on_the_port_is_no_rank_and_who_is_missing_is_named():
    ports = []

    def others():
        while not ports:
            time.sleep(0.01)
        for wrong in (
            b"\x00\xff",
            b"GET / HTTP/1.0\r\n\r\n",
            b"\x00\x00\x00\x02{}",
            b"\x00\x00\x00\x01[",
            b"[" * 10_000,
            *(struct.pack("!i", len(hello)) + hello for hello in map(str.encode, STRANGERS)),
        ):
            with socket.create_connection(("localhost", ports[0])) as stranger, contextlib.suppress(OSError):
                stranger.sendall(wrong)
        with contextlib.suppress(OSError):
            joined.append(watch.connect(2, "localhost", ports[0], "key", 3))

    joined = []
    thread = threading.Thread(target=others)
    thread.start()
    with pytest.raises(UserError, match=r"rank 1 of 3 did not connect within 4 s \(train.timeout\)"):
        watch.listen(3, 4.0, ports.append, "key")
    thread.join()
    for peer in joined:
        peer.end.close()


@pytest.mark.parametrize(
    ("hello", "said"),
    [
        ({"world": 4}, r"rank 1 \(process \d+ on .*\) was started with WORLD_SIZE=4, rank 0 with 3: start all"),
        ({"rank": 3}, r"rank 3 \(.*\) is not the only one of its RANK, there is a rank of 3: give each process"),
        ({"rank": -1}, r"rank -1 \(.*\) is not the only one of its RANK"),
    ],
)
def test_ranks_of_another_world_are_named_and_hear_of_it(hello, said):
    ports, joined = [], []

    def other():
        while not ports:
            time.sleep(0.01)
        joined.append(watch.connect(hello.get("rank", 1), "localhost", ports[0], "key", hello.get("world", 3)))

    thread = threading.Thread(target=other)
    thread.start()
    with pytest.raises(UserError, match=said):
        watch.listen(3, 20.0, ports.append, "key")
    thread.join()
    assert re.match("error: " + said, watch.received(joined[0].end)["fault"][0])
    joined[0].end.close()


def test_two_processes_of_one_rank_are_named():
    ports, joined = [], []

    def others():
        while not ports:
            time.sleep(0.01)
        joined.extend(watch.connect(1, "localhost", ports[0]) for _ in range(2))

    thread = threading.Thread(target=others)
    thread.start()
    with pytest.raises(UserError, match=r"rank 1 \(.*\) is not the only one of its RANK, there is rank 1 \(process"):
        watch.listen(3, 20.0, ports.append)
    thread.join()
    for peer in joined:
        peer.end.close()


@pytest.mark.parametrize(
    "message",
    [{"beat": 3}, {"beat": [1, "here"]}, {"fault": [1]}, {"error": "broken"}, {"fault": {"a": 1}}],
    ids=str,
)
@pytest.mark.parametrize("sender", [0, 1])
def test_a_message_of_another_version_ends_the_run_and_not_the_watch_alone(start, capsys, message, sender):
    both = start()
    watch.send(both.all[sender].peers[0], **message)
    both.wait(0, 1)
    assert "sent a message that is not one of this code" in capsys.readouterr().err


FLIGHT = {"rank": 0, "fault": "error: x", "place": "y", "modules": ["z"], "collectives": []}
ENTRY = {"group": "g", "number": 3, "name": "n", "sizes": [[2, 3]], "done": False, "seconds_ago": 1.0}


@pytest.mark.parametrize(
    "record",
    [
        [], 3, {}, *({**FLIGHT, key: None} for key in FLIGHT), FLIGHT | {"modules": [1]}, FLIGHT | {"rank": 1e400},
        *(FLIGHT | {"collectives": [ENTRY | {key: None}]} for key in ENTRY), FLIGHT | {"collectives": [3]},
    ],
)  # fmt: skip
def test_a_flight_record_that_lacks_a_part_is_one_line(tmp_path, capsys, record):
    (tmp_path / "rank-0.json").write_text(json.dumps(FLIGHT | {"collectives": [ENTRY]}))
    assert flight.main([str(tmp_path)]) == 0
    assert "in collective 3 of group g, n of 2x3" in capsys.readouterr().out
    (tmp_path / "rank-0.json").write_text(json.dumps(record))
    assert flight.main([str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path}/rank-0.json: damaged: it lacks a part of a flight record\n"


def test_nobody_listens():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(UserError, match=r"rank 0 at 127.0.0.1:\d+ \(MASTER_ADDR, MASTER_PORT\) did not answer"):
        watch.wait_for_port("127.0.0.1", port, 0.2)


def test_other_configurations_are_named_key_by_key():
    mine = {"optim.lr": 0.1, "train.steps": 5, "data.size": (3, 4)}
    ranks.check_same_config([mine, dict(mine)], [None, None])
    with pytest.raises(UserError, match=r"1 of 2 others differ .* rank 2 in optim.lr=0.2 \(rank 0: 0.1\); start all"):
        ranks.check_same_config([mine, mine, {**mine, "optim.lr": 0.2}], [None] * 3)
    with pytest.raises(UserError, match=r"^rank 1: unknown key$"):
        ranks.check_same_config([mine, {}], [None, "unknown key"])
    with pytest.raises(UserError, match=r"^unknown key$"):
        ranks.check_same_config([{}, {}], ["unknown key"] * 2)


def test_errors_in_words(tmp_path):
    progress = Progress(doing="step 9", count=9)

    def said(action):
        try:
            action()
        except Exception as error:
            return ranks.describe(error, progress)

    assert said(lambda: (tmp_path / "x/y").write_text("")) == f"step 9: {tmp_path}/x/y: No such file or directory"
    text = said(lambda: {}["absent"])
    place = r"\(in \S+, tests/training/test_watch.py:\d+\)"
    found = re.fullmatch(rf"step 9: KeyError: 'absent' {place}; the traceback is in (.*)", text)
    assert "Traceback" in Path(found[1]).read_text()
    Path(found[1]).unlink()
