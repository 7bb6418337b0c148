"""The options of the video task: its data sets, objective, validation and samples."""
# ruff: noqa: RUF009 (`option` makes a dataclasses.field)

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Protocol

from zoo.data import video_folder
from zoo.data.digits import LETTERS, MovingDigits
from zoo.data.mix import MixedClips, shares_of
from zoo.data.sampling import VideoDataset
from zoo.data.shapes import NAMES, MovingShapes
from zoo.training import task
from zoo.training.sections import option


@dataclass
class Digits:
    channels: ClassVar[int] = 1
    classes: ClassVar[int | None] = 10
    caption_channels: ClassVar[int] = LETTERS
    fps: ClassVar[float] = 8
    name: str = option("digits", "moving handwritten digits, made from real digit images")
    frames: int = option(8, "frames a clip", least=1)
    height: int = option(16, "rows of pixels", least=1)
    width: int = option(16, "columns of pixels", least=1)
    digit: float = option(12.0, "side of the digit, in pixels")
    speed: list[float] = option([0.5, 1.5], "slowest and fastest motion, in pixels a frame", length=2)

    def datasets(self, seed: int) -> tuple[VideoDataset, VideoDataset]:
        size, speed = (self.height, self.width), (self.speed[0], self.speed[1])
        settings: dict[str, Any] = {"frames": self.frames, "size": size, "digit": self.digit, "speed": speed}
        return MovingDigits("train", seed=seed, **settings), MovingDigits("validation", seed=0, **settings)


@dataclass
class Shapes:
    channels: ClassVar[int] = 3
    classes: ClassVar[int | None] = MovingShapes.num_classes
    names: ClassVar[tuple[str, ...]] = NAMES
    caption_channels: ClassVar[int] = 0
    fps: ClassVar[float] = 8
    name: str = option("shapes", "moving shapes in colour, drawn by formula; a class for each shape and colour")
    clips: int = option(4096, "clips in an epoch", least=1)
    frames: int = option(8, "frames a clip", least=1)
    height: int = option(64, "rows of pixels", least=1)
    width: int = option(64, "columns of pixels", least=1)
    radius: list[float] = option([10.0, 15.0], "smallest and largest shape, in pixels", length=2)
    speed: list[float] = option([1.0, 4.0], "slowest and fastest motion, in pixels a frame", length=2)
    tilt: float = option(1.0, "how far shapes are turned, and spin: 1 any way, 0 upright", least=0, most=1)

    def datasets(self, seed: int) -> tuple[VideoDataset, VideoDataset]:
        ranges = {"radius": (self.radius[0], self.radius[1]), "speed": (self.speed[0], self.speed[1])}
        size = (self.height, self.width)
        settings: dict[str, Any] = {"frames": self.frames, "size": size, "tilt": self.tilt, **ranges}
        train = MovingShapes("train", count=self.clips, seed=seed, **settings)
        return train, MovingShapes("validation", count=min(512, self.clips), **settings)


@dataclass
class VideoFolder:
    channels: ClassVar[int] = 3
    classes: ClassVar[int | None] = None
    caption_channels: ClassVar[int] = 0
    name: str = option("video_folder", "mp4, webm and GIF files under one folder")
    path: str | None = option(None, "the folder; required, or mix", file=True)
    mix: dict[str, float] = option(
        {}, "several folders with their shares of the samples, in place of path: {mine: 0.7, others: 0.3}", file=True
    )
    frames: int = option(16, "frames a clip", least=1)
    height: int = option(256, "rows of pixels", least=1)
    width: int = option(256, "columns of pixels", least=1)
    stride: int = option(1, "take every n-th frame of a video", least=1)
    fps: float | None = option(None, "or take frames at this rate; null: the video's own", least=0)
    validation: float = option(0.05, "share of the videos held out for validation", least=0, most=1)
    verify: bool = option(False, "decode every file once at the start, to find and skip damaged ones")

    def datasets(self, seed: int) -> tuple[VideoDataset, VideoDataset]:
        settings: dict[str, Any] = {
            "frames": self.frames,
            "stride": self.stride,
            "fps": self.fps,
            "verify": self.verify,
        }
        settings |= {"height": self.height, "width": self.width, "seed": seed}
        shares = shares_of(self.path, self.mix)
        parts = [video_folder.VideoFolder(path, **settings).split(self.validation) for path in shares]
        if len(parts) == 1:
            return parts[0]
        train, held_out = zip(*parts)
        return MixedClips(train, list(shares.values())), MixedClips(held_out)


class Data(task.Data, Protocol):
    """A section of the configuration that names a data set of clips."""

    frames: Annotated[int, "frames a clip, an option"]
    height: Annotated[int, "rows of pixels, an option"]
    width: Annotated[int, "columns of pixels, an option"]
    fps: Annotated[float | int | None, "frames a second, of the clips as they are shown; None where that is not known"]
    channels: Annotated[int, "channels of a pixel"]
    classes: Annotated[int | None, "how many classes there are; None for none"]
    caption_channels: Annotated[int, "channels of a caption's embedding; 0 for none"]

    def datasets(self, seed: int) -> tuple[VideoDataset, VideoDataset]:
        """A method (seed) that returns the data set to train on and the one to validate with."""


DATA: dict[str, type] = {"digits": Digits, "shapes": Shapes, "video_folder": VideoFolder}


PREDICTIONS = {"rectified_flow": ("velocity", "clean"), "iddpm": ("noise", "velocity")}  # the default first


@dataclass
class Objective:
    name: str = option("rectified_flow", "loss", choices=("rectified_flow", "iddpm"))
    levels: str = option(
        "logit_normal", "rectified_flow: distribution of noise levels", choices=("logit_normal", "uniform")
    )
    loc: float = option(0.0, "logit_normal: mean of a level's logit; above 0 means more noise")
    scale: float = option(1.0, "logit_normal: standard deviation of a level's logit", least=0)
    shift: float = option(
        1.0,
        "rectified_flow: shift s of levels, u to s u / (1 + (s - 1) u), in sampling too (SD3 3, Wan 3 to 5)",
        least=0,
    )
    shift_cells: int | None = option(
        None,
        "number of cells, t h w, for which shift holds; others scale by the root (Open-Sora 1.2: 4096); null: for all",
        least=1,
    )
    range: list[float] = option(
        [0.0, 1.0],
        "rectified_flow: least and greatest noise level, in training (Wan 2.2's experts: [0.875, 1] and [0, 0.875])",
        length=2,
    )
    prediction: str | None = option(
        None,
        "the model's output. rectified_flow: velocity, or clean, the clip itself, for large patches of pixels; iddpm: "
        "noise or velocity; null: the first of these",
        choices=("velocity", "clean", "noise"),
    )
    min_snr: float | None = option(None, "iddpm: min-SNR weight of errors (published: 5); null: no weights", least=0)
    label_dropout: float = option(
        0.1, "share of samples trained without class or caption, for guidance", least=0, most=1
    )
    guidance: float = option(1.0, "strength of guidance that a model takes as an input (hunyuan)", least=0)
    first_frame: float = option(
        0.0, "share of samples with a clean first frame (stdit 2, 3; wan ti2v)", least=0, most=1
    )
    random_frames: float = option(
        0.0, "share of samples with clean frames at random, all but one at most", least=0, most=1
    )

    @property
    def predicts(self) -> str:
        """The model's output: `prediction`, or the default of this objective."""
        return self.prediction or PREDICTIONS[self.name][0]


@dataclass
class Judged:
    every: int = option(500, "steps between validations; 0 for none", least=0)
    clips: int = option(16, "validation samples, the same at every validation", least=1)
    levels: int = option(8, "fixed noise levels at which each sample is scored", least=1)


@dataclass
class Eval(Judged):
    linear_baseline: bool = option(False, "also report the best linear denoiser as a baseline (small clips only)")


@dataclass
class Sample:
    every: int = option(0, "steps between sampled clips; 0 for none", least=0)
    clips: int = option(4, "clips to sample, always from the same noise, each shown under a real one", least=1)
    steps: int = option(25, "sampling steps a clip", least=1, most=1000)
    guidance: float = option(1.0, "classifier-free guidance; 1 for none", least=0)
    metrics: bool = option(
        False, "compare samples with real clips: statistics, and classes by a linear classifier of pixels"
    )
    features: str | None = option(
        None, "with metrics: folder of a published VideoMAE, for its Fréchet distance", file=True
    )
