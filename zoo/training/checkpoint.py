"""Checkpoints that outlive crashes, damaged files and a change in the number of ranks.

    checkpoints/step-00000100/    __0_0.distcp ...   tensors: parameters, buffers and optimizer moments, through DCP
                                  .metadata          where DCP put them
                                  state.json         the step, the model's config, what the caller adds
                                  manifest.json      size and sha256 of every other file

A checkpoint is written to `step-N.incomplete`, flushed to disk and renamed: `step-N` is complete or absent. verify.py
checks it on reading. Random state is not stored: everything random in a run is a function of (seed, step, sample).

`save` and `load` are collective: every rank calls them, and an error on one is raised on all.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from zoo.files import parse_json
from zoo.training import UserError
from zoo.training.optim import MovingAverage, local_part
from zoo.training.ranks import on_first_rank
from zoo.training.verify import FORMAT, Damaged, Reader, check_state, digest, verify

TRAINED = StateDictOptions(ignore_frozen_params=True, strict=False)
Tensors = dict[tuple[str, ...], Tensor]  # under (model, NAME), (average, NAME) and (optimizer, NAME, MOMENT)


@dataclass
class Contents:
    """The contents of a checkpoint: trained parameters, without the frozen ones, which are the base of an adapter.

    `identity` says which model this is (JSON); `load` refuses to put the tensors into another one. `orders`: by name of
    a parameter whose rows are permuted in this run, the model's row at each place; stored is the model's own order.
    """

    model: nn.Module
    optimizer: Any = None  # one, or several for parts of the weights; None: only the weights are wanted
    average: MovingAverage | None = None
    identity: Mapping[str, Any] = field(default_factory=dict)
    orders: Mapping[str, Tensor] = field(default_factory=dict)

    def tensors(self) -> Tensors:
        """The tensors as this run holds them."""
        weights: Any = get_model_state_dict(self.model, options=TRAINED)
        tensors: Tensors = {("model", name): value for name, value in weights.items()}
        if self.average:
            tensors |= {("average", name): value for name, value in self.average.values.items()}
        if self.optimizer is not None:
            state: Any = get_optimizer_state_dict(self.model, self.optimizer)["state"]
            for name, moments in state.items():
                tensors |= {("optimizer", name, k): rounded(v) for k, v in moments.items() if isinstance(v, Tensor)}
        return tensors

    def stored(self, tensors: Tensors) -> Tensors:
        """The `tensors` with their rows in the model's own order."""
        return {
            key: _rows(value, self.orders[key[1]].argsort()) if key[1] in self.orders else value
            for key, value in tensors.items()
        }


@torch.no_grad()
def rounded(moment: Tensor) -> Tensor:
    """A moment as it is stored: an 8-bit one in fp32, because other numbers of ranks cut it into other blocks.

    The moment itself is packed again from the stored values, as in a resumed run: both runs go on equal bit by bit.
    """
    local = local_part(moment)
    if type(local) is Tensor:
        return moment
    wide = local.dequantize()
    local.copy_(wide)
    if not isinstance(moment, DTensor):
        return wide
    whole = DTensor.from_local(
        wide, moment.device_mesh, moment.placements, run_check=False, shape=moment.shape, stride=moment.stride()
    )
    return whole.to(wide.device)  # from_local moves it to the mesh's device, where offloaded moments must not stay


def _packed(optimizers: Any) -> list[tuple[Any, nn.Parameter, str, Tensor]]:
    """The moments that are kept in fewer bits, each with its optimizer, parameter and name."""
    listed = optimizers if isinstance(optimizers, Sequence) else [optimizers]
    entries = [(o, p, key, value) for o in listed for p, state in o.state.items() for key, value in state.items()]
    return [(*address, value) for *address, value in entries if type(local_part(value)) is not Tensor]


# ------------------------------------------------------------------------------------------------------------- saving


@dataclass
class CheckpointData:
    """The tensors of a checkpoint, with rows in the model's own order; nothing changes them any more."""

    tensors: Tensors
    identity: Mapping[str, Any]


def hold(contents: Contents) -> CheckpointData:
    """A copy of the tensors in the host's memory: training may go on while it is written."""
    stored = contents.stored(contents.tensors())
    copies = {key: value.detach().to("cpu", copy=True) for key, value in stored.items()}
    return CheckpointData(copies, contents.identity)


def save(
    directory: Path, step: int, contents: Contents, *, extra: Mapping[str, Any] | None = None, keep: int = 2
) -> Path:
    """Write `step-N` under `directory`, keep the last `keep` checkpoints and return the new one's path.

    `load` returns `extra` under that name.
    """
    data = CheckpointData(contents.stored(contents.tensors()), contents.identity)
    return write(directory, step, data, extra=extra, keep=keep)


def write(
    directory: Path,
    step: int,
    data: CheckpointData,
    *,
    extra: Mapping[str, Any] | None = None,
    keep: int = 2,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Save the tensors of `data`, as `save` does; ranks communicate in `group`."""
    final = directory / f"step-{step:08d}"
    part = directory / f"{final.name}.incomplete"
    tensors = flat_names(data.tensors)
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())  # a DTensor has its global size

    def prepare() -> None:
        directory.mkdir(parents=True, exist_ok=True)
        for leftover in directory.glob("*.incomplete"):
            _remove(leftover)
        check_space(directory, size)
        part.mkdir()

    on_first_rank(prepare, group)
    try:
        dcp.save(tensors, storage_writer=dcp.FileSystemWriter(part), process_group=group)
    except (Exception, CheckpointException) as error:  # CheckpointException is a BaseException
        raise UserError(f"checkpoint {part} could not be written: {_first_cause(error)}") from error
    local_digests = {p.name: digest(p) for p in part.glob(f"__{dist.get_rank()}_*.distcp")}
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, local_digests, group)

    def publish() -> None:
        files = {name: known for share in digests for name, known in share.items()}
        state = {"format": FORMAT, "step": step, "identity": data.identity, "extra": dict(extra or {})}
        _write(part / "state.json", json.dumps(state, indent=1))
        files |= {name: digest(part / name) for name in ("state.json", ".metadata")}
        if absent := [name for name in files if not (part / name).is_file()]:
            raise UserError(f"{part}: rank 0 does not see {absent[0]}: runs_dir must be on storage all ranks share")
        _write(part / "manifest.json", json.dumps(files, indent=1))
        _sync_directory(part)
        _remove(final)  # a damaged checkpoint that `load` skipped
        part.rename(final)
        _sync_directory(directory)
        # newer checkpoints were damaged: the run went back to one before them
        sound = [path for at, path in finished(directory) if at <= step]
        for path in [path for at, path in finished(directory) if at > step] + sound[:-keep]:
            _remove(path)

    on_first_rank(publish, group)
    return final


@torch.no_grad()
def _rows(x: Tensor, index: Tensor) -> Tensor:
    """A sharded tensor with its rows in another order; a tensor without such rows (a step) is returned as it is."""
    if not isinstance(x, DTensor) or not x.ndim or len(x) != len(index):
        return x
    return distribute_tensor(x.full_tensor()[index.to(x.device)], x.device_mesh, x.placements, src_data_rank=None)


def flat_names(tensors: Tensors) -> dict[str, Tensor]:
    """The tensors by the names that they have on disk."""
    return {".".join(key): value for key, value in tensors.items()}


def expected_size(model: nn.Module, average: MovingAverage | None = None) -> int:
    """Bytes of a checkpoint of `model` with AdamW's two moments."""
    trained = (p for p in model.parameters() if p.requires_grad)
    return sum((4 if average else 3) * p.numel() * p.element_size() for p in trained)


def check_space(directory: Path, needed: int) -> None:
    """Refuse a checkpoint that the disk cannot hold: DCP's own message would be 'unexpected pos'."""
    free = shutil.disk_usage(directory).free
    if free < needed * 1.05 + 2**20:
        raise UserError(
            f"{directory}: checkpoints take {needed / 1e9:.3f} GB and {free / 1e9:.3f} GB are free on this disk; "
            "free some space, set checkpoint.keep=1 or another runs_dir"
        )


# ------------------------------------------------------------------------------------------------------------ loading


def finished(directory: Path) -> list[tuple[int, Path]]:
    """The finished checkpoints under `directory` as (step, path), oldest first."""
    steps = [(re.fullmatch(r"step-(\d+)", p.name), p) for p in directory.glob("step-*") if p.is_dir()]
    return sorted((int(match[1]), path) for match, path in steps if match)


def identity(directory: Path, step: int | None = None) -> dict[str, Any]:
    """The description of the model of the latest checkpoint under `directory`, or of that of `step`."""
    for at, path in reversed(finished(directory)):
        with suppress(Damaged):
            if step in (None, at):
                return dict(check_state(path / "state.json", at)["identity"])
    raise UserError(f"{directory} holds no checkpoint, or only damaged ones")


def load(
    directory: Path,
    contents: Contents,
    *,
    step: int | None = None,
    averaged: bool = True,
    report: Callable[[str], None] = print,
) -> dict[str, Any] | None:
    """Restore the latest sound checkpoint under `directory`, or that of `step`, in place and return its state.

    None if there is no checkpoint. Without an optimizer the model gets the averaged weights, if there are any and
    `averaged` is true; the state says under "averaged" whether it did. A damaged checkpoint is named through `report`,
    on rank 0, and the one before it is tried. Tensors are resharded to the ranks at hand. UserError: every checkpoint
    is damaged, or a sound one belongs to another model.
    """
    damaged = []
    for at, path in reversed(
        [(at, path) for at, path in on_first_rank(lambda: finished(directory)) if step in (None, at)]
    ):
        try:
            state, metadata = verify(path, at)
            _refuse_foreign(path, state["identity"], metadata, contents)
            swap = averaged and contents.optimizer is None and _has_average(metadata)
            _restore(path, metadata, contents, swap)
            return state | {"averaged": swap}
        except Damaged as error:
            damaged.append(str(error))
            if dist.get_rank() == 0:
                before = "; trying the one before it" if step is None else ""
                report(f"checkpoint {path.name} is damaged ({error}){before}")
    if damaged:
        raise UserError(f"{directory}: no sound checkpoint is left: {'; '.join(damaged)}")
    return None


def _refuse_foreign(path: Path, theirs: Mapping[str, Any], metadata: Metadata, contents: Contents) -> None:
    """Raise a UserError that lists the differences, if a checkpoint is of another model."""
    entries: Mapping[str, Any] = metadata.state_dict_metadata
    file_values = _flat(theirs) | {key: tuple(entry.size) for key, entry in entries.items() if key.startswith("model.")}
    run_values = _flat(parse_json(json.dumps(contents.identity)))
    tensors: Mapping[str, Any] = get_model_state_dict(contents.model, options=TRAINED)
    run_values |= {f"model.{name}": tuple(tensor.shape) for name, tensor in tensors.items()}
    lines = [
        f"  {key}: {file_values.get(key, 'absent')} in the checkpoint, {run_values.get(key, 'absent')} here"
        for key in dict.fromkeys([*file_values, *run_values])
        if file_values.get(key) != run_values.get(key)
    ]
    if lines:
        more = [f"  ... and {len(lines) - 10} more"] if len(lines) > 10 else []
        raise UserError("\n".join([f"{path} is a checkpoint of another model:", *lines[:10], *more]))


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def _has_average(metadata: Metadata) -> bool:
    return any(key.startswith("average.") for key in metadata.state_dict_metadata)


def _restore(path: Path, metadata: Metadata, contents: Contents, swap: bool) -> None:
    """Fill the tensors of `contents`; `swap`: give the model the averaged weights."""
    model, average = contents.model, contents.average
    known, tensors = metadata.state_dict_metadata, contents.tensors()
    if swap:
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        tensors = {("average" if key[1] in trained else key[0], *key[1:]): value for key, value in tensors.items()}
    # a parameter that never had a gradient has no moments to load, and an older run may have had no average
    wanted = {key: value for key, value in tensors.items() if key[0] == "model" or swap or ".".join(key) in known}
    stored = contents.stored(wanted)
    try:
        dcp.load(flat_names(stored), storage_reader=Reader(path, metadata))
    except (Exception, CheckpointException) as error:
        raise Damaged(f"{path} could not be read: {_first_cause(error)}") from error
    with torch.no_grad():
        for key, value in wanted.items():
            if stored[key] is not value:
                value.copy_(_rows(stored[key], contents.orders[key[1]]))
    weights: Any = {key[1]: value for key, value in tensors.items() if key[0] == "model" or swap}
    set_model_state_dict(model, weights, options=TRAINED)
    if average and not _has_average(metadata):
        average.restart()
    if contents.optimizer is not None:
        _set_moments(model, contents.optimizer, tensors)


def _set_moments(model: nn.Module, optimizers: Any, tensors: Tensors) -> None:
    """Give optimizers the moments of `tensors`; moments in fewer bits keep their format."""
    packed = _packed(optimizers)  # taken before `state` is written to: its dicts are the optimizers' own
    state: dict[str, Any] = get_optimizer_state_dict(model, optimizers)
    for (kind, name, *moments), value in tensors.items():
        for moment in moments if kind == "optimizer" else ():
            state["state"][name][moment] = value
    set_optimizer_state_dict(model, optimizers, state)
    for optimizer, p, moment, value in packed:
        local_part(value).copy_(local_part(optimizer.state[p][moment]))
        optimizer.state[p][moment] = value


# ------------------------------------------------------------------------------------------------------------ helpers


def _write(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _remove(path: Path) -> None:
    """Remove a folder, a file in its place, or a link but not its target; the path may be absent.

    A folder is renamed first, so that `step-N` is never there in part; the next `write` removes what remains of it.
    """
    if path.is_dir() and not path.is_symlink():
        trash = path if path.suffix == ".incomplete" else path.with_name(f"{path.name}.removed.incomplete")
        if trash != path:
            if trash.exists():
                shutil.rmtree(trash)
            path.rename(trash)
        shutil.rmtree(trash)
    else:
        path.unlink(missing_ok=True)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _first_cause(error: BaseException) -> str:
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
