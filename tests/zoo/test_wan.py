"""Wan against diffusers' WanTransformer3DModel; its training on several ranks against one process."""

import pytest
import torch

import zoo
from tests.support.oracles import agree, copy_weights, diffusers, randomise
from tests.support.slow import slow
from zoo.video.diffusion import RectifiedFlow, euler
from zoo.video.wan import diffusers_names, from_diffusers, to_diffusers


def oracle(**overrides):
    config = {
        "num_attention_heads": 4,
        "attention_head_dim": 12,
        "in_channels": 3,
        "out_channels": 3,
        "text_dim": 20,
        "ffn_dim": 40,
        "num_layers": 2,
    }
    model = diffusers.WanTransformer3DModel(**{**config, **overrides})
    randomise(model)
    return model


@pytest.fixture
def double_stays_double(monkeypatch):
    """diffusers' Wan computes norms and modulation in float32, whatever its type: let float64 be."""
    to_float = torch.Tensor.float
    monkeypatch.setattr(torch.Tensor, "float", lambda x: x if x.dtype is torch.float64 else to_float(x))


@pytest.mark.usefixtures("double_stays_double")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize(
    ("batch", "frames", "height", "width", "heads"),
    [(2, 7, 6, 10, 4), (1, 1, 8, 8, 3), slow(1, 3, 4, 2, 2)],  # heads of 12, 16 and 24 channels: thirds that are uneven
)
def test_agrees_with_diffusers(batch, frames, height, width, heads, dtype, tolerance):
    torch.manual_seed(0)
    theirs = oracle(num_attention_heads=heads, attention_head_dim=48 // heads).to(dtype)
    model = zoo.from_reference("wan", theirs.state_dict(), heads=heads).to(dtype)
    copy_weights(model, theirs, diffusers_names)  # in full precision
    assert model.config.mlp == 40
    x, context = torch.randn(batch, 3, frames, height, width, dtype=dtype), torch.randn(batch, 7, 20, dtype=dtype)
    timestep, mask = torch.tensor([61.5, 999.0])[:batch], torch.arange(7) < torch.tensor([4, 7])[:batch, None]
    padded = context * mask[..., None]  # as WanPipeline pads short captions

    agree(
        model,
        theirs,
        diffusers_names,
        lambda model, x: model(x, timestep, context=context, context_mask=mask),
        lambda theirs, x: theirs(x, timestep, padded).sample,
        x,
        tolerance,
    )


def test_weights_of_another_model_are_refused():
    state = oracle().state_dict()
    with pytest.raises(ValueError, match=r"missing: proj_out\.bias"):
        zoo.from_reference("wan", {k: v for k, v in state.items() if k != "proj_out.bias"}, heads=4)
    with pytest.raises(ValueError, match=r"no Wan of hidden=48 was published: say how many heads it has, heads="):
        zoo.from_reference("wan", state)
    with pytest.raises(ValueError, match=r"not diffusers' Wan: no patch_embedding\.weight"):
        zoo.from_reference("wan", {})
    both_ends = oracle(**IMAGE, pos_embed_seq_len=10).state_dict()
    with pytest.raises(ValueError, match=r"unknown: .*image_embedder\.pos_embed"):
        zoo.from_reference("wan", both_ends, heads=4)
    with pytest.raises(ValueError, match="hidden=48 in heads=12: rotary positions in three dims need an even number"):
        zoo.from_reference("wan", state, heads=12)


@pytest.mark.parametrize("size", ["1.3B", "i2v-14B", slow("14B"), slow("i2v-2.2-14B"), slow("ti2v-5B")])
def test_parameters_are_those_of_diffusers(size):
    with torch.device("meta"):
        model = zoo.create("wan", size)
        config = model.config
        image = (
            {"image_dim": config.image_channels, "added_kv_proj_dim": config.hidden} if config.image_channels else {}
        )
        theirs = diffusers.WanTransformer3DModel(
            num_attention_heads=config.heads, attention_head_dim=128, ffn_dim=config.mlp, num_layers=config.depth,
            in_channels=config.in_channels, out_channels=config.out_channels, **image,
        )  # fmt: skip
    assert f"{sum(param.numel() for param in model.parameters()):,}" in zoo.video.wan.__doc__
    ours = {name: param.numel() for name, param in model.named_parameters()}
    numbers = {name: param.numel() for name, param in theirs.named_parameters()}
    assert {n for name in ours for n in diffusers_names(name)} == set(numbers)
    assert all(sum(numbers[n] for n in diffusers_names(name)) == count for name, count in ours.items())


IMAGE = {"in_channels": 7, "out_channels": 3, "added_kv_proj_dim": 48, "image_dim": 8}


@pytest.mark.usefixtures("double_stays_double")
@pytest.mark.parametrize("kind", ["first frame", "image tokens", "frame times"])
def test_a_clip_that_goes_on_from_an_image_agrees_with_diffusers(kind):
    torch.manual_seed(0)
    options = {"first frame": {"in_channels": 7, "out_channels": 3}, "image tokens": IMAGE, "frame times": {}}[kind]
    theirs = oracle(**options).double()
    model = zoo.from_reference("wan", theirs.state_dict(), heads=4, frame_times=kind == "frame times").double()
    copy_weights(model, theirs, diffusers_names)
    assert (model.config.condition_channels, model.config.image_channels) == {
        "first frame": (4, 0), "image tokens": (4, 8), "frame times": (0, 0)
    }[kind]  # fmt: skip
    x = torch.randn(2, model.config.in_channels, 3, 6, 4, dtype=torch.float64)
    # diffusers' reads how many tokens the image has off a text of 512
    context = torch.randn(2, 512 if kind == "image tokens" else 7, 20, dtype=torch.float64)
    told, asked, timestep = {}, {}, torch.tensor([61.5, 999.0])
    tokens = timestep
    if kind == "image tokens":
        told["image"] = asked["encoder_hidden_states_image"] = torch.randn(2, 5, 8, dtype=torch.float64)
    if kind == "frame times":
        timestep = torch.stack([timestep * share for share in (0, 0.5, 1)], dim=1)
        tokens = timestep.repeat_interleave(3 * 2, dim=1)
    agree(
        model,
        theirs,
        diffusers_names,
        lambda model, x: model(x, timestep, context=context, **told),
        lambda theirs, x: theirs(x, tokens, context, **asked).sample,
        x,
        1e-12,
    )


def test_the_velocity_is_that_of_the_published_weights():
    """A model fitted to data at one point moves noise to it, by the objective's own sampler and by diffusers'."""
    model, target = zoo.create("wan", "test"), torch.full((1, 4, 1, 2, 2), 0.7)

    class Perfect(torch.nn.Module):
        flow_sign = model.flow_sign

        def forward(self, x, timestep):
            return (x - target) / (timestep / 1000)  # noise - target

    noise = torch.randn(1, 4, 1, 2, 2)
    loss, _ = RectifiedFlow(Perfect())(target, noise, torch.tensor([0.4]))
    assert loss.max() < 1e-10
    torch.testing.assert_close(euler(Perfect(), noise, 3), target)
    scheduler, x = diffusers.FlowMatchEulerDiscreteScheduler(), noise
    scheduler.set_timesteps(3)
    for t in scheduler.timesteps:
        x = scheduler.step(Perfect()(x, t), t, x).prev_sample
    torch.testing.assert_close(x, target)


@pytest.mark.parametrize("overrides", [{}, {"in_channels": 9, "condition_channels": 5, "image_channels": 6}])
def test_diffusers_takes_a_model_back(overrides):
    torch.manual_seed(0)
    model = zoo.create("wan", "test", **overrides)
    randomise(model)
    theirs = to_diffusers(model)
    again = from_diffusers(theirs.state_dict(), theirs.config)
    assert again.config == model.config
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters()))
