"""Kernels that only a GPU can run, against the same on the CPU."""

import pytest
import torch

from dsp.glue.rules.attention import last_rows
from tests.support.embedded import two_blocks
from tests.support.scans import KINDS, arguments, run
from zoo.scan import cuda_kernel, recurrence, scan

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
        given = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
        out = zoo.attention.attend(*given, mask)
        return out, *torch.autograd.grad(out.float().square().sum(), given)

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


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-3), (torch.bfloat16, 5e-2)])  # TF32, bfloat16
@pytest.mark.parametrize("kind", KINDS)
def test_scan_kernels_agree(kind, dtype, tolerance):
    pytest.importorskip("fla.ops.simple_gla")
    args = arguments(kind, 100, 1, torch.float32, heads=4, channels=64, values=64)
    args = [x if x is None else x.to("cuda", dtype if i < 3 else torch.float32) for i, x in enumerate(args)]
    assert (cuda_kernel(args[2], *args[3:]) is None) == (kind == "states")
    theirs = run(recurrence, [x if x is None else x.double() for x in args])
    for i, (a, b) in enumerate(zip(run(scan, args), theirs, strict=True)):
        assert (a - b).abs().max() < tolerance * b.abs().max(), i


def test_scan_of_more_sequences_than_a_grid_has_rows():
    pytest.importorskip("fla.ops.simple_gla")
    args = [x if x is None else x.cuda() for x in arguments("scalar", 3, 1, torch.float32, batch=20000, values=16)]
    y = scan(*args)
    torch.testing.assert_close(y[-5:], recurrence(*(x if x is None else x[-5:] for x in args)), rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-3), (torch.bfloat16, 3e-2)]
)
def test_blocks_of_ring_attention_agree(dtype, tolerance, causal):
    """The kernels that give a log-sum-exp, merged over two blocks, and their backward."""
    two_blocks("cuda", dtype, tolerance, causal)


@pytest.mark.parametrize(("rows", "places"), [(24, 40), (1, 40), (40, 40)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 3e-2)])
def test_causal_attention_of_the_last_queries_agrees(dtype, tolerance, rows, places):
    """Kernels with and without a mask in memory, against float64: outputs and gradients, of heads that share keys."""
    torch.manual_seed(0)
    given = [torch.randn(2, heads, n, 16, device="cuda") for heads, n in ((4, rows), (2, places), (2, places))]

    def step(attend, kind, **options):
        leaves = [x.to(kind).requires_grad_() for x in given]
        out = attend(*leaves, enable_gqa=True, **options)
        return out, *torch.autograd.grad(out.double().square().sum(), leaves)

    seen = torch.ones(rows, places, dtype=torch.bool, device="cuda").tril(places - rows)
    exact = step(torch.nn.functional.scaled_dot_product_attention, torch.float64, attn_mask=seen)
    for ours, wanted in zip(step(last_rows, dtype), exact):
        assert (ours.double() - wanted).norm() < tolerance * wanted.norm()
