"""Events and commands of a run's core: the input and the output of :meth:`Core.handle`.

The scheduler makes the events and carries out the commands; the journal stores the events. They are
msgspec Structs because a rollout has dozens of them and a frozen dataclass takes six times as long
to make; ``gc=False`` is safe because nothing that they refer to refers back to them.
"""

from collections.abc import Mapping, Sequence
from typing import Any, final

from msgspec import Struct

from tidegate.orchestrator.core.group import Group, TaskKey
from tidegate.orchestrator.core.rollout import Rollout, Turn
from tidegate.policies.failures import FailureCause
from tidegate.transport.media import Media, MediaKind
from tidegate.transport.messages import Attachment, Prefill, SamplingParams, SubmitTurn

# ---------------------------------------------------------------- events


@final
class TaskArrived(Struct, frozen=True, gc=False):
    """The user's iterator gave a task, and admission has capacity for its group."""

    task: object
    key: TaskKey | None = None
    """Key of a task that is started again; None for the next task of the iterator in use."""
    digest: bytes = b""
    """Digest that identifies the task after a crash; empty for a task that is not plain data."""
    body: bytes = b""
    """The task as bytes; empty without a journal, or if it is not plain data."""
    item: int | None = None
    """Position of a new task in the curriculum in use; None if the tasks are no curriculum."""
    is_replay: bool = False
    """Whether the curriculum replays a hard task."""


class TaskWeightsSet(Struct, frozen=True, gc=False):
    """The user set weights of a curriculum's tasks."""

    curriculum: str
    """Name of the curriculum."""
    weights: tuple[tuple[int, float], ...]
    """(position in the curriculum, weight)"""


class TasksOffered(Struct, frozen=True, gc=False):
    """The user gave a new iterator of tasks."""

    episode: str = ""
    """Name of the function that runs the iterator's tasks. It is compared, never imported."""
    curriculum: str = ""
    """Name of the curriculum that the tasks are; empty if they are none."""
    agents: tuple[str, ...] = ()
    """Trained adapters that the episodes sample beside their own."""


class TasksExhausted(Struct, frozen=True, gc=False):
    """The user's iterator has ended."""


class TaskFoundAgain(Struct, frozen=True, gc=False):
    """After a resume, the user's iterator gave this task once more."""

    task: object
    key: TaskKey


class EvaluationRequested(Struct, frozen=True, gc=False):
    """One rollout of this task for measuring only: never trained, not counted in admission."""

    task: object
    index: int
    """Index in the evaluation. It seeds sampling, so two evaluations differ by weights alone."""
    version: int | None = None
    """Version that must sample every token, on an engine kept for evaluations; None: any."""


@final
class TurnRequested(Struct, frozen=True, gc=False):
    """An episode requests a turn that continues its rollout's context."""

    rollout_id: int
    sampling: SamplingParams
    media: tuple[Media, ...] = ()
    """Images, audio or video added to the context since the previous turn."""


class TurnAbandoned(Struct, frozen=True, gc=False):
    """An episode no longer waits for its turn; the tokens sampled so far stay in the context."""

    rollout_id: int


@final
class EpisodeReturned(Struct, frozen=True, gc=False):
    """An episode ended with a reward."""

    rollout_id: int
    reward: float
    agent_rewards: tuple[tuple[str, float], ...] = ()
    """(adapter, reward) of each agent, if the episode returned one for each; else empty."""


class EpisodeFailed(Struct, frozen=True, gc=False):
    """An episode raised, timed out or was cancelled."""

    rollout_id: int
    reason: str
    """Kind of failure. If the rollout is discarded, the ledger counts its tokens under this name.
    """
    cause: FailureCause = FailureCause.CODE
    can_be_retried: bool = True
    """False if the episode still runs although it was cancelled."""


class EngineJoined(Struct, frozen=True, gc=False):
    """An engine is ready for turns: a new one, a restarted one, or one that has reconnected."""

    engine: str
    weight_version: int
    max_running_turns: int
    """Number of decode slots of the engine."""
    epoch: int = 0
    """Epoch of the engine's process, which increases with each start."""
    held: tuple[int, ...] = ()
    """Handles of the turns that the engine holds."""
    replay_until: int = 0
    """Steps with a lower ``seq`` were sampled before the hello message, and are sent again."""
    media: tuple[MediaKind, ...] = ()
    """Kinds of media that the engine's model reads."""
    adapters: tuple[tuple[str, int], ...] = ()
    """(adapter, version) of the adapters with versions of their own that the engine serves."""


class EngineLeft(Struct, frozen=True, gc=False):
    """An engine is gone; its turns must continue on other engines."""

    engine: str
    is_crash: bool = True
    """Whether one of its turns may have caused the loss: the engine died, failed or went silent.
    False if it left on request, or was removed because of its weights."""


class EngineDraining(Struct, frozen=True, gc=False):
    """An engine is about to leave: it gets no more turns, and its turns end, or are moved."""

    engine: str


class EvaluationEngineChosen(Struct, frozen=True, gc=False):
    """An engine is kept for evaluations from now on, without training turns; or kept no more."""

    engine: str
    is_kept: bool


@final
class StepArrived(Struct, frozen=True, gc=False):
    """One decode step of an engine, its columns checked and unpacked. R rows, N tokens."""

    engine: str
    """Name of the engine."""
    version: int
    """Weight version that sampled all tokens of the step."""
    turns: memoryview
    """Handles of the turns that got tokens, [R] uint32."""
    token_ids: memoryview
    """Sampled tokens, row after row, [N] int32."""
    logprobs: "memoryview[float]"
    """Natural-log probabilities of the sampled tokens, [N] float32."""
    finish: bytes
    """Finish code of each row, [R]; empty if no turn ended."""
    counts: memoryview | None
    """uint32 [R], tokens per row; None when every row has one token."""
    prefills: list[Prefill]
    epoch: int = 0
    """Epoch of the engine's process, which increases with each start."""
    seq: int = 0
    """Sequence number of the step message in the engine's stream."""
    started_us: int = 0
    """Engine's monotonic clock when the step began, in microseconds."""
    busy_us: int = 0
    """Duration of the step, in microseconds."""
    attachments: Sequence[Attachment] = ()
    adapter: str = ""
    """Adapter of all rows whose versions ``version`` counts; empty: the run's weights."""


class TurnRejected(Struct, frozen=True, gc=False):
    """An engine can never serve this turn."""

    engine: str
    handle: int
    message: str


class EngineSwapped(Struct, frozen=True, gc=False):
    """An engine serves ``version`` from now on."""

    engine: str
    version: int


class BatchRequested(Struct, frozen=True, gc=False):
    """The trainer waits for a batch."""

    request: int = 0
    """Number of the request; unique among those that wait or have an offer."""


class BatchRequestCancelled(Struct, frozen=True, gc=False):
    """The trainer stopped waiting for a batch before one was offered."""

    request: int = 0


class BatchTaken(Struct, frozen=True, gc=False):
    """The trainer has the batch that was offered to its request."""

    request: int = 0


class BatchReturned(Struct, frozen=True, gc=False):
    """The newest batch handed over did not reach the trainer, or was given back untrained."""

    number: int
    request: int | None = None
    """Request that the batch was withdrawn from, and that waits again; None if none does."""


class HandOverPaused(Struct, frozen=True, gc=False):
    """No batch is offered while the trainer's version is undecided; or batches are again."""

    is_paused: bool


class BatchesTrained(Struct, frozen=True, gc=False):
    """The trainer is about to publish weights that were made from these batches."""

    batches: tuple[int, ...]
    """Numbers of the batches."""


class VersionPublished(Struct, frozen=True, gc=False):
    """Every engine has staged a version: the trainer's version is now this one."""

    version: int


class AdapterReleased(Struct, frozen=True, gc=False):
    """Every engine has loaded a version of an adapter with versions of its own."""

    name: str
    version: int


class AdapterServed(Struct, frozen=True, gc=False):
    """An engine serves a version of a trained adapter from now on."""

    engine: str
    name: str
    version: int


class AdapterTrainingStarted(Struct, frozen=True, gc=False):
    """The run trains an adapter from now on, with groups, batches and staleness of its own."""

    name: str
    rules: dict[str, Any]
    """The adapter's rules as plain data, see ``core/rules.py``."""


class AdapterTrainingEnded(Struct, frozen=True, gc=False):
    """The training of an adapter has ended; its untrained rollouts are discarded."""

    name: str


class GenerationHalted(Struct, frozen=True, gc=False):
    """The trainer of an adapter pauses the adapter's turns, or resumes them. Sent as
    :class:`ForAdapter`."""

    is_halted: bool


class ForAdapter(Struct, frozen=True, gc=False):
    """An event of one trained adapter: about its tasks, its batches or its trainer.

    Events of a rollout need no wrapper, because the core finds the adapter by the rollout's id.
    """

    adapter: str
    event: Any
    """An :data:`Event` other than this."""


class VersionRetracted(Struct, frozen=True, gc=False):
    """The trainer rolled back: weights from ``version`` on are bad. No engine samples meanwhile."""

    version: int
    """First bad version; all newer ones are bad too."""


class BatchesCheckpointed(Struct, frozen=True, gc=False):
    """The trainer's checkpoint holds the result of the first ``batches`` batches."""

    batches: int
    """Number of batches whose result the checkpoint holds."""
    offer: int


class RowsDiscarded(Struct, frozen=True, gc=False):
    """The trainer did not train on some rows of a batch."""

    batch: int
    """Number of the batch that had the rows."""
    rows: tuple[int, ...]
    """Indices of the rows in the batch, from 0."""
    reason: str
    """Ledger account that the rows' tokens move to."""


class RolloutCut(Struct, frozen=True, gc=False):
    """A rollout continues from the end of an earlier turn: later turns are discarded.

    Tokens that the episode appended after that turn are reported by its next turn, as always.
    """

    rollout_id: int
    turns: int
    """Number of turns that are kept."""
    tokens: int
    """Context tokens that the episode had repeated before it diverged. Informational only."""
    reason: str


class RolloutForked(Struct, frozen=True, gc=False):
    """An episode starts another row: a separate context within the same rollout."""

    rollout_id: int
    """Row that is forked from."""
    reason: str


class TurnsRewarded(Struct, frozen=True, gc=False):
    """An episode rewards single turns of one row."""

    rollout_id: int
    rewards: tuple[tuple[int, float], ...]
    """(turn number from 0, reward)"""


class TurnsScored(Struct, frozen=True, gc=False):
    """An episode adds scores of another model to turns of one row."""

    rollout_id: int
    attachments: Sequence[Attachment]
    """For each turn, by its number from 0, the ``teacher_…`` attachments of all its tokens."""


class RunResumed(Struct, frozen=True, gc=False):
    """Another process continues the run from the trainer's checkpoint."""

    batches: int
    """Number of batches in the checkpoint; later ones are handed over again."""
    offer: int
    """Number of the user's iterator in use at the checkpoint, from 0."""
    adapters: Mapping[str, tuple[int, int]] = {}
    """The same two numbers for each trained adapter; for an omitted adapter, the checkpoint
    acknowledged last applies."""


class StateChecksum(Struct, frozen=True, gc=False):
    """Checksum of the core's state, which a replay compares; changes nothing."""

    digest: str


class RunEnded(Struct, frozen=True, gc=False):
    """The run is over: everything not trained is discarded."""


Event = (
    StepArrived
    | TurnRequested
    | TurnAbandoned
    | EpisodeReturned
    | EpisodeFailed
    | TaskArrived
    | TaskFoundAgain
    | TasksOffered
    | TasksExhausted
    | EvaluationRequested
    | EngineJoined
    | EngineLeft
    | EngineSwapped
    | TurnRejected
    | BatchRequested
    | BatchRequestCancelled
    | VersionPublished
    | BatchesCheckpointed
    | RolloutCut
    | RunResumed
    | RunEnded
    | StateChecksum
    | VersionRetracted
    | RolloutForked
    | TurnsRewarded
    | RowsDiscarded
    | BatchReturned
    | BatchTaken
    | AdapterReleased
    | EngineDraining
    | TaskWeightsSet
    | EvaluationEngineChosen
    | AdapterServed
    | AdapterTrainingStarted
    | AdapterTrainingEnded
    | GenerationHalted
    | ForAdapter
    | TurnsScored
    | HandOverPaused
    | BatchesTrained
)
"""An event's number in the journal is its place in this union: add at the end, remove none."""

# ---------------------------------------------------------------- commands


class StartEpisode(Struct, frozen=True, gc=False):
    """Run the user's episode for this rollout."""

    rollout: Rollout
    task: object


class RetryEpisode(Struct, frozen=True, gc=False):
    """Run a failed episode again, which replays its turns."""

    rollout: Rollout
    task: object
    delay_s: float
    """Seconds until it begins."""


class StartBranch(Struct, frozen=True, gc=False):
    """Give the episode the row that its fork made."""

    rollout: Rollout


class Submit(Struct, frozen=True, gc=False):
    """Send a turn to an engine."""

    engine: str
    message: SubmitTurn


class StopEpisode(Struct, frozen=True, gc=False):
    """Cancel the episode of a discarded rollout, and ignore its result."""

    rollout: Rollout


class Cancel(Struct, frozen=True, gc=False):
    """Have an engine drop a turn."""

    engine: str
    handle: int


class EndTurns(Struct, frozen=True, gc=False):
    """Return finished turns to their episodes: all turns that ended with one step."""

    turns: list[Turn]


class FailTurn(Struct, frozen=True, gc=False):
    """Raise ``TurnRefused`` in the episode: no engine can serve its turn."""

    turn: Turn
    message: str


class HandOver(Struct, frozen=True, gc=False):
    """Offer the trainer a batch; :class:`BatchReturned` undoes it."""

    groups: list[Group]
    trainer_version: int
    """Version at which the batch is planned to be trained, from which its staleness is counted: the
    newest published, plus one for each ``batches_per_version`` batches that the trainer holds."""
    number: int = 0
    """Number of the batch in its run, from 1."""
    oldest_trainable: int = 0
    """Tokens of older versions are masked."""
    adapter: str = ""
    """Adapter whose trainer gets the batch; empty: the run's trainer."""
    request: int = 0
    """Request that the batch is offered to."""
    is_ahead: bool = False
    """Whether the trainer held all batches of a version when it requested this one."""


class PauseGeneration(Struct, frozen=True, gc=False):
    """Have every engine abort its turns and pause, or resume.

    For a trained adapter the core takes the turns back by itself, and only the clocks of the
    adapter's episodes are stopped, or started again.
    """

    is_paused: bool
    adapter: str = ""


class EndBatches(Struct, frozen=True, gc=False):
    """Report to the trainer that there are no more batches."""

    request: int
    adapter: str = ""


class RefuseBatch(Struct, frozen=True, gc=False):
    """Refuse the trainer's batch request, because the batch cannot fill before the trainer
    publishes."""

    request: int
    unpublished_groups: int
    """Number of groups that the trainer has and that are not in a published version."""
    held: tuple[int, ...] = ()
    """Numbers of the batches that no publish has named."""
    adapter: str = ""


class LoseBatch(Struct, frozen=True, gc=False):
    """Report that the trainer must not train on a batch that it holds any more. The batch's groups
    are discarded, and their tasks are started again."""

    number: int
    reason: str
    """Ledger account of the batch's tokens: ``stale`` or ``rolled_back``."""
    adapter: str = ""


class EndEvaluation(Struct, frozen=True, gc=False):
    """Give the caller of an evaluation one rollout, with a reward or discarded."""

    rollout: Rollout


class RequeueTask(Struct, frozen=True, gc=False):
    """Start this task again before new tasks of the user's iterator."""

    task: object
    key: TaskKey
    adapter: str = ""


class Record(Struct, frozen=True, gc=False):
    """Record a rollout that ended without the trainer: discarded or evaluated."""

    rollout: Rollout
    task: object


Command = (
    StartEpisode
    | RetryEpisode
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
    | LoseBatch
    | EndEvaluation
    | RequeueTask
    | Record
)
