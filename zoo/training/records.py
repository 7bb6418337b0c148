"""`metrics.jsonl`: one JSON object a line, each with its step, appended as the run goes; the source of truth.

A damaged file is read as far as possible: lines that are not records are counted, reported, and kept in another file.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zoo.files import opened_to_append, parse_json, read_bytes, whole_file
from zoo.training import UserError, user_error

MOST = 1 << 32  # bytes; a year of steps has less
GREATEST = 1e300  # of the numbers in a record; losses that are not finite are written as null


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a run; none if there is no such file. Lines that are no records are left out."""
    return _read(path)[0]


def cut_metrics(
    path: Path, step: int, report: Callable[[str], None] = print, known: int | None = None
) -> list[dict[str, Any]]:
    """Drop the records after `step`; returns those that stay.

    Damaged lines go to `<name>.damaged`. `report` says so, and says if fewer than `known` records are left.
    """
    records, damaged = _read(path)
    if damaged:
        beside = path.with_suffix(".damaged")
        with naming(beside), user_error(opened_to_append, beside) as file:
            file.writelines(line + b"\n" for _, line in damaged)
        numbers = ", ".join(str(number) for number, _ in damaged[:8]) + (", ..." if len(damaged) > 8 else "")
        report(f"{path}: {len(damaged)} lines are damaged and were put into {beside.name}: {numbers}")
    records = [record for record in records if record["step"] <= step]
    if len(records) < (known or 0):
        shortfall = f"of the {known} records that were there at step {step} it holds {len(records)}"
        report(f"{path}: damaged: {shortfall}")
    write(path, "".join(map(line_of, records)))
    flush(path)
    return records


def append(path: Path, record: Mapping[str, Any]) -> None:
    """Add one record. An OSError names the file."""
    with naming(path), opened_to_append(path) as file:
        file.write(line_of(record).encode())


def line_of(record: Mapping[str, Any]) -> str:
    return json.dumps(record) + "\n"


def flush(path: Path) -> None:
    """Flush to disk, so that appended records outlive a crash of the host."""
    with naming(path), path.open("rb") as file:
        os.fsync(file.fileno())


def write(path: Path, text: str) -> None:
    """Replace a file completely or not at all; a link or device in its place is not written to. An OSError names it."""
    with naming(path), whole_file(path) as file:
        file.write(text.encode())


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the file's name to an OSError raised inside that lacks one, as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def _read(path: Path) -> tuple[list[dict[str, Any]], list[tuple[int, bytes]]]:
    try:
        lines = read_bytes(path, MOST).split(b"\n")
    except FileNotFoundError:
        return [], []
    except ValueError as error:
        raise UserError(f"{error}; move it away") from None
    records: list[dict[str, Any]] = []
    damaged: list[tuple[int, bytes]] = []
    for number, line in enumerate(lines, 1):
        try:
            record: Any = parse_json(line)
        except ValueError:
            record = None
        if isinstance(record, dict) and sound(record):
            records.append(record)
        elif line.strip():
            damaged.append((number, line))
    return records, damaged


def sound(record: Mapping[str, Any]) -> bool:
    """Tell whether a record has a step, seconds that are numbers, and no number beyond those that a run writes."""
    if type(record.get("step")) is not int or record["step"] < 0:
        return False
    if any(not isinstance(record.get(key) or 0.0, int | float) for key in ("time", "elapsed")):
        return False
    numbers = (each for value in record.values() for each in (value if isinstance(value, list) else [value]))
    return all(abs(n) < GREATEST for n in numbers if isinstance(n, int | float))
