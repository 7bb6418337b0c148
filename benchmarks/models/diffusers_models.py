"""Unmodified models of diffusers under `dsp.parallelize`, held to one process: the table of docs/diffusers.md.

    python benchmarks/models/diffusers_models.py [--ranks 2 3 4] [--only Flux Wan] [--write]

Each (diffusers_cases.json) is a small one of its class with random weights, in float64, and gets one line: the names of
its inputs' dims. On gloo ranks its output, the gradient of every input and of every parameter are compared with one
process. Bytes are those of the plan, forward, but for the gather of the output, over what Ulysses would send: queries,
keys, values and outputs of every self-attention, each switched; beside them those counted of `enable_parallelism`,
where there is a `_cp_plan`. Errors are relative to the largest value, of gradients to the largest of all.

With `--write` a row takes its place in the page as soon as it is there. A hash of dsp and of this script stands in it,
unseen: `--stale` makes the rows that another version made, and those that are missing.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

import dsp
from benchmarks.common import DOCS, fill, line, on_ranks, options, table
from benchmarks.methods.contenders import Circumstance, by_diffusers
from dsp.slices import cast

PAGE, GUIDE = DOCS / "diffusers-measured.md", DOCS / "diffusers.md"
FILE = Path(__file__).with_name("diffusers_cases.json")


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
    """By their descriptions: a list is the shape of a random tensor; ones of a dtype; a tensor's value; else itself."""

    def one(it: Any) -> Any:
        if isinstance(it, list):
            return torch.randn(it)
        if not isinstance(it, dict):
            return it
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
MORE = _cases("known, too")  # `dsp/known.json` has them: compared with one process by the tests, and in no page


def made(case: Case) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    model = cast(case.build(), torch.float64).eval()  # some drop out by themselves
    for p in model.parameters():
        if not p.abs().max():
            nn.init.normal_(p, std=0.1)
    options = {"return_dict": False} if "return_dict" in inspect.signature(model.forward).parameters else {}
    return model, cast(case.inputs(), torch.float64) | options


def step(model: nn.Module, kwargs: Mapping[str, Any], pattern: str) -> tuple[Tensor, dict[str, Tensor], int]:
    """The output, the gradients of what `pattern` names, and what this rank sent forward."""
    leaves = {k: v.clone().requires_grad_(v.is_floating_point()) for k, v in kwargs.items() if f"{k}=" in pattern}
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

    What a rank sends is counted: it is what the plan of the run says, or this raises RuntimeError.
    """
    pattern, n = case.line, mesh.size()
    single, kwargs = made(case)
    model = copy.deepcopy(single)
    with Attentions() as attentions:
        expected, inputs, _ = step(single, kwargs, pattern)
    dsp.parallelize(model, mesh, {"": pattern}, gather_output=False)
    kinds: Any = model.forward.__self__.entries  # type: ignore[union-attr]
    out, own, sent = step(model, kwargs, pattern)
    if any(kind.plan is None or kind.plan.script.recorded for kind in kinds.values()):  # it reads its data
        model.zero_grad()
        out, own, sent = step(model, kwargs, pattern)
    [plan] = [kind.plan for kind in kinds.values()]
    promised = sum(s.sent(n)[mesh.get_local_rank()] for s in plan.sendings if s.phase == "forward")
    if sent != promised:
        raise RuntimeError(f"{type(model).__name__} sent {sent} bytes where its plan says {promised}")
    group = mesh.get_group()
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


HEAD = "model", "the one line", "N", "output", "gradients", "largest share", "bytes / Ulysses", "`_cp_plan` / Ulysses"
Row = Callable[[DeviceMesh, str], str]


def row(mesh: DeviceMesh, name: str) -> str:
    found, others = held(mesh, CASES[name]), theirs(mesh, CASES[name])

    def ratio(nbytes: float | None) -> str:
        return "-" if nbytes is None or "Transformer" not in name else f"{nbytes / found['ulysses']:.2f}"

    shares = f"{found['share']:.3f}", ratio(found["planned"]), f"{ratio(others)} <!-- {version()} -->"
    return line([name, f"`{CASES[name].line}`", mesh.size(), *errors(found), *shares])


def errors(found: Mapping[str, Any]) -> tuple[str, str]:
    return f"{found['output']:.0e}", f"{max(found['inputs'], found['parameters']):.0e}"


def version() -> str:
    """A digest of what makes a row: this script, its cases and dsp."""
    files = sorted(Path(dsp.__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in (Path(__file__), FILE, *files))).hexdigest()[:8]


def rows(page: Path = PAGE, name: str = "models") -> dict[tuple[str, int], str]:
    """The rows of a page's table, by model and number of ranks."""
    lines = page.read_text().partition(f"<!-- table: {name} -->")[2].partition("<!-- end -->")[0]
    return {(model, int(n)): line for line, model, n in re.findall(r"^(\| (.+?) \| .+? \| (\d) \| .*)$", lines, re.M)}


def write(key: tuple[str, int], made: str, page: Path, name: str, cases: Sequence[str], head: Sequence[str]) -> None:
    """Put a row into a page's table, in its place."""
    have = {at: row for at, row in rows(page, name).items() if at[0] in cases} | {key: made}
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
        made = make(mesh, name)
        if dist.get_rank() == 0:
            print(made, flush=True)
            if keep:
                keep((name, mesh.size()), made)


def main() -> None:
    o = options(__doc__, ranks=[2, 3, 4], only=[""], write=False, stale=False)
    every = [name for name in CASES if any(part in name for part in o.only)]
    fresh = {key for key, made in rows().items() if version() in made} if o.stale else set()
    keep = partial(write, page=PAGE, name="models", cases=list(CASES), head=HEAD) if o.write else None
    for n in o.ranks:
        on_ranks(n, make_rows, [name for name in every if (name, n) not in fresh], row, keep)
    if o.write:
        GUIDE.write_text(guide(GUIDE.read_text()))


if __name__ == "__main__":
    main()
