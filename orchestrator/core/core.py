"""Sans-IO core of a run: takes events, returns commands. Does no I/O and reads no clock.

The scheduler feeds it events and carries out its commands, both in order. The same events give the
same commands, so a run can be replayed from its journal. It owns versions, groups, rollouts and the
token ledger; ``turns.py`` tracks turns on engines, and ``placement.py`` chooses a turn's engine.

A run that trains adapters has one core for the run's weights, and below it one for each adapter,
with groups, versions, staleness policy, batches and ledger of its own. All of them share engines,
turns and the numbers of rollouts. Only the run's core is given events; it passes an adapter's
events to that adapter's core.
"""

from collections.abc import Iterable, Sequence

from tidegate.errors import TidegateError
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.group import Group, TaskKey
from tidegate.orchestrator.core.groups import GroupTracker, Prompts
from tidegate.orchestrator.core.hand_over import (
    HandedBatch,
    HandOvers,
    TrainedCounts,
    WaitingRequest,
    discard_rows,
    undo_batch,
)
from tidegate.orchestrator.core.rollout import Rollout
from tidegate.orchestrator.core.rules import Rules, made_of
from tidegate.orchestrator.core.taken_tasks import TakenTasks
from tidegate.orchestrator.core.task_records import TaskRecords
from tidegate.orchestrator.core.turns import ReleasedVersions, TurnTracker
from tidegate.policies.just_in_time import AdmissionPace
from tidegate.policies.staleness import refuse_selection

ROLLOUT_EVENTS = (
    ev.TurnRequested,
    ev.EpisodeReturned,
    ev.EpisodeFailed,
    ev.TurnAbandoned,
    ev.RolloutCut,
    ev.RolloutForked,
    ev.TurnsRewarded,
    ev.TurnsScored,
)
"""Events that concern one rollout, and name it by its id."""


def resume(core: "Core", event: ev.RunResumed) -> list[ev.Command]:
    """Return the core to the state that the trainer's checkpoint holds, and wait for engines.

    Called for :class:`RunResumed`, after the journal was replayed. Batches after the checkpoint are
    undone and will be handed over again unchanged. Weights published after the checkpoint are lost:
    the run continues under a version number that no token was sampled with, and groups with tokens
    of the lost versions are discarded.
    """
    core.are_tasks_exhausted = False
    core.is_restoring, core.is_paused, core.is_halted = True, False, False
    core.pace = AdmissionPace()
    core.turns.halted.discard(core.adapter)  # pauses are of the process that asked for them
    core.pending_after_resume = {}
    commands = core.groups.end_evaluations()
    first_lost = core.handed.first_lost_version(event.batches)
    if not core.adapter:
        core.turns.resume()
    for batch in core.handed.undo_after(event.batches):
        core._return_groups(batch)
    core.handed.resume(event.batches)
    core.handed.mark_checkpointed(event.batches, event.offer)
    core.tasks.resume(event.offer)
    if first_lost is not None:
        core.trainer_version += 1
        core.handed.roll_back(core.trainer_version)
        core.handed.forget_sampled_by(first_lost)
        core.turns.recall(core.trainer_version, core.adapter)
        core.handed.release(core.versions.live_version)
    core._forget_old_used()
    for group in list(core.groups.in_order):
        if group in core.groups:  # else discarded with the group that it was split from
            commands += _resume_group(core, group, event.offer, first_lost)
    while core.outstanding_groups > core.policy.outstanding_groups_max:
        commands += _roll_back(core, core.groups.newest)
    core.task_records.resume(event.offer)
    for group in core.groups.in_order:
        # A group of an earlier iterator waits for the first iterator given, see Core._on_offered.
        key = group.key
        if group.is_agents:
            continue  # it continues with the group whose episodes sample it
        if key is not None and (key.offer == event.offer or group.body):
            core.pending_after_resume.setdefault(key, []).append(group)
    for name, trained in core.trained_adapters.items():
        handed = trained.handed
        at = event.adapters.get(name, (handed.checkpointed, handed.checkpoint_offer))
        commands += resume(trained, ev.RunResumed(*at))
    return commands


def _resume_group(
    core: "Core", group: Group, offer: int, first_lost: int | None
) -> list[ev.Command]:
    """Discard a group that cannot continue after a resume, or must not be trained any more."""
    if group.is_agents:
        is_lost = first_lost is not None and group.newest_version >= first_lost
        return _discard_agents_group(core, group, "rolled_back") if is_lost else []
    assert group.key is not None
    if group.key.offer > offer:
        return core.groups.discard_group(group, "rolled_back")  # the iterator gives the task again
    if group.key.offer < offer and group.running and not group.body:
        core.tasks.dropped += 1
        return core.groups.discard_group(group, "task_gone")
    if first_lost is not None and group.newest_version >= first_lost:
        return _roll_back(core, group)
    return []


def _discard_agents_group(core: "Core", group: Group, reason: str) -> list[ev.Command]:
    """Discard a group sampled by another group's episodes: with that group, if it still runs."""
    if group.home is not None:
        adapter, home = group.home
        of_home = core.base.of(adapter)
        if home in of_home.groups and home.running:
            return of_home._discard_and_requeue(home, reason)
    return core.groups.discard_group(group, reason) if group in core.groups else []


def _roll_back(core: "Core", group: Group) -> list[ev.Command]:
    """Discard a group, and put its task back to be started again."""
    if group.is_agents:
        return _discard_agents_group(core, group, "rolled_back")
    assert group.key is not None
    commands: list[ev.Command] = []
    if not group.is_split_remainder:  # else the group that it was split from decides
        if group.body or group.key.offer >= core.tasks.first_available_offer:
            core.tasks.put_back(group.key, group.task, group.body)
        else:
            core.tasks.dropped += 1
        commands += [c for g in core.groups.remainders_of(group) for c in _roll_back(core, g)]
    return commands + core.groups.discard_group(group, "rolled_back")


class Core:
    """State of one run. It changes only through :meth:`handle`."""

    def __init__(
        self,
        rules: Rules,
        *,
        survives_crashes: bool = False,
        policy_classes: Iterable[type] = (),
        base: "Core | None" = None,
        adapter: str = "",
    ) -> None:
        """``survives_crashes``: the run has a journal. Then batches are kept until the trainer's
        checkpoint holds them, because a resumed process may have to hand them over again.

        ``policy_classes``: the user's own policies that trained adapters may have. ``base`` and
        ``adapter`` are given for a trained adapter: the run's core, and the adapter's name."""
        self.rules = rules
        self.adapter = adapter
        """Name of the trained adapter that the core is for; empty: the run's weights."""
        self.base: Core = self if base is None else base
        """The run's core; this one, unless it is a trained adapter's."""
        self.trained_adapters: dict[str, Core] = {}
        """Cores of the adapters that the run trains, by name."""
        self.agents: tuple[str, ...] = ()
        """Trained adapters that the episodes of the iterator in use sample beside their own."""
        self.policy = rules.policy
        self.pace = AdmissionPace()
        """Limit by which groups start later than the policy's bound demands."""
        self.turns: TurnTracker = base.turns if base is not None else TurnTracker(rules.placement)
        self.versions: TurnTracker | ReleasedVersions = self.turns
        """Versions that engines serve: of the run's weights, or of this core's adapter."""
        if adapter:
            self.versions = self.turns.adapter_versions[adapter]
        self.prompts = Prompts(rules.group_filter)
        self.tasks = TakenTasks()
        self.task_records = TaskRecords()
        self.groups: GroupTracker = GroupTracker(
            self.turns,
            self.prompts,
            self.tasks,
            self.task_records,
            group_size=rules.group_size,
            failure_policy=rules.failure_policy,
            base=base.groups if base is not None else None,
            adapter=adapter,
            versions=self.versions,
        )
        self.groups.on_discarded = self._discard_agents
        self._survives_crashes = survives_crashes
        self.policy_classes = set(policy_classes)
        """The user's own policies that trained adapters may have."""
        self.ledger = self.groups.ledger
        self.evaluation_ledger = self.groups.evaluation_ledger
        self.discarded_rollouts = self.groups.discarded_rollouts
        self.handed = HandOvers(is_kept=survives_crashes, max_uses=rules.policy.max_uses)
        self.trained = TrainedCounts()
        self.adapters: dict[str, int] = {} if base is None else base.adapters
        """Newest released version of each adapter with versions of its own."""
        if base is None:
            self.turns.adapters = self.adapters
            self.turns.on_tokens_removed = self._discard_refused
        self.trainer_version = 0
        self.are_tasks_exhausted = False
        self.pending_after_resume: dict[TaskKey, list[Group]] = {}
        """After a resume: unfinished groups by task key, until their task is given again."""
        self.oldest_versions_as_of = 0
        """Live version for which the groups' oldest possible versions were computed last."""
        self._failed_selection: object = None
        """Arguments of the last ``select`` that found no batch. The same arguments would find none
        again, so they are not tried again."""
        self.is_paused = False
        """Whether the policy has paused generation until the next version is live."""
        self.is_halted = False
        """Whether the trainer of an adapter has paused its turns."""
        self.is_restoring = False
        """After a resume: whether the trainer has not yet published its checkpoint's weights."""

    # ------------------------------------------------------------ queries

    @property
    def outstanding_groups(self) -> int:
        """Number of groups running, buffered, or in training until their version is live."""
        return self.groups.admission_slots + self.handed.num_groups

    @property
    def admissible_groups(self) -> int:
        """Number of tasks that should arrive now."""
        groups = self._groups_within_bound
        limit = self.pace.limit
        if limit is not None and not self.agents:
            free = self._paced_limit(limit) - self.outstanding_groups
            groups = max(0, min(groups, free))
        return groups

    @property
    def _groups_within_bound(self) -> int:
        """Number of tasks that the policies' bounds let arrive now."""
        if self.are_tasks_exhausted or not self.versions.is_served:
            return 0
        groups = self.policy.admit(self.groups, training_groups=self.handed.num_groups)
        for name in self.agents:
            agent = self.base.trained_adapters.get(name)
            if agent is None or not agent.versions.is_served:
                return 0
            slots = agent.policy.admit(agent.groups, training_groups=agent.handed.num_groups)
            groups = min(groups, slots)
        return groups

    def _paced_limit(self, limit: int) -> int:
        """Return the number of groups that may be outstanding under a limit of the pace: always a
        batch for a request that waits, because its trainer may publish only once it has a batch."""
        if not self.handed.requests:
            return limit
        return max(limit, self.handed.num_groups + self.policy.groups_per_batch)

    @property
    def running_groups(self) -> int:
        """Number of groups with at least one running episode."""
        return self.groups.running_groups

    @property
    def buffered_groups(self) -> int:
        """Number of groups whose episodes have all ended and that were not handed over yet."""
        return len(self.groups.ended)

    @property
    def training_groups(self) -> int:
        """Number of outstanding groups of batches whose version is not live yet; a short batch
        counts as a whole one."""
        return self.handed.num_groups

    @property
    def consumption_version(self) -> int:
        """Version at which a batch handed over now will be trained: after all batches that the
        trainer holds, with ``batches_per_version`` of them in each publish."""
        return self.trainer_version + self.handed.num_held // self.policy.batches_per_version

    @property
    def deadline_version(self) -> int:
        """Newest version at which a batch handed over now may be trained, for the policy that must
        not leave a group too late: a failed publish has named batches, and its number may not be
        used again."""
        return self.trainer_version + self.handed.num_unpublished // self.policy.batches_per_version

    @property
    def next_version(self) -> int:
        """Version number of the next publish.

        The first publish after a resume keeps the current number if the weights are only restored,
        because they would sample the same tokens.
        """
        is_same = self.is_restoring and not self.handed.unpublished_groups
        return self.trainer_version + (not is_same)

    @property
    def running_rollouts(self) -> list[Rollout]:
        """Rollouts whose episode runs, or will run again after a resume; branches included."""
        running = [rollout for rollout, _ in self.groups.running.values()]
        for trained in self.trained_adapters.values():
            running += trained.running_rollouts
        return running

    def rollout(self, rollout_id: int) -> Rollout | None:
        """Return a running rollout by its id; None if it is not running."""
        if rollout_id in self.groups.numbers.tracker_of:
            return self.groups.numbers.tracker_of[rollout_id].running[rollout_id][0]
        return self.groups.running.get(rollout_id, (None, None))[0]

    def of(self, adapter: str) -> "Core":
        """Return the core of a trained adapter; the core of the run's weights if the name is
        empty."""
        return self.trained_adapters[adapter] if adapter else self

    def newest_version(self, adapter: str) -> int:
        """Return the newest version released of an adapter with versions of its own, trained or
        not; of the run's weights if the name is empty."""
        return self.adapters.get(adapter, 0) if adapter else self.trainer_version

    def check(self) -> None:
        """Verify the invariants that hold after every event: ledgers, admission limit, staleness
        bound, tokens in flight.

        Raises:
            AssertionError: an invariant is broken, which is a bug of Tidegate.
        """
        for ledger in (self.ledger, self.evaluation_ledger):
            assert not ledger.error, f"ledger is off by {ledger.error} tokens: {ledger.snapshot()}"
        limit = self.policy.outstanding_groups_max
        assert self.outstanding_groups <= limit, f"{self.outstanding_groups} groups > {limit}"
        oldest, bound = max(self.trained.staleness, default=0), self.policy.guaranteed_bound
        assert bound is None or oldest <= bound, f"trained at staleness {oldest}, not {bound}"
        too_old = self.handed.too_old(self.trainer_version, bound)
        assert not too_old, "a held batch can't be trained"
        oldest_trainable = self.policy.oldest_trainable(self.trainer_version)
        for used in self.handed.used.values():
            assert 1 < used.use <= self.policy.max_uses, f"group {used.group_id}: use {used.use}"
            assert used.oldest_possible_version >= oldest_trainable, f"{used.group_id} is too old"
        running = self.groups.running.values()
        in_flight = sum([r.sampled_tokens for r, group in running if not group.is_evaluation])
        assert in_flight == self.ledger.in_flight, f"{in_flight} != {self.ledger.in_flight}"
        for trained in self.trained_adapters.values():
            trained.check()

    # ------------------------------------------------------------ transitions

    def handle(self, event: ev.Event) -> list[ev.Command]:
        """Apply one event and return the commands that follow from it, in order."""
        if self.trained_adapters and isinstance(event, ROLLOUT_EVENTS):
            tracker = self.groups.numbers.tracker_of.get(event.rollout_id)
            if tracker is not None:
                return self.trained_adapters[tracker.adapter].handle(event)
        # Every rollout and step has these four. A class pattern costs ten times as much.
        if type(event) is ev.TurnRequested:
            return self.groups.begin_turn(event)
        if type(event) is ev.EpisodeReturned:
            return self._on_returned(event)
        if type(event) is ev.TaskArrived:
            return self._admit(event)
        if type(event) is ev.StepArrived:
            return self._on_step(event)
        match event:
            case (
                ev.TurnAbandoned()
                | ev.RolloutCut()
                | ev.RolloutForked()
                | ev.TurnsRewarded()
                | ev.TurnsScored()
            ):
                return self.groups.change_rollout(event)
            case ev.EpisodeFailed():
                rollout = self.groups.running[event.rollout_id][0]
                commands = self.groups.fail(event)
                for name, own in rollout.agents.items():
                    if (agent := self.base.trained_adapters.get(name)) is not None:
                        commands += agent.groups.end_agents(own, rollout, event.reason)
                        commands += agent._hand_over()
                return commands + self._hand_over()
            case ev.TaskFoundAgain(task=task, key=key):
                return self._on_task_found(task, key)
            case ev.TasksExhausted():
                self.are_tasks_exhausted = True
                return self._hand_over() + self._sync_agents()
            case ev.EvaluationRequested(task=task, index=index, version=version):
                resumed = self._resume_generation() if self.adapter else []
                return resumed + self.groups.evaluate(task, index, version)  # no admission
            case ev.TasksOffered(episode=episode, curriculum=curriculum, agents=agents):
                self.agents = agents
                return self._on_offered(episode, curriculum) + self._sync_agents()
            case ev.TaskWeightsSet(curriculum=curriculum, weights=weights):
                self.task_records.set_weights(curriculum, weights)
                if curriculum == self.task_records.name_of(self.tasks.offer):
                    self.are_tasks_exhausted = False  # a task may have a positive weight again
                return []
            case ev.BatchRequested(request=request):
                per_version = self.policy.batches_per_version
                self.handed.request(request, batches_per_version=per_version)
                return self._hand_over_needed()
            case ev.BatchRequestCancelled(request=request):
                self.handed.close_request(request)
                return []
            case ev.BatchTaken(request=request):
                self.handed.acknowledge(request)
                return self._hand_over()
            case ev.BatchReturned():
                return self._undo_hand_over(event)
            case ev.HandOverPaused(is_paused=is_paused):
                self.handed.is_paused = is_paused
                return self._hand_over_needed()
            case ev.BatchesTrained(batches=batches):
                self._name_batches(batches)
                self._observe_need_ahead()
                return []
            case ev.VersionPublished():
                return self._on_published(event)
            case ev.AdapterReleased(name=name, version=version):
                return self._on_adapter_released(name, version)
            case ev.AdapterServed(engine=engine, name=name, version=version):
                self.turns.adapter_versions[name].serve(engine, version)
                return self.trained_adapters[name]._release(self.turns.submit_waiting())
            case ev.AdapterTrainingStarted(name=name, rules=rules):
                self._train_adapter(name, made_of(rules, self.policy_classes))
                return []
            case ev.AdapterTrainingEnded(name=name):
                return self._end_adapter(name)
            case ev.ForAdapter(adapter=adapter, event=inner):
                return self.trained_adapters[adapter].handle(inner)
            case ev.GenerationHalted(is_halted=is_halted):
                self.is_halted = is_halted
                return self._halt_adapter()
            case ev.VersionRetracted(version=version):
                return self._retract(version)
            case ev.EngineSwapped(engine=engine, version=version):
                return self._release(self.turns.swap(engine, version))
            case ev.EngineJoined():
                return self._release_all(self.turns.join(event))
            case ev.EngineLeft(engine=engine, is_crash=is_crash):
                for core in (self, *self.trained_adapters.values()):
                    core.pace = core.pace.lifted()
                return self._release_all(self.turns.leave(engine, is_crash=is_crash))
            case ev.EngineDraining(engine=engine):
                self.turns.drain(engine)
                return []
            case ev.EvaluationEngineChosen(engine=engine, is_kept=is_kept):
                return self._release(self.turns.keep_for_evaluation(engine, is_kept=is_kept))
            case ev.BatchesCheckpointed(batches=batches, offer=offer):
                self.handed.mark_checkpointed(batches, offer)
                return []
            case ev.RowsDiscarded(batch=number, rows=rows, reason=reason):
                batch = self.handed[number]
                discard_rows(batch, rows, reason, self.groups, self.trained)
                self.handed.forget_used(group for group in batch.groups if group.has_discarded_rows)
                self.handed.mark_if_empty(batch)
                return []
            case ev.RunResumed():
                return resume(self, event)
            case ev.StateChecksum():
                return []
            case ev.RunEnded():
                self.are_tasks_exhausted = True
                commands = self.groups.end()
                for trained in self.trained_adapters.values():
                    commands += trained.handle(event)
                return commands
            case ev.TurnRejected(engine=engine, handle=handle, message=message):
                return self.turns.reject(engine, handle, message)

    # ------------------------------------------------------------ admission

    def _on_offered(self, episode: str, curriculum: str) -> list[ev.Command]:
        """Take tasks from another iterator, whose episode function has the name ``episode``.

        The first iterator after a resume continues the one in use at the checkpoint. Earlier
        iterators are not given again, so their unfinished tasks are taken from the journal. The
        same holds for an iterator that the trainer leaves before the resumed run has skipped all
        tasks taken from it.
        """
        self.are_tasks_exhausted = False
        tasks = self.tasks
        groups = [*self.groups.in_order, *(g for b in self.handed.kept for g in b.groups)]
        tasks.begin(episode, {group.key.offer for group in groups if group.key is not None})
        self.task_records.begin(tasks.offer, curriculum)
        commands: list[ev.Command] = []
        was_pending = bool(self.pending_after_resume)
        for key in sorted(key for key in tasks.requeued if key.offer < tasks.offer):
            returned = tasks.requeued[key]
            if tasks.is_known(key, returned.body):
                commands.append(ev.RequeueTask(returned.task, key, self.adapter))
            elif key.offer < tasks.first_available_offer:
                tasks.forget(key)
        for key in sorted(key for key in self.pending_after_resume if key.offer < tasks.offer):
            for group in self.pending_after_resume.pop(key):
                if tasks.is_known(key, group.body):
                    running = self.groups.running_of(group)
                    commands += [ev.StartEpisode(rollout, group.task) for rollout in running]
                elif group.running:
                    tasks.dropped += 1
                    commands += self.groups.discard_group(group, "task_gone")
        return commands + self._hand_over() if was_pending else commands

    def _admit(self, event: ev.TaskArrived) -> list[ev.Command]:
        if not self._groups_within_bound:
            raise TidegateError(
                f"a task arrived with {self.outstanding_groups} groups outstanding of "
                f"{self.policy.outstanding_groups_max} allowed; take only as many tasks as "
                "`admissible_groups` says"
            )
        key = self.tasks.take(event.key)
        if event.item is not None:
            self.task_records.draw(key, event.item, is_replay=event.is_replay)
        if self.prompts.histories and self.prompts.skip(event.digest):
            return self._hand_over()
        is_retaken = event.key is not None
        commands = self.groups.admit(event, key, is_retaken=is_retaken)
        if self.agents:
            group = self.groups.newest
            for name in self.agents:
                self.base.trained_adapters[name].groups.admit_agents(group, self.adapter)
        return commands

    def _on_step(self, event: ev.StepArrived) -> list[ev.Command]:
        outcome = self.turns.step(event)
        ledger = self.ledger
        if event.adapter and event.adapter in self.trained_adapters:
            ledger = self.trained_adapters[event.adapter].ledger
        ledger.sample(outcome.train_tokens)
        self.evaluation_ledger.sample(outcome.evaluation_tokens)
        if outcome.late_tokens:
            ledger.sample_discarded(outcome.late_tokens, "cancelled")
        if (tokens := outcome.late_evaluation_tokens) > 0:
            self.evaluation_ledger.sample_discarded(tokens, "cancelled")
        return outcome.commands

    def _on_returned(self, event: ev.EpisodeReturned) -> list[ev.Command]:
        groups = self.groups
        revision = groups.revision
        agents = groups.running[event.rollout_id][0].agents
        commands = groups.finish(event)
        if agents:
            rewards = dict(event.agent_rewards)
            for name, own in agents.items():
                if (agent := self.base.trained_adapters.get(name)) is not None:
                    commands += agent.groups.finish_agent(own, rewards.get(name, event.reward))
            for name in agents:
                if (agent := self.base.trained_adapters.get(name)) is not None:
                    commands += agent._hand_over()
        if groups.revision == revision and not self.policy.splits_groups:
            return commands  # other rollouts of its group run: no new batch is possible
        return commands + self._hand_over() if self.handed.requests else commands

    # ------------------------------------------------------------ just-in-time admission

    def _hand_over_needed(self) -> list[ev.Command]:
        """As :meth:`_hand_over`, when the trainer may have begun to need a batch."""
        handed = self.handed
        if not handed.wants_batch or handed.requests[0].is_ahead:
            return self._hand_over()  # a request ahead is needed once what is held is trained
        left = self.policy.ready_groups(self.groups) - self.policy.groups_per_batch
        commands = self._hand_over()
        batches = [command for command in commands if type(command) is ev.HandOver]
        if any(group.use > 1 for batch in batches for group in batch.groups):
            self._observe_need(None)  # the trainer would have waited
        elif batches:
            self._observe_need(max(0, left))
        elif handed.requests:
            self._observe_need(None)
        return commands

    def _observe_need_ahead(self) -> None:
        """Observe that a trainer that requests batches ahead needs the next one now."""
        handed = self.handed
        if any(batch.is_ahead for batch in handed.held):
            self._observe_need(self.policy.ready_groups(self.groups))
        elif handed.requests and handed.requests[0].is_ahead:
            self._observe_need(None)

    def _observe_need(self, left: int | None) -> None:
        """Adjust the pace after the trainer needed a batch, and ``left`` ended groups were left
        beside it; None: there was no batch."""
        policy = self.policy
        versions = policy.just_in_time_after_versions
        if versions is None:
            return
        if left is None:
            self.pace = self.pace.after_wait()
            return
        self.pace = self.pace.after_need(
            left,
            most=policy.outstanding_groups_max,
            groups_per_batch=policy.groups_per_batch,
            batches_per_version=policy.batches_per_version,
            versions=versions,
        )

    # ------------------------------------------------------------ batches

    def _hand_over(self) -> list[ev.Command]:
        """Offer a batch to the oldest request, if one may be offered and has filled."""
        commands: list[ev.Command] = []
        while self.handed.wants_batch:
            batch = self._select()
            if batch is None:
                if self._can_fill():
                    break
                if self.handed.release_emptied():
                    if not self.handed.num_groups:
                        commands += self._resume_generation()
                    continue
                request = self.handed.requests.popleft().number
                held = tuple(each.number for each in self.handed.held)
                groups = self.handed.unpublished_groups
                commands.append(ev.RefuseBatch(request, groups, held, self.adapter))
            elif stale := self._discard_stale(batch):
                commands += stale
            elif batch:
                commands += self._train(batch)
            else:
                commands.append(ev.EndBatches(self.handed.requests.popleft().number, self.adapter))
        return commands

    def _select(self) -> list[Group] | None:
        """Return the groups of the next batch; it is short only when there are no more tasks."""
        wanted = self.policy.groups_per_batch
        if self.are_tasks_exhausted:
            wanted = min(wanted, self.groups.admission_slots)
        if self.pending_after_resume:
            return None  # until the user's iterator has given all unfinished tasks again
        if self.handed.undone and (undone := self._undone_batch()) is not None:
            return undone
        if not wanted:  # only split remainders are left, if any
            return None if self.groups.running_groups else list(self.groups.in_order)
        ends = self.groups.rollout_ends if self.policy.splits_groups else 0
        version = self.deadline_version
        is_needed = self.handed.num_held < self.policy.batches_per_version
        selection = (version, wanted, self.groups.revision, ends, is_needed)
        if selection == self._failed_selection:
            return None
        batch = self.policy.select(self.groups, groups=wanted, trainer_version=version)
        if batch is None and is_needed and self.handed.used:
            wanted, used = self.policy.groups_per_batch, self.handed.used.values()
            batch = self.policy.refill(self.groups, used, groups=wanted, trainer_version=version)
        if batch is None:
            self._failed_selection = selection
            return None
        refuse_selection(self.policy, batch, wanted)
        return [self.groups.split(group) if group.running else group for group in batch]

    def _undone_batch(self) -> list[Group] | None:
        """Return the groups of the oldest batch that a resume has undone, as they were handed over.

        None once one of the groups was discarded (by a rollback, or for its age), or if the trainer
        asks before the earlier use of one is in a version: from that batch on, the policy selects.
        """
        ids = self.handed.undone[0]
        groups = [self.groups.ended_group(i) or self._young_used(i) for i in ids]
        whole = [group for group in groups if group is not None]
        if len(whole) == len(groups):
            return whole
        self.handed.undone.clear()
        return None

    def _young_used(self, group_id: int) -> Group | None:
        """Return a used group that is young enough to be trained again; None if it is not kept."""
        group = self.handed.used.get(group_id)
        oldest_trainable = self.policy.oldest_trainable(self.consumption_version)
        is_young = group is not None and group.oldest_possible_version >= oldest_trainable
        return group if is_young else None

    def _forget_old_used(self) -> None:
        used, oldest = self.handed.used, self.policy.oldest_trainable(self.trainer_version)
        self.handed.forget_used([g for g in used.values() if g.oldest_possible_version < oldest])

    def _can_fill(self) -> bool:
        unpublished_groups = self.handed.unpublished_groups
        can_fill = self.policy.can_fill_batch(unpublished_groups=unpublished_groups)
        is_paused = self.is_paused and unpublished_groups > 0
        return (self.are_tasks_exhausted or can_fill) and not is_paused

    def _discard_stale(self, batch: list[Group]) -> list[ev.Command]:
        """Discard the batch's groups that are too old, unless the policy masks their old tokens.

        Admission leaves few of them.
        """
        if self.policy.masks_old_tokens:
            return []
        commands: list[ev.Command] = []
        oldest_trainable = self.policy.oldest_trainable(self.consumption_version)
        for group in batch:
            if group.oldest_possible_version >= oldest_trainable:
                continue  # then no token is too old
            oldest = group.oldest_version
            if oldest is not None and oldest < oldest_trainable and group in self.groups:
                commands += self._discard_and_requeue(group, "stale")
        return commands

    def _discard_and_requeue(self, group: Group, reason: str) -> list[ev.Command]:
        """Discard a group, and put its task back unless no iterator and no journal has it."""
        if group.is_agents:
            return _discard_agents_group(self, group, reason)
        key = group.key
        assert key is not None
        commands = self.groups.discard_group(group, reason)
        if group.is_split_remainder or not self.tasks.can_be_taken_again(key, group.body):
            return commands
        commands += [
            c
            for g in self.groups.remainders_of(group)
            for c in self._discard_and_requeue(g, reason)
        ]
        self.tasks.put_back(key, group.task, group.body)
        self.are_tasks_exhausted = False  # this task is available again
        commands += self._sync_agents()
        if self.pending_after_resume.pop(key, None) is not None:
            return commands  # the task is taken once the user's iterator gives it again
        return [*commands, ev.RequeueTask(group.task, key, self.adapter)]

    def _expire(self) -> list[ev.Command]:
        policy = self.policy
        expired = policy.expire(self.groups, trainer_version=self.trainer_version)
        if self.handed.undone:  # undone batches: their age is checked when they are handed over
            undone = {group_id for batch in self.handed.undone for group_id in batch}
            expired = [group for group in expired if group.group_id not in undone]
        return self._discard_and_requeue_all(expired, policy.expiry_reason)

    def _discard_and_requeue_all(self, groups: list[Group], reason: str) -> list[ev.Command]:
        # A remainder may have been discarded with the group that it was split from.
        outstanding = (group for group in groups if group in self.groups)
        return [c for group in outstanding for c in self._discard_and_requeue(group, reason)]

    def _train(self, groups: list[Group]) -> list[ev.Command]:
        version = self.consumption_version
        oldest_trainable = 0
        if self.policy.masks_old_tokens:
            oldest_trainable = max(0, self.policy.oldest_trainable(version))
        fresh = [group for group in groups if group.use == 1]
        rows = self.groups.train(fresh, oldest_trainable=oldest_trainable) if fresh else []
        rows += [row for group in groups if group.use > 1 for row in group.kept]
        request = self.handed.requests[0]
        num_groups = self._groups_counted_for(groups)
        number = self.handed.add(groups, version, num_groups=num_groups).number
        self.trained.batches += 1
        self.trained.count(rows, version, 1)
        self.task_records.trained(fresh, version, 1)
        hand_over = ev.HandOver(
            groups,
            version,
            number,
            oldest_trainable,
            self.adapter,
            request.number,
            request.is_ahead,
        )
        return [hand_over, *self._expire(), *self._pause_generation()]

    def _groups_counted_for(self, batch: list[Group]) -> int:
        """Return the number of outstanding groups that a batch counts as: always that of a whole
        batch.

        A short batch makes a version too, so groups admitted beside it age as much as beside a
        whole batch. If the policy allows fewer outstanding groups, the batch counts as all those
        that are left.
        """
        groups = sum([group.split_from is None and group.use == 1 for group in batch])
        left = self.policy.outstanding_groups_max - self.outstanding_groups
        return max(groups, min(self.policy.groups_per_batch, left))

    def _undo_hand_over(self, event: ev.BatchReturned) -> list[ev.Command]:
        """Undo a hand-over; the batch's groups may be selected again at a later version."""
        number = event.number
        if number in self.handed.lost:  # by a rollback, before the offer was withdrawn
            self.handed.offer = None
            if event.request is not None:
                is_ahead = self.handed.num_held >= self.policy.batches_per_version
                self.handed.requests.appendleft(WaitingRequest(event.request, is_ahead))
            return self._hand_over()
        assert number == self.handed.count, f"batch {number} of {self.handed.count}"
        batch = self.handed.undo_newest()
        if event.request is not None:
            self.handed.requests.appendleft(WaitingRequest(event.request, batch.is_ahead))
        self._return_groups(batch)
        return self._release([])

    def _return_groups(self, batch: HandedBatch) -> None:
        """Return the groups of a batch to the buffer, as if they had not been handed over."""
        self.trained.batches -= 1
        fresh = [group for group in batch.groups if group.use == 1]
        self.task_records.trained(fresh, batch.trainer_version, -1)
        undo_batch(batch, self.groups, self.trained)
        self.handed.return_used(batch.groups)

    def _name_batches(self, numbers: Sequence[int]) -> None:
        """Make the age of these batches final: their trainer has trained on them."""
        version = self.trainer_version
        for batch in self.handed.name(numbers, version):
            rows = [row for row in batch.rows if row.discard_reason is None]
            roots = list({row.root.rollout_id: row.root for row in rows}.values())
            fresh = [group for group in batch.groups if group.use == 1]
            self.trained.count(roots, batch.trainer_version, -1)
            self.task_records.trained(fresh, batch.trainer_version, -1)
            batch.trainer_version = version
            self.trained.count(roots, version, 1)
            self.task_records.trained(fresh, version, 1)

    def _lose(self, batches: Iterable[HandedBatch], reason: str) -> list[ev.Command]:
        """Discard held batches that must not be trained on any more, and put their tasks back."""
        commands: list[ev.Command] = []
        for batch in batches:
            self.handed.lose(batch, reason)
            self._return_groups(batch)
            self.handed.forget_used(batch.groups)  # the trainer may have trained on them
            commands.append(ev.LoseBatch(batch.number, reason, self.adapter))
            commands += self._discard_and_requeue_all(batch.groups, reason)
        return commands

    def _pause_generation(self) -> list[ev.Command]:
        """Pause generation until the version made from a batch is live, if the policy wants that.

        An adapter's turns are not taken back during an evaluation of it, which the trainer may wait
        for before it publishes. Engines run during such calls, see :meth:`Scheduler.evaluate`.
        """
        if not self.policy.pauses_generation or not self.groups.running_groups:
            return []
        if self.adapter and any(g.is_evaluation for _, g in self.groups.running.values()):
            return []
        self.is_paused = True
        return self._halt_adapter() if self.adapter else [ev.PauseGeneration(True)]

    def _resume_generation(self) -> list[ev.Command]:
        was_paused, self.is_paused = self.is_paused, False
        if not was_paused:
            return []
        return self._halt_adapter() if self.adapter else [ev.PauseGeneration(False)]

    def _halt_adapter(self) -> list[ev.Command]:
        """Take back an adapter's turns while its policy or its trainer pauses the adapter;
        otherwise submit them."""
        is_halted = self.is_halted or self.is_paused
        turns = self.turns.halt(self.adapter, is_halted)
        return [*turns, ev.PauseGeneration(is_halted, self.adapter)]

    # ------------------------------------------------------------ versions

    def _on_published(self, event: ev.VersionPublished) -> list[ev.Command]:
        self.trainer_version = event.version
        self.handed.publish(event.version)
        self._forget_old_used()
        self.is_restoring = False
        too_old = self.handed.too_old(event.version, self.policy.guaranteed_bound)
        return self._release(self._lose(too_old, "stale") + self._expire())

    def _retract(self, version: int) -> list[ev.Command]:
        """Discard the groups with tokens of ``version`` or newer, and put their tasks back.

        An engine that reconnects with bad weights gets no turns until it serves the next version.
        Turns are taken back from engines, because the engine may also replay steps of bad weights.
        """
        commands = self.turns.recall(self.next_version, self.adapter)
        held = [batch for batch in self.handed.held if batch.newest_version >= version]
        commands += self._lose(held, "rolled_back")
        self.handed.forget_sampled_by(version)
        bad = [group for group in self.groups.in_order if group.newest_version >= version]
        return self._release(commands + self._discard_and_requeue_all(bad, "rolled_back"))

    def _release(self, commands: list[ev.Command]) -> list[ev.Command]:
        """Release batches whose version is live on every engine from admission, and hand over."""
        live_version = self.versions.live_version
        if live_version != self.oldest_versions_as_of:
            self.oldest_versions_as_of = live_version
            self.groups.raise_oldest_possible_versions(live_version)
        self.handed.release(live_version)
        self._failed_selection = None  # other groups may be used again
        if not self.handed.num_groups:
            commands += self._resume_generation()
        return commands + self._hand_over()

    def _release_all(self, commands: list[ev.Command]) -> list[ev.Command]:
        commands = self._release(commands)
        for trained in self.trained_adapters.values():
            commands = trained._release(commands)
        return commands

    def _on_task_found(self, task: object, key: TaskKey) -> list[ev.Command]:
        """Restart the groups that are pending for a task that the resumed run's iterator gave."""
        commands: list[ev.Command] = []
        if key in self.tasks.requeued:  # the pending group is a remainder of a discarded one
            commands.append(ev.RequeueTask(task, key, self.adapter))
        for group in self.pending_after_resume.pop(key, ()):  # no group: it was trained, or dropped
            if not group.body:  # else the group has an equal task from the journal
                group.task = task
            commands += [ev.StartEpisode(r, task) for r in self.groups.running_of(group)]
        return [*commands, *self._hand_over()]

    # ------------------------------------------------------------ trained adapters

    def _train_adapter(self, name: str, rules: Rules) -> None:
        versions = self.turns.adapter_versions[name] = ReleasedVersions()
        versions.released = versions.live_version = self.adapters.get(name, 0)
        trained = self.trained_adapters[name] = Core(
            rules, survives_crashes=self._survives_crashes, base=self, adapter=name
        )
        trained.trainer_version = trained.oldest_versions_as_of = versions.released
        trained.handed.versions[0] = (versions.released, 0)

    def _discard_agents(self, group: Group, reason: str) -> list[ev.Command]:
        """Discard the groups that a discarded group's episodes have sampled, unless they ended."""
        commands: list[ev.Command] = []
        for name, own in group.agents.items():
            own.home = None
            agent = self.base.trained_adapters.get(name)
            if agent is not None and own in agent.groups and own.running:
                commands += agent.groups.discard_group(own, reason)
        return commands

    def _sync_agents(self) -> list[ev.Command]:
        """Let groups of adapters without tasks of their own start, or stop them, as their admission
        allows."""
        commands: list[ev.Command] = []
        cores = [self.base, *self.base.trained_adapters.values()]
        for name in self.agents:
            agent = self.base.trained_adapters.get(name)
            if agent is None or agent.tasks.offer >= 0:
                continue
            homes = [core for core in cores if name in core.agents]
            agent.are_tasks_exhausted = all(core.are_tasks_exhausted for core in homes)
            commands += agent._hand_over()
        return commands

    def _end_adapter(self, name: str) -> list[ev.Command]:
        """Discard the adapter's rollouts that its trainer has not trained on. The adapter's tokens
        stay in the run's ledger as discarded, because more of them may still arrive."""
        trained = self.trained_adapters[name]
        commands = self.turns.halt(name, False) if name in self.turns.halted else []
        commands += trained.handle(ev.RunEnded())
        del self.trained_adapters[name], self.turns.adapter_versions[name]
        return commands

    def _on_adapter_released(self, name: str, version: int) -> list[ev.Command]:
        self.adapters[name] = version
        trained = self.trained_adapters.get(name)
        if trained is None:
            return []
        self.turns.adapter_versions[name].release(version, self.turns.engines)
        commands = trained._on_published(ev.VersionPublished(version))
        return commands + self.turns.submit_waiting()

    def _discard_refused(self, rollout: Rollout, tokens: int) -> None:
        self.of(rollout.adapter).groups.discard_refused(rollout, tokens)
