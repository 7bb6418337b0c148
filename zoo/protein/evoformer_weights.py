"""The Evoformer's blocks from weights of openfold."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from zoo.protein.evoformer import Config, Evoformer
from zoo.protein.openfold import openfold_names
from zoo.reference import count, load


def from_reference(state: Mapping[str, Tensor], **overrides: Any) -> Evoformer:
    """Build the Evoformer with the weights of an openfold ``EvoformerStack`` (AF2's biases); the rest is initialised.

    The shapes determine the Config, except ``opm_first``. ValueError: weights of another stack.
    """
    try:
        msa, pair = "blocks.0.msa_att_row", "blocks.0.pair_stack"
        c_s, c_m = state["linear.weight"].shape
        msa_heads, c_z = state[f"{msa}.linear_z.weight"].shape
        pair_heads = len(state[f"{pair}.tri_att_start.linear_z.weight"])
        values = {
            "c_m": c_m, "c_z": c_z, "c_s": c_s, "depth": count(state, "blocks.{}."), "msa_heads": msa_heads,
            "msa_head_dim": len(state[f"{msa}.mha.linear_q.weight"]) // msa_heads, "pair_heads": pair_heads,
            "pair_head_dim": len(state[f"{pair}.tri_att_start.mha.linear_q.weight"]) // pair_heads,
            "triangle": len(state[f"{pair}.tri_mul_out.linear_a_p.weight"]),
            "outer": len(state["blocks.0.outer_product_mean.linear_1.weight"]),
            "transition": len(state["blocks.0.msa_transition.transition_mlp.layers.0.0.weight"]) // c_m,
        }  # fmt: skip
    except KeyError as missing:
        raise ValueError(f"these weights are of another model; missing: {missing}") from None
    model = Evoformer(Config(**{**values, "extra_depth": 0, **overrides}))
    stack = nn.ModuleDict({"blocks": model.blocks, "linear": model.single})
    load(stack, state, openfold_names(2))
    return model
