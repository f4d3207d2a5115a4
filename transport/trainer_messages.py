"""What do a run and a trainer in another process say to each other? Requests, each with an answer.

A message is a MessagePack header and, where there are arrays, raw frames after it. It knows no
batch and no weights, only how they are named. New fields go last and have defaults.
"""

from typing import Any, Literal

import msgspec

from tidegate.errors import BadFrame
from tidegate.transport.limits import Count, cut
from tidegate.transport.message import Message
from tidegate.transport.messages import InitWeights, TensorSpec, UpdateWeights

PROTOCOL = 1
"""Of these messages; the two ends must have the same."""

FRAME_BYTES = 16 * 1024 * 1024
"""Arrays travel in frames of at most so many bytes: 2 ms of copying, then others get a turn."""

CHUNK_BYTES = 4 * 1024 * 1024
"""Of weights, in one request."""

CHUNKS_AHEAD = 4
"""Unanswered at once: enough to fill a connection of 10 Gbit/s over 10 ms."""


class Column(msgspec.Struct, frozen=True):
    """One array among the frames: they follow each other without gaps."""

    name: str
    dtype: str
    """As torch spells it."""
    count: Count
    """Elements."""


# ---------------------------------------------------------------- from a trainer


class Ask(Message, frozen=True, kw_only=True):
    """Base of what a trainer asks for."""


class Join(Ask, frozen=True, kw_only=True, tag="join"):
    """Take the seat of a rank."""

    protocol: Count
    rank: Count
    world_size: Count
    run_id: str = ""
    """Where the trainer goes on from a checkpoint: of which run."""
    batches: Count | None = None
    """And after which batch of it."""
    shared_memory: InitWeights | None = None
    """Where it would put weights for a run on the same host."""


class NextBatch(Ask, frozen=True, kw_only=True, tag="next_batch"):
    """This rank has done with batch ``after`` and wants the next."""

    after: Count


class Publish(Ask, frozen=True, kw_only=True, tag="publish"):
    """Bring weights to the engines, once every rank has done with batch ``number``."""

    number: Count
    ordinal: Count
    """Of several after one batch, from 0."""
    wait: Literal["live", "staged", "none"] = "live"
    partial: bool = False
    is_rollback: bool = False
    first_bad: Count | None = None
    shared: UpdateWeights | None = None
    """Where they lie in the trainer's shared memory."""
    upload: str = ""
    """Or the upload that they came in."""
    tensors: list[TensorSpec] = []
    """And where in it. Neither: this rank only says that it is ready."""


class Chunk(Ask, frozen=True, kw_only=True, tag="chunk"):
    """A piece of an upload; one frame follows."""

    upload: str
    start: Count
    nbytes_total: Count


class OfferTasks(Ask, frozen=True, kw_only=True, tag="offer_tasks"):
    """Take tasks from the trainer from now on, for an episode that the run knows by name."""

    offer: str
    episode: str = ""
    """Empty: the run's only one."""


class GiveTasks(Ask, frozen=True, kw_only=True, tag="give_tasks"):
    """Some of them; answered once there is room for more."""

    offer: str
    tasks: list[Any]
    is_end: bool = False


class Evaluate(Ask, frozen=True, kw_only=True, tag="evaluate"):
    """One episode per task, outside training."""

    tasks: list[Any]
    episode: str = ""


class Score(Ask, frozen=True, kw_only=True, tag="score"):
    """What the engines' model makes of given tokens."""

    asked: list[Any]
    """As the orchestrator's ``Asked`` has it, in the order of its fields."""


class Control(Ask, frozen=True, kw_only=True, tag="control"):
    """One of the smaller wishes."""

    wish: Literal["pause", "resume", "sleep", "wake", "ack", "observe", "statistics", "discard"]
    values: dict[str, Any] = {}


AnyAsk = Join | NextBatch | Publish | Chunk | OfferTasks | GiveTasks | Evaluate | Score | Control


class Request(Message, frozen=True, kw_only=True, tag="request"):
    """A wish, and the number that its answer will bear; they count up from 1."""

    request: Count
    ask: AnyAsk


class TrainerAlive(Message, frozen=True, kw_only=True, tag="trainer_alive"):
    """A heartbeat, and what is still unanswered: so that nothing lost stays lost."""

    newest: Count
    """The request sent last."""
    pending: list[Count]


class Leave(Message, frozen=True, kw_only=True, tag="leave"):
    """The trainer goes: because it has done, or because it failed."""

    is_done: bool


FromTrainer = Request | TrainerAlive | Leave

# ---------------------------------------------------------------- from the run


class Answer(Message, frozen=True, kw_only=True):
    """Base of what a run answers."""


class Welcome(Answer, frozen=True, kw_only=True, tag="welcome"):
    """The seat is taken."""

    run_id: str
    version: Count
    batches: Count
    """The last that this rank is taken to have done with."""
    is_resumed: bool
    """Whether the trainer should publish its checkpoint's weights first."""
    journal: dict[str, Any] | None = None
    """The run's own token of where it is; None: it keeps no journal."""
    reads_shared_memory: bool = False


class BatchIs(Answer, frozen=True, kw_only=True, tag="batch_is"):
    """A batch, or a rank's part of it; its columns are in the frames."""

    number: Count
    trainer_version: Count
    columns: list[Column]
    tasks: list[Any]
    """Each once."""
    task_of_row: list[Count]
    rank: Count = 0
    world_size: Count = 1
    rows_total: Count = 0
    sampled_tokens_total: Count = 0
    journal: dict[str, Any] | None = None
    rows: list[Count] = []
    """Of a part: where its rows are in the whole batch."""
    version: Count = 0
    """The newest published; ``trainer_version`` may be one to come, if the trainer asks ahead."""


class NoBatch(Answer, frozen=True, kw_only=True, tag="no_batch"):
    """The tasks are used up."""


class Published(Answer, frozen=True, kw_only=True, tag="published"):
    """Engines serve, or have, these weights."""

    version: Count


class Evaluated(Answer, frozen=True, kw_only=True, tag="evaluated"):
    """A reward for each task; None where the episode failed."""

    rewards: list[float | None]


class Scores(Answer, frozen=True, kw_only=True, tag="scores"):
    """An answer for each sequence; all arrays are in the frames, five columns for each."""

    about: list[Any]
    columns: list[Column]


class Done(Answer, frozen=True, kw_only=True, tag="done"):
    """It is done; ``value`` is what it gave."""

    value: Any = None


AnyAnswer = Welcome | BatchIs | NoBatch | Published | Evaluated | Scores | Done


class Reply(Message, frozen=True, kw_only=True, tag="reply"):
    """The answer to a request."""

    request: Count
    answer: AnyAnswer


class Failed(Message, frozen=True, kw_only=True, tag="failed"):
    """There is none, and why; request 0 is none of the trainer's."""

    request: Count
    error: str
    """The name of its class in :mod:`tidegate.errors`."""
    message: str
    may_retry: bool = False
    """Whether the same may succeed soon."""


class RunAlive(Message, frozen=True, kw_only=True, tag="run_alive"):
    """Heard; and these requests never came."""

    missing: list[Count] = []


class Stranger(Message, frozen=True, kw_only=True, tag="stranger"):
    """The run doesn't know this trainer: it is another's process now, or the seat another's."""


class RunOver(Message, frozen=True, kw_only=True, tag="run_over"):
    """Nothing more will be answered."""

    error: str
    message: str


ToTrainer = Reply | Failed | RunAlive | Stranger | RunOver

_encoder = msgspec.msgpack.Encoder()
_from_trainer: msgspec.msgpack.Decoder[FromTrainer] = msgspec.msgpack.Decoder(FromTrainer)
_to_trainer: msgspec.msgpack.Decoder[ToTrainer] = msgspec.msgpack.Decoder(ToTrainer)


def encode(message: Message) -> bytes:
    """The header of a message.

    Raises:
        BadFrame: something in it can't be said in MessagePack.
    """
    try:
        return _encoder.encode(message)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise BadFrame(f"can't be sent to another process: {error}") from error


def decode_from_trainer(header: bytes) -> FromTrainer:
    """Read what a trainer says.

    Raises:
        BadFrame: it is no such message.
    """
    try:
        return _from_trainer.decode(header)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BadFrame(cut(f"unreadable header of {len(header)} bytes: {error}")) from error


def decode_to_trainer(header: bytes) -> ToTrainer:
    """Read what a run says.

    Raises:
        BadFrame: it is no such message.
    """
    try:
        return _to_trainer.decode(header)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BadFrame(cut(f"unreadable header of {len(header)} bytes: {error}")) from error
