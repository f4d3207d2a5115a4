"""Adapter of a run to TRL's AsyncGRPOTrainer: rollout worker and weight transfer in one object.

    with tidegate.serve_sync(model=path, engines=2, max_staleness=1) as run:
        worker = tidegate.TRLRollouts(run, tasks, episode=solve, args=config)
        AsyncGRPOTrainer(
            model=path, args=config, rollout_worker=worker, weight_transfer=worker, …
        ).train()

TRL's queue of samples is the run itself: a row is handed over when the trainer asks for it, so rows
do not age in a queue. Rewards and the loss are computed elsewhere.
"""

import queue
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from tidegate.errors import ConfigError, RunClosed
from tidegate.integrations.trl_rows import Row, TRLArguments, TRLRows
from tidegate.orchestrator.batches.tasks import Tasks
from tidegate.serving.vllm_server.model_info import read_model_info

if TYPE_CHECKING:
    import numpy as np
    import torch

    from tidegate.orchestrator.batches.batches import Batch
    from tidegate.orchestrator.episodes.runner import EpisodeFunction
    from tidegate.orchestrator.trainer.remote.rollouts import SyncRemoteRollouts
    from tidegate.orchestrator.trainer.rollouts import SyncRollouts


class TRLRollouts:
    """Replacement of TRL's rollout worker and weight transfer: pass it as both.

    TRL trains on one batch of the run between two weight syncs. So `groups_per_batch` times
    `group_size` must equal `per_device_train_batch_size` times `gradient_accumulation_steps`,
    processes and `weight_sync_steps`. TRL's data loader takes one micro-batch ahead of training: no
    token older than the run's `max_staleness` plus 1 is trained on, and the run's `max_staleness`
    must be at least 1. Rewards and advantages are the run's; TRL's `reward_funcs` are not called.
    Pauses do nothing, because engines continue while weights travel. Rows that TRL would drop, or
    has not trained on when it stops, are discarded.
    """

    def __init__(
        self,
        run: "SyncRollouts | SyncRemoteRollouts",
        tasks: Tasks | None = None,
        *,
        episode: "EpisodeFunction | str | None" = None,
        args: TRLArguments,
    ) -> None:
        """``tasks`` and ``episode`` are passed to the run's ``batches()``; tasks should be endless.
        A remote run may have its own. ``args`` is the trainer's config, which determines the rows
        that TRL drops.

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
        if settings is not None and settings.policy is None and settings.max_staleness < 1:
            raise ConfigError(
                "TRL asks for a micro-batch before it has trained on the one in hand, so its run "
                f"needs max_staleness of at least 1, got {settings.max_staleness}"
            )
        if settings is not None and (tasks is None or episode is None):
            raise ConfigError(
                "a run of this process has its tasks and its episode from here: give "
                "TRLRollouts(run, tasks, episode=…)"
            )
        self._model_tensors = frozenset(
            read_model_info(settings.model, name=None, dtype=settings.dtype).tensors
            if settings is not None
            else ()
        )
        self._run = run
        self._sample = _sample_class()
        self._given: dict[str, Any] = {"episode": episode} if episode is not None else {}
        self._tasks = () if tasks is None else (tasks,)
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue()
        """Metrics that TRL logs too: mean completion length per batch, and discarded rows."""
        self.rollout_buffer = TRLRows(run, args, more=self._next_rows, log_metric=self._log_metric)
        self._batches: Iterator[Batch] | None = None
        self._versions_ahead = 0
        """TRL's version number of the served weights minus the run's."""

    # ------------------------------------------------------------ TRL's rollout worker

    def start(self) -> None:
        """Start iterating over the tasks; TRL has published its weights before."""
        batches: Any = self._run.batches
        self._batches = batches(*self._tasks, **self._given)

    def stop(self) -> None:
        """Request no more batches, and discard untrained rows. The run itself continues."""
        self._batches = None
        self.rollout_buffer.end()

    def update_model_version(self, model_version: int) -> None:
        """Note TRL's version number of the newest weights."""
        self._versions_ahead = model_version - self._run.version
        self.rollout_buffer.synced(model_version)

    def check_health(self, stale_after_s: float) -> None:
        """Raise if the tasks are used up. ``stale_after_s`` is ignored: a run that fails raises
        where TRL waits for a batch."""
        if self._batches is not None and self.rollout_buffer.is_over:
            raise RunClosed("the tasks are used up, and TRL wants more rollouts: give endless ones")

    # ------------------------------------------------------------ TRL's weight transfer

    def init_weight_transfer(self) -> None:
        """Do nothing: the run has its own weight channel."""

    def pause(self) -> None:
        """Do nothing: weights are staged beside the live ones and swapped in flight."""

    def send_weights(self, iterator: "Iterator[tuple[str, torch.Tensor]]") -> None:
        """Publish the tensors as the run's next version; frozen tensors stay as they are."""
        tensors = dict(iterator)
        is_partial = not self._model_tensors <= tensors.keys()
        self._run.publish(tensors, partial=is_partial)

    def resume(self) -> None:
        """Do nothing: nothing was paused."""

    def destroy(self) -> None:
        """Do nothing: the run is closed by its own ``with``."""

    # ------------------------------------------------------------ rows

    def _log_metric(self, name: str, value: float) -> None:
        self.metrics_queue.put_nowait({name: value})

    def _next_rows(self) -> list[Row]:
        """Return the next batch's rows as TRL's samples; empty after the last task."""
        if self._batches is None:
            raise RunClosed("TRL asked for rollouts before start() or after stop()")
        batch = next(self._batches, None)
        if batch is None:
            return []
        lengths = batch.loss_mask.sum(1)
        told = (float(lengths.sum()), float(len(lengths)))
        self.metrics_queue.put_nowait({"completions/mean_length": told})
        samples = _samples(self._sample, batch, self._versions_ahead)
        return [Row(sample, batch.number, place) for place, sample in enumerate(samples)]


def _samples(sample: Any, batch: "Batch", versions_ahead: int) -> "list[Any]":
    """Convert a batch into TRL's samples, one per row."""
    now_s = time.time()  # the clock that TRL uses for waiting samples
    oldest = batch.trainer_version + versions_ahead - batch.staleness
    deviations = _reward_deviations(batch)
    made = []
    for row, task in enumerate(batch.tasks):
        tokens = int(batch.attention_mask[row].sum())
        prompt = task.get("prompt") if isinstance(task, Mapping) else None
        made.append(
            sample(
                prompt=prompt if isinstance(prompt, list) else [],
                completion=[],  # TRL needs the messages only for traces
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
    return made


def _column(values: "torch.Tensor", row: int, tokens: int) -> "np.ndarray[Any, Any]":
    told: np.ndarray[Any, Any] = values[row, :tokens].numpy()
    return told


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
