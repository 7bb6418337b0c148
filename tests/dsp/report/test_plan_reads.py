"""Plans of forwards that read their data: from one run on real inputs, by name on meta tensors."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import dsp
from tests.support import toys


class Masked(nn.Module):
    """Reads its mask to find out whether there is one, its length to count layers, and one number of the activation."""

    stages = {"": "x=b t s c, mask=b t s", "space": "b t [s c]", "time": "b [t] s [c]"}

    def __init__(self) -> None:
        super().__init__()
        self.space, self.time = toys.Along(2), toys.Along(1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, mask: Tensor, layers: Tensor) -> Tensor:
        self.calls += 1
        if mask.any():
            x = x * (1 - mask.to(x.dtype).unsqueeze(-1))
        for _ in range(int(layers)):
            x = self.time(self.space(x))
        if x.amax().item() > 1e9:
            x = x / 2
        return x[:, torch.nonzero(layers.expand(x.shape[1]))[:, 0]]


def inputs() -> dict[str, Tensor]:
    torch.manual_seed(0)
    mask = torch.zeros(1, 6, 4, dtype=torch.bool)
    mask[:, -1] = True
    return {"x": torch.randn(1, 6, 4, toys.C), "mask": mask, "layers": torch.tensor(2)}


def test_real_inputs_are_run_once_as_parallelize_does(mesh: DeviceMesh) -> None:
    model, kwargs = Masked(), inputs()
    state, drawn = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    plan = dsp.plan(model, kwargs=kwargs, size=2, gather_output=True)
    assert [r.layout for r in plan.stages if r.pattern] == ["t", "s", "t", "s"]
    assert "any() at test_plan_reads.py" not in plan.text()
    assert "this forward reads its data: bool() at test_plan_reads.py" in plan.text()
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    dsp.parallelize(model, mesh)
    for call in range(3):
        with torch.no_grad(), dsp.count_comm() as comm:
            model(**kwargs)
        assert not call or sum(comm.forward.bytes.values()) == plan.bytes["forward"]


@pytest.mark.parametrize("meta", ["model", "inputs"])
def test_meta_tensors_have_no_data_to_read(meta: str) -> None:
    model: Any = Masked().to("meta") if meta == "model" else Masked()
    kwargs = {k: v.to("meta") if meta == "inputs" else v for k, v in inputs().items()}
    with pytest.raises(
        ValueError,
        match=r"Masked depends on the values of tensors: bool\(\) at .*, 'if mask.any\(\):'\. .* real inputs",
    ):
        dsp.plan(model, kwargs=kwargs, size=2, gather_output=False)


READERS: dict[str, Any] = {
    "numpy": lambda x: x * float(x.detach().numpy().max()),
    "tolist": lambda x: x * len(x.tolist()),
    "format": lambda x: x * len(f"{x.detach().mean():.2f}"),
    "pickle": lambda x: x + pickle.loads(pickle.dumps(x.detach())),
    "unique": lambda x: x * len(x.detach().unique()),
}


@pytest.mark.parametrize("name", READERS)
def test_readers_of_values_need_real_inputs(name: str) -> None:
    x = torch.randn(1, 6, 4, toys.C)
    plan = dsp.plan(toys.Glued(READERS[name]), (x,), size=2, gather_output=False)
    assert [r.layout for r in plan.stages if r.pattern] == ["t", "s"]
    with pytest.raises(
        ValueError,
        match=r"Glued depends on the values of.* at test_plan_reads.py.*pass real inputs",
    ):
        dsp.plan(toys.Glued(READERS[name]).to("meta"), (x.to("meta"),), size=2, gather_output=False)


def test_sparse_tensors_between_stages() -> None:
    plan = dsp.plan(
        toys.Glued(lambda x: x + x.detach().to_sparse().to_dense()),
        (torch.randn(1, 6, 4, toys.C),),
        size=2,
        gather_output=False,
    )
    assert [r.layout for r in plan.stages if r.pattern] == ["t", "s"]


def test_errors_of_the_model_are_raised_unchanged() -> None:
    class Wrong(Masked):
        def forward(self, x: Tensor, mask: Tensor, layers: Tensor) -> Tensor:
            return super().forward(x.view(7), mask, layers)

    with pytest.raises(RuntimeError, match="invalid for input of size"):
        dsp.plan(Wrong(), kwargs=inputs(), size=2, gather_output=False)


def test_a_size_is_chosen_for_it_too() -> None:
    sizing = dsp.choose(
        Masked(), kwargs=inputs(), hardware=dsp.Hardware("nvlink4", memory=80e9, flops=4e14), sizes=(1, 2)
    )
    assert set(sizing.plans) == {1, 2}
