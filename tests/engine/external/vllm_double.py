"""In-process vLLM server for tests: its RL routes around a real tiny model.

Behaves as vLLM 0.32.0 was recorded to on a CPU: what is in queries and what in bodies, what a pause
does to running, waiting and new requests, KV that outlives an update, spans in the last event only,
errors and their form. The model has real weights and a real KV cache, so a wrong tag shows in
log-probs. Prompts are prefilled in chunks, so that a pause can fall between them.
"""

import asyncio
import base64
import io
import itertools
import json
import math
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
import uvicorn
from safetensors.torch import load_file
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.engine.external.vllm_double_loras import Loras, error_body
from tests.engine.external.vllm_double_weights import Transfers
from tests.served_app import guarded
from tidegate.engine.execution.runner import ModelRunner, Row, RowSampling
from tidegate.engine.external.vllm_patches import EXTENSION, RPC, TensorChange, read_changes
from tidegate.engine.models.model_config import ModelConfig
from tidegate.engine.models.model_weights import load_directory
from tidegate.engine.sampling.options import RowOptions
from tidegate.errors import TidegateError
from tidegate.transport.messages import SamplingParams

BLOCK_TOKENS, BLOCKS_EACH, REQUESTS_MAX = 16, 16, 8
CONTEXT_TOKENS_MAX = BLOCK_TOKENS * BLOCKS_EACH

PREFILL_CHUNK_TOKENS = 16
STEP_S = 0.002

TIMEOUT_S = 20.0

Holds = Callable[[list[int], int, str], bool]
"""Whether a request (prompt, tokens sampled, label) is held for now."""


@dataclass(eq=False)
class Asked:
    """A request in the engine."""

    body: dict[str, Any]
    context: list[int]
    prompt_tokens: int
    chunks: "asyncio.Queue[dict[str, Any]]" = field(default_factory=asyncio.Queue)
    block: int | None = None
    computed: int = 0
    spans: list[dict[str, Any]] = field(default_factory=list)
    experts: Any = None
    unsent: list[tuple[int, float]] = field(default_factory=list)
    """Sampled tokens that have not been sent, with their log-probs; at the end, or with
    ``stream_interval`` tokens, they are. The first token is sent at once."""
    unsent_masks: list[list[int]] = field(default_factory=list)


def _as_npy(experts: Any) -> str | None:
    if experts is None:
        return None
    file = io.BytesIO()
    np.save(file, experts.astype(np.int32))
    return base64.b64encode(file.getvalue()).decode()


class VllmDouble:
    """One server, on a thread of its own. Tests may set attributes from theirs."""

    def __init__(
        self, model: Path, *, version: str = "0.32.0", api_key: str | None = None, **config: Any
    ) -> None:
        self.version = version
        self.config: dict[str, Any] = {
            "logprobs_mode": "processed_logprobs",
            "device": "cuda",
            "dev": True,
            "scale_out": True,
            "enable_sleep_mode": False,
            "dtype": "torch.float32",
            "weight_transfer": None,
            "worker_extension_cls": "",
            "quantization": None,
            "stream_interval": 1,
            "model": str(model),
            "body": ["token_ids", "sampling_params", "features", "content_parts"],
        } | config
        names = ("enable_return_routed_experts", "return_sampling_mask")
        self.attachment_flags = {name: bool(config.get(name)) for name in names}
        self.path = model
        shape = ModelConfig.from_directory(model)
        self.runner = ModelRunner(
            shape,
            load_directory(model, shape, torch.float32),
            num_blocks=BLOCKS_EACH * REQUESTS_MAX,
            block_tokens=BLOCK_TOKENS,
        )
        self.loras = Loras(self.runner, config.get("lora_rank_max", 0))
        self.transfers = Transfers(self)
        self._free = list(range(REQUESTS_MAX))
        self.label = "default"
        self.paused = ""
        """``all`` after keep, ``new`` after abort and wait."""
        self.asked: list[Asked] = []
        self.bodies: list[dict[str, Any]] = []
        """Bodies of all requests so far."""
        self.sleeping: set[str] = set()
        self.falls_asleep = threading.Event()
        """While cleared, falling asleep blocks."""
        self.falls_asleep.set()
        self.answers_pauses = threading.Event()
        """While cleared, a pause takes effect and its answer is held back."""
        self.answers_pauses.set()
        self.calls: list[str] = []
        """Control calls, with their queries."""
        self.loads: list[str] = []
        self._served: dict[str, torch.Tensor] | None = None
        """Checkpoint tensors that were loaded from files last, with later changes of elements."""
        self.fails_to_patch = False
        self.fails_to_load: Callable[[str], bool] = lambda path: False
        self.holds: Holds = lambda prompt, sampled, label: False
        self.turned_away = 0
        self.preemptions = 0
        self.mislabels = False
        self.is_dead = False
        self.loop_answers = threading.Event()
        """While cleared, the process is healthy, and its engine's loop hangs."""
        self.loop_answers.set()
        self._numbers = itertools.count()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        app = guarded(self._app(), api_key, _is_guarded)
        settings = uvicorn.Config(app, log_level="critical", lifespan="off")
        self._server = uvicorn.Server(settings)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "VllmDouble":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(TIMEOUT_S)
        self._socket.close()

    def kill(self) -> None:
        """Break connections and stop listening, like kill -9."""
        self.is_dead = True

    def _run(self) -> None:
        async def serve() -> None:
            steps = asyncio.create_task(self._step_for_ever())
            await self._server.serve([self._socket])
            await asyncio.sleep(5 * STEP_S)  # in which sockets of broken connections are closed
            steps.cancel()

        asyncio.run(serve())

    # ------------------------------------------------------------ the engine

    async def _step_for_ever(self) -> None:
        while True:
            await asyncio.sleep(STEP_S)
            if self.is_dead:
                self._socket.close()
                for server in self._server.servers:
                    server.close()
                self._break_connections()
            if self.paused != "all":
                self._step()

    def _break_connections(self) -> None:
        for connection in list(self._server.server_state.connections):
            transport = getattr(connection, "transport", None)
            if transport is not None:
                transport.abort()

    def _step(self) -> None:
        rows, whose = [], []
        for one in self.asked:
            if one.block is None and self._free and self.paused != "new":
                one.block = self._free.pop()
            prompt, sampled = one.body["token_ids"], len(one.context) - one.prompt_tokens
            if one.block is not None and not self.holds(prompt, sampled, self.label):
                rows.append(self._row(one))
                whose.append(one)
        if not rows:
            return
        assert not self.sleeping, "an illegal memory access"
        assert not self.transfers.is_apart, "meta tensors"
        output = self.runner.step(rows)
        samples = enumerate(zip(output.token_ids.tolist(), output.logprobs.tolist(), strict=True))
        for one, row in zip(whose, rows, strict=True):
            one.computed += len(row.token_ids)
            if row.sampling is not None:
                index, sample = next(samples)
                one.experts = output.positions.get("routed_experts", {}).get(index)
                kept = output.attachments.get(index, {}).get("kept_ids")
                self._sampled(one, *sample, kept)

    def _row(self, one: Asked) -> Row:
        assert one.block is not None
        tokens = one.context[one.computed : one.computed + PREFILL_CHUNK_TOKENS]
        asked, sampling = one.body["sampling_params"], None
        if one.computed + len(tokens) == len(one.context):
            sampling = RowSampling(
                temperature=asked.get("temperature", 1.0),
                top_k=max(0, asked.get("top_k", 0)),
                top_p=asked.get("top_p", 1.0),
                seed=id(one) % 2**32,
                index=len(one.context),
            )
            if self.attachment_flags["return_sampling_mask"]:
                mask = SamplingParams(max_tokens=1, kept_tokens=True)
                sampling.options = RowOptions(mask, np.array(one.context, np.int32), 0)
        blocks = range(one.block * BLOCKS_EACH, (one.block + 1) * BLOCKS_EACH)
        lora = one.body["model"] if one.body["model"] != "tiny" else ""
        row = Row(np.array(tokens, np.int32), one.computed, list(blocks), sampling, adapter=lora)
        row.positions_from = 0 if self.attachment_flags["enable_return_routed_experts"] else None
        return row

    def _sampled(self, one: Asked, token: int, logprob: float, kept: bytes | None) -> None:
        one.context.append(token)
        asked, count = one.body["sampling_params"], len(one.context) - one.prompt_tokens
        if not one.spans or one.spans[-1]["version"] != self.label:
            one.spans.append({"version": self.label, "start": count - 1, "end": count})
        one.spans[-1]["end"] = count
        reason = None
        if token in asked.get("stop_token_ids", []):
            reason = "stop"
        elif count == asked["max_tokens"]:
            reason = "length"
        one.unsent.append((token, logprob))
        if kept is not None:
            one.unsent_masks.append(np.frombuffer(kept, np.int32)[::-1].tolist())
        if reason is not None or count == 1 or len(one.unsent) >= asked.get("stream_interval", 1):
            self._send_replies(one, reason)

    def _send_replies(self, one: Asked, reason: str | None) -> None:
        sampled, one.unsent = one.unsent, []
        masks, one.unsent_masks = one.unsent_masks, []
        content = [{"token_id": t, "logprob": p, "rank": 1, "top_logprobs": []} for t, p in sampled]
        spans = [span | ({"version": "other"} if self.mislabels else {}) for span in one.spans]
        choice = {
            "index": 0,
            "finish_reason": reason,
            "stop_reason": None,
            "token_ids": [token for token, _ in sampled],
            "weight_versions": spans if reason is not None else None,
            "logprobs": {"content": content},
            "sampling_mask": masks or None,
            "routed_experts": None if reason is None else _as_npy(one.experts),
        }
        one.chunks.put_nowait({"request_id": "generate-tokens-x", "choices": [choice]})
        if reason is not None:
            self._forget(one)

    def _forget(self, one: Asked) -> None:
        if one in self.asked:
            self.asked.remove(one)
            if one.block is not None:
                self._free.append(one.block)

    # ------------------------------------------------------------ routes

    def _app(self) -> Starlette:
        dev = {
            "/pause": self._pause,
            "/resume": self._resume,
            "/is_paused": self._is_paused,
            "/collective_rpc": self._collective_rpc,
            "/server_info": self._server_info,
            "/weight_info": self._weight_info,
            "/update_weight_version": self._name,
            "/sleep": self._sleep,
            "/wake_up": self._wake_up,
        }
        routes = {
            "/version": self._version,
            "/health": self._health,
            "/metrics": self._metrics,
            "/openapi.json": self._openapi,
            "/v1/models": self._models,
            "/inference/v1/generate": self._generate,
        } | (self.loras.routes | self.transfers.routes | dev if self.config["dev"] else {})
        self.paths = list(routes)
        return Starlette(
            routes=[Route(path, its, methods=["GET", "POST"]) for path, its in routes.items()]
        )

    async def _version(self, request: Request) -> Response:
        return JSONResponse({"version": self.version})

    async def _health(self, request: Request) -> Response:
        return Response()

    async def _metrics(self, request: Request) -> Response:
        return PlainTextResponse(
            "# TYPE vllm:num_preemptions_total counter\n"
            'vllm:num_preemptions_total{engine="0",model_name="tiny"} '
            f"{self.preemptions}.0\n"
        )

    async def _openapi(self, request: Request) -> Response:
        body: list[str] = self.config["body"]
        schemas: dict[str, Any] = {"GenerateRequest": {"properties": {name: {} for name in body}}}
        paths: dict[str, Any] = {path: {} for path in self.paths}
        return JSONResponse({"paths": paths, "components": {"schemas": schemas}})

    async def _models(self, request: Request) -> Response:
        served = {"id": "tiny", "max_model_len": CONTEXT_TOKENS_MAX}
        return JSONResponse({"data": [served, *self.loras.cards]})

    async def _server_info(self, request: Request) -> Response:
        if why := self.config.get("server_info_error"):
            body = {"error": {"message": why, "type": "InternalServerError", "code": 500}}
            return JSONResponse(body, status_code=500)
        return JSONResponse(
            {
                "vllm_config": {
                    "model_config": {
                        "model": self.config["model"],
                        "logprobs_mode": self.config["logprobs_mode"],
                        "max_logprobs": 20,
                        "quantization": self.config["quantization"],
                        "dtype": self.config["dtype"],
                        **self.attachment_flags,
                        "enable_sleep_mode": self.config["enable_sleep_mode"],
                    },
                    "scheduler_config": {
                        "max_num_seqs": REQUESTS_MAX,
                        "stream_interval": self.config["stream_interval"],
                    },
                    "cache_config": {"block_size": BLOCK_TOKENS, "num_gpu_blocks": 128},
                    "parallel_config": {
                        "worker_extension_cls": self.config["worker_extension_cls"]
                    },
                    "device_config": {"device": self.config["device"]},
                    "lora_config": self.loras.config,
                    "weight_transfer_config": self.config["weight_transfer"],
                }
            }
        )

    async def _weight_info(self, request: Request) -> Response:
        return JSONResponse({"weight_version": self.label})

    async def _name(self, request: Request) -> Response:
        self.label = (await request.json())["new_version"]
        return JSONResponse({"success": True, "new_version": self.label})

    async def _pause(self, request: Request) -> Response:
        mode = request.query_params.get("mode", "abort")  # a body is ignored
        self.calls.append(f"pause {mode}")
        if mode == "keep":
            self.paused = "all"
        else:
            self.paused = "new"
            while mode == "wait" and any(one.block is not None for one in self.asked):  # noqa: ASYNC110
                await asyncio.sleep(STEP_S)
            if mode == "abort":
                for one in list(self.asked):
                    self._send_replies(one, "abort")
        while not self.answers_pauses.is_set():  # noqa: ASYNC110
            await asyncio.sleep(STEP_S)
        return JSONResponse({"status": "paused"})

    async def _resume(self, request: Request) -> Response:
        self.calls.append("resume")
        self.paused = ""
        return JSONResponse({"status": "resumed"})

    async def _is_paused(self, request: Request) -> Response:
        await asyncio.to_thread(self.loop_answers.wait)
        return JSONResponse({"is_paused": bool(self.paused)})

    async def _sleep(self, request: Request) -> Response:
        """Sleep as vLLM's source does: pause with the given mode, and put all memory to sleep."""
        level, mode = (request.query_params.get(name, "") for name in ("level", "mode"))
        self.calls.append(f"sleep {level} {mode}")
        assert self.config["enable_sleep_mode"]
        while not self.falls_asleep.is_set():  # noqa: ASYNC110
            await asyncio.sleep(STEP_S)
        self.paused = "new"
        for one in list(self.asked):
            self._send_replies(one, "abort")
        if "weights" not in self.sleeping:
            self.sleeping = {"weights", "kv_cache"}
            if level == "2":
                self._forget_weights()
        return JSONResponse({"status": "sleeping", "level": int(level)})

    def _forget_weights(self) -> None:
        shape = ModelConfig.from_directory(self.path)
        garbage = load_directory(self.path, shape, torch.float32)
        for tensor in garbage.tensors():
            tensor.zero_()
        self.runner.swap(garbage)

    async def _wake_up(self, request: Request) -> Response:
        tags = request.query_params.getlist("tags")
        self.calls.append(f"wake {' '.join(tags)}".strip())
        if not set(tags) - self.sleeping:  # else it does nothing, and warns
            self.sleeping -= set(tags) or {"weights", "kv_cache"}
        if not self.sleeping:
            self.paused = ""
        status = "sleeping" if self.sleeping else "awake"
        return JSONResponse({"status": status, "tags": tags or None})

    async def _collective_rpc(self, request: Request) -> Response:
        body = await request.json()
        if body["method"] == RPC:
            return self._change_elements(Path(body["kwargs"]["path"]))
        path = body["kwargs"]["weights_path"]
        self.calls.append("reload")
        self.loads.append(path)
        assert "weights" not in self.sleeping, "an illegal memory access"
        try:
            if self.fails_to_load(path):
                raise OSError("no such file")
            shape = ModelConfig.from_directory(self.path)
            self.runner.swap(load_directory(Path(path), shape, torch.float32))
            self._served = None
            self.loras.read_again()
        except (OSError, TidegateError) as error:
            return error_body(500, f"Call to collective_rpc method failed: {error}")
        return JSONResponse({"results": [None]})

    def _change_elements(self, file: Path) -> Response:
        self.calls.append("patch")
        assert self.paused, "the weights change within a step"
        assert "weights" not in self.sleeping, "an illegal memory access"
        assert self.config["worker_extension_cls"] == EXTENSION, f"no attribute {RPC}"
        if self._served is None:
            directory = Path(self.loads[-1]) if self.loads else self.path
            self._served = load_file(directory / "model.safetensors")
        shape = ModelConfig.from_directory(self.path)
        weights = load_directory(self.path, shape, torch.float32)
        try:
            tensors = changed(self._served, read_changes(file, "cpu"))
            if self.fails_to_patch:
                tensors = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
            for name, tensor in tensors.items():
                weights.load(name, tensor)
        except (ValueError, TypeError) as error:
            return error_body(500, f"Call to collective_rpc method failed: {error}")
        self._served = tensors
        self.runner.swap(weights)
        if self.fails_to_patch:
            why = "Sparse checkpoint patches require a same-shaped floating-point final copy"
            return error_body(500, f"Call to collective_rpc method failed: {why}")
        return JSONResponse({"results": [None]})

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        if not self.config["scale_out"]:
            return error_body(403, "Scale-out endpoints are disabled. Restart vllm serve with …")
        if self.paused == "new" and self.version >= "0.33":
            self.turned_away += 1
            return error_body(503, "Generation is paused. Please retry after it resumes.")
        if any(token >= 96 for token in body["token_ids"]):
            return error_body(400, "Token id 96 is out of vocabulary")
        if refused := self.loras.refusal(body):
            return refused
        self.bodies.append(body)
        one = Asked(body, list(body["token_ids"]), len(body["token_ids"]))
        self.asked.append(one)
        return StreamingResponse(self._stream(one), media_type="text/event-stream")

    async def _stream(self, one: Asked) -> AsyncIterator[bytes]:
        try:
            while True:
                event = await one.chunks.get()
                yield b"data: " + json.dumps(event).encode() + b"\n\n"
                if event["choices"][0]["finish_reason"] is not None:
                    yield b"data: [DONE]\n\n"
                    return
        finally:
            self._forget(one)  # a client that goes away aborts its request


def _is_guarded(path: str) -> bool:
    """Whether a route needs the API key; control routes do not."""
    return path.startswith(("/v1", "/v2", "/inference", "/cohere"))


def changed(
    served: Mapping[str, torch.Tensor], changes: Iterable[TensorChange]
) -> dict[str, torch.Tensor]:
    """Return the served tensors with changes, checked as by 0.33.0's checkpoint_weight_patch.py:
    by copies in which NaN means "unchanged".

    Raises:
        ValueError, TypeError: as vLLM does, before anything has changed.
    """
    changes = list(changes)
    for change in changes:
        indices, values, count = change.indices, change.values, math.prod(change.shape)
        if not values.dtype.is_floating_point:
            raise TypeError(f"{change.name}: sparse checkpoint patches require a floating dtype")
        if (indices.ndim, values.ndim) != (1, 1) or indices.numel() != values.numel():
            raise ValueError(f"{change.name}: sparse indices and values must have matching lengths")
        if indices.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{change.name}: sparse patch indices must be int32 or int64")
        in_order = indices.sort().values
        if (
            values.isnan().any()
            or ((indices < 0) | (indices >= count)).any()
            or (in_order[1:] == in_order[:-1]).any()
        ):
            raise ValueError(
                "Sparse checkpoint patches contain NaN values, out-of-range indices, or duplicate "
                "indices"
            )
    after = dict(served)
    for change in changes:
        whole = torch.full((math.prod(change.shape),), math.nan, dtype=change.values.dtype)
        whole.index_copy_(0, change.indices.long(), change.values)
        copied = whole.view(change.shape).to(served[change.name].dtype)
        assert copied.shape == served[change.name].shape, "a same-shaped final copy"
        after[change.name] = torch.where(copied.isnan(), served[change.name], copied)
    return after
