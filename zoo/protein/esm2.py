"""ESM-2, a language model of single proteins (Lin et al. 2023), and the contacts that its attention shows.

Contacts (Rao et al. 2021): a logistic regression on the attention maps of all layers and heads, each made symmetric and
freed of what rows and columns have in common (APC). It is linear in the maps, so a layer adds its part and keeps none.

Letters: b batch, n places (residues between a begin and an end), c channels, h heads, e channels of a head, i j
residues.
"""

from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor, nn

from zoo.attention import turn
from zoo.layers import MLP

TOKENS = ("<cls>", "<pad>", "<eos>", "<unk>", *"LAGVSERTIDPKQNFYWMHCXBUZO.-", "<null_1>", "<mask>")
MASKED = 0.15 * 0.8  # share of the residues that were replaced by a mask in training: without any, embeddings shrink


@dataclass(frozen=True)
class Config:
    hidden: int = 1280
    depth: int = 33
    heads: int = 20
    mlp: int = 5120
    tokens: int = len(TOKENS)
    eps: float = 1e-5

    def __post_init__(self) -> None:
        if self.hidden % self.heads or self.hidden // self.heads % 2:
            raise ValueError(f"hidden={self.hidden} in heads={self.heads}: expected an even number of channels a head")


class AttentionInputs(nn.Module):
    """Queries, keys and values (b n h e) of (b n c); queries and keys are scaled, then rotated by ``rope`` (n e)."""

    def __init__(self, dim: int, heads: int, eps: float):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(dim, eps=eps)
        self.qkv = nn.Linear(dim, 3 * dim)

    def forward(self, x: Tensor, rope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = rearrange(self.qkv(self.norm(x)), "b n (p h e) -> p b n h e", p=3, h=self.heads)
        sin, cos = rope[:, None].chunk(2, dim=-1)
        return turn(q * q.shape[-1] ** -0.5, sin, cos, "halves"), turn(k, sin, cos, "halves"), v


class Attention(nn.Module):
    """Attention as SDPA does not give it: the values' averages (b n h e), and the maps (b h n m) themselves."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        maps = torch.einsum("bnhe,bmhe->bhnm", q, k).softmax(-1)
        return torch.einsum("bhnm,bmhe->bnhe", maps, v), maps


class AttentionOutputs(nn.Module):
    """The rest of a layer after attention ``y`` (b n h e): its residual, then the MLP's."""

    def __init__(self, dim: int, mlp: int, eps: float):
        super().__init__()
        self.out = nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim, eps=eps)
        self.mlp = MLP(dim, mlp, activation=nn.GELU())

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x + self.out(y.flatten(-2))
        return x + self.mlp(self.norm(x))


class CorrectedMaps(nn.Module):
    """Attention maps (b h n m) without begin and end, symmetric, after APC: (b h i j)."""

    def forward(self, maps: Tensor) -> Tensor:
        a = maps[..., 1:-1, 1:-1]
        a = a + a.mT
        return a - a.sum(-1, keepdim=True) * a.sum(-2, keepdim=True) / a.sum((-1, -2), keepdim=True)


class WeightedSum(nn.Module):
    """The sum of maps (b h i j) by ``weight`` (h): (b i j)."""

    def forward(self, maps: Tensor, weight: Tensor) -> Tensor:
        return torch.einsum("bhij,h->bij", maps, weight)


class Layer(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.queries = AttentionInputs(config.hidden, config.heads, config.eps)
        self.attention, self.maps, self.sum = Attention(), CorrectedMaps(), WeightedSum()
        self.update = AttentionOutputs(config.hidden, config.mlp, config.eps)

    def forward(self, x: Tensor, rope: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        y, maps = self.attention(*self.queries(x, rope))
        return self.update(x, y), self.sum(self.maps(maps), weight)


class ESM2(nn.Module):
    """``forward(tokens)``: tokens (b n), with begin and end -> the probability of contact of each pair (b i j).

    Sequences without masks or padding. Heads are independent: a rank has the maps of some, and adds what they show.
    """

    stages = {
        "": "tokens=b n -> b i j",
        "embed": "b n -> b n [c]",
        "layers.*.queries": "b n [c], rope=n [e] -> b n h [e], b n h [e], b n h [e]",
        "layers.*.attention": "b [n] h [e], b [n] h [e], b [n] h [e] -> b [n] h [e], b h [n m]",
        "layers.*.maps": "b h [n m] -> b h [i j]",
        "layers.*.sum": "b +h i j, weight=+h -> b i j",
        "layers.*.update": "b n [c], y=b n [h e]",
    }

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.tokens, config.hidden)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.depth))
        self.regression = nn.Linear(config.depth * config.heads, 1)
        # published with the weights, some of them in rounded numbers
        self.frequencies = nn.Buffer(torch.empty(config.hidden // config.heads // 2))

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], dtype=torch.float32, device=tokens.device)
        angles = places[:, None] * self.frequencies.float()
        rope = torch.cat([angles.sin(), angles.cos()], dim=-1)
        weights = self.regression.weight.view(self.config.depth, self.config.heads)
        x, logits = self.embed(tokens) * (1 - MASKED), self.regression.bias
        for layer, weight in zip(self.layers, weights):
            x, shown = layer(x, rope, weight)
            logits = logits + shown
        return logits.sigmoid()


def encode(sequence: str, device: torch.device | None = None) -> Tensor:
    """A sequence of residues as tokens (1 n), with begin and end; letters that ESM-2 lacks are unknown ("X")."""
    letters = ["<cls>", *(letter if letter in TOKENS else "X" for letter in sequence), "<eos>"]
    return torch.tensor([[TOKENS.index(letter) for letter in letters]], device=device)
