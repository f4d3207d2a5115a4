"""Weight staging of a simulated engine: copies a version beside the live weights, in virtual time.

A copy is torn if the trainer overwrites the version's slot of the buffer during the copy.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from tidegate.simulation.checks.model import TORN_WEIGHTS
from tidegate.simulation.engine.context import SimulationContext, WeightBuffer
from tidegate.simulation.engine.spec import SimulatedEngineSpec
from tidegate.transport.messages import (
    Message,
    UpdateWeights,
    WeightsFailed,
    WeightsStaged,
)

SUPERSEDED = "given up, for"
"""Text in an engine's answer for a version that a newer version has replaced before staging."""


def check_refusal(why: str) -> None:
    """Check that a reported refusal is a real one, not the answer for a superseded version.

    Raises:
        AssertionError: the engine has not refused the version; a newer one was started.
    """
    assert SUPERSEDED not in why, f"a superseded version was reported as refused: {why}"


@dataclass(slots=True)
class _StagedVersion:
    """Version that an engine copies, or has copied, beside its live weights."""

    version: int
    state: str = "open"
    """Progress of the update: ``open``, ``staged`` or ``failed``."""
    content: int = TORN_WEIGHTS
    slots: dict[int, int] = field(default_factory=dict)
    """Slots that were read, and their contents then."""

    def read(self, slot: int, buffer: WeightBuffer, live_content: int | None) -> None:
        """Apply a slot's whole set, or its patches over what was read before.

        ``live_content``: weights that the first patches may apply to; None if the message names no
        base. Patches over other weights than those they were made of leave torn weights.
        """
        base = live_content if not self.slots else self.content
        content = self.slots[slot] = buffer.contents[slot]
        is_applicable = slot not in buffer.bases or buffer.bases[slot] == base
        self.content = content if is_applicable else TORN_WEIGHTS


class SimulatedStaging:
    """Weight staging of one engine: the newest started version, and the running copies."""

    def __init__(
        self,
        context: SimulationContext,
        spec: SimulatedEngineSpec,
        *,
        on_copied: Callable[[], None],
    ) -> None:
        self._loop = context.loop
        self._buffer = context.buffer
        self._ground_truth = context.ground_truth
        self._copy_s = spec.staging_s
        self._on_copied = on_copied
        self._update: _StagedVersion | None = None
        self._copies_running = 0
        self._replies: list[Message] = []
        self.refusals_due = 0
        """Number of coming weights to refuse, among those that no engine has served yet."""
        self._refused: set[int] = set()
        """Contents of the refused weights, which are refused again under any version."""
        self.delay_s = 0.0
        """Additional time of copies that begin now, in seconds."""

    def __str__(self) -> str:
        update = self._update
        return f"v{update.version} is {update.state}" if update else "nothing"

    @property
    def is_busy(self) -> bool:
        """Whether a copy is running; weights are not swapped meanwhile."""
        return self._copies_running > 0

    def is_staged(self, version: int) -> bool:
        """Return whether ``version`` is completely staged."""
        update = self._update
        return update is not None and (update.version, update.state) == (version, "staged")

    def start(self, version: int) -> None:
        """Begin a version, and discard the previous one, even if it is staged."""
        previous = self._update
        if previous is not None and previous.state == "open":
            previous.state = "failed"
            if previous.version != version:
                self.fail(previous.version, f"{SUPERSEDED} v{version} was started")
        self._update = _StagedVersion(version)

    def abandon(self) -> None:
        """Discard the version and all pending replies."""
        if self._update is not None:
            self._update.state = "failed"
            self._update = None
        self._replies.clear()

    def copy(self, message: UpdateWeights, live_content: int) -> None:
        """Copy a part of a version, beside the live weights ``live_content``; the reply follows
        when all parts are copied."""
        update, version = self._update, message.version
        if update is None or update.version != version:
            self.fail(version, "was not started")
        elif update.state == "open" and not message.location:
            update.state = "failed"
            self.fail(version, "comes without tensors, which no simulated engine can take")
        elif update.state == "open":
            has_base = message.base_versions is not None
            update.read(int(message.location), self._buffer, live_content if has_base else None)
            if message.is_last:
                self._copies_running += 1
                self._loop.call_later(self._copy_s + self.delay_s, self._copied, update)

    def _copied(self, update: _StagedVersion) -> None:
        self._copies_running -= 1
        content, contents = update.content, self._buffer.contents
        if self.refuses(content) and update.state == "open":
            update.state = "failed"
            self.fail(update.version, "does not fit: it was meant to be refused")
        elif update.state == "open":
            update.state = "staged"
            if any(contents[slot] != read for slot, read in update.slots.items()):
                update.content = TORN_WEIGHTS
            self._replies.append(WeightsStaged(version=update.version))
        self._on_copied()

    def refuses(self, content: int) -> bool:
        """Return whether the engine refuses these weights; the same ones are always refused."""
        if self.refusals_due and not self._ground_truth.is_served(content):
            self.refusals_due -= 1
            self._refused.add(content)
        return content in self._refused

    def take(self) -> int:
        """Remove the staged version, and return its content."""
        assert self._update is not None
        content, self._update = self._update.content, None
        return content

    def fail(self, version: int, why: str) -> None:
        """Add a reply that a request for ``version`` has failed."""
        self._replies.append(WeightsFailed(version=version, message=f"v{version} {why}"))

    def take_replies(self) -> list[Message]:
        """Remove and return the replies that are due."""
        answers, self._replies = self._replies, []
        return answers
