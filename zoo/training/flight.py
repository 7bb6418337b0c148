"""The flight record of a run that hung or lost a rank: each rank's place in the code, and its last collectives.

    runs/<name>/flight/20260101-120000/rank-0.json    by every rank that still can; the time is that of the start
    python -m zoo.training.flight runs/<name>         of the latest start: a line a rank, and the ranks that are behind

The collectives are those of torch's flight recorder, which counts them for each group of ranks. The modules are those
whose forward a rank was in; in backward there are none.
"""

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from zoo.files import fits, parse_json, read_json
from zoo.training import UserError
from zoo.training.console import command

LAST = 40  # collectives that are kept, of each rank
MOST = 1 << 22  # bytes of a file
RECORD = {"rank": int, "fault": str, "place": str, "modules": tuple[str, ...], "collectives": tuple[object, ...]}
ENTRY = {
    "group": str, "number": int, "name": str, "sizes": tuple[tuple[int, ...], ...], "done": bool, "seconds_ago": float,
}  # fmt: skip


def folder(run: Path) -> Path:
    """The folder for the records of this start."""
    return run / "flight" / time.strftime("%Y%m%d-%H%M%S")


def write(folder: Path, rank: int, progress: Any, fault: str) -> None:
    """Write this rank's record into `folder`. An error here must not keep the rank from ending."""
    try:
        place, waits = progress.position()
        report = {
            "rank": rank, "process": os.getpid(), "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "fault": fault,
            "place": place, "waits": waits, "modules": modules(progress.thread, progress.model),
            "collectives": collectives(),
        }  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"rank-{rank}.json").write_text(json.dumps(report, indent=1) + "\n")
    except Exception as error:
        print(f"rank {rank} wrote no flight record: {type(error).__name__}: {error}", file=sys.stderr, flush=True)


def modules(thread: int, model: Any) -> list[str]:
    """The names of the modules of `model` whose forward a thread is in, outermost first."""
    frame, running = sys._current_frames().get(thread), list[str]()
    names = {id(module): name for name, module in model.named_modules()} if model is not None else {}
    while frame is not None:
        if frame.f_code.co_name == "_call_impl" and (name := names.get(id(frame.f_locals.get("self")))):
            running.insert(0, name)
        frame = frame.f_back
    return running


def collectives() -> list[dict[str, Any]]:
    """The last collectives that this process began, oldest first: group, number in the group, name, sizes, state."""
    from torch._C import _distributed_c10d as c10d

    dump = getattr(c10d, "_dump_fr_trace_json", None) or getattr(c10d, "_dump_nccl_trace_json", None)
    entries = parse_json(dump()).get("entries", []) if dump else []
    now = time.time_ns()
    return [
        {
            "group": entry["process_group"][-1] or entry["process_group"][0], "number": entry["collective_seq_id"],
            "name": entry["profiling_name"], "sizes": entry["input_sizes"], "done": entry["retired"],
            "seconds_ago": round((now - entry["time_created_ns"]) / 1e9, 3),
        }
        for entry in entries[-LAST:]
    ]  # fmt: skip


def read(folder: Path) -> list[Mapping[str, Any]]:
    """The records in a folder, by rank; of a run's folder, those of the latest start. UserError if there are none."""
    records = []
    for path in [*folder.glob("rank-*.json")] or max(folder.glob("flight/*"), default=folder).glob("rank-*.json"):
        try:
            record = read_json(path, MOST)
            if not has(record, RECORD) or not all(has(entry, ENTRY) for entry in record["collectives"]):
                raise ValueError("damaged: it lacks a part of a flight record")
            records.append(record)
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: {error}") from None
    if not records:
        raise UserError(f"{folder} has no flight record: one is written when a run of several ranks hangs or loses one")
    return sorted(records, key=lambda record: record["rank"])


def has(table: Any, parts: Mapping[str, Any]) -> bool:
    """Tell whether a table has parts of these types."""
    return isinstance(table, dict) and all(name in table and fits(table[name], kind) for name, kind in parts.items())


def lines(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The fault, and a line a rank; then, for each group, the ranks that are behind the others."""
    yield records[0]["fault"]
    last: dict[str, dict[int, Any]] = {}
    for record in records:
        inside = f", in {record['modules'][-1]}" if record["modules"] else ""
        begun = record["collectives"]
        for entry in begun:
            last.setdefault(entry["group"], {})[record["rank"]] = entry
        open_ones = [entry for entry in begun if not entry["done"]]
        after = f"after {spoken(begun[-1])}" if begun else "nothing sent"
        last_sent = f"in {spoken(open_ones[-1])}" if open_ones else after
        yield f"rank {record['rank']}: {record['place']}{inside}; {last_sent}"
    for group, entries in last.items():
        numbers = {rank: entry["number"] for rank, entry in entries.items()}
        behind = [rank for rank, number in numbers.items() if number < max(numbers.values())]
        if behind:
            named = ", ".join(f"rank {rank} at {numbers[rank]}" for rank in behind[:8])
            yield f"group {group}: the others are at collective {max(numbers.values())}, {named}"


def spoken(entry: Mapping[str, Any]) -> str:
    sizes = ", ".join("x".join(map(str, size)) or "1" for size in entry["sizes"][:3])
    return (
        f"collective {entry['number']} of group {entry['group']}, {entry['name']} of {sizes}, "
        f"begun {entry['seconds_ago']:.1f} s before"
    )


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: python -m zoo.training.flight RUN", file=sys.stderr)
        return 2
    return command(lambda: lines(read(Path(arguments[0]))), "{}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
