"""A forward without data: what it keeps for backward is what a real one keeps, and the model stays what it is."""

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import dsp
import zoo

SIZES = {"frames": 5, "height": 8, "width": 8}


def kept(call):
    """Bytes of the storages that autograd saves in a call, without repetition; and its output."""
    found = {}

    def pack(t):
        found[t.untyped_storage()._cdata] = t.untyped_storage()
        return t

    with saved_tensors_hooks(pack, lambda t: t):
        output = call()
    return sum(storage.nbytes() for storage in found.values()), output


@pytest.fixture(params=["cpu", "meta"])
def made(request):
    with torch.device(request.param):
        model = zoo.create("stdit", "test")
        return model, model.example_inputs(2, **SIZES)


def test_it_keeps_what_a_real_forward_keeps(made):
    model, inputs = made
    state = model.state_dict()
    real = zoo.create("stdit", "test")
    bytes_kept, output = kept(lambda: real(**real.example_inputs(2, **SIZES)))
    assert kept(lambda: dsp.without_data(model, kwargs=inputs))[0] == bytes_kept
    found = dsp.without_data(model, kwargs=inputs)
    assert (found.shape, found.dtype, found.device) == (output.shape, output.dtype, torch.device("cpu"))
    assert all(t.data_ptr() == state[name].data_ptr() for name, t in model.state_dict().items())


def test_equal_stages_run_once_and_a_backward_passes_them(made):
    model, inputs = made
    blocks = [block.spatial for block in model.blocks]
    ran, repeated = [], []
    output = dsp.without_data(
        model, kwargs=inputs, stages=blocks,
        ran=lambda given, made: ran.append(made[0].shape) or len(ran),
        repeated=lambda note, given, made: repeated.append((note, made[0].shape)),
    )  # fmt: skip
    assert len(ran) == 1
    assert repeated == [(1, ran[0])] * (len(blocks) - 1)
    assert not any("forward" in vars(block) for block in blocks)
    output.sum().backward()


def test_a_gradient_reaches_what_came_before_a_stage_that_did_not_run():
    reached = []

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.blocks = nn.Linear(4, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            x = self.first(x)
            x.register_hook(lambda grad: reached.append((grad.shape, grad.dtype)))
            for block in self.blocks:
                x = block(x)
            return x

    net = Net()
    dsp.without_data(net, (torch.ones(2, 4),), stages=net.blocks).sum().backward()
    assert reached == [((2, 4), torch.float32)]
    assert all(p.grad is None for p in net.parameters())
