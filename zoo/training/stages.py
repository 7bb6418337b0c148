"""Which modules of a model are stages, or layers that repeat; and which of them backward computes again."""

import re
from typing import Any

from torch import nn


def repeated_stages(model: Any) -> list[nn.Module]:
    """The stages whose pattern has a `*`, which stands for one component of a path."""
    return matching(model, [pattern for pattern in model.stages if "*" in pattern])


def repeated_blocks(model: Any) -> list[nn.Module]:
    """What the first `*` of these patterns stands for: one layer with all its stages, or a stage that is one."""
    return matching(model, [pattern.partition("*")[0] + "*" for pattern in model.stages if "*" in pattern])


def matching(model: nn.Module, patterns: list[str]) -> list[nn.Module]:
    found = [re.escape(pattern).replace(r"\*", r"[^.]+") for pattern in patterns]
    return [module for name, module in model.named_modules() if any(re.fullmatch(p, name) for p in found)]


def recomputed_modules(model: Any) -> dict[str, list[nn.Module]]:
    """What keeps its inputs alone, for each value of train.checkpoint_activations, which keep less and less."""
    stages, blocks = repeated_stages(model), repeated_blocks(model)
    return {"none": [], "stages": stages, "blocks": blocks, "both": list(dict.fromkeys([*blocks, *stages]))}
