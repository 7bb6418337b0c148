"""train.checkpoint_activations: blocks and stages computed again in backward, with the bytes that a plan says."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import dsp
import zoo
from tests.support.evoformer_cases import CASES, build, inputs, scalar
from tests.support.oracles import randomise
from tests.support.parity import assert_close_named, assert_step_equal, averaged
from tests.support.slow import long, slow
from zoo.training.model import recomputed_modules

WAYS = ("stages", "blocks", "both")


def recomputed(model, way):
    """As the trainer does it, before a plan is made."""
    for module in recomputed_modules(model)[way]:
        module.forward = partial(checkpoint, module.forward, use_reentrant=False)
    return model


def make(name):
    if name in CASES:
        return build(name)
    torch.manual_seed(0)
    model = zoo.create(name, "test").double()
    randomise(model)
    return model


def given_to(model, name, uneven):
    if name in CASES:
        return inputs(model, 1, *((5, 7) if uneven else (4, 8)))
    torch.manual_seed(1)
    return {
        k: torch.randn_like(x, dtype=torch.float64) if x.is_floating_point() else x
        for k, x in model.example_inputs(1, **({} if uneven else {"frames": 4, "height": 4, "width": 4})).items()
    }


def total(out):
    return scalar(out if isinstance(out, tuple) else (out,))


def step(mesh, name, way, uneven):
    """Loss and gradients beside one process that keeps everything; what was sent."""
    single, model = make(name), recomputed(make(name), way)
    dsp.parallelize(model, mesh, gather_output=False)
    *_, comm = assert_step_equal(single, model, mesh, given_to(single, name, uneven), rounds=2, count=True)
    phases = {"forward": comm.forward, "backward": comm.backward, "recompute": comm.recompute}
    return {k: sum(v for name, v in phase.bytes.items() if name != "all_reduce") for k, phase in phases.items()}


def planned(name, way, uneven, n):
    model = recomputed(make(name), way)
    return dsp.plan(model, kwargs=given_to(model, name, uneven), size=n, gather_output=False).bytes


@pytest.mark.parametrize(
    ("name", "way"),
    [
        long("evoformer", "both"), long("pairformer", "blocks"),
        long("latte", "stages"), slow("latte", "both"),
    ],
)  # fmt: skip
def test_loss_gradients_and_bytes(ranks, name, way):
    few = name in CASES  # whose plans take long, on every rank
    for n in (4,) if few else (2,):
        expect = planned(name, way, False, n)
        assert ranks(step, n, name, way, False) == [expect] * n
        assert (expect["recompute"] > 0) == (way != "stages")
    for n in (3,):
        results, most = ranks(step, n, name, way, True), planned(name, way, True, n)
        for phase in ("forward", "backward", "recompute"):  # the plan's are those of one rank, the busiest of the phase
            assert max(sent[phase] for sent in results) == most[phase]


def dropping(mesh, name, way, apart=False):
    """The gradients of a step that drops out, on this rank; backward in a thread `apart`, as CUDA's is."""
    drop = {"dropout": 0.4} if name == "axial_image" else {"msa_dropout": 0.4, "pair_dropout": 0.4}
    torch.manual_seed(0)
    model = recomputed(zoo.create(name, "test", **drop).double().train(), way)
    randomise(model)
    given = model.example_inputs(1)
    dsp.parallelize(model, mesh, gather_output=False)
    torch.manual_seed(1 + mesh.get_local_rank())
    loss = total(model(**given))
    if apart:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(loss.backward).result()
    else:
        loss.backward()
    return loss.detach(), averaged(model, mesh)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "n"), [long("evoformer", 2), ("axial_image", 2), slow("axial_image", 3)])
def test_recomputed_dropout_drops_the_same(ranks, name, n):
    """Between stages, where all ranks draw alike, and inside of stages, where each draws for itself."""
    expected = [ranks(dropping, size, name, "none") for size in (1, n)]
    assert expected[1][0][0] != expected[0][0][0]
    for way in WAYS if name != "evoformer" and n == 3 else ("both",):
        for size, before in zip((1, n), expected):
            for apart in (False, True) if size == 2 else (False,):
                after = ranks(dropping, size, name, way, apart)
                for (loss, gradients), (loss_before, gradients_before) in zip(after, before):
                    assert torch.equal(loss, loss_before)
                    assert_close_named(gradients, gradients_before)
