"""How many tokens may a step have, after one for which there was no memory? Frees none itself.

What others on the machine take comes and goes, so what failed once is tried again after a while.
"""

RECOVERY_STEPS = 100
"""Steps that work before twice as many tokens are tried. If that fails it costs one prefill of all
running turns, a few steps' time: some percent of this many."""


class StepBudget:
    """Tokens per step, and as many turns at most: each has one at least."""

    def __init__(self, tokens_max: int) -> None:
        self._tokens_max = tokens_max
        self.tokens = tokens_max
        self._steps_done = 0
        """Since it changed last."""

    def fail(self, tokens: int) -> bool:
        """There was no memory for a step of ``tokens``; False if it had but one."""
        self.tokens = max(1, min(tokens, self.tokens) // 2)
        self._steps_done = 0
        return tokens > 1

    def succeed(self) -> None:
        """There was, for a step."""
        if self.tokens == self._tokens_max:
            return
        self._steps_done += 1
        if self._steps_done == RECOVERY_STEPS:
            self.tokens = min(self._tokens_max, 2 * self.tokens)
            self._steps_done = 0
