"""Does a run keep its promises, event by event? Counts along with the core, on its own.

It sees every event and every command, and knows the simulation's truth: what each token must be,
and which episodes were meant to fail. It shares no book-keeping with what it checks.
"""

from collections import Counter, deque
from collections.abc import Callable

from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.core import Core
from tidegate.orchestrator.core.group import Group
from tidegate.orchestrator.core.rollout import Rollout, RolloutState, Turn
from tidegate.orchestrator.core.rules import Rules
from tidegate.orchestrator.simulation.hardships import Hardship, Hardships
from tidegate.orchestrator.simulation.model import check_turn
from tidegate.orchestrator.simulation.scenario import WEIGHTS_TIMEOUT_S, Scenario
from tidegate.orchestrator.simulation.script import Script, ScriptedTurn
from tidegate.orchestrator.simulation.trained_rows import TrainedRows
from tidegate.orchestrator.simulation.truth import Truth


class WatchedCore(Core):
    """A core that is looked at after every event."""

    def __init__(
        self,
        rules: Rules,
        *,
        watch: "Watch",
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


class Watch:
    """What must hold after every event of a run."""

    def __init__(self, scenario: Scenario, truth: Truth, hardships: Hardships) -> None:
        self._scenario = scenario
        self._truth = truth
        self._hardships = hardships
        self._outstanding_max = scenario.outstanding_groups_max
        self._faultless = _faultless(scenario)
        """Engines that must not be given up."""
        self.progress = 0
        """Counts what brings the run nearer to its end; it must not stand still for long."""
        self._tokens_arrived = 0
        self._serving: dict[str, int] = {}
        """Engine -> the version it serves, as far as it was heard."""
        self._epochs: dict[str, int] = {}
        """Engine -> which process of it was heard of last."""
        self._stepped: dict[str, int] = {}
        """Engine -> the version of its last step."""
        self.live_version = 0
        """What every engine serves at least, as far as it was heard."""
        self._published = 0
        self._is_batch_handed = False
        """Since the last publish."""
        self._idle_publishes = 0
        """Those without a batch before: they make what waits older than admission counts on."""
        self._admitted_groups = 0
        self._dropped_groups = 0
        self._discarded: Counter[int] = Counter()
        """Group -> its rollouts that will never be trained."""
        self._training: deque[tuple[int | None, int]] = deque()
        self._going: dict[int, int] = {}
        """Rollout that is going on -> its group."""
        self._handed_groups: list[int] = []
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

    # ------------------------------------------------------------ every event

    def saw(self, core: Core, event: ev.Event, commands: list[ev.Command]) -> None:
        """Take in one event and what was decided.

        Raises:
            AssertionError: a promise is broken.
        """
        self._count(event)
        for command in commands:
            match command:
                case ev.Submit(engine=engine):
                    self._check_submit(engine)
                case ev.StartEpisode(rollout=rollout) if rollout.group_id >= 0:
                    self._going[rollout.rollout_id] = rollout.group_id
                case ev.StopEpisode():
                    self._hardships.note(Hardship.STOPPED)
                case ev.HandOver():
                    self._check_batch(command)
                case ev.Record(rollout=rollout, task=task):
                    self._check_record(rollout, task)
        if isinstance(event, ev.RowsDiscarded):
            self.trained_rows.check(core)
        if isinstance(event, ev.TurnAsked) and not commands:
            self._hardships.note(Hardship.ALONE)
        self._release()
        core.check()
        generated = core.ledger.generated + core.evaluation_ledger.generated
        assert generated == self._tokens_arrived, f"{generated} != {self._tokens_arrived} tokens"
        outstanding = self._admitted_groups - self._dropped_groups - len(self.trained)
        outstanding += sum(groups for _, groups in self._training)
        assert outstanding <= self._outstanding_max, (
            f"{outstanding} groups are outstanding of {self._outstanding_max} allowed"
        )
        stale = core.discarded_rollouts["stale"]
        if stale:
            self._hardships.note(Hardship.STALE)
            is_meant = self._idle_publishes or self._scenario.on_deadline == "drop"
            assert is_meant, f"admission let {stale} rollouts get too old"

    def _count(self, event: ev.Event) -> None:
        match event:
            case ev.StepArrived():
                self._count_step(event)
            case ev.EngineJoined(engine=engine, weight_version=version, epoch=epoch):
                if self._epochs.get(engine) != epoch:
                    self._leave(engine)
                self._epochs[engine] = epoch
                self._serve(engine, version)
                if engine in self._departed:
                    self._hardships.note(Hardship.CAME_BACK)
            case ev.EngineSwapped(engine=engine, version=version):
                assert version <= self._published, f"{engine} serves v{version}, not published"
                if engine in self._serving:  # else it is its last word, and it is given up
                    self._serve(engine, version)
            case ev.EngineLeft(engine=engine):
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
                self._published = version
                self._idle_publishes += is_skipping or not self._is_batch_handed
                self._is_batch_handed = False
                self._training = deque((version if v is None else v, n) for v, n in self._training)
                self.progress += 1
            case ev.RowsDiscarded():
                self.trained_rows.left_out(event)
            case ev.EpisodeReturned() | ev.EpisodeFailed():
                self._going.pop(event.rollout_id, None)
                self.progress += 1

    def _count_step(self, step: ev.StepArrived) -> None:
        self._truth.arrived(step)
        self._tokens_arrived += len(step.token_ids)
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
        while self._training:
            version = self._training[0][0]
            if version is None or version > self.live_version:
                return
            self._training.popleft()

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
        if reason in ("episode_error", "episode_timeout"):
            assert reason == expected, f"task {task}: {reason}, but expected {expected}"
        if rollout.group_id < 0 or rollout.branch_of is not None:
            return
        self._going.pop(rollout.rollout_id, None)
        self._discarded[rollout.group_id] += 1
        if self._discarded[rollout.group_id] == self._scenario.group_size:
            self._dropped_groups += 1
            is_filtered = reason == "zero_variance"
            self._hardships.note(Hardship.FILTERED if is_filtered else Hardship.DROPPED)
            if reason not in ("stale", "tail"):  # their tasks are taken again
                self.dropped[task] += 1

    def _check_batch(self, batch: ev.HandOver) -> None:
        assert batch.trainer_version == self._published
        places = sum(not group.is_rest for group in batch.groups)
        assert batch.groups
        assert places <= self._scenario.groups_per_batch
        self.progress += 1
        self._is_batch_handed = True
        self._training.append((None, places))
        self._check_order(batch.groups)
        masks = self._scenario.policy == "bounded" and self._scenario.on_deadline in MASKING
        floor = max(0, self._published - self._scenario.max_staleness) if masks else 0
        assert batch.oldest_trainable == floor, f"tokens are masked below v{batch.oldest_trainable}"
        for group in batch.groups:
            self._check_group(group, floor)
        self.trained_rows.handed(batch)

    def _check_order(self, groups: list[Group]) -> None:
        """In the order of admission none is overtaken; in a window, by the next few at most."""
        scenario, chosen = self._scenario, {group.group_id for group in groups}
        newest = max(chosen)
        if any(group_id < newest for group_id in self._going.values()):
            self._hardships.note(Hardship.OVERTAKEN)
        is_window = scenario.policy == "bounded" and scenario.order == "window"
        if not is_window and not scenario.is_in_order:
            return
        window = scenario.window_groups if is_window else 1
        oldest = min(self._going.values(), default=None)
        if oldest is not None:
            assert newest < oldest + window, f"group {newest} has overtaken {oldest} by too much"

    def _check_group(self, group: Group, floor: int) -> None:
        task = group.task
        assert isinstance(task, int)
        self._handed_groups.append(group.group_id)
        needed = 1 if group.is_rest else min(2, self._scenario.group_size)
        assert group.num_kept >= needed, f"{group.num_kept} are left"
        roots = [rollout for rollout in group.rollouts if rollout.branch_of is None]
        is_whole = len(roots) == self._scenario.group_size
        if group.is_rest:
            self._hardships.note(Hardship.SPLIT)
        if self._scenario.filters_groups and is_whole:
            assert len({rollout.reward for rollout in group.kept}) > 1, "it teaches nothing"
        self.trained[task] += not group.is_rest
        assert self.trained[task] == 1, f"task {task} is trained {self.trained[task]} times"
        for rollout in group.kept:
            self._check_rollout(rollout, task, floor)

    def _check_rollout(self, rollout: Rollout, task: int, floor: int) -> None:
        script = self._scenario.script(task, rollout.index)
        assert script.fate == "returns"
        assert rollout.reward == script.reward
        scripted = script.turns
        if (forked := rollout.branch_of) is not None:
            scripted = script.branch
            _check_beginning(rollout, forked, script)
        if rollout.oldest_version != rollout.newest_version:
            self._hardships.note(Hardship.MIXED)
        self._check_patience(rollout, scripted)
        for turn in rollout.turns:
            self._check_turn(turn, floor)

    def _check_patience(self, rollout: Rollout, scripted: list[ScriptedTurn]) -> None:
        """Every turn was taken to its end, but for those that the episode gave up."""
        is_impatient = [turn.patience_s is not None for turn in scripted]
        if self._scenario.episode_budget_s is not None and any(is_impatient):
            # It may have been parked before a turn, and have stopped waiting for that.
            assert len(rollout.turns) <= len(scripted)
            return
        for turn, may_end_early in zip(rollout.turns, is_impatient, strict=True):
            is_whole = turn.finish_reason in ("stop", "length")
            assert is_whole or may_end_early, f"{rollout.rollout_id}: {turn.finish_reason}"

    def _check_turn(self, turn: Turn, floor: int) -> None:
        check_turn(turn, self._truth.content_of)
        spans = [span for span in turn.spans() if span.version >= floor]
        if len(spans) < len(turn.spans()):
            self._hardships.note(Hardship.MASKED)
        if not spans:
            return  # given up before the first token, or all of it is masked
        staleness = self._published - min(span.version for span in spans)
        bound = self._scenario.staleness_bound
        assert bound is None or staleness <= bound, (
            f"{turn.rollout_id}: staleness {staleness} > {bound}"
        )
        self.oldest_staleness = max(self.oldest_staleness, staleness)
        if bound and staleness == bound:
            self._hardships.note(Hardship.OLDEST)
        if len({span.engine for span in spans}) > 1:
            self._hardships.note(Hardship.MOVED)
        if any(span.kv and span.kv.oldest != span.kv.newest for span in spans):
            self._hardships.note(Hardship.MIXED_KV)

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
        handed = self._handed_groups
        assert received_groups == handed, f"{handed} were handed over, {received_groups} came"
        for task in self.admitted:
            times = self.trained[task] + self.dropped[task]
            assert times == 1, f"task {task} was trained {self.trained[task]} times, {times} in all"
            scripts = [self._scenario.script(task, i) for i in range(self._scenario.group_size)]
            is_whole = all(script.fate == "returns" for script in scripts)
            if is_whole and not self._is_filtered(scripts):
                assert self.trained[task] == 1, f"task {task} was given up for no reason"
        ledger = core.ledger
        assert ledger.in_flight == ledger.buffered == 0, ledger.snapshot()
        self.trained_rows.check(core)


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
    if scenario.weights_timeout_s < WEIGHTS_TIMEOUT_S:
        return set()
    faulty = {fault.engine for fault in scenario.faults}
    return {f"engine-{number}" for number in range(scenario.engines) if number not in faulty}
