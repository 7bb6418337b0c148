"""The objective and the sampler of autoregressive models of images: ``model(image, ...)`` gives logits.

Letters: b images, c channels, h w rows and columns of pixels, k levels of a pixel. Images (b c h w) are integers from 0
to k - 1, logits are (b c h w k).
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Likelihood(nn.Module):
    """The negative base-2 log-probability of each value of an image (b c h w) under logits (b c h w k)."""

    def forward(self, logits: Tensor, image: Tensor) -> Tensor:
        return F.cross_entropy(logits.movedim(-1, 1).float(), image, reduction="none") / math.log(2)


class BitsPerDim(nn.Module):
    """A model with its loss: the bits to encode each value of an image."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        self.likelihood = Likelihood()

    @property
    def stages(self) -> dict[str, str]:
        stages: dict[str, str] = getattr(self.model, "stages", {})
        around = {"": "image=b [c] h w -> b [c] h w, b [c] h w", "likelihood": "b [c] h w [k], b [c] h w -> b [c] h w"}
        return around | {f"model.{key}": stage for key, stage in stages.items() if key}

    def forward(self, image: Tensor, **conditioning: Any) -> tuple[Tensor, Tensor]:
        """Bits of every value of ``image``, and weights of 1, both (b c h w) float32."""
        loss = self.likelihood(self.model(image, **conditioning), image)
        return loss, torch.ones_like(loss)


@torch.no_grad()
def sample(
    model: Callable[..., Tensor],
    noise: Tensor,
    on_step: Callable[[int, int], None] | None = None,
    drawing: Any = None,
    **conditioning: Any,
) -> Tensor:
    """Sample images (b c h w) from the model, one value at a time, in the order channel, row, column.

    ``noise`` (b c h w k) is standard Gumbel noise: the argmax of logits plus noise is a sample (Gumbel-max). Without
    ``drawing`` each value takes a forward of the whole image. ``drawing`` is the model's cache: each value then takes
    only ``model(image, at=(channel, row), drawing=drawing)``, the logits (b w k) of its row. ``on_step(i, values)`` is
    called after value i.
    """
    b, c, h, w, _ = noise.shape
    image = torch.zeros(b, c, h, w, dtype=torch.long, device=noise.device)
    for i in range(c * h * w):
        at = (slice(None), i // (h * w), i // w % h, i % w)
        if drawing is None:
            logits = model(image, **conditioning)[at]
        else:
            logits = model(image, **conditioning, at=at[1:3], drawing=drawing)[:, at[3]]
        values = (logits + noise[at]).argmax(-1)
        image = image.clone()  # the model may keep a reference to its input
        image[at] = values
        if on_step is not None:
            on_step(i + 1, c * h * w)
    return image
