"""What does a trainer tell of its last batch that only its loss knows? How far off-policy it was.

Knows no loss, and nobody who shows it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class OffPolicy:
    """How far off-policy the trainer found its last batch; None where it didn't say."""

    effective_sample_size: float | None = None
    mismatch_kl: float | None = None
    kl_by_lag: Mapping[int, float] = field(default_factory=dict)
    """Nats per token, by the smallest lag of each bucket."""
