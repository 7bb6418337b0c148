"""What only a GPU can run, against the same on the CPU."""

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_kernels_agree(monkeypatch, kv_heads, dtype):
    """flash-attn, PyTorch's kernels with groups and with a mask, and float64: outputs and gradients."""
    import zoo.attention

    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 65, heads, 64, device="cuda", dtype=dtype) for heads in (4, kv_heads, kv_heads))
    everything = torch.ones(2, 65, dtype=torch.bool, device="cuda")

    def run(dtype=dtype, mask=None):
        given = [x.to(dtype).requires_grad_() for x in (q.detach(), k.detach(), v.detach())]
        out = zoo.attention.attend(*given, mask)
        return out, *torch.autograd.grad(out.float().square().mean(), given)

    exact = run(torch.float64)
    found = {"masked": run(mask=everything)}
    if zoo.attention.flash_attn_func is not None:
        found["flash-attn"] = run()
        monkeypatch.setattr(zoo.attention, "flash_attn_func", None)
    found["sdpa"] = run()
    for kernel, results in found.items():
        for ours, wanted in zip(results, exact):
            error = ((ours.double() - wanted).norm() / wanted.norm()).item()
            assert error < 0.02, (kernel, error)
