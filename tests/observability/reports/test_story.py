"""Stories of rollouts, groups and batches: each event follows from what was recorded."""

import re
from collections.abc import Mapping

import pytest

from tests.observability.recorded import recorded_rollout, recorded_turn
from tidegate.errors import ConfigError
from tidegate.observability.records.trace import Instant, Interval, Trace
from tidegate.observability.records.trajectories import RecordedRollout, RecordedTurn
from tidegate.observability.reports.story import (
    EventKind,
    RunContext,
    Subject,
    SubjectKind,
    batch_story,
    group_story,
    rollout_story,
    story_lines,
)
from tidegate.orchestrator.core.provenance import KvRange, TurnPrefill, VersionSpan
from tidegate.orchestrator.telemetry.recorder import EpisodeInterval

RULES = (
    "Rules(policy=BoundedStaleness(groups_per_batch=16, outstanding_groups_limit=None, "
    "max_staleness=2), group_size=8, placement=PlacementRules(migration_policy=None))"
)


def context(trace: Trace | None = None, settings: Mapping[str, str] | None = None) -> RunContext:
    known = {"rules": RULES, "pause_mode": "keep", "kv_policy": "keep", **(settings or {})}
    return RunContext.of(known, bound=2, is_resumed=False, trace=trace)


def turn(*spans: VersionSpan, prefills: tuple[int, ...] = ()) -> RecordedTurn:
    length = max((span.end for span in spans), default=0)
    computed = tuple(TurnPrefill(at, ()) for at in prefills)
    return recorded_turn(4, length, spans=spans, prefills=computed)


def span(
    version: int, start: int, end: int, engine: str = "a", kv: int | None = None
) -> VersionSpan:
    return VersionSpan(version, start, end, engine, None if kv is None else KvRange(kv, version))


def texts(row: RecordedRollout, run: RunContext, kind: EventKind) -> list[str]:
    return [event.text for event in rollout_story(row, [row], run).events if event.kind is kind]


def traced() -> Trace:
    """Return a trace in which engine ``a`` is lost at 2 s, and rollout 1 ends after rollout 0."""
    trace = Trace()
    for name, started_us, ended_us in (
        ("wait", 5_000_000, 6_000_000),
        ("train", 6_000_000, 8_000_000),
    ):
        trace.tracks.setdefault("trainer", []).append(Interval(name, started_us, ended_us, 6))
    trace.tracks["trainer"].append(Interval("publish", 8_000_000, 8_500_000, 7))
    trace.instants.append(Instant("a", "lost", 2_000_000, {}))
    trace.instants.append(Instant("a", "swap", 1_500_000, {"version": 6}))
    trace.episodes += [
        EpisodeInterval(1, "rollout 0", 0, 3_000_000, {}),
        EpisodeInterval(1, "turn v5", 1_000_000, 2_500_000, {}),
        EpisodeInterval(2, "rollout 1", 0, 4_000_000, {}),
    ]
    return trace


@pytest.mark.parametrize(
    ("settings", "prefills", "says"),
    [
        ({"pause_mode": "abort"}, (3,), "was aborted, submitted again with its tokens"),
        ({"kv_policy": "recompute"}, (3,), "its KV was computed again by v6"),
        ({}, (), "kept its KV, computed by v5 to v6"),
    ],
)
def test_a_swap_within_a_turn_says_what_became_of_its_kv(
    settings: dict[str, str], prefills: tuple[int, ...], says: str
) -> None:
    row = recorded_rollout(0, turn(span(5, 0, 3), span(6, 3, 8, kv=5), prefills=prefills))
    (text,) = texts(row, context(settings=settings), EventKind.SWAPPED)
    assert text.startswith("v6 went live on a after 3 tokens of turn 1: ")
    assert says in text


def test_a_moved_turn_names_the_engine_that_was_lost_if_the_trace_has_the_loss() -> None:
    row = recorded_rollout(0, turn(span(5, 0, 3, "a"), span(5, 3, 8, "b"), prefills=(3,)))
    (known,) = texts(row, context(traced()), EventKind.MOVED)
    assert known.endswith(
        "moved from a to b after 3 tokens and continued with v5: a was lost at 2.00 s"
    )
    (unknown,) = texts(row, context(), EventKind.MOVED)
    assert unknown.endswith("a pause by abort or the loss of a")
    late = traced()
    late.instants[0].at_us = 2_700_000  # after the turn
    (unexplained,) = texts(row, context(late), EventKind.MOVED)
    assert unexplained.endswith("why is not recorded")
    migrating = {"rules": RULES.replace("migration_policy=None", "migration_policy=EvenOut()")}
    (moved,) = texts(row, context(late, migrating), EventKind.MOVED)
    assert moved.endswith("a migration policy")
    assert texts(row, context(), EventKind.RECOMPUTED) == []


def test_a_moved_turn_names_the_engine_that_was_asked_to_leave() -> None:
    row = recorded_rollout(0, turn(span(5, 0, 3, "a"), span(5, 3, 8, "b"), prefills=(3,)))
    trace = traced()
    trace.instants[0].name = "left"
    (known,) = texts(row, context(trace), EventKind.MOVED)
    assert known.endswith("v5: a was asked to leave the run, and left at 2.00 s")
    trace.instants.append(Instant("a", "lost", 2_100_000, {}))
    (unsure,) = texts(row, context(trace), EventKind.MOVED)
    assert unsure.endswith("the loss of a or that a was asked to leave")


def test_kv_computed_again_by_the_same_version_is_a_preemption_unless_a_pause_was_possible() -> (
    None
):
    row = recorded_rollout(0, turn(span(5, 0, 8), prefills=(0, 4)))
    (sure,) = texts(row, context(traced()), EventKind.RECOMPUTED)
    assert sure.endswith("it was preempted, because older turns needed its KV blocks")
    paused = traced()
    paused.instants.append(Instant("a", "paused", 2_000_000, {}))
    (unsure,) = texts(row, context(paused), EventKind.RECOMPUTED)
    assert unsure.endswith("or paused by abort")


def test_a_trained_rollout_names_its_oldest_token_its_bound_and_the_rule() -> None:
    (text,) = texts(recorded_rollout(0, turn(span(5, 0, 8))), context(), EventKind.TRAINED)
    assert text == (
        "trained on at v6: its oldest token is of v5, so its staleness is 1, within the bound 2; "
        "advantage 0.5; rule: BoundedStaleness(max_staleness=2)"
    )
    passed = recorded_rollout(0, turn(span(3, 0, 8)), staleness=3)
    (text,) = texts(passed, context(), EventKind.TRAINED)
    assert "ABOVE the bound 2" in text


def test_masked_tokens_are_counted() -> None:
    row = recorded_rollout(0, turn(span(3, 0, 3), span(5, 3, 8)), oldest_trainable=4)
    (text,) = texts(row, context(), EventKind.TRAINED)
    assert "3 tokens older than v4 were masked" in text


def test_a_discarded_rollout_says_why() -> None:
    stale = recorded_rollout(0, state="discarded", discard_reason="stale", consumed_version=None)
    (text,) = texts(stale, context(), EventKind.DISCARDED)
    assert text.startswith("discarded as stale: its group was too old")
    assert text.endswith("rule: BoundedStaleness(max_staleness=2)")
    own = recorded_rollout(0, state="discarded", discard_reason="all_equal", consumed_version=None)
    (text,) = texts(own, context(), EventKind.DISCARDED)
    assert text.startswith("discarded as all_equal: a reason of the run's own")


def test_a_rollout_waits_for_the_last_of_its_group() -> None:
    rows = [recorded_rollout(0, turn(span(5, 0, 8))), recorded_rollout(1, turn(span(5, 0, 8)))]
    story = rollout_story(rows[0], rows, context(traced()))
    (waited,) = [event for event in story.events if event.kind is EventKind.WAITED]
    assert waited.text == "waited 1 s for rollout 1, the last of its group"
    assert [event.at_s for event in story.events] == [0.0, 1.0, 2.5, 3.0, 4.0, 6.0]
    running = [rows[0], recorded_rollout(1, state="running", reward=None)]
    story = rollout_story(running[0], running, context())
    assert "waits for rollout 1 of its group to end" in [event.text for event in story.events]


def test_a_group_counts_its_forks_by_reason() -> None:
    rows = [
        recorded_rollout(0, turn(span(5, 0, 8))),
        recorded_rollout(1, turn(span(5, 0, 8))),
        recorded_rollout(2, branch_of=0, fork_reason="compaction"),
    ]
    lines = story_lines(group_story(rows, context()))
    assert lines[:3] == [
        "Group 3",
        "  admitted: 2 attempts at one task",
        "  1 row forked: 1 compaction",
    ]
    assert sum("trained on at v6" in line for line in lines) == 1


def test_a_batch_names_its_oldest_token_and_how_long_the_trainer_waited() -> None:
    rows = [
        recorded_rollout(0, turn(span(5, 0, 8))),
        recorded_rollout(1, turn(span(4, 0, 8)), staleness=2),
    ]
    story = batch_story(6, rows, context(traced()), {"reward": 0.25})
    assert [event.text for event in story.events] == [
        "the trainer waited 1 s for it",
        "handed over at v6: 2 rows of 1 group (3 to 3); rule: BoundedStaleness(max_staleness=2)",
        "staleness in versions: 1 of 1; 1 of 2, bound 2; the oldest token is of v4, "
        "in rollout 1 of group 3",
        "the last rollout to end was rollout 1",
        "mean reward 0.25",
        "trained on for 2 s",
        "v7 was published in 500 ms",
    ]


@pytest.mark.parametrize("text", ["rollout:41", "group:-3", "batch:0"])
def test_a_subject_is_its_kind_and_number(text: str) -> None:
    assert str(Subject.parse(text)) == text
    assert Subject.parse("rollout:41") == Subject(SubjectKind.ROLLOUT, 41)


@pytest.mark.parametrize(
    "text", ["rollout", "rollout:", "step:1", "rollout:4x", "rollout:" + "9" * 20]
)
def test_another_subject_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape("rollout:ID, group:ID or batch:VERSION")):
        Subject.parse(text)
