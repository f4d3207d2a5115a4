"""What are the weights called that sampled a token? Clients name versions; the run counts them.

A name is of weights, not of a moment: who renames what is served renames what it has sampled. It
knows no engines.
"""

import bisect
from typing import Any

from tidegate.orchestrator.episodes.generated_turn import GeneratedTurn

FIRST_LABEL = "default"
"""Of the model directory's weights, as vLLM has it."""


class VersionLabels:
    """Names by version; one without a name of its own has that of the version before."""

    def __init__(self) -> None:
        self._named: tuple[tuple[int, str], ...] = ((0, FIRST_LABEL),)
        """Versions and their labels, in order. Replaced as a whole: threads read it."""

    @property
    def newest(self) -> str:
        """Label of what is served, or about to be."""
        return self._named[-1][1]

    def name(self, version: int, label: str) -> None:
        """Give this version, and those after it, a label from now on."""
        self._named = tuple(sorted({**dict(self._named), version: label}.items()))

    def forget(self, version: int) -> None:
        """Drop the label of a version that no engine serves, nor ever will."""
        self._named = tuple(one for one in self._named if one[0] == 0 or one[0] != version)

    def of(self, version: int) -> str:
        """Return the label of a version."""
        named = self._named
        return named[bisect.bisect_right(named, version, key=lambda one: one[0]) - 1][1]

    def spans(self, turn: GeneratedTurn | None) -> list[dict[str, Any]]:
        """Which weights sampled which output tokens; gapless, in order, neighbours differ."""
        spans: list[dict[str, Any]] = []
        for span in turn.spans if turn is not None else ():
            label = self.of(span.version)
            if spans and spans[-1]["version"] == label:
                spans[-1]["end"] = span.end
            else:
                spans.append({"version": label, "start": span.start, "end": span.end})
        return spans
