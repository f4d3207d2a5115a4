"""Oracle of a simulated run: checks the run's promises after every event of the core.

Made by :mod:`simulation` and :mod:`crash_restart`, which call it after each event.
:class:`InvariantChecker` keeps its own records of the events and commands, and recomputes every
token from the simulated model. The oracle reads the core's events and :mod:`ground_truth`, and
shares no code with the core that it checks.
"""

from collections import Counter
from collections.abc import Callable

from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.core import Core
from tidegate.orchestrator.core.group import Group
from tidegate.orchestrator.core.rollout import Rollout, RolloutState, Turn
from tidegate.orchestrator.core.turns import CONSECUTIVE_LOSSES_MAX, LOSSES_TOTAL_MAX
from tidegate.simulation.coverage_marks import CoverageMark, CoverageMarks
from tidegate.simulation.ground_truth import GroundTruth
from tidegate.simulation.model import check_turn
from tidegate.simulation.scenario import WEIGHTS_TIMEOUT_S, Scenario
from tidegate.simulation.script import Script, ScriptedTurn


class TrainedRows:
    """Rows that the trainer of one run has received, and those that it has discarded."""

    def __init__(self) -> None:
        self._rows: dict[int, list[tuple[int, int]]] = {}
        """Batch -> (rollout, number of trainable tokens) of each row."""
        self._discarded_rows: dict[int, dict[int, str]] = {}
        """Batch -> row index -> reason, of the rows that the trainer has discarded."""

    @property
    def tokens(self) -> int:
        """Number of trained tokens, without those of discarded rows."""
        discarded = sum(self._discarded_tokens().values())
        return sum(tokens for rows in self._rows.values() for _, tokens in rows) - discarded

    def handed(self, batch: ev.HandOver) -> None:
        """Add a batch that the trainer has received."""
        rows = [rollout for group in batch.groups for rollout in group.kept]
        oldest_trainable = batch.oldest_trainable
        self._rows[batch.number] = [
            (rollout.root.rollout_id, _tokens_from(rollout, oldest_trainable)) for rollout in rows
        ]

    def returned(self, batch: int) -> None:
        """Remove a batch that did not reach the trainer."""
        del self._rows[batch]

    def discarded(self, event: ev.RowsDiscarded) -> None:
        """Record the rows that the trainer has discarded; the first reason given for a row
        counts."""
        reasons = self._discarded_rows.setdefault(event.batch, {})
        reasons.update({row: event.reason for row in event.rows if row not in reasons})

    def check(self, core: Core) -> None:
        """Check that the core counts discarded rows under their reasons, and not as trained.

        Raises:
            AssertionError: a count of the core differs.
        """
        tokens = self._discarded_tokens()
        counted = {reason: core.ledger.discarded[reason] for reason in tokens}
        assert counted == tokens, f"{dict(tokens)} tokens were discarded, {counted} are counted"
        assert core.ledger.trained == self.tokens, f"{core.ledger.trained} != {self.tokens} tokens"
        trained = {
            rollout
            for batch, rows in self._rows.items()
            for row, (rollout, _) in enumerate(rows)
            if row not in self._discarded_rows.get(batch, {})
        }
        assert core.trained.rollouts == len(trained), f"{core.trained.rollouts} != {len(trained)}"

    def _discarded_tokens(self) -> Counter[str]:
        tokens: Counter[str] = Counter()
        for batch, reasons in self._discarded_rows.items():
            for row, reason in reasons.items():
                tokens[reason] += self._rows[batch][row][1]
        return tokens


def _tokens_from(rollout: Rollout, oldest_trainable: int) -> int:
    """Return the number of tokens that version ``oldest_trainable`` or a later one sampled."""
    spans = [span for turn in rollout.turns for span in turn.spans()]
    return sum(span.end - span.start for span in spans if span.version >= oldest_trainable)


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


MASKING = ("mask", "split")
"""Settings of ``deadline_policy`` with which tokens older than the bound are masked."""


class InvariantChecker:
    """Oracle of one run: :meth:`check_event` is called after every event of the core."""

    def __init__(
        self, scenario: Scenario, ground_truth: GroundTruth, coverage: CoverageMarks
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
        self._batches_handed = 0
        """Number of batches handed over since the last publish."""
        self._idle_publishes = 0
        """Number of publishes with fewer batches before them than the policy is told. They age
        buffered groups by versions that admission does not count on."""
        self._may_be_retried = False
        """Whether a publish failed while the trainer held a batch that it had not begun to train
        on. The core takes the next publish for a retry. If the trainer has trained on that batch
        instead, the core counts buffered groups as one version older than they are."""
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
        self._versions_without_batch_before: dict[int, int] = {}
        """Batch -> :attr:`_versions_without_batch` when the batch was handed over."""
        self._unpublished = 0
        """Number of batches that the trainer has received and not published."""
        self._begun = 0
        """Number of unpublished batches that the trainer has begun to train on."""
        self._holds_too_many = False
        """Whether the trainer may have looked ahead too far: it requested a batch while it held as
        many as it may hold, and got "no more tasks" instead of a refusal. The bound is promised
        only to trainers within their limit: docs/architecture.md."""
        self._versions_without_batch = 0
        """Number of published versions beyond one per trained batch; they age the batches that the
        trainer holds."""
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
                case ev.RetryEpisode(rollout=rollout):
                    self._check_retry(rollout)
                case ev.StartEpisode(rollout=rollout):
                    self._evaluation_rollouts.add(rollout.rollout_id)
                case ev.StartBranch(rollout=rollout) if rollout.group_id < 0:
                    self._evaluation_rollouts.add(rollout.rollout_id)
                case ev.StopEpisode(rollout=rollout):
                    self.stopped.add(rollout.rollout_id)
                    self._coverage.record(CoverageMark.STOPPED)
                case ev.HandOver():
                    self._check_batch(command)
                case ev.EndBatches():
                    held = self._unpublished * self._scenario.groups_per_batch
                    self._holds_too_many |= held >= self._outstanding_max
                case ev.Record(rollout=rollout, task=task):
                    self._check_record(rollout, task)
        if isinstance(event, ev.RowsDiscarded):
            self.trained_rows.check(core)
        if isinstance(event, ev.TurnRequested) and not commands:
            self._coverage.record(CoverageMark.ALONE)
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
        stale = core.discarded_rollouts["stale"]
        if stale:
            self._coverage.record(CoverageMark.STALE)
            is_expected = self._idle_publishes or self._may_be_retried
            assert is_expected or self._scenario.deadline_policy == "drop", (
                f"admission let {stale} rollouts get too old"
            )

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
                    self._coverage.record(CoverageMark.CAME_BACK)
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
                self._coverage.record(mark)
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
                is_skipping = version > self._published + 1  # a publish in between was dropped
                before, self._published = self._published, version
                has_few_batches = self._batches_handed < self._scenario.batches_per_version
                self._idle_publishes += is_skipping or has_few_batches
                self._batches_handed = 0
                self._versions_without_batch += max(0, version - before - self._begun)
                self._unpublished -= self._begun
                self._begun = 0
                self._training = {
                    number: (version if v is None else v, groups)
                    for number, (v, groups) in self._training.items()
                }
                self.progress += 1
            case ev.PublishFailed():
                self._may_be_retried |= self._unpublished > self._begun
            case ev.RowsDiscarded():
                self.trained_rows.discarded(event)
            case ev.BatchReturned(number=number):
                self._coverage.record(CoverageMark.BATCH_RETURNED)
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
        self._coverage.record(CoverageMark.TURN_ENDED_ENGINES)

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

    def _take_back(self, number: int) -> None:
        """Undo the hand-over of a batch that did not reach the trainer."""
        batch = self._handed.pop(number)
        self._training.pop(number, None)
        self._batches_handed -= 1
        self._unpublished -= 1
        self.progress -= 1
        self.trained_rows.returned(number)
        for group in batch.groups:
            assert isinstance(group.task, int)
            self.trained[group.task] -= not group.is_split_remainder

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
        self._coverage.record(CoverageMark.BEGUN_AGAIN)
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
            self._coverage.record(CoverageMark.INNOCENT_REFUSED)
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
        self._discarded[rollout.group_id] += 1
        if self._discarded[rollout.group_id] == self._scenario.group_size:
            self._dropped_groups += 1
            is_filtered = reason == "zero_variance"
            self._coverage.record(CoverageMark.FILTERED if is_filtered else CoverageMark.DROPPED)
            if reason not in ("stale", "tail"):  # the tasks of such groups are admitted again
                self.dropped[task] += 1

    def _check_batch(self, batch: ev.HandOver) -> None:
        ahead = batch.trainer_version - self._published
        per_version = self._scenario.batches_per_version
        is_plain = not self._scenario.look_ahead
        is_plain &= self._scenario.batches_per_publish == per_version
        assert not is_plain or ahead == self._unpublished // per_version, (
            f"batch {batch.number} is counted as consumed {ahead} versions after the published "
            f"one, but the trainer holds {self._unpublished} unpublished batches, of "
            f"{per_version} per version"
        )
        slots = sum(not group.is_split_remainder for group in batch.groups)
        assert batch.groups
        assert slots <= self._scenario.groups_per_batch
        self.progress += 1
        self._batches_handed += 1
        self._unpublished += 1
        self._handed[batch.number] = batch
        self._versions_without_batch_before[batch.number] = self._versions_without_batch
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
            self._check_group(group, oldest_trainable, batch.trainer_version)
        self.trained_rows.handed(batch)

    def begin_training(self, batch: ev.HandOver) -> None:
        """Check the age of a batch's tokens when the trainer begins to train on the batch.

        Raises:
            AssertionError: a token is older than the bound allows, although every version since the
                hand-over was made from a batch.
        """
        self._begun += 1
        bound = self._scenario.staleness_bound
        trained = [
            span for rollout in _rows(batch) for turn in rollout.turns for span in turn.spans()
        ]
        versions = [s.version for s in trained if s.version >= batch.oldest_trainable]
        if bound is None or not versions or self._holds_too_many:
            return
        staleness = self._published - min(versions)
        staleness -= (
            self._versions_without_batch - self._versions_without_batch_before[batch.number]
        )
        assert staleness <= bound, (
            f"batch {batch.number} is trained at v{self._published}, staleness {staleness}, "
            f"not {bound}"
        )

    def _check_order(self, groups: list[Group]) -> None:
        """Check that no batched group overtakes a running one by more than the order allows."""
        scenario, chosen = self._scenario, {group.group_id for group in groups}
        newest = max(chosen)
        if any(group_id < newest for group_id in self._running_rollouts.values()):
            self._coverage.record(CoverageMark.OVERTAKEN)
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
            self._coverage.record(CoverageMark.SPLIT)
        if self._scenario.filters_groups and is_whole:
            assert len({rollout.reward for rollout in group.kept}) > 1, "all rewards are equal"
        self.trained[task] += not group.is_split_remainder
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
            self._coverage.record(CoverageMark.FAILURE_REWARDED)
        scripted = script.turns
        if (forked := rollout.branch_of) is not None:
            scripted = script.branch
            _check_beginning(rollout, forked, script)
        if rollout.oldest_version != rollout.newest_version:
            self._coverage.record(CoverageMark.MIXED)
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
            self._coverage.record(CoverageMark.KV_UNKNOWN)
        spans = [span for span in turn.spans() if span.version >= oldest_trainable]
        if len(spans) < len(turn.spans()):
            self._coverage.record(CoverageMark.MASKED)
        if not spans:
            return  # the turn was given up before its first token, or all its tokens are masked
        staleness = version - min(span.version for span in spans)
        bound = self._scenario.staleness_bound
        assert bound is None or staleness <= bound, (
            f"{turn.rollout_id}: staleness {staleness} > {bound}"
        )
        self.oldest_staleness = max(self.oldest_staleness, staleness)
        if bound and staleness == bound:
            self._coverage.record(CoverageMark.OLDEST)
        if len({span.engine for span in spans}) > 1:
            self._coverage.record(CoverageMark.MOVED)
        if any(span.kv and span.kv.oldest != span.kv.newest for span in spans):
            self._coverage.record(CoverageMark.MIXED_KV)

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


def _rows(batch: ev.HandOver) -> list[Rollout]:
    return [rollout for group in batch.groups for rollout in group.kept]


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
    faulty = {fault.engine for fault in scenario.faults}
    return {f"engine-{number}" for number in range(scenario.engines) if number not in faulty}
