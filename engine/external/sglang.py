"""Adapter of an SGLang server: generation, pauses, weight updates and sleep over its own routes.

It works around three observed faults of SGLang: an update reported as failed after the weights had
changed, two names for one set of weights, and a crash on a token id outside the vocabulary.
"""

import asyncio
import base64
import contextlib
import itertools
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import msgspec
import numpy as np
import torch

from tidegate.engine.external.adapter import (
    Capabilities,
    Ended,
    ExternalScores,
    GeneratedChunk,
    GenerationRequest,
    ScoreRequest,
    TopLogprobs,
    VersionLabel,
    of_positions,
)
from tidegate.engine.external.host_weights import read_mixture, read_sizes
from tidegate.engine.external.http import HttpStatusError
from tidegate.engine.external.http_adapter import (
    MEMORY_TIMEOUT_S,
    PAUSE_TIMEOUT_S,
    HttpAdapter,
    StreamEvent,
)
from tidegate.engine.external.tensor_senders import (
    SglangBroadcastSender,
    SglangInlineSender,
    TensorSender,
)
from tidegate.engine.weights.lora import RANK_MAX
from tidegate.errors import ConfigError, EngineGone, ScoreRefused, TidegateError, TurnRefused
from tidegate.transport.attachments import Attachment
from tidegate.transport.printable import print_stderr
from tidegate.transport.sleep_messages import MemoryTag, SleepLevel
from tidegate.transport.weight_channels.cuda_nccl import packs

TRANSFER_METHODS = ("disk", "http", "gloo", "nccl")
"""Values of ``#weights=`` in an engine URL."""

BUCKET_BYTES = 64 * 2**20
"""Bytes of tensors per call, which may exceed it by one tensor. Over HTTP this is a body of
85 MiB, of which server and adapter hold a few copies."""

UPDATED_ANYWAY = "Weights were updated"
"""Start of SGLang's error for an update that succeeded and only failed to flush its cache."""

TOP_LOGPROBS_MAX = 20

STOPPABLE_INTERVAL_TOKENS = 4
"""Largest stream interval of turns with stop tokens. SGLang samples beyond a stop token until the
adapter has read it, so a longer interval would waste 1.5 tokens of a turn for each 3 of it."""

UPDATE_TIMEOUT_S = 900.0
"""Seconds for an update: a model of a terabyte, from a shared disk."""

CALL_TIMEOUT_S = 60.0
"""Seconds for other control calls, which wait for the current step: a long prefill
on a slow machine."""

END_TIMEOUT_S = 300.0
"""Seconds to end an update without files."""

RUNNING_TURNS_MAX = 256
"""Limit of concurrent requests if the server states none; more would wait in its queue, where their
priorities count less."""

LORA_START_HINT = (
    "start it with --enable-lora --max-lora-rank RANK --lora-target-modules all, and leave "
    "#weights= out of its URL, because adapters are files that both must see"
)

NEEDED_ROUTES = {"/pause_generation", "/update_weights_from_disk", "/v1/loads"}
"""Routes of 0.5.21 and newer. Older servers cannot be paused in place, or block on a lock."""

_DTYPES = {
    "float32": "float32",
    "float": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "half": "float16",
}
"""Compute dtype of each explicit value of ``--dtype``."""

# ---------------------------------------------------------------- messages


class SglangEvent(StreamEvent):
    """One event of a stream, cumulative unless the server streams incrementally."""

    meta_info: dict[str, Any] = {}  # noqa: RUF012 - msgspec copies defaults


_message_decoder = msgspec.json.Decoder(SglangEvent)


def _read_chunk(
    meta: dict[str, Any], known_tokens: int, stop_ids: frozenset[int], *, top_logprobs: int
) -> GeneratedChunk:
    """Return the new tokens of a stream message, up to a stop token.

    ``meta`` is the message's, with all tokens so far, of which ``known_tokens`` are known.
    """
    entries = meta["output_token_logprobs"][known_tokens:]
    ended = _ended_of(meta.get("finish_reason"))
    labels = None
    if ended is not None and meta.get("weight_versions") is not None:
        labels = _labels(meta["weight_versions"])
    for index, (_, token_id, *_) in enumerate(entries):
        if token_id in stop_ids:
            if labels is not None and index + 1 < len(entries):
                labels = None  # they cover tokens that are cut off
            entries, ended = entries[: index + 1], "stop"
            break
    attachments: Sequence[Attachment] = ()
    if top_logprobs and entries:
        top = _read_top(meta["output_top_logprobs"][known_tokens : known_tokens + len(entries)])
        attachments = top.attachments(top_logprobs)
    return GeneratedChunk(
        token_ids=[entry[1] for entry in entries],
        logprobs=[entry[0] for entry in entries],
        ended=ended,
        labels=labels,
        attachments=attachments,
    )


def _labels(spans: Sequence[dict[str, Any]]) -> list[VersionLabel]:
    """Drop the empty span that SGLang reports for a request aborted before its first token."""
    labels = (VersionLabel(span["version"], span["start"], span["end"]) for span in spans)
    return [label for label in labels if label.end > label.start]


def _ended_of(reason: dict[str, Any] | None) -> Ended | None:
    if reason is None:
        return None
    match reason["type"]:
        case "length" | "stop" | "abort" as ended:
            return ended  # type: ignore[no-any-return]
    raise EngineGone(
        f"SGLang ended a request with finish reason {reason}, which this Tidegate does not know; "
        "use a release that docs/vllm-engine.md lists"
    )


def _read_top(positions: Sequence[Sequence[Sequence[Any]]]) -> TopLogprobs:
    entries = [entry for position in positions for entry in position]
    return TopLogprobs([entry[1] for entry in entries], [entry[0] for entry in entries])


# ---------------------------------------------------------------- the adapter


class SglangAdapter(HttpAdapter):
    """Adapter of one SGLang server."""

    kind = "SGLang"
    generate_path = "/generate"
    load_lora_path = "/load_lora_adapter"
    unload_lora_path = "/unload_lora_adapter"
    label_path = "/model_info"
    label_fields: ClassVar[Mapping[str, object]] = {"abort_all_requests": False}
    control_timeout_s = CALL_TIMEOUT_S

    _settings: Mapping[str, Any]
    """The server's start-up settings; set by :meth:`open`."""

    def __init__(self, url: str, model: Path, *, weights: str = "disk") -> None:
        """Make the adapter of the server at ``url``, which was started with the model directory.

        ``weights`` is one of :data:`TRANSFER_METHODS`.
        """
        super().__init__(url, model, weights=weights)
        self._architecture, self._vocab_tokens = read_sizes(model)
        self._mixture = read_mixture(model)
        self._is_frozen = False
        """Whether requests are paused in place; then nothing may flush the cache or
        wait for requests."""
        self._retractions = 0
        self._rids = itertools.count()
        self._run_id = uuid.uuid4().hex[:8]
        """Part of every request id, because requests of a dead adapter may still
        be in the server."""
        self._aborts: set[asyncio.Task[None]] = set()
        """Abort calls in flight, which nothing awaits."""

    # ------------------------------------------------------------ start and end

    async def _inspect(self) -> None:
        where = f"the SGLang server at {self._http.url}"
        info = await self._http.wait_for("/model_info")
        if not info.get("is_generation", True):
            raise ConfigError(f"{where} serves embeddings; start one that generates")
        architectures = info.get("architectures") or [self._architecture]
        if self._architecture not in architectures:
            raise ConfigError(
                f"{where} serves a {architectures[0]}, and the run's model is a "
                f"{self._architecture}; start it with the run's model directory"
            )
        if preferred := info.get("preferred_sampling_params"):
            raise ConfigError(
                f"{where} has sampling defaults of its own for options that a turn leaves out "
                f"({preferred}); start it without --preferred-sampling-params"
            )
        paths = (await self._http.call("GET", "/openapi.json"))["paths"]
        if missing := NEEDED_ROUTES - paths.keys():
            raise ConfigError(f"{where} has no {', '.join(sorted(missing))}; use 0.5.21 or newer")
        self._settings = settings = await self._http.call("GET", "/server_info")
        loads = (await self._http.call("GET", "/v1/loads"))["loads"]
        if len(loads) != 1:
            raise ConfigError(
                f"{where} has {len(loads)} data-parallel replicas, and updates reach only one of "
                "them; start one server per replica, with --dp-size 1"
            )
        if self._samples_ahead:
            print_stderr(
                f"{where} uses its overlap scheduler, so kv_policy='keep' is refused: it would "
                "label tokens of old weights as new; start it with --disable-overlap-schedule"
            )
        models = (await self._http.call("GET", "/v1/models"))["data"]
        block_tokens = settings.get("page_size") or 1
        running_max = loads[0].get("max_running_requests") or RUNNING_TURNS_MAX
        # top_k, top_p and min_p apply to sampling but not to the reported log-probs; penalties
        # would count output sampled elsewhere as prompt; min_tokens would also ban the model's own
        # EOS, which Tidegate does not.
        sampling = {"stop_token_ids", "top_logprobs"}
        if settings.get("enable_return_routed_experts"):
            sampling.add("routed_experts")
        sleep_levels: set[SleepLevel] = set()
        if settings.get("enable_memory_saver"):
            sleep_levels = {1, 2} if settings.get("enable_weights_cpu_backup") else {2}
        lora_rank_max = int(settings.get("max_lora_rank") or RANK_MAX)
        version = settings.get("version") or loads[0].get("version") or "of an unknown version"
        self._server_capabilities = Capabilities(
            engine=f"sglang {version}",
            context_tokens_max=models[0]["max_model_len"],
            running_turns_max=min(RUNNING_TURNS_MAX, running_max),
            freezes=True,
            sampling=frozenset(sampling),
            top_logprobs_max=TOP_LOGPROBS_MAX,
            scores=frozenset({"logprobs"}),
            # Empty if started with --dtype auto, whose result the server does not report.
            dtype=_DTYPES.get(str(settings.get("dtype") or ""), ""),
            num_blocks=loads[0]["max_total_num_tokens"] // block_tokens,
            block_tokens=block_tokens,
            sleep_levels=frozenset(sleep_levels),
            lora_rank_max=lora_rank_max if settings.get("enable_lora") else 0,
            # An adapter of an up projection alone is accepted, and crashes the server when used.
            lora_fills_matrices=True,
            lora_lacks=LORA_START_HINT,
        )

    @property
    def _samples_ahead(self) -> bool:
        """Whether the overlap scheduler is on, which runs one step ahead of the reported one. A
        pause in place leaves that step sampled by the old weights; 0.5.23 labels it with the new.
        """
        return not self._settings.get("disable_overlap_schedule", False)

    async def _make_sender(self) -> TensorSender:
        url, ranks = self._http.url, self._settings.get("tp_size") or 1
        if (stages := self._settings.get("pp_size") or 1) > 1:
            raise ConfigError(
                f"SGLang at {url} is pipeline-parallel (--pp-size {stages}), and accepts weights "
                "for its first stage only; leave #weights= out"
            )
        match self._method:
            case "http":
                return SglangInlineSender(self._http, ranks)
            case "gloo" | "nccl":
                return SglangBroadcastSender(self._http, ranks, self._method)
        raise ConfigError(
            f"SGLang at {url} can't load weights by {self._method!r}; methods are "
            f"{', '.join(TRANSFER_METHODS)}"
        )

    async def _stop_all(self) -> None:
        await self.resume()  # a dead adapter may have left it paused
        await self._abort({"abort_all": True})
        await self.pause("abort")

    async def _capabilities(self, label: str) -> Capabilities:
        """Find out whether log-probs are those after the temperature, which raw ones ignore, and
        whether tokens are labelled; both by requests, which a paused server never answers.

        Sampled at half the temperature, the gap between two tokens' log-probs must double.
        """
        gaps = []
        for temperature in (1.0, 0.5):
            body = {
                "input_ids": [1, 2, 3],
                "sampling_params": {"max_new_tokens": 1, "temperature": temperature},
                "return_logprob": True,
                "top_logprobs_num": 5,
            }
            meta = (await self._http.call("POST", self.generate_path, body))["meta_info"]
            logprobs = sorted(float(entry[0]) for entry in meta["output_top_logprobs"][0])
            gaps.append(logprobs[-1] - logprobs[0])
        return replace(
            self._server_capabilities,
            has_processed_logprobs=gaps[1] > 1.5 * gaps[0],
            keeps_kv=not self._samples_ahead and "weight_versions" in meta,
        )

    async def close(self) -> None:
        """Close connections, which aborts requests that are left."""
        for task in self._aborts:
            task.cancel()
        await super().close()

    # ------------------------------------------------------------ requests

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GeneratedChunk, None]:
        """Sample tokens; converts SGLang's cumulative messages to chunks of new tokens."""
        self._check_token_ids(request.token_ids, TurnRefused)
        rid, sampling = f"tidegate-{self._run_id}-{next(self._rids)}", request.sampling
        stops = frozenset(sampling.stop_token_ids)
        known_tokens = retractions = 0
        has_ended = False
        messages = self._events(self._body(request) | {"rid": rid}, _message_decoder)
        try:
            async for message in messages:
                meta = message.meta_info
                now = meta.get("num_retractions", 0)
                self._retractions += now - retractions
                retractions = now
                has_ended = meta.get("finish_reason") is not None
                is_cumulative = not self._settings.get("incremental_streaming_output")
                start = known_tokens if is_cumulative else 0
                chunk = _read_chunk(meta, start, stops, top_logprobs=sampling.top_logprobs)
                known_tokens += len(chunk.token_ids)
                if chunk.ended and sampling.routed_experts:
                    if not has_ended:  # cut off at a stop token; experts come with the end
                        await self._abort({"rid": rid})
                        async for last in messages:
                            meta = last.meta_info
                            if meta.get("finish_reason") is not None:
                                break
                        has_ended = True
                    positions = len(request.token_ids) + known_tokens - 1
                    experts = self._routed_experts(meta, positions)
                    chunk = chunk._replace(attachments=[*chunk.attachments, *experts])
                if chunk.token_ids or chunk.ended:
                    yield chunk
                if chunk.ended:
                    return
        finally:
            if not has_ended:
                self._abort_soon(rid)
            await messages.aclose()

    def _routed_experts(self, meta: dict[str, Any], positions: int) -> list[Attachment]:
        """Return the experts of the first ``positions`` tokens, if the message has any: base64 of
        int32 [P, layers, k], of all positions but the last token's and all of the model's layers.

        Raises:
            EngineGone: they can't be read.
        """
        encoded = meta.get("routed_experts")
        if encoded is None or self._mixture is None:
            return []
        mixture = self._mixture
        try:
            flat = np.frombuffer(base64.b64decode(encoded), np.dtype("<i4"))
            experts = flat.reshape(-1, mixture.layers, mixture.experts_per_token)
        except ValueError as error:
            raise EngineGone(
                f"SGLang sent routed experts that are no int32 [positions, {mixture.layers}, "
                f"{mixture.experts_per_token}], the layers and experts per token in config.json: "
                f"{error}"
            ) from None
        return [of_positions("routed_experts", experts[:positions, mixture.mixture_layers])]

    async def _refused(self, refusal: HttpStatusError) -> Exception:
        if refusal.status >= 500:
            return EngineGone(str(refusal))
        return await super()._refused(refusal)

    def _abort_soon(self, rid: str) -> None:
        """Abort in a task of its own, because a task that is being cancelled cannot await."""

        async def abort() -> None:
            with contextlib.suppress(EngineGone):  # other calls report it
                await self._abort({"rid": rid})

        task = asyncio.get_running_loop().create_task(abort(), name=f"abort {rid}")
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _abort(self, selection: dict[str, Any]) -> None:
        await self._control("/abort_request", selection)

    def _check_token_ids(self, token_ids: Sequence[int], error: type[TidegateError]) -> None:
        """Check token ids, because SGLang crashes on an index outside its embedding."""
        largest_id = max(token_ids, default=0)
        if largest_id >= self._vocab_tokens or min(token_ids, default=0) < 0:
            raise error(
                f"token {largest_id} is not one of the model's {self._vocab_tokens}, and would end "
                "the SGLang server; was the prompt made with another tokenizer?"
            )

    def _body(self, request: GenerationRequest) -> dict[str, Any]:
        sampling = request.sampling
        return (
            ({"lora_path": request.lora} if request.lora else {})
            | {
                "input_ids": list(request.token_ids),
                "sampling_params": {
                    "max_new_tokens": sampling.max_tokens,
                    "temperature": sampling.temperature,
                    # Makes SGLang ignore stop_token_ids too; read_chunk ends turns at those.
                    "ignore_eos": True,
                    "stream_interval": (
                        min(request.stream_interval_tokens, STOPPABLE_INTERVAL_TOKENS)
                        if sampling.stop_token_ids
                        else request.stream_interval_tokens
                    ),
                },
                "return_logprob": True,
                "top_logprobs_num": sampling.top_logprobs,
                "stream": True,
                "extra_key": request.salt,
            }
            | ({"return_routed_experts": True} if sampling.routed_experts else {})
        )

    def _score_body(self, request: ScoreRequest) -> dict[str, Any]:
        """Return a request that samples nothing, and uses no cached KV."""
        self._check_token_ids(request.token_ids, ScoreRefused)
        return {
            "input_ids": list(request.token_ids),
            "sampling_params": {"max_new_tokens": 0, "temperature": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": request.top_logprobs,
            "extra_key": uuid.uuid4().hex,  # unique, so that no cached KV is used
        }

    def _read_scores(self, answer: Any, request: ScoreRequest) -> ExternalScores:
        meta = answer["meta_info"]
        positions = meta["input_token_logprobs"][request.start :]
        top = None
        if request.top_logprobs:
            top = _read_top(meta["input_top_logprobs"][request.start :])
        return ExternalScores(logprobs=[entry[0] for entry in positions], top=top)

    # ------------------------------------------------------------ pauses and memory

    async def pause(self, mode: Literal["abort", "keep"]) -> None:
        """Stop sampling. Frozen requests are resumed to be aborted, because SGLang cannot
        abort them frozen."""
        if mode == "abort" and self._is_frozen:
            await self._abort({"abort_all": True})
            await self.resume()
        body = {"mode": "abort" if mode == "abort" else "in_place"}
        await self._control("/pause_generation", body, timeout_s=PAUSE_TIMEOUT_S)
        self._is_frozen = mode == "keep"

    async def resume(self) -> None:
        """Sample again. SGLang requires a body; emptying CUDA's cache would only take time."""
        await self._control("/continue_generation", {"torch_empty_cache": False})
        self._is_frozen = False

    async def preemptions(self) -> int | None:
        """Return the retractions that requests have reported."""
        return self._retractions

    async def sleep(self, level: SleepLevel, tags: Sequence[MemoryTag]) -> None:
        """Release memory. SGLang crashes if it sleeps already, so the caller keeps track."""
        await self._control(
            "/release_memory_occupation", {"tags": list(tags)}, timeout_s=MEMORY_TIMEOUT_S
        )

    async def wake(self, tags: Sequence[MemoryTag]) -> None:
        """Allocate memory again; weights are restored only if the server keeps a CPU copy."""
        await self._control(
            "/resume_memory_occupation", {"tags": list(tags)}, timeout_s=MEMORY_TIMEOUT_S
        )

    # ------------------------------------------------------------ weights

    async def _load_files(self, directory: Path, label: str) -> None:
        body = {
            "model_path": str(directory),
            "weight_version": label,
            # While requests are frozen, SGLang would refuse it after changing the weights. Nothing
            # depends on it, because each version's KV has its own extra_key.
            "flush_cache": not self._is_frozen,
            "abort_all_requests": False,
            "torch_empty_cache": False,
        }
        path = "/update_weights_from_disk"
        try:
            await self._http.call("POST", path, body, timeout_s=UPDATE_TIMEOUT_S)
        except HttpStatusError as error:
            if UPDATED_ANYWAY not in error.why:
                raise
            await self._set_label(label)  # the weights and the tokens' labels have it already
        else:
            await self._verify(label)

    async def _begin_update(self) -> None:
        try:
            await self._http.call("POST", "/begin_weight_update", {"selector": "all"})
        except HttpStatusError:  # a dead adapter has left a session open
            await self._http.call("POST", "/end_weight_update", {})
            await self._http.call("POST", "/begin_weight_update", {"selector": "all"})

    async def _send(self, tensors: Mapping[str, torch.Tensor], label: str) -> bool:
        assert self._sender is not None, "takes_tensors was not declared"
        buckets = list(packs(tensors.items(), lambda named: named[1].nbytes, BUCKET_BYTES))
        for number, bucket in enumerate(buckets, 1):
            is_last = number == len(buckets)
            fields = {"flush_cache": is_last and not self._is_frozen, "abort_all_requests": False}
            try:
                await self._sender.send(
                    dict(bucket), fields | ({"weight_version": label} if is_last else {})
                )
            except HttpStatusError as error:
                if not is_last or UPDATED_ANYWAY not in error.why:
                    raise
                return True
        return False

    async def _end_update(self, label: str) -> None:
        await self._http.call("POST", "/end_weight_update", {}, timeout_s=END_TIMEOUT_S)


make_adapter = SglangAdapter
