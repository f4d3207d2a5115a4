"""Oracle of a simulated run: checks the run's promises after every event of the core.

:class:`InvariantChecker` keeps its own records of the events and commands, and recomputes every
token from the simulated model. The oracle shares no code with the core that it checks.
"""

from collections import Counter
from collections.abc import Callable, Sequence

from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.core import Core
from tidegate.orchestrator.core.group import Group
from tidegate.orchestrator.core.rollout import Rollout, RolloutState, Turn
from tidegate.orchestrator.core.turns import CONSECUTIVE_LOSSES_MAX, LOSSES_TOTAL_MAX
from tidegate.simulation.checks.coverage import CoverageMark
from tidegate.simulation.checks.ground_truth import GroundTruth
from tidegate.simulation.checks.model import check_turn
from tidegate.simulation.faults.faults import FaultKind
from tidegate.simulation.faults.scenario import WEIGHTS_TIMEOUT_S, Scenario, Script, ScriptedTurn


class TrainedRows:
    """Rows that the trainer of one run has received, and those that it has discarded."""

    def __init__(self) -> None:
        self._rows: dict[int, list[tuple[int, int, int | None]]] = {}
        """Batch -> (rollout, number of trainable tokens, oldest version of these) of each row."""
        self._reused: dict[int, set[int]] = {}
        """Batch -> indices of its rows that were trained before."""
        self._discarded_rows: dict[int, dict[int, str]] = {}
        """Batch -> row index -> reason, of the rows that the trainer has discarded."""
        self._trainer_versions: dict[int, int] = {}
        """Batch -> trainer version at which the batch is trained: planned, or when it was named."""

    @property
    def tokens(self) -> int:
        """Number of trained tokens, each once, without those of discarded rows."""
        return sum(tokens for batch in self._rows for _, tokens, _ in self._trained_of(batch, {1}))

    def handed(self, batch: ev.HandOver) -> None:
        """Add a batch that the trainer has received."""
        rows = [rollout for group in batch.groups for rollout in group.kept]
        self._rows[batch.number] = [
            (rollout.root.rollout_id, *_tokens_from(rollout, batch.oldest_trainable))
            for rollout in rows
        ]
        self._reused[batch.number] = {index for index, row in enumerate(rows) if row.use > 1}
        self._trainer_versions[batch.number] = batch.trainer_version

    def named(self, batch: int, trainer_version: int) -> None:
        """Record the trainer version at which a batch was named."""
        self._trainer_versions[batch] = trainer_version

    def removed(self, batch: int) -> None:
        """Remove a batch that did not reach the trainer, or that was lost."""
        del self._rows[batch]
        self._discarded_rows.pop(batch, None)

    def discarded(self, event: ev.RowsDiscarded) -> None:
        """Record the rows that the trainer has discarded; the first reason given for a row
        counts."""
        reasons = self._discarded_rows.setdefault(event.batch, {})
        reasons.update({row: event.reason for row in event.rows if row not in reasons})

    def is_empty(self, batch: int) -> bool:
        """Return whether the trainer has discarded all rows of a batch."""
        return len(self._discarded_rows.get(batch, {})) == len(self._rows[batch])

    def staleness(self, batch: int, trainer_version: int) -> int:
        """Return the staleness of a batch's oldest trainable token at a trainer version."""
        trained = self._trained_of(batch, {1, 2})
        versions = [oldest for _, _, oldest in trained if oldest is not None]
        return trainer_version - min(versions, default=trainer_version)

    def check(self, core: Core) -> None:
        """Check that the core counts discarded rows under their reasons, and not as trained,
        rollouts by their staleness, and further uses apart.

        Raises:
            AssertionError: a count of the core differs.
        """
        tokens = self._discarded_tokens()
        counted = {reason: core.ledger.discarded[reason] for reason in tokens}
        assert counted == tokens, f"{dict(tokens)} tokens were discarded, {counted} are counted"
        assert core.ledger.trained == self.tokens, f"{core.ledger.trained} != {self.tokens} tokens"
        trained, reused, staleness = 0, 0, Counter[int]()
        for batch, version in self._trainer_versions.items():
            oldest: dict[int, list[int]] = {}
            for rollout, _, version_of_row in self._trained_of(batch, {1, 2}):
                oldest.setdefault(rollout, []).extend(
                    [] if version_of_row is None else [version_of_row]
                )
            trained += len({rollout for rollout, _, _ in self._trained_of(batch, {1})})
            reused += len({rollout for rollout, _, _ in self._trained_of(batch, {2})})
            staleness.update(version - min(versions) for versions in oldest.values() if versions)
        assert core.trained.rollouts == trained, f"{core.trained.rollouts} != {trained}"
        assert core.trained.staleness == staleness, (
            f"rollouts by staleness are {staleness}, counted as {core.trained.staleness}"
        )
        again = [row for batch in self._rows for row in self._trained_of(batch, {2})]
        counted_again = core.trained.reused_rollouts, core.trained.reused_tokens
        tokens_again = sum(tokens for _, tokens, _ in again)
        assert counted_again == (reused, tokens_again), (
            f"{reused} rollouts of {tokens_again} tokens were trained again, not {counted_again}"
        )

    def _trained_of(self, batch: int, uses: set[int]) -> list[tuple[int, int, int | None]]:
        """Return a batch's rows that were not discarded: of first uses (1), of further ones (2)."""
        discarded, reused = self._discarded_rows.get(batch, {}), self._reused.get(batch, set())
        rows = enumerate(self._rows.get(batch, ()))
        return [
            row
            for index, row in rows
            if index not in discarded and (2 if index in reused else 1) in uses
        ]

    def _discarded_tokens(self) -> Counter[str]:
        tokens: Counter[str] = Counter()
        for batch, reasons in self._discarded_rows.items():
            for row, reason in reasons.items():
                if row not in self._reused[batch]:
                    tokens[reason] += self._rows[batch][row][1]
        return tokens


def _tokens_from(rollout: Rollout, oldest_trainable: int) -> tuple[int, int | None]:
    """Return the number of tokens that version ``oldest_trainable`` or a later one sampled, and the
    oldest version of these tokens."""
    spans = [span for turn in rollout.turns for span in turn.spans()]
    trained = [span for span in spans if span.version >= oldest_trainable]
    oldest = min((span.version for span in trained), default=None)
    return sum(span.end - span.start for span in trained), oldest


class CheckedCore(Core):
    """Core whose invariants are checked after every event. Set both callbacks before use."""

    on_event: Callable[[ev.Event, list[ev.Command]], None]
    """Called with each event and its commands; raises if a promise is broken."""
    on_failure: Callable[[BaseException], None]
    """Called with an error that :meth:`handle` raises, because callers may catch that error."""

    def handle(self, event: ev.Event) -> list[ev.Command]:
        """Handle the event as :meth:`Core.handle` does, then check all invariants."""
        try:
            commands = super().handle(event)
            self.check()
            self.on_event(event, commands)
        except Exception as error:
            self.on_failure(error)
            raise
        return commands


HAND_OVER_EVENTS = (
    ev.BatchTaken,
    ev.BatchReturned,
    ev.BatchesTrained,
    ev.VersionPublished,
    ev.VersionRetracted,
    ev.RowsDiscarded,
)
"""Events after which the oracle compares the batches that the trainer holds with the core's."""

ADMITTED_AGAIN = ("stale", "tail", "rolled_back")
"""Reasons of discarded groups whose tasks are admitted again."""

MASKING = ("mask", "split")
"""Settings of ``deadline_policy`` with which tokens older than the bound are masked."""


class InvariantChecker:
    """Oracle of one run: :meth:`check_event` is called after every event of the core."""

    def __init__(
        self, scenario: Scenario, ground_truth: GroundTruth, coverage: set[CoverageMark]
    ) -> None:
        self._scenario = scenario
        self._ground_truth = ground_truth
        self._coverage = coverage
        self._outstanding_max = scenario.outstanding_groups_max
        self._engines_without_faults = _engines_without_faults(scenario)
        """Names of the engines that must not be given up, because nothing goes wrong with them."""
        self.progress = 0
        """Counter that rises with each token, batch, publish and ended episode; a run whose counter
        does not change for long is stuck."""
        self._tokens_arrived = 0
        self._evaluation_tokens = 0
        """Number of arrived tokens that were sampled for evaluations."""
        self._evaluation_rollouts: set[int] = set()
        self._evaluation_turns: set[tuple[str, int]] = set()
        """(engine, handle) of each turn of an evaluation rollout."""
        self._kept: set[str] = set()
        """Engines that are kept for evaluations."""
        self._serving: dict[str, int] = {}
        """Engine -> the version that it serves, as reported to the orchestrator."""
        self._epochs: dict[str, int] = {}
        """Engine -> the epoch of its newest process that has joined."""
        self._stepped: dict[str, int] = {}
        """Engine -> the version of its last step."""
        self.live_version = 0
        """Newest version that every engine has served, or a later one, as reported."""
        self._published = 0
        self._newest_group = -1
        self._admitted_as: dict[int, int] = {}
        """Rollout -> the group that it was admitted in; the remainder of a split group has
        another."""
        self._irregular_version = 0
        """Newest version that was made from fewer batches than the policy is told. It ages
        outstanding groups by a version that admission does not count on."""
        self._aged_groups = -1
        """Newest group that may get too old, because it was admitted before an irregular version
        was live, or because the trainer trained on a batch before an older one."""
        self._admitted_groups = 0
        self._dropped_groups = 0
        self._discarded: Counter[int] = Counter()
        """Group -> number of its rollouts that were discarded."""
        self._training: dict[int, tuple[int | None, int]] = {}
        """Batch -> (version published after it, number of its groups). An entry is removed when
        that version is live."""
        self._running_rollouts: dict[int, int] = {}
        """Running rollout -> its group."""
        self._handed: dict[int, ev.HandOver] = {}
        """Batches handed over and not returned, by number."""
        self._held: set[int] = set()
        """Batches that the trainer has, and that no publish has named."""
        self._begun: set[int] = set()
        """Batches that the trainer has begun to train on."""
        self._lost: set[int] = set()
        """Batches that the run has declared lost."""
        self._lost_groups: set[int] = set()
        """Groups of the lost batches."""
        self._uses: dict[int, list[int]] = {}
        """Group -> the batches that it was handed over in and that did not come back; lost ones
        included, because the trainer may have trained on them."""
        self._bad_versions: set[int] = set()
        """Versions that the trainer has rolled back."""
        self._named = 0
        """Number of batches named since the last release of a version."""
        self._wanted = 0
        """Number of engines that an elasticity policy wanted last; 0 before the first event."""
        self._drains_are_planned = any(f.kind is FaultKind.DRAIN for f in scenario.faults)
        self._draining: set[str] = set()
        """Engines that are about to leave, and must get no turns."""
        self._drained: set[tuple[str, int]] = set()
        """(engine, epoch) of each process that was drained, and must not join again."""
        self._departed: set[str] = set()
        """Engines that were given up, or have sent a goodbye."""
        self.admitted: Counter[int] = Counter()
        """Task -> number of groups admitted for it."""
        self.trained: Counter[int] = Counter()
        """Task -> number of groups of it that were trained."""
        self.dropped: Counter[int] = Counter()
        """Task -> number of groups of it that were dropped for good."""
        self.oldest_staleness = 0
        """Largest staleness of a trained token, in versions."""
        self.trained_rows = TrainedRows()
        self._placed: dict[str, dict[int, int]] = {}
        """Engine -> handle -> rollout, of the turns that were submitted to the engine."""
        self._losses: Counter[int] = Counter()
        """Rollout -> number of engines that crashed while they had its current turn."""
        self.stopped: set[int] = set()
        """Rollouts whose episode was cancelled because their group was given up."""
        self._refused_rollouts: set[int] = set()
        """Root rollouts of which a turn, or a turn of a branch, was refused for lost engines."""
        self._excused_tasks: set[int] = set()
        """Tasks of such rollouts whose script would have succeeded."""

    # ------------------------------------------------------------ every event

    def check_event(self, core: Core, event: ev.Event, commands: list[ev.Command]) -> None:
        """Check one event and the core's commands for it.

        Raises:
            AssertionError: a promise is broken.
        """
        self._count(event)
        for command in commands:
            match command:
                case ev.Submit(engine=engine, message=message):
                    self._check_submit(engine, message.session - 1)
                    self._place(engine, message.turn, message.session - 1)
                    if message.session - 1 in self._evaluation_rollouts:
                        self._evaluation_turns.add((engine, message.turn))
                case ev.Cancel(engine=engine, handle=handle):
                    self._placed.get(engine, {}).pop(handle, None)
                case ev.EndTurns(turns=turns):
                    for turn in turns:
                        self._losses.pop(turn.rollout_id, None)
                case ev.FailTurn(turn=turn):
                    self._check_refused(turn)
                case ev.StartEpisode(rollout=rollout) if rollout.group_id >= 0:
                    self._running_rollouts[rollout.rollout_id] = rollout.group_id
                    self._admitted_as.setdefault(rollout.rollout_id, rollout.group_id)
                    self._newest_group = max(self._newest_group, rollout.group_id)
                    if self.live_version < self._irregular_version:
                        self._aged_groups = self._newest_group
                case ev.RetryEpisode(rollout=rollout):
                    self._check_retry(rollout)
                case ev.StartEpisode(rollout=rollout):
                    self._evaluation_rollouts.add(rollout.rollout_id)
                case ev.StartBranch(rollout=rollout) if rollout.group_id < 0:
                    self._evaluation_rollouts.add(rollout.rollout_id)
                case ev.StopEpisode(rollout=rollout):
                    self.stopped.add(rollout.rollout_id)
                    self._coverage.add(CoverageMark.STOPPED)
                case ev.HandOver():
                    self._check_batch(command)
                case ev.LoseBatch(number=number):
                    self._lose_batch(number)
                case ev.Record(rollout=rollout, task=task):
                    self._check_record(rollout, task)
        if isinstance(event, ev.RowsDiscarded | ev.BatchesTrained):
            self.trained_rows.check(core)
        if isinstance(event, HAND_OVER_EVENTS):
            held = [batch.number for batch in core.handed.held]
            assert held == sorted(self._held), f"the trainer holds {self._held}, not {held}"
        if isinstance(event, ev.BatchRequested) and core.pace.limit is not None:
            self._coverage.add(CoverageMark.PACED)
        if isinstance(event, ev.TurnRequested) and not commands:
            self._coverage.add(CoverageMark.ALONE)
        self._release()
        generated = core.ledger.generated + core.evaluation_ledger.generated
        assert generated == self._tokens_arrived, f"{generated} != {self._tokens_arrived} tokens"
        evaluated = core.evaluation_ledger.generated
        assert evaluated == self._evaluation_tokens, (
            f"{evaluated} tokens of evaluations are counted, {self._evaluation_tokens} came"
        )
        outstanding = self._admitted_groups - self._dropped_groups - sum(self.trained.values())
        outstanding += sum(groups for _, groups in self._training.values())
        assert outstanding <= self._outstanding_max, (
            f"{outstanding} groups are outstanding of {self._outstanding_max} allowed"
        )

    def check_fleet(self, event: ev.Event, *, wanted: int, launched: Sequence[str]) -> None:
        """Check that an elasticity policy's limits hold, and that it retires no engine too many,
        and none that is kept for evaluations. ``launched``: engines that the run has started."""
        policy, kept = self._scenario.elasticity, self._scenario.engines_kept
        assert policy is not None
        assert policy.engines_min <= wanted <= policy.engines_max, f"{wanted} engines are wanted"
        assert len(launched) <= policy.engines_max + kept, f"{launched} are started"
        if self._wanted and wanted != self._wanted:
            is_more = wanted > self._wanted
            mark = CoverageMark.ELASTIC_GREW if is_more else CoverageMark.ELASTIC_SHRANK
            self._coverage.add(mark)
        self._wanted = wanted
        if type(event) is ev.EngineDraining and not self._drains_are_planned:
            assert event.engine not in self._kept, f"{event.engine} is kept for evaluations"
            left = [name for name in launched if name not in self._draining]
            assert len(left) >= wanted + kept, f"only {left} are left of {wanted} + {kept}"

    def _count(self, event: ev.Event) -> None:
        match event:
            case ev.StepArrived():
                self._count_step(event)
            case ev.EngineJoined(engine=engine, weight_version=version, epoch=epoch):
                if self._epochs.get(engine) != epoch:
                    self._lose(engine, is_crash=True)
                    self._leave(engine)
                assert (engine, epoch) not in self._drained, f"{engine} joined again, drained"
                self._epochs[engine] = epoch
                self._serve(engine, version)
                if engine in self._departed:
                    self._coverage.add(CoverageMark.CAME_BACK)
            case ev.EngineSwapped(engine=engine, version=version):
                assert version <= self._published, f"{engine} serves v{version}, not published"
                if engine in self._serving:  # otherwise the engine was given up meanwhile
                    self._serve(engine, version)
            case ev.EvaluationEngineChosen(engine=engine, is_kept=is_kept):
                (self._kept.add if is_kept else self._kept.discard)(engine)
                self._raise_live_version()
            case ev.EngineDraining(engine=engine):
                self._draining.add(engine)
                has_turns = bool(self._placed.get(engine))
                mark = CoverageMark.DRAINED_AT_WORK if has_turns else CoverageMark.DRAINED
                self._coverage.add(mark)
            case ev.EngineLeft(engine=engine, is_crash=is_crash):
                self._lose(engine, is_crash=is_crash)
                if engine in self._draining:
                    self._drained.add((engine, self._epochs[engine]))
                assert engine not in self._engines_without_faults, (
                    f"{engine} was given up without a fault"
                )
                self._departed.add(engine)
                self._stepped.pop(engine, None)
                self._leave(engine)
            case ev.TaskArrived(task=task):
                self._admitted_groups += 1
                assert isinstance(task, int)
                self.admitted[task] += 1
            case ev.VersionPublished(version=version):
                assert version > self._published, f"v{version} after v{self._published}"
                if version - self._published > self._named // self._scenario.batches_per_version:
                    self._irregular_version, self._aged_groups = version, self._newest_group
                self._published, self._named = version, 0
                self._training = {
                    number: (version if v is None and number not in self._held else v, groups)
                    for number, (v, groups) in self._training.items()
                }
                self.progress += 1
            case ev.VersionRetracted(version=version):
                self._bad_versions.update(range(version, self._published + 1))
                self.live_version = max(self.live_version, self._published + 1)
            case ev.BatchesTrained(batches=batches):
                self._name(batches)
            case ev.RowsDiscarded(batch=number):
                self.trained_rows.discarded(event)
                if number in self._held and self.trained_rows.is_empty(number):
                    self._held.remove(number)  # nothing is left to train on, and nothing to age
                    self._training[number] = (None, 0)
                    self._named += 1
            case ev.BatchReturned(number=number):
                self._coverage.add(CoverageMark.BATCH_RETURNED)
                self._take_back(number)
            case ev.EpisodeReturned() | ev.EpisodeFailed():
                self._running_rollouts.pop(event.rollout_id, None)
                self.progress += 1

    # ------------------------------------------------------------ turns that end engines

    def _place(self, engine: str, handle: int, rollout_id: int) -> None:
        """Record a submitted turn, and check that not too many engines were lost with it."""
        losses = self._losses[rollout_id]
        assert losses < LOSSES_TOTAL_MAX, (
            f"rollout {rollout_id} is sent to an engine after {losses} lost engines"
        )
        for turns_of_engine in self._placed.values():
            former_handles = [
                former_handle
                for former_handle, rollout_of_turn in turns_of_engine.items()
                if rollout_of_turn == rollout_id
            ]
            for former_handle in former_handles:
                del turns_of_engine[former_handle]
        self._placed.setdefault(engine, {})[handle] = rollout_id

    def _lose(self, engine: str, *, is_crash: bool) -> None:
        lost = self._placed.pop(engine, {})
        if is_crash:
            self._losses.update(lost.values())

    def _check_refused(self, turn: Turn) -> None:
        """Record a refused turn, if the refusal is for engines that were lost with it."""
        losses = self._losses.pop(turn.rollout_id, 0)
        if losses < CONSECUTIVE_LOSSES_MAX:
            return
        self._refused_rollouts.add(turn.rollout.root.rollout_id)
        self._coverage.add(CoverageMark.TURN_ENDED_ENGINES)

    def _count_step(self, step: ev.StepArrived) -> None:
        self._ground_truth.arrived(step)
        self._tokens_arrived += len(step.token_ids)
        turns_of_engine = step.turns.tolist()
        counts = [1] * len(turns_of_engine) if step.counts is None else step.counts.tolist()
        self._evaluation_tokens += sum(
            tokens
            for handle, tokens in zip(turns_of_engine, counts, strict=True)
            if (step.engine, handle) in self._evaluation_turns
        )
        self.progress += len(step.token_ids)
        before = self._stepped.get(step.engine, 0)
        assert step.version >= before, f"{step.engine} went from v{before} to v{step.version}"
        self._stepped[step.engine] = step.version

    def _serve(self, engine: str, version: int) -> None:
        self._serving[engine] = version
        self._raise_live_version()

    def _raise_live_version(self) -> None:
        training = [version for name, version in self._serving.items() if name not in self._kept]
        self.live_version = max(self.live_version, min(training, default=0))

    def _leave(self, engine: str) -> None:
        self._draining.discard(engine)
        self._kept.discard(engine)
        self._serving.pop(engine, None)
        self._raise_live_version()

    def _release(self) -> None:
        live = self.live_version
        for number, (version, _) in list(self._training.items()):
            if version is not None and version <= live:
                del self._training[number]

    def _name(self, batches: tuple[int, ...]) -> None:
        """Check the batches that a publish names: their age is final."""
        bound = self._scenario.staleness_bound
        assert self._begun.issuperset(batches), f"{batches} are named, trained are {self._begun}"
        for number in self._held.intersection(batches):
            staleness = self.trained_rows.staleness(number, self._published)
            assert bound is None or staleness <= bound, (
                f"batch {number} is named at v{self._published}, staleness {staleness}, not {bound}"
            )
            self._held.remove(number)
            self._named += 1
            self.trained_rows.named(number, self._published)
        if any(number < max(batches) for number in self._held):
            self._aged_groups = self._newest_group

    def _take_back(self, number: int) -> None:
        """Undo the hand-over of a batch that did not reach the trainer."""
        batch = self._handed.pop(number)
        self.progress -= 1
        if number in self._held:  # else it was lost while it was on offer
            self._remove_batch(batch)
            for group in batch.groups:
                self._uses[group.group_id].remove(number)

    def _lose_batch(self, number: int) -> None:
        """Record that the trainer must not train on a held batch any more."""
        self._coverage.add(CoverageMark.BATCH_LOST)
        assert number in self._held, f"batch {number} is lost, but the trainer holds {self._held}"
        self._lost.add(number)
        batch = self._handed[number]
        self._remove_batch(batch)
        self._lost_groups |= {group.group_id for group in batch.groups if group.use == 1}
        self._dropped_groups += _slots(batch)

    def _remove_batch(self, batch: ev.HandOver) -> None:
        self._held.remove(batch.number)
        self._training.pop(batch.number, None)
        self.trained_rows.removed(batch.number)
        for group in batch.groups:
            assert isinstance(group.task, int)
            self.trained[group.task] -= group.use == 1 and not group.is_split_remainder

    def _check_submit(self, engine: str, rollout_id: int) -> None:
        assert engine not in self._draining, f"{engine} got a turn while it drains"
        if engine in self._kept:
            is_evaluation = rollout_id in self._evaluation_rollouts
            assert is_evaluation, f"{engine} is kept for evaluations and got a turn of training"
            return
        version = self._serving.get(engine, -1)
        assert version >= self.live_version, (
            f"{engine} with v{version} got a turn while v{self.live_version} is live everywhere"
        )

    # ------------------------------------------------------------ rollouts end

    def _check_retry(self, rollout: Rollout) -> None:
        self._coverage.add(CoverageMark.BEGUN_AGAIN)
        assert rollout.retries <= self._scenario.retries_max, (
            f"rollout {rollout.rollout_id} begins again for the {rollout.retries}th time"
        )
        if rollout.group_id >= 0:
            self._running_rollouts[rollout.rollout_id] = rollout.group_id

    def _check_record(self, rollout: Rollout, task: object) -> None:
        if rollout.state is not RolloutState.DISCARDED:
            return
        assert isinstance(task, int)
        reason = rollout.discard_reason
        expected = self._scenario.script(task, rollout.index).failure
        is_refused = rollout.root.rollout_id in self._refused_rollouts
        if is_refused and expected is None:
            self._coverage.add(CoverageMark.INNOCENT_REFUSED)
            self._excused_tasks.add(task)
        elif reason in ("episode_error", "episode_timeout", "turn_refused", "no_engine"):
            # An episode whose turn was refused for lost engines may not reach its scripted end.
            # A pinned turn is refused once the last engine with its version is lost.
            may_be_refused = is_refused or rollout.pinned_version is not None
            is_explained = reason == expected or (may_be_refused and reason == "turn_refused")
            assert is_explained, f"task {task}: {reason}, but expected {expected}"
        if rollout.group_id < 0 or rollout.branch_of is not None:
            return
        self._running_rollouts.pop(rollout.rollout_id, None)
        if reason == "stale" and self._scenario.deadline_policy != "drop":
            group = self._admitted_as[rollout.rollout_id]
            assert group <= self._aged_groups, (
                f"admission let rollout {rollout.rollout_id} of group {group} get too old, though "
                f"each version was made from its batches"
            )
        if reason == "stale":
            self._coverage.add(CoverageMark.STALE)
        if rollout.group_id in self._lost_groups:
            return
        self._discarded[rollout.group_id] += 1
        if self._discarded[rollout.group_id] == self._scenario.group_size:
            self._dropped_groups += 1
            is_filtered = reason == "zero_variance"
            self._coverage.add(CoverageMark.FILTERED if is_filtered else CoverageMark.DROPPED)
            if reason not in ADMITTED_AGAIN:
                self.dropped[task] += 1

    def _check_batch(self, batch: ev.HandOver) -> None:
        ahead = batch.trainer_version - self._published
        per_version = self._scenario.batches_per_version
        assert ahead == len(self._held) // per_version, (
            f"batch {batch.number} is planned to be trained {ahead} versions after the published "
            f"one, but the trainer holds {sorted(self._held)}, of {per_version} per version"
        )
        slots, size = _slots(batch), self._scenario.groups_per_batch
        assert batch.groups
        assert slots <= size
        is_fresh = all(group.use == 1 for group in batch.groups)
        assert is_fresh or len(batch.groups) == size, "used groups, but no whole batch"
        self.progress += 1
        self._handed[batch.number] = batch
        self._held.add(batch.number)
        self._training[batch.number] = (None, slots)
        self._check_order(batch.groups)
        is_masking = (
            self._scenario.policy == "bounded" and self._scenario.deadline_policy in MASKING
        )
        oldest_trainable = (
            max(0, batch.trainer_version - self._scenario.max_staleness) if is_masking else 0
        )
        assert batch.oldest_trainable == oldest_trainable, (
            f"tokens are masked below v{batch.oldest_trainable}"
        )
        for group in batch.groups:
            self._check_use(group, batch)
            self._check_group(group, oldest_trainable, batch.trainer_version)
        self.trained_rows.handed(batch)

    def _check_use(self, group: Group, batch: ev.HandOver) -> None:
        """Check that a group's earlier uses are in versions, and allow another one."""
        uses = self._uses.setdefault(group.group_id, [])
        assert group.use == len(uses) + 1, f"group {group.group_id}: use {group.use} after {uses}"
        assert group.use <= self._scenario.max_uses, f"group {group.group_id}: use {group.use}"
        if uses:
            last = uses[-1]
            assert last not in self._held, f"{group.group_id} is used again, and is held"
            version, _ = self._training.get(last, (0, 0))
            assert version is not None, f"{group.group_id} is used again before batch {last} is out"
            rows = [
                [row.rollout_id for row in each.kept]
                for each in (*self._handed[last].groups, group)
                if each.group_id == group.group_id
            ]
            assert rows[0] == rows[1], f"group {group.group_id} had rows {rows[0]}, has {rows[1]}"
            self._coverage.add(CoverageMark.REUSED)
            oldest = min((v for r in group.kept if (v := r.oldest_version) is not None), default=-1)
            if batch.trainer_version - oldest == self._scenario.staleness_bound:
                self._coverage.add(CoverageMark.REUSED_OLDEST)
        uses.append(batch.number)

    def begin_training(self, batch: ev.HandOver) -> None:
        """Check a batch when the trainer begins to train on it.

        Raises:
            AssertionError: the batch is lost, was trained before, or has a token that is of a bad
                version or older than the bound allows.
        """
        number, bound = batch.number, self._scenario.staleness_bound
        assert number in self._held, (
            f"batch {number} is trained, but the trainer holds {self._held}"
        )
        assert number not in self._begun, f"batch {number} is trained twice"
        self._begun.add(number)
        rows = (rollout for group in batch.groups for rollout in group.kept)
        versions = {span.version for row in rows for turn in row.turns for span in turn.spans()}
        bad = versions & self._bad_versions
        assert not bad, f"batch {number} is trained, with tokens of the bad versions {bad}"
        staleness = self.trained_rows.staleness(number, self._published)
        assert bound is None or staleness <= bound, (
            f"batch {number} is trained at v{self._published}, staleness {staleness}, not {bound}"
        )

    def _check_order(self, groups: list[Group]) -> None:
        """Check that no batched group overtakes a running one by more than the order allows."""
        scenario, chosen = self._scenario, {g.group_id for g in groups if g.use == 1}
        newest = max(chosen, default=-1)
        if any(group_id < newest for group_id in self._running_rollouts.values()):
            self._coverage.add(CoverageMark.OVERTAKEN)
        is_window = scenario.policy == "bounded" and scenario.order == "window"
        if not is_window and not scenario.is_in_order:
            return
        window = scenario.window_groups if is_window else 1
        oldest = min(self._running_rollouts.values(), default=None)
        if oldest is not None:
            assert newest < oldest + window, (
                f"group {newest} was trained before group {oldest}, outside a window of {window}"
            )

    def _check_group(self, group: Group, oldest_trainable: int, version: int) -> None:
        task = group.task
        assert isinstance(task, int)
        needed = 1 if group.is_split_remainder else min(2, self._scenario.group_size)
        assert group.num_kept >= needed, f"group of {group.num_kept} kept rollouts, not {needed}"
        roots = [rollout for rollout in group.rollouts if rollout.branch_of is None]
        is_whole = len(roots) == self._scenario.group_size
        if group.is_split_remainder:
            self._coverage.add(CoverageMark.SPLIT)
        if self._scenario.filters_groups and is_whole:
            assert len({rollout.reward for rollout in group.kept}) > 1, "all rewards are equal"
        self.trained[task] += group.use == 1 and not group.is_split_remainder
        assert self.trained[task] == 1, f"task {task} is trained {self.trained[task]} times"
        for rollout in group.kept:
            self._check_rollout(rollout, task, oldest_trainable, version)

    def _check_rollout(
        self, rollout: Rollout, task: int, oldest_trainable: int, version: int
    ) -> None:
        script = self._scenario.script(task, rollout.index)
        if script.failure is None:
            assert rollout.reward == script.reward
        else:  # by the policy's doing
            assert script.failure == "episode_timeout", f"trained after {script.failure}"
            assert rollout.reward == self._scenario.failure_reward is not None
            self._coverage.add(CoverageMark.FAILURE_REWARDED)
        scripted = script.turns
        if (forked := rollout.branch_of) is not None:
            scripted = script.branch
            _check_beginning(rollout, forked, script)
        if rollout.oldest_version != rollout.newest_version:
            self._coverage.add(CoverageMark.MIXED)
        self._check_finish_reasons(rollout, scripted)
        for turn in rollout.turns:
            self._check_turn(turn, oldest_trainable, version)

    def _check_finish_reasons(self, rollout: Rollout, scripted: list[ScriptedTurn]) -> None:
        """Check that every turn reached its end, except turns that the episode gave up."""
        may_give_up = [turn.timeout_s is not None for turn in scripted]
        if self._scenario.episode_park_after_s is not None and any(may_give_up):
            # The episode may have given up a turn while it was parked before the turn.
            assert len(rollout.turns) <= len(scripted)
            return
        for turn, may_end_early in zip(rollout.turns, may_give_up, strict=True):
            is_whole = turn.finish_reason in ("stop", "length")
            assert is_whole or may_end_early, f"{rollout.rollout_id}: {turn.finish_reason}"

    def _check_turn(self, turn: Turn, oldest_trainable: int, version: int) -> None:
        without_prefills = self._scenario.without_prefills
        check_turn(turn, self._ground_truth.content_of, without_prefills=without_prefills)
        if any(span.kv is None for span in turn.spans()):
            self._coverage.add(CoverageMark.KV_UNKNOWN)
        spans = [span for span in turn.spans() if span.version >= oldest_trainable]
        if len(spans) < len(turn.spans()):
            self._coverage.add(CoverageMark.MASKED)
        if not spans:
            return  # the turn was given up before its first token, or all its tokens are masked
        staleness = version - min(span.version for span in spans)
        bound = self._scenario.staleness_bound
        assert bound is None or staleness <= bound, (
            f"{turn.rollout_id}: staleness {staleness} > {bound}"
        )
        self.oldest_staleness = max(self.oldest_staleness, staleness)
        if bound and staleness == bound:
            self._coverage.add(CoverageMark.OLDEST)
        if len({span.engine for span in spans}) > 1:
            self._coverage.add(CoverageMark.MOVED)
        if any(span.kv and span.kv.oldest != span.kv.newest for span in spans):
            self._coverage.add(CoverageMark.MIXED_KV)

    # ------------------------------------------------------------ the end

    def _is_filtered(self, scripts: list[Script]) -> bool:
        """Return whether the filter drops a group of these scripts for equal rewards."""
        scenario = self._scenario
        enough = scenario.decide_after or scenario.group_size
        counts = Counter(script.reward for script in scripts)
        return scenario.filters_groups and max(counts.values()) >= min(enough, len(scripts))

    def check_end(self, core: Core, taken_tasks: set[int], received_groups: list[int]) -> None:
        """Check that every task was trained once or dropped for a reason, and no token remains.

        ``taken_tasks``: tasks that the run has taken from the trainer's iterators.
        ``received_groups``: groups that the trainer received, in order.

        Raises:
            AssertionError: a task, group or token was lost or counted twice.
        """
        lost = taken_tasks - self.admitted.keys()
        assert not lost, f"tasks {sorted(lost)} were taken from the trainer and never admitted"
        handed = [g.group_id for batch in self._handed.values() for g in batch.groups]
        assert received_groups == handed, f"{handed} were handed over, {received_groups} came"
        for task in self.admitted:
            times = self.trained[task] + self.dropped[task]
            assert times == 1, f"task {task} was trained {self.trained[task]} times, {times} in all"
            scripts = [self._scenario.script(task, i) for i in range(self._scenario.group_size)]
            is_whole = all(script.failure is None for script in scripts)
            is_whole &= task not in self._excused_tasks
            if is_whole and not self._is_filtered(scripts):
                assert self.trained[task] == 1, f"task {task} was dropped without a reason"
        ledger = core.ledger
        assert ledger.in_flight == ledger.buffered == 0, ledger.snapshot()
        self.trained_rows.check(core)


def _slots(batch: ev.HandOver) -> int:
    """Return the number of a batch's groups that count in admission."""
    return sum(group.use == 1 and not group.is_split_remainder for group in batch.groups)


def _check_beginning(branch: Rollout, forked: Rollout, script: Script) -> None:
    """Check that a branch begins with the context that its episode had when it forked."""
    if len(forked.turns) < len(script.turns):
        return  # the episode gave up turns while it was parked; which ones is not recorded
    last = forked.turns[script.forks_before - 1] if script.forks_before else None
    shared = last.start + last.length if last else 0
    same = branch.token_ids[:shared] == forked.token_ids[:shared]
    assert same, f"branch {branch.rollout_id} differs from the context that it was forked from"


def _engines_without_faults(scenario: Scenario) -> set[str]:
    """Return the engines without planned faults; none if engines may lag or turns are deadly."""
    if scenario.weight_update_timeout_s < WEIGHTS_TIMEOUT_S or scenario.deadly_turns:
        return set()
    if scenario.is_elastic:  # any engine may be retired
        return set()
    faulty = {fault.engine for fault in scenario.faults}
    return {f"engine-{number}" for number in range(scenario.engines) if number not in faulty}
