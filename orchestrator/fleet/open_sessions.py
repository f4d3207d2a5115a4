"""Which engines keep a rollout's context while it waits for its tools, and hear that it is over?

It knows engines and sessions; not what a context is. Nothing follows from it but speed, so it is no
part of the core: after a crash engines begin to keep contexts anew.

Each row of a rollout is a session. Its turns say so by themselves; this tells an engine which has
kept a context that no turn will come for it, the row having ended, or gone elsewhere.
"""

import asyncio
from collections.abc import Callable

from tidegate.orchestrator.core.rollout import Rollout
from tidegate.transport.messages import EndSessions, Hello, Message

SESSIONS_PER_MESSAGE = 4096
"""At 9 bytes each at most, that is half of what a frame may have."""


class OpenSessions:
    """Where each session's turns were sent last."""

    def __init__(self, post: Callable[[str, Message], None]) -> None:
        self._post = post
        self._keepers: set[str] = set()
        """Engines that want to know."""
        self._engines: dict[int, str] = {}
        """By session, the keeper that has its context."""
        self._due: dict[str, list[int]] = {}
        """Sessions that have ended, and engines that are yet to be told."""

    def joined(self, engine: str, hello: Hello | None) -> None:
        """An engine came, or came back."""
        self.left(engine)
        if hello is not None and hello.keeps_sessions:
            self._keepers.add(engine)

    def left(self, engine: str) -> None:
        """An engine is gone, or has forgotten whose contexts it has."""
        self._keepers.discard(engine)
        self._due.pop(engine, None)

    def close(self) -> None:
        """Engines end, too: nobody need be told of anything any more."""
        self._keepers.clear()
        self._due.clear()

    def submitted(self, engine: str, session: int) -> None:
        """A turn of this session was sent there."""
        if not self._keepers and not self._engines:
            return  # nobody keeps any
        before = self._engines.get(session)
        if before == engine:
            return
        if before is not None:
            self._end(self._engines.pop(session), session)
        if engine in self._keepers:
            self._engines[session] = engine

    def over(self, rollout: Rollout) -> None:
        """A rollout asks for no more turns; harmless where that was said before."""
        if not self._engines:
            return  # nobody keeps any
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
        """After whatever was posted before, a turn's cancellation say."""
        due, self._due = self._due, {}
        for engine, sessions in due.items():
            for start in range(0, len(sessions), SESSIONS_PER_MESSAGE):
                part = sessions[start : start + SESSIONS_PER_MESSAGE]
                self._post(engine, EndSessions(sessions=part))
