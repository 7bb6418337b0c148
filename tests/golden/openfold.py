"""The numbers of tests/zoo/test_openfold.py, from the authors' code (github.com/aqlaboratory/openfold):

    git clone https://github.com/aqlaboratory/openfold && git -C openfold checkout ce0029e
    pip install dm-tree modelcif ml-collections
    python tests/golden/openfold.py openfold > tests/golden/openfold.json

Its kernels for CUDA are not built: a stand-in below has the one that it calls, a softmax in place. The code makes
rotations in float32 whatever the model's type; here they are float64, too.
"""

import json
import sys
import types
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.golden.rule import digest, draw, weight

RESIDUES, PASSES, ITERATIONS = 9, 3, 2
CASES = {"deep": (4, 6, 5), "single": (1, 0, 0)}  # rows that are centres, other rows, those of the extra alignment
PADDED = 1  # masked rows after them, as OpenFold pads to a fixed size
WIDTHS = {"c_m": 12, "c_z": 8, "c_s": 10, "c_e": 6, "no_heads_msa": 2, "no_heads_pair": 2, "reach": 3}


def alignment(case: str) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and counts of deletions [rows, r]; the first row has an unknown residue and a glycine, no gap."""
    centres, more, _ = CASES[case]
    shape = centres + more, RESIDUES
    tokens = np.floor(np.abs(draw(f"{case} tokens", *shape)) * 11).astype(np.int64) % 22
    tokens[0] = [20, 7, *(tokens[0, 2:] % 20)]
    tokens[centres:, ::2] = tokens[np.arange(more) % centres, ::2]  # as one of the centres
    deletions = np.floor(np.abs(draw(f"{case} deletions", *shape)) * 2).astype(np.int64)
    return tokens, deletions


def settings(reach: int, **widths: int) -> dict:
    """The configuration of a small model."""
    c_m, c_z, c_s, c_e = (widths[name] for name in ("c_m", "c_z", "c_s", "c_e"))
    stack = {
        "c_hidden_opm": 3, "c_hidden_mul": 5, "c_hidden_pair_att": 3, "no_heads_pair": widths["no_heads_pair"],
        "no_heads_msa": widths["no_heads_msa"], "transition_n": 2, "msa_dropout": 0.15, "pair_dropout": 0.25,
        "no_column_attention": False, "opm_first": False, "fuse_projection_weights": False, "blocks_per_ckpt": None,
        "clear_cache_between_blocks": False, "tune_chunk_size": False, "inf": 1e9, "eps": 1e-8, "c_z": c_z,
    }  # fmt: skip
    extra = {k: v for k, v in stack.items() if k not in ("no_column_attention", "blocks_per_ckpt")}
    return {
        "_mask_trans": False, "recycle_early_stop_tolerance": -1.0,
        "input_embedder": {"tf_dim": 22, "msa_dim": 49, "c_z": c_z, "c_m": c_m, "relpos_k": reach},
        "recycling_embedder": {
            "c_z": c_z, "c_m": c_m, "min_bin": 3.25, "max_bin": 20.75, "no_bins": 15, "inf": 1e8,
        },
        "template": {"enabled": False},
        "extra_msa": {
            "enabled": True, "extra_msa_embedder": {"c_in": 25, "c_out": c_e},
            "extra_msa_stack": {**extra, "c_m": c_e, "c_hidden_msa_att": 4, "no_blocks": 1, "ckpt": False},
        },
        "evoformer_stack": {**stack, "c_m": c_m, "c_s": c_s, "c_hidden_msa_att": 5, "no_blocks": 2},
        "structure_module": {
            "c_s": c_s, "c_z": c_z, "c_ipa": 16, "c_resnet": 6, "no_heads_ipa": 3, "no_qk_points": 4, "no_v_points": 8,
            "dropout_rate": 0.1, "no_blocks": ITERATIONS, "no_transition_layers": 1, "no_resnet_blocks": 2,
            "no_angles": 7, "trans_scale_factor": 10, "epsilon": 1e-8, "inf": 1e5,
        },
        "heads": {
            "lddt": {"no_bins": 50, "c_in": c_s, "c_hidden": 128}, "distogram": {"c_z": c_z, "no_bins": 64},
            "tm": {"c_z": c_z, "no_bins": 64, "enabled": True}, "masked_msa": {"c_m": c_m, "c_out": 23},
            "experimentally_resolved": {"c_s": c_s, "c_out": 37},
        },
    }  # fmt: skip


def network() -> torch.nn.Module:
    """OpenFold's model with weights by the rule."""
    from ml_collections import ConfigDict
    from openfold.model.model import AlphaFold

    flags = dict.fromkeys(
        "is_multimer seqemb_mode_enabled offload_inference use_lma use_flash use_deepspeed_evo_attention".split(), False
    )
    config = ConfigDict({"globals": {**flags, "chunk_size": None}, "model": settings(**WIDTHS)})
    model = AlphaFold(config).double().eval()
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(torch.from_numpy(weight(name, *param.shape)))
    return model


def numbers(model: torch.nn.Module, case: str) -> dict[str, list[float]]:
    """The outputs after all passes, as digests."""
    from openfold.data import data_transforms

    features = inputs(case, data_transforms)
    profile = torch.cat([features["cluster_profile"], features["cluster_deletion_mean"][..., None]], -1)
    with torch.no_grad():
        out = model({name: torch.stack([value] * PASSES, -1) for name, value in features.items()})
    outputs = {
        "profile": profile, "masked_msa": out["masked_msa_logits"], "distogram": out["distogram_logits"],
        "lddt": out["lddt_logits"], "translation": out["sm"]["frames"][..., 4:],
        "backbone": out["final_atom_positions"][:, [0, 1, 2, 3]],
    }  # fmt: skip
    return {name: digest(name, value.numpy()) for name, value in outputs.items()}


def inputs(case: str, data_transforms: types.ModuleType) -> dict[str, torch.Tensor]:
    """The features of an alignment, made by OpenFold's own functions, in float64."""
    centres, _, extra = CASES[case]
    tokens, deletions = (torch.from_numpy(x) for x in alignment(case))
    mask = torch.ones(tokens.shape)
    protein = {
        "aatype": tokens[0], "residue_index": torch.arange(RESIDUES), "seq_mask": torch.ones(RESIDUES),
        "between_segment_residues": torch.zeros(RESIDUES), "msa": tokens[:centres], "msa_mask": mask[:centres],
        "deletion_matrix": deletions[:centres].double(), "extra_msa": tokens[centres:],
        "extra_msa_mask": mask[centres:], "extra_deletion_matrix": deletions[centres:].double(),
    }  # fmt: skip
    protein = data_transforms.make_atom14_masks(protein)
    protein = data_transforms.nearest_neighbor_clusters()(protein)
    protein = data_transforms.summarize_clusters()(protein)
    for name in ("extra_msa", "extra_msa_mask", "extra_deletion_matrix"):
        blank = protein[name].new_zeros(PADDED, RESIDUES)
        protein[name] = torch.cat([protein[name][:extra], blank])
    return data_transforms.make_msa_feat()(protein)


if __name__ == "__main__":
    sys.modules["attn_core_inplace_cuda"] = kernels = types.ModuleType("attn_core_inplace_cuda")
    kernels.forward_ = lambda logits, rows, columns: logits.copy_(logits.softmax(-1))
    sys.path.insert(0, sys.argv[1])
    torch.set_default_dtype(torch.float64)
    torch.float32, torch.Tensor.float = torch.float64, torch.Tensor.double
    model = network()
    shapes = {name: list(param.shape) for name, param in model.named_parameters()}
    results = {"shapes": shapes} | {case: numbers(model, case) for case in CASES}
    print(json.dumps(results, separators=(",", ":")))
