"""Adapters that one core trains beside one another: each decides as if it were alone.

Every adapter is driven by a random stream of its own, interleaved with those of the others. What
its trainer gets must be what it gets in a run with no other adapter: the same groups in the same
batches, at the same versions, with the same ledger.
"""

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.orchestrator.core.driver import step
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.core import Core
from tidegate.orchestrator.core.event_log import encode_event, replay
from tidegate.orchestrator.core.group import Group
from tidegate.orchestrator.core.groups import GroupTracker
from tidegate.orchestrator.core.rollout import Rollout
from tidegate.orchestrator.core.rules import Rules, record_of
from tidegate.orchestrator.core.snapshot_codec import digest, load, save
from tidegate.orchestrator.core.turns import TurnTracker
from tidegate.policies.asynchrony import BoundedStaleness
from tidegate.policies.failures import FailureCause
from tidegate.policies.filters import DynamicSampling, GroupFilter
from tidegate.policies.rounds import Synchronous
from tidegate.policies.staleness import StalenessPolicy
from tidegate.transport.messages import RUNNING, STOP, SamplingParams

TOKENS = 3
BASE_RULES = Rules(policy=BoundedStaleness(groups_per_batch=1, max_staleness=0), group_size=1)

ORDERS: tuple[tuple[Any, Any], ...] = (
    ("admission", "wait"),
    *(("completion", deadline) for deadline in ("wait", "mask", "split", "drop")),
)


def rules_of(chance: random.Random) -> Rules:
    order, deadline = chance.choice(ORDERS)
    policy: StalenessPolicy = BoundedStaleness(
        groups_per_batch=chance.choice((1, 2, 3)),
        max_staleness=chance.choice((0, 1, 2)),
        consumption_order=order,
        deadline_policy=deadline,
    )
    if chance.random() < 0.2:
        policy = Synchronous(groups_per_batch=2)
    group_filter = DynamicSampling() if chance.random() < 0.3 else GroupFilter()
    return Rules(policy=policy, group_size=chance.choice((2, 3)), group_filter=group_filter)


@dataclass
class Player:
    """Plays the episodes and the trainer of one adapter, by a random stream of its own."""

    name: str
    seed: int
    chance: random.Random = field(init=False)
    rules: Rules = field(init=False)
    running: dict[int, Rollout] = field(default_factory=dict)
    turns: dict[int, int] = field(default_factory=dict)
    """Handle -> rollout id of the turns on the engine, in the order of submission."""
    version: int = 0
    serving: int = 0
    log: list[Any] = field(default_factory=list)
    """What the trainer and the episodes saw, without numbers that the run's adapters share."""
    tasks: int = 0
    is_requested: bool = False
    returned: list[Any] = field(default_factory=list)
    is_halted: bool = False

    def __post_init__(self) -> None:
        self.chance = random.Random(f"{self.name} {self.seed}")
        self.rules = rules_of(self.chance)


class Run:
    """A core with some adapters on one engine, whose interleaving is random."""

    def __init__(
        self, seed: int, names: list[str], offering: Collection[str] = ("solver", "critic")
    ) -> None:
        self.core = Core(BASE_RULES, survives_crashes=True)
        self.offering = set(offering)
        self.records: list[bytes] = []
        self.players = {name: Player(name, seed) for name in names}
        self.do(ev.EngineJoined("e", 0, 64))
        for name, player in self.players.items():
            self.do(ev.AdapterTrainingStarted(name, record_of(player.rules)))
            if name in offering:
                self.of(player, ev.TasksOffered())
            self.publish(player)

    def play(self, seed: int, moves: int) -> None:
        """Let every player make ``moves`` moves, in a random order."""
        order = [name for name in self.players for _ in range(moves)]
        random.Random(f"order {seed}").shuffle(order)
        for name in order:
            self.move(self.players[name])
            self.core.check()

    # ------------------------------------------------------------ events

    def do(self, event: ev.Event) -> None:
        self.records.append(encode_event(event, self.core))
        for command in self.core.handle(event):
            self.act(command)

    def of(self, player: Player, event: ev.Event) -> None:
        self.do(ev.ForAdapter(player.name, event))

    def act(self, command: ev.Command) -> None:
        match command:
            case ev.StartEpisode(rollout=rollout):
                self.players[rollout.adapter].running[rollout.rollout_id] = rollout
            case ev.StopEpisode(rollout=rollout):
                player = self.players[rollout.adapter]
                player.running.pop(rollout.rollout_id, None)
                player.log.append(("stopped", rollout.group_id, rollout.index))
            case ev.Submit(message=message):
                rollout_id = message.session - 1
                name = message.sampling.adapter
                self.players[name].turns[message.turn] = rollout_id
            case ev.Cancel(handle=handle):
                for player in self.players.values():
                    player.turns.pop(handle, None)
            case ev.RequeueTask(task=task, key=key, adapter=name):
                self.players[name].returned.append((task, key))
            case ev.HandOver(groups=groups, trainer_version=version, adapter=name):
                player = self.players[name]
                player.is_requested = False
                self.of(player, ev.BatchTaken(command.request))
                rows = [
                    (row.group_id, row.index, row.reward, tuple(r.version for r in runs_of(row)))
                    for group in groups
                    for row in group.kept
                ]
                player.log.append(("batch", version, command.oldest_trainable, rows))
                assert all(row.adapter == name for group in groups for row in group.kept)
                bound = player.rules.policy.guaranteed_bound
                assert bound is not None
                for group in groups:
                    for row in group.kept:
                        oldest = row.oldest_trained_version
                        assert oldest is None or version - oldest <= bound
            case ev.RefuseBatch(adapter=name) | ev.EndBatches(adapter=name):
                self.players[name].is_requested = False
                self.players[name].log.append("no batch")

    def publish(self, player: Player) -> None:
        held = tuple(batch.number for batch in self.core.of(player.name).handed.held)
        if held:
            self.of(player, ev.BatchesTrained(held))
        player.version += 1
        self.do(ev.AdapterReleased(player.name, player.version))
        if player.chance.random() < 0.8:
            self.swap(player)

    def swap(self, player: Player) -> None:
        player.serving = player.version
        self.do(ev.AdapterServed("e", player.name, player.version))

    # ------------------------------------------------------------ moves

    def move(self, player: Player) -> None:
        chance, core = player.chance, self.core.of(player.name)
        player.log.append((core.admissible_groups, core.buffered_groups, core.ledger.snapshot()))
        kind = chance.choices(
            ("task", "turn", "step", "return", "fail", "request", "publish", "swap", "halt", "bad"),
            (20, 25, 40, 15, 1, 12, 8, 4, 8 if player.is_halted else 1, 0.5),
        )[0]
        # One engine, so a swap is due before the next publish.
        idle = sorted(
            (r.group_id, r.index, number)
            for number, r in player.running.items()
            if not r.turns or r.turns[-1].finish_reason is not None
        )
        if kind == "task" and core.admissible_groups and player.name in self.offering:
            if player.returned and chance.random() < 0.7:
                task, key = player.returned.pop(0)
                self.of(player, ev.TaskArrived(task, key))
            else:
                player.tasks += 1
                self.of(player, ev.TaskArrived(player.tasks))
        elif kind == "turn" and idle:
            number = chance.choice(idle)[2]
            rollout = player.running[number]
            rollout.extend([7, 8, len(rollout.turns)])
            sampling = SamplingParams(max_tokens=TOKENS, adapter=player.name)
            self.do(ev.TurnRequested(number, sampling))
        elif kind == "step" and player.turns:
            self.step(player)
        elif kind in ("return", "fail") and idle:
            number = chance.choice(idle)[2]
            if player.running[number].home is None:
                self.end(number, float(chance.random() < 0.5) if kind == "return" else None)
        elif kind == "request" and not player.is_requested:
            player.is_requested = True
            self.of(player, ev.BatchRequested())
        elif kind == "publish" and player.serving == player.version:
            self.publish(player)
        elif kind == "swap" and player.serving < player.version:
            self.swap(player)
        elif kind == "halt":
            player.is_halted = not player.is_halted
            self.of(player, ev.GenerationHalted(player.is_halted))
        elif kind == "bad" and player.serving == player.version and player.version > 1:
            self.of(player, ev.VersionRetracted(player.version))
            self.publish(player)

    def end(self, number: int, reward: float | None) -> None:
        """End an episode with a reward, or let it fail."""
        rollout = self.core.rollout(number)
        assert rollout is not None
        del self.players[rollout.adapter].running[number]
        if reward is not None:
            self.do(ev.EpisodeReturned(number, reward))
        else:
            self.do(ev.EpisodeFailed(number, "raised", FailureCause.CODE, False))

    def step(self, player: Player) -> None:
        chance = player.chance
        # Handles are shared with other adapters: choose by rollout, in an order of its own.
        known = dict(player.running)
        by_place = sorted(
            (known[number].group_id, known[number].index, handle)
            for handle, number in player.turns.items()
            if number in known
        )
        handles = [handle for _, _, handle in by_place if chance.random() < 0.7]
        codes = [STOP if chance.random() < 0.3 else RUNNING for _ in handles]
        for handle, code in zip(handles, codes, strict=True):
            turn = known[player.turns[handle]].turns[-1]
            if code == STOP or turn.length + 1 == TOKENS:
                del player.turns[handle]
        if handles:
            rows = [(h, [5], RUNNING if h in player.turns else STOP) for h in handles]
            self.do(step("e", player.serving, rows, adapter=player.name))


def runs_of(row: Rollout) -> list[Any]:
    return [run for turn in row.turns for run in turn.runs]


def check_alone(seed: int, moves: int = 250) -> Run:
    """Play two adapters together, and each alone; what each saw must be the same."""
    together = Run(seed, ["solver", "critic"])
    together.play(seed, moves)
    for name in ("solver", "critic"):
        alone = Run(seed, [name])
        alone.play(seed, moves)
        for number, (seen, expected) in enumerate(
            zip(together.players[name].log, alone.players[name].log, strict=True)
        ):
            assert seen == expected, f"{name}, entry {number}"
    return together


def check_all_alone(seeds: int) -> None:
    for seed in range(seeds):
        check_alone(seed)


@given(seed=st.integers(0, 10**9))
@settings(max_examples=25, deadline=None)
def test_an_adapter_gets_beside_others_what_it_gets_alone(seed: int) -> None:
    run = check_alone(seed)
    assert run.core.ledger.generated == 0  # nothing of them is counted as the base's


def test_batches_are_made_in_most_of_these_runs() -> None:
    batches = 0
    for seed in range(10):
        run = Run(seed, ["solver", "critic"])
        run.play(seed, 400)
        batches += sum(
            entry[0] == "batch"
            for player in run.players.values()
            for entry in player.log
            if isinstance(entry, tuple)
        )
    assert batches > 30


def replayed_and_loaded(run: Run, cut: float) -> Core:
    """Return a core that replays a run's events, and is saved and loaded after a share of them."""
    core = Core(BASE_RULES, survives_crashes=True)
    at = int(cut * len(run.records))
    for record in run.records[:at]:
        replay(record, core)
    loaded = Core(BASE_RULES, survives_crashes=True)
    load(save(core, is_replayed=True), loaded)
    assert digest(loaded, is_replayed=True) == digest(core, is_replayed=True)
    for record in run.records[at:]:
        replay(record, loaded)
    assert digest(loaded) == digest(run.core)
    return loaded


@given(seed=st.integers(0, 10**9), cut=st.floats(0, 1))
@settings(max_examples=10, deadline=None)
def test_a_replay_and_a_saved_state_have_every_adapters_state(seed: int, cut: float) -> None:
    run = Run(seed, ["solver", "critic"])
    run.play(seed, 150)
    replayed_and_loaded(run, cut)


def test_a_pause_of_an_adapter_stops_the_clocks_of_its_own_episodes() -> None:
    core = Core(BASE_RULES)
    core.handle(ev.EngineJoined("e", 0, 8))
    rules = Rules(policy=Synchronous(groups_per_batch=1), group_size=1)
    core.handle(ev.AdapterTrainingStarted("solver", record_of(rules)))
    core.handle(ev.AdapterReleased("solver", 1))

    def of_solver(event: ev.Event) -> list[ev.Command]:
        return core.handle(ev.ForAdapter("solver", event))

    assert ev.PauseGeneration(True, "solver") in of_solver(ev.GenerationHalted(True))
    assert ev.PauseGeneration(False, "solver") in of_solver(ev.GenerationHalted(False))


# ---------------------------------------------------------------- agents


class AgentsRun(Run):
    """A core whose ``solver`` episodes sample ``critic`` too, which has no tasks of its own."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, ["solver", "critic"], offering=())
        self.solver, self.critic = self.players["solver"], self.players["critic"]
        self.of(self.solver, ev.TasksOffered(agents=("critic",)))
        self.offering.add("solver")

    def act(self, command: ev.Command) -> None:
        super().act(command)
        if isinstance(command, ev.StartEpisode):
            for name, own in command.rollout.agents.items():
                self.players[name].running[own.rollout_id] = own

    def move(self, player: Player) -> None:
        if player is self.critic:
            admissible = self.core.of("critic").admissible_groups
            assert not self.core.of("critic").tasks.count
            assert admissible >= 0
        super().move(player)

    def end(self, number: int, reward: float | None) -> None:
        """End an episode of the solver: its agents' rollouts end just before it."""
        rollout = self.solver.running.pop(number)
        for own in rollout.agents.values():
            self.critic.running.pop(own.rollout_id, None)
        if reward is not None:
            self.do(ev.EpisodeReturned(number, reward, (("critic", 1.0 - reward),)))
        else:
            self.do(ev.EpisodeFailed(number, "raised", FailureCause.CODE, False))


def check_agents(run: AgentsRun) -> None:
    """Rollouts of agents run exactly as long as those whose episodes sample them."""
    for core, other in (("solver", "critic"), ("critic", "solver")):
        running = run.core.of(core).groups.running
        for rollout, group in running.values():
            partner = rollout.agents[other] if core == "solver" else rollout.home
            assert partner is not None
            assert partner.rollout_id in run.core.of(other).groups.running
            assert group.is_agents == (core == "critic")


@given(seed=st.integers(0, 10**9), cut=st.floats(0, 1))
@settings(max_examples=25, deadline=None)
def test_agents_begin_and_end_together_and_a_saved_state_keeps_them_so(
    seed: int, cut: float
) -> None:
    run = AgentsRun(seed)
    order = random.Random(f"agents {seed}")
    for _ in range(300):
        run.move(order.choice((run.solver, run.critic)))
        run.core.check()
        check_agents(run)
    loaded = replayed_and_loaded(run, cut)
    at_checkpoint = {
        name: (order.randint(each.handed.checkpointed, each.handed.count), each.tasks.offer)
        for name, each in loaded.trained_adapters.items()
    }
    loaded.handle(ev.RunResumed(0, -1, at_checkpoint))
    loaded.check()
    for rollout, group in loaded.of("critic").groups.running.values():
        assert rollout.home is not None
        assert group.home is not None
        assert rollout.home.rollout_id in loaded.of("solver").groups.running
    loaded.handle(ev.RunEnded())
    loaded.check()
    assert not loaded.running_rollouts


def check_agents_of_seeds(seeds: int) -> None:
    for seed in range(seeds):
        run, order = AgentsRun(seed), random.Random(seed)
        for _ in range(200):
            run.move(order.choice((run.solver, run.critic)))
            run.core.check()
            check_agents(run)


# ---------------------------------------------------------------- planted bugs


def _release_everywhere(core: Core, name: str, version: int) -> list[ev.Command]:
    core.adapters[name] = version
    commands: list[ev.Command] = []
    for other, trained in core.trained_adapters.items():
        core.turns.adapter_versions[other].release(version, core.turns.engines)
        commands += trained._on_published(ev.VersionPublished(version))
    return commands + core.turns.submit_waiting()


def _halt_everything(turns: TurnTracker, adapter: str, is_halted: bool) -> list[ev.Command]:
    commands: list[ev.Command] = []
    for other in turns.adapter_versions:
        if is_halted:
            turns.halted.add(other)
            commands += [ev.Cancel(*place) for place in turns._take_back(other)]
        else:
            turns.halted.discard(other)
    return commands if is_halted else turns.submit_waiting()


def _count_in_one_ledger(core: Core, event: ev.StepArrived) -> list[ev.Command]:
    outcome = core.turns.step(event)
    first = next(iter(core.trained_adapters.values()), core)
    first.ledger.sample(outcome.train_tokens)
    return outcome.commands


def _mix_groups(tracker: GroupTracker, groups: list[Any], *, oldest_trainable: int) -> list[Any]:
    others = [t for t in set(tracker.numbers.tracker_of.values()) if t is not tracker]
    for other in others:
        for group in list(other.ended)[:1]:
            groups.append(group)
            other._remove(group)
    return _train(
        tracker,
        groups[:-1] if others and len(groups) > 1 else groups,
        oldest_trainable=oldest_trainable,
    )


_train = GroupTracker.train


@pytest.mark.parametrize(
    ("where", "name", "bug"),
    [
        (Core, "_on_adapter_released", _release_everywhere),
        (TurnTracker, "halt", _halt_everything),
        (Core, "_on_step", _count_in_one_ledger),
        (GroupTracker, "train", _mix_groups),
    ],
    ids=["a publish of all", "a halt of all", "one ledger", "mixed batches"],
)
def test_cross_talk_between_adapters_is_noticed(
    where: type, name: str, bug: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, name, bug)
    with pytest.raises((AssertionError, KeyError)):
        check_all_alone(30)


def _discard_alone(core: Core, group: Group, reason: str) -> list[ev.Command]:
    return []


def _end_alone(
    tracker: GroupTracker, rollout: Rollout, ended: Rollout, reason: str
) -> list[ev.Command]:
    return []


def _admit_by_own_bound(core: Core) -> int:
    if core.are_tasks_exhausted or not core.versions.is_served:
        return 0
    return core.policy.admit(core.groups, training_groups=core.handed.num_groups)


@pytest.mark.parametrize(
    ("where", "name", "bug"),
    [
        (Core, "_discard_agents", _discard_alone),
        (GroupTracker, "end_agents", _end_alone),
        (Core, "_groups_within_bound", property(_admit_by_own_bound)),
    ],
    ids=["discarded alone", "failed alone", "admitted by one bound"],
)
def test_agents_that_do_not_follow_their_episodes_are_noticed(
    where: type, name: str, bug: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, name, bug)
    with pytest.raises((AssertionError, KeyError)):
        check_agents_of_seeds(40)
