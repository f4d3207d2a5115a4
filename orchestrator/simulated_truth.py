"""What did the simulated engines really do? Kept aside, to be held against what is claimed."""

from collections import deque
from dataclasses import dataclass

from tidegate.orchestrator.events import StepArrived
from tidegate.transport.messages import Step


@dataclass(frozen=True, slots=True)
class SentStep:
    """What one step message said."""

    version: int
    turns: bytes
    token_ids: bytes


class Truth:
    """Every step of every engine, one process after another, until it has arrived."""

    def __init__(self) -> None:
        self._processes: dict[str, deque[deque[SentStep]]] = {}

    def started(self, engine: str) -> None:
        """A process of this engine begins to count its steps from 0."""
        self._processes.setdefault(engine, deque()).append(deque())

    def sent(self, engine: str, step: Step) -> None:
        """An engine has made a step."""
        self._processes[engine][-1].append(SentStep(step.version, step.turns, step.token_ids))

    def swapped(self, engine: str, version: int, content: int) -> None:
        """An engine computes with other weights from now on.

        Raises:
            AssertionError: they are not those of the version they are called by.
        """
        assert content == version, (
            f"{engine} serves what it calls v{version}, but was written as v{content} (-1: torn)"
        )

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
            assert first == told, f"{event.engine}: {told} was taken in, but {first} is the next"
        processes[0].popleft()
