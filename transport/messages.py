"""Wire protocol between engines and orchestrator: one msgspec Struct per message, as MessagePack.

docs/protocol.md describes them for workers in other languages. One message is one ZeroMQ frame
(behind the identity frame that a ROUTER adds). Arrays travel as MessagePack ``bin`` in raw
little-endian. New fields go last and have defaults, so an old peer can still read a new message.
The protocol has turns, but no rollouts, groups or rewards. Structs of one subject are in sibling
modules and re-exported here: ``sampling.py``, ``scoring.py`` and ``sleep_messages.py``.

Letters in shapes: R rows (turns) of a step message, N tokens in it.
"""

from typing import Annotated, Any

import msgspec

from tidegate.errors import BadFrame
from tidegate.transport.attachments import Attachment as Attachment
from tidegate.transport.limits import Count, Seconds, check_frame_size, cut
from tidegate.transport.media import Media as Media
from tidegate.transport.media import MediaKind
from tidegate.transport.message import KV_POLICIES as KV_POLICIES
from tidegate.transport.message import PAUSE_MODES as PAUSE_MODES
from tidegate.transport.message import KvPolicy as KvPolicy
from tidegate.transport.message import Message as Message
from tidegate.transport.message import PauseMode as PauseMode
from tidegate.transport.sampling import SamplingParams as SamplingParams
from tidegate.transport.scoring import CancelScore, ScoreFailed, ScoreResult, ScoreTokens
from tidegate.transport.sleep_messages import Asleep as Asleep
from tidegate.transport.sleep_messages import Awake as Awake
from tidegate.transport.sleep_messages import MemoryTag, SleepLevel
from tidegate.transport.sleep_messages import Sleep as Sleep
from tidegate.transport.sleep_messages import SleepRequestFailed as SleepRequestFailed
from tidegate.transport.sleep_messages import Wake as Wake

PROTOCOL = 3
"""Protocol version. A peer with another version is refused in the handshake."""

RUNNING, STOP, LENGTH, ABORT, CANCELLED = range(5)
"""Finish codes of a step's rows: turn continues; stop token sampled; ``max_tokens`` reached; ended
by a pause or evicted, to be continued on another engine; cancelled on request."""

FINISH_REASONS = ("running", "stop", "length", "abort", "cancelled")
"""Names of the finish codes, indexed by code."""


AdapterName = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
"""Name of an adapter, unique in its run."""

AdapterVersion = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
"""Number of an adapter's version: each adapter counts its own publishes, from 1."""

LIVE_ADAPTER = 0
"""Value of ``SamplingParams.adapter_version`` for the version that is live when the turn starts,
and that later swaps replace."""


class HeldAdapter(msgspec.Struct, frozen=True, array_like=True):
    """Live version of one adapter on an engine, for its hello."""

    name: AdapterName
    """Name of the adapter."""
    version: AdapterVersion
    """Number among the adapter's own versions."""


# ---------------------------------------------------------------- engine -> orchestrator


class Hello(Message, frozen=True, kw_only=True, tag="hello"):
    """First message of an engine on each connection, including reconnects."""

    protocol: int
    engine: str
    """Engine name, unique within the run, e.g. ``engine-0``."""
    epoch: Count
    """Increases with each process start of this engine, e.g. the clock in nanoseconds. ``(engine,
    epoch, seq)`` identifies a step message."""
    weight_version: Count
    """Version of the live weights; 0 for those of the model directory."""
    architecture: str
    """Architecture name from config.json, e.g. ``Qwen3ForCausalLM``."""
    vocab_size: Count
    """Number of token ids; a step has only ids below it."""
    context_tokens_max: Count
    """Maximum number of tokens of a context: prompt and output."""
    max_running_turns: Count
    """Maximum number of turns that run at the same time."""
    num_kv_blocks: Count
    """Number of blocks of the KV cache."""
    block_tokens: Count
    """Tokens per block of the KV cache."""
    pause_modes: list[PauseMode]
    """Pause modes that the engine supports."""
    kv_policies: list[KvPolicy]
    """Supported KV policies of a weight update."""
    weight_channels: list[str]
    """Names of the weight channels that the engine can read."""
    pid: Count = 0
    """Process id on the engine's host; 0: not reported."""
    first_seq: Count = 0
    """First step message that is not acknowledged. It and later ones are replayed after this hello.
    0 in an epoch's first hello."""
    next_seq: Count = 0
    """Number of the next new step message: the replay is ``[first_seq, next_seq)``."""
    turns: bytes = b""
    """uint32: handles of the turns that the engine holds (waiting, running or frozen). A submitted
    turn that is not listed has ended in a step message before ``next_seq``, or was lost in
    transit."""
    model_code: str = ""
    """Implementation of the model: ``tidegate``, or ``transformers`` for an architecture without a
    built-in implementation. Empty: not reported."""
    speculative_method: str = ""
    """Source of draft tokens for speculative decoding: ``lookup``, ``rollouts`` or ``draft``.
    Empty: none."""
    score_kinds: list[str] = []
    """Values of ``ScoreTokens.score_kind`` that the engine supports."""
    is_deterministic: bool = False
    """Whether the same request, weights and seed give the same bits, whatever else is in the
    batch."""
    sleep_levels: list[SleepLevel] = []
    """Supported sleep levels; empty if the engine cannot release memory."""
    asleep: list[MemoryTag] = []
    """Memory that is asleep now; sleep persists across reconnects."""
    needs_weights: bool = False
    """Whether the weights of ``weight_version`` were discarded, so a full update is needed."""
    supports_submit_turns: bool = False
    """Whether the engine supports ``SubmitTurns``."""
    supports_sessions: bool = False
    """Whether the engine wants ``EndSessions`` messages."""
    tensor_parallel_size: Count = 1
    """Number of processes that compute the model together, each a part of it."""
    quantization: str = ""
    """Quantization applied to incoming weights: ``int8`` or ``fp8``. Empty: weights are served as
    published."""
    media: list[MediaKind] = []
    """Media kinds that the model reads beside tokens; empty: tokens only."""
    dtype: str = ""
    """Compute dtype of the model: ``float32``, ``bfloat16``, ``float16``. Empty: not reported."""
    adapters_max: Count = 0
    """Maximum number of versions of LoRA adapters in memory, for adapters with weight versions of
    their own. 0: the engine serves only adapters that are part of the weights."""
    adapters: list[HeldAdapter] = []
    """Live versions of adapters with versions of their own; they outlive a connection."""
    device: str = ""
    """Device that the model is computed on: ``cpu``, ``cuda:0``. Empty: not reported."""
    warnings: list[str] = []
    """What makes the engine slow or its model unusual, for the run's user to read: no compiler, a
    model computed by ``transformers``. A run logs each text once."""


class KvSpan(msgspec.Struct, frozen=True, array_like=True):
    """Weight version that computed the KV of the context positions ``[start, end)``."""

    version: Count
    start: Count
    end: Count


class Prefill(msgspec.Struct, frozen=True, array_like=True):
    """Reports that a turn's KV was computed from tokens: at its start, or again (recompute,
    preemption)."""

    turn: Count
    output_tokens: Count
    """Number of output tokens that this submission had when the KV was computed. The output tokens
    with this index and higher attend to this KV, until the turn's next ``Prefill``."""
    spans: list[KvSpan]
    """KV versions over all context positions (prompt, then ``output_tokens`` tokens), in
    order and without gaps."""
    cached_tokens: Count = 0
    """Number of these positions whose KV came from the prefix cache."""


class Step(Message, frozen=True, kw_only=True, tag="step"):
    """All tokens of one engine step, in columns, all sampled by weight version ``version``.

    Output token k is sampled at the position before its own, and the same step computes that
    position's KV. So the turn's ``Prefill`` and the versions of its later steps together show which
    weights computed each position's KV.
    """

    seq: Count
    """Number of the step message, counted from 0 within an epoch; the orchestrator acknowledges
    it."""
    version: Count
    turns: bytes
    """uint32 [R]: turn handle of each row."""
    token_ids: bytes
    """int32 [N]: sampled tokens, row after row."""
    logprobs: bytes
    """float32 [N]: natural log of the probability that each token was sampled with."""
    finish: bytes = b""
    """uint8 [R]: finish code of each row; empty if every row continues."""
    counts: bytes = b""
    """uint32 [R]: tokens per row; empty if each row has one."""
    prefills: list[Prefill] = []
    """Prefills of turns whose next token is in this step."""
    started_us: Count = 0
    """Start of the step on the engine's monotonic clock, in microseconds."""
    busy_us: Count = 0
    """Duration of the step, in microseconds."""
    queued_turns: Count = 0
    """Number of turns waiting in the engine after this step."""
    free_blocks: Count = 0
    """Number of free KV blocks after this step."""
    attachments: list[Attachment] = []
    """Attachments of this step's turns, for those that requested any; each once per turn."""
    drafted_tokens: Count = 0
    """Draft tokens that this step verified (speculative decoding)."""
    accepted_tokens: Count = 0
    """Draft tokens that this step accepted."""
    adapter: str = ""
    """Name of the adapter of all rows, if the adapter has weight versions of its own. Then
    ``version`` and the spans of ``prefills`` are versions of the adapter. A decode step that mixes
    such adapters sends one message for each (adapter, version). If empty, ``version`` is a version
    of the run's weights."""


class TurnFailed(Message, frozen=True, kw_only=True, tag="turn_failed"):
    """The engine can never serve this turn as requested; ``message`` says why and what to change.

    The turn may have tokens already, if its logits processor failed or excluded every token.
    """

    turn: Count
    """Handle of the turn that can't be served."""
    message: str


class EngineHeartbeat(Message, frozen=True, kw_only=True, tag="engine_heartbeat"):
    """Liveness message, sent at least every ``Welcome.heartbeat_interval_s``."""

    weight_version: Count
    """Version of the live weights."""
    running_turns: Count
    """Number of turns that run."""
    waiting_turns: Count
    """Number of turns in the queue."""
    free_blocks: Count
    """Number of free KV blocks."""
    sent_us: Count
    """Send time on the engine's monotonic clock, in microseconds."""
    out_of_memory_steps: Count = 0
    """Number of steps so far that ran out of memory and were retried with a smaller batch."""


class TurnsPaused(Message, frozen=True, kw_only=True, tag="turns_paused"):
    """The requested pause has taken effect: no turn runs."""

    mode: PauseMode
    """Mode of the pause that is in effect."""


class TurnsResumed(Message, frozen=True, kw_only=True, tag="turns_resumed"):
    """Turns run again after a pause."""


class Goodbye(Message, frozen=True, kw_only=True, tag="goodbye"):
    """The engine leaves on purpose; its unfinished turns are to be continued on other engines."""

    reason: str
    has_failed: bool = False
    """Whether the engine ends because of an error, which one of its turns may have caused."""
    is_requested: bool = False
    """Whether it was asked to end, by a message or a signal: then it is not started again."""


class MessageRejected(Message, frozen=True, kw_only=True, tag="message_rejected"):
    """Sent by either end: the peer's last message was unreadable or invalid, for this reason."""

    message: str


# ---------------------------------------------------------------- orchestrator -> engine


class Welcome(Message, frozen=True, kw_only=True, tag="welcome"):
    """Accepts the engine into the run."""

    heartbeat_interval_s: Seconds
    """Longest time between two messages of a peer; an idle one sends heartbeats."""
    orchestrator_timeout_s: Seconds
    """Time without any message from the orchestrator after which the engine exits, so that no
    orphan processes are left."""
    credit_steps: Annotated[int, msgspec.Meta(ge=1, le=2**31)]
    """Maximum number of unacknowledged step messages; then the engine waits. Bounds both ends'
    memory."""


class HelloRejected(Message, frozen=True, kw_only=True, tag="hello_rejected"):
    """Rejects the engine, for this reason."""

    message: str


class OrchestratorHeartbeat(Message, frozen=True, kw_only=True, tag="orchestrator_heartbeat"):
    """Liveness message of the orchestrator."""


class Ack(Message, frozen=True, kw_only=True, tag="ack"):
    """Acknowledges all step messages up to and including ``seq``."""

    seq: Count


class SubmitTurn(Message, frozen=True, kw_only=True, tag="submit_turn"):
    """Requests generation of one turn from these tokens."""

    turn: Count
    """uint32 handle, never reused within one engine epoch."""
    token_ids: bytes
    """int32: the prompt, followed by the tokens that earlier submissions of this turn sampled."""
    sampling: SamplingParams
    """Sampling options of the turn."""
    priority: int = 0
    """Scheduling priority; lower runs first, ties in order of arrival."""
    sampled_before: int = 0
    """Number of this turn's output tokens at the end of ``token_ids``. The i-th output token of a
    turn uses the i-th random number of its seed, on whichever engine it is sampled."""
    session: Count = 0
    """Session that this context belongs to. Later turns of the session may extend this context, so
    its KV should be kept in preference to others. 0: none. Affects speed only."""
    media: list[Media] = []
    """Media of the context, in order; only for engines that support their kinds."""


class EndSessions(Message, frozen=True, kw_only=True, tag="end_sessions"):
    """No more turns of these sessions will be sent to this engine; unknown sessions are ignored."""

    sessions: list[Count]
    """Numbers of the sessions that have ended."""


class SubmitTurns(Message, frozen=True, kw_only=True, tag="submit_turns"):
    """Submits several turns at once; only for engines with ``Hello.supports_submit_turns``."""

    turns: list[SubmitTurn]
    """Turns in the order in which they would have been sent separately."""


class CancelTurn(Message, frozen=True, kw_only=True, tag="cancel_turn"):
    """Stops this turn; unknown or finished handles are ignored."""

    turn: Count
    """Handle of the turn to stop."""


class Pause(Message, frozen=True, kw_only=True, tag="pause"):
    """Pauses running turns according to ``mode``; answered by ``TurnsPaused`` once it has taken
    effect."""

    mode: PauseMode
    """What happens to running turns: ``abort`` ends, ``keep`` freezes, ``wait`` finishes them."""
    clear_cache: bool = False
    """Whether to clear the prefix cache, so that later turns recompute their context."""


HAND_BACK = Pause(mode="abort")
"""Ends an engine's running turns, which it hands back with all their tokens."""


class Resume(Message, frozen=True, kw_only=True, tag="resume"):
    """Ends a pause; answered by ``TurnsResumed``."""


class Shutdown(Message, frozen=True, kw_only=True, tag="shutdown"):
    """Ends the engine process, cleanly, now."""


# ---------------------------------------------------------------- weights


class TensorPatch(msgspec.Struct, frozen=True, array_like=True):
    """Marks a tensor whose bytes in an update are a patch: its changed elements, compressed."""

    changed: Count
    """Number of changed elements of the tensor."""
    gap_bytes: Count
    """Bytes of the decompressed patch that encode the gaps between changed elements; their
    differences follow."""
    result_crc32: Count | None = None
    """CRC-32 (zlib) of the whole tensor's bytes after the patch; None if no check is requested."""


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """Name, type and location of one tensor in the buffer of an update."""

    name: str
    dtype: str
    """Torch's name of the dtype: ``float32``, ``bfloat16``, …"""
    shape: Annotated[list[int], msgspec.Meta(max_length=16)]
    offset: Count
    """Offset of the first byte from the start of the buffer."""
    nbytes: Count
    """Number of bytes of the tensor in the buffer; of its patch, if it has one."""
    crc32: Count | None = None
    """CRC-32 (zlib) of the bytes in the buffer; None if no check is requested."""
    patch: TensorPatch | None = None
    """Set if the bytes are a patch of the same tensor in the version that the update follows; then
    ``nbytes`` is the patch's size. None: the bytes are the whole tensor."""


class CudaIpcHandle(msgspec.Struct, frozen=True, array_like=True):
    """CUDA IPC handle of an update's buffer, as torch exports it."""

    gpu: str
    """UUID of the GPU that has the memory."""
    handle: bytes
    """IPC handle of the allocation that contains the buffer."""
    nbytes: Count
    """Size of the buffer, in bytes."""
    offset: Count
    """Offset of the buffer from the start of the allocation, in bytes."""
    ref_counter_handle: bytes
    """Name of the shared memory that holds torch's reference counters."""
    ref_counter_offset: Count


class Adapter(msgspec.Struct, frozen=True, array_like=True):
    """A LoRA adapter: its name, and the scale of the product of its matrices."""

    name: str
    scale: float
    """Factor of the product of the adapter's matrices: alpha / r."""


class BaseVersions(msgspec.Struct, frozen=True, array_like=True):
    """Range of versions ``[first, last]`` that differ from an update only in the update's
    tensors."""

    first: Count
    """Oldest version of the range."""
    last: Count
    """Newest version of the range, included."""


# A weight update has vLLM's four phases: init, start, update, finish. The orchestrator sends the
# first once per connection and the others for each version; the tensors travel through a weight
# channel.


class InitWeights(Message, frozen=True, kw_only=True, tag="init_weights"):
    """Phase 1 of 4: sets up the weight channel."""

    channel: str
    """Name of the channel, one of ``Hello.weight_channels``."""
    info: dict[str, Any] = {}


class StartWeightUpdate(Message, frozen=True, kw_only=True, tag="start_weight_update"):
    """Phase 2 of 4: allocates room for ``version`` beside the live weights."""

    version: Count


class UpdateWeights(Message, frozen=True, kw_only=True, tag="update_weights"):
    """Phase 3 of 4, once per buffer: copy these tensors. Once all have been copied, the engine
    answers with ``WeightsStaged`` or ``WeightsFailed``."""

    version: Count
    location: str
    """Location of the buffer in the channel's own terms: a segment's path, a file's path."""
    tensors: list[TensorSpec]
    """Tensors in this buffer; empty if the chunk has no buffer."""
    is_last: bool = True
    """Whether this is the last chunk: then check names, shapes and dtypes, and answer."""
    base_versions: BaseVersions | None = None
    """Versions that a partial update applies to: if the live version is among them, missing tensors
    are taken from it, otherwise the update is refused. None: the update is complete. Equal in each
    chunk of an update."""
    adapter: Adapter | None = None
    """The adapter that all of these tensors belong to; None: they belong to the model. A version
    has only those adapters that come with it."""
    ipc_handle: CudaIpcHandle | None = None
    """The buffer on a GPU, which ``location`` cannot name."""


class FinishWeightUpdate(Message, frozen=True, kw_only=True, tag="finish_weight_update"):
    """Phase 4 of 4: swap ``version`` in between two steps. Answered by ``WeightsLive``."""

    version: Count
    pause_mode: PauseMode
    kv_policy: KvPolicy


class WeightsStaged(Message, frozen=True, kw_only=True, tag="weights_staged"):
    """A version is staged beside the live one, checked, and ready to be swapped in."""

    version: Count
    staging_us: Count = 0
    """Time from the start of the update until it was staged, in microseconds."""


class WeightsLive(Message, frozen=True, kw_only=True, tag="weights_live"):
    """From now on every token of this engine is sampled by ``version``."""

    version: Count
    swapped_us: Count = 0
    """Time of the swap on the engine's monotonic clock, in microseconds."""
    recomputed_turns: Count = 0
    """Number of frozen turns whose KV is computed again."""
    stall_us: Count = 0
    """Time that no turn made progress because of the swap, in microseconds."""


class WeightsFailed(Message, frozen=True, kw_only=True, tag="weights_failed"):
    """An update was refused; the engine keeps serving the old version."""

    version: Count
    message: str


# ---------------------------------------------------------------- adapters

# LoRA adapters with weight versions of their own, for engines whose hello has ``adapters_max``. One
# adapter is staged, swapped and tagged independently of the model's weights and of all other
# adapters. The reasons are in docs/decisions/adapter-versions.md.


class LoadAdapter(Message, frozen=True, kw_only=True, tag="load_adapter"):
    """Loads one version of an adapter beside all versions that are served. Answered by
    ``AdapterLoaded`` or ``AdapterFailed``. It serves pinned turns at once, and others from
    ``SwapAdapter`` on."""

    name: AdapterName
    """Name of the adapter."""
    version: AdapterVersion
    """Number among the adapter's own versions."""
    scale: float
    """Factor of the product of the adapter's matrices."""
    chunks: list[UpdateWeights]
    """Location of the tensors in the weight channel; ``version`` and ``adapter`` of a chunk have no
    meaning here."""
    is_live: bool = False
    """Whether this is the adapter's live version, sent again because the engine asked for it. Takes
    effect unless a later version is live."""
    is_staged: bool = False
    """Whether ``SwapAdapter`` follows; the version stays in memory until then."""


class SwapAdapter(Message, frozen=True, kw_only=True, tag="swap_adapter"):
    """Makes a loaded version the adapter's live one between two steps. Answered by ``AdapterLive``.

    Applies to the turns of this adapter only: ``abort`` ends the running ones, ``keep`` continues
    them under the new version, ``wait`` lets them end under the old version while new turns use the
    new one. Pinned turns keep their version.
    """

    name: AdapterName
    """Name of the adapter."""
    version: AdapterVersion
    """Number among the adapter's own versions."""
    pause_mode: PauseMode
    """What happens to the adapter's running turns."""
    kv_policy: KvPolicy
    """What happens to the KV of its turns that continue."""


class UnloadAdapter(Message, frozen=True, kw_only=True, tag="unload_adapter"):
    """Drops an adapter, or one version of it, and refuses the turns that use it; unknown ones are
    ignored. Also the answer to ``AdapterNeeded`` for a version that does not exist (any more)."""

    name: AdapterName
    """Name of the adapter."""
    version: AdapterVersion | None = None
    """Version to drop; None for all versions."""


class AdapterLoaded(Message, frozen=True, kw_only=True, tag="adapter_loaded"):
    """A version of an adapter is in memory and fits the model."""

    name: AdapterName
    """Name of the adapter."""
    version: AdapterVersion
    """Number among the adapter's own versions."""
    staging_us: Count = 0
    """Time from the request until it was loaded, in microseconds."""


class AdapterFailed(Message, frozen=True, kw_only=True, tag="adapter_failed"):
    """A version of an adapter was refused, for this reason; nothing else has changed."""

    name: AdapterName
    """Name of the adapter."""
    version: AdapterVersion
    """Number among the adapter's own versions."""
    message: str
    """Reason of the refusal."""


class AdapterLive(Message, frozen=True, kw_only=True, tag="adapter_live"):
    """From now on turns that follow the adapter's live version are sampled by this one."""

    name: AdapterName
    """Name of the adapter."""
    version: AdapterVersion
    """Number among the adapter's own versions."""
    swapped_us: Count = 0
    """Time of the swap on the engine's monotonic clock, in microseconds."""
    recomputed_turns: Count = 0
    """Number of running turns whose KV is computed again."""


class AdapterNeeded(Message, frozen=True, kw_only=True, tag="adapter_needed"):
    """Turns wait for an adapter that the engine does not hold. Answered by ``LoadAdapter`` once
    there is such a version, or by ``UnloadAdapter``."""

    name: AdapterName
    """Name of the adapter."""
    version: Count = LIVE_ADAPTER
    """Version of pinned turns; ``LIVE_ADAPTER`` for the live one."""


FromEngine = (
    Hello
    | Step
    | TurnFailed
    | ScoreResult
    | ScoreFailed
    | EngineHeartbeat
    | WeightsStaged
    | WeightsLive
    | WeightsFailed
    | TurnsPaused
    | TurnsResumed
    | Goodbye
    | MessageRejected
    | Asleep
    | Awake
    | SleepRequestFailed
    | AdapterLoaded
    | AdapterFailed
    | AdapterLive
    | AdapterNeeded
)
FromOrchestrator = (
    Welcome
    | HelloRejected
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
    | MessageRejected
    | Sleep
    | Wake
    | LoadAdapter
    | SwapAdapter
    | UnloadAdapter
)

_encoder = msgspec.msgpack.Encoder()
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
_from_orchestrator: msgspec.msgpack.Decoder[FromOrchestrator] = msgspec.msgpack.Decoder(
    FromOrchestrator
)


def encode(message: Message) -> bytes:
    """Encode a message as one ZeroMQ frame."""
    return _encoder.encode(message)


def decode_from_engine(frame: bytes) -> FromEngine:
    """Decode one frame from an engine.

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
    """Decode one frame from the orchestrator.

    Raises:
        BadFrame: not MessagePack, not a message of this protocol, or too large for its kind.
    """
    check_frame_size(frame)
    try:
        return _from_orchestrator.decode(frame)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        why = f"unreadable frame of {len(frame)} bytes from the orchestrator: {error}"
        raise BadFrame(cut(why)) from error
