"""Checkpoints that outlive crashes, damaged files and a change in the number of ranks.

    checkpoints/step-00000100/    __0_0.distcp ...   tensors: parameters, buffers and optimizer moments, through DCP
                                  .metadata          where DCP put them
                                  state.json         the step, the model's config, what the caller adds
                                  manifest.json      size and sha256 of every other file

A checkpoint is written to `step-N.incomplete`, flushed to disk and renamed, so `step-N` is whole or absent. DCP itself
loads a shard with a flipped bit without a word, and unpickles what it finds; so here every file is compared with the
manifest first, only tensors are stored, and `.metadata` is unpickled with nothing but DCP's own plain classes in reach.
Random state is not stored: everything random in a run is a function of (seed, step, sample).

`save` and `load` are collective: every rank calls them, and an error on one is raised on all.
"""

import hashlib
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from zoo.training import UserError
from zoo.training.optim import MovingAverage
from zoo.training.ranks import on_first_rank

FORMAT = 1


class Damaged(Exception):
    """A checkpoint that cannot be trusted; the message names the file."""


# ------------------------------------------------------------------------------------------------------------- saving


def save(
    directory: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    average: MovingAverage | None = None,
    *,
    identity: Mapping[str, Any],
    orders: Mapping[str, Tensor] | None = None,
    extra: Mapping[str, Any] | None = None,
    keep: int = 2,
) -> Path:
    """Write `step-N` under `directory`, keep the last `keep` checkpoints and return the new one's path.

    `identity` says which model this is (JSON); `load` refuses to put the tensors into another one. `orders`: for
    parameters whose rows lie in another order than the model's own, which of its rows they hold; stored is its own.
    """
    final = directory / f"step-{step:08d}"
    part = directory / f"{final.name}.incomplete"
    tensors, _ = _tensors(model, optimizer)
    if average:
        tensors["average"] = average.values
    tensors = _in_own_order(tensors, orders or {})

    def prepare() -> None:
        directory.mkdir(parents=True, exist_ok=True)
        for leftover in directory.glob("*.incomplete"):
            shutil.rmtree(leftover)
        check_space(directory, size_of(tensors))
        part.mkdir()

    on_first_rank(prepare)
    try:
        dcp.save(tensors, storage_writer=dcp.FileSystemWriter(part))
    except (Exception, CheckpointException) as error:  # CheckpointException is a BaseException
        raise UserError(f"checkpoint {part} could not be written: {_first_cause(error)}") from error
    mine = {p.name: _digest(p) for p in part.glob(f"__{dist.get_rank()}_*.distcp")}
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, mine)

    def publish() -> None:
        files = {name: digest for share in digests for name, digest in share.items()}
        state = {"format": FORMAT, "step": step, "identity": identity, "extra": dict(extra or {})}
        _write(part / "state.json", json.dumps(state, indent=1))
        files |= {name: _digest(part / name) for name in ("state.json", ".metadata")}
        if absent := [name for name in files if not (part / name).is_file()]:
            raise UserError(f"{part}: rank 0 does not see {absent[0]}: runs_dir must be on storage all ranks share")
        _write(part / "manifest.json", json.dumps(files, indent=1))
        _sync_directory(part)
        if final.exists():  # a damaged one that `load` went past
            shutil.rmtree(final)
        part.rename(final)
        _sync_directory(directory)
        # what is newer than this step was damaged, and the run went back behind it
        sound = [path for at, path in found(directory) if at <= step]
        for path in [path for at, path in found(directory) if at > step] + sound[:-keep]:
            shutil.rmtree(path)

    on_first_rank(publish)
    return final


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is stored, as a nested dict of tensors; and the optimizer's settings, which are not."""
    tensors: dict[str, Any] = {"model": get_model_state_dict(model)}
    if optimizer is None:
        return tensors, {}
    state: Any = get_optimizer_state_dict(model, optimizer)
    tensors["optimizer"] = {
        name: {key: value for key, value in moments.items() if isinstance(value, Tensor)}
        for name, moments in state["state"].items()
    }
    return tensors, {"param_groups": state["param_groups"]}


def _in_own_order(tree: Mapping[str, Any], orders: Mapping[str, Tensor], name: str = "") -> dict[str, Any]:
    """A nested dict of tensors, those under the names in `orders` in the order of rows that is the model's own."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        order = orders.get(key, orders.get(name))
        if isinstance(value, Mapping):
            found[key] = _in_own_order(value, orders, key)
        else:
            found[key] = value if order is None else _rows(value, order.argsort())
    return found


@torch.no_grad()
def _copy_rows(
    stored: Mapping[str, Any], tree: Mapping[str, Any], orders: Mapping[str, Tensor], name: str = ""
) -> None:
    """What `_in_own_order` made, back into the tensors that it was made of."""
    for key, value in tree.items():
        order = orders.get(key, orders.get(name))
        if isinstance(value, Mapping):
            _copy_rows(stored[key], value, orders, key)
        elif stored[key] is not value and order is not None:
            value.copy_(_rows(stored[key], order))


@torch.no_grad()
def _rows(x: Tensor, index: Tensor) -> Tensor:
    """The rows of a sharded tensor in another order, sharded as it is; what has no such rows (a step) is the same."""
    if not isinstance(x, DTensor) or not x.ndim or len(x) != len(index):
        return x
    return distribute_tensor(x.full_tensor()[index.to(x.device)], x.device_mesh, x.placements, src_data_rank=None)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def size_of(tensors: Mapping[str, Any]) -> int:
    """Bytes of a nested dict of tensors, whole (a DTensor counts with its global size)."""
    return sum(tensor.numel() * tensor.element_size() for _, tensor in _flat(tensors))


def expected_size(model: nn.Module, average: MovingAverage | None = None) -> int:
    """Bytes of a checkpoint of `model` with AdamW's two moments."""
    return sum((4 if average else 3) * p.numel() * p.element_size() for p in model.parameters())


def check_space(directory: Path, needed: int) -> None:
    """Refuse to begin what the disk cannot hold: DCP's own message would be 'unexpected pos'."""
    free = shutil.disk_usage(directory).free
    if free < needed * 1.05 + 2**20:
        raise UserError(
            f"{directory}: checkpoints take {needed / 1e9:.3f} GB and {free / 1e9:.3f} GB are free on this disk; "
            "free some space, set checkpoint.keep=1 or another runs_dir"
        )


# ------------------------------------------------------------------------------------------------------------ loading


def found(directory: Path) -> list[tuple[int, Path]]:
    """The finished checkpoints under `directory` as (step, path), oldest first."""
    steps = [(re.fullmatch(r"step-(\d+)", p.name), p) for p in directory.glob("step-*") if p.is_dir()]
    return sorted((int(match[1]), path) for match, path in steps if match)


def load(
    directory: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    average: MovingAverage | None = None,
    *,
    identity: Mapping[str, Any],
    orders: Mapping[str, Tensor] | None = None,
    step: int | None = None,
    averaged: bool = True,
    report: Callable[[str], None] = print,
) -> dict[str, Any] | None:
    """Restore the latest sound checkpoint under `directory`, or that of `step`, in place and return its state.

    None if there is none. Without an optimizer the model gets the averaged weights, if there are any and `averaged`;
    the state says under "averaged" whether it did. A damaged one is named through `report`, on rank 0, and the one
    before it is tried. All is resharded to the ranks at hand. UserError: every checkpoint is damaged, or a sound one
    belongs to another model. `orders` are as for `save`.
    """
    damaged = []
    for _, path in reversed([(at, path) for at, path in on_first_rank(lambda: found(directory)) if step in (None, at)]):
        try:
            state, metadata = _verify(path)
            _refuse_foreign(path, state["identity"], identity, metadata, model)
            swap = averaged and optimizer is None and _has_average(metadata)
            _restore(path, metadata, model, optimizer, average, swap, orders or {})
            return state | {"averaged": swap}
        except Damaged as error:
            damaged.append(str(error))
            if dist.get_rank() == 0:
                before = "; trying the one before it" if step is None else ""
                report(f"checkpoint {path.name} is damaged ({error}){before}")
    if damaged:
        raise UserError(f"{directory}: no sound checkpoint is left: {'; '.join(damaged)}")
    return None


def _verify(path: Path) -> tuple[dict[str, Any], Metadata]:
    """The state and the metadata of a checkpoint whose every file is what its manifest says.

    Damaged, on all ranks, if one is not. The ranks share the reading.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    problem, state, metadata = None, {}, None
    try:
        files = _read_json(path / "manifest.json")
        for name in sorted(files)[rank::world]:
            if Path(name).name != name or not (path / name).is_file():
                raise Damaged(f"{path / name} is missing")
            if (path / name).stat().st_size != files[name]["size"]:
                size = (path / name).stat().st_size
                raise Damaged(f"{path / name} has {size} bytes, the manifest says {files[name]['size']}")
            if _digest(path / name) != files[name]:
                raise Damaged(f"{path / name} differs from the checksum in the manifest")
        for name in ("state.json", ".metadata"):
            if name not in files:
                raise Damaged(f"{path / name} is not in the manifest")
    except Damaged as error:
        problem = str(error)
    except (OSError, KeyError, TypeError) as error:
        problem = f"{path / 'manifest.json'}: {error!r}"
    _raise_together(problem)
    try:
        state = _read_json(path / "state.json")
        if state.get("format") != FORMAT:
            raise Damaged(f"{path / 'state.json'} has format {state.get('format')}, this program reads {FORMAT}")
        metadata = read_metadata(path / ".metadata", allowed_files=set(files))
    except Damaged as error:
        problem = str(error)
    _raise_together(problem)
    assert metadata is not None
    return state, metadata


def _refuse_foreign(
    path: Path, theirs: Mapping[str, Any], ours: Mapping[str, Any], metadata: Metadata, model: nn.Module
) -> None:
    entries: Mapping[str, Any] = metadata.state_dict_metadata
    tensors: Mapping[str, Any] = get_model_state_dict(model)
    stored = {key[6:]: tuple(entry.size) for key, entry in entries.items() if key.startswith("model.")}
    wanted = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    theirs_flat, ours_flat = dict(_flat(theirs)), dict(_flat(json.loads(json.dumps(ours))))
    lines = [
        f"  {key}: {theirs_flat.get(key, 'absent')} in the checkpoint, {ours_flat.get(key, 'absent')} here"
        for key in sorted(theirs_flat.keys() | ours_flat.keys())
        if theirs_flat.get(key) != ours_flat.get(key)
    ]
    for title, names in (
        ("only in the checkpoint", sorted(stored.keys() - wanted.keys())),
        ("only in this model", sorted(wanted.keys() - stored.keys())),
        ("of another shape", sorted(n for n in stored.keys() & wanted.keys() if stored[n] != wanted[n])),
    ):
        shown = [
            f"{n} {stored.get(n, '')}{' -> ' if n in stored and n in wanted else ''}{wanted.get(n, '')}" for n in names
        ]
        if names:
            more = f", ... and {len(names) - 5} more" if len(names) > 5 else ""
            lines.append(f"  {len(names)} tensors {title}: {', '.join(shown[:5])}{more}")
    if lines:
        raise UserError(f"{path} is a checkpoint of another model:\n" + "\n".join(lines))


def _has_average(metadata: Metadata) -> bool:
    return any(key.startswith("average.") for key in metadata.state_dict_metadata)


def _restore(
    path: Path,
    metadata: Metadata,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    average: MovingAverage | None,
    swap: bool,
    orders: Mapping[str, Tensor],
) -> None:
    tensors, settings = _tensors(model, optimizer)
    has_average = _has_average(metadata)
    if has_average and average:
        tensors["average"] = average.values
    if swap:
        tensors["average"] = {name: tensors["model"].pop(name) for name, _ in model.named_parameters()}
    if optimizer is not None:  # a parameter that never had a gradient has no moments to load
        known = metadata.state_dict_metadata
        tensors["optimizer"] = {
            name: moments
            for name, moments in tensors["optimizer"].items()
            if all(f"optimizer.{name}.{key}" in known for key in moments)
        }
    stored = _in_own_order(tensors, orders)
    try:
        dcp.load(stored, storage_reader=_Reader(path, metadata))
    except (Exception, CheckpointException) as error:
        raise Damaged(f"{path} could not be read: {_first_cause(error)}") from error
    _copy_rows(stored, tensors, orders)
    weights = tensors["model"] | (tensors["average"] if swap else {})
    set_model_state_dict(model, weights)
    if average and not has_average:
        average.restart()
    if optimizer is not None:
        full, _ = _tensors(model, optimizer)
        set_optimizer_state_dict(model, optimizer, {"state": full["optimizer"] | tensors["optimizer"], **settings})


# ------------------------------------------------------------------------------------------------ reading without trust

_ALLOWED = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"),
    ("pathlib._local", "WindowsPath"),
    ("collections", "OrderedDict"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
}


class _PlainUnpickler(pickle.Unpickler):
    """Builds DCP's own data classes and nothing else, so that reading a file cannot run code."""

    def find_class(self, module: str, name: str) -> Any:
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


class _Reader(dcp.FileSystemReader):
    """DCP's reader on metadata that is already read and checked."""

    def __init__(self, path: Path, metadata: Metadata):
        super().__init__(path)
        self.metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self.metadata.storage_meta is None:
            self.metadata.storage_meta = StorageMeta()
        self.metadata.storage_meta.load_id = self.load_id
        return self.metadata


# ------------------------------------------------------------------------------------------------------------ helpers


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        raise Damaged(f"{path} is missing") from None
    except (OSError, ValueError) as error:
        raise Damaged(f"{path}: {error}") from None
    if not isinstance(value, dict):
        raise Damaged(f"{path}: expected an object")
    return value


def _digest(path: Path) -> dict[str, Any]:
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
            size += len(block)
    return {"size": size, "sha256": digest.hexdigest()}


def _write(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _raise_together(problem: str | None) -> None:
    """Raise Damaged on every rank if any rank has a problem."""
    problems: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    if first := next((p for p in problems if p), None):
        raise Damaged(first)


def _first_cause(error: BaseException) -> str:
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
