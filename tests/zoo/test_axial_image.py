"""The Axial Transformer of images: what makes it autoregressive, bits, samples. test_golden.py has its numbers."""

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange
from torch.utils.flop_counter import FlopCounterMode

import zoo
from tests.support.oracles import randomise
from tests.support.refusals import refused
from tests.support.slow import slow
from zoo.image.autoregressive import BitsPerDim, sample


def make(dtype=torch.float64, **overrides):
    torch.manual_seed(0)
    model = zoo.create("axial_image", "test", **overrides).to(dtype)
    randomise(model)
    return model


@pytest.mark.parametrize("overrides", [{}, {"channels": 3}, {"channels": 2, "num_classes": 3}], ids=str)
def test_logits_do_not_see_their_own_value_or_later_ones(overrides):
    model = make(**overrides).eval()
    given = model.example_inputs(2, height=4, width=5)
    pixels = given["image"].flatten(1)
    logits = model(**given).flatten(1, -2)
    for at in range(pixels.shape[1]):
        changed = pixels.clone()
        changed[:, at] = (changed[:, at] + 1) % model.config.levels
        again = model(**{**given, "image": changed.view_as(given["image"])}).flatten(1, -2)
        moved = (again - logits).abs().amax((0, 2))
        assert moved[: at + 1].max() == 0, at
        if at + 1 < pixels.shape[1]:
            assert moved[at + 1] > 1e-6, at  # the next value sees it, be it in the next row or channel
    assert at + 1 == pixels.shape[1]


@pytest.mark.parametrize("overrides", [{}, {"channels": 2, "num_classes": 3}], ids=str)
def test_samples_are_what_the_logits_say(overrides):
    """Every value of a sample is the largest of noise plus logits, the logits of one forward of the whole sample."""
    model = make(**overrides).eval()
    given = model.example_inputs(3, height=3, width=4)
    shape, steps = (*given.pop("image").shape, model.config.levels), []
    noise = -torch.empty(shape, dtype=torch.float64).exponential_().log()
    images = sample(model, noise, on_step=lambda i, n: steps.append((i, n)), **given)
    assert images.shape == shape[:-1]
    assert torch.equal(images, (model(images, **given) + noise).argmax(-1))
    assert steps == [(i + 1, len(steps)) for i in range(12 * shape[1])]


@pytest.mark.parametrize("overrides", [{"num_classes": 3}, slow({"channels": 3})], ids=str)
def test_shared_rows_are_computed_once_and_samples_are_the_same(overrides):
    """The paper's sampling draws the same images: of 12 x 12 pixels in 31 times fewer FLOPs, of 3 channels in 103."""
    model = make(**overrides).eval()
    given = model.example_inputs(2, height=6, width=7)
    shape = (*given.pop("image").shape, model.config.levels)
    noise, counted, images = -torch.empty(shape, dtype=torch.float64).exponential_().log(), [], []
    for drawing in (None, model.drawing()):
        with FlopCounterMode(display=False) as counter:
            images.append(sample(model, noise, drawing=drawing, **given))
        counted.append(counter.get_total_flops())
    assert torch.equal(*images)
    assert counted[0] > {1: 12, 3: 30}[model.config.channels] * counted[1]


def test_bits_are_those_of_cross_entropy():
    model = make(channels=2)
    image = model.example_inputs(2, height=4, width=5)["image"]
    bits, weight = BitsPerDim(model)(image)
    assert bits.shape == weight.shape == image.shape
    assert (weight == 1).all()
    wanted = F.cross_entropy(rearrange(model(image), "b c h w k -> (b c h w) k").float(), image.flatten())
    torch.testing.assert_close(bits.mean() * torch.log(torch.tensor(2.0)), wanted)
    fresh = zoo.create("axial_image", "test", levels=16)  # which gives all levels the same chance
    torch.testing.assert_close(BitsPerDim(fresh)(fresh.example_inputs()["image"])[0].mean(), torch.tensor(4.0))


def test_wrong_inputs_are_refused():
    model = make()
    with pytest.raises(ValueError, match=r"an image of 2 channels of 5 x 13 pixels: .* height=12, width=12"):
        model(torch.zeros(1, 2, 5, 13, dtype=torch.long))
    refused("takes no label", model, torch.zeros(1, 1, 5, 5, dtype=torch.long), torch.zeros(1, dtype=torch.long))


@pytest.mark.parametrize("pixels", [32, 64])
def test_published_sizes(pixels):
    with torch.device("meta"):
        model = zoo.create("axial_image", f"imagenet{pixels}")
        assert model(**model.example_inputs(2)).shape == (2, 3, pixels, pixels, 256)
