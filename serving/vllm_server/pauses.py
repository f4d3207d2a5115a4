"""Do the engines generate? vLLM's pauses, sleep and caches, for all engines of a run at once.

Control calls come one after another, but for two that end a pause which still waits: a resume, and
a pause that aborts. It knows no requests' bodies, and no weights.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any, get_args

from tidegate.serving.api_errors import ApiError
from tidegate.serving.vllm_server.active_requests import ActiveRequests
from tidegate.transport.messages import PauseMode
from tidegate.transport.sleep_messages import MEMORY_TAGS, MemoryTag, SleepLevel

if TYPE_CHECKING:
    from tidegate.orchestrator.scheduler.scheduler import Scheduler

PAUSED = "Generation is paused. Please retry after it resumes."

SCHEDULING = "scheduling"
"""What else than memory ``/wake_up`` may name."""


class EnginePauses:
    """Pauses, sleep and caches of a run's engines, by vLLM's rules."""

    def __init__(
        self, scheduler: "Scheduler", desk: ActiveRequests, *, rejects_while_paused: bool
    ) -> None:
        """``rejects_while_paused``: whether new requests are refused while engines are paused by
        ``abort`` or ``wait``, as by vLLM from 0.33 on; else they wait."""
        self._control = scheduler.control
        self._desk = desk
        self._rejects = rejects_while_paused
        self.mode: PauseMode | None = None
        """How engines are paused, or are about to be; None: they generate."""
        self._one_at_a_time = asyncio.Lock()
        self._draining: asyncio.Task[None] | None = None
        """A pause that waits for requests to end."""

    @property
    def is_paused(self) -> bool:
        """Whether engines generate nothing."""
        return self.mode is not None and self._draining is None

    @property
    def is_sleeping(self) -> bool:
        """As vLLM says it: paused engines are asleep, too."""
        return self.is_paused or bool(self._control.state.asleep)

    def refuse_if_paused(self) -> None:
        """Raise ApiError if no request may come now."""
        if self._rejects and self.mode in ("abort", "wait"):
            raise ApiError(503, PAUSED)

    # ------------------------------------------------------------ pauses

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """Return once nothing is generated; or, of mode ``wait``, once it was resumed before."""
        if mode == "abort":
            self.mode = mode  # those that come now find it so
            self._desk.abort(None)
        async with self._one_at_a_time:
            self.mode = mode
            # What clear_cache leaves in place is what turns that are kept go on from.
            keeps_kv = mode == "keep" and not clear_cache
            self._control.choose_kv_policy("keep" if keeps_kv else "recompute")
            if mode == "wait":
                return await self._drain(clear_cache=clear_cache)
            if mode == "abort":
                await self._desk.wait_until_aborted()
            await self._control.pause(mode, clear_cache=clear_cache)

    async def _drain(self, *, clear_cache: bool) -> None:
        draining = self._control.pause("wait", clear_cache=clear_cache)
        await self._until_told_otherwise(draining)
        if self.mode is None:  # resumed meanwhile: the pause may hold all the same
            await self._control.pause(None)

    async def _until_told_otherwise(self, draining: Coroutine[Any, Any, None]) -> None:
        task = self._draining = asyncio.ensure_future(draining)
        try:
            await asyncio.wait([task])
            if not task.cancelled():
                task.result()
        finally:
            task.cancel()
            self._draining = None

    async def resume(self) -> None:
        """Have engines generate again; a pause that still waits is called off."""
        self.mode = None
        if self._draining is not None:
            self._draining.cancel()
        async with self._one_at_a_time:
            self._control.choose_kv_policy("recompute")
            await self._control.pause(None)

    # ------------------------------------------------------------ sleep

    async def sleep(self, level: int, mode: PauseMode) -> None:
        """Pause by ``mode``; then give memory back, from level 1 on."""
        if not 0 <= level <= 2:
            raise ApiError(400, f"level must be 0, 1 or 2, got {level}", param="query.level")
        await self.pause(mode, clear_cache=level >= 1)
        if level:
            await self._sleep(1 if level == 1 else 2, MEMORY_TAGS)

    async def release_kv_cache(self) -> None:
        """Give the caches' memory back, of engines that are paused."""
        if not self.is_paused:
            raise ApiError(500, "release_kv_cache_memory requires a completed pause first")
        await self._sleep(1, ["kv_cache"])

    async def _sleep(self, level: SleepLevel, tags: Sequence[MemoryTag]) -> None:
        async with self._one_at_a_time:
            await self._control.sleep(level, tags, self.mode or "abort")

    async def wake(self, tags: Sequence[str] | None) -> bool:
        """Take memory again, all if there are no ``tags``; True if engines generate now.

        They do once all is awake, whatever paused them before.
        """
        known = (*MEMORY_TAGS, SCHEDULING)
        if tags and not set(tags) <= set(known):
            told = f"tags name some of {', '.join(known)}, got {', '.join(tags)}"
            raise ApiError(400, told, param="query.tags")
        named = [tag for tag in get_args(MemoryTag) if tag in tags] if tags else None
        if named is None or named:
            async with self._one_at_a_time:
                await self._control.wake(named)
        if self._control.state.asleep:
            return False
        await self.resume()
        return True

    # ------------------------------------------------------------ caches

    async def reset_prefix_cache(self, *, recomputes_running: bool) -> bool:
        """Forget what engines keep for later requests; False if running ones held some of it.

        With ``recomputes_running`` those compute their contexts anew.
        """
        is_idle = not len(self._desk)
        async with self._one_at_a_time:
            mode: PauseMode = "abort" if recomputes_running else "keep"
            # An abort of the run's own: turns go on later from their tokens, and no client hears.
            await self._control.pause(mode, clear_cache=True)
            if self.mode is None:
                await self._control.pause(None)
        return is_idle or recomputes_running
