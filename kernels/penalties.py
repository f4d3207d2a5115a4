"""Logit bias, bans, and repetition, frequency and presence penalties, in place, with torch.

The caller keeps the token counts. Only the listed tokens of a row are touched.

Letters in shapes: S rows, V vocabulary, E entries: (row, token) pairs, of all rows together.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class SeenTokens:
    """Tokens to penalise, each once per row."""

    indices: torch.Tensor
    """[E], int64: ``row * V + token``."""
    output_counts: torch.Tensor
    """[E], float32: occurrences in the output so far; 0 for tokens of the prompt alone."""
    repetition: torch.Tensor
    """[E], float32, above 0: the row's repetition penalty."""
    frequency: torch.Tensor
    """[E], float32: the row's frequency penalty."""
    presence: torch.Tensor
    """[E], float32: the row's presence penalty."""


def penalize_(logits: torch.Tensor, seen: SeenTokens) -> None:
    """Apply all three penalties to ``logits`` [S, V], float32, contiguous, in place.

    Repetition first, as in vLLM and `transformers`: positive logits are divided, others multiplied.
    """
    flat = logits.view(-1)
    x = flat[seen.indices]
    x = torch.where(x > 0, x / seen.repetition, x * seen.repetition)
    x -= seen.frequency * seen.output_counts + seen.presence * (seen.output_counts > 0)
    flat[seen.indices] = x


def bias_(logits: torch.Tensor, indices: torch.Tensor, biases: torch.Tensor) -> None:
    """Add ``biases`` [E], float32, in place; ``indices`` [E] are row * V + token.

    An entry may occur twice: then both biases are added.
    """
    logits.view(-1).index_add_(0, indices, biases)


def ban_(logits: torch.Tensor, indices: torch.Tensor) -> None:
    """Set the logits at ``indices`` [E] to -inf in place."""
    logits.view(-1)[indices] = -torch.inf
