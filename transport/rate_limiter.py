"""Rate limiter per peer, for replies to malformed messages and for log warnings.

Replies wait in memory until the peer reads them, so a peer that sends garbage and reads nothing
would otherwise fill the memory. The time is an argument.
"""

PEERS_MAX = 8192
"""Maximum number of peers tracked per interval; further peers get no reply until the next one."""


class RateLimiter:
    """Allows ``replies_max`` replies per peer and fixed interval."""

    def __init__(self, *, replies_max: int, interval_s: float) -> None:
        self._replies_max = replies_max
        self._interval_s = interval_s
        self._until_s = float("-inf")
        self._replies: dict[bytes, int] = {}
        """Replies per peer in the interval that ends at ``_until_s``; at most :data:`PEERS_MAX`
        peers."""

    def has(self, peer: bytes, now_s: float) -> bool:
        """Return whether ``peer`` may get one more reply now, and count it if so."""
        if now_s >= self._until_s:
            self._until_s = now_s + self._interval_s
            self._replies.clear()
        replies = self._replies.get(peer, 0)
        if replies >= self._replies_max or (not replies and len(self._replies) >= PEERS_MAX):
            return False
        self._replies[peer] = replies + 1
        return True
