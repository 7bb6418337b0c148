"""Encode a folder of captioned videos to the latents and text embeddings that `train.py` reads.

    python -m zoo.video.encode CLIPS --out DIR --vae VAE --text T5 --bucket 17x256x256 17x256x144
    dsp-launch --nproc-per-node 8 -m zoo.video.encode ...       # every rank encodes its share, or a part of every clip

A video goes to the bucket nearest to its own aspect, is cut into consecutive clips of so many frames, scaled to cover
the bucket and cropped at the centre. Captions are in NAME.txt beside NAME.mp4, or in --captions FILE (.csv or .jsonl,
columns path and text). What is encoded stays: the same command goes on after any stop, on any number of ranks.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record

from zoo.data.latent_manifest import Manifest, write_manifest
from zoo.data.latents import Entry, Writer, encoded
from zoo.data.video_file import VideoError, read
from zoo.training import UserError, ranks, user_error
from zoo.training.console import Console
from zoo.training.loader import ahead
from zoo.training.shared_codec import shared_codec
from zoo.training.tracking import duration
from zoo.video.clips import Bucket, ClipError, Source, enlarged, sources
from zoo.video.codec import Autoencoder, CodecError
from zoo.video.encoders import ImageEncoder, PooledEncoder, TextEncoder, grey_after, has_pooled

PATIENCE = timedelta(days=30)  # the first rank scans a large folder, and shares of clips end at different times
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def parser() -> argparse.ArgumentParser:
    shape = argparse.RawDescriptionHelpFormatter
    p = argparse.ArgumentParser("python -m zoo.video.encode", description=__doc__, formatter_class=shape)
    p.add_argument("clips", type=Path, help="a folder of mp4, webm, gif, ... and of folders of them")
    p.add_argument("--out", type=Path, required=True, help="the folder to write, or to go on with")
    p.add_argument("--vae", type=Path, required=True, help="folder of an autoencoder of diffusers, or of a pipeline")
    p.add_argument("--text", type=Path, required=True, help="folder of a text encoder and tokenizer, or of a pipeline")
    p.add_argument(
        "--image", type=Path, help="also what models from an image take: this folder of a pipeline may have CLIP"
    )
    p.add_argument("--bucket", nargs="+", required=True, metavar="TxHxW[@FPS]", help="sizes of clips, in pixels")
    p.add_argument(
        "--captions", type=Path, metavar="FILE", help=".csv or .jsonl; without it NAME.txt beside each video"
    )
    p.add_argument("--clips-per-video", type=int, metavar="N", help="at most so many clips of a video (default: all)")
    p.add_argument("--text-length", type=int, default=300, metavar="L", help="tokens a caption may have (default 300)")
    p.add_argument("--dtype", choices=DTYPES, help="to compute and store in (default: bfloat16 on a GPU, else float32)")
    p.add_argument(
        "--together", action="store_true", help="all ranks encode each clip, one after the other: less memory"
    )
    p.add_argument("--tile", type=int, metavar="P", help="encode in tiles of so many pixels, where memory is short")
    p.add_argument("--shard-mib", type=float, default=256, metavar="MIB", help="size of each file (default 256)")
    p.add_argument("--strict", action="store_true", help="what would be skipped is an error")
    return p


def main(arguments: Sequence[str]) -> int:
    options = parser().parse_args(arguments)
    try:
        with Console(), ranks.process_group(collective=PATIENCE) as device:
            return run(options, device)
    except Exception as error:
        return ranks.report_uncaught(error)
    except KeyboardInterrupt:
        return 130


def run(options: argparse.Namespace, device: torch.device) -> int:
    """Encode this rank's share of the clips; the exit status."""
    began = time.perf_counter()
    dtype = DTYPES[options.dtype or ("bfloat16" if device.type == "cuda" else "float32")]
    vae = user_error(Autoencoder.load, options.vae, device, dtype)
    text = user_error(TextEncoder.load, options.text, device, dtype, length=options.text_length)
    more = user_error(More.load, options, device, dtype)
    todo, skipped = ranks.on_first_rank(lambda: user_error(prepare, options, vae, text, more))
    if options.together and not vae.causal:
        ranks.log0("--together has no effect: an image autoencoder encodes frame by frame, and ranks share the clips")
    options.together &= vae.causal and dist.get_world_size() > 1
    share = todo if options.together else todo[dist.get_rank() :: dist.get_world_size()]
    if options.together:
        vae = shared_codec(vae)
    broken: list[str] = []
    with ranks.StopSignal() as stop:
        try:
            encode_all(share, vae, text, more, options, dtype, broken, stop)
        except (ValueError, OSError) as cause:  # a full disk, a broken file: on this rank only
            raise UserError(str(cause), alone=True) from cause
        if ranks.all_sum(stop.requested)[0] if options.together else stop.requested:
            ranks.log0(f"stopped by {stop.stopped}; the same command goes on")
            return 130
        try:
            counted = not options.together or dist.get_rank() == 0
            clips, lost = ranks.all_sum(counted * (len(share) - len(broken)), counted * len(broken))
        except RuntimeError as cause:
            text = "another rank left before its clips were done; run the same command to resume"
            raise UserError(text, alone=True) from cause
    if dist.get_rank() == 0:
        summary(options.out, int(clips), len(skipped) + int(lost), time.perf_counter() - began)
    return 0


@dataclass
class More:
    """The encoders of what only some models want: a second embedding of captions, first frames and their tokens."""

    pooled: PooledEncoder | None
    image: ImageEncoder | None
    start: bool

    @classmethod
    def load(cls, options: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> "More":
        """The second text encoder of the pipeline `--text`, and the image encoder of the pipeline `--image`."""
        pooled, folder = None, options.image
        if has_pooled(options.text):
            pooled = PooledEncoder.load(options.text, device, dtype)
        if folder is not None and not folder.is_dir():
            raise CodecError(f"--image {folder}: no such folder")
        clip = folder is not None and (folder / "image_encoder" / "config.json").is_file()
        return cls(pooled, ImageEncoder.load(folder, device) if clip else None, folder is not None)

    def manifest(self) -> dict[str, Any]:
        """The entries of a Manifest."""
        named = {name: one for name, one in (("pooled", self.pooled), ("image", self.image)) if one is not None}
        facts: dict[str, Any] = {"start": self.start}
        for name, one in named.items():
            facts |= {name: one.name, f"{name}_path": str(one.path.absolute()), f"{name}_hash": one.fingerprint}
            facts[f"{name}_channels"] = one.channels
        return facts

    def of(self, vae: Autoencoder, frames: Tensor, caption: str, tile: int | None) -> dict[str, Tensor]:
        """The further tensors of a clip of frames [3, t, h, w]."""
        parts = {}
        if self.start:
            parts["start"] = grey_after(frames[:, :1], frames.shape[1], vae, tile)
        if self.image is not None:
            parts["image"] = self.image.encode(frames[:, 0])
        if self.pooled is not None:
            parts["pooled"] = self.pooled.encode([caption])[0]
        return parts


def prepare(
    options: argparse.Namespace, vae: Autoencoder, text: TextEncoder, more: More
) -> tuple[list[Source], list[str]]:
    """Write the folder's manifest; return the clips that are not in the folder yet, and the lines of skipped files.
    Any problem is a ValueError before a clip is encoded."""
    for name in ("text_length", "shard_mib", "clips_per_video", "tile"):
        if (value := getattr(options, name)) is not None and value <= 0:
            raise ClipError(f"--{name.replace('_', '-')} {value}: it must be more than 0")
    buckets = [Bucket.parse(text) for text in options.bucket]
    for bucket in buckets:
        try:
            vae.latent_shape(bucket.frames, bucket.height, bucket.width)
        except CodecError as error:
            raise ClipError(f"--bucket {bucket}: {error}") from None
    wanted, skipped = sources(options.clips, options.captions, buckets, options.clips_per_video)
    for line in skipped:
        print(f"skipped {line}", flush=True)
    grown = [factor for source in wanted if (factor := enlarged(source.video, source.bucket)) > 1.01]
    if grown:
        print(f"{len(grown)} of {len(wanted)} clips are enlarged to their bucket, up to {max(grown):.1f} times")
    if skipped and options.strict:
        raise ClipError(f"--strict: {len(skipped)} files or captions cannot be used; the first is {skipped[0]}")
    if long := too_long(wanted, text):
        raise ClipError(
            f"{len(long)} captions are longer than --text-length {options.text_length} tokens: {'; '.join(long[:5])}"
        )
    write_manifest(
        options.out,
        Manifest(
            vae=vae.name, vae_path=str(options.vae.absolute()), vae_hash=vae.fingerprint, channels=vae.channels,
            factor=vae.factor, causal=vae.causal, shift=vae.shift, scale=vae.scale, text=text.name,
            text_path=str(options.text.absolute()), text_hash=text.fingerprint, text_channels=text.channels,
            text_length=text.length, **more.manifest(),
        ),
        text.encode([""])[0],
        None if more.pooled is None else more.pooled.encode([""])[0],
    )  # fmt: skip
    entries = {entry.name: entry for entry in encoded(options.out)}
    refuse_changed(options.out, wanted, entries)
    todo = [source for source in wanted if source.name not in entries]
    print(f"{len(todo)} clips to encode, {len(wanted) - len(todo)} are in {options.out} already", flush=True)
    return todo, skipped


def too_long(wanted: Sequence[Source], text: TextEncoder) -> list[str]:
    """The files whose captions have too many tokens, with the number of tokens."""
    long = {}
    for source in wanted:
        file = source.name.rpartition("#")[0]
        if file not in long:
            count = text.count(source.caption)
            long[file] = f"{file} has {count}" if count > text.length else ""
    return [line for line in long.values() if line]


def refuse_changed(folder: Path, wanted: Sequence[Source], entries: dict[str, Entry]) -> None:
    """Raise a ClipError if clips of the same names were encoded with other captions or sizes."""
    changes = {}
    for source in wanted:
        if entry := entries.get(source.name):
            size = Bucket(entry.frames, entry.height, entry.width, source.bucket.fps)
            if entry.caption != source.caption:
                changes[source.name] = f"caption {entry.caption!r} there, {source.caption!r} now"
            elif (size, entry.fps) != (source.bucket, source.fps):
                changes[source.name] = f"{size} at {entry.fps:g} a second there, {source.bucket} at {source.fps:g} now"
    if changes:
        name, change = next(iter(changes.items()))
        shards = sorted({entries[name].shard for name in changes})
        raise ClipError(
            f"{len(changes)} clips are in {folder} with other captions or sizes than now; the first is {name}: {change}"
            f". Delete {' '.join(shards)} there to encode their clips again, or choose another --out"
        )


def encode_all(
    wanted: Sequence[Source],
    vae: Autoencoder,
    text: TextEncoder,
    more: More,
    options: argparse.Namespace,
    dtype: torch.dtype,
    broken: list[str],
    stop: ranks.StopSignal,
) -> None:
    """Encode clips and write them shard by shard, until done or asked to stop; names of broken clips go to `broken`."""

    def pixels(source: Source) -> Tensor | str:
        try:
            return read(source.video, source.chosen, source.bucket.height, source.bucket.width)
        except VideoError as error:
            return str(error)

    terminal, began = sys.stderr.isatty() and dist.get_rank() == 0, time.perf_counter()
    caption, embedding = None, torch.empty(0)
    writes = not options.together or dist.get_rank() == 0
    with Writer(options.out, int(options.shard_mib * 2**20)) if writes else nullcontext() as writer:
        for done, (source, frames) in enumerate(zip(wanted, ahead(pixels, ((source,) for source in wanted))), 1):
            latent = frames if isinstance(frames, str) else latent_of(vae, frames, options.tile, dtype)
            if isinstance(latent, str):
                broken.append(source.name)
                if writes:
                    print(f"skipped {source.name}: {latent}", flush=True)
                if options.strict:
                    raise ClipError(f"{source.name}: {latent}")
                continue
            if source.caption != caption:
                caption, embedding = source.caption, text.encode([source.caption])[0].to(dtype)
            (c, t, h, w), size = latent.shape, source.bucket
            shape = size.frames, size.height, size.width
            entry = Entry(source.name, source.caption, *shape, source.fps, (c, t, h, w), len(embedding))
            assert isinstance(frames, Tensor)
            extra = {name: x.to(dtype) for name, x in more.of(vae, frames, source.caption, options.tile).items()}
            shard = writer.add(entry, latent, embedding, **extra) if writer else None
            eta = duration((time.perf_counter() - began) / done * (len(wanted) - done))
            if terminal:
                end = "\n" if done == len(wanted) else ""
                print(f"\r{done}/{len(wanted)} clips  {eta} left ", end=end, file=sys.stderr, flush=True)
            elif shard:
                print(f"rank {dist.get_rank()}: {done}/{len(wanted)} clips, {eta} left: {shard.name}", flush=True)
            if ranks.all_sum(stop.requested)[0] if options.together else stop.requested:
                return


def latent_of(vae: Autoencoder, frames: Tensor, tile: int | None, dtype: torch.dtype) -> Tensor | str:
    """The latent of frames, or the reason why it cannot be used."""
    try:
        latent = vae.encode(frames, tile=tile).to(dtype)
    except torch.OutOfMemoryError:
        size = "x".join(map(str, frames.shape[1:]))
        advice = f"--tile {tile // 2}" if tile else "--together, on more ranks, or --tile 256"
        raise ClipError(f"the GPU has no memory to encode {size} pixels at once; add {advice}") from None
    return latent if latent.isfinite().all() else f"its latent in {dtype} holds NaN or infinite numbers"


def summary(out: Path, clips: int, skipped: int, seconds: float) -> None:
    entries = encoded(out)
    cells = sum(t * h * w for _, t, h, w in (entry.shape for entry in entries))
    size = sum(path.stat().st_size for path in out.glob("*.safetensors")) / 2**20
    print(f"{clips} clips encoded, {skipped} skipped, in {seconds:.1f} s")
    print(
        f"{out} holds {len(entries)} clips: {cells} latent cells, {sum(e.tokens for e in entries)} text tokens, "
        f"{size:.1f} MiB",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(record(main)(sys.argv[1:]))
