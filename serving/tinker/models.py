"""Models in training: each one's requests in order, carried out by the backend in its own thread.

All methods but the backend's run on the server's event loop. A *model* is a LoRA adapter with its
optimizer, as in the API.
"""

import asyncio
import concurrent.futures
import hashlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import msgspec

from tidegate.errors import RunClosed, TidegateError
from tidegate.serving.http.errors import ApiError
from tidegate.serving.tinker.futures import (
    Entry,
    FutureTable,
    RequestFailure,
    RequestSuccess,
    Spawn,
    Work,
    failure_of,
    json_result,
)
from tidegate.serving.tinker.journal import (
    FailureRecorded,
    ModelCreated,
    ModelJournal,
    RequestAccepted,
)
from tidegate.serving.tinker.protobuf import (
    TrainingRequest,
    batch_result_fields,
    encode_batch_result,
)
from tidegate.serving.tinker.request_order import WAITING_MAX, RequestOrder
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
    """The request's record in the journal; None for the model's creation."""


@dataclass(slots=True, eq=False)
class TrainedModel:
    """A LoRA adapter in training."""

    model_id: str
    tenant: str
    created: ModelCreated
    journal: ModelJournal | None = None
    """None if the server keeps no state."""
    order: RequestOrder[TrainingWork] = field(default_factory=lambda: RequestOrder(1, True))
    """Order of the model's requests; the creation of the model is the first."""
    journal_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by each call of the journal."""
    requested_s: float = field(default_factory=time.time)
    """Unix time of the model's last request."""
    steps: int = 0
    """Number of optimizer steps done."""
    has_gradient: bool = False
    """Whether a gradient was added since the last optimizer step."""
    lost_gradient: int | None = None
    """``seq_id`` of a request that failed half-way since the last optimizer step."""

    @property
    def spec(self) -> LoraSpec:
        """Shape of the model's adapter: rank and trained parts."""
        return self.created.spec

    @property
    def session_id(self) -> str:
        """Id of the model's session."""
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
        losses: Mapping[str, str],
    ) -> None:
        """``make_backend`` is called in the training thread when it is first needed. ``losses`` are
        those that are computed in the place of others, by the others' names."""
        self._make_backend = make_backend
        self._backend: TrainingBackend | None = None
        self._futures = futures
        self._spawn = spawn
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "tidegate-tinker-training")
        self.losses = losses
        self._is_closed = False
        self._repeating = asyncio.Lock()
        """Held while a request of an earlier server is carried out again."""
        self.models: dict[str, TrainedModel] = {}

    def close(self) -> None:
        """End the training thread after its present call, and wait for that."""
        self._is_closed = True
        self._thread.shutdown(wait=True, cancel_futures=True)

    # ------------------------------------------------------------ requests

    def add(self, model: TrainedModel) -> None:
        """Add a model, which counts as its tenant's from now on."""
        self.models[model.model_id] = model

    def create(self, model: TrainedModel, request_id: str, create: Work) -> None:
        """Carry out the creation of a model; its other requests wait for that.

        Raises:
            ApiError: 404, the model was removed since it was added.
        """
        self._check_present(model)

        async def run() -> RequestSuccess:
            try:
                return await create()
            except Exception:
                await self.remove(model)
                raise

        entry = Entry(model.tenant)
        self._futures.add(request_id, entry)
        self._start(model, TrainingWork(entry, run))

    async def submit(
        self, model: TrainedModel, record: RequestAccepted, canonical: bytes, run: Work
    ) -> str:
        """Carry out a request when all of the model's earlier ones have ended; return its id.

        The request is in the journal before it gets its place. A request that can't be written is
        refused and leaves nothing behind, so a restarted server has every request that this server
        carries out. Sending a request again changes nothing; ``canonical`` is the canonical form by
        which it is recognised.

        Raises:
            ApiError: another request had this ``seq_id``, it is too far ahead, or it can't be
                written to the journal.
        """
        model.requested_s = time.time()
        digest = _digest(canonical)
        async with model.journal_lock:  # which the same request waits for, if it is sent again
            self._check_present(model)
            if model.order.is_known(record.seq_id, digest):
                return request_id(model, record.seq_id)
            model.order.refuse_distant(record.seq_id)
            if model.journal is not None:
                try:
                    await asyncio.to_thread(model.journal.append, record)
                except OSError as error:
                    why = f"the request can't be written to the server's journal: {error}"
                    log.error("model=%s seq_id=%d: %s", model.model_id, record.seq_id, why)
                    raise ApiError(503, f"{why}; it was not carried out, send it again") from None
                self._check_present(model)
            self._enqueue(model, record, digest, run)
        return request_id(model, record.seq_id)

    def repeat(
        self, model: TrainedModel, record: RequestAccepted, canonical: bytes, run: Work
    ) -> None:
        """Carry out a request of an earlier server again, in its place."""
        self._enqueue(model, record, _digest(canonical), partial(self._attempt, model, record, run))

    async def _attempt(
        self, model: TrainedModel, record: RequestAccepted, run: Work
    ) -> RequestSuccess:
        try:
            return await self.attempt(model, record.seq_id, run)
        except RepeatedDeath:
            if record.path in ("forward_backward", "optim_step"):
                model.lost_gradient, model.has_gradient = record.seq_id, True
            raise

    async def attempt(self, model: TrainedModel, seq_id: int, run: Work) -> RequestSuccess:
        """Carry out work of an earlier server, unless it has ended the server several times.

        One such work runs at a time, so that the right one is blamed.

        Raises:
            RepeatedDeath: the server has ended ATTEMPTS_MAX times while it did this.
        """
        journal = model.journal
        assert journal is not None
        async with self._repeating:
            if not await asyncio.to_thread(journal.begin_attempt, seq_id):
                raise RepeatedDeath(
                    "the server ended several times while it carried out this request, so it is "
                    "not tried again; make the request smaller, or ask for the server's log"
                )
            try:
                return await run()
            finally:
                await asyncio.to_thread(journal.end_attempt, seq_id)

    def _enqueue(
        self, model: TrainedModel, record: RequestAccepted, digest: bytes, run: Work
    ) -> None:
        work = TrainingWork(Entry(model.tenant), run, record)
        started = model.order.arrived(record.seq_id, digest, work)
        self._futures.add(request_id(model, record.seq_id), work.entry)
        if started is not None:
            self._start(model, started)

    def _check_present(self, model: TrainedModel) -> None:
        if self.models.get(model.model_id) is not model:
            raise ApiError(404, f"there is no model {model.model_id!r}; it ended with its session")

    async def remove(self, model: TrainedModel) -> None:
        """Drop a model; its requests that have not started fail."""
        if self.models.pop(model.model_id, None) is None:
            return
        for work in model.order.drain():
            self._futures.resolve(work.entry, RequestFailure("the model was unloaded", "user"))
        await self._in_thread(lambda backend: backend.remove(model.model_id))
        if model.journal is not None:
            async with model.journal_lock:
                await asyncio.to_thread(model.journal.remove)

    def _start(self, model: TrainedModel, work: TrainingWork) -> None:
        self._spawn(self._run(model, work), f"train-{model.model_id}")

    async def _run(self, model: TrainedModel, work: TrainingWork | None) -> None:
        while work is not None:
            await self._futures.carry_out(work.entry, partial(self._recorded, model, work))
            if self._needs_snapshot(model):
                await self.save_snapshot(model)
            work = model.order.finished()

    async def _recorded(self, model: TrainedModel, work: TrainingWork) -> RequestSuccess:
        """Do a request's work; record a failure that would be another after a restart."""
        try:
            return await work.run()
        except (UserError, RunClosed):
            raise
        except Exception as error:
            if work.record is not None and model.journal is not None and not self._is_closed:
                seq_id = work.record.seq_id
                failed = FailureRecorded(
                    seq_id=seq_id,
                    message=failure_of(error).message,
                    loses_gradient=model.lost_gradient == seq_id,
                )
                try:
                    async with model.journal_lock:
                        await asyncio.to_thread(model.journal.append_failure, failed)
                except OSError:
                    log.exception("model=%s: a failure is not recorded", model.model_id)
            raise

    def _needs_snapshot(self, model: TrainedModel) -> bool:
        if model.journal is None or model.has_gradient or model.model_id not in self.models:
            return False
        journal = model.journal
        if not journal.is_long or journal.is_too_large:
            return journal.is_long
        # Another snapshot drops what a restart needs to compute results before the last one again.
        return not any(
            self._futures.is_awaited(request_id(model, seq_id))
            for seq_id in range(max(0, journal.segment - WAITING_MAX), journal.segment)
        )

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
                await self.call(model, save)
            except Exception:
                log.exception("model=%s can't be saved; its journal grows", model.model_id)

    # ------------------------------------------------------------ work

    async def call(self, model: TrainedModel, work: Callable[[TrainingBackend], Result]) -> Result:
        """Call the backend in its thread, for a model.

        Raises:
            UserError: the model was removed.
        """

        def run(backend: TrainingBackend) -> Result:
            if self.models.get(model.model_id) is not model:
                raise UserError("the model was unloaded")
            return work(backend)

        return await self._in_thread(run)

    async def _in_thread(self, work: Callable[[TrainingBackend], Result]) -> Result:
        def run() -> Result:
            if self._backend is None:
                self._backend = self._make_backend()
            return work(self._backend)

        return await asyncio.get_running_loop().run_in_executor(self._thread, run)

    async def forward_backward(
        self, model: TrainedModel, request: TrainingRequest, *, tokens_max: int
    ) -> RequestSuccess:
        """Carry out ``forward`` or ``forward_backward``; a sequence has at most ``tokens_max``."""

        def work(backend: TrainingBackend) -> BatchResult:
            batch = request.batch(tokens_max)
            if batch.loss_fn in self.losses:
                batch = replace(batch, loss_fn=self.losses[batch.loss_fn])
            if not batch.data:
                raise UserError("data has no sequence; give at least 1")
            return backend.forward_backward(
                model.model_id, batch, forward_only=request.forward_only
            )

        model.has_gradient |= not request.forward_only
        try:
            result = await self.call(model, work)
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
            await self.call(model, lambda backend: backend.clear_gradients(model.model_id))
            raise UserError(
                f"request {seq_id} failed half-way, so the gradient of this step is incomplete; it "
                f"was discarded and the weights are unchanged: send the step's data again"
            )
        try:
            metrics = await self.call(model, lambda own: own.optim_step(model.model_id, step))
        except UserError:
            model.has_gradient = False
            raise
        model.steps += 1
        model.has_gradient = False
        return json_result({"type": "optim_step", "metrics": dict(metrics)})

    async def adapter(self, model: TrainedModel) -> TrainedAdapter:
        """Return a copy of a model's present adapter."""
        return await self.call(model, lambda backend: backend.adapter(model.model_id))


class RepeatedDeath(TidegateError):
    """The server has ended several times while it carried out a request."""


def _digest(canonical: bytes) -> bytes:
    return hashlib.blake2b(canonical, digest_size=16).digest()


def request_id(model: TrainedModel, seq_id: int) -> str:
    """Return the id under which clients ask for a request's result."""
    return f"{model.model_id}:{seq_id}"


def _encoded(result: BatchResult, is_protobuf: bool) -> bytes:
    if is_protobuf:
        return encode_batch_result(result)
    fields: dict[str, Any] = batch_result_fields(result)
    return msgspec.json.encode(fields)
