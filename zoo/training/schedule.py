"""What happens at which step. Steps count from 1; step 0 is the state before the first."""

import math
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from zoo.training.config import Optim


def learning_rate(options: Optim, step: int, steps: int) -> float:
    """Linear warm-up to `lr`, then a cosine down to `final` x `lr` after the last step; `step` counts from 1."""
    if step <= options.warmup:
        return options.lr * step / options.warmup
    done = (step - options.warmup) / (steps - options.warmup + 1)
    return options.lr * (options.final + (1 - options.final) * (1 + math.cos(math.pi * done)) / 2)


def due(every: int, step: int, steps: int) -> bool:
    """Whether something that happens every so many steps (0: never), and after the last, happens after `step`."""
    return every > 0 and step > 0 and (step % every == 0 or step == steps)


def ahead(make: Callable[..., Any], wanted: Iterable[tuple[Any, ...]]) -> Any:
    """Yield `make(*args)` for every args wanted, each made in a thread while the one before it is used."""
    with ThreadPoolExecutor(1) as pool:
        pending: Future[Any] | None = None
        for args in wanted:
            following = pool.submit(make, *args)
            if pending:
                yield pending.result()
            pending = following
        if pending:
            yield pending.result()
