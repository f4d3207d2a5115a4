"""Stories of rollouts, groups and batches: what happened to each, and by which rule, in order.

`tidegate explain` and the dashboard show them. They are made from the rows of
``trajectories.parquet`` and, of a recorded run, from the times in ``trace.json``. If the records
allow several causes, the story names all of them.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Any, Self

from tidegate.errors import ConfigError
from tidegate.observability.records.trace import TRAINER_TRACK, Trace
from tidegate.observability.records.trajectories import RecordedRollout, RecordedTurn
from tidegate.orchestrator.core.provenance import VersionSpan

REASONS = {
    "stale": "its group was too old to be trained within the bound",
    "run_ended": "the run ended before the rollout was trained on",
    "rolled_back": "its weights were rolled back, or lost in a crash before they were saved",
    "went_another_way": "its episode began again, and diverged from the recorded turns",
    "task_gone": "after a resume its task was not given again",
    "group_too_small": "too few rollouts of its group were left",
    "not_trained": "the trainer discarded the row after it had received the batch",
    "context_full": "its context reached the model's limit",
    "turn_timeout": "a turn took longer than its timeout_s",
    "episode_timeout": "its episode took longer than episode_timeout_s",
    "environment_failed": "its environment failed",
    "engine_lost": "engines were lost while they had its turn, too often",
    "no_engine": "its time ended while a turn waited for an engine",
    "no_scores": "its time ended while it waited for scores",
    "episode_error": "its episode raised, after its retries too",
    "code_error": "its episode raised an error of the code, such as a TypeError",
    "turn_refused": "an engine refused a turn",
    "prompt_too_long": "its prompt was longer than the model's limit",
}
"""Discard reasons in words; others are the users' own, or a filter's."""

GROUP_ROLLOUTS_SHOWN_MAX = 64
"""Limit of rollouts that a group's story lists one by one."""


class SubjectKind(StrEnum):
    """Kind of a story's subject: rollout, group or batch."""

    ROLLOUT = "rollout"
    GROUP = "group"
    BATCH = "batch"
    """The batch that was trained at a version."""


@dataclass(frozen=True, slots=True)
class Subject:
    """One rollout, group or batch of a run."""

    kind: SubjectKind
    number: int
    """Rollout id, group id, or the trainer's version at which the batch was consumed."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse ``rollout:41``, ``group:7`` or ``batch:3``.

        Raises:
            ConfigError: the text has another form.
        """
        match = re.fullmatch(r"(rollout|group|batch):(-?\d{1,15})", text, re.ASCII)
        if match is None:
            raise ConfigError(
                f"{text!r:.80} must be rollout:ID, group:ID or batch:VERSION, such as rollout:41"
            )
        return cls(SubjectKind(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.kind}:{self.number}"


class EventKind(StrEnum):
    """Kind of an event of a story."""

    ADMITTED = "admitted"
    FORKED = "forked"
    TURN = "turn"
    SWAPPED = "swapped"
    """Newer weights sampled from here on."""
    MOVED = "moved"
    """Another engine continued a turn."""
    RECOMPUTED = "recomputed"
    """The KV of a turn was computed again."""
    ENDED = "ended"
    WAITED = "waited"
    TRAINED = "trained"
    DISCARDED = "discarded"
    MEASURED = "measured"
    """The rollout was an evaluation, or the trainer reported a figure."""


@dataclass(frozen=True, slots=True)
class StoryEvent:
    """One event of a story."""

    kind: EventKind
    text: str
    at_s: float | None = None
    """Seconds since the trace's first event; None if the time was not recorded."""


@dataclass(frozen=True, slots=True)
class Story:
    """Events of one subject, in order."""

    title: str
    events: tuple[StoryEvent, ...]
    note: str = ""
    """Note on facts that the records lack; empty if none are missing."""


@dataclass(frozen=True, slots=True)
class RunContext:
    """Facts of a run that its stories use: staleness bound, policies, modes and recorded times."""

    bound: int | None = None
    """Bound of staleness in versions; None without one."""
    policy: str = ""
    """Staleness policy, as recorded."""
    pause_mode: str = ""
    kv_policy: str = ""
    migrates: bool = True
    """Whether a migration policy may move running turns."""
    is_resumed: bool = False
    """Whether the run was resumed after a crash."""
    times: "Times" = field(default_factory=lambda: Times(None))

    @classmethod
    def of(
        cls,
        settings: Mapping[str, Any],
        *,
        bound: int | None,
        is_resumed: bool,
        trace: Trace | None = None,
    ) -> Self:
        """Return the context of a run with these recorded settings."""
        return cls(
            migrates="migration_policy=None" not in str(settings.get("rules", "")),
            is_resumed=is_resumed,
            bound=bound,
            policy=_policy_text(str(settings.get("rules", ""))),
            pause_mode=str(settings.get("pause_mode", "")),
            kv_policy=str(settings.get("kv_policy", "")),
            times=Times(trace),
        )


class Times:
    """Times of episodes, turns and engine events in a trace, in seconds since its first event."""

    def __init__(self, trace: Trace | None) -> None:
        self._trace = trace or Trace()
        starts = [track[0].started_us for track in self._trace.tracks.values() if track]
        starts += [interval.started_us for interval in self._trace.episodes]
        self._origin_us = min(starts, default=0)
        self._episodes = {
            int(interval.name.split()[1]): interval
            for interval in self._trace.episodes
            if re.fullmatch(r"rollout \d+", interval.name)
        }

    @property
    def are_known(self) -> bool:
        """Whether there is a trace."""
        return bool(self._trace.tracks)

    def _seconds(self, at_us: int) -> float:
        return (at_us - self._origin_us) / 1e6

    def episode(self, rollout_id: int) -> tuple[float, float] | None:
        """Return when a rollout's episode started and ended; None if it was not traced."""
        interval = self._episodes.get(rollout_id)
        if interval is None:
            return None
        return self._seconds(interval.started_us), self._seconds(interval.ended_us)

    def turns(self, rollout_id: int) -> list[tuple[float, float]]:
        """Return when each of a rollout's turns was requested and ended; empty if unknown."""
        whole = self._episodes.get(rollout_id)
        if whole is None:
            return []
        return sorted(
            (self._seconds(each.started_us), self._seconds(each.ended_us))
            for each in self._trace.episodes
            if each.lane == whole.lane
            and each.name.startswith("turn")
            and whole.started_us <= each.started_us <= whole.ended_us
        )

    def engine_event(self, engine: str, name: str, version: int | None = None) -> list[float]:
        """Return when an engine had an event, such as ``swap`` to a version."""
        return [
            self._seconds(instant.at_us)
            for instant in self._trace.instants
            if instant.track == engine
            and instant.name == name
            and version in (None, instant.args.get("version"))
        ]

    def trainer(self, activity: str, version: int) -> list[tuple[float, float]]:
        """Return when the trainer, at this version, began and ended an activity."""
        return [
            (self._seconds(each.started_us), self._seconds(each.ended_us))
            for each in self._trace.tracks.get(TRAINER_TRACK, [])
            if each.name == activity and each.version == version
        ]


def story_of(
    subject: Subject,
    run: RunContext,
    *,
    rollout: Callable[[int], RecordedRollout | None],
    rows_where: Callable[[str, int], Sequence[RecordedRollout]],
    metrics: Callable[[int], Mapping[str, float] | None] = lambda version: None,
) -> Story | None:
    """Return the story of a subject; None if nothing is known of it.

    Args:
        rollout: returns the rollout with an id.
        rows_where: returns the rows with a value in a column, such as those of a group.
        metrics: returns the recorded figures of the batch consumed at a version.
    """
    match subject.kind:
        case SubjectKind.ROLLOUT:
            row = rollout(subject.number)
            if row is None:
                return None
            return rollout_story(row, rows_where("group_id", row.group_id), run)
        case SubjectKind.GROUP:
            rows = rows_where("group_id", subject.number)
            return group_story(rows, run) if rows else None
        case SubjectKind.BATCH:
            consumed = rows_where("consumed_version", subject.number)
            rows = [row for row in consumed if row.state == "trained"]
            return batch_story(subject.number, rows, run, metrics(subject.number)) if rows else None


# ---------------------------------------------------------------- one rollout


def rollout_story(
    rollout: RecordedRollout, group: Sequence[RecordedRollout], run: RunContext
) -> Story:
    """Return the story of one rollout; ``group`` has the known rows of its group, itself too."""
    events = [_admitted(rollout, group, run)]
    turn_times = run.times.turns(rollout.rollout_id)
    for number, turn in enumerate(rollout.turns):
        at = turn_times[number] if number < len(turn_times) else None
        events += _turn_events(number, turn, run, at)
    events += [*_returned(rollout, run), *_group_wait(rollout, group, run), *_outcome(rollout, run)]
    where = "an evaluation" if rollout.group_id < 0 else f"of group {rollout.group_id}"
    return Story(f"Rollout {rollout.rollout_id}, {where}", tuple(events), _state_of_records(run))


def _admitted(
    rollout: RecordedRollout, group: Sequence[RecordedRollout], run: RunContext
) -> StoryEvent:
    times = run.times.episode(rollout.rollout_id)
    at_s = None if times is None else times[0]
    if rollout.branch_of is not None:
        return StoryEvent(
            EventKind.FORKED,
            f"forked from rollout {rollout.branch_of}, whose context it began with: "
            f"{rollout.fork_reason or 'no reason was given'}",
            at_s,
        )
    if rollout.group_id < 0:
        return StoryEvent(
            EventKind.ADMITTED, f"started as evaluation of task {rollout.index}", at_s
        )
    roots = sum(row.branch_of is None for row in group)
    return StoryEvent(
        EventKind.ADMITTED,
        f"admitted with group {rollout.group_id}, as attempt {rollout.index + 1} of {roots} at its "
        f"task",
        at_s,
    )


def _turn_events(
    number: int, turn: RecordedTurn, run: RunContext, at: tuple[float, float] | None
) -> list[StoryEvent]:
    began_s, ended_s = at or (None, None)
    name = f"turn {number + 1}"
    if not turn.spans:
        ended = turn.finish_reason or "running"
        return [StoryEvent(EventKind.TURN, f"{name}: no token was sampled ({ended})", began_s)]
    first = turn.spans[0]
    events = [
        StoryEvent(
            EventKind.TURN,
            f"{name} began on {first.engine} with v{first.version}, after {turn.start} context "
            f"tokens",
            began_s,
        )
    ]
    recomputed = {prefill.at for prefill in turn.prefills if prefill.at > 0}
    for before, after in pairwise(turn.spans):
        if _is_other_source(before, after):
            events.append(_changed(name, before, after, after.start in recomputed, run, at))
            recomputed.discard(after.start)
    events += [_evicted(name, turn, position, run, at) for position in sorted(recomputed)]
    ended = turn.finish_reason or "still running"
    text = f"{name} ended after {turn.length} tokens: {ended}"
    if turn.reward is not None:
        text += f"; its own reward is {turn.reward:.4g}"
    return [*events, StoryEvent(EventKind.TURN, text, ended_s)]


def _is_other_source(before: VersionSpan, after: VersionSpan) -> bool:
    return (before.engine, before.version) != (after.engine, after.version)


def _changed(
    name: str,
    before: VersionSpan,
    after: VersionSpan,
    is_recomputed: bool,
    run: RunContext,
    at: tuple[float, float] | None,
) -> StoryEvent:
    """Return the event of a turn that another engine or version continued."""
    versions = (
        f"v{after.version}"
        if before.version == after.version
        else f"v{after.version} instead of v{before.version}"
    )
    if before.engine != after.engine:
        return StoryEvent(
            EventKind.MOVED,
            f"{name} moved from {before.engine} to {after.engine} after {after.start} tokens and "
            f"continued with {versions}: {_why_moved(before.engine, run, at)}",
        )
    swaps = run.times.engine_event(after.engine, "swap", after.version)
    how = _kv_after_swap(after, is_recomputed, run)
    return StoryEvent(
        EventKind.SWAPPED,
        f"v{after.version} went live on {after.engine} after {after.start} tokens of {name}: {how}",
        swaps[-1] if swaps else None,
    )


def _why_moved(engine: str, run: RunContext, at: tuple[float, float] | None) -> str:
    """Return every cause that the records allow for a turn to leave an engine."""
    losses, departures, pauses = (
        _within(at, run.times.engine_event(engine, event)) for event in ("lost", "left", "paused")
    )
    if not pauses and (at is not None or not run.migrates):
        if losses and not departures:
            return f"{engine} was lost at {_times(losses)}"
        if departures and not losses:
            return f"{engine} was asked to leave the run, and left at {_times(departures)}"
    causes = ["a migration policy"] if run.migrates else []
    if pauses or not run.times.are_known:
        causes.append("a pause by abort")
    if losses or not run.times.are_known:
        causes.append(f"the loss of {engine}")
    if departures:
        causes.append(f"that {engine} was asked to leave")
    if run.is_resumed:
        causes.append("the resume of the run")
    return " or ".join(causes) or "why is not recorded"


def _within(at: tuple[float, float] | None, times: Sequence[float]) -> list[float]:
    """Return the times within a turn; all of them if it is not known when the turn was."""
    return [time for time in times if at is None or at[0] <= time <= at[1]]


def _kv_after_swap(after: VersionSpan, is_recomputed: bool, run: RunContext) -> str:
    if is_recomputed and run.pause_mode == "abort":
        return "the turn was aborted, submitted again with its tokens, and its KV computed anew"
    if is_recomputed:
        return f"its KV was computed again by v{after.version} (kv_policy={run.kv_policy})"
    if after.kv is None:
        return "which versions computed its KV is unknown"
    return f"the turn kept its KV, computed by v{after.kv.oldest} to v{after.kv.newest}"


def _evicted(
    name: str, turn: RecordedTurn, position: int, run: RunContext, at: tuple[float, float] | None
) -> StoryEvent:
    """Return the event of KV that was computed again by the same version on the same engine."""
    engine = next((s.engine for s in turn.spans if s.start <= position <= s.end), "its engine")
    pauses = _within(at, run.times.engine_event(engine, "paused"))
    causes = ["it was preempted, because older turns needed its KV blocks"]
    if pauses or not run.times.are_known:
        causes.append("paused by abort")
    if run.migrates:
        causes.append("moved to another engine and back")
    if run.is_resumed:
        causes.append("submitted again after the run was resumed")
    return StoryEvent(
        EventKind.RECOMPUTED,
        f"the KV of {name} was computed again after {position} tokens on {engine}: "
        f"{', or '.join(causes)}",
    )


def _returned(rollout: RecordedRollout, run: RunContext) -> list[StoryEvent]:
    times = run.times.episode(rollout.rollout_id)
    at_s = None if times is None else times[1]
    if rollout.reward is not None:
        return [StoryEvent(EventKind.ENDED, f"returned the reward {rollout.reward:.4g}", at_s)]
    if rollout.state == "running":
        return [StoryEvent(EventKind.ENDED, "is still running")]
    return [StoryEvent(EventKind.ENDED, "ended without a reward", at_s)]


def _group_wait(
    rollout: RecordedRollout, group: Sequence[RecordedRollout], run: RunContext
) -> list[StoryEvent]:
    own = run.times.episode(rollout.rollout_id)
    running = [row.rollout_id for row in group if row.state == "running"]
    if running and rollout.state != "running":
        return [
            StoryEvent(
                EventKind.WAITED, f"waits for {_listed('rollout', running)} of its group to end"
            )
        ]
    ends = {row.rollout_id: run.times.episode(row.rollout_id) for row in group}
    known = {number: times[1] for number, times in ends.items() if times is not None}
    if own is None or len(known) < 2:
        return []
    last = max(known, key=lambda number: known[number])
    if last == rollout.rollout_id:
        return [StoryEvent(EventKind.WAITED, "was the last of its group to end", known[last])]
    return [
        StoryEvent(
            EventKind.WAITED,
            f"waited {_duration(known[last] - own[1])} for rollout {last}, the last of its group",
            known[last],
        )
    ]


def _outcome(rollout: RecordedRollout, run: RunContext) -> list[StoryEvent]:
    if rollout.state == "evaluated":
        return [StoryEvent(EventKind.MEASURED, "was an evaluation, so it is never trained on")]
    events = []
    version = rollout.consumed_version
    if rollout.state == "trained" and version is not None:
        handed_s, _ = _training(version, run)
        events.append(StoryEvent(EventKind.TRAINED, _trained_text(rollout, run), handed_s))
    if rollout.discard_reason:
        reason = rollout.discard_reason
        why = REASONS.get(
            reason, "a reason of the run's own: a filter's, an episode's, or trainer's"
        )
        rule = f"; rule: {run.policy}" if reason == "stale" and run.policy else ""
        events.append(StoryEvent(EventKind.DISCARDED, f"discarded as {reason}: {why}{rule}"))
    if not events and rollout.state == "finished":
        events.append(StoryEvent(EventKind.WAITED, f"waits for the trainer{_under(run)}"))
    return events


def _trained_text(rollout: RecordedRollout, run: RunContext) -> str:
    text = f"trained on at v{rollout.consumed_version}"
    oldest = rollout.oldest_trained_version
    if oldest is not None and rollout.staleness is not None:
        text += f": its oldest token is of v{oldest}, so its staleness is {rollout.staleness}"
        if run.bound is not None:
            passed = "ABOVE the bound" if rollout.staleness > run.bound else "within the bound"
            text += f", {passed} {run.bound}"
    masked = sum(turn.length for turn in rollout.turns) - rollout.trained_tokens
    if masked:
        text += f"; {masked} tokens older than v{rollout.oldest_trainable} were masked"
    if rollout.advantage is not None:
        text += f"; advantage {rollout.advantage:.4g}"
    return text + _under(run)


# ---------------------------------------------------------------- groups and batches


def group_story(rows: Sequence[RecordedRollout], run: RunContext) -> Story:
    """Return the story of a group from its known rows."""
    roots = [row for row in rows if row.branch_of is None]
    forks = len(rows) - len(roots)
    spans = {number: run.times.episode(number) for number in (row.rollout_id for row in rows)}
    known = {number: times for number, times in spans.items() if times is not None}
    began_s = min((times[0] for times in known.values()), default=None)
    text = f"admitted: {_count(len(roots), 'attempt')} at one task"
    events = [StoryEvent(EventKind.ADMITTED, text, began_s)]
    if forks:
        why = Counter(
            row.fork_reason or "no reason given" for row in rows if row.branch_of is not None
        )
        events.append(
            StoryEvent(EventKind.FORKED, f"{_count(forks, 'row')} forked: {_counted(why)}")
        )
    ordered = sorted(
        rows, key=lambda row: known[row.rollout_id][1] if row.rollout_id in known else 0
    )
    events += [_row_event(row, known) for row in ordered[:GROUP_ROLLOUTS_SHOWN_MAX]]
    if len(rows) > GROUP_ROLLOUTS_SHOWN_MAX:
        events.append(
            StoryEvent(EventKind.ENDED, f"{len(rows) - GROUP_ROLLOUTS_SHOWN_MAX} more rows")
        )
    if len(known) > 1 and len(known) == len(rows):
        first, last = (pick(times[1] for times in known.values()) for pick in (min, max))
        events.append(
            StoryEvent(
                EventKind.WAITED,
                f"waited {_duration(last - first)} from its first to its last",
                last,
            )
        )
    outcomes = dict.fromkeys(event.text for row in rows for event in _outcome_of_group(row, run))
    events += [StoryEvent(EventKind.TRAINED, text) for text in outcomes]
    return Story(f"Group {rows[0].group_id}", tuple(events), _state_of_records(run))


def _row_event(row: RecordedRollout, known: Mapping[int, tuple[float, float]]) -> StoryEvent:
    versions = sorted({span.version for turn in row.turns for span in turn.spans})
    sampled = (
        f"v{versions[0]}" + (f" to v{versions[-1]}" if len(versions) > 1 else "")
        if versions
        else "-"
    )
    reward = "no reward" if row.reward is None else f"reward {row.reward:.4g}"
    tokens = sum(turn.length for turn in row.turns)
    why = f", {row.discard_reason}" if row.discard_reason else ""
    times = known.get(row.rollout_id)
    return StoryEvent(
        EventKind.ENDED,
        f"rollout {row.rollout_id}: {_count(len(row.turns), 'turn')}, {_count(tokens, 'token')} by "
        f"{sampled}, "
        f"{reward}, {row.state}{why}",
        None if times is None else times[1],
    )


def _outcome_of_group(row: RecordedRollout, run: RunContext) -> list[StoryEvent]:
    if row.state != "trained" or row.consumed_version is None:
        return [event for event in _outcome(row, run) if event.kind is not EventKind.TRAINED]
    return [StoryEvent(EventKind.TRAINED, f"trained on at v{row.consumed_version}{_under(run)}")]


def batch_story(
    version: int,
    rows: Sequence[RecordedRollout],
    run: RunContext,
    metrics: Mapping[str, float] | None = None,
) -> Story:
    """Return the story of the batch consumed at ``version``; ``metrics`` is its recorded line."""
    groups = sorted({row.group_id for row in rows})
    waits = run.times.trainer("wait", version)
    handed_s, trained_s = _training(version, run)
    events = []
    if waits:
        text = f"the trainer waited {_duration(waits[-1][1] - waits[-1][0])} for it"
        events.append(StoryEvent(EventKind.WAITED, text, waits[-1][0]))
    events += [
        StoryEvent(
            EventKind.TRAINED,
            f"handed over at v{version}: {_count(len(rows), 'row')} of "
            f"{_count(len(groups), 'group')} ({groups[0]} to {groups[-1]}){_under(run)}",
            handed_s,
        ),
        *_staleness_events(rows, run),
        *_straggler_events(rows, run),
    ]
    untrained = Counter(row.discard_reason for row in rows if row.discard_reason)
    if untrained:
        text = f"discarded by the trainer: {_counted(untrained)}"
        events.append(StoryEvent(EventKind.DISCARDED, text))
    if metrics and "reward" in metrics:
        events.append(StoryEvent(EventKind.MEASURED, f"mean reward {metrics['reward']:.4g}"))
    if trained_s is not None:
        text = f"trained on for {_duration(trained_s)}"
        events.append(StoryEvent(EventKind.TRAINED, text))
    publishes = run.times.trainer("publish", version + 1)
    if publishes:
        began_s, ended_s = publishes[0]
        text = f"v{version + 1} was published in {_duration(ended_s - began_s)}"
        events.append(StoryEvent(EventKind.SWAPPED, text, ended_s))
    return Story(f"Batch trained at v{version}", tuple(events), _state_of_records(run))


def _training(version: int, run: RunContext) -> tuple[float | None, float | None]:
    """Return when the batch of ``version`` was handed over, and how long it was trained on.

    The trainer's other work before it asked for the batch counts as training too in the trace, so
    only the time after the last wait is counted.
    """
    waits = run.times.trainer("wait", version)
    if not waits:
        return None, None
    handed_s = waits[-1][1]
    trains = [each for each in run.times.trainer("train", version) if each[0] >= waits[-1][0]]
    return handed_s, sum(ended - began for began, ended in trains) if trains else None


def _staleness_events(rows: Sequence[RecordedRollout], run: RunContext) -> list[StoryEvent]:
    by_staleness: dict[int, list[RecordedRollout]] = defaultdict(list)
    for row in rows:
        if row.staleness is not None:
            by_staleness[row.staleness].append(row)
    if not by_staleness:
        return []
    highest = max(by_staleness)
    oldest = by_staleness[highest][0]
    bound = "" if run.bound is None else f", bound {run.bound}"
    counts = "; ".join(f"{len(by_staleness[age])} of {age}" for age in sorted(by_staleness))
    return [
        StoryEvent(
            EventKind.MEASURED,
            f"staleness in versions: {counts}{bound}; the oldest token is of "
            f"v{oldest.oldest_trained_version}, in rollout {oldest.rollout_id} of group "
            f"{oldest.group_id}",
        )
    ]


def _straggler_events(rows: Sequence[RecordedRollout], run: RunContext) -> list[StoryEvent]:
    ends = {row.rollout_id: run.times.episode(row.rollout_id) for row in rows}
    known = {number: times[1] for number, times in ends.items() if times is not None}
    if not known:
        return []
    last = max(known, key=lambda number: known[number])
    which = (
        "the last rollout to end" if len(known) == len(rows) else "of the timed rollouts the last"
    )
    return [StoryEvent(EventKind.WAITED, f"{which} was rollout {last}", known[last])]


# ---------------------------------------------------------------- words


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _duration(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _under(run: RunContext) -> str:
    return f"; rule: {run.policy}" if run.policy else ""


def _state_of_records(run: RunContext) -> str:
    if run.times.are_known:
        return "Times count from the trace's first event; it times up to 24 episodes at once."
    return "No times: a run has them once it has ended and left a trace.json."


def _times(seconds: Sequence[float]) -> str:
    return ", ".join(f"{each:.2f} s" for each in seconds[:3])


def _counted(counts: Mapping[Any, int]) -> str:
    return "; ".join(f"{count} {name}" for name, count in sorted(counts.items()))


def _listed(noun: str, numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
    return f"{noun}{'s' if len(numbers) > 1 else ''} {shown}{more}"


def _policy_text(rules: str) -> str:
    """Return the staleness policy within recorded rules: the call after ``policy=``."""
    start = rules.find("policy=")
    if start < 0:
        return ""
    text, depth = rules[start + len("policy=") :], 0
    for end, character in enumerate(text):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if (character == ")" and depth == 0) or (character == "," and depth == 0):
            policy = text[: end + (character == ")")]
            return re.sub(r"(groups_per_batch=\d+|\w+=None)(, )?", "", policy)
    return ""


def story_lines(story: Story) -> list[str]:
    """Return a story as lines of text, with times where they are known."""
    is_timed = any(event.at_s is not None for event in story.events)
    lines = [story.title]
    for event in story.events:
        time = "" if event.at_s is None else f"{event.at_s:.3f} s"
        lines.append(f"  {time:>11}  {event.text}" if is_timed else f"  {event.text}")
    return [*lines, *([story.note] if story.note else [])]
