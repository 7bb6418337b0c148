"""A parallelized model against the same model on one process: outputs, loss, every gradient, bytes."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import dsp
from tests.support import toys
from tests.support.beside import as_tuple, averaged, same, step, wrap_checkpoints
from tests.support.slow import slow, slow_but


def parity(mesh: DeviceMesh, name: str, shapes: list[tuple[int, int, int]], gather: bool, ckpt: bool = False) -> None:
    single, model = toys.make(name), toys.make(name)
    stages = dict(model.stages)
    if ckpt:
        wrap_checkpoints(model)
        wrap_checkpoints(single)
        stages = {k.replace(".*", ".*.inner"): v for k, v in stages.items()}
    dsp.parallelize(model, mesh, stages, gather_output=gather)
    for shape in [*shapes, shapes[0]]:
        kwargs = toys.inputs(name, *shape)
        single.zero_grad()
        model.zero_grad()
        expect, expect_loss, expect_inputs = step(single, kwargs)
        got, loss, inputs = step(model, kwargs)
        for a, b in zip(got, expect):
            assert a.shape == b.shape
            assert isinstance(a, DTensor) == (not gather and mesh.size() > 1 and b.ndim > 0)
            torch.testing.assert_close(dsp.gather(a) if isinstance(a, DTensor) else a, b)
        torch.testing.assert_close(loss, expect_loss)
        same(inputs, expect_inputs)
        same(averaged(model, mesh), {n: p.grad for n, p in single.named_parameters()})
        with torch.no_grad():
            for a, b in zip(as_tuple(model(**kwargs)), expect):
                torch.testing.assert_close(dsp.gather(a), b)


SHAPES = [(1, 7, 5), (2, 4, 8), (1, 5, 3), (2, 3, 3)]


ALL = [(n, name) for n in (3, 1, 4) for name in toys.TOYS]


@pytest.mark.parametrize(("n", "name"), slow_but(ALL, *ALL[: len(toys.TOYS)], but=[(1, "Grid"), (4, "Pair")]))
def test_exact(ranks, name: str, n: int) -> None:
    several = name in ("Grid", "Unplanned")  # shapes in turn
    ranks(parity, n, name, SHAPES if n != 3 else SHAPES[::3] if several else SHAPES[:1], n % 2 == 0)


@pytest.mark.parametrize("name", ["Folded", slow("Cube")])
def test_exact_the_other_way_round(ranks, name: str) -> None:
    ranks(parity, 3, name, SHAPES[:1], True)


@pytest.mark.parametrize("name", ["Grid", "Folded", slow("Cube"), slow("Global")])
@pytest.mark.parametrize("n", [2, slow(4)])
def test_exact_under_the_models_own_checkpointing(ranks, name: str, n: int) -> None:
    ranks(parity, n, name, SHAPES[:2], n == 2, True)
