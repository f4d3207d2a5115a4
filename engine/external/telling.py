"""Batches the tokens of an external engine into step messages, a few milliseconds at a time.

Another engine's tokens arrive turn by turn; a step message has one row for each turn and one weight
version for all of them. So whoever changes the version has all rows sent first.
"""

import asyncio
import time
from array import array
from dataclasses import dataclass, field

import numpy as np

from tidegate.engine.external.adapter import TopLogprobs
from tidegate.engine.link import Link
from tidegate.engine.scheduling.step_columns import StepColumns
from tidegate.transport.messages import RUNNING, Prefill, Step, TokenDetails


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


GATHER_S = 0.002
"""Tokens of one step of the engine come by as many streams as it has turns; so long is waited for
the others before they are told."""


class Teller:
    """Rows that are yet to be told, and the way out."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.rows = Rows()
        self.version = 0
        """What sampled all that comes in from now on."""
        self.queued_turns = 0
        """Submitted, and not asked of the engine yet."""
        self._credit = asyncio.Event()
        self._flush: asyncio.TimerHandle | None = None
        self._told_ns = time.monotonic_ns()

    def note_credit(self) -> None:
        """There may be credit again; go on telling if somebody waits for it."""
        if self._link.has_credit:
            self._credit.set()

    def note_idle(self) -> None:
        """The engine has nothing to do: the time till the next step is none of its work."""
        self._told_ns = time.monotonic_ns()

    def tell(self) -> None:
        """Have rows told soon."""
        if self._flush is None:
            self._flush = asyncio.get_running_loop().call_later(GATHER_S, self._flushed)

    def _flushed(self) -> None:
        self._flush = None
        self.tell_now()

    async def all_told(self) -> None:
        """Send the rows there are, as soon as there is credit for it."""
        while not self.tell_now():
            await self._credit.wait()

    def tell_now(self) -> bool:
        """Send the rows there are; False for want of credit, and then it is tried again soon."""
        if not self.rows:
            return True
        if not self._link.has_credit:
            self._credit.clear()
            self.tell()
            return False
        now_ns = time.monotonic_ns()
        columns = self.rows.take(self.version)
        self._link.send_step(
            Step(
                seq=self._link.next_seq,
                version=columns.version,
                turns=columns.turns,
                token_ids=columns.token_ids,
                logprobs=columns.logprobs,
                finish=columns.finish,
                counts=columns.counts,
                prefills=columns.prefills,
                details=columns.details,
                started_us=self._told_ns // 1000,
                busy_us=(now_ns - self._told_ns) // 1000,
                queued_turns=self.queued_turns,
            )
        )
        self._told_ns = now_ns
        return True
