"""The outputs of a call: gathered if asked, or returned as DTensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from dsp.gradients import covered_exit
from dsp.layout import At, Axis
from dsp.notation import StagePattern
from dsp.run.forward import Run
from dsp.sharded import plain
from dsp.tensors import map_tensors, tensors_in

Made = tuple[Tensor, At | bool]  # a local tensor and its layout; for a full tensor, whether it was gathered


def bring_out(run: Run, output: Any, root: StagePattern | None, gathers: bool) -> list[Made]:
    """The tensors of a forward's output as local tensors; sharded ones are gathered if `gathers`."""
    found: list[Made] = []
    for i, t in enumerate(tensors_in(output)):
        run.where = ("output", i, "output")
        shard = run.open(t)
        if shard is None:
            found.append((t, False))
        elif gathers:
            if run.script is not None and i in run.script.outputs:
                run.views.copy_first([shard], [run.script.outputs[i]])
            found.append((run.views.move(shard, None), True))
        else:
            found.append((plain(shard), shard.at))
    if root is not None:
        root.refuse_outputs([t.shape for t, _ in found])
    return found


def hand_out(axis: Axis, output: Any, made: Sequence[Made], witness: Any = None) -> Any:
    """The output with its tensors replaced by `made`; `witness`: a hook for the gradients of all of them."""
    finished = []
    for t, lies in made:
        if isinstance(lies, At):
            t = axis.wrap(t, lies.cut, lies.shape, guard=True)
        elif lies:
            t = covered_exit(t)
        if witness is not None and t.requires_grad and t.grad_fn is not None:
            t.register_hook(witness)
        finished.append(t)
    return map_tensors(output, finished)
