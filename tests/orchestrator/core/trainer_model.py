"""Independent model of trainers, run against the core in worlds that are drawn from a seed.

A trainer here does what DESIGN.md §6 lets it do: it requests batches ahead, trains them, publishes
and says what it trained, fails, rolls back and resumes. The model keeps its own record: which
version sampled each token, which version the trainer had when it trained a batch, what it holds and
what it has named. Nothing is read from the core's own record of batches except to compare it.

Run many worlds, or one again::

    python -m tests.orchestrator.core.trainer_model --worlds 10000
    python -m tests.orchestrator.core.trainer_model --seed 17
"""

import argparse
import random
import sys
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from tests.orchestrator.core.driver import PROMPT, step
from tidegate.errors import BatchNotHeld, PublishUnclear
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.core import Core
from tidegate.orchestrator.core.event_log import encode_event, replay
from tidegate.orchestrator.core.group import TaskKey
from tidegate.orchestrator.core.rollout import Rollout
from tidegate.orchestrator.core.rules import Rules, record_of
from tidegate.orchestrator.core.snapshot_codec import digest, load, save
from tidegate.policies.asynchrony import BoundedStaleness, OneStepOffPolicy, Unbounded
from tidegate.policies.consumption import Window
from tidegate.policies.rounds import OverSampling, Synchronous, TailPacking
from tidegate.policies.staleness import StalenessPolicy
from tidegate.transport.messages import ABORT, RUNNING, STOP, KvSpan, Prefill, SamplingParams

ADAPTER = "solver"
STALLED_TICKS = 400
"""Ticks without an event after which a world has come to a halt."""


# ---------------------------------------------------------------- what is drawn


def draw_policy(chance: random.Random) -> StalenessPolicy:
    """Draw any policy, with η from 0 to 8 and 1 to 4 batches per version."""
    per_batch = chance.choice((1, 1, 2, 3))
    kind = chance.choices(
        ("bounded", "one_step", "synchronous", "tail", "over", "unbounded"),
        (70, 8, 7, 5, 5, 5),
    )[0]
    if kind == "one_step":
        return OneStepOffPolicy(groups_per_batch=per_batch)
    if kind == "synchronous":
        return Synchronous(groups_per_batch=per_batch)
    if kind == "tail":
        return TailPacking(groups_per_batch=per_batch, factor=chance.choice((1.0, 1.5, 2.0)))
    if kind == "over":
        return OverSampling(groups_per_batch=per_batch, factor=chance.choice((1.0, 1.5, 2.0)))
    if kind == "unbounded":
        limit = per_batch * chance.choice((1, 2, 4))
        return Unbounded(groups_per_batch=per_batch, outstanding_groups_limit=limit)
    order: Any = chance.choice(
        ("admission", "completion", "completion", Window(chance.randint(1, 6)))
    )
    deadline: Any = "wait"
    if order == "completion":
        deadline = chance.choice(("wait", "mask", "split", "drop"))
    elif order != "admission":
        deadline = chance.choice(("wait", "mask", "drop"))
    common: dict[str, Any] = {
        "groups_per_batch": per_batch,
        "consumption_order": order,
        "deadline_policy": deadline,
        "batches_per_version": chance.choice((1, 1, 2, 3, 4)),
        "just_in_time_after_versions": chance.choice((None, 1, 1, 2, 8)),
    }
    eta = chance.choice((0, 0, 1, 1, 1, 2, 2, 3, 3, 4, 5, 6, 7, 8))
    return BoundedStaleness(max_staleness=eta, **common)


def draw_uses(policy: StalenessPolicy, chance: random.Random) -> StalenessPolicy:
    """Let a third of the policies that can train on a group more than once."""
    uses = chance.choice((1, 1, 1, 1, 2, 3))
    if not isinstance(policy, BoundedStaleness) or policy.deadline_policy != "wait":
        return policy
    return replace(policy, max_uses=min(uses, policy.max_staleness + 1))


def batches_held_max(policy: StalenessPolicy) -> int:
    """Number of batches that a trainer may hold before a request for another one is refused."""
    if isinstance(policy, Synchronous | TailPacking | OverSampling):
        return 1
    if isinstance(policy, OneStepOffPolicy):
        return 2
    if isinstance(policy, BoundedStaleness):
        return policy.outstanding_groups_max // policy.groups_per_batch
    assert policy.outstanding_groups_limit is not None
    return policy.outstanding_groups_limit // policy.groups_per_batch


@dataclass
class Habits:
    """How a trainer behaves. Each ``p_`` is the chance at each occasion."""

    is_true: bool
    """Whether the trainer does as it says: it trains in order, names what it trained, holds no more
    batches than allowed, and its publishes succeed."""
    depth: int
    """Number of batches that it keeps requested or queued beside those that it trains."""
    accumulated: int
    """Number of batches that it trains on before a publish."""
    train_ticks: int
    stage_ticks: int
    """Ticks from a publish's begin to the release of its version."""
    swap_ticks: int
    """Most ticks from the release of a version to an engine's swap."""
    is_silent: bool = False
    """Whether it leaves out what a version was made from, where the contract lets it."""
    is_blocked_by_publish: bool = True
    """Whether it neither trains nor requests until its publish has returned."""
    p_ack_late: float = 0.0
    p_cancel: float = 0.0
    p_give_back: float = 0.0
    p_out_of_order: float = 0.0
    p_skip: float = 0.0
    p_discard: float = 0.0
    p_fail: float = 0.0
    p_repeat: float = 0.0
    p_beside: float = 0.0
    p_rollback: float = 0.0
    p_early: float = 0.0
    p_name_lost: float = 0.0
    p_retrain: float = 0.0
    p_burst: float = 0.0
    p_crash: float = 0.0


def draw_habits(chance: random.Random, policy: StalenessPolicy) -> Habits:
    """Draw a trainer. Half of them do as they say."""
    k, most = policy.batches_per_version, batches_held_max(policy)
    ticks: dict[str, Any] = {
        "train_ticks": chance.choice((0, 1, 1, 3)),
        "stage_ticks": chance.choice((0, 0, 1, 3)),
        "swap_ticks": chance.choice((0, 0, 2, 8)),
        "is_blocked_by_publish": chance.random() < 0.6,
        "p_ack_late": chance.choice((0, 0, 0.3)),
    }
    if chance.random() < 0.5:
        is_silent = chance.random() < 0.3
        accumulated = k
        if not is_silent and chance.random() < 0.3:
            accumulated = min(most, chance.randint(k, k + 3))
        return Habits(
            is_true=True,
            depth=0 if is_silent else chance.randint(0, 8),
            accumulated=accumulated,
            is_silent=is_silent,
            p_cancel=chance.choice((0, 0, 0.1)),
            p_burst=chance.choice((0, 0, 0.3)),
            **ticks,
        )

    def rarely(*values: float) -> float:
        return chance.choice((0, 0, *values))

    return Habits(
        is_true=False,
        depth=chance.choice((0, 0, 1, 1, 2, 3, 5, 8)),
        accumulated=chance.choice((1, k, k, 2, 3, 4)),
        is_silent=chance.random() < 0.4,
        p_cancel=rarely(0.1, 0.3),
        p_give_back=rarely(0.1, 0.3),
        p_out_of_order=rarely(0.1, 0.5),
        p_skip=rarely(0.05, 0.2),
        p_discard=rarely(0.05, 0.2),
        p_fail=rarely(0.1, 0.4),
        p_repeat=rarely(0.1, 0.3),
        p_beside=rarely(0.02, 0.1),
        p_rollback=rarely(0.05, 0.2),
        p_early=rarely(0.1),
        p_name_lost=rarely(0.5),
        p_retrain=rarely(0.1, 0.3),
        p_burst=rarely(0.1, 0.5),
        p_crash=rarely(0.02, 0.05),
        **ticks,
    )


# ---------------------------------------------------------------- what the model records


@dataclass
class Engine:
    """One engine: its turns, and when it swaps to the newest version."""

    version: int
    turns: dict[int, int] = field(default_factory=dict)
    """Handle -> rollout id."""
    fresh: set[int] = field(default_factory=set)
    """Handles of turns whose context has not been prefilled."""
    swap_at: int | None = None
    is_frozen: bool = False
    """Whether the engine waits for good weights after a rollback, and samples nothing."""


@dataclass
class Trained:
    """The model's record of one batch."""

    number: int
    told: int
    """Version at which the core said that the batch would be trained."""
    is_ahead: bool
    is_short: bool
    oldest_of_rows: list[int]
    """Oldest trained version of each rollout that has one, by the model's own record."""
    newest: int
    """Newest version of any token of the batch's groups, failed rollouts included: a rollback
    discards whole groups."""
    num_rows: int
    groups: list[int]
    """Ids of its groups."""
    fresh_groups: int
    """Number of its groups that were not trained before, without remainders of split ones."""
    named_at: int | None = None
    """The trainer's version when it named the batch; None before."""
    in_version: int | None = None
    """Version that the batch is in; None before that version's release."""
    is_discarded: bool = False
    """Whether the trainer discarded all rows of the batch."""

    @property
    def is_held(self) -> bool:
        """Whether no publish has named the batch."""
        return self.named_at is None and not self.is_discarded

    @property
    def oldest(self) -> int | None:
        """Oldest version of any trained token."""
        return min(self.oldest_of_rows, default=None)


@dataclass
class Publish:
    """A publish under way."""

    number: int
    released_at: int
    fails: bool
    is_rollback: bool = False


class World:
    """One core with engines, episodes and one trainer, all drawn from one seed."""

    def __init__(
        self,
        seed: int,
        *,
        policy: StalenessPolicy | None = None,
        habits: Habits | None = None,
        is_adapter: bool | None = None,
        ticks: int | None = None,
        is_calm: bool = False,
    ) -> None:
        self.is_calm = is_calm
        """Whether no engine joins or leaves."""
        self.is_checked_each_event = seed % 4 == 0
        """Whether the core checks itself after each event, and not only after each tick."""
        self.chance = chance = random.Random(seed)
        self.seed = seed
        if policy is None:
            policy = draw_uses(draw_policy(chance), random.Random(f"uses {seed}"))
        self.policy = policy
        self.habits = draw_habits(chance, self.policy) if habits is None else habits
        self.adapter = chance.random() < 0.25 if is_adapter is None else is_adapter
        self.ticks = chance.choice((20, 30, 60)) if ticks is None else ticks
        self.num_tasks = chance.choice((10**6, 10**6, 10**6, 20, 30))
        self.straggle = chance.choice((0.0, 0.1, 0.3))
        self.p_episode_fails = 0.0 if is_calm else chance.choice((0.0, 0.0, 0.03))
        self.rules = Rules(policy=self.policy, group_size=chance.choice((1, 1, 2, 3)))
        self.base = self.new_core()
        self.records: list[bytes] | None = [] if self.habits.p_crash else None
        self.engines: dict[str, Engine] = {}
        self.engines_made = 0
        self.versions_of: dict[int, Counter[int]] = {}
        """Rollout id -> number of its tokens by the version that sampled them."""
        self.left: dict[int, int] = {}
        """Rollout id -> tokens that it will still sample."""
        self.running: dict[int, Rollout] = {}
        self.requeued: list[TaskKey] = []
        self.tasks_taken = 0
        self.is_generation_paused = False
        self.now = 0
        self.last_event = 0
        # The trainer's side.
        self.version = 0
        self.live = 0
        self.first_bad = 0
        self.batches: dict[int, Trained] = {}
        self.lost: set[int] = set()
        self.has_lost = False
        self.unusable: set[int] = set()
        """Groups of lost batches, which the trainer may have trained on."""
        self.bad_versions: set[int] = set()
        """Versions that the trainer has rolled back or that a crash has lost."""
        self.undone_until = 0
        """Newest batch before the last crash: up to it, batches come again as they were."""
        self.requests = 0
        self.open: dict[int, bool] = {}
        """Requests that wait -> whether they were made while a version's batches were held."""
        self.offer: tuple[int, int] | None = None
        self.is_taken = False
        """Whether the trainer has taken the batch on offer, and has not acknowledged it."""
        self.queue: list[int] = []
        self.training: int | None = None
        self.trained_at = 0
        self.trained: list[int] = []
        self.skipped: list[int] = []
        self.publishing: Publish | None = None
        self.numbers_used = 0
        self.is_refused = False
        self.has_ended = False
        self.checkpoint = 0
        self.acked = 0
        self.must_restore = False
        self.versions_made: list[tuple[int, int]] = []
        """(version, highest number of a batch in it) of all released versions."""
        self.events_of: Counter[str] = Counter()
        self.start()

    # ------------------------------------------------------------ the core

    def new_core(self) -> Core:
        if not self.adapter:
            return Core(self.rules, survives_crashes=self.habits.p_crash > 0)
        base = Rules(policy=BoundedStaleness(groups_per_batch=1, max_staleness=0), group_size=1)
        return Core(base, survives_crashes=self.habits.p_crash > 0)

    @property
    def core(self) -> Core:
        return self.base.of(ADAPTER) if self.adapter else self.base

    def start(self) -> None:
        for _ in range(self.chance.choice((1, 1, 2, 3))):
            self.join()
        if self.adapter:
            self.do(ev.AdapterTrainingStarted(ADAPTER, record_of(self.rules)))
            self.do(ev.AdapterReleased(ADAPTER, 0))
            for name in self.engines:
                self.do(ev.AdapterServed(name, ADAPTER, 0))
        self.of(ev.TasksOffered())

    def of(self, event: ev.Event) -> None:
        """Give the core an event of the trainer."""
        self.do(ev.ForAdapter(ADAPTER, event) if self.adapter else event)

    def do(self, event: ev.Event) -> None:
        """Give the core an event, act on its commands, and check what holds after each event."""
        queue = [event]
        while queue:
            event = queue.pop(0)
            if isinstance(event, ev.EpisodeReturned | ev.EpisodeFailed | ev.TurnRequested):
                if event.rollout_id not in self.running:
                    continue  # its episode was stopped meanwhile
                if not isinstance(event, ev.TurnRequested):
                    del self.running[event.rollout_id]
            self.last_event = self.now
            if self.records is not None:
                self.records.append(encode_event(event, self.base))
            for command in self.base.handle(event):
                queue += self.act(command)
            if self.is_checked_each_event:
                self.base.check()

    def act(self, command: ev.Command) -> list[ev.Event]:
        """Carry out a command; return the events that follow from it at once."""
        match command:
            case ev.StartEpisode(rollout=rollout) | ev.RetryEpisode(rollout=rollout):
                return self.begin_episode(rollout)
            case ev.Submit(engine=name, message=message):
                self.engines[name].turns[message.turn] = message.session - 1
                self.engines[name].fresh.add(message.turn)
            case ev.Cancel(engine=name, handle=handle):
                if name in self.engines:
                    self.engines[name].turns.pop(handle, None)
            case ev.EndTurns(turns=turns):
                ended = [turn.rollout_id for turn in turns]
                return [self.end_of(number) for number in ended]
            case ev.StopEpisode(rollout=rollout):
                self.running.pop(rollout.rollout_id, None)
            case ev.RequeueTask(key=key):
                self.requeued.append(key)
            case ev.PauseGeneration(is_paused=is_paused):
                self.is_generation_paused = is_paused
                return self.abort_turns() if is_paused and not self.adapter else []
            case ev.HandOver():
                self.receive(command)
            case ev.RefuseBatch(request=request, held=held):
                self.refuse(request, held)
            case ev.EndBatches(request=request):
                del self.open[request]
                self.has_ended = True
            case ev.LoseBatch(number=number, reason=reason):
                self.lose(number, reason)
        return []

    # ------------------------------------------------------------ tasks and episodes

    def fill(self) -> None:
        core = self.core
        while core.admissible_groups:
            if self.requeued and (
                core.policy.prefers_returned(core.groups) or self.tasks_taken >= self.num_tasks
            ):
                key = self.requeued.pop(0)
                self.of(ev.TaskArrived(key.index, key, body=b""))
            elif self.tasks_taken < self.num_tasks:
                self.tasks_taken += 1
                self.of(ev.TaskArrived(self.tasks_taken - 1))
            else:
                self.of(ev.TasksExhausted())

    def begin_episode(self, rollout: Rollout) -> list[ev.Event]:
        number = rollout.rollout_id
        self.running[number] = rollout
        if rollout.turns:
            is_ended = rollout.turns[-1].finish_reason is not None
            return [ev.EpisodeReturned(number, 1.0)] if is_ended else []
        self.versions_of[number] = Counter()
        chance = random.Random((self.seed << 20) + rollout.group_id * 8 + rollout.index)
        tokens = chance.randint(1, 4)
        if chance.random() < self.straggle:
            tokens = chance.randint(5, 30)
        self.left[number] = tokens
        rollout.extend(PROMPT)
        adapter = ADAPTER if self.adapter else ""
        sampling = SamplingParams(max_tokens=tokens, adapter=adapter)
        return [ev.TurnRequested(number, sampling)]

    def end_of(self, number: int) -> ev.Event:
        """End an episode with a reward, mostly."""
        if self.chance.random() < self.p_episode_fails:
            return ev.EpisodeFailed(number, "episode_error")
        return ev.EpisodeReturned(number, 1.0)

    # ------------------------------------------------------------ engines

    def join(self) -> None:
        name = f"e{self.engines_made}"
        self.engines_made += 1
        version = self.version
        self.engines[name] = Engine(version)
        adapters = ((ADAPTER, version),) if self.adapter and self.base.trained_adapters else ()
        self.rejoin(name, adapters=adapters)

    def rejoin(self, name: str, adapters: tuple[tuple[str, int], ...] = ()) -> None:
        engine = self.engines[name]
        version = 0 if self.adapter else engine.version
        held = tuple(engine.turns)
        self.do(ev.EngineJoined(name, version, 64, held=held, adapters=adapters))
        self.see_live()

    def leave(self, name: str) -> None:
        del self.engines[name]
        self.see_live()
        self.do(ev.EngineLeft(name))

    def see_live(self) -> None:
        self.live = max(self.live, min((e.version for e in self.engines.values()), default=0))

    def swap(self, name: str) -> None:
        engine = self.engines[name]
        engine.version, engine.swap_at, engine.is_frozen = self.version, None, False
        self.see_live()
        if self.adapter:
            self.do(ev.AdapterServed(name, ADAPTER, self.version))
        else:
            if self.chance.random() < 0.3:
                for event in self.abort_turns(name):
                    self.do(event)
            self.do(ev.EngineSwapped(name, self.version))

    def abort_turns(self, only: str | None = None) -> list[ev.Event]:
        """Have engines hand their begun turns back."""
        events: list[ev.Event] = []
        for name, engine in self.engines.items():
            handles = [h for h in engine.turns if h not in engine.fresh]
            if handles and only in (None, name):
                for handle in handles:
                    del engine.turns[handle]
                events.append(self.step_of(name, [(h, [], ABORT) for h in handles]))
        return events

    def step_of(self, name: str, rows: list[tuple[int, list[int], int]]) -> ev.StepArrived:
        """Make a step from (handle, tokens, finish code), with the prefills of fresh turns."""
        engine = self.engines[name]
        fresh = [handle for handle, _, _ in rows if handle in engine.fresh]
        engine.fresh.difference_update(fresh)
        prefills = [Prefill(h, 0, [KvSpan(engine.version, 0, len(PROMPT))]) for h in fresh]
        return step(name, engine.version, rows, prefills, ADAPTER if self.adapter else "")

    def sample(self, name: str) -> None:
        engine = self.engines[name]
        rows = []
        for handle, number in list(engine.turns.items()):
            self.left[number] -= 1
            self.versions_of[number][engine.version] += 1
            is_ended = self.left[number] == 0
            if is_ended:
                del engine.turns[handle]
            rows.append((handle, [5], STOP if is_ended else RUNNING))
        if rows:
            self.do(self.step_of(name, rows))

    # ------------------------------------------------------------ what the trainer is given

    @property
    def held(self) -> list[Trained]:
        """Batches that no publish has named, oldest first."""
        return [batch for batch in self.batches.values() if batch.is_held]

    def request(self) -> None:
        self.requests += 1
        ahead = len(self.held) + len(self.open) >= self.policy.batches_per_version
        self.open[self.requests] = ahead
        self.of(ev.BatchRequested(self.requests))

    def receive(self, command: ev.HandOver) -> None:
        number, request = command.number, command.request
        assert self.offer is None, "a batch is offered while another is on offer"
        assert self.publishing is None, "a batch is offered while a publish is undecided"
        assert request == min(self.open), "a batch is offered to a younger request first"
        assert number not in self.batches, f"batch {number} is offered twice"
        is_ahead = self.open.pop(request)
        assert command.is_ahead == is_ahead, f"batch {number} is_ahead={command.is_ahead}"
        rows = [rollout for group in command.groups for rollout in group.kept]
        oldest, newest = [], 0
        for rollout in rows:
            versions = self.versions_of[rollout.rollout_id]
            assert sum(versions.values()) == rollout.sampled_tokens, "a token was lost"
            unmasked = [v for v in versions if v >= command.oldest_trainable]
            oldest += [min(unmasked)] if unmasked else []
        for rollout in (each for group in command.groups for each in group.rollouts):
            newest = max([newest, *self.versions_of[rollout.rollout_id]])
        fresh = [group for group in command.groups if group.use == 1]
        if len(fresh) < len(command.groups):
            self.receive_again(command)
        groups = sum(group.split_from is None for group in command.groups)
        self.batches[number] = Trained(
            number,
            command.trainer_version,
            is_ahead,
            groups < self.policy.groups_per_batch,
            oldest,
            newest,
            len(rows),
            [group.group_id for group in command.groups],
            sum(group.split_from is None for group in fresh),
        )
        self.offer = request, number
        bound = self.policy.guaranteed_bound
        if bound is not None:
            ages = [command.trainer_version - version for version in oldest]
            assert max(ages, default=0) <= bound, f"batch {number} is planned at age {max(ages)}"

    def receive_again(self, command: ev.HandOver) -> None:
        """Check the groups of a batch that the trainer has trained on before."""
        self.events_of["reused"] += 1
        is_repeated = command.number <= self.undone_until
        is_needed = len(self.held) < self.policy.batches_per_version
        assert is_needed or is_repeated, "used groups are not needed yet"
        left = next(iter(self.core.groups.in_order), None)
        order = getattr(self.policy, "consumption_order", None)
        if order == "completion":
            left = next(iter(self.core.groups.ended), None)
        is_checked = order in ("admission", "completion") and not is_repeated
        assert not is_checked or left is None or left.running, (
            f"group {left.group_id if left else 0} has ended and is left for one that was used"
        )
        for group in command.groups:
            used_in = [b for b in self.batches.values() if group.group_id in b.groups]
            assert group.use == len(used_in) + 1 <= self.policy.max_uses, (
                f"use {group.use} of group {group.group_id}, which was in {used_in}"
            )
            if group.use > 1:
                assert group.group_id not in self.unusable, "a group of a lost batch is used again"
                assert all(b.in_version is not None for b in used_in), "its use is in no version"
                versions = {v for row in group.kept for v in self.versions_of[row.rollout_id]}
                assert not versions & self.bad_versions, f"bad tokens of {versions} are used again"

    def refuse(self, request: int, held: tuple[int, ...]) -> None:
        """The core says that a publish is needed first."""
        del self.open[request]
        own = tuple(batch.number for batch in self.held)
        assert held == own, f"PublishNeeded lists {held}, and the trainer holds {own}"
        unreleased = [b for b in self.batches.values() if b.in_version is None]
        most = batches_held_max(self.core.policy)
        is_known = self.habits.is_true or not any(b.is_short for b in unreleased)
        assert not is_known or len(unreleased) >= most, (
            f"a request is refused, and the trainer holds {len(unreleased)} of {most} batches"
        )
        self.is_refused = True
        self.events_of["refused"] += 1

    def lose(self, number: int, reason: str) -> None:
        """The trainer must not train on a batch any more: it drops what it has of it."""
        batch = self.batches.pop(number)
        assert batch.is_held, f"batch {number} is named, and is lost"
        if reason == "stale":
            bound = self.policy.guaranteed_bound
            assert bound is not None
            assert batch.oldest is not None
            assert self.version - batch.oldest > bound, f"batch {number} is young and is lost"
        else:
            assert reason == "rolled_back"
            assert batch.newest >= self.first_bad, f"batch {number} has no bad token and is lost"
        assert not self.habits.is_true, f"batch {number} of a true trainer is lost: {reason}"
        self.events_of[f"lost {reason}"] += 1
        self.lost.add(number)
        self.unusable.update(batch.groups)
        self.has_lost = True
        self.forget(number)

    def forget(self, number: int) -> None:
        """Remove a batch from what the trainer works on."""
        for batches in (self.queue, self.trained, self.skipped):
            if number in batches:
                batches.remove(number)
        if self.training == number:
            self.training = None

    def answer_offer(self, *, is_withdrawable: bool = False) -> None:
        """Take the batch on offer, mostly; or stop waiting for it, or leave it there."""
        if self.offer is None:
            return
        request, number = self.offer
        if is_withdrawable:
            # A publish begins. The core withdraws an offer that the trainer has not taken.
            choice = self.chance.random()
            if choice < 0.2 or self.is_taken:
                self.is_taken = True
                return
            if choice < 0.6:
                self.offer = None
                ahead = self.batches.pop(number).is_ahead
                self.open = {request: ahead, **self.open}
                self.of(ev.BatchReturned(number, request))
                return
        elif self.chance.random() < self.habits.p_ack_late:
            return
        elif self.chance.random() < self.habits.p_cancel:
            self.offer, self.is_taken = None, False
            self.batches.pop(number, None)
            self.of(ev.BatchReturned(number))
            return
        self.offer, self.is_taken = None, False
        if number in self.batches:  # else it was lost between the offer and the acknowledgement
            self.queue.append(number)
        self.of(ev.BatchTaken(request))

    # ------------------------------------------------------------ the trainer

    def train(self) -> None:
        """Let the trainer do what it can within one tick."""
        habits, chance = self.habits, self.chance
        self.answer_offer()
        if self.publishing is not None:
            if self.now >= self.publishing.released_at:
                self.finish_publish()
            elif habits.is_blocked_by_publish or self.publishing.is_rollback:
                return
        if self.must_restore and self.publishing is None:
            self.must_restore = False
            self.begin_publish([], may_be_silent=True)
            return
        may_roll_back = self.publishing is None and self.version > 0
        if may_roll_back and chance.random() < habits.p_rollback * 0.3:
            self.roll_back()
            return
        if self.publishing is None and chance.random() < habits.p_beside:
            self.events_of["beside"] += 1
            self.begin_publish([])  # an adapter, or a part of the tensors, beside the training
            return
        if self.open and chance.random() < habits.p_cancel * 0.3:
            request = chance.choice(list(self.open))
            del self.open[request]
            self.of(ev.BatchRequestCancelled(request))
        if self.queue and chance.random() < habits.p_give_back:
            self.give_back()
        self.want_batches()
        self.answer_offer()
        self.work()
        self.want_batches()
        if self.publishing is None:
            self.publish_when_due()
        if habits.p_crash and chance.random() < 0.2:
            self.save_checkpoint()

    def want_batches(self) -> None:
        habits = self.habits
        if self.has_ended or self.must_restore:
            return
        if self.publishing is not None and habits.is_blocked_by_publish:
            return
        on_offer = self.offer is not None
        ahead = len(self.queue) + len(self.open) + on_offer
        busy = self.training is not None
        if self.is_refused:
            return
        if habits.depth == 0:
            # One batch at a time: it requests the next once it has trained on the last.
            due = len(self.trained) < habits.accumulated and self.publishing is None
            wanted = int(not busy and not ahead and due)
        elif habits.is_true or self.chance.random() < 0.8:
            wanted = max(0, habits.depth - ahead)
            if self.chance.random() < habits.p_burst:
                wanted += 2
        else:
            wanted = 0
        most = batches_held_max(self.core.policy)
        if habits.is_true:
            unreleased = sum(b.in_version is None for b in self.batches.values())
            wanted = min(wanted, most - unreleased - len(self.open))
        for _ in range(wanted):
            if not self.is_refused and not self.has_ended:
                self.request()

    def give_back(self) -> None:
        """Give the newest batch back, untrained, as ``BatchRequests.return_batch`` lets it."""
        number = max([*self.batches, *self.lost])
        if number in self.queue and not self.open and self.offer is None:
            self.queue.remove(number)
            del self.batches[number]
            self.of(ev.BatchReturned(number))
            self.events_of["given back"] += 1

    def work(self) -> None:
        """Train batches for one tick."""
        habits, chance = self.habits, self.chance
        for _ in range(4):
            if self.training is not None:
                if self.now < self.trained_at:
                    return
                self.trained.append(self.training)
                self.training = None
            if len(self.trained) >= habits.accumulated or not self.queue:
                return
            at = 0
            if len(self.queue) > 1 and chance.random() < habits.p_out_of_order:
                at = chance.randrange(len(self.queue))
                self.events_of["out of order"] += at > 0
            number = self.queue.pop(at)
            if chance.random() < habits.p_skip:
                self.skipped.append(number)
                self.events_of["skipped"] += 1
            elif chance.random() < habits.p_discard:
                batch = self.batches[number]
                self.events_of["discarded"] += 1
                batch.is_discarded = True
                rows = tuple(range(batch.num_rows))
                self.of(ev.RowsDiscarded(number, rows, "discarded_rows"))
            else:
                self.training, self.trained_at = number, self.now + habits.train_ticks

    def publish_when_due(self) -> None:
        habits, chance = self.habits, self.chance
        is_full = len(self.trained) >= habits.accumulated
        is_last = self.has_ended and not self.queue and self.training is None and not self.open
        is_last = is_last and self.offer is None
        is_early = chance.random() < habits.p_early
        is_stuck = (
            self.is_refused and self.training is None and (not self.queue or len(self.trained) > 0)
        )
        if is_full or (self.trained and (is_last or is_early)) or is_stuck:
            names = list(self.trained)
            if is_stuck and not names:
                names = list(self.skipped)  # the trainer says that it is done with them
            if not names and is_last:
                return
            self.begin_publish(names, may_be_silent=habits.is_silent)

    def is_unclear(self) -> bool:
        """Whether the contract refuses a publish that does not say what it was made from."""
        held = self.held
        if self.has_lost or not held:
            return self.has_lost  # it may have trained on what it has lost
        return (
            len(held) > self.policy.batches_per_version
            or bool(self.open)
            or self.offer is not None
            or any(batch.is_ahead for batch in held)
        )

    def begin_publish(self, names: list[int], *, may_be_silent: bool = False) -> None:
        habits, chance = self.habits, self.chance
        core = self.core
        k = self.policy.batches_per_version
        if self.lost and chance.random() < habits.p_name_lost:
            self.name_lost()
        # Leaving it out is right if all that is held was trained, and is refused if not.
        untrained = [b.number for b in self.held if b.number not in names]
        untrained = [number for number in untrained if number not in self.skipped]
        if may_be_silent and (not untrained or self.is_unclear()):
            try:
                resolved = list(core.handed.batches_of_publish(k))
            except PublishUnclear:
                assert self.is_unclear(), "a clear publish is refused"
                assert not habits.is_true, "a true trainer's publish is refused"
                self.events_of["unclear"] += 1
            else:
                assert not self.is_unclear(), f"an unclear publish is taken to name {resolved}"
                assert set(names) <= set(resolved), f"{resolved} is not what was trained: {names}"
                assert set(resolved) <= {*names, *self.skipped}
                names = resolved
        elif names:
            chance.shuffle(names)  # the order in which they are said means nothing
        self.refuse_or_not(names)
        fails = chance.random() < habits.p_fail
        if fails and chance.random() < 0.3:
            self.name(names)  # no version was reserved
            return
        self.of(ev.HandOverPaused(True))
        self.answer_offer(is_withdrawable=True)
        self.refuse_or_not(names)
        self.name(names)
        self.numbers_used = max(core.next_version, self.numbers_used + 1)
        released_at = self.now + chance.randint(0, habits.stage_ticks)
        self.publishing = Publish(self.numbers_used, released_at, fails)
        self.events_of["publish"] += 1
        if released_at == self.now:
            self.finish_publish()

    def name_lost(self) -> None:
        number = max(self.lost)
        if number in self.batches:
            return  # handed over again since a resume
        try:
            self.core.handed.refuse_untrainable([number])
        except BatchNotHeld:
            self.events_of["lost named"] += 1
        else:
            raise AssertionError(f"lost batch {number} may be named")

    def refuse_or_not(self, names: list[int]) -> None:
        """Ask the core whether these batches may be named; the model knows the answer."""
        bound = self.policy.guaranteed_bound
        olds = [v for number in names if (v := self.batches[number].oldest) is not None]
        is_too_old = bound is not None and self.version - min(olds, default=self.version) > bound
        try:
            self.core.handed.refuse_untrainable(names)
        except BatchNotHeld as error:
            # A held batch that is too old is lost when it becomes so, and is then in no list.
            raise AssertionError(f"{names} are held, and are refused: {error}") from error
        assert not is_too_old, f"{names} are trained at version {self.version}, too old"

    def name(self, names: list[int]) -> None:
        """Say that these batches are in the weights: their age is final."""
        bound = self.policy.guaranteed_bound
        for number in names:
            batch = self.batches[number]
            batch.named_at = self.version
            age = max([self.version - version for version in batch.oldest_of_rows], default=0)
            assert bound is None or age <= bound, f"batch {number} was trained at age {age}"
            if self.habits.is_true and self.habits.accumulated == self.policy.batches_per_version:
                told = batch.told
                assert told == self.version, f"{number}: told {told}, trained at {self.version}"
            elif self.habits.is_true:
                assert batch.told >= self.version, f"{number}: told a version that was passed"
            self.events_of["named"] += 1
        if names:
            self.has_lost = False
            self.of(ev.BatchesTrained(tuple(names)))
            retrained = self.chance.random() < self.habits.p_retrain
            if retrained:
                self.core.handed.refuse_untrainable(
                    names
                )  # a retry of a failed publish may say it again
        self.trained = [number for number in self.trained if number not in names]
        self.skipped = [number for number in self.skipped if number not in names]

    def finish_publish(self) -> None:
        publish, self.publishing = self.publishing, None
        assert publish is not None
        if not publish.fails:
            self.release(publish.number)
        else:
            self.events_of["failed"] += 1
        self.of(ev.HandOverPaused(False))
        if not publish.fails:
            self.is_refused = False
        elif not self.trained and self.is_refused:
            self.is_refused = False  # it asks again, and publishes again once it is refused
        if not publish.fails and self.chance.random() < self.habits.p_repeat:
            self.events_of["repeated"] += 1
            self.begin_publish([])

    def release(self, number: int) -> None:
        self.version = number
        for batch in self.batches.values():
            if batch.in_version is None and (batch.named_at is not None or batch.is_discarded):
                batch.in_version = number
        done = [n for n, batch in self.batches.items() if not batch.is_held]
        self.versions_made.append((number, max(done, default=0)))
        if self.adapter:
            self.do(ev.AdapterReleased(ADAPTER, number))
        else:
            self.of(ev.VersionPublished(number))
        for name, engine in list(self.engines.items()):
            engine.swap_at = self.now + self.chance.randint(0, self.habits.swap_ticks)
            if engine.swap_at == self.now:
                self.swap(name)

    def roll_back(self) -> None:
        """Bring good weights to the engines in place of bad ones."""
        self.first_bad = max(1, self.version - self.chance.choice((0, 0, 1)))
        self.bad_versions.update(range(self.first_bad, self.version + 1))
        self.events_of["rollback"] += 1
        self.of(ev.HandOverPaused(True))
        self.answer_offer(is_withdrawable=True)
        if self.adapter:
            self.of(ev.GenerationHalted(True))
        else:
            for event in self.abort_turns():
                self.do(event)
        for engine in self.engines.values():
            engine.is_frozen, engine.swap_at = True, None
        # What was trained since the newest version is not in the weights that it goes back to.
        for number in reversed(self.trained):
            self.queue.insert(0, number)
        self.trained = []
        bad = [b.number for b in self.held if b.newest >= self.first_bad]
        self.of(ev.VersionRetracted(self.first_bad))
        # From now on only the weights that replace the bad ones may sample.
        self.live = max(self.live, self.core.next_version)
        left = [number for number in bad if number in self.batches]
        assert not left, f"batches {left} have bad tokens and are not lost"
        self.numbers_used = max(self.core.next_version, self.numbers_used + 1)
        released_at = self.now + self.chance.randint(0, self.habits.stage_ticks)
        self.publishing = Publish(self.numbers_used, released_at, False, is_rollback=True)
        self.checkpoint = -1  # the weights of checkpoints so far may be the bad ones
        if released_at == self.now:
            self.finish_publish()

    # ------------------------------------------------------------ checkpoints

    def save_checkpoint(self) -> None:
        """Save the trainer's state, if the batches in it are the first of the run."""
        done = {n for n, batch in self.batches.items() if not batch.is_held} | set(self.trained)
        newest = max(done, default=0)
        open_ = [n for n in self.batches if n <= newest and n not in done]
        if open_ or self.publishing is not None or newest < self.acked:
            return
        self.checkpoint = newest
        if self.chance.random() < 0.7:
            self.acked = newest
            self.of(ev.BatchesCheckpointed(newest, self.core.tasks.offer))

    def crash(self) -> None:
        """Kill the process; another one resumes from the checkpoint."""
        if self.checkpoint < self.acked:
            return
        self.events_of["crash"] += 1
        before = digest(self.base)
        core = self.new_core()
        if self.chance.random() < 0.5:
            load(save(self.base), core)
        else:
            assert self.records is not None
            for record in self.records:
                replay(record, core)
        assert digest(core, is_replayed=True) == before, "another core is in another state"
        self.base = core
        at = self.checkpoint
        released = self.versions_made
        is_lost = bool(released) and released[-1][1] > at
        self.running.clear()
        self.requeued.clear()
        self.open.clear()
        self.offer, self.is_taken = None, False
        self.publishing = None
        self.queue, self.skipped, self.trained = [], [], []
        self.training = None
        self.is_refused = self.has_ended = self.is_generation_paused = False
        self.has_lost = False
        self.undone_until = max(self.undone_until, *self.batches, 0)
        self.batches = {n: batch for n, batch in self.batches.items() if n <= at}
        self.lost = {n for n in self.lost if n <= at}
        for batch in self.batches.values():
            if batch.is_held:
                batch.named_at = batch.told  # the checkpoint holds them: trained as planned
        self.versions_made = [(v, n) for v, n in released if n <= at]
        self.bad_versions.update(v for v, n in released if n > at)
        offer = self.core.tasks.offer
        if self.adapter:
            base_offer = self.base.tasks.offer
            self.do(ev.RunResumed(0, base_offer, adapters={ADAPTER: (at, offer)}))
        else:
            self.do(ev.RunResumed(at, offer))
        assert self.core.trainer_version == self.version + is_lost, "versions after a resume"
        self.version = self.core.trainer_version
        if is_lost:
            self.live = max(self.live, self.version)
            for batch in self.batches.values():
                if batch.in_version is not None and batch.in_version > self.live:
                    batch.in_version = self.version
        self.numbers_used = 0
        self.must_restore = True
        for name in self.engines:
            engine = self.engines[name]
            engine.is_frozen = False
            self.rejoin(name, adapters=((ADAPTER, engine.version),) if self.adapter else ())
        self.of(ev.TasksOffered())
        for index in range(self.core.tasks.count):
            self.of(ev.TaskFoundAgain(index, TaskKey(self.core.tasks.offer, index)))

    # ------------------------------------------------------------ the world

    def run(self) -> None:
        """Let the world go on for its time, then compare statistics."""
        chance = self.chance
        while self.now < self.ticks:
            self.now += 1
            if self.now - self.last_event > STALLED_TICKS:
                break
            if not self.is_calm and chance.random() < 0.02 and len(self.engines) < 4:
                self.join()
            if not self.is_calm and chance.random() < 0.01 and len(self.engines) > 1:
                self.leave(chance.choice(sorted(self.engines)))
            if self.habits.p_crash and chance.random() < self.habits.p_crash:
                self.crash()
            self.fill()
            for name, engine in list(self.engines.items()):
                if engine.swap_at is not None and self.now >= engine.swap_at:
                    self.swap(name)
                if not engine.is_frozen and not self.is_generation_paused:
                    self.sample(name)
            is_frozen = any(engine.is_frozen for engine in self.engines.values())
            if self.core.is_halted and not is_frozen and self.publishing is None:
                self.of(ev.GenerationHalted(False))
            self.fill()
            self.train()
            self.base.check()
            self.check()

    def check(self) -> None:
        """Check what holds between two ticks."""
        core = self.core
        if self.open and self.offer is None and self.publishing is None:
            ended = sum(not group.is_split_remainder for group in core.groups.ended)
            is_full = ended >= self.policy.groups_per_batch and not core.groups.running_groups
            assert not is_full, f"a request waits, and {ended} groups have ended, none runs"
        if self.habits.is_true and self.is_waited_for():
            assert not core.discarded_rollouts["stale"], "a true trainer's groups got too old"
        assert core.trainer_version == self.version, f"{core.trainer_version} != {self.version}"
        own = [batch.number for batch in self.held]
        held = [batch.number for batch in core.handed.held]
        assert held == own, f"the core counts {held} as held, and the trainer holds {own}"
        if not any(batch.is_short for batch in self.batches.values()):
            unlive = [
                batch
                for batch in self.batches.values()
                if batch.in_version is None or batch.in_version > self.live
            ]
            # A batch that was discarded whole counts until the next version, or until its place is
            # needed for another one.
            least = sum(batch.fresh_groups for batch in unlive if not batch.is_discarded)
            most = len(unlive) * self.policy.groups_per_batch
            assert least <= core.training_groups <= most, (
                f"{core.training_groups} groups are outstanding in training, {least} to {most} "
                f"should be"
            )
        assert core.trained.staleness == self.histogram(), (
            f"statistics {dict(core.trained.staleness)}, model {dict(self.histogram())}"
        )

    def is_waited_for(self) -> bool:
        """Whether the policy waits for stragglers, so that admission alone keeps the bound."""
        policy = self.policy
        is_bounded = type(policy) is BoundedStaleness and policy.deadline_policy == "wait"
        return is_bounded or isinstance(policy, OneStepOffPolicy | Synchronous)

    def histogram(self) -> Counter[int]:
        """Number of trained rollouts by age; of a batch that is not named, as it is planned."""
        counts: Counter[int] = Counter()
        for batch in self.batches.values():
            if not batch.is_discarded:
                at = batch.told if batch.named_at is None else batch.named_at
                counts.update(at - version for version in batch.oldest_of_rows)
        return counts

    def describe(self) -> str:
        """Describe what was drawn."""
        return f"{self.policy}\n{self.habits}\nadapter={self.adapter} {dict(self.events_of)}"


def run_world(seed: int) -> World:
    """Run one world; say how to run it again if it fails."""
    world = World(seed)
    try:
        world.run()
    except Exception as error:
        raise AssertionError(
            f"seed {seed}, tick {world.now}: {error!r}\n{world.describe()}\n"
            f"again: python -m tests.orchestrator.core.trainer_model --seed {seed}"
        ) from error
    return world


def run_pair(seed: int) -> tuple[int, int]:
    """Run a world with a trainer that takes one batch at a time, and with one that requests ahead;
    return how many batches each has trained."""
    chance = random.Random(f"pair {seed}")
    eta, k = chance.randint(0, 8), chance.choice((1, 1, 2, 3, 4))
    policy = BoundedStaleness(
        max_staleness=eta,
        groups_per_batch=chance.choice((1, 2, 3)),
        consumption_order=chance.choice(("admission", "completion")),
        batches_per_version=k,
    )
    ticks = chance.choice((0, 1, 3))
    plain = Habits(
        is_true=True,
        depth=0,
        accumulated=k,
        train_ticks=ticks,
        stage_ticks=0,
        swap_ticks=0,
        is_silent=True,
    )
    ahead = replace(plain, depth=chance.randint(1, 8), is_silent=False)
    counts = []
    for habits in (plain, ahead):
        world = World(seed, policy=policy, habits=habits, is_adapter=False, ticks=80, is_calm=True)
        world.run()
        counts.append(world.events_of["named"])
    taken_alone, taken_ahead = counts
    assert taken_ahead >= taken_alone, f"seed {seed}: {taken_ahead} < {taken_alone}, {policy}"
    return taken_alone, taken_ahead


def main() -> None:
    """Run many worlds, or one again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int)
    arguments = parser.parse_args()
    if arguments.seed is not None:
        sys.stdout.write(f"{run_world(arguments.seed).describe()}\n")
        return
    failures, totals = 0, Counter[str]()
    for seed in range(arguments.first, arguments.first + arguments.worlds):
        try:
            totals.update(run_world(seed).events_of)
        except AssertionError as error:
            failures += 1
            sys.stdout.write(f"{error}\n")
    sys.stdout.write(f"{arguments.worlds} worlds, {failures} failed; {dict(totals)}\n")
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
