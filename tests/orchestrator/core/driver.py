"""Test driver of a core: plays the engines, the episodes and the trainer."""

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.core import Core
from tidegate.orchestrator.core.event_log import encode_event, replay
from tidegate.orchestrator.core.group import TaskKey
from tidegate.orchestrator.core.placement import PlacementRules
from tidegate.orchestrator.core.rollout import Rollout
from tidegate.orchestrator.core.rules import Rules
from tidegate.orchestrator.core.snapshot_codec import digest, load, save
from tidegate.policies.asynchrony import BoundedStaleness
from tidegate.policies.failures import FailureCause, FailurePolicy
from tidegate.policies.filters import GroupFilter
from tidegate.policies.staleness import StalenessPolicy
from tidegate.transport.messages import (
    ABORT,
    RUNNING,
    STOP,
    KvSpan,
    Prefill,
    SamplingParams,
    SubmitTurn,
)

PROMPT = [7, 8, 9]


def step(
    engine: str,
    version: int,
    rows: Sequence[tuple[int, list[int], int]],
    prefills: list[Prefill] | None = None,
    adapter: str = "",
) -> ev.StepArrived:
    """Make a step event from (handle, tokens, finish code) rows."""
    tokens = [token for _, row, _ in rows for token in row]
    return ev.StepArrived(
        engine=engine,
        version=version,
        turns=memoryview(array("I", [handle for handle, _, _ in rows])),
        token_ids=memoryview(array("i", tokens)),
        logprobs=memoryview(array("f", [-1.0] * len(tokens))),
        finish=bytes(code for _, _, code in rows),
        counts=memoryview(array("I", [len(row) for _, row, _ in rows])),
        prefills=prefills or [],
        adapter=adapter,
    )


@dataclass
class FakeEngine:
    """Queue of an engine without a model: tokens come when the driver says so."""

    version: int
    turns: dict[int, SubmitTurn] = field(default_factory=dict)
    sampled: dict[int, int] = field(default_factory=dict)
    """Number of tokens sampled for each submission."""


class Driver:
    """A core with fake engines, episodes and trainer."""

    def __init__(
        self,
        *,
        max_staleness: int = 1,
        groups_per_batch: int = 2,
        group_size: int = 2,
        seed: int = 0,
        policy: StalenessPolicy | None = None,
        group_filter: GroupFilter | None = None,
        placement: PlacementRules | None = None,
        failure_policy: FailurePolicy | None = None,
    ) -> None:
        self.policy = policy or BoundedStaleness(
            max_staleness=max_staleness, groups_per_batch=groups_per_batch
        )
        self.rules = Rules(
            policy=self.policy,
            group_size=group_size,
            group_filter=group_filter or GroupFilter(),
            placement=placement or PlacementRules(),
            failure_policy=failure_policy or FailurePolicy(),
        )
        self.stopped: list[Rollout] = []
        self.retried: list[tuple[int, float]] = []
        """(rollout id, delay in seconds) of each episode that was begun again."""
        self.core = self.new_core()
        self.records: list[bytes] = []
        """Every event so far, as journal records."""
        self.chance = random.Random(seed)
        self.engines: dict[str, FakeEngine] = {}
        self.running: dict[int, Rollout] = {}
        self.batches: list[ev.HandOver] = []
        self.refused: list[ev.RefuseBatch] = []
        self.ended = 0
        self.lost: list[ev.LoseBatch] = []
        self.acknowledges = True
        """Whether the trainer takes each batch as soon as one is offered."""
        self.recorded: list[Rollout] = []
        self.requeued: list[TaskKey] = []
        self.next_task = 0
        self.published = 0
        self.batches_published = 0
        """Highest number of a batch that a publish followed, even if all of its rows were
        discarded."""
        self.do(ev.TasksOffered())

    def new_core(self) -> Core:
        """Make a core with this driver's rules."""
        return Core(self.rules, survives_crashes=True)

    # ------------------------------------------------------------ one event

    def do(self, event: ev.Event) -> list[ev.Command]:
        """Feed an event, carry out the core's commands, and check its invariants."""
        self.records.append(encode_event(event, self.core))
        commands = self.core.handle(event)
        for command in commands:
            self._act(command)
        self.core.check()
        if self.acknowledges:
            for command in commands:
                if isinstance(command, ev.HandOver):
                    self.take(command)
        return commands

    def take(self, batch: ev.HandOver) -> None:
        """Have the trainer take the batch that it was offered."""
        taken = ev.BatchTaken(batch.request)
        self.do(ev.ForAdapter(batch.adapter, taken) if batch.adapter else taken)

    def _act(self, command: ev.Command) -> None:
        match command:
            case ev.Submit(engine=engine, message=message):
                self.engines[engine].turns[message.turn] = message
                self.engines[engine].sampled[message.turn] = 0
            case ev.Cancel(engine=engine, handle=handle):
                if engine in self.engines:
                    self.engines[engine].turns.pop(handle, None)
            case ev.StartEpisode(rollout=rollout):
                self.running[rollout.rollout_id] = rollout
            case ev.RetryEpisode(rollout=rollout, delay_s=delay_s):
                self.retried.append((rollout.rollout_id, delay_s))
            case ev.StopEpisode(rollout=rollout):
                self.stopped.append(rollout)
            case ev.HandOver():
                self.batches.append(command)
            case ev.LoseBatch():
                self.lost.append(command)
            case ev.EndBatches():
                self.ended += 1
            case ev.RequeueTask(key=key):
                self.requeued.append(key)
            case ev.RefuseBatch():
                self.refused.append(command)
            case ev.Record(rollout=rollout):
                self.recorded.append(rollout)
                self.running.pop(rollout.rollout_id, None)

    # ------------------------------------------------------------ whole actions

    def join(self, engine: str, version: int | None = None) -> None:
        """Add an engine, with the newest weights by default."""
        version = self.published if version is None else version
        self.engines[engine] = FakeEngine(version)
        self.do(ev.EngineJoined(engine, version, 4))

    def leave(self, engine: str) -> None:
        """Remove an engine with all its turns."""
        del self.engines[engine]
        self.do(ev.EngineLeft(engine))

    def fill(self) -> int:
        """Give tasks while there is capacity; return how many were admitted."""
        admitted = 0
        while self.core.admissible_groups:
            if self.requeued:
                key = self.requeued.pop(0)
                self.do(ev.TaskArrived(key.index, key))
            else:
                self.do(ev.TaskArrived(self.core.tasks.count))
            admitted += 1
        return admitted

    def ask_turn(self, rollout: Rollout, max_tokens: int = 8) -> None:
        """Ask for a turn of a rollout."""
        rollout.extend(PROMPT)
        self.do(ev.TurnRequested(rollout.rollout_id, SamplingParams(max_tokens=max_tokens)))

    def begin_turn(self) -> tuple[Rollout, int]:
        """Have engine "a" join and take a turn of the only rollout; return it and the handle."""
        self.join("a")
        self.fill()
        [rollout] = self.running.values()
        self.ask_turn(rollout)
        [handle] = self.engines["a"].turns
        return rollout, handle

    def sample(self, engine: str, handle: int, tokens: int, finish: int = RUNNING) -> None:
        """Sample tokens for one turn, after a prefill if they are its first."""
        state = self.engines[engine]
        prefills = []
        if state.sampled[handle] == 0:
            context = len(state.turns[handle].token_ids) // 4
            prefills = [Prefill(handle, 0, [KvSpan(state.version, 0, context)])]
        state.sampled[handle] += tokens
        if finish != RUNNING:
            del state.turns[handle]
        row = (handle, [self.chance.randrange(100) for _ in range(tokens)], finish)
        self.do(step(engine, state.version, [row], prefills))

    def where(self, rollout: Rollout) -> tuple[str, int] | None:
        """Return engine and handle of the rollout's turn."""
        for name, engine in self.core.turns.engines.items():
            for handle, turn in engine.submissions.items():
                if turn.rollout is rollout:
                    return name, handle
        return None

    def return_reward(self, rollout: Rollout, reward: float = 1.0) -> None:
        """End a rollout's episode with a reward."""
        self.running.pop(rollout.rollout_id)
        self.do(ev.EpisodeReturned(rollout.rollout_id, reward))

    def fail(self, rollout: Rollout) -> None:
        """End a rollout's episode with an exception."""
        self.running.pop(rollout.rollout_id, None)
        self.do(ev.EpisodeFailed(rollout.rollout_id, "episode_error"))

    def fail_by(
        self, rollout: Rollout, cause: FailureCause, reason: str = "episode_error"
    ) -> list[ev.Command]:
        """End a rollout's episode with a failure of this cause."""
        return self.do(ev.EpisodeFailed(rollout.rollout_id, reason, cause))

    @property
    def held(self) -> list[int]:
        """Numbers of the batches that the trainer holds."""
        return [batch.number for batch in self.core.handed.held]

    def publish(self, batches: Sequence[int] | None = None) -> None:
        """Publish a version made from these batches, by default from all that the trainer holds;
        engines keep their weights until they swap."""
        self.name(self.held if batches is None else batches)
        if batches is None and self.batches:
            self.batches_published = max(self.batches_published, self.batches[-1].number)
        self.published += 1
        self.do(ev.VersionPublished(self.published))

    def swap(self, engine: str, *, abort: bool = False) -> None:
        """Swap an engine to the newest weights, ending its running turns first if asked."""
        state = self.engines[engine]
        if abort:
            for handle in [h for h in state.turns if state.sampled[h]]:
                self.sample(engine, handle, 0, ABORT)
        state.version = self.published
        self.do(ev.EngineSwapped(engine, self.published))

    def name(self, batches: Sequence[int]) -> None:
        """Say that the next version is made from these batches."""
        self.core.handed.refuse_untrainable(batches)
        if batches:
            self.batches_published = max(self.batches_published, *batches)
            self.do(ev.BatchesTrained(tuple(batches)))

    def publish_and_swap(self, batches: Sequence[int] | None = None) -> None:
        """Publish a version as :meth:`publish`, and swap all engines."""
        self.publish(batches)
        for engine in list(self.engines):
            self.swap(engine)

    # ------------------------------------------------------------ crashes

    def die_and_resume(self, batches: int, *, snapshot: bool) -> None:
        """Resume in a new core from the journal, and a checkpoint with so many batches."""
        before = digest(self.core)
        core = self.new_core()
        if snapshot:
            load(save(self.core), core)
        else:
            for record in self.records:
                replay(record, core)
        assert digest(core, is_replayed=True) == before
        self.core = core
        self.running.clear()
        self.requeued.clear()
        del self.batches[batches:]
        self.do(ev.RunResumed(batches, self.core.tasks.offer))
        self.published = self.core.trainer_version
        self.batches_published = min(self.batches_published, batches)
        for name in sorted(self.engines):
            self.come_back(name)
        self.offer_again()

    def offer_again(self) -> None:
        """Give the tasks again, in a resumed run."""
        self.do(ev.TasksOffered())
        for index in range(self.core.tasks.count):
            self.do(ev.TaskFoundAgain(index, TaskKey(self.core.tasks.offer, index)))

    def come_back(self, name: str) -> None:
        """Reconnect an engine by a hello."""
        engine = self.engines[name]
        self.do(ev.EngineJoined(name, engine.version, 4, held=tuple(engine.turns)))

    def solve(self, rollout: Rollout, tokens: int = 3) -> None:
        """Run a rollout of one turn, with a reward."""
        self.ask_turn(rollout)
        for name, engine in self.engines.items():
            for handle in list(engine.turns):
                self.sample(name, handle, tokens, STOP)
        self.return_reward(rollout)
