"""Which rows of a batch are of one rollout? A rollout that forked has several, and counts once.

It adds up and compares what rows have; what that is, whoever asks knows.
"""

from typing import TypeVar

import numpy as np
import numpy.typing as npt

Number = TypeVar("Number", bound=np.generic)


class RowsOfRollouts:
    """A batch's rows [R], and the rollouts that they are of [P], in the order of their first."""

    def __init__(self, rollout_ids: npt.NDArray[np.int64]) -> None:
        """``rollout_ids``: of each row, [R]; none at all where nothing is known to have forked."""
        self._is_one_each = len(set(rollout_ids.tolist())) == len(rollout_ids)
        if self._is_one_each:
            return  # as mostly
        _, first, place = np.unique(rollout_ids, return_index=True, return_inverse=True)
        order = np.argsort(first)
        self._first = first[order]
        self._place = np.argsort(order)[place]

    def first(self, values: npt.NDArray[Number]) -> npt.NDArray[Number]:
        """Of what all rows of a rollout have in common. [R] -> [P]"""
        return values if self._is_one_each else values[self._first]

    def added(self, values: npt.NDArray[Number]) -> npt.NDArray[Number]:
        """Over a rollout's rows. [R] -> [P]"""
        if self._is_one_each:
            return values
        sums = np.zeros(len(self._first), values.dtype)
        np.add.at(sums, self._place, values)
        return sums

    def highest(self, values: npt.NDArray[Number]) -> npt.NDArray[Number]:
        """Over a rollout's rows; of yes and no: whether any. [R] -> [P]"""
        if self._is_one_each:
            return values
        most = values[self._first].copy()
        np.maximum.at(most, self._place, values)
        return most
