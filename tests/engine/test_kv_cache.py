import pytest

from tidegate.engine.kv_cache import BlockPool


def test_every_block_is_handed_out_once_and_then_no_more() -> None:
    pool = BlockPool(5)

    blocks = [*(pool.allocate(2) or []), *(pool.allocate(3) or [])]

    assert sorted(blocks) == [0, 1, 2, 3, 4]
    assert pool.free_blocks == 0
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []


def test_a_request_that_does_not_fit_takes_nothing() -> None:
    pool = BlockPool(3)

    assert pool.allocate(4) is None
    assert pool.free_blocks == 3


def test_freed_blocks_can_be_allocated_again() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    assert blocks is not None

    pool.free(blocks)

    assert pool.free_blocks == 2
    assert sorted(pool.allocate(2) or []) == [0, 1]


@pytest.mark.parametrize("blocks", [[0, 0], [1], [-1], [2]])
def test_a_block_freed_twice_or_never_taken_is_refused(blocks: list[int]) -> None:
    pool = BlockPool(2)
    assert pool.allocate(1) == [0]

    with pytest.raises(ValueError, match="block"):
        pool.free(blocks)


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="num_blocks"):
        BlockPool(0)
