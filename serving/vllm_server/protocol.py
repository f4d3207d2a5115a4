"""Request bodies of vLLM's API, checked, and turned into options of ``generate``.

Unknown fields are ignored, as in vLLM. Fields of vLLM's that would change the output and are not
honoured are refused by name.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from tidegate.serving.gateway.requests import NO_SEED, STOP_STRINGS_MAX, Unsupported
from tidegate.serving.vllm_server.failures import ServerError
from tidegate.transport.sampling import Processor

CHOICES_MAX = 1024
"""Of one request: ``n`` times its prompts."""

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
"""The schema of ``json_object``."""

CACHE_SALT_CHARACTERS_MAX = 256
"""vLLM has no limit; 43 characters are 256 random bits."""

COMPLETION_TOKENS = 16
"""``max_tokens`` of a completion that names none, as OpenAI has it; others fill the context."""


class Sampling(Unsupported, kw_only=True):
    """How tokens are drawn: the fields that all requests have in common, by vLLM's names."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
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
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    structured_outputs: dict[str, Any] | None = None

    PASSED_ON: ClassVar[tuple[str, ...]] = (
        "temperature",
        "top_p",
        "min_p",
        "min_tokens",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
    )

    @property
    def own_seed(self) -> int | None:
        """The seed; None if there is none, which clients also write as -1."""
        return None if self.seed == NO_SEED else self.seed

    @property
    def choices_per_prompt(self) -> int:
        """``n``, 1 unless told otherwise."""
        return 1 if self.n is None else self.n

    @property
    def top_logprobs_asked(self) -> int | None:
        """How many likely tokens to tell beside each; None: no log-probs at all."""
        raise NotImplementedError

    @property
    def schema(self) -> Mapping[str, Any] | None:
        """The JSON schema that the output is to keep to."""
        outputs = self.structured_outputs or {}
        if outputs.get("json_object"):
            return ANY_OBJECT
        wanted = outputs.get("json")
        return wanted if isinstance(wanted, dict) else None

    @property
    def grammar(self) -> str | None:
        """The grammar that the output is to keep to, as Lark has it: one of vLLM's choices, a
        regular expression of its, or its grammar."""
        outputs = self.structured_outputs or {}
        choices, regex, grammar = (outputs.get(name) for name in ("choice", "regex", "grammar"))
        if isinstance(choices, list) and choices and all(isinstance(c, str) for c in choices):
            # JSON's strings are Lark's, too.
            return f"start: {' | '.join(json.dumps(choice) for choice in choices)}"
        if isinstance(regex, str) and regex:
            # A slash ends it unless a backslash is before it, that isn't one of a pair itself.
            return "start: /" + re.sub(r"\\.|/", _escaped, regex, flags=re.DOTALL) + "/"
        return grammar if isinstance(grammar, str) and grammar else None

    @property
    def stop_strings(self) -> list[str]:
        """As a list, whatever the client wrote."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    def options(self, model_stops: tuple[int, ...]) -> dict[str, Any]:
        """As keywords of ``generate``; ``model_stops`` are the model's own stop tokens.

        Raises:
            ServerError: one can't be honoured.
        """
        self._refuse_impossible()
        options = {k: v for k in self.PASSED_ON if (v := getattr(self, k)) is not None}
        options.setdefault("temperature", 1.0)
        own = () if self.ignore_eos else model_stops
        options["stop_token_ids"] = [*own, *(self.stop_token_ids or ())]
        if self.top_k is not None and self.top_k > 0:
            options["top_k"] = self.top_k  # -1 and 0 mean all
        if self.stop_strings:
            options["stop_strings"] = self.stop_strings
        if self.logit_bias:
            try:
                options["logit_bias"] = {int(k): bias for k, bias in self.logit_bias.items()}
            except ValueError:
                raise ServerError(400, "logit_bias must have token ids for its keys") from None
        if self.top_logprobs_asked:
            options["top_logprobs"] = self.top_logprobs_asked
        if processors := self._processors():
            options["processors"] = processors
        return options

    def _processors(self) -> list[Processor]:
        processors = []
        if self.allowed_token_ids:
            processors.append(Processor("allowed_tokens", {"token_ids": self.allowed_token_ids}))
        if self.schema is not None:
            processors.append(Processor("json_schema", {"schema": dict(self.schema)}))
        elif self.grammar is not None:
            processors.append(Processor("grammar", {"lark": self.grammar}))
        return processors

    def _refuse_impossible(self) -> None:
        if (name := self.unsupported_field()) is not None:
            told = f"{name} is not served: leave it out, got {getattr(self, name)!r:.80}"
            raise ServerError(400, told, param=name)
        if len(self.stop_strings) > STOP_STRINGS_MAX:
            told = f"stop has at most {STOP_STRINGS_MAX} strings, got {len(self.stop_strings)}"
            raise ServerError(400, told, param="stop")
        n = self.choices_per_prompt
        if n < 1:
            raise ServerError(400, f"n must be at least 1, got {n}.", param="n")
        if self.temperature is not None and self.temperature < 0:
            told = f"temperature must be non-negative, got {self.temperature}."
            raise ServerError(400, told, param="temperature")
        if n > 1 and self.temperature == 0:
            raise ServerError(400, f"n must be 1 when using greedy sampling, got {n}.")
        if self.max_tokens is not None and self.max_tokens < 1:
            told = f"max_tokens must be at least 1, got {self.max_tokens}."
            raise ServerError(400, told, param="max_tokens")
        if self.structured_outputs and self.schema is None and self.grammar is None:
            told = "structured_outputs has one of json (an object), choice, regex, grammar"
            raise ServerError(400, told, param="structured_outputs")


class TokenSampling(Sampling, kw_only=True):
    """``sampling_params`` of ``/inference/v1/generate``."""

    logprobs: int | None = None

    @property
    def top_logprobs_asked(self) -> int | None:
        """As asked for; 0 is the sampled token alone."""
        return self.logprobs


class GenerateRequest(msgspec.Struct, kw_only=True):
    """``POST /inference/v1/generate``: tokens in, tokens out."""

    features: Any = None
    """Images and the like, which are refused."""
    token_ids: list[int]
    sampling_params: TokenSampling
    model: str | None = None
    request_id: str | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    output_mode: str = "tokens"
    cache_salt: str | None = None


class OpenAIRequest(Sampling, kw_only=True):
    """What completions of both kinds have beside the sampling."""

    model: str | None = None
    request_id: str | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_weight_versions: bool | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    response_format: dict[str, Any] | None = None

    @property
    def schema(self) -> Mapping[str, Any] | None:
        """Of ``response_format``, or as elsewhere.

        Raises:
            ServerError: another format than text or a schema is wanted.
        """
        wanted = self.response_format or {"type": "text"}
        if wanted.get("type") == "text":
            return super().schema
        if wanted.get("type") == "json_object":
            return ANY_OBJECT
        described = wanted.get("json_schema")
        found = described.get("schema") if isinstance(described, dict) else None
        if wanted.get("type") != "json_schema" or not isinstance(found, dict):
            raise ServerError(400, "response_format has type text, json_object or json_schema")
        return found


class CompletionRequest(OpenAIRequest, kw_only=True):
    """``POST /v1/completions``: one or several prompts, as text or token ids."""

    prompt: str | list[Any]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None

    @property
    def top_logprobs_asked(self) -> int | None:
        """As asked for; 0 is the sampled token alone."""
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each of them.

        Raises:
            ServerError: it is neither texts nor token ids, or there is none.
        """
        prompt = self.prompt
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            prompt = [prompt]
        for one in prompt:
            is_ids = isinstance(one, list) and all(isinstance(i, int) for i in one)
            if not one or not (is_ids or isinstance(one, str)):
                raise ServerError(400, "prompt must be texts or lists of token ids, none empty")
        if not prompt:
            raise ServerError(400, "prompt must not be empty", param="prompt")
        return prompt


class ChatRequest(OpenAIRequest, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Further names for the chat template, such as ``enable_thinking``."""
    echo: bool | None = None

    HONOURED: ClassVar[frozenset[str]] = frozenset({"chat_template_kwargs"})

    @property
    def top_logprobs_asked(self) -> int | None:
        """None unless ``logprobs`` is true."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def unsupported_field(self) -> str | None:
        """As of all requests; ``echo``, too, which completions alone honour."""
        return "echo" if self.echo else super().unsupported_field()


class BatchChatRequest(ChatRequest, kw_only=True):
    """``POST /v1/chat/completions/batch``: several conversations, a choice for each."""

    messages: list[list[dict[str, Any]]]  # type: ignore[assignment]

    def refuse_what_single_ones_may(self) -> None:
        """As vLLM: no streams, no tools, one choice for each.

        Raises:
            ServerError: it asks for one of them.
        """
        if not self.messages or not all(self.messages):
            raise ServerError(400, "messages must be conversations, none empty", param="messages")
        many = self.choices_per_prompt != 1
        for name, is_asked in (("stream", self.stream), ("tools", self.tools), ("n", many)):
            if is_asked:
                raise ServerError(400, f"Batch chat completions do not support {name}.", param=name)


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """``POST /tokenize``: a text, or a conversation as it would be a prompt."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """``POST /detokenize``."""

    tokens: list[int]
    model: str | None = None


class AbortRequest(msgspec.Struct, kw_only=True):
    """``POST /abort_requests``; without ids, of all."""

    request_ids: list[str] | None = None


class LoadAdapterRequest(msgspec.Struct, kw_only=True):
    """``POST /v1/load_lora_adapter``; the server reads the directory."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadAdapterRequest(msgspec.Struct, kw_only=True):
    """``POST /v1/unload_lora_adapter``."""

    lora_name: str


class UpdateRequest(msgspec.Struct, kw_only=True):
    """``POST /update_weights``: one piece for all, or a list with a piece per rank."""

    update_info: dict[str, Any] | list[dict[str, Any]]


class InitRequest(msgspec.Struct, kw_only=True):
    """``POST /init_weight_transfer_engine``."""

    init_info: dict[str, Any]


class FinishRequest(msgspec.Struct, kw_only=True):
    """``POST /finish_weight_update``; its body may be empty."""

    weight_version: str | None = None


class VersionRequest(msgspec.Struct, kw_only=True):
    """``POST /update_weight_version``: a name for what is served already."""

    new_version: str


class CheckRequest(msgspec.Struct, kw_only=True):
    """``POST /weight_checker``."""

    action: str
    baseline: dict[str, str] | None = None


class RpcRequest(msgspec.Struct, kw_only=True):
    """``POST /collective_rpc``."""

    method: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}


def _escaped(found: re.Match[str]) -> str:
    return r"\/" if found[0] == "/" else found[0]


def cache_salt_of(request: GenerateRequest | OpenAIRequest) -> str:
    """What its contexts are kept apart by; empty: by nothing.

    Raises:
        ServerError: it is none that vLLM takes, or too long.
    """
    salt = request.cache_salt
    if salt is None:
        return ""
    if not 1 <= len(salt) <= CACHE_SALT_CHARACTERS_MAX:
        told = f"cache_salt has 1 to {CACHE_SALT_CHARACTERS_MAX} characters, got {len(salt)}"
        raise ServerError(400, told, param="cache_salt")
    return salt


@dataclass(frozen=True, slots=True)
class Prompt:
    """What one or more choices begin with."""

    token_ids: list[int]
    text: str | None = None
    """None where the client gave token ids."""


def read_body(body: bytes, kind: type[Any]) -> Any:
    """A request of this kind.

    Raises:
        ServerError: it is not JSON, or has other fields or types.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise ServerError(400, f"1 validation error: {error}") from None
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ServerError(400, f"Invalid JSON format: {error}") from None
