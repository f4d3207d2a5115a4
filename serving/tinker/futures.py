"""Results of requests that are carried out after they were answered with a ``request_id``.

``retrieve_future`` waits here for a result, by an asyncio event: nothing polls.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from tidegate.errors import RunClosed, TidegateError
from tidegate.serving.http.errors import ApiError
from tidegate.serving.tinker.training import UserError

POLL_TIMEOUT_S = 40.0
"""Longest wait of one ``retrieve_future``: the SDK waits for its answer for up to 45 s."""

KEPT_AFTER_READ_S = 60.0
"""Time for which a result that was read is kept, because its answer may be lost on the way."""

AWAITED_S = 60.0
"""Time after its end in which a request's client most likely reads the result, even if it waits
before it tries again, because the server was down."""

KEPT_UNREAD_S = 3600.0
"""Time for which an unread result is kept."""

Encode = Callable[[bool], bytes]
"""Returns the body of a result: protobuf if the argument is true and the result has that form."""


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """Why a request has failed."""

    message: str
    category: Literal["user", "server"]


@dataclass(frozen=True, slots=True)
class RequestSuccess:
    """Result of a request."""

    encode: Encode
    has_protobuf: bool = False


Outcome = RequestSuccess | RequestFailure

CANCELLED = RequestFailure("the request was cancelled", "user")

Work = Callable[[], Awaitable[RequestSuccess]]
"""Carries a request out."""

Spawn = Callable[[Coroutine[Any, Any, None], str], "asyncio.Task[None]"]
"""Starts a task of the server, by its coroutine and its name."""


@dataclass(slots=True, eq=False)
class Entry:
    """Result of one request: pending, ready or failed."""

    tenant: str
    """Whose request it is."""
    task: "asyncio.Task[None] | None" = None
    """The work, where cancelling the request may cancel it."""
    has_begun: bool = False
    """Whether the work has begun: a training request waits for those before it."""
    done: asyncio.Event = field(default_factory=asyncio.Event)
    outcome: Outcome | None = None
    expires_s: float | None = None
    """Loop time at which the entry is forgotten; None until it is done."""
    is_read: bool = False
    """Whether a client was given the outcome."""


class FutureTable:
    """All requests whose results are pending or kept."""

    def __init__(self, spawn: Spawn) -> None:
        self._spawn = spawn
        self._entries: dict[str, Entry] = {}
        self._running: Counter[str] = Counter()
        """Number of requests of :meth:`start` that have not ended, by tenant."""

    def get(self, request_id: str) -> Entry | None:
        """Return a request's entry; None if there is none (any more)."""
        return self._entries.get(request_id)

    def add(self, request_id: str, entry: Entry) -> None:
        """Add a pending request."""
        assert request_id not in self._entries
        self._entries[request_id] = entry

    def start(self, request_id: str, tenant: str, work: Work) -> None:
        """Begin a request that waits for no other; :meth:`cancel` may end it."""
        entry = Entry(tenant)
        self.add(request_id, entry)
        self._running[tenant] += 1
        entry.task = self._spawn(self.carry_out(entry, work), request_id)

        def end(_: object) -> None:
            self._running[tenant] -= 1
            self.resolve(entry, CANCELLED)  # unless it has another result

        entry.task.add_done_callback(end)

    def resolve(self, entry: Entry, outcome: Outcome) -> None:
        """Set a request's result, and wake its waiters; harmless if it has one."""
        if entry.outcome is None:
            entry.outcome = outcome
            entry.expires_s = asyncio.get_running_loop().time() + KEPT_UNREAD_S
            entry.done.set()

    async def carry_out(self, entry: Entry, work: Work) -> None:
        """Do a request's work, and resolve its entry with the result or the exception."""
        entry.has_begun = True
        try:
            outcome: Outcome = await work()
        except asyncio.CancelledError:
            self.resolve(entry, CANCELLED)
            raise
        except Exception as error:  # noqa: BLE001 - reported to the client, whatever it is
            outcome = failure_of(error)
        self.resolve(entry, outcome)

    async def wait(self, request_id: str, tenant: str) -> Outcome | None:
        """Wait for a request's result; return None if there is none after POLL_TIMEOUT_S.

        Raises:
            ApiError: 410, nothing is known of such a request.
        """
        entry = self._entries.get(request_id)
        if entry is None or entry.tenant != tenant:
            raise ApiError(
                410,
                f"no request {request_id!r:.200} is known: its result was kept for "
                f"{KEPT_AFTER_READ_S:.0f} s after it was read, or the server has restarted",
            )
        try:
            async with asyncio.timeout(POLL_TIMEOUT_S):
                await entry.done.wait()
        except TimeoutError:
            return None
        loop_s = asyncio.get_running_loop().time()
        assert entry.expires_s is not None
        entry.expires_s = min(entry.expires_s, loop_s + KEPT_AFTER_READ_S)
        entry.is_read = True
        return entry.outcome

    def is_awaited(self, request_id: str) -> bool:
        """Whether a client has not read a request's result, and is likely to."""
        entry = self._entries.get(request_id)
        if entry is None or entry.is_read:
            return False
        ended_s = asyncio.get_running_loop().time() - AWAITED_S
        return entry.expires_s is None or entry.expires_s - KEPT_UNREAD_S > ended_s

    def cancel(self, request_id: str, tenant: str) -> None:
        """Cancel a request's work, if it can be; harmless for unknown and ended requests."""
        entry = self._entries.get(request_id)
        if entry is not None and entry.tenant == tenant and entry.task is not None:
            entry.task.cancel()

    def running(self, tenant: str) -> int:
        """Return the number of a tenant's samples that have not ended."""
        return self._running[tenant]

    def has_running(self, id_prefix: str) -> bool:
        """Whether a request whose id begins so has begun and not ended."""
        return any(
            entry.has_begun and entry.outcome is None
            for request_id, entry in self._entries.items()
            if request_id.startswith(id_prefix)
        )

    def forget_expired(self) -> None:
        """Drop results that were kept for long enough."""
        now_s = asyncio.get_running_loop().time()
        for request_id, entry in list(self._entries.items()):
            if entry.expires_s is not None and entry.expires_s <= now_s:
                del self._entries[request_id]


def failure_of(error: Exception) -> RequestFailure:
    """Return whose fault an exception is, as clients read it: their own, or the server's fault."""
    is_users = isinstance(error, UserError) or (isinstance(error, ApiError) and error.status < 500)
    if is_users or isinstance(error, RunClosed | TidegateError | ApiError):
        return RequestFailure(str(error), "user" if is_users else "server")
    return RequestFailure(f"{type(error).__name__}: {error}", "server")


def json_result(body: dict[str, Any]) -> RequestSuccess:
    """Return a result whose only form is JSON."""
    encoded = msgspec.json.encode(body)
    return RequestSuccess(lambda _: encoded)
