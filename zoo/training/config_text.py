"""A configuration as YAML that `config.load` reads back, with a comment for every key where a reader wants one."""

import textwrap
from collections.abc import Iterator, Sequence

import yaml

from zoo.training.config import USAGE, Config, defaults, leaves, load


def to_yaml(config: Config, *, comments: bool = False) -> str:
    """The configuration as YAML that `load` reads back; `comments` adds the meaning of every key."""
    lines: list[tuple[str, str]] = []
    section = ""
    for key, value, metadata in leaves(config):
        *outer, name = key.split(".")
        if ".".join(outer) != section:
            section = ".".join(outer)
            lines += [("", ""), (f"{section}:", "")]
        text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000)
        text = f"{name}: {text.removesuffix('...' + chr(10)).rstrip()}"
        choices = f" ({', '.join(metadata['choices'])})" if "choices" in metadata else ""
        lines.append(("  " * len(outer) + text, metadata["help"] + choices))
    return "\n".join(_commented(lines) if comments else (text for text, _ in lines)) + "\n"


def _commented(lines: Sequence[tuple[str, str]], widest: int = 32) -> Iterator[str]:
    """Each line with its note, wrapped, on its right, or above it if the line is long."""
    column = max(len(text) for text, _ in lines if len(text) <= widest) + 2
    for text, note in lines:
        beside = len(text) <= widest
        margin = column if beside else len(text) - len(text.lstrip())
        first, *tail = [f"# {part}" for part in textwrap.wrap(note, 116 - margin)] or [""]
        yield f"{text:<{margin}}{first}".rstrip() if beside else " " * margin + first
        yield from (" " * margin + part for part in tail)
        if not beside:
            yield text


def wants_help(arguments: Sequence[str]) -> bool:
    return any(a in ("-h", "--help", "help", "help=1", "help=true") for a in arguments)


def help_text(arguments: Sequence[str]) -> str:
    """Every key with its comment and its value, as YAML; the defaults if no file is named."""
    settings = [a for a in arguments if not wants_help([a])]
    data = next((a.removeprefix("data.name=") for a in settings if a.startswith("data.name=")), "digits")
    config = load(settings, shown=True) if any("=" not in a for a in settings) else defaults(data)
    usage = "".join(f"# {line}\n" if line else "#\n" for line in USAGE.split("\n"))
    return f"{usage}\n{to_yaml(config, comments=True)}"
