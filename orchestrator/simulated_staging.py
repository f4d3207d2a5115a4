"""How does a new version get beside the live weights of a simulated engine? It is copied there.

Takes virtual time, and copies what is in the trainer's buffer meanwhile: torn, if that changes.
Being asked anew for the version in hand, as after a reconnect, changes nothing.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from tidegate.orchestrator.simulated_model import TORN_WEIGHTS
from tidegate.transport.messages import Message, WeightsFailed, WeightsStaged


@dataclass(slots=True)
class WeightBuffer:
    """The memory that the trainer writes weights to, and engines copy them from."""

    content: int = 0
    """The version in it; ``TORN_WEIGHTS`` while it is written."""


@dataclass(slots=True)
class _Update:
    """One version beside the live weights."""

    version: int
    state: str = "open"
    """``open``, ``staged`` or ``failed``."""
    content: int = TORN_WEIGHTS


class SimulatedStaging:
    """The version in hand, and the copies that are under way."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        buffer: WeightBuffer,
        *,
        copy_s: float,
        on_copied: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._buffer = buffer
        self._copy_s = copy_s
        self._on_copied = on_copied
        self._update: _Update | None = None
        self._copies_running = 0
        self._answers: list[Message] = []

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

    def has_in_hand(self, version: int) -> bool:
        """Whether ``version`` is complete, or will be."""
        update = self._update
        return update is not None and update.version == version and update.state != "failed"

    def start(self, version: int) -> None:
        """Begin a version, and give up the one in hand if it is another."""
        if self.has_in_hand(version):
            return
        old = self._update
        if old is not None and old.state == "open":
            old.state = "failed"
            self.fail(old.version, f"given up, for v{version} was started")
        self._update = _Update(version)

    def copy(self, version: int) -> None:
        """Copy all of a version; it is answered when that is done."""
        update = self._update
        if update is None or update.version != version:
            self.fail(version, "was not started")
        elif update.state == "staged":
            self._answers.append(WeightsStaged(version=version))
        elif update.state == "open":
            self._copies_running += 1
            self._loop.call_later(self._copy_s, self._copied, update, self._buffer.content)

    def _copied(self, update: _Update, content: int) -> None:
        self._copies_running -= 1
        if update.state == "open":
            update.state = "staged"
            update.content = content if content == self._buffer.content else TORN_WEIGHTS
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
