"""What happens next in a run? Opens no socket, reads no clock, awaits nothing.

Feed it what happened, in order; it answers with what to do, in order. Same events in, same
commands out: that is what makes a run replayable and its promises testable. It owns the versions,
the groups, the rollouts and the token ledger; which engine a turn is on is :mod:`turns`' matter.
"""

import itertools
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from tidegate.errors import TidegateError
from tidegate.orchestrator import events as ev
from tidegate.orchestrator.ledger import Ledger
from tidegate.orchestrator.rollout import Group, Rollout, RolloutState, Turn
from tidegate.orchestrator.turns import TurnBook
from tidegate.policies.staleness import BoundedStaleness

KEPT_ROLLOUTS_MIN = 2
"""A group needs two rewards to compare; with fewer left it is dropped (unless group_size is 1)."""

EVALUATION_PRIORITY = -1
"""Evaluation waits for no training rollout: it is short, and somebody waits for its figure."""


@dataclass(slots=True)
class TrainedCounts:
    """What has been handed to the trainer, in rollouts."""

    batches: int = 0
    rollouts: int = 0
    mixed_version: int = 0
    staleness: Counter[int] = field(default_factory=Counter)
    """Rollouts by staleness at consumption."""


class Core:
    """One run's state. Change it only through :meth:`handle`."""

    def __init__(self, policy: BoundedStaleness, *, group_size: int) -> None:
        self.policy = policy
        self.group_size = group_size
        self.turns = TurnBook()
        self.ledger = Ledger()
        self.evaluation_ledger = Ledger()
        self.trained = TrainedCounts()
        self.discarded_rollouts: Counter[str] = Counter()
        self.trainer_version = 0
        self._groups: deque[Group] = deque()
        """Running and buffered ones, in the order of admission: the order of consumption."""
        self._training: deque[tuple[int | None, int]] = deque()
        """(version made from it, groups) of each batch handed over whose version isn't live yet;
        None until it is published."""
        self._rollouts: dict[int, tuple[Rollout, Group]] = {}
        """Those whose episode is going on."""
        self._next_rollout_id = 0
        self._next_group_id = 0
        self._batches_asked = 0
        self._tasks_exhausted = False

    # ------------------------------------------------------------ looking

    @property
    def outstanding_groups(self) -> int:
        """Running, buffered, or in training until the version made from them is live."""
        return len(self._groups) + sum(groups for _, groups in self._training)

    @property
    def capacity_groups(self) -> int:
        """How many tasks may arrive now."""
        if self._tasks_exhausted:
            return 0
        return self.policy.capacity_groups(outstanding_groups=self.outstanding_groups)

    @property
    def running_groups(self) -> int:
        """Groups with at least one episode going on."""
        return sum(1 for group in self._groups if group.running)

    @property
    def buffered_groups(self) -> int:
        """Groups all of whose episodes have ended, not yet handed over."""
        return sum(1 for group in self._groups if not group.running)

    @property
    def training_groups(self) -> int:
        """Groups handed over, whose version isn't live yet."""
        return sum(groups for _, groups in self._training)

    def check(self) -> None:
        """Verify the invariants that no sequence of events may break.

        Raises:
            AssertionError: one is broken; a bug of ours, never of the user's.
        """
        for ledger in (self.ledger, self.evaluation_ledger):
            snapshot = ledger.snapshot()
            assert snapshot.error == 0, f"ledger is off by {snapshot.error} tokens: {snapshot}"
        limit = self.policy.outstanding_groups_max
        assert self.outstanding_groups <= limit, f"{self.outstanding_groups} groups > {limit}"
        oldest = max(self.trained.staleness, default=0)
        assert oldest <= self.policy.guaranteed_bound, f"trained at staleness {oldest}"
        running = [r for r, g in self._rollouts.values() if not g.is_evaluation]
        in_flight = sum(rollout.sampled_tokens for rollout in running)
        assert in_flight == self.ledger.in_flight, f"{in_flight} != {self.ledger.in_flight}"

    # ------------------------------------------------------------ changing

    def handle(self, event: ev.Event) -> list[ev.Command]:
        """Take in one event and say what to do about it."""
        match event:
            case ev.StepArrived():
                return self._on_step(event)
            case ev.TurnAsked():
                return self._on_turn_asked(event)
            case ev.TurnGivenUp(rollout_id=rollout_id):
                return self._on_turn_given_up(rollout_id)
            case ev.EpisodeReturned():
                return self._on_episode_returned(event) + self._hand_over()
            case ev.EpisodeFailed():
                return self._on_episode_failed(event) + self._hand_over()
            case ev.TaskArrived(task=task):
                return self._admit(task)
            case ev.TasksExhausted():
                self._tasks_exhausted = True
                return self._hand_over()
            case ev.EvaluationAsked(task=task, index=index):
                return self._start(Group(-1 - index, task), 1)
            case ev.TasksOffered():
                self._tasks_exhausted = False
                return []
            case ev.BatchAsked():
                self._batches_asked += 1
                return self._hand_over()
            case ev.BatchNotWanted():
                self._batches_asked -= 1
                return []
            case ev.VersionPublished(version=version):
                return self._on_published(version)
            case ev.EngineSwapped(engine=engine, version=version):
                return self._release(self.turns.swap(engine, version))
            case ev.EngineJoined(engine=engine, weight_version=version, max_running_turns=slots):
                return self._release(self.turns.join(engine, version, slots))
            case ev.EngineLeft(engine=engine):
                return self._release(self.turns.leave(engine))
            case ev.RunEnded():
                return self._end()
            case ev.TurnRejected(engine=engine, handle=handle, message=message):
                return self.turns.reject(engine, handle, message)

    # ------------------------------------------------------------ admission

    def _admit(self, task: object) -> list[ev.Command]:
        if not self.capacity_groups:
            raise TidegateError(
                f"a task arrived with {self.outstanding_groups} groups outstanding of "
                f"{self.policy.outstanding_groups_max} allowed; ask capacity_groups first"
            )
        group = Group(self._next_group_id, task)
        self._next_group_id += 1
        self._groups.append(group)
        return self._start(group, self.group_size)

    def _start(self, group: Group, rollouts: int) -> list[ev.Command]:
        commands: list[ev.Command] = []
        for index in range(rollouts):
            rollout = Rollout(self._next_rollout_id, group.group_id, index)
            self._next_rollout_id += 1
            self._rollouts[rollout.rollout_id] = (rollout, group)
            group.rollouts.append(rollout)
            commands.append(ev.StartEpisode(rollout, group.task))
        group.running = rollouts
        return commands

    # ------------------------------------------------------------ turns

    def _on_turn_asked(self, event: ev.TurnAsked) -> list[ev.Command]:
        rollout, group = self._rollouts[event.rollout_id]
        turn = Turn(rollout, event.sampling)
        rollout.turns.append(turn)
        priority = EVALUATION_PRIORITY if group.is_evaluation else group.group_id
        return self.turns.submit(turn, priority)

    def _on_turn_given_up(self, rollout_id: int) -> list[ev.Command]:
        if rollout_id not in self._rollouts:
            return []
        rollout, _ = self._rollouts[rollout_id]
        commands = self.turns.cancel(rollout)
        if rollout.turns[-1].finish_reason is None:
            rollout.turns[-1].finish_reason = "cancelled"
        return commands

    def _on_step(self, event: ev.StepArrived) -> list[ev.Command]:
        outcome = self.turns.step(event)
        self.ledger.sample(outcome.train_tokens)
        self.evaluation_ledger.sample(outcome.evaluation_tokens)
        if outcome.unwanted_tokens:
            self.ledger.sample_unwanted(outcome.unwanted_tokens, "cancelled")
        return outcome.commands

    # ------------------------------------------------------------ rollouts end

    def _on_episode_returned(self, event: ev.EpisodeReturned) -> list[ev.Command]:
        rollout, group = self._rollouts.pop(event.rollout_id)
        commands = self.turns.cancel(rollout)
        rollout.reward = event.reward
        if group.is_evaluation:
            rollout.state = RolloutState.EVALUATED
            self.evaluation_ledger.discard_running(rollout.sampled_tokens, "evaluated")
            return [*commands, ev.EndEvaluation(rollout), ev.Record(rollout, group.task)]
        rollout.state = RolloutState.FINISHED
        self.ledger.finish(rollout.sampled_tokens)
        return commands + self._rollout_ended(group)

    def _on_episode_failed(self, event: ev.EpisodeFailed) -> list[ev.Command]:
        rollout, group = self._rollouts.pop(event.rollout_id)
        commands = self.turns.cancel(rollout)
        ledger = self.evaluation_ledger if group.is_evaluation else self.ledger
        ledger.discard_running(rollout.sampled_tokens, event.reason)
        commands.append(self._discard(rollout, group, event.reason))
        if group.is_evaluation:
            return [*commands, ev.EndEvaluation(rollout)]
        return commands + self._rollout_ended(group)

    def _rollout_ended(self, group: Group) -> list[ev.Command]:
        group.running -= 1
        if group.running or len(group.kept) >= min(KEPT_ROLLOUTS_MIN, self.group_size):
            return []
        return self._drop(group, "group_too_small")

    def _drop(self, group: Group, reason: str) -> list[ev.Command]:
        """Give up a finished group; its place is free for another."""
        self._groups.remove(group)
        commands: list[ev.Command] = []
        for rollout in group.kept:
            self.ledger.discard_finished(rollout.sampled_tokens, reason)
            commands.append(self._discard(rollout, group, reason))
        return commands

    def _discard(self, rollout: Rollout, group: Group, reason: str) -> ev.Command:
        rollout.state = RolloutState.DISCARDED
        rollout.discard_reason = reason
        if not group.is_evaluation:
            self.discarded_rollouts[reason] += 1
        return ev.Record(rollout, group.task)

    def _end(self) -> list[ev.Command]:
        """Settle every rollout that is not trained."""
        commands: list[ev.Command] = []
        for rollout, group in self._rollouts.values():
            ledger = self.evaluation_ledger if group.is_evaluation else self.ledger
            ledger.discard_running(rollout.sampled_tokens, "run_ended")
            commands.append(self._discard(rollout, group, "run_ended"))
        self._rollouts.clear()
        for group in list(self._groups):
            commands += self._drop(group, "run_ended")
        self._tasks_exhausted = True
        return commands

    # ------------------------------------------------------------ batches

    def _hand_over(self) -> list[ev.Command]:
        """Serve the trainer as many batches as it waits for and the order allows."""
        commands: list[ev.Command] = []
        while self._batches_asked:
            head = self._finished_head()
            if head is None:
                break
            if stale := self._drop_stale(head):
                commands += stale
                continue
            self._batches_asked -= 1
            commands += self._train(head)
        if self._batches_asked and not self._can_fill():
            self._batches_asked -= 1
            commands.append(ev.RefuseBatch(self._unpublished_groups()))
        return commands

    def _finished_head(self) -> list[Group] | None:
        """The groups of the next batch, in the order of admission, once all have ended."""
        groups = self._groups
        if groups and groups[0].running:
            return None
        wanted = self.policy.groups_per_batch
        if self._tasks_exhausted:
            wanted = min(wanted, len(groups))
        head = list(itertools.islice(groups, wanted))
        if len(head) < wanted or any(group.running for group in head):
            return None
        return head

    def _can_fill(self) -> bool:
        return self._tasks_exhausted or self.policy.can_fill_batch(
            unpublished_groups=self._unpublished_groups()
        )

    def _unpublished_groups(self) -> int:
        return sum(groups for version, groups in self._training if version is None)

    def _drop_stale(self, head: list[Group]) -> list[ev.Command]:
        """The second gate. Admission keeps it shut; it is here because promises are checked."""
        commands: list[ev.Command] = []
        for group in head:
            oldest = group.oldest_version
            if oldest is not None and not self.policy.is_fresh(
                oldest_version=oldest, trainer_version=self.trainer_version
            ):
                commands += [*self._drop(group, "stale"), ev.RequeueTask(group.task)]
                self._tasks_exhausted = False  # there is this one again
        return commands

    def _train(self, head: list[Group]) -> list[ev.Command]:
        if not head:
            return [ev.EndBatches()]
        for _ in head:
            self._groups.popleft()
        self._training.append((None, len(head)))
        self._count_trained(head)
        return [ev.HandOver(head, self.trainer_version)]

    def _count_trained(self, groups: Iterable[Group]) -> None:
        self.trained.batches += 1
        for rollout in (rollout for group in groups for rollout in group.kept):
            rollout.state = RolloutState.TRAINED
            self.ledger.train(rollout.sampled_tokens)
            self._count_staleness(rollout)

    def _count_staleness(self, rollout: Rollout) -> None:
        self.trained.rollouts += 1
        oldest = rollout.oldest_version
        if oldest is not None:
            self.trained.staleness[self.trainer_version - oldest] += 1
            self.trained.mixed_version += oldest != rollout.newest_version

    # ------------------------------------------------------------ versions

    def _on_published(self, version: int) -> list[ev.Command]:
        self.trainer_version = version
        self._training = deque((version if v is None else v, n) for v, n in self._training)
        return self._release([])

    def _release(self, commands: list[ev.Command]) -> list[ev.Command]:
        """Free the places of batches whose version is live on every engine."""
        while self._training:
            version = self._training[0][0]
            if version is None or version > self.turns.live_version:
                break
            self._training.popleft()
        return commands + self._hand_over()
