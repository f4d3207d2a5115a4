"""Weights that samplers use: saved adapters, which engines hold as pinned versions while in use.

:class:`EngineAdapters` publishes a saved adapter when a sample first needs it, and unpins the least
recently used ones.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tidegate.orchestrator.trainer.adapters import write_adapter
from tidegate.orchestrator.weight_sync.adapter_files import LoadedAdapter, load_adapter
from tidegate.serving.tinker.checkpoints import CheckpointFacts
from tidegate.transport.messages import UpdateWeights

if TYPE_CHECKING:
    from tidegate.orchestrator.trainer.run import Run
    from tidegate.orchestrator.weight_sync.adapters import AdapterManager

PINNED_MAX = 64
"""Saved adapters that stay pinned in the run's weight channel. Others are read from disk again."""


@dataclass(slots=True, eq=False)
class SavedAdapter:
    """Immutable weights of one model at one step, in a PEFT directory."""

    facts: CheckpointFacts
    directory: Path
    version: int | None = None
    """The engines' version of it; None while it is not pinned."""
    users: int = 0
    """Samples that use it now."""

    @property
    def name(self) -> str:
        """Name of the adapter on the engines, which is the model's id."""
        return self.facts.run_id


@dataclass(frozen=True, slots=True)
class Sampler:
    """Weights of one sampling session."""

    sampler_id: str
    """Id of the sampling session."""
    tenant: str
    saved: SavedAdapter | None = None
    """For a snapshot; None for the base model and for in-flight weights."""
    live_adapter: str = ""
    """Name of the adapter whose live version it follows; empty unless in flight."""
    model_path: str | None = None
    """The ``tinker://`` path that it was created from."""
    other_model: str | None = None
    """Name of the base model, if that is another than the trained one."""


@dataclass(frozen=True, slots=True)
class AdapterVersion:
    """Weights that a sample uses, in the run's terms."""

    adapter: str = ""
    """Name of the adapter; empty for the base model."""
    version: int | None = None
    """A pinned version; None for the live one."""
    cache_salt: str = ""
    """Prefix-cache namespace."""


@dataclass(slots=True)
class EngineAdapters:
    """Adapters of the samplers, on the engines of a run. Methods run on the run's loop."""

    run: "Run"
    manager: "AdapterManager"
    steps: dict[tuple[str, int], int] = field(default_factory=dict)
    """Optimizer steps in the weights, by the adapter's name and the engines' version."""
    _pinned: dict[SavedAdapter, None] = field(default_factory=dict)
    """Pinned ones; those used last are last."""
    _locks: dict[str, asyncio.Lock] = field(default_factory=dict)
    """By adapter name: between a publish and its pin no other may replace the version."""

    @contextlib.asynccontextmanager
    async def use(self, sampler: Sampler) -> AsyncIterator[AdapterVersion]:
        """Keep a sampler's weights on the engines within the context."""
        saved = sampler.saved
        if saved is None:
            salt = sampler.sampler_id if sampler.live_adapter else ""
            yield AdapterVersion(sampler.live_adapter, None, salt)
            return
        saved.users += 1
        try:
            version = await self.load(saved)
            yield AdapterVersion(saved.name, version)
        finally:
            saved.users -= 1

    async def load(self, saved: SavedAdapter) -> int:
        """Bring a saved adapter to the engines, unless they have it; return its version there."""
        async with self._lock(saved.name):
            if saved.version is None:
                loaded = await asyncio.to_thread(load_adapter, saved.directory)
                saved.version = await self._publish(saved.name, loaded, saved.facts.steps)
                self.manager.pin(saved.name, saved.version)
            self._pinned.pop(saved, None)
            self._pinned[saved] = None
            version = saved.version
        self._unpin_surplus()
        return version

    async def publish_live(self, name: str, directory: Path, step: int) -> None:
        """Replace the live version that a model's in-flight samplers follow by a PEFT directory."""
        async with self._lock(name):
            loaded = await asyncio.to_thread(load_adapter, directory)
            await self._publish(name, loaded, step)

    async def unload(self, name: str) -> None:
        """Have engines drop all versions of an adapter that no sampler needs any more."""
        async with self._lock(name):
            for saved in [each for each in self._pinned if each.name == name]:
                saved.version = None
                del self._pinned[saved]
            if name in self.manager.state.loaded:
                await self.manager.unload(name)
        self.steps = {key: step for key, step in self.steps.items() if key[0] != name}

    async def _publish(self, name: str, loaded: LoadedAdapter, step: int) -> int:
        def write(buffer: int, keep: Collection[int]) -> list[UpdateWeights]:
            return write_adapter(self.run, buffer, loaded, keep)

        version = await self.manager.publish(name, loaded, write)
        self.steps[name, version] = step
        return version

    def _unpin_surplus(self) -> None:
        idle = [saved for saved in self._pinned if not saved.users]
        for saved in idle[: max(0, len(self._pinned) - PINNED_MAX)]:
            assert saved.version is not None
            self.manager.unpin(saved.name, saved.version)
            saved.version = None
            del self._pinned[saved]

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())
