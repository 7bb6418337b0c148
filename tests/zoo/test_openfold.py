"""AlphaFold 2 with OpenFold's weights: against numbers that its code gave (tests/golden/openfold.py), and by infer.py.

The numbers are those of aqlaboratory/openfold at ce0029e, in float64, after three passes: features made of an alignment
by its own functions, weights drawn by the rule under its names. Torsion angles are not predicted here; of OpenFold's
atoms N, CA, C and CB are compared, which need none.
"""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import zoo
from tests.golden import openfold
from tests.golden.rule import digest, weight
from tests.support.inference import infer, infer_here
from tests.support.paths import GOLDEN, STRUCTURES
from tests.support.refusals import refused
from tests.support.slow import slow
from zoo.data.protein.clusters import cluster_profile
from zoo.data.protein.record import LETTERS
from zoo.data.protein.structure import read_structure
from zoo.protein import atoms, evoformer, monomer_weights
from zoo.protein.atoms import ContactAtoms, backbone
from zoo.protein.backbone_picture import SIDE

NUMBERS = json.loads((GOLDEN / "openfold.json").read_text())


def state() -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(weight(name, *shape)) for name, shape in NUMBERS["shapes"].items()}


def features(case: str) -> dict[str, torch.Tensor]:
    """The inputs of the model for an alignment, the extra one padded as OpenFold's is."""
    centres, _, extra = openfold.CASES[case]
    tokens, deletions = openfold.alignment(case)
    profile = cluster_profile(tokens[:centres], deletions[:centres], tokens[centres:], deletions[centres:])
    shape = extra + openfold.PADDED, openfold.RESIDUES
    extra_msa, extra_deletions = np.zeros(shape, np.int64), np.zeros(shape)
    extra_msa[:extra], extra_deletions[:extra] = (x[centres : centres + extra] for x in (tokens, deletions))
    inputs = {
        "msa": tokens[:centres], "deletions": deletions[:centres], "sequence": tokens[0],
        "residue_index": np.arange(openfold.RESIDUES), "asym_id": np.zeros(openfold.RESIDUES, np.int64),
        "extra_msa": extra_msa, "extra_deletions": extra_deletions, "msa_mask": np.ones((centres, shape[1]), bool),
        "extra_mask": np.arange(shape[0])[:, None] < np.full(shape[1], extra), "mask": np.ones(shape[1], bool),
    }  # fmt: skip
    return {name: torch.from_numpy(value)[None] for name, value in inputs.items()} | {"profile": profile[None]}


def agree(case: str, name: str, value: torch.Tensor, tolerance: float) -> None:
    wanted = NUMBERS[case][name]
    for got, expect in zip(digest(name, value.numpy()), wanted):
        assert abs(got - expect) < tolerance * max(map(abs, wanted)), name


@torch.no_grad()
@pytest.mark.parametrize("case", openfold.CASES)
def test_predictions_are_those_of_openfold(case: str) -> None:
    model = zoo.from_reference("evoformer", state(), structure=openfold.ITERATIONS).double().eval()
    assert model.config.depth == 2
    assert model.config.extra_depth == 1
    given = features(case)
    agree(case, "profile", given["profile"][0].double(), 1e-6)
    out = model(**given, recycles=openfold.PASSES - 1)
    # the mean counts of deletions are float32 here
    agree(case, "masked_msa", out.msa_logits[0], 1e-6)
    agree(case, "distogram", out.distogram_logits[0], 1e-6)
    agree(case, "lddt", out.lddt_logits[0], 1e-6)
    agree(case, "translation", out.translation[0], 1e-6)
    bonded = torch.ones(openfold.RESIDUES, dtype=torch.bool)
    made = backbone(out.rotation[0, -1], out.translation[0, -1], given["sequence"][0], bonded)[:, [0, 1, 2, 4]]
    made[0], made[1, 3] = 0, 0  # OpenFold has no atom of an unknown residue, and no CB of glycine
    agree(case, "backbone", made, 1e-6)


def test_earlier_names_are_read_too() -> None:
    """The checkpoints of version 1 name a core of each block, and points without a layer of their own."""
    early = {}
    for name, value in state().items():
        name = re.sub(r"\.pair_stack\.|(?<=\d)\.(?=msa_transition|outer_product_mean)", ".core.", name)
        early[re.sub(r"(ipa\.linear_\w+_points)\.linear", r"\1", name)] = value
    assert early.keys() != state().keys()
    found = zoo.from_reference("evoformer", early).state_dict()
    for name, value in zoo.from_reference("evoformer", state()).state_dict().items():
        assert torch.equal(found[name], value), name


def test_weights_that_do_not_fit_are_named() -> None:
    whole = state()
    name = "evoformer.blocks.1.pair_stack.tri_att_end.linear.weight"
    refused("missing: evoformer.blocks.1.pair_stack.tri_att_end.linear_z.weight", zoo.from_reference, "evoformer",
            {k: v for k, v in whole.items() if k != name})  # fmt: skip
    refused("unknown: more", zoo.from_reference, "evoformer", {**whole, "more": torch.zeros(1)})
    multimer = {**whole, "input_embedder.linear_tf_m.weight": torch.zeros(12, 21)}
    refused("AlphaFold-Multimer", zoo.from_reference, "evoformer", multimer)
    single = {k: v for k, v in whole.items() if "linear_msa_m" not in k}
    refused("single sequences", zoo.from_reference, "evoformer", single)
    refused("monomer recycles the positions", evoformer.Config, monomer=True)


def test_atoms_are_those_of_openfolds_tables() -> None:
    from transformers.models.esm.openfold_utils import residue_constants as tables

    for token, row in enumerate(atoms.IDEAL):
        name = tables.restype_1to3[LETTERS[token]]
        theirs = {atom: place for atom, group, place in tables.rigid_group_atom_positions[name] if group == 0}
        assert row[:2] + (0.0,) == theirs["N"]
        assert (row[2], 0.0, 0.0) == theirs["C"]
        assert row[3:] == theirs.get("CB", atoms.IDEAL[0][3:])
    sequence = torch.tensor([[LETTERS.index(letter) for letter in "AGX"]])
    eye, far = torch.eye(3).expand(1, 3, 3, 3), torch.full((1, 3, 3), 5.0)
    wanted = torch.tensor([[[4.471, 4.226, 3.795], [5.0, 5.0, 5.0], [0.0, 0.0, 0.0]]])
    torch.testing.assert_close(ContactAtoms()(eye, far, sequence), wanted)


def test_rows_belong_to_the_centre_they_are_most_like() -> None:
    """By loops: letters that are shared with a centre count, gaps do not; of equals the first is the nearest."""
    random = np.random.default_rng(0)
    msa, extra = (random.integers(0, 23, (n, 6)) for n in (3, 700))
    extra[:, :3] = msa[random.integers(0, 3, 700), :3]
    deletions, extra_deletions = (random.integers(0, 9, x.shape) for x in (msa, extra))
    members = [[(row, count)] for row, count in zip(msa, deletions)]
    for row, count in zip(extra, extra_deletions):
        shared = [int(((row == centre) & (row < 21)).sum()) for centre in msa]
        members[shared.index(max(shared))].append((row, count))
    wanted = np.zeros((3, 6, 24))
    for s, cluster in enumerate(members):
        for row, count in cluster:
            wanted[s, np.arange(6), row] += 1 / len(cluster)
            wanted[s, :, 23] += count / len(cluster)
    np.testing.assert_allclose(cluster_profile(msa, deletions, extra, extra_deletions), wanted, atol=1e-5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """As OpenFold's weights are once they are safetensors: one file, and no description."""
    path = tmp_path_factory.mktemp("weights") / "openfold"
    path.mkdir()
    save_file({name: value.float().contiguous() for name, value in state().items()}, path / "model.safetensors")
    return path


@pytest.mark.parametrize(("name", "ranks"), [("one", 2), slow("known", 3)])
def test_infer_writes_a_backbone_on_any_number_of_ranks(folder, tmp_path, whole_world, capsys, name, ranks) -> None:
    """A sequence alone, and an alignment whose structure is known."""
    true = read_structure(STRUCTURES / "1A8O.cif.gz").sequence
    (tmp_path / "known.cif.gz").write_bytes((STRUCTURES / "1A8O.cif.gz").read_bytes())
    rows = [true, *(true[:i] + "-" + true[i + 1 :].replace("K", "R", i % 3) for i in range(9))]
    (tmp_path / "known.a3m").write_text("".join(f">{i}\n{row}\n" for i, row in enumerate(rows)))
    (tmp_path / "one.fasta").write_text(">one\nMKTAYIAKQRQISFVKSHFSRQ\n")
    files = {"one": [tmp_path / "one.fasta"], "known": [tmp_path / "known.a3m", tmp_path / "known.cif.gz"]}[name]
    options = [folder, *files, "--rows", 4, "--extra-rows", 3, "--recycles", 1, "--out"]
    single, shared = tmp_path / "single", tmp_path / "shared"
    assert infer(*options, single) == 0
    out = capsys.readouterr().out
    said = {"known": "70 residues, 4 of 10 rows\n", "one": "22 residues, 1 of 1 rows; its structure is not known\n"}
    assert f"{name}: {said[name]}" in out
    assert ("structure RMSD" in out) == (name == "known")
    whole_world(infer_here, ranks, (*options, shared))
    with np.load(single / f"{name}.npz") as a, np.load(shared / f"{name}.npz") as b:
        assert a["distance"].shape == (len(str(a["sequence"])),) * 2
        for what in ("contact", "distance"):
            np.testing.assert_allclose(b[what], a[what], rtol=1e-4, atol=1e-5)
    alone, together = (read_structure(place / f"{name}-predicted.cif") for place in (single, shared))
    assert np.ptp(alone.atoms("CA")[0]) > 1
    np.testing.assert_allclose(together.positions, alone.positions, atol=2e-3)
    with Image.open(single / f"{name}-predicted.png") as picture:
        assert picture.width == (1 + (name == "known")) * SIDE  # the true backbone is beside the prediction
        assert len(picture.getcolors(1 << 20)) > 60  # along the chain


def test_impossible_predictions_are_named(folder, tmp_path, capsys) -> None:
    (tmp_path / "two.a3m").write_text("#3,4\t1,1\n>101\t102\nMKVAAWY\n")
    assert infer(folder, tmp_path / "two.a3m", "--out", tmp_path) == 2
    assert "two has 2 chains, and these weights are for single chains" in capsys.readouterr().err
    assert infer(folder, tmp_path / "two.a3m", "--rows", 0, "--out", tmp_path) == 2
    assert "argument --rows: 0: must be at least 1" in capsys.readouterr().err
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad/model.safetensors").write_text("<html>")
    assert infer(tmp_path / "bad", tmp_path / "two.a3m", "--out", tmp_path) == 2
    assert "model.safetensors: not safetensors, or damaged" in capsys.readouterr().err
    assert monomer_weights.is_folder(tmp_path) is False
