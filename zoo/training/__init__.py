"""The parts of a training run other than its model: configuration, tasks, checkpoints and records."""

import importlib.util
from collections.abc import Callable
from typing import Any

from zoo.contract import lacks, members


class UserError(ValueError):
    """An error that the user can fix. The trainer prints only its message and exits with code 2.

    Every rank raises it, unless it is marked `alone`: then only this rank has found it.
    """

    printed = False  # whether it has been printed, here or by rank 0

    def __init__(self, text: str, alone: bool = False):
        super().__init__(text)
        self.alone = alone


# optional packages, and the extra of this package that installs each
EXTRAS = {
    "omegaconf": "train", "wandb": "train", "PIL": "train", "sklearn": "train", "Bio": "protein", "av": "video",
    "diffusers": "video", "safetensors": "video", "sentencepiece": "video", "tokenizers": "video",
    "transformers": "video",
}  # fmt: skip


PUBLISHED_AS = {"PIL": "Pillow", "sklearn": "scikit-learn", "Bio": "Biopython", "av": "PyAV"}


def absent(error: ImportError) -> str:
    """The command that installs a missing package; of any other ImportError its own text."""
    package = (error.name or "").partition(".")[0]
    extra = EXTRAS.get(package) if isinstance(error, ModuleNotFoundError) else None
    name = PUBLISHED_AS.get(package, package)
    return f"{name} is not installed: pip install -e '.[{extra}]'" if extra else str(error)


if importlib.util.find_spec("omegaconf") is None:
    raise ModuleNotFoundError("the trainer needs omegaconf, which is not installed: pip install -e '.[train]'")


def user_error(build: Callable[..., Any], *args: Any, prefix: str = "", alone: bool = False, **kwargs: Any) -> Any:
    """Build a part that the configuration names; a ValueError or a missing package becomes a UserError."""
    try:
        return build(*args, **kwargs)
    except (ValueError, ImportError) as cause:
        text = absent(cause) if isinstance(cause, ImportError) else cause
        raise UserError(f"{prefix}{text}", alone) from cause


def complete(value: Any, contract: type, label: str) -> None:
    """Raise a UserError that names and describes every member that a user's part lacks of its contract."""
    wanted = members(contract)
    if missing := lacks(value, contract):
        lines = (f"  {name}: {wanted[name]}" for name in missing)
        raise UserError("\n".join([f"{label} lacks, or has of another type:", *lines]))


def one_line(error: object) -> str:
    """The message of an error, in one line that is safe to print."""
    return printable(" ".join(str(error).split()))[:500]


def printable(text: str) -> str:
    """A text in which what moves a terminal's cursor or colours it is escaped; line breaks and tabs stay."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)
