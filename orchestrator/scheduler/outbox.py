"""Outgoing messages to engines, collected until the event loop's next iteration.

:class:`EngineSide` owns the outbox and passes it the run's socket as a function; nothing here is
journalled. Most of a send's cost is waking ZeroMQ's I/O thread, so turns for one engine are sent as
one ``SubmitTurns`` if the engine supports it. If a turn can't be sent, only that turn fails,
through ``on_refused``.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence

from tidegate.errors import BadFrame
from tidegate.transport.messages import Message, SubmitTurn, SubmitTurns
from tidegate.transport.scoring import ScoreTokens

CONTEXT_BYTES_TOGETHER_MAX = 1024 * 1024
"""Context bytes in one message, of the 4 MiB that a frame may have; the rest is for options."""

TURNS_TOGETHER_MAX = 256
"""Turns in one message; more would delay the engine's next step while it reads them."""


class Outbox:
    """Queue of messages, in the order in which each engine receives them."""

    def __init__(
        self,
        send: Callable[[str, Message], None],
        *,
        supports_submit_turns: Callable[[str], bool],
        on_refused: Callable[[str, SubmitTurn | ScoreTokens, BadFrame], None],
        on_error: Callable[[BaseException], None],
    ) -> None:
        """``on_refused`` is called with an engine and a turn, or a scoring request, that fits no
        frame; ``on_error`` with the error of any other message that can't be sent, which is a bug
        of Tidegate."""
        self._send = send
        self._supports_submit_turns = supports_submit_turns
        self._on_refused = on_refused
        self._on_error = on_error
        self._posted: list[tuple[str, Message]] = []

    def send(self, outgoing: Sequence[tuple[str, Message]]) -> None:
        """Send messages now, after all messages posted before."""
        posted, self._posted = self._posted, []
        together: dict[str, list[SubmitTurn]] = {}
        for engine, message in (*posted, *outgoing):
            if isinstance(message, SubmitTurn):
                together.setdefault(engine, []).append(message)
                continue
            if engine in together:  # this message may refer to the turns before it
                self._send_turns(engine, together.pop(engine))
            if isinstance(message, ScoreTokens):
                self._send_or_refuse(engine, message)
            else:
                self._send(engine, message)
        for engine, turns in together.items():
            self._send_turns(engine, turns)

    def _send_turns(self, engine: str, turns: list[SubmitTurn]) -> None:
        if len(turns) > 1 and self._supports_submit_turns(engine):
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
            # Deferred, because a refusal may start other turns while this loop sends some.
            loop = asyncio.get_running_loop()
            loop.call_soon(self._on_refused, engine, message, error)

    def _send_part(self, engine: str, turns: list[SubmitTurn]) -> None:
        if len(turns) == 1:
            self._send_or_refuse(engine, turns[0])
            return
        try:
            self._send(engine, SubmitTurns(turns=turns))
        except BadFrame:  # their options make the frame too large
            middle = len(turns) // 2
            self._send_part(engine, turns[:middle])
            self._send_part(engine, turns[middle:])

    def post(self, engine: str, message: Message) -> None:
        """Queue a message; the loop's next iteration sends all queued messages."""
        if not self._posted:
            asyncio.get_running_loop().call_soon(self._send_posted)
        self._posted.append((engine, message))

    def _send_posted(self) -> None:
        try:
            self.send(())
        except Exception as error:  # noqa: BLE001 - unreported, the error would leave turns waiting for ever
            self._on_error(error)


def _parts(turns: list[SubmitTurn]) -> Iterator[list[SubmitTurn]]:
    """Yield the turns in order, in parts that fit one message each."""
    part: list[SubmitTurn] = []
    context_bytes = 0
    for turn in turns:
        context_bytes += len(turn.token_ids)
        if part and (len(part) == TURNS_TOGETHER_MAX or context_bytes > CONTEXT_BYTES_TOGETHER_MAX):
            yield part
            part, context_bytes = [], len(turn.token_ids)
        part.append(turn)
    yield part
