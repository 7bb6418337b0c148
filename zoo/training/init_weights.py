"""The weights that a run begins with: drawn, or those of a file.

init.weights=model.safetensors       what zoo.training.export wrote, or weights under their publisher's names
init.weights=Latte-1/                a folder of such a file, or one of diffusers, with its config.json
"""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn

import zoo
from zoo.files import read_table
from zoo.reference import read_safetensors
from zoo.training import UserError, adapter, user_error
from zoo.training.lora import plain_name
from zoo.training.task import Task


def source(task: Task) -> nn.Module:
    """The task's model on the default device, with the weights that a run of it begins with.

    A UserError names every setting in which the model of the file differs from the configured one.
    """
    model: Any = task.model()
    load_weights(task, model)
    if task.config.init.adapter is not None:
        file, lora = Path(task.config.init.adapter), task.config.lora
        if lora.rank:
            user_error(adapter.fill, model, file, lora.alpha / lora.rank, prefix="init.adapter: ")
        else:
            user_error(adapter.merge, model, file, prefix="init.adapter: ")
    return model


def load_weights(task: Task, model: Any) -> None:
    """Give the task's model the weights of `init.weights`, if that names any, in place; errors as those of `source`."""
    path = task.config.init.weights
    if path is None:
        return
    ours = {plain_name(name): name for name in model.state_dict() if plain_name(name)}
    refuse_range(task.config)
    state = read(Path(path))
    options = task.config.model
    settings = user_error(description, Path(path), options.name, prefix="init.weights: ")
    refuse_other(task.config, settings, model)
    if state.keys() != ours.keys():
        settings = {**options.overrides, **settings}
        other: Any = user_error(zoo.from_reference, options.name, state, **settings, prefix=f"init.weights={path}: ")
        state = other.state_dict()
        refuse_other(task.config, asdict(other.config), model)
    refuse_other_prediction(task.config)
    current = model.state_dict()
    if wrong := [name for name, key in ours.items() if state[name].shape != current[key].shape]:
        shapes = f"{tuple(state[wrong[0]].shape)} in the file, {tuple(current[ours[wrong[0]]].shape)} in the model"
        raise UserError(f"init.weights={path}: {len(wrong)} tensors have another shape, such as {wrong[0]}: {shapes}")
    model.load_state_dict({key: state[name] for name, key in ours.items()}, strict=False)


def read(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file or folder; of a folder of a diffusers pipeline, its transformer's."""
    if (path / "config.yaml").exists():
        raise UserError(f"init.weights={path} is a run: python -m zoo.training.export {path} writes its weights first")
    folder = path / "transformer" if (path / "transformer").is_dir() else path
    if not folder.exists():
        raise UserError(f"init.weights={path}: no such file or folder (nothing is downloaded)")
    try:
        return read_safetensors(folder)
    except Exception as error:  # safetensors raises several kinds
        raise UserError(f"init.weights={path}: not readable as safetensors: {error}") from None


def description(path: Path, name: str) -> dict[str, Any]:
    """The settings of a model of the zoo by the config.json next to its weights; {} if none has to be read.

    ValueError: the config.json is of another model.
    """
    folder = path.parent if path.is_file() else path / "transformer" if (path / "transformer").is_dir() else path
    if not (folder / "config.json").exists():
        return {}
    table = read_table(folder / "config.json")
    if "zoo" in table:
        if table["zoo"] != name:
            raise ValueError(f"{folder / 'config.json'} is of a {table['zoo']}, and model.name={name}")
        if not isinstance(table.get("config"), dict):
            raise ValueError(f"{folder / 'config.json'} names a model of the zoo, but has no table config")
        return table["config"]
    index = folder.parent / "model_index.json"
    try:
        return zoo.registry.published_settings(name, table, read_table(index) if index.is_file() else {})
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'}: {error}") from None


def refuse_range(config: Any) -> None:
    """Raise a UserError if the weights are one of two experts, and training is not on the noise levels of this one."""
    path, (low, high) = Path(config.init.weights), getattr(config.objective, "range", (0.0, 1.0))
    pipeline, second = path.parent if path.name.startswith("transformer") else path, path.name == "transformer_2"
    index = pipeline / "model_index.json"
    if not (pipeline / "transformer_2").is_dir() or not index.is_file():
        return
    boundary = user_error(read_table, index).get("boundary_ratio")
    if not isinstance(boundary, float):
        return
    wanted = (0.0, boundary) if second else (boundary, 1.0)
    if low < wanted[0] or high > wanted[1]:
        raise UserError(
            f"init.weights={path}: this pipeline has two transformers, and this one is for noise levels {wanted[0]:g} "
            f"to {wanted[1]:g} (configured: {low:g} to {high:g}). Write objective: {{range: [{wanted[0]:g}, "
            f"{wanted[1]:g}]}}; the other one is {pipeline / ('transformer' if second else 'transformer_2')}"
        )


def refuse_described(task: Task) -> None:
    """Raise a UserError if a config.json next to the weights describes another model than the configured one."""
    path, options = task.config.init.weights, task.config.model
    if path is not None:
        with torch.device("meta"):
            model = zoo.create(options.name, options.size, **options.overrides)
        refuse_other(task.config, description(Path(path), options.name), model)


def refuse_other(config: Any, theirs: Mapping[str, Any], model: Any) -> None:
    """Raise a UserError if settings differ, with the line to write: equal shapes do not prove equal settings."""
    ours = asdict(model.config)
    plain = [{k: list(v) if isinstance(v, tuple) else v for k, v in side.items()} for side in (theirs, ours)]
    differ = sorted(key for key in plain[0].keys() & plain[1].keys() if plain[0][key] != plain[1][key])
    if not differ:
        return
    lines = ", ".join(f"{key}={plain[0][key]} (configured: {plain[1][key]})" for key in differ)
    size = {} if config.model.size is None else {"size": config.model.size}
    overrides = {**config.model.overrides, **{key: plain[0][key] for key in differ}}
    wanted = flow({"name": config.model.name, **size, "overrides": overrides})
    raise UserError(f"init.weights={config.init.weights} are of a model with {lines}. Write model: {wanted}")


def refuse_other_prediction(config: Any) -> None:
    """Raise a UserError if the model of an export, of the same objective, predicts something else than configured."""
    path, ours = Path(config.init.weights), getattr(config.objective, "predicts", None)
    file = (path.parent if path.is_file() else path) / "config.json"
    objective = user_error(read_table, file).get("objective") if file.exists() else None
    objective = objective if isinstance(objective, dict) else {}
    theirs = objective.get("prediction")
    if ours and theirs and ours != theirs and objective.get("name") == config.objective.name:
        raise UserError(
            f"init.weights={path} were trained with objective.prediction={theirs} (configured: {ours}). "
            f"Write objective: {{prediction: {theirs}}}"
        )


def flow(value: Any) -> str:
    """A value as YAML, in one line."""
    return yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**9).strip().removesuffix("\n...")
