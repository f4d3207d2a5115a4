"""How do new weights get in beside those that serve? A thread copies them while decoding goes on.

It knows nothing of turns. Every update that was started is answered, once: by ``WeightsStaged``,
or by ``WeightsFailed`` and then nothing more until it is started anew; only those begun anew or
abandoned before it came to that are not. Copies run outside of the interpreter's lock, so the
decode steps of the main thread go on beside them.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from queue import SimpleQueue

import torch

from tidegate.engine.memory.memory import blame_memory
from tidegate.engine.weights.weight_store import WeightStore
from tidegate.errors import TidegateError, WeightsRefused
from tidegate.transport.messages import (
    Adapter,
    Complaint,
    InitWeights,
    Message,
    StartWeightUpdate,
    TensorSpec,
    UpdateWeights,
    WeightsFailed,
    WeightsStaged,
)
from tidegate.transport.weight_channels import NOWHERE, Home, WeightReceiver, cuda_ipc, receiver
from tidegate.transport.weight_channels.checksums import check_sum
from tidegate.transport.weight_channels.cuda_ipc import CudaIpcReceiver, host_bytes

JOIN_TIMEOUT_S = 5.0
"""How long ``close`` waits for the copy of one tensor; the thread never outlives the process."""

NAMES_SHOWN_MAX = 3
"""Missing tensors named in a refusal; one usually tells it all."""

NO_CHANNEL = "no weight channel is open; send InitWeights first"

ROOM_FOR_TWO = "it stands beside the one that serves; lower num_blocks, or leave the machine more"
"""What helps where a second set of weights doesn't fit."""

Answer = WeightsStaged | WeightsFailed | Complaint


class _State(Enum):
    """How far an update has come, as far as the main thread knows."""

    OPEN = auto()
    STAGED = auto()
    FAILED = auto()


@dataclass(frozen=True, slots=True)
class Live:
    """What serves. It stays what it is while an update is staged."""

    version: int
    weights: WeightStore


class _Update:
    """One attempt at staging a version. The thread reads ``state`` to stop early."""

    def __init__(self, version: int, live: Live | None) -> None:
        self.version = version
        self.live = live
        self.adapter_tensors: dict[Adapter, dict[str, torch.Tensor]] = {}
        """The thread's: of each adapter that comes with it."""
        self.adapters: dict[str, object] = {}
        self.keeps_weights = False
        """Whether the model's own tensors are those of the live version."""
        self.state = _State.OPEN
        """The main thread's to set."""
        self.started_ns = time.monotonic_ns()

    @property
    def is_over(self) -> bool:
        """Whether it was refused or given up."""
        return self.state is _State.FAILED


@dataclass(frozen=True, slots=True)
class _Result:
    """What a job of the thread came to; most have nothing to say."""

    update: _Update | None
    answer: Answer | None


class Staging:
    """The buffer beside the live weights, and the thread that fills it."""

    def __init__(self, allocate: Callable[[], WeightStore], home: Home = NOWHERE) -> None:
        self._allocate = allocate
        self._home = home
        self._update: _Update | None = None
        """The newest; those before it are over."""
        self._answers: list[Message] = []
        self._jobs: SimpleQueue[Callable[[], _Result] | None] = SimpleQueue()
        self._results: SimpleQueue[_Result] = SimpleQueue()
        self._jobs_pending = 0
        self._buffer: WeightStore | None = None
        """The thread's while jobs are pending, else the main thread's."""
        self._receiver: WeightReceiver | CudaIpcReceiver | None = None
        """The thread's."""
        self._begun: _Update | None = None
        """The thread's: whose tensors the buffer has memory for."""
        self._why_closed = NO_CHANNEL
        """The thread's: why nothing can be copied, while nothing can."""
        self._thread = threading.Thread(target=self._work, name="staging", daemon=True)
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        """Whether the thread is at work, so that an answer may be due any moment."""
        return self._jobs_pending > 0

    def init(self, message: InitWeights) -> None:
        """Phase 1: open the channel, and touch the buffer's pages while there is time."""
        self._put(partial(self._open_channel, message))

    def start(self, message: StartWeightUpdate, live: Live | None = None) -> None:
        """Phase 2: begin a version, and give up the one before, complete or not.

        ``live`` is what part of a set is laid over; it must not be swapped for another meanwhile.

        The same one again is copied again, without a word: a lost connection makes the orchestrator
        ask twice, and another orchestrator may mean other weights by the same number.
        """
        old = self._update
        if old is not None and old.state is _State.OPEN:
            if old.version == message.version:
                old.state = _State.FAILED
            else:
                why = f"given up, for v{message.version} was started before it was complete"
                self._fail(old, why)
        self._update = _Update(message.version, live)
        self._put(partial(self._begin, self._update))

    def update(self, message: UpdateWeights) -> None:
        """Phase 3: have some tensors copied."""
        update = self._update
        if update is None or update.version != message.version:
            self._answers.append(
                WeightsFailed(
                    version=message.version,
                    message=f"v{message.version} was not started; send StartWeightUpdate first",
                )
            )
        elif update.state is _State.STAGED:
            why = f"v{message.version} is complete; tensors after those marked as last are ignored"
            self._answers.append(Complaint(message=why))
        elif update.state is _State.OPEN:
            self._put(partial(self._copy, update, message))

    def abandon(self) -> None:
        """Forget the update that is under way or complete, and what was to be said of any."""
        if self._update is not None:
            self._update.state = _State.FAILED
            self._update = None
        self.take_answers()

    def take_answers(self) -> list[Message]:
        """What has been staged or has failed since the last call."""
        while not self._results.empty():
            result = self._results.get()
            self._jobs_pending -= 1
            self._settle(result)
        answers, self._answers = self._answers, []
        return answers

    def is_staged(self, version: int) -> bool:
        """Whether ``version`` is complete and still there."""
        update = self._update
        return update is not None and (update.version, update.state) == (version, _State.STAGED)

    def staged_adapters(self, version: int) -> Mapping[str, object] | None:
        """Those of ``version``, as its store made them; None if it is not complete and there."""
        update = self._update
        return update.adapters if update is not None and self.is_staged(version) else None

    def refuse(self, version: int, why: str) -> None:
        """Have ``version`` fail after all, if it is complete and nobody was told so."""
        if self._update is not None and self.is_staged(version):
            self._fail(self._update, why)

    def exchange(self, version: int, live: WeightStore) -> WeightStore:
        """Hand out the weights of ``version``; ``live`` is the buffer of the next update."""
        if not self.is_staged(version) or self.is_busy or self._buffer is None:
            raise AssertionError(f"v{version} is not staged")
        staged, update = self._buffer, self._update
        if update is not None and update.keeps_weights:
            staged = live
        else:
            self._buffer = live
        if update is not None:
            staged.adapters = update.adapters
        self._update = None
        return staged

    def give_up(self, why: str) -> bool:
        """Stop what is under way; whether nothing is any more, so that nobody uses the buffer."""
        if self._update is not None and self._update.state is not _State.FAILED:
            self._fail(self._update, f"given up: {why}")
        return not self.is_busy

    def tensors(self) -> Iterable[torch.Tensor]:
        """The buffer's, while nothing is under way; their contents are wanted by nobody."""
        if self.is_busy:
            raise AssertionError("the staging thread uses its buffer")
        return self._buffer.tensors() if self._buffer is not None else ()

    def close(self) -> None:
        """Stop the thread, in the midst of an update if need be."""
        if self._update is not None:
            self._update.state = _State.FAILED
        self._jobs.put(None)
        self._thread.join(JOIN_TIMEOUT_S)

    # ------------------------------------------------------------ main thread

    def _put(self, job: Callable[[], _Result]) -> None:
        self._jobs_pending += 1
        self._jobs.put(job)

    def _settle(self, result: _Result) -> None:
        update = result.update
        if result.answer is None or (update is not None and update.state is not _State.OPEN):
            return
        if update is not None:
            staged = isinstance(result.answer, WeightsStaged)
            update.state = _State.STAGED if staged else _State.FAILED
        self._answers.append(result.answer)

    def _fail(self, update: _Update, why: str) -> None:
        update.state = _State.FAILED
        self._answers.append(WeightsFailed(version=update.version, message=why))

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
            self._receiver = _receiver(message, self._home)
            if self._buffer is None:
                with blame_memory(doing="for a second set of weights", remedy=ROOM_FOR_TWO):
                    self._buffer = self._allocate()
        except Exception as error:  # noqa: BLE001  (as in _copy)
            self._why_closed = f"weight channel not opened: {_say(error)}"
            return _Result(None, Complaint(message=self._why_closed))
        return _Result(None, None)

    def _begin(self, update: _Update) -> _Result:
        self._begun = None
        try:
            if self._buffer is not None:
                self._buffer.start()  # on a device it may have to get its memory back first
        except Exception as error:  # noqa: BLE001  (as in _copy)
            return _Result(update, WeightsFailed(version=update.version, message=_say(error)))
        self._begun = update
        return _Result(update, None)

    def _copy(self, update: _Update, message: UpdateWeights) -> _Result:
        # Whatever goes wrong in here, the old weights serve on; so no error may end the thread.
        try:
            return _Result(update, self._copied(update, message))
        except Exception as error:  # noqa: BLE001
            return _Result(update, WeightsFailed(version=update.version, message=_say(error)))

    def _copied(self, update: _Update, message: UpdateWeights) -> Answer | None:
        if self._receiver is None or self._buffer is None:
            raise WeightsRefused(self._why_closed)
        if self._begun is not update:  # which has been said
            return None
        base = _base(update, message)
        # A part of a set may be an empty one, which lies nowhere.
        if message.adapter is not None:
            update.adapter_tensors.setdefault(message.adapter, {})
        wanted = partial(_is_open, update)
        views = self._receiver.tensors(message, wanted) if message.tensors else ()
        for spec, view in views:
            if update.state is not _State.OPEN:
                return None
            tensor = view if isinstance(view, torch.Tensor) else _tensor(spec, view)
            self._take(update, message.adapter, spec.name, tensor)
            # After the copy: so what was copied was right.
            if isinstance(view, memoryview):
                check_sum(spec, view)
            elif spec.crc32 is not None:
                check_sum(spec, host_bytes(view))
        if not message.last:
            return None
        update.adapters = {
            adapter.name: self._buffer.make_adapter(tensors, adapter.scale)
            for adapter, tensors in update.adapter_tensors.items()
        }
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
        staging_us = (time.monotonic_ns() - update.started_ns) // 1000
        return WeightsStaged(version=update.version, staging_us=staging_us)

    def _take(
        self, update: _Update, adapter: Adapter | None, name: str, tensor: torch.Tensor
    ) -> None:
        if adapter is not None:
            update.adapter_tensors[adapter][name] = tensor.clone()
        elif self._buffer is not None:
            self._buffer.load(name, tensor)


def _receiver(message: InitWeights, home: Home) -> WeightReceiver | CudaIpcReceiver:
    if message.channel == cuda_ipc.NAME:
        return CudaIpcReceiver(message, home.gpu)
    return receiver(message, home)


def _is_open(update: _Update) -> bool:
    return update.state is _State.OPEN


def _base(update: _Update, message: UpdateWeights) -> WeightStore | None:
    """What the tensors are laid over, if they are no whole set.

    Raises:
        WeightsRefused: they were made to be laid over something else.
    """
    bases, live = message.bases, update.live
    if bases is None:
        return None
    if live is None or not bases.first <= live.version <= bases.last:
        serves = "nothing" if live is None else f"v{live.version}"
        raise WeightsRefused(
            f"v{update.version} is only part of a set, to be laid over v{bases.first} to "
            f"v{bases.last}, and this engine serves {serves}; publish a whole state dict"
            f"{'' if live is not None else ', or wake weights that sleep'}"
        )
    return live.weights


def _tensor(spec: TensorSpec, view: memoryview) -> torch.Tensor:
    """The bytes as a tensor, without a copy."""
    dtype = getattr(torch, spec.dtype)
    if not view.nbytes:
        return torch.empty(spec.shape, dtype=dtype)
    return torch.frombuffer(view, dtype=dtype).view(spec.shape)


def _say(error: Exception) -> str:
    """Our own errors speak for themselves; others need their kind."""
    return str(error) if isinstance(error, TidegateError) else f"{type(error).__name__}: {error}"
