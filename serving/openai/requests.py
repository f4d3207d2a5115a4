"""Request bodies of completions: OpenAI's API with vLLM's extensions, and vLLM's token requests.

Each body also gives the options of :meth:`Episode.generate` that it requests. A server adds its own
limits and fields in its ``requests.py``.

Fields without meaning for an engine (``user``, ``store``, …) are ignored, as by other servers.
Fields that would change the output are refused by name if they are not honoured.
"""

import contextlib
import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec

from tidegate.orchestrator.episodes.chat_template import ChatRendering
from tidegate.serving.http.errors import ApiError
from tidegate.transport.media import Media
from tidegate.transport.sampling import LogitsProcessor

log = logging.getLogger("tidegate")

NO_SEED = -1
"""Value that vLLM's clients write for "no seed"."""

COMPLETION_TOKENS = 16
"""``max_tokens`` of a completion that names none, as OpenAI has it; chats fill the context."""

TOP_LOGPROBS_MAX = 20
"""Log-probs of the likeliest tokens beside each token, as in OpenAI's API and vLLM's default. 4,096
of them cost 96 s and 8 GB for one request of 110 bytes."""

STOP_STRINGS_MAX = 64
"""Stop strings of one request: an output's text is searched for each of them."""

CHOICES_MAX = 1024
"""Choices of one request of a server over engines: ``n`` times its prompts."""

CACHE_SALT_CHARACTERS_MAX = 256
"""Characters of a ``cache_salt``, 1,024 in vLLM; 43 characters are 256 random bits."""

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
"""JSON schema that ``response_format`` ``json_object`` stands for: any object."""

UNSERVED: Mapping[str, tuple[Any, ...]] = {
    "use_beam_search": (False,),
    "best_of": (1,),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "prompt_embeds": (),
    "thinking_token_budget": (-1,),
    "logprob_token_ids": ([],),
    "prompt_logprob_token_ids": ([],),
    "trace_decode_token_ids": ([],),
    "repetition_detection": ({},),
    "watermarking": (False,),
    "vllm_xargs": ({},),
    "extra_args": ({},),
    "kv_transfer_params": ({},),
    "ec_transfer_params": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "priority": (0,),
}
"""Fields of vLLM's and OpenAI's APIs that change an output and are not honoured, each with the
values beside null that leave the output as it is."""

HONOURED_IN_CHATS = ("chat_template_kwargs", "continue_final_message")
"""Fields of ``UNSERVED`` that conversations honour."""


def refuse_fields(request: msgspec.Struct, refused: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise ApiError if a field of ``refused`` is neither null nor one of its harmless values."""
    for name, harmless in refused.items():
        value = getattr(request, name)
        if value is not None and value not in harmless:
            why = f"{name} is not served: leave it out, got {value!r:.80}"
            raise ApiError(400, why, param=name)


def declaring(fields: Iterable[str]) -> type[msgspec.Struct]:
    """Return a base class of bodies with these fields, which are read so that they are refused."""
    return msgspec.defstruct("Unserved", [(name, Any, None) for name in fields], kw_only=True)


if TYPE_CHECKING:
    UnservedSampling = msgspec.Struct
else:
    UnservedSampling = declaring(UNSERVED)


class Sampling(UnservedSampling, kw_only=True):
    """Sampling parameters by vLLM's names, which include OpenAI's; and those of ``UNSERVED``."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    """-1 and 0 mean all tokens."""
    min_p: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    structured_outputs: dict[str, Any] | None = None

    REFUSED: ClassVar[Mapping[str, tuple[Any, ...]]] = UNSERVED
    """Fields that this kind of request refuses, each with the values that are harmless."""
    IGNORED: ClassVar[frozenset[str]] = frozenset()
    """Fields that are read without effect on this kind of request."""

    PASSED_ON: ClassVar[tuple[str, ...]] = (
        "temperature",
        "top_p",
        "min_p",
        "min_tokens",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
    )
    """Fields that are options of ``generate`` under the same name."""

    @property
    def own_seed(self) -> int | None:
        """The seed; None if there is none, which clients also write as -1."""
        return None if self.seed == NO_SEED else self.seed

    @property
    def choices_per_prompt(self) -> int:
        """Number of completions of each prompt: ``n``, or 1."""
        return 1 if self.n is None else self.n

    @property
    def stop_strings(self) -> list[str]:
        """Strings that end the output."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def tokens_max(self) -> int | None:
        """Limit of output tokens per choice; None fills the context."""
        return self.max_tokens

    @property
    def num_top_logprobs(self) -> int | None:
        """Number of likeliest tokens reported beside each token; None: no log-probs at all."""
        raise NotImplementedError

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Number of likeliest tokens reported beside each prompt token; None: no log-probs."""
        return self.prompt_logprobs

    @property
    def schema(self) -> Mapping[str, Any] | None:
        """JSON schema that the output must follow; None for any output."""
        outputs = self.structured_outputs or {}
        if outputs.get("json_object"):
            return ANY_OBJECT
        wanted = outputs.get("json")
        if isinstance(wanted, str):  # vLLM takes the schema's text, too
            with contextlib.suppress(msgspec.DecodeError):
                wanted = msgspec.json.decode(wanted)
        return wanted if isinstance(wanted, dict) else None

    @property
    def grammar(self) -> str | None:
        """Lark grammar of the ``choice``, ``regex`` or ``grammar`` in ``structured_outputs``."""
        outputs = self.structured_outputs or {}
        choices, regex, grammar = (outputs.get(name) for name in ("choice", "regex", "grammar"))
        if isinstance(choices, list) and choices and all(isinstance(c, str) for c in choices):
            # JSON's strings are Lark's, too.
            return f"start: {' | '.join(json.dumps(choice) for choice in choices)}"
        if isinstance(regex, str) and regex:
            # A slash ends it unless a backslash is before it, that isn't one of a pair itself.
            return "start: /" + re.sub(r"\\.|/", _in_lark, regex, flags=re.DOTALL) + "/"
        return grammar if isinstance(grammar, str) and grammar else None

    def shared_options(self) -> dict[str, Any]:
        """Return the options of ``generate`` that the gateway and the servers read alike.

        Seed, number of tokens and stop tokens are not included.

        Raises:
            ApiError: a field can't be honoured.
        """
        self._refuse_unserved()
        options = {k: v for k in self.PASSED_ON if (v := getattr(self, k)) is not None}
        if self.top_k is not None and self.top_k > 0:
            options["top_k"] = self.top_k
        if self.stop_strings:
            options["stop_strings"] = self.stop_strings
        if self.logit_bias:
            try:
                options["logit_bias"] = {int(k): bias for k, bias in self.logit_bias.items()}
            except ValueError:
                raise ApiError(400, "logit_bias must have token ids for its keys") from None
        if self.num_top_logprobs:
            options["top_logprobs"] = self.num_top_logprobs
        if processors := self._processors():
            options["logits_processors"] = processors
        return options

    def _refuse_unserved(self) -> None:
        refuse_fields(self, self.REFUSED)
        if len(self.stop_strings) > STOP_STRINGS_MAX:
            why = f"stop has at most {STOP_STRINGS_MAX} strings, got {len(self.stop_strings)}"
            raise ApiError(400, why, param="stop")
        self._refuse_unserved_outputs()

    def _refuse_unserved_outputs(self) -> None:
        if not self.structured_outputs:
            return
        given = self.structured_outputs.items()
        outputs = [name for name, value in given if value is not None and value is not False]
        if len(outputs) != 1 or (self.schema is None and self.grammar is None):
            why = (
                "structured_outputs has one of json (a schema), json_object, choice, regex and "
                f"grammar, got {', '.join(outputs) or 'none'}"
            )
            raise ApiError(400, why, param="structured_outputs")

    def _processors(self) -> list[LogitsProcessor]:
        processors = []
        if self.allowed_token_ids:
            processors.append(
                LogitsProcessor("allowed_tokens", {"token_ids": self.allowed_token_ids})
            )
        if self.bad_words:
            processors.append(LogitsProcessor("bad_words", {"words": self.bad_words}))
        if self.schema is not None:
            processors.append(LogitsProcessor("json_schema", {"schema": dict(self.schema)}))
        elif self.grammar is not None:
            processors.append(LogitsProcessor("grammar", {"lark": self.grammar}))
        return processors


_IN_LARK = {
    "/": r"\/",
    r"\d": "[0-9]",
    r"\D": "[^0-9]",
    r"\w": "[0-9A-Za-z_]",
    r"\W": "[^0-9A-Za-z_]",
}
"""Parts of a regular expression as llguidance's Lark writes them: ``\\d`` and ``\\w`` of Lark match
digits and letters of all scripts. xgrammar, the backend of vLLM and SGLang, takes ASCII only, as
ECMA-262 says for the patterns of JSON schemas. A class may have classes in it."""


def _in_lark(found: re.Match[str]) -> str:
    return _IN_LARK.get(found[0], found[0])


class OpenAIRequest(Sampling, kw_only=True):
    """Fields that text and chat completions share beside the sampling parameters."""

    model: str | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    """An extension of vLLM's, as are all fields below."""
    request_id: str | None = None
    return_tokens_as_token_ids: bool | None = None
    return_weight_versions: bool | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None

    def truncated(self, token_ids: list[int], context_tokens_max: int) -> list[int]:
        """Return the last ``truncate_prompt_tokens`` tokens, or the first for the side ``right``.

        -1 means all that leave a token to generate.

        Raises:
            ApiError: the number is below -1 or above the context's length.
        """
        kept = self.truncate_prompt_tokens
        if kept is None:
            return token_ids
        if not -1 <= kept <= context_tokens_max:
            why = f"truncate_prompt_tokens must be -1 to {context_tokens_max}, got {kept}"
            raise ApiError(400, why, param="truncate_prompt_tokens")
        kept = min(len(token_ids), context_tokens_max - 1 if kept == -1 else kept)
        is_right = self.truncation_side == "right"
        return token_ids[:kept] if is_right else token_ids[len(token_ids) - kept :]

    @property
    def schema(self) -> Mapping[str, Any] | None:
        """JSON schema of ``response_format``, or of ``structured_outputs``.

        Raises:
            ApiError: the format is neither text nor JSON.
        """
        wanted = self.response_format or {"type": "text"}
        if wanted.get("type") == "text":
            return super().schema
        if wanted.get("type") == "json_object":
            return ANY_OBJECT
        described = wanted.get("json_schema")
        found = described.get("schema") if isinstance(described, dict) else None
        if wanted.get("type") != "json_schema" or not isinstance(found, dict):
            raise ApiError(400, "response_format has type text, json_object or json_schema")
        return found


def checked_cache_salt(salt: str | None) -> str:
    """Return the salt that keeps a request's cached contexts apart; empty if there is none.

    Raises:
        ApiError: the salt is empty or too long.
    """
    if salt is None:
        return ""
    if not 1 <= len(salt) <= CACHE_SALT_CHARACTERS_MAX:
        why = f"cache_salt has 1 to {CACHE_SALT_CHARACTERS_MAX} characters, got {len(salt)}"
        raise ApiError(400, why, param="cache_salt")
    return salt


class CompletionRequest(OpenAIRequest, kw_only=True):
    """Body of ``POST /v1/completions``."""

    prompt: str | list[Any]
    """One or several prompts, each a text or a list of token ids."""
    logprobs: int | bool | None = None
    """``true`` means 1, as in vLLM, whose models read it so; some clients send it."""
    echo: bool | None = None
    suffix: str | None = None

    REFUSED: ClassVar[Mapping[str, tuple[Any, ...]]] = {**UNSERVED, "suffix": ("",)}

    @property
    def is_prompt_only(self) -> bool:
        """Whether the answer is the echoed prompt alone, for its log-probs."""
        return bool(self.echo) and self.max_tokens == 0

    @property
    def tokens_max(self) -> int | None:
        """Limit of output tokens per choice: 16 if the request names none, as OpenAI has it.

        Prompt-only requests generate one token that is not shown but counted, as in vLLM.
        """
        if self.is_prompt_only:
            return 1
        return COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def num_top_logprobs(self) -> int | None:
        """Number of likeliest tokens reported beside each token; 0: the sampled token alone."""
        return None if self.logprobs is None else int(self.logprobs)

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Number of likeliest tokens beside each prompt token; an echo's log-probs need them."""
        if self.prompt_logprobs is None and self.echo:
            return self.num_top_logprobs
        return self.prompt_logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        """All prompts of the request.

        Raises:
            ApiError: a prompt is neither text nor token ids, or is empty; or there is none.
        """
        prompt = self.prompt
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            prompt = [prompt]
        for each in prompt:
            is_ids = isinstance(each, list) and all(isinstance(i, int) for i in each)
            if not each or not (is_ids or isinstance(each, str)):
                raise ApiError(400, "prompt must be texts or lists of token ids, none empty")
        if not prompt:
            raise ApiError(400, "prompt must not be empty", param="prompt")
        return prompt


class ChatRequest(OpenAIRequest, kw_only=True):
    """Body of ``POST /v1/chat/completions``."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    """An extension of vLLM's, as are all fields below."""
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Further names for the chat template, such as ``enable_thinking``."""
    echo: bool | None = None
    return_prompt_text: bool | None = None
    required_prefix_token_ids: list[int] | None = None
    """Tokens of the conversation up to its last assistant message, as NeMo-Gym keeps them."""

    REFUSED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **{k: v for k, v in UNSERVED.items() if k not in HONOURED_IN_CHATS},
        "echo": (False,),
    }

    @property
    def rendering(self) -> ChatRendering:
        """Options of the chat template.

        Raises:
            ApiError: the options contradict each other.
        """
        return _rendering(self, self.reasoning_effort)

    @property
    def tokens_max(self) -> int | None:
        """Limit of output tokens per choice: from the newer field, else from the older one."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_top_logprobs(self) -> int | None:
        """Number of likeliest tokens reported beside each token; None unless ``logprobs``."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def shared_options(self) -> dict[str, Any]:
        """Return the options of ``generate`` that the gateway and the servers read alike.

        Raises:
            ApiError: a field can't be honoured.
        """
        if self.top_logprobs and not self.logprobs:
            why = "when using `top_logprobs`, `logprobs` must be set to true."
            raise ApiError(400, why, param="top_logprobs")
        return super().shared_options()

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        """Tools that the prompt describes to the model; of ``allowed_tools``, those it names."""
        if self._allowed is None:
            return None if self.tool_choice == "none" else self.tools or None
        named = self._allowed.get("tools")
        names = [_function_name(each) for each in named] if isinstance(named, list) else []
        tools = {_function_name(tool): tool for tool in self.tools or ()}
        unknown = next((name for name in names if name not in tools), None)
        if unknown is not None or not names:
            why = f"tool_choice.allowed_tools names tools of the request, got {unknown or named!r}"
            raise ApiError(400, f"{why:.300}", param="tool_choice")
        return [tools[name] for name in dict.fromkeys(names)]

    @property
    def call_choice(self) -> str | dict[str, Any] | None:
        """``tool_choice`` among the :attr:`offered_tools`."""
        if self._allowed is None:
            return self.tool_choice
        mode = self._allowed.get("mode")
        if mode not in ("auto", "required"):
            why = f"tool_choice.allowed_tools.mode is auto or required, got {mode!r:.80}"
            raise ApiError(400, why, param="tool_choice")
        return str(mode)

    @property
    def token_sampling(self) -> dict[str, Any]:
        """Sampling parameters that were given, by the names of ``/inference/v1/generate``."""
        names = [name for name in Sampling.__struct_fields__ if name not in UNSERVED]
        named = {name: getattr(self, name) for name in names}
        named |= {"max_tokens": self.tokens_max, "logprobs": self.num_top_logprobs}
        if self.schema is not None:
            named["structured_outputs"] = {"json": self.schema}
        return {name: value for name, value in named.items() if value is not None}

    @property
    def _allowed(self) -> dict[str, Any] | None:
        choice = self.tool_choice
        if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
            return None
        allowed = choice.get("allowed_tools")
        return allowed if isinstance(allowed, dict) else {}


def _function_name(tool: object) -> str | None:
    function = tool.get("function") if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


HOSTED_TOOL_DROPPED = "tools of this type don't run here, so the model is not told of them"


@lru_cache(maxsize=64)
def warn_dropped(kind: str, why: str) -> None:
    """Log once for each kind that something of a request has been left out."""
    log.warning("dropped=%s from requests: %s", kind, why)


class BatchChatRequest(ChatRequest, kw_only=True):
    """Body of ``POST /v1/chat/completions/batch``: several conversations, a choice for each."""

    messages: list[list[dict[str, Any]]]  # type: ignore[assignment]

    def refuse_unserved_in_batches(self) -> None:
        """Check that there are conversations, one choice for each, and no stream, tools or prefix.

        Raises:
            ApiError: the batch has something that vLLM refuses in batches, too.
        """
        if not self.messages or not all(self.messages):
            raise ApiError(400, "messages must be conversations, none empty", param="messages")
        many = self.choices_per_prompt != 1
        unserved: dict[str, Any] = {"stream": self.stream, "tools": self.tools, "n": many}
        unserved["required_prefix_token_ids"] = self.required_prefix_token_ids
        for name, is_requested in unserved.items():
            if is_requested:
                raise ApiError(400, f"Batch chat completions do not support {name}.", param=name)


class TokenSampling(Sampling, kw_only=True):
    """``sampling_params`` of ``/inference/v1/generate``."""

    logprobs: int | None = None
    prompt_logprob_start: Any = None
    truncate_prompt_tokens: Any = None
    positions_from: Annotated[int, msgspec.Meta(ge=0)] = msgspec.field(
        default=0, name="routed_experts_prompt_start"
    )
    """Number of prompt tokens whose attachments by position the client has already."""

    REFUSED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **UNSERVED,
        "prompt_logprob_start": (0,),
        "truncate_prompt_tokens": (),
    }

    @property
    def num_top_logprobs(self) -> int | None:
        """Number of likeliest tokens reported beside each token; 0: the sampled token alone."""
        return self.logprobs


class GenerateRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /inference/v1/generate``: tokens in, tokens out."""

    features: Any = None
    content_parts: Any = None
    priority: Any = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    token_ids: list[int]
    sampling_params: TokenSampling
    model: str | None = None
    request_id: str | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    output_mode: str = "tokens"
    cache_salt: str | None = None

    REFUSED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "features": ({}, []),  # images and the like
        "content_parts": ([],),
        "priority": (0,),
        "kv_transfer_params": ({},),
        "ec_transfer_params": ({},),
    }
    IGNORED: ClassVar[frozenset[str]] = frozenset()


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /tokenize``: a text, or a conversation to be rendered as a prompt."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def rendering(self) -> ChatRendering:
        """Options of the chat template.

        Raises:
            ApiError: the options contradict each other.
        """
        return _rendering(self)


class VllmTokenizeRequest(TokenizeRequest, kw_only=True):
    """Body of ``POST /tokenize``: a text, or a conversation to be rendered as a prompt."""

    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    required_prefix_token_ids: list[int] | None = None


def _rendering(
    request: ChatRequest | TokenizeRequest, reasoning_effort: str | None = None
) -> ChatRendering:
    continues = bool(request.continue_final_message)
    if continues and request.add_generation_prompt:
        why = "Cannot set both `continue_final_message` and `add_generation_prompt` to True."
        raise ApiError(400, why, param="continue_final_message")
    names = dict(request.chat_template_kwargs or {})
    if reasoning_effort is not None:  # templates without these variables ignore them, as in vLLM
        names = {"enable_thinking": reasoning_effort != "none", **names}
        names["reasoning_effort"] = reasoning_effort
    begins = request.add_generation_prompt is not False and not continues
    return ChatRendering(begins, continues, names)


def required_prefix(request: ChatRequest | VllmTokenizeRequest) -> list[int]:
    """Return the tokens with which a conversation's prompt must begin; empty for none.

    NeMo-Gym sends them as ``required_prefix_token_ids``, or as the ``prompt_token_ids`` and
    ``generation_token_ids`` of the last message that has them.

    Raises:
        ApiError: a message's fields are not lists of token ids.
    """
    if request.required_prefix_token_ids is not None:
        return request.required_prefix_token_ids
    for message in reversed(request.messages or ()):
        if "prompt_token_ids" in message:
            given = [message["prompt_token_ids"], message.get("generation_token_ids")]
            try:
                prompt, generation = msgspec.convert(given, list[list[int]])
            except msgspec.ValidationError as error:
                why = f"a message's prompt_token_ids and generation_token_ids are refused: {error}"
                raise ApiError(400, why, param="messages") from None
            return [*prompt, *generation]
    return []


def generate_options(sampling: Sampling, model_stops: tuple[int, ...]) -> dict[str, Any]:
    """Return sampling parameters as options of :meth:`Episode.generate`.

    Seed and number of tokens are not included. ``model_stops`` are the model's own stop tokens.

    Raises:
        ApiError: a field can't be honoured.
    """
    _refuse_out_of_range(sampling)
    options = {"temperature": 1.0, **sampling.shared_options()}
    own = () if sampling.ignore_eos else model_stops
    options["stop_token_ids"] = [*own, *(sampling.stop_token_ids or ())]
    return options


def _refuse_out_of_range(sampling: Sampling) -> None:
    n, temperature, max_tokens = (
        sampling.choices_per_prompt,
        sampling.temperature,
        sampling.tokens_max,
    )
    if n < 1:
        raise ApiError(400, f"n must be at least 1, got {n}.", param="n")
    if temperature is not None and temperature < 0:
        why = f"temperature must be non-negative, got {temperature}."
        raise ApiError(400, why, param="temperature")
    if n > 1 and temperature == 0:
        raise ApiError(400, f"n must be 1 when using greedy sampling, got {n}.")
    if max_tokens is not None and max_tokens < 1:
        why = f"max_tokens must be at least 1, got {max_tokens}."
        raise ApiError(400, why, param="max_tokens")


@dataclass(frozen=True, slots=True)
class Prompt:
    """Prompt of one or more choices."""

    token_ids: list[int]
    text: str | None = None
    """The client's text, or the rendered conversation; None if it gave token ids."""
    media: Sequence[Media] = ()
    """Images of the conversation, whose placeholders in ``token_ids`` are repeated."""
