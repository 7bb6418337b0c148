"""Clusters of an alignment: the rows that a model reads are their centres, and stand for the rows nearest to them.

Letters: s rows that are centres, n extra rows, r residues.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.data.protein.record import GAP, LETTERS

__all__ = ["cluster_profile"]

ROWS = 256  # rows that are compared with all centres at once


def cluster_profile(msa: np.ndarray, deletions: np.ndarray, extra: np.ndarray, extra_deletions: np.ndarray) -> Tensor:
    """The share of each of the 23 tokens, and the mean count of deletions, in the cluster of every centre [s, r, 24].

    msa, deletions [s, r]: the centres; extra, extra_deletions [n, r]: rows that each belong to the centre with which
    they share most letters, gaps not counted. A centre counts as a row of its cluster. AF2 supplement, 1.2.7.
    """
    centres, counts = _one_hot(msa), torch.ones(len(msa))
    shares, deleted = centres.clone(), torch.from_numpy(deletions.astype(np.float32))
    letters = centres[..., :GAP].flatten(1)
    for start in range(0, len(extra), ROWS):
        rows = _one_hot(extra[start : start + ROWS])
        nearest = (rows[..., :GAP].flatten(1) @ letters.T).argmax(1)
        counts.index_add_(0, nearest, torch.ones(len(rows)))
        shares.index_add_(0, nearest, rows)
        more = torch.from_numpy(extra_deletions[start : start + ROWS].astype(np.float32))
        deleted.index_add_(0, nearest, more)
    return torch.cat([shares, deleted[..., None]], -1) / (counts + 1e-6)[:, None, None]


def _one_hot(msa: np.ndarray) -> Tensor:
    return F.one_hot(torch.from_numpy(msa.astype(np.int64)), len(LETTERS)).float()
