"""ASGI application of the Tinker API: its routes and their handlers.

A handler reads a request, calls a part of the server (:class:`TinkerParts`) and answers at once.
Requests that take long are answered with a ``request_id``, whose result ``retrieve_future`` waits
for. Paths, fields and answers are those of the SDK ``tinker``; docs/tinker-server.md lists them.
"""

import asyncio
import contextlib
import logging
import secrets
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp

from tidegate.errors import RunClosed, TidegateError
from tidegate.serving.http.errors import ApiError, ErrorForm, MalformedBody
from tidegate.serving.http.scaffold import (
    Answer,
    ApiPath,
    Handler,
    Paths,
    api_app,
    as_json,
    key_of,
    read,
)
from tidegate.serving.http.server import JSON_TYPE, AccessPolicy, Headers, read_body
from tidegate.serving.openai.model_info import limits_of
from tidegate.serving.tinker import messages, sessions
from tidegate.serving.tinker.futures import RequestFailure, RequestSuccess, json_result
from tidegate.serving.tinker.journal import (
    ModelCreated,
    SamplerOpened,
    SessionEnded,
    SessionOpened,
)
from tidegate.serving.tinker.parts import TinkerParts
from tidegate.serving.tinker.samplers import Sampler, SavedAdapter
from tidegate.serving.tinker.sessions import TinkerSession
from tidegate.serving.tinker.training import LoraSpec, UserError
from tidegate.serving.tinker.training_requests import (
    MODEL_PATHS,
    begin_model,
    note,
    open_sampler,
    submit,
)

log = logging.getLogger("tidegate")

SEED_BITS = 31
"""Bits of a seed that the server draws for an adapter; the journal has it, too."""

PROTOBUF_TYPE = "application/x-protobuf"

BODY_BYTES_MAX = 64 * 1024 * 1024
"""Bytes of one request's body. The SDK splits what is over 5 MB, unless a single sequence is."""

UNEMBED_NOTE = (
    "train_unembed=True has no effect on this server: engines apply adapters to attention and MLP "
    "projections, not to the output layer"
)
"""Shown by the SDK when a session begins, because ``train_unembed`` is its default."""


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


PATHS = Paths()
"""All paths of the server, in the order of their handlers, which get the tenant after the request.
"""


def on(method: str, path: str, *, is_open: bool = False) -> Callable[[Handler], Handler]:
    """Register the decorated function as the handler of a path below ``/api/v1``."""
    return PATHS.on(method, f"/api/v1/{path}", is_open=is_open)


def tinker_app(
    parts: TinkerParts, *, bound_host: str, allowed_hosts: frozenset[str] = frozenset()
) -> ASGIApp:
    """Make the application, behind its access guard."""

    async def call(path: ApiPath, http: HttpRequest) -> Answer:
        tenant = "" if path.is_open else parts.tenants.of(key_of(http))
        return await path.handle(parts, http, tenant)

    def shows_key(headers: Headers) -> bool:
        return parts.tenants.knows(headers.key)

    policy = AccessPolicy(
        bound_host, allowed_hosts, shows_key, body_types=frozenset({JSON_TYPE, PROTOBUF_TYPE})
    )
    return api_app(PATHS, call, TinkerErrors(), policy, body_bytes_max=BODY_BYTES_MAX)


def future_answer(request_id: str, model_id: str | None = None, **more: Any) -> dict[str, Any]:
    """Return the answer to a request whose result comes later."""
    return {"request_id": request_id, "model_id": model_id, **more}


# ---------------------------------------------------------------- server and sessions


@on("GET", "healthz", is_open=True)
async def healthz(parts: TinkerParts, http: HttpRequest, tenant: str) -> Answer:
    """Say that the server answers, and has engines."""
    limits_of(parts.fleet)
    return {"status": "ok"}


@on("POST", "client/config")
async def client_config(parts: TinkerParts, http: HttpRequest, tenant: str) -> Answer:
    """Have SDKs before 0.25 send training requests as protobuf; later ones always do."""
    await read(http, messages.ClientConfigRequest)
    return {"proto_write_fwdbwd": True, "fwd_via_fwdbwd": True}


@on("POST", "client/dynamic_config")
async def client_dynamic_config(parts: TinkerParts, http: HttpRequest, tenant: str) -> Answer:
    """Have the SDK cancel samples that its user has given up."""
    await read(http, messages.ClientConfigRequest)
    return {"sample_cancel_enabled": True}


@on("GET", "get_server_capabilities")
async def get_server_capabilities(parts: TinkerParts, http: HttpRequest, tenant: str) -> Answer:
    """List the base models: the trained one, and those that are sampled from only."""
    limits = {parts.base_model: limits_of(parts.fleet)}
    limits |= {name: await each.limits() for name, each in parts.other_runners.items()}
    models = [
        {
            "model_name": name,
            "max_context_length": own.context_tokens_max,
            "trainable": name == parts.base_model,
            "sampleable": True,
        }
        for name, own in limits.items()
    ]
    return {"supported_models": models}


@on("POST", "telemetry")
async def telemetry(parts: TinkerParts, http: HttpRequest, tenant: str) -> Answer:
    """Take the SDK's reports of itself, and drop them."""
    await read_body(http, bytes_max=BODY_BYTES_MAX)
    return {"status": "accepted"}


@on("POST", "create_session")
async def create_session(parts: TinkerParts, http: HttpRequest, tenant: str) -> Answer:
    """Begin a session, which lasts as long as its heartbeats."""
    await read(http, messages.CreateSessionRequest)
    session_id = str(uuid.uuid4())
    await note(parts, SessionOpened(session_id=session_id, tenant=tenant))
    parts.sessions.open(session_id, tenant, asyncio.get_running_loop().time())
    answer = {"type": "create_session", "session_id": session_id}
    notes = [UNEMBED_NOTE]
    for name, instead in parts.trainer.losses.items():
        notes.append(f"loss_fn={name!r} is computed as {instead!r} on this server")
    return answer | {"info_message": "; ".join(notes)}


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
    with contextlib.suppress(ApiError):  # it has ended: the request was sent again
        await end_session(parts, parts.session(http.path_params["session_id"], tenant))
    return Response(status_code=204)


async def end_session(parts: TinkerParts, session: TinkerSession) -> None:
    """Drop a session's models, and the weights of its samplers that no other session can name."""
    parts.sessions.close(session)  # from now on nothing is added to it
    try:
        await note(parts, SessionEnded(session_id=session.session_id))
    except ApiError as error:  # a restarted server ends it again
        log.error("session=%s: %s", session.session_id, error)
    models = list(session.models.values())
    for model in models:
        await parts.trainer.remove(model)
    for name in [n for model in models for n in (model.model_id, model.live_adapter)]:
        try:
            await parts.adapters.unload(name)
        except TidegateError:
            log.exception("adapter=%s stays on the engines", name)
    for sampler in session.samplers.values():
        if sampler.saved is not None and sampler.saved.facts.is_ephemeral:
            await asyncio.to_thread(parts.checkpoints.remove, sampler.saved.facts)


# ---------------------------------------------------------------- models


async def _model_request(path: str, parts: TinkerParts, http: HttpRequest, tenant: str) -> Answer:
    """Accept a request of a model, to be carried out when its turn comes."""
    body = await read_body(http, bytes_max=BODY_BYTES_MAX)
    if http.headers.get("content-encoding", "identity") != "identity":
        raise ApiError(415, "compressed bodies are not served; leave proto_compress_fwdbwd off")
    if path == "forward_backward" and PROTOBUF_TYPE not in http.headers.get("content-type", ""):
        raise ApiError(
            415, "training requests must be protobuf: use the SDK of release 0.24.1 or later"
        )
    request = MODEL_PATHS[path].decode(body)
    model = parts.model(request.model_id, tenant)
    return future_answer(await submit(parts, model, path, request, body), model.model_id)


for _path in MODEL_PATHS:
    if _path != "load_weights":  # which has a handler of its own
        on("POST", _path)(partial(_model_request, _path))


@on("POST", "create_model")
async def create_model(parts: TinkerParts, http: HttpRequest, tenant: str) -> Answer:
    """Add a LoRA adapter to train."""
    request = await read(http, messages.CreateModelRequest)
    session = parts.session(request.session_id, tenant)
    parts.check_base_model(request.base_model)
    created = ModelCreated(
        model_seq_id=request.model_seq_id,
        session_id=session.session_id,
        spec=_lora_spec(request),
        user_metadata=request.user_metadata,
    )
    return await _created(parts, session, created)


async def _created(parts: TinkerParts, session: TinkerSession, created: ModelCreated) -> Answer:
    """Begin a model, unless its client has sent the request again."""
    try:
        msgspec.msgpack.encode(created)  # as the journal does
    except OverflowError as error:
        raise ApiError(400, f"a number of the model has more than 64 bits: {error}") from None
    if created.model_seq_id not in session.models:
        await _make_room(parts, session.tenant)
        parts.session(session.session_id, session.tenant)  # unless it has ended meanwhile
    model = session.models.get(created.model_seq_id)
    if model is None:  # nothing is waited for since there was room
        model = await begin_model(parts, session, created)
    else:
        async with model.journal_lock:  # the first one may be on its way to the disk
            pass
        parts.session(session.session_id, session.tenant)
        if session.models.get(created.model_seq_id) is not model:
            raise ApiError(503, "the model could not be created; send the request again")
    return future_answer(f"{model.model_id}:create", model.model_id)


async def _make_room(parts: TinkerParts, tenant: str) -> None:
    """End sessions of killed clients if the tenant may have no other model.

    Raises:
        ApiError: 429, the clients of all the tenant's models live.
    """
    while True:
        owned = sum(each.tenant == tenant for each in parts.trainer.models.values())
        if owned < parts.limits.models:
            return
        now_s = asyncio.get_running_loop().time()
        idle = (
            each
            for each in parts.sessions.silent(now_s, silent_s=sessions.SILENT_S)
            if each.tenant == tenant
            and any(model.model_id in parts.trainer.models for model in each.models.values())
            and not parts.futures.has_running(f"{each.session_id}:")
        )
        if (session := next(idle, None)) is None:
            parts.limits.check_models(owned)
        else:
            log.info("session=%s ended for another of its tenant; it is silent", session.session_id)
            await end_session(parts, session)


def _lora_spec(request: messages.CreateModelRequest) -> LoraSpec:
    if request.optimizer_config.type != "adamw":
        kind = request.optimizer_config.type
        raise ApiError(400, f"optimizer {kind!r} is not served here; use AdamOptimizerConfig")
    lora = request.lora_config
    if lora is None:
        raise ApiError(400, "training of all weights is not served here; give a lora_config")
    return LoraSpec(
        rank=lora.rank,
        seed=secrets.randbits(SEED_BITS) if lora.seed is None else lora.seed,
        train_attn=lora.train_attn,
        train_mlp=lora.train_mlp,
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


@on("POST", "load_weights")
async def load_weights(parts: TinkerParts, http: HttpRequest, tenant: str) -> Answer:
    """Make a model of a checkpoint, or load one as a model's first request."""
    request = await read(http, messages.LoadWeightsRequest)
    if request.weights_access_token is not None:
        raise ApiError(400, "weights_access_token is not served here; use the owner's API key")
    if request.model_id is not None and request.seq_id is not None:
        model = parts.model(request.model_id, tenant)
        body = msgspec.json.encode(request)
        request_id = await submit(parts, model, "load_weights", request, body)  # type: ignore[arg-type]
        return future_answer(request_id, model.model_id)
    if request.session_id is None or request.model_seq_id is None:
        raise ApiError(400, "give model_id and seq_id, or session_id and model_seq_id")
    session = parts.session(request.session_id, tenant)
    if request.base_model is not None:
        parts.check_base_model(request.base_model)
    facts, _ = await asyncio.to_thread(parts.checkpoints.find, request.path, tenant, kind="weights")
    created = ModelCreated(
        model_seq_id=request.model_seq_id,
        session_id=session.session_id,
        spec=facts.spec,
        user_metadata=request.user_metadata,
        checkpoint_path=request.path,
        optimizer=request.optimizer,
    )
    return await _created(parts, session, created)


# ---------------------------------------------------------------- samplers


@on("POST", "create_sampling_session")
async def create_sampling_session(parts: TinkerParts, http: HttpRequest, tenant: str) -> Answer:
    """Begin sampling from the base model, or from saved weights."""
    request = await read(http, messages.CreateSamplingSessionRequest)
    session = parts.session(request.session_id, tenant)
    seq_id = request.sampling_session_seq_id
    if seq_id not in session.samplers:
        saved, other = None, None
        if request.model_path is not None:
            found = partial(parts.checkpoints.find, request.model_path, tenant)
            saved = SavedAdapter(*await asyncio.to_thread(found))
        else:
            other = parts.sampled_model(request.base_model or "")
        sampler_id = session.sampler_id(seq_id)
        sampler = Sampler(sampler_id, tenant, saved, "", request.model_path, other)
        opened = SamplerOpened(
            session_id=session.session_id,
            seq_id=seq_id,
            path=request.model_path,
            model_path=request.model_path,
            other_model=other,
        )
        await open_sampler(parts, session, sampler, opened)
    sampler_id = session.samplers[seq_id].sampler_id
    return {"type": "create_sampling_session", "sampling_session_id": sampler_id}


@on("GET", "samplers/{sampler_id}")
async def get_sampler(parts: TinkerParts, http: HttpRequest, tenant: str) -> Answer:
    """Describe a sampling session."""
    sampler = _sampler(parts, http.path_params["sampler_id"], tenant)
    return {
        "sampler_id": sampler.sampler_id,
        "base_model": sampler.other_model or parts.base_model,
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
    other = sampler.other_model
    runner = parts.runner if other is None else parts.other_runners[other]
    result = await runner.sample(request_id, sampler, request)
    return RequestSuccess(result.encode, has_protobuf=True)


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
