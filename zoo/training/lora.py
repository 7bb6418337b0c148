"""Low-rank adapters (LoRA; Hu et al., 2021) on the linear layers of a model, by the package peft."""

import hashlib
import json
import re
from fnmatch import fnmatchcase
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zoo.training import UserError
from zoo.training.sections import Lora


def adapt(model: nn.Module, options: Lora, method: str = "dsp") -> nn.Module:
    """Give an adapter to the linear layers that `options.targets` name, in place; only adapters are trained then.

    UserError: peft is not installed, a pattern that matches no linear layer, a method that shards weights.
    """
    rank, targets = options.rank, options.targets
    alpha: Any = options.alpha  # peft's type is int, but it takes any number
    if not rank:
        return model
    if method != "dsp":
        raise UserError(f"lora.rank={rank} needs parallel.method=dsp, not {method}, which cuts the weights")
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise UserError("lora.rank needs a package: pip install peft") from None
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for pattern in targets:
        if not any(fnmatchcase(name, pattern) for name in linear):
            raise UserError(
                f"lora.targets: no linear layer is called {pattern!r}; there are {', '.join(linear[:8])} ..."
            )
    chosen = [name for name in linear if any(fnmatchcase(name, pattern) for pattern in targets)]
    names = "|".join(re.escape(name) for name in chosen)
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=alpha, target_modules=names), model)
    return model


def freeze(model: nn.Module, dtype: torch.dtype) -> None:
    """Store the weights that are not trained in the dtype of the computation: no update is added to them."""
    for p in model.parameters():
        if not p.requires_grad:
            p.data = p.data.to(dtype)


@torch.no_grad()
def base_of(model: nn.Module) -> str:
    """The fingerprint of the weights below adapters: sums over their bits, in bfloat16. Collective.

    It is the same for replicated and for sharded weights.
    """
    sums, shards = {}, 1
    for name, p in model.named_parameters():
        if not p.requires_grad:
            local = p.to_local() if isinstance(p, DTensor) else p
            sums[plain_name(name)] = local.bfloat16().view(torch.int16).sum(dtype=torch.int64)
            if isinstance(p, DTensor):
                shards = prod(p.device_mesh.size(i) for i, place in enumerate(p.placements) if place.is_shard())
    digests = torch.stack(list(sums.values())).cpu()
    if shards > 1:
        dist.all_reduce(digests)  # counts a shard once for each of its copies
        digests //= dist.get_world_size() // shards
    listed = sorted(zip(sums, digests.tolist()))
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()[:16]


def layers(model: nn.Module, kind: type[nn.Module] | None = None) -> dict[str, Any]:
    """The linear layers with an adapter by name, or with `kind` all layers of this kind, those under adapters too."""
    if kind is None:
        return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}
    wanted = {
        name: module for name, module in model.named_modules() if isinstance(module, kind) and ".lora_" not in name
    }
    return {name.removesuffix(".base_layer"): module for name, module in wanted.items()}


def plain_name(name: str) -> str:
    """The name of a tensor in the model without adapters; '' for those of an adapter.

    >>> plain_name("final.linear.base_layer.weight"), plain_name("final.linear.lora_A.default.weight")
    ('final.linear.weight', '')
    """
    return "" if ".lora_" in name else name.replace(".base_layer.", ".")


def merged(model: nn.Module) -> dict[str, Tensor]:
    """Merge adapters into the weights, in place; return the state dict of the model without adapters."""
    for module in model.modules():
        layer: Any = module
        if hasattr(layer, "base_layer") and hasattr(layer, "merge"):
            layer.merge()
    return {plain_name(name): value for name, value in model.state_dict().items() if plain_name(name)}
