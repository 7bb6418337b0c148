"""infer.py on proteins: files of structures and alignments in, tables, arrays and pictures out."""

import csv
import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from tests.support.inference import infer, infer_here
from tests.support.paths import STRUCTURES
from tests.support.runs import Runs
from zoo.data.protein.record import LETTERS, digest
from zoo.data.protein.structure import read_structure
from zoo.data.protein.synthetic import PottsFamilies
from zoo.protein.coevolution import coupling_feature, direct_couplings
from zoo.training.records import write

TINY = """
model: {name: evoformer, size: test, overrides: {bins: 64, depth: 1}}
data: {name: protein_synthetic, residues: 17, rows: 5, extra_rows: 3, families: 6, depth: 8}
train: {steps: 1, batch: 2}
eval: {every: 0}
wandb: {mode: disabled}
"""


@pytest.fixture(scope="module")
def run(trainer, tmp_path_factory):
    return Runs(trainer, tmp_path_factory.mktemp("proteins"), TINY)()


def alignment(path, *rows):
    path.write_text("".join(f">{i}\n{row}\n" for i, row in enumerate(rows)))
    return path


CHAINS = ("MKTAYIAKQRQISF", "GSHMLEDPVRWC")  # 14 and 12 residues, 26 on 4 ranks


@pytest.fixture
def files(tmp_path):
    """A structure with its alignment beside it, one that is damaged, and an alignment alone."""
    folder = tmp_path / "files"
    folder.mkdir()
    shutil.copy(STRUCTURES / "1A8O.cif.gz", folder)
    (folder / "bad.cif").write_text("data_bad\nloop_\n_atom_site.group_PDB\nATOM\n")
    alignment(folder / "alone.a3m", CHAINS[0], "-KTAYIaaAKQRQISY", CHAINS[0][:-1] + "-")
    return folder


def arrays(path):
    with np.load(path) as stored:
        return dict(stored)


@pytest.mark.slow
def test_a_complex_is_the_same_on_any_number_of_ranks(run, tmp_path, whole_world, capsys):
    pair = [alignment(tmp_path / f"{name}.a3m", row, row[::-1]) for name, row in zip("AB", CHAINS)]
    options = [run, *pair, "--complex", "--recycles", 1, "--least", 0]
    assert infer(*options, "--out", tmp_path / "one") == 0
    assert "A-B: 26 residues in 2 chains, 3 of 3 rows, 0 paired; its structure is not known" in capsys.readouterr().out
    one = arrays(tmp_path / "one/A-B.npz")
    assert one["contact"].shape == one["distance"].shape == (26, 26)
    assert (one["contact"] > 0).all()
    assert (one["contact"] < 1).all()
    np.testing.assert_allclose(one["contact"], one["contact"].T, atol=1e-6)
    assert "".join(one["chain"]) == "A" * 14 + "B" * 12
    assert str(one["sequence"]) == "".join(CHAINS)
    whole_world(infer_here, 3, (*options, "--out", tmp_path / "three"))
    for name, value in arrays(tmp_path / "three/A-B.npz").items():
        if value.dtype.kind == "f":
            np.testing.assert_allclose(value, one[name], rtol=1e-4, atol=1e-5)
        else:
            assert (value == one[name]).all()

    with (tmp_path / "one/A-B.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 8 * 9 // 2 + 6 * 7 // 2 + 14 * 12  # 6 apart or more, and all pairs of two chains
    probabilities = [float(row["probability"]) for row in rows]
    assert probabilities == sorted(probabilities, reverse=True)
    for row in rows:
        i, j = int(row["i"]), int(row["j"])
        assert i < j
        assert float(row["probability"]) == pytest.approx(one["contact"][i, j], abs=1e-4)
        assert float(row["distance"]) == pytest.approx(one["distance"][i, j], abs=1e-2)
        assert row["residue_i"] == "".join(CHAINS)[i]
        assert (row["chain_j"], row["number_j"]) == (("A", str(j + 1)) if j < 14 else ("B", str(j - 13)))
        assert row["range"] == ("inter" if i < 14 <= j else "medium" if j - i >= 12 else "short")


def test_recycles_change_what_is_predicted(run, tmp_path, files, capsys):
    assert infer(run, files / "alone.a3m", "--out", tmp_path / "0") == 0
    assert infer(run, files / "alone.a3m", "--out", tmp_path / "2", "--recycles", 2) == 0
    zero, two = (arrays(tmp_path / n / "alone.npz")["contact"] for n in "02")
    assert np.abs(zero - two).max() > 1e-6
    out = capsys.readouterr().out
    assert out.count("the model was trained with at most 0, and may do worse with more") == 1


def test_a_prediction_says_whether_the_run_was_trained_on_it(run, tmp_path, files, capsys):
    """By sequence, whatever the file is called; a run that recorded no sequences goes by names, and this is said."""
    chains = {"train": [read_structure(STRUCTURES / "1A8O.cif.gz").sequence], "validation": [CHAINS[0]]}
    digests = {f"{which}_chains": [digest(chain) for chain in each] for which, each in chains.items()}
    shutil.move(files / "1A8O.cif.gz", files / "good.cif.gz")
    try:
        write(run / "names.json", json.dumps({"train": ["alone"], "validation": ["good"], **digests}))
        assert infer(run, files, "--out", tmp_path / "out") == 0
        out = capsys.readouterr().out
        assert "good (trained on): 70 residues" in out
        assert "alone (held out): 14 residues" in out
        assert "mean of 1 trained on\n" in out
        assert out.count("mean of") == 1  # of the other no structure is known
        write(run / "names.json", json.dumps({"train": ["alone"], "validation": ["good"]}))
        assert infer(run, files, "--out", tmp_path / "out") == 0
        assert "alone (trained on, by its name): 14 residues" in capsys.readouterr().out
        write(run / "names.json", "[1]")
        assert infer(run, files, "--out", tmp_path / "out") == 2
        assert "names.json: expected the lists train and validation" in capsys.readouterr().err
    finally:
        (run / "names.json").unlink()


def test_all_rows_are_taken_and_several_numbers_compared(run, tmp_path, capsys):
    rows = ["".join(LETTERS[a] for a in row) for row in PottsFamilies(families=1, residues=12, rows=9).protein(0).msa]
    file = alignment(tmp_path / "many.a3m", *rows)
    assert infer(run, file, "--out", tmp_path / "all") == 0
    assert "many: 12 residues, 9 of 9 rows" in capsys.readouterr().out  # the model was trained with 5
    assert infer(run, file, "--out", tmp_path / "some", "--rows", 100, 2, 9) == 0
    out = capsys.readouterr().out
    assert out.index("2 of 9 rows") < out.index("9 of 9 rows")
    assert {path.name for path in (tmp_path / "some").glob("*.csv")} == {"many-2.csv", "many-9.csv"}
    every = arrays(tmp_path / "some/many-9.npz")["contact"]
    np.testing.assert_allclose(every, arrays(tmp_path / "all/many.npz")["contact"], atol=1e-6)
    assert infer(run, file, "--rows", 3, 0, "--out", tmp_path) == 2
    assert "--rows 0: must be at least 1" in capsys.readouterr().err


@pytest.mark.slow
def test_a_distogram_is_stored_if_asked_for(run, tmp_path, files, whole_world):
    assert infer(run, files / "alone.a3m", "--out", tmp_path / "plain") == 0
    plain, options = arrays(tmp_path / "plain/alone.npz"), ("--distogram", "--out")
    assert "distogram" not in plain
    assert infer(run, files / "alone.a3m", *options, tmp_path / "one") == 0
    one = arrays(tmp_path / "one/alone.npz")
    assert one["distogram"].shape == (14, 14, 64)
    assert one["distogram"].dtype == np.float16
    probability = one["distogram"].astype(np.float64)
    np.testing.assert_allclose(probability.sum(-1), 1, atol=5e-3)
    # what else is stored is read off it: contact below 8 Å, and the mean of the bins' middles
    low, high = np.r_[0, one["edges"]], np.r_[one["edges"], one["edges"][-1] + 0.3125]
    np.testing.assert_allclose(probability @ ((8 - low) / (high - low)).clip(0, 1), one["contact"], atol=2e-3)
    middles = one["edges"][0] + 0.3125 * (np.arange(64) - 0.5)
    np.testing.assert_allclose(probability @ middles, one["distance"], atol=2e-2)
    np.testing.assert_array_equal(one["contact"], plain["contact"])
    whole_world(infer_here, 2, (run, files / "alone.a3m", *options, tmp_path / "two"))
    two = arrays(tmp_path / "two/alone.npz")
    np.testing.assert_allclose(two["distogram"], one["distogram"], rtol=1e-2, atol=1e-5)


def test_a_folder_is_predicted_and_what_cannot_be_read_is_counted(run, tmp_path, files, capsys):
    assert infer(run, files, "--out", tmp_path / "out") == 0
    out = capsys.readouterr().out
    assert "bad.cif" in next(line for line in out.splitlines() if line.startswith("skipped"))
    assert "2 of 3 proteins predicted, 1 skipped\nmean of 1; 1 protein without a known structure\n" in out
    assert "1A8O: 70 residues, 1 of 1 rows\n" + " " * 10 + "     P@L   P@L/2   P@L/5\n  short  " in out
    names = {f"{name}.{suffix}" for name in ("1A8O", "alone") for suffix in ("csv", "npz", "png")}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    for name in ("1A8O", "alone"):
        with Image.open(tmp_path / f"out/{name}.png") as picture:
            assert len(picture.convert("RGB").getcolors(1 << 20)) > 5


@pytest.mark.slow
def test_an_alignment_is_found_beside_its_structure_or_given(run, tmp_path, capsys):
    (tmp_path / "in").mkdir()
    structure = shutil.copy(STRUCTURES / "1A8O.cif.gz", tmp_path / "in")
    assert infer(run, structure, "--out", tmp_path / "out") == 0
    sequence = str(arrays(tmp_path / "out/1A8O.npz")["sequence"])
    capsys.readouterr()
    given = alignment(tmp_path / "1A8O_A.a3m", sequence, "-" + sequence[1:])
    assert infer(run, structure, given, "--out", tmp_path / "out") == 0
    assert "2 of 2 rows" in capsys.readouterr().out
    alignment(tmp_path / "in/1A8O.a3m", sequence, "--" + sequence[2:], "---" + sequence[3:])
    assert infer(run, structure, "--out", tmp_path / "out") == 0
    assert "3 of 3 rows" in capsys.readouterr().out
    assert infer(run, structure, given, "--rows", 2, "--out", tmp_path / "out") == 0
    assert "2 of 4 rows" in capsys.readouterr().out
    other = alignment(tmp_path / "query.a3m", sequence, "-" + sequence[1:])
    assert infer(run, structure, other, "--out", tmp_path / "out") == 0
    assert "query.a3m: predicted alone; the name of a structure's alignment begins" in capsys.readouterr().out


@pytest.mark.slow
def test_impossible_requests_end_in_one_error(run, tmp_path, files, capsys):
    def error(*arguments):
        assert infer(run, *arguments, "--out", tmp_path / "out") == 2
        said = capsys.readouterr().err
        assert said.count("error:") == 1
        assert "Traceback" not in said
        return said

    assert "bad.cif: " in error(files / "bad.cif")
    assert "no such file" in error(tmp_path / "nothing.cif")
    assert "notes.txt: no structure or alignment by its name" in error(alignment(tmp_path / "notes.txt", "A"))
    assert "--recycles -1: expected 0 to 1,048,576" in error(files / "alone.a3m", "--recycles", -1)
    other = alignment(tmp_path / "1A8O.a3m", "MKTAYIAKQR")
    assert "is of another protein than 1A8O" in error(STRUCTURES / "1A8O.cif.gz", other)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "no structures or alignments in" in error(empty)
    twice = files / "alone.a3m", alignment(tmp_path / "alone.a3m", CHAINS[0])
    assert f"two proteins are called alone, {twice[0]} and {twice[1]}: " in error(*twice)
    bad = [shutil.copy(files / "bad.cif", tmp_path / name) for name in ("x.cif", "y.cif")]
    assert "none of 2 proteins can be read; the first: " in error(*bad)


def test_direct_couplings_need_no_checkpoint(tmp_path, capsys):
    family = PottsFamilies(families=1, residues=24, rows=40).protein(0)
    rows = ["".join(LETTERS[a] for a in row) for row in family.msa]
    file = alignment(tmp_path / "one.a3m", *rows, "-" * 20 + rows[0][20:])
    assert infer("--dca", file, "--out", tmp_path / "dca") == 0
    out = capsys.readouterr().out
    assert "one: 24 residues, 40 of 41 rows, which count as 40, 0.00 GiB; its structure is not known" in out
    score = arrays(tmp_path / "dca/one.npz")["score"]
    assert (score == score.T).all()
    expected = direct_couplings(torch.from_numpy(family.msa)).score.numpy()
    np.testing.assert_allclose(score, expected, rtol=1e-4, atol=1e-5)
    with (tmp_path / "dca/one.csv").open() as file:
        table = list(csv.DictReader(file))
    assert 0 < len(table) < 18 * 19 / 2
    found = [float(row["score"]) for row in table]
    assert found == sorted(found, reverse=True)
    assert found[0] == pytest.approx(score[int(table[0]["i"]), int(table[0]["j"])], abs=1e-4)
    with Image.open(tmp_path / "dca/one.png") as image:
        assert image.width > 400


@pytest.mark.parametrize(
    ("rows", "options", "said"),
    [
        (CHAINS[:1], [], "one has only its sequence, and couplings need an alignment: give one"),
        ((CHAINS[0], "-" * 13 + "F"), [], "one: no row but the first has less than 50% gaps: raise --gaps"),
        ((CHAINS[0],) * 2, ["--identity", 2], "--identity 2.0: must be above 0 and at most 1"),
        ((CHAINS[0],) * 2, ["--nonsense"], "unrecognized arguments: --nonsense; infer.py --dca --help explains"),
        ((CHAINS[0],) * 2, ["--ident", "0.7"], "unrecognized arguments: --ident 0.7; infer.py --dca --help"),
    ],
    ids=["alone", "gaps", "share", "unknown", "abbreviated"],
)
def test_direct_couplings_that_cannot_be(tmp_path, capsys, rows, options, said):
    assert infer("--dca", alignment(tmp_path / "one.a3m", *rows), *options, "--out", tmp_path) == 2
    assert capsys.readouterr().err.startswith(f"error: {said}")


@pytest.mark.slow
def test_a_model_that_is_told_couplings_is_told_those_of_the_whole_alignment(trainer, tmp_path, capsys):
    runs = Runs(trainer, tmp_path, TINY)
    data = ["data.extra_rows=0", "data.couplings=true", "data.kinds=true"]
    run = runs(*data, "model.overrides.couplings=1", "model.overrides.extra_depth=0")
    msa = PottsFamilies(families=1, residues=12, rows=9).protein(0).msa
    file = alignment(tmp_path / "one.a3m", *("".join(LETTERS[a] for a in row) for row in msa))
    assert infer(run, file, "--rows", 2, 5, "--out", tmp_path) == 0
    assert "one: 12 residues, 5 of 9 rows" in capsys.readouterr().out
    assert infer(run, file, "--rows", 5, "--couplings", 0, "--out", tmp_path) == 0
    leant, own = (arrays(tmp_path / f"{name}.npz")["contact"].astype(float) for name in ("one-5", "one"))
    odds = np.log(leant / (1 - leant)) - np.log(own / (1 - own))
    np.testing.assert_allclose(odds, 0.5 * coupling_feature(torch.from_numpy(msa)).numpy(), atol=1e-3)


def test_a_folder_without_alignments_has_no_couplings_and_that_is_said_once(tmp_path, capsys):
    for name in ("a", "b"):
        shutil.copy(STRUCTURES / "1A8O.cif.gz", tmp_path / f"{name}.cif.gz")
    assert infer("--dca", tmp_path, "--out", tmp_path / "out") == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: 2 structures without an alignment, and couplings need one: put NAME.a3m")
    assert printed.out + printed.err == printed.err


FOLDS = "model.overrides={bins: 64, depth: 1, structure: 2, structure_heads: 2}"


@pytest.mark.slow
def test_a_structure_is_written_with_its_confidence(trainer, tmp_path, whole_world, capsys):
    """On three ranks as on one; and of a known structure it is said how near the prediction is."""
    run = Runs(trainer, tmp_path, TINY)("name=folds", FOLDS)
    assert "loss_fape" in (run / "metrics.jsonl").read_text()
    options = [run, STRUCTURES / "1A8O.cif.gz", "--rows", 1]
    assert infer(*options, "--out", tmp_path / "one") == 0
    said = capsys.readouterr().out
    assert all(word in said for word in ("structure lDDT 0.", "structure RMSD ", "pLDDT "))
    assert "unusable backbone: neighbouring Cα are " in said  # after one step
    assert "; train longer\n" in said
    with Image.open(tmp_path / "one/1A8O-predicted.png") as picture:
        assert picture.width > 1.5 * picture.height  # the true one beside it
        assert len(picture.getcolors(1 << 20)) > 60
    found, true = read_structure(tmp_path / "one/1A8O-predicted.cif"), read_structure(STRUCTURES / "1A8O.cif.gz")
    assert (found.sequence, found.chains) == (true.sequence, true.chains)
    assert found.resolved[:, :4].all()
    whole_world(infer_here, 3, (*options, "--out", tmp_path / "three"))
    other = read_structure(tmp_path / "three/1A8O-predicted.cif")
    np.testing.assert_allclose(other.positions, found.positions, atol=2e-3)
