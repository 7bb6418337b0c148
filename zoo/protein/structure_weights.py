"""The structure module from weights of OpenFold and ESMFold."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from zoo.protein.structure import StructureModule
from zoo.reference import count, load_renamed

OPENFOLD = {
    "begin.norm": "layer_norm_s", "begin.project": "linear_in", "pair_norm": "layer_norm_z", "attend.q": "ipa.linear_q",
    "attend.kv": "ipa.linear_kv", "attend.q_points": "ipa.linear_q_points", "attend.kv_points": "ipa.linear_kv_points",
    "attend.bias": "ipa.linear_b", "attend.out": "ipa.linear_out", "move.norm": "layer_norm_ipa",
    "move.up": "transition.layers.0.linear_1", "move.middle": "transition.layers.0.linear_2",
    "move.down": "transition.layers.0.linear_3", "move.after": "transition.layer_norm", "move.step": "bb_update.linear",
}  # fmt: skip


def openfold_structure_names(name: str) -> list[str]:
    """The name in OpenFold and ESMFold of a parameter of the module; not for parameters of its confidence."""
    if name == "attend.head_weights":
        return ["ipa.head_weights"]
    layer, _, kind = name.rpartition(".")
    return [f"{OPENFOLD[layer]}.{kind}"]


def from_reference(state: Mapping[str, Tensor], iterations: int = 8, **options: Any) -> StructureModule:
    """Build the module with OpenFold's or ESMFold's ``structure_module`` weights; its confidence is initialised.

    The shapes determine the sizes. Weights for side chains (``angle_resnet``) are ignored. ValueError: weights of
    another module.
    """
    state = {name: value for name, value in state.items() if not name.startswith("angle_resnet.")}
    try:
        heads, c_z = state["ipa.linear_b.weight"].shape
        width, c_s = state["ipa.linear_q.weight"].shape
        points = len(state["ipa.linear_q_points.weight"]) // (3 * heads)
        value_points = len(state["ipa.linear_kv_points.weight"]) // (3 * heads) - points
    except KeyError as missing:
        raise ValueError(f"these weights are of another model; missing: {missing}") from None
    if (layers := count(state, "transition.layers.{}.")) != 1:
        raise ValueError(f"these weights have {layers} transitions an iteration, and AlphaFold 2 has one")
    sizes = {"head_dim": width // heads, "points": points, "value_points": value_points}
    model = StructureModule(c_s, c_z, iterations, heads, **sizes, **options)
    parts = nn.ModuleDict({name: module for name, module in model.named_children() if name != "confidence"})
    load_renamed(parts, state, openfold_structure_names)
    return model
