"""What makes a step of the gradients: when what is due, the learning rate, the optimizer, norms, averaged weights.

Steps count from 1; step 0 is the state before the first.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zoo.training.sections import Optim


def learning_rate(options: Optim, step: int, steps: int) -> float:
    """Linear warm-up to `lr`, then a cosine down to `final` x `lr` after the last step; `step` counts from 1."""
    if step <= options.warmup:
        return options.lr * step / options.warmup
    done = (step - options.warmup) / (steps - options.warmup + 1)
    return options.lr * (options.final + (1 - options.final) * (1 + math.cos(math.pi * done)) / 2)


def due(every: int, step: int, steps: int) -> bool:
    """Whether something that happens every so many steps (0: never), and after the last, happens after `step`."""
    return every > 0 and step > 0 and (step % every == 0 or step == steps)


def ahead(make: Callable[..., Any], wanted: Iterable[tuple[Any, ...]]) -> Any:
    """Yield `make(*args)` for every args wanted, each made in a thread while the one before it is used."""
    with ThreadPoolExecutor(1) as pool:
        pending: list[Future[Any]] = []
        for args in wanted:
            pending.append(pool.submit(make, *args))
            if len(pending) > 1:
                yield pending.pop(0).result()
        for last in pending:
            yield last.result()


def adamw(model: nn.Module, options: Optim) -> torch.optim.Optimizer:
    """AdamW; vectors (biases, scales) are not decayed."""
    groups: list[dict[str, Any]] = []
    for parameters in by_mesh(model.parameters()):
        vectors = [p for p in parameters if p.ndim <= 1]
        groups += [{"params": [p for p in parameters if p.ndim > 1]}, {"params": vectors, "weight_decay": 0.0}]
    betas = (options.betas[0], options.betas[1])
    return torch.optim.AdamW(groups, options.lr, betas, options.eps, options.weight_decay)


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


class MovingAverage:
    """A moving average of the weights, to sample and validate with (Polyak averaging).

    Follows every parameter of an FSDP2 model: average <- decay average + (1 - decay) weight, after each step. A rank
    keeps the average of its own shards alone, so there is nothing to communicate.
    """

    def __init__(self, model: Any, decay: float):
        self.model, self.decay = model, decay
        self.restart()

    def restart(self) -> None:
        """Begin with the weights as they are."""
        self.values = {name: p.detach().clone() for name, p in self.model.named_parameters()}

    @torch.no_grad()
    def update(self) -> None:
        average = [_local(value) for value in self.values.values()]
        torch._foreach_lerp_(average, [_local(p) for p in self.model.parameters()], 1 - self.decay)

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
        for name, p in self.model.named_parameters():
            weight, average = _local(p), _local(self.values[name])
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)


def _local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
