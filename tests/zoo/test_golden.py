"""Models against their authors' code, which is not installed, by numbers that it gave: tests/golden.

The scripts there made those of Latte (variant 1, Vchitect/Latte at b27c24a1) and of the Axial Transformer
(google-research), in float64. Those of STDiT were made with hpcaitech/Open-Sora at v1.0.0 (STDiT), v1.1.0 (STDiT2) and
v1.2.0 (STDiT3), on CPU, with weights and inputs drawn by `uniform` below under the names of that code, so that anyone
can make them again. What it casts to float32 whatever the model's type was left in float64: attention logits, RMSNorm,
the tables of positions (rounded to float32 at their end, as here), the sinusoids of timesteps and sizes, the output.
xformers' block-diagonal attention was written out as a softmax for each sample; dropout and null captions are off
(`eval`). Samples, whose texts differ in length, ran one by one and, for v2 and v3, share the pixels' count, for which
that code looks at the first sample alone. Element by element, outputs and all gradients agreed to 2e-14 with that
float64 version, and to 3e-6 with the code as it is in float32, both relative to the largest element. Stored are some
values of the output, its moments, and of every gradient the norm and the product with drawn numbers.
"""

import json
import math
import zlib

import numpy as np
import pytest
import torch
from einops import rearrange

import zoo
from tests.golden import axial, latte
from tests.golden.rule import digest, draw, weight
from tests.support.paths import GOLDEN
from tests.support.refusals import refused
from zoo import layers
from zoo.video.latte_weights import official_names
from zoo.video.stdit_weights import open_sora_names

LATTE, AXIAL, STDIT = (json.loads((GOLDEN / f"{name}.json").read_text()) for name in ("latte", "axial", "stdit"))


def sinusoids(x, count):
    """`zoo.layers.sinusoids` in float64: the exponential of float32 is not the same on every CPU."""
    angles = x.double()[..., None] * torch.exp(-math.log(10000) * torch.arange(count // 2).double() / (count // 2))
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


@pytest.fixture(autouse=True)
def default_dtype(request):
    """The dtype of the case, so that weights are carried over as they are."""
    dtype = request.node.callspec.params.get("dtype", torch.float64) if hasattr(request.node, "callspec") else None
    torch.set_default_dtype(dtype or torch.float32)
    yield
    torch.set_default_dtype(torch.float32)


def agree(found, wanted, scale=lambda name: name):
    """Digests agree to 1e-10 of the largest number, for a gradient that is zero but for rounding of another's."""
    assert found.keys() == wanted.keys()
    for name, values in found.items():
        got, expect = (torch.tensor(n, dtype=torch.float64) for n in (digest(name, values.numpy()), wanted[name]))
        assert (got - expect).abs().max() < 1e-10 * max(map(abs, wanted[scale(name)])), name


# Latte


def latte_weights(case):
    """A state dict of the authors' model, float64."""
    with torch.device("meta"):
        shape = {"hidden": latte.WIDTH, "heads": latte.HEADS, "depth": latte.DEPTH, "in_channels": latte.CHANNELS}
        classes = {"num_classes": latte.CLASSES} if case == "class" else {}
        model = zoo.create("latte", "test", conditioning=case, **shape, **classes)
    shapes = {official_names(name)[0]: param.shape for name, param in model.named_parameters()}
    shapes["x_embedder.proj.weight"] = (latte.WIDTH, latte.CHANNELS, 2, 2)
    state = {name: torch.from_numpy(weight(name, *shape)) for name, shape in shapes.items()}
    tables = {"pos_embed": (latte.SIDE // 2) ** 2, "temp_embed": latte.FRAMES}
    return state | {name: torch.zeros(1, n, latte.WIDTH) for name, n in tables.items()}


@pytest.mark.parametrize("case", latte.CASES)
def test_latte(monkeypatch, case):
    state, timestep = latte_weights(case), torch.tensor(latte.TIMESTEP)
    assert (layers.sinusoids(timestep, 256) - sinusoids(timestep, 256)).abs().max() < 1e-6 * max(latte.TIMESTEP)
    monkeypatch.setattr(layers, "sinusoids", sinusoids)
    model = zoo.from_reference("latte", state, heads=latte.HEADS)
    x = torch.from_numpy(draw("x", 2, latte.FRAMES, latte.CHANNELS, latte.SIDE, latte.SIDE)).requires_grad_()
    given = {"label": torch.tensor(latte.LABEL)} if case == "class" else {}
    out = rearrange(model(rearrange(x, "b t i h w -> b i t h w"), timestep, **given), "b o t h w -> b t o h w")
    assert out.std() > 0.1
    out.backward(torch.from_numpy(draw("gradient", *out.shape)))
    grads = {official_names(name)[0]: param.grad for name, param in model.named_parameters()}
    found = {name: grads[name].reshape(state[name].shape) for name in grads.keys() & LATTE[case].keys()}
    agree({"output": out.detach(), "x": x.grad, **found}, LATTE[case])


def test_the_configuration_of_latte_is_read_off_its_weights():
    config = zoo.from_reference("latte", latte_weights("class"), heads=latte.HEADS).config
    found = config.hidden, config.depth, config.patch, config.in_channels, config.sample_size, config.num_classes
    assert found == (latte.WIDTH, latte.DEPTH, (1, 2, 2), latte.CHANNELS, latte.SIDE, latte.CLASSES)
    assert config.conditioning == "class"
    assert config.learn_sigma
    assert zoo.from_reference("latte", latte_weights("none"), heads=latte.HEADS).config.conditioning == "none"
    with torch.device("meta"):
        for hidden, more in ((384, {}), (392, {"heads": 7})):
            model = zoo.create("latte", "S/2", depth=2, hidden=hidden, **more)
            state = {official_names(name)[0]: param for name, param in model.named_parameters()}
            state["x_embedder.proj.weight"] = torch.empty(hidden, 4, 2, 2)
            state["pos_embed"], state["temp_embed"] = torch.empty(1, 256, hidden), torch.empty(1, 16, hidden)
            if hidden == 384:
                assert zoo.from_reference("latte", state).config == model.config
        refused("no Latte of hidden=392 was published: say how many heads", zoo.from_reference, "latte", state)


# The Axial Transformer


def axial_names(name, scope):
    """The authors' variables that one of our parameters is made of, stacked along its first dim."""
    path = name.split(".")
    suffix = {"weight": "w", "bias": "b"}.get(path[-1])
    if path[0] in ("outer", "exterior", "inner"):
        row = "col" if path[2] == "column" else "row"
        rest = path[2:-1] if path[0] == "inner" else path[3:-1]
        block = f"{'' if path[0] == 'exterior' else scope}{path[0]}_{row}_{path[1]}"
        norms = {"norm_attention": "layernorm_attn", "norm_mlp": "layernorm_mlp"}
        if rest[0] in norms:
            return [f"{block}/{norms[rest[0]]}/{'g' if suffix == 'w' else 'b'}"]
        layers = {"qkv": ["attn/q", "attn/k", "attn/v"], "out": ["attn/proj_out"], "up": ["mlp/proj_in"]}
        return [f"{block}/{layer}/{suffix}" for layer in (layers | {"down": ["mlp/proj_out"]})[rest[1]]]
    return {
        "embed.weight": [f"{scope}embs"],
        "positions.row": [f"{scope}pos_embs_h"], "positions.column": [f"{scope}pos_embs_w"],
        "exterior_positions.row": ["pos_embs_h"], "exterior_positions.column": ["pos_embs_w"],
        "convolution.linear.weight": ["exterior_input_conv/w"], "convolution.linear.bias": ["exterior_input_conv/b"],
        "logits.norm.weight": [f"{scope}final_ln/g"], "logits.norm.bias": [f"{scope}final_ln/b"],
        "logits.linear.weight": [f"{scope}final_dense/w"], "logits.linear.bias": [f"{scope}final_dense/b"],
    }[name]  # fmt: skip


def to_ours(name, value):
    """One of their variables as ours: layers with their outputs first, the convolution as (d, (column row e))."""
    if name.endswith("conv/w"):
        return value.permute(3, 1, 0, 2).flatten(1)
    return value.T if name.endswith("/w") else value


def to_theirs(name, value):
    if name.endswith("conv/w"):
        return value.unflatten(1, (3, 3, -1)).permute(2, 1, 3, 0)
    return value.T if name.endswith("/w") else value


@pytest.mark.parametrize("case", axial.CASES)
def test_the_axial_transformer(case):
    sizes = {name: getattr(axial, name.upper()) for name in ("heads", "exterior", "outer", "inner", "levels")}
    model = zoo.create("axial_image", "test", channels=axial.CASES[case], height=5, width=7, hidden=axial.DIM, **sizes)
    names = {
        name: axial_names(name, "" if case == "grey" else "transformer2d/") for name, _ in model.named_parameters()
    }

    def parts(name, values):
        return zip(names[name], values.chunk(len(names[name])) if len(names[name]) > 1 else [values])

    state = {}
    for name, param in model.named_parameters():
        values = ((p, axial.initial(f"model/{p}", *to_theirs(p, like).shape)) for p, like in parts(name, param))
        state[name] = torch.cat([to_ours(part, torch.from_numpy(value)) for part, value in values])
    model.load_state_dict(state)
    out = model(torch.from_numpy(axial.image(case)).long())
    assert out.std() > 0.1
    out.backward(torch.from_numpy(draw("gradient", *out.shape)))
    grads = [(part, grad) for name, param in model.named_parameters() for part, grad in parts(name, param.grad)]
    found = {"logits": out.detach(), **{f"model/{part}": to_theirs(part, grad) for part, grad in grads}}
    # the bias of keys has no effect, its gradient is rounding of what the gradient of their weight is made of
    agree(found, AXIAL[case], lambda name: name.removesuffix("b") + "w" if name.endswith("attn/k/b") else name)


# STDiT


def uniform(name, *shape):
    """Numbers in [-1, 1) that are a function of a name, float64: numpy keeps the stream of RandomState for ever."""
    return torch.from_numpy(np.random.RandomState(zlib.crc32(name.encode())).uniform(-1, 1, shape))


def stdit_weight(name, shape):
    """A parameter of Open-Sora: matrices keep the size of what they multiply, norms are near 1."""
    if name.endswith("norm.weight"):
        return 1 + 0.5 * uniform(name, *shape)
    return uniform(name, *shape) * (0.5 if len(shape) == 1 else (3 / np.prod(shape[1:])) ** 0.5)


def stdit_weights(version):
    return {name: stdit_weight(name, shape) for name, shape in STDIT["shapes"][version].items()}


def stdit_inputs(case):
    version, _, masked = case.partition("-")
    height, width = (6, 10) if version == "v1" else (7, 9)  # from v2 on frames are padded to whole patches
    given = {
        "x": uniform("x", 2, 4, 5, height, width), "timestep": torch.tensor([61.5, 3.25]).double(),
        "context": uniform("context", 2, 7, 20), "context_mask": torch.arange(7) < torch.tensor([[7], [3]]),
    }  # fmt: skip
    if version != "v1":
        given["height"], given["width"] = torch.tensor([[56.0, 72.0], [72.0, 56.0]]).double()
        given["fps"] = torch.tensor([24.0, 30.0]).double()
    if version == "v2":
        given["ar"], given["num_frames"] = given["height"] / given["width"], torch.tensor([5.0, 16.0]).double()
    if masked:
        given["x_mask"] = torch.tensor([[True] * 5, [False, True, True, False, True]])
    return given


@pytest.mark.parametrize("case", ["v1", "v2", "v2-masked", "v3", "v3-masked"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_stdit(monkeypatch, case, dtype, tolerance):
    if dtype is torch.float64:  # float32 sines of large numbers differ from one CPU to the next
        monkeypatch.setattr(layers, "sinusoids", sinusoids)
    version, wanted = case[:2], STDIT["cases"][case]
    model = zoo.from_reference("stdit", stdit_weights(version), **STDIT["overrides"][version])
    given = {k: v.to(dtype) if v.is_floating_point() else v for k, v in stdit_inputs(case).items()}
    given["x"].requires_grad_()
    out = model(**given)
    (out * uniform("loss", *out.shape).to(dtype)).sum().backward()
    out = out.double()
    summary = [*out.flatten()[:: out.numel() // 40].tolist(), out.mean().item(), out.std().item()]
    assert out.std() > 0.1
    np.testing.assert_allclose(summary, wanted["output"], rtol=0, atol=tolerance * out.abs().max().item())

    gradients = {"x": given["x"].grad}
    for name, param in model.named_parameters():
        theirs = open_sora_names(name, version)
        parts = param.grad.flatten().split([int(np.prod(STDIT["shapes"][version][n])) for n in theirs])
        gradients.update(zip(theirs, parts))
    assert set(gradients) == set(wanted["gradients"])
    for name, gradient in gradients.items():
        norm, product = wanted["gradients"][name]
        gradient, direction = gradient.flatten().double(), uniform(f"gradient of {name}", gradient.numel())
        assert abs(gradient.norm().item() - norm) < tolerance * norm, name
        assert abs((gradient @ direction).item() - product) < tolerance * norm * direction.norm().item(), name


# Weights of another model


@pytest.mark.parametrize(
    ("name", "changes", "options", "message"),
    [
        ("latte", None, {}, "neither the authors' nor diffusers' Latte"),
        ("latte", {"text_embedding_projection.1.weight": 1}, {}, r"unknown: text_embedding_projection\.1\.weight"),
        ("stdit", {"final_layer.linear.bias": None}, {}, "missing: final_layer.linear.bias"),
        ("stdit", {"blocks.0.attn.q_norm.weight": 12}, {}, "unknown: blocks.0.attn.q_norm.weight"),
        ("stdit", {}, {"heads": None}, "hidden=48 is not a published size of v1; pass heads="),
        ("stdit", {"pos_embed": (4, 48)}, {}, "pos_embed of these weights does not fit space_scale"),
    ],
)
def test_weights_of_another_model_are_refused(name, changes, options, message):
    state = {} if changes is None else latte_weights("class") if name == "latte" else stdit_weights("v1")
    state |= {key: shape and torch.zeros(shape)[None] for key, shape in (changes or {}).items()}
    options = {"heads": latte.HEADS} | (STDIT["overrides"]["v1"] if name == "stdit" else {}) | options
    state, options = ({k: v for k, v in given.items() if v is not None} for given in (state, options))
    refused(message, zoo.from_reference, name, state, **options)


def test_positions_of_stdit_are_those_of_its_scale():
    state = stdit_weights("v1") | {"pos_embed": layers.sincos(torch.arange(4) / 0.5, 48)[None]}
    zoo.from_reference("stdit", state | {"y_embedder.y_embedding": torch.zeros(7, 20)}, **STDIT["overrides"]["v1"])
