"""The MSA module and the Pairformer's blocks from weights of openfold3."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from zoo.protein.openfold import openfold_names
from zoo.protein.pairformer import Config, Pairformer
from zoo.reference import count, load_renamed


def from_reference(state: Mapping[str, Tensor], **overrides: Any) -> Pairformer:
    """Build the model with openfold3's trunk, ``msa_module`` and ``pairformer_stack``; the rest is initialised.

    Other weights in openfold3's state dict are ignored, so that a whole checkpoint may be given. The shapes determine
    the Config. ValueError: weights of another trunk.
    """
    state = {name: value for name, value in state.items() if name.startswith(("msa_module.", "pairformer_stack."))}
    try:
        msa, block = "msa_module.blocks.0", "pairformer_stack.blocks.0"
        c_m, outer = state[f"{msa}.outer_product_mean.linear_1.weight"].T.shape
        msa_heads = len(state[f"{msa}.msa_att_row.linear_z.weight"])
        pair_heads, c_z = state[f"{block}.pair_stack.tri_att_start.linear_z.weight"].shape
        single_heads = len(state[f"{block}.attn_pair_bias.linear_z.weight"])
        width, c_s = state[f"{block}.attn_pair_bias.mha.linear_q.weight"].shape
        values = {
            "c_m": c_m, "c_z": c_z, "c_s": c_s, "msa_depth": count(state, "msa_module.blocks.{}."),
            "depth": count(state, "pairformer_stack.blocks.{}."), "msa_heads": msa_heads,
            "msa_head_dim": len(state[f"{msa}.msa_att_row.linear_v.weight"]) // msa_heads, "pair_heads": pair_heads,
            "pair_head_dim": len(state[f"{block}.pair_stack.tri_att_start.mha.linear_q.weight"]) // pair_heads,
            "single_heads": single_heads, "single_head_dim": width // single_heads, "outer": outer,
            "triangle": len(state[f"{block}.pair_stack.tri_mul_out.linear_a_p.weight"]),
            "transition": len(state[f"{block}.single_transition.swiglu.linear_a.weight"]) // c_s,
        }  # fmt: skip
    except KeyError as missing:
        raise ValueError(f"these weights are of another model; missing: {missing}") from None
    model = Pairformer(Config(**{**values, **overrides}))
    msa_blocks = nn.ModuleList(model.msa_blocks)
    if f"msa_module.blocks.{len(msa_blocks) - 1}.msa_att_row.linear_v.weight" not in state:  # no update of alignment
        parts = dict(msa_blocks[-1].named_children())
        msa_blocks[-1] = nn.ModuleDict({name: parts[name] for name in ("outer", "pair")})
    stack = nn.ModuleDict(
        {
            "msa_module": nn.ModuleDict({"blocks": msa_blocks}),
            "pairformer_stack": nn.ModuleDict({"blocks": model.blocks}),
        }
    )
    load_renamed(stack, state, openfold_names(3))
    return model
