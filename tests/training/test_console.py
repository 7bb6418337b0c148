"""The console of a run: what is printed outlives its reader, and moves no cursor."""

import contextlib
import os
import signal
import sys

import pytest

from zoo.training.console import Console
from zoo.training.ranks import StopSignal


@pytest.fixture
def gone():
    """A stream whose reader has gone away, as `| head` does."""
    reader, writer = os.pipe()
    os.close(reader)
    stream = os.fdopen(writer, "w")
    yield stream
    with contextlib.suppress(OSError):
        stream.close()


def test_a_run_goes_on_without_a_reader_and_its_log_has_everything(gone, run, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", gone)
        directory = run("train.steps=2", "sample.every=0")
    lines = (directory / "console.log").read_text().splitlines()
    assert any(line.startswith("step 2/2 ") for line in lines)
    assert lines.count("(nobody reads what is printed any more: this log goes on)") == 1
    assert "finished 2 steps" in "".join(lines[-12:])
    gone.close()  # Python flushes it at its end: into nothing


def test_a_disk_that_is_full_for_a_while_loses_its_lines_alone(tmp_path, monkeypatch):
    class Full:
        text, full = "", True

        def write(self, text):
            if self.full:
                raise OSError(28, "No space left on device")
            self.text += text

        def flush(self):
            pass

    stream = Full()
    monkeypatch.setattr(sys, "stdout", stream)
    with Console() as console:
        console.keep(tmp_path / "log")
        print("one")
        stream.full = False
        print("two")
    assert stream.text.endswith("two\n")
    assert (tmp_path / "log").read_text() == "one\ntwo\n"


def test_names_move_no_cursor_and_progress_may(tmp_path, capsys):
    with Console() as console:
        console.keep(tmp_path / "log")
        print("a\x1b[2Jb\tc\rd", file=sys.stderr)
        print("\r3/8", end="")
    out = capsys.readouterr()
    assert (out.err, out.out) == ("a\\x1b[2Jb\tc\\rd\n", "\r3/8")
    assert "\x1b" not in (tmp_path / "log").read_text()


def test_a_closed_terminal_stops_a_run_as_sigterm_does_and_nohup_does_not(monkeypatch):
    heard = []
    before = signal.signal(signal.SIGHUP, lambda *_: heard.append(1))
    try:
        with StopSignal() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert (stop.stopped, stop.requested) == ("SIGHUP", True)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with StopSignal() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.requested
    finally:
        signal.signal(signal.SIGHUP, before)
    assert not heard
