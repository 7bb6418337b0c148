"""The records of a run: `runs/<name>/metrics.jsonl`, a log line an interval, and records for wandb.

    runs/<name>/config.yaml      the whole configuration, resolved
                metrics.jsonl    one JSON object a line, each with its step and time: the source of truth
                plan.svg         the plan as a picture
                names.json       the samples that the run trains on, and those held out, if they have names
                report.html      all of this as a page, written at the run's end: see report.py
                console.log      what the run printed, with all its resumes
                samples/         step-00000100.gif, or .png ...
                checkpoints/     see checkpoint.py
                wandb/, tensorboard/    the same records, for these tools

A resumed run cuts metrics.jsonl back to the step of its checkpoint, so the file always holds one continuous curve.
"""

import json
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from zoo.files import read_json
from zoo.training import UserError, one_line
from zoo.training.config import Config, flattened, saved, to_dict
from zoo.training.config_text import to_yaml
from zoo.training.owner import Owner
from zoo.training.records import append, cut_metrics, flush, read_metrics, write

NAMES = "names.json"


def names_of(directory: Path) -> dict[str, list[str]]:
    """The names of the samples that the run in `directory` had, by set, and of their chains; {} if they had none."""
    path = directory / NAMES
    if not path.exists():
        return {}
    try:
        table = read_json(path, 1 << 30, each=2)
        return {which: [*map(str, table[which])] for which in dict.fromkeys(("train", "validation", *table))}
    except (ValueError, TypeError, LookupError) as error:
        raise UserError(f"{path}: expected the lists train and validation, got {one_line(error)}") from error


def open_run(config: Config, owner: Owner) -> Path:
    """Make the directory of a run, and own it. A UserError if it has a run already that is not to be resumed, or if
    another process writes into it."""
    assert config.name is not None
    directory = Path(config.runs_dir) / config.name
    if before := owner.take(directory):
        print(f"the last owner of {directory} is gone: {before}", flush=True)
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


def changes(directory: Path, config: Config) -> list[str]:
    """The differences to the configuration that the run in `directory` had, as 'key: before -> now'."""
    before, now = saved(directory / "config.yaml"), flattened(to_dict(config))
    keys = [key for key in {**before, **now} if key not in ("resume", "runs_dir", "name")]
    pairs = [(key, before.get(key, "absent"), now.get(key, "absent")) for key in keys]
    return [f"{key}: {was} -> {value}" for key, was, value in pairs if was != value]


class Tracker:
    """Writes the records of a run, on rank 0."""

    def __init__(
        self, directory: Path, config: Config, *, step: int, before: Mapping[str, Any], plan: Any,
        names: Mapping[str, Sequence[str]],
    ):  # fmt: skip
        """`before`: what `flush` returned for the checkpoint from which the run is resumed, else {}; `names`: those of
        the task."""
        self.path = directory / "metrics.jsonl"
        self.records = cut_metrics(self.path, step, known=before.get("records", {}).get("count"))
        self.sinks: list[Sink] = []
        self.wandb_id: str | None = None
        if config.wandb.mode != "disabled":
            sink = Wandb(directory, config, before.get("wandb_id"), plan_rows(plan))
            self.wandb_id = sink.run.id
            sink.begin(step)
            for record in self.records if config.wandb.mode == "offline" else ():
                sink.log(record["step"], record)
            self.sinks.append(sink)
        if config.log.tensorboard:
            self.sinks.append(TensorBoard(directory, config, step))
        write(directory / "config.yaml", to_yaml(config))  # not before: a start may be refused
        write(directory / "plan.svg", plan.svg())
        if names:
            write(directory / NAMES, json.dumps(names, indent=1))

    @property
    def elapsed(self) -> float:
        """Seconds that the run has taken so far, by its records."""
        return max((record.get("elapsed") or 0.0 for record in self.records), default=0.0)

    def log(self, step: int, **values: Any) -> None:
        """Append one record, with the time in seconds since 1970. NaN and infinity are null, as JSON has neither."""
        values = {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in values.items()}
        record = {"step": step, "time": round(time.time(), 3), **values}
        self.records.append(record)
        append(self.path, record)
        for sink in self.sinks:
            sink.log(step, values)

    def flush(self, step: int) -> dict[str, Any]:
        """Flush the log to disk, so that it outlives a crash of the host; return its part of a checkpoint."""
        flush(self.path)
        known = sum(record["step"] <= step for record in self.records)
        return {"wandb_id": self.wandb_id, "records": {"count": known}}

    def picture(self, step: int, path: Path) -> None:
        """Send a GIF or a PNG in the run's directory to the sinks."""
        for sink in self.sinks:
            sink.picture(step, path)

    def finish(self) -> None:
        for sink in self.sinks:
            sink.finish()


# ---------------------------------------------------------------------------------------- the same records for others


class Sink(Protocol):
    """A receiver of the numbers of a step and of pictures; `finish` writes the rest."""

    def log(self, step: int, record: Mapping[str, Any]) -> None: ...

    def picture(self, step: int, path: Path) -> None: ...

    def finish(self) -> None: ...


def series(record: Mapping[str, Any]) -> dict[str, int | float]:
    """The numbers of a record by their names in a sink; a list has a name for each element."""
    return {("val/" + key.removeprefix("val_") if "val_" in key else f"train/{key}"): n for key, n in numbers(record)}


def numbers(record: Mapping[str, Any]) -> Iterator[tuple[str, int | float]]:
    for key, value in record.items():
        if isinstance(value, int | float) and key not in ("step", "time"):
            yield key, value
        elif isinstance(value, list):
            yield from ((f"{key}_{i}", each) for i, each in enumerate(value) if isinstance(each, int | float))


class Wandb:
    """A run of wandb.

    Offline, wandb writes some seconds late, which a kill loses. So each start of an offline run logs all records again.
    """

    def __init__(self, directory: Path, config: Config, run_id: str | None, plan: Sequence[Mapping[str, Any]]):
        import wandb  # takes over a second, and not every run needs it

        online = config.wandb.mode == "online"
        try:
            self.run = wandb.init(
                project=config.wandb.project, entity=config.wandb.entity, name=config.name, id=run_id,
                resume="allow" if run_id and online else None, mode="online" if online else "offline",
                dir=str(directory), config=to_dict(config), settings=wandb.Settings(
                    silent=True, console="off", disable_git=True, disable_code=True, x_save_requirements=False
                ),
            )  # fmt: skip
        except wandb.Error as error:
            raise UserError(f"wandb: {error}; wandb.mode=offline needs no account") from None
        # wandb counts its own steps from 0 in every offline process: plot against the run's
        self.run.define_metric("train/step")
        self.run.define_metric("*", step_metric="train/step")
        self.plan = plan

    def begin(self, step: int) -> None:
        import wandb

        if self.plan:
            columns: list[Any] = list(self.plan[0])
            data = [[row[column] for column in columns] for row in self.plan]
            self._log(step, {"plan": wandb.Table(columns=columns, data=data)})

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        self.run.log({"train/step": step, **values})

    def log(self, step: int, record: Mapping[str, Any]) -> None:
        self._log(step, series(record))

    def picture(self, step: int, path: Path) -> None:
        import wandb

        moving = path.suffix == ".gif"
        self._log(step, {"samples": wandb.Video(str(path), format="gif") if moving else wandb.Image(str(path))})

    def finish(self) -> None:
        self.run.finish()


class TensorBoard:
    """Event files under `tensorboard/`. A resumed run hides events after the step of its checkpoint."""

    def __init__(self, directory: Path, config: Config, step: int):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError("log.tensorboard=true needs a package: pip install tensorboard") from None
        self.writer: Any = SummaryWriter(str(directory / "tensorboard"), purge_step=step + 1 if step else None)
        self.writer.add_text("config", "    " + to_yaml(config).replace("\n", "\n    "), step)

    def log(self, step: int, record: Mapping[str, Any]) -> None:
        for name, value in series(record).items():
            self.writer.add_scalar(name, value, step)

    def picture(self, step: int, path: Path) -> None:
        import numpy as np
        from PIL import Image

        with Image.open(path) as image:  # the first frame of a GIF
            self.writer.add_image("samples", np.asarray(image.convert("RGB")), step, dataformats="HWC")

    def finish(self) -> None:
        self.writer.close()


# ------------------------------------------------------------------------------------------------- names of measures


def higher_is_better(key: str) -> bool:
    """Tell whether higher is better for a measure: lower is for losses and distances, higher for all others."""
    return not any(word in key for word in ("loss", "distance", "rmsd"))


def plan_rows(plan: Any) -> list[dict[str, Any]]:
    """The plan as a table for the records."""
    rows = [asdict(row) for row in plan.stages]
    return [{key: " ".join(v) if isinstance(v, tuple) else v for key, v in row.items()} for row in rows]


def ascii_key(name: str) -> str:
    """The name of a measure as a key of the records: letters, digits and underscores.

    >>> [ascii_key(name) for name in ("short P@L/5", "lDDT-Cβ", "masked accuracy")]
    ['short_p_at_l5', 'lddt_cb', 'masked_accuracy']
    """
    for sign, word in (("α", "a"), ("β", "b"), ("é", "e"), ("@", "_at_"), ("/", "")):
        name = name.replace(sign, word)
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def display_name(key: str) -> str:
    """The name of a measure for a reader, from its key in the records.

    >>> [display_name(key) for key in ("val_short_p_at_l5", "val_lddt_cb", "val_loss_msa", "val_masked_accuracy")]
    ['short P@L/5', 'lDDT-Cβ', 'loss msa', 'masked accuracy']
    """
    name = re.sub(
        r"_p_at_l(\d*)$", lambda match: " P@L" + (f"/{match[1]}" if match[1] else ""), key.removeprefix("val_")
    )
    name = name.replace("lddt_ca", "lDDT-Cα").replace("lddt_cb", "lDDT-Cβ").replace("rmsd", "RMSD")
    return re.sub("(?<!loss_)lddt", "LDDT" if name == "plddt" else "lDDT", name).replace("_", " ")


# ----------------------------------------------------------------------------------------------------------- log lines


def human_count(value: float) -> str:
    """A number in about four characters.

    >>> [human_count(7.0), human_count(1208.0), human_count(45_300_000)]
    ['7', '1.21k', '45.3M']
    """
    return _scaled(value, 1000, "", "kMGTP")


def human_bytes(count: float) -> str:
    """A number of bytes, in powers of 1024.

    >>> [human_bytes(0), human_bytes(1 << 20), human_bytes(882 * 2**20 + 2**19)]
    ['0 B', '1 MiB', '882 MiB']
    """
    text = _scaled(count, 1024, " ", "KMGTP")
    return f"{text} B" if text[-1].isdigit() else f"{text}iB"


def _scaled(value: float, base: int, gap: str, prefixes: str) -> str:
    for i in range(len(prefixes), 0, -1):
        if value >= base**i * 0.9995:
            return f"{float(f'{value / base**i:.3g}'):g}{gap}{prefixes[i - 1]}"
    return f"{float(f'{value:.3g}'):g}"


def number_of(count: int, noun: str) -> str:
    """
    >>> number_of(1, "rank"), number_of(8, "rank")
    ('1 rank', '8 ranks')
    """
    return f"{count} {noun}{'' if count == 1 else 's'}"


def duration(seconds: float) -> str:
    """Seconds as 0:42, 12:05 or 3:20:00."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
