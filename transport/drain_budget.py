"""How many messages may be read before other callbacks get a turn? So many that theirs comes soon.

What a message costs is known only afterwards: a step of one token for each of 64 turns takes half a
millisecond to take in, and one with which they all end ten. So the time from one reading to the
next says how many the next may be, unless others take it. It knows no socket and no clock.
"""

FRAMES_MIN = 16
FRAMES_AT_FIRST = 64

TURN_S = 0.1
"""Of the loop: longer than that, and a page, an agent's request or a heartbeat waits noticeably."""


HELPED = 0.75
"""Half as many messages, and a turn took no less than so much of its time: then it is not theirs,
and to read fewer only has engines wait."""


class DrainBudget:
    """Halved where readings were far apart, doubled where they came at once."""

    def __init__(self, frames_max: int) -> None:
        self._frames_max = frames_max
        self.frames = min(FRAMES_AT_FIRST, frames_max)
        self._halved_after_s: float | None = None
        """What a turn took with twice as many, if the last one had that."""

    def took(self, turn_s: float) -> None:
        """So long was it from a reading that left messages to the next one."""
        before_s, self._halved_after_s = self._halved_after_s, None
        if turn_s > TURN_S:
            if before_s is not None and turn_s > HELPED * before_s:
                self.frames = min(self._frames_max, 4 * self.frames)  # as before, and doubled
                return
            half = self.frames // 2
            self.frames = max(min(FRAMES_MIN, self._frames_max), half)
            if self.frames == half:
                self._halved_after_s = turn_s
        elif turn_s < TURN_S / 4:
            self.frames = min(self._frames_max, 2 * self.frames)
