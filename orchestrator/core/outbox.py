"""Messages about to be sent to engines, collected until the loop's next turn.

Each message sent by itself wakes ZeroMQ's thread, which costs more than all else about it; so turns
for one engine travel together where it takes them so. A turn that can't be sent ends itself and no
other: whoever owns the outbox is told.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence

from tidegate.errors import BadFrame
from tidegate.transport.messages import Message, SubmitTurn, SubmitTurns
from tidegate.transport.scoring import ScoreTokens

CONTEXT_BYTES_TOGETHER_MAX = 1024 * 1024
"""What turns bring along, of the 4 MiB that their frame may have: the rest is for options."""

TURNS_TOGETHER_MAX = 256
"""More would keep an engine from its next step while it reads them."""


class Outbox:
    """Messages in the order in which each engine gets them."""

    def __init__(
        self,
        send: Callable[[str, Message], None],
        *,
        takes_turns_together: Callable[[str], bool],
        on_refused: Callable[[str, SubmitTurn | ScoreTokens, BadFrame], None],
        on_error: Callable[[BaseException], None],
    ) -> None:
        """``on_refused`` is told of a turn, or a request to score, that no frame holds, and of the
        engine it was for; ``on_error`` of any other message that can't be sent: a defect of ours.
        """
        self._send = send
        self._takes_turns_together = takes_turns_together
        self._on_refused = on_refused
        self._on_error = on_error
        self._posted: list[tuple[str, Message]] = []

    def send(self, outgoing: Sequence[tuple[str, Message]]) -> None:
        """Send messages now, after all that was posted before."""
        posted, self._posted = self._posted, []
        together: dict[str, list[SubmitTurn]] = {}
        for engine, message in (*posted, *outgoing):
            if isinstance(message, SubmitTurn):
                together.setdefault(engine, []).append(message)
                continue
            if engine in together:  # what it is told next may be about these
                self._send_turns(engine, together.pop(engine))
            if isinstance(message, ScoreTokens):
                self._send_or_refuse(engine, message)
            else:
                self._send(engine, message)
        for engine, turns in together.items():
            self._send_turns(engine, turns)

    def _send_turns(self, engine: str, turns: list[SubmitTurn]) -> None:
        if len(turns) > 1 and self._takes_turns_together(engine):
            context_bytes = sum([len(turn.token_ids) for turn in turns])
            if len(turns) <= TURNS_TOGETHER_MAX and context_bytes <= CONTEXT_BYTES_TOGETHER_MAX:
                self._send_part(engine, turns)
                return
            for part in _parts(turns):
                self._send_part(engine, part)
            return
        for turn in turns:
            self._send_or_refuse(engine, turn)

    def _send_or_refuse(self, engine: str, message: SubmitTurn | ScoreTokens) -> None:
        try:
            self._send(engine, message)
        except BadFrame as error:
            # Later, for what follows may be more turns, while this may be called for one of them.
            loop = asyncio.get_running_loop()
            loop.call_soon(self._on_refused, engine, message, error)

    def _send_part(self, engine: str, turns: list[SubmitTurn]) -> None:
        if len(turns) == 1:
            self._send_or_refuse(engine, turns[0])
            return
        try:
            self._send(engine, SubmitTurns(turns=turns))
        except BadFrame:  # their options are as large as that
            middle = len(turns) // 2
            self._send_part(engine, turns[:middle])
            self._send_part(engine, turns[middle:])

    def post(self, engine: str, message: Message) -> None:
        """Send a message soon, together with others."""
        if not self._posted:
            asyncio.get_running_loop().call_soon(self._send_posted)
        self._posted.append((engine, message))

    def _send_posted(self) -> None:
        try:
            self.send(())
        except Exception as error:  # noqa: BLE001 - nobody else would hear of it, and wait for ever
            self._on_error(error)


def _parts(turns: list[SubmitTurn]) -> Iterator[list[SubmitTurn]]:
    """As many at once as may travel together, in order."""
    part: list[SubmitTurn] = []
    context_bytes = 0
    for turn in turns:
        context_bytes += len(turn.token_ids)
        if part and (len(part) == TURNS_TOGETHER_MAX or context_bytes > CONTEXT_BYTES_TOGETHER_MAX):
            yield part
            part, context_bytes = [], len(turn.token_ids)
        part.append(turn)
    yield part
