"""Adapter of a vLLM server: tokens in and out, media, sleep and pauses over its RL routes.

Implements ``EngineAdapter``; made by ``external/worker.py``. `vllm_releases.py` has the differences
between releases, docs/vllm-engine.md the server's observed behaviour that the adapter relies on.
vLLM sleeps as a whole and wakes by parts: to put only one part to sleep, the rest is woken again.
Requests go through ``http.py``, weights through ``vllm_weights.py``.
"""

import base64
import io
import json
import re
from array import array
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
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
    OptionalAdapterMethods,
    ScoreRequest,
    TopLogprobs,
    VersionLabel,
    routed_experts_column,
)
from tidegate.engine.external.http import CONTROL_TIMEOUT_S, HttpEngine, HttpStatusError
from tidegate.engine.external.vllm_loras import VllmLoras
from tidegate.engine.external.vllm_releases import (
    GENERATE,
    START_HINT,
    VllmServerInfo,
    accepted_salt,
    check_routes,
    read_server_info,
)
from tidegate.engine.external.vllm_weights import LOAD_TIMEOUT_S, VllmWeights
from tidegate.errors import (
    ConfigError,
    EngineGone,
    EngineHeld,
    ScoreRefused,
    TurnRefused,
    WeightsRefused,
)
from tidegate.transport.attachments import Attachment
from tidegate.transport.media import Media, MediaKind
from tidegate.transport.messages import SamplingParams
from tidegate.transport.sleep_messages import MEMORY_TAGS, MemoryTag, SleepLevel

IMPOSSIBLE = -9999.0
"""vLLM's log-prob of a token that could not be sampled, because JSON has no infinity."""


class _Top(msgspec.Struct):
    token_id: int
    logprob: float
    rank: int | None
    """Rank in the vocabulary; null from `tidegate serve` for a sampled token that is not among the
    likeliest."""


class _Token(msgspec.Struct):
    token_id: int
    logprob: float
    top_logprobs: list[_Top] = []


class _Logprobs(msgspec.Struct):
    content: list[_Token] | None = None


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None
    weight_versions: list[_Span] | None = None
    sampling_mask: list[list[int]] | None = None
    """For each of ``token_ids``, the tokens it was sampled from; from 0.28 on."""
    routed_experts: str | None = None
    """Base64 of a .npy file: experts [P, L, k] of all positions but the last token's; with the
    finish reason."""


class Event(msgspec.Struct):
    """One event of a stream."""

    choices: list[_Choice] = []
    error: Any = None


_event_decoder = msgspec.json.Decoder(Event)


def read_event(data: bytes) -> Event:
    """Decode the data of one event.

    Raises:
        msgspec.DecodeError: the data is not an event.
    """
    return _event_decoder.decode(data)


def to_chunk(choice: _Choice, sampling: SamplingParams) -> GeneratedChunk:
    """Convert an event's choice to a chunk, with the attachments that ``sampling`` requests.

    Raises:
        TurnRefused: its finish reason is unknown.
        EngineGone: its routed experts can't be read.
    """
    token_ids = choice.token_ids or []
    tokens = (choice.logprobs.content if choice.logprobs is not None else None) or []
    labels = choice.weight_versions
    return GeneratedChunk(
        token_ids,
        [token.logprob for token in tokens],
        _ended(choice.finish_reason),
        None if labels is None else [VersionLabel(s.version, s.start, s.end) for s in labels],
        _attachments(choice, tokens, sampling),
    )


def _attachments(
    choice: _Choice, tokens: list[_Token], sampling: SamplingParams
) -> list[Attachment]:
    attachments: list[Attachment] = []
    if sampling.top_logprobs and tokens:
        attachments += _top(tokens, sampling.top_logprobs).attachments(sampling.top_logprobs)
    if sampling.kept_tokens and choice.sampling_mask:
        kept = [sorted(ids) for ids in choice.sampling_mask]
        ids = array("i", [token_id for each in kept for token_id in each]).tobytes()
        counts = array("I", map(len, kept)).tobytes()
        attachments.append(Attachment(0, "kept_ids", 0, "int32", ids, counts=counts))
    if sampling.routed_experts and choice.routed_experts is not None:
        attachments.append(_routed_experts(choice.routed_experts))
    return attachments


def _routed_experts(encoded: str) -> Attachment:
    try:
        experts = np.load(io.BytesIO(base64.b64decode(encoded)), allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise EngineGone(f"vLLM sent routed experts that are no .npy file: {error}") from None
    if experts.ndim != 3 or experts.dtype.kind not in "iu":
        raise EngineGone(
            f"vLLM sent routed experts of shape {experts.shape} and dtype {experts.dtype}; "
            "expected are integers [positions, layers, experts per token]"
        )
    return routed_experts_column(experts)


def _ended(reason: str | None) -> Ended | None:
    match reason:
        case None | "stop" | "length" | "abort":
            return reason
    raise TurnRefused(f"vLLM ended this turn with finish reason {reason!r}; see its log")


def _place(rank: int | None) -> float:
    return float("inf") if rank is None else rank


def _top(tokens: list[_Token], k: int) -> TopLogprobs:
    top = TopLogprobs([], [])
    for token in tokens:
        top_tokens = sorted(token.top_logprobs, key=lambda top_token: _place(top_token.rank))[:k]
        top.token_ids.extend(top_token.token_id for top_token in top_tokens)
        top.logprobs.extend(
            top_token.logprob if top_token.logprob > IMPOSSIBLE else float("-inf")
            for top_token in top_tokens
        )
    return top


REQUEST = "GenerateRequest"
"""Name of the request body's schema in /openapi.json."""

MEDIA_FIELDS: Mapping[MediaKind, tuple[str, ...]] = {
    "image": ("vision_config", "image_token_id", "image_token_index"),
    "audio": ("audio_config", "audio_token_id", "audio_token_index"),
    "video": ("video_token_id", "video_token_index"),
}
"""Top-level fields of config.json that a model with this medium has. vLLM does not report its
media; it refuses unsupported ones per request."""


def takes_references(api: Mapping[str, Any]) -> bool:
    """Return whether the server reads ``content_parts``; older ones ignore them silently."""
    schema = api.get("components", {}).get("schemas", {}).get(REQUEST, {})
    return "content_parts" in schema.get("properties", {})


def media_of(model: Path) -> frozenset[MediaKind]:
    """Return the kinds of media that the model in a directory reads."""
    try:
        config = json.loads((model / "config.json").read_text())
    except (OSError, ValueError):
        return frozenset()  # other code refuses the directory
    return frozenset(
        kind for kind, fields in MEDIA_FIELDS.items() if any(field in config for field in fields)
    )


def content_part(media: Media) -> dict[str, str]:
    """Convert a medium to an entry of ``content_parts``; a path becomes a URL."""
    url = media.url
    if url.startswith("/"):
        url = Path(url).as_uri()
    return {"type": f"{media.kind}_url", "url": url}


MEMORY_TIMEOUT_S = 300.0
"""Seconds to copy a model to or from host memory."""

Query = Sequence[tuple[str, str]]


class VllmMemory:
    """Sleep and wake of one server."""

    def __init__(self, post: Callable[[str, Query], Awaitable[Any]]) -> None:
        """``post`` calls a route with a query."""
        self._post = post
        self._asleep: set[MemoryTag] = set()
        self._level: SleepLevel = 1

    async def sleep(self, level: SleepLevel, tags: Sequence[MemoryTag]) -> None:
        """Put these parts to sleep, beside those that sleep already."""
        asleep = self._asleep | set(tags)
        if "weights" in tags:
            self._level = level
        if self._asleep:
            await self.wake_all()
        # Weights that stay awake must keep their contents over the sleep and wake.
        sleep_level = self._level if "weights" in asleep else 1
        await self._post("/sleep", [("level", str(sleep_level)), ("mode", "abort")])
        self._asleep = set(MEMORY_TAGS)
        if awake_tags := [tag for tag in MEMORY_TAGS if tag not in asleep]:
            await self.wake(awake_tags)

    async def wake(self, tags: Sequence[MemoryTag]) -> None:
        """Wake these parts. vLLM samples again once all are awake, so the caller
        must pause it then."""
        answer = await self._post("/wake_up", [("tags", tag) for tag in tags])
        self._asleep.difference_update(tags)
        expected = "sleeping" if self._asleep else "awake"
        # Older releases answer with an empty body.
        status = answer.get("status", expected) if isinstance(answer, dict) else expected
        if status != expected:
            raise EngineGone(
                f"vLLM was asked to wake {' and '.join(tags)}, and reports {status!r} where "
                f"{expected!r} was expected; does another client put it to sleep?"
            )

    async def wake_all(self) -> None:
        """Wake everything. Harmless if nothing sleeps."""
        await self._post("/wake_up", [])
        self._asleep.clear()


PAUSE_TIMEOUT_S = 60.0
"""Seconds for a pause, which waits for the current step: a long prefill at worst."""

SAMPLING = frozenset(
    {"stop_token_ids", "top_k", "top_p", "min_p", "repetition_penalty", "top_logprobs"}
)
"""Sampling options that vLLM implements as Tidegate documents them. Omitted: penalties on output
tokens and stop strings, because vLLM takes a continued turn's output for its prompt; and
``min_tokens``, which in vLLM also bans the model's own stop tokens."""


_LORA_SPOILS_OTHERS = (
    "vLLM on a CPU applies LoRA adapters to turns without one in the same step; give "
    "each turn an adapter, unload all adapters, or run vLLM on a GPU"
)

_NO_LORA = "adapters are read from files; leave #weights= out of the server's URL"


def make_adapter(url: str, model: Path, *, weights: str = "disk") -> "VllmAdapter":
    """Make the adapter of the server at ``url``, which serves the model in the directory ``model``.

    ``weights`` is the transfer method, one of ``vllm_weights.TRANSFER_METHODS``.

    Raises:
        ConfigError: ``weights`` is none of them.
    """
    return VllmAdapter(HttpEngine(url), model, weights=weights)


class VllmAdapter(OptionalAdapterMethods):
    """Adapter of one vLLM server."""

    def __init__(self, http: HttpEngine, model: Path, *, weights: str) -> None:
        self._http = http
        self._model = model.resolve()
        self._name = ""
        """The model's name in requests."""
        self._media: frozenset[MediaKind] = frozenset()
        """Kinds of media that the model reads."""
        self._info: VllmServerInfo | None = None
        self._memory = VllmMemory(self._post_query)
        self._loras = VllmLoras(http)
        self._weights = VllmWeights(http, self._model, weights)

    @property
    def _server_info(self) -> VllmServerInfo:
        assert self._info is not None, "open() comes first"
        return self._info

    # ------------------------------------------------------------ start and end

    async def open(self, label: str) -> Capabilities:
        """Load the model's own weights; leave the server awake, unpaused and without requests."""
        version = str((await self._http.wait_for("/version")).get("version"))
        try:
            api = await self._http.call("GET", "/openapi.json")
            paths = api["paths"]
            check_routes(version, paths)
            info = await self._info_answer()
            models = await self._http.call("GET", "/v1/models")
            self._info = read_server_info(version, paths, info)
            self._name = models["data"][0]["id"]
            self._weights.check_transfer(self._info)
            self._media = media_of(self._model) if takes_references(api) else frozenset()
            if self._info.can_sleep:  # an earlier adapter may have died while it slept
                await self._memory.wake_all()
            await self.pause("abort")
            await self._loras.unload_left(models)
            await self._weights.open(self._info, label)
            await self.resume()
            await self._probe(label)
        except (HttpStatusError, WeightsRefused, EngineGone) as error:
            raise ConfigError(f"vLLM at {self._http.url} can't be used: {error}") from error
        return self._capabilities(int(models["data"][0]["max_model_len"]))

    async def _info_answer(self) -> Any:
        """Return the answer of ``/server_info``, for which vLLM lists its packages."""
        try:
            return await self._http.call("GET", "/server_info", query={"config_format": "json"})
        except HttpStatusError as error:
            if not any(word in error.why for word in ("splitlines", "pip list")):
                raise
            raise ConfigError(
                f"vLLM at {self._http.url} can't list its own packages, which its /server_info "
                f"reports ({error.why}): install pip in vLLM's environment, by `uv pip install "
                f"pip` or `python -m ensurepip`, and start vLLM anew"
            ) from error

    def _capabilities(self, context_tokens_max: int) -> Capabilities:
        release = self._server_info
        spoils = _LORA_SPOILS_OTHERS if release.is_on_cpu and release.lora_rank_max else ""
        return Capabilities(
            engine=f"vllm {release.text}",
            context_tokens_max=context_tokens_max,
            running_turns_max=release.running_turns_max,
            has_processed_logprobs=release.has_processed_logprobs,
            freezes=True,
            keeps_kv=release.has_spans and release.stream_interval_tokens == 1,
            sampling=SAMPLING | self._attachment_options(),
            top_logprobs_max=release.top_logprobs_max,
            scores=frozenset() if spoils else frozenset({"logprobs"}),
            dtype=release.dtype,
            num_blocks=release.num_blocks,
            block_tokens=release.block_tokens,
            media=self._media,
            sleep_levels=frozenset({1, 2}) if release.can_sleep else frozenset(),
            takes_tensors=self._weights.takes_tensors,
            takes_patches=self._weights.takes_patches(release),
            lora_rank_max=0 if self._weights.takes_tensors else release.lora_rank_max,
            lora_lacks=_NO_LORA if self._weights.takes_tensors else release.lora_lacks,
            lora_spoils_others=spoils,
        )

    def _attachment_options(self) -> frozenset[str]:
        """Return the options of ``SamplingParams`` that the server's flags allow."""
        info = self._server_info
        flags = {
            "routed_experts": info.returns_routed_experts,
            "kept_tokens": info.returns_sampling_mask,
        }
        return frozenset(option for option, is_set in flags.items() if is_set)

    async def _probe(self, label: str) -> None:
        """Sample one token, and check that the answer has all fields that are relied on."""
        sampling = SamplingParams(max_tokens=1, temperature=0.0)
        request = GenerationRequest(token_ids=[0], sampling=sampling, salt=label)
        try:
            async with aclosing(self.generate(request)) as chunks:
                received = [chunk async for chunk in chunks]
        except TurnRefused as error:
            raise ConfigError(
                f"vLLM at {self._http.url} refused a test turn of one token, which each adapter "
                f"sends before it joins: {error}"
            ) from error
        last = received[-1]
        if self._server_info.has_spans and last.labels != [VersionLabel(label, 0, 1)]:
            raise ConfigError(
                f"vLLM {self._server_info.text} at {self._http.url} labels a token {last.labels}, "
                f"although its weights were just named {label}; is another client loading weights "
                "into it?"
            )

    async def close(self) -> None:
        """Close connections, which aborts the requests in flight."""
        await self._weights.close()
        await self._http.close()

    # ------------------------------------------------------------ requests

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GeneratedChunk, None]:
        """Sample tokens; closing the generator closes the connection, which aborts the request."""
        body = self._body(request) | {"stream": True}
        has_ended = False
        try:
            async with aclosing(self._http.events(GENERATE, body)) as events:
                async for data in events:
                    event = read_event(data)
                    if event.error is not None:
                        raise EngineGone(
                            f"{self._http.url} ended a stream with an error: {event.error}. vLLM's "
                            "log has the cause"
                        )
                    for choice in event.choices:
                        has_ended = choice.finish_reason is not None
                        yield to_chunk(choice, request.sampling)
                    if has_ended:
                        return
        except HttpStatusError as refusal:
            raise await self._refused(refusal) from refusal
        except msgspec.DecodeError as error:
            raise EngineGone(
                f"{self._http.url} sent a stream event that is not vLLM's JSON ({error}); is a "
                "proxy in between, or another server?"
            ) from error
        raise EngineGone(
            f"{self._http.url} ended a stream without a finish reason; vLLM's log says whether the "
            "server failed"
        )

    def _body(self, request: GenerationRequest) -> dict[str, Any]:
        sampling = request.sampling
        media = {"content_parts": [content_part(medium) for medium in request.media]}
        return (media if request.media else {}) | {
            "model": request.lora or self._name,
            "token_ids": list(request.token_ids),
            "cache_salt": accepted_salt(request.salt),
            # All are set, or the defaults of the model's generation_config.json would apply.
            "sampling_params": {
                "max_tokens": sampling.max_tokens,
                "temperature": sampling.temperature,
                "top_k": sampling.top_k,
                "top_p": sampling.top_p,
                "min_p": sampling.min_p,
                "repetition_penalty": sampling.repetition_penalty,
                "stop_token_ids": list(sampling.stop_token_ids),
                "ignore_eos": True,
                "detokenize": False,
                "logprobs": sampling.top_logprobs,
                # Releases that don't know it ignore it, and send every token at once.
                "stream_interval": request.stream_interval_tokens,
            },
        }

    async def _refused(self, refusal: HttpStatusError) -> Exception:
        if refusal.status == 403:
            return ConfigError(f"{refusal.why} {START_HINT}")
        if refusal.status in (429, 503):
            await self.check()  # a dead engine says 503 too
            return EngineHeld(refusal.why)
        if refusal.status >= 500:
            await self.check()
        return TurnRefused(f"vLLM refuses this turn: {refusal.why}")

    async def score(self, request: ScoreRequest) -> ExternalScores:
        """Return log-probs of given tokens at temperature 1; vLLM uses no prefix cache here."""
        if request.temperature != 1.0:
            raise ScoreRefused("vLLM scores at temperature 1 only; leave temperature out")
        k = request.top_logprobs
        body = {
            "model": self._name,
            "token_ids": list(request.token_ids),
            "sampling_params": {
                "max_tokens": 1,
                "temperature": 0.0,
                "detokenize": False,
                "prompt_logprobs": k,
            },
        }
        try:
            answer = await self._http.call("POST", GENERATE, body, timeout_s=LOAD_TIMEOUT_S)
        except HttpStatusError as refusal:
            raise ScoreRefused(f"vLLM refuses to score these tokens: {refusal.why}") from refusal
        prompt_logprobs = answer["prompt_logprobs"]
        logprobs: list[float] = []
        top = TopLogprobs([], [])
        for position in range(request.start, len(request.token_ids)):
            entries = prompt_logprobs[position]
            logprobs.append(entries[str(request.token_ids[position])]["logprob"])
            top_tokens = sorted(entries.items(), key=lambda entry: _place(entry[1]["rank"]))[:k]
            top.token_ids.extend(int(token) for token, _ in top_tokens)
            top.logprobs.extend(entry["logprob"] for _, entry in top_tokens)
        return ExternalScores(logprobs, top if k else None)

    # ------------------------------------------------------------ control

    async def pause(self, mode: Literal["abort", "keep"]) -> None:
        """Pause with the mode in the query: vLLM ignores a body, and would use ``abort``.

        Prefix caches are kept: each weight version has its own cache salt, so no request reuses KV
        of another version.
        """
        query = {"mode": mode, "clear_cache": "false"}
        await self._control("/pause", query=query, timeout_s=PAUSE_TIMEOUT_S)
        await self._expect_paused(True)

    async def resume(self) -> None:
        """Sample again."""
        await self._control("/resume")
        await self._expect_paused(False)

    async def _expect_paused(self, expected: bool) -> None:
        answer = await self._control("/is_paused", method="GET")
        if answer.get("is_paused") is not expected:
            raise EngineGone(
                f"{self._http.url} was {'paused' if expected else 'resumed'}, and says that it is "
                f"not; does another client pause it?"
            )

    async def load_weights(self, directory: Path, label: str) -> None:
        """Load weights from files; after a failure the previous ones are loaded again."""
        await self._weights.load(directory, label)

    async def load_tensors(self, tensors: Mapping[str, torch.Tensor], label: str) -> None:
        """Load weights without files; a failure half way ends the adapter."""
        await self._weights.load_tensors(tensors, label)

    async def load_patches(self, file: Path, label: str) -> None:
        """Change elements of the weights in place; a failure half way is not undone."""
        await self._weights.load_patches(file, label)

    async def rename_weights(self, label: str) -> None:
        """Set the version label of the live weights, which later tokens are attributed to."""
        await self._weights.rename(label)

    async def load_lora(self, name: str, directory: Path) -> None:
        """Load an adapter from files."""
        await self._loras.load(name, directory)

    async def unload_lora(self, name: str) -> None:
        """Unload an adapter; its name is free at once."""
        await self._loras.unload(name)

    async def sleep(self, level: SleepLevel, tags: Sequence[MemoryTag]) -> None:
        """Release memory."""
        await self._memory.sleep(level, tags)
        await self.pause("abort")

    async def wake(self, tags: Sequence[MemoryTag]) -> None:
        """Allocate memory again. vLLM unpauses itself once all is awake; no request
        is in flight then."""
        await self._memory.wake(tags)
        await self.pause("abort")

    async def _post_query(self, path: str, query: Query) -> Any:
        return await self._control(path, query=query, timeout_s=MEMORY_TIMEOUT_S)

    async def check(self) -> None:
        """Check the server and the engine process behind it."""
        try:
            await self._http.call("GET", "/health")
        except HttpStatusError as refusal:
            raise EngineGone(
                f"{self._http.url} is not healthy ({refusal}); vLLM's log says why"
            ) from refusal

    async def preemptions(self) -> int | None:
        """Return the preemption count of all its engine processes together."""
        text = await self._control("/metrics", method="GET")
        counts = re.findall(r"^vllm:num_preemptions_total(?:\{[^}]*\})? ([\d.e+]+)$", text, re.M)
        return int(sum(map(float, counts))) if counts else None

    async def _control(
        self,
        path: str,
        body: object = None,
        *,
        method: str = "POST",
        query: Mapping[str, str] | Query | None = None,
        timeout_s: float = CONTROL_TIMEOUT_S,
    ) -> Any:
        try:
            return await self._http.call(method, path, body, query=query, timeout_s=timeout_s)
        except HttpStatusError as refusal:
            raise EngineGone(f"vLLM refuses {method} {path}: {refusal}") from refusal
