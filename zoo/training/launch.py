"""torchrun, less its report: what ends a run is said once, by the run, as the last line on the screen.

    python -m zoo.training.launch --nproc-per-node 2 train.py configs/demo.yaml [key=value ...]

Takes what torchrun takes, and starts the ranks as torchrun does. The exit status is that of the rank that failed first.
"""

import logging
import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run


def main(arguments: Sequence[str]) -> int:
    for name in ("torch.distributed.elastic", "torch.distributed.run"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        run(parse_args(list(arguments)))
    except ChildFailedError as error:
        status = error.get_first_failure()[1].exitcode
        return status if status > 0 else 128 - status
    except SignalException as error:
        return 128 + error.sigval
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
