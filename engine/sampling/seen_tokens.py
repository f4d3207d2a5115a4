"""Token counts of one turn's context, for repetition, presence and frequency penalties.

Counts are updated per token, because recounting would read the whole context. The formulas are in
:mod:`tidegate.kernels.penalties`.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from tidegate.kernels.native import RowEdits
from tidegate.kernels.penalties import SeenTokens
from tidegate.transport.sampling import SamplingParams


class SeenCounts:
    """One turn's distinct tokens that are penalised, with their output counts."""

    __slots__ = ("_counts", "_ids", "_indices", "frequency", "presence", "repetition")

    def __init__(
        self,
        params: SamplingParams,
        tokens: npt.NDArray[np.int32],
        prompt_tokens: int,
        known_tokens: int,
        vocab_size: int,
    ) -> None:
        """``tokens`` starts with the prompt and the output so far, and has room for the rest."""
        self.repetition = params.repetition_penalty
        self.frequency = params.frequency_penalty
        self.presence = params.presence_penalty
        capacity = min(vocab_size, len(tokens))
        self._ids = np.empty(capacity, np.int64)
        self._counts = np.zeros(capacity, np.float32)
        prompt = np.empty(0, np.int32)
        if self.repetition != 1:  # the other penalties count the output only
            prompt = np.unique(tokens[:prompt_tokens])
        self._ids[: len(prompt)] = prompt
        self._indices = {token_id: index for index, token_id in enumerate(prompt.tolist())}
        """Index of each token in ``_ids`` and ``_counts``."""
        for token_id in tokens[prompt_tokens:known_tokens].tolist():
            self.add(token_id)

    def add(self, token_id: int) -> None:
        """Count one more output token."""
        index = self._indices.setdefault(token_id, len(self._indices))
        self._ids[index] = token_id
        self._counts[index] += 1

    def write_to(self, edits: RowEdits) -> None:
        """Have compiled code penalise these tokens; ``edits.seen`` must follow their number."""
        edits.seen_ids, edits.seen_counts = self._ids.ctypes.data, self._counts.ctypes.data
        edits.seen = len(self._indices)
        edits.repetition, edits.frequency = self.repetition, self.frequency
        edits.presence = self.presence

    @property
    def token_ids(self) -> npt.NDArray[np.int64]:
        """Distinct tokens, in no particular order."""
        return self._ids[: len(self._indices)]

    @property
    def output_counts(self) -> npt.NDArray[np.float32]:
        """Number of occurrences of each of ``token_ids`` in the output."""
        return self._counts[: len(self._indices)]


def batched(rows: Sequence[int], counts: Sequence[SeenCounts], vocab_size: int) -> SeenTokens:
    """Concatenate the turns' counts into columns; ``rows`` are the turns' rows in the logits."""
    sizes = [len(count.token_ids) for count in counts]

    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.from_numpy(np.repeat(np.array(values, np.float32), sizes))

    indices = [row * vocab_size + count.token_ids for row, count in zip(rows, counts, strict=True)]
    return SeenTokens(
        indices=torch.from_numpy(np.concatenate(indices)),
        output_counts=torch.from_numpy(np.concatenate([count.output_counts for count in counts])),
        repetition=column([count.repetition for count in counts]),
        frequency=column([count.frequency for count in counts]),
        presence=column([count.presence for count in counts]),
    )
