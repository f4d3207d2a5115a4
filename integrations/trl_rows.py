"""Row queue for TRL's AsyncGRPOTrainer: takes rows from a run, and discards those TRL would drop.

:mod:`trl_rollouts` passes it to TRL as its queue of samples. TRL does not report which rows it
drops, but its rules are known: rows that are too old or too long are dropped when taken, and one
micro-batch is taken ahead of training. So rows of the first two kinds are discarded here, and the
last are counted when TRL stops.
"""

import logging
import queue
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from tidegate.errors import ConfigError, TidegateError

if TYPE_CHECKING:
    from tidegate.orchestrator.trainer.remote.rollouts import SyncRemoteRollouts
    from tidegate.orchestrator.trainer.rollouts import SyncRollouts

log = logging.getLogger("tidegate")

TOO_STALE, TOO_LONG, NOT_TRAINED = "too_stale", "too_long", "not_trained"
"""Discard reasons: older than TRL's ``max_staleness``, longer than its ``token_budget``, or not
trained on when TRL stopped."""

DROPPED = {TOO_STALE: "sample/dropped_stale_total", TOO_LONG: "batch/dropped_oversize_total"}
"""Names of the metrics with which TRL counts such rows."""


class TRLArguments(Protocol):
    """The fields of TRL's ``AsyncGRPOConfig`` that are used here."""

    max_staleness: int
    token_budget: int | None
    """Largest number of tokens per row. If 0 or less, rows have no limit and a micro-batch has a
    fixed number of rows. TRL replaces None by a number."""
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    weight_sync_steps: int

    @property
    def world_size(self) -> int:
        """Number of TRL's ranks."""

    @property
    def process_index(self) -> int:
        """Rank of this process."""


@dataclass(frozen=True, slots=True)
class TrlRow:
    """One row of a batch, in TRL's form."""

    sample: Any
    """Sample in TRL's own type ``RolloutSample``."""
    batch: int
    """Number of the run's batch that the row belongs to, for discards."""
    index: int
    """Index of the row in its batch."""


class TRLRows:
    """Queue of samples for TRL: rows of the run's batches, fetched when TRL asks for one."""

    def __init__(
        self,
        run: "SyncRollouts | SyncRemoteRollouts",
        args: TRLArguments,
        *,
        more: Callable[[], Sequence[TrlRow]],
        log_metric: Callable[[str, float], None],
    ) -> None:
        """``more`` returns the next batch's rows; empty after the last task."""
        self._run = run
        self._args = args
        self._more = more
        self._log_metric = log_metric
        self._version = 0
        """TRL's weight version, from which it computes a row's age."""
        self._rows: deque[TrlRow] = deque()
        self._handed = 0
        """Number of rows handed to TRL."""
        self._handed_at_syncs: list[int] = []
        """Value of ``_handed`` at TRL's last three weight syncs; the first precedes any step."""
        self._last_handed: deque[TrlRow] = deque()
        """The last rows handed to TRL, which it may not have trained on yet."""
        self.is_over = False
        """Whether the tasks are used up."""

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Return the next row that TRL would train on. Waits for a batch without a limit, because a
        run that fails raises here.

        Raises:
            queue.Empty: the tasks are used up.
        """
        while (row := self._next()) is not None:
            reason = self._drop_reason(row)
            if reason is None:
                self._handed += 1
                self._last_handed.append(row)
                return row.sample
            log.info("batch=%d row=%d discarded, %s for TRL", row.batch, row.index, reason)
            self._log_metric(DROPPED[reason], 1.0)
            self._run.discard(row.batch, [row.index], reason=reason)
        self.is_over = True
        raise queue.Empty

    def put_nowait(self, item: object) -> NoReturn:
        """Refuse: rows come from the run only."""
        raise ConfigError("the rows of a Tidegate run come from its engines; nothing can be put")

    def qsize(self) -> int:
        """Number of rows left of the current batch."""
        return len(self._rows)

    def synced(self, version: int) -> None:
        """Record that TRL has published its weights, as TRL's ``version``."""
        self._version = version
        self._handed_at_syncs = [*self._handed_at_syncs[-2:], self._handed]
        while len(self._last_handed) > self._ahead_max:
            self._last_handed.popleft()

    def end(self) -> None:
        """Discard the rows that TRL has not trained on when it stops."""
        ahead = self._ahead()
        untrained = [
            *list(self._last_handed)[len(self._last_handed) - ahead :],
            *self._rows,
        ]
        self._rows.clear()
        self._last_handed.clear()
        self._handed, self._handed_at_syncs = 0, []
        for number in sorted({row.batch for row in untrained}):
            indices = [row.index for row in untrained if row.batch == number]
            try:
                self._run.discard(number, indices, reason=NOT_TRAINED)
            except TidegateError as error:  # TRL may be stopping because of another error
                log.warning("batch=%d rows=%s count as trained: %s", number, indices, error)

    def _next(self) -> TrlRow | None:
        if not self._rows:
            self._rows.extend(self._more())
        return self._rows.popleft() if self._rows else None

    def _drop_reason(self, row: TrlRow) -> str | None:
        """Return the reason for which TRL would drop the row; None if it would not."""
        if self._version - row.sample.model_version > self._args.max_staleness:
            return TOO_STALE
        budget = self._args.token_budget
        if budget is not None and 0 < budget < len(row.sample.input_ids):
            return TOO_LONG
        return None

    @property
    def _ahead_max(self) -> int:
        """Upper limit of the rows handed to TRL that it may not have trained on."""
        since = self._handed_at_syncs[-2] if len(self._handed_at_syncs) > 1 else 0
        rows = self._args.per_device_train_batch_size * self._args.world_size
        return self._handed - since + rows

    def _ahead(self) -> int:
        """Return how many of the rows handed to TRL belong to no complete train step.

        TRL takes one micro-batch ahead. Without a token budget, a micro-batch has a fixed number of
        rows. With one, it has as many rows as fit, and TRL already holds the next row. Then only
        weight syncs show where steps ended, provided that each step has one micro-batch; otherwise
        0 is returned.
        """
        args = self._args
        if args.token_budget is not None and args.token_budget <= 0:
            rows = args.per_device_train_batch_size * args.world_size
            per_step = args.gradient_accumulation_steps
            steps = max(0, self._handed // rows - 1) // per_step
            return self._handed - steps * per_step * rows
        if args.gradient_accumulation_steps * args.weight_sync_steps > 1:
            return 0
        steps = len(self._handed_at_syncs) - 1
        if steps == 1:  # both micro-batches were taken since the previous sync
            return 0
        return self._handed - self._handed_at_syncs[-2] + 1 if steps > 1 else self._handed
