"""Interface of logits processors: callables that edit a turn's logits before each token is sampled.

Users' modules may implement it; :mod:`tidegate.engine.sampling.processors` says how a turn names a
processor.

Letters in shapes: V vocabulary.
"""

from collections.abc import Callable
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


@dataclass(frozen=True, slots=True)
class ProcessorSetup:
    """Properties of the turn and the model that a processor may need when it is made."""

    vocab_size: int
    stop_token_ids: tuple[int, ...]
    """The turn's stop tokens that are in the vocabulary."""
    tokenizer: ModelTokenizer


MakeProcessor = Callable[[dict[str, Any], ProcessorSetup], TurnLogitsProcessor]
"""Makes one turn's processor from its arguments; an exception refuses the turn."""
