"""Prefix cache: KV blocks that turns share, and contexts kept for a rollout's next turn.

A turn follows the cache's tree from the root of the live weights as far as its tokens match, and
adds each block that it fills; it leaves the tree once its KV is not all of the live weights. A
session is a rollout's row while it waits for a tool: its KV may be evicted, the longest-waiting one
first.
"""

from collections import OrderedDict
from collections.abc import Iterable

from tidegate.engine.scheduling.kv_cache import KvCache, Wanted
from tidegate.engine.scheduling.turns import NEVER, TurnState


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


class Prefixes:
    """Lets turns share the blocks of one cache."""

    def __init__(self, cache: KvCache, block_tokens: int, *, are_shared: bool) -> None:
        """Without ``are_shared`` nothing is ever found."""
        self._cache = cache
        self._block_tokens = block_tokens
        self._are_shared = are_shared

    def enter(self, turn: TurnState, weight_version: int) -> None:
        """A turn without KV begins at the root of these weights."""
        turn.shared_blocks = 0
        turn.node = self._cache.root(weight_version, turn.adapter, turn.cache_salt)
        turn.share_at = self._block_tokens if self._are_shared else NEVER

    def forget(self, turns: list[TurnState], weight_version: int) -> None:
        """Nothing computed so far is found again; turns with KV go on in private."""
        self._cache.forget()
        for turn in turns:
            turn.share_at = NEVER
            if not turn.computed:
                self.enter(turn, weight_version)

    def find(self, turn: TurnState) -> list[int]:
        """The cached blocks that go on where the turn's shared ones end.

        Only those that it need not compute: never its last token, nor what is to be scored.
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

    def take(self, turn: TurnState, found: list[int]) -> None:
        """Put what ``find`` found in the place of the turn's own blocks; it needn't compute it."""
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

    def share_planned(self, turn: TurnState) -> None:
        """Let others find the blocks that the step being planned fills.

        Not one that ends with the last token known: ``find`` never looks for that, so another turn
        may have cached the same already. Nor one with positions to be scored, for the same reason.
        """
        self.share(turn, min(turn.computed + turn.chunk_tokens, turn.reusable_tokens))

    def share(self, turn: TurnState, end: int) -> None:
        """Let others find the full blocks before position ``end``.

        Where another turn has cached the same, that takes the place of the turn's own block.
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

    def _tokens(self, turn: TurnState, place: int) -> bytes:
        start = place * self._block_tokens
        return turn.tokens[start : start + self._block_tokens].tobytes()

    def _advance(self, turn: TurnState, node: int, shared_blocks: int) -> None:
        turn.node = node
        turn.shared_blocks = shared_blocks
        turn.share_at = (shared_blocks + 1) * self._block_tokens
