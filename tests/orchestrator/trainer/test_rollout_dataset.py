"""torch's DataLoader over a run: whole batches, or rows that are padded together again."""

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import tidegate
from tests.orchestrator.trainer.remote.test_remote_parts import batch_of
from tidegate.errors import ConfigError


class Run:
    """Stands for a run that has two batches: all that a dataset asks of one."""

    def batches(self, tasks: Any = None, *, episode: Any = None) -> Iterator[tidegate.Batch]:
        assert (tasks, episode) in ((None, None), ([1], "named"))
        yield from (batch_of(2, number=1), batch_of(3, number=2))


def dataset(*arguments: Any, **options: Any) -> tidegate.RolloutDataset:
    run: Any = Run()
    return tidegate.RolloutDataset(run, *arguments, **options)


def test_a_loader_gives_whole_batches() -> None:
    loader: Any = DataLoader(dataset([1], episode="named"), batch_size=None)
    assert [(batch.number, len(batch.rewards)) for batch in loader] == [(1, 4), (2, 6)]


def test_rows_collated_are_the_batch_that_they_are_from() -> None:
    loader: Any = DataLoader(
        dataset(per="rollout"), batch_size=4, collate_fn=tidegate.RolloutDataset.collate
    )
    first = next(iter(loader))
    batch = batch_of(2)
    for name in ("token_ids", "loss_mask", "logprobs", "weight_versions", "attention_mask",
                 "rewards", "advantages", "group_ids", "rollout_ids", "staleness",
                 "turn_rewards"):  # fmt: skip
        assert torch.equal(first[name], getattr(batch, name)), name
    assert first["is_last"] == [False, False, False, True]
    assert first["task"] == [*batch.tasks]


def test_worker_processes_and_unknown_items_are_refused() -> None:
    with pytest.raises(ConfigError, match="must be 'batch' or 'rollout', got 'token'"):
        dataset(per="token")
    with pytest.raises(ConfigError, match="num_workers=0"):  # as a worker that is spawned gets it
        pickle.dumps(dataset())
