"""Choice of the engine for each turn, from loads, with the routing and migration policies.

Every choice is derived from the engines and their turns, so nothing here is saved with the core: a
core that replays its events chooses the same engines.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from zlib import crc32

from tidegate.orchestrator.core.events import StepArrived
from tidegate.orchestrator.core.filing import TokenAppender
from tidegate.orchestrator.core.rollout import Turn
from tidegate.policies.migration import EngineView, MigrationPolicy, Move, RunningTurn
from tidegate.policies.routing import EngineLoads, LeastLoaded, RoutingPolicy, TurnToRoute
from tidegate.policies.speeds import EngineSpeeds
from tidegate.transport.media import MediaKind


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRules:
    """Policies that choose engines."""

    routing_policy: RoutingPolicy = field(default_factory=LeastLoaded)
    speeds: EngineSpeeds | None = None
    """Weights of engines' slots; None takes all engines for equally fast."""
    migration_policy: MigrationPolicy | None = None
    """Policy that moves running turns to other engines; None moves none."""


@dataclass(slots=True)
class EngineTurns:
    """One engine and the turns that it has."""

    weight_version: int
    max_running_turns: int
    epoch: int = 0
    submissions: dict[int, Turn] = field(default_factory=dict)
    """Turns sent to the engine, by handle."""
    missing: list[int] = field(default_factory=list)
    """Handles that the engine did not hold when it reconnected."""
    replay_until: int = 0
    """Seq at which a replay ends; turns that are in ``missing`` then were lost."""
    is_away: bool = False
    """Whether the engine has not reconnected yet after a resume."""
    speed: float = 1.0
    """Weight of each of the engine's slots in load comparisons."""
    media: tuple[MediaKind, ...] = ()
    """Kinds of media that its model reads."""
    is_draining: bool = False
    """Whether the engine is about to leave, and gets no more turns."""
    is_for_evaluation: bool = False
    """Whether the engine is kept for evaluations: it gets no turns of training, and its version
    does not count in the live one."""
    filing: TokenAppender = field(default_factory=TokenAppender)


class Placement:
    """Engines that can take turns, ordered by load.

    An engine can if it serves the live version or a newer one, and is not away, draining or kept
    for evaluations. So an engine that joined late gets its first turn once it has caught up.
    """

    def __init__(self, engines: dict[str, EngineTurns], rules: PlacementRules) -> None:
        self._engines = engines
        self._rules = rules
        self.watches_steps = rules.speeds is not None or rules.migration_policy is not None
        """Whether a policy reads engines' steps. Most runs have no such policy, and reading every
        step costs CPU time."""
        self._is_by_load = type(rules.routing_policy) is LeastLoaded
        """Whether routing is by load alone, so that nothing about the turn must be computed."""
        self._open: EngineLoads | None = None
        """Loads of engines that may get any turn; None if they must be recomputed."""
        self._reserved: frozenset[str] = frozenset()
        """Names of engines reserved for stragglers."""
        self._closed: frozenset[str] = frozenset()
        """Names of engines that are away, drain or are kept for evaluations."""
        self._open_reserved = EngineLoads()
        """Loads of reserved engines that may get turns."""

    # ------------------------------------------------------------ changes

    def forget(self) -> None:
        """Recompute all loads at the next choice, as engines joined, left or changed."""
        self._open = None

    def rank(self, name: str, live_version: int) -> None:
        """Update the load of one engine whose turns, weights or speed have changed."""
        loads = self._open
        if loads is None:
            return
        engine = self._engines[name]
        if name in self._reserved:
            loads = self._open_reserved
        if engine.weight_version >= live_version and name not in self._closed:
            loads.set(name, len(engine.submissions), engine.max_running_turns * engine.speed)
        else:
            loads.discard(name)

    def first_speed(self, name: str) -> float:
        """Return the initial speed of an engine that is about to join."""
        speeds = self._rules.speeds
        return speeds.first(name, [e.speed for e in self._engines.values()]) if speeds else 1.0

    def measure(self, event: StepArrived, live_version: int) -> None:
        """Update an engine's speed from a step."""
        speeds, engine = self._rules.speeds, self._engines[event.engine]
        if speeds is None:
            return
        speed = speeds.after_step(
            engine.speed,
            rows=len(event.turns),
            tokens=len(event.token_ids),
            busy_us=event.busy_us,
        )
        if speed != engine.speed:
            engine.speed = speed
            self.rank(event.engine, live_version)

    def _loads(self, live_version: int) -> EngineLoads:
        if self._open is None:
            self._open, self._open_reserved = EngineLoads(), EngineLoads()
            policy = self._rules.migration_policy
            names = sorted(
                name
                for name, e in self._engines.items()
                if not e.is_draining and not e.is_for_evaluation
            )
            reserved = policy.reserve(names) if policy else ()
            self._reserved = frozenset(reserved)
            self._closed = frozenset(
                name
                for name, e in self._engines.items()
                if e.is_away or e.is_draining or e.is_for_evaluation
            )
            for name in self._engines:
                self.rank(name, live_version)
        return self._open

    # ------------------------------------------------------------ choosing

    def has_any(self, live_version: int) -> bool:
        """Whether any engine can take a turn now."""
        return bool(self._loads(live_version).names or self._open_reserved.names)

    def is_open(self, name: str, live_version: int) -> bool:
        """Whether this engine can take turns now."""
        loads = self._loads(live_version)
        return name in (self._open_reserved if name in self._reserved else loads)

    def choose(
        self, turn: Turn, number: int, live_version: int, behind: Collection[str] = ()
    ) -> str | None:
        """Return the engine for a turn that is on no engine; None if no engine can take it now.

        ``behind``: engines that serve too old a version of the turn's adapter.
        """
        loads = self._open or self._loads(live_version)
        if behind or (turn.rollout.may_have_media and turn.rollout.media):
            loads = self._loads_for(turn, live_version, behind)
            return loads.least() if self._is_by_load else self._routed(turn, number, loads)
        if self._reserved:
            reserved = self._open_reserved.least()
            if reserved is not None and (not loads.names or self._takes(reserved, turn)):
                return reserved
        if self._is_by_load:
            return loads.least()
        return self._routed(turn, number, loads)

    def choose_pinned(self, version: int) -> str | None:
        """Return the engine for a turn that ``version`` must sample: the least loaded that is kept
        for evaluations and serves it; None if there is none."""
        loads = EngineLoads()
        for name, engine in self._engines.items():
            is_closed = engine.is_away or engine.is_draining
            if engine.is_for_evaluation and engine.weight_version == version and not is_closed:
                loads.set(name, len(engine.submissions), engine.max_running_turns * engine.speed)
        return loads.least()

    def _routed(self, turn: Turn, number: int, loads: EngineLoads) -> str | None:
        group_id, kv_engine = turn.rollout.group_id, _kv_engine(turn)
        to_route = TurnToRoute(number=number, group_id=group_id, kv_engine=kv_engine)
        return self._rules.routing_policy.choose(loads, to_route)

    def takes_media(self, name: str, turn: Turn) -> bool:
        """Whether an engine reads all media of a turn's context."""
        return {each.kind for each in turn.rollout.media} <= {*self._engines[name].media}

    def _loads_for(self, turn: Turn, live_version: int, behind: Collection[str]) -> EngineLoads:
        """Return the loads of engines that read a turn's media and are not ``behind``, reserved
        engines included, because few engines may be left. Computed per turn, which is rare."""
        loads = EngineLoads()
        for name, engine in self._engines.items():
            if name in behind or not self.is_open(name, live_version):
                continue
            if self.takes_media(name, turn):
                capacity = engine.max_running_turns * engine.speed
                loads.set(name, len(engine.submissions), capacity)
        return loads

    def _takes(self, reserved: str, turn: Turn) -> bool:
        policy = self._rules.migration_policy
        num_turns = len(self._engines[reserved].submissions)
        return policy is not None and policy.takes(tokens=turn.length, num_turns=num_turns)

    # ------------------------------------------------------------ moving

    def moves(self, event: StepArrived, live_version: int) -> list[Move]:
        """Return the turns to move, if this step is one at which all turns are checked.

        With E engines, each triggers a check once in ``check_steps * E`` of its steps, and each at
        other steps. So all turns are checked about once in ``check_steps`` steps of an engine, even
        if some engines are idle.
        """
        policy = self._rules.migration_policy
        if policy is None:
            return []
        interval = policy.check_steps * len(self._engines)
        if (event.seq + crc32(event.engine.encode())) % interval:
            return []
        self._loads(live_version)
        names = sorted(n for n, engine in self._engines.items() if not engine.is_for_evaluation)
        return policy.moves([self._view(name, live_version) for name in names])

    def _view(self, name: str, live_version: int) -> EngineView:
        engine = self._engines[name]
        return EngineView(
            name=name,
            is_reserved=name in self._reserved,
            is_open=self.is_open(name, live_version),
            num_turns=len(engine.submissions),
            turns=_running(engine),
        )


def _running(engine: EngineTurns) -> Iterator[RunningTurn]:
    for handle, turn in engine.submissions.items():
        yield RunningTurn(handle, turn.priority, turn.length)


def _kv_engine(turn: Turn) -> str | None:
    """Return the engine that sampled the rollout's last tokens, in this turn or the one before."""
    for earlier in reversed(turn.rollout.turns[-2:]):
        if earlier.runs:
            return earlier.runs[-1].engine
    return None
