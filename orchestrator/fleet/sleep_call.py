"""What does a trainer's wish to have engines sleep or wake ask of the run's loop?

It checks what is asked for, in the trainer's thread, and knows nothing of engines.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import get_args

from tidegate.errors import ConfigError
from tidegate.orchestrator.scheduler import Scheduler
from tidegate.transport.messages import PauseMode
from tidegate.transport.sleep_messages import MEMORY_TAGS, MemoryTag, SleepLevel


def sleep_work(
    level: SleepLevel, tags: Sequence[MemoryTag], mode: PauseMode
) -> Callable[[Scheduler], Awaitable[int]]:
    """Put all engines to sleep.

    Raises:
        ConfigError: there is no such level, memory or mode.
    """
    if level not in get_args(SleepLevel):
        raise ConfigError(f"engines sleep at level 1 (offload) or 2 (discard), got {level!r}")
    if mode not in get_args(PauseMode):
        raise ConfigError(f"a pause's mode is 'abort', 'keep' or 'wait', got {mode!r}")
    _check(tags)

    async def work(scheduler: Scheduler) -> int:
        return await scheduler.control.sleep(level, tags, mode)

    return work


def wake_work(tags: Sequence[MemoryTag] | None) -> Callable[[Scheduler], Awaitable[None]]:
    """Wake all engines.

    Raises:
        ConfigError: there is no such memory.
    """
    if tags is not None:
        _check(tags)

    async def work(scheduler: Scheduler) -> None:
        await scheduler.control.wake(tags)

    return work


def _check(tags: Sequence[MemoryTag]) -> None:
    if isinstance(tags, str) or not tags or not set(tags) <= set(MEMORY_TAGS):
        raise ConfigError(f"tags name what sleeps, some of {list(MEMORY_TAGS)}; got {tags!r}")
