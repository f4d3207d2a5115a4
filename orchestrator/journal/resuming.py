"""Opens or creates a run's journal, and finds where a resumed run continues.

``serve(resume=…)`` calls :func:`open_run_journal` before anything is started. The trainer saves a
small token with its weights; the journal has all events. Both must be of the same run, and the
token must not be ahead of the journal. Every record after the newest snapshot is replayed, by
:meth:`RunJournal.restore`; then the core undoes what the token's checkpoint lacks, when it handles
``RunResumed`` (``resume`` in ``core/core.py``).
"""

import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from tidegate.errors import ConfigError, JournalCorrupt, JournalError, ResumeMismatch
from tidegate.orchestrator.core.core import Core
from tidegate.orchestrator.core.events import RunResumed
from tidegate.orchestrator.core.rules import (
    ADDED_POLICIES,
    Rules,
    check_can_be_made_again,
    classes_of,
    describe,
    made_of,
    record_of,
    renamed,
)
from tidegate.orchestrator.journal.journal import Journal
from tidegate.orchestrator.journal.run_journal import (
    EVENT_FORMAT,
    JournalHeader,
    RunJournal,
    decode_header,
)
from tidegate.orchestrator.settings.config import RunSettings
from tidegate.transport.private_directory import make_private_directory

JOURNAL_FILE = "journal.db"

Resume = Mapping[str, Any] | Literal[True] | None
"""What to resume from: a ``state_dict()``; True for the last acknowledged checkpoint, or a new run
if there is none yet; None for a new run."""


class ResumeToken(msgspec.Struct, frozen=True):
    """Content of ``state_dict()``: the run's progress at the trainer's checkpoint."""

    run_id: str
    batches: int
    """Number of batches handed over before the checkpoint."""
    version: int
    offer: int
    """Number of the user's iterator in use, from 0."""
    adapters: "dict[str, ResumeToken]" = {}
    """Tokens of trained adapters, by name; the others resume from the checkpoint that their
    trainers acknowledged last."""


@dataclass(slots=True)
class OpenedJournal:
    """A run's journal, if it has one, and where the run continues."""

    journal: RunJournal | None = None
    resumed: RunResumed | None = None
    """Point at which the run continues; None for a new run."""
    file: Journal | None = None

    def close(self) -> None:
        """Commit pending records and release the file. Harmless when repeated.

        Raises:
            JournalError: the records could not be committed.
        """
        if self.file is not None:
            self.file.close()


def open_run_journal(settings: RunSettings, resume: Resume) -> OpenedJournal:
    """Open or create the journal that ``serve(resume=…)`` asks for.

    Raises:
        ConfigError: there is no journal to resume from, or ``resume`` is not valid.
        JournalError: the journal can't be used; or there is one, and a new run was asked for.
        ResumeMismatch: the checkpoint, the settings and the journal don't belong together.
    """
    if not settings.records.journal:
        if resume is not None:
            raise ConfigError("resume= needs a journal; set journal=True and its run_directory")
        return OpenedJournal()
    token = None if resume is None or resume is True else resume_token(resume)
    assert settings.records.run_directory is not None
    path = settings.records.run_directory / JOURNAL_FILE
    if resume is None or (resume is True and not path.exists()):
        check_can_be_made_again(settings.rules())
        make_private_directory(settings.records.run_directory)
        header = new_header(settings, uuid.uuid4().hex)
        file = Journal.create(path, header=msgspec.json.encode(header))
        return OpenedJournal(RunJournal(file, new_core(header, settings), header), file=file)
    file = Journal.open(path)
    try:
        journal = _restored(file, settings)
        handed = journal.core.handed
        if token is None:
            token = ResumeToken(
                journal.header.run_id, handed.checkpointed, 0, handed.checkpoint_offer
            )
        check_token(token, journal)
    except (ResumeMismatch, JournalError):
        file.close()
        raise
    except Exception as error:  # records of a foreign journal may break any assumption
        file.close()
        raise JournalCorrupt(path=path, where=str(error)) from error
    at = {name: (each.batches, each.offer) for name, each in token.adapters.items()}
    return OpenedJournal(journal, RunResumed(token.batches, token.offer, at), file)


def resume_token(resume: Mapping[str, Any]) -> ResumeToken:
    """Return the token in a ``state_dict()``.

    Raises:
        ResumeMismatch: it has none.
    """
    try:
        return msgspec.convert(dict(resume), ResumeToken)
    except (msgspec.ValidationError, TypeError, ValueError) as error:
        raise ResumeMismatch(
            f"resume must be what state_dict() returned, or True, got {resume!r:.200}: {error}"
        ) from None


def _restored(file: Journal, settings: RunSettings) -> RunJournal:
    header = decode_header(file.header)
    journal = RunJournal(file, new_core(header, settings), header)
    journal.restore()
    return journal


def core_from_header(header: JournalHeader, policies: Iterable[type] = ()) -> Core:
    """Return an empty core with the policies that a journal's header names, for a replay.

    The journal's events bring it to a state; a resume uses :func:`new_core` instead. ``policies``:
    the user's own policy classes that the header may name.

    Raises:
        ResumeMismatch: the header names other classes, or its rules can't be made.
    """
    rules = made_of(header.rules, policies)
    if not isinstance(rules, Rules):
        raise ResumeMismatch(
            f"the journal's header must hold a run's policies, and holds {rules!r}; was the "
            "journal made by another program?"
        )
    return Core(rules, survives_crashes=True, policy_classes=policies)


def new_core(header: JournalHeader, settings: RunSettings) -> Core:
    """Return an empty core with the caller's policies, which must equal those of the journal's
    header.

    The header is only compared; no object is made from it.

    Raises:
        ResumeMismatch: the run was started with other settings.
    """
    before = renamed(header.rules)
    for name, now in record_of(settings.rules()).items():
        if name in ADDED_POLICIES and name not in before:
            continue
        was = before.get(name)
        if was != now:
            raise ResumeMismatch(
                f"this run was started with {name}={describe(was)}, and can't continue with "
                f"{name}={describe(now)}; set the old value, or start a new run in another "
                f"directory"
            )
    rules = settings.rules()
    return Core(rules, survives_crashes=True, policy_classes=classes_of(rules))


def new_header(settings: RunSettings, run_id: str) -> JournalHeader:
    """Return the header of a new journal."""
    return JournalHeader(
        run_id=run_id,
        rules=record_of(settings.rules()),
        seed=settings.sampling.seed,
        event_format=EVENT_FORMAT,
    )


def check_token(token: ResumeToken, journal: RunJournal) -> None:
    """Check that a journal can be resumed from a checkpoint of the same run.

    Raises:
        ResumeMismatch: the checkpoint is another run's, newer than the journal, or too old.
    """
    for name, own in token.adapters.items():
        if name not in journal.core.trained_adapters:
            trained = ", ".join(sorted(journal.core.trained_adapters)) or "none"
            raise ResumeMismatch(f"the journal's run trained no adapter {name!r}, but {trained}")
        _check_token(own, journal, journal.core.trained_adapters[name])
    _check_token(token, journal, journal.core)


def _check_token(token: ResumeToken, journal: RunJournal, core: Core) -> None:
    handed = core.handed
    if token.run_id != journal.header.run_id:
        raise ResumeMismatch(
            f"the checkpoint is of run {token.run_id}, the journal of run "
            f"{journal.header.run_id}; pass the run_directory that belongs to the checkpoint"
        )
    if token.batches > handed.count:
        raise ResumeMismatch(
            f"the checkpoint holds {token.batches} batches, the journal only "
            f"{handed.count}; it is an older copy: restore the newer one, or an older checkpoint"
        )
    if token.batches < handed.checkpointed:
        raise ResumeMismatch(
            f"the checkpoint holds {token.batches} batches, but {handed.checkpointed} were "
            f"acknowledged as safe and are kept no longer; resume from a newer checkpoint"
        )
