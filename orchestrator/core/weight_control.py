"""Sans-IO state machine of weight updates, pauses and sleep on all engines.

:class:`tidegate.orchestrator.weight_sync.control.EngineControl` feeds :class:`WeightControl` events
(an engine joined, left or replied; a trainer's call; a timer) and carries out its commands (send
messages, resolve a call, set a timer, remove an engine). The state machine does no I/O and reads no
clock. Its parts decide on versions, pauses and sleep; they share one :class:`ControlState`.
"""

from collections.abc import Collection

from tidegate.orchestrator.core.adapter_versions import Adapters
from tidegate.orchestrator.core.control_events import (
    CallCancelled,
    Command,
    ControlReply,
    ControlReplyReceived,
    EngineConnected,
    EngineHaltRequested,
    EngineRemoved,
    Event,
    HoldBatches,
    KvPolicyChosen,
    PauseRequested,
    PinChanged,
    PublishRequested,
    RecordSwap,
    RefuseEngine,
    ReserveAbandoned,
    ReserveRequested,
    SleepRequested,
    TimerFired,
    UnloadRequested,
    VersionDurable,
    VersionsRetracted,
    WakeRequested,
)
from tidegate.orchestrator.core.control_state import ControlledEngine, ControlState, NextVersion
from tidegate.orchestrator.core.pause_control import PauseControl
from tidegate.orchestrator.core.sleep_control import SleepControl
from tidegate.orchestrator.core.target_versions import TargetVersions
from tidegate.orchestrator.core.weight_versions import WeightVersions
from tidegate.transport.message import SwapMode
from tidegate.transport.messages import (
    AdapterFailed,
    AdapterLive,
    AdapterLoaded,
    AdapterNeeded,
    InitWeights,
    TurnsPaused,
    TurnsResumed,
    WeightsFailed,
    WeightsLive,
    WeightsStaged,
)


class WeightControl:
    """Requested weights, pause and sleep of all engines. The state changes only through
    :meth:`handle`."""

    def __init__(
        self,
        init: InitWeights,
        *,
        swap_mode: SwapMode,
        wave_engines: int | None = None,
        weight_update_timeout_s: float = 60.0,
        pause_timeout_s: float = 60.0,
        next_version: NextVersion,
        released_adapters: Collection[str] = (),
    ) -> None:
        """``wave_engines``: number of engines that swap at a time; None for all at once.
        ``weight_update_timeout_s``: time limit of a version, a sleep or a wake;
        ``pause_timeout_s``: of a pause or resume. ``released_adapters``: adapters of which the run
        has versions, which after a resume includes those not published again."""
        self._init = init
        self.shared = state = ControlState()
        state.on_given_up = self._remove
        self.pauses = PauseControl(
            state, is_swapping=lambda: self.weights.is_swapping, timeout_s=pause_timeout_s
        )
        self.weights = WeightVersions(
            state,
            self.pauses,
            swap_mode,
            wave_engines=wave_engines,
            timeout_s=weight_update_timeout_s,
            next_version=next_version,
        )
        self.sleeps = SleepControl(
            state, self.pauses, self.weights, timeout_s=weight_update_timeout_s
        )

        self.adapters = Adapters(
            state,
            self.weights,
            swap_mode,
            timeout_s=weight_update_timeout_s,
            next_version=next_version,
            released=released_adapters,
        )

    def _of(self, adapter: str) -> TargetVersions | None:
        return self.adapters.get(adapter) if adapter else self.weights

    def handle(self, event: Event) -> list[Command]:
        """Apply one event and return the commands that follow from it, in order."""
        only: str | None = None
        match event:
            case ControlReplyReceived(engine=engine, message=message):
                only = engine
                self._on_reply(engine, message)
            case EngineConnected(engine=engine):
                only = engine
                self._on_connected(event)
            case EngineRemoved(engine=engine, keeps_adapters=keeps_adapters):
                only = engine
                self._remove(engine, keeps_adapters=keeps_adapters)
            case VersionDurable(version=version, adapter=adapter):
                if (versions := self._of(adapter)) is not None:
                    versions.on_durable(version)
            case TimerFired(timer=int() as call):
                self.shared.on_timer(call)
            case TimerFired(timer=str() as adapter):
                if (versions := self._of(adapter)) is not None:
                    versions.on_timer()
            case VersionsRetracted():
                self.weights.on_retracted()
            case KvPolicyChosen(kv_policy=kv_policy):
                self.weights.choose_kv_policy(kv_policy)
            case _:
                self._on_call(event)
        self._advance(only)
        while self.shared.continue_ready_call():
            self._advance()
        return self.shared.take_commands()

    def _on_call(self, event: Event) -> None:
        state, pauses = self.shared, self.pauses
        match event:
            case CallCancelled(call=call):
                if not (state.cancel(call) or self.weights.cancel(call)):
                    self.adapters.cancel(call)
            case ReserveRequested(call=call, adapter=""):
                state.begin(call, self.weights.reserve(event))
            case ReserveRequested(call=call):
                state.begin(call, self.adapters.reserve(event))
            case PublishRequested(adapter=""):
                self.weights.publish(event)
            case PublishRequested():
                self.adapters.publish(event)
            case ReserveAbandoned(adapter=""):
                self.weights.unreserve()
            case ReserveAbandoned():
                state.reserved_for = None
            case PinChanged(adapter=name, version=version, is_pinned=is_pinned):
                if (adapter := self.adapters.get(name)) is not None:
                    adapter.pin(version, is_pinned)
            case UnloadRequested(adapter=name):
                self.adapters.unload(name)
            case PauseRequested(call=call, mode=mode, clear_cache=clear_cache):
                pauses.users_mode = mode
                state.begin(call, pauses.apply(clear_cache=clear_cache))
            case EngineHaltRequested(call=call, is_halted=is_halted):
                pauses.is_policy_halted = is_halted
                state.begin(call, pauses.apply())
            case SleepRequested(call=call):
                state.begin(call, self.sleeps.sleep(event))
            case WakeRequested(call=call):
                state.begin(call, self.sleeps.wake(event))

    def _advance(self, only: str | None = None) -> None:
        """Send everything that is due; ``only``: the only engine whose state has changed."""
        self.sleeps.send_requests(only)
        self.weights.advance()
        self.adapters.advance()
        is_reserved = self.shared.reserved_for == self.weights.name
        self.shared.command(HoldBatches(is_reserved or self.weights.is_undecided))

    def may_leave(self, engine: str) -> bool:
        """Whether an engine is in no version, pause or sleep, so that it can leave and rejoin."""
        is_quiet = not (self.pauses.is_pausing or self.sleeps.asleep)
        is_pending = self.weights.is_pending_on(engine)
        return engine in self.shared.engines and is_quiet and not is_pending

    # ------------------------------------------------------------ engines

    def _on_connected(self, event: EngineConnected) -> None:
        name, memory = event.engine, event.memory
        self._remove(name, keeps_adapters=True)
        engine = self.shared.engines[name] = ControlledEngine(event.version)
        if memory is not None:
            engine.levels, engine.asleep = memory.levels, set(memory.asleep)
            engine.needs_weights = memory.needs_weights
        self.shared.send([*self.pauses.join(name), (name, self._init)])
        self.weights.join(name)
        if event.adapters is not None:
            self.adapters.join(name, event.adapters)

    def _remove(self, name: str, *, keeps_adapters: bool = False) -> None:
        self.shared.engines.pop(name, None)
        self.pauses.remove(name)
        self.weights.remove(name)
        self.sleeps.forget_weights_target()
        if not keeps_adapters:
            self.adapters.remove(name)

    def _on_reply(self, name: str, message: ControlReply) -> None:
        state, weights = self.shared, self.weights
        match message:
            case AdapterLoaded() | AdapterFailed() | AdapterLive() | AdapterNeeded():
                self.adapters.on_reply(name, message)
                return
            case WeightsStaged(version=version):
                weights.on_staged(name, version)
            case WeightsLive(version=version):
                weights.on_live(name, version)
                self.sleeps.on_swapped(name, message)
                state.command(RecordSwap(name, message))
            case WeightsFailed(version=version, message=why):
                if weights.on_refused(name, version, why):
                    self._remove(name)
                    state.command(RefuseEngine(name, why))
            case TurnsPaused() | TurnsResumed():
                self.pauses.on_reply(name, message)
            case _:
                self.sleeps.on_reply(name, message)
        engine = state.engines.get(name)
        if engine is None or not (engine.needs_weights and self.sleeps.is_publish_expected):
            weights.catch_up(name)
