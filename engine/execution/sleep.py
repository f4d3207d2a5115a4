"""Sleep and wake: releases the memory of weights and KV cache, and takes it back.

The levels are those of vLLM: level 1 offloads the weights, level 2 discards them. Sleep needs a
pause in effect; the pause mode decides whether running turns end or are frozen. A weight update
also wakes the weights: it fills the memory beside them, and the swap makes the new weights live.
Host memory is released by ``memory/host_memory.py``, device memory by ``device/memory.py``.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch

from tidegate.engine.execution.runner import Runner
from tidegate.engine.memory import host_memory
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
    SleepLevel,
    SleepRequestFailed,
    Wake,
)

NO_PAUSE = (
    "no pause is in effect, and turns can't run without memory; pause first, and resume after wake"
)


class SchedulerControl(Protocol):
    """Methods of the scheduler that sleep and wake call."""

    @property
    def is_pause_requested(self) -> bool:
        """Whether a pause is pending or in effect."""

    @property
    def is_pause_in_effect(self) -> bool:
        """Whether a pause is in effect and no turn runs."""

    @property
    def is_swap_requested(self) -> bool:
        """Whether a swap to staged weights is pending."""

    def hold(self, is_held: bool) -> None:
        """Stop or allow all steps, regardless of pauses."""

    def forget_kv(self) -> None:
        """Preempt all turns, because the KV memory is released."""


class OffloadedCopy(Protocol):
    """Copy of the contents of some regions in other memory or on disk."""

    def restore(self, heartbeat: Callable[[], None]) -> None:
        """Copy everything back, and discard the copy."""

    def close(self) -> None:
        """Discard the copy. Harmless if repeated."""


class SleepableMemory(Protocol):
    """Memory of weights and KV cache, in regions. A region is opaque except for its ``nbytes``."""

    def regions_of(self, tensors: Iterable[torch.Tensor]) -> Sequence[Any]:
        """Return the regions behind these tensors, each once, also while they are released."""

    def release(self, regions: Sequence[Any]) -> None:
        """Release the regions' memory to other processes."""

    def reallocate(self, regions: Sequence[Any], heartbeat: Callable[[], None]) -> None:
        """Allocate released regions again, filled with zeros."""

    def offload(self, regions: Sequence[Any], heartbeat: Callable[[], None]) -> OffloadedCopy:
        """Copy the regions' contents to other memory or to disk."""

    def trim(self) -> None:
        """Release freed memory that the allocator keeps cached."""

    def used_bytes(self) -> int:
        """Return the bytes of this memory that the process holds."""

    def available_bytes(self) -> int:
        """Return the bytes that can still be allocated."""


class SleepableHostMemory:
    """Host memory, released with the functions of ``memory/host_memory.py``."""

    regions_of = staticmethod(host_memory.regions_of)
    release = staticmethod(host_memory.release)
    reallocate = staticmethod(host_memory.reallocate)
    offload = staticmethod(host_memory.OffloadedBytes)
    trim = staticmethod(host_memory.trim_heap)
    used_bytes = staticmethod(host_memory.anonymous_bytes)
    available_bytes = staticmethod(host_memory.available_bytes)


class SleepController:
    """Puts one engine's weights and KV cache to sleep and wakes them."""

    def __init__(
        self,
        runner: Runner,
        staging: Staging,
        turns: SchedulerControl,
        *,
        reload: Callable[[WeightStore, Callable[[], None]], None],
        memory: SleepableMemory | None = None,
    ) -> None:
        """``reload`` fills weights from the model directory, and calls its second
        argument for heartbeats.

        ``memory`` holds weights and KV cache; None is the host's.
        """
        self._runner = runner
        self._staging = staging
        self._turns = turns
        self._reload = reload
        self._memory: SleepableMemory = SleepableHostMemory() if memory is None else memory
        self._asleep: set[MemoryTag] = set()
        self._offloaded: OffloadedCopy | None = None
        """Offloaded weights while they sleep at level 1, else None."""
        self._match_directory = True
        """Whether the live weights equal the model directory's, so that they can be reloaded."""
        self.needs_weights = False
        """Whether the live weights are lost, so that only a weight update can restore them."""
        self._pending: Sleep | None = None
        """Pending sleep request, done once a pause is in effect."""
        self._processes = 1
        """Number of processes on this machine that each need as much memory as this one."""
        self.heartbeat: Callable[[], None] = lambda: None
        """Called between chunks of long copies to send heartbeats, so that the engine is not
        treated as hung."""

    @property
    def asleep(self) -> list[MemoryTag]:
        """Tags of the memory that sleeps now."""
        return [tag for tag in MEMORY_TAGS if tag in self._asleep]

    @property
    def has_weights(self) -> bool:
        """Whether the live weights are in memory."""
        return "weights" not in self.asleep and not self.needs_weights

    # ------------------------------------------------------------ sleeping

    def queue_request(self, message: Sleep) -> None:
        """Queue a sleep request; :meth:`run_pending` carries it out once a pause is in effect."""
        self._pending = message

    def run_pending(self) -> list[Message]:
        """Carry out the pending request if a pause is in effect; return the reply, if there is
        one."""
        request = self._pending
        if request is None:
            return []
        if not self._turns.is_pause_requested:
            self._pending = None
            return [SleepRequestFailed(request_id=request.request_id, message=NO_PAUSE)]
        if not self._turns.is_pause_in_effect or self._turns.is_swap_requested:
            return []
        if "weights" in request.tags and not self._staging.cancel_update(
            "the weights were put to sleep"
        ):
            return []
        self._pending = None
        return [self._sleep(request)]

    def _sleep(self, request: Sleep) -> Message:
        self._memory.trim()  # otherwise memory freed by steps would count as returned
        before = self._memory.used_bytes()
        try:
            if "weights" in request.tags:
                self._put_weights_to_sleep(request.level)
            if "kv_cache" in request.tags and "kv_cache" not in self._asleep:
                self._turns.forget_kv()
                self._asleep.add("kv_cache")
                self._memory.release(self._kv_regions())
        except (OSError, OutOfMemory) as error:
            return SleepRequestFailed(
                request_id=request.request_id, message=cut(f"can't release memory: {error}")
            )
        finally:
            self._hold()
        self._memory.trim()
        returned = max(0, before - self._memory.used_bytes())
        return Asleep(request_id=request.request_id, tags=self.asleep, freed_bytes=returned)

    def _put_weights_to_sleep(self, level: SleepLevel) -> None:
        if "weights" not in self._asleep:
            regions = self._weight_regions()
            if level == 1 and not self.needs_weights:
                self._offloaded = self._memory.offload(regions, self.heartbeat)
            self._asleep.add("weights")
            buffer = self._memory.regions_of(self._staging.tensors())
            self._memory.release([*regions, *buffer])
        if level == 2:
            self._forget_offloaded()

    def _forget_offloaded(self) -> None:
        if self._offloaded is not None:
            self._offloaded.close()
            self._offloaded = None

    # ------------------------------------------------------------ waking

    def wake(self, message: Wake) -> Message:
        """Allocate the memory again and restore its contents; return the reply."""
        tags = [tag for tag in MEMORY_TAGS if tag in self._asleep and tag in message.tags]
        try:
            self._check_available(tags)
            if "weights" in tags:
                self._wake_weights()
            if "kv_cache" in tags:
                self._memory.reallocate(self._kv_regions(), self.heartbeat)
        except (OSError, TidegateError) as error:
            return SleepRequestFailed(request_id=message.request_id, message=cut(str(error)))
        self._asleep.difference_update(tags)
        self._hold()
        return Awake(
            request_id=message.request_id, tags=self.asleep, needs_weights=self.needs_weights
        )

    def _wake_weights(self) -> None:
        if self._offloaded is not None:
            self._offloaded.restore(self.heartbeat)
            self._offloaded = None
        elif self._match_directory:
            self._reload(self._runner.weights, self.heartbeat)
        else:
            self.needs_weights = True

    def _check_available(self, tags: Sequence[MemoryTag]) -> None:
        """Check that enough memory is available, because Linux overcommits and kills
        a process later.

        Raises:
            OutOfMemory: too little memory is available.
        """
        regions: list[Any] = []
        regions += self._weight_regions() if "weights" in tags else []
        regions += self._kv_regions() if "kv_cache" in tags else []
        needed = self._processes * sum(region.nbytes for region in regions)
        available = self._memory.available_bytes()
        if needed > available:
            raise OutOfMemory(
                doing=f"to wake {' and '.join(tags)}",
                remedy="free memory that other processes took, then wake it again",
                why=f"needs {needed / 2**30:.1f} GiB, {available / 2**30:.1f} GiB are available",
            )

    def swapped(self) -> None:
        """Record a weight swap: the weights are awake, and an offloaded copy is discarded."""
        self._forget_offloaded()
        self._asleep.discard("weights")
        self._match_directory = self.needs_weights = False
        self._hold()

    def forget_orchestrator(self) -> None:
        """Drop the pending request of a lost orchestrator. Sleeping memory stays asleep."""
        self._pending = None
        self._hold()

    def close(self) -> None:
        """Discard an offloaded copy."""
        self._forget_offloaded()

    # ------------------------------------------------------------ memory

    def _hold(self) -> None:
        self._turns.hold(bool(self.asleep) or self.needs_weights)

    def _weight_regions(self) -> Sequence[Any]:
        return self._memory.regions_of(self._runner.weights.tensors())

    def _kv_regions(self) -> Sequence[Any]:
        return self._memory.regions_of(self._runner.cache_tensors())
