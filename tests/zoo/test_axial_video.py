"""Axial video models against diffusers' DiT with its blocks turned to one axis, and the package axial-attention."""

import pytest
import torch
from einops import rearrange, repeat
from torch import nn

import zoo
from tests.support.latte_oracles import DTYPES, LAYERS, Parts, attention, dit_names, dit_oracle, number_frames
from tests.support.oracles import agree, copy_weights, frame_by_frame, randomise
from zoo.video.axial import AXES

TURNED = {"t": "(b h w) t c", "h": "(b t w) h c", "w": "(b t h) w c"}
FRAMES = "(b t) (h w) c"


def turn(block, axis, frames, side):
    """A block on ((b t) (h w) c) sees one axis as its tokens."""
    sizes = {"t": frames, "h": side, "w": side}

    def to_axis(block, args, kwargs):
        x = rearrange(args[0], f"{FRAMES} -> {TURNED[axis]}", **sizes)
        for key in ("timestep", "class_labels"):
            kwargs[key] = repeat(kwargs[key][::frames], "b -> (b n)", n=frames * side * side // sizes[axis])
        return (x,), kwargs

    block.register_forward_pre_hook(to_axis, with_kwargs=True)
    block.register_forward_hook(lambda block, args, out: rearrange(out, f"{TURNED[axis]} -> {FRAMES}", **sizes))


class Axes(nn.Module):
    """Attention along every axis of ((b t) (h w) c), added up."""

    def __init__(self, frames, side):
        super().__init__()
        self.sizes, self.axes = {"t": frames, "h": side, "w": side}, nn.ModuleList(attention(4) for _ in AXES)

    def forward(self, x, **_):
        return sum(
            rearrange(one(rearrange(x, f"{FRAMES} -> {to}", **self.sizes)), f"{to} -> {FRAMES}", **self.sizes)
            for one, to in zip(self.axes, TURNED.values())
        )


def oracle_of(order, frames, size):
    oracle = dit_oracle(frames, size, classes=5, turned=False, layers=6 if order == "sequential" else 2)
    blocks = oracle.transformer_blocks
    number_frames(blocks[0], frames)
    for i, block in enumerate(blocks):
        if order == "sequential":
            turn(block, [*AXES][i % 3], frames, size // 2)
        else:
            block.attn1, block.norm1.linear = Axes(frames, size // 2), Parts(2, 4)
    randomise(oracle)
    return oracle.eval()


def names(name):
    """The oracle's parameters from ours."""
    head, *path = name.split(".")
    if head != "blocks":
        return dit_names(name)
    i, kind, *path, layer, suffix = path
    if kind in AXES and path:  # in sequence
        block = f"transformer_blocks.{3 * int(i) + [*AXES].index(kind)}"
        module = {"attention": "attn1.", "mlp": "ff."}.get(path[0])
        return (
            [f"{block}.{module}{n}.{suffix}" for n in LAYERS[layer]] if module else [f"{block}.norm1.linear.{suffix}"]
        )
    block = f"transformer_blocks.{i}"
    if "modulation" in path:
        return [f"{block}.norm1.linear.parts.{['norm', 'fused'].index(kind)}.{suffix}"]
    module = f"attn1.axes.{[*AXES].index(kind)}" if kind in AXES else "ff"
    return [f"{block}.{module}.{n}.{suffix}" for n in LAYERS[layer]]


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize(("batch", "frames", "size"), [(2, 7, 8), (1, 3, 6)])
@pytest.mark.parametrize("order", ["sequential", "summed"])
def test_models_agree_with_blocks_of_diffusers(order, batch, frames, size, dtype, tolerance):
    torch.manual_seed(0)
    oracle = oracle_of(order, frames, size).to(dtype)
    options = {"in_channels": 3, "learn_sigma": True, "num_classes": 5}
    model = zoo.create("axial_video", "test", order=order, **options).to(dtype)
    copy_weights(model, oracle, names)
    timestep, label = torch.randint(1000, (batch,)), torch.tensor([2, 5])[:batch]

    def run_oracle(oracle, x):
        return frame_by_frame(oracle, x, timestep, label)

    x = torch.randn(batch, 3, frames, size, size, dtype=dtype)
    agree(model, oracle, names, lambda model, x: model(x, timestep.float(), label), run_oracle, x, tolerance)
