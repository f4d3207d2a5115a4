"""What do messages have in common? Their kind, and words that several of them use.

Nothing here knows what any of them says.
"""

from typing import Literal

import msgspec

PauseMode = Literal["abort", "keep", "wait"]
"""What a pause does to running turns: ``abort`` ends them now, handing back what they have;
``keep`` freezes them; ``wait`` lets them finish and starts nothing new."""

KvPolicy = Literal["keep", "recompute"]
"""What new weights do to the KV of frozen turns: ``keep`` it, or ``recompute`` it under them."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """Base of all messages; ``kind`` on the wire picks the subclass."""
