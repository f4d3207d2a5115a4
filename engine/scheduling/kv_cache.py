"""Which blocks of the KV cache are free, and which hold a context that another turn can use?

It counts and remembers; the memory itself is the model runner's. It knows nothing of turns.

A block holds the keys and values of ``block_tokens`` successive context positions, in every layer.
Blocks are handed out singly, so a turn's blocks lie anywhere. A full block may be cached: then it
is a node of a tree whose paths spell contexts, and any number of turns may hold it. Nobody writes
to it any more.

Keys are a node and the tokens that follow it, compared in full: no two contexts share a key by
chance. A tree's root stands for the weights that computed all of it, so what one version computed
is not found from another's.

Whoever holds a node holds all before it, and lets go of the last ones first. So the node that was
idle for longest never has another after it, and leaves first where room is needed. Whoever wants a
node that it doesn't hold wants all before it, too; and what nobody wants leaves before the rest.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

Node = int
"""A place in the trees; its number is never used for another."""

NOWHERE: Node = 0
"""Of a block that was never cached since it was allocated."""

ROOTS_MAX = 65536
"""Of salts: 10 MB. Beyond it those go under which nothing is cached."""

Wanted = list[tuple[int, Node]]
"""Blocks, in the order of their positions, and what was in them then."""


class KvCache:
    """Hands out block numbers ``[0, num_blocks)``. Used by one thread."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        """A stack: the block freed last is warm in the CPU's caches, so it goes out first."""
        self._holders = [0] * num_blocks
        """How many turns hold each block."""
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Cached blocks that nobody holds or wants, idle for longest first."""
        self._wants = [0] * num_blocks
        """How many will come back for each block; 0 where it is not cached."""
        self._wanted: OrderedDict[int, None] = OrderedDict()
        """Cached blocks that nobody holds and somebody wants, idle for longest first."""
        self._blocks: dict[tuple[Node, bytes], int] = {}
        """Every cached block that can be found, by what is before it and its tokens."""
        self._keys: list[tuple[Node, bytes] | None] = [None] * num_blocks
        """Each block's key in ``_blocks``; None where it is in none."""
        self._nodes: list[Node] = [NOWHERE] * num_blocks
        """Where each cached block's tokens end; also once it is forgotten, for it may be shared."""
        self._roots: dict[tuple[int, str, str], Node] = {}
        self._next_node: Node = NOWHERE + 1

    @property
    def free_blocks(self) -> int:
        """How many blocks can still be allocated, cached ones that nobody holds among them."""
        return len(self._free) + len(self._idle) + len(self._wanted)

    @property
    def cached_blocks(self) -> int:
        """How many blocks can be found by their context."""
        return len(self._blocks)

    # ------------------------------------------------------------ blocks

    def allocate(self, count: int) -> list[int] | None:
        """Take ``count`` blocks to write to, or none of them (None) where fewer are free."""
        if count < 0:
            raise ValueError(f"count must not be negative, got {count}")
        if count > self.free_blocks:
            return None
        for _ in range(count - len(self._free)):
            block, _ = (self._idle or self._wanted).popitem(last=False)
            self._uncache(block)
            self._free.append(block)
        kept = len(self._free) - count
        blocks = self._free[kept:][::-1]
        del self._free[kept:]
        for block in blocks:
            self._holders[block] = 1
            self._nodes[block] = NOWHERE
        return blocks

    def hold(self, blocks: Iterable[int]) -> None:
        """Take cached blocks beside whoever holds them."""
        for block in blocks:
            if not self._holders[block]:
                del self._idle_queue(block)[block]
            self._holders[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Give blocks back, those of one turn in the order of their positions.

        Raises:
            ValueError: a block is not of this cache, or nobody holds it: two turns would have
                written to it.
        """
        holders = self._holders
        for block in reversed(blocks):
            if not 0 <= block < self.num_blocks:
                raise ValueError(f"block {block} is not one of this cache's {self.num_blocks}")
            if not holders[block]:
                raise ValueError(f"block {block} was freed twice")
            holders[block] -= 1
            if not holders[block]:
                if self._keys[block] is None:
                    self._free.append(block)
                else:
                    self._idle_queue(block)[block] = None

    def count_held(self, blocks: Iterable[int]) -> int:
        """How many of these blocks somebody holds: taking them leaves ``free_blocks`` as it is."""
        return sum(self._holders[block] > 0 for block in blocks)

    # ------------------------------------------------------------ wants

    def want(self, blocks: Sequence[int]) -> Wanted:
        """Somebody will come back for these cached blocks, who holds them until now."""
        for block in blocks:
            if self._keys[block] is None or not self._holders[block]:
                raise AssertionError(f"block {block} can't be wanted: not cached, or nobody's")
            self._wants[block] += 1
        return [(block, self._nodes[block]) for block in blocks]

    def unwant(self, wanted: Wanted) -> None:
        """Whoever said ``want`` won't come back for what is still there of it."""
        for block, node in reversed(wanted):
            if self._keys[block] is None or self._nodes[block] != node:
                continue  # room was needed
            self._wants[block] -= 1
            if not self._wants[block] and block in self._wanted:
                del self._wanted[block]
                self._idle[block] = None

    # ------------------------------------------------------------ contexts

    def root(self, weight_version: int, adapter: str = "", salt: str = "") -> Node:
        """Where contexts begin whose KV these weights compute, for turns of this salt."""
        key = (weight_version, adapter, salt)
        root = self._roots.get(key)
        if root is None:
            if len(self._roots) >= max(ROOTS_MAX, 2 * self.num_blocks):
                used = {node for node, _ in self._blocks}
                self._roots = {k: node for k, node in self._roots.items() if node in used}
            root = self._roots[key] = self._new_node()
        return root

    def find(self, node: Node, tokens: bytes) -> int | None:
        """The block of these tokens after ``node``."""
        return self._blocks.get((node, tokens))

    def node(self, block: int) -> Node:
        """Where a cached block's tokens end."""
        return self._nodes[block]

    def add(self, node: Node, tokens: bytes, block: int) -> Node:
        """Have a held, full block be found after ``node``; return where its tokens end."""
        key = (node, tokens)
        if key in self._blocks or self._keys[block] is not None or not self._holders[block]:
            raise AssertionError(
                f"block {block} can't be cached: it is, or its context is, or nobody holds it"
            )
        self._blocks[key] = block
        self._keys[block] = key
        self._nodes[block] = self._new_node()
        return self._nodes[block]

    def forget(self) -> None:
        """Nothing cached so far is found again. Blocks that are held stay so, and are private."""
        for block in self._blocks.values():
            self._keys[block] = None
            self._wants[block] = 0
        self._blocks.clear()
        self._roots.clear()
        for queue in (self._idle, self._wanted):
            self._free.extend(queue)
            queue.clear()

    def _new_node(self) -> Node:
        self._next_node += 1
        return self._next_node - 1

    def _idle_queue(self, block: int) -> OrderedDict[int, None]:
        return self._wanted if self._wants[block] else self._idle

    def _uncache(self, block: int) -> None:
        key = self._keys[block]
        if key is None:
            raise AssertionError(f"idle block {block} is not cached")
        del self._blocks[key]
        self._keys[block] = None
        self._wants[block] = 0

    # ------------------------------------------------------------ for tests

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Hold the counts against the block tables of all turns.

        Raises:
            AssertionError: a block is lost, held twice by one, or counted wrong; or a cached block
                could outlive the one before it.
        """
        held = Counter(block for table in tables for block in table)
        for block in range(self.num_blocks):
            idle = (block in self._idle) + (block in self._wanted)
            places = (block in self._free) + idle + (held[block] > 0)
            if idle and block not in self._idle_queue(block):
                raise AssertionError(f"block {block} waits among those that leave at other times")
            if self._holders[block] != held[block] or places != 1:
                raise AssertionError(
                    f"block {block} has {self._holders[block]} holders, really {held[block]}, and "
                    f"is in {places} places"
                )
            if held[block] > 1 and self._nodes[block] == NOWHERE:
                raise AssertionError(f"block {block} is shared, and was never cached")
        ranks = {block: rank for rank, block in enumerate((*self._idle, *self._wanted))}
        ends = {self._nodes[block]: block for block in self._blocks.values()}
        roots = set(self._roots.values())
        for (node, _), block in self._blocks.items():
            before = ends.get(node)
            if before is None and node not in roots:
                raise AssertionError(f"block {block} is cached, and what is before it is not")
            if before in ranks and not ranks.get(block, -1) < ranks[before]:
                raise AssertionError(f"block {before} would leave before {block}, which follows")
