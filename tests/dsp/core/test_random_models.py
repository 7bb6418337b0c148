"""Random models on 2, 3 and 4 ranks (`tools/fuzz/models.py` runs thousands), and the programs that once went wrong."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from tests.support.paths import ROOT
from tests.support.slow import keep_short, long, slow
from tools.fuzz.models import Judge, refusal, shrunk
from tools.fuzz.programs import generate

SEEDS = {2: range(40), 3: [18, *range(130, 142)], 4: range(175, 183)}  # 61 programs, more where they are cheaper

# seed -> the kind of its failure: it must fail so until it is mended, and be taken off this list then
KNOWN: dict[int, str] = {}


@pytest.mark.parametrize("n", [slow(2), 3, slow(4)])
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
PROGRAMS = re.findall(r"^# (.*)((?:\n.+)+\n)", (ROOT / "tools/fuzz/found.txt").read_text(), re.M)
FOUND: dict[str, str] = dict(PROGRAMS)  # to the letter: of its checksum depends how a program is run


SHORT = [
    "an operation that returns what it was given",
    "a stage that returns what it was given, written",
    "a part that looks contiguous where no plan tells, and is gathered",
    *[*FOUND][::5],
]


@pytest.mark.parametrize("what", keep_short(FOUND, only=SHORT))
@pytest.mark.parametrize("n", [3, long(4)])
def test_regressions(ranks, n: int, what: str) -> None:
    [verdict] = Judge(ranks)([FOUND[what]], n)
    assert verdict.kind == "ok", f"on {n} ranks: {verdict.kind} {verdict.reason}\n{FOUND[what]}"


MISSED_WRITE = """
b, t, w, l, c = 1, 2, 3, 3, 2
stages = {"": "x=b t w c, text=b l c"}
def forward(self, x: (b, t, w, c), text: (b, l, c)):
    x8 = torch.empty_like(text).copy_(text)
    if self.other: x8 = x8.mT.reshape(-1).view(x8.mT.shape).mT
    x8.mul_(0.5)
    x8[:, -1].neg_()
    return [x8]
"""


def test_every_rank_refuses_a_write_that_the_original_missed(ranks) -> None:
    """The last of the four has no rows that could miss it, and went on alone."""
    [verdict] = Judge(ranks)([MISSED_WRITE], 4)
    assert (verdict.kind, "into a copy of a tensor" in verdict.reason) == ("refused", True), verdict


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
    if verdict.kind == "ok":  # there the view is taken of what was written
        return
    assert verdict.kind == "refused", verdict
    assert re.search("rite it out of place|an out-of-place operation", verdict.reason)
