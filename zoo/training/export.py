"""A run's weights as files that others read: safetensors, or diffusers' layout where it has the model.

    python -m zoo.training.export runs/demo                          # runs/demo/export/model.safetensors, config.json
    python -m zoo.training.export runs/latte --layout diffusers      # LatteTransformer3DModel.from_pretrained reads it
    python -m zoo.training.export runs/wan --layout adapter          # diffusers' load_lora_weights reads it
    python -m zoo.training.export runs/latte/checkpoints/step-00000500 --weights last --out latte-500

The weights are the averaged ones if the run kept them, or with `--weights last` the last ones; adapters (LoRA) are
merged into them, or with `--layout adapter` written alone. In a config `init.weights=runs/demo/export` begins another
run with them, and `init.adapter=` one with adapters; in Python `zoo.from_export` makes the model again, with the
settings of its objective.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

import zoo
from zoo.training import UserError, adapter, checkpoint, ranks, user_error
from zoo.training import config as cfg
from zoo.training.console import command
from zoo.training.lora import merged
from zoo.training.task import Task
from zoo.training.task_lookup import TaskLookup
from zoo.training.trained import locate, restored

LAYOUTS = ("safetensors", "diffusers", "adapter")


class Exported(Task):
    """The model of a checkpoint, without the run's data and task: these may be code from outside."""

    def __init__(self, config: cfg.Config, identity: Mapping[str, Any]):
        if config.model.name not in zoo.registry.MODELS:
            raise UserError(
                f"model.name={config.model.name} is not a model of the zoo, and an export runs no code that a run "
                "names: take its weights in Python, from zoo.load(RUN).model"
            )
        config.model.size, config.model.overrides = None, dict(identity["config"])
        super().__init__(config)
        self.identity = {**identity, **self.identity}

    def open(self) -> None:
        raise NotImplementedError

    def objective(self, model: nn.Module) -> nn.Module:
        raise NotImplementedError


def weights_of(path: Path, averaged: bool = True) -> Any:
    """The model of a run or a checkpoint as `zoo.create` makes it, on the CPU, with its weights."""
    config, trained = trained_of(path, averaged)
    model: Any = zoo.create(config.model.name, **config.model.overrides)
    model.load_state_dict(merged(trained))
    return model


def trained_of(path: Path, averaged: bool = True) -> tuple[cfg.Config, nn.Module]:
    """The configuration of a run or a checkpoint and its model on the CPU, with adapters as it was trained."""
    run, directory, step = locate(path)
    config = cfg.load_model(run / "config.yaml")
    objective = objective_of(path)
    config.objective = SimpleNamespace(**objective, predicts=objective.get("prediction"))
    task = Exported(config, checkpoint.identity(directory, step))
    with ranks.process_group():
        return config, restored(task, directory, step, torch.device("cpu"), averaged)


def objective_of(path: Path) -> dict[str, Any]:
    """The settings of the objective that a run was trained with: what its model predicts."""
    with suppress(UserError):  # raised if `path` is not a run
        options = cfg.saved(locate(path)[0] / "config.yaml")
        objective = {key.removeprefix("objective."): v for key, v in options.items() if key.startswith("objective.")}
        lookup = TaskLookup(str(options.get("data.name")), options.get("task"))
        if lookup.builtin is not None:  # the zoo's, which says what the model predicts
            settings = lookup.module.Objective(**objective)
            objective |= {"prediction": settings.predicts} if hasattr(settings, "predicts") else {}
        return objective
    return {}


def export(path: Path, out: Path, layout: str = "safetensors", averaged: bool = True, frames: int = 16) -> list[Path]:
    """Write the weights under `out` and return the files. A UserError if the model has no such layout.

    frames: latent frames of the clips that diffusers' model takes.
    """
    if layout == "adapter":
        config, trained = trained_of(path, averaged)
        if not config.lora.rank:
            raise UserError(
                f"{path} was trained without adapters (lora.rank=0): export its weights with another layout"
            )
        out.mkdir(parents=True, exist_ok=True)
        return [adapter.write(out, trained, config.lora.alpha / config.lora.rank)]
    model = weights_of(path, averaged)
    name = zoo.registry.name_of(model)
    if name is None:
        raise UserError(
            f"{type(model).__name__} is not a model of the zoo, so an export could not be read back: save its weights "
            "in Python, from zoo.load(RUN).model"
        )
    out.mkdir(parents=True, exist_ok=True)
    objective = objective_of(path)
    if layout == "diffusers" and objective.get("prediction") == "clean":
        raise UserError("this run was trained with objective.prediction=clean, which diffusers' samplers do not know")
    if layout == "diffusers":
        convert = getattr(zoo.registry.weights_module(name), "to_diffusers", None)
        if convert is None:
            raise UserError(f"diffusers has no model for {type(model).__name__}: export it with --layout safetensors")
        module = user_error(convert, model, frames, prefix="export: ")
        # of an earlier export in shards: it would be read, and not the new file
        (out / "diffusion_pytorch_model.safetensors.index.json").unlink(missing_ok=True)
        module.save_pretrained(out, safe_serialization=True)
        return _shared(sorted(file for file in out.iterdir() if file.is_file()))
    try:
        from safetensors.torch import save_file
    except ImportError:
        raise UserError("export needs a package: pip install safetensors") from None
    written = [out / "model.safetensors", out / "config.json"]
    save_file({key: value.contiguous().clone() for key, value in model.state_dict().items()}, written[0])
    description = {"zoo": name, "config": _plain(asdict(model.config)), "objective": objective}
    written[1].write_text(json.dumps(description, indent=1) + "\n")
    return _shared(written)


def _shared(files: list[Path]) -> list[Path]:
    """Make files as readable as config.json, which follows the umask: safetensors writes for only their owner."""
    for file in files:
        shutil.copymode(next(f for f in files if f.name == "config.json"), file)
    return files


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in settings.items()}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m zoo.training.export", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("run", type=Path, help="directory of a run, or of one of its checkpoints")
    parser.add_argument("--out", type=Path, help="folder of the files; RUN/export if not said")
    parser.add_argument("--layout", choices=LAYOUTS, default="safetensors")
    parser.add_argument("--frames", type=int, default=16, help="latent frames that diffusers' model takes (16)")
    parser.add_argument("--weights", choices=("averaged", "last"), default="averaged")
    options = parser.parse_args(arguments)

    def work() -> list[Path]:
        out = options.out or locate(options.run)[0] / "export"
        return export(options.run, out, options.layout, options.weights == "averaged", options.frames)

    return command(work)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
