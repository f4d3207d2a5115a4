"""Run-length encoding of the weight versions that sampled a batch's tokens.

:class:`Batch` derives its version columns, masks and staleness from it, with numpy.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tidegate.orchestrator.core.rollout import Rollout

Int64s = np.ndarray[tuple[int], np.dtype[np.int64]]

NOT_SAMPLED = -1
"""Version of prompts, observations and padding."""


class VersionRuns:
    """Runs of tokens of one version, over a batch's rows; unsampled tokens are runs too."""

    def __init__(self, rollouts: Sequence[Rollout], lengths: Int64s) -> None:
        """``lengths``: length of each row's context, in tokens."""
        self.oldest_trainable = max([row.oldest_trainable for row in rollouts], default=0)
        """Tokens of older versions are masked."""
        self._lengths = lengths
        boundaries = np.array(_run_boundaries(rollouts, lengths.tolist()), dtype=np.int64).reshape(
            -1, 2
        )
        self._starts: Int64s = boundaries[:, 0]
        self._versions: Int64s = boundaries[:, 1]

    def of_tokens(self) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
        """Return the version of each token. [N]"""
        tokens = int(self._lengths.sum())
        return np.repeat(self._versions.astype(np.int32), np.diff(self._starts, append=tokens))

    def staleness(self, trainer_version: int) -> Int64s:
        """Return the staleness of each row's oldest trained token; 0 for rows without one. [R]"""
        lengths, versions = self._lengths, self._versions
        staleness = np.zeros(len(lengths), dtype=np.int64)
        has_tokens = lengths > 0  # reduceat is undefined for empty rows
        first_tokens = (np.cumsum(lengths) - lengths)[has_tokens]
        if len(first_tokens):
            trained = np.where(versions >= self.oldest_trainable, versions, trainer_version)
            first_runs: Any = np.searchsorted(self._starts, first_tokens)
            staleness[has_tokens] = trainer_version - np.minimum.reduceat(trained, first_runs)
        return staleness


def _run_boundaries(rollouts: Sequence[Rollout], lengths: Sequence[int]) -> list[int]:
    """Return start and version of each run, alternating: one list takes half the time of pairs."""
    boundaries: list[int] = []
    offset = 0
    for rollout, length in zip(rollouts, lengths, strict=True):
        given_from = 0  # in this row
        for turn in rollout.turns:
            if not turn.runs:
                continue  # cancelled before its first token
            start = turn.start
            if start > given_from:
                boundaries += (offset + given_from, NOT_SAMPLED)
            for run in turn.runs:
                boundaries += (offset + start + run.start, run.version)
            given_from = start + turn.filed
        if length > given_from:
            boundaries += (offset + given_from, NOT_SAMPLED)
        offset += length
    return boundaries
