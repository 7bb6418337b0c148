"""The commands `dsp-train` and `dsp-infer`: train.py and infer.py, which a wheel has in this folder, with the configs.

dsp-train configs/demo.yaml
dsp-launch --nproc-per-node 2 -m zoo.cli.train configs/demo.yaml
"""

from pathlib import Path

__path__.append(str(Path(__file__).resolve().parents[2]))  # in a checkout the two files stand there


def train() -> int:
    import sys

    from zoo.cli.train import main, record

    return record(main)(sys.argv[1:])


def infer() -> int:
    import sys

    from zoo.cli.infer import main, record

    return record(main)(sys.argv[1:])
