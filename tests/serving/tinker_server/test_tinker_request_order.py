"""A model's training requests start in the order of their numbers, each once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.serving.http.errors import ApiError
from tidegate.serving.tinker import request_order
from tidegate.serving.tinker.request_order import RequestOrder


def digest(seq_id: int) -> bytes:
    return b"%d" % seq_id


def arrive(order: RequestOrder[int], seq_id: int) -> int | None:
    return order.arrived(seq_id, digest(seq_id), seq_id)


@given(arrivals=st.permutations(range(1, 8)), ends=st.lists(st.booleans(), min_size=7, max_size=7))
def test_requests_start_in_the_order_of_their_numbers_one_at_a_time(
    arrivals: list[int], ends: list[bool]
) -> None:
    order, started = RequestOrder[int](1), list[int]()
    for seq_id, has_ended in zip(arrivals, ends, strict=True):
        was_running = order.is_running
        if (next_id := arrive(order, seq_id)) is not None:
            assert not was_running
            started.append(next_id)
        if has_ended and order.is_running and (next_id := order.finished()) is not None:
            started.append(next_id)
    while order.is_running:
        if (next_id := order.finished()) is not None:
            started.append(next_id)
    assert started == list(range(1, 8))


def test_a_request_sent_again_is_known_whether_it_waits_runs_or_has_ended() -> None:
    order = RequestOrder[int](1)
    arrive(order, 1)
    arrive(order, 2)
    assert order.is_known(2, digest(2))
    order.finished()
    order.finished()
    assert order.is_known(1, digest(1))
    assert order.is_known(2, digest(2))
    assert not order.is_known(3, digest(3))


@pytest.mark.parametrize("seq_id", [1, 2])
def test_another_request_of_a_used_number_is_refused(seq_id: int) -> None:
    order = RequestOrder[int](1)
    arrive(order, 1)
    arrive(order, 2)
    with pytest.raises(ApiError, match=f"seq_id {seq_id} was used by another request") as refused:
        order.is_known(seq_id, b"other")
    assert refused.value.status == 400


def test_the_sdk_is_asked_to_retry_when_too_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_order, "WAITING_MAX", 2)
    order = RequestOrder[int](1, is_running=True)
    arrive(order, 1)
    arrive(order, 2)
    with pytest.raises(ApiError, match="request 1 starts next, and those below 3") as refused:
        order.refuse_distant(3)
    assert refused.value.status == 429
    assert order.finished() == 1
    order.refuse_distant(3)


def test_requests_of_a_journal_wait_however_many_there_are() -> None:
    order = RequestOrder[int](1, is_running=True)
    numbers = range(1, request_order.WAITING_MAX + request_order.DIGESTS_MAX + 3)
    for seq_id in numbers:
        arrive(order, seq_id)
    assert all(order.is_known(seq_id, digest(seq_id)) for seq_id in numbers)
    assert [order.finished() for _ in numbers] == list(numbers)


@pytest.mark.parametrize("seq_id", [0, -1, 10**9 + 1, 2**64])
def test_a_request_without_a_number_of_its_own_is_refused(seq_id: int) -> None:
    with pytest.raises(ApiError, match=f"numbered from 1, up to 1000000000, got seq_id {seq_id}"):
        RequestOrder[int](1).is_known(seq_id, digest(seq_id))


def test_an_old_request_that_comes_again_is_known_though_its_digest_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request_order, "DIGESTS_MAX", 2)
    order = RequestOrder[int](1)
    for seq_id in range(1, 6):
        arrive(order, seq_id)
        order.finished()
    assert order.is_known(1, digest(1))
    assert RequestOrder[int](40).is_known(39, digest(39))  # before a restart
