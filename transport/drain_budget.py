"""How many messages may be read before other callbacks get a turn? So many that theirs comes soon.

What a message costs is known only afterwards: a step of one token for each of 64 turns takes half a
millisecond to take in, and one with which they all end ten. So the time from one reading to the
next says how many the next may be. It knows no socket and no clock.
"""

FRAMES_MIN = 16
FRAMES_AT_FIRST = 64

TURN_S = 0.1
"""Of the loop: longer than that, and a page, an agent's request or a heartbeat waits noticeably."""


class DrainBudget:
    """Halved where readings were far apart, doubled where they came at once."""

    def __init__(self, frames_max: int) -> None:
        self._frames_max = frames_max
        self.frames = min(FRAMES_AT_FIRST, frames_max)

    def took(self, turn_s: float) -> None:
        """So long was it from a reading that left messages to the next one."""
        if turn_s > TURN_S:
            self.frames = max(min(FRAMES_MIN, self._frames_max), self.frames // 2)
        elif turn_s < TURN_S / 4:
            self.frames = min(self._frames_max, 2 * self.frames)
