"""The update of the weights: learning rate, optimizers, gradient norms, averaged weights.

Steps count from 1; step 0 is the state before the first.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zoo.training import UserError
from zoo.training.sections import Optim


def is_due(every: int, step: int, steps: int) -> bool:
    """Tell whether an event that comes every `every` steps (0: never), and after the last, is due after `step`."""
    return every > 0 and step > 0 and (step % every == 0 or step == steps)


def learning_rate(options: Optim, step: int, steps: int) -> float:
    """The rate of a step: linear warm-up to `lr`, then `schedule`. The last step is one before the schedule's end.

    cosine, linear: down to `final` x `lr` over the remaining steps. constant: stays. wsd (warm-up, stable, decay; Hu et
    al., 2024, arXiv 2404.06395): stays, and goes down linearly to `final` x `lr` over the last `decay` of all steps.
    """
    lr, shape, final, begins = options.lr, options.schedule, options.final, options.warmup
    stable = steps - round(options.decay * steps)  # the last step before wsd goes down
    if step <= begins:
        return lr * step / begins
    if shape == "wsd":
        begins = max(begins, stable)
    if shape == "constant" or step <= begins:
        return lr
    done = (step - begins) / (steps - begins + 1)
    share = (1 + math.cos(math.pi * done)) / 2 if shape == "cosine" else 1 - done
    return lr * (final + (1 - final) * share)


def optimizers(model: nn.Module, options: Optim, fused: bool = False) -> list[torch.optim.Optimizer]:
    """The optimizers of the weights; vectors (biases, scales) are not decayed.

    fused: AdamW in one kernel a group, as always on CUDA. adamw8bit is torchao's AdamW with moments in 8 bits (Dettmers
    et al., 2022).

    muon makes the update of every matrix orthogonal, at the rate of AdamW (Jordan et al., 2024; the rate by Liu et al.,
    2025), and leaves vectors and kernels of convolutions to AdamW. Muon and AdamW are torch's own; torch's Adafactor
    takes no sharded weights.
    """
    groups, matrices = _groups(model, options.name == "muon")
    betas, decay = (options.betas[0], options.betas[1]), options.weight_decay
    chosen: list[torch.optim.Optimizer] = []
    if groups:
        if options.name == "adamw8bit":
            chosen.append(adamw_8bit()(groups, options.lr, betas, options.eps, decay))
        else:
            fused = fused or all(p.is_cuda for group in groups for p in group["params"])
            chosen.append(torch.optim.AdamW(groups, options.lr, betas, options.eps, decay, fused=fused))
    if matrices:
        chosen.append(torch.optim.Muon(matrices, options.lr, weight_decay=decay, adjust_lr_fn="match_rms_adamw"))
    return chosen


def _groups(model: nn.Module, muon: bool) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The groups of weights that AdamW gets, none of them empty, and those that Muon gets."""
    groups: list[dict[str, Any]] = []
    matrices: list[dict[str, Any]] = []
    for parameters in by_mesh(p for p in model.parameters() if p.requires_grad):
        of_muon = [p for p in parameters if muon and p.ndim == 2]
        arrays = [p for p in parameters if p.ndim > 1 and not (muon and p.ndim == 2)]
        vectors = [p for p in parameters if p.ndim <= 1]
        groups += [{"params": arrays}, {"params": vectors, "weight_decay": 0.0}]
        matrices += [{"params": of_muon}] if of_muon else []
    return [group for group in groups if group["params"]], matrices  # beside a second optimizer torch takes none empty


def adamw_8bit() -> Any:
    try:
        from torchao.optim import AdamW8bit
    except ImportError:
        raise UserError("optim.name=adamw8bit needs a package: pip install torchao") from None
    return AdamW8bit


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the rate of all groups; torchao's optimizers keep it in a tensor."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def runs_ahead(wanted: bool | None, optimizers: Sequence[torch.optim.Optimizer]) -> bool:
    """Tell whether a step may be taken before its numbers are on the host: the device skips a bad one by itself.

    wanted: None means yes on CUDA. Skipping needs AdamW's fused kernel, which takes the decision as a tensor.
    """
    able = all(isinstance(o, torch.optim.AdamW) and o.defaults["fused"] for o in optimizers)
    on_cuda = all(p.is_cuda for o in optimizers for group in o.param_groups for p in group["params"])
    return able and (on_cuda if wanted is None else wanted)


def set_skip(optimizer: Any, mask: Tensor | None) -> None:
    """Let the kernel of a fused AdamW skip its next step if `mask` is zero; None: no skipping."""
    optimizer.found_inf = None if mask is None else 1 - mask


def by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters by mesh, for operations on several: weights sharded by a method are on sp, others on FSDP's mesh."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for p in parameters:
        groups.setdefault(p.device_mesh if isinstance(p, DTensor) else None, []).append(p)
    return list(groups.values())


def average_sharded_gradients(model: nn.Module, mesh: DeviceMesh) -> None:
    """Average, over data-parallel groups, the gradients of weights that a method shards and FSDP ignores."""
    for axis in ("dp_replicate", "dp_shard"):
        over = mesh[axis]
        for p in model.parameters() if over.size() > 1 else ():
            if isinstance(p.grad, DTensor) and p.grad.device_mesh == mesh["sp"]:
                grad = p.grad.to_local()
                dist.all_reduce(grad, group=over.get_group())
                grad /= over.size()


def clip_gradients(model: nn.Module, limit: float) -> Tensor:
    """Scale all gradients by one factor, so that their norm is `limit` at most. Returns the norm before, 0-d."""
    groups = by_mesh(p for p in model.parameters() if p.grad is not None)
    norms: list[Any] = [nn.utils.get_total_norm([p.grad for p in group if p.grad is not None]) for group in groups]
    norm: Tensor = reduce(torch.hypot, (n.full_tensor() for n in norms))
    for group in groups:
        nn.utils.clip_grads_with_norm_(group, limit, norm)
    return norm


def ema_weights(average: "MovingAverage | None") -> AbstractContextManager[None]:
    """Give the model the moving average of its weights, if there is one, for validation and samples."""
    return average.swapped() if average else nullcontext()


class MovingAverage:
    """A moving average of the weights, to sample and validate with (Polyak averaging).

    Follows every trained parameter of an FSDP2 model: average <- decay average + (1 - decay) weight, after each step. A
    rank keeps the average of only its own shards, so there is nothing to communicate.
    """

    def __init__(self, model: Any, decay: float):
        self.model, self.decay = model, decay
        self.restart()

    def restart(self) -> None:
        """Begin with the current weights."""
        self.values = {name: p.detach().clone() for name, p in self._trained().items()}

    def _trained(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    @torch.no_grad()
    def update(self, mask: Tensor | None = None) -> None:
        """Follow the weights after a step; `mask` (0-d): zero if the device has skipped the step."""
        average, weights = list(map(local_part, self.values.values())), list(map(local_part, self._trained().values()))
        if mask is None:
            torch._foreach_lerp_(average, weights, 1 - self.decay)
        else:
            torch._foreach_lerp_(average, weights, [mask * (1 - self.decay)] * len(average))

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Give the model the averaged weights inside the context."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for module in self.model.modules():
            if hasattr(module, "reshard"):
                module.reshard()  # FSDP keeps the weights gathered last, which would be out of date
        for name, p in self._trained().items():
            weight, average = local_part(p), local_part(self.values[name])
            backup = weight.clone()
            weight.copy_(average)
            average.copy_(backup)


def local_part(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
