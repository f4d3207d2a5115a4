"""Stages new weights in a buffer beside the live ones, on a thread, while decoding continues.

The phases (init, start, update, finish) are those of vLLM's weight transfer. Every started update
gets one reply, ``WeightsStaged`` or ``WeightsFailed``, unless it is restarted or abandoned first.
Copies release the GIL, so the main thread's decode steps continue beside them.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from queue import SimpleQueue

import torch

from tidegate.engine.memory.out_of_memory import blame_memory
from tidegate.engine.weights.weight_store import WeightStore
from tidegate.errors import TidegateError, WeightsRefused
from tidegate.transport.clock import Clock
from tidegate.transport.messages import (
    Adapter,
    AdapterFailed,
    AdapterLoaded,
    InitWeights,
    LoadAdapter,
    Message,
    MessageRejected,
    StartWeightUpdate,
    TensorSpec,
    UpdateWeights,
    WeightsFailed,
    WeightsStaged,
)
from tidegate.transport.weight_channels import (
    LOCAL_CONFIG,
    WeightReceiver,
    WeightReceiverConfig,
    receiver,
)
from tidegate.transport.weight_channels.checksums import verify_checksum
from tidegate.transport.weight_channels.patches import ElementPatch, decode_patch
from tidegate.transport.weight_names import DRAFT_PREFIX

JOIN_TIMEOUT_S = 5.0
"""Seconds that ``close`` waits for the copy of one tensor; the thread is a daemon."""

NAMES_SHOWN_MAX = 3
"""Number of missing tensors named in a refusal."""

NO_CHANNEL = "no weight channel is open; send InitWeights first"

SECOND_SET_REMEDY = "the new set is held beside the live one; lower num_kv_blocks, or free memory"
"""Advice in the error for a second set of weights that does not fit."""

StagingReply = WeightsStaged | WeightsFailed | MessageRejected | AdapterFailed


class _State(Enum):
    """State of an update, set by the main thread."""

    OPEN = auto()
    STAGED = auto()
    FAILED = auto()


@dataclass(frozen=True, slots=True)
class Live:
    """The live weights; unchanged while an update is staged."""

    version: int
    weights: WeightStore


class _StagedUpdate:
    """One attempt at staging a version. The thread reads ``state`` to stop early."""

    def __init__(self, version: int, live: Live | None, *, started_ns: int) -> None:
        self.version = version
        self.live = live
        self.adapter_tensors: dict[Adapter, dict[str, torch.Tensor]] = {}
        """Tensors of each adapter of the version. For the staging thread only."""
        self.adapters: dict[str, object] = {}
        self.keeps_weights = False
        """Whether the version changes adapters only, so that the live weights stay."""
        self.patches: list[tuple[str, torch.dtype, ElementPatch]] = []
        """Patches of the version in order: tensor, published dtype, elements. A tensor has several
        if the engine lacked several versions."""
        self.has_whole_tensors = False
        """Whether tensors came whole, so that the patches alone do not make the version."""
        self.has_draft = False
        """Whether tensors of the draft model came."""
        self.state = _State.OPEN
        """Set by the main thread only."""
        self.started_ns = started_ns

    @property
    def has_failed(self) -> bool:
        """Whether the update was refused or cancelled."""
        return self.state is _State.FAILED


@dataclass(frozen=True, slots=True)
class ReadAdapter:
    """One version of an adapter that was read for :class:`LoadAdapter`."""

    request: LoadAdapter
    tensors: object
    reply: AdapterLoaded
    session: int
    """Number of the orchestrator's connection that requested it."""


@dataclass(frozen=True, slots=True)
class _Patches:
    """All differences between two versions."""

    first: int
    last: int
    patches: list[tuple[str, torch.dtype, ElementPatch]]
    """Patches from the first version to the last, in order."""


@dataclass(frozen=True, slots=True)
class _Result:
    """Outcome of one job of the thread; most jobs have no reply."""

    update: _StagedUpdate | None
    reply: StagingReply | None
    adapter: ReadAdapter | None = None


class Staging:
    """The buffer beside the live weights, and the thread that fills it."""

    def __init__(
        self,
        allocate: Callable[[], WeightStore],
        receiver_config: WeightReceiverConfig = LOCAL_CONFIG,
        *,
        clock: Clock = time,
        is_threaded: bool = True,
    ) -> None:
        """``is_threaded``: copies run on a thread; if False, in the call that requests them."""
        self._clock = clock
        self._allocate = allocate
        self._receiver_config = receiver_config
        self._update: _StagedUpdate | None = None
        """The newest update; older ones are over."""
        self._replies: list[Message] = []
        self._jobs: SimpleQueue[Callable[[], _Result] | None] = SimpleQueue()
        self._results: SimpleQueue[_Result] = SimpleQueue()
        self._jobs_pending = 0
        self._adapters: list[ReadAdapter] = []
        """Adapters that were read and not taken yet."""
        self._session = 0
        """Number of calls of :meth:`abandon`; adapters requested before the last are dropped."""
        self._buffer: WeightStore | None = None
        """Owned by the staging thread while jobs are pending, else by the main thread."""
        self._receiver: WeightReceiver | None = None
        """Open weight channel. For the staging thread only."""
        self._buffer_version: int | None = None
        """Version that the buffer holds completely; None if it was written to since, or lost."""
        self._last_patches: _Patches | None = None
        """Patches that made the live version from the buffer's, if they alone did."""
        self._prepared_update: _StagedUpdate | None = None
        """Update that the buffer has been prepared for. For the staging thread only."""
        self._closed_reason = NO_CHANNEL
        """Reason in the error for tensors that arrive while no channel is open. For the staging
        thread only."""
        self._thread: threading.Thread | None = None
        if is_threaded:
            self._thread = threading.Thread(target=self._work, name="staging", daemon=True)
            self._thread.start()

    @property
    def is_busy(self) -> bool:
        """Whether the thread has pending jobs, so that a reply may become due."""
        return self._jobs_pending > 0

    def init(self, message: InitWeights) -> None:
        """Phase 1: open the channel, and allocate the buffer."""
        self._enqueue(partial(self._open_channel, message))

    def start(self, message: StartWeightUpdate, live: Live | None = None) -> None:
        """Phase 2: begin a version, and cancel the previous one, complete or not.

        ``live`` is the base of a partial set; it must not be swapped meanwhile. The same version
        again is copied again without a reply to the first: after a lost connection the orchestrator
        repeats the request, and another orchestrator may use the same number for other weights.
        """
        old = self._update
        if old is not None and old.state is _State.OPEN:
            if old.version == message.version:
                old.state = _State.FAILED
            else:
                why = f"cancelled, because v{message.version} was started before it was complete"
                self._fail(old, why)
        self._update = _StagedUpdate(message.version, live, started_ns=self._clock.monotonic_ns())
        self._enqueue(partial(self._begin, self._update))

    def update(self, message: UpdateWeights) -> None:
        """Phase 3: copy some tensors."""
        update = self._update
        if update is None or update.version != message.version:
            self._replies.append(
                WeightsFailed(
                    version=message.version,
                    message=f"v{message.version} was not started; send StartWeightUpdate first",
                )
            )
        elif update.state is _State.STAGED:
            why = f"v{message.version} is complete; tensors after those marked as last are ignored"
            self._replies.append(MessageRejected(message=why))
        elif update.state is _State.OPEN:
            self._enqueue(partial(self._copy, update, message))

    def load_adapter(self, message: LoadAdapter) -> None:
        """Read one version of an adapter with versions of its own; see :meth:`take_adapters`."""
        self._enqueue(
            partial(self._read_adapter, message, self._session, self._clock.monotonic_ns())
        )

    def take_adapters(self) -> list[ReadAdapter]:
        """Return the adapters read since the last call. Call :meth:`take_replies` before."""
        adapters, self._adapters = self._adapters, []
        return [adapter for adapter in adapters if adapter.session == self._session]

    def abandon(self) -> None:
        """Drop the current update, complete or not, and all unsent replies."""
        self._session += 1
        if self._update is not None:
            self._update.state = _State.FAILED
            self._update = None
        self.take_replies()

    def take_replies(self) -> list[Message]:
        """Return the replies to staging requests that have ended since the last call."""
        while not self._results.empty():
            result = self._results.get()
            self._jobs_pending -= 1
            self._record_result(result)
        replies, self._replies = self._replies, []
        return replies

    def is_staged(self, version: int) -> bool:
        """Whether ``version`` is complete and still in the buffer."""
        update = self._update
        return update is not None and (update.version, update.state) == (version, _State.STAGED)

    def staged_adapters(self, version: int) -> Mapping[str, object] | None:
        """Return the adapters of ``version``; None if it is not staged."""
        update = self._update
        return update.adapters if update is not None and self.is_staged(version) else None

    def refuse(self, version: int, why: str) -> None:
        """Fail ``version`` after it was staged, if its success has not been reported."""
        if self._update is not None and self.is_staged(version):
            self._fail(self._update, why)

    def swap(self, version: int, live: WeightStore) -> WeightStore:
        """Return the weights of ``version``, and keep ``live`` as the buffer of the next update.

        A version that changes adapters only needs no buffer: ``live`` itself is returned.
        """
        if not self.is_staged(version) or self.is_busy or self._buffer is None:
            raise AssertionError(f"v{version} is not staged")
        staged, update = self._buffer, self._update
        if update is not None and update.keeps_weights:
            staged = live
            self._buffer_version = self._last_patches = None
        else:
            self._buffer = live
            before = update.live.version if update is not None and update.live else None
            self._buffer_version, self._last_patches = before, None
            if update is not None and before is not None and not update.has_whole_tensors:
                self._last_patches = _Patches(before, version, update.patches)
        if update is not None:
            staged.adapters = update.adapters
            staged.draft_version = version if update.has_draft else live.draft_version
        self._update = None
        return staged

    @property
    def last_patches(self) -> Sequence[tuple[str, torch.dtype, ElementPatch]] | None:
        """Patches that made the weights of the last swap from the live ones, in order; None if they
        did not come by patches alone."""
        return None if self._last_patches is None else self._last_patches.patches

    def cancel_update(self, why: str) -> bool:
        """Cancel the current update; return whether the staging thread has stopped using the
        buffer."""
        if self._update is not None and self._update.state is not _State.FAILED:
            self._fail(self._update, f"cancelled: {why}")
        return not self.is_busy

    def tensors(self) -> Iterable[torch.Tensor]:
        """Return the buffer's tensors while no update is under way; their contents may be lost."""
        if self.is_busy:
            raise AssertionError("the staging thread uses its buffer")
        self._buffer_version = None
        return self._buffer.tensors() if self._buffer is not None else ()

    def close(self) -> None:
        """Stop the thread, even within an update."""
        if self._update is not None:
            self._update.state = _State.FAILED
        self._jobs.put(None)
        if self._thread is None:
            self._work()
        else:
            self._thread.join(JOIN_TIMEOUT_S)

    # ------------------------------------------------------------ main thread

    def _enqueue(self, job: Callable[[], _Result]) -> None:
        self._jobs_pending += 1
        if self._thread is None:
            self._results.put(job())
        else:
            self._jobs.put(job)

    def _record_result(self, result: _Result) -> None:
        update = result.update
        if result.adapter is not None:
            self._adapters.append(result.adapter)
        if result.reply is None or (update is not None and update.state is not _State.OPEN):
            return
        if update is not None:
            staged = isinstance(result.reply, WeightsStaged)
            update.state = _State.STAGED if staged else _State.FAILED
        self._replies.append(result.reply)

    def _fail(self, update: _StagedUpdate, why: str) -> None:
        update.state = _State.FAILED
        self._replies.append(WeightsFailed(version=update.version, message=why))

    # ------------------------------------------------------------ the thread

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._results.put(job())
        if self._receiver is not None:
            self._receiver.close()

    def _open_channel(self, message: InitWeights) -> _Result:
        try:
            if self._receiver is not None:
                self._receiver.close()
                self._receiver = None
            self._receiver = receiver(message, self._receiver_config)
            if self._buffer is None:
                with blame_memory(doing="for a second set of weights", remedy=SECOND_SET_REMEDY):
                    self._buffer = self._allocate()
        except Exception as error:  # noqa: BLE001  (as in _copy)
            self._closed_reason = f"weight channel not opened: {_error_text(error)}"
            return _Result(None, MessageRejected(message=self._closed_reason))
        return _Result(None, None)

    def _begin(self, update: _StagedUpdate) -> _Result:
        self._prepared_update = None
        try:
            if self._buffer is not None:
                self._buffer.start()  # on a device this may allocate memory that sleeps
        except Exception as error:  # noqa: BLE001  (as in _copy)
            return _Result(
                update, WeightsFailed(version=update.version, message=_error_text(error))
            )
        self._prepared_update = update
        return _Result(update, None)

    def _read_adapter(self, message: LoadAdapter, session: int, started_ns: int) -> _Result:
        name, version = message.name, message.version
        try:
            if self._receiver is None or self._buffer is None:
                raise WeightsRefused(self._closed_reason)
            tensors: dict[str, torch.Tensor] = {}
            for chunk in message.chunks:
                for spec, view in self._receiver.tensors(chunk) if chunk.tensors else ():
                    tensors[spec.name] = _tensor(spec, view).clone()
                    verify_checksum(spec, view)
            adapter = self._buffer.make_adapter(tensors, message.scale)
        except Exception as error:  # noqa: BLE001  (as in _copy)
            why = _error_text(error)
            return _Result(None, AdapterFailed(name=name, version=version, message=why))
        staging_us = (self._clock.monotonic_ns() - started_ns) // 1000
        reply = AdapterLoaded(name=name, version=version, staging_us=staging_us)
        return _Result(None, None, ReadAdapter(message, adapter, reply, session))

    def _copy(self, update: _StagedUpdate, message: UpdateWeights) -> _Result:
        # After any error the live weights keep serving, so no error may end the thread.
        try:
            return _Result(update, self._copied(update, message))
        except Exception as error:  # noqa: BLE001
            return _Result(
                update, WeightsFailed(version=update.version, message=_error_text(error))
            )

    def _copied(self, update: _StagedUpdate, message: UpdateWeights) -> StagingReply | None:
        if self._receiver is None or self._buffer is None:
            raise WeightsRefused(self._closed_reason)
        if self._prepared_update is not update:  # ``_begin`` failed, and has reported it
            return None
        base = _base(update, message)
        # Registered first, because an adapter's partial set may be empty.
        if message.adapter is not None:
            update.adapter_tensors.setdefault(message.adapter, {})
        is_open = partial(_is_open, update)
        views = self._receiver.tensors(message, is_open) if message.tensors else ()
        for spec, view in views:
            if update.state is not _State.OPEN:
                return None
            update.has_draft |= spec.name.startswith(DRAFT_PREFIX)
            if spec.patch is not None and isinstance(view, memoryview):
                self._patch(update, spec, view, base)
            else:
                self._store(update, message.adapter, spec.name, _tensor(spec, view))
            # After the copy: bytes that match now were right when they were copied.
            verify_checksum(spec, view)
        if not message.is_last:
            return None
        update.adapters = {
            adapter.name: self._buffer.make_adapter(tensors, adapter.scale)
            for adapter, tensors in update.adapter_tensors.items()
        }
        self._buffer.end_patches()
        if base is not None:
            update.keeps_weights = self._buffer.is_untouched
            if not update.keeps_weights:
                self._buffer.complete_from(base)
        missing = [] if update.keeps_weights else self._buffer.missing()
        if missing:
            shown = ", ".join(missing[:NAMES_SHOWN_MAX])
            raise WeightsRefused(
                f"{len(missing)} tensors are missing, first {shown}; publish all the names that "
                f"the model directory has"
            )
        if base is None:
            self._buffer.keep_draft(update.live.weights if update.live else None)
        staging_us = (self._clock.monotonic_ns() - update.started_ns) // 1000
        return WeightsStaged(version=update.version, staging_us=staging_us)

    def _store(
        self, update: _StagedUpdate, adapter: Adapter | None, name: str, tensor: torch.Tensor
    ) -> None:
        if adapter is not None:
            update.adapter_tensors[adapter][name] = tensor.clone()
        elif self._buffer is not None:
            self._buffer_version = None
            update.has_whole_tensors = True
            self._buffer.load(name, tensor)

    def _patch(
        self, update: _StagedUpdate, spec: TensorSpec, view: memoryview, base: WeightStore | None
    ) -> None:
        """Change a tensor's elements in the buffer, which first becomes the version before."""
        assert self._buffer is not None  # the caller has checked it
        patch, dtype = decode_patch(spec, view), getattr(torch, spec.dtype)
        if base is not None and not update.patches and update.live is not None:
            self._become_live(update.live)
        elif base is None:
            update.has_whole_tensors = True  # those that this update has brought before
        self._buffer.patch(spec.name, dtype, patch)
        update.patches.append((spec.name, dtype, patch))
        if spec.patch is not None and spec.patch.result_crc32 is not None:
            self._buffer.verify(spec.name, dtype, spec.patch.result_crc32)

    def _become_live(self, live: Live) -> None:
        """Make the buffer equal to the live weights, except tensors that this update has brought.

        If the buffer holds the version before the live one, the patches between the two are
        applied once more, which touches a few percent of the memory; else all of it is copied.
        """
        assert self._buffer is not None  # the caller has checked it
        last, version = self._last_patches, self._buffer_version
        self._buffer_version = None
        if not self._buffer.is_untouched:
            self._buffer.copy_missing(live.weights)
            return
        if last is None or (last.first, last.last) != (version, live.version):
            self._buffer.become(live.weights)
            return
        for name, dtype, patch in last.patches:
            self._buffer.patch(name, dtype, patch)
        self._buffer.start()  # those were of another update
        self._buffer.mark_complete()


def _is_open(update: _StagedUpdate) -> bool:
    return update.state is _State.OPEN


def _base(update: _StagedUpdate, message: UpdateWeights) -> WeightStore | None:
    """Return the weights that a partial set updates; None for a whole set.

    Raises:
        WeightsRefused: the set was made for other base versions.
    """
    bases, live = message.base_versions, update.live
    if bases is None:
        return None
    if live is None or not bases.first <= live.version <= bases.last:
        serves = "nothing" if live is None else f"v{live.version}"
        raise WeightsRefused(
            f"v{update.version} is a partial set on top of v{bases.first} to "
            f"v{bases.last}, and this engine serves {serves}; publish a whole state dict"
            f"{'' if live is not None else ', or wake weights that sleep'}"
        )
    return live.weights


def _tensor(spec: TensorSpec, view: memoryview | torch.Tensor) -> torch.Tensor:
    """Return what a receiver yields as a tensor, without a copy."""
    if isinstance(view, torch.Tensor):
        return view
    dtype = getattr(torch, spec.dtype)
    if not view.nbytes:
        return torch.empty(spec.shape, dtype=dtype)
    return torch.frombuffer(view, dtype=dtype).view(spec.shape)


def _error_text(error: Exception) -> str:
    """Return an error's message; with its type if the error is not Tidegate's own."""
    return str(error) if isinstance(error, TidegateError) else f"{type(error).__name__}: {error}"
