"""Draft tokens by prompt lookup: the tokens that followed the last n-gram earlier in the context.

``--speculative-method lookup`` selects it; vLLM calls it n-gram speculation. It costs one
dictionary lookup per token, and works well if outputs repeat their input, as in code edits, tables
and calculations.
"""

from collections.abc import Sequence

import numpy as np

from tidegate.engine.scheduling.drafts import NO_TOKENS, DraftSource, Tokens
from tidegate.engine.scheduling.sequences import EngineSequence

NGRAM_TOKENS = 3
"""Length of the n-gram to match. Two tokens would often match by chance."""

Ngram = tuple[int, ...]


class NgramIndex:
    """Index of one sequence's n-grams: where each ended last, excluding the end of the context."""

    __slots__ = ("_ends", "_indexed_end")

    def __init__(self) -> None:
        self._ends: dict[Ngram, int] = {}
        self._indexed_end = NGRAM_TOKENS - 1
        """N-grams that end at or before this position are indexed."""

    def find(self, tokens: Tokens, length: int) -> int | None:
        """Index new tokens; return where the last n-gram of ``tokens[:length]`` ended before."""
        start = self._indexed_end - NGRAM_TOKENS + 1
        if length - start <= NGRAM_TOKENS:
            return None
        token_ids: list[int] = tokens[start:length].tolist()
        columns = [token_ids[first:] for first in range(NGRAM_TOKENS)]
        ngrams = list(zip(*columns, strict=False))
        last = ngrams.pop()
        self._ends.update(zip(ngrams, range(self._indexed_end + 1, length), strict=True))
        self._indexed_end = length - 1
        return self._ends.get(last)


class LookupDrafts(DraftSource):
    """Draft tokens from each sequence's own context."""

    def __init__(self) -> None:
        self._indices: dict[int, NgramIndex] = {}

    def propose(self, sequences: Sequence[EngineSequence], counts: Sequence[int]) -> list[Tokens]:
        """Return, for each sequence, the tokens that followed the last n-gram's earlier
        occurrence."""
        return [
            self._propose(sequence, count)
            for sequence, count in zip(sequences, counts, strict=True)
        ]

    def ended(self, sequence: EngineSequence, *, is_whole: bool) -> None:
        """Drop the sequence's index."""
        self._indices.pop(sequence.handle, None)

    def _propose(self, sequence: EngineSequence, count: int) -> Tokens:
        index = self._indices.get(sequence.handle)
        if index is None:
            index = self._indices[sequence.handle] = NgramIndex()
        end = index.find(sequence.tokens, sequence.length)
        if end is None:
            return NO_TOKENS
        # Past the known tokens, repeat with the period between the two occurrences.
        positions = end + np.arange(count) % (sequence.length - end)
        return sequence.tokens[positions]
