"""Random models on 2, 3 and 4 ranks (`random_models.py` runs thousands), and the programs that once went wrong."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.support.slow import long, slow, slow_but
from tools.fuzz.models import Judge, refusal, shrunk
from tools.fuzz.programs import generate

SEEDS = {2: range(40), 3: range(130, 142), 4: range(175, 183)}  # 60 programs, more of them where they are cheaper

# seed -> the kind of its failure: it must fail so until it is mended, and be taken off this list then
KNOWN: dict[int, str] = {}


@pytest.mark.parametrize("n", [slow(2), 3, 4])
def test_random_models(ranks, n: int) -> None:
    """The very first goes through `dsp.check` too, which costs as much as ten do."""
    seeds = SEEDS[n]
    texts = [generate(s) for s in seeds]
    verdicts = dict(zip(seeds, Judge(ranks)(texts, n, [s == 0 for s in seeds])))
    for text, (seed, v) in zip(texts, verdicts.items()):
        expected = (v.kind if v.failed else None) == KNOWN.get(seed)
        assert expected, f"program {seed} on {n} ranks: {v.kind} {v.reason}, listed: {KNOWN.get(seed)}\n{text}"
    refused = Counter(refusal(v.reason) for v in verdicts.values() if v.kind == "refused")
    assert refused.total() < 0.15 * len(seeds), refused
    shares = [v.share for v in verdicts.values() if v.shards]  # glue that no dim gets through runs whole, for nothing
    assert sum(share >= 1 for share in shares) <= 1 + len(shares) / 3, sorted(shares)


@pytest.mark.parametrize("n", [long(2), slow(4)])
def test_forwards_that_leave_their_plan_where_ranks_have_nothing(ranks, n: int) -> None:
    """They go another way on a later call: no rank may see by its part what the others do not."""
    seeds = range(19, 23)
    texts = [generate(s, strays=True) for s in seeds]
    for text, seed, v in zip(texts, seeds, Judge(ranks)(texts, n)):
        assert not v.failed, f"program {seed} on {n} ranks: {v.kind} {v.reason}\n{text}"


# what was wrong, and the program that showed it
FOUND = {
    "a whole operand that the plan splits": """
b, s, c = (2, 2, 1)
stages = {"": "x=b s c"}
s1 = Pool(1)
def forward(self, x: (b, s, c)):
    x5, x6 = self.s1(x @ x.mT)
    return [x5]
""",
    "a reshape that is a view along some dims only": """
b, c, l = (2, 8, 3)
stages = {"": "text=b l c", "s0": "b [l] [c]", "s1": "b [l] [c]"}
s0 = Attend(1)
s1 = Attend(1)
def forward(self, text: (b, l, c)):
    x11 = self.s0(text)
    return (self.s1(x11), x11.reshape(-1, c))
""",
    "the gradient of an input that is cut unevenly": """
b, t, s, c = 1, 3, 5, 3
stages = {"": "x=b t s c", "s0": "b [t] s [c]"}
s0 = Attend(1)
def forward(self, x: (b, t, s, c)):
    return self.s0(x)
""",
    "the gradient of an input that is used whole": """
b, t, s, c = 1, 3, 5, 3
stages = {"": "x=b t s c, cond=b c", "s0": "b [t] s [c]"}
s0 = Attend(1)
def forward(self, x: (b, t, s, c), cond: (b, c)):
    return self.s0(x) * cond[:, None, None]
""",
    "a state that is detached from one round to the next": """
b, t, s, c = 1, 4, 4, 3
stages = {"": "y=b t s c", "s0": "b [t] s [c]", "s1": "b t [s] [c]"}
s0 = Attend(1)
s1 = Attend(2)
def forward(self, y: (b, t, s, c)):
    z = torch.zeros_like(y)
    for _ in range(3):
        z = self.s1(self.s0(y + z.detach()))
    return z
""",
    "a stage whose result is only looked at": """
b, t, s, c = 1, 4, 4, 3
stages = {"": "y=b t s c", "s0": "b [t] s [c]", "s1": "b t [s] [c]"}
s0 = Attend(1)
s1 = Attend(2)
def forward(self, y: (b, t, s, c)):
    x = self.s0(y)
    return x.masked_fill(self.s1(x) > 0.8, 0.0)
""",
    "two views of one tensor whose dims nobody named": """
b, t, s, c = 1, 1, 6, 6
stages = {"": "y=b t s c"}
def forward(self, y: (b, t, s, c)):
    x5 = y.unflatten(2, (-1, 2))
    return x5 @ x5.mT
""",
    "a copy that was made without gradient": """
b, s, c = 1, 3, 2
stages = {"": "x=b s c", "s0": "b [s] c"}
s0 = Table(1)
def forward(self, x: (b, s, c)):
    x1 = self.s0(x)
    with torch.no_grad():
        x2 = x1 / x1.amax()
    return x1 * x2
""",
    "a copy that another use switched without gradient": """
b, t, s, c = 1, 4, 4, 2
stages = {"": "x=b t s c", "s0": "b [t] s [c]", "s1": "b t [s] [c]"}
s0 = Attend(1)
s1 = Attend(2)
def forward(self, x: (b, t, s, c)):
    x1 = self.s0(x)
    with torch.no_grad():
        x2 = self.s1(x1)
    return self.s1(x1 + 1) + x2 * x1
""",
    "a number that is only looked at": """
b, t, s, c = 1, 4, 4, 2
stages = {"": "x=b t s c", "s0": "b [t] s [c]"}
s0 = Attend(1)
def forward(self, x: (b, t, s, c)):
    x1 = self.s0(x)
    return x1 / x1.sum().detach()
""",
    "three views of one tensor, wanted along part of a dim": """
b, t, s, c = (2, 2, 2, 4)
stages = {"": "x=b t s c"}
p0 = param(s, s)
p1 = param(2, t, t)
def forward(self, x: (b, t, s, c)):
    x5 = F.scaled_dot_product_attention(x, x, x, self.p0).permute(3, 0, 1, 2) * 2
    x9 = x5.unflatten(-1, (2, 1)).transpose(-2, -3)
    return (F.scaled_dot_product_attention(x9, x9, x9, self.p1), x5)
""",
    "an operation that returns what it was given": """
b, t, h, w, c = 1, 6, 2, 2, 8
stages = {"": "x=b t h w c", "s1": "b t h w [c]", "s2": "b t [h] w [c]", "s3": "[h] b n0 [t] -> [h] b n0 [t], b n0 [t]"}
s1 = Conv(4)
s2 = Table(2, 4)
s3 = Pool(0)
def forward(self, x: (b, t, h, w, c)):
    x1 = rearrange(self.s1(x), "a0 a1 a2 a3 a4 -> a2 a0 (a3 a4) a1")
    x2 = self.s2(x.contiguous() * 1.1)
    return self.s3(x1)[1], F.pad(x, (0, 0, 1, 1)), x2
""",
    "what is written into a tensor that is whole": """
b, t, s, c = 1, 4, 3, 4
stages = {"": "x=b t s c", "s0": "b [t] s [c]", "s1": "b t [s] [c]"}
s0 = Attend(1)
s1 = Attend(2)
def forward(self, x: (b, t, s, c)):
    x1 = self.s0(x)
    x2 = x.new_zeros(x.shape)
    x2 -= x1
    x2.mul_(2)
    x2[:, 0].add_(1)
    x2[:, 1] = x1[:, 1]
    x3 = x2.flip(1) * 2
    return self.s1(x2 + x1), x3.flip(2), self.s1(x2)
""",
    "a gradient that a write brings": """
b, t, s, c = 1, 2, 1, 2
stages = {"": "x=b t s c", "s1": "b t [c]"}
s1 = Mlp()
p2 = param(c)
def forward(self, x: (b, t, s, c), frames: (b, t, c)):
    x2 = x.repeat(1, 1, 1, 1)
    x14 = torch.zeros_like(self.s1(frames))
    x14[:, 1] = self.p2
    return x14
""",
    "what was made without gradient is written with one": """
b, t, s, c = 1, 4, 3, 4
stages = {"": "x=b t s c", "s0": "b [t] s [c]", "s1": "[b t s c]"}
s0 = Attend(1)
s1 = Attend(2)
def forward(self, x: (b, t, s, c)):
    with torch.no_grad():
        x1 = self.s0(x)
        x2 = x1.flip(1).flip(2) * 2
        x3 = self.s1(x)
        x4 = x2.transpose(1, 2) * 3
    x1.copy_(x)
    x2.mul_(x)
    x3.add_(x)
    x4.mul_(x.transpose(1, 2))
    return x1, x2, x3, x4
""",
    "a view that learns late of its gradient": """
b, t, s, c = 1, 1, 1, 2
stages = {"": "x=b t s c"}
p0 = param(c)
def forward(self, x: (b, t, s, c)):
    x1 = x.detach().clone()
    x1[:] += x1
    x1[0] = self.p0
    x1.masked_fill_(x1 > 0.9, 0.25)
    return x1
""",
    "an output that is gathered by way of a switch": """
b, s, r, c = 1, 1, 2, 8
stages = {"": "m=b s r c"}
s2 = Attend(2)
def forward(self, m: (b, s, r, c)):
    x6 = self.s2(m)
    x10 = F.layer_norm(x6, x6.shape[-1:])
    return x6
""",
    "an output that was written by way of what it is a view of": """
b, t, s, c = 2, 6, 5, 4
stages = {"": "x=b t s c"}
s0 = Gate()
s2 = Scribble()
def forward(self, x: (b, t, s, c)):
    x2, x3 = self.s0(x, x)
    x4 = x3.reshape(6, 4, 5, 2)
    self.s2(x3)
    return x4
""",
    "what was written in place and is switched then": """
b, s, r, c = 1, 3, 5, 6
stages = {"": "m=b s r c", "s2": "b s [r] c"}
s0 = Pool(1)
s2 = Conv(2)
def forward(self, m: (b, s, r, c)):
    x1, x2 = self.s0(m)
    x1.tanh_()
    return self.s2(x1)
""",
    "a view that was made without gradient, of what has one": """
b, t, s, c = 2, 4, 5, 4
stages = {"": "x=b t s c", "s0": "b [t] s [c]"}
s0 = Attend(1)
def forward(self, x: (b, t, s, c)):
    x1 = self.s0(x)
    with torch.no_grad():
        x2 = x1.flatten(1, 2)
    return x2, x1.square()
""",
    "a view of an input that is made without gradient": """
b, c, t, h, w = 1, 1, 4, 2, 1
stages = {"": "x=b c t h w"}
def forward(self, x: (b, c, t, h, w)):
    with torch.no_grad():
        x6 = x.unflatten(2, (-1, 2))
    return (x, x6)
""",
    "a view as something, of which a copy is wanted": """
b, t, s, c = 1, 1, 3, 4
stages = {"": "x=b t s c"}
def forward(self, x: (b, t, s, c)):
    x10 = x * 2
    return x10.view_as(x10)
""",
    "dims of size 1 with strides that torch reads wrong": """
b, c, i, j = 1, 2, 1, 2
stages = {"": "z=b i j c"}
def forward(self, z: (b, i, j, c)):
    return F.batch_norm(F.silu(z).movedim(-1, 1), None, None, training=True)
""",
    "a copy of what is whole dims of size 1 on one rank alone": """
b, t, s, c = 1, 5, 3, 4
stages = {"": "x=b t s c"}
def forward(self, x: (b, t, s, c)):
    x1 = x.transpose(1, 2) * 2
    x3 = x1.contiguous()
    x3.mul_(2)
    return x1, x3
""",
    "a copy of what was switched, and lies in order since": """
b, t, s, c = 1, 5, 3, 4
stages = {"": "x=b t s c", "s0": "b [t] s [c]"}
s0 = Attend(1)
def forward(self, x: (b, t, s, c)):
    x1 = self.s0(x).transpose(1, 2) * 2
    x3 = x1.flatten(1, 2)
    x3.mul_(2)
    return x1.flip(1), x3, x1.flip(2)
""",
    "a forward that asks how its tensors lie, of which some ranks have a row": """
b, t, s, c = 1, 5, 3, 4
stages = {"": "x=b t s c"}
def forward(self, x: (b, t, s, c)):
    x1 = x.transpose(1, 2) * 2
    if not x1.is_contiguous():
        x1 = x1.contiguous() * 1
    x2 = x1.flip(2).sort(1).values
    return x2 * x1
""",
    "what is written is what the operation returns, with its copies": """
b, t, s, c = 1, 4, 1, 4
stages = {"": "x=b t s c"}
s1 = Conv(1)
s2 = Scribble()
def forward(self, x: (b, t, s, c)):
    x6 = self.s1(x)
    x8 = self.s2(x6)
    x10 = F.rms_norm(x6, (x6.shape[1],))
    return x8
""",
    "a stage that returns what it was given, written": """
b, t, s, c = 1, 5, 4, 4
stages = {"": "x=b t s c", "s0": "b t [s] [c]", "s1": "b t s [c]"}
s0 = Attend(2)
s1 = Scribble()
def forward(self, x: (b, t, s, c)):
    x1 = self.s0(x)
    x2 = x1.flip(1)
    x3 = self.s1(x1)
    x4 = x1.flip(1)
    return x2 + x4, x3, x1
""",
    "a stage that returns what it was given, switched": """
b, t, s, c = 1, 5, 3, 4
stages = {"": "x=b t s c", "s0": "b t [s] [c]", "s1": "b [t] s [c]"}
s0 = Attend(2)
s1 = Same()
def forward(self, x: (b, t, s, c)):
    x1 = self.s0(x)
    x3 = self.s1(x1)
    x3.mul_(2)
    x4 = x1.flip(1)
    return x4, x3
""",
    "one of the pieces of a dim, which the others are not asked a gradient of": """
b, c, t = 1, 3, 2
stages = {"": "x=b c t"}
def forward(self, x: (b, c, t)):
    return x.split(1, 1)[1]
""",
    "a view of a whole input that was made without gradient": """
b, t, s, c = 1, 3, 5, 8
stages = {"": "x=b t s c"}
def forward(self, x: (b, t, s, c)):
    with torch.no_grad():
        x7 = x.transpose(1, -4)
    return [x, torch.einsum("abcd,abCd->abdC", x7, x7)]
""",
    "a whole tensor that is stretched, and split then": """
b, c, l = 1, 6, 3
stages = {"": "text=b l c"}
def forward(self, text: (b, l, c)):
    x3 = torch.einsum("abc,aBc->Bab", text, text)
    return x3.repeat(1, 1, c, 1).roll(1, 2)
""",
    "a checkpoint of what saves nothing": """
b, s, c = 1, 1, 2
stages = {"": "x=b s c", "s0": "b [c] [s]"}
s0 = Table(1)
def forward(self, x: (b, s, c, float)):
    def f7(x4):
        return self.s0(F.relu(x4))
    return checkpoint(f7, x, use_reentrant=False)
""",
    "a stage that writes a gradient into what had none": """
b, t, s, c = 1, 2, 3, 1
stages = {"": "x=b t s c", "s0": "t c s [b]"}
s0 = Scribble()
def forward(self, x: (b, t, s, c, float)):
    x2 = x - x.var(2, keepdim=True, unbiased=False)
    x4 = x2.view(s, t, c)
    return self.s0(x2)
""",
    "a sum over ranks that the plan splits at once": """
b, s, r, c = 1, 5, 3, 4
stages = {"": "m=b s r c"}
def forward(self, m: (b, s, r, c)):
    x3 = F.scaled_dot_product_attention(m, m, m, attn_mask=torch.ones(r, r, dtype=torch.bool))[:, 0]
    return torch.stack([x3, x3])
""",
    "a view that was made without gradient, and gathered": """
b, t, s, c = 1, 2, 2, 8
stages = {"": "x=b t s c, y=b t s c"}
s1 = Gate()
def forward(self, x: (b, t, s, c), y: (b, t, s, c)):
    x5, x6 = self.s1(y, x)
    with torch.no_grad():
        x8 = x6.flatten(1, 2)
    return [x5, torch.stack([x8, x8])]
""",
    "a table that is looked up by what no rank has a part of": """
s, c = 1, 2
stages = {"": "kind=s"}
p0 = param(3, c)
p2 = param(3)
def forward(self, kind: (s, int)):
    x4 = self.p0[kind]
    return self.p2[kind]
""",
    "a view that is made without gradient": """
b, t, s, c = 2, 4, 4, 4
stages = {"": "y=b t s c", "s0": "b [t] s [c]", "s1": "s b [t] [c]"}
s0 = Attend(1)
s1 = Attend(2)
def forward(self, y: (b, t, s, c)):
    with torch.no_grad():
        x5 = rearrange(self.s0(y) + y, "b t s c -> s b t c")
    return self.s1(F.relu(x5))
""",
    "a product in a checkpoint that nobody uses": """
b, t, s, c = 1, 3, 6, 8
stages = {"": "y=b t s c", "s0": "b [t] s [c]"}
s0 = Attend(1)
def forward(self, y: (b, t, s, c)):
    x1 = self.s0(y)
    def f(x):
        x2 = x.flatten(1, 2)
        x2 @ x2.mT
        return x * 0.5
    return checkpoint(f, x1, use_reentrant=False)
""",
    "what a stage writes into that is a view of a product": """
b, t, s, c = 1, 1, 1, 2
stages = {"": "x=b t s c", "s1": "b t n0 [c]"}
s0 = Product("abcz,dbcz->abdz")
s1 = Scribble()
def forward(self, x: (b, t, s, c)):
    return self.s1(self.s0(x.softmax(-1), x))
""",
    "an argument that comes back as it was, and is wanted elsewhere": """
b, t, h, w, c = 1, 1, 2, 3, 7
stages = {"": "x=b t h w c", "s0": "b t h w [c], b t h w [c] -> b t h w [c], b t h w [c]"}
s0 = Gate()
def forward(self, x: (b, t, h, w, c)):
    x4 = x.flatten(0, 2).movedim(-1, 1).reshape(x.shape)
    x6 = F.dropout(x4, 0.5, False)
    return self.s0(x, x4)
""",
    "dropout of nothing, which returns it": """
b, t, s, c = 1, 3, 5, 4
stages = {"": "x=b t s c", "s0": "b t [s] [c]", "s1": "b [t] s [c]"}
s0 = Attend(2)
s1 = Attend(1)
def forward(self, x: (b, t, s, c)):
    x1 = self.s0(x)
    x2 = F.dropout(x1, 1e-13, True)
    return self.s0(x2), self.s1(x2), self.s1(x1), self.s0(x1)
""",
    "copies of which one is made of another": """
b, t, s, c = 2, 6, 3, 4
stages = {"": "y=b t s c"}
p0 = param(s)
def forward(self, y: (b, t, s, c)):
    x1 = torch.zeros_like(y)
    x1[:, :, :, 2] = self.p0
    x7 = x1.permute(3, 1, 2, 0).reshape(6, 3, 4, 2)
    return x1.logcumsumexp(0)
""",
    "a forward that leaves its plan, and has fewer dims where that shards one": """
b, t, s, c = 1, 1, 1, 4
stages = {"": "x=b t s c"}
def forward(self, x: (b, t, s, c)):
    x2 = x.flatten(0, 2)
    if self.other:
        x2 = torch.cat([x2, x2 * 2], 1).narrow(1, 1, x2.shape[1])
    x3 = x2.cumsum(1) / 3
    x4 = x3.reshape(b, s, c)
    return x4.cumsum(-1)
""",
    "complex numbers, and their gradient, of which a rank has nothing": """
b, l, c = 2, 3, 4
stages = {"": "text=b l c"}
p1 = param(l, 2)
def forward(self, text: (b, l, c)):
    x6 = torch.view_as_complex(text.cumsum(1).unflatten(-1, (2, 2)))
    return torch.view_as_real(x6 * torch.polar(torch.ones_like(self.p1), self.p1)).flatten(-2).amax(1)
""",
    "what is computed and then told to ask for a gradient": """
b, t, s, c = 2, 4, 5, 4
stages = {"": "x=b t s c", "s0": "b [t] s [c]", "s1": "b t [s] [c]"}
s0 = Attend(1)
s1 = Attend(2)
def forward(self, x: (b, t, s, c)):
    x1 = (x * 2).detach()
    x1.requires_grad = True
    x2 = x.detach().flip(3).requires_grad_()
    return self.s1(self.s0(x1)), self.s0(x2).sin()
""",
    "complex numbers of a part that lies otherwise in memory than the whole": """
b, t, s, c = 1, 3, 3, 6
stages = {"": "x=b t s c"}
p0 = param(c, c, 3, 3)
def forward(self, x: (b, t, s, c)):
    x4 = F.conv2d(x.movedim(-1, 1), self.p0, padding=1).movedim(1, -1)
    return torch.view_as_real(torch.view_as_complex(x4.reshape(*x4.shape[:-1], -1, 2)) * 2).flatten(-2)
""",
    "a part that looks contiguous where no plan tells, and is gathered": """
b, t, s, c = 2, 1, 4, 4
stages = {"": "x=b t s c"}
p0 = param(c, c)
s3 = Table(3)
def forward(self, x: (b, t, s, c)):
    x7 = F.linear(x, self.p0)
    if self.other:
        x7 = x7.roll(1)
    y = self.s3(x7 / (x7.std() + 1))
    if not self.other:
        y = y.transpose(0, 3).contiguous().transpose(0, 3)
    return y
""",
    "a reshape that follows a record, and then leaves it": """
b, t, s, c = 1, 2, 2, 4
stages = {"": "x=b t s c", "s0": "b t s [c], b t s [c] -> b t s [c], b t s [c]", "s1": "b t [s] [c]"}
s0 = Gate()
s1 = Attend(2)
def forward(self, x: (b, t, s, c)):
    x3, x4 = self.s0(x, x)
    x7 = x4.unflatten(3, (-1, 2))
    if not self.other:
        x7 = x7.contiguous()
    return self.s1(x3), x7.permute(1, 0, 4, 3, 2).reshape(t, b, 2, -1)
""",
    "one of the pieces of a dim, of which no rows travel": """
b, c, i, j, = 2, 2, 2, 2,
stages = {'': 'z=b i j c'}
s0 = Scan(1)
def forward(self, z: (b, i, j, c)):
    x1 = z.flatten(2)
    x2 = x1.flip(0).reshape(z.shape)
    x3 = self.s0(x2)
    x4 = torch.add(x3, z, alpha=0.5)
    x5 = x4.flatten(3)
    x6 = x5.flip(0).reshape(x4.shape)
    x8 = torch.einsum('abcd,Abcd->aAb', x6, x2) * 0.3
    if not self.other:
        x8 = x8.split(1, 2)[0] * x8
    x10 = torch.cat([x8, x8.flip(1)])
    return (x10,)
""",
    "what is whole has fewer dims than where the plan that was left shards": """
b, s, c, = 2, 3, 4,
stages = {'': 'x=b s c, cond=b c'}
p0 = param(2)
def forward(self, x: (b, s, c), cond: (b, c)):
    x4 = cond[..., ::2]
    x5 = cond[..., 1::2]
    x6 = torch.stack([x4 * self.p0.cos() - x5 * self.p0.sin(), x4 * self.p0.sin() + x5 * self.p0.cos()], -1).flatten(-2)
    if not self.other:
        x6 = torch.stack([x6, x6.tanh()]).sum(0)
    x8 = x6.repeat_interleave(2, 0)
    x9 = x8 * (torch.arange(x8.shape[1]) % 3 > 0)[:]
    x10 = cond[:, None] + x[:]
    x13 = torch.stack([x])
    x14 = x13[:, 1::2]
    return x14
""",
    "a spread of nothing, where a whole tensor is narrowed": """
b, t, s, c = 2, 5, 3, 6
stages = {"": "x=b t s c"}
p0 = param(12, b*s)
def forward(self, x: (b, t, s, c, float)):
    x1 = x.std(-2)
    x3 = torch.einsum("abc,aBC->Bab", x1, x1) * 0.3
    x5 = rearrange(x, "a0 a1 a2 a3 -> (a3 a1) (a0 a2)")
    x7 = x5 @ self.p0.T
    return [x7.contiguous() * 1.1, x3[:, -1:], x1[:, :, None, None] - x[:, None]]
""",
}


SHORT = [
    "an operation that returns what it was given",
    "a stage that returns what it was given, written",
    "a part that looks contiguous where no plan tells, and is gathered",
    *[*FOUND][::5],
]


@pytest.mark.parametrize("what", slow_but(FOUND, *SHORT))
@pytest.mark.parametrize("n", [3, long(4)])
def test_mended(ranks, n: int, what: str) -> None:
    [verdict] = Judge(ranks)([FOUND[what]], n)
    assert verdict.kind == "ok", f"on {n} ranks: {verdict.kind} {verdict.reason}\n{FOUND[what]}"


# --- the net itself ---------------------------------------------------------------------------------------------------

WRONG = """
b, t, s, c = 1, 4, 5, 4
stages = {"": "x=b t s c", "s0": "b t [s] [c]", "s1": "b t s [c]"}
s0 = Attend(2)
p0 = param(c)
s1 = Attend(2)
def forward(self, x: (b, t, s, c)):
    x1 = self.s0(x)
    x2 = x1.transpose(1, 2) * self.p0
    x3 = self.s1(x2) + torch.tanh(x2)
    return x3, x1
"""


@pytest.mark.slow
def test_a_wrong_stage_is_found_and_shrunk(ranks) -> None:
    judge = Judge(ranks)
    (verdict,) = judge([WRONG], 2)
    assert verdict.kind == "WRONG", verdict
    small = shrunk(WRONG, lambda text: next(judge([text], 2)).key == verdict.key, seconds=600)
    assert next(judge([small], 2)).kind == "WRONG"
    assert len(small.splitlines()) <= 7, small
    assert "s1" in small


def test_the_same_seed_is_the_same_program() -> None:
    first = [generate(s) for s in range(4)]
    assert [generate(s) for s in reversed(range(4))] == first[::-1]
    assert len(set(first)) == 4


TORN = """
b, c, i, j = 2, 4, 4, 4
stages = {"": "z=b i j c", "s0": "(b i) c [j]"}
s0 = Scribble()
def forward(self, z: (b, i, j, c)):
    x2 = F.group_norm(z.flatten(0, 1), 1)
    x3 = x2.reshape(z.shape)
    x4 = self.s0(x2)
    return x3.reshape(4, 2, 4, 4)
"""


STRIDED = """
b, t, s, c = 1, 5, 3, 4
stages = {"": "x=b t s c"}
def forward(self, x: (b, t, s, c)):
    return (x.transpose(1, 2) * 2).as_strided((60,), (1,))
"""


def test_reading_memory_as_it_lies_is_refused(ranks) -> None:
    """A gathered tensor lies otherwise in memory than on one process."""
    (verdict,) = Judge(ranks)([STRIDED], 3)
    assert verdict.kind == "refused", verdict
    assert "as_strided() between stages" in verdict.reason


ASTRAY = """
b, t, s, c = 2, 3, 1, 4
stages = {"": "x=b t s c"}
s0 = Mlp()
def forward(self, x: (b, t, s, c)):
    x1 = self.s0(x)
    if self.other:
        x1 = x1.view(-1).view(x1.shape)
    x1.masked_fill_(x1 > 0.9, 0.25)
    x3 = torch.einsum("abcd,abcd->dbac", x1, x1)
    return torch.einsum("abcd,Dbac->aDc", x1, x3)
"""


FOLDED = """
b, t, s, c = 1, 6, 5, 4
stages = {"": "x=b t s c"}
def forward(self, x: (b, t, s, c)):
    y = x.cumsum(1).cumsum(-1).transpose(1, 2) * 2
    z = y.cumsum(-1).cumsum(1)
    y = y.sin()
    y.transpose(1, 2).flatten(2).mul_(2)
    return (y + z).cumsum(-1).cumsum(1)
"""


@pytest.mark.parametrize(("text", "n"), [(TORN, 4), (ASTRAY, 3), (FOLDED, 2)])
def test_a_write_that_a_view_of_its_own_would_miss_is_refused(ranks, text: str, n: int) -> None:
    """A fold with a batch of 2 is told apart on 4 ranks, and switched at once: what is written then it cannot see. Nor
    can what a forward that left its plan switched for a view, and writes into; nor what a rank would have to copy, for
    its part lies otherwise in memory."""
    (verdict,) = Judge(ranks)([text], n)
    assert verdict.kind == "refused", verdict
    assert "rite it out of place" in verdict.reason
