"""Folders of pretrained models: their contents, loaded without network access, pickle or code from the folder."""

import hashlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zoo.files import read_table
from zoo.reference import STEMS, weight_files

__all__ = [
    "CodecError",
    "configuration",
    "from_pretrained",
    "image_processor",
    "library",
    "settings_of",
    "sha256",
    "tokenizer",
    "variant_of",
    "weights",
]


class CodecError(ValueError):
    """A folder of weights, a size or a caption that cannot be used, with the reason and what to do."""


def configuration(path: Path, part: str) -> tuple[Path, dict[str, Any]]:
    """The folder that has config.json, `path` or its sub-folder `part`, and the content of config.json."""
    folder = next((f for f in (path, path / part) if (f / "config.json").is_file()), None)
    if folder is None:
        problem = "is not there: no such folder"
        if path.exists():
            problem = f"is not the folder of a model: there is no config.json in it, nor in its {part}/"
        raise CodecError(f"{path} {problem} (models are read from this disk; nothing is downloaded)")
    return folder, settings_of(folder / "config.json")


def settings_of(file: Path) -> dict[str, Any]:
    """The content of a JSON file of settings; CodecError: it is missing or damaged."""
    try:
        return read_table(file)
    except (OSError, ValueError) as error:
        raise CodecError(str(error)) from None


def weights(folder: Path, stem: str, variant: str | None = None) -> list[Path]:
    """The files of the weights that `from_pretrained` loads: one, or an index and its shards."""
    try:
        return weight_files(folder, variant, [stem])
    except ValueError as error:
        raise CodecError(str(error)) from None


def variant_of(folder: Path, stem: str, variant: str | None) -> str | None:
    """The variant, such as fp16, if the folder has weights of it, else None."""
    names = [pattern.format(stem=stem, variant=f".{variant}") for pattern in STEMS[stem]]
    return variant if variant and any((folder / name).is_file() for name in names) else None


def tokenizer(folders: Sequence[Path]) -> tuple[Callable[[str], list[int]], int, Path]:
    """(function from caption to token numbers, size of the vocabulary, file) of the first folder with a tokenizer."""
    files = [folder / name for folder in folders for name in ("tokenizer.json", "spiece.model")]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        looked = ", ".join(str(folder) for folder in folders)
        raise CodecError(f"no tokenizer: neither tokenizer.json nor spiece.model is in {looked}")
    package = library("tokenizers" if file.suffix == ".json" else "sentencepiece")
    with _damage_of(file):
        if file.suffix == ".json":
            fast = package.Tokenizer.from_file(str(file))
            fast.no_truncation()
            fast.no_padding()

            def numbers(caption: str) -> list[int]:
                with _damage_of(file):
                    return fast.encode(caption).ids

            return numbers, fast.get_vocab_size(), file
        pieces = package.SentencePieceProcessor(model_file=str(file))
        return lambda caption: [*pieces.encode(caption), pieces.eos_id()], pieces.vocab_size(), file


@contextmanager
def _damage_of(file: Path) -> Iterator[None]:
    """Turn an error of a tokenizer into a CodecError: the bare class, or one beside it by its regular expressions."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__module__ != "pyo3_runtime":
            raise
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
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        with path.open("rb") as file:
            while piece := file.read(1 << 24):
                digest.update(piece)
    return digest.hexdigest()
