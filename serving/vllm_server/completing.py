"""Turns requests into choices of the run: checks prompts, limits and options, and begins turns.

Bodies of answers are :mod:`bodies`' matter.
"""

import dataclasses
import functools
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np

from tidegate.errors import ModelError
from tidegate.orchestrator.episodes.chat_template import read_chat_template
from tidegate.orchestrator.fleet.scores import Asked, TokenScores
from tidegate.serving.http_server import MESSAGES_MAX, off_loop
from tidegate.serving.vllm_server.bodies import (
    About,
    Bodies,
    ChatBodies,
    CompletionBodies,
    GenerateBodies,
    PromptLogprobs,
)
from tidegate.serving.vllm_server.desk import Asking, RequestDesk
from tidegate.serving.vllm_server.failures import ServerError
from tidegate.serving.vllm_server.labels import VersionLabels
from tidegate.serving.vllm_server.model_info import Limits, ModelInfo, limits_of
from tidegate.serving.vllm_server.outputs import OutputReader
from tidegate.serving.vllm_server.protocol import (
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
from tidegate.serving.vllm_server.words import Ending, Words

if TYPE_CHECKING:
    from tidegate.orchestrator.episodes.model_files import ModelFiles
    from tidegate.orchestrator.scheduler.scheduler import Scheduler

SEED_BITS = 63

LOGPROBS_ENTRIES_MAX = 2 * 2**20
"""Log-probs of likeliest tokens that one request may be told, for prompts and outputs together.
Each takes 500 bytes until it is sent: a gigabyte."""

PROMPT_TOKENS_MAX = 8 * 2**20
"""Prompt tokens of all choices of one request: each choice is a row that holds its prompt."""

LARGE_PROMPT_LOGPROBS = 2048
"""Log-probs of prompts from which on their bodies are made off the event loop."""

CHARACTERS_SLACK = 2
"""A text that has so many times more characters than fit into a context of the vocabulary's longest
tokens is refused before it is tokenised. More than 1, for normalizers may remove characters."""


RequestT = TypeVar("RequestT", CompletionRequest, ChatRequest)


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
    top_logprobs: int

    @property
    def told_tokens(self) -> int:
        """Number of tokens and log-probs that an answer tells, by now."""
        choices = self.asking.choices
        outputs = sum(choice.num_tokens for choice in choices) * (1 + self.top_logprobs)
        return outputs + sum(len(choice.prompt.token_ids) for choice in choices)


class Completer:
    """Begins requests of all kinds."""

    def __init__(
        self,
        scheduler: "Scheduler",
        model: "ModelFiles",
        info: ModelInfo,
        desk: RequestDesk,
        labels: VersionLabels,
        *,
        max_logprobs: int,
        defaults: Mapping[str, float],
    ) -> None:
        """``max_logprobs``: log-probs told beside each token. ``defaults``: values of sampling
        fields that a request leaves out, by the names of generation_config.json."""
        self._scheduler = scheduler
        self._model = model
        self._info = info
        self._desk = desk
        self._labels = labels
        self._max_logprobs = max_logprobs
        self._tokens_default = defaults.get("max_new_tokens")
        self._defaults = {k: v for k, v in defaults.items() if k != "max_new_tokens"}
        self.words = Words(model.tokenizer)
        self._token_characters_max = max(map(len, model.tokenizer.get_vocab()), default=1)

    # ------------------------------------------------------------ the three kinds

    async def generate(self, request: GenerateRequest, name: str) -> tuple[Begun, Bodies]:
        """Begin ``/inference/v1/generate``."""
        if request.output_mode not in ("tokens", "text"):
            raise ServerError(400, f"output_mode is tokens or text, got {request.output_mode}")
        if request.features:
            raise ServerError(400, "features are not served: leave it out", param="features")
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
        for one in given:
            if isinstance(one, str):
                self._refuse_long(one)
        prompts = [
            Prompt(await self.words.encode(one, adds_special_tokens=adds), one)
            if isinstance(one, str)
            else Prompt(one)
            for one in given
        ]
        tokens_max = COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
        name = f"cmpl-{request.request_id or name}"
        salt = cache_salt_of(request)
        sampling = self._with_defaults(request)
        begun = await self._begin(Wanted(name, request.model, prompts, sampling, tokens_max, salt))
        return begun, CompletionBodies(begun.about, request)

    async def chat(
        self, request: ChatRequest, name: str, *, is_large: bool
    ) -> tuple[Begun, Bodies]:
        """Begin ``/v1/chat/completions``."""
        if request.tool_choice not in (None, "auto", "none"):
            raise ServerError(400, "tool_choice must be 'auto' or 'none': no call can be forced")
        tools = None if request.tool_choice == "none" else request.tools
        ids = await self.chat_tokens(
            request.messages,
            tools,
            begins=request.add_generation_prompt is not False,
            options=request.chat_template_kwargs,
            is_large=is_large,
        )
        return await self._begin_chat(request, name, [Prompt(ids)])

    async def chat_batch(
        self, request: BatchChatRequest, name: str, *, is_large: bool
    ) -> tuple[Begun, Bodies]:
        """Begin ``/v1/chat/completions/batch``."""
        request.refuse_what_single_ones_may()
        _refuse_many(len(request.messages), request)
        prompts = [
            Prompt(
                await self.chat_tokens(
                    messages,
                    None,
                    begins=request.add_generation_prompt is not False,
                    options=request.chat_template_kwargs,
                    is_large=is_large,
                )
            )
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
        sampling = self._with_defaults(request)
        begun = await self._begin(Wanted(name, request.model, prompts, sampling, tokens_max, salt))
        return begun, ChatBodies(begun.about, request)

    async def chat_tokens(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        begins: bool = True,
        options: Mapping[str, Any] | None = None,
        is_large: bool = False,
    ) -> list[int]:
        """Return a conversation as a prompt, up to where the model ``begins`` to speak.

        ``options`` are further names for the chat template. One that ``is_large`` is rendered in a
        thread.
        """
        if not messages:
            raise ServerError(400, "messages must be a list of at least one message")
        if len(messages) > MESSAGES_MAX:
            told = f"a conversation has at most {MESSAGES_MAX} messages, got {len(messages)}"
            raise ServerError(400, told, param="messages")
        try:
            template = read_chat_template(self._model.path)
        except ModelError as error:
            raise ServerError(400, str(error)) from None
        plain = [_plain(message) for message in messages]
        render = functools.partial(
            template.render, plain, tools, add_generation_prompt=begins, options=options
        )
        text = await off_loop(render) if is_large else render()
        self._refuse_long(text)
        return await self.words.encode(text, adds_special_tokens=False)

    def _refuse_long(self, text: str) -> None:
        """Refuse a text that no context can hold, before it is tokenised."""
        limits = limits_of(self._scheduler)
        most = CHARACTERS_SLACK * limits.context_tokens_max * self._token_characters_max
        if len(text) > most:
            raise ServerError(
                400,
                f"The decoder prompt has {len(text)} characters, which is longer than the maximum "
                f"model length of {limits.context_tokens_max} tokens.",
            )

    def _with_defaults(self, request: RequestT) -> RequestT:
        """Fill in what the model's generation_config.json says of fields that were left out."""
        given = {k: v for k, v in self._defaults.items() if getattr(request, k) is None}
        return msgspec.structs.replace(request, **given) if given else request

    # ------------------------------------------------------------ what they have in common

    async def _begin(self, wanted: Wanted) -> Begun:
        limits = limits_of(self._scheduler)
        adapter = self._info.adapter_of(wanted.model)
        sampling, each = wanted.sampling, wanted.sampling.choices_per_prompt
        options = sampling.options(self._model.stop_token_ids)
        for prompt in wanted.prompts:
            _refuse_prompt(prompt, limits)
        _refuse_many(len(wanted.prompts), sampling)
        tokens_max = self._tokens_default if wanted.tokens_max is None else wanted.tokens_max
        rooms = [_room(prompt, tokens_max, limits) for prompt in wanted.prompts]
        self._refuse_large(wanted, rooms)
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
                {**options, "max_tokens": room, "seed": seed},
            )
            for prompt, room in zip(wanted.prompts, rooms, strict=True)
            for seed in _seeds(sampling.own_seed, each)
        ]
        asking = self._desk.ask(wanted.request_id, choices)
        ending = self._ending(sampling, options)
        readers = [OutputReader(c, ending, self.words, self._labels) for c in asking.choices]
        about = dataclasses.replace(about, created_s=asking.created_s)
        return Begun(asking, readers, about, options.get("top_logprobs", 0))

    def _refuse_large(self, wanted: Wanted, rooms: Sequence[int]) -> None:
        """Refuse a request whose answer would take too much memory, by what it may come to."""
        sampling, most = wanted.sampling, self._max_logprobs
        each = sampling.choices_per_prompt
        for name, asked in (
            ("logprobs", sampling.top_logprobs_asked),
            ("prompt_logprobs", sampling.prompt_logprobs),
        ):
            if asked is not None and not 0 <= asked <= most:
                told = (
                    f"Requested {name} of {asked}, which is not within 0 and max_logprobs: {most}"
                )
                raise ServerError(400, told, param=name)
        prompt_tokens = sum(len(prompt.token_ids) for prompt in wanted.prompts)
        if prompt_tokens * each > PROMPT_TOKENS_MAX:
            told = f"prompts of all choices together have at most {PROMPT_TOKENS_MAX} tokens"
            raise ServerError(400, f"{told}, got {prompt_tokens * each}", param="n")
        entries = sum(rooms) * each * (sampling.top_logprobs_asked or 0)
        entries += prompt_tokens * (sampling.prompt_logprobs or 0)
        if entries > LOGPROBS_ENTRIES_MAX:
            raise ServerError(
                400,
                f"up to {entries} log-probs would be told, and a request may have "
                f"{LOGPROBS_ENTRIES_MAX}: lower logprobs, prompt_logprobs, n or max_tokens",
                param="logprobs",
            )

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

        def told() -> list[PromptLogprobs | None]:
            rows = zip(wanted.prompts, scores, strict=True)
            return [self._told(prompt, score) for prompt, score in rows]

        tokens = sum(len(prompt.token_ids) for prompt in wanted.prompts)
        return await off_loop(told) if tokens * (1 + top) >= LARGE_PROMPT_LOGPROBS else told()

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
    if len(ids) >= limits.context_tokens_max:
        raise ServerError(
            400,
            f"The decoder prompt (length {len(ids)}) is longer than the maximum model length of "
            f"{limits.context_tokens_max}. Make sure that `max_model_len` is no smaller than the "
            f"number of text tokens.",
        )
    strange = next((i for i in ids if not 0 <= i < limits.vocab_size), None)
    if strange is not None:
        raise ServerError(400, f"Token id {strange} is out of vocabulary")


def _room(prompt: Prompt, tokens_max: float | None, limits: Limits) -> int:
    """What is asked for beyond the context is cut off, as vLLM does."""
    left = limits.context_tokens_max - len(prompt.token_ids)
    return left if tokens_max is None else min(left, int(tokens_max))


def _seeds(seed: int | None, choices: int) -> list[int]:
    """Seeds of one prompt's choices. As in vLLM, each prompt of a request begins with its seed."""
    if seed is None:
        return [secrets.randbits(SEED_BITS) for _ in range(choices)]
    return [seed + number for number in range(choices)]
