"""The commands `dsp-train` and `dsp-infer`: train.py, infer.py and configs/, which links here bring into a wheel.

dsp-train configs/demo.yaml
dsp-launch --nproc-per-node 2 -m zoo.cli.train configs/demo.yaml
"""

import sys

from torch.distributed.elastic.multiprocessing.errors import record


def train() -> int | None:
    from zoo.cli.train import main

    return record(main)(sys.argv[1:])


def infer() -> int | None:
    from zoo.cli.infer import main

    return record(main)(sys.argv[1:])
