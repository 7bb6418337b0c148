"""The best linear denoiser: the baseline that a rectified-flow model trained on the same clips has to beat.

At noise level u the model sees y = (1 - u) x + u e and predicts v = x - e. Given y, e = (y - (1 - u) x) / u, hence
v = (x - y) / u: the best affine v comes from the best affine estimate of x. With mean m and covariance S of the clips
(flattened over c, t, h, w), this estimate is the Wiener filter
    x' = m + K (y - (1 - u) m),    K = (1 - u) S ((1 - u)^2 S + u^2 I)^-1.
On data with eigenvalues l of S its loss is the mean of l / ((1 - u)^2 l + u^2). It sees whole clips at once, so it uses
everything about space and motion that is linear.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["LinearDenoiser", "fit_linear_denoiser", "linear_denoiser_loss"]


@dataclass
class LinearDenoiser:
    """Mean and eigendecomposed covariance for each fitted class (under None: for all classes together)."""

    means: dict[int | None, Tensor]  # (D,) each
    eigenvalues: dict[int | None, Tensor]  # (D,) each
    eigenvectors: dict[int | None, Tensor]  # (D, D) each, in columns

    def loss(self, x: Tensor, levels: Tensor, labels: Tensor | None = None) -> Tensor:
        """Mean squared velocity error per element on clips `x` [n, ...] at each of `levels` [k], returned as [k].

        The expectation over the noise is exact. For d, the component of x - m along an eigenvector, and k, the
        eigenvalue of K, it is ((1 - (1 - u) k)^2 d^2 + k^2 u^2) / u^2, since x' - x = ((1 - u) K - 1)(x - m) + u K e.
        """
        total = torch.zeros(len(levels), dtype=torch.float64)
        for label, mean in self.means.items():
            chosen = x if label is None or labels is None else x[labels == label]
            squared = ((chosen.flatten(1).double() - mean) @ self.eigenvectors[label]).square().sum(0)
            for i, u in enumerate(levels.double()):
                signal, noise = (1 - u) ** 2 * self.eigenvalues[label], u**2
                missed = squared * (noise / (signal + noise)) ** 2
                k = (1 - u) * self.eigenvalues[label] / (signal + noise)
                total[i] += (missed + len(chosen) * k**2 * noise).sum() / noise
        return total / x[0].numel() / len(x)


def fit_linear_denoiser(x: Tensor, labels: Tensor | None = None, *, covariance: str = "shared") -> LinearDenoiser:
    """Fit to training clips `x` [n, ...] and, if given, their classes `labels` [n].

    With labels every class has its own mean. With `covariance="class"` it has its own covariance too, and then needs
    many times more clips than a clip has elements; "shared" pools the covariance around the class means. There is no
    ridge term: with u > 0 the filter needs none.
    """
    if covariance not in ("shared", "class"):
        raise ValueError(f"covariance must be 'shared' or 'class', got {covariance!r}")
    flat = x.flatten(1)
    classes: list[int | None] = [None] if labels is None else list(labels.unique().tolist())
    members = {k: flat if k is None else flat[labels == k] for k in classes}
    means = {k: rows.double().mean(0) for k, rows in members.items()}
    scatter: dict[int | None, Tensor] = {}
    for k, rows in members.items():
        pooled = k if covariance == "class" else None
        for chunk in rows.split(4096):  # float64 copies of a few rows at a time
            centred = chunk.double() - means[k]
            products = centred.T @ centred
            scatter[pooled] = scatter[pooled] + products if pooled in scatter else products
    counts = {k: len(members[k]) if covariance == "class" else len(flat) for k in classes}
    eigen = {k: torch.linalg.eigh(matrix / (counts[k] if k in counts else len(flat))) for k, matrix in scatter.items()}
    of = {k: eigen[k if covariance == "class" else None] for k in classes}
    return LinearDenoiser(means, {k: of[k][0].clamp(min=0) for k in classes}, {k: of[k][1] for k in classes})


def linear_denoiser_loss(
    train: Tensor,
    validation: Tensor,
    levels: Tensor,
    train_labels: Tensor | None = None,
    validation_labels: Tensor | None = None,
) -> Tensor:
    """Loss [k] on `validation` at noise `levels` [k] of the linear denoiser fitted to `train`, with class means."""
    return fit_linear_denoiser(train, train_labels).loss(validation, levels, validation_labels)
