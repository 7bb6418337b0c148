"""Forward and backward of `zoo.scan` on one CPU core, by length of its chunks, against its definition.

    python benchmarks/micro/scan.py [rounds=5]

Three shapes of a model of hidden size 768, float32: Mamba-2 (24 heads of 64 channels, state 128), RWKV-6 (12 heads of
64) and Mamba-1 (1536 channels, state 16). Milliseconds, the best of the rounds, which go through all columns in turn:
a shared machine is noisy.
"""

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from zoo.scan import recurrence, scan

CHUNKS = (8, 16, 32, 64, 128)


def mamba2(n: int) -> list[Tensor]:
    return [torch.randn(1, n, 1, 128), torch.randn(1, n, 1, 128), torch.randn(1, n, 24, 64), -torch.rand(1, n, 24)]


def rwkv6(n: int) -> list[Tensor]:
    return [*torch.randn(3, 1, n, 12, 64), -torch.rand(1, n, 12, 64), torch.randn(12, 64)]


def mamba1(n: int) -> list[Tensor]:
    return [*torch.randn(2, 1, n, 1, 16), torch.randn(1, n, 1536, 1), -torch.rand(1, n, 1536, 16)]


def milliseconds(run: Callable[..., Tensor], args: list[Tensor]) -> float:
    args = [x.requires_grad_() for x in args]
    start = time.perf_counter()
    run(*args).sum().backward()
    return 1e3 * (time.perf_counter() - start)


def main(rounds: int = 5) -> None:
    torch.set_num_threads(1)
    columns = {"recurrence": recurrence, **{f"chunk {chunk}": partial(scan, chunk=chunk) for chunk in CHUNKS}}
    print("".join(f"{name:>12}" for name in ("", "positions", *columns)))
    for shape in (mamba2, rwkv6, mamba1):
        for n in (256, 1024):
            times = [[milliseconds(run, shape(n)) for run in columns.values()] for _ in range(rounds)]
            best = [min(column) for column in zip(*times)]
            print(f"{shape.__name__:>12}{n:>12}" + "".join(f"{value:>12.1f}" for value in best), flush=True)


if __name__ == "__main__":
    main(*(int(a.removeprefix("rounds=")) for a in sys.argv[1:]))
