"""Tests that the crash-restart test and the soak test notice a broken promise."""

from tests.long_runs.chaos import check_ledger, check_reward, check_staleness, check_tasks
from tests.long_runs.chaos_trainer import TrainedBatch
from tests.long_runs.checks import Row
from tests.long_runs.soak import Samples, rows


def batch(number: int, tasks: list[int], *, oldest: int = 0, reward: float = 0.0) -> TrainedBatch:
    return TrainedBatch(
        number=number,
        trainer_version=number - 1,
        tasks=tasks,
        oldest_versions=[oldest] * len(tasks),
        sampled_tokens=10,
        reward=reward,
    )


GOOD = [batch(1, [0, 1]), batch(2, [3, 2], reward=0.5), batch(3, [4, 5], reward=1.0)]
LEDGER = {"generated": 35, "trained": 30, "discarded": {"shutdown": 5}}


def broken(rows: list[Row]) -> list[str]:
    return [row.name for row in rows if not row.holds]


def test_nothing_is_said_against_a_run_that_kept_its_promises() -> None:
    rows = [*check_tasks(GOOD), *check_staleness(GOOD), *check_reward(GOOD)]
    assert broken([*rows, *check_ledger(GOOD, {"ledger": LEDGER, "ledger_error": 0})]) == []


def test_a_prompt_trained_twice_a_skipped_one_and_a_lost_batch_are_noticed() -> None:
    assert broken(check_tasks([batch(1, [0, 1]), batch(2, [1, 2])])) == ["prompts_trained_twice"]
    assert broken(check_tasks([batch(1, [0, 1]), batch(2, [3, 4])])) == ["prompts_skipped"]
    assert broken(check_tasks([batch(1, [0, 1]), batch(3, [2, 3])])) == ["batches_misnumbered"]
    assert broken(check_tasks([])) == ["prompts_trained"]


def test_tokens_that_are_unaccounted_for_are_noticed() -> None:
    assert broken(check_ledger(GOOD, {"ledger": LEDGER, "ledger_error": 1})) == ["ledger_error"]
    assert broken(check_ledger(GOOD[:2], {"ledger": LEDGER, "ledger_error": 0})) == [
        "ledger_trained_minus_trainers_own"
    ]


def test_a_token_beyond_the_bound_and_a_version_counted_twice_are_noticed() -> None:
    assert broken(check_staleness([*GOOD, batch(4, [6], oldest=0)])) == ["staleness_max"]
    assert broken(check_staleness([GOOD[0], GOOD[0]])) == ["versions_not_rising"]


def test_a_reward_that_does_not_rise_is_noticed() -> None:
    assert broken(check_reward(GOOD[::-1])) == ["reward_last_quarter"]


def samples(name: str, counts: list[float]) -> Samples:
    taken = Samples()
    for at_s, count in enumerate(counts):
        taken.add(name, at_s, count)
    return taken


def test_memory_that_grows_or_shrinks_by_more_than_its_limit_is_noticed() -> None:
    warm_up = [100.0 + n for n in range(50)]
    assert broken(rows(samples("trainer_rss_mb", warm_up + [150.0] * 100))) == []
    for gain in (+0.05, -0.05):
        drift = [150.0 * (1 + gain * n / 100) for n in range(100)]
        assert broken(rows(samples("trainer_rss_mb", warm_up + drift))) == ["trainer_rss_mb_gain"]


def test_a_count_that_grows_is_distinguished_from_one_that_varies() -> None:
    varies = [20.0 + n * 7 % 13 for n in range(150)]
    grows = [count + n / 20 for n, count in enumerate(varies)]
    assert broken(rows(samples("asyncio_tasks", varies))) == []
    assert broken(rows(samples("asyncio_tasks", grows))) == ["asyncio_tasks_gain"]
