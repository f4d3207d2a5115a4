"""LoRA adapters with weight versions of their own: which versions are in memory, live, and in use.

The engine's scheduler asks for each turn's version; the engine loop adds loaded tensors, which are
opaque values here. At most ``versions_max`` versions stay in memory, besides those being published.
A version that turns use stays even beyond this limit: after a swap, pinned turns still use the old
version. Of the other versions, the least recently used is dropped first.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tidegate.transport.messages import LIVE_ADAPTER, HeldAdapter

if TYPE_CHECKING:
    from tidegate.engine.execution.step_layout import AdapterVersion

VERSIONS_MAX_DEFAULT = 64
"""Default limit of adapter versions in memory: as many as turns run at once by default."""


@dataclass(slots=True)
class _Held:
    """One version in memory."""

    tensors: object
    users: int = 0
    """Number of waiting and running sequences that use it."""
    is_staged: bool = False
    """Whether it was loaded to be made live and has not been: then it is not dropped."""


class AdapterVersions:
    """Adapter versions of one engine."""

    def __init__(self, versions_max: int = 0) -> None:
        """``versions_max``: limit of versions in memory; 0: the engine serves no such adapters."""
        self.versions_max = versions_max
        self.live: dict[str, int] = {}
        """Live version of each adapter, in memory or not."""
        self._held: OrderedDict[AdapterVersion, _Held] = OrderedDict()
        """Versions in memory, least recently used first."""
        self._requested: set[AdapterVersion] = set()
        """Versions that the orchestrator was asked for and has not sent."""
        self.in_use = 0
        """Number of sequences that use any version."""

    # ------------------------------------------------------------ queries

    @property
    def live_adapters(self) -> list[HeldAdapter]:
        """Live versions, for a hello."""
        return [HeldAdapter(name, version) for name, version in sorted(self.live.items())]

    def key_of(self, name: str, version: int) -> "AdapterVersion":
        """Return the version that a turn asks for: the live one for :data:`LIVE_ADAPTER`, which is
        returned unchanged if none is live."""
        return name, (self.live.get(name, LIVE_ADAPTER) if version == LIVE_ADAPTER else version)

    def is_held(self, key: "AdapterVersion") -> bool:
        """Whether this version is in memory."""
        return key in self._held

    def tensors(self, key: "AdapterVersion") -> object:
        """Return the tensors of a version in memory."""
        return self._held[key].tensors

    @property
    def held(self) -> "list[AdapterVersion]":
        """Versions in memory, least recently used first."""
        return list(self._held)

    # ------------------------------------------------------------ memory

    def request(self, key: "AdapterVersion") -> bool | None:
        """Request a version that is not in memory, and free memory for it.

        Return True if the orchestrator must be asked, False if it was asked before, None if all
        versions in memory are in use.
        """
        if key in self._requested:
            return False
        self._drop_idle(self.versions_max - 1 - len(self._requested))
        if self._size + len(self._requested) >= self.versions_max:
            return None
        self._requested.add(key)
        return True

    def add(
        self,
        key: "AdapterVersion",
        tensors: object,
        *,
        is_live: bool = False,
        is_staged: bool = False,
    ) -> None:
        """Keep a loaded version. ``is_live``: it is its adapter's live one, loaded again;
        ``is_staged``: it is about to be made live, and is not dropped before."""
        name, version = key
        self._requested.discard(key)
        if is_live:
            self._requested.discard((name, LIVE_ADAPTER))
            self.live[name] = max(version, self.live.get(name, 0))
        held = self._held.setdefault(key, _Held(tensors))  # else a second answer to one need
        held.is_staged |= is_staged
        self._drop_idle(self.versions_max)

    def swap(self, key: "AdapterVersion") -> None:
        """Make a version in memory its adapter's live one; :meth:`end_swap` follows.

        Requests for the adapter's other versions are dropped, because turns that follow the live
        version need them no more; those of pinned turns are made again.
        """
        name, version = key
        self._requested = {each for each in self._requested if each[0] != name}
        self.live[name] = version

    def end_swap(self, key: "AdapterVersion") -> None:
        """End a swap: all sequences that follow the live version use it, so others may be
        dropped."""
        self._held[key].is_staged = False
        self._held.move_to_end(key)
        self._drop_idle(self.versions_max)

    def use(self, key: "AdapterVersion") -> None:
        """Count a sequence that uses a version in memory."""
        held = self._held[key]
        held.users += 1
        self.in_use += 1
        self._held.move_to_end(key)

    def release(self, key: "AdapterVersion") -> None:
        """Uncount a sequence that used a version."""
        self._held[key].users -= 1
        self.in_use -= 1
        self._drop_idle(self.versions_max)

    def remove(self, key: "AdapterVersion") -> None:
        """Drop a version that no sequence uses; harmless if it is not in memory."""
        self._requested.discard(key)
        self._held.pop(key, None)
        if self.live.get(key[0]) == key[1]:
            del self.live[key[0]]

    def versions_of(self, name: str) -> "list[AdapterVersion]":
        """Return an adapter's versions that are in memory or were asked for."""
        return [key for key in (*self._held, *self._requested) if key[0] == name]

    def forget_orchestrator(self) -> None:
        """Drop the state that a lost orchestrator owned: versions not made live, and open
        requests."""
        self._requested.clear()
        for key in [key for key, held in self._held.items() if held.is_staged and not held.users]:
            del self._held[key]
        for held in self._held.values():
            held.is_staged = False

    @property
    def _size(self) -> int:
        """Number of versions in memory, without those that are about to be made live."""
        return sum(not held.is_staged for held in self._held.values())

    def _drop_idle(self, count: int) -> None:
        """Drop idle versions, least recently used first, until at most ``count`` are left."""
        excess = self._size - max(0, count)
        if excess <= 0:
            return
        idle = [key for key, held in self._held.items() if not held.users and not held.is_staged]
        for key in idle[:excess]:
            del self._held[key]
