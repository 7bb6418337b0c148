"""Unmodified models under `dsp.parallelize` by one line each, against one process: tables of four pages.

    python benchmarks/models.py [--ranks 2 3 4] [--only Flux Wan] [--write]     # of diffusers: docs/diffusers*.md
    python benchmarks/models.py --transformers --ranks 3 [--only llama] [--write]     # transformers.md
    python benchmarks/models.py --other-fields [--ranks 2 3] [--only FNO] [--write]   # of other packages: verified.md

The models are those of tests/support/known_models.py. On gloo ranks the output, the gradient of every input and of
every parameter are compared with one process. Errors are relative to the largest value, of gradients to the largest of
all. What each rank sends is counted and is what the plan says. Bytes are those of the plan, forward, but for the gather
of the output, over what Ulysses would send: queries, keys, values and outputs of every self-attention, each switched;
beside them those counted of `enable_parallelism`, where there is a `_cp_plan`.

With `--write` a row takes its place in the page as soon as it is there. A hash of dsp and of this script stands in it,
unseen: `--stale` makes the rows that another version made, and those that are missing.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import dsp
from benchmarks.common import DOCS, fill, line, on_ranks, options, table
from benchmarks.contenders import Circumstance, by_diffusers
from dsp.support.formatting import human
from tests.support import known_models
from tests.support.known_models import CASES, OTHER_FIELDS, TRANSFORMERS, Case, held, made

PAGE, GUIDE, FIELDS = DOCS / "diffusers-measured.md", DOCS / "diffusers.md", DOCS / "verified.md"
TYPES = DOCS / "transformers.md"


def theirs(mesh: DeviceMesh, case: Case) -> float | None:
    """Bytes that the busiest rank sends forward by the class's own plan, but for the gather of the output.

    Without a mask of the text, which LTX's processors give all heads, and Ulysses a part of them.
    """
    model, kwargs = made(case)
    kwargs.pop("return_dict", None)
    if not getattr(model, "_cp_plan", None):
        return None
    model = by_diffusers(model, mesh, Circumstance(), {}).model
    with dsp.count_comm() as comm, torch.no_grad():
        model(kwargs | {"encoder_attention_mask": None} if "encoder_attention_mask" in kwargs else kwargs)
    sent = torch.tensor(comm.forward.bytes["switch"])
    dist.all_reduce(sent, dist.ReduceOp.MAX, group=mesh.get_group())
    return float(sent)


FIRST = "model", "dims of the inputs", "N", "output", "gradients", "largest share"
HEAD = *FIRST, "bytes / Ulysses", "`_cp_plan` / Ulysses"
Row = Callable[[DeviceMesh, str], str]


def row(mesh: DeviceMesh, name: str) -> str:
    outcome, others = held(mesh, CASES[name]), theirs(mesh, CASES[name])

    def ratio(nbytes: float | None) -> str:
        return "-" if nbytes is None or "Transformer" not in name else f"{nbytes / outcome['ulysses']:.2f}"

    shares = f"{outcome['share']:.3f}", ratio(outcome["planned"]), f"{ratio(others)} <!-- {version()} -->"
    return line([name, f"`{CASES[name].line}`", mesh.size(), *errors(outcome), *shares])


def row_of(cases: Mapping[str, Case], sends: bool, mesh: DeviceMesh, name: str) -> str:
    """A row of another table than that of diffusers; `sends`: with the bytes sent forward."""
    outcome = held(mesh, cases[name])
    cells = [name, f"`{cases[name].line}`", mesh.size(), *errors(outcome), f"{outcome['share']:.2f}"]
    return line([*cells, human(outcome["planned"])] if sends else cells)


def errors(outcome: Mapping[str, Any]) -> tuple[str, str]:
    return f"{outcome['output']:.0e}", f"{max(outcome['inputs'], outcome['parameters']):.0e}"


def version() -> str:
    """A digest of what makes a row: this script, its cases and dsp."""
    cases = Path(known_models.__file__), known_models.FILE
    files = sorted(Path(dsp.__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in (Path(__file__), *cases, *files))).hexdigest()[:8]


def rows(page: Path = PAGE, name: str = "models") -> dict[tuple[str, int], str]:
    """The rows of a page's table, by model and number of ranks."""
    lines = page.read_text().partition(f"<!-- table: {name} -->")[2].partition("<!-- end -->")[0]
    return {(model, int(n)): line for line, model, n in re.findall(r"^(\| (.+?) \| .+? \| (\d) \| .*)$", lines, re.M)}


def write(key: tuple[str, int], text: str, page: Path, name: str, cases: Sequence[str], head: Sequence[str]) -> None:
    """Put a row into a page's table, in its place."""
    have = {at: row for at, row in rows(page, name).items() if at[0] in cases} | {key: text}
    order = sorted(have, key=lambda at: (cases.index(at[0]), at[1]))
    page.write_text(fill(page.read_text(), {name: [*table(head, []), *(have[at] for at in order)]}))


def guide(text: str) -> str:
    """The guide with its table of classes: of all rows of a class the largest errors, and the share on most ranks."""
    lines, have = [], rows()
    for name, case in CASES.items():
        outputs, gradients, shares = zip(*(have[key].split(" | ")[3:6] for key in have if key[0] == name))
        worst = (f"{max(map(float, each)):.0e}" for each in (outputs, gradients))
        lines.append([name, f"`{case.line}`", *worst, ", ".join(f"{float(share):.2f}" for share in shares)])
    head = "class", "line", "outputs", "gradients", "share on 2, 3, 4 ranks"
    return fill(text, {"classes": table(head, lines)})


def make_rows(mesh: DeviceMesh, names: Sequence[str], make: Row, keep: Callable[..., None] | None) -> None:
    """On every rank: make the rows of some models, print and keep them."""
    warnings.simplefilter("ignore")  # of autocast to fp32 on CPU, by the models
    for name in names:
        text = make(mesh, name)
        if dist.get_rank() == 0:
            print(text, flush=True)
            if keep:
                keep((name, mesh.size()), text)


def main() -> None:
    o = options(__doc__, ranks=[2, 3, 4], only=[""], write=False, stale=False, other_fields=False, transformers=False)
    cases, page, title, head, make = CASES, PAGE, "models", HEAD, row
    if o.other_fields:
        cases, page, title, head = OTHER_FIELDS, FIELDS, "other fields", (*FIRST, "sends, forward")
    elif o.transformers:
        cases, page, title, head = TRANSFORMERS, TYPES, "types", FIRST
    if cases is not CASES:
        make = partial(row_of, cases, o.other_fields)
    place = {"page": page, "name": title, "head": head, "cases": list(cases)}
    every = [name for name in cases if any(part in name for part in o.only)]
    fresh = {key for key, text in rows().items() if version() in text} if o.stale else set()
    for n in o.ranks:
        names = [name for name in every if (name, n) not in fresh]
        on_ranks(n, make_rows, names, make, partial(write, **place) if o.write else None)
    if o.write and cases is CASES:
        GUIDE.write_text(guide(GUIDE.read_text()))


if __name__ == "__main__":
    main()
