"""torchrun without its report: the job itself says why it ended, once, in the last line on the screen.

    dsp-launch --nproc-per-node 2 train.py configs/demo.yaml [key=value ...]

It takes the arguments of torchrun and starts ranks as torchrun does, on one node at a free port. The exit status is
that of the rank that failed first.
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from socket import gethostname

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

COUNTERS = "/sys/fs/cgroup/memory.events", "/proc/vmstat"
WHERE = "nnodes", "rdzv_backend", "rdzv_endpoint", "master_addr", "master_port"


def main(arguments: Sequence[str]) -> int:
    """Start the ranks, wait for them, and return the exit status."""
    for name in ("torch.distributed.elastic", "torch.distributed.run"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    args = parse_args(list(arguments))
    plain = parse_args(["script"])
    if all(getattr(args, name) == getattr(plain, name) for name in WHERE):
        args.standalone = True  # at torchrun's default port two jobs on one machine would meet
    killed = memory_kills()
    try:
        run(args)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode > 0:
            return failure.exitcode
        name = signal.Signals(-failure.exitcode).name
        why = ": the kernel ended a process because memory ran out" if memory_kills() > killed else ""
        print(
            f"error: rank {rank} (process {failure.pid} on {gethostname()}) was ended by {name}{why}", file=sys.stderr
        )
        return 128 - failure.exitcode
    except SignalException as error:
        return 128 + error.sigval
    return 0


def memory_kills() -> int:
    """The processes that the kernel has ended for want of memory, in this container or on this host; 0: unknown."""
    for path in COUNTERS:
        with suppress(OSError):
            counts = dict(line.split() for line in Path(path).read_text().splitlines())
            if "oom_kill" in counts:
                return int(counts["oom_kill"])
    return 0


def command() -> int:
    """The command dsp-launch."""
    return main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(command())
