"""Which groups are there, and what becomes of their rollouts? Starts, ends, drops and counts them.

It moves tokens between the ledger's accounts and knows when a group has too few rollouts left; not
when a group may start, or when it is trained.
"""

from collections import Counter, deque

from tidegate.orchestrator import events as ev
from tidegate.orchestrator.ledger import Ledger
from tidegate.orchestrator.rollout import Group, Rollout, RolloutState, TaskKey, Turn
from tidegate.orchestrator.turns import TurnBook

KEPT_ROLLOUTS_MIN = 2
"""A group needs two rewards to compare; with fewer left it is dropped (unless group_size is 1)."""

EVALUATION_PRIORITY = -1
"""Evaluation waits for no training rollout: it is short, and somebody waits for its figure."""


class GroupBook:
    """All groups that are running or buffered, and the ledger of their tokens."""

    def __init__(self, turns: TurnBook, *, group_size: int) -> None:
        self._turns = turns
        self.group_size = group_size
        self.ledger = Ledger()
        self.evaluation_ledger = Ledger()
        self.discarded_rollouts: Counter[str] = Counter()
        self.queue: deque[Group] = deque()
        """Running and buffered ones, in the order of admission: the order of consumption."""
        self._ended_head = 0
        """Of the queue, so many groups at its head are known to have ended."""
        self.running: dict[int, tuple[Rollout, Group]] = {}
        """Rollouts whose episode is going on, by id; an evaluation's too."""
        self.next_rollout_id = 0
        self.next_group_id = 0

    # ------------------------------------------------------------ start

    def admit(self, task: object, key: TaskKey, digest: bytes) -> list[ev.Command]:
        """A task begins, as the newest group."""
        group = Group(self.next_group_id, task, key, digest)
        self.next_group_id += 1
        self.queue.append(group)
        return self._start(group, self.group_size)

    def evaluate(self, task: object, index: int) -> list[ev.Command]:
        """One rollout for measuring only; its group is in no queue."""
        return self._start(Group(-1 - index, task), 1)

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

    def ask_turn(self, event: ev.TurnAsked) -> list[ev.Command]:
        """A rollout's episode wants the model to go on."""
        rollout, group = self.running[event.rollout_id]
        turn = Turn(rollout, event.sampling)
        rollout.turns.append(turn)
        priority = EVALUATION_PRIORITY if group.is_evaluation else group.group_id
        return self._turns.submit(turn, priority)

    def give_up_turn(self, rollout_id: int) -> list[ev.Command]:
        """A rollout's episode wants its turn no more; what was sampled so far stays."""
        if rollout_id not in self.running:
            return []
        rollout, _ = self.running[rollout_id]
        commands = self._turns.cancel(rollout)
        if rollout.turns[-1].finish_reason is None:
            rollout.turns[-1].finish_reason = "cancelled"
        return commands

    def cut(self, event: ev.RolloutCut) -> list[ev.Command]:
        """An episode that is run again goes another way than before, from here on."""
        rollout, group = self.running[event.rollout_id]
        commands = self._turns.cancel(rollout)
        before = rollout.sampled_tokens
        rollout.cut(turns=event.turns, tokens=event.tokens)
        self._ledger_of(group).discard_running(before - rollout.sampled_tokens, event.reason)
        return commands

    # ------------------------------------------------------------ the end of a rollout

    def finish(self, event: ev.EpisodeReturned) -> list[ev.Command]:
        """An episode returned a reward."""
        rollout, group = self.running.pop(event.rollout_id)
        commands = self._turns.cancel(rollout)
        rollout.reward = event.reward
        if group.is_evaluation:
            rollout.state = RolloutState.EVALUATED
            self.evaluation_ledger.discard_running(rollout.sampled_tokens, "evaluated")
            return [*commands, ev.EndEvaluation(rollout), ev.Record(rollout, group.task)]
        rollout.state = RolloutState.FINISHED
        self.ledger.finish(rollout.sampled_tokens)
        return commands + self._rollout_ended(group)

    def fail(self, event: ev.EpisodeFailed) -> list[ev.Command]:
        """An episode raised, timed out or was cancelled."""
        rollout, group = self.running[event.rollout_id]
        commands = self.give_up(rollout, group, event.reason)
        if group.is_evaluation:
            return [*commands, ev.EndEvaluation(rollout)]
        group.running += 1
        return commands + self._rollout_ended(group)

    def _rollout_ended(self, group: Group) -> list[ev.Command]:
        group.running -= 1
        if group.running or len(group.kept) >= min(KEPT_ROLLOUTS_MIN, self.group_size):
            return []
        return self.drop(group, "group_too_small")

    # ------------------------------------------------------------ giving up

    def give_up(self, rollout: Rollout, group: Group, reason: str) -> list[ev.Command]:
        """Settle a running rollout as discarded."""
        del self.running[rollout.rollout_id]
        commands = self._turns.cancel(rollout)
        self._ledger_of(group).discard_running(rollout.sampled_tokens, reason)
        group.running -= 1
        return [*commands, self._discard(rollout, group, reason)]

    def give_up_group(self, group: Group, reason: str) -> list[ev.Command]:
        """Settle a group, running or buffered, as discarded; its place is free for another."""
        commands = [c for r in self.running_of(group) for c in self.give_up(r, group, reason)]
        return commands + self.drop(group, reason)

    def drop(self, group: Group, reason: str) -> list[ev.Command]:
        """Settle a buffered group as discarded; its place is free for another."""
        self.queue.remove(group)
        self._ended_head = 0
        commands: list[ev.Command] = []
        for rollout in group.kept:
            self.ledger.discard_finished(rollout.sampled_tokens, reason)
            commands.append(self._discard(rollout, group, reason))
        return commands

    def end_evaluations(self) -> list[ev.Command]:
        """Who asked for them is gone."""
        going_on = [(r, g) for r, g in self.running.values() if g.is_evaluation]
        return [c for r, g in going_on for c in self.give_up(r, g, "run_ended")]

    def end(self) -> list[ev.Command]:
        """Settle every rollout that is not trained."""
        commands = self.end_evaluations()
        for group in list(self.queue):
            commands += self.give_up_group(group, "run_ended")
        return commands

    def running_of(self, group: Group) -> list[Rollout]:
        """The group's rollouts whose episode is going on."""
        return [rollout for rollout in group.rollouts if rollout.rollout_id in self.running]

    def _discard(self, rollout: Rollout, group: Group, reason: str) -> ev.Command:
        rollout.state = RolloutState.DISCARDED
        rollout.discard_reason = reason
        if not group.is_evaluation:
            self.discarded_rollouts[reason] += 1
        return ev.Record(rollout, group.task)

    def _ledger_of(self, group: Group) -> Ledger:
        return self.evaluation_ledger if group.is_evaluation else self.ledger

    # ------------------------------------------------------------ training

    def has_ended_head(self, groups: int) -> bool:
        """Whether so many groups at the head of the queue have all ended.

        It goes on from where it stood still last time: asked after each end of an episode, it
        looks at each group about once.
        """
        queue, at = self.queue, self._ended_head
        while at < min(groups, len(queue)) and not queue[at].running:
            at += 1
        self._ended_head = at
        return groups <= at

    def train(self, groups: list[Group]) -> None:
        """The oldest groups are handed to the trainer."""
        self._ended_head = max(0, self._ended_head - len(groups))
        for group in groups:
            first = self.queue.popleft()
            assert first is group, "groups are handed over in the order of admission"
            for rollout in group.kept:
                rollout.state = RolloutState.TRAINED
                self.ledger.train(rollout.sampled_tokens)

    def take_back(self, groups: list[Group]) -> None:
        """What the trainer made of these was lost with it; they are the oldest again."""
        self.queue.extendleft(reversed(groups))
        self._ended_head = 0
        for rollout in (rollout for group in groups for rollout in group.kept):
            rollout.state = RolloutState.FINISHED
            self.ledger.take_back(rollout.sampled_tokens)
