"""A foreign journal can make this process do nothing but read it."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.command_line import status_of
from tidegate.errors import JournalCorrupt, ResumeMismatch
from tidegate.orchestrator.core.placement import PlacementRules
from tidegate.orchestrator.core.rules import Rules, made_of, record_of
from tidegate.orchestrator.journal.journal import Journal
from tidegate.orchestrator.journal.replay import replay_journal
from tidegate.orchestrator.journal.resuming import JOURNAL_FILE, open_run_journal
from tidegate.orchestrator.journal.run_journal import EVENT_FORMAT, JournalHeader
from tidegate.orchestrator.settings.config import run_settings
from tidegate.policies.asynchrony import BoundedStaleness
from tidegate.policies.consumption import Window
from tidegate.policies.migration import EvenOut
from tidegate.policies.rounds import Synchronous
from tidegate.policies.routing import SessionAffinity


@dataclass(frozen=True, kw_only=True)
class OurOwn(Synchronous):
    """A user's policy, which a journal can name but must not import."""


RULES = record_of(Rules(policy=Synchronous(groups_per_batch=2), group_size=2))


def journal_with(directory: Path, rules: Any, *, event_format: int = EVENT_FORMAT) -> Path:
    """Make a run directory whose journal has these rules and no event."""
    header = JournalHeader(run_id="foreign", rules=rules, seed=0, event_format=event_format)
    Journal.create(directory / JOURNAL_FILE, header=msgspec.json.encode(header)).close()
    return directory


def rules_naming(name: str, **settings: Any) -> list[Any]:
    """Make rules that name a class, as the whole and at each place of a policy."""
    named = {"class": name, **settings}
    return [named, {**RULES, "policy": named}, {**RULES, "placement": {"routing_policy": [named]}}]


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make a module that creates a file when it is imported; return the file."""
    sprung = tmp_path / "sprung"
    (tmp_path / "sprung_by_import.py").write_text(f"open({str(sprung)!r}, 'w').close()\nX = dict\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield sprung
    sys.modules.pop("sprung_by_import", None)


@pytest.mark.parametrize("at", range(3))
def test_a_journal_starts_no_process_and_imports_no_module(
    at: int,
    tmp_path: Path,
    trap: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = {
        "subprocess:Popen": {"args": ["touch", str(trap)]},
        "tidegate.errors:subprocess.Popen": {"args": ["touch", str(trap)]},
        "sprung_by_import:X": {},
        "tidegate.orchestrator.journal.salvage:main": {"arguments": [str(trap)]},
    }
    for number, (name, settings) in enumerate(names.items()):
        run = journal_with(tmp_path / str(number), rules_naming(name, **settings)[at])
        with pytest.raises(ResumeMismatch, match=r"which is no policy of Tidegate's"):
            replay_journal(run)
        with pytest.raises(ResumeMismatch):
            open_run_journal(run_settings(model=tmp_path, journal=True, run_directory=run), True)
        assert status_of(["replay", str(run)], monkeypatch) == 2
        assert name in capsys.readouterr().err
    assert not trap.exists()


def test_a_users_own_policy_is_made_only_if_the_caller_passes_its_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rules = Rules(policy=OurOwn(groups_per_batch=2), group_size=2)
    run = journal_with(tmp_path / "run", record_of(rules))
    with pytest.raises(ResumeMismatch, match=r"OurOwn.*--policy module:Name"):
        replay_journal(run)
    assert replay_journal(run, policies=[OurOwn]).difference is None
    replay = ["replay", str(run)]
    assert status_of([*replay, "--policy", f"{__name__}:OurOwn"], monkeypatch) == 0
    assert "run foreign" in capsys.readouterr().out
    assert status_of([*replay, "--policy", f"{__name__}:RULES"], monkeypatch) == 2


@pytest.mark.parametrize("event_format", [1, EVENT_FORMAT + 1])
def test_a_journal_with_events_of_another_format_is_refused_by_the_runs_name(
    event_format: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = journal_with(tmp_path / "run", RULES, event_format=event_format)
    match = f"the journal of run foreign has events of format {event_format}, and this Tidegate"
    with pytest.raises(ResumeMismatch, match=match):
        replay_journal(run)
    settings = run_settings(model=tmp_path, journal=True, run_directory=run)
    with pytest.raises(ResumeMismatch, match=match):
        open_run_journal(settings, True)
    assert status_of(["replay", str(run)], monkeypatch) == 2
    assert match in capsys.readouterr().err.replace("\n", " ")


def test_a_journal_that_says_no_format_has_that_of_the_first_tidegate(tmp_path: Path) -> None:
    header = {"run_id": "old", "rules": RULES, "seed": 0}
    path = tmp_path / JOURNAL_FILE
    Journal.create(path, header=msgspec.json.encode(header)).close()
    with pytest.raises(ResumeMismatch, match="run old has events of format 1"):
        replay_journal(tmp_path)


def test_a_run_with_a_users_policy_is_resumed_by_the_policy_it_is_given(
    tmp_path: Path,
) -> None:
    settings = run_settings(
        model=tmp_path,
        staleness_policy=OurOwn(groups_per_batch=2),
        journal=True,
        run_directory=tmp_path / "run",
    )
    open_run_journal(settings, None).close()
    reopened = open_run_journal(settings, True)
    assert reopened.journal is not None
    assert type(reopened.journal.core.policy) is OurOwn
    reopened.close()


def test_rules_are_named_by_registered_names_and_read_as_an_older_version_wrote_them() -> None:
    assert RULES["policy"]["class"] == "Synchronous"
    older = {
        **RULES,
        "class": "tidegate.orchestrator.core.rules:Rules",
        "policy": {**RULES["policy"], "class": "tidegate.policies.rounds:Synchronous"},
    }
    assert made_of(older) == made_of(RULES)


def test_fields_are_read_by_the_names_that_an_older_version_gave_them() -> None:
    policy = BoundedStaleness(
        max_staleness=2, groups_per_batch=4, consumption_order=Window(4), deadline_policy="mask"
    )
    older = record_of(policy)
    older["order"], older["on_deadline"] = (
        older.pop("consumption_order"),
        older.pop("deadline_policy"),
    )
    assert made_of(older) == policy

    placement = PlacementRules(
        routing_policy=SessionAffinity(margin_turns=3), migration_policy=EvenOut(gap_turns=2)
    )
    older = record_of(placement)
    older["routing"], older["stragglers"] = (
        older.pop("routing_policy"),
        older.pop("migration_policy"),
    )
    assert made_of(older) == placement


@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"class": "Window", "groups": 3},
        {**RULES, "policy": {"class": "Synchronous", "groups_per_batch": "many"}},
        {**RULES, "policy": {"class": "TailPacking", "groups_per_batch": 2, "factor": 1e400}},
        {**RULES, "placement": {"class": "DeclaredSpeeds", "by_name": 3}},
        {**RULES, "policy": {"class": ["Synchronous"]}},
    ],
)
def test_rules_that_make_no_sense_are_an_error_with_a_name(rules: Any, tmp_path: Path) -> None:
    run = journal_with(tmp_path / "run", rules)
    with pytest.raises((ResumeMismatch, JournalCorrupt)):
        replay_journal(run)
