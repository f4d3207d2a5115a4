"""Which package does an adapter need, and is it there? Imported when an environment is made."""

import importlib
from typing import Any

from tidegate.errors import PackageMissing


def package(name: str, *, distribution: str) -> Any:
    """The module, imported.

    Raises:
        PackageMissing: it, or something that it needs, is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise PackageMissing(distribution, str(error)) from error
