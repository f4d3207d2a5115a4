"""Where is every token that was ever sampled? Double-entry book-keeping, exact at every instant."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LedgerSnapshot:
    """Where every sampled token is: ``generated`` equals the sum of the rest, at every instant."""

    generated: int = 0
    trained: int = 0
    buffered: int = 0
    """In rollouts that are finished and not yet handed to the trainer."""
    in_flight: int = 0
    """In rollouts whose episode is going on."""
    discarded: Mapping[str, int] = field(default_factory=dict)
    """By reason."""

    @property
    def discarded_total(self) -> int:
        """Tokens that will never be trained, whatever the reason."""
        return sum(self.discarded.values())

    @property
    def error(self) -> int:
        """0, or the number of tokens that are unaccounted for."""
        return self.generated - (
            self.trained + self.buffered + self.in_flight + self.discarded_total
        )


class Ledger:
    """``generated = trained + buffered + in_flight + Σ discarded(reason)``, in tokens.

    Tokens enter with :meth:`sample` and then only move: each method takes from one account what
    it puts into another.
    """

    __slots__ = ("buffered", "discarded", "generated", "in_flight", "trained")

    def __init__(self) -> None:
        self.generated = 0
        self.in_flight = 0
        """In rollouts whose episode is going on."""
        self.buffered = 0
        """In finished rollouts that the trainer has not had."""
        self.trained = 0
        self.discarded: Counter[str] = Counter()

    def sample(self, tokens: int) -> None:
        """An engine sampled these for a running rollout."""
        self.generated += tokens
        self.in_flight += tokens

    def sample_unwanted(self, tokens: int, reason: str) -> None:
        """An engine sampled these for a turn that was over already."""
        self.generated += tokens
        self.discarded[reason] += tokens

    def finish(self, tokens: int) -> None:
        """A rollout with so many sampled tokens got its reward."""
        self.in_flight -= tokens
        self.buffered += tokens

    def train(self, tokens: int) -> None:
        """A finished rollout was handed to the trainer."""
        self.buffered -= tokens
        self.trained += tokens

    def leave_out(self, tokens: int, reason: str) -> None:
        """So many of those handed over are not trained on after all; below 0: that is undone."""
        self.trained -= tokens
        self.discarded[reason] += tokens

    def take_back(self, tokens: int) -> None:
        """What the trainer made of a rollout was lost with it."""
        self.trained -= tokens
        self.buffered += tokens

    def discard_running(self, tokens: int, reason: str) -> None:
        """A running rollout was given up."""
        self.in_flight -= tokens
        self.discarded[reason] += tokens

    def discard_finished(self, tokens: int, reason: str) -> None:
        """A finished rollout will not be trained."""
        self.buffered -= tokens
        self.discarded[reason] += tokens

    def snapshot(self) -> LedgerSnapshot:
        """An immutable copy."""
        return LedgerSnapshot(
            generated=self.generated,
            trained=self.trained,
            buffered=self.buffered,
            in_flight=self.in_flight,
            discarded=dict(self.discarded),
        )
