"""How the models' weights start.

Every function fills weights in place and needs none of what was in them, so that a model built on meta can be
initialised after ``to_empty``.
"""

import math
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from zoo.attention import CrossAttention, LowRankAttention
from zoo.layers import ScaleShiftLinear, ScaleShiftTable


def init_linear(model: nn.Module) -> None:
    """Xavier-uniform weights and zero biases in every linear layer, the start of DiT and of all that follow it."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)


def init_zero(*layers: nn.Linear) -> None:
    """Zero weights and biases, so that the layers add nothing to a residual at first."""
    for layer in layers:
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)


def init_embeddings(*modules: nn.Module | None) -> None:
    """Weights at std 0.02 in every linear layer and table of embeddings, as in DiT; None is skipped."""
    for module in modules:
        for layer in () if module is None else module.modules():
            if isinstance(layer, nn.Linear | nn.Embedding):
                nn.init.normal_(layer.weight, std=0.02)


def init_modulation(model: nn.Module) -> None:
    """Tables of adaLN-single at std 1/sqrt(c), as in PixArt-alpha; linear layers of adaLN-Zero, and all gates, at zero.

    Norms and low-rank attention initialise themselves.
    """
    for module in model.modules():
        if isinstance(module, ScaleShiftTable):
            nn.init.normal_(module.table, std=module.table.shape[-1] ** -0.5)
        elif isinstance(module, ScaleShiftLinear):
            init_zero(module.linear)
        elif isinstance(module, nn.LayerNorm | nn.RMSNorm | LowRankAttention):
            module.reset_parameters()


def init_like_dit(model: Any, embeddings: Iterable[nn.Module | None], zero: Iterable[nn.Linear] = ()) -> None:
    """Initialise every parameter in place, after ``to_empty`` too, as DiT and its followers do.

    Xavier, biases zero; ``embeddings`` at std 0.02; tables of modulation as `init_modulation`. The layers ``zero``, all
    attention to text and the final layer start at zero.
    """
    init_linear(model)
    init_embeddings(*embeddings)
    init_modulation(model)
    init_zero(*zero, *text_outputs(model), model.final.linear)


def text_outputs(model: nn.Module) -> list[nn.Linear]:
    """The last layer of every attention to text, which starts at zero in PixArt-alpha and its followers."""
    return [module.out for module in model.modules() if isinstance(module, CrossAttention)]


def truncated_normal(weight: Tensor, std: float) -> None:
    """Draw normal numbers cut off at two standard deviations; ``std`` is the deviation after the cut.

    Computed by the inverse of the distribution function: torch's loop until all numbers are within needs data.
    """
    inside = math.erf(math.sqrt(2))
    weight.uniform_(-inside, inside).erfinv_().mul_(math.sqrt(2) * std / 0.87962566103423978)
