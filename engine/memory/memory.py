"""Was it memory that ran out, and what would have needed less of it? Frees none itself.

Torch has no error of its own for a CPU without memory, only a text. An operating system that kills
a process for its memory says nothing at all; that is for whoever started the process to report.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tidegate.errors import OutOfMemory

_SAID_BY_TORCH = ("DefaultCPUAllocator", "not enough memory", "out of memory")


@contextmanager
def blame_memory(*, doing: str, remedy: str) -> Iterator[None]:
    """Say what was being done, and what to do about it, where memory runs out in here.

    Raises:
        OutOfMemory: it did.
    """
    try:
        yield
    except OutOfMemory:  # somebody who knew more has said it
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise out_of_memory(error, doing=doing, remedy=remedy) from error
        raise


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error means that memory could not be had."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(said in str(error) for said in _SAID_BY_TORCH)


def out_of_memory(error: Exception, *, doing: str, remedy: str) -> OutOfMemory:
    """The same as our own error."""
    # Torch may put a C++ stack trace below the line that says it.
    why = (str(error) or type(error).__name__).splitlines()[0]
    return OutOfMemory(doing=doing, remedy=remedy, why=why)
