"""Helpers of the video models' tests: taking the weights of an independent implementation, and comparing."""

import warnings
from collections.abc import Callable, Mapping

import torch
from einops import rearrange, repeat
from torch import Tensor, nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import diffusers
    from diffusers.models.attention_processor import Attention
    from diffusers.models.embeddings import get_1d_sincos_pos_embed_from_grid, get_2d_sincos_pos_embed_from_grid

__all__ = [
    "Attention", "agree", "copy_weights", "diffusers", "frame_by_frame", "frame_table", "randomise", "raw_positions",
    "to_frames",
]  # fmt: skip

Names = Callable[[str], list[str]]  # a parameter of ours -> the oracle's that it stacks along dim 0


def randomise(model: nn.Module) -> None:
    """Published initialisations are zero where it matters: give every parameter a say."""
    for param in model.parameters():
        nn.init.normal_(param, std=0.3 if param.ndim == 1 else param[0].numel() ** -0.5)


def copy_weights(model: nn.Module, oracle: nn.Module, names: Names) -> None:
    theirs = dict(oracle.named_parameters())
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(torch.cat([theirs[n] for n in names(name)]).reshape(param.shape))


def agree(
    model: nn.Module,
    oracle: nn.Module,
    names: Names,
    run: Callable[[nn.Module, Tensor], Tensor],
    run_oracle: Callable[[nn.Module, Tensor], Tensor],
    x: Tensor,
    tolerance: float,
    unused: tuple[str, ...] = (),
) -> None:
    """Output, gradient of the input and all gradients agree; every oracle parameter but ``unused`` has one of ours."""
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    out, wanted = run(model, ours), run_oracle(oracle, theirs)
    assert out.shape == wanted.shape
    assert wanted.std() > 0.1
    close(out, wanted, tolerance, "output")

    weight = torch.randn_like(wanted)
    (out * weight).mean().backward()
    (wanted * weight).mean().backward()
    assert ours.grad is not None
    close(ours.grad, theirs.grad, tolerance, "x")
    grads: Mapping[str, Tensor | None] = {name: param.grad for name, param in oracle.named_parameters()}
    seen = set()
    for name, param in model.named_parameters():
        assert param.grad is not None, name
        seen.update(names(name))
        close(param.grad, torch.cat([grads[n] for n in names(name)]).reshape(param.shape), tolerance, name)
    assert {n for n in grads if not n.startswith(unused or ("\0",))} == seen


def close(ours: Tensor, theirs: Tensor, tolerance: float, what: str) -> None:
    assert theirs.abs().max() > 0, what
    error = ((ours - theirs).abs().max() / theirs.abs().max()).item()
    assert error < tolerance, f"{what}: relative error {error:.1e}"


def to_frames(x: Tensor) -> Tensor:
    return rearrange(x, "b c t h w -> (b t) c h w")


def frame_by_frame(oracle: nn.Module, x: Tensor, timestep: Tensor, label: Tensor) -> Tensor:
    """A model of images on all frames of clips, which have their timestep and label."""
    steps, labels = (repeat(y, "b -> (b t)", t=x.shape[2]) for y in (timestep, label))
    return rearrange(oracle(to_frames(x), steps, labels).sample, "(b t) o h w -> b o t h w", t=x.shape[2])


def raw_positions(oracle: nn.Module, height: int, width: int) -> None:
    """Make a diffusers PatchEmbed number its patches, instead of stretching them over the grid it was built for."""
    embed = oracle.pos_embed
    grid = torch.stack(torch.meshgrid(torch.arange(width).float(), torch.arange(height).float(), indexing="xy"))
    table = get_2d_sincos_pos_embed_from_grid(embed.proj.out_channels, grid, output_type="pt")
    embed.height, embed.width = height, width
    embed.pos_embed = table.float()[None].to(embed.proj.weight.dtype)


def frame_table(frames: int, dim: int) -> Tensor:
    return get_1d_sincos_pos_embed_from_grid(dim, torch.arange(frames), output_type="pt").float()
