"""What does an engine's rank 0 say to its other ranks, and they to it? One process pair each.

It crosses a socket pair that only parent and child hold, and never a network; so both ends are of
one version, and nothing here is part of the protocol with the orchestrator. Tensors that are summed
travel apart from it.
"""

import msgspec

from tidegate.transport.sleep_messages import Sleep, Wake
from tidegate.transport.weight_messages import InitWeights, StartWeightUpdate, UpdateWeights


class RankMessage(msgspec.Struct, frozen=True, tag_field="kind"):
    """Base of all of these."""


class RankScoring(msgspec.Struct, frozen=True, array_like=True):
    """What is told of a row's tokens; as the engine's own record has it."""

    positions: int
    reads: str
    token_ids: bytes
    """int32."""
    top_logprobs: int
    temperature: float


class RankRow(msgspec.Struct, frozen=True, array_like=True):
    """What of a step's row every rank computes. How it is sampled is rank 0's business."""

    token_ids: bytes
    """int32."""
    start: int
    block_table: bytes
    """int32."""
    samples: bool
    adapter: str = ""
    scoring: RankScoring | None = None


class Connect(RankMessage, frozen=True, tag="connect"):
    """All ranks have loaded their part: meet."""

    keys: tuple[bytes, bytes, bytes] | None = None
    """The engine's public and secret key, and the orchestrator's: for weights from afar."""


class RunStep(RankMessage, frozen=True, tag="step"):
    """Compute this step."""

    rows: list[RankRow]


class Relay(RankMessage, frozen=True, tag="relay"):
    """The orchestrator's word on weights, for each rank's own staging."""

    message: InitWeights | StartWeightUpdate | UpdateWeights
    attempt: int = 0
    """Of a start: what answers are to name."""
    live_version: int | None = None
    """Of a start: what serves now; None: nothing."""


class Abandon(RankMessage, frozen=True, tag="abandon"):
    """Forget the update under way; without a word, or because the weights are to sleep."""

    why: str = ""


class SwapWeights(RankMessage, frozen=True, tag="swap"):
    """Compute with what is staged from the next step on."""

    version: int


class RankSleep(RankMessage, frozen=True, tag="sleep"):
    """Give memory back; no step comes before it is had again."""

    asked: Sleep


class RankWake(RankMessage, frozen=True, tag="wake"):
    """Take memory again."""

    asked: Wake


ToRank = Connect | RunStep | Relay | Abandon | SwapWeights | RankSleep | RankWake


class RankLoaded(RankMessage, frozen=True, tag="loaded"):
    """A rank has its part of the model directory."""


class RankStaged(RankMessage, frozen=True, tag="staged"):
    """An update is complete on a rank, or refused by it."""

    attempt: int
    refusal: str = ""
    """Empty: complete."""


class RankMemory(RankMessage, frozen=True, tag="memory"):
    """A rank has given its memory back, or has it again, or couldn't."""

    returned_bytes: int = 0
    lacks_weights: bool = False
    failure: str = ""
    """Empty: it could."""


class RankFailed(RankMessage, frozen=True, tag="failed"):
    """A rank's last word."""

    message: str


FromRank = RankLoaded | RankStaged | RankMemory | RankFailed

_encoder = msgspec.msgpack.Encoder()
_to_rank: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
_from_rank: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)


def encode(message: RankMessage) -> bytes:
    """As it crosses the socket pair."""
    return _encoder.encode(message)


def decode_to_rank(frame: bytes) -> ToRank:
    """What rank 0 said."""
    return _to_rank.decode(frame)


def decode_from_rank(frame: bytes) -> FromRank:
    """What another rank said."""
    return _from_rank.decode(frame)
