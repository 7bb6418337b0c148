"""Clips of moving shapes with captions, to try the way from clips to samples without videos of one's own.

    python -m zoo.video.example_clips DIR [--videos 64]

writes `DIR/0000.mp4` and the caption `DIR/0000.txt`, "a red disc", and so on: 32 frames of 64 x 112 pixels each, at 8 a
second. Needs the extra `video`.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from zoo.data.shapes import NAMES, MovingShapes
from zoo.pictures import save_mp4
from zoo.training import user_error
from zoo.training.console import command

__all__ = ["write_clips"]

FRAMES, SIZE = 32, (64, 112)


def write_clips(folder: Path, videos: int, *, frames: int = FRAMES, size: tuple[int, int] = SIZE) -> None:
    """Write videos of one shape each, all classes in turn, and their captions."""
    data = MovingShapes(count=videos, frames=frames, size=size, radius=(size[0] / 6, size[0] / 4), speed=(1.0, 3.0))
    for i in range(videos):
        clip, name = data.clip(i, 0), NAMES[i % len(NAMES)]
        save_mp4(folder / f"{i:04}.mp4", clip["x"][None])
        (folder / f"{i:04}.txt").write_text(f"a {name}\n")


def main(arguments: Sequence[str]) -> int:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m zoo.video.example_clips", description=__doc__, formatter_class=shape)
    parser.add_argument("dir", type=Path, help="the folder to write")
    parser.add_argument("--videos", type=int, default=64, help="how many (default 64)")
    options = parser.parse_args(arguments)

    def work() -> Iterator[str]:
        user_error(write_clips, options.dir, options.videos)  # PyAV may be missing
        yield f"{options.videos} videos, and the caption of each, to {options.dir}"

    return command(work)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
