"""The contract of every video model: counts, any lengths, stages that are what they say, weights that learn."""

import inspect
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import zoo
from tests.support.oracles import randomise
from tests.support.slow import slow
from zoo import registry

VARIANTS = [
    ("transformer2d", {}),
    slow("transformer2d", {"num_classes": 10, "in_channels": 1}),
    ("transformer2d", {"block": "stdit", "caption_channels": 20, "learn_sigma": True}),
    slow("transformer2d", {"block": "stdit", "caption_channels": 0, "num_classes": 10}),
    ("transformer2d", {"low_rank": (6, 20)}),
    ("latte", {}),
    slow("latte", {"conditioning": "class", "num_classes": 10}),
    ("latte", {"conditioning": "text", "caption_channels": 20}),
    ("stdit", {"version": "v1", "space_scale": 0.5}),
    ("stdit", {"version": "v2", "kv_heads": 2}),
    ("stdit", {"version": "v3", "kv_heads": 1, "learn_sigma": False}),
    ("st_mamba", {"num_classes": 10}),
    ("st_mamba", {"mixer": "mamba2", "order": "sst", "groups": 2}),
    slow("st_mamba", {"bidirectional": False, "learn_sigma": True}),
    ("st_rwkv", {"order": "sst", "num_classes": 10}),
    ("latte", {"variant": 2, "conditioning": "text", "caption_channels": 20}),
    slow("latte", {"variant": 3, "depth": 2}),
    ("latte", {"variant": 3, "depth": 2, "conditioning": "text", "caption_channels": 20}),
    ("latte", {"variant": 4, "depth": 2, "conditioning": "class", "num_classes": 10}),
    slow("latte", {"variant": 4, "depth": 2, "conditioning": "text", "caption_channels": 20}),
    ("axial_video", {"num_classes": 10}),
    ("axial_video", {"order": "summed", "learn_sigma": True}),
    ("wan", {}),
]


every_variant = pytest.mark.parametrize(("name", "overrides"), VARIANTS, ids=lambda x: str(x))


def make(name, overrides, dtype=torch.float64):
    torch.manual_seed(0)
    model = zoo.create(name, "test", **overrides).to(dtype)
    randomise(model)
    return model


# Sizes


@pytest.mark.parametrize(
    ("name", "size", "overrides", "count"),
    [
        ("transformer2d", "720m", {"block": "paper"}, 902_415_760),
        slow("transformer2d", "3b", {"block": "paper"}, 3_656_062_992),
        ("transformer2d", "720m", {"block": "stdit"}, 759_602_320),
        slow("transformer2d", "3b", {"block": "stdit"}, 3_064_154_128),
        ("latte", "S/2", {}, 32_480_672),
        slow("latte", "B/2", {}, 129_547_040),
        slow("latte", "L/2", {}, 456_815_648),
        ("latte", "XL/2", {}, 673_681_568),
        ("latte", "T2V", {}, 1_057_246_880),
        ("stdit", "v1-XL/2", {}, 759_620_768),
        ("stdit", "v2-XL/2", {}, 767_452_064),
        ("stdit", "v3-XL/2", {}, 1_207_643_936),
        slow("stdit", "v3-3B/2", {}, 3_182_211_536),
        ("st_mamba", "B/2", {}, 140_603_152),
        ("st_mamba", "B/2", {"mixer": "mamba2"}, 135_101_584),
        slow("st_mamba", "S/2", {}, 36_239_248),
        slow("st_mamba", "S/2", {"mixer": "mamba2"}, 35_178_064),
        slow("st_mamba", "L/2", {}, 492_606_480),
        slow("st_mamba", "L/2", {"mixer": "mamba2"}, 471_996_432),
        ("st_rwkv", "B/2", {}, 279_617_296),
        slow("st_rwkv", "S/2", {}, 72_126_352),
        slow("st_rwkv", "L/2", {}, 982_848_528),
        ("wan", "1.3B", {}, 1_418_996_800),
        slow("wan", "14B", {}, 14_288_491_584),
        ("evoformer", None, {}, 90_785_111),
        ("pairformer", None, {}, 150_634_711),
    ],
)
def test_parameter_counts(name, size, overrides, count):
    with torch.device("meta"):
        model = zoo.create(name, size, **overrides)
    assert sum(param.numel() for param in model.parameters()) == count
    assert not list(model.buffers())
    module = sys.modules[type(model).__module__]
    assert f"{count:,}" in module.__doc__  # the docstring's table says so too


def test_first_size_is_the_default(monkeypatch):
    assert zoo.list_models() == sorted(zoo.list_models())
    find = registry._module
    made = lambda config: SimpleNamespace(config=config)  # noqa: E731
    monkeypatch.setattr(registry, "_module", lambda name: (find(name)[0], made))
    monkeypatch.setattr(registry, "check", lambda model: None)
    for name in zoo.list_models():
        assert zoo.create(name).config == zoo.create(name, zoo.sizes(name)[0]).config


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        (("late",), {}, r"no model 'late'; did you mean 'latte'\? valid: .*latte, .*transformer2d"),
        (("latte", "s/2"), {}, r"latte has no size 's/2'; did you mean 'S/2'\? valid: S/2, .*T2V, test"),
        (("latte", "test"), {"hiden": 8}, r"latte has no option 'hiden'; did you mean 'hidden'\? valid: hidden, depth"),
        (("latte", "test"), {"hidden": "8"}, r"latte takes hidden: int, not '8' \(str\)"),
        (("latte", "test"), {"depth": True}, r"latte takes depth: int, not True \(bool\)"),
        (("transformer2d", "test"), {"patch": (2, 2)}, r"takes patch: tuple\[int, int, int\], not \(2, 2\)"),
        (("transformer2d", "test"), {"num_classes": 1.5}, r"takes num_classes: int \| None, not 1.5 \(float\)"),
        (("transformer2d", "test"), {"heads": 7}, "hidden=48 does not divide into heads=7"),
        (("transformer2d", "test"), {"hidden": 42, "heads": 3}, "needs a multiple of 4"),
        (("transformer2d", "test"), {"patch": (2, 2, 2)}, "frames are embedded one at a time"),
        (("transformer2d", "test"), {"block": "dit"}, "expected 'paper' or 'stdit'"),
        (("transformer2d", "test"), {"caption_channels": 8}, "block='paper' has no attention to text"),
        (("latte", "test"), {"depth": 3}, "come in pairs"),
        (("stdit", "test"), {"version": "v4"}, "version='v4': expected one of 'v1', 'v2', 'v3'"),
        (("stdit", "test"), {"kv_heads": 3}, "heads=4 is not a multiple of kv_heads=3"),
        (("stdit", "test"), {"version": "v2", "hidden": 64}, "hidden=64: v2 embeds height, width and aspect ratio"),
        (("stdit", "test"), {"space_scale": 0.5}, "space_scale and time_scale are of v1; v3 has input_sq_size"),
        (("stdit", "test"), {"hidden": 36, "heads": 12}, "rotary positions need an even number"),
        (("latte", "test"), {"variant": 5}, "expected 1, 2, 3 or 4"),
        (("latte", "test"), {"variant": 4, "heads": 3, "hidden": 36}, "take an even number"),
        (("latte", "test"), {"conditioning": "audio"}, "expected 'none', 'class' or 'text'"),
        (("st_mamba", "test"), {"order": "ts"}, "expected 'st' or 'sst'"),
        (("st_mamba", "test"), {"order": "sst", "depth": 4}, "order='sst' needs a multiple of 3"),
        (("st_mamba", "test"), {"mixer": "s4"}, "expected 'mamba1' or 'mamba2'"),
        (("st_mamba", "test"), {"mixer": "mamba2", "head_dim": 36}, "96 inner channels .* must divide into heads"),
        (("st_rwkv", "test"), {"head_dim": 9}, "hidden=48 does not divide into heads of head_dim=9"),
        (("axial_video", "test"), {"order": "parallel"}, "expected 'sequential' or 'summed'"),
        (("axial_image", "test"), {"heads": 3}, "hidden=16 does not divide into heads=3"),
        (("axial_image", "test"), {"outer": 3}, "outer=3: blocks along rows and columns come in pairs"),
        (("axial_image", "test"), {"channels": 0}, "channels=0: take at least 1"),
        (("axial_image", "test"), {"dropout": 1.0}, r"dropout=1.0 is not a share in \[0, 1\)"),
        (("evoformer", "test"), {"depth": -1}, "depth=-1: 0 is a model without blocks"),
        (("evoformer", "test"), {"extra_depth": -1}, "0 is a model without an extra alignment"),
        (("evoformer", "test"), {"chunk": 0}, "chunk=0: it has to be at least 1"),
        (("pairformer", "test"), {"msa_depth": 0}, "msa_depth=0: it has to be at least 1"),
    ],
)
def test_what_does_not_exist_is_refused(args, kwargs, message):
    with pytest.raises(ValueError, match=message):
        zoo.create(*args, **kwargs)


def test_lists_are_patches_too():
    assert zoo.create("transformer2d", "test", patch=[1, 4, 4]).config.patch == (1, 4, 4)


# Inputs


@every_variant
def test_any_lengths(name, overrides):
    model = make(name, overrides)
    for batch, frames, height, width in [(1, 7, 8, 8), (2, 1, 6, 10), (1, 2, 7, 9)]:
        inputs = model.example_inputs(batch, frames=frames, height=height, width=width)
        out = model(**inputs)
        assert out.shape == (batch, model.config.out_channels, frames, height, width)
        assert out.isfinite().all()
        assert out.std() > 0.1


@every_variant
def test_frames_are_padded_to_whole_patches(name, overrides):
    model = make(name, overrides)
    inputs = model.example_inputs(height=7, width=9)
    padded = {**inputs, "x": F.pad(inputs["x"], (0, 1, 0, 1))}
    torch.testing.assert_close(model(**inputs), model(**padded)[..., :7, :9])


@every_variant
def test_example_inputs_are_the_forwards_arguments_on_the_default_device(name, overrides):
    with torch.device("meta"):
        model = zoo.create(name, "test", **overrides)
        inputs = model.example_inputs(batch=2, frames=3, height=4, width=6)
        out = model(**inputs)
    assert {tensor.device.type for tensor in (out, *inputs.values())} == {"meta"}
    assert out.shape == (2, model.config.out_channels, 3, 4, 6)
    assert inputs["timestep"].shape == (2,)
    assert set(inputs) < set(inspect.signature(type(model).forward).parameters)
    assert {tensor.device.type for tensor in model.example_inputs().values()} == {"cpu"}


@every_variant
def test_half_precision_weights_take_full_precision_inputs(name, overrides):
    model = make(name, overrides, torch.bfloat16)
    inputs = model.example_inputs()
    out, exact = model(**inputs), model.float()(**inputs)
    assert out.dtype == torch.bfloat16
    assert (out.float() - exact).std() < 0.1 * exact.std()


@every_variant
def test_every_input_counts(name, overrides):
    model = make(name, overrides)
    inputs = model.example_inputs(batch=2)
    out = model(**inputs)
    changed = {
        "x": inputs["x"] + 1,
        "timestep": 1000 - inputs["timestep"],
        "label": torch.full((2,), 10),  # the null class
        "context": inputs.get("context", torch.zeros(())) + 1,
        "context_mask": torch.arange(7) == 1,
        "x_mask": torch.arange(5) < 2,
    }
    for key in inputs:
        changed.setdefault(key, inputs[key] * 2)
        assert (model(**{**inputs, key: changed[key].expand_as(inputs[key])}) - out).abs().max() > 1e-3, key


@every_variant
def test_conditioning_that_was_not_asked_for_is_refused(name, overrides):
    model = make(name, overrides)
    inputs = model.example_inputs()
    extra = {"label": torch.zeros(1, dtype=torch.long), "context": torch.zeros(1, 7, 20), "fps": torch.ones(1)}
    taken = inspect.signature(model.forward).parameters
    for key in extra.keys() & taken:
        value = extra[key]
        verb = "needs" if key in inputs else "takes no"
        given = {k: v for k, v in inputs.items() if k != key} if key in inputs else {**inputs, key: value}
        with pytest.raises(ValueError, match=f"a model built with .* {verb} {key}"):
            model(**given)
    if "context" in taken and "context" not in inputs:
        with pytest.raises(ValueError, match="takes no context_mask"):
            model(**inputs, context_mask=torch.ones(1, 7, dtype=torch.bool))


# Weights


@every_variant
def test_fresh_models_learn_with_every_parameter(name, overrides):
    torch.manual_seed(0)
    model = zoo.create(name, "test", **overrides)
    inputs = model.example_inputs(batch=4, frames=4, height=4, width=4)
    target = torch.randn_like(model(**inputs))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(4):
        loss = F.mse_loss(model(**inputs), target)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        moved = {n for n, p in model.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
        if step == 0:  # the final layer starts as nothing, so at first only its own weights can move
            assert moved == {"final.linear.weight", "final.linear.bias"}
        optimizer.step()
    assert moved == {n for n, _ in model.named_parameters()}
    assert losses[-1] < losses[0]


@every_variant
def test_weights_can_be_initialised_after_meta(name, overrides):
    with torch.device("meta"):
        model = zoo.create(name, "test", **overrides)
    model.to_empty(device="cpu")
    for param in model.parameters():
        torch.nn.init.constant_(param, torch.nan)
    fresh = zoo.create(name, "test", **overrides)
    for each in (model, fresh):
        torch.manual_seed(0)
        each.init_weights()
    for (key, param), other in zip(model.named_parameters(), fresh.parameters()):
        assert param.isfinite().all(), key
        assert torch.equal(param, other), key
    assert model(**model.example_inputs()).abs().max() == 0
