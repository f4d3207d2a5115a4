"""Completion requests of the servers over engines: checks them, and begins their choices.

:mod:`response_bodies` writes their answers, or a form of another API (:mod:`answers`).
"""

import dataclasses
import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np

from tidegate.errors import ContextFull, ModelError
from tidegate.orchestrator.episodes.chat_template import (
    ChatRendering,
    ChatTemplate,
    read_chat_template,
)
from tidegate.orchestrator.episodes.conversation import (
    forced_by,
    plain_calls,
    reply_format_of,
    tool_schemas,
)
from tidegate.orchestrator.episodes.media_parts import (
    check_media_size,
    media_of,
    plain_part,
    refuse_if_written_out,
)
from tidegate.orchestrator.fleet.scores import ScoreQuery, TokenScores
from tidegate.serving.http.errors import ApiError
from tidegate.serving.http.server import off_loop, refuse_large_chat
from tidegate.serving.openai.active_requests import ActiveRequests, choice_seeds
from tidegate.serving.openai.answers import ActiveCompletion, ServedTurn
from tidegate.serving.openai.model_info import Limits, ModelInfo, VersionLabels, limits_of
from tidegate.serving.openai.outputs import OutputReader, OutputTokenizer, StopConditions
from tidegate.serving.openai.requests import (
    CHOICES_MAX,
    BatchChatRequest,
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    Prompt,
    Sampling,
    VllmTokenizeRequest,
    checked_cache_salt,
    generate_options,
    refuse_fields,
    required_prefix,
)
from tidegate.serving.openai.response_bodies import (
    BegunRequest,
    ChatBodies,
    CompletionBodies,
    GenerateBodies,
    PackedBodies,
    PromptLogprobs,
)
from tidegate.transport.sampling import LogitsProcessor

if TYPE_CHECKING:
    from tidegate.orchestrator.episodes.model_files import ModelFiles
    from tidegate.orchestrator.fleet.fleet import Fleet
    from tidegate.orchestrator.fleet.score_dispatcher import ScoreDispatcher

LOGPROBS_ENTRIES_MAX = 2 * 2**20
"""Log-probs of likeliest tokens in one answer, for prompts and outputs together. Each takes 500
bytes until it is sent: a gigabyte."""

PROMPT_TOKENS_MAX = 8 * 2**20
"""Prompt tokens of all choices of one request: each choice is a row that holds its prompt."""

LARGE_PROMPT_LOGPROBS = 2048
"""Number of prompt log-probs from which on bodies are made off the event loop."""

PROMPT_END_TOKENS = 16
"""Tokens at the end of a prompt that show whether the prompt has begun the reasoning."""

RequestT = TypeVar("RequestT", CompletionRequest, ChatRequest)


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """Validated parameters from which a request's choices begin, for requests of any kind."""

    request_id: str
    model: str | None
    prompts: Sequence[Prompt]
    sampling: Sampling
    tokens_max: int | None
    """Output tokens per choice; None fills the context."""
    cache_salt: str = ""
    forced: LogitsProcessor | None = None
    """Processor that constrains the output to a tool call."""


class Completer:
    """Checks completion requests of all kinds, and begins their choices."""

    def __init__(
        self,
        fleet: "Fleet",
        scores: "ScoreDispatcher",
        model: "ModelFiles",
        info: ModelInfo,
        requests: ActiveRequests,
        labels: VersionLabels,
        *,
        adapter_of: Callable[[str | None], Awaitable[str]],
        max_logprobs: int,
        defaults: Mapping[str, float],
    ) -> None:
        """``adapter_of`` returns the adapter of a request's model name, empty for the model itself.
        ``max_logprobs``: log-probs reported beside each token. ``defaults``: values of sampling
        fields that a request omits, by the names of generation_config.json."""
        self._fleet, self._scores = fleet, scores
        self._model = model
        self._info = info
        self._requests = requests
        self._labels = labels
        self._adapter_of = adapter_of
        self._max_logprobs = max_logprobs
        self._tokens_default = defaults.get("max_new_tokens")
        self._defaults = {k: v for k, v in defaults.items() if k != "max_new_tokens"}
        self.tokenizer = OutputTokenizer(model.encoder)

    # ------------------------------------------------------------ by kind

    async def generate(
        self, request: GenerateRequest, name: str, *, is_large: bool, is_packed: bool = False
    ) -> GenerateBodies:
        """Begin ``/inference/v1/generate``; ``is_packed``: ``/skyrl/v1/generate``."""
        if request.output_mode not in ("tokens", "text"):
            raise ApiError(400, f"output_mode is tokens or text, got {request.output_mode}")
        refuse_fields(request, request.REFUSED)
        sampling = request.sampling_params
        prompts = [Prompt(request.token_ids)]
        begun = await self.begin(
            CheckedRequest(
                f"generate-tokens-{request.request_id or name}",
                request.model,
                prompts,
                sampling,
                sampling.max_tokens,
                checked_cache_salt(request.cache_salt),
            )
        )
        return (PackedBodies if is_packed else GenerateBodies)(begun, request)

    async def complete(
        self, request: CompletionRequest, name: str, *, is_large: bool
    ) -> CompletionBodies:
        """Begin ``/v1/completions``."""
        adds = request.add_special_tokens is not False
        given = request.prompts
        refuse_many(len(given) * request.choices_per_prompt)
        tokens_max = self._tokens_max(request)
        prompts = self._truncated(
            request,
            [
                await self._encoded(each, adds, tokens_max)
                if isinstance(each, str)
                else Prompt(each)
                for each in given
            ],
        )
        name = f"cmpl-{request.request_id or name}"
        salt = checked_cache_salt(request.cache_salt)
        sampling = self._with_defaults(request)
        begun = await self.begin(
            CheckedRequest(name, request.model, prompts, sampling, request.tokens_max, salt)
        )
        return CompletionBodies(begun, request)

    async def chat(self, request: ChatRequest, name: str, *, is_large: bool) -> ChatBodies:
        """Begin ``/v1/chat/completions``; calls are parsed if tools are offered."""
        prompt = await self._prompt_of(request, is_large)
        begun = await self._begin_chat(request, name, [prompt], self._forced(request, prompt))
        turns = self._turns(begun, request, prompt) if request.offered_tools else []
        return ChatBodies(begun, request, turns)

    async def begin_turns(
        self, request: ChatRequest, name: str, *, is_large: bool
    ) -> ActiveCompletion:
        """Begin a chat that an :class:`AnswerForm` answers."""
        prompt = await self._prompt_of(request, is_large)
        begun = await self._begin_chat(request, name, [prompt], self._forced(request, prompt))
        request.model = begun.model
        turns = self._turns(begun, request, prompt)
        return ActiveCompletion(request, self._labels.spans, list(turns))

    def _forced(self, request: ChatRequest, prompt: Prompt) -> LogitsProcessor | None:
        forced = forced_by(
            request.call_choice, request.offered_tools, self._template(), self._shown(prompt)
        )
        if forced is not None and (request.schema is not None or request.grammar is not None):
            raise ApiError(400, "a forced call has its own form: omit response_format")
        return forced

    def _turns(self, begun: BegunRequest, request: ChatRequest, prompt: Prompt) -> list[ServedTurn]:
        schemas = tool_schemas(request.offered_tools)
        reply_format = reply_format_of(self._template(), schemas, self._shown(prompt))
        return [
            ServedTurn(
                choice,
                self._model,
                reply_format,
                f"{begun.request.request_id}-{choice.index}",
                has_parallel_calls=request.parallel_tool_calls is not False,
            )
            for choice in begun.request.choices
        ]

    def _template(self) -> ChatTemplate:
        try:
            return read_chat_template(self._model.path)
        except ModelError as error:
            raise ApiError(400, str(error)) from None

    def _shown(self, prompt: Prompt) -> str:
        """Return the text of a prompt; if it was given as tokens, the text of its last ones, where
        the reply's parser looks for an open reasoning mark."""
        if prompt.text is not None:
            return prompt.text
        end = prompt.token_ids[-PROMPT_END_TOKENS:]
        return self.tokenizer.decode(end, skips_special_tokens=False)

    async def render(self, request: ChatRequest, name: str, *, is_large: bool) -> dict[str, Any]:
        """Return the body of ``/inference/v1/generate`` that samples as this chat request."""
        request = self._with_defaults(request)
        generate_options(request, self._model.stop_token_ids)  # refuses what can't be honoured
        salt = checked_cache_salt(request.cache_salt)
        (prompt,) = self._truncated(request, [await self._prompt_of(request, is_large)])
        _refuse_prompt(prompt, limits_of(self._fleet))
        if prompt.media:
            raise ApiError(400, "a rendered prompt carries no images; send the messages instead")
        return {
            "request_id": f"chatcmpl-{request.request_id or name}",
            "token_ids": prompt.token_ids,
            "features": None,
            "sampling_params": request.token_sampling,
            "model": request.model or self._info.name,
            "stream": bool(request.stream),
            "stream_options": request.stream_options if request.stream else None,
            "cache_salt": salt or None,
            "priority": 0,
        }

    async def _prompt_of(self, request: ChatRequest, is_large: bool) -> Prompt:
        # With tool_choice="none", too, as in vLLM: TRL's client parses calls itself.
        tools = request.tools if request.tool_choice == "none" else request.offered_tools
        return await self.chat_prompt(
            request,
            request.messages,
            tools or None,
            prefix=required_prefix(request),
            is_large=is_large,
        )

    async def chat_batch(
        self, request: BatchChatRequest, name: str, *, is_large: bool
    ) -> ChatBodies:
        """Begin ``/v1/chat/completions/batch``."""
        request.refuse_unserved_in_batches()
        refuse_many(len(request.messages) * request.choices_per_prompt)
        prompts = [
            await self.chat_prompt(request, messages, None, is_large=is_large)
            for messages in request.messages
        ]
        begun = await self._begin_chat(request, name, prompts)
        return ChatBodies(begun, request)

    async def _begin_chat(
        self,
        request: ChatRequest,
        name: str,
        prompts: list[Prompt],
        forced: LogitsProcessor | None = None,
    ) -> BegunRequest:
        name = f"chatcmpl-{request.request_id or name}"
        salt = checked_cache_salt(request.cache_salt)
        sampling = self._with_defaults(request)
        prompts = self._truncated(request, prompts)
        return await self.begin(
            CheckedRequest(name, request.model, prompts, sampling, request.tokens_max, salt, forced)
        )

    def _truncated(
        self, request: CompletionRequest | ChatRequest, prompts: Sequence[Prompt]
    ) -> list[Prompt]:
        context_tokens_max = limits_of(self._fleet).context_tokens_max
        kept = [request.truncated(prompt.token_ids, context_tokens_max) for prompt in prompts]
        pairs = [*zip(prompts, kept, strict=True)]
        if any(p.media and len(ids) < len(p.token_ids) for p, ids in pairs):
            raise ApiError(400, "a prompt with images can't be truncated; shorten its messages")
        return [p if len(ids) == len(p.token_ids) else Prompt(ids) for p, ids in pairs]

    async def chat_prompt(
        self,
        request: ChatRequest | VllmTokenizeRequest,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        prefix: Sequence[int] = (),
        is_large: bool = False,
    ) -> Prompt:
        """Return a conversation's prompt, as the model's chat template renders it.

        The tokens up to the end of its last assistant message are replaced with ``prefix``, if
        there is one. A conversation that ``is_large`` is rendered in a thread.
        """
        if not messages:
            raise ApiError(400, "messages must be a list of at least one message")
        refuse_large_chat(messages, tools)
        template = self._template()
        images = self._model.images
        plain = [
            _plain(message, number, reads_images=images is not None)
            for number, message in enumerate(messages)
        ]
        media = media_of(plain)
        check_media_size(media)
        if media and prefix:
            raise ApiError(400, "required_prefix_token_ids can't precede images; leave them out")
        tokens_max = None  # a text to tokenise may be longer than any context
        if isinstance(request, ChatRequest):
            tokens_max = self._tokens_max(request)

        async def encoded(shown: list[dict[str, Any]], rendering: ChatRendering) -> Prompt:
            render = functools.partial(template.prompt, shown, tools, rendering)
            text = await off_loop(render) if is_large or template.is_slow else render()
            return await self._encoded(text, bool(request.add_special_tokens), tokens_max)

        prompt = await encoded(plain, request.rendering)
        if media and images is not None:
            refuse_if_written_out(prompt.text or "", plain)
            token_ids, media = images.expand(prompt.token_ids, media, 0)
            return Prompt(token_ids, prompt.text, media)
        if not prefix:
            return prompt
        assistant = [i for i, message in enumerate(plain) if message.get("role") == "assistant"]
        earlier = plain[: assistant[-1] + 1] if assistant else plain
        replaced = await encoded(
            earlier, dataclasses.replace(request.rendering, add_generation_prompt=False)
        )
        return self._continued(prompt.token_ids, len(replaced.token_ids), prefix)

    def _continued(self, rendered: list[int], replaced: int, prefix: Sequence[int]) -> Prompt:
        """Return ``prefix`` and what is ``rendered`` after the last stop token before ``replaced``.

        As NeMo-RL's vLLM splices ``required_prefix_token_ids``: the template's tokens begin with
        that stop token, which ``prefix`` lacks if its last turn was cut off.
        """
        _refuse_unknown(prefix, limits_of(self._fleet))
        stops = self._model.stop_token_ids
        cut = max((i for i, id_ in enumerate(rendered[:replaced]) if id_ in stops), default=None)
        if len(rendered) <= replaced or cut is None:
            raise ApiError(
                400,
                "required_prefix_token_ids need messages after the last assistant message, or a "
                "generation prompt, and a template that ends messages with a stop token",
                param="required_prefix_token_ids",
            )
        has_end = prefix[-1] == rendered[cut]
        return Prompt([*prefix, *rendered[cut + has_end :]])

    async def _encoded(self, text: str, adds: bool, tokens_max: int | None) -> Prompt:
        """Return a text as a prompt; raises ContextFull if no context holds it."""
        ids = await self.tokenizer.encode(text, adds_special_tokens=adds, tokens_max=tokens_max)
        return Prompt(ids, text)

    def _tokens_max(self, request: CompletionRequest | ChatRequest) -> int | None:
        """Return the length that no prompt may reach; None if the request cuts prompts."""
        if request.truncate_prompt_tokens is not None:
            return None
        return limits_of(self._fleet).context_tokens_max

    def _with_defaults(self, request: RequestT) -> RequestT:
        """Fill in omitted fields from the model's generation_config.json."""
        given = {k: v for k, v in self._defaults.items() if getattr(request, k) is None}
        return msgspec.structs.replace(request, **given) if given else request

    # ------------------------------------------------------------ of all kinds

    async def begin(self, checked: CheckedRequest, first_index: int = 0) -> BegunRequest:
        """Begin the choices of a request, whose indices in the answer begin with ``first_index``; a
        limit of 0 tokens begins none, for prompts' log-probs.

        Raises:
            ApiError: the request can't be honoured.
            ContextFull: a prompt is too long.
        """
        limits = limits_of(self._fleet)
        adapter = await self._adapter_of(checked.model)
        sampling, each = checked.sampling, checked.sampling.choices_per_prompt
        options = generate_options(sampling, self._model.stop_token_ids)
        for prompt in checked.prompts:
            _refuse_prompt(prompt, limits)
        refuse_many(len(checked.prompts) * each)
        self.refuse_large([checked])
        no_logprobs: list[PromptLogprobs | None] = [None] * len(checked.prompts)
        scores: list[PromptLogprobs | None] | None = no_logprobs
        if sampling.num_prompt_logprobs is not None:
            scoring = self._prompt_logprobs(checked, sampling.num_prompt_logprobs, adapter)
            scores = await self._requests.score(checked.request_id, adapter, scoring)
        if checked.forced is not None:
            own = options.get("logits_processors") or ()
            options["logits_processors"] = [*own, checked.forced]
        if adapter:
            options["adapter"] = adapter
        if checked.cache_salt:
            options["cache_salt"] = checked.cache_salt
        choices = [
            (prompt, {**options, "max_tokens": limit, "seed": seed})
            for prompt, limit in zip(checked.prompts, self._output_limits(checked), strict=True)
            if limit
            for seed in choice_seeds(sampling.own_seed, each)
        ]
        request = self._requests.begin(
            checked.request_id, choices, aborted_before_start=scores is None
        )
        stops = self._stop_conditions(sampling, options)
        readers = [
            OutputReader(choice, stops, self.tokenizer, self._labels, index)
            for index, choice in enumerate(request.choices, first_index)
        ]
        return BegunRequest(
            request,
            checked.model or self._info.name,
            self.tokenizer,
            readers,
            first_index,
            [prompt for prompt in checked.prompts for _ in range(each)],
            [logprobs for logprobs in scores or no_logprobs for _ in range(each)],
            each,
            options.get("top_logprobs", 0),
            self._requests.counts,
        )

    def _output_limits(self, checked: CheckedRequest) -> list[int]:
        tokens_max = self._tokens_default if checked.tokens_max is None else checked.tokens_max
        context = limits_of(self._fleet).context_tokens_max
        left = [context - len(prompt.token_ids) for prompt in checked.prompts]
        # Cut off at the end of the context, as by vLLM.
        return left if tokens_max is None else [min(each, int(tokens_max)) for each in left]

    def refuse_large(self, requests: Sequence[CheckedRequest]) -> None:
        """Raise ApiError if the answers of requests together could take too much memory."""
        prompt_tokens = entries = 0
        for each in requests:
            sampling, choices = each.sampling, each.sampling.choices_per_prompt
            for name, top in (
                ("logprobs", sampling.num_top_logprobs),
                ("prompt_logprobs", sampling.num_prompt_logprobs),
            ):
                if top is not None and not 0 <= top <= self._max_logprobs:
                    limit = f"not within 0 and max_logprobs: {self._max_logprobs}"
                    raise ApiError(400, f"Requested {name} of {top}, which is {limit}", param=name)
            tokens = sum(len(prompt.token_ids) for prompt in each.prompts) * choices
            prompt_tokens += tokens
            entries += sum(self._output_limits(each)) * choices * (sampling.num_top_logprobs or 0)
            if sampling.num_prompt_logprobs is not None:  # an echo repeats them in each choice
                entries += tokens * (1 + sampling.num_prompt_logprobs)
        if prompt_tokens > PROMPT_TOKENS_MAX:
            why = f"prompts of all choices together have at most {PROMPT_TOKENS_MAX} tokens"
            raise ApiError(400, f"{why}, got {prompt_tokens}", param="n")
        if entries > LOGPROBS_ENTRIES_MAX:
            raise ApiError(
                400,
                f"the answer would have up to {entries} log-probs, and may have "
                f"{LOGPROBS_ENTRIES_MAX}: lower logprobs, prompt_logprobs, n or max_tokens",
                param="logprobs",
            )

    def _stop_conditions(self, sampling: Sampling, options: Mapping[str, Any]) -> StopConditions:
        return StopConditions(
            frozenset(options["stop_token_ids"]),
            frozenset(self._model.stop_token_ids) - frozenset(sampling.stop_token_ids or ()),
            tuple(sampling.stop_strings),
            includes_stop=bool(sampling.include_stop_str_in_output),
            skips_special_tokens=sampling.skip_special_tokens is not False,
        )

    async def _prompt_logprobs(
        self, checked: CheckedRequest, top: int, adapter: str
    ) -> list[PromptLogprobs | None]:
        futures = [
            self._scores.submit(
                ScoreQuery(
                    np.array(p.token_ids, "<i4").tobytes(), "logprobs", 1, top, adapter=adapter
                )
            )
            if len(p.token_ids) > 1
            else None
            for p in checked.prompts
        ]
        try:
            scores = [None if future is None else await future for future in futures]
        finally:
            for future in futures:
                if future is not None:
                    future.cancel()

        def written() -> list[PromptLogprobs | None]:
            rows = zip(checked.prompts, scores, strict=True)
            return [self._logprobs_of(prompt, score) for prompt, score in rows]

        tokens = sum(len(prompt.token_ids) for prompt in checked.prompts)
        return await off_loop(written) if tokens * (1 + top) >= LARGE_PROMPT_LOGPROBS else written()

    def _logprobs_of(self, prompt: Prompt, score: object) -> PromptLogprobs:
        """Return log-probs of all prompt tokens but the first, with the likeliest beside each."""
        logprobs: PromptLogprobs = [None]
        if not isinstance(score, TokenScores):
            return logprobs
        ranks = [None] * len(score.logprobs) if score.ranks is None else score.ranks.tolist()
        columns = (score.logprobs.tolist(), score.top_ids.tolist(), score.top_logprobs.tolist())
        rows = zip(prompt.token_ids[1:], ranks, *columns, strict=True)
        for token, own, logprob, top_ids, top_logprobs in rows:
            entry = {str(token): self._logprob(token, logprob, own)}
            for rank, (top_id, top) in enumerate(zip(top_ids, top_logprobs, strict=True), 1):
                entry[str(top_id)] = self._logprob(top_id, top, rank)
            logprobs.append(entry)
        return logprobs

    def _logprob(self, token: int, logprob: float, rank: int | None) -> dict[str, Any]:
        return {"logprob": logprob, "rank": rank, "decoded_token": self.tokenizer.token(token)}


def _plain(message: Mapping[str, Any], number: int, *, reads_images: bool) -> dict[str, Any]:
    """Return a message as chat templates expect: text parts joined to one text unless images are
    among them, no content as an empty text, arguments of calls as objects."""
    if message.get("tool_calls"):
        message = {**message, "tool_calls": plain_calls(message["tool_calls"], number)}
    content = message.get("content")
    if content is None:  # beside tool calls, where OpenAI's and vLLM's clients leave it out
        content = ""
    if not isinstance(content, list):
        return {**message, "content": content}
    kinds = [part.get("type") if isinstance(part, dict) else None for part in content]
    if reads_images and "image_url" in kinds and {*kinds} <= {"text", "image_url"}:
        where = f"a part of message {number}"
        parts = [
            plain_part(part, where)
            if part["type"] == "image_url"
            else {"type": "text", "text": str(part.get("text", ""))}
            for part in content
        ]
        return {**message, "content": parts}
    texts = [part.get("text") for part in content if isinstance(part, dict)]
    if not all(isinstance(text, str) for text in texts) or len(texts) < len(content):
        raise ApiError(400, "a message's content may have text parts only")
    return {**message, "content": "".join(text for text in texts if text is not None)}


def refuse_many(choices: int) -> None:
    """Raise ApiError if a request has too many choices."""
    if choices > CHOICES_MAX:
        raise ApiError(400, f"a request has at most {CHOICES_MAX} choices, got {choices}")


def _refuse_prompt(prompt: Prompt, limits: Limits) -> None:
    ids = prompt.token_ids
    if not ids:
        raise ApiError(400, "the prompt has no token; give at least 1")
    if len(ids) >= limits.context_tokens_max:
        raise ContextFull(tokens=len(ids), tokens_max=limits.context_tokens_max)
    _refuse_unknown(ids, limits)


def _refuse_unknown(token_ids: Sequence[int], limits: Limits) -> None:
    unknown = next((i for i in token_ids if not 0 <= i < limits.vocab_size), None)
    if unknown is not None:
        raise ApiError(400, f"Token id {unknown} is out of vocabulary")
