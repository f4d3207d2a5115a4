"""Per-token attachments of one turn: raw log-probs and the likeliest tokens.

:class:`TurnTracker` appends them as steps arrive. Only turns that asked for either have them.
"""

from array import array

from tidegate.transport.messages import SamplingParams, TokenDetails

ITEM_BYTES = 4
"""Bytes of an int32, and of a float32."""


class TurnDetails:
    """Raw log-probs and likeliest tokens of one turn, in token order.

    If an engine leaves some out, which tokens they are of is unknown, and none are returned.
    """

    __slots__ = ("raw_each", "raw_logprobs", "top_each", "top_ids", "top_logprobs")

    def __init__(self, sampling: SamplingParams) -> None:
        self.raw_each = int(sampling.raw_logprobs)
        self.raw_logprobs: array[float] = array("f")
        self.top_each = sampling.top_logprobs
        """Number of likeliest tokens for each token."""
        self.top_ids: array[int] = array("i")
        self.top_logprobs: array[float] = array("f")

    def append(self, told: TokenDetails, tokens: int, *, before: int) -> None:
        """Append what came with ``tokens`` tokens of one step, after ``before`` earlier tokens.

        Unless all that was asked for is there, for every token so far, nothing is kept from now on,
        because values could no longer be matched with tokens.
        """
        if self._counts() == self._asked(before) and _counts(told) == self._asked(tokens):
            self.restore(told)
        else:
            del self.raw_logprobs[:], self.top_ids[:], self.top_logprobs[:]

    def restore(self, told: TokenDetails) -> None:
        """Append saved columns, when a saved state is loaded."""
        self.raw_logprobs.frombytes(told.raw_logprobs)
        self.top_ids.frombytes(told.top_ids)
        self.top_logprobs.frombytes(told.top_logprobs)

    def _counts(self) -> tuple[int, int, int]:
        return len(self.raw_logprobs), len(self.top_ids), len(self.top_logprobs)

    def _asked(self, tokens: int) -> tuple[int, int, int]:
        return self.raw_each * tokens, self.top_each * tokens, self.top_each * tokens

    def raw_of(self, tokens: int) -> list[float] | None:
        """Return one raw log-prob per token, if they are known for all ``tokens`` tokens."""
        return self.raw_logprobs.tolist() if len(self.raw_logprobs) == tokens else None

    def top_of(self, tokens: int, *, start: int = 0) -> list[dict[int, float]] | None:
        """Return the likeliest tokens and their log-probs for each token from ``start`` on; None
        unless they are known for all ``tokens`` tokens.

        Likeliest first; tokens that could not be sampled (-inf) are left out.
        """
        each = self.top_each
        if not each or len(self.top_ids) != each * tokens:
            return None
        ids = self.top_ids[start * each :].tolist()
        logprobs = self.top_logprobs[start * each :].tolist()
        pairs = [(i, p) for i, p in zip(ids, logprobs, strict=True)]
        return [
            {i: p for i, p in pairs[first : first + each] if p > float("-inf")}
            for first in range(0, len(pairs), each)
        ]


def _counts(told: TokenDetails) -> tuple[int, int, int]:
    columns = (told.raw_logprobs, told.top_ids, told.top_logprobs)
    raw, ids, logprobs = (len(column) // ITEM_BYTES for column in columns)
    return raw, ids, logprobs
