"""Messages between rank 0 of a multi-rank engine and its other ranks, over a socket pair.

Both ends run the same version and share no network, so these are not part of the protocol with the
orchestrator. Tensors for all-reduce travel separately.
"""

import msgspec

from tidegate.transport.messages import InitWeights, StartWeightUpdate, UpdateWeights
from tidegate.transport.sleep_messages import Sleep, Wake


class RankMessage(msgspec.Struct, frozen=True, tag_field="kind"):
    """Base class of the messages between ranks."""


class RankScoring(msgspec.Struct, frozen=True, array_like=True):
    """Scoring options of a row, as in the engine's own record."""

    positions: int
    reads: str
    token_ids: bytes
    """int32: the tokens to score."""
    top_logprobs: int
    temperature: float


class RankRow(msgspec.Struct, frozen=True, array_like=True):
    """The part of a step's row that every rank computes. Sampling options stay on rank 0."""

    token_ids: bytes
    """int32: tokens of the row to compute."""
    start: int
    block_table: bytes
    """int32: KV block numbers of the sequence."""
    samples: bool
    adapter: str | tuple[str, int] = ""
    scoring: RankScoring | None = None


class InitProcessGroup(RankMessage, frozen=True, tag="init_process_group"):
    """All ranks have loaded their shards; initialise the process group."""

    keys: tuple[bytes, bytes, bytes] | None = None
    """The engine's public and secret key, and the orchestrator's public key, for remote weights."""


class RunStep(RankMessage, frozen=True, tag="run_step"):
    """Compute this step."""

    rows: list[RankRow]


class ForwardWeightMessage(RankMessage, frozen=True, tag="forward_weight_message"):
    """Forwards an orchestrator message on weights, for each rank's own staging."""

    message: InitWeights | StartWeightUpdate | UpdateWeights
    attempt: int = 0
    """For a start: number that identifies this update attempt in the answers."""
    live_version: int | None = None
    """For a start: the live version; None if there is none."""


class AbortWeightUpdate(RankMessage, frozen=True, tag="abort_weight_update"):
    """Discard the update in progress; ``why`` is given if the weights are about to sleep."""

    reason: str = ""


class SwapWeights(RankMessage, frozen=True, tag="swap_weights"):
    """Use the staged weights from the next step on."""

    version: int


class RankSleep(RankMessage, frozen=True, tag="rank_sleep"):
    """Release memory; no step follows before the memory is back."""

    request: Sleep


class RankWake(RankMessage, frozen=True, tag="rank_wake"):
    """Allocate the memory again."""

    request: Wake


ToRank = (
    InitProcessGroup
    | RunStep
    | ForwardWeightMessage
    | AbortWeightUpdate
    | SwapWeights
    | RankSleep
    | RankWake
)


class RankLoaded(RankMessage, frozen=True, tag="rank_loaded"):
    """A rank has loaded its shard of the model directory."""


class RankStaged(RankMessage, frozen=True, tag="rank_staged"):
    """A rank has staged an update completely, or refused it."""

    attempt: int
    refusal: str = ""
    """Reason of the refusal; empty if complete."""


class RankMemory(RankMessage, frozen=True, tag="rank_memory"):
    """A rank has released or re-allocated its memory, or failed to."""

    freed_bytes: int = 0
    needs_weights: bool = False
    failure: str = ""
    """Reason of the failure; empty if successful."""


class RankFailed(RankMessage, frozen=True, tag="rank_failed"):
    """A rank has failed and ends."""

    message: str


FromRank = RankLoaded | RankStaged | RankMemory | RankFailed

_encoder = msgspec.msgpack.Encoder()
_to_rank: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
_from_rank: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)


def encode(message: RankMessage) -> bytes:
    """Encode a message for the socket pair."""
    return _encoder.encode(message)


def decode_to_rank(frame: bytes) -> ToRank:
    """Decode a message from rank 0."""
    return _to_rank.decode(frame)


def decode_from_rank(frame: bytes) -> FromRank:
    """Decode a message from another rank."""
    return _from_rank.decode(frame)
