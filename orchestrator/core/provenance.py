"""Provenance of a turn's tokens: which version sampled them, and which versions computed their KV.

:class:`Turn` records version runs and prefills; :func:`spans_of` turns them into
:class:`VersionSpan` for recorders, audits and users.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from msgspec import Struct

from tidegate.transport.messages import KvSpan


@dataclass(frozen=True, slots=True)
class KvRange:
    """The oldest and newest weights that computed the KV a token attended to."""

    oldest: int
    """Oldest weight version that computed some of the KV."""
    newest: int
    """Newest weight version that computed some of the KV."""


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Provenance of a turn's output tokens ``[start, end)``."""

    version: int
    """Version that sampled these tokens."""
    start: int
    """Index of the span's first token among the turn's output tokens."""
    end: int
    """Index after the span's last token."""
    engine: str
    """Name of the engine that sampled the tokens."""
    kv: KvRange | None
    """Versions that computed the KV that these tokens attended to; None if the engine does not
    report it."""

    @property
    def kv_label(self) -> str:
        """``fresh``, ``mixed(oldest, newest)`` or ``unknown``."""
        if self.kv is None:
            return "unknown"
        if self.kv.oldest == self.kv.newest == self.version:
            return "fresh"
        return f"mixed({self.kv.oldest}, {self.kv.newest})"


class VersionRun(Struct, frozen=True, gc=False):
    """From output token ``start`` of its turn on, ``version`` sampled on ``engine``."""

    version: int
    start: int
    engine: str


class TurnPrefill(Struct, frozen=True, gc=False):
    """Prefill before output token ``at``; ``spans`` say which versions computed its KV."""

    at: int
    spans: tuple[KvSpan, ...]
    """Spans over the context positions ``[0, turn.start + at)``, without gaps."""


def spans_of(
    runs: Sequence[VersionRun], prefills: Sequence[TurnPrefill], length: int
) -> Iterator[VersionSpan]:
    """Yield maximal spans of a turn of ``length`` tokens with one version, engine and KV history.

    A prefill gives the range of KV versions at its token. Every token sampled after it widens the
    range by its own version, because it computes the KV of the position it was sampled from. If a
    turn moves to an engine that reports no prefill, its KV is unknown: the engine may have computed
    the context with any version, or had cached KV of some of it.
    """
    run_at = {run.start: run for run in runs}
    prefill_at = {prefill.at: prefill for prefill in prefills}
    cuts = sorted({*run_at, *(at for at in prefill_at if at < length), length})
    run: VersionRun | None = None
    kv: KvRange | None = None
    for start, end in itertools.pairwise(cuts):
        before, run = run, run_at.get(start, run)
        if run is None:
            raise AssertionError(f"output token {start} has no version")
        if before is not None and before.engine != run.engine:
            kv = None
        if start in prefill_at:
            versions = [span.version for span in prefill_at[start].spans]
            kv = KvRange(min(versions), max(versions)) if versions else None
        if kv is not None:
            kv = KvRange(min(kv.oldest, run.version), max(kv.newest, run.version))
        yield VersionSpan(run.version, start, end, run.engine, kv)
