"""EpisodeFailures: which failed episodes end a run, and what is logged of them."""

import logging

import pytest

from tidegate.errors import EpisodeError
from tidegate.orchestrator.episodes.failures import EpisodeFailures


def raised(error: BaseException) -> BaseException:
    """Return the error with a traceback, as if an episode had raised it."""
    try:
        raise error
    except BaseException as caught:  # noqa: BLE001 - any error may be given
        return caught


def fail_n(failures: EpisodeFailures, n: int, error: type[Exception], *, groups: int) -> None:
    for number in range(n):
        failures.fail(number, number % groups, raised(error(f"failure {number}")))


def test_the_same_error_of_the_code_ends_a_run_in_which_no_episode_has_succeeded() -> None:
    failures = EpisodeFailures()
    fail_n(failures, 7, TypeError, groups=3)
    with pytest.raises(EpisodeError, match=r"8 episodes failed in the same place .*: failure 0"):
        fail_n(failures, 1, TypeError, groups=3)


def test_one_task_that_fails_in_all_its_rollouts_does_not_end_the_run() -> None:
    fail_n(EpisodeFailures(), 99, TypeError, groups=1)


def test_after_a_success_or_by_an_error_of_the_world_only_100_failures_in_a_row_end_the_run() -> (
    None
):
    succeeded = EpisodeFailures()
    fail_n(succeeded, 5, TypeError, groups=3)
    succeeded.succeed()
    fail_n(succeeded, 99, TypeError, groups=3)
    unreachable = EpisodeFailures()
    fail_n(unreachable, 99, ConnectionError, groups=3)
    for failures in (succeeded, unreachable):
        with pytest.raises(EpisodeError, match="100 times in a row"):
            fail_n(failures, 1, ConnectionError, groups=3)


def test_a_distinct_error_is_logged_once_with_its_traceback_and_then_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failures = EpisodeFailures()
    with caplog.at_level(logging.WARNING, "tidegate"):
        fail_n(failures, 30, ConnectionError, groups=3)
        fail_n(failures, 1, KeyError, groups=3)
    messages = [record.getMessage() for record in caplog.records]
    assert ["Traceback" in message for message in messages] == [True, False, True]
    assert "rollout=9 discarded" in messages[1]
    assert "10 failures in this place" in messages[1]
