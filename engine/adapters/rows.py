"""What is to be told of turns in the next step message? Rows, until it is sent.

Another engine's tokens come turn by turn; a message has one row for each turn, and one version of
the weights for all of them. It knows no version: whoever changes that sends first.
"""

from array import array
from dataclasses import dataclass, field

import numpy as np

from tidegate.engine.adapters.adapter import TopLogprobs
from tidegate.engine.step_columns import StepColumns
from tidegate.transport.messages import RUNNING, Prefill, TokenDetails


@dataclass(slots=True)
class _Row:
    token_ids: "array[int]" = field(default_factory=lambda: array("i"))
    logprobs: "array[float]" = field(default_factory=lambda: array("f"))
    finish: int = RUNNING
    prefill: Prefill | None = None
    top_ids: "array[int]" = field(default_factory=lambda: array("i"))
    top_logprobs: "array[float]" = field(default_factory=lambda: array("f"))


class Rows:
    """One step message's rows."""

    def __init__(self) -> None:
        self._rows: dict[int, _Row] = {}

    def __bool__(self) -> bool:
        """Whether there is anything to tell."""
        return bool(self._rows)

    @property
    def handles(self) -> list[int]:
        """Whose they are."""
        return list(self._rows)

    def holds_tokens_of(self, handle: int) -> bool:
        """Whether tokens of this turn are yet to be told."""
        row = self._rows.get(handle)
        return row is not None and len(row.token_ids) > 0

    def add(
        self,
        handle: int,
        token_ids: list[int],
        logprobs: list[float],
        *,
        prefill: Prefill | None,
        top: TopLogprobs | None,
    ) -> None:
        """More tokens of a turn; a prefill stands before all that are here of it."""
        row = self._rows.setdefault(handle, _Row())
        row.token_ids.extend(token_ids)
        row.logprobs.extend(logprobs)
        row.prefill = prefill or row.prefill
        if top is not None:
            row.top_ids.extend(top.token_ids)
            row.top_logprobs.extend(top.logprobs)

    def end(self, handle: int, finish: int) -> None:
        """The turn has ended."""
        self._rows.setdefault(handle, _Row()).finish = finish

    def drop(self, handle: int) -> None:
        """Nothing of this turn is to be told any more."""
        self._rows.pop(handle, None)

    def take(self, version: int) -> StepColumns:
        """All of it, of one version; nothing is left."""
        rows, self._rows = self._rows, {}
        counts = [len(row.token_ids) for row in rows.values()]
        finish = bytes(row.finish for row in rows.values())
        return StepColumns(
            version=version,
            turns=np.array(list(rows), dtype="<u4").tobytes(),
            token_ids=b"".join(row.token_ids.tobytes() for row in rows.values()),
            logprobs=b"".join(row.logprobs.tobytes() for row in rows.values()),
            finish=finish if any(finish) else b"",
            counts=b"" if set(counts) == {1} else np.array(counts, dtype="<u4").tobytes(),
            prefills=[row.prefill for row in rows.values() if row.prefill is not None],
            details=[
                TokenDetails(handle, b"", row.top_ids.tobytes(), row.top_logprobs.tobytes())
                for handle, row in rows.items()
                if row.top_ids
            ],
        )
