"""What is known of one seed's lives: what a trainer has on its disk, and how all of it went.

Records only; what happens in them is for :mod:`tidegate.orchestrator.simulation.lives`.
"""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Trained:
    """One task, and the life that it was trained in: once more gives other weights."""

    task: int
    life: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a trainer has on its disk."""

    trained: tuple[Trained, ...] = ()
    """In the order of training."""
    batches: int = 0
    last_group: int = -1
    left_out_tokens: int = 0
    """In rows that it had and did not train on."""


@dataclass(slots=True)
class LivesReport:
    """How one seed went."""

    seed: int
    failure: str | None = None
    lives: int = 0
    batches_again: int = 0
    """Handed over once more, because the checkpoint had not seen them."""
    left_out_tokens: int = 0
    """In rows that the trainer had and did not train on, as far as its checkpoint knows."""
    rollbacks: int = 0
    """Resumes that found weights newer than the checkpoint."""
    rejoined_turns: int = 0
    """Turns that episodes, begun again, found going on."""
    discarded: Counter[str] = field(default_factory=Counter)
    """Rollouts, by reason."""
    digest: str = ""
