"""Size limits of messages by kind, and number ranges of fields, checked before decoding.

The limits differ by kind because decoding multiplies memory: four bytes of MessagePack can become a
hundred bytes of Python objects, so a heartbeat of the largest frame size would cost gigabytes
before its type is rejected.
"""

from typing import Annotated, Final

import msgspec

from tidegate.errors import BadFrame

FRAME_BYTES_MAX: Final = 64 * 1024 * 1024
"""Largest frame of any kind; larger ones are refused unread. The largest legitimate frame lists all
tensors of a model."""

SMALL_FRAME_BYTES_MAX: Final = 64 * 1024
"""Default limit of a kind. A heartbeat has 120 bytes, a refusal some hundreds."""

FRAME_BYTES_MAX_BY_KIND: Final = {
    "hello": 1024 * 1024,  # 200,000 turns held, 4 bytes each
    "step": 4 * 1024 * 1024,  # 4,096 turns of 64 tokens are 2 MiB
    "submit_turn": 16 * 1024 * 1024,  # a context of 4 M tokens
    "submit_turns": 4 * 1024 * 1024,  # the sender can split a larger one
    "score_tokens": 16 * 1024 * 1024,
    "score_result": 4 * 1024 * 1024,  # larger answers come in parts
    "update_weights": FRAME_BYTES_MAX,  # about 100 bytes per tensor
    "load_adapter": 16 * 1024 * 1024,  # as many bytes per tensor, of which adapters have hundreds
}
"""Limits of the kinds that may exceed :data:`SMALL_FRAME_BYTES_MAX`."""

TURN_BYTES_MAX: Final = FRAME_BYTES_MAX_BY_KIND["submit_turn"] - 1024 * 1024
"""Maximum size of a newly requested turn: context, options and media. A migrated turn is submitted
again with the tokens sampled so far; the last MiB of its frame is for 262,144 of these."""

CONTEXT_TOKENS_MAX: Final = TURN_BYTES_MAX // 4
"""Maximum context of a rollout, whatever its model supports: at 4 bytes per token, more tokens
never fit the frame of a turn."""

ENGINE_FRAME_BYTES_MAX: Final = FRAME_BYTES_MAX_BY_KIND["step"]
"""Largest frame that an engine may send, of any kind."""

TEXT_CHARS_MAX: Final = 1000
"""Maximum length of human-readable text. Longer texts are truncated, so an error always fits."""

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""Non-negative integer that fits the signed 64 bits of files and databases."""

Seconds = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
"""Positive, finite duration in seconds; NaN or infinity would break comparisons with a clock."""


class _Kind(msgspec.Struct):
    """Decodes only the kind of a large frame, before the rest is decoded."""

    kind: str


_kind: Final = msgspec.msgpack.Decoder(_Kind)


def cut(text: str) -> str:
    """Truncate a text to ``TEXT_CHARS_MAX`` characters."""
    return text if len(text) <= TEXT_CHARS_MAX else f"{text[:TEXT_CHARS_MAX]}…"


def check_frame_size(frame: bytes) -> None:
    """Check a frame's size against the limit of its kind, without decoding the rest of it.

    Raises:
        BadFrame: the frame is larger than its kind allows, or large and of no readable kind.
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
