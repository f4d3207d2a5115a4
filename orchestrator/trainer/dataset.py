"""A run as a ``torch.utils.data.IterableDataset``, for training loops built around ``DataLoader``.

Users pass ``tidegate.RolloutDataset`` to torch's ``DataLoader``. It yields the run's batches, whole
or row by row. It works with local and remote handles.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.utils.data import IterableDataset, get_worker_info

from tidegate.errors import ConfigError
from tidegate.orchestrator.batches.batch_rows import TURN_REWARDS, batch_columns
from tidegate.orchestrator.batches.batches import Batch
from tidegate.orchestrator.batches.version_runs import NOT_SAMPLED

if TYPE_CHECKING:
    from tidegate.orchestrator.trainer.remote.rollouts import SyncRemoteRollouts
    from tidegate.orchestrator.trainer.rollouts import SyncRollouts

Row = dict[str, Any]
"""One rollout: [T] ``token_ids``, ``loss_mask``, ``logprobs``, ``weight_versions``; the batch's
per-row columns as scalars; and its ``task``."""

PADDING: dict[str, int] = {"weight_versions": NOT_SAMPLED}
"""Padding values of columns that are not padded with 0."""


class RolloutDataset(IterableDataset[Any]):
    """Iterable dataset of a run's batches, for a ``DataLoader`` with ``batch_size=None``.

        with tidegate.connect_sync(address, rank=rank, world_size=size) as rollouts:
            for batch in DataLoader(tidegate.RolloutDataset(rollouts), batch_size=None):
                train_step(batch)
                rollouts.publish(model.state_dict() if rank == 0 else None)

    Keep ``num_workers=0``. Each data-parallel rank gets its part of each batch. With
    ``per="rollout"`` it yields rows for :meth:`collate`; publish after the row with
    ``row["is_last"]``, the last of its batch.
    """

    def __init__(
        self,
        rollouts: "SyncRollouts | SyncRemoteRollouts",
        tasks: Iterable[Any] | None = None,
        *,
        episode: Any = None,
        per: Literal["batch", "rollout"] = "batch",
    ) -> None:
        """``tasks`` and ``episode`` are those of the run's own ``batches()``.

        Raises:
            ConfigError: ``per`` has no such value.
        """
        super().__init__()
        if per not in ("batch", "rollout"):
            raise ConfigError(f"per must be 'batch' or 'rollout', got {per!r}")
        self._rollouts = rollouts
        self._tasks = tasks
        self._episode = episode
        self._per = per

    def __iter__(self) -> Iterator[Any]:
        """Yield batches or rows until the tasks are used up.

        Raises:
            ConfigError: called in a DataLoader's worker process, which can't share the connection.
        """
        if get_worker_info() is not None:
            raise ConfigError(
                "only the process that connected to a run receives its batches; use num_workers=0, "
                "which costs no speed because reading a batch computes nothing"
            )
        batches: Any = self._rollouts.batches
        tasks = () if self._tasks is None else (self._tasks,)
        for batch in batches(*tasks, episode=self._episode):
            if self._per == "batch":
                yield batch
            else:
                yield from _rows(batch)

    def __getstate__(self) -> dict[str, Any]:
        """Refuse to be sent to a DataLoader's spawned worker."""
        raise ConfigError("a RolloutDataset holds a connection: use num_workers=0")

    @staticmethod
    def collate(rows: Sequence[Row]) -> dict[str, Any]:
        """Stack rows, padded on the right to the longest; tasks become a list."""
        together: dict[str, Any] = {}
        for name, first in rows[0].items():
            values = [row[name] for row in rows]
            if not isinstance(first, torch.Tensor):
                together[name] = values
            elif first.dim():
                together[name] = torch.nn.utils.rnn.pad_sequence(
                    values, batch_first=True, padding_value=PADDING.get(name, 0)
                )
            else:
                together[name] = torch.stack(values)
        lengths = torch.tensor([len(row["token_ids"]) for row in rows])
        longest = together["token_ids"].shape[1]
        together["attention_mask"] = torch.arange(longest) < lengths[:, None]
        return together


def _rows(batch: Batch) -> Iterator[Row]:
    if batch.media:
        raise ConfigError("single rollouts carry no images; use per='batch', and batch.media")
    columns = batch_columns(batch)
    lengths = columns.pop("lengths").tolist()
    columns["token_ids"] = batch.packed.token_ids
    per_token = {
        name: torch.split(columns.pop(name), lengths)
        for name in ("token_ids", "loss_mask", "logprobs", "weight_versions", TURN_REWARDS)
        if name in columns
    }
    for row in range(len(lengths)):
        yield {
            **{name: parts[row] for name, parts in per_token.items()},
            **{name: column[row] for name, column in columns.items()},
            "task": batch.tasks[row],
            "number": batch.number,
            "is_last": row == len(lengths) - 1,
        }
