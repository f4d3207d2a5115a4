"""Which rows did a simulated trainer train on, and which did it leave out? Counted apart.

It sees batches as they are handed over, and what the trainer says of them.
"""

from collections import Counter

from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.core import Core
from tidegate.orchestrator.core.rollout import Rollout


class TrainedRows:
    """Those of one run."""

    def __init__(self) -> None:
        self._rows: dict[int, list[tuple[int, int]]] = {}
        """Batch -> of each of its rows, the rollout and the tokens young enough to train on."""
        self._left_out: dict[int, dict[int, str]] = {}
        """Batch -> places in it of rows that the trainer left out, and why."""

    @property
    def tokens(self) -> int:
        """Trained, for all that the trainer said."""
        left_out = sum(self._left_out_tokens().values())
        return sum(tokens for rows in self._rows.values() for _, tokens in rows) - left_out

    def handed(self, batch: ev.HandOver) -> None:
        """The trainer gets this batch."""
        rows = [row for group in batch.groups for row in group.kept]
        floor = batch.oldest_trainable
        self._rows[batch.number] = [(row.root.rollout_id, _tokens_from(row, floor)) for row in rows]

    def left_out(self, event: ev.RowsDiscarded) -> None:
        """The trainer has said so."""
        reasons = self._left_out.setdefault(event.batch, {})
        reasons.update({row: event.reason for row in event.rows if row not in reasons})

    def check(self, core: Core) -> None:
        """What was left out is discarded for its reason, and nothing of it is trained.

        Raises:
            AssertionError: the core counts otherwise.
        """
        tokens = self._left_out_tokens()
        told = {reason: core.ledger.discarded[reason] for reason in tokens}
        assert told == tokens, f"{dict(tokens)} tokens were left out, {told} are counted"
        assert core.ledger.trained == self.tokens, f"{core.ledger.trained} != {self.tokens} tokens"
        trained = {
            rollout
            for batch, rows in self._rows.items()
            for place, (rollout, _) in enumerate(rows)
            if place not in self._left_out.get(batch, {})
        }
        assert core.trained.rollouts == len(trained), f"{core.trained.rollouts} != {len(trained)}"

    def _left_out_tokens(self) -> Counter[str]:
        tokens: Counter[str] = Counter()
        for batch, reasons in self._left_out.items():
            for place, reason in reasons.items():
                tokens[reason] += self._rows[batch][place][1]
        return tokens


def _tokens_from(row: Rollout, floor: int) -> int:
    """Those that no version before this one sampled."""
    spans = [span for turn in row.turns for span in turn.spans()]
    return sum(span.end - span.start for span in spans if span.version >= floor)
