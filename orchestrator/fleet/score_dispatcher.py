"""Scheduler of scoring requests: assigns them to engines, and assembles the answers.

The engine side owns one; episodes and trainers call :meth:`ScoreDispatcher.submit_all`. Scoring is
neither counted in the ledger nor journalled. A request lost with its engine is sent to another
engine. All values of a reply are computed by one weight version.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tidegate.errors import EngineLost, ScoreRefused
from tidegate.orchestrator.core.turns import CONSECUTIVE_LOSSES_MAX
from tidegate.orchestrator.fleet.engine_record import Engine
from tidegate.orchestrator.fleet.pending_futures import fail, resolve
from tidegate.orchestrator.fleet.scores import Score, ScoreQuery, assemble_score
from tidegate.transport.messages import Message
from tidegate.transport.scoring import ANSWER_BYTES_MAX, CancelScore, ScoreResult
from tidegate.transport.scoring import ScoreFailed as RefusedMessage


@dataclass(slots=True, eq=False)
class PendingScore:
    """A scoring request whose reply has not arrived completely."""

    query: ScoreQuery
    future: "asyncio.Future[Score]"
    losses: int = 0
    """Number of engines that were lost while they had the request."""
    parts: list[ScoreResult] = field(default_factory=list)
    """Messages of the answer received so far."""
    parts_bytes: int = 0


class ScoreDispatcher:
    """All scoring requests of a run."""

    def __init__(
        self,
        engines: Mapping[str, Engine],
        *,
        pending: "set[asyncio.Future[Score]]",
        live_version: Callable[[], int],
        post: Callable[[str, Message], None],
    ) -> None:
        """``engines``: those that have joined, by name. ``live_version``: engines with
        older weights get no requests."""
        self._engines = engines
        self._pending = pending
        self._live_version = live_version
        self._post = post
        self._queue: deque[PendingScore] = deque()
        self._sent: dict[str, dict[int, PendingScore]] = {}
        """Requests on engines, by engine and number."""
        self._next_number = 0

    def submit(self, query: ScoreQuery) -> "asyncio.Future[Score]":
        """Send one sequence to an engine; cancelling the future cancels the request."""
        future: asyncio.Future[Score] = asyncio.get_running_loop().create_future()
        self._pending.add(future)
        future.add_done_callback(self._future_done)
        self._queue.append(PendingScore(query, future))
        self.advance()
        return future

    async def submit_all(self, queries: Sequence[ScoreQuery]) -> list[Score]:
        """Return the scores of all queries, or raise the first error. Cancels all if cancelled."""
        futures = [self.submit(query) for query in queries]
        try:
            return await asyncio.gather(*futures)
        finally:
            for future in futures:
                future.cancel()  # one has failed, or the caller was cancelled

    def joined(self, engine: str) -> None:
        """Record that an engine has connected or reconnected, and holds no requests."""
        self._requeue(engine, is_lost=False)
        self.advance()

    def left(self, engine: str) -> None:
        """Record that an engine is gone; its requests are sent to other engines."""
        self._requeue(engine, is_lost=True)
        self.advance()

    def received(self, engine: str, message: ScoreResult | RefusedMessage) -> None:
        """Handle an engine's answer, or part of one; ignore answers to cancelled requests."""
        request = self._sent.get(engine, {}).get(message.request_id)
        if request is None:
            return
        if isinstance(message, RefusedMessage):
            self._end(engine, message.request_id)
            fail(request.future, ScoreRefused(message.message))
            return
        request.parts.append(message)
        columns = (message.logprobs, message.top_ids, message.top_logprobs, message.ranks)
        request.parts_bytes += sum(map(len, columns)) + len(message.values)
        if message.is_last or request.parts_bytes > ANSWER_BYTES_MAX:
            self._end(engine, message.request_id)
            try:
                resolve(request.future, assemble_score(engine, request.query, request.parts))
            except ScoreRefused as error:
                fail(request.future, error)

    def advance(self) -> None:
        """Send queued requests to engines that have capacity."""
        while self._queue:
            request = self._queue[0]
            if not request.future.done():
                name = self._choose(request.query.score_kind)
                if name is None:
                    return self._refuse_unsupported()
                self._send(name, request)
            self._queue.popleft()
        return None

    # ------------------------------------------------------------ inside

    def _choose(self, want: str) -> str | None:
        """Return the least loaded engine that can compute ``want``; None if all are full."""
        live_version, best, best_load = self._live_version(), None, 1.0
        for name, engine in self._engines.items():
            # Half of an engine's slots; the other half is for turns, however much is to be scored.
            slots = max(1, engine.hello.max_running_turns // 2)
            load = len(self._sent.get(name, ())) / slots
            is_able = want in engine.hello.score_kinds and engine.weight_version >= live_version
            is_able = is_able and not engine.is_draining
            if is_able and load < best_load:
                best, best_load = name, load
        return best

    def _refuse_unsupported(self) -> None:
        """Fail requests that no engine of the run can ever answer."""
        if not self._engines:
            return  # engines may still join; a run without any ends
        supported = {name for engine in self._engines.values() for name in engine.hello.score_kinds}
        for request in self._queue:
            if request.query.score_kind not in supported:
                can = ", ".join(sorted(supported)) or "nothing"
                why = (
                    f"no engine of this run computes {request.query.score_kind}; they compute {can}"
                )
                fail(request.future, ScoreRefused(why))
        self._queue = deque(request for request in self._queue if not request.future.done())

    def _send(self, engine: str, request: PendingScore) -> None:
        number = self._next_number
        self._next_number += 1
        self._sent.setdefault(engine, {})[number] = request
        self._post(engine, request.query.message(number))

    def _end(self, engine: str, number: int) -> None:
        del self._sent[engine][number]
        asyncio.get_running_loop().call_soon(self.advance)  # after the request's caller continues

    def _requeue(self, engine: str, *, is_lost: bool) -> None:
        """Return the engine's requests to the head of the queue, in their order."""
        for request in reversed(self._sent.pop(engine, {}).values()):
            request.parts.clear()
            request.parts_bytes = 0
            request.losses += is_lost
            if request.losses >= CONSECUTIVE_LOSSES_MAX:
                why = (
                    f"{CONSECUTIVE_LOSSES_MAX} engines were lost with this request of "
                    f"{request.query.tokens} tokens; it may be what crashes them"
                )
                fail(request.future, EngineLost(why))
            else:
                self._queue.appendleft(request)

    def _future_done(self, future: "asyncio.Future[Score]") -> None:
        """Cancel a request on its engine if its future was cancelled."""
        self._pending.discard(future)
        if not future.cancelled():
            return
        for engine, requests in self._sent.items():
            for number, request in list(requests.items()):
                if request.future is future:
                    self._end(engine, number)
                    self._post(engine, CancelScore(request_id=number))
