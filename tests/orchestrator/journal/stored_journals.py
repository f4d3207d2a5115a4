"""Writes the journals that ``test_stored_journals.py`` reads, by the code of today.

    python -m tests.orchestrator.journal.stored_journals

Run it only when the format of events or of snapshots changes on purpose, and raise
``EVENT_FORMAT`` with it. Each journal comes with snapshots of its core, taken on the way.
"""

import json
import lzma
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.orchestrator.core import test_hand_over, test_losses, test_policies, test_task_records
from tests.orchestrator.core.driver import PROMPT, Driver
from tests.orchestrator.core.test_token_attachments import by_teacher, of_positions, of_tokens
from tests.orchestrator.core.test_token_attachments import sample as sample_with
from tests.orchestrator.core.test_trained_adapters import BASE_RULES, AgentsRun
from tests.orchestrator.core.trainer_model import World
from tests.orchestrator.journal.test_stored_journals import (
    DIGESTS,
    STORED,
    Expected,
    StoredSnapshot,
)
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.core import Core
from tidegate.orchestrator.core.event_log import encode_event, replay
from tidegate.orchestrator.core.rules import Rules, record_of
from tidegate.orchestrator.core.snapshot_codec import digest, save
from tidegate.orchestrator.journal.journal import Journal
from tidegate.orchestrator.journal.run_journal import EVENT_FORMAT, JournalHeader
from tidegate.simulation.run import processes
from tidegate.simulation.run.adapter_runs import simulate_adapters
from tidegate.simulation.run.crash_restart import simulate_crash_restarts
from tidegate.transport.attachments import Attachment
from tidegate.transport.media import Media
from tidegate.transport.messages import ABORT, STOP
from tidegate.transport.sampling import SamplingParams

CHECKSUM_EVERY = 20
"""Number of events between two recorded digests of the core's state."""

SNAPSHOTS = 12
"""Number of snapshots taken at equal distances, of which the last covers all events."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """Events of one run, as journal records, and the rules of its core."""

    name: str
    rules: Rules
    records: Sequence[bytes]


class _Kept(processes.SimulatedStore):
    """A store that can be read after its run."""

    newest: "_Kept"

    def __init__(self, *, commit_s: float, chance: random.Random) -> None:
        super().__init__(commit_s=commit_s, chance=chance)
        _Kept.newest = self


def simulated() -> Iterator[Recorded]:
    """Yield runs with faults and crashes, and runs that train several adapters."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "SimulatedStore", _Kept)
        for kind, seeds in (("crashes", (0, 2, 9, 13, 17, 22)), ("adapters", (2, 4, 14))):
            for seed in seeds:
                simulate = simulate_crash_restarts if kind == "crashes" else simulate_adapters
                report = simulate(seed)
                assert report.failure is None, report.failure
                records = [record for _, record in _Kept.newest.read()]
                yield Recorded(f"{kind}-{seed}", report.scenario.settings.rules(), records)


def attachments() -> Driver:
    """Play turns with every attachment, media and rewards; then a pinned evaluation."""
    driver = Driver(max_staleness=1, groups_per_batch=1)
    driver.join("a")
    driver.do(ev.EngineJoined("a", 0, 4, epoch=1, media=("image", "audio")))
    driver.fill()
    first, second, *_ = driver.running.values()
    everything = SamplingParams(
        max_tokens=8,
        top_logprobs=2,
        raw_logprobs=True,
        routed_experts=True,
        kept_tokens=True,
        hidden_states=True,
    )
    for rollout in (first, second):
        rollout.extend(PROMPT)
        media = (Media("image", "https://host/1.png", 1), Media("audio", "data:,x", 2))
        driver.do(ev.TurnRequested(rollout.rollout_id, everything, media))
        kept = Attachment(
            0, "kept_ids", 0, "int32", np.array([4, 5, 6], "<i4").tobytes(), [], b"\3\0\0\0"
        )
        hidden = Attachment(0, "hidden_states", 0, "float32", bytes(16), [4])
        own = [*of_tokens(-0.5), of_positions(0, 1, 2, 3), kept, hidden]
        sample_with(driver, rollout, [11], own)
    sample_with(driver, first, [], [], ABORT)
    last = [*of_tokens(-0.25), of_positions(3, 4), of_positions(4, 5)]
    sample_with(driver, first, [12], last, STOP)
    driver.do(ev.TurnsScored(first.rollout_id, [by_teacher(-1.0, -2.0)]))
    driver.do(ev.TurnsRewarded(first.rollout_id, ((0, 0.25),)))
    driver.do(ev.RolloutForked(first.rollout_id, "prefix"))
    driver.do(ev.EvaluationRequested("held out", 0, version=0))
    driver.do(ev.EvaluationRequested("held out", 1))
    driver.do(ev.EngineJoined("b", 0, 2))
    driver.do(ev.EngineJoined("c", 0, 2))
    driver.do(ev.EvaluationEngineChosen("b", True))
    driver.do(ev.EngineDraining("c"))
    return driver


def agents() -> Recorded:
    """Play an adapter whose episodes sample another one too."""
    run, order = AgentsRun(1), random.Random(1)
    for _ in range(120):
        run.move(order.choice((run.solver, run.critic)))
    for name in ("critic", "solver"):
        run.do(ev.AdapterTrainingEnded(name))
    return Recorded("agents", BASE_RULES, run.records)


TESTS: tuple[Callable[[], object], ...] = (
    test_policies.test_a_group_is_trained_in_time_without_its_stragglers_which_follow,
    test_policies.test_a_prompt_that_is_solved_is_passed_over_after_a_crash_too,
    test_task_records.test_a_groups_rewards_lengths_failures_and_staleness_are_added_to_its_task,
    test_hand_over.test_a_batch_of_which_the_trainer_has_discarded_all_rows_may_be_named_or_not,
    test_hand_over.test_a_batch_with_the_number_of_one_lost_before_a_resume_can_be_given_back,
    test_losses.test_tokens_in_between_clear_a_turn_but_not_for_ever,
)
"""Tests whose events are stored."""


def driver_of(play: Callable[[], object]) -> Driver:
    """Return the driver that a test, or a function of this module, has used last."""
    used: list[Driver] = []
    init = Driver.__init__

    def kept(driver: Driver, **settings: Any) -> None:
        used.append(driver)
        init(driver, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Driver, "__init__", kept)
        play()
    return used[-1]


def worlds() -> Iterator[Recorded]:
    """Yield worlds of the model of trainers in which the process crashes."""
    for seed in range(40):
        world = World(seed, is_adapter=False)
        if world.records is not None:
            world.run()
            yield Recorded(f"world-{seed}", world.rules, world.records)


def everything() -> Iterator[Recorded]:
    """Yield all runs to store."""
    yield from simulated()
    yield agents()
    yield from worlds()
    for play in (attachments, *TESTS):
        driver = driver_of(play)
        yield Recorded(play.__name__.removeprefix("test_"), driver.rules, driver.records)


def store(run: Recorded) -> Expected:
    """Write a run's journal, with checksums, and snapshots; return what a replay must give."""
    core = Core(run.rules, survives_crashes=True)
    header = JournalHeader(run.name, record_of(run.rules), 0, EVENT_FORMAT)
    records: list[bytes] = []
    snapshots: dict[int, bytes] = {}
    checksums, total = 0, len(run.records)
    snapshot_after = {round(total * part / SNAPSHOTS) for part in range(1, SNAPSHOTS + 1)}
    for number, record in enumerate(run.records, 1):
        replay(record, core)
        records.append(record)
        if number % CHECKSUM_EVERY == 0 or number == total:
            checksum = ev.StateChecksum(digest(core, is_replayed=True))
            records.append(encode_event(checksum, core))
            checksums += 1
        if number in snapshot_after:
            snapshots[len(records)] = save(core, is_replayed=True)
    stored = [StoredSnapshot(events, state) for events, state in snapshots.items()]
    _write(run.name, "snapshots", msgspec.msgpack.encode(stored))
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "journal"
        with Journal.create(path, header=msgspec.json.encode(header)) as journal:
            journal.start(lambda lsn: None, lambda error: None)
            for record in records:
                journal.append(record)
        _write(run.name, "journal", path.read_bytes())
    return Expected(len(records), checksums, digest(core, is_replayed=True))


def _write(name: str, kind: str, data: bytes) -> None:
    (STORED / f"{name}.{kind}.xz").write_bytes(lzma.compress(data))


def main() -> None:
    """Write all journals, in place of those that are stored."""
    for stale in STORED.glob("*.xz"):
        stale.unlink()
    expected = {run.name: store(run) for run in everything()}
    DIGESTS.write_text(json.dumps(msgspec.to_builtins(expected), indent=2) + "\n")


if __name__ == "__main__":
    main()
