"""What does a turn read beside tokens? Images, audio and video, by reference.

Where they are, never what is in them: who fetches, decodes and embeds them is the engine. Which
tokens stand for them in the context, the model's chat template has said.
"""

from typing import Annotated, Literal

import msgspec

from tidegate.transport.limits import Count

MediaKind = Literal["image", "audio", "video"]

MEDIA_MAX = 256
"""Of one turn's context, all together."""

DATA_URL_CHARS_MAX = 1024 * 1024
"""Of a reference that is its own content: it is sent with each turn, journalled and kept. A
screenshot has 200 KB. Larger ones belong in a file, or behind a URL."""

URL_CHARS_MAX = 8192
"""Of any other reference."""

MEDIA_CHARS_MAX = 2 * DATA_URL_CHARS_MAX
"""Of a turn's references together: a frame that has several turns holds 4 MiB."""


class Media(msgspec.Struct, frozen=True, array_like=True):
    """One image, piece of sound or video in a context."""

    kind: MediaKind
    url: Annotated[str, msgspec.Meta(min_length=1, max_length=DATA_URL_CHARS_MAX)]
    """A URL, a path on the engine's host, or ``data:…``."""
    at: Count = 0
    """So many tokens of the context stand before the piece of it that this was given with. Media
    are in the order in which their placeholders stand in the tokens."""
