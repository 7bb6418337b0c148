"""discover: find the dims that each submodule of a model computes over, as a stages dict.

1. A copy of the model runs once on the example inputs. The record has its operations, and the submodule calls that
   contain them (`dsp.discovery.recording`).
2. Passes over the record follow every dim of the inputs, by the rules that will run on shards (`dsp.discovery.dims`).
   So it is known which dims of a submodule's tensors are the same, and which are folds.
3. Each submodule is called again on slices of its own inputs (`dsp.verify.slices`), to find the dims, and the tensors
   to slice together, for which f(slice) is the slice of f. Its outputs carry these dims on (`dsp.discovery.search`).
4. Reshapes show folds, and dims that meet are the same; passes are repeated until they show nothing new.
5. Top-down, the largest submodules that leave a dim free become stages. Submodules that act on each position
   separately, by operations that glue can run, stay glue (`dsp.discovery.choice`, `patterns`).
6. Plans decide last: a stage that costs more than its parts, as smaller stages or as glue, is taken apart.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from dsp.comm import randomness
from dsp.comm.collectives import inexact
from dsp.comm.layout import Cut
from dsp.core.reads import DATA_ERRORS, place_of
from dsp.core.skeleton import Skeleton
from dsp.core.torch_calls import GlueError
from dsp.discovery.calls import ModuleCall
from dsp.discovery.patterns import Patterns
from dsp.discovery.repeats import Repeats
from dsp.discovery.search import Search
from dsp.discovery.shapes import Shapes
from dsp.report.plan import Goal, plan_stages
from dsp.stages.known import stages_of
from dsp.stages.notation import NotationError
from dsp.stages.parts import call_part
from dsp.support.formatting import Moving, number_of
from dsp.support.private import FakeTensorMode, fake_tensor, pytree
from dsp.support.python_state import World
from dsp.support.tensors import remade, tensors_in
from dsp.verify.slices import Probe, copies

log = logging.getLogger("dsp")

SIZES = (2, 4)  # ranks to plan for


WITHOUT = "found only by the rules, as meta tensors have no numbers: what has no rule counts as computed over"
ONE = "for these inputs' batch of one: pass two samples for stages that take any batch"


class Stages(dict[str, str]):
    """Submodule pattern to stage string. It prints as Python code, with comments on what was not verified."""

    notes: Sequence[str] = ()

    def __repr__(self) -> str:
        notes, stages = (f"# {note}" for note in self.notes), (f"{json.dumps(k)}: {json.dumps(self[k])}," for k in self)
        return "\n    ".join(["{", *notes, *stages]) + "\n}"

    __str__ = __repr__


def discover(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    seed: int = 0,
    progress: bool | None = None,
) -> dict[str, str]:
    """Find the dims that each submodule of `model` computes over: the stages for `parallelize`, `plan` and `check`.

    args, kwargs: example inputs of its forward: small real tensors with at least two of everything that may grow
    (samples, frames, tokens). Sizes that all differ make the result easiest to read. One sample is enough if stages
    need not take more. The tensor with the most dims (the first such) counts as the sequence, and its first dim as the
    batch if the model is independent along it. The root pattern names only dims that are sharded. ``print`` shows the
    dict as Python code.

    Dims are identified not by size, but by following them from the inputs through every operation between submodules,
    by the rules of glue. Only dims of tensors that cannot be followed are matched by size, and then tested.
    Independence is tested as f(slice) == slice of f, for uneven slices, on a copy of the model in float64, in train
    mode, with random parameters (so that no zero-initialised gate hides anything); random numbers that a submodule
    draws are sliced, too. The model, its buffers and the random state are left as they were.

    Plans for one sample of these inputs, on two ranks and on four, decide which submodules become stages: first as
    little work as possible is replicated, then as few bytes as possible are sent. The choice is right for real lengths
    in the same proportions.

    A model or inputs on the meta device may have their real sizes. As there are no numbers to test, a submodule counts
    as independent along a dim if the rules of glue say so for each operation in it, and if on a slice it makes the same
    operations. A submodule with an operation without a rule counts as computing over the dim.

    Among layers that are alike (in class, configuration and sizes, called with tensors of the same shapes) two run, and
    plans are made with two. ``print`` names what was not verified for either reason; `check` verifies it.

    progress: whether to report progress on stderr, in one line that is overwritten; by default on a terminal.

    Raise ValueError if the inputs do not tell enough, or if no dim is left to shard; `GlueError` if an operation
    outside any submodule cannot run on shards. The search takes some dozen forwards per submodule.
    """
    kwargs = dict(kwargs or {})
    args = (args,) if isinstance(args, Tensor) else tuple(args)
    _inspect(args, kwargs)
    tensors = [*tensors_in((args, kwargs)), *model.parameters(), *model.buffers()]
    cuda = sorted({t.device.index for t in tensors if t.device.type == "cuda"})
    bare = any(t.is_meta for t in tensors)
    world = World(model, args, kwargs, data=True, skip=tensors)
    with world, Moving("discover", progress) as line, torch.random.fork_rng(devices=cuda):
        for thin in (True, False):  # if skipped layers turn out not to be alike, all layers run
            randomness.seed(seed)
            planned, search, root = _searched(model, (args, kwargs), (bare, thin), seed, line.say)
            if search.repeats.keeps_dims(root):
                break
        stages = cheapest(planned, search, root, *one_sample(search, root, args, kwargs))
    one = [ONE] if root.shapes[search.main][0] == 1 else []
    stages.notes = [*([WITHOUT] if bare else []), *one, *search.repeats.notes()]
    return stages


def _searched(
    model: nn.Module, arguments: tuple[Any, Any], options: tuple[bool, bool], seed: int, tell: Callable[[str], None]
) -> tuple[nn.Module, Search, ModuleCall]:
    """A copy of the model to plan with, the search, and its root call.

    options: whether tensors have no data, and whether to skip layers that are alike.
    """
    (bare, thin), planned = options, Skeleton(lambda t: t, {}, ()).of(model)
    with torch.no_grad():
        mode, copy, inputs = _without_data(model, arguments) if bare else _randomised(model, *arguments)
        with mode:
            try:
                repeats = Repeats(copy, inputs, [planned]) if thin else Repeats()
                search = Search(copy, inputs, seed, repeats, Shapes if bare else Probe, tell)
                return planned, search, search.settle()
            except DATA_ERRORS as error:
                raise ValueError(
                    f"the forward of {type(model).__name__} depends on the values of tensors: {place_of(error)}. Meta "
                    "tensors have none: build it, and its inputs, on a real device and with small sizes"
                ) from None


def cheapest(model: nn.Module, search: Search, root: ModuleCall, args: Any, kwargs: Any) -> Stages:
    """The stages with the cheapest plans: a stage is taken apart, into smaller stages or glue, if plans get cheaper."""
    inputs = {b.param: b.tensor.numel() * b.tensor.element_size() for b in search.signature.bind(args, kwargs)[1]}

    def cost(stages: Stages) -> tuple[float, int]:
        """The share of work that is replicated, rounded to hundredths, and the bytes sent."""
        search.tell(f"{number_of(len(stages) - 1, 'pattern')} of stages, planned")
        matches, pattern = stages_of(model, stages)
        goals = [Goal(n, gather_output=False, batch=False) for n in SIZES]
        plans = [plan_stages(model, matches, pattern, args, kwargs, goal) for goal in goals]
        alone = sum(p.flops_alone for p in plans)
        sent = sum(sum(p.bytes.values()) for p in plans)
        for p in plans:  # an input left replicated suits the first layer only: later ones would gather and split
            sent += sum(2 * inputs[k] * (p.size - 1) // p.size for k, cut in p.entry.items() if cut is None)
        return round(sum(p.flops_whole for p in plans) / alone, 2) if alone else 1.0, sent

    patterns = Patterns(search, root)
    stages = Stages(patterns.stages())
    try:
        best = cost(stages)
    except (NotationError, GlueError) as reason:
        text = f"discover found\n{stages}\nbut between these stages: {reason.args[0]}"
        raise type(reason)(text).with_traceback(reason.__traceback__) from None
    except Exception as reason:  # a forward that reads its data cannot be planned ahead
        log.info("discover: not planned ahead: %s", reason)
        return Stages(patterns.everywhere())
    better = True
    while better:
        better = False
        groups = patterns.repeated()
        idle = frozenset().union(*(g for g in groups if not any(patterns.chosen[path].groups for path in g)))
        for group in dict.fromkeys((idle, *groups)):
            if not group or not group <= patterns.texts.keys():
                continue
            try:
                finer = Patterns(search, root, patterns.opened | group)
                price = cost(Stages(finer.stages()))
            except (ValueError, GlueError):  # the parts have no patterns
                continue
            # a stage that runs replicated is kept only if it saves more than a thousandth of the bytes
            least = (price[0], price[1] * 0.999) if group <= idle and best[0] < 1 else price
            if least < best:
                best, patterns, better = price, finer, True
    free = {d for node in patterns.chosen.values() for d in node.free()} - patterns.batch
    if best[0] == 1 and patterns.chosen and not free:
        over = ", ".join(list(patterns.chosen)[:3])
        raise ValueError(
            f"discover found no dim to shard in {type(model).__name__}{' but the batch' * bool(search.batch)}: {over} "
            f"compute{'s' * (len(patterns.chosen) == 1)} over all{' other' * bool(search.batch)} dims of tensors. "
            "Dynamic sequence parallelism needs stages that leave a sequence dim free, such as attention within each "
            "frame and attention across frames"
        )
    return Stages(patterns.everywhere())


def one_sample(search: Search, root: ModuleCall, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The example inputs with a batch of one, so that no plan can shard the batch."""
    n = root.group(search.main, Cut(0))
    if n is None or not search.batch:
        return args, kwargs
    group = root.groups[n]
    call = call_part(search.signature, args, kwargs, group.cuts, group.size, 0, 1)
    return call.args, call.kwargs


def _inspect(args: Any, kwargs: Any) -> None:
    """Raise ValueError for inputs from which dims cannot be found."""
    tensors = tensors_in((args, kwargs))
    if not tensors:
        raise ValueError("discover needs example inputs: the tensors that the model's forward takes, as args or kwargs")
    for t in tensors:
        if not t.numel():
            raise ValueError(
                f"discover got an input {tuple(t.shape)} without elements: "
                "pass at least two of everything that may grow: samples, frames, tokens"
            )
        counts = not inexact(t) and t.dtype != torch.bool
        if counts and not t.is_meta and t.ndim > 1 and t.numel() > 1 and (t == t.flatten()[0]).all():
            raise ValueError(
                f"discover got an integer input {tuple(t.shape)} whose elements are all {t.flatten()[0].item()}, "
                "so that they cannot be told apart; pass values that differ"
            )


def _without_data(model: nn.Module, arguments: Any) -> tuple[Any, nn.Module, Any]:
    """The fake tensor mode, a copy of the model in train mode, and inputs, all without data."""
    mode, fakes = FakeTensorMode(allow_non_fake_inputs=True), dict[int, Tensor]()

    def fake(t: Tensor) -> Tensor:
        return fakes.setdefault(id(t), fake_tensor(mode, t, t.dtype).requires_grad_(False))

    copy = Skeleton(fake, {}, ()).of(model).train()
    return mode, copy, remade(arguments, fake)


def _randomised(model: nn.Module, args: Any, kwargs: Any) -> tuple[Any, nn.Module, Any]:
    """An empty context, a copy of the model in train mode with random parameters, and inputs varied at random, so that
    equal elements hide no dependence."""
    first: Exception | None = None
    for _, clone, a, k in copies(model, args, kwargs):
        clone.train()
        for boldly in (True, False):
            if boldly:
                ra, rk = pytree.tree_map_only(Tensor, _vary, (a, k))
                for p in clone.parameters():
                    if inexact(p):
                        p.copy_(torch.randn_like(p) / max(1, p[0].numel() if p.ndim > 1 else 1) ** 0.5)
            else:  # for a forward that takes roots or logarithms: stay near the model's own parameters
                ra, rk = a, k
                for p, q in zip(clone.parameters(), model.parameters()):
                    if inexact(p):
                        p.copy_(q.detach() + torch.randn_like(p) * 0.02)
            try:
                state = {n: b.clone() for n, b in clone.named_buffers()}
                copied = remade((ra, rk), torch.clone)
                out = tensors_in(clone(*copied[0], **copied[1]))
                for n, b in clone.named_buffers():
                    b.copy_(state[n])
            except Exception as reason:
                first = first or reason
                continue
            if all(t.isfinite().all() for t in out if inexact(t)):
                return nullcontext(), clone, (ra, rk)
    if first is not None:
        raise first
    raise ValueError("discover: the model returns numbers that are not finite on these inputs")


def _vary(t: Tensor) -> Tensor:
    if inexact(t):
        return t + torch.randn_like(t)
    if t.dtype == torch.bool and t.numel() > 1 and (t == t.flatten()[0]).all():
        varied = torch.rand(t.shape, device=t.device) < 0.5
        varied.select(-1, 0).fill_(True)  # every row of a mask keeps at least one position
        return varied
    return t
