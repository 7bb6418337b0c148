"""Contacts from an alignment without a trained model: mutual information, and direct couplings.

Columns in contact change together. Mutual information measures that for each pair alone. Direct coupling analysis
explains all pairs jointly: in mean field, the couplings e of a Potts model p(x) ~ exp(sum_i h_i(x_i) + sum_ij e_ij(x_i,
x_j)) are minus the inverse of the covariance of letters (Morcos et al. 2011). Both scores are ranked after APC.

Letters: s rows of an alignment, r residues, i j two columns, a b letters, q of them (20 amino acids and a gap).
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "Coevolution",
    "average_product_correction",
    "coupling_feature",
    "couplings",
    "direct_couplings",
    "filled_rows",
    "memory_of_couplings",
    "mutual_information",
    "relative",
    "sequence_weights",
]

_GAP_OR_X = 20
_LETTERS = 20
_CLASSES = _LETTERS + 1
_ROWS = 256  # rows of an alignment that are processed at a time


class Coevolution(NamedTuple):
    """Scores of all pairs, and the number of sequences behind them."""

    score: Tensor  # [r, r] float32, symmetric, zero diagonal; the higher, the likelier a contact
    rows: int  # rows of the alignment that were used
    effective: float  # the sum of their weights: roughly, the number of independent sequences


def filled_rows(msa: Tensor, gaps: float = 0.5) -> Tensor:
    """The first row of an alignment [s, r], and the rows with less than a share `gaps` of gaps (or X).

    The columns of a stretch that is missing in many rows change together: they would rank first.
    """
    few = (msa >= _GAP_OR_X).float().mean(1) < gaps
    few[0] = True
    return msa[few]


def mutual_information(msa: Tensor, columns: int = 12) -> Tensor:
    """Mutual information of all pairs of columns of an alignment [s, r], in nats, with APC: [r, r], zero diagonal.

    From relative frequencies of the 20 letters and the gap (X counts as a gap), without weights or pseudocounts. Pairs
    are counted for `columns` columns at a time.
    """
    return average_product_correction(plain_mutual_information(msa, columns))


def plain_mutual_information(msa: Tensor, columns: int = 12) -> Tensor:
    """The mutual information of all pairs of columns, as above, without APC."""
    s, r = msa.shape
    flat = F.one_hot(msa.long().clamp(max=_GAP_OR_X), _CLASSES).float().flatten(1)
    frequency = flat.mean(0)
    entropy = -(frequency * frequency.clamp(min=1e-30).log()).view(r, _CLASSES).sum(1)
    joint = torch.empty(r, r)
    for i in range(0, r, columns):
        p = flat[:, i * _CLASSES : (i + columns) * _CLASSES].T @ flat / s
        cells = -(p * p.clamp(min=1e-30).log()).view(-1, _CLASSES, r, _CLASSES)
        joint[i : i + columns] = cells.sum((1, 3))
    return entropy[:, None] + entropy - joint


def average_product_correction(score: Tensor) -> Tensor:
    """A symmetric score [r, r] of pairs minus the background of their two columns; zero on the diagonal.

    S_ij - mean_i mean_j / mean (Dunn et al. 2008).
    """
    n = len(score)
    off = score * (1 - torch.eye(n, dtype=score.dtype, device=score.device))
    mean = off.sum(1) / max(1, n - 1)
    whole = mean.mean()
    corrected = off - mean[:, None] * mean / whole if whole > 0 else off
    return corrected.fill_diagonal_(0)


def sequence_weights(msa: Tensor, identity: float = 0.8) -> Tensor:
    """1 / the number of rows, itself included, that share at least `identity` of a row's letters: [s], float32."""
    x = msa.clamp(max=_GAP_OR_X).float()
    most = (1 - identity) * x.shape[1] + 1e-4  # letters in which two such rows may differ
    return torch.cat([1 / (torch.cdist(part, x, p=0.0) <= most).sum(1) for part in x.split(_ROWS)])


def couplings(msa: Tensor, weights: Tensor, pseudocount: float = 0.5) -> Tensor:
    """The couplings e_ij(a, b) of the mean-field Potts model of an alignment [s, r]: [r, 20, r, 20] float64.

    Couplings with a gap are zero (the gauge). `pseudocount` is the share of the frequencies that is uniform.
    """
    r, n = msa.shape[1], _LETTERS * msa.shape[1]
    single, pair = torch.zeros(n, dtype=torch.float64), torch.zeros(n, n, dtype=torch.float64)
    for rows, weight in zip(msa.split(_ROWS), weights.split(_ROWS)):
        x = F.one_hot(rows.long().clamp(max=_GAP_OR_X), _CLASSES)[..., :_LETTERS].flatten(1).float()
        single += weight @ x
        pair += (x * weight[:, None]).T @ x
    share = (1 - pseudocount) / weights.sum().double()
    single.mul_(share).add_(pseudocount / _CLASSES)
    pair.mul_(share).add_(pseudocount / _CLASSES**2)
    same = pair.view(r, _LETTERS, r, _LETTERS).diagonal(dim1=0, dim2=2)  # (a b i): one letter a column
    same.copy_(torch.diag_embed(single.view(r, _LETTERS)).permute(1, 2, 0))
    covariance = pair.addr_(single, single, alpha=-1)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(covariance, out=covariance))
    return inverse.neg_().view(r, _LETTERS, r, _LETTERS)


def direct_couplings(msa: Tensor, *, gaps: float = 0.5, identity: float = 0.8, pseudocount: float = 0.5) -> Coevolution:
    """Mean-field direct coupling analysis of an alignment [s, r] (classes as in LETTERS).

    Rows with at least a share `gaps` of gaps are left out, and rows that share `identity` of their letters count as
    one. The score of a pair is the Frobenius norm of its couplings without those with a gap, in the zero-sum gauge
    (Ekeberg et al. 2013), with APC. Memory: 6400 r² bytes besides the alignment.
    """
    used = filled_rows(msa, gaps)
    weights = sequence_weights(used, identity)
    norms = [_norms(part) for part in couplings(used, weights, pseudocount).split(8)]
    return Coevolution(average_product_correction(torch.cat(norms)).float(), len(used), weights.sum().item())


def coupling_feature(msa: Tensor) -> Tensor:
    """The coupling scores of all pairs [r, r] of an alignment [s, r] as a model's input, in units of `relative`.

    All are zero if there is a single row.
    """
    if len(msa) < 2:
        return torch.zeros(msa.shape[1], msa.shape[1])
    return relative(direct_couplings(msa).score)


def relative(score: Tensor) -> Tensor:
    """Scores [r, r] in a unit that makes those of the likeliest contacts at least 1.

    The unit is the r-th highest score of pairs that are six or more columns apart, so that alignments of any depth are
    comparable. Scores are clamped to -5 and 5 and not compressed further: by how much the few highest scores stand out
    is informative.
    """
    far = score[torch.ones_like(score, dtype=torch.bool).triu(6)]
    far = far if len(far) else score.flatten()
    unit = far.topk(max(1, min(len(score), len(far) // 20))).values[-1]
    return (score / unit.clamp(min=1e-6)).clamp(-5, 5)


def _norms(coupling: Tensor) -> Tensor:
    """The norms [i, r], in the zero-sum gauge, of couplings [i, 20, r, 20] in the gauge where those of gaps are 0."""
    left, right = (coupling.sum(dim, keepdim=True) / _CLASSES for dim in (1, 3))
    both = left.sum(3, keepdim=True) / _CLASSES
    return (coupling - left - right + both).square().sum((1, 3)).sqrt()


def memory_of_couplings(residues: int) -> int:
    """The approximate peak memory of `direct_couplings` in bytes: the covariance of letters and its inverse."""
    return 2 * 8 * (_LETTERS * residues) ** 2
