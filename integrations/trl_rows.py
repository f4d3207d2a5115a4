"""Which rows does TRL get from a run, and which of them does it not train on?

TRL tells a rollout worker of none, but its rules are known: it drops rows that are too old or too
long as it takes them, and takes one micro-batch ahead of what it trains on. So the first two are
never given to it, and the last is counted at the end. It knows no tensors of a model.
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
"""Why a row is discarded: older than TRL's ``max_staleness``, longer than its ``token_budget``, or
never come to."""

DROPPED = {TOO_STALE: "sample/dropped_stale_total", TOO_LONG: "batch/dropped_oversize_total"}
"""What TRL calls them where it logs how many it dropped."""


class TRLArguments(Protocol):
    """What is read of TRL's ``AsyncGRPOConfig``."""

    max_staleness: int
    token_budget: int | None
    """Tokens of a row at most; 0 or less: rows are not measured, and a micro-batch has a fixed
    number of them. TRL puts a number in the place of None."""
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    weight_sync_steps: int

    @property
    def world_size(self) -> int:
        """TRL's ranks."""

    @property
    def process_index(self) -> int:
        """Which of them this is."""


@dataclass(frozen=True, slots=True)
class Row:
    """One of a run's rows, as TRL takes it."""

    sample: Any
    """TRL's own."""
    batch: int
    place: int
    """In its batch."""


class TRLRows:
    """What TRL takes for a queue of samples: the run's batches, row by row, when asked for."""

    def __init__(
        self,
        run: "SyncRollouts | SyncRemoteRollouts",
        args: TRLArguments,
        *,
        more: Callable[[], Sequence[Row]],
        log_metric: Callable[[str, float], None],
    ) -> None:
        """``more``: the next batch's rows, none once the tasks are used up."""
        self._run = run
        self._args = args
        self._more = more
        self._log_metric = log_metric
        self._version = 0
        """TRL's own, which it counts age from."""
        self._rows: deque[Row] = deque()
        self._given = 0
        """Rows that TRL has had."""
        self._given_at: list[int] = []
        """The same at its last three syncs; the first of all is before any step."""
        self._last_given: deque[Row] = deque()
        """Those that TRL may not have come to yet."""
        self.is_over = False
        """Whether the tasks are used up."""

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """The next row that TRL would train on. It waits for a batch however long it takes: a run
        that fails says so.

        Raises:
            queue.Empty: the tasks are used up.
        """
        while (row := self._next()) is not None:
            why = self._dropped_for(row)
            if why is None:
                self._given += 1
                self._last_given.append(row)
                return row.sample
            log.info("batch=%d row=%d discarded, %s for TRL", row.batch, row.place, why)
            self._log_metric(DROPPED[why], 1.0)
            self._run.discard(row.batch, [row.place], reason=why)
        self.is_over = True
        raise queue.Empty

    def put_nowait(self, item: object) -> NoReturn:
        """Rows come from the run alone."""
        raise ConfigError("the rows of a Tidegate run come from its engines; nothing can be put")

    def qsize(self) -> int:
        """Of the batch in hand."""
        return len(self._rows)

    def synced(self, version: int) -> None:
        """TRL's weights are the run's, as this version of TRL's."""
        self._version = version
        self._given_at = [*self._given_at[-2:], self._given]
        while len(self._last_given) > self._ahead_max:
            self._last_given.popleft()

    def end(self) -> None:
        """TRL takes no more: what it has not come to is discarded."""
        ahead = self._ahead()
        untrained = [*list(self._last_given)[len(self._last_given) - ahead :], *self._rows]
        self._rows.clear()
        self._last_given.clear()
        self._given, self._given_at = 0, []
        for number in sorted({row.batch for row in untrained}):
            places = [row.place for row in untrained if row.batch == number]
            try:
                self._run.discard(number, places, reason=NOT_TRAINED)
            except TidegateError as error:  # TRL may be ending for an error of its own
                log.warning("batch=%d rows=%s count as trained: %s", number, places, error)

    def _next(self) -> Row | None:
        if not self._rows:
            self._rows.extend(self._more())
        return self._rows.popleft() if self._rows else None

    def _dropped_for(self, row: Row) -> str | None:
        """Why TRL would drop it."""
        if self._version - row.sample.model_version > self._args.max_staleness:
            return TOO_STALE
        budget = self._args.token_budget
        if budget is not None and 0 < budget < len(row.sample.input_ids):
            return TOO_LONG
        return None

    @property
    def _ahead_max(self) -> int:
        """Rows of which TRL may not have come to all."""
        since = self._given_at[-2] if len(self._given_at) > 1 else 0
        rows = self._args.per_device_train_batch_size * self._args.world_size
        return self._given - since + rows

    def _ahead(self) -> int:
        """How many of the rows that TRL has had are in none of its whole steps.

        It is one micro-batch ahead of them, of a fixed number of rows, or of as many as its budget
        of tokens takes: then it ends before a row that TRL holds in its hand. There only syncs tell
        where steps ended, if each is of one micro-batch; none is known to be ahead otherwise.
        """
        args = self._args
        if args.token_budget is not None and args.token_budget <= 0:
            rows = args.per_device_train_batch_size * args.world_size
            of_a_step = args.gradient_accumulation_steps
            steps = max(0, self._given // rows - 1) // of_a_step
            return self._given - steps * of_a_step * rows
        if args.gradient_accumulation_steps * args.weight_sync_steps > 1:
            return 0
        steps = len(self._given_at) - 1
        if steps == 1:  # both micro-batches have been taken since the sync before it
            return 0
        return self._given - self._given_at[-2] + 1 if steps > 1 else self._given
