"""How do users' episodes run? One coroutine per rollout, whose end becomes one event.

It waits and contains: whatever an episode raises costs its rollout and no other. What that means
for groups and batches is the core's to decide.
"""

import asyncio
import logging
import traceback
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from tidegate.errors import EpisodeError, RunClosed
from tidegate.orchestrator import events as ev
from tidegate.orchestrator.config import RunSettings
from tidegate.orchestrator.deadlines import Deadlines
from tidegate.orchestrator.episode import Episode, SamplingDefaults
from tidegate.orchestrator.generated_turn import checked_reward
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

ENDED_REMEMBERED = 256
"""Enough to tell a program that keeps every episode from one that keeps a few."""

log = logging.getLogger("tidegate")


@dataclass(slots=True)
class LeftBehind:
    """What should be gone once its episode is over."""

    stubborn: set[int] = field(default_factory=set)
    """Rollouts that were given up while their episode goes on, deaf to being cancelled."""
    ended: deque[weakref.ref[Episode]] = field(
        default_factory=lambda: deque(maxlen=ENDED_REMEMBERED)
    )
    """The episodes that ended last."""


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
        self._loop = asyncio.get_running_loop()
        self._deadlines = Deadlines(settings.episode_timeout_s, self._give_up)
        self._defaults = SamplingDefaults(settings.max_tokens, settings.temperature, settings.seed)
        self._model = model
        self._waiting = waiting
        self._handle = handle
        self._failures_in_a_row = 0
        self._going: dict[int, asyncio.Task[None]] = {}
        """By rollout."""
        self.left = LeftBehind()
        self._forked: Rollout | None = None
        self._broken: EpisodeError | None = None
        """Why no other episode is to begin."""

    def stand_still(self, is_still: bool) -> None:
        """No episode's time runs while engines are paused: it would wait for them in vain."""
        change = self._deadlines.stand_still if is_still else self._deadlines.go_on
        change(self._loop.time())

    def begin(
        self, rollout: Rollout, task: object, function: EpisodeFunction, group: asyncio.TaskGroup
    ) -> None:
        """Start one episode, as a task of ``group``.

        That fails with an :class:`EpisodeError` if the episode is one failure too many.
        """
        name, number = f"rollout {rollout.rollout_id}", rollout.rollout_id
        playing = self._run(rollout, task, function)
        try:
            self._going[number] = group.create_task(playing, name=name)
        except RuntimeError:  # the group is ending, and the run with it
            playing.close()

    def stop(self, rollout: Rollout) -> None:
        """Cancel the episode of a rollout that is given up; whatever it says changes nothing."""
        task = self._going.get(rollout.rollout_id)
        if task is not None:
            self.left.stubborn.add(rollout.rollout_id)  # until it has ended
            self._deadlines.cut_short(task)

    async def _run(self, rollout: Rollout, task: object, function: EpisodeFunction) -> None:
        try:
            if rollout.rollout_id not in self.left.stubborn:  # else it is stopped already
                await self._play(rollout, task, function)
        finally:
            self.left.stubborn.discard(rollout.rollout_id)
            del self._going[rollout.rollout_id]

    async def _play(self, rollout: Rollout, task: object, function: EpisodeFunction) -> None:
        """Run one episode to its end.

        Raises:
            EpisodeError: it was one failure too many.
        """
        episode = Episode(rollout, self._model, self, self._defaults)
        event: ev.Event
        current = asyncio.current_task(self._loop)
        assert current is not None
        if self._broken is not None:
            raise self._broken
        self._deadlines.begin(current, (rollout, episode))
        try:
            reward = checked_reward(await function(episode, task))
            self._deadlines.end(current)
            event = ev.EpisodeReturned(rollout.rollout_id, reward)
            self._failures_in_a_row = 0
        except (Exception, asyncio.CancelledError) as error:
            was_too_long = self._deadlines.end(current)
            reason = "episode_error"
            if isinstance(error, asyncio.CancelledError):
                if current.cancelling():
                    raise  # somebody cancels it; else its code has awaited something dead
                if was_too_long:
                    reason, late = "episode_timeout", TimeoutError("it took too long")
                    late.__cause__, error = error, late
            event = ev.EpisodeFailed(rollout.rollout_id, reason)
            if rollout.rollout_id not in self.left.stubborn:
                self._count_failure(rollout, error)
        self._settle(rollout, episode)
        if rollout.rollout_id not in self.left.stubborn:  # else what it says changes nothing
            self._handle([*episode.turn_rewards(), event])

    def _settle(self, rollout: Rollout, episode: Episode) -> None:
        episode.end()
        self.left.ended.append(weakref.ref(episode))
        for row in rollout.rows:
            if left := self._waiting.turns.pop(row.rollout_id, None):
                fail(left, RunClosed(EPISODE_IS_OVER))

    def _give_up(self, episode_of: tuple[Rollout, Episode]) -> None:
        """Go on without an episode that goes on after it was cancelled at its deadline."""
        rollout, episode = episode_of
        self._settle(rollout, episode)
        if rollout.rollout_id in self.left.stubborn:
            return  # it was stopped, and the core waits for it no more
        self.left.stubborn.add(rollout.rollout_id)
        try:
            self._count_failure(rollout, TimeoutError("it took too long, and won't be cancelled"))
        except EpisodeError as error:
            self._broken = error
        self._handle([ev.EpisodeFailed(rollout.rollout_id, "episode_timeout")])

    def _count_failure(self, rollout: Rollout, error: BaseException) -> None:
        self._failures_in_a_row += 1
        story = "".join(traceback.format_exception(error))
        log.warning("rollout=%d discarded, its episode failed:\n%s", rollout.rollout_id, story)
        if self._failures_in_a_row >= EPISODE_FAILURES_MAX:
            raise EpisodeError(
                f"the episode failed {self._failures_in_a_row} times in a row without one "
                f"success; the last time with {type(error).__name__}: {error}"
            ) from error

    # ------------------------------------------------------------ what episodes ask for

    def ask(self, rollout: Rollout, sampling: SamplingParams) -> "asyncio.Future[Turn]":
        """A new turn of this rollout, once it has ended."""
        self._refuse_if_given_up(rollout)
        future = self.rejoin(rollout)
        self._handle([ev.TurnAsked(rollout.rollout_id, sampling)])
        return future

    def rejoin(self, rollout: Rollout) -> "asyncio.Future[Turn]":
        """The turn that this rollout has on some engine, once it has ended."""
        future: asyncio.Future[Turn] = self._loop.create_future()
        self._waiting.turns[rollout.rollout_id] = future
        return future

    def fork(self, rollout: Rollout, reason: str) -> Rollout:
        """Another row for this one's episode, with nothing in it yet."""
        self._refuse_if_given_up(rollout)
        self._handle([ev.RolloutForked(rollout.rollout_id, reason)])
        if self._forked is None:
            raise RunClosed(EPISODE_IS_OVER)
        row, self._forked = self._forked, None
        return row

    def forked(self, row: Rollout) -> None:
        """The core has made the row that :meth:`fork` asks for."""
        self._forked = row

    def _refuse_if_given_up(self, rollout: Rollout) -> None:
        if rollout.root.rollout_id in self.left.stubborn:
            raise RunClosed("this rollout was given up; its episode was cancelled, and must end")

    def give_up_turn(self, rollout: Rollout) -> None:
        """Who asked for this rollout's turn doesn't wait for it any more."""
        self._waiting.turns.pop(rollout.rollout_id, None)
        self._handle([ev.TurnGivenUp(rollout.rollout_id)])

    def cut(self, rollout: Rollout, *, turns: int, tokens: int) -> None:
        """Forget what the rollout's context holds beyond so many turns and tokens."""
        if rollout.root.rollout_id in self.left.stubborn:
            return  # it is settled
        self._handle([ev.RolloutCut(rollout.rollout_id, turns, tokens, "went_another_way")])
