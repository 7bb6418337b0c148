"""Layers that the models share: plain PyTorch with no buffers, so that a model built on meta needs only its weights.

Letters: b batch, t frames, s patches of a frame (row by row), c channels, l text tokens.
"""

import math
import re
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor, nn

from zoo.attention import CrossAttention, LowRankAttention, SelfAttention


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


def init_linear(model: nn.Module) -> None:
    """Xavier-uniform weights and zero biases in every linear layer, the start of DiT and of all that follow it."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)


def init_zero(*layers: nn.Linear) -> None:
    """Zero weights and biases, so that the layers add nothing to a residual at first."""
    for layer in layers:
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)


def init_embeddings(*modules: nn.Module | None) -> None:
    """Weights at std 0.02 in every linear layer and table of embeddings, as in DiT; None is skipped."""
    for module in modules:
        for layer in () if module is None else module.modules():
            if isinstance(layer, nn.Linear | nn.Embedding):
                nn.init.normal_(layer.weight, std=0.02)


def init_modulation(model: nn.Module) -> None:
    """Tables of adaLN-single at std 1/sqrt(c), as in PixArt-alpha; linear layers of adaLN-Zero, and all gates, at zero.

    Norms and low-rank attention initialise themselves.
    """
    for module in model.modules():
        if isinstance(module, ScaleShiftTable):
            nn.init.normal_(module.table, std=module.table.shape[-1] ** -0.5)
        elif isinstance(module, ScaleShiftLinear):
            init_zero(module.linear)
        elif isinstance(module, nn.LayerNorm | nn.RMSNorm | LowRankAttention):
            module.reset_parameters()


def text_outputs(model: nn.Module) -> list[nn.Linear]:
    """The last layer of every attention to text, which starts at zero in PixArt-alpha and its followers."""
    return [module.out for module in model.modules() if isinstance(module, CrossAttention)]


def truncated_normal(weight: Tensor, std: float) -> None:
    """Draw normal numbers cut off at two standard deviations; ``std`` is the deviation after the cut.

    Computed by the inverse of the distribution function: torch's loop until all numbers are within needs data.
    """
    inside = math.erf(math.sqrt(2))
    weight.uniform_(-inside, inside).erfinv_().mul_(math.sqrt(2) * std / 0.87962566103423978)


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


def expect(name: str, given: Tensor | None, wanted: bool, built: str) -> None:
    """Raise ValueError unless a forward gets exactly the conditioning that its model was built for."""
    if wanted != (given is not None):
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


# Stages: each takes and returns the residual, so that nothing else crosses a stage's boundary


class Block(nn.Module):
    """A transformer block on (b t s c), which attends within frames (``over="s"``) or across them (``over="t"``).

    Modulated attention, attention to text (if ``text``; without norm or gate), modulated MLP. ``modulation`` turns
    ``cond`` (b k) into shift, scale and gate of both modulated sublayers, and ``clean`` (b k) into those of the frames
    where ``x_mask`` (b t) is False. ``positions`` adds the temporal table first, unless there is only one frame, an
    image. ``options`` are those of the attention.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        over: str,
        modulation: nn.Module,
        text: bool = False,
        positions: bool = False,
        **options: Any,
    ):
        super().__init__()
        self.positions = positions
        self.modulation = modulation
        self.attention = SelfAttention(dim, heads, over, **options)
        self.cross = CrossAttention(dim, heads) if text else None
        self.mlp = MLP(dim, 4 * dim)

    def forward(
        self,
        x: Tensor,
        cond: Tensor,
        context: Tensor | None = None,
        mask: Tensor | None = None,
        clean: Tensor | None = None,
        x_mask: Tensor | None = None,
    ) -> Tensor:
        modulation = self.modulation(cond), None if clean is None else self.modulation(clean)
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = split_modulation(*modulation, x_mask)
        if self.positions and x.shape[1] > 1:
            x = add_time(x)
        x = x + gate * self.attention(modulate(norm(x), shift, scale))
        if self.cross is not None:
            assert context is not None
            x = x + self.cross(x, context, mask)
        return x + gate_mlp * self.mlp(modulate(norm(x), shift_mlp, scale_mlp))


class ModulatedNorm(nn.Module):
    """The common input of parallel attentions: norm and modulation of (b ... c); ``cond`` as in Block."""

    def __init__(self, modulation: nn.Module):
        super().__init__()
        self.modulation = modulation  # makes 2 rows

    def forward(self, x: Tensor, cond: Tensor) -> Tensor:
        return modulate(norm(x), *split_modulation(self.modulation(cond), dims=x.ndim - 2))


class FusedMLP(nn.Module):
    """The end of parallel attentions: their sum ``y``, gated, is added to x (b ... c); then a modulated MLP.

    With ``heads``, attention to text comes between the two, as in Block.
    """

    def __init__(self, dim: int, modulation: nn.Module, heads: int | None = None):
        super().__init__()
        self.modulation = modulation  # makes 4 rows
        self.cross = None if heads is None else CrossAttention(dim, heads)
        self.mlp = MLP(dim, 4 * dim)

    def forward(
        self, x: Tensor, y: Tensor, cond: Tensor, context: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        gate, shift_mlp, scale_mlp, gate_mlp = split_modulation(self.modulation(cond), dims=x.ndim - 2)
        x = x + gate * y
        if self.cross is not None:
            assert context is not None
            x = x + self.cross(x, context, mask)
        return x + gate_mlp * self.mlp(modulate(norm(x), shift_mlp, scale_mlp))


class PatchEmbed(nn.Module):
    """Latent video (b i t h w) to tokens (b t s c) with the 2-D sincos table of their position in the frame.

    Frames are padded at the bottom and the right to whole patches. The table's first half of channels encodes the
    column, its second half the row. ``sample_size`` stretches the positions of any frame over the grid of a square
    frame with sides of that many cells, as diffusers' models do. Without it positions count patches, or are ``stride``
    (b 2) apart: the distance of each sample's rows, then of its columns.
    """

    def __init__(self, in_channels: int, dim: int, patch: tuple[int, int, int], sample_size: int | None = None):
        super().__init__()
        self.patch = patch[1:]
        self.sample_size = sample_size
        self.proj = nn.Linear(in_channels * math.prod(patch), dim)

    def forward(self, x: Tensor, stride: Tensor | None = None) -> Tensor:
        p, q = self.patch
        x = F.pad(x, (0, -x.shape[-1] % q, 0, -x.shape[-2] % p))
        height, width = x.shape[-2] // p, x.shape[-1] // q
        x = rearrange(x, "b i t (h p) (w q) -> b t (h w) (i p q)", p=p, q=q)
        x = self.proj(x.to(self.proj.weight.dtype))
        down, right = self.positions(height, p, x.device), self.positions(width, q, x.device)
        if stride is not None:
            down, right = stride[:, :1] * down, stride[:, 1:] * right
        down, right = (sincos(places, x.shape[-1] // 2) for places in (down, right))
        right, down = (
            repeat(right, "... w c -> ... 1 (h w) c", h=height),
            repeat(down, "... h c -> ... 1 (h w) c", w=width),
        )
        return x + torch.cat([right, down], dim=-1).to(x.dtype)

    def positions(self, count: int, patch: int, device: torch.device) -> Tensor:
        places = torch.arange(count, dtype=torch.float32, device=device)
        if self.sample_size is None:
            return places
        return places / (count / (self.sample_size // patch)) / max(self.sample_size // 64, 1)


class FinalLinear(nn.Module):
    """A token (b t s c) to the values of its patch (b t s k): norm, modulation, linear.

    Frames where ``x_mask`` (b t) is False are normalised and modulated a second time, with ``clean`` (b k), as in
    Open-Sora, whose weights were trained so.
    """

    def __init__(self, dim: int, out_channels: int, patch: tuple[int, int, int], modulation: nn.Module):
        super().__init__()
        self.patch = patch[1:]
        self.modulation = modulation
        self.linear = nn.Linear(dim, out_channels * math.prod(patch))

    def forward(self, x: Tensor, cond: Tensor, clean: Tensor | None = None, x_mask: Tensor | None = None) -> Tensor:
        dims = x.ndim - 2
        x = modulate(norm(x), *split_modulation(self.modulation(cond), dims=dims))
        if x_mask is not None:
            conditioned = modulate(norm(x), *split_modulation(self.modulation(clean), dims=dims))
            x = torch.where(x_mask[:, :, None, None], x, conditioned)
        return self.linear(x)


def unpatchify(x: Tensor, patch: tuple[int, ...], size: tuple[int, int]) -> Tensor:
    """The values of all patches, (b t s k) or (b t h w k), as frames (b o t h w) of ``size``, padding cut off."""
    (p, q), (height, width) = patch[-2:], size
    tokens = "(h w)" if x.ndim == 4 else "h w"
    x = rearrange(x, f"b t {tokens} (p q o) -> b o t (h p) (w q)", h=-(-height // p), p=p, q=q)
    return x if x.shape[-2:] == size else x[..., :height, :width]


# What the video models share around their layers


def tensor_parallel(model: nn.Module, *stacks: str) -> dict[str, str]:
    """The linear layers in ``stacks`` of a model that may be sharded over ranks: path (`*`: any number) -> how."""
    cuts = {}
    for stack in stacks:
        for path, module in model.get_submodule(stack).named_modules(prefix=stack):
            for name, how in getattr(module, "tensor_parallel", {}).items():
                cuts[re.sub(r"\.\d+(?=\.|$)", ".*", f"{path}.{name}")] = how
    return cuts


@dataclass(frozen=True)
class VideoConfig:
    """The options that transformers of video share, with values of the XL sizes; every model's Config adds its own."""

    hidden: int = 1152
    depth: int = 28
    heads: int = 16
    patch: tuple[int, int, int] = (1, 2, 2)
    in_channels: int = 4

    def __post_init__(self) -> None:
        object.__setattr__(self, "patch", tuple(self.patch))
        check_shape(self.hidden, self.heads, self.patch)

    @property
    def out_channels(self) -> int:
        """in_channels, doubled if the model also predicts a variance, less those that only condition."""
        times = 2 if getattr(self, "learn_sigma", False) else 1
        return times * self.in_channels - getattr(self, "condition_channels", 0)


def check_shape(hidden: int, heads: int, patch: tuple[int, int, int]) -> None:
    """Refuse sizes that the layers above cannot have."""
    if hidden % heads:
        raise ValueError(f"hidden={hidden} does not divide into heads={heads}")
    if hidden % 4:
        raise ValueError(f"hidden={hidden}: the 2-D sincos table needs a multiple of 4")
    if patch[0] != 1:
        raise ValueError(f"patch={patch}: frames are embedded one at a time, so its first number is 1")


def video_inputs(
    batch: int, channels: int, frames: int, height: int, width: int, classes: int = 0, text: tuple[int, int] = (0, 0)
) -> dict[str, Tensor]:
    """Random forward arguments of a video model on the default device; ``text`` is (tokens, channels)."""
    inputs = {"x": torch.randn(batch, channels, frames, height, width), "timestep": torch.rand(batch) * 1000}
    if classes:
        inputs["label"] = torch.randint(classes, (batch,))
    if all(text):
        inputs["context"] = torch.randn(batch, *text)
        lengths = text[0] - torch.arange(batch) % text[0]  # captions of several lengths
        inputs["context_mask"] = torch.arange(text[0]) < lengths[:, None]
    return inputs
