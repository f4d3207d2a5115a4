"""Sleep and wake of an external engine, as requests from the run that need a pause in effect.

Used by ``ExternalEngineLoop``. While memory sleeps, or weights are missing, the engine stays
paused: :attr:`ExternalSleepController.holds` forbids resuming it. Running requests have been ended
before, and are made again afterwards."""

from collections.abc import Awaitable, Callable

from tidegate.engine.external.adapter import Capabilities, EngineAdapter
from tidegate.engine.external.streams import Streams
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

NO_PAUSE = "no pause is on, and turns can't run without memory; pause first, and resume after wake"


class ExternalSleepController:
    """Puts one external engine's weights and KV cache to sleep and wakes them."""

    def __init__(
        self,
        adapter: EngineAdapter,
        able: Capabilities,
        *,
        reload: Callable[[], Awaitable[None]],
        are_the_directorys: Callable[[], bool],
    ) -> None:
        """``reload`` loads the live weights again; ``are_the_directorys``: no other weights
        were ever loaded."""
        self._adapter = adapter
        self._able = able
        self._reload = reload
        self._are_the_directorys = are_the_directorys
        self._asleep: set[MemoryTag] = set()
        self._are_kept = True
        """Whether sleeping weights keep their contents."""
        self.needs_weights = False
        """Whether the live weights are lost, so that only a weight update can restore them."""
        self._asked: list[Sleep | Wake] = []
        self.is_at_work = False
        """Whether a sleep or wake is in progress, so that ``asleep`` is about to change."""

    @property
    def asleep(self) -> list[MemoryTag]:
        """Tags of the memory that sleeps now."""
        return [tag for tag in MEMORY_TAGS if tag in self._asleep]

    @property
    def holds(self) -> bool:
        """Whether the engine must stay paused."""
        return bool(self._asleep) or self.needs_weights

    @property
    def is_asked(self) -> bool:
        """Whether requests are pending."""
        return bool(self._asked)

    def ask(self, message: Sleep | Wake) -> None:
        """Queue a request for :meth:`settle`."""
        self._asked.append(message)

    def start_over(self) -> None:
        """Drop requests of a lost orchestrator. Sleeping memory stays asleep."""
        self._asked.clear()

    async def settle(self, gate: PauseGate, streams: Streams, staging: Staging) -> list[Message]:
        """Carry out pending requests as far as possible now; return their answers.

        Raises:
            EngineGone: it is unknown which memory sleeps.
        """
        answers: list[Message] = []
        while self._asked:
            asked = self._asked[0]
            if isinstance(asked, Sleep) and gate.is_pause_asked:
                if not gate.is_pause_in_effect(streams.running) or gate.is_swap_asked:
                    break
                if "weights" in asked.tags and not staging.give_up("the weights sleep"):
                    break
            del self._asked[0]
            self.is_at_work = True
            try:
                answers.append(await self._do(asked, gate, streams))
            finally:
                self.is_at_work = False
        return answers

    async def _do(self, asked: Sleep | Wake, gate: PauseGate, streams: Streams) -> Message:
        if isinstance(asked, Wake):
            return await self._wake(asked)
        if gate.is_pause_asked:
            return await self._sleep(asked, streams)
        return SleepRequestFailed(request_id=asked.request_id, message=NO_PAUSE)

    async def _sleep(self, asked: Sleep, streams: Streams) -> Message:
        if asked.level not in self._able.sleep_levels:
            why = f"{self._able.engine} can't sleep at level {asked.level} as it was started"
            return SleepRequestFailed(request_id=asked.request_id, message=why)
        if not self._asleep:
            await streams.stop(are_over=False)  # also frozen requests, because their KV is released
            streams.new_salt()
        tags = [tag for tag in asked.tags if tag not in self._asleep]
        if tags:
            await self._adapter.sleep(asked.level, tags)
        if "weights" in tags:
            self._are_kept = asked.level == 1
        self._asleep.update(tags)
        return Asleep(request_id=asked.request_id, tags=self.asleep)

    async def _wake(self, asked: Wake) -> Message:
        tags = [tag for tag in self.asleep if tag in asked.tags]
        if tags:
            await self._adapter.wake(tags)
        self._asleep.difference_update(tags)
        if "weights" in tags and not self._are_kept:
            await self._bring_weights()
        return Awake(
            request_id=asked.request_id, tags=self.asleep, needs_weights=self.needs_weights
        )

    async def _bring_weights(self) -> None:
        """Reload the model directory's weights; other weights must come by an update."""
        if not self._are_the_directorys():
            self.needs_weights = True
            return
        try:
            await self._reload()
        except WeightsRefused as error:
            raise EngineGone(f"{self._able.engine} woke without weights: {error}") from error

    async def make_room(self) -> None:
        """Wake the weights' memory for a weight update."""
        if "weights" in self._asleep:
            await self._adapter.wake(["weights"])
            self._asleep.discard("weights")
            self.needs_weights = self.needs_weights or not self._are_kept

    def loaded(self) -> None:
        """Take note that an update has loaded weights."""
        self.needs_weights = False

    async def wake_all(self) -> None:
        """Wake all memory at the end; the next run brings weights that are lost."""
        if self._asleep:
            await self._adapter.wake(self.asleep)
            self._asleep.clear()
