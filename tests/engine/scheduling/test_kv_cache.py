import pytest

from tidegate.engine.scheduling import kv_cache
from tidegate.engine.scheduling.kv_cache import KvCache, Node


def allocate(cache: KvCache, count: int) -> list[int]:
    blocks = cache.allocate(count)
    assert blocks is not None
    return blocks


def cache_path(cache: KvCache, node: Node, *contents: bytes) -> list[int]:
    """Cache new blocks with these contents one after another; the caller holds them."""
    blocks = allocate(cache, len(contents))
    for block, tokens in zip(blocks, contents, strict=True):
        node = cache.add(node, tokens, block)
    return blocks


# ---------------------------------------------------------------- blocks


def test_every_block_is_allocated_once_until_it_is_freed() -> None:
    cache = KvCache(5)
    assert cache.allocate(6) is None
    held, others = allocate(cache, 2), allocate(cache, 3)
    assert sorted(held + others) == [0, 1, 2, 3, 4]
    assert cache.free_blocks == 0
    assert cache.allocate(1) is None
    assert cache.allocate(0) == []
    cache.release(held)
    assert cache.free_blocks == 2
    assert sorted(allocate(cache, 2)) == sorted(held)


@pytest.mark.parametrize("blocks", [[0, 0], [1], [-1], [2]])
def test_freeing_a_block_twice_or_unallocated_raises(blocks: list[int]) -> None:
    cache = KvCache(2)
    assert cache.allocate(1) == [0]

    with pytest.raises(ValueError, match="block"):
        cache.release(blocks)


def test_a_cache_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="num_blocks"):
        KvCache(0)


# ---------------------------------------------------------------- contexts


def test_cached_blocks_are_separated_by_version_adapter_and_salt() -> None:
    cache = KvCache(4)
    cache_path(cache, cache.root(3), b"aa")

    assert cache.root(3) == cache.root(3, "")
    for other in (cache.root(4), cache.root(3, "poet"), cache.root(3, "", "salt")):
        assert cache.find(other, b"aa") is None


def test_unused_salts_are_forgotten_beyond_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_cache, "ROOTS_MAX", 8)
    cache = KvCache(2)
    cache_path(cache, kept := cache.root(0, "", "kept"), b"aa")
    for number in range(20):
        cache.root(0, "", str(number))
    assert cache.root(0, "", "kept") == kept
    assert len(cache._roots) <= 8


def test_uncached_blocks_are_evicted_before_cached_ones() -> None:
    cache = KvCache(2)
    blocks = cache_path(cache, cache.root(0), b"aa")
    cache.release(blocks)

    assert allocate(cache, 1) != blocks
    assert cache.cached_blocks == 1


def test_the_end_of_a_context_is_evicted_before_its_beginning() -> None:
    cache = KvCache(3)
    blocks = cache_path(cache, cache.root(0), b"aa", b"bb", b"cc")
    cache.release(blocks)

    assert [allocate(cache, 1) for _ in range(3)] == [[block] for block in reversed(blocks)]


def test_the_most_recently_used_block_is_evicted_last() -> None:
    cache = KvCache(3)
    root = cache.root(0)
    one, other, third = (cache_path(cache, root, text) for text in (b"aa", b"bb", b"cc"))
    for block in (one, other, third):
        cache.release(block)
    cache.hold(one)
    cache.release(one)

    assert [allocate(cache, 1) for _ in range(3)] == [other, third, one]


def test_protected_blocks_are_evicted_last_and_the_oldest_first() -> None:
    cache = KvCache(4)
    root = cache.root(0)
    first, second, third, last = (
        cache_path(cache, root, text) for text in (b"a", b"b", b"c", b"d")
    )
    for blocks in (first, second):
        cache.protect(blocks)
    for blocks in (first, second, third, last):
        cache.release(blocks)
    cache.check([])

    assert [allocate(cache, 1) for _ in range(4)] == [third, last, first, second]


def test_unprotected_blocks_are_evicted_first_from_their_contexts_end() -> None:
    cache = KvCache(5)
    root = cache.root(0)
    ended = cache_path(cache, root, b"a", b"b", b"c")
    ended_wants = cache.protect(ended)
    beginning_wants = cache.protect(ended[:1])  # another context begins like it
    other = cache_path(cache, root, b"d")
    cache.protect(other)
    cache.release(ended)
    cache.release(other)

    cache.unprotect(ended_wants)
    cache.check([])

    allocate(cache, 1)  # was never cached
    assert [allocate(cache, 1) for _ in range(4)] == [ended[2:], ended[1:2], ended[:1], other]
    cache.unprotect(beginning_wants)


def test_protection_ends_with_the_cached_content_of_its_block() -> None:
    cache = KvCache(2)
    blocks = cache_path(cache, cache.root(0), b"a", b"b")
    gone = cache.protect(blocks)
    cache.release(blocks)
    for others in (cache_path(cache, cache.root(0), b"c", b"d"), blocks):
        assert sorted(others) == [0, 1]
    cache.protect(others)
    cache.release(others)

    cache.unprotect(gone)  # changes nothing for later holders
    assert cache.find(cache.root(0), b"c") is not None
    cache.check([])
    cache.forget()
    cache.check([])
    assert cache.free_blocks == 2


def test_only_cached_and_referenced_blocks_can_be_protected() -> None:
    cache = KvCache(2)
    cached = cache_path(cache, cache.root(0), b"a")
    cache.release(cached)

    for blocks in (cached, allocate(cache, 1)):
        with pytest.raises(AssertionError, match="can't be protected"):
            cache.protect(blocks)


def test_caching_a_context_twice_or_an_unreferenced_block_raises() -> None:
    cache = KvCache(3)
    root = cache.root(0)
    block = cache_path(cache, root, b"aa")[0]

    with pytest.raises(AssertionError, match="can't be cached"):
        cache.add(root, b"aa", allocate(cache, 1)[0])
    with pytest.raises(AssertionError, match="can't be cached"):
        cache.add(root, b"bb", block)
    with pytest.raises(AssertionError, match="can't be cached"):
        cache.add(root, b"bb", 2)
