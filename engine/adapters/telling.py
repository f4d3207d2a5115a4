"""When are tokens told, and of which version? Rows gather for a moment, then travel as one step.

Knows neither the engine nor turns. Whoever changes the version has all rows told first, for a step
message has one version.
"""

import asyncio
import time

from tidegate.engine.adapters.rows import Rows
from tidegate.engine.link import Link
from tidegate.transport.messages import Step

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
