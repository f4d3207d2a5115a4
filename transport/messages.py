"""What crosses the wire, and nothing else. One Struct per message, MessagePack inside ZeroMQ.

One message is one ZeroMQ frame (behind the identity frame that a ROUTER adds). Arrays travel as
MessagePack ``bin`` in raw little-endian. New fields go last and have defaults, so an old peer can
still read a new message. Nothing here knows what a rollout, a group or a reward is.

Letters in shapes: R rows (turns) of a step message, N tokens in it, M tensors.
"""

from typing import Annotated

import msgspec

from tidegate.errors import BadFrame
from tidegate.transport.limits import Count, Seconds, check_frame_size, cut
from tidegate.transport.media import Media as Media
from tidegate.transport.media import MediaKind
from tidegate.transport.message import KvPolicy as KvPolicy
from tidegate.transport.message import Message as Message
from tidegate.transport.message import PauseMode as PauseMode
from tidegate.transport.sampling import SamplingParams as SamplingParams
from tidegate.transport.scoring import CancelScore, Scored, ScoreRefused, ScoreTokens
from tidegate.transport.sleep_messages import Asleep as Asleep
from tidegate.transport.sleep_messages import Awake as Awake
from tidegate.transport.sleep_messages import MemoryTag, SleepLevel
from tidegate.transport.sleep_messages import Sleep as Sleep
from tidegate.transport.sleep_messages import SleepFailed as SleepFailed
from tidegate.transport.sleep_messages import Wake as Wake
from tidegate.transport.weight_messages import Adapter as Adapter
from tidegate.transport.weight_messages import Bases as Bases
from tidegate.transport.weight_messages import FinishWeightUpdate as FinishWeightUpdate
from tidegate.transport.weight_messages import InitWeights as InitWeights
from tidegate.transport.weight_messages import SharedMemory as SharedMemory
from tidegate.transport.weight_messages import StartWeightUpdate as StartWeightUpdate
from tidegate.transport.weight_messages import TensorSpec as TensorSpec
from tidegate.transport.weight_messages import UpdateWeights as UpdateWeights
from tidegate.transport.weight_messages import WeightsFailed as WeightsFailed
from tidegate.transport.weight_messages import WeightsLive as WeightsLive
from tidegate.transport.weight_messages import WeightsStaged as WeightsStaged

PROTOCOL = 1
"""Version of this file's contract. A peer with another one is refused in the handshake."""

RUNNING, STOP, LENGTH, ABORT, CANCELLED = range(5)
"""Finish codes of a step's rows: goes on; stop token sampled; ``max_tokens`` reached; ended by a
pause or preempted for good, to be continued elsewhere; cancelled on request."""

FINISH_REASONS = ("running", "stop", "length", "abort", "cancelled")
"""The finish codes' names, in the order of their values."""


# ---------------------------------------------------------------- engine -> orchestrator


class Hello(Message, frozen=True, kw_only=True, tag="hello"):
    """First word of an engine, and again after each reconnect."""

    protocol: int
    engine: str
    """Unique name within the run, e.g. ``engine-0``."""
    epoch: Count
    """Greater with each process start of this engine, e.g. the clock's nanoseconds; with ``seq`` it
    names a step message."""
    weight_version: Count
    """The weights it serves now: 0 for those of the model directory."""
    architecture: str
    """As in config.json, e.g. ``Qwen3ForCausalLM``."""
    vocab_size: Count
    context_tokens_max: Count
    max_running_turns: Count
    num_blocks: Count
    block_tokens: Count
    pause_modes: list[PauseMode]
    kv_policies: list[KvPolicy]
    weight_channels: list[str]
    pid: Count = 0
    first_seq: Count = 0
    """Every step message before this one has been acknowledged; the rest is replayed after this
    hello. 0 in an epoch's first hello."""
    next_seq: Count = 0
    """What its next new step message will carry: the replay is ``[first_seq, next_seq)``."""
    turns: bytes = b""
    """uint32: the turns it holds now, waiting, running or frozen. A turn that is not among them has
    ended in a step message before ``next_seq``, or was lost on its way here."""
    model_code: str = ""
    """Whose code computes the model, e.g. ``tidegate``, or ``transformers`` where that doesn't know
    the architecture. Empty: it doesn't say."""
    speculation: str = ""
    """Where it takes guesses from, to verify several tokens of a turn in a step: ``lookup``,
    ``rollouts`` or ``draft``. Empty: it takes none."""
    scores: list[str] = []
    """What it can tell of given tokens: values of ``ScoreTokens.want``."""
    is_deterministic: bool = False
    """Whether the same request, weights and seed give the same bits, whatever is in the batch."""
    sleep_levels: list[SleepLevel] = []
    """The levels that it can sleep at; none: it can't give memory back."""
    asleep: list[MemoryTag] = []
    """What sleeps now; that outlasts a conversation."""
    lacks_weights: bool = False
    """Nothing stands behind ``weight_version`` any more: it needs a whole update."""
    takes_turns_together: bool = False
    """Whether it knows ``SubmitTurns``."""
    keeps_sessions: bool = False
    """Whether it is to be told when a session ends."""
    ranks: Count = 1
    """How many processes compute its model, each a part of it."""
    quantization: str = ""
    """What it rounds weights to as they come: ``int8``. Empty: it serves what is published."""
    media: list[MediaKind] = []
    """What its model reads beside tokens; none: tokens only."""
    dtype: str = ""
    """What its model computes in: ``float32``, ``bfloat16``, ``float16``. Empty: it doesn't say."""


class KvSpan(msgspec.Struct, frozen=True, array_like=True):
    """Whose weights computed the KV of the context positions ``[start, end)``."""

    version: Count
    start: Count
    end: Count


class Prefill(msgspec.Struct, frozen=True, array_like=True):
    """A turn's KV was computed from its tokens: at its start, or again (recompute, preemption)."""

    turn: Count
    at: Count
    """Output tokens of this submission that existed by then. The tokens sampled from index ``at``
    on attend to this history, until the turn's next ``Prefill``."""
    spans: list[KvSpan]
    """Over all context positions (prompt, then ``at`` output tokens), gapless, in order."""
    cached: Count = 0
    """How many of these positions the engine need not compute, for it had their KV already."""


class TokenDetails(msgspec.Struct, frozen=True, array_like=True):
    """What a turn wants to know of its tokens beside their log-probs; C tokens of its row, k each.

    Each column is empty unless ``SamplingParams`` asks for it.
    """

    turn: Count
    raw_logprobs: bytes = b""
    """float32 [C]: before every sampling option."""
    top_ids: bytes = b""
    """int32 [C * k]: the likeliest tokens for each, likeliest first."""
    top_logprobs: bytes = b""
    """float32 [C * k]: theirs, after every option; -inf for tokens that those leave out."""


class Step(Message, frozen=True, kw_only=True, tag="step"):
    """All tokens of one engine step, in columns. Every one was sampled by ``version``.

    The position that the token with output index k was sampled from was computed in the same
    step; so after a ``Prefill``, the versions of the steps say whose weights computed all KV.
    """

    seq: Count
    """Counts an engine's step messages from 0 within an epoch; the orchestrator acknowledges it."""
    version: Count
    turns: bytes
    """uint32 [R]: the handle each row belongs to."""
    token_ids: bytes
    """int32 [N], row after row."""
    logprobs: bytes
    """float32 [N]: natural log of the probability each token was sampled with."""
    finish: bytes = b""
    """uint8 [R], a finish code per row; empty when every row goes on."""
    counts: bytes = b""
    """uint32 [R], tokens per row; empty when each row has one."""
    prefills: list[Prefill] = []
    started_us: Count = 0
    """Engine's monotonic clock when the step began."""
    busy_us: Count = 0
    """Time the step took."""
    queued_turns: Count = 0
    """Turns waiting in the engine after this step."""
    free_blocks: Count = 0
    details: list[TokenDetails] = []
    """Of the rows whose turns ask for any."""
    drafted_tokens: Count = 0
    """Guessed before the step, and verified in it: speculative decoding."""
    accepted_tokens: Count = 0
    """Of them, those that were sampled."""


class TurnRefused(Message, frozen=True, kw_only=True, tag="turn_refused"):
    """This turn can never be served as asked; ``message`` says why and what to change.

    It may have tokens by then: its logit processor failed, or left no token to sample.
    """

    turn: Count
    message: str


class EngineHeartbeat(Message, frozen=True, kw_only=True, tag="engine_heartbeat"):
    """The engine lives; sent at least every ``Welcome.heartbeat_interval_s``."""

    weight_version: Count
    running_turns: Count
    waiting_turns: Count
    free_blocks: Count
    sent_us: Count
    """Engine's monotonic clock."""
    out_of_memory_steps: Count = 0
    """Steps so far for which there was no memory, and that were tried again with less."""


class Paused(Message, frozen=True, kw_only=True, tag="paused"):
    """The pause asked for has taken effect: no turn runs."""

    mode: PauseMode


class Resumed(Message, frozen=True, kw_only=True, tag="resumed"):
    """Turns run again."""


class Goodbye(Message, frozen=True, kw_only=True, tag="goodbye"):
    """The engine leaves on purpose; its unfinished turns are to be continued elsewhere."""

    reason: str
    has_failed: bool = False
    """Whether a defect ends it, which one of its turns may have met."""


class Complaint(Message, frozen=True, kw_only=True, tag="complaint"):
    """Either way: your last message could not be read or makes no sense, for this reason."""

    message: str


# ---------------------------------------------------------------- orchestrator -> engine


class Welcome(Message, frozen=True, kw_only=True, tag="welcome"):
    """The engine is part of the run."""

    heartbeat_interval_s: Seconds
    orchestrator_timeout_s: Seconds
    """The engine ends itself after hearing nothing for so long: no orphans."""
    credit_steps: Annotated[int, msgspec.Meta(ge=1, le=2**31)]
    """Step messages that may be unacknowledged; then the engine waits. Bounds both ends' memory."""


class Refused(Message, frozen=True, kw_only=True, tag="refused"):
    """The engine can't join, for this reason."""

    message: str


class OrchestratorHeartbeat(Message, frozen=True, kw_only=True, tag="orchestrator_heartbeat"):
    """The orchestrator lives."""


class Ack(Message, frozen=True, kw_only=True, tag="ack"):
    """Every step message up to and including ``seq`` has been taken in."""

    seq: Count


class SubmitTurn(Message, frozen=True, kw_only=True, tag="submit_turn"):
    """Generate from these tokens."""

    turn: Count
    """uint32 handle, never used twice on one engine epoch."""
    token_ids: bytes
    """int32: prompt, and what an earlier submission of this turn has already sampled."""
    sampling: SamplingParams
    priority: int = 0
    """Lower runs first; ties in the order of arrival."""
    sampled_before: int = 0
    """Output tokens of this turn already at the end of ``token_ids``. The i-th output token of a
    turn uses the i-th random number of its seed, wherever and whenever it is sampled."""
    session: Count = 0
    """Whose context this is: more turns of the same session may go on where this one ends, so KV of
    it is better kept than that of others. 0: nobody's. Changes nothing but speed."""
    media: list[Media] = []
    """What the context has beside tokens, in order; only for engines that read its kinds."""


class EndSessions(Message, frozen=True, kw_only=True, tag="end_sessions"):
    """No more turns of these sessions come here; ones that are unknown are ignored."""

    sessions: list[Count]


class SubmitTurns(Message, frozen=True, kw_only=True, tag="submit_turns"):
    """Each of these as if it had come by itself; only for engines that say they take them so."""

    turns: list[SubmitTurn]
    """In the order in which they would have come."""


class CancelTurn(Message, frozen=True, kw_only=True, tag="cancel_turn"):
    """Stop this turn; unknown or finished handles are ignored."""

    turn: Count


class Pause(Message, frozen=True, kw_only=True, tag="pause"):
    """Stop running turns as ``mode`` says; answered by ``Paused`` once it has taken effect."""

    mode: PauseMode
    clear_cache: bool = False
    """By then, forget all KV that no turn holds: what comes after computes its context anew."""


class Resume(Message, frozen=True, kw_only=True, tag="resume"):
    """Run again; answered by ``Resumed``."""


class Shutdown(Message, frozen=True, kw_only=True, tag="shutdown"):
    """End the process, cleanly, now."""


FromEngine = (
    Hello
    | Step
    | TurnRefused
    | Scored
    | ScoreRefused
    | EngineHeartbeat
    | WeightsStaged
    | WeightsLive
    | WeightsFailed
    | Paused
    | Resumed
    | Goodbye
    | Complaint
    | Asleep
    | Awake
    | SleepFailed
)
FromOrchestrator = (
    Welcome
    | Refused
    | OrchestratorHeartbeat
    | Ack
    | SubmitTurn
    | SubmitTurns
    | EndSessions
    | CancelTurn
    | ScoreTokens
    | CancelScore
    | Pause
    | Resume
    | InitWeights
    | StartWeightUpdate
    | UpdateWeights
    | FinishWeightUpdate
    | Shutdown
    | Complaint
    | Sleep
    | Wake
)

_encoder = msgspec.msgpack.Encoder()
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
_from_orchestrator: msgspec.msgpack.Decoder[FromOrchestrator] = msgspec.msgpack.Decoder(
    FromOrchestrator
)


def encode(message: Message) -> bytes:
    """Turn a message into one ZeroMQ frame."""
    return _encoder.encode(message)


def decode_from_engine(frame: bytes) -> FromEngine:
    """Read one frame that an engine sent.

    Raises:
        BadFrame: not MessagePack, not a message of this protocol, or too large for its kind.
    """
    check_frame_size(frame)
    try:
        return _from_engine.decode(frame)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        why = f"unreadable frame of {len(frame)} bytes from an engine: {error}"
        raise BadFrame(cut(why)) from error


def decode_from_orchestrator(frame: bytes) -> FromOrchestrator:
    """Read one frame that the orchestrator sent.

    Raises:
        BadFrame: not MessagePack, not a message of this protocol, or too large for its kind.
    """
    check_frame_size(frame)
    try:
        return _from_orchestrator.decode(frame)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        why = f"unreadable frame of {len(frame)} bytes from the orchestrator: {error}"
        raise BadFrame(cut(why)) from error
