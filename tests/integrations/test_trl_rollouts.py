"""TRLRollouts and TRLRows without TRL: which rows TRL gets, and which count as trained."""

import queue
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace
from typing import Any

import pytest

import tidegate
from tidegate.errors import ConfigError, RunClosed
from tidegate.integrations.trl_rollouts import TrlRow, TRLRows
from tidegate.orchestrator.settings.config import run_settings


@dataclass
class Arguments:
    """The fields of TRL's config."""

    max_staleness: int = 1
    token_budget: int | None = 0
    per_device_train_batch_size: int = 4
    gradient_accumulation_steps: int = 1
    weight_sync_steps: int = 1
    world_size: int = 1
    process_index: int = 0


def is_installed(package: str) -> bool:
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


@pytest.mark.skipif(is_installed("trl"), reason="TRL is installed")
def test_without_trl_it_says_what_to_install_before_anything_is_generated() -> None:
    run: Any = SimpleNamespace()
    with pytest.raises(ConfigError, match=r"pip install 'tidegate\[trl\]'"):
        tidegate.TRLRollouts(run, args=Arguments())


async def solve(episode: tidegate.Episode, task: int) -> float:
    return 0.0


@pytest.mark.parametrize(
    ("settings", "given", "why"),
    [
        ({"max_staleness": 0}, {}, "max_staleness of at least 1, got 0"),
        ({"max_staleness": 2, "max_uses": 2}, {}, "raise max_staleness to 4"),
        ({"max_staleness": 4, "max_uses": 2}, {}, "has its tasks and its episode"),  # nothing else
        ({"max_staleness": 1}, {}, "has its tasks and its episode from here"),
        ({"max_staleness": 1}, {"tasks": [1]}, "has its tasks and its episode from here"),
        ({"max_staleness": 1}, {"episode": solve}, "has its tasks and its episode from here"),
        (
            {},
            {"args": Arguments(process_index=1)},
            "rank 1: give the others' trainers rollout_work",
        ),
    ],
)
def test_a_run_that_does_not_fit_trl_is_refused(
    settings: dict[str, Any], given: dict[str, Any], why: str
) -> None:
    run: Any = SimpleNamespace(settings=run_settings(model="m", **settings))
    with pytest.raises(ConfigError, match=why):
        tidegate.TRLRollouts(run, **({"args": Arguments()} | given))


# ---------------------------------------------------------------- what is not trained on


class Trainer:
    """Double of TRL's trainer and of a run: takes micro-batches of a fixed size, one ahead of
    training, and records what was discarded."""

    def __init__(self, args: Arguments, lengths: list[list[int]]) -> None:
        """``lengths``: of each row of each batch; row n is n versions old when it is taken."""
        self.args = args
        self.reported: list[tuple[int, list[int], str]] = []
        self.logged: list[str] = []
        self._batches: Iterator[list[TrlRow]] = iter(
            [
                [
                    TrlRow(self.sample(tokens, -place), number, place)
                    for place, tokens in enumerate(b)
                ]
                for number, b in enumerate(lengths, 1)
            ]
        )
        run: Any = self
        self.rows = TRLRows(
            run,
            args,
            more=lambda: next(self._batches, []),
            log_metric=lambda name, value: self.logged.append(name),
        )

    def discard(self, batch: int, rows: list[int], *, reason: str) -> None:
        self.reported.append((batch, rows, reason))

    def sample(self, tokens: int, version: int) -> Any:
        return SimpleNamespace(input_ids=[0] * tokens, model_version=version)

    def take(self, rows: int) -> list[int]:
        """Take rows; return their lengths."""
        return [len(self.rows.get().input_ids) for _ in range(rows)]


def test_rows_that_trl_would_drop_are_discarded_and_reported_in_trls_metrics() -> None:
    trainer = Trainer(Arguments(max_staleness=1, token_budget=8), [[3, 9, 4, 5], [8, 2]])
    assert trainer.take(3) == [3, 8, 2]
    assert trainer.reported == [
        (1, [1], "too_long"),
        (1, [2], "too_stale"),
        (1, [3], "too_stale"),
    ]
    assert trainer.logged == [
        "batch/dropped_oversize_total",
        "sample/dropped_stale_total",
        "sample/dropped_stale_total",
    ]


def test_the_age_of_a_row_is_counted_when_it_is_taken_by_the_weights_of_then() -> None:
    trainer = Trainer(Arguments(max_staleness=1), [[1, 2], [3, 4]])
    assert trainer.take(1) == [1]
    trainer.rows.synced(1)
    assert trainer.take(1) == [3]
    assert trainer.reported == [(1, [1], "too_stale")]


def test_a_budget_that_trl_fills_in_later_counts_from_then_on() -> None:
    trainer = Trainer(Arguments(max_staleness=9, token_budget=None), [[3, 9, 4]])
    trainer.args.token_budget = 8
    assert trainer.take(2) == [3, 4]


STEPS = [
    # (rows taken, micro-batches per step, rows of the batches of 4 discarded at the end)
    (0, 1, []),
    (4, 1, [(1, [0, 1, 2, 3])]),  # never trained on
    (8, 1, [(2, [0, 1, 2, 3])]),  # one step, and one micro-batch ahead
    (9, 1, [(2, [0, 1, 2, 3]), (3, [0, 1, 2, 3])]),  # 1 row taken of the third batch, 3 left
    (12, 2, [(3, [0, 1, 2, 3])]),  # one step of two micro-batches
    (16, 2, [(3, [0, 1, 2, 3]), (4, [0, 1, 2, 3])]),  # during the second step
]


@pytest.mark.parametrize(("taken", "of_a_step", "discarded"), STEPS)
def test_at_its_end_rows_of_no_whole_step_are_discarded(
    taken: int, of_a_step: int, discarded: list[tuple[int, list[int]]]
) -> None:
    args = Arguments(max_staleness=9, gradient_accumulation_steps=of_a_step)
    trainer = Trainer(args, [[1] * 4] * 5)
    trainer.take(taken)
    trainer.rows.end()
    assert trainer.reported == [(batch, rows, "not_trained") for batch, rows in discarded]
    trainer.rows.end()
    assert len(trainer.reported) == len(discarded)


def test_a_micro_batch_is_of_all_ranks_rows() -> None:
    args = Arguments(max_staleness=9, per_device_train_batch_size=2, world_size=2)
    trainer = Trainer(args, [[1] * 4] * 2)
    trainer.take(8)
    trainer.rows.end()
    assert trainer.reported == [(2, [0, 1, 2, 3], "not_trained")]


BUDGETED = [
    # (rows taken between syncs, rows of the batches of 4 discarded at the end)
    ([], []),
    ([3], [(1, [0, 1, 2, 3])]),  # ended before its first step
    ([5, 0], [(2, [1, 2, 3])]),  # two micro-batches at once: the end of the first is unknown
    ([5, 2, 0], [(2, [0, 1, 2, 3])]),  # row 4 was held, with 5 ahead; row 6 is held now
    ([5, 2, 1, 0], [(2, [2, 3])]),
    ([5, 2, 1, 1], [(2, [2, 3]), (3, [0, 1, 2, 3])]),  # stopped during a step
]


@pytest.mark.parametrize(("between_syncs", "discarded"), BUDGETED)
def test_with_a_budget_of_tokens_syncs_show_which_rows_were_ahead_of_the_last_step(
    between_syncs: list[int], discarded: list[tuple[int, list[int]]]
) -> None:
    trainer = Trainer(Arguments(max_staleness=9, token_budget=8), [[1] * 4] * 4)
    for sync, rows in enumerate(between_syncs, 1):
        trainer.rows.synced(sync)
        trainer.take(rows)
    trainer.rows.end()
    assert trainer.reported == [(batch, rows, "not_trained") for batch, rows in discarded]


@pytest.mark.parametrize("more", [{"weight_sync_steps": 2}, {"gradient_accumulation_steps": 2}])
def test_where_syncs_do_not_show_it_only_rows_that_trl_never_got_are_discarded(
    more: dict[str, int],
) -> None:
    trainer = Trainer(Arguments(max_staleness=9, token_budget=8, **more), [[1] * 4] * 2)
    for sync, rows in enumerate([4, 2, 1], 1):
        trainer.rows.synced(sync)
        trainer.take(rows)
    trainer.rows.end()
    assert trainer.reported == [(2, [3], "not_trained")]


def test_only_as_many_rows_are_remembered_as_trl_may_be_ahead() -> None:
    trainer = Trainer(Arguments(max_staleness=99), [[1] * 4] * 50)
    for sync in range(48):
        trainer.rows.synced(sync)
        trainer.take(4)
    assert len(trainer.rows._last_handed) <= 12


def test_a_run_that_has_failed_does_not_hide_what_trl_ends_for() -> None:
    trainer = Trainer(Arguments(), [[1] * 4])
    trainer.take(1)

    def discard(*_: object, **__: object) -> None:
        raise RunClosed("the run has ended")

    trainer.discard = discard  # type: ignore[method-assign]
    trainer.rows.end()
    assert trainer.rows.qsize() == 0


def test_used_up_tasks_are_an_empty_queue() -> None:
    trainer = Trainer(Arguments(), [[1]])
    trainer.take(1)
    with pytest.raises(queue.Empty):
        trainer.rows.get()
    assert trainer.rows.is_over
