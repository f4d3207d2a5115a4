"""Counts failed episodes, logs each distinct error once, and ends a run that fails too often.

Used by :class:`~tidegate.orchestrator.episodes.runner.EpisodeRunner`. Two errors are the same if
they have one type and were raised through the same lines of code; the message may differ.
"""

import logging
import traceback

from tidegate.errors import ChatRefused, ConfigError, EpisodeError, ModelError

CONSECUTIVE_FAILURES_MAX = 100
"""Failed episodes in a row, without one success, that end the run: the code is wrong, not a task. A
lower limit would let one bad batch of tasks end it."""

CODE_ERRORS = (
    AssertionError,
    AttributeError,
    ChatRefused,
    ConfigError,
    ImportError,
    ModelError,
    NameError,
    NotImplementedError,
    TypeError,
)
"""Errors that the episode's code or settings cause, rather than a task's data or the outside world:
no reward returned, a forgotten ``await``, a chat template without tools."""

CODE_ERROR_FAILURES_MAX = 8
"""Failures by one of :data:`CODE_ERRORS`, before any episode has succeeded, that end the run."""

CODE_ERROR_GROUPS_MIN = 3
"""Number of groups that those failures come from, because all rollouts of a bad task fail."""

DISTINCT_ERRORS_MAX = 64
"""Errors told apart; later ones are logged in one line each."""

log = logging.getLogger("tidegate")


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
        self._errors: dict[tuple[object, ...], _DistinctError] = {}

    def succeed(self) -> None:
        """Count an episode that returned a reward."""
        self._consecutive = 0
        self._has_succeeded = True

    def fail(self, rollout_id: int, group_id: int, error: BaseException) -> None:
        """Count and log an episode that failed by ``error``.

        The first failure by an error is logged with its traceback; of further ones, the 10th, the
        100th, and so on, in one line.

        Raises:
            EpisodeError: the run must end, because no further episode is likely to succeed.
        """
        self._consecutive += 1
        same = self._count(rollout_id, group_id, error)
        if self._consecutive >= CONSECUTIVE_FAILURES_MAX:
            raise EpisodeError(
                f"the episode failed {self._consecutive} times in a row without one success, by "
                f"{len(self._errors)} distinct errors; the last time with "
                f"{type(error).__name__}: {error}"
            ) from error
        if (
            not self._has_succeeded
            and isinstance(error, CODE_ERRORS)
            and same.count >= CODE_ERROR_FAILURES_MAX
            and len(same.groups) >= CODE_ERROR_GROUPS_MIN
        ):
            raise EpisodeError(
                f"the episode's code seems to be wrong: {same.count} episodes failed in the same "
                f"place before any succeeded; the last one with {type(error).__name__}: {error}"
            ) from error

    def _count(self, rollout_id: int, group_id: int, error: BaseException) -> _DistinctError:
        lines = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
        identity = (type(error), *lines)
        same = self._errors.get(identity, _DistinctError())
        same.count += 1
        if len(same.groups) < CODE_ERROR_GROUPS_MIN:
            same.groups.add(group_id)
        if same.count == 1 and len(self._errors) < DISTINCT_ERRORS_MAX:
            self._errors[identity] = same
            stack = "".join(traceback.format_exception(error))
            log.warning("rollout=%d discarded, its episode failed:\n%s", rollout_id, stack)
        elif str(same.count).strip("0") == "1":
            log.warning(
                "rollout=%d discarded, its episode failed with %s: %s (%d failures in this place "
                "so far; the first one's traceback is above)",
                rollout_id,
                type(error).__name__,
                error,
                same.count,
            )
        return same
