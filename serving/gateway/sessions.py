"""Sessions of the gateway: each is one rollout, as the agent that plays it sees it.

The gateway opens and ends them, from the episodes of its run; the HTTP application looks them up by
their API keys.
"""

import asyncio
import contextlib
import secrets
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tidegate.orchestrator.episodes.generated_turn import checked_reward
from tidegate.serving.gateway.replies import GatewayError

if TYPE_CHECKING:
    from tidegate.orchestrator.episodes.episode import Episode

REQUESTS_PER_SESSION_MAX = 256
"""At once: an agent with more sub-agents than that has lost count of them."""

CLAIM_TIMEOUT_S = 30.0
"""How long an agent that asks for a task waits for one; proxies cut off what takes a minute."""


@dataclass(eq=False, slots=True)
class Session:
    """One rollout, as its agent sees it."""

    session_id: str
    api_key: str
    episode: "Episode"
    task: object
    reward: float | None = None
    is_rewarded: asyncio.Event = field(default_factory=asyncio.Event)
    requests: int = 0
    """Being answered now."""

    def refuse_if_busy(self) -> None:
        """Raises GatewayError if it has as many requests as it may have."""
        if self.requests >= REQUESTS_PER_SESSION_MAX:
            most = f"a session has {REQUESTS_PER_SESSION_MAX} requests at a time"
            raise GatewayError(429, "rate_limit_error", most, "too_many_requests")


class Sessions:
    """Open sessions by id and by key, and those that no agent has claimed yet."""

    def __init__(self, token: str, *, url: str, host: str, allowed_hosts: frozenset[str]) -> None:
        """``token`` is what agents that come from outside show to be given a task."""
        self.token = token
        self.url = url
        self.host = host
        self.allowed_hosts = allowed_hosts
        """Names that requests without a valid key may call the gateway by, in lower case."""
        self._sessions: dict[str, Session] = {}
        """By id."""
        self._by_key: dict[str, Session] = {}
        self._unclaimed: deque[Session] = deque()
        """Sessions whose agent is yet to come, oldest first."""
        self._has_unclaimed = asyncio.Event()

    @property
    def num_sessions(self) -> int:
        """Open now."""
        return len(self._sessions)

    def knows(self, key: str) -> bool:
        """Whether this is the gateway's token, or the key of an open session."""
        return key in self._by_key or secrets.compare_digest(key.encode(), self.token.encode())

    def session(self, key: str, session_id: str | None = None) -> Session:
        """Whose key that is; or, with the gateway's token, the session of that id.

        Raises:
            GatewayError: nobody's.
        """
        if session_id is not None and secrets.compare_digest(key.encode(), self.token.encode()):
            session = self._sessions.get(session_id)
        else:  # clients may name sessions of their own: the key counts
            session = self._by_key.get(key)
        if session is None:
            why = "this key is no open session's: its rollout has ended, or never was"
            raise GatewayError(401, "authentication_error", why, "invalid_api_key")
        return session

    async def claim(self, key: str) -> Session:
        """A session whose agent is yet to come, the oldest first.

        Raises:
            GatewayError: the key is not the gateway's token, or no task has come for a while.
        """
        if not secrets.compare_digest(key.encode(), self.token.encode()):
            why = "sessions are given to who shows the gateway's token"
            raise GatewayError(401, "authentication_error", why, "invalid_api_key")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLAIM_TIMEOUT_S):
                while not self._unclaimed:
                    self._has_unclaimed.clear()
                    await self._has_unclaimed.wait()
        if not self._unclaimed:
            raise GatewayError(404, "not_found_error", "there is no task now; ask again", "no_task")
        return self._unclaimed.popleft()

    def give_back(self, session: Session) -> None:
        """Give a claimed session, whose agent is gone, to the next agent that asks."""
        if self._sessions.get(session.session_id) is session:
            self._unclaimed.appendleft(session)
            self._has_unclaimed.set()

    def reward(self, session: Session, reward: float) -> None:
        """What an agent's rollout is worth; the last one posted holds.

        Raises:
            ConfigError: it is not finite.
        """
        session.reward = checked_reward(reward)
        session.is_rewarded.set()

    def open(self, episode: "Episode", task: object) -> Session:
        """A rollout may be asked for turns from now on."""
        key = f"tg-{secrets.token_urlsafe(24)}"
        session = Session(str(episode.rollout_id), key, episode, task)
        self._sessions[session.session_id] = self._by_key[key] = session
        return session

    def end(self, session: Session) -> None:
        """It may be asked for nothing any more."""
        self._by_key.pop(session.api_key, None)
        if self._sessions.get(session.session_id) is session:
            del self._sessions[session.session_id]
        with contextlib.suppress(ValueError):
            self._unclaimed.remove(session)

    def offer(self, session: Session) -> None:
        """Have an agent from outside claim this session."""
        self._unclaimed.append(session)
        self._has_unclaimed.set()

    def forget_all(self) -> None:
        """Drop all sessions, before the gateway serves another run."""
        self._sessions.clear()
        self._by_key.clear()
        self._unclaimed.clear()
        self._has_unclaimed = asyncio.Event()
