"""Sleep of all engines: the memory that should sleep, and which engines have carried it out.

:class:`tidegate.orchestrator.core.weight_control.WeightControl` has one :class:`SleepControl`.
Engines are paused before they sleep and resumed after they wake. Engines that have dropped their
weights get the next version published, or, once all memory is to be awake, the version released
last.
"""

from collections.abc import Iterable
from typing import Literal

from tidegate.errors import ConfigError, SleepFailed
from tidegate.orchestrator.core.control_events import Outgoing, SleepRequested, WakeRequested
from tidegate.orchestrator.core.control_state import (
    ControlledEngine,
    ControlState,
    Steps,
    Turns,
    Wait,
)
from tidegate.orchestrator.core.pause_control import PauseControl
from tidegate.orchestrator.core.weight_versions import WeightVersions
from tidegate.transport.messages import WeightsLive
from tidegate.transport.sleep_messages import (
    MEMORY_TAGS,
    Asleep,
    Awake,
    MemoryTag,
    Sleep,
    SleepLevel,
    SleepRequestFailed,
    Wake,
)

SleepReply = Asleep | Awake | SleepRequestFailed

NO_WHOLE_SET = (
    "engines that drop their weights can't get them back, because only parts of a set were "
    "published so far; publish a whole state dict once, or sleep at level 1"
)
NO_WEIGHTS = "it has dropped its weights, and no published weights fit it"


class SleepControl:
    """Requested sleep of all engines, and their replies."""

    def __init__(
        self,
        state: ControlState,
        pauses: PauseControl,
        versions: WeightVersions,
        *,
        timeout_s: float,
    ) -> None:
        """``timeout_s``: time limit of a sleep or a wake."""
        self._state, self._pauses, self._versions = state, pauses, versions
        self._timeout_s = timeout_s
        self._tags: set[MemoryTag] = set()
        """Memory that is to sleep on every engine."""
        self.level: SleepLevel = 1
        """Level at which the memory sleeps."""
        self._turns = Turns()
        self._slept_version = -1
        """Newest version released when engines were put to sleep: later ones replace
        their weights."""
        self._requests = 0
        """Number of sleep and wake messages so far."""
        self._is_restoring = False
        """Whether a wake has engines without weights stage the version released last."""

    @property
    def asleep(self) -> tuple[MemoryTag, ...]:
        """Memory that sleeps on all engines, or is about to sleep."""
        return tuple(_in_order(self._tags))

    @property
    def is_publish_expected(self) -> bool:
        """Whether engines without weights wait for the trainer's next publish: from their sleep
        until all memory is to be awake."""
        return self._pauses.sleeping_mode is not None and not self._is_restoring

    # ------------------------------------------------------------ calls

    def sleep(self, event: SleepRequested) -> Steps[int]:
        """Pause the engines and put them to sleep; return the bytes freed."""
        if (why := self._refusal(event)) is not None:
            raise ConfigError(why)
        state, versions = self._state, self._versions
        with self._turns.queued() as turn:
            yield turn
            self._pauses.sleeping_mode = event.mode
            yield from self._pauses.apply()
            yield Wait(lambda: versions.is_settled and state.reserved_for is None)
            state.reserved_for = versions.name  # no publish begins meanwhile
            try:
                self._slept_version = versions.newest_version
                is_deeper = "weights" in self._tags and self.level > event.level
                if not is_deeper:
                    self.level = event.level
                self._tags |= set(event.tags)
                for engine in state.engines.values():
                    engine.freed_bytes, engine.has_new_weights = 0, False
                yield from self._request("sleep")
            finally:
                state.reserved_for = None
        return sum(engine.freed_bytes for engine in state.engines.values())

    def _refusal(self, event: SleepRequested) -> str | None:
        """Return why engines can't sleep as requested; None if they can."""
        level, engines = event.level, self._state.engines
        unable = sorted(n for n, engine in engines.items() if level not in engine.levels)
        if unable:
            return (
                f"{', '.join(unable)} can't sleep at level {level}. Tidegate's own engines can, "
                f"vLLM with --enable-sleep-mode, SGLang with --enable-memory-saver (level 1: and "
                f"--enable-weights-cpu-backup); else pause()"
            )
        has_whole = self._versions.has_whole_set
        return None if has_whole or level == 1 or "weights" not in event.tags else NO_WHOLE_SET

    def wake(self, event: WakeRequested) -> Steps[None]:
        """Wake the memory; once nothing sleeps, bring back dropped weights and resume."""
        with self._turns.queued() as turn:
            yield turn
            self._tags -= set(event.tags)
            yield from self._request("wake")
            if self._tags or self._pauses.sleeping_mode is None:
                return
            self._is_restoring = True
            try:
                yield from self._restore_weights()
            finally:
                self._is_restoring = False
            self._pauses.sleeping_mode = None
            yield from self._pauses.apply()

    def _request(self, what: Literal["sleep", "wake"]) -> Steps[None]:
        """Request what is missing from each engine, and wait for the answers."""
        engines = self._state.engines
        for engine in engines.values():
            engine.failure = None
        self.send_requests()
        is_late = yield Wait(lambda: not self._unsettled, self._timeout_s)
        if is_late:
            self._state.give_up(self._unsettled, f"no {what} within {self._timeout_s:.0f} s")
        failures = {n: e.failure for n, e in engines.items() if e.failure is not None}
        if failures:
            raise SleepFailed(what=what, failures=failures)

    def _restore_weights(self) -> Steps[None]:
        """Have engines without weights stage the newest version, also after a failure."""
        for engine in self._without_weights:
            self._versions.catch_up(engine)
        is_late = yield Wait(
            lambda: bool(self._without_update) or not self._without_weights, self._timeout_s
        )
        if is_late:
            why = f"no weights within {self._timeout_s:.0f} s of waking"
            self._state.give_up(self._without_weights, why)
        elif self._without_update:
            failures = dict.fromkeys(self._without_weights, NO_WEIGHTS)
            raise SleepFailed(what="wake", failures=failures)

    @property
    def _without_weights(self) -> list[str]:
        """Engines that need a whole update before they can serve."""
        return sorted(name for name, engine in self._state.engines.items() if engine.needs_weights)

    @property
    def _without_update(self) -> list[str]:
        """Engines without weights that stage no version."""
        return [name for name in self._without_weights if not self._versions.is_pending_on(name)]

    # ------------------------------------------------------------ engines

    def send_requests(self, only: str | None = None) -> None:
        """Send each engine the sleep or wake request that it needs and can carry out now.

        ``only`` restricts this to one engine while nothing is to sleep: a publish to a thousand
        engines has two thousand replies, and each calls this function.
        """
        outgoing: Outgoing = []
        engines = self._state.engines
        for name in sorted(engines) if only is None or self._tags else (only,):
            engine = engines.get(name)
            if engine is None or engine.request_id is not None or engine.failure is not None:
                continue
            request = self._next_request(engine)
            if isinstance(request, Wake) or (request is not None and self._may_sleep(name)):
                engine.request_id, engine.requested_level = request.request_id, self.level
                self._requests += 1
                outgoing.append((name, request))
        self._state.send(outgoing)

    def _may_sleep(self, name: str) -> bool:
        """Whether an engine is paused and no update of it is under way."""
        return self._pauses.is_paused(name) and not self._versions.is_pending_on(name)

    def _next_request(self, engine: ControlledEngine) -> Sleep | Wake | None:
        """Return the request that an engine needs next; None if it sleeps and wakes as wanted."""
        request_id, level = self._requests, self.level
        if extra := engine.asleep - self._tags:
            return Wake(request_id=request_id, tags=_in_order(extra))
        tags = self._tags - {"weights"} if engine.has_new_weights else self._tags
        is_done = tags == engine.asleep and engine.level == level
        if not tags or is_done or level not in engine.levels:
            return None
        return Sleep(request_id=request_id, level=level, tags=_in_order(tags))

    @property
    def _unsettled(self) -> list[str]:
        """Engines that need or were sent a sleep or wake request, and have not failed."""
        return sorted(
            name
            for name, engine in self._state.engines.items()
            if engine.request_id is not None
            or (engine.failure is None and self._next_request(engine))
        )

    def on_reply(self, name: str, message: SleepReply) -> None:
        """Record an engine's answer to a sleep or wake request."""
        engine = self._state.engines.get(name)
        if engine is None or message.request_id != engine.request_id:
            return  # a reply to a request of an earlier connection
        engine.request_id = None
        match message:
            case Asleep(tags=tags, freed_bytes=returned):
                engine.asleep, engine.level = set(tags), engine.requested_level
                engine.freed_bytes += returned
            case Awake(tags=tags, needs_weights=needs_weights):
                engine.asleep, engine.needs_weights = set(tags), needs_weights
            case SleepRequestFailed(message=why):
                engine.failure = why

    def on_swapped(self, name: str, message: WeightsLive) -> None:
        """Record that an engine has swapped: its weights neither sleep nor are missing."""
        if (engine := self._state.engines.get(name)) is not None:
            engine.needs_weights = False
            engine.asleep.discard("weights")
            engine.has_new_weights |= message.version > self._slept_version
            self.forget_weights_target()

    def forget_weights_target(self) -> None:
        """Once all engines have new weights, no longer put joining engines' weights to sleep."""
        engines = self._state.engines.values()
        if "weights" in self._tags and engines and all(each.has_new_weights for each in engines):
            self._tags.discard("weights")


def _in_order(tags: Iterable[MemoryTag]) -> list[MemoryTag]:
    return [tag for tag in MEMORY_TAGS if tag in set(tags)]
