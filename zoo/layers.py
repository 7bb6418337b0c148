"""Layers that the models share: plain PyTorch with no buffers, so that a model built on meta needs only its weights.

Letters: b batch, t frames, s patches of a frame (row by row), c channels, l text tokens.
"""

import math
import re

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MLP(nn.Module):
    """Two linear layers with an activation between them, tanh-GELU by default."""

    def __init__(self, dim: int, hidden: int, out: int | None = None, activation: nn.Module | None = None):
        super().__init__()
        self.up = nn.Linear(dim, hidden)
        self.activation = nn.GELU(approximate="tanh") if activation is None else activation
        self.down = nn.Linear(hidden, dim if out is None else out)
        self.tensor_parallel = {"up": "columns", "down": "rows"}

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))


# Positions: computed in every forward, which costs little next to a block and works for any length on any device


def sincos(positions: Tensor, dim: int) -> Tensor:
    """Sines, then cosines, of positions (...) at dim/2 frequencies 10000^(-2k/dim), in float64 -> float32 (... dim)."""
    steps = torch.arange(dim // 2, dtype=torch.float64, device=positions.device)
    angles = positions.double()[..., None] * (1.0 / 10000 ** (steps / (dim / 2)))
    return torch.cat([angles.sin(), angles.cos()], dim=-1).float()


def add_time(x: Tensor, scale: float = 1.0) -> Tensor:
    """Add the sincos table of the frame number over ``scale`` to (b t s c), which must hold all its frames."""
    frames = torch.arange(x.shape[1], dtype=torch.float64, device=x.device)
    return x + sincos(frames / scale, x.shape[-1]).to(x.dtype)[:, None]


# Conditioning


def sinusoids(x: Tensor, count: int) -> Tensor:
    """Cosines, then sines, of x (...) at count/2 frequencies from 1 down to 1/10000, in float32 -> (... count)."""
    steps = torch.arange(count // 2, dtype=torch.float32, device=x.device)
    angles = x.float()[..., None] * torch.exp(-math.log(10000) * steps / (count // 2))
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


class TimestepEmbed(nn.Module):
    """Diffusion timesteps (...), on the scale 0 to 1000, to (... c): sinusoids, then an MLP (DiT, section 3)."""

    def __init__(self, dim: int, frequencies: int = 256):
        super().__init__()
        self.frequencies = frequencies
        self.mlp = MLP(frequencies, dim, dim, activation=nn.SiLU())

    def forward(self, timestep: Tensor) -> Tensor:
        return self.mlp(sinusoids(timestep, self.frequencies).to(self.mlp.up.weight.dtype))


class LabelEmbed(nn.Module):
    """Class labels (b) to (b c). The last row, label ``num_classes``, is the null class of classifier-free guidance."""

    def __init__(self, num_classes: int, dim: int):
        super().__init__()
        self.table = nn.Embedding(num_classes + 1, dim)

    def forward(self, label: Tensor) -> Tensor:
        return self.table(label)


class ScaleShiftTable(nn.Module):
    """adaLN-single (PixArt-alpha, section 2.3): a table (k c) of this layer, added to what the model computes once.

    (b k*c), or (b c) for all rows alike -> (b k c).
    """

    def __init__(self, dim: int, rows: int):
        super().__init__()
        self.table = nn.Parameter(torch.empty(rows, dim))

    def forward(self, cond: Tensor) -> Tensor:
        return self.table + cond.unflatten(-1, (-1, self.table.shape[-1]))


class ScaleShiftLinear(nn.Module):
    """adaLN-Zero (DiT, section 3.2): SiLU and a linear layer, (b c) -> (b k c)."""

    def __init__(self, dim: int, rows: int):
        super().__init__()
        self.rows = rows
        self.linear = nn.Linear(dim, rows * dim)

    def forward(self, cond: Tensor) -> Tensor:
        return self.linear(F.silu(cond)).unflatten(-1, (self.rows, -1))


def expect(name: str, value: Tensor | None, wanted: bool, built: str) -> None:
    """Raise ValueError unless a forward gets exactly the conditioning that its model was built for."""
    if wanted != (value is not None):
        raise ValueError(f"a model built with {built} {'needs' if wanted else 'takes no'} {name}")


def norm(x: Tensor) -> Tensor:
    """LayerNorm over c without an affine part: the modulation is its affine part."""
    return F.layer_norm(x, x.shape[-1:], eps=1e-6)


def split_modulation(
    modulation: Tensor, clean: Tensor | None = None, x_mask: Tensor | None = None, dims: int = 2
) -> tuple[Tensor, ...]:
    """The rows of (b k c), each (b 1 ... 1 c): shift, scale, gate in this order, for one sublayer after another.

    ``dims`` is the number of dims between b and c of the modulated tensor; (b ... k c), with all these dims, has rows
    for each position. With ``x_mask`` (b t) each row is (b t 1 ... c): frames where the mask is False have the rows of
    ``clean`` (b k c).
    """
    if modulation.ndim == 3 + dims:
        return modulation.unbind(-2)
    modulation = modulation[:, None]
    if x_mask is not None:
        assert clean is not None
        modulation = torch.where(x_mask[:, :, None, None], modulation, clean[:, None])
    return modulation.unflatten(-1, [1] * (dims - 1) + [-1]).unbind(2)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale) + shift


def tensor_parallel(model: nn.Module, *stacks: str) -> dict[str, str]:
    """The linear layers in ``stacks`` of a model that may be sharded over ranks: path (`*`: any number) -> its cut."""
    cuts = {}
    for stack in stacks:
        for path, module in model.get_submodule(stack).named_modules(prefix=stack):
            for name, cut in getattr(module, "tensor_parallel", {}).items():
                cuts[re.sub(r"\.\d+(?=\.|$)", ".*", f"{path}.{name}")] = cut
    return cuts
