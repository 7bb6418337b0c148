"""Adapters (LoRA) as files: those of diffusers' `load_lora_weights`, with PEFT's keys, written and read.

    pytorch_lora_weights.safetensors    transformer.LAYER.lora_A.weight [r, i], transformer.LAYER.lora_B.weight [o, r]

A layer has the name that the weights were published under. What is one layer here may be several there, as are
queries, keys and values: these have one lora_A, and each its rows of lora_B. The scale alpha / r is in lora_B, so that
a reader without it, who takes alpha = r, adds the same. A kernel of patches is one layer here: there, lora_A has its
shape and lora_B is a kernel of one place.

Letters: r rank, i o channels in and out.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zoo import registry
from zoo.files import fits, parse_json, read_table, regular, whole_file
from zoo.training.lora import layers

FILE = "pytorch_lora_weights.safetensors"
FILES = (FILE, "adapter_model.safetensors")  # in a folder; the second is peft's own
PREFIXES = ("transformer.", "base_model.model.")
METADATA = "lora_adapter_metadata"  # where diffusers writes a LoraConfig
Pair = tuple[Tensor, Tensor]  # lora_A (r i), lora_B (o r), the scale in it


@dataclass(frozen=True)
class Layout:
    """The published names and shapes of a model's linear layers."""

    names: Callable[[str], str | list[str]]  # of a weight
    kernel: Mapping[str, tuple[int, ...]]  # by layer here, the shape of a row of its weights there

    @classmethod
    def of(cls, model: Any) -> "Layout":
        module = registry.weights_module(registry.name_of(model) or "")
        names = getattr(module, "published_names", lambda model: lambda name: name)(model)
        dims = getattr(module, "KERNEL_DIMS", 3)
        row = (model.config.in_channels, *model.config.patch[3 - dims :]) if hasattr(model.config, "patch") else ()
        return cls(names, {"embed": row, "embed.proj": row} if module is not None and row else {})

    def theirs(self, layer: str) -> list[str]:
        names = self.names(f"{layer}.weight")
        return [name.removesuffix(".weight") for name in ([names] if isinstance(names, str) else names)]


def published(model: nn.Module, scale: float) -> dict[str, Tensor]:
    """The adapters of a model with layers of peft, under their published names; scale: alpha / r."""
    layout, state = Layout.of(model), dict[str, Tensor]()
    for name, layer in layers(model).items():
        a, b = layer.lora_A["default"].weight.detach().float(), layer.lora_B["default"].weight.detach().float() * scale
        names = layout.theirs(name)
        for theirs, rows in zip(names, b.chunk(len(names))):
            row = layout.kernel.get(name)
            shapes = (a.shape, rows.shape) if row is None else ((len(a), *row), (*rows.shape, *[1] * (len(row) - 1)))
            for part, value, shape in zip("AB", (a, rows), shapes):
                state[f"{PREFIXES[0]}{theirs}.lora_{part}.weight"] = value.reshape(shape).clone().contiguous()
    return state


def write(folder: Path, model: nn.Module, scale: float) -> Path:
    """Write the adapters of a model into a folder, and return the file."""
    from safetensors.torch import save

    with whole_file(folder / FILE) as file:
        file.write(save(published(model, scale), {"format": "pt"}))
    return folder / FILE


def read(path: Path) -> dict[str, Pair]:
    """The adapters of a file, or of a folder with one, by published name of the layer; the scale is in lora_B.

    ValueError: the file is missing, damaged, or of another kind of adapter.
    """
    files = [path / name for name in FILES if (path / name).is_file()] if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise ValueError(f"{path}: no such file, or a folder without {' or '.join(FILES)}")
    state, settings = contents(files[0])
    try:
        pairs = matrices(state)
        return {layer: (a, b * scale_of(settings, len(a))) for layer, (a, b) in pairs.items()}
    except ValueError as error:
        raise ValueError(f"{files[0]}: {error}") from None


def contents(file: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a file in float32, and its settings: diffusers writes them in it, peft beside it."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(regular(file), "pt") as opened:
            state = {key: opened.get_tensor(key).float() for key in sorted(opened.keys())}
            settings = parse_json((opened.metadata() or {}).get(METADATA, "{}"))
            if not isinstance(settings, dict):
                raise ValueError(f"its {METADATA} is no table")
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{file}: not readable as safetensors: {error}") from None
    beside = file.with_name("adapter_config.json")
    settings = {key.removeprefix(PREFIXES[0]): value for key, value in settings.items()}
    return state, settings | (read_table(beside) if beside.is_file() else {})


def matrices(state: Mapping[str, Tensor]) -> dict[str, Pair]:
    """lora_A and lora_B of each layer, as matrices. Raises ValueError for other keys."""
    pairs: dict[str, dict[str, Tensor]] = {}
    for key, value in state.items():
        layer, mark, matrix = key.partition(".lora_")
        prefix = next((prefix for prefix in PREFIXES if layer.startswith(prefix)), "")
        if not mark or matrix.replace(".default", "") not in ("A.weight", "B.weight"):
            raise ValueError(f"{key} is not a matrix of an adapter with PEFT's keys (lora_A, lora_B)")
        pairs.setdefault(layer.removeprefix(prefix), {})[matrix[0]] = value.flatten(1)
    for layer, pair in sorted(pairs.items()):
        if pair.keys() != {"A", "B"}:
            raise ValueError(f"{layer} has only one of lora_A and lora_B")
        if not len(pair["A"]):
            raise ValueError(f"{layer} has an empty lora_A")
    return {layer: (pair["A"], pair["B"]) for layer, pair in pairs.items()}


def scale_of(settings: Mapping[str, Any], rank: int) -> float:
    """The factor of an adapter: alpha / rank, or 1 without alpha. Raises ValueError for what is not read here."""
    if settings.get("use_dora") or settings.get("alpha_pattern") or settings.get("bias", "none") != "none":
        raise ValueError("its settings have use_dora, alpha_pattern or bias, which are not read here")
    alpha = settings.get("lora_alpha")
    if alpha is None:
        return 1.0
    if not (fits(alpha, float) and math.isfinite(alpha)):
        raise ValueError(f"its settings have lora_alpha {str(alpha)[:40]!r}, where a number is expected")
    return alpha / (rank**0.5 if settings.get("use_rslora") else rank)


def ours(model: Any, pairs: Mapping[str, Pair]) -> dict[str, Pair]:
    """The adapters of a model's linear layers, by their names here, from those under published names.

    Several layers there with one lora_A are one adapter of its rank; with several, their ranks add up. ValueError: an
    adapter of a layer that the model does not have, or of other sizes.
    """
    layout, adapters, strays = Layout.of(model), dict[str, Pair](), set(pairs)
    for name, layer in layers(model, nn.Linear).items():
        names = layout.theirs(name)
        parts = [pairs.get(theirs) for theirs in names]
        if not any(parts):
            continue
        strays -= set(names)
        rows, size = layer.out_features // len(names), (layer.in_features, layer.out_features)
        if any(pair and (pair[0].shape[1], len(pair[1])) != (layer.in_features, rows) for pair in parts):
            raise ValueError(
                f"the adapter of {names[0]} is of another size than {name}, {size[0]} to {size[1]} channels"
            )
        first = next(pair[0] for pair in parts if pair)
        if all(pair and torch.equal(pair[0], first) for pair in parts):
            adapters[name] = first, torch.cat([pair[1] for pair in parts if pair])
            continue
        blocks = [pair or (first[:0], first.new_zeros(rows, 0)) for pair in parts]
        adapters[name] = torch.cat([a for a, _ in blocks]), torch.block_diag(*(b for _, b in blocks))
    if strays:
        raise ValueError(f"{len(strays)} adapters are of layers that the model does not have, such as {min(strays)}")
    return adapters


@torch.no_grad()
def merge(model: Any, path: Path, scale: float = 1.0) -> None:
    """Add the adapters of a file to the weights of a model without adapters, in place; ValueError: they do not fit."""
    linear = layers(model, nn.Linear)
    for name, (a, b) in ours(model, read(path)).items():
        weight = linear[name].weight
        weight.copy_((weight.float() + scale * (b @ a).to(weight.device)).to(weight.dtype))


@torch.no_grad()
def fill(model: Any, path: Path, scale: float) -> None:
    """Set the adapters of a model with layers of peft to those of a file, in place; scale: alpha / r of the model.

    If an adapter has a smaller rank than the model's, the rest of lora_A stays as it was drawn, and of lora_B zero.
    ValueError: they do not fit.
    """
    adapters = layers(model)
    for name, (a, b) in ours(model, read(path)).items():
        if name not in adapters:
            raise ValueError(f"{path} has an adapter of {name}, which lora.targets does not name")
        into_a, into_b = adapters[name].lora_A["default"].weight, adapters[name].lora_B["default"].weight
        if len(a) > len(into_a):
            raise ValueError(
                f"{path} needs lora.rank={len(a)} for {name} (configured: {len(into_a)}); separate adapters of parts "
                "that are one layer here add up their ranks"
            )
        into_a[: len(a)] = a.to(into_a)
        into_b[:, : len(a)] = (b / scale).to(into_b)
