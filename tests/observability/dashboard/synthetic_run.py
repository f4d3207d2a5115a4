"""A made-up run for the dashboard: any number of engines, drawn from a seed, without processes.

Browser tests and the screenshots of the documentation use it where no real run fits on a machine.
"""

import dataclasses
import random
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from tokenizers import Tokenizer

from tidegate.observability.dashboard.rollout_queries import RolloutQuery
from tidegate.observability.dashboard.source import RolloutList
from tidegate.observability.metrics.live import CollectedData
from tidegate.observability.metrics.snapshots import GroupLine, RunSnapshot
from tidegate.observability.metrics.timeline import SLICE_US, Activity, Mark, Slice
from tidegate.observability.records.trajectories import RecordedRollout
from tidegate.observability.reports.story import Story, Subject
from tidegate.orchestrator.core.ledger import LedgerSnapshot
from tidegate.orchestrator.telemetry.off_policy import OffPolicy
from tidegate.orchestrator.telemetry.statistics import EngineStatistics, RunStatistics

SLICES = 480
SLICES_PER_VERSION = 40
BATCHES = SLICES // SLICES_PER_VERSION
SLOTS = 64


class SyntheticRun:
    """Source of a live run whose state is drawn from a seed; it never changes.

    ``unaccounted``: tokens that its ledger has lost. ``staleness_max``: the highest staleness that
    was trained on; the bound is 2.
    """

    tokenizer: Tokenizer | None = None
    is_live = True
    bound: int | None = 2

    def __init__(
        self,
        *,
        engines: int,
        seed: int = 0,
        unaccounted: int = 0,
        staleness_max: int = 2,
        changed: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """``changed``: fields of `RunStatistics` that differ."""
        self.is_update = False
        """Whether an update was asked for last."""
        self._random = random.Random(seed)
        self._unaccounted = unaccounted
        self._staleness_max = staleness_max
        names = [f"engine-{number}" for number in range(engines)]
        self._snapshot = RunSnapshot(
            statistics=dataclasses.replace(self._statistics(names), **changed),
            collected=self._collected(names),
            groups=tuple(
                GroupLine(group, 8, self._random.randrange(9), BATCHES - group % 3)
                for group in range(min(2_000, 4 * engines))
            ),
            about={
                "name": f"{engines} engines",
                "model": "models/8b",
                "directory": "runs/synthetic",
                "is_live": True,
                "is_whole": True,
                "resumed_batches": [],
                "settings": {"max_staleness": 2, "engines": engines},
            },
            at_us=SLICES * SLICE_US,
        )

    def observe(self, *, is_update: bool = False) -> RunSnapshot:
        """Return the only snapshot."""
        self.is_update = is_update
        return self._snapshot

    def timeline(self, start_us: int, end_us: int) -> CollectedData | None:
        """Return None: the page has all slices."""
        return None

    def rollouts(self, query: RolloutQuery) -> RolloutList:
        """Return an empty list."""
        return RolloutList((), 0)

    def rollout(self, rollout_id: int) -> RecordedRollout | None:
        """Return None."""
        return None

    def story(self, subject: Subject) -> Story | None:
        """Return None."""
        return None

    def _collected(self, names: Sequence[str]) -> CollectedData:
        marks = [
            Mark(name, "swap", (slice_number * SLICE_US), slice_number // SLICES_PER_VERSION)
            for name in names[:100]
            for slice_number in range(SLICES_PER_VERSION, SLICES, SLICES_PER_VERSION)
        ]
        return CollectedData(
            batches=tuple(
                {"version": v, "wall_s": 10.0 * v, "reward": 0.3 + 0.5 * v / BATCHES}
                for v in range(BATCHES)
            ),
            slices={name: self._slices() for name in names},
            slice_us=SLICE_US,
            marks=marks,
            trainer=[
                Activity(kind, start_us, start_us + length_us, version)
                for version in range(BATCHES)
                for kind, start_us, length_us in _round(version * SLICES_PER_VERSION * SLICE_US)
            ],
            token_lags=dict.fromkeys(range(self._staleness_max + 1), 10_000),
            off_policy=OffPolicy(),
        )

    def _slices(self) -> list[Slice]:
        shift, load = self._random.randrange(4), self._random.uniform(0.5, 1.0)
        slices = []
        for number in range(SLICES):
            version = max(0, (number - shift) // SLICES_PER_VERSION)
            busy_us = int(SLICE_US * min(1.0, load * self._random.uniform(0.8, 1.2)))
            prefill_us = busy_us // 4 if self._random.random() < 0.2 else 0
            slices.append(Slice(number, version, busy_us - prefill_us, prefill_us))
        return slices

    def _statistics(self, names: Sequence[str]) -> RunStatistics:
        tokens = 1_000_000
        histogram = dict.fromkeys(range(self._staleness_max + 1), 256)
        return RunStatistics(
            wall_s=120.0,
            trainer_version=BATCHES,
            live_version=BATCHES,
            admissible_groups=3,
            running_groups=len(names),
            buffered_groups=12,
            training_groups=8,
            batches=BATCHES,
            trained_rollouts=sum(histogram.values()),
            mixed_version_rollouts=200,
            discarded_rollouts={"stale": 3, "timeout": 2},
            max_staleness_seen=self._staleness_max,
            staleness_bound=2,
            mean_staleness=self._staleness_max / 2,
            staleness_histogram=histogram,
            trainer_idle_share=0.2,
            engine_idle_share=0.25,
            tokens_per_s=50_000.0,
            ledger=LedgerSnapshot(
                tokens,
                800_000,
                100_000,
                90_000 - self._unaccounted,
                {"stale": 6_000, "timeout": 4_000},
            ),
            evaluation_ledger=LedgerSnapshot(),
            engines=tuple(
                EngineStatistics(name, BATCHES, 50, 7, tokens, 90.0, max_running_turns=SLOTS)
                for name in names
            ),
        )


def _round(start_us: int) -> list[tuple[str, int, int]]:
    """Return the trainer's activities of one version: kind, start, length."""
    second = 1_000_000
    return [
        ("wait", start_us, 2 * second),
        ("train", start_us + 2 * second, 7 * second),
        ("publish", start_us + 9 * second, second),
    ]
