"""A hook of mkdocs: links from a page to a file of the source tree, which no site has, become the file's name."""

import re
from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace `[text](../path)` by the text and the path."""
    return re.sub(r"\[([^\]]+)\]\(\.\./([^)]+)\)", r"\1 (`\2`)", markdown)
