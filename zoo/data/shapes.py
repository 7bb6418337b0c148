"""Moving shapes in colour: clips drawn by formula, larger than the digits, and sharp at any size.

A disc, a square, a triangle or a star flies in a straight line at a constant speed, bounces off the walls and turns as
it goes; its class is its shape and its colour, `SHAPES` x `COLOURS`. Edges are drawn by distance, so that a pixel which
an edge crosses is in between.
"""

import math

import torch
from torch import Tensor

from zoo.data.digits import reflect
from zoo.data.sampling import Clip, frame_range, generator

__all__ = ["COLOURS", "NAMES", "SHAPES", "MovingShapes"]

SHAPES = {"disc": 0, "square": 4, "triangle": 3, "star": 5}  # corners
COLOURS = {"red": (0.93, 0.26, 0.21), "green": (0.24, 0.76, 0.37), "blue": (0.2, 0.48, 0.96), "gold": (0.98, 0.76, 0.2)}
NAMES = tuple(f"{colour} {shape}" for shape in SHAPES for colour in COLOURS)  # of the classes
GROUND = (0.07, 0.09, 0.15)


class MovingShapes:
    """Clips [3, frames, height, width] of one shape in motion, values in [-1, 1], with its class 0-15.

    `radius` is the range of its sizes and `speed` of its speeds, in pixels and pixels a frame. With a `tilt` of 0 it
    stands upright, with 1 it is turned any way; in between that share of its turn is left, and of how fast it spins.
    All of a clip is a function of (seed, split, epoch, index).
    """

    num_classes: int | None = len(SHAPES) * len(COLOURS)

    def __init__(
        self,
        split: str = "train",
        *,
        count: int = 4096,
        frames: int = 8,
        size: tuple[int, int] = (64, 64),
        radius: tuple[float, float] = (10.0, 15.0),
        speed: tuple[float, float] = (1.0, 4.0),
        tilt: float = 1.0,
        seed: int = 0,
    ):
        if frames < 1 or not 0 < radius[0] <= radius[1] <= min(size) / 2:
            raise ValueError(f"MovingShapes: need frames >= 1 and shapes that fit, got {frames=} {radius=} {size=}")
        if not 0 <= speed[0] <= speed[1]:
            raise ValueError(f"MovingShapes: speed is a range (slowest, fastest) in pixels a frame, got {speed}")
        self.split, self.count, self.frames, self.shape, self.seed = split, count, frames, (3, *size), seed
        self.radius, self.speed, self.tilt = radius, speed, tilt

    def __len__(self) -> int:
        return self.count

    def clip(self, index: int, epoch: int, frames: range | slice | None = None) -> Clip:
        """Clip `index` as epoch `epoch` shows it; only `frames` are drawn."""
        _, height, width = self.shape
        u = torch.rand(7, generator=generator("shapes", self.split, self.seed, epoch, index), dtype=torch.float64)
        start_y, start_x, angle, fast, large, turned, spin = u.tolist()
        radius = self.radius[0] + (self.radius[1] - self.radius[0]) * large
        speed = self.speed[0] + (self.speed[1] - self.speed[0]) * fast
        step_y, step_x = speed * math.sin(2 * math.pi * angle), speed * math.cos(2 * math.pi * angle)
        room_y, room_x = height - 2 * radius, width - 2 * radius
        label = index % (len(SHAPES) * len(COLOURS))
        corners, colour = [*SHAPES.values()][label // len(COLOURS)], [*COLOURS.values()][label % len(COLOURS)]
        pictures = [torch.zeros(3, 0, height, width)]  # a rank may ask for none
        for f in frame_range(frames, self.frames):
            y = radius + reflect(start_y * room_y + step_y * f, room_y)
            x = radius + reflect(start_x * room_x + step_x * f, room_x)
            turn = upright(corners) + self.tilt * (2 * math.pi * (turned - 0.5) + 0.3 * (spin - 0.5) * f)
            pictures.append(painted(corners, colour, radius, y, x, turn, self.shape)[:, None])
        return {"x": torch.cat(pictures, 1) * 2 - 1, "label": label}


def upright(corners: int) -> float:
    """The angle, from right over down, to a corner of a shape that stands: on an edge, or for the star on two feet."""
    return -math.pi / 2 + (math.pi / corners if corners and corners % 2 == 0 else 0)


def painted(
    corners: int, colour: tuple[float, ...], radius: float, y: float, x: float, turn: float, shape: tuple[int, ...]
) -> Tensor:
    """One frame [3, height, width], float32, values in [0, 1]."""
    _, height, width = shape
    down = torch.arange(height, dtype=torch.float64)[:, None] + 0.5 - y
    right = torch.arange(width, dtype=torch.float64) + 0.5 - x
    far, angle = (down.square() + right.square()).sqrt(), torch.atan2(down, right) - turn
    if corners == 0:
        inside = 0.8 * radius - far
    else:
        half = math.pi / corners
        angle = (angle % (2 * half) - half).abs()  # from the middle of an edge; at a corner half
        if corners == 5:  # an edge of a star leads from a corner to a notch
            corner, notch = (radius * math.cos(half), radius * math.sin(half)), 0.45 * radius
            edge = (notch - corner[0], -corner[1])
            place = far * angle.cos() - corner[0], far * angle.sin() - corner[1]
            inside = (edge[1] * place[0] - edge[0] * place[1]) / math.hypot(*edge)
        else:
            inside = radius * math.cos(half) - far * angle.cos()
    cover = (inside + 0.5).clamp(0, 1).float()
    ground, paint = (torch.tensor(c)[:, None, None] for c in (GROUND, colour))
    return ground + (paint - ground) * cover
