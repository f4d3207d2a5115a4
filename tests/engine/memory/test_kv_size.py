"""Size of the KV cache by free memory."""

from pathlib import Path

import pytest

from tidegate.engine.memory.kv_size import (
    HOST_KV_BYTES_MAX,
    KV_BYTES_MIN,
    block_tokens_default,
    kv_bytes,
    stored_bytes,
)

GIB = 1024**3


@pytest.mark.parametrize(
    ("available", "sharers", "weights", "on_host", "expected"),
    [
        (80 * GIB, 1, 8 * GIB, False, 56 * GIB),  # 0.9 of 80, less two sets
        (80 * GIB, 2, 8 * GIB, False, 20 * GIB),
        (80 * GIB, 1, 40 * GIB, False, KV_BYTES_MIN),  # the weights hardly fit
        (32 * GIB, 4, GIB // 2, True, GIB),
        (512 * GIB, 2, GIB, True, HOST_KV_BYTES_MAX),
        (0, 2, 0, True, KV_BYTES_MIN),
    ],
)
def test_engines_divide_what_is_free_beside_two_sets_of_weights(
    available: int, sharers: int, weights: int, on_host: bool, expected: int
) -> None:
    found = kv_bytes(
        available_bytes=available, sharers=sharers, weights_bytes=weights, on_host=on_host
    )
    assert found == pytest.approx(expected, abs=8)


@pytest.mark.parametrize(("on_host", "share"), [(True, 0.5), (False, 0.5)])
def test_a_given_share_replaces_the_default_one_and_its_limit(on_host: bool, share: float) -> None:
    found = kv_bytes(
        available_bytes=64 * GIB, sharers=2, weights_bytes=GIB, on_host=on_host, share=share
    )
    assert found == 14 * GIB  # half of 64, divided by two, less two sets


def test_stored_weights_are_all_safetensors_files(tmp_path: Path) -> None:
    for name, size in (("a.safetensors", 5), ("b.safetensors", 7), ("tokenizer.json", 100)):
        (tmp_path / name).write_bytes(bytes(size))
    assert stored_bytes(tmp_path) == 12


@pytest.mark.parametrize(
    ("token_bytes", "state_bytes", "expected"),
    [(1024, 0, 16), (1024, 16 * 1024, 16), (1024, 17 * 1024, 32), (0, 1024, 256)],
)
def test_blocks_have_as_many_tokens_as_take_the_memory_of_their_state(
    token_bytes: int, state_bytes: int, expected: int
) -> None:
    assert block_tokens_default(token_bytes=token_bytes, state_bytes=state_bytes) == expected
