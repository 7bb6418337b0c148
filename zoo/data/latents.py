"""A folder of encoded clips: latents and text embeddings in sharded safetensors, and a manifest of the encoders.

    manifest.json            the encoders: the autoencoder, its factors, the text encoder
    unconditional.safetensors    the embedding of the empty caption, `text` [l, e], and its `pooled` [e]
    shard-<hash>.safetensors     clips: `<i>.latent` [c, t, h, w] and `<i>.text` [l, e]; the header describes each

For models that want more, `Manifest.more` names further tensors of every clip: `<i>.pooled` [e], a second embedding of
the caption; `<i>.image` [j, e], tokens of the first frame; `<i>.start` [c, t, h, w], the latent of the first frame with
empty (grey) frames after it.

A shard gets its name when it is complete, and never changes: writing continues where it stopped, on any number of
ranks. Only the requested frames of a latent are read. Letters: c channels, t frames, h w height and width in latent
cells, l tokens, e channels of the text.
"""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zoo.data.file_records import FileRecords
from zoo.data.latent_manifest import (
    MANIFEST,
    UNCONDITIONAL,
    LatentError,
    Manifest,
    read_manifest,
    refuse_other_encoders,
)
from zoo.data.progress import counted
from zoo.data.sampling import frame_range
from zoo.files import parse_json, read_bytes, regular, whole_file

__all__ = ["Entry", "Latents", "Writer", "encoded"]


@dataclass(frozen=True)
class Entry:
    """One clip. Sizes are those of the pixels that were encoded; `shape` is the latent's."""

    name: str  # of the source, relative to its folder, with the place of the clip in it
    caption: str
    frames: int
    height: int
    width: int
    fps: float
    shape: tuple[int, int, int, int]  # c, t, h, w
    tokens: int  # l of its text
    shard: str = field(default="", compare=False)
    place: int = field(default=0, compare=False)


def encoded(folder: Path) -> list[Entry]:
    """Every clip in the complete shards of a folder, sorted by name. Reads headers, and the data of shards whose header
    does not declare it finite.

    A LatentError names a shard that is truncated, has other encoders than the manifest, repeats a clip, or has NaN or
    infinite values.
    """
    from safetensors import SafetensorError, safe_open

    manifest = read_manifest(folder)
    entries: dict[str, Entry] = {}
    for path in _shards(folder, "opening shards"):
        try:
            with safe_open(regular(path), "pt") as shard:
                header, names = shard.metadata() or {}, set(shard.keys())
                clips = [_entry(clip, path.name, i) for i, clip in enumerate(parse_json(header["clips"]))]
                for clip in clips if names == _names(clips, manifest) else ():
                    _compare(clip, shard, manifest)
            whose = {name: header[name] for name in ("vae_hash", "text_hash")}
            whose |= {name: header.get(name, "") for name in ("pooled_hash", "image_hash")}
        except (SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
            raise LatentError(f"{path}: truncated or damaged ({error}); delete it and encode again") from None
        if whose != {name: getattr(manifest, name) for name in whose}:
            raise LatentError(f"{path}: encoded by another autoencoder or text encoder than {folder / MANIFEST} names")
        if names != _names(clips, manifest):
            raise LatentError(f"{path}: its header names other clips than it holds; delete it and encode again")
        for clip in clips:
            if clip.name in entries:
                raise LatentError(f"{clip.name} is in {entries[clip.name].shard} and in {path.name}; delete one")
            entries[clip.name] = clip
        if header.get("finite") != "True":
            _verify(path)
    return [entries[name] for name in sorted(entries)]


class Latents:
    """A reader of the clips of a folder, or of several by the same encoders; the empty caption is that of the first.

    Shards are opened at their first use and stay memory-mapped, not loaded. Of several folders, a clip's name begins
    with the number of its folder, and `shard` is the whole path.
    """

    def __init__(self, folder: str | os.PathLike[str], *more: str | os.PathLike[str]):
        self.folders = [Path(folder), *map(Path, more)]
        self.folder = self.folders[0]
        self.manifest, self.entries = read_manifest(self.folder), encoded(self.folder)
        if more:
            self.entries = [
                replace(entry, name=f"{i}/{entry.name}", shard=str(root / entry.shard))
                for i, root in enumerate(self.folders)
                for entry in encoded(root)
            ]
        for other in self.folders[1:]:
            refuse_other_encoders(other, read_manifest(other), self.manifest)
        self._open: dict[str, Any] = {}
        shards = {self.folder / entry.shard for entry in self.entries}
        self.files = FileRecords({*(root / MANIFEST for root in self.folders), self.folder / UNCONDITIONAL, *shards})

    def latent(self, entry: Entry, frames: range | slice | None = None, name: str = "latent") -> Tensor:
        """The latent [c, number of `frames`, h, w], float32, or the `start`; no other frames are read."""
        chosen = frame_range(frames, entry.shape[1])
        view = self._shard(entry).get_slice(f"{entry.place}.{name}")
        if not len(chosen):
            return torch.empty(entry.shape[0], 0, *entry.shape[2:])
        x = view[:, min(chosen) : max(chosen) + 1]
        return x[:, [i - min(chosen) for i in chosen]].float()

    def text(self, entry: Entry, name: str = "text") -> Tensor:
        """The embedding of the clip's caption [l, e], float32, or its `pooled` [e] or `image` [j, e]."""
        return self._shard(entry).get_tensor(f"{entry.place}.{name}").float()

    def unconditional(self, name: str = "text") -> Tensor:
        """The embedding of the empty caption [l, e], float32, or its `pooled` [e]."""
        from safetensors import SafetensorError
        from safetensors.torch import load

        path = self.folder / UNCONDITIONAL
        self.files.check(path)
        try:
            text = load(read_bytes(path, 1 << 30))[name].float()
        except (SafetensorError, KeyError, ValueError, OSError) as error:
            raise LatentError(f"{path}: missing or damaged ({error}); encode into a new folder") from None
        if not torch.isfinite(text).all():
            raise LatentError(f"{path}: it holds NaN or infinite numbers; encode into a new folder")
        return text

    def verify(self) -> None:
        """Read all data of every shard: a LatentError names one whose tensors have changed or are not finite.

        Shards without a checksum, of older versions, are only searched for NaN and infinite values.
        """
        for root in self.folders:
            for path in _shards(root, "verifying shards"):
                _verify(path)

    def _shard(self, entry: Entry) -> Any:
        from safetensors import SafetensorError, safe_open

        self.files.check(self.folder / entry.shard)
        if entry.shard not in self._open:
            try:
                self._open[entry.shard] = safe_open(regular(self.folder / entry.shard), "pt")
            except (SafetensorError, OSError, ValueError) as error:
                raise LatentError(f"{self.folder / entry.shard}: gone or damaged since the start ({error})") from None
        return self._open[entry.shard]


class Writer:
    """Add clips to a folder with a manifest, one shard at a time; a context manager that writes the last shard.

    A shard is written when its clips take `shard_bytes`. Clips outside written shards are lost if the process ends.
    """

    def __init__(self, folder: Path, shard_bytes: int = 256 << 20):
        self.folder, self.shard_bytes, self.manifest = folder, shard_bytes, read_manifest(folder)
        self._clips: list[Entry] = []
        self._tensors: dict[str, Tensor] = {}

    def add(self, entry: Entry, latent: Tensor, text: Tensor, **more: Tensor) -> Path | None:
        """Add latent [c, t, h, w], text [l, e] and what the manifest's `more` names, in their dtypes.

        Return the path of a shard that this completed.
        """
        if more.keys() != set(self.manifest.more):
            raise ValueError(f"a clip with {sorted(more)}, in a folder whose clips have {sorted(self.manifest.more)}")
        i = len(self._clips)
        self._clips.append(entry)
        for name, tensor in {"latent": latent, "text": text, **more}.items():  # copies: clips may share a caption's
            self._tensors[f"{i}.{name}"] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        return self.flush() if sum(x.nbytes for x in self._tensors.values()) >= self.shard_bytes else None

    def flush(self) -> Path | None:
        """Write the current shard, if it has clips. A LatentError if the disk has no space for it."""
        from safetensors.torch import save

        if not self._clips:
            return None
        needed, free = sum(x.nbytes for x in self._tensors.values()), shutil.disk_usage(self.folder).free
        if free < needed * 1.05 + 2**20:
            raise LatentError(
                f"{self.folder}: the next shard takes {needed / 1e6:.1f} MB and {free / 1e6:.1f} MB are free on this "
                "disk; free some space and run the same command again: finished shards are kept"
            )
        clips = [{k: v for k, v in asdict(clip).items() if k not in ("shard", "place")} for clip in self._clips]
        header = {"format": "pt", "clips": json.dumps(clips)}
        digest = hashlib.sha256()
        for key in sorted(self._tensors):
            digest.update(_raw(self._tensors[key]))
        header |= {
            "sha256": digest.hexdigest(),
            "finite": str(all(bool(x.isfinite().all()) for x in self._tensors.values())),
            "vae_hash": self.manifest.vae_hash,
            "text_hash": self.manifest.text_hash,
            "pooled_hash": self.manifest.pooled_hash,
            "image_hash": self.manifest.image_hash,
        }
        name = hashlib.sha256("\n".join(clip.name for clip in self._clips).encode()).hexdigest()[:16]
        path = self.folder / f"shard-{name}.safetensors"
        with whole_file(path, sync=True) as file:
            file.write(save(self._tensors, header))
        self._clips, self._tensors = [], {}
        return path

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.flush()  # after an error too: the clips so far are complete


def _entry(clip: Mapping[str, Any], shard: str, place: int) -> Entry:
    if set(clip) != {f.name for f in fields(Entry)} - {"shard", "place"}:
        expected = sorted({f.name for f in fields(Entry)} - {"shard", "place"})
        raise ValueError(f"clip {place}: expected the fields {expected}, got {sorted(clip)}")
    entry = Entry(**{**clip, "shape": tuple(clip["shape"]), "shard": shard, "place": place})
    for name, kind in (("name", str), ("caption", str)):
        if type(getattr(entry, name)) is not kind or len(getattr(entry, name)) > 1 << 16:
            raise ValueError(f"the {name} of clip {place} is {str(getattr(entry, name))[:40]!r}")
    counts = (entry.frames, entry.height, entry.width, *entry.shape)
    if len(entry.shape) != 4 or not all(type(n) is int and 0 < n < 1 << 31 for n in counts):
        raise ValueError(
            f"{entry.name!r} has {entry.frames} x {entry.height} x {entry.width} pixels, shape {entry.shape}"
        )
    if type(entry.tokens) is not int or entry.tokens < 0 or not 0 < entry.fps < float("inf"):
        raise ValueError(f"{entry.name!r} has {entry.tokens} tokens and {entry.fps} frames a second")
    return entry


def _names(clips: Sequence[Entry], manifest: Manifest) -> set[str]:
    return {f"{i}.{name}" for i in range(len(clips)) for name in ("latent", "text", *manifest.more)}


def _compare(clip: Entry, shard: Any, manifest: Manifest) -> None:
    """Raise a ValueError if the tensors of a clip have other sizes than its entry."""
    for name in manifest.more:
        shape = list(shard.get_slice(f"{clip.place}.{name}").get_shape())
        wanted = list(clip.shape) if name == "start" else [getattr(manifest, f"{name}_channels")]
        if (shape[-1:] if name == "image" else shape) != wanted or len(shape) != {"image": 2}.get(name, len(wanted)):
            raise ValueError(f"{clip.name!r} has a tensor {name} of {shape}, where {wanted} is expected")
    latent, text = (shard.get_slice(f"{clip.place}.{part}").get_shape() for part in ("latent", "text"))
    if tuple(latent) != clip.shape or len(text) != 2 or text[0] != clip.tokens:
        raise ValueError(
            f"{clip.name!r}: the header says a latent of {list(clip.shape)} and {clip.tokens} tokens, the file has a "
            f"latent of {list(latent)} and a text of {list(text)}"
        )


def _shards(folder: Path, activity: str) -> Iterator[Path]:
    paths = sorted(folder.glob("shard-*.safetensors"))
    return counted(paths, len(paths), activity, logging.getLogger(__name__))


def _verify(path: Path) -> None:
    """Raise a LatentError if the tensors of a shard have changed or are not finite."""
    from safetensors import safe_open

    digest, strange = hashlib.sha256(), []
    with safe_open(regular(path), "pt") as shard:
        header = shard.metadata() or {}
        for name in sorted(shard.keys()):  # one at a time
            tensor = shard.get_tensor(name)
            digest.update(_raw(tensor))
            strange += [] if torch.isfinite(tensor).all() else [name]
    if header.get("sha256", digest.hexdigest()) != digest.hexdigest():
        raise LatentError(f"{path}: differs from the checksum in its header; delete it and encode again")
    if strange:
        raise LatentError(f"{path}: {strange[0]} holds NaN or infinite numbers; delete it and encode again")


def _raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()
