"""Objectives and samplers against diffusers' schedulers, closed forms, and sharded evaluation by slices."""

import math

import pytest
import torch
from torch import Tensor, nn

import zoo
from tests.support.cases import build
from tests.support.refusals import refused
from zoo.video.diffusion import IDDPM, RectifiedFlow
from zoo.video.linear_denoiser import fit_linear_denoiser, linear_denoiser_loss
from zoo.video.noise import linear_schedule, seeded_noise, seeded_uniform, shift_at
from zoo.video.sampling import ddim, euler

SHAPE = (2, 3, 4, 5, 6)  # b c t h w


class Fixed(nn.Module):
    """A denoiser that acts on every element by itself: a x + b t / 1000 + label / 10, `multiple` times the channels."""

    stages = {"": "x=b c t h w -> b c t h w", "blocks.*": "b [t] s [c]", "out": "b t s [c], context=b [l c]"}

    def __init__(self, multiple: int = 1):
        super().__init__()
        self.a = nn.Parameter(torch.linspace(-0.8, 0.9, multiple))
        self.b = nn.Parameter(torch.tensor(0.3))
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor, timestep: Tensor, label: Tensor | None = None) -> Tensor:
        self.seen.append(timestep)
        bias = self.b * timestep.view(-1, 1, 1, 1, 1) / 1000
        if label is not None:
            bias = bias + label.view(-1, 1, 1, 1, 1) / 10
        return torch.cat([a * x + bias for a in self.a], dim=1)


def tensors(seed: int = 0) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return torch.rand(SHAPE, generator=random) * 2 - 1, torch.randn(SHAPE, generator=random)


X, NOISE = tensors()
TIMESTEP = torch.tensor([3, 800])


# Objectives


def test_rectified_flow_states_open_sora_convention():
    u = torch.tensor([0.25, 0.75])
    model = Fixed(2)
    loss, weight = RectifiedFlow(model)(X, NOISE, u)
    x_u = (1 - u.view(2, 1, 1, 1, 1)) * X + u.view(2, 1, 1, 1, 1) * NOISE
    torch.testing.assert_close(loss, (X - NOISE - model(x_u, 1000 * u)[:, :3]) ** 2)
    assert torch.equal(model.seen[0], 1000 * u)
    assert loss.shape == weight.shape == SHAPE
    assert weight.eq(1).all()


def reference(name: str, **options):
    """A diffusers scheduler of the same 1000 linear steps. Its tables are float32, which is too coarse for 1 - abar."""
    import diffusers

    linear = {"beta_start": 1e-4, "beta_end": 0.02, "beta_schedule": "linear", "clip_sample": False}
    scheduler = getattr(diffusers, name)(**linear, **options)
    scheduler.alphas_cumprod = (1 - torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64)).cumprod(0)
    return scheduler


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    """To 1e-5 of the largest value."""
    torch.testing.assert_close(ours, theirs.float(), atol=1e-5 * max(1.0, theirs.abs().max().item()), rtol=0)


def test_iddpm_noising_matches_diffusers():
    for step in (0, 1, 500, 999):
        timestep = torch.full((2,), step)
        ours = IDDPM(nn.Identity()).q_sample(X, NOISE, timestep)
        assert_close(ours, reference("DDPMScheduler").add_noise(X, NOISE, timestep))


def test_iddpm_mean_and_learned_variance_match_diffusers():
    objective, scheduler = IDDPM(nn.Identity()), reference("DDPMScheduler", variance_type="learned_range")
    x_s, v = X, tensors(seed=1)[0]
    for step in (1, 2, 500, 999):  # diffusers clamps the variance of step 0 instead of taking that of step 1
        mean, log_variance = objective.p_mean_variance(NOISE, v, x_s, torch.full((2,), step))
        random = torch.Generator().manual_seed(0)
        theirs = scheduler.step(torch.cat([NOISE, v], 1), step, x_s, generator=random).prev_sample
        drawn = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
        assert_close(mean + (0.5 * log_variance).exp() * drawn, theirs)
        assert_close(log_variance, scheduler._get_variance(step, predicted_variance=v))


def test_iddpm_bound_is_the_kl_of_torch_distributions_and_teaches_only_the_variance():
    from torch.distributions import Normal, kl_divergence

    timestep, model = TIMESTEP, Fixed(2)
    objective = IDDPM(model)
    loss, weight = objective(X, NOISE, timestep)
    x_s = objective.q_sample(X, NOISE, timestep)
    predicted, v = model(x_s, timestep).chunk(2, dim=1)
    mean, log_variance = objective.p_mean_variance(predicted, v, x_s, timestep)
    true_mean, true_log_variance = objective.posterior(X, x_s, timestep)
    truth = Normal(true_mean, (0.5 * true_log_variance).exp().expand(SHAPE))
    kl = kl_divergence(truth, Normal(mean, (0.5 * log_variance).exp()))
    torch.testing.assert_close(loss, (NOISE - predicted) ** 2 + kl / math.log(2), atol=1e-4, rtol=1e-4)
    assert loss.shape == weight.shape == SHAPE
    # The noise half learns from the squared error alone: the gradient of its scale a[0] is that of the plain loss.
    grad = torch.autograd.grad(loss.mean(), model.a)[0]
    plain = torch.autograd.grad(((NOISE - predicted) ** 2).mean(), model.a)[0]
    assert grad[0].item() == pytest.approx(plain[0].item(), rel=1e-5)
    assert plain[1] == 0
    assert grad[1].abs() > 0


def test_iddpm_first_step_is_the_likelihood_of_256_bins():
    """At s = 0 the bound is -log p(bin of x): over all 256 values it sums to one."""
    from zoo.video.diffusion import _discretised_log_likelihood as log_likelihood

    values = torch.linspace(-1, 1, 256)
    for mean, std in ((0.1, 0.3), (-0.95, 0.05), (1.2, 0.1)):
        total = log_likelihood(values, torch.tensor(mean), torch.tensor(std).log()).exp().sum()
        assert total.item() == pytest.approx(1, abs=1e-3)
    model = Fixed(2)
    objective, zero = IDDPM(model), torch.zeros(2, dtype=torch.long)
    loss, _ = objective(X, NOISE, zero)
    x_s = objective.q_sample(X, NOISE, zero)
    predicted, v = model(x_s, zero).chunk(2, dim=1)
    mean, log_variance = objective.p_mean_variance(predicted, v, x_s, zero)
    bound = -log_likelihood(X, mean, 0.5 * log_variance) / math.log(2)
    torch.testing.assert_close(loss, (NOISE - predicted) ** 2 + bound)


@pytest.mark.parametrize("kind", [RectifiedFlow, IDDPM])
def test_objective_of_a_slice_is_the_slice_of_the_objective(kind):
    """Sharding along t or w relies on this: bit for bit, uneven and empty slices too."""
    objective = kind(Fixed(2))
    timestep = objective.sample_timestep(torch.tensor([0.0001, 0.6]))
    whole = objective(X, NOISE, timestep)[0]
    for dim, parts in ((2, [3, 1, 0]), (4, [2, 4])):
        shards = zip(X.split(parts, dim), NOISE.split(parts, dim))
        torch.testing.assert_close(torch.cat([objective(*s, timestep)[0] for s in shards], dim), whole, atol=0, rtol=0)


@pytest.mark.parametrize("kind", [RectifiedFlow, IDDPM])
def test_weight_is_per_element(kind):
    objective = kind(Fixed())
    timestep = objective.sample_timestep(torch.tensor([0.2, 0.6]))
    frames = torch.tensor([1.0, 0.0, 1.0, 0.5]).view(1, 1, 4, 1, 1)
    assert torch.equal(objective(X, NOISE, timestep, weight=frames)[1], frames.expand(SHAPE))
    assert torch.equal(
        objective(X, NOISE, timestep, weight=torch.tensor([1.0, 3.0]))[1][:, 0, 0, 0, 0], torch.tensor([1.0, 3.0])
    )


def test_stages_are_those_of_the_model_under_the_objective():
    assert RectifiedFlow(Fixed()).stages == {
        "": "x=b c t h w, noise=b c t h w, x_mask=b t, start=b k t h w -> b c t h w, b c t h w",
        **{f"model.{name}": stage for name, stage in Fixed.stages.items() if name},
    }
    assert list(IDDPM(nn.Identity()).stages) == [""]


def test_an_objective_survives_meta_and_to_empty():
    with torch.device("meta"):
        objective = IDDPM(Fixed(2))
    loss, _ = objective(X.to("meta"), NOISE.to("meta"), torch.zeros(2, dtype=torch.long, device="meta"))
    assert loss.shape == SHAPE
    objective.to_empty(device="cpu")
    timestep = torch.tensor([5, 6])
    assert torch.equal(objective.q_sample(X, NOISE, timestep), IDDPM(nn.Identity()).q_sample(X, NOISE, timestep))


def test_timesteps_are_quantiles_of_the_training_distribution():
    u = (torch.arange(1000) + 0.5) / 1000
    levels = RectifiedFlow(nn.Identity(), loc=0.5, scale=2.0).sample_timestep(u)
    logits = torch.logit(levels.double())
    assert logits.mean().item() == pytest.approx(0.5, abs=0.01)
    assert logits.std().item() == pytest.approx(2.0, abs=0.02)
    steps = IDDPM(nn.Identity()).sample_timestep(u)
    assert steps.tolist() == list(range(1000))
    assert IDDPM(nn.Identity()).sample_timestep(torch.tensor([0.99999999])).item() == 999
    assert RectifiedFlow(nn.Identity()).validation_levels(2).tolist() == pytest.approx([0.3375, 0.6625], abs=1e-3)
    assert IDDPM(nn.Identity()).validation_levels(4).tolist() == [125, 375, 625, 875]
    refused("n >= 1", RectifiedFlow(nn.Identity()).validation_levels, 0)


def test_uniform_and_shifted_levels():
    u = (torch.arange(1000) + 0.5) / 1000
    assert torch.equal(RectifiedFlow(nn.Identity(), uniform=True).sample_timestep(u), u)
    levels = RectifiedFlow(nn.Identity(), shift=5.0).sample_timestep(u)
    assert (levels > 0.9).float().mean().item() == pytest.approx(0.278, abs=0.001)  # 0.014 without a shift
    flow = RectifiedFlow(nn.Identity(), shift=3.0)
    torch.testing.assert_close(flow.validation_levels(4), flow.sample_timestep((torch.arange(4) + 0.5) / 4))


@pytest.mark.parametrize("size", [(51, 480, 848), (102, 144, 256), (17, 720, 1280)])
def test_the_shift_of_a_size_is_open_soras(size):
    """Open-Sora 1.2, `timestep_transform`: its base is one frame of 512 x 512 pixels; its codec makes 5 of 17."""
    frames, height, width = size
    t = torch.tensor([0.1, 0.5, 0.9])
    ratio = math.sqrt(height * width / 512**2) * math.sqrt(frames // 17 * 5)
    flow = RectifiedFlow(nn.Identity(), uniform=True, shift_cells=64 * 64)
    found = flow.sample_timestep(t, (frames // 17 * 5) * (height // 8) * (width // 8))
    torch.testing.assert_close(found, ratio * t / (1 + (ratio - 1) * t))
    assert shift_at(3.0, None, 123) == 3.0


@pytest.mark.parametrize("velocity", [False, True])
def test_velocity_and_min_snr_match_diffusers(velocity):
    from diffusers.training_utils import compute_snr

    model, scheduler = Fixed(1), reference("DDPMScheduler", prediction_type="v_prediction")
    plain, found = (IDDPM(model, velocity=velocity, min_snr=s)(X, NOISE, TIMESTEP) for s in (None, 5.0))
    target = scheduler.get_velocity(X, NOISE, TIMESTEP) if velocity else NOISE
    assert_close(plain[0], (target - model(IDDPM(model).q_sample(X, NOISE, TIMESTEP), TIMESTEP)) ** 2)
    ratio = compute_snr(scheduler, TIMESTEP)
    weight = torch.minimum(ratio, torch.tensor(5.0)) / (ratio + 1 if velocity else ratio)
    assert_close(found[0], plain[0] * weight.view(-1, 1, 1, 1, 1).float())
    assert torch.equal(found[1], plain[1])


def test_a_learned_variance_is_bounded_alike_whatever_is_predicted():
    """A model of the noise and one of the velocity that say the same have the same bound."""
    signal, sigma = (linear_schedule()[name][TIMESTEP].float().view(-1, 1, 1, 1, 1) for name in ("signal", "noise"))
    bounds = []
    for velocity in (False, True):
        error = 0.1 / signal if velocity else 0.1  # what is said to be noise + 0.1 makes x smaller
        target = signal * NOISE - sigma * X if velocity else NOISE
        said = torch.cat([target + error, tensors(seed=1)[0]], 1)
        objective = IDDPM(lambda x, timestep, said=said: said, velocity=velocity)
        bounds.append(objective(X, NOISE, TIMESTEP)[0] - error**2)
    torch.testing.assert_close(*bounds, atol=1e-4, rtol=1e-4)


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
    given = model.example_inputs() | {"x_mask": torch.ones(1, 5, dtype=torch.bool)}
    refused("a model built with version='v1' takes no x_mask", model, **given)


# Samplers


def walked(scheduler, model, x, sign=1, **options):
    """diffusers' loop."""
    with torch.no_grad():
        for timestep in scheduler.timesteps:
            x = scheduler.step(sign * model(x, timestep.expand(2))[:, :3], timestep, x, **options).prev_sample
    return x


@pytest.mark.parametrize(
    ("steps", "eta", "velocity"), [(1, 0, False), (5, 0, False), (50, 0, False), (10, 1, False), (10, 0, True)]
)
def test_ddim_matches_diffusers(steps, eta, velocity):
    kind = "v_prediction" if velocity else "epsilon"
    scheduler = reference("DDIMScheduler", timestep_spacing="trailing", prediction_type=kind)
    scheduler.set_timesteps(steps)
    ours, theirs = ({"eta": eta, name: torch.Generator().manual_seed(3)} for name in ("random", "generator"))
    model = Fixed(2)
    assert_close(ddim(model, NOISE, steps, velocity=velocity, **ours), walked(scheduler, model, NOISE, **theirs))


@pytest.mark.parametrize(("steps", "shift"), [(1, 1.0), (7, 1.0), (25, 1.0), (7, 3.0), (7, 0.5)])
def test_euler_matches_diffusers(steps, shift):
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(sigmas=[1 - i / steps for i in range(steps)])
    model = Fixed(2)
    # its velocity is noise - x
    assert_close(euler(model, NOISE, steps, shift=shift), walked(scheduler, model, NOISE, sign=-1))


def test_a_model_of_the_published_velocity_moves_noise_to_its_data():
    """By the objective's own sampler, and by diffusers'."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    class Perfect(nn.Module):
        flow_sign = zoo.create("wan", "test").flow_sign

        def forward(self, x, timestep):
            return (x - target) / (timestep.view(-1, 1, 1, 1, 1) / 1000)  # noise - target

    target = torch.full_like(NOISE, 0.7)
    assert RectifiedFlow(Perfect())(target, NOISE, torch.tensor([0.4]))[0].max() < 1e-10
    torch.testing.assert_close(euler(Perfect(), NOISE, 3), target)
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(3)
    torch.testing.assert_close(walked(scheduler, Perfect(), NOISE), target)


@pytest.mark.parametrize("sampler", [euler, ddim])
def test_guidance_pushes_away_from_the_null_class(sampler):
    model = Fixed()
    label, null = torch.tensor([3, 7]), torch.tensor([10, 10])
    calls: list[tuple[int, int]] = []
    guided = sampler(
        model, NOISE, 1, guidance=3.0, uncond={"label": null}, label=label, on_step=lambda i, n: calls.append((i, n))
    )
    shifted = null + 3 * (label - null)  # the model is affine in its label
    assert_close(guided, sampler(model, NOISE, 1, label=shifted))
    assert calls == [(1, 1)]
    assert not guided.requires_grad
    model.seen.clear()
    sampler(model, NOISE, 4, label=label, uncond={"label": null})
    assert len(model.seen) == 4  # guidance 1 needs no second call


@pytest.mark.parametrize("sampler", [euler, ddim])
def test_held_frames_are_shown_as_in_training_and_come_back_untouched(sampler):
    """The loop written out, with a model whose frames depend on one another."""
    x_mask = torch.tensor([[False, True, True, True], [False, False, True, True]])
    label, null = torch.tensor([3, 7]), torch.tensor([10, 10])
    fixed, seen = Fixed(), []

    def model(x, timestep, label, x_mask):
        seen.append((x, x_mask))
        return fixed(x, timestep, label) + x.mean(2, keepdim=True)

    made = x_mask[:, None, :, None, None].expand(SHAPE)
    result = sampler(model, NOISE, 3, guidance=2.0, uncond={"label": null}, clean=X, x_mask=x_mask, label=label)
    assert torch.equal(result[~made], X[~made])
    assert len(seen) == 6
    shown = X
    if sampler is ddim:  # step 0 of 1000 is not quite without noise
        shown = IDDPM(nn.Identity()).q_sample(X, NOISE, torch.zeros(2, dtype=torch.long))
    for x, mask in seen:
        torch.testing.assert_close(x[~made], shown[~made], atol=1e-6, rtol=0)
        assert mask is x_mask

    abar = (1 - torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64)).cumprod(0)
    x = torch.where(made, NOISE, shown)
    with torch.no_grad():
        for i in range(3):
            step = torch.full((2,), 1000 * (1 - i / 3) if sampler is euler else [999, 666, 332][i])
            step = step.float() if sampler is euler else step.long()
            told, free = model(x, step, label, x_mask), model(x, step, null, x_mask)
            predicted = free + 2 * (told - free)
            if sampler is euler:
                after = x + predicted / 3
            else:
                now, then = abar[step[0]], abar[[666, 332][i]] if i < 2 else torch.tensor(1.0)
                data = (x - (1 - now).sqrt() * predicted) / now.sqrt()
                after = then.sqrt() * data + (1 - then).sqrt() * predicted
            x = torch.where(made, after.float(), x)
    assert_close(result[made], x[made])


def test_samplers_refuse_what_they_cannot_do():
    model = Fixed()
    refused("uncond", euler, model, NOISE, 2, guidance=2.0)
    refused("steps", euler, model, NOISE, 0)
    refused("1 <= steps <= 1000", ddim, model, NOISE, 1001)
    refused("go together", euler, model, NOISE, 2, clean=NOISE)
    with pytest.raises(ValueError, match=r"needs clean= of the same shape, got \[2, 3, 1, 5, 6\]"):
        ddim(model, NOISE, 2, clean=NOISE[:, :, :1], x_mask=torch.ones(2, 4, dtype=torch.bool))
    refused("random", ddim, model, NOISE, 2, eta=0.5)


# Noise


def test_noise_of_a_frame_depends_on_nothing_else():
    whole = seeded_noise(1, 5, [40, 41], range(7), (3, 4, 6))
    assert whole.shape == (2, 3, 7, 4, 6)
    for held in (range(0, 3), range(3, 6), range(6, 7), range(7, 7)):
        part = seeded_noise(1, 5, [40, 41], held, (3, 4, 6))
        assert torch.equal(part, whole[:, :, held.start : held.stop])
    assert torch.equal(seeded_noise(1, 5, [41], range(7), (3, 4, 6)), whole[1:])
    state = torch.get_rng_state()
    others = [seeded_noise(*key, [40], range(7), (3, 4, 6)) for key in ((1, 6), (2, 5))]
    assert torch.equal(state, torch.get_rng_state())
    for other in others:
        assert (other - whole[:1]).abs().min() > 0
    assert (whole[:, :, 1:] - whole[:, :, :-1]).abs().min() > 0
    assert seeded_noise(0, 0, [0], range(2), (1, 2, 2), dtype=torch.float64).dtype == torch.float64


def test_noise_is_standard_normal_and_uncorrelated_over_frames_and_steps():
    noise = torch.stack([seeded_noise(0, step, range(4), range(4), (2, 16, 16)) for step in range(4)])
    assert noise.mean().item() == pytest.approx(0, abs=0.02)
    assert noise.std().item() == pytest.approx(1, abs=0.02)
    streams = noise.permute(0, 1, 3, 2, 4, 5).reshape(64, -1)
    assert (torch.corrcoef(streams) - torch.eye(64)).abs().max() < 0.2


def test_uniform_numbers_are_functions_of_their_key():
    ids = list(range(500))
    draws = seeded_uniform(0, 3, ids)
    assert torch.equal(seeded_uniform(0, 3, ids[200:210]), draws[200:210])
    assert not torch.equal(seeded_uniform(0, 3, ids, name="label"), draws)
    assert not torch.equal(seeded_uniform(0, 4, ids), draws)
    assert draws.min() > 0
    assert draws.max() < 1
    assert draws.mean().item() == pytest.approx(0.5, abs=0.05)


# Linear denoiser


def gaussian(n: int, seed: int, shift: float = 0.0) -> tuple[Tensor, Tensor]:
    """Clips [n, 1, 2, 2, 3] of a Gaussian with eigenvalues 0.1..3, and those eigenvalues."""
    eigenvalues = torch.logspace(-1, math.log10(3), 12, dtype=torch.float64)
    random = torch.Generator().manual_seed(7)
    basis = torch.linalg.qr(torch.randn(12, 12, generator=random, dtype=torch.float64))[0]
    white = torch.randn(n, 12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return ((white * eigenvalues.sqrt()) @ basis.T + shift).float().view(n, 1, 2, 2, 3), eigenvalues


def test_linear_denoiser_loss_is_what_its_filter_measures_on_noised_clips():
    """The closed form against the filter written out and applied to x_u, on data that is not Gaussian."""
    train, validation = gaussian(500, 0)[0].sign(), gaussian(300, 1)[0].sign()
    u = 0.4
    x, noise = validation.flatten(1).double(), torch.randn(300, 12, dtype=torch.float64)
    rows = train.flatten(1).double()
    mean, covariance = rows.mean(0), rows.T.cov(correction=0)
    k = (1 - u) * covariance @ torch.linalg.inv((1 - u) ** 2 * covariance + u**2 * torch.eye(12))
    losses = []
    for seed in range(200):
        noise = torch.randn(300, 12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        y = (1 - u) * x + u * noise
        velocity = (mean + (y - (1 - u) * mean) @ k.T - y) / u
        losses.append((x - noise - velocity).square().mean())
    ours = linear_denoiser_loss(train, validation, torch.tensor([u]))
    assert ours.item() == pytest.approx(torch.stack(losses).mean().item(), rel=0.01)


def test_linear_denoiser_uses_classes():
    """Two classes at -2 and +2: knowing the class leaves only the spread round its mean."""
    (a, eigenvalues), (b, _) = gaussian(20000, 0, -2.0), gaussian(20000, 1, 2.0)
    train, labels = torch.cat([a, b]), torch.arange(2).repeat_interleave(20000)
    validation = torch.cat([gaussian(5000, 2, -2.0)[0], gaussian(5000, 3, 2.0)[0]])
    its_labels, levels = torch.arange(2).repeat_interleave(5000), torch.tensor([0.5])
    expected = (eigenvalues / (0.25 * eigenvalues + 0.25)).mean().item()
    for covariance in ("shared", "class"):
        denoiser = fit_linear_denoiser(train, labels, covariance=covariance)
        assert denoiser.loss(validation, levels, its_labels).item() == pytest.approx(expected, rel=0.02)
    assert linear_denoiser_loss(train, validation, levels).item() > expected * 1.05
    refused("'full'", fit_linear_denoiser, train, covariance="full")


class Velocity(nn.Module):
    """A velocity; and with `clean` the clip that it leads to, for noise levels of the timestep."""

    def __init__(self, clean):
        super().__init__()
        self.clean = clean

    def forward(self, x, timestep):
        velocity = (3 * x).sin()
        return x + (timestep / 1000)[:, None, None, None, None] * velocity if self.clean else velocity


def test_a_predicted_clip_is_a_velocity_too():
    torch.manual_seed(0)
    x, noise = torch.randn(2, 3, 2, 4, 4).double(), torch.randn(2, 3, 2, 4, 4).double()
    u = torch.tensor([0.06, 0.9]).double()
    losses = [RectifiedFlow(Velocity(clean), clean=clean)(x, noise, u)[0] for clean in (False, True)]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-4)
    samples = [euler(Velocity(clean), noise, 12, shift=2.0, predicts_clean=clean) for clean in (False, True)]
    torch.testing.assert_close(samples[1], samples[0], rtol=1e-4, atol=1e-4)


def test_the_error_of_a_predicted_clip():
    """By hand; none if it is the clip, at any level, and then 50 steps lead there, the last one from level 0.02."""
    torch.manual_seed(0)
    x, noise = torch.randn(3, 3, 2, 4, 4), torch.randn(3, 3, 2, 4, 4)
    u, least = torch.tensor([0.01, 0.3, 0.9]), torch.tensor([0.05, 0.3, 0.9])  # as in Li & He's code: t_eps
    seen = (1 - u.view(-1, 1, 1, 1, 1)) * x + u.view(-1, 1, 1, 1, 1) * noise
    predicted = (3 * seen).sin()
    velocity, wanted = ((clip - seen) / least.view(-1, 1, 1, 1, 1) for clip in (predicted, x))
    loss, weight = RectifiedFlow(lambda x, timestep: (3 * x).sin(), clean=True)(x, noise, u)
    torch.testing.assert_close(loss, (wanted - velocity) ** 2, rtol=1e-4, atol=1e-4)
    assert torch.equal(weight, torch.ones_like(x))
    assert not RectifiedFlow(lambda *_: x, clean=True)(x, noise, u)[0].any()
    torch.testing.assert_close(euler(lambda *_: x, noise, 50, predicts_clean=True), x)
