"""EpisodeFailures: who has caused a failure, which end a run, and what is logged of them."""

import logging
from typing import Any

import pytest

from tidegate.errors import (
    ConfigError,
    ContextFull,
    EngineLost,
    EnvironmentCrashed,
    EnvironmentHung,
    EpisodeError,
    InfrastructureFailed,
    PolicyFailed,
    ScoreRefused,
    TurnRefused,
    TurnTimeout,
)
from tidegate.orchestrator.core.failure_counts import FailureKey, FailureOutcome
from tidegate.orchestrator.core.rollout import Rollout, Turn
from tidegate.orchestrator.episodes.failures import (
    REASONS_MAX,
    EpisodeFailures,
    EpisodeTimedOut,
    FailureClass,
    classify,
)
from tidegate.policies.failures import FailureCause
from tidegate.transport.messages import SamplingParams

POLICY, INFRA, CODE = FailureCause.POLICY, FailureCause.INFRASTRUCTURE, FailureCause.CODE


def raised(error: BaseException) -> BaseException:
    """Return the error with a traceback, as if an episode had raised it."""
    try:
        raise error
    except BaseException as caught:  # noqa: BLE001 - any error may be given
        return caught


def fail_n(failures: EpisodeFailures, n: int, error: type[Exception], *, groups: int) -> None:
    for number in range(n):
        caught = raised(error(f"failure {number}"))
        cause = classify(caught, Rollout(number, 0, 0)).cause
        key = FailureKey(cause, "reason", FailureOutcome.DISCARDED)
        failures.fail(number, number % groups, caught, key)


def test_the_same_error_of_the_code_ends_a_run_in_which_no_episode_has_succeeded() -> None:
    failures = EpisodeFailures()
    fail_n(failures, 7, TypeError, groups=3)
    with pytest.raises(EpisodeError, match=r"8 episodes failed in the same place .*: failure 0"):
        fail_n(failures, 1, TypeError, groups=3)


def test_one_task_that_fails_in_all_its_rollouts_does_not_end_the_run() -> None:
    fail_n(EpisodeFailures(), 99, TypeError, groups=1)


def test_after_a_success_or_by_infrastructure_errors_only_100_failures_end_the_run() -> None:
    succeeded = EpisodeFailures()
    fail_n(succeeded, 5, TypeError, groups=3)
    succeeded.succeed()
    fail_n(succeeded, 99, TypeError, groups=3)
    unreachable = EpisodeFailures()
    fail_n(unreachable, 99, ConnectionError, groups=3)
    for failures in (succeeded, unreachable):
        with pytest.raises(EpisodeError, match="100 episodes in a row failed"):
            fail_n(failures, 1, ConnectionError, groups=3)


def test_a_distinct_error_is_logged_once_with_its_traceback_and_then_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failures = EpisodeFailures()
    with caplog.at_level(logging.WARNING, "tidegate"):
        fail_n(failures, 30, ConnectionError, groups=3)
        fail_n(failures, 1, KeyError, groups=3)
    messages = [record.getMessage() for record in caplog.records]
    assert [record.exc_info is not None for record in caplog.records] == [True, False, True]
    assert "rollout=9 discarded" in messages[1]
    assert "10 failures in this place" in messages[1]


# ---------------------------------------------------------------- whose doing


def rollout_with(tokens: int, finish_reason: str = "stop") -> Rollout:
    rollout = Rollout(0, 0, 0)
    rollout.extend([1, 2])
    turn = Turn(rollout, SamplingParams(max_tokens=8))
    rollout.turns.append(turn)
    for _ in range(tokens):
        turn.append(5, -0.1, 0, "a")
    turn.finish_reason = finish_reason
    return rollout


HUNG = EnvironmentHung(environment="e", doing="step 1", why="late")
CRASHED = EnvironmentCrashed(environment="e", doing="step 1", why="killed")

CLASSES = [
    (PolicyFailed("no such tool", reason="invalid_call"), POLICY, "invalid_call"),
    (PolicyFailed(), POLICY, "gave_up"),
    (InfrastructureFailed("search is down"), INFRA, "tool_failed"),
    (InfrastructureFailed("container lost", reason="sandbox_lost"), INFRA, "sandbox_lost"),
    (ContextFull(tokens=300, tokens_max=300), POLICY, "context_full"),
    (TurnRefused("no such adapter"), CODE, "turn_refused"),
    (EpisodeTimedOut("600 s"), POLICY, "episode_timeout"),
    (EpisodeTimedOut("600 s", lacked="engine"), INFRA, "no_engine"),
    (EpisodeTimedOut("600 s", lacked="scores"), INFRA, "no_scores"),
    (TurnTimeout(timeout_s=1.0, tokens=3), POLICY, "turn_timeout"),
    (TurnTimeout(timeout_s=1.0, tokens=0), INFRA, "turn_timeout"),
    (HUNG, INFRA, "environment_failed"),
    (CRASHED, INFRA, "environment_failed"),
    (EngineLost("all are gone"), INFRA, "engine_lost"),
    (ConnectionError("refused"), INFRA, "episode_error"),
    (TimeoutError("a tool's"), INFRA, "episode_error"),
    (TypeError("float can't be awaited"), CODE, "code_error"),
    (KeyError("answer"), CODE, "code_error"),
    (ScoreRefused("outside the model's vocabulary"), CODE, "code_error"),
    (ConfigError("returned None"), CODE, "code_error"),
    (ExceptionGroup("tasks", [ConnectionError("refused")]), INFRA, "episode_error"),
    (ExceptionGroup("tasks", [ExceptionGroup("", [KeyError("answer")])]), CODE, "code_error"),
]


@pytest.mark.parametrize(("error", "cause", "reason"), CLASSES)
def test_an_error_is_classed_by_its_cause(
    error: Exception, cause: FailureCause, reason: str
) -> None:
    assert classify(error, rollout_with(3)) == FailureClass(cause, reason)


def test_a_model_that_has_sampled_nothing_is_not_to_blame() -> None:
    nothing = rollout_with(0)
    assert classify(ContextFull(tokens=300, tokens_max=300), nothing).cause is CODE
    assert classify(ContextFull(tokens=300, tokens_max=300), nothing).reason == "prompt_too_long"
    assert classify(EpisodeTimedOut("its reset hung"), nothing).cause is INFRA


def test_a_timeout_around_a_turn_is_the_models_and_one_around_a_tool_the_infrastructures() -> None:
    late = TimeoutError()
    assert classify(late, rollout_with(3, "cancelled")) == FailureClass(POLICY, "turn_timeout")
    assert classify(late, rollout_with(3, "stop")).cause is INFRA
    assert classify(late, rollout_with(0, "cancelled")).cause is INFRA


@pytest.mark.parametrize("reason", ["", "Gave up", "9_lives", "x" * 41])
def test_a_reason_that_is_no_ledger_account_is_refused_where_it_is_raised(reason: str) -> None:
    with pytest.raises(ConfigError, match="a reason is up to 40 lowercase letters"):
        PolicyFailed("why", reason=reason)


def test_reasons_beyond_the_limit_are_counted_together() -> None:
    failures = EpisodeFailures()
    for number in range(REASONS_MAX):
        assert failures.known(FailureClass(INFRA, f"r{number}")).reason == f"r{number}"
    assert failures.known(FailureClass(INFRA, "one_more")) == FailureClass(INFRA, "other")
    assert failures.known(FailureClass(POLICY, "r0")).reason == "r0"


async def grade() -> float:
    return 0.5


async def forgets_an_await() -> float:
    answer: Any = grade()
    try:
        return float(answer.value)
    finally:
        answer.close()


async def awaits_a_number() -> float:
    number: Any = 0.5
    return float(await number)


@pytest.mark.parametrize(
    ("episode", "hint"),
    [
        (forgets_an_await, "an `await` is missing there"),
        (awaits_a_number, "define it with `async def`, or omit the `await`"),
    ],
)
async def test_the_run_ends_with_the_line_that_is_wrong_and_what_to_write(
    episode: Any, hint: str
) -> None:
    failures = EpisodeFailures()
    key = FailureKey(CODE, "code_error", FailureOutcome.DISCARDED)
    with pytest.raises((AttributeError, TypeError)) as caught:
        await episode()
    for number in range(7):
        failures.fail(number, number, caught.value, key)
    with pytest.raises(EpisodeError, match=r"test_failures.py:\d+ \(\w+_a_?n\w+\) with") as ended:
        failures.fail(7, 7, caught.value, key)
    assert hint in str(ended.value)


def test_only_failures_that_discard_count_towards_the_end_of_the_run() -> None:
    failures = EpisodeFailures()
    for number in range(500):
        outcome = FailureOutcome.RETRIED if number % 2 else FailureOutcome.REWARDED
        failures.fail(number, number, raised(ConnectionError()), FailureKey(INFRA, "x", outcome))


def test_the_log_says_once_that_failures_of_the_model_are_hidden_from_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failures = EpisodeFailures()
    key = FailureKey(POLICY, "episode_timeout", FailureOutcome.DISCARDED)
    with caplog.at_level(logging.WARNING, "tidegate"):
        for number in range(3):
            failures.fail(number, number, raised(EpisodeTimedOut("late")), key)
    hints = [m for r in caplog.records if "FailurePolicy(reward=" in (m := r.getMessage())]
    assert len(hints) == 1
    assert "rollout=0 was discarded as episode_timeout" in hints[0]
