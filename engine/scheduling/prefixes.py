"""Prefix sharing between sequences, and contexts kept in the KV cache for a rollout's next turn.

A sequence follows the tree from the root of the live weights as far as its tokens match, and adds
each block that it fills. It leaves the tree once part of its KV is from older weights. A session
is a row of a rollout that may continue with another turn, for example after a tool call; the cache
evicts the contexts of sessions last.
"""

from collections import OrderedDict
from collections.abc import Iterable

from tidegate.engine.execution.images import write_keys
from tidegate.engine.scheduling.kv_cache import KvCache, ProtectedBlocks
from tidegate.engine.scheduling.sequences import NEVER, EngineSequence


class PrefixSessions:
    """Keeps the cached contexts of sessions that may continue with another turn."""

    def __init__(self, cache: KvCache, sessions_max: int) -> None:
        """Beyond ``sessions_max`` sessions the least recently used one loses its protection from
        eviction, so that a peer that never ends sessions costs no memory."""
        self._cache = cache
        self._sessions_max = sessions_max
        self._protected: OrderedDict[int, ProtectedBlocks] = OrderedDict()
        """Protected blocks by session number, least recently used session first."""

    def protect_blocks(self, sequence: EngineSequence) -> None:
        """Protect a sequence's cached blocks for its session. Called before the sequence releases
        its KV."""
        if not sequence.session or sequence.share_at == NEVER or not sequence.shared_blocks:
            return
        protected = self._cache.protect(sequence.blocks[: sequence.shared_blocks])
        self.end([sequence.session])  # the blocks protected before are mostly a prefix of these
        self._protected[sequence.session] = protected
        if len(self._protected) > self._sessions_max:
            self._cache.unprotect(self._protected.popitem(last=False)[1])

    def end(self, sessions: Iterable[int]) -> None:
        """Drop sessions that will not continue on this engine."""
        for session in sessions:
            self._cache.unprotect(self._protected.pop(session, []))

    def forget(self) -> None:
        """Drop all sessions, because the orchestrator that would report their ends is lost."""
        self.end(list(self._protected))


class Prefixes:
    """Lets sequences share the full blocks of one ``KvCache``."""

    def __init__(self, cache: KvCache, block_tokens: int, *, are_shared: bool) -> None:
        """Without ``are_shared`` no sequence finds or adds cached blocks."""
        self._cache = cache
        self._block_tokens = block_tokens
        self._are_shared = are_shared

    def start_at_root(self, sequence: EngineSequence, weight_version: int) -> None:
        """Start a sequence without KV at the root of the weights ``weight_version``."""
        sequence.shared_blocks = 0
        sequence.node = self._cache.root(
            weight_version,
            sequence.adapter,
            sequence.cache_salt,
            sequence.adapter_version,
            has_positions=sequence.reports_positions,
        )
        sequence.share_at = self._block_tokens if self._are_shared else NEVER

    def forget(self, sequences: list[EngineSequence], weight_version: int) -> None:
        """Empty the prefix cache. ``sequences`` with KV keep it unshared; the rest restart at a new
        root."""
        self._cache.forget()
        for sequence in sequences:
            self.leave(sequence, weight_version)

    def leave(self, sequence: EngineSequence, weight_version: int) -> None:
        """Take a sequence out of the tree, because its next KV is of other weights. Without KV it
        restarts at their root."""
        sequence.share_at = NEVER
        if not sequence.computed:
            self.start_at_root(sequence, weight_version)

    def find(self, sequence: EngineSequence) -> list[int]:
        """Return the cached blocks that follow the sequence's shared ones and match its tokens.

        Only positions that need not be computed count: never the last token, nor positions to be
        scored.
        """
        found: list[int] = []
        if sequence.share_at == NEVER:
            return found
        node = sequence.node
        for index in range(sequence.shared_blocks, sequence.reusable_tokens // self._block_tokens):
            block = self._cache.find(node, self._key(sequence, index))
            if block is None:
                break
            found.append(block)
            node = self._cache.node(block)
        return found

    def reuse(self, sequence: EngineSequence, found: list[int]) -> None:
        """Replace the sequence's own blocks with the ``found`` ones; their positions are
        computed."""
        if not found:
            return
        end = sequence.shared_blocks + len(found)
        replaced = sequence.blocks[sequence.shared_blocks : end]
        self._cache.hold(found)
        sequence.blocks[sequence.shared_blocks : end] = found
        self._cache.release(replaced)
        sequence.block_tokens_held = len(sequence.blocks) * self._block_tokens
        sequence.cached_tokens += end * self._block_tokens - sequence.computed
        sequence.computed = end * self._block_tokens
        self._advance(sequence, self._cache.node(found[-1]), end)

    def share_planned(self, sequence: EngineSequence) -> None:
        """Cache the blocks that the planned step fills, for other sequences of the same step.

        A block that ends with the last known token is omitted: ``find`` never searches for it, so
        another turn may already have cached the same tokens. The same holds for positions to be
        scored.
        """
        self.share(
            sequence, min(sequence.computed + sequence.chunk_tokens, sequence.reusable_tokens)
        )

    def share(self, sequence: EngineSequence, end: int) -> None:
        """Cache the sequence's full blocks before position ``end``.

        If another turn has cached the same tokens, its block replaces the sequence's own.
        """
        while sequence.share_at <= end:
            index = sequence.shared_blocks
            key = self._key(sequence, index)
            block = self._cache.find(sequence.node, key)
            if block is None:
                node = self._cache.add(sequence.node, key, sequence.blocks[index])
            else:
                self._cache.hold([block])
                self._cache.release([sequence.blocks[index]])
                sequence.blocks[index] = block
                node = self._cache.node(block)
            self._advance(sequence, node, index + 1)

    def _key(self, sequence: EngineSequence, index: int) -> bytes:
        """Return a block's tokens, with images in place of their placeholders."""
        start = index * self._block_tokens
        tokens = sequence.tokens[start : start + self._block_tokens]
        if sequence.images:
            tokens = tokens.copy()
            write_keys(sequence.images, tokens, start)
        return tokens.tobytes()

    def _advance(self, sequence: EngineSequence, node: int, shared_blocks: int) -> None:
        sequence.node = node
        sequence.shared_blocks = shared_blocks
        sequence.share_at = (shared_blocks + 1) * self._block_tokens
