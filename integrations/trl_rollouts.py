"""Adapter for TRL's ``AsyncGRPOTrainer``: a run as its rollout worker and its weight transfer.

    with tidegate.serve_sync(model=path, engines=2, max_staleness=1) as run:
        worker = tidegate.TRLRollouts(run, tasks, episode=solve, args=config)
        AsyncGRPOTrainer(
            model=path, args=config, rollout_worker=worker, weight_transfer=worker, …
        ).train()

A row is handed over when the trainer asks for one, instead of waiting in TRL's queue, where it
would get older. The run computes rewards and advantages, TRL the loss. The caller starts the run.
TRL does not report which rows it drops, but its rules are known: rows that are too old or too long
are dropped when taken, and one micro-batch is taken ahead of training. So :class:`TRLRows`, which
TRL gets as its queue of samples, discards rows of the first two kinds, and the last are counted
when TRL stops.
"""

import logging
import queue
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from tidegate.errors import ConfigError, RunClosed, TidegateError
from tidegate.orchestrator.batches.tasks import Tasks
from tidegate.serving.openai.model_info import read_model_info

if TYPE_CHECKING:
    import numpy as np
    import torch

    from tidegate.orchestrator.batches.batches import Batch
    from tidegate.orchestrator.episodes.runner import EpisodeFunction
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
    fixed number of rows. TRL replaces None with a number."""
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
        self._of_batch = 0
        """Number of rows of the current batch that TRL got."""
        self._ended: deque[tuple[int, int]] = deque()
        """(batch, value of ``_handed``) at the last row of each batch that TRL has all rows of, and
        that no publish has named."""
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
            self._of_batch += reason is None
            self._handed += reason is None
            if not self._rows and self._of_batch:  # else the run counts the batch as done by itself
                self._ended.append((row.batch, self._handed))
            if reason is None:
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

    def trained_batches(self) -> list[int]:
        """Return the batches that TRL has certainly trained on whole and no publish has named;
        called before a weight sync.

        TRL holds one micro-batch ahead at a sync. With a token budget nobody outside TRL knows how
        many rows it has; but what TRL held at the previous sync, it has trained on since.
        """
        rows = self._args.per_device_train_batch_size * self._args.world_size
        budget = self._args.token_budget
        if budget is not None and budget <= 0:
            trained = max(0, self._handed // rows - 1) * rows
        else:
            trained = self._handed_at_syncs[-1] - 1 if self._handed_at_syncs else 0
        return [batch for batch, end in self._ended if end <= trained]

    def named(self, batches: Sequence[int]) -> None:
        """Record that a publish has named these batches."""
        self._ended = deque(each for each in self._ended if each[0] not in batches)

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
        self._ended.clear()
        for number in sorted({row.batch for row in untrained}):
            indices = [row.index for row in untrained if row.batch == number]
            try:
                self._run.discard(number, indices, reason=NOT_TRAINED)
            except TidegateError as error:  # TRL may be stopping because of another error
                log.warning("batch=%d rows=%s count as trained: %s", number, indices, error)

    def _next(self) -> TrlRow | None:
        if not self._rows:
            self._of_batch = 0
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


class TRLRollouts:
    """TRL's rollout worker and weight transfer, backed by a run. Pass it as both to the trainer.

    One batch of the run has the rollouts that TRL trains on between two weight syncs. So
    ``groups_per_batch * group_size`` must equal ``per_device_train_batch_size *
    gradient_accumulation_steps * processes * weight_sync_steps``. TRL's data loader asks for one
    micro-batch ahead of what it trains on, so ``max_staleness`` of the run must be at least 1, or 2
    with a ``token_budget``: then it is known a sync later which rows TRL has trained on. Each sync
    names the batches that TRL has trained on whole. Rewards and advantages are
    the run's; TRL's ``reward_funcs`` are not called. Pauses do nothing, because engines decode
    while weights travel. Rows that TRL would drop, or has not consumed when it ends, are discarded.
    """

    def __init__(
        self,
        run: "SyncRollouts | SyncRemoteRollouts",
        tasks: Tasks | None = None,
        *,
        episode: "EpisodeFunction | str | None" = None,
        args: TRLArguments,
    ) -> None:
        """Wrap a run. ``tasks`` (best endless) and ``episode`` go to the run's ``batches()``; a
        remote run may have its own. ``args`` are the trainer's, which say which rows it drops.

        Raises:
            ConfigError: TRL is missing, or the run's settings do not fit TRL's.
        """
        if args.process_index:
            raise ConfigError(
                f"TRL asks its first rank for rows, and this is rank {args.process_index}: give "
                "the others' trainers rollout_worker=None and any weight_transfer but None, and "
                "start no run there"
            )
        settings = getattr(run, "settings", None)  # a remote run's are elsewhere
        staleness = settings.staleness if settings is not None else None
        is_counted = args.token_budget is not None and args.token_budget <= 0
        needed = 1 if is_counted else 2
        if (
            staleness is not None
            and staleness.staleness_policy is None
            and staleness.max_staleness < needed
        ):
            late = (
                ""
                if is_counted
                else (
                    ", and with a token_budget it is known a weight sync later which rows it has "
                    "trained on (token_budget=0 avoids that)"
                )
            )
            raise ConfigError(
                f"TRL asks for a micro-batch before it has trained on the one in hand{late}, so "
                f"its run needs max_staleness of at least {needed}, got {staleness.max_staleness}"
            )
        if staleness is not None and (policy := staleness.make_policy()).max_uses > 1:
            uses, most = policy.max_uses, policy.outstanding_groups_max
            if most < (needed + 1) * policy.groups_per_batch:
                raise ConfigError(
                    f"TRL asks for batches ahead, and max_uses={uses} leaves {most} outstanding "
                    f"groups: raise max_staleness to {uses * (needed + 2) - 2}, or lower max_uses"
                )
        if settings is not None and (tasks is None or episode is None):
            raise ConfigError(
                "a run of this process has its tasks and its episode from here: give "
                "TRLRollouts(run, tasks, episode=…)"
            )
        if staleness is not None and is_counted:
            rows = args.per_device_train_batch_size * args.world_size
            rows *= args.gradient_accumulation_steps * args.weight_sync_steps
            size = staleness.group_size * staleness.groups_per_batch
            if staleness.staleness_policy is None and rows < size:
                raise ConfigError(
                    f"TRL would publish after {rows} rows, which is less than a batch of the run "
                    f"(group_size * groups_per_batch = {size}), and a batch would get older while "
                    f"it is trained on; set groups_per_batch so that a batch has {rows} rows"
                )
        self._model_tensors = frozenset(
            read_model_info(settings.model, name=None, dtype=settings.engine.dtype).tensors
            if settings is not None
            else ()
        )
        self._run = run
        self._sample_class = _sample_class()
        self._episode_argument: dict[str, Any] = {"episode": episode} if episode is not None else {}
        self._tasks = () if tasks is None else (tasks,)
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue()
        """Metrics that TRL logs beside its own: for each batch, completions' mean length; and the
        number of rows discarded."""
        self.rollout_buffer = TRLRows(run, args, more=self._next_rows, log_metric=self._log_metric)
        self._batches: Iterator[Batch] | None = None
        self._versions_ahead = 0
        """TRL's version number of the weights served, minus the run's version number."""

    # ------------------------------------------------------------ TRL's rollout worker

    def start(self) -> None:
        """Begin to take batches. TRL publishes its weights before it calls this."""
        batches: Any = self._run.batches
        self._batches = batches(*self._tasks, **self._episode_argument)

    def stop(self) -> None:
        """Take no more batches. The run itself ends with its own ``with``."""
        self._batches = None
        self.rollout_buffer.end()

    def update_model_version(self, model_version: int) -> None:
        """Record TRL's version number of the newest weights."""
        self._versions_ahead = model_version - self._run.version
        self.rollout_buffer.synced(model_version)

    def check_health(self, stale_after_s: float) -> None:
        """Raise RunClosed if the tasks are used up. ``stale_after_s`` is ignored: a run that fails
        raises its error in the call that waits for a batch."""
        if self._batches is not None and self.rollout_buffer.is_over:
            raise RunClosed("the tasks are used up, and TRL wants more rollouts: give endless ones")

    # ------------------------------------------------------------ TRL's weight transfer

    def init_weight_transfer(self) -> None:
        """Do nothing: the run has a weight channel of its own."""

    def pause(self) -> None:
        """Do nothing: weights are staged beside the live ones and swapped between two steps."""

    def send_weights(self, iterator: "Iterator[tuple[str, torch.Tensor]]") -> None:
        """Publish TRL's tensors as the run's next version; omitted tensors stay unchanged."""
        tensors = dict(iterator)
        is_partial = not self._model_tensors <= tensors.keys()
        batches = self.rollout_buffer.trained_batches()
        self._run.publish(tensors, batches=batches, partial=is_partial)
        self.rollout_buffer.named(batches)

    def resume(self) -> None:
        """Do nothing: :meth:`pause` has stopped nothing."""

    def destroy(self) -> None:
        """Do nothing: the run ends with its own ``with``."""

    # ------------------------------------------------------------ rows

    def _log_metric(self, name: str, value: float) -> None:
        self.metrics_queue.put_nowait({name: value})

    def _next_rows(self) -> list[TrlRow]:
        """Return the next batch's rows as TRL's samples; none once the tasks are used up."""
        if self._batches is None:
            raise RunClosed(
                "TRL asked for rollouts before start() or after stop(); let AsyncGRPOTrainer call "
                "both"
            )
        batch = next(self._batches, None)
        if batch is None:
            return []
        lengths = batch.loss_mask.sum(1)
        sum_and_count = (float(lengths.sum()), float(len(lengths)))
        self.metrics_queue.put_nowait({"completions/mean_length": sum_and_count})
        samples = _samples(self._sample_class, batch, self._versions_ahead)
        return [TrlRow(sample, batch.number, index) for index, sample in enumerate(samples)]


def _samples(sample_class: Any, batch: "Batch", versions_ahead: int) -> "list[Any]":
    """Return a batch in TRL's form, one sample for each row."""
    now_s = time.time()  # TRL's own clock for what waits in its queue
    oldest = batch.trainer_version + versions_ahead - batch.staleness
    deviations = _reward_deviations(batch)
    samples = []
    for row, task in enumerate(batch.tasks):
        tokens = int(batch.attention_mask[row].sum())
        prompt = task.get("prompt") if isinstance(task, Mapping) else None
        samples.append(
            sample_class(
                prompt=prompt if isinstance(prompt, list) else [],
                completion=[],  # TRL shows the text in traces only
                input_ids=_column(batch.token_ids, row, tokens),
                completion_mask=_column(batch.loss_mask.long(), row, tokens),
                old_log_probs=_column(batch.logprobs, row, tokens),
                advantage=float(batch.advantages[row]),
                model_version=int(oldest[row]),
                group_id=int(batch.group_ids[row]),
                metrics={
                    "reward": float(batch.rewards[row]),
                    "reward_std": deviations[int(batch.group_ids[row])],
                },
                enqueued_at=now_s,
            )
        )
    return samples


def _column(values: "torch.Tensor", row: int, tokens: int) -> "np.ndarray[Any, Any]":
    column: np.ndarray[Any, Any] = values[row, :tokens].numpy()
    return column


def _reward_deviations(batch: "Batch") -> dict[int, float]:
    return {
        group_id: float(batch.rewards[batch.group_ids == group_id].std(correction=0))
        for group_id in set(batch.group_ids.tolist())
    }


def _sample_class() -> Any:
    try:
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample
    except ImportError as error:
        raise ConfigError(
            f"TRL's samples can't be made ({error}): pip install 'tidegate[trl]', which has the "
            "release that this was written for"
        ) from None
    return RolloutSample
