"""The Evoformer from weights of OpenFold: of its stack of blocks, or of its whole model (`monomer_weights.py`)."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from zoo.protein import monomer_weights
from zoo.protein.evoformer import Config, Evoformer
from zoo.protein.openfold import openfold_names, stack_sizes
from zoo.reference import load_renamed


def from_reference(state: Mapping[str, Tensor], **overrides: Any) -> Evoformer:
    """Build the Evoformer with the weights of an openfold ``EvoformerStack`` (AF2's biases); the rest is initialised.

    The state dict of OpenFold's ``AlphaFold`` gives a model that lacks nothing. The shapes determine the Config, except
    ``opm_first``. ValueError: weights of another stack.
    """
    if monomer_weights.is_whole(state):
        return monomer_weights.from_reference(state, **overrides)
    try:
        values = stack_sizes(state)
    except KeyError as missing:
        raise ValueError(f"these weights are of another model; missing: {missing}") from None
    model = Evoformer(Config(**{**values, "extra_depth": 0, **overrides}))
    stack = nn.ModuleDict({"blocks": model.blocks, "linear": model.single})
    load_renamed(stack, state, openfold_names(2))
    return model
