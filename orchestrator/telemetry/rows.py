"""Aggregates a batch's rows by rollout: a rollout that forked has several rows, and counts once."""

from typing import TypeVar

import numpy as np
import numpy.typing as npt

Number = TypeVar("Number", bound=np.generic)


class RowsOfRollouts:
    """Rows of a batch [R], and their rollouts [P], ordered by each rollout's first row."""

    def __init__(self, rollout_ids: npt.NDArray[np.int64]) -> None:
        """``rollout_ids``: rollout of each row, [R]; empty if no rollout has forked."""
        self._is_one_row_each = len(set(rollout_ids.tolist())) == len(rollout_ids)
        if self._is_one_row_each:
            return  # the usual case
        _, first, inverse = np.unique(rollout_ids, return_index=True, return_inverse=True)
        order = np.argsort(first)
        self._first = first[order]
        self._rollout_of_row = np.argsort(order)[inverse]

    def first(self, values: npt.NDArray[Number]) -> npt.NDArray[Number]:
        """Return a value that all rows of a rollout share. [R] -> [P]"""
        return values if self._is_one_row_each else values[self._first]

    def added(self, values: npt.NDArray[Number]) -> npt.NDArray[Number]:
        """Return the sum over each rollout's rows. [R] -> [P]"""
        if self._is_one_row_each:
            return values
        sums = np.zeros(len(self._first), values.dtype)
        np.add.at(sums, self._rollout_of_row, values)
        return sums

    def highest(self, values: npt.NDArray[Number]) -> npt.NDArray[Number]:
        """Return the maximum over each rollout's rows; of bools, whether any is true. [R] -> [P]"""
        if self._is_one_row_each:
            return values
        most = values[self._first].copy()
        np.maximum.at(most, self._rollout_of_row, values)
        return most
