"""Who sampled which tokens of a batch? Told by where that changes: tokens are many, runs few.

It knows rollouts and versions; what a batch looks like is for others.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tidegate.orchestrator.core.rollout import Rollout

Int64s = np.ndarray[tuple[int], np.dtype[np.int64]]

NOT_SAMPLED = -1
"""The version of a token that was given, or is padding."""


class VersionRuns:
    """A batch's tokens, row after row, cut where another version sampled them, or none."""

    def __init__(self, rollouts: Sequence[Rollout], lengths: Int64s) -> None:
        """``lengths``: of the rows' contexts, in tokens."""
        self.oldest_trainable = max([row.oldest_trainable for row in rollouts], default=0)
        """Tokens of older versions are masked."""
        self._lengths = lengths
        marks = np.array(_marks(rollouts, lengths.tolist()), dtype=np.int64).reshape(-1, 2)
        self._starts: Int64s = marks[:, 0]
        self._versions: Int64s = marks[:, 1]

    def of_tokens(self) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
        """The version of each token. [N]"""
        tokens = int(self._lengths.sum())
        return np.repeat(self._versions.astype(np.int32), np.diff(self._starts, append=tokens))

    def staleness(self, trainer_version: int) -> Int64s:
        """Of each row's oldest trained token; 0 where there is none. [R]"""
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
    """Where each run begins, and its version, by turns: one list, for that takes half the time."""
    marks: list[int] = []
    offset = 0
    for rollout, length in zip(rollouts, lengths, strict=True):
        given_from = 0  # in this row
        for turn in rollout.turns:
            if not turn.runs:
                continue  # given up before a token
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
