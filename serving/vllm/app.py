"""Routes of vLLM's HTTP API, with OpenAI's and Anthropic's, and their handlers.

Handlers read a request, call a part of the server (:class:`ServerParts`) and answer in vLLM's form;
parameters of pauses, sleep and caches are in the query, as in vLLM. A handler's docstring is its
summary in ``/openapi.json``.
"""

import asyncio
import importlib.metadata
import secrets
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from tidegate.serving.control.routes import SGLANG_VERSION, ServerParts
from tidegate.serving.http.errors import AnthropicErrors, ApiError, OpenAIErrors
from tidegate.serving.http.scaffold import Answer, Body, Paths, encoded_response, is_large, read
from tidegate.serving.http.server import off_loop, unless_gone
from tidegate.serving.openai.active_requests import LATENCY_BOUNDS_S, RequestCounts
from tidegate.serving.openai.answers import (
    ActiveCompletion,
    AnswerForm,
    PendingAnswer,
    send_answer,
)
from tidegate.serving.openai.anthropic_messages import (
    CountTokensRequest,
    MessagesForm,
    MessagesRequest,
)
from tidegate.serving.openai.model_info import limits_of
from tidegate.serving.openai.requests import (
    BatchChatRequest,
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    VllmTokenizeRequest,
    required_prefix,
)
from tidegate.serving.openai.responses import ResponsesForm, ResponsesRequest
from tidegate.transport.messages import PAUSE_MODES, PauseMode

if TYPE_CHECKING:
    from tidegate.orchestrator.episodes.generated_turn import GeneratedTurn

PATHS = Paths()
"""All paths of the API."""

on = PATHS.on

TOKEN_ID_MAX = 2**32 - 1
"""Largest token id that a tokenizer can be asked for at all."""

VLLM_VERSION = "0.33.0"
"""Version of vLLM whose API this is."""

LORA_RANK_MAX = 512
"""Largest rank of an adapter that an engine takes."""

LORAS_MAX = 1024
"""Adapters served side by side, as ``/server_info`` reports it. Only memory limits them."""


# ---------------------------------------------------------------- request bodies


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /detokenize``."""

    tokens: list[int]
    model: str | None = None


class AbortRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /abort_requests``; without ids, of all."""

    request_ids: list[str] | None = None


class LoadAdapterRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /v1/load_lora_adapter``; the server reads the directory."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadAdapterRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /v1/unload_lora_adapter``."""

    lora_name: str


class UpdateRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /update_weights``: one piece for all, or a list with a piece per rank.

    prime-rl's orchestrator sends ``weight_dir`` alone: a directory of all weights.
    """

    update_info: dict[str, Any] | list[dict[str, Any]] | None = None
    weight_dir: str | None = None


class InitRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /init_weight_transfer_engine``."""

    init_info: dict[str, Any]


class FinishRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /finish_weight_update``; its body may be empty."""

    weight_version: str | None = None


class ResetRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /reset_prefix_cache``, as SkyRL sends it; vLLM has the field in the query."""

    reset_running_requests: bool = False


class VersionRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /update_weight_version``: a name for what is served already."""

    new_version: str
    abort_all_requests: bool = False
    """Field of SGLang's API, where it defaults to true; vLLM has no such field."""


class CheckRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /weight_checker``."""

    action: str
    baseline: dict[str, str] | None = None


class RpcRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /collective_rpc``."""

    method: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}


# ---------------------------------------------------------------- metrics, under vLLM's names

FINISH_REASONS = ("stop", "length", "abort")

HELP = {
    "num_requests_running": "Turns that engines generate now.",
    "num_requests_waiting": "Turns that wait for a place on an engine.",
    "engine_sleep_state": "1 while the engines are awake.",
    "prefix_cache_queries_total": "Prompt tokens that were looked up in the prefix caches.",
    "prefix_cache_hits_total": "Prompt tokens that were found in the prefix caches.",
    "prompt_tokens_total": "Prompt tokens of requests that have ended.",
    "generation_tokens_total": "Tokens generated.",
    "request_success_total": "Choices that have ended, by finish reason.",
}
"""What each metric is, for its HELP line."""


def metrics_text(parts: ServerParts) -> str:
    """Write the body of ``/metrics``."""
    about = f'model_name="{parts.info.name}"'
    counts, fleet, turns = parts.requests.counts, parts.fleet, parts.core.turns
    is_awake = not parts.pauses.is_sleeping
    sent = [(len(e.submissions), e.max_running_turns) for e in turns.engines.values()]
    running = sum(min(pair) for pair in sent)
    waiting = sum(submitted for submitted, _ in sent) - running + len(turns.waiting)
    generated = parts.core.evaluation_ledger.generated
    lines = [
        *_metric("num_requests_running", "gauge", {about: running}),
        *_metric("num_requests_waiting", "gauge", {about: waiting}),
        *_metric("engine_sleep_state", "gauge", {f'{about},sleep_state="awake"': is_awake}),
        *_metric("prefix_cache_queries_total", "counter", {about: fleet.context_tokens}),
        *_metric("prefix_cache_hits_total", "counter", {about: fleet.cached_context_tokens}),
        *_metric("prompt_tokens_total", "counter", {about: counts.prompt_tokens}),
        *_metric("generation_tokens_total", "counter", {about: generated}),
        *_metric(
            "request_success_total",
            "counter",
            {f'{about},finished_reason="{r}"': counts.finished[r] for r in FINISH_REASONS},
        ),
        *_latency(counts, about),
        "# HELP tidegate_event_loop_longest_block_seconds Longest time for which the event loop "
        "was blocked.",
        "# TYPE tidegate_event_loop_longest_block_seconds gauge",
        f"tidegate_event_loop_longest_block_seconds{{{about}}} {parts.longest_block_s()}",
    ]
    return "\n".join(lines) + "\n"


def _metric(name: str, kind: str, values: dict[str, float]) -> list[str]:
    rows = [f"vllm:{name}{{{labels}}} {float(value)}" for labels, value in values.items()]
    return [f"# HELP vllm:{name} {HELP[name]}", f"# TYPE vllm:{name} {kind}", *rows]


def _latency(counts: RequestCounts, about: str) -> list[str]:
    name, seen = "vllm:e2e_request_latency_seconds", 0
    help_line = f"# HELP {name} Seconds from the request to the end of its answer."
    lines = [help_line, f"# TYPE {name} histogram"]
    for bound, count in zip((*LATENCY_BOUNDS_S, "+Inf"), counts.latencies, strict=True):
        seen += count
        lines.append(f'{name}_bucket{{{about},le="{bound}"}} {float(seen)}')
    total = f"{name}_sum{{{about}}} {counts.latency_total_s}"
    return [*lines, f"{name}_count{{{about}}} {float(seen)}", total]


# ---------------------------------------------------------------- the query


def request_name(http: HttpRequest) -> str:
    """Return the client's name for its request, or a random one."""
    return http.headers.get("x-request-id") or secrets.token_hex(8)


def mode_of(http: HttpRequest) -> PauseMode:
    """Return the pause mode in the query."""
    mode = http.query_params.get("mode", "abort")
    if mode in PAUSE_MODES:
        return mode
    why = f"mode must be 'abort', 'wait' or 'keep', got '{mode}'"
    raise ApiError(400, why, param="query.mode")


def flag(http: HttpRequest, name: str, *, default: bool) -> bool:
    """Return a boolean in the query."""
    value = http.query_params.get(name, str(default)).lower()
    if value in ("true", "1", "yes", "on"):
        return True
    if value in ("false", "0", "no", "off"):
        return False
    raise ApiError(400, f"{name} must be true or false, got '{value}'", param=f"query.{name}")


# ---------------------------------------------------------------- completions


async def answer_completion(
    parts: ServerParts,
    http: HttpRequest,
    kind: type[Body],
    begin: Callable[..., Awaitable[PendingAnswer]],
) -> Answer:
    """Read a completion request of this kind, begin it with ``begin``, and answer it."""
    parts.pauses.refuse_if_paused()
    request = await read(http, kind)
    beginning = begin(request, request_name(http), is_large=is_large(http))
    return await send_answer(http, await unless_gone(http, beginning))


@on("POST", "/v1/completions")
async def complete(parts: ServerParts, http: HttpRequest) -> Answer:
    """Continue texts or tokens."""
    return await answer_completion(parts, http, CompletionRequest, parts.completer.complete)


@on("POST", "/v1/chat/completions")
async def chat(parts: ServerParts, http: HttpRequest) -> Answer:
    """Answer a conversation."""
    return await answer_completion(parts, http, ChatRequest, parts.completer.chat)


@on("POST", "/v1/responses", errors=OpenAIErrors())
async def respond(parts: ServerParts, http: HttpRequest) -> Answer:
    """Answer a conversation in the form of OpenAI's Responses."""
    request = await read(http, ResponsesRequest)
    chat = request.chat(parts.responses.messages(request.previous_response_id))
    form = partial(ResponsesForm, request, parts.responses)
    return await answer_in_form(parts, http, chat, form)


@on("POST", "/v1/messages", errors=AnthropicErrors())
async def message(parts: ServerParts, http: HttpRequest) -> Answer:
    """Answer a conversation in the form of Anthropic's Messages."""
    request = await read(http, MessagesRequest)
    return await answer_in_form(parts, http, request.chat(), partial(MessagesForm, request))


async def answer_in_form(
    parts: ServerParts,
    http: HttpRequest,
    chat: ChatRequest,
    form: Callable[[ActiveCompletion], AnswerForm],
) -> Answer:
    """Answer a chat as the gateway does."""
    parts.pauses.refuse_if_paused()
    began_s = time.monotonic()
    beginning = parts.completer.begin_turns(chat, request_name(http), is_large=is_large(http))
    active = await unless_gone(http, beginning)

    def count(ended: "asyncio.Future[GeneratedTurn]", prompt_tokens: int) -> None:
        has_ended = not ended.cancelled() and ended.exception() is None
        reason = ended.result().finish_reason if has_ended else "abort"
        counts = parts.requests.counts
        counts.count(began_s=began_s, prompt_tokens=prompt_tokens, finish_reasons=[reason])

    for turn in active.choices:
        turn.turn.add_done_callback(partial(count, prompt_tokens=turn.prompt_tokens))
    return await send_answer(http, form(active))


@on("POST", "/v1/messages/count_tokens", errors=AnthropicErrors())
async def count_tokens(parts: ServerParts, http: HttpRequest) -> Answer:
    """Count the tokens of a conversation in the form of Anthropic's Messages."""
    chat = (await read(http, CountTokensRequest)).chat()
    await parts.weights.adapter_of(chat.model)
    tools = chat.offered_tools
    work = parts.completer.chat_prompt(chat, chat.messages, tools, is_large=is_large(http))
    return {"input_tokens": len((await unless_gone(http, work)).token_ids)}


@on("POST", "/v1/chat/completions/batch")
async def chat_batch(parts: ServerParts, http: HttpRequest) -> Answer:
    """Answer several conversations."""
    kind = BatchChatRequest
    return await answer_completion(parts, http, kind, parts.completer.chat_batch)


@on("POST", "/inference/v1/generate")
async def generate(parts: ServerParts, http: HttpRequest) -> Answer:
    """Continue tokens; answer with tokens."""
    return await answer_completion(parts, http, GenerateRequest, parts.completer.generate)


@on("POST", "/v1/chat/completions/render")
async def render_chat(parts: ServerParts, http: HttpRequest) -> Answer:
    """Render and tokenise a conversation, as a body of ``/inference/v1/generate``."""
    request = await read(http, ChatRequest)
    await parts.weights.adapter_of(request.model)
    rendering = parts.completer.render(request, request_name(http), is_large=is_large(http))
    body = await unless_gone(http, rendering)
    return await encoded_response(lambda: msgspec.json.encode(body), tokens=len(body["token_ids"]))


@on("POST", "/abort_requests", is_control=True)
async def abort(parts: ServerParts, http: HttpRequest) -> Answer:
    """End requests by id, or all; each is answered with the tokens that it has."""
    request = await read(http, AbortRequest)
    ids, open_now = request.request_ids, len(parts.requests)
    parts.requests.abort(ids or None)
    return {"status": "aborted", "aborted": len(ids) if ids else open_now}


@on("POST", "/inference/v1/abort_requests", is_control=True)
async def abort_named(parts: ServerParts, http: HttpRequest) -> Answer:
    """End requests by id; each is answered with the tokens that it has."""
    request = await read(http, AbortRequest)
    if request.request_ids is None:
        raise ApiError(400, "request_ids is missing", param="body.request_ids")
    parts.requests.abort(request.request_ids)
    return None


@on("POST", "/tokenize")
async def tokenize(parts: ServerParts, http: HttpRequest) -> Answer:
    """Tokenise a text or a conversation."""
    request = await read(http, VllmTokenizeRequest)
    await parts.weights.adapter_of(request.model)
    completer, tokenizer = parts.completer, parts.completer.tokenizer
    if request.messages is not None:
        work = completer.chat_prompt(
            request,
            request.messages,
            request.tools,
            prefix=required_prefix(request),
            is_large=is_large(http),
        )
        ids = (await unless_gone(http, work)).token_ids
    else:
        adds = request.add_special_tokens is not False
        encoding = tokenizer.encode(request.prompt or "", adds_special_tokens=adds)
        ids = await unless_gone(http, encoding)
    body = {
        "count": len(ids),
        "max_model_len": limits_of(parts.fleet).context_tokens_max,
        "tokens": ids,
        "token_strs": None,
    }

    def encode() -> bytes:
        strings = [tokenizer.token(i) for i in ids] if request.return_token_strs else None
        return msgspec.json.encode(body | {"token_strs": strings})

    content = await off_loop(encode) if is_large(http) else encode()
    return Response(content, media_type="application/json")


@on("POST", "/detokenize")
async def detokenize(parts: ServerParts, http: HttpRequest) -> Answer:
    """Decode tokens."""
    request = await read(http, DetokenizeRequest)
    tokenizer = parts.completer.tokenizer
    if strange := next((i for i in request.tokens if not 0 <= i <= TOKEN_ID_MAX), None):
        raise ApiError(400, f"Token id {strange} is out of vocabulary", param="tokens")

    def text() -> str:
        return tokenizer.decode(request.tokens, skips_special_tokens=False)

    return {"prompt": await off_loop(text) if is_large(http) else text()}


# ---------------------------------------------------------------- health, models and metrics


@on("GET", "/health", is_open=True)
async def health(parts: ServerParts, http: HttpRequest) -> Answer:
    """Answer with an empty body while there is an engine."""
    limits_of(parts.fleet)
    return None


@on("GET", "/ping", is_open=True)
async def ping(parts: ServerParts, http: HttpRequest) -> Answer:
    """Answer with an empty body while there is an engine, as ``/health`` does."""
    limits_of(parts.fleet)
    return None


@on("GET", "/version")
async def version(parts: ServerParts, http: HttpRequest) -> Answer:
    """Report the version of vLLM whose API this is."""
    return {"version": VLLM_VERSION}


@on("GET", "/v1/models")
async def models(parts: ServerParts, http: HttpRequest) -> Answer:
    """List the model and its adapters."""
    return _listed(parts)


def _listed(parts: ServerParts) -> dict[str, Any]:
    return parts.info.listed(
        created_s=parts.created_s,
        context_tokens_max=limits_of(parts.fleet).context_tokens_max,
    )


@on("GET", "/v1/models/{model:path}", errors=OpenAIErrors())
async def model(parts: ServerParts, http: HttpRequest) -> Answer:
    """Describe the model or one of its adapters."""
    name = http.path_params["model"]
    found = next((each for each in _listed(parts)["data"] if each["id"] == name), None)
    if found is None:
        raise ApiError(404, f"The model {name!r:.200} does not exist.", param="model")
    return found  # type: ignore[no-any-return]


@on("GET", "/get_server_info")
@on("GET", "/server_info")
async def server_info(parts: ServerParts, http: HttpRequest) -> Answer:
    """Report the parts of vLLM's and SGLang's configurations that clients read."""
    config = _config(parts)
    is_json = http.query_params.get("config_format") == "json"
    return {
        **_sglang_args(parts),
        "vllm_config": config if is_json else repr(config),
        "vllm_env": {},
        "system_env": {"tidegate": importlib.metadata.version("tidegate")},
    }


def _sglang_args(parts: ServerParts) -> dict[str, Any]:
    hello = next(engine.hello for engine in parts.fleet.engines.values())
    return {
        "version": SGLANG_VERSION,
        "model_path": str(parts.info.path),
        "served_model_name": parts.info.name,
        "tokenizer_path": str(parts.info.path),
        "dtype": parts.info.dtype,
        "context_length": limits_of(parts.fleet).context_tokens_max,
        "max_running_requests": parts.num_sequences_max,
        "page_size": hello.block_tokens,
        "tp_size": 1,
        "dp_size": 1,
        "pp_size": 1,
        "ep_size": 1,
        "skip_tokenizer_init": False,
        "disaggregation_mode": "null",
        "disable_overlap_schedule": True,
        "incremental_streaming_output": False,
        "enable_memory_saver": False,  # though memory can be released: slime compares it
        "enable_lora": True,
        "max_lora_rank": LORA_RANK_MAX,
        "weight_version": parts.weights.labels.newest,
        "internal_states": [{}],
    }


def _config(parts: ServerParts) -> dict[str, Any]:
    limits = limits_of(parts.fleet)
    return {
        "model_config": {
            "model": str(parts.info.path),
            "served_model_name": parts.info.name,
            "dtype": f"torch.{parts.info.dtype}",
            "max_model_len": limits.context_tokens_max,
            "logprobs_mode": "processed_logprobs",
        },
        # One server that answers for all engines, so what reaches it reaches them all.
        "parallel_config": {
            "data_parallel_size": 1,
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "world_size": 1,
        },
        "lora_config": {"max_lora_rank": LORA_RANK_MAX, "max_loras": LORAS_MAX},
        "scheduler_config": {"max_num_seqs": parts.num_sequences_max},
        "cache_config": {"enable_prefix_caching": True},
        "weight_transfer_config": {"backend": parts.weight_backend},
        "instance_id": parts.instance_id,
    }


@on("GET", "/metrics", is_open=True)
async def metrics(parts: ServerParts, http: HttpRequest) -> Answer:
    """Report metrics as Prometheus text."""
    media_type = "text/plain; version=0.0.4; charset=utf-8"
    return Response(metrics_text(parts), media_type=media_type)


@on("GET", "/load")
async def load(parts: ServerParts, http: HttpRequest) -> Answer:
    """Report the number of requests being answered."""
    return {"server_load": len(parts.requests)}


@on("GET", "/openapi.json")
async def openapi(parts: ServerParts, http: HttpRequest) -> Answer:
    """List the server's paths."""
    listed: dict[str, Any] = {}
    for each in parts.paths:
        summary = each.handle.__doc__ or ""
        entry = {"summary": summary, "responses": {"200": {"description": "Done"}}}
        listed.setdefault(each.path, {})[each.method.lower()] = entry
    about = {
        "title": "Tidegate, vLLM's and SGLang's APIs",
        "version": importlib.metadata.version("tidegate"),
    }
    return {"openapi": "3.1.0", "info": about, "paths": listed}


# ---------------------------------------------------------------- pauses, sleep and caches


@on("POST", "/pause", is_control=True)
async def pause(parts: ServerParts, http: HttpRequest) -> Answer:
    """Pause generation; ``mode`` and ``clear_cache`` are in the query, a body is not read."""
    mode = mode_of(http)
    await parts.pauses.pause(mode, clear_cache=flag(http, "clear_cache", default=True))
    return {"status": "paused"}


@on("POST", "/resume", is_control=True)
async def resume(parts: ServerParts, http: HttpRequest) -> Answer:
    """Resume generation."""
    await parts.pauses.resume()
    return {"status": "resumed"}


@on("GET", "/is_paused")
async def is_paused(parts: ServerParts, http: HttpRequest) -> Answer:
    """Report whether generation is paused."""
    return {"is_paused": parts.pauses.is_paused}


@on("POST", "/sleep", is_control=True)
async def sleep(parts: ServerParts, http: HttpRequest) -> Answer:
    """Pause and release GPU memory; ``level`` and ``mode`` are in the query."""
    level = http.query_params.get("level", "1")
    if not level.isdecimal():
        raise ApiError(400, f"level must be 0, 1 or 2, got {level}", param="query.level")
    await parts.pauses.sleep(int(level), mode_of(http))
    return {"status": "sleeping", "level": int(level)}


@on("POST", "/wake_up", is_control=True)
async def wake_up(parts: ServerParts, http: HttpRequest) -> Answer:
    """Take memory again; ``tags`` may come several times in the query."""
    tags = http.query_params.getlist("tags") or None
    is_awake = await parts.pauses.wake(tags)
    return {"status": "awake" if is_awake else "sleeping", "tags": tags}


@on("GET", "/is_sleeping")
async def is_sleeping(parts: ServerParts, http: HttpRequest) -> Answer:
    """Report whether engines sleep or are paused."""
    return {"is_sleeping": parts.pauses.is_sleeping}


@on("POST", "/release_kv_cache_memory", is_control=True)
async def release_kv_cache_memory(parts: ServerParts, http: HttpRequest) -> Answer:
    """Release the memory of the KV caches alone."""
    await parts.pauses.release_kv_cache()
    return {"status": "kv_cache_released"}


@on("POST", "/reset_prefix_cache", is_control=True)
async def reset_prefix_cache(parts: ServerParts, http: HttpRequest) -> Answer:
    """Drop the prefix caches; ``reset_running_requests`` is in the query, or in SkyRL's body."""
    request = await read(http, ResetRequest, may_be_empty=True)
    recomputes = flag(http, "reset_running_requests", default=request.reset_running_requests)
    done = await parts.pauses.reset_prefix_cache(recomputes_running=recomputes)
    return {"success": done}


@on("POST", "/reset_mm_cache", is_control=True)
async def reset_mm_cache(parts: ServerParts, http: HttpRequest) -> Answer:
    """Do nothing: there is no multimodal cache."""
    return None


@on("POST", "/reset_encoder_cache", is_control=True)
async def reset_encoder_cache(parts: ServerParts, http: HttpRequest) -> Answer:
    """Do nothing: there is no encoder cache."""
    return None


# ---------------------------------------------------------------- weights and adapters


@on("GET", "/get_world_size")
async def get_world_size(parts: ServerParts, http: HttpRequest) -> Answer:
    """Report 1: one process receives weights for all engines."""
    return {"world_size": 1}


@on("POST", "/init_weight_transfer_engine", is_control=True)
async def init_weight_transfer(parts: ServerParts, http: HttpRequest) -> Answer:
    """Connect to the trainer."""
    request = await read(http, InitRequest)
    await parts.weights.init(request.init_info)
    return {"message": "Weight transfer initialized"}


@on("POST", "/shutdown_weight_transfer_engine", is_control=True)
async def shut_down_weight_transfer(parts: ServerParts, http: HttpRequest) -> Answer:
    """Disconnect from the trainer."""
    await parts.weights.shut_down()
    return {"message": "Weight transfer shut down"}


@on("POST", "/start_weight_update", is_control=True)
async def start_weight_update(parts: ServerParts, http: HttpRequest) -> Answer:
    """Begin a weight update; a body, as older clients send it, is not read."""
    await parts.weights.start()
    return {"message": "Weight update started"}


@on("POST", "/update_weights", is_control=True)
async def update_weights(parts: ServerParts, http: HttpRequest) -> Answer:
    """Receive tensors of the update."""
    request = await read(http, UpdateRequest)
    if request.update_info is not None:
        await parts.weights.update(request.update_info)
        return {"message": "Weights updated"}
    if request.weight_dir is None:
        raise ApiError(400, "update_info is missing", param="body.update_info")
    await parts.weights.reload(request.weight_dir)
    return {"status": "ok"}


@on("POST", "/finish_weight_update", is_control=True)
async def finish_weight_update(parts: ServerParts, http: HttpRequest) -> Answer:
    """Publish the update to all engines."""
    request = await read(http, FinishRequest, may_be_empty=True)
    await parts.weights.finish(request.weight_version)
    return {"message": "Weight update finished"}


@on("POST", "/update_weight_version", is_control=True)
async def update_weight_version(parts: ServerParts, http: HttpRequest) -> Answer:
    """Rename the weights that are served."""
    request = await read(http, VersionRequest)
    if request.abort_all_requests:
        parts.requests.abort(None)
    label = request.new_version
    parts.weights.rename(label)
    return {
        "success": True,
        "message": f"Weight version updated to {label}",
        "new_version": label,
    }


@on("GET", "/weight_info")
async def weight_info(parts: ServerParts, http: HttpRequest) -> Answer:
    """Report the name of the weights that are served."""
    return {"weight_version": parts.weights.labels.newest}


@on("POST", "/weight_checker", is_control=True)
async def weight_checker(parts: ServerParts, http: HttpRequest) -> Answer:
    """Report or compare checksums of the weights that are served."""
    request = await read(http, CheckRequest)
    return await parts.weights.check(request.action, request.baseline)


@on("POST", "/collective_rpc", is_control=True)
async def collective_rpc(parts: ServerParts, http: HttpRequest) -> Answer:
    """Reload weights from files, or take a phase of SkyRL's weight update."""
    request = await read(http, RpcRequest)
    match request.method:
        case "reload_weights":
            path = request.kwargs.get("weights_path")
            if not isinstance(path, str | None):
                why = f"weights_path must be a directory, got {path!r}"
                raise ApiError(400, why, param="kwargs")
            await parts.weights.reload(path)
        case "skyrl_start_weight_update":
            if not request.kwargs.get("is_checkpoint_format", True):
                why = "tensors are named as in the checkpoint: is_checkpoint_format must be true"
                raise ApiError(501, why, param="kwargs")
            await parts.weights.start()
        case "update_weights_nccl" | "update_weights_ipc":
            info = request.kwargs.get("update_info")
            if not isinstance(info, dict):
                raise ApiError(400, f"update_info must be an object, got {info!r}", param="kwargs")
            await parts.weights.update(info)
        case "skyrl_finish_weight_update":
            await parts.weights.finish(None)
        case other:
            why = (
                "collective_rpc supports reload_weights, skyrl_start_weight_update, "
                "update_weights_nccl, update_weights_ipc and skyrl_finish_weight_update, "
                f"got {other}"
            )
            raise ApiError(501, why, param="method")
    return {"results": [None]}


@on("POST", "/v1/load_lora_adapter", is_control=True)
async def load_lora_adapter(parts: ServerParts, http: HttpRequest) -> Answer:
    """Load a LoRA adapter on all engines."""
    request = await read(http, LoadAdapterRequest)
    await parts.weights.load_adapter(
        request.lora_name, request.lora_path, is_in_place=request.load_inplace
    )
    return Response(f"Success: LoRA adapter '{request.lora_name}' added successfully.")


# prime-rl's orchestrator, SkyRL's trainer and SGLang's clients call these paths beside vLLM's own.


@on("POST", "/skyrl/v1/load_lora_adapter", is_control=True)
@on("POST", "/load_lora_adapter", is_control=True)
async def load_lora_adapter_again(parts: ServerParts, http: HttpRequest) -> Answer:
    """Load a LoRA adapter on all engines; one of the same name is replaced."""
    request = await read(http, LoadAdapterRequest)
    await parts.weights.load_adapter(request.lora_name, request.lora_path, is_in_place=True)
    adapters = {"error_message": None, "loaded_adapters": parts.info.adapters}
    return {"status": "ok", "success": True, **adapters}


@on("POST", "/skyrl/v1/generate")
async def generate_with_experts(parts: ServerParts, http: HttpRequest) -> Answer:
    """Continue tokens; answer with tokens and their routed experts, packed as SkyRL's trainer
    reads them."""
    if "routed_experts" not in parts.settings.sampling.attachments:
        raise ApiError(
            501,
            "this server returns no routed experts: start it with --enable-return-routed-experts, "
            "or set SkyRL's generator.inference_engine.enable_return_routed_experts to false",
        )
    begin = partial(parts.completer.generate, is_packed=True)
    return await answer_completion(parts, http, GenerateRequest, begin)


@on("POST", "/finish_session")
async def finish_session(parts: ServerParts, http: HttpRequest) -> Answer:
    """Do nothing: no session of SkyRL's router holds a place on an engine here."""
    return {"status": "ok"}


@on("POST", "/init_broadcaster", is_control=True)
async def init_broadcaster(parts: ServerParts, http: HttpRequest) -> Answer:
    """Refuse prime-rl's NCCL and NIXL broadcasts; its client logs a warning at 404."""
    raise ApiError(
        404, "prime-rl's weights are read from its directories: set weight_broadcast to filesystem"
    )


@on("GET", "/liveness", is_open=True)
async def liveness(parts: ServerParts, http: HttpRequest) -> Answer:
    """Answer while there is an engine, as ``/health`` does."""
    limits_of(parts.fleet)
    return {"status": "ok"}


@on("POST", "/v1/unload_lora_adapter", is_control=True)
async def unload_lora_adapter(parts: ServerParts, http: HttpRequest) -> Answer:
    """Unload a LoRA adapter from all engines."""
    request = await read(http, UnloadAdapterRequest)
    await parts.weights.unload_adapter(request.lora_name)
    return Response(f"Success: LoRA adapter '{request.lora_name}' removed successfully.")
