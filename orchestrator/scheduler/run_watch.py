"""Watchdog of a run: finds engines, turns, episodes, weights and trainers that make no progress.

The scheduler runs it as a task, which checks everything four times per ``stuck_after_s``, and shows
it each batch that is handed over and each trainer's last request. It only reads the core, the fleet
and weight control, and changes and records nothing: each finding is logged once, and
:attr:`RunWatch.stuck` has the current ones for the run's statistics.
"""

import asyncio
import gc
import logging
import reprlib
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from tidegate.errors import EpisodeError
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.core import Core
from tidegate.orchestrator.core.failure_counts import FailureOutcome
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

UNTAUGHT_BATCHES_MIN = 3
"""Consecutive batches without a difference of rewards before they are reported: where a reward is
rare, one or two are usual."""

UNTAUGHT_GROUPS_MIN = 16
"""Number of groups that those batches have together at least."""

TOKENLESS_BATCHES_MIN = 2
"""Consecutive batches without a token to train on before they are reported. Masks may empty one."""

DISCARDED_GROUPS_MIN = 32
"""Groups discarded in a row, without one kept, before they are reported. A filter that keeps one
group in ten drops so many in a row in 3 of 100 cases."""

_SHORT = reprlib.Repr()
"""Short repr of a task for log lines."""
_SHORT.maxstring = _SHORT.maxother = 80

log = logging.getLogger("tidegate")


@dataclass(slots=True)
class _Learning:
    """What one trainer's batches gave it to learn from, and what has become of its groups."""

    newest: int = 0
    """Number of the newest batch."""
    batches: int = 0
    """Number of batches since this process began."""
    reads_advantages: bool = False
    """Whether the trainer has read ``Batch.advantages``."""
    tokenless: int = 0
    """Number of the newest batches that have no token to train on."""
    is_masked: bool = False
    """Whether those batches have tokens, all masked as too old."""
    equal: int = 0
    """Number of the newest batches with tokens whose groups' rewards do not differ, so that all
    advantages are 0."""
    equal_groups: int = 0
    """Number of groups in the ``equal`` batches."""
    is_comparable: bool = False
    """Whether one of those groups has two rewards to compare."""
    rewards: set[float] = field(default_factory=set)
    """Up to two distinct rewards of the ``equal`` batches."""
    since_s: float = 0.0
    """Time of the first of the batches without anything to learn from."""
    kept: tuple[int, int] = (0, 0)
    """Numbers of batches handed over, and of groups buffered, as of the last change."""
    discarded: Counter[str] = field(default_factory=Counter)
    """Discarded rollouts by reason, as of the last change of ``kept``."""
    failure: EpisodeError | None = None
    """Error of a trainer that got no batch, because the episodes of all tasks failed."""


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
        episode_of: Callable[[str], str] = lambda adapter: "the episode",
        stuck_after_s: float,
    ) -> None:
        """``is_parked``: whether a rollout's episode waits for newer weights, which is no fault.
        ``episode_of``: words for the episode function of an adapter's trainer, with its line.
        ``stuck_after_s``: seconds that a thing may stay without progress."""
        self._core = core
        self._fleet = fleet
        self._weights = weights
        self._is_paused = is_paused
        self._leaks = leaks
        self._is_parked = is_parked
        self._round_s = stuck_after_s / ROUNDS_PER_STUCK_AFTER
        self._watchdog = Watchdog(stuck_after_s)
        self._episode_of = episode_of
        self._learning: dict[str, _Learning] = {}
        """Records of the trainers by adapter; the empty name is the run's weights."""
        self._untaught: dict[str, Stuck] = {}
        """Findings about the trainers' batches, by adapter."""

    async def run(self) -> None:
        """Check everything, round after round, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._round_s)
            self._watchdog.begin(loop.time())
            for core in self._cores:
                self._check_trainer(core)
                self._check_groups(core)
            self._check_weights()
            self._check_ended_episodes()
            engines = self._check_engines()
            for core in self._cores:
                await self._check_rollouts(core, engines)
            _log(self._watchdog.end())

    @property
    def stuck(self) -> tuple[Stuck, ...]:
        """Everything without progress as of the last round, and batches without anything to learn
        from."""
        return (*self._untaught.values(), *self._watchdog.stuck)

    @property
    def at_end(self) -> tuple[Stuck, ...]:
        """Findings that hold for a run that has ended: those of kind ``learning``."""
        by_name = {stuck.name: stuck for stuck in reversed(self.stuck) if stuck.kind == "learning"}
        return tuple(by_name.values())

    # ------------------------------------------------------------ rollouts

    @property
    def _cores(self) -> list[Core]:
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
        name = f"the iterator of tasks{_of(core.adapter)}"
        could_start = core.admissible_groups and not core.is_paused
        is_waiting = bool(core.handed.wants_batch and could_start)
        if is_waiting and watchdog.is_stuck("tasks", name, core.groups.next_group_id):
            skipped = core.prompts.skipped
            passed = f" that the group filter does not skip ({skipped} skipped)" if skipped else ""
            where = f"{core.admissible_groups} groups may start, but it yields no task{passed}"
            watchdog.report("tasks", name, where)
        unpublished = core.handed.unpublished_groups
        progress = (core.handed.count, core.trainer_version)
        holds_all = bool(unpublished and (core.is_paused or not core.admissible_groups))
        trainer = f"the trainer{_of(core.adapter)}"
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
        weights, watchdog = self._weights.weights, self._watchdog
        for late in weights.lagging_engines:
            name = f"v{late.version} {late.phase}"
            if watchdog.is_stuck("publish", name, late.engines):
                watchdog.report("publish", name, str(late))
        if self._weights.shared.reserved_for == "" and weights.is_writable:
            newest = weights.update.version if weights.update is not None else None
            if watchdog.is_stuck("publish", "the next version", newest):
                where = "it is still being written where engines copy it from"
                watchdog.report("publish", "the next version", where)

    # ------------------------------------------------------------ what is there to learn from

    def read_advantages(self, adapter: str) -> None:
        """Record that a trainer reads ``Batch.advantages``, so that zeros there matter to it."""
        self._learning_of(adapter).reads_advantages = True

    def handed_over(self, batch: ev.HandOver) -> None:
        """Record what a batch gives its trainer to learn from."""
        learning = self._learning_of(batch.adapter)
        if batch.number <= learning.newest:
            return  # offered again
        now_s = asyncio.get_running_loop().time()
        learning.newest, learning.batches = batch.number, learning.batches + 1
        if not learning.tokenless and not learning.equal:
            learning.since_s = now_s
        rows = [row for group in batch.groups for row in group.kept]
        if all(row.trained_versions() is None for row in rows):
            learning.tokenless += 1
            learning.is_masked = any(row.newest_version is not None for row in rows)
        else:
            learning.tokenless = 0
            self._count_rewards(learning, batch.groups)
        self._judge(batch.adapter, is_last=False)

    def _count_rewards(self, learning: _Learning, groups: list[Group]) -> None:
        """Record whether the rewards of a batch with tokens differ within any of its groups."""
        # In float32, as batches have them.
        rewards = [array("f", (*group.sibling_rewards, *group.kept_rewards)) for group in groups]
        if any(len(set(each)) > 1 for each in rewards) or _is_taught_otherwise(groups):
            learning.equal = learning.equal_groups = 0
            learning.is_comparable = False
            learning.rewards.clear()
            return
        learning.equal += 1
        learning.equal_groups += len(groups)
        learning.is_comparable |= any(len(each) > 1 for each in rewards)
        if len(learning.rewards) < 2:
            learning.rewards.update(reward for each in rewards for reward in each)

    def _judge(self, adapter: str, *, is_last: bool) -> None:
        """Find whether a trainer's newest batches have nothing to learn from. ``is_last``: the run
        has no further batch, so all of a short run's batches suffice."""
        learning = self._learning_of(adapter)
        where = self._without_tokens(adapter, learning, is_last=is_last)
        where = where or self._without_advantages(adapter, learning, is_last=is_last)
        if where is None:
            self._untaught.pop(adapter, None)
        else:
            self._find(adapter, "the batches", where, learning.since_s)

    def _without_tokens(self, adapter: str, learning: _Learning, *, is_last: bool) -> str | None:
        batches = learning.tokenless
        is_whole_run = is_last and batches == learning.batches
        if not batches or (batches < TOKENLESS_BATCHES_MIN and not is_whole_run):
            return None
        why = f"{self._episode_of(adapter)} ended without a token of `await episode.generate(…)`"
        if learning.is_masked:
            why = "all of their tokens are masked, because they are older than max_staleness allows"
        return f"the last {batches} have no token to train on: {why}"

    def _without_advantages(
        self, adapter: str, learning: _Learning, *, is_last: bool
    ) -> str | None:
        batches = learning.equal
        is_whole_run = is_last and batches == learning.batches > 1
        is_long = learning.equal_groups >= UNTAUGHT_GROUPS_MIN and batches >= UNTAUGHT_BATCHES_MIN
        if learning.tokenless or not (is_long or is_whole_run):
            return None
        constant = f"every reward is {min(learning.rewards, default=0.0):g}"
        is_constant = len(learning.rewards) == 1
        look = f"see what {self._episode_of(adapter)} returns"
        if learning.reads_advantages and not learning.is_comparable:
            return (
                f"batch.advantages, which the trainer reads, is 0 throughout the last {batches}: "
                f"with group_size=1 no reward is compared with another; raise group_size, or "
                f"subtract a baseline of your own from batch.rewards"
            )
        if learning.reads_advantages:
            why = constant if is_constant else "the rewards within each group are equal"
            return (
                f"batch.advantages, which the trainer reads, is 0 throughout the last {batches}: "
                f"{why}; {look}"
            )
        # Without a constant reward, a trainer's own baseline may find differences.
        if is_constant:
            return f"{constant} in the last {batches}, so a loss of rewards learns nothing; {look}"
        return None

    def _check_groups(self, core: Core) -> None:
        """Check that groups are kept for the batch that the trainer waits for."""
        learning = self._learning_of(core.adapter)
        kept = core.handed.count, core.buffered_groups
        if kept != learning.kept or not core.handed.requests:
            learning.kept, learning.discarded = kept, Counter(core.discarded_rollouts)
        if not core.handed.requests:
            return
        name = f"groups{_of(core.adapter)}"
        discarded = Counter(core.discarded_rollouts) - learning.discarded
        is_starved = self._watchdog.is_stuck("learning", name, kept)
        if is_starved and discarded.total() >= DISCARDED_GROUPS_MIN * core.rules.group_size:
            where = f"the trainer waits for a batch, but {self._describe_discards(core, discarded)}"
            self._watchdog.report("learning", name, where)

    def _describe_discards(self, core: Core, discarded: Counter[str]) -> str:
        reasons = ", ".join(f"{count} as {reason}" for reason, count in discarded.most_common())
        if core.prompts.drops_since_batch:
            kind, episode = type(core.prompts.filter).__name__, self._episode_of(core.adapter)
            remedy = f"group_filter={kind} drops every group: see what {episode} returns"
        elif "prompt_too_long" in discarded:
            remedy = "prompts are longer than the engines' context: shorten them, or raise it"
        else:
            remedy = "the log has the first traceback of each error in an episode"
        return f"no group was kept of the last {discarded.total()} rollouts ({reasons}); {remedy}"

    def tasks_ended(self, core: Core) -> None:
        """Judge all batches of a trainer that gets no more, or why it has got none."""
        learning = self._learning_of(core.adapter)
        learning.failure = None
        discarded = Counter(core.discarded_rollouts)
        if core.trained.batches or not discarded.total():
            self._judge(core.adapter, is_last=True)
            return
        where = f"the tasks are used up, and {self._describe_discards(core, discarded)}"
        failures = core.groups.failures.items()
        failed = {key.reason for key, _ in failures if key.outcome is FailureOutcome.DISCARDED}
        self._find(core.adapter, "groups", where, learning.since_s)
        if failed and discarded.keys() <= {*failed, "group_too_small"}:
            learning.failure = EpisodeError(f"no batch was made of any task: {where}")

    def run_ended(self) -> None:
        """Judge all batches of the trainers that have not asked for all that there would be."""
        for adapter, learning in self._learning.items():
            if learning.batches:
                self._judge(adapter, is_last=True)

    def failure_of(self, adapter: str) -> EpisodeError | None:
        """Return the error to raise in a trainer that has got no batch because the episodes of all
        tasks failed; None for other trainers."""
        return self._learning[adapter].failure if adapter in self._learning else None

    def _find(self, adapter: str, name: str, where: str, since_s: float) -> None:
        """Set the finding about a trainer's batches; log it if it is new."""
        before = self._untaught.get(adapter)
        now_s = asyncio.get_running_loop().time()
        found = Stuck("learning", f"{name}{_of(adapter)}", where, now_s - since_s)
        self._untaught[adapter] = found
        if before is None or before.name != found.name:
            _log([found])

    def _learning_of(self, adapter: str) -> _Learning:
        if adapter not in self._learning:
            self._learning[adapter] = _Learning(since_s=asyncio.get_running_loop().time())
        return self._learning[adapter]

    def forget(self, adapter: str) -> None:
        """Forget the batches of an adapter that is trained no longer."""
        self._learning.pop(adapter, None)
        self._untaught.pop(adapter, None)


def _is_taught_otherwise(groups: list[Group]) -> bool:
    """Whether turns have rewards of their own, or another model's log-probs to learn from."""
    turns = [turn for group in groups for row in group.kept for turn in row.turns]
    return any(turn.reward is not None for turn in turns) or any(
        turn.attachments is not None and turn.attachments.entries("teacher_logprobs", 0) is not None
        for turn in turns
    )


def _of(adapter: str) -> str:
    return f" of adapter {adapter!r}" if adapter else ""


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
