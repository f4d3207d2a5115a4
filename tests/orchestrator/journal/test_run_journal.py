"""A run's journal stays complete if its events can't be replaced by a snapshot."""

import asyncio
import logging
import random

import pytest

from tests.orchestrator.core.driver import Driver
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.snapshot_codec import digest
from tidegate.orchestrator.journal import run_journal
from tidegate.orchestrator.journal.run_journal import JournalHeader, RunJournal
from tidegate.simulation.run.processes import SimulatedStore

HEADER = JournalHeader(run_id="run", rules={}, seed=0)


class JournaledDriver(Driver):
    """Driver whose core's events are journalled in memory, and compacted when due."""

    def __init__(self) -> None:
        self.store = SimulatedStore(commit_s=0.0, chance=random.Random(0))
        self.journal: RunJournal | None = None
        super().__init__()

    def do(self, event: ev.Event) -> list[ev.Command]:
        if self.journal is None:
            self.journal = RunJournal(self.store, self.core, HEADER, is_threaded=False)
            self.journal.start(_fail)
        self.journal.log(event)
        commands = super().do(event)
        self.journal.compact_if_due()
        return commands


def _fail(error: BaseException) -> None:
    raise AssertionError("memory is never full or broken") from error


def play(driver: Driver) -> None:
    """Begin all groups, and sample one token for each turn."""
    driver.join("engine-0")
    driver.fill()
    for rollout in list(driver.running.values()):
        driver.ask_turn(rollout)
    for handle in list(driver.engines["engine-0"].turns):
        driver.sample("engine-0", handle, 1)


def restored_digest(driver: JournaledDriver) -> str:
    restored = RunJournal(driver.store, driver.new_core(), HEADER, is_threaded=False)
    restored.restore()
    return digest(restored.core, is_replayed=True)


async def test_a_snapshot_takes_the_place_of_events_once_they_are_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_journal, "SNAPSHOT_AFTER_BYTES", 400)
    driver = JournaledDriver()
    play(driver)

    snapshot = driver.store.snapshot()
    assert snapshot is not None
    assert len(list(driver.store.read())) < len(driver.records) - 1
    assert restored_digest(driver) == digest(driver.core)


async def test_a_journal_whose_snapshot_is_too_large_keeps_every_event_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(run_journal, "SNAPSHOT_AFTER_BYTES", 400)
    monkeypatch.setattr(run_journal, "BODY_BYTES_MAX", 100)
    driver = JournaledDriver()
    with caplog.at_level(logging.WARNING, logger="tidegate"):
        play(driver)

    assert driver.store.snapshot() is None
    assert [record for _, record in driver.store.read()] == driver.records
    assert [message.split()[0] for message in caplog.messages] == ["journal=growing"]
    assert restored_digest(driver) == digest(driver.core)


async def test_a_commit_after_the_run_has_ended_calls_nothing_that_waited_for_it() -> None:
    driver = JournaledDriver()
    play(driver)
    assert driver.journal is not None
    called: list[str] = []
    is_committed = asyncio.Event()

    driver.journal.when_safe(lambda: called.append("acknowledged"))
    driver.journal.discard_actions()
    driver.journal.when_safe(is_committed.set)
    await is_committed.wait()

    assert called == []
