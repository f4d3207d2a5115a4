"""What happens next in a run? Opens no socket, reads no clock, awaits nothing.

Feed it what happened, in order; it answers with what to do, in order. Same events in, same
commands out: that is what makes a run replayable and its promises testable. It owns the versions,
the groups, the rollouts and the token ledger; which engine a turn is on is :mod:`turns`' matter.
"""

from tidegate.errors import TidegateError
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core import left_out
from tidegate.orchestrator.core.group import Group, TaskKey
from tidegate.orchestrator.core.groups import GroupBook
from tidegate.orchestrator.core.handed_batches import HandedBatches
from tidegate.orchestrator.core.invariants import check
from tidegate.orchestrator.core.prompts import Prompts
from tidegate.orchestrator.core.resumption import resume
from tidegate.orchestrator.core.rollout import Rollout
from tidegate.orchestrator.core.rules import Rules
from tidegate.orchestrator.core.taken_tasks import TakenTasks
from tidegate.orchestrator.core.trained import TrainedCounts
from tidegate.orchestrator.turns.turns import TurnBook
from tidegate.policies.staleness import OffPolicyness, refuse_selection


class Core:
    """One run's state. Change it only through :meth:`handle`."""

    def __init__(self, rules: Rules, *, survives_crashes: bool = False) -> None:
        """``survives_crashes``: its events are kept, so that another process may go on from them;
        then batches are kept too, until the trainer's checkpoint holds them."""
        self.policy = rules.policy
        self.turns = TurnBook(rules.placement)
        self.prompts = Prompts(rules.group_filter)
        self.tasks = TakenTasks()
        self.groups = GroupBook(self.turns, self.prompts, self.tasks, group_size=rules.group_size)
        self.ledger = self.groups.ledger
        self.evaluation_ledger = self.groups.evaluation_ledger
        self.discarded_rollouts = self.groups.discarded_rollouts
        self.handed = HandedBatches(is_kept=survives_crashes)
        self.trained = TrainedCounts()
        self.trainer_version = 0
        self.batches_asked = 0
        self.are_tasks_exhausted = False
        self.awaited: dict[TaskKey, list[Group]] = {}
        """After a resume: groups whose task the user's iterator is yet to give again."""
        self.floors_version = 0
        """The live version for which groups' floors were worked out last."""
        self._asked_in_vain: object = None
        """What the policy was asked last, if it said no: the same question has the same answer."""
        self._places_known = 0
        """Tasks that may arrive before it must be worked out anew how many: each asks."""
        self.is_paused = False
        """Whether engines stand still until the next version is live."""
        self.is_restoring = False
        """After a resume: whether the trainer is yet to publish its checkpoint's weights."""

    # ------------------------------------------------------------ looking

    @property
    def outstanding_groups(self) -> int:
        """Running, buffered, or in training until the version made from them is live."""
        return self.groups.places + self.handed.num_groups

    @property
    def capacity_groups(self) -> int:
        """How many tasks may arrive now."""
        if self.are_tasks_exhausted:
            return 0
        return self.policy.admit(self.groups, training_groups=self.handed.num_groups)

    @property
    def running_groups(self) -> int:
        """Groups with at least one episode going on."""
        return self.groups.running_groups

    @property
    def buffered_groups(self) -> int:
        """Groups all of whose episodes have ended, not yet handed over."""
        return len(self.groups.ended)

    @property
    def training_groups(self) -> int:
        """Groups handed over, whose version isn't live yet."""
        return self.handed.num_groups

    @property
    def next_version(self) -> int:
        """The number that a publish now brings.

        Weights that are only restored keep theirs: what they would sample is what they did.
        """
        is_same = self.is_restoring and not self.handed.unpublished_groups
        return self.trainer_version + (not is_same)

    @property
    def running_rollouts(self) -> list[Rollout]:
        """Those whose episode is going on, or is to go on after a resume."""
        return [rollout for rollout, _ in self.groups.running.values()]

    def rollout(self, rollout_id: int) -> Rollout | None:
        """A rollout whose episode is going on."""
        return self.groups.running.get(rollout_id, (None, None))[0]

    def check(self) -> None:
        """Verify the invariants that no sequence of events may break.

        Raises:
            AssertionError: one is broken; a bug of ours, never of the user's.
        """
        check(self)

    # ------------------------------------------------------------ changing

    def handle(self, event: ev.Event) -> list[ev.Command]:
        """Take in one event and say what to do about it."""
        # Each rollout has these four; to match a class costs ten times as much as to name it.
        if type(event) is ev.TurnAsked:
            return self.groups.ask_turn(event)
        if type(event) is ev.EpisodeReturned:
            return self._on_returned(event)
        if type(event) is ev.TaskArrived:
            return self._admit(event)
        if type(event) is ev.StepArrived:
            return self._on_step(event)
        self._places_known = 0
        return self._handle_others(event)

    def _handle_others(self, event: ev.Event) -> list[ev.Command]:
        match event:
            case ev.TurnGivenUp() | ev.RolloutCut() | ev.RolloutForked() | ev.TurnsRewarded():
                return self.groups.change_rollout(event)
            case ev.EpisodeFailed():
                return self.groups.fail(event) + self._hand_over()
            case ev.TaskFound(task=task, key=key):
                return self._on_task_found(task, key)
            case ev.TasksExhausted():
                self.are_tasks_exhausted = True
                return self._hand_over()
            case ev.EvaluationAsked(task=task, index=index):
                return [*self._go_on(), *self.groups.evaluate(task, index)]  # it waits for nothing
            case ev.TasksOffered():
                self.are_tasks_exhausted = False
                self.tasks.begin()
                return []
            case ev.BatchAsked():
                self.batches_asked += 1
                return self._hand_over()
            case ev.BatchNotWanted():
                self.batches_asked -= 1
                return []
            case ev.VersionPublished(version=version):
                return self._on_published(version)
            case ev.VersionRetracted(version=version):
                return self._retract(version)
            case ev.EngineSwapped(engine=engine, version=version):
                return self._release(self.turns.swap(engine, version))
            case ev.EngineJoined():
                return self._release(self.turns.join(event))
            case ev.EngineLeft(engine=engine):
                return self._release(self.turns.leave(engine))
            case ev.BatchesSafe(batches=batches, offer=offer):
                self.handed.make_safe(batches, offer)
                return []
            case ev.RowsDiscarded(batch=number, rows=rows, reason=reason):
                left_out.leave_out(self.handed[number], rows, reason, self.groups, self.trained)
                return []
            case ev.Resumed():
                return resume(self, event)
            case ev.OffPolicynessMeasured(ess=ess, kl=kl):
                measured = OffPolicyness(effective_sample_size=ess, mismatch_kl=kl)
                self.policy = self.policy.observed(measured)
                return self._hand_over()
            case ev.StateNoted():
                return []
            case ev.RunEnded():
                self.are_tasks_exhausted = True
                return self.groups.end()
            case ev.TurnRejected(engine=engine, handle=handle, message=message):
                return self.turns.reject(engine, handle, message)
            case ev.StepArrived() | ev.TurnAsked() | ev.EpisodeReturned() | ev.TaskArrived():
                raise AssertionError(f"{event!r} has been handled above")

    # ------------------------------------------------------------ admission

    def _admit(self, event: ev.TaskArrived) -> list[ev.Command]:
        if not self._places_known:
            self._places_known = self.capacity_groups
        if not self._places_known:
            raise TidegateError(
                f"a task arrived with {self.outstanding_groups} groups outstanding of "
                f"{self.policy.outstanding_groups_max} allowed; ask capacity_groups first"
            )
        self._places_known -= 1
        key = self.tasks.take(event.key)
        if self.prompts.histories and self.prompts.pass_over(event.digest):
            return self._hand_over()
        is_retaken = event.key is not None
        return self.groups.admit(event.task, key, event.digest, is_retaken=is_retaken)

    def _on_step(self, event: ev.StepArrived) -> list[ev.Command]:
        outcome = self.turns.step(event)
        self.ledger.sample(outcome.train_tokens)
        self.evaluation_ledger.sample(outcome.evaluation_tokens)
        if outcome.unwanted_tokens:
            self.ledger.sample_unwanted(outcome.unwanted_tokens, "cancelled")
        return outcome.commands

    def _on_returned(self, event: ev.EpisodeReturned) -> list[ev.Command]:
        revision = self.groups.revision
        commands = self.groups.finish(event)
        self._places_known = 0  # a policy may admit by rounds, and count those that have ended
        if self.groups.revision == revision and not self.policy.splits_groups:
            return commands  # others of its group go on: no batch can have become possible
        return commands + self._hand_over() if self.batches_asked else commands

    # ------------------------------------------------------------ batches

    def _hand_over(self) -> list[ev.Command]:
        """Serve the trainer as many batches as it waits for and the policy selects."""
        commands: list[ev.Command] = []
        while self.batches_asked:
            batch = self._select()
            if batch is None:
                break
            if stale := self._drop_stale(batch):
                commands += stale
                continue
            self.batches_asked -= 1
            commands += self._train(batch)
        if self.batches_asked and not self._can_fill():
            self.batches_asked -= 1
            commands.append(ev.RefuseBatch(self.handed.unpublished_groups))
        return commands

    def _select(self) -> list[Group] | None:
        """The groups of the next batch, which is smaller only when there are no more tasks."""
        wanted = self.policy.groups_per_batch
        if self.are_tasks_exhausted:
            wanted = min(wanted, self.groups.places)
        if self.awaited:
            return None  # until the user's iterator has come to all that were unfinished
        if not wanted:  # only rests are left, if anything is
            return None if self.groups.running_groups else list(self.groups.in_order)
        ends = self.groups.rollout_ends if self.policy.splits_groups else 0
        question = (self.policy, self.trainer_version, wanted, self.groups.revision, ends)
        if question == self._asked_in_vain:
            return None
        batch = self.policy.select(self.groups, groups=wanted, trainer_version=self.trainer_version)
        if batch is None:
            self._asked_in_vain = question
            return None
        refuse_selection(self.policy, batch, wanted)
        return [self.groups.split(group) if group.running else group for group in batch]

    def _can_fill(self) -> bool:
        unpublished_groups = self.handed.unpublished_groups
        can_fill = self.policy.can_fill_batch(unpublished_groups=unpublished_groups)
        is_paused = self.is_paused and unpublished_groups > 0
        return (self.are_tasks_exhausted or can_fill) and not is_paused

    def _drop_stale(self, batch: list[Group]) -> list[ev.Command]:
        """The second gate, for policies that don't mask. Most keep it shut, but it is checked."""
        if self.policy.masks_old_tokens:
            return []
        commands: list[ev.Command] = []
        oldest_trainable = self.policy.oldest_trainable(self.trainer_version)
        for group in batch:
            if group.version_floor >= oldest_trainable:
                continue  # no token is older than that
            oldest = group.oldest_version
            if oldest is not None and oldest < oldest_trainable and group in self.groups:
                commands += self._give_up_anew(group, "stale")
        return commands

    def _give_up_anew(self, group: Group, reason: str) -> list[ev.Command]:
        """Its task is to be taken anew, unless a crash has parted the run from it."""
        key = group.key
        assert key is not None
        commands = self.groups.give_up_group(group, reason)
        if group.is_rest or key.offer < self.tasks.gone_before:
            return commands
        commands += [c for g in self.groups.rests_of(group) for c in self._give_up_anew(g, reason)]
        self.tasks.put_back(key)
        self.are_tasks_exhausted = False  # there is this one again
        if self.awaited.pop(key, None) is not None:
            return commands  # it is taken once the user's iterator has come to it
        return [*commands, ev.RequeueTask(group.task, key)]

    def _expire(self) -> list[ev.Command]:
        """Give up what the policy says."""
        policy = self.policy
        expired = policy.expire(self.groups, trainer_version=self.trainer_version)
        return self._give_all_up_anew(expired, policy.expiry_reason)

    def _give_all_up_anew(self, groups: list[Group], reason: str) -> list[ev.Command]:
        # A rest is given up with the group that it is of, and then no more.
        still = (group for group in groups if group in self.groups)
        return [c for group in still for c in self._give_up_anew(group, reason)]

    def _train(self, batch: list[Group]) -> list[ev.Command]:
        if not batch:
            return [ev.EndBatches()]
        number = self.handed.hand(batch, self.trainer_version)
        oldest_trainable = 0
        if self.policy.masks_old_tokens:
            oldest_trainable = max(0, self.policy.oldest_trainable(self.trainer_version))
        rows = self.groups.train(batch, oldest_trainable=oldest_trainable)
        self.trained.batches += 1
        self.trained.count(rows, self.trainer_version, 1)
        hand_over = ev.HandOver(batch, self.trainer_version, number, oldest_trainable)
        return [hand_over, *self._expire(), *self._pause_generation()]

    def _pause_generation(self) -> list[ev.Command]:
        """Until the version made from a batch is live, if the policy wants that."""
        if not self.policy.pauses_generation or not self.groups.running_groups:
            return []
        self.is_paused = True
        return [ev.PauseGeneration(True)]

    def _go_on(self) -> list[ev.Command]:
        """Generate again, if that was paused."""
        was_paused, self.is_paused = self.is_paused, False
        return [ev.PauseGeneration(False)] if was_paused else []

    # ------------------------------------------------------------ versions

    def _on_published(self, version: int) -> list[ev.Command]:
        self.trainer_version = version
        self.is_restoring = False
        self.handed.publish(version)
        return self._release(self._expire())

    def _retract(self, version: int) -> list[ev.Command]:
        """Give up what bad weights sampled, and take those tasks anew."""
        bad = [group for group in self.groups.in_order if group.newest_version >= version]
        return self._release(self._give_all_up_anew(bad, "rolled_back"))

    def _release(self, commands: list[ev.Command]) -> list[ev.Command]:
        """Free the places of batches whose version is live on every engine."""
        live_version = self.turns.live_version
        if live_version != self.floors_version:
            self.floors_version = live_version
            self.groups.raise_floors(live_version)
        self.handed.release(live_version)
        if not self.handed.num_groups:
            commands += self._go_on()
        return commands + self._hand_over()

    def _on_task_found(self, task: object, key: TaskKey) -> list[ev.Command]:
        """A resumed run's iterator has come to a task that was taken before."""
        if key in self.tasks.requeued:
            return [ev.RequeueTask(task, key)]
        commands: list[ev.Command] = []
        for group in self.awaited.pop(key, ()):  # none: it was trained, or dropped
            group.task = task
            commands += [ev.StartEpisode(r, task) for r in self.groups.running_of(group)]
        return [*commands, *self._hand_over()]
