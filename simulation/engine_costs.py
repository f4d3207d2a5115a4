"""Cost model of an engine: a few figures that predict its step times well enough to plan by.

Independent of what is generated.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineCosts:
    """Figures from which an engine's step times follow."""

    slots: int = 64
    step_s: float = 0.008
    """One token of each running turn, however many run; and for each of them:"""
    running_turn_s: float = 0.00012
    prefill_tokens_per_s: float = 25_000.0
    swap_s: float = 2.0
    """It stands still for so long when it takes new weights."""
    prompt_tokens: int = 512
    group_size: int = 16
    """A group's prompt is prefilled once, so a rollout bears this share of it."""

    def token_s(self, running: int) -> float:
        """One step with so many running turns."""
        return self.step_s + self.running_turn_s * running

    @property
    def peak_tokens_per_s(self) -> float:
        """With every slot in use."""
        return self.slots / self.token_s(self.slots)
