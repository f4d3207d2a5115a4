"""Routes of SGLang's HTTP API, and their handlers.

They call the same parts of the server as vLLM's routes; where both APIs have a path, vLLM's handler
answers for both.
"""

import secrets
from collections.abc import Awaitable
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse

from tidegate.serving.control.routes import BODY_BYTES_MAX, SGLANG_VERSION, ServerParts
from tidegate.serving.control.sglang_tensors import read_tensors
from tidegate.serving.control.weight_updates import in_daemon_thread
from tidegate.serving.http.errors import ApiError, UpdateError
from tidegate.serving.http.scaffold import Answer, Paths, as_json, read
from tidegate.serving.http.server import unless_gone
from tidegate.serving.openai.answers import send_answer
from tidegate.serving.openai.model_info import limits_of
from tidegate.serving.sglang import generation, requests
from tidegate.transport.sleep_messages import MEMORY_TAGS, MemoryTag

PATHS = Paths()
"""All paths of the API that vLLM's has not, too."""

on = PATHS.on

TENSOR_BODY_BYTES_MAX = 3 * BODY_BYTES_MAX
"""Bytes of a body with tensors: base64 of two buckets of 64 MiB."""

FLUSHED = (
    "Cache flushed.\nPlease check backend logs for more details. (When there are running or "
    "waiting requests, the operation will not be performed.)\n"
)
"""SGLang's answer to ``/flush_cache``."""

NOT_FLUSHED = "Cache not flushed because there are running or waiting requests.\n"


# ---------------------------------------------------------------- generation


@on("POST", "/generate")
async def generate(parts: ServerParts, http: HttpRequest) -> Answer:
    """Continue texts or tokens; answer with text, tokens and log-probs, as SGLang does."""
    return await _answer(parts, http, await read(http, requests.SglangGenerateRequest))


async def _answer(
    parts: ServerParts, http: HttpRequest, request: requests.SglangGenerateRequest
) -> Answer:
    return await send_answer(http, await unless_gone(http, generation.begin(parts, request)))


@on("POST", "/abort_request", is_control=True)
async def abort_request(parts: ServerParts, http: HttpRequest) -> Answer:
    """End a request by its rid, or all; each is answered with the tokens that it has."""
    request = await read(http, requests.SglangAbortRequest)
    if request.abort_all or request.rid:
        parts.requests.abort(None if request.abort_all else [request.rid or ""])
    return None


@on("GET", "/health_generate")
async def health_generate(parts: ServerParts, http: HttpRequest) -> Answer:
    """Generate one token, unless engines are paused, asleep or busy."""
    limits_of(parts.fleet)
    if parts.pauses.is_sleeping:
        raise ApiError(503, "generation is paused, or memory is released")
    if not len(parts.requests):
        sampling = requests.SglangSampling(max_new_tokens=1, temperature=0.0)
        rid = f"HEALTH_CHECK_{secrets.token_hex(16)}"
        probe = requests.SglangGenerateRequest(input_ids=[0], sampling_params=sampling, rid=rid)
        await http.body()  # an unread body would be taken for a client that disconnects
        await _answer(parts, http, probe)
    return None


# ---------------------------------------------------------------- pauses and memory


@on("POST", "/pause_generation", is_control=True)
async def pause_generation(parts: ServerParts, http: HttpRequest) -> Answer:
    """Pause generation: abort requests, or keep them with their KV or without; new ones wait."""
    match (await read(http, requests.PauseRequest)).mode:
        case "abort":
            await parts.pauses.pause("abort", clear_cache=True)
        case "retract":
            await parts.pauses.pause("keep", clear_cache=True)
        case "in_place":
            await parts.pauses.pause("keep", clear_cache=False)
    return {"message": "Generation paused successfully.", "status": "ok"}


@on("POST", "/continue_generation", is_control=True)
async def continue_generation(parts: ServerParts, http: HttpRequest) -> Answer:
    """Resume generation; the body, which SGLang requires, is not read."""
    await parts.pauses.resume()
    return {"message": "Generation continued successfully.", "status": "ok"}


@on("POST", "/flush_cache", is_control=True)
@on("GET", "/flush_cache", is_control=True)
async def flush_cache(parts: ServerParts, http: HttpRequest) -> Answer:
    """Drop the prefix caches; 400 if running requests keep a part of them."""
    if await parts.pauses.reset_prefix_cache(recomputes_running=parts.pauses.has_dropped_kv):
        return PlainTextResponse(FLUSHED)
    return PlainTextResponse(NOT_FLUSHED, 400)


async def _tags(http: HttpRequest) -> list[MemoryTag]:
    """Return the kinds of memory that a request names, all if it names none."""
    tags = (await read(http, requests.MemoryRequest, may_be_empty=True)).tags
    known = (*MEMORY_TAGS, "cuda_graph")  # there are no graphs to release
    if strange := [tag for tag in tags or () if tag not in known]:
        raise ApiError(400, f"tags name some of {', '.join(known)}, got {strange[0]!r}")
    return [tag for tag in MEMORY_TAGS if tags is None or tag in tags]


@on("POST", "/release_memory_occupation", is_control=True)
@on("GET", "/release_memory_occupation", is_control=True)
async def release_memory(parts: ServerParts, http: HttpRequest) -> Answer:
    """Release memory of idle or paused engines, which generate again once all is resumed."""
    tags = await _tags(http)
    if len(parts.requests) and not parts.pauses.is_paused:
        raise ApiError(400, "requests are running: pause generation before memory is released")
    if tags:
        await parts.pauses.release(1, tags)
    return as_json(None)


@on("POST", "/resume_memory_occupation", is_control=True)
@on("GET", "/resume_memory_occupation", is_control=True)
async def resume_memory(parts: ServerParts, http: HttpRequest) -> Answer:
    """Take memory again; a pause of generation stays in effect."""
    if tags := await _tags(http):
        await parts.pauses.wake(tags, resumes=parts.pauses.mode is None)
    return as_json(None)


# ---------------------------------------------------------------- weights and adapters


async def _updated(work: Awaitable[object], message: str, **more: Any) -> Answer:
    """Return SGLang's answer to a call that changes weights: 400 with the cause if it fails."""
    try:
        await work
    except ApiError as error:
        why = error.why if isinstance(error, UpdateError) else str(error)
        return as_json({"success": False, "message": why, **more}, 400)
    return {"success": True, "message": message, **more}


def _named(request: requests.WeightRequest) -> str:
    """Return the end of SGLang's message for an update that names its weights."""
    label = request.weight_version
    return "" if label is None else f" Weight version updated to {label}."


async def _prepare(parts: ServerParts, request: requests.WeightRequest) -> None:
    """Carry out an update's options besides its weights: pauses, cache flush and aborts.

    Raises:
        UpdateError: the format of the weights is not supported.
    """
    if request.load_format not in (None, "auto", "safetensors", "direct"):
        raise UpdateError(
            f"load_format {request.load_format!r} is not read: send tensors by their own names, "
            f"without a load_format"
        )
    if request.abort_all_requests:
        parts.requests.abort(None)
        await parts.requests.wait_until_aborted()
    if request.flush_cache:
        parts.pauses.drop_kv()


@on("POST", "/update_weights_from_disk", is_control=True)
async def update_weights_from_disk(parts: ServerParts, http: HttpRequest) -> Answer:
    """Read all weights from a directory, and publish them to all engines."""
    request = await read(http, requests.DiskUpdateRequest)

    async def update() -> None:
        await _prepare(parts, request)
        await parts.weights.reload(request.model_path, request.weight_version)

    message = f"Succeeded to update model weights.{_named(request)}"
    return await _updated(update(), message, num_paused_requests=0)


@on("POST", "/begin_weight_update", is_control=True)
async def begin_weight_update(parts: ServerParts, http: HttpRequest) -> Answer:
    """Begin an update whose tensors are published together by ``/end_weight_update``."""
    if parts.weights.is_open:
        why = "a weight-update session is already open; call end_weight_update() first"
        return as_json({"success": False, "message": why}, 400)
    return await _updated(parts.weights.start(), "Success")


@on("POST", "/end_weight_update", is_control=True)
async def end_weight_update(parts: ServerParts, http: HttpRequest) -> Answer:
    """Publish the tensors that have come since ``/begin_weight_update`` to all engines."""
    if not parts.weights.is_open:
        why = "no weight-update session is open; call begin_weight_update() first"
        return as_json({"success": False, "message": why}, 400)
    return await _updated(parts.weights.finish(None), "Success")


@on("POST", "/update_weights_from_tensor", is_control=True)
async def update_weights_from_tensor(parts: ServerParts, http: HttpRequest) -> Answer:
    """Receive tensors in the request; outside an update they are published at once."""
    request = await read(http, requests.TensorUpdateRequest, bytes_max=TENSOR_BODY_BYTES_MAX)

    def receive() -> dict[str, Any]:
        if len(request.serialized_named_tensors) != 1:
            raise UpdateError("the server is one rank: send one entry of serialized_named_tensors")
        return read_tensors(request.serialized_named_tensors[0])

    async def update() -> None:
        await _prepare(parts, request)
        await parts.weights.add(receive, label=request.weight_version)

    return await _updated(update(), f"Success{_named(request)}")


@on("POST", "/update_weights_from_distributed", is_control=True)
async def update_weights_from_distributed(parts: ServerParts, http: HttpRequest) -> Answer:
    """Receive tensors by broadcasts; outside an update they are published at once."""
    request = await read(http, requests.DistributedUpdateRequest)

    async def update() -> None:
        await _prepare(parts, request)
        receive = partial(
            parts.groups.receive, request.group_name, request.names, request.dtypes, request.shapes
        )
        await parts.weights.add(receive, label=request.weight_version)

    return await _updated(update(), f"Succeeded to update parameter online.{_named(request)}")


@on("POST", "/init_weights_update_group", is_control=True)
async def init_weights_update_group(parts: ServerParts, http: HttpRequest) -> Answer:
    """Join a trainer's process group, over gloo, or NCCL where there is CUDA."""
    request = await read(http, requests.GroupRequest)
    join = in_daemon_thread(
        partial(
            parts.groups.join,
            request.group_name,
            request.master_address,
            request.master_port,
            rank=request.rank_offset,
            world_size=request.world_size,
            backend=request.backend,
        )
    )
    return await _updated(join, "Succeeded to initialize custom process group.")


@on("POST", "/destroy_weights_update_group", is_control=True)
async def destroy_weights_update_group(parts: ServerParts, http: HttpRequest) -> Answer:
    """Leave a trainer's process group."""
    request = await read(http, requests.GroupNameRequest)

    async def leave() -> None:
        if not parts.groups.leave(request.group_name):
            raise UpdateError(
                "The group to be destroyed does not exist: no process group of a weight update "
                f"is named {request.group_name!r}"
            )

    return await _updated(leave(), "Succeeded to destroy custom process group.")


@on("POST", "/unload_lora_adapter", is_control=True)
async def unload_lora_adapter(parts: ServerParts, http: HttpRequest) -> Answer:
    """Unload a LoRA adapter from all engines."""
    name = (await read(http, requests.SglangUnloadRequest)).lora_name
    try:
        await parts.weights.unload_adapter(name)
    except ApiError as error:
        return as_json({"success": False, "error_message": str(error)}, 400)
    return {"success": True, "error_message": None, "loaded_adapters": parts.info.adapters}


# ---------------------------------------------------------------- facts


@on("GET", "/get_model_info")
@on("GET", "/model_info")
async def model_info(parts: ServerParts, http: HttpRequest) -> Answer:
    """Report the model and the version of its live weights."""
    config = msgspec.json.decode((parts.info.path / "config.json").read_bytes())
    return {
        "model_path": str(parts.info.path),
        "served_model_name": parts.info.name,
        "tokenizer_path": str(parts.info.path),
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": parts.weights.labels.newest,
        "load_format": "auto",
        "reasoning_parser": None,
        "tool_call_parser": None,
        "disaggregation_mode": "null",
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "model_type": config.get("model_type"),
        "architectures": config.get("architectures"),
    }


@on("GET", "/weight_version")
@on("GET", "/get_weight_version")
async def weight_version(parts: ServerParts, http: HttpRequest) -> Answer:
    """Report the version of the live weights."""
    return {"weight_version": parts.weights.labels.newest}


@on("GET", "/v1/loads")
async def loads(parts: ServerParts, http: HttpRequest) -> Answer:
    """Report the requests that run or wait, of all engines together."""
    turns = parts.core.turns
    sent = [(len(e.submissions), e.max_running_turns) for e in turns.engines.values()]
    running = sum(min(pair) for pair in sent)
    hellos = [engine.hello for engine in parts.fleet.engines.values()]
    load = {
        "dp_rank": 0,
        "num_running_reqs": running,
        "num_waiting_reqs": max(0, len(parts.requests) - running),
        "max_total_num_tokens": sum(hello.num_kv_blocks * hello.block_tokens for hello in hellos),
        "max_running_requests": parts.num_sequences_max,
    }
    return {"version": SGLANG_VERSION, "loads": [load]}
