"""Running set of an engine: admits turns, allocates their KV blocks, preempts the worst-ranked.

Used by the scheduler; corresponds to vLLM's waiting and running queues with recompute preemption.
Turns are ranked by priority, then arrival. The best-ranked running turn can always continue: if no
block is free, the worst-ranked one is preempted, and no turn larger than the whole cache is
admitted. So some turn always finishes.
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
    """The running and waiting turns of one engine, and the KV blocks of the running ones."""

    def __init__(self, limits: EngineLimits, *, shares_prefixes: bool) -> None:
        self._limits = limits
        self._cache = KvCache(limits.num_blocks)
        self.prefixes = Prefixes(self._cache, limits.block_tokens, are_shared=shares_prefixes)
        self.sessions = PrefixSessions(self._cache, sessions_max=limits.num_blocks)
        self.running: list[EngineSequence] = []
        """Turns that may hold blocks, best rank first."""
        self._waiting: list[tuple[tuple[int, int], EngineSequence]] = []

    @property
    def waiting_turns(self) -> int:
        """Number of turns outside the running set; they hold no blocks."""
        return len(self._waiting)

    @property
    def free_blocks(self) -> int:
        """Number of KV blocks that no turn holds."""
        return self._cache.free_blocks

    # ------------------------------------------------------------ coming

    def queue(self, turn: EngineSequence) -> None:
        """Add a turn to the waiting ones, ordered by rank."""
        heapq.heappush(self._waiting, (turn.rank, turn))

    def start_waiting(self, weight_version: int, running_max: int) -> Iterator[EngineSequence]:
        """Admit waiting turns, best first, while blocks are free and fewer run than may.

        A turn gets the blocks of all its known tokens at once, so that no prefill stops half way.
        One block per running turn must stay free, or the next decodes would preempt the turn just
        admitted.
        """
        running_max = min(running_max, self._limits.max_running_turns)
        while self._waiting and len(self.running) < running_max:
            turn = self._waiting[0][1]
            spare = self._cache.free_blocks - len(self.running)
            if spare <= 0:
                return
            self.prefixes.enter(turn, weight_version)
            found = self.prefixes.find(turn)
            needed = self._limits.blocks_for(turn.length) - len(found)
            if needed + len(found) - self._cache.count_held(found) > spare:
                return
            heapq.heappop(self._waiting)
            self.prefixes.take(turn, found)
            self._give_blocks(turn, needed)
            turn.is_running = True
            insort(self.running, turn, key=_rank)
            yield turn

    # ------------------------------------------------------------ staying

    def grow(self, turn: EngineSequence) -> bool:
        """Allocate one more block for a turn, preempting the worst-ranked turns if none is free.

        False if the turn is the worst itself, or was preempted: then it waits. The worst one keeps
        its blocks until a better turn needs them.
        """
        while turn.is_running:
            if self._give_blocks(turn, 1):
                return True
            if self.running[-1] is turn:
                return False
            worst = self.running.pop()
            self.stop(worst)
            self.queue(worst)  # it keeps its tokens, and prefills again
        return False

    def grow_freely(self, turn: EngineSequence, tokens: int) -> None:
        """Allocate blocks for ``tokens`` positions of a turn, as far as blocks are free."""
        if tokens > turn.block_tokens_held:
            missing = self._limits.blocks_for(tokens) - len(turn.blocks)
            self._give_blocks(turn, min(missing, self._cache.free_blocks))

    def grow_to_spare(self, turn: EngineSequence, tokens: int) -> None:
        """Like ``grow_freely``, but leave one block free per running turn."""
        if tokens > turn.block_tokens_held:
            missing = self._limits.blocks_for(tokens) - len(turn.blocks)
            spare = self._cache.free_blocks - len(self.running)
            self._give_blocks(turn, max(0, min(missing, spare)))

    def recompute(self, turn: EngineSequence, weight_version: int) -> bool:
        """Drop a running turn's KV of other weights; return whether there was any."""
        blocks = turn.drop_kv_of_others(weight_version, self._limits.block_tokens)
        self._cache.release(blocks or [])
        return blocks is not None

    def _give_blocks(self, turn: EngineSequence, blocks: int) -> bool:
        given = self._cache.allocate(blocks)
        if given is None:
            return False
        turn.blocks.extend(given)
        turn.block_tokens_held = len(turn.blocks) * self._limits.block_tokens
        return True

    # ------------------------------------------------------------ leaving

    def remove(self, turn: EngineSequence) -> None:
        """Remove an ended turn and free its blocks."""
        if turn.is_running:
            self.running.remove(turn)
        else:
            self._waiting.remove((turn.rank, turn))
            heapq.heapify(self._waiting)
        self.stop(turn)

    def send_back(self, turn: EngineSequence) -> None:
        """Preempt a running turn: free its blocks and queue it."""
        self.running.remove(turn)
        self.stop(turn)
        self.queue(turn)

    def remove_running(self) -> list[EngineSequence]:
        """Empty the running set; return the turns that were in it."""
        removed, self.running = self.running, []
        for turn in removed:
            self.stop(turn)
        return removed

    def stop(self, turn: EngineSequence) -> None:
        """Release the KV of a turn that has left the running set."""
        turn.is_running = False
        self.sessions.leave(turn)
        self._cache.release(turn.drop_kv())

    # ------------------------------------------------------------ for tests

    def check(self) -> None:
        """Check block counts against the turns, and that no two turns write to one block.

        Raises:
            AssertionError: they disagree.
        """
        if any(turn.blocks or turn.is_running for _, turn in self._waiting):
            raise AssertionError("a waiting turn has blocks, or is said to run")
        self._cache.check([turn.blocks for turn in self.running])
        holders = Counter(block for turn in self.running for block in turn.blocks)
        for turn in self.running:
            written = turn.blocks[turn.computed // self._limits.block_tokens :]
            if any(holders[block] > 1 for block in written):
                raise AssertionError(f"turn {turn.handle} would write to a block it shares")
            if turn.computed > turn.block_tokens_held or not turn.is_running:
                raise AssertionError(f"turn {turn.handle} runs without the KV it has computed")
