"""What of an engine's memory sleeps, and what does it take to have it again?

Sleep is a matter of memory alone: a pause comes first, and decides what becomes of running turns.
It knows nothing of steps, nor of who uses the memory meanwhile.

Weights that come by an update wake what sleeps: the update fills the memory beside them, as ever,
and the swap puts it in their place.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch

from tidegate.engine.execution.runner import Runner
from tidegate.engine.memory import returned_memory
from tidegate.engine.weights.staging import Staging
from tidegate.engine.weights.weight_store import WeightStore
from tidegate.errors import OutOfMemory, TidegateError
from tidegate.transport.limits import cut
from tidegate.transport.messages import Message
from tidegate.transport.sleep_messages import (
    MEMORY_TAGS,
    Asleep,
    Awake,
    MemoryTag,
    Sleep,
    SleepFailed,
    SleepLevel,
    Wake,
)

NO_PAUSE = "no pause is on, and turns can't run without memory; pause first, and resume after wake"


class Turns(Protocol):
    """What sleeping needs of those who hold turns."""

    @property
    def is_pause_asked(self) -> bool:
        """Whether a pause is on, or will be."""

    @property
    def is_pause_in_effect(self) -> bool:
        """Whether a pause is on, and no turn runs."""

    @property
    def is_swap_asked(self) -> bool:
        """Whether staged weights are to be swapped in."""

    def hold(self, is_held: bool) -> None:
        """Run no turn whatever else allows it, until told otherwise."""

    def forget_kv(self) -> None:
        """The KV of all turns is gone: they are to be computed again."""


class Offloaded(Protocol):
    """What some memory held, elsewhere."""

    def restore(self, beat: Callable[[], None]) -> None:
        """Put all of it back where it was, and forget it."""

    def close(self) -> None:
        """Forget it. Harmless if repeated."""


class Memory(Protocol):
    """Where weights and KV are: the host, or a device. A region is a piece of it, with ``nbytes``;
    what else a region is, is the memory's own business."""

    def regions_of(self, tensors: Iterable[torch.Tensor]) -> Sequence[Any]:
        """The memory behind these tensors, each piece once, also while it is given back."""

    def give_back(self, regions: Sequence[Any]) -> None:
        """Let others have it."""

    def take_again(self, regions: Sequence[Any], beat: Callable[[], None]) -> None:
        """Have what was given back, as zeros."""

    def offload(self, regions: Sequence[Any], beat: Callable[[], None]) -> Offloaded:
        """Copy what it holds to elsewhere."""

    def trim(self) -> None:
        """Let others have what was freed, and is kept."""

    def used_bytes(self) -> int:
        """What this process has of it."""

    def available_bytes(self) -> int:
        """What there is to be had."""


class HostMemory:
    """This machine's."""

    regions_of = staticmethod(returned_memory.regions_of)
    give_back = staticmethod(returned_memory.give_back)
    take_again = staticmethod(returned_memory.take_again)
    offload = staticmethod(returned_memory.OffloadedBytes)
    trim = staticmethod(returned_memory.trim_heap)
    used_bytes = staticmethod(returned_memory.anonymous_bytes)
    available_bytes = staticmethod(returned_memory.available_bytes)


class Sleeper:
    """The memory of one engine that can be given back."""

    def __init__(
        self,
        runner: Runner,
        staging: Staging,
        turns: Turns,
        *,
        reload: Callable[[WeightStore, Callable[[], None]], None],
        memory: Memory | None = None,
    ) -> None:
        """``reload`` fills weights from the model directory, and calls back now and then.

        ``memory`` is where weights and KV are; None: the host's.
        """
        self._runner = runner
        self._staging = staging
        self._turns = turns
        self._reload = reload
        self._memory: Memory = HostMemory() if memory is None else memory
        self._asleep: set[MemoryTag] = set()
        self._offloaded: Offloaded | None = None
        """What the weights were, if they sleep at level 1."""
        self._are_the_directorys = True
        """Whether the live weights are those of the model directory."""
        self.lacks_weights = False
        """Whether the live weights are gone, and nothing can bring them back but an update."""
        self._asked: Sleep | None = None
        """What is to sleep as soon as it can."""
        self._processes = 1
        """That each need as much as this one, of the same machine's memory."""
        self.beat: Callable[[], None] = lambda: None
        """Called now and then in long copies, so that nobody takes the engine for hung."""

    @property
    def asleep(self) -> list[MemoryTag]:
        """What sleeps now."""
        return [tag for tag in MEMORY_TAGS if tag in self._asleep]

    @property
    def has_weights(self) -> bool:
        """Whether the live weights are where they serve, or where others can be laid over them."""
        return "weights" not in self.asleep and not self.lacks_weights

    # ------------------------------------------------------------ sleeping

    def ask(self, message: Sleep) -> None:
        """Have memory given back as soon as :meth:`settle` finds that it can be."""
        self._asked = message

    def settle(self) -> list[Message]:
        """Do what was asked for, if it can be done by now; the answer to it."""
        asked = self._asked
        if asked is None:
            return []
        if not self._turns.is_pause_asked:
            self._asked = None
            return [SleepFailed(request=asked.request, message=NO_PAUSE)]
        if not self._turns.is_pause_in_effect or self._turns.is_swap_asked:
            return []
        if "weights" in asked.tags and not self._staging.give_up("the weights were put to sleep"):
            return []
        self._asked = None
        return [self._sleep(asked)]

    def _sleep(self, asked: Sleep) -> Message:
        self._memory.trim()  # or what steps have freed, and is kept, would count as returned
        before = self._memory.used_bytes()
        try:
            if "weights" in asked.tags:
                self._put_weights_to_sleep(asked.level)
            if "kv_cache" in asked.tags and "kv_cache" not in self._asleep:
                self._turns.forget_kv()
                self._asleep.add("kv_cache")
                self._memory.give_back(self._kv_regions())
        except (OSError, OutOfMemory) as error:
            return SleepFailed(
                request=asked.request, message=cut(f"can't give memory back: {error}")
            )
        finally:
            self._hold()
        self._memory.trim()
        returned = max(0, before - self._memory.used_bytes())
        return Asleep(request=asked.request, tags=self.asleep, returned_bytes=returned)

    def _put_weights_to_sleep(self, level: SleepLevel) -> None:
        if "weights" not in self._asleep:
            regions = self._weight_regions()
            if level == 1 and not self.lacks_weights:
                self._offloaded = self._memory.offload(regions, self.beat)
            self._asleep.add("weights")
            buffer = self._memory.regions_of(self._staging.tensors())
            self._memory.give_back([*regions, *buffer])
        if level == 2:
            self._forget_offloaded()

    def _forget_offloaded(self) -> None:
        if self._offloaded is not None:
            self._offloaded.close()
            self._offloaded = None

    # ------------------------------------------------------------ waking

    def wake(self, message: Wake) -> Message:
        """Take memory again."""
        tags = [tag for tag in MEMORY_TAGS if tag in self._asleep and tag in message.tags]
        try:
            self._refuse_what_does_not_fit(tags)
            if "weights" in tags:
                self._wake_weights()
            if "kv_cache" in tags:
                self._memory.take_again(self._kv_regions(), self.beat)
        except (OSError, TidegateError) as error:
            return SleepFailed(request=message.request, message=cut(str(error)))
        self._asleep.difference_update(tags)
        self._hold()
        return Awake(request=message.request, tags=self.asleep, lacks_weights=self.lacks_weights)

    def _wake_weights(self) -> None:
        if self._offloaded is not None:
            self._offloaded.restore(self.beat)
            self._offloaded = None
        elif self._are_the_directorys:
            self._reload(self._runner.weights, self.beat)
        else:
            self.lacks_weights = True

    def _refuse_what_does_not_fit(self, tags: Sequence[MemoryTag]) -> None:
        """Linux promises memory that it hasn't got, and kills who comes to use it: look before.

        Raises:
            OutOfMemory: whoever had it meanwhile has it still.
        """
        regions: list[Any] = []
        regions += self._weight_regions() if "weights" in tags else []
        regions += self._kv_regions() if "kv_cache" in tags else []
        needed = self._processes * sum(region.nbytes for region in regions)
        available = self._memory.available_bytes()
        if needed > available:
            raise OutOfMemory(
                doing=f"to wake {' and '.join(tags)}",
                remedy="free what took its place, then wake it again",
                why=f"needs {needed / 2**30:.1f} GiB, {available / 2**30:.1f} GiB are available",
            )

    def swapped(self) -> None:
        """Other weights were swapped in: whatever slept in their place is not wanted any more."""
        self._forget_offloaded()
        self._asleep.discard("weights")
        self._are_the_directorys = self.lacks_weights = False
        self._hold()

    def start_over(self) -> None:
        """Whoever asked for something to sleep is gone. What sleeps does so still."""
        self._asked = None
        self._hold()

    def close(self) -> None:
        """Leave nothing behind."""
        self._forget_offloaded()

    # ------------------------------------------------------------ memory

    def _hold(self) -> None:
        self._turns.hold(bool(self.asleep) or self.lacks_weights)

    def _weight_regions(self) -> Sequence[Any]:
        return self._memory.regions_of(self._runner.weights.tensors())

    def _kv_regions(self) -> Sequence[Any]:
        return self._memory.regions_of(self._runner.cache_tensors())
