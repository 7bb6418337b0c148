"""Reading a checkpoint without trusting it: every file has to match the manifest, and no file can run code.

DCP itself loads a shard with a flipped bit without an error, and unpickles anything.
"""

import hashlib
import io
import pickle
from enum import EnumType
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from zoo.files import fits, open_file, read_bytes
from zoo.files import read_json as _read_json
from zoo.training import one_line

FORMAT = 1
MOST_BYTES = 1 << 26  # of manifest.json and state.json
MOST_METADATA = 1 << 30  # bytes of .metadata, which has some hundred for each tensor of each rank
EACH = 24  # fewest bytes for each name and object of a long JSON; a checkpoint's has a hundred for three


# the types of a state's parts, from the outside in; older versions may lack any
PARTS: dict[str, Any] = {
    "identity": dict, "identity.name": str, "identity.config": dict, "extra": dict, "extra.wandb_id": str | None,
    "extra.records": dict, "extra.records.count": int, "extra.guard": dict, "extra.guard.norms": tuple[float, ...],
    **{f"extra.guard.{name}": int for name in ("skipped", "in_row", "sound", "taken")},
}  # fmt: skip


class Damaged(Exception):
    """A checkpoint that cannot be trusted; the message names the file."""


def verify(path: Path, step: int) -> tuple[dict[str, Any], Metadata]:
    """The state and the metadata of the checkpoint of `step`, each of whose files matches its manifest.

    Raises Damaged, on all ranks, if a file does not match. The ranks share the reading.
    """
    problem, checked = None, None
    try:
        files = read_json(path / "manifest.json")
        for name in sorted(files)[dist.get_rank() :: dist.get_world_size()]:
            if Path(name).name != name or not (path / name).is_file():
                raise Damaged(f"{path / name} is missing")
            if digest(path / name) != files[name]:
                raise Damaged(f"{path / name} differs from its size and checksum in the manifest")
        for name in ("state.json", ".metadata"):
            if name not in files:
                raise Damaged(f"{path / name} is not in the manifest")
        checked = check_state(path / "state.json", step), read_metadata(path / ".metadata", allowed_files=set(files))
    except Damaged as error:
        problem = str(error)
    except OSError as error:
        problem = f"{path / 'manifest.json'}: {one_line(repr(error))}"
    problems: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    if first := next((p for p in problems if p), None):
        raise Damaged(first)
    assert checked is not None
    return checked


_PLAIN = "ChunkStorageMetadata Metadata MetadataIndex StorageMeta TensorProperties TensorStorageMetadata"
_ALLOWED = {
    *(("torch.distributed.checkpoint.metadata", name) for name in (*_PLAIN.split(), "_MEM_FORMAT_ENCODING")),
    *((module, f"{kind}Path") for module in ("pathlib", "pathlib._local") for kind in ("Posix", "Windows")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
}


def _member(kind: Any, name: Any) -> Any:
    """A member of an enumeration: Python 3.11 before 3.11.4 pickles it as a getattr."""
    if isinstance(kind, EnumType) and isinstance(name, str) and name in kind.__members__:
        return kind[name]
    raise pickle.UnpicklingError("it asks for builtins.getattr, which no checkpoint needs but for enumerations")


class _PlainUnpickler(pickle.Unpickler):
    """Builds DCP's own data classes and nothing else, so that reading a file cannot run code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if (module, name) in _ALLOWED or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no checkpoint needs")


def read_metadata(path: Path, allowed_files: set[str]) -> Metadata:
    """DCP's `.metadata`, checked: only plain classes, only tensors, only in the checkpoint's own files."""
    try:
        metadata = _PlainUnpickler(io.BytesIO(read_bytes(path, MOST_METADATA))).load()
        if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
            raise Damaged(f"{path} holds no checkpoint metadata")
        for name, entry in metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                raise Damaged(f"{path}: {name} is not a tensor")
        for info in metadata.storage_data.values():
            if info.relative_path not in allowed_files or info.transform_descriptors:
                raise Damaged(f"{path} points at {info.relative_path}, which is not in the manifest")
    except Damaged:
        raise
    except Exception as error:  # a broken pickle can raise any error, and its result may lack any attribute
        raise Damaged(f"{path}: {error}") from error
    return metadata


class Reader(dcp.FileSystemReader):
    """DCP's reader on metadata that is already read and checked."""

    def __init__(self, path: Path, metadata: Metadata):
        super().__init__(path)
        self.metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self.metadata.storage_meta is None:
            self.metadata.storage_meta = StorageMeta()
        self.metadata.storage_meta.load_id = self.load_id
        return self.metadata


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = _read_json(path, MOST_BYTES, EACH)
    except FileNotFoundError:
        raise Damaged(f"{path} is missing") from None
    except (OSError, ValueError) as error:
        raise Damaged(f"{path}: {one_line(error)}") from None
    if not isinstance(value, dict):
        raise Damaged(f"{path}: expected an object")
    return value


def check_state(path: Path, step: int) -> dict[str, Any]:
    """The state that a file holds; Damaged if it is of another version or, as in a renamed folder, another step."""
    state = read_json(path)
    for key, expected in {"format": FORMAT, "step": step}.items():
        if state.get(key) != expected:
            raise Damaged(f"{path} has {key} {str(state.get(key))[:40]!r}, where {expected} is expected")
    for name, kind in PARTS.items():
        *parents, key = name.split(".")
        table = state
        for parent in parents:
            table = table.get(parent, {})
        if key in table and not fits(table[key], kind):
            raise Damaged(f"{path} has {name} {str(table[key])[:40]!r}, which is of another type")
    return state


def digest(path: Path) -> dict[str, Any]:
    with open_file(path) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"size": file.tell(), "sha256": digest}
