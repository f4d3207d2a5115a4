"""Which paths does the server have? vLLM's; each with its method, parameters and body.

Whatever a client sends, it gets an answer in vLLM's form, and nothing else is harmed. What is done
is others' matter: see :mod:`completing`, :mod:`control` and :mod:`weight_desk`.
"""

import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from tidegate.orchestrator.vllm_server import protocol
from tidegate.orchestrator.vllm_server.answering import answer
from tidegate.orchestrator.vllm_server.failures import ServerError, as_answer
from tidegate.orchestrator.vllm_server.metrics import metrics_text
from tidegate.orchestrator.vllm_server.model_info import limits_of
from tidegate.orchestrator.vllm_server.server_info import openapi, server_info
from tidegate.transport.messages import PauseMode

if TYPE_CHECKING:
    from tidegate.orchestrator.vllm_server.desks import Desks

BODY_BYTES_MAX = 64 * 1024 * 1024
"""Of one request: prompts of several million tokens, as JSON."""

TOKEN_ID_MAX = 2**32 - 1
"""What a tokenizer can be asked for at all."""

VLLM_VERSION = "0.33.0"
"""Whose API this is."""

Handler = Callable[[HttpRequest], Awaitable[Response]]
Answer = dict[str, Any] | Response | None


@dataclass(frozen=True, slots=True)
class _Path:
    method: str
    path: str
    handle: Callable[["_App", HttpRequest], Awaitable[Answer]]


_PATHS: list[_Path] = []
"""All of them, in the order of their definitions below."""


def _on(method: str, path: str) -> Callable[[Any], Any]:
    """Have this method of the app answer a path; None is an empty body."""

    def decorate(handle: Any) -> Any:
        _PATHS.append(_Path(method, path, handle))
        return handle

    return decorate


def server_app(desks: "Desks", *, api_key: str | None) -> Starlette:
    """All its paths. With an ``api_key``, those under /v1 want it, as vLLM's do."""
    app = _App(desks)
    routes = [
        Route(one.path, _answered(app, one, api_key=api_key), methods=[one.method])
        for one in _PATHS
    ]
    return Starlette(routes=routes, exception_handlers={404: _not_found, 405: _not_found})


class _App:
    """What each path does."""

    def __init__(self, desks: "Desks") -> None:
        self._desks = desks

    # ------------------------------------------------------------ completions

    @_on("POST", "/v1/completions")
    async def complete(self, http: HttpRequest) -> Answer:
        """Text or tokens, gone on with."""
        self._desks.control.refuse_if_paused()
        request = await _read(http, protocol.CompletionRequest)
        begun, bodies = await self._desks.completer.complete(request, _request_name(http))
        return await answer(http, self._desks, request, begun, bodies)

    @_on("POST", "/v1/chat/completions")
    async def chat(self, http: HttpRequest) -> Answer:
        """A conversation, gone on with."""
        self._desks.control.refuse_if_paused()
        request = await _read(http, protocol.ChatRequest)
        begun, bodies = await self._desks.completer.chat(request, _request_name(http))
        return await answer(http, self._desks, request, begun, bodies)

    @_on("POST", "/inference/v1/generate")
    async def generate(self, http: HttpRequest) -> Answer:
        """Tokens in, tokens out."""
        self._desks.control.refuse_if_paused()
        request = await _read(http, protocol.GenerateRequest)
        begun, bodies = await self._desks.completer.generate(request, _request_name(http))
        return await answer(http, self._desks, request, begun, bodies)

    @_on("POST", "/abort_requests")
    async def abort(self, http: HttpRequest) -> Answer:
        """End requests with the tokens that they have."""
        request: protocol.AbortRequest = await _read(http, protocol.AbortRequest)
        ids, open_now = request.request_ids, len(self._desks.requests)
        self._desks.requests.abort(ids or None)
        return {"status": "aborted", "aborted": len(ids) if ids else open_now}

    @_on("POST", "/inference/v1/abort_requests")
    async def abort_named(self, http: HttpRequest) -> Answer:
        """The same, with the ids that it was asked with."""
        request: protocol.AbortRequest = await _read(http, protocol.AbortRequest)
        if request.request_ids is None:
            raise ServerError(400, "request_ids is missing", param="body.request_ids")
        self._desks.requests.abort(request.request_ids)
        return None

    @_on("POST", "/tokenize")
    async def tokenize(self, http: HttpRequest) -> Answer:
        """A text or a conversation as tokens."""
        request: protocol.TokenizeRequest = await _read(http, protocol.TokenizeRequest)
        self._desks.info.adapter_of(request.model)
        completer, words = self._desks.completer, self._desks.completer.words
        if request.messages is not None:
            begins = request.add_generation_prompt is not False
            ids = await completer.chat_tokens(request.messages, request.tools, begins=begins)
        else:
            adds = request.add_special_tokens is not False
            ids = await words.encode(request.prompt or "", adds_special_tokens=adds)
        return {
            "count": len(ids),
            "max_model_len": limits_of(self._desks.scheduler).context_tokens_max,
            "tokens": ids,
            "token_strs": [words.token(i) for i in ids] if request.return_token_strs else None,
        }

    @_on("POST", "/detokenize")
    async def detokenize(self, http: HttpRequest) -> Answer:
        """Tokens as text."""
        request: protocol.DetokenizeRequest = await _read(http, protocol.DetokenizeRequest)
        words = self._desks.completer.words
        if strange := next((i for i in request.tokens if not 0 <= i <= TOKEN_ID_MAX), None):
            raise ServerError(400, f"Token id {strange} is out of vocabulary", param="tokens")
        return {"prompt": words.decode(request.tokens, skips_special_tokens=False)}

    # ------------------------------------------------------------ what there is

    @_on("GET", "/health")
    async def health(self, http: HttpRequest) -> Answer:
        """Empty, while there is an engine."""
        limits_of(self._desks.scheduler)
        return None

    @_on("GET", "/ping")
    async def ping(self, http: HttpRequest) -> Answer:
        """As ``/health``."""
        limits_of(self._desks.scheduler)
        return None

    @_on("GET", "/version")
    async def version(self, http: HttpRequest) -> Answer:
        """Whose API this is."""
        return {"version": VLLM_VERSION}

    @_on("GET", "/v1/models")
    async def models(self, http: HttpRequest) -> Answer:
        """The model and its adapters."""
        return self._desks.info.listed(
            created_s=self._desks.created_s,
            context_tokens_max=limits_of(self._desks.scheduler).context_tokens_max,
        )

    @_on("GET", "/server_info")
    async def about(self, http: HttpRequest) -> Answer:
        """What clients look for in vLLM's configuration."""
        return server_info(self._desks, as_json=http.query_params.get("config_format") == "json")

    @_on("GET", "/openapi.json")
    async def openapi(self, http: HttpRequest) -> Answer:
        """Which paths there are."""
        return openapi([(one.method, one.path, one.handle.__doc__ or "") for one in _PATHS])

    @_on("GET", "/metrics")
    async def metrics(self, http: HttpRequest) -> Answer:
        """Prometheus text."""
        desks = self._desks
        is_sleeping = desks.control.is_sleeping
        text = metrics_text(
            desks.counts, desks.scheduler, model=desks.info.name, is_sleeping=is_sleeping
        )
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    @_on("GET", "/load")
    async def load(self, http: HttpRequest) -> Answer:
        """How many requests are being answered."""
        return {"server_load": len(self._desks.requests)}

    # ------------------------------------------------------------ pauses, sleep, caches

    @_on("POST", "/pause")
    async def pause(self, http: HttpRequest) -> Answer:
        """Stop generating: ``mode`` and ``clear_cache`` are in the query, a body is not read."""
        mode = _mode(http)
        await self._desks.control.pause(mode, clear_cache=_flag(http, "clear_cache", default=True))
        return {"status": "paused"}

    @_on("POST", "/resume")
    async def resume(self, http: HttpRequest) -> Answer:
        """Generate again."""
        await self._desks.control.resume()
        return {"status": "resumed"}

    @_on("GET", "/is_paused")
    async def is_paused(self, http: HttpRequest) -> Answer:
        """Whether nothing is generated."""
        return {"is_paused": self._desks.control.is_paused}

    @_on("POST", "/sleep")
    async def sleep(self, http: HttpRequest) -> Answer:
        """Give memory back: ``level`` and ``mode`` are in the query."""
        level = http.query_params.get("level", "1")
        if not level.isdecimal():
            raise ServerError(400, f"level must be 0, 1 or 2, got {level}", param="query.level")
        await self._desks.control.sleep(int(level), _mode(http))
        return {"status": "sleeping", "level": int(level)}

    @_on("POST", "/wake_up")
    async def wake_up(self, http: HttpRequest) -> Answer:
        """Take memory again; ``tags`` may come several times in the query."""
        tags = http.query_params.getlist("tags") or None
        is_awake = await self._desks.control.wake(tags)
        return {"status": "awake" if is_awake else "sleeping", "tags": tags}

    @_on("GET", "/is_sleeping")
    async def is_sleeping(self, http: HttpRequest) -> Answer:
        """True for paused engines, too."""
        return {"is_sleeping": self._desks.control.is_sleeping}

    @_on("POST", "/release_kv_cache_memory")
    async def release_kv_cache_memory(self, http: HttpRequest) -> Answer:
        """Give back the caches' memory alone."""
        await self._desks.control.release_kv_cache()
        return {"status": "kv_cache_released"}

    @_on("POST", "/reset_prefix_cache")
    async def reset_prefix_cache(self, http: HttpRequest) -> Answer:
        """Forget contexts kept for later requests."""
        recomputes = _flag(http, "reset_running_requests", default=False)
        done = await self._desks.control.reset_prefix_cache(recomputes_running=recomputes)
        return {"success": done}

    @_on("POST", "/reset_mm_cache")
    async def reset_mm_cache(self, http: HttpRequest) -> Answer:
        """There is none."""
        return None

    @_on("POST", "/reset_encoder_cache")
    async def reset_encoder_cache(self, http: HttpRequest) -> Answer:
        """There is none."""
        return None

    # ------------------------------------------------------------ weights

    @_on("GET", "/get_world_size")
    async def get_world_size(self, http: HttpRequest) -> Answer:
        """1: one process takes weights in, and brings them to all engines."""
        return {"world_size": 1}

    @_on("POST", "/init_weight_transfer_engine")
    async def init_weight_transfer(self, http: HttpRequest) -> Answer:
        """Meet the trainer."""
        request: protocol.InitRequest = await _read(http, protocol.InitRequest)
        await self._desks.weights.init(request.init_info)
        return {"message": "Weight transfer initialized"}

    @_on("POST", "/shutdown_weight_transfer_engine")
    async def shut_down_weight_transfer(self, http: HttpRequest) -> Answer:
        """Let go of it."""
        await self._desks.weights.shut_down()
        return {"message": "Weight transfer shut down"}

    @_on("POST", "/start_weight_update")
    async def start_weight_update(self, http: HttpRequest) -> Answer:
        """Begin an update; a body, as older clients send it, is not read."""
        await self._desks.weights.start()
        return {"message": "Weight update started"}

    @_on("POST", "/update_weights")
    async def update_weights(self, http: HttpRequest) -> Answer:
        """Take in tensors."""
        request: protocol.UpdateRequest = await _read(http, protocol.UpdateRequest)
        await self._desks.weights.update(request.update_info)
        return {"message": "Weights updated"}

    @_on("POST", "/finish_weight_update")
    async def finish_weight_update(self, http: HttpRequest) -> Answer:
        """Bring them to all engines."""
        body = await _body(http)
        request = protocol.FinishRequest()
        if body.strip():
            request = protocol.read_body(body, protocol.FinishRequest)
        await self._desks.weights.finish(request.weight_version)
        return {"message": "Weight update finished"}

    @_on("POST", "/update_weight_version")
    async def update_weight_version(self, http: HttpRequest) -> Answer:
        """Call what is served so."""
        request: protocol.VersionRequest = await _read(http, protocol.VersionRequest)
        self._desks.weights.rename(request.new_version)
        return {"success": True, "new_version": request.new_version}

    @_on("GET", "/weight_info")
    async def weight_info(self, http: HttpRequest) -> Answer:
        """What is served is called so."""
        return {"weight_version": self._desks.weights.labels.newest}

    @_on("POST", "/weight_checker")
    async def weight_checker(self, http: HttpRequest) -> Answer:
        """Checksums of what is served."""
        request: protocol.CheckRequest = await _read(http, protocol.CheckRequest)
        return await self._desks.weights.check(request.action, request.baseline)

    @_on("POST", "/collective_rpc")
    async def collective_rpc(self, http: HttpRequest) -> Answer:
        """``reload_weights`` alone."""
        request: protocol.RpcRequest = await _read(http, protocol.RpcRequest)
        if request.method != "reload_weights":
            told = f"collective_rpc does reload_weights alone, got {request.method}"
            raise ServerError(501, told, param="method")
        path = request.kwargs.get("weights_path")
        if not isinstance(path, str | None):
            raise ServerError(
                400, f"weights_path must be a directory, got {path!r}", param="kwargs"
            )
        await self._desks.weights.reload(path)
        return {"results": [None]}

    @_on("POST", "/v1/load_lora_adapter")
    async def load_lora_adapter(self, http: HttpRequest) -> Answer:
        """Bring an adapter to all engines."""
        request: protocol.LoadAdapterRequest = await _read(http, protocol.LoadAdapterRequest)
        await self._desks.weights.load_adapter(
            request.lora_name, request.lora_path, is_in_place=request.load_inplace
        )
        return Response(f"Success: LoRA adapter '{request.lora_name}' added successfully.")

    @_on("POST", "/v1/unload_lora_adapter")
    async def unload_lora_adapter(self, http: HttpRequest) -> Answer:
        """Have all engines forget one."""
        request: protocol.UnloadAdapterRequest = await _read(http, protocol.UnloadAdapterRequest)
        await self._desks.weights.unload_adapter(request.lora_name)
        return Response(f"Success: LoRA adapter '{request.lora_name}' removed successfully.")


# ---------------------------------------------------------------- HTTP


def _answered(app: _App, one: _Path, *, api_key: str | None) -> Handler:
    """Nothing that a handler raises gets further than its client."""

    async def handle(http: HttpRequest) -> Response:
        try:
            if api_key is not None and one.path.startswith("/v1"):
                _refuse_without_key(http, api_key)
            said = await one.handle(app, http)
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as error:  # noqa: BLE001 - told to the client, whatever it is
            failure = as_answer(error)
            return _json(failure.body(), status=failure.status)
        if said is None:
            return Response()
        return said if isinstance(said, Response) else _json(said)

    return handle


def _refuse_without_key(http: HttpRequest, api_key: str) -> None:
    scheme, _, shown = http.headers.get("authorization", "").partition(" ")
    is_right = secrets.compare_digest(shown.strip().encode(), api_key.encode())
    if scheme.lower() != "bearer" or not is_right:
        raise ServerError(401, "Unauthorized")


def _request_name(http: HttpRequest) -> str:
    return http.headers.get("x-request-id") or secrets.token_hex(8)


def _mode(http: HttpRequest) -> PauseMode:
    mode = http.query_params.get("mode", "abort")
    for known in get_args(PauseMode):
        if mode == known:
            return known  # type: ignore[no-any-return]
    told = f"mode must be 'abort', 'wait' or 'keep', got '{mode}'"
    raise ServerError(400, told, param="query.mode")


def _flag(http: HttpRequest, name: str, *, default: bool) -> bool:
    value = http.query_params.get(name, str(default)).lower()
    if value in ("true", "1", "yes", "on"):
        return True
    if value in ("false", "0", "no", "off"):
        return False
    raise ServerError(400, f"{name} must be true or false, got '{value}'", param=f"query.{name}")


async def _read(http: HttpRequest, kind: type[Any]) -> Any:
    return protocol.read_body(await _body(http), kind)


async def _body(http: HttpRequest) -> bytes:
    """All of it, if that is not too much."""
    parts: list[bytes] = []
    bytes_left = BODY_BYTES_MAX
    async for part in http.stream():
        bytes_left -= len(part)
        if bytes_left < 0:
            raise ServerError(413, f"a body may have {BODY_BYTES_MAX} bytes")
        parts.append(part)
    return b"".join(parts)


def _json(body: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")


async def _not_found(http: HttpRequest, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    why = "Method Not Allowed" if status == 405 else "Not Found"
    return _json({"detail": why}, status=status)
