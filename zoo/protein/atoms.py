"""Atoms of the backbone from the frames of residues, in Å.

In its residue's frame CA is at the origin, C along x, N in the plane of x and y (AF2 supplement, 1.8.5). Letters:
`zoo/protein/__init__.py`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["CONTACT_ATOMS", "ContactAtoms", "backbone", "frames_of"]

GLYCINE, UNKNOWN = 7, 20  # tokens
# x and y of N, x of C, and CB, for each amino acid in the order of tokens; glycine has alanine's CB, which it lacks
IDEAL = (
    (-0.525, 1.363, 1.526, -0.529, -0.774, -1.205),  # A
    (-0.524, 1.362, 1.525, -0.524, -0.778, -1.209),  # R
    (-0.536, 1.357, 1.526, -0.531, -0.787, -1.200),  # N
    (-0.525, 1.362, 1.527, -0.526, -0.778, -1.208),  # D
    (-0.522, 1.362, 1.524, -0.519, -0.773, -1.212),  # C
    (-0.526, 1.361, 1.526, -0.525, -0.779, -1.207),  # Q
    (-0.528, 1.361, 1.526, -0.526, -0.781, -1.207),  # E
    (-0.572, 1.337, 1.517, -0.529, -0.774, -1.205),  # G
    (-0.527, 1.360, 1.525, -0.525, -0.778, -1.208),  # H
    (-0.493, 1.373, 1.527, -0.536, -0.793, -1.213),  # I
    (-0.520, 1.363, 1.525, -0.522, -0.773, -1.214),  # L
    (-0.526, 1.362, 1.526, -0.524, -0.778, -1.208),  # K
    (-0.521, 1.364, 1.525, -0.523, -0.776, -1.210),  # M
    (-0.518, 1.363, 1.524, -0.525, -0.776, -1.212),  # F
    (-0.566, 1.351, 1.527, -0.546, -0.611, -1.293),  # P
    (-0.529, 1.360, 1.525, -0.518, -0.777, -1.211),  # S
    (-0.517, 1.364, 1.526, -0.516, -0.793, -1.215),  # T
    (-0.521, 1.363, 1.525, -0.523, -0.776, -1.212),  # W
    (-0.522, 1.362, 1.524, -0.522, -0.776, -1.213),  # Y
    (-0.494, 1.373, 1.527, -0.533, -0.795, -1.213),  # V
)
CO, OXYGEN = 1.231, (2.153, -1.062, 0.0)  # Å: the length of C=O, and the position of O at the end of a chain


def ideal(sequence: Tensor, like: Tensor) -> Tensor:
    """N, CA, C and CB (... 4 3) in the frames of residues with tokens (...); alanine if unknown (20 or more)."""
    rows = [((nx, ny, 0.0), (0.0, 0.0, 0.0), (cx, 0.0, 0.0), cb) for nx, ny, cx, *cb in IDEAL]
    return torch.tensor(rows, dtype=like.dtype, device=like.device)[torch.where(sequence < UNKNOWN, sequence, 0)]


class ContactAtoms(nn.Module):
    """The contact atom of each residue (b r x) Å by its frame: CB, CA of glycine.

    An unknown residue's is at the origin of space, as AlphaFold has it: none of its atoms is known.
    """

    def forward(self, rotation: Tensor, translation: Tensor, sequence: Tensor) -> Tensor:
        beta = ideal(sequence, rotation)[..., 3, :] * (sequence != GLYCINE)[..., None]
        return (translation + (rotation @ beta[..., None])[..., 0]) * (sequence < UNKNOWN)[..., None]


CONTACT_ATOMS = "rotation=b r [x y], translation=b r [x], sequence=b r -> b r [x]"


def frames_of(n: Tensor, ca: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """The frames of residues from the positions (... 3) of N, CA and C: algorithm 21. Collinear atoms: any rotation."""
    first = F.normalize(c - ca, dim=-1)
    second = n - ca
    second = F.normalize(second - (first * second).sum(-1, keepdim=True) * first, dim=-1)
    return torch.stack([first, second, torch.linalg.cross(first, second)], -1), ca


def backbone(rotation: Tensor, translation: Tensor, sequence: Tensor, bonded: Tensor) -> Tensor:
    """The positions of N, CA, C, O and CB (r 5 3), for frames (r 3 3) and (r 3) and tokens (r), in Å.

    bonded (r): True if the next residue follows in the same chain. O is then opposite to CA and to the next N, in their
    plane.
    """
    n, ca, c, cb = ideal(sequence, rotation).unbind(1)
    local = torch.stack([n, ca, c, torch.tensor(OXYGEN).to(c).expand_as(c), cb], 1)
    atoms = torch.einsum("ryx,rax->ray", rotation, local) + translation[:, None]
    if len(atoms) > 1:
        n, ca, c = atoms[1:, 0], atoms[:-1, 1], atoms[:-1, 2]
        away = F.normalize(F.normalize(c - ca, dim=-1) + F.normalize(c - n, dim=-1), dim=-1)
        atoms[:-1, 3] = torch.where(bonded[:-1, None], c + CO * away, atoms[:-1, 3])
    return atoms
