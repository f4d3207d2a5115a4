"""What was told of a turn's tokens beside their log-probs? Only turns that asked for it have one.

Appended to as steps come, as the tokens are; knows nothing of engines or rollouts.
"""

from array import array

from tidegate.transport.messages import SamplingParams, TokenDetails

ITEM_BYTES = 4
"""Of an int32, and of a float32."""


class TurnDetails:
    """Raw log-probs and likeliest tokens of one turn, token after token.

    An engine that can't tell leaves some out. Then nobody knows whose are missing, and none is
    given out.
    """

    __slots__ = ("raw_each", "raw_logprobs", "top_each", "top_ids", "top_logprobs")

    def __init__(self, sampling: SamplingParams) -> None:
        self.raw_each = int(sampling.raw_logprobs)
        self.raw_logprobs: array[float] = array("f")
        self.top_each = sampling.top_logprobs
        """Likeliest tokens of each token."""
        self.top_ids: array[int] = array("i")
        self.top_logprobs: array[float] = array("f")

    def append(self, told: TokenDetails, tokens: int, *, before: int) -> None:
        """Take in what came with one step, of so many of this turn's tokens; ``before`` were there.

        Unless it is all that was asked for, of each token so far, nothing is kept from now on: of
        what came, nobody could say whose it is.
        """
        if self._counts() == self._asked(before) and _counts(told) == self._asked(tokens):
            self.restore(told)
        else:
            del self.raw_logprobs[:], self.top_ids[:], self.top_logprobs[:]

    def restore(self, told: TokenDetails) -> None:
        """Have what there was when the run was saved."""
        self.raw_logprobs.frombytes(told.raw_logprobs)
        self.top_ids.frombytes(told.top_ids)
        self.top_logprobs.frombytes(told.top_logprobs)

    def _counts(self) -> tuple[int, int, int]:
        return len(self.raw_logprobs), len(self.top_ids), len(self.top_logprobs)

    def _asked(self, tokens: int) -> tuple[int, int, int]:
        return self.raw_each * tokens, self.top_each * tokens, self.top_each * tokens

    def raw_of(self, tokens: int) -> list[float] | None:
        """One per token, if they are known of all ``tokens``."""
        return self.raw_logprobs.tolist() if len(self.raw_logprobs) == tokens else None

    def top_of(self, tokens: int, *, start: int = 0) -> list[dict[int, float]] | None:
        """For each token from ``start`` on the likeliest ones and their log-probs, if known of all
        ``tokens``.

        Likeliest first; those that could not be sampled are left out.
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
