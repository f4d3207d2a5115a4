"""Weight versions of a batch's tokens, stored by where they change: tokens are many, runs few.

:mod:`~tidegate.orchestrator.batches.batches` makes version columns, masks and staleness of it.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tidegate.orchestrator.core.rollout import Rollout

Int64s = np.ndarray[tuple[int], np.dtype[np.int64]]

NOT_SAMPLED = -1
"""Version of tokens that were given, and of padding."""


class VersionRuns:
    """A batch's tokens, row after row, cut where the version changes or tokens were given."""

    def __init__(self, rollouts: Sequence[Rollout], lengths: Int64s) -> None:
        """``lengths``: length of each row's context, in tokens."""
        self.oldest_trainable = max([row.oldest_trainable for row in rollouts], default=0)
        """Tokens of older versions are masked."""
        self._lengths = lengths
        marks = np.array(_marks(rollouts, lengths.tolist()), dtype=np.int64).reshape(-1, 2)
        self._starts: Int64s = marks[:, 0]
        self._versions: Int64s = marks[:, 1]

    def of_tokens(self) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
        """Return the version of each token. [N]"""
        tokens = int(self._lengths.sum())
        return np.repeat(self._versions.astype(np.int32), np.diff(self._starts, append=tokens))

    def staleness(self, trainer_version: int) -> Int64s:
        """Return the staleness of each row's oldest trained token; 0 for rows without one. [R]"""
        lengths, versions = self._lengths, self._versions
        staleness = np.zeros(len(lengths), dtype=np.int64)
        has_tokens = lengths > 0  # reduceat has no answer for an empty row
        first_tokens = (np.cumsum(lengths) - lengths)[has_tokens]
        if len(first_tokens):
            trained = np.where(versions >= self.oldest_trainable, versions, trainer_version)
            first_runs: Any = np.searchsorted(self._starts, first_tokens)
            staleness[has_tokens] = trainer_version - np.minimum.reduceat(trained, first_runs)
        return staleness


def _marks(rollouts: Sequence[Rollout], lengths: Sequence[int]) -> list[int]:
    """Return start and version of each run, alternating: one list takes half the time of pairs."""
    marks: list[int] = []
    offset = 0
    for rollout, length in zip(rollouts, lengths, strict=True):
        given_from = 0  # in this row
        for turn in rollout.turns:
            if not turn.runs:
                continue  # cancelled before its first token
            start = turn.start
            if start > given_from:
                marks += (offset + given_from, NOT_SAMPLED)
            for run in turn.runs:
                marks += (offset + start + run.start, run.version)
            given_from = start + turn.filed
        if length > given_from:
            marks += (offset + given_from, NOT_SAMPLED)
        offset += length
    return marks
