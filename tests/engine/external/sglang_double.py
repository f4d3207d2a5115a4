"""In-process SGLang server for tests, with a real model and a real KV cache.

Behaves as SGLang 0.5.23 was recorded to, faults included: log-probs show if KV was kept over an
update or found in the prefix cache. Requests are computed one by one.
"""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from tokenizers import Tokenizer

from tests.engine.external.sglang_double_loras import Loras
from tests.engine.external.sglang_sampling import Running, Sampler
from tests.served_app import guarded

SAMPLING_FIELDS = {
    "max_new_tokens", "temperature", "top_p", "top_k", "min_p", "stop_token_ids", "ignore_eos",
    "sampling_seed", "min_new_tokens", "stream_interval",
}  # fmt: skip

PATHS = (
    "/generate", "/pause_generation", "/continue_generation", "/abort_request", "/flush_cache",
    "/update_weights_from_disk", "/update_weight_version", "/begin_weight_update",
    "/end_weight_update", "/release_memory_occupation", "/resume_memory_occupation",
    "/model_info", "/server_info", "/v1/models", "/v1/loads", "/health", "/tokenize",
)  # fmt: skip

NOT_FLUSHED = (
    "Weights were updated, but the cache was not flushed because requests are still running or "
    "queued. Retract or finish them, then call /flush_cache."
)


class SglangDouble:
    """The server's state, and its sampling loop."""

    def __init__(
        self,
        model: Path,
        *,
        is_raw: bool = False,
        settings: dict[str, Any] | None = None,
        preferred: dict[str, Any] | None = None,
        api_key: str | None = None,
    ):
        import transformers

        auto: Any = transformers.AutoModelForCausalLM
        self.model: Any = auto.from_pretrained(model, dtype=torch.float32).eval()
        self.settings = settings or {}
        samples_ahead = not self.settings.get("disable_overlap_schedule", True)
        self.sampler = Sampler(self.model, is_raw=is_raw, samples_ahead=samples_ahead)
        self.loras = self.sampler.loras = Loras(self.model, self.settings)
        self.tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self.path = str(model)
        self.label = self.info_label = "default"
        """Label in the scheduler, on tokens; ``info_label`` is the one in /model_info."""
        self.preferred = preferred
        self.api_key = api_key
        self.paused: str | None = None
        self.running: dict[str, Running] = {}
        self.sleeping: set[str] = set()
        self.holds: Callable[[list[int], int, str], bool] = lambda prompt, sampled, label: False
        """Whether a request (prompt, tokens sampled, label) is held for now."""
        self.is_dead = False
        self.calls: list[tuple[str, dict[str, Any]]] = []
        """Every control call, for tests to read."""
        self.posts: dict[str, Callable[[dict[str, Any]], Awaitable[Response]]] = {}
        from tests.engine.external.sglang_double_weights import Sessions

        self.sessions = Sessions(self)
        self._continued = asyncio.Event()
        self._rids = itertools.count()

    # ------------------------------------------------------------ sampling

    async def sample_for_ever(self) -> None:
        """Sample one token per request in turn, while not paused."""
        try:
            await self._sample_for_ever()
        except Exception:
            self.is_dead = True  # or else tests would wait for tokens for ever
            for request in self.running.values():
                request.abort()
            raise

    async def _sample_for_ever(self) -> None:
        while True:
            await asyncio.sleep(0 if self.running and self.paused is None else 0.002)
            for request in list(self.running.values()) if self.paused is None else ():
                if request.is_to_abort:
                    request.abort()
                elif request.finish is None and not self._is_held(request):
                    assert not self.sleeping, "an illegal memory access"
                    self.sampler.step(request, self.label)
                request.changed.set()
                if request.finish is not None and request.rid in self.running:
                    del self.running[request.rid]
                    self.loras.used.remove(request.body.get("lora_path", ""))

    def _is_held(self, request: Running) -> bool:
        return self.holds(request.body["input_ids"], len(request.output), self.label)

    # ------------------------------------------------------------ /generate

    async def generate(self, body: dict[str, Any]) -> Response:
        refused = self._refusal(body)
        if refused is not None:
            return _error(400, refused)
        if max(body["input_ids"]) >= self.model.config.vocab_size:
            self.is_dead = True  # an index error in the scheduler's process
            return _error(500, "scheduler died")
        if body["sampling_params"].get("max_new_tokens") == 0:
            return JSONResponse(self.sampler.scored(body))
        seed = body["sampling_params"].get("sampling_seed", next(self._rids))
        ids = list(body["input_ids"])
        rid = body.get("rid") or f"{next(self._rids):032x}"
        request = Running(rid, body, ids, len(ids), torch.Generator().manual_seed(seed))
        while self.paused is not None:  # held, in the tokenizer manager
            await self._continued.wait()
        self.running[rid] = request
        self.loras.used.append(body.get("lora_path", ""))
        if body.get("stream"):
            return StreamingResponse(self._stream(request), media_type="text/event-stream")
        while request.finish is None:
            await request.changed.wait()
            request.changed.clear()
        return JSONResponse(self.message(request))

    def _refusal(self, body: dict[str, Any]) -> str | None:
        sampling, context = body["sampling_params"], self.model.config.max_position_embeddings
        if unknown := sampling.keys() - SAMPLING_FIELDS:
            return f"unknown field `{min(unknown)}`, expected one of …"
        if not body["input_ids"]:
            return "input_ids cannot be empty."
        if why := self.loras.refusal(body.get("lora_path")):
            return why
        if body.get("rid") in self.running:
            return f"Duplicate request ID detected: {body['rid']}"
        if len(body["input_ids"]) + sampling.get("max_new_tokens", 128) > context:
            return f"Requested token count exceeds the model's maximum context length of {context}"
        return None

    async def _stream(self, request: Running) -> AsyncIterator[str]:
        try:
            reported = -1
            while request.finish is None or reported < 0:
                await request.changed.wait()
                request.changed.clear()
                sampled = len(request.output)
                interval = request.body["sampling_params"].get("stream_interval", 1)
                is_due = sampled > 0 and (reported < 1 or sampled - reported >= interval)
                if is_due or request.finish is not None:
                    reported = len(request.output)
                    yield f"data: {json.dumps(self.message(request))}\n\n"
            yield "data: [DONE]\n\n"
        finally:
            request.is_to_abort = True  # the client has gone

    def message(self, request: Running) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": request.rid,
            "finish_reason": request.finish,
            "prompt_tokens": request.prompt_tokens,
            "weight_version": self.info_label,
            "num_retractions": 0,
            "completion_tokens": len(request.output),
            "cached_tokens": request.cached,
        }
        if request.body.get("return_logprob"):
            meta |= {"input_token_logprobs": [], "output_token_logprobs": request.reported}
            meta |= {"output_token_logprobs_length": len(request.reported)}
        returns_experts = self.settings.get("enable_return_routed_experts")
        wants_experts = returns_experts and request.body.get("return_routed_experts")
        if wants_experts and request.finish is not None:
            meta["routed_experts"] = self.sampler.routed_experts(request)
        if request.top:
            meta["output_top_logprobs"] = request.top
        if request.finish is not None:
            # Empty for what is aborted before any token, as 0.5.23 was seen to do.
            nothing = {"version": self.label, "start": 0, "end": 0}
            meta["weight_versions"] = request.spans or [nothing]
        text = self.tokenizer.decode(request.output)
        return {"text": text, "output_ids": request.output, "meta_info": meta}

    # ------------------------------------------------------------ control

    async def pause(self, body: dict[str, Any]) -> Response:
        mode = body.get("mode", "abort")
        if mode not in ("abort", "retract", "in_place"):
            return _error(400, "Input should be 'abort', 'retract' or 'in_place'")
        if mode == "abort":
            while self.running:  # for ever, of requests that are paused in place
                for request in self.running.values():
                    request.is_to_abort = True
                await asyncio.sleep(0.005)
        self.paused = mode
        self._continued.clear()
        for request in self.running.values() if mode == "retract" else ():
            self.sampler.retract(request)
        return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})

    async def continue_generation(self, body: dict[str, Any]) -> Response:
        self.paused = None
        self._continued.set()
        return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})

    async def abort(self, body: dict[str, Any]) -> Response:
        """Abort with the next step; while paused in place, after the pause."""
        for request in self.running.values():
            request.is_to_abort |= bool(body.get("abort_all")) or request.rid == body.get("rid")
        return Response()

    async def update(self, body: dict[str, Any]) -> Response:
        while self.paused is None and self.running:  # the writer lock  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        assert "weights" not in self.sleeping, "an illegal memory access"
        try:
            tensors = load_file(Path(body["model_path"]) / "model.safetensors")
        except OSError as error:
            return _updated(f"Failed to get weights iterator: {error}.", is_ok=False)
        state = self.model.state_dict()
        if tensors.keys() - state.keys():  # experts one by one, which transformers stacks
            model = type(self.model).from_pretrained(body["model_path"], dtype=torch.float32)
            tensors = model.state_dict()
        for name, tensor in tensors.items():
            if state[name].shape != tensor.shape:  # those before it are in place, and stay
                why = f"Failed to update weights: {name}.\nRolling back to original weights."
                return _updated(why, is_ok=False)
            state[name].copy_(tensor)
        self.label = body.get("weight_version") or self.label
        if body.get("flush_cache", True) and self.running and self.paused != "retract":
            return _updated(NOT_FLUSHED, is_ok=False)
        if body.get("flush_cache", True):
            self.sampler.prefixes.clear()
        self.path, self.info_label = body["model_path"], self.label
        return _updated(
            f"Succeeded to update model weights. Weight version updated to {self.label}.",
            is_ok=True,
        )

    async def relabel(self, body: dict[str, Any]) -> Response:
        if body.get("abort_all_requests", True):
            await self.abort({"abort_all": True})
        self.label = self.info_label = body["new_version"]
        message = f"Weight version updated to {self.label}"
        return JSONResponse({"success": True, "message": message, "new_version": self.label})

    async def flush(self, body: dict[str, Any]) -> Response:
        if self.running and self.paused != "retract":
            return PlainTextResponse("Flush cache failed.", status_code=400)
        self.sampler.prefixes.clear()
        return PlainTextResponse("Cache flushed.\n")

    async def tokenize(self, body: dict[str, Any]) -> Response:
        ids = self.tokenizer.encode(body["prompt"], add_special_tokens=False).ids
        context = self.model.config.max_position_embeddings
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": context})

    async def release(self, body: dict[str, Any]) -> Response:
        """Answer as without a memory saver: the same answer, but no memory is released."""
        tags = set(body.get("tags") or ("weights", "kv_cache"))
        if self.running:  # its scheduler asserts that it is idle
            self.is_dead = True
        if self.settings.get("enable_memory_saver"):
            self.sleeping |= tags
            if "weights" in tags and not self.settings.get("enable_weights_cpu_backup"):
                for tensor in self.model.state_dict().values():
                    tensor.zero_()
            if "kv_cache" in tags:
                self.sampler.prefixes.clear()
        return JSONResponse(None)

    async def resume(self, body: dict[str, Any]) -> Response:
        tags = set(body.get("tags") or ("weights", "kv_cache"))
        if tags - self.sleeping:  # a KeyError in its scheduler
            self.is_dead = True
            return _error(500, "scheduler died")
        self.sleeping -= tags
        return JSONResponse(None)

    def facts(self, path: str) -> Any:
        """Return the answer of a GET."""
        context = self.model.config.max_position_embeddings
        about: dict[str, Any] = {
            "/model_info": {
                "model_path": self.path,
                "is_generation": True,
                "preferred_sampling_params": self.preferred,
                "weight_version": self.info_label,
                "architectures": [type(self.model).__name__],
            },
            # It samples nothing ahead unless a setting asks for it, as the server.
            "/server_info": {"version": "0.5.23", "page_size": 1, "disable_overlap_schedule": True}
            | self.settings,
            "/v1/models": {
                "data": [
                    {"id": self.path, "max_model_len": context},
                    *({"id": name, "parent": self.path} for name in self.loras.paths),
                ]
            },
            "/v1/loads": {"loads": [{"max_total_num_tokens": 8192, "max_running_requests": 32}]},
            "/openapi.json": {"paths": {path: {} for path in PATHS}},
            "/health": {},
        }
        return about[path]


def make_app(double: SglangDouble) -> Any:
    """Return the double's routes; its sampling runs beside them."""
    return guarded(_routes(double), double.api_key, lambda path: not path.startswith("/health"))


def _routes(double: SglangDouble) -> Starlette:
    posts = double.posts = {
        "/generate": double.generate,
        "/pause_generation": double.pause,
        "/continue_generation": double.continue_generation,
        "/abort_request": double.abort,
        "/update_weights_from_disk": double.update,
        "/update_weight_version": double.relabel,
        "/flush_cache": double.flush,
        "/tokenize": double.tokenize,
        **double.sessions.posts,
        **double.loras.posts,
        "/release_memory_occupation": double.release,
        "/resume_memory_occupation": double.resume,
    }

    async def post(request: Request) -> Response:
        if double.is_dead:
            return _error(500, "scheduler died")
        raw = await request.body()
        if not raw:
            return _error(400, "1 validation error: {'type': 'missing', 'loc': ('body',)}")
        body = json.loads(raw)
        if request.url.path not in ("/generate", "/tokenize"):
            double.calls.append((request.url.path, body))
        if request.url.path not in posts:
            return _error(404, "Not Found")
        return await posts[request.url.path](body)

    async def get(request: Request) -> Response:
        if double.is_dead:
            return _error(503, "unhealthy")
        return JSONResponse(double.facts(request.url.path))

    gets = ("/model_info", "/server_info", "/v1/models", "/v1/loads", "/openapi.json", "/health")
    return Starlette(
        routes=[
            *(Route(path, post, methods=["POST"]) for path in list(posts)),
            *(Route(path, get) for path in gets),
        ]
    )


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message}}, status_code=status)


def _updated(message: str, *, is_ok: bool) -> JSONResponse:
    body = {"success": is_ok, "message": message, "num_paused_requests": 0}
    return JSONResponse(body, status_code=200 if is_ok else 400)
