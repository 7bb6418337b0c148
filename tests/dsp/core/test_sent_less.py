"""Forwards whose plans once sent more than they need: the bytes and calls of each."""

from __future__ import annotations

import pytest

import dsp
from tools.fuzz.programs import build, float64, inputs_of, leaves_of

# what it shows: ranks, whether the output is gathered, bytes and calls of the forward, and the program
PLANS = {
    "an expanded tensor is gathered before its expansion": (2, True, 4 * 6 // 2 * 8, 1, """
b, t, s, c = 1, 3, 4, 6
stages = {"": "x=b t s c"}
def forward(self, x: (b, t, s, c)):
    return x.cumprod(1).amax(1).unsqueeze(0).expand(6, -1, -1, -1)
"""),
    "rows are repeated, and joined, once they are gathered": (3, True, 2 * 2 * 6 * 8, 1, """
b, t, s, c = 1, 3, 6, 6
stages = {"": "x=b t s c"}
def forward(self, x: (b, t, s, c)):
    y = x.cumprod(1).amax(1)
    return torch.cat([y.repeat(1, 2, 1), y.flip(1)], 1)
"""),
    "what shares memory with a tensor may move after the last write": (2, False, (7 * 4 + 6) * 8, 2, """
b, t, c = 1, 7, 8
stages = {"": "x=b t c", "whole": "b [t] [c]"}
whole = Attend(1)
def forward(self, x: (b, t, c)):
    y = torch.cat([x, torch.ones(1, 7, 4)], -1)
    z = y.clone()
    z.copy_(z)
    return self.whole(torch.empty_like(x).copy_((y.tanh() + y)[..., :8])), z.select(1, 5)
"""),
    "a tensor joined of equal pieces is a fold, which is returned as it is": (2, False, 7 * 4 * 8, 1, """
b, t, c = 1, 7, 8
stages = {"": "x=b t c", "whole": "b [t] [c]"}
whole = Attend(1)
def forward(self, x: (b, t, c)):
    y = torch.cat([x, x], -1)
    z = y.clone()
    z.copy_(z)
    return self.whole(torch.empty_like(x).copy_((y.tanh() + y)[..., :8])), z.select(1, 5)
"""),
    "a tensor that is written is moved before it is made": (4, False, 48, 1, """
b, s, c = 1, 4, 8
stages = {"": "x=b s c"}
p0 = param(c, c)
def forward(self, x: (b, s, c)):
    y = (x @ self.p0.T).clone()
    y[:, ::2] *= 0.5
    return y
"""),
    "heads that are the batch are, whichever operand brings them": (4, False, 400, 2, """
b, s, c = 2, 6, 8
stages = {"": "x=b s c"}
p0 = param(b*c, 2)
def forward(self, x: (b, s, c)):
    y = rearrange(x, "a0 a1 a2 -> a1 (a0 a2)")
    q = y.unflatten(-1, (2, -1)).transpose(-2, -3)
    m = (y @ self.p0).transpose(-1, -2).unsqueeze(-2)
    return F.scaled_dot_product_attention(q, q, q, attn_mask=m).transpose(-2, -3).flatten(-2)
"""),
}  # fmt: skip


@pytest.mark.parametrize("what", PLANS)
def test_bytes_and_calls_of_plans(what: str) -> None:
    n, gather, nbytes, calls, text = PLANS[what]
    with float64():
        model = build(text)
        inputs = inputs_of(model)
        model(**leaves_of(inputs))
        plan = dsp.plan(model, kwargs=leaves_of(inputs), size=n, stages=model.stages, gather_output=gather)
    assert (plan.bytes["forward"], plan.calls["forward"]) == (nbytes, calls)
