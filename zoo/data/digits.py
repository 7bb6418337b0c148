"""Handwritten digits, still and moving: the data of the demos, from the real digit images in scikit-learn.

1797 images of 8 x 8 pixels with 17 levels of grey (Alpaydin & Kaynak 1998, "Optical Recognition of Handwritten Digits",
UCI; BSD copy in scikit-learn); 297 of them are for validation. A clip shows one image, scaled up, which moves in a
straight line at a constant speed and bounces off the walls, as in Moving MNIST (Srivastava et al. 2015); its class is
the digit. Positions are real numbers and the image is drawn by bilinear interpolation, so that the motion is smooth.
"""

import math
from functools import lru_cache

import numpy as np
import torch

from zoo.data.sampling import Clip, frame_range, generator, order

__all__ = ["LETTERS", "DigitImages", "MovingDigits", "spell"]

LETTERS = 26
_NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "")

_HELD_OUT = 297  # images kept for validation; the other 1500 are for training


@lru_cache(maxsize=1)
def _images() -> tuple[np.ndarray, list[int]]:
    """All digit images [1797, 8, 8] in [0, 1], float32, and their classes."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    return (digits.images / 16).astype(np.float32), digits.target.tolist()


def _split(split: str) -> list[int]:
    """The image numbers of the "train" or the "validation" split, the same for every seed."""
    if split not in ("train", "validation"):
        raise ValueError(f"DigitImages, MovingDigits: split must be 'train' or 'validation', got {split!r}")
    shuffled = order(0, 0, len(_images()[1])).tolist()
    return sorted(shuffled[_HELD_OUT:] if split == "train" else shuffled[:_HELD_OUT])


class DigitImages:
    """Images [1, 8, 8] of integers from 0 to 16, int64, with their class 0-9."""

    shape, levels, num_classes = (1, 8, 8), 17, 10

    def __init__(self, split: str = "train"):
        self.samples = _split(split)

    def __len__(self) -> int:
        return len(self.samples)

    def image(self, index: int, rows: range = range(8)) -> tuple[torch.Tensor, int]:
        """The given rows of image `index`, and its class."""
        images, labels = _images()
        image = torch.from_numpy(images[self.samples[index]][rows.start : rows.stop] * 16)
        return image.round().long()[None], labels[self.samples[index]]


def reflect(position: float, room: float) -> float:
    """The position of a point that bounces between 0 and `room`; `position` is the one without walls."""
    if room <= 0:
        return 0.0
    position = position % (2 * room)
    return min(position, 2 * room - position)


def _resample(offsets: list[float], length: int, digit: float, source: int = 8) -> np.ndarray:
    """Bilinear weights [len(offsets), length, source]: rows of `source` pixels drawn `digit` canvas pixels long."""
    centres = (np.arange(length) + 0.5 - np.array(offsets)[:, None]) * (source / digit) - 0.5
    distance = np.abs(centres[:, :, None] - np.arange(source))
    return np.maximum(1 - distance, 0).astype(np.float32)


def spell(labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Captions of digits (b): the letters of their names, one-hot (b 5 26), and the mask of letters (b 5, bool).

    10 stands for no digit and has the empty caption.
    """
    codes = [[ord(letter) - ord("a") for letter in name] + [-1] * (5 - len(name)) for name in _NAMES]
    letters = torch.tensor(codes, device=labels.device)[labels]
    return (letters[..., None] == torch.arange(LETTERS, device=labels.device)).float(), letters >= 0


class MovingDigits:
    """Clips [1, frames, height, width] of one handwritten digit in motion, values in [-1, 1], with its class 0-9.

    `size` is the canvas (height, width) and `digit` the side of the digit, in pixels; `speed` is the range of speeds,
    in pixels a frame. No image is in both splits, for any seed. The trajectory is a function of (seed, epoch, index).
    """

    num_classes: int | None = 10

    def __init__(
        self,
        split: str = "train",
        *,
        frames: int = 8,
        size: tuple[int, int] = (16, 16),
        digit: float = 12.0,
        speed: tuple[float, float] = (0.5, 1.5),
        seed: int = 0,
    ):
        if frames < 1 or digit <= 0 or digit > min(size):
            raise ValueError(f"MovingDigits: need frames >= 1 and 0 < digit <= canvas, got {frames=} {digit=} {size=}")
        if not 0 <= speed[0] <= speed[1]:
            raise ValueError(f"MovingDigits: speed is a range (slowest, fastest) in pixels a frame, got {speed}")
        self.split, self.frames, self.shape, self.seed = split, frames, (1, *size), seed
        self.digit, self.speed = digit, speed
        self.samples = _split(split)

    def __len__(self) -> int:
        return len(self.samples)

    def clip(self, index: int, epoch: int, frames: range | slice | None = None) -> Clip:
        """Clip `index` in epoch `epoch`; only `frames` are drawn."""
        images, labels = _images()
        image, label = images[self.samples[index]], labels[self.samples[index]]
        _, height, width = self.shape
        u = torch.rand(4, generator=generator("digits", self.split, self.seed, epoch, index), dtype=torch.float64)
        start_y, start_x, angle, speed = u.tolist()
        speed = self.speed[0] + (self.speed[1] - self.speed[0]) * speed
        velocity_y, velocity_x = speed * math.sin(2 * math.pi * angle), speed * math.cos(2 * math.pi * angle)
        room_y, room_x = height - self.digit, width - self.digit
        chosen = frame_range(frames, self.frames)
        rows = _resample([reflect(start_y * room_y + velocity_y * f, room_y) for f in chosen], height, self.digit)
        columns = _resample([reflect(start_x * room_x + velocity_x * f, room_x) for f in chosen], width, self.digit)
        # numpy multiplies one frame after another, so the bits of a frame do not depend on how many are drawn
        x = rows @ image @ columns.transpose(0, 2, 1)
        return {"x": torch.from_numpy((x[None] * 2 - 1).clip(-1, 1)), "label": label}
