"""Turns submitted to an external engine's worker: queued by priority, then arrival, until they end.

Used by ``ExternalEngineLoop``, which decides when turns may start; ``Streams`` makes their
requests."""

import asyncio
import heapq
from collections.abc import Callable, Collection

from tidegate.engine.external.adapter import Capabilities, EngineAdapter
from tidegate.engine.external.step_message_batcher import StepMessageBatcher
from tidegate.engine.external.streams import Streams
from tidegate.engine.external.turns import ExternalTurn, read_turn
from tidegate.engine.link import OrchestratorLink
from tidegate.engine.scheduling.sequences import EngineLimits
from tidegate.errors import TidegateError, TurnRefused
from tidegate.transport import messages
from tidegate.transport.limits import cut
from tidegate.transport.messages import CANCELLED, SubmitTurn

RETRY_DELAY_S = 0.2
"""Seconds to wait after the engine refused a request because another client paused it."""


class ExternalTurnQueue:
    """All turns that have been submitted and have not ended."""

    def __init__(
        self,
        link: OrchestratorLink,
        adapter: EngineAdapter,
        capabilities: Capabilities,
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
        self._capabilities = capabilities
        self._limits = limits
        self._batcher = batcher
        self._on_change = on_change
        self._on_gone = on_gone
        self._adapters: Collection[str] = ()
        """LoRA adapters of the live version."""
        self._turns: dict[int, ExternalTurn] = {}
        self._waiting: list[tuple[tuple[int, int], ExternalTurn]] = []
        """Heap by rank; may contain turns that have been cancelled."""
        self._arrivals = 0
        self._is_held = False
        """Whether no request is made for ``RETRY_DELAY_S``, because the engine has just refused
        one."""
        self.streams = Streams(
            adapter,
            capabilities,
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
            self._link.send(messages.TurnFailed(turn=message.turn, message=cut(str(error))))
            return
        self._arrivals += 1
        self._turns[turn.handle] = turn
        heapq.heappush(self._waiting, (turn.rank, turn))

    def set_adapters(self, names: Collection[str]) -> None:
        """Set the live version's adapters; turns with any other adapter are refused."""
        self._adapters = names
        for turn in list(self._turns.values()):
            if why := self._why_not(turn.adapter):
                del self._turns[turn.handle]
                self.streams.abort(turn)
                self._refuse(turn, TurnRefused(why))

    def _why_not(self, adapter: str) -> str:
        """Return why a turn with this adapter, or without one, cannot be served;
        empty if it can."""
        if not adapter:
            return self._capabilities.lora_spoils_others if self._adapters else ""
        if adapter in self._adapters:
            return ""
        return (
            f"v{self._batcher.version} has no adapter {adapter!r}, it has "
            f"{sorted(self._adapters) or 'none'}; publish it first"
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

    def _on_request_ended(
        self, turn: ExternalTurn, error: TidegateError | None, *, is_held: bool = False
    ) -> None:
        """Handle the end of a request; the turn is queued again unless the turn has ended too."""
        self._on_change()
        if isinstance(error, TurnRefused):
            if self._turns.pop(turn.handle, None) is turn:
                self._refuse(turn, error)
        elif error is not None:
            self._on_gone(error)
        elif self._turns.get(turn.handle) is not turn:
            pass  # cancelled while its request ended
        elif turn.has_ended:
            del self._turns[turn.handle]
        else:
            heapq.heappush(self._waiting, (turn.rank, turn))
            if is_held and not self._is_held:
                self._is_held = True
                asyncio.get_running_loop().call_later(RETRY_DELAY_S, self._retry)

    def _retry(self) -> None:
        self._is_held = False
        self._on_change()

    def _refuse(self, turn: ExternalTurn, error: TurnRefused) -> None:
        # Tokens that wait for credit would be sent for a turn that no longer exists.
        self._batcher.rows.drop(turn.handle)
        self._link.send(messages.TurnFailed(turn=turn.handle, message=cut(str(error))))
