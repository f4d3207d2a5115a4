"""Weight staging of a simulated engine: copies a version beside the live weights, in virtual time.

A copy is torn if the trainer overwrites its place of the buffer meanwhile.
"""

import asyncio
import itertools
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from tidegate.simulation.ground_truth import GroundTruth
from tidegate.simulation.model import TORN_WEIGHTS
from tidegate.transport.messages import Message, UpdateWeights, WeightsFailed, WeightsStaged

GIVEN_UP = "given up, for"
"""In the answer of an engine that began another version before it had staged this one."""


def check_refusal(why: str) -> None:
    """Check that a refusal is no answer to a start that a newer start has replaced.

    Raises:
        AssertionError: the engine was told to begin another version, and never refused this one.
    """
    assert GIVEN_UP not in why, f"counts as a refusal of weights: {why}"


@dataclass(slots=True)
class WeightBuffer:
    """Buffer that the trainer writes weights to and engines copy them from: a few places."""

    contents: list[int] = field(default_factory=lambda: [0, 0])
    """Which weights are in each, by the order of writing; ``TORN_WEIGHTS`` while they are written:
    whoever copies them then gets neither the old ones nor the new."""
    _written: int = 0
    """What is being written, or was last."""
    _places: dict[int, int] = field(default_factory=dict)
    """Which version was written where last."""

    def begin(
        self, version: int, *, keep: Collection[int], content: int | None = None
    ) -> UpdateWeights:
        """Write over what is not to be kept; where that is. New weights, unless told which."""
        kept = {self._places.get(version) for version in keep}
        place = next(place for place in itertools.count() if place not in kept)
        self.contents.extend([TORN_WEIGHTS] * (place + 1 - len(self.contents)))
        self._places[version] = place
        self._written = self._written + 1 if content is None else content
        self.contents[place] = TORN_WEIGHTS
        return UpdateWeights(version=version, location=str(place), tensors=[])

    def end(self, update: UpdateWeights) -> None:
        """All of it is written."""
        self.contents[int(update.location)] = self._written


@dataclass(slots=True)
class _Update:
    """One version beside the live weights."""

    version: int
    state: str = "open"
    """``open``, ``staged`` or ``failed``."""
    content: int = TORN_WEIGHTS


class SimulatedStaging:
    """The version that an engine is staging, and the copies under way."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        buffer: WeightBuffer,
        truth: GroundTruth,
        *,
        copy_s: float,
        on_copied: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._buffer = buffer
        self._truth = truth
        self._copy_s = copy_s
        self._on_copied = on_copied
        self._update: _Update | None = None
        self._copies_running = 0
        self._answers: list[Message] = []
        self.refusals_due = 0
        """So many of the next weights will be found not to fit, if no engine serves them yet."""
        self._refused: set[int] = set()
        """Which weights don't fit."""
        self.delay_s = 0.0
        """Copies that begin now take so much longer."""

    def __str__(self) -> str:
        update = self._update
        return f"v{update.version} is {update.state}" if update else "nothing"

    @property
    def is_busy(self) -> bool:
        """Whether something is copied now; then nothing is swapped."""
        return self._copies_running > 0

    def is_staged(self, version: int) -> bool:
        """Whether ``version`` is complete and still there."""
        update = self._update
        return update is not None and (update.version, update.state) == (version, "staged")

    def start(self, version: int) -> None:
        """Begin a version, and give up the one in hand, complete or not."""
        old = self._update
        if old is not None and old.state == "open":
            old.state = "failed"
            if old.version != version:
                self.fail(old.version, f"{GIVEN_UP} v{version} was started")
        self._update = _Update(version)

    def abandon(self) -> None:
        """Forget the version in hand, and what was to be said of any."""
        if self._update is not None:
            self._update.state = "failed"
            self._update = None
        self._answers.clear()

    def copy(self, message: UpdateWeights) -> None:
        """Copy all of a version; it is answered when that is done."""
        update, version = self._update, message.version
        if update is None or update.version != version:
            self.fail(version, "was not started")
        elif update.state == "open" and not message.location:
            update.state = "failed"
            self.fail(version, "comes without tensors, which no simulated engine can take")
        elif update.state == "open" and message.is_last:
            self._copies_running += 1
            place = int(message.location)
            found = self._buffer.contents[place]
            seconds = self._copy_s + self.delay_s
            self._loop.call_later(seconds, self._copied, update, place, found)

    def _copied(self, update: _Update, place: int, found: int) -> None:
        self._copies_running -= 1
        if self.refusals_due and not self._truth.is_served(found):
            self.refusals_due -= 1
            self._refused.add(found)
        if update.state == "open" and found in self._refused:
            update.state = "failed"
            self.fail(update.version, "does not fit: it was meant to be refused")
        elif update.state == "open":
            update.state = "staged"
            update.content = found if found == self._buffer.contents[place] else TORN_WEIGHTS
            self._answers.append(WeightsStaged(version=update.version))
        self._on_copied()

    def take(self) -> int:
        """Hand out the staged weights: what they really are."""
        assert self._update is not None
        content, self._update = self._update.content, None
        return content

    def fail(self, version: int, why: str) -> None:
        """Refuse something asked of ``version``."""
        self._answers.append(WeightsFailed(version=version, message=f"v{version} {why}"))

    def take_answers(self) -> list[Message]:
        """What is due to be said."""
        answers, self._answers = self._answers, []
        return answers
