"""What can happen to a run, and what can be done about it: the core's whole vocabulary.

Structs, for there are dozens in each rollout's life: a frozen dataclass takes six times as long to
make. The garbage collector need not know them, for nothing that they name leads back to them.
"""

from collections.abc import Sequence

from msgspec import Struct

from tidegate.orchestrator.core.group import Group, TaskKey
from tidegate.orchestrator.core.rollout import Rollout, Turn
from tidegate.transport.media import Media, MediaKind
from tidegate.transport.messages import Prefill, SamplingParams, SubmitTurn, TokenDetails

# ---------------------------------------------------------------- events: what happened


class TaskArrived(Struct, frozen=True, gc=False):
    """The user's iterator gave a task; there was capacity for it."""

    task: object
    key: TaskKey | None = None
    """None for the next one of the iterator in use."""
    digest: bytes = b""
    """Of the task, to know it again; empty where it has no bytes of its own."""
    body: bytes = b""
    """The task itself, where a journal keeps it; empty for one that is no plain data."""


class TasksOffered(Struct, frozen=True, gc=False):
    """The user gave a new iterator."""

    episode: str = ""
    """Name of the function that runs the iterator's tasks. It is compared, never imported."""


class TasksExhausted(Struct, frozen=True, gc=False):
    """The user's iterator has ended."""


class TaskFound(Struct, frozen=True, gc=False):
    """After a resume, the user's iterator gave this task once more."""

    task: object
    key: TaskKey


class EvaluationAsked(Struct, frozen=True, gc=False):
    """One rollout of this task, for measuring only: never trained, never counted in admission."""

    task: object
    index: int
    """Place within the evaluation. It seeds the sampling, so that two evaluations of the same
    tasks differ by the weights alone."""


class TurnAsked(Struct, frozen=True, gc=False):
    """An episode wants the model to go on from its rollout's context."""

    rollout_id: int
    sampling: SamplingParams
    media: tuple[Media, ...] = ()
    """What its context was given beside tokens since its turn before."""


class TurnGivenUp(Struct, frozen=True, gc=False):
    """The episode doesn't wait for its turn any more; what was sampled so far stays."""

    rollout_id: int


class EpisodeReturned(Struct, frozen=True, gc=False):
    """An episode ended with a reward."""

    rollout_id: int
    reward: float


class EpisodeFailed(Struct, frozen=True, gc=False):
    """An episode raised, timed out or was cancelled; ``reason`` names the ledger's account."""

    rollout_id: int
    reason: str


class EngineJoined(Struct, frozen=True, gc=False):
    """An engine is ready for turns: new, anew, or after its connection broke."""

    engine: str
    weight_version: int
    max_running_turns: int
    epoch: int = 0
    held: tuple[int, ...] = ()
    """Handles of the turns it has."""
    replay_until: int = 0
    """What it sampled before its hello is in the steps before this seq."""
    media: tuple[MediaKind, ...] = ()
    """What it reads beside tokens."""


class EngineLeft(Struct, frozen=True, gc=False):
    """An engine is gone; what it was doing has to go on elsewhere."""

    engine: str
    is_crash: bool = True
    """Whether one of its turns may have ended it: it died, failed or fell silent. False if it left
    on request, or was given up for its weights."""


class StepArrived(Struct, frozen=True, gc=False):
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


class TurnRejected(Struct, frozen=True, gc=False):
    """An engine can never serve this turn."""

    engine: str
    handle: int
    message: str


class EngineSwapped(Struct, frozen=True, gc=False):
    """An engine serves ``version`` from now on."""

    engine: str
    version: int


class BatchAsked(Struct, frozen=True, gc=False):
    """The trainer waits for a batch."""


class BatchNotWanted(Struct, frozen=True, gc=False):
    """The trainer has given up waiting for a batch, or is not given one for now."""

    is_held: bool = False
    """Whether the trainer still waits, and gets none until a publish is decided."""


class BatchReturned(Struct, frozen=True, gc=False):
    """The newest batch handed over did not reach the trainer, which has not trained on it."""

    number: int
    is_held: bool = False
    """As of :class:`BatchNotWanted`."""


class VersionPublished(Struct, frozen=True, gc=False):
    """The trainer made new weights from batches that it has had."""

    version: int
    replaced: int = 0
    """Earlier publishes whose place it took before every engine had staged them."""


class PublishFailed(Struct, frozen=True, gc=False):
    """Weights that the trainer made were refused, late or given up: no engine serves them."""


class VersionRetracted(Struct, frozen=True, gc=False):
    """The trainer takes its weights back, from this version on; no engine samples meanwhile."""

    version: int


class BatchesSafe(Struct, frozen=True, gc=False):
    """The trainer's checkpoint holds what it made of the first ``batches`` batches."""

    batches: int
    offer: int


class RowsDiscarded(Struct, frozen=True, gc=False):
    """The trainer has not trained on some rows of a batch that it had."""

    batch: int
    """Its number."""
    rows: tuple[int, ...]
    """Their places in it, from 0."""
    reason: str
    """Names the ledger's account."""


class OffPolicynessMeasured(Struct, frozen=True, gc=False):
    """The trainer has measured how far its policy is from its samples'."""

    ess: float | None
    """Effective sample size, a share in (0, 1]; None: not measured."""
    kl: float | None
    """Mismatch KL, in nats per token; None: not measured."""


class RolloutCut(Struct, frozen=True, gc=False):
    """A rollout continues from the end of an earlier turn: later turns are discarded.

    What the episode has appended after that turn is reported by its next turn, as always.
    """

    rollout_id: int
    turns: int
    """Number of turns that are kept."""
    tokens: int
    """Context tokens the episode had repeated when it went another way. Informational only."""
    reason: str


class RolloutForked(Struct, frozen=True, gc=False):
    """An episode goes on in another row too: a context of its own, within the same rollout."""

    rollout_id: int
    """The row that it is forked from."""
    reason: str


class TurnsRewarded(Struct, frozen=True, gc=False):
    """An episode gives turns of one row rewards of their own."""

    rollout_id: int
    rewards: tuple[tuple[int, float], ...]
    """(which turn, from 0, its reward)"""


class Resumed(Struct, frozen=True, gc=False):
    """Another process goes on with the run, from the trainer's checkpoint."""

    batches: int
    """So many batches are in the checkpoint; later ones are handed over again."""
    offer: int
    """Which of the user's iterators was in use then, from 0."""


class StateNoted(Struct, frozen=True, gc=False):
    """Nothing happened; whoever replays the events must be in this state now."""

    digest: str


class RunEnded(Struct, frozen=True, gc=False):
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
    | BatchReturned
    | PublishFailed
    | VersionPublished
    | VersionRetracted
    | BatchesSafe
    | RowsDiscarded
    | OffPolicynessMeasured
    | RolloutCut
    | RolloutForked
    | TurnsRewarded
    | Resumed
    | StateNoted
    | RunEnded
)

# ---------------------------------------------------------------- commands: what to do about it


class StartEpisode(Struct, frozen=True, gc=False):
    """Run the user's episode for this rollout."""

    rollout: Rollout
    task: object


class StartBranch(Struct, frozen=True, gc=False):
    """Tell the episode which row its fork is."""

    rollout: Rollout


class Submit(Struct, frozen=True, gc=False):
    """Send a turn to an engine."""

    engine: str
    message: SubmitTurn


class StopEpisode(Struct, frozen=True, gc=False):
    """Cancel the episode of a rollout that is given up; say no more of it."""

    rollout: Rollout


class Cancel(Struct, frozen=True, gc=False):
    """Tell an engine to forget a turn."""

    engine: str
    handle: int


class EndTurns(Struct, frozen=True, gc=False):
    """Give episodes their turns: those that ended with one step."""

    turns: list[Turn]


class FailTurn(Struct, frozen=True, gc=False):
    """Tell the episode that its turn can never be served, and why."""

    turn: Turn
    message: str


class HandOver(Struct, frozen=True, gc=False):
    """Offer the trainer a batch; :class:`BatchReturned` undoes it."""

    groups: list[Group]
    trainer_version: int
    """Version at which it is trained, from which staleness is counted: the newest published, plus
    one for each batch that the trainer holds and has not published yet."""
    number: int = 0
    """Counts a run's batches from 1."""
    oldest_trainable: int = 0
    """Tokens of older versions are masked."""


class PauseGeneration(Struct, frozen=True, gc=False):
    """Have every engine abort its turns and stand still, or go on."""

    is_paused: bool


class EndBatches(Struct, frozen=True, gc=False):
    """Tell the trainer that no batch will come any more."""


class RefuseBatch(Struct, frozen=True, gc=False):
    """Tell the trainer that the batch it waits for can never fill before it publishes."""

    unpublished_groups: int


class EndEvaluation(Struct, frozen=True, gc=False):
    """An evaluation rollout has ended, with a reward or discarded."""

    rollout: Rollout


class RequeueTask(Struct, frozen=True, gc=False):
    """Take this task again before asking the user's iterator."""

    task: object
    key: TaskKey


class Record(Struct, frozen=True, gc=False):
    """This rollout is settled without the trainer: discarded, or evaluated."""

    rollout: Rollout
    task: object


Command = (
    StartEpisode
    | StartBranch
    | StopEpisode
    | Submit
    | Cancel
    | EndTurns
    | FailTurn
    | HandOver
    | PauseGeneration
    | EndBatches
    | RefuseBatch
    | EndEvaluation
    | RequeueTask
    | Record
)
