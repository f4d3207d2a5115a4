"""References to images, audio and video in a turn's context, as they travel in ``SubmitTurn``.

Episodes and the core hold them; adapters of external engines write them into requests. Only
references travel; the engine fetches, decodes and embeds the content. The chat template has already
placed the content's placeholder tokens.
"""

from typing import Annotated, Literal

import msgspec

from tidegate.transport.limits import Count

MediaKind = Literal["image", "audio", "video"]

MEDIA_MAX = 256
"""Maximum number of media in one turn's context."""

DATA_URL_CHARS_MAX = 1024 * 1024
"""Maximum length of a ``data:`` URL, which is sent with each turn, journalled and kept. A
screenshot has 200 KB; put larger content into a file or behind a URL."""

URL_CHARS_MAX = 8192
"""Maximum length of any other reference, in characters."""

MEDIA_CHARS_MAX = 2 * DATA_URL_CHARS_MAX
"""Maximum total length of a turn's references, because a frame of several turns holds 4 MiB."""


class Placeholders(msgspec.Struct, frozen=True, array_like=True):
    """Placeholder tokens of an image in a context: one for each token that stands for it."""

    token_offset: Count
    """Number of context tokens before the first."""
    tokens: Count
    digest: Annotated[str, msgspec.Meta(max_length=64)]
    """SHA-256 of the image's file, in hexadecimal digits: another file needs other tokens."""


class Media(msgspec.Struct, frozen=True, array_like=True):
    """One image, audio clip or video in a context."""

    kind: MediaKind
    url: Annotated[str, msgspec.Meta(min_length=1, max_length=DATA_URL_CHARS_MAX)]
    """URL, path on the engine's host, or ``data:…`` URL."""
    position: Count | Placeholders = 0
    """Number of context tokens before the prompt piece that this medium came with, whose one
    placeholder the engine repeats; or the image's placeholders, if they are repeated. Media are in
    the order of their placeholder tokens."""

    @property
    def token_offset(self) -> int:
        """Number of context tokens before the medium, or before the prompt piece with it."""
        return self.position if isinstance(self.position, int) else self.position.token_offset

    @property
    def tokens(self) -> int:
        """Number of the medium's placeholder tokens; 0 if the engine is to repeat its one."""
        return 0 if isinstance(self.position, int) else self.position.tokens
