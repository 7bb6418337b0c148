"""The models, and the methods under test, of benchmarks/conformance.py.

What has no CPU kernel is given one here, or it could not be tried at all: a ring needs the log-sum-exp of attention,
which torch and diffusers ask of CUDA kernels alone. All that is replaced stands in `kernel_for_torch`,
`kernel_for_diffusers`, `unequal_all_gather` and `by_diffusers`, each with its reason.
"""

# ruff: noqa: C408

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import dsp

Inputs = dict[str, Any]
Stages = dict[str, str]


@dataclass(frozen=True)
class Circumstance:
    """12 heads and lengths of 24 and 12 divide by 2, 3 and 4; 5 heads and lengths of 25 and 13 by none of them."""

    heads: int = 12
    length: int = 24
    text: int = 12
    mask: str = ""  # per key or per head
    cut: bool = False  # the mask per head is cut by the caller, as the method needs it
    causal: bool = False
    recompute: bool = False


EVEN = "even"
COMMON = {
    EVEN: Circumstance(),
    "uneven": Circumstance(length=25),
    "5 heads": Circumstance(heads=5),
    "recompute": Circumstance(recompute=True),
}
ATTENTION = COMMON | {
    "mask per key": Circumstance(mask="key"),
    "uneven with mask per key": Circumstance(length=25, mask="key"),
    "mask per head": Circumstance(mask="head"),
    "mask per head cut by hand": Circumstance(mask="head", cut=True),
    "causal": Circumstance(causal=True),
}
TEXT = COMMON | {"uneven text": Circumstance(text=13)}
MASKED_TEXT = TEXT | {
    "text mask": Circumstance(mask="key"),
    "uneven with text mask": Circumstance(text=13, length=25, mask="key"),
}


def plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """Attention of (b l h d), by torch."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal).transpose(1, 2)


class Attention(nn.Module):
    """Self-attention on the norm of (b l c), with its residual. `attend` is what the methods replace."""

    def __init__(self, width: int, heads: int, causal: bool):
        super().__init__()
        self.heads, self.causal, self.attend = heads, causal, plain
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        if mask is not None and mask.ndim == 2:
            mask = mask[:, None, None]
        return x + self.out(self.attend(q, k, v, mask, self.causal).flatten(2))


class Block(nn.Module):
    """Two layers of attention: the gradients of the first pass through the exchanges of the second."""

    def __init__(self, it: Circumstance):
        super().__init__()
        self.layers = nn.ModuleList(Attention(4 * it.heads, it.heads, it.causal) for _ in range(2))
        self.recompute, self.end = it.recompute, nn.Identity()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, mask, use_reentrant=False) if self.recompute else layer(x, mask)
        return self.end(x)


def block(it: Circumstance) -> tuple[nn.Module, Inputs]:
    inputs = {"x": torch.randn(1, it.length, 4 * it.heads)}
    if it.mask:
        shorter = torch.arange(it.length)[None] < it.length - 4
        inputs["mask"] = shorter if it.mask == "key" else torch.randn(1, it.heads, it.length, it.length)
    return Block(it), inputs


def of_diffusers(name: str, it: Circumstance, config: dict[str, Any], inputs: Inputs) -> tuple[nn.Module, Inputs]:
    import diffusers

    model = getattr(diffusers, name)(num_attention_heads=it.heads, **config)
    if it.recompute:
        model.enable_gradient_checkpointing()
    return model, inputs | {"encoder_hidden_states": torch.randn(1, it.text, 16), "timestep": torch.tensor([500.0])}


def text_mask(it: Circumstance) -> Tensor:
    return torch.arange(it.text)[None] < it.text - 3


def grid(it: Circumstance) -> tuple[int, int, int]:
    """Frames, height and width: 2 x 3 x 4 or 5 x 1 x 5."""
    return (2, 3, 4) if it.length == 24 else (5, 1, 5)


def wan(it: Circumstance) -> tuple[nn.Module, Inputs]:
    config = dict(attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16, freq_dim=16, ffn_dim=32)
    t, h, w = grid(it)
    inputs = {"hidden_states": torch.randn(1, 4, t, 2 * h, 2 * w)}
    return of_diffusers("WanTransformer3DModel", it, config | {"num_layers": 2, "rope_max_seq_len": 16}, inputs)


def flux(it: Circumstance) -> tuple[nn.Module, Inputs]:
    config = dict(in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=8, axes_dims_rope=(2, 2, 4))
    ids = {"img_ids": torch.cartesian_prod(*map(torch.arange, grid(it))).float(), "txt_ids": torch.zeros(it.text, 3)}
    inputs = {"hidden_states": torch.randn(1, it.length, 4), "pooled_projections": torch.randn(1, 16)} | ids
    config |= {"joint_attention_dim": 16, "pooled_projection_dim": 16}
    return of_diffusers("FluxTransformer2DModel", it, config, inputs)


def qwen(it: Circumstance) -> tuple[nn.Module, Inputs]:
    config = dict(in_channels=16, out_channels=4, num_layers=2, attention_head_dim=8, axes_dims_rope=(2, 2, 4))
    inputs = {"hidden_states": torch.randn(1, it.length, 16), "img_shapes": [[grid(it)]]}
    inputs["encoder_hidden_states_mask"] = text_mask(it) if it.mask else None
    return of_diffusers("QwenImageTransformer2DModel", it, config | {"joint_attention_dim": 16}, inputs)


def ltx(it: Circumstance) -> tuple[nn.Module, Inputs]:
    config = dict(in_channels=8, out_channels=8, attention_head_dim=8, num_layers=2, caption_channels=16)
    inputs = {"hidden_states": torch.randn(1, it.length, 8)} | dict(zip(("num_frames", "height", "width"), grid(it)))
    inputs["encoder_attention_mask"] = text_mask(it).float() if it.mask else None
    return of_diffusers("LTXVideoTransformer3DModel", it, config | {"cross_attention_dim": 8 * it.heads}, inputs)


@dataclass(frozen=True)
class Model:
    make: Callable[[Circumstance], tuple[nn.Module, Inputs]]
    stages: Stages  # for dsp
    circumstances: dict[str, Circumstance]
    ranks: tuple[int, ...] = (2, 3)
    exact: float = 1e-5  # of the largest value: they compute parts in float32 themselves


PATCHES = "b [c] t [h w] -> b [c] t [h w]"
MODELS = {
    "attention": Model(block, {"": "x=b l c"}, ATTENTION, (2, 3, 4), 1e-10),
    "Wan": Model(wan, {"": "hidden_states=b c t h w", "patch_embedding": PATCHES}, TEXT),
    "Flux": Model(flux, {"": "hidden_states=b l c"}, TEXT),
    "QwenImage": Model(qwen, {"": "hidden_states=b l c"}, MASKED_TEXT),
    "LTX": Model(ltx, {"": "hidden_states=b l c"}, MASKED_TEXT),
}


def make(name: str, it: Circumstance) -> tuple[nn.Module, Inputs]:
    """The same weights and inputs on every rank, in float64; no gradient vanishes."""
    torch.manual_seed(0)
    model, inputs = MODELS[name].make(it)
    for p in model.parameters():
        nn.init.normal_(p, std=0.5 / p.shape[-1] ** 0.5 if p.ndim > 1 else 0.2)
    inputs = {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in inputs.items()}
    return model.double().train(), inputs


def how(mask: Tensor | None, causal: bool, scale: float | None) -> dict[str, Any]:
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -math.inf)
    return {"dropout_p": 0.0, "is_causal": causal, "attn_mask": mask, "scale": scale}


# torch's kernels for the CPU: the first returns the log-sum-exp too, the second takes what they are of all keys
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def kernel_for_torch() -> None:
    """Those for `aten::_scaled_dot_product_efficient_attention`, which context_parallel knows."""

    def forward(q, k, v, bias, log_sumexp, dropout=0.0, causal=False, *, scale=None):
        none = torch.zeros((), dtype=torch.long)
        return *FLASH(q, k, v, **how(bias, causal, scale)), none, none

    def backward(grad, q, k, v, bias, out, lse, seed, offset, dropout, wanted, causal=False, *, scale=None):
        return *FLASH_BACKWARD(grad, q, k, v, out, lse, **how(bias, causal, scale)), None

    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_efficient_attention", forward, "CPU")
    library.impl("_scaled_dot_product_efficient_attention_backward", backward, "CPU")

    def scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None):
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        return efficient(q, k, v, attn_mask, True, dropout_p, is_causal, scale=scale)[0]

    scaled_dot_product_attention.kept = library  # one that is collected takes its kernels along
    F.scaled_dot_product_attention = scaled_dot_product_attention  # context_parallel replaces it in turn, by its name


def kernel_for_diffusers() -> None:
    """Those for the "native" backend, which refuses to return the log-sum-exp."""
    from diffusers.models import attention_dispatch

    def forward(ctx, q, k, v, mask, dropout, causal, scale, gqa, return_lse, _save_ctx, _parallel_config):
        if _save_ctx:
            ctx.save_for_backward(q, k, v)
            ctx.how = how(mask, causal, scale)
        out, lse = FLASH(*(x.transpose(1, 2) for x in (q, k, v)), **how(mask, causal, scale))
        return (out.transpose(1, 2), lse.transpose(1, 2)) if return_lse else out.transpose(1, 2)

    def backward(ctx, grad, *args, query, key, value, out, lse):
        moved = (x.transpose(1, 2) for x in (grad, query, key, value, out, lse))
        return tuple(x.transpose(1, 2) for x in FLASH_BACKWARD(*moved, **ctx.how))

    attention_dispatch._native_attention_forward_op = forward
    attention_dispatch._native_attention_backward_op = backward


def unequal_all_gather() -> None:
    """NCCL gathers parts of unequal sizes, by broadcasts; gloo does not, and the "anything" modes do."""

    def gather_by_broadcasts(parts: list[Tensor], local: Tensor, group: Any = None) -> None:
        for i, part in enumerate(parts):
            if i == dist.get_rank(group):
                part.copy_(local)
            dist.broadcast(part, group_src=i, group=group)

    dist.all_gather = gather_by_broadcasts


@dataclass
class Run:
    """A model as a method runs it on this rank. `whole` makes the whole output of what `model` returns."""

    model: Callable[[Inputs], Tensor]
    part: Callable[[Tensor], Tensor] = lambda weight: weight  # of a whole tensor, what belongs to the output here
    whole: Callable[[Tensor], Tensor] = lambda y: y
    inside: Callable[[Tensor, Inputs], Any] = lambda weight, inputs: nullcontext()


def call(model: nn.Module, inputs: Inputs) -> Tensor:
    return model(**inputs) if isinstance(model, Block) else model(**inputs, return_dict=False)[0]


def by_dsp(model: nn.Module, mesh: DeviceMesh, it: Circumstance, stages: Stages) -> Run:
    dsp.parallelize(model, mesh, stages)
    return Run(partial(call, model))


def by_diffusers(
    model: nn.Module, mesh: DeviceMesh, it: Circumstance, stages: Stages, *, ring: bool = False, anything: bool = False
) -> Run:
    """With the model's own `_cp_plan`; the block gets one as their documentation writes it, its mask split as LTX's."""
    import diffusers
    from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput

    if ring:
        kernel_for_diffusers()
    if anything:
        unequal_all_gather()
    torch.accelerator.device_count = lambda: 1  # it divides by the number of accelerators, and a CPU has 0
    kind = "ring" if ring else "ulysses"
    options = {f"{kind}_degree": mesh.size(), f"{kind}_anything": anything}
    config = diffusers.ContextParallelConfig(convert_to_fp32=False, **options)
    plan: dict[str, Any] | None = None
    if isinstance(model, Block):
        model = hosted(model)
        plan = {"": {"x": ContextParallelInput(split_dim=1, expected_dims=3)}}
        plan["end"] = ContextParallelOutput(gather_dim=1, expected_dims=3)
        if it.mask == "key" or it.cut:
            plan[""]["mask"] = ContextParallelInput(split_dim=1, expected_dims=4 if it.cut else 2)
    model.enable_parallelism(config=config, cp_plan=plan)
    return Run(partial(call, model))


def hosted(model: nn.Module) -> Any:
    """The block as a diffusers model: one that has `enable_parallelism`, and processors that it reaches."""
    from diffusers import ModelMixin
    from diffusers.models.attention import AttentionModuleMixin
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    class Processor:
        _attention_backend, _parallel_config = None, None

        def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
            return dispatch_attention_fn(q, k, v, mask, is_causal=causal, parallel_config=self._parallel_config)

    for layer in model.layers:
        layer.__class__ = type("HostedAttention", (Attention, AttentionModuleMixin), {})
        layer.processor = layer.attend = Processor()
    model.__class__ = type("HostedBlock", (Block, ModelMixin), {})
    model._parallel_config = None
    return model


def by_deepspeed(model: nn.Module, mesh: DeviceMesh, it: Circumstance, stages: Stages) -> Run:
    """As its tutorial does: positions are shared out by the caller, the local attention gets what it got before."""
    import deepspeed
    from deepspeed.sequence.layer import DistributedAttention
    from deepspeed.utils import groups

    deepspeed.init_distributed("gloo", verbose=False)
    groups.mpu = SimpleNamespace(get_sequence_parallel_rank=mesh.get_local_rank)  # asked for where heads are uneven
    for layer in model.layers:
        core = DistributedAttention(plain, mesh.get_group(), scatter_idx=2, gather_idx=1)
        layer.attend = lambda q, k, v, mask, causal, core=core: core(q, k, v, 0, None, mask, causal)

    def part(x: Tensor) -> Tensor:
        return x.tensor_split(mesh.size(), 1)[mesh.get_local_rank()]

    def run(inputs: Inputs) -> Tensor:
        return call(model, {k: part(v) if k == "x" or it.cut else v for k, v in inputs.items()})

    def whole(y: Tensor) -> Tensor:
        parts: list[Any] = [None] * mesh.size()
        dist.all_gather_object(parts, y.detach())
        return torch.cat(parts, 1)

    return Run(run, part, whole)


def by_torch(model: nn.Module, mesh: DeviceMesh, it: Circumstance, stages: Stages) -> Run:
    """As its tutorial does: forward and backward within the context, inputs and targets its buffers."""
    from torch.distributed.tensor.experimental import _attention, context_parallel

    _attention._cp_options.convert_to_f32 = False
    _attention._cp_options.enable_load_balance = it.causal  # "Load balancing requires `is_causal=True`"
    kernel_for_torch()

    def inside(weight: Tensor, inputs: Inputs) -> Any:
        dims = [1, 1, 2 if it.mask == "head" else 1][: 1 + len(inputs)]
        return context_parallel(mesh, buffers=[weight, *inputs.values()], buffer_seq_dims=dims)

    def whole(y: Tensor) -> Tensor:
        return _attention.context_parallel_unshard(mesh, [y.detach()], [1])[0]

    return Run(partial(call, model), whole=whole, inside=inside)


@dataclass(frozen=True)
class Method:
    run: Callable[..., Run]
    how: str
    package: str
    source: str  # where an error is its own
    gradients: str = "averaged"  # how its ranks' gradients are to be put together
    disclaims: str = ""  # what its documentation says that it does not do: uneven, heads, mask, gradients
    cuts: bool = False  # whether a mask per head, cut along heads, is of use to it
    models: bool = True  # not attention alone

    def disclaimed(self, it: Circumstance, gradients: bool) -> bool:
        odd = {"uneven": it.length % 2 or it.text % 2, "heads": it.heads % 2, "mask": it.mask}
        return any(gradients if what == "gradients" else odd[what] and not gradients for what in self.disclaims.split())


def diffusers_by(how: str, disclaims: str = "", cuts: bool = False, **kind: bool) -> Method:
    run = partial(by_diffusers, **kind)
    return Method(run, f"`ContextParallelConfig({how})`", "diffusers", "/diffusers/", "summed", disclaims, cuts)


DEEPSPEED, CONTEXT = "`DistributedAttention(attention, group)`", "`with context_parallel(mesh, buffers=...)`"
METHODS = {
    "dsp": Method(by_dsp, "`dsp.parallelize(model, mesh, stages)`", "dynamic-sequence-parallelism", "/dsp/"),
    "Ulysses": diffusers_by("ulysses_degree=N", "uneven heads", cuts=True),
    "Ulysses anything": diffusers_by("ulysses_degree=N, ulysses_anything=True", cuts=True, anything=True),
    "ring": diffusers_by("ring_degree=N", "uneven", ring=True),
    "ring anything": diffusers_by("ring_degree=N, ring_anything=True", "mask gradients", ring=True, anything=True),
    "DeepSpeed": Method(by_deepspeed, DEEPSPEED, "deepspeed", "/deepspeed/", cuts=True, models=False),
    "torch": Method(by_torch, CONTEXT, "torch", "/torch/distributed/tensor/", models=False),
}
