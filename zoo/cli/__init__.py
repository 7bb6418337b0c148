"""The commands `dsp-train` and `dsp-infer`. Links in this folder bring train.py, infer.py and configs/ into a wheel.

dsp-train configs/demo.yaml
dsp-launch --nproc-per-node 2 -m zoo.cli.train configs/demo.yaml
"""

import sys
from importlib import import_module

from torch.distributed.elastic.multiprocessing.errors import record


def train() -> int | None:
    return command("zoo.cli.train")


def infer() -> int | None:
    return command("zoo.cli.infer")


def command(module: str) -> int | None:
    """Run a module's `main` on the command line; a missing package is an error in one line."""
    try:
        main = import_module(module).main
    except ModuleNotFoundError as error:
        sys.exit(f"error: {error}")
    return record(main)(sys.argv[1:])
