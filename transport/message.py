"""What do all messages have in common? Their kind; nothing here knows what any of them says."""

import msgspec


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """Base of all messages; ``kind`` on the wire picks the subclass."""
