"""Import of optional packages, with an error that says how to install them.

The adapters in this folder call :func:`package` when an environment is created.
"""

import importlib
from typing import Any

from tidegate.errors import PackageMissing


def package(name: str, *, distribution: str) -> Any:
    """Import and return a module.

    Raises:
        PackageMissing: the module, or one that it needs, is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise PackageMissing(distribution, str(error)) from error
