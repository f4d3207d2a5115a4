"""Which groups are there, and what becomes of their rollouts? Starts, ends, drops and counts them.

It moves tokens between the ledger's accounts; when a group may start or is trained, others say.
"""

from collections import Counter

from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.discards import Discards
from tidegate.orchestrator.core.group import Group, TaskKey
from tidegate.orchestrator.core.ledger import Ledger
from tidegate.orchestrator.core.prompts import Prompts
from tidegate.orchestrator.core.rollout import (
    Rollout,
    RolloutState,
    Turn,
)
from tidegate.orchestrator.core.taken_tasks import TakenTasks
from tidegate.orchestrator.core.turns import TurnBook
from tidegate.orchestrator.core.waiting_groups import WaitingGroups
from tidegate.policies.filters import GroupFilter

KEPT_ROLLOUTS_MIN = 2
"""A group needs two rewards to compare; with fewer left it is dropped (unless group_size is 1)."""

TOO_OLD = "too_old"
"""The account of tokens that a policy masks."""

EVALUATION_PRIORITY = -1
"""Evaluation waits for no training rollout: it is short, and somebody waits for its figure."""


class GroupBook(WaitingGroups):
    """All groups that are running or buffered, and the ledger of their tokens."""

    def __init__(
        self, turns: TurnBook, prompts: Prompts, tasks: TakenTasks, *, group_size: int
    ) -> None:
        super().__init__()
        self._turns = turns
        self._tasks = tasks
        self._prompts = prompts
        self._keeps_all = type(prompts.filter) is GroupFilter
        """Then no group is given up before its last rollout has ended."""
        self.group_size = group_size
        self._needed_mostly = 1 if group_size < KEPT_ROLLOUTS_MIN else KEPT_ROLLOUTS_MIN
        """Rollouts without which a group can't be trained; a rest needs fewer."""
        self.ledger = Ledger()
        self.evaluation_ledger = Ledger()
        self.discarded_rollouts: Counter[str] = Counter()
        self.discards = Discards()
        self.rollout_ends = 0
        """Counts rollouts that came to an end of their own."""
        self.running: dict[int, tuple[Rollout, Group]] = {}
        """Rollouts whose episode is going on, by id; an evaluation's too."""
        self.next_rollout_id = 0
        self.next_group_id = 0
        turns.unwanted = self._discard_refused

    @property
    def returned_tasks(self) -> int:
        """Tasks of groups that were given up, to be taken again."""
        return len(self._tasks.requeued)

    # ------------------------------------------------------------ start

    def admit(self, event: ev.TaskArrived, key: TaskKey, *, is_retaken: bool) -> list[ev.Command]:
        """Begin a task as the newest group."""
        group = Group(
            self.next_group_id, event.task, key, event.digest, event.body, is_retaken=is_retaken
        )
        self.next_group_id += 1
        group.version_floor = self._turns.live_version
        self._add(group)
        return self._start(group, self.group_size)

    def evaluate(self, task: object, index: int) -> list[ev.Command]:
        """One rollout for measuring only; its group is in no queue."""
        return self._start(Group(-1 - index, task, is_evaluation=True), 1)

    def _start(self, group: Group, rollouts: int) -> list[ev.Command]:
        commands: list[ev.Command] = []
        for index in range(rollouts):
            rollout = Rollout(self.next_rollout_id, group.group_id, index)
            self.next_rollout_id += 1
            self.running[rollout.rollout_id] = (rollout, group)
            group.rollouts.append(rollout)
            commands.append(ev.StartEpisode(rollout, group.task))
        group.running = rollouts
        return commands

    # ------------------------------------------------------------ turns

    def change_rollout(
        self, event: ev.TurnGivenUp | ev.RolloutCut | ev.RolloutForked | ev.TurnsRewarded
    ) -> list[ev.Command]:
        """What an episode does to a row of its rollout; nothing, once that is settled."""
        if event.rollout_id not in self.running:
            return []
        match event:
            case ev.TurnGivenUp(rollout_id=rollout_id):
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

    def _fork(self, event: ev.RolloutForked) -> list[ev.Command]:
        """A row of its own, with nothing in it yet."""
        forked, group = self.running[event.rollout_id]
        branch = Rollout(self.next_rollout_id, group.group_id, forked.index)
        self.next_rollout_id += 1
        branch.branch_of, branch.fork_reason = forked, event.reason
        forked.branches = (*forked.branches, branch)
        self.running[branch.rollout_id] = (branch, group)
        group.rollouts.append(branch)
        return [ev.StartBranch(branch)]

    def ask_turn(self, event: ev.TurnAsked) -> list[ev.Command]:
        """A rollout's episode wants the model to go on."""
        rollout, group = self.running[event.rollout_id]
        turns = rollout.turns
        given_up: list[ev.Command] = []
        if turns and turns[-1].finish_reason is None:
            # Asked from another loop, it was told of an error and asks again: two that go on would
            # file their tokens in one place.
            given_up = self.give_up_turn(event.rollout_id)
        turn = Turn(rollout, event.sampling, event.media)
        turns.append(turn)
        if group.is_evaluation:
            return given_up + self._turns.submit(turn, EVALUATION_PRIORITY)
        return given_up + self._turns.submit(turn, group.priority)

    def give_up_turn(self, rollout_id: int) -> list[ev.Command]:
        """A rollout's episode wants its turn no more; what was sampled so far stays."""
        rollout, _ = self.running[rollout_id]
        commands = self._turns.cancel(rollout)
        if rollout.turns[-1].finish_reason is None:
            rollout.turns[-1].finish_reason = "cancelled"
        return commands

    def _discard_refused(self, rollout: Rollout, tokens: int) -> None:
        """A turn was refused in its midst, and its episode may go on."""
        ledger = self._ledger_of(self.running[rollout.rollout_id][1])
        ledger.discard_running(tokens, "refused")

    def cut(self, event: ev.RolloutCut) -> list[ev.Command]:
        """Discard what follows an episode's kept turns: run again, it went another way there."""
        rollout, group = self.running[event.rollout_id]
        commands = self._turns.cancel(rollout)
        before = rollout.sampled_tokens
        rollout.cut(turns=event.turns)
        self._ledger_of(group).discard_running(before - rollout.sampled_tokens, event.reason)
        return commands

    # ------------------------------------------------------------ the end of a rollout

    def finish(self, event: ev.EpisodeReturned) -> list[ev.Command]:
        """An episode returned a reward."""
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
            row.reward, row.state = event.reward, RolloutState.FINISHED
            self.ledger.finish(row.sampled_tokens)
        return commands + self._rollout_ended(group)

    def _end_rows(
        self, rollout: Rollout, group: Group, commands: list[ev.Command]
    ) -> list[Rollout]:
        """A rollout goes on no more, nor do its branches: those that count for something."""
        del self.running[rollout.rollout_id]
        for turn in rollout.turns:
            if turn.finish_reason is None:
                commands += self._turns.cancel(rollout)
            turn.settle()
            del turn.rollout
        if not rollout.branches:
            return [rollout]
        rows = [rollout]
        for branch in [row for row in rollout.rows if row is not rollout]:
            del self.running[branch.rollout_id]
            commands += self._turns.cancel(branch)
            # What was appended after its last turn nobody has sampled from, and no event tells of.
            branch.cut(turns=len(branch.turns))
            for turn in branch.turns:
                del turn.rollout
            if branch.sampled_tokens:
                rows.append(branch)
            else:
                branch.leave_out()
                group.rollouts.remove(branch)
        return rows

    def fail(self, event: ev.EpisodeFailed) -> list[ev.Command]:
        """An episode raised, timed out or was cancelled."""
        rollout, group = self.running[event.rollout_id]
        commands = self.give_up(rollout, group, event.reason)
        if group.is_evaluation:
            return [*commands, ev.EndEvaluation(rollout)]
        group.running += 1
        return commands + self._rollout_ended(group)

    def _rollout_ended(self, group: Group) -> list[ev.Command]:
        self.rollout_ends += 1
        group.running -= 1
        reason = None if self._keeps_all else self._judge(group)
        if not group.running:
            kept = self._end(group)
            if kept < self._needed_mostly and kept < self._needed(group):
                reason = "group_too_small"
        return [] if reason is None else self.give_up_group(group, reason)

    def _needed(self, group: Group) -> int:
        """Rollouts without which a group can't be trained."""
        return 1 if group.is_rest else self._needed_mostly  # others of a rest's group were

    def _judge(self, group: Group) -> str | None:
        """Why the filter rejects a group, one of whose rollouts has just ended."""
        own = group.kept_rewards
        rewards = [*group.sibling_rewards, *own]
        reason = self._prompts.filter.reject(rewards, running=group.running)
        if reason is not None or not group.running:
            self._prompts.note(group.digest, own)
        return reason

    def _end(self, group: Group) -> int:
        """Its last episode has ended; how many rollouts were kept."""
        kept, oldest = group.kept_and_oldest()
        self._note_end(group, self._turns.live_version if oldest is None else oldest)
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

    def give_up_group(self, group: Group, reason: str) -> list[ev.Command]:
        """Settle a group, running or buffered, as discarded; its place is free for another."""
        commands: list[ev.Command] = []
        for rollout in self.running_of(group):
            commands += [*self.give_up(rollout, group, reason), ev.StopEpisode(rollout)]
        return commands + self.drop(group, reason)

    def drop(self, group: Group, reason: str) -> list[ev.Command]:
        """Settle a buffered group as discarded; its place is free for another."""
        self._forget(group)
        commands: list[ev.Command] = []
        for rollout in group.kept:
            self.ledger.discard_finished(rollout.sampled_tokens, reason)
            commands.append(self._discard(rollout, group, reason))
        return commands

    def end_evaluations(self) -> list[ev.Command]:
        """Who asked for them is gone."""
        going_on = [
            (r, g) for r, g in self.running.values() if g.is_evaluation and r.branch_of is None
        ]
        return [c for r, g in going_on for c in self.give_up(r, g, "run_ended")]

    def end(self) -> list[ev.Command]:
        """Settle every rollout that is not trained."""
        commands = self.end_evaluations()
        for group in list(self._waiting.values()):
            commands += self.give_up_group(group, "run_ended")
        return commands

    def running_of(self, group: Group) -> list[Rollout]:
        """The group's rollouts whose episode is going on, without branches."""
        return [r for r in group.rollouts if r.rollout_id in self.running and r.branch_of is None]

    def _discard(self, rollout: Rollout, group: Group, reason: str) -> ev.Command:
        rollout.state = RolloutState.DISCARDED
        rollout.discard_reason = reason
        if not group.is_evaluation and rollout.branch_of is None:
            self.discarded_rollouts[reason] += 1
            self.discards.note_discarded(rollout, reason, group.key)
        return ev.Record(rollout, group.task)

    def _ledger_of(self, group: Group) -> Ledger:
        return self.evaluation_ledger if group.is_evaluation else self.ledger

    def train(self, groups: list[Group], *, oldest_trainable: int) -> list[Rollout]:
        """These are handed to the trainer; of their tokens, older ones are masked. Their rows."""
        self._forget_batch(groups)
        rows = [
            row
            for group in groups
            for row in group.rollouts
            if row.state is not RolloutState.DISCARDED
        ]
        lengths = [
            row.tokens_of_all_rows if row.branches else row.sampled_tokens
            for row in rows
            if row.branch_of is None
        ]
        self.ledger.train(sum(lengths))
        self.discards.note_trained(lengths)
        for row in rows:
            row.state = RolloutState.TRAINED
            row.oldest_trainable = oldest_trainable
        if oldest_trainable and (masked := sum(row.masked_tokens for row in rows)):
            self.ledger.leave_out(masked, TOO_OLD)
        return rows

    def split(self, group: Group) -> Group:
        """Part a group from its rollouts that go on: these become a rest, with an id of its own."""
        self._forget(group)
        done = [rollout for rollout in group.rollouts if rollout.rollout_id not in self.running]
        part = Group(group.group_id, group.task, group.key, group.digest, group.body, done)
        part.version_floor, part.is_retaken = group.version_floor, group.is_retaken
        group.split_from, group.group_id = group.group_id, self.next_group_id
        self.next_group_id += 1
        group.sibling_rewards = part.kept_rewards
        self._prompts.note(part.digest, group.sibling_rewards)
        group.rollouts = [r for r in group.rollouts if r.rollout_id in self.running]
        for rollout in group.rollouts:
            rollout.group_id = group.group_id
        self._add_split(part, rest=group)
        return part

    def take_back(self, groups: list[Group]) -> None:
        """What the trainer made of these was lost with it; they wait again."""
        for rollout in (rollout for group in groups for rollout in group.kept):
            if masked := rollout.masked_tokens:
                self.ledger.leave_out(-masked, TOO_OLD)
            self.ledger.take_back(rollout.sampled_tokens)
            rollout.state = RolloutState.FINISHED
            rollout.oldest_trainable = 0
        self._put_back(groups)
