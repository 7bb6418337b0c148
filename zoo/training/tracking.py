"""The records of a run: `runs/<name>/metrics.jsonl`, one log line an interval, and wandb.

    runs/<name>/config.yaml      the whole configuration, resolved
                metrics.jsonl    one JSON object a line, each with its step: the source of truth
                samples/         step-00000100.gif, or .png ...
                checkpoints/     see checkpoint.py
                wandb/           the same, for wandb

A resumed run cuts metrics.jsonl back to the step of its checkpoint, so the file always holds one continuous curve.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zoo.training import UserError
from zoo.training.config import Config, leaves, load, to_dict, to_yaml


def open_run(config: Config) -> Path:
    """The directory of a run, made if need be. An occupied one is refused unless the run is to be resumed."""
    assert config.name is not None
    directory = Path(config.runs_dir) / config.name
    records = read_metrics(directory / "metrics.jsonl")
    begun = (directory / "metrics.jsonl").exists() or any((directory / "checkpoints").glob("step-*"))
    if begun and not config.resume:
        reached = f" (to step {records[-1]['step']})" if records else ""
        raise UserError(
            f"{directory} already holds a run{reached}: continue it with resume=true, "
            "give this one another name with name=..., or delete that directory"
        )
    (directory / "samples").mkdir(parents=True, exist_ok=True)
    return directory


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a run. A last line that a crash cut short is left out."""
    records = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records


def cut_metrics(path: Path, step: int) -> list[dict[str, Any]]:
    """Drop the records after `step`; returns those that stay."""
    records = [record for record in read_metrics(path) if record["step"] <= step]
    part = path.with_suffix(".part")
    part.write_text("".join(json.dumps(record) + "\n" for record in records))
    os.replace(part, path)
    return records


def changes(directory: Path, config: Config) -> list[str]:
    """What differs from the configuration that the run in `directory` had, as 'key: before -> now'."""
    try:
        before = {key: value for key, value, _ in leaves(load([str(directory / "config.yaml")]))}
    except UserError:  # it was written by another version
        return []
    now = [(key, value) for key, value, _ in leaves(config) if key not in ("resume", "runs_dir", "name")]
    return [f"{key}: {before.get(key)} -> {value}" for key, value in now if before.get(key) != value]


class Tracker:
    """Writes what happens in a run. One for each run, on rank 0."""

    def __init__(
        self, directory: Path, config: Config, *, step: int, wandb_id: str | None, plan: Sequence[Mapping[str, Any]]
    ):
        (directory / "config.yaml").write_text(to_yaml(config))
        self.path = directory / "metrics.jsonl"
        self.records = cut_metrics(self.path, step)
        self.run: Any = None
        if config.wandb.mode != "disabled":
            self.run = _start_wandb(directory, config, wandb_id)
            self._wandb({"plan": _table(plan)} if plan else {}, step)
        if config.wandb.mode == "offline":
            # wandb writes some seconds late, and a killed run has none: the part of the last start holds everything
            for record in self.records:
                self._wandb(_series(record), record["step"])

    @property
    def wandb_id(self) -> str | None:
        return self.run.id if self.run else None

    def log(self, step: int, **values: Any) -> None:
        """Append one record."""
        record = {"step": step, **values}
        self.records.append(record)
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        self._wandb(_series(values), step)

    def picture(self, step: int, path: Path) -> None:
        """Show a GIF or a PNG that was written to the run's directory."""
        if self.run:
            import wandb

            moving = path.suffix == ".gif"
            self._wandb({"samples": wandb.Video(str(path), format="gif") if moving else wandb.Image(str(path))}, step)

    def _wandb(self, values: dict[str, Any], step: int) -> None:
        if self.run:
            self.run.log({"train/step": step, **values})

    def finish(self) -> None:
        if self.run:
            self.run.finish()


def _start_wandb(directory: Path, config: Config, run_id: str | None) -> Any:
    import wandb  # takes over a second, and not every run wants it

    online = config.wandb.mode == "online"
    try:
        run = wandb.init(
            project=config.wandb.project, entity=config.wandb.entity, name=config.name, id=run_id,
            resume="allow" if run_id and online else None, mode="online" if online else "offline",
            dir=str(directory), config=to_dict(config), settings=wandb.Settings(
                silent=True, console="off", disable_git=True, disable_code=True, x_save_requirements=False
            ),
        )  # fmt: skip
    except wandb.Error as error:
        raise UserError(f"wandb: {error}; wandb.mode=offline needs no account") from None
    # wandb counts its own steps from 0 in every offline process: plot against ours
    run.define_metric("train/step")
    run.define_metric("*", step_metric="train/step")
    return run


def _series(record: Mapping[str, Any]) -> dict[str, int | float]:
    """The numbers of a record by the names that they have in wandb."""
    numbers = {key: value for key, value in record.items() if isinstance(value, int | float) and key != "step"}
    return {key.replace("val_", "val/") if "val_" in key else f"train/{key}": numbers[key] for key in numbers}


def _table(rows: Sequence[Mapping[str, Any]]) -> Any:
    import wandb

    columns: list[Any] = list(rows[0])
    return wandb.Table(columns=columns, data=[[row[column] for column in columns] for row in rows])


# ----------------------------------------------------------------------------------------------------------- log lines


def amount(value: float) -> str:
    """A number in four characters or so.

    >>> [amount(7.0), amount(1208.0), amount(45_300_000)]
    ['7', '1.21k', '45.3M']
    """
    return _scaled(value, 1000, "", "kMGTP")


def size(count: float) -> str:
    """A number of bytes, in powers of 1024.

    >>> [size(0), size(1 << 20), size(882 * 2**20 + 2**19)]
    ['0 B', '1 MiB', '882 MiB']
    """
    text = _scaled(count, 1024, " ", "KMGTP")
    return f"{text} B" if text[-1].isdigit() else f"{text}iB"


def _scaled(value: float, base: int, gap: str, prefixes: str) -> str:
    for i in range(len(prefixes), 0, -1):
        if value >= base**i * 0.9995:
            return f"{float(f'{value / base**i:.3g}'):g}{gap}{prefixes[i - 1]}"
    return f"{float(f'{value:.3g}'):g}"


def duration(seconds: float) -> str:
    """Seconds as 0:42, 12:05 or 3:20:00."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def log_line(step: int, steps: int, values: Mapping[str, float], eta: float) -> str:
    """One line for a reader, aligned with the lines before and after it."""
    memory, comm = size(values["memory_bytes"]), size(values["comm_bytes"])
    return (
        f"step {step:>{len(str(steps))}}/{steps}  loss {values['loss']:<8.4g} grad {values['grad_norm']:<7.3g} "
        f"lr {values['lr']:<8.2e} {amount(values['tokens_per_s']):>5} tokens/s  "
        f"memory {memory:>8}  comm {comm:>8}  eta {duration(eta)}"
    )
