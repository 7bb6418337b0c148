"""Latte's variants 2 to 4, which nobody released: diffusers' blocks arranged as the paper's figure 2 arranges them."""

import pytest
import torch
from diffusers.models.attention import FeedForward
from diffusers.models.normalization import AdaLayerNormZeroSingle
from einops import rearrange
from torch import nn

import zoo
from tests.support.latte_oracles import (
    DTYPES,
    HEADS,
    LAYERS,
    WIDTH,
    Parts,
    attention,
    dit_names,
    dit_oracle,
    number_frames,
    text_oracle,
    turn,
)
from tests.support.oracles import agree, copy_weights, frame_by_frame, frame_table, randomise
from zoo.video.latte import diffusers_names


def across(attend, x, frames):
    """``attend`` from frame to frame of ((b t) s c)."""
    y = attend(rearrange(x, "(b t) s c -> (b s) t c", t=frames))
    return rearrange(y, "(b s) t c -> (b t) s c", s=x.shape[1])


class Skip(nn.Module):
    def forward(self, x, *_, **__):
        return x


class SingleNorm(nn.Module):
    """adaLN-single for one sublayer: the interface of AdaLayerNormZeroSingle."""

    def __init__(self):
        super().__init__()
        self.table, self.norm = nn.Parameter(torch.empty(3, WIDTH)), nn.LayerNorm(WIDTH, 1e-6, False)

    def forward(self, x, cond):
        shift, scale, gate = (self.table + cond.unflatten(-1, (3, WIDTH))).unbind(1)
        return self.norm(x) * (1 + scale[:, None]) + shift[:, None], gate


class ThreeSublayers(nn.Module):
    """Variant 3's block, with adaLN-Zero from the embedding ``emb`` or with adaLN-single and text."""

    def __init__(self, frames, first, emb=None):
        super().__init__()
        self.frames, self.text = frames, emb is None
        self.space, self.time = attention(HEADS), attention(HEADS)
        self.ff = FeedForward(WIDTH, activation_fn="gelu-approximate")
        self.norms = nn.ModuleList(SingleNorm() if emb is None else AdaLayerNormZeroSingle(WIDTH) for _ in range(3))
        if self.text:
            self.cross = attention(HEADS, cross_attention_dim=WIDTH)
        else:
            self.norm1 = nn.Module()
            self.norm1.emb = emb
        self.places = Skip()
        if first:
            number_frames(self.places, frames)

    def forward(
        self, x, attention_mask, encoder_hidden_states, encoder_attention_mask, timestep,
        cross_attention_kwargs=None, class_labels=None,
    ):  # fmt: skip
        if self.text:
            conds = timestep.chunk(3, -1)
        else:
            conds = [self.norm1.emb(timestep, class_labels, hidden_dtype=x.dtype)] * 3
        y, gate = self.norms[0](x, conds[0])
        x = x + gate[:, None] * self.space(y)
        if self.text:
            x = x + self.cross(x, encoder_hidden_states)
        x = self.places(x)
        y, gate = self.norms[1](x, conds[1])
        x = x + gate[:, None] * across(self.time, y, self.frames)
        y, gate = self.norms[2](x, conds[2])
        return x + gate[:, None] * self.ff(y)


class Halves(nn.Module):
    """Variant 4's attention: half of the heads within frames, half across them, added."""

    def __init__(self, frames):
        super().__init__()
        self.frames = frames
        self.space, self.time = attention(HEADS // 2), attention(HEADS // 2)

    def forward(self, x, **_):
        return self.space(x) + across(self.time, x, self.frames)


def split_table(block):
    """The six rows of adaLN-single as a parameter of two and one of four."""
    del block.scale_shift_table
    block.tables = nn.ParameterList(torch.empty(n, WIDTH) for n in (2, 4))
    block.register_forward_pre_hook(lambda block, _: setattr(block, "scale_shift_table", torch.cat([*block.tables])))


def class_oracle(variant, frames, size):
    """diffusers' DiT with its blocks arranged anew."""
    oracle = dit_oracle(frames, size, classes=5, turned=False)
    blocks = oracle.transformer_blocks
    if variant == 2:
        for i in (2, 3):
            turn(blocks[i], frames, (size // 2) ** 2, first=i == 2)
    elif variant == 3:
        emb = blocks[0].norm1.emb
        oracle.transformer_blocks = nn.ModuleList(ThreeSublayers(frames, i == 0, emb) for i in range(4))
    else:
        for block in blocks:
            block.attn1, block.norm1.linear = Halves(frames), Parts(2, 4)
        number_frames(blocks[0], frames)
    randomise(oracle)
    return oracle.eval()


def block_oracle(variant, frames, size):
    """diffusers' Latte, whose blocks come in pairs, with other blocks in their places."""
    oracle = text_oracle(frames, size, layers=4)
    oracle.temp_pos_embed.zero_()
    blocks, skips = oracle.transformer_blocks, [Skip() for _ in range(4)]
    if variant == 2:
        oracle.transformer_blocks = nn.ModuleList([*blocks[:2], *skips[:2]])
        times = oracle.temporal_transformer_blocks[2:]
        table = frame_table(frames, WIDTH)
        times[0].register_forward_pre_hook(lambda _, args: (args[0] + table.to(args[0].dtype), *args[1:]))
        oracle.temporal_transformer_blocks = nn.ModuleList([*skips[2:], *times])
    else:
        oracle.temporal_transformer_blocks = nn.ModuleList(skips)
    if variant == 3:
        oracle.adaln_single.linear = nn.Linear(WIDTH, 9 * WIDTH)
        oracle.transformer_blocks = nn.ModuleList(ThreeSublayers(frames, first=i == 0) for i in range(4))
    if variant == 4:
        for block in blocks:
            block.attn1 = Halves(frames)
            split_table(block)
        number_frames(blocks[0], frames)
    randomise(oracle)
    return oracle.eval()


def names(variant, text):
    """The names of oracle parameters from ours. Outside the blocks of variants 3 and 4 they are those of variant 1."""

    def outside(name):
        return diffusers_names(name) if text else dit_names(name)

    def find(name):
        head, i, *path = name.split(".")
        if head in ("spatial", "temporal"):
            # the first block of its kind in variant 1; here the temporal ones stand behind two others
            found = outside(".".join(["blocks.0", head if text else "spatial", *path]))
            return [theirs.replace(".0.", f".{int(i) + 2 * (head == 'temporal')}.", 1) for theirs in found]
        if head != "blocks":
            return outside(name)
        kind, *path, layer, suffix = path
        block = f"transformer_blocks.{i}"
        if "modulation" in (*path, layer):
            if variant == 3:
                row = ["spatial", "temporal", "mlp"].index(kind)
                return [f"{block}.norms.{row}." + ("table" if text else f"linear.{suffix}")]
            part = ["norm", "fused"].index(kind)
            return [f"{block}.tables.{part}" if text else f"{block}.norm1.linear.parts.{part}.{suffix}"]
        half = {"spatial": "space", "temporal": "time"}.get(kind, "ff")
        module = half if variant == 3 or half == "ff" else f"attn1.{half}"
        if "cross" in path:
            module = "cross" if variant == 3 else "attn2"
        return [f"{block}.{module}.{part}.{suffix}" for part in LAYERS[layer]]

    return find


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize(("batch", "frames", "size"), [(2, 7, 8), (1, 3, 6)])
@pytest.mark.parametrize("variant", [2, 3, 4])
@pytest.mark.parametrize("conditioning", ["class", "text"])
def test_models_agree_with_blocks_of_diffusers(conditioning, variant, batch, frames, size, dtype, tolerance):
    torch.manual_seed(0)
    text = conditioning == "text"
    oracle = (block_oracle if text else class_oracle)(variant, frames, size).to(dtype)
    options = {"caption_channels": 20} if text else {"num_classes": 5}
    options |= {"in_channels": 3, "sample_size": size, "conditioning": conditioning}
    model, theirs = zoo.create("latte", "test", variant=variant, **options).to(dtype), names(variant, text)
    copy_weights(model, oracle, theirs)
    x, context = torch.randn(batch, 3, frames, size, size, dtype=dtype), torch.randn(batch, 7, 20, dtype=dtype)
    timestep, label = torch.randint(1000, (batch,)), torch.tensor([2, 5])[:batch]

    def run(model, x):
        return model(x, timestep.float(), **({"context": context} if text else {"label": label}))

    def run_oracle(oracle, x):
        if text:
            return oracle(x, timestep.float(), context).sample
        return frame_by_frame(oracle, x, timestep, label)

    agree(model, oracle, theirs, run, run_oracle, x, tolerance)
