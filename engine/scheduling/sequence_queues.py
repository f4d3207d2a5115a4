"""Queues of an engine's sequences: admission, allocation of KV blocks, preemption.

Corresponds to vLLM's waiting and running queues with recompute preemption. Sequences are ranked by
priority, then arrival. The best-ranked running sequence can always continue: if no block is free,
the worst-ranked one is preempted, and no sequence larger than the whole cache is admitted. So some
sequence always finishes. Sequences share the blocks of common prefixes (``prefixes.py``).
"""

import heapq
from bisect import insort
from collections import Counter
from collections.abc import Iterator
from operator import attrgetter

from tidegate.engine.scheduling.kv_cache import KvCache
from tidegate.engine.scheduling.prefixes import Prefixes, PrefixSessions
from tidegate.engine.scheduling.sequences import EngineLimits, EngineSequence

_rank = attrgetter("rank")


class SequenceQueues:
    """The running and waiting sequences of one engine, and the KV blocks of the running ones."""

    def __init__(self, limits: EngineLimits, *, shares_prefixes: bool) -> None:
        self._limits = limits
        self._cache = KvCache(limits.num_blocks)
        self.prefixes = Prefixes(self._cache, limits.block_tokens, are_shared=shares_prefixes)
        self.sessions = PrefixSessions(self._cache, sessions_max=limits.num_blocks)
        self.running: list[EngineSequence] = []
        """The running set, best rank first; only its sequences hold blocks."""
        self._waiting: list[tuple[tuple[int, int], EngineSequence]] = []

    @property
    def waiting_turns(self) -> int:
        """Number of sequences in the waiting queue; they hold no blocks."""
        return len(self._waiting)

    @property
    def free_blocks(self) -> int:
        """Number of KV blocks that no sequence holds."""
        return self._cache.free_blocks

    # ------------------------------------------------------------ admission

    def queue(self, sequence: EngineSequence) -> None:
        """Add a sequence to the waiting queue, which is ordered by rank."""
        heapq.heappush(self._waiting, (sequence.rank, sequence))

    def start_waiting(self, weight_version: int, running_max: int) -> Iterator[EngineSequence]:
        """Admit waiting sequences, best rank first, while blocks are free and fewer than
        ``running_max`` run.

        A sequence gets the blocks of all its known tokens at once, so that no prefill stops half
        way. One block per running sequence must stay free, or the next decodes could preempt the
        sequence just admitted.
        """
        running_max = min(running_max, self._limits.max_running_turns)
        while self._waiting and len(self.running) < running_max:
            sequence = self._waiting[0][1]
            spare = self._cache.free_blocks - len(self.running)
            if spare <= 0:
                return
            self.prefixes.start_at_root(sequence, weight_version)
            found = self.prefixes.find(sequence)
            needed = self._limits.blocks_for(sequence.length) - len(found)
            if needed + len(found) - self._cache.count_held(found) > spare:
                return
            heapq.heappop(self._waiting)
            self.prefixes.reuse(sequence, found)
            self._allocate(sequence, needed)
            sequence.is_running = True
            insort(self.running, sequence, key=_rank)
            yield sequence

    # ------------------------------------------------------------ block allocation

    def grow(self, sequence: EngineSequence) -> bool:
        """Allocate one more block for a sequence, preempting the worst-ranked sequences if none is
        free.

        Return False if there is none for it: the sequence is the worst-ranked one itself, which
        stays in the running set and keeps its blocks until a better-ranked one needs them, or it
        was preempted before and is in the waiting queue.
        """
        while sequence.is_running:
            if self._allocate(sequence, 1):
                return True
            if self.running[-1] is sequence:
                return False
            self.preempt(self.running[-1])  # the tokens are kept, and their KV is recomputed
        return False

    def grow_freely(self, sequence: EngineSequence, tokens: int, *, spared_blocks: int = 0) -> None:
        """Allocate blocks for ``tokens`` positions of a sequence, as far as blocks are free beyond
        ``spared_blocks``."""
        if tokens > sequence.block_tokens_held:
            missing = self._limits.blocks_for(tokens) - len(sequence.blocks)
            self._allocate(sequence, max(0, min(missing, self.free_blocks - spared_blocks)))

    def recompute(self, sequence: EngineSequence, weight_version: int) -> bool:
        """Drop a running sequence's KV past the leading positions that ``weight_version`` computed;
        return whether there was any."""
        blocks = sequence.drop_kv_of_others(weight_version, self._limits.block_tokens)
        self._cache.release(blocks or [])
        return blocks is not None

    def _allocate(self, sequence: EngineSequence, blocks: int) -> bool:
        allocated = self._cache.allocate(blocks)
        if allocated is None:
            return False
        sequence.blocks.extend(allocated)
        sequence.block_tokens_held = len(sequence.blocks) * self._limits.block_tokens
        return True

    # ------------------------------------------------------------ removal

    def remove(self, sequence: EngineSequence) -> None:
        """Remove an ended sequence and free its blocks."""
        if sequence.is_running:
            self.running.remove(sequence)
        else:
            self._waiting.remove((sequence.rank, sequence))
            heapq.heapify(self._waiting)
        self.stop(sequence)

    def preempt(self, sequence: EngineSequence) -> None:
        """Preempt a running sequence: free its blocks and queue it."""
        self.running.remove(sequence)
        self.stop(sequence)
        self.queue(sequence)

    def remove_running(self) -> list[EngineSequence]:
        """Empty the running set; return the sequences that were in it."""
        removed, self.running = self.running, []
        for sequence in removed:
            self.stop(sequence)
        return removed

    def stop(self, sequence: EngineSequence) -> None:
        """Release the KV that a sequence holds; the caller has taken it off its queue.

        Cached blocks are first protected for the sequence's session.
        """
        sequence.is_running = False
        self.sessions.protect_blocks(sequence)
        self._cache.release(sequence.drop_kv())

    # ------------------------------------------------------------ for tests

    def check(self) -> None:
        """Check block counts against the sequences, and that no two sequences write to one block.

        Raises:
            AssertionError: they disagree.
        """
        if any(sequence.blocks or sequence.is_running for _, sequence in self._waiting):
            raise AssertionError("a waiting turn has blocks, or is_running is set")
        self._cache.check([sequence.blocks for sequence in self.running])
        holders = Counter(block for sequence in self.running for block in sequence.blocks)
        for sequence in self.running:
            written = sequence.blocks[sequence.computed // self._limits.block_tokens :]
            if any(holders[block] > 1 for block in written):
                raise AssertionError(f"turn {sequence.handle} would write to a block it shares")
            if sequence.computed > sequence.block_tokens_held or not sequence.is_running:
                raise AssertionError(
                    f"turn {sequence.handle} runs without blocks for its computed KV"
                )
