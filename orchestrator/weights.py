"""How does a new version reach every engine? Four phases per engine, tracked without any I/O.

``init`` once, then for each version ``start`` and ``update`` (the engine copies it beside its live
weights while it decodes) and ``finish`` (it swaps between two steps). It knows engines' names,
versions and messages; not sockets, nor what the tensors mean.
"""

from dataclasses import dataclass, field

from tidegate.transport.messages import (
    FinishWeightUpdate,
    InitWeights,
    KvPolicy,
    Message,
    PauseMode,
    StartWeightUpdate,
    UpdateWeights,
)

Outgoing = list[tuple[str, Message]]
"""(engine, message) pairs, to be sent in order."""


@dataclass(slots=True)
class WeightUpdate:
    """One version on its way. An engine is in at most one of the sets."""

    version: int
    chunks: list[UpdateWeights]
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


class WeightCoordinator:
    """Brings each published version to every engine, late joiners included."""

    def __init__(self, init: InitWeights, *, pause_mode: PauseMode, kv_policy: KvPolicy) -> None:
        self._init = init
        self._pause_mode: PauseMode = pause_mode
        self._kv_policy: KvPolicy = kv_policy
        self._live: dict[str, int] = {}
        """Engine -> the version it serves."""
        self.update: WeightUpdate | None = None
        """The newest version published."""
        self.is_reserved = False
        """Whether the buffer is about to be written for the next version."""

    @property
    def is_settled(self) -> bool:
        """Whether every engine serves the newest version; its buffer may be overwritten then."""
        return not self.engines_behind

    @property
    def engines_behind(self) -> list[str]:
        """Who does not serve the newest version yet."""
        update = self.update
        return sorted(update.staging | update.staged | update.swapping) if update else []

    def publish(self, version: int, chunks: list[UpdateWeights]) -> Outgoing:
        """Have every engine stage ``version``. The one before must be settled."""
        self.is_reserved = False
        self.update = WeightUpdate(version, chunks)
        return [message for engine in self._live for message in self._stage(engine)]

    def release(self) -> Outgoing:
        """Every engine has staged it: all swap, each between two of its steps."""
        assert self.update is not None
        self.update.is_released = True
        return [message for engine in sorted(self.update.staged) for message in self._swap(engine)]

    def withdraw(self) -> None:
        """Nobody swaps to it, unless they were told to already."""
        if self.update is not None and not self.update.is_released:
            self.update.is_withdrawn = True
            self.update.staged.clear()

    def joined(self, engine: str, version: int) -> Outgoing:
        """An engine came; it gets the newest version if it serves another."""
        self.left(engine)
        self._live[engine] = version
        hello: Outgoing = [(engine, self._init)]
        if self.update is None or self.update.version == version:
            return hello
        if self.update.is_withdrawn or self.is_reserved:
            return hello  # the buffer is not of that version; the next publish brings its own
        return hello + self._stage(engine)

    def left(self, engine: str) -> None:
        """An engine is gone; nobody waits for it any more."""
        self._live.pop(engine, None)
        self._strike(engine)

    def staged(self, engine: str, version: int) -> Outgoing:
        """An engine holds ``version`` beside its live weights."""
        update = self.update
        if update is None or version != update.version or engine not in update.staging:
            return []
        update.staging.discard(engine)
        if update.is_withdrawn:
            return []
        update.staged.add(engine)
        return self._swap(engine) if update.is_released else []

    def live(self, engine: str, version: int) -> None:
        """An engine serves ``version``."""
        if engine in self._live:
            self._live[engine] = version
        if self.update and version == self.update.version:
            self._strike(engine)

    def refused(self, engine: str, version: int, message: str) -> bool:
        """An engine can't take ``version``; it serves the old one on.

        True if others serve it already: then this engine can't be of the run any more.
        """
        if self.update is None or version != self.update.version:
            return False
        if self._live.get(engine) == version:
            return False  # asked for anew after a reconnect, when it had just swapped
        self._strike(engine)
        self.update.refusals[engine] = message
        return self.update.is_released

    def _strike(self, engine: str) -> None:
        if self.update:
            for engines in (self.update.staging, self.update.staged, self.update.swapping):
                engines.discard(engine)

    def _swap(self, engine: str) -> Outgoing:
        assert self.update is not None
        self.update.staged.discard(engine)
        self.update.swapping.add(engine)
        finish = FinishWeightUpdate(
            version=self.update.version, pause_mode=self._pause_mode, kv_policy=self._kv_policy
        )
        return [(engine, finish)]

    def _stage(self, engine: str) -> Outgoing:
        assert self.update is not None
        self.update.staging.add(engine)
        start = StartWeightUpdate(version=self.update.version)
        return [(engine, start), *((engine, chunk) for chunk in self.update.chunks)]
