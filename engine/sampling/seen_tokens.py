"""Token counts of one turn's context, for repetition, presence and frequency penalties.

Kept by ``RowOptions`` and updated per token, because recounting would read the whole context. The
formulas are in :mod:`tidegate.kernels.penalties`.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from tidegate.kernels.penalties import SeenTokens
from tidegate.transport.sampling import SamplingParams


class SeenCounts:
    """One turn's distinct tokens that are penalised, with their output counts."""

    __slots__ = ("_counts", "_ids", "_places", "frequency", "presence", "repetition")

    def __init__(
        self,
        asked: SamplingParams,
        tokens: npt.NDArray[np.int32],
        prompt_tokens: int,
        known_tokens: int,
        vocab_size: int,
    ) -> None:
        """``tokens`` starts with the prompt and the output so far, and has room for the rest."""
        self.repetition = asked.repetition_penalty
        self.frequency = asked.frequency_penalty
        self.presence = asked.presence_penalty
        room = min(vocab_size, len(tokens))
        self._ids = np.empty(room, np.int64)
        self._counts = np.zeros(room, np.float32)
        prompt = np.empty(0, np.int32)
        if self.repetition != 1:  # the other penalties count the output only
            prompt = np.unique(tokens[:prompt_tokens])
        self._ids[: len(prompt)] = prompt
        self._places = {token_id: place for place, token_id in enumerate(prompt.tolist())}
        """Index of each token in ``_ids`` and ``_counts``."""
        for token_id in tokens[prompt_tokens:known_tokens].tolist():
            self.add(token_id)

    def add(self, token_id: int) -> None:
        """Count one more output token."""
        place = self._places.setdefault(token_id, len(self._places))
        self._ids[place] = token_id
        self._counts[place] += 1

    @property
    def token_ids(self) -> npt.NDArray[np.int64]:
        """Distinct tokens, in no particular order."""
        return self._ids[: len(self._places)]

    @property
    def output_counts(self) -> npt.NDArray[np.float32]:
        """Number of occurrences of each in the output."""
        return self._counts[: len(self._places)]


def batched(rows: Sequence[int], turns: Sequence[SeenCounts], vocab_size: int) -> SeenTokens:
    """Concatenate the turns' counts into columns; ``rows`` are the turns' rows in the logits."""
    sizes = [len(turn.token_ids) for turn in turns]

    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.from_numpy(np.repeat(np.array(values, np.float32), sizes))

    places = [row * vocab_size + turn.token_ids for row, turn in zip(rows, turns, strict=True)]
    return SeenTokens(
        places=torch.from_numpy(np.concatenate(places)),
        output_counts=torch.from_numpy(np.concatenate([turn.output_counts for turn in turns])),
        repetition=column([turn.repetition for turn in turns]),
        frequency=column([turn.frequency for turn in turns]),
        presence=column([turn.presence for turn in turns]),
    )
