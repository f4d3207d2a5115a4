"""How does vLLM give memory back, and take it again? By ``/sleep`` and ``/wake_up``.

vLLM puts all to sleep at once, and wakes parts; whoever asks may want parts asleep only. So what
is to stay is woken again, and to put more to sleep all is woken first. What is written here follows
its source (0.32, 0.33): a CPU's vLLM has no sleep mode.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from tidegate.errors import EngineGone
from tidegate.transport.sleep_messages import MEMORY_TAGS, MemoryTag, SleepLevel

MEMORY_TIMEOUT_S = 300.0
"""To copy a model to the host's memory, or back."""

Query = Sequence[tuple[str, str]]


class VllmMemory:
    """One server's."""

    def __init__(self, post: Callable[[str, Query], Awaitable[Any]]) -> None:
        """``post`` calls a route with a query."""
        self._post = post
        self._asleep: set[MemoryTag] = set()
        self._level: SleepLevel = 1

    async def sleep(self, level: SleepLevel, tags: Sequence[MemoryTag]) -> None:
        """Have these asleep beside those that are."""
        wanted = self._asleep | set(tags)
        if "weights" in tags:
            self._level = level
        if self._asleep:
            await self.wake_all()
        # Weights that are to stay must be what they were once they are woken.
        depth = self._level if "weights" in wanted else 1
        await self._post("/sleep", [("level", str(depth)), ("mode", "abort")])
        self._asleep = set(MEMORY_TAGS)
        if stay := [tag for tag in MEMORY_TAGS if tag not in wanted]:
            await self.wake(stay)

    async def wake(self, tags: Sequence[MemoryTag]) -> None:
        """vLLM samples again once all is awake: whoever asks must pause it then."""
        answer = await self._post("/wake_up", [("tags", tag) for tag in tags])
        self._asleep.difference_update(tags)
        expected = "sleeping" if self._asleep else "awake"
        # Older ones answer with nothing.
        told = answer.get("status", expected) if isinstance(answer, dict) else expected
        if told != expected:
            raise EngineGone(
                f"vLLM was told to wake {' and '.join(tags)}, and says {told!r} where "
                f"{expected!r} was expected; does somebody else put it to sleep?"
            )

    async def wake_all(self) -> None:
        """Harmless if nothing sleeps."""
        await self._post("/wake_up", [])
        self._asleep.clear()
