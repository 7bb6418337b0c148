"""Values as they are written, in a file or on the command line: the type of an option says how each is read.

YAML alone reads `name: 8.10` as the number 8.1, `2026_11_29` as 20261129 and `yes` as true.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any, get_args

import yaml
from omegaconf import OmegaConf


class Text(str):
    """A value without quotes: a text for an option that takes texts, for any other what YAML reads in it."""

    __slots__ = ()


class Loader(yaml.SafeLoader):  # type: ignore[misc]
    """A loader that leaves values without quotes as `Text`, and refuses a key that stands twice in a mapping."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if len(set(keys)) < len(keys):
            key = Counter(keys).most_common(1)[0][0]
            raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} stands here twice", node.start_mark)
        return super().construct_mapping(node, deep)

    def text(self, node: yaml.ScalarNode) -> str:
        return node.value if node.style else Text(node.value)


for kind in ("str", "int", "float", "bool", "timestamp"):
    Loader.add_constructor(f"tag:yaml.org,2002:{kind}", Loader.text)


def parse(text: str) -> Any:
    """The mappings, lists and values of a YAML text; yaml.YAMLError or RecursionError if it is none."""
    return yaml.load(text, Loader)


def integers(value: Any) -> Iterator[int]:
    """The integers in a value, and in its lists and mappings."""
    if isinstance(value, int):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from integers(each)


def typed(value: Any, kind: Any) -> Any:
    """A value for an option of type `kind`: str, list[str], ... ValueError: a number in base eight or sixty."""
    if isinstance(value, Text) and kind is not str:
        value = parse(value)
    if isinstance(value, Text):
        return str(value) if kind is str else _scalar(value)
    each = get_args(kind)[-1] if get_args(kind) else Any  # the type of the elements
    if isinstance(value, dict):
        return {str(key): typed(part, each) for key, part in value.items()}
    return [typed(part, each) for part in value] if isinstance(value, list) else value


def _scalar(text: Text) -> Any:
    """A number, a truth or a text, as OmegaConf reads it."""
    read: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))
    value = read["value"]
    leading_zero = isinstance(value, int) and text.lstrip("+-").isdecimal() and int(text) != value
    if leading_zero or (isinstance(value, int | float) and ":" in text):
        raise ValueError(f"YAML reads this number as {value}; write it without leading zeros and colons")
    return value
