"""Double-entry ledger of sampled tokens: every token is in exactly one account at every instant.

The core moves tokens between accounts; statistics and metrics read :meth:`Ledger.snapshot`.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LedgerSnapshot:
    """Token counts by account; ``generated`` equals the sum of the other accounts."""

    generated: int = 0
    """Number of tokens that engines have sampled."""
    trained: int = 0
    """Number of tokens in batches that the trainer has."""
    buffered: int = 0
    """Tokens of finished rollouts not yet handed to the trainer."""
    in_flight: int = 0
    """Tokens of rollouts whose episode runs."""
    discarded: Mapping[str, int] = field(default_factory=dict)
    """Tokens that will never be trained, by reason."""

    @property
    def discarded_total(self) -> int:
        """Tokens that will never be trained, over all reasons."""
        return sum(self.discarded.values())

    @property
    def error(self) -> int:
        """Number of unaccounted tokens; always 0 unless there is a bug."""
        return self.generated - (
            self.trained + self.buffered + self.in_flight + self.discarded_total
        )


class Ledger:
    """Accounts with ``generated = trained + buffered + in_flight + Σ discarded(reason)``, in
    tokens.

    Tokens enter by :meth:`sample` or :meth:`sample_discarded`; every other method moves them from
    one account to another.
    """

    __slots__ = ("buffered", "discarded", "generated", "in_flight", "trained")

    def __init__(self) -> None:
        self.generated = 0
        self.in_flight = 0
        """Tokens of rollouts whose episode runs."""
        self.buffered = 0
        """Tokens of finished rollouts not yet handed to the trainer."""
        self.trained = 0
        self.discarded: Counter[str] = Counter()

    @property
    def error(self) -> int:
        """As :attr:`LedgerSnapshot.error`."""
        accounts = self.trained + self.buffered + self.in_flight
        return self.generated - accounts - sum(self.discarded.values())

    def sample(self, tokens: int) -> None:
        """Count tokens sampled for a running rollout."""
        self.generated += tokens
        self.in_flight += tokens

    def sample_discarded(self, tokens: int, reason: str) -> None:
        """Count tokens sampled for a turn that was over already."""
        self.generated += tokens
        self.discarded[reason] += tokens

    def finish(self, tokens: int) -> None:
        """Move a rollout's tokens from in flight to buffered, because it has its reward."""
        self.in_flight -= tokens
        self.buffered += tokens

    def train(self, tokens: int) -> None:
        """Move tokens from buffered to trained, because they were handed to the trainer."""
        self.buffered -= tokens
        self.trained += tokens

    def discard_trained(self, tokens: int, reason: str) -> None:
        """Move tokens from trained to discarded; a negative count undoes that."""
        self.trained -= tokens
        self.discarded[reason] += tokens

    def untrain(self, tokens: int) -> None:
        """Move tokens from trained to buffered, because a batch was undone."""
        self.trained -= tokens
        self.buffered += tokens

    def discard_running(self, tokens: int, reason: str) -> None:
        """Move tokens of a running rollout to discarded."""
        self.in_flight -= tokens
        self.discarded[reason] += tokens

    def discard_finished(self, tokens: int, reason: str) -> None:
        """Move tokens of a finished rollout to discarded."""
        self.buffered -= tokens
        self.discarded[reason] += tokens

    def snapshot(self) -> LedgerSnapshot:
        """Return an immutable copy."""
        return LedgerSnapshot(
            generated=self.generated,
            trained=self.trained,
            buffered=self.buffered,
            in_flight=self.in_flight,
            discarded=dict(self.discarded),
        )
