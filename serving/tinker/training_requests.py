"""Requests of models: how each path's body is read, and what is done when its turn comes.

:mod:`app` calls one handler for all of them, and :mod:`recovery` carries them out again after a
crash. So a request may depend only on its body, the model's state and the checkpoints.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec

from tidegate.serving.http.errors import ApiError
from tidegate.serving.http.scaffold import decode_json
from tidegate.serving.tinker import messages
from tidegate.serving.tinker.checkpoints import CheckpointFacts, CheckpointKind
from tidegate.serving.tinker.futures import RequestSuccess, Work, json_result
from tidegate.serving.tinker.journal import (
    ModelCreated,
    ModelJournal,
    RecoveredModel,
    RequestAccepted,
    SamplerOpened,
    SessionRecord,
)
from tidegate.serving.tinker.messages import NUMBER_MAX, TTL_S_MAX
from tidegate.serving.tinker.models import TrainedModel
from tidegate.serving.tinker.parts import TinkerParts
from tidegate.serving.tinker.peft_training import write_adapter_files
from tidegate.serving.tinker.protobuf import TrainingRequest, decode_training
from tidegate.serving.tinker.samplers import Sampler, SavedAdapter
from tidegate.serving.tinker.sessions import TinkerSession
from tidegate.serving.tinker.training import AdamStep, TrainingBackend, UserError

log = logging.getLogger("tidegate")

LIVE_NAME = "inflight-live"
"""Checkpoint of a model's newest in-flight weights."""


class ModelRequestBody(Protocol):
    """Fields of every request to a model."""

    @property
    def model_id(self) -> str:
        """The model."""

    @property
    def seq_id(self) -> int:
        """Number of the request among the model's requests."""


@dataclass(frozen=True, slots=True)
class ModelPath:
    """A path whose requests are a model's, carried out in order."""

    decode: Callable[[bytes], Any]
    """Reads a body as a :class:`ModelRequestBody`."""
    canonical: Callable[[Any], bytes]
    """Returns the same bytes for a request and its retry, whose bodies may differ in order."""
    carry_out: Callable[[TinkerParts, TrainedModel, Any], Awaitable[RequestSuccess]]


async def submit(
    parts: TinkerParts, model: TrainedModel, path: str, request: ModelRequestBody, body: bytes
) -> str:
    """Have a request carried out when its turn comes; return its id once it cannot be lost."""
    record = RequestAccepted(seq_id=request.seq_id, path=path, body=body)
    return await parts.trainer.submit(model, record, *submission(parts, model, path, request))


def submission(
    parts: TinkerParts, model: TrainedModel, path: str, request: ModelRequestBody
) -> tuple[bytes, Work]:
    """Return the bytes that identify a request when it is sent again, and its work."""
    kind = MODEL_PATHS[path]
    return kind.canonical(request), partial(kind.carry_out, parts, model, request)


async def note(parts: TinkerParts, record: SessionRecord) -> None:
    """Append a record of a session to the journal, if the server keeps one.

    Raises:
        ApiError: 503, it can't be written.
    """
    if parts.state is not None:
        try:
            await asyncio.to_thread(parts.state.note, record)
        except OSError as error:
            raise ApiError(503, f"the server's journal can't be written: {error}") from None


# ---------------------------------------------------------------- creation


async def begin_model(
    parts: TinkerParts,
    session: TinkerSession,
    created: ModelCreated,
    recovered: RecoveredModel | None = None,
) -> TrainedModel:
    """Add a model to its session and start its creation; return once it cannot be lost.

    Adds it before anything is waited for, so that the end of its session finds it, and its
    tenant's limit counts it. ``recovered`` is the journal's record of it, if an earlier server
    began it.

    Raises:
        ApiError: the session has ended meanwhile, or the journal can't be written.
    """
    model_id = session.model_id(created.model_seq_id)
    model = TrainedModel(model_id, session.tenant, created)
    session.models[created.model_seq_id] = model
    parts.trainer.add(model)
    if recovered is not None:
        model.journal = recovered.journal
        model.order.next_seq_id = recovered.start.seq_id
    elif parts.state is not None:
        model.journal = ModelJournal(parts.state.model_directory(model_id), created, 1)
    create = partial(_create, parts, model)
    if recovered is not None:
        create = partial(_create_again, parts, model, recovered)
    try:
        async with model.journal_lock:  # which the same request waits for, if it is sent again
            if model.journal is not None and recovered is None:
                await asyncio.to_thread(model.journal.begin)
            parts.trainer.create(model, f"{model_id}:create", create)
    except Exception as error:
        del session.models[created.model_seq_id]
        await parts.trainer.remove(model)
        if not isinstance(error, OSError):
            raise
        why = f"the model can't be written to the server's journal: {error}; send it again"
        raise ApiError(503, why) from None
    return model


async def _create(parts: TinkerParts, model: TrainedModel) -> RequestSuccess:
    created = model.created
    await parts.trainer.call(model, lambda backend: backend.create(model.model_id, created.spec))
    if created.checkpoint_path is not None:
        facts, directory = await asyncio.to_thread(
            parts.checkpoints.find, created.checkpoint_path, model.tenant, kind="weights"
        )
        result = await load_checkpoint(parts, model, facts, directory, optimizer=created.optimizer)
        if model.journal is not None:
            await parts.trainer.save_snapshot(model)  # the checkpoint may be deleted
        return result
    return json_result({"type": "create_model", "model_id": model.model_id})


async def _create_again(
    parts: TinkerParts, model: TrainedModel, recovered: RecoveredModel
) -> RequestSuccess:
    async def create() -> RequestSuccess:
        spec = model.created.spec
        await parts.trainer.call(model, lambda backend: backend.create(model.model_id, spec))
        await _restore(parts, model, recovered)
        return json_result({"type": "create_model", "model_id": model.model_id})

    try:
        return await parts.trainer.attempt(model, 0, create)
    except Exception:
        where = recovered.journal.directory
        log.exception("model=%s can't be restored; its journal stays in %s", model.model_id, where)
        model.journal = None  # the model is dropped, and its journal is not
        raise


async def _restore(parts: TinkerParts, model: TrainedModel, recovered: RecoveredModel) -> None:
    """Give a model the weights that it had before the first request that is repeated."""
    snapshot, path = recovered.snapshot, model.created.checkpoint_path
    if snapshot is not None:
        await parts.trainer.call(
            model, lambda backend: backend.load(model.model_id, snapshot, optimizer=True)
        )
        model.steps = recovered.start.steps
    elif path is not None:
        facts, directory = await asyncio.to_thread(
            parts.checkpoints.find, path, model.tenant, kind="weights"
        )
        await load_checkpoint(parts, model, facts, directory, optimizer=model.created.optimizer)


# ---------------------------------------------------------------- training


async def _forward_backward(
    parts: TinkerParts, model: TrainedModel, request: TrainingRequest
) -> RequestSuccess:
    tokens_max = parts.limits.sequence_tokens
    return await parts.trainer.forward_backward(model, request, tokens_max=tokens_max)


async def _optim_step(
    parts: TinkerParts, model: TrainedModel, request: messages.OptimStepRequest
) -> RequestSuccess:
    adam = request.adam_params
    if adam is None:
        kind = (request.optimizer_params or {}).get("type")
        raise UserError(f"optimizer {kind!r} is not served here; use tinker.AdamParams")
    step = AdamStep(
        learning_rate=adam.learning_rate,
        betas=(adam.beta1, adam.beta2),
        eps=adam.eps,
        weight_decay=adam.weight_decay,
        grad_clip_norm=adam.grad_clip_norm,
    )
    return await parts.trainer.optim_step(model, step)


# ---------------------------------------------------------------- checkpoints to train on


async def _save_weights(
    parts: TinkerParts, model: TrainedModel, request: messages.SaveWeightsRequest
) -> RequestSuccess:
    name = request.path or f"step-{model.steps}"
    facts = checkpoint_facts(parts, model, "weights", name, request)

    def save(backend: TrainingBackend) -> None:
        write = partial(backend.save, model.model_id)
        parts.checkpoints.write(facts, write, replaces=request.overwrite)

    await parts.trainer.call(model, save)
    return json_result({"type": "save_weights", "path": facts.path})


async def _load_weights(
    parts: TinkerParts, model: TrainedModel, request: messages.LoadWeightsRequest
) -> RequestSuccess:
    if request.seq_id != 1:
        raise UserError(
            f"LoadWeights is not permitted after other requests of a model, and this is its "
            f"request {request.seq_id}: create a training client from the checkpoint instead"
        )
    if model.journal is None:
        found = partial(parts.checkpoints.find, request.path, model.tenant, kind="weights")
    else:  # a restarted server loads it again, though the checkpoint may be deleted meanwhile
        held = model.journal.directory / "loaded"
        found = partial(parts.checkpoints.hold, request.path, model.tenant, held)
    facts, directory = await asyncio.to_thread(found)
    return await load_checkpoint(parts, model, facts, directory, optimizer=request.optimizer)


async def load_checkpoint(
    parts: TinkerParts,
    model: TrainedModel,
    facts: CheckpointFacts,
    directory: Path,
    *,
    optimizer: bool,
) -> RequestSuccess:
    """Replace a model's weights by a checkpoint's, and its optimizer's state if that is asked."""

    def load(backend: TrainingBackend) -> None:
        backend.load(model.model_id, directory, optimizer=optimizer)

    await parts.trainer.call(model, load)
    model.steps = facts.steps
    return json_result({"type": "load_weights", "path": facts.path, "model_id": model.model_id})


# ---------------------------------------------------------------- samplers


async def _save_weights_for_sampler(
    parts: TinkerParts, model: TrainedModel, request: messages.SaveSamplerRequest
) -> RequestSuccess:
    body: dict[str, Any] = {"type": "save_weights_for_sampler"}
    if request.path is not None:
        saved = await _save_adapter(parts, model, request.path, request)
        return json_result(body | {"path": saved.facts.path})
    seq_id = request.sampling_session_seq_id
    if seq_id is None:
        raise UserError("give a path, or the sampling_session_seq_id of a session to make")
    if not 0 <= seq_id <= NUMBER_MAX:
        why = f"sampling_session_seq_id must be in [0, {NUMBER_MAX}], got {seq_id}"
        raise UserError(why)
    session = parts.session(model.session_id, model.tenant)
    sampler = Sampler(session.sampler_id(seq_id), model.tenant)
    opened = SamplerOpened(session_id=session.session_id, seq_id=seq_id)
    if request.kind == "inflight":
        saved = await _save_adapter(parts, model, LIVE_NAME, request)
        await parts.adapters.publish_live(model.live_adapter, saved.directory, saved.facts.steps)
        sampler = replace(sampler, live_adapter=model.live_adapter)
        opened = msgspec.structs.replace(opened, live_model_id=model.model_id)
    elif request.kind == "snapshot":
        saved = await _save_adapter(parts, model, f"ephemeral-{seq_id}", request)
        sampler = replace(sampler, saved=saved)
        opened = msgspec.structs.replace(opened, path=saved.facts.path)
    else:
        raise UserError(f"kind must be 'snapshot' or 'inflight', got {request.kind!r}")
    try:
        await open_sampler(parts, session, sampler, opened)
    except ApiError:  # the session has ended meanwhile
        await parts.adapters.unload(model.live_adapter)
        await asyncio.to_thread(parts.checkpoints.remove, saved.facts)
        raise
    return json_result(body | {"sampling_session_id": sampler.sampler_id})


async def open_sampler(
    parts: TinkerParts, session: TinkerSession, sampler: Sampler, opened: SamplerOpened
) -> None:
    """Add a sampler to its session, once the journal has it.

    Raises:
        ApiError: the session has ended.
    """
    await note(parts, opened)
    parts.sessions.add_sampler(session, opened.seq_id, sampler)


async def _save_adapter(
    parts: TinkerParts, model: TrainedModel, name: str, request: messages.SaveSamplerRequest
) -> SavedAdapter:
    is_ephemeral = request.path is None
    facts = checkpoint_facts(
        parts, model, "sampler_weights", name, request, is_ephemeral=is_ephemeral
    )
    adapter = await parts.trainer.adapter(model)
    if (name_of_wrong := adapter.not_finite()) is not None:
        raise UserError(
            f"{name_of_wrong} of the adapter has NaN or infinity, which engines refuse: training "
            f"has diverged; go back to a checkpoint, and lower the learning rate"
        )

    def write() -> SavedAdapter:
        write_files = partial(write_adapter_files, adapter)
        parts.checkpoints.write(facts, write_files, replaces=name == LIVE_NAME)
        # After a restart it may be newer than this request, with other steps in it.
        return SavedAdapter(*parts.checkpoints.find(facts.path, model.tenant))

    return await asyncio.to_thread(write)


def checkpoint_facts(
    parts: TinkerParts,
    model: TrainedModel,
    kind: CheckpointKind,
    name: str,
    request: messages.SaveWeightsRequest | messages.SaveSamplerRequest,
    *,
    is_ephemeral: bool = False,
) -> CheckpointFacts:
    """Return what is written beside a checkpoint of a model's present weights."""
    now_s, ttl_s = time.time(), request.ttl_seconds
    if ttl_s is not None and not 0 <= ttl_s <= TTL_S_MAX:
        raise UserError(f"ttl_seconds must be in [0, {TTL_S_MAX}] or None, got {ttl_s}")
    return CheckpointFacts(
        run_id=model.model_id,
        kind=kind,
        name=name,
        tenant=model.tenant,
        steps=model.steps,
        base_model=parts.base_model,
        rank=model.spec.rank,
        train_attn=model.spec.train_attn,
        train_mlp=model.spec.train_mlp,
        created_s=now_s,
        expires_s=None if ttl_s is None else now_s + ttl_s,
        user_metadata=request.user_metadata,
        seq_id=request.seq_id,
        is_ephemeral=is_ephemeral,
    )


# ---------------------------------------------------------------- paths


def _json(kind: type[Any]) -> Callable[[bytes], Any]:
    return lambda body: decode_json(body, kind)


def _canonical(request: msgspec.Struct) -> bytes:
    return repr(request).encode()  # which has numbers beyond 64 bits, too


MODEL_PATHS: Mapping[str, ModelPath] = {
    "forward_backward": ModelPath(decode_training, TrainingRequest.canonical, _forward_backward),
    "optim_step": ModelPath(_json(messages.OptimStepRequest), _canonical, _optim_step),
    "save_weights": ModelPath(_json(messages.SaveWeightsRequest), _canonical, _save_weights),
    "load_weights": ModelPath(_json(messages.LoadWeightsRequest), _canonical, _load_weights),
    "save_weights_for_sampler": ModelPath(
        _json(messages.SaveSamplerRequest), _canonical, _save_weights_for_sampler
    ),
}
"""Paths of models' requests, by the last part of the path."""
