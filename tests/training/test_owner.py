"""One run, one owner."""

import json
import multiprocessing
import os
import signal
import socket
import threading
import time

import pytest

from zoo.training import UserError, owner
from zoo.training.owner import Owner

forked = multiprocessing.get_context("fork")


def test_a_living_owner_is_named_and_nothing_is_touched(tmp_path):
    with Owner() as first:
        assert first.take(tmp_path / "run") == ""
        there = (tmp_path / "run/owner.json").read_bytes()
        with Owner() as second, pytest.raises(UserError, match="is being written by") as refused:
            second.take(tmp_path / "run")
        assert f"process {os.getpid()} on {socket.gethostname()} since 2" in str(refused.value)
        assert (tmp_path / "run/owner.json").read_bytes() == there
        assert len(list((tmp_path / "run").iterdir())) == 1
    assert list((tmp_path / "run").iterdir()) == []  # given back
    with Owner() as third:
        assert third.take(tmp_path / "run") == ""


def _hold(directory, ready):
    with Owner() as mine:
        mine.take(directory)
        ready.set()
        threading.Event().wait()


def test_a_killed_owner_is_taken_over_from(tmp_path):
    ready = forked.Event()
    process = forked.Process(target=_hold, args=(tmp_path, ready))
    process.start()
    assert ready.wait(30)
    with Owner() as mine, pytest.raises(UserError, match=f"process {process.pid} "):
        mine.take(tmp_path)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    with Owner() as mine:
        assert mine.take(tmp_path).startswith(f"process {process.pid} on ")


def test_of_many_at_once_one_gets_it(tmp_path):
    won, start = [], threading.Barrier(8)

    def claim():
        mine = Owner()
        start.wait()
        try:
            mine.take(tmp_path)
            won.append(mine)
        except UserError:
            pass

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    won[0].__exit__()


OTHER = {"host": "other", "pid": 7, "since": "then", "machine": "other's"}


@pytest.mark.parametrize("locks", [True, False], ids=["locks", "no-locks"])
def test_an_owner_on_another_host_is_believed_for_a_while(tmp_path, monkeypatch, locks):
    """Its lock may not be seen here, but its signs of life are."""
    if not locks:
        monkeypatch.setattr(owner.fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError("no locks here")))
    file = tmp_path / "owner.json"
    file.write_text(json.dumps(OTHER))
    with Owner() as mine, pytest.raises(UserError, match=r"process 7 on other since then.*wait 60 s"):
        mine.take(tmp_path)
    past = file.stat().st_mtime - 2 * owner.STALE
    os.utime(file, (past, past))
    with Owner() as mine:
        assert "process 7 on other" in mine.take(tmp_path)
    file.write_bytes(b"\xff{" * 100)  # damaged: nobody's
    with Owner() as mine:
        assert mine.take(tmp_path) == ""
    assert not list(tmp_path.iterdir())


def test_machines_of_one_name_are_not_taken_for_one(tmp_path):
    """As containers may be called localhost: the lock of the other is not seen here, its signs of life are."""
    (tmp_path / "owner.json").write_text(json.dumps(OTHER | {"host": socket.gethostname()}))
    with Owner() as mine, pytest.raises(UserError, match=r"process 7 on .*wait 60 s"):
        mine.take(tmp_path)


@pytest.mark.parametrize("ahead", [-7200, 7200])
def test_clocks_of_machines_decide_nothing(tmp_path, monkeypatch, ahead):
    """The owner's clock may be ahead of the storage's or behind, and so may ours."""
    monkeypatch.setattr(owner, "TOUCH", 0.01)
    plain = owner.time.time
    monkeypatch.setattr(owner.time, "time", lambda: plain() + ahead)
    with Owner() as living:
        living.take(tmp_path)
        before = (tmp_path / "owner.json").stat().st_mtime
        time.sleep(0.2)
        assert before < (tmp_path / "owner.json").stat().st_mtime < plain() + 60
    file = tmp_path / "owner.json"
    file.write_text(json.dumps(OTHER))
    with Owner() as mine, pytest.raises(UserError, match="process 7 on other"):
        mine.take(tmp_path)
    os.utime(file, (plain() + 7200, plain() + 7200))  # nobody touches it in the storage's future
    with Owner() as mine:
        assert "process 7 on other" in mine.take(tmp_path)


def test_damaged_and_special_files_in_the_place_of_an_owners(tmp_path):
    for text in ('{"host": ' * 400, "[" * 4000, '{"host": 1}', "[]"):
        (tmp_path / "owner.json").write_text(text)
        with Owner() as mine:
            assert mine.take(tmp_path) == ""
    os.mkfifo(tmp_path / "owner.json")
    with Owner() as mine, pytest.raises(UserError, match=r"owner\.json is not a regular file"):
        mine.take(tmp_path)
