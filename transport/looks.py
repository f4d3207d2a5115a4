"""When is a socket read: whenever it wakes, or by the clock?

To be woken for one message costs as much as to take in the tokens of a hundred turns. So a steady
stream to which little is answered is looked for by the clock. What is counted here are wakeups,
looks and sends; it knows neither the socket nor the time.
"""

BUSY_WAKEUPS = 16
BUSY_WITHIN_S = 0.032
"""After so many wakeups within such a time, more than 500 a second, the clock takes over."""

WAKEUPS_PER_SEND = 4
"""Unless more is sent than this: somebody may wait for the answers."""

LOOK_INTERVAL_S = 0.004
"""By the clock: well below a decode step of most models, and four messages at a time where there
are a thousand a second."""

QUIET_LOOK_INTERVAL_S = 0.032
"""The longest, while nothing is sent but acknowledgements: what comes then are tokens of turns that
go on. It is come to by doubling, so that one that ends waits no longer than nothing has been sent
for. A look costs 400 us beside what it finds, most of it because others have had the processor."""

MESSAGES_PER_ACK = 16
"""Or more, for it to be quiet: with less credit an engine would wait for the next look. So does one
that uses all of its credit up between two looks: of 256 steps, by 8,000 a second; of 16, by 500."""

VAIN_LOOKS_MAX = 3
"""In a row that find nothing, or what must be answered; then the descriptor wakes again."""


class Looks:
    """One socket's."""

    __slots__ = ("_counted_since_s", "_interval_s", "_vain_looks", "_wakeups", "acks", "sends")

    def __init__(self) -> None:
        self.sends = self.acks = 0
        """Since they were last counted; whoever sends adds to one of them."""
        self._interval_s = LOOK_INTERVAL_S
        self._wakeups = self._vain_looks = 0
        self._counted_since_s = 0.0

    def woken(self, now_s: float) -> float | None:
        """Count a wakeup; if the clock is to take over, in how many seconds the first look is."""
        if now_s - self._counted_since_s > BUSY_WITHIN_S:
            self._wakeups, self.sends, self.acks, self._counted_since_s = 0, 0, 0, now_s
        self._wakeups += 1
        if self._wakeups < max(BUSY_WAKEUPS, WAKEUPS_PER_SEND * (self.sends + self.acks)):
            return None
        self._wakeups = self._vain_looks = 0
        self._interval_s = LOOK_INTERVAL_S
        return LOOK_INTERVAL_S

    def looked(self, messages: int) -> float | None:
        """Count a look by the clock that found so many; in how many seconds the next is.

        None: there is to be none, for nothing comes, or much of it is answered.
        """
        sends, acks = self.sends, self.acks
        self.sends = self.acks = 0
        is_vain = not messages or WAKEUPS_PER_SEND * (sends + acks) > messages
        self._vain_looks = self._vain_looks + 1 if is_vain else 0
        if self._vain_looks >= VAIN_LOOKS_MAX:
            return None
        is_quiet = messages and not sends and MESSAGES_PER_ACK * acks <= messages
        longest_s = QUIET_LOOK_INTERVAL_S if is_quiet else LOOK_INTERVAL_S
        self._interval_s = min(2 * self._interval_s, longest_s)
        return self._interval_s
