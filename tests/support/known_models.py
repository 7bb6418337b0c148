"""Unmodified models of diffusers, transformers, other fields and packages, each under `dsp.parallelize` by one line.

Each is small, with random weights, in float64; the line has the names of its inputs' dims. `held` compares a step on
several ranks with one process. The packages of `OTHER_FIELDS`, but for torch, are those of .ci/compared.txt.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

import dsp
from dsp.stages.known import table
from dsp.verify.slices import cast
from tests.support.records import planned

FILE = Path(__file__).with_name("diffusers_cases.json")
TYPES = Path(__file__).with_name("transformers_cases.json")


class Case(NamedTuple):
    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Any]]
    line: str  # of stages: the root pattern


class Decoder(nn.Module):
    """An autoencoder's decode as a forward; some take all frames as a batch."""

    def __init__(self, vae: Any) -> None:
        super().__init__()
        self.vae, self.frames = vae, "num_frames" in inspect.signature(vae.decode).parameters

    def forward(self, z: Tensor) -> Tensor:
        return self.vae.decode(z, **({"num_frames": z.shape[0]} if self.frames else {}), return_dict=False)[0]


class Encoder(nn.Module):
    """The encode of one: the parameters of its distribution, where it has one."""

    def __init__(self, vae: Any) -> None:
        super().__init__()
        self.vae = vae

    def forward(self, z: Tensor) -> Tensor:
        found = self.vae.encode(z, return_dict=False)[0]
        return getattr(found, "parameters", found)


def _built(name: str, config: dict[str, Any]) -> nn.Module:
    import diffusers

    kind, _, part = name.partition(", ")
    model = getattr(diffusers, kind)(**_tuples(config))
    return {"decoder": Decoder, "encoder": Encoder}[part](model) if part else model


def _tuples(x: Any) -> Any:
    """Lists of JSON as tuples."""
    if isinstance(x, dict):
        return {key: _tuples(value) for key, value in x.items()}
    return tuple(map(_tuples, x)) if isinstance(x, list) else x


def _inputs(given: dict[str, Any]) -> dict[str, Any]:
    """By their descriptions: a list is the shape of a random tensor; tokens; ones of a dtype; a tensor's value; else
    itself."""

    def one(it: Any) -> Any:
        if isinstance(it, list):
            return torch.randn(it)
        if not isinstance(it, dict):
            return it
        if "tokens" in it:
            return torch.randint(4, 24, it["tokens"])
        if "ones" in it:
            return torch.ones(it["ones"], dtype=getattr(torch, it["dtype"]))
        return torch.tensor(it["value"]) if "value" in it else it["given"]

    return {name: one(it) for name, it in given.items()}


def _cases(part: str) -> dict[str, Case]:
    return {
        name: Case(partial(_built, name, case["config"]), partial(_inputs, case["inputs"]), case["line"])
        for name, case in json.loads(FILE.read_text())[part].items()
    }


CASES = _cases("in the table")
MORE = _cases("known, too")  # `dsp/stages/known.json` has them; in no page


def _typed(kind: str, config: dict[str, Any]) -> nn.Module:
    import transformers

    made = getattr(transformers, kind)
    return made(made.config_class(**config))


TRANSFORMERS = {
    name: Case(
        partial(_typed, case["class"], case["config"]), partial(_inputs, case["inputs"]),
        table()["transformers"]["lines"][name],
    )
    for name, case in json.loads(TYPES.read_text()).items()
}  # fmt: skip


def neural_operator() -> nn.Module:
    """Fourier layers, of which a few modes are mixed (Li et al., arXiv 2010.08895)."""
    import tensorly

    tensorly.set_backend("pytorch")
    from neuralop.models import FNO
    from tensorly.plugins import use_default_einsum

    use_default_einsum()
    model = cast(FNO(n_modes=(6, 6), in_channels=2, out_channels=1, hidden_channels=8, n_layers=2), torch.float64)
    model(torch.randn(1, 2, 31, 46, dtype=torch.float64))  # it keeps the places of its grid
    return model


def graph() -> nn.Module:
    """Graph convolutions, at every time step of a series on the nodes (Kipf and Welling, arXiv 1609.02907)."""
    from torch_geometric.nn.models import GCN

    return GCN(8, 16, 2, 4)


def recurrent() -> nn.Module:
    """A language model of gated recurrences by a scan, and causal convolutions (Feng et al., arXiv 2410.01201)."""
    from minGRU_pytorch.minLM import minLM

    return minLM(num_tokens=32, dim=24, depth=2, enable_conv=True)


def medical() -> nn.Module:
    """A U-Net of volumes with residual blocks and group norms (Myronenko, arXiv 1810.11654)."""
    from monai.networks.nets import SegResNet

    return SegResNet(
        spatial_dims=3, init_filters=8, in_channels=1, out_channels=2, blocks_down=(1, 1, 1), blocks_up=(1, 1),
        num_groups=4,
    )  # fmt: skip


def alignment() -> nn.Module:
    """Attention along the rows of an alignment, tied, and along its columns (Rao et al., ICML 2021)."""
    import esm

    sizes = {"layers": 2, "embed_dim": 24, "ffn_embed_dim": 48, "attention_heads": 4, "embed_positions_msa_dim": 24}
    rates = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
    most = {"max_tokens_per_msa": 2**14, "max_tokens": 2**14, "max_positions": 64, "final_layer": 2}
    more = {"embed_positions_msa": True, "logit_bias": True}
    arguments = argparse.Namespace(**sizes, **rates, **most, **more)
    return esm.MSATransformer(arguments, esm.data.Alphabet.from_architecture("msa_transformer"))


def edges() -> torch.Tensor:
    return torch.randint(0, 19, (2, 60), generator=torch.Generator().manual_seed(3))


OTHER_FIELDS: dict[str, Case] = {
    "neuraloperator's FNO": Case(neural_operator, lambda: {"x": torch.randn(1, 2, 31, 46)}, "x=b c h w"),
    "torch_geometric's GCN": Case(graph, lambda: {"x": torch.randn(13, 19, 8), "edge_index": edges()}, "x=t n c"),
    "minGRU's language model": Case(recurrent, lambda: {"x": torch.randint(0, 32, (1, 61))}, "x=b n"),
    "monai's SegResNet": Case(medical, lambda: {"x": torch.randn(1, 1, 24, 16, 20)}, "x=b c d h w"),
    "fair-esm's MSATransformer": Case(alignment, lambda: {"tokens": torch.randint(4, 24, (1, 13, 20))}, "tokens=b r c"),
}


def made(case: Case) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    model = cast(case.build(), torch.float64).eval()  # some drop out by themselves
    for p in model.parameters():
        if not p.abs().max():
            nn.init.normal_(p, std=0.1)
    options = {"return_dict": False} if "return_dict" in inspect.signature(model.forward).parameters else {}
    return model, cast(case.inputs(), torch.float64) | options


def leaves_of(kwargs: Mapping[str, Any], pattern: str) -> dict[str, Tensor]:
    """Copies of what a pattern names, which ask for a gradient."""
    return {k: v.clone().requires_grad_(v.is_floating_point()) for k, v in kwargs.items() if f"{k}=" in pattern}


def step(model: nn.Module, kwargs: Mapping[str, Any], pattern: str) -> tuple[Tensor, dict[str, Tensor], int]:
    """The output, the gradients of what `pattern` names, and what this rank sent forward."""
    leaves = leaves_of(kwargs, pattern)
    with dsp.count_comm() as comm:
        out = next(t for t in pytree.tree_leaves(model(**{**kwargs, **leaves})) if isinstance(t, Tensor))
    out = dsp.gather(out) if isinstance(out, DTensor) else out
    (out * torch.linspace(0.5, 2, out.numel(), dtype=out.dtype).view(out.shape)).sum().backward()
    sent = sum(comm.forward.bytes.values())
    return out.detach(), {k: v.grad for k, v in leaves.items() if v.grad is not None}, sent


class Attentions(TorchFunctionMode):
    """Bytes of queries, keys, values and outputs of every self-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is F.scaled_dot_product_attention:
            q, k, v = (args + tuple((kwargs or {}).get(name) for name in ("query", "key", "value")[len(args) :]))[:3]
            if q.shape[-2] == k.shape[-2]:
                self.bytes += sum(t.numel() * t.element_size() for t in (q, k, v, out))
        return out


def held(mesh: DeviceMesh, case: Case) -> dict[str, float]:
    """One step on the ranks of a mesh beside one on this process alone: errors, bytes, the share, FLOPs that run whole.

    What the busiest rank sends is counted: it is what the plan says, or this raises RuntimeError.
    """
    pattern, n = case.line, mesh.size()
    single, kwargs = made(case)
    model = copy.deepcopy(single)
    with Attentions() as attentions:
        expected, inputs, _ = step(single, kwargs, pattern)
    leaves = {**kwargs, **leaves_of(kwargs, pattern)}
    plan = dsp.plan(model, kwargs=leaves, size=n, stages={"": pattern}, gather_output=False)
    dsp.parallelize(model, mesh, {"": pattern}, gather_output=False)
    out, own, sent = step(model, kwargs, pattern)
    if not planned(model):  # it reads its data
        model.zero_grad()
        out, own, sent = step(model, kwargs, pattern)
    group = mesh.get_group()
    busiest = torch.tensor(sent)
    dist.all_reduce(busiest, dist.ReduceOp.MAX, group=group)
    if busiest != plan.bytes["forward"]:
        raise RuntimeError(f"{type(model).__name__} sent {busiest} bytes where its plan says {plan.bytes['forward']}")
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    for g in grads:
        dist.all_reduce(torch.view_as_real(g) if g.is_complex() else g, group=group)
    whole = [torch.zeros_like(p) if p.grad is None else p.grad for p in single.parameters()]
    largest = max(float(g.abs().max()) for g in whole)
    return {
        "share": plan.share,
        "planned": plan.bytes["forward"],
        "whole": plan.flops_whole / max(plan.flops_alone, 1),
        "output": float((out - expected).abs().max() / expected.abs().max()),
        "inputs": max((float((own[k] - g).abs().max() / g.abs().max()) for k, g in inputs.items()), default=0.0),
        "parameters": max(float((g / n - w).abs().max()) for g, w in zip(grads, whole)) / largest,
        "ulysses": attentions.bytes * (n - 1) / n**2,
    }
