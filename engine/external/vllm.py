"""Adapter of a vLLM server: tokens in and out, media, weights, sleep and pauses over its RL routes.

docs/vllm-engine.md has the server's observed behaviour that the adapter relies on. Version limits
were read in the releases, and tried with 0.32.0. An update of a running vLLM crashes it, so weights
are loaded only while it is paused.
"""

import base64
import hashlib
import io
import json
import re
from array import array
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

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
from tidegate.engine.external.host_weights import is_tied, read_mixture, read_sizes
from tidegate.engine.external.http import HttpStatusError, Query
from tidegate.engine.external.http_adapter import (
    MEMORY_TIMEOUT_S,
    PAUSE_TIMEOUT_S,
    HttpAdapter,
    StreamEvent,
)
from tidegate.engine.external.tensor_senders import TensorSender, VllmIpcSender, VllmNcclSender
from tidegate.engine.external.vllm_patches import EXTENSION, RPC
from tidegate.errors import ConfigError, EngineGone, EngineHeld, TurnRefused, WeightsRefused
from tidegate.transport.attachments import Attachment
from tidegate.transport.images import collapsed
from tidegate.transport.media import Media, MediaKind
from tidegate.transport.messages import SamplingParams
from tidegate.transport.printable import print_stderr
from tidegate.transport.sleep_messages import MEMORY_TAGS, MemoryTag, SleepLevel
from tidegate.transport.weight_channels.cuda_memory import Gpu as gpu_of
from tidegate.transport.weight_channels.cuda_nccl import NcclFailed, nccl_library, own_device

TRANSFER_METHODS = ("disk", "nccl", "nccl-unpacked", "ipc")
"""Values of ``#weights=`` in an engine URL."""

LOAD_TIMEOUT_S = 600.0
"""Seconds to read a model from disk. vLLM may never answer an update that fails inside it."""

PHASE_TIMEOUT_S = 120.0
"""Seconds to begin or finish an update, in which vLLM converts the model's layers."""

SAMPLING = frozenset(
    {"stop_token_ids", "top_k", "top_p", "min_p", "repetition_penalty", "top_logprobs"}
)
"""Sampling options that vLLM implements as Tidegate documents them. Omitted: penalties on output
tokens and stop strings, because vLLM takes a continued turn's output for its prompt; and
``min_tokens``, which in vLLM also bans the model's own stop tokens."""

PATCHED_ARCHITECTURES = frozenset(
    {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
)
"""Architectures of whose weights vLLM computes with no other copy or layout, which a change of
elements would not reach. Mixtures, latent attention and state-space layers have such."""

UNNAMED_LABEL = "default"
"""Name of a server's weights until they are named."""

# ---------------------------------------------------------------- the server's properties

OLDEST_SUPPORTED = (0, 21)
"""First release with pauses over several API servers, and updates that begin and end."""

LABELS_SINCE = (0, 27)
"""First release with ``/weight_info`` and ``/update_weight_version``."""

SPANS_SINCE = (0, 32)
"""First release with ``weight_versions`` in the last event: whose weights sampled which tokens."""

TRANSFER_SINCE = (0, 32)
"""First release in which a trainer passes an NCCL unique id in ``init_info``, and
may leave again."""

PATCHES_SINCE = (0, 29)
"""First release with ``checkpoint_weight_patch.py``, which changes elements by the checkpoint's
names and indices. Before, ``sparse_nccl`` used names and indices of one rank's parameters. Up to
0.33 only NCCL's route leads to the module, so workers need an extension."""

TRANSFER_ROUTES = {
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/shutdown_weight_transfer_engine",
    "/get_world_size",
}

DEV_ROUTES = ("/pause", "/resume", "/is_paused", "/collective_rpc", "/server_info")

START_HINT = (
    "start it with VLLM_SERVER_DEV_MODE=1 in its environment, and --enable-scale-out "
    "--logprobs-mode processed_logprobs"
)

LORA_START_HINT = (
    "start it with --enable-lora --max-lora-rank RANK, and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True "
    "in its environment"
)

LORA_SPOILS_OTHERS = (
    "vLLM on a CPU applies LoRA adapters to turns without one in the same step; give "
    "each turn an adapter, unload all adapters, or run vLLM on a GPU"
)

RUNNING_TURNS_DEFAULT = 64

SALT_CHARACTERS_MAX = 128
"""Longest salt that 0.32.0 accepts."""
SALT_CHARACTERS_FORBIDDEN = frozenset("@/\\\0")
"""Characters that 0.32.0 refuses in a salt."""

MEDIA_FIELDS: Mapping[MediaKind, tuple[str, ...]] = {
    "image": ("vision_config", "image_token_id", "image_token_index"),
    "audio": ("audio_config", "audio_token_id", "audio_token_index"),
    "video": ("video_token_id", "video_token_index"),
}
"""Top-level fields of config.json that a model with this medium has. vLLM does not report its
media; it refuses unsupported ones per request."""


def read_version(text: str) -> tuple[int, int]:
    """Return the major and minor version."""
    match_ = re.match(r"(\d+)\.(\d+)", text)
    if match_ is None:
        raise ConfigError(f"a server that reports version {text!r} is not vLLM")
    return int(match_[1]), int(match_[2])


def media_of(model: Path) -> frozenset[MediaKind]:
    """Return the kinds of media that the model in a directory reads."""
    try:
        config = json.loads((model / "config.json").read_text())
    except (OSError, ValueError):
        return frozenset()  # other code refuses the directory
    return frozenset(
        kind for kind, fields in MEDIA_FIELDS.items() if any(field in config for field in fields)
    )


# ---------------------------------------------------------------- messages

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


class Event(StreamEvent):
    """One event of a stream."""

    choices: tuple[_Choice, ...] = ()


event_decoder = msgspec.json.Decoder(Event)


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
    return of_positions("routed_experts", experts)


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


def accepted_salt(salt: str) -> str:
    """Hash a salt that vLLM would refuse, because it is too long or has forbidden characters."""
    is_valid = len(salt) <= SALT_CHARACTERS_MAX and not SALT_CHARACTERS_FORBIDDEN & set(salt)
    return salt if is_valid else hashlib.sha256(salt.encode()).hexdigest()


def content_part(media: Media) -> dict[str, str]:
    """Convert a medium to an entry of ``content_parts``; a path becomes a URL."""
    url = media.url
    if url.startswith("/"):
        url = Path(url).as_uri()
    return {"type": f"{media.kind}_url", "url": url}


# ---------------------------------------------------------------- the adapter


class VllmAdapter(HttpAdapter):
    """Adapter of one vLLM server."""

    kind = "vLLM"
    generate_path = "/inference/v1/generate"
    load_lora_path = "/v1/load_lora_adapter"
    unload_lora_path = "/v1/unload_lora_adapter"
    label_path = "/weight_info"

    # Set by open().
    _version: str
    """Version as the server reports it; ``_release`` has its first two numbers."""
    _release: tuple[int, int]
    _paths: Collection[str]
    """Routes of the server."""
    _config: Mapping[str, Any]
    """The server's resolved settings."""
    _has_spans: bool
    """Whether a stream's end says whose weights sampled which tokens."""

    def __init__(self, url: str, model: Path, *, weights: str = "disk") -> None:
        """Make the adapter of the server at ``url``, which serves the model directory ``model``.

        Raises:
            ConfigError: ``weights`` is none of :data:`TRANSFER_METHODS`.
        """
        super().__init__(url, model.resolve(), weights=weights)
        if weights not in TRANSFER_METHODS:
            raise ConfigError(
                f"vLLM at {url} can't be given weights by {weights!r}; #weights= may name "
                f"{', '.join(TRANSFER_METHODS)}"
            )
        self._name = ""
        """The model's name in requests."""
        self._asleep: set[MemoryTag] = set()
        self._sleep_level: SleepLevel = 1
        """Level at which the weights sleep."""

    # ------------------------------------------------------------ start

    async def _inspect(self) -> None:
        self._version = text = str((await self._http.wait_for("/version")).get("version"))
        api = await self._http.call("GET", "/openapi.json")
        self._paths = api["paths"]
        if missing := [p for p in (*DEV_ROUTES, self.generate_path) if p not in self._paths]:
            raise ConfigError(f"this vLLM {text} has no {', '.join(missing)}; {START_HINT}")
        info = await self._info_answer()
        self._release = read_version(text)
        if self._release < OLDEST_SUPPORTED:
            raise ConfigError(
                f"vLLM {text} is too old: it lacks the pauses and weight updates that a run needs; "
                f"use {OLDEST_SUPPORTED[0]}.{OLDEST_SUPPORTED[1]} or newer"
            )
        self._config = info.get("vllm_config", {})
        mode = str(self._config.get("model_config", {}).get("logprobs_mode", ""))
        if mode.endswith("logits"):
            raise ConfigError(
                f"this vLLM {text} reports logits as log-probs (--logprobs-mode {mode}), on which "
                f"training is impossible; start it with --logprobs-mode processed_logprobs"
            )
        models = await self._http.call("GET", "/v1/models")
        self._name = models["data"][0]["id"]
        self._has_labels = self._release >= LABELS_SINCE and "/weight_info" in self._paths
        self._has_spans = self._has_labels and self._release >= SPANS_SINCE
        # On a CPU vLLM multiplies by a packed copy of the head, which loading the tied embedding
        # does not update: later tokens would be of neither the old weights nor the new.
        if self._is_on_cpu and is_tied(self._model):
            raise ConfigError(
                f"vLLM {text} on a CPU keeps the old lm_head of a tied model when it is given "
                f"new weights; untie {self._model} (tie_word_embeddings=false in config.json, and "
                "lm_head.weight in the files), or use Tidegate's own engine"
            )
        # It packs a mixture's experts for its kernels at the start, and not after a reload.
        if self._is_on_cpu and read_mixture(self._model) is not None:
            raise ConfigError(
                f"vLLM {text} on a CPU computes a mixture of experts wrongly once it is given new "
                f"weights; serve {self._model} by vLLM on a GPU, or use Tidegate's own engine"
            )
        self._server_capabilities = self._read_capabilities(api, models)

    def _read_capabilities(self, api: Mapping[str, Any], models: Any) -> Capabilities:
        """Evaluate the server's settings, ``/openapi.json`` and ``/v1/models``."""
        config, paths = self._config, self._paths
        settings, cache = config.get("model_config", {}), config.get("cache_config", {})
        scheduler, parallel = config.get("scheduler_config", {}), config.get("parallel_config", {})
        device, lora = config.get("device_config", {}).get("device"), config.get("lora_config")
        # Of several API servers only one would load an adapter, while any may get its requests.
        is_one = int(parallel.get("_api_process_count") or 1) == 1
        takes_loras = bool(lora) and self.load_lora_path in paths and is_one
        spoils_others = takes_loras and self._is_on_cpu
        top = settings.get("max_logprobs")
        # Requests can only raise the interval.
        sends_every_token = int(scheduler.get("stream_interval") or 1) == 1
        by_flag = {
            "routed_experts": settings.get("enable_return_routed_experts"),
            "kept_tokens": settings.get("return_sampling_mask"),
        }
        can_sleep = "/wake_up" in paths and bool(settings.get("enable_sleep_mode"))
        # Older servers ignore ``content_parts`` silently.
        schema = api.get("components", {}).get("schemas", {}).get("GenerateRequest", {})
        takes_references = "content_parts" in schema.get("properties", {})
        return Capabilities(
            engine=f"vllm {self._version}",
            context_tokens_max=int(models["data"][0]["max_model_len"]),
            running_turns_max=int(scheduler.get("max_num_seqs") or RUNNING_TURNS_DEFAULT),
            has_processed_logprobs=str(settings.get("logprobs_mode")).endswith(
                "processed_logprobs"
            ),
            freezes=True,
            keeps_kv=self._has_spans and sends_every_token,
            sampling=SAMPLING | {option for option, is_set in by_flag.items() if is_set},
            top_logprobs_max=20 if top is None else (2**31 if top == -1 else int(top)),
            scores=frozenset() if spoils_others else frozenset({"logprobs"}),
            # With --dtype auto resolved; empty if unknown.
            dtype=str(settings.get("dtype") or "").removeprefix("torch."),
            num_blocks=int(cache.get("num_gpu_blocks") or 0),
            block_tokens=int(cache.get("block_size") or 0),
            media=media_of(self._model) if takes_references else frozenset(),
            sleep_levels=frozenset({1, 2}) if can_sleep else frozenset(),
            # On a CPU, with quantization or LoRA, vLLM may compute with other copies of parameters.
            takes_patches=(
                self._release >= PATCHES_SINCE
                and parallel.get("worker_extension_cls") == EXTENSION
                and device == "cuda"
                and not settings.get("quantization")
                and not lora
                and read_sizes(self._model)[0] in PATCHED_ARCHITECTURES
            ),
            lora_rank_max=int(lora["max_lora_rank"]) if lora and takes_loras else 0,
            lora_lacks=LORA_START_HINT if is_one else "start it with --api-server-count 1",
            lora_spoils_others=LORA_SPOILS_OTHERS if spoils_others else "",
        )

    @property
    def _is_on_cpu(self) -> bool:
        return bool(self._config.get("device_config", {}).get("device") == "cpu")

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

    async def _make_sender(self) -> TensorSender:
        backend = self._method.removesuffix("-unpacked")
        self._refuse_transfer(backend)
        device = own_device()
        if device is None:
            where = (
                "its worker's is seen"
                if backend == "ipc"
                else "one is free that no worker of the server's has"
            )
            raise ConfigError(
                f"weights can't go to {self._http.url} by {backend}, because this process sees no "
                f"GPU: start the adapter where {where}, or leave #weights= out to load files"
            )
        workers = int((await self._http.call("GET", "/get_world_size"))["world_size"])
        if backend == "ipc":
            return VllmIpcSender(self._http, workers=workers, gpu=gpu_of(device))
        try:
            library = nccl_library()
        except NcclFailed as error:
            raise ConfigError(f"weights can't go to {self._http.url} by nccl: {error}") from error
        is_packed = self._method == "nccl"
        return VllmNcclSender(
            self._http, workers=workers, library=library, device=device, is_packed=is_packed
        )

    def _refuse_transfer(self, backend: str) -> None:
        """Refuse a server that accepts no weights through ``backend``, ``nccl`` or ``ipc``."""
        started_with = (self._config.get("weight_transfer_config") or {}).get("backend")
        if self._release < TRANSFER_SINCE or not TRANSFER_ROUTES.issubset(self._paths):
            reason = f"use {TRANSFER_SINCE[0]}.{TRANSFER_SINCE[1]} or newer"
        elif self._is_on_cpu:
            reason = "it has no GPU"
        elif started_with != backend:
            reason = (
                f"it was started with {started_with or 'no'} weight transfer; start it "
                f"""with --weight-transfer-config '{{"backend": "{backend}"}}'"""
            )
        else:
            return
        raise ConfigError(
            f"vLLM {self._version} at {self._http.url} can't be given weights by {backend}: "
            f"{reason}. Or leave #weights= out to load files"
        )

    async def _stop_all(self) -> None:
        if self._server_capabilities.sleep_levels:  # an earlier adapter may have died in its sleep
            await self._wake_all()
        await self.pause("abort")

    async def _load_model(self, label: str) -> None:
        if self._takes_tensors:
            await self._end_stale_update()
        elif self._has_labels and await self._label() == UNNAMED_LABEL and self._serves_model():
            await self.rename_weights(label)
            self._loaded = self._model, label
            return
        else:
            print_stderr(f"{self._http.url} may have other weights; loading {self._model}")
        await super()._load_model(label)

    def _serves_model(self) -> bool:
        """Whether the server was started with the model's directory, as far as this host sees."""
        started_with = Path(str(self._config.get("model_config", {}).get("model", "")))
        return not started_with.is_dir() or started_with.resolve() == self._model

    async def _capabilities(self, label: str) -> Capabilities:
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
        if self._has_spans and last.labels != [VersionLabel(label, 0, 1)]:
            raise ConfigError(
                f"vLLM {self._version} at {self._http.url} labels a token {last.labels}, "
                f"although its weights were just named {label}; is another client loading weights "
                "into it?"
            )
        return self._server_capabilities

    # ------------------------------------------------------------ requests

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GeneratedChunk, None]:
        """Sample tokens; closing the generator closes the connection, which aborts the request."""
        body = self._body(request) | {"stream": True}
        async with aclosing(self._events(body, event_decoder)) as events:
            async for event in events:
                for choice in event.choices:
                    yield to_chunk(choice, request.sampling)
                    if choice.finish_reason is not None:
                        return

    def _body(self, request: GenerationRequest) -> dict[str, Any]:
        sampling = request.sampling
        media = {"content_parts": [content_part(medium) for medium in request.media]}
        return (media if request.media else {}) | {
            "model": request.lora or self._name,
            "token_ids": collapsed(request.token_ids, request.media),
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
            await super().check()  # a dead engine says 503 too
            return EngineHeld(refusal.why)
        if refusal.status >= 500:
            await super().check()
        return await super()._refused(refusal)

    def _score_body(self, request: ScoreRequest) -> dict[str, Any]:
        """Return a request for prompt log-probs, for which vLLM uses no prefix cache."""
        return {
            "model": self._name,
            "token_ids": list(request.token_ids),
            "sampling_params": {
                "max_tokens": 1,
                "temperature": 0.0,
                "detokenize": False,
                "prompt_logprobs": request.top_logprobs,
            },
        }

    def _read_scores(self, answer: Any, request: ScoreRequest) -> ExternalScores:
        k = request.top_logprobs
        logprobs: list[float] = []
        top = TopLogprobs([], [])
        for position in range(request.start, len(request.token_ids)):
            entries = answer["prompt_logprobs"][position]
            logprobs.append(entries[str(request.token_ids[position])]["logprob"])
            top_tokens = sorted(entries.items(), key=lambda entry: _place(entry[1]["rank"]))[:k]
            top.token_ids.extend(int(token) for token, _ in top_tokens)
            top.logprobs.extend(entry["logprob"] for _, entry in top_tokens)
        return ExternalScores(logprobs, top if k else None)

    # ------------------------------------------------------------ control

    async def check(self) -> None:
        """Check also that the loop of every rank answers, as it does between two steps.

        ``/health`` only says that no process has ended. Another call in flight may occupy the
        loops for longer; it has a deadline of its own.
        """
        await super().check()
        http = self._http
        begun = http.calls_begun
        if begun > http.calls_ended:
            return
        try:
            await http.call("GET", "/is_paused", timeout_s=PAUSE_TIMEOUT_S)
        except HttpStatusError:
            pass  # ranks differ while they are being paused
        except EngineGone:
            if http.calls_begun == begun + 1:
                raise

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

    async def sleep(self, level: SleepLevel, tags: Sequence[MemoryTag]) -> None:
        """Release memory. vLLM puts all of it to sleep at once, so wake the rest."""
        asleep = self._asleep | set(tags)
        if "weights" in tags:
            self._sleep_level = level
        if self._asleep:
            await self._wake_all()
        # Weights that stay awake must keep their contents over the sleep and wake.
        sleep_level = self._sleep_level if "weights" in asleep else 1
        await self._sleep_call("/sleep", [("level", str(sleep_level)), ("mode", "abort")])
        self._asleep = set(MEMORY_TAGS)
        if awake_tags := [tag for tag in MEMORY_TAGS if tag not in asleep]:
            await self._wake(awake_tags)
        await self.pause("abort")

    async def wake(self, tags: Sequence[MemoryTag]) -> None:
        """Allocate memory again. vLLM unpauses itself once all is awake; no request
        is in flight then."""
        await self._wake(tags)
        await self.pause("abort")

    async def _wake(self, tags: Sequence[MemoryTag]) -> None:
        answer = await self._sleep_call("/wake_up", [("tags", tag) for tag in tags])
        self._asleep.difference_update(tags)
        expected = "sleeping" if self._asleep else "awake"
        # Older releases answer with an empty body.
        status = answer.get("status", expected) if isinstance(answer, dict) else expected
        if status != expected:
            raise EngineGone(
                f"vLLM was asked to wake {' and '.join(tags)}, and reports {status!r} where "
                f"{expected!r} was expected; does another client put it to sleep?"
            )

    async def _wake_all(self) -> None:
        """Wake all memory. Harmless if nothing sleeps."""
        await self._sleep_call("/wake_up", [])
        self._asleep.clear()

    async def _sleep_call(self, path: str, query: Query) -> Any:
        return await self._control(path, query=query, timeout_s=MEMORY_TIMEOUT_S)

    async def preemptions(self) -> int | None:
        """Return the preemption count of all its engine processes together."""
        text = await self._control("/metrics", method="GET")
        counts = re.findall(r"^vllm:num_preemptions_total(?:\{[^}]*\})? ([\d.e+]+)$", text, re.M)
        return int(sum(map(float, counts))) if counts else None

    # ------------------------------------------------------------ weights

    async def _load_files(self, directory: Path, label: str) -> None:
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
        await self._http.call("POST", "/collective_rpc", body, timeout_s=LOAD_TIMEOUT_S)
        await self._set_label(label)

    async def load_patches(self, file: Path, label: str) -> None:
        """Change elements of the weights in place. A failure half way is not undone."""
        self._loaded = None  # no directory has the weights any more
        body = {"method": RPC, "kwargs": {"path": str(file)}}
        try:
            await self._http.call("POST", "/collective_rpc", body, timeout_s=LOAD_TIMEOUT_S)
        except HttpStatusError as refusal:
            raise WeightsRefused(
                f"vLLM can't change elements of its weights: {refusal.why}"
            ) from refusal
        await self._set_label(label)

    async def _end_stale_update(self) -> None:
        """End an update that a dead adapter left open, and restore half-loaded layers.

        vLLM counts what each layer has received, so a full set after a partial one would exceed the
        layer's size; an empty update resets the count. The weights are overwritten afterwards.
        """
        try:
            await self._begin_update()
        except HttpStatusError as refusal:
            if "already active" not in refusal.why:
                raise
        await self._phase("/finish_weight_update")

    async def _begin_update(self) -> None:
        await self._phase("/start_weight_update")

    async def _end_update(self, label: str) -> None:
        await self._phase("/finish_weight_update", {"weight_version": label})

    async def _phase(self, path: str, body: object = None) -> None:
        await self._http.call("POST", path, body, timeout_s=PHASE_TIMEOUT_S)


make_adapter = VllmAdapter
