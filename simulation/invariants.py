"""Oracle of a simulated run: checks its promises after every event, by book-keeping of its own.

Sees every event and command, and what each token must be; shares no code with what it checks.
"""

from collections import Counter
from collections.abc import Callable

from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.core import Core
from tidegate.orchestrator.core.group import Group
from tidegate.orchestrator.core.rollout import Rollout, RolloutState, Turn
from tidegate.orchestrator.core.rules import Rules
from tidegate.orchestrator.core.turns import LOSSES_IN_ALL_MAX, LOSSES_MAX
from tidegate.simulation.coverage_marks import CoverageMark, CoverageMarks
from tidegate.simulation.ground_truth import GroundTruth
from tidegate.simulation.model import check_turn
from tidegate.simulation.scenario import WEIGHTS_TIMEOUT_S, Scenario
from tidegate.simulation.script import Script, ScriptedTurn


class TrainedRows:
    """Book-keeping of the rows that the trainer of one run has had and left out."""

    def __init__(self) -> None:
        self._rows: dict[int, list[tuple[int, int]]] = {}
        """Batch -> of each of its rows, the rollout and the tokens young enough to train on."""
        self._left_out: dict[int, dict[int, str]] = {}
        """Batch -> places in it of rows that the trainer left out, and why."""

    @property
    def tokens(self) -> int:
        """Trained, for all that the trainer said."""
        left_out = sum(self._left_out_tokens().values())
        return sum(tokens for rows in self._rows.values() for _, tokens in rows) - left_out

    def handed(self, batch: ev.HandOver) -> None:
        """The trainer gets this batch."""
        rows = [row for group in batch.groups for row in group.kept]
        floor = batch.oldest_trainable
        self._rows[batch.number] = [(row.root.rollout_id, _tokens_from(row, floor)) for row in rows]

    def returned(self, batch: int) -> None:
        """This batch did not reach the trainer."""
        del self._rows[batch]

    def left_out(self, event: ev.RowsDiscarded) -> None:
        """The trainer has said so."""
        reasons = self._left_out.setdefault(event.batch, {})
        reasons.update({row: event.reason for row in event.rows if row not in reasons})

    def check(self, core: Core) -> None:
        """What was left out is discarded for its reason, and nothing of it is trained.

        Raises:
            AssertionError: the core counts otherwise.
        """
        tokens = self._left_out_tokens()
        told = {reason: core.ledger.discarded[reason] for reason in tokens}
        assert told == tokens, f"{dict(tokens)} tokens were left out, {told} are counted"
        assert core.ledger.trained == self.tokens, f"{core.ledger.trained} != {self.tokens} tokens"
        trained = {
            rollout
            for batch, rows in self._rows.items()
            for place, (rollout, _) in enumerate(rows)
            if place not in self._left_out.get(batch, {})
        }
        assert core.trained.rollouts == len(trained), f"{core.trained.rollouts} != {len(trained)}"

    def _left_out_tokens(self) -> Counter[str]:
        tokens: Counter[str] = Counter()
        for batch, reasons in self._left_out.items():
            for place, reason in reasons.items():
                tokens[reason] += self._rows[batch][place][1]
        return tokens


def _tokens_from(row: Rollout, floor: int) -> int:
    """Those that no version before this one sampled."""
    spans = [span for turn in row.turns for span in turn.spans()]
    return sum(span.end - span.start for span in spans if span.version >= floor)


class WatchedCore(Core):
    """A core that the oracle inspects after every event."""

    def __init__(
        self,
        rules: Rules,
        *,
        watch: "InvariantChecker",
        on_broken: Callable[[BaseException], None],
    ) -> None:
        super().__init__(rules)
        self._watch = watch
        self._on_broken = on_broken

    def handle(self, event: ev.Event) -> list[ev.Command]:
        """As :meth:`Core.handle`. What it raises ends the simulation, whoever might catch it."""
        try:
            commands = super().handle(event)
            self._watch.saw(self, event, commands)
        except Exception as error:
            self._on_broken(error)
            raise
        return commands


MASKING = ("mask", "split")
"""What a policy does at deadlines for which old tokens are masked."""


class InvariantChecker:
    """Oracle of one run: checks what must hold after every event."""

    def __init__(self, scenario: Scenario, truth: GroundTruth, hardships: CoverageMarks) -> None:
        self._scenario = scenario
        self._truth = truth
        self._hardships = hardships
        self._outstanding_max = scenario.outstanding_groups_max
        self._faultless = _faultless(scenario)
        """Engines that must not be given up."""
        self.progress = 0
        """Counts what brings the run nearer to its end; it must not stand still for long."""
        self._tokens_arrived = 0
        self._evaluation_tokens = 0
        """Of those, the ones sampled for evaluations."""
        self._evaluation_rollouts: set[int] = set()
        self._evaluation_turns: set[tuple[str, int]] = set()
        """(engine, handle) of each turn of an evaluation."""
        self._serving: dict[str, int] = {}
        """Engine -> the version it serves, as far as it was heard."""
        self._epochs: dict[str, int] = {}
        """Engine -> which process of it was heard of last."""
        self._stepped: dict[str, int] = {}
        """Engine -> the version of its last step."""
        self.live_version = 0
        """What every engine serves at least, as far as it was heard."""
        self._published = 0
        self._batches_handed = 0
        """Since the last publish."""
        self._idle_publishes = 0
        """Those without a batch before: they make what waits older than admission counts on."""
        self._may_be_retried = False
        """Whether a publish failed while the trainer held a batch that it had not begun. The core
        takes the next publish for a second try, so the bound holds if it is one; if the trainer has
        trained on that batch instead, groups that wait count as one version older than they are."""
        self._admitted_groups = 0
        self._dropped_groups = 0
        self._discarded: Counter[int] = Counter()
        """Group -> its rollouts that will never be trained."""
        self._training: dict[int, tuple[int | None, int]] = {}
        """Batch -> the version published after it, and its groups, until that is live."""
        self._going: dict[int, int] = {}
        """Rollout that is going on -> its group."""
        self._handed: dict[int, ev.HandOver] = {}
        """Batches handed over and not returned, by number."""
        self._fruitless_before: dict[int, int] = {}
        """Batch -> the fruitless versions when it was handed over."""
        self._unpublished = 0
        """Batches that the trainer has had and not published."""
        self._begun = 0
        """Of those, the ones that it has begun to train on."""
        self._holds_too_many = False
        """Whether the trainer asked for more batches than it may hold. It is refused, but where
        tasks have ended it is told that instead, and may have looked ahead too far unnoticed. The
        bound is promised to trainers that hold no more than they may: docs/architecture.md."""
        self._fruitless_versions = 0
        """Versions beyond one for each batch trained: they age what the trainer holds."""
        self._departed: set[str] = set()
        """Engines that were given up, or took their leave."""
        self.admitted: Counter[int] = Counter()
        """Task -> how often it was taken in."""
        self.trained: Counter[int] = Counter()
        """Task -> how often it was trained."""
        self.dropped: Counter[int] = Counter()
        """Task -> how often it was given up."""
        self.oldest_staleness = 0
        self.trained_rows = TrainedRows()
        self._placed: dict[str, dict[int, int]] = {}
        """Engine -> handle -> rollout, of the turns that it has, as far as it was heard."""
        self._losses: Counter[int] = Counter()
        """Rollout -> engines that were lost with its turn that is going on."""
        self.stopped: set[int] = set()
        """Rollouts whose episode was cancelled because their group was given up."""
        self._lost_out: set[int] = set()
        """Rollouts with a turn, of them or of a branch, that was refused for its losses."""
        self._excused: set[int] = set()
        """Tasks of such rollouts that were meant to succeed."""

    # ------------------------------------------------------------ every event

    def saw(self, core: Core, event: ev.Event, commands: list[ev.Command]) -> None:
        """Take in one event and what was decided.

        Raises:
            AssertionError: a promise is broken.
        """
        self._count(event)
        for command in commands:
            match command:
                case ev.Submit(engine=engine, message=message):
                    self._check_submit(engine)
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
                    self._going[rollout.rollout_id] = rollout.group_id
                case ev.StartEpisode(rollout=rollout):
                    self._evaluation_rollouts.add(rollout.rollout_id)
                case ev.StartBranch(rollout=rollout) if rollout.group_id < 0:
                    self._evaluation_rollouts.add(rollout.rollout_id)
                case ev.StopEpisode(rollout=rollout):
                    self.stopped.add(rollout.rollout_id)
                    self._hardships.note(CoverageMark.STOPPED)
                case ev.HandOver():
                    self._check_batch(command)
                case ev.EndBatches():
                    held = self._unpublished * self._scenario.groups_per_batch
                    self._holds_too_many |= held >= self._outstanding_max
                case ev.Record(rollout=rollout, task=task):
                    self._check_record(rollout, task)
        if isinstance(event, ev.RowsDiscarded):
            self.trained_rows.check(core)
        if isinstance(event, ev.TurnAsked) and not commands:
            self._hardships.note(CoverageMark.ALONE)
        self._release()
        core.check()
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
            self._hardships.note(CoverageMark.STALE)
            is_meant = self._idle_publishes or self._may_be_retried
            assert is_meant or self._scenario.deadline_policy == "drop", (
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
                self._epochs[engine] = epoch
                self._serve(engine, version)
                if engine in self._departed:
                    self._hardships.note(CoverageMark.CAME_BACK)
            case ev.EngineSwapped(engine=engine, version=version):
                assert version <= self._published, f"{engine} serves v{version}, not published"
                if engine in self._serving:  # else it is its last word, and it is given up
                    self._serve(engine, version)
            case ev.EngineLeft(engine=engine, is_crash=is_crash):
                self._lose(engine, is_crash=is_crash)
                assert engine not in self._faultless, f"{engine} was given up for nothing"
                self._departed.add(engine)
                self._stepped.pop(engine, None)
                self._leave(engine)
            case ev.TaskArrived(task=task):
                self._admitted_groups += 1
                assert isinstance(task, int)
                self.admitted[task] += 1
            case ev.VersionPublished(version=version):
                assert version > self._published, f"v{version} after v{self._published}"
                is_skipping = version > self._published + 1  # a publish between gave way to it
                before, self._published = self._published, version
                self._idle_publishes += is_skipping or not self._batches_handed
                self._batches_handed = 0
                self._fruitless_versions += max(0, version - before - self._begun)
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
                self.trained_rows.left_out(event)
            case ev.BatchReturned(number=number):
                self._hardships.note(CoverageMark.BATCH_RETURNED)
                self._take_back(number)
            case ev.EpisodeReturned() | ev.EpisodeFailed():
                self._going.pop(event.rollout_id, None)
                self.progress += 1

    # ------------------------------------------------------------ turns that end engines

    def _place(self, engine: str, handle: int, rollout_id: int) -> None:
        """A turn is sent; those that have lost too many engines may not be."""
        losses = self._losses[rollout_id]
        assert losses < LOSSES_IN_ALL_MAX, f"{rollout_id} is sent on after {losses} lost engines"
        for handles in self._placed.values():
            for known in [known for known, its in handles.items() if its == rollout_id]:
                del handles[known]
        self._placed.setdefault(engine, {})[handle] = rollout_id

    def _lose(self, engine: str, *, is_crash: bool) -> None:
        lost = self._placed.pop(engine, {})
        if is_crash:
            self._losses.update(lost.values())

    def _check_refused(self, turn: Turn) -> None:
        """A turn is refused that asks for too much, or with which enough engines were lost."""
        losses = self._losses.pop(turn.rollout_id, 0)
        if losses < LOSSES_MAX:
            return
        self._lost_out.add(turn.rollout.root.rollout_id)
        self._hardships.note(CoverageMark.TURN_ENDED_ENGINES)

    def _count_step(self, step: ev.StepArrived) -> None:
        self._truth.arrived(step)
        self._tokens_arrived += len(step.token_ids)
        handles = step.turns.tolist()
        counts = [1] * len(handles) if step.counts is None else step.counts.tolist()
        self._evaluation_tokens += sum(
            tokens
            for handle, tokens in zip(handles, counts, strict=True)
            if (step.engine, handle) in self._evaluation_turns
        )
        self.progress += len(step.token_ids)
        before = self._stepped.get(step.engine, 0)
        assert step.version >= before, f"{step.engine} went from v{before} to v{step.version}"
        self._stepped[step.engine] = step.version

    def _serve(self, engine: str, version: int) -> None:
        self._serving[engine] = version
        self.live_version = max(self.live_version, min(self._serving.values()))

    def _leave(self, engine: str) -> None:
        self._serving.pop(engine, None)
        oldest = min(self._serving.values(), default=0)
        self.live_version = max(self.live_version, oldest)

    def _release(self) -> None:
        live = self.live_version
        for number, (version, _) in list(self._training.items()):
            if version is not None and version <= live:
                del self._training[number]

    def _take_back(self, number: int) -> None:
        """A batch did not reach the trainer: what it was made of waits again."""
        batch = self._handed.pop(number)
        self._training.pop(number, None)
        self._batches_handed -= 1
        self._unpublished -= 1
        self.progress -= 1
        self.trained_rows.returned(number)
        for group in batch.groups:
            assert isinstance(group.task, int)
            self.trained[group.task] -= not group.is_rest

    def _check_submit(self, engine: str) -> None:
        version = self._serving.get(engine, -1)
        assert version >= self.live_version, (
            f"{engine} with v{version} got a turn while v{self.live_version} is live everywhere"
        )

    # ------------------------------------------------------------ rollouts end

    def _check_record(self, rollout: Rollout, task: object) -> None:
        if rollout.state is not RolloutState.DISCARDED:
            return
        assert isinstance(task, int)
        reason = rollout.discard_reason
        expected = self._scenario.script(task, rollout.index).failure
        is_lost_out = rollout.root.rollout_id in self._lost_out
        if is_lost_out and expected is None:
            self._hardships.note(CoverageMark.INNOCENT_REFUSED)
            self._excused.add(task)
        elif reason in ("episode_error", "episode_timeout"):
            # Refused for lost engines, it may not have come to its fate.
            is_explained = reason == expected or (is_lost_out and reason == "episode_error")
            assert is_explained, f"task {task}: {reason}, but expected {expected}"
        if rollout.group_id < 0 or rollout.branch_of is not None:
            return
        self._going.pop(rollout.rollout_id, None)
        self._discarded[rollout.group_id] += 1
        if self._discarded[rollout.group_id] == self._scenario.group_size:
            self._dropped_groups += 1
            is_filtered = reason == "zero_variance"
            self._hardships.note(CoverageMark.FILTERED if is_filtered else CoverageMark.DROPPED)
            if reason not in ("stale", "tail"):  # their tasks are taken again
                self.dropped[task] += 1

    def _check_batch(self, batch: ev.HandOver) -> None:
        ahead = batch.trainer_version - self._published
        is_plain = not self._scenario.look_ahead and self._scenario.batches_per_publish == 1
        assert not is_plain or ahead == self._unpublished, (
            f"batch {batch.number} counts as trained {ahead} versions on, and the trainer holds "
            f"{self._unpublished}"
        )
        places = sum(not group.is_rest for group in batch.groups)
        assert batch.groups
        assert places <= self._scenario.groups_per_batch
        self.progress += 1
        self._batches_handed += 1
        self._unpublished += 1
        self._handed[batch.number] = batch
        self._fruitless_before[batch.number] = self._fruitless_versions
        self._training[batch.number] = (None, places)
        self._check_order(batch.groups)
        masks = self._scenario.policy == "bounded" and self._scenario.deadline_policy in MASKING
        floor = max(0, batch.trainer_version - self._scenario.max_staleness) if masks else 0
        assert batch.oldest_trainable == floor, f"tokens are masked below v{batch.oldest_trainable}"
        for group in batch.groups:
            self._check_group(group, floor, batch.trainer_version)
        self.trained_rows.handed(batch)

    def begins_training(self, batch: ev.HandOver) -> None:
        """The trainer begins to train on a batch: its tokens must be young enough now.

        Raises:
            AssertionError: one is older than the bound allows, though every version since the
                hand-over was made from a batch.
        """
        self._begun += 1
        bound = self._scenario.staleness_bound
        trained = [span for row in _rows(batch) for turn in row.turns for span in turn.spans()]
        versions = [s.version for s in trained if s.version >= batch.oldest_trainable]
        if bound is None or not versions or self._holds_too_many:
            return
        staleness = self._published - min(versions)
        staleness -= self._fruitless_versions - self._fruitless_before[batch.number]
        assert staleness <= bound, (
            f"batch {batch.number} is trained at v{self._published}, staleness {staleness}, "
            f"not {bound}"
        )

    def _check_order(self, groups: list[Group]) -> None:
        """In the order of admission none is overtaken; in a window, by the next few at most."""
        scenario, chosen = self._scenario, {group.group_id for group in groups}
        newest = max(chosen)
        if any(group_id < newest for group_id in self._going.values()):
            self._hardships.note(CoverageMark.OVERTAKEN)
        is_window = scenario.policy == "bounded" and scenario.order == "window"
        if not is_window and not scenario.is_in_order:
            return
        window = scenario.window_groups if is_window else 1
        oldest = min(self._going.values(), default=None)
        if oldest is not None:
            assert newest < oldest + window, f"group {newest} has overtaken {oldest} by too much"

    def _check_group(self, group: Group, floor: int, version: int) -> None:
        task = group.task
        assert isinstance(task, int)
        needed = 1 if group.is_rest else min(2, self._scenario.group_size)
        assert group.num_kept >= needed, f"{group.num_kept} are left"
        roots = [rollout for rollout in group.rollouts if rollout.branch_of is None]
        is_whole = len(roots) == self._scenario.group_size
        if group.is_rest:
            self._hardships.note(CoverageMark.SPLIT)
        if self._scenario.filters_groups and is_whole:
            assert len({rollout.reward for rollout in group.kept}) > 1, "it teaches nothing"
        self.trained[task] += not group.is_rest
        assert self.trained[task] == 1, f"task {task} is trained {self.trained[task]} times"
        for rollout in group.kept:
            self._check_rollout(rollout, task, floor, version)

    def _check_rollout(self, rollout: Rollout, task: int, floor: int, version: int) -> None:
        script = self._scenario.script(task, rollout.index)
        assert script.fate == "returns"
        assert rollout.reward == script.reward
        scripted = script.turns
        if (forked := rollout.branch_of) is not None:
            scripted = script.branch
            _check_beginning(rollout, forked, script)
        if rollout.oldest_version != rollout.newest_version:
            self._hardships.note(CoverageMark.MIXED)
        self._check_patience(rollout, scripted)
        for turn in rollout.turns:
            self._check_turn(turn, floor, version)

    def _check_patience(self, rollout: Rollout, scripted: list[ScriptedTurn]) -> None:
        """Every turn was taken to its end, but for those that the episode gave up."""
        is_impatient = [turn.patience_s is not None for turn in scripted]
        if self._scenario.episode_park_after_s is not None and any(is_impatient):
            # It may have been parked before a turn, and have stopped waiting for that.
            assert len(rollout.turns) <= len(scripted)
            return
        for turn, may_end_early in zip(rollout.turns, is_impatient, strict=True):
            is_whole = turn.finish_reason in ("stop", "length")
            assert is_whole or may_end_early, f"{rollout.rollout_id}: {turn.finish_reason}"

    def _check_turn(self, turn: Turn, floor: int, version: int) -> None:
        without_prefills = self._scenario.without_prefills
        check_turn(turn, self._truth.content_of, without_prefills=without_prefills)
        if any(span.kv is None for span in turn.spans()):
            self._hardships.note(CoverageMark.KV_UNKNOWN)
        spans = [span for span in turn.spans() if span.version >= floor]
        if len(spans) < len(turn.spans()):
            self._hardships.note(CoverageMark.MASKED)
        if not spans:
            return  # given up before the first token, or all of it is masked
        staleness = version - min(span.version for span in spans)
        bound = self._scenario.staleness_bound
        assert bound is None or staleness <= bound, (
            f"{turn.rollout_id}: staleness {staleness} > {bound}"
        )
        self.oldest_staleness = max(self.oldest_staleness, staleness)
        if bound and staleness == bound:
            self._hardships.note(CoverageMark.OLDEST)
        if len({span.engine for span in spans}) > 1:
            self._hardships.note(CoverageMark.MOVED)
        if any(span.kv and span.kv.oldest != span.kv.newest for span in spans):
            self._hardships.note(CoverageMark.MIXED_KV)

    # ------------------------------------------------------------ the end

    def _is_filtered(self, scripts: list[Script]) -> bool:
        """Whether so many of their rewards are equal as make the filter drop the group."""
        scenario = self._scenario
        enough = scenario.decide_after or scenario.group_size
        counts = Counter(script.reward for script in scripts)
        return scenario.filters_groups and max(counts.values()) >= min(enough, len(scripts))

    def check_end(self, core: Core, taken_tasks: set[int], received_groups: list[int]) -> None:
        """Every task was trained once, or given up for a reason; no token is left anywhere.

        ``taken_tasks`` left the trainer, and ``received_groups`` came back to it.

        Raises:
            AssertionError: something was lost, or done twice.
        """
        lost = taken_tasks - self.admitted.keys()
        assert not lost, f"tasks {sorted(lost)} were taken, and are nowhere"
        handed = [g.group_id for batch in self._handed.values() for g in batch.groups]
        assert received_groups == handed, f"{handed} were handed over, {received_groups} came"
        for task in self.admitted:
            times = self.trained[task] + self.dropped[task]
            assert times == 1, f"task {task} was trained {self.trained[task]} times, {times} in all"
            scripts = [self._scenario.script(task, i) for i in range(self._scenario.group_size)]
            is_whole = all(script.fate == "returns" for script in scripts)
            is_whole &= task not in self._excused
            if is_whole and not self._is_filtered(scripts):
                assert self.trained[task] == 1, f"task {task} was given up for no reason"
        ledger = core.ledger
        assert ledger.in_flight == ledger.buffered == 0, ledger.snapshot()
        self.trained_rows.check(core)


def _rows(batch: ev.HandOver) -> list[Rollout]:
    return [rollout for group in batch.groups for rollout in group.kept]


def _check_beginning(branch: Rollout, forked: Rollout, script: Script) -> None:
    """A branch begins with what its episode had when it forked."""
    if len(forked.turns) < len(script.turns):
        return  # it was parked and gave turns up: nobody knows which
    last = forked.turns[script.forks_before - 1] if script.forks_before else None
    shared = last.start + last.length if last else 0
    same = branch.token_ids[:shared] == forked.token_ids[:shared]
    assert same, f"{branch.rollout_id} does not begin as what it was forked from"


def _faultless(scenario: Scenario) -> set[str]:
    """Engines that nothing goes wrong with; none if weights may take longer than is waited for."""
    if scenario.weight_update_timeout_s < WEIGHTS_TIMEOUT_S or scenario.deadly_turns:
        return set()
    faulty = {fault.engine for fault in scenario.faults}
    return {f"engine-{number}" for number in range(scenario.engines) if number not in faulty}
