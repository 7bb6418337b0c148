"""The checks of infer.py's options, for every task."""

import math
import os
from argparse import Namespace
from collections.abc import Sequence

from zoo.training import UserError
from zoo.training.tracking import human_bytes

MOST = 1 << 20  # the largest count, and the most characters of a text


def checked(options: Namespace, trained: Sequence[int] = (1, 1, 1)) -> Namespace:
    """Return the options; a UserError names one that is infinite or NaN, too large for any machine, or not printable.

    `trained`: frames, height and width by default.
    """
    for name, setting in vars(options).items():
        flag = f"--{name.replace('_', '-')}"
        for value in setting if isinstance(setting, list) else [setting]:
            if isinstance(value, float) and not math.isfinite(value):
                raise UserError(f"{flag} {value}: must be a finite number")
            if isinstance(value, int) and not 0 <= value <= (2**63 - 1 if name == "seed" else MOST):
                raise UserError(f"{flag} {str(value)[:30]}: expected 0 to {2**63 - 1 if name == 'seed' else MOST:,}")
            text = str(value)
            if len(text) > MOST or not text.replace("\n", " ").isprintable():
                raise UserError(f"{flag} {text[:40]!r}: expected printable characters, at most {MOST:,}")
    lists = (len(getattr(options, name, None) or ()) for name in ("label", "prompt"))
    clips = max(*lists, getattr(options, "clips", 0))
    sizes = [getattr(options, name, it) for name, it in zip(("frames", "height", "width"), trained)]
    need, memory = 3 * clips * math.prod(sizes), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if need > memory:
        raise UserError(
            f"{clips:,} clips of {' x '.join(f'{s:,}' for s in sizes)} pixels are {human_bytes(need)}, and this host "
            f"has {human_bytes(memory)}: ask for fewer or smaller ones"
        )
    return options
