"""Protocol between a run and a remote trainer: numbered requests, each answered by one reply.

A message is a MessagePack header followed by raw frames for its arrays. New fields go last and have
defaults.
"""

from typing import Annotated, Any, Literal

import msgspec

from tidegate.errors import BadFrame
from tidegate.transport.limits import Count, cut
from tidegate.transport.message import Message
from tidegate.transport.messages import InitWeights, TensorSpec, UpdateWeights

PROTOCOL = 3
"""Protocol version; both ends must have the same."""

FRAME_BYTES = 16 * 1024 * 1024
"""Maximum size of an array frame: 2 ms of copying, after which other work gets its turn."""

CHUNK_BYTES = 4 * 1024 * 1024
"""Size of a chunk of weights in one request."""

CHUNKS_AHEAD = 4
"""Maximum number of unanswered chunks: enough to fill a connection of 10 Gbit/s over 10 ms."""


class Column(msgspec.Struct, frozen=True):
    """One array among the frames; columns follow each other without gaps."""

    name: str
    dtype: str
    """Torch's name of the dtype, e.g. ``float32``."""
    count: Count
    """Number of elements of the array."""
    shape: list[Count] = []
    """Shape of an entry, e.g. [L, k]; empty for scalars."""


# ---------------------------------------------------------------- from a trainer


class TrainerRequest(Message, frozen=True, kw_only=True):
    """Base class of a trainer's requests."""


class JoinRun(TrainerRequest, frozen=True, kw_only=True, tag="join_run"):
    """Joins the run as one data-parallel rank."""

    protocol: Count
    rank: Count
    world_size: Count
    run_id: str = ""
    """Run that the trainer's checkpoint belongs to, if it resumes from one."""
    last_batch: Count | None = None
    """Number of the last batch before the checkpoint; None without one."""
    shared_memory: InitWeights | None = None
    """Shared memory in which the trainer would put weights if the run is on the same host."""


class NextBatch(TrainerRequest, frozen=True, kw_only=True, tag="next_batch"):
    """This rank has finished batch ``after`` and requests the next."""

    after_batch: Count
    reads_advantages: bool = False
    """Whether the rank has read the advantages of a batch, so that zeros there matter to it."""


class PartBox(msgspec.Struct, frozen=True, array_like=True):
    """Place of a rank's part in a whole tensor: a box."""

    shape: Annotated[list[Count], msgspec.Meta(max_length=16)]
    """Shape of the whole tensor."""
    start: Annotated[list[Count], msgspec.Meta(max_length=16)]
    """Index of the part's first element, in each dimension."""


class PrepareParts(TrainerRequest, frozen=True, kw_only=True, tag="prepare_parts"):
    """Announces this rank's part of a publish; answered by a plan once every rank has done so."""

    batch_number: Count
    publish_index: Count
    wait: Literal["live", "staged", "none"] = "live"
    partial: bool = False
    is_rollback: bool = False
    first_bad: Count | None = None
    held: str = ""
    """Plan of the publish whose parts the rank has kept, to make patches from; empty if none."""
    batches: list[Count] | None = None
    """As :attr:`PublishWeights.batches`."""


class PublishWeights(TrainerRequest, frozen=True, kw_only=True, tag="publish_weights"):
    """Publishes weights to the engines, once every rank has finished batch ``number``."""

    batch_number: Count
    publish_index: Count
    """Index among several publishes after one batch, from 0."""
    wait: Literal["live", "staged", "none"] = "live"
    partial: bool = False
    is_rollback: bool = False
    first_bad: Count | None = None
    shared: UpdateWeights | None = None
    """Location of the weights in the trainer's shared memory; None if they were uploaded."""
    upload: str = ""
    """Name of the upload that holds the weights; empty if they are in shared memory."""
    tensors: list[TensorSpec] = []
    """Location of each tensor in the upload. With neither source, this rank only reports that it is
    ready."""
    plan: str = ""
    """Name of the plan that the tensors are parts for; empty if they are whole."""
    boxes: list[PartBox] = []
    """For parts: place of each tensor, in the order of the tensors."""
    is_too_dense: bool = False
    """Whether patches of this rank's parts would be too large, so that nothing is sent yet and all
    ranks should send whole parts."""
    batches: list[Count] | None = None
    """Numbers of the batches that the weights were made from; None: those that rank 0 holds, if it
    asks for none ahead. Rank 0's counts."""


class UploadChunk(TrainerRequest, frozen=True, kw_only=True, tag="upload_chunk"):
    """A piece of an upload; one frame follows."""

    upload: str
    start: Count
    """Offset of the chunk in the upload, in bytes."""
    nbytes_total: Count
    """Size of the whole upload, in bytes."""


class OpenTaskStream(TrainerRequest, frozen=True, kw_only=True, tag="open_task_stream"):
    """Offers tasks to the run, for an episode that the run has registered by name."""

    stream: str
    episode: str = ""
    """Name of the episode; empty for the run's only one."""


class SendTasks(TrainerRequest, frozen=True, kw_only=True, tag="send_tasks"):
    """Delivers some tasks of an offer; answered once there is room for more."""

    stream: str
    tasks: list[Any]
    is_last: bool = False


class Evaluate(TrainerRequest, frozen=True, kw_only=True, tag="evaluate"):
    """Runs one episode per task, outside training, and returns the rewards."""

    tasks: list[Any]
    episode: str = ""
    name: str | None = "held_out"
    """Name that the mean reward is recorded by; None: it is not recorded."""
    version: int | None = None
    """Weight version that samples every token; None: the engines' present ones."""


class ScoreSequences(TrainerRequest, frozen=True, kw_only=True, tag="score_sequences"):
    """Requests scores of given tokens from the engines' model."""

    requests: list[Any]
    """The orchestrator's ``ScoreQuery`` records, each as a list of its fields in order."""


ControlAction = Literal[
    "pause",
    "resume",
    "sleep",
    "wake",
    "drain",
    "scale",
    "ack",
    "report_off_policyness",
    "statistics",
    "discard",
]


class ControlRun(TrainerRequest, frozen=True, kw_only=True, tag="control_run"):
    """A call of a method of the run's handle, ``action``, with its keyword arguments."""

    action: ControlAction
    arguments: dict[str, Any] = {}


AnyTrainerRequest = (
    JoinRun
    | NextBatch
    | PrepareParts
    | PublishWeights
    | UploadChunk
    | OpenTaskStream
    | SendTasks
    | Evaluate
    | ScoreSequences
    | ControlRun
)


class RequestEnvelope(Message, frozen=True, kw_only=True, tag="request_envelope"):
    """A request with its number, which the reply repeats; numbers count up from 1."""

    request_id: Count
    request: AnyTrainerRequest


class TrainerHeartbeat(Message, frozen=True, kw_only=True, tag="trainer_heartbeat"):
    """Heartbeat of a trainer, with its unanswered requests, so that lost messages are detected."""

    last_request_id: Count
    """Number of the last request sent."""
    pending_request_ids: list[Count]


class LeaveRun(Message, frozen=True, kw_only=True, tag="leave_run"):
    """The trainer leaves, because it has finished or because it failed."""

    is_done: bool


FromTrainer = RequestEnvelope | TrainerHeartbeat | LeaveRun

# ---------------------------------------------------------------- from the run


class TrainerReply(Message, frozen=True, kw_only=True):
    """Base class of the run's answers."""


class TrainerWelcome(TrainerReply, frozen=True, kw_only=True, tag="trainer_welcome"):
    """Accepts the rank into the run."""

    run_id: str
    version: Count
    last_batch: Count
    """Number of the last batch that this rank counts as having finished."""
    is_resumed: bool
    """Whether the trainer should publish its checkpoint's weights first."""
    journal: dict[str, Any] | None = None
    """Journal position to store in the trainer's checkpoint; None if the run keeps no journal."""
    reads_shared_memory: bool = False


class BatchReply(TrainerReply, frozen=True, kw_only=True, tag="batch_reply"):
    """A batch, or one rank's part of it; its columns are in the frames."""

    batch_number: Count
    trainer_version: Count
    columns: list[Column]
    tasks: list[Any]
    """The batch's tasks, each once; ``task_of_row`` indexes them."""
    task_of_row: list[Count]
    rank: Count = 0
    world_size: Count = 1
    rows_total: Count = 0
    sampled_tokens_total: Count = 0
    journal: dict[str, Any] | None = None
    rows: list[Count] = []
    """For a part: indices of its rows in the whole batch."""
    version: Count = 0
    """Newest published version; ``trainer_version`` may be a later one if the trainer
    prefetches."""
    is_ahead: bool = False
    """Whether the rank held all batches of a version when it requested this one."""


class NoMoreBatches(TrainerReply, frozen=True, kw_only=True, tag="no_more_batches"):
    """There are no more batches, because the tasks are used up."""


class PublishReply(TrainerReply, frozen=True, kw_only=True, tag="publish_reply"):
    """Engines serve these weights, or have staged them."""

    version: Count


class PartsPlan(TrainerReply, frozen=True, kw_only=True, tag="parts_plan"):
    """How every rank sends its parts of a version."""

    plan: str
    """Name of this plan."""
    version: Count
    """The version that the parts will make."""
    are_patches: bool
    """Whether to send patches of the parts that the rank has kept, instead of whole parts."""
    keep_copy: bool
    """Whether to keep a copy of the parts, because the next publish may send patches."""
    has_checksums: bool
    """Whether patches carry a checksum of the patched part."""


class SendWholeParts(TrainerReply, frozen=True, kw_only=True, tag="send_whole_parts"):
    """A rank's patches were too large: send whole parts for the same plan."""


class EvaluateReply(TrainerReply, frozen=True, kw_only=True, tag="evaluate_reply"):
    """One reward per task; None if the episode failed."""

    rewards: list[float | None]


class ScoresReply(TrainerReply, frozen=True, kw_only=True, tag="scores_reply"):
    """One answer per sequence; the arrays are in the frames, five columns for each."""

    metadata: list[Any]
    columns: list[Column]


class ResultReply(TrainerReply, frozen=True, kw_only=True, tag="result_reply"):
    """The request succeeded; ``value`` is its result."""

    value: Any = None


AnyTrainerReply = (
    TrainerWelcome
    | BatchReply
    | NoMoreBatches
    | PublishReply
    | PartsPlan
    | SendWholeParts
    | EvaluateReply
    | ScoresReply
    | ResultReply
)


class ReplyEnvelope(Message, frozen=True, kw_only=True, tag="reply_envelope"):
    """The answer to one request."""

    request_id: Count
    reply: AnyTrainerReply


class RequestFailed(Message, frozen=True, kw_only=True, tag="request_failed"):
    """A request failed; request 0 stands for a failure without a request."""

    request_id: Count
    error: str
    """Name of the error class in :mod:`tidegate.errors`."""
    message: str
    may_retry: bool = False
    """Whether the same request may succeed if retried soon."""


class RunHeartbeat(Message, frozen=True, kw_only=True, tag="run_heartbeat"):
    """Answer to a heartbeat, with the pending requests that never arrived."""

    missing_request_ids: list[Count] = []


class UnknownTrainer(Message, frozen=True, kw_only=True, tag="unknown_trainer"):
    """The run has no such trainer, because the run was restarted or another process joined as its
    rank."""


class RunTerminated(Message, frozen=True, kw_only=True, tag="run_terminated"):
    """The run has ended and answers no more requests."""

    error: str
    message: str


ToTrainer = ReplyEnvelope | RequestFailed | RunHeartbeat | UnknownTrainer | RunTerminated

_encoder = msgspec.msgpack.Encoder()
_from_trainer: msgspec.msgpack.Decoder[FromTrainer] = msgspec.msgpack.Decoder(FromTrainer)
_to_trainer: msgspec.msgpack.Decoder[ToTrainer] = msgspec.msgpack.Decoder(ToTrainer)


def encode(message: Message) -> bytes:
    """Encode a message's header.

    Raises:
        BadFrame: a value cannot be represented in MessagePack.
    """
    try:
        return _encoder.encode(message)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise BadFrame(f"can't be sent to another process: {error}") from error


def decode_from_trainer(header: bytes) -> FromTrainer:
    """Decode a header from a trainer.

    Raises:
        BadFrame: the header is not a message of this protocol.
    """
    try:
        return _from_trainer.decode(header)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BadFrame(cut(f"unreadable header of {len(header)} bytes: {error}")) from error


def decode_to_trainer(header: bytes) -> ToTrainer:
    """Decode a header from a run.

    Raises:
        BadFrame: the header is not a message of this protocol.
    """
    try:
        return _to_trainer.decode(header)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BadFrame(cut(f"unreadable header of {len(header)} bytes: {error}")) from error
