"""Records of what the doctor measured on an engine: filled by measuring.py, judged by findings.py.

A field is None if it could not be measured. Standard library dataclasses.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

EngineKind = Literal["vllm", "sglang", "tidegate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What an engine reports about itself."""

    kind: EngineKind
    version: str | None
    model: str
    """Model name to use in requests."""
    context_tokens_max: int | None
    paths: frozenset[str]
    """HTTP routes of the server, without those that are switched off."""
    settings: Mapping[str, object]
    """The engine's settings that findings need, by the engine's names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobMode:
    """Whether reported log-probs include temperature and truncation."""

    gap_ratio: float | None
    """Median over token pairs of the log-prob difference at temperature 0.5 over that at 1: 2 if
    temperature is included, 1 if not."""
    truncated_mass: float | None
    """Reported probability of the two most likely tokens while sampling with top_k=2: 1 if
    truncation is included, less if not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """Results of repeated requests. Differences are in nats, up to the first different token."""

    alone_same_tokens: bool
    """Whether a repeated greedy request returned the same tokens."""
    alone_difference: float
    batch_same_tokens: bool
    batch_difference: float
    """Difference between running beside other requests and running alone."""
    seed_same_tokens: bool | None
    """Whether sampling twice with one seed returned the same tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCache:
    """Cached prompt tokens of a prompt sent twice, and then once more with another salt."""

    first_tokens: int | None
    again_tokens: int | None
    salted_tokens: int | None
    difference: float
    """Largest log-prob difference between the first and the second response, in nats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobMismatch:
    """Engine's log-probs against transformers', teacher-forced in float32 on its tokens."""

    tokens: int
    mean: float
    largest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerCheck:
    """Texts that the engine tokenizes differently from the model directory's tokenizer."""

    texts: int
    different: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """Mean log-prob differences of a response, in nats, from two sets of weights."""

    from_new: float
    """Distance from the weights that the engine should have used."""
    from_old: float
    """Distance from the weights before the update."""
    between: float
    """Distance between the two sets of weights on the same tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateProbe:
    """Responses to a prompt with cached KV, sent again after weight updates."""

    is_skipped: bool = False
    """Skipped: the engine does not serve the model's weights, so they could not be restored."""
    refused: str | None = None
    """Why the engine refused new weights; the other fields are then None."""
    cleared: Distance | None = None
    """After an update that clears the cache."""
    kept: Distance | None = None
    """After the update back to the engine's own weights, without clearing the cache."""
    salted: Distance | None = None
    """After the same update as for ``kept``, with another cache salt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """All measurements of one engine."""

    identity: Identity
    logprobs: LogprobMode
    repeats: Repeats
    cache: PrefixCache
    weight_spans: bool
    """Whether responses say which weights sampled which tokens."""
    mismatch: LogprobMismatch | None
    """Difference between engine's and model's log-probs; None without a model directory."""
    tokenizer: TokenizerCheck | None
    """Comparison of the engine's tokenizer with the directory's; None without a model directory, or
    if the engine has no route to tokenize."""
    update: UpdateProbe | None
    """Responses before, during and after a weight update; None unless `--update` was given."""

    @property
    def is_updated(self) -> bool:
        """Whether the engine's weights were changed."""
        return self.update is not None and self.update.cleared is not None
