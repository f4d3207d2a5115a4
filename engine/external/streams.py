"""Which requests are under way in the engine, and what comes of them? One task for each.

It pauses the engine and lets it go on, for it knows what must have come back by then. Which turns
start, and what is told when, is for others; weights it knows by their label only.
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import aclosing
from typing import Literal, Protocol

from tidegate.engine.external.adapter import Capabilities, Chunk, EngineAdapter
from tidegate.engine.external.telling import Teller
from tidegate.engine.external.turns import AskedTurn
from tidegate.errors import EngineGone, EngineHeld, TidegateError, TurnRefused
from tidegate.transport.messages import ABORT, LENGTH, STOP

GRACE_S = 0.25
"""After a pause, so long for requests to come back by themselves; those that have given nothing are
cut then. One that reached the engine after the pause did would wait in it for ever."""

ABORT_TIMEOUT_S = 30.0
"""A request that has begun must have been handed back by then, or the engine doesn't mean what it
says."""

FINISH = {"stop": STOP, "length": LENGTH, "abort": ABORT}


class Over(Protocol):
    """Who is told that a request has ended."""

    def __call__(
        self, turn: AskedTurn, error: TidegateError | None, *, is_held: bool = False
    ) -> None:
        """With what went wrong, if anything did."""


class Streams:
    """The requests of all turns that run."""

    def __init__(
        self,
        adapter: EngineAdapter,
        able: Capabilities,
        label: str,
        *,
        teller: Teller,
        on_over: Over,
    ) -> None:
        """``label`` is what the engine calls its weights."""
        self._adapter = adapter
        self._able = able
        self._label = self._salt = label
        self._salts = itertools.count(1)
        self._loras: Mapping[str, str] = {}
        """The engine's names of the version's adapters, by the run's."""
        self._teller = teller
        self._on_over = on_over
        self.paused: Literal["abort", "keep"] | None = None
        """What the engine was told last."""
        self._are_aborted_over = True
        """Whether a turn has ended when its request is handed back; else it goes on later."""
        self._running: dict[AskedTurn, asyncio.Task[None]] = {}

    @property
    def running(self) -> int:
        """How many there are."""
        return len(self._running)

    @property
    def loras_used(self) -> Collection[str]:
        """Names of adapters that the engine may not forget yet."""
        return {turn.lora for turn in self._running}

    def new_salt(self) -> None:
        """Whatever is cached is for no request that begins from now on."""
        self._salt = f"{self._label}.{next(self._salts)}"

    def start(self, turn: AskedTurn, version: int) -> None:
        """Ask the engine for what is left of a turn."""
        lora = self._loras[turn.adapter] if turn.adapter else ""
        request = turn.request(version, self._salt, lora)
        stream = self._adapter.generate(request)

        task = asyncio.create_task(self._serve(turn, stream))
        self._running[turn] = task
        task.add_done_callback(lambda done: self._ended(turn, done))

    async def _serve(self, turn: AskedTurn, stream: AsyncGenerator[Chunk, None]) -> None:
        async with aclosing(stream):
            async for chunk in stream:
                if turn.is_cut or await self._take(turn, chunk):
                    break

    def _ended(self, turn: AskedTurn, task: asyncio.Task[None]) -> None:
        self._running.pop(turn, None)
        error = None if task.cancelled() else task.exception()
        match error:
            case None:
                self._on_over(turn, None)
            case EngineHeld():
                self._on_over(turn, None, is_held=True)
            case TidegateError():
                self._on_over(turn, error)
            case _:  # a defect must not go unheard
                why = EngineGone(f"the adapter failed: {type(error).__name__}: {error}")
                why.__cause__ = error
                self._on_over(turn, why)

    async def _take(self, turn: AskedTurn, chunk: Chunk) -> bool:
        """Add a chunk to what is told; whether it was the last."""
        if len(chunk.token_ids) != len(chunk.logprobs):
            raise EngineGone(
                f"{self._able.engine} told {len(chunk.token_ids)} tokens and "
                f"{len(chunk.logprobs)} log-probs of them"
            )
        if chunk.token_ids:
            if not turn.has_begun and self._teller.rows.holds_tokens_of(turn.handle):
                await self._teller.all_told()  # a row can't have a prefill in its midst
            if turn.is_cut:
                return True
        prefill = turn.take(chunk, self._label)
        if chunk.ended is not None:
            turn.check_labels(chunk.labels)
        if chunk.token_ids:
            self._teller.rows.add(
                turn.handle, chunk.token_ids, chunk.logprobs, prefill=prefill, top=chunk.top
            )
            self._teller.tell()
        if chunk.ended is not None:
            await self._check_kv(turn)  # weights may change meanwhile, so its tokens don't wait
            if turn.is_cut:
                return True
        if chunk.ended is not None and (chunk.ended != "abort" or self._are_aborted_over):
            turn.is_over = True
            self._teller.rows.end(turn.handle, FINISH[chunk.ended])
        self._teller.tell()
        return chunk.ended is not None

    async def _check_kv(self, turn: AskedTurn) -> None:
        """Refuse a turn that was kept over new weights, and whose KV may not be what was told."""
        if turn.preemptions is None:
            return
        now = await self._adapter.preemptions()
        if now != turn.preemptions:
            raise TurnRefused(
                f"{self._able.engine} ran out of KV blocks after this turn was kept over new "
                f"weights, and computed some turn's KV again; nobody knows whose. Give it more "
                f"memory for KV, or set kv_policy='recompute'"
            )

    # ------------------------------------------------------------ all of them

    async def stop(self, *, are_over: bool) -> int:
        """Pause with no request left; return how many turns are to be asked for again.

        With ``are_over`` turns that have begun end by it.
        """
        self._are_aborted_over = are_over
        before = list(self._running)
        await self._adapter.pause("abort")
        self.paused = "abort"
        tasks = list(self._running.values())
        if tasks:
            await asyncio.wait(tasks, timeout=GRACE_S)
            await self.cut_unbegun()
        if tasks := list(self._running.values()):
            await asyncio.wait(tasks, timeout=ABORT_TIMEOUT_S)
        if self._running:
            raise EngineGone(
                f"{self._able.engine} was paused by abort, and did not hand back "
                f"{len(self._running)} requests within {ABORT_TIMEOUT_S:.0f} s"
            )
        self._are_aborted_over = True
        return sum(not turn.is_over for turn in before)

    async def freeze(self) -> None:
        """Pause with all requests where they are, or else so that all are asked for again.

        Harmless if they are stopped already.
        """
        if self.paused is None and not self._able.freezes:
            await self.stop(are_over=False)
        elif self.paused is None:
            await self._adapter.pause("keep")
            self.paused = "keep"

    async def cut_unbegun(self) -> None:
        """Let go of requests that have given no token; their turns are to be asked for again."""
        await self._cut_all([turn for turn in self._running if not turn.has_begun])

    async def cut_changed(self, loras: Mapping[str, str]) -> int:
        """Let go of requests whose adapter is to be another, or none; how many there were."""
        changed = [
            turn for turn in self._running if turn.adapter and loras.get(turn.adapter) != turn.lora
        ]
        await self._cut_all(changed)
        return len(changed)

    async def _cut_all(self, turns: list[AskedTurn]) -> None:
        tasks = [self._running[turn] for turn in turns]
        for turn in turns:
            self.cut(turn)
        if tasks:
            await asyncio.wait(tasks, timeout=ABORT_TIMEOUT_S)

    def cut(self, turn: AskedTurn) -> None:
        """Abort a turn's request, if there is one; what still comes of it is nobody's."""
        task = self._running.get(turn)
        if task is not None:
            turn.is_cut = True
            task.cancel()

    async def new_weights(self, label: str, loras: Mapping[str, str]) -> None:
        """From now on tokens come from other weights, with these adapters beside them."""
        self._label = self._salt = label
        self._loras = loras
        if self._running:
            preemptions = await self._adapter.preemptions()
            for turn in self._running:
                turn.preemptions = preemptions

    async def resume(self) -> None:
        """Let the engine go on."""
        await self._adapter.resume()
        self.paused = None

    async def close(self) -> None:
        """Abort all that is left."""
        tasks = list(self._running.values())
        for turn in list(self._running):
            self.cut(turn)
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)
