"""No rank makes anything of the size of all pairs: not of a batch, not in a step, not in a prediction."""

from functools import partial

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import dsp
from tests.support.slow import long
from zoo.data.protein.embedded import EmbeddedProteins
from zoo.training import config as cfg
from zoo.training.model import repeated_stages
from zoo.training.task_lookup import create_task

RESIDUES, ROWS, HEADS = 61, 6, 4  # 16, 16, 16 and 13 residues; no other size is a multiple of 61
CHANNELS = {"c_m": 12, "c_z": 16, "triangle": 16, "c_s": 8, "outer": 3, "chunk": RESIDUES**2 * HEADS, "bins": 64}


class Allocations(TorchDispatchMode):
    """Shapes of all tensors that operations return, those on the shards of a DTensor too; `whole` over both i and j."""

    def __init__(self):
        super().__init__()
        self.largest, self.whole = 0, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it will be back with the shards
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if type(tensor) is torch.Tensor and tensor.device.type == "cpu":
                shape = tuple(tensor.shape)
                self.largest = max(self.largest, tensor.numel())
                if sum(n == RESIDUES for n in shape) > 1 or any(n and n % RESIDUES**2 == 0 for n in shape):
                    self.whole.add((tensor.numel(), shape, str(function)))
        return out


def watch(mesh, name):
    """The tensors that a batch, a training step and a prediction make on this rank, in three parts."""
    config = cfg.defaults("protein_embedded")
    config.model.name, config.model.size, config.model.overrides = name, "test", dict(CHANNELS)
    if name == "evoformer":
        config.model.overrides["extra_depth"] = 0
    config.data.residues, config.data.rows = RESIDUES, ROWS
    task = create_task(config, mesh)
    task.train = EmbeddedProteins("train")
    model = task.model()
    objective, predictor = task.objective(model), task.predictor(model)
    if mesh.size() > 1:
        dsp.parallelize(objective, mesh, gather_output=False)
        dsp.parallelize(predictor, mesh)
        for stage in repeated_stages(model):
            stage.forward = partial(checkpoint, stage.forward, use_reentrant=False)
    given = {k: v for k, v in task.example(objective).items() if k in task.inputs}
    for _ in range(2):  # the second time, plans are made
        with Allocations() as batch:
            inputs = task.batch(objective, 2, 0, 0, 1)
        with Allocations() as step:
            sum(dsp.mean(error, weight) for error, weight in objective(**inputs).values()).backward()
        with Allocations() as prediction, torch.no_grad():
            predictor(**given)
    return [(part.largest, part.whole) for part in (batch, step, prediction)]


@pytest.mark.parametrize("name", [long("evoformer"), long("pairformer")])
def test_nothing_of_the_size_of_all_pairs_is_made(ranks, name):
    (alone,) = ranks(watch, 1, name)
    assert [bool(whole) for _, whole in alone] == [True] * 3  # it is seen where it is
    pairs = RESIDUES**2
    for batch, step, prediction in ranks(watch, 4, name):
        assert not batch[1]
        assert batch[0] < pairs
        # biases of attention are whole, a number a head, and logits of one row; what has channels is not
        assert all(numel <= HEADS * pairs for numel, *_ in step[1]), sorted(step[1])[-5:]
        assert step[0] <= 1.1 * alone[1][0] / 4
        # also the two answers, a number a pair each
        assert all(numel <= HEADS * pairs for numel, *_ in prediction[1]), sorted(prediction[1])[-5:]
        assert prediction[0] <= 1.1 * alone[2][0] / 4
