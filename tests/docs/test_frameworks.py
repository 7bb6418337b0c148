"""The examples of docs/frameworks.md and its like, each on its ranks: they end with the weights of one process."""

from __future__ import annotations

import inspect
import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor

from tests.support.pages import FRAMEWORKS, blocks
from tests.support.slow import slow

HEADINGS = [name for page in FRAMEWORKS for name in re.findall(r"^## (.*)$", page.read_text(), re.M)]
EXAMPLES = {
    re.findall(r"^## (.*)$", page.read_text()[: block.start], re.M)[-1]: (page, block)
    for page in FRAMEWORKS
    for block in blocks(page)
    if block.language == "python"
}
CLIPPED = {"FSDP2"}  # gradients, at a norm of 1
NEEDS = {"DeepSpeed ZeRO-2": "deepspeed"}  # the only one that the `test` extra does not bring
EIGHT = "Four axes"  # the ranks of this one; of the others, four
PIPELINES = {"Pipeline", EIGHT}
FLOAT32 = {"DeepSpeed ZeRO-2"}  # master weights, whatever the model's


class Along(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim, self.block = dim, nn.TransformerEncoderLayer(16, 2, 32, dropout=0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = x.movedim(self.dim, 2)
        return x + self.block(y.flatten(0, 1)).view(y.shape).movedim(2, self.dim)


def single(clip: bool) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    """The training of the examples in one process: weights before and after, and the last gradient norm."""
    torch.manual_seed(0)
    model = nn.Sequential(Along(2), Along(1))
    data = torch.randn(4, 7, 5, 16)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    norms = []
    for batch in data.split(2):
        (model(batch) - batch).square().mean().backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0 if clip else float("inf")))
        optimizer.step()
        optimizer.zero_grad()
    assert min(norms) > 1  # so that clipping does something
    return before, {n: p.detach() for n, p in model.named_parameters()}, norms[-1]


def on_rank(mesh: DeviceMesh, name: str) -> tuple[dict[str, Any], float | None, dict[str, int]]:
    """Run an example as torchrun would; the weights it ends with, its last gradient norm, and what dsp called."""
    import torch.distributed as dist

    import dsp

    page, example = EXAMPLES[name]
    space: dict[str, Any] = {"__name__": "__main__"}
    patch = pytest.MonkeyPatch()
    rank, size = dist.get_rank(), dist.get_world_size()
    given = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}
    for key, value in given.items():
        patch.setenv(key, str(value))
    # the pool has its process group already, and keeps it
    patch.setattr(dist, "init_process_group", lambda *args, **kwargs: None)
    patch.setattr(dist, "destroy_process_group", lambda *args, **kwargs: None)
    torch.set_default_dtype(torch.float64)
    try:
        with warnings.catch_warnings():
            if name in NEEDS:
                import deepspeed.ops

                warnings.simplefilter("ignore")  # what it calls in torch is deprecated
                deepspeed.ops.__dict__["__compatible_ops__"] = {}  # nothing to be compiled
            with dsp.count_comm() as comm:
                exec(compile("\n" * (example.line - 1) + example.text, page.name, "exec"), space)
    finally:
        torch.set_default_dtype(torch.float32)
        patch.undo()
    model = space["model"]
    weights = {}
    for key, p in getattr(model, "module", model).named_parameters():
        whole = p.full_tensor() if isinstance(p, DTensor) else p
        weights[key.replace("_orig_mod.", "")] = whole.detach().numpy()
    norm = space.get("norm")
    return weights, None if norm is None else float(norm.full_tensor()), dict(comm.forward.calls)


def test_every_framework_has_one_short_example() -> None:
    assert list(EXAMPLES) == HEADINGS
    lengths = {name: len(block.text.splitlines()) for name, (_, block) in EXAMPLES.items()}
    assert {name: length for name, length in lengths.items() if length > 30} == {}


@pytest.mark.parametrize("name", [slow(name) if name == EIGHT else name for name in EXAMPLES])
def test_the_result_is_that_of_one_process(whole_world, name: str) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    if name in PIPELINES and "get_mesh" not in inspect.signature(PipelineStage).parameters:
        pytest.skip("the pipelining of this torch sends no DTensors")
    torch.set_default_dtype(torch.float64)
    try:
        before, after, norm = single(name in CLIPPED)
    finally:
        torch.set_default_dtype(torch.float32)
    close = {"rtol": 0, "atol": 1e-6 if name in FLOAT32 else 1e-12}
    results = whole_world(on_rank, 8 if name == EIGHT else 4, name)
    seen = set()
    for weights, got, _ in results:
        seen |= set(weights)
        for key, value in weights.items():
            torch.testing.assert_close(torch.from_numpy(value), after[key], **close)
        assert (got is not None) == (name in CLIPPED)
        if got is not None:  # clipping would hide a wrong factor
            assert got == pytest.approx(float(norm), rel=1e-12)
    assert seen == set(after)
    moved = {key: float((after[key] - before[key]).abs().max()) for key in seen}
    assert min(moved.values()) > 1e-4, moved
    assert sum(calls.get("switch", 0) for _, _, calls in results) >= 4
