"""The record of a forward: what it shows, that no tensor is part of it, and that data change nothing of it."""

import contextlib
import dataclasses
import io
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dsp
from dsp.stages.stage import Stage
from tests.support import toys
from tests.support.records import dims_of_stages, edges_of, problem_of, recorded, regions_of


def small() -> nn.Module:
    """Stages in a checkpoint, views, a write in place, a mask, and something on whole tensors alone."""
    return toys.SpaceTime(in_a_checkpoint, table=nn.Parameter(torch.ones(toys.C, toys.C)))


def in_a_checkpoint(m: toys.SpaceTime, x: Tensor) -> Tensor:
    y = checkpoint(lambda x: m.time(F.gelu(m.space(x))), x, use_reentrant=False)
    out = torch.zeros_like(x) + x
    out[:, :, 1:] = y[:, :, 1:].transpose(1, 2).transpose(1, 2)
    return out @ m.table.softmax(0)


def test_a_record_shows_each_node_with_what_it_reads() -> None:
    plan = dsp.plan(small(), torch.empty(2, 4, 3, toys.C, device="meta"), size=3)
    text = [line.partition("  #")[0] for line in str(plan.record).splitlines()]
    assert text == [
        "%0 [2, 4, 3, 4] = input 'x=b t s c'",
        "%1 [2, 4, 3, 4] = stage space 'b t [s c]' (%0)",
        "%2 [2, 4, 3, 4] = gelu(%1)",
        "%3 [2, 4, 3, 4] = stage time 'b [t] s [c]' (%2)",
        "%4 [2, 4, 3, 4] = zeros_like(%0)",
        "%5 [2, 4, 3, 4] = add(%4, %0)",
        "%6 [2, 4, 2, 4] = getitem(%3)",
        "%7 [2, 2, 4, 4] = transpose(%6)",
        "%8 [2, 4, 2, 4] = transpose(%7)",
        "%5 [2, 4, 3, 4] = setitem(%5, %8)",
        "%9 [2, 4, 3, 4] = matmul(%5, [4, 4])",
        "output %9",
    ]
    lines = [line.partition("  # ")[2] for line in str(plan.record).splitlines()]
    assert all(line.startswith("test_record.py:") for line in lines[1:-1])


def test_a_tensor_of_which_the_type_alone_is_read_is_no_operand() -> None:
    model = toys.SpaceTime(lambda m, x: m.space(x).type_as(m.time(x)))
    plan = dsp.plan(model, torch.empty(2, 4, 3, toys.C, device="meta"), size=3)
    *_, cast, _ = str(plan.record).splitlines()
    assert cast.partition("  #")[0] == "%1 [2, 4, 3, 4] = type_as(%1, [0])"


def test_a_record_knows_checkpoints_and_the_options_of_stages() -> None:
    plan = dsp.plan(small(), torch.empty(2, 4, 3, toys.C, device="meta"), size=3)
    assert plan.record is not None
    assert regions_of(plan.record)[:4] == [0, 0, 0, None]
    assert dims_of_stages(plan.record)[0] == ["t", "b"]


def test_data_change_nothing_of_a_record() -> None:
    model, x = small(), torch.randn(2, 4, 3, toys.C)
    fake, real = (recorded(model, (x,), data=data) for data in (False, True))
    assert str(fake) == str(real)
    assert edges_of(fake) == edges_of(real)


def test_a_pass_over_a_record_can_be_made_again() -> None:
    record = recorded(small(), (torch.randn(2, 4, 3, toys.C),), data=False)
    one, two = (problem_of(record) for _ in range(2))
    assert one == two


def held(value: Any, seen: set[int]) -> list[Any]:
    """All that a record holds, but for the model's own stages."""
    if id(value) in seen or isinstance(value, Stage):
        return []
    if isinstance(value, (list, tuple, set)):
        return [x for v in value for x in held(v, seen)]
    if isinstance(value, dict):
        return held([*value.values()], seen)
    seen.add(id(value))
    if dataclasses.is_dataclass(value) or type(value).__name__ == "Record":
        return [value, *held(vars(value), seen)]
    return [value]


def test_no_tensor_is_part_of_a_record() -> None:
    record = recorded(small(), (torch.randn(2, 4, 3, toys.C),), data=True)
    found = held(record, set())
    assert len(found) > 50
    assert not [v for v in found if isinstance(v, (Tensor, nn.Module))]


def test_a_plan_goes_to_another_process_without_its_record() -> None:
    plan = dsp.plan(small(), torch.empty(2, 4, 3, toys.C, device="meta"), size=3)
    sent = pickle.loads(pickle.dumps(plan))
    assert sent == plan
    assert sent.record is None


@pytest.mark.parametrize("fails", [False, True])
def test_a_refusal_names_its_line_though_the_forward_went_on(fails: bool) -> None:
    def read(y: Tensor) -> Tensor:
        wrong = y.as_strided((1,), (1,))
        if fails:
            raise RuntimeError("behind it")
        return wrong

    with pytest.raises(dsp.GlueError, match=r"as_strided\(\) between stages .*\(at test_record.py:\d+\)$"):
        dsp.plan(toys.SpaceTime(lambda m, x: read(m.space(x))), torch.randn(2, 4, 3, toys.C), size=3)


def test_an_operation_has_its_cost_where_it_was_measured() -> None:
    record = recorded(small(), (torch.randn(2, 4, 3, toys.C),), data=False)
    costs = {n.name: n.cost for n in record.nodes if hasattr(n, "cost")}
    assert costs["matmul"].flops == 2 * 2 * 4 * 3 * toys.C * toys.C
    assert costs["gelu"].touched > 0
    assert costs["transpose"].touched == 0


def test_a_gradient_comes_to_what_is_written_after_its_view_was_taken() -> None:
    """Before the view was taken, or after."""

    def written(m: toys.SpaceTime, x: Tensor) -> Tensor:
        y = m.time(m.space(x)) + 1
        view = y[:, :, 1:]
        y.mul_(2)
        return y[:, :, 1:] if m.before else view

    x = torch.empty(2, 4, 3, toys.C, device="meta")
    one, two = (dsp.plan(toys.SpaceTime(written, before=before), x, size=3) for before in (True, False))
    assert one.bytes["backward"] > 0
    assert one.bytes == two.bytes


def test_long_new_zeros_are_sharded_from_the_start_and_contiguous_as_all_that_is_sharded() -> None:
    """Short ones stay plain. The forward is recorded once: what is printed is printed once."""

    def zeros(m: toys.SpaceTime, x: Tensor) -> Tensor:
        table = torch.zeros(3, 4).t()
        out = torch.zeros(2, 3, 4, toys.C).transpose(1, 2)
        print(table.is_contiguous(), out.is_contiguous())
        out[:, 1:] = m.space(x)[:, 1:]
        print(out.is_contiguous(), out.transpose(0, 1).is_contiguous())
        return m.time(out) + table.sum()

    with contextlib.redirect_stdout(io.StringIO()) as said:
        dsp.plan(toys.SpaceTime(zeros), torch.empty(2, 4, 3, toys.C, device="meta"), size=3)
    assert said.getvalue().split() == ["False", "True", "True", "True"]
