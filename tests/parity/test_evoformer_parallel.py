"""Evoformer and Pairformer: what the zoo owes, and in parallel loss, every gradient, bytes and memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import dsp
import zoo
from tests.support.evoformer_cases import CASES, build, inputs
from tests.support.parity import assert_step_equal
from tests.support.slow import keep_short, long
from zoo.protein import layers, pair_layers

LINEAR = "no blocks"
every_case = pytest.mark.parametrize("case", CASES)


# In parallel


@pytest.mark.parametrize("case", keep_short([*CASES, LINEAR], only=["evoformer"]))
@pytest.mark.parametrize("mesh", [long(2), 3])
def test_outputs_and_every_gradient(mesh: DeviceMesh, case: str) -> None:
    """On two ranks with masks, and some inputs that arrive sharded."""
    two, single, model = mesh.size() == 2, build(case), build(case)
    whole = {**inputs(single, 2, 5, 7, masked=two), "recycles": int(not two)}
    given = dict(whole)
    for name in {"msa", "deletions", "msa_mask", "couplings"} & whole.keys() if two else ():
        given[name] = dsp.split(whole[name], mesh, 1 if name == "couplings" else 2)
    assert_step_equal(single, dsp.parallelize(model, mesh, gather_output=False), mesh, whole, given)


def dropped(mesh: DeviceMesh) -> Tensor:
    torch.manual_seed(7 + mesh.get_local_rank())
    block = pair_layers.PairBlock(8, 6, 2, 4, 2, dropout=0.5, version=3, chunk=layers.CHUNK).double()
    for p in block.parameters():
        nn.init.ones_(p)
    for p in block.transition.parameters():
        nn.init.zeros_(p)
    for part in (block.incoming.update, block.start.attend, block.end.attend):
        nn.init.zeros_(part.out.weight if hasattr(part, "out") else part.attention.out.weight)
    z = torch.arange(7 * 7 * 8, dtype=torch.float64).view(1, 7, 7, 8).sin()
    dsp.parallelize(block, mesh, {"": "z=b i j c -> b i j c", **pair_layers.PAIR})
    return (block(z) - z).detach()


def test_all_ranks_drop_the_same(ranks: Any) -> None:
    """One mask for all rows i, though each rank has rows of its own."""
    first, *others = ranks(dropped, 3)
    for other in others:
        assert torch.equal(first, other)
    kept = first != 0
    assert torch.equal(kept, kept[:, :1].expand_as(kept))
    assert 0 < kept.double().mean() < 1


# Plans of the published sizes


def real_plan(name: str, s: int, r: int, n: int, **overrides: Any) -> dsp.Plan:
    with torch.device("meta"):
        model = zoo.create(name, **overrides)
        given = model.example_inputs(rows=s, residues=r)
    return dsp.plan(model, kwargs=given, size=n, dtype=torch.bfloat16, gather_output=False)


@pytest.mark.slow
@pytest.mark.parametrize(("n", "s", "r"), [long(2, 512, 768), long(4, 128, 1024), (8, 512, 768)])
def test_a_block_of_alphafold_2_sends_what_it_must(n: int, s: int, r: int) -> None:
    """Forward: less than FastFold's schedule, and on four or more ranks what switching triangle channels takes."""
    fastfold = 2 * (n - 1) * (r * r * (272 * n + 512) + s * r * (32 * n + 512)) // n**2
    channels = 2 * (n - 1) * (r * r * (16 * n + 256 + 2 * min(128 * n, 384)) + s * r * (32 * n + 512)) // n**2
    plans = [real_plan("evoformer", s, r, n, depth=depth, extra_depth=0) for depth in (2, 3)]
    block = plans[1].bytes["forward"] - plans[0].bytes["forward"]
    assert block < fastfold
    gathered = [move for move in plans[1].switches if move.kind == "gather" and "product" in move.before]
    # on two ranks alone a whole operand is cheaper than three switches; there the incoming product adds up sums
    assert len(gathered) == (3 if n == 2 else 0)
    if n > 2:
        assert block == channels


@pytest.mark.slow
def test_a_block_of_alphafold_3_gathers_small_things_only() -> None:
    r = 1024
    plan = real_plan("pairformer", 64, r, 8, depth=2, msa_depth=1)
    heads = 2 * 7 * r * r * 8 // 8
    assert plan.exact
    assert max(move.bytes for move in plan.switches if move.kind == "gather") <= heads


def test_distograms_switch_half_of_what_they_add() -> None:
    plan = real_plan("evoformer", 64, 512, 4, depth=1, extra_depth=0)
    moves = [move for move in plan.switches if "distance" in move.tensor]
    assert [move.kind for move in moves] == ["switch"]


# On one process


@every_case
def test_any_lengths(case: str) -> None:
    model = build(case)
    for batch, rows, residues in [(1, 1, 1), (2, 3, 5), (1, 4, 9)]:
        out = model(**inputs(model, batch, rows, residues))
        assert out.msa_logits.shape == (batch, rows, residues, 23)
        assert out.distogram_logits.shape == (batch, residues, residues, 8)
        assert torch.equal(out.distogram_logits, out.distogram_logits.transpose(1, 2))
        assert all(y.isfinite().all() for y in out)


@every_case
def test_padding_changes_nothing(case: str) -> None:
    model = build(case)
    given = inputs(model, 1, 4, 8)
    for name in ("mask", "msa_mask", "extra_mask"):
        if name in given:
            given[name] = torch.ones_like(given[name])
            given[name][..., 6:] = False
    short = {name: x[:, :6, :6] if name == "couplings" else x[..., :6] for name, x in given.items()}
    short |= {name: x[:, :, :6] for name, x in given.items() if name.startswith(("template", "profile"))}
    for a, b in zip(model(**given, recycles=1), model(**short, recycles=1)):
        a = a[:, :6, :6] if a.shape[1] == a.shape[2] else a[:, :, :6] if a.ndim > 3 else a[:, :6]
        torch.testing.assert_close(a, b)


@every_case
def test_every_input_counts(case: str) -> None:
    model = build(case)
    given = inputs(model, 1, 4, 6)
    out = model(**given)
    for name, x in given.items():
        if name == "asym_id" and case == "monomer":
            continue  # it reads places alone
        changed = ~x if x.dtype is torch.bool else (x + 1) % 20
        changed[..., 0] = True if x.dtype is torch.bool else 7
        if name == "msa_mask":
            changed[:, 0] = True
        got = model(**{**given, name: changed})
        assert max((a - b).abs().max() for a, b in zip(got, out)) > 1e-3, name
    assert max((a - b).abs().max() for a, b in zip(model(**given, recycles=1), out)) > 1e-3


@every_case
def test_only_the_last_pass_has_gradients(case: str) -> None:
    model = build(case)
    given = inputs(model, 1, 4, 6)
    seen = []
    model.recycle_pair.register_forward_hook(lambda module, args, out: seen.append(out.requires_grad))
    model(**given, recycles=2)
    assert seen == [False, False, True]


@pytest.mark.parametrize("chunk", [1, 50, 200, 10_000])
def test_chunks_change_nothing(chunk: int) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 5, n, 3, 4, dtype=torch.float64, requires_grad=True) for n in (6, 7, 7))
    bias = torch.randn(2, 6, 7, 3, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(2, 5, 7) > 0.3
    mask[..., 0] = True
    logits = torch.einsum("bnihe,bnjhe->bnhij", q, k) / 2 + bias.permute(0, 3, 1, 2)[:, None]
    wanted = torch.einsum("bnhij,bnjhe->bnihe", logits.masked_fill(~mask[:, :, None, None], -torch.inf).softmax(-1), v)
    got = layers.attend(q, k, v, bias, mask, chunk)
    torch.testing.assert_close(got, wanted)
    weight = torch.randn_like(got)
    for a, b in zip(*(torch.autograd.grad((y * weight).sum(), (q, k, v, bias)) for y in (got, wanted))):
        torch.testing.assert_close(a, b)


def test_no_logits_are_kept() -> None:
    saved = []
    attention = pair_layers.TriangleAttention(8, 2, 4, "start", 2, chunk=2 * 32 * 32)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        attention(torch.randn(1, 32, 32, 8)).sum()
    assert max(saved) < 32**3


def test_dropout_shares_its_mask() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 6, 7, dtype=torch.float64)
    drop = layers.SharedDropout(0.25, 1)
    keep = drop(x)
    assert keep.shape == (2, 1, 6, 7)
    assert keep.dtype == x.dtype
    assert set(keep.unique().tolist()) == {0.0, 1 / 0.75}
    assert drop.eval()(x) is None
    for case in ("evoformer", "pairformer"):
        model = build(case, msa_dropout=0.15, pair_dropout=0.25)
        given = inputs(model, 1, 4, 6)
        assert not torch.equal(model(**given).msa_logits, model(**given).msa_logits)
        model.eval()
        assert torch.equal(model(**given).msa_logits, model(**given).msa_logits)


@pytest.mark.parametrize("name", ["evoformer", "pairformer"])
def test_fresh_models_learn_with_every_parameter(name: str) -> None:
    torch.manual_seed(0)
    with torch.device("meta"):
        model = zoo.create(name, "test")
    model.to_empty(device="cpu")
    for p in model.parameters():
        nn.init.constant_(p, torch.nan)
    model.init_weights()
    given = inputs(model, 2, 4, 6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    target = torch.randint(23, given["msa"].shape)
    losses = []
    for _ in range(4):
        out = model(**given, recycles=1)
        loss = nn.functional.cross_entropy(out.msa_logits.flatten(0, -2), target.flatten())
        loss = loss + nn.functional.cross_entropy(out.distogram_logits.flatten(0, -2), torch.ones(72, dtype=torch.long))
        loss = loss + (out.single.square().mean() - 1).square()
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    still = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert losses[-1] < losses[0]
    assert not still


def test_inputs_that_do_not_fit_are_refused() -> None:
    model = build("evoformer")
    given = inputs(model, 1, 3, 4)
    with pytest.raises(ValueError, match="a model built with extra_depth=1 needs extra_msa"):
        model(**{k: v for k, v in given.items() if k != "extra_msa"})
    with pytest.raises(ValueError, match="mask is given without msa_mask"):
        model(**{k: v for k, v in given.items() if k != "msa_mask"})
    with pytest.raises(ValueError, match="takes no extra_msa"):
        build("opm first")(**given)
