"""Tests that a message too large for its kind is refused before it is decoded."""

from collections.abc import Callable
from typing import get_args

import msgspec
import pytest

from tidegate.errors import BadFrame
from tidegate.transport.limits import (
    ENGINE_FRAME_BYTES_MAX,
    FRAME_BYTES_MAX,
    FRAME_BYTES_MAX_BY_KIND,
    SMALL_FRAME_BYTES_MAX,
    TEXT_CHARS_MAX,
    check_frame_size,
    cut,
)
from tidegate.transport.messages import (
    FromEngine,
    FromOrchestrator,
    decode_from_engine,
    decode_from_orchestrator,
)
from tidegate.transport.rate_limiter import PEERS_MAX, RateLimiter

KINDS = sorted(
    kind.__struct_config__.tag for kind in {*get_args(FromEngine), *get_args(FromOrchestrator)}
)


def frame_of(kind: str, nbytes: int) -> bytes:
    """Return this many bytes that begin as a message of this kind."""
    head = msgspec.msgpack.encode({"kind": kind, "x": None})[:-1] + b"\xc6"
    filling = nbytes - len(head) - 4
    return head + filling.to_bytes(4, "big") + bytes(filling)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_message_has_a_largest_size(kind: str) -> None:
    bytes_max = FRAME_BYTES_MAX_BY_KIND.get(kind, SMALL_FRAME_BYTES_MAX)
    check_frame_size(frame_of(kind, bytes_max))
    with pytest.raises(BadFrame, match=f"of kind '{kind}' it may have {bytes_max}"):
        check_frame_size(frame_of(kind, bytes_max + 1))


def test_no_kind_may_be_larger_than_what_sockets_let_through() -> None:
    assert max(FRAME_BYTES_MAX_BY_KIND.values()) == FRAME_BYTES_MAX
    from_engine = [FRAME_BYTES_MAX_BY_KIND[kind] for kind in ("hello", "step")]
    assert max(from_engine) == ENGINE_FRAME_BYTES_MAX


@pytest.mark.parametrize("decode", [decode_from_engine, decode_from_orchestrator])
@pytest.mark.parametrize(
    "frame",
    [
        bytes(SMALL_FRAME_BYTES_MAX + 1),
        b"\x91" * (SMALL_FRAME_BYTES_MAX + 1),
        frame_of("message_rejected", SMALL_FRAME_BYTES_MAX + 1),
        frame_of("x" * 70_000, 80_000),
        frame_of("step", 80_000)[:-1],
    ],
    ids=["zeros", "nested", "small kind", "no kind", "cut off"],
)
def test_a_large_frame_that_is_nothing_is_refused_in_few_words(
    decode: Callable[[bytes], object], frame: bytes
) -> None:
    with pytest.raises(BadFrame) as refusal:
        decode(frame)
    assert len(str(refusal.value)) <= TEXT_CHARS_MAX + 1


def test_long_texts_are_cut_and_short_ones_are_not() -> None:
    assert cut("x" * TEXT_CHARS_MAX) == "x" * TEXT_CHARS_MAX
    assert cut("x" * TEXT_CHARS_MAX + "y") == "x" * TEXT_CHARS_MAX + "…"


def test_a_peer_is_answered_so_often_in_a_while_and_again_in_the_next() -> None:
    limiter = RateLimiter(replies_max=2, interval_s=1.0)
    assert [limiter.has(b"a", 0.0) for _ in range(3)] == [True, True, False]
    assert limiter.has(b"b", 0.9)
    assert not limiter.has(b"a", 0.99)
    assert limiter.has(b"a", 1.0)


def test_ever_new_peers_are_not_remembered_for_ever() -> None:
    limiter = RateLimiter(replies_max=1, interval_s=1.0)
    answered = sum(limiter.has(b"%d" % peer, 0.0) for peer in range(3 * PEERS_MAX))
    assert answered == PEERS_MAX
    assert limiter.has(b"late", 1.0)
