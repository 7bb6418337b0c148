"""Folders of pretrained models: their contents, loaded without network access, pickle or code from the folder."""

import hashlib
import importlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

__all__ = [
    "CodecError",
    "configuration",
    "from_pretrained",
    "image_processor",
    "library",
    "sha256",
    "tokenizer",
    "weights",
]


class CodecError(ValueError):
    """A folder of weights, a size or a caption that cannot be used, with the reason and what to do."""


def configuration(path: Path, part: str) -> tuple[Path, dict[str, Any]]:
    """The folder that has config.json, `path` or its sub-folder `part`, and the content of config.json."""
    folder = next((f for f in (path, path / part) if (f / "config.json").is_file()), None)
    if folder is None:
        what = "is not there: no such folder"
        if path.exists():
            what = f"is not the folder of a model: there is no config.json in it, nor in its {part}/"
        raise CodecError(f"{path} {what} (models are read from this disk; nothing is downloaded)")
    try:
        config = json.loads((folder / "config.json").read_text())
        if not isinstance(config, dict):
            raise ValueError("not a table of settings")
    except ValueError as error:
        raise CodecError(f"{folder / 'config.json'}: damaged: {error}") from None
    return folder, config


def weights(folder: Path, stem: str) -> list[Path]:
    """The files of the weights: one, or an index and its shards."""
    one, index = folder / f"{stem}.safetensors", folder / f"{stem}.safetensors.index.json"
    if one.is_file():
        return [one]
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise CodecError(f"{index}: damaged: {error!r}") from None
        if absent := [name for name in names if Path(name).name != name or not (folder / name).is_file()]:
            raise CodecError(f"{index} names {absent[0]}, which is not in this folder")
        return [index, *(folder / name for name in names)]
    there = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".ckpt", ".safetensors"))
    raise CodecError(
        f"{folder} has no {one.name}"
        + (f", only {', '.join(there)}" if there else "")
        + ": only safetensors are read; save_pretrained(folder) of a loaded model writes them"
    )


def tokenizer(folders: Sequence[Path]) -> tuple[Callable[[str], list[int]], int, Path]:
    """(function from caption to token numbers, size of the vocabulary, file) of the first folder with a tokenizer."""
    files = [folder / name for folder in folders for name in ("tokenizer.json", "spiece.model")]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        looked = ", ".join(str(folder) for folder in folders)
        raise CodecError(f"no tokenizer: neither tokenizer.json nor spiece.model is in {looked}")
    package = library("tokenizers" if file.suffix == ".json" else "sentencepiece")
    try:
        if file.suffix == ".json":
            fast = package.Tokenizer.from_file(str(file))
            fast.no_truncation()
            fast.no_padding()
            return lambda caption: fast.encode(caption).ids, fast.get_vocab_size(), file
        pieces = package.SentencePieceProcessor(model_file=str(file))
        return lambda caption: [*pieces.encode(caption), pieces.eos_id()], pieces.vocab_size(), file
    except Exception as error:  # tokenizers raises the bare class
        raise CodecError(f"{file}: damaged: {error}") from None


def from_pretrained(kind: Any, folder: Path, **options: Any) -> Any:
    """Load the model from local files; CodecError if any weight is missing."""
    library(kind.__module__.partition(".")[0]).utils.logging.disable_progress_bar()  # loading takes a second
    try:
        module, report = kind.from_pretrained(
            str(folder), local_files_only=True, use_safetensors=True, output_loading_info=True, **options
        )
    except Exception as error:  # many kinds: sizes, types, truncated files
        raise CodecError(f"{folder}: {kind.__name__} cannot be loaded: {error}") from error
    if absent := sorted(map(str, report["missing_keys"])):
        raise CodecError(f"{folder}: {len(absent)} weights of {kind.__name__} are not in its files, as {absent[0]}")
    return module


def image_processor(transformers: Any) -> Any:
    """The class of CLIP's image processor that needs no torchvision."""
    has = hasattr(transformers, "CLIPImageProcessorPil")  # where it exists, the other class needs torchvision
    return transformers.CLIPImageProcessorPil if has else transformers.CLIPImageProcessor


def library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise CodecError(f"encoding and decoding video needs {name}: pip install -e '.[video]'") from error


def sha256(files: Sequence[Path]) -> str:
    """A digest of the names, sizes and contents of files."""
    found = hashlib.sha256()
    for path in files:
        found.update(f"{path.name} {path.stat().st_size}\n".encode())
        with path.open("rb") as file:
            while piece := file.read(1 << 24):
                found.update(piece)
    return found.hexdigest()
