"""Engines, calls and commands that the versions, pauses and sleep of one run share.

A trainer's call is a generator: it yields a :class:`Wait` where it waits, and returns its result or
raises its error. A cancelled call is closed, so its ``finally`` blocks undo what it has begun.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from tidegate.errors import TidegateError
from tidegate.orchestrator.core.control_events import (
    Command,
    GiveUp,
    Outgoing,
    Resolve,
    Send,
    SetTimer,
    StopTimer,
)
from tidegate.transport.messages import StartWeightUpdate
from tidegate.transport.sleep_messages import MemoryTag, SleepLevel

Result = TypeVar("Result")

NextVersion = Callable[[str], int]
"""Returns the number after the newest released version of an adapter, or (empty name) of the run's
weights, as of the commands that were carried out."""

NO_VERSION = -1
"""Served version of an engine that has dropped its weights."""


@dataclass(slots=True)
class ControlledEngine:
    """State of one engine."""

    version: int
    """Version that the engine serves, if it has weights."""
    newest_finish: int = NO_VERSION
    """Newest version for which the engine was sent ``finish``; the engine may have swapped without
    having confirmed."""
    levels: Sequence[int] = ()
    """Sleep levels that the engine supports."""
    asleep: set[MemoryTag] = field(default_factory=set)
    level: SleepLevel | None = None
    """Level at which the engine sleeps; None if awake, or if another process put it to sleep."""
    needs_weights: bool = False
    """Whether the engine has dropped its weights, so that only an update can restore them."""
    has_new_weights: bool = False
    """Whether the engine serves weights that it got after its own were put to sleep."""
    request_id: int | None = None
    """Id of the sleep or wake request that the engine has not answered yet."""
    requested_level: SleepLevel | None = None
    freed_bytes: int = 0
    failure: str | None = None
    """Reason for which the last sleep or wake request failed."""
    resumes_due: int = 0
    """Number of unconfirmed resumes. Confirmations of pauses sent before them are outdated."""
    unanswered_starts: list[int] = field(default_factory=list)
    """Versions of the ``start`` messages that the engine has not answered, in sending order."""

    @property
    def served_version(self) -> int:
        """Version that the engine can serve now; NO_VERSION without weights."""
        return NO_VERSION if self.needs_weights else self.version

    @property
    def is_swapping(self) -> bool:
        """Whether the engine may serve a later version than :attr:`version`."""
        return self.newest_finish > self.version

    @property
    def base_version(self) -> int | None:
        """Version that a partial publish can change; None if a whole set is needed."""
        return None if "weights" in self.asleep else self.served_version

    def start_message(self, version: int) -> StartWeightUpdate:
        """Make and count the message that begins a version."""
        if not self.unanswered_starts or self.unanswered_starts[-1] != version:
            self.unanswered_starts.append(version)
        return StartWeightUpdate(version=version)

    def is_outdated(self, version: int) -> bool:
        """Whether a reply belongs to an earlier ``start`` of ``version`` than the newest.

        An engine answers each start once and in order, except that two successive starts of the
        same version have one reply.
        """
        if version in self.unanswered_starts:
            del self.unanswered_starts[: self.unanswered_starts.index(version) + 1]
        return version in self.unanswered_starts


@dataclass(frozen=True, slots=True)
class Wait:
    """A condition that a call waits for. The call learns whether its time limit passed first."""

    is_met: Callable[[], bool]
    timeout_s: float | None = None


Steps = Generator[Wait, bool, Result]
"""A call: yields what it waits for, is sent whether it is late, and returns its result."""


@dataclass(slots=True, eq=False)
class _Call:
    """A call that has not ended."""

    call_id: int
    steps: Steps[object]
    is_shielded: bool
    """Whether the call goes on if its caller is cancelled."""
    is_alone: bool
    """Whether the caller has returned or is gone."""
    wait: Wait | None = None


class ControlState:
    """State that versions, pauses and sleep share: engines, calls, and commands to carry out."""

    def __init__(self) -> None:
        self.engines: dict[str, ControlledEngine] = {}
        """Engines by name, in the order in which they joined."""
        self.on_given_up: Callable[[str], None] = lambda engine: None
        """Called with the name of each engine that :meth:`give_up` removes."""
        self.reserved_for: str | None = None
        """Target of the version that the weight channel is reserved for, or the run's weights while
        engines are put to sleep; None if the channel is free."""
        self.failure: TidegateError | None = None
        """Error of a call whose caller had returned already, until another call raises it."""
        self._commands: list[Command] = []
        self._calls: dict[int, _Call] = {}
        """Calls that wait, in the order in which they began to."""

    # ------------------------------------------------------------ commands

    def command(self, *commands: Command) -> None:
        """Add commands to carry out."""
        self._commands += commands

    def send(self, outgoing: Outgoing) -> None:
        """Send messages to engines."""
        if outgoing:
            self._commands.append(Send(outgoing))

    def give_up(self, engines: Iterable[str], why: str) -> None:
        """Remove engines that did not reply in time."""
        for engine in engines:
            self.on_given_up(engine)
            self.command(GiveUp(engine, why))

    def take_commands(self) -> list[Command]:
        """Return the commands to carry out, in order."""
        commands, self._commands = self._commands, []
        return commands

    def take_failure(self) -> TidegateError | None:
        """Return and clear the error of a call whose caller had returned."""
        failure, self.failure = self.failure, None
        return failure

    # ------------------------------------------------------------ calls

    def begin(
        self,
        call_id: int,
        steps: Steps[object],
        *,
        is_shielded: bool = False,
        is_alone: bool = False,
    ) -> None:
        """Begin a call. ``is_shielded``: it goes on if its caller is cancelled; ``is_alone``: it
        has no caller."""
        self._run(_Call(call_id, steps, is_shielded, is_alone))

    def end(self, call_id: int, value: object = None, error: TidegateError | None = None) -> None:
        """Return to a call's caller."""
        self.command(Resolve(call_id, value, error))

    def continue_ready_call(self) -> bool:
        """Continue the first call whose condition holds now; return False if there is none."""
        for call in self._calls.values():
            if call.wait is not None and call.wait.is_met():
                self._run(self._take(call))
                return True
        return False

    def on_timer(self, call_id: int) -> None:
        """Continue a call whose time limit has passed."""
        if (call := self._calls.get(call_id)) is not None:
            self._run(self._take(call), is_late=True)

    def cancel(self, call_id: int) -> bool:
        """End a call whose caller was cancelled, unless it is shielded; False if there is none."""
        call = self._calls.get(call_id)
        if call is None:
            return False
        call.is_alone = True
        if not call.is_shielded:
            self._take(call).steps.close()
        return True

    def _take(self, call: _Call) -> _Call:
        del self._calls[call.call_id]
        if call.wait is not None and call.wait.timeout_s is not None:
            self.command(StopTimer(call.call_id))
        return call

    def _run(self, call: _Call, *, is_late: bool = False) -> None:
        try:
            wait = next(call.steps) if call.wait is None else call.steps.send(is_late)
            while wait.is_met():
                wait = call.steps.send(False)
        except StopIteration as ended:
            if not call.is_alone:
                self.end(call.call_id, ended.value)
        except TidegateError as error:
            if call.is_alone:
                self.failure = error
            else:
                self.end(call.call_id, error=error)
        else:
            call.wait = wait
            self._calls[call.call_id] = call
            if wait.timeout_s is not None:
                self.command(SetTimer(call.call_id, wait.timeout_s))


class Turns:
    """Runs calls of one kind one after another: pauses and resumes, or sleeps and wakes."""

    def __init__(self) -> None:
        self._calls: deque[object] = deque()

    @contextmanager
    def queued(self) -> Iterator[Wait]:
        """Queue a call; its turn has come when the returned condition is met."""
        call = object()
        self._calls.append(call)
        try:
            yield Wait(lambda: self._calls[0] is call)
        finally:
            self._calls.remove(call)
