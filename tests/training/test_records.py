"""metrics.jsonl, damaged in every way: a resume goes on, and no line is lost without a word."""

import json
import os
import random

import pytest

from tests.support.refusals import refused
from zoo import files
from zoo.training import UserError, records
from zoo.training.records import append, cut_metrics, naming, read_metrics

LINES = [{"step": i, "loss": 1 / i, "lr": 1e-3} for i in range(1, 6)] + [
    {"step": 5, "val_loss": 0.5, "val_losses": [1]}
]


def written(path):
    for record in LINES:
        append(path, record)
    return path


def test_round_trip_and_cut(tmp_path):
    path, said = written(tmp_path / "metrics.jsonl"), []
    assert read_metrics(path) == LINES
    assert cut_metrics(path, 3, said.append) == LINES[:3] == read_metrics(path)
    assert said == []
    assert read_metrics(tmp_path / "absent") == []
    records.flush(path)
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_lines_that_are_missing_are_said(tmp_path):
    path, said = written(tmp_path / "metrics.jsonl"), []
    assert cut_metrics(path, 5, said.append, 4) == LINES  # a validation may have come after the checkpoint
    assert said == []
    lines = path.read_text().splitlines(True)
    path.write_text("".join(lines[:2]))
    cut_metrics(path, 5, said.append, 4)
    path.unlink()
    cut_metrics(path, 5, said.append, 4)
    there = f"{path}: damaged: of the 4 records that were there at step 5 it holds"
    assert said == [f"{there} 2", f"{there} 0"]


@pytest.mark.parametrize(
    "line",
    [
        b"{", b"[]", b"null", b"7", b'{"step": "3"}', b'{"loss": 1}', b'{"step": -1}', b'{"step": true}',
        b"\xff\xfe\x00", b"[" * 200_000, b'{"step": 2}{"step": 3}',
        b'{"step": 2, "loss": ' + b"9" * 5000, b'{"step": 2, "loss": 1e400}', b'{"step": 2, "time": "noon"}',
        b'{"step": 2, "elapsed": [1]}', b'{"step": 1' + b"0" * 400 + b"}", b'{"step": 2, "val_losses": [1, -1e305]}',
        b'{"step": 2, "loss": NaN}', b'{"step": 2, "tokens_per_s": 1' + b"0" * 400 + b"}",
    ],
    ids=range(19),
)  # fmt: skip
@pytest.mark.parametrize("place", [0, 3, 6])
def test_a_damaged_line_is_named_and_kept(tmp_path, line, place):
    path, said = written(tmp_path / "metrics.jsonl"), []
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([*lines[:place], line, *lines[place:]]) + b"\n")
    assert cut_metrics(path, 4, said.append) == LINES[:4]
    assert said == [f"{path}: 1 lines are damaged and were put into metrics.damaged: {place + 1}"]
    assert (tmp_path / "metrics.damaged").read_bytes() == line + b"\n"
    assert cut_metrics(path, 4, said.append) == LINES[:4]
    assert len(said) == 1  # once


def test_long_texts_of_little_but_brackets_are_refused():
    """Each of them would take many times what an honest text takes: a million objects in three megabytes."""
    for text in ("[" + "{}," * 30_000 + "{}]", b"{" + b'"a":1,' * 20_000 + b'"a":1}', "[" * 70_000):
        with pytest.raises(ValueError, match="too many names"):
            files.parse_json(text)
    assert len(files.parse_json("[" + "{}," * 1000 + "{}]")) == 1001
    assert len(files.parse_json("[" + "1.25," * 30_000 + "1.25]")) == 30_001


def test_mutations(tmp_path):
    """Whatever becomes of some bytes: the lines that are still records are read, the others are kept beside them."""
    path, chance = written(tmp_path / "metrics.jsonl"), random.Random(0)
    sound = path.read_bytes()
    for _ in range(300):
        data = bytearray(sound)
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(data))
            match chance.randrange(3):
                case 0:
                    data[at] = chance.randrange(256)
                case 1:
                    del data[at : at + chance.randint(1, 30)]
                case 2:
                    data[at:at] = chance.randbytes(chance.randint(1, 30))
        path.write_bytes(data)
        lines, said = [line for line in data.split(b"\n") if line.strip()], []
        kept = cut_metrics(path, 10**9, said.append)
        aside = (tmp_path / "metrics.damaged").read_bytes() if said else b""
        assert len(kept) + (len([line for line in aside.split(b"\n") if line.strip()])) == len(lines)
        assert bool(said) == (len(kept) < len(lines))
        assert [json.dumps(record) for record in kept] == path.read_text().splitlines()
        (tmp_path / "metrics.damaged").unlink(missing_ok=True)


def test_irregular_files_are_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "folder").mkdir()
    for name in ("fifo", "zero", "folder"):
        with pytest.raises(UserError, match=f"{name} is not a regular file; move it away"):
            read_metrics(tmp_path / name)


def test_a_fifo_in_the_place_of_damaged_lines_blocks_nobody(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{broken\n')
    os.mkfifo(tmp_path / "metrics.damaged")
    refused(
        r"metrics\.damaged is not a regular file", records.cut_metrics, tmp_path / "metrics.jsonl", 1, error=UserError
    )
    (tmp_path / "metrics.jsonl").unlink()
    os.mkfifo(tmp_path / "metrics.jsonl")
    refused(r"metrics\.jsonl is not a regular file", records.append, tmp_path / "metrics.jsonl", {"step": 1})


def test_an_error_of_the_disk_names_the_file(tmp_path):
    with (
        pytest.raises(OSError, match=r"No space left on device: '.*metrics.jsonl'"),
        naming(tmp_path / "metrics.jsonl"),
    ):
        raise OSError(28, "No space left on device")
    with pytest.raises(OSError, match="Not a directory"):
        append(written(tmp_path / "file") / "x", {"step": 1})
