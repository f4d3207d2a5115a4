"""Loads the MkDocs hooks of `docs/hooks/`, which are files and no package, for their tests."""

import functools
import importlib.util
from pathlib import Path
from typing import Any

HOOKS = Path(__file__).parents[1] / "docs" / "hooks"


@functools.cache
def hook(name: str) -> Any:
    """Import `docs/hooks/NAME.py`."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", HOOKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def generated_pages() -> dict[str, str]:
    """Return the Markdown of the pages that exist on the site only, by path under docs/."""
    pages: dict[str, str] = hook("reference").pages()
    return pages
