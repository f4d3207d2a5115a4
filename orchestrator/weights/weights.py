"""How does a new version reach every engine? Four phases per engine, tracked without any I/O.

``init`` once, then for each version ``start`` and ``update`` (the engine copies it beside its live
weights while it decodes) and ``finish`` (it swaps between two steps). It knows engines' names,
versions and messages; not sockets, nor what the tensors mean.

The version that was released last is kept, in its place of the channel's buffer, until another is
released. So an engine that comes late is never without weights, whatever became of the publishes
since: the price is a second version's worth of the channel's memory, which engines don't pay.

A version that is only part of a set is laid over the newest that was published and hasn't failed.
What that one is made of stays in the buffer for it.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

from tidegate.orchestrator.weights.content import (
    MODEL_DIRECTORY,
    Change,
    WeightContent,
    anew,
)
from tidegate.transport.messages import (
    FinishWeightUpdate,
    InitWeights,
    KvPolicy,
    Message,
    PauseMode,
    StartWeightUpdate,
    UpdateWeights,
)

NONE = -1
"""What an engine serves that has forgotten its weights."""

Outgoing = list[tuple[str, Message]]
"""(engine, message) pairs, to be sent in order."""


@dataclass(slots=True)
class WeightUpdate:
    """One version on its way. An engine is in at most one of the sets, of at most one update."""

    version: int
    content: WeightContent
    staging: set[str] = field(default_factory=set)
    """Engines that copy it now."""
    staged: set[str] = field(default_factory=set)
    """Engines that have it beside the live weights, and wait for the word to swap."""
    swapping: set[str] = field(default_factory=set)
    """Engines that were told to swap."""
    is_released: bool = False
    """Whether engines may swap as soon as they have staged it."""
    is_withdrawn: bool = False
    """Whether nobody may swap any more; engines drop what they staged at the next start."""
    refusals: dict[str, str] = field(default_factory=dict)
    """What engines said that can't take it."""

    @property
    def engines(self) -> set[str]:
        """Whom it is on its way to."""
        return self.staging | self.staged | self.swapping

    def is_for(self, engine: str) -> bool:
        """Whether it is on its way to this engine."""
        return engine in self.staging or engine in self.staged or engine in self.swapping

    def strike(self, engine: str) -> None:
        """Wait for this engine no more."""
        for engines in (self.staging, self.staged, self.swapping):
            engines.discard(engine)


@dataclass(frozen=True, slots=True)
class Laggards:
    """Engines that a version is on its way to, and how far it has come with them."""

    version: int
    phase: Literal["staging", "staged", "swapping"]
    engines: tuple[str, ...]

    def __str__(self) -> str:
        return f"v{self.version} is {self.phase} on {', '.join(self.engines)}"


class WeightCoordinator:
    """Brings each published version to every engine, late joiners included."""

    def __init__(
        self,
        init: InitWeights,
        *,
        pause_mode: PauseMode,
        kv_policy: KvPolicy,
        wave_engines: int | None = None,
    ) -> None:
        """``wave_engines``: so many swap at a time, at most; None: all at once."""
        self._init = init
        self._wave_engines = wave_engines
        self._pause_mode: PauseMode = pause_mode
        self.kv_policy: KvPolicy = kv_policy
        """What the next swap does to the KV of turns that are kept."""
        self._live: dict[str, int] = {}
        """Engine -> the version it serves."""
        self._asleep: set[str] = set()
        """Engines that have nothing to lay parts of a set over."""
        self.update: WeightUpdate | None = None
        """The newest version published."""
        self._kept: WeightUpdate | None = None
        """The newest released; the buffer holds it still."""
        self._before: WeightUpdate | None = None
        """What a part of a set is laid over; None: the model directory's weights."""
        self.is_reserved = False
        """Whether the buffer is about to be written for the next version."""

    # ------------------------------------------------------------ looking

    @property
    def kept_version(self) -> int | None:
        """What must stay in the buffer when another version is written."""
        return self._kept.version if self._kept is not None else None

    @property
    def kept_buffers(self) -> set[int]:
        """The versions as which that was written, and what it is laid over."""
        if self.kept_version is None or self._kept is None:
            return set()
        return {self.kept_version} | self._kept.content.buffers

    @property
    def version_before(self) -> int:
        """What a part of a set would be laid over now."""
        return self._before.version if self._before is not None else 0

    @property
    def adapters_before(self) -> Collection[str]:
        """The adapters that it has."""
        return self._before.content.adapters if self._before is not None else ()

    @property
    def buffers_before(self) -> set[int]:
        """As which versions the parts of that were written."""
        return self._before.content.buffers if self._before is not None else set()

    @property
    def layers_before(self) -> int:
        """How many versions' tensors lie over its whole set."""
        return len({part.version for part in self._before.content.over}) if self._before else 0

    @property
    def is_writable(self) -> bool:
        """Whether no engine reads what isn't kept. Those that read what is kept need not be waited
        for: the next version takes its place with them, however far they are."""
        update = self.update
        return update is None or update is self._kept or not update.staging

    @property
    def is_undecided(self) -> bool:
        """Whether the newest version may still be given up: it is being staged."""
        update = self.update
        return update is not None and not update.is_released and not update.is_withdrawn

    @property
    def has_waves(self) -> bool:
        """Whether engines swap some at a time."""
        return self._wave_engines is not None

    @property
    def is_swapping(self) -> bool:
        """Whether an engine was told to swap, and hasn't yet said that it has."""
        return any(update.swapping for update in self._updates)

    @property
    def is_swap_due(self) -> bool:
        """Whether :meth:`swaps` has a word for somebody."""
        return self._places_in_wave > 0 and any(u.is_released and u.staged for u in self._updates)

    @property
    def is_settled(self) -> bool:
        """Whether no version is on its way."""
        return not any(u.staging or u.staged or u.swapping for u in self._updates)

    @property
    def engines_behind(self) -> list[str]:
        """To whom a version is on its way."""
        return sorted({engine for update in self._updates for engine in update.engines})

    @property
    def holdups(self) -> list[str]:
        """Whose turn it is: those that have staged it wait for others, or for the word to swap."""
        return sorted({engine for u in self._updates for engine in u.staging | u.swapping})

    @property
    def laggards(self) -> list[Laggards]:
        """The same, by version and phase."""
        found: list[Laggards] = []
        for update in self._updates:
            v = update.version
            found += [
                Laggards(v, "staging", tuple(sorted(update.staging))),
                Laggards(v, "staged", tuple(sorted(update.staged))),
                Laggards(v, "swapping", tuple(sorted(update.swapping))),
            ]
        return [laggards for laggards in found if laggards.engines]

    @property
    def _updates(self) -> list[WeightUpdate]:
        """The newest and the kept one, where there are such and they are two."""
        kept = None if self._kept is self.update else self._kept
        return [update for update in (self.update, kept) if update is not None]

    @property
    def _places_in_wave(self) -> int:
        """How many more engines may swap now."""
        if self._wave_engines is None:
            return len(self._live)
        return self._wave_engines - sum(len(update.swapping) for update in self._updates)

    def _update(self, version: int) -> WeightUpdate | None:
        return next((update for update in self._updates if update.version == version), None)

    # ------------------------------------------------------------ publishing

    def supersede(self, version: int) -> Outgoing:
        """A newer version is about to be written: nobody swaps to one that isn't released yet.

        Engines that copy it are told of the newer one, and so to stop; each says that it has
        given up, or that it was done, before :attr:`is_writable`. Where the newer one goes by the
        same number they can't be told apart: then the copies are waited for.
        """
        if self.update is None or self.update.is_released:
            return []
        before = self._before
        self.withdraw()
        self._before = before  # it hasn't failed: what it brought is in the newer one too
        if self.update.version == version:
            return []
        return [(e, StartWeightUpdate(version=version)) for e in sorted(self.update.staging)]

    def publish(self, version: int, chunks: list[UpdateWeights], change: Change = anew) -> Outgoing:
        """Have every engine stage ``version`` that doesn't serve it.

        ``change`` makes it of the version before, and of ``chunks``.

        A resumed run publishes once more what engines may have kept serving. What was on its way to
        some is given up, for this is newer.
        """
        self.is_reserved = False
        before = self._before
        content = MODEL_DIRECTORY if before is None else before.content
        if before is not None and before.is_released:
            content = content.served_as(before.version)
        self.update = self._before = WeightUpdate(version, change(content, chunks))
        behind = [engine for engine, live in self._live.items() if live != version]
        return [message for engine in behind for message in self._stage(engine, self.update)]

    def release(self) -> None:
        """Every engine has staged it: :meth:`swaps` has the word for them."""
        assert self.update is not None
        self.update.is_released = True
        self._kept = self.update

    def withdraw(self) -> None:
        """Nobody swaps to it, unless they were told to already."""
        if self.update is not None and not self.update.is_released:
            self.update.is_withdrawn = True
            self.update.staged.clear()
        self._before = self._kept

    def unreserve(self) -> None:
        """Nothing was written in the buffer reserved, and what it was reserved over is given up."""
        self.is_reserved = False
        if self.update is not None and self.update.is_withdrawn:
            self._before = self._kept

    # ------------------------------------------------------------ what engines say

    def joined(self, engine: str, version: int, *, are_asleep: bool = False) -> Outgoing:
        """An engine came; it gets the newest version if it serves another."""
        self.left(engine)
        self.slept(engine, are_asleep=are_asleep)
        self._live[engine] = version
        for update in self._updates:
            update.refusals.pop(engine, None)  # another process may see it differently
        return [(engine, self._init), *self.catch_up()]

    def left(self, engine: str) -> None:
        """An engine is gone; nobody waits for it any more."""
        self._live.pop(engine, None)
        self._asleep.discard(engine)
        self._strike(engine)

    def staged(self, engine: str, version: int) -> None:
        """An engine holds ``version`` beside its live weights."""
        update = self._update(version)
        if update is None or engine not in update.staging:
            return
        update.staging.discard(engine)
        if not update.is_withdrawn:
            update.staged.add(engine)

    def live(self, engine: str, version: int) -> None:
        """An engine serves ``version``."""
        if engine in self._live:
            self._live[engine] = version
        update = self._update(version)
        if update is not None:
            update.strike(engine)

    def lost(self, engine: str) -> None:
        """An engine has no weights any more, whatever it served: it is behind every version."""
        if engine in self._live:
            self._live[engine] = NONE

    def slept(self, engine: str, *, are_asleep: bool) -> None:
        """An engine's weights sleep, so that it needs a whole set if any; or they don't."""
        if are_asleep:
            self._asleep.add(engine)
        else:
            self._asleep.discard(engine)

    @property
    def can_be_forgotten(self) -> bool:
        """Whether an engine that forgets its weights can have them again.

        Not while all that was published are parts of a set, over the model directory's.
        """
        return self._kept is None or self._kept.content.whole is not None

    def is_on_its_way(self, engine: str) -> bool:
        """Whether a version is on its way to this engine."""
        return any(update.is_for(engine) for update in self._updates)

    def refused(self, engine: str, version: int, message: str) -> bool:
        """An engine can't take ``version``; it serves the old one on.

        True if others serve it already: then this engine can't be of the run any more.
        """
        update = self._update(version)
        if update is None or engine not in update.engines:
            return False  # given up for a newer one; or asked for twice, and it has just swapped
        update.strike(engine)
        update.refusals[engine] = message
        return update.is_released

    # ------------------------------------------------------------ what is due

    def swaps(self) -> Outgoing:
        """The word to swap, for those that have staged what is released; each is told once.

        In waves, each engine that serves the new version makes room for the next one.
        """
        told: Outgoing = []
        for update in self._updates:
            if not update.is_released:
                continue
            finish = FinishWeightUpdate(
                version=update.version, pause_mode=self._pause_mode, kv_policy=self.kv_policy
            )
            wave = sorted(update.staged)[: max(0, self._places_in_wave)]
            told += [(engine, finish) for engine in wave]
            update.swapping.update(wave)
            update.staged.difference_update(wave)
        return told

    def catch_up(self, engine: str | None = None) -> Outgoing:
        """Have engines stage the newest version there is, if none is on its way to them.

        Those that joined late; and those for whom a publish that failed had taken its place. Only
        ``engine`` is looked at if it is given: the one that has just said something.
        """
        target = self._kept
        if self.update is not None and not self.update.is_withdrawn:
            target = self.update
        if target is None:
            return []
        names = list(self._live) if engine is None else [engine]
        behind = [name for name in names if self._live.get(name, target.version) != target.version]
        return [
            message
            for name in behind
            if name not in target.refusals and not any(u.is_for(name) for u in self._updates)
            for message in self._stage(name, target)
        ]

    def _stage(self, engine: str, update: WeightUpdate) -> Outgoing:
        self._strike(engine)
        update.staging.add(engine)
        start = StartWeightUpdate(version=update.version)
        live = None if engine in self._asleep else self._live.get(engine)
        chunks = update.content.messages(update.version, live=live)
        return [(engine, start), *((engine, chunk) for chunk in chunks)]

    def _strike(self, engine: str) -> None:
        for update in self._updates:
            update.strike(engine)
