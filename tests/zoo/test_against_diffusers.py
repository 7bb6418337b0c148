"""Video models against diffusers: its models whole, and its blocks as papers arrange them; weights from and to it."""

from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from diffusers.models.attention import FeedForward
from diffusers.models.normalization import AdaLayerNormZeroSingle
from einops import rearrange, repeat
from torch import nn

import zoo
from tests.support.latte_oracles import (
    HEADS,
    LAYERS,
    WIDTH,
    Parts,
    attention,
    dit_names,
    dit_oracle,
    number_frames,
    text_oracle,
)  # fmt: skip
from tests.support.oracles import (
    Attention,
    agree,
    copy_weights,
    diffusers,
    frame_by_frame,
    frame_table,
    randomise,
    raw_positions,
    to_frames,
)  # fmt: skip
from tests.support.refusals import refused
from tests.support.slow import slow
from zoo import registry
from zoo.video import hunyuan_weights, wan_weights
from zoo.video.axial import AXES
from zoo.video.latte_weights import diffusers_names, from_diffusers


def inputs(dtype, batch, frames, height, width, channels=3):
    """Clips x (b i t h w), and what a model may be conditioned on."""
    return SimpleNamespace(
        x=torch.randn(batch, channels, frames, height, width, dtype=dtype), frames=frames,
        context=torch.randn(batch, 7, 20, dtype=dtype), mask=torch.arange(7) < torch.tensor([4, 6])[:batch, None],
        timestep=torch.tensor([61.5, 999.0])[:batch], label=torch.tensor([2, 5])[:batch],
    )  # fmt: skip


# Arrangements of blocks: Latte's variants, axial video


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


class Folded(nn.Module):
    """Attentions on ((b t) (h w) c), each in a fold of its own, added up."""

    def __init__(self, heads, folds, **sizes):
        super().__init__()
        self.folds, self.sizes = folds, sizes
        self.parts = nn.ModuleDict({name: attention(heads) for name in folds})

    def forward(self, x, **_):
        base = "(b t) (h w) c"
        return sum(
            rearrange(attend(rearrange(x, f"{base} -> {to}", **self.sizes)), f"{to} -> {base}", **self.sizes)
            for attend, to in zip(self.parts.values(), self.folds.values())
        )


class ThreeSublayers(nn.Module):
    """Variant 3's block, with adaLN-Zero from the embedding ``emb`` or with adaLN-single and text."""

    def __init__(self, sizes, first, emb=None):
        super().__init__()
        self.text = emb is None
        self.space, self.time = Folded(HEADS, {"all": SPACE}, **sizes), Folded(HEADS, {"all": TIME}, **sizes)
        self.ff = FeedForward(WIDTH, activation_fn="gelu-approximate")
        self.norms = nn.ModuleList(SingleNorm() if emb is None else AdaLayerNormZeroSingle(WIDTH) for _ in range(3))
        if self.text:
            self.cross = attention(HEADS, cross_attention_dim=WIDTH)
        else:
            self.norm1 = nn.Module()
            self.norm1.emb = emb
        self.places = Skip()
        if first:
            number_frames(self.places, sizes["t"])

    def forward(
        self, x, attention_mask, encoder_hidden_states, encoder_attention_mask, timestep,
        cross_attention_kwargs=None, class_labels=None,
    ):  # fmt: skip
        if self.text:
            conds = timestep.chunk(3, -1)
        else:
            conds = [self.norm1.emb(timestep, class_labels, hidden_dtype=x.dtype)] * 3
        for layer, norm, cond in zip((self.space, self.time, self.ff), self.norms, conds):
            y, gate = norm(x, cond)
            x = x + gate[:, None] * layer(y)
            if layer is self.space:
                x = self.places(x + self.cross(x, encoder_hidden_states) if self.text else x)
        return x


SPACE, TIME = "(b t) (h w) c", "(b h w) t c"
HALVES = {"spatial": SPACE, "temporal": TIME}
TURNED = {"t": TIME, "h": "(b t w) h c", "w": "(b t h) w c"}


def split_table(block):
    """The six rows of adaLN-single as a parameter of two and one of four."""
    del block.scale_shift_table
    block.tables = nn.ParameterList(torch.empty(n, WIDTH) for n in (2, 4))
    block.register_forward_pre_hook(lambda block, _: setattr(block, "scale_shift_table", torch.cat([*block.tables])))


def turn_to(block, axis, sizes):
    """A block on ((b t) (h w) c) sees one axis as its tokens."""

    def to_axis(block, args, kwargs):
        x = rearrange(args[0], f"{SPACE} -> {TURNED[axis]}", **sizes)
        for key in ("timestep", "class_labels"):
            kwargs[key] = repeat(kwargs[key][:: sizes["t"]], "b -> (b n)", n=len(x) * sizes["t"] // len(args[0]))
        return (x,), kwargs

    block.register_forward_pre_hook(to_axis, with_kwargs=True)
    block.register_forward_hook(lambda block, args, out: rearrange(out, f"{TURNED[axis]} -> {SPACE}", **sizes))


def class_oracle(arrangement, frames, side):
    """diffusers' DiT with its blocks arranged as Latte's variants 2 to 4, or as axial video models."""
    layers = {"sequential": 6, "summed": 2}.get(arrangement, 4)
    oracle, sizes = dit_oracle(frames, 2 * side, 5, turned=False, layers=layers), {"t": frames, "h": side, "w": side}
    blocks = oracle.transformer_blocks
    for i, block in enumerate(blocks):
        if i == {2: 2, 3: -1}.get(arrangement, 0):  # the first that sees frames
            number_frames(block, frames)
        if arrangement == 3:
            blocks[i] = ThreeSublayers(sizes, i == 0, blocks[0].norm1.emb)
        elif arrangement in (4, "summed"):
            folds, heads = (HALVES, HEADS // 2) if arrangement == 4 else (TURNED, HEADS)
            block.attn1, block.norm1.linear = Folded(heads, folds, **sizes), Parts(2, 4)
        elif arrangement == "sequential" or i > 1:
            turn_to(block, "t" if arrangement == 2 else [*AXES][i % 3], sizes)
    randomise(oracle)
    return oracle.eval()


def text_variant(variant, frames, side):
    """diffusers' Latte, whose blocks come in pairs, with other blocks in their places."""
    oracle, sizes = text_oracle(frames, 2 * side, layers=4), {"t": frames, "h": side, "w": side}
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
        oracle.transformer_blocks = nn.ModuleList(ThreeSublayers(sizes, first=i == 0) for i in range(4))
    if variant == 4:
        for block in blocks:
            block.attn1 = Folded(HEADS // 2, HALVES, **sizes)
            split_table(block)
        number_frames(blocks[0], frames)
    randomise(oracle)
    return oracle.eval()


def arranged_names(arrangement, text):
    """The names of oracle parameters from ours. Outside the blocks they are those of Latte's variant 1."""

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
        if arrangement == "sequential":
            block = f"transformer_blocks.{3 * int(i) + [*AXES].index(kind)}"
            if path[0] not in ("attention", "mlp"):
                return [f"{block}.norm1.linear.{suffix}"]
            return [f"{block}.{'attn1' if path[0] == 'attention' else 'ff'}.{n}.{suffix}" for n in LAYERS[layer]]
        block = f"transformer_blocks.{i}"
        if "modulation" in (*path, layer):
            if arrangement == 3:
                row = ["spatial", "temporal", "mlp"].index(kind)
                return [f"{block}.norms.{row}." + ("table" if text else f"linear.{suffix}")]
            part = ["norm", "fused"].index(kind)
            return [f"{block}.tables.{part}" if text else f"{block}.norm1.linear.parts.{part}.{suffix}"]
        module = f"attn1.parts.{kind}" if kind in (*HALVES, *TURNED) else "ff"
        if arrangement == 3 and kind in HALVES:
            module = f"{'space' if kind == 'spatial' else 'time'}.parts.all"
        if "cross" in path:
            module = "cross" if arrangement == 3 else "attn2"
        return [f"{block}.{module}.{part}.{suffix}" for part in LAYERS[layer]]

    return find


def arranged(given, name, options, arrangement, text):
    side = given.x.shape[-1] // 2
    oracle = (text_variant if text else class_oracle)(arrangement, given.frames, side)
    model = zoo.create(
        name, "test", in_channels=3, **({"caption_channels": 20} if text else {"num_classes": 5}), **options
    )
    steps = given.timestep.round()  # DiT looks them up
    told = {"context": given.context} if text else {"label": given.label}

    def run_oracle(oracle, x):
        if text:
            return oracle(x, steps, given.context).sample
        return frame_by_frame(oracle, x, steps.long(), given.label)

    return model, oracle, arranged_names(arrangement, text), lambda m, x: m(x, steps, **told), run_oracle


def variant(given, variant, conditioning):
    options = {"variant": variant, "conditioning": conditioning, "sample_size": given.x.shape[-1]}
    return arranged(given, "latte", options, variant, conditioning == "text")


def axial(given, order):
    return arranged(given, "axial_video", {"order": order, "learn_sigma": True}, order, False)


# Transformer-2D's two blocks


def paper_block(given, classes):
    """diffusers' Latte without text, and with an embedding of classes."""
    more = {"out_channels": 3, "caption_channels": 8, "cross_attention_dim": None}
    oracle = text_oracle(given.frames, **more)
    oracle.labels = nn.Embedding(6, 48)
    randomise(oracle)
    raw_positions(oracle, given.x.shape[3] // 2, given.x.shape[4] // 2)
    told, unused = {}, ("caption_projection", "labels")
    if classes:
        told, unused = {"label": given.label}, ("caption_projection",)
        oracle.adaln_single.emb.register_forward_hook(lambda emb, args, out: out + oracle.labels(given.label))
    return (
        zoo.create("transformer2d", "test", in_channels=3, num_classes=classes), oracle,
        lambda name: ["labels.weight"] if name == "label_embed.table.weight" else diffusers_names(name),
        lambda model, x: model(x, given.timestep, **told),
        lambda oracle, x: oracle(x, given.timestep, x.new_zeros(len(x), 1, 8)).sample, unused,
    )  # fmt: skip


class TimeThenText(nn.Module):
    """In the place of a PixArt block's attention to text: Open-Sora's gated attention across frames, and then text."""

    def __init__(self, block, frames, first):
        super().__init__()
        self.frames, self.first, self.text = frames, first, block.attn2
        self.time = Attention(query_dim=48, heads=4, dim_head=12, bias=True)
        block.register_forward_pre_hook(self.remember_gate, with_kwargs=True)

    def remember_gate(self, block, args, kwargs):
        self.gate = (block.scale_shift_table + kwargs["timestep"].unflatten(1, (6, -1)))[:, 2:3]

    def forward(self, x, encoder_hidden_states=None, attention_mask=None):
        y = rearrange(x, "(b t) s c -> (b s) t c", t=self.frames)
        y = self.time(y + frame_table(self.frames, 48).to(x.dtype) if self.first else y)
        y = self.gate * rearrange(y, "(b s) t c -> (b t) s c", s=x.shape[1])
        if self.text is None:
            return y
        return y + self.text(x + y, encoder_hidden_states=encoder_hidden_states, attention_mask=attention_mask)


def stdit_names(name):
    """Ours, with one modulation a layer and text in the temporal stage, by the names of a PixArt block."""
    name = name.replace(".modulation.", ".spatial.modulation.") if name.startswith("blocks.") else name
    if ".temporal.attention." in name:
        return [n.replace("temporal_t", "t").replace("attn1", "attn2.time") for n in diffusers_names(name)]
    return [n.replace("attn2", "attn2.text") for n in diffusers_names(name.replace(".temporal.", ".spatial."))]


def stdit_block(given, text):
    """diffusers' PixArt plus time."""
    shared = dict(text_oracle(given.frames).config)
    for name in ("video_length", "cross_attention_dim", "caption_channels", "num_embeds_ada_norm"):
        shared.pop(name)
    channels = {"cross_attention_dim": 48, "caption_channels": 20} if text else {"cross_attention_dim": None}
    oracle = diffusers.PixArtTransformer2DModel(**{k: v for k, v in shared.items() if k[0] != "_"}, **channels)
    for i, block in enumerate(oracle.transformer_blocks):
        block.attn2 = TimeThenText(block, given.frames, first=i == 0)
    randomise(oracle)
    raw_positions(oracle, given.x.shape[3] // 2, given.x.shape[4] // 2)
    context, mask = (given.context, given.mask) if text else (None, None)

    def run_oracle(oracle, x):
        steps, texts, masks = (
            None if y is None else repeat(y, "b ... -> (b t) ...", t=given.frames)
            for y in (given.timestep, context, mask)
        )
        added = {"resolution": None, "aspect_ratio": None}
        out = oracle(to_frames(x), texts, steps, added, encoder_attention_mask=masks).sample
        return rearrange(out, "(b t) o h w -> b o t h w", t=given.frames)

    options = {"block": "stdit", "in_channels": 3, "learn_sigma": True, "caption_channels": 20 if text else 0}
    run = lambda model, x: model(x, given.timestep, context=context, context_mask=mask)  # noqa: E731
    return zoo.create("transformer2d", "test", **options), oracle, stdit_names, run, run_oracle


# Diffusers' models as such


def latte_with_text(given, sample_size=8, masked=True):
    oracle = text_oracle(given.frames, sample_size)
    mask = bias = None
    if masked:
        # the second caption is empty in double only: a bias of -10000 costs diffusers half the digits of a float
        mask, dtype = given.mask.clone(), given.x.dtype
        mask[1:] &= dtype is torch.float32
        bias = repeat((~mask).to(dtype) * -10000, "b l -> (b t) 1 l", t=given.frames)
    return (
        from_diffusers(oracle.state_dict(), oracle.config), oracle, diffusers_names,
        lambda model, x: model(x, given.timestep, context=given.context, context_mask=mask),
        lambda oracle, x: oracle(x, given.timestep, given.context, bias).sample,
    )  # fmt: skip


def wan_oracle(**overrides):
    config = {
        "num_attention_heads": 4, "attention_head_dim": 12, "in_channels": 3, "out_channels": 3, "text_dim": 20,
        "ffn_dim": 40, "num_layers": 2,
    }  # fmt: skip
    model = diffusers.WanTransformer3DModel(**{**config, **overrides})
    randomise(model)
    return model


FIRST_FRAME = {"in_channels": 7, "out_channels": 3}
IMAGE = {**FIRST_FRAME, "added_kv_proj_dim": 48, "image_dim": 8}


def wan_of(given, heads=4, frame_times=False, **image):
    """Heads of 12, 16 and 24 channels have thirds that are uneven."""
    theirs = wan_oracle(num_attention_heads=heads, attention_head_dim=48 // heads, **image)
    model = zoo.from_reference("wan", theirs.state_dict(), heads=heads, frame_times=frame_times)
    conditions = image.get("in_channels", 3) - 3, image.get("image_dim", 0)
    assert (model.config.mlp, model.config.condition_channels, model.config.image_channels) == (40, *conditions)
    times = tokens = given.timestep
    told, asked, context, mask = {}, {}, given.context, given.mask
    if "image_dim" in image:  # diffusers' reads how many tokens the image has off a text of 512
        told["image"] = asked["encoder_hidden_states_image"] = torch.randn(len(times), 5, 8, dtype=context.dtype)
        context, mask = torch.randn(len(times), 512, 20, dtype=context.dtype), torch.arange(512).expand(1, -1) < 500
    if frame_times:
        times = times[:, None] * torch.linspace(0, 1, given.frames)
        tokens = times.repeat_interleave(given.x[0, 0, 0].numel() // 4, dim=1)
    padded = context * mask[..., None]  # as WanPipeline pads short captions
    return (
        model, theirs, wan_weights.diffusers_names,
        lambda model, x: model(x, times, context=context, context_mask=mask.expand(len(x), -1), **told),
        lambda theirs, x: theirs(x, tokens, padded, **asked).sample,
    )  # fmt: skip


def wan_from_image(given):
    given.x = torch.cat([given.x, torch.randn_like(given.x), torch.randn_like(given.x[:, :1])], 1)
    return wan_of(given, **IMAGE)


def hunyuan_oracle(**overrides):
    config = {
        "num_attention_heads": 3, "attention_head_dim": 32, "in_channels": 3, "out_channels": 3, "num_layers": 2,
        "num_single_layers": 2, "text_embed_dim": 20, "pooled_projection_dim": 6, "rope_axes_dim": (4, 14, 14),
    }  # fmt: skip
    model = diffusers.HunyuanVideoTransformer3DModel(**{**config, **overrides})
    randomise(model)
    return model


def hunyuan_of(given, **options):
    theirs = hunyuan_oracle(**options)
    model = zoo.from_reference("hunyuan", theirs.state_dict())
    assert (model.config.in_channels, model.config.out_channels) == (options.get("in_channels", 3), 3)
    batch, dtype = len(given.x), given.x.dtype
    guidance = torch.tensor([6000.0, 1000.0])[:batch] if model.config.guidance else None
    more = torch.randn(batch, 6, dtype=dtype), guidance
    return (
        model, theirs, hunyuan_weights.diffusers_names,
        lambda model, x: model(x, given.timestep, given.context, given.mask, *more),
        lambda theirs, x: theirs(x, given.timestep, given.context, given.mask.int(), *more).sample,
    )  # fmt: skip


# The one test

SQUARE = [(2, 7, 8, 8), (1, 3, 6, 6)]  # batch, frames, rows, columns
SHAPES = [(2, 7, 8, 8), (1, 4, 6, 10), (2, 1, 4, 8)]
CASES = [
    *((variant, (v, kind), {}, shape) for v in (2, 3, 4) for kind in ("class", "text") for shape in SQUARE),
    *((axial, (order,), {}, shape) for order in ("sequential", "summed") for shape in SQUARE),
    *((paper_block, (classes,), {}, shape) for classes in (None, 5) for shape in SHAPES),
    *((stdit_block, (text,), {}, shape) for text in (True, False) for shape in SHAPES),
    (latte_with_text, (), {}, (2, 7, 8, 8)),
    (latte_with_text, (), {}, (1, 5, 6, 10)),  # positions stretched over the grid trained on
    (latte_with_text, (), {"masked": False}, (2, 3, 10, 4)),
    (latte_with_text, (), {}, (1, 1, 8, 8)),  # an image: no temporal positions
    (latte_with_text, (), {"sample_size": 128}, (1, 4, 8, 6)),  # positions scaled for large frames
    (wan_of, (), {}, (2, 7, 6, 10)),
    (wan_of, (3,), {}, (1, 1, 8, 8)),
    slow(wan_of, (2,), {}, (1, 3, 4, 2)),
    (wan_of, (), FIRST_FRAME, (2, 3, 6, 4)),
    (wan_from_image, (), {}, (2, 3, 6, 4)),
    (wan_of, (), {"frame_times": True}, (2, 3, 6, 4)),
    (hunyuan_of, (), {}, (2, 3, 6, 10)),
    slow(hunyuan_of, (), {"guidance_embeds": False}, (2, 1, 4, 4)),
    slow(hunyuan_of, (), {"in_channels": 7, "num_layers": 1}, (2, 2, 4, 6)),
]
TOLERANCE = {
    wan_of: {torch.float64: 1e-12}, wan_from_image: {torch.float64: 1e-12, torch.float32: 1e-4},
    hunyuan_of: {torch.float64: 1e-6, torch.float32: 1e-4},
}  # fmt: skip
DOUBLE = {wan_of, wan_from_image}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize(("build", "args", "options", "shape"), CASES, ids=lambda x: getattr(x, "__name__", str(x)))
def test_outputs_and_every_gradient_are_those_of_diffusers(build, args, options, shape, dtype):
    torch.manual_seed(0)
    given = inputs(dtype, *shape, channels=options.get("in_channels", 3))
    kept = (lambda x: x) if build in DOUBLE and dtype is torch.float64 else torch.Tensor.float
    with mock.patch.object(torch.Tensor, "float", kept):  # Wan's norms are float32, whatever its type is
        model, oracle, names, run, run_oracle, *unused = build(given, *args, **options)
        model, oracle = model.to(dtype), oracle.to(dtype)
        copy_weights(model, oracle, names)  # in full precision
        tolerance = {torch.float64: 1e-9, torch.float32: 1e-5, **TOLERANCE.get(build, {})}[dtype]
        agree(model, oracle, names, run, run_oracle, given.x, tolerance, *unused)


# Weights


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("wan", "1.3B"), ("wan", "i2v-14B"), slow("wan", "14B"), slow("wan", "i2v-2.2-14B"), slow("wan", "ti2v-5B"),
        ("hunyuan", "13B"), slow("hunyuan", "i2v-13B"),
    ],
)  # fmt: skip
def test_parameters_of_published_sizes_are_those_of_diffusers(name, size):
    module = {"wan": wan_weights, "hunyuan": hunyuan_weights}[name]
    with torch.device("meta"):
        model = zoo.create(name, size)
        c = model.config
        if name == "hunyuan":
            theirs = diffusers.HunyuanVideoTransformer3DModel(in_channels=c.in_channels, guidance_embeds=c.guidance)
        else:
            theirs = diffusers.WanTransformer3DModel(
                num_attention_heads=c.heads, attention_head_dim=128, ffn_dim=c.mlp, num_layers=c.depth,
                in_channels=c.in_channels, out_channels=c.out_channels,
                **({"image_dim": c.image_channels, "added_kv_proj_dim": c.hidden} if c.image_channels else {}),
            )  # fmt: skip
    ours = {name: param.numel() for name, param in model.named_parameters()}
    numbers = {name: param.numel() for name, param in theirs.named_parameters()}
    assert {n for name in ours for n in module.diffusers_names(name)} == set(numbers)
    assert all(sum(numbers[n] for n in module.diffusers_names(name)) == count for name, count in ours.items())


def latte_weights(state, **changes):
    config = {**text_oracle(frames=3, layers=1).config, **changes}
    return from_diffusers(state, None if "config" in changes else config)


SOURCES = {
    "wan": (wan_oracle, partial(zoo.from_reference, "wan")),
    "wan of images": (lambda: wan_oracle(**IMAGE), partial(zoo.from_reference, "wan")),
    "hunyuan": (hunyuan_oracle, partial(zoo.from_reference, "hunyuan")),
    "latte": (lambda: text_oracle(frames=3, layers=1), latte_weights),
    "latte alone": (lambda: text_oracle(frames=3, layers=1), partial(zoo.from_reference, "latte")),
}


@pytest.mark.parametrize(
    ("name", "changes", "options", "message"),
    [
        ("wan", {"proj_out.bias": None}, {"heads": 4}, r"missing: proj_out\.bias"),
        ("wan", {}, {}, "say how many heads it has"),
        ("wan", None, {}, r"no patch_embedding\.weight"),
        ("wan", {}, {"heads": 12}, "rotary positions in three dims need an even number"),
        ("wan of images", {"image_embedder.pos_embed": 8}, {"heads": 4}, r"unknown: image_embedder\.pos_embed"),
        ("hunyuan", {"norm_out.linear.bias": None}, {}, r"missing: norm_out\.linear\.bias"),
        ("hunyuan", None, {}, r"no x_embedder\.proj\.weight"),
        ("hunyuan", {}, {"heads": 4}, "a head needs a multiple of 32 channels"),
        ("latte", {"more": 1}, {}, "unknown: more"),
        ("latte", {"proj_out.bias": None}, {}, r"missing: proj_out\.bias"),
        ("latte", {"proj_out.weight": (24, 4)}, {}, r"proj_out\.weight is \(24, 4\), the model's \(24, 48\)"),
        ("latte", {}, {"activation_fn": "geglu"}, "activation_fn='geglu'"),
        ("latte", {}, {"config": None}, "pass the model's config"),
        ("latte alone", {}, {"heads": 4}, "on how many cells a side it was trained, sample_size="),
    ],
)
def test_weights_of_another_model_are_refused(name, changes, options, message):
    source, take = SOURCES[name]
    state = {} if changes is None else source().state_dict()
    state |= {key: shape and torch.zeros(shape) for key, shape in (changes or {}).items()}
    refused(message, take, {key: value for key, value in state.items() if value is not None}, **options)


@pytest.mark.parametrize(
    ("name", "options"),
    [("wan", {}), ("wan", {"in_channels": 9, "condition_channels": 5, "image_channels": 6}), ("hunyuan", {})],
)
def test_diffusers_takes_a_model_back(name, options):
    torch.manual_seed(0)
    model = zoo.create(name, "test", **options)
    randomise(model)
    theirs = registry.weights_module(name).to_diffusers(model)
    config = {"_class_name": type(theirs).__name__, **theirs.config}
    again = registry.from_published(name, theirs.state_dict(), config, {})
    assert again.config == model.config
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters()))


def test_latte_is_read_from_a_folder_of_diffusers(tmp_path):
    oracle = text_oracle(frames=3, layers=1)
    oracle.save_pretrained(tmp_path)
    model = from_diffusers(tmp_path)
    assert (model.config.depth, model.config.learn_sigma) == (2, True)
    again = from_diffusers(tmp_path / "diffusion_pytorch_model.safetensors", tmp_path / "config.json")
    given = model.example_inputs(frames=3)
    out = model(**given)
    assert out.std() > 0.1
    assert torch.equal(out, again(**given))
    (tmp_path / "diffusion_pytorch_model.safetensors").unlink()
    refused(r"has no diffusion_pytorch_model\.safetensors", from_diffusers, tmp_path)


def test_an_empty_caption_is_a_text_of_nothing():
    torch.manual_seed(0)
    model = zoo.create("hunyuan", "test")
    randomise(model)
    given = model.example_inputs(2)
    given["context_mask"][1] = False
    assert model(**given).isfinite().all()
