"""Contacts from alignments: against loops, somebody else's implementation, and figures of real alignments."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import mutual_info_score

from tests.support.paths import ROOT
from tests.support.slow import long, slow
from zoo.data.protein.folder import read_protein
from zoo.data.protein.synthetic import PottsFamilies
from zoo.protein import coevolution
from zoo.protein.coevolution import (
    Coevolution,
    average_product_correction,
    coupling_feature,
    direct_couplings,
    filled_rows,
    mutual_information,
    plain_mutual_information,
    sequence_weights,
)
from zoo.protein.metrics import contact_precision
from zoo.training.outputs.predicted import truth

SHARED = Path(os.environ.get("DSP_PROTEIN_DATA", ROOT.parent / "shared" / "data" / "protein"))


def family(residues, rows, **options):
    return PottsFamilies(families=1, residues=residues, rows=rows, **options).protein(0)


def test_mutual_information_against_sklearn():
    msa = torch.from_numpy(PottsFamilies(families=1, residues=12, rows=50).protein(0).msa)
    msa[::7, 3:5] = 21
    msa[1, 2] = 20  # unknown, as a gap
    plain = plain_mutual_information(msa, columns=5)
    clamped = msa.long().clamp(max=20).numpy()
    mean = [sum(plain[i, j].item() for j in range(12) if j != i) / 11 for i in range(12)]
    apc = mutual_information(msa)
    for i, j in np.ndindex(12, 12):
        assert plain[i, j].item() == pytest.approx(mutual_info_score(clamped[:, i], clamped[:, j]), abs=2e-6)
        expected = 0 if i == j else plain[i, j].item() - mean[i] * mean[j] / (sum(mean) / 12)
        assert apc[i, j].item() == pytest.approx(expected, abs=1e-5)
    assert (mutual_information(msa[:1]) == 0).all()


def test_rows_with_gaps_and_relatives():
    msa = torch.zeros(5, 10, dtype=torch.uint8)
    msa[0, :8], msa[1, :5], msa[2, :4] = 21, 21, 20
    msa[3, :3] = 7
    assert len(filled_rows(msa)) == 4  # the first is kept, the second is half gaps
    assert (filled_rows(msa) == msa[[0, 2, 3, 4]]).all()
    assert sequence_weights(msa[2:], 0.6).tolist() == pytest.approx([1 / 3] * 3)
    assert sequence_weights(msa[2:], 0.7).tolist() == [1, 0.5, 0.5]
    assert sequence_weights(msa[2:], 0.8).tolist() == [1, 1, 1]


def test_direct_couplings_against_loops():
    """Frequencies counted letter by letter, the whole inverse, and the zero-sum gauge by projection."""
    r, q, pseudocount = 6, 21, 0.4
    msa = family(8, 60).msa[:, :r].copy()
    msa[::9, 2] = 21
    msa[::11, 4] = 20
    x = np.minimum(msa, 20)
    weights = [1 / sum((x[s] == x[t]).mean() >= 0.8 for t in range(len(x))) for s in range(len(x))]
    total = sum(weights)
    f = np.full((r, q), pseudocount / q)
    pair = np.full((r, q, r, q), pseudocount / q**2)
    for row, weight in zip(x, weights):
        for i in range(r):
            f[i, row[i]] += (1 - pseudocount) * weight / total
            for j in range(r):
                pair[i, row[i], j, row[j]] += (1 - pseudocount) * weight / total
    for i in range(r):
        pair[i, :, i, :] = np.diag(f[i])
    covariance = (pair - f[:, :, None, None] * f)[:, :20, :, :20].reshape(20 * r, 20 * r)
    e = np.zeros((r, q, r, q))
    e[:, :20, :, :20] = -np.linalg.inv(covariance).reshape(r, 20, r, 20)
    project = np.eye(q) - 1 / q
    score = np.array([[np.linalg.norm((project @ e[i, :, j] @ project)[:20, :20]) for j in range(r)] for i in range(r)])
    found = direct_couplings(torch.from_numpy(msa), pseudocount=pseudocount)
    theirs = average_product_correction(torch.from_numpy(score))
    torch.testing.assert_close(found.score.double(), theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max()))
    assert found.rows == 60
    assert found.effective == pytest.approx(total, rel=1e-5)


def test_coupling_features_do_not_depend_on_the_scale_of_scores():
    score = torch.randn(40, 40, generator=torch.Generator().manual_seed(0))
    score = (score + score.T).fill_diagonal_(0)
    score[3, 30] = score[30, 3] = 90.0
    far = [score[i, j].item() for i in range(40) for j in range(i + 6, 40)]
    for times in (0.01, 1, 100):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(coevolution, "direct_couplings", lambda msa, times=times: Coevolution(times * score, 2, 2.0))
            told = coupling_feature(torch.zeros(2, 40))
        unit = sorted(far)[-(len(far) // 20)]
        torch.testing.assert_close(told, (score / unit).clamp(-5, 5))
        assert told[3, 30] == 5
    assert (coupling_feature(torch.zeros(1, 7)) == 0).all()
    assert coupling_feature(torch.zeros(3, 7, dtype=torch.uint8)).isfinite().all()


# long range, P@L, L/2 and L/5 (docs/proteins-measured.md): mutual information, of rows with few gaps, direct couplings
REAL = {
    "102m": ((0.045, 0.052, 0.100), (0.052, 0.052, 0.100), (0.084, 0.143, 0.333)),
    "1k1a": ((0.132, 0.149, 0.133), (0.175, 0.202, 0.133), (0.254, 0.246, 0.333)),
    "5zyh": ((0.079, 0.114, 0.111), (0.075, 0.114, 0.111), (0.110, 0.114, 0.156)),
}


@pytest.mark.skipif(not (SHARED / "1k1a.cif").exists(), reason="DSP_PROTEIN_DATA names no folder with 1k1a.cif")
@pytest.mark.parametrize("entry", [slow(entry) if entry == "102m" else long(entry) for entry in REAL])
def test_real_alignments(entry):
    protein = read_protein(SHARED / f"{entry}.cif", [SHARED / f"{entry}.a3m"])
    msa, known = torch.from_numpy(protein.msa), truth(protein)
    scores = mutual_information(msa), mutual_information(filled_rows(msa)), direct_couplings(msa).score
    for score, expected in zip(scores, REAL[entry]):
        found = contact_precision(score, *known)
        assert [found[f"long P@{part}"] for part in ("L", "L/2", "L/5")] == pytest.approx(expected, abs=0.023)
