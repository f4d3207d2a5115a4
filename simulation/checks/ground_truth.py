"""Ground truth of a simulated run: the steps and weights of its engines, as they recorded them."""

from collections import deque
from dataclasses import dataclass

from tidegate.orchestrator.core.events import StepArrived
from tidegate.transport.messages import Step


@dataclass(frozen=True, slots=True)
class SentStep:
    """Fields of one step message that must arrive unchanged."""

    version: int
    turns: bytes
    token_ids: bytes
    adapter: str
    """Adapter whose version ``version`` is; empty: the run's weights."""


class GroundTruth:
    """Steps that engines have sent and that have not arrived, and the content of each version."""

    def __init__(self, *, keeps_steps: bool = True) -> None:
        """``keeps_steps``: False for runs that call :meth:`arrived` for no step."""
        self._keeps_steps = keeps_steps
        self._processes: dict[str, deque[deque[SentStep]]] = {}
        self._contents: dict[int, int] = {0: 0}
        """Version -> its weight content: the number that the weights got when they were written."""
        self.adapter_contents: dict[tuple[str, int], int] = {}
        """(adapter, version) -> content of the weights that turns were computed by under it."""

    def started(self, engine: str) -> None:
        """Record the start of a process of ``engine``, which counts its steps from 0."""
        self._processes.setdefault(engine, deque()).append(deque())

    def sent(self, engine: str, step: Step) -> None:
        """Append a step that the newest process of ``engine`` has sent."""
        if self._keeps_steps:
            sent = SentStep(step.version, step.turns, step.token_ids, step.adapter)
            self._processes[engine][-1].append(sent)

    def computed(self, engine: str, adapter: str, version: int, content: int) -> None:
        """Record that an engine computes turns with the weights ``content`` as an adapter's
        version.

        Raises:
            AssertionError: other weights have been used under the same tag, or these are torn.
        """
        known = self.adapter_contents.setdefault((adapter, version), content)
        assert content == known >= 0, (
            f"{engine} computes by content {content} (-1: torn) as {adapter} v{version}, which has "
            f"content {known}"
        )

    def swapped(self, engine: str, version: int, content: int) -> None:
        """Record that an engine has swapped in the weights ``content`` as ``version``.

        Raises:
            AssertionError: the weights are torn, or the version belongs to other weights.
        """
        known = self._contents.setdefault(version, content)
        assert content == known >= 0, (
            f"{engine} serves content {content} (-1: torn) as v{version}, but v{version} has "
            f"content {known}"
        )

    def is_served(self, content: int) -> bool:
        """Return whether an engine has ever computed with the weights ``content``."""
        return content in self._contents.values()

    def content_of(self, version: int) -> int:
        """Return the weight content of ``version``.

        Raises:
            AssertionError: no engine has ever served this version.
        """
        content = self._contents.get(version)
        assert content is not None, f"no engine ever served v{version}"
        return content

    def arrived(self, event: StepArrived) -> None:
        """Check that a step handled by the core is the next step of its engine process, or the
        first step of a later process.

        Raises:
            AssertionError: a step was skipped, or handled twice.
        """
        turns, token_ids = bytes(event.turns), bytes(event.token_ids)
        reported = SentStep(event.version, turns, token_ids, event.adapter)
        processes = self._processes[event.engine]
        if not processes[0] or processes[0][0] != reported:
            while len(processes) > 1 and not (processes[0] and processes[0][0] == reported):
                processes.popleft()
            first = processes[0][0] if processes[0] else None
            assert first == reported, (
                f"{event.engine}: the handled step of v{reported.version} is not the next step "
                f"that the engine sent: a step was skipped or handled twice"
            )
        processes[0].popleft()
