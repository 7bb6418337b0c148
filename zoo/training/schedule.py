"""When what is due, and the learning rate of a step. Steps count from 1; step 0 is the state before the first."""

import math

from zoo.training.sections import Optim


def due(every: int, step: int, steps: int) -> bool:
    """Tell whether something that happens every so many steps (0: never), and after the last, happens after `step`."""
    return every > 0 and step > 0 and (step % every == 0 or step == steps)


def learning_rate(options: Optim, step: int, steps: int) -> float:
    """Linear warm-up to `lr`, then what `schedule` says; the last step still has some of what it goes down to.

    cosine, linear: down to `final` x `lr` over all steps that are left. constant: stays. wsd (warm-up, stable, decay;
    Hu et al., 2024, arXiv 2404.06395): stays, and goes down linearly over the last `decay` of all steps.
    """
    lr, shape, final, begins = options.lr, options.schedule, options.final, options.warmup
    stable = steps - round(options.decay * steps)  # the last step before wsd goes down
    if step <= begins:
        return lr * step / begins
    if shape == "wsd":
        begins = max(begins, stable)
    if shape == "constant" or step <= begins:
        return lr
    done = (step - begins) / (steps - begins + 1)
    left = (1 + math.cos(math.pi * done)) / 2 if shape == "cosine" else 1 - done
    return lr * (final + (1 - final) * left)
