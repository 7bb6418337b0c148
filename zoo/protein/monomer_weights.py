"""AlphaFold 2 for single chains from weights of OpenFold, under the names of its published checkpoints.

Not read: torsion angles of side chains, aligned errors, which atoms experiments resolve, and templates; a model without
templates has the numbers of one that is given none. AlphaFold-Multimer and models of a single sequence are refused.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.files import regular
from zoo.protein.distogram import BINS
from zoo.protein.embedding import CLASSES
from zoo.protein.evoformer import Config, Evoformer
from zoo.protein.openfold import openfold_names, stack_sizes
from zoo.protein.structure_weights import openfold_structure_names
from zoo.reference import count, load_renamed, read_safetensors

MARK = "input_embedder."  # the names that only a whole model has begin so
UNUSED = re.compile(
    r"template_\w+\.|structure_module\.angle_resnet\.|aux_heads\.(tm|experimentally_resolved)\.|"
    r"(input_embedder|recycling_embedder|extra_msa_embedder)\.linear"
)
# names of OpenFold and those of openfold3, in which `openfold_names` is written; versions 1 had blocks with a core
SPELLINGS = (
    (r"\bcore\.(?=tri_|pair_transition)", "pair_stack."),
    (r"\bcore\.", ""),
    (r"(msa_transition|pair_transition)\.linear_1\.", r"\1.transition_mlp.layers.0.0."),
    (r"(msa_transition|pair_transition)\.linear_2\.", r"\1.transition_mlp.linear_out."),
    (r"(tri_att_\w+)\.linear\.", r"\1.linear_z."),
    (r"(ipa\.linear_\w+_points)\.linear\.", r"\1."),
)
GLOBAL = {
    "norm": ["layer_norm_m"], "q": ["global_attention.linear_q"], "gate": ["global_attention.linear_g"],
    "kv": ["global_attention.linear_k", "global_attention.linear_v"], "out": ["global_attention.linear_o"],
}  # fmt: skip
LAYERS = {
    "single": "evoformer.linear", "recycle_target.norm": "recycling_embedder.layer_norm_m",
    "recycle_pair.norm": "recycling_embedder.layer_norm_z", "heads.token": "aux_heads.masked_msa.linear",
    "heads.distance": "aux_heads.distogram.linear", "structure.confidence.norm": "aux_heads.plddt.layer_norm",
    "structure.confidence.up": "aux_heads.plddt.linear_1", "structure.confidence.middle": "aux_heads.plddt.linear_2",
    "structure.confidence.out": "aux_heads.plddt.linear_3",
}  # fmt: skip


def is_whole(names: Iterable[str]) -> bool:
    """True for the names of a whole model's weights, False for those of a stack of blocks alone."""
    return any(name.startswith(MARK) for name in names)


def is_folder(folder: Path) -> bool:
    """True for a folder with a whole model's weights as safetensors. ValueError: a file is no such file, or damaged."""
    for path in folder.glob("*.safetensors"):
        from safetensors import SafetensorError, safe_open  # an extra, which only loading weights needs

        try:
            with safe_open(regular(path), "pt") as opened:
                if is_whole(opened.keys()):
                    return True
        except SafetensorError as error:
            raise ValueError(f"{path}: not safetensors, or damaged: {error}") from None
    return False


def read(folder: Path) -> Evoformer:
    """The model of a folder with OpenFold's weights as safetensors; ValueError if they are of another, or damaged."""
    return from_reference(read_safetensors(folder))


def from_reference(state: Mapping[str, Tensor], **overrides: Any) -> Evoformer:
    """Build the model from a state dict of OpenFold's ``AlphaFold``; the shapes determine the Config.

    Eight iterations of the structure module share their weights: ``structure`` overrides the number.
    """
    state = spelled(state)
    try:
        options: dict[str, Any] = {**sizes(state), "structure": 8, "monomer": True, **overrides}
        config = Config(**options)
        state |= tables(state)
    except KeyError as missing:
        raise ValueError(f"these weights are of another model; missing: {missing}") from None
    with torch.device("meta"):
        model = Evoformer(config)
    load_renamed(model, state, monomer_names, ignore=filter(UNUSED.match, state))
    return model


def spelled(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights under the names of one spelling."""
    renamed = {}
    for name, value in state.items():
        for old, new in SPELLINGS:
            name = re.sub(old, new, name)
        renamed[name] = value
    return renamed


def sizes(state: Mapping[str, Tensor]) -> dict[str, int]:
    """The values of the Config that shapes determine; a ValueError for those of another family."""
    if "input_embedder.linear_msa_m.weight" not in state:
        raise ValueError(
            "these weights are of OpenFold's model of single sequences: expected one that reads alignments"
        )
    width = state["input_embedder.linear_tf_m.weight"].shape[1]
    if width != 22:
        raise ValueError(
            f"these weights embed {width} numbers of a residue, AlphaFold 2's for single chains 22: are they of "
            "AlphaFold-Multimer?"
        )
    if (bins := len(state["aux_heads.distogram.linear.weight"])) != BINS:
        raise ValueError(f"these weights predict {bins} bins of distance: expected {BINS}")
    extra, row = "extra_msa_stack.blocks.0", "extra_msa_stack.blocks.0.msa_att_row"
    heads = len(state[f"{row}.linear_z.weight"])
    return stack_sizes(state, "evoformer.") | {
        "extra_depth": count(state, "extra_msa_stack.blocks.{}."),
        "c_e": len(state[f"{extra}.msa_att_row.layer_norm_m.weight"]), "extra_heads": heads,
        "extra_head_dim": len(state[f"{row}.mha.linear_q.weight"]) // heads, "bins": bins,
        "structure_heads": len(state["structure_module.ipa.head_weights"]),
        "reach": state["input_embedder.linear_relpos.weight"].shape[1] // 2,
    }  # fmt: skip


def tables(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our parameters of the embedders: linear layers on one-hot vectors are tables, and their biases parts of the rows.

    Of a target's 22 numbers the first is for breaks between chains. Features of the alignment: tokens, two numbers of
    deletions, those of clusters.
    """
    theirs = {name: state[f"{name}.weight"].T for name in EMBEDDERS}
    bias = {name: state[f"{name}.bias"] for name in EMBEDDERS}
    left, right, target, msa, relative, distance, extra = EMBEDDERS
    ours = {"msa_embed.target.weight": padded(theirs[target][1:])}
    for embed, name in (("msa_embed", msa), ("extra_embed", extra)):
        ours[f"{embed}.token.weight"] = theirs[name][:CLASSES]
        ours[f"{embed}.deletion.weight"] = theirs[name][CLASSES : CLASSES + 2].T
        ours[f"{embed}.deletion.bias"] = bias[name] + (bias[target] if name == msa else 0)
    ours["msa_embed.profile.weight"] = theirs[msa][CLASSES + 2 :].T
    ours["pair_embed.left.weight"] = padded(theirs[left][1:]) + bias[left]
    ours["pair_embed.right.weight"] = padded(theirs[right][1:]) + bias[right]
    ours["pair_embed.relative.weight"] = theirs[relative] + bias[relative]
    ours["recycle_distance.weight"] = F.pad(theirs[distance], (0, 0, 1, 0)) + bias[distance]
    return {name: value.contiguous() for name, value in ours.items()}


EMBEDDERS = (
    "input_embedder.linear_tf_z_i", "input_embedder.linear_tf_z_j", "input_embedder.linear_tf_m",
    "input_embedder.linear_msa_m", "input_embedder.linear_relpos", "recycling_embedder.linear",
    "extra_msa_embedder.linear",
)  # fmt: skip


def padded(rows: Tensor) -> Tensor:
    """A table (21 c) for all tokens (23 c): a target has neither gaps nor masks."""
    return F.pad(rows, (0, 0, 0, CLASSES - len(rows)))


def monomer_names(name: str) -> str | list[str]:
    """The name in OpenFold, spelled as openfold3, of a parameter of ours; several are joined."""
    layer, _, kind = name.rpartition(".")
    if layer in LAYERS:
        return f"{LAYERS[layer]}.{kind}"
    if name.startswith("structure."):
        return [f"structure_module.{one}" for one in openfold_structure_names(name.removeprefix("structure."))]
    if column := re.fullmatch(r"extra_(blocks\.\d+\.)column\.(\w+)\.(weight|bias)", name):
        return [f"extra_msa_stack.{column[1]}msa_att_col.{one}.{column[3]}" for one in GLOBAL[column[2]]]
    if name.startswith("extra_blocks."):
        return [f"extra_msa_stack.{one}" for one in openfold_names(2)(name.removeprefix("extra_"))]
    if name.startswith("blocks."):
        return [f"evoformer.{one}" for one in openfold_names(2)(name)]
    return name  # one of `tables`
