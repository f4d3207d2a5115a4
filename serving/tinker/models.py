"""Models in training: each one's requests in order, carried out by the backend in its own thread.

:mod:`training_requests` submits requests in the order of :mod:`request_order`; their results go to
the table of :mod:`futures`. All methods but the backend's run on the server's event loop. A *model*
is a LoRA adapter with its optimizer, as in the API.
"""

import asyncio
import concurrent.futures
import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import msgspec

from tidegate.serving.tinker.futures import (
    Entry,
    FutureTable,
    RequestFailure,
    RequestSuccess,
    Spawn,
    Work,
    json_result,
)
from tidegate.serving.tinker.journal import ModelCreated, ModelJournal, RequestAccepted
from tidegate.serving.tinker.protobuf import (
    TrainingRequest,
    batch_result_fields,
    encode_batch_result,
)
from tidegate.serving.tinker.request_order import RequestOrder
from tidegate.serving.tinker.training import (
    AdamStep,
    BatchResult,
    LoraSpec,
    TrainedAdapter,
    TrainingBackend,
    UserError,
)

log = logging.getLogger("tidegate")

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class TrainingWork:
    """A request of a model, to be carried out when its turn comes."""

    entry: Entry
    run: Work
    record: RequestAccepted | None = None
    """What the journal has of it; None for the model's creation."""


@dataclass(slots=True, eq=False)
class TrainedModel:
    """A LoRA adapter in training."""

    model_id: str
    tenant: str
    created: ModelCreated
    journal: ModelJournal | None = None
    """None if the server keeps no state."""
    order: RequestOrder[TrainingWork] = field(default_factory=lambda: RequestOrder(1, True))
    """Its requests; the creation of the model runs as the first."""
    journal_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by each call of the journal."""
    requested_s: float = field(default_factory=time.time)
    """Unix time of its last request."""
    steps: int = 0
    """Number of optimizer steps done."""
    has_gradient: bool = False
    """Whether a gradient was added since the last optimizer step."""
    lost_gradient: int | None = None
    """``seq_id`` of a request that failed half-way since the last optimizer step."""

    @property
    def spec(self) -> LoraSpec:
        """What its adapter consists of."""
        return self.created.spec

    @property
    def session_id(self) -> str:
        """Its session."""
        return self.created.session_id

    @property
    def live_adapter(self) -> str:
        """Name on the engines of the adapter whose live version in-flight samplers follow.

        Snapshots are pinned versions of an adapter of the model's own name, so that neither's
        publishes touch the other's turns.
        """
        return f"{self.model_id}:inflight"


class ModelTrainer:
    """All models, and the thread that owns the backend."""

    def __init__(
        self,
        make_backend: Callable[[], TrainingBackend],
        futures: FutureTable,
        spawn: Spawn,
    ) -> None:
        """``make_backend`` is called in the training thread when it is first needed."""
        self._make_backend = make_backend
        self._backend: TrainingBackend | None = None
        self._futures = futures
        self._spawn = spawn
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "tidegate-tinker-training")
        self.models: dict[str, TrainedModel] = {}

    def close(self) -> None:
        """End the training thread after its present call, and wait for that."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    # ------------------------------------------------------------ requests

    def create(self, model: TrainedModel, request_id: str, create: Work) -> None:
        """Add a model, and carry out its creation; its other requests wait for that."""

        async def run() -> RequestSuccess:
            try:
                return await create()
            except Exception:
                await self.remove(model)
                raise

        entry = Entry(model.tenant)
        self._futures.add(request_id, entry)
        self.models[model.model_id] = model
        self._start(model, TrainingWork(entry, run))

    async def submit(
        self, model: TrainedModel, record: RequestAccepted, canonical: bytes, run: Work
    ) -> str:
        """Carry out a request when all of the model's earlier ones have ended; return its id.

        Returns once the request is in the journal. Sending a request again changes nothing;
        ``canonical`` is its canonical form, by which it is recognised.

        Raises:
            ApiError: another request had this ``seq_id``, or too many wait.
        """
        model.requested_s = time.time()
        if not self.enqueue(model, record, canonical, run):
            async with model.journal_lock:  # the same request may be on its way to the disk
                pass
        elif model.journal is not None:
            async with model.journal_lock:
                await asyncio.to_thread(model.journal.append, record)
        return request_id(model, record)

    def enqueue(
        self, model: TrainedModel, record: RequestAccepted, canonical: bytes, run: Work
    ) -> bool:
        """Put a request in its place, and start it if that is its turn; False if it is known."""
        digest = hashlib.blake2b(canonical, digest_size=16).digest()
        if model.order.is_known(record.seq_id, digest):
            return False
        work = TrainingWork(Entry(model.tenant), run, record)
        started = model.order.arrived(record.seq_id, digest, work)
        self._futures.add(request_id(model, record), work.entry)
        if started is not None:
            self._start(model, started)
        return True

    async def remove(self, model: TrainedModel) -> None:
        """Drop a model; its requests that have not started fail."""
        if self.models.pop(model.model_id, None) is None:
            return
        for work in model.order.drain():
            self._futures.resolve(work.entry, RequestFailure("the model was unloaded", "user"))
        await self.call(lambda backend: backend.remove(model.model_id))
        if model.journal is not None:
            async with model.journal_lock:
                await asyncio.to_thread(model.journal.remove)

    def _start(self, model: TrainedModel, work: TrainingWork) -> None:
        self._spawn(self._run(model, work), f"train-{model.model_id}")

    async def _run(self, model: TrainedModel, work: TrainingWork | None) -> None:
        while work is not None:
            await self._futures.carry_out(work.entry, work.run)
            if self._needs_snapshot(model):
                await self.save_snapshot(model)
            work = model.order.finished()

    def _needs_snapshot(self, model: TrainedModel) -> bool:
        if model.journal is None or model.has_gradient or model.model_id not in self.models:
            return False
        return model.journal.is_long

    async def save_snapshot(self, model: TrainedModel) -> None:
        """Save a model between two of its requests, so that a restart repeats few of them."""
        journal = model.journal
        assert journal is not None
        async with model.journal_lock:
            waiting = [work.record for work in model.order.waiting() if work.record is not None]
            seq_id, steps = model.order.next_seq_id, model.steps

            def save(backend: TrainingBackend) -> None:
                write = partial(backend.save, model.model_id)
                journal.begin_segment(seq_id, steps, waiting, write)

            try:
                await self.call(save)
            except Exception:
                log.exception("model=%s can't be saved; its journal grows", model.model_id)

    # ------------------------------------------------------------ work

    async def call(self, work: Callable[[TrainingBackend], Result]) -> Result:
        """Call the backend in its thread."""

        def run() -> Result:
            if self._backend is None:
                self._backend = self._make_backend()
            return work(self._backend)

        return await asyncio.get_running_loop().run_in_executor(self._thread, run)

    async def forward_backward(
        self, model: TrainedModel, request: TrainingRequest
    ) -> RequestSuccess:
        """Carry out ``forward`` or ``forward_backward``."""

        def work(backend: TrainingBackend) -> BatchResult:
            batch = request.batch()
            if not batch.data:
                raise UserError("data has no sequence; give at least 1")
            return backend.forward_backward(
                model.model_id, batch, forward_only=request.forward_only
            )

        model.has_gradient |= not request.forward_only
        try:
            result = await self.call(work)
        except UserError:
            raise  # nothing was added to the gradient
        except Exception:
            if not request.forward_only:
                model.lost_gradient = request.seq_id
            raise
        return RequestSuccess(partial(_encoded, result), has_protobuf=True)

    async def optim_step(self, model: TrainedModel, step: AdamStep) -> RequestSuccess:
        """Carry out ``optim_step``."""
        if model.lost_gradient is not None:
            seq_id, model.lost_gradient = model.lost_gradient, None
            model.has_gradient = False
            await self.call(lambda backend: backend.clear_gradients(model.model_id))
            raise UserError(
                f"request {seq_id} failed half-way, so the gradient of this step is incomplete; it "
                f"was discarded and the weights are unchanged: send the step's data again"
            )
        metrics = await self.call(lambda backend: backend.optim_step(model.model_id, step))
        model.steps += 1
        model.has_gradient = False
        return json_result({"type": "optim_step", "metrics": dict(metrics)})

    async def adapter(self, model: TrainedModel) -> TrainedAdapter:
        """Return a copy of a model's present adapter."""
        return await self.call(lambda backend: backend.adapter(model.model_id))


def request_id(model: TrainedModel, record: RequestAccepted) -> str:
    """Return the id by which clients ask for a request's result."""
    return f"{model.model_id}:{record.seq_id}"


def _encoded(result: BatchResult, is_protobuf: bool) -> bytes:
    if is_protobuf:
        return encode_batch_result(result)
    fields: dict[str, Any] = batch_result_fields(result)
    return msgspec.json.encode(fields)
