"""How does an agent that speaks OpenAI's API become an episode? Behind a URL and a key of its own.

    gateway = tidegate.Gateway()

    async def agent(endpoint: tidegate.Endpoint, task: Task) -> float:
        client = openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
        ...  # any agent, unchanged; each request is a turn of this rollout
        return reward

    async for batch in rollouts.batches(tasks, episode=gateway.episode(agent)): ...

Each rollout is a session, whose key says which requests are its own. Knows sessions, keys and
rewards; what requests and answers look like is :mod:`gateway_app`'s matter.
"""

import asyncio
import contextlib
import inspect
import secrets
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tidegate.errors import ConfigError
from tidegate.orchestrator.episodes.generated_turn import checked_reward
from tidegate.orchestrator.gateway.replies import GatewayError
from tidegate.orchestrator.listening import listen, url_of

if TYPE_CHECKING:
    from tidegate.orchestrator.episodes.episode import Episode
    from tidegate.orchestrator.episodes.runner import EpisodeFunction

REQUESTS_PER_SESSION_MAX = 256
"""At once: an agent with more sub-agents than that has lost count of them."""

KEEP_ALIVE_S = 3600
"""A connection is closed that was idle for so long. Agents' tools take minutes; a server that
closes while a client begins to ask makes it ask again, and sample again."""

CLAIM_TIMEOUT_S = 30.0
"""How long an agent that asks for a task waits for one; proxies cut off what takes a minute."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where an agent finds the model, as its one rollout."""

    base_url: str
    """Ends in ``/v1``, as clients want it."""
    api_key: str
    session_id: str


Agent = Callable[[Endpoint, Any], Awaitable[float | None] | float | None]
"""A user's: gets its endpoint and a task, returns the reward, or None if that was posted. One that
is not async gets a thread."""

AGENT_THREADS_MAX = 256
"""For agents that are not async, at once; the others wait. A thread costs 50 KB or so."""


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


class Gateway:
    """An HTTP server with OpenAI's API, on the loop of the run whose episodes it serves."""

    def __init__(self, *, host: str = "127.0.0.1", port: int = 0, token: str | None = None) -> None:
        """``port`` 0 takes a free one. ``token`` is what agents that come from outside show to be
        given a task; without one it is drawn at random (:attr:`token`).

        What travels is not encrypted: on any other host than this one, put a proxy in front.

        Raises:
            ConfigError: starlette or uvicorn is not installed, or the address is taken.
        """
        try:
            import starlette  # noqa: F401
            import uvicorn  # noqa: F401
        except ImportError as error:
            raise ConfigError(f"{error.name} is missing: pip install 'tidegate[gateway]'") from None
        self.token = token or secrets.token_urlsafe(24)
        self._socket = listen(host, port, "the gateway")
        """Listens from now on: who comes before the run has begun waits."""
        self.url = url_of(self._socket)
        self._sessions: dict[str, Session] = {}
        """By id."""
        self._by_key: dict[str, Session] = {}
        self._unclaimed: deque[Session] = deque()
        """Whose agent is yet to come."""
        self._has_unclaimed = asyncio.Event()
        self._server: asyncio.Task[None] | None = None
        self._threads = ThreadPoolExecutor(AGENT_THREADS_MAX, "agent")

    def episode(self, agent: Agent | None = None) -> "EpisodeFunction":
        """An episode for :meth:`Rollouts.batches` that is played by ``agent``; or, without one, by
        whoever comes for its task with ``POST /sessions`` and posts a reward in the end."""

        async def play(episode: "Episode", task: Any) -> float:
            self._serve()
            session = self.open(episode, task)
            try:
                if agent is None:
                    self._unclaimed.append(session)
                    self._has_unclaimed.set()
                    await session.is_rewarded.wait()
                    return _reward_of(session, None)
                endpoint = Endpoint(f"{self.url}/v1", session.api_key, session.session_id)
                return _reward_of(session, await self._play(agent, endpoint, task))
            finally:
                self.end(session)

        return play

    async def _play(self, agent: Agent, endpoint: Endpoint, task: object) -> float | None:
        call = getattr(agent, "__call__", agent)  # noqa: B004 - of an object, its method
        if inspect.iscoroutinefunction(agent) or inspect.iscoroutinefunction(call):
            returned = agent(endpoint, task)
        else:
            loop = asyncio.get_running_loop()
            returned = await loop.run_in_executor(self._threads, agent, endpoint, task)
        return await returned if isinstance(returned, Awaitable) else returned

    # ------------------------------------------------------------ sessions

    @property
    def num_sessions(self) -> int:
        """Open now."""
        return len(self._sessions)

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

    # ------------------------------------------------------------ the server

    def _serve(self) -> None:
        """Serve on the loop of the run, which ends the server when it ends.

        Raises:
            ConfigError: it serves another run, or is closed.
        """
        loop = asyncio.get_running_loop()
        before = self._server
        if before is not None and before.get_loop() is loop and not before.done():
            return
        if self._socket.fileno() < 0:
            raise ConfigError("the gateway is closed; make another one")
        if before is not None and before.get_loop() is not loop:
            if before.get_loop().is_running():
                raise ConfigError("a gateway serves one run at a time; make one for each")
            self._sessions.clear()  # what is left is of the run before
            self._by_key.clear()
            self._unclaimed.clear()
            self._has_unclaimed = asyncio.Event()
        self._server = loop.create_task(self._run_server(), name="gateway")

    async def _run_server(self) -> None:
        import uvicorn

        from tidegate.orchestrator.gateway.app import gateway_app

        config = uvicorn.Config(
            gateway_app(self),
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        server = uvicorn.Server(config)
        listening = self._socket.dup()  # closed with the server; ours stays for another run
        try:
            await server.serve(sockets=[listening])
        finally:
            for each in getattr(server, "servers", []):
                each.close()
            listening.close()

    def close(self) -> None:
        """Let go of the port; agents' threads end when they do. Harmless when repeated."""
        self._socket.close()
        self._threads.shutdown(wait=False, cancel_futures=True)


def _reward_of(session: Session, returned: float | None) -> float:
    if returned is not None:
        return returned
    if session.reward is None:
        raise ConfigError("the agent returned None, and posted no reward: it must do one of them")
    return session.reward
