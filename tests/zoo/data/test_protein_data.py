"""Proteins as data: alignments of complexes, crops, hidden letters, folders, structures that come along, families."""

import gzip
import logging
import pickle
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from Bio.Align import PairwiseAligner

from tests.support.paths import STRUCTURES
from tests.support.refusals import refused
from zoo.data.protein import example_families, folder
from zoo.data.protein.alignment import read_alignment
from zoo.data.protein.complexes import join
from zoo.data.protein.embedded import EmbeddedProteins, sources
from zoo.data.protein.example import crop_contiguous, crop_spatial, draw, hide, sample_rows
from zoo.data.protein.folder import ProteinFolder
from zoo.data.protein.record import ATOMS, GAP, LETTERS, MASK, Protein, encode
from zoo.data.protein.structure import read_structure
from zoo.data.protein.synthetic import PottsFamilies, coupled, gibbs, properties, uneven
from zoo.data.sampling import generator
from zoo.protein.distogram import distances


def protein(*chains: str, rows=1) -> Protein:
    """Chains of these sequences along a helix, all seen, with random rows."""
    sequence, lengths, random = "".join(chains), [len(chain) for chain in chains], np.random.default_rng(0)
    r = len(sequence)
    turn = np.arange(r) * 100 * np.pi / 180
    place = np.stack([2.3 * np.cos(turn), 2.3 * np.sin(turn), 1.5 * np.arange(r)], 1)
    msa = np.concatenate([encode(sequence)[None], random.integers(0, 22, (rows - 1, r), dtype=np.uint8)])
    return Protein(
        name="made", sequence=sequence, chains=tuple("ABCDEFGH"[: len(chains)]),
        asym_id=np.repeat(np.arange(len(chains)), lengths),
        entity_id=np.repeat([list(dict.fromkeys(chains)).index(chain) for chain in chains], lengths),
        residue_index=np.concatenate([np.arange(n) for n in lengths]),
        residue_ids=tuple(str(i + 1) for n in lengths for i in range(n)),
        positions=np.repeat(place[:, None], len(ATOMS), 1).astype(np.float32),
        resolved=np.ones((r, len(ATOMS)), bool), msa=msa,
        deletions=random.integers(0, 9, msa.shape, dtype=np.uint16), paired=np.ones(rows, bool),
    )  # fmt: skip


# Alignments, complexes


def alignment(tmp_path, *rows, name="a"):
    path = tmp_path / f"{name}.a3m"
    path.write_text("".join(f">{title}\n{row}\n" for title, row in rows))
    return read_alignment(path)


def letters(rows):
    return ["".join(LETTERS[a] for a in row) for row in rows]


def test_rows_of_one_species_stand_side_by_side(tmp_path):
    a = alignment(
        tmp_path, ("a", "MKVL"), ("x OX=1", "AAAA"), ("y OX=2", "CCCC"), ("x2 OX=1", "DDDD"), ("no", "EEEE"),
        ("same as the first", "MKVL"),
    )  # fmt: skip
    b = alignment(
        tmp_path, ("b", "WWYYW"), ("z OX=3", "FFFFF"), ("x1 OX=1", "GGGGG"), ("x3 OX=1", "HHaaHHH"),
        ("x4 OX=1", "IIIII"), name="b",
    )  # fmt: skip
    whole = join(protein("MKVL", "WWYYW", "MKVL"), [b, a])
    assert letters(whole.msa) == [
        "MKVLWWYYWMKVL",
        "AAAAGGGGGAAAA",  # the first of species 1 with the first
        "DDDDHHHHHDDDD",  # the second with the second; the third of the other chain has no partner
        "CCCC-----CCCC",
        "EEEE-----EEEE",
        "----FFFFF----",
        "----IIIII----",
    ]
    assert whole.paired.tolist() == [True] * 3 + [False] * 4
    assert whole.deletions[2].tolist() == [0] * 6 + [2] + [0] * 6
    one = join(protein("MKVL", "MKVL"), [a])  # copies: every row is in both
    assert letters(one.msa) == ["MKVLMKVL", "AAAAAAAA", "CCCCCCCC", "DDDDDDDD", "EEEEEEEE"]
    assert one.paired.all()
    alone = join(protein("MKVL", "WWYYW"), [])
    assert letters(alone.msa) == ["MKVLWWYYW"]
    either = join(protein("MKXL"), [alignment(tmp_path, ("q", "MKVL"), ("x", "AAAA"))])
    assert letters(either.msa) == ["MKXL", "AAAA"]


def test_a_species_that_some_chains_have_pairs_those(tmp_path):
    """As AlphaFold-Multimer pairs: as many rows of a species as each chain that has the species has at least."""
    a = alignment(
        tmp_path, ("a", "MKVL"), ("OX=1", "AAAA"), ("OX=2", "CCCC"), ("OX=3", "DDDD"), ("OX=3", "EEEE"),
        ("OX=4", "MKVL"), ("OX=5", "AAAA"), ("OX=6", "MKVL"),
    )  # fmt: skip
    b = alignment(tmp_path, ("b", "WWYYW"), ("OX=1", "FFFFF"), ("OX=3", "GGGGG"), ("OX=3", "HHHHH"), name="b")
    c = alignment(
        tmp_path, ("c", "PQR"), ("OX=2", "III"), ("OX=1", "KKK"), ("OX=3", "LLL"), ("OX=4", "MMM"), ("OX=5", "NNN"),
        name="c",
    )  # fmt: skip
    whole = join(protein("MKVL", "WWYYW", "PQR"), [a, b, c])
    assert letters(whole.msa) == [
        "MKVLWWYYWPQR",
        "AAAAFFFFFKKK",
        "DDDDGGGGGLLL",
        "CCCC-----III",
        "MKVL-----MMM",  # a hit that is the sequence itself
        "AAAA-----NNN",  # the same row in another species
        "EEEE--------",  # the third chain has no second row of species 3
        "----HHHHH---",
    ]
    assert whole.paired.tolist() == [True] * 6 + [False] * 2


def test_an_alignment_of_another_protein_is_refused(tmp_path):
    mine = protein("MKVLAAGIVGLCAKAY", "WWYYWFFPPHHW")
    wrong = alignment(tmp_path, ("q", "MKVLAAGIVCLCAKAY"))
    refused("a.a3m is of another protein than made, chain A: 16 and 16 residues, 94% identical", join, mine, [wrong])
    refused("they differ from residue 10 on: C in the alignment, G in the structure", join, mine, [wrong])
    with pytest.raises(ValueError, match=r"chain B: 11 and 12 residues, 92% .* from residue 12 on: the end in the al"):
        join(mine, [alignment(tmp_path, ("q", "WWYYWFFPPHH"))])


# Examples


def test_contiguous_crops_take_one_stretch_of_each_chain():
    whole = protein("A" * 30, "C" * 20, "D" * 7)
    sizes = set()
    for seed in range(60):
        crop = crop_contiguous(whole, 24, generator("crop", seed))
        assert len(crop) == 24
        for chain in range(3):
            places = crop.residue_index[crop.asym_id == chain]
            assert (np.diff(places) == 1).all()
        sizes.add(tuple(np.bincount(crop.asym_id, minlength=3)))
    assert len(sizes) > 20
    one = {int(crop_contiguous(protein("A" * 30), 24, generator("crop", s)).residue_index[0]) for s in range(60)}
    assert one == set(range(7))
    assert crop_contiguous(whole, 57, generator(0)) is whole


def test_spatial_crops_take_what_is_near_and_touches():
    whole = EmbeddedProteins("train")
    (place,) = (i for i in range(len(whole)) if whole.protein(i).name == "3u8v")
    whole = whole.protein(place)
    for seed in range(8):
        crop = crop_spatial(whole, 80, generator("crop", seed))
        assert len(crop) == 80
        assert len(np.unique(crop.asym_id)) == 2
        assert crop.contact_atoms()[1].all()
        x = torch.from_numpy(crop.contact_atoms()[0])
        radius = distances(x, x).max(1).values.min()  # of the ball round the best centre
        assert radius < 32
    assert (np.diff(crop.asym_id * 1000 + crop.residue_index) > 0).all()


def test_rows_are_sampled_with_the_first_and_without_repeats():
    whole = protein("ACDEF", rows=50)
    whole = replace(whole, paired=np.arange(50) < 20)
    chosen = sample_rows(whole, 8, generator("rows", 0))
    assert (chosen.msa[0] == whole.msa[0]).all()
    index = [next(i for i in range(50) if (row == whole.msa[i]).all()) for row in chosen.msa]
    assert len(set(index)) == 8
    assert chosen.paired.tolist() == [i < 20 for i in index]
    assert (chosen.deletions == whole.deletions[index]).all()
    assert len(sample_rows(whole, 60, generator("rows", 0)).msa) == 50
    assert len(sample_rows(whole, 1, generator("rows", 0)).msa) == 1


def test_letters_are_hidden_in_the_shares_of_alphafold():
    msa = torch.full((400, 500), 3)
    msa[:200] = 21  # half of every column is gaps
    hidden, chosen = hide(msa, generator("hide"), 0.15)
    assert torch.equal(hidden[~chosen], msa[~chosen])
    assert abs(chosen.double().mean().item() - 0.15) < 2e-3
    n = chosen.sum().item()
    assert abs((hidden[chosen] == MASK).sum().item() / n - 0.70) < 0.01
    # kept 10%, and of the column's letters, which are the same half of the time, 5% more; a random one in 20
    assert abs((hidden[chosen] == msa[chosen]).sum().item() / n - (0.15 + 0.1 / 40)) < 0.01
    assert abs((hidden[:200][chosen[:200]] == 3).double().mean().item() - (0.05 + 0.1 / 20)) < 0.01
    assert hide(torch.zeros(1, 3, dtype=torch.long), generator(0), 0.0)[1].sum() == 1  # a loss needs something


def whole_of(example):
    return example.alignment() | example.extra_alignment() | example.single() | example.pairs()


def test_examples_are_pure_and_parts_are_slices_of_the_whole():
    source = protein("ACDEFGHIKL" * 3, "MNPQRSTVWY", rows=40)
    source.resolved[5] = False
    shape = {"residues": 22, "rows": 9, "extra": 7}
    whole = whole_of(draw(source, "a", 0, 1, 2, **shape))
    again = whole_of(draw(source, "a", 0, 1, 2, **shape))
    other = whole_of(draw(source, "a", 0, 2, 2, **shape))
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    assert not all(torch.equal(whole[name], other[name]) for name in whole)
    example = draw(source, "a", 0, 1, 2, **shape)
    for lo, hi in ((0, 4), (4, 8), (8, 9), (9, 9)):
        assert all(torch.equal(part, whole[name][lo:hi]) for name, part in example.alignment(range(lo, hi)).items())
    for lo, hi in ((0, 7), (7, 22), (22, 22)):
        parts = example.pairs(range(lo, hi))
        assert all(torch.equal(part, whole[name][lo:hi]) for name, part in parts.items())
        assert parts["bins"].shape == (hi - lo, 22)
    assert torch.equal(example.extra_alignment(range(3, 7))["extra_msa"], whole["extra_msa"][3:7])
    rows = {bytes(row.astype(np.uint8)) for row in source.msa[:, example.protein.residue_index]}
    assert len(rows) == 40
    assert whole["msa"].shape == (9, 22)
    assert whole["extra_msa"].shape == (7, 22)
    state = torch.get_rng_state()
    draw(source, 1, **shape)
    assert torch.equal(state, torch.get_rng_state())


def test_short_proteins_and_alignments_are_padded():
    source = protein("ACDEF", rows=3)
    example = draw(source, 0, residues=8, rows=4, extra=2)
    whole = whole_of(example)
    assert whole["mask"].tolist() == [True] * 5 + [False] * 3
    assert torch.equal(whole["msa_mask"], torch.outer(torch.arange(4) < 3, whole["mask"]))
    assert (whole["msa"][~whole["msa_mask"]] == GAP).all()
    assert whole["msa_weight"][~whole["msa_mask"]].sum() == whole["extra_mask"].sum() == 0
    assert torch.equal(whole["pair_weight"], torch.outer(whole["mask"], whole["mask"]).float())
    assert torch.equal(whole["msa_target"][0, :5].byte(), torch.from_numpy(source.msa[0]))
    empty = example.alignment(range(4, 4))
    assert empty["msa"].shape == (0, 8)


def test_targets_against_loops():
    source = read_structure(STRUCTURES / "3JQH.cif.gz")
    example = draw(source, 3, residues=len(source), rows=1)
    pairs = example.pairs()
    edges = [2.3125 + 0.3125 * k for k in range(63)]
    atoms = [ATOMS.index("CA" if letter == "G" else "CB") for letter in source.sequence]
    for i, j in np.ndindex(30, 30):
        seen = source.resolved[i, atoms[i]] and source.resolved[j, atoms[j]]
        assert pairs["pair_weight"][i, j] == float(seen)
        if seen:
            distance = np.linalg.norm(source.positions[i, atoms[i]] - source.positions[j, atoms[j]])
            assert pairs["bins"][i, j] == sum(distance > edge for edge in edges)


def test_a_crop_has_resolved_residues():
    source = protein("A" * 200)
    source.resolved[:195] = False
    for seed in range(5):
        assert draw(source, seed, residues=10, rows=1).pairs()["pair_weight"].sum() > 0


# Folder


@pytest.fixture
def proteins(tmp_path, monkeypatch):
    """Good and bad: as one finds them."""
    for name in ("1A8O.cif.gz", "2BEG.pdb.gz", "3JQH.cif.gz", "1LCD.pdb.gz"):
        shutil.copy(STRUCTURES / name, tmp_path / name)
    query = read_structure(STRUCTURES / "1A8O.cif.gz").sequence
    (tmp_path / "1A8O.a3m").write_text(f">q\n{query}\n>a\n{query.replace('K', 'R')}\n")
    (tmp_path / "1A8O_A").mkdir()
    (tmp_path / "1A8O_A" / "more.fasta").write_text(f">q\n{query}\n>b\n{query.replace('E', 'D')}\n")
    (tmp_path / "1A8Owner.a3m").write_text(">q\nMKV\n")  # of nobody
    query = read_structure(STRUCTURES / "2BEG.pdb.gz").sequence[:42]
    (tmp_path / "2BEG_B.a3m.gz").write_bytes(gzip.compress(f">q\n{query}\n>a\n{query[::-1]}\n".encode()))
    (tmp_path / "1LCD.a3m").write_text(f">q\n{query}\n")  # of another protein
    text = gzip.decompress((STRUCTURES / "1GBT.cif.gz").read_bytes()).decode()
    (tmp_path / "1GBT.cif").write_text(text[: len(text) // 2])
    (tmp_path / "notes.txt").write_text("not a protein")
    (tmp_path / "1A8O.pdb").write_text("ATOM")
    return tmp_path


def test_a_folder_names_skips_and_counts(proteins, caplog):
    with caplog.at_level(logging.INFO, "zoo.data.protein.folder"):
        data = ProteinFolder(proteins)
    assert data.names == ["1A8O", "1LCD", "2BEG", "3JQH"]  # a bad alignment costs no structure
    assert [len(data.protein(i).msa) for i in range(4)] == [3, 1, 2, 1]
    reasons = {path.name: reason for path, reason in data.skipped}
    assert sorted(reasons) == ["1A8O.pdb", "1A8Owner.a3m", "1GBT.cif", "1LCD.a3m"]
    assert reasons["1A8O.pdb"] == "1A8O.cif.gz, of the same name, is used instead"
    assert "1LCD.a3m is of another protein than 1LCD, chain A: 42 and 51 residues" in reasons["1LCD.a3m"]
    assert "cut off" in reasons["1GBT.cif"]
    lines = [record.getMessage() for record in caplog.records]
    assert sum(line.startswith("skipped ") for line in lines) == 4
    assert lines[-1] == f"4 proteins in {proteins}, 2 without an alignment, 4 skipped"


def test_a_folder_reloads_evicted_proteins_and_pickles_without_them(proteins, monkeypatch):
    monkeypatch.setattr(folder, "_KEPT_PROTEINS", 1)
    data = ProteinFolder(proteins)
    first = [data.protein(i) for i in (0, 1, 2, 0)]
    assert len(data._read) == 1
    assert first[0] is not first[3]
    np.testing.assert_array_equal(first[0].msa, first[3].msa)
    there = pickle.loads(pickle.dumps(data))
    assert not there._read
    np.testing.assert_array_equal(there.protein(1).positions, first[1].positions)


def test_proteins_with_a_chain_in_common_are_on_one_side_of_a_split(tmp_path, caplog):
    """A copy of a training protein under another name would count as held out."""
    original = (STRUCTURES / "1A8O.cif.gz").read_bytes()
    others = [path for path in sorted(STRUCTURES.glob("*.cif.gz")) if path.name != "1A8O.cif.gz"][:2]
    for name in ("aa", "good", "zz", "copy"):
        (tmp_path / f"{name}.cif.gz").write_bytes(original)
    assert [len(part) for part in ProteinFolder(tmp_path).split(0.25)] == [4, 4]
    assert "4 proteins that share chains: validation uses it too" in caplog.text
    for path in others:
        (tmp_path / path.name).write_bytes(path.read_bytes())
    for share in (0.2, 0.4, 0.7):
        train, held_out = ProteinFolder(tmp_path).split(share)
        assert not set(train.chains()) & set(held_out.chains())
        assert sorted([*train.names, *held_out.names]) == ProteinFolder(tmp_path).names
        assert train.names
        assert held_out.names


def test_a_folder_is_split_by_name(proteins, tmp_path_factory, caplog):
    data = ProteinFolder(proteins)
    train, validation = data.split(0.34)
    assert (len(train), len(validation), len(data)) == (3, 1, 4)
    assert sorted(train.names + validation.names) == data.names
    assert data.split(0.34)[1].names == validation.names
    one = tmp_path_factory.mktemp("one")
    shutil.copy(STRUCTURES / "1A8O.cif.gz", one)
    assert [len(part) for part in ProteinFolder(one).split()] == [1, 1]
    assert "single protein" in caplog.text


def test_a_folder_without_a_usable_protein_is_one_clear_error(tmp_path):
    refused("no such folder", ProteinFolder, tmp_path / "absent")
    refused(r"no structures in .* \(looked for .cif", ProteinFolder, tmp_path)
    (tmp_path / "a.cif").write_text("data_a\n")
    refused(r"none of the 1 structures in .*; the first: .*a.cif: it has no _atom_site", ProteinFolder, tmp_path)


# Embedded, synthetic


def test_embedded_structures_match_their_entries():
    train, validation = EmbeddedProteins("train"), EmbeddedProteins("validation")
    every = {data.protein(i).name: data.protein(i) for data in (train, validation) for i in range(len(data))}
    assert len(every) == len(train) + len(validation) == len(sources()) == 68
    assert {len(train.protein(i).chains) > 1 for i in range(len(train))} == {True, False}
    assert any(len(validation.protein(i).chains) > 1 for i in range(len(validation)))
    for name, file in (("1A8O", "1A8O.cif.gz"), ("1GBT", "1GBT.cif.gz"), ("2BEG", "2BEG.pdb.gz")):
        stored, entry = every[name], read_structure(STRUCTURES / file)
        assert (stored.sequence, stored.chains) == (entry.sequence, entry.chains)
        for field in ("asym_id", "entity_id", "residue_index", "msa"):
            np.testing.assert_array_equal(getattr(stored, field), getattr(entry, field))
        (a, seen), (b, expected) = stored.contact_atoms(), entry.contact_atoms()
        np.testing.assert_array_equal(seen, expected)
        a, b = (torch.from_numpy(x[seen]) for x in (a, b))
        torch.testing.assert_close(distances(a, a), distances(b, b), atol=0.02, rtol=0)
    assert len(set(sources())) == 68
    assert all(" " in source for source in sources().values())
    refused("split must be", EmbeddedProteins, "test")


def test_no_relatives_on_both_sides_of_the_split():
    train, validation = EmbeddedProteins("train"), EmbeddedProteins("validation")
    aligner = PairwiseAligner(scoring="blastp", mode="local")
    for i in range(0, len(validation), 3):
        for j in range(0, len(train), 3):
            a, b = validation.protein(i).sequence[:250], train.protein(j).sequence[:250]
            if aligner.score(a, b) > 45:
                assert aligner.align(a, b)[0].counts().identities <= 0.3 * min(len(a), len(b))


def test_families_are_pure_and_on_contacts():
    data = PottsFamilies("train", families=70, residues=24, rows=20, sweeps=3, seed=5)
    assert len(data) == 70
    one = data.protein(66)
    np.testing.assert_array_equal(
        one.msa, PottsFamilies(families=67, residues=24, rows=20, sweeps=3, seed=5).protein(66).msa
    )
    assert not np.array_equal(one.msa, PottsFamilies(families=67, residues=24, rows=20, sweeps=3).protein(66).msa)
    assert one.msa.shape == (20, 24)
    assert one.msa.max() < 20
    assert one.sequence == letters(one.msa[:1])[0]
    position, seen = one.contact_atoms()
    J = coupled(one)
    for i, j in np.ndindex(24, 24):
        near = seen[i] and seen[j] and np.linalg.norm(position[i] - position[j]) < 8
        apart = one.asym_id[i] != one.asym_id[j] or abs(one.residue_index[i] - one.residue_index[j]) >= 3
        assert J[i, j] == (near and apart)
    held_out = PottsFamilies("validation", families=8, residues=24, rows=2)
    names = {data.protein(i).name.split()[0] for i in range(70)}
    assert not names & {held_out.protein(i).name.split()[0] for i in range(8)}
    refused("no embedded structure has 5000 residues", PottsFamilies, residues=5000)
    fewer = PottsFamilies("train", residues=24, without=["1or4A"])
    assert len(data.structures) - 1 == len(fewer.structures) == sum(p.name != "1or4A" for p in data.structures)
    refused("no embedded structure is called 1or4B", PottsFamilies, without=["1or4B"])


def test_example_families_are_read_as_they_were_drawn(tmp_path, capsys):
    counts: list[int] = []
    example_families.write_families(tmp_path / "new", 2, residues=24, rows=16, on_family=counts.append)
    assert counts == [1, 2]  # as progress shows them
    read, drawn = ProteinFolder(tmp_path / "new"), PottsFamilies(families=64, residues=24, rows=16)
    assert (len(read), read.skipped) == (2, [])
    for protein in map(read.protein, range(2)):
        name = protein.name
        family = next(p for p in map(drawn.protein, range(64)) if p.name.split()[0] == name and len(p.chains) == 1)
        assert protein.sequence == family.sequence
        assert (protein.msa == family.msa).all()
        bare = np.array([letter != "G" for letter in family.sequence])  # Cα of a glycine; its family has Cβ there
        there, here = (p.contact_atoms()[0][bare] for p in (protein, family))
        assert np.abs(there - here).max() < 0.002
    assert example_families.main([str(tmp_path / "many"), "--families", "1000"]) == 2
    assert "--families 1000: the package has" in capsys.readouterr().err
    assert not (tmp_path / "many").exists()


def test_families_of_many_kinds():
    """A function of their number, related by a tree, of any depth, with gaps and insertions, but for the first row."""
    data = PottsFamilies("train", families=66, residues=24, rows=64, sweeps=2, kinds=True)
    families = [data.protein(i) for i in (*range(8), 64, 65)]
    again = PottsFamilies("train", families=65, residues=24, rows=64, sweeps=2, kinds=True).protein(64)
    np.testing.assert_array_equal(again.msa, families[-2].msa)
    assert len({len(p.msa) for p in families}) > 5
    assert all(8 <= len(p.msa) <= 64 and p.deletions.shape == p.msa.shape for p in families)
    assert all((p.msa[0] < 20).all() and not p.deletions[0].any() for p in families)
    gaps = np.concatenate([(p.msa == 21).flatten() for p in families])
    assert 0.02 < gaps.mean() < 0.5
    assert sum(p.deletions.sum() for p in families) > 0
    likeness = [max((p.msa[0] == row).mean() for row in p.msa[1:]) for p in families]
    strength = uneven(families[0], torch.Generator().manual_seed(0))
    contacts = coupled(families[0], least=1)
    assert torch.equal(strength, strength.T)
    assert (strength[contacts] > 0).all()
    assert 0 < ((strength > 0) & ~contacts).sum() < contacts.sum()
    assert strength[contacts].std() > 0.3
    alone = PottsFamilies("train", families=1, residues=24, rows=64, sweeps=2).protein(0)
    assert max(likeness) > 0.6 > max((alone.msa[0] == row).mean() for row in alone.msa[1:])


def test_contacts_are_counted_between_what_is_far_apart_along_a_chain():
    protein = next(p for p in map(EmbeddedProteins("train").protein, range(54)) if len(p.chains) == 2)
    weights = draw(protein, 0, residues=len(protein) + 2, rows=1).pairs()
    place, chain = (np.pad(x, (0, 2)) for x in (protein.residue_index, protein.asym_id))
    far = (abs(place[:, None] - place) >= 12) | (chain[:, None] != chain)
    share = weights["contact_weight"] / weights["pair_weight"].clamp(min=1e-9)
    seen = weights["pair_weight"].bool()
    assert torch.equal(share > 0.5, seen & torch.from_numpy(far))
    near = share[seen & ~torch.from_numpy(far)]
    torch.testing.assert_close(near, torch.full_like(near, 0.001))


def test_gibbs_samples_the_distribution_it_says():
    """Three residues, their 8000 states enumerated: frequencies of letters and of pairs after a while."""
    u = properties()
    torch.manual_seed(0)
    fields, J = torch.randn(1, 3, 20) * 0.8, torch.tensor([[[0.0, 0.6, 0], [0.6, 0, -0.3], [0, -0.3, 0]]])
    drawn = gibbs(fields, J, u, torch.rand(1, 30, 3, 60_000))[0]
    signs = torch.tensor([1.0, -1.0, -1.0])
    pair = u @ torch.diag(signs) @ u.T
    h = fields[0]
    energy = h[0][:, None, None] + h[1][:, None] + h[2] + 0.6 * pair[:, :, None] - 0.3 * pair
    p = energy.flatten().softmax(0).view(20, 20, 20)
    counted = torch.zeros(20, 20, 20).index_put_(tuple(drawn.T), torch.ones(()), accumulate=True) / 60_000
    for dim in range(3):
        assert (p.sum(dim) - counted.sum(dim)).abs().max() < 4e-3
    assert (p.sum(2) - p.sum((1, 2))[:, None] * p.sum((0, 2))).abs().max() > 0.02  # there is something to be seen
