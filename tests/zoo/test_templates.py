"""Templates: what is told of each pair, by loops; and a structure laid along a sequence with a deletion."""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.oracles import randomise
from tests.support.paths import STRUCTURES
from tests.support.refusals import refused
from zoo.data.protein.example import draw
from zoo.data.protein.folder import ProteinFolder
from zoo.data.protein.inputs import find_proteins
from zoo.data.protein.record import ATOMS, GAP, Protein
from zoo.data.protein.structure import read_structure
from zoo.data.protein.template import align
from zoo.data.protein.write import write_structure
from zoo.protein.templates import TemplateEmbedder, template_inputs

# The model


def by_loops(
    model: TemplateEmbedder, z: Tensor, asym_id: Tensor, sequence: Tensor, backbone: Tensor, beta: Tensor, seen: Tensor
) -> Tensor:
    """Algorithm 16 for one sample (i j c), pair by pair up to the pair blocks."""
    features, r, total = model.features, len(z), 0
    for t in range(len(sequence)):
        v = model.pairs(z).clone()
        for i in range(r):
            for j in range(r):
                v[i, j] += features.left.weight[sequence[t, i]] + features.right.weight[sequence[t, j]]
                if asym_id[i] != asym_id[j]:
                    continue
                framed, placed = (bool(seen[t, i, k] and seen[t, j, k]) for k in (0, 1))
                numbers = torch.zeros(5, dtype=z.dtype)
                numbers[0], numbers[1] = float(placed), float(framed)
                if framed and i != j:
                    n, ca, c = backbone[t, i]
                    x = (c - ca) / (c - ca).norm()
                    y = (n - ca) - x * (x @ (n - ca))
                    y = y / y.norm()
                    away = backbone[t, j, 1] - ca
                    local = torch.stack([away @ x, away @ y, away @ torch.linalg.cross(x, y)])
                    numbers[2:] = local / local.norm()
                v[i, j] += features.numbers.weight @ numbers
                distance = (beta[t, i] - beta[t, j]).norm()
                if placed and distance > 3.25:
                    v[i, j] += features.distance.weight[min(int((distance - 3.25) / 1.25), 38)]
        v = v[None]
        for block in model.blocks:
            v = block(v)
        total = total + model.mean.norm(v[0])
    return z + (total / len(sequence)).relu() @ model.update.out.weight.T


def embedder(samples: int, residues: int, templates: int) -> tuple[TemplateEmbedder, Tensor, list[Tensor]]:
    """A model, pairs (b i j c), and templates: sequence, backbone, places, what is seen of each residue."""
    torch.manual_seed(0)
    model = TemplateEmbedder(6, 8, 1).double().eval()
    randomise(model)
    given = template_inputs(samples, residues, templates).values()
    z = torch.randn(samples, residues, residues, 6, dtype=torch.float64, requires_grad=True)
    return model, z, [x.double() if x.is_floating_point() else x for x in given]


@torch.no_grad()
def test_the_update_is_that_of_the_algorithm() -> None:
    model, z, given = embedder(2, 7, 3)
    asym_id = torch.tensor([[0, 0, 0, 0, 0, 1, 1]] * 2)
    given[2][0, 0, 0] = given[2][0, 0, 1] + 1  # nearer than the first bin
    found = model(z, asym_id, *given)
    for sample in range(2):
        expect = by_loops(model, z[sample], asym_id[sample], *(x[sample] for x in given))
        torch.testing.assert_close(found[sample], expect)
    assert (found - z).std() > 0.1


def test_a_residue_that_is_not_seen_says_nothing_and_costs_no_gradient() -> None:
    model, z, (sequence, backbone, beta, seen) = embedder(1, 6, 1)
    asym_id, hidden = torch.zeros(1, 6, dtype=torch.long), torch.zeros_like(seen)
    empty = model(z, asym_id, sequence, 0 * backbone, 0 * beta, hidden)
    torch.testing.assert_close(model(z, asym_id, sequence, backbone, beta, hidden), empty)
    assert (empty - z).abs().max() > 1e-3
    empty.square().sum().backward()
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert p.grad.isfinite().all(), name
    refused("has no template", model, z, asym_id, *(x[:, :0] for x in (sequence, backbone, beta, seen)))


# The data


@pytest.fixture(scope="module")
def whole() -> Protein:
    return read_structure(STRUCTURES / "1A8O.cif.gz")


def relative(whole: Protein, kept: np.ndarray) -> Protein:
    return replace(whole.take(kept), name="relative")


KEPT = np.r_[5:30, 36:62]  # a crop, six residues of which are deleted


def test_a_crop_with_a_deletion_is_laid_where_it_belongs(whole: Protein) -> None:
    found = align(whole, relative(whole, KEPT))
    there = np.zeros(len(whole), bool)
    there[KEPT] = True
    assert ((found.letters != GAP) == there).all()
    np.testing.assert_array_equal(found.letters[there], whole.msa[0][there])
    np.testing.assert_array_equal(found.positions[there], whole.positions[there])
    assert not found.resolved[~there].any()
    (a, seen), (b, known) = found.contact_atoms(), whole.contact_atoms()
    np.testing.assert_array_equal(a[there], b[there])
    assert (seen == (known & there)).all()


def test_each_chain_has_the_chain_that_fits_it(whole: Protein) -> None:
    half = len(whole) // 2
    two = replace(whole, chains=("A", "B"), asym_id=(np.arange(len(whole)) >= half).astype(np.int64))
    swapped = relative(whole, np.r_[half : len(whole), :half])
    swapped = replace(swapped, chains=("A", "B"), asym_id=(np.arange(len(whole)) >= len(whole) - half).astype(np.int64))
    found = align(two, swapped)
    np.testing.assert_array_equal(found.positions, whole.positions)
    only = align(two, relative(whole, np.arange(half)))
    assert (only.letters[:half] != GAP).all()
    assert (only.letters[half:] == GAP).all()


def test_a_template_of_another_protein_is_refused(whole: Protein) -> None:
    stranger = replace(whole, name="stranger", sequence="W" * 30 + "C" * 40)
    refused("none of its chains resembles one of 1A8O", align, whole, stranger)


def test_templates_of_an_example_are_cropped_and_padded(whole: Protein) -> None:
    protein = replace(whole, templates=(align(whole, relative(whole, KEPT)),))
    example = draw(protein, 0, residues=40, rows=1, templates=2)
    found, (template,) = example.relatives(), example.protein.templates
    assert {name: tuple(x.shape) for name, x in found.items()} == {
        "template_sequence": (2, 40), "template_backbone": (2, 40, 3, 3), "template_beta": (2, 40, 3),
        "template_seen": (2, 40, 2),
    }  # fmt: skip
    place = example.protein.residue_index
    seen = np.isin(place, KEPT)
    np.testing.assert_array_equal(found["template_seen"][0], np.stack([seen] * 2, 1))
    assert not found["template_seen"][1].any()
    assert (found["template_sequence"][1] == GAP).all()
    np.testing.assert_array_equal(found["template_backbone"][0, :, 1][seen], whole.atoms("CA")[0][place[seen]])
    np.testing.assert_array_equal(template.letters[seen], whole.msa[0][place[seen]])
    padded = draw(protein, 0, residues=80, rows=1, templates=1).relatives()
    assert not padded["template_seen"][:, 70:].any()
    assert padded["template_sequence"].dtype == torch.int64


def write(path, protein: Protein) -> None:
    atoms = np.nan_to_num(protein.positions)
    write_structure(path, protein, atoms, np.zeros(len(protein)))


def test_a_folder_finds_templates(whole: Protein, tmp_path) -> None:
    shutil.copy(STRUCTURES / "1A8O.cif.gz", tmp_path)
    (tmp_path / "1A8O.template0.cif").write_text("data_bad\n")
    write(tmp_path / "1A8O.template1.cif", relative(whole, KEPT))
    write(tmp_path / "1A8O.template_2.cif", relative(whole, KEPT[:40]))
    write(tmp_path / "2xyz.template1.cif", relative(whole, KEPT))
    folder = ProteinFolder(tmp_path, templates=1)
    assert folder.names == ["1A8O"]
    assert {path.name for path, _ in folder.skipped} == {"1A8O.template0.cif", "2xyz.template1.cif"}
    (template,) = folder.protein(0).templates
    np.testing.assert_allclose(template.positions[KEPT, 1], whole.positions[KEPT, ATOMS.index("CA")], atol=1e-3)
    folder._read.clear()
    assert [t.name for t in folder.protein(0).templates] == ["1A8O.template1"]
    assert ProteinFolder(tmp_path).protein(0).templates == ()

    (given, *_), skipped = find_proteins([tmp_path]), []
    assert [t.name for t in given.read(1, lambda path, why: skipped.append(path.name)).templates] == ["1A8O.template1"]
    assert skipped == ["1A8O.template0.cif"]
    (same,) = find_proteins([tmp_path / "1A8O.cif.gz", tmp_path / "../" / tmp_path.name / "1A8O.template1.cif"])
    assert [path.name for path in same.templates] == [path.name for path in given.templates]

    (tmp_path / "1A8O.template0.cif").unlink()
    (tmp_path / "2xyz.template1.cif").unlink()
    for given in (find_proteins([tmp_path]), find_proteins([tmp_path / "1A8O.cif.gz"])):
        assert [one.name for one in given] == ["1A8O"]
        assert [path.name for path in given[0].templates] == ["1A8O.template1.cif", "1A8O.template_2.cif"]
        assert len(given[0].read(2).templates) == 2
        assert given[0].read().templates == ()
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone/query.a3m").write_text(f">query\n{whole.sequence}\n")
    shutil.copy(tmp_path / "1A8O.template1.cif", tmp_path / "alone/query.template.cif")
    (one,) = find_proteins([tmp_path / "alone/query.a3m"])
    assert one.read(1).templates[0].resolved.any()
