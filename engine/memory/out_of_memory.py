"""Out-of-memory errors: recognised, reported with a remedy, and answered by smaller steps.

Used wherever the engine allocates, and by the scheduler (:class:`StepBudget`). Torch has no error
class for the CPU, only a message text. The kernel's OOM killer leaves no error: the parent process
reports the kill.
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


RECOVERY_STEPS = 100
"""Successful steps before the budget is doubled. A failed doubling costs one prefill of all running
turns, the time of a few steps: some percent of this many."""


class StepBudget:
    """Token budget of a step, halved after an out-of-memory step and restored gradually, because
    other processes' memory use comes and goes. Also limits the turns of a step, because each has
    at least one token."""

    def __init__(self, tokens_max: int) -> None:
        self._tokens_max = tokens_max
        self.tokens = tokens_max
        self._steps_done = 0
        """Successful steps since the budget last changed."""

    def fail(self, tokens: int) -> bool:
        """Halve the budget after a failed step of ``tokens``; False if it had one token only."""
        self.tokens = max(1, min(tokens, self.tokens) // 2)
        self._steps_done = 0
        return tokens > 1

    def succeed(self) -> None:
        """Count a successful step; double the budget after ``RECOVERY_STEPS`` of them."""
        if self.tokens == self._tokens_max:
            return
        self._steps_done += 1
        if self._steps_done == RECOVERY_STEPS:
            self.tokens = min(self._tokens_max, 2 * self.tokens)
            self._steps_done = 0
