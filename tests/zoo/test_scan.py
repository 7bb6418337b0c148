"""The scan against its definition and against fla-core's: values, every gradient, decays of any strength."""

import importlib.util
from pathlib import Path

import pytest
import torch

from tests.support.refusals import refused
from tests.support.scan_oracles import all_in_float64
from tests.support.scans import KINDS, arguments, run
from zoo.scan import recurrence, scan

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def close(ours, theirs, tolerance):
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert a.isfinite().all(), i
        assert (a - b).abs().max() <= tolerance * b.abs().max().clamp(min=1e-3), i


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("strength", [0.1, 3, 300])
@pytest.mark.parametrize("kind", KINDS)
def test_the_scan_is_the_recurrence(kind, strength, dtype):
    for n, chunk in [(1, None), (7, None), (7, 3), (37, 4), (37, 5), (37, None)]:
        for groups in (1, 2, 4):
            args = arguments(kind, n, strength, dtype, groups=groups)
            ours, theirs = run(lambda *x, chunk=chunk: scan(*x, chunk=chunk), args), run(recurrence, args)
            assert theirs[0].std() > 0.1
            close(ours, theirs, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", KINDS)
def test_decays_that_leave_nothing(kind, dtype):
    *rest, decay, bonus = arguments(kind, 37, 1, dtype)
    for strength in (1e3, 1e6):
        ours = run(scan, [*rest, strength * decay.sign(), bonus])
        close(ours, run(recurrence, [*rest, strength * decay.sign(), bonus]), TOLERANCE[dtype])


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_is_computed_in_float32(kind):
    args = arguments(kind, 20, 3, torch.float32)
    half = [x if x is None else x.bfloat16() for x in args]
    y = scan(*half)
    assert y.dtype == torch.bfloat16
    exact = scan(*(x if x is None else x.float() for x in half))
    assert torch.equal(y, exact.bfloat16())


def test_states_are_not_kept():
    """For backward Mamba-1 keeps its inputs and a state a chunk, not a state a position."""
    args = [x.requires_grad_() for x in arguments("states", 64, 1)[:4]]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        scan(*args)
    states = args[3].numel()
    assert sum(saved) < sum(x.numel() for x in args) + states / 8 + 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: (2, 7, 2, 5)}, "takes q and k"),
        ({2: (2, 8, 4, 5)}, "takes q and k"),
        ({2: (2, 7, 3, 5), 3: (2, 7, 3, 6)}, "3 heads do not divide into 2 groups"),
        ({3: (2, 7, 4, 5)}, "takes log_decay"),
        ({4: (4, 5)}, r"takes bonus \(h k\)"),
        ({3: (2, 7, 4)}, r"takes bonus \(h k\), with log_decay \(b n h k\)"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(change, message):
    args = arguments("bonus", 7, 1)
    for i, shape in change.items():
        args[i] = torch.zeros(shape)
    refused(message, scan, *args)


# fla-core's definitions, from the files themselves: importing the package needs triton


def fla(path):
    package = importlib.util.find_spec("fla")
    if package is None:
        pytest.skip("fla-core is not installed")
    file = Path(package.submodule_search_locations[0]) / path
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fla_simple_gla(q, k, v, w, _):
    return fla("ops/simple_gla/naive.py").naive_recurrent_simple_gla(q, k, v, w, scale=1.0)[0]


def fla_gla(q, k, v, w, _):
    y, _ = fla("ops/gla/naive.py").naive_recurrent_gla(q, k, v, w)  # it scales by k^-1/2
    return y * q.shape[-1] ** 0.5


def fla_rwkv6(q, k, v, w, bonus):
    heads_first = (x.transpose(1, 2) for x in (q, k, v, w))
    y, _ = fla("ops/rwkv6/recurrent_naive.py").naive_recurrent_rwkv6(*heads_first, bonus, scale=1.0)
    return y.transpose(1, 2)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("kind", "oracle"), [("scalar", fla_simple_gla), ("vector", fla_gla), ("states", fla_gla), ("bonus", fla_rwkv6)]
)
def test_the_scan_is_fla_cores(kind, oracle, dtype):
    for n, strength in [(37, 1), (20, 30)]:
        args = arguments(kind, n, strength, dtype, groups=4)
        with all_in_float64(dtype):
            theirs = run(oracle, args)
        assert theirs[0].std() > 0.1
        close(run(scan, args), theirs, TOLERANCE[dtype])
