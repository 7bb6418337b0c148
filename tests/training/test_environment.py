"""The variables of a launcher that are absent, or are not numbers."""

import pytest

import infer
import train
from tests.support.refusals import refused
from zoo.training import UserError, environment

SOUND = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
SOUND |= {"MASTER_PORT": "29500"}
WRONG = [
    *((name, text) for name in SOUND if name != "MASTER_ADDR" for text in ("x", "-1", "1.5", "", "9" * 30, "²")),
    ("RANK", "1"), ("WORLD_SIZE", "0"), ("LOCAL_WORLD_SIZE", "0"), ("MASTER_PORT", "0"), ("MASTER_PORT", "65536"),
    ("MASTER_ADDR", ""), ("MASTER_ADDR", None), ("MASTER_PORT", None), ("WORLD_SIZE", None),
]  # fmt: skip


@pytest.fixture
def launched(monkeypatch):
    """Set the variables of one rank, but for some."""

    def launched(changes=None):
        for name, text in {**SOUND, **(changes or {})}.items():
            monkeypatch.delenv(name, raising=False) if text is None else monkeypatch.setenv(name, text)

    return launched


def everything():
    """All that is read of the environment, in the order in which a run reads it."""
    environment.place(), environment.device(), environment.ranks_of_host()


@pytest.mark.parametrize(("name", "text"), WRONG)
def test_wrong_ranks_are_refused_by_the_name_of_their_variable(launched, name, text):
    launched({name: text})
    refused(rf"{name}\b.*dsp-launch", everything, error=UserError)


def test_a_process_alone_and_one_of_many(launched):
    launched(dict.fromkeys(SOUND))
    assert (environment.place(), environment.ranks_of_host(), environment.first_rank()) == (None, 1, True)
    launched({"RANK": "2", "WORLD_SIZE": "4"})
    assert environment.place() == environment.Place(2, 4, "127.0.0.1", 29500)
    assert not environment.first_rank()
    launched({"RANK": None, "WORLD_SIZE": "2"})
    refused("WORLD_SIZE is 2, but RANK is not set", environment.place, error=UserError)


@pytest.mark.parametrize("program", ["train", "infer"])
def test_programs_say_so_in_one_line(launched, program, run, capsys):
    arguments = run.arguments() if program == "train" else [str(run("train.steps=1", "sample.every=0"))]
    capsys.readouterr()
    for name, value in {"RANK": "x", "WORLD_SIZE": "x", "MASTER_ADDR": None}.items():
        launched({name: value})
        assert {"train": train, "infer": infer}[program].main(arguments) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert name in line
