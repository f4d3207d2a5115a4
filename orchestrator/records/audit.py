"""Was every token of a recorded run really sampled by the weights its tag names?

Repeats the sampling from the archived weights with `transformers` and compares log-probabilities.
Knows only the run's directory: nothing that made the tags takes part in checking them.
"""

import json
import random
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from tidegate.errors import AuditError
from tidegate.orchestrator.records.recording import RUN_FILE, archived_weights, archives
from tidegate.orchestrator.records.replay_plan import (
    Plan,
    Problem,
    Purpose,
    Replay,
    Segment,
    plan_rollout,
)
from tidegate.orchestrator.records.run_files import replace_file
from tidegate.orchestrator.records.trajectories import (
    count_trajectories,
    read_trajectories,
    to_json,
)
from tidegate.orchestrator.weights.parts import WeightParts
from tidegate.transport.messages import KvSpan

AUDIT_FILE = "audit.json"

TOLERANCE = 2e-4
"""Largest difference of a log-probability, natural log, for two implementations to agree. Float32
forwards that add in different orders were seen to differ by up to 1.1e-5, over 12 k tokens of a
random model of 2 layers; 20 times that leaves room for deeper ones. Whether it is still tight
enough to tell neighbouring versions apart is measured in each audit: ``version_power``."""

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
    spans: int
    spans_mixed: int
    worst: Worst | None
    version_power: Power
    """Of spans sampled and read by one version, replayed under the neighbouring version."""
    kv_power: Power
    """Of spans that attended to older KV, replayed as if their KV were fresh."""
    problems: tuple[Problem, ...] = field(default=())

    @property
    def agrees(self) -> bool:
        """Whether every token that claims a provenance has it, and no tag contradicts another."""
        explained = self.tokens_agreeing + self.tokens_unknown + self.tokens_unreplayable
        return not self.problems and explained == self.tokens

    def lines(self) -> list[str]:
        """Say it to a person."""
        lines = [
            f"{self.rollouts} of {self.rollouts_recorded} rollouts, {self.spans} spans "
            f"({self.spans_mixed} on mixed KV), {self.versions} weight versions",
            f"{self.tokens_agreeing} of {self.tokens} tokens agree within {self.tolerance:g}",
        ]
        if self.tokens_unknown:
            lines.append(f"{self.tokens_unknown} tokens are tagged unknown and were not replayed")
        if self.tokens_unreplayable:
            lines.append(
                f"{self.tokens_unreplayable} tokens were drawn by logit processors that an audit "
                f"doesn't know, or from images, audio or video, and were not replayed"
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
    tolerance: float = TOLERANCE,
    rollouts_max: int | None = None,
    progress: Callable[[int], None] = lambda version: None,
) -> AuditReport:
    """Replay a run's tokens and compare; ``rollouts_max`` takes that many, evenly spaced.

    Raises:
        AuditError: files are missing or damaged, or there is nothing to check.
    """
    # The package imports without torch; only who audits waits for it.
    from tidegate.orchestrator.records.replay import replay_all

    directory = Path(directory)
    archived = _archived(directory)
    recorded = count_trajectories(directory)
    plans = _plans(directory, recorded, rollouts_max)
    tokens = sum(plan.tokens for plan in plans)
    if not tokens:
        raise AuditError(f"{directory} holds {recorded} rollouts and not one sampled token")
    problems = [problem for plan in plans for problem in plan.problems]
    replays = _replayable([r for plan in plans for r in plan.replays], archived, problems)
    probes = _probes(replays, archived)
    replay_all(
        [*replays, *probes],
        lambda version: archived_weights(directory, version),
        progress,
        quantization=_quantization(directory),
    )
    segments = [segment for replay in replays for segment in replay.segments]
    agreeing = [int(_agreeing(segment, tolerance).sum()) for segment in segments]
    problems += _mismatches(segments, tolerance)
    return AuditReport(
        tolerance=tolerance,
        rollouts=len(plans),
        rollouts_recorded=recorded,
        versions=len({segment.version for segment in segments}),
        tokens=tokens,
        tokens_agreeing=sum(agreeing),
        tokens_unknown=sum(plan.tokens_unknown for plan in plans),
        tokens_unreplayable=sum(plan.tokens_unreplayable for plan in plans),
        spans=sum(plan.spans for plan in plans),
        spans_mixed=sum(plan.spans_mixed for plan in plans),
        worst=_worst(segments),
        version_power=_power(probes, "other_version", tolerance),
        kv_power=_power(probes, "fresh_kv", tolerance),
        problems=tuple(sorted(problems, key=lambda p: (p.rollout_id, p.turn))),
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
    try:
        run = json.loads((directory / RUN_FILE).read_bytes())
        return str(run["settings"].get("quantize") or "")
    except FileNotFoundError:
        return ""  # nothing was set for what was recorded without a run
    except (ValueError, KeyError, AttributeError) as error:
        raise AuditError(f"{directory / RUN_FILE} is damaged: {error}") from error


Archived = set[tuple[int, str]]
"""The versions that can be replayed, and with which adapters; an empty one is none."""


def _archived(directory: Path) -> Archived:
    weights = directory / "weights"
    if not directory.is_dir():
        raise AuditError(f"{directory} is not a directory")
    names = {path.name for archive in archives(directory) for path in archive.glob("v*")}
    versions = {int(name[1:]) for name in names if name[1:].isdecimal()}
    if not versions:
        raise AuditError(
            f"{weights} holds no weights; a run can be audited only if it archived them"
        )
    parts = {v: WeightParts.read(archived_weights(directory, v)) for v in versions}
    return {(v, adapter) for v in versions for adapter in ("", *parts[v].adapters)}


def _plans(directory: Path, recorded: int, rollouts_max: int | None) -> list[Plan]:
    if rollouts_max is not None and rollouts_max < 1:
        raise AuditError(f"rollouts_max must be at least 1, got {rollouts_max}")
    wanted = min(recorded, rollouts_max or recorded)
    return [
        plan_rollout(rollout)
        for row, rollout in enumerate(read_trajectories(directory))
        # Row r is taken when the count owed by then goes up: evenly spaced, `wanted` in all.
        if (row + 1) * wanted // recorded > row * wanted // recorded
    ]


def _replayable(replays: list[Replay], archived: Archived, problems: list[Problem]) -> list[Replay]:
    """Sort out those that need weights nobody has; such a tag is wrong by itself."""
    possible = []
    for replay in replays:
        unknown = {(stage.version, replay.adapter) for stage in replay.stages} - archived
        if not unknown:
            possible.append(replay)
        for segment in replay.segments if unknown else ():
            adapter = f" with adapter {replay.adapter!r}" if replay.adapter else ""
            message = (
                f"tokens from {segment.first_token} on need weights v{min(unknown)[0]}{adapter}, "
                f"which are not in the archive"
            )
            problems.append(Problem(segment.rollout_id, segment.turn, message))
    return possible


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
    )
    end = segment.position + len(segment.token_ids) - 1
    return Replay(replay.context, [KvSpan(version, 0, end)], [copy], purpose, replay.adapter)


def _agreeing(segment: Segment, tolerance: float) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
    with np.errstate(invalid="ignore"):
        return np.asarray(np.abs(segment.replayed - segment.recorded) <= tolerance)


def _power(probes: list[Replay], purpose: Purpose, tolerance: float) -> Power:
    spans = [probe.segments[0] for probe in probes if probe.purpose == purpose]
    return Power(len(spans), sum(bool(_agreeing(span, tolerance).all()) for span in spans))


def _mismatches(segments: Iterable[Segment], tolerance: float) -> list[Problem]:
    problems = []
    for segment in segments:
        wrong = np.flatnonzero(~_agreeing(segment, tolerance))
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
