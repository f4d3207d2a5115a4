"""Pauses of all engines: the mode that they should be in, and which engines have confirmed it.

:class:`tidegate.orchestrator.core.weight_control.WeightControl` has one :class:`PauseControl`. A
pause is a state of the run, not a count: the newest request holds, and one resume ends it. Pauses,
resumes and swaps run one after another. Each engine's ``PauseGate`` carries the pause out.
"""

from collections.abc import Callable

from tidegate.orchestrator.core.control_events import Outgoing, SuspendDeadlines
from tidegate.orchestrator.core.control_state import ControlState, Steps, Turns, Wait
from tidegate.transport.messages import Pause, PauseMode, Resume, TurnsPaused, TurnsResumed


class PauseControl:
    """Requested pause of all engines, and their confirmations."""

    def __init__(
        self, state: ControlState, *, is_swapping: Callable[[], bool], timeout_s: float
    ) -> None:
        """``is_swapping``: whether an engine was sent ``finish`` and has not confirmed the swap.
        ``timeout_s``: time limit of a pause or resume."""
        self._state = state
        self._is_swapping = is_swapping
        self._timeout_s = timeout_s
        self.mode: PauseMode | None = None
        """Mode of the last pause sent to engines; None after a resume."""
        self._clears_cache = False
        self.users_mode: PauseMode | None = None
        self.sleeping_mode: PauseMode | None = None
        """Mode in which engines were paused for a sleep; None once they are to be awake."""
        self.is_policy_halted = False
        """Whether the staleness policy pauses the engines."""
        self.bad_until: int | None = None
        """Newest version that a rollback takes back: engines are paused until a newer one is live.
        None if they serve good weights."""
        self._turns = Turns()
        self.is_under_way = False
        """Whether a pause or resume is under way, so that no ``finish`` may be sent."""
        self._unsettled: set[str] = set()
        """Engines that have not confirmed the last pause or resume."""

    @property
    def is_pausing(self) -> bool:
        """Whether engines are paused, or a pause or resume is under way."""
        return self.mode is not None or self.is_under_way

    def is_paused(self, engine: str) -> bool:
        """Whether an engine has confirmed the pause."""
        return self.mode is not None and engine not in self._unsettled

    def apply(self, *, clear_cache: bool = False) -> Steps[None]:
        """Pause or resume all engines, as is requested now.

        The pause of a rollback or of the policy has precedence, then a sleep's, then the user's.
        """
        is_halted = self.is_policy_halted or self.bad_until is not None
        mode = "abort" if is_halted else self.sleeping_mode or self.users_mode
        with self._turns.queued() as turn:
            yield turn
            self.is_under_way = True
            try:
                yield Wait(lambda: not self._is_swapping())
                if mode is not None or self.mode is not None:
                    yield from self._change(mode, clear_cache)
            finally:
                self.is_under_way = False

    def _change(self, mode: PauseMode | None, clear_cache: bool) -> Steps[None]:
        self.mode, self._clears_cache = mode, clear_cache
        engines = sorted(self._state.engines)
        self._unsettled = set(engines)
        self._state.command(SuspendDeadlines(mode is not None))
        self._state.send([message for name in engines for message in self._messages(name)])
        # Mode "wait" takes as long as the longest turn.
        is_late = yield Wait(
            lambda: not self._unsettled, None if mode == "wait" else self._timeout_s
        )
        if is_late:
            state = "resumed" if mode is None else f"paused by mode {mode!r}"
            why = f"it has not {state} within {self._timeout_s:.0f} s"
            self._state.give_up(sorted(self._unsettled), why)

    def _messages(self, name: str) -> Outgoing:
        if self.mode is not None:
            return [(name, Pause(mode=self.mode, clear_cache=self._clears_cache))]
        self._state.engines[name].resumes_due += 1
        return [(name, Resume())]

    # ------------------------------------------------------------ engines

    def join(self, name: str) -> Outgoing:
        """Return the messages to an engine that joins: it must be paused before it gets turns."""
        if self.mode is None:
            return []
        self._unsettled.add(name)
        return self._messages(name)

    def remove(self, name: str) -> None:
        """Wait for an engine no longer."""
        self._unsettled.discard(name)

    def on_reply(self, name: str, message: TurnsPaused | TurnsResumed) -> None:
        """Record an engine's confirmation of a pause or resume."""
        engine = self._state.engines.get(name)
        if engine is None:
            return
        if isinstance(message, TurnsPaused):
            if message.mode == self.mode and not engine.resumes_due:
                self._unsettled.discard(name)
        elif engine.resumes_due:
            engine.resumes_due -= 1
            if self.mode is None and not engine.resumes_due:
                self._unsettled.discard(name)
