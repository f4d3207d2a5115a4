"""Names of the form ``module:name``: checked in the run, imported in worker processes.

The pool and tools check them; the worker and adapters of environment packages import them.
"""

import importlib
import re
from collections.abc import Callable
from typing import Any

from tidegate.errors import ConfigError

_DOTTED = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def checked_name(name: str) -> str:
    """Return the name if it has the form ``module:name``.

    Raises:
        ConfigError: it has another form.
    """
    if not _DOTTED.fullmatch(name):
        raise ConfigError(
            f"{name!r} can't be imported by another process; put the code into a module and name "
            f"it 'package.module:name'"
        )
    return name


def imported(name: str) -> Callable[..., Any]:
    """Import and return the callable that the name refers to.

    Raises:
        ImportError: the module does not exist, or has no such callable.
    """
    module, _, attributes = name.partition(":")
    found: Any = importlib.import_module(module)
    for attribute in attributes.split("."):
        found = getattr(found, attribute, None)
    if not callable(found):
        raise ImportError(
            f"module {module} has no callable {attributes!r}; correct the name 'module:name'"
        )
    return found  # type: ignore[no-any-return]
