"""Rate limiter per peer, for replies to malformed messages and for log warnings.

Replies wait in memory until the peer reads them, so a peer that sends garbage and reads nothing
would otherwise fill it. Time is an argument.
"""

PEERS_MAX = 8192
"""Maximum number of peers tracked per interval; further peers get no reply until the next one."""


class RateLimiter:
    """Allows ``answers_max`` replies per peer and fixed interval."""

    def __init__(self, *, answers_max: int, interval_s: float) -> None:
        self._answers_max = answers_max
        self._interval_s = interval_s
        self._until_s = float("-inf")
        self._answered: dict[bytes, int] = {}
        """Replies per peer in the interval that ends at ``_until_s``; at most :data:`PEERS_MAX`
        peers."""

    def has(self, peer: bytes, now_s: float) -> bool:
        """Return whether ``peer`` may get one more reply now, and count it if so."""
        if now_s >= self._until_s:
            self._until_s = now_s + self._interval_s
            self._answered.clear()
        answered = self._answered.get(peer, 0)
        if answered >= self._answers_max or (not answered and len(self._answered) >= PEERS_MAX):
            return False
        self._answered[peer] = answered + 1
        return True
