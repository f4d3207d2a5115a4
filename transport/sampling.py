"""Sampling options of a turn, as they travel in ``SubmitTurn``.

The orchestrator fills them from the user's options; engines apply them to logits. Names, formulas
and their order are those of vLLM's sampler (``vllm/v1/sample``).
"""

import json
from collections.abc import Mapping
from typing import Any, TypedDict

import msgspec

from tidegate.errors import ConfigError

FORMER_FIELDS = {"processors": "logits_processors"}
"""Former name of a field of ``SamplingParams`` -> its name now, for journals and recordings."""


class TokenBias(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Value added to one token's logit."""

    token_id: int
    bias: float


class AttachmentOptions(TypedDict, total=False):
    """Options that request token attachments, as :class:`SamplingParams` describes them; a
    ``GeneratedTurn`` has each under the option's name."""

    top_logprobs: int
    raw_logprobs: bool
    kept_tokens: bool
    routed_experts: bool
    hidden_states: bool


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """Sampling options of one turn. Reported log-probabilities are those after all of these steps.

    A logit ``x`` becomes a probability by these steps, in this order; each is a no-op by default:

    1. ``x + bias`` for the tokens of ``logit_bias``.
    2. Stop tokens are excluded for the first ``min_tokens`` tokens.
    3. ``repetition_penalty`` r: ``x / r`` if x > 0, else ``x * r``, for tokens of the prompt or the
      output so far. Then ``x - frequency_penalty * n - presence_penalty * (n > 0)``, where the
      token occurs n times in the output so far.
    4. ``logits_processors``, one after another.
    5. ``x / temperature``.
    6. ``min_p``: tokens with less than this share of the most likely token's probability are
      excluded.
    7. ``top_k``, then ``top_p`` of the remaining tokens; the kept tokens are renormalised.

    Temperature 0 takes the most likely token after step 4. Tokens that a turn sampled before it was
    migrated count as output, not as prompt, so a migration does not change the result.
    """

    max_tokens: int
    """Largest number of output tokens, at least 1."""
    temperature: float = 1.0
    """0 takes the most likely token; its log-probability is then that at temperature 1."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the fewest most likely tokens whose probabilities sum to at least this."""
    stop_token_ids: list[int] = []
    """Tokens that end the turn when sampled; the stop token is part of the output."""
    seed: int = 0
    """Seed of the turn's random numbers; output token i uses number i."""
    min_p: float = 0.0
    """Minimum probability relative to the most likely token, in [0, 1]; Nguyen et al. 2024,
    arXiv:2407.01082."""
    repetition_penalty: float = 1.0
    """Above 1 makes tokens already seen less likely; Keskar et al. 2019, arXiv:1909.05858, section
    4.1."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: list[TokenBias] = []
    min_tokens: int = 0
    """Number of first output tokens during which neither stop tokens nor stop strings end the
    turn."""
    stop_strings: list[str] = []
    """The turn ends with the token that completes one of these in its output text, special tokens
    included; that token is part of the output."""
    top_logprobs: int = 0
    """Number of most likely tokens to report, with their log-probabilities, at each position."""
    raw_logprobs: bool = False
    """Whether to report each token's log-probability before all of these steps, at temperature
    1."""
    kept_tokens: bool = False
    """Whether to report, for each token, the tokens that all of these steps left to sample from."""
    routed_experts: bool = False
    """Whether to report the experts that each mixture layer chose for every context position."""
    hidden_states: bool = False
    """Whether to report the normed last hidden state that each token was sampled from."""
    logits_processors: list[str] = []
    """Logits processors, as serialised by :meth:`LogitsProcessor.to_str`."""
    adapter: str = ""
    """Name of the LoRA adapter to compute with; empty: none."""
    cache_salt: str = ""
    """Prefix-cache namespace: turns share KV of equal contexts only with turns of the same salt."""
    adapter_version: int | None = None
    """Version of an ``adapter`` that has weight versions of its own: a number pins the turn to that
    version, 0 follows the adapter's live one. None: the adapter is part of the weights."""

    @property
    def requests_attachments(self) -> bool:
        """Whether any attachment of :mod:`~tidegate.transport.attachments` is requested."""
        return self.requests_tokens or self.requests_positions

    @property
    def requests_tokens(self) -> bool:
        """Whether any attachment by output token is requested."""
        return bool(
            self.top_logprobs or self.raw_logprobs or self.kept_tokens or self.hidden_states
        )

    @property
    def requests_positions(self) -> bool:
        """Whether any attachment by context position is requested."""
        return self.routed_experts

    @classmethod
    def from_record(cls, record: Any) -> "SamplingParams":
        """Return the parameters that this or an earlier version has recorded.

        Raises:
            msgspec.ValidationError: the record is not a dict, or a value has another type.
        """
        if not isinstance(record, dict):
            raise msgspec.ValidationError(f"sampling options must be a map, got {record!r:.100}")
        return msgspec.convert({FORMER_FIELDS.get(k, k): v for k, v in record.items()}, cls)


JSON_SPACE_PATTERN = r"[ \n\r\t]{0,24}"
"""White space that a JSON grammar allows between two tokens of JSON: lines indented by up to 23
spaces. Without a bound a weak model may spend all of its tokens on spaces."""


def with_bounded_space(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON schema whose grammar bounds white space, unless the schema sets llguidance's
    ``x-guidance`` itself."""
    return {"x-guidance": {"whitespace_pattern": JSON_SPACE_PATTERN}, **schema}


class LogitsProcessor(msgspec.Struct, frozen=True):
    """Name of a logits processor that engines have registered, and its arguments.

    Built-in processors are ``allowed_tokens`` and ``disallowed_tokens`` (``token_ids``),
    ``bad_words`` (``words``), ``temperature_schedule`` (``initial``, ``final``,
    ``warmup_tokens``), ``json_schema`` (``schema``) and ``grammar`` (``lark``); engines also have
    those of the modules that they were started with.
    """

    name: str
    arguments: dict[str, Any] = {}

    def to_str(self) -> str:
        """Serialise as JSON, keys in their own order, which is that of generation in a schema.

        Raises:
            ConfigError: an argument cannot be represented in JSON.
        """
        try:
            plain = msgspec.to_builtins(self)
            return json.dumps(plain, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"processor {self.name!r} can't be written as JSON: {error}"
            ) from None

    @classmethod
    def from_str(cls, text: str) -> "LogitsProcessor":
        """Parse the output of :meth:`to_str`.

        Raises:
            ConfigError: the text is not a JSON object with a name and optional arguments.
        """
        try:
            return msgspec.json.decode(text.encode(), type=cls)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"{text!r:.200} is no processor ({error}); write it as "
                f'{{"name": "allowed_tokens", "arguments": {{"token_ids": [1, 2]}}}}'
            ) from None
