"""Batches the tokens of an external engine into step messages, a few milliseconds at a time.

Tokens arrive request by request; a step message has one row per turn and one weight version. So all
rows must be sent before the version changes.
"""

import asyncio
import time
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from tidegate.engine.link import OrchestratorLink
from tidegate.engine.scheduling.step_columns import StepColumns, split_attachments
from tidegate.transport.attachments import Attachment
from tidegate.transport.messages import RUNNING, Prefill


@dataclass(slots=True)
class _Row:
    token_ids: "array[int]" = field(default_factory=lambda: array("i"))
    logprobs: "array[float]" = field(default_factory=lambda: array("f"))
    finish: int = RUNNING
    prefill: Prefill | None = None
    attachments: list[Attachment] = field(default_factory=list)


class StepMessageRows:
    """Rows of the next step message."""

    def __init__(self) -> None:
        self._rows: dict[int, _Row] = {}

    def __bool__(self) -> bool:
        """Whether there is anything to send."""
        return bool(self._rows)

    @property
    def handles(self) -> list[int]:
        """Handles of the turns with rows."""
        return list(self._rows)

    def has_tokens_of(self, handle: int) -> bool:
        """Whether tokens of this turn have not been sent yet."""
        row = self._rows.get(handle)
        return row is not None and len(row.token_ids) > 0

    def add(
        self,
        handle: int,
        token_ids: list[int],
        logprobs: list[float],
        *,
        prefill: Prefill | None,
        attachments: Sequence[Attachment] = (),
    ) -> None:
        """Add tokens of a turn; ``prefill`` precedes all of the turn's unsent tokens.

        ``attachments`` are of these tokens, or of positions.
        """
        row = self._rows.setdefault(handle, _Row())
        row.token_ids.extend(token_ids)
        row.logprobs.extend(logprobs)
        row.prefill = prefill or row.prefill
        row.attachments = join_attachments([*row.attachments, *attachments])

    def end(self, handle: int, finish: int) -> None:
        """Set the turn's finish code."""
        self._rows.setdefault(handle, _Row()).finish = finish

    def drop(self, handle: int) -> None:
        """Drop the turn's unsent row."""
        self._rows.pop(handle, None)

    def take(self, version: int) -> StepColumns:
        """Return all rows, of one version, and clear them."""
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
            attachments=[each for row in rows.values() for each in row.attachments],
        )


def join_attachments(attachments: Iterable[Attachment]) -> list[Attachment]:
    """Join attachments of one turn that continue each other; of others, the later replaces the
    earlier of its name."""
    joined: dict[str, Attachment] = {}
    for each in attachments:
        before = joined.get(each.name)
        if before is not None and before.start + before.length == each.start:
            values, counts = before.values + each.values, before.counts + each.counts
            each = msgspec.structs.replace(before, values=values, counts=counts)
        joined[each.name] = each
    return list(joined.values())


GATHER_S = 0.002
"""Seconds to wait for the other turns' tokens of the same engine step before sending."""


class StepMessageBatcher:
    """Unsent rows, and the link that they are sent over."""

    def __init__(self, link: OrchestratorLink) -> None:
        self._link = link
        self.rows = StepMessageRows()
        self.version = 0
        """Weight version of all tokens that are added from now on."""
        self.queued_turns = 0
        """Number of turns that have not been requested from the engine yet."""
        self._credit = asyncio.Event()
        self._flush_timer: asyncio.Handle | None = None
        self._flushed_ns = time.monotonic_ns()

    def on_credit(self) -> None:
        """Wake senders that wait for credit, if the link has credit."""
        if self._link.has_credit:
            self._credit.set()

    def skip_idle_time(self) -> None:
        """Exclude the idle time until now from the next step's busy time."""
        self._flushed_ns = time.monotonic_ns()

    def flush_soon(self) -> None:
        """Send the rows within ``GATHER_S``."""
        if self._flush_timer is None:
            self._flush_timer = asyncio.get_running_loop().call_later(
                GATHER_S, self._on_flush_timer
            )

    def flush_next(self) -> None:
        """Send the rows once the event loop has handled what has arrived.

        Used for turns that end, because the engine computes smaller batches until other turns
        take their places.
        """
        if self._flush_timer is not None:
            self._flush_timer.cancel()
        self._flush_timer = asyncio.get_running_loop().call_soon(self._on_flush_timer)

    def _on_flush_timer(self) -> None:
        self._flush_timer = None
        self.flush_now()

    async def flush_all(self) -> None:
        """Send all rows, waiting for credit."""
        while not self.flush_now():
            await self._credit.wait()

    def flush_now(self) -> bool:
        """Send all rows now; without credit return False and retry soon."""
        if not self.rows:
            return True
        if not self._link.has_credit:
            self._credit.clear()
            self.flush_soon()
            return False
        now_ns = time.monotonic_ns()
        parts = split_attachments(self.rows.take(self.version))
        for number, part in enumerate(parts, 1):
            is_last = number == len(parts)  # the one with the tokens
            message = part.message(
                self._link.next_seq,
                started_ns=self._flushed_ns,
                busy_ns=now_ns - self._flushed_ns if is_last else 0,
                queued_turns=self.queued_turns,
            )
            self._link.send_step(message, continues_step=number > 1)
        self._flushed_ns = now_ns
        return True
