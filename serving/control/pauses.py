"""Pauses, sleep and prefix caches of all engines of a run, by vLLM's rules.

Calls run one after another. Two calls do not wait for a pause that itself still waits for requests,
because they end it: a resume, and a pause that aborts.
"""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, get_args

from tidegate.serving.http.errors import ApiError
from tidegate.serving.openai.active_requests import ActiveRequests
from tidegate.transport.messages import PauseMode
from tidegate.transport.sleep_messages import MEMORY_TAGS, MemoryTag, SleepLevel

if TYPE_CHECKING:
    from tidegate.orchestrator.weight_sync.control import EngineControl

PAUSED = "Generation is paused. Please retry after it resumes."

SCHEDULING = "scheduling"
"""Tag of ``/wake_up`` that names generation itself, beside the tags of memory."""


class EnginePauses:
    """Pauses, puts to sleep and wakes all engines of a run, and drops their prefix caches."""

    def __init__(
        self, control: "EngineControl", requests: ActiveRequests, *, rejects_while_paused: bool
    ) -> None:
        """``rejects_while_paused``: whether new requests are refused while engines are paused by
        ``abort`` or ``wait``, as by vLLM from 0.33 on; else they wait."""
        self._control = control
        self._requests = requests
        self._rejects = rejects_while_paused
        self.mode: PauseMode | None = None
        """Mode in which engines are paused, or are about to be; None: they generate."""
        self._keeps_kv = False
        """Whether requests that are paused by ``keep`` will continue from their KV."""
        self._one_at_a_time = asyncio.Lock()
        self._draining: asyncio.Task[None] | None = None
        """Pause of mode ``wait`` that waits for running requests to end."""

    @property
    def is_paused(self) -> bool:
        """Whether a pause is complete: engines generate nothing."""
        return self.mode is not None and self._draining is None

    @property
    def is_sleeping(self) -> bool:
        """Whether engines sleep or are paused: vLLM reports paused engines as sleeping, too."""
        return self.is_paused or bool(self._control.state.sleeps.asleep)

    def refuse_if_paused(self) -> None:
        """Raise ApiError if new requests are refused now."""
        if self._rejects and self.mode in ("abort", "wait"):
            raise ApiError(503, PAUSED)

    # ------------------------------------------------------------ pauses

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """Pause all engines; return once nothing is generated, or a resume ends the wait."""
        if mode == "abort":
            self.mode = mode  # requests that arrive meanwhile are refused
            self._requests.abort(None)
        async with self._one_at_a_time:
            self.mode = mode
            # Turns that are kept continue from the KV that clear_cache leaves in place.
            self._keeps_kv = mode == "keep" and not clear_cache
            self._control.choose_kv_policy("keep" if self._keeps_kv else "recompute")
            if mode == "wait":
                return await self._drain(clear_cache=clear_cache)
            if mode == "abort":
                await self._requests.wait_until_aborted()
            await self._control.pause(mode, clear_cache=clear_cache)

    async def _drain(self, *, clear_cache: bool) -> None:
        draining = self._control.pause("wait", clear_cache=clear_cache)
        task = self._draining = asyncio.ensure_future(draining)
        try:
            await asyncio.wait([task])
            if not task.cancelled():
                task.result()
        finally:
            task.cancel()
            self._draining = None
        if self.mode is None:  # resumed meanwhile, and the pause may still be in effect
            await self._control.pause(None)

    @property
    def has_dropped_kv(self) -> bool:
        """Whether engines are paused, and requests will compute their contexts anew."""
        return self.is_paused and not self._keeps_kv

    def drop_kv(self) -> None:
        """Have requests compute their contexts anew after the next change of weights."""
        self._keeps_kv = False
        self._control.choose_kv_policy("recompute")

    async def resume(self) -> None:
        """Have engines generate again; cancel a pause that still waits."""
        self.mode = None
        if self._draining is not None:
            self._draining.cancel()
        async with self._one_at_a_time:
            self.drop_kv()
            await self._control.pause(None)

    # ------------------------------------------------------------ sleep

    async def sleep(self, level: int, mode: PauseMode) -> None:
        """Pause with ``mode``; then release memory, from level 1 on."""
        if not 0 <= level <= 2:
            raise ApiError(400, f"level must be 0, 1 or 2, got {level}", param="query.level")
        await self.pause(mode, clear_cache=level >= 1)
        if level:
            await self.release(1 if level == 1 else 2, MEMORY_TAGS)

    async def release_kv_cache(self) -> None:
        """Release the memory of the KV caches of paused engines."""
        if not self.is_paused:
            raise ApiError(500, "release_kv_cache_memory requires a completed pause first")
        await self.release(1, ["kv_cache"])

    async def release(self, level: SleepLevel, tags: Sequence[MemoryTag]) -> None:
        """Release memory. Engines that generate are paused by ``abort`` until they are woken."""
        async with self._one_at_a_time:
            await self._control.sleep(level, tags, self.mode or "abort")

    async def wake(self, tags: Sequence[str] | None, *, resumes: bool = True) -> bool:
        """Take memory again, all if there are no ``tags``; return whether engines are awake now.

        If it ``resumes``, engines generate once all memory is back, whatever paused them before.
        """
        known = (*MEMORY_TAGS, SCHEDULING)
        if tags and not set(tags) <= set(known):
            why = f"tags name some of {', '.join(known)}, got {', '.join(tags)}"
            raise ApiError(400, why, param="query.tags")
        named = [tag for tag in get_args(MemoryTag) if tag in tags] if tags else None
        if named is None or named:
            async with self._one_at_a_time:
                await self._control.wake(named)
        if self._control.state.sleeps.asleep:
            return False
        if resumes:
            await self.resume()
        return True

    # ------------------------------------------------------------ caches

    async def reset_prefix_cache(self, *, recomputes_running: bool) -> bool:
        """Drop the prefix caches; return False if running requests kept a part of them.

        With ``recomputes_running`` running requests compute their contexts anew.
        """
        is_idle = not len(self._requests)
        async with self._one_at_a_time:
            mode: PauseMode = "abort" if recomputes_running else "keep"
            # This abort is internal: turns resume from their tokens, and clients see no difference.
            await self._control.pause(mode, clear_cache=True)
            if self.mode is None:
                await self._control.pause(None)
        return is_idle or recomputes_running
