"""Sampling options of ``Episode.generate``: checked, and converted to :class:`SamplingParams`.

:meth:`Episode.generate` and the HTTP servers call :func:`sampling_params`. Options that no engine
could decode are refused here, by name; options that an engine cannot serve are refused by the
engine. :class:`SamplingParams` documents each option.
"""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec

from tidegate.errors import ConfigError, TurnRefused
from tidegate.transport.sampling import (
    AttachmentOptions,
    LogitsProcessor,
    SamplingParams,
    TokenBias,
)

SEED_MASK = 2**64 - 1
"""Seeds may be any int; engines take 64 bits of it."""

SAMPLING_BYTES_MAX = 4 * 1024 * 1024
"""Largest encoded options of one turn: they share a frame with a context of millions of tokens."""

COUNTS = ("max_tokens", "top_k", "min_tokens", "top_logprobs")

COUNT_MAX = 2**31 - 1
"""Largest int32, because tokens are recorded as int32."""

FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


class SamplingOptions(AttachmentOptions, total=False):
    """Keyword arguments of ``generate`` that choose how tokens are sampled, as ``SamplingParams``
    describes them."""

    seed: int
    """Replaces the seed derived from group, rollout and turn; equal contexts then sample
    equally."""
    min_p: float
    """Share of the likeliest token's probability below which tokens are excluded, in [0, 1]; 0
    keeps all."""
    repetition_penalty: float
    """Divisor of the positive logits of tokens that the context has, and factor of negative ones; 1
    changes nothing."""
    presence_penalty: float
    """Value subtracted from the logits of tokens that the output has; 0 changes nothing."""
    frequency_penalty: float
    """Value subtracted from a token's logit for each of its occurrences in the output; 0 changes
    nothing."""
    logit_bias: Mapping[int, float]
    """Value to add to a token's logit, by token id."""
    min_tokens: int
    """Number of output tokens before which no stop token or stop string ends the turn."""
    stop_strings: Sequence[str]
    """Strings that end the turn when the output's text contains one."""
    logits_processors: Sequence[LogitsProcessor | str]
    """Logits processors to apply, in order, by the names under which the engines registered
    them."""
    adapter: str
    """LoRA adapter in place of the run's own; empty for none."""
    adapter_version: int | None
    """Pinned version of an adapter that is published by ``rollouts.adapter()``; default: its live
    one."""
    cache_salt: str
    """Namespace of the prefix cache: the turn shares KV only with turns of the same salt."""


def sampling_params(
    max_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    stop_token_ids: Sequence[int],
    options: SamplingOptions,
) -> SamplingParams:
    """Check all options and return them in their wire form.

    Raises:
        TurnRefused: no engine could read an option.
        TypeError: there is no such option.
    """
    if options and (unknown := options.keys() - SamplingOptions.__annotations__.keys()):
        raise TypeError(f"generate() got an unexpected keyword argument {min(unknown)!r}")
    try:
        plain = _plain(max_tokens, temperature, top_k, top_p, tuple(stop_token_ids))
        return _checked(msgspec.structs.replace(plain, **_as_sent(options))) if options else plain
    except (ConfigError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise TurnRefused(f"generate() got options that no engine can read: {error}") from None


@lru_cache(maxsize=256, typed=True)  # most turns of a run are sampled alike
def _plain(
    max_tokens: int, temperature: float, top_k: int, top_p: float, stop_token_ids: tuple[int, ...]
) -> SamplingParams:
    return _checked(
        SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            stop_token_ids=list(stop_token_ids),
        )
    )


def _as_sent(options: SamplingOptions) -> dict[str, Any]:
    sent: dict[str, Any] = dict(options)
    if "seed" in options:
        sent["seed"] = int(options["seed"]) & SEED_MASK
    if "logit_bias" in options:
        sent["logit_bias"] = [TokenBias(*pair) for pair in sorted(options["logit_bias"].items())]
    if "stop_strings" in options:
        if isinstance(options["stop_strings"], str):
            raise TypeError(f"stop_strings must be a list, got {options['stop_strings']!r}")
        sent["stop_strings"] = list(options["stop_strings"])
    if "logits_processors" in options:
        sent["logits_processors"] = [
            _as_text(processor) for processor in options["logits_processors"]
        ]
    return sent


def _as_text(processor: LogitsProcessor | str) -> str:
    if isinstance(processor, str):
        processor = LogitsProcessor.from_str(processor)
    return processor.to_str()


def _checked(sampling: SamplingParams) -> SamplingParams:
    """Return the options as an engine will decode them; numpy's numbers become Python's."""
    sent = msgspec.msgpack.encode(sampling, enc_hook=_number)
    if len(sent) > SAMPLING_BYTES_MAX:
        raise ValueError(
            f"{len(sent)} bytes of options, where {SAMPLING_BYTES_MAX} can be sent; "
            f"name fewer tokens"
        )
    read = msgspec.msgpack.decode(sent, type=SamplingParams)
    numbers = [getattr(read, name) for name in FLOATS] + [one.bias for one in read.logit_bias]
    if not all(map(math.isfinite, numbers)):
        raise ValueError(
            "sampling options must be finite, got "
            f"{next(n for n in numbers if not math.isfinite(n))}; leave that option out, or pass a "
            "finite value"
        )
    counts = {name: getattr(read, name) for name in COUNTS}
    ids = [*read.stop_token_ids, *(one.token_id for one in read.logit_bias)]
    counts["the largest token id"] = max(ids, key=abs, default=0)
    for name, count in counts.items():
        if abs(count) > COUNT_MAX:
            raise ValueError(f"{name} must be within {COUNT_MAX} of 0, got {count}")
    return read


def _number(value: object) -> object:
    item = getattr(value, "item", None)  # as numpy's and torch's have
    if item is None:
        raise TypeError(f"a sampling option must be a number or text, got {value!r:.200}")
    return item()
