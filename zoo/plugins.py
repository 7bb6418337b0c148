"""Parts from outside of the zoo: a user's own model, data set or task, by the name that the user wrote.

Only modules that the user names, in the configuration file or on the command line, are imported.
"""

import importlib
import os
import sys
from importlib.metadata import entry_points
from typing import Any


def load_plugin(name: str, group: str) -> Any:
    """The object that a name stands for: ``package.module:Class``, ``package.module``, or an entry point of `group`.

    Modules are looked for among the installed packages, then in the current folder. Raises ValueError where there is
    none; an error that the module raises during its import is not changed.
    """
    for entry in entry_points(group=group, name=name):
        return entry.load()
    path, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in (*path.split("."), *attribute.split(".") * bool(attribute))):
        raise ValueError(f"{name!r} cannot be imported by Python; write package.module:Class")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        target: Any = importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{path}.".startswith(f"{error.name}."):
            raise  # the missing module is one that `path` imports
        raise ValueError(
            f"{name}: there is no module {error.name!r}, neither installed nor in the folder {os.getcwd()}"
        ) from None
    for part in attribute.split(".") * bool(attribute):
        if not hasattr(target, part):
            classes = sorted(key for key, value in vars(target).items() if isinstance(value, type))
            raise ValueError(f"{name}: {path} has no {part!r}; classes in it: {', '.join(classes) or 'none'}")
        target = getattr(target, part)
    return target
