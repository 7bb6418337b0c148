"""Valid calls of the torch functions that have a rule, in all their forms, for the prover."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# fmt: off
Form = tuple[tuple[Any, ...], dict[str, Any]]


def x(*shape: int, grad: bool = True) -> Tensor:
    """Numbers between 0.1 and 0.9, where every function is defined and smooth."""
    count = max(torch.Size(shape).numel(), 1)
    t = 0.5 + 0.4 * torch.sin(torch.arange(count, dtype=torch.float64) * 1.7 + len(shape))
    return t[: torch.Size(shape).numel()].reshape(shape).requires_grad_(grad)


def form(*args: Any, **kwargs: Any) -> Form:
    return args, kwargs


def ints(*shape: int, high: int = 3) -> Tensor:
    return (torch.arange(torch.Size(shape).numel()) * 7 % high).reshape(shape)


def flags(*shape: int) -> Tensor:
    return ints(*shape, high=3) > 0


def definite(*batch: int) -> Tensor:
    """Positive definite matrices."""
    near = 0.2 * x(*batch, 3, 3, grad=False)
    return (near @ near.mT + torch.diag(torch.tensor([1.0, 2.0, 3.0]).double())).requires_grad_()


def logits(length: int) -> Tensor:
    """(4, length) logits near -900, whose exponential is 0; parts are masked, and of the last row everything."""
    low = x(4, length, grad=False) - 900
    low[0, :2] = low[1, 2:] = low[3] = -torch.inf
    return low.requires_grad_()


def weights(width: int) -> list[Tensor]:
    """The weights of a recurrence of width 2 in one direction, which reads 3 features."""
    return [x(width, 3), x(width, 2), x(width), x(width)]


A, B = (4, 6, 3), (2, 5, 4)  # even and uneven over 2 and 3 ranks; with 4 over 3 the last rank holds nothing
AUTOMATIC: list[Form] = [
    form(x(3, 4)),
    form(x(3, 4), x(3, 4)),
    form(x(3, 4), x(4)),
    form(x(3, 4), 0.7),
    form(x(3, 4), x(3, 1), x(3, 4)),
    form(x(3, 4), x(3, 4), x(3, 4), value=0.3),
    form(flags(3, 4), x(3, 4), x(3, 4)),
    form(x(3, 4), flags(3, 4), 0.1),
    form(ints(3, 4), ints(3, 4) + 1),
    form(ints(3, 4)),
    form(ints(3, 4), 2),
    form(ints(3, 4) + 1, 7),
    form(2, x(3, 4)),
    form(x(3, 4) + 2, 2),
    form(flags(3, 4), flags(3, 4)),
    form(x(3, 4), 0.2, 0.7),
    form(x(3, 4), 0.0, True),
    form(x(3, 4, grad=False), x(3, 4, grad=False)),
    form(torch.complex(x(3, 4), x(3, 4)).detach()),
]
NORMS = [form(x(*A), 1, 2.0), form(x(*A), 0, dim=-2)]
DIMS = [form(x(*A), dim=d) for d in (0, -2, 2)] + [form(x(*B), 1), form(x(*B), -1)]
REDUCED = [
    *DIMS, form(x(*A)), form(x(*A), dim=1, keepdim=True), form(x(*A), -1, True), form(x(*A), dim=(0, 2)),
    form(x(*A), (-1, 1), keepdim=True), form(x(*A), dim=[]), form(x(*A), axis=1), form(flags(*A), 1),
    form(x(*A), None), form(x(2, 1, 4), 1), form(x(1), 0), form(x(0, 4), 1), form(x(*A), x(4, 6, 1)),
]
STATISTICS = [
    *REDUCED, form(x(*A), 1, False), form(x(*A), 1, correction=0), form(x(*A), unbiased=False), form(x(*A), True),
    form(x(*A), (0, 1), dtype=torch.float64), form(x(*A), 0, False, True), form(x(*A), (0, 1), True, True),
]
RESHAPES = [
    (24, 3), (4, 18), (72,), (2, 2, 6, 3), (4, 2, 3, 3), (4, 3, 2, 3), (2, 12, 3), (8, 3, 3), (-1, 3), (4, -1),
    (6, 12),
    (4, 6, 3, 1), (1, 4, 6, 3), (12, 6),
]
POOLED = [form(x(4, 2, 6), 2), form(x(3, 6), 2), form(x(4, 2, 6, 6), 2), form(x(2, 4, 4, 4), 2)]
POOLED += [form(x(2, 2, 4, 4, 4), 2), form(x(4, 2, 6), kernel_size=2, stride=1)]
POOLED += [form(x(1, 2, *[7] * d), 3, 2, 1) for d in (1, 2, 3)] + [form(x(1, 2, 7), 3, 1, 1, ceil_mode=True)]
LOSSES = [form(x(*A), x(*A, grad=False), reduction=r) for r in ("mean", "sum", "none")]
LOSSES += [form(x(*A), x(*A, grad=False)), form(x(*A), x(*A, grad=False), None, None, "mean")]
EDGES = torch.tensor([0.15, 0.3, 0.5, 0.55, 0.8]).double()  # sorted
PERMUTES = [form(x(*A), (2, 0, 1)), form(x(*A), (-1, 0, -2)), form(x(*A), dims=(1, 2, 0)), form(x(*A), 1, 0, 2)]
SWAPS = [form(x(*A), 0, 1), form(x(*A), -1, 0), form(x(*A), dim0=1, dim1=-1), form(x(*A), axis0=0, axis1=2)]
MOVES = [form(x(*A), 0, -1), form(x(*A), (0, 1), (2, 0)), form(x(*A), source=-1, destination=1)]
SIZES: list[tuple[int, ...]] = [(4, 6, 3), (2, 4, 6, 3), (-1, -1, 3), (2, -1, -1, -1)]
PRODUCTS = [
    form(x(*A), x(4, 3, 2)), form(x(4, 3), x(3, 5)), form(x(2, 4, 6, 3), x(4, 3, 2)), form(x(4, 3), x(2, 3, 5)),
    form(x(1, 4, 3), x(2, 3, 5)), form(x(4, 3), x(3)), form(x(3), x(3, 4)), form(x(3, 0), x(0, 2)), form(x(3), x(3)),
]
Q, K, V = (2, 4, 6, 5), (2, 4, 3, 5), (2, 4, 3, 2)
MASKS: list[tuple[int, ...]] = [
    (6, 3), (1, 3), (4, 6, 3), (4, 1, 3), (1, 6, 3), (2, 4, 6, 3), (2, 1, 6, 3), (2, 1, 1, 3), (2, 4, 1, 3),
    (1, 4, 1, 3),
    (1, 4, 6, 3), (1, 1, 1, 3), (2, 4, 6, 1), (1, 1, 6, 1),
]
ATTENTION = [form(x(*Q), x(*K), x(*V), x(*m)) for m in MASKS]
ATTENTION += [form(query=x(*Q), key=x(*K), value=x(*V), attn_mask=flags(*m)) for m in MASKS[:4]]
ATTENTION += [
    form(x(*Q), x(*K), x(*V)), form(x(*Q), x(2, 4, 6, 5), x(2, 4, 6, 2), is_causal=True),
    form(x(6, 5), x(3, 5), x(3, 2)),
    form(x(*Q), x(2, 2, 3, 5), x(2, 2, 3, 2), enable_gqa=True),
    form(x(4, 6, 5), x(4, 3, 5), x(4, 3, 2), x(6, 3), 0.0, False),
    form(x(*Q), x(1, 4, 3, 5), x(1, 4, 3, 2)), form(x(1, 4, 1, 5), x(*K), x(*V), flags(2, 1, 1, 3)),
    form(x(*Q), x(*K), x(*V), x(6, 3), scale=0.3),
    form(x(*Q), x(2, 2, 3, 5), x(2, 2, 3, 2), flags(2, 4, 6, 3), enable_gqa=True),
    form(x(2, 6, 4, 3), x(2, 3, 5, 3), x(2, 3, 5, 3), attn_mask=x(6, 4, 5), enable_gqa=True),
    form(x(6, 4, 3), x(1, 5, 3), x(1, 5, 3), x(1, 4, 5), is_causal=False, enable_gqa=True),
    form(x(2, 4, 5, 3), x(2, 2, 5, 3), x(2, 2, 5, 3), is_causal=True, enable_gqa=True),
    form(x(2, 8, 4, 3), x(2, 4, 3, 3), x(2, 4, 3, 3), None, 0.0, False, enable_gqa=True),
    *(form(x(2, n, 3), x(2, n, 3), x(2, n, 3), None, 0.0, True, scale=0.3) for n in (0, 1, 2, 7, 13)),
    form(x(2, 4, 5, 3), x(2, 4, 6, 3), x(2, 4, 6, 3), is_causal=True),
]
INDICES: list[Any] = [
    0, -1, (slice(None), 2), (Ellipsis, 1), (slice(None), slice(1, 4)), (slice(None), slice(0, 6), slice(0, 3)), None,
    (slice(None), None, 1), (Ellipsis, None), (slice(0, 4), Ellipsis, slice(None, None, 2)),
    [0, 2], (slice(None), [0, 1, 5]),
    (slice(None), torch.tensor([2, 0])), (slice(None), slice(None), torch.tensor([2, 0])), (1, slice(None), 2),
    (0, None, slice(1, 3)),
    (1, [0, 1]), (flags(4, 6, 3),), (flags(4),), ([0, 1], [1, 2]), (slice(None), torch.tensor([[0, 1],
    [2, 3]])), slice(0, 0),
    (slice(None), slice(0, 0)), (Ellipsis, slice(0, 0)), (torch.tensor(1),), (slice(None), torch.tensor(2)), (), True,
    (0, 1, 2), (slice(None, None, 1), slice(-6, None)), (Ellipsis, -1, slice(None)), (slice(-2, None),),
    ([0, 1], slice(None), [2, 0]), (torch.tensor([3, 1]), [5, 0]), (1, slice(None), [2, 0]),
    (slice(None), [0, 1, 2, 3, 4, 5, 0]), ([3, 2, 1, 0, 1, 2, 3], slice(None), [0, 1, 2, 0, 1, 2, 0]),
]
VALUES: list[Any] = [0.5, x(3), x(6, 3), x(1, 6, 1)]
EQUATIONS: list[tuple[str, list[tuple[int, ...]]]] = [
    ("bij,bjk->bik", [(4, 6, 3), (4, 3, 2)]), ("bij->bji", [A]), ("bij->b", [A]), ("bij,bij->bij", [A, A]),
    ("...ij,jk->...ik", [A, (3, 2)]),
    ("bij,b->bij", [A, (4,)]), ("bii->bi", [(4, 3, 3)]), ("ikc,jkc->ijc", [(4, 6, 3), (5, 6, 3)]), ("i,j->ij",
    [(4,), (6,)]), ("bij,bij", [A, A]),
    ("bid,bjd->bij", [(1, 1, 3), (1, 1, 3)]),
    ("bij,1jk->bik", [(4, 6, 3), (1, 3, 2)]), ("bi,bi,bi->b", [(4, 3)] * 3),
]


def reshapes(name: str) -> list[Form]:
    forms = []
    for new in RESHAPES:
        forms += [form(x(*A), new), form(x(*A), *new)]
    return [*forms, form(x(*A), shape=(24, 3)), form(x(5, 2, 3), (10, 3)), form(x(0, 4), (2, 0, 2)),
    form(x(1, 6), (6,)),
            form(x(2, 3), torch.int64)]


def each(names: str, forms: list[Form]) -> dict[str, list[Form]]:
    return dict.fromkeys(names.split(), forms)


FORMS: dict[str, list[Form]] = {
    **each("to type_as type", [
        form(x(*A), torch.float32), form(x(*A), dtype=torch.float32), form(x(*A), x(2).detach().float()), form(x(*A)),
        form(x(*A), "cpu"), form(x(*A), other=x(2).detach().float()),
    ]),
    **each("feature_dropout feature_alpha_dropout dropout1d dropout2d dropout3d", [
        form(x(*A), 0.0, False), form(x(2, 4, 3, 3), p=0.0, training=True),
            form(x(2, 4, 3, 3, 2), p=0.0, training=False),
        form(x(*A), p=0.0, training=True), form(x(*A), 0.0, True),
    ]),
    **each("mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy_with_logits binary_cross_entropy",
        LOSSES),
    **each("view reshape", reshapes("reshape")),
    **each("view_as reshape_as", [form(x(*A), x(24, 3)), form(x(*A), x(4, 2, 9)), form(x(*A), other=x(24, 3))]),
    "flatten": [form(x(*A)), form(x(*A), 1), form(x(*A), 0, 1), form(x(*A), start_dim=-2),
        form(x(*A), -3, end_dim=-2), form(x(5, 2), 0)],
    "ravel": [form(x(*A)), form(x(5, 2))],
    "unflatten": [form(x(*A), 1, (2, 3)), form(x(*A), 1, (3, -1)), form(x(*A), dim=-2, sizes=(-1, 2)),
        form(x(*A), 0, (1, 4))],
    "unsqueeze": [form(x(*A), 0), form(x(*A), -1), form(x(*A), dim=1), form(x(*A), -4)],
    "squeeze": [form(x(4, 1, 3)), form(x(4, 1, 3), 1), form(x(1, 4, 1), dim=-1), form(x(1, 4, 1), (0, 2)),
        form(x(4, 3), 0), form(x(1, 1))],
    "permute": PERMUTES,
    **each("transpose swapaxes swapdims", SWAPS),
    **each("t T mT H mH adjoint", [form(x(4, 3)), form(x(*A)), form(x(5))]),
    **each("movedim moveaxis", MOVES),
    **each("expand broadcast_to", [
        *(form(x(*A), s) for s in SIZES), form(x(*A), 2, -1, -1, -1), form(x(4, 1, 3), (4, 6, 3)),
            form(x(4, 1, 3), size=(2, 4, 6, 3)),
        form(x(1, 3), (5, -1)), form(x(3), 4, 3),
    ]),
    "expand_as": [form(x(4, 1, 3), x(*A)), form(x(3), x(4, 3)), form(x(4, 1), other=x(4, 5))],
    **each("repeat tile", [
        form(x(*A), 2, 1, 1), form(x(*A), (1, 2, 1)), form(x(*A), (2, 1, 1, 1)), form(x(4, 1, 3), (1, 6, 1)),
            form(x(*A), (2, 2, 2)),
        form(x(*A), repeats=(1, 1, 2)), form(x(*A), dims=(2,)), form(x(*A), (0, 1, 1)),
    ]),
    "repeat_interleave": [form(x(*A), 2, 1), form(x(*A), 3, dim=0), form(x(*A), repeats=2, dim=-1),
        form(x(*A), 2), form(x(*A), torch.tensor([1, 2, 3]), 2),
                          form(x(5), 2), form(x(*A), 2, 1, output_size=12)],
    **each("cumsum cumprod logcumsumexp glu", [*DIMS, form(x(4, 6), -1),
        form(x(4, 6), dim=1), form(x(*A))]),
    **each("softmax log_softmax softmin", [*DIMS, form(x(4, 6), -1), form(x(4, 6), dim=1), form(x(*A)),
        form(logits(6), -1), form(logits(4), -1), form(logits(6), 0), form(-logits(4), 1)]),
    "normalize": [form(x(*A)), form(x(*A), dim=-1), form(x(*A), 2.0, 0), form(x(*A), p=1.0, dim=1)],
    "flip": [form(x(*A), 1), form(x(*A), (0, 2)), form(x(*A), dims=(-1,)), form(x(*A), 0, 1), form(x(*A), [1])],
    "roll": [form(x(*A), 1, 1), form(x(*A), (1, 2), (0, 2)), form(x(*A), shifts=2, dims=-1), form(x(*A), 1),
        form(x(*A), -1, 0)],
    **each("sort argsort", [form(x(*A)), form(x(*A), 1), form(x(*A), dim=0, descending=True),
        form(x(*A), -2, True), form(x(*A), stable=True, dim=1)]),
    "topk": [form(x(*A), 2), form(x(*A), 2, 1), form(x(*A), k=2, dim=0), form(x(*A), 2, -1, False)],
    **each("sum mean amax amin max min argmax argmin any all prod logsumexp var std nansum nanmean median", STATISTICS),
    "std": [*STATISTICS, form(torch.full(A, 0.5).double().requires_grad_(), 1)],  # no gradient where it is nought
    **each("count_nonzero std_mean var_mean", STATISTICS),
    **each("norm vector_norm", [
        form(x(*A), dim=1), form(x(*A), 2, 1), form(x(*A), 2, (0, 2)), form(x(*A), 2.0, -1, True), form(x(*A)),
            form(x(*A), ord=1, dim=0), form(x(*A), p=1, dim=0),
        form(x(*A), dim=(1, 2)), form(x(*A), "fro", (1, 2)),
    ]),
    **each("layer_norm rms_norm", [
        form(x(*A), (3,)), form(x(*A), [6, 3]), form(x(*A), normalized_shape=(3,), weight=x(3)), form(x(*A),
            (3,), x(3)), form(x(*A), (4, 6, 3)),
        form(x(*A), (3,), x(3), x(3), 1e-5),
    ]),
    **each("tril triu", [form(x(*A)), form(x(*A), 1), form(x(2, 4, 6, 3), diagonal=-1), form(x(4, 3))]),
    "gather": [form(x(*A), 1, ints(4, 2, 3)), form(x(*A), -1, ints(4, 6, 5)),
        form(x(*A), dim=0, index=ints(1, 6, 3)), form(x(*A), 1, ints(2, 6, 3)), form(x(*A), 2, ints(4, 6, 2))],
    **each("index_add index_copy", [form(x(*A), 1, torch.tensor([2, 0, 5]), x(4, 3, 3)), form(x(*A), dim=-1,
        index=torch.tensor([1]), source=x(4, 6, 1)), form(x(4, 6), 0, torch.tensor([3, 1]), x(2, 6))]),
    **each("scatter scatter_add", [form(x(*A), 1, ints(4, 2, 3), x(4, 2, 3)), form(x(*A), -1, ints(4, 6, 2), 0.3),
        form(x(*A), dim=0, index=ints(4, 2, 3), src=x(4, 6, 3)), form(x(4, 6), 0, ints(2, 6), x(2, 6))]),
    "index_reduce": [form(x(*A), 1, torch.tensor([2, 0, 5]), x(4, 3, 3), "mean"), form(x(4, 6), dim=0,
        index=torch.tensor([3, 1]), source=x(2, 6), reduce="amax", include_self=False)],
    "scatter_reduce": [form(x(*A), 1, ints(4, 2, 3), x(4, 2, 3), "sum"), form(x(*A), -1, ints(4, 6, 2), x(4, 6, 2),
        "mean"), form(x(4, 6), dim=0, index=ints(2, 6), src=x(2, 6), reduce="amax", include_self=False)],
    "take_along_dim": [form(x(*A), ints(4, 2, 3), 1), form(x(*A), ints(4, 1, 1), dim=-1),
        form(x(*A), indices=ints(1, 6, 3), dim=0), form(x(*A), ints(5)), form(x(4, 1, 3), ints(4, 6, 2), 2)],
    "view_as_real": [form(torch.complex(x(*A), x(*A)).detach().requires_grad_())],
    "view_as_complex": [form(x(4, 3, 2)), form(x(2))],
    "group_norm": [form(x(4, 6, 3), 2), form(x(4, 6, 3), 2, x(6), x(6)), form(x(3, 4), num_groups=2)],
    "instance_norm": [form(x(4, 6, 3)), form(x(4, 6, 3), x(6), x(6), None, None, True, 0.1, 1e-5, False),
        form(x(4, 6, 3), use_input_stats=True)],
    **{f"conv{d}d": [
        form(x(4, 2, *[5] * d), x(3, 2, *[3] * d)), form(x(4, 2, *[5] * d), x(3, 2, *[3] * d), x(3), padding=1),
            form(x(2, *[5] * d), x(3, 2, *[3] * d)),
        form(x(4, 2, *[5] * d), weight=x(4, 1, *[1] * d), groups=2),
        form(x(2, 2, *[9] * d), x(2, 2, *[3] * d), x(2), 2, 1), form(x(1, 2, *[7] * d), x(2, 2, *[3] * d), dilation=2),
        form(x(1, 2, *[7] * d), x(2, 2, *[4] * d), None, 1, "same"), form(x(1, 2, *[3] * d), x(2, 2, *[3] * d)),
        form(x(1, 2, *[4] * d), x(2, 2, *[2] * d), stride=2), form(x(1, 2, *[2] * d), x(2, 2, *[5] * d), padding=4),
    ] for d in (1, 2, 3)},
    **{f"conv_transpose{d}d": [form(x(4, 2, *[3] * d), x(2, 3, *[2] * d)),
        form(x(2, *[3] * d), x(2, 3, *[2] * d), x(3)),
        form(x(1, 2, *[4] * d), x(2, 1, *[3] * d), x(1), 2, 1, 1), form(x(1, 2, *[5] * d), x(2, 2, *[4] * d), stride=2),
        form(x(1, 2, *[3] * d), x(2, 2, *[1] * d), stride=3), form(x(1, 2, *[4] * d), x(2, 1, *[3] * d), dilation=2),
        form(x(1, 2, *[4] * d), x(2, 1, *[3] * d), None, 1, 2, groups=2)] for d in (1, 2, 3)},
    "interpolate": [form(x(4, 2, 6), scale_factor=2.0), form(x(4, 2, 6, 6), size=3),
        form(x(4, 2, 6, 6), None, 2.0, "bilinear"), form(x(1, 2, 5, 4), size=(10, 12), mode="nearest-exact"),
        form(x(1, 2, 5), scale_factor=3, mode="linear"), form(x(1, 1, 2, 3, 4), None, 2, "trilinear"),
        form(x(1, 2, 4, 4), None, 2.0, "bilinear", True), form(x(1, 2, 5), 5)],
    **{f"{kind}_pool{d}d": POOLED for kind in ("avg", "max") for d in (1, 2, 3)},
    **{f"adaptive_avg_pool{d}d": [form(x(4, 2, *[6] * d), 2), form(x(4, *[6] * d), output_size=3)]
        for d in (1, 2, 3)},
    "pixel_shuffle": [form(x(4, 4, 2, 3), 2), form(x(4, 2, 3), 2), form(x(2, 3, 4, 2, 3), 2), form(x(1, 9, 5, 4), 3),
        form(x(2, 3, 5, 4), 1)],
    "pixel_unshuffle": [form(x(4, 1, 4, 6), 2), form(x(1, 4, 6), downscale_factor=2), form(x(2, 3, 1, 4, 6), 2),
        form(x(1, 1, 15, 6), 3), form(x(2, 3, 5, 4), 1)],
    "index_put": [form(x(4, 6, 3), (torch.tensor([0, 2]), torch.tensor([5, 1])), x(2, 3)),
        form(x(4, 6, 3), (torch.tensor([[0, 2], [1, 3]]),), x(6, 1)), form(x(4, 6, 3), [torch.tensor([3, 1])], x(3),
        accumulate=True), form(x(4, 6, 3), (flags(4, 6),), x(3)), form(x(4, 6, 3), (flags(4),), x(6, 1))],
    "solve": [form(definite(4), x(4, 5)), form(definite(2, 3), x(2, 3, 4)), form(definite(3), x(5, 3, 2)),
        form(definite(3), x(2, 3), left=False), form(definite(2, 3), x(2, 3))],
    "solve_triangular": [form(definite(4), x(4, 5), upper=False), form(definite(2, 3), x(3, 4), upper=True),
        form(definite(3), x(2, 3), upper=True, left=False)],
    "unfold": [form(x(*A), 1, 4, 3), form(x(9, 2), 0, 3, 5), form(x(*A), 1, 2, 1),
        form(x(*A), dimension=0, size=2, step=2), form(x(*A), -1, 3, 1)],
    "im2col": [form(x(4, 2, 4, 6), 2), form(x(4, 2, 4, 6), (2, 2), stride=2), form(x(2, 4, 6), 2),
        form(x(4, 2, 4, 6), 2, 1, 0), form(input=x(4, 2, 4, 6), kernel_size=2)],
    "fold": [form(x(4, 8, 6), (4, 3), 2), form(x(8, 6), output_size=(4, 3), kernel_size=2), form(x(4, 8, 6),
        (4, 3), (2, 2))],
    **each("fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft", [form(x(*A)), form(x(*A), 4, 0),
        form(x(*B), dim=1), form(x(*A), n=8, dim=1, norm="ortho"), form(input=x(*A), dim=-3)]),
    **each("fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2", [form(x(*A)), form(x(*A), (4, 2), (0, 1)),
        form(x(*A), dim=(1, 0))]),
    **each("fft_fftn fft_ifftn fft_rfftn fft_irfftn", [form(x(*A)), form(x(*A), (2, 3)), form(x(*A), dim=(0,)),
        form(x(*A), None, (0, -1), "forward")]),
    **each("fft_fftshift fft_ifftshift", [form(x(*A)), form(x(*A), 1), form(x(*A), dim=(0, 2))]),
    "lstm": [form(x(5, b, 3), (x(1, b, 2), x(1, b, 2)), weights(8), True, 1, 0.0, True, False, False) for b in (4, 6)]
        + [form(x(4, 6, 3), [x(1, 4, 2), x(1, 4, 2)], weights(8), True, 1, 0.0, True, False, True)],
    "gru": [form(x(5, b, 3), x(1, b, 2), weights(6), True, 1, 0.0, False, False, False) for b in (4, 6)],
    **each("rnn_tanh rnn_relu", [form(x(5, 4, 3), x(2, 4, 2), [*weights(2), *weights(2)], True, 1, 0.0, True, True,
        False)]),
    "batch_norm": [form(x(4, 6, 3), torch.zeros(6).double(), torch.ones(6).double()),
        form(x(4, 6, 3), torch.zeros(6).double(), torch.ones(6).double(), x(6), x(6), True),
                   form(x(4, 6, 3), None, None, training=True),
                       form(x(4, 6, 3), x(6), x(6), torch.zeros(6).double(), torch.ones(6).double(), False, 0.1,
                       1e-5, False)],
    "linear": [form(x(*A), x(2, 3)), form(x(*A), x(2, 3), x(2)), form(x(4, 3), weight=x(2, 3), bias=x(2)),
        form(x(3), x(2, 3)), form(input=x(*A), weight=x(2, 3))],
    **each("matmul bmm mm rmatmul", [*PRODUCTS, form(x(4, 3), other=x(3, 5)), form(x(4, 3), mat2=x(3, 5))]),
    "einsum": [form(e, *(x(*s) for s in shapes)) for e, shapes in EQUATIONS] + [form(e, [x(*s)
        for s in shapes]) for e, shapes in EQUATIONS[:3]],
    "cdist": [form(x(*A), x(4, 5, 3)), form(x(6, 2), x(4, 2), 1.0), form(x(2, 6, 3), x(4, 3), p=2.0),
        form(x(26, 2), x(1, 3, 2))],  # none is nought: by products that is rounding alone
    "pairwise_distance": [
        form(x(*A), x(6, 3)), form(x(*B), x(2, 1, 4), 1.0), form(x1=x(*A), x2=x(*A) + 1, p=3.0, keepdim=True),
        form(x(4, 6), x(6), eps=0.1, keepdim=True), form(x(0, 3), x(0, 3)), form(x(3), x(3))],
    "cross": [form(x(*A), x(*A), dim=-1), form(x(*A), x(6, 3), dim=2), form(x(4, 3, 2), x(4, 3, 2), dim=1)],
    **each("inv inverse pinv det logdet slogdet matrix_exp cholesky qr svd svdvals eigh eigvalsh",
        [form(definite(4)), form(definite(2, 3))]),
    "grid_sample": [form(x(2, 4, 5, 6), x(2, 3, 4, 2), align_corners=False), form(x(4, 1, 3, 2, 2), x(4, 2, 2, 2, 3),
        "nearest", "border", True)],
    "scaled_dot_product_attention": ATTENTION,
    "embedding": [form(ints(4, 6), x(3, 5)), form(input=ints(4, 6), weight=x(3, 5)), form(ints(5), x(3, 2)),
        form(x(3, 5), ints(4, 6)), form(ints(4, 6), x(3, 5), 0)],
    "one_hot": [form(ints(4, 6), 3), form(ints(4, 6), num_classes=5), form(ints(4, 6))],
    **each("cat concat concatenate", [
        form([x(*A), x(*A)], 1), form((x(*A), x(4, 2, 3)), dim=-2), form([x(*A), x(*A)]),
            form(tensors=[x(*A), x(*A)], dim=2), form([x(*A), x(4, 6, 0)], -1),
        form([x(*A), x(0)], 1), form([x(0), x(*A)], -2), form([x(*A), x(*A)], axis=1),
    ]),
    "stack": [form([x(*A), x(*A)], 1), form((x(*A), x(*A)), dim=-1), form([x(*A), x(*A)]),
        form(tensors=[x(4), x(4)], dim=1), form([x(*A), x(*A)], -4)],
    **each("chunk split tensor_split unsafe_chunk unsafe_split", [
        form(x(*A), 2, 1), form(x(*A), 2, dim=-1), form(x(*A), 3), form(x(*A), [2, 4], 1), form(x(*A),
            (1, 3), dim=1), form(x(*A), 5, -2),
    ]),
    "split_with_sizes": [form(x(*A), [2, 4], 1), form(x(*A), (1, 3)), form(x(*A), split_sizes=[1, 2], dim=-1)],
    "narrow": [form(x(*A), 1, 2, 3), form(x(*A), dim=-1, start=0, length=2), form(x(*A), 0, 0, 4),
        form(x(*A), 1, -2, 2)],
    "index_select": [form(x(*A), 1, torch.tensor([0, 5])), form(x(*A), dim=-1, index=torch.tensor([2]))],
    "unbind": [form(x(*A)), form(x(*A), 1), form(x(*A), dim=-1)],
    "bucketize": [form(x(*A), EDGES), form(x(*A), EDGES, right=True), form(ints(4, 6), torch.tensor([0, 1])),
        form(input=x(*B), boundaries=EDGES, out_int32=True), form(x(4), EDGES[:0]), form(x(0, 3), EDGES)],
    "searchsorted": [form(EDGES, x(*A)), form(EDGES, x(*B), side="right"), form(EDGES.expand(4, 6, 5).contiguous(),
        x(*A)), form(EDGES.expand(5, 5).contiguous(), input=x(5, 1), right=True), form(EDGES, x(7),
        sorter=torch.arange(5)), form(EDGES.expand(4, 5), x(4, 2), sorter=ints(4, 5, high=5).sort().values),
        form(EDGES, 0.4)],
    "iter": [form(x(*A))],
    "select": [form(x(*A), 1, 2), form(x(*A), 0, -1), form(x(*A), dim=-1, index=0), form(x(*A), 2, 2)],
    "getitem": [form(x(*A), i) for i in INDICES] + [form(x(5), ints(4, high=5)), form(x(5, 2), ints(4, 3, high=5))],
    "setitem": [form(x(*A), i, v) for i in INDICES for v in VALUES] + [form(x(*A), (Ellipsis, 2), x(4, 1)),
        form(x(*A), (slice(None), slice(1, None, 2)), x(4, 3, 3)),
        form(x(*A), (slice(1, None), slice(1, None)), x(5, 1)),
        form(x(*A), (slice(None), None, 2), x(1, 3)), form(x(*A), (slice(None), slice(-1, None)), x(4, 1, 3))],
    "pad": [form(x(*A), (1, 1)), form(x(*A), (0, 0, 2, 1)), form(x(*A), [0, 0, 0, 0, 1, 0], "constant", 0.5),
        form(x(*A), pad=(1, -1), mode="constant"), form(x(*A), (1, 1), mode="reflect"),
            form(x(*A), (0, 0, 0, 1)), form(x(*A), (2, 0), "replicate"), form(x(1, 2, 3, 5), (0, 0, 9, 4), "replicate"),
            form(x(9, 2), (0, 0, 3, 2), "reflect"), form(x(1, 2, 3, 5), (1, 2, 2, 2), "reflect"),
            form(x(*A), (0, 0, -1, 3), value=2.0), form(x(*A), (0, 0, 4, -5)), form(x(*A), (0, 0, -4, 0))],
}
