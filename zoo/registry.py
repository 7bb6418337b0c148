"""The models of the zoo, and how to build one by name.

A model's module holds the class named here, or a function that returns the model, a ``Config`` dataclass that it takes,
and ``SIZES``: the Config values of every published size. A module ``<name>_weights`` beside it reads weights that were
published under other names. Modules are imported at their first use. A model from outside is named
``package.module:Class``, or by an entry point of the group ``zoo.models``.
"""

import difflib
import importlib
import importlib.util
import sys
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from zoo.contract import check
from zoo.files import fits, read_table
from zoo.plugins import load_plugin
from zoo.reference import load_renamed, read_safetensors

MODELS = {
    "evoformer": "zoo.protein.evoformer:Evoformer",
    "axial_image": "zoo.image.axial:AxialImage",
    "axial_video": "zoo.video.axial:AxialVideo",
    "hunyuan": "zoo.video.hunyuan:HunyuanVideo",
    "latte": "zoo.video.latte:build",
    "stdit": "zoo.video.stdit:build",
    "st_mamba": "zoo.video.mamba:STMamba",
    "st_rwkv": "zoo.video.rwkv:STRWKV",
    "pairformer": "zoo.protein.pairformer:Pairformer",
    "transformer2d": "zoo.video.transformer2d:Transformer2D",
    "wan": "zoo.video.wan:Wan",
}


def list_models() -> list[str]:
    """The names that ``create`` takes, sorted."""
    return sorted(MODELS)


def sizes(name: str) -> list[str]:
    """The sizes of a model, in the order of its paper; the first is what ``create`` builds when none is named."""
    return list(_module(name)[0].SIZES)


def create(name: str, size: str | None = None, **overrides: Any) -> nn.Module:
    """Build a model on the default device (meta included), freshly initialised.

    ``size`` picks a row of the model's table of sizes (the first when None) and ``overrides`` replace single values
    of its Config. The model has what ``zoo.contract`` says: ``.config``, ``.stages``, ``.example_inputs(batch=1)``, ...

    Raises ValueError for a name, a size or an override that does not exist or does not fit.
    """
    module, cls = _module(name)
    size = next(iter(module.SIZES)) if size is None else size
    if size not in module.SIZES:
        raise ValueError(f"{name} has no size {size!r}; {_hint(size, module.SIZES)}")
    hints = typing.get_type_hints(module.Config)
    names = [field.name for field in fields(module.Config)]
    for key, value in overrides.items():
        if key not in names:
            raise ValueError(f"{name} has no option {key!r}; {_hint(key, names)}")
        if not fits(value, hints[key]):
            wanted = getattr(hints[key], "__name__", None) or str(hints[key])
            wanted = str(hints[key]) if typing.get_args(hints[key]) else wanted
            raise ValueError(f"{name} takes {key}: {wanted}, not {value!r} ({type(value).__name__})")
    model = cls(module.Config(**{**module.SIZES[size], **overrides}))
    check(model)
    return model


def from_reference(name: str, state_dict: Mapping[str, Tensor], **overrides: Any) -> nn.Module:
    """Build a model from weights published elsewhere, under their names; the model's module says which it reads.

    The Config is read off the tensors' shapes; ``overrides`` say what shapes cannot.

    Raises ValueError with a list of what does not fit.
    """
    _module(name)  # raises if there is no such model
    module = weights_module(name)
    if module is None:
        readable = [model for model in list_models() if weights_module(model)]
        raise ValueError(f"no published weights are known for {name}; for these there are: {', '.join(readable)}")
    return module.from_reference(state_dict, **overrides)


def from_published(
    name: str, state: Mapping[str, Tensor], config: Mapping[str, Any], pipeline: Mapping[str, Any]
) -> nn.Module:
    """Build a model from published weights and the config.json beside them ({}: none), as `from_reference` does.

    pipeline: the content of the model_index.json of the pipeline that has the weights ({}: none).
    """
    return from_reference(name, state, **published_settings(name, config, pipeline))


def published_settings(name: str, config: Mapping[str, Any], pipeline: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a model's Config by the config.json of published weights; {} if it says no more than they do.

    ValueError: the config.json is of another model.
    """
    module = weights_module(name)
    if not config or not hasattr(module, "CLASSES"):
        return {}
    kind = config.get("_class_name") or config.get("model_type") or "model that is not named"
    if kind not in module.CLASSES:
        raise ValueError(
            f"the config.json is of a {kind}, and model.name={name} takes weights of "
            f"{', '.join([*module.CLASSES, 'an export of zoo.training.export'])}"
        )
    return module.published_settings(config, pipeline)


def weights_module(name: str) -> Any:
    """The module that reads published weights of a model, ``zoo.video.wan_weights`` for wan; None if there is none.

    It has ``from_reference(state, **overrides)`` and may have ``to_diffusers(model, frames)``. If it has ``CLASSES``,
    ``published_settings(config, pipeline)`` are the values of Config in the config.json that publishers of such classes
    write, and in the model_index.json of their pipeline.
    """
    path = f"{MODELS.get(name, '').partition(':')[0]}_weights"
    return importlib.import_module(path) if name in MODELS and importlib.util.find_spec(path) else None


def from_export(folder: str | Path) -> nn.Module:
    """Build the model of an export, `model.safetensors` and the zoo's `config.json`, with its weights.

    The model's `objective` has the settings of the objective that it was trained with. `predicts_clean` is True if the
    model was trained to predict clips themselves; `zoo.video.sampling.euler` reads it.

    Raises ValueError for any other folder.
    """
    file = Path(folder) / "config.json"
    table = read_table(file) if file.is_file() else {}
    name, config, objective = table.get("zoo"), table.get("config"), table.get("objective", {})
    if name not in list_models() or not isinstance(config, dict) or not isinstance(objective, dict):
        raise ValueError(f"{folder} is not an export: expected model.safetensors and a config.json that names a model")
    if reserved := config.keys() & {"name", "size"}:
        raise ValueError(f"{file}: {min(reserved)} is not an option of {name}")
    model: Any = create(name, **config)
    load_renamed(model, read_safetensors(file.with_name("model.safetensors")), lambda key: key)
    model.objective = objective
    model.predicts_clean = model.objective.get("prediction") == "clean"
    return model


def name_of(model: nn.Module) -> str | None:
    """The name under which ``create`` builds such a model; None for a model from outside, whatever its class's name."""
    path = type(model.config).__module__
    names = [name for name, place in MODELS.items() if place.partition(":")[0] == path]
    return names[0] if names and type(model).__module__.startswith(f"{__package__}.") else None


def _module(name: str) -> tuple[Any, Any]:
    """The module of a model, and its class. One from outside, `package.module:Class`, may have no SIZES."""
    if name in MODELS:
        path, cls = MODELS[name].split(":")
        module: Any = importlib.import_module(path)
        return module, getattr(module, cls)
    if ":" not in name and not entry_points(group="zoo.models", name=name):
        raise ValueError(f"the zoo has no model {name!r}; {_hint(name, MODELS)}; your own is package.module:Class")
    kind = load_plugin(name, "zoo.models")
    module = sys.modules[getattr(kind, "__module__", __name__)]
    if not (isinstance(kind, type) and issubclass(kind, nn.Module) and is_dataclass(getattr(module, "Config", None))):
        raise ValueError(f"{name}: expected a torch.nn.Module, and beside it a dataclass Config that it is made of")
    return types.SimpleNamespace(Config=module.Config, SIZES=getattr(module, "SIZES", {"default": {}})), kind


def _hint(value: Any, valid: Iterable[str]) -> str:
    valid = list(valid)
    close = difflib.get_close_matches(str(value).lower(), [word.lower() for word in valid], n=1)
    meant = next((f"did you mean {word!r}? " for word in valid if close and word.lower() == close[0]), "")
    return f"{meant}valid: {', '.join(valid)}"
