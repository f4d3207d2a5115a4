"""Block allocator and prefix cache of the KV cache: block numbers, reference counts and eviction.

The tensors belong to the model runner. A block holds the keys and values of ``block_tokens``
successive context positions in every layer. Blocks are allocated singly, so a sequence's blocks
need not be adjacent.

The prefix cache is a radix tree over full blocks. A cached block is a node, is immutable, and may
be held by any number of sequences. Its key is the parent node and the block's tokens, compared in
full rather than hashed, so two contexts never collide. The root stands for the weights that
computed the KV, so KV of one weight version is never found from another version's root.

A sequence that holds a node holds all of its ancestors, and releases descendants first. So the
least recently used idle node has no idle descendants, and is evicted first. Blocks that an open
session protects, because its next turn will reuse them, are evicted last; a session that protects a
node protects all of its ancestors.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

Node = int
"""Number of a node in the prefix trees; never reused."""

NO_NODE: Node = 0
"""Node of a block that has not been cached since it was allocated."""

ROOTS_MAX = 65536
"""Limit of roots, one per weight version, adapter and salt: 10 MB. Beyond it, roots without cached
blocks are dropped."""

ProtectedBlocks = list[tuple[int, Node]]
"""Protected blocks in the order of their positions, each with its node at the time of
protection."""


class KvCache:
    """Allocates block numbers ``[0, num_blocks)`` and caches full blocks by context.
    For one thread."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        """Stack of free blocks: the block freed last is warm in the CPU's caches, so it is
        allocated first."""
        self._holders = [0] * num_blocks
        """Reference count of each block: the number of sequences that hold it."""
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Cached blocks that no sequence holds and no session protects, least recently used
        first."""
        self._protections = [0] * num_blocks
        """Number of sessions that protect each block; 0 for blocks that are not cached."""
        self._idle_protected: OrderedDict[int, None] = OrderedDict()
        """Cached blocks that no sequence holds and at least one session protects, least recently
        used first."""
        self._blocks: dict[tuple[Node, bytes], int] = {}
        """Cached blocks, by parent node and the block's tokens."""
        self._keys: list[tuple[Node, bytes] | None] = [None] * num_blocks
        """Each block's key in ``_blocks``; None if the block is not cached."""
        self._nodes: list[Node] = [NO_NODE] * num_blocks
        """Each cached block's node. Kept after ``forget``, because several sequences
        may hold the block."""
        self._roots: dict[tuple[int, str, int, str, bool], Node] = {}
        self._next_node: Node = NO_NODE + 1

    @property
    def free_blocks(self) -> int:
        """Number of blocks that can be allocated, including cached blocks that no sequence
        holds."""
        return len(self._free) + len(self._idle) + len(self._idle_protected)

    @property
    def cached_blocks(self) -> int:
        """Number of blocks that can be found by their context."""
        return len(self._blocks)

    # ------------------------------------------------------------ blocks

    def allocate(self, count: int) -> list[int] | None:
        """Take ``count`` blocks, evicting idle cached ones; None if fewer are free."""
        if count < 0:
            raise ValueError(f"count must not be negative, got {count}")
        if count > self.free_blocks:
            return None
        for _ in range(count - len(self._free)):
            block, _ = (self._idle or self._idle_protected).popitem(last=False)
            self._uncache(block)
            self._free.append(block)
        remaining = len(self._free) - count
        blocks = self._free[remaining:][::-1]
        del self._free[remaining:]
        for block in blocks:
            self._holders[block] = 1
            self._nodes[block] = NO_NODE
        return blocks

    def hold(self, blocks: Iterable[int]) -> None:
        """Add a holder to each of these cached blocks."""
        for block in blocks:
            if not self._holders[block]:
                del self._idle_queue(block)[block]
            self._holders[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Remove one holder from each block, given in the order of the sequence's positions.

        Raises:
            ValueError: a block is not of this cache, or has no holder: two sequences would have
            written
                to it.
        """
        holders = self._holders
        for block in reversed(blocks):
            if not 0 <= block < self.num_blocks:
                raise ValueError(f"block {block} is not in [0, {self.num_blocks})")
            if not holders[block]:
                raise ValueError(f"block {block} was freed twice")
            holders[block] -= 1
            if not holders[block]:
                if self._keys[block] is None:
                    self._free.append(block)
                else:
                    self._idle_queue(block)[block] = None

    def count_held(self, blocks: Iterable[int]) -> int:
        """Return how many blocks have a holder; holding those costs no free block."""
        return sum(self._holders[block] > 0 for block in blocks)

    # ------------------------------------------------------------ protection

    def protect(self, blocks: Sequence[int]) -> ProtectedBlocks:
        """Protect held, cached blocks for one more session; return the argument of
        ``unprotect``."""
        for block in blocks:
            if self._keys[block] is None or not self._holders[block]:
                raise AssertionError(f"block {block} can't be protected: not cached, or not held")
            self._protections[block] += 1
        return [(block, self._nodes[block]) for block in blocks]

    def unprotect(self, protected: ProtectedBlocks) -> None:
        """Undo one ``protect`` of the blocks that have not been evicted since."""
        for block, node in reversed(protected):
            if self._keys[block] is None or self._nodes[block] != node:
                continue  # evicted since
            self._protections[block] -= 1
            if not self._protections[block] and block in self._idle_protected:
                del self._idle_protected[block]
                self._idle[block] = None

    # ------------------------------------------------------------ contexts

    def root(
        self,
        weight_version: int,
        adapter: str = "",
        salt: str = "",
        adapter_version: int = -1,
        *,
        has_positions: bool = False,
    ) -> Node:
        """Return the root of contexts with KV of these weights, this adapter and this salt.

        Contexts whose routed experts are recorded have roots of their own, because blocks that
        other turns computed have no record.
        """
        key = (weight_version, adapter, adapter_version, salt, has_positions)
        root = self._roots.get(key)
        if root is None:
            if len(self._roots) >= max(ROOTS_MAX, 2 * self.num_blocks):
                used = {node for node, _ in self._blocks}
                self._roots = {k: node for k, node in self._roots.items() if node in used}
            root = self._roots[key] = self._new_node()
        return root

    def find(self, node: Node, tokens: bytes) -> int | None:
        """Return the cached block with these tokens after ``node``; None if there is none."""
        return self._blocks.get((node, tokens))

    def node(self, block: int) -> Node:
        """Return a cached block's node."""
        return self._nodes[block]

    def add(self, node: Node, tokens: bytes, block: int) -> Node:
        """Cache a held, full block with these tokens after ``node``; return the block's node."""
        key = (node, tokens)
        if key in self._blocks or self._keys[block] is not None or not self._holders[block]:
            raise AssertionError(
                f"block {block} can't be cached: it or its context already is, or it is not held"
            )
        self._blocks[key] = block
        self._keys[block] = key
        self._nodes[block] = self._new_node()
        return self._nodes[block]

    def forget(self) -> None:
        """Empty the prefix cache. Held blocks stay held, and are private from now on."""
        for block in self._blocks.values():
            self._keys[block] = None
            self._protections[block] = 0
        self._blocks.clear()
        self._roots.clear()
        for queue in (self._idle, self._idle_protected):
            self._free.extend(queue)
            queue.clear()

    def _new_node(self) -> Node:
        self._next_node += 1
        return self._next_node - 1

    def _idle_queue(self, block: int) -> OrderedDict[int, None]:
        return self._idle_protected if self._protections[block] else self._idle

    def _uncache(self, block: int) -> None:
        key = self._keys[block]
        if key is None:
            raise AssertionError(f"idle block {block} is not cached")
        del self._blocks[key]
        self._keys[block] = None
        self._protections[block] = 0

    # ------------------------------------------------------------ for tests

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Check the reference counts against the block tables of all sequences.

        Raises:
            AssertionError: a block is lost, held twice by one sequence or miscounted; or a cached
                block could outlive its parent.
        """
        held = Counter(block for table in tables for block in table)
        for block in range(self.num_blocks):
            idle = (block in self._idle) + (block in self._idle_protected)
            states = (block in self._free) + idle + (held[block] > 0)
            if idle and block not in self._idle_queue(block):
                raise AssertionError(f"block {block} is in the wrong eviction queue")
            if self._holders[block] != held[block] or states != 1:
                raise AssertionError(
                    f"block {block} has a reference count of {self._holders[block]}, expected "
                    f"{held[block]}, and is in {states} of the states free, idle and held"
                )
            if held[block] > 1 and self._nodes[block] == NO_NODE:
                raise AssertionError(f"block {block} is shared but was never cached")
        ranks = {block: rank for rank, block in enumerate((*self._idle, *self._idle_protected))}
        ends = {self._nodes[block]: block for block in self._blocks.values()}
        roots = set(self._roots.values())
        for (node, _), block in self._blocks.items():
            before = ends.get(node)
            if before is None and node not in roots:
                raise AssertionError(f"block {block} is cached, and its parent is not")
            if before in ranks and not ranks.get(block, -1) < ranks[before]:
                raise AssertionError(f"block {before} would be evicted before its child {block}")
