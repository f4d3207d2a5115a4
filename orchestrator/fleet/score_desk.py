"""Which request to score is on which engine, and who waits for its answer? Knows no turns.

Scores are beside the run: no ledger counts them, no journal holds them. What an engine loses is
sent to another; an answer is whole, and of one version of the weights, or there is none.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tidegate.errors import EngineLost, ScoreRefused
from tidegate.orchestrator.core.turns import LOSSES_MAX
from tidegate.orchestrator.fleet.engine_record import Engine
from tidegate.orchestrator.fleet.scores import Asked, Score, read_answer
from tidegate.orchestrator.fleet.waiting import fail, resolve
from tidegate.transport.messages import Message
from tidegate.transport.scoring import ANSWER_BYTES_MAX, CancelScore, Scored
from tidegate.transport.scoring import ScoreRefused as Refusal


class FleetView(Protocol):
    """What the desk needs of the fleet."""

    @property
    def engines(self) -> Mapping[str, Engine]:
        """Those that are there."""


@dataclass(slots=True, eq=False)
class _Request:
    """One that is not answered yet."""

    asked: Asked
    future: "asyncio.Future[Score]"
    losses: int = 0
    parts: list[Scored] = field(default_factory=list)
    parts_bytes: int = 0


class ScoreDesk:
    """All requests to score of a run."""

    def __init__(
        self,
        fleet: FleetView,
        *,
        waiting: "set[asyncio.Future[Score]]",
        live_version: Callable[[], int],
        post: Callable[[str, Message], None],
    ) -> None:
        """``live_version``: engines with older weights are not asked."""
        self._fleet = fleet
        self._waiting = waiting
        self._live_version = live_version
        self._post = post
        self._queue: deque[_Request] = deque()
        self._sent: dict[str, dict[int, _Request]] = {}
        """By engine and number."""
        self._next_number = 0

    def ask(self, asked: Asked) -> "asyncio.Future[Score]":
        """Have an engine score something; cancelling the future takes it back."""
        future: asyncio.Future[Score] = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        future.add_done_callback(self._settled)
        self._queue.append(_Request(asked, future))
        self.advance()
        return future

    async def ask_all(self, asked: Sequence[Asked]) -> list[Score]:
        """An answer to each, or what the first of them fails of; cancelled, all are taken back."""
        futures = [self.ask(one) for one in asked]
        try:
            return await asyncio.gather(*futures)
        finally:
            for future in futures:
                future.cancel()  # one has failed, or nobody waits for any

    def joined(self, engine: str) -> None:
        """An engine begins a conversation: it has no requests, whatever it was sent before."""
        self._take_back(engine, is_lost=False)
        self.advance()

    def left(self, engine: str) -> None:
        """An engine is gone."""
        self._take_back(engine, is_lost=True)
        self.advance()

    def heard(self, engine: str, message: Scored | Refusal) -> None:
        """An engine has answered; whatever is nobody's any more is ignored."""
        request = self._sent.get(engine, {}).get(message.request)
        if request is None:
            return
        if isinstance(message, Refusal):
            self._end(engine, message.request)
            fail(request.future, ScoreRefused(message.message))
            return
        request.parts.append(message)
        columns = (message.logprobs, message.top_ids, message.top_logprobs, message.ranks)
        request.parts_bytes += sum(map(len, columns)) + len(message.values)
        if message.last or request.parts_bytes > ANSWER_BYTES_MAX:
            self._end(engine, message.request)
            try:
                resolve(request.future, read_answer(engine, request.asked, request.parts))
            except ScoreRefused as error:
                fail(request.future, error)

    def advance(self) -> None:
        """Send what waits to engines that have room."""
        while self._queue:
            request = self._queue[0]
            if not request.future.done():
                name = self._choose(request.asked.want)
                if name is None:
                    return self._refuse_hopeless()
                self._send(name, request)
            self._queue.popleft()
        return None

    # ------------------------------------------------------------ inside

    def _choose(self, want: str) -> str | None:
        """The engine with the most room, of those that can tell it."""
        live_version, best, best_load = self._live_version(), None, 1.0
        for name, engine in self._fleet.engines.items():
            # Half of its slots: the others are for turns, however much there is to score.
            room = max(1, engine.hello.max_running_turns // 2)
            load = len(self._sent.get(name, ())) / room
            is_able = want in engine.hello.scores and engine.weight_version >= live_version
            if is_able and load < best_load:
                best, best_load = name, load
        return best

    def _refuse_hopeless(self) -> None:
        """Answer those that no engine will ever tell, rather than let them wait."""
        told = {want for engine in self._fleet.engines.values() for want in engine.hello.scores}
        if not self._fleet.engines:
            return  # others may come; a run without any ends
        for request in self._queue:
            if request.asked.want not in told:
                can = ", ".join(sorted(told)) or "nothing"
                why = f"no engine of this run tells {request.asked.want}; they tell {can}"
                fail(request.future, ScoreRefused(why))
        self._queue = deque(request for request in self._queue if not request.future.done())

    def _send(self, engine: str, request: _Request) -> None:
        number = self._next_number
        self._next_number += 1
        self._sent.setdefault(engine, {})[number] = request
        self._post(engine, request.asked.message(number))

    def _end(self, engine: str, number: int) -> None:
        del self._sent[engine][number]
        asyncio.get_running_loop().call_soon(self.advance)  # whoever waits for this one first

    def _take_back(self, engine: str, *, is_lost: bool) -> None:
        for request in reversed(self._sent.pop(engine, {}).values()):
            request.parts.clear()
            request.parts_bytes = 0
            request.losses += is_lost
            if request.losses >= LOSSES_MAX:
                why = f"{LOSSES_MAX} engines were lost with this request; is it what ends them?"
                fail(request.future, EngineLost(f"{why} It has {request.asked.tokens} tokens"))
            else:
                self._queue.appendleft(request)

    def _settled(self, future: "asyncio.Future[Score]") -> None:
        """Nobody waits any more: if there is no answer yet, there need be none."""
        self._waiting.discard(future)
        if not future.cancelled():
            return
        for engine, requests in self._sent.items():
            for number, request in list(requests.items()):
                if request.future is future:
                    self._end(engine, number)
                    self._post(engine, CancelScore(request=number))
