"""The video task on latents: clips of several shapes with their captions, encoded before training.

Unlike in tasks/video.py, a step is of one bucket, all its clips have one shape, and captions come as embeddings.
Letters: b samples, c channels, t frames, h w height and width in latent cells.
"""

# ruff: noqa: RUF009 (`option` makes a dataclasses.field)
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from zoo.contract import SIZES, Conditions, sizes_of
from zoo.data.buckets import Bucket, bucket_batches, bucket_step
from zoo.data.latent_folder import LatentFolder, largest_first
from zoo.data.latent_manifest import Manifest, read_manifest
from zoo.data.latents import Entry
from zoo.data.mix import shares_of
from zoo.data.sampling import hash_seed, order
from zoo.training import UserError, task, user_error
from zoo.training.ranks import on_first_rank
from zoo.training.sections import option
from zoo.training.task import Inputs
from zoo.training.tasks import video, video_options
from zoo.training.tasks.video_options import Judged as Eval
from zoo.training.tasks.video_options import Objective

__all__ = ["DATA", "Eval", "Latents", "Objective", "Sample", "Task"]

_TOKENS = 300  # of captions in a dry run without a folder: those of Open-Sora 1.2
_IMAGE_TOKENS = 257
_IMAGE_FPS = 120.0  # the frame rate of an image, in Open-Sora

log = logging.getLogger(__name__)


@dataclass
class Latents:
    classes: ClassVar[int | None] = None
    name: str = option("latent_folder", "folder of latents and text embeddings, written by zoo.video.encode")
    path: str | None = option(None, "the folder; required, or mix", file=True)
    mix: dict[str, float] = option(
        {}, "several folders with their shares of the samples, in place of path: {mine: 0.7, others: 0.3}", file=True
    )
    buckets: list[str] = option([], "shapes to train on, in latent cells: TxHxW or TxHxW@fps; empty: all in the folder")
    balance: bool = option(False, "give smaller shapes larger batches, up to the cells of the largest shape")
    verify: bool = option(False, "compare every shard with its checksum at the start")
    validation: float = option(0.05, "share of the clips held out for validation, in whole videos", least=0, most=1)


class Data(task.Data, Protocol):
    """A section of the configuration that names latents in a folder."""

    path: Annotated[str | None, "the folder, an option"]
    buckets: Annotated[list[str], "shapes to train on, an option"]
    balance: Annotated[bool, "whether smaller shapes have more samples a batch, an option"]
    verify: Annotated[bool, "whether every shard is compared with its checksum at the start, an option"]
    validation: Annotated[float | int, "share of the clips held out for validation, an option"]


DATA: dict[str, type] = {"latent_folder": Latents}


@dataclass
class Sample(video_options.Sample):
    vae: str | None = option(
        None, "folder of the autoencoder that decodes samples; null: the one in the manifest", file=True
    )
    prompts: list[str] = option([], "captions of the clips to sample; empty: those of held-out clips, shown above them")
    text: str | None = option(
        None, "folder of the text encoder that embeds these; null: the one in the manifest", file=True
    )


class Task(video.Task):
    """Diffusion on latents in buckets, the largest first: a rank reads only its frames of each clip."""

    def __init__(self, config: Any, *devices: Any):
        super().__init__(config, *devices)
        self.wanted = [user_error(Bucket.parse, text, prefix="data.buckets: ") for text in config.data.buckets]

    @cached_property
    def manifest(self) -> Manifest | None:
        """The manifest of the folder; None without one, in a dry run."""
        root = next(iter(self.folders), None)
        return None if root is None else user_error(read_manifest, Path(root), prefix="data: ")

    @property
    def folders(self) -> dict[str, float]:
        """The folders with their shares of the samples; {} without one, in a dry run."""
        return user_error(shares_of, self.config.data.path, getattr(self.config.data, "mix", {}), prefix="data: ")

    @cached_property
    def buckets(self) -> list[Bucket]:
        if not self.wanted and not self.folders:
            raise UserError("data.path is not set, so data.buckets has to say what the clips are: [16x32x32]")
        return sorted(self.wanted, key=largest_first) if self.wanted else self.read().buckets

    @cached_property
    def batches(self) -> list[int]:
        """The number of samples in a batch of each bucket."""
        return bucket_batches(self.config.train.batch, self.buckets, self.config.data.balance)

    @property
    def clip(self) -> tuple[int, int, int]:
        return self.buckets[0].shape

    @property
    def channels(self) -> int:
        return self.manifest.channels if self.manifest else self.model_channels

    def read(self) -> LatentFolder:
        return user_error(LatentFolder, self.folders, self.wanted, prefix="data: ")

    def verified(self) -> LatentFolder:
        """The folder, compared with its checksums if the configuration says so."""
        folder = self.read()
        if self.config.data.verify:
            user_error(folder.latents.verify, prefix="data: ")
        return folder

    def open(self) -> None:
        share_held_out = self.config.data.validation
        self.train, self.validation = on_first_rank(
            lambda: user_error(self.verified().split, share_held_out, prefix="data: ")
        )
        self.buckets = self.train.buckets
        shapes = ", ".join(f"{len(clips)} of {b}" for b, clips in zip(self.buckets, self.train.clips))
        log.info("%d clips to train on (%s), %d to validate with", len(self.train), shapes, len(self.validation))

    # ------------------------------------------------------------------------------------------------ model, objective

    def model(self) -> nn.Module:
        repeated = hasattr(self, "takes")
        model = super().model()
        if self.manifest is not None:
            known = ("vae_hash", "text_hash") if "context" in self.takes else ("vae_hash",)
            self.identity["latents"] = {name: getattr(self.manifest, name) for name in known}
        if "context" not in self.takes and not repeated:
            log.info("model %s takes no text: the captions are not used", self.config.model.name)
        return model

    def offers(self, wants: Conditions) -> Conditions:
        if (known := self.manifest) is None:  # a dry run: whatever the model was made for
            self.model_channels, self.caption = wants.channels, (_TOKENS, wants.text)
            return wants
        self.caption = known.text_length, known.text_channels
        start = wants.start if known.start or ("frame" in wants.first and known.causal) else 0
        return Conditions(
            known.channels, text=known.text_channels, pooled=known.pooled_channels, image=known.image_channels,
            start=start, sizes=SIZES,
        )  # fmt: skip

    def example(self, objective: Any, bucket: int = 0) -> dict[str, Tensor]:
        b, wants = self.batches[bucket], self.conditions
        conditions = {name: torch.ones(b) for name in (*SIZES, "strength")}
        conditions |= {"context": torch.empty(b, *self.caption), "context_mask": torch.ones(b, self.caption[0]).bool()}
        conditions |= {"pooled": torch.empty(b, wants.pooled), "image": torch.empty(b, self.image_tokens, wants.image)}
        return self._example(b, self.buckets[bucket].shape) | {k: v for k, v in conditions.items() if k in self.takes}

    @cached_property
    def image_tokens(self) -> int:
        """The number of tokens of a first frame; without a folder, that of CLIP's for 224 pixels."""
        if self.manifest is None or not self.manifest.image:
            return _IMAGE_TOKENS
        folder = self.train if hasattr(self, "train") else self.read()
        entry = next(entry for clips in folder.clips for entry in clips)
        return len(folder.vectors(entry, "image"))

    # --------------------------------------------------------------------------------------------------------- batches

    def bucket(self, step: int, groups: int) -> int:
        return self._step(step, groups)[0]

    def batch_tokens(self, bucket: int = 0) -> int:
        return self.tokens_of(self.buckets[bucket].shape) * self.batches[bucket]

    def _step(self, step: int, groups: int) -> tuple[int, list[int], list[int]]:
        options = self.config.train
        return bucket_step(
            options.seed, step, self.train.places, [b * options.accumulation * groups for b in self.batches]
        )

    def batch(self, objective: Any, step: int, micro: int, group: int, groups: int) -> Inputs:
        bucket, epochs, indices = self._step(step, groups)
        size = self.batches[bucket]
        span = slice((micro * groups + group) * size, (micro * groups + group + 1) * size)
        entries, turns = zip(*(self.train.at(bucket, i, epoch) for i, epoch in zip(indices[span], epochs[span])))
        ids = _sample_ids(entries, turns)
        inputs = self._read_clips(self.train, entries, self._dropped(step, ids).tolist())
        return inputs | self._random(objective, step, ids, self.buckets[bucket].shape)

    def validation_batches(self, objective: Any, group: int, groups: int) -> Iterator[tuple[int, int, Inputs]]:
        """Yield a bucket at a time, for all groups at once. A group that has no sample left in a bucket's last batch
        takes one that counts 0: every group has as many batches, which sharded weights need."""
        for bucket, chosen in enumerate(self._chosen()):
            size = self.batches[bucket]
            levels = objective.validation_levels(self.config.eval.levels, self.buckets[bucket].cells)
            for first in range(0, len(chosen), size * groups):
                share = chosen[first + group * size : first + (group + 1) * size]
                entries, epochs = zip(*(share or chosen[:1]))
                inputs = self._read_clips(self.validation, entries, [False] * len(entries))
                ids = _sample_ids(entries, epochs)
                yield from self._judged(inputs, levels, ids, self.buckets[bucket].shape, len(share))

    def _chosen(self) -> list[list[tuple[Entry, int]]]:
        """The validation samples of each bucket as (clip, epoch), taken from all held-out clips in shuffled order."""
        clips = [(bucket, entry) for bucket, entries in enumerate(self.validation.clips) for entry in entries]
        places = order(0, 0, len(clips)).tolist()
        chosen: list[list[tuple[Entry, int]]] = [[] for _ in self.buckets]
        for i in range(self.config.eval.clips):
            bucket, entry = clips[places[i % len(clips)]]
            chosen[bucket].append((entry, i // len(clips)))
        return chosen

    def _read_clips(self, folder: LatentFolder, entries: Sequence[Entry], drop: Sequence[bool]) -> Inputs:
        frames = entries[0].shape[1]
        x = torch.stack([folder.latent(entry, self.local_range(frames)) for entry in entries])
        conditions = self.conditions_of_clips(folder, entries, drop, self.local_range(frames))
        if "start" in conditions:
            conditions["start"] = self.local_shard("start", conditions["start"], frames)
        return {"x": self.local_shard("x", x, frames), **conditions}

    def conditions_of_clips(
        self, folder: LatentFolder, entries: Sequence[Entry], drop: Sequence[bool], frames: range | None = None
    ) -> dict[str, Tensor]:
        """The conditions of clips: captions, the empty one where `drop` is True, sizes (b) and their first frames.

        frames: those of channels that stand after the clip's; None: all.
        """
        strength = torch.full((len(entries),), 1000.0 * self.config.objective.guidance)
        conditions: dict[str, Tensor] = {"strength": strength}
        said = [None if dropped else entry for entry, dropped in zip(entries, drop)]
        if "context" in self.takes:
            context, mask = zip(*(folder.caption(entry) for entry in said))
            conditions |= {"context": torch.stack(context), "context_mask": torch.stack(mask)}
        if "pooled" in self.takes:
            conditions["pooled"] = torch.stack([folder.vectors(entry, "pooled") for entry in said])
        if "image" in self.takes:
            conditions["image"] = torch.stack([folder.vectors(entry, "image") for entry in entries])
        if "start" in self.takes:
            name = "start" if "frames" in self.conditions.first else "latent"
            span = range(entries[0].shape[1]) if frames is None else frames
            conditions["start"] = torch.stack(
                [self.conditions.start_of(folder.latent(entry, span, name), span) for entry in entries]
            )
        sizes = [clip_sizes(entry.frames, entry.height, entry.width, entry.fps) for entry in entries]
        conditions |= {name: torch.tensor([size[name] for size in sizes]) for name in SIZES}
        return {name: value for name, value in conditions.items() if name in self.takes}

    def describe(self) -> str:
        frames, height, width = self.clip
        largest = f"{frames} frames of {height} x {width} latent cells"
        return largest + (f", the largest of {len(self.buckets)} shapes" if len(self.buckets) > 1 else "")


def _sample_ids(entries: Sequence[Entry], epochs: Sequence[int]) -> list[int]:
    """The seeds of samples' noise: from the names of clips, so that they stay when other clips are added."""
    return [hash_seed("clip", entry.name, epoch) for entry, epoch in zip(entries, epochs)]


def clip_sizes(frames: int, height: int, width: int, fps: float) -> dict[str, float]:
    """The sizes of a clip as conditions: frames and pixels, not latent cells."""
    return sizes_of(SIZES, frames, height, width, fps if frames > 1 else _IMAGE_FPS)
