"""How much may one message say? Sizes by kind, and ranges of numbers; checked before it is decoded.

Why by kind: decoding multiplies. Four bytes of MessagePack can become a hundred of Python, so a
heartbeat that fills the largest frame there is would cost gigabytes before its type is refused.
"""

from typing import Annotated, Final

import msgspec

from tidegate.errors import BadFrame

FRAME_BYTES_MAX: Final = 64 * 1024 * 1024
"""Larger frames are refused unread. The biggest honest one lists a model's tensors to be read."""

SMALL_FRAME_BYTES_MAX: Final = 64 * 1024
"""What a message of any kind may have: a heartbeat has 120, a refusal some hundreds."""

FRAME_BYTES_MAX_BY_KIND: Final = {
    "hello": 1024 * 1024,  # 200,000 turns held, 4 bytes each
    "step": 4 * 1024 * 1024,  # 4,096 turns of 64 tokens are 2 MiB
    "submit_turn": 16 * 1024 * 1024,  # a context of 4 M tokens
    "submit_turns": 4 * 1024 * 1024,  # their sender can send fewer at once
    "score_tokens": 16 * 1024 * 1024,
    "scored": 4 * 1024 * 1024,  # of a larger answer, a part
    "update_weights": FRAME_BYTES_MAX,  # a tensor's place takes about 100 bytes
}
"""Kinds that may be larger than :data:`SMALL_FRAME_BYTES_MAX`."""

TURN_BYTES_MAX: Final = FRAME_BYTES_MAX_BY_KIND["submit_turn"] - 1024 * 1024
"""Of a turn when it is asked for: context, options and media. A turn that goes on elsewhere is sent
again with the tokens sampled so far; the last MiB of its frame is for 262,144 of these."""

CONTEXT_TOKENS_MAX: Final = TURN_BYTES_MAX // 4
"""Of a rollout's context, whatever its model reads: 4 bytes each, more never fit a turn's frame."""

ENGINE_FRAME_BYTES_MAX: Final = FRAME_BYTES_MAX_BY_KIND["step"]
"""The most that any kind of message from an engine may have."""

TEXT_CHARS_MAX: Final = 1000
"""Of what is said for people to read. Longer texts are cut, so that an error can always be told."""

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""A whole number that fits the signed 64 bits of files and databases."""

Seconds = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
"""A duration; neither infinite nor not a number, which no clock could be compared with."""


class _Kind(msgspec.Struct):
    """All that is looked at of a large frame before it is decoded."""

    kind: str


_kind: Final = msgspec.msgpack.Decoder(_Kind)


def cut(text: str) -> str:
    """The beginning of a text, if it is too long to be told in full."""
    return text if len(text) <= TEXT_CHARS_MAX else f"{text[:TEXT_CHARS_MAX]}…"


def check_frame_size(frame: bytes) -> None:
    """Refuse a frame that is larger than its kind may be, without decoding the rest of it.

    Raises:
        BadFrame: it is; or it is too large for most kinds, and of none.
    """
    if len(frame) <= SMALL_FRAME_BYTES_MAX:
        return
    try:
        kind = _kind.decode(frame).kind
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BadFrame(cut(f"unreadable frame of {len(frame)} bytes: {error}")) from error
    bytes_max = FRAME_BYTES_MAX_BY_KIND.get(kind, SMALL_FRAME_BYTES_MAX)
    if len(frame) > bytes_max:
        raise BadFrame(
            cut(f"a frame of {len(frame)} bytes; of kind {kind!r:.50} it may have {bytes_max}")
        )
