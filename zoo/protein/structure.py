"""The structure module of AlphaFold 2: a backbone frame for each residue, from single residues and pairs.

A frame is a rotation (b r 3 3) and a translation (b r 3) in Å: the orientation of N and C around Cα, and its position.
All residues start at the origin. Each iteration has the same weights: residues attend to each other by features and by
points in space (invariant point attention), then every frame takes a step in its own coordinates, so that a prediction
is independent of the axes of space. Side chains are not predicted.

Jumper et al. 2021, supplement, algorithms 20, 22, 23 and 29.

Letters: `zoo/protein/__init__.py`.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from zoo.protein.layers import CHUNK, MASKED, Linear, checkpointed, concat

__all__ = ["StructureModule"]

UNIT = 10.0  # Å: the unit of translations inside the module
LDDT_BINS = 50


class InvariantPointAttention(nn.Module):
    """Attention of residues s (b i c) to all residues, ``context`` (b j c), by pairs (b i j d) and points in space.

    Every head projects a few points of each residue, in the residue's frame; residues with near points attend to each
    other (algorithm 22). Returns s plus its update. At most ``chunk`` logits exist at once.
    """

    def __init__(self, c_s: int, c_z: int, heads: int, head_dim: int, points: int, value_points: int, chunk: int):
        super().__init__()
        self.heads, self.points, self.value_points, self.chunk = heads, points, value_points, chunk
        width = heads * head_dim
        self.q = Linear(c_s, width)
        self.kv = Linear(c_s, 2 * width)
        self.q_points = Linear(c_s, 3 * heads * points)
        self.kv_points = Linear(c_s, 3 * heads * (points + value_points))
        self.bias = Linear(c_z, heads)
        self.head_weights = nn.Parameter(torch.empty(heads))
        self.out = Linear(heads * (head_dim + 4 * value_points + c_z), c_s, start="zero")
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        nn.init.constant_(self.head_weights, math.log(math.e - 1))  # softplus of them is 1

    def forward(
        self, s: Tensor, context: Tensor, pair: Tensor, rotation: Tensor, translation: Tensor, rotations: Tensor,
        translations: Tensor, mask: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        k, v = rearrange(self.kv(context), "b j (h p e) -> p b h j e", p=2, h=self.heads)
        points = rearrange(self.kv_points(context), "b j (x h p) -> b j (h p) x", x=3, h=self.heads)
        points = rearrange(to_global(points, rotations, translations), "b j (h p) x -> b h j p x", h=self.heads)
        k_points, v_points = points.split([self.points, self.value_points], 3)
        rows = max(1, self.chunk // (len(s) * self.heads * context.shape[1]))
        parts = zip(*(x.split(rows, 1) for x in (s, pair, rotation, translation)))
        return concat([checkpointed(self.attend_rows, *part, k, v, k_points, v_points, mask) for part in parts], 1)

    def attend_rows(
        self, s: Tensor, pair: Tensor, rotation: Tensor, translation: Tensor, k: Tensor, v: Tensor, k_points: Tensor,
        v_points: Tensor, mask: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """The attention of some of the residues s to the keys and values (b h j ...) of all residues."""
        q = rearrange(self.q(s), "b i (h e) -> b h i e", h=self.heads)
        points = rearrange(self.q_points(s), "b i (x h p) -> b i (h p) x", x=3, h=self.heads)
        points = rearrange(to_global(points, rotation, translation), "b i (h p) x -> b h i (p x)", h=self.heads)
        keys = k_points.flatten(3)
        squares = points.square().sum(-1)[..., None] + keys.square().sum(-1)[..., None, :] - 2 * points @ keys.mT
        weight = F.softplus(self.head_weights.to(squares.dtype)) * (2 / (9 * self.points)) ** 0.5
        logits = (q @ k.mT) * q.shape[-1] ** -0.5 + rearrange(self.bias(pair), "b i j h -> b h i j")
        logits = (logits.to(squares.dtype) - 0.5 * weight[:, None, None] * squares) * 3**-0.5
        if mask is not None:
            logits = logits + MASKED * (1 - mask.to(logits.dtype))[:, None, None]
        a = logits.softmax(-1)
        attended = rearrange(a @ v_points.flatten(3), "b h i (p x) -> b i (h p) x", x=3)
        attended = torch.einsum("biyx,bipy->bipx", rotation, attended - translation[:, :, None])
        lengths = (attended.square().sum(-1) + 1e-8).sqrt()
        a = a.to(v.dtype)
        of_pairs = torch.einsum("bhij,bijd->bihd", a, pair)
        features = [rearrange(a @ v, "b h i e -> b i (h e)"), rearrange(attended, "b i p x -> b i (x p)"), lengths]
        return s + self.out(torch.cat([x.to(s.dtype) for x in (*features, of_pairs.flatten(2))], -1))


def to_global(points: Tensor, rotation: Tensor, translation: Tensor) -> Tensor:
    """Points (b r p x) in the frames of their residues -> their positions in space."""
    return torch.einsum("bryx,brpx->brpy", rotation, points.to(rotation.dtype)) + translation[:, :, None]


class BackboneUpdate(nn.Module):
    """The transition of s (b r c) after attention, and a step of each frame in its coordinates (algorithms 20, 23)."""

    def __init__(self, c_s: int, dropout: float):
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.norm = nn.LayerNorm(c_s)
        self.up, self.middle = Linear(c_s, c_s, start="he"), Linear(c_s, c_s, start="he")
        self.down = Linear(c_s, c_s, start="zero")
        self.after = nn.LayerNorm(c_s)
        self.step = Linear(c_s, 6, start="zero")

    def forward(self, s: Tensor, rotation: Tensor, translation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        s = self.norm(self.dropout(s))
        s = s + self.down(self.middle(self.up(s).relu()).relu())
        s = self.after(self.dropout(s))
        turn, shift = self.step(s).to(rotation.dtype).split(3, -1)
        moved = translation + (rotation @ shift[..., None])[..., 0]
        return s, rotation @ rotation_of(turn), moved


def rotation_of(turn: Tensor) -> Tensor:
    """The rotation (... 3 3) of the quaternion (1, turn) after normalisation; turn (... 3)."""
    one = torch.ones_like(turn[..., :1])
    a, b, c, d = F.normalize(torch.cat([one, turn], -1), dim=-1).unbind(-1)
    rows = [
        a * a + b * b - c * c - d * d, 2 * (b * c - a * d), 2 * (b * d + a * c),
        2 * (b * c + a * d), a * a - b * b + c * c - d * d, 2 * (c * d - a * b),
        2 * (b * d - a * c), 2 * (c * d + a * b), a * a - b * b - c * c + d * d,
    ]  # fmt: skip
    return torch.stack(rows, -1).unflatten(-1, (3, 3))


class InitialFrames(nn.Module):
    """Norm and projection of s (b r c); all frames at the origin."""

    def __init__(self, c_s: int):
        super().__init__()
        self.norm = nn.LayerNorm(c_s)
        self.project = Linear(c_s, c_s)

    def forward(self, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.promote_types(s.dtype, torch.float32)
        origin = torch.zeros(*s.shape[:2], 3, dtype=wide, device=s.device)
        rotation = torch.eye(3, dtype=wide, device=s.device).expand(*s.shape[:2], 3, 3)
        return self.project(self.norm(s)), rotation.contiguous(), origin


class Confidence(nn.Module):
    """Logits (b r 50) of the lDDT of each residue (algorithm 29)."""

    def __init__(self, c_s: int, hidden: int = 128):
        super().__init__()
        self.norm = nn.LayerNorm(c_s)
        self.up, self.middle = Linear(c_s, hidden, start="he"), Linear(hidden, hidden, start="he")
        self.out = Linear(hidden, LDDT_BINS, start="zero")

    def forward(self, s: Tensor) -> Tensor:
        return self.out(self.middle(self.up(self.norm(s)).relu()).relu())


class StructureModule(nn.Module):
    """``forward(s, z, mask)`` -> rotation (b l r 3 3), translation (b l r 3) in Å, and logits of lDDT (b r 50)

    s (b r c): single residues; z (b i j d): pairs; mask (b r): False for padding.
    """

    def __init__(
        self, c_s: int, c_z: int, iterations: int, heads: int = 12, dropout: float = 0.1, chunk: int = CHUNK,
        head_dim: int = 16, points: int = 4, value_points: int = 8,
    ):  # fmt: skip
        super().__init__()
        self.iterations = iterations
        self.begin, self.pair_norm = InitialFrames(c_s), nn.LayerNorm(c_z)
        self.attend = InvariantPointAttention(c_s, c_z, heads, head_dim, points, value_points, chunk)
        self.move = BackboneUpdate(c_s, dropout)
        self.confidence = Confidence(c_s)

    @classmethod
    def of(cls, config: Any) -> "StructureModule | None":
        """The structure module of a model with this Config; None if the model has none."""
        sizes = config.structure, config.structure_heads, config.structure_dropout, config.chunk
        return cls(config.c_s, config.c_z, *sizes) if config.structure else None

    def forward(self, s: Tensor, z: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        z = self.pair_norm(z)
        s, rotation, translation = self.begin(s)
        frames = []
        for _ in range(self.iterations):
            rotation = rotation.detach()  # gradients reach earlier rotations only through translations
            s = self.attend(s, s, z, rotation, translation, rotation, translation, mask)
            s, rotation, translation = self.move(s, rotation, translation)
            frames.append((rotation, translation))
        rotations, translations = zip(*frames)
        return torch.stack(rotations, 1), UNIT * torch.stack(translations, 1), self.confidence(s)


STRUCTURE = {
    "begin": "b r [c] -> b r [c], b r [x y], b r [x]",
    "pair_norm": "b i j [c]",
    "attend": "b i [c], context=b [j c], pair=b i [j d], rotation=b i [x y], translation=b i [x], "
    "rotations=b [j x y], translations=b [j x], mask=b [j] -> b i [c]",
    "move": "b i [c], rotation=b i [x y], translation=b i [x] -> b i [c], b i [x y], b i [x]",
    "confidence": "b r [c] -> b r [v]",
}
