"""torchrun without its report: the job itself says why it ended, once, in the last line on the screen.

    dsp-launch --nproc-per-node 2 train.py configs/demo.yaml [key=value ...]
    dsp-launch --nproc-per-node 8 --restarts 3 --min-ranks 6 train.py ...    goes on without the ranks that it loses

It takes the arguments of torchrun and starts ranks as torchrun does, on one node at a free port. The exit status is
that of the rank that failed first.

With `--restarts N` a job that lost a rank, or that ended by an error which is not the user's (status 1), is started
again up to N times, with `resume=true` after its arguments: from its last checkpoint. With `--min-ranks M` on as many
ranks as are left, while these are M or more; otherwise on all.
"""

from __future__ import annotations

import logging
import signal
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from copy import copy
from pathlib import Path
from socket import gethostname

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import determine_local_world_size, get_args_parser, run

FAULT = 1  # exit status of an error that is not the user's
COUNTERS = "/sys/fs/cgroup/memory.events", "/proc/vmstat"
PLACE = "nnodes", "rdzv_backend", "rdzv_endpoint", "master_addr", "master_port"


def main(arguments: Sequence[str]) -> int:
    """Start the ranks, wait for them, and return the exit status."""
    for name in ("torch.distributed.elastic", "torch.distributed.run"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    parser = get_args_parser()
    parser.add_argument("--restarts", type=int, default=0, help="times that a job is started again, with resume=true")
    parser.add_argument("--min-ranks", type=int, help="start again on the ranks that are left, if so many are")
    args, plain = parser.parse_args(list(arguments)), parser.parse_args(["script"])
    try:
        if determine_local_world_size(args.nproc_per_node) < 1:
            raise ValueError(f"expected at least 1, got {args.nproc_per_node}")
    except ValueError as error:
        parser.error(f"--nproc-per-node: {error}")
    if all(getattr(args, name) == getattr(plain, name) for name in PLACE):
        args.standalone = True  # at torchrun's default port two jobs on one machine would meet
    elif args.restarts:
        parser.error("--restarts is for one node; for several, torchrun has --nnodes MIN:MAX --max-restarts")
    status, lost = attempt(args)
    for restart in range(1, args.restarts + 1):
        if not (lost or status == FAULT):
            break
        if lost and args.min_ranks is not None:
            count = determine_local_world_size(args.nproc_per_node) - lost
            if count < args.min_ranks:
                print(f"error: {count} ranks are left, and --min-ranks is {args.min_ranks}", file=sys.stderr)
                break
            args.nproc_per_node = str(count)
        ranks = determine_local_world_size(args.nproc_per_node)
        print(f"restart {restart} of {args.restarts}: on {ranks} ranks, from the last checkpoint", file=sys.stderr)
        args.training_script_args = [*args.training_script_args, *["resume=true"] * (restart == 1)]
        status, lost = attempt(args)
    return status


def attempt(args: Namespace) -> tuple[int, int]:
    """Start the ranks once: the exit status, and the number of ranks that a signal ended."""
    killed = memory_kills()
    try:
        run(copy(args))
    except ChildFailedError as error:
        _, first = error.get_first_failure()
        # ranks that a dead one leaves alone end with FAULT, at times before the launcher has looked
        dead = {rank: f for rank, f in error.failures.items() if f.exitcode < 0 and f.exitcode != -signal.SIGTERM}
        if first.exitcode > 0 and not (dead and first.exitcode == FAULT):
            return first.exitcode, 0
        rank, failure = min(dead.items(), key=lambda item: item[1].timestamp) if dead else error.get_first_failure()
        name = signal.Signals(-failure.exitcode).name
        why = ": the kernel ended a process because memory ran out" if memory_kills() > killed else ""
        print(
            f"error: rank {rank} (process {failure.pid} on {gethostname()}) was ended by {name}{why}", file=sys.stderr
        )
        return 128 - failure.exitcode, len(dead)
    except SignalException as error:
        return 128 + error.sigval, 0
    return 0, 0


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
