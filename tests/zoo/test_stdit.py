"""STDiT against Open-Sora's own code, through numbers that it gave: tests/golden/stdit.json.

They were made with hpcaitech/Open-Sora at v1.0.0 (STDiT), v1.1.0 (STDiT2) and v1.2.0 (STDiT3), on CPU, with weights and
inputs drawn by `draw` below under the names of that code, so that anyone can make them again. What it casts to float32
whatever the model's type was left in float64: attention logits, RMSNorm, the tables of positions (rounded to float32 at
their end, as here), the sinusoids of timesteps and sizes, the output. xformers' block-diagonal attention was written
out as a softmax for each sample; dropout and null captions are off (`eval`). Samples, whose texts differ in length, ran
one by one and, for v2 and v3, share the pixels' count, for which that code looks at the first sample alone.

Element by element, outputs and all gradients agreed to 2e-14 with that float64 version, and to 3e-6 with the code as it
is in float32, both relative to the largest element. Stored are some values of the output, its moments, and of every
gradient the norm and the product with drawn numbers.
"""

import json
import zlib

import numpy as np
import pytest
import torch

import zoo
import zoo.layers
from tests.support.cases import build
from tests.support.paths import GOLDEN
from zoo.video.diffusion import IDDPM, RectifiedFlow
from zoo.video.stdit import open_sora_names

WANTED = json.loads((GOLDEN / "stdit.json").read_text())
CASES = ["v1", "v2", "v2-masked", "v3", "v3-masked"]
TOKENS = (7, 3)  # of the two captions


def draw(name, *shape):
    """Numbers in [-1, 1) that are a function of a name, float64: numpy keeps the stream of RandomState for ever."""
    return torch.from_numpy(np.random.RandomState(zlib.crc32(name.encode())).uniform(-1, 1, shape))


def weight(name, shape):
    """A parameter of Open-Sora: matrices keep the size of what they multiply, norms are near 1."""
    if name.endswith("norm.weight"):
        return 1 + 0.5 * draw(name, *shape)
    return draw(name, *shape) * (0.5 if len(shape) == 1 else (3 / np.prod(shape[1:])) ** 0.5)


def inputs(case):
    version, _, masked = case.partition("-")
    height, width = (6, 10) if version == "v1" else (7, 9)  # from v2 on frames are padded to whole patches
    given = {
        "x": draw("x", 2, 4, 5, height, width),
        "timestep": torch.tensor([61.5, 3.25]).double(),
        "context": draw("context", 2, max(TOKENS), 20),
        "context_mask": torch.arange(max(TOKENS)) < torch.tensor(TOKENS)[:, None],
    }
    if version != "v1":
        given["height"], given["width"] = torch.tensor([[56.0, 72.0], [72.0, 56.0]]).double()
        given["fps"] = torch.tensor([24.0, 30.0]).double()
    if version == "v2":
        given["ar"], given["num_frames"] = given["height"] / given["width"], torch.tensor([5.0, 16.0]).double()
    if masked:
        given["x_mask"] = torch.tensor([[True] * 5, [False, True, True, False, True]])
    return given


def double_sinusoids(x, count):
    angles = x.double()[..., None] * 10000 ** (-torch.arange(count // 2).double() / (count // 2))
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def published(version):
    return {name: weight(name, shape) for name, shape in WANTED["shapes"][version].items()}


@pytest.fixture
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(before)


@pytest.mark.usefixtures("default_dtype")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_agrees_with_open_sora(monkeypatch, case, dtype, tolerance):
    if dtype is torch.float64:  # float32 sines of large numbers differ from one CPU to the next
        monkeypatch.setattr(zoo.layers, "sinusoids", double_sinusoids)
    version, wanted = case[:2], WANTED["cases"][case]
    model = zoo.from_reference("stdit", published(version), **WANTED["overrides"][version])
    given = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs(case).items()}
    given["x"].requires_grad_()
    out = model(**given)
    (out * draw("loss", *out.shape).to(dtype)).sum().backward()

    out = out.double()
    summary = [*out.flatten()[:: out.numel() // 40].tolist(), out.mean().item(), out.std().item()]
    assert out.std() > 0.1
    np.testing.assert_allclose(summary, wanted["output"], rtol=0, atol=tolerance * out.abs().max().item())

    gradients = {"x": given["x"].grad}
    for name, param in model.named_parameters():
        theirs = open_sora_names(name, version)
        parts = param.grad.flatten().split([int(np.prod(WANTED["shapes"][version][n])) for n in theirs])
        gradients.update(zip(theirs, parts))
    assert set(gradients) == set(wanted["gradients"])
    for name, gradient in gradients.items():
        norm, product = wanted["gradients"][name]
        direction = draw(f"gradient of {name}", gradient.numel())
        gradient = gradient.flatten().double()
        assert abs(gradient.norm().item() - norm) < tolerance * norm, name
        assert abs((gradient @ direction).item() - product) < tolerance * norm * direction.norm().item(), name


# Weights


def test_weights_of_another_model_are_refused():
    state, given = published("v1"), WANTED["overrides"]["v1"]
    with pytest.raises(ValueError, match=r"missing: final_layer.linear.bias"):
        zoo.from_reference("stdit", {k: v for k, v in state.items() if k != "final_layer.linear.bias"}, **given)
    with pytest.raises(ValueError, match=r"unknown: blocks.0.attn.q_norm.weight"):
        zoo.from_reference("stdit", {**state, "blocks.0.attn.q_norm.weight": torch.ones(12)}, **given)
    with pytest.raises(ValueError, match="hidden=48 is not a published size of v1; pass heads="):
        zoo.from_reference("stdit", state)
    state["pos_embed"] = zoo.layers.sincos(torch.arange(4) / 0.5, 48)[None]
    zoo.from_reference("stdit", {**state, "y_embedder.y_embedding": torch.zeros(7, 20)}, **given)
    with pytest.raises(ValueError, match="pos_embed of these weights was not made with space_scale"):
        zoo.from_reference("stdit", state, heads=4)


# Clean frames


@pytest.mark.parametrize("wrap", [RectifiedFlow, IDDPM])
def test_clean_frames_are_seen_without_noise_and_not_judged(wrap):
    objective = wrap(build("stdit-v3").float())
    inputs = objective.model.example_inputs(2)
    inputs["x_mask"] = torch.tensor([[True] * 5, [False, True, True, False, True]])
    inputs["timestep"] = torch.tensor([0.5, 0.9]) if wrap is RectifiedFlow else torch.tensor([500, 900])
    noise, seen = torch.randn_like(inputs["x"]), []
    objective.model.embed.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    loss, weight = objective(noise=noise, **inputs)
    objective(noise=noise, **{k: v for k, v in inputs.items() if k != "x_mask"})
    masked, plain = seen
    clean = ~inputs["x_mask"][:, None, :, None, None].expand_as(weight)
    assert torch.equal(weight, (~clean).float())
    assert torch.equal(masked[~clean], plain[~clean])
    torch.testing.assert_close(masked[clean], inputs["x"][clean], rtol=0, atol=0 if wrap is RectifiedFlow else 0.1)
    assert loss.shape == inputs["x"].shape


def test_the_first_version_knows_no_clean_frames():
    model = build("stdit-v1").float()
    with pytest.raises(ValueError, match="a model built with version='v1' takes no x_mask"):
        model(**model.example_inputs(), x_mask=torch.ones(1, 5, dtype=torch.bool))
