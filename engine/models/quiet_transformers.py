"""Silence of ``transformers`` while Tidegate or its examples load a model with it.

Its progress bars and warnings are about weights that the caller checks by itself.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Show only errors of ``transformers``, and no progress bars; afterwards as before."""
    import transformers  # takes a second, in which callers may show something else

    log: Any = transformers.utils.logging
    bars_enabled, level = log.is_progress_bar_enabled(), log.get_verbosity()
    log.disable_progress_bar()
    log.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        log.set_verbosity(level)
        if bars_enabled:
            log.enable_progress_bar()
