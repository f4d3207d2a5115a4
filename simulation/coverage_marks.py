"""Coverage marks: named situations that a simulated run reached, counted over a sweep's runs.

A planned fault may hit nothing: a crash of an engine that is gone already proves nothing. Therefore
each mark is noted where its situation really occurs.
"""

from enum import StrEnum


class CoverageMark(StrEnum):
    """Situation that a run reached at least once; the value says it in a report."""

    CRASHED = "an engine crashed"
    HUNG = "an engine hung with work to do"
    SLOWED = "an engine got slow"
    LEFT = "an engine took its leave"
    LATE = "an engine came late"
    ALONE = "no engine was fit for a turn that was wanted"
    CAME_BACK = "an engine came back after it was given up"
    CUT = "a connection broke"
    LOST_TO_ENGINE = "frames to an engine were lost"
    LOST_TO_ORCHESTRATOR = "frames to the orchestrator were lost"
    REPLAYED = "steps were sent again"
    STALLED = "frames came late, all at once"
    GARBLED = "a frame was damaged"
    NO_CREDIT = "an engine had to wait for credit"
    REFUSED = "the trainer was told that its weights are refused"
    LAGGED = "the trainer was told that an engine lags"
    TOLD_LATER = "the trainer was told later that a publish had failed"
    PAUSED = "the trainer paused all engines while it trained"
    SLEPT = "the trainer put all engines to sleep while it trained"
    CANCELLED_PUBLISH = "a publish was cancelled"
    PUBLISHED_TWICE = "weights were published without a batch in between"
    PUBLISH_NEEDED = "a batch was asked for that can't fill"
    STOPPED_WAITING = "the trainer stopped waiting for a batch"
    BATCH_RETURNED = "a batch went back, for its trainer had stopped waiting or published first"
    LOOKED_AHEAD = "the trainer asked for a batch during its step"
    SHORT_BATCH = "tasks ended within a batch, and others came"
    OFFERED_AGAIN = "new tasks were given in the midst of others"
    EVALUATED_BESIDE = "it was evaluated beside training"
    PREEMPTED = "a turn lost its KV to a better one"
    HANDED_BACK = "a turn was handed back for lack of memory"
    ABORTED = "turns were aborted for new weights"
    RAISED = "an episode raised"
    HUNG_EPISODE = "an episode never returned"
    TURN_REFUSED = "a turn was refused"
    TURN_ENDED_ENGINES = "a turn was refused that had ended engines"
    INNOCENT_REFUSED = "a turn was refused that was lost with too many engines by chance"
    TURN_GIVEN_UP = "an episode did not wait for its turn"
    FORKED = "an episode forked"
    PARKED = "an episode was parked"
    SCORED = "an episode was told how likely its context was"
    SCORE_MISSED = "an episode did not get what it asked to be scored"
    STALE = "a group became too old"
    DROPPED = "a group had too few rollouts left"
    MIXED = "a rollout of several versions was trained"
    MIXED_KV = "a token that attended to KV of several versions was trained"
    KV_UNKNOWN = "a token of an engine that can't tell whose KV it was was trained"
    MOVED = "a turn of several engines was trained"
    OLDEST = "a token as old as the bound allows was trained"
    OVERTAKEN = "a group was trained before an older one"
    MASKED = "tokens that were too old were masked"
    LEFT_OUT = "the trainer left rows out of a batch"
    SPLIT = "the rest of a group was trained after the others of it"
    FILTERED = "a group of equal rewards was dropped"
    STOPPED = "an episode was stopped, for its group was given up"


class CoverageMarks:
    """Coverage marks that one run has reached."""

    def __init__(self) -> None:
        self.seen: set[CoverageMark] = set()

    def note(self, hardship: CoverageMark) -> None:
        """Note that the run has reached this mark."""
        self.seen.add(hardship)
