"""How are a turn's tokens drawn, and what is told of them? The options of a turn, as they travel.

Knows no tensors: what an option does to logits is the engine's business, and written here for
people. The names, formulas and their order are those of vLLM's sampler (``vllm/v1/sample``).
"""

import json
from typing import Any

import msgspec

from tidegate.errors import ConfigError


class TokenBias(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What is added to one token's logit."""

    token_id: int
    bias: float


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """How a turn's tokens are drawn. Log-probabilities reported are those after all of this.

    A logit ``x`` becomes a probability by these steps, in this order; each does nothing by default:

    1. ``x + bias`` for the tokens of ``logit_bias``.
    2. Stop tokens are left out of the first ``min_tokens`` tokens.
    3. ``repetition_penalty`` r: ``x / r`` if x > 0, else ``x * r``, for tokens of the prompt or the
       output so far. Then ``x - frequency_penalty * n - presence_penalty * (n > 0)``, where the
       token occurs n times in the output so far.
    4. ``processors``, one after another.
    5. ``x / temperature``.
    6. ``min_p``: what has less than this share of the likeliest token's probability is left out.
    7. ``top_k``, then ``top_p`` of what it left; what is kept is renormalised.

    Temperature 0 takes the likeliest token after step 4. What a turn sampled before it was moved is
    its output, not its prompt: it goes on as if nothing had been.
    """

    max_tokens: int
    temperature: float = 1.0
    """0 takes the most likely token; its log-probability is then that at temperature 1."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the fewest most likely tokens whose probabilities sum to at least this."""
    stop_token_ids: list[int] = []
    """Sampling one of these ends the turn; the token is part of the output."""
    seed: int = 0
    min_p: float = 0.0
    """In [0, 1]; Nguyen et al. 2024, arXiv:2407.01082."""
    repetition_penalty: float = 1.0
    """Above 1 makes tokens seen less likely; Keskar et al. 2019, arXiv:1909.05858, section 4.1."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: list[TokenBias] = []
    min_tokens: int = 0
    """The first so many output tokens of the turn end it neither by stop token nor stop string."""
    stop_strings: list[str] = []
    """The turn ends with the token that completes one of these in its output's text, special tokens
    included; that token is part of the output."""
    top_logprobs: int = 0
    """Tell so many of the likeliest tokens, with their log-probabilities, for each token."""
    raw_logprobs: bool = False
    """Also tell each token's log-probability before all of these steps, at temperature 1."""
    processors: list[str] = []
    """As :meth:`Processor.to_str` writes them."""
    adapter: str = ""
    """The LoRA adapter that the model computes with, by its name; empty: none."""
    cache_salt: str = ""
    """Turns share KV of equal contexts with turns of the same salt only."""


class Processor(msgspec.Struct, frozen=True):
    """A logit processor that engines know by name, and what it is told.

    Engines have ``allowed_tokens`` and ``disallowed_tokens`` (``token_ids``),
    ``temperature_schedule`` (``initial``, ``final``, ``warmup_tokens``), ``json_schema``
    (``schema``), ``grammar`` (``lark``), and those of the modules that they were started with.
    """

    name: str
    arguments: dict[str, Any] = {}

    def to_str(self) -> str:
        """JSON, keys in their own order: a schema's properties are to be written in that.

        Raises:
            ConfigError: an argument is nothing that JSON has a word for.
        """
        try:
            plain = msgspec.to_builtins(self)
            return json.dumps(plain, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"processor {self.name!r} can't be written as JSON: {error}"
            ) from None

    @classmethod
    def from_str(cls, text: str) -> "Processor":
        """Read what :meth:`to_str` wrote.

        Raises:
            ConfigError: it is no JSON object with a name, and arguments if there are any.
        """
        try:
            return msgspec.json.decode(text.encode(), type=cls)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"{text!r:.200} is no processor ({error}); write it as "
                f'{{"name": "allowed_tokens", "arguments": {{"token_ids": [1, 2]}}}}'
            ) from None
