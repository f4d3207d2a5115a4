"""What can the doctor ask of any engine? The same few things, whatever its routes are called.

vllm.py and sglang.py say how; nothing here knows what an answer means.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tidegate.cli.engine_doctor.measurements import Identity


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One prompt to go on with."""

    token_ids: tuple[int, ...]
    tokens_max: int
    temperature: float = 0.0
    top_k: int | None = None
    top_logprobs: int = 0
    """Tell so many likeliest tokens' log-probs beside the sampled one's."""
    seed: int | None = None
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What an engine made of it. All per output token."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top: tuple[Mapping[int, float], ...]
    """Log-probs of the likeliest, by token id; empty where none were asked for or told."""
    cached_tokens: int | None
    """Prompt tokens whose KV was there; None where it doesn't tell."""
    has_weight_spans: bool


class ExaminedEngine(Protocol):
    """An engine under examination. Methods may be called from several threads."""

    identity: Identity

    def ask(self, question: Question) -> Answer:
        """Have it answer.

        Raises:
            EngineLost: it doesn't, or refuses.
        """
        ...

    def tokenize(self, text: str) -> list[int] | None:
        """Its tokens for ``text``, without special ones; None if it has no way to tell."""
        ...

    def load_weights(self, directory: Path, *, clears_cache: bool) -> str | None:
        """Have it serve the weights of ``directory``; None, or why it refuses to.

        Raises:
            EngineLost: it doesn't answer.
        """
        ...

    def cached_tokens_total(self) -> int | None:
        """Prompt tokens found in its cache since it started; None where it doesn't count."""
        ...
