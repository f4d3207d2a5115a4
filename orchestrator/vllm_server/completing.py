"""How does a request become choices of the run? Prompts, limits and options, checked and begun.

It knows the kinds of request, and no HTTP; what is said of them is :mod:`bodies`' matter.
"""

import dataclasses
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tidegate.errors import ModelError
from tidegate.orchestrator.episodes.chat_template import read_chat_template
from tidegate.orchestrator.fleet.scores import Asked, TokenScores
from tidegate.orchestrator.vllm_server.bodies import (
    About,
    Bodies,
    ChatBodies,
    CompletionBodies,
    GenerateBodies,
    PromptLogprobs,
)
from tidegate.orchestrator.vllm_server.desk import Asking, RequestDesk
from tidegate.orchestrator.vllm_server.failures import ServerError
from tidegate.orchestrator.vllm_server.labels import VersionLabels
from tidegate.orchestrator.vllm_server.model_info import Limits, ModelInfo, limits_of
from tidegate.orchestrator.vllm_server.outputs import OutputReader
from tidegate.orchestrator.vllm_server.protocol import (
    CHOICES_MAX,
    COMPLETION_TOKENS,
    BatchChatRequest,
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    Prompt,
    Sampling,
    cache_salt_of,
)
from tidegate.orchestrator.vllm_server.words import Ending, Words

if TYPE_CHECKING:
    from tidegate.orchestrator.scheduler import Scheduler
    from tidegate.orchestrator.weights.model_files import ModelFiles

SEED_BITS = 63


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request, whatever its kind."""

    request_id: str
    model: str | None
    prompts: Sequence[Prompt]
    sampling: Sampling
    tokens_max: int | None
    """None fills the context."""
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class Begun:
    """A request that is being answered."""

    asking: Asking
    readers: Sequence[OutputReader]
    about: About


class Completer:
    """Begins requests of all kinds."""

    def __init__(
        self,
        scheduler: "Scheduler",
        model: "ModelFiles",
        info: ModelInfo,
        desk: RequestDesk,
        labels: VersionLabels,
    ) -> None:
        self._scheduler = scheduler
        self._model = model
        self._info = info
        self._desk = desk
        self._labels = labels
        self.words = Words(model.tokenizer)

    # ------------------------------------------------------------ the three kinds

    async def generate(self, request: GenerateRequest, name: str) -> tuple[Begun, Bodies]:
        """Begin ``/inference/v1/generate``."""
        if request.output_mode not in ("tokens", "text"):
            raise ServerError(400, f"output_mode is tokens or text, got {request.output_mode}")
        sampling = request.sampling_params
        prompts = [Prompt(request.token_ids)]
        begun = await self._begin(
            Wanted(
                f"generate-tokens-{request.request_id or name}",
                request.model,
                prompts,
                sampling,
                sampling.max_tokens,
                cache_salt_of(request),
            )
        )
        return begun, GenerateBodies(begun.about, request)

    async def complete(self, request: CompletionRequest, name: str) -> tuple[Begun, Bodies]:
        """Begin ``/v1/completions``."""
        if request.suffix:
            raise ServerError(400, "suffix is not currently supported", param="suffix")
        adds = request.add_special_tokens is not False
        given = request.prompts
        _refuse_many(len(given), request)
        prompts = [
            Prompt(await self.words.encode(one, adds_special_tokens=adds), one)
            if isinstance(one, str)
            else Prompt(one)
            for one in given
        ]
        tokens_max = COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
        name = f"cmpl-{request.request_id or name}"
        salt = cache_salt_of(request)
        begun = await self._begin(Wanted(name, request.model, prompts, request, tokens_max, salt))
        return begun, CompletionBodies(begun.about, request)

    async def chat(self, request: ChatRequest, name: str) -> tuple[Begun, Bodies]:
        """Begin ``/v1/chat/completions``."""
        if request.tool_choice not in (None, "auto", "none"):
            raise ServerError(400, "tool_choice must be 'auto' or 'none': no call can be forced")
        tools = None if request.tool_choice == "none" else request.tools
        ids = await self.chat_tokens(
            request.messages, tools, begins=request.add_generation_prompt is not False
        )
        return await self._begin_chat(request, name, [Prompt(ids)])

    async def chat_batch(self, request: BatchChatRequest, name: str) -> tuple[Begun, Bodies]:
        """Begin ``/v1/chat/completions/batch``."""
        request.refuse_what_single_ones_may()
        begins = request.add_generation_prompt is not False
        prompts = [
            Prompt(await self.chat_tokens(messages, None, begins=begins))
            for messages in request.messages
        ]
        return await self._begin_chat(request, name, prompts)

    async def _begin_chat(
        self, request: ChatRequest, name: str, prompts: list[Prompt]
    ) -> tuple[Begun, Bodies]:
        both = (request.max_completion_tokens, request.max_tokens)
        tokens_max = next((count for count in both if count is not None), None)
        name = f"chatcmpl-{request.request_id or name}"
        salt = cache_salt_of(request)
        begun = await self._begin(Wanted(name, request.model, prompts, request, tokens_max, salt))
        return begun, ChatBodies(begun.about, request)

    async def chat_tokens(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        begins: bool = True,
    ) -> list[int]:
        """A conversation as a prompt, up to where the model ``begins`` to speak."""
        if not messages:
            raise ServerError(400, "messages must be a list of at least one message")
        try:
            template = read_chat_template(self._model.path)
        except ModelError as error:
            raise ServerError(400, str(error)) from None
        text = template.render(
            [_plain(message) for message in messages], tools, add_generation_prompt=begins
        )
        return await self.words.encode(text, adds_special_tokens=False)

    # ------------------------------------------------------------ what they have in common

    async def _begin(self, wanted: Wanted) -> Begun:
        limits = limits_of(self._scheduler)
        adapter = self._info.adapter_of(wanted.model)
        sampling, each = wanted.sampling, wanted.sampling.choices_per_prompt
        options = sampling.options(self._model.stop_token_ids)
        for prompt in wanted.prompts:
            _refuse_prompt(prompt, limits)
        _refuse_many(len(wanted.prompts), sampling)
        told = await self._prompt_logprobs(wanted, adapter)
        prompts = [prompt for prompt in wanted.prompts for _ in range(each)]
        about = About(
            wanted.request_id,
            wanted.model or self._info.name,
            0,
            self.words,
            prompts,
            [one for one in told for _ in range(each)],
            each,
        )
        if adapter:
            options["adapter"] = adapter
        if wanted.cache_salt:
            options["cache_salt"] = wanted.cache_salt
        choices = [
            (
                prompt,
                {**options, "max_tokens": _room(prompt, wanted.tokens_max, limits), "seed": seed},
            )
            for prompt, seed in zip(prompts, _seeds(sampling.seed, len(prompts)), strict=True)
        ]
        asking = self._desk.ask(wanted.request_id, choices)
        ending = self._ending(sampling, options)
        readers = [OutputReader(c, ending, self.words, self._labels) for c in asking.choices]
        about = dataclasses.replace(about, created_s=asking.created_s)
        return Begun(asking, readers, about)

    def _ending(self, sampling: Sampling, options: Mapping[str, Any]) -> Ending:
        return Ending(
            frozenset(options["stop_token_ids"]),
            frozenset(self._model.stop_token_ids) - frozenset(sampling.stop_token_ids or ()),
            tuple(sampling.stop_strings),
            is_said=bool(sampling.include_stop_str_in_output),
            skips_special_tokens=sampling.skip_special_tokens is not False,
        )

    async def _prompt_logprobs(
        self, wanted: Wanted, adapter: str
    ) -> Sequence[PromptLogprobs | None]:
        top = wanted.sampling.prompt_logprobs
        if top is None:
            return [None] * len(wanted.prompts)
        if top < 0:
            raise ServerError(400, f"prompt_logprobs must be at least 0, got {top}.")
        if adapter:
            raise ServerError(400, "prompt_logprobs are told of the model without adapters only")
        asked = [
            self._scheduler.scores.ask(
                Asked(np.array(p.token_ids, "<i4").tobytes(), "logprobs", 1, top)
            )
            if len(p.token_ids) > 1
            else None
            for p in wanted.prompts
        ]
        try:
            scores = [None if one is None else await one for one in asked]
        finally:
            for one in asked:
                if one is not None:
                    one.cancel()
        return [
            self._told(prompt, score) for prompt, score in zip(wanted.prompts, scores, strict=True)
        ]

    def _told(self, prompt: Prompt, score: object) -> PromptLogprobs:
        """For each token of a prompt but the first: its own, and the likeliest."""
        told: PromptLogprobs = [None]
        if not isinstance(score, TokenScores):
            return told
        ranks = [None] * len(score.logprobs) if score.ranks is None else score.ranks.tolist()
        columns = (score.logprobs.tolist(), score.top_ids.tolist(), score.top_logprobs.tolist())
        rows = zip(prompt.token_ids[1:], ranks, *columns, strict=True)
        for token, own, logprob, top_ids, top_logprobs in rows:
            entry = {str(token): self._logprob(token, logprob, own)}
            for rank, (likely, its) in enumerate(zip(top_ids, top_logprobs, strict=True), 1):
                entry[str(likely)] = self._logprob(likely, its, rank)
            told.append(entry)
        return told

    def _logprob(self, token: int, logprob: float, rank: int | None) -> dict[str, Any]:
        return {"logprob": logprob, "rank": rank, "decoded_token": self.words.token(token)}


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """With a list of text parts as one text, which is what templates take."""
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    texts = [part.get("text") for part in content if isinstance(part, dict)]
    if not all(isinstance(text, str) for text in texts) or len(texts) < len(content):
        raise ServerError(400, "a message's content may have text parts only")
    return {**message, "content": "".join(text for text in texts if text is not None)}


def _refuse_many(prompts: int, sampling: Sampling) -> None:
    choices = prompts * sampling.choices_per_prompt
    if choices > CHOICES_MAX:
        raise ServerError(400, f"a request has at most {CHOICES_MAX} choices, got {choices}")


def _refuse_prompt(prompt: Prompt, limits: Limits) -> None:
    ids = prompt.token_ids
    if not ids:
        raise ServerError(400, "the prompt has no token; give at least 1")
    strange = next((i for i in ids if not 0 <= i < limits.vocab_size), None)
    if strange is not None:
        raise ServerError(400, f"Token id {strange} is out of vocabulary")
    if len(ids) >= limits.context_tokens_max:
        raise ServerError(
            400,
            f"The decoder prompt (length {len(ids)}) is longer than the maximum model length of "
            f"{limits.context_tokens_max}. Make sure that `max_model_len` is no smaller than the "
            f"number of text tokens.",
        )


def _room(prompt: Prompt, tokens_max: int | None, limits: Limits) -> int:
    """What is asked for beyond the context is cut off, as vLLM does."""
    left = limits.context_tokens_max - len(prompt.token_ids)
    return left if tokens_max is None else min(left, tokens_max)


def _seeds(seed: int | None, choices: int) -> list[int]:
    """Each choice has its own: a request's with ``seed`` are the same each time."""
    if seed is None:
        return [secrets.randbits(SEED_BITS) for _ in range(choices)]
    return [seed + number for number in range(choices)]
