"""Interface of logits processors: callables that edit a turn's logits before each token is sampled.

Users' modules may implement it; :mod:`tidegate.engine.sampling.processors` says how a turn names a
processor. Those that only exclude tokens are :class:`TokenMask`, which compiled code applies as it
draws.

Letters in shapes: V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from tidegate.engine.models.tokenizer import ModelTokenizer


@dataclass(frozen=True, slots=True)
class TurnTokens:
    """A turn's tokens so far. Read only."""

    prompt: npt.NDArray[np.int32]
    output: npt.NDArray[np.int32]
    """Tokens sampled so far, by any engine; only ever appended to."""


class TurnLogitsProcessor(Protocol):
    """Edits one turn's logits. Each turn has its own instance, so it may keep state."""

    def __call__(self, logits: torch.Tensor, turn: TurnTokens) -> None:
        """Edit ``logits`` [V], float32, in place; -inf excludes a token, and at least
        one must remain.

        An exception ends the turn, and its message is returned to the requester.
        """


class TokenMask:
    """Processor that only excludes tokens: this one always the same, subclasses by the output."""

    def __init__(self, is_allowed: npt.NDArray[np.bool_]) -> None:
        """``is_allowed``: [V]."""
        self.allowed = np.zeros(-(-len(is_allowed) // 32), np.uint32)
        """One bit per token that may be sampled next, the first in the lowest bit: always the same
        array, [V / 32, rounded up]."""
        packed = np.packbits(is_allowed, bitorder="little")
        self.allowed.view(np.uint8)[: len(packed)] = packed

    def update(self, output: npt.NDArray[np.int32]) -> None:
        """Set ``allowed`` for the token that follows ``output``, which is only ever appended to."""

    def __call__(self, logits: torch.Tensor, turn: TurnTokens) -> None:
        """Exclude the tokens in torch, for a row that no compiled code draws."""
        self.update(turn.output)
        packed = self.allowed.view(np.uint8)
        allowed = torch.from_numpy(np.unpackbits(packed, count=len(logits), bitorder="little"))
        logits.masked_fill_(allowed == 0, -torch.inf)


def are_among(token_ids: Sequence[int], vocab_size: int) -> npt.NDArray[np.bool_]:
    """Return which tokens of the vocabulary are among ``token_ids``, [V]."""
    found = np.zeros(vocab_size, np.bool_)
    found[[*token_ids]] = True
    return found


@dataclass(frozen=True, slots=True)
class ProcessorSetup:
    """Properties of the turn and the model that a processor may need when it is made."""

    vocab_size: int
    stop_token_ids: tuple[int, ...]
    """The turn's stop tokens that are in the vocabulary."""
    tokenizer: ModelTokenizer


MakeProcessor = Callable[[dict[str, Any], ProcessorSetup], TurnLogitsProcessor]
"""Makes one turn's processor from its arguments; an exception refuses the turn."""
