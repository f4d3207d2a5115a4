"""ASGI application of the Tinker API: its routes and their handlers.

A handler reads a request, calls a part of the server (:class:`TinkerParts`) and answers at once.
Requests that take long are answered with a ``request_id``, whose result ``retrieve_future`` waits
for. Paths, fields and answers are those of the SDK ``tinker``; docs/tinker-server.md lists them.
"""

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp

from tidegate.errors import RunClosed, TidegateError
from tidegate.serving import api_app
from tidegate.serving.api_app import Answer, ApiRoute, Body, as_json, key_of
from tidegate.serving.api_errors import ApiError, ErrorForm, MalformedBody
from tidegate.serving.http_server import JSON_TYPE, AccessPolicy, Headers, read_body
from tidegate.serving.tinker import messages
from tidegate.serving.tinker.checkpoints import CheckpointFacts, CheckpointKind, CheckpointStore
from tidegate.serving.tinker.futures import (
    FutureTable,
    RequestFailure,
    RequestSuccess,
    json_result,
)
from tidegate.serving.tinker.models import ModelTrainer, TrainedModel
from tidegate.serving.tinker.peft_training import write_adapter_files
from tidegate.serving.tinker.protobuf import SampleResult, decode_training
from tidegate.serving.tinker.samplers import EngineAdapters, Sampler, SavedAdapter
from tidegate.serving.tinker.sampling import SampleRunner
from tidegate.serving.tinker.sessions import SessionTable, TinkerSession
from tidegate.serving.tinker.tenants import TenantLimits, Tenants
from tidegate.serving.tinker.training import AdamStep, LoraSpec, TrainingBackend, UserError
from tidegate.serving.vllm_server.model_info import limits_of

if TYPE_CHECKING:
    from tidegate.orchestrator.scheduler.scheduler import Scheduler

PROTOBUF_TYPE = "application/x-protobuf"

BODY_BYTES_MAX = 64 * 1024 * 1024
"""Bytes of one request's body. The SDK splits what is over 5 MB, unless a single sequence is."""

UNEMBED_NOTE = (
    "train_unembed=True has no effect on this server: engines apply adapters to attention and MLP "
    "projections, not to the output layer"
)
"""Shown by the SDK when a session begins, because ``train_unembed`` is its default."""


@dataclass(frozen=True, slots=True)
class TinkerParts:
    """Parts of the server, which the handlers call."""

    base_model: str
    """Name of the base model in requests and answers."""
    model_directory: Path
    scheduler: "Scheduler"
    tenants: Tenants
    sessions: SessionTable
    futures: FutureTable
    trainer: ModelTrainer
    adapters: EngineAdapters
    checkpoints: CheckpointStore
    runner: SampleRunner
    limits: TenantLimits

    def check_base_model(self, name: str) -> None:
        """Raise ApiError if ``name`` is not this server's base model."""
        if name not in (self.base_model, str(self.model_directory)):
            why = f"base_model {name!r:.200} is not served here; this server has {self.base_model}"
            raise ApiError(400, why)

    def session(self, session_id: str, tenant: str) -> TinkerSession:
        """Return a tenant's session, and note that its client lives."""
        return self.sessions.get(session_id, tenant, asyncio.get_running_loop().time())

    def model(self, model_id: str, tenant: str) -> TrainedModel:
        """Return a tenant's model.

        Raises:
            ApiError: 404, the tenant has no such model.
        """
        model = self.trainer.models.get(model_id)
        if model is None or model.tenant != tenant:
            raise ApiError(404, f"there is no model {model_id!r:.200}; it ends with its session")
        return model


class TinkerErrors(ErrorForm):
    """Error bodies of the Tinker API: a ``detail``. The SDK retries 408, 409, 429 and 5xx."""

    def body(self, error: ApiError) -> dict[str, Any]:
        """Return the JSON body of an error answer."""
        return {"detail": str(error)}

    def unknown_path(self, status: int, method: str, path: str) -> dict[str, Any]:
        """Return the JSON body of the answer to a path (404) or method (405) that is not served."""
        instead = "docs/tinker-server.md lists what is"
        return {"detail": f"{method} {path} is not served by Tidegate; {instead}"}

    def _expected(self, error: Exception) -> ApiError | None:
        match error:
            case MalformedBody():
                return ApiError(422, f"the body can't be read: {error}")
            case UserError():
                return ApiError(400, str(error))
            case RunClosed():
                return ApiError(503, str(error))
            case TidegateError():
                return ApiError(500, str(error))
        return None


# ---------------------------------------------------------------- routes


Handle = Callable[[TinkerParts, HttpRequest, str], Awaitable[Answer]]
"""Handler of a path; the text is the tenant."""


@dataclass(frozen=True, slots=True)
class TinkerPath:
    """A path below ``/api/v1`` for one HTTP method."""

    method: str
    path: str
    handle: Handle
    needs_key: bool = True


PATHS: list[TinkerPath] = []
"""All paths of the server, in the order of their handlers."""


def on(method: str, path: str, *, needs_key: bool = True) -> Callable[[Handle], Handle]:
    """Register the decorated function as the handler of a path."""

    def decorate(handle: Handle) -> Handle:
        PATHS.append(TinkerPath(method, f"/api/v1/{path}", handle, needs_key))
        return handle

    return decorate


def tinker_app(
    parts: TinkerParts, *, bound_host: str, allowed_hosts: frozenset[str] = frozenset()
) -> ASGIApp:
    """Make the application, behind its access guard."""

    async def handle(path: TinkerPath, http: HttpRequest) -> Answer:
        tenant = parts.tenants.of(key_of(http)) if path.needs_key else ""
        return await path.handle(parts, http, tenant)

    def shows_key(headers: Headers) -> bool:
        return parts.tenants.knows(headers.key)

    routes = [ApiRoute(each.method, each.path, partial(handle, each)) for each in PATHS]
    policy = AccessPolicy(
        bound_host, allowed_hosts, shows_key, body_types=frozenset({JSON_TYPE, PROTOBUF_TYPE})
    )
    return api_app.api_app(routes, TinkerErrors(), policy)


async def read(http: HttpRequest, kind: type[Body]) -> Body:
    """Read the body as a request of this kind."""
    return await api_app.read_json(http, kind, bytes_max=BODY_BYTES_MAX)


def future_answer(request_id: str, model_id: str | None = None, **more: Any) -> dict[str, Any]:
    """Return the answer to a request whose result comes later."""
    return {"request_id": request_id, "model_id": model_id, **more}


def digest_of(body: bytes) -> bytes:
    """Return a short digest of a request's body, to tell a retry from another request."""
    return hashlib.blake2b(body, digest_size=16).digest()


# ---------------------------------------------------------------- server and sessions


@on("GET", "healthz", needs_key=False)
async def healthz(parts: TinkerParts, http: HttpRequest, tenant: str) -> Answer:
    """Say that the server answers, and has engines."""
    limits_of(parts.scheduler)
    return {"status": "ok"}


@on("POST", "client/config")
async def client_config(parts: TinkerParts, http: HttpRequest, tenant: str) -> Answer:
    """Set no feature flag of the SDK: all have their defaults."""
    await read(http, messages.ClientConfigRequest)
    return {}


@on("POST", "client/dynamic_config")
async def client_dynamic_config(parts: TinkerParts, http: HttpRequest, tenant: str) -> Answer:
    """Have the SDK cancel samples that its user has given up."""
    await read(http, messages.ClientConfigRequest)
    return {"sample_cancel_enabled": True}


@on("GET", "get_server_capabilities")
async def get_server_capabilities(parts: TinkerParts, http: HttpRequest, tenant: str) -> Answer:
    """List the base model."""
    model = {
        "model_name": parts.base_model,
        "max_context_length": limits_of(parts.scheduler).context_tokens_max,
        "trainable": True,
        "sampleable": True,
    }
    return {"supported_models": [model]}


@on("POST", "telemetry")
async def telemetry(parts: TinkerParts, http: HttpRequest, tenant: str) -> Answer:
    """Take the SDK's reports of itself, and drop them."""
    await read_body(http, bytes_max=BODY_BYTES_MAX)
    return {"status": "accepted"}


@on("POST", "create_session")
async def create_session(parts: TinkerParts, http: HttpRequest, tenant: str) -> Answer:
    """Begin a session, which lasts as long as its heartbeats."""
    await read(http, messages.CreateSessionRequest)
    session = parts.sessions.open(tenant, asyncio.get_running_loop().time())
    answer = {"type": "create_session", "session_id": session.session_id}
    return answer | {"info_message": UNEMBED_NOTE}


@on("POST", "session_heartbeat")
async def session_heartbeat(parts: TinkerParts, http: HttpRequest, tenant: str) -> Answer:
    """Keep a session."""
    request = await read(http, messages.SessionRequest)
    parts.session(request.session_id, tenant)
    return {"type": "session_heartbeat"}


@on("POST", "sessions/{session_id}/finish")
async def finish_session(parts: TinkerParts, http: HttpRequest, tenant: str) -> Answer:
    """End a session with its models and samplers; saved checkpoints stay."""
    await read_body(http, bytes_max=BODY_BYTES_MAX)
    await end_session(parts, parts.session(http.path_params["session_id"], tenant))
    return Response(status_code=204)


async def end_session(parts: TinkerParts, session: TinkerSession) -> None:
    """Drop a session's models, and the weights of its samplers that nobody else can name."""
    parts.sessions.close(session)
    for model in session.models.values():
        await parts.trainer.remove(model)
        for name in (model.model_id, model.live_adapter):
            await parts.adapters.unload(name)
    for sampler in session.samplers.values():
        if sampler.saved is not None and sampler.saved.facts.is_ephemeral:
            await asyncio.to_thread(parts.checkpoints.remove, sampler.saved.facts)


# ---------------------------------------------------------------- models


@on("POST", "create_model")
async def create_model(parts: TinkerParts, http: HttpRequest, tenant: str) -> Answer:
    """Add a LoRA adapter to train."""
    request = await read(http, messages.CreateModelRequest)
    session = parts.session(request.session_id, tenant)
    parts.check_base_model(request.base_model)
    model_id = session.model_id(request.model_seq_id)
    request_id = f"{model_id}:create"
    if request.model_seq_id not in session.models:  # else sent again: the answer was lost
        model = _new_model(parts, session, request.model_seq_id, _lora_spec(request))
        model.user_metadata = request.user_metadata

        async def create() -> RequestSuccess:
            await parts.trainer.call(lambda backend: backend.create(model_id, model.spec))
            return json_result({"type": "create_model", "model_id": model_id})

        parts.trainer.create(model, request_id, create)
    return future_answer(request_id, model_id)


def _new_model(
    parts: TinkerParts, session: TinkerSession, seq_id: int, spec: LoraSpec
) -> TrainedModel:
    """Add a model to its session, if its tenant may have another one."""
    owned = sum(each.tenant == session.tenant for each in parts.trainer.models.values())
    parts.limits.check_models(owned)
    model = TrainedModel(session.model_id(seq_id), session.tenant, session.session_id, spec)
    session.models[seq_id] = model
    return model


def _lora_spec(request: messages.CreateModelRequest) -> LoraSpec:
    if request.optimizer_config.type != "adamw":
        kind = request.optimizer_config.type
        raise ApiError(400, f"optimizer {kind!r} is not served here; use AdamOptimizerConfig")
    lora = request.lora_config
    if lora is None:
        raise ApiError(400, "training of all weights is not served here; give a lora_config")
    return LoraSpec(
        rank=lora.rank, seed=lora.seed, train_attn=lora.train_attn, train_mlp=lora.train_mlp
    )


@on("POST", "get_info")
async def get_info(parts: TinkerParts, http: HttpRequest, tenant: str) -> Answer:
    """Describe a model."""
    model = parts.model((await read(http, messages.ModelRequest)).model_id, tenant)
    config = msgspec.json.decode((parts.model_directory / "config.json").read_bytes())
    return {
        "type": "get_info",
        "model_id": model.model_id,
        "model_name": parts.base_model,
        "model_data": {
            "arch": config.get("model_type"),
            "model_name": parts.base_model,
            "tokenizer_id": str(parts.model_directory),
        },
        "is_lora": True,
        "lora_rank": model.spec.rank,
    }


@on("POST", "unload_model")
async def unload_model(parts: TinkerParts, http: HttpRequest, tenant: str) -> Answer:
    """Drop a model; its samplers stay until the session ends."""
    model = parts.model((await read(http, messages.ModelRequest)).model_id, tenant)
    request_id = f"{model.model_id}:unload"

    async def unload() -> RequestSuccess:
        await parts.trainer.remove(model)
        return json_result({"type": "unload_model", "model_id": model.model_id})

    if parts.futures.get(request_id) is None:
        parts.futures.start(request_id, tenant, unload)
    return future_answer(request_id, model.model_id)


@on("POST", "forward_backward")
async def forward_backward(parts: TinkerParts, http: HttpRequest, tenant: str) -> Answer:
    """Add a loss's gradient to a model's, or compute the loss alone."""
    body = await read_body(http, bytes_max=BODY_BYTES_MAX)
    if http.headers.get("content-encoding", "identity") != "identity":
        raise ApiError(415, "compressed bodies are not served; leave proto_compress_fwdbwd off")
    request = decode_training(body)
    model = parts.model(request.model_id, tenant)
    run = partial(parts.trainer.forward_backward, model, request)
    request_id = parts.trainer.submit(model, request.seq_id, digest_of(body), run)
    return future_answer(request_id, model.model_id)


@on("POST", "optim_step")
async def optim_step(parts: TinkerParts, http: HttpRequest, tenant: str) -> Answer:
    """Update a model's weights by its gradient."""
    request = await read(http, messages.OptimStepRequest)
    model = parts.model(request.model_id, tenant)

    async def run() -> RequestSuccess:
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

    digest = digest_of(msgspec.json.encode(request))
    request_id = parts.trainer.submit(model, request.seq_id, digest, run)
    return future_answer(request_id, model.model_id)


# ---------------------------------------------------------------- checkpoints to train on


@on("POST", "save_weights")
async def save_weights(parts: TinkerParts, http: HttpRequest, tenant: str) -> Answer:
    """Save a model's weights and its optimizer's state as a checkpoint."""
    request = await read(http, messages.SaveWeightsRequest)
    model = parts.model(request.model_id, tenant)

    async def run() -> RequestSuccess:
        name = request.path or f"step-{model.steps}"
        facts = checkpoint_facts(parts, model, "weights", name, request)

        def save(backend: TrainingBackend) -> None:
            write = partial(backend.save, model.model_id)
            parts.checkpoints.write(facts, write, replaces=request.overwrite)

        await parts.trainer.call(save)
        return json_result({"type": "save_weights", "path": facts.path})

    digest = digest_of(msgspec.json.encode(request))
    request_id = parts.trainer.submit(model, request.seq_id, digest, run)
    return future_answer(request_id, model.model_id)


@on("POST", "load_weights")
async def load_weights(parts: TinkerParts, http: HttpRequest, tenant: str) -> Answer:
    """Make a model of a checkpoint, or load one as a model's first request."""
    request = await read(http, messages.LoadWeightsRequest)
    if request.weights_access_token is not None:
        raise ApiError(400, "weights_access_token is not served here; use the owner's API key")
    if request.model_id is not None:
        return await _load_into(parts, parts.model(request.model_id, tenant), request)
    if request.session_id is None or request.model_seq_id is None:
        raise ApiError(400, "give model_id and seq_id, or session_id and model_seq_id")
    session = parts.session(request.session_id, tenant)
    model_id = session.model_id(request.model_seq_id)
    request_id = f"{model_id}:create"
    if request.model_seq_id not in session.models:
        if request.base_model is not None:
            parts.check_base_model(request.base_model)
        facts, directory = await asyncio.to_thread(
            parts.checkpoints.find, request.path, tenant, kind="weights"
        )
        model = _new_model(parts, session, request.model_seq_id, facts.spec)
        model.user_metadata = request.user_metadata

        async def create() -> RequestSuccess:
            await parts.trainer.call(lambda backend: backend.create(model_id, model.spec))
            return await _loaded(parts, model, facts, directory, optimizer=request.optimizer)

        parts.trainer.create(model, request_id, create)
    return future_answer(request_id, model_id)


async def _load_into(
    parts: TinkerParts, model: TrainedModel, request: messages.LoadWeightsRequest
) -> Answer:
    """Load a checkpoint into a model that has done nothing else yet."""
    if request.seq_id is None:
        raise ApiError(400, "give the seq_id of the request")

    async def run() -> RequestSuccess:
        if request.seq_id != 1:
            raise UserError(
                f"LoadWeights is not permitted after other requests of a model, and this is its "
                f"request {request.seq_id}: create a training client from the checkpoint instead"
            )
        facts, directory = await asyncio.to_thread(
            parts.checkpoints.find, request.path, model.tenant, kind="weights"
        )
        return await _loaded(parts, model, facts, directory, optimizer=request.optimizer)

    digest = digest_of(msgspec.json.encode(request))
    request_id = parts.trainer.submit(model, request.seq_id, digest, run)
    return future_answer(request_id, model.model_id)


async def _loaded(
    parts: TinkerParts,
    model: TrainedModel,
    facts: CheckpointFacts,
    directory: Path,
    *,
    optimizer: bool,
) -> RequestSuccess:
    def load(backend: TrainingBackend) -> None:
        backend.load(model.model_id, directory, optimizer=optimizer)

    await parts.trainer.call(load)
    model.steps = facts.steps
    return json_result({"type": "load_weights", "path": facts.path, "model_id": model.model_id})


# ---------------------------------------------------------------- samplers


@on("POST", "save_weights_for_sampler")
async def save_weights_for_sampler(parts: TinkerParts, http: HttpRequest, tenant: str) -> Answer:
    """Save a model's weights to sample from: as a checkpoint, or for one sampling session."""
    request = await read(http, messages.SaveSamplerRequest)
    model = parts.model(request.model_id, tenant)
    run = partial(_save_for_sampler, parts, model, request)
    digest = digest_of(msgspec.json.encode(request))
    request_id = parts.trainer.submit(model, request.seq_id, digest, run)
    return future_answer(request_id, model.model_id)


async def _save_for_sampler(
    parts: TinkerParts, model: TrainedModel, request: messages.SaveSamplerRequest
) -> RequestSuccess:
    body: dict[str, Any] = {"type": "save_weights_for_sampler"}
    if request.path is not None:
        saved = await _save_adapter(parts, model, request.path, request)
        return json_result(body | {"path": saved.facts.path})
    seq_id = request.sampling_session_seq_id
    if seq_id is None:
        raise UserError("give a path, or the sampling_session_seq_id of a session to make")
    session = parts.session(model.session_id, model.tenant)
    sampler = Sampler(session.sampler_id(seq_id), model.tenant)
    if request.kind == "inflight":
        adapter = await parts.trainer.adapter(model)
        await parts.adapters.publish_live(model.live_adapter, adapter, model.steps)
        sampler = replace(sampler, live_adapter=model.live_adapter)
    elif request.kind == "snapshot":
        saved = await _save_adapter(parts, model, f"ephemeral-{seq_id}", request)
        sampler = replace(sampler, saved=saved)
    else:
        raise UserError(f"kind must be 'snapshot' or 'inflight', got {request.kind!r}")
    parts.sessions.add_sampler(session, seq_id, sampler)
    return json_result(body | {"sampling_session_id": sampler.sampler_id})


async def _save_adapter(
    parts: TinkerParts, model: TrainedModel, name: str, request: messages.SaveSamplerRequest
) -> SavedAdapter:
    is_ephemeral = request.path is None
    facts = checkpoint_facts(
        parts, model, "sampler_weights", name, request, is_ephemeral=is_ephemeral
    )
    adapter = await parts.trainer.adapter(model)
    write = partial(write_adapter_files, adapter)
    return SavedAdapter(facts, await asyncio.to_thread(parts.checkpoints.write, facts, write))


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
    now_s = time.time()
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
        expires_s=None if request.ttl_seconds is None else now_s + request.ttl_seconds,
        user_metadata=request.user_metadata,
        is_ephemeral=is_ephemeral,
    )


@on("POST", "create_sampling_session")
async def create_sampling_session(parts: TinkerParts, http: HttpRequest, tenant: str) -> Answer:
    """Begin sampling from the base model, or from saved weights."""
    request = await read(http, messages.CreateSamplingSessionRequest)
    session = parts.session(request.session_id, tenant)
    seq_id = request.sampling_session_seq_id
    if seq_id not in session.samplers:
        saved = None
        if request.model_path is not None:
            found = partial(parts.checkpoints.find, request.model_path, tenant)
            saved = SavedAdapter(*await asyncio.to_thread(found))
        else:
            parts.check_base_model(request.base_model or "")
        sampler = Sampler(session.sampler_id(seq_id), tenant, saved, "", request.model_path)
        parts.sessions.add_sampler(session, seq_id, sampler)
    sampler_id = session.samplers[seq_id].sampler_id
    return {"type": "create_sampling_session", "sampling_session_id": sampler_id}


@on("GET", "samplers/{sampler_id}")
async def get_sampler(parts: TinkerParts, http: HttpRequest, tenant: str) -> Answer:
    """Describe a sampling session."""
    sampler = _sampler(parts, http.path_params["sampler_id"], tenant)
    return {
        "sampler_id": sampler.sampler_id,
        "base_model": parts.base_model,
        "model_path": sampler.model_path,
    }


def _sampler(parts: TinkerParts, sampler_id: str, tenant: str) -> Sampler:
    sampler = parts.sessions.samplers.get(sampler_id)
    if sampler is None or sampler.tenant != tenant:
        raise ApiError(404, f"there is no sampler {sampler_id!r:.200}; it ends with its session")
    return sampler


@on("POST", "asample")
async def asample(parts: TinkerParts, http: HttpRequest, tenant: str) -> Answer:
    """Sample sequences after a prompt."""
    request = await read(http, messages.SampleRequest)
    sampler = _sampler(parts, request.sampling_session_id, tenant)
    request_id = f"{sampler.sampler_id}:{request.seq_id}"
    if parts.futures.get(request_id) is None:
        parts.limits.check_samples(parts.futures.running(tenant))
        work = partial(_sampled, parts, request_id, sampler, request)
        parts.futures.start(request_id, tenant, work)
    ids = [f"{request_id}:{number}" for number in range(max(0, min(request.num_samples, 1024)))]
    return future_answer(request_id, sample_sequence_ids=ids)


async def _sampled(
    parts: TinkerParts, request_id: str, sampler: Sampler, request: messages.SampleRequest
) -> RequestSuccess:
    result = await parts.runner.sample(request_id, sampler, request)
    return RequestSuccess(partial(_sample_body, result), has_protobuf=True)


def _sample_body(result: SampleResult, is_protobuf: bool) -> bytes:
    return result.protobuf() if is_protobuf else msgspec.json.encode(result.fields())


# ---------------------------------------------------------------- results


@on("POST", "retrieve_future")
async def retrieve_future(parts: TinkerParts, http: HttpRequest, tenant: str) -> Answer:
    """Wait for a request's result: as protobuf where it has that form and the client asks."""
    request = await read(http, messages.RetrieveFutureRequest)
    outcome = await parts.futures.wait(request.request_id, tenant)
    if outcome is None:
        return as_json(_try_again(parts, request.request_id), 408)
    if isinstance(outcome, RequestFailure):
        return {"error": outcome.message, "category": outcome.category}
    wants_protobuf = outcome.has_protobuf and PROTOBUF_TYPE in http.headers.get("accept", "")
    content = outcome.encode(wants_protobuf)
    return Response(content, media_type=PROTOBUF_TYPE if wants_protobuf else JSON_TYPE)


def _try_again(parts: TinkerParts, request_id: str) -> dict[str, Any]:
    """Say that a result is not there yet, and whether its work has begun."""
    entry = parts.futures.get(request_id)
    body = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
    if entry is not None and not entry.has_begun:
        why = "the request waits for earlier ones of its model, or for the trainer's other models"
        body |= {"queue_state": "paused_capacity", "queue_state_reason": why}
    return body


@on("POST", "cancel_future")
async def cancel_future(parts: TinkerParts, http: HttpRequest, tenant: str) -> Answer:
    """End a sample that its client has given up; training requests are carried out all the same."""
    request = await read(http, messages.CancelFutureRequest)
    parts.futures.cancel(request.request_id, tenant)
    return Response(status_code=204)
