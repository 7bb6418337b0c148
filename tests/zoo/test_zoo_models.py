"""The contract of every video model: counts, any lengths, stages that are what they say, weights that learn."""

import inspect
import re
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import zoo
from tests.support.cases import CASES
from tests.support.oracles import randomise
from tests.support.refusals import refused
from tests.support.slow import slow
from zoo import registry

VARIANTS = {name: case for name, case in CASES.items() if case[0] != "axial_image"} | {
    "transformer2d-no-text": ("transformer2d", {"block": "stdit", "caption_channels": 0, "num_classes": 10}),
    "transformer2d-low-rank": ("transformer2d", {"low_rank": (6, 20)}),
    "stdit-v1-scaled": ("stdit", {"version": "v1", "space_scale": 0.5}),
    "stdit-v3-no-sigma": ("stdit", {"version": "v3", "kv_heads": 1, "learn_sigma": False}),
    "st_mamba-2-groups": ("st_mamba", {"mixer": "mamba2", "order": "sst", "groups": 2}),
}
KEPT = """transformer2d transformer2d-stdit transformer2d-low-rank latte latte-text stdit-v1-scaled stdit-v2
stdit-v3-no-sigma st_mamba st_mamba-2-groups st_rwkv-sst latte-2-text latte-3-text latte-4-class axial-video
axial-video-summed wan hunyuan""".split()
every_variant = pytest.mark.parametrize(("name", "overrides"), [
    pytest.param(*case, id=name, marks=() if name in KEPT else pytest.mark.slow) for name, case in VARIANTS.items()
])  # fmt: skip


def make(name, overrides, dtype=torch.float64):
    torch.manual_seed(0)
    model = zoo.create(name, "test", **overrides).to(dtype)
    randomise(model)
    return model


# Sizes


BUILT = [
    (name, size, {})
    for name in zoo.list_models()
    for size in zoo.sizes(name)
    if size != "test" and "axial" not in name and not size.endswith(("/4", "/8"))  # which docstrings leave out
]
BUILT += [("transformer2d", size, {"block": "stdit"}) for size in ("720m", "3b")]
BUILT += [("st_mamba", size, {"mixer": "mamba2"}) for size in ("S/2", "B/2", "L/2")]


LARGE = re.compile(r".*[\d.](b|B)(/2)?")  # of billions


@pytest.mark.parametrize(
    ("name", "size", "overrides"), [slow(*built) if LARGE.fullmatch(built[1]) else built for built in BUILT]
)
def test_parameter_counts_are_those_of_the_docstring(name, size, overrides):
    with torch.device("meta"):
        model = zoo.create(name, size, **overrides)
    assert f"{sum(param.numel() for param in model.parameters()):,}" in sys.modules[type(model).__module__].__doc__
    assert not list(model.buffers())


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
        (("latte", "test"), {"depth": 3}, "depth=3 is odd"),
        (("stdit", "test"), {"version": "v4"}, "version='v4': expected one of 'v1', 'v2', 'v3'"),
        (("stdit", "test"), {"kv_heads": 3}, "heads=4 is not a multiple of kv_heads=3"),
        (("stdit", "test"), {"version": "v2", "hidden": 64}, "hidden=64: v2 embeds height, width and aspect ratio"),
        (("stdit", "test"), {"space_scale": 0.5}, "space_scale and time_scale are options of v1; v3 has input_sq_size"),
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
        (
            ("axial_image", "test"),
            {"outer": 3},
            "outer=3 is odd, but blocks come in pairs",
        ),
        (("axial_image", "test"), {"channels": 0}, "channels=0: take at least 1"),
        (("axial_image", "test"), {"dropout": 1.0}, r"dropout=1.0 is not a share in \[0, 1\)"),
        (("evoformer", "test"), {"depth": -1}, "depth=-1: expected at least 0"),
        (("evoformer", "test"), {"extra_depth": -1}, "extra_depth=-1: expected at least 0"),
        (("evoformer", "test"), {"chunk": 0}, "chunk=0: it has to be at least 1"),
        (("pairformer", "test"), {"msa_depth": 0}, "msa_depth=0: it has to be at least 1"),
    ],
)
def test_invalid_names_and_options_are_refused(args, kwargs, message):
    refused(message, zoo.create, *args, **kwargs)


def test_lists_are_patches_too():
    assert zoo.create("transformer2d", "test", patch=[1, 4, 4]).config.patch == (1, 4, 4)


# Inputs


@every_variant
def test_any_lengths_and_padding_to_whole_patches(name, overrides):
    model = make(name, overrides)
    for batch, frames, height, width in [(1, 7, 8, 8), (2, 1, 6, 10), (1, 2, 7, 9)]:
        inputs = model.example_inputs(batch, frames=frames, height=height, width=width)
        out = model(**inputs)
        assert out.shape == (batch, model.config.out_channels, frames, height, width)
        assert out.isfinite().all()
        assert out.std() > 0.1
    padded = {**inputs, "x": F.pad(inputs["x"], (0, 1, 0, 1))}
    torch.testing.assert_close(out, model(**padded)[..., :7, :9])


@every_variant
def test_example_inputs_are_the_forwards_arguments_on_the_default_device(name, overrides):
    with torch.device("meta"):
        model = zoo.create(name, "test", **overrides)
        inputs = model.example_inputs(batch=2, frames=3, height=4, width=6)
        out = model(**inputs)
    assert {tensor.device.type for tensor in (out, *inputs.values())} == {"meta"}
    assert inputs["timestep"].shape in ((2,), (2, 3))  # one a frame, where the model has those
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
        "label": torch.full((2,), getattr(model.config, "num_classes", 0) or 0),  # the null class
        "context": inputs.get("context", torch.zeros(())) + 1,
        "context_mask": torch.arange(7) == 1,
        "image": -inputs.get("image", torch.zeros(())),  # normalised, whatever its scale
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
        refused(f"a model built with .* {verb} {key}", model, **given)
    if "context" in taken and "context" not in inputs:
        refused("takes no context_mask", model, **inputs, context_mask=torch.ones(1, 7, dtype=torch.bool))


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


@pytest.mark.parametrize(("name", "overrides"), [*every_variant.args[1], slow("axial_image", {"channels": 3})])
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
    assert name == "axial_image" or model(**model.example_inputs()).abs().max() == 0
