"""Record of what the simulated engines really did, to be compared with what is claimed of it."""

from collections import deque
from dataclasses import dataclass

from tidegate.orchestrator.core.events import StepArrived
from tidegate.transport.messages import Step


@dataclass(frozen=True, slots=True)
class SentStep:
    """Content of one step message, to compare."""

    version: int
    turns: bytes
    token_ids: bytes


class GroundTruth:
    """Steps that engines have sent and that have not arrived; the weights behind each version."""

    def __init__(self) -> None:
        self._processes: dict[str, deque[deque[SentStep]]] = {}
        self._contents: dict[int, int] = {0: 0}
        """Version -> the weights that go by this number, as counted when they were written."""

    def started(self, engine: str) -> None:
        """A process of this engine begins to count its steps from 0."""
        self._processes.setdefault(engine, deque()).append(deque())

    def sent(self, engine: str, step: Step) -> None:
        """An engine has made a step."""
        self._processes[engine][-1].append(SentStep(step.version, step.turns, step.token_ids))

    def swapped(self, engine: str, version: int, content: int) -> None:
        """An engine computes with other weights from now on.

        Raises:
            AssertionError: they are torn, or go by a number that others have.
        """
        known = self._contents.setdefault(version, content)
        assert content == known >= 0, (
            f"{engine} serves the weights written as no. {content} (-1: torn) and calls them "
            f"v{version}, but v{version} is no. {known}"
        )

    def is_served(self, content: int) -> bool:
        """Whether an engine has ever computed with these weights."""
        return content in self._contents.values()

    def content_of(self, version: int) -> int:
        """Which weights go by this number.

        Raises:
            AssertionError: none ever did.
        """
        content = self._contents.get(version)
        assert content is not None, f"no engine ever served v{version}"
        return content

    def arrived(self, event: StepArrived) -> None:
        """A step was taken in: it must be the next of its process, or the first of a later one.

        Raises:
            AssertionError: one was left out, or taken in twice.
        """
        told = SentStep(event.version, bytes(event.turns), bytes(event.token_ids))
        processes = self._processes[event.engine]
        if not processes[0] or processes[0][0] != told:
            while len(processes) > 1 and not (processes[0] and processes[0][0] == told):
                processes.popleft()
            first = processes[0][0] if processes[0] else None
            assert first == told, (
                f"{event.engine}: a step by v{told.version} was taken in that is not the next one "
                f"it made: one was left out, or one was taken in twice"
            )
        processes[0].popleft()
