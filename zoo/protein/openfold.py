"""The names that openfold3 gives to the layers of ``zoo.protein.layers``, for weights published under them."""

import re
from collections.abc import Mapping

from torch import Tensor

from zoo.reference import Names, count

ATTENTION = {
    "attention.qkv": "mha.linear_q mha.linear_k mha.linear_v",
    "attention.gate": "mha.linear_g",
    "attention.out": "mha.linear_o",
}
PAIR_BIAS = {"norm": "layer_norm_z", "project": "linear_z"}
TRIANGLE_MULTIPLICATION = {
    "project.norm": "layer_norm_in",
    "project.project": "linear_a_p linear_b_p",
    "project.project_gate": "linear_a_g linear_b_g",
    "project.gate": "linear_g",
    "update.norm": "layer_norm_out",
    "update.out": "linear_z",
}
TRIANGLE_ATTENTION = {
    "project.norm": "layer_norm",
    "project.bias": "linear_z",
    **{f"attend.{ours}": theirs for ours, theirs in ATTENTION.items()},
}
TRANSITION = {
    2: {"norm": "layer_norm", "up": "transition_mlp.layers.0.0", "down": "transition_mlp.linear_out"},
    3: {"norm": "layer_norm", "up": "swiglu.linear_a swiglu.linear_b", "down": "linear_out"},
}


def openfold_names(version: int) -> Names:
    """A function from the name of a parameter in one of our blocks to the openfold3 parameters that it stacks."""
    transition = TRANSITION[version]
    parts = {
        "row_bias": ("msa_att_row", PAIR_BIAS),
        "row": ("msa_att_row", {"norm": "layer_norm_m", **ATTENTION}),
        "column": ("msa_att_col._msa_att", {"norm": "layer_norm_m", **ATTENTION}),
        "average": (
            "msa_att_row",
            {"norm": "layer_norm_m", "value": "linear_v", "gate": "linear_g", "out": "linear_o"},
        ),
        "transition": ("msa_transition", transition),
        "outer": (
            "outer_product_mean",
            {"project.norm": "layer_norm", "project.project": "linear_1 linear_2", "update.out": "linear_out"},
        ),
        "pair.outgoing": ("pair_stack.tri_mul_out", TRIANGLE_MULTIPLICATION),
        "pair.incoming": ("pair_stack.tri_mul_in", TRIANGLE_MULTIPLICATION),
        "pair.start": ("pair_stack.tri_att_start", TRIANGLE_ATTENTION),
        "pair.end": ("pair_stack.tri_att_end", TRIANGLE_ATTENTION),
        "pair.transition": ("pair_stack.pair_transition", transition),
        "single_bias": ("attn_pair_bias", PAIR_BIAS),
        "single": (
            "attn_pair_bias",
            {
                "norm": "layer_norm_a", "q": "mha.linear_q", "kv": "mha.linear_k mha.linear_v",
                "gate": "mha.linear_g", "out": "mha.linear_o",
            },
        ),
        "single_transition": ("single_transition", transition),
    }  # fmt: skip
    layers = {
        f"{part}.{ours}": [f"{module}.{name}" for name in theirs.split()]
        for part, (module, table) in parts.items()
        for ours, theirs in table.items()
    }

    def names(name: str) -> list[str]:
        match = re.fullmatch(r"(.*blocks\.\d+\.)(.+)(\.weight|\.bias)", name)
        if not match:
            return [name]
        block, layer, suffix = match.groups()
        return [block + theirs + suffix for theirs in layers[layer]]

    return names


def stack_sizes(state: Mapping[str, Tensor], prefix: str = "") -> dict[str, int]:
    """The sizes of an ``EvoformerStack`` by the shapes of its weights, whose names begin with ``prefix``.

    KeyError: the state dict has no such stack.
    """
    block = f"{prefix}blocks.0"
    msa, pair = f"{block}.msa_att_row", f"{block}.pair_stack"
    c_s, c_m = state[f"{prefix}linear.weight"].shape
    msa_heads, c_z = state[f"{msa}.linear_z.weight"].shape
    pair_heads = len(state[f"{pair}.tri_att_start.linear_z.weight"])
    return {
        "c_m": c_m, "c_z": c_z, "c_s": c_s, "depth": count(state, f"{prefix}blocks.{{}}."), "msa_heads": msa_heads,
        "msa_head_dim": len(state[f"{msa}.mha.linear_q.weight"]) // msa_heads, "pair_heads": pair_heads,
        "pair_head_dim": len(state[f"{pair}.tri_att_start.mha.linear_q.weight"]) // pair_heads,
        "triangle": len(state[f"{pair}.tri_mul_out.linear_a_p.weight"]),
        "outer": len(state[f"{block}.outer_product_mean.linear_1.weight"]),
        "transition": len(state[f"{block}.msa_transition.transition_mlp.layers.0.0.weight"]) // c_m,
    }  # fmt: skip
