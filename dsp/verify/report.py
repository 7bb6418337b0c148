"""The report of `check`."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from dsp.support.formatting import number_of


@dataclass
class Report:
    """The findings of `check`. It is true if nothing is wrong; ``print(report)`` shows what was compared, and errors.

    Every rank has the report. Only rank 0 prints it (with problems: the first rank of each mesh); on other ranks
    ``str(report)`` is empty. `text` is the same on all ranks.

    output, gradients: the largest relative error over all runs, of the outputs and of the gradient of each parameter
    and input. slices: by (stage, dim), the error of f(slice) against the slice of f. calls, modes, sizes: how the model
    was called. problems: one sentence each, naming stage, dim or parameter. uncovered: what was not compared, and why.
    """

    size: int
    dtype: torch.dtype
    output: float | None = None
    gradients: dict[str, float] = field(default_factory=dict)
    slices: dict[tuple[str, str], float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    calls: int = 1
    modes: list[str] = field(default_factory=list)
    sizes: list[str] = field(default_factory=list)
    uncovered: list[str] = field(default_factory=list)
    advice: str = ""  # operations that run replicated, and the remedy
    still: set[str] | None = field(default=None, repr=False)  # parameters and inputs whose gradients were always zero
    silent: bool = field(default=False, repr=False, compare=False)  # another rank prints this report

    @property
    def ok(self) -> bool:
        return not self.problems

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        return "" if self.silent else self.text()

    def text(self) -> str:
        """The report as text, on any rank: what was compared, and the errors."""
        kind = str(self.dtype).removeprefix("torch.")
        lines = [f"check over {number_of(self.size, 'rank')} in {kind}: {'ok' if self else 'NOT OK'}"]
        if self.slices:
            worst = max(self.slices, key=lambda k: self.slices[k])
            lines.append(
                f"  stages by slices: {len(self.slices)} (stage, dim) pairs, largest error {self.slices[worst]:.1e} "
                f"({worst[0]} along {worst[1]})"
            )
        if self.output is not None:
            lines.append(f"  outputs: largest error {self.output:.1e}")
        if self.gradients:
            worst_grad = max(self.gradients, key=lambda k: self.gradients[k])
            zeros = len(self.gradients.keys() & (self.still or set()))
            lines.append(
                f"  gradients: {len(self.gradients) - zeros} tensors{f' ({zeros} more always zero)' if zeros else ''}, "
                f"largest error {self.gradients[worst_grad]:.1e} ({worst_grad})"
            )
        if self.modes and not self.problems:
            sizes = f" at each size ({'; '.join(self.sizes)})" if self.sizes else ""
            lines.append(f"  runs: {number_of(self.calls, 'call')} in each mode ({', '.join(self.modes)}){sizes}")
        lines += [f"  problem: {p}" for p in self.problems]
        lines += [f"  whole: {self.advice}"] if self.advice else []
        return "\n".join(lines + [f"  not covered: {u}" for u in self.uncovered])
