"""Random models against one process: outputs, every gradient and the bytes of the plan, on 2, 3 and 4 ranks.

    python tools/fuzz/models.py --count 5000 --seed 1 --size 3     # what fails is shrunk and printed
    python tools/fuzz/models.py FILE                               # a program in a file, on each number of ranks

A refusal is fine if it is an error of dsp's own; what else goes wrong has a kind:

    WRONG    a number, a shape or a dtype is not that of one process
    BYTES    what was sent is not what its plan says
    RAW      an error that is not dsp's own, or one that only some ranks raise
    HANG     ranks wait for each other
"""

from __future__ import annotations

import argparse
import ast
import copy
import gc
import logging
import os
import re
import sys
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

import dsp
from dsp.report.table import Plan
from dsp.support.private import FakeTensor
from tests.support import ranks, records
from tools.fuzz.programs import (
    Step,
    build,
    float64,
    generate,
    inputs_of,
    leaves_of,
    loss_of,
    plain_mean,
    sound,
    step,
    tensors,
)

PATIENCE = int(os.environ.get("DSP_TEST_PATIENCE", "90"))  # seconds that a rank waits for another
TOLERANCE = 1e-9
PLANNED = 8  # of so many programs one is planned by `dsp.plan`, too, and one runs without gradients
PHASES = "forward", "backward", "recompute"


@dataclass
class Verdict:
    """The verdict of one rank, or of all, on a program on n ranks."""

    kind: str = "ok"  # ok, refused, or a kind of failure
    reason: str = ""
    sent: dict[str, list[int]] = field(default_factory=dict)  # by phase: bytes of this rank, call by call
    planned: dict[str, int] = field(default_factory=dict)
    shards: bool = False  # whether its plan gathers nothing, and it returns shards
    share: float = 0.0  # largest local tensor over the largest of one process

    @property
    def failed(self) -> bool:
        return self.kind not in ("ok", "refused")

    @property
    def key(self) -> tuple[str, str]:
        """The key under which two failures are the same: numbers, names of variables and shapes do not matter."""
        return self.kind, re.sub(r"\[[^]]*\]|\([\d, ]*\)|'[^']*'|-?\d+(\.\d+)?(e[-+]\d+)?", "#", self.reason)[:100]


# --- on each rank -----------------------------------------------------------------------------------------------------


class Count(dsp.count_comm):
    """Bytes of every collective, one by one, and the largest tensor that an operation made; the memory of all."""

    def __init__(self) -> None:
        super().__init__()
        self.events: dict[str, list[int]] = {phase: [] for phase in PHASES}
        self.largest = 0
        self.memory: list[tuple[StorageWeakRef, str]] = []

    def left(self) -> str:
        """The tensors that still have memory when nobody is to hold them; a backend's threads let go a bit later."""
        for _ in range(100):
            self.memory = [(memory, name) for memory, name in self.memory if not memory.expired()]
            if not self.memory:
                break
            time.sleep(0.01)
        return ", ".join(name for _, name in self.memory)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        traffic = [getattr(self, phase) for phase in PHASES] if func.namespace != "aten" else []
        before = [(t.calls.total(), t.bytes.total()) for t in traffic]
        out = super().__torch_dispatch__(func, types, args, kwargs)
        results = [t for t in (out if isinstance(out, (list, tuple)) else [out]) if isinstance(t, Tensor)]
        for events, now, (calls, sent) in zip(self.events.values(), traffic, before):
            if now.calls.total() == calls:
                continue
            # the plan prices each of its tensors by itself
            if func._schema.name == "dsp::switch_many":
                pieces = zip(args[0], args[2], results)
                events += [x.nbytes * (x.shape[d] - t.shape[d]) // max(x.shape[d], 1) for x, d, t in pieces]
            else:
                events.append(now.bytes.total() - sent)
        if not any(r.alias_info for r in func._schema.returns) and func.namespace != "c10d":
            # but for those to plan
            real = [t for t in results if not (t.is_meta or isinstance(t, (DTensor, FakeTensor)))]
            self.largest = max([self.largest, *(t.nbytes for t in real)])
            self.memory += [(StorageWeakRef(t.untyped_storage()), str(func)) for t in real]
        return out


def trial(mesh: DeviceMesh, text: str, check: bool = False) -> Verdict:
    """A program in parallel against itself on this process. Raises what the parallel run raises."""
    n, rank, number = mesh.size(), mesh.get_local_rank(), zlib.crc32(text.encode())
    single, verdict, refusal = build(text), Verdict(), None
    problems: list[str] = []
    inputs = inputs_of(single)
    single(**leaves_of(inputs))  # it has weights now
    expect = step(single, inputs)
    gather = number % 3 != 0 or any(y.is_complex() for y in expect.outputs)  # dsp.mean is of real numbers
    for p in single.parameters():
        p.grad = None
    ahead: Plan | None = None
    if rank == 0 and number % PLANNED == 0:
        try:
            how = {"size": n, "stages": single.stages, "gather_output": gather}
            ahead = dsp.plan(copy.deepcopy(single), kwargs=leaves_of(inputs), **how)
        except Exception as error:
            refusal = error
    model = dsp.parallelize(copy.deepcopy(single), mesh, gather_output=gather)
    for call in ("", "second call: "):
        outcome, sent, largest, comm = parallel_step(model, inputs, mesh)
        problems += [f"{call}{p}" for p in differences(outcome, expect)]
        del outcome
        for p in model.parameters():
            p.grad = None
        if call and (left := comm.left()):  # the first one made tensors without data, to plan
            problems.append(f"memory: after a step there is still that of {left}")
        if not call:
            verdict.sent = sent
            if (plan := records.figures(model)) is not None:
                verdict.planned, verdict.shards = plan.bytes, not gather and plan.shards
            if ahead is not None and ahead.bytes != (plan and plan.bytes):
                problems.append(f"bytes: dsp.plan says {ahead.bytes}, parallelize {plan and plan.bytes}")
        elif sent != verdict.sent:
            more = sum(map(sum, sent.values())) - sum(map(sum, verdict.sent.values()))
            problems.append(f"bytes: the second call sends {more} more than the first")
    if "self.other" in text:
        problems += astray(model, single, inputs, mesh)
    if verdict.shards:
        with Count() as alone:
            single(**leaves_of(inputs))
        verdict.share = largest / max(alone.largest, 1)
    if number % PLANNED == PLANNED // 2:
        model.eval()
        with torch.no_grad():
            outcome = Step([dsp.gather(t.detach()) for t in tensors(model(**leaves_of(inputs)))], {})
        problems += [f"no_grad: {p}" for p in differences(outcome, Step(expect.outputs, {}))]
    if check:
        report = dsp.check(single, kwargs=inputs, mesh=mesh)
        refused = [p for p in report.problems if re.search("raised (Glue|Notation)Error", p)]  # at another size
        if refused and not problems:
            return replace(verdict, kind="refused", reason=refused[0])
        problems += [f"check says: {p}" for p in report.problems]
    if problems:
        return replace(verdict, kind="BYTES" if problems[0].startswith("bytes") else "WRONG", reason=problems[0])
    if refusal is not None:
        raise refusal
    return verdict


def astray(model: nn.Module, single: nn.Module, inputs: dict[str, Tensor], mesh: DeviceMesh) -> list[str]:
    """The differences when a forward leaves its plan, when that is recorded, and when it goes by the record."""
    problems = []
    for other, times in ((True, 3), (False, 2)):
        model.other = single.other = other
        expect = step(single, inputs)
        for call in range(times):
            outcome, _, _, comm = parallel_step(model, inputs, mesh)
            problems += [f"other {other}, call {call}: {p}" for p in differences(outcome, expect)]
            del outcome
            for p in model.parameters():
                p.grad = None
            gc.collect()  # what recorded a call
            if left := comm.left():
                problems.append(f"memory: after call {call} of other {other} there is still that of {left}")
    return problems


def parallel_step(
    model: nn.Module, inputs: dict[str, Tensor], mesh: DeviceMesh
) -> tuple[Step, dict[str, list[int]], int, Count]:
    """`step` over ranks; what it sends but for the loss, which is no part of a plan; the largest tensor."""
    n, leaves = mesh.size(), leaves_of(inputs)
    for p in model.parameters():
        p.grad = None
    with Count() as comm:
        outputs = tensors(model(**leaves))
        largest, forward = comm.largest, list(comm.events["forward"])
        loss = loss_of(outputs, lambda x, w: dsp.mean(x, w) if isinstance(x, DTensor) else plain_mean(x, w))
        if loss.requires_grad:
            loss.backward()
    backward = comm.events["backward"]
    for y in outputs:
        mean = -(-2 * 16 * (n - 1) // n)
        if isinstance(y, DTensor) and y.requires_grad and mean in backward:
            backward.remove(mean)
    params = dict(model.named_parameters())
    flat = torch.cat(
        [torch.zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in params.values()] + [torch.zeros(1)]
    )
    dist.all_reduce(flat, group=mesh.get_group())
    pieces = (flat / n).split([*(p.numel() for p in params.values()), 1])
    averaged = {k: piece.view(p.shape) for (k, p), piece in zip(params.items(), pieces)}
    grads = {k: v.grad for k, v in leaves.items() if v.requires_grad}
    outcome = Step([dsp.gather(y.detach()) for y in outputs], averaged, grads)
    return outcome, {**comm.events, "forward": forward}, largest, comm


def differences(outcome: Step, expect: Step) -> list[str]:
    """In words."""
    if len(outcome.outputs) != len(expect.outputs):
        return [f"output: {len(outcome.outputs)} instead of {len(expect.outputs)}"]
    pairs = [(f"output {i}", a, b) for i, (a, b) in enumerate(zip(outcome.outputs, expect.outputs))]
    pairs += [(f"gradient of parameter {k}", a, expect.params[k]) for k, a in outcome.params.items()]
    pairs += [(f"gradient of input {k}", a, expect.inputs[k]) for k, a in outcome.inputs.items()]
    said = []
    for what, a, b in pairs:
        if a is None or b is None:
            if any(t is not None and t.any() for t in (a, b)):
                said.append(f"{what}: there is {'none' if a is None else 'one'}")
        elif a.shape != b.shape or a.dtype != b.dtype:
            said.append(f"{what}: {tuple(a.shape)} {a.dtype} instead of {tuple(b.shape)} {b.dtype}")
        elif b.numel() and not (off := float((a - b).abs().max())) <= TOLERANCE * (1 + float(b.abs().max())):
            said.append(f"{what}: off by {off:.1e}, of {float(b.abs().max()):.1e}")
    return said


def blame(error: Exception) -> Verdict:
    """dsp's own refusals are in words; all else is raw."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [f for f in frames if "/dsp/" in f.filename]
    refusal = isinstance(error, ValueError) and frames and frames[-1] in inside
    if refusal or isinstance(error, (dsp.GlueError, dsp.NotationError)):
        return Verdict("refused", str(error))
    where = f" ({Path(inside[-1].filename).name}:{inside[-1].name})" if inside else ""
    lost = re.search(r"Timed out waiting|Connection closed|Connection reset|gloo", str(error))
    first = str(error).strip().split("\n")[0][:160]
    return Verdict("HANG" if lost else "RAW", f"{type(error).__name__}: {first}{where}")


@contextmanager
def impatient(mesh: DeviceMesh) -> Iterator[None]:
    """A rank waits a while for the others, not for ever; and dsp has nothing to say but errors."""
    log, c10d = logging.getLogger("dsp"), torch.distributed.distributed_c10d
    wait = getattr(c10d, "set_timeout", None) or c10d._set_pg_timeout  # before torch 2.14
    level = log.level
    log.setLevel(logging.ERROR)
    wait(timedelta(seconds=PATIENCE), mesh.get_group())
    try:
        yield
    finally:
        wait(timedelta(minutes=30), mesh.get_group())
        log.setLevel(level)


def batch(mesh: DeviceMesh, texts: list[str], check: list[bool]) -> list[Verdict]:
    """Verdicts on programs in turn, up to the first that raises: the ranks may not be in step after it."""
    verdicts: list[Verdict] = []
    with impatient(mesh), float64():
        for text, asked in zip(texts, check):
            try:
                verdicts.append(trial(mesh, text, asked))
            except Exception as error:
                return [*verdicts, blame(error)]
    return verdicts


# --- over all ranks ---------------------------------------------------------------------------------------------------


def joined(verdicts: Sequence[Verdict]) -> Verdict:
    """The verdict of all ranks together."""
    raised = [v for v in verdicts if v.kind in ("RAW", "HANG", "refused")]
    if raised:
        first = min(raised, key=lambda v: ("RAW", "refused", "HANG").index(v.kind))
        if len(raised) == len(verdicts) and len({v.kind for v in raised}) == 1:
            return first
        return Verdict("HANG" if first.kind == "HANG" else "RAW", f"on some ranks only: {first.reason}")
    result = next((v for v in verdicts if v.failed), replace(verdicts[0], share=max(v.share for v in verdicts)))
    for phase, planned in verdicts[0].planned.items() if not result.failed else ():
        every = [v.sent[phase] for v in verdicts]
        if len(set(map(len, every))) > 1:
            return replace(result, kind="BYTES", reason=f"{phase}: ranks make different calls")
        if (sent := max(map(sum, every))) != planned:
            how = "more" if sent > planned else "less"
            return replace(result, kind="BYTES", reason=f"{phase}: {how} than planned, {sent} for {planned}")
    return result


class Judge:
    """Runs programs on a pool of ranks (`ranks.Pool`), starting it anew after a hang."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool

    def __call__(self, texts: Sequence[str], n: int, check: Sequence[bool] = ()) -> Iterator[Verdict]:
        left = list(zip(texts, check or [False] * len(texts)))
        while left:
            try:
                rows = self.pool(batch, n, [t for t, _ in left], [c for _, c in left])
            except BaseException as error:
                if type(error).__name__ != "Failed":  # pytest's
                    raise
                rows = [[Verdict("HANG", str(error).strip().split("\n")[-1][:200])]] if len(left) == 1 else [[], [None]]
            done = min(map(len, rows))
            verdicts = [joined(v) for v in zip(*rows)]
            uneven = len(set(map(len, rows))) > 1  # some ranks raised, and others did not
            if uneven or verdicts[-1].kind == "HANG" or "some ranks" in verdicts[-1].reason:
                self.pool.stop()
                if len(left) > 1:  # whose fault it is shows alone
                    bad = done if uneven else done - 1
                    yield from verdicts[:bad]
                    yield from self([left[bad][0]], n, [left[bad][1]])
                    left = left[bad + 1 :]
                    continue
                verdicts = verdicts or [Verdict("HANG", "ranks are not in step")]
            yield from verdicts
            left = left[len(verdicts) :]


# --- shrinking --------------------------------------------------------------------------------------------------------


def shrunk(text: str, fails: Callable[[str], bool], seconds: float = 120) -> str:
    """A smaller program that fails in the same way."""
    end, tried = time.monotonic() + seconds, {text}
    while time.monotonic() < end:
        for candidate in smaller(text):
            if candidate not in tried and time.monotonic() < end:
                tried.add(candidate)
                if sound(candidate) and fails(candidate):
                    text = candidate
                    break
        else:
            break
    return text


def smaller(text: str) -> Iterator[str]:
    """Programs one step smaller: without some lines or items, with an expression replaced by a part of it, and so on.

    Many of them are nonsense: `sound` tells.
    """
    tree = ast.parse(text)
    nodes = list(ast.walk(tree))

    def edited(at: int, name: str, low: int, high: int, *new: Any) -> Iterator[str]:
        """With new items for some of a list that a node has."""
        clone = copy.deepcopy(tree)
        node = list(ast.walk(clone))[at]
        for field_ in ("keys", "values") if isinstance(node, ast.Dict) else (name,):
            getattr(node, field_)[low:high] = new
        yield from tidied(clone)

    def lists(kind: Any) -> Iterator[tuple[int, str, list[Any]]]:
        for at, node in enumerate(nodes):
            for name, value in ast.iter_fields(node):
                if isinstance(value, list) and value and isinstance(value[0], kind):
                    yield at, name, value

    for width in (8, 4, 2, 1):
        for at, name, body in lists(ast.stmt):
            for high in range(len(body), width - 1, -1):
                yield from edited(at, name, high - width, high)
    for at, name, body in lists(ast.stmt):
        for k, s in enumerate(body):
            if isinstance(s, (ast.With, ast.For)):
                yield from edited(at, name, k, k + 1, *s.body)
    for at, name, items in lists((ast.expr, ast.arg)):
        for k in range(len(items) if len(items) > 1 else 0):
            yield from edited(at, name, k, k + 1)
    for at, node in enumerate(nodes):  # an expression becomes one of its parts
        for name, value in ast.iter_fields(node):
            for k, whole in enumerate(value if isinstance(value, list) else [value]):
                for part in parts(whole):
                    clone = copy.deepcopy(tree)
                    copied = list(ast.walk(clone))[at]
                    if isinstance(value, list):
                        getattr(copied, name)[k] = part
                    else:
                        setattr(copied, name, part)
                    yield from tidied(clone)
    for at, node in enumerate(nodes):  # what is read once is put there, numbers get smaller
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            loads = [m for m in nodes if isinstance(m, ast.Name) and m.id == node.targets[0].id]
            if len(loads) == 2:
                yield from tidied(Named(node.targets[0].id, node.value).visit(copy.deepcopy(tree)))
        if isinstance(node, ast.Constant) and type(node.value) is int:
            for less in dict.fromkeys((1, 2, node.value // 2, node.value - 1)):
                if 0 < less < node.value:
                    clone = copy.deepcopy(tree)
                    list(ast.walk(clone))[at].value = less  # type: ignore[attr-defined]
                    yield from tidied(clone)


def parts(node: Any) -> list[ast.expr]:
    """Expressions that may stand for the one that they are in."""
    if isinstance(node, ast.Call):
        return [*(parts(node.func) if isinstance(node.func, ast.Attribute) else []), *node.args]
    if isinstance(node, (ast.Attribute, ast.Subscript)):
        return [node.value]
    return [m for m in ast.iter_child_nodes(node) if isinstance(m, ast.expr)] if isinstance(node, ast.expr) else []


class Named(ast.NodeTransformer):
    """The same without an assignment, and with its value wherever the name is read."""

    def __init__(self, name: str, value: ast.expr) -> None:
        self.name, self.value = name, value

    def visit_Assign(self, node: ast.Assign) -> Any:
        target = node.targets[0]
        return None if isinstance(target, ast.Name) and target.id == self.name else self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> Any:
        return copy.deepcopy(self.value) if node.id == self.name and isinstance(node.ctx, ast.Load) else node


def tidied(tree: ast.Module) -> Iterator[str]:
    """As text, without other names for the same, and what nothing reads: modules, inputs, sizes and stages."""
    try:
        stored = Counter(m.id for m in ast.walk(tree) if isinstance(m, ast.Name) and isinstance(m.ctx, ast.Store))
        for s in list(ast.walk(tree)):
            names = [*s.targets, s.value] if isinstance(s, ast.Assign) else []
            if names and all(isinstance(m, ast.Name) and stored[m.id] < 2 for m in names):
                tree = Named(names[0].id, names[1]).visit(tree)  # type: ignore[attr-defined]
        first, stages, *header, forward = tree.body
        words = set(re.findall(r"\w+", "\n".join(map(ast.unparse, forward.body))))  # type: ignore[attr-defined]
        arguments = forward.args  # type: ignore[attr-defined]
        arguments.args = [a for a in arguments.args if a.arg in words | {"self"}]
        header = [s for s in header if s.targets[0].id in words]  # type: ignore[attr-defined]
        left = {a.arg for a in arguments.args} | words
        table = ast.literal_eval(stages.value)  # type: ignore[attr-defined]
        root = ", ".join(p for p in table[""].split(", ") if p.split("=")[0] in left)
        table = {"": root, **{k: v for k, v in table.items() if k in words}}
        rest = "\n".join([f"stages = {table!r}", *map(ast.unparse, header), ast.unparse(forward)])
        words = set(re.findall(r"\w+", rest))
        sizes = [(a, b) for a, b in zip(first.targets[0].elts, first.value.elts) if a.id in words]  # type: ignore[attr-defined]
        names, values = (", ".join(map(ast.unparse, column)) for column in zip(*sizes))
        yield f"{names}, = {values},\n{rest}\n"
    except (AttributeError, ValueError, KeyError, TypeError):
        return  # no program any more


# --- on request -------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], epilog="Failures are shrunk and printed.")
    parser.add_argument("program", nargs="*", help="files with programs, instead of random ones")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the first; the next has the next")
    parser.add_argument("--size", type=int, default=2, help="2: a dozen statements")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 3, 4])
    parser.add_argument("--check", type=int, default=10, help="dsp.check for one program of so many; 0: none")
    parser.add_argument("--shrink", type=float, default=90, help="seconds for each failure")
    parser.add_argument("--strays", action="store_true", help="programs of short dims that leave their plan")
    parser.add_argument("--each", type=int, default=1, help="failures of a kind to shrink")
    options = parser.parse_args()
    torch.set_num_threads(1)
    ranks.TIMEOUT = 10 * PATIENCE
    ranks.start_server()
    pool = ranks.Pool(4, parts=True)
    judge = Judge(pool)
    kinds, reasons, seen = Counter[str](), Counter[str](), Counter[Any]()
    started = time.monotonic()
    named = [(path, Path(path).read_text()) for path in options.program]
    if not named:
        named = [(str(s), "") for s in range(options.seed, options.seed + options.count)]
    try:
        for start in range(0, len(named), 20):
            how = options.size, options.strays
            some = [(name, text or generate(int(name), *how)) for name, text in named[start : start + 20]]
            asked = [not options.program and options.check > 0 and int(name) % options.check == 0 for name, _ in some]
            for n in options.ranks:
                for (name, text), verdict in zip(some, judge([t for _, t in some], n, asked)):
                    kinds[verdict.kind] += 1
                    reasons[refusal(verdict.reason)] += verdict.kind == "refused"
                    if options.program:
                        print(f"{name} on {n} ranks: {verdict.kind} {verdict.reason}", flush=True)
                    seen[verdict.key] += verdict.failed
                    if verdict.failed and seen[verdict.key] <= options.each:
                        report(judge, name, text, n, verdict, options.shrink)
            done, seconds = min(start + 20, len(named)), time.monotonic() - started
            print(f"{done} programs, {seconds:.0f} s: {dict(kinds)}", flush=True)
    finally:
        pool.stop()
    print(f"refused: {kinds['refused'] / max(kinds.total(), 1):.1%}")
    for reason, count in (+reasons).most_common(25):
        print(f"  {count:5d}  {reason}")
    for key, count in (+seen).most_common():
        print(f"{count:5d}  {' '.join(key)}")
    sys.exit(any(kinds[k] for k in kinds if k not in ("ok", "refused")))


def refusal(reason: str) -> str:
    """A refusal without its shapes."""
    return re.sub(r"\[[^]]*\]( sharded along dim \d+)?(, )?|'[^']*'|\d+", "", reason.split(". ")[0])[:150]


def report(judge: Judge, name: str, text: str, n: int, verdict: Verdict, seconds: float) -> None:
    print(f"\n--- {verdict.kind}: program {name} on {n} ranks: {verdict.reason}", flush=True)
    small = shrunk(text, lambda t: next(judge([t], n)).key == verdict.key, seconds)
    final = next(judge([small], n))
    print(f"{small}# {final.kind}: {final.reason}\n", flush=True)


if __name__ == "__main__":
    from tools.fuzz.models import main

    main()
