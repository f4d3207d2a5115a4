"""Whose weights sampled a turn's tokens, and made the KV they attended to? In spans of one answer.

It knows versions and places within a turn; not what the tokens are.
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
    newest: int


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Provenance of a turn's output tokens ``[start, end)``."""

    version: int
    """The weights that sampled them."""
    start: int
    end: int
    engine: str
    kv: KvRange | None
    """Whose weights computed the KV they attended to; None where the engine can't tell."""

    @property
    def kv_label(self) -> str:
        """``fresh``, ``mixed(oldest, newest)`` or ``unknown``."""
        if self.kv is None:
            return "unknown"
        if self.kv.oldest == self.kv.newest == self.version:
            return "fresh"
        return f"mixed({self.kv.oldest}, {self.kv.newest})"


class VersionRun(Struct, frozen=True, gc=False):
    """From output token ``start`` of its turn on, ``version`` sampled, on ``engine``."""

    version: int
    start: int
    engine: str


class TurnPrefill(Struct, frozen=True, gc=False):
    """From output token ``at`` on, the KV of everything before was computed as ``spans`` say."""

    at: int
    spans: tuple[KvSpan, ...]
    """Over the context positions ``[0, turn.start + at)``, gapless."""


def spans_of(
    runs: Sequence[VersionRun], prefills: Sequence[TurnPrefill], length: int
) -> Iterator[VersionSpan]:
    """Cut a turn of so many tokens where the version, the engine or the KV history changes.

    A pass begins with a prefill, whose spans give the range of KV versions; every token sampled
    then widens it by its own version, for the position it was sampled from is computed with it.
    An engine that a turn moves to and that tells no prefill leaves the KV unknown: it may have
    computed the context with any version, or had the KV of some of it.
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
