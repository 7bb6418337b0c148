"""Work that runs whole on every rank is said: the operation, its cost, why, and what would help."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import dsp
from tests.support.runs import Heard


class Patches(nn.Module):
    """Wan's form: patches of each frame by a convolution, all tokens in one line, attention over them; and back."""

    stages = {"": "x=b c t h w"}

    def __init__(self) -> None:
        super().__init__()
        self.patch_embedding = nn.Conv3d(4, 16, (1, 2, 2), (1, 2, 2))
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.patch_embedding(x)
        z = y.flatten(2).transpose(1, 2)
        q, k, v = self.qkv(F.layer_norm(z, (16,))).unflatten(-1, (2, -1)).transpose(1, 2).chunk(3, -1)
        z = z + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return z


class Cells(nn.Module):
    """A recurrence by cells, which have no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(3, 8)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        states = [self.cell(x[:, 0])]
        for i in range(1, x.shape[1]):
            states.append(self.cell(x[:, i], states[-1]))
        return (torch.stack(states, 1),)


class Pixels(nn.Module):
    """A recurrence along time for every pixel by itself."""

    stages = {"": "x=b t c h w"}

    def __init__(self, rnn: nn.Module | None = None) -> None:
        super().__init__()
        self.rnn = rnn or Cells()

    def forward(self, x: Tensor) -> Tensor:
        b, _, _, h, w = x.shape
        y = self.rnn(x.permute(0, 3, 4, 1, 2).flatten(0, 2))[0]
        return y.unflatten(0, (b, h, w)).permute(0, 3, 4, 1, 2).relu()


class Graph(nn.Module):
    """A convolution on a graph: neighbours are gathered by index, and added where they go."""

    stages = {"": "x=n c"}

    class Conv(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(6, 6)

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            sent = self.lin(x)[edges[0]]
            return torch.zeros_like(x).index_add(0, edges[1], sent)

    class Added(Conv):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("places", torch.arange(180).view(30, 6) % 72)

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            sent = self.lin(x)[edges[0]]
            return x.new_zeros(x.shape).put_(self.places, sent, accumulate=True)

    class Reading(Added):
        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            assert int(edges.max()) < len(x)
            return super().forward(x, edges)

    def __init__(self, kind: type[nn.Module] = Conv) -> None:
        super().__init__()
        self.conv = kind()

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.conv(x, edges).relu()


class Written(nn.Module):
    """All that it is given is written into a tensor of its own, which is whole."""

    stages = {"": "x=n c"}

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("start", torch.zeros(12, 6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.start.clone()
        y[...] = x
        return y


class Beside(nn.Module):
    """Two inputs, of which most is done with the one that the root pattern leaves out."""

    stages = {"": "x=b t c"}

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + (y.exp() @ y.sin().mT).softmax(-1).mean(2)


class Wave(nn.Module):
    """A waveform, cut into frames by a convolution with a stride."""

    stages = {"": "x=b c l"}

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Conv1d(1, 16, 8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x).relu()


class Decoder(nn.Module):
    """Causal convolutions over frames, rows and columns, as in the decoder of a video's latents."""

    stages = {"": "x=b c t h w"}

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Conv3d(4, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(F.pad(x, (1, 1, 1, 1, 2, 0), mode="replicate"))
        return F.silu(F.interpolate(y, scale_factor=2.0))


def planned(kind: Any, inputs: tuple[Tensor, ...]) -> Any:
    torch.manual_seed(0)
    return dsp.plan(kind(), inputs, size=3, gather_output=False)


CASES = {
    "patches": (Patches, (torch.randn(1, 4, 5, 6, 8),)),
    "pixels": (Pixels, (torch.randn(1, 6, 3, 4, 5),)),
    "graph": (Graph, (torch.randn(12, 6), torch.randint(0, 12, (2, 30)))),
    "written graph": (lambda: Graph(Graph.Added), (torch.randn(12, 6), torch.randint(0, 12, (2, 30)))),
    "wave": (Wave, (torch.randn(1, 1, 64),)),
    "decoder": (Decoder, (torch.randn(1, 4, 4, 6, 6),)),
}


def test_patches_are_split_for_nothing_where_the_embedding_runs_whole() -> None:
    """Wan's form: a convolution on inputs that are whole anyway leaves its result to be sharded."""
    plan = planned(*CASES["patches"])
    assert plan.share == 0.5  # its own input and output are of one length
    assert plan.bytes["forward"] > 0


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_a_recurrence_of_pixels_is_sharded_along_them(kind: Any) -> None:
    plan = dsp.plan(Pixels(kind(3, 8, batch_first=True)), CASES["pixels"][1], size=3, gather_output=False)
    assert (plan.share, plan.whole, plan.bytes["forward"]) == (0.4, [], 0)


def test_messages_on_a_graph_are_sharded_along_their_channels() -> None:
    plan = planned(*CASES["graph"])
    assert (plan.share, plan.whole) == (1 / 3, [])


def test_cells_of_pixels_need_a_line_which_discover_finds() -> None:
    model, (x,) = Pixels(), CASES["pixels"][1]
    plan = dsp.plan(model, (x,), size=3, gather_output=False)
    assert [(w.name, w.module) for w in plan.whole] == [("gru_cell", "rnn.cell")]
    assert "100% of all FLOPs). gru_cell(): it has no rule for a sharded tensor. dsp.discover tells" in plan.advice
    assert plan.advice in plan.text()
    found = dsp.discover(model, torch.cat([x, x.flip(1)]))
    assert found["rnn"].startswith("(b h w) [c t] -> (b h w) ")
    for stages in (found, {**Pixels.stages, "rnn.cell": "(b h w) [c] -> (b h w) [x]"}):
        better = dsp.plan(model, x, size=3, stages=stages, gather_output=False)
        assert (better.share, better.whole, better.advice) == (0.4, [], "")


def test_advice_where_no_line_helps() -> None:
    plan = planned(*CASES["written graph"])
    assert plan.share == 1
    said = "put() in conv (720 B). put(): it has no rule for a sharded tensor"
    assert f"between stages every rank runs these operations whole: {said}" in plan.advice
    with pytest.raises(ValueError, match="no dim to shard in Graph but the batch: conv computes over all other dims"):
        dsp.discover(CASES["written graph"][0](), CASES["written graph"][1])


class LookedUp(nn.Module):
    """A long tensor that is looked up by numbers which no rule leaves sharded."""

    stages = {"": "x=b s c"}

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x.mean(-1).cummax(1).indices % 4)


def test_readers_of_a_replicated_tensor_name_the_operation_behind_it() -> None:
    plan = dsp.plan(LookedUp(), torch.randn(1, 9, 8), size=3, gather_output=False)
    said = "embedding(): it reads what comes of cummax(), which is replicated: it has no rule for a sharded tensor. "
    assert said in plan.advice


class Normed(nn.Module):
    """Weights that are made of parameters in each forward, and are longer than the sequence."""

    stages = {"": "x=b s c"}

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.utils.parametrizations.weight_norm(nn.Conv1d(64, 64, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        return self.f(x.transpose(1, 2)).transpose(1, 2)


@pytest.mark.parametrize("trained", [True, False])
def test_advice_on_tensors_of_parameters_alone(trained: bool) -> None:
    """No stage shards it."""
    model = Normed().requires_grad_(trained)
    plan = dsp.plan(model, torch.randn(1, 9, 64), size=2, gather_output=False)
    assert (plan.of_inputs, plan.remedy) == ([], "")
    told = r"from parameters alone every rank computes weight_norm_interface\(\) in f \(48.0 KiB\): no line .*"
    assert re.fullmatch(told, plan.advice)


class Masked(nn.Module):
    """Attention of two heads under a mask made of an input that nobody named."""

    stages = {"": "x=b s c"}

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor, seg: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        mask = seg[:, None, :, None] == seg[:, None, None, :]
        return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))


def test_a_mask_that_every_rank_has_counts_in_the_dtype_of_its_attention_too() -> None:
    """Heads send less than queries, but do not cut the mask, nor what the attention makes of it."""
    inputs = torch.randn(1, 401, 8), torch.ones(1, 401).long()
    plan = dsp.plan(Masked(), inputs, size=4, gather_output=False)
    assert [(w.name, w.bytes) for w in plan.whole] == [("eq", 401 * 401 * 4)]
    assert plan.share == 1
    assert plan.peak > 401 * 401 * (4 + 1)
    assert "every rank runs these operations whole: eq() (628.1 KiB)" in plan.advice
    halves = dsp.plan(Masked(), inputs, size=2, gather_output=False)  # along the queries, mask and all
    assert (halves.share < 0.51, halves.whole) == (True, [])


def test_writes_into_a_replicated_tensor_are_listed() -> None:
    plan = dsp.plan(Written(), torch.randn(12, 6), size=3, gather_output=False)
    assert [(w.name, w.bytes) for w in plan.whole] == [("clone", 288), ("setitem", 288)]


def test_inputs_that_the_root_pattern_leaves_out_are_named() -> None:
    inputs = torch.randn(1, 9, 6), torch.randn(1, 9, 6, 8)
    plan = dsp.plan(Beside(), inputs, size=3, gather_output=False)
    line = "x=b t c, y=b t c x"
    told = f'Name its other inputs in stages, too, "": "{line}": then the largest tensor of a rank is 0.33'
    assert told in plan.text()
    better = dsp.plan(Beside(), inputs, size=3, stages={"": line}, gather_output=False)
    assert (better.whole, better.advice, better.bytes["forward"]) == ([], "", 0)


@pytest.mark.parametrize(("case", "share"), [("wave", 22 / 64), ("decoder", 1 / 3)])
def test_windows_leave_a_dim_to_shard(case: str, share: float) -> None:
    plan = planned(*CASES[case])
    assert (plan.share, plan.advice) == (share, "")
    assert {row.layout for row in plan.stages if row.switch == "rows"} <= {"l", "h", "w"}


@pytest.mark.parametrize("mesh", [3])
def test_a_run_and_a_check_say_it_once(mesh: DeviceMesh) -> None:
    model, (x,) = Pixels(), CASES["pixels"][1]
    with Heard() as heard, torch.no_grad():
        report = dsp.check(model, (x,), mesh=mesh, thorough=False).text()
        parallel = dsp.parallelize(model, mesh)
        for _ in range(2):
            parallel(x)
    first = mesh.get_local_rank() == 0
    assert ["dsp.discover tells" in text for text in heard.texts] == [True, True] * first  # the one checked, this one
    assert not first or report.count("every rank runs these operations whole") == 1


def test_a_forward_that_reads_its_inputs_is_told_once(mesh: DeviceMesh) -> None:
    inputs = CASES["graph"][1]
    model = dsp.parallelize(Graph(Graph.Reading), mesh)
    with Heard() as heard, torch.no_grad():
        for _ in range(3):
            model(*inputs)
    said = [
        "between stages every rank runs these operations whole: put() in conv (720 B). put(): it has no "
        "rule for a sharded tensor. dsp.discover tells whether a stage there can be sharded, and finds its line"
    ]
    assert heard.texts == (said if mesh.get_local_rank() == 0 else [])


class Unplanned(Graph):
    """A forward that reads what it computes, and then writes as no shard could."""

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        y = self.conv.lin(x)
        y = y * 2 if float(y.square().sum()) > 1 else y
        return y.put_(edges[0], y.new_ones(12))


def test_a_forward_that_no_plan_can_be_made_of_is_told_once(mesh: DeviceMesh) -> None:
    x, edges = CASES["graph"][1]
    inputs = x, edges[:, :12]
    single = Unplanned()
    model = dsp.parallelize(copy.deepcopy(single), mesh)
    with Heard() as heard, torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(model(*inputs), single(*inputs))
    first = mesh.get_local_rank() == 0
    said = (
        r"the first call of Unplanned runs without a plan: it reads its data: float\(\) at test_plan_whole.py:\d+, .*"
        r"planned by it: between stages every rank runs these operations whole: put\(\) \(\d+ B\)"
    )
    assert [re.fullmatch(said, text) is not None for text in heard.texts] == [True] * first


class Deep(nn.Module):
    """Glue alone, that keeps what it multiplies and takes exponents of."""

    stages = {"": "x=b s c"}

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = (x * 2).exp()
        return x


def test_the_peak_counts_what_glue_keeps() -> None:
    x = torch.randn(1, 6, 8, requires_grad=True)
    kept, own = dsp.plan(Deep(), (x,), size=2, gather_output=False), x.numel() * 4 // 2
    assert kept.peak >= 4 * own  # each exp its result
    with torch.no_grad():
        assert dsp.plan(Deep(), (x,), size=2, gather_output=False).peak <= 3 * own
