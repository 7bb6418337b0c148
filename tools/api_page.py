"""Writes docs/api.md from the docstrings of what dsp and zoo export: python tools/api_page.py"""

import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import dsp
import zoo

ORDER = {
    "dsp": """
        parallelize plan check discover choose without_data split switch start_switch gather mean hand_over count_comm
    """.split(),
    "zoo": "create sizes list_models from_reference from_export load".split(),
}


def page() -> str:
    lines = [
        "# API",
        "",
        "Every public name, by its docstring; `python tools/api_page.py` writes this page. How they are used:",
        "[your own model](your-own-model.md), [planning](planning.md), [the zoo](zoo.md).",
        "",
    ]
    for module in (dsp, zoo):
        names = [*ORDER[module.__name__], *(n for n in module.__all__ if n not in ORDER[module.__name__])]
        lines += [f"## {module.__name__}", ""]
        for name in names:
            lines += [*entry(f"{module.__name__}.{name}", getattr(module, name)), ""]
    for module in (dsp.embedded, dsp.hardware):
        lines += [f"## {module.__name__}", ""]
        for name in module.__all__:
            value = getattr(module, name)
            if value is not getattr(dsp, name, None) and (isinstance(value, Mapping) or inspect.getdoc(value)):
                lines += [*entry(f"{module.__name__}.{name}", value), ""]
    return "\n".join(lines).rstrip() + "\n"


def entry(name: str, value: Any) -> Iterator[str]:
    if not (inspect.isfunction(value) or inspect.isclass(value)):
        text = inspect.getdoc(value) if inspect.ismodule(value) else f"A table: {', '.join(value)}."
        yield f"**`{name}`**"
        yield ""
        yield from text.split("\n\n")[0].splitlines()
        return
    try:
        signature = re.sub(r"<factory>|<[^>]*>", "...", str(inspect.signature(value, eval_str=False)))
    except ValueError:
        signature = ""
    plain = signature.replace("'", "").replace("collections.abc.", "").replace("torch.nn.modules.module.", "nn.")
    shown = plain if len(plain) < 400 else "(...)"
    yield f"**`{name}{shown}`**"
    yield ""
    yield from (inspect.getdoc(value) or "").splitlines()
    for method, found in vars(value).items() if inspect.isclass(value) else ():
        if not method.startswith("_") and inspect.isfunction(found) and inspect.getdoc(found):
            yield ""
            yield f"`.{method}{str(inspect.signature(found)).replace(chr(39), '')}`: {inspect.getdoc(found)}"


if __name__ == "__main__":
    (Path(__file__).resolve().parents[1] / "docs/api.md").write_text(page())
