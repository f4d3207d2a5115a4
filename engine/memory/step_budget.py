"""Token budget of a step, halved after an out-of-memory step and restored gradually.

Used by the scheduler. Recovery is tried because other processes' memory use comes and goes.
"""

RECOVERY_STEPS = 100
"""Successful steps before the budget is doubled. A failed doubling costs one prefill of all running
turns, the time of a few steps: some percent of this many."""


class StepBudget:
    """Tokens per step; also the limit of turns per step, because each has at least one token."""

    def __init__(self, tokens_max: int) -> None:
        self._tokens_max = tokens_max
        self.tokens = tokens_max
        self._steps_done = 0
        """Successful steps since the budget last changed."""

    def fail(self, tokens: int) -> bool:
        """Halve the budget after a failed step of ``tokens``; False if it had one token only."""
        self.tokens = max(1, min(tokens, self.tokens) // 2)
        self._steps_done = 0
        return tokens > 1

    def succeed(self) -> None:
        """Count a successful step; double the budget after ``RECOVERY_STEPS`` of them."""
        if self.tokens == self._tokens_max:
            return
        self._steps_done += 1
        if self._steps_done == RECOVERY_STEPS:
            self.tokens = min(self._tokens_max, 2 * self.tokens)
            self._steps_done = 0
