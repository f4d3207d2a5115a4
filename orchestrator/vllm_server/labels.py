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
        self._versions = [0]
        self._labels = [FIRST_LABEL]

    @property
    def newest(self) -> str:
        """Of what is served, or about to be."""
        return self._labels[-1]

    def name(self, version: int, label: str) -> None:
        """Call this version, and those after it, so from now on."""
        at = bisect.bisect_left(self._versions, version)
        if at < len(self._versions) and self._versions[at] == version:
            self._labels[at] = label
        else:
            self._versions.insert(at, version)
            self._labels.insert(at, label)

    def forget(self, version: int) -> None:
        """No engine serves it, nor ever will."""
        if version in self._versions[1:]:
            at = self._versions.index(version)
            del self._versions[at], self._labels[at]

    def of(self, version: int) -> str:
        """The name of a version."""
        return self._labels[bisect.bisect_right(self._versions, version) - 1]

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
