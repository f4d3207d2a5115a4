"""Classifies failed episodes, logs each distinct error once, and ends a run that fails too often.

From the cause that :func:`classify` returns, the core decides whether the rollout is retried,
rewarded or discarded. Two errors are the same if they have one type and were raised through the
same lines of code; the message may differ.
"""

import logging
import traceback
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from tidegate.errors import (
    ChatRefused,
    ConfigError,
    ContextFull,
    EngineGone,
    EngineHeld,
    EngineLost,
    EnvironmentFailed,
    EpisodeError,
    InfrastructureFailed,
    ModelError,
    PolicyFailed,
    ScoreRefused,
    TurnRefused,
    TurnTimeout,
)
from tidegate.orchestrator.core.failure_counts import FailureKey, FailureOutcome
from tidegate.orchestrator.core.rollout import Rollout, RolloutState
from tidegate.orchestrator.episodes.tracebacks import OUR_DIRECTORY, for_users
from tidegate.policies.failures import FailureCause

CONSECUTIVE_FAILURES_MAX = 100
"""Episodes in a row whose failure discarded their rollout, without one success, that end the run:
the code is wrong, not a task. A lower limit would let one bad batch of tasks end it."""

CODE_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ChatRefused,
    ConfigError,
    EpisodeError,
    ImportError,
    LookupError,
    ModelError,
    NameError,
    NotImplementedError,
    ScoreRefused,
    TypeError,
)
"""Errors that the episode's code or settings cause, rather than infrastructure: no reward returned,
a forgotten ``await``, a chat template without tools, a teacher that lacks tokens of the student.
They are not retried."""

CODE_ERROR_FAILURES_MAX = 8
"""Failures by one of :data:`CODE_ERRORS`, before any episode has succeeded, that end the run."""

CODE_ERROR_GROUPS_MIN = 3
"""Number of groups that those failures come from, because all rollouts of a bad task fail."""

DISTINCT_ERRORS_MAX = 64
"""Number of distinct errors tracked; later ones are logged in one line each."""

REASONS_MAX = 32
"""Number of distinct failure reasons, because each is an account of the ledger; later ones are
counted as ``other``."""

log = logging.getLogger("tidegate")


Lacked = Literal["", "engine", "scores"]
"""What an episode waited for when its time was up: an engine for a turn, or scores alone."""


class EpisodeTimedOut(TimeoutError):
    """An episode exceeded the run's ``episode_timeout_s``."""

    def __init__(self, why: str, *, lacked: Lacked = "") -> None:
        self.lacked: Lacked = lacked
        super().__init__(why)


@dataclass(frozen=True, slots=True)
class FailureClass:
    """Cause of a failure and its kind."""

    cause: FailureCause
    reason: str


def classify(error: BaseException, rollout: Rollout) -> FailureClass:
    """Return the cause of the error that ended an episode, and its reason.

    If the model has sampled nothing, the policy is not the cause: then infrastructure is the cause
    of a timeout, and the task's prompt is the cause of a full context.
    """
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    has_sampled = rollout.tokens_of_all_rows > 0
    policy, infrastructure = FailureCause.POLICY, FailureCause.INFRASTRUCTURE
    match error:
        case PolicyFailed(reason=reason):
            return FailureClass(policy, reason)
        case InfrastructureFailed(reason=reason):
            return FailureClass(infrastructure, reason)
        case ContextFull() if has_sampled:
            return FailureClass(policy, "context_full")
        case ContextFull():
            return FailureClass(FailureCause.CODE, "prompt_too_long")
        case TurnRefused():
            return FailureClass(FailureCause.CODE, "turn_refused")
        case EpisodeTimedOut(lacked=lacked) if lacked:
            return FailureClass(infrastructure, f"no_{lacked}")
        case EpisodeTimedOut():
            return FailureClass(policy if has_sampled else infrastructure, "episode_timeout")
        case TurnTimeout(tokens=tokens):
            return FailureClass(policy if tokens else infrastructure, "turn_timeout")
        case EnvironmentFailed():
            return FailureClass(infrastructure, "environment_failed")
        case EngineLost() | EngineGone() | EngineHeld():
            return FailureClass(infrastructure, "engine_lost")
        case TimeoutError() if _has_given_up_tokens(rollout):
            return FailureClass(policy, "turn_timeout")
        case _ if isinstance(error, CODE_ERRORS):
            return FailureClass(FailureCause.CODE, "code_error")
    return FailureClass(infrastructure, "episode_error")


def _has_given_up_tokens(rollout: Rollout) -> bool:
    """Whether the episode stopped waiting for its last turn, which had tokens: then a bare
    TimeoutError is that of an ``asyncio.timeout`` around the turn."""
    last_turns = [row.turns[-1] for row in rollout.rows if row.turns]
    return any(turn.finish_reason == "cancelled" and turn.length for turn in last_turns)


HINTS = (
    ("'coroutine' object", "an `await` is missing there, as in `await episode.generate(…)`"),
    (
        "can't be used in 'await' expression",
        "the value after `await` is not awaitable: define it with `async def`, or omit the `await`",
    ),
)
"""Beginners' mistakes by a part of Python's message, with what to do about them."""


def place_of(function: Any) -> str:
    """Return the name of an episode function, and the file and line that it begins at."""
    while isinstance(function, partial):
        function = function.func
    name = getattr(function, "__name__", type(function).__name__)
    if not hasattr(function, "__code__"):
        function = type(function).__call__
    code = getattr(function, "__code__", None)
    return name if code is None else f"{name} ({code.co_filename}:{code.co_firstlineno})"


def _described(error: BaseException) -> str:
    """Return where an error was raised, its type and message, and a hint if there is one."""
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if not frame.filename.startswith(OUR_DIRECTORY)]
    place = f"at {users[-1].filename}:{users[-1].lineno} ({users[-1].name}) " if users else ""
    hints = [hint for part, hint in HINTS if part in str(error)]
    return f"{place}with {type(error).__name__}: {error}{''.join(f'; {hint}' for hint in hints)}"


def outcome_of(rollout: Rollout, reason: str) -> FailureOutcome:
    """Return the outcome that the core chose for a rollout whose episode failed for ``reason``."""
    if rollout.state is RolloutState.RUNNING:
        return FailureOutcome.RETRIED
    is_discarded = rollout.state is RolloutState.DISCARDED and rollout.discard_reason == reason
    return FailureOutcome.DISCARDED if is_discarded else FailureOutcome.REWARDED


class _DistinctError:
    """Failures of a run's episodes by one error."""

    def __init__(self) -> None:
        self.count = 0
        self.groups: set[int] = set()
        """Ids of the groups whose episodes failed, the first ``CODE_ERROR_GROUPS_MIN`` of them."""


class EpisodeFailures:
    """Failed episodes of one run."""

    def __init__(self) -> None:
        self._consecutive = 0
        self._has_succeeded = False
        self._has_warned = False
        """Whether the log has said that failures of the policy are discarded."""
        self._errors: dict[tuple[object, ...], _DistinctError] = {}
        self._reasons: set[str] = set()

    def succeed(self) -> None:
        """Count an episode that returned a reward."""
        self._consecutive = 0
        self._has_succeeded = True

    def known(self, failure: FailureClass) -> FailureClass:
        """Return the failure; with the reason ``other`` if too many reasons are known already."""
        if failure.reason in self._reasons or len(self._reasons) < REASONS_MAX:
            self._reasons.add(failure.reason)
            return failure
        return FailureClass(failure.cause, "other")

    def fail(self, rollout_id: int, group_id: int, error: BaseException, key: FailureKey) -> None:
        """Count and log an episode that failed by ``error``, as ``key`` classifies it.

        The first failure by an error is logged with its traceback; of further ones, the 10th, the
        100th, and so on, in one line.

        Raises:
            EpisodeError: the run must end, because no further episode is likely to succeed.
        """
        same = self._count(rollout_id, group_id, error, key)
        self._warn_of_hidden_failures(rollout_id, key)
        if key.outcome is not FailureOutcome.DISCARDED:
            return
        self._consecutive += 1
        if self._consecutive >= CONSECUTIVE_FAILURES_MAX:
            raise EpisodeError(
                f"{self._consecutive} episodes in a row failed and were discarded, without one "
                f"success, by {len(self._errors)} distinct errors; the last one "
                f"{_described(error)}. The log has a traceback of each; correct their causes, or "
                "handle the errors in the episode and return a reward"
            ) from error
        if (
            not self._has_succeeded
            and key.cause is FailureCause.CODE
            and isinstance(error, CODE_ERRORS)
            and same.count >= CODE_ERROR_FAILURES_MAX
            and len(same.groups) >= CODE_ERROR_GROUPS_MIN
        ):
            raise EpisodeError(
                f"the episode's code seems to be wrong: {same.count} episodes failed in the same "
                f"place before any succeeded; the last one {_described(error)}. "
                "Correct the line that the log's traceback names"
            ) from error

    def _warn_of_hidden_failures(self, rollout_id: int, key: FailureKey) -> None:
        is_hidden = key.cause is FailureCause.POLICY and key.outcome is FailureOutcome.DISCARDED
        if is_hidden and not self._has_warned:
            self._has_warned = True
            log.warning(
                "rollout=%d was discarded as %s, which is the model's doing: the model is not "
                "trained to avoid it, and may learn to fail so where its answer would be wrong. "
                "Reward such rollouts, as with failure_policy=tidegate.FailurePolicy(reward=0.0)",
                rollout_id,
                key.reason,
            )

    def _count(
        self, rollout_id: int, group_id: int, error: BaseException, key: FailureKey
    ) -> _DistinctError:
        lines = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
        identity = (type(error), *lines)
        same = self._errors.get(identity, _DistinctError())
        for_users(error)
        same.count += 1
        if len(same.groups) < CODE_ERROR_GROUPS_MIN:
            same.groups.add(group_id)
        if same.count == 1 and len(self._errors) < DISTINCT_ERRORS_MAX:
            self._errors[identity] = same
            log.warning(
                "rollout=%d %s, its episode failed (cause=%s reason=%s)",
                rollout_id,
                key.outcome,
                key.cause,
                key.reason,
                exc_info=error,
            )
        elif str(same.count).strip("0") == "1":
            log.warning(
                "rollout=%d %s, its episode failed (cause=%s reason=%s) with %s: %s (%d failures "
                "in this place so far; the first one's traceback is above)",
                rollout_id,
                key.outcome,
                key.cause,
                key.reason,
                type(error).__name__,
                error,
                same.count,
            )
        return same
