"""Sessions whose context an engine keeps between turns; reports ended sessions to engines.

Each row of a rollout is a session, which its turns name. An engine may keep a session's KV while
its episode uses tools. ``EndSessions`` lets the engine free the KV, because the row has ended or
its next turn went to another engine. :class:`EngineSide` owns one :class:`OpenSessions`. Sessions
affect only speed, so they are not part of the core: a resumed run starts without any.
"""

import asyncio
from collections.abc import Callable

from tidegate.orchestrator.core.rollout import Rollout
from tidegate.transport.messages import EndSessions, Hello, Message

SESSIONS_PER_MESSAGE = 4096
"""Maximum number of sessions in one message. A session takes at most 9 bytes, so the message takes
at most 36 KiB; the limit of its frame is 64 KiB."""


class OpenSessions:
    """Engine to which each session's last turn was sent."""

    def __init__(self, post: Callable[[str, Message], None]) -> None:
        self._post = post
        self._session_engines: set[str] = set()
        """Engines that support sessions, according to their hello."""
        self._engines: dict[int, str] = {}
        """Engine that keeps each session's context."""
        self._ended: dict[str, list[int]] = {}
        """Ended sessions not yet reported, by engine."""

    def joined(self, engine: str, hello: Hello | None) -> None:
        """Add an engine that has joined or reconnected."""
        self.left(engine)
        if hello is not None and hello.supports_sessions:
            self._session_engines.add(engine)

    def left(self, engine: str) -> None:
        """Remove an engine."""
        self._session_engines.discard(engine)
        self._ended.pop(engine, None)

    def close(self) -> None:
        """Send nothing more, because engines end with the run."""
        self._session_engines.clear()
        self._ended.clear()

    def submitted(self, engine: str, session: int) -> None:
        """Record that a turn of this session was sent to an engine."""
        if not self._session_engines and not self._engines:
            return  # no engine keeps sessions
        before = self._engines.get(session)
        if before == engine:
            return
        if before is not None:
            self._end(self._engines.pop(session), session)
        if engine in self._session_engines:
            self._engines[session] = engine

    def rollout_ended(self, rollout: Rollout) -> None:
        """End the sessions of a rollout that requests no more turns; harmless if repeated."""
        if not self._engines:
            return  # no engine keeps sessions
        for row in rollout.rows:
            session = row.rollout_id + 1
            engine = self._engines.pop(session, None)
            if engine is not None:
                self._end(engine, session)

    def _end(self, engine: str, session: int) -> None:
        if engine not in self._session_engines:
            return
        if not self._ended:
            asyncio.get_running_loop().call_soon(self._send_ended)
        self._ended.setdefault(engine, []).append(session)

    def _send_ended(self) -> None:
        """Send the ended sessions, after messages posted before, such as a turn's cancel."""
        ended, self._ended = self._ended, {}
        for engine, sessions in ended.items():
            for start in range(0, len(sessions), SESSIONS_PER_MESSAGE):
                part = sessions[start : start + SESSIONS_PER_MESSAGE]
                self._post(engine, EndSessions(sessions=part))
