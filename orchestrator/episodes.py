"""How do users' episodes run? One coroutine per rollout, whose end becomes one event.

It waits and contains: whatever an episode raises costs its rollout and no other. What that means
for groups and batches is the core's to decide.
"""

import asyncio
import logging
import traceback
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from tidegate.errors import EpisodeError, RunClosed
from tidegate.orchestrator import events as ev
from tidegate.orchestrator.config import RunSettings
from tidegate.orchestrator.episode import Episode, SamplingDefaults, checked_reward
from tidegate.orchestrator.model_files import ModelFiles
from tidegate.orchestrator.rollout import Rollout, Turn
from tidegate.orchestrator.waiting import Waiting, fail
from tidegate.transport.messages import SamplingParams

EpisodeFunction = Callable[[Episode, Any], Awaitable[float]]
"""A user's episode: gets the context and a task, returns the reward."""

EPISODE_FAILURES_MAX = 100
"""So many failed episodes in a row, without one success, end the run: the code is wrong, not a
task. Fewer would let one bad batch of tasks end it."""

EPISODE_IS_OVER = "the episode has returned; its rollout can't go on"

log = logging.getLogger("tidegate")


class EpisodeRunner:
    """Runs the episodes of a run, on its event loop."""

    def __init__(
        self,
        settings: RunSettings,
        model: ModelFiles,
        waiting: Waiting,
        handle: Callable[[Iterable[ev.Event]], None],
    ) -> None:
        """``handle`` feeds events to the core."""
        self._timeout_s = settings.episode_timeout_s
        self._defaults = SamplingDefaults(settings.max_tokens, settings.temperature, settings.seed)
        self._model = model
        self._waiting = waiting
        self._handle = handle
        self._failures_in_a_row = 0

    async def run(self, rollout: Rollout, task: object, function: EpisodeFunction) -> None:
        """Run one episode to its end.

        Raises:
            EpisodeError: it was one failure too many.
        """
        episode = Episode(rollout, self._model, self._ask_for_turn, self._defaults)
        event: ev.Event
        try:
            async with asyncio.timeout(self._timeout_s) as timeout:
                reward = checked_reward(await function(episode, task))
            event = ev.EpisodeReturned(rollout.rollout_id, reward)
            self._failures_in_a_row = 0
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and _is_being_cancelled():
                raise
            is_timeout = isinstance(error, TimeoutError) and timeout.expired()
            event = ev.EpisodeFailed(
                rollout.rollout_id, "episode_timeout" if is_timeout else "episode_error"
            )
            self._count_failure(rollout, error)
        episode.end()
        fail(self._waiting.turns.pop(rollout.rollout_id, None), RunClosed(EPISODE_IS_OVER))
        self._handle([event])

    def _count_failure(self, rollout: Rollout, error: BaseException) -> None:
        self._failures_in_a_row += 1
        story = "".join(traceback.format_exception(error))
        log.warning("rollout=%d discarded, its episode failed:\n%s", rollout.rollout_id, story)
        if self._failures_in_a_row >= EPISODE_FAILURES_MAX:
            raise EpisodeError(
                f"the episode failed {self._failures_in_a_row} times in a row without one "
                f"success; the last time with {type(error).__name__}: {error}"
            ) from error

    async def _ask_for_turn(self, rollout: Rollout, sampling: SamplingParams) -> Turn:
        future: asyncio.Future[Turn] = asyncio.get_running_loop().create_future()
        self._waiting.turns[rollout.rollout_id] = future
        self._handle([ev.TurnAsked(rollout.rollout_id, sampling)])
        try:
            return await future
        except asyncio.CancelledError:
            self._waiting.turns.pop(rollout.rollout_id, None)
            self._handle([ev.TurnGivenUp(rollout.rollout_id)])
            raise


def _is_being_cancelled() -> bool:
    """Whether somebody cancels this task, rather than its code having awaited something dead."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
