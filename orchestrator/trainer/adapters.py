"""Trainer's handle of one LoRA adapter with weight versions of its own.

``rollouts.adapter("critic")`` returns one. A publish through it stages, swaps and counts alone: no
turn of the base or of another adapter pauses, recomputes KV or ages. Tensors are read by
``weight_sync/adapter_files.py``, and published by the scheduler's :class:`AdapterManager`.
"""

from collections.abc import Awaitable, Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidegate.errors import ConfigError
from tidegate.orchestrator.scheduler.scheduler import Scheduler
from tidegate.orchestrator.trainer.handle import run_blocking
from tidegate.orchestrator.trainer.run import Run
from tidegate.orchestrator.weight_sync.adapter_files import (
    LoadedAdapter,
    checked_name,
    load_adapter,
)
from tidegate.orchestrator.weight_sync.state_dict import named_buffers
from tidegate.transport.messages import UpdateWeights
from tidegate.transport.weight_channels.checksums import checksums, with_checksums
from tidegate.transport.weight_channels.cuda_ipc import CudaIpcSender

if TYPE_CHECKING:
    import torch

Do = Callable[[Callable[[Scheduler], Awaitable[Any]]], Awaitable[Any]]
"""Runs work on the run's loop, and waits for it."""


class AdapterHandle:
    """One adapter of a run, for its trainer. Turns select it by ``generate(adapter=name)``."""

    def __init__(self, run: Run, name: str, do: Do) -> None:
        self._run = run
        self._do = do
        self.name = checked_name(name)
        """Name of the adapter in its run."""
        self._version = 0

    @property
    def version(self) -> int:
        """Number of the newest version that this handle published; 0 before the first."""
        return self._version

    async def publish(
        self, adapter: "Mapping[str, torch.Tensor] | str | Path", *, config: object = None
    ) -> int:
        """Bring new tensors of the adapter to the engines; return their version.

        The arguments are those of :meth:`Rollouts.publish_adapter`. Versions count this adapter's
        publishes from 1. Returns once every engine serves the version. The run's ``pause_mode`` and
        ``kv_policy`` apply to the turns of this adapter alone; with ``wait`` its running turns end
        under the version that they have, and new ones use the new one at once. Publishes of one
        adapter run one after another, those of several side by side.

        Raises:
            ConfigError: it is not a LoRA adapter, or an engine or the weight channel cannot serve
                adapters with versions of their own.
            WeightsRefused: it does not fit the model; the old version stays live.
            EngineLagging: an engine did not receive it in time, and was removed.
        """
        loaded = load_adapter(adapter, config)

        def write(buffer: int, keep: Collection[int]) -> list[UpdateWeights]:
            return write_adapter(self._run, buffer, loaded, keep)

        async def work(scheduler: Scheduler) -> int:
            if self.name in scheduler.control.state.base_adapters:
                raise ConfigError(
                    f"adapter {self.name!r} is a part of the run's weights, because "
                    f"publish_adapter published it; unload it first, or use another name"
                )
            return await scheduler.engines.adapters.publish(self.name, loaded.scale, write)

        version: int = await self._do(work)
        self._version = max(self._version, version)
        return version

    async def pin(self, version: int | None = None) -> int:
        """Keep a version (default: the live one) until each pin of it is undone; return it.

        Turns use it by ``generate(adapter=name, adapter_version=version)``, whatever is published
        meanwhile.

        Raises:
            WeightsRefused: the version is not there any more.
        """

        async def work(scheduler: Scheduler) -> int:
            return scheduler.engines.adapters.pin(self.name, version)

        pinned: int = await self._do(work)
        return pinned

    async def unpin(self, version: int) -> None:
        """Undo one :meth:`pin`. Engines drop the version once they need the memory."""

        async def work(scheduler: Scheduler) -> None:
            scheduler.engines.adapters.unpin(self.name, version)

        await self._do(work)

    async def unload(self) -> None:
        """Have engines drop the adapter, pinned versions included. Turns that use it are refused.

        A later publish continues the version numbers.

        Raises:
            WeightsRefused: it is not loaded.
        """

        async def work(scheduler: Scheduler) -> None:
            await scheduler.engines.adapters.unload(self.name)

        await self._do(work)


class SyncAdapterHandle:
    """Sync variant of :class:`AdapterHandle`, whose calls block."""

    def __init__(self, handle: AdapterHandle) -> None:
        self._handle = handle

    @property
    def name(self) -> str:
        """As :attr:`AdapterHandle.name`."""
        return self._handle.name

    @property
    def version(self) -> int:
        """As :attr:`AdapterHandle.version`."""
        return self._handle.version

    def publish(
        self, adapter: "Mapping[str, torch.Tensor] | str | Path", *, config: object = None
    ) -> int:
        """As :meth:`AdapterHandle.publish`."""
        return run_blocking(self._handle.publish(adapter, config=config))

    def pin(self, version: int | None = None) -> int:
        """As :meth:`AdapterHandle.pin`."""
        return run_blocking(self._handle.pin(version))

    def unpin(self, version: int) -> None:
        """As :meth:`AdapterHandle.unpin`."""
        run_blocking(self._handle.unpin(version))

    def unload(self) -> None:
        """As :meth:`AdapterHandle.unload`."""
        run_blocking(self._handle.unload())


def write_adapter(
    run: Run, buffer: int, adapter: LoadedAdapter, keep: Collection[int]
) -> list[UpdateWeights]:
    """Write an adapter to the run's weight channel; return messages that locate it. Blocks."""
    assert not isinstance(run.channel, CudaIpcSender), "refused before"
    buffers = named_buffers(adapter.tensors)
    sums = checksums(buffers) if run.settings.weights.weight_checksums else {}
    chunks = run.channel.write(buffer, buffers, keep=keep)
    return with_checksums(chunks, sums) if sums else chunks
