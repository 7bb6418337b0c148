"""The commands `dsp-train` and `dsp-infer`: train.py and infer.py, which a wheel has in this folder, with the configs.

dsp-train configs/demo.yaml
torchrun --nproc-per-node 2 -m zoo.cli.train configs/demo.yaml
"""

from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]  # in a checkout the two files stand there
__path__.append(str(ROOT))


def known(arguments: list[str]) -> list[str]:
    """A configuration that does not exist where the command runs, but came with the package, by its path there."""
    return [
        str(HERE / a) if a.startswith("configs/") and not Path(a).exists() and (HERE / a).is_file() else a
        for a in arguments
    ]


def train() -> int:
    import sys

    from zoo.cli.train import main, record  # type: ignore[import-not-found]

    return record(main)(known(sys.argv[1:]))


def infer() -> int:
    import sys

    from zoo.cli.infer import main, record  # type: ignore[import-not-found]

    return record(main)(sys.argv[1:])
