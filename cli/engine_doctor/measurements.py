"""What was measured of an engine? Plain records, filled by measuring.py and judged by findings.py.

None of them says whether that is well; a field is None where it could not be measured.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

EngineKind = Literal["vllm", "sglang", "tidegate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who answers at a URL, by its own words."""

    kind: EngineKind
    version: str | None
    model: str
    """As it wants to be named in requests."""
    context_tokens_max: int | None
    paths: frozenset[str]
    """Routes it has; of one that it has and refuses, the path is not there."""
    settings: Mapping[str, object]
    """Those of its own settings that findings ask for, by the engine's own names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobMode:
    """What temperature and truncation do to the log-probs told."""

    gap_ratio: float | None
    """Difference of two tokens' log-probs at temperature 0.5, over that at 1: 2 if temperature is
    in them, 1 if not. The median of some."""
    truncated_mass: float | None
    """Probability of the two likeliest tokens, as told while sampling with top_k=2: 1 if
    truncation is in the log-probs, less if not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """The same request again. Differences are the largest, in nats, while tokens are the same."""

    alone_same_tokens: bool
    alone_difference: float
    batch_same_tokens: bool
    batch_difference: float
    """Beside others that run at once, against alone."""
    seed_same_tokens: bool | None
    """Sampled twice with one seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCache:
    """One prompt sent twice, and then once more with another salt; tokens found in the cache."""

    first_tokens: int | None
    again_tokens: int | None
    salted_tokens: int | None
    difference: float
    """Between the log-probs of the first time and of the second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """The engine's log-probs against transformers', teacher-forced in float32 on its tokens."""

    tokens: int
    mean: float
    largest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerCheck:
    """Texts that the engine tokenizes otherwise than the model directory's tokenizer."""

    texts: int
    different: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """An answer's log-probs against those of two sets of weights; mean differences, in nats."""

    from_new: float
    """Of the weights that it should have answered by."""
    from_old: float
    """Of those before."""
    between: float
    """Of the one set from the other, on the same tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdate:
    """A prompt whose KV was cached, sent again after updates."""

    is_left_out: bool = False
    """It serves other weights than the model's, so there are none to go back to."""
    refused: str | None = None
    """Why it took no new weights; then there is no more."""
    cleared: Distance | None = None
    """After an update that has its cache cleared."""
    kept: Distance | None = None
    """After one, back to its own weights, that hasn't."""
    salted: Distance | None = None
    """After the same, with another salt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """All there is to judge."""

    identity: Identity
    logprobs: LogprobMode
    repeats: Repeats
    cache: PrefixCache
    weight_spans: bool
    """An answer says which weights sampled which tokens."""
    mismatch: Mismatch | None
    """None without a model directory to compare with."""
    tokenizer: TokenizerCheck | None
    """None without one, or where the engine has no way to tokenize."""
    update: WeightUpdate | None
    """None unless its weights were to be changed."""

    @property
    def is_updated(self) -> bool:
        """Whether its weights were changed."""
        return self.update is not None and self.update.cleared is not None
