"""Cost model of an engine: a few figures that predict its step times well enough to plan by.

The coarse-grained engine and `tidegate plan` take step times from it. The figures do not depend on
the content of the generated tokens. Standard library only.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineCosts:
    """Slots, step times, prefill speed and weight-swap time of one engine."""

    slots: int = 64
    step_s: float = 0.008
    """Fixed time of a step, in seconds; a step samples one token of each running turn."""
    running_turn_s: float = 0.00012
    """Additional time of a step for each running turn, in seconds."""
    prefill_tokens_per_s: float = 25_000.0
    swap_s: float = 2.0
    """Time for which a weight swap stops the engine, in seconds."""
    prompt_tokens: int = 512
    group_size: int = 16
    """Rollouts per group; their prompt is prefilled once, so each bears 1/``group_size`` of it."""

    def token_s(self, running: int) -> float:
        """Return the duration of one step with ``running`` turns, in seconds."""
        return self.step_s + self.running_turn_s * running

    @property
    def peak_tokens_per_s(self) -> float:
        """Sampled tokens per second with every slot in use."""
        return self.slots / self.token_s(self.slots)
