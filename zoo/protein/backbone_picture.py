"""A predicted backbone beside the true one, as PNG: the Cα of both in one orientation, coloured along the chain."""

import colorsys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zoo.files import whole_file
from zoo.protein.metrics import superposed

__all__ = ["save_backbones"]

SIDE, MARGIN, HEAD = 640, 40, 60  # pixels
PAPER, INK = (255, 255, 255), (40, 44, 52)


def save_backbones(path: Path, title: str, predicted: Tensor, true: Tensor, seen: Tensor, bonded: Tensor) -> None:
    """Draw Cα [r, 3] as predicted, superposed on the seen ones [r] of the true structure, and these beside them.

    Lines join residues that are bonded to the next one [r]. If fewer than three are seen, the prediction is alone.
    """
    from PIL import Image, ImageDraw, ImageFont

    known = int(seen.sum()) >= 3
    traces = [("predicted", superposed(predicted, true, seen) if known else predicted, torch.ones_like(seen))]
    traces += [("true", true, seen)] if known else []
    points = torch.cat([trace[shown] for _, trace, shown in traces])
    middle, axes = principal_axes(points)
    flat = [(trace - middle) @ axes for _, trace, _ in traces]
    reach = max(float(((points - middle) @ axes)[:, :2].abs().max()), 1e-3)
    image = Image.new("RGB", (SIDE * len(traces), SIDE + HEAD), PAPER)
    pen, font = ImageDraw.Draw(image), ImageFont.load_default(size=23)
    pen.text((MARGIN, HEAD - 30), title, fill=INK, font=font, anchor="ls")
    for i, ((name, _, shown), xyz) in enumerate(zip(traces, flat)):
        places = (xyz[:, :2] / reach * (SIDE / 2 - MARGIN) + SIDE / 2 + torch.tensor([SIDE * i, HEAD])).tolist()
        depth = xyz[:, 2]
        joined = [j for j in range(len(shown) - 1) if shown[j] and shown[j + 1] and bonded[j]]
        for j in sorted(joined, key=lambda j: float(depth[j])):  # the nearest last
            pen.line((*places[j], *places[j + 1]), fill=rainbow(j / len(shown)), width=5)
        pen.text((SIDE * i + SIDE / 2, HEAD + 10), name, fill=INK, font=font, anchor="mt")
    with whole_file(path) as file:
        image.save(file, "PNG")


def principal_axes(points: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of points [n, 3], and the axes [3, 3] along which they spread, the widest first; no mirror image."""
    middle = points.mean(0)
    axes = torch.linalg.svd(points - middle, full_matrices=False).Vh.T
    return middle, axes * torch.tensor([1.0, 1.0, float(torch.linalg.det(axes).sign())])


def rainbow(place: float) -> Any:
    """The colour at a place of the chain, from 0 (blue) to 1 (red)."""
    return tuple(round(255 * part) for part in colorsys.hsv_to_rgb((1 - place) * 0.66, 0.85, 0.85))
