"""Sessions whose context an engine keeps between turns; tells engines when a session has ended.

Each row of a rollout is a session. An engine may keep a session's KV while its episode uses tools.
Turns name their session; this tells the engine that no further turn will come, because the row has
ended or its next turn went to another engine. It affects only speed, so it is not part of the core:
after a crash engines keep sessions anew.
"""

import asyncio
from collections.abc import Callable

from tidegate.orchestrator.core.rollout import Rollout
from tidegate.transport.messages import EndSessions, Hello, Message

SESSIONS_PER_MESSAGE = 4096
"""Sessions in one message: at 9 bytes each at most, half of a frame."""


class OpenSessions:
    """Engine to which each session's last turn was sent."""

    def __init__(self, post: Callable[[str, Message], None]) -> None:
        self._post = post
        self._keepers: set[str] = set()
        """Engines that keep sessions, by their hello."""
        self._engines: dict[int, str] = {}
        """Engine that keeps each session's context."""
        self._due: dict[str, list[int]] = {}
        """Ended sessions, by the engine that is still to be told."""

    def joined(self, engine: str, hello: Hello | None) -> None:
        """Add an engine that has joined or reconnected."""
        self.left(engine)
        if hello is not None and hello.supports_sessions:
            self._keepers.add(engine)

    def left(self, engine: str) -> None:
        """Remove an engine."""
        self._keepers.discard(engine)
        self._due.pop(engine, None)

    def close(self) -> None:
        """Send nothing more, because engines end with the run."""
        self._keepers.clear()
        self._due.clear()

    def submitted(self, engine: str, session: int) -> None:
        """Note that a turn of this session was sent to an engine."""
        if not self._keepers and not self._engines:
            return  # no engine keeps sessions
        before = self._engines.get(session)
        if before == engine:
            return
        if before is not None:
            self._end(self._engines.pop(session), session)
        if engine in self._keepers:
            self._engines[session] = engine

    def over(self, rollout: Rollout) -> None:
        """Note that a rollout asks for no more turns; harmless if repeated."""
        if not self._engines:
            return  # no engine keeps sessions
        for row in rollout.rows:
            session = row.rollout_id + 1
            engine = self._engines.pop(session, None)
            if engine is not None:
                self._end(engine, session)

    def _end(self, engine: str, session: int) -> None:
        if engine not in self._keepers:
            return
        if not self._due:
            asyncio.get_running_loop().call_soon(self._tell)
        self._due.setdefault(engine, []).append(session)

    def _tell(self) -> None:
        """Send the ended sessions, after messages posted before, such as a turn's cancel."""
        due, self._due = self._due, {}
        for engine, sessions in due.items():
            for start in range(0, len(sessions), SESSIONS_PER_MESSAGE):
                part = sessions[start : start + SESSIONS_PER_MESSAGE]
                self._post(engine, EndSessions(sessions=part))
