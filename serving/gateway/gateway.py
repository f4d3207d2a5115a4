"""Gateway: OpenAI's and Anthropic's APIs for agents; each rollout is a session with its own key.

For example::

    gateway = tidegate.Gateway()

    async def agent(endpoint: tidegate.Endpoint, task: Task) -> float:
        client = openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
        ...  # any agent, unchanged; each request is a turn of this rollout
        return reward

    async for batch in rollouts.batches(tasks, episode=gateway.episode(agent)): ...
"""

import asyncio
import contextvars
import inspect
import secrets
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tidegate.errors import ConfigError
from tidegate.serving.gateway.sessions import GatewaySessions, Session
from tidegate.serving.http.listening import KEEP_ALIVE_S, listen, url_of

if TYPE_CHECKING:
    from tidegate.orchestrator.episodes.episode import Episode
    from tidegate.orchestrator.episodes.runner import EpisodeFunction


@dataclass(frozen=True, slots=True)
class Endpoint:
    """URL and key with which an agent generates the turns of its rollout."""

    base_url: str
    """Base URL for OpenAI's clients; ends in ``/v1``."""
    api_key: str
    """Key of the rollout, valid until its episode ends."""
    session_id: str
    """Id of the rollout's session, for ``X-Session-Id``."""

    @property
    def anthropic_base_url(self) -> str:
        """Base URL for Anthropic's clients, which append ``/v1/messages`` themselves."""
        return self.base_url.removesuffix("/v1")


Agent = Callable[[Endpoint, Any], Awaitable[float | None] | float | None]
"""User's function that gets an endpoint and a task, and returns the reward, or None if it posted
a reward. A function that is not async runs in a thread."""

AGENT_THREADS_MAX = 256
"""Threads for agents that are not async; further ones wait. A thread costs about 50 KB."""


class Gateway(GatewaySessions):
    """HTTP server with OpenAI's and Anthropic's APIs, on the event loop of the run it serves."""

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        allowed_hosts: Sequence[str] = (),
    ) -> None:
        """``port`` 0 takes a free one. ``token`` is the key by which agents in other processes
        claim tasks; by default it is drawn at random (:attr:`token`). ``allowed_hosts``: host names
        beside its address by which requests without a valid key may call the gateway.

        Traffic is not encrypted: if clients are on other hosts, put a proxy with TLS in front.

        Raises:
            ConfigError: starlette or uvicorn is not installed, or the address is taken.
        """
        try:
            import starlette  # noqa: F401
            import uvicorn  # noqa: F401

            # Here, because it takes 0.2 s of CPU, which on the run's loop would delay all episodes.
            from tidegate.serving.gateway.app import gateway_app  # noqa: F401
        except ImportError as error:
            raise ConfigError(f"{error.name} is missing: pip install 'tidegate[gateway]'") from None
        self._socket = listen(host, port, "the gateway")
        """Open from construction on: clients that connect before the run begins wait."""
        super().__init__(
            token or secrets.token_urlsafe(24),
            url=url_of(self._socket),
            host=host,
            allowed_hosts=frozenset(name.lower() for name in allowed_hosts),
        )
        self._server: asyncio.Task[None] | None = None
        self._threads = ThreadPoolExecutor(AGENT_THREADS_MAX, "agent")

    def episode(self, agent: Agent | None = None) -> "EpisodeFunction":
        """Return an episode function for :meth:`Rollouts.batches` whose turns ``agent`` generates.

        Without ``agent``, a client in another process takes the task by ``POST /sessions`` and
        posts the reward.
        """

        async def play(episode: "Episode", task: Any) -> float:
            self._serve()
            session = self.open(episode, task)
            try:
                if agent is None:
                    self.offer(session)
                    await session.is_rewarded.wait()
                    return _reward_of(session, None)
                endpoint = Endpoint(f"{self.url}/v1", session.api_key, session.session_id)
                return _reward_of(session, await self._play(agent, endpoint, task))
            except Exception as error:
                if session.refusal is not None:
                    raise session.refusal from error  # the failure's cause is recorded
                raise
            finally:
                self.end(session)

        return play

    async def _play(self, agent: Agent, endpoint: Endpoint, task: object) -> float | None:
        call = getattr(agent, "__call__", agent)  # noqa: B004 - of an object, its method
        if inspect.iscoroutinefunction(agent) or inspect.iscoroutinefunction(call):
            returned = agent(endpoint, task)
        else:
            loop = asyncio.get_running_loop()
            run = contextvars.copy_context().run  # with the episode's span
            returned = await loop.run_in_executor(self._threads, run, agent, endpoint, task)
        return await returned if isinstance(returned, Awaitable) else returned

    # ------------------------------------------------------------ the server

    def _serve(self) -> None:
        """Serve on the loop of the run, which ends the server when it ends.

        Raises:
            ConfigError: the gateway serves another run, or is closed.
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
            self.clear_sessions()  # sessions of the previous run
        self._server = loop.create_task(self._run_server(), name="gateway")

    async def _run_server(self) -> None:
        from tidegate.serving.gateway.app import BODY_BYTES_MAX, gateway_app
        from tidegate.serving.http.server import serve_app

        await serve_app(
            gateway_app(self),
            self._socket,  # stays open for another run
            body_bytes_max=BODY_BYTES_MAX,
            timeout_keep_alive=KEEP_ALIVE_S,
        )

    def close(self) -> None:
        """Close the port; threads of agents run to their end. Harmless when repeated."""
        self._socket.close()
        self._threads.shutdown(wait=False, cancel_futures=True)


def _reward_of(session: Session, returned: float | None) -> float:
    if session.failure is not None:
        raise session.failure
    if returned is not None:
        return returned
    if session.reward is None:
        raise ConfigError(
            "the agent returned None and posted no reward; return a reward or post one"
        )
    return session.reward
