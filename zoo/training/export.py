"""A run's weights as files that others read: safetensors, or diffusers' layout where it has the model.

    python -m zoo.training.export runs/demo                          # runs/demo/export/model.safetensors, config.json
    python -m zoo.training.export runs/latte --layout diffusers      # LatteTransformer3DModel.from_pretrained reads it
    python -m zoo.training.export runs/latte/checkpoints/step-00000500 --weights last --out latte-500

The weights are the averaged ones if the run kept them, or with `--weights last` the last ones; adapters (LoRA) are
merged into them. In a config `init.weights=runs/demo/export` begins another run with them; in Python `zoo.from_export`
makes the model again, with the settings of its objective.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import zoo
from zoo.training import UserError, command, ranks, user_error
from zoo.training import config as cfg
from zoo.training.lora import merged
from zoo.training.use import locate, restored

LAYOUTS = ("safetensors", "diffusers")


def weights_of(path: Path, averaged: bool = True) -> Any:
    """The model of a run or a checkpoint as `zoo.create` makes it, on the CPU, with its weights."""
    run, directory, step = locate(path)
    config = cfg.load([str(run / "config.yaml")])
    with ranks.process_group():
        trained = restored(cfg.create_task(config), directory, step, torch.device("cpu"), averaged)
    options = config.model
    model: Any = zoo.create(options.name, options.size, **options.overrides)
    settings: Any = trained.config
    if asdict(settings) != asdict(model.config):  # settings that the data decided, such as classes
        model = zoo.create(options.name, options.size, **{**options.overrides, **_plain(asdict(settings))})
    model.load_state_dict(merged(trained))
    return model


def objective_of(path: Path) -> dict[str, Any]:
    """The settings of the objective that a run was trained with: what its model predicts."""
    with suppress(UserError):  # raised if `path` is not a run
        run, *_ = locate(path)
        objective: Any = cfg.load([str(run / "config.yaml")]).objective
        return asdict(objective) | ({"prediction": objective.predicts} if hasattr(objective, "predicts") else {})
    return {}


def export(path: Path, out: Path, layout: str = "safetensors", averaged: bool = True, frames: int = 16) -> list[Path]:
    """Write the weights under `out` and return the files. A UserError if the model has no such layout.

    frames: latent frames of the clips that diffusers' model takes.
    """
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
