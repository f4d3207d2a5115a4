"""Interface of an engine under examination: generate, tokenize, load weights, count cache hits.

vllm.py and sglang.py implement it over HTTP; the probes call it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tidegate.cli.engine_doctor.measurements import Identity


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRequest:
    """One generation request of a probe, as token ids and sampling options."""

    token_ids: tuple[int, ...]
    tokens_max: int
    temperature: float = 0.0
    top_k: int | None = None
    top_logprobs: int = 0
    """Number of most likely tokens whose log-probs to return."""
    seed: int | None = None
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResponse:
    """Response to a :class:`ProbeRequest`; sequences have one item per output token."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top: tuple[Mapping[int, float], ...]
    """Log-probs of the most likely tokens, by token id; empty if none were requested."""
    cached_tokens: int | None
    """Prompt tokens found in the prefix cache; None if the engine does not report them."""
    has_weight_spans: bool
    """Whether the response says which weight version sampled which tokens."""


class ExaminedEngine(Protocol):
    """An engine under examination. Methods may be called from several threads."""

    identity: Identity

    def generate(self, request: ProbeRequest) -> ProbeResponse:
        """Generate.

        Raises:
            EngineLost: the engine does not respond, or refuses.
        """
        ...

    def tokenize(self, text: str) -> list[int] | None:
        """Return the token ids of ``text``, without special tokens; None without such a route."""
        ...

    def load_weights(self, directory: Path, *, clears_cache: bool) -> str | None:
        """Make the engine serve the weights in ``directory``; return None, or why it refuses.

        Raises:
            EngineLost: the engine does not respond.
        """
        ...

    def cached_tokens_total(self) -> int | None:
        """Return the prompt tokens found in the cache since the start; None without a counter."""
        ...
