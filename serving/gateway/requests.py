"""Request bodies of OpenAI's API, checked, and turned into options of ``generate``.

Fields that mean nothing to an engine (``user``, ``store``, …) are ignored, as other servers do.
Fields that would change the output are refused by name if they are not honoured.
"""

from typing import Any, ClassVar

import msgspec

from tidegate.errors import ChatRefused
from tidegate.orchestrator.episodes.forced_calls import is_free
from tidegate.transport.sampling import Processor

NO_SEED = -1
"""What vLLM's clients write for "no seed"."""

CHOICES_MAX = 64
"""``n`` of one request: each is a row of the trainer's batch."""


TOP_LOGPROBS_MAX = 20
"""Log-probs of the likeliest tokens beside each token, as in OpenAI's API and vLLM's default. 4,096
of them cost 96 s and 8 GB for one request of 110 bytes."""

STOP_STRINGS_MAX = 64
"""Stop strings of one request: an output's text is searched for each of them."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "use_beam_search": (False,),
    "best_of": (1,),
    "length_penalty": (1, 1.0),
    "bad_words": ([],),
    "logits_processors": ([],),
    "prompt_embeds": (),
    "truncate_prompt_tokens": (),
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


class Unsupported(msgspec.Struct, kw_only=True):
    """The fields that are refused by name, so that no client takes an output for another one."""

    use_beam_search: Any = None
    best_of: Any = None
    length_penalty: Any = None
    bad_words: Any = None
    logits_processors: Any = None
    prompt_embeds: Any = None
    truncate_prompt_tokens: Any = None
    thinking_token_budget: Any = None
    logprob_token_ids: Any = None
    prompt_logprob_token_ids: Any = None
    trace_decode_token_ids: Any = None
    repetition_detection: Any = None
    watermarking: Any = None
    vllm_xargs: Any = None
    extra_args: Any = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    continue_final_message: Any = None
    documents: Any = None
    functions: Any = None
    function_call: Any = None
    chat_template: Any = None
    chat_template_kwargs: Any = None
    priority: Any = None

    HONOURED: ClassVar[frozenset[str]] = frozenset()
    """Those of them that this kind of request honours."""

    def unsupported_field(self) -> str | None:
        """Return the name of a field that asks for what is not served; None if there is none."""
        for name, neutral in _NEUTRAL.items():
            value = getattr(self, name)
            if value is not None and value not in neutral and name not in self.HONOURED:
                return name
        return None


class Request(Unsupported, kw_only=True):
    """The fields that requests of both kinds have in common."""

    model: str = ""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    """Beside OpenAI's, as vLLM has it: also ``prompt_token_ids`` and ``weight_versions``."""

    OPTIONAL: ClassVar[tuple[str, ...]] = (
        "temperature",
        "top_p",
        "min_p",
        "stop_token_ids",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
    )

    @property
    def own_seed(self) -> int | None:
        """The seed; None if there is none, which vLLM's clients also write as -1."""
        return None if self.seed == NO_SEED else self.seed

    @property
    def choices(self) -> int:
        """How many completions."""
        return 1 if self.n is None else self.n

    @property
    def stops(self) -> list[str]:
        """Strings that end what is said."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def tokens_max(self) -> int | None:
        """Each may have."""
        raise NotImplementedError

    @property
    def top_logprobs_asked(self) -> int | None:
        """How many likely tokens to tell beside each; None: no log-probs at all."""
        raise NotImplementedError

    def options(self) -> dict[str, Any]:
        """As keywords of ``generate``.

        Raises:
            ChatRefused: one can't be honoured.
        """
        if not 1 <= self.choices <= CHOICES_MAX:
            raise ChatRefused(f"n must be from 1 to {CHOICES_MAX}, got {self.choices}")
        if (name := self.unsupported_field()) is not None:
            raise ChatRefused(
                f"{name} is not served: leave it out, got {getattr(self, name)!r:.80}"
            )
        if self.own_seed is not None and self.choices > 1:
            raise ChatRefused("with a seed all n choices would be the same; leave one of them out")
        if (top := self.top_logprobs_asked) is not None and not 0 <= top <= TOP_LOGPROBS_MAX:
            raise ChatRefused(f"log-probs of 0 to {TOP_LOGPROBS_MAX} tokens are told, got {top}")
        if len(self.stops) > STOP_STRINGS_MAX:
            told = f"stop has at most {STOP_STRINGS_MAX} strings, got {len(self.stops)}"
            raise ChatRefused(told)
        options = {k: v for k in self.OPTIONAL if (v := getattr(self, k)) is not None}
        if self.own_seed is not None:
            options["seed"] = self.own_seed
        if self.top_k is not None and self.top_k > 0:
            options["top_k"] = self.top_k  # -1 and 0 mean all, in the dialects that have it
        if self.stop:
            options["stop_strings"] = self.stops
        if self.logit_bias:
            try:
                options["logit_bias"] = {int(k): bias for k, bias in self.logit_bias.items()}
            except ValueError:
                raise ChatRefused("logit_bias must have token ids for its keys") from None
        if self.top_logprobs_asked:
            options["top_logprobs"] = self.top_logprobs_asked
        if self.tokens_max is not None:
            options["max_tokens"] = self.tokens_max
        return options


class ChatRequest(Request, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None

    @property
    def tokens_max(self) -> int | None:
        """The newer name before the older."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def top_logprobs_asked(self) -> int | None:
        """None unless ``logprobs`` is true."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        """Those that the model is told of."""
        return None if self.tool_choice == "none" else self.tools or None

    def options(self) -> dict[str, Any]:
        """As :meth:`Request.options`, and a schema to keep to."""
        options = super().options()
        wanted = self.response_format or {"type": "text"}
        if wanted.get("type") == "json_schema":
            described = wanted.get("json_schema")
            schema = described.get("schema") if isinstance(described, dict) else None
            if not isinstance(schema, dict):
                raise ChatRefused("response_format.json_schema must have a schema, an object")
            if not is_free(self.tool_choice):
                raise ChatRefused("a forced call has its own form: leave out response_format")
            options["processors"] = [Processor("json_schema", {"schema": schema})]
        elif wanted.get("type") != "text":
            raise ChatRefused("response_format must be of type 'text' or 'json_schema'")
        return options


class CompletionRequest(Request, kw_only=True):
    """``POST /v1/completions``; a prompt of token ids goes on in a row that it begins with."""

    prompt: str | list[int]
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None

    @property
    def tokens_max(self) -> int | None:
        """16 unless told otherwise, as OpenAI has it."""
        return self.max_tokens

    @property
    def top_logprobs_asked(self) -> int | None:
        """As asked for."""
        return self.logprobs

    def options(self) -> dict[str, Any]:
        """As :meth:`Request.options`."""
        if self.echo or self.suffix:
            raise ChatRefused("echo and suffix are not served: leave them out")
        if not self.prompt:
            raise ChatRefused("prompt must not be empty")
        return super().options()


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """``POST /tokenize``: a text, or a conversation as it would be a prompt."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None


class RewardRequest(msgspec.Struct, kw_only=True):
    """``POST /sessions/{id}/reward``."""

    reward: float


def decode_body(body: bytes, kind: type[Any]) -> Any:
    """Decode a request of this kind.

    Raises:
        ChatRefused: it is not JSON, or has other fields or types.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ChatRefused(f"the body can't be read: {error}") from None
