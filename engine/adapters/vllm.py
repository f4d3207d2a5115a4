"""How is vLLM driven? By its own routes for reinforcement learning, tokens in and tokens out.

Knows nothing of the wire or of turns. What its versions differ in is in ``vllm_releases``. What the
server was seen to do, and what this relies on, is in docs/engines.md.
"""

import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch

from tidegate.engine.adapters.adapter import (
    Capabilities,
    Chunk,
    Request,
    ScoreRequest,
    Scores,
    TopLogprobs,
    Unable,
    VersionLabel,
)
from tidegate.engine.adapters.http import CONTROL_TIMEOUT_S, HttpEngine, Refusal
from tidegate.engine.adapters.vllm_events import read_event, to_chunk
from tidegate.engine.adapters.vllm_loras import VllmLoras
from tidegate.engine.adapters.vllm_media import content_part, media_of, takes_references
from tidegate.engine.adapters.vllm_memory import MEMORY_TIMEOUT_S, Query, VllmMemory
from tidegate.engine.adapters.vllm_releases import (
    GENERATE,
    START_IT_SO,
    Release,
    check_routes,
    read_release,
    readable_salt,
)
from tidegate.engine.adapters.vllm_weights import LOAD_TIMEOUT_S, VllmWeights
from tidegate.errors import (
    ConfigError,
    EngineGone,
    EngineHeld,
    ScoreRefused,
    TurnRefused,
    WeightsRefused,
)
from tidegate.transport.media import MediaKind
from tidegate.transport.messages import SamplingParams
from tidegate.transport.sleep_messages import MemoryTag, SleepLevel

PAUSE_TIMEOUT_S = 60.0
"""A pause waits for the step under way: a long prefill, at worst."""

SAMPLING = frozenset(
    {"stop_token_ids", "top_k", "top_p", "min_p", "repetition_penalty", "top_logprobs"}
)
"""Left out: penalties on output tokens and stop strings, for of a turn that goes on vLLM takes the
tokens so far for its prompt; ``min_tokens``, which also leaves out the model's own stop tokens; and
what it has otherwise or not at all."""


_SPOILED = (
    "vLLM on a CPU computes turns without a LoRA adapter by that of others in the same step; give "
    "each turn one, unload them, or run vLLM on a GPU"
)

_NO_LORA = "they are read from files; leave #weights= out of the server's url"


def make_adapter(url: str, model: Path, *, weights: str = "disk") -> "VllmAdapter":
    """The adapter for the server at ``url``, which serves what is in the directory ``model``.

    ``weights`` is how new ones get there, one of ``vllm_weights.WAYS``.

    Raises:
        ConfigError: it is none.
    """
    return VllmAdapter(HttpEngine(url), model, weights=weights)


class VllmAdapter(Unable):
    """One vLLM server."""

    def __init__(self, http: HttpEngine, model: Path, *, weights: str) -> None:
        self._http = http
        self._model = model.resolve()
        self._name = ""
        """The model's, in requests."""
        self._media: frozenset[MediaKind] = frozenset()
        """What its model reads beside tokens."""
        self._release: Release | None = None
        self._memory = VllmMemory(self._post_query)
        self._loras = VllmLoras(http)
        self._weights = VllmWeights(http, self._model, weights)

    @property
    def _about(self) -> Release:
        assert self._release is not None, "open() comes first"
        return self._release

    # ------------------------------------------------------------ start and end

    async def open(self, label: str) -> Capabilities:
        """Find out what is there; leave it awake, unpaused, and with nobody's requests."""
        version = str((await self._http.wait_for("/version")).get("version"))
        try:
            api = await self._http.call("GET", "/openapi.json")
            paths = api["paths"]
            check_routes(version, paths)
            info = await self._http.call("GET", "/server_info", query={"config_format": "json"})
            models = await self._http.call("GET", "/v1/models")
            self._release = read_release(version, paths, info)
            self._name = models["data"][0]["id"]
            self._weights.refuse(self._release)
            self._media = media_of(self._model) if takes_references(api) else frozenset()
            if self._release.can_sleep:  # an adapter before may have died while it slept
                await self._memory.wake_all()
            await self.pause("abort")
            await self._loras.unload_left(models)
            await self._weights.open(self._release, label)
            await self.resume()
            await self._probe(label)
        except (Refusal, WeightsRefused, EngineGone) as error:
            raise ConfigError(f"vLLM at {self._http.url} can't be used: {error}") from error
        return self._capabilities(int(models["data"][0]["max_model_len"]))

    def _capabilities(self, context_tokens_max: int) -> Capabilities:
        release = self._about
        spoiled = _SPOILED if release.is_on_cpu and release.lora_rank_max else ""
        return Capabilities(
            engine=f"vllm {release.text}",
            context_tokens_max=context_tokens_max,
            running_turns_max=release.running_turns_max,
            has_processed_logprobs=release.has_processed_logprobs,
            freezes=True,
            keeps_kv=release.has_spans,
            sampling=SAMPLING,
            top_logprobs_max=release.top_logprobs_max,
            scores=frozenset() if spoiled else frozenset({"logprobs"}),
            num_blocks=release.num_blocks,
            block_tokens=release.block_tokens,
            media=self._media,
            sleep_levels=frozenset({1, 2}) if release.can_sleep else frozenset(),
            takes_tensors=self._weights.takes_tensors,
            lora_rank_max=0 if self._weights.takes_tensors else release.lora_rank_max,
            lora_lacks=_NO_LORA if self._weights.takes_tensors else release.lora_lacks,
            lora_spoils_others=spoiled,
        )

    async def _probe(self, label: str) -> None:
        """Have one token sampled, and look whether all is told that is relied on."""
        sampling = SamplingParams(max_tokens=1, temperature=0.0)
        request = Request(token_ids=[0], sampling=sampling, salt=label)
        try:
            async with aclosing(self.generate(request)) as chunks:
                seen = [chunk async for chunk in chunks]
        except TurnRefused as error:
            raise ConfigError(f"vLLM at {self._http.url} samples nothing: {error}") from error
        last = seen[-1]
        if self._about.has_spans and last.labels != [VersionLabel(label, 0, 1)]:
            raise ConfigError(
                f"vLLM {self._about.text} at {self._http.url} labels a token {last.labels}, "
                f"although its weights were just named {label}"
            )

    async def close(self) -> None:
        """Let go of connections; requests under way are aborted by it."""
        await self._weights.close()
        await self._http.close()

    # ------------------------------------------------------------ requests

    async def generate(self, request: Request) -> AsyncGenerator[Chunk, None]:
        """Sample; closing it early closes the connection, which aborts the request."""
        body = self._body(request) | {"stream": True}
        has_ended = False
        try:
            async with aclosing(self._http.events(GENERATE, body)) as events:
                async for data in events:
                    event = read_event(data)
                    if event.error is not None:
                        raise EngineGone(f"{self._http.url} broke off a stream: {event.error}")
                    for choice in event.choices:
                        has_ended = choice.finish_reason is not None
                        yield to_chunk(choice, request.sampling.top_logprobs)
                    if has_ended:
                        return
        except Refusal as refusal:
            raise await self._refused(refusal) from refusal
        except msgspec.DecodeError as error:
            raise EngineGone(f"{self._http.url} streams what is no event: {error}") from error
        raise EngineGone(f"{self._http.url} ended a stream without saying why")

    def _body(self, request: Request) -> dict[str, Any]:
        asked = request.sampling
        media = {"content_parts": [content_part(each) for each in request.media]}
        return (media if request.media else {}) | {
            "model": request.lora or self._name,
            "token_ids": list(request.token_ids),
            "cache_salt": readable_salt(request.salt),
            # All of them, or the model's generation_config.json might have a say.
            "sampling_params": {
                "max_tokens": asked.max_tokens,
                "temperature": asked.temperature,
                "top_k": asked.top_k,
                "top_p": asked.top_p,
                "min_p": asked.min_p,
                "repetition_penalty": asked.repetition_penalty,
                "stop_token_ids": list(asked.stop_token_ids),
                "ignore_eos": True,
                "detokenize": False,
                "logprobs": asked.top_logprobs,
            },
        }

    async def _refused(self, refusal: Refusal) -> Exception:
        """What a request that was not taken means."""
        if refusal.status == 403:
            return ConfigError(f"{refusal.why} {START_IT_SO}")
        if refusal.status in (429, 503):
            await self.check()  # a dead engine says 503 too
            return EngineHeld(refusal.why)
        if refusal.status >= 500:
            await self.check()
        return TurnRefused(f"vLLM refuses this turn: {refusal.why}")

    async def score(self, request: ScoreRequest) -> Scores:
        """Log-probs of given tokens, at temperature 1; vLLM reads no prefix cache for these."""
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
        except Refusal as refusal:
            raise ScoreRefused(f"vLLM refuses to score: {refusal.why}") from refusal
        told = answer["prompt_logprobs"]
        logprobs: list[float] = []
        top = TopLogprobs([], [])
        for position in range(request.start, len(request.token_ids)):
            entries = told[position]
            logprobs.append(entries[str(request.token_ids[position])]["logprob"])
            likeliest = sorted(entries.items(), key=lambda entry: entry[1]["rank"])[:k]
            top.token_ids.extend(int(token) for token, _ in likeliest)
            top.logprobs.extend(entry["logprob"] for _, entry in likeliest)
        return Scores(logprobs, top if k else None)

    # ------------------------------------------------------------ control

    async def pause(self, mode: Literal["abort", "keep"]) -> None:
        """In the query: vLLM ignores a body, and pauses by ``abort`` whatever that says.

        Caches are left as they are, for no request with another salt sees what is in them.
        """
        query = {"mode": mode, "clear_cache": "false"}
        await self._control("/pause", query=query, timeout_s=PAUSE_TIMEOUT_S)
        await self._expect_paused(True)

    async def resume(self) -> None:
        """Let it sample again."""
        await self._control("/resume")
        await self._expect_paused(False)

    async def _expect_paused(self, expected: bool) -> None:
        answer = await self._control("/is_paused", method="GET")
        if answer.get("is_paused") is not expected:
            raise EngineGone(
                f"{self._http.url} was {'paused' if expected else 'resumed'}, and says that it is "
                f"not; does somebody else pause it, too?"
            )

    async def load_weights(self, directory: Path, label: str) -> None:
        """From files; if that fails, it has those of before."""
        await self._weights.load(directory, label)

    async def load_tensors(self, tensors: Mapping[str, torch.Tensor], label: str) -> None:
        """Without files; what fails halfway ends the adapter."""
        await self._weights.load_tensors(tensors, label)

    async def rename_weights(self, label: str) -> None:
        """Tokens are labelled by the new name."""
        await self._weights.rename(label)

    async def load_lora(self, name: str, directory: Path) -> None:
        """From files."""
        await self._loras.load(name, directory)

    async def unload_lora(self, name: str) -> None:
        """Its name is nobody's at once."""
        await self._loras.unload(name)

    async def sleep(self, level: SleepLevel, tags: Sequence[MemoryTag]) -> None:
        """Give memory back."""
        await self._memory.sleep(level, tags)
        await self.pause("abort")

    async def wake(self, tags: Sequence[MemoryTag]) -> None:
        """It goes on by itself once all is awake; nothing is under way that could."""
        await self._memory.wake(tags)
        await self.pause("abort")

    async def _post_query(self, path: str, query: Query) -> Any:
        return await self._control(path, query=query, timeout_s=MEMORY_TIMEOUT_S)

    async def check(self) -> None:
        """Ask whether the engine behind the server lives, too."""
        try:
            await self._http.call("GET", "/health")
        except Refusal as refusal:
            raise EngineGone(f"{self._http.url} is not healthy: {refusal}") from refusal

    async def preemptions(self) -> int | None:
        """Of all its engines together."""
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
        except Refusal as refusal:
            raise EngineGone(f"vLLM refuses to be controlled: {refusal}") from refusal
