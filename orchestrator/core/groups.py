"""Lifecycle of groups and their rollouts: starts, ends, discards and counts them.

:class:`Core` calls :class:`GroupTracker`, and decides when a group may start or is trained. Each
method that settles a rollout moves the rollout's tokens between the ledger's accounts.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.discards import Discards
from tidegate.orchestrator.core.failure_counts import FailureKey, FailureOutcome
from tidegate.orchestrator.core.group import Group, TaskKey
from tidegate.orchestrator.core.ledger import Ledger
from tidegate.orchestrator.core.rollout import (
    DISCARDED,
    FINISHED,
    TRAINED,
    Rollout,
    RolloutState,
    Turn,
)
from tidegate.orchestrator.core.taken_tasks import TakenTasks
from tidegate.orchestrator.core.task_records import TaskRecords
from tidegate.orchestrator.core.turns import ReleasedVersions, TurnTracker
from tidegate.policies.failures import (
    EpisodeFailure,
    FailurePolicy,
    decide_retry,
    decide_reward,
)
from tidegate.policies.filters import GroupFilter, PromptHistory


class OutstandingGroupIndex:
    """Groups from their admission until they are trained or discarded."""

    def __init__(self) -> None:
        self._outstanding: dict[int, Group] = {}
        """Running and buffered groups by id, in the order of admission."""
        self._ended: dict[int, Group] = {}
        """Buffered groups, in the order in which they ended."""
        self._running: OrderedDict[int, Group] = OrderedDict()
        """Running groups, in the order of admission."""
        self._admission_order: deque[int] = deque()
        """Ids in the order of admission, from the oldest running group on; some may be of removed
        groups."""
        self._ended_before_running: set[int] = set()
        """Ids of buffered groups that were admitted before the first of ``_admission_order``."""
        self._counts_by_version: dict[int, int] = {}
        """Number of outstanding groups by oldest possible version. A dict, because setting a
        Counter's items takes three times as long."""
        self._ended_counts_by_version: dict[int, int] = {}
        """Number of buffered groups by oldest possible version."""
        self._num_remainders = 0
        """Number of outstanding groups that are remainders of split groups."""
        self.revision = 0
        """Counts changes that a policy could see: groups admitted, ended or removed, and their
        oldest possible versions."""

    # ------------------------------------------------------------ queries

    @property
    def newest(self) -> Group:
        """Group admitted last; there must be one."""
        return self._outstanding[next(reversed(self._outstanding))]

    @property
    def in_order(self) -> Collection[Group]:
        """Running and buffered groups, in the order of admission."""
        return self._outstanding.values()

    @property
    def ended(self) -> Collection[Group]:
        """Buffered groups, in the order in which they ended."""
        return self._ended.values()

    def ended_group(self, group_id: int) -> Group | None:
        """Return a buffered group by its id; None if no group of this id is buffered."""
        return self._ended.get(group_id)

    @property
    def oldest_running(self) -> Group | None:
        """Running group admitted first; None if none runs."""
        return next(iter(self._running.values()), None)

    @property
    def ended_ahead(self) -> int:
        """Number of buffered groups admitted before the oldest running one.

        Each group is visited once: groups that end behind a straggler cost nothing until it has
        ended.
        """
        order, running = self._admission_order, self._running
        while order and order[0] not in running:
            if (group_id := order.popleft()) in self._outstanding:
                self._ended_before_running.add(group_id)
        return len(self._ended_before_running)

    @property
    def counts_by_version(self) -> Mapping[int, int]:
        """Number of outstanding groups, by the version that none of their tokens is older than."""
        return self._counts_by_version

    @property
    def ended_counts_by_version(self) -> Mapping[int, int]:
        """Number of buffered groups by oldest possible version."""
        return self._ended_counts_by_version

    @property
    def admission_slots(self) -> int:
        """Number of groups that count in admission: all but split remainders."""
        return len(self._outstanding) - self._num_remainders

    @property
    def running_groups(self) -> int:
        """Number of groups with at least one running episode."""
        return len(self._running)

    def remainders_of(self, group: Group) -> list[Group]:
        """Return the outstanding groups that were split from a group."""
        return [g for g in self._outstanding.values() if g.split_from == group.group_id]

    def __contains__(self, group: Group) -> bool:
        return group.group_id in self._outstanding

    # ------------------------------------------------------------ transitions

    def raise_oldest_possible_versions(self, live_version: int) -> None:
        """Raise oldest possible versions: from now on no turn starts under weights older than
        ``live_version``.

        At each publish all running groups are visited, perhaps a hundred thousand, most of which
        wait for their first token; those are handled here without a call each.
        """
        self.revision += 1
        raised: dict[int, int] = {}
        """Number of groups without a token whose minimum was raised here, by the minimum before."""
        for group in self._running.values():
            before = group.oldest_possible_version
            if before >= live_version:
                continue
            for rollout in group.rollouts:
                turns = rollout.turns
                if turns and (turns[0].runs or len(turns) > 1):
                    self._raise_oldest_possible_version(group, live_version)
                    break
            else:
                group.oldest_possible_version = live_version
                raised[before] = raised.get(before, 0) + 1
        for before, groups in raised.items():
            _decrement(self._counts_by_version, before, groups)
            _increment(self._counts_by_version, live_version, groups)

    def _raise_oldest_possible_version(self, group: Group, live_version: int) -> None:
        oldest = group.oldest_version  # future turns start under live weights or newer
        minimum = live_version if oldest is None else min(oldest, live_version)
        if minimum != group.oldest_possible_version:
            _move(self._counts_by_version, group.oldest_possible_version, minimum)
            group.oldest_possible_version = minimum

    def restore(self, groups: Iterable[Group], *, ended: Iterable[int]) -> None:
        """Replace all groups, in the order of admission; ``ended`` are ids in the order of ends."""
        self._outstanding = {group.group_id: group for group in groups}
        self._ended = {group_id: self._outstanding[group_id] for group_id in ended}
        self._running = OrderedDict((i, g) for i, g in self._outstanding.items() if g.running)
        self._num_remainders = sum(group.is_split_remainder for group in self._outstanding.values())
        self._recount()

    def _add(self, group: Group) -> None:
        self._outstanding[group.group_id] = self._running[group.group_id] = group
        _increment(self._counts_by_version, group.oldest_possible_version)
        self._admission_order.append(group.group_id)
        if (
            len(self._admission_order) > 2 * len(self._outstanding) + 16
        ):  # keeps ids of removed groups below half
            self._admission_order = deque(
                i for i in self._admission_order if i in self._outstanding
            )
        self.revision += 1

    def _add_split(self, part: Group, *, remainder: Group) -> None:
        """Replace a running group by its ended part and its running remainder, the newest group."""
        self._num_remainders += 1 + part.is_split_remainder
        self._add(remainder)
        self._outstanding[part.group_id] = self._ended[part.group_id] = part
        _increment(self._counts_by_version, part.oldest_possible_version)
        _increment(self._ended_counts_by_version, part.oldest_possible_version)

    def _mark_ended(self, group: Group, oldest_possible_version: int) -> None:
        """Move a group whose last episode has ended to the buffer."""
        self.revision += 1
        if group.oldest_possible_version != oldest_possible_version:
            _move(self._counts_by_version, group.oldest_possible_version, oldest_possible_version)
            group.oldest_possible_version = oldest_possible_version
        _increment(self._ended_counts_by_version, oldest_possible_version)
        del self._running[group.group_id]
        self._ended[group.group_id] = group

    def _remove(self, group: Group) -> None:
        self.revision += 1
        group_id = group.group_id
        del self._outstanding[group_id]
        self._ended_before_running.discard(group_id)
        if group.split_from is not None:
            self._num_remainders -= 1
        _decrement(self._counts_by_version, group.oldest_possible_version)
        if self._ended.pop(group_id, None) is None:
            self._running.pop(group_id, None)
        else:
            _decrement(self._ended_counts_by_version, group.oldest_possible_version)

    def _remove_batch(self, groups: list[Group]) -> None:
        """Remove buffered groups in one call, because each may be of one rollout."""
        self.revision += 1
        outstanding, ended = self._outstanding, self._ended
        for group in groups:
            group_id = group.group_id
            del outstanding[group_id], ended[group_id]
            self._ended_before_running.discard(group_id)
            if group.split_from is not None:
                self._num_remainders -= 1
        for version, count in Counter([group.oldest_possible_version for group in groups]).items():
            _decrement(self._counts_by_version, version, count)
            _decrement(self._ended_counts_by_version, version, count)

    def _restore_ended(self, groups: list[Group]) -> None:
        """Return groups to the front of the buffer, as if they had ended before all others."""
        self.revision += 1
        self._num_remainders += sum(group.is_split_remainder for group in groups)
        by_id = {group.group_id: group for group in groups}
        self._outstanding = dict(sorted({**self._outstanding, **by_id}.items()))
        self._ended = {**by_id, **self._ended}
        self._recount()

    def _recount(self) -> None:
        self._admission_order = deque(self._outstanding)
        self._ended_before_running.clear()
        self._counts_by_version = dict(
            Counter([g.oldest_possible_version for g in self._outstanding.values()])
        )
        self._ended_counts_by_version = dict(
            Counter([g.oldest_possible_version for g in self._ended.values()])
        )


def _increment(counts: dict[int, int], version: int, groups: int = 1) -> None:
    counts[version] = counts.get(version, 0) + groups


def _decrement(counts: dict[int, int], version: int, groups: int = 1) -> None:
    left = counts[version] - groups
    if left:
        counts[version] = left
    else:
        del counts[version]


def _move(counts: dict[int, int], version: int, to: int) -> None:
    _decrement(counts, version)
    _increment(counts, to)


KEPT_ROLLOUTS_MIN = 2
"""Number of rewards that a group needs for a comparison. A group with fewer is dropped, unless
group_size is 1."""

TOO_OLD = "too_old"
"""Ledger account of tokens that a policy masks."""

EVALUATION_PRIORITY = -1
"""Priority of evaluation turns: before all training, because the trainer waits for them."""


class Prompts:
    """Reward histories of all tasks of a run, kept only if its filter uses them."""

    def __init__(self, group_filter: GroupFilter) -> None:
        self.filter = group_filter
        self.histories: dict[bytes, PromptHistory] = {}
        """Histories by the task's digest."""
        self.skipped = 0
        """Number of tasks skipped before anything was generated."""
        self.drops_since_batch = 0
        """Number of groups that the filter has rejected since the last batch."""
        self.kept_at_limit = 0
        """Number of groups that the filter rejected, but that were kept at its limit."""

    def may_drop(self, *, is_ended: bool) -> bool:
        """Return whether a group that the filter rejects may be dropped, and count it.

        ``is_ended``: whether its rollouts have all ended, so that it is not judged again.
        """
        limit = self.filter.drops_limit
        if limit is not None and self.drops_since_batch >= limit:
            self.kept_at_limit += is_ended
            return False
        self.drops_since_batch += 1
        return True

    def record(self, digest: bytes, rewards: Sequence[float]) -> None:
        """Add the rewards of a task's group that has ended."""
        if digest and self.filter.uses_history:
            self.histories[digest] = self.histories.get(digest, PromptHistory()).after(rewards)

    def skip(self, digest: bytes) -> bool:
        """Return whether to skip a task, and count it if so."""
        history = self.histories.get(digest)
        is_passed_over = history is not None and self.filter.skip(history)
        self.skipped += is_passed_over
        return is_passed_over


class RolloutNumbers:
    """Numbers of a run's rollouts, which all its trackers share."""

    def __init__(self) -> None:
        self.next = 0
        self.tracker_of: dict[int, GroupTracker] = {}
        """Tracker of each running rollout of a trained adapter, by rollout id."""


class GroupTracker(OutstandingGroupIndex):
    """All running and buffered groups of the run's weights, or of one trained adapter, and the
    ledger of their tokens."""

    def __init__(
        self,
        turns: TurnTracker,
        prompts: Prompts,
        tasks: TakenTasks,
        task_records: TaskRecords,
        *,
        group_size: int,
        failure_policy: FailurePolicy,
        base: "GroupTracker | None" = None,
        adapter: str = "",
        versions: TurnTracker | ReleasedVersions | None = None,
    ) -> None:
        """``base``, ``adapter`` and ``versions`` are given for a trained adapter: the tracker of
        the run's weights, the adapter's name, and what engines serve of it."""
        super().__init__()
        self._turns = turns
        self._versions: TurnTracker | ReleasedVersions = versions or turns
        self.adapter = adapter
        self._tasks = tasks
        self._prompts = prompts
        self._task_records = task_records
        self._keeps_all = type(prompts.filter) is GroupFilter
        """Whether the filter keeps every group, so that none is dropped before its end."""
        self.group_size = group_size
        self._min_rollouts = 1 if group_size < KEPT_ROLLOUTS_MIN else KEPT_ROLLOUTS_MIN
        """Kept rollouts that a group needs to be trained; a split remainder needs one."""
        self.ledger = Ledger()
        self.evaluation_ledger: Ledger = Ledger() if base is None else base.evaluation_ledger
        self.discarded_rollouts: Counter[str] = Counter()
        self.discards = Discards()
        self._failure_policy = failure_policy
        self.failures: Counter[FailureKey] = Counter()
        """Number of failed episodes of training, by cause, reason and outcome."""
        self.rollout_ends = 0
        """Number of rollouts that ended by themselves, with a reward or a failure."""
        self.on_discarded: Callable[[Group, str], list[ev.Command]] = lambda group, reason: []
        """Called when a group with ``agents`` is discarded, to discard those groups too."""
        self.running: dict[int, tuple[Rollout, Group]] = {}
        """Running rollouts with their groups, by rollout id; evaluations and branches included."""
        self.numbers: RolloutNumbers = RolloutNumbers() if base is None else base.numbers
        self.next_group_id = 0

    @property
    def next_rollout_id(self) -> int:
        """Number of the run's next rollout."""
        return self.numbers.next

    @property
    def returned_tasks(self) -> int:
        """Number of tasks of discarded groups that wait to be started again."""
        return len(self._tasks.requeued)

    # ------------------------------------------------------------ start

    def admit(self, event: ev.TaskArrived, key: TaskKey, *, is_retaken: bool) -> list[ev.Command]:
        """Start a task as the newest group."""
        group = Group(
            self.next_group_id, event.task, key, event.digest, event.body, is_retaken=is_retaken
        )
        self.next_group_id += 1
        group.oldest_possible_version = self._versions.live_version
        self._add(group)
        if self._task_records.curricula:
            self._task_records.began(group)
        return self._start(group, self.group_size)

    def admit_agents(self, home: Group, home_adapter: str) -> None:
        """Start a group whose rollouts are sampled by episodes of ``home``, another tracker's
        group."""
        group = Group(self.next_group_id, home.task, home.key, home.digest, home.body)
        group.is_agents, group.home = True, (home_adapter, home)
        home.agents[self.adapter] = group
        self.next_group_id += 1
        group.oldest_possible_version = self._versions.live_version
        self._add(group)
        for index, rollout in enumerate(home.rollouts):
            own = self._new_rollout(group, index)
            own.home = rollout
            rollout.agents = {**rollout.agents, self.adapter: own}
        group.running = len(home.rollouts)

    def finish_agent(self, rollout: Rollout, reward: float) -> list[ev.Command]:
        """Settle an agent's rollout, because the episode that samples it has returned."""
        if rollout.rollout_id not in self.running:
            return []
        rollout.cut(turns=len(rollout.turns))  # no event has reported what was appended since
        return self.finish(ev.EpisodeReturned(rollout.rollout_id, reward))

    def end_agents(self, rollout: Rollout, ended: Rollout, reason: str) -> list[ev.Command]:
        """Reward, discard or restart an agent's rollout, as was done with ``ended``, the rollout
        whose episode samples it and has failed."""
        if rollout.rollout_id not in self.running:
            return []
        rollout.cut(turns=len(rollout.turns))  # no event has reported what was appended since
        if ended.state is RolloutState.RUNNING:
            for row in rollout.rows:
                row.cut(turns=len(row.turns))
            return []
        if ended.state is not DISCARDED and ended.reward is not None:
            return self._reward_failure(rollout, ended.reward)
        group = self.running[rollout.rollout_id][1]
        commands = self.give_up(rollout, group, reason)
        group.running += 1
        return commands + self._rollout_ended(group)

    def evaluate(self, task: object, index: int, version: int | None) -> list[ev.Command]:
        """Start one rollout for measuring only; its group is not in the queue. ``version``: the one
        that must sample its tokens; None: any."""
        group = Group(-1 - index, task, is_evaluation=True)
        commands = self._start(group, 1)
        group.rollouts[0].pinned_version = version
        return commands

    def _start(self, group: Group, rollouts: int) -> list[ev.Command]:
        commands: list[ev.Command] = []
        numbers, adapter, running = self.numbers, self.adapter, self.running
        for index in range(rollouts):
            rollout_id = numbers.next
            numbers.next = rollout_id + 1
            rollout = Rollout(rollout_id, group.group_id, index, adapter)
            if adapter:
                numbers.tracker_of[rollout_id] = self
            running[rollout_id] = (rollout, group)
            group.rollouts.append(rollout)
            commands.append(ev.StartEpisode(rollout, group.task))
        group.running = rollouts
        return commands

    def _new_rollout(self, group: Group, index: int) -> Rollout:
        numbers = self.numbers
        rollout = Rollout(numbers.next, group.group_id, index, self.adapter)
        if self.adapter:
            numbers.tracker_of[numbers.next] = self
        numbers.next += 1
        self.running[rollout.rollout_id] = (rollout, group)
        group.rollouts.append(rollout)
        return rollout

    def _remove_running(self, rollout: Rollout) -> None:
        del self.running[rollout.rollout_id]
        if self.adapter:
            del self.numbers.tracker_of[rollout.rollout_id]

    # ------------------------------------------------------------ turns

    def change_rollout(
        self,
        event: ev.TurnAbandoned
        | ev.RolloutCut
        | ev.RolloutForked
        | ev.TurnsRewarded
        | ev.TurnsScored,
    ) -> list[ev.Command]:
        """Apply an episode's change to a row of its rollout, unless the rollout is settled."""
        if event.rollout_id not in self.running:
            return []
        match event:
            case ev.TurnAbandoned(rollout_id=rollout_id):
                return self.give_up_turn(rollout_id)
            case ev.RolloutCut():
                return self.cut(event)
            case ev.RolloutForked():
                return self._fork(event)
            case ev.TurnsRewarded(rollout_id=rollout_id, rewards=rewards):
                turns = self.running[rollout_id][0].turns
                for number, reward in rewards:
                    turns[number].reward = reward
                return []
            case ev.TurnsScored(rollout_id=rollout_id, attachments=attachments):
                for attachment in attachments:
                    self.running[rollout_id][0].turns[attachment.turn].attach(attachment)
                return []

    def _fork(self, event: ev.RolloutForked) -> list[ev.Command]:
        forked, group = self.running[event.rollout_id]
        branch = self._new_rollout(group, forked.index)
        branch.branch_of, branch.fork_reason = forked, event.reason
        branch.pinned_version = forked.pinned_version
        forked.branches = (*forked.branches, branch)
        return [ev.StartBranch(branch)]

    def begin_turn(self, event: ev.TurnRequested) -> list[ev.Command]:
        """Start a turn that continues a rollout's context."""
        rollout, group = self.running[event.rollout_id]
        turns = rollout.turns
        cancelled: list[ev.Command] = []
        if turns and turns[-1].finish_reason is None:
            # The episode requests another turn after an error, e.g. from another event loop. Two
            # running turns would append their tokens to one context.
            cancelled = self.give_up_turn(event.rollout_id)
        turn = Turn(rollout, event.sampling, event.media)
        turns.append(turn)
        if group.is_evaluation:
            return cancelled + self._turns.submit(turn, EVALUATION_PRIORITY)
        return cancelled + self._turns.submit(turn, group.priority)

    def give_up_turn(self, rollout_id: int) -> list[ev.Command]:
        """Cancel the current turn of a rollout; its tokens so far stay in the context."""
        rollout, _ = self.running[rollout_id]
        commands = self._turns.cancel(rollout)
        if rollout.turns[-1].finish_reason is None:
            rollout.turns[-1].finish_reason = "cancelled"
        return commands

    def discard_refused(self, rollout: Rollout, tokens: int) -> None:
        """Count tokens of a turn that was refused after it had begun; its episode may continue."""
        ledger = self._ledger_of(self.running[rollout.rollout_id][1])
        ledger.discard_running(tokens, "refused")

    def cut(self, event: ev.RolloutCut) -> list[ev.Command]:
        """Discard the turns after the kept ones: the episode diverged there when it ran again."""
        rollout, group = self.running[event.rollout_id]
        commands = self._turns.cancel(rollout)
        before = rollout.sampled_tokens
        rollout.cut(turns=event.turns)
        self._ledger_of(group).discard_running(before - rollout.sampled_tokens, event.reason)
        return commands

    # ------------------------------------------------------------ the end of a rollout

    def finish(self, event: ev.EpisodeReturned) -> list[ev.Command]:
        """Settle a rollout whose episode returned a reward."""
        rollout, group = self.running[event.rollout_id]
        commands: list[ev.Command] = []
        rows = self._end_rows(rollout, group, commands)
        if group.is_evaluation:
            commands.append(ev.EndEvaluation(rollout))
            for row in rows:
                row.reward, row.state = event.reward, RolloutState.EVALUATED
                self.evaluation_ledger.discard_running(row.sampled_tokens, "evaluated")
                commands.append(ev.Record(row, group.task))
            return commands
        for row in rows:
            row.reward, row.state = event.reward, FINISHED
            self.ledger.finish(row.sampled_tokens)
        return commands + self._rollout_ended(group)

    def _end_rows(
        self, rollout: Rollout, group: Group, commands: list[ev.Command]
    ) -> list[Rollout]:
        """Stop a rollout and its branches; return its own row, and branches with tokens."""
        self._remove_running(rollout)
        for turn in rollout.turns:
            if turn.finish_reason is None:
                commands += self._turns.cancel(rollout)
            if turn.deferred_tokens is not None:
                turn.settle()
            del turn.rollout
        if not rollout.branches:
            return [rollout]
        rows = [rollout]
        for branch in [row for row in rollout.rows if row is not rollout]:
            self._remove_running(branch)
            commands += self._turns.cancel(branch)
            # No event has reported the tokens appended after the branch's last turn.
            branch.cut(turns=len(branch.turns))
            for turn in branch.turns:
                del turn.rollout
            if branch.sampled_tokens:
                rows.append(branch)
            else:
                branch.remove_from_tree()
                group.rollouts.remove(branch)
        return rows

    def fail(self, event: ev.EpisodeFailed) -> list[ev.Command]:
        """Retry, reward or discard a rollout whose episode failed, as the failure policy decides.

        Raises:
            PolicyBroken: the failure policy decided something that it must not.
        """
        rollout, group = self.running[event.rollout_id]
        failure = EpisodeFailure(
            event.cause, event.reason, rollout.tokens_of_all_rows, rollout.retries
        )
        if event.can_be_retried:
            delay_s = decide_retry(self._failure_policy, failure)
            if delay_s is not None:
                self._count_failure(event, group, FailureOutcome.RETRIED)
                return [self._retry(rollout, group, delay_s)]
        reward = decide_reward(self._failure_policy, failure)
        if reward is not None:
            self._count_failure(event, group, FailureOutcome.REWARDED)
            return self._reward_failure(rollout, reward)
        self._count_failure(event, group, FailureOutcome.DISCARDED)
        commands = self.give_up(rollout, group, event.reason)
        if group.is_evaluation:
            return [*commands, ev.EndEvaluation(rollout)]
        group.running += 1
        return commands + self._rollout_ended(group)

    def _count_failure(
        self, event: ev.EpisodeFailed, group: Group, outcome: FailureOutcome
    ) -> None:
        if not group.is_evaluation:
            self.failures[FailureKey(event.cause, event.reason, outcome)] += 1
            self._task_records.failed(group, f"{event.cause}/{event.reason}")

    def _retry(self, rollout: Rollout, group: Group, delay_s: float) -> ev.Command:
        """Begin an episode again from the turns that it has, as a resume does. Its running turn
        continues: the episode asks for it again."""
        rollout.retries += 1
        for row in rollout.rows:
            row.cut(turns=len(row.turns))
        return ev.RetryEpisode(rollout, group.task, delay_s)

    def _reward_failure(self, rollout: Rollout, reward: float) -> list[ev.Command]:
        """Settle a rollout that failed because of the model: it is trained on with the failure
        policy's reward."""
        commands: list[ev.Command] = []
        for row in rollout.rows:
            if row.turns and row.turns[-1].finish_reason is None:
                commands += self.give_up_turn(row.rollout_id)
        return commands + self.finish(ev.EpisodeReturned(rollout.rollout_id, reward))

    def _rollout_ended(self, group: Group) -> list[ev.Command]:
        self.rollout_ends += 1
        group.running -= 1
        reason = None
        if not self._keeps_all and not (group.is_agents and group.running):
            reason = self._judge(group)
        if self._task_records.curricula and (reason is not None or not group.running):
            self._record_outcome(group)
        if not group.running:
            kept = self._end(group)
            if kept < self._min_rollouts and kept < self._needed(group):
                reason = "group_too_small"
        return [] if reason is None else self.discard_group(group, reason)

    def _record_outcome(self, group: Group) -> None:
        """Add a group's rewards and lengths to the statistics of its task."""
        rewarded = [r for r in group.kept if r.reward is not None and r.branch_of is None]
        tokens = sum(rollout.tokens_of_all_rows for rollout in rewarded)
        version = self._turns.live_version
        self._task_records.ended(group, group.kept_rewards, tokens, version)

    def _needed(self, group: Group) -> int:
        return 1 if group.is_split_remainder else self._min_rollouts  # its siblings were trained

    def _judge(self, group: Group) -> str | None:
        """Return the filter's reason to reject a group, one rollout of which has ended, or None."""
        own = group.kept_rewards
        rewards = [*group.sibling_rewards, *own]
        reason = self._prompts.filter.reject(rewards, running=group.running)
        if reason is not None and not self._prompts.may_drop(is_ended=not group.running):
            reason = None
        if reason is not None or not group.running:
            self._prompts.record(group.digest, own)
        return reason

    def _end(self, group: Group) -> int:
        """Move a group whose last episode has ended to the buffer; return its kept rollouts."""
        kept, oldest = group.kept_and_oldest()
        self._mark_ended(group, self._versions.live_version if oldest is None else oldest)
        if self._task_records.curricula:
            self._task_records.stopped(group)
        return kept

    # ------------------------------------------------------------ giving up

    def give_up(self, rollout: Rollout, group: Group, reason: str) -> list[ev.Command]:
        """Settle a running rollout as discarded."""
        commands: list[ev.Command] = []
        for row in self._end_rows(rollout, group, commands):
            self._ledger_of(group).discard_running(row.sampled_tokens, reason)
            commands.append(self._discard(row, group, reason))
        group.running -= 1
        return commands

    def discard_group(self, group: Group, reason: str) -> list[ev.Command]:
        """Settle a group, running or buffered, as discarded, and free its admission slot."""
        commands: list[ev.Command] = []
        for rollout in self.running_of(group):
            commands += [*self.give_up(rollout, group, reason), ev.StopEpisode(rollout)]
        if group.agents:
            commands += self.on_discarded(group, reason)
        return commands + self.drop(group, reason)

    def drop(self, group: Group, reason: str) -> list[ev.Command]:
        """Settle a buffered group as discarded, and free its admission slot."""
        if self._task_records.curricula:
            if group.group_id in self._running:
                self._task_records.stopped(group)
            self._task_records.discarded(group, reason)
        self._remove(group)
        commands: list[ev.Command] = []
        for rollout in group.kept:
            self.ledger.discard_finished(rollout.sampled_tokens, reason)
            commands.append(self._discard(rollout, group, reason))
        return commands

    def end_evaluations(self) -> list[ev.Command]:
        """Discard running evaluations, whose caller has gone."""
        evaluations = [
            (r, g) for r, g in self.running.values() if g.is_evaluation and r.branch_of is None
        ]
        return [c for r, g in evaluations for c in self.give_up(r, g, "run_ended")]

    def end(self) -> list[ev.Command]:
        """Settle every rollout that is not trained."""
        commands = self.end_evaluations()
        for group in list(self._outstanding.values()):
            commands += self.discard_group(group, "run_ended")
        return commands

    def running_of(self, group: Group) -> list[Rollout]:
        """Return the group's rollouts whose episode runs, without branches."""
        return [r for r in group.rollouts if r.rollout_id in self.running and r.branch_of is None]

    def _discard(self, rollout: Rollout, group: Group, reason: str) -> ev.Command:
        rollout.state = RolloutState.DISCARDED
        rollout.discard_reason = reason
        if not group.is_evaluation and rollout.branch_of is None:
            self.discarded_rollouts[reason] += 1
            self.discards.count_discarded(rollout, reason, group.key)
        return ev.Record(rollout, group.task)

    def _ledger_of(self, group: Group) -> Ledger:
        return self.evaluation_ledger if group.is_evaluation else self.ledger

    def train(self, groups: list[Group], *, oldest_trainable: int) -> list[Rollout]:
        """Settle groups as trained; mask tokens older than ``oldest_trainable``; return rows."""
        self._remove_batch(groups)
        self._prompts.drops_since_batch = 0
        rows = [row for group in groups for row in group.rollouts if row.state is not DISCARDED]
        lengths = [
            row.tokens_of_all_rows if row.branches else row.sampled_tokens
            for row in rows
            if row.branch_of is None
        ]
        self.ledger.train(sum(lengths))
        self.discards.count_trained(lengths)
        for row in rows:
            row.state = TRAINED
            row.oldest_trainable = oldest_trainable
        if oldest_trainable and (masked := sum(row.masked_tokens for row in rows)):
            self.ledger.discard_trained(masked, TOO_OLD)
        return rows

    def split(self, group: Group) -> Group:
        """Split off and return a group's ended rollouts; the running ones become a new group.

        A remainder may be split again; all parts are compared with the rollouts split off first."""
        self._remove(group)
        done = [rollout for rollout in group.rollouts if rollout.rollout_id not in self.running]
        part = Group(group.group_id, group.task, group.key, group.digest, group.body, done)
        part.oldest_possible_version, part.is_retaken = (
            group.oldest_possible_version,
            group.is_retaken,
        )
        if self.adapter and (oldest := part.oldest_version) is not None:
            # With pause mode ``wait``, turns of an adapter end under an older version than is live.
            part.oldest_possible_version = min(part.oldest_possible_version, oldest)
        part.split_from, part.sibling_rewards = group.split_from, group.sibling_rewards
        part.is_agents = group.is_agents
        self._prompts.record(part.digest, part.kept_rewards)
        if not group.is_split_remainder:
            group.split_from, group.sibling_rewards = group.group_id, part.kept_rewards
        group.group_id = self.next_group_id
        self.next_group_id += 1
        if self._task_records.curricula:
            self._record_outcome(part)
        group.rollouts = [r for r in group.rollouts if r.rollout_id in self.running]
        for rollout in group.rollouts:
            rollout.group_id = group.group_id
        self._add_split(part, remainder=group)
        return part

    def return_to_buffer(self, groups: list[Group]) -> None:
        """Return trained groups to the buffer, because their batch was undone."""
        for rollout in (rollout for group in groups for rollout in group.kept):
            if masked := rollout.masked_tokens:
                self.ledger.discard_trained(-masked, TOO_OLD)
            self.ledger.untrain(rollout.sampled_tokens)
            rollout.state = FINISHED
            rollout.oldest_trainable = 0
        self._restore_ended(groups)
