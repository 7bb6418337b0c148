"""Metrics of sampled clips against real ones: statistics of frames and their changes, a class probe, distances.

A Fréchet video distance compares features of a published network. No network is included: `VideoFeatures` reads one
from a local folder; the other metrics need no weights. All are rough for few clips: a Fréchet distance of d features
needs several times d clips, and its value depends on their number.

Letters: n clips, c channels, t frames, h w height and width, d features.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["STATISTICS", "FrameProbe", "VideoFeatures", "frechet_distance", "statistics"]

STATISTICS = ("brightness", "contrast", "sharpness", "change", "jerk", "persistence")
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, as video networks expect


def statistics(clips: Tensor) -> Tensor:
    """The `STATISTICS` of each clip (n c t h w) uint8, in units of the full range: (n 6), float64.

    Within frames: mean, standard deviation, mean difference of neighbouring pixels. Over time: mean first and second
    difference between frames, and correlation of consecutive frames (1 for a still clip).
    """
    x = clips.double() / 255
    n, still = len(x), x.shape[2] < 2
    edges = [x.diff(dim=dim).abs().flatten(1).mean(1) if x.shape[dim] > 1 else torch.zeros(n) for dim in (3, 4)]
    change, jerk, persistence = torch.zeros(n), torch.zeros(n), torch.ones(n)
    if not still:
        change = x.diff(dim=2).abs().flatten(1).mean(1)
        centred = (x - x.mean((1, 3, 4), keepdim=True)).transpose(1, 2).flatten(2)  # (n t chw)
        now, following = centred[:, :-1], centred[:, 1:]
        scale = now.norm(dim=2) * following.norm(dim=2)
        alike = (now * following).sum(2) / scale.clamp(min=1e-12)
        persistence = torch.where(scale > 1e-12, alike, 1.0).mean(1)
    if x.shape[2] > 2:
        jerk = x.diff(n=2, dim=2).abs().flatten(1).mean(1)
    deviation = x.transpose(1, 2).flatten(2).std(2, correction=0).mean(1)
    return torch.stack(
        [x.flatten(1).mean(1), deviation, (edges[0] + edges[1]) / 2, change, jerk, persistence], 1
    ).double()


def frechet_distance(real: Tensor, generated: Tensor) -> float:
    """The Fréchet distance of normal fits to two sets of features, (n d) and (m d): Heusel et al. 2017, equation 6.

    |μ - ν|² + tr(Σ + Π - 2 (Σ Π)^½). ValueError: a set has fewer than two clips, or the numbers of features differ.
    """
    flat = real.ndim == generated.ndim == 2
    if not flat or real.shape[1] != generated.shape[1] or min(len(real), len(generated)) < 2:
        shapes = f"{tuple(real.shape)} and {tuple(generated.shape)}"
        raise ValueError(f"frechet_distance: expected features (n d) and (m d) of two clips at least, got {shapes}")
    real, generated = real.double(), generated.double()
    first, second = (torch.atleast_2d(x.T.cov()) for x in (real, generated))
    values, vectors = torch.linalg.eigh(first)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    cross = torch.linalg.eigvalsh(root @ second @ root).clamp(min=0).sqrt().sum()
    means = (real.mean(0) - generated.mean(0)).square().sum()
    return (means + first.trace() + second.trace() - 2 * cross).clamp(min=0).item()


class VideoFeatures:
    """Features of clips by a published VideoMAE: a folder with `config.json` and safetensors, as transformers saves it.

    (n c t h w) uint8 -> (n d): the normed mean over tokens of the last layer, the input of VideoMAE's classifier
    (the features of content-debiased FVD, Ge et al. 2024). Frames are chosen evenly, as many as the network was trained
    with, and scaled to its size. Only safetensors are read: no pickle and no code from the folder is run.
    """

    def __init__(self, path: str | Path, device: torch.device | str = "cpu"):
        try:
            from transformers import VideoMAEForVideoClassification
        except ImportError as error:
            raise ValueError("features of clips need transformers: pip install -e '.[video]'") from error
        if not (Path(path) / "config.json").is_file():
            raise ValueError(f"{path}: not the folder of a VideoMAE, as it has no config.json")
        try:
            model: Any = VideoMAEForVideoClassification
            model = model.from_pretrained(path, local_files_only=True, use_safetensors=True)
        except Exception as error:  # many kinds
            raise ValueError(f"{path}: cannot be read as a VideoMAE: {error}") from error
        self.model, self.device = model.to(device).eval(), device

    @torch.no_grad()
    def __call__(self, clips: Tensor, batch: int = 8) -> Tensor:
        return torch.cat([self._features(part) for part in clips.split(batch)]).cpu()

    def _features(self, clips: Tensor) -> Tensor:
        tokens = self.model.videomae(pixel_values=self.prepared(clips))[0]
        norm = self.model.fc_norm
        return norm(tokens.mean(1)) if norm is not None else tokens[:, 0]

    def prepared(self, clips: Tensor) -> Tensor:
        """The network's input (n t 3 h w), normalised, with its number of frames and its size."""
        config = self.model.config
        frames = torch.linspace(0, clips.shape[2] - 1, config.num_frames).round().long()
        x = clips[:, :, frames].to(self.device).float().expand(-1, 3, -1, -1, -1) / 255
        flat = F.interpolate(
            x.transpose(1, 2).flatten(0, 1), (config.image_size,) * 2, mode="bilinear", antialias=True,
            align_corners=False,
        )  # fmt: skip
        mean, std = (torch.tensor(values, device=self.device)[:, None, None] for values in (_MEAN, _STD))
        return ((flat - mean) / std).unflatten(0, (len(clips), config.num_frames))


class FrameProbe:
    """A support vector machine on pixels that classifies frames, fitted to frames of labelled clips.

    `clips` are dicts of `x` (c 1 h w) in [-1, 1] and `label`.
    """

    def __init__(self, clips: Iterable[dict[str, Any]]):
        from sklearn.svm import SVC

        seen = list(clips)
        self.machine = SVC(C=10.0, gamma="scale")
        self.machine.fit(_rows(torch.stack([clip["x"] for clip in seen])), [int(clip["label"]) for clip in seen])

    def __call__(self, clips: Tensor) -> Tensor:
        """The predicted class of each frame of `clips` (n c t h w) in [-1, 1]: (n t) int64."""
        return torch.from_numpy(self.machine.predict(_rows(clips))).view(len(clips), clips.shape[2])

    def shares(self, clips: Tensor, labels: Sequence[int]) -> dict[str, float]:
        """The share of the frames, and of the clips by majority vote, that show the requested class."""
        seen, classes = self(clips), torch.tensor(labels)
        return {
            "frames recognised": (seen == classes[:, None]).double().mean().item(),
            "clips recognised": (seen.mode(1).values == classes).double().mean().item(),
        }


def _rows(clips: Tensor) -> Any:
    return clips.transpose(1, 2).clamp(-1, 1).flatten(2).flatten(0, 1).numpy()
