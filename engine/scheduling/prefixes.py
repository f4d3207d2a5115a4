"""Prefix sharing between turns, and contexts kept in the KV cache for a rollout's next turn.

Used by the running set and the scheduler; the radix tree itself is ``KvCache``. A turn follows the
tree from the root of the live weights as far as its tokens match, and adds each block that it
fills. A turn leaves the tree once part of its KV is from older weights. A session is a rollout
between two turns, for example during a tool call: its KV may be evicted, least recently used first.
"""

from collections import OrderedDict
from collections.abc import Iterable

from tidegate.engine.scheduling.kv_cache import KvCache, Wanted
from tidegate.engine.scheduling.sequences import NEVER, EngineSequence


class PrefixSessions:
    """Keeps the cached contexts of sessions that may continue with another turn."""

    def __init__(self, cache: KvCache, sessions_max: int) -> None:
        """Beyond ``sessions_max`` sessions the least recently used one loses its protection from
        eviction, so that a peer that never ends sessions costs no memory."""
        self._cache = cache
        self._sessions_max = sessions_max
        self._wanted: OrderedDict[int, Wanted] = OrderedDict()
        """Wanted blocks by session number, least recently used session first."""

    def leave(self, turn: EngineSequence) -> None:
        """Protect a turn's cached blocks for its session, just before the turn releases its KV."""
        if not turn.session or turn.share_at == NEVER or not turn.shared_blocks:
            return
        wanted = self._cache.want(turn.blocks[: turn.shared_blocks])
        self.end([turn.session])  # the blocks wanted before are mostly a prefix of these
        self._wanted[turn.session] = wanted
        if len(self._wanted) > self._sessions_max:
            self._cache.unwant(self._wanted.popitem(last=False)[1])

    def end(self, sessions: Iterable[int]) -> None:
        """Drop sessions that will not continue on this engine."""
        for session in sessions:
            self._cache.unwant(self._wanted.pop(session, []))

    def forget(self) -> None:
        """Drop all sessions, because nobody will report their ends any more."""
        self.end(list(self._wanted))


class Prefixes:
    """Lets turns share the full blocks of one ``KvCache``."""

    def __init__(self, cache: KvCache, block_tokens: int, *, are_shared: bool) -> None:
        """Without ``are_shared`` no turn finds or adds cached blocks."""
        self._cache = cache
        self._block_tokens = block_tokens
        self._are_shared = are_shared

    def enter(self, turn: EngineSequence, weight_version: int) -> None:
        """Start a turn without KV at the root of the weights ``weight_version``."""
        turn.shared_blocks = 0
        turn.node = self._cache.root(weight_version, turn.adapter, turn.cache_salt)
        turn.share_at = self._block_tokens if self._are_shared else NEVER

    def forget(self, turns: list[EngineSequence], weight_version: int) -> None:
        """Empty the prefix cache; ``turns`` with KV keep it in private, others enter anew."""
        self._cache.forget()
        for turn in turns:
            turn.share_at = NEVER
            if not turn.computed:
                self.enter(turn, weight_version)

    def find(self, turn: EngineSequence) -> list[int]:
        """Return the cached blocks that follow the turn's shared ones and match its tokens.

        Only positions that need not be computed count: never the last token, nor positions to be
        scored.
        """
        found: list[int] = []
        if turn.share_at == NEVER:
            return found
        node = turn.node
        for place in range(turn.shared_blocks, turn.reusable_tokens // self._block_tokens):
            block = self._cache.find(node, self._tokens(turn, place))
            if block is None:
                break
            found.append(block)
            node = self._cache.node(block)
        return found

    def take(self, turn: EngineSequence, found: list[int]) -> None:
        """Replace the turn's own blocks by the ``found`` ones; their positions are computed."""
        if not found:
            return
        end = turn.shared_blocks + len(found)
        own = turn.blocks[turn.shared_blocks : end]
        self._cache.hold(found)
        turn.blocks[turn.shared_blocks : end] = found
        self._cache.release(own)
        turn.block_tokens_held = len(turn.blocks) * self._block_tokens
        turn.cached_tokens += end * self._block_tokens - turn.computed
        turn.computed = end * self._block_tokens
        self._advance(turn, self._cache.node(found[-1]), end)

    def share_planned(self, turn: EngineSequence) -> None:
        """Cache the blocks that the planned step fills, for other turns of the same step.

        A block that ends with the last known token is left out: ``find`` never looks it up, so
        another turn may already have cached the same tokens. The same holds for positions to be
        scored.
        """
        self.share(turn, min(turn.computed + turn.chunk_tokens, turn.reusable_tokens))

    def share(self, turn: EngineSequence, end: int) -> None:
        """Cache the turn's full blocks before position ``end``.

        If another turn has cached the same tokens, its block replaces the turn's own.
        """
        while turn.share_at <= end:
            place = turn.shared_blocks
            tokens = self._tokens(turn, place)
            block = self._cache.find(turn.node, tokens)
            if block is None:
                node = self._cache.add(turn.node, tokens, turn.blocks[place])
            else:
                self._cache.hold([block])
                self._cache.release([turn.blocks[place]])
                turn.blocks[place] = block
                node = self._cache.node(block)
            self._advance(turn, node, place + 1)

    def _tokens(self, turn: EngineSequence, place: int) -> bytes:
        start = place * self._block_tokens
        return turn.tokens[start : start + self._block_tokens].tobytes()

    def _advance(self, turn: EngineSequence, node: int, shared_blocks: int) -> None:
        turn.node = node
        turn.shared_blocks = shared_blocks
        turn.share_at = (shared_blocks + 1) * self._block_tokens
