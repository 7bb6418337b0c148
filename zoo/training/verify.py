"""Reading a checkpoint without trusting it: every file is what the manifest says, and nothing in it can run code.

DCP itself loads a shard with a flipped bit without a word, and unpickles what it finds.
"""

import hashlib
import pickle
from collections.abc import Callable
from enum import EnumType
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from zoo.data.limits import read_json as _read_json
from zoo.training import one_line

FORMAT = 1
MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}  # of state.json: from a format to the next
MOST_BYTES = 1 << 26  # of manifest.json and state.json
EACH = 24  # bytes of a long one for each name and object: a file of a checkpoint has a hundred for three


class Damaged(Exception):
    """A checkpoint that cannot be trusted; the message names the file."""


def verify(path: Path, step: int) -> tuple[dict[str, Any], Metadata]:
    """The state and the metadata of the checkpoint of `step`, whose every file is what its manifest says.

    Damaged, on all ranks, if one is not. The ranks share the reading.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    problem, state, metadata = None, {}, None
    try:
        files = read_json(path / "manifest.json")
        for name in sorted(files)[rank::world]:
            if Path(name).name != name or not (path / name).is_file():
                raise Damaged(f"{path / name} is missing")
            if (size := (path / name).stat().st_size) != files[name]["size"]:
                raise Damaged(f"{path / name} has {size} bytes, the manifest says {files[name]['size']}")
            if digest(path / name) != files[name]:
                raise Damaged(f"{path / name} differs from the checksum in the manifest")
        for name in ("state.json", ".metadata"):
            if name not in files:
                raise Damaged(f"{path / name} is not in the manifest")
    except Damaged as error:
        problem = str(error)
    except (OSError, KeyError, TypeError, ValueError) as error:
        problem = f"{path / 'manifest.json'}: {one_line(repr(error))}"
    raise_together(problem)
    try:
        state = read_json(path / "state.json")
        state = check_state(path / "state.json", state, step)
        metadata = read_metadata(path / ".metadata", allowed_files=set(files))
    except Damaged as error:
        problem = str(error)
    raise_together(problem)
    assert metadata is not None
    return state, metadata


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
    """A member of an enumeration: Python 3.11 before 3.11.4 pickles one as its getattr."""
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
    """DCP's `.metadata`, checked: plain classes, tensors alone, inside the checkpoint's own files."""
    try:
        with path.open("rb") as file:
            metadata = _PlainUnpickler(file).load()
    except Exception as error:  # a broken pickle can raise anything
        raise Damaged(f"{path}: {error}") from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise Damaged(f"{path} holds no checkpoint metadata")
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise Damaged(f"{path}: {name} is not a tensor")
    for info in metadata.storage_data.values():
        if info.relative_path not in allowed_files or info.transform_descriptors:
            raise Damaged(f"{path} points at {info.relative_path}, which is not in the manifest")
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


def check_state(path: Path, state: dict[str, Any], step: int) -> dict[str, Any]:
    """A state as this program writes it, if need be made from an older one by MIGRATIONS; Damaged if it is another."""
    while (found := state.get("format")) != FORMAT:
        if type(found) is not int or found not in MIGRATIONS:
            raise Damaged(f"{path} has format {str(found)[:40]}, this program reads {sorted([*MIGRATIONS, FORMAT])}")
        state = MIGRATIONS[found](state)
        if state.get("format") != found + 1:
            raise AssertionError(f"the migration of format {found} does not lead to the next")
    kinds: dict[str, Any] = {"step": int, "identity": dict, "extra": dict}
    for key, kind in kinds.items():
        if type(state.get(key)) is not kind:
            raise Damaged(f"{path}: {key} is {str(state.get(key))[:40]!r}, where {kind.__name__} is expected")
    if state["step"] != step:
        raise Damaged(f"{path} is of step {state['step']}, and its folder of step {step}")
    known = state["extra"].get("records", {"count": 0})
    if not isinstance(known, dict) or type(known.get("count")) is not int or known["count"] < 0:
        raise Damaged(f"{path}: records is {str(known)[:40]!r}, where a count is expected")
    if not isinstance(state["extra"].get("wandb_id"), str | None):
        raise Damaged(f"{path}: wandb_id is {str(state['extra']['wandb_id'])[:40]!r}, where a text is expected")
    return state


def digest(path: Path) -> dict[str, Any]:
    found, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            found.update(block)
            size += len(block)
    return {"size": size, "sha256": found.hexdigest()}


def raise_together(problem: str | None) -> None:
    """Raise Damaged on every rank if any rank has a problem."""
    problems: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    if first := next((p for p in problems if p), None):
        raise Damaged(first)
