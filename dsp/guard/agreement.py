"""Comparisons between the ranks of a group: model and options once, inputs in each call, weights in some, by checksums.

The weights are compared in the calls 1, 2, 4, 8 and so on of a model, and in every `EVERY`-th.
"""

from __future__ import annotations

import copy
import hashlib
import zlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dsp.comm.layout import Axis
from dsp.core.observed import ModelCall
from dsp.core.record import Node, Record
from dsp.support.private import all_gather, indices_of, pytree, values_of

SLOTS = 15  # checksums of input tensors; the last slot combines all further tensors
ROW = SLOTS + 2  # numbers that a rank sends: the signature's hash, the inputs' checksums, the weights' checksum or 0
EVERY = 256  # calls between two comparisons of weights
PLAIN = (str, int, float, tuple, list, type(None))  # types whose repr contains no address
RECORDS = 64  # records whose numbers are kept
ROWS = 64  # rows of a tensor with different weights in its checksum
SMALL = 2**16  # bytes up to which one call of zlib is faster than four of torch
KINDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SPARSE = {  # what a sparse tensor consists of
    torch.sparse_coo: (indices_of, values_of),
    torch.sparse_csr: (Tensor.crow_indices, Tensor.col_indices, Tensor.values),
    torch.sparse_csc: (Tensor.ccol_indices, Tensor.row_indices, Tensor.values),
}
NEW = 2**60  # added to the digest of a call whose record no earlier call had; other digests are below
DIFFER = (
    "the ranks of one sequence-parallel group made different plans for the same inputs. Probably their models branch "
    "differently, because of a flag, an environment variable or a random number that torch did not draw. Let every "
    "rank run the same code"
)
OF_NUMPY = frozenset({torch.float32, torch.float64, torch.int64, torch.int32, torch.bool, torch.cfloat, torch.cdouble})


def agree(axis: Axis, model: nn.Module, options: Mapping[str, Any]) -> None:
    """Raise RuntimeError on every rank if models or options differ between ranks. A rank sends 8 bytes.

    Only if they differ, ranks also exchange their facts, so that the error can name the difference.
    """
    facts = {name: repr(v) if isinstance(v, PLAIN) else type(v).__qualname__ for name, v in flat(options).items()}
    facts.update(torch=torch.__version__, **{"the source of dsp": source()})
    facts.update({f"model.{k}".rstrip("."): type(module).__qualname__ for k, module in model.named_modules()})
    if same(axis, sorted(facts.items())):
        return
    everyone: list[Any] = [None] * axis.size
    dist.all_gather_object(everyone, facts, group=axis.mesh.get_group())
    names = {name: None for facts in everyone for name in facts}
    odd = [name for name in names if any(facts.get(name) != everyone[0].get(name) for facts in everyone)]
    values: dict[str, list[int]] = {}
    for rank, facts in zip(dist.get_process_group_ranks(axis.mesh.get_group()), everyone):
        values.setdefault(facts.get(odd[0], "missing"), []).append(rank)
    listing = ", but ".join(f"{value} on rank{'s' * (len(who) > 1)} {some(who)}" for value, who in values.items())
    raise RuntimeError(
        "the ranks of one sequence-parallel group called parallelize with different models or options: "
        f"{odd[0]} is {listing}"
        + (f"; {some(odd[1:])} also differ{'s' * (len(odd) == 2)}" if odd[1:] else "")
        + ". Give every rank of the group the same model, stages, options and versions"
    )


def same_weights(axis: Axis, model: nn.Module) -> None:
    """Raise RuntimeError on every rank if a parameter differs between ranks: other seeds, or gradients not averaged.

    Sharded parameters (DTensor, FSDP) are skipped. A rank sends 8 bytes, and 8 more per parameter if there is a
    difference.
    """
    whole = replicated(axis, model)
    if not whole or (whole[0][1].is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    sums = sums_of(axis, whole)
    if alike(gathered(axis, checksum(sums))):
        return
    columns = gathered(axis, sums).view(axis.size, -1).unbind(1)
    odd = [k for (k, _), column in zip(whole, columns) if not alike(column)]
    raise RuntimeError(
        f"the ranks of one sequence-parallel group hold different weights: {some(odd)}. Build the model from one seed "
        "or one file on all of them, and average gradients over them before each optimizer step; if each rank is meant "
        "to hold a different part of a parameter, make it a DTensor"
    )


def replicated(axis: Axis, model: nn.Module) -> list[tuple[str, Tensor]]:
    """The parameters, or their local shards, that are the same on all ranks of the axis, with their names."""
    tensors: list[tuple[str, Tensor]] = []
    known: dict[Any, bool] = {}
    for name, p in model.named_parameters():
        if isinstance(p, DTensor):
            kind = p.device_mesh, p.placements
            if kind not in known:
                known[kind] = copied(axis, p)
            if known[kind] and compared(part := p.to_local().detach()):
                tensors.append((name, part))
        elif compared(p) and not hasattr(p, "_fsdp_flattened"):
            tensors.append((name, p.detach()))
    return tensors


def copied(axis: Axis, p: DTensor) -> bool:
    """Tell whether all ranks of the axis hold the same shard: no mesh dim that shards `p` runs along the axis."""
    peers = {*dist.get_process_group_ranks(axis.mesh.get_group())} - {dist.get_rank()}
    cut = [d for d, placement in enumerate(p.placements) if not placement.is_replicate()]
    return all(peers.isdisjoint(dist.get_process_group_ranks(p.device_mesh.get_group(d))) for d in cut)


def sums_of(axis: Axis, tensors: list[tuple[str, Tensor]]) -> Tensor:
    device = "cuda" if axis.mesh.device_type == "cuda" else "cpu"
    return torch.cat([checksum(t).to(device, non_blocking=True) for _, t in tensors])


def same(axis: Axis, key: Any) -> bool:
    """Tell whether the repr of `key` is the same on all ranks. A rank sends 8 bytes."""
    device = "cuda" if axis.mesh.device_type == "cuda" else "cpu"
    return alike(gathered(axis, torch.tensor([digest_of(key)], device=device)))


def gathered(axis: Axis, row: Tensor) -> Tensor:
    everyone = row.new_empty(axis.size * len(row))
    all_gather(everyone, row, axis.mesh.get_group()).wait()
    return everyone


def alike(everyone: Tensor) -> bool:
    return len(set(everyone.tolist())) == 1


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """The entries of nested mappings, by path."""
    if not isinstance(value, Mapping):
        return {name: value}
    return {k: v for key, x in value.items() for k, v in flat(x, f"{name}[{key!r}]" if name else str(key)).items()}


def some(items: list[Any]) -> str:
    return ", ".join(map(str, items[:4])) + (f" and {len(items) - 4} more" if len(items) > 4 else "")


@cache
def source() -> str:
    """A digest of dsp's own source, because checkouts of one version may differ."""
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    return hashlib.blake2b(b"".join(f.read_bytes() for f in files), digest_size=7).hexdigest()


def digest_of(key: Any) -> int:
    """The hash of a key's repr, as a number that fits an int64."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=7).digest(), "big")


class Agreement:
    """One small asynchronous all-gather per call; its result is checked when the next call begins."""

    def __init__(self, axis: Axis, positional: list[str], model: nn.Module) -> None:
        self.axis, self.positional, self.group = axis, positional, axis.mesh.get_group()
        self.model, self.calls, self.due = model, 0, False  # due: this call compares the weights
        self.device = "cuda" if axis.mesh.device_type == "cuda" else "cpu"
        self.pending: Any = None
        self.aside: Any = None  # on CUDA: a stream, and the pinned host memory that it copies into
        self.digest_rows: dict[int, Tensor] = {}  # numbers already copied to the device
        self.nothing: Tensor | None = None  # a zero on the device
        self.digests = dict[Record, int]()  # of records that were compared: a hash of what they depend on
        self.row = np.zeros(ROW, dtype=np.int64)  # the row to send, on the host; `sent` shares its memory
        self.sent = torch.from_numpy(self.row), torch.zeros(axis.size * ROW, dtype=torch.int64)

    def __deepcopy__(self, memo: dict[int, Any]) -> Agreement:
        # a pending comparison belongs to the original alone
        return Agreement(self.axis, self.positional, copy.deepcopy(self.model, memo))

    def compare(self, call: ModelCall, ahead: bool) -> None:
        """Compare a call, whose record is there; at once if no earlier call had the record, or if it follows no plan.

        ahead: on CPU `finish` will be called before the first collective. Raise RuntimeError on every rank if ranks
        differ.
        """
        record, new = call.record, call.record not in self.digests
        if new:
            if len(self.digests) >= RECORDS:
                del self.digests[next(iter(self.digests))]
            self.digests[record] = digest_of(call.key)
        way = self.digests[record] + len(record.nodes) + NEW * new
        self.start(call.leaves, call.spec, way, wait=new or not record.planned or not ahead)
        if new:
            same_weights(self.axis, self.model)
            if not same(self.axis, plan_key(record)):
                raise RuntimeError(DIFFER)

    def start(self, leaves: list[Any], spec: Any, digest: int, *, wait: bool) -> None:
        """Start to compare the inputs, given as leaves and spec; `digest`: of everything else to compare."""
        if self.device == "cuda" and torch.cuda.is_current_stream_capturing():
            self.due = False
            return  # a CUDA graph is being captured: earlier calls have compared what it replays
        self.finish()
        self.calls += 1
        self.due = self.calls & (self.calls - 1) == 0 or self.calls % EVERY == 0
        weights = replicated(self.axis, self.model) if self.due else []
        if float in map(type, leaves):  # no signature has their values
            digest ^= zlib.crc32(repr([v for v in leaves if type(v) is float]).encode())
        checked = [i for i, v in enumerate(leaves) if compared(v)]
        whole = [leaves[i] if leaves[i].layout not in SPARSE else bytes_of(leaves[i]) for i in checked]
        if self.device == "cuda":
            row = self.on_device(digest, whole, weights)
            everyone = row.new_empty(self.axis.size * ROW)
            arrived, answer = self.to_host(all_gather(everyone, row, self.group), everyone)
        else:
            self.row[:-1] = on_host(digest, whole)
            self.row[-1] = int(checksum(sums_of(self.axis, weights))) if weights else 0
            row, everyone = self.sent
            arrived, answer = all_gather(everyone, row, self.group).wait, everyone
        self.pending = arrived, answer, (spec, checked), (row, everyone)
        if wait:
            self.finish()

    def on_device(self, digest: int, tensors: list[Tensor], weights: list[tuple[str, Tensor]]) -> Tensor:
        """The row of numbers that this rank sends, made without a synchronisation with the device."""
        # checksums of host tensors move to the device: an asynchronous copy to the host could be read too early
        sums = [checksum(t.detach()).to(self.device, non_blocking=True) for t in tensors]
        if len(sums) > SLOTS:
            sums[SLOTS - 1 :] = [torch.cat(sums[SLOTS - 1 :]).sum(0, keepdim=True)]
        if self.nothing is None:
            self.nothing = torch.zeros(1, dtype=torch.int64, device=self.device)
        blank = self.nothing.expand(SLOTS - len(sums))
        if digest not in self.digest_rows:
            if len(self.digest_rows) >= 1024:
                self.digest_rows.clear()
            self.digest_rows[digest] = torch.tensor([digest], dtype=torch.int64, device=self.device)
        last = checksum(sums_of(self.axis, weights)) if weights else self.nothing
        return torch.cat([self.digest_rows[digest], *sums, blank, last])

    def to_host(self, work: Any, everyone: Tensor) -> tuple[Any, Tensor]:
        """A function that waits for the answer, and the host tensor that has it then.

        A stream of its own copies the answer. A read on the current stream would wait for all queued work, and the host
        could not run ahead by a step.
        """
        if self.aside is None:
            self.aside = torch.cuda.Stream(), torch.empty(everyone.shape, dtype=everyone.dtype, pin_memory=True)
        stream, host = self.aside
        with torch.cuda.stream(stream):
            work.wait()
            host.copy_(everyone, non_blocking=True)
        return stream.record_event().synchronize, host

    def finish(self) -> None:
        """Wait for the pending comparison. Raise RuntimeError if ranks differ."""
        if self.pending is None:
            return
        arrived, everyone, (spec, checked), _ = self.pending
        self.pending = None
        arrived()
        numbers = everyone.tolist()
        rows = [numbers[i : i + ROW] for i in range(0, len(numbers), ROW)]
        if rows.count(rows[0]) == len(rows):
            return
        slot = next(i for i in range(ROW) if any(row[i] != rows[0][i] for row in rows))
        if slot == ROW - 1:
            same_weights(self.axis, self.model)  # raises and names them, unless they have become equal meanwhile
            return
        odd = [rank for rank, row in enumerate(rows) if row[slot] != rows[0][slot]]
        got = (
            "inputs of different shapes, types or options, or took a different branch of the forward in an earlier call"
        )
        if slot:
            got = f"other values of {named(self.positional, spec, checked[slot - 1])!r}"
        raise RuntimeError(
            "the ranks of one sequence-parallel group hold different inputs: compared with rank 0, "
            f"rank{'s' * (len(odd) > 1)} {', '.join(map(str, odd))} got {got}. Whole inputs must be the same on every "
            "rank of the group: set one seed on all of them, as by torch.manual_seed(0), and derive a data seed from "
            "the data-parallel rank, not from the global rank; or pass sharded DTensors"
        )


def plan_key(record: Record) -> Any:
    """The nodes of a record with the decisions on them; of a record without a plan, nothing."""
    return (str(record), record.entry, [decision(node) for node in record.nodes]) if record.planned else ""


def decision(node: Node) -> Any:
    needs, gives = (node.offer.needs, node.offer.gives[: len(node.results)]) if node.offer is not None else ((), ())
    return needs, gives, [(m.base.ref.number, m.src, m.dst) for m in node.moves], node.push


def named(positional: list[str], spec: Any, leaf: int) -> str:
    """The name of leaf number `leaf` in terms of the forward, whose parameters are `positional`."""
    if isinstance(spec, tuple):
        args, kwargs = range(spec[0]), dict(zip(spec[1:], range(spec[0], spec[0] + len(spec))))
    else:
        args, kwargs = pytree.tree_unflatten(range(spec.num_leaves), spec)
    both = {positional[i] if i < len(positional) else f"args[{i}]": v for i, v in enumerate(args)} | kwargs
    path = next(path for path, i in pytree.tree_flatten_with_path(both)[0] if i == leaf)
    return getattr(path[0], "key", "") + pytree.keystr(path[1:])


def compared(v: Any) -> bool:
    """Tell whether a value is compared: a plain tensor with data. DTensors hold a different shard on each rank."""
    return isinstance(v, Tensor) and not isinstance(v, DTensor) and not v.is_meta and v.numel() > 0


def bytes_of(t: Tensor) -> Tensor:
    """The bytes of all that a sparse tensor consists of."""
    parts = [part(t) for part in SPARSE[t.layout]]
    return torch.cat([p.detach().resolve_conj().contiguous().flatten().view(torch.uint8) for p in parts])


def on_host(digest: int, tensors: list[Tensor]) -> list[int]:
    """The row of numbers by which inputs are compared, without that of the weights; for inputs on the CPU."""
    sums = [digest, *(small(t) if t.nbytes <= SMALL and t.is_cpu else int(checksum(t.detach())) for t in tensors)]
    if len(sums) > SLOTS + 1:
        sums[SLOTS:] = [zlib.crc32(repr(sums[SLOTS:]).encode())]
    return sums + [0] * (SLOTS + 1 - len(sums))


def small(x: Tensor) -> int:
    if x.dtype not in OF_NUMPY:
        x = x.detach().resolve_conj()
        x = x.view(KINDS[x.element_size()])
    return zlib.crc32(np.ascontiguousarray(x.numpy(force=True)))  # type: ignore[arg-type]


def checksum(x: Tensor) -> Tensor:
    """One int64 that changes with any element, and with the order of rows; no host synchronisation."""
    x = x.resolve_conj().resolve_neg()
    if x.is_complex():
        x = torch.view_as_real(x)
    flat = (x.contiguous() if x.dtype != torch.bool else x.to(torch.int8)).view(-1)
    size = flat.element_size()
    wide = flat.numel() * size % 8 == 0 and flat.storage_offset() * size % 8 == 0
    bits = flat.view(torch.int64 if wide else KINDS[size])  # eight bytes at once, ten times as fast
    if bits.numel() % ROWS:
        return bits.sum(0, keepdim=True, dtype=torch.int64) + bits[-1].to(torch.int64) * 7919
    sums = bits.view(ROWS, -1).sum(1, dtype=torch.int64)
    weights = torch.arange(1, 2 * ROWS, 2, device=x.device, dtype=torch.int64)
    return (sums * weights).sum(0, keepdim=True)
