"""Audit of a recorded run: was every token sampled by the weights that its tag names?

Repeats the sampling from the archived weights with `transformers` and compares log-probabilities,
and computes staleness and counts anew from the tags. Reads only the run's directory: nothing that
made the tags takes part in checking them.
"""

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tidegate.errors import AuditError
from tidegate.observability.audit.bookkeeping import Bookkeeping
from tidegate.observability.audit.replay_plan import (
    Plan,
    Problem,
    Purpose,
    Replay,
    Segment,
    plan_rollout,
)
from tidegate.observability.lives import RUN_FILE, has_ended, is_part, lives, read_run_file
from tidegate.observability.recording import (
    QUEUED_WEIGHTS_MAX,
    archived_weights,
    archives,
)
from tidegate.observability.run_files import replace_file
from tidegate.observability.trajectories import (
    STREAM_FILE,
    TRAJECTORIES_FILE,
    count_trajectories,
    read_trajectories_of_one,
)
from tidegate.orchestrator.batches.tasks import to_json
from tidegate.orchestrator.weight_sync.parts import WeightParts
from tidegate.transport.messages import KvSpan

AUDIT_FILE = "audit.json"

TOLERANCE = 2e-4
"""Largest difference of a log-probability, natural log, for two implementations to agree. Float32
forwards that add in different orders were seen to differ by up to 1.1e-5, over 12 k tokens of a
random model of 2 layers; 20 times that leaves room for deeper ones. Whether it is still tight
enough to tell neighbouring versions apart is measured in each audit: ``version_power``."""

TOLERANCES = {"float32": TOLERANCE, "float16": 0.05, "bfloat16": 0.4}
"""By what engines compute in. A replay computes in float32, so the error is the engine's rounding:
one part in 2**11 or 2**8 at each step of the sums, and its rounded weights. ``version_power`` says
what such a tolerance can no longer tell apart."""

PROBES_MAX = 256
"""Spans replayed under wrong tags, of each kind: a share of 2 % is then known within 1 %."""

PROBLEMS_SHOWN_MAX = 10


@dataclass(frozen=True, slots=True)
class Worst:
    """The token whose replayed log-prob is furthest from the recorded one."""

    difference: float
    rollout_id: int
    turn: int
    token: int
    """Index in the turn's output."""
    version: int
    recorded: float
    replayed: float


@dataclass(frozen=True, slots=True)
class Power:
    """How many wrong tags would have been noticed: spans replayed under a tag made wrong."""

    spans_tried: int = 0
    spans_unnoticed: int = 0
    """All of their tokens agree with the wrong tag too, within the tolerance."""

    @property
    def unnoticed_share(self) -> float:
        """Share of wrong tags that this audit could not see."""
        return self.spans_unnoticed / max(1, self.spans_tried)


@dataclass(frozen=True, slots=True)
class AuditReport:
    """What an audit looked at, and what it found."""

    tolerance: float
    """The widest of those applied; they follow from what engines compute in."""
    rollouts: int
    rollouts_recorded: int
    versions: int
    tokens: int
    tokens_agreeing: int
    tokens_unknown: int
    """Their KV history is tagged unknown: nothing is claimed, nothing can be checked."""
    tokens_unreplayable: int
    """Drawn by logit processors of a user's own, by a grammar, or from a context with media: only
    their tags were checked."""
    tokens_unarchived: int
    """Sampled by weights that a process published just before it was killed, and had no time to
    archive: nothing can be checked."""
    spans: int
    spans_mixed: int
    worst: Worst | None
    version_power: Power
    """Of spans sampled and read by one version, replayed under the neighbouring version."""
    kv_power: Power
    """Of spans that attended to older KV, replayed as if their KV were fresh."""
    problems: tuple[Problem, ...] = field(default=())
    other_dtypes: Mapping[str, str] = field(default_factory=dict)
    """Engines that computed in another precision than float32, and in which."""

    @property
    def agrees(self) -> bool:
        """Whether every token that claims a provenance has it, and no tag contradicts another."""
        explained = self.tokens_agreeing + self.tokens_unknown
        explained += self.tokens_unreplayable + self.tokens_unarchived
        return not self.problems and explained == self.tokens

    def lines(self) -> list[str]:
        """Say it to a person."""
        lines = [
            f"{self.rollouts} of {self.rollouts_recorded} rollouts, {self.spans} spans "
            f"({self.spans_mixed} on mixed KV), {self.versions} weight versions",
            f"{self.tokens_agreeing} of {self.tokens} tokens agree within {self.tolerance:g}",
        ]
        lines += [
            f"engine {engine!r} computed in {dtype}: its tokens agree within "
            f"{min(self.tolerance, TOLERANCES.get(dtype, TOLERANCE)):g}"
            for engine, dtype in sorted(self.other_dtypes.items())
        ]
        if self.tokens_unknown:
            lines.append(f"{self.tokens_unknown} tokens are tagged unknown and were not replayed")
        if self.tokens_unreplayable:
            lines.append(
                f"{self.tokens_unreplayable} tokens were drawn by logit processors that an audit "
                f"doesn't know, or from images, audio or video, and were not replayed"
            )
        if self.tokens_unarchived:
            lines.append(
                f"{self.tokens_unarchived} tokens are of weights that a process was killed before "
                f"it had archived, and were not replayed"
            )
        if self.worst is not None:
            w = self.worst
            lines.append(
                f"worst difference {w.difference:.2e}: rollout {w.rollout_id}, turn {w.turn}, "
                f"token {w.token}, tagged v{w.version}, recorded {w.recorded:.6f}, "
                f"replayed {w.replayed:.6f}"
            )
        for power, what in (
            (self.version_power, "tagged one version off"),
            (self.kv_power, "tagged fresh instead of mixed"),
        ):
            if power.spans_tried:
                lines.append(
                    f"power: of {power.spans_tried} spans {what}, {power.spans_unnoticed} would "
                    f"have gone unnoticed ({power.unnoticed_share:.1%})"
                )
        lines += [str(problem) for problem in self.problems[:PROBLEMS_SHOWN_MAX]]
        if (more := len(self.problems) - PROBLEMS_SHOWN_MAX) > 0:
            lines.append(f"... and {more} more")
        lines.append("agrees" if self.agrees else "DISAGREES")
        return lines


def audit_run(
    directory: Path,
    *,
    tolerance: float | None = None,
    rollouts_max: int | None = None,
    progress: Callable[[int], None] = lambda version: None,
) -> AuditReport:
    """Replay a run's tokens and compare; ``rollouts_max`` takes that many, evenly spaced.

    Without a ``tolerance``, that of :data:`TOLERANCES` applies, by what each engine computed in.
    Covers all processes of a resumed run; of one of its ``part-N`` directories, that process.

    Raises:
        AuditError: files are missing or damaged, or there is nothing to check.
    """
    # The package imports without torch; only who audits waits for it.
    from tidegate.observability.audit.replay import replay_all

    directory = Path(directory)
    _refuse_without_weights(directory)
    parts = [
        life
        for life in lives(directory)
        if life == directory or (life / TRAJECTORIES_FILE).exists() or (life / STREAM_FILE).exists()
    ]
    recorded = sum(count_trajectories(part) for part in parts)
    plans: list[Plan] = []
    problems: list[Problem] = []
    replays: list[Replay] = []
    probes: list[Replay] = []
    others: dict[str, str] = {}
    unarchived = row = 0
    wanted = _wanted(recorded, rollouts_max)
    for part in parts:
        archive = _archive_of(part)
        books = Bookkeeping(part)
        of_part: list[Plan] = []
        for rollout in read_trajectories_of_one(part):
            books.note(rollout)
            # A row is taken when the count owed by then goes up: evenly spaced, `wanted` in all.
            if (row + 1) * wanted // recorded > row * wanted // recorded:
                of_part.append(plan_rollout(rollout))
            row += 1
        problems += [problem for plan in of_part for problem in plan.problems]
        problems += books.problems()
        wanting = [replay for plan in of_part for replay in plan.replays]
        dtypes = _dtypes(part)
        for segment in (segment for replay in wanting for segment in replay.segments):
            dtype = dtypes.get(segment.engine, "")
            wide = TOLERANCES.get(dtype, TOLERANCE)
            segment.tolerance = wide if tolerance is None else tolerance
            if wide > TOLERANCE:
                others[segment.engine] = dtype
        possible, lost = _replayable(wanting, archive, problems)
        unarchived += lost
        wrong = _probes(possible, archive.archived)
        if possible:
            replay_all(
                [*possible, *wrong],
                lambda version, part=part: archived_weights(part, version),  # type: ignore[misc]
                progress,
                quantization=_quantization(part),
            )
        replays += possible
        probes += wrong
        plans += of_part
    tokens = sum(plan.tokens for plan in plans)
    if not tokens:
        raise AuditError(f"{directory} holds {recorded} rollouts and not one sampled token")
    segments = [segment for replay in replays for segment in replay.segments]
    agreeing = [int(_agreeing(segment).sum()) for segment in segments]
    problems += _mismatches(segments)
    return AuditReport(
        tolerance=max((s.tolerance for s in segments), default=tolerance or TOLERANCE),
        rollouts=len(plans),
        rollouts_recorded=recorded,
        versions=len({segment.version for segment in segments}),
        tokens=tokens,
        tokens_agreeing=sum(agreeing),
        tokens_unknown=sum(plan.tokens_unknown for plan in plans),
        tokens_unreplayable=sum(plan.tokens_unreplayable for plan in plans),
        tokens_unarchived=unarchived,
        spans=sum(plan.spans for plan in plans),
        spans_mixed=sum(plan.spans_mixed for plan in plans),
        worst=_worst(segments),
        version_power=_power(probes, "other_version"),
        kv_power=_power(probes, "fresh_kv"),
        problems=tuple(sorted(problems, key=lambda p: (p.rollout_id, p.turn))),
        other_dtypes=others,
    )


def write_audit(directory: Path, report: AuditReport) -> Path:
    """Leave the result in the run's directory, for its report."""
    path = Path(directory) / AUDIT_FILE
    body = {**asdict(report), "agrees": report.agrees, "lines": report.lines()}
    body["problems"] = [str(problem) for problem in report.problems[:PROBLEMS_SHOWN_MAX]]
    replace_file(path, to_json(body))
    return path


def _quantization(directory: Path) -> str:
    """What the run's engines rounded weights to; a run only takes engines that do as it says."""
    run = _run_of(directory)
    try:
        return str(run["settings"].get("quantize") or "") if run else ""
    except (KeyError, AttributeError) as error:
        raise AuditError(f"{directory / RUN_FILE} is damaged: {error!r}") from error


def _dtypes(directory: Path) -> dict[str, str]:
    """What each engine of the process computed in; of older runs, nothing is known."""
    dtypes = _run_of(directory).get("dtypes")
    return dict(dtypes) if isinstance(dtypes, dict) else {}


def _run_of(directory: Path) -> dict[str, Any]:
    """The process's ``run.json``; empty for what was recorded without one."""
    return read_run_file(directory) if (directory / RUN_FILE).exists() else {}


Archived = set[tuple[int, str]]
"""The versions that can be replayed, and with which adapters; an empty one is none."""


@dataclass(frozen=True, slots=True)
class _Archive:
    """What weights there are for one process's records."""

    archived: Archived
    lost: frozenset[int]
    """Versions that a process may have published and was killed before archiving."""


def _refuse_without_weights(directory: Path) -> None:
    if not directory.is_dir():
        raise AuditError(f"{directory} is not a directory")
    if not any(_versions_in(archive) for archive in archives(directory)):
        raise AuditError(
            f"{directory / 'weights'} holds no weights; a run can be audited only if it archived "
            f"them"
        )


def _archive_of(directory: Path) -> _Archive:
    versions = {v for archive in archives(directory) for v in _versions_in(archive)}
    parts = {v: WeightParts.read(archived_weights(directory, v)) for v in versions}
    archived = {(v, adapter) for v in versions for adapter in ("", *parts[v].adapters)}
    return _Archive(archived, frozenset(_lost_versions(directory) - versions))


def _lost_versions(directory: Path) -> set[int]:
    """The few versions after the newest that each killed process archived.

    Archives are written in order, and a publish waits while more than
    :data:`QUEUED_WEIGHTS_MAX` are not written.
    """
    lost: set[int] = set()
    for life in lives(directory.parent) if is_part(directory) else lives(directory):
        run = _run_of(life)
        if run and not has_ended(run):
            newest = max(_versions_in(life / "weights"), default=-1)
            lost |= set(range(newest + 1, newest + 2 + QUEUED_WEIGHTS_MAX))
    return lost


def _versions_in(archive: Path) -> set[int]:
    names = {path.name for path in archive.glob("v*")}
    return {int(name[1:]) for name in names if name[1:].isdecimal()}


def _wanted(recorded: int, rollouts_max: int | None) -> int:
    """How many of the recorded rollouts to audit."""
    if rollouts_max is not None and rollouts_max < 1:
        raise AuditError(f"rollouts_max must be at least 1, got {rollouts_max}")
    return min(recorded, rollouts_max or recorded)


def _replayable(
    replays: list[Replay], archive: _Archive, problems: list[Problem]
) -> tuple[list[Replay], int]:
    """Sort out those that need weights nobody has: such a tag is wrong by itself.

    Unless a killed process had no time to archive them: then the second value counts the tokens.
    """
    possible = []
    tokens_lost = 0
    for replay in replays:
        unknown = {(stage.version, replay.adapter) for stage in replay.stages} - archive.archived
        if not unknown:
            possible.append(replay)
        elif {version for version, _ in unknown} <= archive.lost:
            tokens_lost += sum(len(segment.token_ids) for segment in replay.segments)
            continue
        for segment in replay.segments if unknown else ():
            adapter = f" with adapter {replay.adapter!r}" if replay.adapter else ""
            message = (
                f"tokens from {segment.first_token} on need weights v{min(unknown)[0]}{adapter}, "
                f"which are not in the archive"
            )
            problems.append(Problem(segment.rollout_id, segment.turn, message))
    return possible, tokens_lost


def _probes(replays: list[Replay], archived: Archived) -> list[Replay]:
    """Replays of some spans under tags made wrong, to see whether it would show."""
    pairs = [(replay, segment) for replay in replays for segment in replay.segments]
    fresh = [pair for pair in pairs if not pair[1].is_mixed]
    mixed = [pair for pair in pairs if pair[1].is_mixed]
    probes = []
    for replay, segment in _some(fresh):
        if (other := _neighbour(segment.version, replay.adapter, archived)) is not None:
            probes.append(_probe(replay, segment, other, "other_version"))
    for replay, segment in _some(mixed):
        probes.append(_probe(replay, segment, segment.version, "fresh_kv"))
    return probes


def _some(pairs: list[tuple[Replay, Segment]]) -> list[tuple[Replay, Segment]]:
    # A fixed seed: an audit repeated is the same audit.
    return random.Random(0).sample(pairs, min(PROBES_MAX, len(pairs)))


def _neighbour(version: int, adapter: str, archived: Archived) -> int | None:
    return next((v for v in (version + 1, version - 1) if (v, adapter) in archived), None)


def _probe(replay: Replay, segment: Segment, version: int, purpose: Purpose) -> Replay:
    copy = Segment(
        rollout_id=segment.rollout_id,
        turn=segment.turn,
        first_token=segment.first_token,
        version=version,
        position=segment.position,
        token_ids=segment.token_ids,
        recorded=segment.recorded,
        sampling=segment.sampling,
        is_mixed=False,
        engine=segment.engine,
    )
    copy.tolerance = segment.tolerance
    end = segment.position + len(segment.token_ids) - 1
    return Replay(replay.context, [KvSpan(version, 0, end)], [copy], purpose, replay.adapter)


def _agreeing(segment: Segment) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
    with np.errstate(invalid="ignore"):
        return np.asarray(np.abs(segment.replayed - segment.recorded) <= segment.tolerance)


def _power(probes: list[Replay], purpose: Purpose) -> Power:
    spans = [probe.segments[0] for probe in probes if probe.purpose == purpose]
    return Power(len(spans), sum(bool(_agreeing(span).all()) for span in spans))


def _mismatches(segments: Iterable[Segment]) -> list[Problem]:
    problems = []
    for segment in segments:
        wrong = np.flatnonzero(~_agreeing(segment))
        if len(wrong):
            first = int(wrong[0])
            message = (
                f"{len(wrong)} of {len(segment.token_ids)} tokens tagged v{segment.version} were "
                f"not sampled so, first token {segment.first_token + first}: recorded "
                f"{segment.recorded[first]:.6f}, replayed {segment.replayed[first]:.6f}"
            )
            problems.append(Problem(segment.rollout_id, segment.turn, message))
    return problems


def _worst(segments: Iterable[Segment]) -> Worst | None:
    worst: Worst | None = None
    for segment in segments:
        with np.errstate(invalid="ignore"):
            gaps = np.nan_to_num(np.abs(segment.replayed - segment.recorded), nan=np.inf)
        index = int(gaps.argmax())
        if worst is None or gaps[index] > worst.difference:
            worst = Worst(
                difference=float(gaps[index]),
                rollout_id=segment.rollout_id,
                turn=segment.turn,
                token=segment.first_token + index,
                version=segment.version,
                recorded=float(segment.recorded[index]),
                replayed=float(segment.replayed[index]),
            )
    return worst
