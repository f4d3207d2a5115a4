"""Adapter of an SGLang server: generation, pauses, weight updates and sleep over its own routes.

Implements ``EngineAdapter``; made by ``external/worker.py``. It works around three observed faults
of SGLang: an update reported as failed after the weights had changed, two names for one set of
weights, and a crash on a token id outside the vocabulary. Its parts are ``sglang_server.py``
(inspection), ``sglang_weights.py``, ``sglang_loras.py`` and ``http.py``.
"""

import asyncio
import base64
import contextlib
import itertools
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, Literal

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
    routed_experts_column,
)
from tidegate.engine.external.host_weights import read_mixture, read_sizes
from tidegate.engine.external.http import HttpEngine, HttpStatusError
from tidegate.engine.external.sglang_loras import START_HINT, SglangLoras
from tidegate.engine.external.sglang_server import (
    has_processed_logprobs,
    labels_tokens,
    read_server_info,
)
from tidegate.engine.external.sglang_weights import BucketSender, load, make_sender
from tidegate.engine.models.checkpoint import read_tensors
from tidegate.errors import EngineGone, ScoreRefused, TurnRefused, WeightsRefused
from tidegate.transport.attachments import Attachment
from tidegate.transport.printable import print_stderr
from tidegate.transport.sleep_messages import MemoryTag, SleepLevel

UPDATED_ANYWAY = "Weights were updated"
"""Start of SGLang's error for an update that succeeded and only failed to flush its cache."""

TOP_LOGPROBS_MAX = 20

STOPPABLE_INTERVAL_TOKENS = 4
"""Largest stream interval of turns with stop tokens. SGLang samples beyond a stop token until the
adapter has read it, so a longer interval would waste 1.5 tokens of a turn for each 3 of it."""

UPDATE_TIMEOUT_S = 900.0
"""Seconds for an update: a model of a terabyte, from a shared disk."""

PAUSE_TIMEOUT_S = 60.0
"""Seconds for a pause: to abort, SGLang checks once a second whether clients still read."""

CALL_TIMEOUT_S = 60.0
"""Seconds for other control calls, which wait for the current step: a long prefill
on a slow machine."""

MEMORY_TIMEOUT_S = 300.0
"""Seconds to copy a model to or from host memory."""

SCORE_TIMEOUT_S = 600.0
"""Seconds for a score, which queues behind the running turns."""


def make_adapter(url: str, model: Path, *, weights: str = "disk") -> "SglangAdapter":
    """Make the adapter of the server at ``url``, which was started with the model in ``model``.

    ``weights`` is the transfer method, one of ``sglang_weights.TRANSFER_METHODS``.
    """
    return SglangAdapter(HttpEngine(url), model, weights=weights)


class SglangAdapter:
    """Adapter of one SGLang server."""

    def __init__(self, http: HttpEngine, model: Path, *, weights: str = "disk") -> None:
        self._http = http
        self._weights = weights
        self._sender: BucketSender | None = None
        """Transfer method for tensors; None for files."""
        self._loras = SglangLoras(http)
        self._loaded_directory: Path = model
        """Directory of the weights that the server has loaded."""
        self._label = ""
        self._architecture, self._vocab_tokens = read_sizes(model)
        self._mixture = read_mixture(model)
        self._is_incremental = False
        """Whether stream messages contain new tokens only, rather than all so far."""
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

    # ------------------------------------------------------------ from start to end

    async def open(self, label: str) -> Capabilities:
        """Load the model's own weights; leave the server awake, unpaused and without requests."""
        server = await read_server_info(self._http, self._architecture)
        self._is_incremental = server.streams_incrementally
        if server.samples_ahead:
            print_stderr(
                f"SGLang at {self._http.url} uses its overlap scheduler, so kv_policy='keep' is "
                "refused: it would label tokens of old weights as new; start it with "
                "--disable-overlap-schedule"
            )
        await self.resume()  # a dead adapter may have left it paused
        await self._abort({"abort_all": True})
        await self._pause("abort")
        if self._weights == "disk":
            if server.lora_rank_max:
                await self._loras.unload_left()
            await self._load(self._loaded_directory, label)
        else:
            self._sender = make_sender(self._http, self._weights, server)
            model_tensors = await asyncio.to_thread(
                lambda: dict(read_tensors(self._loaded_directory))
            )
            await self.load_tensors(model_tensors, label)
        await self.resume()
        return Capabilities(
            engine=f"sglang {server.version}",
            context_tokens_max=server.context_tokens_max,
            running_turns_max=server.running_turns_max,
            has_processed_logprobs=await has_processed_logprobs(self._http),
            freezes=True,
            keeps_kv=not server.samples_ahead and await labels_tokens(self._http),
            # top_k, top_p and min_p apply to sampling but not to the reported log-probs; penalties
            # would count output sampled elsewhere as prompt; min_tokens would also ban the model's
            # own EOS, which Tidegate does not.
            sampling=frozenset({"stop_token_ids", "top_logprobs"})
            | ({"routed_experts"} if server.returns_routed_experts else set()),
            top_logprobs_max=TOP_LOGPROBS_MAX,
            scores=frozenset({"logprobs"}),
            dtype=server.dtype,
            num_blocks=server.num_blocks,
            block_tokens=server.block_tokens,
            takes_tensors=self._sender is not None,
            sleep_levels=server.sleep_levels,
            lora_rank_max=0 if self._sender is not None else server.lora_rank_max,
            # An adapter of an up projection alone is accepted, and crashes the server when used.
            lora_fills_matrices=True,
            lora_lacks=START_HINT,
        )

    async def close(self) -> None:
        """Close connections, which aborts requests that are left."""
        for task in self._aborts:
            task.cancel()
        if self._sender is not None:
            await self._sender.close()
        await self._http.close()

    async def check(self) -> None:
        """Check that the server answers."""
        await self._get("/health")

    # ------------------------------------------------------------ turns

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GeneratedChunk, None]:
        """Sample tokens; converts SGLang's cumulative messages to chunks of new tokens."""
        self._check_token_ids(request.token_ids)
        rid = f"tidegate-{self._run_id}-{next(self._rids)}"
        stops = frozenset(request.sampling.stop_token_ids)
        known_tokens = retractions = 0
        has_ended = False
        messages = self._messages(self._body(request) | {"rid": rid})
        try:
            async for message in messages:
                now = message["meta_info"].get("num_retractions", 0)
                self._retractions += now - retractions
                retractions = now
                has_ended = message["meta_info"].get("finish_reason") is not None
                start = 0 if self._is_incremental else known_tokens
                chunk = _read_chunk(
                    message, start, stops, top_logprobs=request.sampling.top_logprobs
                )
                known_tokens += len(chunk.token_ids)
                if chunk.ended and request.sampling.routed_experts:
                    if (
                        not has_ended
                    ):  # cut off at a stop token; experts come with the request's end
                        await self._abort({"rid": rid})
                        message = await _last(message, messages)
                        has_ended = True
                    positions = len(request.token_ids) + known_tokens - 1
                    experts = self._routed_experts(message, positions)
                    chunk = chunk._replace(attachments=[*chunk.attachments, *experts])
                if chunk.token_ids or chunk.ended:
                    yield chunk
                if chunk.ended:
                    return
            raise EngineGone(
                f"{self._http.url}/generate ended a stream without a finish reason; SGLang's log "
                "says whether the server failed"
            )
        finally:
            if not has_ended:
                self._abort_soon(rid)
            await messages.aclose()

    def _routed_experts(self, message: dict[str, Any], positions: int) -> list[Attachment]:
        """Return the experts of the first ``positions`` tokens, if the message has any: base64 of
        int32 [P, layers, k], of all positions but the last token's and all of the model's layers.

        Raises:
            EngineGone: they can't be read.
        """
        encoded = message["meta_info"].get("routed_experts")
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
        return [routed_experts_column(experts[:positions, mixture.mixture_layers])]

    async def _messages(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        try:
            async with aclosing(self._http.events("/generate", body)) as events:
                async for event in events:
                    message = msgspec.json.decode(event)
                    if "error" in message:
                        raise EngineGone(
                            f"{self._http.url}/generate failed: {message['error']}. SGLang's log "
                            "has the cause"
                        )
                    yield message
        except HttpStatusError as error:
            if error.status >= 500:
                raise EngineGone(str(error)) from error
            raise TurnRefused(f"SGLang refuses this turn: {error.why}") from error

    def _abort_soon(self, rid: str) -> None:
        """Abort in a task of its own, because a task that is being cancelled cannot await."""

        async def abort() -> None:
            with contextlib.suppress(EngineGone):  # other calls report it
                await self._abort({"rid": rid})

        task = asyncio.get_running_loop().create_task(abort(), name=f"abort {rid}")
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _abort(self, selection: dict[str, Any]) -> None:
        await self._post("/abort_request", selection)

    def _check_token_ids(self, token_ids: Sequence[int]) -> None:
        """Check token ids, because SGLang crashes on an index outside its embedding."""
        largest_id = max(token_ids, default=0)
        if largest_id >= self._vocab_tokens or min(token_ids, default=0) < 0:
            raise TurnRefused(
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

    # ------------------------------------------------------------ pauses

    async def pause(self, mode: Literal["abort", "keep"]) -> None:
        """Stop sampling. Frozen requests are resumed to be aborted, because SGLang cannot
        abort them frozen."""
        if mode == "abort" and self._is_frozen:
            await self._abort({"abort_all": True})
            await self.resume()
        await self._pause("abort" if mode == "abort" else "in_place")

    async def _pause(self, mode: Literal["abort", "in_place"]) -> None:
        await self._post("/pause_generation", {"mode": mode}, timeout_s=PAUSE_TIMEOUT_S)
        self._is_frozen = mode == "in_place"

    async def resume(self) -> None:
        """Sample again. SGLang requires a body; emptying CUDA's cache would only take time."""
        await self._post("/continue_generation", {"torch_empty_cache": False})
        self._is_frozen = False

    async def preemptions(self) -> int | None:
        """Return the retractions that requests have reported."""
        return self._retractions

    # ------------------------------------------------------------ weights

    async def load_weights(self, directory: Path, label: str) -> None:
        """Load weights from disk. After a failure the previous weights are loaded again, because
        SGLang's own rollback reloads the path that failed."""
        previous, previous_label = self._loaded_directory, self._label
        try:
            await self._load(directory, label)
        except WeightsRefused as error:
            try:
                await self._load(previous, previous_label)
            except WeightsRefused as worse:
                raise EngineGone(
                    f"{error}; and the previous weights can't be loaded: {worse}"
                ) from error
            raise

    async def _load(self, directory: Path, label: str) -> None:
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
                raise WeightsRefused(
                    f"SGLang refuses the weights in {directory}: {error.why}. It must see that "
                    f"directory by the same path as its adapter does (--weights-directory)"
                ) from error
            await self._rename(label)
        await self._verify(label)
        self._loaded_directory, self._label = directory, label

    async def load_tensors(self, tensors: Mapping[str, torch.Tensor], label: str) -> None:
        """Load weights without files. A failure half way cannot be undone, and ends the adapter."""
        assert self._sender is not None, "takes_tensors was not declared"
        flushes = not self._is_frozen  # as in _load
        try:
            await load(self._http, self._sender, tensors, label, flushes=flushes)
        except HttpStatusError:
            await self._rename(label)
        await self._verify(label)

    async def rename_weights(self, label: str) -> None:
        """Relabel the weights, in token labels and /model_info."""
        await self._rename(label)
        await self._verify(label)
        self._label = label

    async def load_lora(self, name: str, directory: Path) -> None:
        """Load an adapter from files."""
        await self._loras.load(name, directory)

    async def unload_lora(self, name: str) -> None:
        """Unload an adapter, after requests that are being aborted have ended."""
        await self._loras.unload(name)

    async def _rename(self, label: str) -> None:
        """Set the weight version in /model_info; the weights and token labels already have it."""
        relabel = {"new_version": label, "abort_all_requests": False}
        await self._post("/update_weight_version", relabel)

    async def _verify(self, label: str) -> None:
        current = (await self._get("/model_info")).get("weight_version")
        if current != label:
            raise EngineGone(
                f"SGLang was given weights {label!r}, but reports {current!r}; does another client "
                f"load weights into it?"
            )

    async def _get(self, path: str) -> Any:
        try:
            return await self._http.call("GET", path)
        except HttpStatusError as error:
            raise EngineGone(f"SGLang fails: {error}") from error

    async def _post(self, path: str, body: object, *, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """Post a control call that fails only if something is wrong with the server."""
        try:
            return await self._http.call("POST", path, body, timeout_s=timeout_s)
        except HttpStatusError as error:
            raise EngineGone(f"SGLang fails: {error}") from error

    # ------------------------------------------------------------ memory

    async def sleep(self, level: SleepLevel, tags: Sequence[MemoryTag]) -> None:
        """Release memory. SGLang crashes if it sleeps already, so the caller keeps track."""
        await self._post(
            "/release_memory_occupation", {"tags": list(tags)}, timeout_s=MEMORY_TIMEOUT_S
        )

    async def wake(self, tags: Sequence[MemoryTag]) -> None:
        """Allocate memory again; weights are restored only if the server keeps a CPU copy."""
        await self._post(
            "/resume_memory_occupation", {"tags": list(tags)}, timeout_s=MEMORY_TIMEOUT_S
        )

    # ------------------------------------------------------------ scores

    async def score(self, request: ScoreRequest) -> ExternalScores:
        """Return log-probs of given tokens, by a request that samples nothing."""
        if request.temperature != 1.0:
            raise ScoreRefused(
                f"SGLang reports a prompt's log-probs at temperature 1 only, not at "
                f"{request.temperature}; use Tidegate's own engine"
            )
        self._check_scored_token_ids(request.token_ids)
        body = {
            "input_ids": list(request.token_ids),
            "sampling_params": {"max_new_tokens": 0, "temperature": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": request.top_logprobs,
            "extra_key": uuid.uuid4().hex,  # unique, so that no cached KV is used
        }
        try:
            answer = await self._http.call("POST", "/generate", body, timeout_s=SCORE_TIMEOUT_S)
            meta = answer["meta_info"]
        except HttpStatusError as error:
            raise ScoreRefused(f"SGLang refuses to score this: {error.why}") from error
        positions = meta["input_token_logprobs"][request.start :]
        top = None
        if request.top_logprobs:
            top = _read_top(meta["input_top_logprobs"][request.start :])
        return ExternalScores(logprobs=[entry[0] for entry in positions], top=top)

    def _check_scored_token_ids(self, token_ids: Sequence[int]) -> None:
        try:
            self._check_token_ids(token_ids)
        except TurnRefused as error:
            raise ScoreRefused(str(error)) from None


async def _last(
    message: dict[str, Any], messages: AsyncGenerator[dict[str, Any], None]
) -> dict[str, Any]:
    """Return the last message of a stream; ``message`` if no other follows."""
    async for later in messages:
        message = later
        if message["meta_info"].get("finish_reason") is not None:
            break
    return message


def _read_chunk(
    message: dict[str, Any], known_tokens: int, stop_ids: frozenset[int], *, top_logprobs: int
) -> GeneratedChunk:
    """Return the new tokens of a stream message, up to a stop token.

    Messages are cumulative: each has all tokens so far, of which ``known_tokens`` are known.
    """
    meta = message["meta_info"]
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
    """Return the top log-probs of some positions."""
    entries = [entry for position in positions for entry in position]
    return TopLogprobs([entry[1] for entry in entries], [entry[0] for entry in entries])
