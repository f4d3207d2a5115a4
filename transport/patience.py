"""How often does a peer get an answer to nonsense? So often in a while; then it is only counted.

Answers wait in memory until the peer reads them, so one that sends nonsense and reads nothing would
fill it. It knows peers by name and no messages; time is an argument.
"""

PEERS_MAX = 8192
"""Remembered in one interval; peers beyond them get no answer until the next."""


class Patience:
    """A number of answers per peer and interval."""

    def __init__(self, *, answers_max: int, interval_s: float) -> None:
        self._answers_max = answers_max
        self._interval_s = interval_s
        self._until_s = float("-inf")
        self._answered: dict[bytes, int] = {}
        """In the interval that ends at ``_until_s``; at most :data:`PEERS_MAX` of them."""

    def has(self, peer: bytes, now_s: float) -> bool:
        """Whether ``peer`` may be answered once more now; asking counts as having done so."""
        if now_s >= self._until_s:
            self._until_s = now_s + self._interval_s
            self._answered.clear()
        answered = self._answered.get(peer, 0)
        if answered >= self._answers_max or (not answered and len(self._answered) >= PEERS_MAX):
            return False
        self._answered[peer] = answered + 1
        return True
