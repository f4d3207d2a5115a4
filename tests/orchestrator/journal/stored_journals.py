"""Writes the journals that ``test_stored_journals.py`` reads, by the code of today.

    python -m tests.orchestrator.journal.stored_journals

Run it only when the format of events or of snapshots changes on purpose, and raise
``EVENT_FORMAT`` with it. Each journal comes with snapshots of its core, taken on the way.
"""

import json
import lzma
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests.orchestrator.core.driver import PROMPT, Driver
from tests.orchestrator.core.test_policies import ask, end, started
from tests.orchestrator.core.test_task_records import NAME, CurriculumDriver
from tests.orchestrator.core.test_token_attachments import by_teacher, of_positions, of_tokens
from tests.orchestrator.core.test_token_attachments import sample as sample_with
from tests.orchestrator.core.test_trained_adapters import BASE_RULES, AgentsRun
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
from tidegate.policies.asynchrony import BoundedStaleness
from tidegate.policies.filters import DynamicSampling
from tidegate.policies.rounds import Synchronous
from tidegate.simulation.run import processes
from tidegate.simulation.run.adapter_runs import simulate_adapters
from tidegate.simulation.run.crash_restart import simulate_crash_restarts
from tidegate.transport.attachments import Attachment
from tidegate.transport.media import Media
from tidegate.transport.messages import ABORT, RUNNING, STOP
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


def stragglers() -> Driver:
    """Play a group that is split at its deadline, until its remainder is trained."""
    policy = BoundedStaleness(
        max_staleness=1, groups_per_batch=1, consumption_order="completion", deadline_policy="split"
    )
    driver = started(policy, group_size=3)
    quick, second, slow = (r for r in driver.running.values() if r.group_id == 0)
    place = ask(driver, slow)
    driver.sample(*place, 5, RUNNING)
    for rollout, reward in ((quick, 1.0), (second, 0.0)):
        driver.sample(*ask(driver, rollout), 3, STOP)
        driver.return_reward(rollout, reward)
    end(driver, 1)
    driver.do(ev.BatchRequested())
    driver.publish_and_swap()
    driver.do(ev.BatchRequested())
    driver.do(ev.RowsDiscarded(driver.batches[-1].number, (1,), "left_out"))
    driver.fill()
    driver.sample(*place, 2, RUNNING)
    driver.publish_and_swap()
    driver.sample(*place, 1, STOP)
    driver.return_reward(slow, 1.0)
    driver.do(ev.BatchRequested())
    return driver


def learned() -> Driver:
    """Play a run whose filter has learned from what it saw."""
    driver = Driver(
        policy=BoundedStaleness(groups_per_batch=1, max_staleness=4),
        group_filter=DynamicSampling(solved_at=0.9, rollouts_min=2, drops_per_batch_max=1),
    )
    driver.join("a")
    for name in (b"easy", b"hard", b"odd"):
        driver.do(ev.TaskArrived(name.decode(), digest=name))
    for rollout in list(driver.running.values()):
        driver.solve(rollout)
    driver.do(ev.TaskArrived("easy", digest=b"easy"))
    driver.do(ev.BatchRequested())
    return driver


def curriculum() -> Driver:
    """Play a curriculum's draws, weights and outcomes, over a crash."""
    driver = CurriculumDriver()
    for number in range(6):
        driver.fill()
        rollout = driver.running[min(driver.running)]
        driver.ask_turn(rollout)
        for handle in list(driver.engines["a"].turns):
            driver.sample("a", handle, 3, STOP)
        driver.return_reward(rollout, float(number % 2))
        driver.do(ev.TaskWeightsSet(NAME, ((number, number / 10),)))
        driver.do(ev.BatchRequested(number))
        if driver.held:
            driver.publish_and_swap()
    driver.fail(driver.running[min(driver.running)])
    driver.fill()
    return driver


def agents() -> Recorded:
    """Play an adapter whose episodes sample another one too."""
    run, order = AgentsRun(1), random.Random(1)
    for _ in range(120):
        run.move(order.choice((run.solver, run.critic)))
    for name in ("critic", "solver"):
        run.do(ev.AdapterTrainingEnded(name))
    return Recorded("agents", BASE_RULES, run.records)


def everything() -> Iterator[Recorded]:
    """Yield all runs to store."""
    yield from simulated()
    yield agents()
    for play in (attachments, stragglers, learned, curriculum, hand_overs, rounds, losses):
        driver = play()
        yield Recorded(play.__name__, driver.rules, driver.records)


def hand_overs() -> Driver:
    """Play a trainer that has lost a batch, holds others, and resumes and continues."""
    driver = Driver(max_staleness=2, groups_per_batch=1, group_size=1)
    driver.join("a")

    def train() -> None:
        driver.fill()
        driver.do(ev.BatchRequested())
        for rollout in list(driver.running.values())[:1]:
            driver.solve(rollout)

    train()
    for _ in range(3):
        driver.publish_and_swap([])  # at the third, batch 1 is too old, and lost
    train()
    train()
    driver.name([2])
    driver.acknowledges = False
    train()
    driver.do(ev.BatchRequested(9))
    driver.do(ev.HandOverPaused(True))
    driver.acknowledges = True
    driver.do(ev.RunResumed(1, 0))
    driver.do(ev.EngineJoined("a", driver.engines["a"].version, 4, replay_until=7))
    return driver


def rounds() -> Driver:
    """Play rounds between which generation pauses, over several iterators and a resume."""
    driver = Driver(policy=Synchronous(groups_per_batch=1), group_size=1)
    driver.join("a")
    for _ in range(2):
        driver.do(ev.TasksOffered("play"))
        driver.fill()
        driver.do(ev.BatchRequested())
        for rollout in list(driver.running.values()):
            driver.solve(rollout)
        driver.publish()
        driver.swap("a")
    driver.do(ev.RunResumed(2, 2))
    driver.come_back("a")
    driver.do(ev.TasksOffered("play"))
    driver.do(ev.RunEnded())
    return driver


def losses() -> Driver:
    """Play a turn that two engines lose, and batches of falling staleness."""
    driver = Driver(max_staleness=1, groups_per_batch=1, group_size=1)
    driver.join("a")
    driver.fill()
    first, second = driver.running.values()
    driver.solve(first)
    driver.publish_and_swap([])
    driver.do(ev.BatchRequested())
    driver.publish_and_swap()
    driver.ask_turn(second)
    driver.leave("a")
    driver.join("b")
    place = driver.where(second)
    assert place is not None
    driver.sample(*place, 2)
    driver.leave("b")
    driver.join("c")
    (handle,) = driver.engines["c"].turns
    driver.sample("c", handle, 1, STOP)
    driver.return_reward(second)
    driver.do(ev.BatchRequested())
    driver.leave("c")
    driver.fill()
    return driver


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
