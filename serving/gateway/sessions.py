"""Sessions of the gateway: each gives one agent access to its rollout, through an API key.

Kept in memory only; independent of HTTP, so that it imports without a server's packages.
"""

import asyncio
import contextlib
import secrets
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tidegate.errors import (
    ContextFull,
    InfrastructureFailed,
    PolicyFailed,
    TidegateError,
    TurnTimeout,
)
from tidegate.orchestrator.episodes.generated_turn import checked_reward
from tidegate.serving.http.errors import ApiError
from tidegate.serving.openai.response_store import ResponseStore
from tidegate.transport.trace_context import trace_headers

if TYPE_CHECKING:
    from tidegate.orchestrator.episodes.episode import Episode
    from tidegate.orchestrator.episodes.generated_turn import GeneratedTurn

REQUESTS_PER_SESSION_MAX = 256
"""Requests of one session at a time: more indicates a defect of the agent."""

CLAIM_TIMEOUT_S = 30.0
"""Time for which a request waits for a task; proxies cut off requests of a minute."""


@dataclass(eq=False, slots=True)
class Session:
    """An agent's rollout, and the API key that the agent sends with its requests."""

    session_id: str
    api_key: str
    episode: "Episode"
    task: object
    reward: float | None = None
    failure: PolicyFailed | InfrastructureFailed | None = None
    """Failure that the agent has reported, instead of a reward."""
    is_rewarded: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the session has a reward or a failure."""
    refusal: TidegateError | None = None
    """Error of the newest ended turn, if it failed by the policy's doing; the agent only sees an
    HTTP status."""
    requests: int = 0
    """Number of requests being answered."""
    responses: ResponseStore = field(default_factory=ResponseStore)
    """Answers that requests of ``/v1/responses`` can continue."""
    trace: Mapping[str, str] = field(default_factory=trace_headers)
    """Headers by which the agent continues the rollout's trace; empty without OpenTelemetry."""

    def record_turn(self, turn: "asyncio.Future[GeneratedTurn]") -> None:
        """Keep the error of a turn that has ended, if the policy has caused it."""
        error = None if turn.cancelled() else turn.exception()
        self.refusal = error if isinstance(error, ContextFull | TurnTimeout) else None

    @contextlib.contextmanager
    def recording_refusal(self) -> Iterator[None]:
        """Keep the error of a request whose prompt is refused before its turn begins."""
        try:
            yield
        except ContextFull as error:  # a copy, because the traceback keeps the request's body
            self.refusal = ContextFull(tokens=error.tokens, tokens_max=error.tokens_max)
            raise

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Count a request while it is answered."""
        self.requests += 1
        try:
            yield
        finally:
            self.requests -= 1

    def refuse_if_busy(self) -> None:
        """Raise ApiError if the session has as many requests as it may have."""
        if self.requests >= REQUESTS_PER_SESSION_MAX:
            most = f"a session has {REQUESTS_PER_SESSION_MAX} requests at a time"
            raise ApiError(429, most)


class GatewaySessions:
    """Table of open sessions by id and by key, and the queue of sessions that wait for an agent."""

    def __init__(self, token: str, *, url: str, host: str, allowed_hosts: frozenset[str]) -> None:
        """``token`` is the key by which agents from outside claim a session."""
        self.token = token
        self.url = url
        self.host = host
        self.allowed_hosts = allowed_hosts
        """Host names, in lower case, by which requests without a valid key may call the gateway."""
        self._sessions: dict[str, Session] = {}
        """Open sessions by id."""
        self._by_key: dict[str, Session] = {}
        self._unclaimed: deque[Session] = deque()
        """Sessions that wait for an agent from outside, oldest first."""
        self._has_unclaimed = asyncio.Event()

    @property
    def num_sessions(self) -> int:
        """Number of open sessions."""
        return len(self._sessions)

    def is_authorized(self, key: str) -> bool:
        """Whether this is the gateway's token, or the key of an open session."""
        return key in self._by_key or secrets.compare_digest(key.encode(), self.token.encode())

    def session(self, key: str, session_id: str | None = None) -> Session:
        """Return the session of a key; or, for the gateway's token, the session of that id.

        Raises:
            ApiError: no open session has the key or id.
        """
        if session_id is not None and secrets.compare_digest(key.encode(), self.token.encode()):
            session = self._sessions.get(session_id)
        else:  # clients may name sessions of their own: the key counts
            session = self._by_key.get(key)
        if session is None:
            why = "no open session has this key: its rollout has ended, or there was none"
            raise ApiError(401, why)
        return session

    async def claim(self, key: str) -> Session:
        """Wait for a session without an agent, and take the oldest.

        Raises:
            ApiError: the key is not the gateway's token, or no task has come for a while.
        """
        if not secrets.compare_digest(key.encode(), self.token.encode()):
            why = "only agents that show the gateway's token get sessions"
            raise ApiError(401, why)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLAIM_TIMEOUT_S):
                while not self._unclaimed:
                    self._has_unclaimed.clear()
                    await self._has_unclaimed.wait()
        if not self._unclaimed:
            raise ApiError(404, "there is no task now; ask again", code="no_task")
        return self._unclaimed.popleft()

    def unclaim(self, session: Session) -> None:
        """Return a claimed session, whose agent is gone, to the head of the queue."""
        if self._sessions.get(session.session_id) is session:
            self._unclaimed.appendleft(session)
            self._has_unclaimed.set()

    def reward(self, session: Session, reward: float) -> None:
        """Set the reward of a session's rollout; a later one replaces it.

        Raises:
            ConfigError: the reward is not finite.
        """
        session.reward = checked_reward(reward)
        session.is_rewarded.set()

    def fail(self, session: Session, failure: PolicyFailed | InfrastructureFailed) -> None:
        """Let a session's episode end by this failure."""
        session.failure = failure
        session.is_rewarded.set()

    def open(self, episode: "Episode", task: object) -> Session:
        """Open a session for a rollout, with a key of its own."""
        key = f"tg-{secrets.token_urlsafe(24)}"
        session = Session(str(episode.rollout_id), key, episode, task)
        self._sessions[session.session_id] = self._by_key[key] = session
        return session

    def end(self, session: Session) -> None:
        """End a session: its key is no longer valid."""
        self._by_key.pop(session.api_key, None)
        if self._sessions.get(session.session_id) is session:
            del self._sessions[session.session_id]
        with contextlib.suppress(ValueError):
            self._unclaimed.remove(session)

    def offer(self, session: Session) -> None:
        """Queue a session for an agent from outside."""
        self._unclaimed.append(session)
        self._has_unclaimed.set()

    def clear_sessions(self) -> None:
        """Drop all sessions, before the gateway serves another run."""
        self._sessions.clear()
        self._by_key.clear()
        self._unclaimed.clear()
        self._has_unclaimed = asyncio.Event()
