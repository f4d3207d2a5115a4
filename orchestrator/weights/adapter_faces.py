"""How does a trainer hand a run its LoRA adapters? For async code, and for sync.

How one gets to the engines is :mod:`tidegate.orchestrator.weights.adapter_call`'s.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tidegate.orchestrator.faces import AsyncFace, SyncFace
from tidegate.orchestrator.weights.adapter_call import AdapterCall, UnloadCall
from tidegate.orchestrator.weights.publishing import PublishWait

if TYPE_CHECKING:
    from pathlib import Path

    import torch


class AsyncAdapters(AsyncFace):
    """Adapters come and go, for async code."""

    async def publish_adapter(
        self,
        name: str,
        adapter: "Mapping[str, torch.Tensor] | str | Path",
        *,
        config: object = None,
        wait: PublishWait = "live",
    ) -> int:
        """Bring a LoRA adapter to the engines, or new tensors for one; return the version.

        ``adapter`` is a directory that PEFT's ``save_pretrained`` wrote; or tensors, as
        ``peft.get_peft_model_state_dict`` gives them, with their ``config``: a ``LoraConfig``, or a
        mapping with ``r`` and ``lora_alpha``. Only these travel. It is a version like any other,
        whose weights are the version's before and this. Turns ask for it by
        ``generate(adapter=name)``, or all do, by ``serve(adapter=name)``.

        Raises:
            ConfigError: it is no LoRA adapter, or asks for more than engines have.
            WeightsRefused, EngineLagging, PublishDropped: as :meth:`Rollouts.publish`.
        """
        self._mark("train")
        call = AdapterCall(self._running, name, adapter, config, wait)
        try:
            return await self._do(call.run)
        finally:
            self._published(call)

    async def unload_adapter(self, name: str, *, wait: PublishWait = "live") -> int:
        """Have engines forget an adapter; return the version that hasn't got it.

        Turns that are running with it are refused.

        Raises:
            WeightsRefused: there is none of this name; else as :meth:`Rollouts.publish`.
        """
        self._mark("train")
        call = UnloadCall(self._running, name, wait)
        try:
            return await self._do(call.run)
        finally:
            self._published(call)


class SyncAdapters(SyncFace):
    """The same, for code that is not async."""

    def publish_adapter(
        self,
        name: str,
        adapter: "Mapping[str, torch.Tensor] | str | Path",
        *,
        config: object = None,
        wait: PublishWait = "live",
    ) -> int:
        """As :meth:`AsyncAdapters.publish_adapter`."""
        self._mark("train")
        call = AdapterCall(self._running, name, adapter, config, wait)
        try:
            return self._do(call.run)
        finally:
            self._published(call)

    def unload_adapter(self, name: str, *, wait: PublishWait = "live") -> int:
        """As :meth:`AsyncAdapters.unload_adapter`."""
        self._mark("train")
        call = UnloadCall(self._running, name, wait)
        try:
            return self._do(call.run)
        finally:
            self._published(call)
