"""Per-token attachments of one turn: raw log-probs and top tokens.

:class:`TurnTracker` appends them as steps arrive, for turns whose sampling options request them.
"""

from array import array

from tidegate.transport.messages import SamplingParams, TokenDetails

ITEM_BYTES = 4
"""Bytes of an int32, and of a float32."""


class TurnDetails:
    """Raw log-probs and likeliest tokens of one turn, in token order.

    If an engine omits values, they cannot be matched with tokens, and none are returned.
    """

    __slots__ = ("raw_logprobs", "raw_per_token", "top_ids", "top_logprobs", "top_per_token")

    def __init__(self, sampling: SamplingParams) -> None:
        self.raw_per_token = int(sampling.raw_logprobs)
        self.raw_logprobs: array[float] = array("f")
        self.top_per_token = sampling.top_logprobs
        """Number of likeliest tokens for each token."""
        self.top_ids: array[int] = array("i")
        self.top_logprobs: array[float] = array("f")

    def append(self, details: TokenDetails, tokens: int, *, tokens_before: int) -> None:
        """Append the details of one step's ``tokens`` tokens, after ``tokens_before`` earlier ones.

        If any requested value of any token so far is missing, all values are deleted, because they
        could no longer be matched with tokens.
        """
        if self._counts() == self._requested_counts(tokens_before) and _counts(
            details
        ) == self._requested_counts(tokens):
            self.restore(details)
        else:
            del self.raw_logprobs[:], self.top_ids[:], self.top_logprobs[:]

    def restore(self, details: TokenDetails) -> None:
        """Append saved columns, when a saved state is loaded."""
        self.raw_logprobs.frombytes(details.raw_logprobs)
        self.top_ids.frombytes(details.top_ids)
        self.top_logprobs.frombytes(details.top_logprobs)

    def _counts(self) -> tuple[int, int, int]:
        return len(self.raw_logprobs), len(self.top_ids), len(self.top_logprobs)

    def _requested_counts(self, tokens: int) -> tuple[int, int, int]:
        return self.raw_per_token * tokens, self.top_per_token * tokens, self.top_per_token * tokens

    def raw_of(self, tokens: int) -> list[float] | None:
        """Return one raw log-prob per token, if they are known for all ``tokens`` tokens."""
        return self.raw_logprobs.tolist() if len(self.raw_logprobs) == tokens else None

    def top_of(self, tokens: int, *, start: int = 0) -> list[dict[int, float]] | None:
        """Return the likeliest tokens and their log-probs for each token from ``start`` on; None
        unless they are known for all ``tokens`` tokens.

        Likeliest first; tokens that could not be sampled (-inf) are omitted.
        """
        each = self.top_per_token
        if not each or len(self.top_ids) != each * tokens:
            return None
        ids = self.top_ids[start * each :].tolist()
        logprobs = self.top_logprobs[start * each :].tolist()
        pairs = [(i, p) for i, p in zip(ids, logprobs, strict=True)]
        return [
            {i: p for i, p in pairs[first : first + each] if p > float("-inf")}
            for first in range(0, len(pairs), each)
        ]


def _counts(details: TokenDetails) -> tuple[int, int, int]:
    columns = (details.raw_logprobs, details.top_ids, details.top_logprobs)
    raw, ids, logprobs = (len(column) // ITEM_BYTES for column in columns)
    return raw, ids, logprobs
