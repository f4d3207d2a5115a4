"""Finds what only Python's garbage collector would free: in a run it collects rarely."""

import gc
import types
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def cycles_found() -> Iterator[list[str]]:
    """Yield a list that has, after the block, the functions of Tidegate whose frames were left in
    reference cycles within it, and the kinds of Tidegate's objects."""
    found: list[str] = []
    while gc.collect():  # freeing what tests before have left may leave further garbage
        pass
    gc.disable()
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found += sorted({name for each in gc.garbage if (name := _own_name(each))})
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
        gc.collect()


def _own_name(left: object) -> str:
    if isinstance(left, types.FrameType):
        module, name = left.f_globals["__name__"], left.f_code.co_qualname
    else:
        module, name = type(left).__module__, type(left).__qualname__
    return name if str(module).partition(".")[0] == "tidegate" else ""
