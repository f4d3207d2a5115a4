"""Queries of the dashboard's list of rollouts: filter, search and order.

The app parses a :class:`RolloutQuery` from a request; the sources apply it to their lines.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from tidegate.errors import ConfigError
from tidegate.observability.metrics.snapshots import RolloutLine

STATES = ("running", "finished", "trained", "discarded", "evaluated")

SEARCH_CHARACTERS_MAX = 200
"""Limit of a searched text."""

NUMBER_MAX = 2**53
"""JavaScript's integers are exact up to here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutQuery:
    """Filter, order and offset of a list of rollouts."""

    state: str = ""
    """One of :data:`STATES`; empty for any."""
    group_id: int | None = None
    """Only rollouts of this group; None for any."""
    text: str = ""
    """Only rollouts whose context contains this text, upper and lower case alike."""
    task: str = ""
    """Only rollouts whose task contains this text."""
    reason: str = ""
    """Only rollouts whose discard or fork reason contains this text."""
    reward_min: float = -math.inf
    reward_max: float = math.inf
    staleness_min: int | None = None
    """This and the next select rollouts of known staleness in versions; None for any."""
    staleness_max: int | None = None
    is_mixed: bool = False
    """Only rollouts whose tokens were sampled by two or more versions."""
    sort: str = ""
    """Field of :class:`RolloutLine` to order by; empty for the source's own order."""
    is_descending: bool = False
    skip: int = 0
    """Number of matching rollouts to skip."""

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> Self:
        """Parse a request's query.

        Raises:
            ConfigError: a value is invalid, with its name and what is allowed.
        """
        state, sort = given.get("state", ""), given.get("sort", "")
        if state not in ("", *STATES):
            raise ConfigError(f"state must be one of {', '.join(STATES)}, got {state!r:.40}")
        if sort not in ("", *RolloutLine.__slots__):
            raise ConfigError(
                f"sort must be one of {', '.join(RolloutLine.__slots__)}, got {sort!r:.40}"
            )
        skip = _integer(given, "skip")
        if skip is not None and skip < 0:
            raise ConfigError(f"skip must be 0 or more, got {skip}")
        return cls(
            state=state,
            group_id=_integer(given, "group"),
            text=_search(given, "text"),
            task=_search(given, "task"),
            reason=_search(given, "reason"),
            reward_min=_number(given, "reward_min", -math.inf),
            reward_max=_number(given, "reward_max", math.inf),
            staleness_min=_integer(given, "staleness_min"),
            staleness_max=_integer(given, "staleness_max"),
            is_mixed=given.get("mixed") == "1",
            sort=sort,
            is_descending=given.get("descending") == "1",
            skip=skip or 0,
        )

    @property
    def is_ended_only(self) -> bool:
        """Whether the state excludes rollouts that the trainer has not received."""
        return self.state in ("trained", "discarded", "evaluated")

    @property
    def is_unconsumed_only(self) -> bool:
        """Whether the state excludes rollouts that are over."""
        return self.state in ("running", "finished")

    @property
    def reads_tokens(self) -> bool:
        """Whether rollouts must be searched by their text or whole task, beyond their lines."""
        return bool(self.text or self.task)

    def matches(self, line: RolloutLine) -> bool:
        """Return whether a line passes all filters but the searches in text and task."""
        return (
            self.state in ("", line.state)
            and self.group_id in (None, line.group_id)
            and not (self.is_mixed and line.oldest_version == line.newest_version)
            and (contains(line.reason, self.reason) or contains(line.fork_reason, self.reason))
            and self._matches_numbers(line)
        )

    def _matches_numbers(self, line: RolloutLine) -> bool:
        staleness_max = math.inf if self.staleness_max is None else self.staleness_max
        has_reward_limit = self.reward_min > -math.inf or self.reward_max < math.inf
        has_staleness_limit = self.staleness_min is not None or self.staleness_max is not None
        return (
            not has_reward_limit
            or (line.reward is not None and self.reward_min <= line.reward <= self.reward_max)
        ) and (
            not has_staleness_limit
            or (
                line.staleness is not None
                and (self.staleness_min or 0) <= line.staleness <= staleness_max
            )
        )

    def ordered(self, lines: Sequence[RolloutLine]) -> Sequence[RolloutLine]:
        """Return lines in the query's order; those without a value come last.

        Without an order, evaluations follow the training's rollouts: those before the first batch
        would fill the first pages.
        """
        if not self.sort:
            return sorted(lines, key=lambda line: line.group_id < 0)
        known = [line for line in lines if _is_known(getattr(line, self.sort))]
        unknown = [line for line in lines if not _is_known(getattr(line, self.sort))]
        known.sort(key=lambda line: getattr(line, self.sort), reverse=self.is_descending)
        return known + unknown


def contains(text: str, searched: str) -> bool:
    """Return whether a text contains the searched one, upper and lower case alike."""
    return searched.casefold() in text.casefold()


def _is_known(value: object) -> bool:
    return value is not None and not (isinstance(value, float) and math.isnan(value))


def _search(given: Mapping[str, str], name: str) -> str:
    text = given.get(name, "")
    if len(text) > SEARCH_CHARACTERS_MAX:
        raise ConfigError(
            f"{name} may have {SEARCH_CHARACTERS_MAX} characters, got {len(text)}; search for less"
        )
    return text


def _integer(given: Mapping[str, str], name: str) -> int | None:
    text = given.get(name, "")
    number = whole_number(text)
    if text and number is None:
        raise ConfigError(f"{name} must be a whole number, got {text!r:.40}")
    return number


def _number(given: Mapping[str, str], name: str, default: float) -> float:
    text = given.get(name, "")
    if not text:
        return default
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if math.isnan(number):
        raise ConfigError(f"{name} must be a number, got {text!r:.40}")
    return number


def whole_number(text: str) -> int | None:
    """Return the whole number that a text is, up to :data:`NUMBER_MAX`; None if it is none."""
    try:
        number = int(text)
    except ValueError:
        return None
    return number if abs(number) <= NUMBER_MAX else None
