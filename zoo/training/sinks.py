"""Where else the records of a run go: wandb, and TensorBoard. metrics.jsonl holds everything that they are given."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from zoo.training import UserError
from zoo.training.config import Config, to_dict, to_yaml


class Sink(Protocol):
    """A receiver of the numbers of a step, of pictures, and at the end of the rest."""

    def log(self, step: int, record: Mapping[str, Any]) -> None: ...

    def picture(self, step: int, path: Path) -> None: ...

    def finish(self) -> None: ...


def series(record: Mapping[str, Any]) -> dict[str, int | float]:
    """The numbers of a record by their names there; a list has a name for each of its places."""
    return {("val/" + key.removeprefix("val_") if "val_" in key else f"train/{key}"): n for key, n in numbers(record)}


def numbers(record: Mapping[str, Any]) -> Iterator[tuple[str, int | float]]:
    for key, value in record.items():
        if isinstance(value, int | float) and key not in ("step", "time"):
            yield key, value
        elif isinstance(value, list):
            yield from ((f"{key}_{i}", each) for i, each in enumerate(value) if isinstance(each, int | float))


class Wandb:
    """A run of wandb. `told`: the records before, for one that is offline.

    wandb writes some seconds late offline, and a killed run has none of that: the part of the last start holds all.
    """

    def __init__(self, directory: Path, config: Config, run_id: str | None, plan: Sequence[Mapping[str, Any]]):
        import wandb  # takes over a second, and not every run wants it

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
        # wandb counts its own steps from 0 in every offline process: plot against ours
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
    """Event files under `tensorboard/`. A resumed run hides what came after the step that it goes on from."""

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

        with Image.open(path) as image:  # of a GIF the first frame
            self.writer.add_image("samples", np.asarray(image.convert("RGB")), step, dataformats="HWC")

    def finish(self) -> None:
        self.writer.close()
