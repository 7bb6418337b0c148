"""Every kind of attention as glue, of unmodified modules by one line: masks, groups of heads, packed projections."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import dsp
from dsp.support.tensors import tensors_in
from tests.support.parity import assert_step_equal
from tests.support.runs import Heard
from tests.support.slow import keep_short, long, slow

C, HEADS, N = 24, 6, 11  # channels; heads of queries; places, of three samples that are packed in one row or padded
ENDS = (3, 7, 11)


def segments() -> Tensor:
    return torch.bucketize(torch.arange(N), torch.tensor(ENDS), right=True)


def distances() -> Tensor:
    """A bias for each head, that grows with the distance (Press et al., arXiv 2108.12409)."""
    slopes = 2.0 ** -torch.arange(1, HEADS + 1, dtype=torch.float64)
    places = torch.arange(N, dtype=torch.float64)
    return -(places[:, None] - places).abs() * slopes[:, None, None]


def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.transpose(-2, -1) / 2).softmax(-1)) @ v


def by_sample(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    lengths = torch.tensor([7])
    return F.scaled_dot_product_attention(q, k, v, (torch.arange(N) < lengths[:, None])[:, None, None])


def dispatched(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    mask = (torch.arange(N) < torch.tensor([7])[:, None])[:, None, None]
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return dispatch_attention_fn(q, k, v, attn_mask=mask, enable_gqa=False).transpose(1, 2)


KINDS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "plain": F.scaled_dot_product_attention,
    "causal": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    "a bias a head": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, distances()),
    "a mask a sample": by_sample,
    "block-diagonal": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, segments()[:, None] == segments()),
    "samples packed in a row": lambda q, k, v: torch.cat(
        [F.scaled_dot_product_attention(*parts) for parts in zip(*(t.split([3, 4, 4], 2) for t in (q, k, v)))], 2
    ),
    "groups": lambda q, k, v: F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True),
    "one head of keys, causal": lambda q, k, v: F.scaled_dot_product_attention(
        q, k[:, :1], v[:, :1], is_causal=True, enable_gqa=True
    ),
    "written out": eager,
    "diffusers' dispatch": dispatched,
}  # fmt: skip


class Attention(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.qkv, self.out = nn.Linear(C, 3 * C), nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(F.layer_norm(x, (C,))).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return x + self.out(KINDS[self.kind](q, k, v).transpose(1, 2).flatten(2))


class FewKeys(nn.Module):
    """Heads of keys that 3 ranks cannot cut, as views of projections of their own: their base is gathered, not cut."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(C, C), nn.Linear(C, C // 3), nn.Linear(C, C // 3)

    def forward(self, input: Tensor) -> Tensor:
        x = F.layer_norm(input, (C,))
        q, k, v = (f(x).view(*x.shape[:2], -1, C // HEADS).transpose(1, 2) for f in (self.q, self.k, self.v))
        return input + F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2)


class Packed(nn.Module):
    """torch's own module, which projects inside of one function; by default it makes its weights."""

    def __init__(self, need_weights: bool = False) -> None:
        super().__init__()
        self.attention, self.need_weights = nn.MultiheadAttention(C, HEADS, batch_first=True), need_weights

    def forward(self, x: Tensor) -> Any:
        mask = segments()[:, None] < segments()
        y, weights = self.attention(x, x, x, need_weights=self.need_weights, attn_mask=mask)
        return (x + y, weights) if self.need_weights else x + y


def llama(kind: str) -> nn.Module:
    from transformers import LlamaConfig, LlamaModel

    sizes = {"hidden_size": C, "intermediate_size": 32, "num_attention_heads": 6, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=16, attn_implementation=kind, use_cache=False)
    return LlamaModel(config)


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{kind: lambda kind=kind: nn.Sequential(Attention(kind), Attention(kind)) for kind in KINDS},  # type: ignore[misc]
    "few heads of keys": FewKeys,
    "nn.MultiheadAttention": Packed,
    "nn.MultiheadAttention, weights": lambda: Packed(True),
    "nn.TransformerEncoder": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(C, HEADS, 32, 0.0, batch_first=True), 2, enable_nested_tensor=False
    ),
    "transformers' Llama, sdpa": lambda: llama("sdpa"),
    "transformers' Llama, eager": lambda: llama("eager"),
}
NAMES = {"nn.TransformerEncoder": "src", "nn.MultiheadAttention": "x", "nn.MultiheadAttention, weights": "x"}


def made(name: str) -> tuple[nn.Module, dict[str, Any], dict[str, str]]:
    torch.manual_seed(0)
    model = MODELS[name]().double()
    arg = "inputs_embeds" if "Llama" in name else NAMES.get(name, "input")
    return model, {arg: torch.randn(1, N, C, dtype=torch.float64)}, {"": f"{arg}=b n c"}


def exact(mesh: DeviceMesh, name: str) -> tuple[float, int, int]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        single, given, stages = made(name)
        given = {k: v.requires_grad_() for k, v in given.items()}
        plan = dsp.plan(single, kwargs=given, size=mesh.size(), stages=stages, gather_output=False)
        model = dsp.parallelize(copy.deepcopy(single), mesh, stages, gather_output=False)
        rounding = {"rtol": 1e-4, "atol": 1e-6} if "Llama" in name else {}  # its norms are float32
        # no mean of squares: of what a norm has made that is always the same
        cubes = lambda *outputs: sum(dsp.mean(y * y * y) for y in outputs)  # noqa: E731
        (comm,) = assert_step_equal(single, model, mesh, given, count=True, loss=cubes, **rounding)
    sent = sum(v for k, v in comm.forward.bytes.items() if k != "all_reduce")
    return plan.share, plan.bytes["forward"], sent


@pytest.mark.parametrize("name", keep_short(MODELS, only=["groups", "few heads of keys", "nn.TransformerEncoder"]))
def test_exact_and_shared(ranks: Any, name: str) -> None:
    found = ranks(exact, 3, name)
    planned = found[0][1]
    assert planned
    if "Llama" not in name:  # which makes a mask where tensors have no data, and none in a run: that is told
        assert 0.9 * planned < max(sent for *_, sent in found) <= planned  # not the same rank is the busiest in all
    # a bias is longer than the tokens, and whole; of one attention alone to gather the keys costs least
    if name not in ("a bias a head", "few heads of keys") and "nn.MultiheadAttention" not in name:
        assert found[0][0] <= 0.4


def bias(slopes: Tensor) -> Any:
    return lambda score, b, h, i, j: score - slopes[h] * (i - j).abs()


class Flex(nn.Module):
    """Attention whose functions read the head, and a parameter, of heads of queries that share those of keys."""

    def __init__(self, compiled: bool) -> None:
        super().__init__()
        self.qkv, self.slopes = nn.Linear(C, 3 * C), nn.Parameter(torch.linspace(0.1, 0.9, HEADS))
        self.compiled = compiled

    def forward(self, x: Tensor) -> Tensor:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        attend = torch.compile(flex_attention, backend="eager") if self.compiled else flex_attention
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mask = create_block_mask(lambda b, h, i, j: (i >= j) | (h == 2), None, HEADS, N, N, device="cpu", BLOCK_SIZE=4)
        y = attend(q, k, v, score_mod=bias(self.slopes), block_mask=mask)
        return x + y.transpose(1, 2).flatten(2)


@pytest.mark.slow  # for what it imports, and compiles
@pytest.mark.parametrize("compiled", [False, True])
def test_flex_attention(mesh: DeviceMesh, compiled: bool) -> None:
    from torch.nn.attention import flex_attention

    flex_attention._validate_device = lambda *_: None  # type: ignore[attr-defined]  # it has gradients on a CPU, too
    torch.manual_seed(0)
    single = nn.Sequential(Flex(False)).double()
    given = {"input": torch.randn(1, N, C, dtype=torch.float64)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = dsp.plan(single, kwargs=given, size=2, stages={"": "input=b n c"}, gather_output=False)
        model = dsp.parallelize(copy.deepcopy(single), mesh, {"": "input=b n c"}, gather_output=False)
        model[0].compiled = compiled
        assert_step_equal(single, model, mesh, given)
    assert plan.share <= 0.6
    compiling = list[bool]()
    torch.compile(lambda x: compiling.append(torch.compiler.is_dynamo_compiling()) or x, backend="eager")(torch.ones(1))
    assert True in compiling, "the compiler is put aside after the forward, too"


class Reading(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        from torch.nn.attention.flex_attention import flex_attention

        return flex_attention(x, x, x, score_mod=lambda score, b, h, i, j: score + x[b, h, i, 0])


@pytest.mark.slow
def test_tensors_read_by_flex_attention_functions_are_replicated() -> None:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        with pytest.raises(dsp.GlueError, match=r"score or mask function indexes a sharded tensor"):
            dsp.plan(Reading(), torch.randn(1, 4, 8, 16), size=2, stages={"": "x=b h n c"})
        staged = dsp.plan(nn.Sequential(Alike()), torch.randn(1, 4, 8, 16), size=2, stages={"0": "b h [n c]"})
    assert " h " in str(staged).split("\n")[2]


class Alike(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        from torch.nn.attention.flex_attention import flex_attention

        return flex_attention(x, x, x, score_mod=lambda score, b, h, i, j: score - (i - j).abs())


DOCUMENTS = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 2, 2]])


class Documents(nn.Module):
    """Each sample sees what is of its own documents: of those that it is given, or of those that everybody has."""

    def __init__(self, given: bool) -> None:
        super().__init__()
        self.given = given

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        of = ids if self.given else DOCUMENTS
        mask = create_block_mask(lambda b, h, i, j: of[b][i] == of[b, j], len(x), None, 5, 5, device="cpu")
        return flex_attention(x, x, x, block_mask=mask)


class Heads(nn.Module):
    """Slopes that every rank has whole, by the number of the head; keys of the same places everywhere."""

    def forward(self, x: Tensor) -> Tensor:
        from torch.nn.attention.flex_attention import flex_attention

        slopes = torch.linspace(0, 1, 4)
        return flex_attention(x, x, x, score_mod=lambda score, b, h, i, j: score - slopes[h] * (i - j).abs())


class Calling(nn.Module):
    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.stage(x, ids) if isinstance(self.stage, Documents) else self.stage(x)


@pytest.mark.slow
def test_places_that_a_part_would_count_anew_are_refused_inside_a_stage() -> None:
    def planned(stage: nn.Module, text: str, root: str = "x=b h n c") -> str:
        args = torch.randn(2, 4, 5, 16), DOCUMENTS.clone()
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            return str(dsp.plan(Calling(stage), args, size=2, stages={"": root, "stage": text})).split("\n")[2]

    assert " h " in planned(Alike(), "b h [n c]")
    assert " b " in planned(Heads(), "b [h n c]")
    assert " b " in planned(Documents(True), "b [h n c], ids=b [n]", "x=b h n c, ids=b n")
    with pytest.raises(dsp.NotationError, match=r"reads the index of the head, .* Write \[h\] in 'b h \[n c\]'"):
        planned(Heads(), "b h [n c]")
    for given in (False, True):  # whole on every rank, either way
        with pytest.raises(dsp.NotationError, match=r"reads the index of the sample, .* with a pattern that has 'b'"):
            planned(Documents(given), "b h [n c]")


def flexibly(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return dispatch_attention_fn(q, k, v, attn_mask=mask, backend="flex").transpose(1, 2)


def blocks(seen: Any = lambda b, h, i, j: (i >= j) | (h == 1)) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(seen, 1, HEADS, N, N, device="cpu", BLOCK_SIZE=4)


def below() -> Tensor:
    return (torch.arange(N)[:, None] >= torch.arange(N))[None, None]


FLEX: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "flex, no mask": lambda q, k, v: flexibly(q, k, v, None),
    "flex, a block mask a head": lambda q, k, v: flexibly(q, k, v, blocks()),
    "flex, blocks for all heads alike": lambda q, k, v: flexibly(q, k, v, blocks(lambda b, h, i, j: i >= j)),
    "flex, what is seen": lambda q, k, v: flexibly(q, k, v, below()),
    "flex, a bias": lambda q, k, v: flexibly(q, k, v, below().to(q.dtype)),
    "flex, a bias a head": lambda q, k, v: flexibly(q, k, v, distances()[None]),
}


@pytest.mark.parametrize("mesh", [long(2), slow(3)])
def test_interfaces_of_flex_attention(mesh: DeviceMesh) -> None:
    """diffusers' and transformers' own ways to flex_attention, which a CPU has no backward of."""
    models = {kind: lambda kind=kind: nn.Sequential(Attention(kind), Attention(kind)) for kind in FLEX}
    models["transformers' Llama, flex"] = lambda: llama("flex_attention")
    KINDS.update(FLEX)
    MODELS.update(models)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        for name in models:
            single, given, stages = made(name)
            with torch.compiler.set_stance("force_eager"):
                expect = tensors_in(single(**given))
            model = dsp.parallelize(copy.deepcopy(single), mesh, stages)
            with Heard() as heard:
                for _ in range(2):
                    for found, whole in zip(tensors_in(model(**given)), expect, strict=True):
                        close = {"rtol": 1e-4, "atol": 1e-6, "msg": lambda m, n=name: f"{n}: {m}"}
                        torch.testing.assert_close(found, whole, **close)
            assert not [text for text in heard.texts if "its plan says" in text], name
            plan = dsp.plan(single, kwargs=given, size=mesh.size(), stages=stages, gather_output=False)
            layouts = [row.layout for row in plan.stages if row.name == "(flex_attention)"]
            assert len(layouts) == 2, name
            assert None not in layouts, name
