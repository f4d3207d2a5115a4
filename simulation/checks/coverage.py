"""Coverage marks: named situations that a simulated run reached, counted over a sweep's runs.

``tidegate simulate`` reports marks never reached. A mark is recorded where its situation occurs,
not where a fault is planned, because a planned fault may have no effect, such as a crash of an
engine that has ended already.
"""

from enum import StrEnum


class CoverageMark(StrEnum):
    """Situation that a run reached at least once; the value is its text in a sweep's report."""

    CRASHED = "an engine crashed"
    HUNG = "an engine hung with work to do"
    SLOWED = "an engine got slow"
    LEFT = "an engine sent a goodbye"
    DRAINED = "an engine without turns was drained"
    DRAINED_AT_WORK = "an engine with turns was drained"
    LATE = "an engine joined late"
    ALONE = "no engine could serve a requested turn"
    CAME_BACK = "an engine rejoined after it was given up"
    CUT = "a connection broke"
    LOST_TO_ENGINE = "frames to an engine were lost"
    LOST_TO_ORCHESTRATOR = "frames to the orchestrator were lost"
    REPLAYED = "steps were sent again"
    STALLED = "delayed frames arrived all at once"
    GARBLED = "a frame was damaged"
    NO_CREDIT = "an engine had to wait for credit"
    REFUSED = "a publish failed because an engine refused the weights"
    LAGGED = "a publish failed because an engine lagged"
    FAILED_LATER = "a publish failed after its call had returned or was replaced"
    PAUSED = "the trainer paused all engines while it trained"
    SLEPT = "the trainer put all engines to sleep while it trained"
    PATCHED = "a publish sent patches of the weights before"
    CANCELLED_PUBLISH = "a publish was cancelled"
    PUBLISHED_TWICE = "weights were published without a batch in between"
    PUBLISHED_PARTLY = "some tensors were published, and the publish named no batch"
    ROLLED_BACK = "the trainer rolled back"
    OUT_OF_ORDER = "a batch was trained before an older one"
    BATCH_LOST = "a batch that the trainer held was lost"
    PUBLISH_NEEDED = "a batch was requested that could not fill before a publish"
    STOPPED_WAITING = "the trainer stopped waiting for a batch"
    BATCH_RETURNED = "a batch was returned because its trainer had stopped waiting or published"
    LOOKED_AHEAD = "the trainer requested a batch during its train step"
    SHORT_BATCH = "tasks ended within a batch, and more tasks followed"
    OFFERED_AGAIN = "new tasks were offered before the previous ones had ended"
    EVALUATED_BESIDE = "an evaluation ran during training"
    EVALUATED_PINNED = "a pinned evaluation's tokens were all of its version"
    PREEMPTED = "a turn was preempted"
    HANDED_BACK = "a turn was handed back for lack of memory"
    ABORTED = "turns were aborted for new weights"
    RAISED = "an episode raised"
    BEGUN_AGAIN = "an episode that had failed began again"
    FAILURE_REWARDED = "a rollout that failed by the policy's doing was trained"
    HUNG_EPISODE = "an episode never returned"
    TURN_REFUSED = "a turn was refused"
    TURN_ENDED_ENGINES = "a turn was refused because engines were lost with it"
    INNOCENT_REFUSED = "a harmless turn was refused because engines were lost with it by chance"
    TURN_GIVEN_UP = "an episode stopped waiting for its turn"
    FORKED = "an episode forked"
    PARKED = "an episode was parked"
    SCORED = "an episode's context was scored"
    SCORE_MISSED = "an episode's score request failed or timed out"
    STALE = "a group became too old"
    DROPPED = "a group had too few rollouts left"
    MIXED = "a rollout of several versions was trained"
    MIXED_KV = "a token that attended to KV of several versions was trained"
    KV_UNKNOWN = "a token with unknown KV versions was trained"
    MOVED = "a turn of several engines was trained"
    OLDEST = "a token as old as the bound allows was trained"
    OVERTAKEN = "a group was trained before an older one"
    MASKED = "tokens that were too old were masked"
    ROWS_DISCARDED = "the trainer discarded rows of a batch"
    SPLIT = "a group was split, and its remainder trained later"
    FILTERED = "a group of equal rewards was dropped"
    STOPPED = "an episode was cancelled because its group was dropped"
    ADAPTER_NEEDED = "an engine asked for an adapter that it did not hold"
    ADAPTERS_IN_USE = "a turn waited because all adapters in memory were in use"
    ADAPTERS_MIXED = "a step sampled for several versions or adapters"
    ADAPTER_RESUMED = "an adapter's trainer continued after a crash"
    ADAPTER_HALTED = "a trainer paused its adapter's turns"


ADAPTER_MARKS = frozenset(mark for mark in CoverageMark if mark.name.startswith("ADAPTER"))
"""Marks that only runs with trained adapters reach."""


class CoverageMarks:
    """Coverage marks that one run has reached."""

    def __init__(self) -> None:
        self.seen: set[CoverageMark] = set()

    def record(self, mark: CoverageMark) -> None:
        """Record that the run has reached this mark."""
        self.seen.add(mark)
