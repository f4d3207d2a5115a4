"""Which blocks of the KV cache are free? It counts; the memory itself is the model runner's.

A block holds the keys and values of ``block_tokens`` successive context positions of one turn, in
every layer. Blocks are handed out singly, so a turn's blocks lie anywhere.
"""

from collections.abc import Iterable


class BlockPool:
    """Hands out block numbers ``[0, num_blocks)``. Used by one thread."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        """A stack: the block freed last is warm in the CPU's caches, so it goes out first."""
        self._is_free = bytearray(b"\x01" * num_blocks)
        """One per block; agrees with ``_free`` at all times."""

    @property
    def free_blocks(self) -> int:
        """How many blocks can still be allocated."""
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """Take ``count`` blocks, or none of them (None) where fewer are free."""
        if count < 0:
            raise ValueError(f"count must not be negative, got {count}")
        if count > len(self._free):
            return None
        kept = len(self._free) - count
        blocks = self._free[kept:][::-1]
        del self._free[kept:]
        for block in blocks:
            self._is_free[block] = 0
        return blocks

    def free(self, blocks: Iterable[int]) -> None:
        """Give blocks back.

        Raises:
            ValueError: a block is not of this pool, or is free already: two turns would have
                shared it.
        """
        for block in blocks:
            if not 0 <= block < self.num_blocks:
                raise ValueError(f"block {block} is not one of this pool's {self.num_blocks}")
            if self._is_free[block]:
                raise ValueError(f"block {block} was freed twice")
            self._is_free[block] = 1
            self._free.append(block)
