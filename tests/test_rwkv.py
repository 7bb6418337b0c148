"""RWKV-6's time and channel mix against flash-linear-attention's layers, with the recurrence that it defines."""

import warnings

import pytest
import torch
from torch import nn

DTYPES = [(torch.float64, 1e-10), (torch.float32, 1e-5)]
precisions = pytest.mark.parametrize(("dtype", "tolerance"), DTYPES, ids=["float64", "float32"])


@pytest.fixture
def layers(monkeypatch):
    """The layers' modules (they need triton to be imported), their kernels replaced by definitions: no GPU is needed."""
    pytest.importorskip("triton")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        time = pytest.importorskip("fla.layers.rwkv6")
        channel = pytest.importorskip("fla.models.rwkv6.modeling_rwkv6")
        from fla.modules.token_shift import token_shift_ref
        from fla.ops.rwkv6.recurrent_naive import naive_recurrent_rwkv6

    def recurrent(r, k, v, w, u, scale, **_):
        y, state = naive_recurrent_rwkv6(*(x.transpose(1, 2) for x in (r, k, v, w)), u, scale=scale)
        return y.transpose(1, 2), state

    monkeypatch.setattr(time, "fused_recurrent_rwkv6", recurrent)
    for module in (time, channel):
        monkeypatch.setattr(module, "token_shift", token_shift_ref)
    monkeypatch.setattr(time, "GroupNorm", GroupNorm)
    return time, channel


class GroupNorm(nn.GroupNorm):
    """PyTorch's, of the last dim."""

    def __init__(self, groups, channels, elementwise_affine, bias, eps):
        super().__init__(groups, channels, eps=eps)

    def forward(self, x):
        return super().forward(x.flatten(0, -2)).view_as(x)
