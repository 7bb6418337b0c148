"""dsp.discover: the dicts it finds, and its traps; that they are exact and cheap tests/parity/test_models.py shows."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

import dsp
from dsp.discovery.dims import Dims, Follower
from dsp.discovery.discover import Stages
from dsp.discovery.recording import Recording
from dsp.verify.slices import Draws, slices
from tests.support import diffusers_latte, diffusers_models, toys
from tests.support.registry import built, discovered, sample
from tests.support.slow import keep_short, long, slow

C = toys.C


def test_the_dicts() -> None:
    assert discovered("Grid") == {
        "": "x=b t s c -> b t s c",
        "space.*": "b t [s c], scale=b 1 1 [c]",
        "time.*": "b [t] s [c]",
    }
    assert discovered("Folded") == {
        "": "x=b t s c, mask=(b t) 1 d -> b t s c",
        "space.*": "(b t) [s c], text=(b t) [l k], mask=(b t) 1 [d]",
        "time.*": "(b s) [t c]",
    }
    assert discovered("Cube") == toys.Cube.stages
    # the first operand alone, the second alone, or both by their channels: as triangle multiplication is written
    assert discovered("Pair")["outgoing"] == "b s [r] u, right=b v [r] u -> b s v u"


@pytest.mark.slow
def test_the_dicts_of_transformers() -> None:
    assert list(discovered("diffusers-latte")) == list(diffusers_latte.STAGES)
    # the final projection is cheaper between stages: what it returns is shorter, and switched in its place
    assert list(discovered("transformer2d-stdit")) == ["", "embed", "blocks.*.spatial", "blocks.*.temporal"]
    # a class token joined to the tokens is no fold of frames and positions: they are told apart again behind it
    layer = "timesformer.encoder.layer.*."
    assert discovered("timesformer")[f"{layer}temporal_attention"] == "(b s) [r d]"
    assert discovered("timesformer")[f"{layer}attention"] == "(b r) [l d]"
    # called along time and along variables: no dim has one name in both
    assert discovered("patchtst")["model.encoder.layers.*.self_attn"] == "(b r) [l d]"


def test_it_prints_as_python() -> None:
    stages = discovered("Folded")
    assert eval(str(stages)) == eval(repr(stages)) == stages
    assert str(stages).startswith('{\n    "": "x=b t s c, mask=(b t) 1 d -> b t s c",\n')
    assert isinstance(stages, dict)
    assert str(Stages({'a"b': "c"})) == '{\n    "a\\"b": "c",\n}'


# --- traps ------------------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """A module with parameters that applies f."""

    def __init__(self, f: Any) -> None:
        super().__init__()
        self.f, self.w, self.lin = f, nn.Parameter(torch.randn(16, 1, C)), nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.f(self, self.lin(x))


def between(odd: nn.Module) -> nn.Module:
    """An odd module between attention over space and attention over time."""
    return toys.SpaceTime(lambda m, x: m.time(m.odd(m.space(x))), odd=odd)


def of(f: Any) -> str | None:
    """discover's pattern of an odd module; None if it may stay between stages."""
    stages = dsp.discover(between(f if isinstance(f, nn.Module) else Odd(f)), (torch.randn(2, 7, 5, C),))
    assert stages["space"] == "b t [s c]"
    assert stages["time"] == "b [t] s [c]"
    return next((text for path, text in stages.items() if path.startswith("odd")), None)


def drawn(*shape: int) -> Any:
    """Multiplies by random numbers of x's own sizes, or of size 1."""

    def f(m: Odd, x: Tensor) -> Tensor:
        sizes = [s if n else 1 for s, n in zip(x.shape, shape)]
        return x * torch.rand(sizes, dtype=x.dtype)

    return f


def batch_norm() -> nn.Module:
    return toys.Does(lambda m, x: m.bn(x.movedim(-1, 1)).movedim(1, -1), bn=nn.BatchNorm2d(C))


TRAPS = {
    "a table by frame": (lambda m, x: x + m.w[: x.shape[1]], "b [t] s [c]"),
    "local positions": (lambda m, x: x + torch.arange(x.shape[1], dtype=x.dtype)[:, None, None], "b [t] s [c]"),
    "a division by length": (lambda m, x: x / x.shape[1], "b [t] s [c]"),
    "windows of two frames": (lambda m, x: x + F.pad(x, (0, 0, 0, 0, 0, x.shape[1] % 2)).unflatten(1, (-1, 2))
                              .mean(2).repeat_interleave(2, 1)[:, : x.shape[1]], "b [t] s [c]"),
    "dropout": (lambda m, x: F.dropout(x, 0.5, m.training), None),
    "numbers of one's own": (drawn(1, 1, 1, 1), None),
    "numbers shared along t": (drawn(1, 0, 1, 1), "b [t] s [c]"),
    "numbers shared along s": (drawn(1, 1, 0, 0), "b t [s c]"),
    "a permutation of frames": (lambda m, x: x[:, torch.randperm(x.shape[1])], None),
    "a permutation of one's own": (lambda m, x: x.gather(1, torch.rand_like(x).argsort(1)), "b [t] s [c]"),
    "a norm over the batch": (batch_norm(), None),
}  # fmt: skip


@pytest.mark.parametrize("trap", TRAPS)
def test_traps(trap: str) -> None:
    f, expect = TRAPS[trap]
    assert of(f) == expect


@pytest.mark.parametrize("name", [slow("Grid"), "Folded", slow("Cube"), slow("Branches")])
def test_equal_sizes_are_not_confused(name: str) -> None:
    kwargs = toys.inputs(name, 4, 4, 4)
    if name == "Folded":
        kwargs["text"] = torch.randn(4, 4, C, dtype=torch.float64)
        kwargs["mask"] = torch.zeros(16, 1, 4, dtype=torch.float64)
    assert dsp.discover(toys.make(name), kwargs=kwargs) == discovered(name)


class Blocks(nn.Module):
    """One block after the other."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def alternating(*dims: int) -> nn.Module:
    return Blocks(*(toys.Along(d) for d in dims))


class Nested(nn.Module):
    """Text through an encoder of its own, and a grid inside a module inside a module."""

    def __init__(self) -> None:
        super().__init__()
        self.text = nn.TransformerEncoderLayer(C, 2, 8, batch_first=True)
        self.net = nn.ModuleDict({"grid": toys.Folded()})

    def forward(self, x: Tensor, text: Tensor, mask: Tensor) -> Tensor:
        return self.net["grid"](x, self.text(text), mask)


def test_modules_on_replicated_tensors_are_not_stages() -> None:
    kwargs = {k: v.float() for k, v in toys.inputs("Folded", 2, 7, 5).items()}
    expect = {f"net.grid.{k}" if k else k: v for k, v in discovered("Folded").items()}
    assert dsp.discover(Nested(), kwargs=kwargs) == expect


class FoldedAtEntry(nn.Module):
    """A dim that no input shows apart: one dim for one stage, two for the other."""

    def __init__(self) -> None:
        super().__init__()
        self.space, self.time = toys.Along(1), toys.Along(1)

    def forward(self, x: Tensor, frames: int) -> Tensor:
        x = rearrange(self.space(x), "(b t) s c -> (b s) t c", t=frames)
        return rearrange(self.time(x), "(b s) t c -> (b t) s c", s=5)


def transformer() -> nn.Module:
    """PyTorch's own layer: queries, keys and values are arguments of their own."""
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)


def zeroed(block: nn.Module) -> nn.Module:
    nn.init.zeros_(block.out.weight)
    nn.init.zeros_(block.out.bias)
    return block


def on_folds(m: nn.Module, x: Tensor) -> Tensor:
    b = len(x)
    x = rearrange(m.space(rearrange(x, "b t s c -> (b t) s c")), "(b t) s c -> (b s) t c", b=b)
    return rearrange(m.time(x), "(b s) t c -> b t s c", b=b)


def convolutions() -> nn.Module:
    spatial, temporal = nn.Conv3d(8, 8, (1, 3, 3), padding=(0, 1, 1)), nn.Conv3d(8, 8, (3, 1, 1), padding=(1, 0, 0))
    return nn.Sequential(nn.Conv3d(3, 8, 1), spatial, nn.SiLU(), nn.GroupNorm(2, 8), temporal)


def mixed(m: nn.Module, x: Tensor) -> Tensor:
    x = x + m.over_s(x.transpose(-1, -2)).transpose(-1, -2)
    return x + m.over_c(x)


def mixer() -> nn.Module:
    over_s = nn.Sequential(nn.Linear(5, 9), nn.GELU(), nn.Linear(9, 5))
    return toys.Does(mixed, over_s=over_s, over_c=nn.Sequential(nn.LayerNorm(C), nn.Linear(C, C)))


def with_a_scalar(m: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    x, loss = m.first(x)
    return m.time(x), loss


def scalars() -> nn.Module:
    """A stage that also returns a scalar, which no pattern can describe: its parts become stages."""
    first = toys.Does(lambda m, x: (y := m.space(x), y.square().mean()), space=toys.Along(2))
    return toys.Does(with_a_scalar, first=first, time=toys.Along(1))


def fourier(m: nn.Module, x: Tensor) -> Tensor:
    return torch.fft.fft(m.time(m.space(x)), dim=-1).real


X = torch.randn(2, 7, 5, C)
SPACE, TIME, ROOT, SAME = "b t [s c]", "b [t] s [c]", {"": "input=b t s c -> b t s c"}, {"": "x=b t s c -> b t s c"}
FOUND: dict[str, tuple[Any, tuple[Any, ...], dict[str, str]]] = {
    "gates that are zero, and inputs all alike": (
        lambda: nn.Sequential(zeroed(toys.Along(2)), zeroed(toys.Along(1))), (torch.zeros_like(X),),
        {**ROOT, "0": SPACE, "1": TIME},
    ),
    "dropout within attention and after it": (
        lambda: nn.Sequential(toys.Along(2, 0.5), toys.Along(1, 0.5)), (X,), {**ROOT, "0": SPACE, "1": TIME},
    ),
    "blocks that do not all agree": (
        lambda: alternating(2, 1, 2), (X,), {**SAME, "blocks.0": SPACE, "blocks.1": TIME, "blocks.2": SPACE},
    ),
    "blocks of which some agree": (
        lambda: nn.Sequential(alternating(2, 2), alternating(1, 1), alternating(2, 1)), (X,),
        {**ROOT, "0": SPACE, "1": TIME, "2.blocks.0": SPACE, "2.blocks.1": TIME},
    ),
    "transformer layers on folds": (
        lambda: toys.Does(on_folds, space=transformer(), time=transformer()), (torch.randn(2, 7, 5, 8),),
        {**SAME, "space": "(b t) [s c]", "time": "(b s) [t c]"},
    ),
    "a fold that is opened behind a stage": (
        FoldedAtEntry, (torch.randn(14, 5, C), 7), {"": "x=t s c -> t s c", "space": "t [s c]", "time": "(r s) [l c]"},
    ),
    "convolutions, which need no stages": (
        convolutions, (torch.randn(2, 3, 6, 5, 7),), {"": "input=b c t h w -> b d t h w"},
    ),
    "what glue can run": (mixer, (X,), {"": "x=b t h w -> b t h w"}),
    "one sequence, whose queries stay apart": (
        lambda: Blocks(transformer(), transformer()), (torch.randn(2, 7, 8),),
        {"": "x=b s c -> b s c", "blocks.*.self_attn": "b s [c], key=b [l c], value=b [l c]"},
    ),
    "scalar outputs": (scalars, (X,), {"": "x=b t s c", "first.space": SPACE, "time": TIME}),
    "a module whose forward does what glue has no rule for": (
        lambda: nn.Sequential(toys.SpaceTime(fourier), toys.Along(1)), (X,),
        {**ROOT, "0.space": SPACE, "0.time": TIME, "1": TIME},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_discovered_stages(name: str) -> None:
    build, args, expect = FOUND[name]
    assert dsp.discover(build(), args) == expect


# --- nothing is left behind, and errors teach -------------------------------------------------------------------------


class Fussy(nn.Module):
    """Counts its calls, keeps buffers that move, draws numbers, and may raise."""

    def __init__(self) -> None:
        super().__init__()
        self.grid, self.bn, self.calls, self.limit = toys.Grid(1), batch_norm(), 0, 10**9

    def forward(self, x: Tensor, cond: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > self.limit:
            raise KeyError("enough")
        return self.bn(F.dropout(self.grid(x, cond), 0.1, self.training))


@pytest.mark.parametrize("limit", [10**9, 2])
def test_the_model_and_the_random_state_are_left_as_they_were(limit: int) -> None:
    model, kwargs = Fussy().eval(), toys.Grid.inputs(2, 7, 5)
    model.grid.train()
    model.limit = limit
    before = {k: v.clone() for k, v in model.state_dict().items()}
    modes = {n: m.training for n, m in model.named_modules()}
    given = {k: v.clone() for k, v in kwargs.items()}
    state = torch.get_rng_state()
    if limit == 2:
        with pytest.raises(KeyError, match="enough"):
            dsp.discover(model, kwargs=kwargs)
    else:
        dsp.discover(model, kwargs=kwargs)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled()
    assert {n: m.training for n, m in model.named_modules()} == modes
    assert list(before) == list(model.state_dict())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(torch.equal(v, given[k]) for k, v in kwargs.items())
    assert model.calls == 0
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not any(any(name.startswith("_dsp_") for name in vars(v)) for v in kwargs.values())


def test_the_same_seed_finds_the_same() -> None:
    assert discovered("Grid") == dsp.discover(built("Grid"), kwargs=sample("Grid"), seed=7)


def test_progress_and_cost_are_told(caplog, capsys, monkeypatch) -> None:
    monkeypatch.setattr("dsp.support.formatting.EVERY", 0)  # also on a fast machine
    with caplog.at_level(logging.INFO, logger="dsp"):
        dsp.discover(built("Branches"), kwargs=sample("Branches"), progress=True)
    runs = next(m for m in caplog.messages if "runs of submodules on slices" in m)
    assert int(runs.split()[1]) < 400
    *lines, last = capsys.readouterr().err.split("\r")[:-1]
    assert any("discover: " in line and "runs of submodules, at " in line for line in lines)
    assert not last.strip()  # the line is wiped
    dsp.discover(nn.Sequential(toys.Along(2), toys.Along(1)), torch.randn(2, 7, 5, C))
    assert not capsys.readouterr().err  # no terminal


def turned() -> nn.Module:
    """Mixes the second dim, and returns it in the place of the third."""
    return toys.Does(lambda m, x: m.along(x).transpose(1, 2), along=toys.Along(1))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_of_layers_alike_two_run(device: str) -> None:
    model = alternating(2, 1, 2, 1, 2).to(device)
    numbers, called = dict[nn.Module, int](), list[int]()  # of the layers of each copy; of those that are called

    def hear(module: nn.Module, args: Any) -> None:  # of all modules: layers with hooks of their own are not alike
        for n, block in enumerate(getattr(module, "blocks", ())):  # one that is skipped has the parts of one that runs
            numbers.setdefault(block.norm, n)
        called.extend([numbers[module]] if module in numbers else [])

    handle = register_module_forward_pre_hook(hear)
    stages = dsp.discover(model, torch.randn(2, 7, 5, C, device=device))
    handle.remove()
    assert stages == {
        "": "x=b t s c -> b t s c", **{f"blocks.{n}": "b [t] s [c]" if n % 2 else "b t [s c]" for n in range(5)},
    }  # fmt: skip
    assert "# 1 layer, blocks.4, not run: taken to be as blocks.0" in str(stages)
    assert ("only by the rules" in str(stages)) is (device == "meta")
    assert eval(str(stages)) == stages
    # but for the runs that show whether they are alike
    assert called.count(4) <= 2 < called.count(1)


def test_layers_that_hand_on_a_dim_elsewhere_all_run() -> None:
    model, x = nn.Sequential(*(turned() for _ in range(4))), torch.randn(2, 4, 4, C)
    assert "not run" not in str(stages := dsp.discover(model, x))
    assert stages["0"] == stages["2"] == "b [t] s [c] -> b s [t c]"
    assert stages["1"] == stages["3"] == "b [s] t [c] -> b t [s c]"


@pytest.mark.parametrize("name", keep_short(["Grid", "Folded", "Branches", "Pair"]))
def test_without_data_the_rules_find_what_slices_do(name: str) -> None:
    model, kwargs = built(name).to("meta"), {k: v.to("meta") for k, v in sample(name).items()}
    assert dsp.discover(model, kwargs=kwargs) == discovered(name)


@pytest.mark.slow
@pytest.mark.parametrize("trap", [trap for trap in TRAPS if "shared" not in trap and "of frames" not in trap])
def test_traps_without_data(trap: str) -> None:
    f, expect = TRAPS[trap]
    model = between(f if isinstance(f, nn.Module) else Odd(f)).to("meta")
    stages = dsp.discover(model, torch.randn(2, 7, 5, C, device="meta"))
    assert (stages["space"], stages["time"]) == ("b t [s c]", "b [t] s [c]")
    assert next((text for path, text in stages.items() if path.startswith("odd")), None) == expect


def test_one_sample_is_enough_for_stages_of_one() -> None:
    stages = dsp.discover(alternating(2, 1, 2).to("meta"), torch.randn(1, 7, 5, C, device="meta"))
    assert stages == {
        "": "x=b t s c -> b t s c", "blocks.0": "[l] t [s c]", "blocks.1": "[l t] s [c]", "blocks.2": "[l] t [s c]",
    }  # fmt: skip
    assert "# for these inputs' batch of one: pass two samples" in str(stages)


@pytest.mark.slow
def test_one_sample_is_enough_where_text_and_image_attend_apart_first() -> None:
    """Flux 3: its tables of positions go to the blocks in tuples, which no pattern can name."""
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.Flux3Transformer2DModel(
        in_channels=4, cond_in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=12, joint_attention_dim=32, timestep_channels=16, axes_dims_rope=(4, 4, 4, 4),
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(1, 48, 4), "encoder_hidden_states": torch.randn(1, 12, 32),
        "timestep": torch.tensor([0.5]), "img_ids": torch.randint(0, 9, (48, 4)),
        "txt_ids": torch.randint(0, 9, (12, 4)), "return_dict": False,
    }  # fmt: skip
    stages = dsp.discover(model, kwargs=inputs)
    assert [*stages] == [""]  # all that a plan needs is glue
    assert stages[""].startswith("hidden_states=b (t s) c, encoder_hidden_states=1 t d")
    assert dsp.plan(model, kwargs=inputs, size=2, stages=stages).stages


@pytest.mark.parametrize(("name", "batch", "runs"), [long("Wan 14B", 2, 700), long("HunyuanVideo 13B", 1, 1700)])
def test_models_at_their_real_depth_and_width(caplog, name: str, batch: int, runs: int) -> None:
    """From meta tensors: so many calls of submodules, where 40 layers have some 1000 submodules."""
    import diffusers

    kind, config, more, _ = diffusers_models.DEEP[name]
    with torch.device("meta"):
        model = getattr(diffusers, kind)(**config)
    given = diffusers_models.GIVEN | more
    given = {k: torch.cat([v] * batch) if isinstance(v, Tensor) else v for k, v in given.items()}
    with caplog.at_level(logging.INFO, logger="dsp"):
        stages = dsp.discover(model, kwargs=given)
    assert stages[""].startswith("hidden_states=b c t h w")
    assert not any("blocks" in path for path in stages)  # all that a plan needs is glue
    assert "38 layers" in str(stages)
    assert int(next(m for m in caplog.messages if "runs of submodules" in m).split()[1]) <= runs


class FNet(Blocks):
    """Mixes the whole sequence by a Fourier transform."""

    def __init__(self) -> None:
        super().__init__(*(toys.Fn(lambda x: x + torch.fft.fft2(x).real) for _ in range(2)))


class InADict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.space = toys.Along(2)

    def forward(self, given: dict[str, Tensor], cond: Tensor | None = None) -> Tensor:
        return self.space(given["x"])


class Labelled(toys.SpaceTime):
    """Frames with a label each, in one list for all samples."""

    def __init__(self) -> None:
        super().__init__(None, label=nn.Embedding(4, C))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.time(self.space(x) + self.label(labels).unflatten(0, x.shape[:2])[:, :, None])


def test_ambiguous_dims_are_asked_for() -> None:
    x, labels = torch.randn(2, 7, 5, C), torch.arange(14) % 4
    with pytest.raises(ValueError, match=r"'labels' of the model has shape .* could be the dim of size 2 of 'x'"):
        dsp.discover(Labelled(), (x, torch.zeros_like(labels)))
    assert dsp.discover(Labelled(), (x, labels)) == {
        "": "x=b t s c, labels=(b t) -> b t s c", "space": "b t [s c]", "time": "b [t] s [c]",
    }  # fmt: skip


def test_errors() -> None:
    x = torch.randn(2, 7, 5, C)

    def says(text: str, model: nn.Module, *args: Any) -> None:
        with pytest.raises(ValueError, match=text):
            dsp.discover(model, args)

    says("no dim to shard in FNet but the batch: blocks.0, blocks.1 compute over", FNet(), torch.randn(2, 7, 8))
    says("the tensor with the most dims is neither an argument of InADict nor", InADict(), {"x": x})
    says("the tensor with the most dims is neither an argument of InADict nor", InADict(), {"x": x}, torch.randn(2, C))
    says("needs example inputs", alternating(2))
    says("no dim to shard in FNet: blocks.0, blocks.1 compute over", FNet(), torch.randn(1, 7, 8))
    says("integer input \\(2, 7\\) whose elements are all 0", nn.Embedding(4, C), torch.zeros(2, 7, dtype=torch.long))
    bare = {k: v.to("meta") for k, v in sample("Unplanned").items()}
    with pytest.raises(
        ValueError,
        match=r"Unplanned depends on the values of .*: int\(\) at toys.py.*build it, and its inputs, on a",
    ):
        dsp.discover(built("Unplanned").to("meta"), kwargs=bare)
    says("no submodule of ReLU", nn.ReLU(), x)


# --- the slice test itself --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", range(2, 12))
def test_slices_are_uneven_and_cover(size: int) -> None:
    parts = slices(size)
    assert parts[0][0] == 0
    assert sum(length for _, length in parts[:2]) == size
    assert any(start % 2 for start, _ in parts)
    assert all(0 < length < size and start + length <= size for start, length in parts)


def test_draws_hands_out_parts_of_what_was_drawn() -> None:
    def f(x: Tensor) -> Tensor:
        return F.dropout(x, 0.5) + torch.rand_like(x) + torch.bernoulli(torch.full_like(x, 0.5)) + F.dropout1d(x, 0.5)

    x = torch.randn(4, 6, 3)
    with Draws() as draws:
        whole = f(x)
    with Draws(draws, 4, 1, 2):
        assert torch.equal(f(x[1:3]), whole[1:3])
    with Draws(draws, 6, 2, 3):
        assert torch.equal(f(x[:, 2:5]), whole[:, 2:5])
    with pytest.raises(RuntimeError, match="random numbers \\(4, 6, 1\\) of a slice"), Draws(draws, 3, 1, 2):
        f(x[..., 1:3])


def test_a_norm_of_weights_is_not_tried_on_other_rows() -> None:
    """Torch looks at no shape there, and would write beside its memory."""
    normed = nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 4, 3), dim=2).parametrizations.weight
    with Draws(), pytest.raises(RuntimeError, match="a norm for each row"):
        normed[0](torch.randn(1, 1, 2), torch.randn(4, 4, 3))


def test_dims_are_followed_through_a_function_that_is_many_operations() -> None:
    dims, recording = Dims(), Recording()
    x, weight = torch.randn(5, 3, 8), torch.randn(24, 8)  # (l b c)
    with recording:
        y, _ = F.multi_head_attention_forward(
            x, x, x, 8, 2, weight, None, None, None, False, 0.0, torch.randn(8, 8), None, need_weights=False
        )
    given, made = recording.refs((x, y))
    dims.follow(given, dims.fill(given.shape, [], "x"), live=True)
    ops = [*filter(None, map(Follower(dims).operation, recording.nodes))]
    length, batch, _ = dims.axes_of(given)
    assert dims.axes_of(made)[:2] == [length, batch]
    blocked = {dim for op in ops for dim, runs in op.accepts.items() if not runs}
    assert set(length) <= blocked
    assert not set(batch) & blocked
