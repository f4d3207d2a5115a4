"""Turns of an external engine: waiting in a queue, or requested from the engine.

:class:`ExternalTurnQueue` holds the turns that have not ended, by priority, then arrival.
:class:`Streams` runs the requests in flight, one asyncio task each. If a request ends before its
turn, the turn is requested again. :class:`Streams` carries out pauses, because a pause is complete
only when all requests have returned.
"""

import asyncio
import heapq
import itertools
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from contextlib import aclosing
from typing import Literal

from tidegate.engine.external.adapter import EngineAdapter, GeneratedChunk, adapter_failed
from tidegate.engine.external.step_message_batcher import StepMessageBatcher
from tidegate.engine.external.turns import ExternalTurn, read_turn
from tidegate.engine.link import OrchestratorLink
from tidegate.engine.scheduling.sequences import EngineLimits
from tidegate.errors import EngineGone, EngineHeld, TidegateError, TurnRefused
from tidegate.transport.limits import cut
from tidegate.transport.messages import ABORT, CANCELLED, LENGTH, STOP, SubmitTurn, TurnFailed

ABORT_GRACE_S = 0.25
"""Seconds after a pause for requests to return by themselves. Then requests without a token are
cancelled, because one that reached the engine after the pause would never return."""

STREAM_INTERVAL_TOKENS = 16
"""Default of the tokens of a request that the engine may collect before it sends them. A killed
engine loses up to one token fewer than this of each running turn. vLLM's API process spends 1.65
times the CPU time of whole answers if it sends each token, 1.13 times if it sends 16 at once."""

ABORT_TIMEOUT_S = 30.0
"""Seconds after a pause within which requests with tokens must return; otherwise the engine is
treated as broken."""

RETRY_DELAY_S = 0.2
"""Seconds to wait after the engine refused a request because another client paused it."""

FINISH_CODES = {"stop": STOP, "length": LENGTH, "abort": ABORT}


RequestEndedCallback = Callable[[ExternalTurn, TidegateError | None], None]
"""Handles the end of a turn's request; the error is None if the request succeeded."""


class Streams:
    """The requests of all running turns."""

    def __init__(
        self,
        adapter: EngineAdapter,
        label: str,
        *,
        batcher: StepMessageBatcher,
        on_request_ended: RequestEndedCallback,
        stream_interval_tokens: int = STREAM_INTERVAL_TOKENS,
    ) -> None:
        """Create an empty table. ``label`` names the weights that the engine serves now. Tokens are
        reported with this label, and it salts the prefix cache, so that KV of other weights is not
        reused. The engine may collect ``stream_interval_tokens`` of a request before it sends
        them."""
        self._adapter = adapter
        self._capabilities = adapter.capabilities
        self._label = self._salt = label
        self._salts = itertools.count(1)
        self.loras: Mapping[str, str] = {}
        """Adapter names in the engine, by the run's names, of the live version."""
        self._batcher = batcher
        self._on_request_ended = on_request_ended
        self._stream_interval_tokens = stream_interval_tokens
        """Interval of later requests."""
        self.paused: Literal["abort", "keep"] | None = None
        """Mode of the engine's last pause; None if resumed."""
        self.may_be_paused = False
        """Whether a pause was requested since the last resume. A task that is cancelled while it
        waits for the answer leaves the engine paused, and ``paused`` None."""
        self._abort_ends_turns = True
        """Whether aborting a turn's request ends the turn. If False, the turn queue requests the
        rest of the turn again."""
        self._running: dict[ExternalTurn, asyncio.Task[None]] = {}

    @property
    def is_stopped(self) -> bool:
        """Whether the engine is paused without requests."""
        return self.paused == "abort"

    @property
    def running(self) -> int:
        """Number of requests in flight."""
        return len(self._running)

    @property
    def loras_used(self) -> Collection[str]:
        """Names of adapters that requests in flight use."""
        return {turn.lora for turn in self._running}

    def new_salt(self) -> None:
        """Change the cache salt, so that later requests use no KV cached before."""
        self._salt = f"{self._label}.{next(self._salts)}"

    def start(self, turn: ExternalTurn, version: int) -> None:
        """Request the rest of a turn from the engine."""
        lora = self.loras[turn.adapter] if turn.adapter else ""
        request = turn.request(version, self._salt, lora, self._stream_interval_tokens)
        stream = self._adapter.generate(request)

        task = asyncio.create_task(self._serve(turn, stream))
        self._running[turn] = task
        task.add_done_callback(lambda done: self._ended(turn, done))

    async def _serve(
        self, turn: ExternalTurn, stream: AsyncGenerator[GeneratedChunk, None]
    ) -> None:
        async with aclosing(stream):
            async for chunk in stream:
                if turn.is_aborted or await self._handle_chunk(turn, chunk):
                    break

    def _ended(self, turn: ExternalTurn, task: asyncio.Task[None]) -> None:
        self._running.pop(turn, None)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, TidegateError):
            error = adapter_failed(error)
        self._on_request_ended(turn, error)

    async def _handle_chunk(self, turn: ExternalTurn, chunk: GeneratedChunk) -> bool:
        """Add a chunk to the next step message; return whether it was the last."""
        if len(chunk.token_ids) != len(chunk.logprobs):
            raise EngineGone(
                f"{self._capabilities.engine} returned {len(chunk.token_ids)} tokens with "
                f"{len(chunk.logprobs)} log-probs, and training needs one for each; is a proxy "
                "changing its answers?"
            )
        if chunk.token_ids:
            if not turn.has_output and self._batcher.rows.has_tokens_of(turn.handle):
                await self._batcher.flush_all()  # a row's prefill must come before its tokens
            if turn.is_aborted:
                return True
        attachments = turn.attachments_of(chunk)
        prefill = turn.add_chunk(chunk, self._label)
        if chunk.ended is not None:
            turn.check_labels(chunk.labels)
        if chunk.token_ids or attachments:
            self._batcher.rows.add(
                turn.handle,
                chunk.token_ids,
                chunk.logprobs,
                prefill=prefill,
                attachments=attachments,
            )
            self._batcher.flush_soon()
        if chunk.ended is not None:
            await self._check_kv(turn)  # after adding the tokens, as weights may change here
            if turn.is_aborted:
                return True
        if chunk.ended is not None and (chunk.ended != "abort" or self._abort_ends_turns):
            turn.has_ended = True
            self._batcher.rows.end(turn.handle, FINISH_CODES[chunk.ended])
            self._batcher.flush_next()
        self._batcher.flush_soon()
        return chunk.ended is not None

    async def _check_kv(self, turn: ExternalTurn) -> None:
        """Raise ``TurnRefused`` if the engine may have recomputed the KV of a turn that kept its KV
        across a weight swap. The engine's count of preemptions tells: it has grown since the
        swap."""
        if turn.preemptions is None:
            return
        now = await self._adapter.preemptions()
        if now != turn.preemptions:
            raise TurnRefused(
                f"{self._capabilities.engine} ran out of KV blocks after this turn was kept over "
                "new weights, and recomputed some turn's KV, perhaps this one's. Give the engine "
                "more memory for KV, or set kv_policy='recompute'"
            )

    # ------------------------------------------------------------ all requests

    async def stop(self, *, ends_turns: bool) -> int:
        """Pause the engine, end all requests in flight, and return how many of their turns the turn
        queue must request again.

        ``ends_turns``: end the turns that have sampled tokens, so that they are not requested
        again.
        """
        self._abort_ends_turns = ends_turns
        before = list(self._running)
        self.may_be_paused = True
        await self._adapter.pause("abort")
        self.paused = "abort"
        tasks = list(self._running.values())
        if tasks:
            await asyncio.wait(tasks, timeout=ABORT_GRACE_S)
            await self.abort_unstarted()
        if tasks := list(self._running.values()):
            await asyncio.wait(tasks, timeout=ABORT_TIMEOUT_S)
        if self._running:
            raise EngineGone(
                f"{self._capabilities.engine} was paused with mode abort, and {len(self._running)} "
                f"of its requests had not ended {ABORT_TIMEOUT_S:.0f} s later; is the engine stuck?"
            )
        self._abort_ends_turns = True
        return sum(not turn.has_ended for turn in before)

    async def freeze(self) -> None:
        """Pause with all requests in place; if the engine cannot, abort them to be requested again.

        Harmless if the engine is paused already.
        """
        if self.paused is None and not self._capabilities.freezes:
            await self.stop(ends_turns=False)
        elif self.paused is None:
            self.may_be_paused = True
            await self._adapter.pause("keep")
            self.paused = "keep"

    def send_every_token(self) -> bool:
        """Have the engine send every token of later requests at once; return whether it already
        does so for the requests in flight.

        Needed before weights change under frozen requests, because the engine sends tokens that it
        has collected without the version that sampled each.
        """
        self._stream_interval_tokens = 1
        return all(turn.stream_interval_tokens == 1 for turn in self._running)

    async def abort_unstarted(self) -> None:
        """Cancel requests without a token; their turns are requested again."""
        await self._abort_all([turn for turn in self._running if not turn.has_output])

    async def abort_changed_adapters(self, loras: Mapping[str, str]) -> int:
        """Cancel requests whose adapter changes; return how many there were."""
        changed = [
            turn for turn in self._running if turn.adapter and loras.get(turn.adapter) != turn.lora
        ]
        await self._abort_all(changed)
        return len(changed)

    async def _abort_all(self, turns: list[ExternalTurn]) -> None:
        tasks = [self._running[turn] for turn in turns]
        for turn in turns:
            self.abort(turn)
        if tasks:
            await asyncio.wait(tasks, timeout=ABORT_TIMEOUT_S)

    def abort(self, turn: ExternalTurn) -> None:
        """Abort a turn's request, if there is one; its later chunks are dropped."""
        task = self._running.get(turn)
        if task is not None:
            turn.is_aborted = True
            task.cancel()

    async def set_weights(self, label: str, loras: Mapping[str, str]) -> None:
        """Switch to other weights: later tokens and later cache salts have ``label``, and later
        requests use ``loras``, the engine's adapter names by the run's names."""
        self._label = self._salt = label
        self.loras = loras
        if self._running:
            preemptions = await self._adapter.preemptions()
            for turn in self._running:
                turn.preemptions = preemptions

    async def resume(self) -> None:
        """Resume the engine after a pause: frozen requests continue, and new ones may start."""
        await self._adapter.resume()
        self.paused, self.may_be_paused = None, False

    async def close(self) -> None:
        """Abort all requests."""
        tasks = list(self._running.values())
        for turn in list(self._running):
            self.abort(turn)
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)


class ExternalTurnQueue:
    """All turns that have been submitted and have not ended."""

    def __init__(
        self,
        link: OrchestratorLink,
        adapter: EngineAdapter,
        *,
        limits: EngineLimits,
        label: str,
        batcher: StepMessageBatcher,
        on_change: Callable[[], None],
        on_gone: Callable[[TidegateError], None],
        stream_interval_tokens: int,
    ) -> None:
        """``on_change`` is called when turns may start, or a request has ended."""
        self._link = link
        self._capabilities = adapter.capabilities
        self._limits = limits
        self._batcher = batcher
        self._on_change = on_change
        self._on_gone = on_gone
        self._turns: dict[int, ExternalTurn] = {}
        self._waiting: list[tuple[tuple[int, int], ExternalTurn]] = []
        """Heap by rank; may contain turns that have been cancelled."""
        self._arrivals = 0
        self._is_held = False
        """Whether no request is made for ``RETRY_DELAY_S``, because the engine has just refused
        one."""
        self.streams = Streams(
            adapter,
            label,
            batcher=batcher,
            on_request_ended=self._on_request_ended,
            stream_interval_tokens=stream_interval_tokens,
        )

    @property
    def handles(self) -> list[int]:
        """Handles of all turns."""
        return list(self._turns)

    @property
    def waiting(self) -> int:
        """Number of turns without a request; a cancelled request may outlive its turn."""
        return max(0, len(self._turns) - self.streams.running)

    def submit(self, message: SubmitTurn) -> None:
        """Queue a turn, or refuse it."""
        try:
            if message.turn in self._turns:
                raise TurnRefused(f"turn handle {message.turn} is in use; use each handle once")
            turn = read_turn(
                message, self._arrivals, limits=self._limits, capabilities=self._capabilities
            )
            if why := self._why_not(turn.adapter):
                raise TurnRefused(why)
        except TurnRefused as error:
            self._link.send(TurnFailed(turn=message.turn, message=cut(str(error))))
            return
        self._arrivals += 1
        self._turns[turn.handle] = turn
        heapq.heappush(self._waiting, (turn.rank, turn))

    def refuse_unserved(self) -> None:
        """Refuse the turns with an adapter that the live version does not have."""
        for turn in list(self._turns.values()):
            if why := self._why_not(turn.adapter):
                del self._turns[turn.handle]
                self.streams.abort(turn)
                self._refuse(turn, TurnRefused(why))

    def _why_not(self, adapter: str) -> str:
        """Return why a turn with this adapter, or without one, cannot be served;
        empty if it can."""
        if not adapter:
            return self._capabilities.lora_spoils_others if self.streams.loras else ""
        if adapter in self.streams.loras:
            return ""
        return (
            f"v{self._batcher.version} has no adapter {adapter!r}, it has "
            f"{sorted(self.streams.loras) or 'none'}; publish it first"
        )

    def cancel(self, handle: int) -> None:
        """Cancel a turn and its request."""
        turn = self._turns.pop(handle, None)
        if turn is not None and not turn.has_ended:  # the end of a turn is reported once
            self.streams.abort(turn)
            self._batcher.rows.end(handle, CANCELLED)
            self._batcher.flush_soon()

    def start(self) -> bool:
        """Request waiting turns up to the engine's limit; False while the engine refuses."""
        if self._is_held:
            return False
        self._batcher.queued_turns = len(self._waiting)
        while self._waiting and self.streams.running < self._limits.max_running_turns:
            _, turn = heapq.heappop(self._waiting)
            if self._turns.get(turn.handle) is turn:
                self.streams.start(turn, self._batcher.version)
        return True

    def _on_request_ended(self, turn: ExternalTurn, error: TidegateError | None) -> None:
        """Handle the end of a request; the turn is queued again unless the turn has ended too."""
        self._on_change()
        if isinstance(error, TurnRefused):
            if self._turns.pop(turn.handle, None) is turn:
                self._refuse(turn, error)
        elif error is not None and not isinstance(error, EngineHeld):
            self._on_gone(error)
        elif self._turns.get(turn.handle) is not turn:
            pass  # cancelled while its request ended
        elif turn.has_ended:
            del self._turns[turn.handle]
        else:
            heapq.heappush(self._waiting, (turn.rank, turn))
            if error is not None and not self._is_held:
                self._is_held = True
                asyncio.get_running_loop().call_later(RETRY_DELAY_S, self._retry)

    def _retry(self) -> None:
        self._is_held = False
        self._on_change()

    def _refuse(self, turn: ExternalTurn, error: TurnRefused) -> None:
        # Tokens that wait for credit would be sent for a turn that no longer exists.
        self._batcher.rows.drop(turn.handle)
        self._link.send(TurnFailed(turn=turn.handle, message=cut(str(error))))
