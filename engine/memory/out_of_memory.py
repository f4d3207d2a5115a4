"""Recognises out-of-memory errors, and reports them with the operation and the remedy.

Used wherever the engine allocates. Torch has no error class for the CPU, only a message text. The
kernel's OOM killer leaves no error; the parent process reports that.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tidegate.errors import OutOfMemory

_TORCH_MESSAGES = ("DefaultCPUAllocator", "not enough memory", "out of memory")


@contextmanager
def blame_memory(*, doing: str, remedy: str) -> Iterator[None]:
    """Convert out-of-memory errors in the block to ``OutOfMemory``, with ``doing`` and ``remedy``.

    Raises:
        OutOfMemory: memory ran out.
    """
    try:
        yield
    except OutOfMemory:  # already converted, with more detail
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise out_of_memory(error, doing=doing, remedy=remedy) from error
        raise


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error means that memory could not be allocated."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _TORCH_MESSAGES)


def out_of_memory(error: Exception, *, doing: str, remedy: str) -> OutOfMemory:
    """Convert an out-of-memory error to Tidegate's own."""
    # Torch may append a C++ stack trace to the message.
    why = (str(error) or type(error).__name__).splitlines()[0]
    return OutOfMemory(doing=doing, remedy=remedy, why=why)
