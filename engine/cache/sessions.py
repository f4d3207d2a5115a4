"""Which contexts that no turn holds will be gone on with? Knows no tools, and no clock.

A session is a rollout's row: turns that each go on where the one before has ended. While it waits
for a tool its KV is nobody's, and may leave where room is needed; but what belongs to sessions that
are over leaves before. Of those that wait, the one that did so for longest gives way first: a tool
that has taken long will take longer still, where such times have a long tail.
"""

from collections import OrderedDict
from collections.abc import Iterable

from tidegate.engine.cache.kv_cache import KvCache, Wanted
from tidegate.engine.turns import NEVER, TurnState


class Sessions:
    """The contexts of sessions that may go on, as far as they are cached."""

    def __init__(self, cache: KvCache, sessions_max: int) -> None:
        """Beyond ``sessions_max`` the one that was heard of least lately has its context no longer
        kept, so that a peer which ends none costs no memory."""
        self._cache = cache
        self._sessions_max = sessions_max
        self._wanted: OrderedDict[int, Wanted] = OrderedDict()
        """By session, the one heard of least lately first."""

    def leave(self, turn: TurnState) -> None:
        """A turn is about to let go of its KV; its session will want what is cached of it."""
        if not turn.session or turn.share_at == NEVER or not turn.shared_blocks:
            return
        wanted = self._cache.want(turn.blocks[: turn.shared_blocks])
        self.end([turn.session])  # what it wanted before is the beginning of this, mostly
        self._wanted[turn.session] = wanted
        if len(self._wanted) > self._sessions_max:
            self._cache.unwant(self._wanted.popitem(last=False)[1])

    def end(self, sessions: Iterable[int]) -> None:
        """These won't go on here."""
        for session in sessions:
            self._cache.unwant(self._wanted.pop(session, []))

    def forget(self) -> None:
        """Nobody will say any more which of them have ended."""
        self.end(list(self._wanted))
