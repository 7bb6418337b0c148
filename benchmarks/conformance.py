"""Sequence parallelism by others, and by dsp, on the same small models: the tables of docs/conformance.md.

    python benchmarks/conformance.py               runs every method and writes what became of it into the page
    python benchmarks/conformance.py --methods dsp ring    these alone: the others' columns stay as they are

A cell is one model under one method in one circumstance on N ranks: gloo, float64, N processes of its own, a limit of
time. Each rank computes the model by itself first, then in parallel; the output and the gradient of every parameter
are compared. Needs diffusers, and deepspeed for its own column.
"""

import importlib.metadata
import linecache
import multiprocessing
import multiprocessing.connection
import os
import re
import sys
import tempfile
import time
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.common import DOCS, fill, options, table
from benchmarks.contenders import EVEN, METHODS, MODELS, Circumstance, Method, call, make

PAGE = DOCS / "conformance.md"
LIMIT, GRACE = 120.0, 3.0  # seconds: of a cell, after a rank has raised


@dataclass(frozen=True)
class Cell:
    model: str
    circumstance: str
    method: str
    ranks: int

    @property
    def it(self) -> Circumstance:
        return MODELS[self.model].circumstances[self.circumstance]


def cells(name: str) -> Iterator[Cell]:
    """All of a method."""
    for model, one in MODELS.items():
        for circumstance, it in one.circumstances.items():
            if METHODS[name].cuts >= it.cut and (METHODS[name].models or model == "attention"):
                yield from (Cell(model, circumstance, name, n) for n in one.ranks)


@dataclass(frozen=True)
class Verdict:
    kind: str
    says: str = ""  # by how much it is scaled; the words of an error


DIES = "a process dies"
ORDER = ("exact", "scaled", "wrong", "hangs", "raw error", "refused")  # what tells most is last
Answer = dict[str, Verdict]  # of the output, of averaged and of summed gradients; of backward, if it raised


def compare(outputs: Sequence[Tensor], right: Sequence[Tensor], exact: float, floor: float = 0.0) -> Verdict:
    """Differences are over the largest value of what is right, or `floor`."""
    factors = []
    for x, y in zip(outputs, right, strict=True):
        if x.shape != y.shape:
            return Verdict("wrong")
        allowed = exact * (max(y.abs().max().item(), floor) or 1.0)
        if not (x - y).abs().max() <= allowed:
            factor = ((x * y).sum() / y.square().sum()).item()
            if not (abs(factor) > 1e-3 and (x - factor * y).abs().max() <= allowed):
                return Verdict("wrong")
            factors.append(factor)
    if not factors:
        return Verdict("exact")
    low, high = f"×{min(factors):.3g}", f"×{max(factors):.3g}"
    return Verdict("scaled", low if low == high else f"{low} to {high}")


def failure(error: BaseException, source: str) -> Verdict:
    """Refused, if a line of the library itself raised it and it says something."""
    last, message = traceback.extract_tb(error.__traceback__)[-1], str(error).strip()
    line = linecache.getline(last.filename, last.lineno or 0).strip()
    kind = "refused" if message and source in last.filename and line.startswith(("raise ", "assert ")) else "raw error"
    words = re.sub(r"\[/\S+\] ", "", message.splitlines()[0]) if message else "no word"
    return Verdict(kind, f"{type(error).__name__}: {words}"[:200])


def raised(answer: Answer) -> bool:
    return any(verdict.kind in ("raw error", "refused") for verdict in answer.values())


def merged(answers: list[Answer], ranks: int) -> Answer:
    """One answer for all ranks: of each part what is furthest from exact, a death before what it did to others."""
    worst: Answer = {}
    for answer in answers:
        for part, verdict in answer.items():
            tells = [(ORDER.index(v.kind), v.says.startswith(DIES)) for v in (worst.get(part, verdict), verdict)]
            worst[part] = verdict if tells[1] > tells[0] else worst.get(part, verdict)
    if len(answers) < ranks and not raised(worst):
        worst["backward" if "output" in worst else "output"] = Verdict("hangs")
    if worst["output"].kind in ("raw error", "refused"):  # another rank may have gone on
        return {"output": worst["output"]}
    return worst


def work(cell: Cell, method: Method, rank: int, store: str, pipe: Any) -> None:
    """The model by itself, then by the method; sends an answer."""
    for stream in (1, 2):  # of libraries too
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=cell.ranks)
    mesh = init_device_mesh("cpu", (cell.ranks,), mesh_dim_names=("sp",))
    try:
        model, inputs = make(cell.model, cell.it)
        right = call(model, inputs)
        weight = torch.randn_like(right)
        (right * weight).mean().backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    except Exception:
        return pipe.send(traceback.format_exc())
    answer: Answer = {}
    part, exact = "output", MODELS[cell.model].exact
    try:
        model, inputs = make(cell.model, cell.it)
        run = method.run(model, mesh, cell.it, MODELS[cell.model].stages)
        with run.inside(weight, inputs):
            y = run.model(inputs)
            answer[part] = compare([run.whole(y).detach()], [right], exact)
            part = "backward"
            (y * run.part(weight)).mean().backward()
        total = {}
        for name, p in model.named_parameters():
            if name in grads:
                total[name] = torch.zeros_like(p) if p.grad is None else p.grad.detach().clone()
                dist.all_reduce(total[name])
        floor = 1e-3 * max(g.abs().max().item() for g in grads.values())
        for way, ranks in (("averaged", cell.ranks), ("summed", 1)):
            answer[way] = compare([total[name] / ranks for name in grads], list(grads.values()), exact, floor)
    except Exception as error:
        answer[part] = failure(error, method.source)
    pipe.send(answer)
    pipe.recv()  # until it is killed: to end would tell the ranks that wait for this one


def measure(cell: Cell, method: Method | None = None) -> Answer:
    """In processes of its own, forked from this one, which has imported everything."""
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = {}
        for rank in range(cell.ranks):
            here, there = fork.Pipe()
            args = (cell, method or METHODS[cell.method], rank, f"{folder}/store", there)
            ranks[here] = fork.Process(target=work, args=args)
            ranks[here].start()
            there.close()
        try:
            answers = collect(dict(ranks))
        finally:
            for process in ranks.values():
                process.kill()
                process.join()
    return merged(answers, cell.ranks)


def collect(waiting: dict[Any, Any]) -> list[Answer]:
    """The answers of the ranks, by their pipes, within LIMIT; within GRACE, once one of them has raised."""
    answers: list[Answer] = []
    until = time.monotonic() + LIMIT
    while waiting and time.monotonic() < until:
        for pipe in multiprocessing.connection.wait(list(waiting), 0.5):
            process = waiting.pop(pipe)
            try:
                answer = pipe.recv()  # type: ignore[union-attr]
            except EOFError:
                process.join()
                answer = {"output": Verdict("raw error", f"{DIES}: exit code {process.exitcode}")}
            if isinstance(answer, str):
                raise RuntimeError(f"one process by itself fails:\n{answer}")
            answers.append(answer)
            if raised(answer):
                until = min(until, time.monotonic() + GRACE)
    return answers


Entries = dict[tuple[str, str], str]  # of a table: by row and column
WAYS = {f"gradients {way}": way for way in ("averaged", "summed")}
TABLES: dict[str, tuple[list[str], list[str]]] = {  # rows and columns
    "methods": ([*METHODS], ["version", "called by", "run on"]),
    "attention": ([*MODELS["attention"].circumstances, *WAYS], [*METHODS]),
    "models": (
        [f"{name}: {row}" for name in MODELS if name != "attention" for row in [*MODELS[name].circumstances, *WAYS]],
        [name for name, method in METHODS.items() if method.models],
    ),
    "errors": ([*METHODS], ["says"]),
}


def word(cell: Cell, verdict: Verdict, gradients: bool) -> str:
    factors = {f"×{cell.ranks}": "×N", f"×{1 / cell.ranks:.3g}": "×1/N"}
    text = factors.get(verdict.says, verdict.says) if verdict.kind == "scaled" else verdict.kind
    text = f"**{text}**" if verdict.kind in ("scaled", "wrong", "hangs") else text
    return text + ("†" if text != "exact" and METHODS[cell.method].disclaimed(cell.it, gradients) else "")


def entry(cell: Cell, answer: Answer) -> str:
    """The entry of the output; where that is exact, of the gradients."""
    gradients = answer.get("backward") or answer.get(METHODS[cell.method].gradients)
    if answer["output"].kind != "exact" or gradients is None or gradients.kind == "exact":
        return word(cell, answer["output"], False)
    return f"gradients {word(cell, gradients, True)}"


def over_ranks(answers: dict[Cell, Answer], say: Callable[[Cell, Answer], str]) -> str:
    groups = defaultdict(list)
    for cell, answer in answers.items():
        groups[say(cell, answer)].append(str(cell.ranks))
    return next(iter(groups)) if len(groups) == 1 else "; ".join(f"{', '.join(ns)}: {t}" for t, ns in groups.items())


def entries(name: str, answers: dict[Cell, Answer]) -> dict[str, Entries]:
    """The entries that a method's answers put into each table."""
    method, tables = METHODS[name], {title: Entries() for title in TABLES}
    version = f"{method.package} {importlib.metadata.version(method.package).split('+')[0]}"
    columns = zip(TABLES["methods"][1], (version, method.how, time.strftime("%Y-%m-%d")))
    tables["methods"] = {(name, column): text for column, text in columns}
    groups: dict[tuple[str, str], dict[Cell, Answer]] = defaultdict(dict)
    said: dict[tuple[str, str], tuple[str, list[str]]] = {}
    for cell, answer in answers.items():
        groups[cell.model, cell.circumstance][cell] = answer
        for part, verdict in answer.items():
            if verdict.kind in ("raw error", "refused"):
                where = said.setdefault((verdict.kind, re.sub(r"\d+", "#", verdict.says)), (verdict.says, []))[1]
                what = "backward" if part == "backward" else cell.circumstance
                where += [what] * (what not in where)
    for (model, circumstance), group in groups.items():
        title, before = ("attention", "") if model == "attention" else ("models", f"{model}: ")
        tables[title][before + circumstance, name] = over_ranks(group, entry)
        for row, way in WAYS.items() if circumstance == EVEN else ():
            say = partial(lambda way, cell, answer: word(cell, answer[way], True) if way in answer else "", way)
            tables[title][before + row, name] = over_ranks(group, say)
    lines = (f"{', '.join(where)}: {kind}, `{says}`" for (kind, _), (says, where) in said.items())
    tables["errors"][name, "says"] = "<br>".join(lines).replace("|", "/") or "nothing"
    return tables


def read(page: str, name: str) -> Entries:
    lines = page.partition(f"<!-- table: {name} -->\n")[2].partition("<!-- end -->")[0].splitlines()
    head, *rows = [[text.strip() for text in line.strip("|").split("|")] for line in lines] or [[""]]
    return {(row[0], column): text for row in rows for column, text in zip(head[1:], row[1:])}


def written(page: str, tables: dict[str, Entries]) -> str:
    """The page with these entries in place of those that it had."""
    contents = {}
    for name, (rows, columns) in TABLES.items():
        both = read(page, name) | tables.get(name, {})
        cells = [[row, *(both.get((row, column), "") for column in columns)] for row in rows]
        contents[name] = [*table(["", *columns], cells)]
    return fill(page, contents)


def prepare() -> None:
    """Imports what the cells need, once for all the forks."""
    import diffusers
    from torch.distributed.tensor.experimental import context_parallel  # noqa: F401

    diffusers.utils.logging.set_verbosity_error()
    for model in MODELS:
        make(model, Circumstance())
    with suppress(ImportError):
        import deepspeed.ops
        import deepspeed.sequence.layer

        deepspeed.ops.__dict__["__compatible_ops__"] = {}  # nothing to be compiled


def main() -> None:
    prepare()
    for name in options(__doc__, choices={"methods": METHODS}, methods=list(METHODS)).methods:
        try:
            importlib.metadata.version(METHODS[name].package)
        except importlib.metadata.PackageNotFoundError:
            print(f"{name}: {METHODS[name].package} is not installed; what the page has of it stays")
            continue
        answers = {}
        for cell in cells(name):
            answers[cell] = measure(cell)
            print(f"{name}, {cell.model}, {cell.circumstance}, {cell.ranks}: {entry(cell, answers[cell])}", flush=True)
        PAGE.write_text(written(PAGE.read_text(), entries(name, answers)))


if __name__ == "__main__":
    main()
