"""Waiting times and staleness parts of a run in virtual time."""

import asyncio
import itertools
import json
import logging
import math
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tidegate
from tidegate.errors import ConfigError
from tidegate.observability.metrics.live import LiveRecorder
from tidegate.observability.records.evaluations import EvaluationPoint
from tidegate.observability.reports.facts import read_batches
from tidegate.orchestrator.batches.ages import PUBLISHES_KEPT, BatchAges, PublishTimes
from tidegate.orchestrator.batches.batches import build_batch
from tidegate.orchestrator.core.group import Group
from tidegate.orchestrator.core.rollout import Rollout, RolloutState, Turn
from tidegate.orchestrator.episodes.activities import NAMES_MAX, OTHER_ACTIVITIES, Activities
from tidegate.orchestrator.telemetry.off_policy import OffPolicy, off_policy, off_policy_of
from tidegate.policies.diagnostics import measure_mismatch, measure_mismatch_by_lag
from tidegate.testing import ServeInTests
from tidegate.transport.messages import SamplingParams

SMALL: dict[str, Any] = {"group_size": 2, "groups_per_batch": 1, "max_staleness": 1}


async def one_turn(episode: tidegate.Episode, task: int) -> float:
    episode.append([task])
    await episode.generate(max_tokens=2)
    return 1.0


async def test_waits_and_activities_are_measured_by_the_clock(tidegate_serve: ServeInTests) -> None:
    reported: list[Mapping[str, float]] = []

    async def solve(episode: tidegate.Episode, task: int) -> float:
        await one_turn(episode, task)
        with episode.activity("reward"):
            await asyncio.sleep(2.0 + 3.0 * episode.index)
        return 1.0

    async with tidegate_serve(**SMALL, on_batch=reported.append) as rollouts:
        async for _ in rollouts.batches([1, 2, 3], episode=solve):
            await rollouts.publish({})
        statistics = rollouts.statistics()
    assert statistics.episode_activity_s == pytest.approx({"reward": 3 * 7.0})
    assert statistics.straggler_wait_groups == 3
    assert statistics.mean_straggler_wait_s == pytest.approx(
        3.0, abs=0.2
    )  # up to two steps of difference
    waits = [figures["straggler_wait_s_max"] for figures in reported]
    assert waits == pytest.approx([3.0] * 3, abs=0.2)


async def test_staleness_is_split_into_generation_and_queue(
    tidegate_serve: ServeInTests,
) -> None:
    reported: list[Mapping[str, float]] = []
    has_published = asyncio.Event()

    async def solve(episode: tidegate.Episode, task: int) -> float:
        await one_turn(episode, task)
        if task == 2:  # sampled by version 0, ends after version 1 was published
            await has_published.wait()
        return 1.0

    async with tidegate_serve(**SMALL, on_batch=reported.append) as rollouts:
        async for batch in rollouts.batches([1, 2, 3], episode=solve):
            if batch.trainer_version == 0:
                await asyncio.sleep(1.0)  # meanwhile the second group generates
            await rollouts.publish({})
            has_published.set()
            await asyncio.sleep(1.0)
        statistics = rollouts.statistics()
    for figures in reported:
        parts = figures["staleness_from_generation_mean"] + figures["staleness_from_queue_mean"]
        assert parts == pytest.approx(figures["staleness_mean"])
    assert [f["staleness_from_generation_mean"] for f in reported] == [0, 1, 0]
    assert [f["staleness_from_queue_mean"] for f in reported][:2] == [0, 0]
    assert reported[2]["staleness_from_queue_mean"] == reported[2]["staleness_mean"]
    assert sum(statistics.staleness_from_generation.values()) == statistics.trained_rollouts == 6


async def test_a_forked_rollout_counts_once_in_both_parts_of_staleness(
    tidegate_serve: ServeInTests,
) -> None:
    """It counts with the staleness of its oldest row."""
    reported: list[Mapping[str, float]] = []

    async def solve(episode: tidegate.Episode, task: int) -> float:
        await one_turn(episode, task)
        branches = [episode.fork() for _ in range(2 * episode.index)]
        await asyncio.sleep(2.0)  # meanwhile at least one version is published
        for branch in branches:
            await branch.generate(max_tokens=2)
        return 1.0

    async with tidegate_serve(**SMALL, on_batch=reported.append) as rollouts:
        async for batch in rollouts.batches([1, 2, 3], episode=solve):
            assert len(batch.rewards) == 4
            await rollouts.publish({})
        statistics = rollouts.statistics()
    assert statistics.trained_rollouts == 6
    for part in (statistics.staleness_from_generation, statistics.staleness_from_queue):
        assert sum(part.values()) == 6
    ages = sum(s * n for s, n in statistics.staleness_histogram.items())
    parts = statistics.mean_staleness_from_generation + statistics.mean_staleness_from_queue
    assert parts == pytest.approx(ages / 6)
    for figures in reported:
        parts = figures["staleness_from_generation_mean"] + figures["staleness_from_queue_mean"]
        assert parts == pytest.approx(figures["staleness_mean"])
        assert figures["rollouts"] == 2


async def test_an_exception_in_on_batch_is_counted_and_loses_no_batch(
    tidegate_serve: ServeInTests, caplog: pytest.LogCaptureFixture
) -> None:
    def log_to_nowhere(figures: Mapping[str, float]) -> None:
        raise ConnectionError("the logger's server is gone")

    with caplog.at_level(logging.ERROR, logger="tidegate"):
        async with tidegate_serve(**SMALL, on_batch=log_to_nowhere) as rollouts:
            async for _ in rollouts.batches([1, 2], episode=one_turn):
                await rollouts.publish({})
            assert rollouts.statistics().batch_callback_errors == 2
    output = [record for record in caplog.records if "on_batch raised" in record.message]
    assert len(output) == 2
    assert "the logger's server is gone" in caplog.text


async def test_an_on_batch_that_is_not_a_sync_function_is_refused_at_the_start(
    tidegate_serve: ServeInTests,
) -> None:
    async def log_later(figures: Mapping[str, float]) -> None:
        """No caller would await it."""

    for on_batch in (log_later, "wandb"):
        with pytest.raises(ConfigError, match="on_batch must be a sync function"):
            tidegate_serve(**SMALL, on_batch=on_batch)


async def test_an_activity_without_a_name_fails_only_its_episode(
    tidegate_serve: ServeInTests,
) -> None:
    async def solve(episode: tidegate.Episode, task: int) -> float:
        await one_turn(episode, task)
        with episode.activity("reward"):
            await asyncio.sleep(0.5)
        with (
            pytest.raises(TypeError, match="must be a str such as 'reward', got 7"),
            episode.activity(7),  # type: ignore[arg-type]
        ):
            pass
        return 1.0

    async with tidegate_serve(**SMALL) as rollouts:
        async for _ in rollouts.batches([1], episode=solve):
            assert rollouts.statistics().episode_activity_s == pytest.approx({"reward": 1.0})


# ---------------------------------------------------------------- parts


NUMBERS = itertools.count()


def ended(group_id: int, versions: list[int], ended_s: float) -> Rollout:
    rollout = Rollout(next(NUMBERS), group_id, 0)
    rollout.extend(array("i", [1]))
    turn = Turn(rollout, SamplingParams(max_tokens=9))
    rollout.turns.append(turn)
    for version in versions:
        turn.append(5, -1.0, version, "engine-0")
    rollout.reward, rollout.state, rollout.ended_s = 1.0, RolloutState.TRAINED, ended_s
    return rollout


def test_groups_that_ended_before_a_crash_have_no_wait_times() -> None:
    times, ages = PublishTimes(3), BatchAges()
    times.record(10.0, 4)
    times.record(20.0, 5)
    groups = [
        Group(0, "t", rollouts=[ended(0, [3, 4], 12.0), ended(0, [4], 11.0)]),
        Group(1, "t", rollouts=[ended(1, [4], math.nan), ended(1, [4], 15.0)]),
        Group(2, "t", rollouts=[ended(2, [], 9.0), ended(2, [3], 9.5)]),  # one has no token
    ]
    batch = build_batch(groups, trainer_version=5)
    rows = [row for group in groups for row in group.rollouts]
    figures = ages.record(rows, batch, times)
    assert (ages.groups, ages.straggler_wait_s) == (2, 1.5)
    assert ages.from_queue == {1: 2, 2: 1}
    assert ages.from_generation == {1: 1, 0: 2}
    assert figures["straggler_wait_s_max"] == 1.0
    assert BatchAges().record([], build_batch([], 5), times) == {}


def test_the_version_at_a_time_is_known_from_the_start_or_from_the_oldest_kept_publish() -> None:
    times = PublishTimes(7)
    times.record(1.0, 8)
    times.record(2.0, 9)
    assert times.version_at(np.array([-5.0, 0.9, 1.0, 1.5, 3.0])).tolist() == [7, 7, 8, 8, 9]
    for version in range(10, 4 * PUBLISHES_KEPT + 1):
        times.record(float(version), version)
    newest, oldest = 4 * PUBLISHES_KEPT, 3 * PUBLISHES_KEPT
    requested = np.array([1.0, oldest + 0.5, oldest + 1.5, newest + 9.0])
    assert times.version_at(requested).tolist() == [oldest, oldest, oldest + 1, newest]


def test_concurrent_activities_add_up_and_their_names_are_limited() -> None:
    clock = [0.0]
    activities = Activities(lambda: clock[0])
    first, second = activities.begin("search"), activities.begin("search")
    clock[0] = 2.0
    assert activities.seconds() == {"search": 4.0}
    activities.end(first)
    clock[0] = 5.0
    activities.end(second)
    clock[0] = 9.0
    assert activities.seconds() == {"search": 7.0}
    names = [activities.begin(f"tool {n}") for n in range(2 * NAMES_MAX)]
    assert set(names[NAMES_MAX:]) == {OTHER_ACTIVITIES}
    assert len(activities.seconds()) == NAMES_MAX + 1


def test_the_mismatch_of_all_lags_is_that_of_their_tokens_and_is_read_back() -> None:
    torch = pytest.importorskip("torch")
    log_ratio = torch.tensor([[0.3, -0.2, 0.1, 0.5]])
    mask, versions = torch.ones(1, 4, dtype=torch.bool), torch.tensor([[2, 2, 1, 0]])
    by_lag = measure_mismatch_by_lag(log_ratio, mask, versions, trainer_version=2)
    reported = off_policy(0.9, 0.01, by_lag)
    whole = measure_mismatch(log_ratio, mask)
    assert reported.k3 == pytest.approx(whole.k3)
    assert reported.chi2 == pytest.approx(whole.chi2_token)
    assert reported.by_lag.keys() == {0, 1, 2}
    assert reported.by_lag[2]["chi2"] == pytest.approx(math.exp(1.0) - 1)
    assert off_policy_of({"reward": 1.0, **reported.figures()}) == reported
    assert off_policy_of({"mismatch_k3_lag_x": 1.0}) == OffPolicy()


def test_curves_of_a_resumed_run_continue_from_the_checkpoint(tmp_path: Path) -> None:
    def write(part: Path, versions: range, last_line: str = "") -> None:
        part.mkdir(exist_ok=True)
        lines = [json.dumps({"version": version, "of": len(part.name)}) for version in versions]
        (part / "metrics.jsonl").write_text("\n".join([*lines, last_line]))

    write(tmp_path, range(5), last_line='{"version": 5, "rew')  # killed while writing a line
    write(tmp_path / "part-1", range(3, 8))
    (tmp_path / "part-2").mkdir()  # killed before its first batch
    found = read_batches(tmp_path, batches=6)
    assert [each["version"] for each in found] == [0, 1, 2, 3, 4, 5]
    assert [each["of"] == len("part-1") for each in found] == [False] * 3 + [True] * 3
    assert read_batches(tmp_path / "part-2", batches=6) == []
    recorder = LiveRecorder(now_us=lambda: 1_000)
    recorder.recall(found, [])
    recorder.batch({"version": 6})
    assert [each["version"] for each in recorder.collected().batches] == [0, 1, 2, 3, 4, 5, 6]
    assert [each["version"] for each in recorder.collected(since_us=500).batches] == [6]


def test_fields_that_are_not_numbers_are_not_drawn(tmp_path: Path) -> None:
    """A run's files may be edited or damaged; the dashboard and scrapes must not fail."""
    lines = [
        '{"version": 0, "reward": "high", "of": [1], "mismatch_k3_lag_\u00b2": 1.0}',
        "17",
        '{"reward": 1.0}',
        '{"version": 1, "reward": NaN}',
        "\x00\x00\x00",
        '{"version": 2}',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    first, second = read_batches(tmp_path, batches=9)
    assert first == {"version": 0, "mismatch_k3_lag_\u00b2": 1.0}
    assert off_policy_of(first) == OffPolicy()
    assert math.isnan(second["reward"])


def test_evaluations_of_before_a_resume_and_of_each_rank_are_one_point_per_version() -> None:
    recorder = LiveRecorder()
    recorder.recall([], [EvaluationPoint("held_out", 0, 0, 0.25, 4, 0)])
    figures = {"name": "held_out", "version": 3, "batches": 3, "tasks": 2, "failures": 0}
    for reward in (0.5, 1.0):
        recorder.evaluation({**figures, "reward": reward})
    points = [(each.version, each.reward) for each in recorder.collected().evaluations]
    assert points == [(0, 0.25), (3, 0.75)]
