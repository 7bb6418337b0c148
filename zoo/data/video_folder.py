"""Clips from any folder of video files: mp4, webm, GIF and their kin. The folder is scanned once, by `probe`."""

import bisect
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from pathlib import Path

import torch

from zoo.data.file_records import FileRecords
from zoo.data.progress import counted
from zoo.data.sampling import Clip, frame_range, generator, hash_seed
from zoo.data.video_file import Video, VideoError, probe, pyav, read, slack, source_frame

__all__ = ["SUFFIXES", "VideoFolder", "files"]

SUFFIXES = (".mp4", ".webm", ".gif", ".mkv", ".mov", ".m4v", ".avi")

log = logging.getLogger(__name__)


class VideoFolder:
    """Random clips [3, frames, height, width] in [-1, 1] from the videos under `root`, one a video and epoch.

    `stride` takes every stride-th frame of a video; `fps` instead takes the frames nearest to that rate, for videos of
    any rate. A frame is scaled until it just covers height x width, then cropped; `crop` is "random" or "center".
    Rotation tags are obeyed. Start and crop of a clip are functions of (seed, epoch, index).

    Files that are broken or shorter than a clip are skipped: one log line names each, `skipped` lists them. `verify`
    decodes every file to its end in the scan, which finds damage in the middle too; otherwise reading a damaged clip
    raises an error. `split` holds some videos out for validation.
    """

    num_classes: int | None = None

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        frames: int = 16,
        height: int = 256,
        width: int = 256,
        stride: int = 1,
        fps: float | None = None,
        crop: str = "random",
        seed: int = 0,
        verify: bool = False,
    ):
        pyav()
        if min(frames, height, width, stride) < 1 or (fps is not None and fps <= 0):
            sizes = f"{frames=} {height=} {width=} {stride=} {fps=}"
            raise VideoError(f"frames, height, width, stride and fps must be positive: {sizes}")
        if fps is not None and stride != 1:
            raise VideoError(f"give stride or fps, not both: {stride=} {fps=}")
        if crop not in ("random", "center"):
            raise VideoError(f"crop must be 'random' or 'center', got {crop!r}")
        self.root, self.frames, self.shape = Path(root), frames, (3, height, width)
        self.stride, self.fps, self.crop, self.seed = stride, fps, crop, seed
        self.videos: list[Video] = []
        self.skipped: list[tuple[Path, str]] = []
        self._scan(verify)
        self.files = FileRecords(video.path for video in self.videos)

    def __len__(self) -> int:
        return len(self.videos)

    def clip(self, index: int, epoch: int, frames: range | slice | None = None) -> Clip:
        """The clip of video `index` in epoch `epoch`; only the frames needed are decoded. The label is None."""
        video, (_, height, width) = self.videos[index], self.shape
        self.files.check(video.path)
        name = video.path.relative_to(self.root).as_posix()
        u, top, left = torch.rand(3, generator=generator("video", self.seed, epoch, index, name)).tolist()
        if self.crop == "center":
            top = left = 0.5
        start = min(int(u * self._starts(video)), self._starts(video) - 1)
        chosen = [self._source_frame(video, start, i) for i in frame_range(frames, self.frames)]
        return {"x": read(video, chosen, height, width, top=top, left=left), "label": None}

    def split(self, validation: float = 0.05) -> tuple["VideoFolder", "VideoFolder"]:
        """Split the folder into `(train, validation)`: a share `validation` of the videos, at least one, is held out.

        The choice depends only on the names. A folder of one video is used for both. Validation clips are cropped at
        the centre.
        """
        if not 0 < validation < 1:
            raise VideoError(f"the share of videos held out for validation must be between 0 and 1, got {validation}")
        train, held_out = copy(self), copy(self)
        held_out.crop = "center"
        if len(self) == 1:
            log.warning("%s holds a single video: validation uses it too", self.root)
            return train, held_out
        ranked = sorted(self.videos, key=lambda video: hash_seed(video.path.relative_to(self.root).as_posix()))
        count = min(max(1, round(validation * len(self))), len(self) - 1)
        chosen = {video.path for video in ranked[:count]}
        train.videos = [video for video in self.videos if video.path not in chosen]
        held_out.videos = [video for video in self.videos if video.path in chosen]
        return train, held_out

    def _scan(self, verify: bool) -> None:
        paths = files(self.root)

        def judge(path: Path) -> Video | str:
            video = probe(path, verify)
            if isinstance(video, str):
                return video
            if self._starts(video) > 0:
                return video
            length = f"{len(video.times)} frames"
            if self.fps is None:
                return f"too short: {length}, and {self.frames} frames at stride {self.stride} were asked for"
            seconds = (video.times[-1] - video.times[0]) * video.tick
            return f"too short: {length} in {seconds:.2f} s, and {self.frames} at {self.fps:g} a second were asked for"

        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            for path, result in counted(zip(paths, pool.map(judge, paths)), len(paths), "looking at videos", log):
                if isinstance(result, Video):
                    self.videos.append(result)
                else:
                    self.skipped.append((path, result))
                    log.warning("skipped %s: %s", path, result)
        log.info("%d videos under %s, %d skipped", len(self.videos), self.root, len(self.skipped))
        if not self.videos:
            path, reason = self.skipped[0]
            raise VideoError(
                f"none of the {len(paths)} videos under {self.root} can be used; the first is {path}: {reason}"
            )

    def _starts(self, video: Video) -> int:
        """The number of frames of a video at which a clip can start."""
        if self.fps is None:
            return len(video.times) - (self.frames - 1) * self.stride
        span = (self.frames - 1) / self.fps / video.tick
        return bisect.bisect_right(video.times, video.times[-1] - span + slack(video))

    def _source_frame(self, video: Video, start: int, i: int) -> int:
        """The number in the video of frame `i` of a clip that starts at frame `start`."""
        if self.fps is None:
            return start + i * self.stride
        return source_frame(video, video.times[start], i / self.fps)


def files(root: Path) -> list[Path]:
    """The videos under a folder, sorted; a VideoError if there are none."""
    if not root.is_dir():
        raise VideoError(f"no such folder: {root}")
    paths = sorted(
        path
        for path in root.rglob("*")
        if path.suffix.lower() in SUFFIXES and not path.name.startswith(".") and path.is_file()
    )
    if not paths:
        raise VideoError(f"no videos under {root} (looked for {', '.join(SUFFIXES)})")
    return paths
