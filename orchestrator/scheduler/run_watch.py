"""Watchdog of a run: finds engines, turns, episodes, weights and trainers that make no progress.

The scheduler runs it as a task, which checks everything four times per ``stuck_after_s``. It only
reads the core, the fleet and weight control, and changes and records nothing: each finding is
logged once, and :attr:`RunWatch.stuck` has the current ones for the run's statistics.
"""

import asyncio
import gc
import logging
import reprlib
from collections.abc import Callable

from tidegate.orchestrator.core.core import Core
from tidegate.orchestrator.core.group import Group
from tidegate.orchestrator.core.placement import EngineTurns
from tidegate.orchestrator.core.rollout import Rollout, Turn
from tidegate.orchestrator.core.weight_control import WeightControl
from tidegate.orchestrator.episodes.runner import EpisodeLeakTracker
from tidegate.orchestrator.fleet.engine_record import Engine
from tidegate.orchestrator.fleet.fleet import Fleet
from tidegate.orchestrator.telemetry.watchdog import Stuck, Watchdog

ROUNDS_PER_STUCK_AFTER = 4
"""Rounds per ``stuck_after_s``, so that anything stuck is reported after 1 to 1.25 times it."""

ROLLOUTS_PER_SLICE = 500
"""Rollouts checked before the loop serves its sockets again, in about half a millisecond."""

LOGGED_AT_ONCE_MAX = 10
"""Findings logged in one round; the others are only counted."""

TRAINER_TIME_FACTOR = 5.0
"""Factor of ``stuck_after_s`` for the trainer, because a train step may take minutes."""

REFERENCED_SHARE = 0.75
"""Share of ended episodes that may still be referenced: some by their last turns' tasks, and, in a
user's reference cycles, by the next garbage collection."""

_SHORT = reprlib.Repr()
"""Short repr of a task for log lines."""
_SHORT.maxstring = _SHORT.maxother = 80

log = logging.getLogger("tidegate")


class RunWatch:
    """Checks the progress of one run, in rounds."""

    def __init__(
        self,
        core: Core,
        fleet: Fleet,
        weights: WeightControl,
        leaks: EpisodeLeakTracker,
        *,
        is_parked: Callable[[Rollout], bool] = lambda rollout: False,
        is_paused: Callable[[], bool] = lambda: False,
        stuck_after_s: float,
    ) -> None:
        """``is_parked``: whether a rollout's episode waits for newer weights, which is no fault.
        ``stuck_after_s``: seconds that a thing may stay without progress."""
        self._core = core
        self._fleet = fleet
        self._weights = weights
        self._is_paused = is_paused
        self._leaks = leaks
        self._is_parked = is_parked
        self._round_s = stuck_after_s / ROUNDS_PER_STUCK_AFTER
        self._watchdog = Watchdog(stuck_after_s)

    async def run(self) -> None:
        """Check everything, round after round, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._round_s)
            self._watchdog.begin(loop.time())
            for core in self._cores:
                self._check_trainer(core)
            self._check_weights()
            self._check_ended_episodes()
            engines = self._check_engines()
            for core in self._cores:
                await self._check_rollouts(core, engines)
            _log(self._watchdog.end())

    @property
    def stuck(self) -> tuple[Stuck, ...]:
        """Everything without progress, as of the last round."""
        return self._watchdog.stuck

    # ------------------------------------------------------------ rollouts

    @property
    def _cores(self) -> list[Core]:
        """Cores of the run's weights and of the adapters that it trains."""
        return [self._core, *self._core.trained_adapters.values()]

    async def _check_rollouts(self, core: Core, engines: set[str]) -> None:
        """Check rollouts in the user's code, and those with a turn on one of these engines."""
        is_stuck, pending = self._watchdog.is_stuck, core.pending_after_resume
        for number, (rollout, group) in enumerate(list(core.groups.running.values()), 1):
            if number % ROLLOUTS_PER_SLICE == 0:
                await asyncio.sleep(0)
            turns = rollout.turns
            turn = turns[-1] if turns else None
            if turn is not None and turn.finish_reason is None:
                if turn.place is None or turn.place[0] not in engines:
                    continue
                if is_stuck("turn", rollout.rollout_id, (len(turns), turn.length)):
                    self._watchdog.report("turn", rollout.rollout_id, _describe_turn(turn))
            elif pending and group.key in pending:
                continue  # its episode is yet to begin again
            elif rollout.branch_of is not None:
                continue  # its root's episode is that of all its rows
            elif self._is_parked(rollout):
                continue  # newer weights wake it
            elif is_stuck("episode", rollout.rollout_id, _progress(rollout)):
                self._watchdog.report(
                    "episode", rollout.rollout_id, _describe_episode(rollout, group)
                )

    def _check_engines(self) -> set[str]:
        """Check engines; return those that make progress and let no turn wait, so that a turn
        without a token there is stuck itself."""
        at_work: set[str] = set()
        if self._is_paused():
            return at_work  # paused engines make no steps
        for name, turns in list(self._core.turns.engines.items()):
            engine = self._fleet.engines.get(name)
            if engine is None or not turns.submissions:
                continue
            progress = (engine.hello.epoch, engine.tokens, engine.busy_us)
            if self._watchdog.is_stuck("engine", name, progress):
                self._watchdog.report("engine", name, _describe_engine(engine, turns))
            elif not engine.waiting_turns:  # else it is unknown which of its turns wait
                at_work.add(name)
        if self._core.turns.waiting and self._watchdog.is_stuck("engine", "no engine", None):
            self._watchdog.report("engine", "no engine", self._describe_missing_engine())
        return at_work

    def _describe_missing_engine(self) -> str:
        turns = self._core.turns
        engines = ", ".join(f"{name} v{e.weight_version}" for name, e in turns.engines.items())
        return (
            f"{len(turns.waiting)} turns wait for an engine that serves v{turns.live_version} or "
            f"newer; connected: {engines or 'none'}"
        )

    def _check_ended_episodes(self) -> None:
        for rollout_id in self._leaks.uncancelled:
            if self._watchdog.is_stuck("episode", rollout_id, None):
                why = "it was abandoned at its timeout, but swallows CancelledError and continues"
                self._watchdog.report("episode", rollout_id, why)
        ended, name = self._leaks.ended, "episodes that have ended"
        if not self._are_kept() or not self._watchdog.is_stuck("memory", name, None):
            return
        if all(stuck.kind != "memory" for stuck in self.stuck):
            gc.collect()  # before the first report: cycles of users' code are no leak
        if self._are_kept():
            self._watchdog.report("memory", name, _describe_kept(self._num_kept(), len(ended)))

    def _are_kept(self) -> bool:
        ended = self._leaks.ended
        return len(ended) == ended.maxlen and self._num_kept() > REFERENCED_SHARE * len(ended)

    def _num_kept(self) -> int:
        return sum(episode() is not None for episode in self._leaks.ended)

    # ------------------------------------------------------------ the trainer

    def _check_trainer(self, core: Core) -> None:
        watchdog = self._watchdog
        if (core.are_tasks_exhausted or core.running_groups) and not core.is_paused:
            return
        of_adapter = f" of adapter {core.adapter!r}" if core.adapter else ""
        name = f"the iterator of tasks{of_adapter}"
        could_start = core.admissible_groups and not core.is_paused
        is_waiting = bool(core.handed.wants_batch and could_start)
        if is_waiting and watchdog.is_stuck("tasks", name, core.groups.next_group_id):
            watchdog.report(
                "tasks", name, f"{core.admissible_groups} groups may start, but it yields no task"
            )
        unpublished = core.handed.unpublished_groups
        progress = (core.handed.count, core.trainer_version)
        holds_all = bool(unpublished and (core.is_paused or not core.admissible_groups))
        trainer = f"the trainer{of_adapter}"
        if holds_all and watchdog.is_stuck("trainer", trainer, progress, TRAINER_TIME_FACTOR):
            waits = "generation is paused until" if core.is_paused else "no other may start before"
            held = ", ".join(str(batch.number) for batch in core.handed.held) or "none"
            where = (
                f"it holds {unpublished} groups that are in no published version (batches that no "
                f"publish has named: {held}); {core.buffered_groups} are buffered, and {waits} it "
                f"publishes a version that is made from them"
            )
            watchdog.report("trainer", trainer, where)

    def _check_weights(self) -> None:
        weights, watchdog = self._weights, self._watchdog
        for late in weights.lagging_engines:
            name = f"v{late.version} {late.phase}"
            if watchdog.is_stuck("publish", name, late.engines):
                watchdog.report("publish", name, str(late))
        if weights.is_reserved and weights.is_writable:
            newest = weights.update.version if weights.update is not None else None
            if watchdog.is_stuck("publish", "the next version", newest):
                where = "it is still being written where engines copy it from"
                watchdog.report("publish", "the next version", where)


def _describe_engine(engine: Engine, turns: EngineTurns) -> str:
    return (
        f"no step of its {len(turns.submissions)} turns has arrived; it reports "
        f"{engine.running_turns} running and {engine.waiting_turns} waiting, and serves "
        f"v{engine.weight_version}"
    )


def _progress(rollout: Rollout) -> tuple[int, int]:
    """Return a value that changes whenever the episode acts, or a branch gets a token."""
    if not rollout.branches:
        return len(rollout.turns), 0
    rows = list(rollout.rows)
    return sum(len(row.turns) for row in rows), sum(row.sampled_tokens for row in rows)


def _describe_turn(turn: Turn) -> str:
    name, handle = turn.place if turn.place is not None else ("none", None)
    return (
        f"its turn {len(turn.rollout.turns)} (handle {handle}) on {name} has {turn.length} tokens "
        f"and gets no more, while the engine makes steps"
    )


def _describe_episode(rollout: Rollout, group: Group) -> str:
    return (
        f"after turn {len(rollout.turns)} its episode neither requests another nor returns; task "
        f"{_SHORT.repr(group.task)}"
    )


def _describe_kept(alive: int, ended: int) -> str:
    return (
        f"{alive} of the last {ended} are still referenced, with all their tokens; keep the values "
        f"that you need, not the Episode"
    )


def _log(news: list[Stuck]) -> None:
    for stuck in news[:LOGGED_AT_ONCE_MAX]:
        log.warning(
            "stuck=%s name=%r waited_s=%.0f where=%r",
            stuck.kind,
            stuck.name,
            stuck.waited_s,
            stuck.where,
        )
    if len(news) > LOGGED_AT_ONCE_MAX:
        log.warning("stuck=more count=%d", len(news) - LOGGED_AT_ONCE_MAX)
