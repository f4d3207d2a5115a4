"""Versions of one target on all engines: staged by all, released, swapped in, or withdrawn.

The target is the run's weights (:mod:`tidegate.orchestrator.core.weight_versions`) or an adapter
with versions of its own (:mod:`tidegate.orchestrator.core.adapter_versions`). Both follow the rules
here, and say themselves which messages bring a version to an engine. docs/architecture.md has the
table.

Every engine stages a version beside those that it serves. Once all hold it, it is released; once
no crash can undo that, they swap between two steps. If one refuses it or is late, none swaps.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Literal

from msgspec import Struct

from tidegate.errors import EngineLagging, TidegateError, WeightsRefused
from tidegate.orchestrator.core.control_events import (
    Outgoing,
    PublishRequested,
    PublishWait,
    ReleaseVersion,
    SetTimer,
    StopTimer,
)
from tidegate.orchestrator.core.control_state import ControlState
from tidegate.orchestrator.core.weight_content import WeightContent
from tidegate.transport.messages import Message

UpdatePhase = Literal["staging", "staged", "swapping"]


@dataclass(slots=True)
class WeightUpdate:
    """Progress of one version. An engine is in at most one of the sets, of at most one update."""

    request: PublishRequested
    content: WeightContent
    staging: set[str] = field(default_factory=set)
    """Engines that copy the version's tensors."""
    staged: set[str] = field(default_factory=set)
    """Engines that hold the version beside their live weights and wait for the order to swap."""
    swapping: set[str] = field(default_factory=set)
    """Engines that were ordered to swap and have not confirmed."""
    is_released: bool = False
    """Whether every engine has staged the version."""
    is_durable: bool = False
    """Whether no crash can undo the release, so that engines may swap."""
    is_withdrawn: bool = False
    """Whether engines may no longer swap to the version."""
    refusals: dict[str, str] = field(default_factory=dict)
    """Engine -> reason for which it refused the version."""

    @property
    def version(self) -> int:
        """Number of the version."""
        return self.request.version

    @property
    def phases(self) -> dict[UpdatePhase, set[str]]:
        """The three sets by name, in the order in which an engine passes through them."""
        return {"staging": self.staging, "staged": self.staged, "swapping": self.swapping}

    def is_pending_on(self, engine: str) -> bool:
        """Whether this engine stages, holds or swaps to the version."""
        return engine in self.staging or engine in self.staged or engine in self.swapping

    def remove(self, engine: str) -> None:
        """Stop waiting for this engine."""
        for engines in (self.staging, self.staged, self.swapping):
            engines.discard(engine)


class LaggingEngines(Struct, frozen=True):
    """Engines that do not serve a version yet, by the phase of its update."""

    version: int
    phase: UpdatePhase
    engines: tuple[str, ...]
    adapter: str = ""

    def __str__(self) -> str:
        whose = f"adapter {self.adapter!r} " if self.adapter else ""
        return f"{whose}v{self.version} is {self.phase} on {', '.join(self.engines)}"


@dataclass(slots=True)
class Publish:
    """A trainer's publish whose version is under way."""

    call_id: int
    version: int
    wait: PublishWait
    is_resolved: bool = False
    """Whether the caller has returned already."""


class TargetVersions(ABC):
    """Versions of one target, of all engines that serve it."""

    def __init__(
        self,
        state: ControlState,
        *,
        timeout_s: float,
        name: str = "",
        wave_engines: int | None = None,
    ) -> None:
        """``name``: the adapter's; empty for the run's weights. ``timeout_s``: time for all engines
        to stage a version and swap to it. ``wave_engines``: number of engines that swap at a time;
        None for all at once."""
        self.name = name
        self._state = state
        self._wave_engines = wave_engines
        self._timeout_s = timeout_s
        self.update: WeightUpdate | None = None
        """Update of the newest published version; None before the first publish."""
        self.kept: WeightUpdate | None = None
        """Newest version released; the channel still holds its tensors."""
        self.newest_version = -1
        """Newest version released by this process, which engines may serve; -1 before the first."""
        self._assigned_version = -1
        """Newest number that was given to a publish and may never be released."""
        self._publishes: list[Publish] = []
        """Publishes that are not over, in the order in which they began."""
        self._is_timer_set = False

    # ------------------------------------------------------------ what a target says itself

    @property
    @abstractmethod
    def _engines(self) -> Collection[str]:
        """Engines that serve the target, in the order in which they joined."""

    @abstractmethod
    def _lacks(self, engine: str, update: WeightUpdate) -> bool:
        """Whether an engine that stages nothing must stage this version."""

    @abstractmethod
    def _stage_messages(self, engine: str, update: WeightUpdate) -> list[Message]:
        """Return the messages that have an engine stage a version."""

    @abstractmethod
    def _swap_message(self, engine: str, update: WeightUpdate) -> Message:
        """Return the message that has an engine swap to a version that it has staged."""

    @abstractmethod
    def _content_of(self, event: PublishRequested) -> WeightContent:
        """Return the content of a version that is published."""

    @property
    def _swaps_available(self) -> int:
        """Number of further engines that may swap now."""
        if self._wave_engines is None:
            return len(self._engines)
        return self._wave_engines - sum(len(update.swapping) for update in self._updates)

    # ------------------------------------------------------------ queries

    @property
    def is_undecided(self) -> bool:
        """Whether the newest version is being staged, so that it may still be abandoned."""
        update = self.update
        return update is not None and not update.is_released and not update.is_withdrawn

    @property
    def is_settled(self) -> bool:
        """Whether no version is under way."""
        return not any(u.staging or u.staged or u.swapping for u in self._updates)

    @property
    def is_over(self) -> bool:
        """Whether no version is under way, and no crash can undo the newest one."""
        is_durable = self.kept is None or self.kept.is_durable
        return self.is_settled and not self.is_undecided and is_durable

    @property
    def is_swapping(self) -> bool:
        """Whether any engine was ordered to swap and has not confirmed it."""
        return any(update.swapping for update in self._updates)

    @property
    def lagging_engines(self) -> list[LaggingEngines]:
        """Engines that do not serve a version under way yet, by version and phase."""
        return [
            LaggingEngines(update.version, phase, tuple(sorted(engines)), self.name)
            for update in self._updates
            for phase, engines in update.phases.items()
            if engines
        ]

    @property
    def buffers(self) -> set[int]:
        """Buffers of the weight channel that hold versions which engines may read."""
        return {b for each in self._updates for b in (each.version, *each.content.buffers)}

    @property
    def staging_version(self) -> int | None:
        """Newest version published, while some engine has not staged it; else None."""
        return self.update.version if self.update is not None and self.is_undecided else None

    def is_pending_on(self, engine: str) -> bool:
        """Whether an engine stages, holds or swaps to a version."""
        return any(update.is_pending_on(engine) for update in self._updates)

    @property
    def _updates(self) -> list[WeightUpdate]:
        """The newest published and the newest released version, once if they are the same."""
        kept = None if self.kept is self.update else self.kept
        return [update for update in (self.update, kept) if update is not None]

    def update_of(self, version: int) -> WeightUpdate | None:
        """Return the update of a version, if it is the newest published or released."""
        return next((update for update in self._updates if update.version == version), None)

    # ------------------------------------------------------------ publishing

    def publish(self, event: PublishRequested) -> None:
        """Have all engines that do not serve the version stage it, in place of older versions.

        Engines may serve the version already if a resumed run publishes it again.
        """
        publish = Publish(event.call, event.version, event.wait)
        self._publishes.append(publish)
        self._state.reserved_for = None
        self.update = WeightUpdate(event, self._content_of(event))
        behind = [name for name in self._engines if self._lacks(name, self.update)]
        for engine in behind:
            for each in self._updates:
                each.remove(engine)  # it stages this version in place of an older one
        self._stage(behind, self.update)
        if event.wait == "none":
            self._assigned_version = event.version
            self._resolve(publish)
        self._set_timer()

    def _resolve(self, publish: Publish) -> None:
        """Return to a publish's caller while the version is still under way."""
        if not publish.is_resolved:
            publish.is_resolved = True
            self._state.end(publish.call_id)

    def _end(self, publish: Publish, error: TidegateError | None = None) -> None:
        self._publishes.remove(publish)
        if not publish.is_resolved:
            self._state.end(publish.call_id, error=error)
        elif error is not None:
            self._state.failure = error

    def cancel(self, call_id: int) -> bool:
        """Abandon the version of a cancelled publish, unless it is released or an earlier publish
        waits for it. Return False if the call is none of this target's publishes."""
        publish = next((each for each in self._publishes if each.call_id == call_id), None)
        if publish is None:
            return False
        self._publishes.remove(publish)
        if publish.version <= self.newest_version:
            return True
        is_newest = self.update is not None and self.update.version == publish.version
        if is_newest and not any(each.version > self.newest_version for each in self._publishes):
            self._withdraw()
            self._stop_timer()
            self.catch_up()
        else:
            self._assigned_version = max(self._assigned_version, publish.version)
        return True

    def _withdraw(self) -> None:
        """Keep engines from swapping to the newest version, unless it is released."""
        if self.update is not None and not self.update.is_released:
            self.update.is_withdrawn = True
            self.update.staged.clear()

    def _fail(self, error: TidegateError) -> None:
        """Fail the publish of the newest version; unless it was released, no engine swaps to it."""
        is_released = self.update is not None and self.update.is_released
        self._withdraw()
        self._stop_timer()
        for each in [p for p in self._publishes if is_released or p.version > self.newest_version]:
            self._end(each, error)
        self.catch_up()

    def advance(self) -> None:
        """Release or fail a version that no engine stages any more; swap; end publishes."""
        update = self.update
        if update is not None and self.is_undecided and not update.staging:
            self._decide(update)
        self._swap()
        if self.is_over:
            self._stop_timer()
            for each in [p for p in self._publishes if p.version <= self.newest_version]:
                self._end(each)

    def _decide(self, update: WeightUpdate) -> None:
        if update.refusals:
            engine, why = next(iter(update.refusals.items()))
            error = f"engine {engine!r} refused {self._title(update.version)}: {why}"
            self._fail(WeightsRefused(error))
            return
        self.newest_version = update.version
        update.is_released = True
        self.kept = update
        for each in self._publishes:
            if each.wait == "staged" and each.version <= update.version:
                self._resolve(each)
        self._state.command(ReleaseVersion(update.version, self.name))

    def on_durable(self, version: int) -> None:
        """Record that no crash can undo the release of a version."""
        update = self.update_of(version)
        if update is not None and update.is_released:
            update.is_durable = True

    def _swap(self) -> None:
        """Have engines swap to a released version that they have staged, once each."""
        outgoing: Outgoing = []
        for update in self._updates:
            # Else a crash would forget the version, and its number would be given to other weights.
            if not update.is_durable or self._swaps_available <= 0:
                continue
            wave = sorted(update.staged)[: self._swaps_available]
            outgoing += [(engine, self._swap_message(engine, update)) for engine in wave]
            update.swapping.update(wave)
            update.staged.difference_update(wave)
        if outgoing:
            self._state.send(outgoing)
            if self._wave_engines is not None and self._is_timer_set:
                self._set_timer()  # each wave has the whole time limit

    # ------------------------------------------------------------ time limit

    def _set_timer(self) -> None:
        self._is_timer_set = True
        self._state.command(SetTimer(self.name, self._timeout_s))

    def _stop_timer(self) -> None:
        if self._is_timer_set:
            self._is_timer_set = False
            self._state.command(StopTimer(self.name))

    def on_timer(self) -> None:
        """Give up the engines that have not staged a version in time, or not swapped."""
        self._is_timer_set = False
        # Engines that have staged a version wait for others, or for the order to swap.
        late = sorted({engine for u in self._updates for engine in u.staging | u.swapping})
        if not late:
            self._set_timer()  # a journal commit or a pause delays the version
            return
        error = self._lagging(late)
        self._fail(error)
        self._state.give_up(error.engines, str(error))
        if not self.is_settled:
            self._set_timer()  # engines of later waves have not swapped yet

    def _lagging(self, engines: Iterable[str]) -> EngineLagging:
        return EngineLagging(
            engines=list(engines),
            wanted_version=self.update.version if self.update else 0,
            waited_s=self._timeout_s,
            where="; ".join(map(str, self.lagging_engines)),
        )

    def _title(self, version: int) -> str:
        return f"adapter {self.name!r} v{version}" if self.name else f"weights v{version}"

    # ------------------------------------------------------------ engines

    def catch_up(self, engine: str | None = None) -> None:
        """Have engines that lack the newest version, and stage no other, stage it.

        Such engines joined late, or dropped their copy for a publish that failed. ``engine``
        restricts this to one engine.
        """
        target = self.kept
        if self.update is not None and not self.update.is_withdrawn:
            target = self.update
        if target is None:
            return
        names = self._engines if engine is None else {engine}.intersection(self._engines)
        behind = [n for n in names if self._lacks(n, target) and n not in target.refusals]
        self._stage([name for name in behind if not self.is_pending_on(name)], target)

    def _stage(self, engines: Iterable[str], update: WeightUpdate) -> None:
        outgoing: Outgoing = []
        for engine in engines:
            update.staging.add(engine)
            outgoing += [(engine, each) for each in self._stage_messages(engine, update)]
        self._state.send(outgoing)

    def join(self, engine: str) -> None:
        """Bring an engine that joins, and any other that lacks it, the newest version."""
        for update in self._updates:
            update.refusals.pop(engine, None)  # a restarted engine may accept it
        self.catch_up()

    def remove(self, engine: str) -> None:
        """Wait for an engine no longer."""
        for update in self._updates:
            update.remove(engine)

    def on_staged(self, engine: str, version: int) -> None:
        """Record that an engine holds a version beside those that it serves."""
        update = self.update_of(version)
        if update is not None and engine in update.staging:
            update.staging.discard(engine)
            if not update.is_withdrawn:
                update.staged.add(engine)

    def on_live(self, engine: str, version: int) -> None:
        """Record that an engine serves a version."""
        if (update := self.update_of(version)) is not None:
            update.remove(engine)

    def on_refused(self, engine: str, version: int, why: str) -> bool:
        """Record that an engine refused a version, and still serves the old one.

        Returns whether the version is released, so that the engine must leave the run.
        """
        update = self.update_of(version)
        if update is None or not update.is_pending_on(engine):
            return False  # abandoned for a newer version, or started twice and swapped already
        update.remove(engine)
        update.refusals[engine] = why
        return update.is_released
