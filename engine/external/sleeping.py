"""Sleep and wake of an external engine, as requests from the run that need a pause in effect.

While memory sleeps, or weights are missing, the engine stays paused:
:attr:`ExternalSleepController.keeps_paused` forbids resuming it. Requests in flight are ended
before the engine sleeps, and made again after it wakes.
"""

from tidegate.engine.external.adapter import EngineAdapter
from tidegate.engine.external.streams import Streams
from tidegate.engine.external.swaps import WeightSwapper
from tidegate.engine.scheduling.pauses import PauseGate
from tidegate.engine.weights.staging import Staging
from tidegate.errors import EngineGone, WeightsRefused
from tidegate.transport.messages import Message
from tidegate.transport.sleep_messages import (
    MEMORY_TAGS,
    Asleep,
    Awake,
    MemoryTag,
    Sleep,
    SleepRequestFailed,
    Wake,
)

NO_PAUSE = (
    "no pause is in effect, and turns can't run without memory; pause first, and resume after wake"
)


class ExternalSleepController:
    """Puts one external engine's weights and KV cache to sleep and wakes them."""

    def __init__(self, adapter: EngineAdapter, swapper: WeightSwapper) -> None:
        self._adapter = adapter
        self._capabilities = adapter.capabilities
        self._swapper = swapper
        self._asleep: set[MemoryTag] = set()
        self._keeps_contents = True
        """Whether sleeping weights keep their contents."""
        self.needs_weights = False
        """Whether the live weights are lost, so that only a weight update can restore them. The
        caller resets it after one."""
        self.pending: list[Sleep | Wake] = []
        """Requests for :meth:`run_pending`, in order. Requests of a lost orchestrator are dropped,
        and sleeping memory stays asleep."""
        self.is_changing = False
        """Whether a sleep or wake is in progress, so that ``asleep`` is about to change."""

    @property
    def asleep(self) -> list[MemoryTag]:
        """Tags of the memory that sleeps now."""
        return [tag for tag in MEMORY_TAGS if tag in self._asleep]

    @property
    def keeps_paused(self) -> bool:
        """Whether the engine must stay paused."""
        return bool(self._asleep) or self.needs_weights

    async def run_pending(
        self, gate: PauseGate, streams: Streams, staging: Staging
    ) -> list[Message]:
        """Carry out pending requests as far as possible now; return the replies.

        Raises:
            EngineGone: it is unknown which memory sleeps.
        """
        replies: list[Message] = []
        while self.pending:
            request = self.pending[0]
            if isinstance(request, Sleep) and gate.is_pause_requested:
                if not gate.is_pause_in_effect(streams.running) or gate.is_swap_requested:
                    break
                if "weights" in request.tags and not staging.cancel_update(
                    "the weights were put to sleep"
                ):
                    break
            del self.pending[0]
            self.is_changing = True
            try:
                replies.append(await self._run_request(request, gate, streams))
            finally:
                self.is_changing = False
        return replies

    async def _run_request(
        self, request: Sleep | Wake, gate: PauseGate, streams: Streams
    ) -> Message:
        if isinstance(request, Wake):
            return await self._wake(request)
        if gate.is_pause_requested:
            return await self._sleep(request, streams)
        return SleepRequestFailed(request_id=request.request_id, message=NO_PAUSE)

    async def _sleep(self, request: Sleep, streams: Streams) -> Message:
        if request.level not in self._capabilities.sleep_levels:
            engine = self._capabilities.engine
            why = f"{engine} can't sleep at level {request.level} with its start-up settings"
            return SleepRequestFailed(request_id=request.request_id, message=why)
        if not self._asleep:
            # Frozen requests end too, because their KV is released.
            await streams.stop(ends_turns=False)
            streams.new_salt()
        tags = [tag for tag in request.tags if tag not in self._asleep]
        if tags:
            await self._adapter.sleep(request.level, tags)
        if "weights" in tags:
            self._keeps_contents = request.level == 1
        self._asleep.update(tags)
        return Asleep(request_id=request.request_id, tags=self.asleep)

    async def _wake(self, request: Wake) -> Message:
        tags = [tag for tag in self.asleep if tag in request.tags]
        if tags:
            await self._adapter.wake(tags)
        self._asleep.difference_update(tags)
        if "weights" in tags and not self._keeps_contents:
            await self._reload_weights()
        return Awake(
            request_id=request.request_id, tags=self.asleep, needs_weights=self.needs_weights
        )

    async def _reload_weights(self) -> None:
        """Reload the model directory's weights. Other weights are lost until the next update."""
        if self._swapper.has_swapped:
            self.needs_weights = True
            return
        try:
            await self._swapper.reload()
        except WeightsRefused as error:
            raise EngineGone(
                f"{self._capabilities.engine} woke, and can't load the weights again: {error}"
            ) from error

    async def wake_for_update(self) -> None:
        """Wake the weights' memory for a weight update."""
        if "weights" in self._asleep:
            await self._adapter.wake(["weights"])
            self._asleep.discard("weights")
            self.needs_weights = self.needs_weights or not self._keeps_contents

    async def wake_all(self) -> None:
        """Wake all memory at the end of the worker; the next run loads weights again."""
        if self._asleep:
            await self._adapter.wake(self.asleep)
            self._asleep.clear()
