"""What is a logit processor? It edits the logits of one turn before each of its tokens is drawn.

What a user's own has to fit; knows none of them. See :mod:`tidegate.engine.sampling.processors`.

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
    """What a turn has read and written so far. Not to be written to."""

    prompt: npt.NDArray[np.int32]
    output: npt.NDArray[np.int32]
    """Whatever engine sampled it. It only ever grows."""


class LogitProcessor(Protocol):
    """Edits one turn's logits. It may keep what it likes: each turn has its own."""

    def __call__(self, logits: torch.Tensor, turn: TurnTokens) -> None:
        """Edit ``logits`` [V], float32, in place; -inf leaves a token out, but not all of them.

        What it raises ends the turn, and the error is told to whoever asked for it.
        """


@dataclass(frozen=True, slots=True)
class ProcessorSetup:
    """What a processor may want to know of its turn and model when it is made."""

    vocab_size: int
    stop_token_ids: tuple[int, ...]
    """Those of the turn that are in the vocabulary."""
    tokenizer: ModelTokenizer


MakeProcessor = Callable[[dict[str, Any], ProcessorSetup], LogitProcessor]
"""Makes one turn's processor of its arguments; what it raises refuses the turn."""
