"""The update of the weights: optimizers, gradient norms, averaged weights."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zoo.training.sections import Optim


def optimizers(model: nn.Module, options: Optim) -> list[torch.optim.Optimizer]:
    """The optimizers of the weights; vectors (biases, scales) are not decayed.

    muon makes the update of every matrix orthogonal, at the rate of AdamW (Jordan et al., 2024; the rate by Liu et al.,
    2025), and leaves vectors and kernels of convolutions to AdamW. Both are torch's own; its Adafactor takes no sharded
    weights.
    """
    groups: list[dict[str, Any]] = []
    matrices: list[dict[str, Any]] = []
    for parameters in by_mesh(p for p in model.parameters() if p.requires_grad):
        of_muon = [p for p in parameters if options.name == "muon" and p.ndim == 2]
        others = [p for p in parameters if p.ndim > 1 and not (options.name == "muon" and p.ndim == 2)]
        vectors = [p for p in parameters if p.ndim <= 1]
        groups += [{"params": others}, {"params": vectors, "weight_decay": 0.0}]
        matrices += [{"params": of_muon}] if of_muon else []
    groups = [group for group in groups if group["params"]]  # torch takes no empty one beside another optimizer
    betas, decay = (options.betas[0], options.betas[1]), options.weight_decay
    found: list[torch.optim.Optimizer] = []
    if groups:
        fused = all(p.is_cuda for group in groups for p in group["params"])  # one kernel a group
        found.append(torch.optim.AdamW(groups, options.lr, betas, options.eps, decay, fused=fused))
    if matrices:
        found.append(torch.optim.Muon(matrices, options.lr, weight_decay=decay, adjust_lr_fn="match_rms_adamw"))
    return found


def by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters that one operation can take together: a method's cut weights are on the sp axis, others on FSDP's."""
    found: dict[Any, list[nn.Parameter]] = {}
    for p in parameters:
        found.setdefault(p.device_mesh if isinstance(p, DTensor) else None, []).append(p)
    return list(found.values())


def average_cut(model: nn.Module, mesh: DeviceMesh) -> None:
    """Average over data-parallel groups the gradients of weights that FSDP does not know."""
    for axis in ("dp_replicate", "dp_shard"):
        over = mesh[axis]
        for p in model.parameters() if over.size() > 1 else ():
            if isinstance(p.grad, DTensor) and p.grad.device_mesh == mesh["sp"]:
                grad = p.grad.to_local()
                dist.all_reduce(grad, group=over.get_group())
                grad /= over.size()


def clip_gradients(model: nn.Module, limit: float) -> float:
    """Scale all gradients by one factor, so that their norm is `limit` at most. Returns the norm that it was."""
    groups = by_mesh(p for p in model.parameters() if p.grad is not None)
    norms: list[Any] = [nn.utils.get_total_norm([p.grad for p in group if p.grad is not None]) for group in groups]
    norm = reduce(torch.hypot, (n.full_tensor() for n in norms))
    for group in groups:
        nn.utils.clip_grads_with_norm_(group, limit, norm)
    return norm.item()


def averaged(average: "MovingAverage | None") -> AbstractContextManager[None]:
    """The model as it is judged and shown: with the moving average of its weights, if there is one."""
    return average.swapped() if average else nullcontext()


class MovingAverage:
    """A moving average of the weights, to sample and validate with (Polyak averaging).

    Follows every trained parameter of an FSDP2 model: average <- decay average + (1 - decay) weight, after each step. A
    rank keeps the average of its own shards alone, so there is nothing to communicate.
    """

    def __init__(self, model: Any, decay: float):
        self.model, self.decay = model, decay
        self.restart()

    def restart(self) -> None:
        """Begin with the weights as they are."""
        self.values = {name: p.detach().clone() for name, p in self._trained().items()}

    def _trained(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    @torch.no_grad()
    def update(self) -> None:
        average = [_local(value) for value in self.values.values()]
        torch._foreach_lerp_(average, [_local(p) for p in self._trained().values()], 1 - self.decay)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """The model with the averaged weights, for as long as this lasts."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for module in self.model.modules():
            if hasattr(module, "reshard"):
                module.reshard()  # FSDP keeps what it last gathered, which is about to be out of date
        for name, p in self._trained().items():
            weight, average = _local(p), _local(self.values[name])
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)


def _local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
