"""The clips to encode: the captioned videos of a folder, cut into clips and assigned to the requested sizes."""

import csv
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import log
from pathlib import Path

from zoo.data.buckets import Bucket
from zoo.data.progress import counted
from zoo.data.video_file import Video, probe, slack, source_frame
from zoo.data.video_folder import files
from zoo.files import parse_json, read_bytes

__all__ = ["Bucket", "ClipError", "Source", "captions", "choose", "cut", "sources"]

MOST = 1 << 32  # bytes of a table of captions
NAMES, TEXTS = ("path", "file", "file_name", "video"), ("text", "caption", "prompt")  # columns of a table of captions


class ClipError(ValueError):
    """Clips, captions or sizes that cannot be used, with the reason and what to do."""


@dataclass(frozen=True)
class Source:
    """A clip to encode. `name`: file and first frame, counted at the clip's rate; `chosen`: frames of the file."""

    name: str
    video: Video
    caption: str
    bucket: Bucket
    chosen: tuple[int, ...]
    fps: float


def sources(
    root: Path, table: Path | None, buckets: Sequence[Bucket], most: int | None = None
) -> tuple[list[Source], list[str]]:
    """The clips of every captioned video under `root`, and one line for each skipped file, with the reason.

    Captions are found as in `captions`. A video has at most `most` clips. ClipError: no clip is left.
    """
    paths = {path.relative_to(root).as_posix(): path for path in files(root)}
    texts, skipped = captions(root, table, paths)
    clips: list[Source] = []
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        looked_at = zip(texts, pool.map(probe, [paths[name] for name in texts]))
        for name, video in counted(looked_at, len(texts), "looking at videos", logging.getLogger(__name__)):
            if isinstance(video, str):
                skipped.append(f"{name}: {video}")
            elif (bucket := choose(video, buckets)) is None:
                wanted = " or ".join(str(bucket) for bucket in buckets)
                skipped.append(f"{name}: too short: {len(video.times)} frames in {_seconds(video):.2f} s, for {wanted}")
            else:
                clips += list(cut(name, video, texts[name], bucket))[:most]
    if not clips:
        raise ClipError(f"no clip under {root} can be encoded: " + "; ".join(skipped[:5]))
    return clips, skipped


def captions(root: Path, table: Path | None, paths: Mapping[str, Path]) -> tuple[dict[str, str], list[str]]:
    """The captions of files in `paths`, and one line for each file without a caption and each caption without a file.

    Captions come from `table`, a CSV or JSONL with one of the columns path, file, file_name, video and one of text,
    caption, prompt, or without a table from NAME.txt beside NAME.mp4. Files are relative to `root`. ClipError: no
    file has a caption.
    """
    skipped = []
    if table is None:
        source = "NAME.txt beside each video"
        sidecars = {name: path.with_suffix(".txt") for name, path in paths.items()}
        texts = {name: _text(path).strip() for name, path in sidecars.items() if path.is_file()}
        for path in sorted(set(root.rglob("*.txt")) - set(sidecars.values())):
            skipped.append(f"{path.relative_to(root).as_posix()}: a caption without a video")
    else:
        source, texts = str(table), {}
        for line, file, text in _rows(table):
            name = os.path.relpath(root / file, root).replace(os.sep, "/")
            if name in texts and texts[name] != text:
                raise ClipError(f"{table}, line {line}: {name} has another caption already")
            texts[name] = text
        skipped += [f"{name}: a caption without a video under {root}" for name in texts if name not in paths]
    missing = "no caption" if table else "no caption in a .txt of its name"
    skipped += [f"{name}: {missing}" for name in paths if not texts.get(name)]
    captioned = {name: texts[name] for name in paths if texts.get(name)}
    if not captioned:
        raise ClipError(
            f"none of the {len(paths)} videos under {root} has a caption (looked in {source}). Write NAME.txt beside "
            f"NAME.mp4, or pass --captions FILE, a .csv or .jsonl with the columns {NAMES[0]} and {TEXTS[0]}, paths "
            f"relative to {root}"
        )
    return captioned, skipped


def choose(video: Video, buckets: Sequence[Bucket]) -> Bucket | None:
    """The bucket of nearest aspect ratio among those the video is long enough for; None if it is too short for all.
    Ties go to the longest bucket, then to the one that enlarges the video least, then to the largest."""

    def rank(bucket: Bucket) -> tuple[float, ...]:
        aspect = abs(log(video.width * bucket.height / (video.height * bucket.width)))
        return (round(aspect, 3), -bucket.frames, enlarged(video, bucket), -bucket.height * bucket.width)

    return min((b for b in buckets if _length(video, b.fps) >= b.frames), key=rank, default=None)


def enlarged(video: Video, bucket: Bucket) -> float:
    """The factor by which the pictures of a video are enlarged for a bucket; 1 if they are not."""
    return max(1.0, bucket.height / video.height, bucket.width / video.width)


def cut(name: str, video: Video, caption: str, bucket: Bucket) -> Iterator[Source]:
    """Consecutive clips from the video's first frame on; an incomplete clip at the end is dropped."""
    rate = (len(video.times) - 1) / _seconds(video) if len(video.times) > 1 else 1.0
    fps = bucket.fps or round(rate, 3)
    for start in range(0, _length(video, bucket.fps) - bucket.frames + 1, bucket.frames):
        shown = range(start, start + bucket.frames)
        chosen = [source_frame(video, video.times[0], i / bucket.fps) for i in shown] if bucket.fps else shown
        yield Source(f"{name}#{start}", video, caption, bucket, tuple(chosen), fps)


def _seconds(video: Video) -> float:
    return (video.times[-1] - video.times[0]) * video.tick


def _length(video: Video, fps: float | None) -> int:
    """The number of frames of a video, resampled at `fps` if given."""
    return len(video.times) if fps is None else int((_seconds(video) + slack(video) * video.tick) * fps) + 1


def _text(path: Path) -> str:
    try:
        return read_bytes(path, MOST).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ClipError(f"{path}: not UTF-8 text: {error}") from None
    except OSError as error:
        raise ClipError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise ClipError(str(error)) from None


def _rows(table: Path) -> Iterator[tuple[int, str, str]]:
    """(line, file, caption) of each row of a table."""
    rows: list[tuple[int, dict[str, str]]] = []
    content = _text(table)
    lines = content.splitlines(keepends=True)
    if table.suffix == ".csv":
        before = csv.field_size_limit(max(len(content), 1))  # another column may be long
        try:
            reader = csv.DictReader(lines)
            rows += [(reader.line_num, row) for row in reader]
        finally:
            csv.field_size_limit(before)
    elif table.suffix == ".jsonl":
        for i, each in enumerate(lines, 1):
            try:
                rows += [(i, parse_json(each))] if each.strip() else []
            except ValueError as error:
                raise ClipError(f"{table}, line {i} is not JSON: {error}") from None
    else:
        raise ClipError(f"{table}: captions are read from .csv and .jsonl files, not from {table.suffix or 'this'}")
    for line, row in rows:
        columns = row if isinstance(row, dict) else {}
        name, text = (next((k for k in known if isinstance(columns.get(k), str)), None) for known in (NAMES, TEXTS))
        if name is None or text is None:
            raise ClipError(
                f"{table}, line {line}: expected one of {', '.join(NAMES)} and one of {', '.join(TEXTS)}, "
                f"got {', '.join(map(str, columns)) or 'no columns'}"
            )
        yield line, columns[name], columns[text].strip()
