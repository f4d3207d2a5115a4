"""What can happen to a run, and what can be done about it: the core's whole vocabulary."""

from collections.abc import Sequence
from dataclasses import dataclass

from tidegate.orchestrator.group import Group, TaskKey
from tidegate.orchestrator.rollout import Rollout, Turn
from tidegate.transport.messages import Prefill, SamplingParams, SubmitTurn, TokenDetails

# ---------------------------------------------------------------- events: what happened


@dataclass(frozen=True, slots=True)
class TaskArrived:
    """The user's iterator gave a task; there was capacity for it."""

    task: object
    key: TaskKey | None = None
    """None for the next one of the iterator in use."""
    digest: bytes = b""
    """Of the task, to know it again; empty where it has no bytes of its own."""


@dataclass(frozen=True, slots=True)
class TasksOffered:
    """The user gave a new iterator."""


@dataclass(frozen=True, slots=True)
class TasksExhausted:
    """The user's iterator has ended."""


@dataclass(frozen=True, slots=True)
class TaskFound:
    """After a resume, the user's iterator gave this task once more."""

    task: object
    key: TaskKey


@dataclass(frozen=True, slots=True)
class EvaluationAsked:
    """One rollout of this task, for measuring only: never trained, never counted in admission."""

    task: object
    index: int
    """Place within the evaluation. It seeds the sampling, so that two evaluations of the same
    tasks differ by the weights alone."""


@dataclass(frozen=True, slots=True)
class TurnAsked:
    """An episode wants the model to go on from its rollout's context."""

    rollout_id: int
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class TurnGivenUp:
    """The episode doesn't wait for its turn any more; what was sampled so far stays."""

    rollout_id: int


@dataclass(frozen=True, slots=True)
class EpisodeReturned:
    """An episode ended with a reward."""

    rollout_id: int
    reward: float


@dataclass(frozen=True, slots=True)
class EpisodeFailed:
    """An episode raised, timed out or was cancelled; ``reason`` names the ledger's account."""

    rollout_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class EngineJoined:
    """An engine is ready for turns: new, anew, or after its connection broke."""

    engine: str
    weight_version: int
    max_running_turns: int
    epoch: int = 0
    held: tuple[int, ...] = ()
    """Handles of the turns it has."""
    replay_until: int = 0
    """What it sampled before its hello is in the steps before this seq."""


@dataclass(frozen=True, slots=True)
class EngineLeft:
    """An engine is gone; what it was doing has to go on elsewhere."""

    engine: str


@dataclass(frozen=True, slots=True)
class StepArrived:
    """An engine's step, its columns checked and unpacked. R rows, N tokens."""

    engine: str
    version: int
    turns: memoryview
    """uint32 [R]"""
    token_ids: memoryview
    """int32 [N]"""
    logprobs: "memoryview[float]"
    """float32 [N]"""
    finish: bytes
    """[R] or empty"""
    counts: memoryview | None
    """uint32 [R]; None when every row has one token."""
    prefills: list[Prefill]
    epoch: int = 0
    seq: int = 0
    started_us: int = 0
    """The engine's monotonic clock when the step began."""
    busy_us: int = 0
    details: Sequence[TokenDetails] = ()


@dataclass(frozen=True, slots=True)
class TurnRejected:
    """An engine can never serve this turn."""

    engine: str
    handle: int
    message: str


@dataclass(frozen=True, slots=True)
class EngineSwapped:
    """An engine serves ``version`` from now on."""

    engine: str
    version: int


@dataclass(frozen=True, slots=True)
class BatchAsked:
    """The trainer waits for a batch."""


@dataclass(frozen=True, slots=True)
class BatchNotWanted:
    """The trainer has given up waiting for a batch."""


@dataclass(frozen=True, slots=True)
class VersionPublished:
    """The trainer made new weights from every batch it has had so far."""

    version: int


@dataclass(frozen=True, slots=True)
class VersionRetracted:
    """The trainer takes its weights back, from this version on; no engine samples meanwhile."""

    version: int


@dataclass(frozen=True, slots=True)
class BatchesSafe:
    """The trainer's checkpoint holds what it made of the first ``batches`` batches."""

    batches: int
    offer: int


@dataclass(frozen=True, slots=True)
class OffPolicynessMeasured:
    """The trainer has measured how far its policy is from its samples'."""

    ess: float | None
    """Effective sample size, a share in (0, 1]; None: not measured."""
    kl: float | None
    """Mismatch KL, in nats per token; None: not measured."""


@dataclass(frozen=True, slots=True)
class RolloutCut:
    """A rollout goes on from an earlier point of its context: the rest will not be used."""

    rollout_id: int
    turns: int
    """Kept."""
    tokens: int
    """Of its context, kept."""
    reason: str


@dataclass(frozen=True, slots=True)
class RolloutForked:
    """An episode goes on in another row too: a context of its own, within the same rollout."""

    rollout_id: int
    """The row that it is forked from."""
    reason: str


@dataclass(frozen=True, slots=True)
class TurnsRewarded:
    """An episode gives turns of one row rewards of their own."""

    rollout_id: int
    rewards: tuple[tuple[int, float], ...]
    """(which turn, from 0, its reward)"""


@dataclass(frozen=True, slots=True)
class Resumed:
    """Another process goes on with the run, from the trainer's checkpoint."""

    batches: int
    """So many batches are in the checkpoint; later ones are handed over again."""
    offer: int
    """Which of the user's iterators was in use then, from 0."""


@dataclass(frozen=True, slots=True)
class StateNoted:
    """Nothing happened; whoever replays the events must be in this state now."""

    digest: str


@dataclass(frozen=True, slots=True)
class RunEnded:
    """No more is wanted: whatever isn't trained won't be."""


Event = (
    TaskArrived
    | TaskFound
    | TasksOffered
    | TasksExhausted
    | EvaluationAsked
    | TurnAsked
    | TurnGivenUp
    | EpisodeReturned
    | EpisodeFailed
    | EngineJoined
    | EngineLeft
    | StepArrived
    | TurnRejected
    | EngineSwapped
    | BatchAsked
    | BatchNotWanted
    | VersionPublished
    | VersionRetracted
    | BatchesSafe
    | OffPolicynessMeasured
    | RolloutCut
    | RolloutForked
    | TurnsRewarded
    | Resumed
    | StateNoted
    | RunEnded
)

# ---------------------------------------------------------------- commands: what to do about it


@dataclass(frozen=True, slots=True)
class StartEpisode:
    """Run the user's episode for this rollout."""

    rollout: Rollout
    task: object


@dataclass(frozen=True, slots=True)
class StartBranch:
    """Tell the episode which row its fork is."""

    rollout: Rollout


@dataclass(frozen=True, slots=True)
class Submit:
    """Send a turn to an engine."""

    engine: str
    message: SubmitTurn


@dataclass(frozen=True, slots=True)
class StopEpisode:
    """Cancel the episode of a rollout that is given up; say no more of it."""

    rollout: Rollout


@dataclass(frozen=True, slots=True)
class Cancel:
    """Tell an engine to forget a turn."""

    engine: str
    handle: int


@dataclass(frozen=True, slots=True)
class EndTurn:
    """Give the episode its turn."""

    turn: Turn


@dataclass(frozen=True, slots=True)
class FailTurn:
    """Tell the episode that its turn can never be served, and why."""

    turn: Turn
    message: str


@dataclass(frozen=True, slots=True)
class HandOver:
    """Give the trainer a batch."""

    groups: list[Group]
    trainer_version: int
    """At the time of handing over: what staleness is counted from."""
    number: int = 0
    """Counts a run's batches from 1."""
    oldest_trainable: int = 0
    """Tokens of older versions are masked."""


@dataclass(frozen=True, slots=True)
class PauseGeneration:
    """Have every engine abort its turns and stand still, or go on."""

    is_paused: bool


@dataclass(frozen=True, slots=True)
class EndBatches:
    """Tell the trainer that no batch will come any more."""


@dataclass(frozen=True, slots=True)
class RefuseBatch:
    """Tell the trainer that the batch it waits for can never fill before it publishes."""

    unpublished_groups: int


@dataclass(frozen=True, slots=True)
class EndEvaluation:
    """An evaluation rollout has ended, with a reward or discarded."""

    rollout: Rollout


@dataclass(frozen=True, slots=True)
class RequeueTask:
    """Take this task again before asking the user's iterator."""

    task: object
    key: TaskKey


@dataclass(frozen=True, slots=True)
class Record:
    """This rollout is settled without the trainer: discarded, or evaluated."""

    rollout: Rollout
    task: object


Command = (
    StartEpisode
    | StartBranch
    | StopEpisode
    | Submit
    | Cancel
    | EndTurn
    | FailTurn
    | HandOver
    | PauseGeneration
    | EndBatches
    | RefuseBatch
    | EndEvaluation
    | RequeueTask
    | Record
)
